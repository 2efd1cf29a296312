"""Messages on a described cluster: what its links take, for whole axes of a grid at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from fullwire.model.cluster_plan import plan_on
from fullwire.model.compressor import Combining
from fullwire.model.cost import Floats
from fullwire.model.fabric import IN_NODE, LINK_KINDS, Fabric
from fullwire.model.fabric_cost import FabricCost, fabric_cost, scattered, with_workers
from fullwire.model.placed import Placed, placed
from fullwire.model.placed_cost import PlacedCost, placed_cost
from fullwire.model.plan import algorithms


@dataclass(frozen=True, slots=True)
class ClusterCost:
    """What a collective takes that knows of nodes: worked out for each rate of the NICs anew."""

    op: str
    algorithm: str
    fabric: Fabric
    workers: int
    is_scattered: bool

    @property
    def network_bits_per_byte(self) -> float:
        """Return what the busiest link of the network carries, as bits at the NICs' rate."""
        busy_s = np.where(self.fabric.link_kind == IN_NODE, 0.0, self._busy_s(self.fabric))
        return float(busy_s.max() * self.fabric.nics.rate_bps)

    def time_s(self, size_bytes: ArrayLike, per_bit: ArrayLike) -> Floats:
        """Return the time for messages of these sizes, at so many seconds a bit."""
        size, rates = np.broadcast_arrays(np.asarray(size_bytes, np.float64), per_bit)
        time_s = np.empty(size.shape)
        for each in np.unique(rates).tolist():
            here = rates == each
            time_s[here] = self._at(1 / each)[1].time_s(size[here])
        return time_s

    def busiest(self, size_bytes: float, per_bit: float) -> str | None:
        """Name the kind of link that is busy for longest; None among one worker."""
        del size_bytes  # the same for any
        fabric = self._with_rate(1 / per_bit)
        busy_s = self._busy_s(fabric)
        return LINK_KINDS[fabric.link_kind[int(np.argmax(busy_s))]] if busy_s.any() else None

    def _busy_s(self, fabric: Fabric) -> Floats:
        """Return how long each link is busy for each byte of a message."""
        where, _ = self._at(fabric.nics.rate_bps)
        bits = 8 * where.blocks_over_links(fabric.link_count) / where.plan.message_blocks
        return np.asarray(bits / fabric.link_rate_bps)

    def _with_rate(self, rate_bps: float) -> Fabric:
        return replace(self.fabric, nics=replace(self.fabric.nics, rate_bps=rate_bps))

    def _at(self, rate_bps: float) -> tuple[Placed, PlacedCost]:
        return _placed_at(
            self.op, self.algorithm, self._with_rate(rate_bps), self.workers, self.is_scattered
        )


@lru_cache(maxsize=256)
def _placed_at(
    op: str, algorithm: str, fabric: Fabric, workers: int, is_scattered: bool
) -> tuple[Placed, PlacedCost]:
    order = scattered(fabric)[:workers] if is_scattered else None
    where = placed(plan_on(op, algorithm, fabric, workers), fabric, order)
    return where, placed_cost(where, fabric)


@dataclass(frozen=True, slots=True)
class Routed:
    """A collective on a fabric, of so many bytes for each byte of a message."""

    cost: FabricCost | ClusterCost
    times: float = 1.0

    @property
    def network_bits_per_byte(self) -> float:
        """Return what the busiest link of the network carries for each byte of a message."""
        return self.times * self.cost.network_bits_per_byte


def routed_s(routed: Sequence[Sequence[Routed]], size: Floats, per_bit: Floats) -> Floats:
    """Return the times of messages: cluster sizes on the first axis, compressors on the last."""
    shape = np.broadcast_shapes(size.shape, per_bit.shape, (len(routed), 1, 1))
    size, per_bit = np.broadcast_to(size, shape), np.broadcast_to(per_bit, shape)
    time_s = np.empty(shape)
    for row, of_compressors in enumerate(routed):
        for each in {id(each): each for each in of_compressors}.values():  # usually one for all
            columns = [number for number, other in enumerate(of_compressors) if other is each]
            here = (row, slice(None), slice(None) if len(of_compressors) == 1 else columns)
            time_s[here] = each.cost.time_s(each.times * size[here], per_bit[here])
    return time_s


@dataclass(frozen=True, slots=True)
class OnFabric:
    """Where the ranks of a grid are, if it is more than workers around a switch."""

    fabric: Fabric
    is_scattered: bool

    @staticmethod
    def of(fabric: Fabric | None, latency_s: float, *, is_scattered: bool) -> OnFabric | None:
        """Take a fabric with this latency of its NICs; None where it is workers and a switch."""
        if fabric is None or fabric.is_flat:
            return None
        nics = replace(fabric.nics, latency_s=latency_s)
        return OnFabric(replace(fabric, nics=nics), is_scattered)

    def cost(self, op: str, algorithm: str, workers: int) -> FabricCost | ClusterCost:
        """Return what a collective takes among so many workers."""
        fabric = with_workers(self.fabric, workers)
        if workers > 1 and algorithm not in algorithms(op):
            return ClusterCost(op, algorithm, fabric, workers, self.is_scattered)
        return fabric_cost(op, algorithm, fabric, workers, is_scattered=self.is_scattered)

    def gradients(self, combining: Combining, algorithm: str, workers: int) -> Routed:
        """Return what a message of gradients takes, as `gradient_cost` combines it."""
        if combining == "sum":
            return Routed(self.cost("allreduce", algorithm, workers))
        return Routed(self.cost("allgather", "ring", workers), workers)
