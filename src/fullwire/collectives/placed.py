"""A plan on a described cluster: which links each of its transfers uses, and how long the way is.

Rank r is on device `order[r]`. Transfers between the same two seats share one connection. A switch
that adds is somewhere on the way: a rank's transfer to it ends where the rank's NIC meets its leaf.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fullwire.clusters.cluster import SPINE, Cluster, Floats, Ints, LeafSpine, Mask, Torus
from fullwire.collectives.plan import layout_of
from fullwire.collectives.stages import Int32, Plan
from fullwire.errors import UsageError

MOST_CONNECTIONS = 6_000_000


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """The links of many transfers, in order: transfer i uses link[begin[i] : begin[i + 1]]."""

    begin: Ints
    link: NDArray[np.int32]
    latency_s: Floats

    def __len__(self) -> int:
        return len(self.latency_s)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Placed:
    """A plan's connections, and for each part and stage the connection of every transfer."""

    plan: Plan
    source: Int32
    target: Int32
    routes: Routes
    transfers: tuple[tuple[Int32, ...], ...]

    def __len__(self) -> int:
        return len(self.source)

    def blocks_over_links(self, links: int) -> Floats:
        """Count the blocks that each link carries in all."""
        blocks = np.zeros(len(self))
        for stages, transfers in zip(self.plan.stages, self.transfers, strict=True):
            for stage, connection in zip(stages, transfers, strict=True):
                np.add.at(blocks, connection, stage.rounds * stage.block_count)
        crossing = np.repeat(blocks, np.diff(self.routes.begin))
        return np.bincount(self.routes.link, crossing, links).astype(np.float64)


def placed(plan: Plan, cluster: Cluster, order: ArrayLike | None = None) -> Placed:
    """Find the links of every transfer, with ranks on devices in this order."""
    devices = np.arange(plan.workers) if order is None else np.asarray(order, np.int64)
    if order is not None:
        if plan.switches:
            raise UsageError("order: switches add what is cabled to them, in no other order")
        if devices.shape != (plan.workers,) or len(np.unique(devices)) != plan.workers:
            raise UsageError(f"order: expected {plan.workers} different devices, one for each rank")
        if not 0 <= devices.min() <= devices.max() < cluster.devices:
            raise UsageError(f"order: expected devices from 0 to {cluster.devices - 1}")
    if plan.workers > cluster.devices:
        raise UsageError(
            f"workers: {cluster.name} has {cluster.devices:,} devices, got {plan.workers:,} workers"
        )
    stages = [stage for part in plan.stages for stage in part]
    keys = [stage.source.astype(np.int64) * plan.seats + stage.target for stage in stages]
    known, numbers = np.unique(
        np.concatenate(keys) if keys else np.empty(0, np.int64), return_inverse=True
    )
    if len(known) > MOST_CONNECTIONS:
        raise UsageError(
            f"{plan.op} by {plan.algorithm} over {plan.workers:,} workers connects "
            f"{len(known):,} pairs, at most {MOST_CONNECTIONS:,} can be followed over their links"
        )
    source, target = np.divmod(known, plan.seats)
    connections = iter(
        np.split(numbers.astype(np.int32), np.cumsum([len(key) for key in keys])[:-1])
    )
    return Placed(
        plan=plan,
        source=source.astype(np.int32),
        target=target.astype(np.int32),
        routes=(
            _Switches(plan, cluster).routes(source, target)
            if plan.switches
            else routes(cluster, devices[source], devices[target])
        ),
        transfers=tuple(tuple(next(connections) for _ in part) for part in plan.stages),
    )


class _Switches:
    """The places of a plan's switches: leaves, then the spine, each once for every device place."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self._cluster = cluster
        self._workers, self._devices = plan.workers, cluster.devices_per_node
        self._nodes_per_leaf = layout_of(cluster).nodes_per_leaf or cluster.nodes
        self._leaves = -(-plan.workers // (self._nodes_per_leaf * self._devices))

    def routes(self, source: Ints, target: Ints) -> Routes:
        """Return the links between seats, some of which are switches."""
        cluster = self._cluster
        from_device, from_height = self._below(source)
        to_device, to_height = self._below(target)
        height = np.maximum(from_height, to_height)
        climbs = to_height > from_height
        whole = routes(
            cluster,
            np.where((height == 0) | climbs, from_device, self._beyond(to_device)),
            np.where((height == 0) | ~climbs, to_device, self._beyond(from_device)),
        )
        # Of a route past a switch keep the half that leads to it or from it, spine or not.
        length = np.diff(whole.begin)
        which = np.repeat(np.arange(len(whole)), length)
        is_first_half = 2 * (np.arange(len(which)) - whole.begin[which]) < length[which]
        is_half = is_first_half == climbs[which]
        is_spine = cluster.link_kind[whole.link] == SPINE
        taken = (height[which] == 0) | (is_half & (is_spine == (height[which] == 2)))
        begin = np.zeros(len(whole) + 1, np.int64)
        np.cumsum(np.bincount(which[taken], minlength=len(whole)), out=begin[1:])
        spine_s = cluster.network.latency_s if isinstance(cluster.network, LeafSpine) else 0.0
        latency_s = np.choose(height, [whole.latency_s, cluster.nics.latency_s / 2, spine_s / 2])
        return Routes(begin=begin, link=whole.link[taken], latency_s=latency_s)

    def _below(self, seat: Ints) -> tuple[Ints, Ints]:
        """Return a device below each seat, and its height above devices: leaves 1, spine 2."""
        switch, place = np.divmod(seat - self._workers, self._devices)
        is_rank, is_spine = seat < self._workers, switch == self._leaves
        first = np.where(is_spine, 0, switch) * self._nodes_per_leaf * self._devices + place
        return np.where(is_rank, seat, first), np.where(is_rank, 0, 1 + is_spine)

    def _beyond(self, device: Ints) -> Ints:
        """Return the device of the same place in another node, on another leaf if one exists."""
        nodes = self._nodes_per_leaf if self._leaves > 1 else 1
        return (device + nodes * self._devices) % self._workers


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
    spine, core = _uplinks(cluster, from_node, to_node, out_nic, in_nic)
    (crosses, up, down), (climbs, pod_up, pod_down) = spine, core
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
        # The first device that uses each NIC of a node; 0 for an unused NIC.
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
    # The links that each transfer uses, one after the other.
    used = np.stack([mask for mask, _ in columns], axis=1)
    links = np.stack([link.astype(np.int32) for _, link in columns], axis=1)
    begin = np.zeros(len(latency_s) + 1, np.int64)
    np.cumsum(used.sum(axis=1), out=begin[1:])
    return Routes(begin=begin, link=links[used], latency_s=latency_s)


def _uplinks(
    cluster: Cluster, from_node: Ints, to_node: Ints, out_nic: Ints, in_nic: Ints
) -> list[tuple[Mask, Ints, Ints]]:
    """Find the transfers that leave their leaf and their pod, and their uplinks, up and down."""
    network, nobody = cluster.network, np.zeros(from_node.shape, bool)
    if not cluster.leaves or not isinstance(network, LeafSpine):
        return [(nobody, np.zeros_like(from_node), np.zeros_like(from_node))] * 2
    up, down = from_node // network.nodes_per_leaf, to_node // network.nodes_per_leaf
    rails = cluster.nics_per_node if network.by_rail else 1
    if network.by_rail:
        up, down = up * rails + out_nic, down * rails + in_nic
    if not cluster.pods or network.leaves_per_pod is None:
        return [(up != down, up, down), (nobody, np.zeros_like(up), np.zeros_like(down))]
    pod_up, pod_down = (
        leaf // rails // network.leaves_per_pod * rails + leaf % rails for leaf in (up, down)
    )
    return [(up != down, up, down), (pod_up != pod_down, pod_up, pod_down)]


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
        """Return the positions of a part's links, their transfers, and their places in the ring."""
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
    """Return whether forwards is the shorter way around a ring, or an equal one, and how far."""
    forwards = difference % around
    is_forwards = 2 * forwards <= around
    return is_forwards, np.where(is_forwards, forwards, around - forwards)
