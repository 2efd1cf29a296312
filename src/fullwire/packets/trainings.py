"""Several trainings in one capture: side by side, or one after the other.

Groups of hosts that send each other nothing are trainings of their own. Two rings of one job, one
for each network card, do not meet either; but they repeat equally often.

Trainings follow each other between the same hosts with no connection in common: a job that was
started again counts as another. Connections that come and go with each iteration make no job of
each: what lies between two gaps has to repeat by itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fullwire.packets.edges import Edges, edges_of
from fullwire.packets.iterations import iterations_of_edges, series_of
from fullwire.packets.pattern import components
from fullwire.run.run import AnyTable, Run, Whole

_FAINT = 0.01  # of the largest edge among its hosts: a heartbeat does not make two jobs one
_MOST_HOSTS = 256
_SAME_PERIOD = 0.05
_LEAST_GAP_NS = 500_000_000  # a job takes longer to start
_LEAST_SHARE = 0.02  # of the payload: what else hosts sent each other is no job
_MOST_JOBS = 16
_OF_HOSTS = ("addresses", "hosts")  # facts


def trainings_of(edges: Edges) -> list[Edges]:
    """Return what is to be looked at by itself: all, or groups that repeat each in their own time.

    One group that repeats, and has most of the bytes, is the training; others are strangers to it.
    """
    if len(edges.hosts) > _MOST_HOSTS:
        return [edges]
    # Who sends to whom, but for what is faint beside what both ends send others.
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
    """Return what some of the hosts send each other."""
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
        edges = edges_of(turn)
        # What one host sends alone is its capture's, by its clock.
        has_senders = len(set(edges.source[edges.main()].tolist())) > 1
        if not has_senders or iterations_of_edges(series_of(edges), len(edges.hosts)) is None:
            return [run]
    return turns


def _begins_ns(run: Run) -> list[int]:
    """Return when each group of connections begins that has none in common with those before."""
    table = run.connections
    if not len(table):
        return []
    # From when to when each connection lasts, both ways and in all captures, with its payload.
    # Queue pairs do not say which of them belong together, so there each way is one by itself.
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
    return [int(first_ns[0]), *begins_ns[1:]]  # the first has what came before it, too


def _during(run: Run, begin_ns: int, end_ns: int | None) -> Run:
    """Return what began within a period; a bin of time may begin before what is in it."""

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
