"""Intervals of time, and the stretches that several of them cover together."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Number = TypeVar("_Number", np.int64, np.float64)


def union(
    start: NDArray[_Number], end: NDArray[_Number], gap: float = 0
) -> tuple[NDArray[_Number], NDArray[_Number]]:
    """Return the starts and ends of stretches that cover the same times, in order.

    They lie further apart than a gap, so gaps up to that length are covered too.
    """
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order])
    begins = np.append([True], start[1:] > reached[:-1] + gap)[: len(start)]
    return start[begins], reached[np.append(begins[1:], begins[:1])]


def covered_ns(start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> int:
    """Return how much time some intervals cover together; one that ends before it starts, none."""
    first_ns, last_ns = union(start_ns, end_ns)
    return int(np.maximum(last_ns - first_ns, 0).sum())


def within(
    start: NDArray[_Number],
    end: NDArray[_Number],
    stretches: tuple[NDArray[_Number], NDArray[_Number]],
) -> NDArray[_Number]:
    """Return how much of each interval lies within the stretches of a union."""
    first, last = stretches
    if not len(first):
        return np.zeros_like(start)
    lasted = np.append([0], np.cumsum(last - first))

    def before(time: NDArray[_Number]) -> NDArray[_Number]:
        place = np.searchsorted(first, time, side="right")
        ahead = np.where(place > 0, np.maximum(last[place - 1] - time, 0), 0)
        return lasted[place] - ahead

    return before(end) - before(start)
