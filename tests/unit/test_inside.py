"""The view of a job that is being recorded, from journals that this file writes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

import fullwire as fw
from fullwire.answers import inside
from fullwire.answers.inside import watching_recording
from fullwire.cli.live import recording_shown
from fullwire.recorder.inside.journal import Journal, Note
from fullwire.report.as_data import watched_object
from tests.conftest import Cli

MS = 1_000_000


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Write what two ranks have noted so far: 40 steps of 100 ms, 60 of them an all-reduce."""
    directory = tmp_path / "job.run.recording"
    directory.mkdir()
    for rank in (0, 1):
        journal = Journal(str(directory))
        journal.define(kind="identity", rank=rank, workers=2, backend="gloo", torch="2.13.0")
        journal.define(kind="parameter", number=0, bytes=4_000_000)
        journal.define(
            kind="signature", number=0, op="allreduce", dtype="float32", bytes=4_000_000, group="0"
        )
        for step in range(40):
            begin = 100 * MS * step
            journal.note(Note.BACKWARD, 0, begin + 5 * MS, 90 * MS)
            journal.note(Note.GRADIENT, 0, begin + 34 * MS, 0)
            journal.note(Note.ISSUE, step, begin + 35 * MS, 0)
            journal.note(Note.END, step, begin + 95 * MS, 0)
            journal.note(Note.OPTIMIZER, 0, begin + 96 * MS, 3 * MS)
        journal.write()
    return directory


def test_a_recording_that_goes_on_has_the_view_of_a_watch(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "_EVERY_S", 0.01)
    windows = watching_recording(recording, bandwidth="1Gbps", alerts=["step > 50ms"])
    window = next(windows)
    assert window.explanation is not None
    assert window.explanation.step_s == pytest.approx(0.1, rel=0.02)
    assert window.kind == window.explanation.verdict.kind
    assert window.sentence == window.explanation.verdict.sentence
    assert len(window.alerts) == 1
    data = watched_object(window)
    assert data["source"] == "inside"
    assert all(low == high for low, high in data["ranges"].values())
    for rank in window.ranks:
        assert 0.2 < rank.computing < 0.5
        assert rank.sending + rank.waiting > 0.4
    shutil.rmtree(recording)  # the job has ended
    assert list(windows) == []


def test_recording_live_tells_the_verdict_when_it_changes(
    recording: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inside, "_EVERY_S", 0.01)
    with recording_shown(recording):
        until_s = time.monotonic() + 20
        told = ""
        while not told and time.monotonic() < until_s:
            time.sleep(0.05)
            told += capsys.readouterr().err
    assert " s: " in told or " ms: " in told
    assert len(told.splitlines()) == 1


def test_a_folder_that_is_no_recording_is_refused(tmp_path: Path, cli: Cli) -> None:
    refused = cli("watch", "--recording", str(tmp_path / "none"))
    assert refused.returncode == 2
    assert "expected the folder of a recording that goes on" in refused.stderr
    with pytest.raises(fw.UsageError, match=r"job\.run\.recording"):
        next(watching_recording(tmp_path / "none"))
