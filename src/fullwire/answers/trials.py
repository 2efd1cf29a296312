"""The trials of a tuning: how one is recorded, and what came of all of them."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from fullwire.answers.compare import FEWEST_STEPS, PIECES, paces_s, usual_length_s
from fullwire.answers.fixing import ENDED_BY_USER, NONE, Notes, notes_in, problem_of
from fullwire.answers.laboratory import record_in_lab
from fullwire.collectives.cost import Floats
from fullwire.display import Result
from fullwire.errors import UsageError
from fullwire.findings.finding import Finding
from fullwire.fixes import Risk, Seen
from fullwire.fixes._in_job import LOOK_VARIABLE
from fullwire.fixes._recipe import Applied
from fullwire.fixes._shared import LIMIT_VARIABLE, NOTES_VARIABLE, OVER
from fullwire.fixes.fix import HostWork
from fullwire.lab.description import LabDescription
from fullwire.recorder.assemble import Known
from fullwire.recorder.command_line import without_secrets
from fullwire.recorder.inside import TRIAL_VARIABLE
from fullwire.recorder.launch import ENDING, TOO_LONG, run_to_its_end
from fullwire.recorder.record import record
from fullwire.run.run import Run
from fullwire.units import show_time
from fullwire.words import sentence

FIRST_STEPS = 20  # of the first recording, where nobody gave steps
# Steps of the other recordings, where nobody gave them: as many as tell apart what has to be told,
# or six seconds of them, which cost little beside the start of a job.
_STEPS = (10, 120)
_RECORDING_S = 6.0
_TOLD_APART = 0.0125  # of the step: the deviation of a recording by the scatter of its steps
_RECORDINGS = 22  # of a budget: two of the job as it is, six trials of three, and the last two
_SLOWER = 3.0  # times as long as a usual recording: a trial that takes longer hangs
_LEAST_LIMIT_S = 30.0
_MODULE = {"-m", "--module", "-c"}  # the next word names a module, or is a program
_RECENT = 5  # recordings, whose usual time is that of the next ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fix that was tried on top of those kept so far."""

    fix: str
    setting: str
    risk: Risk
    words: str
    from_s: float  # the step with the fixes kept so far
    predicted_s: float
    low_s: float | None
    high_s: float | None
    measured_s: float | None  # None where the job did not get so far
    kept: bool
    outcome: Finding
    loss_difference: float | None  # relative, of the first losses; None where none was seen

    @property
    def reason(self) -> str:
        """Return why the fix was kept or left out."""
        return sentence(self.outcome)


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Tuning(Result):
    """The step before and after, every trial, and the recipe of the fixes that were kept."""

    before_s: float
    before_interval: tuple[float, float] | None
    after_s: float
    after_interval: tuple[float, float] | None
    is_significant: bool | None  # The tuned job differs from the job as it is by more than noise.
    trials: tuple[Trial, ...]
    riskier: Applied | None  # The best fix that a larger risk would allow.
    host_work: tuple[HostWork, ...]  # Work of the script between steps, by its line.
    wrote: tuple[str, ...]  # Files that the job wrote outside of its working directory.
    recipe: Path
    recordings: tuple[Path, ...]  # the job as it is, and the tuned job if a fix was kept
    command: str
    took_s: float

    @property
    def kept(self) -> tuple[Trial, ...]:
        """Return the trials whose fixes were kept."""
        return tuple(trial for trial in self.trials if trial.kept)

    def _in_short(self) -> Iterator[str]:
        before, after = show_time(self.before_s), show_time(self.after_s)
        yield f"{before} a step before, {after} after: {self.before_s / self.after_s:.2f}x"
        yield f"{len(self.kept)} of {len(self.trials)} fixes kept, in {self.recipe}"

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        names = ("fix", "setting", "predicted_s", "measured_s", "kept", "reason")
        return {"trials": {name: [getattr(trial, name) for trial in self.trials] for name in names}}


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
    took_s: list[float] = field(default_factory=list)  # each recording
    start_s: float = 0.0  # of a recording: what is no step
    plain_s: float = 0.0  # a recording of the job as it is
    plain_steps: int | None = None
    limit_s: float | None = None
    is_interrupted: bool = False
    is_recording: bool = False
    is_followed: bool = False  # by ranks of other hosts
    made: int = 0

    @property
    def left_s(self) -> float:
        """Return the time left of the budget."""
        return self.end_s - time.monotonic()

    def allows(self, recordings: int) -> bool:
        """Say whether the budget has time for so many recordings like the last ones."""
        return recordings * median(self.took_s[-_RECENT:]) <= self.left_s

    def adapt(self, paces: Floats, *, chooses: bool) -> None:
        """Take as many steps as decide a trial, by the scatter of those known, and limit its time.

        Six trials fit into the budget, unless ten steps of each take longer.
        """
        step_s, is_first = usual_length_s(paces), self.limit_s is None
        if is_first:
            self.start_s = max(self.took_s[0] - step_s * len(paces), 0.0)
        if chooses:
            away = np.abs(np.log(paces / np.median(paces)))
            scatter = 1.4826 * float(np.median(away))
            told_apart = PIECES * (scatter / _TOLD_APART) ** 2
            fewest, most = _STEPS
            # Steps that take half as long as the start are cheap.
            affordable_s = max(self.left_s / _RECORDINGS - self.start_s, self.start_s / 2)
            wanted = max(_RECORDING_S / step_s, told_apart)
            self.steps = max(fewest, min(most, math.ceil(min(wanted, affordable_s / step_s))))
        usual_s = self.start_s + step_s * (self.steps or FIRST_STEPS)
        if is_first:
            self.plain_s, self.plain_steps = usual_s, self.steps
        self.limit_s = max(_LEAST_LIMIT_S, _SLOWER * max(usual_s, self.plain_s))

    def steps_with(self, fixes: Sequence[Applied]) -> int:
        """Return the steps of a recording: the plain job, which is slower, may need fewer."""
        return (self.steps if fixes else self.plain_steps) or self.steps or FIRST_STEPS

    def go_on_unless_interrupted(self) -> None:
        """Raise KeyboardInterrupt if a signal came between two recordings."""
        if self.is_interrupted:
            raise KeyboardInterrupt

    def recorded(self, fixes: Sequence[Applied]) -> TrialRecording:
        """Record the job with fixes; refuse a run without steps, with the job's last words."""
        self.go_on_unless_interrupted()
        self.made += 1
        name = f"trial-{self.made:02}"
        log, path = self.folder / f"{name}.log", self.folder / f"{name}.run"
        # The first recording may take half of the budget; then it is known how long one takes.
        limit_s = max(self.left_s / 2, 1.0) if self.limit_s is None else self.limit_s
        words = [sys.executable, "-m", "fullwire", "apply"]
        words += [",".join(map(str, fixes)) or NONE]
        words += ["--steps", str(self.steps_with(fixes)), "--within", f"{limit_s:.0f}s"]
        whole = self.quiet(log, words)
        notes = self.folder / f"{name}.notes"
        notes.mkdir()
        began_s = time.monotonic()
        of_trial = {
            NOTES_VARIABLE: str(notes.resolve()),
            LOOK_VARIABLE: "1",
            TRIAL_VARIABLE: str(self.made),
            LIMIT_VARIABLE: f"{limit_s:.0f}",
        }
        os.environ |= of_trial
        self.is_recording = True
        try:
            if self.lab is None:
                done = record(whole, path, source=self.command)
            else:
                known = Known(source=without_secrets(self.command))
                done = record_in_lab(self.lab, whole, path, probe=False, known=known)
        finally:
            self.is_recording = False
            for variable in of_trial:
                del os.environ[variable]
            told = notes_in(notes)
            self.is_followed |= any("gave" in note for of_one in told for note in of_one)
            looked = _seen(told)
            problem = problem_of(fixes[-1], len(looked), told) if fixes else None
            shutil.rmtree(notes)
        took_s = time.monotonic() - began_s
        if self.is_interrupted or done.exit_status in ENDED_BY_USER:
            raise KeyboardInterrupt
        self.took_s.append(took_s)
        run = done.run
        lacks = "" if problem is None else f"; {sentence(problem)}"
        is_enough = self.limit_s is None and len(paces_s(run)) >= FEWEST_STEPS
        if done.exit_status == TOO_LONG and not is_enough:
            why = f"the job hangs, or is very slow: tune ended it after {limit_s:.0f} s"
            raise UsageError(why + lacks)
        if done.exit_status not in (0, TOO_LONG):
            lines = log.read_text(errors="replace").split("\n") if log.exists() else []
            # A launcher's summary follows the error itself.
            errors = [
                line for line in lines if "Error: " in line and "ChildFailedError" not in line
            ]
            last = next((line for line in reversed(lines) if line.strip()), "")
            why = (errors or [last])[-1].strip()
            why = f"the job ended with status {done.exit_status}: {why[:200]} ({log})"
            raise UsageError(why + lacks)
        if (made := len(paces_s(run))) < FEWEST_STEPS:
            raise UsageError(
                f"tune: expected {FEWEST_STEPS} steps or more in a recording, got {made}{lacks}"
            )
        seen = looked[min(looked)] if looked else Seen()
        return TrialRecording(run=run, path=path, seen=seen, problem=problem)

    def quiet(self, log: Path, words: Sequence[str]) -> list[str]:
        """Return the command behind other words. Its output goes into one file."""
        enter = 'cd "$1" && shift && exec "$@" >>"$0" 2>&1'
        if _MODULE & set(self.command) and self._is_elsewhere:  # Python looks for it from here
            here = shlex.quote(os.getcwd())
            enter = f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{here} && {enter}'
        into = ["sh", "-c", enter, str(log.resolve())]
        return [*into, str(self.scratch.resolve()), *words, "--", *self._from_anywhere()]

    def part(self) -> None:
        """Let the job begin once more, to tell ranks of other hosts that all trials are over."""
        if not self.is_followed or self.lab is not None:
            return
        words = [sys.executable, "-m", "fullwire", "apply", NONE]
        environment = {**os.environ, TRIAL_VARIABLE: OVER}
        whole = self.quiet(self.folder / "over.log", words)
        run_to_its_end(whole, environment, limit_s=_LEAST_LIMIT_S)

    @property
    def _is_elsewhere(self) -> bool:
        return self.scratch.resolve() != Path.cwd()

    def _from_anywhere(self) -> list[str]:
        """Return the command with whole paths, where it runs in another folder."""
        if not self._is_elsewhere:
            return list(self.command)
        program = self.command[0]
        return [
            _whole(program) if os.sep in program else program,
            *(
                word if last in _MODULE else _whole(word)
                for last, word in itertools.pairwise(self.command)
            ),
        ]


def _whole(word: str) -> str:
    """Return a word whose path, or the path after its `=`, is whole if it exists."""
    name, equals, value = word.partition("=")
    if equals and os.path.exists(value):
        return f"{name}={os.path.abspath(value)}"
    # A link stays one: a virtual environment is found by the link to its Python.
    return os.path.abspath(word) if os.path.exists(word) else word


def _seen(told: Notes) -> dict[int, Seen]:
    """Return what each rank of this host saw of the job's calls."""
    return {
        note["rank"]: msgspec.convert(note["saw"], Seen)
        for notes in told
        for note in notes
        if "saw" in note
    }


@contextmanager
def interrupts_noted(job: TrialJob) -> Iterator[None]:
    """Let Ctrl-C, or a scheduler's signal, end the recording at work, and with it the search.

    Between two recordings it ends the search before the next one.
    """

    def interrupted(number: int, frame: Any) -> None:
        job.is_interrupted = True
        if job.lab is not None and job.is_recording:  # which ends the ranks on their hosts
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if number == signal.SIGINT or handler != signal.SIG_IGN:  # as nohup has SIGHUP
            signal.signal(number, interrupted)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def difference_of(losses: Sequence[float], others: Sequence[float]) -> float | None:
    """Return the mean difference of losses, relative to the mean loss; infinite for NaN."""
    pairs = [(each, other) for each, other in zip(losses, others, strict=False)]
    size = sum(abs(each) for each, _ in pairs)
    if not pairs or not 0 < size < math.inf:
        return None
    differs = sum(abs(each - other) for each, other in pairs) / size
    return differs if math.isfinite(differs) else math.inf
