"""The account of a step: where its time went, in parts that add up to it exactly.

Per rank and step every nanosecond belongs to one part (`timeline.py` has the order of precedence).
In exposed communication, waiting is known as such. A stretch of transfers is shared between

    line_rate   the time of its bytes on the wire at line rate: the least for any transport
    latency     its messages that wait for each other, each as long as in an undisturbed small
                collective (the lower quartile). For small collectives alone, it is all time
                beyond the floor
    codec       packing and unpacking, where a simulation states the cost
    transport   the rest
    contention  the rest between ranks of one host, whose processors do the work. Where devices
                of a plan have links within their node, the rest is transport as well

and the exposed part of the stretch is shared likewise.

Computing may take longer because of the job's own communication and ranks. `contention.py` finds
by how much.

For the job the parts are means over ranks and usual steps (`run/usual.py`), with one rule.
`straggler` is waiting, plus a rank's time beyond the lower median of the ranks in compute, input or
host. Time that cannot be told apart is `unexplained`: transfers whose line rate is unknown, or
communication with ranks that are missing from the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.errors import DamagedInput, UsageError
from fullwire.run.kinds import ONE_KIND, Kinds, kinds_of
from fullwire.run.placement import sums_on_processors
from fullwire.run.run import Run, Spans, Whole
from fullwire.run.usual import MOST_SLOWED, regular_steps
from fullwire.timeline.breakdown import RankBreakdown, rank_breakdown
from fullwire.timeline.contention import (
    NOT_TOLD,
    Crowding,
    Probed,
    crowding_by_kind,
    probe_steps,
)
from fullwire.timeline.timeline import Doing, Periods, Timeline, timelines
from fullwire.timeline.transfers import Transfers, recorded_ranks, transfers_of

LatencySource: TypeAlias = Literal["small collectives", "fact", "none"]

SMALL_BYTES = 16 * 1024  # of a collective that shows the cost of a message with any bytes

# Without such collectives, larger ones serve whose bytes take a small share of their time. Joining
# 120 of 32 KiB into 30 took two thirds off a step. A line five times as fast took a tenth off it.
# Where the bytes take more of their time, less of the rest is taken for the cost of messages.
RATHER_SMALL_BYTES, OF_THEIR_TIME = 64 * 1024, (0.1, 0.2)
FEWEST_SMALL = 5  # stretches of small collectives, to believe their times of messages
UNDISTURBED = 0.25  # of them: on busy processors the others take up to ten times as long


class Part(IntEnum):
    """The parts of an account, in the order in which they are shown."""

    COMPUTE = 0
    CONTENTION = 1  # by the job's own sums, and its ranks on its processors, as far as known
    LINE_RATE = 2
    LATENCY = 3
    TRANSPORT = 4
    STRAGGLER = 5
    BUBBLE = 6  # stages of a pipeline wait for each other
    CODEC = 7
    INPUT = 8
    HOST = 9
    UNEXPLAINED = 10

    @property
    def key(self) -> str:
        """Return the part's name in results."""
        return self.name.lower()


_PART_OF = {
    Doing.COMPUTE: Part.COMPUTE,
    Doing.WAITING: Part.STRAGGLER,
    Doing.BUBBLE: Part.BUBBLE,
    Doing.UNTOLD: Part.UNEXPLAINED,
    Doing.CODEC: Part.CODEC,
    Doing.INPUT: Part.INPUT,
    Doing.REST: Part.HOST,
}
_SPENT_BY_ITSELF = (Part.COMPUTE, Part.INPUT, Part.HOST)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Account:
    """The account of a job; `parts_ns` has an axis for ranks, one for steps and one for parts."""

    ranks: tuple[int, ...]
    steps: Whole  # numbers of the steps that every rank has, in order of time
    is_typical: NDArray[np.bool_]  # the usual steps, which enter the means
    is_kept: NDArray[np.bool_]  # all but warm-up and rare exceptions
    is_whole_trace: bool  # no step was marked, and all of the trace counts as one
    parts_ns: Whole
    excess_ns: Whole  # of each rank beyond the lower median; the last axis has three parts
    overlapped_ns: Whole  # computation beside communication, by rank and step
    ahead_ns: Whole  # the host's before a step's first computation, by rank and step
    gaps_ns: Whole  # the host's between a step's computations, by rank and step
    gap_count: Whole
    caused_ns: Floats  # the others' waiting for each rank, by rank and step
    untold_ns: Whole  # exposed communication with ranks outside the run, by rank and step
    breakdowns: tuple[RankBreakdown, ...]
    lines: tuple[Timeline, ...]  # empty where spans came in parts
    latency: LatencySource
    beyond_line_rate: float  # the floor of all transfers over the time that they took
    clock_error_ns: int
    crowding: Crowding = NOT_TOLD
    is_over_all: bool = False  # `is_typical` holds all kept steps
    crowded_s: float = 0.0  # the share of contention by which computing takes longer
    kinds: Kinds = ONE_KIND
    of_kinds: tuple[Crowding, ...] = ()  # the contention of each kind of steps
    baseline_s: float = 0.0  # the step of one worker, where a run of one was given
    inside_s: float = 0.0  # of transport: on the links inside nodes, which are no line

    @property
    def step_s(self) -> float:
        """Return the time of a step: the mean length of the usual steps."""
        return sum(self.parts_s.values())

    @property
    def untold_crowding_s(self) -> float:
        """Return the most contention of a device in a step whose kernels do not tell it."""
        if self.crowding.is_told:
            return 0.0
        beside_s = float(self.overlapped_ns[:, self.is_typical].mean()) * 1e-9
        return (1 - self.crowding.compared) * (1 - 1 / MOST_SLOWED) * beside_s

    @property
    def parts_s(self) -> dict[str, float]:
        """Return the job's parts in seconds per step."""
        return _seconds(self.parts_ns[:, self.is_typical].mean(axis=(0, 1)))

    def over_all(self) -> Account:
        """Return the account of all kept steps, as for a loss that only a few of them have."""
        return replace(self, is_typical=self.is_kept, is_over_all=True)

    def by_kind(self) -> tuple[Account, ...]:
        """Return the account of each kind of steps; none where all steps are alike."""
        places = self.kinds.of(self.steps)
        return tuple(
            replace(
                self,
                is_typical=self.is_typical & (places == place),
                crowding=crowding,
                kinds=ONE_KIND,
                of_kinds=(),
            )
            for place, crowding in enumerate(self.of_kinds)
        )

    def beside_one_worker(self, computing_s: float, most_s: float) -> Account:
        """Return the account with computing beyond that of one worker as contention.

        `computing_s` is one worker's computing in a step, and `most_s` the most that can be
        contention. What the run itself tells of contention stays.
        """
        own_s = self.parts_s[Part.COMPUTE.key]
        beyond_s = min(own_s - computing_s, most_s - self.crowded_s)
        if beyond_s <= 0:
            return self
        parts_ns = self.parts_ns.copy()
        moved_ns = (parts_ns[:, :, Part.COMPUTE] * (beyond_s / own_s)).astype(np.int64)
        parts_ns[:, :, Part.COMPUTE] -= moved_ns
        parts_ns[:, :, Part.CONTENTION] += moved_ns
        moved_s = float(moved_ns[:, self.is_typical].mean()) * 1e-9
        crowded_s = self.crowded_s + moved_s
        return replace(self, parts_ns=parts_ns, crowded_s=crowded_s)

    @property
    def alone_s(self) -> float:
        """Return the time of a step with one worker: a baseline's, or as far as the run tells.

        Input and host are there with one worker too: scaling loses the rest.
        """
        if self.baseline_s:
            return self.baseline_s
        if self.of_kinds:
            shares = [kind.share for kind in self.kinds.kinds]
            return float(np.dot(shares, [kind.alone_s for kind in self.by_kind()]))
        parts = self.parts_s
        computing_s, host_s = parts[Part.COMPUTE.key], parts[Part.HOST.key]
        if self.crowding.source == "probe steps":
            computing_s = self.crowding.alone_s
        if self.crowding.host_s is None:
            return computing_s + parts[Part.INPUT.key] + host_s
        # A few turns may have a longer host's part than usual steps, as for a log.
        return min(computing_s + parts[Part.INPUT.key] + self.crowding.host_s, self.step_s)

    @property
    def untold_s(self) -> float:
        """Return the time of the unexplained part that may be waiting as well as transfer."""
        return float(self.untold_ns[:, self.is_typical].mean()) * 1e-9

    @property
    def copies_s(self) -> float:
        """Return the time of the host's part in which devices copied and filled their memory."""
        typical = self.steps[self.is_typical]
        copied_ns = 0
        for line in (line for line in self.lines if line.rank in self.ranks):
            number = np.append(line.step_number, -1)[line.step]  # the last: outside steps
            copies = (line.doing == Doing.REST) & line.is_busy & (line.step >= 0)
            copied_ns += int(line.length_ns[copies & np.isin(number, typical)].sum())
        return copied_ns * 1e-9 / max(len(self.ranks) * len(typical), 1)

    def rank_parts_s(self) -> list[dict[str, float]]:
        """Return each rank's own seconds per step: `straggler` is then its waiting alone."""
        own_ns = self.parts_ns.copy()
        own_ns[:, :, _SPENT_BY_ITSELF] += self.excess_ns
        own_ns[:, :, Part.STRAGGLER] -= self.excess_ns.sum(axis=2)
        return [_seconds(row) for row in own_ns[:, self.is_typical].mean(axis=1)]


def account(
    run: Run, rate_bps: Mapping[int, float], parts: Iterable[Spans] | None = None
) -> Account:
    """Draw up the account of a run; `rate_bps` is each rank's line rate, as far as known.

    Where the run has only some of its spans, `parts` are all of them (see `timelines`). Then one
    part at a time is in memory, and timelines are dropped.
    """
    marked, is_whole_trace = with_steps(run)
    transfers = transfers_of(marked, rate_bps)
    everyone, lines = [], []
    probes = probe_steps(marked)
    for line in timelines(marked, transfers, parts):
        everyone.append(_Told.by(line, probes))
        if parts is None:
            lines.append(line)
    ranks, steps = _together(run, [told for told in everyone if len(told.step_number)])
    latency = _latency(run, ranks)
    in_host = Part.CONTENTION if sums_on_processors(run) else Part.TRANSPORT
    first = np.stack([_by_step(told, steps, latency, in_host) for told in ranks])
    length_ns = first.sum(axis=2).mean(axis=0)
    kinds = kinds_of(run).among(steps)
    is_typical = kinds.usual(steps, length_ns)
    overlapped_ns = np.stack([told.in_order(steps, told.overlapped_ns) for told in ranks])
    # The share of computing that is caused by contention.
    crowded = crowding_by_kind(
        run,
        [told.rank for told in ranks],
        [told.probed for told in ranks],
        first[:, :, Part.COMPUTE],
        first[:, :, (Part.CODEC, Part.INPUT, Part.HOST)].sum(axis=2),
        overlapped_ns,
        is_typical,
        kinds,
        kinds.of(steps),
    )
    crowded_ns = (first[:, :, Part.COMPUTE] * crowded.shares).astype(np.int64)
    first[:, :, Part.COMPUTE] -= crowded_ns
    first[:, :, Part.CONTENTION] += crowded_ns
    parts_ns, excess_ns = _with_stragglers(first)
    floor_ns = sum(float(np.nansum(told.periods.floor_ns)) for told in ranks)
    taken_ns = sum(int((told.periods.end_ns - told.periods.start_ns).sum()) for told in ranks)
    return Account(
        ranks=tuple(told.rank for told in ranks),
        steps=steps,
        is_typical=is_typical,
        is_kept=kinds.kept(steps, length_ns) | regular_steps(length_ns),
        is_whole_trace=is_whole_trace,
        parts_ns=parts_ns,
        excess_ns=excess_ns,
        overlapped_ns=overlapped_ns,
        ahead_ns=np.stack([told.in_order(steps, told.ahead_ns) for told in ranks]),
        gaps_ns=np.stack([told.in_order(steps, told.gaps_ns) for told in ranks]),
        gap_count=np.stack([told.in_order(steps, told.gap_count) for told in ranks]),
        caused_ns=_caused_ns(marked, ranks, steps, transfers),
        untold_ns=np.stack(
            [told.in_order(steps, told.parts_ns[:, Part.UNEXPLAINED]) for told in ranks]
        ),
        breakdowns=tuple(told.breakdown for told in everyone),
        lines=tuple(lines),
        latency=latency.source,
        beyond_line_rate=floor_ns / taken_ns if taken_ns else 0.0,
        clock_error_ns=transfers.clock_error_ns,
        crowding=crowded.of_all,
        crowded_s=float(crowded_ns[:, is_typical].mean()) * 1e-9,
        kinds=kinds,
        of_kinds=crowded.of_kinds,
        inside_s=0.0 if in_host == Part.CONTENTION else _inside_s(ranks, steps, is_typical),
    )


def _inside_s(ranks: Sequence[_Told], steps: Whole, is_typical: NDArray[np.bool_]) -> float:
    """Return the exposed time of a step in which only devices of one node exchange data."""
    mean_s = 0.0
    for told in ranks:
        total_ns = np.zeros(len(told.step_number), np.int64)
        inside = told.periods.is_in_host[told.exposed_period]
        np.add.at(total_ns, told.exposed_step[inside], told.exposed_ns[inside])
        mean_s += float(told.in_order(steps, total_ns)[is_typical].mean()) * 1e-9 / len(ranks)
    return mean_s


def nothing() -> Account:
    """Return the account of a run without times: one empty step."""
    return Account(
        ranks=(),
        steps=np.zeros(1, np.int64),
        is_typical=np.ones(1, bool),
        is_kept=np.ones(1, bool),
        is_whole_trace=True,
        parts_ns=np.zeros((1, 1, len(Part)), np.int64),
        excess_ns=np.zeros((1, 1, len(_SPENT_BY_ITSELF)), np.int64),
        overlapped_ns=np.zeros((1, 1), np.int64),
        ahead_ns=np.zeros((1, 1), np.int64),
        gaps_ns=np.zeros((1, 1), np.int64),
        gap_count=np.zeros((1, 1), np.int64),
        caused_ns=np.zeros((1, 1)),
        untold_ns=np.zeros((1, 1), np.int64),
        breakdowns=(),
        lines=(),
        latency="none",
        beyond_line_rate=0.0,
        clock_error_ns=0,
    )


def with_steps(run: Run) -> tuple[Run, bool]:
    """Return a run with its steps marked, and whether all of its trace had to serve as one step.

    Ranks may be recorded from different moments on. That one step is then the time when all of them
    were recorded.
    """
    spans, collectives = run.spans, run.collectives
    if ((spans.lane == "host") & (spans.name == "step")).any():
        return run, False
    ranks = recorded_ranks(run)
    if not len(ranks) and len(run.flows):
        raise UsageError(
            f"{run.place}: packets have no steps until these are found among them: "
            "explain the run that `fullwire flows CAPTURE... -o x.run` writes, of captures of one "
            "job in which it finds iterations"
        )
    if not len(ranks):
        _refuse(run, "expected spans or collectives to explain, and found none")
    # The beginning and the end of each rank's recording.
    place = np.searchsorted(ranks, np.concatenate([spans.rank, collectives.rank]))
    start = np.full(len(ranks), np.iinfo(np.int64).max)
    end = np.full(len(ranks), np.iinfo(np.int64).min)
    np.minimum.at(start, place, np.concatenate([spans.start_ns, collectives.issue_ns]))
    np.maximum.at(end, place, np.concatenate([spans.end_ns, collectives.end_ns]))
    shared_ns = float(end.min()) - float(start.max())  # whole numbers of hostile runs overflow
    if shared_ns >= (end.astype(np.float64) - start).min() / 2:
        start, end = np.maximum(start, start.max()), np.minimum(end, end.min())
    marks = Spans(
        rank=ranks,
        step=np.zeros(len(ranks), np.int64),
        lane=np.full(len(ranks), "host", object),
        name=np.full(len(ranks), "step", object),
        start_ns=start,
        end_ns=np.maximum(start, end),
    )
    collectives = replace(collectives, step=np.zeros(len(collectives), np.int64))
    return replace(run, spans=Spans.joined([spans, marks]), collectives=collectives), True


def _refuse(run: Run, problem: str) -> NoReturn:
    """Refuse a run: as damaged if a part of it is missing, else as one that cannot answer."""
    if run.missing:
        raise DamagedInput(run.place, f"{problem}; missing: {run.missing[0]}")
    raise UsageError(f"{run.place}: {problem}")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Told:
    """The figures that the account needs of a rank's timeline, which is much larger."""

    rank: int
    step_number: Whole
    parts_ns: Whole  # by step and part, transfers aside
    overlapped_ns: Whole  # by step
    ahead_ns: Whole  # by step
    gaps_ns: Whole  # by step
    gap_count: Whole  # by step
    exposed_ns: Whole  # each piece of exposed transfer,
    exposed_step: Whole  # the place of its step,
    exposed_period: Whole  # and of its period
    periods: Periods
    is_in_a_step: NDArray[np.bool_]  # of each period
    probed: Probed
    breakdown: RankBreakdown

    @classmethod
    def by(cls, line: Timeline, probes: Spans) -> _Told:
        inside, length_ns = line.step >= 0, line.length_ns
        parts = np.zeros((len(line.step_number), len(Part)), np.int64)
        for doing, part in _PART_OF.items():
            chosen = inside & (line.doing == doing)
            np.add.at(parts[:, part], line.step[chosen], length_ns[chosen])
        overlapped = np.zeros(len(line.step_number), np.int64)
        chosen = inside & line.is_computing & line.is_communicating
        np.add.at(overlapped, line.step[chosen], length_ns[chosen])
        exposed = np.flatnonzero(inside & (line.doing == Doing.TRANSFER))
        is_in_a_step = np.zeros(len(line.periods.hops), bool)
        is_in_a_step[line.period[(line.period >= 0) & inside]] = True
        ahead_ns, gaps_ns, gap_count = _host_around_computing(line)
        return cls(
            rank=line.rank,
            step_number=line.step_number,
            parts_ns=parts,
            overlapped_ns=overlapped,
            ahead_ns=ahead_ns,
            gaps_ns=gaps_ns,
            gap_count=gap_count,
            exposed_ns=length_ns[exposed],
            exposed_step=line.step[exposed],
            exposed_period=line.period[exposed],
            periods=line.periods,
            is_in_a_step=is_in_a_step,
            probed=Probed.by(line, probes),
            breakdown=rank_breakdown(line),
        )

    def in_order(self, steps: Whole, rows: Whole) -> Whole:
        """Return the rows of the wanted steps, from the rows of a rank's own steps."""
        order = np.argsort(self.step_number, kind="stable")
        return rows[order[np.searchsorted(self.step_number[order], steps)]]


def _host_around_computing(line: Timeline) -> tuple[Whole, Whole, Whole]:
    """Return the time of the host before each step computes, and its gaps between computations.

    Time next to a collective, or next to waiting for data, is outside these gaps.
    """
    steps = len(line.step_number)
    first = np.zeros(steps, np.int64)  # 0 where nothing computes
    computing = np.flatnonzero((line.step >= 0) & line.is_computing)
    first[line.step[computing[::-1]]] = computing[::-1]
    rest = np.flatnonzero((line.step >= 0) & (line.doing == Doing.REST))
    step = line.step[rest]
    # The pieces with something to do last before each piece, and first after it; -1 for none.
    others = np.flatnonzero(line.doing != Doing.REST)
    place = np.searchsorted(others, rest)
    known = np.concatenate([[-1], others, [-1]])
    before, after = known[place], known[place + 1]
    computes = np.append(line.is_computing, False)  # the last is for pieces without a neighbour
    step_at = np.append(line.step, -1)
    ahead = rest < first[step]
    gap = computes[before] & computes[after] & (step_at[before] == step) & (step_at[after] == step)

    def total_ns(chosen: NDArray[np.bool_]) -> Whole:
        by_step_ns = np.zeros(steps, np.int64)
        np.add.at(by_step_ns, step[chosen], line.length_ns[rest[chosen]])
        return by_step_ns

    count = np.bincount(step_at[np.unique(before[gap])], minlength=steps)
    return total_ns(ahead), total_ns(gap), count


def _together(run: Run, ranks: Sequence[_Told]) -> tuple[list[_Told], Whole]:
    """Return the ranks to account for, and the steps that all of these have, in order of time.

    These are usually all ranks. Where some have no step in common with the others, ranks are left
    out so that ranks times steps is as large as can be.
    """
    most_first = sorted(ranks, key=lambda told: -len(told.step_number))
    shared: list[set[int]] = []
    for told in most_first:
        mine = set(told.step_number.tolist())
        shared.append(mine & shared[-1] if shared else mine)
    if not shared:
        _refuse(run, f"no step that all {len(ranks)} ranks have")
    count = len(ranks)
    if not shared[-1]:
        count = 1 + int(np.argmax([(n + 1) * len(common) for n, common in enumerate(shared)]))
    chosen = {told.rank for told in most_first[:count]}
    kept = [told for told in ranks if told.rank in chosen]
    common = [step for step in kept[0].step_number.tolist() if step in shared[count - 1]]
    return kept, np.array(common, np.int64)


@dataclass(frozen=True, slots=True)
class Latency:
    """The time of a message besides its bytes, and where that figure is from."""

    per_hop_ns: float
    source: LatencySource
    up_to_bytes: int = SMALL_BYTES  # of the collectives that show it

    def of_ns(self, periods: Periods) -> Floats:
        """Return the time of each stretch's messages; a small collective consists of them only."""
        stated_ns = periods.hops * self.per_hop_ns
        if self.source != "small collectives":
            return stated_ns
        length_ns = (periods.end_ns - periods.start_ns).astype(np.float64)
        messages_ns = _share_of_messages(periods, self.up_to_bytes) * length_ns
        # Between ranks of one host, time beyond it is the turn of others on the processors.
        is_latency = (messages_ns > 0) & ~periods.is_in_host
        return np.where(is_latency, np.maximum(messages_ns, stated_ns), stated_ns)


def _latency(run: Run, ranks: Sequence[_Told]) -> Latency:
    """Return the latency that small collectives of the run show, or else that of its facts.

    Collectives before a rank's first step are left out: the rank is still connecting.
    """
    for up_to_bytes in (SMALL_BYTES, RATHER_SMALL_BYTES):
        message_ns: list[Floats] = [np.zeros(0)]
        hops: list[Floats] = [np.zeros(0)]
        for told in ranks:
            periods = told.periods
            share = _share_of_messages(periods, up_to_bytes)
            chosen = told.is_in_a_step & (share > 0)
            length_ns = (periods.end_ns - periods.start_ns)[chosen].astype(np.float64)
            rest_ns = np.maximum(length_ns - np.nan_to_num(periods.floor_ns[chosen]), 0)
            hops.append(periods.hops[chosen])
            message_ns.append(share[chosen] * rest_ns / hops[-1])
        all_ns, weights = np.concatenate(message_ns), np.concatenate(hops)
        if len(all_ns) >= FEWEST_SMALL:
            order = np.argsort(all_ns)
            reached = np.cumsum(weights[order])
            usual_ns = all_ns[order][np.searchsorted(reached, UNDISTURBED * reached[-1])]
            return Latency(float(usual_ns), "small collectives", up_to_bytes)
    latency_s = run.facts.latency_s
    if latency_s is not None and latency_s < 1e9:
        return Latency(latency_s * 1e9, "fact")
    return Latency(0.0, "none")


def _share_of_messages(periods: Periods, up_to_bytes: int) -> Floats:
    """Return the share of each stretch's time beyond its bytes that is the cost of messages."""
    share = (periods.largest_bytes <= SMALL_BYTES).astype(np.float64)
    if up_to_bytes > SMALL_BYTES:
        length_ns = (periods.end_ns - periods.start_ns).astype(np.float64)
        of_bytes = np.nan_to_num(periods.floor_ns, nan=np.inf) / np.maximum(length_ns, 1.0)
        rather_small = np.interp(of_bytes, OF_THEIR_TIME, (1.0, 0.0))
        share = np.maximum(share, np.where(periods.largest_bytes <= up_to_bytes, rather_small, 0.0))
    return np.where(periods.hops > 0, share, 0.0)


def _by_step(told: _Told, steps: Whole, latency: Latency, in_host: Part) -> Whole:
    """Return one rank's account before stragglers are set apart: steps by parts, in nanoseconds.

    `in_host` is the part of what ranks of one host exchange, beyond the cost of messages.
    The floor, the codec and the messages take their shares of each stretch in turn, while any of
    it is left.
    """
    periods, parts, rest_ns = told.periods, told.parts_ns.copy(), told.exposed_ns
    step, period = told.exposed_step, told.exposed_period
    length_ns = (periods.end_ns - periods.start_ns).astype(np.float64)
    is_known = np.isfinite(periods.floor_ns)
    left_ns = length_ns
    for part, wanted_ns in (
        (Part.LINE_RATE, np.where(is_known, periods.floor_ns, 0.0)),
        (Part.CODEC, periods.codec_ns),
        (Part.LATENCY, latency.of_ns(periods)),
    ):
        taken_ns = np.minimum(wanted_ns, left_ns)
        left_ns = left_ns - taken_ns
        share = taken_ns / length_ns
        exposed_ns = np.minimum((told.exposed_ns * share[period]).astype(np.int64), rest_ns)
        np.add.at(parts[:, part], step, exposed_ns)
        rest_ns = rest_ns - exposed_ns
    rest = np.where(is_known, Part.TRANSPORT, Part.UNEXPLAINED)
    rest = np.where(periods.is_in_host, in_host, rest)[period]
    np.add.at(parts, (step, rest), rest_ns)
    return told.in_order(steps, parts)


def _with_stragglers(parts_ns: Whole) -> tuple[Whole, Whole]:
    """Move each rank's time beyond the lower median of the ranks to the straggler's part."""
    settled = parts_ns.copy()
    own = parts_ns[:, :, _SPENT_BY_ITSELF]
    usual = np.sort(own, axis=0)[(len(own) - 1) // 2]
    excess = np.maximum(own - usual, 0)
    settled[:, :, _SPENT_BY_ITSELF] -= excess
    settled[:, :, Part.STRAGGLER] += excess.sum(axis=2)
    return settled, excess


def _caused_ns(run: Run, told: Sequence[_Told], steps: Whole, transfers: Transfers) -> Floats:
    """Add up the others' waiting for each rank, by the step in which it was late."""
    table, ranks = run.collectives, np.array([of.rank for of in told])
    place, order = np.searchsorted(ranks, table.rank), np.argsort(steps)
    place = np.minimum(place, len(ranks) - 1)
    step = order[np.minimum(np.searchsorted(steps[order], table.step), len(steps) - 1)]
    chosen = (steps[step] == table.step) & (ranks[place] == table.rank)
    caused = np.zeros((len(ranks), len(steps)))
    np.add.at(caused, (place[chosen], step[chosen]), transfers.caused_ns[chosen])
    return caused


def _seconds(parts_ns: Floats) -> dict[str, float]:
    return {part.key: float(parts_ns[part]) * 1e-9 for part in Part}
