"""Find the iterations of a training in its traffic: bytes that repeat, with silence between.

The search uses the traffic alone. It cuts the traffic at each silence of at least some length, and
tries many lengths. A length is right if the pieces have the same bytes again and again. Also, all
shorter silences must be much shorter. Start-up broadcasts and checkpoints have other bytes, so they
fall between iterations. Only traffic that repeats gives a result.

Input from a store, or a checkpoint to it, hides silences and makes bytes differ. It goes over edges
of its own, so each edge is searched by itself as well. Edges that repeat equally often and at the
same pace belong to one training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.edges import Edges, median
from fullwire.run.run import Real, Whole

FEWEST = 3  # Fewer iterations may repeat by chance.
_ALIKE = 0.01  # Bytes of two iterations differ by less, through preambles and control messages.
_LEAST_SHARE = 0.7  # Share of the bytes from first to last iteration that iterations must hold.
_LEAST_OF_ALL = 0.3  # Share of all bytes: a repetition with less is not the training.
_FAINT = 0.02  # Share of a typical time slot: heartbeats and acknowledgements break no silence.
_MOST_CUTS = 20_000
_MOST_LENGTHS = 64
# Silences between equal buckets of an iteration are short against the iteration. This decides
# between two levels of cuts that repeat equally well.
_SHORT_SILENCE = 0.08
_MOST_PARTS = 8
_MOST_STALLS = 4  # More pieces would add up to an iteration's bytes by chance.
_NEARLY = 0.95  # Share of the largest share: cuts above it are as good.
_MOST_FOUND = 12  # Ways to cut that are looked at.
_LARGE = 0.1  # Share of an iteration: an edge with more before the first one had the broadcast.
_FITS = 0.003  # Headers of messages add a little.
_OTHER_EDGES = 0.5  # Share of bytes on unusual edges: with more, the repetition is another thing.
_LEAST_ALIKE = 0.7  # Share of the iterations that must use the same edges.
_MAIN_EDGE = 0.05  # Share of the largest edge: an edge with less is no evidence.
_SURE = 0.9  # Confidence in all edges together at which single edges need no search.
_MOST_EDGES = 12  # Edges that are searched by themselves.
_SAME_PERIOD = 0.1
_MUCH = 0.4  # Share of the median payload of the edges that agree.
_FEWEST_EDGES = 2  # Edges that must agree, as one may repeat by chance.


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
    """The iterations found, and the confidence in them from 0 to 1."""

    count: int
    period_s: float
    communicating_s: float
    edges: Whole  # the edges that carry an iteration
    edge_bytes: Real  # payload of one iteration on each of them
    first_slot: int
    last_slot: int
    begins_ns: Whole  # beginnings of the iterations whose borders are visible
    ends_ns: Whole
    share: float  # share of the bytes from the first to the last iteration that iterations hold
    confidence: float
    basis: Literal["silence", "messages", "lengths", "bytes"]

    @property
    def usual_bytes(self) -> float:
        """Return the payload of one iteration on a usual edge that carries it."""
        main = self.edge_bytes > _MAIN_EDGE * self.edge_bytes.max()
        return float(median(self.edge_bytes[main]))

    def is_exchange(self, hosts: int) -> bool:
        """Whether some host both sends and receives, as hosts do in every sum.

        A one-way transfer may repeat as well, if its sender paces it.
        """
        main = self.edges[self.edge_bytes > _MAIN_EDGE * self.edge_bytes.max()]
        return bool(np.isin(main // hosts, main % hosts).any())


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Cut:
    """Traffic cut at silences of at least one length, and the iterations among its bursts."""

    starts: Whole  # The first busy slot of each burst.
    ends: Whole  # The last busy slot of each burst.
    first: Whole  # The first burst of each iteration.
    last: Whole  # The last burst of each iteration.
    share: float  # Share of the bytes from first to last iteration that iterations hold.
    silence: int  # The shortest silence of a cut, in slots.
    jump: float  # Its ratio to the longest silence without a cut.

    @classmethod
    def at(
        cls, length: int, busy: Whole, silences: Whole, slots: Whole, payload: Real
    ) -> _Cut | None:
        """Cut at silences of at least `length` slots; return None if few of the bytes repeat."""
        is_cut = silences >= length
        starts = np.concatenate([busy[:1], busy[1:][is_cut]])
        ends = np.concatenate([busy[:-1][is_cut], busy[-1:]])
        total = np.add.reduceat(payload, np.searchsorted(slots, starts))
        # Of all sets of bursts of similar size, choose the set that holds most of the bytes.
        ordered = np.sort(total)
        reached = np.concatenate([[0], np.cumsum(ordered)])
        upto = np.searchsorted(ordered, ordered * (1 + _ALIKE), "right")
        least = ordered[int(np.argmax(reached[upto] - reached[:-1]))]
        alike = total[(total >= least) & (total <= least * (1 + _ALIKE))]
        if len(alike) < FEWEST:
            return None
        first, last = _joined(total, float(median(alike)))
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
        """Return the number of slots from one iteration to the next."""
        steps = np.diff(self.starts[self.first])
        follows = self.first[1:] == self.last[:-1] + 1
        return float(median(steps[follows] if follows.any() else steps))

    @property
    def confidence(self) -> float:
        """Return the share of the bytes that repeats; less for few or for joined iterations."""
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
    """Return the payload of the main edges, slot by slot."""
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
    """Return the edges that repeat together; of several groups, the one with most bytes."""
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
    """Whether these edges are a whole pattern, and other traffic is apart from them.

    They must be all the edges among their hosts that carry much. Another host may only send, as a
    store does, or only receive.
    """
    inside = {end for edge in members for end in divmod(edge, hosts)}
    much = _MUCH * float(median(sent[members]))
    others = [
        divmod(edge, hosts) for edge in np.flatnonzero(sent > much).tolist() if edge not in members
    ]
    senders = {source for source, _ in others} - inside
    receivers = {target for _, target in others} - inside
    among = any(source in inside and target in inside for source, target in others)
    return not among and not senders & receivers


def find_iterations(series: Series, hosts: int) -> Iterations | None:
    """Find the iterations of a series, or return None."""
    if not len(series.slot) or not series.payload_bytes.any():
        return None
    slots, place = np.unique(series.slot, return_inverse=True)
    payload = np.bincount(place, series.payload_bytes).astype(np.float64)
    ordered = np.sort(payload)
    reached = np.cumsum(ordered)
    typical = ordered[np.searchsorted(reached, reached[-1] / 2)]  # the median byte lies there
    busy = slots[payload > _FAINT * typical]
    silences = np.diff(busy) - 1
    # Try the silences first that exceed the next shorter one most.
    ordered = np.sort(silences)[::-1]
    jumps = (ordered + 1) / (np.append(ordered[1:], 0) + 1)
    places = np.arange(1, len(ordered) + 1)  # the number of cuts for each silence
    usable = (jumps > 1) & (places >= FEWEST - 1) & (places <= _MOST_CUTS)
    clear = ordered[usable][np.argsort(-jumps[usable], kind="stable")[:_MOST_LENGTHS]].tolist()
    tried = (_Cut.at(length, busy, silences, slots, payload) for length in clear)
    cuts = [cut for cut in tried if cut is not None]
    candidates: list[Iterations] = []
    while cuts and len(candidates) < _MOST_FOUND:
        # Take the clearest silence. If its pieces are equal parts of a longer repetition, take the
        # longer one.
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
    """Whether an iteration is an all-reduce of the data that start-up broadcast.

    Five equal buckets, and five iterations between evaluations, have the same bytes and silences.
    The broadcast decides between them.
    """
    early = series.slot < iterations.first_slot
    before = np.bincount(series.edge[early], series.payload_bytes[early])
    broadcast = before[before > _LARGE * iterations.usual_bytes]
    if not len(broadcast) or hosts < 2:
        return False
    # This holds for one rank on each host. With two, two iterations may fit two broadcasts.
    wanted = 2 * (hosts - 1) / hosts * float(median(broadcast))
    return abs(iterations.usual_bytes / wanted - 1) < _FITS


def _joined(total: Real, unit: float) -> tuple[Whole, Whole]:
    """Join bursts in a row that together have an iteration's bytes: the iteration stalled.

    The iteration that ends first is taken first, which leaves room for most others.
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
    """Make iterations of a cut; return None if they use other edges each time."""
    edges, edge = np.unique(series.edge, return_inverse=True)
    burst = np.clip(np.searchsorted(cut.starts, series.slot, "right") - 1, 0, None)
    cells = np.bincount(
        burst * len(edges) + edge, series.payload_bytes, len(cut.starts) * len(edges)
    )
    by_burst = cells.reshape(len(cut.starts), len(edges)).astype(np.float64)
    reached = np.concatenate([np.zeros((1, len(edges))), np.cumsum(by_burst, axis=0)])
    sent = reached[cut.last + 1] - reached[cut.first]
    usual = median(sent, axis=0)
    alike = np.zeros(len(sent), bool)
    if usual.any():  # for each iteration, the share of bytes on other edges than usual
        alike = np.abs(sent - usual).sum(axis=1) / usual.sum() < _OTHER_EDGES
    if np.mean(alike) < _LEAST_ALIKE:
        return None
    cut = replace(cut, first=cut.first[alike], last=cut.last[alike])
    # If the same bytes come between any two iterations, on their own edges, they belong to one. If
    # one host is late, the others send their data early, and a silence follows before the rest.
    main = usual > _MAIN_EDGE * usual.max()
    between = reached[cut.first[1:]] - reached[cut.last[:-1] + 1]
    ahead = np.where(main, median(between, axis=0), 0.0)
    are_close = np.abs(between.sum(axis=1) - ahead.sum()) <= _ALIKE * usual.sum()
    if ahead.sum() > _ALIKE * usual.sum() and np.mean(are_close) >= _LEAST_ALIKE:
        usual += ahead
    # A burst with an iteration's bytes on every edge holds an iteration too. It has more bytes if
    # other traffic came just before it, with no silence between.
    main = usual > _MAIN_EDGE * usual.max()
    held = np.floor((by_burst[:, main] / usual[main]).min(axis=1) + _ALIKE).astype(np.int64)
    for first, last in zip(cut.first, cut.last, strict=True):
        held[first : last + 1] = 0
    bursts = np.concatenate([cut.first, np.flatnonzero(held)])
    lasting = median(cut.ends[cut.last] - cut.starts[cut.first] + 1)
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
