"""Collectives, each stated once as transfers between ranks.

The event engine plays a plan, the transport will run it, and `execute` carries it out on real
arrays, which is how a plan is known to be right. A message is cut into equal blocks; a transfer
moves consecutive blocks from one rank to another, where they are added to what is there (`reduces`)
or replace it. Within a part a rank sends in a round only after it has received everything that
earlier rounds sent to it, and what it sent in earlier rounds has left; parts touch different blocks
and do not wait for each other.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fullwire.errors import UsageError

Int32: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Transfers:
    """One part of a plan as columns, in order of rounds."""

    round: Int32
    source: Int32
    target: Int32
    first_block: Int32
    block_count: Int32
    reduces: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.round)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Plan:
    """A collective as transfers between `workers` ranks of a message cut into `blocks`."""

    op: str
    algorithm: str
    workers: int
    blocks: int
    parts: tuple[Transfers, ...]

    def transfer_count(self) -> int:
        """Count the transfers of the whole plan."""
        return sum(len(part) for part in self.parts)

    def sent_blocks(self) -> NDArray[np.int64]:
        """Count the blocks that each rank sends."""
        return self._blocks_by("source")

    def received_blocks(self) -> NDArray[np.int64]:
        """Count the blocks that each rank receives."""
        return self._blocks_by("target")

    def _blocks_by(self, end: str) -> NDArray[np.int64]:
        total = np.zeros(self.workers, np.int64)
        for part in self.parts:
            np.add.at(total, getattr(part, end), part.block_count)
        return total


def plan(op: str, algorithm: str, workers: int) -> Plan:
    """State a collective as transfers."""
    build = _builder(op, algorithm)
    if workers < 1:
        raise UsageError(f"workers: expected at least 1, got {workers}")
    blocks, parts = (1, ()) if workers == 1 else build(workers)
    return Plan(op=op, algorithm=algorithm, workers=workers, blocks=blocks, parts=parts)


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


def execute(stated: Plan, vectors: NDArray[Any]) -> NDArray[Any]:
    """Carry a plan out on one vector per rank and return what each rank holds at the end."""
    held = np.array(vectors)
    edges = np.arange(stated.blocks + 1) * held.shape[1] // stated.blocks
    for part in stated.parts:
        for number in np.unique(part.round):
            _execute_round(part, np.flatnonzero(part.round == number), edges, held)
    return held


def power_of_two_within(workers: int) -> int:
    """Return the largest power of two that is not above `workers`."""
    return int(1 << (workers.bit_length() - 1))


def _execute_round(
    part: Transfers, rows: NDArray[np.intp], edges: NDArray[np.int64], held: NDArray[Any]
) -> None:
    """Deliver one round: everything is read before anything is written, as on the wire."""
    mail = []
    for row in rows:
        start = part.first_block[row]
        span = slice(edges[start], edges[start + part.block_count[row]])
        mail.append(
            (part.target[row], span, held[part.source[row], span].copy(), part.reduces[row])
        )
    for target, span, payload, reduces in mail:
        held[target, span] = held[target, span] + payload if reduces else payload


def _ring_rounds(workers: int, *, first_round: int, lead: int, reduces: bool) -> Transfers:
    """Pass blocks on around the ring; a rank begins with the block `lead` before its own."""
    rounds = np.arange(workers - 1, dtype=np.int32)[:, None]
    ranks = np.arange(workers, dtype=np.int32)[None, :]
    shape = (workers - 1, workers)
    size = (workers - 1) * workers
    return Transfers(
        round=np.broadcast_to(rounds + np.int32(first_round), shape).reshape(size),
        source=np.broadcast_to(ranks, shape).reshape(size),
        target=np.broadcast_to((ranks + 1) % workers, shape).reshape(size),
        first_block=((ranks - lead - rounds) % workers).reshape(size),
        block_count=np.ones(size, np.int32),
        reduces=np.full(size, reduces),
    )


def _ring_reduce_scatter(workers: int) -> tuple[int, tuple[Transfers, ...]]:
    return workers, (_ring_rounds(workers, first_round=0, lead=1, reduces=True),)


def _ring_all_gather(workers: int) -> tuple[int, tuple[Transfers, ...]]:
    return workers, (_ring_rounds(workers, first_round=0, lead=0, reduces=False),)


def _ring_all_reduce(workers: int) -> tuple[int, tuple[Transfers, ...]]:
    scatter = _ring_rounds(workers, first_round=0, lead=1, reduces=True)
    gather = _ring_rounds(workers, first_round=workers - 1, lead=0, reduces=False)
    return workers, (_joined([scatter, gather]),)


def _chain_broadcast(workers: int) -> tuple[int, tuple[Transfers, ...]]:
    hops = np.arange(workers - 1, dtype=np.int32)
    return 1, (_transfers(hops, hops, hops + 1, reduces=False),)


def _binomial_broadcast(workers: int) -> tuple[int, tuple[Transfers, ...]]:
    rounds: list[Transfers] = []
    reach = 1
    while reach < workers:
        source = np.arange(min(reach, workers - reach), dtype=np.int32)
        rounds.append(_transfers(len(rounds), source, source + reach, reduces=False))
        reach *= 2
    return 1, (_joined(rounds),)


def _halving(workers: int, *, first_round: int) -> list[Transfers]:
    """Exchange halves with ever nearer partners: rank r ends with the sum of block r."""
    ranks = np.arange(workers, dtype=np.int32)
    rounds: list[Transfers] = []
    distance = workers // 2
    while distance:
        partner = ranks ^ distance
        rounds.append(
            _transfers(
                first_round + len(rounds), ranks, partner,
                first_block=partner & ~(distance - 1), block_count=distance, reduces=True,
            )
        )  # fmt: skip
        distance //= 2
    return rounds


def _doubling(workers: int, *, first_round: int) -> list[Transfers]:
    """Exchange all that is held with ever farther partners, until every rank has every block."""
    ranks = np.arange(workers, dtype=np.int32)
    rounds: list[Transfers] = []
    distance = 1
    while distance < workers:
        rounds.append(
            _transfers(
                first_round + len(rounds), ranks, ranks ^ distance,
                first_block=ranks & ~(distance - 1), block_count=distance, reduces=False,
            )
        )  # fmt: skip
        distance *= 2
    return rounds


def _halving_reduce_scatter(workers: int) -> tuple[int, tuple[Transfers, ...]]:
    _refuse_uneven("reducescatter", workers)
    return workers, (_joined(_halving(workers, first_round=0)),)


def _doubling_all_gather(workers: int) -> tuple[int, tuple[Transfers, ...]]:
    _refuse_uneven("allgather", workers)
    return workers, (_joined(_doubling(workers, first_round=0)),)


def _halving_doubling_all_reduce(workers: int) -> tuple[int, tuple[Transfers, ...]]:
    core = power_of_two_within(workers)
    extra = np.arange(core, workers, dtype=np.int32)
    fold_in = _transfers(0, extra, extra - core, block_count=core, reduces=True)
    halves = _halving(core, first_round=1)
    doubles = _doubling(core, first_round=1 + len(halves))
    fold_out = _transfers(1 + 2 * len(halves), extra - core, extra, block_count=core, reduces=False)
    return core, (_joined([fold_in, *halves, *doubles, fold_out]),)


def _double_tree_all_reduce(workers: int) -> tuple[int, tuple[Transfers, ...]]:
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


def _up_and_down(parents: list[int], rank_of: NDArray[np.int64], block: int) -> Transfers:
    """Add up from the leaves to the root, then hand the sum down again."""
    heights, depths = _heights(parents), _depths(parents)
    children = np.arange(1, len(parents))
    child_rank = rank_of[children].astype(np.int32)
    parent_rank = rank_of[np.array(parents)[children]].astype(np.int32)
    up = _transfers(heights[children], child_rank, parent_rank, first_block=block, reduces=True)
    down = _transfers(
        heights.max() + depths[children], parent_rank, child_rank, first_block=block, reduces=False
    )
    return _joined([_in_rounds(up), _in_rounds(down)])


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


def _transfers(
    number: Any, source: Int32, target: Int32, *,
    first_block: Any = 0, block_count: int = 1, reduces: bool,
) -> Transfers:  # fmt: skip
    size = len(source)
    return Transfers(
        round=np.broadcast_to(np.asarray(number, np.int32), (size,)),
        source=source.astype(np.int32),
        target=target.astype(np.int32),
        first_block=np.broadcast_to(np.asarray(first_block, np.int32), (size,)),
        block_count=np.full(size, block_count, np.int32),
        reduces=np.full(size, reduces),
    )


def _joined(parts: list[Transfers]) -> Transfers:
    return Transfers(
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in Transfers.__slots__
        }
    )


def _in_rounds(part: Transfers) -> Transfers:
    order = np.argsort(part.round, kind="stable")
    return Transfers(**{name: getattr(part, name)[order] for name in Transfers.__slots__})


def _refuse_uneven(op: str, workers: int) -> None:
    if workers != power_of_two_within(workers):
        raise UsageError(
            f"{op} by halving-doubling: expected a power of two of workers, got {workers}"
        )


def _builder(op: str, algorithm: str) -> Callable[[int], tuple[int, tuple[Transfers, ...]]]:
    known = algorithms(op)
    if algorithm not in known:
        raise UsageError(f"algorithm for {op}: expected {' or '.join(known)}, got {algorithm!r}")
    return _BUILDERS[op, algorithm]


_BUILDERS: Mapping[tuple[str, str], Callable[[int], tuple[int, tuple[Transfers, ...]]]] = {
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
