"""The centre of scattered values, and its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NORMAL_90 = 1.645  # standard deviations on each side of a 90 % interval


@dataclass(frozen=True, slots=True)
class Centre:
    """The centre of scattered values, and an interval that holds it in 95 of 100 cases."""

    value: float
    low: float
    high: float


def median_of(values: Sequence[float]) -> Centre:
    """Return the median with its order statistics, which assume nothing about the distribution.

    With five values or fewer, the interval is the whole range of the values.
    """
    ordered = sorted(values)
    off = max(0, math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2))
    return Centre(statistics.median(ordered), ordered[off], ordered[-1 - off])


def centre_of(values: Sequence[float]) -> Centre:
    """Return the median of the means of any two values (Hodges and Lehmann) with its interval.

    It is nearly as sharp as a mean, and a few values far off do not move it. The interval is that
    of Wilcoxon's signed ranks. It assumes only that values scatter to both sides alike.
    """
    one, other = np.triu_indices(count := len(values))
    means = np.sort((np.take(values, one) + np.take(values, other)) / 2)
    half = 1.96 * math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    off = max(0, math.floor(len(means) / 2 - half))
    return Centre(float(np.median(means)), float(means[off]), float(means[-1 - off]))
