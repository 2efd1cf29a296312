"""Tune a job: try the fixes that promise most, keep those that help, and verify all of them.

Trials are recordings of the unchanged script with some fixes, each ended after the same number of
steps. The first two are the job as it is: they show how far recordings differ by themselves. Then
the best prediction on top of the fixes kept so far is tried. It has a first look. If that is no
slower, the best so far (A) and the trial (B) are recorded in the order A B B A. A fix is kept if it
helps by more than noise. Fixes that were kept early are left out once more at the end, and stay out
if nothing gets slower. Last, the job as it is and the tuned job are recorded again.

A trial is judged by the time from step to step: for each pass, and with pauses and long steps where
the job has many of them.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fullwire.answers.compare import (
    FEWEST_STEPS,
    Against,
    held_against,
    noise_of,
    paces_s,
    usual_length_s,
)
from fullwire.answers.conditions import count
from fullwire.answers.explain import explain
from fullwire.answers.fixing import hash_of, versions_here
from fullwire.answers.trials import TrialJob, TrialRecording, interrupts_noted
from fullwire.collectives.cost import Floats
from fullwire.display import Result
from fullwire.errors import FullwireError, UsageError
from fullwire.findings import tuning as of_tuning
from fullwire.findings.finding import Finding
from fullwire.fixes import Fix, Risk, fix_kinds
from fullwire.fixes._recipe import Applied, Recipe, as_toml
from fullwire.fixes.fix import HostWork, Worthwhile
from fullwire.lab.description import LabDescription
from fullwire.outputs import written
from fullwire.recorder.command_line import without_secrets
from fullwire.timeline.passes import passes_of_step
from fullwire.units import seconds, show_time, shown
from fullwire.words import filled, sentence

RISKS: tuple[Risk, ...] = ("exact", "numeric", "semantic")
RECIPE = "recipe.toml"
_RECORDING_S = 6.0  # of steps in a recording, where --steps is not given
_STEPS = (24, 120)
_WORTH_MORE_PAIRS, _MOST_PAIRS = 0.03, 4  # of the step; A B B A has two
_LEAST_GAIN = 0.01  # of the step: a smaller one is not tried a second time
_QUIET = 0.05  # of the step: repeats that differ by less tell enough of the noise
_MOST_REPEATS = 3  # of the job as it is, before the first trial
_OFTEN_LONG = 1.08  # times the usual step: such a mean has many long steps or pauses
_LOSSES_DIFFER = 1e-3  # of the loss: more is no order of sums
_LOSSES_FAR = 0.05  # of the loss: more is another training
_SEVERAL = ("environment", "transport", "ddp")  # fixes of which two settings may help
_NOTABLE = 0.02  # of the step: host work that takes less is left unsaid

Say = Callable[[str], None]


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


def tune(
    command: Sequence[str],
    output: str | Path,
    *,
    budget: str | float = "10min",
    trials: int | None = None,
    steps: int | None = None,
    allow: Risk = "exact",
    lab: LabDescription | None = None,
    scratch: str | Path | None = None,
    say: Say = lambda sentence: None,
) -> Tuning:
    """Try the fixes of a job, keep those that help, and write a recipe of them.

    - `command`: the words of the command, such as `["torchrun", "train.py"]`.
    - `output`: a new folder for the recipe, the recordings and the job's output.
    - `budget`: the time for all recordings together.
    - `trials`: how many fixes to try at most.
    - `steps`: the steps of each recording; by default about six seconds of them. The script's own
      end does not come.
    - `allow`: the risk that is allowed: "exact", "numeric" or "semantic".
    - `lab`: record in this lab, instead of where the job runs.
    - `scratch`: the working directory of each recording.
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
        raise UsageError(f"{folder} exists: expected a new folder")
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]}: expected a command that exists and may be executed")
    place = Path.cwd() if scratch is None else Path(scratch)
    if not place.is_dir():
        raise UsageError(f"scratch: expected a folder, got {place}")
    budget_s = seconds(budget, "budget")
    if not budget_s:
        raise UsageError(f"budget: expected a time above 0, got {shown(budget)}")
    chosen = None if steps is None else count(steps, "steps")
    folder.mkdir(parents=True)
    job = TrialJob(command=command, folder=folder, lab=lab, scratch=place, steps=chosen)
    job.end_s = time.monotonic() + budget_s
    search = _Search(job, RISKS[: RISKS.index(allow) + 1], say)
    with interrupts_noted(job):
        try:
            search.begin()
            while len(search.trials) != most and search.try_next():
                pass
            search.leave_out_early_ones()
            search.confirm()
        except KeyboardInterrupt:
            if not search.before:  # nothing is known yet
                raise
            say(sentence(of_tuning.Interrupted()))
    return search.end()


class _Search:
    """The search: the fixes that are kept, the trials, and the recordings of the best so far."""

    def __init__(self, job: TrialJob, risks: Sequence[Risk], say: Say) -> None:
        self.trials: list[Trial] = []
        self.before: list[TrialRecording] = []
        self._job, self._risks = job, risks
        self._say: Callable[[Finding], None] = lambda told: say(sentence(told))
        self._kept: list[Applied] = []
        self._best: list[TrialRecording] = []
        self._length_of: Callable[[Floats], float] = usual_length_s
        self._last: Against | None = None  # the job as it is and the tuned job, at the end
        self._began_s = time.monotonic()

    def begin(self) -> None:
        """Record the job as it is, until its noise is known."""
        job = self._job
        self._say(of_tuning.RecordingAsItIs(path=f"{job.folder}/trial-01.run"))
        first = job.recorded([])
        lengths_s = paces_s(first.run)
        if len(lengths_s) < FEWEST_STEPS:
            raise UsageError(
                f"tune: expected {FEWEST_STEPS} steps or more in a recording, got {len(lengths_s)}"
            )
        if job.steps is None:
            fewest, most = _STEPS
            job.steps = min(most, max(fewest, round(_RECORDING_S / usual_length_s(lengths_s))))
        for path in first.seen.wrote:
            self._say(of_tuning.JobWrites(path=path))
        self.before = [first]
        while len(self.before) < _MOST_REPEATS and job.allows(3):
            self.before.append(job.recorded([]))
            runs = [paces_s(recording.run) for recording in self.before]
            is_long = [float(run.mean()) > _OFTEN_LONG * usual_length_s(run) for run in runs]
            self._length_of = (
                (lambda length_s: float(length_s.mean())) if all(is_long) else usual_length_s
            )
            noise = noise_of([runs], self._length_of)
            if noise is None or noise.off([1 / len(runs)]) <= _QUIET:
                break
        self._best = list(self.before)
        self._say(of_tuning.Before(step_s=self._judged(self.before, self.before).before_s))

    def _judged(self, before: Sequence[TrialRecording], after: Sequence[TrialRecording]) -> Against:
        return held_against(
            [recording.run for recording in before],
            [recording.run for recording in after],
            self._length_of,
        )

    def try_next(self) -> bool:
        """Try the fix that promises most on top of those kept; say whether there was one."""
        if self.trials and not self._job.allows(5):  # a look, a pair, and the last two
            self._say(of_tuning.BudgetUsedUp())
            return False
        tried = {(trial.fix, trial.setting) for trial in self.trials}
        done = {trial.fix for trial in self.trials if trial.fix not in _SEVERAL}
        found = [
            candidate
            for candidate in self._candidates()
            if (candidate[0].fix, candidate[0].setting) not in tried
            and candidate[0].fix not in done
        ]
        if not found:
            return False
        applied, from_s = found[0]
        predicted_s = float(applied.predicted_s or 0.0)
        self._say(
            of_tuning.TrialBegins(
                number=len(self.trials) + 1,
                change=applied.why,
                fix=str(applied),
                predicted_s=predicted_s,
                interval=of_tuning.time_range(applied.low_s, applied.high_s),
                left_s=max(self._job.left_s, 0.0),
            )
        )
        measured_s, kept, outcome, differs = self._tried(applied)
        self._say(of_tuning.TrialResult(is_kept=kept, outcome=outcome, measured_s=measured_s))
        self.trials.append(
            Trial(
                fix=applied.fix,
                setting=applied.setting,
                risk=applied.risk,
                words=applied.why,
                from_s=from_s,
                predicted_s=predicted_s,
                low_s=applied.low_s,
                high_s=applied.high_s,
                measured_s=measured_s,
                kept=kept,
                outcome=outcome,
                loss_difference=differs,
            )
        )
        return True

    def _candidates(self) -> list[tuple[Applied, float]]:
        """Return the fixes to apply next by their gain, with the step that they start from."""
        recorded = self._best[-1]
        told = explain(recorded.run)
        passes = passes_of_step(recorded.run) or 1
        now_s = self._judged(self._best, self._best).before_s
        predicted: dict[str, Fix] = {}
        for fix in sorted(told.fixes, key=lambda fix: fix.step_s):
            if fix.risk in self._risks and fix.applied and filled(fix.applied, fix):
                predicted.setdefault(fix.kind, fix)
        for key, kind in fix_kinds().items():
            for fix in kind.to_try(recorded.run, told.detail, recorded.seen, told.predictor):
                if fix.risk not in self._risks:
                    continue
                name = key if key not in _SEVERAL else f"{key}:{fix.setting}"
                if name not in predicted or math.isnan(predicted[name].low_s):
                    predicted[name] = fix  # a replay without an interval tells less
        candidates = []
        for fix in predicted.values():
            # Predictions are of a usual step with all its passes; trials, of a pass of any step.
            from_s = told.step_s if isinstance(fix, Worthwhile) else told.fixes_from_s
            times = now_s / ((from_s or told.step_s) / passes)
            setting = fix_kinds()[fix.kind].checked(filled(fix.applied, fix))
            ends_s = [step_s / passes * times for step_s in (fix.low_s, fix.step_s, fix.high_s)]
            low_s, step_s, high_s = (None if end_s != end_s else end_s for end_s in ends_s)
            if step_s is not None:
                candidates.append(
                    Applied(
                        fix=fix.kind,
                        setting=setting,
                        risk=fix.risk,
                        why=sentence(fix),
                        predicted_s=step_s,
                        low_s=low_s,
                        high_s=high_s,
                    )
                )
        candidates.sort(key=lambda applied: float(applied.predicted_s or 0.0))
        return [(applied, now_s) for applied in candidates]

    def _tried(self, applied: Applied) -> tuple[float | None, bool, Finding, float | None]:
        """Record the job with one fix more; return its step, whether it stays, why, and losses."""
        fixes, differs = [*self._kept, applied], None
        try:
            look = self._job.recorded(fixes)
            against = self._judged(self._best, [look])
            if look.problem:
                return against.after_s, False, look.problem, None
            differs = self._loss_difference(look)
            if problem := self._problem_of_losses(applied.risk, differs):
                return against.after_s, False, problem, differs
            if against.ratio > 1 - _LEAST_GAIN:
                return against.after_s, False, of_tuning.NoGain(), differs
            if not self._job.allows(2):
                return against.after_s, False, of_tuning.NoTimeToRepeat(), differs
            after = [look, self._job.recorded(fixes)]
            before = [self._best[-1], self._job.recorded(self._kept)]
            against = self._judged(before, after)
            # A gain that is worth more pairs may still be noise.
            while (
                not against.is_significant
                and against.ratio < 1 - _WORTH_MORE_PAIRS
                and len(after) < _MOST_PAIRS
                and self._job.allows(7)
            ):
                before.append(self._job.recorded(self._kept))
                after.append(self._job.recorded(fixes))
                against = self._judged(before, after)
        except FullwireError as error:
            return None, False, of_tuning.TrialEnded(why=str(error)), differs
        self._best = before
        if not against.is_significant or against.ratio >= 1:
            return against.after_s, False, of_tuning.WithinNoise(), differs
        # The first pair holds the tuned job against the job as it is; later ones do not.
        self._last = None if self._kept else against
        self._kept, self._best = fixes, after
        return against.after_s, True, of_tuning.Faster(times=1 / against.ratio), differs

    def _loss_difference(self, recorded: TrialRecording) -> float | None:
        """Return how far the first losses are from those of the job as it is, relatively."""
        return difference_of(self.before[0].seen.losses, recorded.seen.losses)

    def _problem_of_losses(self, risk: Risk, differs: float | None) -> Finding | None:
        """Say that losses differ too far for a risk, if they do."""
        if differs is None or risk == "semantic":
            return None
        repeats = [self._loss_difference(recording) or 0.0 for recording in self.before[1:]]
        allowed = _LOSSES_DIFFER if risk == "exact" else _LOSSES_FAR
        if differs <= max(allowed, 3 * max(repeats, default=0.0)):
            return None
        return of_tuning.LossesDiffer(by=differs)

    def leave_out_early_ones(self) -> None:
        """Take out the fixes that no longer help beside those kept after them."""
        for applied in self._kept[:-1]:
            if not self._job.allows(5):
                return
            rest = [kept for kept in self._kept if kept != applied]
            self._say(of_tuning.Without(fix=str(applied), left_s=max(self._job.left_s, 0.0)))
            try:
                without = [self._job.recorded(rest)]
                if self._judged(self._best, without).ratio > 1 + _LEAST_GAIN:
                    continue
                whole = [self._best[-1], self._job.recorded(self._kept)]
                without.append(self._job.recorded(rest))
            except FullwireError:  # the rest needs this fix
                continue
            if self._judged(whole, without).ratio <= 1 + _LEAST_GAIN:
                self._say(of_tuning.AsFastWithoutIt())
                self._roll_back([applied], of_tuning.AsFastWithout())
                self._last = None
                self._best = without

    def _roll_back(self, fixes: Sequence[Applied], why: Finding) -> None:
        gone = {(fix.fix, fix.setting) for fix in fixes}
        self._kept = [kept for kept in self._kept if kept not in fixes]
        self.trials = [
            replace(trial, kept=False, outcome=why) if (trial.fix, trial.setting) in gone else trial
            for trial in self.trials
        ]

    def confirm(self) -> None:
        """Hold the tuned job against the job as it is once more; roll back what does not help."""
        if not self._kept or self._last is not None:
            return
        self._say(of_tuning.RecordingBoth())
        try:
            before = [self.before[-1], self._job.recorded([])]
            after = [self._best[-1], self._job.recorded(self._kept)]
        except FullwireError as error:
            self._say(of_tuning.NotHeldOnceMore(why=str(error)))
            return
        self._last = self._judged(before, after)
        if self._last.ratio >= 1:
            self._say(of_tuning.LastShowNoGain())
            self._roll_back(self._kept, of_tuning.LastShowNoGain())

    def end(self) -> Tuning:
        """Write the recipe, and return all that was found."""
        if self._kept:
            last = self._last or self._judged(self.before, self._best)
        else:
            last = self._judged(self.before, self.before)
        measured_s = {(trial.fix, trial.setting): trial.measured_s for trial in self.trials}
        recipe = Recipe(
            command=without_secrets(self._job.command),
            command_sha256=hash_of(self._job.command),
            machine=f"{os.cpu_count()} processors, {platform.machine()}, {platform.system()}",
            workers=self.before[0].run.facts.workers,
            versions=versions_here(),
            before_s=last.before_s,
            after_s=last.after_s,
            fixes=tuple(
                replace(trial, measured_s=measured_s[trial.fix, trial.setting])
                for trial in self._kept
            ),
        )
        path = self._job.folder / RECIPE
        with written(path) as place:
            place.write_text(as_toml(recipe), encoding="utf-8")
        first, ends = self.before[0].seen, [self.before, self._best][: 1 + bool(self._kept)]
        host = sorted(first.host, key=lambda work: -work.step_s)
        return Tuning(
            before_s=last.before_s,
            before_interval=last.around(last.before_s),
            after_s=last.after_s,
            after_interval=last.around(last.after_s),
            is_significant=None if self._last is None else self._last.is_significant,
            trials=tuple(self.trials),
            host_work=tuple(work for work in host if work.step_s > _NOTABLE * last.before_s),
            wrote=first.wrote,
            recipe=path,
            recordings=tuple(recorded[-1].path for recorded in ends),
            command=recipe.command,
            took_s=time.monotonic() - self._began_s,
        )


def difference_of(losses: Sequence[float], others: Sequence[float]) -> float | None:
    """Return the mean difference of losses, relative to the mean loss; infinite for NaN."""
    pairs = [(loss, other) for loss, other in zip(losses, others, strict=False)]
    size = sum(abs(loss) for loss, _ in pairs)
    if not pairs or not 0 < size < math.inf:
        return None
    differs = sum(abs(loss - other) for loss, other in pairs) / size
    return differs if math.isfinite(differs) else math.inf
