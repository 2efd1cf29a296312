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
from fullwire.collectives.library import beside_protocols, needs, usual, ways_s


def as_seen(cluster: Cluster, ranks: int, stride: int) -> Cluster:
    """Return the cluster as a group sees it while all groups of its kind are at work."""
    in_node = cluster.devices_per_node
    here = max(1, min(ranks, in_node // stride)) if stride <= in_node else 1
    # A group that ends within a node takes the greatest part that divides it evenly.
    while ranks % here:
        here -= 1
    nodes = -(-ranks // here)
    node_bps = cluster.nics_per_node * min(
        [cluster.nics.rate_bps, *(host.nic_rate_bps for host in cluster.other_hosts)]
    )
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
            found = found * beside_protocols(measured, op, seen, ranks, list(flat))
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

    def hop_s(self, stages: Ints, stride: Ints, sizes_bytes: Floats) -> Floats:
        """Time a transfer between pipeline stages, whose ranks are `stride` ranks apart.

        All stages send at the same time, so the slowest of the hops counts.
        """
        cluster = self.cluster
        protocol = (cluster.measured or usual(cluster)).protocols[-1]
        share_bps, more_s = _crossing(cluster, stages * stride, stride)
        latency_s = cluster.nics.latency_s + protocol.between_hop_s / 2 + more_s
        between_s = latency_s + 8 * sizes_bytes / (share_bps * protocol.between_share)
        inside = cluster.inside
        if inside is None:
            return np.asarray(between_s)
        inside_s = inside.latency_s + 8 * sizes_bytes / (inside.rate_bps * protocol.inside_share)
        some_inside = np.where(stride < cluster.devices_per_node, inside_s, 0.0)
        crosses = stages * stride > cluster.devices_per_node
        return np.where(crosses, np.maximum(between_s, some_inside), inside_s)


def _crossing(cluster: Cluster, ranks: Ints, stride: Ints) -> tuple[Floats, Floats]:
    """Return each rank's share of the links between nodes, and the latency of the way, in a job.

    Each rank sends to the rank that is `stride` ranks further. Of a node, a leaf or a pod, the last
    `stride` ranks cross to the next one, and share its NICs or uplinks. Receivers are the first.
    """
    in_node, nic = cluster.devices_per_node, cluster.nic_of_device
    counts, which = np.unique(np.minimum(stride, in_node), return_inverse=True)
    sharing = np.array(
        [max(np.bincount(nic[-count:]).max(), np.bincount(nic[:count]).max()) for count in counts]
    )[which]
    slowest_bps = min([cluster.nics.rate_bps, *(host.nic_rate_bps for host in cluster.other_hosts)])
    share_bps, latency_s = slowest_bps / sharing, np.zeros(len(sharing))
    network = cluster.network
    if not isinstance(network, LeafSpine):
        return share_bps, latency_s
    for nodes, uplink_bps in cluster.uplinks:
        together = nodes * in_node
        senders = np.minimum(stride, together)
        if network.by_rail:  # the uplinks of a leaf carry what one NIC of each node sends
            senders = sharing * np.maximum(1, senders / in_node)
        crosses = ranks > together
        share_bps = np.where(crosses, np.minimum(share_bps, uplink_bps / senders), share_bps)
        latency_s = latency_s + np.where(crosses, network.latency_s, 0.0)
    return share_bps, latency_s
