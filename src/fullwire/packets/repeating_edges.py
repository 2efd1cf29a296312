"""Iterations of those edges that repeat together, where others carry something else meanwhile.

Input that comes from a store, or a checkpoint that goes there, hides silences and makes bytes
differ. It goes over edges of its own, so each edge is looked at by itself: those that repeat
equally often and in the same time are one training.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.edges import Edges
from fullwire.packets.iterations import Iterations, Series, find_iterations
from fullwire.run.run import Whole

_SURE = 0.9  # of all edges together: then nothing hides anything
_MOST_EDGES = 12
_SAME_PERIOD = 0.1
_MUCH = 0.4  # of what the edges that agree carry
_FEWEST = 2  # edges that agree: one repeats by chance


def series_of(edges: Edges) -> Series:
    """Return what the main edges carry, slot by slot."""
    kept = edges.main()
    return Series(
        slot=edges.slot[kept],
        edge=edges.edge[kept],
        payload_bytes=edges.payload_bytes[kept],
        width_ns=edges.width_ns,
    )


def iterations_of_edges(series: Series, hosts: int) -> Iterations | None:
    """Find iterations of all edges, or of those that agree, whichever is surer."""
    found = find_iterations(series, hosts)
    if found is not None and found.confidence >= _SURE:
        return found
    agreeing = _agreeing(series, hosts)
    if agreeing is None:
        return found
    among = find_iterations(_rows(series, np.isin(series.edge, agreeing)), hosts)
    if among is None or (found is not None and found.confidence >= among.confidence):
        return found
    return among


def _agreeing(series: Series, hosts: int) -> list[int] | None:
    """Return the edges that repeat together; of several such groups the one with most bytes."""
    sent = np.bincount(series.edge, series.payload_bytes)
    largest = np.argsort(-sent, kind="stable")[:_MOST_EDGES].tolist()
    groups: list[tuple[Iterations, list[int]]] = []
    for edge in filter(lambda each: sent[each] > 0, largest):
        found = find_iterations(_rows(series, series.edge == edge), hosts)
        if found is None:
            continue
        for first, members in groups:
            if _are_together(first, found):
                members.append(edge)
                break
        else:
            groups.append((found, [edge]))
    together = [
        members
        for _, members in groups
        if len(members) >= _FEWEST and _is_closed(members, sent, hosts)
    ]
    return max(together, key=lambda members: sent[members].sum(), default=None)


def _is_closed(members: list[int], sent: Whole, hosts: int) -> bool:
    """Whether what these edges leave out is beside them: a part of a pattern is none.

    Among their hosts they must be all that carries much. Another host may only send, as a store
    does, or only receive.
    """
    inside = {end for edge in members for end in divmod(edge, hosts)}
    much = _MUCH * float(np.median(sent[members]))
    others = [
        divmod(edge, hosts) for edge in np.flatnonzero(sent > much).tolist() if edge not in members
    ]
    senders = {source for source, _ in others} - inside
    receivers = {target for _, target in others} - inside
    among = any(source in inside and target in inside for source, target in others)
    return not among and not senders & receivers


def _are_together(one: Iterations, other: Iterations) -> bool:
    alike = abs(one.period_s / other.period_s - 1) <= _SAME_PERIOD
    return alike and abs(one.count - other.count) <= 1


def _rows(series: Series, chosen: NDArray[np.bool_]) -> Series:
    return replace(
        series,
        slot=series.slot[chosen],
        edge=series.edge[chosen],
        payload_bytes=series.payload_bytes[chosen],
    )
