"""Collectives, each stated once as transfers between ranks.

The event engines play a plan, the transport runs it, and `execute` carries it out on real arrays,
which is how a plan is known to be right (stages.py has the words). Within a part a rank sends in a
round only after it has received everything that earlier rounds sent to it, and what it sent in
earlier rounds has left; parts touch different blocks and do not wait for each other.

    allreduce        ring               reduce-scatter, then all-gather, around a ring
                     tree               two binary trees, each for half of the message; a rank is an
                                        inner node in at most one (Sanders, Speck and Träff 2009)
                     halving-doubling   halves exchanged at distances N/2 ... 1 and back; ranks
                                        beyond a power of two hand their data to a partner first
    reducescatter    ring, halving-doubling (a power of two only)
    allgather        ring, halving-doubling (a power of two only)
    broadcast        ring (a chain from rank 0), tree (binomial)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.stages import Int32, Part, Plan, Stage
from fullwire.errors import UsageError

Stated: TypeAlias = tuple[int, tuple[Part, ...]]  # blocks, and the stages of each part


def plan(op: str, algorithm: str, workers: int) -> Plan:
    """State a collective as transfers."""
    build = _builder(op, algorithm)
    if workers < 1:
        raise UsageError(f"workers: expected at least 1, got {workers}")
    blocks, stages = (1, ()) if workers == 1 else build(workers)
    return Plan(op=op, algorithm=algorithm, workers=workers, blocks=blocks, stages=stages)


def planned_transfers(op: str, algorithm: str, workers: int) -> int:
    """Count the transfers of a plan without making it (large rings are worth refusing early)."""
    _builder(op, algorithm)
    rounds = (workers - 1).bit_length()
    if algorithm == "ring":
        passes = {"allreduce": 2 * workers, "broadcast": 1}.get(op, workers)
        return passes * (workers - 1)
    if algorithm == "tree":
        return (4 if op == "allreduce" else 1) * (workers - 1)
    return (2 if op == "allreduce" else 1) * workers * rounds  # folding needs no more than this


def algorithms(op: str) -> tuple[str, ...]:
    """List the algorithms known for a collective, the usual one first."""
    if op not in OPS:
        raise UsageError(f"collective: expected one of {', '.join(OPS)}, got {op!r}")
    return tuple(algorithm for known, algorithm in _BUILDERS if known == op)


def power_of_two_within(workers: int) -> int:
    """Return the largest power of two that is not above `workers`."""
    return int(1 << (workers.bit_length() - 1))


def _ring_rounds(workers: int, *, lead: int, reduces: bool) -> Stage:
    """Pass blocks on around the ring; a rank begins with the block `lead` before its own."""
    ranks = np.arange(workers, dtype=np.int32)
    return Stage(
        source=ranks,
        target=(ranks + 1) % workers,
        first_block=(ranks - lead) % workers,
        reduces=reduces,
        rounds=workers - 1,
        shift=-1,
        window=workers,
    )


def _ring_reduce_scatter(workers: int) -> Stated:
    return workers, ((_ring_rounds(workers, lead=1, reduces=True),),)


def _ring_all_gather(workers: int) -> Stated:
    return workers, ((_ring_rounds(workers, lead=0, reduces=False),),)


def _ring_all_reduce(workers: int) -> Stated:
    scatter = _ring_rounds(workers, lead=1, reduces=True)
    gather = _ring_rounds(workers, lead=0, reduces=False)
    return workers, ((scatter, gather),)


def _chain_broadcast(workers: int) -> Stated:
    ranks = np.arange(workers, dtype=np.int32)
    hops = (
        _stage(ranks[hop : hop + 1], ranks[hop + 1 : hop + 2], reduces=False)
        for hop in range(workers - 1)
    )
    return 1, (tuple(hops),)


def _binomial_broadcast(workers: int) -> Stated:
    rounds: list[Stage] = []
    reach = 1
    while reach < workers:
        source = np.arange(min(reach, workers - reach), dtype=np.int32)
        rounds.append(_stage(source, source + reach, reduces=False))
        reach *= 2
    return 1, (tuple(rounds),)


def _halving(workers: int) -> Iterator[Stage]:
    """Exchange halves with ever nearer partners: rank r ends with the sum of block r."""
    ranks = np.arange(workers, dtype=np.int32)
    distance = workers // 2
    while distance:
        partner = ranks ^ distance
        yield _stage(
            ranks,
            partner,
            first_block=partner & ~(distance - 1),
            block_count=distance,
            reduces=True,
        )
        distance //= 2


def _doubling(workers: int) -> Iterator[Stage]:
    """Exchange all that is held with ever farther partners, until every rank has every block."""
    ranks = np.arange(workers, dtype=np.int32)
    distance = 1
    while distance < workers:
        yield _stage(
            ranks,
            ranks ^ distance,
            first_block=ranks & ~(distance - 1),
            block_count=distance,
            reduces=False,
        )
        distance *= 2


def _halving_reduce_scatter(workers: int) -> Stated:
    _refuse_uneven("reducescatter", workers)
    return workers, (tuple(_halving(workers)),)


def _doubling_all_gather(workers: int) -> Stated:
    _refuse_uneven("allgather", workers)
    return workers, (tuple(_doubling(workers)),)


def _halving_doubling_all_reduce(workers: int) -> Stated:
    core = power_of_two_within(workers)
    stages = [*_halving(core), *_doubling(core)]
    if core < workers:
        extra = np.arange(core, workers, dtype=np.int32)
        stages.insert(0, _stage(extra, extra - core, block_count=core, reduces=True))
        stages.append(_stage(extra - core, extra, block_count=core, reduces=False))
    return core, (tuple(stages),)


def _double_tree_all_reduce(workers: int) -> Stated:
    parents = _binary_tree(workers)
    ranks = np.arange(workers)
    # The second tree is the first one mirrored, or shifted by one where a mirror would put a rank
    # in the middle of both: leaves of one are inner nodes of the other.
    second = ranks[::-1] if workers % 2 == 0 else np.roll(ranks, -1)
    return 2, (_up_and_down(parents, ranks, 0), _up_and_down(parents, second, 1))


def _binary_tree(workers: int) -> list[int]:
    """Return each node's parent (-1 at the root): odd nodes are leaves, node 0 is the root."""
    parents = [-1]
    for node in range(1, workers):
        low = node & -node
        above = (node ^ low) | (low << 1)
        parents.append(above if above < workers else node ^ low)
    return parents


def _up_and_down(parents: list[int], rank_of: NDArray[np.int64], block: int) -> Part:
    """Add up from the leaves to the root, then hand the sum down again."""
    heights, depths = _heights(parents), _depths(parents)
    children = np.arange(1, len(parents))
    child_rank = rank_of[children].astype(np.int32)
    parent_rank = rank_of[np.array(parents)[children]].astype(np.int32)
    up = _by_round(heights[children], child_rank, parent_rank, block, reduces=True)
    down = _by_round(depths[children], parent_rank, child_rank, block, reduces=False)
    return (*up, *down)


def _heights(parents: list[int]) -> Int32:
    heights = np.zeros(len(parents), np.int32)
    for node in sorted(range(1, len(parents)), key=lambda node: node & -node):
        heights[parents[node]] = max(heights[parents[node]], heights[node] + 1)
    return heights


def _depths(parents: list[int]) -> Int32:
    depths = np.zeros(len(parents), np.int32)
    for node in sorted(range(1, len(parents)), key=lambda node: -(node & -node)):
        depths[node] = depths[parents[node]] + 1
    return depths


def _by_round(
    number: Int32, source: Int32, target: Int32, block: int, *, reduces: bool
) -> Iterator[Stage]:
    for each in np.unique(number):
        among = number == each
        yield _stage(source[among], target[among], first_block=block, reduces=reduces)


def _stage(
    source: Int32, target: Int32, *, first_block: Any = 0, block_count: int = 1, reduces: bool
) -> Stage:
    return Stage(
        source=source,
        target=target,
        first_block=np.broadcast_to(np.asarray(first_block, np.int32), source.shape),
        block_count=block_count,
        reduces=reduces,
    )


def _refuse_uneven(op: str, workers: int) -> None:
    if workers != power_of_two_within(workers):
        raise UsageError(
            f"{op} by halving-doubling: expected a power of two of workers, got {workers}"
        )


def _builder(op: str, algorithm: str) -> Callable[[int], Stated]:
    known = algorithms(op)
    if algorithm not in known:
        raise UsageError(f"algorithm for {op}: expected {' or '.join(known)}, got {algorithm!r}")
    return _BUILDERS[op, algorithm]


_BUILDERS: Mapping[tuple[str, str], Callable[[int], Stated]] = {
    ("allreduce", "ring"): _ring_all_reduce,
    ("allreduce", "tree"): _double_tree_all_reduce,
    ("allreduce", "halving-doubling"): _halving_doubling_all_reduce,
    ("reducescatter", "ring"): _ring_reduce_scatter,
    ("reducescatter", "halving-doubling"): _halving_reduce_scatter,
    ("allgather", "ring"): _ring_all_gather,
    ("allgather", "halving-doubling"): _doubling_all_gather,
    ("broadcast", "ring"): _chain_broadcast,
    ("broadcast", "tree"): _binomial_broadcast,
}
OPS: tuple[str, ...] = tuple(dict.fromkeys(op for op, _ in _BUILDERS))
