"""A metric's curve: its values in order of steps, and the goal that it is to reach.

Steps that begin anew in each epoch are counted on. A restarted job goes back to a checkpoint: the
values of the attempt before, from there on, are left out. Of values at the same step the later
counts. Values that are no number are left out and counted.

A recording tells the samples that a job took up to each value. Where the batch changes during a
training, as in a warm-up of the batch, steps are no measure of its way: the curve is then read over
samples.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.errors import UsageError
from fullwire.run.centre import NORMAL_90
from fullwire.run.run import Metrics, Whole
from fullwire.units import NUMBER, shown

_SIGNS = {"<=": True, "<": True, "\u2264": True, ">=": False, ">": False, "\u2265": False}
_NO_SIGN = "<>=\u2264\u2265"
_GOAL = re.compile(rf"\s*([^{_NO_SIGN}]*[^\s{_NO_SIGN}])\s*({'|'.join(_SIGNS)})\s*({NUMBER})\s*")
FEWEST = 8  # values, for a forecast, or to hold their clock against that of the steps
_SOURCES = "record --metric, fullwire.log, or a named group of import --pattern"
_LIKE = 5  # values on each side of a fall of the steps, that are compared
FAR = 4.0  # times the recorded steps
_LATE = 3.0  # steps: a value may be reported a little after its step, or before it
_OF_A_PACE = 0.05  # its usual scatter between a metric's steps and the run's
_BLOCKS = 24  # of a curve, each with its mean batch
_STEADY = 0.02  # of all samples, by which those of a constant batch may lie beside a line


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
        return float(np.log(self.high / self.low)) / 2 / NORMAL_90


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
    samples: Floats | None = None  # that the job took up to each value; NaN where unknown
    unit: str = "step"  # that `steps` counts

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

    def taken(self) -> Taken | None:
        """Return the samples that the job took by its steps; None where they are unknown."""
        if self.samples is None:
            return None
        known = np.flatnonzero(np.isfinite(self.samples))
        if len(known) < FEWEST:
            return None
        steps = self.steps[known].astype(float)
        samples = np.maximum.accumulate(self.samples[known])
        if samples[-1] <= samples[0]:
            return None
        edges = np.linspace(0, len(known) - 1, _BLOCKS + 1).astype(int)
        # A block ends where samples came. Values that are told again after that are no part of it.
        edges = np.unique(np.searchsorted(samples, samples[edges]))
        first, last = edges[[0, -1]]
        line = np.interp(steps, steps[[first, last]], samples[[first, last]])
        # A metric that counts the passes of a step has several values between samples.
        begins = np.flatnonzero(np.diff(samples, prepend=-1.0) > 0)
        ends = np.append(begins[1:], len(samples)) - 1
        held = float(np.median(steps[ends] - steps[begins]))
        # A value may be told a step before or after the samples of its own.
        blur = (_LATE + held) * (samples[last] - samples[first]) / (steps[last] - steps[first])
        off = float(np.abs(samples - line).max())
        return Taken(
            steps=steps[edges],
            samples=samples[edges],
            spacing=float(np.median(np.diff(steps))),
            is_steady=off <= blur + _STEADY * (samples[-1] - samples[0]),
        )

    def over_samples(self, scale: float) -> Curve:
        """Return the curve over the samples that the job took, times a scale."""
        assert self.samples is not None
        known = np.isfinite(self.samples)
        samples = np.rint(np.maximum.accumulate(self.samples[known]) * scale).astype(np.int64)
        is_new = np.append(samples[1:] != samples[:-1], [True])
        return replace(
            self,
            steps=samples[is_new],
            values=self.values[known][is_new],
            times_ns=self.times_ns[known][is_new],
            samples=samples[is_new].astype(float),
            unit="sample",
        )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Taken:
    """The samples that a job took by its steps, at the edges of blocks of values."""

    steps: Floats
    samples: Floats
    spacing: float  # of the values, in steps
    is_steady: bool  # whether the batch stays the same

    @property
    def batches(self) -> Floats:
        """The mean batch of each block; the last one goes on."""
        return np.asarray(np.diff(self.samples) / np.diff(self.steps))

    @property
    def mean(self) -> float:
        """The mean batch."""
        return float((self.samples[-1] - self.samples[0]) / (self.steps[-1] - self.steps[0]))

    @property
    def begins_late(self) -> bool:
        """Whether the job had taken steps before the recorded ones."""
        return bool(self.steps[0] - self.samples[0] / self.batches[0] > self.spacing + _LATE)

    def scaled(self, scale: float) -> Taken:
        """Return it with so many times the samples."""
        return replace(self, samples=self.samples * scale)

    def step_at(self, samples: float) -> float:
        """Return the step at which the job has taken so many samples; its last batch goes on."""
        beyond = max(samples - float(self.samples[-1]), 0.0) / float(self.batches[-1])
        edges = np.append(0.0, self.samples), np.append(min(0.0, self.steps[0]), self.steps)
        return float(np.interp(samples, *edges)) + beyond

    def stages(self, samples: float) -> tuple[tuple[float, float], ...]:
        """Return the batches up to so many samples, each with its share of them."""
        edges = np.append(0.0, np.minimum(self.samples, samples))
        edges[-1] = samples
        first = self.samples[0] / self.steps[0] if min(self.steps[0], self.samples[0]) > 0 else 0.0
        batches = np.append(first or self.batches[0], self.batches)
        shares = np.diff(edges) / samples
        is_there = (shares > 0) & (batches > 0)
        return tuple(zip(batches[is_there].tolist(), shares[is_there].tolist(), strict=True))


def read_goal(text: str) -> Goal:
    """Read a goal, such as 'loss<=0.3' or 'accuracy>=0.9'."""
    found = _GOAL.fullmatch(text)
    if found is None:
        raise UsageError(
            f"target: expected a metric and its value, like loss<=0.3, got {shown(text)}"
        )
    value = float(found[3])
    if not math.isfinite(value):
        raise UsageError(
            f"target: expected a metric and a finite value, like loss<=0.3, got {shown(text)}"
        )
    return Goal(found[1], value, _SIGNS[found[2]])


def curve_of(metrics: Metrics, name: str, run: str) -> Curve:
    """Return the curve of one metric of a run."""
    chosen = metrics.rows(metrics.name == name)
    if not len(chosen):
        known = ", ".join(sorted(set(metrics.name.tolist())))
        has = f"it has {known}" if known else f"it has no metrics: {_SOURCES} gives them"
        raise UsageError(f"{run}: expected the metric {name!r}, {has}")
    chosen = _counted_on(chosen)
    kept = chosen.rows(_stands(chosen))
    shared, counts_of = np.unique(kept.step, return_counts=True)
    if counts_of.max() >= FEWEST and 2 * counts_of.max() > len(kept):
        raise UsageError(
            f"{run}: expected a step for each value of {name}, got {counts_of.max():,} of "
            f"{len(kept):,} values at step {shared[np.argmax(counts_of)]}"
        )
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
        samples=kept.samples[order][counts],
    )


def _counted_on(metrics: Metrics) -> Metrics:
    """Count the steps of one metric on where they begin anew in each epoch.

    A restart from the beginning begins with the values of the beginning. An epoch goes on with the
    values of the one before. Where the scatter of the values hides this, epochs of one length are
    known by it.
    """
    order = np.lexsort((metrics.step, metrics.time_ns))
    steps, values = metrics.step[order], metrics.value[order]
    falls = _fall_backs(steps)
    are_alike = _are_alike(np.split(steps, falls))
    each = np.split(values, falls)
    for begin, (before, after) in zip([0, *falls], pairwise(each), strict=False):
        parts = each[0][:_LIKE], before[-_LIKE:], after[:_LIKE]
        first, end, now = (float(np.median(part)) for part in parts)
        is_hidden = parts[0].min() <= parts[1].max() and parts[1].min() <= parts[0].max()
        is_from_start = steps[begin + len(before)] <= steps[begin]
        # No restart begins without numbers. One may follow a training that lost its numbers.
        goes_on = abs(now - end) < abs(now - first) or not np.isfinite(now)
        if not is_from_start or not (goes_on or (are_alike and is_hidden)):
            return metrics
    counted = metrics.step.copy()
    for at in falls:
        apart = int(np.median(np.diff(steps[:at])))
        steps[at:] += steps[:at].max() + max(apart, 1) - steps[at]
    counted[order] = steps
    return replace(metrics, step=counted)


def _are_alike(parts: list[Whole]) -> bool:
    """Return whether parts of the steps end at one step; the last may end before it."""
    ends, last = [int(part.max()) for part in parts[:-1]], int(parts[-1].max())
    blur = int(np.median(np.diff(parts[0]))) if len(parts[0]) > 1 else 0
    if not ends or max(ends) - min(ends) > blur or last > max(ends) + blur:
        return False
    return len(ends) > 1 or last >= ends[0] - blur


def _fall_backs(steps: Whole) -> list[int]:
    """Return where the steps, in order of time, fall back and rise again from there.

    Several writers are out of order too, but the next row of another one is ahead again. A single
    late row, as of a summary, is no fall either. So a fall shows in two rising rows, both behind.
    """
    found: list[int] = []
    begin, furthest = 0, np.iinfo(np.int64).min
    for at in (np.flatnonzero(np.diff(steps) < 0) + 1).tolist():
        furthest = max(furthest, int(steps[begin:at].max()))
        begin = at
        if at + 1 < len(steps) and steps[at] < steps[at + 1] <= furthest:
            found.append(at)
            furthest = int(steps[at])
    return found


def _stands(metrics: Metrics) -> NDArray[np.bool_]:
    """Return the rows of one metric that no restart has given up."""
    order = np.lexsort((metrics.step, metrics.time_ns))
    steps = metrics.step[order]
    from_here = np.full(len(steps), np.iinfo(np.int64).max)  # where a later row goes back to
    for at in _fall_backs(steps):
        from_here[at - 1] = steps[at]
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
