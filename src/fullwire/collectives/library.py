"""The time of a collective library such as NCCL: its protocols, a ring, a tree between nodes.

The event engine times only the links. A library on a machine takes longer. It starts kernels, waits
on every hop, and has protocols that start quickly and fill little. Here each algorithm is its hops
and its bytes (`Needs`), as in NCCL's own tuning model (src/graph/tuning.cc). A ring over n ranks on
k nodes has 2(n-1) hops, 2k of them between nodes. A tree goes along the devices of a node and over
a binary tree of nodes, up and down. A protocol of the cluster (clusters/measured.py) turns these
into a time. The library is assumed to use the quickest way.

Tables may differ from the protocols, as at a size at which the library chooses badly. That
difference is carried over to other device counts, less of it the farther away they are. Counts
within a node tell nothing about counts over several nodes, and the other way round.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from fullwire.clusters.cluster import (
    IN_NODE,
    LINK_KINDS,
    NIC,
    Cluster,
    Floats,
    Ints,
    LeafSpine,
    Torus,
    with_fastest_inside,
)
from fullwire.clusters.measured import Measured, Protocol, Shown
from fullwire.collectives.left_open import (
    OpenOfNics,
    nics_left_open,
    of_this_side,
    rests_on_least_rate,
    shows_nics_by_rings,
    with_fastest_nics,
)
from fullwire.collectives.registry import names, usual_algorithm
from fullwire.collectives.usual import (
    USUAL_PAIR_SHARE,
    USUAL_PROTOCOLS,
    USUAL_TREE_SHARE,
    ends_of_transport,
    usual,
)
from fullwire.errors import UsageError
from fullwire.units import show_bytes

FITTED_OPS = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall")
_REACH = 3.0  # doublings of the device count over which a table's effect fades to 1/e
_CLEARLY = 0.8  # of the distance: tables then follow a device's share and not the whole size
_OWN_NOISE = 0.03  # a table's own variance, as a share of that common to device counts

# How sure a time is, as standard deviations of its logarithm. Those that apply add up as squares.
# `_OF_DOUBLING` is for each doubling away from the nearest table. `_OF_OTHER_OP` is for an
# operation without a table. `_OF_OTHER_SIDE` is for counts within a node where all tables are of
# several nodes, or the other way round. It is also for an all-to-all over several nodes where the
# tables of several nodes are of rings, or the other way round. `_OF_SMALL` is for a small message,
# because libraries change protocols at sizes of their own. These widths and the start-ups above
# were chosen on the public tables of `validation.machines`. So only the device counts that a fit
# has not seen are truly held out.
_OF_DOUBLING, _OF_OTHER_OP, _OF_OTHER_SIDE = 0.06, 0.12, 0.3
# `_OF_OTHER_SIZE` is for each doubling away from the sizes of the tables, where times there had
# not settled.
_OF_OTHER_SIZE, _MOST_UNSETTLED = 0.15, 1.0  # and so many such doublings are told
_SMALL_BYTES, _OF_SMALL, _OF_SMALL_AND_USUAL = 2**22, 0.1, 0.35
_WIDTH = 1.8  # standard deviations on each side
_TOLD_APART = 0.1  # of the logarithm of a time: fits that are this close have one answer
_OF_CLOUD_S = 120e-6  # Networks of clouds take so much longer between nodes. A table tells.
_QUICKER, _LEAST_FILLED = 0.9, 0.55  # of the time that links allow, of their rate
# A device also copies its own share of the vector, which no link carries. Its cost, as a share of
# that of a byte on the link: 0.1 to 0.8 in the tables of seven kinds of devices, mostly 0.3 to 0.5.
_OWN_SHARE = 0.4
# Of a ring's time between nodes: links in a node that take so long may hold it up. It is chosen on
# one pair of nodes.
_HELD_UP = 0.8

FIRST_IN_PAIRS = -2  # of the protocols: libraries send point to point by no quicker-starting one


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Needs:
    """The needs of an algorithm: messages in a row, and seconds a byte at the full line rates.

    With `is_tree`, a tree is between the nodes. Where a tree of two nodes gains nothing over a
    ring, a byte takes `pair_s` more. Where it sends half, a byte takes `half_share` of that more:
    the busiest of two nodes has one edge, and others have more. With `by_switch`, the switches of
    the nodes add. Libraries do that by their protocol for large messages only, and point to point
    not by that for small ones: `first_protocol` counts those that are left out. `copied_s` is the
    part of `inside_s` that no link carries.
    """

    inside_hops: float
    between_hops: float
    inside_s: float
    between_s: float
    is_tree: bool = False
    by_switch: bool = False
    first_protocol: int = 0
    pair_s: float = 0.0
    half_share: float = 0.0
    copied_s: float = 0.0

    def byte_s(self, measured: Measured, protocol: Protocol) -> tuple[float, float]:
        """Return the time of a byte on the links within a node, and on those between nodes."""
        switch_share = measured.switch_share if self.by_switch else 1.0
        share = measured.half * self.half_share + (1 - measured.half) * measured.pair_share
        between_s = self.between_s + share * self.pair_s
        is_ring = not self.is_tree and self.first_protocol != FIRST_IN_PAIRS
        between_share = protocol.between_share * (1 if is_ring else measured.tree_nics_share)
        return self.inside_s / protocol.inside_share / switch_share, between_s / between_share


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryTime:
    """The time of a collective by the way that the library presumably uses, and its range."""

    algorithm: str
    time_s: float
    low_s: float
    high_s: float
    protocol: str | None = None
    busiest: str | None = None  # kind of link
    lacks: tuple[str, ...] = ()  # of this, the cluster has no table, though it has tables
    may_take: str | None = None  # another algorithm, if the tables leave a tree open
    may_add: str | None = None  # another one, if nothing tells whether switches in the nodes add
    pair_is_open: bool = False  # whether two nodes send half as much as more do
    open_of_nics: OpenOfNics | None = None  # what no table tells of them
    rests_on_least: bool = False  # on a rate within a node that is only known to be reached


def needs(
    op: str, cluster: Cluster, workers: int, measured: Measured | None = None
) -> Mapping[str, Needs]:
    """Return the needs of each algorithm of libraries among these devices, in the fit given."""
    if isinstance(cluster.network, Torus):
        raise UsageError(f"{cluster.name}: expected nodes behind switches, and it is a torus")
    if op not in FITTED_OPS:
        raise UsageError(f"collective: expected one of {', '.join(FITTED_OPS)}, got {op!r}")
    devices = cluster.devices_per_node
    nodes, here = -(-workers // devices), min(workers, devices)
    measured = measured or cluster.measured
    # A tree of two nodes sends half where links in a node are fast. They may only look slow.
    half = measured.half if nodes > 1 and measured is not None else 0.0
    links = with_fastest_inside(cluster, half).inside
    inside = 8 / links.rate_bps if links is not None and here > 1 else 0.0
    ring_s, pairs_s = _between(cluster, workers, nodes)
    ring = usual_algorithm(op, cluster)
    if op == "alltoall":
        # Of PCIe, the way to the NIC is the device's own link, too. One pair of nodes shows it.
        through = workers if links is not None and links.kind == "pcie" else here
        return {
            "pairwise": Needs(
                inside_hops=float(here > 1),
                between_hops=float(nodes - 1),
                inside_s=inside * (through - 1 + _OWN_SHARE) / workers,
                between_s=pairs_s,
                first_protocol=FIRST_IN_PAIRS,
                copied_s=inside * _OWN_SHARE / workers,
            )
        }
    rounds = {"allreduce": 2, "broadcast": 1}.get(op, 1)
    sent = 1.0 if op == "broadcast" else rounds * (workers - 1) / workers
    hops, between_hops = rounds * (workers - 1), rounds * nodes if nodes > 1 else 0
    if devices == 1 or op == "broadcast":
        between_hops = hops if devices == 1 else nodes - 1
    own = 0.0 if op == "broadcast" else _OWN_SHARE / workers
    around = Needs(
        inside_hops=hops - between_hops,
        between_hops=between_hops,
        inside_s=inside * (sent + own),
        between_s=ring_s * sent,
        copied_s=inside * own,
    )
    if op != "allreduce":
        return {ring: around}
    # To the switch go all bytes of a device and its share of the sum, and as much comes back.
    by_switch = Needs(
        inside_hops=2,
        between_hops=2 * math.ceil(math.log2(nodes)),
        inside_s=inside * (1 + 1 / here),
        between_s=ring_s * 2 * (nodes - 1) / nodes,
        is_tree=nodes > 2,  # a tree of two nodes sends over each NIC in both directions at once
        by_switch=True,
        first_protocol=-1,
    )
    can_add = cluster.inside is not None and cluster.inside.can_add and here > 1
    switches = {"nvls" if nodes == 1 else "nvls-tree": by_switch} if can_add else {}
    if nodes == 1:
        return {ring: around, **switches}
    tree = Needs(
        inside_hops=2 * (here - 1),
        between_hops=2 * math.ceil(math.log2(nodes)),
        inside_s=2 * inside,
        between_s=ring_s * 2 * (nodes - 1) / nodes,
        is_tree=True,
        pair_s=ring_s * 2 / nodes,
        half_share={2: 0.0, 3: 0.25}.get(nodes, 1.0),
    )
    return {ring: around, "hierarchical-tree" if devices > 1 else "tree": tree, **switches}


def _between(cluster: Cluster, workers: int, nodes: int) -> tuple[float, float]:
    """Return the time between nodes of a byte of the vector: on a ring, and in pairs.

    On a ring all bytes pass every node, so that the node with the fewest NICs in use, or with the
    slowest ones, decides. In pairs each NIC carries what its own devices send to other nodes.
    """
    if nodes == 1:
        return 0.0, 0.0
    devices, network = cluster.devices_per_node, cluster.network
    others_bps = [host.nic_rate_bps for host in cluster.other_hosts if host.node < nodes - 1]
    slowest_bps = min([cluster.nics.rate_bps, *others_bps])
    last, last_bps = workers - (nodes - 1) * devices, cluster.node_rate_bps(nodes - 1)
    ring_s = pairs_s = 0.0
    for here, nic_bps in ((devices, slowest_bps), (last, last_bps)):
        on_nics = _on_nics(cluster, here)
        ring_s = max(ring_s, 8 / (np.count_nonzero(on_nics) * nic_bps))
        pairs_s = max(pairs_s, 8 / nic_bps * on_nics.max() * (workers - here) / workers)
    for together, uplink_bps in cluster.uplinks:
        if nodes <= together:
            continue
        by_rail = isinstance(network, LeafSpine) and network.by_rail
        rails = np.count_nonzero(_on_nics(cluster, last)) if by_rail else 1
        ring_s = max(ring_s, 8 / uplink_bps / rails)
        below = together * devices
        for here in (below, workers % below):  # the devices of a full leaf or pod, and of the last
            through = _on_nics(cluster, here).max() if by_rail else here
            pairs_s = max(pairs_s, 8 / uplink_bps * through * (workers - here) / workers)
    return float(ring_s), float(pairs_s)


def _on_nics(cluster: Cluster, devices: int) -> Ints:
    """Return the number of the first so many devices that use each rail, or each NIC of a node."""
    whole, others = divmod(devices, cluster.devices_per_node)
    of_node, of_others = (
        np.bincount(cluster.nic_of_device[:end], minlength=cluster.nics_per_node)
        for end in (cluster.devices_per_node, others)
    )
    return whole * of_node + of_others


def ways_s(
    measured: Measured, of_algorithms: Mapping[str, Needs], sizes: ArrayLike
) -> tuple[list[tuple[str, Protocol]], Floats]:
    """Return each pair of algorithm and protocol, and for each a row of times at these sizes."""
    size = np.asarray(sizes, np.float64)
    ways, rows = [], []
    for name, need in of_algorithms.items():
        # Switches that add join a tree between nodes, which a library of rings alone lacks.
        has_tree = need.is_tree or (need.by_switch and need.between_hops)
        if (need.by_switch and not measured.switch_share) or (has_tree and not measured.tree_share):
            continue
        share = measured.tree_share if need.is_tree else 1.0
        for protocol in measured.protocols[need.first_protocol :]:
            fixed_s = (
                protocol.startup_s
                + protocol.inside_hop_s * need.inside_hops
                + protocol.between_hop_s * need.between_hops
            )
            ways.append((name, protocol))
            rows.append(fixed_s + size * max(need.byte_s(measured, protocol)) / share)
    return ways, np.stack(rows)


def beside_protocols(
    measured: Measured,
    op: str,
    cluster: Cluster,
    workers: int,
    sizes: ArrayLike,
    machine: Cluster | None = None,
) -> Floats:
    """Return the times that the tables predict, as factors of the protocols' times.

    - `machine`: that of the tables, where the cluster is only what a group sees of it.
    """
    side = of_this_side(measured, cluster, workers, machine)
    alike = [table for table in side if table.op == op]
    if not alike:
        return np.ones(np.size(sizes))
    at = np.log2([table.workers for table in alike])
    power = _follows_share(alike)
    rows = [
        _beyond(table, np.asarray(sizes) * (table.workers / workers) ** power) for table in alike
    ]
    alikeness = np.exp(-np.abs(at[:, None] - at) / _REACH) + _OWN_NOISE * np.eye(len(at))
    weight = np.linalg.solve(alikeness, np.exp(-np.abs(np.log2(workers) - at) / _REACH))
    return np.asarray(np.exp(weight @ np.array(rows)))


def _beyond(table: Shown, sizes: Floats) -> Floats:
    """Return the logarithms of a table's factors at these sizes."""
    return np.interp(np.log(sizes), np.log(table.bytes), np.log(table.times))


def _follows_share(tables: Sequence[Shown]) -> int:
    """Say whether tables are alike at the same size (0), or at the same share of a device (1).

    A library changes its way at sizes of the vector, or at sizes of a device's share of it.
    """
    apart = [0.0, 0.0]
    for one, other in itertools.pairwise(sorted(tables, key=lambda table: table.workers)):
        for power in (0, 1):
            sizes = np.array(one.bytes) * (other.workers / one.workers) ** power
            both = (sizes >= other.bytes[0]) & (sizes <= other.bytes[-1])
            off = _beyond(other, sizes[both]) - np.log(one.times)[both]
            apart[power] += float(np.abs(off).mean()) if both.any() else math.inf
    return int(apart[1] < _CLEARLY * apart[0])


def library_times_s(op: str, cluster: Cluster, workers: int, sizes: Floats) -> dict[str, Floats]:
    """Return the time of each algorithm that a library uses, by the quickest of its protocols.

    They are those of the cluster's tables, or the usual ones.
    """
    measured = cluster.measured or usual(cluster)
    ways, times_s = ways_s(measured, needs(op, cluster, workers), sizes)
    times_s = times_s * beside_protocols(measured, op, cluster, workers, sizes)
    return {
        name: times_s[[way == name for way, _ in ways]].min(axis=0)
        for name in dict.fromkeys(way for way, _ in ways)
    }


def library_time(
    op: str, cluster: Cluster, size_bytes: int, workers: int, algorithm: str | None = None
) -> LibraryTime:
    """Time a collective by the cluster's tables, or by the usual protocols on such links.

    Without an algorithm, a library is taken to choose the quickest. The range holds the answers of
    every fit that its tables allow.
    """
    if workers == 1:
        return LibraryTime(algorithm=names(op)[0], time_s=0.0, low_s=0.0, high_s=0.0)
    measured = cluster.measured or usual(cluster)
    of_algorithms = needs(op, cluster, workers)
    fits = [*measured.allowed()]
    if algorithm is not None:  # by the likeliest library that has it
        by_switch = of_algorithms[algorithm].by_switch
        fits = [fit for fit in fits if fit.switch_share or not by_switch][:1] or fits[:1]
    if cluster.measured is None and workers > cluster.devices_per_node > 1:
        # No table tells what a tree of two sends.
        either = (0.0, USUAL_PAIR_SHARE)
        fits += [replace(measured, pair_share=share, half_weight=0.0) for share in either]
    if cluster.measured is None and cluster.inside is not None and cluster.inside.adds is None:
        fits += [replace(fit, switch_share=0.0) for fit in fits]
    times = [_time_by(fit, op, cluster, size_bytes, workers, algorithm) for fit in fits]
    found = times[0]
    open_ways = (
        time.algorithm
        for fit, time in zip(fits, times, strict=True)
        if bool(fit.tree_share) != bool(measured.tree_share)
        and of_algorithms[time.algorithm].is_tree != of_algorithms[found.algorithm].is_tree
    )
    open_to_adding = (
        time.algorithm
        for fit, time in zip(fits, times, strict=True)
        if bool(fit.switch_share) != bool(measured.switch_share)
        and of_algorithms[time.algorithm].by_switch != of_algorithms[found.algorithm].by_switch
    )
    of_other_pairs = [
        time.time_s
        for fit, time in zip(fits, times, strict=True)
        if bool(fit.pair_share) != bool(measured.pair_share)
        or fit.half_weight != measured.half_weight
        if bool(fit.tree_share) == bool(measured.tree_share)
        and bool(fit.switch_share) == bool(measured.switch_share)
    ]
    return replace(
        found,
        low_s=min(time.low_s for time in times),
        high_s=max(time.high_s for time in times),
        may_take=next(open_ways, None),
        may_add=next(open_to_adding, None),
        pair_is_open=any(abs(math.log(s / found.time_s)) > _TOLD_APART for s in of_other_pairs),
    )


def _time_by(
    measured: Measured,
    op: str,
    cluster: Cluster,
    size_bytes: int,
    workers: int,
    algorithm: str | None,
) -> LibraryTime:
    """Time a collective by these protocols, and their tables."""
    of_algorithms = every = needs(op, cluster, workers, measured)
    if algorithm is not None:  # a way that the library lacks is as it is in other libraries
        of_algorithms = {algorithm: of_algorithms[algorithm]}
        measured = replace(
            measured,
            tree_share=measured.tree_share or USUAL_TREE_SHARE,
            switch_share=measured.switch_share or usual(cluster).switch_share,
        )
    sizes = [float(max(size_bytes, 1))]
    ways, times_s = ways_s(measured, of_algorithms, sizes)
    best = int(np.argmin(times_s[:, 0]))
    way, protocol = ways[best]
    beside = float(beside_protocols(measured, op, cluster, workers, sizes)[0])
    time_s = float(times_s[best, 0]) * beside
    unsettled = doublings_outside(measured, op, cluster, max(size_bytes, 1), workers)
    off = math.exp(_WIDTH * _spread(measured, op, cluster, size_bytes, workers, unsettled))
    open_of_nics, ends = nics_left_open(cluster, workers)
    if op == "alltoall" and shows_nics_by_rings(measured, cluster, workers):
        [ring] = needs("allgather", cluster, workers, measured).values()
        ring_s, ring_between_s = ring.byte_s(measured, measured.protocols[-1])
        if ring_s >= _HELD_UP * ring_between_s or rests_on_least_rate(op, cluster, workers):
            open_of_nics, ends = open_of_nics or "faster", (*ends, with_fastest_nics(cluster))
    is_unknown = cluster.measured is None or open_of_nics == "rate"
    may_be_cloud = is_unknown and workers > cluster.devices_per_node
    inside_s, between_s = of_algorithms[way].byte_s(measured, protocol)
    low_s, high_s = time_s / off, time_s * off
    links_s = [max(way.inside_s - way.copied_s, way.between_s) for way in of_algorithms.values()]
    if sizes[0] * min(links_s) < time_s:  # no library is quicker than links at their full rate
        low_s = max(low_s, sizes[0] * min(links_s))
    for end in ends:
        # A ring has another name among other numbers of NICs.
        there = dict(zip(every, needs(op, end, workers, measured).values(), strict=True))
        there = {name: there[name] for name in of_algorithms}
        end_s = float(ways_s(measured, there, sizes)[1].min()) * beside
        low_s, high_s = min(low_s, end_s / off), max(high_s, end_s * off)
    if may_be_cloud and cluster.measured is None and cluster.nics.lengthens_hops:
        transports = ends_of_transport(cluster)
        fast_s, slow_s = (float(ways_s(each, of_algorithms, sizes)[1].min()) for each in transports)
        low_s, high_s = min(low_s, fast_s), max(high_s, slow_s)
    elif may_be_cloud:
        high_s += _OF_CLOUD_S
    if rests_on_least := rests_on_least_rate(op, cluster, workers):
        among = needs(op, with_fastest_inside(cluster), workers)
        low_s = min(low_s, float(ways_s(measured, among, sizes)[1].min()) / off)
    return LibraryTime(
        algorithm=way,
        protocol=protocol.name,
        busiest=LINK_KINDS[IN_NODE if inside_s > between_s else NIC],
        time_s=time_s,
        low_s=low_s,
        high_s=high_s,
        lacks=_lacks(measured, op, cluster, workers, unsettled),
        open_of_nics=open_of_nics,
        rests_on_least=rests_on_least,
    )


def doublings_outside(
    measured: Measured, op: str, cluster: Cluster, size: int, workers: int
) -> float:
    """Return how many doublings a size lies outside the tables; 0 if their times had settled.

    Times have settled above a table where a doubling takes twice as long, and below it where half a
    size takes as long. Above the result is positive, below negative.
    """
    outside = []
    for table in of_this_side(measured, cluster, workers):
        if table.op != op:
            continue
        first, last = table.bytes[0], table.bytes[-1]
        if first <= size <= last:
            return 0.0
        at = slice(0, 2) if size < first else slice(-2, None)
        edge = np.array(table.bytes[at], np.float64)
        grows = 0.0 if size > last else 1.0  # of one size alone nothing is known
        if len(edge) > 1:
            _, times_s = ways_s(measured, needs(op, cluster, table.workers, measured), edge)
            times_s = times_s.min(axis=0) * np.array(table.times[at])
            grows = float(np.log(times_s[1] / times_s[0]) / np.log(edge[1] / edge[0]))
        grows = min(max(grows, 0.0), 1.0)
        above = math.log2(size / last) * (1 - grows)
        outside.append(above if size > last else -math.log2(first / size) * grows)
    return min(outside, key=abs, default=0.0)


def _lacks(
    measured: Measured, op: str, cluster: Cluster, workers: int, unsettled: float
) -> tuple[str, ...]:
    """Return the tables that a time would need and the fit lacks; only protocols give it then."""
    side = of_this_side(measured, cluster, workers)
    of_op = [table for table in side if table.op == op]
    if of_op:
        if abs(unsettled) < _MOST_UNSETTLED:
            return ()
        if unsettled > 0:
            return (f"sizes above {show_bytes(max(table.bytes[-1] for table in of_op))}",)
        return (f"sizes below {show_bytes(min(table.bytes[0] for table in of_op))}",)
    if not measured.shown:
        return ()
    has_op = any(table.op == op for table in measured.shown)
    nodes = "several nodes" if workers > cluster.devices_per_node else "one node"
    if side:
        return (f"{op} over {nodes}" if has_op else op,)
    return (nodes,) if has_op else (op, nodes)


def _spread(
    measured: Measured, op: str, cluster: Cluster, size: int, workers: int, unsettled: float
) -> float:
    """Return the standard deviation of the logarithm of a time."""
    of_small = _OF_SMALL if measured.shown else _OF_SMALL_AND_USUAL
    terms = [measured.spread, of_small if size < _SMALL_BYTES else 0.0]
    if measured.shown:
        side = of_this_side(measured, cluster, workers)
        of_op = [table for table in side if table.op == op]
        near = of_op or side or measured.shown
        away = min(abs(math.log2(workers / table.workers)) for table in near)
        terms += [_OF_DOUBLING * away, _OF_OTHER_SIZE * unsettled]
        # Between nodes rings use all NICs together, and an all-to-all those of each device.
        is_inside = workers <= cluster.devices_per_node
        alike = [is_inside or (each.op == "alltoall") == (op == "alltoall") for each in side]
        terms += [_OF_OTHER_OP] * (not of_op) + [_OF_OTHER_SIDE] * (not any(alike))
    return math.hypot(*terms)


def with_large(cluster: Cluster, measured: Measured, op: str = "") -> Cluster:
    """Return a cluster with the start-up and shares of large messages, if it states none."""
    large, inside, nics = measured.protocols[-1], cluster.inside, cluster.nics
    if inside is not None and inside.payload_share == 1:
        inside = replace(inside, payload_share=min(large.inside_share, 1.0))
    if nics.payload_share == 1:
        share = large.between_share * (measured.tree_nics_share if op == "alltoall" else 1)
        nics = replace(nics, payload_share=min(share, 1.0))
    startup_s = cluster.startup_s or large.startup_s
    return replace(cluster, startup_s=startup_s, inside=inside, nics=nics)


def has_tables(cluster: Cluster, *, is_scattered: bool) -> bool:
    """Say whether a cluster was fitted to tables of its library, which are of packed ranks."""
    return not (cluster.measured is None or cluster.is_torus or cluster.is_flat or is_scattered)


def by_protocols(cluster: Cluster, op: str) -> tuple[Cluster, ...]:
    """Return a fitted cluster as each protocol of its library uses it, that for large ones last.

    A description states the latencies of adapters and switches, and one start-up. A fit finds the
    hops, the start-up and the filled shares of each protocol. A cloud whose latency lengthens hops
    has the usual ones. Any other cluster without a fit is as it is.
    """
    measured = cluster.measured
    if measured is None and cluster.nics.lengthens_hops and not isinstance(cluster.network, Torus):
        measured = usual(cluster)
    if measured is None:
        return (cluster,)
    protocols = measured.protocols[FIRST_IN_PAIRS if op == "alltoall" else 0 :]
    large, found = protocols[-1], []
    for each in protocols:
        inside, nics = cluster.inside, cluster.nics
        if inside is not None:
            share = inside.payload_share * each.inside_share / large.inside_share
            hop_s = max(inside.latency_s, each.inside_hop_s)
            inside = replace(inside, latency_s=hop_s, payload_share=min(share, 1.0))
        share = nics.payload_share * each.between_share / large.between_share
        hop_s = max(nics.latency_s, each.between_hop_s)
        nics = replace(nics, latency_s=hop_s, payload_share=min(share, 1.0))
        startup_s = max(0.0, cluster.startup_s + each.startup_s - large.startup_s)
        found.append(replace(cluster, startup_s=startup_s, inside=inside, nics=nics))
    return tuple(found)


def around(time_s: float, cluster: Cluster, op: str, workers: int) -> tuple[float, float]:
    """Return the range around a time on links alone, which leaves a library's costs out.

    A machine is hardly quicker than its links. It may have the usual start-up and hops of a slow
    protocol, and fill links as little as the worst machines in public tables. This range is set by
    hand and is not calibrated. The links of a fitted cluster or of a cloud have their hops already.
    """
    if workers == 1 or time_s == 0:
        return time_s, time_s
    beyond_s = USUAL_PROTOCOLS[-1].startup_s
    has_hops = cluster.measured is not None or cluster.nics.lengthens_hops
    if op in FITTED_OPS and not isinstance(cluster.network, Torus) and not has_hops:
        times_s = ways_s(usual(cluster), needs(op, cluster, workers), [0.0])[1]
        beyond_s = max(beyond_s, float(times_s.max()))
    low_s, fastest = time_s * _QUICKER, with_fastest_inside(cluster).inside
    if cluster.inside is not None and fastest is not None and workers <= cluster.devices_per_node:
        low_s *= cluster.inside.rate_bps / fastest.rate_bps
    _, ends = nics_left_open(cluster, workers)
    nodes = -(-workers // cluster.devices_per_node)
    ring_s = _between(cluster, workers, nodes)[0]
    ratios = [1.0, *(_between(end, workers, nodes)[0] / ring_s for end in ends)]
    return low_s * min(ratios), time_s / _LEAST_FILLED * max(ratios) + beyond_s
