"""One trial of a job after another: it is recorded with some fixes, within a budget of time.

Each recording ends after the same number of steps. The first may take half of the budget; a later
one that takes several times as long hangs.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fullwire.answers.compare import FEWEST_STEPS, paces_s
from fullwire.answers.fixing import NONE, notes_in, problem_of
from fullwire.answers.laboratory import record_in_lab
from fullwire.errors import UsageError
from fullwire.findings.finding import Finding
from fullwire.fixes import Seen
from fullwire.fixes._in_job import LOOK_VARIABLE, NOTES_VARIABLE
from fullwire.fixes._recipe import Applied
from fullwire.lab.description import LabDescription
from fullwire.recorder.launch import TOO_LONG
from fullwire.recorder.record import record
from fullwire.run.run import Run

_FIRST_STEPS = 30
_SLOWER = 3.0  # times as long as the first recording: a trial that takes longer hangs
_LEAST_LIMIT_S = 30.0


@contextmanager
def interrupts_noted(job: TrialJob) -> Iterator[None]:
    """Let Ctrl-C end the recording at work, and with it the search."""

    def interrupted(number: int, frame: Any) -> None:
        job.is_interrupted = True

    # In a lab, Ctrl-C has to end the ranks on their hosts: the recording does so.
    if job.lab is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, kw_only=True)
class TrialRecording:
    """A recording: its steps, and the notes of its processes."""

    run: Run
    path: Path
    seen: Seen
    problem: Finding | None  # why the job does not have the last of its fixes


@dataclass(kw_only=True)
class TrialJob:
    """The job, recorded with some fixes for a number of steps."""

    command: Sequence[str]
    folder: Path
    lab: LabDescription | None
    scratch: Path
    steps: int | None
    end_s: float = math.inf
    took_s: float = 0.0  # the longest recording
    limit_s: float | None = None
    is_interrupted: bool = False
    made: int = 0

    @property
    def left_s(self) -> float:
        """Return the time left of the budget."""
        return self.end_s - time.monotonic()

    def allows(self, recordings: int) -> bool:
        """Say whether the budget has time for so many recordings."""
        return recordings * self.took_s <= self.left_s

    def recorded(self, fixes: Sequence[Applied]) -> TrialRecording:
        """Record the job with fixes; refuse a run without steps, with the job's last words."""
        self.made += 1
        name = f"trial-{self.made:02}"
        log, path = self.folder / f"{name}.log", self.folder / f"{name}.run"
        # The first recording may take half of the budget; then it is known how long one takes.
        limit_s = max(self.left_s / 2, 1.0) if self.limit_s is None else self.limit_s
        words = [sys.executable, "-m", "fullwire", "apply"]
        words += [",".join(map(str, fixes)) or NONE]
        words += ["--steps", str(self.steps or _FIRST_STEPS), "--within", f"{limit_s:.0f}s"]
        # All ranks' output goes into one file: a tuning has its own lines.
        quiet = ["sh", "-c", 'cd "$1" && shift && exec "$@" >>"$0" 2>&1', str(log.resolve())]
        whole = [*quiet, str(self.scratch.resolve()), *words, "--", *self._from_anywhere()]
        notes = self.folder / f"{name}.notes"
        notes.mkdir()
        began_s = time.monotonic()
        os.environ |= {NOTES_VARIABLE: str(notes.resolve()), LOOK_VARIABLE: "1"}
        try:
            if self.lab is None:
                done = record(whole, path)
            else:
                done = record_in_lab(self.lab, whole, path, probe=False)
        finally:
            del os.environ[NOTES_VARIABLE], os.environ[LOOK_VARIABLE]
            told = notes_in(notes)
            looked = {  # each rank of this host
                note["rank"]: msgspec.convert(note["saw"], Seen)
                for notes_of_one in told
                for note in notes_of_one
                if "saw" in note
            }
            problem = problem_of(fixes[-1], len(looked), told) if fixes else None
            shutil.rmtree(notes)
        took_s = time.monotonic() - began_s
        if self.is_interrupted or done.exit_status == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        is_first, self.took_s = self.limit_s is None, max(self.took_s, took_s)
        run = done.run
        if done.exit_status == TOO_LONG and not (is_first and len(paces_s(run)) >= FEWEST_STEPS):
            raise UsageError(f"the job hangs, or is very slow: tune ended it after {limit_s:.0f} s")
        if done.exit_status not in (0, TOO_LONG):
            lines = log.read_text(errors="replace").split("\n") if log.exists() else []
            # A launcher's summary follows the error itself.
            errors = [
                line for line in lines if "Error: " in line and "ChildFailedError" not in line
            ]
            last = next((line for line in reversed(lines) if line.strip()), "")
            why = (errors or [last])[-1].strip()
            raise UsageError(f"the job ended with status {done.exit_status}: {why[:200]} ({log})")
        if is_first:
            self.limit_s = max(_LEAST_LIMIT_S, _SLOWER * took_s)
        seen = looked[min(looked)] if looked else Seen()
        return TrialRecording(run=run, path=path, seen=seen, problem=problem)

    def _from_anywhere(self) -> list[str]:
        """Return the command with whole paths, where it runs in another folder."""
        if self.scratch.resolve() == Path.cwd():
            return list(self.command)
        return [
            str(Path(word).resolve()) if os.path.exists(word) and os.path.isfile(word) else word
            for word in self.command
        ]
