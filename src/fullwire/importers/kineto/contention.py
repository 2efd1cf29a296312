"""How much longer kernels take beside communication than alone, as one rank's trace shows it.

Kernels are compared with others of the same name, launch (grid, block and shared memory), stream,
and shapes of the operator behind them, where the trace tells these. A kernel is beside
communication if kernels that communicate cover most of its time, and alone if they cover none.

Where streams compute at once, the busiest of them decides how long that takes: a kernel counts only
while no busier stream computes. So a slower kernel that hides behind others costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fullwire.importers.kineto.scan import Trace
from fullwire.run.intervals import union, within, without
from fullwire.run.run import Whole

FEWEST = 3  # kernels of one kind on each side, to believe their medians
_MOST_SCATTER = 0.25  # of the median, between quartiles alone: with more, their work differs
_CLOCK_NS = 1_000  # older traces tell whole microseconds, by which quartiles may differ
_MOST_TIMES = 3.0  # longer or shorter: medians that differ by more are of different work


@dataclass(frozen=True, slots=True)
class Slowing:
    """How communication slows down the kernels beside it."""

    share: float  # of computing's time beside communication, which it would not need alone
    compared: float  # of that time, in kernels that also ran alone


def slowing_of(
    trace: Trace, computes: NDArray[np.bool_], communicates: NDArray[np.bool_]
) -> Slowing | None:
    """Compare kernels beside communication with kernels alone; None without communication."""
    if not communicates.any():
        return None
    work = trace.work
    rows = np.flatnonzero(computes & (work["duration_ns"] > 0))
    start_ns, length_ns = work["start_ns"][rows], work["duration_ns"][rows]
    sent_ns = work["start_ns"][communicates]
    communicating = union(sent_ns, sent_ns + work["duration_ns"][communicates])
    beside_ns = within(start_ns, start_ns + length_ns, communicating)
    if not beside_ns.any():
        return Slowing(0.0, 1.0)
    stream = trace.lanes()[1][rows]
    deciding_ns = _deciding_ns(start_ns, start_ns + length_ns, stream, communicating)
    # Number the kernels so that those of one name, launch, stream and shapes share a number.
    shapes: dict[str, int] = {"": 0}
    shape_of = {
        each.operation: shapes.setdefault(each.shapes, len(shapes)) for each in trace.shaped
    }
    shape = [shape_of.get(operation, 0) for operation in work["operation"][rows].tolist()]
    keys = [work["name"][rows], work["launch"][rows], stream, np.array(shape)]
    order = np.lexsort(keys)
    is_new = np.zeros(len(rows), bool)
    for key in keys:
        is_new[1:] |= key[order][1:] != key[order][:-1]
    group = np.empty(len(rows), np.int64)
    group[order] = np.cumsum(is_new)
    is_beside = 2 * beside_ns > length_ns
    chosen = np.flatnonzero((is_beside | (beside_ns == 0)) & (work["launch"][rows] != 0))
    chosen = chosen[np.lexsort((length_ns[chosen], is_beside[chosen], group[chosen]))]
    # Each set holds the kernels of one group on one side, the shortest first.
    number = 2 * group[chosen] + is_beside[chosen]
    first = np.flatnonzero(np.append([True], number[1:] != number[:-1])[: len(number)])
    count = np.diff(np.append(first, len(number)))
    ordered_ns = length_ns[chosen]
    low_ns, median_ns, high_ns = (
        (ordered_ns[first + (count - 1) * at // 4] + ordered_ns[first + count * at // 4]) / 2
        for at in (1, 2, 3)
    )
    is_even = high_ns - low_ns <= np.maximum(_MOST_SCATTER * median_ns, _CLOCK_NS)
    # In a group with both sides, the set alone stands before the set beside communication.
    numbers, is_enough = number[first], count >= FEWEST
    alone = np.flatnonzero((numbers[:-1] % 2 == 0) & (numbers[1:] == numbers[:-1] + 1))
    alone = alone[is_enough[alone] & is_enough[alone + 1] & is_even[alone]]
    times = median_ns[alone + 1] / median_ns[alone]
    alone = alone[(times <= _MOST_TIMES) & (times >= 1 / _MOST_TIMES)]
    groups = numbers[alone] // 2
    told_ns = np.bincount(group, beside_ns * is_beside)[groups]
    longer_ns = (median_ns[alone + 1] - median_ns[alone]) * count[alone + 1]
    decided_ns = np.bincount(group, deciding_ns * is_beside)[groups]
    share = float((longer_ns / told_ns) @ decided_ns / max(decided_ns.sum(), 1.0))
    compared_ns = float(deciding_ns[np.isin(group, groups)].sum(dtype=np.float64))
    compared = compared_ns / float(deciding_ns.sum(dtype=np.float64))
    return Slowing(min(max(share, 0.0), 1.0), min(compared, 1.0))


def _deciding_ns(
    start_ns: Whole, end_ns: Whole, stream: Whole, communicating: tuple[Whole, Whole]
) -> Whole:
    """Return how long each kernel is beside communication while no busier stream computes."""
    _, place = np.unique(stream, return_inverse=True)
    busy_ns = np.bincount(place, end_ns - start_ns)
    deciding_ns = np.zeros_like(start_ns)
    for each in np.argsort(-busy_ns, kind="stable").tolist():
        own = place == each
        deciding_ns[own] = within(start_ns[own], end_ns[own], communicating)
        communicating = without(communicating, union(start_ns[own], end_ns[own]))
    return deciding_ns


def by_rank(
    slowing: Mapping[int, Slowing], name: Literal["share", "compared"]
) -> tuple[tuple[int, float], ...] | None:
    """Return one share of each rank, as facts hold it; None where no rank tells any."""
    return tuple((rank, getattr(of_rank, name)) for rank, of_rank in slowing.items()) or None
