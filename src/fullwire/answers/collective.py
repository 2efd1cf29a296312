"""How long does one collective take on this cluster?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fullwire.answers.believable import check_shares, check_times
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
from fullwire.clusters.cluster import Cluster, one_switch, scattered, with_workers
from fullwire.collectives.cost import AddTimes
from fullwire.collectives.playing import CollectiveTime, Told, collective_time, quickest_time
from fullwire.collectives.registry import names, open_to, usual_algorithm, with_formula
from fullwire.collectives.tuning import AUTO, around_a_switch, over_links, tuned
from fullwire.errors import UsageError
from fullwire.importers.netx import read_reduce_cost
from fullwire.simulation.on_links import believed_cost
from fullwire.units import size_bytes

_SERVED = "parameter-server"


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

    - `op`: one of them, by its name.
    - `bytes`: of the whole vector, `"64MiB"` or a number.
    - `workers`, `bandwidth` (bits per second), `latency` (seconds): of one switch. On a described
      cluster workers are its devices, and bandwidth and latency those of its NICs.
    - `algorithm`: by its name. `"auto"` times all that can be used here, takes the quickest and
      says why.
    - `chunks`, `chunk_order`: into how many pieces the vector is cut, `"pipelined"` or `"serial"`.
    - `level`: `"event"` plays every transfer; `"closed"` uses a formula where one is exact.
    - `reduce_cost`: a file of measured additions, `bytes,seconds` a line.
    - `cluster`, `nodes`: a described cluster, by name or file, and how many nodes it has.
    - `placement`, `order`: ranks `"packed"` or `"scattered"`, or rank r on device `order[r]`.
    - `servers`: of a parameter server; `progress`: hears how many of how many transfers are done.

    Times of the answer are seconds, bandwidths bits per second.

        fw.collective("allreduce", bytes="64MiB", workers=8, bandwidth="100Gbps").time_s
    """
    op, size = op.lower().replace("-", "").replace("_", ""), size_bytes(bytes, "bytes")
    adds = AddTimes() if reduce_cost is None else read_reduce_cost(Path(reduce_cost))
    servers = count(servers, "servers")
    if servers > 1 and algorithm not in (AUTO, _SERVED):
        asked = algorithm or "none"
        raise UsageError(f"servers: expected algorithm {_SERVED}, which has some, got {asked}")
    among = None if workers is None else worker_count(workers)
    order = None if order is None else device_order(order)
    where = _where(cluster, nodes, among, bandwidth, latency)
    algorithm = algorithm or (names(op)[0] if cluster is None else usual_algorithm(op, where))
    where = where if among is None else with_workers(where, among)
    if is_scattered(where, placement):
        if order is not None:
            raise UsageError("order: expected either an order, or ranks scattered over the leaves")
        order = [int(device) for device in scattered(where)[:among]]

    def timed(name: str) -> CollectiveTime:
        found = collective_time(
            op,
            name,
            where,
            size,
            workers=among,
            order=order,
            servers=servers,
            told=progress,
            chunks=chunks,
            chunk_order=chunk_order,
            level=level,
            adds=adds,
        )
        check_times(f"{op} {name}", time=found.time_s)
        check_shares(f"{op} {name}", busiest_link_share=found.busiest_share)
        return found if cluster is not None else replace(found, cluster=None)

    if algorithm != AUTO:
        return timed(algorithm)
    tried = open_to(op, where, among)
    if where.is_flat and order is None and set(tried) <= set(with_formula(op)):
        return quickest_time(tried, timed, tuned(around_a_switch(op, where, adds)))
    costs = {name: believed_cost(op, name, where, among or where.devices, order) for name in tried}
    return quickest_time(tried, timed, tuned(over_links(costs, adds)))


def _where(
    named: ClusterLike | None,
    nodes: str | int | None,
    workers: int | None,
    bandwidth: str | float | None,
    latency: str | float | None,
) -> Cluster:
    """Return one switch, or the cluster that is named with the NICs that are asked for."""
    if named is None:
        if workers is None or bandwidth is None:
            raise UsageError("collective: expected workers and bandwidth, or a described cluster")
        latency_s = read_latency(latency or 0.0)
        return one_switch(workers=workers, rate_bps=rate(bandwidth), latency_s=latency_s)
    where = described_cluster(named, None if nodes is None else count(nodes, "nodes"))
    nics = where.nics
    if bandwidth is not None:
        nics = replace(nics, rate_bps=rate(bandwidth))
    if latency is not None:
        nics = replace(nics, latency_s=read_latency(latency))
    return replace(where, nics=nics)
