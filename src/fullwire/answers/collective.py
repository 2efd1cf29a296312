"""How long does one collective take on this cluster?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fullwire.answers.believable import check_shares, check_times
from fullwire.answers.conditions import (
    OneOrMany,
    device_order,
    is_scattered,
    rate,
    worker_count,
)
from fullwire.answers.conditions import latency as read_latency
from fullwire.clusters import ClusterLike
from fullwire.clusters import cluster as described_cluster
from fullwire.clusters.cluster import Cluster, one_switch, scattered, with_workers
from fullwire.collectives.cost import AddTimes, Floats, bus_factor
from fullwire.collectives.left_open import nics_at, nics_left_open
from fullwire.collectives.library import (
    FITTED_OPS,
    around,
    by_protocols,
    library_time,
    library_times_s,
    with_large,
)
from fullwire.collectives.link_cost import collective_cost
from fullwire.collectives.playing import (
    Between,
    CollectiveTime,
    Told,
    check_conditions,
    collective_time,
    quickest_time,
)
from fullwire.collectives.registry import (
    BY_NODE_SWITCHES,
    OPS,
    open_to,
    usual_algorithm,
    with_formula,
)
from fullwire.collectives.tuning import (
    AUTO,
    MOST_BYTES,
    around_a_switch,
    or_as_libraries,
    or_in_chunks,
    over_links,
    tuned,
)
from fullwire.collectives.usual import usual
from fullwire.errors import UsageError
from fullwire.simulation.on_links import believed_cost, chunked_s
from fullwire.units import count, shown, size_bytes

_SERVED = "parameter-server"
_CHUNKS, _LEAST_CHUNK_BYTES = (4, 32), 128 * 1024  # The chunks that "auto" tries between phases.
# In an all-to-all each chunk is in a round of its own, on connections of its own, so all of them
# share links: each transfer takes longer to play, too. So many different transfers, times the
# square of the chunks, take some two seconds.
_MOST_IN_CHUNKS = 320_000
_IN_PHASES = ("hierarchical", "in-network")


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
    level: str | None = None,
    reduce_cost: str | Path | None = None,
    cluster: ClusterLike | None = None,
    nodes: str | int | None = None,
    placement: str = "packed",
    order: OneOrMany = None,
    servers: int = 1,
    progress: Told | None = None,
) -> CollectiveTime:
    """Time a collective of a given size: `allreduce`, `reducescatter`, `allgather` and others.

    - `op`: one of them, by its name.
    - `bytes`: the size of the whole vector, `"64MiB"` or a number.
    - `workers`, `bandwidth` (bits per second), `latency` (seconds): those of one switch. On a
      described cluster workers are its devices, and bandwidth and latency those of its NICs.
    - `algorithm`: its name. `"auto"` times all that can be used here, takes the quickest and gives
      the reason.
    - `chunks`, `chunk_order`: the number of pieces of the vector, and `"pipelined"` or `"serial"`.
    - `level`: `"event"` plays every transfer. `"closed"` uses a formula where one is exact.
      Without it, tables give the time that a library takes: a fitted cluster's, or public ones.
    - `reduce_cost`: a file of measured additions, `bytes,seconds` a line.
    - `cluster`, `nodes`: a described cluster, by name or file, and how many nodes it has.
    - `placement`, `order`: ranks `"packed"` or `"scattered"`, or rank r on device `order[r]`.
    - `servers`: how many servers a parameter server has.
    - `progress`: is called with the number of transfers that are done, and of all.

    Times of the answer are seconds, bandwidths bits per second.

        fw.collective("allreduce", bytes="64MiB", workers=8, bandwidth="100Gbps").time_s
    """
    op, size = _folded(op), size_bytes(bytes, "bytes")
    adds = AddTimes()
    if reduce_cost is not None:
        from fullwire.importers.netx import read_reduce_cost  # here: it loads what runs are

        adds = read_reduce_cost(Path(reduce_cost))
    servers = count(servers, "servers")
    if servers > 1 and algorithm not in (AUTO, _SERVED):
        raise UsageError(f"servers: expected algorithm {_SERVED}, got {algorithm or 'none'}")
    among = None if workers is None else worker_count(workers)
    order = None if order is None else device_order(order)
    where = _where(cluster, nodes, among, bandwidth, latency)
    if is_scattered(where, placement):
        if order is not None:
            raise UsageError("order: expected either an order, or ranks scattered over the leaves")
        order = [int(device) for device in scattered(where)[:among]]
    is_one_switch = replace(where, startup_s=0.0).is_flat
    has_library = op in FITTED_OPS and not where.is_torus and level is None
    by_library = has_library and (chunks, reduce_cost) == (1, None)
    has_protocols = not is_one_switch if where.measured is None else servers == 1
    check_conditions(chunks, chunk_order, level or "event")
    library_on = where if by_library and has_protocols else None
    if has_library and not is_one_switch:
        where = with_large(where, where.measured or usual(where), op)
    how: dict[str, Any] = {"chunk_order": chunk_order, "level": level or "event", "adds": adds}
    how |= {"workers": among, "order": order, "servers": servers, "told": progress}
    question = _Asked(
        op=op,
        size_bytes=size,
        by_protocol=by_protocols(where, op),
        library_on=library_on,
        is_described=cluster is not None,
        cuts=_CHUNKS if by_library and cluster is not None and chunk_order != "serial" else (),
        how=how,
        chunks=chunks,
    )
    return question.answered(algorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A collective that is to be played by one algorithm or another."""

    op: str
    size_bytes: int
    by_protocol: tuple[Cluster, ...]  # The machine as each protocol uses it, for large ones last.
    library_on: Cluster | None  # The description, where the protocols of libraries apply.
    is_described: bool
    cuts: tuple[int, ...]  # Other chunks that are tried between the phases of a hierarchy.
    chunks: int
    how: Mapping[str, Any]

    def timed(self, name: str, chunks: int | None = None) -> CollectiveTime:
        """Time the collective by one algorithm."""
        cut, where = chunks or self.chunks, self.quickest_protocol(name)
        time = collective_time(self.op, name, where, self.size_bytes, chunks=cut, **self.how)
        check_times(f"{self.op} {name}", time=time.time_s)
        check_shares(f"{self.op} {name}", busiest_link_share=time.busiest_share)
        low_s, high_s = around(time.time_s, where, self.op, time.workers)
        interval = Between(low_s=low_s, high_s=high_s)
        left_open = nics_left_open(where, time.workers)[0]
        time = replace(time, interval=interval, open_of_nics=left_open)
        return time if self.is_described else replace(time, cluster=None)

    @property
    def where(self) -> Cluster:
        """Return the machine as the protocol for large messages uses it."""
        return self.by_protocol[-1]

    def quickest_protocol(self, name: str) -> Cluster:
        """Return the machine as the quickest protocol for this size uses it."""
        if len(self.by_protocol) == 1:
            return self.where
        how = {key: self.how[key] for key in ("workers", "order", "servers")}

        def whole_s(where: Cluster) -> float:
            cost = collective_cost(self.op, name, where, **how)
            return float(cost.whole_s(self.size_bytes, self.how["adds"]))

        return min(self.by_protocol, key=whole_s)

    def answered(self, name: str | None) -> CollectiveTime:
        """Time the algorithm of this name; without one, as a library takes it, if that is known."""
        if name is None and self.library_on is not None:
            return self.by_library()
        name = name or usual_algorithm(self.op, self.where)
        return self.by_name(name) if name != AUTO else self.quickest()

    def by_name(self, name: str) -> CollectiveTime:
        """Time an algorithm that is asked for: by the cluster's own tables if its library has it.

        Without an algorithm, and among others, the tables give its time as well.
        """
        is_fitted = self.library_on is not None and self.library_on.measured is not None
        by_library = is_fitted and name in self.library_ways
        return self.by_library(name) if by_library else self.timed(name)

    def by_library(self, name: str | None = None) -> CollectiveTime:
        """Time it as libraries take it, and ranks in another order by the ratio that they play in.

        No table is of them. A library sorts the ranks of a node, so they may take what packed ones
        take.
        """
        packed = self.among_packed(name)
        if self.how["order"] is None or packed.interval is None or not packed.time_s:
            return packed
        can_play = packed.algorithm in self.tried
        played = packed.algorithm if can_play else usual_algorithm(self.op, self.where)
        alike = replace(self, how={**self.how, "order": None})
        times = self.timed(played).time_s / alike.timed(played).time_s
        low_s = packed.interval.low_s * min(times, 1.0)
        high_s = packed.interval.high_s * max(times, 1.0)
        return replace(
            packed,
            time_s=packed.time_s * times,
            bus_bandwidth_bps=packed.bus_bandwidth_bps / times,
            interval=Between(low_s=low_s, high_s=high_s),
            times_packed=times,
        )

    def among_packed(self, name: str | None = None) -> CollectiveTime:
        """Time it among packed ranks by the tables of the cluster, or of others like it."""
        op, size, workers, where = self.op, self.size_bytes, self.among, self.library_on
        assert where is not None
        library = library_time(op, where, size, workers, name)
        check_times(op, time=library.time_s)
        return CollectiveTime(
            op=op,
            algorithm=library.algorithm,
            workers=workers,
            bytes=size,
            bandwidth_bps=where.nics.rate_bps,
            latency_s=where.nics.latency_s,
            chunks=1,
            chunk_order="pipelined",
            level="usual" if where.measured is None else "tables",
            time_s=library.time_s,
            bus_bandwidth_bps=8 * size * bus_factor(op, workers) / library.time_s
            if library.time_s
            else 0.0,
            transfers=None,
            cluster=where.name,
            busiest=library.busiest,
            protocol=library.protocol,
            tables_lack=library.lacks,
            may_take=library.may_take,
            may_add=library.may_add,
            pair_is_open=library.pair_is_open,
            open_of_nics=library.open_of_nics,
            rests_on_least=library.rests_on_least,
            stated_startup_s=where.startup_s if where.measured is None else 0.0,
            interval=Between(low_s=library.low_s, high_s=library.high_s),
        )

    @property
    def among(self) -> int:
        """Return the number of workers."""
        return self.how["workers"] or self.where.devices

    @property
    def library_ways(self) -> tuple[str, ...]:
        """Return the algorithms that are also timed as libraries take them."""
        if self.library_on is None or self.among == 1:
            return ()
        return tuple(library_times_s(self.op, self.library_on, self.among, np.ones(1)))

    @property
    def tried(self) -> tuple[str, ...]:
        """Return the algorithms that are played."""
        is_in_order = self.how["order"] is None
        return open_to(self.op, self.where, self.how["workers"], in_order=is_in_order)

    def quickest(self) -> CollectiveTime:
        """Time the collective by all algorithms that can be used here, and return the quickest."""
        op, where, adds, order = self.op, self.where, self.how["adds"], self.how["order"]
        by_protocol = self.by_protocol
        tried, library_ways, in_chunks = self.tried, self.library_ways, self.curves_in_chunks()
        if where.is_flat and order is None and set(tried) <= set(with_formula(op)):
            times_s = around_a_switch(op, where, adds)
        else:
            costs = {
                name: [believed_cost(op, name, each, self.among, order) for each in by_protocol]
                for name in tried
            }
            times_s = or_in_chunks(over_links(costs, adds), in_chunks)
        if library_ways and self.library_on is not None and order is None:
            times_s = or_as_libraries(times_s, op, self.library_on, self.among)
        left_out, inside = {}, where.inside
        can_add = op == "allreduce" and self.among > 1 and inside is not None and inside.can_add
        by_switches = BY_NODE_SWITCHES[self.among > where.devices_per_node]
        if can_add and library_ways and by_switches not in library_ways:
            measured = None if self.library_on is None else self.library_on.measured
            may_add = measured is not None and any(each.switch_share for each in measured.allowed())
            left_out[by_switches] = (
                "its tables leave open whether the library of this cluster uses it, and the "
                "likeliest fit does not. The interval of the time without --algorithm holds both"
                if may_add
                else "by its tables, the library of this cluster does not use it"
            )
        elif can_add and not library_ways:
            left_out[by_switches] = (
                "tables time switches that add within a node: those of a fitted cluster, or public "
                "ones. None does with chunks, a level, "
                "several servers or --reduce-cost"
            )
        names = (*dict.fromkeys((*tried, *library_ways)),)
        in_one_piece = tuple(name for name in self.in_phases if name not in in_chunks)
        return quickest_time(
            names,
            self.in_best_way,
            tuned(times_s, in_one_piece),
            left_out=left_out,
            library_ways=library_ways,
            in_use=self.in_use,
        )

    @property
    def in_use(self) -> str | None:
        """Return the algorithm that the library of a fitted cluster takes, by its tables."""
        if self.library_on is None or self.library_on.measured is None or self.among == 1:
            return None
        return self.by_library().algorithm

    def in_best_way(self, name: str) -> CollectiveTime:
        """Time an algorithm as libraries take it, and played, and return the quicker.

        Where the cluster's own tables say what its library takes, they alone count.
        """
        times = []
        if name in self.library_ways and self.library_on is not None:
            times.append(self.by_library(name))
            if self.library_on.measured is not None:
                return times[0]
        if name in self.tried:
            try:
                times.append(self.in_best_chunks(name))
            except UsageError:  # such as for too many transfers
                if not times:
                    raise
        return min(times, key=lambda timed: timed.time_s)

    def in_best_chunks(self, name: str) -> CollectiveTime:
        """Time an algorithm, with its phases side by side where that is quicker.

        Where many transfers of an all-to-all differ, fewer chunks are tried: more would take
        minutes to play, and gain little.
        """
        whole, cuts = self.timed(name), set()
        different = (whole.played or 0) if self.op == "alltoall" else 0
        for cut in self.cuts if name.startswith(_IN_PHASES) else ():
            while cut > 1 and different * cut**2 > _MOST_IN_CHUNKS:
                cut //= 2
            if cut > 1 and self.size_bytes >= cut * _LEAST_CHUNK_BYTES:
                cuts.add(cut)
        in_chunks = (self.timed(name, cut) for cut in sorted(cuts))
        return min((whole, *in_chunks), key=lambda timed: timed.time_s)

    @property
    def in_phases(self) -> tuple[str, ...]:
        """Return the algorithms that are also tried in chunks."""
        return tuple(name for name in self.tried if self.cuts and name.startswith(_IN_PHASES))

    def curves_in_chunks(self) -> dict[str, list[tuple[Floats, Floats]]]:
        """Return sizes and their times in chunks, for each hierarchy that is quickly played."""
        curves = {}
        for name in self.in_phases:
            of_name = []
            for cut in sorted(self.cuts, reverse=True):  # the longest play first
                least = cut * _LEAST_CHUNK_BYTES
                sizes = {least << power for power in range((MOST_BYTES // least).bit_length())}
                sizes |= {self.size_bytes} if self.size_bytes >= least else set()
                shown = sorted(sizes)
                played = [
                    chunked_s(self.op, name, where, self.among, shown, cut)
                    for where in self.by_protocol
                ]
                shown_s = [times_s for times_s in played if times_s is not None]
                if not shown_s:
                    break
                of_name.append((np.array(shown, np.float64), np.min(shown_s, axis=0)))
            else:
                curves[name] = of_name
        return curves


def _folded(op: str) -> str:
    """Return the name of a collective without the marks in which spellings differ."""
    if not isinstance(op, str):
        raise UsageError(f"collective: expected one of {', '.join(OPS)}, got {shown(op)}")
    return op.lower().replace("-", "").replace("_", "")


def _where(
    named: ClusterLike | None,
    nodes: str | int | None,
    workers: int | None,
    bandwidth: str | float | None,
    latency: str | float | None,
) -> Cluster:
    """Return one switch, or the named cluster with the NICs that are asked for."""
    if named is None:
        if workers is None or bandwidth is None:
            raise UsageError("collective: expected workers and bandwidth, or a described cluster")
        if nodes is not None:
            raise UsageError("nodes: expected a described cluster with them")
        latency_s = read_latency(0.0 if latency is None else latency)
        return one_switch(workers=workers, rate_bps=rate(bandwidth), latency_s=latency_s)
    where = described_cluster(named, None if nodes is None else count(nodes, "nodes"))
    if nodes is not None and workers is not None and workers > where.devices:
        needed = -(-workers // where.devices_per_node)
        raise UsageError(
            f"workers: expected at most {where.devices:,} on nodes = {where.nodes:,} of "
            f"{where.name}, got {workers:,}, which need nodes = {needed:,}"
        )
    nics = where.nics
    if bandwidth is not None:
        nics = nics_at(where, rate(bandwidth))
    if latency is not None:
        nics = replace(nics, latency_s=read_latency(latency))
    where = replace(where, nics=nics)
    return where if workers is None else with_workers(where, workers)
