"""How a collective is stated: stages of transfers between seats of a message cut into blocks.

A seat is a rank, or a switch that adds and copies the blocks passing through it. Seats beyond the
workers' are switches, and are empty at the beginning. A transfer moves blocks from one seat to
another, where they are added to the blocks there (`reduces`) or replace them. The transfers of a
stage are of one size and go on at once, `rounds` times in a row. Each time the blocks move on by
`shift`, within the window of so many blocks that holds the first one. So a ring is two stages,
however many ranks it has: its 2(N-1) equal rounds are stated once for each phase.

Within a part a seat waits before it sends in a round. It must have received everything that earlier
rounds sent to it, and its own blocks of earlier rounds must have left. Parts touch different blocks
and do not wait for each other. The event engine plays a plan, the transport runs it, and `execute`
carries it out on real arrays, which shows that a plan is right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Stage:
    """Transfers of one size that go on at once, `rounds` times in a row.

    The blocks of a transfer are `block_step` apart.
    """

    source: Int32
    target: Int32
    first_block: Int32
    reduces: bool
    block_count: int = 1
    block_step: int = 1
    rounds: int = 1
    shift: int = 0
    window: int = 1

    def __len__(self) -> int:
        return len(self.source)

    def first_blocks(self, number: int) -> Int32:
        """Return each transfer's first block in one of the rounds."""
        within = self.first_block % self.window
        moved = (within + number * self.shift) % self.window
        return np.asarray(self.first_block - within + moved, np.int32)


def stage(
    source: NDArray[Any], target: NDArray[Any], first_block: NDArray[Any] | int = 0, **how: Any
) -> Stage:
    """State transfers between these seats; one first block may serve for all."""
    return Stage(
        source=_column(source),
        target=_column(target),
        first_block=_column(np.broadcast_to(np.asarray(first_block), source.shape)),
        **how,
    )


def _column(values: NDArray[Any]) -> Int32:
    return np.asarray(values.reshape(-1), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How ranks are laid out: rank n * D + d is device d of node n, with D devices a node.

    `others` ranks are on one more node, which is not full. `nodes_per_leaf` counts the nodes whose
    messages a switch can add.
    """

    nodes: int
    per_node: int = 1
    others: int = 0
    nics_per_node: int = 1
    nodes_per_leaf: int | None = None
    torus: tuple[int, int] | None = None
    servers: int = 1

    @property
    def workers(self) -> int:
        """How many ranks there are."""
        return self.nodes * self.per_node + self.others

    @property
    def in_equal_groups(self) -> Layout:
        """Return the ranks as groups of one size, each within a node, where the last is not full.

        A node of 72 and one of 56 are 9 and 7 groups of 8. Neighbouring groups of one node then
        meet inside it, and the others on NICs.
        """
        size = gcd(self.per_node, self.others)  # of `per_node` where no rank is left over
        return replace(self, nodes=self.workers // size, per_node=size, others=0)


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


Part: TypeAlias = tuple[Stage, ...]


class Stated(NamedTuple):
    """A plan without its names, as an algorithm states it."""

    blocks: int
    parts: tuple[Part, ...]
    places: NDArray[Any] | None = None
    switches: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """A collective as transfers between `workers` ranks of a message cut into `blocks`.

    `stages` holds the stages of each part; parts touch different blocks and do not wait for each
    other.
    Block b of the plan is block `places[b]` of the message, or b itself without places.
    """

    op: str
    algorithm: str
    workers: int
    blocks: int
    stages: tuple[Part, ...]
    switches: int = 0
    places: Int32 | None = None

    @property
    def seats(self) -> int:
        """How many ranks and switches take part."""
        return self.workers + self.switches

    @property
    def message_blocks(self) -> int:
        """How many blocks a rank's message has: in an all-to-all every rank has its own."""
        return self.blocks // self.workers if self.op == "alltoall" else self.blocks

    @cached_property
    def parts(self) -> tuple[Transfers, ...]:
        """Return every transfer, round by round."""
        return tuple(_spelt_out(part) for part in self.stages)

    def transfer_count(self) -> int:
        """Count the transfers of the whole plan."""
        return sum(stage.rounds * len(stage) for part in self.stages for stage in part)

    def sent_blocks(self) -> NDArray[np.int64]:
        """Count the blocks that each seat sends."""
        return self._blocks_by("source")

    def received_blocks(self) -> NDArray[np.int64]:
        """Count the blocks that each seat receives."""
        return self._blocks_by("target")

    def _blocks_by(self, end: str) -> NDArray[np.int64]:
        total = np.zeros(self.seats, np.int64)
        for part in self.stages:
            for stage in part:
                np.add.at(total, getattr(stage, end), stage.rounds * stage.block_count)
        return total


def execute(stated: Plan, vectors: NDArray[Any]) -> NDArray[Any]:
    """Carry a plan out on one vector per rank and return what each rank holds at the end."""
    held = np.zeros((stated.seats, vectors.shape[1]), vectors.dtype)
    held[: stated.workers] = vectors
    # Where in a vector each block of the plan lies.
    edges = np.arange(stated.blocks + 1) * vectors.shape[1] // stated.blocks
    places = range(stated.blocks) if stated.places is None else stated.places
    spans = [slice(edges[place], edges[place + 1]) for place in places]
    for part in stated.stages:
        for stage in part:
            reach = stage.block_count * stage.block_step
            for number in range(stage.rounds):
                # Everything is read before anything is written, as on the wire.
                mail = [
                    (stage.target[row], span, held[stage.source[row], span].copy())
                    for row, first in enumerate(stage.first_blocks(number))
                    for span in spans[first : first + reach : stage.block_step]
                ]
                for target, span, payload in mail:
                    held[target, span] = held[target, span] + payload if stage.reduces else payload
    return held[: stated.workers]


def _spelt_out(part: Part) -> Transfers:
    if any(stage.block_step > 1 for stage in part):
        raise ValueError("blocks that are apart have no place in one column")
    first_round = 0
    pieces: list[tuple[Int32, ...]] = []
    for stage in part:
        for number in range(stage.rounds):
            size = len(stage)
            pieces.append(
                (
                    np.full(size, first_round + number, np.int32),
                    stage.source,
                    stage.target,
                    stage.first_blocks(number),
                    np.full(size, stage.block_count, np.int32),
                    np.full(size, stage.reduces, np.int32),
                )
            )
        first_round += stage.rounds
    columns = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
    return Transfers(
        round=columns[0],
        source=columns[1],
        target=columns[2],
        first_block=columns[3],
        block_count=columns[4],
        reduces=columns[5].astype(bool),
    )
