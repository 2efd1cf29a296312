"""Iterations counted by bytes, where silence does not part them.

A slow link hardly falls silent, and its iterations run into each other; communication that is
overlapped completely never falls silent at all. Bytes can still be counted: how often an iteration
fits into what each edge sent must be the same whole number for all of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fullwire.packets.edges import Edges
from fullwire.packets.iterations import FEWEST, Iterations
from fullwire.packets.pattern import Pattern, find_pattern
from fullwire.run.run import Whole

_WHOLE = 0.05  # a number of iterations is as close to a whole one
_WHOLE_ALONE = 0.02  # where nothing else says that there are iterations
_MOST_ALONE = 500  # beyond, headers of messages make any number look whole
_SURE_ALONE = 0.5  # such a count is right or a coincidence, and bytes cannot say which
# A two-way ring of four may be recursive doubling, with other bytes for the same gradient.
_UNMISTAKABLE = ("ring", "halving-doubling", "tree", "double tree")
_STARTUP = 0.3  # of all bytes come before the silence that ends start-up, at most
_MAIN = 0.25  # of the largest edge: one with less has no part in what repeats
_LEAST_PIECE = 0.01  # of a usual time slot's bytes
_LEAST_BESIDE = 0.002  # of the largest edge
_LARGE = 0.5  # of the largest edge in start-up: what the broadcast uses


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
    return find_pattern(np.where(late > _MAIN * late.max(), late, 0).astype(float))


def counted_by_broadcast(edges: Edges) -> Iterations | None:
    """Count how often an all-reduce of what start-up broadcast fits into what was sent since."""
    return _counted_after_startup(edges) or _counted_beside_startup(edges)


def _counted_after_startup(edges: Edges) -> Iterations | None:
    """Count where a silence parts start-up from what came after it."""
    begin = _after_startup(edges)
    if begin is None:
        return None
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
    is_main = payload > _MAIN * payload.max()
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


def _after_startup(edges: Edges) -> int | None:
    """Return the first slot after the longest silence in the first part of the bytes."""
    kept = edges.main()
    if not kept.any():
        return None
    slots, place = np.unique(edges.slot[kept], return_inverse=True)
    reached = np.cumsum(np.bincount(place, edges.payload_bytes[kept]))
    early = np.flatnonzero(reached[:-1] <= _STARTUP * reached[-1])
    if not len(early):
        return None
    return int(slots[early[int(np.argmax(np.diff(slots)[early]))] + 1])
