"""The activity of a rank at each moment: the one place where intervals become time.

Every instant belongs to the first that applies: computing, communication that was exposed, a codec,
waiting for input, and the rest. A rank computes inside its compute spans, with two exceptions: it
was blocked on a collective, or a hook packed gradients, and then the time is a codec's. A sum of
local steps in fragments travels beside the next step, and is exposed only where the rank says that
it was blocked: what it does meanwhile is its own. Several collectives may be outstanding at one
instant. Then one that is being transferred counts first. One
whose transfer cannot be told from waiting counts second, and waiting last.

    ("host", "step")             the step; other spans in the host lane are no activity of their own
    ("host", "backward")         the backward passes, of which the kernels are spans of their own
    ("host", "earlier backward")  one of several before the last
    ("host", "queued")           a transfer that another one on its line kept from leaving
    ("communication", "wait")    blocked on a collective
    ("host", "wait")             waiting for late ranks that are not in the run, as in a simulation,
                                 or for other ranks' turns
    ("host", "bubble")           the same for other stages of a pipeline
    ("host", "codec")            a hook that packs or unpacks gradients, also amidst computing
    ("communication", "codec")   packing or unpacking gradients beside it
    ("communication", others)    communication that is in no table of collectives: the part of
                                 other ranks in it is unknown
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fullwire.errors import DamagedInput
from fullwire.run.kinds import EARLIER, LAST, QUEUED
from fullwire.run.run import Run, Spans, Whole
from fullwire.timeline.transfers import Transfers, codes_of, recorded_ranks

MOST_NS = 2**61  # seventy years on any clock, and sums of two still fit 64 bits
MOST_BYTES = 2**50  # of one collective
Interval = tuple[Whole, Whole]
_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")


class Doing(IntEnum):
    """The kinds of activity that an instant of a rank counts as."""

    COMPUTE = 0
    WAITING = 1
    TRANSFER = 2
    UNTOLD = 3  # communication that may be waiting or transfer
    BUBBLE = 4  # a stage of a pipeline waits for another one
    CODEC = 5
    INPUT = 6
    REST = 7


class Kind(IntEnum):
    """The meaning of a span for the account."""

    STEP = 0
    COMPUTE = 1
    BLOCKED = 2
    CODEC = 3
    SENDING = 4
    INPUT = 5
    OTHER = 6
    MARK = 7
    PACKING = 8
    LATE = 9  # other ranks are
    DRAINED = 10  # a stage of a pipeline is


_KIND_OF_LANE = {
    "compute": Kind.COMPUTE,
    "communication": Kind.SENDING,
    "input": Kind.INPUT,
}
_KIND_OF = {  # lane and name, where the name changes the kind
    ("host", "step"): Kind.STEP,
    ("host", LAST): Kind.MARK,
    ("host", EARLIER): Kind.MARK,
    ("host", QUEUED): Kind.MARK,
    ("host", "codec"): Kind.PACKING,
    ("host", "wait"): Kind.LATE,
    ("host", "bubble"): Kind.DRAINED,
    ("communication", "wait"): Kind.BLOCKED,
    ("communication", "codec"): Kind.CODEC,
}


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Periods:
    """Stretches of time in which a rank had transfers under way, with the sums of their work."""

    start_ns: Whole
    end_ns: Whole
    floor_ns: NDArray[np.float64]
    is_in_host: NDArray[np.bool_]  # all of them between ranks of one host
    codec_ns: NDArray[np.float64]
    hops: NDArray[np.float64]
    largest_bytes: Whole

    @classmethod
    def of(cls, run: Run, rows: NDArray[np.intp], transfers: Transfers) -> Periods:
        """Join transfers that touch: the time of a link shared by several cannot be split."""
        end = run.collectives.end_ns[rows]
        kept = transfers.is_known[rows] & (end > transfers.ready_ns[rows])
        rows = rows[kept]
        rows = rows[np.argsort(transfers.ready_ns[rows], kind="stable")]
        start, reached = (
            transfers.ready_ns[rows],
            np.maximum.accumulate(run.collectives.end_ns[rows]),
        )
        is_new = np.ones(len(rows), bool)
        is_new[1:] = start[1:] > reached[:-1]
        first = np.flatnonzero(is_new)
        last = np.append(first[1:], len(rows)) - 1 if len(rows) else first
        number = np.cumsum(is_new) - 1

        def summed(column: NDArray[np.generic]) -> NDArray[np.float64]:
            return np.asarray(np.bincount(number, column[rows], len(first)), np.float64)

        largest = np.zeros(len(first), np.int64)
        np.maximum.at(largest, number, run.collectives.bytes[rows])
        return cls(
            start_ns=start[first],
            end_ns=reached[last],
            floor_ns=summed(transfers.floor_ns),
            is_in_host=summed(transfers.is_in_host) == np.bincount(number, minlength=len(first)),
            codec_ns=summed(transfers.codec_ns),
            hops=summed(transfers.hops),
            largest_bytes=largest,
        )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Timeline:
    """One rank's time in pieces; piece k lasts from `moments[k]` to `moments[k + 1]`."""

    rank: int
    moments: Whole
    doing: NDArray[np.int8]
    is_computing: NDArray[np.bool_]
    is_communicating: NDArray[np.bool_]
    is_busy: NDArray[np.bool_]  # computing, communicating, packing or copying
    is_recorded: NDArray[np.bool_]  # something was there besides the mark of a step
    step_number: Whole
    step: Whole  # which of its steps a piece is in, in order; -1 in none
    periods: Periods
    period: Whole  # which of its periods a piece is in; -1 in none

    @property
    def length_ns(self) -> Whole:
        """Return how long each piece is."""
        return np.diff(self.moments)

    def total_ns(self, chosen: NDArray[np.bool_]) -> int:
        """Return the length of the chosen pieces together."""
        return int(self.length_ns[chosen].sum())


def timelines(
    run: Run, transfers: Transfers, parts: Iterable[Spans] | None = None, ranks: Whole | None = None
) -> Iterator[Timeline]:
    """Go through the ranks of a run, or some of them, in order.

    Where the run has only some of its spans, `parts` are all of them: of some ranks each, in order.
    The marks of steps are in the run.
    """
    collectives = run.collectives
    marks = run.spans.rows((run.spans.lane == "host") & (run.spans.name == "step"))
    marks_by = _rows_by_rank(marks.rank)
    check_collectives(run)
    collectives_by = _rows_by_rank(collectives.rank)
    waiting = deque((recorded_ranks(run) if ranks is None else ranks).tolist())
    for spans in [run.spans] if parts is None else parts:
        check_times(run, "spans", spans.start_ns, spans.end_ns)
        span_kinds, spans_by = kinds_of(spans), _rows_by_rank(spans.rank)
        last = spans.rank.max(initial=-1)
        while waiting and waiting[0] <= last:
            rank = waiting.popleft()
            mine = spans_by(rank)
            yield _timeline(
                run,
                rank,
                marks.rows(marks_by(rank)),
                spans.rows(mine),
                span_kinds[mine],
                collectives_by(rank),
                transfers,
            )
    nothing = Spans.empty()
    for rank in waiting:
        yield _timeline(
            run,
            rank,
            marks.rows(marks_by(rank)),
            nothing,
            kinds_of(nothing),
            collectives_by(rank),
            transfers,
        )


def kinds_of(spans: Spans) -> NDArray[np.int8]:
    """Return the kind of each span."""
    lanes, names = codes_of(spans.lane), codes_of(spans.name)
    kinds = [
        _KIND_OF.get((lane, name), _KIND_OF_LANE.get(lane, Kind.OTHER))
        for lane in lanes.names
        for name in names.names
    ]
    table = np.array(kinds, np.int8).reshape(len(lanes.names), len(names.names))
    return table[lanes.codes, names.codes]


def check_collectives(run: Run) -> None:
    """Refuse collectives with impossible times or sizes."""
    check_times(run, "collectives", run.collectives.issue_ns, run.collectives.end_ns)
    size = run.collectives.bytes
    if (size < 0).any() or (size > MOST_BYTES).any():
        row = int(np.argmax((size < 0) | (size > MOST_BYTES)))
        raise DamagedInput(run.place, f"collectives, row {row}: {size[row]} bytes cannot be")


def check_times(run: Run, table: str, start_ns: Whole, end_ns: Whole) -> None:
    """Refuse times that run backwards or are impossible, because they make every account wrong."""
    # The check avoids absolute values: that of the smallest whole number is itself.
    is_wrong = (end_ns < start_ns) | (start_ns < -MOST_NS) | (end_ns > MOST_NS)
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        raise DamagedInput(
            run.place,
            f"{table}, row {row}: times that cannot be, from {start_ns[row]} to {end_ns[row]} ns",
        )


def _rows_by_rank(ranks: Whole) -> Callable[[int], NDArray[np.intp]]:
    order = np.argsort(ranks, kind="stable")
    ordered = ranks[order]

    def rows(rank: int) -> NDArray[np.intp]:
        first, last = (np.searchsorted(ordered, rank, side) for side in _SIDES)
        return order[first:last]

    return rows


def _timeline(
    run: Run,
    rank: int,
    marks: Spans,
    spans: Spans,
    kinds: NDArray[np.int8],
    collectives: NDArray[np.intp],
    transfers: Transfers,
) -> Timeline:
    start_ns, end_ns, number = steps_of(run, rank, marks)
    intervals = [(spans.start_ns[kinds == kind], spans.end_ns[kinds == kind]) for kind in Kind]
    intervals[Kind.STEP] = (start_ns, end_ns)
    periods = Periods.of(run, collectives, transfers)
    ready, known = transfers.ready_ns[collectives], transfers.is_known[collectives]
    issue, end = run.collectives.issue_ns[collectives], run.collectives.end_ns[collectives]
    untold = (ready[~known], end[~known])
    edges = [*intervals, (issue, end), (periods.start_ns, periods.end_ns), untold]
    # In order, each once; numpy's own `unique` takes three times as long.
    times_ns = np.sort(np.concatenate([times for pair in edges for times in pair]))
    moments = times_ns[np.append([True], times_ns[1:] > times_ns[:-1])[: len(times_ns)]]
    covered = {kind: _covers(moments, *intervals[kind]) for kind in Kind}
    period = _inside(moments, periods.start_ns, periods.end_ns)
    outstanding = _covers(moments, issue, end)
    of_pipeline = transfers.is_of_pipeline[collectives]
    is_between_stages = _covers(moments, issue[of_pipeline], end[of_pipeline])
    is_untold = _covers(moments, *untold) | covered[Kind.SENDING]
    is_away = covered[Kind.BLOCKED] | covered[Kind.LATE] | covered[Kind.DRAINED]
    is_at_work = covered[Kind.COMPUTE] & ~is_away
    is_computing = is_at_work & ~covered[Kind.PACKING]
    is_packing = covered[Kind.PACKING] | covered[Kind.CODEC]
    is_communicating = outstanding | covered[Kind.SENDING]
    is_held_up = np.ones(len(period), bool)
    if (run.facts.fragments or 1) > 1 and covered[Kind.BLOCKED].any():
        is_held_up = covered[Kind.BLOCKED]
    doing = np.select(
        [
            is_computing,
            is_at_work,
            is_held_up & (period >= 0),
            is_held_up & is_untold,
            (is_held_up & is_between_stages) | covered[Kind.DRAINED],
            (is_held_up & outstanding) | covered[Kind.LATE],
            is_packing,
            covered[Kind.INPUT],
        ],
        [
            Doing.COMPUTE,
            Doing.CODEC,
            Doing.TRANSFER,
            Doing.UNTOLD,
            Doing.BUBBLE,
            Doing.WAITING,
            Doing.CODEC,
            Doing.INPUT,
        ],
        Doing.REST,
    ).astype(np.int8)
    is_busy = is_computing | is_communicating | is_packing | covered[Kind.OTHER]
    return Timeline(
        rank=rank,
        moments=moments,
        doing=doing,
        is_computing=is_computing,
        is_communicating=is_communicating,
        is_busy=is_busy,
        is_recorded=is_busy | covered[Kind.COMPUTE] | covered[Kind.INPUT],
        step_number=number,
        step=_inside(moments, start_ns, end_ns),
        periods=periods,
        period=period,
    )


def steps_of(run: Run, rank: int, marks: Spans) -> tuple[Whole, Whole, Whole]:
    """Return the steps of a rank in order of time; refuse two at once, or two of one number."""
    marks = marks.rows(np.argsort(marks.start_ns, kind="stable"))
    start_ns, end_ns, number = marks.start_ns, marks.end_ns, marks.step
    if (end_ns[:-1] > start_ns[1:]).any() or len(np.unique(number)) < len(number):
        raise DamagedInput(run.place, f"rank {rank} has two steps at once")
    return start_ns, end_ns, number


def _covers(moments: Whole, start_ns: Whole, end_ns: Whole) -> NDArray[np.bool_]:
    """Return for each piece whether an interval covers it."""
    if not len(start_ns):
        return np.zeros(max(len(moments) - 1, 0), bool)
    change = np.bincount(np.searchsorted(moments, start_ns), minlength=len(moments))
    change -= np.bincount(np.searchsorted(moments, end_ns), minlength=len(moments))
    covered: NDArray[np.bool_] = np.cumsum(change)[:-1] > 0
    return covered


def _inside(moments: Whole, start_ns: Whole, end_ns: Whole) -> Whole:
    """Return which of some intervals, in order and apart, each piece lies in; -1 for none."""
    if not len(start_ns):
        return np.full(max(len(moments) - 1, 0), -1)
    begin = moments[:-1]
    number = np.searchsorted(start_ns, begin, side="right") - 1
    return np.where((number >= 0) & (begin < end_ns[number]), number, -1)
