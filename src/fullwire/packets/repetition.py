"""Iterations in a sequence of collectives: what repeats, in how many pieces.

Nothing here needs silence. A sequence repeats with the shortest period at which nearly everything
comes again; where equal parts leave open how many make one iteration, what the model weighs or a
longer silence before every k-th part decides. What lies between repetitions counts as well, if it
has the bytes of whole iterations: buckets are cut anew after the first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fullwire.run.run import Real, Whole

FEWEST = 3  # fewer than this repeat by chance
_MOST_PERIOD = 2_000  # collectives of one iteration
_MOST_LOOKED_AT = 20_000  # collectives, to find the period; all of them are counted
_MOST_WINDOWS = 4_000
_LEAST_AGREE = 0.5  # of the sequence, with itself one period later
_AS_GOOD = 0.01
_ALIKE = 0.01  # bytes of two iterations differ by less
_MOST_PARTS = 64
_SHORT_SILENCE = 0.08  # of an iteration: such ones are within it as well
_MUCH_LONGER = 3  # a silence between iterations, against those within
_MOST_BETWEEN = 8  # iterations that are cut up otherwise, in one place


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Sequence:
    """Things in order of time: what each is, what it weighs, and when it was."""

    kind: Whole  # equal where the same comes again
    amounts: Real  # bytes of each operation, a row for each
    begin_ns: Whole
    end_ns: Whole

    @property
    def bytes(self) -> Real:
        """Return the bytes of each, of all operations."""
        return np.asarray(self.amounts.sum(axis=0), np.float64)

    @property
    def silence_ns(self) -> Whole:
        """Return how long nothing was going on before each; below zero where they overlap."""
        reached = np.maximum.accumulate(self.end_ns)
        return np.append(np.int64(0), self.begin_ns[1:] - reached[:-1])


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Repetition:
    """Each iteration's first and last of the sequence, and how much of the bytes they hold."""

    first: Whole
    last: Whole
    share: float


def find_repetition(sequence: Sequence, whole_bytes: float | None) -> Repetition | None:
    """Find what repeats, or nothing; `whole_bytes` is what an iteration should weigh, if known."""
    period = _period(sequence, whole_bytes)
    if period is None:
        return None
    parts = _occurrences(sequence, _motif(sequence, period))
    groups = _grouped(sequence, parts, period, _parts_each(sequence, parts, period, whole_bytes))
    if len(groups) < FEWEST:
        return None
    pairs = sorted([*groups, *_between(sequence, groups)])
    first, last = np.array(pairs).T
    reached = np.concatenate([[0], np.cumsum(sequence.bytes)])
    held = float((reached[last + 1] - reached[first]).sum())
    return Repetition(
        first=first, last=last, share=held / float(reached[last[-1] + 1] - reached[first[0]])
    )


def _period(sequence: Sequence, whole_bytes: float | None) -> int | None:
    kind = sequence.kind[:_MOST_LOOKED_AT]
    reached = np.append(0.0, np.cumsum(sequence.bytes[:_MOST_LOOKED_AT]))
    longest = min(len(kind) // FEWEST, _MOST_PERIOD)
    agree = [float(np.mean(kind[:-each] == kind[each:])) for each in range(1, longest + 1)]
    if not agree or max(agree) < _LEAST_AGREE:
        return None
    shortest = next(n + 1 for n, share in enumerate(agree) if share >= max(agree) - _AS_GOOD)
    for each, share in enumerate(agree[:shortest], 1):
        usual = float(np.median(reached[each:] - reached[:-each]))
        if whole_bytes and share >= _LEAST_AGREE and abs(usual / whole_bytes - 1) <= _ALIKE:
            return each  # what else comes after every so many is no part of an iteration
    return shortest


def _motif(sequence: Sequence, period: int) -> tuple[int, ...]:
    """Return what comes again and again, from where the longest silence is before it."""
    kinds = sequence.kind[: _MOST_WINDOWS + period - 1].tolist()
    windows = [tuple(kinds[at : at + period]) for at in range(len(kinds) - period + 1)]
    times = Counter(windows)
    most = max(times.values())
    silence_ns = sequence.silence_ns
    return max(
        (window for window, count in times.items() if count >= 0.8 * most),
        key=lambda window: float(
            np.median(silence_ns[[at for at, each in enumerate(windows) if each == window]])
        ),
    )


def _occurrences(sequence: Sequence, motif: tuple[int, ...]) -> Whole:
    kinds, found, at = sequence.kind.tolist(), [], 0
    while at + len(motif) <= len(kinds):
        if kinds[at] == motif[0] and tuple(kinds[at : at + len(motif)]) == motif:
            found.append(at)
            at += len(motif)
        else:
            at += 1
    return np.array(found, np.int64)


def _parts_each(
    sequence: Sequence, parts: Whole, period: int, whole_bytes: float | None
) -> tuple[int, NDArray[np.bool_]]:
    """Return how many parts make an iteration, and which parts begin one for certain."""
    nothing = np.zeros(len(parts), bool)
    silence_ns = sequence.silence_ns[parts].astype(np.float64)
    part_ns = float(np.median(np.diff(sequence.begin_ns[parts]))) if len(parts) > 1 else 0.0
    if whole_bytes is not None and len(parts) > 1:
        part_bytes = float(sequence.bytes[parts[0] : parts[0] + period].sum())
        times = max(round(whole_bytes / part_bytes), 1)
        is_it = 1 <= times <= _MOST_PARTS and abs(times * part_bytes / whole_bytes - 1) <= _ALIKE
        # Half the bytes after each long silence are gradients of 16 bits, and no halves.
        if is_it and (times == 1 or np.median(silence_ns) < _SHORT_SILENCE * times * part_ns):
            return times, _begins(silence_ns, times, part_ns)
    for times in range(2, min(_MOST_PARTS, len(parts) // FEWEST) + 1):
        begins = _longest_every(silence_ns, times, part_ns)
        if begins is not None:
            return times, begins
    return 1, nothing


def _begins(silence_ns: Real, times: int, part_ns: float) -> NDArray[np.bool_]:
    """Say which parts begin an iteration, if a longer silence says it; none if not."""
    marked = _longest_every(silence_ns, times, part_ns) if times > 1 else None
    return np.zeros(len(silence_ns), bool) if marked is None else marked


def _longest_every(silence_ns: Real, times: int, part_ns: float) -> NDArray[np.bool_] | None:
    """Say which parts begin an iteration, if every so many there is a much longer silence."""
    place = np.arange(len(silence_ns)) % times
    usual = np.array([np.median(silence_ns[place == each]) for each in range(times)])
    begin = int(np.argmax(usual))
    others = max(float(np.max(silence_ns[place != begin])), 1.0)
    longest = max(float(np.delete(usual, begin).max()), 1.0)
    if usual[begin] < _MUCH_LONGER * longest or longest > _SHORT_SILENCE * times * part_ns:
        return None
    if np.mean(silence_ns[place == begin] > min(others, usual[begin] / 2)) < 0.8:
        return None
    is_begin: NDArray[np.bool_] = place == begin
    return is_begin


def _grouped(
    sequence: Sequence, parts: Whole, period: int, each: tuple[int, NDArray[np.bool_]]
) -> list[tuple[int, int]]:
    """Put so many parts together that follow each other."""
    times, begins = each
    groups, at = [], 0
    is_marked = bool(begins.any())
    while at + times <= len(parts):
        follow = parts[at + times - 1] - parts[at] == (times - 1) * period
        if follow and (begins[at] or not is_marked):
            groups.append((int(parts[at]), int(parts[at + times - 1]) + period - 1))
            at += times
        else:
            at += 1
    return groups


def _between(sequence: Sequence, groups: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Find iterations that were cut up otherwise, by their bytes, between the others."""
    first, last = groups[0]
    unit = sequence.amounts[:, first : last + 1].sum(axis=1)
    cells, unit = sequence.amounts[unit > 0], unit[unit > 0]
    bounds = [(-1, -1), *groups, (len(sequence.bytes), len(sequence.bytes))]
    found: list[tuple[int, int]] = []
    for (_, before), (after, _) in pairwise(bounds):
        found += _cut_by_bytes(cells[:, before + 1 : after], unit, before + 1)
    return found


def _cut_by_bytes(cells: Real, unit: Real, start: int) -> list[tuple[int, int]]:
    """Cut a stretch at whole iterations from its end, as long as bytes allow it."""
    found: list[tuple[int, int]] = []
    stop = cells.shape[1]
    while stop > 0 and len(found) < _MOST_BETWEEN:
        held = np.cumsum(cells[:, :stop][:, ::-1], axis=1)
        fits = (np.abs(held - unit[:, None]) <= _ALIKE * unit[:, None]).all(axis=0)
        places = np.flatnonzero(fits & (cells[:, :stop][:, ::-1].sum(axis=0) > 0))
        if not len(places):
            break
        begin = stop - 1 - int(places[0])
        found.append((start + begin, start + stop - 1))
        stop = begin
    return found
