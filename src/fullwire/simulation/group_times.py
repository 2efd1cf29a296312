"""The time of a collective among some ranks of a parallel plan, on a described cluster.

Ranks are numbered as Megatron numbers them, so the members of a group are `stride` ranks apart. The
stride decides the links that the group uses. Groups of the same kind work at the same time, so they
share the NICs of a node. `as_seen` describes this view as a cluster of its own. The collective
library's protocols then give the time (`collectives.library`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fullwire.clusters.cluster import Cluster, Floats, Ints, LeafSpine, OneSwitch
from fullwire.clusters.measured import Protocol
from fullwire.collectives.library import FIRST_IN_PAIRS, beside_protocols, needs, ways_s
from fullwire.collectives.usual import usual


def as_seen(cluster: Cluster, ranks: int, stride: int) -> Cluster:
    """Return the cluster as a group sees it while all groups of its kind are at work."""
    in_node = cluster.devices_per_node
    here = max(1, min(ranks, in_node // stride)) if stride <= in_node else 1
    if not _are_even(ranks, stride, in_node):  # a group may end in the node after that it begins in
        here = min(here, _crossing(cluster, ranks, stride, 1)[0])
    # A group that ends within a node takes the greatest part that divides it evenly.
    while ranks % here:
        here -= 1
    nodes = -(-ranks // here)
    node_bps = cluster.nics_per_node * cluster.slowest_nic_bps
    is_below_spine = isinstance(cluster.network, LeafSpine)
    return replace(
        cluster,
        nodes=nodes,
        devices_per_node=here,
        inside=cluster.inside,
        nics=replace(
            cluster.nics, per_node=1, of_device=(), rate_bps=node_bps * here / max(in_node, 1)
        ),
        network=_leaves_seen(cluster, ranks, stride, here) if is_below_spine else OneSwitch(),
        other_hosts=(),
    )


def _leaves_seen(cluster: Cluster, ranks: int, stride: int, here: int) -> LeafSpine:
    """Return leaves and pods as a group sees them, with its share of their uplinks.

    Where groups begin and end amidst a leaf or a pod, neighbours in it send over its uplinks, too.
    Then the uplinks that most groups share decide.
    """
    network, in_node = cluster.network, cluster.devices_per_node
    assert isinstance(network, LeafSpine)
    per_leaf, per_pod = network.nodes_per_leaf, network.leaves_per_pod
    in_pod = per_leaf * (per_pod or 1)
    if all(_are_even(ranks, stride, nodes * in_node) for nodes in (per_leaf, in_pod)):
        nodes_apart = max(1, stride // in_node)
        seen_per_leaf = max(1, per_leaf // nodes_apart)
        if per_pod is not None:
            per_pod = max(1, in_pod // nodes_apart // seen_per_leaf)
        return replace(network, nodes_per_leaf=seen_per_leaf, leaves_per_pod=per_pod)
    below, groups = _crossing(cluster, ranks, stride, per_leaf)
    seen_per_leaf = max(1, below // here)
    # The uplinks' rate over that of all ports below them, as the group sees both.
    share = seen_per_leaf * here * groups / (per_leaf * in_node)
    seen = replace(
        network,
        nodes_per_leaf=seen_per_leaf,
        oversubscription=network.oversubscription * share,
    )
    if per_pod is None:
        return seen
    below, groups = _crossing(cluster, ranks, stride, in_pod)
    seen_per_pod = max(1, -(-(below // here) // seen_per_leaf))
    share_of_core = seen_per_pod * seen_per_leaf * here * groups / (in_pod * in_node)
    return replace(
        seen,
        leaves_per_pod=seen_per_pod,
        core_oversubscription=network.core_oversubscription * share_of_core / share,
    )


def _are_even(ranks: int, stride: int, below: int) -> bool:
    """Say whether all groups lie alike on switches that have so many ranks below them."""
    return all(size % below == 0 or below % size == 0 for size in (stride, stride * ranks))


def _crossing(cluster: Cluster, ranks: int, stride: int, nodes: int) -> tuple[int, int]:
    """Return what a switch above so many nodes has to carry.

    These are the most ranks of one group below it where others of the group are not, and the most
    such groups. Where each group is below one switch, these are its ranks, and one group.
    """
    below = nodes * cluster.devices_per_node
    alike = math.gcd(stride, below)  # ranks in a row, each of another group with the same members
    row, apart = np.arange(cluster.devices // alike), stride // alike
    block, within = np.divmod(row, ranks * apart)
    group, switch = block * apart + within % apart, row * alike // below
    switches = -(-cluster.devices // below)
    is_whole = np.bincount(group)[group] == ranks
    pairs, members = np.unique((group * switches + switch)[is_whole], return_counts=True)
    crosses = members < ranks
    if not crosses.any():
        return ranks, 1
    groups = np.bincount(pairs[crosses] % switches)
    return int(members[crosses].max()), int(groups.max()) * alike


@dataclass(frozen=True, eq=False, slots=True)
class Hops:
    """Transfers between the stages of each pipeline: the slowest one, and all in a row."""

    slowest_s: Floats
    all_s: Floats


_APART = 2**24  # above any stride


@dataclass(frozen=True)
class GroupTimes:
    """Times of collectives on one cluster; each group is described once."""

    cluster: Cluster
    _known: dict[tuple[str, int, int], Cluster] = field(default_factory=dict)

    def collective_s(self, op: str, ranks: int, stride: int, sizes_bytes: Floats) -> Floats:
        """Time messages of these sizes; the library takes its quickest way for each."""
        sizes = np.asarray(sizes_bytes, np.float64)
        if ranks == 1 or sizes.size == 0:
            return np.zeros_like(sizes)
        key = (op, ranks, stride)
        if key not in self._known:
            self._known[key] = as_seen(self.cluster, ranks, stride)
        seen = self._known[key]
        measured = self.cluster.measured or usual(self.cluster)
        flat = np.maximum(sizes.ravel(), 1.0)
        _, times_s = ways_s(measured, needs(op, seen, ranks, measured), flat)
        found: Floats = times_s.min(axis=0)
        if measured.shown:
            found = found * beside_protocols(measured, op, seen, ranks, flat, self.cluster)
        return found.reshape(sizes.shape)

    def each_s(self, op: str, ranks: Ints, stride: Ints, sizes_bytes: Floats) -> Floats:
        """Time one message of each row; rows of one group are timed together."""
        kinds = np.asarray(ranks).astype(np.int64) * _APART + np.asarray(stride).astype(np.int64)
        order = np.argsort(kinds, kind="stable")
        starts = np.flatnonzero(np.diff(kinds[order], prepend=-1))
        total = np.zeros(len(kinds))
        for rows in np.split(order, starts[1:]):
            members, apart = divmod(int(kinds[rows[0]]), _APART)
            total[rows] = self.collective_s(op, members, apart, sizes_bytes[rows])
        return total

    def hops(self, stages: Ints, stride: Ints, sizes_bytes: Floats) -> Hops:
        """Time transfers between pipeline stages, whose ranks are `stride` ranks apart.

        All stages send at the same time. For each size the library takes its quickest protocol.
        """
        protocols = (self.cluster.measured or usual(self.cluster)).protocols[FIRST_IN_PAIRS:]
        pairs = np.stack([np.asarray(stages), np.asarray(stride)]).astype(np.int64)
        found, which = np.unique(pairs, axis=1, return_inverse=True)
        slowest_s, all_s = np.zeros(pairs.shape[1]), np.zeros(pairs.shape[1])
        for number, (count, apart) in enumerate(found.T):
            if count == 1:
                continue
            rows = np.flatnonzero(which.ravel() == number)
            ways = self._ways(int(count), int(apart))
            times_s = np.min([ways.times_s(each, sizes_bytes[rows]) for each in protocols], axis=0)
            slowest_s[rows] = times_s.max(axis=0)
            all_s[rows] = (ways.of_pipelines @ times_s).max(axis=0)
        return Hops(slowest_s, all_s)

    def _ways(self, stages: int, stride: int) -> _Ways:
        """Return the ways from each rank to that of the next stage, each with its share of links.

        With rails, a transfer leaves through the NIC of its target's rail.
        """
        cluster, in_node, nic = (
            self.cluster,
            self.cluster.devices_per_node,
            self.cluster.nic_of_device,
        )
        source = np.arange((stages - 1) * stride)
        target = source + stride
        by_rail = isinstance(cluster.network, LeafSpine) and cluster.network.by_rail
        lane = nic[target % in_node]
        leaves_by = lane if by_rail else nic[source % in_node]
        is_between = source // in_node != target // in_node
        share_bps = cluster.slowest_nic_bps / _sharing(
            (source // in_node, target // in_node), (leaves_by, lane), is_between
        )
        uplinks = np.zeros(len(source))
        for nodes, uplink_bps in cluster.uplinks:
            ends = source // (nodes * in_node), target // (nodes * in_node)
            crosses = ends[0] != ends[1]
            lanes = (lane, lane) if by_rail else (0 * lane, 0 * lane)
            those_bps = uplink_bps / _sharing(ends, lanes, crosses)
            share_bps = np.where(crosses, np.minimum(share_bps, those_bps), share_bps)
            uplinks += crosses
        inside, network = cluster.inside, cluster.network
        is_inside = ~is_between & (inside is not None)
        latency_s = cluster.nics.latency_s + uplinks * getattr(network, "latency_s", 0.0)
        if inside is not None:
            share_bps = np.where(is_inside, inside.rate_bps, share_bps)
            latency_s = np.where(is_inside, inside.latency_s, latency_s)
        kinds, which = np.unique(
            np.stack([is_inside, latency_s, share_bps]), axis=1, return_inverse=True
        )
        counts = np.zeros((stride, kinds.shape[1]))
        np.add.at(counts, (source % stride, which.ravel()), 1.0)
        return _Ways(kinds[0] > 0, kinds[1], kinds[2], np.unique(counts, axis=0))


@dataclass(frozen=True, eq=False, slots=True)
class _Ways:
    """The unlike ways of transfers between stages, and how many of each a pipeline has."""

    is_inside: NDArray[np.bool_]  # a node
    latency_s: Floats
    share_bps: Floats  # of the narrowest link
    of_pipelines: Floats  # a row for each unlike pipeline, a column for each way

    def times_s(self, protocol: Protocol, sizes_bytes: Floats) -> Floats:
        """Return the time of each way (rows) for each size."""
        fills = np.where(self.is_inside, protocol.inside_share, protocol.between_share)
        fixed_s = self.latency_s + np.where(self.is_inside, 0.0, protocol.between_hop_s / 2)
        return np.asarray(fixed_s[:, None] + 8 * sizes_bytes / (self.share_bps * fills)[:, None])


def _sharing(
    ends: tuple[Ints, Ints], lanes: tuple[Ints, Ints], crosses: NDArray[np.bool_]
) -> Floats:
    """Return how many transfers share the busier end of each: those that cross count."""
    most = np.ones(len(crosses))
    for end, lane in zip(ends, lanes, strict=True):
        link = end * (int(lane.max(initial=0)) + 1) + lane
        load = np.bincount(link[crosses], minlength=int(link.max(initial=0)) + 1)
        most = np.maximum(most, load[link])
    return most
