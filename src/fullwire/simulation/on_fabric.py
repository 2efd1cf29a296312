"""Messages on a described cluster: what its links take, for whole axes of a grid at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from fullwire.model.compressor import Combining
from fullwire.model.cost import AddTimes, Cost, Floats
from fullwire.model.fabric import Fabric
from fullwire.model.fabric_cost import FabricCost, fabric_cost, with_workers


@dataclass(frozen=True, slots=True)
class Routed:
    """A collective on a fabric, of so many bytes for each byte of a message."""

    cost: FabricCost
    times: float = 1.0
    gathered_by: int = 0  # workers that each add up all messages on arrival

    def as_cost(self, size_bytes: ArrayLike, adds: AddTimes) -> Cost:
        """Return what does not depend on the links: what a rank sends, and what it adds."""
        size = np.multiply(size_bytes, self.times)
        added_s = self.cost.add_s(size, adds)
        if self.gathered_by:
            added_s = (self.gathered_by - 1) * adds(size_bytes)
        return Cost(self.cost.sent_per_byte * size, self.cost.hops, added_s)

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

    def cost(self, op: str, algorithm: str, workers: int) -> FabricCost:
        """Return what a collective takes among so many workers."""
        fabric = with_workers(self.fabric, workers)
        return fabric_cost(op, algorithm, fabric, workers, is_scattered=self.is_scattered)

    def gradients(self, combining: Combining, algorithm: str, workers: int) -> Routed:
        """Return what a message of gradients takes, as `gradient_cost` combines it."""
        if combining == "sum":
            return Routed(self.cost("allreduce", algorithm, workers))
        return Routed(self.cost("allgather", "ring", workers), workers, gathered_by=workers)
