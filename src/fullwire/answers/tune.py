"""Tune a job: try the fixes that promise most, keep those that help, and verify all of them.

Trials are recordings of the unchanged script with some fixes, each ended after the same number of
steps. The first two are the job as it is: they show how far recordings differ by themselves. Then
the best prediction on top of the fixes kept so far is tried next. A fix that is no slower takes
turns with the best so far once more, and is kept if it helps by more than noise. At the end the
job as it is and the tuned job are recorded once more and held against each other.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullwire.answers.compare import Comparison, compare, typical_length
from fullwire.answers.conditions import count
from fullwire.answers.explain import explain
from fullwire.answers.fixing import NONE, outcomes, versions_here
from fullwire.answers.laboratory import record_in_lab
from fullwire.display import Result
from fullwire.errors import FullwireError, UsageError
from fullwire.fixes import Fix, Risk, fix_kinds
from fullwire.fixes._in_job import NOTES_VARIABLE
from fullwire.fixes._recipe import Applied, Recipe, as_toml
from fullwire.lab.description import LabDescription
from fullwire.outputs import written
from fullwire.recorder.command_line import without_secrets
from fullwire.recorder.record import record
from fullwire.run.run import Run
from fullwire.timeline.account import Part
from fullwire.units import seconds, show_time
from fullwire.words import filled, sentence

RISKS: tuple[Risk, ...] = ("exact", "numeric", "semantic")
STEPS = 60
RECIPE = "recipe.toml"
_LEAST_GAIN = 0.01  # of the step: a smaller one is not tried a second time
_MUCH = 0.05  # of the step: a part of the account that a fix without a prediction may answer
_SLOWER = 3.0  # times as long as the first recording: a trial that takes longer hangs
_LEAST_LIMIT_S = 30.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fix that was tried on top of those kept so far."""

    fix: str
    setting: str
    risk: Risk
    words: str
    predicted_s: float | None  # None where no run predicts such a fix
    low_s: float | None
    high_s: float | None
    measured_s: float | None  # None where the job did not get so far
    kept: bool
    reason: str


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Tuning(Result):
    """The step before and after, every trial, and the recipe of the fixes that were kept."""

    before_s: float
    before_interval: tuple[float, float] | None
    after_s: float
    after_interval: tuple[float, float] | None
    is_significant: bool | None  # The tuned job differs from the job as it is by more than noise.
    trials: tuple[Trial, ...]
    recipe: Path
    command: str

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
        return {"trials": {name: [getattr(each, name) for each in self.trials] for name in names}}


def tune(
    command: Sequence[str],
    output: str | Path,
    *,
    budget: str | float = "10min",
    trials: int | None = None,
    steps: int = STEPS,
    allow: Risk = "exact",
    lab: LabDescription | None = None,
    say: Say = lambda sentence: None,
) -> Tuning:
    """Try the fixes of a job, keep those that help, and write a recipe of them.

    - `command`: the words of the command, such as `["torchrun", "train.py"]`.
    - `output`: a new folder for the recipe, the recordings and what the job printed.
    - `budget`: how long to try; the recordings at the end come on top.
    - `trials`: how many fixes to try at most.
    - `steps`: the steps of each recording. The script's own end does not come.
    - `allow`: the risk that is allowed: "exact", "numeric" or "semantic".
    - `lab`: record in this lab, instead of where the job runs.
    - `say`: hears each trial with its prediction, its measurement and the time left.

        fw.tune(["torchrun", "train.py"], "tuned", allow="numeric").recipe
    """
    if not command:
        raise UsageError("tune: expected a command to run, got none")
    if allow not in RISKS:
        raise UsageError(f"allow: expected {', '.join(RISKS)}, got {allow}")
    most = None if trials is None else count(trials, "trials")
    folder = Path(output)
    if folder.exists():
        raise UsageError(f"{folder} is there already: expected a new folder")
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]}: cannot be run: no such command")
    budget_s, steps = seconds(budget, "budget"), count(steps, "steps")
    folder.mkdir(parents=True)
    job = _Job(command=command, folder=folder, steps=steps, lab=lab)
    end_s = time.monotonic() + budget_s
    search = _Search(job, RISKS[: RISKS.index(allow) + 1], say)
    try:
        while search.tried_count() != most and time.monotonic() < end_s and search.try_next():
            pass
    except KeyboardInterrupt:
        say("interrupted: the best so far is kept")
    return search.end()


class _Job:
    """The job, recorded with some fixes for a number of steps."""

    def __init__(
        self, command: Sequence[str], folder: Path, steps: int, lab: LabDescription | None
    ) -> None:
        self.command, self.folder = command, folder
        self._steps, self._lab = steps, lab
        self._numbers = iter(range(1, 10**6))
        self._limit_s: float | None = None
        self.outcomes: list[str] = []  # what became of each fix in the last recording

    def recorded(self, fixes: Sequence[Applied]) -> Run:
        """Record the job with fixes; refuse a run without steps, with the job's last words."""
        name = f"trial-{next(self._numbers):02}"
        log, path = self.folder / f"{name}.log", self.folder / f"{name}.run"
        words = [sys.executable, "-m", "fullwire", "apply"]
        words += [",".join(map(str, fixes)) or NONE, "--steps", str(self._steps)]
        if self._limit_s is not None:
            words += ["--within", f"{self._limit_s:.0f}s"]
        # All ranks' output goes into one file: a tuning has its own lines.
        quiet = ["sh", "-c", 'exec "$@" >>"$0" 2>&1', str(log.resolve()), *words, "--"]
        whole = [*quiet, *self.command]
        notes = self.folder / f"{name}.notes"
        notes.mkdir()
        began_s = time.monotonic()
        os.environ[NOTES_VARIABLE] = str(notes.resolve())
        try:
            if self._lab is None:
                done = record(whole, path)
            else:
                done = record_in_lab(self._lab, whole, path, probe=False)
        finally:
            del os.environ[NOTES_VARIABLE]
            self.outcomes = outcomes(fixes, notes)
            shutil.rmtree(notes)
        if self._limit_s is None:
            self._limit_s = max(_LEAST_LIMIT_S, _SLOWER * (time.monotonic() - began_s))
        if done.exit_status:
            lines = log.read_text(errors="replace").split("\n") if log.exists() else []
            last = next((line for line in reversed(lines) if line.strip()), "")
            raise UsageError(f"the job ended with status {done.exit_status}: {last[:200]} ({log})")
        return done.run


class _Search:
    """The search: what is kept, what was tried, and the recordings of the best so far."""

    def __init__(self, job: _Job, risks: Sequence[Risk], say: Say) -> None:
        self._job, self._risks, self._say = job, risks, say
        self._kept: list[Applied] = []
        self._trials: list[Trial] = []
        say(f"recording the job as it is, twice, {job.folder}/trial-01.run")
        self._before = [job.recorded([]), job.recorded([])]
        self._best = list(self._before)
        self._say(f"before: {show_time(typical_length(self._before).step_s)} a step")

    def tried_count(self) -> int:
        """Return how many fixes were tried."""
        return len(self._trials)

    def try_next(self) -> bool:
        """Try the fix that promises most on top of those kept; say whether there was one."""
        tried = {trial.fix for trial in self._trials}
        found = [each for each in self._candidates() if each[0].fix not in tried]
        if not found:
            return False
        applied, fix = found[0]
        words = sentence(fix) if fix is not None else fix_kinds()[applied.fix].label
        predicted = "" if fix is None else f", predicted {show_time(fix.step_s)}"
        self._say(f"trial {len(self._trials) + 1}: {words} ({applied}){predicted}")
        measured_s, kept, reason = self._judge(applied)
        self._say(
            f"  {'kept' if kept else 'left out'}: {reason}"
            + ("" if measured_s is None else f", measured {show_time(measured_s)}")
        )
        self._trials.append(
            Trial(
                fix=applied.fix,
                setting=applied.setting,
                risk=applied.risk,
                words=words,
                predicted_s=applied.predicted_s,
                low_s=None if fix is None or fix.low_s != fix.low_s else fix.low_s,
                high_s=None if fix is None or fix.high_s != fix.high_s else fix.high_s,
                measured_s=measured_s,
                kept=kept,
                reason=reason,
            )
        )
        return True

    def _candidates(self) -> list[tuple[Applied, Fix | None]]:
        """Return the fixes to apply next: predicted ones by their gain, then those to try."""
        run = self._best[-1]
        told = explain(run)
        found: list[tuple[Applied, Fix | None]] = [
            (
                Applied(
                    fix=fix.kind,
                    setting=filled(fix.applied, fix),
                    risk=fix.risk,
                    why=sentence(fix),
                    predicted_s=fix.step_s,
                ),
                fix,
            )
            for fix in sorted(told.fixes, key=lambda fix: fix.step_s)
            if fix.applied and fix.risk in self._risks
        ]
        known = {applied.fix for applied, _ in found}
        shares = {part: told.account[part.key] / told.step_s for part in Part}
        sent = shares[Part.LINE_RATE] + shares[Part.TRANSPORT] + shares[Part.LATENCY]
        ranks = (run.facts.workers or 1) // (run.facts.machines or 1) or 1
        processors = len(os.sched_getaffinity(0))
        to_try = [
            (sent * (run.facts.backend == "gloo"), "transport", "fullwire"),
            (shares[Part.CONTENTION], "threads", str(max(1, processors // ranks))),
            (shares[Part.INPUT], "input", "2"),
        ]
        found += [
            (Applied(fix=key, setting=setting), None)
            for share, key, setting in sorted(to_try, reverse=True)
            if share >= _MUCH and key not in known
        ]
        return found

    def _judge(self, applied: Applied) -> tuple[float | None, bool, str]:
        """Record the job with one fix more; return its step, whether to keep it, and why."""
        fixes = [*self._kept, applied]
        try:
            after = [self._job.recorded(fixes)]
            of_this = [each for each in self._job.outcomes if each.startswith(f"fix {applied}: ")]
            if not any(": applied: " in each for each in of_this):
                return None, False, of_this[-1].removeprefix(f"fix {applied}: ")
            found = compare(self._best, after)
            if found.ratio > 1 - _LEAST_GAIN:
                return found.after_s, False, "no gain"
            before = [*self._best, self._job.recorded(self._kept)]
            after.append(self._job.recorded(fixes))
            found = compare(before, after)
        except FullwireError as error:
            return None, False, str(error)
        self._best = before
        if not found.is_significant or found.ratio >= 1:
            return found.after_s, False, "within noise"
        self._kept, self._best = fixes, after
        return found.after_s, True, f"{1 / found.ratio:.2f}x"

    def end(self) -> Tuning:
        """Hold the tuned job against the job as it is once more, and write the recipe."""
        found: Comparison | None = None
        if self._kept:
            self._say("recording both once more")
            self._before.append(self._job.recorded([]))
            self._best.append(self._job.recorded(self._kept))
            found = compare(self._before, self._best)
        before, after = typical_length(self._before), typical_length(self._best)
        measured_s = {trial.fix: trial.measured_s for trial in self._trials}
        recipe = Recipe(
            command=without_secrets(self._job.command),
            workers=self._before[0].facts.workers,
            versions=versions_here(),
            before_s=before.step_s,
            after_s=after.step_s,
            fixes=tuple(
                Applied(**{**vars(each), "measured_s": measured_s[each.fix]}) for each in self._kept
            ),
        )
        path = self._job.folder / RECIPE
        with written(path) as place:
            place.write_text(as_toml(recipe), encoding="utf-8")
        return Tuning(
            before_s=before.step_s,
            before_interval=_interval(before.low_s, before.high_s),
            after_s=after.step_s,
            after_interval=_interval(after.low_s, after.high_s),
            is_significant=None if found is None else found.is_significant,
            trials=tuple(self._trials),
            recipe=path,
            command=recipe.command,
        )


def _interval(low_s: float | None, high_s: float | None) -> tuple[float, float] | None:
    return None if low_s is None or high_s is None else (low_s, high_s)
