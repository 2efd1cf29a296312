"""What a collective takes on the links of a described cluster, in closed form.

A collective is rounds: transfers of one size that go on at once, so many times in a row. Transfers
share the links that they meet on, so a round lasts as long as the link that has most to carry for
its rate. A rank that has sent its block sends the next one as soon as that came, whatever others
do: of many rounds in a row the pace is the slower one of what the busiest link takes, and of what a
block takes on its way around, on average. Where all links are equal the second one decides, and the
cost is that of `model.cost`, which also knows what adding takes.

Ranks are placed on devices in order, node by node, or `scattered`: neighbours on different leaves,
as by a scheduler that does not know them.

The rate of the NICs is left open, and with it that of all uplinks, so that one cost serves a grid:
a link takes so many seconds a byte of its own, or so many bits a byte at the NICs' rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from fullwire.errors import UsageError
from fullwire.model.fabric import (
    IN_NODE,
    LINK_KINDS,
    Fabric,
    Floats,
    Ints,
    LeafSpine,
    Routes,
    Torus,
    with_nodes,
)
from fullwire.model.plan import plan
from fullwire.model.stages import Transfers

# Chunks of these follow each other closely, so that the busiest link never waits.
_PIPELINED = (("allreduce", "tree"), ("broadcast", "ring"))


@dataclass(frozen=True, slots=True)
class Pace:
    """What rounds cannot be faster than: terms add up, the slower side of each decides."""

    weight: tuple[float, ...]  # bytes that each term carries, for each byte of the message
    seconds_per_byte: tuple[float, ...]  # on links whose rate is their own
    bits_per_byte: tuple[float, ...]  # on links whose rate follows the NICs'
    latency_s: float

    def time_s(self, size_bytes: ArrayLike, per_bit: ArrayLike) -> Floats:
        """Return the time for messages of these sizes, at so many seconds a bit."""
        total: Floats = np.asarray(self.latency_s)
        for weight, own, of_nics in zip(
            self.weight, self.seconds_per_byte, self.bits_per_byte, strict=True
        ):
            slower = np.maximum(own, np.multiply(of_nics, per_bit))
            total = total + np.multiply(size_bytes, weight) * slower
        return total


@dataclass(frozen=True, slots=True)
class RoundsCost:
    """What rounds of one kind take: the slowest pace decides, the first is the busiest link's."""

    paces: tuple[Pace, ...]
    busiest: str  # the kind of link that decides at the NICs' own rate

    def time_s(self, size_bytes: ArrayLike, per_bit: ArrayLike) -> Floats:
        """Return the time for messages of these sizes, at so many seconds a bit."""
        slowest, *others = (pace.time_s(size_bytes, per_bit) for pace in self.paces)
        for other in others:
            slowest = np.maximum(slowest, other)
        return slowest


@dataclass(frozen=True, slots=True)
class FabricCost:
    """What a collective takes for any size, at any rate of the NICs."""

    rounds: tuple[RoundsCost, ...] = ()
    startup_s: float = 0.0

    @property
    def network_bits_per_byte(self) -> float:
        """Return what the busiest link of the network carries, as bits at the NICs' rate."""
        first = [each.paces[0] for each in self.rounds]
        return sum(float(np.dot(each.weight, each.bits_per_byte)) for each in first)

    def time_s(self, size_bytes: ArrayLike, per_bit: ArrayLike) -> Floats:
        """Return the time for messages of these sizes, at so many seconds a bit."""
        total: Floats = np.asarray(self.startup_s)
        for each in self.rounds:
            total = total + each.time_s(size_bytes, per_bit)
        return total

    def busiest(self, size_bytes: float, per_bit: float) -> str | None:
        """Name the kind of link that takes most of the time; None among one worker."""
        time_s: dict[str, float] = {}
        for each in self.rounds:
            here_s = float(each.time_s(size_bytes, per_bit))
            time_s[each.busiest] = time_s.get(each.busiest, 0.0) + here_s
        return max(time_s, key=lambda kind: time_s[kind], default=None)


@dataclass(frozen=True, eq=False, slots=True)
class _Rounds:
    """Transfers that go on at once, `times` in a row, each of this share of the message."""

    source: Ints
    target: Ints
    share: float
    times: int = 1


def with_workers(fabric: Fabric, workers: int) -> Fabric:
    """Return the cluster with as many nodes as so many workers need, each on a device."""
    if isinstance(fabric.network, Torus):
        if workers > fabric.devices:
            raise UsageError(
                f"workers: expected at most {fabric.devices} on the torus {fabric.name}, "
                f"got {workers}"
            )
        return fabric
    return with_nodes(fabric, -(-workers // fabric.devices_per_node))


def scattered(fabric: Fabric) -> Ints:
    """Return the device of each rank where consecutive nodes are on different leaves."""
    node = np.arange(fabric.nodes)
    if isinstance(fabric.network, LeafSpine):
        per_leaf = fabric.network.nodes_per_leaf
        node = np.lexsort((node // per_leaf, node % per_leaf))
    within = np.arange(fabric.devices_per_node)
    return (node[:, None] * fabric.devices_per_node + within).reshape(-1)


@lru_cache(maxsize=4096)
def fabric_cost(
    op: str, algorithm: str, fabric: Fabric, workers: int, *, is_scattered: bool = False
) -> FabricCost:
    """Return what a collective takes among so many devices of a cluster."""
    if workers == 1:
        return FabricCost()
    device = scattered(fabric) if is_scattered else np.arange(fabric.devices)
    parts = _parts(op, algorithm, workers)
    if (op, algorithm) in _PIPELINED:
        return FabricCost((_at_full_utilization(fabric, parts, device),), fabric.startup_s)
    costs = tuple(_cost(fabric, each, device) for part in parts for each in part)
    return FabricCost(costs, fabric.startup_s)


def _parts(op: str, algorithm: str, workers: int) -> list[list[_Rounds]]:
    """State a collective as rounds, part by part; those of a ring are all alike."""
    if algorithm == "ring" and op in ("allreduce", "reducescatter", "allgather"):
        rank = np.arange(workers)
        times = (2 if op == "allreduce" else 1) * (workers - 1)
        return [[_Rounds(rank, (rank + 1) % workers, 1 / workers, times)]]
    stated = plan(op, algorithm, workers)
    return [list(_one_by_one(part, stated.blocks)) for part in stated.parts]


def _one_by_one(part: Transfers, blocks: int) -> Iterator[_Rounds]:
    starts = [*np.flatnonzero(np.diff(part.round, prepend=-1)).tolist(), len(part)]
    for begin, end in pairwise(starts):
        yield _Rounds(
            part.source[begin:end].astype(np.int64), part.target[begin:end].astype(np.int64),
            float(part.block_count[begin]) / blocks,
        )  # fmt: skip


def _cost(fabric: Fabric, rounds: _Rounds, device: Ints) -> RoundsCost:
    routes = fabric.routes(device[rounds.source], device[rounds.target])
    own, of_nics = _by_link(fabric, routes)
    weight = (rounds.times * rounds.share,)
    busiest = _Busiest.of(fabric, own, of_nics)
    paces = [Pace(weight, *busiest.bound, float(routes.latency_s.max()))]
    if rounds.times > 1:
        paces.append(_around(routes, own, of_nics, rounds))
    return RoundsCost(tuple(paces), busiest.kind)


def _around(routes: Routes, own: Floats, of_nics: Floats, rounds: _Rounds) -> Pace:
    """Return the pace of a block on its way around: over every transfer's slowest link in turn."""
    slowest = np.stack(
        [np.maximum.reduceat(each[routes.link], routes.begin[:-1]) for each in (own, of_nics)], 1
    )
    kinds, counts = np.unique(slowest, axis=0, return_counts=True)
    weight = rounds.times * rounds.share * counts / len(routes)
    return Pace(
        tuple(weight.tolist()), tuple(kinds[:, 0].tolist()), tuple(kinds[:, 1].tolist()),
        rounds.times * float(routes.latency_s.mean()),
    )  # fmt: skip


def _at_full_utilization(
    fabric: Fabric, parts: Sequence[Sequence[_Rounds]], device: Ints
) -> RoundsCost:
    """Return what the busiest link has to carry in all, and the latencies in a row."""
    own, of_nics = np.zeros(fabric.link_count), np.zeros(fabric.link_count)
    in_a_row_s = []
    for part in parts:
        in_a_row_s.append(0.0)
        for each in part:
            routes = fabric.routes(device[each.source], device[each.target])
            for total, here in zip((own, of_nics), _by_link(fabric, routes), strict=True):
                total += each.share * here
            in_a_row_s[-1] += float(routes.latency_s.max())
    busiest = _Busiest.of(fabric, own, of_nics)
    return RoundsCost((Pace((1.0,), *busiest.bound, max(in_a_row_s)),), busiest.kind)


def _by_link(fabric: Fabric, routes: Routes) -> tuple[Floats, Floats]:
    """Return what each link takes for a byte of every transfer: seconds of its own, or bits."""
    bits = 8.0 * np.bincount(routes.link, minlength=fabric.link_count)
    is_own = fabric.link_kind == IN_NODE
    if fabric.other_hosts:
        is_own |= fabric.link_rate_bps != replace(fabric, other_hosts=()).link_rate_bps
    own = bits / fabric.link_rate_bps
    of_nics = bits * (fabric.nics.rate_bps / fabric.link_rate_bps)
    return np.where(is_own, own, 0.0), np.where(is_own, 0.0, of_nics)


@dataclass(frozen=True, slots=True)
class _Busiest:
    """The link that has most to carry, among those of a rate of their own and the others."""

    kind: str
    bound: tuple[tuple[float], tuple[float]]

    @staticmethod
    def of(fabric: Fabric, own: Floats, of_nics: Floats) -> _Busiest:
        link = int(np.argmax(np.maximum(own, of_nics / fabric.nics.rate_bps)))
        kind = LINK_KINDS[fabric.link_kind[link]]
        return _Busiest(kind, ((float(own.max()),), (float(of_nics.max()),)))
