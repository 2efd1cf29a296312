"""A metric's curve, the step at which it reaches a goal, and a forecast where it has not yet.

A restarted job goes back to a checkpoint: the values of the attempt before, from there on, are left
out. Of values at the same step the later counts. Values that are no number are left out and
counted. One value is noisy, so a running median decides when a goal is reached. A metric that
ends in NaN has no forecast: such a training does not recover.

The forecast is a power law with an offset, `v = c + a t^-b`, fitted to means over stretches of time
that grow. Early values say little about c, the level at which the curve flattens. So the forecast
keeps every (b, c) with its weight, and refuses where they disagree about the goal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.errors import UsageError
from fullwire.run.run import Metrics, Whole
from fullwire.units import NUMBER, show_number, shown

_GOAL = re.compile(rf"\s*([^<>=]*[^\s<>=])\s*(<=|>=|<|>)\s*({NUMBER})\s*")
FEWEST = 8  # values, for a forecast, or to hold their clock against that of the steps
MOST_NOT_REACHING = 0.05  # of the forecast's weight
WIDEST = 10.0  # times, from the low end of a forecast to the high one
FAR = 4.0  # times the recorded steps
WARM_UP = 0.05  # of the recorded steps, which follow no law yet
_LATE = 3.0  # steps: a value may be reported a little after its step, or before it
_OF_A_PACE = 0.05  # its usual scatter between a metric's steps and the run's
_WINDOWS = 40  # a running median covers so small a part of the curve
_STRETCHES = 30

_MISFIT = 5e-3  # of the curve's span: no training follows the law more closely
_POWERS = np.geomspace(0.1, 2.0, 100)
_LEVELS = np.geomspace(1e-3, 3.0, 120)  # below the least value, in spans of the curve


@dataclass(frozen=True, slots=True)
class Goal:
    """A metric, and the value that it is to reach: from above, or from below."""

    metric: str
    value: float
    is_least: bool  # True: reached at this value or below it

    def __str__(self) -> str:
        return f"{self.metric}{'<=' if self.is_least else '>='}{self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The steps until a goal is reached, with a 90 % interval."""

    steps: float
    low: float
    high: float
    recorded: int  # the last recorded step
    is_forecast: bool = False

    @property
    def is_far(self) -> bool:
        """Whether the goal lies far beyond the recording."""
        return self.steps > FAR * self.recorded

    @property
    def spread(self) -> float:
        """The relative standard deviation that the interval stands for."""
        return float(np.log(self.high / self.low)) / 2 / 1.645


@dataclass(frozen=True, eq=False, slots=True)
class Curve:
    """The values of one metric, in order of steps, a value a step."""

    name: str
    steps: Whole
    values: Floats
    times_ns: Whole
    repeated: int = 0  # values that a restart gave up, or that were reported again
    not_numbers: int = 0
    lost_at: int | None = None  # the step from which on the metric is no number

    def steps_early(self, ended_ns: Whole) -> int | None:
        """Return by how many steps its clock runs behind that of the steps; None if none shows.

        `ended_ns`: when each step ended, in order. Values of a clock behind have numbers ahead of
        the steps that had ended, and as many steps at the end have no value. A job that went on
        from a checkpoint has the first of both, and one that stopped to report has the second.
        Where a metric counts something else than steps, nothing is told.
        """
        ended = np.searchsorted(ended_ns, self.times_ns, side="right")
        meanwhile = (ended > 0) & (ended < len(ended_ns))
        steps, ended = self.steps[meanwhile], ended[meanwhile]
        if len(steps) < FEWEST or ended[-1] == ended[0]:
            return None
        if abs((steps[-1] - steps[0]) / (ended[-1] - ended[0]) - 1) > _OF_A_PACE:
            return None
        blur = float(np.median(np.diff(steps))) + _LATE
        ahead, without = float(np.median(steps - ended)), len(ended_ns) - int(ended[-1])
        return without if without > blur and abs(ahead - without) <= blur else None


def read_goal(text: str) -> Goal:
    """Read a goal, such as 'loss<=0.3' or 'accuracy>=0.9'."""
    found = _GOAL.fullmatch(text)
    if found is None:
        raise UsageError(
            f"target: expected a metric and its value, like loss<=0.3, got {shown(text)}"
        )
    return Goal(found[1], float(found[3]), found[2].startswith("<"))


def curve_of(metrics: Metrics, name: str, run: str) -> Curve:
    """Return the curve of one metric of a run."""
    chosen = metrics.rows(metrics.name == name)
    if not len(chosen):
        known = ", ".join(sorted(set(metrics.name.tolist())))
        has = f"it has {known}" if known else "it has no metrics: record --metric, or fullwire.log"
        raise UsageError(f"{run}: expected the metric {name!r}, {has}")
    kept = chosen.rows(_stands(chosen))
    order = np.lexsort((kept.time_ns, kept.step))
    steps, values = kept.step[order], kept.value[order]
    is_last = np.append(steps[1:] != steps[:-1], [True])
    is_number = np.isfinite(values)
    counts = is_last & is_number
    if not counts.any():
        raise UsageError(f"{run}: expected values of {name} that are numbers, got none: all NaN")
    return Curve(
        name,
        steps[counts],
        values[counts],
        kept.time_ns[order][counts],
        repeated=len(chosen) - int(is_last.sum()),
        not_numbers=int((is_last & ~is_number).sum()),
        lost_at=_lost_at(steps[is_last], is_number[is_last]),
    )


def _stands(metrics: Metrics) -> NDArray[np.bool_]:
    """Return the rows of one metric that no restart has given up.

    In order of time, the steps fall back at a restart and rise again from there. Several writers
    are out of order too, but the next row of another one is ahead again. A single late row, as of a
    summary, is no restart either. So a restart shows in two rising rows, both behind the attempt.
    """
    order = np.lexsort((metrics.step, metrics.time_ns))
    steps = metrics.step[order]
    from_here = np.full(len(steps), np.iinfo(np.int64).max)  # where a later row goes back to
    begin, furthest = 0, np.iinfo(np.int64).min
    for at in (np.flatnonzero(np.diff(steps) < 0) + 1).tolist():
        furthest = max(furthest, int(steps[begin:at].max()))
        begin = at
        if at + 1 < len(steps) and steps[at] < steps[at + 1] <= furthest:
            from_here[at - 1] = steps[at]
            furthest = int(steps[at])
    is_kept = np.empty(len(steps), bool)
    is_kept[order] = steps < np.minimum.accumulate(from_here[::-1])[::-1]
    return is_kept


def _lost_at(steps: Whole, is_number: NDArray[np.bool_]) -> int | None:
    """Return the first step of the NaN values at a metric's end; None if numbers end it.

    Some metrics are no number now and then, and come back. So the last stretch without numbers
    counts only if it is longer than each one before it.
    """
    numbers = np.flatnonzero(is_number)
    last = len(is_number) - 1 - int(numbers[-1])
    before = int(np.diff(numbers, prepend=-1).max()) - 1
    return int(steps[numbers[-1] + 1]) if last > before else None


def has_reached(curve: Curve, goal: Goal) -> bool:
    """Return whether the curve, as far as it was recorded, reaches the goal."""
    sign = 1.0 if goal.is_least else -1.0
    return _first_at(sign * curve.values, sign * goal.value) is not None


def reach(curve: Curve, goal: Goal, run: str) -> Reach:
    """Return when the curve reaches the goal: as recorded, or else by a forecast."""
    sign = 1.0 if goal.is_least else -1.0
    wanted = sign * goal.value
    steps = curve.steps.astype(float)
    after = _first_at(sign * curve.values, wanted)
    if after == 0:
        raise UsageError(
            f"{run}: {goal} is reached at its first value, {curve.values[0]:g} at step "
            f"{curve.steps[0]}: expected a target that takes training"
        )
    if after is None:
        return _forecast(curve, goal, f"{run}: {goal}")
    before = after - 1
    high, low = (_running_median(sign * curve.values, at) for at in (before, after))
    share = (high - wanted) / (high - low)
    at = float(steps[before] + share * (steps[after] - steps[before]))
    if at <= 0:
        raise UsageError(f"{run}: {goal} is reached at step {at:g}, expected steps above 0")
    last = int(curve.steps[-1])
    fewest = max(float(steps[before]), min(at, 1.0))  # not even one step at the first value
    return Reach(steps=at, low=fewest, high=float(steps[after]), recorded=last)


def _first_at(values: Floats, wanted: float) -> int | None:
    """Return the first place at which the running median is at a value or below it.

    A median is there if more than half of its window is, so counts tell it without sorting. With
    just a half of an even window, as near the ends, the median itself decides.
    """
    half = _half_window(values)
    at = np.arange(len(values))
    first, end = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    counts = np.append(0, np.cumsum(values <= wanted))
    more = 2 * (counts[end] - counts[first]) - (end - first)
    for place in np.flatnonzero(more >= 0).tolist():
        if more[place] > 0 or _running_median(values, place) <= wanted:
            return int(place)
    return None


def _running_median(values: Floats, at: int) -> float:
    """Return the median of the values around a place; near the ends its window is shorter."""
    half = _half_window(values)
    return float(np.median(values[max(0, at - half) : at + half + 1]))


def _half_window(values: Floats) -> int:
    return len(values) // _WINDOWS // 2


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Extended:
    """The power laws that go on from a curve: v = level + scale (t / last)^-power."""

    level: Floats
    scale: Floats
    power: Floats
    weight: Floats  # adds up to 1
    last: float  # the middle of the last stretch, in steps


@lru_cache(maxsize=64)  # the same curve is asked for many goals
def _extended(curve: Curve, is_least: bool) -> _Extended | None:
    """Fit power laws to a falling curve; None if it does not fall."""
    steps, values = curve.steps.astype(float), (1.0 if is_least else -1.0) * curve.values
    late = steps >= WARM_UP * steps[-1]
    times, means, counts = _stretches(np.maximum(steps, 1.0)[late], values[late])
    share = np.sqrt(counts / counts.max())  # neighbours are alike: less than their number
    third = max(2, len(means) // 3)
    scatter = float(np.std(np.diff(means[third:]))) if len(means) > third + 2 else 0.0
    span = float(means[0] - means[-1])
    if not span > 2 * scatter or span <= 0:
        return None
    power, below = (values.reshape(-1) for values in np.meshgrid(_POWERS, _LEVELS))
    level = means.min() - span * below
    shapes = (times[None, :] / times[-1]) ** -power[:, None]
    heights = means[None, :] - level[:, None]
    scale = (share * shapes * heights).sum(axis=1) / (share * np.square(shapes)).sum(axis=1)
    squares = (share * np.square(heights - scale[:, None] * shapes)).sum(axis=1)
    floor = (_MISFIT * span) ** 2 * len(means)
    likely = -(len(means) - 3) / 2 * np.log(squares + floor)
    weight = np.exp(likely - likely.max())
    weight /= weight.sum()
    return _Extended(level=level, scale=scale, power=power, weight=weight, last=float(times[-1]))


def _forecast(curve: Curve, goal: Goal, where: str) -> Reach:
    """Extend a curve to a value that it has not reached."""
    if curve.lost_at is not None:
        raise UsageError(
            f"{where} is not reached, and {curve.name} is not a number from step {curve.lost_at} on"
        )
    if len(curve.values) < FEWEST:
        raise UsageError(
            f"{where} is not reached in {len(curve.values)} values, expected {FEWEST} for a "
            "forecast"
        )
    found = _extended(curve, goal.is_least)
    if found is None:
        raise UsageError(f"{where} is not reached: the metric stays, or moves away from it")
    wanted = goal.value if goal.is_least else -goal.value
    last = float(curve.steps[-1])
    gets_there = found.level < wanted
    if float(found.weight[~gets_there].sum()) > MOST_NOT_REACHING:
        flat = found.level[np.argmax(found.weight)]
        raise UsageError(
            f"{where} is not reached by step {last:.0f}. The curve may flatten at "
            f"{abs(flat):.3g}, before it gets there"
        )
    needed = found.last * (found.scale[gets_there] / (wanted - found.level[gets_there])) ** (
        1 / found.power[gets_there]
    )
    order = np.argsort(needed)
    reached = np.cumsum(found.weight[gets_there][order])
    ends = np.interp((0.5, 0.05, 0.95), reached / reached[-1], np.log(needed[order]))
    middle, low, high = np.maximum(np.exp(ends), last).tolist()
    if high > WIDEST * low:
        raise UsageError(
            f"{where} is not reached by step {last:.0f}. The forecast is too wide to use: "
            f"steps {low:,.0f} to {show_number(high)}"
        )
    return Reach(steps=middle, low=low, high=high, recorded=int(last), is_forecast=True)


def _stretches(steps: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return means over stretches of steps, each longer than the one before by the same factor."""
    edges = np.geomspace(steps[0], steps[-1] * 1.0001, _STRETCHES + 1)
    place = np.searchsorted(edges, steps, side="right")
    _, place = np.unique(place, return_inverse=True)
    counts = np.bincount(place)
    means = np.bincount(place, steps) / counts, np.bincount(place, values) / counts
    return *means, counts.astype(float)
