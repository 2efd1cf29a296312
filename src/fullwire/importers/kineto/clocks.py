"""Estimate the difference of ranks' clocks from the ends of collectives that need all ranks.

A rank can end an all-reduce only after the last rank has joined it. All ranks end it within the
time of its last chunk. So the differences of ends scatter around the difference of clocks. The
estimate is their median, and their scatter shows its uncertainty. Times stay as they are if the
difference lies within the scatter.

The ends of thousands of ranks are in memory at once. So a number of 64 bits stands for a
collective. It is a hash of group, operation and sequence. Only 20,000 collectives of a long trace
are looked at: those with the smallest numbers, which are the same on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.run.run import Collectives, Whole

_NEED_ALL = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")
_FEWEST = 3  # A median needs this number of collectives in common.
_SURE = 3.0  # Times the scatter: a larger difference is one of clocks.
_MOST = 20_000  # Collectives of a rank.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # Odd, so that multiplying keeps numbers apart.


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """For each rank, how far its clock is ahead of the first rank's, and the scatter of that."""

    ahead_ns: Mapping[int, int]
    scatter_ns: Mapping[int, int]
    unsettled: tuple[int, ...]  # ranks that share too few such collectives with the others


@dataclass(frozen=True, eq=False, slots=True)
class Ends:
    """The ends of a rank's collectives, in the order of the collectives' 64-bit numbers."""

    number: NDArray[np.uint64]
    end_ns: Whole

    def differences_ns(self, other: Ends) -> Whole:
        """Return for each common collective how much later it ended here than in the other."""
        _, here, there = np.intersect1d(
            self.number, other.number, assume_unique=True, return_indices=True
        )
        return self.end_ns[here] - other.end_ns[there]

    def with_more(self, other: Ends, ahead_ns: int) -> Ends:
        """Add the ends that only `other` has; its clock is `ahead_ns` ahead of this one."""
        number = np.concatenate([self.number, other.number])
        number, first = np.unique(number, return_index=True)
        return Ends(number, np.concatenate([self.end_ns, other.end_ns - ahead_ns])[first])


def ends_of(table: Collectives) -> Ends:
    """Return the ends of one rank's collectives of the kinds that need all ranks."""
    groups, ops = table.group.tolist(), table.op.tolist()
    number_of = {}
    for group, op in set(zip(groups, ops, strict=True)):
        text = f"{op} {group}".encode()  # hashlib would take a tenth as long to load as a trace
        number_of[group, op] = zlib.crc32(text) << 32 | zlib.crc32(text[::-1])
    number = np.array([number_of[key] for key in zip(groups, ops, strict=True)], np.uint64)
    number = (number + table.sequence.view(np.uint64)) * _SPREAD
    rows = np.flatnonzero(np.isin(table.op, _NEED_ALL))
    number, first = np.unique(number[rows], return_index=True)
    return Ends(number[:_MOST], table.end_ns[rows[first]][:_MOST])


def clocks_of(ends: Mapping[int, Ends]) -> Clocks:
    """Estimate the clocks of ranks from the ends of their collectives."""
    ahead: dict[int, int] = {}
    scatter: dict[int, int] = {}
    merged = Ends(np.zeros(0, np.uint64), np.zeros(0, np.int64))
    waiting = sorted(rank for rank, each in ends.items() if len(each.number))
    while waiting:
        if not ahead:
            rank, difference_ns = waiting[0], np.zeros(1, np.int64)
        else:
            # Take the first rank that shares enough collectives, or the one that shares most.
            rank, difference_ns = waiting[0], np.zeros(0, np.int64)
            for other in waiting:
                found = ends[other].differences_ns(merged)
                if len(found) > len(difference_ns):
                    rank, difference_ns = other, found
                if len(difference_ns) >= _FEWEST:
                    break
            if len(difference_ns) < _FEWEST:
                break
        waiting.remove(rank)
        middle = int(np.median(difference_ns))
        spread = int(1.4826 * np.median(np.abs(difference_ns - middle)))
        is_sure = abs(middle) > _SURE * spread
        ahead[rank], scatter[rank] = (middle if is_sure else 0), spread
        merged = merged.with_more(ends[rank], ahead[rank])
    return Clocks(ahead_ns=ahead, scatter_ns=scatter, unsettled=tuple(waiting))
