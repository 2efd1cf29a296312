"""One collective on a described cluster: over its links in events, or in closed form.

Ranks that are alike do the same at the same times, so only one of each kind is played
(native/events/folding.hpp says what alike is); a slow host makes others unlike, as far as its being
slow reaches. How many transfers were played follows the kinds there are, not the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from fullwire.clusters.fabric import LINK_KINDS, Fabric, Floats, Ints
from fullwire.collectives.cluster_plan import plan_on
from fullwire.collectives.cost import AddTimes, bus_factor
from fullwire.collectives.fabric_cost import cost_of
from fullwire.collectives.placed import Placed, placed
from fullwire.collectives.playing import CollectiveTime, check_conditions
from fullwire.collectives.stages import Int32
from fullwire.errors import UsageError

MOST_PLAYED = 1_000_000_000
MOST_AT_ONCE = 30_000_000  # transfers of all chunks whose progress is kept: some 1 GB
Told: TypeAlias = Callable[[int, int], None]


def fabric_time(
    op: str,
    algorithm: str,
    fabric: Fabric,
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

    Rank r is on device `order[r]`, or on device r. `told` hears how many of how many transfers are
    done.
    """
    check_conditions(chunks, chunk_order, level)
    plan = plan_on(op, algorithm, fabric, workers, servers)
    where = placed(plan, fabric, order)
    serial = chunk_order == "serial"
    adds = adds or AddTimes()
    transfers = played = None
    if level == "closed":
        time_s = _closed_s(where, fabric, size_bytes, adds, chunks, serial)
    else:
        alike = _folded(where, fabric) if folds else _unfolded(where, fabric)
        time_s, transfers, played = _play(alike, where, size_bytes, adds, chunks, serial, told)
        time_s += fabric.startup_s if transfers else 0.0
    moved_bits = 8 * size_bytes * bus_factor(op, plan.workers)
    known = CollectiveTime(
        op=op,
        algorithm=algorithm,
        workers=plan.workers,
        bytes=size_bytes,
        bandwidth_bps=fabric.nics.rate_bps,
        latency_s=fabric.nics.latency_s,
        chunks=chunks,
        chunk_order=chunk_order,
        level=level,
        time_s=time_s,
        bus_bandwidth_bps=moved_bits / time_s if time_s > 0 else 0.0,
        transfers=transfers,
        cluster=fabric.name,
        played=played,
    )
    return _with_busiest(known, where, fabric)


def played_times_s(
    where: Placed, fabric: Fabric, sizes_bytes: Sequence[int], most_played: int
) -> Floats | None:
    """Play a plan for some sizes, without its start-up; None if that takes too many transfers."""
    alike = _folded(where, fabric)
    if _counted(alike, where)[1] > most_played:
        return None
    played = [_play(alike, where, each, AddTimes(), 1, False, None) for each in sizes_bytes]
    return np.array([time_s for time_s, _, _ in played])


def _with_busiest(known: CollectiveTime, where: Placed, fabric: Fabric) -> CollectiveTime:
    blocks = where.blocks_over_links(fabric.link_count)
    if not blocks.any() or known.time_s == 0:
        return known
    busy_s = blocks * (8 * known.bytes / where.plan.message_blocks) / fabric.link_rate_bps
    link = int(np.argmax(busy_s))
    return replace(
        known,
        busiest=LINK_KINDS[fabric.link_kind[link]],
        busiest_link=fabric.link_names[link],
        busiest_share=float(busy_s[link] / known.time_s),
    )


def _closed_s(
    where: Placed, fabric: Fabric, size_bytes: int, adds: AddTimes, chunks: int, serial: bool
) -> float:
    known = cost_of(where, fabric)
    if not known.is_exact:
        raise UsageError(
            f"no closed form is exact for {where.plan.op} by {where.plan.algorithm} on "
            f"{fabric.name}: ask with --level event"
        )
    if chunks > 1 and not serial:
        raise UsageError(
            "no closed form is exact for pipelined chunks on a described cluster: "
            "ask with --level event, --chunks 1 or --chunk-order serial"
        )
    moving_s = float(known.whole_s(size_bytes / chunks, adds)) - known.startup_s
    return known.startup_s + chunks * moving_s


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Alike:
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


def _unfolded(where: Placed, fabric: Fabric) -> _Alike:
    routes = where.routes
    return _Alike(
        seats=where.plan.seats,
        bytes_per_s=fabric.link_rate_bps / 8,
        source=where.source,
        target=where.target,
        latency_s=routes.latency_s,
        stands_for=np.ones(len(where), np.int64),
        crossings_begin=routes.begin,
        link=routes.link,
        weight=np.ones_like(routes.link),
        transfers=where.transfers,
    )


def _folded(where: Placed, fabric: Fabric) -> _Alike:
    from fullwire import _native  # loaded only where events are asked for

    routes = where.routes
    used, link = np.unique(routes.link, return_inverse=True)
    rates_bps, rate = np.unique(fabric.link_rate_bps[used], return_inverse=True)
    seat_class, class_of, link_class = _native.fold(
        where.plan.seats,
        where.source,
        where.target,
        routes.begin,
        link.astype(np.int32),
        _roles(where),
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
    return _Alike(
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


def _roles(where: Placed) -> Int32:
    """Number connections by the stages that they transfer in, and by their latency."""
    # A role is the sum of a random number for each of its stages: two roles with one sum are as
    # likely as two random 64-bit numbers being equal.
    draw = np.random.Generator(np.random.PCG64(8)).integers
    sums = np.zeros(len(where), np.uint64)
    for part in where.transfers:
        for stage in part:
            np.add.at(sums, stage, draw(0, 2**64, dtype=np.uint64))
    _, latency = np.unique(where.routes.latency_s, return_inverse=True)
    _, role = np.unique(sums, return_inverse=True)
    _, both = np.unique(latency * (role.max(initial=0) + 1) + role, return_inverse=True)
    return both.astype(np.int32)


def _play(
    alike: _Alike,
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
    _refuse_endless(plan.op, alike, played, chunks, serial)
    whole = chunks * plan.transfer_count()
    block_bytes = size_bytes / chunks / plan.message_blocks
    time_s, transfers = _native.play_fabric(
        alike.seats,
        alike.bytes_per_s,
        alike.source,
        alike.target,
        alike.latency_s,
        alike.stands_for,
        alike.crossings_begin,
        alike.link,
        alike.weight,
        [_columns(where, alike, part, block_bytes, adds) for part in range(len(plan.stages))],
        chunks,
        serial,
        None if told is None else lambda done: told(done, whole),
    )
    return time_s, transfers, played * chunks


def _columns(
    where: Placed, alike: _Alike, part: int, block_bytes: float, adds: AddTimes
) -> tuple[Ints, Floats, Floats, Ints, Int32]:
    """Return a part as the engine takes it."""
    stages, transfers = where.plan.stages[part], alike.transfers[part]
    size = np.array([stage.block_count * block_bytes for stage in stages], np.float64)
    add_s = np.where([stage.reduces for stage in stages], adds(size), 0.0)
    begin = np.cumsum([0, *map(len, transfers)], dtype=np.int64)
    rounds = np.array([stage.rounds for stage in stages], np.int64)
    return rounds, size, add_s, begin, np.concatenate(transfers)


def _counted(alike: _Alike, where: Placed) -> tuple[int, int]:
    """Count transfers kept at once, and played in all, of one chunk."""
    pairs = [
        (len(transfers), stage.rounds)
        for stages, kept in zip(where.plan.stages, alike.transfers, strict=True)
        for stage, transfers in zip(stages, kept, strict=True)
    ]
    return sum(rows for rows, _ in pairs), sum(rows * rounds for rows, rounds in pairs)


def _refuse_endless(op: str, alike: _Alike, played: int, chunks: int, serial: bool) -> None:
    kept = sum(len(stage) for part in alike.transfers for stage in part)
    kept += alike.seats * len(alike.transfers)
    at_once = kept * (1 if serial else chunks)
    if played * chunks > MOST_PLAYED or at_once > MOST_AT_ONCE:
        raise UsageError(
            f"{op}: {played * chunks:,} transfers that are not alike are too many to play one by "
            f"one (at most {MOST_PLAYED:,}, and {MOST_AT_ONCE:,} places of chunks at once, here "
            f"{at_once:,}): ask with fewer chunks, another algorithm, or --level closed"
        )
