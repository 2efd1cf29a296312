"""How long does one collective take on this cluster?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fullwire.answers.conditions import count, is_scattered, rate, worker_count
from fullwire.answers.conditions import latency as read_latency
from fullwire.errors import UsageError
from fullwire.model.cluster import Cluster
from fullwire.model.fabric import Fabric
from fullwire.simulation.collective import (
    CollectiveTime,
    collective_time,
    fabric_collective_time,
)
from fullwire.sources.clusters import ClusterLike
from fullwire.sources.clusters import cluster as described_cluster
from fullwire.sources.netx import read_reduce_cost
from fullwire.units import size_bytes


def collective(
    op: str, *, bytes: str | int, workers: str | int | None = None,
    bandwidth: str | float | None = None, latency: str | float | None = None,
    algorithm: str = "ring", chunks: int = 1, chunk_order: str = "pipelined",
    level: str | None = None, reduce_cost: str | Path | None = None,
    cluster: ClusterLike | None = None, nodes: str | int | None = None,
    placement: str = "packed",
) -> CollectiveTime:  # fmt: skip
    """Time a collective of so many bytes: `allreduce`, `reducescatter`, `allgather`, `broadcast`.

    Bytes are of the whole vector. `level="event"` plays every transfer; `"closed"` uses a formula
    where one is exact. `reduce_cost` is a file of measured additions, `bytes,seconds` a line.
    On a described cluster workers are its devices, and bandwidth and latency those of its NICs.
    """
    op = op.lower().replace("-", "").replace("_", "")
    adds = None if reduce_cost is None else read_reduce_cost(Path(reduce_cost))
    size = size_bytes(bytes, "bytes")
    if cluster is not None:
        fabric = _fabric(cluster, nodes, bandwidth, latency)
        if not fabric.is_flat:
            return fabric_collective_time(
                op, algorithm, fabric,
                fabric.devices if workers is None else worker_count(workers), size,
                chunks=chunks, level=level, is_scattered=is_scattered(fabric, placement), adds=adds,
            )  # fmt: skip
        workers = fabric.devices if workers is None else workers
        bandwidth, latency = fabric.nics.rate_bps, fabric.nics.latency_s
    if workers is None or bandwidth is None:
        raise UsageError("collective: expected workers and bandwidth, or a described cluster")
    flat = Cluster(
        workers=worker_count(workers),
        rate_bps=rate(bandwidth),
        latency_s=read_latency(latency or 0),
    )
    return collective_time(
        op, algorithm, flat, size, chunks=chunks, chunk_order=chunk_order, level=level or "event",
        adds=adds,
    )  # fmt: skip


def _fabric(
    named: ClusterLike, nodes: str | int | None, bandwidth: str | float | None,
    latency: str | float | None,
) -> Fabric:  # fmt: skip
    fabric = described_cluster(named, None if nodes is None else count(nodes, "nodes"))
    nics = fabric.nics
    if bandwidth is not None:
        nics = replace(nics, rate_bps=rate(bandwidth))
    if latency is not None:
        nics = replace(nics, latency_s=read_latency(latency))
    return replace(fabric, nics=nics)
