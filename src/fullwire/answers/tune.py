"""Tune a job: try the fixes that promise most, keep those that help, and verify all of them.

Trials are recordings of the unchanged script with some fixes, each ended after as many steps as
decide it. The first two are the job as it is: they show how far recordings differ by themselves.
Then come rounds. Each looks at the fix that promises most gain for its time, on top of those kept
so far. It looks at the next ones as long as they may gain more than the best look did. A fix is
kept at once if its look gains much more than noise. Else the look (B) and the best so far (A) are
recorded in the order A B B A, and it is kept if it helps by more than noise. Then fixes that had
gained less, or nothing, may be tried once more: another transport helps little behind a slow
interface.

Fixes that were kept early are left out once more at the end, and stay out if nothing gets slower.
Last, the job as it is and the tuned job are recorded again.

A trial is judged by the time from step to step: for each pass, and with pauses and long steps where
the job has many of them.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fullwire.answers.compare import Against, held_against, noise_of, paces_s, usual_length_s
from fullwire.answers.explain import explain
from fullwire.answers.fixing import hash_of, versions_here
from fullwire.answers.trials import (
    FIRST_STEPS,
    Trial,
    TrialJob,
    TrialRecording,
    Tuning,
    difference_of,
    interrupts_noted,
)
from fullwire.collectives.cost import Floats
from fullwire.errors import FullwireError, UsageError
from fullwire.findings import tuning as of_tuning
from fullwire.findings.finding import Finding
from fullwire.fixes import Fix, Risk, Seen, fix_kinds
from fullwire.fixes._recipe import Applied, Recipe, as_toml
from fullwire.fixes.fix import Worthwhile
from fullwire.lab.description import LabDescription
from fullwire.outputs import written
from fullwire.recorder.command_line import without_secrets
from fullwire.recorder.inside import TRIAL_VARIABLE
from fullwire.recorder.record import refuse_one_of_many
from fullwire.run.run import Run
from fullwire.simulation.calibrate import PAYLOAD_SHARE
from fullwire.timeline.passes import passes_of_step
from fullwire.units import count, seconds, shown
from fullwire.words import filled, sentence

RISKS: tuple[Risk, ...] = ("exact", "numeric", "semantic")
RECIPE = "recipe.toml"
_LOOKS = 3  # in a round
_OF_THE_BEST = 1 / 3  # of the best look's gain is expected of another one in the same round
_CLEAR = 0.7  # of the step: such a look needs no pair, and the last two recordings confirm it
_WORTH_ANOTHER = 0.05  # of the step: a smaller gain is not tried again on top of others
_WORTH_MORE_PAIRS, _MOST_PAIRS = 0.03, 4  # of the step; A B B A has two
_LEAST_GAIN = 0.01  # of the step: a smaller one is not tried a second time
_QUIET = 0.05  # of the step: repeats that differ by less tell enough of the noise
_MOST_REPEATS = 3  # of the job as it is, before the first trial
_OFTEN_LONG = 1.08  # times the usual step: such a mean has many long steps or pauses
_LOSSES_DIFFER = 1e-3  # of the loss: more is no order of sums
_LOSSES_FAR = 0.05  # of the loss: more is another training
_MUCH_SLOWER = 1.1  # times the step: the fix itself does harm
_ONCE_MORE = 0.5  # of a predicted gain counts where the fix gained nothing before
_NOTABLE = 0.02  # of the step: host work that takes less is left unsaid

Say = Callable[[str], None]


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
    - `steps`: the steps of each recording, by default as many as decide a trial. The script's own
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
    refuse_one_of_many(folder, {**os.environ, TRIAL_VARIABLE: "1"})
    folder.mkdir(parents=True)
    job = TrialJob(command=command, folder=folder, lab=lab, scratch=place, steps=chosen)
    job.end_s = time.monotonic() + budget_s
    search = _Search(job, RISKS[: RISKS.index(allow) + 1], say)
    with interrupts_noted(job):
        try:
            search.begin()
            while search.try_next(most):
                pass
            search.leave_out_early_ones()
            search.confirm()
        except KeyboardInterrupt:
            if not search.before:  # nothing is known yet
                raise
            say(sentence(of_tuning.Interrupted()))
        finally:
            job.part()
        return search.end()  # a signal loses no recipe either


def _place(applied: Applied) -> str:
    """Return what a job has once: a kind of fix, or a variable."""
    return str(applied).partition("=")[0] if applied.fix == "environment" else applied.fix


def _line_bps(run: Run, seen: Seen) -> float | None:
    """Return the line rate as it was measured; None if the run knows one, or nobody measured."""
    used = seen.interface or next(iter(seen.interface_bps), "")
    payload_bps = seen.interface_bps.get(used, 0.0)
    if not payload_bps or run.facts.line_rate_bps is not None:
        return None
    is_over_tcp = run.facts.backend in ("gloo", "fullwire")
    return payload_bps / PAYLOAD_SHARE if is_over_tcp else None


@dataclass(frozen=True, kw_only=True)
class _Look:
    """The first recording of a trial that is faster than the best so far."""

    trial: int
    applied: Applied
    recorded: TrialRecording
    found: Against


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
        self._chooses_steps = job.steps is None
        self._last: Against | None = None  # the job as it is and the tuned job, at the end
        self._began_s = time.monotonic()

    def begin(self) -> None:
        """Record the job as it is, until its noise is known."""
        job = self._job
        self._say(of_tuning.RecordingAsItIs(path=f"{job.folder}/trial-01.run"))
        first = job.recorded([])
        job.adapt(paces_s(first.run), chooses=self._chooses_steps)
        for path in first.seen.wrote:
            self._say(of_tuning.JobWrites(path=path))
        self.before = [first]
        # The third recording leaves time for two trials.
        while len(self.before) < _MOST_REPEATS and job.allows(3 if len(self.before) == 1 else 7):
            self.before.append(job.recorded([]))
            runs = [paces_s(recording.run) for recording in self.before]
            is_long = [float(run.mean()) > _OFTEN_LONG * usual_length_s(run) for run in runs]
            self._length_of = (
                (lambda lengths_s: float(lengths_s.mean())) if all(is_long) else usual_length_s
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

    def try_next(self, most: int | None) -> bool:
        """Look at the fixes that promise most, and keep the best; say whether any was tried.

        `most` bounds the trials of the whole search.
        """
        looks: list[_Look] = []
        begun, now_s = len(self.trials), self._judged(self._best, self._best).before_s
        found = self._candidates(now_s, self._risks)
        while found and len(looks) < _LOOKS and len(self.trials) != most:
            applied = found.pop(0)
            best_s = min((look.found.after_s for look in looks), default=math.inf)
            expected_s = float(applied.predicted_s or 0.0)
            promised_s = expected_s if applied.low_s is None else applied.low_s
            if looks and (
                promised_s > best_s * (1 - _WORTH_ANOTHER)
                or now_s - expected_s < _OF_THE_BEST * (now_s - best_s)
            ):
                continue  # even at its best it gains less than a look did, or hardly anything
            if not self._job.allows(3):  # a look, and a pair or the last two
                if not looks:
                    self._say(of_tuning.BudgetUsedUp())
                break
            looks += self._looked_at(applied, now_s)
        if looks:
            looks.sort(key=lambda look: look.found.after_s)
            self._settle(looks[0])
            for look in looks[1:]:
                self._end_trial(look.trial, of_tuning.AnotherGainsMore(), kept=False)
        return len(self.trials) > begun

    def _looked_at(self, applied: Applied, now_s: float) -> Iterator[_Look]:
        """Record the job with one fix more; yield the look if it is faster, or end the trial."""
        self._job.go_on_unless_interrupted()
        number = len(self.trials)
        low_s, high_s = self._as_recordings_differ(applied)
        self._say(
            of_tuning.TrialBegins(
                number=number + 1,
                change=applied.why,
                fix=str(applied),
                predicted_s=float(applied.predicted_s or 0.0),
                interval=of_tuning.time_range(low_s, high_s),
                left_s=max(self._job.left_s, 0.0),
            )
        )
        self.trials.append(
            Trial(
                fix=applied.fix,
                setting=applied.setting,
                risk=applied.risk,
                words=applied.why,
                from_s=now_s,
                predicted_s=float(applied.predicted_s or 0.0),
                low_s=low_s,
                high_s=high_s,
                measured_s=None,
                kept=False,
                outcome=of_tuning.NotDecided(),  # until it ends
                loss_difference=None,
            )
        )
        try:
            recorded = self._job.recorded(self._with(applied))
        except FullwireError as error:
            self._end_trial(number, of_tuning.TrialEnded(why=str(error)), kept=False)
            return
        found = self._judged(self._best, [recorded])
        differs = self._loss_difference(recorded)
        self.trials[number] = replace(
            self.trials[number], measured_s=found.after_s, loss_difference=differs
        )
        problem = recorded.problem or self._problem_of_losses(applied.risk, differs)
        if problem is None and found.ratio > 1 - _LEAST_GAIN:
            problem = of_tuning.NoGain()
        if problem is not None:
            self._end_trial(number, problem, kept=False)
            return
        yield _Look(trial=number, applied=applied, recorded=recorded, found=found)

    def _as_recordings_differ(self, applied: Applied) -> tuple[float | None, float | None]:
        """Return a prediction's interval, wider by how much recordings of one job differ here."""
        lengths_s = [paces_s(recording.run) for recording in self._best]
        noise = noise_of([lengths_s], self._length_of)
        step_s, low_s, high_s = applied.predicted_s, applied.low_s, applied.high_s
        if noise is None or step_s is None or low_s is None or high_s is None:
            return low_s, high_s
        away_s = step_s * math.expm1(noise.off([1 / len(lengths_s), 1]))
        least_s = step_s - math.hypot(step_s - low_s, away_s)
        return max(least_s, 0.0), step_s + math.hypot(high_s - step_s, away_s)

    def _end_trial(self, number: int, outcome: Finding, *, kept: bool) -> None:
        """Note how a trial ended, and say so."""
        ended = replace(self.trials[number], kept=kept, outcome=outcome)
        self.trials[number] = ended
        result: dict[str, Any] = {
            "is_kept": kept,
            "outcome": outcome,
            "measured_s": ended.measured_s,
        }
        if len(self.trials) > number + 1:  # its sentence no longer stands right above
            self._say(of_tuning.EarlierTrialResult(number=number + 1, **result))
        else:
            self._say(of_tuning.TrialResult(**result))

    def _candidates(self, now_s: float, risks: Sequence[Risk]) -> list[Applied]:
        """Return the fixes to apply next, by their expected gain for the time of a trial."""
        recorded = self._best[-1]
        measured = filter(None, (each.seen.interface_bps for each in self.before))
        seen = replace(recorded.seen, interface_bps=next(measured, {}))
        told = explain(recorded.run, bandwidth=_line_bps(recorded.run, seen))
        passes = passes_of_step(recorded.run) or 1
        predicted: dict[str, Fix] = {}
        for fix in sorted(told.fixes, key=lambda fix: fix.step_s):
            if fix.risk in risks and fix.applied and filled(fix.applied, fix):
                predicted.setdefault(fix.kind, fix)
        for key, kind in fix_kinds().items():
            for fix in kind.to_try(recorded.run, told.detail, seen, told.predictor):
                if fix.risk not in risks:
                    continue
                name = f"{key}:{fix.setting}" if kind.tries_each else key
                if name not in predicted or math.isnan(predicted[name].low_s):
                    predicted[name] = fix  # a replay without an interval tells less
        found: dict[str, tuple[float, Applied]] = {}
        for fix in predicted.values():
            # Predictions are of a usual step with all its passes; trials, of a pass of any step.
            from_s = told.step_s if isinstance(fix, Worthwhile) else told.fixes_from_s
            times = now_s / ((from_s or told.step_s) / passes)
            setting = filled(fix.applied, fix)
            for kept in self._kept:
                if kept.fix == fix.kind and fix_kinds()[fix.kind].adds_up:
                    setting = f"{kept.setting},{setting}"
            setting = fix_kinds()[fix.kind].checked(setting)
            ends_s = [each / passes * times for each in (fix.low_s, fix.step_s, fix.high_s)]
            low_s, step_s, high_s = (None if end_s != end_s else end_s for end_s in ends_s)
            if step_s is None:
                continue
            applied = Applied(
                fix=fix.kind,
                setting=setting,
                risk=fix.risk,
                why=sentence(fix),
                predicted_s=step_s,
                low_s=low_s,
                high_s=high_s,
            )
            trial_s = self._job.start_s + (self._job.steps or FIRST_STEPS) * step_s
            gain = self._chance(applied, now_s) * (now_s - step_s) / max(trial_s, 1e-9)
            if gain > 0:
                found.setdefault(str(applied), (gain, applied))
        return [applied for _, applied in sorted(found.values(), key=lambda each: -each[0])]

    def _chance(self, applied: Applied, now_s: float) -> float:
        """Return how much a prediction counts: less where the fix failed before, 0 in vain."""
        several = fix_kinds()[applied.fix].tries_each
        if any(
            kept.fix == applied.fix and (not several or kept.setting == applied.setting)
            for kept in self._kept
        ):
            return 0.0
        if several and applied.setting.endswith(f"={self.before[0].seen.interface}"):
            return 0.0  # the job had this interface
        earlier = [
            trial
            for trial in self.trials
            if trial.fix == applied.fix
            and (not several or trial.setting == applied.setting)
            and not isinstance(trial.outcome, of_tuning.AnotherGainsMore)
        ]
        if not earlier:
            return 1.0
        if len(earlier) > 1:
            return 0.0
        [trial] = earlier
        # On top of fixes kept since, it may help: they took away what had hidden its gain.
        is_other = now_s < (1 - _WORTH_ANOTHER) * trial.from_s
        is_much = float(applied.predicted_s or 0.0) < (1 - _WORTH_ANOTHER) * now_s
        is_open = isinstance(trial.outcome, of_tuning.NoGain | of_tuning.WithinNoise)
        was_slow = (trial.measured_s or math.inf) > _MUCH_SLOWER * trial.from_s
        return _ONCE_MORE if is_open and is_other and is_much and not was_slow else 0.0

    def _with(self, applied: Applied) -> list[Applied]:
        """Return the kept fixes with one more. It takes the place of another setting of its own."""
        place = _place(applied)
        return [*(kept for kept in self._kept if _place(kept) != place), applied]

    def _settle(self, look: _Look) -> None:
        """Record the best so far and a look in turns; keep its fix if it helps."""
        fixes, found = self._with(look.applied), look.found
        before, after = self._best, [look.recorded]
        is_clear = found.is_significant and found.ratio < _CLEAR
        if not is_clear and not self._job.allows(2 + 2 * bool(self._kept)):
            self._end_trial(look.trial, of_tuning.NoTimeToRepeat(), kept=False)
            return
        try:
            if not is_clear:
                after.append(self._job.recorded(fixes))
                before = [self._best[-1], self._job.recorded(self._kept)]
                found = self._judged(before, after)
            while self._is_open(found) and len(after) < _MOST_PAIRS and self._job.allows(7):
                before.append(self._job.recorded(self._kept))
                after.append(self._job.recorded(fixes))
                found = self._judged(before, after)
        except FullwireError as error:
            self._end_trial(look.trial, of_tuning.TrialEnded(why=str(error)), kept=False)
            return
        self.trials[look.trial] = replace(self.trials[look.trial], measured_s=found.after_s)
        self._best = before
        if not found.is_significant or found.ratio >= 1:
            self._end_trial(look.trial, of_tuning.WithinNoise(), kept=False)
            return
        # The first pair holds the tuned job against the job as it is; later ones do not.
        self._last = None if self._kept or is_clear else found
        self._roll_back([kept for kept in self._kept if kept not in fixes], of_tuning.Replaced())
        self._kept, self._best = fixes, after
        self._end_trial(look.trial, of_tuning.Faster(times=1 / found.ratio), kept=True)
        self._job.adapt(paces_s(after[-1].run), chooses=self._chooses_steps)

    def _is_open(self, found: Against) -> bool:
        """Say whether a gain that is worth more pairs may still be noise."""
        return not found.is_significant and found.ratio < 1 - _WORTH_MORE_PAIRS

    def _loss_difference(self, recorded: TrialRecording) -> float | None:
        """Return how far the first losses are from those of the job as it is, relatively."""
        return difference_of(self.before[0].seen.losses, recorded.seen.losses)

    def _problem_of_losses(self, risk: Risk, differs: float | None) -> Finding | None:
        """Say that losses differ too far for a risk, if they do."""
        is_unknown = risk == "exact" and len(self.before) == 1  # no repeat tells what is usual
        if differs is None or risk == "semantic" or is_unknown:
            return None
        repeats = [self._loss_difference(each) or 0.0 for each in self.before[1:]]
        allowed = _LOSSES_DIFFER if risk == "exact" else _LOSSES_FAR
        if differs <= max(allowed, 3 * max(repeats, default=0.0)):
            return None
        return of_tuning.LossesDiffer(by=differs)

    def leave_out_early_ones(self) -> None:
        """Take out the fixes that no longer help beside those kept after them."""
        for applied in self._kept[:-1]:
            if not self._job.allows(5):
                return
            rest = [each for each in self._kept if each != applied]
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
        self._kept = [each for each in self._kept if each not in fixes]
        for number, trial in enumerate(self.trials):
            if trial.kept and (trial.fix, trial.setting) in gone:
                self.trials[number] = replace(trial, kept=False, outcome=why)

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

    def _riskier(self) -> Applied | None:
        """Return the best fix that a larger risk allows, if all of its interval is a gain."""
        if not self._best:  # interrupted before the noise was known
            return None
        now_s = self._judged(self._best, self._best).before_s
        for risk in RISKS[len(self._risks) :]:
            found = [
                applied
                for applied in self._candidates(now_s, [risk])
                if applied.high_s is not None and applied.high_s < now_s
            ]
            if found:
                return min(found, key=lambda applied: float(applied.predicted_s or 0.0))
        return None

    def end(self) -> Tuning:
        """Write the recipe, and return all that was found."""
        if self._kept:
            last = self._last or self._judged(self.before, self._best)
        else:
            last = self._judged(self.before, self.before)
        measured_s = {
            (trial.fix, trial.setting): trial.measured_s for trial in self.trials if trial.kept
        }
        recipe = Recipe(
            command=without_secrets(self._job.command),
            command_sha256=hash_of(self._job.command),
            machine=f"{os.cpu_count()} processors, {platform.machine()}, {platform.system()}",
            workers=self.before[0].run.facts.workers,
            versions=versions_here(),
            before_s=last.before_s,
            after_s=last.after_s,
            fixes=tuple(
                replace(each, measured_s=measured_s[each.fix, each.setting]) for each in self._kept
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
            riskier=self._riskier(),
            host_work=tuple(work for work in host if work.step_s > _NOTABLE * last.before_s),
            wrote=first.wrote,
            recipe=path,
            recordings=tuple(recorded[-1].path for recorded in ends),
            command=recipe.command,
            took_s=time.monotonic() - self._began_s,
        )
