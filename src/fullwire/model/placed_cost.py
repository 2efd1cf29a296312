"""What a collective costs on a described cluster, in closed form.

    time = start-up + seconds for a byte * message bytes + latency + add times

A stage takes as long as its slowest transfer when all of it goes on at once: the bytes on the
fullest link of its way over that link's rate, and one latency; the stages follow each other, and
parts go side by side. That is exact where a stage's transfers are all alike and nobody who sends in
it could have begun before the stage ahead had ended (`is_exact`); elsewhere events overlap more.
Parts that do not go side by side stage by stage, such as those of a double tree, are taken at full
utilization: every byte of the fullest link, without a pause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from fullwire.model.cost import AddTimes, Floats
from fullwire.model.fabric import Fabric
from fullwire.model.placed import Placed
from fullwire.model.stages import Int32, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCost:
    """The terms of a time; `adds` are rounds, and the share of the message that each adds."""

    seconds_per_byte: float
    latency_s: float
    startup_s: float
    adds: tuple[tuple[int, float], ...]
    is_exact: bool

    def time_s(self, size_bytes: ArrayLike, adds: AddTimes | None = None) -> Floats:
        """Return the time for a message of this size, or for many."""
        size = np.asarray(size_bytes, np.float64)
        time_s = self.startup_s + (size * self.seconds_per_byte + self.latency_s)
        for rounds, share in self.adds if adds is not None else ():
            assert adds is not None
            time_s = time_s + rounds * adds(size * share)
        return np.asarray(time_s)


def placed_cost(placed: Placed, fabric: Fabric) -> PlacedCost:
    """Return what a plan costs where it was placed."""
    parts = placed.plan.stages
    if not _go_side_by_side(parts):
        return _at_full_utilization(placed, fabric)
    block = 1 / placed.plan.message_blocks
    steps = [_step(placed, fabric, number) for number in range(len(parts[0]) if parts else 0)]
    return PlacedCost(
        seconds_per_byte=block * sum(step.rounds * step.slowest_s for step in steps),
        latency_s=sum(step.rounds * step.latency_s for step in steps),
        startup_s=_startup_s(placed, fabric),
        adds=_adds(parts[0] if parts else (), block),
        is_exact=all(step.is_alike for step in steps) and all(map(_follows_itself, parts)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The stages that all parts are in at once; seconds are for a block of one byte."""

    rounds: int
    slowest_s: float
    latency_s: float
    is_alike: bool


def _step(placed: Placed, fabric: Fabric, number: int) -> _Step:
    stages = [part[number] for part in placed.plan.stages]
    transfers = [part[number] for part in placed.transfers]
    blocks = np.concatenate(
        [np.full(len(stage), stage.block_count, np.float64) for stage in stages]
    )
    connection, which = np.unique(np.concatenate(transfers), return_inverse=True)
    load = np.bincount(which, blocks).astype(np.float64)
    slowest_s = _slowest_s(placed, fabric, connection, load)
    latency_s = placed.routes.latency_s[connection]
    return _Step(
        rounds=stages[0].rounds, slowest_s=float(slowest_s.max()),
        latency_s=float(latency_s.max()),
        is_alike=len(connection) == len(blocks)  # two on one connection go one after the other
        and all(_are_equal(each) for each in (blocks, slowest_s, latency_s)),
    )  # fmt: skip


def _slowest_s(placed: Placed, fabric: Fabric, connection: Int32, load: Floats) -> Floats:
    """Return, for each connection, the time of the fullest link on its way."""
    begin = placed.routes.begin
    length = begin[connection + 1] - begin[connection]
    first = np.cumsum(length) - length
    which = np.repeat(np.arange(len(connection)), length)
    link = placed.routes.link[np.arange(len(which)) + (begin[connection] - first)[which]]
    used, place = np.unique(link, return_inverse=True)
    busy_s = np.bincount(place, load[which]) * 8 / fabric.link_rate_bps[used]
    slowest_s = np.zeros(len(connection))
    np.maximum.at(slowest_s, which, busy_s[place])
    return slowest_s


def _are_equal(values: Floats) -> bool:
    return bool(np.ptp(values) <= 1e-12 * values.max())


def _startup_s(placed: Placed, fabric: Fabric) -> float:
    return fabric.startup_s if placed.plan.transfer_count() else 0.0


def _go_side_by_side(parts: tuple[Part, ...]) -> bool:
    rounds = [[stage.rounds for stage in part] for part in parts]
    return all(each == rounds[0] for each in rounds)


def _follows_itself(part: Part) -> bool:
    """Say whether all who send in a stage have received in the one before, round after round."""
    repeated = [(stage, stage) for stage in part if stage.rounds > 1]
    return all(
        np.isin(after.source, before.target).all() for before, after in [*pairwise(part), *repeated]
    )


def _at_full_utilization(placed: Placed, fabric: Fabric) -> PlacedCost:
    plan = placed.plan
    busy = placed.blocks_over_links(fabric.link_count) * 8 / fabric.link_rate_bps
    parts = list(zip(plan.stages, placed.transfers, strict=True))
    latencies_s = [sum(_latencies_s(placed, *part)) for part in parts]
    longest = plan.stages[int(np.argmax(latencies_s))]
    block = 1 / plan.message_blocks
    return PlacedCost(
        seconds_per_byte=block * float(busy.max()), latency_s=max(latencies_s),
        startup_s=_startup_s(placed, fabric),
        adds=_adds(longest, block), is_exact=False,
    )  # fmt: skip


def _latencies_s(placed: Placed, stages: Part, transfers: tuple[Int32, ...]) -> Iterator[float]:
    for stage, connection in zip(stages, transfers, strict=True):
        yield stage.rounds * float(placed.routes.latency_s[connection].max())


def _adds(part: Part, block: float) -> tuple[tuple[int, float], ...]:
    return tuple((stage.rounds, stage.block_count * block) for stage in part if stage.reduces)
