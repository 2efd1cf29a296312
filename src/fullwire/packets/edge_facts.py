"""How each edge carries its part: connections, round trips, bursts, what was sent again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullwire.packets.edges import Edges, host_names, hosts_of
from fullwire.run.run import Run, Whole

_LEAST = 0.01  # of the largest edge's payload
_MOST = 64  # edges
_SILENCE_S = 1e-3  # parts bursts: longer than what TCP waits for, shorter than a step


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeFacts:
    """One edge; round trips are from where it was captured, and `None` where none was timed."""

    source: str
    target: str
    payload_bytes: int
    connections: int
    rtt_least_s: float | None
    rtt_median_s: float | None
    rtt_long_s: float | None
    sent_again: float  # of the packets
    bursts: int
    burst_bytes: float  # of the median burst
    burst_s: float


def edge_facts(run: Run, edges: Edges) -> tuple[EdgeFacts, ...]:
    """Describe the edges that carry something, the largest first."""
    payload = edges.matrix(edges.payload_bytes)
    packets, again = edges.matrix(edges.packets), edges.matrix(edges.retransmits)
    names = host_names(run)
    ends = [
        hosts_of(column, edges.hosts, names)
        for column in (run.connections.source, run.connections.destination)
    ]
    found = []
    for place in np.argsort(-payload, axis=None, kind="stable")[:_MOST].tolist():
        source, target = divmod(place, len(edges.hosts))
        if not payload[source, target] or payload[source, target] < _LEAST * payload.max():
            break
        rows = np.flatnonzero((ends[0] == source) & (ends[1] == target))
        count, size, lasts_s = _bursts(edges, place)
        found.append(
            EdgeFacts(
                source=edges.hosts[source],
                target=edges.hosts[target],
                payload_bytes=int(payload[source, target]),
                connections=int((run.connections.payload_bytes[rows] > 0).sum()),
                **_round_trips(run, rows),
                sent_again=float(again[source, target] / max(packets[source, target], 1)),
                bursts=count,
                burst_bytes=size,
                burst_s=lasts_s,
            )
        )
    return tuple(found)


def _round_trips(run: Run, rows: Whole) -> dict[str, float | None]:
    """Return the round trips of an edge's connections; of the one with most samples for a usual."""
    table = run.connections
    timed = rows[table.rtt_samples[rows] > 0]
    if not len(timed):
        return {"rtt_least_s": None, "rtt_median_s": None, "rtt_long_s": None}
    usual = timed[int(np.argmax(table.rtt_samples[timed]))]
    return {
        "rtt_least_s": float(table.rtt_least_ns[timed].min()) * 1e-9,
        "rtt_median_s": float(table.rtt_median_ns[usual]) * 1e-9,
        "rtt_long_s": float(table.rtt_long_ns[usual]) * 1e-9,
    }


def _bursts(edges: Edges, edge: int) -> tuple[int, float, float]:
    """Return how many bursts an edge has, and the bytes and the time of the median one."""
    rows = (edges.edge == edge) & (edges.payload_bytes > 0)
    slots, place = np.unique(edges.slot[rows], return_inverse=True)
    payload = np.bincount(place, edges.payload_bytes[rows])
    silence = max(round(_SILENCE_S * 1e9 / edges.width_ns), 1)
    first = np.flatnonzero(np.append(True, np.diff(slots) - 1 >= silence))
    last = np.append(first[1:], len(slots)) - 1
    lasts_s = (slots[last] - slots[first] + 1) * edges.width_ns * 1e-9
    size = np.add.reduceat(payload, first)
    return len(first), float(np.median(size)), float(np.median(lasts_s))
