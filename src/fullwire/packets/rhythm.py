"""Find the steps of a training in the bytes that it has carried at each moment.

Each step carries the same bytes, however long it takes. So time is looked at along an axis of
bytes: where the job pauses, much time passes at one place. These places come again after the bytes
of a step, so the spectrum of the time has lines at the steps and at their multiples. Work of others
on the machine makes pauses longer or shorter, and leaves the lines where they are.

One rank alone carries no bytes. Its steps are found along time, in the work of its threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]

FEWEST_STEPS = 6  # that must lie in what was seen
_CELLS = 1 << 14  # of the axis of bytes
_FINER = 4  # frequencies for each cycle
_SHORTEST = 1.5  # looks of a step; what comes sooner may be a beat of looks and bytes
_LONGEST = 0.995  # quantile of the time in a cell: what is longer, as an evaluation, counts as that
# A line must be so much stronger than its neighbours. Noise has such a line among the frequencies
# of one look in a hundred; a step whose time repeats has some of a hundred and more.
_SIGNIFICANT, _STRONGEST = 14.0, 40.0
_MOST_LINES = 40
_NEAR = 0.75  # cycles between a line and a multiple of the steps
_EXPLAINED, _AS_WELL = 0.85, 0.9  # of the lines' power, to believe steps; of the best
# A step's first line may be missing, as in FSDP, where each layer sends: so the strongest lines are
# tried as its multiples.
_TRIED_LINES, _MOST_PARTS = 8, 64
# Few steps have no line that stands out, and many that do so together. Noise gets to 8.
_TEETH, _MOST_OF_A_TOOTH, _STRONG_COMB, _NEARLY_BEST = 16, 30.0, 14.0, 0.8
_BESIDE = 0.01  # of a stronger line: slow changes of the machine's load put lines there
_FOLDED = 256  # cells of a step
# Deviations of chance, to take parts that repeat for parts of one step. One part that differs alone
# is an optimizer's step after a few passes, and no evaluation, if it is short and comes often.
_PARTS_DIFFER, _MOST_PASSES = 10.0, 8
_BARELY = 0.015  # of a part: the deviation of parts that count as alike, however sure it is
# A longer part that came so often at equal distances ends a step. Of the numbers of parts that
# differ in turn, the fewest that differ so nearly as much as any are a step.
_FEWEST_TURNS, _NEARLY, _FEW_LOOKS = 3, 0.5, 4
# From so many steps on both halves must have them, but for multiples, up to a share of the height.
_HALVED, _MOST_MULTIPLE, _OFF = 2.5 * FEWEST_STEPS, 8, 0.03
_NEARLY_OVER = 3  # bins beside the end of a pause
_ALIKE = 0.5  # correlation of a signal with itself one step later, to believe a step
# Of the best correlation: the shortest such time is the step. Layers are nearly as like each other
# as steps are.
_AS_ALIKE = 0.95
_SAME_WORK, _OFTEN = 0.25, 0.75  # so many steps have the usual work, up to that share


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Steps that carry the same bytes."""

    starts: Reals  # times at which a step begins; the last one is an end
    step_bytes: float
    confidence: float  # from 0 to 1: share of what repeats at all that repeats with the step


def flow_of(begin: Reals, end: Reals) -> tuple[Reals, Reals]:
    """Return the edges of bursts that follow each other, and how long bytes had flowed at each."""
    edges = np.stack([begin, end], axis=1).ravel()
    flowed = np.concatenate([[0.0], np.cumsum(end - begin)])
    return edges, np.repeat(flowed, 2)[1:-1]


def rhythm_of(
    times: Reals, carried_bytes: Reals, work: Reals | None = None, *, look: float = 0.0
) -> Rhythm | None:
    """Return the steps in bytes that were counted again and again, or None without any.

    - `work`: another counter, looked at at the same times, that tells parts of a step apart.
    - `look`: the time between two looks. Parts that differ by less may only have been looked at
      in turn at other moments.
    """
    total = float(carried_bytes[-1] - carried_bytes[0]) if len(carried_bytes) else 0.0
    if total <= 0 or len(times) < 4 * FEWEST_STEPS:
        return None
    places = np.linspace(carried_bytes[0], carried_bytes[-1], _CELLS + 1)
    passes = np.interp(places, carried_bytes, times)
    passed = np.diff(passes)
    # The pauses of few long steps are as rare as evaluations.
    for longest in (np.quantile(passed, _LONGEST), np.sort(passed)[-FEWEST_STEPS]):
        spent = np.minimum(passed, longest)
        cycles, confidence = _cycles(spent, len(times))
        if not cycles or not _in_both_halves(spent, cycles, len(times)):
            continue
        size = total / cycles
        each = np.diff(
            np.interp(np.arange(carried_bytes[0], carried_bytes[-1], size), carried_bytes, times)
        )
        if np.median(each) >= _SHORTEST * look:
            break
    else:
        return None
    # The pause that ends a step is its longest one.
    place = (np.arange(_CELLS) + 0.5) * cycles / _CELLS % 1
    folded = np.bincount((place * _FOLDED).astype(int), spent, _FOLDED)
    around = np.convolve(np.concatenate([folded[-1:], folded, folded[:1]]), np.ones(3), "valid")
    first = carried_bytes[0] + (int(np.argmax(around)) - 1) % _FOLDED / _FOLDED * size
    parts = np.arange(first, carried_bytes[-1], size)
    starts = np.interp(parts, carried_bytes, times)
    parts_of_step = 1
    while True:  # parts of parts differ in turn, too
        counters = [starts] if work is None else [starts, np.interp(starts, times, work)]
        together = max(_parts_of_a_step(np.diff(each), look) for each in counters)
        if together == 1:
            break
        if (len(starts) - 1) // together < FEWEST_STEPS:
            return None  # the step is known to be longer than can be told
        gaps = np.diff(starts)  # the longest one ends the step
        longest = np.argmax([np.median(gaps[part::together]) for part in range(together)])
        starts = starts[int(longest) :: together]
        parts_of_step *= together
    if len(starts) <= FEWEST_STEPS:
        return None
    return Rhythm(starts, size * parts_of_step, confidence)


def before_pauses(edges: NDArray[np.int64], flowing: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Move each edge that lies in a pause, or at its end, to where the pause begins.

    So a wait in the pause is in the same step as the bytes that end it.
    """
    ends = np.flatnonzero(flowing[:-1] & ~flowing[1:]) + 1
    begins = np.append(np.flatnonzero(~flowing[:-1] & flowing[1:]) + 1, len(flowing))
    moved = edges.copy()
    for number, edge in enumerate(edges):
        place = int(np.searchsorted(ends, edge, "right")) - 1
        if place < 0 or (number and ends[place] <= moved[number - 1]):
            continue
        over = begins[np.searchsorted(begins, ends[place])]  # where bytes flow again
        if edge <= over + _NEARLY_OVER:
            moved[number] = ends[place]
    return moved


def _in_both_halves(spent: Reals, cycles: float, most: float) -> bool:
    """Return whether the first half and the second half of an axis have these cycles, too.

    Lines that chance or the looks made are in one half, or at another height in the other.
    """
    if cycles < _HALVED:
        return True
    for half in np.split(spent, 2):
        own = _cycles(half, most / 2)[0]
        times = max(own, cycles / 2) / max(min(own, cycles / 2), 1.0)
        if not own or round(times) > _MOST_MULTIPLE or abs(times - round(times)) > _OFF * times:
            return False
    return True


def _cycles(spent: Reals, most: float) -> tuple[float, float]:
    """Return how many steps lie in the time along an axis, and how much of what repeats they are.

    The steps are the most of which the lines of the spectrum are multiples. Lines of more cycles
    than `most` lie between two looks.
    """
    centred = (spent - spent.mean()) * np.hanning(len(spent))
    power = np.abs(np.fft.rfft(centred, _FINER * len(centred))) ** 2
    if not power.any():
        return 0.0, 0.0  # the same everywhere: nothing comes again
    # Where a band holds nothing, what rounding leaves there is no line.
    least = float(power.max()) * np.finfo(float).eps ** 2
    usual = np.full(len(power), np.inf)  # of noise, which has another strength at each height
    low = int(_FINER * FEWEST_STEPS * 0.75)
    while low < len(power):
        high = min(int(low * 1.6) + 64, len(power))
        usual[low:high] = max(np.median(power[low:high]) / np.log(2), least)
        low = high
    return _of_lines(power, usual, most) or _of_comb(power / usual, most)


def _of_lines(power: Reals, usual: Reals, most: float) -> tuple[float, float] | None:
    """Return the cycles of which the strong lines are multiples, and the share of them that are."""
    around = np.lib.stride_tricks.sliding_window_view(np.pad(power, 6), 13).max(axis=1)
    is_line = (power > _SIGNIFICANT * usual) & (power == around) & (power > 0)
    lines = np.flatnonzero(is_line[: int(_FINER * most)])
    kept: list[int] = []
    for line in lines[np.argsort(-power[lines])]:
        if all(abs(line - other) > _BESIDE * other for other in kept) and len(kept) < _MOST_LINES:
            kept.append(int(line))
    lines = np.array(kept, np.int64)
    if not len(lines) or (power[lines] / usual[lines]).max() < _STRONGEST:
        return None
    at, weights = lines / _FINER, power[lines] / power[lines].sum()
    parts = range(1, _MOST_PARTS + 1)
    guesses = sorted({one / part for one in at[:_TRIED_LINES] for part in parts}, reverse=True)
    found = []
    for guess in guesses:
        if guess < FEWEST_STEPS:
            break
        number = np.rint(at / guess)
        near = (abs(at - number * guess) <= _NEAR) & (number >= 1)
        heights = weights * number * near  # higher multiples tell the steps more exactly
        cycles = float((heights * at).sum() / (heights * number).sum())
        near = (abs(at - number * cycles) <= _NEAR) & (number >= 1)
        by_chance = min(2 * _NEAR / cycles, 1.0)
        share = (float(weights[near].sum()) - by_chance) / (1 - by_chance) if by_chance < 1 else 0.0
        found.append((share, cycles))
    best = max((share for share, _ in found), default=0.0)
    if best < _EXPLAINED:
        return None
    share, cycles = next(each for each in found if each[0] >= max(_AS_WELL * best, _EXPLAINED))
    return cycles, share


def _of_comb(strength: Reals, most: float) -> tuple[float, float]:
    """Return the cycles whose multiples are strong together, as those of few steps are; else 0."""
    multiples = np.arange(1, _TEETH + 1)
    highest = min(most, (len(strength) - 1) / _FINER / _TEETH)
    guesses = np.arange(FEWEST_STEPS, highest, 1 / _FINER / _TEETH)
    if not len(guesses):
        return 0.0, 0.0
    at = np.rint(guesses[:, None] * multiples * _FINER).astype(int)
    teeth = np.minimum(strength[at], _MOST_OF_A_TOOTH)
    scores = (teeth.sum(axis=1) - _TEETH) / np.sqrt(_TEETH)
    # The multiples of twice the steps are strong, too, and half of those of half the steps.
    first = int(np.argmax(scores >= _NEARLY_BEST * scores.max()))
    best = first + int(np.argmax(scores[first : first + 2 * _TEETH]))
    if scores[best] < _STRONG_COMB:
        return 0.0, 0.0
    return float(guesses[best]), float((teeth[best] > 2).mean())


def _parts_of_a_step(amounts: Reals, look: float) -> int:
    """Return how many parts are one step: parts that carry alike may still differ in turn.

    Where so many parts differ in turn, twice as many do, too: the fewest that differ nearly as
    much as any are taken. Parts of few looks that differ by less than one count as alike.
    """
    usual = float(np.median(amounts))
    longer = np.flatnonzero(amounts > 2 * usual)
    if len(longer) * (_MOST_PASSES + 1) < len(amounts):  # evaluations, prints or saves
        amounts = np.where(amounts > 2 * usual, usual, amounts)
    elif 0 < len(longer) < _FEWEST_TURNS:
        # Each may end a step, of which too few were seen: unless one is missing before or after.
        apart = int(longer[-1] - longer[0]) or len(amounts)
        if longer[0] <= apart and len(amounts) - 1 - longer[-1] <= apart:
            return len(amounts)
    elif len(longer):
        distances = np.diff(longer).tolist()
        # The first one or the last one may lie aside, at the edge of what was seen.
        for equal in (distances, distances[1:], distances[:-1]):
            if len(equal) > 1 and len(set(equal)) == 1:
                return int(equal[0])
        # Of few steps, one may have lost a part to the next.
        if min(distances) >= _FEWEST_TURNS and max(distances) - min(distances) <= 1:
            return int(max(distances))
    found = []
    for together in range(2, len(amounts) // FEWEST_STEPS + 1):
        whole = amounts[: len(amounts) // together * together].reshape(-1, together)
        ranks = np.argsort(np.argsort(whole, axis=None)).reshape(whole.shape).astype(float)
        means, within = ranks.mean(axis=0), max(float(ranks.var(axis=0, ddof=1).mean()), 1e-9)
        if together > _MOST_PASSES:
            means = np.sort(means)[:-1]  # one part alone may be an evaluation, a print or a save
        by_chance = np.sqrt(2 / (together - 1) + 4 / (len(whole) * (together - 1)))
        strength = float(means.var(ddof=1) * len(whole) / within - 1) / by_chance
        in_turn = np.median(whole, axis=0)
        by_noise = whole.var(axis=0, ddof=1).mean() / len(whole)
        is_seen = whole.mean(axis=0).var(ddof=1) - by_noise > (_BARELY * usual) ** 2
        is_seen &= usual >= _FEW_LOOKS * look or np.ptp(in_turn) > look
        if strength > _PARTS_DIFFER and is_seen:
            found.append((together, strength))
    most = max((strength for _, strength in found), default=0.0)
    return next((together for together, strength in found if strength >= _NEARLY * most), 1)


def repeated(signal: Reals) -> tuple[NDArray[np.int64], float]:
    """Return where the steps in the work of equal bins of time begin, and how alike they are."""
    none = np.empty(0, np.int64)
    alike = _alike(signal)
    peaks = [
        lag
        for lag in range(3, len(alike) // FEWEST_STEPS)
        if alike[lag - 1] < alike[lag] >= alike[lag + 1] and alike[lag] >= _ALIKE
    ]
    if not peaks:
        return none, 0.0
    best = max(alike[lag] for lag in peaks)
    lag = next(lag for lag in peaks if alike[lag] >= _AS_ALIKE * best)
    edges = _edges(signal, lag)
    sums = np.add.reduceat(signal, edges)[:-1]  # the work of each step
    usual = np.median(sums)
    if usual <= 0 or (abs(sums / usual - 1) < _SAME_WORK).mean() < _OFTEN:
        return none, 0.0
    return edges, float(min(max(alike[lag], 0.0), 1.0))


def _alike(signal: Reals) -> Reals:
    """Correlate a signal with itself, later by each number of bins."""
    if (signal > 0).any():  # a checkpoint, which happens once, must not hide the rest
        signal = np.minimum(signal, 4 * np.median(signal[signal > 0]))
    from_mean = signal - signal.mean()
    spectrum = np.fft.rfft(from_mean, 2 * len(signal))
    products = np.fft.irfft(np.abs(spectrum) ** 2)[: len(signal)]
    products /= np.arange(len(signal), 0, -1)
    return np.asarray(products / (products[0] or 1.0))


def _edges(signal: Reals, lag: int) -> NDArray[np.int64]:
    """Follow the repeating pattern through a signal; return the bin at which each step begins.

    A step begins where the pattern is quietest. Each place is found near where the last step would
    put it, by the likeness to the mean of the steps so far.
    """
    folded = np.array([signal[at::lag][: len(signal) // lag].sum() for at in range(lag)])
    first = _quietest(folded)
    pattern = signal[first : first + lag].astype(float)
    edges, at, reach = [first], first, max(lag // 3, 1)
    while at + lag + lag <= len(signal):
        guesses = range(at + lag - reach, min(at + lag + reach, len(signal) - lag) + 1)
        scores = [float(np.dot(pattern, signal[guess : guess + lag])) for guess in guesses]
        at = guesses[int(np.argmax(scores))]
        edges.append(at)
        pattern += (signal[at : at + lag] - pattern) / min(len(edges), 20)
    # The length of a step was not quite known when the signal was folded. It is now.
    moved = np.array(edges, np.int64) + _quietest(pattern)
    return moved[moved < len(signal)]


def _quietest(pattern: Reals) -> int:
    """Return where the quietest quarter of a pattern that goes round begins."""
    window = max(len(pattern) // 4, 1)
    around = np.concatenate([pattern, pattern[:window]])
    return int(np.argmin(np.convolve(around, np.ones(window), "valid")[: len(pattern)]))
