"""Trainings that share a capture and nothing else: groups of hosts that send each other nothing.

Two rings of one job, one for each network card, do not meet either; but they repeat equally often.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fullwire.packets.edges import Edges
from fullwire.packets.iterations import Iterations
from fullwire.packets.pattern import components
from fullwire.packets.repeating_edges import iterations_of_edges, series_of
from fullwire.run.run import Whole

_FAINT = 0.01  # of the largest edge among its hosts: a heartbeat does not make two jobs one
_MOST_HOSTS = 256
_SAME_PERIOD = 0.05


def trainings_of(edges: Edges) -> list[Edges]:
    """Return what is to be looked at by itself: all, or groups that repeat each in their own time.

    One group that repeats, and has most of the bytes, is the training; others are strangers to it.
    """
    if len(edges.hosts) > _MOST_HOSTS:
        return [edges]
    parts = [among(edges, np.array(each)) for each in components(_links(edges)) if len(each) > 1]
    if len(parts) < 2:
        return [edges]
    found = [iterations_of_edges(series_of(part), len(part.hosts)) for part in parts]
    repeating = [part for part, each in zip(parts, found, strict=True) if each is not None]
    known = [each for each in found if each is not None]
    if not known or (len(known) == len(found) and _are_one(known)):
        return [edges]
    if len(known) == 1 and 2 * repeating[0].payload_bytes.sum() > edges.payload_bytes.sum():
        return repeating
    return parts


def _are_one(found: list[Iterations]) -> bool:
    first = found[0]
    return all(
        each.count == first.count and abs(each.period_s / first.period_s - 1) < _SAME_PERIOD
        for each in found
    )


def _links(edges: Edges) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return who sends to whom, but for what is faint beside what both ends send others."""
    payload = edges.matrix(edges.payload_bytes)
    most = np.maximum(payload.max(axis=0), payload.max(axis=1))
    return np.asarray(payload > _FAINT * np.maximum.outer(most, most), bool)


def among(edges: Edges, hosts: Whole) -> Edges:
    """Return what some of the hosts send each other."""
    number = np.full(len(edges.hosts), -1)
    number[hosts] = np.arange(len(hosts))
    source, target = number[edges.source], number[edges.target]
    kept = (source >= 0) & (target >= 0)
    columns = ("connection", "slot", "payload_bytes", "wire_bytes", "packets", "retransmits")
    return replace(
        edges,
        hosts=tuple(edges.hosts[each] for each in hosts.tolist()),
        strangers_bytes=edges.strangers_bytes + int(edges.payload_bytes[~kept].sum()),
        source=source[kept],
        target=target[kept],
        **{name: getattr(edges, name)[kept] for name in columns},
    )
