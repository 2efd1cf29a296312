"""Samples to a target by batch: E(B) = E0 (1 + B/Bc).

A tiny batch needs E0 samples. At the critical batch Bc a training needs twice as many. A training
that changes its batch is the sum of its parts: each sample brings it on by 1 / E(B). Few batches
are ever recorded, mostly two to five. So the fit keeps every Bc that they allow, each with its
weight, and the interval of a prediction comes from all of them.

The relative deviations of the points from the law have an unknown size. Three things say how large
they may be: the points themselves, the spread between runs of one point, and how well the law fits
elsewhere (`MISFIT`). So a prediction at one Bc is Student's, and the whole a weighted sum of them.
Runs at one batch are one point, whose spread they show themselves, as far as they are many.
Batches far below Bc need equal samples, so they do not bound Bc from above. A larger batch may then
need as few samples as by a law without a critical batch.
docs/design/time-to-target.md has the roads not taken.

Noise tells the critical batch too. A gradient of b samples is the true gradient G with noise of
variance S/b. The mean squared norm of the ranks' gradients, and the squared norm of their mean,
give unbiased estimates of both:

    S = b (ranks' - mean's) n/(n-1)        G^2 = (n mean's - ranks') / (n-1)

Single values of G^2 are often negative. So numerators and denominators are averaged apart over
steps, and then divided: B = S / G^2 samples. Steps that follow each other are alike, so the
interval is a bootstrap of blocks of steps. Noise alone tells the critical batch within a factor of
two to three (arXiv 2505.23971).

Workers that synchronise seldom have a smaller batch each, and end at a higher loss. DiLoCo's papers
publish final losses of 2 to 8 replicas, synchronised every 30 or 100 steps, for models of 35
million to 10 billion parameters (arXiv 2501.18512, 2503.09799). The loss is higher by

    0.74 % log2(replicas) (parameters / 1e9)^-0.2 (steps / 30)^0.4 - 0.72 %

and never lower. The constants are fitted to these 56 losses. Their standard deviation from the law
is 0.2 % of the loss (`validation/replicas.py`). Four losses of two replicas are lower than those of
plain training, by 0.1 to 0.4 %. That is too little to tell from none, and without this bound the
law promises it for few steps of any model.

Streaming DiLoCo has the losses of DiLoCo there. Other models, optimizers and data may differ more
than these do from each other. So beyond the published range the interval has half of the excess
beside its usual width.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.errors import UsageError
from fullwire.run.centre import NORMAL_90
from fullwire.run.run import Noise, Whole

# From MLPerf's 17 benchmarks (validation/reference_points.py). A point lies so far from its curve,
# and this knowledge counts as so many points. Critical batches lie around the geometric mean of the
# recorded ones: here are the mean and the standard deviation of the ratio's logarithm.
MISFIT, MISFIT_COUNTS = 0.04, 3
_USUAL_PLACE, _USUAL_RANGE = 0.8, 1.5
USUAL_SPREAD = 0.038  # between runs of one point: the median of their coefficients of variation
MOST_SPREAD = 0.3  # a larger one in a table is a slip
_SPREAD_COUNTS = 1  # how many degrees of freedom the usual spread is worth beside measured ones
# Beyond the recorded batches the law itself is less sure: so much of the samples' logarithm, as a
# standard deviation, for each time that the batch grows or falls by e. It is the least that brings
# 90 % of MLPerf's points at over twice the recorded batches inside, as a mean over benchmarks.
BEYOND = 0.08
FAR = 4.0  # times the largest recorded batch
COVERED = 0.90
_CANDIDATES, _WIDEST = 121, 4.0  # of Bc, within so many standard deviations
_UNLIKELY = NORMAL_90**2 / 2  # of the log-likelihood: runs refuse such a law, 95 % of one side
_PLACES, _REACH = 801, 8.0  # where the density of a prediction is computed
_MOST_BATCHES = 64  # more are read off between these
PRIOR_FACTOR = 2.5  # between the noise scale and the critical batch of a training
FEWEST_STEPS = 10
WARM_UP = 0.1  # of the steps
_RESAMPLES = 400
_HEIGHT, _BY_PARAMETERS, _BY_STEPS = 0.00739, -0.2, 0.4
_OFFSET = 0.00722
SCATTER = 0.0020  # standard deviation of the loss's logarithm from the law
REPLICAS, PARAMETERS, STEPS = (2, 8), (35e6, 10e9), (30, 100)
_DOUBT = 1 / 3  # of the logarithm of samples beyond the recorded ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Runs at one batch that reached the target: the mean of their samples, and their spread."""

    batch: float
    samples: float
    runs: int = 1
    # Relative standard deviations of one run: of its training, None where only others may show it,
    # and of reading its samples from a curve.
    spread: float | None = None
    reading: float = 0.0
    # The batches of a training that changed its batch, each with its share of the samples; `batch`
    # is then their mean.
    stages: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch", "samples"):
            value = getattr(self, name)
            if not (0 < value < math.inf):
                raise UsageError(f"{name}: expected a number above 0, got {value:g}")

    def lost(self, critical: Floats) -> Floats:
        """Return the logarithm of E(B) / E0 at each critical batch.

        A sample in a batch B brings a training by 1 / E(B) of its way. So the samples of several
        batches take the harmonic mean of what each batch alone would take.
        """
        if not self.stages:
            return np.asarray(np.log1p(self.batch / critical))
        batches, shares = np.array(self.stages).T
        return np.asarray(-np.log((shares / (1 + batches / critical[:, None])).sum(axis=1)))

    @property
    def variance(self) -> float:
        """The variance of the mean's logarithm."""
        spread = USUAL_SPREAD if self.spread is None else self.spread
        return min(math.hypot(spread, self.reading), MOST_SPREAD) ** 2 / self.runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Critical:
    """A critical batch known from elsewhere: 90 % sure to lie within a factor of the truth."""

    batch: float
    factor: float  # 1 or more; a user's own value counts as exact

    def __post_init__(self) -> None:
        if not (0 < self.batch < math.inf and self.factor >= 1):
            raise UsageError(f"critical batch: expected a number above 0, got {self.batch:g}")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class BatchLaw:
    """Every law that the points allow, each with its weight."""

    critical: Floats  # Bc
    least: Floats  # log E0
    weight: Floats  # adds up to 1
    deviation: Floats  # of a point from the law
    sureness: float  # the points' summed weight; the mean's variance is deviation^2 / sureness
    freedom: float
    smallest: float  # recorded batch
    largest: float
    run_variance: float = USUAL_SPREAD**2  # of a new run
    endless: BatchLaw | None = None  # without a critical batch, where the points do not refuse it

    def samples(
        self, batches: Floats, *, variance: float | None = None
    ) -> tuple[Floats, Floats, Floats]:
        """Return the median, low and high end of the samples that each batch needs.

        `variance` is that of the prediction's subject beyond the law: one new run by default.
        """
        if variance is None:
            variance = self.run_variance
        distinct, place = np.unique(np.asarray(batches, float), return_inverse=True)
        at = distinct
        if len(distinct) > _MOST_BATCHES:
            at = np.geomspace(distinct[0], distinct[-1], _MOST_BATCHES)
        tail = (1 - COVERED) / 2
        ends = np.array([self._quantiles(batch, variance, (0.5, tail, 1 - tail)) for batch in at])
        if at is not distinct:
            ends = np.stack(
                [np.interp(np.log(distinct), np.log(at), end) for end in ends.T], axis=1
            )
        middle, low, high = np.exp(ends.T)[:, place.reshape(np.shape(batches))]
        if self.endless is not None:
            least = self.endless.samples(batches, variance=variance)[1]
            low = np.where(np.asarray(batches) > self.largest, np.minimum(low, least), low)
        return middle, low, high

    def critical_between(self) -> tuple[float, float, float]:
        """Return the median critical batch, and the ends of its interval; infinity is no end."""
        order = np.argsort(self.critical)
        reached = np.cumsum(self.weight[order]) - self.weight[order] / 2
        tail = (1 - COVERED) / 2
        found = np.interp((0.5, tail, 1 - tail), reached, np.log(self.critical[order]))
        middle, low, high = np.exp(found).tolist()
        return middle, low, high if self.endless is None else math.inf

    def is_far(self, batches: Floats) -> np.ndarray:
        """Say which batches lie too far beyond the largest recorded one to be believed."""
        return np.asarray(batches, float) > FAR * self.largest

    def _quantiles(self, batch: float, variance: float, wanted: Sequence[float]) -> Floats:
        """Return quantiles of the logarithm of the samples at one batch."""
        middle = self.least + np.log1p(batch / self.critical)
        away = max(math.log(batch / self.largest), math.log(self.smallest / batch), 0.0)
        own = 1 + (variance + (BEYOND * away) ** 2) / MISFIT**2
        width = self.deviation * math.sqrt(own + 1 / self.sureness)
        centre = float((self.weight * middle).sum())
        around = (self.weight * (np.square(middle - centre) + np.square(width))).sum()
        share = np.linspace(-1, 1, _PLACES)
        places = centre + _REACH * math.sqrt(around) * np.sign(share) * np.square(share)
        # In place: arrays of this size cost more to allocate than to compute.
        shape = places - middle[:, None]
        shape /= width[:, None]
        np.square(shape, out=shape)
        shape /= self.freedom
        shape += 1
        shape **= -(self.freedom + 1) / 2
        density = (self.weight / width) @ shape
        steps = (density[1:] + density[:-1]) / 2 * np.diff(places)
        reached = np.concatenate([[0.0], np.cumsum(steps)])
        return np.interp(wanted, reached / reached[-1], places)


def fit_batches(points: Sequence[Point], known: Critical | None = None) -> BatchLaw:
    """Fit the law to points at several batches, or to one with a critical batch from elsewhere."""
    batches = np.array([point.batch for point in points], float)
    if not len(batches):
        raise UsageError("samples to a target: expected at least one run that reached it")
    if known is None and len(set(batches.tolist())) < 2:
        raise UsageError(
            "critical batch: expected runs at two batches or more, gradient noise, or "
            f"--critical-batch, got runs at batch {batches[0]:g} only"
        )
    if known is None:
        centre = float(np.log(batches).mean()) + _USUAL_PLACE
        width = _USUAL_RANGE
    else:
        centre, width = math.log(known.batch), max(math.log(known.factor), 1e-6) / NORMAL_90
    points, run_variance = merged(points)
    critical = np.exp(centre + width * np.linspace(-_WIDEST, _WIDEST, _CANDIDATES))
    law, likely = _of_criticals(points, critical, run_variance)
    # A normal prior keeps log Bc in its range.
    weight = np.square((np.log(critical) - centre) / width) / -2 + likely
    weight = np.exp(weight - weight.max())
    endless = None
    if known is None:
        without, as_likely = _of_criticals(points, np.array([math.inf]), run_variance)
        endless = without if as_likely[0] > likely.max() - _UNLIKELY else None
    return replace(law, weight=weight / weight.sum(), endless=endless)


def _of_criticals(
    points: Sequence[Point], critical: Floats, run_variance: float
) -> tuple[BatchLaw, Floats]:
    """Return the law at each of these critical batches, and the logarithms of their likelihoods."""
    batches, samples = np.array([(point.batch, point.samples) for point in points], float).T
    observed = np.log(samples)
    share = 1 / (1 + np.array([point.variance for point in points]) / MISFIT**2)
    lost = np.log1p(batches / critical[:, None])
    for place, point in enumerate(points):
        if point.stages:
            lost[:, place] = point.lost(critical)
    least = ((observed - lost) * share).sum(axis=1) / share.sum()
    squares = (share * np.square(observed - lost - least[:, None])).sum(axis=1)
    freedom = MISFIT_COUNTS + len(points) - 1
    variance = (squares + MISFIT_COUNTS * MISFIT**2) / freedom
    law = BatchLaw(
        critical=critical,
        least=least,
        weight=np.full(len(critical), 1 / len(critical)),
        deviation=np.sqrt(variance),
        sureness=float(share.sum()),
        freedom=freedom,
        smallest=float(batches.min()),
        largest=float(batches.max()),
        run_variance=run_variance,
    )
    return law, -freedom / 2 * np.log(variance)  # what the integral over the deviation leaves


def merged(points: Sequence[Point]) -> tuple[list[Point], float]:
    """Return one point for the runs of each batch, and the variance of a new run.

    How far runs of one batch are apart shows their spread, beside the usual one. Points that know
    their spread stay as they are.
    """
    by_batch: dict[Any, list[Point]] = defaultdict(list)
    for point in points:
        if point.spread is None:
            by_batch[point.batch, point.stages].append(point)
    squares, freedom = 0.0, 0
    joined = [point for point in points if point.spread is not None]
    for (batch, stages), alike in by_batch.items():
        runs = np.array([point.runs for point in alike])
        read = np.square([point.reading for point in alike])
        logs = np.log([point.samples for point in alike])
        mean = float(np.average(logs, weights=runs))
        of_reading = float((read * (1 - runs / runs.sum())).sum())
        squares += max(float((runs * np.square(logs - mean)).sum()) - of_reading, 0.0)
        freedom += len(alike) - 1
        reading = math.sqrt(float(np.average(read, weights=runs)))
        count = int(runs.sum())
        mean_samples = math.exp(mean)
        joined.append(
            Point(batch=batch, samples=mean_samples, runs=count, reading=reading, stages=stages)
        )
    variance = (_SPREAD_COUNTS * USUAL_SPREAD**2 + squares) / (_SPREAD_COUNTS + freedom)
    spread = math.sqrt(variance)
    return [
        replace(point, spread=spread) if point.spread is None else point for point in joined
    ], variance


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """The batch at which noise and gradient are equally strong, with a 90 % interval."""

    batch: float  # samples
    low: float
    high: float
    steps: int

    @property
    def critical(self) -> Critical:
        """The critical batch that it hints at."""
        own = np.log(self.high / self.low) / 2
        return Critical(batch=self.batch, factor=float(np.exp(np.hypot(np.log(PRIOR_FACTOR), own))))


def noise_scale(noise: Noise, workers: int | None, run: str) -> NoiseScale:
    """Estimate the noise scale of a run's steps, without its first ones."""
    ranks = np.where(noise.ranks > 0, noise.ranks, workers or 0)
    usable = (ranks > 1) & (noise.samples > 0)
    usable &= np.isfinite(noise.ranks_squared_norm) & np.isfinite(noise.mean_squared_norm)
    rows = noise.rows(usable)
    order = np.argsort(rows.step, kind="stable")
    rows, ranks = rows.rows(order), ranks[usable][order]
    if len(noise) and not noise.samples.any():
        raise UsageError(
            f"{run}: gradient noise of batches of unknown size: expected the batch of the whole "
            "job with --recorded-batch"
        )
    noted_steps, first = rows.step, round(WARM_UP * len(rows))
    rows, ranks = rows.rows(np.arange(first, len(rows))), ranks[first:]
    if len(rows) < FEWEST_STEPS:
        raise UsageError(
            f"{run}: gradient noise of {len(rows)} steps of several ranks after the first ones, "
            f"expected {FEWEST_STEPS}: {_longer_recording(noted_steps)}"
        )
    each, mean = rows.ranks_squared_norm, rows.mean_squared_norm
    noises = rows.samples * (each - mean) * ranks / (ranks - 1)
    signals = (ranks * mean - each) / (ranks - 1)
    noise_sum, signal_sum = float(noises.sum()), float(signals.sum())
    if not (noise_sum > 0 and signal_sum > 0):
        raise UsageError(
            f"{run}: the gradient is lost in its noise over {len(rows)} steps: record more"
        )
    low, high = _bootstrapped(noises, signals)
    return NoiseScale(batch=noise_sum / signal_sum, low=low, high=high, steps=len(rows))


def _longer_recording(noted_steps: Whole) -> str:
    """Say how many steps have enough noise: it is noted in some of them, and the first go."""
    if len(noted_steps) < 2:
        return "record --noise over more steps, with several workers"
    needed = next(
        count for count in itertools.count() if count - round(WARM_UP * count) >= FEWEST_STEPS
    )
    between = round(float(np.diff(noted_steps).mean()))
    recorded = "one step" if between == 1 else f"one step of {between}"
    return f"record --noise over {needed * between:,} steps or more, as {recorded} is noted"


def _bootstrapped(noises: Floats, signals: Floats) -> tuple[float, float]:
    """Return the interval of the ratio of sums over resampled blocks of neighbouring steps."""
    count = len(noises)
    length = max(1, round(2 * count ** (1 / 3)))
    blocks = -(-count // length)
    random = np.random.default_rng(0)  # the same run has the same answer
    starts = random.integers(0, count, (_RESAMPLES, blocks))
    places = (starts[:, :, None] + np.arange(length)) % count
    above, below = noises[places].sum(axis=(1, 2)), signals[places].sum(axis=(1, 2))
    is_told = (above > 0) & (below > 0)
    if is_told.mean() < 0.9:  # the gradient may as well be zero
        return float(noises.sum() / signals.sum()) / 10, float(noises.sum() / signals.sum()) * 10
    low, high = np.quantile(above[is_told] / below[is_told], (0.05, 0.95)).tolist()
    return float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """The loss in relation to that of workers that synchronise each step, with a 90 % interval."""

    ratio: float
    low: float
    high: float
    is_beyond: bool  # the published range

    def over(self, recorded: Excess) -> Excess:
        """Return it in relation to the loss of recorded workers that had another excess."""
        below = math.hypot(
            math.log(self.ratio / self.low), math.log(recorded.high / recorded.ratio)
        )
        above = math.hypot(
            math.log(self.high / self.ratio), math.log(recorded.ratio / recorded.low)
        )
        ratio = self.ratio / recorded.ratio
        return Excess(
            ratio=ratio,
            low=ratio * math.exp(-below),
            high=ratio * math.exp(above),
            is_beyond=self.is_beyond or recorded.is_beyond,
        )


def excess(*, replicas: int, steps: int, parameters: float) -> Excess:
    """Return how much higher the loss is, if replicas average every so many steps."""
    if steps == 1 or replicas == 1:
        return Excess(ratio=1, low=1, high=1, is_beyond=False)
    more = _HEIGHT * math.log2(replicas) * (parameters / 1e9) ** _BY_PARAMETERS
    more *= (steps / 30) ** _BY_STEPS
    asked = ((replicas, REPLICAS), (parameters, PARAMETERS), (steps, STEPS))
    is_beyond = any(not low <= value <= high for value, (low, high) in asked)
    half = NORMAL_90 * SCATTER + (more / 2 if is_beyond else 0)
    middle = max(more - _OFFSET, 0.0)
    return Excess(
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        is_beyond=is_beyond,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """A worker's own work in a pass: some of it grows with its samples, some is there anyway."""

    start_s: float
    sample_s: float
    recorded: tuple[float, float]  # the fewest and the most samples of a pass
    runs: tuple[str, ...]  # that show it; one run alone cannot tell the two apart

    def time_s(self, samples: Floats) -> Floats:
        """Return the time of a pass with so many samples."""
        return self.start_s + self.sample_s * samples

    def doubt(self, samples: Floats) -> Floats:
        """Return how far the logarithm of this time may be off, beyond the recorded samples.

        Larger passes use a device better, until it is full. A small model trained here took a third
        less than this law at four times the samples (validation/settings_to_target.py).
        """
        fewest, most = self.recorded
        away = np.log(np.maximum(samples / most, fewest / samples))
        return np.maximum(away, 0) * _DOUBT


def computing(shown_s: Sequence[tuple[str, float, float]]) -> Computing:
    """Fit a worker's own work to runs: the name, the samples of a pass, and its seconds.

    Neither part is below 0. Work that a single run shows grows with the samples altogether.
    """
    samples, times_s = np.array([row[1:] for row in shown_s], float).T
    share = 1 / np.square(times_s)  # relative errors count
    centre = float((share * samples).sum() / share.sum())
    middle_s = float((share * times_s).sum() / share.sum())
    away = samples - centre
    spread = float((share * np.square(away)).sum())
    most_s = float((share * samples * times_s).sum() / (share * np.square(samples)).sum())
    is_told = spread > 1e-12 * share.sum() * centre**2
    names = tuple(name for name, *_ in shown_s)
    slope_s = float((share * away * times_s).sum()) / spread if is_told else most_s
    start_s = middle_s - slope_s * centre
    if start_s < 0 or not is_told:
        start_s, slope_s = 0.0, most_s
    elif slope_s < 0:
        start_s, slope_s = middle_s, 0.0
    return Computing(
        start_s=start_s,
        sample_s=slope_s,
        recorded=(float(samples.min()), float(samples.max())),
        runs=names if is_told else (),
    )
