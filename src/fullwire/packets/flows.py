"""Describe a training from its traffic, without access to its code.

The result has the shape of the traffic between hosts, the iterations and their bytes. From these it
derives the size of the gradient. It also says whether one link is slower than the others.

A capture may hold several trainings. Groups of hosts that send each other nothing are separate
trainings. Two rings of one job, one for each network card, share no traffic either, but they repeat
equally often. Trainings that follow each other between the same hosts have no connection in common:
a job that was started again counts as another. Connections may also come and go with each
iteration. So a period between two gaps counts as a training only if its traffic repeats by itself.

A slow link slows the job: its sender is busy while others wait. A sender is busy while its packets
follow each other at their usual distance. On a slow line that distance is longer, and the line is
busy all the while. Average rates cannot show it: around a ring they are the same on all links.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fullwire.errors import DamagedInput, UsageError
from fullwire.packets.edges import (
    EdgeFacts,
    Edges,
    edge_facts,
    edges_of,
    host_names,
    hosts_of,
    median,
    ranks_by_host,
)
from fullwire.packets.expected import Expected, expected_bytes
from fullwire.packets.iterations import Iterations, iterations_of_edges, series_of
from fullwire.packets.messages import (
    SeenCollectives,
    broadcast_bytes,
    find_collectives,
    iterations_of,
)
from fullwire.packets.pattern import Pattern, components, find_pattern
from fullwire.packets.without_silence import (
    counted_by_broadcast,
    counted_by_bytes,
    iterations_by_lengths,
    pattern_since_startup,
)
from fullwire.run.run import UNREAD, AnyTable, Real, Run, Whole

_OF_HOSTS = ("addresses", "hosts")  # Names of facts.
_SURE = 0.9  # Confidence at which the search ends.
_FAINT = 0.01  # Share of the largest edge of its hosts: a heartbeat joins no two jobs.
_MOST_HOSTS = 256
_SAME_PERIOD = 0.05
_LEAST_GAP_NS = 500_000_000  # A job takes longer to start.
_LEAST_SHARE = 0.02  # Share of the payload: a job has more.
_MOST_JOBS = 16
_MOST_BYTES = 2.0**60  # of all packets of a run
_LEAST_BUSY = 0.5  # A slow link is busy for this share of the time.
_MUCH_BUSIER = 1.6  # It is busier than the others by this factor.
_MUCH_SLOWER = 1.4  # It is slower by this factor: else it just has more to send.
_CLOSE = 4  # Times the usual distance of packets: a sender that pauses longer waits.


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """The host whose slow sending makes the others wait, with the busy time of each."""

    host: str
    busy_fraction: float
    others_busy: tuple[float, float]  # the least and the most busy of the others


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Sending:
    """How each host sends: its busy share of the communication time, and its rate while busy."""

    busy: Real
    rate_bps: Real  # payload only; 0 for a host that is silent


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Detail:
    """The other inputs of an audit of the bytes."""

    run: Run
    edges: Edges
    expected: Expected


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Traffic:
    """The description of a training from its packets; `None` for values that they leave open."""

    hosts: tuple[str, ...]
    matrix_payload_bytes: Whole  # row sends to column
    matrix_wire_bytes: Whole
    pattern: Pattern
    iterations: Iterations | None
    payload_bytes_per_edge: float | None
    gradient_bytes: float | None
    ranks: int | None
    gathered_bytes: float  # bytes of sharded parameters in an iteration
    if_sharded_bytes: float | None  # the gradient if parameters are sharded, where that is open
    edges: tuple[EdgeFacts, ...]  # the largest first
    collectives: SeenCollectives | None  # if a library's own headers show them
    busy_fractions: Real
    slow_link: SlowLink | None
    detail: Detail
    warnings: tuple[str, ...]
    groups: tuple[Traffic, ...] = ()  # separate trainings, on other hosts or at other times
    during_s: tuple[float, float] | None = None  # since the first packet, if trainings take turns

    @property
    def order(self) -> tuple[str, ...]:
        """Return the addresses in the pattern's sending order."""
        return tuple(self.hosts[host] for host in self.pattern.order)


def analyse_flows(run: Run, *, model_bytes: float | None = None) -> Traffic:
    """Describe the training in a run's packets; `model_bytes` is its gradients' size, if known."""
    refuse_without_packets(run)
    all_bytes = float(np.sum(run.flows.payload_bytes + 0.0) + np.sum(run.flows.wire_bytes + 0.0))
    if all_bytes > _MOST_BYTES:
        raise DamagedInput(run.place, f"flows: {all_bytes:.3g} bytes cannot be")
    turns = trainings_in_turn(run)
    if len(turns) == 1:
        return _at_once(run, model_bytes)
    zero_ns = int(run.flows.start_ns.min())
    return _apart(
        run,
        edges_of(run),
        tuple(
            replace(
                _at_once(turn, model_bytes),
                during_s=(
                    (int(turn.flows.start_ns.min()) - zero_ns) * 1e-9,
                    (int(turn.flows.end_ns.max()) - zero_ns) * 1e-9,
                ),
            )
            for turn in turns
        ),
    )


def refuse_without_packets(run: Run) -> None:
    """Refuse a run without flows, as a capture of nothing or a recording of other things."""
    if len(run.flows):
        return
    what = "this holds no TCP, UDP or RoCEv2 packets between hosts"
    if run.provenance.origin == "measured":
        what = "this run was recorded without packets: record it again with --packets"
    raise UsageError("; ".join([f"flows: {what}", *run.missing[:1]]))


def _at_once(run: Run, model_bytes: float | None) -> Traffic:
    """Describe all packets of one period, which may hold one training or several at once."""
    edges = edges_of(run)
    if not edges.hosts:
        nothing = (
            "flows: expected payload between hosts, got none, or only what stays on one machine"
        )
        raise UsageError("; ".join([nothing, *run.missing[:1]]))
    parts = trainings_of(edges)
    if len(parts) == 1:
        return _together(run, parts[0], model_bytes)
    hosts_only = run.facts.only(_OF_HOSTS)
    each = replace(run, facts=hosts_only, gaps=())  # other facts are true of all together only
    return _apart(run, edges, tuple(_together(each, part, model_bytes) for part in parts))


def _together(run: Run, edges: Edges, model_bytes: float | None) -> Traffic:
    """Describe hosts that belong to one training."""
    payload, wire = edges.matrix(edges.payload_bytes), edges.matrix(edges.wire_bytes)
    known_ranks = ranks_by_host(run, edges.hosts)
    world = len(edges.hosts) if known_ranks is None else sum(map(len, known_ranks.values()))
    seen = _collectives(run, edges, world)
    iterations = _iterations(run, edges, payload, seen, model_bytes)
    pattern = _pattern(edges, payload, iterations)
    iterations = counted_by_bytes(iterations, payload)
    expected = expected_bytes(
        edges, pattern, iterations, seen, None if known_ranks is None else world, model_bytes
    )
    if seen is not None and expected.ranks is not None and expected.ranks != world:
        seen = _collectives(run, edges, expected.ranks)  # sizes depend on the number of ranks
    sending = sending_of(edges, iterations)
    return Traffic(
        hosts=edges.hosts,
        matrix_payload_bytes=payload,
        matrix_wire_bytes=wire,
        pattern=pattern,
        iterations=iterations,
        payload_bytes_per_edge=expected.edge_bytes,
        gradient_bytes=expected.gradient_bytes,
        ranks=expected.ranks,
        gathered_bytes=expected.gathered_bytes,
        if_sharded_bytes=expected.if_sharded_bytes,
        edges=edge_facts(run, edges),
        collectives=seen,
        busy_fractions=sending.busy,
        slow_link=slow_link(edges.hosts, sending),
        detail=Detail(run=run, edges=edges, expected=expected),
        warnings=run.missing,
    )


def _apart(run: Run, edges: Edges, groups: tuple[Traffic, ...]) -> Traffic:
    """Describe all hosts together by their totals, and each training by itself."""
    nothing = Pattern(kind="none")
    return Traffic(
        hosts=edges.hosts,
        matrix_payload_bytes=edges.matrix(edges.payload_bytes),
        matrix_wire_bytes=edges.matrix(edges.wire_bytes),
        pattern=nothing,
        iterations=None,
        payload_bytes_per_edge=None,
        gradient_bytes=None,
        ranks=None,
        gathered_bytes=0.0,
        if_sharded_bytes=None,
        edges=edge_facts(run, edges),
        collectives=None,
        busy_fractions=sending_of(edges, None).busy,
        slow_link=None,
        detail=Detail(run=run, edges=edges, expected=Expected()),
        warnings=run.missing,
        groups=groups,
    )


def _collectives(run: Run, edges: Edges, world: int) -> SeenCollectives | None:
    names = host_names(run)
    source = hosts_of(run.messages.source, edges.hosts, names)
    target = hosts_of(run.messages.destination, edges.hosts, names)
    between = (source >= 0) & (target >= 0) & (source != target) & (run.messages.op != UNREAD)
    if not between.any():
        return None
    return find_collectives(run.messages.rows(between), source[between], target[between], world)


def _iterations(
    run: Run, edges: Edges, payload: Whole, seen: SeenCollectives | None, model_bytes: float | None
) -> Iterations | None:
    """Look for iterations among collectives, if these are known, and between silences.

    Collectives win, unless a much smaller share of the bytes repeats among them: then the capture
    missed headers. If both fail, the lengths of messages may repeat. The last resort is to count
    bytes.
    """
    told = None
    if seen is not None:
        model = model_bytes or broadcast_bytes(seen)
        told = iterations_of(seen, edges.hosts, float(payload.sum()), edges.width_ns, model)
    if told is not None and told.confidence >= _SURE:
        return told
    parted = iterations_of_edges(series_of(edges), len(edges.hosts))
    if told is not None and (parted is None or told.confidence >= parted.confidence):
        return told
    by_lengths = None if parted is not None else iterations_by_lengths(run, edges)
    if by_lengths is not None and by_lengths.is_exchange(len(edges.hosts)):
        return by_lengths
    return parted or counted_by_broadcast(edges)


def _pattern(edges: Edges, payload: Whole, iterations: Iterations | None) -> Pattern:
    """Find the pattern of a usual iteration, or else of all iterations together.

    A usual iteration excludes start-up. A slow link makes iterations run into each other: bytes of
    one iteration count for the next on some edges. Then only the sum over all iterations is sure.
    """
    if iterations is None:
        found = find_pattern(payload.astype(float))
        return pattern_since_startup(edges) if found.kind == "none" else found
    usual = np.zeros(payload.size)
    usual[iterations.edges] = iterations.edge_bytes
    found = find_pattern(usual.reshape(payload.shape))
    if found.kind != "none":
        return found
    within = (edges.slot >= iterations.first_slot) & (edges.slot <= iterations.last_slot)
    together = edges.matrix(np.where(within, edges.payload_bytes, 0)).astype(float)
    return find_pattern(together)


def trainings_of(edges: Edges) -> list[Edges]:
    """Return the traffic of each training: all hosts, or groups that each repeat at their own pace.

    If only one group repeats and it has most of the bytes, it is the training. The other groups
    belong to something else.
    """
    if len(edges.hosts) > _MOST_HOSTS:
        return [edges]
    # Link hosts by their traffic, except where it is faint beside the other traffic of both.
    payload = edges.matrix(edges.payload_bytes)
    most = np.maximum(payload.max(axis=0), payload.max(axis=1))
    links = np.asarray(payload > _FAINT * np.maximum.outer(most, most), bool)
    groups = [among(edges, np.array(group)) for group in components(links) if len(group) > 1]
    if len(groups) < 2:
        return [edges]
    iterations = [iterations_of_edges(series_of(group), len(group.hosts)) for group in groups]
    repeating = [group for group, by in zip(groups, iterations, strict=True) if by is not None]
    known = [by for by in iterations if by is not None]
    if not known:
        return [edges]
    are_one = len(known) == len(groups) and all(
        other.count == known[0].count and abs(other.period_s / known[0].period_s - 1) < _SAME_PERIOD
        for other in known
    )
    if are_one:
        return [edges]
    if len(known) == 1 and 2 * repeating[0].payload_bytes.sum() > edges.payload_bytes.sum():
        return repeating
    return groups


def among(edges: Edges, hosts: Whole) -> Edges:
    """Return the traffic among some of the hosts."""
    number = np.full(len(edges.hosts), -1)
    number[hosts] = np.arange(len(hosts))
    source, target = number[edges.source], number[edges.target]
    kept = (source >= 0) & (target >= 0)
    columns = ("connection", "slot", "payload_bytes", "wire_bytes", "packets", "retransmits")
    return replace(
        edges,
        hosts=tuple(edges.hosts[host] for host in hosts.tolist()),
        strangers_bytes=edges.strangers_bytes + int(edges.payload_bytes[~kept].sum()),
        source=source[kept],
        target=target[kept],
        **{name: getattr(edges, name)[kept] for name in columns},
    )


def trainings_in_turn(run: Run) -> list[Run]:
    """Return the packets of each of several trainings that follow each other, or of all."""
    begins_ns = _begins_ns(run)
    if not 1 < len(begins_ns) <= _MOST_JOBS:
        return [run]
    turns = [_during(run, *times) for times in zip(begins_ns, [*begins_ns[1:], None], strict=True)]
    for turn in turns:
        if not len(turn.flows):  # its connections carried nothing
            return [run]
        edges = edges_of(turn)
        # Traffic with one sender only comes from that host's capture, by its clock.
        has_senders = len(set(edges.source[edges.main()].tolist())) > 1
        if not has_senders or iterations_of_edges(series_of(edges), len(edges.hosts)) is None:
            return [run]
    return turns


def _begins_ns(run: Run) -> list[int]:
    """Return the beginning of each group of connections that shares none with earlier groups."""
    table = run.connections
    if not len(table):
        return []
    # The start, end and payload of each connection, over both directions and all captures. Queue
    # pairs lack a mark of the pair that belongs to them, so each direction counts by itself.
    known: dict[frozenset[str], int] = {}
    pairs = zip(table.source.tolist(), table.destination.tolist(), strict=True)
    number = np.array([known.setdefault(frozenset(ends), len(known)) for ends in pairs])
    first_ns = np.full(len(known), np.iinfo(np.int64).max)
    last_ns = np.full(len(known), np.iinfo(np.int64).min)
    np.minimum.at(first_ns, number, table.start_ns)
    np.maximum.at(last_ns, number, table.end_ns)
    payload = np.bincount(number, table.payload_bytes).astype(np.int64)
    order = np.argsort(first_ns)
    first_ns, payload = first_ns[order], payload[order]
    reached_ns = np.maximum.accumulate(last_ns[order])
    least_ns = max(_LEAST_GAP_NS, 2 * _width_ns(run))
    gaps = 1 + np.flatnonzero(first_ns[1:] - reached_ns[:-1] > least_ns)
    least = _LEAST_SHARE * payload.sum()
    begins_ns = [
        int(part_ns[0])
        for part_ns, sent in zip(np.split(first_ns, gaps), np.split(payload, gaps), strict=True)
        if sent.sum() > least
    ]
    return [int(first_ns[0]), *begins_ns[1:]]  # the first includes the traffic before it


def _during(run: Run, begin_ns: int, end_ns: int | None) -> Run:
    """Return the rows that began within a period; a time slot may begin before its packets."""

    def rows(table: AnyTable, started_ns: Whole, slack_ns: int = 0) -> AnyTable:
        within = started_ns >= begin_ns - slack_ns
        if end_ns is not None:
            within &= started_ns < end_ns - slack_ns
        return table.rows(within)

    width_ns = _width_ns(run)
    return replace(
        run,
        facts=run.facts.only(_OF_HOSTS),
        gaps=(),
        flows=rows(run.flows, run.flows.start_ns, width_ns),
        connections=rows(run.connections, run.connections.start_ns),
        messages=rows(run.messages, run.messages.begin_ns),
    )


def _width_ns(run: Run) -> int:
    return int((run.flows.end_ns - run.flows.start_ns).max())


def sending_of(edges: Edges, iterations: Iterations | None) -> Sending:
    """Return how each host sends from the first iteration to the last."""
    within, slots = np.zeros(0, bool), 1
    if len(edges.slot):
        first = iterations.first_slot if iterations else int(edges.slot.min())
        last = iterations.last_slot if iterations else int(edges.slot.max())
        within = (edges.slot >= first) & (edges.slot <= last) & (edges.payload_bytes > 0)
        slots = last - first + 1
    share = 1.0 if iterations is None else iterations.communicating_s / iterations.period_s
    window = max(slots * min(share, 1.0), 1.0)
    busy = [_busy_slots(edges, within & (edges.source == h)) for h in range(len(edges.hosts))]
    sent = np.bincount(edges.source[within], edges.payload_bytes[within], len(edges.hosts))
    return Sending(
        busy=np.minimum(np.array(busy) / window, 1.0),
        rate_bps=sent * 8e9 / (np.maximum(busy, 1.0) * edges.width_ns),
    )


def _busy_slots(edges: Edges, chosen: NDArray[np.bool_]) -> float:
    slots, place = np.unique(edges.slot[chosen], return_inverse=True)
    if len(slots) < 2:
        return float(len(slots))
    payload = np.bincount(place, edges.payload_bytes[chosen])
    steps = np.diff(slots)
    order = np.argsort(steps, kind="stable")
    reached = np.cumsum(payload[1:][order])  # each distance ends with the bytes that took it
    usual = steps[order][np.searchsorted(reached, reached[-1] / 2)]
    return float(steps[steps <= _CLOSE * usual].sum() + 1)


def slow_link(hosts: tuple[str, ...], sending: Sending) -> SlowLink | None:
    """Find the one host that is much busier than all others because it sends much slower."""
    active = np.flatnonzero(sending.busy > 0)
    if len(active) < 2:
        return None
    slowest = int(np.argmax(sending.busy))
    others = active[active != slowest]
    busy, rate_bps = sending.busy, sending.rate_bps
    if busy[slowest] < max(_LEAST_BUSY, _MUCH_BUSIER * float(median(busy[others]))):
        return None
    if rate_bps[slowest] * _MUCH_SLOWER > float(median(rate_bps[others])):
        return None
    return SlowLink(
        host=hosts[slowest],
        busy_fraction=float(busy[slowest]),
        others_busy=(float(busy[others].min()), float(busy[others].max())),
    )
