"""How far the clocks of ranks lie apart, from the ends of collectives that all of them need.

No rank can end an all-reduce before the last has joined it, and all end it within what its last
chunk takes. So the differences of ends scatter around the difference of clocks; their median is
taken, and their scatter says how sure it is. A difference within the scatter is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fullwire.model.run import Collectives, Whole

_NEED_ALL = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")
_FEWEST = 3  # collectives in common, to believe a median
_SURE = 3.0  # times the scatter: a difference of clocks, not of ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """By rank, how far its clock is ahead of the first rank's, and how far that scatters."""

    ahead_ns: Mapping[int, int]
    scatter_ns: Mapping[int, int]
    unsettled: tuple[int, ...]  # ranks that share no such collectives with the others


def clocks_of(tables: Sequence[Collectives]) -> Clocks:
    """Estimate the clocks of ranks, each with the table of its collectives."""
    ends = {int(table.rank[0]): _ends(table) for table in tables if len(table)}
    ahead: dict[int, int] = {}
    scatter: dict[int, int] = {}
    merged: dict[tuple[str, str, int], int] = {}
    waiting = sorted(ends)
    while waiting:
        if not ahead:
            rank, difference = waiting[0], np.zeros(1, np.int64)
        else:
            rank, difference = _closest(waiting, ends, merged)
            if len(difference) < _FEWEST:
                break
        waiting.remove(rank)
        middle, spread = _middle(difference)
        is_sure = abs(middle) > _SURE * spread
        ahead[rank], scatter[rank] = (middle if is_sure else 0), spread
        for key, end_ns in ends[rank].items():
            merged.setdefault(key, end_ns - ahead[rank])
    return Clocks(ahead_ns=ahead, scatter_ns=scatter, unsettled=tuple(waiting))


def _ends(table: Collectives) -> dict[tuple[str, str, int], int]:
    keys = zip(table.group.tolist(), table.op.tolist(), table.sequence.tolist(), strict=True)
    return {
        key: end_ns
        for key, end_ns in zip(keys, table.end_ns.tolist(), strict=True)
        if key[1] in _NEED_ALL
    }


def _closest(
    waiting: Sequence[int],
    ends: Mapping[int, Mapping[tuple[str, str, int], int]],
    merged: Mapping[tuple[str, str, int], int],
) -> tuple[int, Whole]:
    """Return the first rank that shares enough with others, or the one that shares most."""
    best, most = waiting[0], np.zeros(0, np.int64)
    for rank in waiting:
        found = [end_ns - merged[key] for key, end_ns in ends[rank].items() if key in merged]
        if len(found) > len(most):
            best, most = rank, np.array(found, np.int64)
        if len(most) >= _FEWEST:
            break
    return best, most


def _middle(difference_ns: Whole) -> tuple[int, int]:
    middle = int(np.median(difference_ns))
    return middle, int(1.4826 * np.median(np.abs(difference_ns - middle)))
