"""Trainings that follow each other between the same hosts, with no connection in common.

A job that was started again counts as another. Connections that come and go with each iteration
make no job of each: what lies between two gaps has to repeat by itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fullwire.packets.edges import edges_of
from fullwire.packets.repeating_edges import iterations_of_edges, series_of
from fullwire.run.run import AnyTable, Run, Whole

_LEAST_GAP_NS = 500_000_000  # a job takes longer to start
_LEAST_SHARE = 0.02  # of the payload: what else hosts sent each other is no job
_MOST_JOBS = 16
_OF_HOSTS = ("addresses", "hosts")  # facts


def trainings_in_turn(run: Run) -> list[Run]:
    """Return the packets of each of several trainings that follow each other, or of all."""
    begins_ns = _begins_ns(run)
    if not 1 < len(begins_ns) <= _MOST_JOBS:
        return [run]
    parts = [_during(run, *each) for each in zip(begins_ns, [*begins_ns[1:], None], strict=True)]
    return parts if all(map(_repeats, parts)) else [run]


def _begins_ns(run: Run) -> list[int]:
    """Return when each group of connections begins that has none in common with those before."""
    if not len(run.connections):
        return []
    first_ns, last_ns, payload = _connections(run)
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


def _connections(run: Run) -> tuple[Whole, Whole, Whole]:
    """Return from when to when each connection lasts, both ways and in all captures, with payload.

    Queue pairs do not say which of them belong together, so there each way is one by itself.
    """
    table = run.connections
    known: dict[frozenset[str], int] = {}
    number = np.array(
        [
            known.setdefault(frozenset(ends), len(known))
            for ends in zip(table.source.tolist(), table.destination.tolist(), strict=True)
        ]
    )
    first_ns = np.full(len(known), np.iinfo(np.int64).max)
    last_ns = np.full(len(known), np.iinfo(np.int64).min)
    np.minimum.at(first_ns, number, table.start_ns)
    np.maximum.at(last_ns, number, table.end_ns)
    return first_ns, last_ns, np.bincount(number, table.payload_bytes).astype(np.int64)


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
        missing=(),
        flows=rows(run.flows, run.flows.start_ns, width_ns),
        connections=rows(run.connections, run.connections.start_ns),
        messages=rows(run.messages, run.messages.begin_ns),
    )


def _width_ns(run: Run) -> int:
    return int((run.flows.end_ns - run.flows.start_ns).max())


def _repeats(run: Run) -> bool:
    """Say whether this is a training: what one host sends alone is its capture's, by its clock."""
    edges = edges_of(run)
    if len(set(edges.source[edges.main()].tolist())) < 2:
        return False
    return iterations_of_edges(series_of(edges), len(edges.hosts)) is not None
