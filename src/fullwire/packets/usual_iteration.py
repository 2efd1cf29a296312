"""One iteration as its collectives, across hosts: when each began, and who came last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullwire.packets.flows import Traffic
from fullwire.packets.messages import SeenCollectives


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSeen:
    """A collective of the iteration; times count from the iteration's first packet."""

    op: str
    sequence: int
    bytes: float | None  # of its tensor; `None` where others' bytes cannot be told from its own
    came_s: tuple[float | None, ...]  # each host's first packet for it
    data_s: float
    end_s: float

    @property
    def last_to_come(self) -> int | None:
        """Return the host that came last."""
        came = [-1.0 if each is None else each for each in self.came_s]
        return int(np.argmax(came)) if max(came, default=-1.0) >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualIteration:
    """The iteration whose length is the median one."""

    number: int
    collectives: tuple[CollectiveSeen, ...]


def usual_iteration(traffic: Traffic) -> UsualIteration | None:
    """Choose an iteration as long as the median one, and list its collectives."""
    found, seen = traffic.iterations, traffic.collectives
    if found is None or seen is None or found.basis != "messages":
        return None
    lasted = found.ends_ns - found.begins_ns
    number = int(np.argsort(lasted, kind="stable")[len(lasted) // 2])
    of = np.searchsorted(found.begins_ns, seen.first_ns, "right") - 1  # the next one may have begun
    inside = (of == number) & (seen.first_ns <= found.ends_ns[number])
    has_data = np.bincount(seen.part, seen.part_bytes, len(seen)) > 0
    chosen = np.flatnonzero(inside & has_data)
    origin_ns = int(seen.begin_ns[chosen].min())
    return UsualIteration(
        number=number + 1,
        collectives=tuple(
            _described(seen, int(each), origin_ns, len(traffic.hosts))
            for each in chosen[np.argsort(seen.first_ns[chosen], kind="stable")]
        ),
    )


def _described(seen: SeenCollectives, number: int, origin_ns: int, hosts: int) -> CollectiveSeen:
    rows = seen.part == number
    came = [
        (seen.part_begin_ns[rows & (seen.source == host)].min(initial=np.iinfo(np.int64).max))
        for host in range(hosts)
    ]
    is_known = bool(seen.is_sure[number])
    return CollectiveSeen(
        op=str(seen.op[number]),
        sequence=int(seen.sequence[number]),
        bytes=float(seen.bytes[number]) if is_known else None,
        came_s=tuple(
            None if each == np.iinfo(np.int64).max else (int(each) - origin_ns) * 1e-9
            for each in came
        ),
        data_s=(int(seen.first_ns[number]) - origin_ns) * 1e-9,
        end_s=(int(seen.end_ns[number]) - origin_ns) * 1e-9,
    )
