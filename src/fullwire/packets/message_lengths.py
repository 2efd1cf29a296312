"""Iterations from where messages end: lengths that come again in order, without any silence.

A packet that is not full ends a message. If a message ends at a place of the stream, another one
ends an iteration's bytes later, for nearly every place: few lengths could do that by chance, and
where all messages are equally long nothing is said. Where in the stream an iteration begins stays
open; it is put where there is most time between messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.edges import Edges, host_names, hosts_of
from fullwire.packets.iterations import FEWEST, Iterations
from fullwire.run.run import UNREAD, Real, Run, Whole

_SMALL_BYTES = 1024  # messages that control others: how they lie among those is left to chance
_NEAR_BYTES = 512  # two places that far apart are the same
_MOST_PLACES = 800  # of a connection: their differences are looked at
_MOST_PERIODS = 32  # that may be the one
_MOST_CONNECTIONS = 8
_LEAST_AGREE = 0.8  # of the places have another one a period later
_AS_GOOD = 0.05
_DIFFERENT = 0.02  # lengths of messages
_LEAST_PLACES = 4  # in a period
_MAIN = 0.05  # of the largest connection
_MOSTLY = 0.6  # of the main connections say the same number


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Repeated:
    """A connection's bytes in an iteration, how often they come, and from when to when."""

    edge: int
    bytes: float
    count: int
    agree: float
    begins_ns: Whole
    end_ns: int


def iterations_by_lengths(run: Run, edges: Edges) -> Iterations | None:
    """Find iterations that most of the connections tell alike, or none."""
    names = host_names(run)
    rows = run.messages.rows(run.messages.op == UNREAD)
    source = hosts_of(rows.source, edges.hosts, names)
    target = hosts_of(rows.destination, edges.hosts, names)
    ends = list(zip(rows.source.tolist(), rows.destination.tolist(), strict=True))
    number: dict[tuple[str, str], int] = {}
    of = np.array([number.setdefault(each, len(number)) for each in ends], np.int64)
    of[(source < 0) | (target < 0) | (source == target)] = -1
    sent = np.bincount(of[of >= 0], rows.payload_bytes[of >= 0], len(number))
    if not sent.any():
        return None
    main = [each for each in np.argsort(-sent).tolist() if sent[each] > _MAIN * sent.max()]
    found = []
    for connection in main[:_MOST_CONNECTIONS]:
        chosen = np.flatnonzero(of == connection)
        edge = int(source[chosen[0]] * len(edges.hosts) + target[chosen[0]])
        repeated = _repeated(edge, rows.payload_bytes[chosen], rows.last_ns[chosen])
        found += [] if repeated is None else [repeated]
    return _told_alike(edges, found, min(len(main), _MOST_CONNECTIONS))


def _told_alike(edges: Edges, found: list[_Repeated], asked: int) -> Iterations | None:
    counts = np.array([each.count for each in found])
    if not len(counts):
        return None
    count = int(np.bincount(counts).argmax())
    alike = [each for each in found if each.count == count]
    if count < FEWEST or len(alike) < _MOSTLY * asked:
        return None
    first = min(alike, key=lambda each: int(each.begins_ns[0]))
    begin_ns, end_ns = int(first.begins_ns[0]), max(each.end_ns for each in alike)
    period_s = (end_ns - begin_ns) * 1e-9 / count
    carry = sorted({each.edge for each in alike})
    agree = float(np.median([each.agree for each in alike])) * len(alike) / asked
    return Iterations(
        count=count,
        period_s=period_s,
        communicating_s=period_s,
        edges=np.array(carry),
        edge_bytes=np.array([sum(e.bytes for e in alike if e.edge == edge) for edge in carry]),
        first_slot=begin_ns // edges.width_ns,
        last_slot=end_ns // edges.width_ns,
        begins_ns=first.begins_ns,
        ends_ns=np.append(first.begins_ns[1:], end_ns),
        share=agree,
        confidence=agree * (1 - 0.5 ** (count - 1)),
        basis="lengths",
    )


def _repeated(edge: int, lengths: Whole, ends_ns: Whole) -> _Repeated | None:
    """Find what repeats in the places where one connection's messages end."""
    places = np.append(0, np.cumsum(lengths))
    times_ns = np.append(ends_ns[:1], ends_ns)
    kept = np.append(True, np.diff(places) >= _SMALL_BYTES)
    places, times_ns = places[kept], times_ns[kept]
    if len(places) < FEWEST * _LEAST_PLACES:
        return None
    middle = slice(max(0, (len(places) - _MOST_PLACES) // 2), (len(places) + _MOST_PLACES) // 2)
    period = _period(places[middle])
    if period is None or not _differ(places[middle], period):
        return None
    has_next, agree = _with_partner(places, period)
    first, last = int(places[has_next].min()), int(places[has_next].max() + period)
    count = int((last - first) / period + 0.05)
    inside = (places >= first - _NEAR_BYTES) & (places <= last + _NEAR_BYTES)
    begins_ns = _begins(places[inside], times_ns[inside], first, period, count)
    return _Repeated(
        edge=edge,
        bytes=period,
        count=count,
        agree=agree,
        begins_ns=begins_ns,
        end_ns=int(times_ns[inside][-1]),
    )


def _period(places: Whole) -> float | None:
    """Return the shortest distance at which nearly every place has another one, or None."""
    longest = (places[-1] - places[0]) // FEWEST
    apart = places[None, :] - places[:, None]
    apart = apart[(apart >= _SMALL_BYTES) & (apart <= longest)]
    if not len(apart):
        return None
    cells, times = np.unique(apart // _NEAR_BYTES, return_counts=True)
    often = np.argsort(-times, kind="stable")[:_MOST_PERIODS]
    agree = []
    for cell in np.sort(cells[often]).tolist():
        near = apart[np.abs(apart - (cell + 0.5) * _NEAR_BYTES) <= _NEAR_BYTES]
        period = float(np.median(near))
        agree.append((period, _with_partner(places, period)[1]))
    most = max((share for _, share in agree), default=0.0)
    if most < _LEAST_AGREE:
        return None
    return next(period for period, share in agree if share >= most - _AS_GOOD)


def _with_partner(places: Whole, period: float) -> tuple[NDArray[np.bool_], float]:
    """Say which places have another one a period later, and how many of those that could."""
    wanted = places + period
    nearest = np.clip(np.searchsorted(places, wanted), 1, len(places) - 1)
    distance = np.minimum(np.abs(places[nearest] - wanted), np.abs(places[nearest - 1] - wanted))
    has_next = distance <= _NEAR_BYTES
    could = wanted <= places[-1] + _NEAR_BYTES
    return has_next, float(np.mean(has_next[could])) if could.any() else 0.0


def _differ(places: Whole, period: float) -> bool:
    """Whether a period holds messages of several lengths."""
    lengths = np.diff(places)
    return len(lengths) > 0 and bool(
        period > 1.5 * lengths.max() and np.mean(lengths < lengths.max() * (1 - _DIFFERENT)) > 0.1
    )


def _begins(places: Whole, times_ns: Whole, first: int, period: float, count: int) -> Whole:
    """Return when iterations begin: where there is most time between messages, in the median."""
    waits_ns = np.diff(times_ns, append=times_ns[-1:])
    typical = float(np.median(waits_ns[:-1] / np.diff(places))) if len(places) > 1 else 0.0
    spare: Real = waits_ns - typical * np.diff(places, append=places[-1:])
    phase = np.rint(((places - first) % period) / _NEAR_BYTES / 2).astype(np.int64)
    phase %= max(round(period / _NEAR_BYTES / 2), 1)
    of_phase = {
        int(each): float(np.median(spare[phase == each]))
        for each in np.unique(phase)
        if (phase == each).sum() >= count - 1
    }
    best = max(of_phase, key=lambda each: of_phase[each], default=0)
    return np.asarray(times_ns[phase == best][:count], np.int64)
