"""Iterations of a training as its traffic shows them: bytes that repeat, with silence between.

Nothing here knows the training. Traffic is cut wherever it is silent for at least so long, for many
such lengths; the length is right where what lies between the cuts has the same bytes again and
again, and where silences just below it are much shorter. Start-up broadcasts and checkpoints have
other bytes, so they are between iterations and none. Where nothing repeats there is no answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fullwire.run.run import Real, Whole

FEWEST = 3  # fewer than this repeat by chance
_ALIKE = 0.01  # bytes of two iterations differ by less; preambles and control messages do
_LEAST_SHARE = 0.7  # of the bytes from the first iteration to the last: must be in iterations
_LEAST_OF_ALL = 0.3  # of all bytes: what repeats beside a larger thing is not the training
_FAINT = 0.02  # of a typical time slot: heartbeats and acknowledgements break no silence
_MOST_CUTS = 20_000
_MOST_LENGTHS = 64
# Silences within an iteration, between equal buckets, are short against it. Two levels of cuts
# that repeat equally well are told apart by that.
_SHORT_SILENCE = 0.08
_MOST_PARTS = 8
_MOST_STALLS = 4  # more pieces would add up to an iteration's bytes by chance
_NEARLY = 0.95  # of the largest share: as good
_MOST_FOUND = 12  # ways to cut that are looked at
_LARGE = 0.1  # of an iteration, on an edge before the first: start-up broadcasts
_FITS = 0.003  # headers of messages make it a little more
_OTHER_EDGES = 0.5  # of the bytes on others than usual: it is another thing that repeats
_LEAST_ALIKE = 0.7  # of the iterations use the same edges
_MAIN_EDGE = 0.05  # of the largest: an edge with less in an iteration proves none


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Series:
    """Payload by time slot and edge, in order of time."""

    slot: Whole
    edge: Whole
    payload_bytes: Whole
    width_ns: int


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Iterations:
    """Iterations that were found, and how sure that is, from 0 to 1."""

    count: int
    period_s: float
    communicating_s: float
    edges: Whole  # that carry it
    edge_bytes: Real  # payload of one iteration on each of them
    first_slot: int
    last_slot: int
    begins_ns: Whole  # of those that can be parted from what was around them
    ends_ns: Whole
    share: float  # of the bytes from the first to the last, in iterations that can be parted
    confidence: float
    basis: Literal["silence", "messages", "lengths", "bytes"]

    @property
    def usual_bytes(self) -> float:
        """Return the payload of one iteration on a usual edge of those that carry it."""
        main = self.edge_bytes > _MAIN_EDGE * self.edge_bytes.max()
        return float(np.median(self.edge_bytes[main]))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Cut:
    """Traffic cut at silences of at least one length, and the iterations among its bursts."""

    starts: Whole  # of each burst, its first busy slot
    ends: Whole  # and its last
    first: Whole  # of each iteration, its first burst
    last: Whole  # and its last
    share: float  # of the bytes from the first iteration to the last, in iterations
    silence: int  # the shortest, in slots
    jump: float  # how much longer that is than the longest that is no cut

    @property
    def period(self) -> float:
        """Return how many slots it is from one iteration to the next."""
        steps = np.diff(self.starts[self.first])
        follows = self.first[1:] == self.last[:-1] + 1
        return float(np.median(steps[follows] if follows.any() else steps))


def find_iterations(series: Series, hosts: int) -> Iterations | None:
    """Find iterations of so many hosts, or none."""
    if not len(series.slot) or not series.payload_bytes.any():
        return None
    slots, place = np.unique(series.slot, return_inverse=True)
    payload = np.bincount(place, series.payload_bytes).astype(np.float64)
    busy = slots[payload > _FAINT * _typical(payload)]
    silences = np.diff(busy) - 1
    tried = (_cut_at(length, busy, silences, slots, payload) for length in _lengths(silences))
    cuts = [each for each in tried if each is not None]
    found: list[Iterations] = []
    while cuts and len(found) < _MOST_FOUND:
        best = _best(cuts)
        iterations = _iterations(series, best)
        found += [] if iterations is None else [iterations]
        cuts.remove(best)
    fitting = (each for each in found if _fits_broadcast(series, each, hosts))
    return next(fitting, found[0] if found else None)


def _fits_broadcast(series: Series, found: Iterations, hosts: int) -> bool:
    """Whether an iteration is an all-reduce of what start-up broadcast.

    That tells apart what bytes and silence cannot: five equal buckets, and five iterations between
    evaluations.
    """
    early = series.slot < found.first_slot
    before = np.bincount(series.edge[early], series.payload_bytes[early])
    broadcast = before[before > _LARGE * found.usual_bytes]
    if not len(broadcast) or hosts < 2:
        return False
    # With a rank on each host: with several, two iterations may fit what two ranks were sent.
    wanted = 2 * (hosts - 1) / hosts * float(np.median(broadcast))
    return abs(found.usual_bytes / wanted - 1) < _FITS


def _typical(payload: Real) -> float:
    """Return the payload of a slot in which the median byte lies."""
    ordered = np.sort(payload)
    reached = np.cumsum(ordered)
    return float(ordered[np.searchsorted(reached, reached[-1] / 2)])


def _lengths(silences: Whole) -> list[int]:
    """Return the silences worth trying: those that most exceed the next shorter one."""
    ordered = np.sort(silences)[::-1]
    shorter = np.append(ordered[1:], 0)
    jumps = (ordered + 1) / (shorter + 1)
    places = np.arange(1, len(ordered) + 1)  # so many cuts
    usable = (jumps > 1) & (places >= FEWEST - 1) & (places <= _MOST_CUTS)
    best = np.argsort(-jumps[usable], kind="stable")[:_MOST_LENGTHS]
    return [int(length) for length in ordered[usable][best]]


def _cut_at(length: int, busy: Whole, silences: Whole, slots: Whole, payload: Real) -> _Cut | None:
    is_cut = silences >= length
    starts = np.concatenate([busy[:1], busy[1:][is_cut]])
    ends = np.concatenate([busy[:-1][is_cut], busy[-1:]])
    total = np.add.reduceat(payload, np.searchsorted(slots, starts))
    alike = _most_alike(total)
    if alike.sum() < FEWEST:
        return None
    first, last = _joined(total, float(np.median(total[alike])))
    reached = np.concatenate([[0], np.cumsum(total)])
    held = float((reached[last + 1] - reached[first]).sum())
    share = held / (reached[last[-1] + 1] - reached[first[0]])
    if len(first) < FEWEST or share < _LEAST_SHARE or held < _LEAST_OF_ALL * reached[-1]:
        return None
    longest_within = int(silences[~is_cut].max(initial=0))
    return _Cut(
        starts=starts,
        ends=ends,
        first=first,
        last=last,
        share=float(share),
        silence=length,
        jump=(length + 1) / (longest_within + 1),
    )


def _joined(total: Real, unit: float) -> tuple[Whole, Whole]:
    """Join bursts in a row that together have an iteration's bytes: it stalled, and was cut.

    The one that ends first comes first, which leaves room for most.
    """
    first, last, free = [], [], 0
    for burst in range(len(total)):
        held = 0.0
        for begin in range(burst, max(free, burst - _MOST_STALLS) - 1, -1):
            held += float(total[begin])
            if abs(held - unit) <= _ALIKE * unit:
                first.append(begin)
                last.append(burst)
                free = burst + 1
                break
    return np.array(first), np.array(last)


def _most_alike(total: Real) -> NDArray[np.bool_]:
    """Choose the bursts whose bytes agree, such that they hold most of the bytes."""
    ordered = np.sort(total)
    reached = np.concatenate([[0], np.cumsum(ordered)])
    upto = np.searchsorted(ordered, ordered * (1 + _ALIKE), "right")
    held = reached[upto] - reached[:-1]
    least = ordered[int(np.argmax(held))]
    alike: NDArray[np.bool_] = (total >= least) & (total <= least * (1 + _ALIKE))
    return alike


def _best(cuts: list[_Cut]) -> _Cut:
    """Choose the clearest silence; equal parts of a longer repetition are that repetition."""
    most = max(each.share for each in cuts)
    good = [each for each in cuts if each.share >= _NEARLY * most]
    best = max(good, key=lambda each: each.jump)
    wholes = [each for each in good if _is_whole_of(each, best)]
    return max(wholes, key=lambda each: each.jump, default=best)


def _is_whole_of(longer: _Cut, part: _Cut) -> bool:
    """Whether each iteration of one is the same small number of iterations of the other."""
    if part.silence >= _SHORT_SILENCE * part.period or len(longer.first) < 2 * FEWEST:
        return False
    begins = longer.starts[longer.first]
    parts = np.diff(np.searchsorted(part.starts[part.first], begins))
    return bool(1 < parts.min(initial=1) == parts.max(initial=1) <= _MOST_PARTS)


def _iterations(series: Series, cut: _Cut) -> Iterations | None:
    edges, by_burst = _by_edge(series, cut)
    reached = np.concatenate([np.zeros((1, len(edges))), np.cumsum(by_burst, axis=0)])
    each = reached[cut.last + 1] - reached[cut.first]
    usual = np.median(each, axis=0)
    alike = _differs(each, usual) < _OTHER_EDGES if usual.any() else np.zeros(len(each), bool)
    if np.mean(alike) < _LEAST_ALIKE:
        return None  # as many bytes each time, but not over the same edges
    cut = replace(cut, first=cut.first[alike], last=cut.last[alike])
    usual += _sent_ahead(reached[cut.first[1:]] - reached[cut.last[:-1] + 1], usual)
    held = _held_besides(by_burst, usual, cut)
    found = np.concatenate([cut.first, np.flatnonzero(held)])
    lasting = np.median(cut.ends[cut.last] - cut.starts[cut.first] + 1)
    seconds = series.width_ns * 1e-9
    return Iterations(
        count=len(cut.first) + int(held.sum()),
        period_s=cut.period * seconds,
        communicating_s=float(lasting) * seconds,
        edges=edges,
        edge_bytes=usual,
        first_slot=int(cut.starts[found.min()]),
        last_slot=int(cut.ends[np.concatenate([cut.last, found]).max()]),
        begins_ns=cut.starts[cut.first] * series.width_ns,
        ends_ns=(cut.ends[cut.last] + 1) * series.width_ns,
        share=cut.share,
        confidence=_confidence(cut),
        basis="silence",
    )


def _sent_ahead(between: Real, usual: Real) -> Real:
    """Return what the iterations' own edges carry between any two alike: it is part of one.

    Where one host is late, the others send what they have, and silence parts that from the rest.
    """
    main = usual > _MAIN_EDGE * usual.max()
    ahead = np.where(main, np.median(between, axis=0), 0.0)
    total = between.sum(axis=1)
    alike = np.abs(total - ahead.sum()) <= _ALIKE * usual.sum()
    if ahead.sum() <= _ALIKE * usual.sum() or np.mean(alike) < _LEAST_ALIKE:
        return np.zeros(len(usual))
    return ahead


def _differs(each: Real, usual: Real) -> Real:
    """Return how much of each iteration's bytes are on other edges than usual."""
    return np.asarray(np.abs(each - usual).sum(axis=1) / usual.sum(), np.float64)


def _held_besides(by_burst: Real, usual: Real, cut: _Cut) -> Whole:
    """Count iterations in the other bursts, where no silence parts them from what was around.

    A burst with an iteration's bytes on every edge holds one, whatever else was sent just before.
    """
    main = usual > _MAIN_EDGE * usual.max()
    held: Whole = np.floor((by_burst[:, main] / usual[main]).min(axis=1) + _ALIKE).astype(np.int64)
    for first, last in zip(cut.first, cut.last, strict=True):
        held[first : last + 1] = 0
    return held


def _by_edge(series: Series, cut: _Cut) -> tuple[Whole, Real]:
    edges, edge = np.unique(series.edge, return_inverse=True)
    burst = np.clip(np.searchsorted(cut.starts, series.slot, "right") - 1, 0, None)
    cells = np.bincount(
        burst * len(edges) + edge, series.payload_bytes, len(cut.starts) * len(edges)
    )
    return edges, cells.reshape(len(cut.starts), len(edges)).astype(np.float64)


def _confidence(cut: _Cut) -> float:
    """Return how much of the bytes repeats; less where it repeats seldom, or had to be joined."""
    whole = float(np.mean(cut.first == cut.last))
    return cut.share * (1 - 0.5 ** (len(cut.first) - 1)) * (1 + whole) / 2
