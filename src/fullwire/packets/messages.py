"""Find collectives by a library's own message headers, and the iterations among them.

Each direction of each connection carries a part of a collective. The parts of one collective have
its operation and number, and overlap in time. The bytes on a connection give the size of the
tensor.

Iterations are the repetitions in the sequence of collectives, with or without silences. The period
is the shortest one at which nearly every collective comes again. If parts are equal, the number of
parts in an iteration is open. Then the model's size decides, or a longer silence before every k-th
part. Traffic between repetitions counts as well, if it has the bytes of whole iterations: the first
iteration has other buckets than the later ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import bus_factor
from fullwire.packets.edges import median, numbered_pairs
from fullwire.packets.iterations import FEWEST, Iterations
from fullwire.run.intervals import covered_ns
from fullwire.run.run import Messages, Real, Text, Whole

_LEAST_PART = 0.005  # share of the largest collective: a smaller one, like a metric's, is ignored
_SAME_BYTES = 0.002
_HEADERS = 96  # Bytes that Gloo sends with each message: its header, and an offer.
_MAIN_EDGE = 0.05  # Share of the largest edge: an edge with less carries control messages.
_TRAINING = ("allreduce", "reducescatter", "allgather", "alltoall")  # Others come beside them.
_READ = 0.99  # Share of the bytes that must be read, to be sure of their collective.
_AT_ONCE_NS = 1_000_000_000  # A tag that comes again later belongs to another collective.
_MOST_TIMED = 200  # Iterations that are timed for the usual communication time.
_SURE = 0.9  # Confidence at which the search ends.
_LEAST_TOLD = 0.7  # Share of all payload that the messages read must hold.
_MOST_PERIOD = 2_000  # Collectives of one iteration.
_MOST_LOOKED_AT = 20_000  # Collectives in the search for the period; the count uses all.
_MOST_WINDOWS = 4_000
_LEAST_AGREE = 0.5  # share of the sequence that is the same one period later
_AS_GOOD = 0.01
_ALIKE = 0.01  # bytes of two iterations differ by less
_MOST_PARTS = 64
_SHORT_SILENCE = 0.08  # Share of an iteration: it has such silences within as well.
_MUCH_LONGER = 3  # Ratio of a silence between iterations to those within.
_MOST_BETWEEN = 8  # Iterations with other buckets in one place.


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SeenCollectives:
    """Collectives in order of time, and the part of each that one host sent to another."""

    op: Text
    sequence: Whole
    bytes: Real  # size of its tensor on every rank
    begin_ns: Whole  # arrival of the first rank
    first_ns: Whole  # first data
    end_ns: Whole
    part: Whole  # for each row below: the number of its collective
    part_way: Whole  # for each row below: a number for its connection and direction
    source: Whole
    target: Whole
    part_bytes: Real
    part_read_bytes: Real  # bytes that surely belong to this collective
    part_begin_ns: Whole
    part_first_ns: Whole
    part_last_ns: Whole

    def __len__(self) -> int:
        return len(self.op)

    @property
    def part_has_data(self) -> NDArray[np.bool_]:
        """Say for each part whether data followed its header."""
        return np.asarray(self.part_bytes > 0, bool)

    @property
    def is_sure(self) -> NDArray[np.bool_]:
        """Whether each collective's bytes are surely its own: read as such, or sent alone."""
        total = np.bincount(self.part, self.part_bytes, len(self))
        is_read = np.bincount(self.part, self.part_read_bytes, len(self)) >= _READ * total
        after = self.tangled_with_earlier(np.arange(len(self)))
        before = self.tangled_with_earlier(np.arange(len(self)), turned=True)
        return np.asarray(is_read | ~(after | before), bool)

    def begun_before_others_ended(self, chosen: Whole) -> NDArray[np.bool_]:
        """Say which chosen collectives, in order of time, begin before all earlier ones ended."""
        reached_ns = np.maximum.accumulate(self.end_ns[chosen])
        begun = np.zeros(len(chosen), bool)
        begun[1:] = self.first_ns[chosen][1:] < reached_ns[:-1]
        return begun

    def tangled_with_earlier(self, chosen: Whole, *, turned: bool = False) -> NDArray[np.bool_]:
        """Say which chosen collectives share a connection with an earlier unfinished one.

        A collective's bytes are surely its own on a connection of its own, or after the last byte
        of the earlier one there. With `turned`, time runs backwards.
        """
        rows = np.flatnonzero(self.part_has_data & np.isin(self.part, chosen))
        begin_ns, end_ns = self.part_first_ns[rows], self.part_last_ns[rows]
        if turned:
            begin_ns, end_ns = -end_ns, -begin_ns
        order = np.lexsort((begin_ns, self.part_way[rows]))
        way, part = self.part_way[rows][order], self.part[rows][order]
        begin_ns, end_ns = begin_ns[order], end_ns[order]
        tangled = np.zeros(len(self), bool)
        for on_way in np.split(np.arange(len(way)), np.flatnonzero(np.diff(way)) + 1):
            reached_ns = np.maximum.accumulate(end_ns[on_way])[:-1]
            tangled[part[on_way][1:][begin_ns[on_way][1:] < reached_ns]] = True
        return np.asarray(tangled[chosen], bool)


def find_collectives(rows: Messages, source: Whole, target: Whole, ranks: int) -> SeenCollectives:
    """Join the messages between hosts (given as numbers) as collectives of `ranks` ranks."""
    number = _numbered(rows)
    count = int(number.max(initial=-1)) + 1
    # Unread bytes have the same share of payload as read messages, if they are as long. The rest
    # is a header before each message, and before that the header of its offer.
    usual = np.bincount(number, rows.payload_bytes) / np.maximum(
        np.bincount(number, rows.messages), 1
    )
    share: Real = np.where(usual > _HEADERS, usual / (usual + _HEADERS), 1.0)
    payload: Real = rows.payload_bytes + rows.unread_bytes * share[number]
    way = numbered_pairs(rows.source, rows.destination)
    one = np.zeros(count, np.int64)
    one[number] = np.arange(len(number))
    op = rows.op[one]
    factors = {name: bus_factor(name, ranks) or 1.0 for name in set(op.tolist())}
    factor = np.array([factors[name] for name in op.tolist()], np.float64)
    never = np.iinfo(np.int64).max
    first_ns = np.where(rows.has_data, rows.first_ns, never)
    begin_ns, data_ns = np.full(count, never), np.full(count, never)
    np.minimum.at(begin_ns, number, rows.begin_ns)
    np.minimum.at(data_ns, number, first_ns)
    end_ns = np.full(count, -never)
    np.maximum.at(end_ns, number, _ends_ns(rows))
    order = np.argsort(begin_ns, kind="stable")
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    return SeenCollectives(
        op=op[order],
        sequence=rows.sequence[one][order],
        bytes=(_usual_connection(number, way, payload, count) / factor)[order],
        begin_ns=begin_ns[order],
        first_ns=np.minimum(data_ns, end_ns)[order],
        end_ns=end_ns[order],
        part=place[number],
        part_way=way,
        source=source,
        target=target,
        part_bytes=payload,
        part_read_bytes=rows.payload_bytes.astype(np.float64),
        part_begin_ns=rows.begin_ns,
        part_first_ns=rows.first_ns,
        part_last_ns=rows.last_ns,
    )


def _numbered(rows: Messages) -> Whole:
    """Number the collectives; a tag that comes again much later is another collective."""
    keys: dict[tuple[str, int], tuple[int, int]] = {}
    numbers, count = [], 0
    ends = _ends_ns(rows).tolist()
    columns = rows.op.tolist(), rows.sequence.tolist(), rows.begin_ns.tolist(), ends
    for op, sequence, begin_ns, end_ns in zip(*columns, strict=True):
        known = keys.get((op, sequence))
        if known is None or begin_ns > known[1] + _AT_ONCE_NS:
            known, count = (count, end_ns), count + 1
        number, until_ns = known
        keys[op, sequence] = (number, max(until_ns, end_ns))
        numbers.append(number)
    return np.array(numbers, np.int64)


def _ends_ns(rows: Messages) -> Whole:
    """Return when each row ended; one without data has no time of its last data."""
    last_ns = np.maximum(rows.last_ns, rows.begin_ns)
    return np.asarray(np.where(rows.has_data, last_ns, rows.begin_ns), np.int64)


def _usual_connection(number: Whole, way: Whole, payload: Real, count: int) -> Real:
    """Return for each collective the bytes on a usual connection that carries its data.

    If two hosts have several ranks, they have several connections, and each carries a part.
    """
    ways = int(way.max(initial=0)) + 1
    parts, place = np.unique(number * ways + way, return_inverse=True)
    carried = np.bincount(place, payload, len(parts))
    of = parts // ways
    most = np.zeros(count)
    np.maximum.at(most, of, carried)
    main = carried > _MAIN_EDGE * most[of]
    order = np.lexsort((carried[main], of[main]))
    of, carried = of[main][order], carried[main][order]
    known, first, times = np.unique(of, return_index=True, return_counts=True)
    usual = np.zeros(count)
    usual[known] = (carried[first + (times - 1) // 2] + carried[first + times // 2]) / 2
    return usual


def iterations_of(
    seen: SeenCollectives,
    hosts: tuple[str, ...],
    payload_bytes: float,
    width_ns: int,
    model_bytes: float | None,
) -> Iterations | None:
    """Find iterations in collectives, if these hold most of the payload.

    Collectives are separated by connection, or else by time. Unread bytes of a connection may count
    for the collective before. Then only the sum of the two is sure.
    """
    if not len(seen) or seen.part_bytes.sum() < _LEAST_TOLD * payload_bytes:
        return None
    whole_bytes = None
    is_reduced = seen.op == "allreduce"
    if model_bytes is not None and is_reduced.any() and not (seen.op == "reducescatter").any():
        # The bytes on all captured edges when the model is reduced once.
        rows, count = is_reduced[seen.part], len(hosts)
        carried = np.bincount(seen.source[rows] * count + seen.target[rows], seen.part_bytes[rows])
        edges = int((carried > _MAIN_EDGE * carried.max()).sum())
        whole_bytes = edges * bus_factor("allreduce", count) * model_bytes
    best: Iterations | None = None
    for overlap in (seen.tangled_with_earlier, seen.begun_before_others_ended):
        bouts = _Bouts.among(seen, overlap)
        repetition = find_repetition(bouts.sequence, whole_bytes)
        if repetition is None:
            continue
        iterations = _iterations(seen, bouts, repetition, len(hosts), width_ns)
        if best is None or iterations.confidence > best.confidence:
            best = iterations
        if best.confidence >= _SURE:
            break
    return best


def broadcast_bytes(seen: SeenCollectives) -> float | None:
    """Return the bytes broadcast before the first reduction (the model), or None."""
    reduces = np.flatnonzero(np.isin(seen.op, ["allreduce", "reducescatter"]))
    if not len(reduces):
        return None
    first = int(reduces[0])
    return float(seen.bytes[:first][seen.op[:first] == "broadcast"].sum()) or None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Bouts:
    """Groups of simultaneous collectives whose bytes cannot be separated for certain."""

    sequence: Sequence
    of: Whole  # for each collective: its bout, or -1

    @classmethod
    def among(cls, seen: SeenCollectives, overlap: Callable[[Whole], NDArray[np.bool_]]) -> _Bouts:
        total = np.bincount(seen.part, seen.part_bytes, len(seen)).astype(np.float64)
        is_main = total > _LEAST_PART * total.max()
        is_training = is_main & np.isin(seen.op, _TRAINING)
        main = np.flatnonzero(is_training if is_training.any() else is_main)
        main = main[np.argsort(seen.first_ns[main], kind="stable")]
        # Two neighbours are separate if nearly all bytes of both were read as theirs.
        is_read = np.bincount(seen.part, seen.part_read_bytes, len(seen)) >= _READ * total
        is_new = ~overlap(main) | (is_read & np.append(True, is_read[:-1]))[main]
        is_new[:1] = True
        bout = np.cumsum(is_new) - 1
        of = np.full(len(seen), -1)
        of[main] = bout
        first = np.flatnonzero(is_new)
        ops = {name: 1 << place for place, name in enumerate(dict.fromkeys(seen.op.tolist()))}
        op = np.array([ops[name] for name in seen.op[main].tolist()])
        amounts = np.array(
            [np.bincount(bout, np.where(op == bit, total[main], 0.0)) for bit in ops.values()]
        )
        # Bouts are of one kind if their operations are the same and their bytes nearly so.
        group, size = np.bitwise_or.reduceat(op, first), amounts.sum(axis=0)
        order = np.lexsort((size, group))
        ordered = size[order]
        differs = group[order][1:] != group[order][:-1]
        differs |= ordered[1:] > ordered[:-1] * (1 + _SAME_BYTES)
        kind = np.empty(len(order), np.int64)
        kind[order] = np.cumsum(np.append(True, differs))
        return cls(
            of=of,
            sequence=Sequence(
                kind=kind,
                amounts=amounts,
                begin_ns=np.minimum.reduceat(seen.first_ns[main], first),
                end_ns=np.maximum.reduceat(seen.end_ns[main], first),
            ),
        )


def _iterations(
    seen: SeenCollectives, bouts: _Bouts, repetition: Repetition, hosts: int, width_ns: int
) -> Iterations:
    first, last = repetition.first, repetition.last
    begin_ns, end_ns = bouts.sequence.begin_ns[first], bouts.sequence.end_ns[last]
    count = len(first)
    iteration = np.full(len(bouts.sequence.kind) + 1, -1)
    for number, (a, b) in enumerate(zip(first, last, strict=True)):
        iteration[a : b + 1] = number
    of = iteration[bouts.of]  # -1 is the last place, which stays -1
    cells, edges = _by_edge(seen, of, count, hosts)
    busy_ns = []
    for number in np.unique(np.linspace(0, count - 1, _MOST_TIMED).astype(np.int64)).tolist():
        busy_ns.append(covered_ns(seen.first_ns[of == number], seen.end_ns[of == number]))
    periods_ns = np.diff(begin_ns)[first[1:] == last[:-1] + 1]
    period_ns = float(median(periods_ns if len(periods_ns) else np.diff(begin_ns)))
    return Iterations(
        count=count,
        period_s=period_ns * 1e-9,
        communicating_s=min(float(median(busy_ns)), period_ns) * 1e-9,
        edges=edges,
        edge_bytes=median(cells, axis=0),
        first_slot=int(begin_ns[0] // width_ns),
        last_slot=int(end_ns.max() // width_ns),
        begins_ns=begin_ns,
        ends_ns=end_ns,
        basis="messages",
        share=repetition.share,
        confidence=repetition.share * (1 - 0.5 ** (count - 1)),
    )


def _by_edge(seen: SeenCollectives, of: Whole, count: int, hosts: int) -> tuple[Real, Whole]:
    """Return the bytes of each edge in each iteration, and the edges."""
    iteration = of[seen.part]
    chosen = iteration >= 0
    edge = seen.source[chosen] * hosts + seen.target[chosen]
    edges, place = np.unique(edge, return_inverse=True)
    cells = np.bincount(
        iteration[chosen] * len(edges) + place, seen.part_bytes[chosen], count * len(edges)
    )
    return cells.reshape(count, len(edges)).astype(np.float64), edges


def bytes_of(
    seen: SeenCollectives, iterations: Iterations, ops: tuple[str, ...], hosts: int, ranks: int
) -> float:
    """Return the tensor bytes of some operations in a usual iteration, or 0."""
    of = np.searchsorted(iterations.begins_ns, seen.first_ns, "right") - 1
    inside = (of >= 0) & (seen.first_ns <= iterations.ends_ns[of.clip(0)]) & np.isin(seen.op, ops)
    cells, _ = _by_edge(seen, np.where(inside, of, -1), len(iterations.begins_ns), hosts)
    if not cells.size:
        return 0.0
    usual = median(cells, axis=0)
    return float(median(usual[usual > _MAIN_EDGE * usual.max()])) / bus_factor(ops[0], ranks)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Sequence:
    """Bouts of collectives in order of time, with the kind, bytes and times of each."""

    kind: Whole  # equal for bouts that repeat
    amounts: Real  # bytes of each bout, with a row for each operation
    begin_ns: Whole
    end_ns: Whole

    @property
    def bytes(self) -> Real:
        """Return the bytes of each bout, over all operations."""
        return np.asarray(self.amounts.sum(axis=0), np.float64)

    @property
    def silence_ns(self) -> Whole:
        """Return the silence before each bout; it is below zero if bouts overlap."""
        reached = np.maximum.accumulate(self.end_ns)
        return np.append(np.int64(0), self.begin_ns[1:] - reached[:-1])

    def period(self, whole_bytes: float | None) -> int | None:
        """Return the shortest period at which nearly every bout comes again."""
        kind = self.kind[:_MOST_LOOKED_AT]
        reached = np.append(0.0, np.cumsum(self.bytes[:_MOST_LOOKED_AT]))
        longest = min(len(kind) // FEWEST, _MOST_PERIOD)
        agree = [float(np.mean(kind[:-later] == kind[later:])) for later in range(1, longest + 1)]
        if not agree or max(agree) < _LEAST_AGREE:
            return None
        shortest = next(n + 1 for n, share in enumerate(agree) if share >= max(agree) - _AS_GOOD)
        for period, share in enumerate(agree[:shortest], 1):
            usual = float(median(reached[period:] - reached[:-period]))
            if whole_bytes and share >= _LEAST_AGREE and abs(usual / whole_bytes - 1) <= _ALIKE:
                return period  # a longer period has bouts that come only after several iterations
        return shortest

    def parts(self, period: int) -> Whole:
        """Return the beginnings of the most frequent part, which follows the longest silence."""
        kinds = self.kind.tolist()
        places = range(min(len(kinds), _MOST_WINDOWS + period - 1) - period + 1)
        windows = [tuple(kinds[at : at + period]) for at in places]
        times = Counter(windows)
        most = max(times.values())
        silence_ns = self.silence_ns
        motif = max(
            (window for window, count in times.items() if count >= 0.8 * most),
            key=lambda window: float(
                median(silence_ns[[at for at, other in enumerate(windows) if other == window]])
            ),
        )
        parts, at = [], 0
        while at + period <= len(kinds):
            if kinds[at] == motif[0] and tuple(kinds[at : at + period]) == motif:
                parts.append(at)
                at += period
            else:
                at += 1
        return np.array(parts, np.int64)

    def parts_each(
        self, parts: Whole, period: int, whole_bytes: float | None
    ) -> tuple[int, NDArray[np.bool_]]:
        """Return the number of parts in an iteration, and the parts that surely begin one."""
        nowhere = np.zeros(len(parts), bool)
        silence_ns = self.silence_ns[parts].astype(np.float64)
        part_ns = float(median(np.diff(self.begin_ns[parts]))) if len(parts) > 1 else 0.0
        if whole_bytes is not None and len(parts) > 1:
            part_bytes = float(self.bytes[parts[0] : parts[0] + period].sum())
            times = max(round(whole_bytes / part_bytes), 1)
            fits = 1 <= times <= _MOST_PARTS and abs(times * part_bytes / whole_bytes - 1) <= _ALIKE
            if fits and times == 1:
                return 1, nowhere
            # Half the bytes after each long silence are gradients of 16 bits: a whole iteration.
            if fits and median(silence_ns) < _SHORT_SILENCE * times * part_ns:
                begins = _longest_every(silence_ns, times, part_ns)
                return times, nowhere if begins is None else begins
        for times in range(2, min(_MOST_PARTS, len(parts) // FEWEST) + 1):
            begins = _longest_every(silence_ns, times, part_ns)
            if begins is not None:
                return times, begins
        return 1, nowhere

    def between(self, groups: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Find iterations with other buckets between the others, by their bytes.

        Each stretch is cut into whole iterations from its end on, as long as the bytes fit.
        """
        first, last = groups[0]
        unit = self.amounts[:, first : last + 1].sum(axis=1)
        amounts, unit = self.amounts[unit > 0], unit[unit > 0]
        bounds = [(-1, -1), *groups, (len(self.bytes), len(self.bytes))]
        others: list[tuple[int, int]] = []
        for (_, before), (after, _) in pairwise(bounds):
            start, stop = before + 1, after
            for _ in range(_MOST_BETWEEN):
                backwards = amounts[:, start:stop][:, ::-1]
                held = np.cumsum(backwards, axis=1)
                fits = (np.abs(held - unit[:, None]) <= _ALIKE * unit[:, None]).all(axis=0)
                places = np.flatnonzero(fits & (backwards.sum(axis=0) > 0))
                if not len(places):
                    break
                begin = stop - 1 - int(places[0])
                others.append((begin, stop - 1))
                stop = begin
        return others


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Repetition:
    """The first and last bout of each iteration, and their share of the bytes."""

    first: Whole
    last: Whole
    share: float


def find_repetition(sequence: Sequence, whole_bytes: float | None) -> Repetition | None:
    """Find the repetition, or return None; `whole_bytes` is an iteration's size, if known."""
    period = sequence.period(whole_bytes)
    if period is None:
        return None
    parts = sequence.parts(period)
    times, begins = sequence.parts_each(parts, period, whole_bytes)
    is_marked = bool(begins.any())
    groups, at = [], 0  # groups of `times` parts that follow each other
    while at + times <= len(parts):
        follow = parts[at + times - 1] - parts[at] == (times - 1) * period
        if follow and (begins[at] or not is_marked):
            groups.append((int(parts[at]), int(parts[at + times - 1]) + period - 1))
            at += times
        else:
            at += 1
    if len(groups) < FEWEST:
        return None
    pairs = sorted([*groups, *sequence.between(groups)])
    first, last = np.array(pairs).T
    reached = np.concatenate([[0], np.cumsum(sequence.bytes)])
    held = float((reached[last + 1] - reached[first]).sum())
    return Repetition(
        first=first, last=last, share=held / float(reached[last[-1] + 1] - reached[first[0]])
    )


def _longest_every(silence_ns: Real, times: int, part_ns: float) -> NDArray[np.bool_] | None:
    """Say which parts begin an iteration, if a much longer silence precedes every k-th part."""
    place = np.arange(len(silence_ns)) % times
    usual = np.array([median(silence_ns[place == phase]) for phase in range(times)])
    begin = int(np.argmax(usual))
    others = max(float(np.max(silence_ns[place != begin])), 1.0)
    longest = max(float(np.delete(usual, begin).max()), 1.0)
    if usual[begin] < _MUCH_LONGER * longest or longest > _SHORT_SILENCE * times * part_ns:
        return None
    if np.mean(silence_ns[place == begin] > min(others, usual[begin] / 2)) < 0.8:
        return None
    is_begin: NDArray[np.bool_] = place == begin
    return is_begin
