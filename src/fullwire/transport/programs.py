"""The program of a collective: the sends and receives of one rank, for the engine to carry out.

Where `collectives/` has the plan of a collective, the program is one rank's part of that plan. The
simulator plays the same transfers. This module has the other collectives: those in which every rank
sends to every rank at once, and those with a root. Each of these ends once all ranks have come: the
root hears from each rank, or each rank from the root, if only by an empty message. So ranks that
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
from fullwire.collectives.stages import Layout, Plan, Transfers

# The engine's numbers for them.
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
LARGEST_UNPIPELINED_BYTES = 2**20  # the engine accepts this much from a rank unasked.
_SEGMENT_BYTES = 2**21  # for each rank; the caches hold two segments of each rank


@dataclass(frozen=True)
class Send:
    """One send: `after` is the receive that it passes on, -1 for the rank's own data."""

    rank: int
    first_block: int
    blocks: int = 1
    after: int = -1
    after_all_of: int = 0  # this many receives must be whole first


@dataclass(frozen=True)
class Receive:
    """One receive; native/transport/transport.hpp describes the fields."""

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
    """The two numbers that choose the algorithms: the same on every rank."""

    rate_bps: float
    latency_s: float


def allreduce_algorithm(workers: int, size_bytes: int, links: Links) -> str:
    """Return the algorithm that takes the least time on these links."""
    costs = {
        name: cost("allreduce", name, workers, size_bytes, AddTimes())
        for name in ("recursive-doubling", "halving-doubling", "ring")
    }
    if size_bytes > LARGEST_UNPIPELINED_BYTES:
        return "ring"
    return min(costs, key=lambda name: float(costs[name].time_s(links.rate_bps, links.latency_s)))


def is_small(size_bytes: int, links: Links) -> bool:
    """Say whether a message takes less time to put on the link than the link's latency."""
    on_the_wire_s = 8 * size_bytes / links.rate_bps
    return size_bytes <= LARGEST_UNPIPELINED_BYTES and on_the_wire_s < links.latency_s


def ring_segments(workers: int, size_bytes: int) -> int:
    """Return the number of parts of a vector: a power of two, so that there are few programs."""
    return 1 << max(size_bytes // (workers * _SEGMENT_BYTES), 1).bit_length() - 1


@cache
def allreduce(algorithm: str, workers: int, rank: int, segments: int = 1) -> Any:
    """Return a program in which every rank gets the sum; a ring may work segment by segment."""
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


@cache
def packed_allreduce(workers: int, rank: int) -> Any:
    """Return a program that rounds a sum once: each rank adds up one block, and sends it to all."""
    every_rank_serves = Layout(nodes=workers, servers=workers)
    return _planned(plan("allreduce", "parameter-server", every_rank_serves), rank)


def _staggered(
    sends: list[Send], receives: list[Receive], blocks: int, segments: int
) -> tuple[list[Send], list[Receive]]:
    """Begin each segment one round after the one before it.

    So a rank sends a sum on while the sum is still in the processor's caches. Each part of a large
    vector is read from memory and written to it once instead of twice.
    """
    rounds = range(len(sends))
    order = sorted(
        ((segment, round_) for segment in range(segments) for round_ in rounds),
        key=lambda transfer: (sum(transfer), transfer[1]),
    )
    place = {transfer: index for index, transfer in enumerate(order)}

    def moved(ranks: Any, segment: int) -> Any:
        after = place[segment, ranks.after] if ranks.after >= 0 else -1
        return replace(ranks, first_block=ranks.first_block + segment * blocks, after=after)

    return (
        [moved(sends[round_], segment) for segment, round_ in order],
        [moved(receives[round_], segment) for segment, round_ in order],
    )


@cache
def barrier(workers: int, rank: int) -> Any:
    """Return a program in which each rank goes on once all ranks have come."""
    stated = plan("allreduce", "recursive-doubling", workers)
    sends, receives = _as_seen_from(stated, rank)
    return _program(1, sends, [replace(receive, reduces=False) for receive in receives])


@cache
def allgather(workers: int, rank: int, small: bool) -> Any:
    """Return a program in which every rank gets block r from rank r."""
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
    """Return a program in which rank r gets block r of the sum."""
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
    """Return a program in which a rank sends its block p to rank p, and gets block p from there."""
    others = _others(workers, rank)
    return _program(
        workers,
        [Send(other, other) for other in others],
        [Receive(other, other) for other in reversed(others)],
    )


@cache
def broadcast(workers: int, rank: int, root: int, small: bool) -> Any:
    """Return a program that copies the root's block 0 to all; empty block 1 confirms that."""
    stated = plan("broadcast", "tree" if small else "ring", workers)
    sends, receives = _as_seen_from(stated, (rank - root) % workers)
    sends = [_turned(send, root, workers) for send in sends]
    receives = [_turned(receive, root, workers) for receive in receives]
    others = _others(workers, rank)
    if rank == root:
        receives += [Receive(other, 1) for other in others]
    else:
        sends.append(Send(root, 1, after_all_of=1))
    return _program(2, sends, receives)


@cache
def reduce(workers: int, rank: int, root: int, small: bool) -> Any:
    """Return a broadcast backwards: the root gets the sum of block 0, and tells all by block 1."""
    stated = plan("broadcast", "tree" if small else "ring", workers)
    here = (rank - root) % workers
    part = stated.parts[0] if stated.parts else None
    above = [int(rank) for rank in part.source[part.target == here]] if part else []
    below = [int(rank) for rank in part.target[part.source == here]] if part else []
    children = [(child + root) % workers for child in reversed(below)]
    receives = _reducing_one_after_another(children, 0, is_root=rank == root)
    sends = [
        Send((parent + root) % workers, 0, after=len(receives) - 1, after_all_of=0)
        for parent in above
    ]
    if rank == root:
        sends += [Send(other, 1, after_all_of=len(receives)) for other in _others(workers, rank)]
    else:
        receives.append(Receive(root, 1))
    return _program(2, sends, receives)


@cache
def gather(workers: int, rank: int, root: int) -> Any:
    """Return a program that sends rank r's block r to the root; the last, empty block tells all."""
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
    """Return a program that sends the root's block r to rank r; the last, empty block confirms."""
    others = _others(workers, rank)
    if rank != root:
        return _program(workers + 1, [Send(root, workers, after_all_of=1)], [Receive(root, rank)])
    return _program(
        workers + 1,
        [Send(other, other) for other in others],
        [Receive(other, workers) for other in others],
    )


def _others(workers: int, rank: int) -> list[int]:
    """List the other ranks from the next one on, so that the ranks send to different ones."""
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
    # A sender of several blocks at once may cut them otherwise than their receiver.
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
                    if stated.blocks == 1:  # received data overwrites the sent data
                        receive = replace(receive, after_sends=len(sends))
                    receives.append(receive)
                    first, count = int(part.first_block[row]), int(part.block_count[row])
                    latest[first : first + count] = [len(receives) - 1] * count
    return sends, receives


def _pieces(part: Transfers, row: int, latest: list[int]) -> list[Send]:
    """Cut a transfer between blocks that came by different receives."""
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
    rank = part.target[row]
    first, count = int(part.first_block[row]), int(part.block_count[row])
    reduces = bool(part.reduces[row])
    # In one round a rank adds what several others send one after the other.
    is_later = part.round[mine] > part.round[row]
    is_next = (part.round[mine] == part.round[row]) & (mine > row) & (part.target[mine] == rank)
    later = mine[is_later | is_next]
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


def _turned(ranks: Any, root: int, workers: int) -> Any:
    """Rename ranks so that rank 0 of a plan is the root."""
    values = {name: getattr(ranks, name) for name in ranks.__dataclass_fields__}
    return type(ranks)(**values | {"rank": (ranks.rank + root) % workers})


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
