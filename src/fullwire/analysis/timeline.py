"""What a rank was doing at each moment: the one place where intervals become time.

Every instant belongs to the first that applies: computing, communication that was exposed, a codec,
waiting for input, and the rest. A rank computes inside its compute spans, except where it was
blocked on a collective. Of several collectives outstanding at one instant, one that is being
transferred counts before one whose transfer cannot be told from waiting, and that before waiting.

    ("host", "step")             the step; what else happens in the host lane is no doing of its own
    ("host", "backward")         the backward pass, of which the kernels are spans of their own
    ("communication", "wait")    blocked on a collective
    ("communication", "codec")   packing or unpacking gradients
    ("communication", others)    communication that is in no table of collectives: nothing is known
                                 of other ranks' part in it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fullwire.analysis.transfers import Transfers, codes_of, recorded_ranks
from fullwire.errors import DamagedInput
from fullwire.model.run import Run, Whole

MOST_NS = 2**61  # seventy years on any clock, and sums of two still fit 64 bits
MOST_BYTES = 2**50  # of one collective
Interval = tuple[Whole, Whole]
_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")


class Doing(IntEnum):
    """What an instant of a rank is counted as."""

    COMPUTE = 0
    WAITING = 1
    TRANSFER = 2
    UNTOLD = 3  # communication that may be waiting or transfer
    CODEC = 4
    INPUT = 5
    REST = 6


class Kind(IntEnum):
    """What a span is to the account."""

    STEP = 0
    COMPUTE = 1
    BLOCKED = 2
    CODEC = 3
    SENDING = 4
    INPUT = 5
    OTHER = 6
    MARK = 7


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Periods:
    """Stretches of time in which a rank had transfers under way, and all that they had to do."""

    start_ns: Whole
    end_ns: Whole
    floor_ns: NDArray[np.float64]
    codec_ns: NDArray[np.float64]
    hops: NDArray[np.float64]
    largest_bytes: Whole


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Timeline:
    """One rank's time in pieces; piece k lasts from `moments[k]` to `moments[k + 1]`."""

    rank: int
    moments: Whole
    doing: NDArray[np.int8]
    is_computing: NDArray[np.bool_]
    is_communicating: NDArray[np.bool_]
    is_busy: NDArray[np.bool_]  # with anything but waiting: computing, communicating, copying
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


def timelines(run: Run, transfers: Transfers) -> Iterator[Timeline]:
    """Go through the ranks of a run, in order."""
    check_possible(run)
    span_kinds = kinds_of(run)
    spans_by, collectives_by = _rows_by_rank(run.spans.rank), _rows_by_rank(run.collectives.rank)
    for rank in recorded_ranks(run).tolist():
        spans, collectives = spans_by(rank), collectives_by(rank)
        intervals = [
            (run.spans.start_ns[rows], run.spans.end_ns[rows])
            for rows in (spans[span_kinds[spans] == kind] for kind in Kind)
        ]
        yield _timeline(run, rank, intervals, spans[span_kinds[spans] == Kind.STEP], collectives,
                        transfers)  # fmt: skip


def kinds_of(run: Run) -> NDArray[np.int8]:
    """Say for each span what it is to the account."""
    lanes, names = codes_of(run.spans.lane), codes_of(run.spans.name)
    kinds = np.array(
        [[_kind(lane, name) for name in names.names] for lane in lanes.names], np.int8
    ).reshape(len(lanes.names), len(names.names))
    return kinds[lanes.codes, names.codes]


def check_possible(run: Run) -> None:
    """Refuse times that run backwards or cannot be: no account could rest on them."""
    source = run.provenance.source
    for table, start, end in (
        ("spans", run.spans.start_ns, run.spans.end_ns),
        ("collectives", run.collectives.issue_ns, run.collectives.end_ns),
    ):
        is_wrong = (end < start) | (abs(start) > MOST_NS) | (abs(end) > MOST_NS)
        if is_wrong.any():
            row = int(np.argmax(is_wrong))
            raise DamagedInput(
                source,
                f"{table}, row {row}: times that cannot be, from {start[row]} to {end[row]} ns",
            )
    size = run.collectives.bytes
    if (size < 0).any() or (size > MOST_BYTES).any():
        row = int(np.argmax((size < 0) | (size > MOST_BYTES)))
        raise DamagedInput(source, f"collectives, row {row}: {size[row]} bytes cannot be")


def _kind(lane: str, name: str) -> Kind:
    if lane == "host":
        return {"step": Kind.STEP, "backward": Kind.MARK}.get(name, Kind.OTHER)
    if lane == "communication":
        return {"wait": Kind.BLOCKED, "codec": Kind.CODEC}.get(name, Kind.SENDING)
    return {"compute": Kind.COMPUTE, "input": Kind.INPUT}.get(lane, Kind.OTHER)


def _rows_by_rank(ranks: Whole) -> Callable[[int], NDArray[np.intp]]:
    order = np.argsort(ranks, kind="stable")
    ordered = ranks[order]

    def rows(rank: int) -> NDArray[np.intp]:
        first, last = (np.searchsorted(ordered, rank, side) for side in _SIDES)
        return order[first:last]

    return rows


def _timeline(
    run: Run, rank: int, spans: list[Interval], steps: NDArray[np.intp],
    collectives: NDArray[np.intp], transfers: Transfers,
) -> Timeline:  # fmt: skip
    start_ns, end_ns, number = _steps(run, rank, steps)
    periods = _periods(run, collectives, transfers)
    ready, known = transfers.ready_ns[collectives], transfers.is_known[collectives]
    issue, end = run.collectives.issue_ns[collectives], run.collectives.end_ns[collectives]
    untold = (ready[~known], end[~known])
    edges = [*spans, (issue, end), (periods.start_ns, periods.end_ns), untold]
    moments = _distinct(np.concatenate([times for pair in edges for times in pair]))
    covered = {kind: _covers(moments, *spans[kind]) for kind in Kind}
    period = _inside(moments, periods.start_ns, periods.end_ns)
    outstanding = _covers(moments, issue, end)
    is_untold = _covers(moments, *untold) | covered[Kind.SENDING]
    is_computing = covered[Kind.COMPUTE] & ~covered[Kind.BLOCKED]
    is_communicating = outstanding | covered[Kind.SENDING]
    doing = np.select(
        [is_computing, period >= 0, is_untold, outstanding, covered[Kind.CODEC],
         covered[Kind.INPUT]],
        [Doing.COMPUTE, Doing.TRANSFER, Doing.UNTOLD, Doing.WAITING, Doing.CODEC, Doing.INPUT],
        Doing.REST,
    ).astype(np.int8)  # fmt: skip
    is_busy = is_computing | is_communicating | covered[Kind.CODEC] | covered[Kind.OTHER]
    return Timeline(
        rank=rank, moments=moments, doing=doing, is_computing=is_computing,
        is_communicating=is_communicating, is_busy=is_busy,
        is_recorded=is_busy | covered[Kind.COMPUTE] | covered[Kind.INPUT],
        step_number=number, step=_inside(moments, start_ns, end_ns),
        periods=periods, period=period,
    )  # fmt: skip


def _steps(run: Run, rank: int, rows: NDArray[np.intp]) -> tuple[Whole, Whole, Whole]:
    """Return the steps of a rank in order of time; two at once, or of one number, are refused."""
    rows = rows[np.argsort(run.spans.start_ns[rows], kind="stable")]
    start_ns, end_ns = run.spans.start_ns[rows], run.spans.end_ns[rows]
    number = run.spans.step[rows]
    if (end_ns[:-1] > start_ns[1:]).any() or len(np.unique(number)) < len(number):
        raise DamagedInput(run.provenance.source, f"rank {rank} has two steps at once")
    return start_ns, end_ns, number


def _periods(run: Run, rows: NDArray[np.intp], transfers: Transfers) -> Periods:
    """Join transfers that touch: a link shared by several is not told apart in time."""
    end = run.collectives.end_ns[rows]
    kept = transfers.is_known[rows] & (end > transfers.ready_ns[rows])
    rows = rows[kept]
    rows = rows[np.argsort(transfers.ready_ns[rows], kind="stable")]
    start, reached = transfers.ready_ns[rows], np.maximum.accumulate(run.collectives.end_ns[rows])
    is_new = np.ones(len(rows), bool)
    is_new[1:] = start[1:] > reached[:-1]
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(rows)) - 1 if len(rows) else first
    number = np.cumsum(is_new) - 1

    def summed(column: NDArray[np.generic]) -> NDArray[np.float64]:
        return np.asarray(np.bincount(number, column[rows], len(first)), np.float64)

    largest = np.zeros(len(first), np.int64)
    np.maximum.at(largest, number, run.collectives.bytes[rows])
    return Periods(
        start_ns=start[first], end_ns=reached[last], floor_ns=summed(transfers.floor_ns),
        codec_ns=summed(transfers.codec_ns), hops=summed(transfers.hops), largest_bytes=largest,
    )  # fmt: skip


def _distinct(times_ns: Whole) -> Whole:
    """Return the times in order, each once; numpy's own `unique` takes three times as long."""
    ordered = np.sort(times_ns)
    distinct: Whole = ordered[np.append([True], ordered[1:] > ordered[:-1])[: len(ordered)]]
    return distinct


def _covers(moments: Whole, start_ns: Whole, end_ns: Whole) -> NDArray[np.bool_]:
    """Say for each piece whether an interval covers it."""
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
