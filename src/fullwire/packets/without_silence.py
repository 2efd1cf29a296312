"""Iterations where no silence parts them: by the lengths of messages, or by counting bytes.

A slow link hardly falls silent, and its iterations run into each other; communication that is
overlapped completely never falls silent at all.

Messages tell iterations by lengths that come again in order. A packet that is not full ends a
message. If a message ends at a place of the stream, another one ends an iteration's bytes later,
for nearly every place: few lengths could do that by chance, and where all messages are equally long
nothing is said. Where in the stream an iteration begins stays open; it is put where there is most
time between messages.

Bytes can still be counted: how often an iteration fits into what each edge sent must be the same
whole number for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.edges import Edges, host_names, hosts_of, numbered_pairs
from fullwire.packets.iterations import FEWEST, Iterations
from fullwire.packets.pattern import Pattern, find_pattern
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
_MAIN_CONNECTION = 0.05  # of the largest
_MOSTLY = 0.6  # of the main connections say the same number
_WHOLE = 0.05  # a number of iterations is as close to a whole one
_WHOLE_ALONE = 0.02  # where nothing else says that there are iterations
_MOST_ALONE = 500  # beyond, headers of messages make any number look whole
_SURE_ALONE = 0.5  # such a count is right or a coincidence, and bytes cannot say which
# A two-way ring of four may be recursive doubling, with other bytes for the same gradient.
_UNMISTAKABLE = ("ring", "halving-doubling", "tree", "double tree")
_STARTUP = 0.3  # of all bytes come before the silence that ends start-up, at most
_MAIN_EDGE = 0.25  # of the largest: one with less has no part in what repeats
_LEAST_PIECE = 0.01  # of a usual time slot's bytes
_LEAST_BESIDE = 0.002  # of the largest edge
_LARGE = 0.5  # of the largest edge in start-up: what the broadcast uses


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Repeated:
    """A connection's bytes in an iteration, how often they come, and from when to when."""

    edge: int
    bytes: float
    count: int
    agree: float
    begins_ns: Whole
    end_ns: int

    @classmethod
    def by_connection(cls, edge: int, lengths: Whole, ends_ns: Whole) -> _Repeated | None:
        """Find what repeats in the places where one connection's messages end."""
        places = np.append(0, np.cumsum(lengths))
        times_ns = np.append(ends_ns[:1], ends_ns)
        kept = np.append(True, np.diff(places) >= _SMALL_BYTES)
        places, times_ns = places[kept], times_ns[kept]
        if len(places) < FEWEST * _LEAST_PLACES:
            return None
        middle = slice(max(0, (len(places) - _MOST_PLACES) // 2), (len(places) + _MOST_PLACES) // 2)
        period = _period(places[middle])
        if period is None:
            return None
        # A period has to hold messages of several lengths.
        several = np.diff(places[middle])
        is_shorter = several < several.max() * (1 - _DIFFERENT)
        if period <= 1.5 * several.max() or np.mean(is_shorter) <= 0.1:
            return None
        has_next, agree = _with_partner(places, period)
        first, last = int(places[has_next].min()), int(places[has_next].max() + period)
        count = int((last - first) / period + 0.05)
        inside = (places >= first - _NEAR_BYTES) & (places <= last + _NEAR_BYTES)
        begins_ns = _begins(places[inside], times_ns[inside], first, period, count)
        return cls(
            edge=edge,
            bytes=period,
            count=count,
            agree=agree,
            begins_ns=begins_ns,
            end_ns=int(times_ns[inside][-1]),
        )


def iterations_by_lengths(run: Run, edges: Edges) -> Iterations | None:
    """Find iterations that most of the connections tell alike, or none."""
    names = host_names(run)
    rows = run.messages.rows(run.messages.op == UNREAD)
    source = hosts_of(rows.source, edges.hosts, names)
    target = hosts_of(rows.destination, edges.hosts, names)
    connection = numbered_pairs(rows.source, rows.destination)
    connections = int(connection.max(initial=-1)) + 1
    connection[(source < 0) | (target < 0) | (source == target)] = -1
    is_inside = connection >= 0
    sent = np.bincount(connection[is_inside], rows.payload_bytes[is_inside], connections)
    if not sent.any():
        return None
    least = _MAIN_CONNECTION * sent.max()
    main = [number for number in np.argsort(-sent).tolist() if sent[number] > least]
    repeating = []
    for number in main[:_MOST_CONNECTIONS]:
        chosen = np.flatnonzero(connection == number)
        edge = int(source[chosen[0]] * len(edges.hosts) + target[chosen[0]])
        repeated = _Repeated.by_connection(edge, rows.payload_bytes[chosen], rows.last_ns[chosen])
        repeating += [] if repeated is None else [repeated]
    asked = min(len(main), _MOST_CONNECTIONS)
    if not repeating:
        return None
    count = int(np.bincount([by.count for by in repeating]).argmax())
    alike = [by for by in repeating if by.count == count]
    if count < FEWEST or len(alike) < _MOSTLY * asked:
        return None
    first = min(alike, key=lambda by: int(by.begins_ns[0]))
    begin_ns, end_ns = int(first.begins_ns[0]), max(by.end_ns for by in alike)
    period_s = (end_ns - begin_ns) * 1e-9 / count
    carry = sorted({by.edge for by in alike})
    agree = float(np.median([by.agree for by in alike])) * len(alike) / asked
    return Iterations(
        count=count,
        period_s=period_s,
        communicating_s=period_s,
        edges=np.array(carry),
        edge_bytes=np.array([sum(by.bytes for by in alike if by.edge == edge) for edge in carry]),
        first_slot=begin_ns // edges.width_ns,
        last_slot=end_ns // edges.width_ns,
        begins_ns=first.begins_ns,
        ends_ns=np.append(first.begins_ns[1:], end_ns),
        share=agree,
        confidence=agree * (1 - 0.5 ** (count - 1)),
        basis="lengths",
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


def _begins(places: Whole, times_ns: Whole, first: int, period: float, count: int) -> Whole:
    """Return when iterations begin: where there is most time between messages, in the median."""
    waits_ns = np.diff(times_ns, append=times_ns[-1:])
    typical = float(np.median(waits_ns[:-1] / np.diff(places))) if len(places) > 1 else 0.0
    spare: Real = waits_ns - typical * np.diff(places, append=places[-1:])
    phase = np.rint(((places - first) % period) / _NEAR_BYTES / 2).astype(np.int64)
    phase %= max(round(period / _NEAR_BYTES / 2), 1)
    of_phase = {
        int(place): float(np.median(spare[phase == place]))
        for place in np.unique(phase)
        if (phase == place).sum() >= count - 1
    }
    best = max(of_phase, key=lambda place: of_phase[place], default=0)
    return np.asarray(times_ns[phase == best][:count], np.int64)


def counted_by_bytes(iterations: Iterations | None, payload: Whole) -> Iterations | None:
    """Count what silence left together, if half of the edges say the same whole number.

    The others may say more: start-up went over them, too.
    """
    if iterations is None or iterations.basis in ("messages", "lengths"):
        return iterations
    main = iterations.edge_bytes > iterations.usual_bytes / 2
    times = payload.ravel()[iterations.edges[main]] / iterations.edge_bytes[main]
    count = int(np.rint(times.min()))
    agree = np.abs(times - count) <= _WHOLE
    if count <= iterations.count or not agree[int(np.argmin(times))] or np.mean(agree) < 0.5:
        return iterations
    return replace(iterations, count=count, basis="bytes")


def pattern_since_startup(edges: Edges) -> Pattern:
    """Find the pattern of what was sent after the first part of the bytes, on the main edges."""
    if not edges.payload_bytes.any():
        return Pattern(kind="none")
    order = np.argsort(edges.slot, kind="stable")
    reached = np.cumsum(edges.payload_bytes[order])
    begin = int(edges.slot[order][np.searchsorted(reached, _STARTUP * reached[-1])])
    late = edges.matrix(np.where(edges.slot > begin, edges.payload_bytes, 0))
    return find_pattern(np.where(late > _MAIN_EDGE * late.max(), late, 0).astype(float))


def counted_by_broadcast(edges: Edges) -> Iterations | None:
    """Count how often an all-reduce of what start-up broadcast fits into what was sent since."""
    return _counted_after_startup(edges) or _counted_beside_startup(edges)


def _counted_after_startup(edges: Edges) -> Iterations | None:
    """Count where a silence parts start-up from what came after it."""
    kept = edges.main()
    if not kept.any():
        return None
    slots, place = np.unique(edges.slot[kept], return_inverse=True)
    reached = np.cumsum(np.bincount(place, edges.payload_bytes[kept]))
    early = np.flatnonzero(reached[:-1] <= _STARTUP * reached[-1])
    if not len(early):
        return None
    begin = int(
        slots[early[int(np.argmax(np.diff(slots)[early]))] + 1]
    )  # the longest silence's end
    before = edges.matrix(np.where(edges.slot < begin, edges.payload_bytes, 0))
    after = edges.matrix(np.where(edges.slot >= begin, edges.payload_bytes, 0))
    pattern = find_pattern(after.astype(float))
    if pattern.kind not in _UNMISTAKABLE or not before.any() or pattern.gradient_bytes is None:
        return None
    times = pattern.gradient_bytes / float(np.median(before[before > _LARGE * before.max()]))
    chosen = np.flatnonzero(after.ravel())
    return _counted(edges, times, begin, chosen, after.ravel()[chosen])


def _counted_beside_startup(edges: Edges) -> Iterations | None:
    """Count where start-up also used edges that nothing has used since; they tell its size."""
    payload = edges.matrix(edges.payload_bytes)
    is_main = payload > _MAIN_EDGE * payload.max()
    pattern = pattern_since_startup(edges)
    if pattern.kind not in _UNMISTAKABLE or not pattern.gradient_bytes or not pattern.edge_bytes:
        return None
    # What is sent in small pieces from time to time is control, and no broadcast.
    has_data = edges.payload_bytes > 0
    is_large = edges.payload_bytes > _LEAST_PIECE * np.median(edges.payload_bytes[has_data])
    large = edges.matrix(np.where(is_large, edges.payload_bytes, 0))
    beside = large[~is_main & (large > _LEAST_BESIDE * payload.max())]
    if not len(beside) or beside.max() > beside.min() * (1 + _WHOLE):
        return None
    unit = float(np.median(beside)) * pattern.edge_bytes / pattern.gradient_bytes
    chosen = np.flatnonzero(is_main)
    sent = payload.ravel()[chosen]
    least = int(chosen[int(np.argmin(sent))])  # which start-up did not use
    begin = int(edges.slot[(edges.edge == least) & is_large].min())
    return _counted(edges, float(sent.min()) / unit, begin, chosen, np.full(len(sent), sent.min()))


def _counted(
    edges: Edges, times: float, begin: int, chosen: Whole, sent: Whole
) -> Iterations | None:
    count = round(times)
    if not FEWEST <= count <= _MOST_ALONE or abs(times - count) > _WHOLE_ALONE:
        return None
    last = int(edges.slot[edges.main()].max())
    period_s = (last - begin + 1) * edges.width_ns * 1e-9 / count
    nothing = np.empty(0, np.int64)
    return Iterations(
        count=count,
        period_s=period_s,
        communicating_s=period_s,
        edges=chosen,
        edge_bytes=sent / count,
        first_slot=begin,
        last_slot=last,
        begins_ns=nothing,
        ends_ns=nothing,
        share=1.0,
        confidence=_SURE_ALONE,
        basis="bytes",
    )
