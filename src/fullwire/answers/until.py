"""Which of two sides reached a metric's value first, by how much, and is that more than noise?

Trainings of the same job differ from run to run, mostly by some 4 % in the samples that they need
(MLPerf's reference points). Their usual steps differ too, by as much as `compare` finds. Several
runs of a side show their own scatter. All are estimates of one variance, and the interval of the
ratio is Student's. A noisy curve tells less well when it reaches the value. This error of each run
is added, and the scatter that a side's runs show is beyond it.

The time beyond usual steps is that of stalls and pauses. One run of each side cannot tell a job
that stalls from a machine that was busy. So the interval is wider by the whole part of the ratio
that this time makes. Several runs of a side show how much it differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, mean, variance
from typing import Any

import numpy as np

from fullwire.answers.compare import noise_of, paces_s, student, usual_length_s
from fullwire.answers.opening import RunLike
from fullwire.answers.subjects import named
from fullwire.convergence.batches import USUAL_SPREAD
from fullwire.convergence.curves import Curve, Goal, curve_of, read_goal
from fullwire.convergence.reaching import end_of, has_reached, reach
from fullwire.errors import UsageError
from fullwire.findings.finding import Finding
from fullwire.findings.targets import ReachedAlike, ReachedFirst
from fullwire.run.run import Run
from fullwire.run.usual import begun_ns, marks_of_steps

_USUAL_COUNTS = 4  # the degrees of freedom of the usual scatter, beside a side's own runs
_SURE = 0.95
_NORMAL = 1.96  # standard deviations, of so sure an interval
_LATE = 3.0  # steps after the last one: a loss may be reported a little after its step
_NOTABLE = 0.05  # of the time to the goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """One run's way to the value."""

    run: str
    steps: float
    time_s: float
    spread: float  # relative standard deviation of the steps, as the curve's noise leaves it
    device_hours: float | None  # None where a run does not tell its devices, as curves alone do
    begins_late: bool = False  # whether the time before the first value is extrapolated


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """Two sides' times to a metric's value; the ratio is after over before."""

    goal: Goal
    before: tuple[Reached, ...]
    after: tuple[Reached, ...]
    ratio: float
    low: float  # 95 %
    high: float
    scatter: float  # standard deviation of one run's time, in relation to it

    @property
    def is_significant(self) -> bool:
        """Whether the difference is more than noise."""
        return not self.low <= 1 <= self.high

    @property
    def finding(self) -> Finding:
        """Return the answer."""
        both = (*self.before, *self.after)
        of_unknown = tuple(reached.run for reached in both if reached.device_hours is None)
        hours: list[float | None] = [None, None]
        if not of_unknown:
            hours = [_usual(side, "device_hours") for side in (self.before, self.after)]
        told: dict[str, Any] = {
            "goal": str(self.goal),
            "before_s": _usual(self.before, "time_s"),
            "after_s": _usual(self.after, "time_s"),
            "low": self.low,
            "high": self.high,
            "before_hours": hours[0],
            "after_hours": hours[1],
            "of_unknown": of_unknown,
            "of_late": tuple(reached.run for reached in both if reached.begins_late),
        }
        if not self.is_significant:
            return ReachedAlike(**told, scatter=self.scatter)
        share = 1 - self.ratio if self.ratio < 1 else self.ratio - 1
        return ReachedFirst(**told, is_sooner=self.ratio < 1, share=share)


def until(
    before: RunLike | Sequence[RunLike], after: RunLike | Sequence[RunLike], target: str
) -> Until:
    """Compare the times that two sides took to a metric's value, such as 'loss<=0.3'."""
    return until_of_named(named(before), named(after), target)


def until_of_named(
    before: Sequence[tuple[str, Run]], after: Sequence[tuple[str, Run]], target: str
) -> Until:
    """Compare the times of opened runs, each with the name that the user gave it."""
    goal, runs = read_goal(target), (before, after)
    curves = [[curve_of(run.metrics, goal.metric, name) for name, run in side] for side in runs]
    _refuse_unreached(
        goal,
        [name for side in runs for name, _ in side],
        [each for side in curves for each in side],
    )
    first, second = (
        tuple(_reached(name, run, curve, goal) for (name, run), curve in zip(*both, strict=True))
        for both in zip(runs, curves, strict=True)
    )
    logs = [[math.log(reached.time_s) for reached in side] for side in (first, second)]
    # The times from step to step of the runs that have some; imported curves have none.
    lengths_s = [[paces_s(run) for _, run in side] for side in runs]
    paces = [[each_s[each_s > 0] for each_s in side if (each_s > 0).any()] for side in lengths_s]
    noise = noise_of(paces)
    usual = USUAL_SPREAD**2 + (0 if noise is None else noise.variance)
    squares, counts = _USUAL_COUNTS * usual, _USUAL_COUNTS
    unsure = [mean(reached.spread**2 for reached in side) for side in (first, second)]
    for side, of_curves in zip(logs, unsure, strict=True):
        if len(side) > 1:
            squares += max(variance(side) - of_curves, 0.0) * (len(side) - 1)
            counts += len(side) - 1
    means = [sum(side) / len(side) for side in logs]
    off = student(_SURE, counts) * math.sqrt(
        squares / counts * (1 / len(logs[0]) + 1 / len(logs[1]))
    )
    read = sum(of_curves / len(side) for side, of_curves in zip(logs, unsure, strict=True))
    off = math.hypot(off, _NORMAL * math.sqrt(read))
    if counts == _USUAL_COUNTS and all(paces):
        stalls = [math.log(float(side[0].mean()) / usual_length_s(side[0])) for side in paces]
        off += abs(stalls[1] - stalls[0])
    ratio = math.exp(means[1] - means[0])
    return Until(
        goal=goal,
        before=first,
        after=second,
        ratio=ratio,
        low=ratio * math.exp(-off),
        high=ratio * math.exp(off),
        scatter=math.sqrt(squares / counts),
    )


def _refuse_unreached(goal: Goal, names: Sequence[str], curves: Sequence[Curve]) -> None:
    """Refuse runs that never reached the value: without them, the others would seem too soon."""
    missed = [
        f"{name}: {goal} is not reached, and the run "
        + (
            end_of(curve, goal)
            if curve.lost_at is None
            else f"has no number from step {curve.lost_at:,} on"
        )
        for name, curve in zip(names, curves, strict=True)
        if not has_reached(curve, goal)
    ]
    if missed:
        raise UsageError(
            f"{'; '.join(missed)}: expected a run that reached it. `whatif --target` extends a "
            "curve that still moves towards its target"
        )


def _reached(name: str, run: Run, curve: Curve, goal: Goal) -> Reached:
    """Return the way to the goal since the run's first step, or since step 0 of a bare curve."""
    found = reach(curve, goal, name)
    marks, first_ns, first = marks_of_steps(run), float(curve.times_ns[0]), int(curve.steps[0])
    before_s = None
    if len(marks):
        began_ns = float(begun_ns(marks).min())
        step_ns = float(np.median(marks.end_ns - marks.start_ns))
        if first_ns > float(marks.end_ns.max()) + _LATE * step_ns:
            raise UsageError(
                f"{name}: expected times of {goal.metric} within the run's steps, got its first "
                "value after the last step: times of another clock"
            )
        ended_ns = np.sort(marks.end_ns[marks.rank == marks.rank.min()])
        if (early := curve.steps_early(ended_ns)) is not None:
            raise UsageError(
                f"{name}: expected a value of {goal.metric} after its step, got values {early:,} "
                "steps before theirs, and none at the end: times of another clock"
            )
    else:
        pace_ns = float(np.median(np.diff(curve.times_ns) / np.diff(curve.steps)))
        began_ns = first_ns - max(pace_ns, 0.0) * max(first, 0)
        before_s = (first_ns - began_ns) * 1e-9
    time_s = (float(np.interp(found.steps, curve.steps, curve.times_ns)) - began_ns) * 1e-9
    if time_s <= 0:
        raise UsageError(
            f"{name}: expected times of {goal.metric} after the first step, got times of another "
            "clock"
        )
    # An earlier attempt, whose steps are left out and whose values stay, makes a run incomplete.
    # The first value may be of the parameters that the job begins with.
    if len(marks) and run.complete and (curve.times_ns[1:] < began_ns).any():
        raise UsageError(
            f"{name}: expected times of {goal.metric} within the run's steps, got values of "
            "several steps before the first step: times of another clock"
        )
    workers = run.facts.workers
    return Reached(
        run=name,
        steps=found.steps,
        time_s=time_s,
        spread=found.spread,
        device_hours=None if workers is None else time_s * workers / 3600,
        begins_late=before_s is not None and before_s > _NOTABLE * time_s,
    )


def _usual(side: Sequence[Reached], name: str) -> float:
    return geometric_mean(getattr(reached, name) for reached in side)
