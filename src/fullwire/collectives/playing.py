"""One collective on a cluster: over its links in events, or in closed form.

Ranks that are alike do the same at the same times, so only one of each kind is played
(native/events/folding.hpp defines alike). A slow host makes other ranks unlike, as far as its
effect reaches. The number of played transfers follows the number of kinds, not of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from fullwire.clusters.cluster import LINK_KINDS, MOST_DEVICES, Cluster, Floats, Ints
from fullwire.collectives.closed_form import exact_s
from fullwire.collectives.cost import AddTimes, bus_factor
from fullwire.collectives.left_open import OpenOfNics
from fullwire.collectives.link_cost import cost_of
from fullwire.collectives.placed import Placed, placed
from fullwire.collectives.plan import plan_on
from fullwire.collectives.registry import Wires, statement
from fullwire.collectives.stages import Int32
from fullwire.collectives.tuning import Tuning
from fullwire.display import Result, html_table
from fullwire.errors import UsageError
from fullwire.units import show_bytes, show_count, show_rate, show_time, shown

LEVELS = ("event", "closed")
CHUNK_ORDERS = ("pipelined", "serial")
MOST_PLAYED = 1_000_000_000
MOST_AT_ONCE = 30_000_000  # transfers of all chunks whose progress is kept: some 1 GB
Told: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """The range in which a machine of this description is expected.

    At the levels "tables" and "usual" it should hold nine of ten machines. The range of a single
    algorithm, played in events or timed in closed form, is set by hand and is not calibrated.
    """

    low_s: float
    high_s: float


@dataclass(frozen=True, eq=False, slots=True, repr=False, kw_only=True)
class CollectiveTime(Result):
    """How long a collective takes; `transfers` were counted while they were played.

    At level "tables" the time comes from measured tables of the cluster, at level "usual" from
    those of other machines: by the `protocol` that a library takes. On a described cluster `played`
    transfers stood for all. The busiest link is the one that needs longest for its load. It is busy
    for `busiest_share` of the time. `tables_lack` names the operation, the nodes or the sizes of
    which the cluster has no table. The protocols that were fitted to its other tables then give the
    time. `may_take` names another algorithm, where the tables leave open whether the library has a
    tree, and `may_add` one where nothing tells whether the switches in the nodes add. The interval
    holds their times, too. With `pair_is_open` it also holds both answers to the question whether
    two nodes send half as much as more do. `open_of_nics` names what no table tells of the NICs.
    With `rests_on_least` the links within a node may be faster than the cluster says. At level
    "usual" `stated_startup_s` is the start-up that the cluster states for large messages, or 0.
    `times_packed` is how many times as long ranks in their order take as packed ones, when played.
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
    protocol: str | None = None
    interval: Between | None = None
    tables_lack: tuple[str, ...] = ()
    may_take: str | None = None
    may_add: str | None = None
    pair_is_open: bool = False
    open_of_nics: OpenOfNics | None = None
    rests_on_least: bool = False
    stated_startup_s: float = 0.0
    times_packed: float | None = None

    def _in_short(self) -> Iterator[str]:
        where = "" if self.cluster is None else f" on {self.cluster}"
        yield (
            f"{self.op} of {show_bytes(self.bytes)} by {self.algorithm} among "
            f"{show_count(self.workers, 'worker')}{where}: {show_time(self.time_s)}"
        )
        yield f"bus bandwidth {show_rate(self.bus_bandwidth_bps)}"


@dataclass(frozen=True, eq=False, slots=True, repr=False, kw_only=True)
class TunedTime(CollectiveTime):
    """The quickest of the algorithms that could be timed, and the results of the others."""

    times_s: Mapping[str, float]
    left_out: Mapping[str, str]  # why an algorithm could not be timed
    tuning: Tuning
    library_ways: tuple[str, ...] = ()  # that were also timed as libraries take them
    in_use: str | None = None  # by its tables, the library of a fitted cluster takes this one

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            "algorithms": {
                "algorithm": list(self.times_s),
                "time_s": list(self.times_s.values()),
            }
        }

    def _picture(self) -> str:
        return html_table(self._tables()["algorithms"])


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Alike:
    """Connections of which each stands for all that are alike, and the transfers that they make."""

    seats: int
    bytes_per_s: Floats
    source: Int32
    target: Int32
    latency_s: Floats
    stands_for: Ints
    crossings_begin: Ints
    link: Int32
    weight: Int32
    transfers: tuple[tuple[Int32, ...], ...]


def unfolded(where: Placed, cluster: Cluster) -> Alike:
    """Let every connection stand for itself."""
    routes = where.routes
    return Alike(
        seats=where.plan.seats,
        bytes_per_s=cluster.link_rate_bps / 8,
        source=where.source,
        target=where.target,
        latency_s=routes.latency_s,
        stands_for=np.ones(len(where), np.int64),
        crossings_begin=routes.begin,
        link=routes.link,
        weight=np.ones_like(routes.link),
        transfers=where.transfers,
    )


def folded(where: Placed, cluster: Cluster) -> Alike:
    """Let one connection stand for all that are alike."""
    from fullwire import _native  # loaded only where events are asked for

    # A connection's role is its latency, and the sum of a random number for each stage that it
    # transfers in. Two roles have one sum as rarely as two random 64-bit numbers are equal. The
    # numbers are those of splitmix64: to load numpy's generators takes 10 ms at each start.
    routes = where.routes
    state, most = 8, 2**64 - 1
    sums = np.zeros(len(where), np.uint64)
    for part in where.transfers:
        for stage in part:
            state = (state + 0x9E3779B97F4A7C15) & most
            mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & most
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & most
            np.add.at(sums, stage, np.uint64(mixed ^ mixed >> 31))
    _, latency = np.unique(routes.latency_s, return_inverse=True)
    _, in_stages = np.unique(sums, return_inverse=True)
    both = latency * (in_stages.max(initial=0) + 1) + in_stages
    _, role = np.unique(both, return_inverse=True)
    used, link = np.unique(routes.link, return_inverse=True)
    rates_bps, rate = np.unique(cluster.link_rate_bps[used], return_inverse=True)
    seat_class, class_of, link_class = _native.fold(
        where.plan.seats,
        where.source,
        where.target,
        routes.begin,
        link.astype(np.int32),
        role.astype(np.int32),
        rate.astype(np.int32),
    )
    _, first = np.unique(class_of, return_index=True)
    members = np.bincount(link_class)
    # How many connections of a class meet on one link of another.
    pairs = np.repeat(class_of.astype(np.int64), np.diff(routes.begin)) * len(members)
    met, times = np.unique(pairs + link_class[link], return_counts=True)
    classes, links = np.divmod(met, max(len(members), 1))
    begin = np.zeros(len(first) + 1, np.int64)
    np.cumsum(np.bincount(classes, minlength=len(first)), out=begin[1:])
    link_rate_bps = np.empty(len(members))
    link_rate_bps[link_class] = rates_bps[rate]
    is_first = np.zeros(len(where), bool)
    is_first[first] = True
    return Alike(
        seats=int(seat_class.max(initial=-1)) + 1,
        bytes_per_s=link_rate_bps / 8,
        source=seat_class[where.source[first]],
        target=seat_class[where.target[first]],
        latency_s=routes.latency_s[first],
        stands_for=np.bincount(class_of),
        crossings_begin=begin,
        link=links.astype(np.int32),
        weight=(times // members[links]).astype(np.int32),
        transfers=tuple(
            tuple(class_of[stage[is_first[stage]]] for stage in part) for part in where.transfers
        ),
    )


def collective_time(
    op: str,
    algorithm: str,
    cluster: Cluster,
    size_bytes: int,
    *,
    workers: int | None = None,
    order: ArrayLike | None = None,
    servers: int = 1,
    chunks: int = 1,
    chunk_order: str = "pipelined",
    level: str = "event",
    adds: AddTimes | None = None,
    folds: bool = True,
    told: Told | None = None,
) -> CollectiveTime:
    """Time one collective of `size_bytes` (the whole vector) among the devices of a cluster.

    Rank r is on device `order[r]`, or on device r. `told` is called with the number of transfers
    that are done, and with the number of all.
    """
    check_conditions(chunks, chunk_order, level)
    serial, adds = chunk_order == "serial", adds or AddTimes()
    among = cluster.devices if workers is None else workers
    wires = Wires(workers=among, rate_bps=cluster.nics.rate_bps, latency_s=cluster.nics.latency_s)
    around_a_switch = cluster.is_flat and order is None and among <= cluster.devices
    known = CollectiveTime(
        op=op,
        algorithm=algorithm,
        workers=among,
        bytes=size_bytes,
        bandwidth_bps=wires.rate_bps,
        latency_s=wires.latency_s,
        chunks=chunks,
        chunk_order=chunk_order,
        level=level,
        time_s=0.0,
        bus_bandwidth_bps=0.0,
        transfers=None,
        cluster=cluster.name,
    )
    if level == "closed" and around_a_switch and statement(op, algorithm).costs is not None:
        time_s = exact_s(op, algorithm, wires, size_bytes, adds, chunks=chunks, serial=serial)
        return _taking(known, time_s)
    if cluster.devices > MOST_DEVICES:
        raise UsageError(
            f"{cluster.devices:,} workers are too many to play one by one, at most "
            f"{MOST_DEVICES:,}: ask with --level closed"
        )
    where = placed(plan_on(op, algorithm, cluster, workers, servers), cluster, order)
    if level == "closed":
        time_s = _closed_s(where, cluster, size_bytes, adds, chunks, serial)
        return _with_busiest(_taking(known, time_s), where, cluster)
    alike = folded(where, cluster) if folds else unfolded(where, cluster)
    time_s, transfers, played = _play(alike, where, size_bytes, adds, chunks, serial, told)
    time_s += cluster.startup_s if transfers else 0.0
    timed = replace(_taking(known, time_s), transfers=transfers, played=played)
    return _with_busiest(timed, where, cluster)


def _taking(known: CollectiveTime, time_s: float) -> CollectiveTime:
    """Fill in how long a collective takes."""
    moved_bits = 8 * known.bytes * bus_factor(known.op, known.workers)
    bus_bps = moved_bits / time_s if time_s > 0 else 0.0
    return replace(known, time_s=time_s, bus_bandwidth_bps=bus_bps)


def quickest_time(
    names: Sequence[str],
    timed: Callable[[str], CollectiveTime],
    tuning: Tuning,
    *,
    left_out: Mapping[str, str],
    library_ways: tuple[str, ...],
    in_use: str | None = None,
) -> TunedTime:
    """Time a collective by each of these algorithms, and take the quickest."""
    times: list[CollectiveTime] = []
    left_out = dict(left_out)
    for name in names:
        try:
            times.append(timed(name))
        except UsageError as error:
            left_out[name] = str(error)
    if not times:
        raise UsageError(f"no algorithm could be timed: {next(iter(left_out.values()))}")
    best = min(times, key=lambda known: known.time_s)  # of equals the first
    return TunedTime(
        **{column.name: getattr(best, column.name) for column in fields(best)},
        times_s={known.algorithm: known.time_s for known in times},
        left_out=left_out,
        tuning=tuning,
        library_ways=library_ways,
        in_use=in_use,
    )


def played_times_s(
    where: Placed,
    cluster: Cluster,
    sizes_bytes: Sequence[int],
    most_played: int,
    chunks: int = 1,
) -> Floats | None:
    """Play a plan for some sizes, start-up left out; None if that takes too many transfers."""
    alike = folded(where, cluster)
    if _counted(alike, where)[1] * chunks > most_played:
        return None
    played = [_play(alike, where, size, AddTimes(), chunks, False, None) for size in sizes_bytes]
    return np.array([time_s for time_s, _, _ in played])


def _with_busiest(known: CollectiveTime, where: Placed, cluster: Cluster) -> CollectiveTime:
    blocks = where.blocks_over_links(cluster.link_count)
    if not blocks.any() or known.time_s == 0:
        return known
    busy_s = blocks * (8 * known.bytes / where.plan.message_blocks) / cluster.link_rate_bps
    link = int(np.argmax(busy_s))
    return replace(
        known,
        busiest=LINK_KINDS[cluster.link_kind[link]],
        busiest_link=cluster.link_names[link],
        busiest_share=float(busy_s[link] / known.time_s),
    )


def _closed_s(
    where: Placed, cluster: Cluster, size_bytes: int, adds: AddTimes, chunks: int, serial: bool
) -> float:
    known = cost_of(where, cluster)
    if not known.is_exact:
        raise UsageError(
            f"no closed form is exact for {where.plan.op} by {where.plan.algorithm} on "
            f"{cluster.name}: ask with --level event"
        )
    if chunks > 1 and not serial:
        raise UsageError(
            "no closed form is exact for pipelined chunks on a described cluster: "
            "ask with --level event, --chunks 1 or --chunk-order serial"
        )
    moving_s = float(known.whole_s(size_bytes / chunks, adds)) - known.startup_s
    return known.startup_s + chunks * moving_s


def _play(
    alike: Alike,
    where: Placed,
    size_bytes: int,
    adds: AddTimes,
    chunks: int,
    serial: bool,
    told: Told | None,
) -> tuple[float, int, int]:
    from fullwire import _native

    plan = where.plan
    _, played = _counted(alike, where)
    kept = sum(len(stage) for part in alike.transfers for stage in part)
    kept += alike.seats * len(alike.transfers)
    at_once = kept * (1 if serial else chunks)
    if played * chunks > MOST_PLAYED or at_once > MOST_AT_ONCE:
        raise UsageError(
            f"{plan.op}: expected at most {MOST_PLAYED:,} different transfers and {MOST_AT_ONCE:,} "
            f"places of chunks, got {played * chunks:,} and {at_once:,}. Ask with fewer chunks, "
            "another algorithm, or --level closed"
        )
    whole = chunks * plan.transfer_count()
    block_bytes = size_bytes / chunks / plan.message_blocks
    columns = []  # each part as the engine takes it
    for stages, of_stages in zip(plan.stages, alike.transfers, strict=True):
        counts = [len(connections) for connections in of_stages]
        size = np.array([stage.block_count * block_bytes for stage in stages], np.float64)
        add_s = np.where([stage.reduces for stage in stages], adds(size), 0.0)
        columns.append(
            (
                np.array([stage.rounds for stage in stages], np.int64),
                np.cumsum([0, *counts], dtype=np.int64),
                np.concatenate(of_stages),
                np.repeat(size, counts),
                np.repeat(add_s, counts),
            )
        )
    time_s, transfers = _native.play(
        alike.seats,
        alike.bytes_per_s,
        alike.source,
        alike.target,
        alike.latency_s,
        alike.stands_for,
        alike.crossings_begin,
        alike.link,
        alike.weight,
        columns,
        chunks,
        serial,
        None if told is None else lambda done: told(done, whole),
    )
    return time_s, transfers, played * chunks


def _counted(alike: Alike, where: Placed) -> tuple[int, int]:
    """Count the transfers of one chunk: those kept at once, and all that are played."""
    pairs = [
        (len(transfers), stage.rounds)
        for stages, kept in zip(where.plan.stages, alike.transfers, strict=True)
        for stage, transfers in zip(stages, kept, strict=True)
    ]
    return sum(rows for rows, _ in pairs), sum(rows * rounds for rows, rounds in pairs)


def check_conditions(chunks: int, chunk_order: str, level: str) -> None:
    """Refuse impossible numbers of chunks, and unknown orders and levels."""
    if not isinstance(chunks, int) or chunks < 1:
        raise UsageError(f"chunks: expected a whole number, at least 1, got {shown(chunks)}")
    if chunk_order not in CHUNK_ORDERS:
        raise UsageError(f"chunk order: expected pipelined or serial, got {chunk_order!r}")
    if level not in LEVELS:
        raise UsageError(f"level: expected closed or event, got {level!r}")
