"""Messages on a described cluster: the times of its links, for whole axes of a grid at once.

Costs are closed forms. Where ranks drift apart, as with a slow host, these may be off by a third.
There messages of some sizes are played, and the closed form is scaled to their times.

On a fitted cluster the tables say how long its library takes, by the quickest of its protocols for
each size. The links alone would give one start-up and one filled share for all sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from fullwire.clusters.cluster import Cluster, scattered, with_workers
from fullwire.collectives.closed_form import recorded_as
from fullwire.collectives.cost import AddTimes, Cost, Floats
from fullwire.collectives.library import FITTED_OPS, by_protocols, has_tables, library_times_s
from fullwire.collectives.link_cost import LinkCost, collective_cost
from fullwire.collectives.placed import placed
from fullwire.collectives.plan import plan_on
from fullwire.collectives.playing import played_times_s
from fullwire.collectives.registry import usual_algorithm
from fullwire.collectives.tuning import LIBRARY
from fullwire.compression.compressor import Combining

_PLAYED_BYTES = [2**power for power in range(10, 33)]
_FASTEST_BPS = 1e24  # of links that take no time beside those inside nodes
_MOST_PLAYED = 30_000  # transfers for each size
_MOST_PLAYED_IN_CHUNKS = 10_000  # More of them go on at once, so that each takes longer.


@dataclass(frozen=True, slots=True)
class LibraryCost(LinkCost):
    """The time of a fitted cluster's library, at any rate of the NICs.

    Its bytes and hops are those of an algorithm on links. The tables hold its additions.
    """

    op: str = ""
    cluster: Cluster | None = None
    workers: int = 1
    way: str | None = None  # of the library; None takes the quickest for each size

    def time_s(self, size_bytes: ArrayLike, per_bit: ArrayLike) -> Floats:
        """Return the time for messages of these sizes, at so many seconds a bit."""
        assert self.cluster is not None
        size, bits_s = np.broadcast_arrays(
            np.maximum(size_bytes, 1.0), np.asarray(per_bit, np.float64)
        )
        total = np.empty(size.shape)
        for bit_s in np.unique(bits_s).tolist():
            here = bits_s == bit_s
            # A target asks what a line without end would give, with no time for a bit.
            nics = replace(self.cluster.nics, rate_bps=1 / max(bit_s, 1 / _FASTEST_BPS))
            at_rate = replace(self.cluster, nics=nics)
            times_s = library_times_s(self.op, at_rate, self.workers, size[here])
            ways = times_s if self.way is None else {self.way: times_s[self.way]}
            total[here] = np.min([*ways.values()], axis=0)
        return total


@dataclass(frozen=True, slots=True)
class QuickestCost(LinkCost):
    """The time of an algorithm on links by the quickest protocol of a fitted cluster's library.

    Its bytes and hops are those of each protocol.
    """

    by_protocol: tuple[LinkCost, ...] = ()

    def time_s(self, size_bytes: ArrayLike, per_bit: ArrayLike) -> Floats:
        """Return the time for messages of these sizes, at so many seconds a bit."""
        return np.asarray(
            np.min([cost.time_s(size_bytes, per_bit) for cost in self.by_protocol], axis=0)
        )


@dataclass(frozen=True, eq=False, slots=True)
class Routed:
    """A collective on a cluster, of so many bytes for each byte of a message."""

    cost: LinkCost
    times: float = 1.0
    gathered_by: int = 0  # workers that each add up all messages on arrival

    def as_cost(self, size_bytes: ArrayLike, adds: AddTimes) -> Cost:
        """Return the part that does not depend on the links: a rank's bytes, and its additions."""
        size = np.multiply(size_bytes, self.times)
        added_s = self.cost.add_s(size, adds)
        if self.gathered_by:
            added_s = (self.gathered_by - 1) * adds(size_bytes)
        return Cost(self.cost.sent_per_byte * size, self.cost.hops, added_s)

    @property
    def network_bits_per_byte(self) -> float:
        """Return the load of the network's busiest link for each byte of a message."""
        return self.times * self.cost.network_bits_per_byte


def routed_s(routed: Sequence[Sequence[Routed]], size: Floats, per_bit: Floats) -> Floats:
    """Return the times of messages: cluster sizes on the last axis but two, compressors last."""
    shape = np.broadcast_shapes(size.shape, per_bit.shape, (len(routed), 1, 1))
    size, per_bit = np.broadcast_to(size, shape), np.broadcast_to(per_bit, shape)
    time_s = np.empty(shape)
    for row, of_compressors in enumerate(routed):
        for kind in {id(kind): kind for kind in of_compressors}.values():  # usually one for all
            columns = [number for number, other in enumerate(of_compressors) if other is kind]
            every = slice(None)
            here = (..., row, every, every if len(of_compressors) == 1 else columns)
            time_s[here] = kind.cost.time_s(kind.times * size[here], per_bit[here])
    return time_s


def believed_cost(
    op: str, algorithm: str, cluster: Cluster, workers: int, order: Sequence[int] | None = None
) -> LinkCost:
    """Return the cost of a collective: a closed form, scaled to events where it is not near."""
    cost = collective_cost(op, algorithm, cluster, workers=workers, order=order)
    if cost.is_near:
        return cost
    size = np.array(_PLAYED_BYTES, np.float64)
    where = placed(plan_on(op, algorithm, cluster, workers), cluster, order)
    played_s = played_times_s(where, cluster, _PLAYED_BYTES, _MOST_PLAYED)
    if played_s is None:
        return cost
    wire_s, said_s = 8 * size / cluster.nics.rate_bps, cost.whole_s(size) - cost.startup_s
    return replace(
        cost, played=tuple(zip(wire_s.tolist(), (played_s / said_s).tolist(), strict=True))
    )


def chunked_s(
    op: str, algorithm: str, cluster: Cluster, workers: int, sizes: Sequence[int], chunks: int
) -> Floats | None:
    """Play a collective in so many chunks for some sizes; None if that would take long."""
    where = placed(plan_on(op, algorithm, cluster, workers), cluster)
    played_s = played_times_s(where, cluster, sizes, _MOST_PLAYED_IN_CHUNKS, chunks)
    return None if played_s is None else cluster.startup_s + played_s


@lru_cache(maxsize=4096)
def _believed_cost(
    op: str, algorithm: str, cluster: Cluster, workers: int, is_scattered: bool
) -> LinkCost:
    if workers == 1:
        return LinkCost(is_exact=True)
    order = scattered(cluster)[:workers].tolist() if is_scattered else None
    return believed_cost(op, algorithm, cluster, workers, order)


@dataclass(frozen=True, slots=True)
class OnLinks:
    """Where the ranks of a grid are, if it is more than workers around a switch."""

    cluster: Cluster
    is_scattered: bool

    @staticmethod
    def of(cluster: Cluster | None, latency_s: float, *, is_scattered: bool) -> OnLinks | None:
        """Take a cluster with this latency of its NICs; None where it is workers and a switch.

        A hop between the nodes of a fitted cluster takes longer by what the latency is longer.
        """
        if cluster is None or cluster.is_flat:
            return None
        longer_s, measured = latency_s - cluster.nics.latency_s, cluster.measured
        if measured is not None and longer_s:
            hops = [max(each.between_hop_s + longer_s, 0.0) for each in measured.protocols]
            protocols = tuple(
                replace(each, between_hop_s=hop_s)
                for each, hop_s in zip(measured.protocols, hops, strict=True)
            )
            cluster = replace(cluster, measured=replace(measured, protocols=protocols))
        nics = replace(cluster.nics, latency_s=latency_s)
        return OnLinks(replace(cluster, nics=nics), is_scattered)

    def cost(self, op: str, algorithm: str, workers: int) -> LinkCost:
        """Return the cost of a collective among so many workers.

        On a fitted cluster an algorithm of its library takes as long as the tables say, and another
        one is sent by the quickest of its protocols.
        """
        if algorithm == LIBRARY:
            return self._of_library(op, usual_algorithm(op, self.cluster), workers)
        cluster = with_workers(self.cluster, workers)
        by_protocol = tuple(
            _believed_cost(op, algorithm, each, workers, self.is_scattered)
            for each in by_protocols(cluster, op)
        )
        cost = by_protocol[-1]
        if len(by_protocol) > 1:
            known = {column.name: getattr(cost, column.name) for column in fields(LinkCost)}
            cost = QuickestCost(**known, by_protocol=by_protocol)
        if not self._has_tables(op, workers):
            return cost
        ways = library_times_s(op, cluster, workers, np.ones(1))
        return _by_library(cost, op, cluster, workers, algorithm) if algorithm in ways else cost

    def recorded(self, op: str, workers: int) -> LinkCost:
        """Return the cost of a run's collective; no run records its algorithm.

        The library of a fitted cluster takes its quickest way.
        """
        known_op, algorithm = recorded_as(op)
        return self._of_library(op, algorithm, workers, known_op)

    def _of_library(
        self, op: str, algorithm: str, workers: int, known_op: str | None = None
    ) -> LinkCost:
        """Return the cost by the library's quickest way; by this algorithm where it has no tables.

        Bytes and hops are those of the algorithm.
        """
        cost = self.cost(known_op or op, algorithm, workers)
        if not self._has_tables(op, workers):
            return cost
        return _by_library(cost, op, with_workers(self.cluster, workers), workers, None)

    def gradients(self, combining: Combining, algorithm: str, workers: int) -> Routed:
        """Return the cost of a message of gradients, combined as `gradient_cost` does."""
        if combining != "gather":  # An exchange sends the same bytes, over the same links.
            return Routed(self.cost("allreduce", algorithm, workers))
        return Routed(self.recorded("allgather", workers), workers, gathered_by=workers)

    def _has_tables(self, op: str, workers: int) -> bool:
        """Say whether tables of the cluster give a collective's time; they are of packed ranks."""
        is_fitted = has_tables(self.cluster, is_scattered=self.is_scattered)
        return is_fitted and op in FITTED_OPS and workers > 1


def _by_library(
    cost: LinkCost, op: str, cluster: Cluster, workers: int, way: str | None
) -> LibraryCost:
    """Return the time that a library takes, with the bytes and hops of this cost."""
    return LibraryCost(
        rounds=cost.rounds,
        hops=cost.hops,
        sent_per_byte=cost.sent_per_byte,
        nic_rate_bps=cost.nic_rate_bps,
        op=op,
        cluster=cluster,
        workers=workers,
        way=way,
    )
