"""Which links a transfer between two devices uses, and how long the way is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fullwire.clusters.cluster import Cluster, Floats, Ints, LeafSpine, Mask, Torus
from fullwire.errors import UsageError


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """The links of many transfers, in order: transfer i uses link[begin[i] : begin[i + 1]]."""

    begin: Ints
    link: NDArray[np.int32]
    latency_s: Floats

    def __len__(self) -> int:
        return len(self.latency_s)


def routes(cluster: Cluster, source_devices: ArrayLike, target_devices: ArrayLike) -> Routes:
    """Return the links that transfers between these pairs of devices use."""
    source, target = _checked(cluster, source_devices), _checked(cluster, target_devices)
    if source.shape != target.shape:
        raise UsageError(
            f"routes: expected as many targets as sources, got {source.size} and {target.size}"
        )
    return (_torus_routes if cluster.is_torus else _switched_routes)(cluster, source, target)


def _checked(cluster: Cluster, devices: ArrayLike) -> Ints:
    numbers = np.atleast_1d(np.asarray(devices, np.int64))
    outside = numbers.size and not 0 <= numbers.min() <= numbers.max() < cluster.devices
    if numbers.ndim != 1 or outside:
        raise UsageError(f"routes: expected devices from 0 to {cluster.devices - 1}")
    return numbers


def _switched_routes(cluster: Cluster, source: Ints, target: Ints) -> Routes:
    blocks, inside, nics = cluster.link_blocks, cluster.inside, cluster.nics_per_node
    from_node, source_place = np.divmod(source, cluster.devices_per_node)
    to_node, target_place = np.divmod(target, cluster.devices_per_node)
    own_nic, in_nic = cluster.nic_of_device[source_place], cluster.nic_of_device[target_place]
    is_by_rail = isinstance(cluster.network, LeafSpine) and cluster.network.by_rail
    out_nic = in_nic if is_by_rail else own_nic
    leaves = from_node != to_node
    stays = ~leaves & (source != target)
    hands_over = leaves & (out_nic != own_nic)
    crosses, up, down = _through_spine(cluster, from_node, to_node, out_nic, in_nic)
    climbs, pod_up, pod_down = _through_core(cluster, up, down)
    columns = [
        (leaves, blocks[2] + from_node * nics + out_nic),
        (crosses, blocks[4] + up),
        (climbs, blocks[6] + pod_up),
        (climbs, blocks[7] + pod_down),
        (crosses, blocks[5] + down),
        (leaves, blocks[3] + to_node * nics + in_nic),
    ]
    latency_s = np.where(leaves, cluster.nics.latency_s, 0.0)
    if isinstance(cluster.network, LeafSpine):
        latency_s += (crosses + climbs.astype(np.int64)) * cluster.network.latency_s
    if inside is not None:
        over_lanes = leaves & (inside.kind == "pcie")
        at_relay = hands_over & (inside.kind == "switch")
        # Of each NIC of a node the first device that uses it; 0 where none does.
        first_device = np.zeros(nics, np.int64)
        used, places = np.unique(cluster.nic_of_device, return_index=True)
        first_device[used] = places
        relay = from_node * cluster.devices_per_node + first_device[out_nic]
        columns = [
            (stays | over_lanes | at_relay, blocks[0] + source),
            (at_relay, blocks[1] + relay),
            *columns,
            (stays | over_lanes, blocks[1] + target),
        ]
        latency_s += (stays | hands_over) * inside.latency_s
    return _joined(columns, latency_s)


def _through_spine(
    cluster: Cluster, from_node: Ints, to_node: Ints, out_nic: Ints, in_nic: Ints
) -> tuple[Mask, Ints, Ints]:
    """Say which transfers leave their leaf, and over which leaves' uplinks."""
    network = cluster.network
    if not cluster.leaves or not isinstance(network, LeafSpine):
        return np.zeros(from_node.shape, bool), np.zeros_like(from_node), np.zeros_like(from_node)
    up, down = from_node // network.nodes_per_leaf, to_node // network.nodes_per_leaf
    if network.by_rail:
        up, down = up * cluster.nics_per_node + out_nic, down * cluster.nics_per_node + in_nic
    return up != down, up, down


def _through_core(cluster: Cluster, up: Ints, down: Ints) -> tuple[Mask, Ints, Ints]:
    """Say which transfers leave their pod, and over which pods' uplinks."""
    network = cluster.network
    if not cluster.pods or not isinstance(network, LeafSpine):
        return np.zeros(up.shape, bool), np.zeros_like(up), np.zeros_like(down)
    assert network.leaves_per_pod is not None
    rails = cluster.nics_per_node if network.by_rail else 1
    pod_up, pod_down = (
        leaf // rails // network.leaves_per_pod * rails + leaf % rails for leaf in (up, down)
    )
    return pod_up != pod_down, pod_up, pod_down


def _joined(columns: Sequence[tuple[Mask, Ints]], latency_s: Floats) -> Routes:
    """Write the links of each transfer one after the other, those that it uses."""
    used = np.stack([mask for mask, _ in columns], axis=1)
    links = np.stack([link.astype(np.int32) for _, link in columns], axis=1)
    begin = np.zeros(len(latency_s) + 1, np.int64)
    np.cumsum(used.sum(axis=1), out=begin[1:])
    return Routes(begin=begin, link=links[used], latency_s=latency_s)


def _torus_routes(cluster: Cluster, source: Ints, target: Ints) -> Routes:
    network, inside, blocks = cluster.network, cluster.inside, cluster.link_blocks
    assert isinstance(network, Torus)
    from_node, to_node = source // cluster.devices_per_node, target // cluster.devices_per_node
    from_row, from_column = np.divmod(from_node, network.columns)
    to_row, to_column = np.divmod(to_node, network.columns)
    east, steps_x = _shorter_way(to_column - from_column, network.columns)
    south, steps_y = _shorter_way(to_row - from_row, network.rows)
    leaves = from_node != to_node
    stays = ~leaves & (source != target)
    lanes = np.zeros(len(source), np.int64)
    if inside is not None:
        lanes += stays | (leaves & (inside.kind == "pcie"))
    counts = np.stack([lanes, steps_x, steps_y, lanes], axis=1)
    begin = np.zeros(len(source) + 1, np.int64)
    np.cumsum(counts.sum(axis=1), out=begin[1:])
    part_begin = (begin[:-1, None] + np.cumsum(counts, axis=1) - counts).T
    link = np.empty(begin[-1], np.int32)

    def along(part: int, first: Ints, step: Ints, around: int) -> tuple[Ints, Ints, Ints]:
        """Return where a part's links stand, of which transfer, and at which place of the ring."""
        which = np.repeat(np.arange(len(source)), counts[:, part])
        hop = np.arange(len(which)) - np.repeat(
            np.cumsum(counts[:, part]) - counts[:, part], counts[:, part]
        )
        return part_begin[part][which] + hop, which, (first[which] + hop * step[which]) % around

    where, which, column = along(1, from_column, np.where(east, 1, -1), network.columns)
    node = from_row[which] * network.columns + column
    link[where] = blocks[2] + 4 * node + np.where(east[which], 0, 1)
    where, which, row = along(2, from_row, np.where(south, 1, -1), network.rows)
    node = row * network.columns + to_column[which]
    link[where] = blocks[2] + 4 * node + np.where(south[which], 2, 3)
    uses = lanes > 0
    link[part_begin[0][uses]] = blocks[0] + source[uses]
    link[part_begin[3][uses]] = blocks[1] + target[uses]
    latency_s = np.multiply(steps_x + steps_y, cluster.nics.latency_s, dtype=np.float64)
    if inside is not None:
        latency_s += stays * inside.latency_s
    return Routes(begin=begin, link=link, latency_s=latency_s)


def _shorter_way(difference: Ints, around: int) -> tuple[Mask, Ints]:
    """Return whether to go forwards around a ring, as where both ways are equal, and how far."""
    forwards = difference % around
    is_forwards = 2 * forwards <= around
    return is_forwards, np.where(is_forwards, forwards, around - forwards)
