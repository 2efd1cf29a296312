"""What recorded runs show of a training: the samples to a goal, by batch, and the critical batch.

The samples come from the metric's curve in each run: its steps times the batch, or the samples that
were taken where the batch changes during the training. The critical batch comes from runs at
several batches, from gradient noise, or from the user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fullwire.answers.subjects import gradient_bytes
from fullwire.collectives.cost import Floats
from fullwire.compression.codec import named_in
from fullwire.convergence.batches import (
    BatchLaw,
    Critical,
    NoiseScale,
    Point,
    fit_batches,
    noise_scale,
)
from fullwire.convergence.curves import FEWEST, Curve, Goal, Reach, Taken, curve_of
from fullwire.convergence.reaching import reach
from fullwire.errors import FullwireError, UsageError
from fullwire.findings.finding import Finding
from fullwire.findings.predictions import NamedRunIsPartial
from fullwire.findings.targets import (
    BatchChanges,
    BatchContradictsRun,
    CriticalAsGiven,
    CriticalAtLeast,
    CriticalContradictsRuns,
    CriticalFromNoise,
    CriticalFromRuns,
    CurveIsLeftOut,
    CurveIsLostLater,
    CurveWasCleaned,
    GoalIsForecast,
    NoiseTellsNothing,
    SamplesLostToTheBatch,
)
from fullwire.run.gaps import reasons
from fullwire.run.kinds import kinds_of
from fullwire.run.run import Noise, Run
from fullwire.run.usual import local_steps_of, marks_of_steps, shared_steps
from fullwire.simulation.subject import plain_subject
from fullwire.timeline.alone import alone_by_account
from fullwire.timeline.passes import passes_of_step

_EXACT_CODECS = ("fp16", "bf16", "int8")  # near enough for the norm of a mean gradient
# Hooks of torch, and hooks of a script whose name says that they add gradients up as they are.
_EXACT_HOOKS = re.compile(
    r"(fp16|bf16)_compress(_hook)?|quantization_per(tensor|channel)_hook"
    r"|(\w*_)?(all_?reduce|sum|summing|mean|average)(_\w+)?",
    re.IGNORECASE,
)
_ALIKE = 0.1  # of the batch, by which the samples of a step of the curve may differ from it
_ANY = 12.0  # the factor within which a critical batch lies near any recorded one


class Averaged(NamedTuple):
    """How many workers average their parameters, and once in how many steps."""

    workers: int
    local_steps: int


EACH_STEP = Averaged(1, 1)  # and so is any number of workers that add up in each step


@dataclass(frozen=True, eq=False, slots=True)
class Recorded:
    """A metric's curve in one run, and the batch of the whole job there."""

    run: str
    batch: int  # the mean, where it changes
    curve: Curve  # over samples where the batch changes, and else over steps
    averaged: Averaged | None  # None where nothing tells it, as of an imported curve
    step_samples: float  # of a step of the curve: a metric may count other steps than the job
    taken: Taken | None = None  # where the batch changes

    @classmethod
    def of(cls, name: str, run: Run, metric: str, batch: int) -> Recorded:
        """Read a metric's curve, of a job with this batch."""
        curve = curve_of(run.metrics, metric, name)
        taken = curve.taken()
        averaged, step_samples = _averaged(run), float(batch)
        if taken is None:
            return cls(name, batch, curve, averaged, step_samples)
        # The user may count other samples than the job's loader.
        scale = batch / (run.facts.step_samples or taken.mean)
        taken = taken.scaled(scale)
        if taken.is_steady:
            is_batch = abs(taken.mean / batch - 1) <= _ALIKE
            return cls(name, batch, curve, averaged, step_samples if is_batch else taken.mean)
        return cls(name, batch, curve.over_samples(scale), averaged, step_samples, taken)

    def as_read(self) -> Iterator[Finding]:
        """Say what was left out of the curve, and that the batch changes."""
        curve = self.curve
        if curve.repeated or curve.not_numbers:
            cleaned = {"repeated": curve.repeated, "not_numbers": curve.not_numbers}
            yield CurveWasCleaned(run=self.run, metric=curve.name, **cleaned)
        if self.taken is not None:
            first, last = float(self.taken.batches[0]), float(self.taken.batches[-1])
            yield BatchChanges(run=self.run, first=first, last=last, mean=float(self.batch))

    def point(self, goal: Goal) -> tuple[Point, Reach]:
        """Return the samples to a goal, and the way there in steps."""
        if self.taken is not None and self.taken.begins_late:
            raise UsageError(
                f"{self.run}: its batch changes, and its samples before step "
                f"{self.taken.steps[0]:,.0f} are unknown: expected a recording from the beginning "
                "of the training"
            )
        reached = reach(self.curve, goal, self.run)
        if self.taken is None:
            samples = reached.steps * self.step_samples
            return Point(batch=self.batch, samples=samples, reading=reached.spread), reached
        samples, at = reached.steps, self.taken.step_at
        steps = at(samples)
        point = Point(
            batch=samples / steps,
            samples=samples,
            reading=reached.spread,
            stages=self.taken.stages(samples),
        )
        in_steps = replace(
            reached,
            steps=steps,
            low=at(reached.low),
            high=at(reached.high),
            recorded=int(self.taken.steps[-1]),
        )
        return point, in_steps


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Evidence:
    """The steps to a goal, as recorded runs show them."""

    goal: Goal
    law: BatchLaw
    notes: tuple[Finding, ...]
    recorded: tuple[Recorded, ...]
    critical: Critical | None  # where it comes from elsewhere than these runs

    @property
    def averaged(self) -> Averaged:
        """How rarely the recorded jobs averaged: the effect of that is in their curves already."""
        known = [each.averaged for each in self.recorded if each.averaged is not None]
        return known[0] if known else EACH_STEP

    def law_of(self, goal: Goal) -> BatchLaw:
        """Fit the samples to another goal of the same metric."""
        return fit_batches([each.point(goal)[0] for each in self.recorded], self.critical)


def lacks_curve(many: Sequence[tuple[str, Run]], goal: Goal) -> bool:
    """Say whether the first run, such as a workload, lacks the metric, and others are curves."""
    return bool(many[1:]) and goal.metric not in set(many[0][1].metrics.name.tolist())


def evidence(
    many: Sequence[tuple[str, Run]],
    goal: Goal,
    *,
    recorded_batch: Sequence[int] = (),
    critical_batch: float | None = None,
    is_same_batch: bool = False,
) -> Evidence:
    """Read the goal's curve in each run that has it, and fit the samples by batch.

    The first run is the predicted one; each has its name.
    `recorded_batch` is the batch of the whole job for each run, where a run does not know its own.
    With `is_same_batch`, no other batch is asked about, and the critical one may stay unknown. A
    run whose curve cannot tell is left out if others reach the goal.
    """
    if recorded_batch and len(recorded_batch) != len(many):
        raise UsageError(
            f"recorded batch: expected one for each of {len(many)} runs, got {len(recorded_batch)}"
        )
    recorded: list[Recorded] = []
    points: list[Point] = []
    notes: list[Finding] = list(_lacking(many[1:]))  # the first one's gaps are told with its step
    refusals: list[UsageError] = []
    for number, (name, run) in enumerate(many):
        if recorded_batch and _own_pass_samples(run) is not None:
            own, given = global_batch(name, run), recorded_batch[number]
            notes += [] if own == given else [BatchContradictsRun(run=name, own=own, given=given)]
        if number == 0 and lacks_curve(many, goal):
            continue
        whole = recorded_batch[number] if recorded_batch else global_batch(name, run)
        shown = Recorded.of(name, run, goal.metric, whole)
        notes += shown.as_read()
        try:
            point, reached = shown.point(goal)
        except UsageError as error:
            refusals.append(error)
            continue
        if reached.is_forecast:
            notes.append(
                GoalIsForecast(
                    run=name,
                    goal=str(goal),
                    steps=reached.steps,
                    low=reached.low,
                    high=reached.high,
                    is_far=reached.is_far,
                )
            )
        if (lost_at := shown.curve.lost_at) is not None:
            notes.append(
                CurveIsLostLater(run=name, goal=str(goal), metric=goal.metric, lost_at=lost_at)
            )
        recorded.append(shown)
        points.append(point)
    if refusals and not points:
        raise refusals[0]
    known, basis = _critical(many, points, recorded_batch, critical_batch, is_same_batch)
    if refusals and known is None and len({point.batch for point in points}) == 1:
        raise refusals[0]  # the run that would have shown another batch
    notes += [CurveIsLeftOut(why=str(refusal)) for refusal in refusals]
    _refuse_other_ways(recorded)
    law = fit_batches(points, known)
    if known is None:
        middle, low, high = law.critical_between()
        batches = tuple(f"{batch:.0f}" for batch in sorted({point.batch for point in points}))
        basis = (
            CriticalFromRuns(batch=middle, low=low, high=high, batches=batches)
            if high < math.inf
            else CriticalAtLeast(batch=middle, low=low, batches=batches)
        )
    contradiction = () if critical_batch is None else _contradiction(critical_batch, points)
    notes = [*([] if basis is None else [basis]), *contradiction, *notes]
    return Evidence(
        goal=goal, law=law, notes=tuple(notes), recorded=tuple(recorded), critical=known
    )


def _lacking(many: Sequence[tuple[str, Run]]) -> Iterator[Finding]:
    """Yield what may lack in the metrics of runs."""
    for name, run in many:
        for gap in run.gaps:
            if gap.table in (None, "metrics"):
                yield NamedRunIsPartial(run=name, what=str(gap))


def _averaged(run: Run) -> Averaged | None:
    """Return how rarely a job averaged; None where its collectives are unknown."""
    workers, every = run.facts.workers, local_steps_of(run)
    if every > 1:
        return Averaged(workers or 1, every)
    return EACH_STEP if workers == 1 or len(run.collectives) else None


def _refuse_other_ways(recorded: Sequence[Recorded]) -> None:
    """Refuse curves of jobs that average in different ways: their losses differ for that alone."""
    ways = sorted({each.averaged for each in recorded if each.averaged is not None})
    if len(ways) > 1:
        told = " and ".join(
            "in every step"
            if way == EACH_STEP
            else f"once in {way.local_steps} steps ({way.workers} workers)"
            for way in ways
        )
        raise UsageError(f"target: expected curves of jobs that add up alike, got some {told}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWork:
    """A worker's own work in one pass of a recorded step."""

    run: str
    passes: float  # of a recorded step
    samples: float  # of a pass, as a mean over the workers
    most: float  # samples of a pass of the worker that has the most, for which others wait
    time_s: float  # T1 of a pass

    @classmethod
    def of(cls, name: str, run: Run, whole: int | None) -> OwnWork:
        """Divide the step of a run by its passes; `whole` is its batch where it knows none."""
        batch = float(global_batch(name, run) if whole is None else whole)
        passes = passes_of_step(run) or 1
        if (changed := _changed_batch(run)) is not None:
            numbers, length_ns, _ = shared_steps(run)
            batch *= float(changed[kinds_of(run).usual(numbers, length_ns)].mean())
        samples = batch / (run.facts.workers or 1)
        step = plain_subject(name, run).step  # refuses a run that lost its tables
        alone = alone_by_account(run)
        return cls(
            run=name,
            passes=passes,
            samples=samples / passes,
            # A batch that changes is a mean over steps, and its fraction is no part of a sample.
            most=(math.ceil(samples) if changed is None else samples) / passes,
            time_s=(step.alone_ns * 1e-9 if alone is None else alone.time_s) / passes,
        )


def _changed_batch(run: Run) -> Floats | None:
    """Return the batch of each step in relation to the mean; None where it is not seen to change.

    The metrics tell the samples so far at their times, and steps lie between.
    """
    order = np.argsort(run.metrics.time_ns, kind="stable")
    rows = run.metrics.rows(order[np.isfinite(run.metrics.samples[order])])
    numbers, _, ranks = shared_steps(run)
    if len(rows) < FEWEST or len(numbers) < FEWEST:
        return None
    marks = marks_of_steps(run)
    marks = marks.rows(np.isin(marks.step, numbers))
    place = np.searchsorted(numbers, marks.step)
    end_ns = np.bincount(place, marks.end_ns.astype(float)) / ranks
    so_far = np.maximum.accumulate(rows.samples)
    so_far = np.interp(end_ns, rows.time_ns, so_far, left=np.nan, right=np.nan)
    taken = Curve("", numbers, end_ns, end_ns.astype(np.int64), samples=so_far).taken()
    if taken is None or taken.is_steady:
        return None
    block = np.searchsorted(taken.steps[1:-1], numbers, side="left")
    return taken.batches[block] / taken.mean


def own_work(many: Sequence[tuple[str, Run]], recorded_batch: Sequence[int]) -> list[OwnWork]:
    """Return the work of a worker's pass in the first run, and in others of the same model."""
    own, *others = (
        (name, run, recorded_batch[number] if recorded_batch else None)
        for number, (name, run) in enumerate(many)
    )
    found = [OwnWork.of(*own)]
    for name, run, whole in others:
        if gradient_bytes(run) == gradient_bytes(own[1]):
            with suppress(FullwireError):  # a run without a usual step still has its metric
                found.append(OwnWork.of(name, run, whole))
    return found


def _critical(
    many: Sequence[tuple[str, Run]],
    points: Sequence[Point],
    recorded_batch: Sequence[int],
    given: float | None,
    is_same_batch: bool,
) -> tuple[Critical | None, Finding | None]:
    """Return the critical batch if it comes from elsewhere than runs at several batches."""
    if given is not None:
        return Critical(batch=given, factor=1), CriticalAsGiven(batch=given)
    if len({point.batch for point in points}) > 1:
        return None, None
    tells_nothing: UsageError | None = None
    for number, (name, run) in enumerate(many):
        if not len(run.noise):
            if lost := reasons(run.gaps, ("noise",)):
                tells_nothing = tells_nothing or _noise_is_lost(name, lost[0])
            continue
        noise = run.noise
        if recorded_batch:
            whole = recorded_batch[number]
            if run.facts.pass_samples is None:  # and so its noise has none either
                samples = np.full(len(noise), round(whole / (run.facts.workers or 1)))
            else:
                own = whole / global_batch(name, run)
                samples = np.rint(noise.samples * own).astype(np.int64)
            noise = replace(noise, samples=samples)
        try:
            scale = _noise_scale(name, run, noise)
        except UsageError as error:
            tells_nothing = tells_nothing or error
            continue
        prior = scale.critical
        basis = CriticalFromNoise(
            batch=scale.batch,
            low=scale.batch / prior.factor,
            high=scale.batch * prior.factor,
            steps=scale.steps,
        )
        return prior, basis
    if is_same_batch and points:
        why = None if tells_nothing is None else NoiseTellsNothing(why=str(tells_nothing))
        return Critical(batch=2 * points[0].batch, factor=_ANY), why
    if tells_nothing is not None:
        raise tells_nothing
    return None, None


def _noise_is_lost(name: str, why: str) -> UsageError:
    """Say why a recording that was to note gradient noise has none."""
    return UsageError(
        f"critical batch: expected runs at two batches or more, gradient noise, or "
        f"--critical-batch, got {name}, which has no noise: {why}"
    )


def _contradiction(given: float, points: Sequence[Point]) -> Iterator[Finding]:
    """Say what runs at several batches show where the critical batch of the user is another one."""
    if len({point.batch for point in points}) > 1:
        middle, low, high = fit_batches(points).critical_between()
        if not low <= given <= high:
            is_open = math.isinf(high)
            end = None if is_open else high
            yield CriticalContradictsRuns(
                given=given, batch=middle, low=low, high=end, is_open=is_open
            )


def _noise_scale(name: str, run: Run, noise: Noise) -> NoiseScale:
    """Estimate the noise scale of a run, unless a hook changed the mean that it noted."""
    hook = run.facts.hook
    if hook is not None and not _keeps_the_mean(hook):
        raise UsageError(
            f"{name}: its gradient noise tells no critical batch, as the communication hook {hook} "
            "may change the mean gradient: expected a run without it"
        )
    if (changed := _changed_batch(run)) is not None:  # a run notes the mean of all steps
        numbers, *_ = shared_steps(run)
        at = np.minimum(np.searchsorted(numbers, noise.step), len(numbers) - 1)
        noise = replace(noise, samples=np.rint(noise.samples * changed[at]).astype(np.int64))
    return noise_scale(noise, run.facts.workers, name)


def _keeps_the_mean(hook: str) -> bool:
    """Return whether a communication hook is known to give the mean gradient, or the sum."""
    codec = named_in(hook)
    if codec is not None:
        return codec.split(":")[0] in _EXACT_CODECS
    return _EXACT_HOOKS.fullmatch(hook.split(".")[-1]) is not None


def global_batch(name: str, run: Run) -> int:
    """Return the samples of one step of a recorded job."""
    if run.facts.step_samples is not None:
        return run.facts.step_samples
    samples = _own_pass_samples(run)
    if samples is None:
        raise UsageError(
            f"{name} does not know its batch: expected that of the whole job with --recorded-batch"
        )
    passes_of_all = (run.facts.workers or 1) * (passes_of_step(run) or 1)
    return round(samples * passes_of_all)


def about_batch(run: Run) -> tuple[Finding, ...]:
    """Say how many samples the size of the batch costs, if the run has its gradient noise."""
    if not len(run.noise) or run.facts.pass_samples is None:
        return ()
    name = run.provenance.source
    try:
        scale = _noise_scale(name, run, run.noise)
    except UsageError as error:
        return (NoiseTellsNothing(why=str(error)),)
    batch, factor = global_batch(name, run), scale.critical.factor
    return (
        SamplesLostToTheBatch(
            share=batch / (batch + scale.batch),
            batch=batch,
            critical=scale.batch,
            low=scale.batch / factor,
            high=scale.batch * factor,
        ),
    )


def _own_pass_samples(run: Run) -> int | None:
    """Return the samples of a pass as the run knows them; a built-in workload has a batch."""
    if run.facts.pass_samples is not None:
        return run.facts.pass_samples
    told = re.match(r"\d+", run.facts.batch or "")
    return None if told is None else int(told[0])
