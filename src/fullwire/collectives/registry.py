"""The known algorithms: each file of `algorithms/` holds one, or some that are related.

An algorithm states each operation that it can carry out as stages of transfers (stages.py). It may
also have a formula for its cost on equal links. Of equal times the algorithm of the lowest place
wins, which is the usual one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np

from fullwire.clusters.cluster import Cluster, LeafSpine
from fullwire.collectives.cost import AddTimes, Cost, Floats
from fullwire.collectives.stages import Layout, Stated
from fullwire.errors import UsageError
from fullwire.registry import Registry

OPS = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall")


# Libraries add in the switches of a node, or of several. `collectives.library` times these.
BY_NODE_SWITCHES = ("nvls", "nvls-tree")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """Links of equal rate around one switch."""

    workers: int
    rate_bps: float
    latency_s: float

    def time_s(self, costs: Costs, size_bytes: float, adds: AddTimes) -> float:
        """Return the time of a message of this size by a formula."""
        cost = costs(self.workers, np.asarray(size_bytes, np.float64), adds)
        return float(cost.time_s(self.rate_bps, self.latency_s))


States: TypeAlias = Callable[[str, Layout], Stated]  # the operation comes first
# Of workers, and of messages of these sizes, at full utilization of the links.
Costs: TypeAlias = Callable[[int, Floats, AddTimes], Cost]
# The time of chunks that follow each other closely: exact, or refused.
Exactly: TypeAlias = Callable[[Wires, float, AddTimes, int], float]
Fits: TypeAlias = Callable[[str, Cluster, int], bool]  # an operation, among so many workers


def anywhere(_op: str, _cluster: Cluster, _workers: int) -> bool:
    """Fit every cluster."""
    return True


def whole_nodes(_op: str, cluster: Cluster, workers: int) -> bool:
    """Fit all devices of some nodes, or some of one; in a torus all devices, or some of a node."""
    are_whole = workers % cluster.devices_per_node == 0
    return (are_whole and (workers == cluster.devices or not cluster.is_torus)) or (
        workers < cluster.devices_per_node
    )


def some_of_the_last_node(op: str, cluster: Cluster, workers: int) -> bool:
    """Fit any number of devices of nodes behind switches; in a torus whole nodes."""
    return not cluster.is_torus or whole_nodes(op, cluster, workers)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Statement:
    """One operation by one algorithm. Without a formula its cost comes from its stages on links.

    With `is_pipelined`, its chunks follow each other so closely that the busiest link never waits.
    Its cost is then the load of that link.
    """

    states: States
    costs: Costs | None = None
    exactly_s: Exactly | None = None
    is_pipelined: bool = False


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Algorithm:
    """A way to carry out collectives.

    One that is `by_name_only` is never chosen by `auto`. One with `switches_add` is chosen only
    where the description says that the network's switches add.
    """

    name: str
    label: str
    place: int
    ops: Mapping[str, Statement]
    fits: Fits = anywhere
    by_name_only: bool = False
    switches_add: bool = False

    @property
    def key(self) -> str:
        """Return the name that people ask for."""
        return self.name

    def is_open(self, cluster: Cluster) -> bool:
        """Say whether `auto` may choose it on a cluster."""
        can_add = isinstance(cluster.network, LeafSpine) and cluster.network.adds
        return not self.by_name_only and (can_add or not self.switches_add)


ALGORITHMS = Registry(Algorithm, "fullwire.collectives.algorithms", name="ALGORITHM")


@cache
def known(op: str) -> Mapping[str, Algorithm]:
    """Return the algorithms for a collective by name, the usual one first."""
    if op not in OPS:
        raise UsageError(f"collective: expected one of {', '.join(OPS)}, got {op!r}")
    of_op = [algorithm for algorithm in ALGORITHMS.values() if op in algorithm.ops]
    return {way.name: way for way in sorted(of_op, key=lambda way: (way.place, way.name))}


def names(op: str) -> tuple[str, ...]:
    """List the algorithms for a collective, the usual one first."""
    return tuple(known(op))


def with_formula(op: str) -> tuple[str, ...]:
    """List the algorithms whose cost around one switch is a formula, the usual one first."""
    return tuple(name for name, way in known(op).items() if way.ops[op].costs is not None)


def fitting(op: str, cluster: Cluster, workers: int | None = None) -> tuple[str, ...]:
    """List the algorithms that the first so many devices can carry out, the usual one first."""
    among = cluster.devices if workers is None else workers
    return tuple(name for name, way in known(op).items() if way.fits(op, cluster, among))


def of_one_switch(op: str) -> tuple[str, ...]:
    """List the choices of `auto` around one switch: the algorithms with a formula."""
    return tuple(name for name in with_formula(op) if not known(op)[name].by_name_only)


def open_to(
    op: str, cluster: Cluster, workers: int | None = None, *, in_order: bool = True
) -> tuple[str, ...]:
    """List the algorithms that fit and that `auto` may choose.

    Switches add only where ranks are on the devices `in_order`.
    Around one switch they are those with a formula, if there are any. There the others are the
    same, or take longer.
    """
    candidates = [
        name
        for name in fitting(op, cluster, workers)
        if known(op)[name].is_open(cluster) and (in_order or not known(op)[name].switches_add)
    ]
    of_switch = [name for name in candidates if name in of_one_switch(op)]
    return tuple(of_switch if cluster.is_flat and of_switch else candidates)


def statement(op: str, algorithm: str) -> Statement:
    """Return how an algorithm carries out a collective."""
    if algorithm in BY_NODE_SWITCHES:
        raise UsageError(
            f"algorithm for {op}: {algorithm} has no transfers to play. It is how libraries use "
            "switches that add within a node (NVLink SHARP), and its time comes from tables: "
            "`fullwire collective` without --algorithm, or with auto, takes it where it is the "
            f"quickest. Expected {', '.join(known(op))}"
        )
    if algorithm not in known(op):
        raise UsageError(f"algorithm for {op}: expected {', '.join(known(op))}, got {algorithm!r}")
    return known(op)[algorithm].ops[op]


def usual_algorithm(op: str, cluster: Cluster) -> str:
    """Return the default algorithm: a ring for each NIC of a node, as NCCL has them."""
    several = cluster.nics_per_node > 1 and not cluster.is_torus
    return "multi-ring" if several and "multi-ring" in known(op) else names(op)[0]
