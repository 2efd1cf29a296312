"""One collective on one cluster: how long does it take, transfer by transfer or in closed form?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from fullwire.clusters.cluster import Cluster
from fullwire.collectives.cost import AddTimes, bus_factor, chunked_time_s
from fullwire.collectives.plan import plan, planned_transfers
from fullwire.collectives.stages import Int32, Plan, Transfers
from fullwire.collectives.tuning import Tuning
from fullwire.errors import UsageError
from fullwire.units import shown

LEVELS = ("event", "closed")
CHUNK_ORDERS = ("pipelined", "serial")
MOST_PLANNED = 30_000_000  # transfers held at once: some 1.5 GB
MOST_PLAYED = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """How long a collective takes; `transfers` were counted while they were played.

    On a described cluster `played` of them stood for all. Its busiest link is the one that needs
    longest for what it carries, and is busy for `busiest_share` of the time.
    """

    op: str
    algorithm: str
    workers: int
    bytes: int
    bandwidth_bps: float
    latency_s: float
    chunks: int
    chunk_order: str
    level: str
    time_s: float
    bus_bandwidth_bps: float
    transfers: int | None
    cluster: str | None = None
    played: int | None = None
    busiest: str | None = None  # kind of link
    busiest_link: str | None = None
    busiest_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTime(CollectiveTime):
    """The quickest of the algorithms that could be timed, and what was known of the others."""

    times_s: Mapping[str, float]
    left_out: Mapping[str, str]  # why an algorithm could not be timed
    tuning: Tuning


def collective_time(
    op: str,
    algorithm: str,
    cluster: Cluster,
    size_bytes: int,
    *,
    chunks: int = 1,
    chunk_order: str = "pipelined",
    level: str = "event",
    adds: AddTimes | None = None,
) -> CollectiveTime:
    """Time one collective of `size_bytes` (the whole vector) on a cluster."""
    check_conditions(chunks, chunk_order, level)
    cluster.check_equal_links()
    adds = adds or AddTimes()
    serial = chunk_order == "serial"
    transfers = None
    if level == "closed":
        time_s = chunked_time_s(
            op, algorithm, cluster, size_bytes, adds, chunks=chunks, serial=serial
        )
    else:
        time_s, transfers = _play(op, algorithm, cluster, size_bytes, adds, chunks, serial)
    moved_bits = 8 * size_bytes * bus_factor(op, cluster.workers)
    return CollectiveTime(
        op=op,
        algorithm=algorithm,
        workers=cluster.workers,
        bytes=size_bytes,
        bandwidth_bps=cluster.rate_bps,
        latency_s=cluster.latency_s,
        chunks=chunks,
        chunk_order=chunk_order,
        level=level,
        time_s=time_s,
        bus_bandwidth_bps=moved_bits / time_s if time_s > 0 else 0.0,
        transfers=transfers,
    )


def quickest_time(
    names: Sequence[str], timed: Callable[[str], CollectiveTime], tuning: Tuning
) -> TunedTime:
    """Time a collective by each of these algorithms, and take the quickest."""
    found: list[CollectiveTime] = []
    left_out: dict[str, str] = {}
    for each in names:
        try:
            found.append(timed(each))
        except UsageError as error:
            left_out[each] = str(error)
    if not found:
        raise UsageError(f"no algorithm could be timed: {next(iter(left_out.values()))}")
    best = min(found, key=lambda each: each.time_s)  # of equals the first
    return TunedTime(
        **{each.name: getattr(best, each.name) for each in fields(best)},
        times_s={each.algorithm: each.time_s for each in found},
        left_out=left_out,
        tuning=tuning,
    )


def _play(
    op: str,
    algorithm: str,
    cluster: Cluster,
    size_bytes: int,
    adds: AddTimes,
    chunks: int,
    serial: bool,
) -> tuple[float, int]:
    from fullwire import _native  # loaded only where events are asked for

    _refuse_endless(op, algorithm, cluster.workers, chunks)
    stated = plan(op, algorithm, cluster.workers)
    counts = _distinct_block_counts(stated)
    block_bytes = size_bytes / chunks / stated.blocks
    copied = [(block_bytes * count, 0.0) for count in counts]
    added = [(size, float(adds(size))) for size, _ in copied]
    return _native.play_collective(
        workers=cluster.workers,
        parts=[_columns(part, counts) for part in stated.parts],
        size_classes=copied + added,
        bytes_per_s=cluster.rate_bps / 8,
        latency_s=cluster.latency_s,
        chunks=chunks,
        serial=serial,
    )


def _distinct_block_counts(stated: Plan) -> list[int]:
    return sorted({int(count) for part in stated.parts for count in np.unique(part.block_count)})


def _columns(part: Transfers, counts: list[int]) -> tuple[Int32, Int32, Int32, NDArray[np.uint8]]:
    """Return a part as the engine takes it: a size class is a block count, added up or not."""
    size_class = np.searchsorted(counts, part.block_count) + len(counts) * part.reduces
    return part.round, part.source, part.target, size_class.astype(np.uint8)


def check_conditions(chunks: int, chunk_order: str, level: str) -> None:
    """Refuse numbers of chunks, orders and levels that there are not."""
    if not isinstance(chunks, int) or chunks < 1:
        raise UsageError(f"chunks: expected a whole number, at least 1, got {shown(chunks)}")
    if chunk_order not in CHUNK_ORDERS:
        raise UsageError(f"chunk order: expected pipelined or serial, got {chunk_order!r}")
    if level not in LEVELS:
        raise UsageError(f"level: expected closed or event, got {level!r}")


def _refuse_endless(op: str, algorithm: str, workers: int, chunks: int) -> None:
    planned = planned_transfers(op, algorithm, workers)
    if planned > MOST_PLANNED or planned * chunks > MOST_PLAYED:
        raise UsageError(
            f"{planned * chunks:,} transfers are too many to play one by one "
            f"(at most {MOST_PLANNED:,} a chunk and {MOST_PLAYED:,} in all): "
            "ask with --level closed"
        )
