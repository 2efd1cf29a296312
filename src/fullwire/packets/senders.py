"""Whether one link slows the job: who is busy while others wait.

A sender is busy from packet to packet as long as they follow each other as closely as they usually
do; on a slow line that distance is longer, and it is the line that is busy. Averages of rates are
alike around a ring, whichever link is slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.edges import Edges
from fullwire.packets.iterations import Iterations
from fullwire.run.run import Real

_LEAST_BUSY = 0.5  # a slow link is busy most of the time...
_MUCH_BUSIER = 1.6  # ...and so much more than the others...
_MUCH_SLOWER = 1.4  # ...because it is slower, and not because it has more to send
_CLOSE = 4  # times the usual distance of packets: a sender that pauses longer waits


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """The host whose sending keeps the others waiting, by how long each is busy."""

    host: str
    busy_fraction: float
    others_busy: tuple[float, float]  # the least and the most of the others


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Sending:
    """How each host sends: the share of communication in which it does, and how fast then."""

    busy: Real
    rate_bps: Real  # of payload; 0 where it sends nothing


def sending_of(edges: Edges, iterations: Iterations | None) -> Sending:
    """Say how each host sends from the first iteration to the last."""
    within, slots = _during(edges, iterations)
    share = 1.0 if iterations is None else iterations.communicating_s / iterations.period_s
    window = max(slots * min(share, 1.0), 1.0)
    busy = [_busy_slots(edges, within & (edges.source == h)) for h in range(len(edges.hosts))]
    sent = np.bincount(edges.source[within], edges.payload_bytes[within], len(edges.hosts))
    return Sending(
        busy=np.minimum(np.array(busy) / window, 1.0),
        rate_bps=sent * 8e9 / (np.maximum(busy, 1.0) * edges.width_ns),
    )


def _during(edges: Edges, iterations: Iterations | None) -> tuple[NDArray[np.bool_], int]:
    """Choose the rows with payload from the first iteration to the last, and count its slots."""
    if not len(edges.slot):
        return np.zeros(0, bool), 1
    first = iterations.first_slot if iterations else int(edges.slot.min())
    last = iterations.last_slot if iterations else int(edges.slot.max())
    within = (edges.slot >= first) & (edges.slot <= last) & (edges.payload_bytes > 0)
    return within, last - first + 1


def _busy_slots(edges: Edges, chosen: NDArray[np.bool_]) -> float:
    slots, place = np.unique(edges.slot[chosen], return_inverse=True)
    if len(slots) < 2:
        return float(len(slots))
    payload = np.bincount(place, edges.payload_bytes[chosen])
    steps = np.diff(slots)
    order = np.argsort(steps, kind="stable")
    reached = np.cumsum(payload[1:][order])  # a step ends with the bytes that it took to send
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
    if busy[slowest] < max(_LEAST_BUSY, _MUCH_BUSIER * float(np.median(busy[others]))):
        return None
    if rate_bps[slowest] * _MUCH_SLOWER > float(np.median(rate_bps[others])):
        return None
    return SlowLink(
        host=hosts[slowest],
        busy_fraction=float(busy[slowest]),
        others_busy=(float(busy[others].min()), float(busy[others].max())),
    )
