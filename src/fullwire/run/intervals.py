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


def without(
    stretches: tuple[NDArray[_Number], NDArray[_Number]],
    others: tuple[NDArray[_Number], NDArray[_Number]],
) -> tuple[NDArray[_Number], NDArray[_Number]]:
    """Return the stretches of one union that the other union does not cover."""
    times = np.concatenate([*stretches, *others])
    order = np.argsort(times, kind="stable")
    times = times[order]
    sizes = [len(part) for part in (*stretches, *others)]
    depth, other_depth = (
        np.cumsum(np.repeat(steps, sizes)[order]) for steps in ([1, -1, 0, 0], [0, 0, 1, -1])
    )
    is_open = (depth[:-1] > 0) & (other_depth[:-1] == 0) & (times[1:] > times[:-1])
    return times[:-1][is_open], times[1:][is_open]


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
