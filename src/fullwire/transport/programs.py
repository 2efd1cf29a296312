"""What one rank sends and receives in a collective, for the engine to carry out.

Where `collectives/` states a collective, the program is that plan as one rank sees it: the same
transfers that the simulator plays. The rest is stated here: what everybody sends to everybody at
once, and collectives with a root. Of these nobody ends before everybody has come (the root hears
from each rank, or each rank from the root, though it be an empty message), so that ranks that
disagree find out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from fullwire import _native
from fullwire.collectives.closed_form import cost
from fullwire.collectives.cost import AddTimes
from fullwire.collectives.plan import plan
from fullwire.collectives.stages import Plan, Transfers

# As the engine numbers them.
NUMBERS = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "bfloat16": 3,
    "int8": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "uint8": 8,
    "bool": 9,
}
REDUCTIONS = {"SUM": 0, "AVG": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "BAND": 4, "BOR": 5, "BXOR": 6}
LARGEST_UNPIPELINED_BYTES = 2**20  # what the engine takes from a rank before it is asked for
_SEGMENT_BYTES = 2**21  # for each rank: two of these of every rank lie in the processor's caches


@dataclass(frozen=True)
class Send:
    """One send: `after` is the receive that it passes on, -1 for what is the rank's own."""

    rank: int
    first_block: int
    blocks: int = 1
    after: int = -1
    after_all_of: int = 0  # so many receives must be whole first


@dataclass(frozen=True)
class Receive:
    """One receive: see native/transport/transport.hpp."""

    rank: int
    first_block: int
    blocks: int = 1
    reduces: bool = False
    from_work: bool = False
    completes: bool = False
    after: int = -1
    after_sends: int = 0


@dataclass(frozen=True)
class Links:
    """What the algorithms are chosen by: the same on every rank."""

    rate_bps: float
    latency_s: float


def allreduce_algorithm(workers: int, size_bytes: int, links: Links) -> str:
    """Return the algorithm that costs least on these links."""
    costs = {
        name: cost("allreduce", name, workers, size_bytes, AddTimes())
        for name in ("recursive-doubling", "halving-doubling", "ring")
    }
    if size_bytes > LARGEST_UNPIPELINED_BYTES:
        return "ring"
    return min(costs, key=lambda name: float(costs[name].time_s(links.rate_bps, links.latency_s)))


def is_small(size_bytes: int, links: Links) -> bool:
    """Say whether a message is on the wire for less time than it takes to get there."""
    on_the_wire_s = 8 * size_bytes / links.rate_bps
    return size_bytes <= LARGEST_UNPIPELINED_BYTES and on_the_wire_s < links.latency_s


def ring_segments(workers: int, size_bytes: int) -> int:
    """Return into how many parts a vector is cut, a power of two so that there are few programs."""
    return 1 << max(size_bytes // (workers * _SEGMENT_BYTES), 1).bit_length() - 1


@cache
def allreduce(algorithm: str, workers: int, rank: int, segments: int = 1) -> Any:
    """Every rank gets the sum; a ring is carried out on several segments, one after the other."""
    stated = plan("allreduce", algorithm, workers)
    if algorithm == "recursive-doubling":
        return _program(stated.blocks, *_as_seen_from(stated, rank))
    if segments == 1:
        return _planned(stated, rank)
    return _program(
        stated.blocks * segments,
        *_staggered(*_as_seen_from(stated, rank), stated.blocks, segments),
        signals=False,
    )


def _staggered(
    sends: list[Send], receives: list[Receive], blocks: int, segments: int
) -> tuple[list[Send], list[Receive]]:
    """Begin each segment one round after the one before it.

    So what was added up is sent on while it is still in the processor's caches, and each part of a
    large vector is read from memory and written to it once instead of twice.
    """
    rounds = range(len(sends))
    order = sorted(
        ((segment, round_) for segment in range(segments) for round_ in rounds),
        key=lambda each: (sum(each), each[1]),
    )
    place = {each: index for index, each in enumerate(order)}

    def moved(each: Any, segment: int) -> Any:
        after = place[segment, each.after] if each.after >= 0 else -1
        return replace(each, first_block=each.first_block + segment * blocks, after=after)

    return (
        [moved(sends[round_], segment) for segment, round_ in order],
        [moved(receives[round_], segment) for segment, round_ in order],
    )


@cache
def barrier(workers: int, rank: int) -> Any:
    """Nobody goes on before everybody has come."""
    stated = plan("allreduce", "recursive-doubling", workers)
    sends, receives = _as_seen_from(stated, rank)
    return _program(1, sends, [replace(receive, reduces=False) for receive in receives])


@cache
def allgather(workers: int, rank: int, small: bool) -> Any:
    """Block r is rank r's own."""
    if not small:
        return _planned(plan("allgather", "ring", workers), rank)
    others = _others(workers, rank)
    return _program(
        workers,
        [Send(other, rank) for other in others],
        [Receive(other, other) for other in others],
    )


@cache
def reducescatter(workers: int, rank: int, small: bool) -> Any:
    """Block r of the sum ends at rank r."""
    if not small:
        return _planned(plan("reducescatter", "ring", workers), rank)
    others = _others(workers, rank)
    return _program(
        workers,
        [Send(other, other) for other in others],
        _reducing_one_after_another(sorted(others), rank),
    )


@cache
def alltoall(workers: int, rank: int) -> Any:
    """Block p of what a rank has goes to rank p, and block p of what it gets comes from there."""
    others = _others(workers, rank)
    return _program(
        workers,
        [Send(other, other) for other in others],
        [Receive(other, other) for other in reversed(others)],
    )


@cache
def broadcast(workers: int, rank: int, root: int, small: bool) -> Any:
    """Block 0 of the root goes to all; block 1 is empty, and says that it has come."""
    stated = plan("broadcast", "tree" if small else "ring", workers)
    sends, receives = _as_seen_from(stated, (rank - root) % workers)
    sends = [_turned(each, root, workers) for each in sends]
    receives = [_turned(each, root, workers) for each in receives]
    others = _others(workers, rank)
    if rank == root:
        receives += [Receive(other, 1) for other in others]
    else:
        sends.append(Send(root, 1, after_all_of=1))
    return _program(2, sends, receives)


@cache
def reduce(workers: int, rank: int, root: int, small: bool) -> Any:
    """A broadcast backwards: the sum of block 0 ends at the root, which tells all with block 1."""
    stated = plan("broadcast", "tree" if small else "ring", workers)
    here = (rank - root) % workers
    part = stated.parts[0] if stated.parts else None
    above = [int(each) for each in part.source[part.target == here]] if part else []
    below = [int(each) for each in part.target[part.source == here]] if part else []
    children = [(each + root) % workers for each in reversed(below)]
    receives = _reducing_one_after_another(children, 0, is_root=rank == root)
    sends = [
        Send((each + root) % workers, 0, after=len(receives) - 1, after_all_of=0) for each in above
    ]
    if rank == root:
        sends += [Send(other, 1, after_all_of=len(receives)) for other in _others(workers, rank)]
    else:
        receives.append(Receive(root, 1))
    return _program(2, sends, receives)


@cache
def gather(workers: int, rank: int, root: int) -> Any:
    """Block r of rank r goes to the root, which tells all with the last block, an empty one."""
    others = _others(workers, rank)
    if rank != root:
        return _program(workers + 1, [Send(root, rank)], [Receive(root, workers)])
    return _program(
        workers + 1,
        [Send(other, workers, after_all_of=len(others)) for other in others],
        [Receive(other, other) for other in others],
    )


@cache
def scatter(workers: int, rank: int, root: int) -> Any:
    """Block r of the root goes to rank r, which thanks with the last block, an empty one."""
    others = _others(workers, rank)
    if rank != root:
        return _program(workers + 1, [Send(root, workers, after_all_of=1)], [Receive(root, rank)])
    return _program(
        workers + 1,
        [Send(other, other) for other in others],
        [Receive(other, workers) for other in others],
    )


def _others(workers: int, rank: int) -> list[int]:
    """List the other ranks, each beginning with the next so that not all talk to one at once."""
    return [(rank + step) % workers for step in range(1, workers)]


def _reducing_one_after_another(
    ranks: list[int], block: int, *, is_root: bool = True
) -> list[Receive]:
    """Add in a fixed order, so that the same numbers give the same sum each time."""
    return [
        Receive(
            other,
            block,
            reduces=True,
            from_work=index > 0,
            after=index - 1,
            completes=is_root and index == len(ranks) - 1,
        )
        for index, other in enumerate(ranks)
    ]


def _planned(stated: Plan, rank: int) -> Any:
    # Who sends several blocks at once may cut them otherwise than who receives them.
    return _program(stated.blocks, *_as_seen_from(stated, rank), signals=False)


def _as_seen_from(stated: Plan, rank: int) -> tuple[list[Send], list[Receive]]:
    """Pick one rank's part of a plan and find out which send waits for which receive."""
    sends: list[Send] = []
    receives: list[Receive] = []
    for part in stated.parts:
        latest = [-1] * stated.blocks  # the receive that brought each block
        mine = np.flatnonzero((part.source == rank) | (part.target == rank))
        for number in np.unique(part.round[mine]):
            rows = [int(row) for row in mine if part.round[row] == number]
            for row in rows:
                if part.source[row] == rank:
                    sends += _pieces(part, row, latest)
            for row in rows:
                if part.target[row] == rank:
                    receive = _received(part, row, latest, mine)
                    if stated.blocks == 1:  # it takes the place of what is being sent
                        receive = replace(receive, after_sends=len(sends))
                    receives.append(receive)
                    first, count = int(part.first_block[row]), int(part.block_count[row])
                    latest[first : first + count] = [len(receives) - 1] * count
    return sends, receives


def _pieces(part: Transfers, row: int, latest: list[int]) -> list[Send]:
    """Cut a transfer where its blocks came by different receives."""
    pieces: list[Send] = []
    first, count = int(part.first_block[row]), int(part.block_count[row])
    for block in range(first, first + count):
        if pieces and pieces[-1].after == latest[block]:
            known = pieces.pop()
            pieces.append(Send(known.rank, known.first_block, known.blocks + 1, after=known.after))
        else:
            pieces.append(Send(int(part.target[row]), block, after=latest[block]))
    return pieces


def _received(part: Transfers, row: int, latest: list[int], mine: Any) -> Receive:
    first, count = int(part.first_block[row]), int(part.block_count[row])
    reduces = bool(part.reduces[row])
    later = mine[part.round[mine] > part.round[row]]
    overlaps = (part.first_block[later] < first + count) & (
        part.first_block[later] + part.block_count[later] > first
    )
    return Receive(
        int(part.source[row]),
        first,
        count,
        reduces=reduces,
        from_work=latest[first] >= 0,
        completes=reduces and not bool((overlaps & part.reduces[later]).any()),
        after=latest[first] if reduces else -1,
    )


def _turned(each: Any, root: int, workers: int) -> Any:
    """Rename ranks so that rank 0 of a plan is the root."""
    values = {name: getattr(each, name) for name in each.__dataclass_fields__}
    return type(each)(**values | {"rank": (each.rank + root) % workers})


def _program(
    blocks: int, sends: list[Send], receives: list[Receive], *, signals: bool = True
) -> Any:
    return _native.TransportProgram(
        blocks,
        [(s.rank, s.first_block, s.blocks, s.after, s.after_all_of) for s in sends],
        [
            (
                r.rank,
                r.first_block,
                r.blocks,
                r.reduces,
                r.from_work,
                r.completes,
                r.after,
                r.after_sends,
            )
            for r in receives
        ],
        signals,
    )
