"""How far the clocks of a job's machines are apart, and how well that is known.

Hosts of one machine read one clock. Between machines there is the wall clock, which may be a
millisecond off, or a minute. The job itself tells: no rank's part of an all-reduce can end before
every rank has begun its own. So each collective bounds the offset of two machines from both sides,
as a round trip does; all of them together leave an interval, whose middle is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fullwire.run.run import Collectives, Whole

# Where every rank waits for every other; in a broadcast only the root is waited for.
MUTUAL = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")


@dataclass(frozen=True, slots=True)
class Offset:
    """What to add to a machine's times, and how far it may still be off; None if nobody knows."""

    offset_ns: int
    uncertainty_ns: int | None


SAME = Offset(0, 0)
UNKNOWN = Offset(0, None)


def offsets(collectives: Collectives, machine_of: Mapping[int, str]) -> dict[str, Offset]:
    """Return the offset of each machine against that of the first rank."""
    names = list(dict.fromkeys(machine_of[rank] for rank in sorted(machine_of)))
    if len(names) < 2:
        return dict.fromkeys(names, SAME)
    mutual = np.array([each.startswith(MUTUAL) for each in collectives.op.tolist()], bool)
    issued, ended = _by_machine(collectives.rows(mutual), machine_of, names)
    return {
        name: SAME if at == 0 else _offset(issued[:, [0, at]], ended[:, [0, at]])
        for at, name in enumerate(names)
    }


def _by_machine(
    table: Collectives, machine_of: Mapping[int, str], names: list[str]
) -> tuple[Whole, Whole]:
    """Return, for each collective and machine, when the last was issued and the first ended.

    The bounds are put so that a machine without a part in a collective says nothing.
    """
    tags = zip(table.group, table.sequence.tolist(), table.op, table.bytes.tolist(), strict=True)
    numbers: dict[tuple[object, ...], int] = {}
    collective = np.array([numbers.setdefault(tag, len(numbers)) for tag in tags], np.int64)
    place = {name: at for at, name in enumerate(names)}
    machine = np.array([place[machine_of[rank]] for rank in table.rank.tolist()], np.int64)
    issued = np.full((len(numbers), len(names)), _NEVER_ISSUED, np.int64)
    ended = np.full((len(numbers), len(names)), _NEVER_ENDED, np.int64)
    np.maximum.at(issued, (collective, machine), table.issue_ns)
    np.minimum.at(ended, (collective, machine), table.end_ns)
    return issued, ended


_NEVER_ISSUED, _NEVER_ENDED = -(2**61), 2**61  # far from all times, and their difference fits


def _offset(issued: Whole, ended: Whole) -> Offset:
    """Return the offset of the second column's machine against the first's."""
    is_shared = ((issued != _NEVER_ISSUED) & (ended != _NEVER_ENDED)).all(axis=1)
    if not is_shared.any():
        return UNKNOWN
    here, there = issued[is_shared].T, ended[is_shared].T
    most = int((there[0] - here[1]).min())
    least = int((here[0] - there[1]).max())
    if least > most:  # they drifted, or the ends are not what they seem: believe the wall clocks
        return Offset(0, max(abs(least), abs(most)))
    return Offset((least + most) // 2, (most - least + 1) // 2)
