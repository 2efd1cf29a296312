"""Recordings do not interfere: live ones are left alone, and late processes are followed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fullwire.errors import UsageError
from fullwire.recorder import sampler
from fullwire.recorder.record import record
from fullwire.run.store import read_run
from tests.conftest import Cli
from tests.lab.test_lab import eventually
from tests.torch.test_record import JOBS, UNCOMPILED, needs_torch, solo, span_count

RECORD = [sys.executable, "-m", "fullwire", "record", "-o"]


def test_a_live_recording_is_named_with_its_process_and_left_alone(
    cli: Cli, tmp_path: Path
) -> None:
    place = tmp_path / "job.run"
    with subprocess.Popen([*RECORD, place, "--", "cat"], stdin=subprocess.PIPE) as first:
        eventually(lambda: (tmp_path / "job.run.recording" / "job.json").exists())
        for part in ((), ("--part",)):
            second = cli("record", "-o", place, *part, "--", "true")
            assert second.returncode == 2
            assert f"is being recorded into by process {first.pid}" in second.stderr
            assert "remove" not in second.stderr
        assert first.stdin is not None
        first.stdin.close()
        assert first.wait() == 0
    assert read_run(place).facts.exit_status == 0


def test_a_recording_whose_process_is_gone_is_to_be_joined(cli: Cli, tmp_path: Path) -> None:
    with subprocess.Popen([*RECORD, tmp_path / "job.run", "--", "sleep", "60"]) as first:
        eventually(lambda: (tmp_path / "job.run.recording" / "job.json").exists())
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
        eventually(lambda: bool(children.read_text().split()))
        [job] = children.read_text().split()
        first.kill()
        first.wait()
        os.kill(int(job), 9)
    again = cli("record", "-o", tmp_path / "job.run", "--", "true")
    assert "fullwire join" in again.stderr


@needs_torch
def test_a_trainer_that_outlives_the_command_is_followed_to_its_end(tmp_path: Path) -> None:
    train = f"{sys.executable} {UNCOMPILED} {JOBS / 'solo.py'} endless"
    said = f"until [ -s {tmp_path / 'said'} ]; do sleep 0.1; done"
    script = f"{train} > {tmp_path / 'said'} & trainer=$!; "
    script += f"({said}; sleep 5; kill $trainer) & {said}; sleep 1"
    done = subprocess.run(
        [*RECORD, tmp_path / "job.run", "--", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the command has ended. 1 of its processes still record" in done.stderr
    run = read_run(tmp_path / "job.run")
    assert any("before its processes" in each for each in run.missing)
    assert span_count(run, "host", "step") > 85  # some 80 by when the command ended


@pytest.mark.alone  # torch has to be on its way soon after the command ended
@needs_torch
def test_a_trainer_that_has_yet_to_load_torch_is_followed_too(tmp_path: Path) -> None:
    train = " ".join(map(str, solo("plain")))
    done = subprocess.run(
        [*RECORD, tmp_path / "job.run", "--", "sh", "-c", f"{train} > /dev/null & sleep 0.1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert span_count(read_run(tmp_path / "job.run"), "host", "step")


@needs_torch
def test_a_sitecustomize_that_raises_does_not_lose_the_recording(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("raise ValueError('mine')")
    done = subprocess.run(
        [*RECORD, tmp_path / "job.run", "--", *solo("plain")],
        capture_output=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
    )
    assert b"mine" in done.stderr  # as Python prints it without the recorder
    assert span_count(read_run(tmp_path / "job.run"), "host", "step")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_leave_a_run(tmp_path: Path, closed: str) -> None:
    command = f"{sys.executable} -m fullwire record -o {tmp_path / 'job.run'} -- true {closed}"
    assert subprocess.run(["sh", "-c", command], timeout=60, check=False).returncode == 0
    assert read_run(tmp_path / "job.run").facts.exit_status == 0


def test_a_name_that_is_too_long_is_found_before_the_job(tmp_path: Path) -> None:
    for length in (240, 250, 300):
        with pytest.raises(UsageError, match="the name of a run may be"):
            record(["touch", str(tmp_path / "it-ran")], tmp_path / ("x" * length))
    record(["true"], tmp_path / ("x" * 220))
    assert not (tmp_path / "it-ran").exists()


def test_what_begins_late_in_a_recording_does_not_lose_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler may make its file while the recording is being removed."""
    removed = []
    remove = os.rmdir

    def late(path: str, **options: int) -> None:
        place = tmp_path / "job.run.recording"
        removed.append(path)
        if place.is_dir():
            (place / "late.samples").write_bytes(b"")
        remove(path, **options)

    monkeypatch.setattr("os.rmdir", late)
    assert record(["true"], tmp_path / "job.run").run.facts.exit_status == 0
    assert removed
    assert not (tmp_path / "job.run.recording").exists()


def test_nobody_else_foresees_the_sampler_s_name(tmp_path: Path) -> None:
    held = [sampler._secret(str(tmp_path)) for _ in range(2)]
    assert held[0] == held[1]
    assert len(held[0]) == 32
    [secret] = tmp_path.iterdir()
    assert secret.stat().st_mode & 0o777 == 0o600
    with sampler._the_only_one(os.getpid(), str(tmp_path), "sampler", lambda: None) as is_ours:
        assert is_ours
        names = Path("/proc/net/unix").read_text()
        other = hashlib.sha256(str(tmp_path).encode()).hexdigest()
        assert other not in names
