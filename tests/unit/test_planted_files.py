"""Files that another user may have put into our folders are refused without waiting."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fullwire.crew import _connected
from fullwire.errors import DamagedInput
from fullwire.recorder.journals import files_in


def _a_link(place: Path) -> None:
    place.symlink_to("/etc/passwd")


def _a_pipe(place: Path) -> None:
    os.mkfifo(place)


def _a_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(place))


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
