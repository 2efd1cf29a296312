"""The critical batch from gradient noise: how much the ranks' gradients differ from their mean.

A gradient of b samples is the true gradient G with noise of variance S/b. The mean squared norm of
the ranks' gradients, and the squared norm of their mean, give unbiased estimates of both:

    S = b (ranks' - mean's) n/(n-1)        G^2 = (n mean's - ranks') / (n-1)

Single values of G^2 are often negative. So numerators and denominators are averaged apart over
steps, and then divided: B = S / G^2 samples. Steps that follow each other are alike, so the
interval is a bootstrap of blocks of steps. Noise alone tells the critical batch within a factor of
two to three (arXiv 2505.23971).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.convergence.batches import Critical
from fullwire.errors import UsageError
from fullwire.run.run import Noise

PRIOR_FACTOR = 2.5  # between the noise scale and the critical batch of a training
FEWEST_STEPS = 10
WARM_UP = 0.1  # of the steps
_RESAMPLES = 400


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
    rows, ranks = rows.rows(np.argsort(rows.step, kind="stable")), ranks[usable]
    first = round(WARM_UP * len(rows))
    rows, ranks = rows.rows(np.arange(first, len(rows))), ranks[first:]
    if len(rows) < FEWEST_STEPS:
        raise UsageError(
            f"{run}: gradient noise of {len(rows)} steps of several ranks, expected "
            f"{FEWEST_STEPS}: record --noise"
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
