"""What the traffic of a training says, with no access to its code.

Who talks with whom in which shape, how often and with how many bytes the same comes again, how
large the gradient must be for that, and whether one link is slower than the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fullwire.errors import UsageError
from fullwire.packets.edges import (
    EdgeFacts,
    Edges,
    edge_facts,
    edges_of,
    host_names,
    hosts_of,
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
from fullwire.packets.pattern import Pattern, find_pattern
from fullwire.packets.senders import SlowLink, sending_of, slow_link
from fullwire.packets.trainings import trainings_in_turn, trainings_of
from fullwire.packets.without_silence import (
    counted_by_broadcast,
    counted_by_bytes,
    iterations_by_lengths,
    pattern_since_startup,
)
from fullwire.run.run import UNREAD, Real, Run, Whole

_OF_HOSTS = ("addresses", "hosts")  # facts
_SURE = 0.9  # confidence that leaves nothing to look for


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Detail:
    """What an audit of the bytes needs besides."""

    run: Run
    edges: Edges
    expected: Expected


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Traffic:
    """What packets say of a training; `None` where they do not say it."""

    hosts: tuple[str, ...]
    matrix_payload_bytes: Whole  # row sends to column
    matrix_wire_bytes: Whole
    pattern: Pattern
    iterations: Iterations | None
    payload_bytes_per_edge: float | None
    gradient_bytes: float | None
    ranks: int | None
    gathered_bytes: float  # of parameters in an iteration, where they are sharded
    if_sharded_bytes: float | None  # the gradient, where bytes leave open that they are
    edges: tuple[EdgeFacts, ...]  # the largest first
    collectives: SeenCollectives | None  # where a library's own headers tell them
    busy_fractions: Real
    slow_link: SlowLink | None
    detail: Detail
    warnings: tuple[str, ...]
    groups: tuple[Traffic, ...] = ()  # of hosts, or of times, that are trainings of their own
    during_s: tuple[float, float] | None = None  # since the first packet, if trainings take turns

    @property
    def order(self) -> tuple[str, ...]:
        """Return the addresses in the pattern's sending order."""
        return tuple(self.hosts[each] for each in self.pattern.order)


def analyse_flows(run: Run, *, model_bytes: float | None = None) -> Traffic:
    """Say what the packets of a run say; `model_bytes` is how large its gradients are, if known."""
    if not len(run.flows):
        raise UsageError(
            "; ".join(
                ["flows: this holds no TCP, UDP or RoCEv2 packets between hosts", *run.missing[:1]]
            )
        )
    turns = trainings_in_turn(run)
    if len(turns) == 1:
        return _at_once(run, model_bytes)
    zero_ns = int(run.flows.start_ns.min())
    return _apart(
        run,
        edges_of(run),
        tuple(
            replace(
                _at_once(each, model_bytes),
                during_s=(
                    (int(each.flows.start_ns.min()) - zero_ns) * 1e-9,
                    (int(each.flows.end_ns.max()) - zero_ns) * 1e-9,
                ),
            )
            for each in turns
        ),
    )


def _at_once(run: Run, model_bytes: float | None) -> Traffic:
    """Say it of what is between the first packet and the last, of one training or several."""
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
    each = replace(run, facts=hosts_only, gaps=())  # the rest is true of all together
    return _apart(run, edges, tuple(_together(each, part, model_bytes) for part in parts))


def _together(run: Run, edges: Edges, model_bytes: float | None) -> Traffic:
    """Say it of hosts that are one training."""
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
        seen = _collectives(run, edges, expected.ranks)  # sizes follow from how many they are
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
    """Say of all hosts together only what is true of all."""
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

    Collectives know better, unless much less of the bytes repeats among them: headers that were not
    seen. Where there is neither, messages may repeat by their lengths, or bytes be counted.
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
    return parted or iterations_by_lengths(run, edges) or counted_by_broadcast(edges)


def _pattern(edges: Edges, payload: Whole, iterations: Iterations | None) -> Pattern:
    """Find the pattern of a usual iteration, or else of all together.

    A usual iteration knows nothing of start-up; where a slow link makes iterations run into each
    other, bytes of one edge count for the next, and only the sum over all is sure.
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
