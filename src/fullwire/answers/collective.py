"""How long does one collective take on this cluster?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullwire.answers.conditions import (
    OneOrMany,
    count,
    device_order,
    is_scattered,
    rate,
    worker_count,
)
from fullwire.answers.conditions import latency as read_latency
from fullwire.clusters import ClusterLike
from fullwire.clusters import cluster as described_cluster
from fullwire.clusters.cluster import Cluster
from fullwire.clusters.fabric import Fabric, flat
from fullwire.collectives.cluster_plan import cluster_algorithms, usual_algorithm
from fullwire.collectives.cost import AddTimes
from fullwire.collectives.fabric_cost import scattered, with_workers
from fullwire.collectives.fabric_playing import Told, fabric_time
from fullwire.collectives.plan import OPS, algorithms
from fullwire.collectives.playing import CollectiveTime, collective_time, quickest_time
from fullwire.collectives.tuning import (
    AUTO,
    applicable,
    around_a_switch,
    open_to,
    over_links,
    tuned,
)
from fullwire.errors import UsageError
from fullwire.importers.netx import read_reduce_cost
from fullwire.simulation.on_fabric import believed_cost
from fullwire.units import size_bytes


def collective(
    op: str,
    *,
    bytes: str | int,
    workers: str | int | None = None,
    bandwidth: str | float | None = None,
    latency: str | float | None = None,
    algorithm: str | None = None,
    chunks: int = 1,
    chunk_order: str = "pipelined",
    level: str = "event",
    reduce_cost: str | Path | None = None,
    cluster: ClusterLike | None = None,
    nodes: str | int | None = None,
    placement: str = "packed",
    order: OneOrMany = None,
    servers: int = 1,
    progress: Told | None = None,
) -> CollectiveTime:
    """Time a collective of so many bytes: `allreduce`, `reducescatter`, `allgather` and others.

    Bytes are of the whole vector. `level="event"` plays every transfer; `"closed"` uses a formula
    where one is exact. `algorithm="auto"` times all that can be used here, takes the quickest and
    says why. `reduce_cost` is a file of measured additions, `bytes,seconds` a line.
    On a described cluster workers are its devices, and bandwidth and latency those of its NICs;
    rank r is on device `order[r]`. `progress` hears how many of how many transfers are done.
    """
    op = op.lower().replace("-", "").replace("_", "")
    adds = AddTimes() if reduce_cost is None else read_reduce_cost(Path(reduce_cost))
    size = size_bytes(bytes, "bytes")
    among = None if workers is None else worker_count(workers)
    order = None if order is None else device_order(order)
    how: dict[str, Any] = {
        "chunks": chunks,
        "chunk_order": chunk_order,
        "level": level,
        "adds": adds,
    }
    if cluster is None:
        around = _one_switch(among, bandwidth, latency)
        algorithm = algorithm or cluster_algorithms(op)[0]
        if order is None and op in OPS and algorithm in (AUTO, *algorithms(op)):
            return _around(op, algorithm, around, size, how)
        fabric = flat(around)
    else:
        fabric = _fabric(cluster, nodes, bandwidth, latency)
        algorithm = algorithm or usual_algorithm(op, fabric)
    fabric = fabric if among is None else with_workers(fabric, among)
    where = _order(fabric, among, placement, order)

    def timed(each: str) -> CollectiveTime:
        found = fabric_time(
            op,
            each,
            fabric,
            size,
            workers=among,
            order=where,
            servers=servers,
            told=progress,
            **how,
        )
        return found if cluster is not None else replace(found, cluster=None)

    if algorithm != AUTO:
        return timed(algorithm)
    names = open_to(op, fabric, among)
    costs = {
        each: believed_cost(op, each, fabric, among or fabric.devices, where) for each in names
    }
    return quickest_time(names, timed, tuned(over_links(costs, adds)))


def _around(
    op: str, algorithm: str, cluster: Cluster, size_bytes: int, how: dict[str, Any]
) -> CollectiveTime:
    """Time a collective among workers around a switch."""

    def timed(each: str) -> CollectiveTime:
        return collective_time(op, each, cluster, size_bytes, **how)

    if algorithm != AUTO:
        return timed(algorithm)
    times = around_a_switch(op, cluster, how["adds"])
    return quickest_time(applicable(op, cluster.workers), timed, tuned(times))


def _one_switch(
    workers: int | None, bandwidth: str | float | None, latency: str | float | None
) -> Cluster:
    if workers is None or bandwidth is None:
        raise UsageError("collective: expected workers and bandwidth, or a described cluster")
    return Cluster(
        workers=workers, rate_bps=rate(bandwidth), latency_s=read_latency(latency or 0.0)
    )


def _order(
    fabric: Fabric, workers: int | None, placement: str, order: Sequence[int] | None
) -> Sequence[int] | None:
    if not is_scattered(fabric, placement):
        return order
    if order is not None:
        raise UsageError("order: expected either an order, or ranks scattered over the leaves")
    return [int(device) for device in scattered(fabric)[:workers]]


def _fabric(
    named: ClusterLike,
    nodes: str | int | None,
    bandwidth: str | float | None,
    latency: str | float | None,
) -> Fabric:
    fabric = described_cluster(named, None if nodes is None else count(nodes, "nodes"))
    nics = fabric.nics
    if bandwidth is not None:
        nics = replace(nics, rate_bps=rate(bandwidth))
    if latency is not None:
        nics = replace(nics, latency_s=read_latency(latency))
    return replace(fabric, nics=nics)
