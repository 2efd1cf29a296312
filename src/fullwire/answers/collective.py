"""How long does one collective take on this cluster?"""

from __future__ import annotations

from pathlib import Path

from fullwire.answers.conditions import latency as read_latency
from fullwire.answers.conditions import rate, worker_count
from fullwire.model.cluster import Cluster
from fullwire.simulation.collective import CollectiveTime, collective_time
from fullwire.sources.netx import read_reduce_cost
from fullwire.units import size_bytes


def collective(
    op: str, *, bytes: str | int, workers: str | int, bandwidth: str | float,
    latency: str | float = 0.0, algorithm: str = "ring", chunks: int = 1,
    chunk_order: str = "pipelined", level: str = "event",
    reduce_cost: str | Path | None = None,
) -> CollectiveTime:  # fmt: skip
    """Time a collective of so many bytes: `allreduce`, `reducescatter`, `allgather`, `broadcast`.

    Bytes are of the whole vector. `level="event"` plays every transfer; `"closed"` uses a formula
    where one is exact. `reduce_cost` is a file of measured additions, `bytes,seconds` a line.
    """
    cluster = Cluster(
        workers=worker_count(workers), rate_bps=rate(bandwidth), latency_s=read_latency(latency)
    )
    return collective_time(
        op.lower().replace("-", "").replace("_", ""), algorithm, cluster,
        size_bytes(bytes, "bytes"), chunks=chunks, chunk_order=chunk_order, level=level,
        adds=None if reduce_cost is None else read_reduce_cost(Path(reduce_cost)),
    )  # fmt: skip
