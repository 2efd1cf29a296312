"""By how much the clocks of captures differ, from connections that were captured at both ends.

A packet cannot arrive before it was sent. So what one end's clock shows less the other's is at most
the offset on the way there and at least the offset on the way back; the packets that waited least
set the bounds. Both are certain; the offset is taken in the middle, and is that uncertain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from fullwire.run.endpoint import host_of
from fullwire.run.run import Whole

_SAME = 0.2  # of the sequence numbers that either passed once: by chance it is none


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Passed:
    """When flows passed certain sequence numbers, in one capture.

    `local` is the host that it was made on, if that shows.
    """

    local: str | None
    ends: Sequence[tuple[str, str]]
    columns: Mapping[str, Whole]  # flow, sequence, is_acknowledgement, time_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """What a capture's clock shows more than the first one's, in nanoseconds."""

    offset_ns: int
    uncertainty_ns: int

    @property
    def is_proven(self) -> bool:
        """Whether the clocks differ at all, as far as anyone can say."""
        return abs(self.offset_ns) > self.uncertainty_ns


def clock_offsets(captures: Sequence[Passed]) -> list[ClockOffset | None]:
    """Return each capture's offset from the first, where connections lead from one to the other."""
    offsets: list[ClockOffset | None] = [None] * len(captures)
    if not captures or captures[0].local is None:
        return offsets
    offsets[0] = ClockOffset(offset_ns=0, uncertainty_ns=0)
    links = _links(captures)
    while reachable := [
        (known.uncertainty_ns + link.uncertainty_ns, start, end)
        for (start, end), link in links.items()
        if (known := offsets[start]) is not None and offsets[end] is None
    ]:
        uncertainty_ns, start, end = min(reachable)
        begin = offsets[start]
        assert begin is not None
        offsets[end] = ClockOffset(
            offset_ns=begin.offset_ns + links[start, end].offset_ns, uncertainty_ns=uncertainty_ns
        )
    return offsets


def show_the_same(one: Passed, other: Passed) -> bool:
    """Whether two captures show the same packets of the flows in both, whatever clocks say."""
    number: dict[tuple[str, str], int] = {ends: at for at, ends in enumerate(one.ends)}
    common = [number[ends] for ends in set(one.ends) & set(other.ends)]
    marks = [_marks(capture, number)[0] for capture in (one, other)]
    fewer = min(int(np.isin(passed >> 33, common).sum()) for passed in marks)
    return len(np.intersect1d(marks[0], marks[1], assume_unique=True)) > _SAME * fewer


def _links(captures: Sequence[Passed]) -> dict[tuple[int, int], ClockOffset]:
    """Return the offsets between captures of two hosts that show packets both ways between them."""
    number: dict[tuple[str, str], int] = {}
    marks = [_marks(capture, number) for capture in captures]
    senders = np.array([host_of(source) for source, _ in number], object)
    links = {}
    for first, second in combinations(range(len(captures)), 2):
        hosts = captures[first].local, captures[second].local
        if None in hosts or hosts[0] == hosts[1]:
            continue
        both, at_first, at_second = np.intersect1d(
            marks[first][0], marks[second][0], assume_unique=True, return_indices=True
        )
        differs_ns = marks[second][1][at_second] - marks[first][1][at_first]
        sender = senders[both >> 33]
        there, back = differs_ns[sender == hosts[0]], differs_ns[sender == hosts[1]]
        if not len(there) or not len(back):
            continue
        most, least = int(there.min()), int(back.max())
        # Clocks that drift against each other make the bounds cross; the middle is no worse then.
        offset_ns, uncertainty_ns = (most + least) // 2, -(-abs(most - least) // 2)
        links[first, second] = ClockOffset(offset_ns=offset_ns, uncertainty_ns=uncertainty_ns)
        links[second, first] = ClockOffset(offset_ns=-offset_ns, uncertainty_ns=uncertainty_ns)
    return links


def _marks(capture: Passed, number: dict[tuple[str, str], int]) -> tuple[Whole, Whole]:
    """Return what passed as numbers that are the same in every capture, and when; no duplicates.

    A sequence number that passed twice was sent again, or has wrapped.
    """
    flows = np.array([number.setdefault(ends, len(number)) for ends in capture.ends], np.int64)
    columns = capture.columns
    marks = flows[columns["flow"]] << 33 if len(flows) else np.empty(0, np.int64)
    marks = marks | columns["sequence"] << 1 | columns["is_acknowledgement"]
    once, place, count = np.unique(marks, return_index=True, return_counts=True)
    return once[count == 1], columns["time_ns"][place[count == 1]]
