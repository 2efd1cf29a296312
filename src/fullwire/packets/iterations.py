"""Iterations of a training as its traffic shows them: bytes that repeat, with silence between.

Nothing here knows the training. Traffic is cut wherever it is silent for at least so long, for many
such lengths; the length is right where what lies between the cuts has the same bytes again and
again, and where silences just below it are much shorter. Start-up broadcasts and checkpoints have
other bytes, so they are between iterations and none. Where nothing repeats there is no answer.

Input that comes from a store, or a checkpoint that goes there, hides silences and makes bytes
differ. It goes over edges of its own, so each edge is looked at by itself as well: those that
repeat equally often and in the same time are one training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.edges import Edges
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
_SURE = 0.9  # confidence in all edges together: then nothing hides anything
_MOST_EDGES = 12  # that are looked at by themselves
_SAME_PERIOD = 0.1
_MUCH = 0.4  # of what the edges that agree carry
_FEWEST_EDGES = 2  # that agree: one repeats by chance


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Series:
    """Payload by time slot and edge, in order of time."""

    slot: Whole
    edge: Whole
    payload_bytes: Whole
    width_ns: int

    def rows(self, chosen: NDArray[np.bool_]) -> Series:
        """Return some of the rows."""
        return replace(
            self,
            slot=self.slot[chosen],
            edge=self.edge[chosen],
            payload_bytes=self.payload_bytes[chosen],
        )


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

    def is_exchange(self, hosts: int) -> bool:
        """Whether a host both sends and receives, as one does in any sum.

        A transfer that its sender paces repeats as well, one way.
        """
        main = self.edges[self.edge_bytes > _MAIN_EDGE * self.edge_bytes.max()]
        return bool(np.isin(main // hosts, main % hosts).any())


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

    @classmethod
    def at(
        cls, length: int, busy: Whole, silences: Whole, slots: Whole, payload: Real
    ) -> _Cut | None:
        """Cut at silences of at least so many slots; nothing where too little of it is alike."""
        is_cut = silences >= length
        starts = np.concatenate([busy[:1], busy[1:][is_cut]])
        ends = np.concatenate([busy[:-1][is_cut], busy[-1:]])
        total = np.add.reduceat(payload, np.searchsorted(slots, starts))
        # The bursts whose bytes agree, such that they hold most of the bytes.
        ordered = np.sort(total)
        reached = np.concatenate([[0], np.cumsum(ordered)])
        upto = np.searchsorted(ordered, ordered * (1 + _ALIKE), "right")
        least = ordered[int(np.argmax(reached[upto] - reached[:-1]))]
        alike = total[(total >= least) & (total <= least * (1 + _ALIKE))]
        if len(alike) < FEWEST:
            return None
        first, last = _joined(total, float(np.median(alike)))
        reached = np.concatenate([[0], np.cumsum(total)])
        held = float((reached[last + 1] - reached[first]).sum())
        share = held / (reached[last[-1] + 1] - reached[first[0]])
        if len(first) < FEWEST or share < _LEAST_SHARE or held < _LEAST_OF_ALL * reached[-1]:
            return None
        longest_within = int(silences[~is_cut].max(initial=0))
        return cls(
            starts=starts,
            ends=ends,
            first=first,
            last=last,
            share=float(share),
            silence=length,
            jump=(length + 1) / (longest_within + 1),
        )

    @property
    def period(self) -> float:
        """Return how many slots it is from one iteration to the next."""
        steps = np.diff(self.starts[self.first])
        follows = self.first[1:] == self.last[:-1] + 1
        return float(np.median(steps[follows] if follows.any() else steps))

    @property
    def confidence(self) -> float:
        """Return how much of the bytes repeats; less where that is seldom, or had to be joined."""
        whole = float(np.mean(self.first == self.last))
        return self.share * (1 - 0.5 ** (len(self.first) - 1)) * (1 + whole) / 2

    def is_whole_of(self, part: _Cut) -> bool:
        """Whether each iteration is the same small number of iterations of another cut."""
        if part.silence >= _SHORT_SILENCE * part.period or len(self.first) < 2 * FEWEST:
            return False
        begins = self.starts[self.first]
        parts = np.diff(np.searchsorted(part.starts[part.first], begins))
        return bool(1 < parts.min(initial=1) == parts.max(initial=1) <= _MOST_PARTS)


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
    of_all = find_iterations(series, hosts)
    of_all = None if of_all is None or not of_all.is_exchange(hosts) else of_all
    if of_all is not None and of_all.confidence >= _SURE:
        return of_all
    agreeing = _agreeing(series, hosts)
    if agreeing is None:
        return of_all
    of_agreeing = find_iterations(series.rows(np.isin(series.edge, agreeing)), hosts)
    if of_agreeing is None or not of_agreeing.is_exchange(hosts):
        return of_all
    if of_all is not None and of_all.confidence >= of_agreeing.confidence:
        return of_all
    return of_agreeing


def _agreeing(series: Series, hosts: int) -> list[int] | None:
    """Return the edges that repeat together; of several such groups the one with most bytes."""
    sent = np.bincount(series.edge, series.payload_bytes)
    largest = np.argsort(-sent, kind="stable")[:_MOST_EDGES].tolist()
    groups: list[tuple[Iterations, list[int]]] = []
    for edge in (edge for edge in largest if sent[edge] > 0):
        iterations = find_iterations(series.rows(series.edge == edge), hosts)
        if iterations is None:
            continue
        for first, members in groups:
            is_same_period = abs(first.period_s / iterations.period_s - 1) <= _SAME_PERIOD
            if is_same_period and abs(first.count - iterations.count) <= 1:
                members.append(edge)
                break
        else:
            groups.append((iterations, [edge]))
    together = [
        members
        for _, members in groups
        if len(members) >= _FEWEST_EDGES and _is_closed(members, sent, hosts)
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


def find_iterations(series: Series, hosts: int) -> Iterations | None:
    """Find iterations of so many hosts, or none."""
    if not len(series.slot) or not series.payload_bytes.any():
        return None
    slots, place = np.unique(series.slot, return_inverse=True)
    payload = np.bincount(place, series.payload_bytes).astype(np.float64)
    ordered = np.sort(payload)
    reached = np.cumsum(ordered)
    typical = ordered[np.searchsorted(reached, reached[-1] / 2)]  # the median byte lies there
    busy = slots[payload > _FAINT * typical]
    silences = np.diff(busy) - 1
    # The silences worth trying most exceed the next shorter one.
    ordered = np.sort(silences)[::-1]
    jumps = (ordered + 1) / (np.append(ordered[1:], 0) + 1)
    places = np.arange(1, len(ordered) + 1)  # so many cuts
    usable = (jumps > 1) & (places >= FEWEST - 1) & (places <= _MOST_CUTS)
    clear = ordered[usable][np.argsort(-jumps[usable], kind="stable")[:_MOST_LENGTHS]].tolist()
    tried = (_Cut.at(length, busy, silences, slots, payload) for length in clear)
    cuts = [cut for cut in tried if cut is not None]
    candidates: list[Iterations] = []
    while cuts and len(candidates) < _MOST_FOUND:
        # The clearest silence; but equal parts of a longer repetition are that repetition.
        most = max(cut.share for cut in cuts)
        good = [cut for cut in cuts if cut.share >= _NEARLY * most]
        clearest = max(good, key=lambda cut: cut.jump)
        wholes = [cut for cut in good if cut.is_whole_of(clearest)]
        best = max(wholes, key=lambda cut: cut.jump, default=clearest)
        iterations = _iterations(series, best)
        candidates += [] if iterations is None else [iterations]
        cuts.remove(best)
    fitting = (candidate for candidate in candidates if _fits_broadcast(series, candidate, hosts))
    return next(fitting, candidates[0] if candidates else None)


def _fits_broadcast(series: Series, iterations: Iterations, hosts: int) -> bool:
    """Whether an iteration is an all-reduce of what start-up broadcast.

    That tells apart what bytes and silence cannot: five equal buckets, and five iterations between
    evaluations.
    """
    early = series.slot < iterations.first_slot
    before = np.bincount(series.edge[early], series.payload_bytes[early])
    broadcast = before[before > _LARGE * iterations.usual_bytes]
    if not len(broadcast) or hosts < 2:
        return False
    # With a rank on each host: with several, two iterations may fit what two ranks were sent.
    wanted = 2 * (hosts - 1) / hosts * float(np.median(broadcast))
    return abs(iterations.usual_bytes / wanted - 1) < _FITS


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


def _iterations(series: Series, cut: _Cut) -> Iterations | None:
    """Make iterations of a cut, unless they go over other edges each time."""
    edges, edge = np.unique(series.edge, return_inverse=True)
    burst = np.clip(np.searchsorted(cut.starts, series.slot, "right") - 1, 0, None)
    cells = np.bincount(
        burst * len(edges) + edge, series.payload_bytes, len(cut.starts) * len(edges)
    )
    by_burst = cells.reshape(len(cut.starts), len(edges)).astype(np.float64)
    reached = np.concatenate([np.zeros((1, len(edges))), np.cumsum(by_burst, axis=0)])
    sent = reached[cut.last + 1] - reached[cut.first]
    usual = np.median(sent, axis=0)
    alike = np.zeros(len(sent), bool)
    if usual.any():  # a share of each iteration's bytes is on other edges than usual
        alike = np.abs(sent - usual).sum(axis=1) / usual.sum() < _OTHER_EDGES
    if np.mean(alike) < _LEAST_ALIKE:
        return None
    cut = replace(cut, first=cut.first[alike], last=cut.last[alike])
    # What the iterations' own edges carry between any two alike is part of one: where one host is
    # late, the others send what they have, and silence parts that from the rest.
    main = usual > _MAIN_EDGE * usual.max()
    between = reached[cut.first[1:]] - reached[cut.last[:-1] + 1]
    ahead = np.where(main, np.median(between, axis=0), 0.0)
    are_close = np.abs(between.sum(axis=1) - ahead.sum()) <= _ALIKE * usual.sum()
    if ahead.sum() > _ALIKE * usual.sum() and np.mean(are_close) >= _LEAST_ALIKE:
        usual += ahead
    # A burst with an iteration's bytes on every edge holds one as well, whatever else was sent just
    # before, without a silence between.
    main = usual > _MAIN_EDGE * usual.max()
    held = np.floor((by_burst[:, main] / usual[main]).min(axis=1) + _ALIKE).astype(np.int64)
    for first, last in zip(cut.first, cut.last, strict=True):
        held[first : last + 1] = 0
    bursts = np.concatenate([cut.first, np.flatnonzero(held)])
    lasting = np.median(cut.ends[cut.last] - cut.starts[cut.first] + 1)
    seconds = series.width_ns * 1e-9
    return Iterations(
        count=len(cut.first) + int(held.sum()),
        period_s=cut.period * seconds,
        communicating_s=float(lasting) * seconds,
        edges=edges,
        edge_bytes=usual,
        first_slot=int(cut.starts[bursts.min()]),
        last_slot=int(cut.ends[np.concatenate([cut.last, bursts]).max()]),
        begins_ns=cut.starts[cut.first] * series.width_ns,
        ends_ns=(cut.ends[cut.last] + 1) * series.width_ns,
        share=cut.share,
        confidence=cut.confidence,
        basis="silence",
    )
