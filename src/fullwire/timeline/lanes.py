"""The bars to draw for some steps: which steps, which ranks, and their bars lane by lane.

A picture of thousands of bars shows none of them. Where a rank has more than `MOST_BARS` in a lane
of one step, bars that are too short to be seen are joined with their neighbours. The picture then
says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullwire.run.run import Run, Spans, Text, Whole
from fullwire.timeline.account import Account, Part, with_steps
from fullwire.timeline.timeline import Timeline, timelines
from fullwire.timeline.transfers import Transfers, transfers_of

MOST_STEPS = 20
MOST_RANKS = 64
MOST_BARS = 250  # in one lane of one rank in one step
_MOST_PAGES = 160  # steps times ranks: a page has to stay small
_SEEN = 2_000  # a bar is seen if it is longer than the step over this
# Drawn otherwise, or no activity.
_HIDDEN = {("host", "step"), ("host", "queued"), ("communication", "wait")}


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Bars:
    """Bars of one lane in order of time, in nanoseconds since the step began."""

    name: Text
    issue_ns: Whole
    start_ns: Whole
    ready_ns: Whole  # when the last rank had issued a collective; -1 where that is unknown
    end_ns: Whole
    bytes: Whole  # -1 for bars other than collectives
    count: Whole  # how many each stands for

    def __len__(self) -> int:
        return len(self.name)

    @classmethod
    def in_order(cls, **columns: NDArray[Any]) -> Bars:
        """Return bars in order of time."""
        order = np.argsort(columns["start_ns"], kind="stable")
        return cls(**{name: column[order] for name, column in columns.items()})

    @classmethod
    def of_spans(cls, spans: Spans) -> Bars:
        """Return a bar for each span."""
        none = np.full(len(spans), -1, np.int64)
        return cls.in_order(
            name=spans.name,
            issue_ns=spans.start_ns,
            start_ns=spans.start_ns,
            ready_ns=none,
            end_ns=spans.end_ns,
            bytes=none,
            count=np.ones(len(spans), np.int64),
        )

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def between(self, start_ns: int, end_ns: int) -> Bars:
        """Return the bars that lie at least partly between two moments."""
        inside = (self.start_ns < end_ns) & (self.end_ns > start_ns)
        return Bars(**{name: column[inside] for name, column in self.columns().items()})

    def since(self, begin_ns: int) -> Bars:
        """Return the same bars with times since a moment; earlier times become 0."""
        moved = self.columns()
        for name in ("issue_ns", "start_ns", "ready_ns", "end_ns"):
            is_unknown = (moved[name] == -1) if name == "ready_ns" else False
            moved[name] = np.where(is_unknown, -1, np.maximum(moved[name] - begin_ns, 0))
        return Bars(**moved)

    def joined(self, unseen_ns: int) -> Bars:
        """Join bars too short to be seen, and ever longer ones, until they are few enough."""
        short_ns = max(unseen_ns, 1)
        first = np.arange(len(self))
        while len(first) > MOST_BARS:
            is_short = self.end_ns - self.start_ns <= short_ns
            together = is_short[1:] & is_short[:-1]
            together &= self.start_ns[1:] // short_ns == self.start_ns[:-1] // short_ns
            first = np.flatnonzero(np.append([True], ~together))
            short_ns *= 2
        if len(first) == len(self):
            return self
        return Bars(
            name=self.name[first],
            issue_ns=np.minimum.reduceat(self.issue_ns, first),
            start_ns=self.start_ns[first],
            ready_ns=np.maximum.reduceat(self.ready_ns, first),
            end_ns=np.maximum.reduceat(self.end_ns, first),
            bytes=np.add.reduceat(self.bytes, first),
            count=np.add.reduceat(self.count, first),
        )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RankLanes:
    """One rank in one step: its bars by lane, and the account's kind of each moment."""

    rank: int
    start_ns: int
    end_ns: int
    lanes: Mapping[str, Bars]
    doing_start_ns: Whole
    doing_end_ns: Whole
    doing: NDArray[np.int8]

    def since(self, begin_ns: int) -> RankLanes:
        """Return the same with times since a moment, which is at its start or before."""
        return replace(
            self,
            start_ns=self.start_ns - begin_ns,
            end_ns=self.end_ns - begin_ns,
            lanes={lane: bars.since(begin_ns) for lane, bars in self.lanes.items()},
            doing_start_ns=self.doing_start_ns - begin_ns,
            doing_end_ns=self.doing_end_ns - begin_ns,
        )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class DrawnStep:
    """A step with a word for why it was chosen; empty where it is one among others."""

    number: int
    word: str
    length_ns: int
    ranks: tuple[RankLanes, ...]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Drawing:
    """Steps in order of time, all with the same ranks."""

    steps: tuple[DrawnStep, ...]
    ranks_left_out: int
    steps_left_out: int
    joined: int  # bars that stand for several


def drawing(run: Run, account: Account, parts: Iterable[Spans] | None = None) -> Drawing:
    """Choose steps and ranks, and collect the bars to draw, of one rank after the other.

    Where the run has only some of its spans, `parts` are all of them (see `timelines`).
    """
    # Few ranks are all drawn. Of many ranks, those are drawn whose waiting is furthest off.
    waiting = np.array([row[Part.STRAGGLER.key] for row in account.rank_parts_s()])
    order = np.argsort(-abs(waiting - np.median(waiting)), kind="stable")
    ranks = np.sort(np.array(account.ranks)[order[:MOST_RANKS]])
    chosen = {
        place: word
        for place, word in _chosen_steps(
            account, max(3, min(MOST_STEPS, _MOST_PAGES // max(len(ranks), 1)))
        ).items()
        if account.parts_ns[:, place].sum(axis=1).all()  # a step without length shows nothing
    }
    numbers = [int(account.steps[place]) for place in chosen]
    drawn = [
        [rows.in_step(number) for number in numbers]
        for rows in _rows_of(run, account, ranks, parts)
    ]
    steps = []
    for number, word, of_ranks in zip(
        numbers, chosen.values(), zip(*drawn, strict=True), strict=True
    ):
        begin_ns = min(rank.start_ns for rank in of_ranks)
        length_ns = max(rank.end_ns for rank in of_ranks) - begin_ns
        moved = tuple(rank.since(begin_ns) for rank in of_ranks)
        steps.append(DrawnStep(number=number, word=word, length_ns=length_ns, ranks=moved))
    every = (bars for step in steps for rank in step.ranks for bars in rank.lanes.values())
    return Drawing(
        steps=tuple(steps),
        ranks_left_out=len(account.ranks) - len(ranks),
        steps_left_out=len(account.steps) - len(steps),
        joined=sum(int((bars.count > 1).sum()) for bars in every),
    )


def _rows_of(
    run: Run, account: Account, ranks: Whole, parts: Iterable[Spans] | None
) -> Iterator[_RankRows]:
    transfers = transfers_of(run, {})
    if parts is None:
        for line in account.lines:
            if line.rank in ranks:
                yield _RankRows.of(run, run.spans, transfers, line)
        return
    here = run.spans

    def wanted() -> Iterator[Spans]:
        nonlocal here
        for part in parts:
            here = part.rows(np.isin(part.rank, ranks))
            if len(here):
                yield here

    for line in timelines(with_steps(run)[0], transfers, wanted(), ranks):
        yield _RankRows.of(run, here, transfers, line)


def _chosen_steps(account: Account, most: int) -> dict[int, str]:
    """Name the steps that people ask for first, and spread the rest evenly over the run."""
    length_ns = account.parts_ns.sum(axis=2).max(axis=0)
    typical = np.flatnonzero(account.is_typical)
    median_ns = np.median(length_ns[typical])
    typical_one = int(typical[np.argmin(abs(length_ns[typical] - median_ns))])
    words: dict[int, str] = {}
    named = ("first", 0), ("fastest", np.argmin(length_ns)), ("slowest", np.argmax(length_ns))
    for word, place in (*named, ("typical", typical_one)):
        words[int(place)] = ", ".join(filter(None, (words.get(int(place)), word)))
    if len(length_ns) == 1:
        words = {0: ""}
    spread = np.linspace(0, len(length_ns) - 1, min(most, len(length_ns))).round().astype(int)
    for place in spread.tolist():
        if len(words) < most:
            words.setdefault(place, "")
    return dict(sorted(words.items()))


@dataclass(frozen=True, eq=False, slots=True)
class _RankRows:
    """All bars of one rank, by lane, on the run's own clock."""

    line: Timeline
    lanes: Mapping[str, Bars]

    @classmethod
    def of(cls, run: Run, spans: Spans, transfers: Transfers, line: Timeline) -> _RankRows:
        spans, table = spans.rows(np.flatnonzero(spans.rank == line.rank)), run.collectives
        lanes = {
            lane: Bars.of_spans(spans.rows(_drawn(spans, lane)))
            for lane in ("compute", "input", "host")
        }
        rows = np.flatnonzero(table.rank == line.rank)
        issue_ns, end_ns = table.issue_ns[rows], table.end_ns[rows]
        collectives = Bars.in_order(
            name=table.op[rows],
            issue_ns=issue_ns,
            end_ns=end_ns,
            bytes=table.bytes[rows],
            start_ns=np.clip(table.start_ns[rows], issue_ns, end_ns),
            ready_ns=np.where(transfers.is_known[rows], transfers.ready_ns[rows], -1),
            count=np.ones(len(rows), np.int64),
        ).columns()
        # A simulation lists its messages as spans too; they are drawn once.
        is_listed = np.isin(spans.end_ns, end_ns)
        others = Bars.of_spans(spans.rows(_drawn(spans, "communication") & ~is_listed)).columns()
        both = {name: np.concatenate([collectives[name], others[name]]) for name in collectives}
        return cls(line, {**lanes, "communication": Bars.in_order(**both)})

    def in_step(self, number: int) -> RankLanes:
        """Return the drawn bars of a step, on the run's own clock."""
        [place] = np.flatnonzero(self.line.step_number == number)
        pieces = np.flatnonzero(self.line.step == place)
        start_ns = int(self.line.moments[pieces[0]])
        end_ns = int(self.line.moments[pieces[-1] + 1])
        unseen_ns = (end_ns - start_ns) // _SEEN
        lanes = {
            lane: bars.between(start_ns, end_ns).joined(unseen_ns)
            for lane, bars in self.lanes.items()
        }
        doing_start_ns, doing_end_ns, doing = _doings(self.line, start_ns, end_ns, unseen_ns)
        return RankLanes(
            rank=self.line.rank,
            start_ns=start_ns,
            end_ns=end_ns,
            lanes={lane: bars for lane, bars in lanes.items() if len(bars)},
            doing_start_ns=doing_start_ns,
            doing_end_ns=doing_end_ns,
            doing=doing,
        )


def _drawn(spans: Spans, lane: str) -> NDArray[np.bool_]:
    hidden = [name for other, name in _HIDDEN if other == lane]
    return np.asarray((spans.lane == lane) & ~np.isin(spans.name.astype(str), hidden), bool)


def _doings(
    line: Timeline, start_ns: int, end_ns: int, unseen_ns: int
) -> tuple[Whole, Whole, NDArray[np.int8]]:
    """Return the account's kinds of the step's moments; those too short to be seen are joined."""
    first, last = np.searchsorted(line.moments, [start_ns, end_ns])
    moments, doing = line.moments[first : last + 1], line.doing[first:last]
    keep = np.append([True], doing[1:] != doing[:-1])[: len(doing)]
    begins, kinds = moments[:-1][keep], doing[keep]
    ends = np.append(begins[1:], end_ns)
    while len(begins) > MOST_BARS:
        seen = np.flatnonzero(ends - begins > unseen_ns)
        seen = seen if len(seen) else np.array([0])
        begins, kinds = begins[seen], kinds[seen]
        begins[0] = start_ns
        ends = np.append(begins[1:], end_ns)
        unseen_ns = 2 * max(unseen_ns, 1)
    return begins, ends, kinds


def lanes_of(drawing: Drawing) -> Iterator[str]:
    """Name the lanes in which anything is drawn, in the order in which they are shown."""
    used = {lane for step in drawing.steps for rank in step.ranks for lane in rank.lanes}
    return (lane for lane in ("compute", "communication", "input", "host") if lane in used)
