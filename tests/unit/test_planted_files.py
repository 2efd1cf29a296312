"""Files that another user may have put into our folders are refused without waiting."""

from __future__ import annotations

import json
import os
import random
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fullwire.crew import _connected
from fullwire.errors import DamagedInput
from fullwire.recorder.inside.journal import BLOCK, DEFINITIONS, HEADER_BYTES, TAG
from fullwire.recorder.journals import blocks_in, files_in
from fullwire.recorder.record import join, record, record_part
from tests.builders import a_process


def _a_link(place: Path) -> None:
    place.symlink_to("/etc/passwd")


def _a_pipe(place: Path) -> None:
    os.mkfifo(place)


def _a_socket(place: Path) -> None:
    # Names of sockets must be short, and a folder of tests may have a long one.
    folder = os.open(place.parent, os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{folder}/{place.name}")
    os.close(folder)


def _a_link_to_a_folder(place: Path) -> None:
    place.symlink_to("/etc")


PLANTED = [_a_link, _a_pipe, _a_socket, _a_link_to_a_folder]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_recording_with_what_is_no_file_is_refused(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    plant(tmp_path / "host-1.notes")
    with pytest.raises(DamagedInput, match="it is "):
        files_in([tmp_path], ".notes")


@pytest.mark.parametrize("plant", PLANTED[:3])
@pytest.mark.parametrize("name", ["job.json", "recorder.json", "x.part", "x.journal", "x.samples"])
def test_no_file_of_a_recording_is_opened_where_something_was_planted(
    tmp_path: Path, plant: Callable[[Path], None], name: str
) -> None:
    directory = tmp_path / "x.run.recording"
    directory.mkdir()
    (directory / "y.part").write_text("{}")
    plant(directory / name)
    for refused in (
        lambda: join([directory], tmp_path / "y.run"),
        lambda: record(["true"], tmp_path / "x.run"),
        lambda: record_part(["true"], tmp_path / "x.run"),
    ):
        with pytest.raises(DamagedInput, match=f"{name}: it is "):
            refused()


def test_a_file_that_comes_while_a_recording_is_removed_loses_no_run(tmp_path: Path) -> None:
    late = tmp_path / "x.run.recording" / "late"
    writing = f"(while : > {late}; do :; done) 2>&- >&- & sleep 0.05"
    assert record(["sh", "-c", writing], tmp_path / "x.run").exit_status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.run"]


@pytest.mark.parametrize("text", ["[]", "3", '{"job": 3}', "{" * 5000, '{"job": ' * 5000, "\0"])
def test_the_note_of_a_part_that_cannot_be_is_refused(tmp_path: Path, text: str) -> None:
    directory = tmp_path / "x.run.recording"
    directory.mkdir()
    (directory / "y.part").write_text(text)
    with pytest.raises(DamagedInput, match="the note of a part of a job"):
        join([directory], tmp_path / "y.run")
    with pytest.raises(DamagedInput, match="the note of a part of a job"):
        record_part(["true"], tmp_path / "x.run")


def test_a_recording_with_whole_blocks_of_nonsense_is_a_run_or_refused(tmp_path: Path) -> None:
    directory = tmp_path / "x.run.recording"
    directory.mkdir()
    a_process(directory, steps=3).close()
    [journal] = directory.glob("*.journal")
    whole = journal.read_bytes()
    blocks = list(blocks_in(journal, len(whole)))
    chance, refused = random.Random(1), 0
    for _ in range(60):
        at = chance.randrange(len(blocks))
        kind, payload = blocks[at]
        if kind == DEFINITIONS:
            definitions = json.loads(payload)
            key = chance.choice(sorted(definitions[-1]))
            definitions[-1][key] = chance.choice([None, [], {}, "x", -1, 2**70, 1e308])
            changed = json.dumps(definitions).encode()
            changed = chance.choice([changed, b"[" * 5000])
        else:
            place = chance.randrange(len(payload))
            changed = payload[:place] + chance.randbytes(1) + payload[place + 1 :]
        made = [*blocks[:at], (kind, changed), *blocks[at + 1 :]]
        journal.write_bytes(
            whole[:HEADER_BYTES]
            + b"".join(BLOCK.pack(TAG, k, len(p), zlib.crc32(p)) + p for k, p in made)
        )
        try:
            join([directory], tmp_path / "y.run", replace=True)
        except DamagedInput:
            refused += 1
    assert refused


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_a_file_of_another_user_is_refused_unless_the_folder_is_his(tmp_path: Path) -> None:
    place = tmp_path / "host-1.notes"
    place.write_bytes(b"")
    os.chown(place, 12345, -1)
    with pytest.raises(DamagedInput, match="it is user 12345's"):
        files_in([tmp_path], ".notes")
    os.chown(tmp_path, 12345, -1)
    assert files_in([tmp_path], ".notes") == [place]


def test_ray_s_token_is_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, new = tmp_path / "auth_token", tmp_path / "new"
    there.write_text("a token that Ray wrote earlier")
    there.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(there))
    ray = SimpleNamespace(
        init=lambda **_: new.write_text("a token that Ray writes"),
        shutdown=lambda: None,
        _private=SimpleNamespace(worker=SimpleNamespace()),
    )
    with _connected(ray, address="local"):
        pass
    assert there.stat().st_mode & 0o777 == 0o600
    assert new.stat().st_mode & 0o777 == 0o600
