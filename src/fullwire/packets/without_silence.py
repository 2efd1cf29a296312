"""Find iterations without silences between them, by lengths of messages or by counting bytes.

A slow link is hardly ever silent, so its iterations run into each other. Completely overlapped
communication is never silent at all.

The lengths of messages repeat in order in each iteration. A packet that is not full ends a message.
For nearly every place of the stream where a message ends, another one ends an iteration's bytes
later. Few lengths could do that by chance. If all messages are equally long, the answer is None.
The stream does not show where an iteration begins. The beginning is put where the time between
messages is longest.

The other way is to count bytes. The number of iterations that fit into the bytes of an edge must be
the same whole number for all edges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.edges import Edges, host_names, hosts_of, median, numbered_pairs
from fullwire.packets.iterations import FEWEST, Iterations
from fullwire.packets.pattern import Pattern, find_pattern
from fullwire.run.run import UNREAD, Real, Run, Whole

_SMALL_BYTES = 1024  # Control messages are shorter, and their places are up to chance.
_NEAR_BYTES = 512  # Two places this close are the same.
_MOST_PLACES = 800  # Places of a connection whose differences are looked at.
_MOST_PERIODS = 32  # Candidates for the period.
_MOST_CONNECTIONS = 8
_LEAST_AGREE = 0.8  # share of the places that have another one a period later
_AS_GOOD = 0.05
_DIFFERENT = 0.02  # Different lengths of messages differ by more.
_LEAST_PLACES = 4  # Places in a period.
_MAIN_CONNECTION = 0.05  # Share of the largest connection.
_MOSTLY = 0.6  # Share of the main connections that must give the same number.
_WHOLE = 0.05  # A number of iterations must be this close to a whole number.
_WHOLE_ALONE = 0.02  # The same if bytes are the only evidence.
_MOST_ALONE = 500  # Above it, headers of messages make any number look whole.
_SURE_ALONE = 0.5  # Such a count is right or a coincidence: bytes leave that open.
# A two-way ring of four may be recursive doubling, with other bytes for the same gradient.
_UNMISTAKABLE = ("ring", "halving-doubling", "tree", "double tree")
_STARTUP = 0.3  # Largest share of all bytes before the silence that ends start-up.
_MAIN_EDGE = 0.25  # Share of the largest edge: an edge with less takes no part in iterations.
_LEAST_PIECE = 0.01  # Share of a usual time slot's bytes.
_LEAST_BESIDE = 0.002  # Share of the largest edge.
_LARGE = 0.5  # Share of start-up's largest edge: an edge with more carried the broadcast.


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Repeated:
    """A connection's bytes in an iteration, the number of iterations, and their times."""

    edge: int
    bytes: float
    count: int
    agree: float
    begins_ns: Whole
    end_ns: int

    @classmethod
    def by_connection(cls, edge: int, lengths: Whole, ends_ns: Whole) -> _Repeated | None:
        """Find the repetition in the places where one connection's messages end."""
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
        # A period must hold messages of several lengths.
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
    """Find iterations on which most of the connections agree, or return None."""
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
    agree = float(median([by.agree for by in alike])) * len(alike) / asked
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
        period = float(median(near))
        agree.append((period, _with_partner(places, period)[1]))
    most = max((share for _, share in agree), default=0.0)
    if most < _LEAST_AGREE:
        return None
    return next(period for period, share in agree if share >= most - _AS_GOOD)


def _with_partner(places: Whole, period: float) -> tuple[NDArray[np.bool_], float]:
    """Return which places have another one a period later, and their share of those that could."""
    wanted = places + period
    nearest = np.clip(np.searchsorted(places, wanted), 1, len(places) - 1)
    distance = np.minimum(np.abs(places[nearest] - wanted), np.abs(places[nearest - 1] - wanted))
    has_next = distance <= _NEAR_BYTES
    could = wanted <= places[-1] + _NEAR_BYTES
    return has_next, float(np.mean(has_next[could])) if could.any() else 0.0


def _begins(places: Whole, times_ns: Whole, first: int, period: float, count: int) -> Whole:
    """Return when iterations begin: at the place with the longest median wait for a message."""
    waits_ns = np.diff(times_ns, append=times_ns[-1:])
    typical = float(median(waits_ns[:-1] / np.diff(places))) if len(places) > 1 else 0.0
    spare: Real = waits_ns - typical * np.diff(places, append=places[-1:])
    phase = np.rint(((places - first) % period) / _NEAR_BYTES / 2).astype(np.int64)
    phase %= max(round(period / _NEAR_BYTES / 2), 1)
    of_phase = {
        int(place): float(median(spare[phase == place]))
        for place in np.unique(phase)
        if (phase == place).sum() >= count - 1
    }
    best = max(of_phase, key=lambda place: of_phase[place], default=0)
    return np.asarray(times_ns[phase == best][:count], np.int64)


def counted_by_bytes(iterations: Iterations | None, payload: Whole) -> Iterations | None:
    """Count iterations that silence leaves joined, if half of the edges give one whole number.

    The other edges may give more, because start-up went over them too.
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
    """Find the pattern of the traffic on the main edges after the first part of all bytes."""
    if not edges.payload_bytes.any():
        return Pattern(kind="none")
    order = np.argsort(edges.slot, kind="stable")
    reached = np.cumsum(edges.payload_bytes[order])
    begin = int(edges.slot[order][np.searchsorted(reached, _STARTUP * reached[-1])])
    late = edges.matrix(np.where(edges.slot > begin, edges.payload_bytes, 0))
    return find_pattern(np.where(late > _MAIN_EDGE * late.max(), late, 0).astype(float))


def counted_by_broadcast(edges: Edges) -> Iterations | None:
    """Count how many all-reduces of the start-up broadcast fit into the later traffic."""
    return _counted_after_startup(edges) or _counted_beside_startup(edges)


def _counted_after_startup(edges: Edges) -> Iterations | None:
    """Count the all-reduces after a silence that ends start-up."""
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
    )  # the end of the longest silence
    before = edges.matrix(np.where(edges.slot < begin, edges.payload_bytes, 0))
    after = edges.matrix(np.where(edges.slot >= begin, edges.payload_bytes, 0))
    pattern = find_pattern(after.astype(float))
    if pattern.kind not in _UNMISTAKABLE or not before.any() or pattern.gradient_bytes is None:
        return None
    times = pattern.gradient_bytes / float(median(before[before > _LARGE * before.max()]))
    chosen = np.flatnonzero(after.ravel())
    return _counted(edges, times, begin, chosen, after.ravel()[chosen])


def _counted_beside_startup(edges: Edges) -> Iterations | None:
    """Count by the size of the broadcast on edges that only start-up used."""
    payload = edges.matrix(edges.payload_bytes)
    is_main = payload > _MAIN_EDGE * payload.max()
    pattern = pattern_since_startup(edges)
    if pattern.kind not in _UNMISTAKABLE or not pattern.gradient_bytes or not pattern.edge_bytes:
        return None
    # Small pieces from time to time are control messages, and no broadcast.
    has_data = edges.payload_bytes > 0
    is_large = edges.payload_bytes > _LEAST_PIECE * median(edges.payload_bytes[has_data])
    large = edges.matrix(np.where(is_large, edges.payload_bytes, 0))
    beside = large[~is_main & (large > _LEAST_BESIDE * payload.max())]
    if not len(beside) or beside.max() > beside.min() * (1 + _WHOLE):
        return None
    unit = float(median(beside)) * pattern.edge_bytes / pattern.gradient_bytes
    chosen = np.flatnonzero(is_main)
    sent = payload.ravel()[chosen]
    least = int(chosen[int(np.argmin(sent))])  # the edge that start-up did not use
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
