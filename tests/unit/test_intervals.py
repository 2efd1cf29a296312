"""Intervals cover the same moments as when each moment is looked at by itself."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fullwire.run.intervals import covered_ns, union, within, without

MOMENTS = st.integers(-20, 20)
INTERVALS = st.lists(st.tuples(MOMENTS, st.integers(0, 9)), max_size=8)


def ends(intervals: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    start, length = np.array(intervals, np.int64).reshape(-1, 2).T
    return start, start + length


def moments(intervals: list[tuple[int, int]]) -> set[int]:
    return {moment for start, length in intervals for moment in range(start, start + length)}


@given(INTERVALS, INTERVALS)
def test_a_union_covers_each_moment_once(
    intervals: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    first, last = union(*ends(intervals))
    assert (first[1:] > last[:-1]).all()  # in order, and apart
    whole = moments(intervals)
    stretches = zip(first.tolist(), (last - first).tolist(), strict=True)
    assert moments(list(stretches)) == whole
    assert covered_ns(*ends(intervals)) == len(whole)
    expected = [len(moments([other]) & whole) for other in others]
    assert within(*ends(others), (first, last)).tolist() == expected
    start, end = without((first, last), union(*ends(others)))
    rest = zip(start.tolist(), (end - start).tolist(), strict=True)
    assert moments(list(rest)) == whole - moments(others)
    assert (end > start).all()


def test_gaps_up_to_a_length_are_covered_too() -> None:
    start, end = np.array([0, 12, 40, 30]), np.array([10, 20, 50, 31])
    assert [each.tolist() for each in union(start, end, 2)] == [[0, 30, 40], [20, 31, 50]]
    assert [each.tolist() for each in union(start, end, 9)] == [[0, 30], [20, 50]]
    assert covered_ns(np.array([5, 10]), np.array([3, 12])) == 2
