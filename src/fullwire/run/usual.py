"""The time of a step: one definition, which every command prints.

A step takes as long as on the mean of its ranks. The time of a job's step is the mean over the
usual steps: the middle half of the steps by duration. In a job with several kinds of steps
(`run/kinds.py`) it is the middle half of each kind. It is as robust as a median, and the parts of
an account add up to it. Warm-up and rare exceptions are left out before. Longer steps stand beside
it with their number and time, and so do pauses between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from fullwire.run.run import MARKS, Run, Spans, Whole

_Floats = NDArray[np.float64]

WARM_UP = 1.5  # first steps longer than this many medians are warm-up
UNUSUAL = 3.0  # medians; any other step longer than this is left out, see MOST_UNUSUAL
MOST_UNUSUAL = 0.05  # of the steps; more unusual ones belong to the job and are kept
_FEWEST_REGULAR = 5  # long steps at equal distances
_MOST_IN_LINE = 0.8  # of the long steps, and of their places
LONGER = 1.25  # usual steps; a longer one is told beside them
PAUSE = 0.25  # of the usual step; a longer gap between two steps is a pause
_FEWEST_ROUNDS = 3  # that show a distance between steps with collectives
_REGULAR_ROUNDS = 0.9  # of the distances; a worker that is lost or joins begins a round anew
MOST_SLOWED = 1.7  # times as long beside communication: the most that was published for kernels
NEXT_TO_NOTHING = 0.05  # of the bytes of a sum
_ALIKE = 0.2  # of the middle one; pauses that differ by less are told as one kind


_ROUND: WeakKeyDictionary[Run, int] = WeakKeyDictionary()  # the steps of a round


class Alone(NamedTuple):
    """T1, the time of a step with one worker, and the range in which it lies."""

    time_s: float
    low_s: float
    high_s: float
    of_kinds: tuple[Alone, ...] = ()  # of each kind of steps, where there are several
    tells_contention: bool = True  # else all that is not T1 is taken to be waiting
    input_s: float = 0.0  # of it: waiting for data
    host_s: float = 0.0  # of it: the host's part, beside computing
    by_ranks_s: float = 0.0  # beside it: as ranks of one machine slow each other without any sums


def kept_steps(length_ns: Whole | _Floats) -> NDArray[np.bool_]:
    """Choose all steps but warm-up and rare exceptions, from lengths in order of time."""
    is_kept = np.ones(len(length_ns), bool)
    if len(length_ns) == 1:  # as in modelled runs, which then start without numpy's masked arrays
        return is_kept
    median_ns = float(np.median(length_ns))
    warm = int(np.argmax(np.append(length_ns <= WARM_UP * median_ns, [True])))
    is_kept[:warm] = False
    is_unusual = is_kept & (length_ns > UNUSUAL * median_ns)
    if is_unusual.sum() <= max(1, MOST_UNUSUAL * len(length_ns)):
        is_kept &= ~is_unusual
    return is_kept


def regular_steps(length_ns: Whole | _Floats) -> NDArray[np.bool_]:
    """Choose the rare long steps that come at equal distances: a sum once in 30 steps, say.

    They are no exceptions, even if they take little of the time.
    """
    chosen = np.zeros(len(length_ns), bool)
    left_out = np.flatnonzero(~kept_steps(length_ns))
    if len(left_out) < _FEWEST_REGULAR:  # before a median, which loads numpy's masked arrays
        return chosen
    left_out = left_out[length_ns[left_out] > UNUSUAL * np.median(length_ns)]
    if len(left_out) < _FEWEST_REGULAR:
        return chosen
    distance = int(np.median(np.diff(left_out)))
    in_line = left_out[(np.abs(left_out - left_out[-1]) % distance) == 0]
    expected = (left_out[-1] - left_out[0]) // distance + 1
    if distance > 1 and len(in_line) >= _MOST_IN_LINE * max(expected, len(left_out)):
        chosen[in_line] = True
    return chosen


def usual_steps(length_ns: Whole | _Floats) -> NDArray[np.bool_]:
    """Choose the usual steps: the middle half of the kept ones by duration."""
    kept = np.flatnonzero(kept_steps(length_ns))
    by_length = kept[np.argsort(length_ns[kept], kind="stable")]
    off = len(kept) // 4
    is_usual = np.zeros(len(length_ns), bool)
    is_usual[by_length[off : len(kept) - off]] = True
    return is_usual


def middle_half(lengths: _Floats) -> _Floats:
    """Return the middle half of some lengths, in order of size."""
    off = len(lengths) // 4
    return np.sort(lengths)[off : len(lengths) - off]


def marks_of_steps(run: Run) -> Spans:
    """Return the marks of a run's steps."""
    return run.spans.rows((run.spans.lane == "host") & (run.spans.name == "step"))


def shared_steps(run: Run) -> tuple[Whole, _Floats, int]:
    """Return the numbers of the steps that all ranks share, the length of each, and the ranks."""
    marks = marks_of_steps(run)
    if not len(marks):
        return np.zeros(0, np.int64), np.zeros(0), 0
    numbers, place, count = np.unique(marks.step, return_inverse=True, return_counts=True)
    length_ns = np.bincount(place, (marks.end_ns - marks.start_ns).astype(np.float64)) / count
    shared = count == count.max()
    return numbers[shared], np.asarray(length_ns[shared]), int(count.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """The pauses between steps, which are outside of all steps."""

    count: int
    low_s: float
    middle_s: float
    high_s: float
    total_s: float

    @property
    def are_alike(self) -> bool:
        """Return whether all pauses are about as long."""
        return self.high_s - self.low_s <= _ALIKE * self.middle_s


def marks_between_gaps(spans: Spans) -> Spans:
    """Return the marks of the first rank's steps, probe steps included."""
    marks = spans.rows((spans.lane == "host") & np.isin(spans.name, MARKS))
    return marks.rows(marks.rank == marks.rank.min(initial=marks.rank.max(initial=0)))


def gaps_between_steps_s(spans: Spans) -> _Floats:
    """Return the gaps between the steps of the first rank, in order of time."""
    first = marks_between_gaps(spans)
    first = first.rows(np.argsort(first.start_ns, kind="stable"))
    return np.asarray((begun_ns(first)[1:] - first.end_ns[:-1]) * 1e-9)


def begun_ns(marks: Spans) -> Whole:
    """Return when the marked steps began, or the steps without a mark that lie before them.

    A training log has a line for every tenth step, say, and so has its run a mark. The other steps
    are taken to be as long as the marked one after them, as far as there is time for them. Those
    before the first mark are as many as usual, as far as its number tells so many.
    """
    found = marks.start_ns.copy()
    in_order = np.lexsort((marks.start_ns, marks.rank))
    is_step = marks.name[in_order] == "step"
    if not is_step.any():
        return found
    room_ns = np.append(0, marks.start_ns[in_order][1:] - marks.end_ns[in_order][:-1])[is_step]
    probes = np.cumsum(~is_step)[is_step]  # each took a number, which its mark does not tell
    in_order = in_order[is_step]
    rank, number, start_ns, end_ns = (
        column[in_order] for column in (marks.rank, marks.step, marks.start_ns, marks.end_ns)
    )
    is_first = np.append([True], rank[1:] != rank[:-1])
    apart = np.append(0, np.diff(number) - np.diff(probes))
    between = apart[~is_first & (apart > 0)]
    usual = int(np.median(between)) if len(between) else 1
    apart = np.where(is_first, np.minimum(number + 1, usual), apart)
    unmarked_ns = np.maximum(apart - 1, 0) * (end_ns - start_ns)
    found[in_order] -= np.where(
        is_first, unmarked_ns, np.minimum(unmarked_ns, np.maximum(room_ns, 0))
    )
    return found


def pauses(gaps_s: _Floats, step_s: float) -> Pauses | None:
    """Return the gaps between steps that are pauses, as for an evaluation, if any."""
    long_s = gaps_s[gaps_s > max(PAUSE * step_s, 2 * float(np.median([0.0, *gaps_s])))]
    if not len(long_s):
        return None
    return Pauses(
        count=len(long_s),
        low_s=float(long_s.min()),
        middle_s=float(np.median(long_s)),
        high_s=float(long_s.max()),
        total_s=float(long_s.sum()),
    )


def local_steps_of(run: Run) -> int:
    """Return how many steps a worker takes of its own between two sums of the same parameters."""
    return run.facts.local_steps or steps_of_a_round(run)


def steps_of_a_round(run: Run) -> int:
    """Return how many steps pass from one with a sum to the next: 1 in most jobs.

    Workers that take steps of their own add up once in so many, and at equal distances. Only the
    steps that the run has are counted: it may hold one kind of them. Many ask, so the answer stays.
    """
    if len(run.collectives) <= _FEWEST_ROUNDS:  # before what loads numpy's masked arrays
        return 1
    if run not in _ROUND:
        steps = _steps_in_order(run)
        apart = np.sort(np.diff(steps.places[steps.sums]))
        usual = int(apart[len(apart) // 2]) if len(apart) >= _FEWEST_ROUNDS else 1
        is_regular = usual > 1 and np.mean(apart == usual) >= _REGULAR_ROUNDS
        _ROUND[run] = usual if is_regular else 1
    return _ROUND[run]


class _InOrder(NamedTuple):
    """The steps of a run in order of time, with the probe steps among them."""

    numbers: Whole  # -1 for a probe step
    places: Whole
    sums: NDArray[np.bool_]


def _steps_in_order(run: Run) -> _InOrder:
    """Return the steps of a run in order, and which of them sum.

    A step that sends next to nothing sums nothing: DDP tells the ranks its new buckets in a few
    bytes, once.
    """
    table, marks = run.collectives, marks_between_gaps(run.spans)
    marks = marks.rows(np.argsort(marks.start_ns, kind="stable"))
    numbers = np.where(marks.name == "step", marks.step, -1)
    if not len(marks):
        numbers = np.unique(table.step[table.step >= 0])
    sent_bytes = np.zeros(len(numbers))
    by_number = np.argsort(numbers, kind="stable")
    rows = np.flatnonzero((table.step >= 0) & np.isin(table.step, numbers))
    at = by_number[np.searchsorted(numbers[by_number], table.step[rows])]
    np.add.at(sent_bytes, at, table.bytes[rows].astype(np.float64))
    ranks = len(np.unique(table.rank))
    if len(marks):
        # All ranks send in a probe step, but by this rank's clock only its own rows are in it.
        probed = np.flatnonzero((table.step < 0) & (table.rank == marks.rank[0]))
        at = np.searchsorted(marks.start_ns, table.issue_ns[probed], side="right") - 1
        inside = (at >= 0) & (table.issue_ns[probed] < marks.end_ns[at]) & (numbers[at] == -1)
        np.add.at(sent_bytes, at[inside], ranks * table.bytes[probed[inside]].astype(np.float64))
    most_bytes = float(sent_bytes.max(initial=0.0))
    if len(gradients := run.gradients):  # a gather of much more than a sum may be in some step
        first = (gradients.rank == gradients.rank[0]) & (gradients.step == gradients.step[0])
        most_bytes = min(most_bytes, ranks * float(gradients.bytes[first].sum()))
    places = np.arange(len(numbers)) if len(marks) else numbers
    return _InOrder(numbers, places, sent_bytes > NEXT_TO_NOTHING * most_bytes)


def rounds_of(run: Run) -> Whole:
    """Return the steps of each whole round, a line each; one step in a line where none make rounds.

    A round has the steps after which all parameters were summed once, at once or part by part. The
    first one begins with the first sum. A round with a probe step is not whole.
    """
    every = local_steps_of(run)
    if every == 1:
        return NO_ROUNDS
    steps = _steps_in_order(run)
    return whole_rounds(steps.numbers[np.argmax(steps.sums) :], every)


NO_ROUNDS = np.zeros((0, 1), np.int64)


def whole_rounds(in_order: Whole, every: int) -> Whole:
    """Divide the numbers of steps in order of time, -1 for a probe step, into whole rounds."""
    rounds = in_order[: len(in_order) // every * every].reshape(-1, every)
    return rounds[(rounds >= 0).all(axis=1)]


def rows_of_rounds(rounds: Whole, numbers: Whole) -> Whole:
    """Return the rows of each round among steps of these numbers, if they hold all of it."""
    rounds = rounds[np.isin(rounds, numbers).all(axis=1)]
    return np.searchsorted(numbers, rounds)


def means_of_rounds(run: Run, numbers: Whole, length_ns: _Floats) -> _Floats:
    """Return the mean step of each whole round; the lengths as they are if steps make no rounds.

    One step in a round sums for all of it, so single steps are no measure of such a job.
    """
    rows = rows_of_rounds(rounds_of(run), numbers)
    return np.asarray(length_ns[rows].mean(axis=1)) if len(rows) else length_ns
