"""Each rank's time over the whole trace, in the few figures that other tools show too.

The span runs from the first to the last thing recorded, marks of steps aside. It is computation,
exposed communication and idle time, besides the spans of the host lane, such as copies.
Communication is the time with a collective outstanding. Waiting is the part of exposed
communication until the latest rank had issued the collective. It is None where much of it is with
ranks that are missing from the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullwire.timeline.timeline import Doing, Timeline

# Of exposed communication. Where a profiler began on one rank before another, some is with ranks
# whose recording had yet to begin. A share below this changes no answer.
UNTOLD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBreakdown:
    """One rank's figures; exposed and overlapped communication add up to all of it."""

    rank: int
    span_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    overlap_s: float
    waiting_s: float | None
    idle_s: float


def rank_breakdown(line: Timeline) -> RankBreakdown:
    """Sum up one rank's timeline."""
    is_overlapped = line.is_communicating & line.is_computing
    exposed_ns = line.total_ns(line.is_communicating & ~line.is_computing)
    is_untold = line.total_ns(line.doing == Doing.UNTOLD) > UNTOLD * exposed_ns
    pieces = np.flatnonzero(line.is_recorded)
    if not len(pieces):  # nothing but steps
        pieces = np.flatnonzero(line.step >= 0)
    span_ns = int(line.moments[pieces[-1] + 1] - line.moments[pieces[0]]) if len(pieces) else 0
    return RankBreakdown(
        rank=line.rank,
        span_s=span_ns * 1e-9,
        compute_s=line.total_ns(line.is_computing) * 1e-9,
        communication_s=line.total_ns(line.is_communicating) * 1e-9,
        exposed_s=exposed_ns * 1e-9,
        overlap_s=line.total_ns(is_overlapped) * 1e-9,
        waiting_s=None
        if is_untold
        else line.total_ns(np.isin(line.doing, (Doing.WAITING, Doing.BUBBLE))) * 1e-9,
        idle_s=(span_ns - line.total_ns(line.is_busy)) * 1e-9,
    )
