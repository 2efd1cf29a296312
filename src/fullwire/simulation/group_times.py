"""The time of a collective among some ranks of a parallel plan, on a described cluster.

Ranks are numbered as Megatron numbers them, so the members of a group are `stride` ranks apart. The
stride decides the links that the group uses. Groups of the same kind work at the same time, so they
share the NICs of a node. `as_seen` describes this view as a cluster of its own. The collective
library's protocols then give the time (`collectives.library`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from fullwire.clusters.cluster import Cluster, Floats, Ints, LeafSpine, OneSwitch
from fullwire.collectives.library import FIRST_IN_PAIRS, beside_protocols, needs, usual, ways_s


def as_seen(cluster: Cluster, ranks: int, stride: int) -> Cluster:
    """Return the cluster as a group sees it while all groups of its kind are at work."""
    in_node = cluster.devices_per_node
    here = max(1, min(ranks, in_node // stride)) if stride <= in_node else 1
    # A group that ends within a node takes the greatest part that divides it evenly.
    while ranks % here:
        here -= 1
    nodes = -(-ranks // here)
    node_bps = cluster.nics_per_node * cluster.slowest_nic_bps
    network = cluster.network
    if isinstance(network, LeafSpine):
        nodes_apart = max(1, stride // in_node)
        per_leaf, per_pod = max(1, network.nodes_per_leaf // nodes_apart), network.leaves_per_pod
        if per_pod is not None:
            in_pod = network.nodes_per_leaf * per_pod // nodes_apart
            per_pod = max(1, in_pod // per_leaf)
        network = replace(network, nodes_per_leaf=per_leaf, leaves_per_pod=per_pod)
    else:
        network = OneSwitch()
    return replace(
        cluster,
        nodes=nodes,
        devices_per_node=here,
        inside=cluster.inside,
        nics=replace(
            cluster.nics, per_node=1, of_device=(), rate_bps=node_bps * here / max(in_node, 1)
        ),
        network=network,
        other_hosts=(),
    )


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
        _, times_s = ways_s(measured, needs(op, seen, ranks), flat)
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

        All stages send at the same time. Of a node, a leaf or a pod, the last `stride` ranks send
        to the next one, and share its NICs or uplinks. Receivers are the first. No more ranks send
        than there are receivers beyond the first leaf or pod, where the last stage ends. For each
        size the library takes its quickest protocol.
        """
        cluster, inside = self.cluster, self.cluster.inside
        protocols = (cluster.measured or usual(cluster)).protocols[FIRST_IN_PAIRS:]
        in_node, nic = cluster.devices_per_node, cluster.nic_of_device
        counts, which = np.unique(np.minimum(stride, in_node), return_inverse=True)
        sharing = np.array(
            [max(np.bincount(nic[-one:]).max(), np.bincount(nic[:one]).max()) for one in counts]
        )[which]
        share_bps = cluster.slowest_nic_bps / sharing
        latency_s = cluster.nics.latency_s

        def between_s() -> Floats:
            each_s = [
                latency_s
                + each.between_hop_s / 2
                + 8 * sizes_bytes / (share_bps * each.between_share)
                for each in protocols
            ]
            return np.asarray(np.min(each_s, axis=0))

        # The ways that a hop may go: each further one crosses what the one before crosses, and
        # more. Of the pipelines side by side, the last one crosses most often.
        ways_s, widths = [between_s()], [in_node]
        network = cluster.network
        for nodes, uplink_bps in cluster.uplinks:
            assert isinstance(network, LeafSpine)
            below = nodes * in_node
            receivers = np.maximum(stages * stride - below, 1)
            senders = np.minimum(np.minimum(stride, below), receivers)
            if network.by_rail:  # the uplinks of a leaf carry what one NIC of each node sends
                senders = sharing * np.maximum(1, senders / in_node)
            share_bps = np.minimum(share_bps, uplink_bps / senders)
            latency_s += network.latency_s
            ways_s.append(between_s())
            widths.append(nodes * in_node)
        inside_s = ways_s[0]
        if inside is not None:
            moved_s = 8 * sizes_bytes / (inside.rate_bps * protocols[-1].inside_share)
            inside_s = np.asarray(inside.latency_s + moved_s)
        left = stages - 1
        slowest_s = all_s = np.zeros(len(stages))
        for way_s, width in zip(reversed(ways_s), reversed(widths), strict=True):
            crossing = np.minimum(stages - 1, (stages * stride - 1) // width)
            here = crossing - (stages - 1 - left)
            slowest_s = np.where(here > 0, np.maximum(slowest_s, way_s), slowest_s)
            all_s, left = all_s + here * way_s, left - here
        slowest_s = np.where(left > 0, np.maximum(slowest_s, inside_s), slowest_s)
        return Hops(slowest_s, all_s + left * inside_s)
