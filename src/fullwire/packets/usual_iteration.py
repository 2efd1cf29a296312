"""One iteration's collectives across hosts: when each began, and which host came last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullwire.packets.flows import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSeen:
    """A collective of the iteration; times count from the iteration's first packet."""

    op: str
    sequence: int
    bytes: float | None  # size of its tensor; `None` if its bytes mix with another's
    came_s: tuple[float | None, ...]  # each host's first packet for it
    data_s: float
    end_s: float

    @property
    def last_to_come(self) -> int | None:
        """Return the host that came last."""
        came = [-1.0 if moment_s is None else moment_s for moment_s in self.came_s]
        return int(np.argmax(came)) if max(came, default=-1.0) >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualIteration:
    """The iteration of median length."""

    number: int
    collectives: tuple[CollectiveSeen, ...]


def usual_iteration(traffic: Traffic) -> UsualIteration | None:
    """Choose an iteration as long as the median one, and list its collectives."""
    iterations, seen = traffic.iterations, traffic.collectives
    if iterations is None or seen is None or iterations.basis != "messages":
        return None
    lasted = iterations.ends_ns - iterations.begins_ns
    number = int(np.argsort(lasted, kind="stable")[len(lasted) // 2])
    of = np.searchsorted(iterations.begins_ns, seen.first_ns, "right") - 1
    inside = (of == number) & (seen.first_ns <= iterations.ends_ns[number])
    has_data = np.bincount(seen.part, seen.part_bytes, len(seen)) > 0
    chosen = np.flatnonzero(inside & has_data)
    origin_ns = int(seen.begin_ns[chosen].min())
    is_sure, never = seen.is_sure, np.iinfo(np.int64).max
    collectives = []
    for place in chosen[np.argsort(seen.first_ns[chosen], kind="stable")].tolist():
        rows = seen.part == place
        came_ns = [
            int(seen.part_begin_ns[rows & (seen.source == host)].min(initial=never))
            for host in range(len(traffic.hosts))
        ]
        collectives.append(
            CollectiveSeen(
                op=str(seen.op[place]),
                sequence=int(seen.sequence[place]),
                bytes=float(seen.bytes[place]) if is_sure[place] else None,
                came_s=tuple(
                    None if moment_ns == never else (moment_ns - origin_ns) * 1e-9
                    for moment_ns in came_ns
                ),
                data_s=(int(seen.first_ns[place]) - origin_ns) * 1e-9,
                end_s=(int(seen.end_ns[place]) - origin_ns) * 1e-9,
            )
        )
    return UsualIteration(number=number + 1, collectives=tuple(collectives))
