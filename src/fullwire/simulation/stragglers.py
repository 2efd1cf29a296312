"""The cost of random stragglers: ranks that synchronise wait for the slowest of N.

The computation of a rank takes X times its usual, with a mean of 1, independently of other ranks
and of other steps. Between two synchronisations lie so many steps, and the job waits for the
largest of N sums. The result is the expectation of that, without random draws:

    one step       E max = integral of x dF(x)^N, over the distribution itself or over recorded
                   values, each of m values with the weight (i/m)^N - ((i-1)/m)^N
    several steps  the same over the distribution of their sum, folded on a lattice

    recorded         the waiting that the run shows, whatever the workers (the usual choice); over
                     several steps, a rank that is late now and then makes up for it
    none             no rank is ever slower than the others
    lognormal:5%     a standard deviation of 5 % of the mean; exponential:5%, with a longer tail
    measured         as the run's own ranks and steps scatter: more workers wait longer, up to the
                     slowest that was recorded
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias, cast

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.errors import UsageError
from fullwire.simulation.step import Step
from fullwire.units import NUMBER, shown

_EXPECTED = "recorded, none, measured, lognormal:5% or exponential:5%"
_PERCENT = re.compile(rf"({NUMBER})%")
_MOST_SPREAD = 1.0
_FINEST_CELLS, _COARSEST_CELLS, _MOST_CELLS = 2**14, 2**9, 2**21


@dataclass(frozen=True, slots=True)
class AsRecorded:
    """The waiting of the recorded job, the same for any number of workers.

    A rank that is late in each step stays so over several. Ranks that are late by turns make up for
    it: the sum of N steps is late by the root of N times one step's lateness.
    """

    def late_s(self, step: Step, workers: Sequence[int], steps: int) -> Floats:
        """Return the waiting of a step, for each number of workers."""
        left = step.lasting_share + (1 - step.lasting_share) / math.sqrt(steps)
        return step.waiting_ns * 1e-9 * left * np.ones(len(workers))

    def __str__(self) -> str:
        return "recorded"


@dataclass(frozen=True, slots=True)
class NoJitter:
    """Ranks that take equally long."""

    def late_s(self, step: Step, workers: Sequence[int], steps: int) -> Floats:
        """Return a waiting of 0 for each number of workers."""
        del step, steps
        return np.zeros(len(workers))

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution by its shape and its standard deviation, as a share of the mean."""

    shape: Literal["lognormal", "exponential"]
    deviation: float

    def late_s(self, step: Step, workers: Sequence[int], steps: int) -> Floats:
        """Return the waiting of a step, for each number of workers."""
        if self.deviation == 0:
            lateness = np.zeros(len(workers))
        elif steps > 1:
            lattice = _lattice(self.shape, self.deviation, _cells(steps))
            lateness = _of_sums(*lattice, steps, tuple(workers))
        elif self.shape == "exponential":
            lateness = self.deviation * np.array([_harmonic(count) - 1 for count in workers])
        else:
            lateness = _of_lognormal(self.deviation, tuple(workers))
        return step.step_ns * 1e-9 * lateness

    def __str__(self) -> str:
        return f"{self.shape}:{100 * self.deviation:.12g}%"


@dataclass(frozen=True, slots=True)
class MeasuredJitter:
    """The scatter of the run's own computation, over its ranks and steps."""

    def late_s(self, step: Step, workers: Sequence[int], steps: int) -> Floats:
        """Return the waiting of a step, for each number of workers."""
        taken = np.sort(step.spread)
        if len(taken) < 2:
            raise UsageError(
                "jitter: measured needs a run of several steps or ranks. Without one, expected "
                f"{_EXPECTED}"
            )
        if steps > 1:
            # Each value goes into the two cells around it, so that the mean stays the same.
            cells = _cells(steps)
            width = max((taken[-1] - taken[0]) / (cells - 2), np.finfo(float).tiny)
            place = (taken - taken[0]) / width
            lower = np.minimum(place.astype(np.int64), cells - 2)
            share = np.bincount(lower, 1 - (place - lower), cells)
            share += np.bincount(lower + 1, place - lower, cells)
            lateness = _of_sums(float(width), share / len(taken), steps, workers)
        else:
            upper = np.arange(1, len(taken) + 1) / len(taken)
            lateness = _expected_largest(taken, upper, workers) - taken.mean()
        return step.step_ns * 1e-9 * _of_many(lateness / taken.mean(), workers)

    def __str__(self) -> str:
        return "measured"


Jitter: TypeAlias = AsRecorded | NoJitter | Spread | MeasuredJitter


def jitter(text: str) -> Jitter:
    """Read a jitter from its text."""
    simple: dict[str, Jitter] = {
        "recorded": AsRecorded(),
        "none": NoJitter(),
        "measured": MeasuredJitter(),
    }
    if text in simple:
        return simple[text]
    shape, _, share = text.partition(":")
    match = _PERCENT.fullmatch(share)
    if shape not in ("lognormal", "exponential") or match is None:
        raise UsageError(f"jitter: expected {_EXPECTED}, got {shown(text)}")
    deviation = float(match[1]) / 100
    if not 0 <= deviation <= _MOST_SPREAD:
        raise UsageError(f"jitter: expected a deviation from 0% to 100%, got {shown(share)}")
    return Spread(cast(Literal["lognormal", "exponential"], shape), deviation)


def _of_lognormal(deviation: float, workers: tuple[int, ...]) -> Floats:
    """Integrate over the normal variable below, where the trapezoidal rule is all but exact."""
    sigma = math.sqrt(math.log1p(deviation**2))
    normal, density, log_below = _normal()
    size = np.exp(sigma * normal - sigma**2 / 2) - 1
    counts = np.array(workers, np.float64)
    step = normal[1] - normal[0]
    largest = [
        step * float(np.sum(size * count * density * np.exp((count - 1) * log_below)))
        for count in counts
    ]
    return _of_many(np.array(largest), workers)


@cache
def _normal() -> tuple[Floats, Floats, Floats]:
    """Return points of the standard normal, its density there, the log of the share below."""
    points = np.arange(-12 * 256, 16 * 256 + 1) / 256
    below = [0.5 * math.erfc(-point / math.sqrt(2)) for point in points.tolist() if point < 0]
    above = [0.5 * math.erfc(point / math.sqrt(2)) for point in points.tolist() if point >= 0]
    density = np.exp(-(points**2) / 2) / math.sqrt(2 * math.pi)
    return points, density, np.concatenate([np.log(below), np.log1p(-np.array(above))])


def _harmonic(count: int) -> float:
    if count > 1000:
        return math.log(count) + 0.5772156649015329 + 1 / (2 * count) - 1 / (12 * count**2)
    return math.fsum(1 / number for number in range(1, count + 1))


def _cells(steps: int) -> int:
    """Return how finely one step is cut: a sum of many is wide and needs less."""
    return max(_COARSEST_CELLS, min(_FINEST_CELLS, _MOST_CELLS // steps))


@cache
def _lattice(shape: str, deviation: float, cells: int) -> tuple[float, Floats]:
    """Return a cell's width, and the share of a distribution in each."""
    if shape == "exponential":
        edges = np.linspace(0, 40 * deviation, cells + 1)
        below = -np.expm1(-edges / deviation)
    else:
        sigma = math.sqrt(math.log1p(deviation**2))
        edges = np.linspace(math.exp(-8 * sigma), math.exp(8 * sigma), cells + 1)
        below = np.array(
            [0.5 * math.erfc(-point / math.sqrt(2)) for point in (np.log(edges) / sigma).tolist()]
        )
    return float(edges[1] - edges[0]), np.diff(below)


def _of_sums(width: float, share: Floats, steps: int, workers: Sequence[int]) -> Floats:
    """Return by how much the largest of N sums is expected to be above a sum, for each step."""
    size = steps * (len(share) - 1) + 1
    padded = 1 << (size - 1).bit_length()
    folded = np.fft.irfft(np.fft.rfft(share / share.sum(), padded) ** steps, padded)[:size]
    folded = np.maximum(folded, 0.0)
    upper = np.cumsum(folded)
    cells = np.arange(size, dtype=np.float64)
    largest = _expected_largest(cells, upper / upper[-1], workers)
    mean = float(np.sum(cells * folded)) / upper[-1]
    return _of_many(width * (largest - mean) / steps, workers)


def _expected_largest(values: Floats, upper: Floats, workers: Sequence[int]) -> Floats:
    """Return the expected largest of N values; `upper` is the share that is no larger than each."""
    with np.errstate(divide="ignore"):
        log_upper = np.log(np.minimum(upper, 1.0))
    rises = np.diff(values)
    # the last value, less what lies below it: sums of small terms, not differences of large ones
    return np.array(
        [values[-1] - float(np.sum(np.exp(count * log_upper[:-1]) * rises)) for count in workers]
    )


def _of_many(lateness: Floats, workers: Sequence[int]) -> Floats:
    """Set the lateness of one worker alone to 0: it waits for no other."""
    return np.where(np.array(workers) == 1, 0.0, np.maximum(lateness, 0.0))
