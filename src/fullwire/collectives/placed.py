"""A plan on a described cluster: which links each of its transfers uses.

Rank r is on device `order[r]`. Transfers between the same two seats share one connection. A switch
that adds is somewhere on the way: what a rank sends it ends where the rank's NIC meets its leaf.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fullwire.clusters.cluster import SPINE, Cluster, Floats, Ints, LeafSpine
from fullwire.clusters.routes import Routes, routes
from fullwire.collectives.plan import layout_of
from fullwire.collectives.stages import Int32, Plan
from fullwire.errors import UsageError

MOST_CONNECTIONS = 6_000_000


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
    """Find the links of every transfer, ranks being on devices in this order."""
    devices = _checked_order(plan, cluster, order)
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
        routes=_routes(plan, cluster, devices, source, target),
        transfers=tuple(tuple(next(connections) for _ in part) for part in plan.stages),
    )


def _checked_order(plan: Plan, cluster: Cluster, order: ArrayLike | None) -> Ints:
    if order is None:
        devices = np.arange(plan.workers)
    else:
        devices = np.asarray(order, np.int64)
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
    return devices


def _routes(plan: Plan, cluster: Cluster, devices: Ints, source: Ints, target: Ints) -> Routes:
    if plan.switches == 0:
        return routes(cluster, devices[source], devices[target])
    switches = _Switches(plan, cluster)
    from_device, from_height = switches.below(source)
    to_device, to_height = switches.below(target)
    height = np.maximum(from_height, to_height)
    climbs = to_height > from_height
    whole = routes(
        cluster,
        np.where((height == 0) | climbs, from_device, switches.beyond(to_device)),
        np.where((height == 0) | ~climbs, to_device, switches.beyond(from_device)),
    )
    # Of a route past a switch, the links that lead to it or from it: a half, spine or not.
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


class _Switches:
    """Where the switches of a plan are: leaves, then the spine, each once for every place."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self._workers, self._devices = plan.workers, cluster.devices_per_node
        self._nodes_per_leaf = layout_of(cluster).nodes_per_leaf or cluster.nodes
        self._leaves = -(-plan.workers // (self._nodes_per_leaf * self._devices))

    def below(self, seat: Ints) -> tuple[Ints, Ints]:
        """Return a device below each seat, and how high above devices it is: leaves 1, spine 2."""
        switch, place = np.divmod(seat - self._workers, self._devices)
        is_rank, is_spine = seat < self._workers, switch == self._leaves
        first = np.where(is_spine, 0, switch) * self._nodes_per_leaf * self._devices + place
        return np.where(is_rank, seat, first), np.where(is_rank, 0, 1 + is_spine)

    def beyond(self, device: Ints) -> Ints:
        """Return the device of the same place in another node, on another leaf if there are any."""
        nodes = self._nodes_per_leaf if self._leaves > 1 else 1
        return (device + nodes * self._devices) % self._workers
