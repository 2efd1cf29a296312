"""The view of a job that is being recorded, from journals that this file writes."""

from __future__ import annotations

import shutil
import subprocess
import sys
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
        journal.define(kind="identity", rank=rank, workers=2, backend="gloo")
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


def test_processor_time_of_a_child_that_ended_stays_and_nobody_asks_for_it_again(
    tmp_path: Path,
) -> None:
    """A job may start loading processes in each of thousands of epochs."""
    job = (
        "import subprocess, sys, time\n"
        "from fullwire.recorder.inside import processors\n"
        "from fullwire.recorder.inside.journal import Journal, Note\n"
        "processors._EVERY_NS = processors._LIST_EVERY_NS = 0\n"
        "journal = Journal(sys.argv[1])\n"
        "noted = []\n"
        "def note(kind, used_ns, *rest):\n"
        "    if kind == Note.CHILDREN: noted.append(used_ns)\n"
        "journal.note = note\n"
        "own = processors.Processors(journal)\n"
        "for _ in range(3):\n"
        "    burns = 'import time\\nwhile time.process_time() < 0.2: pass\\nprint(); input()'\n"
        "    child = subprocess.Popen([sys.executable, '-c', burns], stdin=-1, stdout=-1)\n"
        "    child.stdout.readline()\n"
        "    own.note_if_due()\n"
        "    child.communicate(b'\\n')\n"
        "    own.note_if_due()\n"
        "assert not own._children_ns, own._children_ns\n"
        "assert 0.6e9 <= sum(noted) < 1.2e9, noted\n"
    )
    command = [sys.executable, "-c", job, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
