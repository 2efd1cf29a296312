"""What a collective costs on a described cluster, in closed form.

A stage takes as long as its slowest transfer when all of it goes on at once: the bytes on the
fullest link of its way over that link's rate, and one latency. Where it is repeated, a rank goes on
as soon as its own block came, so the pace is that of a block on its way around, over every link in
turn, unless the fullest link needs longer. Stages follow each other, and parts go side by side; if
they share connections, such as rings within a node, their blocks come at different times there.

That is exact where a stage's transfers are all alike and nobody who sends in it could have begun
before the stage ahead had ended (`is_exact`); elsewhere events overlap more, or share less evenly.
Parts that do not go side by side stage by stage, such as those of a double tree, are taken at full
utilization: every byte of the fullest link, without a pause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from fullwire.model.cluster_plan import plan_on
from fullwire.model.cost import AddTimes, Floats
from fullwire.model.fabric import Fabric
from fullwire.model.placed import Placed, placed
from fullwire.model.stages import Int32, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStep:
    """A stage: seconds are for a message of one byte, and for each of its rounds."""

    rounds: int
    slowest_s: float  # the fullest link of all ways
    around_s: float  # the mean of all transfers
    latest_s: float  # latency
    latency_s: float  # its mean
    adds: float  # share of the message that a rank adds up each round

    def time_s(self, size: Floats, adds: AddTimes) -> Floats:
        """Return what all rounds take."""
        added_s = adds(size * self.adds) if self.adds else 0.0
        if self.rounds == 1:
            return np.asarray(size * self.slowest_s + self.latest_s + added_s)
        fullest_s = self.rounds * self.slowest_s * size + self.latest_s
        around_s = self.rounds * (self.around_s * size + self.latency_s + added_s)
        return np.maximum(fullest_s, around_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCost:
    """What a collective costs where it was placed, for any size."""

    steps: tuple[PlacedStep, ...]
    startup_s: float
    is_exact: bool

    def time_s(self, size_bytes: ArrayLike, adds: AddTimes | None = None) -> Floats:
        """Return the time for a message of this size, or for many."""
        size = np.asarray(size_bytes, np.float64)
        known = adds or AddTimes()
        return np.asarray(sum((step.time_s(size, known) for step in self.steps), self.startup_s))


def collective_cost(
    op: str, algorithm: str, fabric: Fabric, *,
    workers: int | None = None, order: ArrayLike | None = None, servers: int = 1,
) -> PlacedCost:  # fmt: skip
    """Return what a collective costs among the first so many devices of a cluster, or among all."""
    return placed_cost(
        placed(plan_on(op, algorithm, fabric, workers, servers), fabric, order), fabric
    )


def placed_cost(where: Placed, fabric: Fabric) -> PlacedCost:
    """Return what a plan costs where it was placed."""
    parts = where.plan.stages
    startup_s = fabric.startup_s if parts else 0.0
    if not _go_side_by_side(parts):
        return _at_full_utilization(where, fabric)
    alike = [_step(where, fabric, number) for number in range(len(parts[0]) if parts else 0)]
    return PlacedCost(
        steps=tuple(step for step, _ in alike), startup_s=startup_s,
        is_exact=all(is_alike for _, is_alike in alike) and all(map(_follows_itself, parts)),
    )  # fmt: skip


def _step(where: Placed, fabric: Fabric, number: int) -> tuple[PlacedStep, bool]:
    """Return what all parts do at once, and whether its transfers are all alike."""
    stages = [part[number] for part in where.plan.stages]
    block = 1 / where.plan.message_blocks
    blocks = np.concatenate(
        [np.full(len(stage), stage.block_count, np.float64) for stage in stages]
    )
    transfers = [part[number] for part in where.transfers]
    connection, which = np.unique(np.concatenate(transfers), return_inverse=True)
    load = np.bincount(which, blocks).astype(np.float64)
    slowest_s = block * _slowest_s(where, fabric, connection, load)
    latency_s = where.routes.latency_s[connection]
    is_alone = len(connection) == len(blocks)  # two on one connection go one after the other
    own_s = (
        slowest_s
        if is_alone
        else block
        * np.concatenate(
            [
                _slowest_s(where, fabric, each, np.full(len(each), stage.block_count, np.float64))
                for stage, each in zip(stages, transfers, strict=True)
            ]
        )
    )
    step = PlacedStep(
        rounds=stages[0].rounds,
        slowest_s=float(slowest_s.max()), around_s=float(own_s.mean()),
        latest_s=float(latency_s.max()), latency_s=float(latency_s[which].mean()),
        adds=block * stages[0].block_count if stages[0].reduces else 0.0,
    )  # fmt: skip
    return step, is_alone and all(_are_equal(each) for each in (blocks, slowest_s, latency_s))


def _slowest_s(where: Placed, fabric: Fabric, connection: Int32, load: Floats) -> Floats:
    """Return, for each connection, the time of the fullest link on its way."""
    begin = where.routes.begin
    length = begin[connection + 1] - begin[connection]
    first = np.cumsum(length) - length
    which = np.repeat(np.arange(len(connection)), length)
    link = where.routes.link[np.arange(len(which)) + (begin[connection] - first)[which]]
    used, place = np.unique(link, return_inverse=True)
    busy_s = np.bincount(place, load[which]) * 8 / fabric.link_rate_bps[used]
    slowest_s = np.zeros(len(connection))
    np.maximum.at(slowest_s, which, busy_s[place])
    return slowest_s


def _are_equal(values: Floats) -> bool:
    return bool(np.ptp(values) <= 1e-12 * values.max())


def _go_side_by_side(parts: tuple[Part, ...]) -> bool:
    rounds = [[stage.rounds for stage in part] for part in parts]
    return all(each == rounds[0] for each in rounds)


def _follows_itself(part: Part) -> bool:
    """Say whether all who send in a stage have received in the one before, round after round."""
    repeated = [(stage, stage) for stage in part if stage.rounds > 1]
    return all(
        np.isin(after.source, before.target).all() for before, after in [*pairwise(part), *repeated]
    )


def _at_full_utilization(where: Placed, fabric: Fabric) -> PlacedCost:
    plan = where.plan
    busy = where.blocks_over_links(fabric.link_count) * 8 / fabric.link_rate_bps
    parts = list(zip(plan.stages, where.transfers, strict=True))
    latencies_s = [sum(_latencies_s(where, *part)) for part in parts]
    longest = plan.stages[int(np.argmax(latencies_s))]
    fullest = PlacedStep(
        rounds=1, slowest_s=float(busy.max()) / plan.message_blocks, around_s=0.0,
        latest_s=max(latencies_s), latency_s=0.0, adds=0.0,
    )  # fmt: skip
    return PlacedCost(
        steps=(fullest, *_adds(longest, plan.message_blocks)), startup_s=fabric.startup_s,
        is_exact=False,
    )  # fmt: skip


def _latencies_s(where: Placed, stages: Part, transfers: tuple[Int32, ...]) -> Iterator[float]:
    for stage, connection in zip(stages, transfers, strict=True):
        yield stage.rounds * float(where.routes.latency_s[connection].max())


def _adds(part: Part, message_blocks: int) -> Iterator[PlacedStep]:
    for stage in part:
        if stage.reduces:
            yield PlacedStep(
                rounds=stage.rounds, slowest_s=0.0, around_s=0.0, latest_s=0.0, latency_s=0.0,
                adds=stage.block_count / message_blocks,
            )  # fmt: skip
