"""The time of a collective on the links of a cluster, in closed form, exact or nearly so.

A plan is stages: transfers that go on at once, so many times in a row, and those of all its parts
side by side. Transfers share the links that they meet on, so a round lasts as long as the link that
has most to carry for its rate. A rank that has sent its block sends the next one as soon as it
has arrived, independently of other ranks. So many rounds in a row have two paces: the time of the
busiest link, and the average time of a block on its way around. The slower pace decides. Where all
links are equal the second one does, and the cost equals the algorithm's own formula. Where parts do
not go side by side, or chunks follow each other closely, the busiest link's whole load decides.

Ranks are placed on devices in order, node by node. Or they are `scattered`: neighbours are on
different leaves, as by a scheduler that does not know them.

The rate of the NICs is left open, and with it that of all uplinks, so that one cost serves a grid.
A link takes so many seconds a byte of its own, or so many bits a byte at the NICs' rate.

The cost is exact (`is_exact`) under two conditions: a step's transfers are all alike, and no sender
could have begun before the step ahead had ended. Elsewhere events overlap more, or share less
evenly. The difference can be a third and more (not `is_near`) in three cases:

- There are slow hosts.
- Parts that do not go side by side meet on links.
- Steps go ways of their own (all-to-all, broadcasts, parameter servers).

There `simulation.on_links` corrects the cost by times in events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from fullwire.clusters.cluster import IN_NODE, LINK_KINDS, Cluster, Floats, Ints
from fullwire.collectives.cost import AddTimes
from fullwire.collectives.placed import Placed, placed
from fullwire.collectives.plan import plan_on
from fullwire.collectives.registry import statement


@dataclass(frozen=True, slots=True)
class Pace:
    """The least time of rounds: terms add up, and the slower side of each decides."""

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
    """The time of rounds of one kind. The slowest pace decides; the first is the busiest link's."""

    paces: tuple[Pace, ...]
    busiest: str  # the kind of link that decides at the NICs' own rate

    def time_s(self, size_bytes: ArrayLike, per_bit: ArrayLike) -> Floats:
        """Return the time for messages of these sizes, at so many seconds a bit."""
        slowest, *others = (pace.time_s(size_bytes, per_bit) for pace in self.paces)
        for other in others:
            slowest = np.maximum(slowest, other)
        return slowest


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The time of a collective for any size, at any rate of the NICs."""

    rounds: tuple[RoundsCost, ...] = ()
    hops: int = 0  # messages that wait for each other
    sent_per_byte: float = 0.0  # the most that a rank sends, for each byte of the message
    adds: tuple[tuple[int, float], ...] = ()  # so many, each of this share of the message
    startup_s: float = 0.0
    nic_rate_bps: float = 1.0
    is_exact: bool = False  # at that rate
    is_near: bool = True  # else ranks drift apart, and only events give the time

    # From events: a message's time at the NICs' rate, and the factor from this cost to its time.
    played: tuple[tuple[float, float], ...] = ()

    @property
    def is_believed(self) -> bool:
        """Whether it is near the time in events, by itself or because some messages were played."""
        return self.is_near or bool(self.played)

    def whole_s(self, size_bytes: ArrayLike, adds: AddTimes | None = None) -> Floats:
        """Return the time with all additions, at the rate that the NICs have."""
        added_s = self.add_s(size_bytes, adds or AddTimes())
        return self.time_s(size_bytes, 1 / self.nic_rate_bps) + added_s

    def add_s(self, size_bytes: ArrayLike, adds: AddTimes) -> Floats:
        """Return the time for adding, for messages of these sizes."""
        size = np.asarray(size_bytes, np.float64)
        total: Floats = np.zeros_like(size)
        for count, share in self.adds:
            total = total + count * adds(size * share)
        return total

    @property
    def network_bits_per_byte(self) -> float:
        """Return the load of the network's busiest link, as bits at the NICs' rate."""
        first = [cost.paces[0] for cost in self.rounds]
        return sum(float(np.dot(pace.weight, pace.bits_per_byte)) for pace in first)

    def time_s(self, size_bytes: ArrayLike, per_bit: ArrayLike) -> Floats:
        """Return the time for messages of these sizes, at so many seconds a bit."""
        total: Floats = np.zeros(())
        for cost in self.rounds:
            total = total + cost.time_s(size_bytes, per_bit)
        if self.played:
            wire_s, times = np.array(self.played).T
            here_s = np.maximum(8 * np.multiply(size_bytes, per_bit), wire_s[0])
            total = total * np.interp(np.log(here_s), np.log(wire_s), times)
        return self.startup_s + total

    def busiest(self, size_bytes: float, per_bit: float) -> str | None:
        """Name the kind of link that takes most of the time; None for one worker."""
        time_s: dict[str, float] = {}
        for cost in self.rounds:
            here_s = float(cost.time_s(size_bytes, per_bit))
            time_s[cost.busiest] = time_s.get(cost.busiest, 0.0) + here_s
        return max(time_s, key=lambda kind: time_s[kind], default=None)


def collective_cost(
    op: str,
    algorithm: str,
    cluster: Cluster,
    *,
    workers: int | None = None,
    order: ArrayLike | None = None,
    servers: int = 1,
) -> LinkCost:
    """Return a collective's cost with ranks on devices in this order, by default on all devices."""
    where = placed(plan_on(op, algorithm, cluster, workers, servers), cluster, order)
    return cost_of(where, cluster, is_pipelined=statement(op, algorithm).is_pipelined)


def cost_of(where: Placed, cluster: Cluster, *, is_pipelined: bool = False) -> LinkCost:
    """Return the cost of a placed plan; if it is pipelined, its chunks follow each other."""
    plan = where.plan
    if not plan.transfer_count():
        return LinkCost(is_exact=True)
    links = _Links.of(cluster)
    known = LinkCost(
        sent_per_byte=float(plan.sent_blocks()[: plan.workers].max()) / plan.message_blocks,
        startup_s=cluster.startup_s,
        nic_rate_bps=cluster.nics.rate_bps,
    )
    rounds = [[stage.rounds for stage in part] for part in plan.stages]
    if is_pipelined or any(of_part != rounds[0] for of_part in rounds):  # not side by side
        return replace(
            _at_full_utilization(where, links, known),
            hops=max(map(sum, rounds)),
            is_near=is_pipelined,
        )
    steps = list(_steps(where))
    # All senders of a stage have received in the stage before, round after round.
    follows = all(
        np.isin(after.source, before.target).all()
        for part in plan.stages
        for before, after in [
            *pairwise(part),
            *((stage, stage) for stage in part if stage.rounds > 1),
        ]
    )
    is_exact = follows
    for step in steps:  # all transfers carry as much, as fast, at the rate that the NICs have
        slowest = _slowest(where, links, step.load)
        slowest_s = np.maximum(slowest[:, 0], slowest[:, 1] / links.nic_rate_bps)
        latency_s = where.routes.latency_s[step.load.connection]
        is_exact &= step.beside[0] is step.load and all(
            bool(np.ptp(values) <= 1e-12 * values.max())
            for values in (step.load.share, slowest_s, latency_s)
        )
    # Some ways are longer than others. Where each step goes ways of its own, ranks move from step
    # to step at different times.
    goes_own_ways = plan.op in ("alltoall", "broadcast") or plan.algorithm == "parameter-server"
    stays_in_step = not goes_own_ways and (not cluster.other_hosts or len(steps) == 1)
    return replace(
        known,
        rounds=tuple(_cost(where, links, step) for step in steps),
        hops=sum(step.times for step in steps),
        adds=tuple(  # round after round; parts add side by side
            (stage.rounds, stage.block_count / plan.message_blocks)
            for stage in plan.stages[0]
            if stage.reduces
        ),
        is_exact=is_exact,
        is_near=is_exact or stays_in_step,
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Links:
    """How long links take for a byte: seconds of their own, or bits at the NICs' rate."""

    kind: Ints
    own: Floats
    of_nics: Floats
    nic_rate_bps: float

    @staticmethod
    def of(cluster: Cluster) -> _Links:
        is_own = cluster.link_kind == IN_NODE
        if cluster.other_hosts:
            is_own |= cluster.link_rate_bps != replace(cluster, other_hosts=()).link_rate_bps
        own = 8 / cluster.link_rate_bps
        of_nics = 8 * (cluster.nics.rate_bps / cluster.link_rate_bps)
        return _Links(
            cluster.link_kind.astype(np.int64),
            np.where(is_own, own, 0.0),
            np.where(is_own, 0.0, of_nics),
            cluster.nics.rate_bps,
        )

    def busiest(self, load: Floats) -> tuple[str, tuple[tuple[float], tuple[float]]]:
        """Return the kind of link that has most to carry, and its time a byte."""
        own, of_nics = load * self.own, load * self.of_nics
        link = int(np.argmax(np.maximum(own, of_nics / self.nic_rate_bps)))
        return LINK_KINDS[self.kind[link]], ((float(own.max()),), (float(of_nics.max()),))


@dataclass(frozen=True, eq=False, slots=True)
class _Load:
    """The load of connections at once, each as a share of the message in a round."""

    connection: Ints
    share: Floats

    def equals(self, other: _Load) -> bool:
        """Return whether the same connections carry the same."""
        return np.array_equal(self.connection, other.connection) and np.array_equal(
            self.share, other.share
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    """The stages that all parts are in at once, so many times.

    A block meets on its way around the loads `beside` it. These are all loads together. But parts
    that share connections, such as rings within a node, have their blocks there at different times,
    and each part's load is apart.
    """

    times: int
    load: _Load
    beside: tuple[_Load, ...]

    def continues(self, other: _Step) -> bool:
        """Return whether these rounds continue the other ones with the same loads."""
        return len(self.beside) == len(other.beside) and all(
            one.equals(another)
            for one, another in zip(
                (self.load, *self.beside), (other.load, *other.beside), strict=True
            )
        )


def _steps(where: Placed) -> Iterator[_Step]:
    """Go through a plan step by step, with equal ones in a row together."""
    parts, last = where.plan.stages, None
    for number in range(len(parts[0])):
        stages = [part[number] for part in parts]
        loads = tuple(
            _Load(
                connections[number].astype(np.int64),
                np.full(len(stage), stage.block_count / where.plan.message_blocks),
            )
            for stage, connections in zip(stages, where.transfers, strict=True)
        )
        connection, which = np.unique(
            np.concatenate([load.connection for load in loads]), return_inverse=True
        )
        share = np.bincount(which, np.concatenate([load.share for load in loads]))
        together = _Load(connection, share.astype(np.float64))
        are_apart = len(which) == len(connection)
        step = _Step(stages[0].rounds, together, (together,) if are_apart else loads)
        if last is not None and step.continues(last):
            last = replace(last, times=last.times + step.times)
            continue
        if last is not None:
            yield last
        last = step
    if last is not None:
        yield last


def _cost(where: Placed, links: _Links, step: _Step) -> RoundsCost:
    latency_s = where.routes.latency_s[step.load.connection]
    kind, bound = links.busiest(_on_links(where, links, step.load))
    paces = [Pace((float(step.times),), *bound, float(latency_s.max()))]
    if step.times > 1:
        # The pace of a block on its way around: over the slowest link of every transfer in turn.
        slowest = np.concatenate([_slowest(where, links, load) for load in step.beside])
        around_s = np.concatenate([where.routes.latency_s[load.connection] for load in step.beside])
        kinds, of_kind = np.unique(slowest, axis=0, return_inverse=True)
        weight = step.times * np.bincount(of_kind.reshape(-1)) / len(slowest)
        paces.append(
            Pace(
                tuple(weight.tolist()),
                tuple(kinds[:, 0].tolist()),
                tuple(kinds[:, 1].tolist()),
                step.times * float(around_s.mean()),
            )
        )
    return RoundsCost(tuple(paces), kind)


def _on_links(where: Placed, links: _Links, load: _Load) -> Floats:
    link, which = _crossed(where, load.connection)
    return np.bincount(link, load.share[which], len(links.own)).astype(np.float64)


def _slowest(where: Placed, links: _Links, load: _Load) -> Floats:
    """Return the time on the fullest link of each connection: its own, and at the NICs' rate."""
    link, which = _crossed(where, load.connection)
    carried = _on_links(where, links, load)
    slowest = np.zeros((len(load.connection), 2))
    for column, per_byte in enumerate((links.own, links.of_nics)):
        np.maximum.at(slowest[:, column], which, (carried * per_byte)[link])
    return slowest


def _crossed(where: Placed, connection: Ints) -> tuple[Ints, Ints]:
    """Return the links that connections use, and which of the connections uses each."""
    begin = where.routes.begin
    length = begin[connection + 1] - begin[connection]
    which = np.repeat(np.arange(len(connection)), length)
    first = np.cumsum(length) - length
    return where.routes.link[np.arange(len(which)) + (begin[connection] - first)[which]], which


def _at_full_utilization(where: Placed, links: _Links, known: LinkCost) -> LinkCost:
    """Add up the busiest link's whole load, the latencies in a row, and the additions.

    The additions are those of the rank that adds most, where chunks follow each other closely.
    """
    plan = where.plan
    load = where.blocks_over_links(len(links.own)) / plan.message_blocks
    in_a_row_s = [
        sum(
            stage.rounds * float(where.routes.latency_s[connection].max())
            for stage, connection in zip(part, connections, strict=True)
        )
        for part, connections in zip(plan.stages, where.transfers, strict=True)
    ]
    kind, bound = links.busiest(load)
    counts: dict[float, Ints] = {}
    for part in plan.stages:
        for stage in part:
            if stage.reduces:
                count = counts.setdefault(
                    stage.block_count / plan.message_blocks, np.zeros(plan.seats, np.int64)
                )
                np.add.at(count, stage.target, stage.rounds)
    return replace(
        known,
        rounds=(RoundsCost((Pace((1.0,), *bound, max(in_a_row_s)),), kind),),
        adds=tuple((int(count.max()), share) for share, count in counts.items()),
    )
