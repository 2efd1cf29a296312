"""How gathers and scatters of shards go beside the layers that need them, on devices.

A trace shows when each collective began and ended, and when the device computed. A device that
rests until a gather has ended needed it there. A gather that was hidden is needed where the next
layer begins: a scatter is ready there, or a later gather begins on an idle line. A gather that
began at once after another collective had waited for the line since the layer before it began.

With these moments a step is played under other conditions. The line carries the collectives one
after another, as a device gives them to it.

Stages of a pipeline wait for each other's transfers, so their ranks are played together. A transfer
begins when both of its ranks have come to it, and computing goes on where it waited for one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.run.intervals import union, within, without
from fullwire.run.kinds import QUEUED
from fullwire.run.run import Collectives, Gradients, Run, Spans, Text, Whole
from fullwire.run.split_layers import are_between_stages
from fullwire.run.usual import MOST_SLOWED

_SOON_NS = 20_000  # a device goes on so soon after the event that it waited for
_Table = TypeVar("_Table", Spans, Gradients)
_BEFORE, _NEEDED, _AFTER = range(3)  # the order of events at the same place of the computing
_COME, _LAST = 0, 2  # events of stages, beside _NEEDED
_TRANSFERS = ("send", "recv")


class Played(NamedTuple):
    """A step's own time with collectives beside it."""

    stalled_s: Floats
    come_s: dict[int, Floats]  # when each was ready for the line, by its place
    end_s: dict[int, Floats]
    waits_s: tuple[tuple[Floats | float, Floats], ...]  # after how much own time, and how long


@dataclass(frozen=True, eq=False, slots=True)
class Course:
    """When the collectives of a sharded step are ready, and when computing needs them.

    An event is the share of the step's own time that is over then, the place of a collective, and
    whether computing needs its result. Else the collective is ready for the line.
    """

    events: tuple[tuple[float, int, bool], ...]
    own_ns: int  # of the recorded step: all but the waits for collectives
    untold_slowing: float = 0.0  # at most, of all computing beside them: by kernels never alone

    def of(self, places: Sequence[int]) -> Course:
        """Return the course of some of the collectives, which take new places in this order."""
        new = {place: number for number, place in enumerate(places)}
        kept = [event for event in self.events if event[1] in new]
        events = tuple((share, new[place], is_needed) for share, place, is_needed in kept)
        return replace(self, events=events)

    def stalled_s(self, each_s: Sequence[Floats], own_s: float | Floats) -> Floats:
        """Return how long computing waits for collectives that take these times."""
        return self.played(each_s, own_s).stalled_s

    def played(self, each_s: Sequence[Floats], own_s: float | Floats) -> Played:
        """Play collectives that take these times beside a step's own time."""
        stalled_s: Floats = np.zeros(())
        come_s: dict[int, Floats] = {}
        waits_s: list[tuple[Floats | float, Floats]] = []
        free_s: Floats = np.zeros(())
        end_s: dict[int, Floats] = {}
        for share, place, is_needed in self.events:
            now_s = share * own_s + stalled_s
            if is_needed:
                waits_s.append((share * own_s, np.maximum(end_s[place] - now_s, 0.0)))
                stalled_s = stalled_s + waits_s[-1][1]
            else:
                come_s[place] = now_s
                free_s = end_s[place] = np.maximum(free_s, now_s) + each_s[place]
        return Played(stalled_s, come_s, end_s, tuple(waits_s))


class PlayedStages(NamedTuple):
    """A step of a pipeline's ranks, each with its own time and its waits for messages."""

    ended_s: list[Floats]  # by rank
    come_s: dict[tuple[int, int], Floats]  # when a rank came to a message
    end_s: dict[int, Floats]  # of each message
    waits_s: list[list[tuple[float, Floats]]]  # by rank: after which share of `own_ns`, how long


@dataclass(frozen=True, eq=False, slots=True)
class Stages:
    """The courses of the ranks of a pipeline, which wait for each other.

    An event is a rank, the share of `own_ns` that it has computed then, a message, and whether a
    rank has come to it, the last rank has, or computing needs it. A message has its place among the
    collectives whose times are given, how many times as long it takes, and the lines that carry it.
    """

    events: tuple[tuple[int, float, int, int], ...]
    messages: tuple[tuple[int, float, tuple[int, ...]], ...]
    over: tuple[float, ...]  # by rank, the share of `own_ns` that its step takes
    own_ns: int  # of the recorded step of the slowest rank: all but the waits
    passes: tuple[tuple[float, float], ...]  # by rank, the shares at which its last begins and ends
    ready: tuple[tuple[float, ...], ...]  # by rank, the shares after which gradients are ready
    rows: Collectives  # the ranks' parts of the messages
    of_row: tuple[int, ...]  # the message of each
    untold_slowing: float = 0.0
    are_a_ring: bool = False  # rather, of ranks alike

    def of(self, places: Sequence[int]) -> Stages:
        """Return the stages where only some of the collectives' times are given, in this order."""
        new = {place: number for number, place in enumerate(places)}
        gone = 0, 0.0  # takes no time
        messages = (
            (*((new[place], times) if place in new else gone), lines)
            for place, times, lines in self.messages
        )
        return replace(self, messages=tuple(messages))

    def stalled_s(self, each_s: Sequence[Floats], own_s: float | Floats) -> Floats:
        """Return how much longer the step is than the slowest rank's own time."""
        ended_s = self.played(each_s, own_s).ended_s
        return np.asarray(functools.reduce(np.maximum, ended_s) - own_s)

    def played(self, each_s: Sequence[Floats], own_s: float | Floats) -> PlayedStages:
        """Play collectives that take these times, where the slowest rank computes for `own_s`."""
        stalled_s: list[Floats] = [np.zeros(())] * len(self.over)
        ready_s: dict[int, Floats] = {}
        come_s: dict[tuple[int, int], Floats] = {}
        end_s: dict[int, Floats] = {}
        free_s: dict[int, Floats] = {}
        waits_s: list[list[tuple[float, Floats]]] = [[] for _ in self.over]
        for rank, share, message, turn in self.events:
            now_s = share * own_s + stalled_s[rank]
            if turn == _NEEDED:
                waits_s[rank].append((share, np.maximum(end_s[message] - now_s, 0.0)))
                stalled_s[rank] = stalled_s[rank] + waits_s[rank][-1][1]
                continue
            come_s[rank, message] = now_s
            ready_s[message] = np.maximum(ready_s.get(message, now_s), now_s)
            if turn == _LAST:
                place, times, lines = self.messages[message]
                begun_s = ready_s.pop(message)
                for line in lines:
                    begun_s = np.maximum(begun_s, free_s.get(line, begun_s))
                end_s[message] = begun_s + times * each_s[place]
                free_s |= dict.fromkeys(lines, end_s[message])
        ended_s = [
            share * own_s + late_s for share, late_s in zip(self.over, stalled_s, strict=True)
        ]
        return PlayedStages(ended_s, come_s, end_s, waits_s)


@dataclass(frozen=True, eq=False, slots=True)
class _Progress:
    """The computing of a step that is over at a moment: its time without the waits."""

    start_ns: int
    waits_ns: tuple[Whole, Whole]

    def at(self, time_ns: Whole) -> Whole:
        start_ns = np.full(len(time_ns), self.start_ns)
        done_ns: Whole = time_ns - start_ns - within(start_ns, time_ns, self.waits_ns)
        return done_ns

    def is_amidst(self, time_ns: Whole) -> NDArray[np.bool_]:
        """Say which moments lie in a wait, and not at its end."""
        begun = np.searchsorted(self.waits_ns[0] - _SOON_NS, time_ns, side="right")
        return np.asarray(begun > np.searchsorted(self.waits_ns[1] - _SOON_NS, time_ns))


def course_of(run: Run, rows: Collectives, step_ns: tuple[int, int], passed_ns: int) -> Course:
    """Return the course of the collectives of one step of a rank.

    - `step_ns`: when the step began and ended.
    - `passed_ns`: when its backward pass was over.
    """

    order = np.lexsort((rows.end_ns, rows.issue_ns))
    rows = rows.rows(order)
    spans = _of_step(run.spans, rows)
    computing = spans.rows(spans.lane == "compute")
    is_gather = rows.op == "allgather"
    progress, waited_for = _progress(rows.issue_ns, rows.end_ns, is_gather, computing, step_ns[0])
    own_ns = max(int(progress.at(np.array([step_ns[1]]))[0]), 1)
    course = (
        (moment / own_ns, int(order[place]), turn == _NEEDED)
        for moment, turn, place in _events_of_shards(run, rows, progress, waited_for, passed_ns)
    )
    return Course(tuple(course), own_ns, _untold_slowing(run))


def _of_step(table: _Table, rows: Collectives) -> _Table:
    return table.rows((table.rank == rows.rank[0]) & (table.step == rows.step[0]))


def _events_of_shards(
    run: Run, rows: Collectives, progress: _Progress, waited_for: Whole, passed_ns: int
) -> list[tuple[int, int, int]]:
    """Return in order when collectives are ready and needed: the own time, the turn, and the row.

    The rows are in the order of their beginnings, and `waited_for` tells where computing waited.
    """
    start_ns, end_ns, ready_ns = rows.issue_ns, rows.end_ns, _of_step(run.gradients, rows).ready_ns
    is_gather, is_scatter = rows.op == "allgather", rows.op == "reducescatter"
    issued_ns = start_ns.copy()
    if is_scatter.sum() == len(ready_ns):
        issued_ns[is_scatter] = np.minimum(np.sort(ready_ns), start_ns[is_scatter])
    busy_until_ns = np.append(
        [progress.start_ns - 2 * _SOON_NS], np.maximum.accumulate(end_ns)[:-1]
    )
    is_queued = start_ns <= busy_until_ns + _SOON_NS
    begun, over = progress.at(issued_ns), progress.at(end_ns)
    passed = int(progress.at(np.array([passed_ns]))[0])
    begins_layer = is_scatter | (is_gather & ~is_queued) | (is_gather & (waited_for >= 0))
    layers = np.unique(np.where(is_gather & (waited_for >= 0), waited_for, begun)[begins_layer])
    amidst = progress.is_amidst(start_ns)
    sources = _sources(start_ns, end_ns, rows.op)
    events: list[tuple[int, int, int, int]] = []  # the computing done, the order there, the place
    moments: list[int] = []
    latest = needed = ready = 0  # of the collectives so far, and of the gathers among them
    for place in range(len(rows)):
        moment, turn = int(begun[place]), _BEFORE
        need = int(waited_for[place])
        if is_gather[place]:
            if is_queued[place]:  # since the layer before began, and behind those that went before
                earlier = layers[layers < moment] if amidst[place] else layers[layers <= moment]
                moment = min(moment, max(latest, int(earlier[-1]) if len(earlier) else 0))
            moment = ready = max(moment, ready)
            if need < 0:
                least = max(int(over[place]), needed + 1)
                following = int(np.searchsorted(layers, least))
                need = int(layers[following]) if following < len(layers) else least
            need = needed = max(need, moment, needed)
            turn = _AFTER if need > moment else _BEFORE
        else:
            if place in sources:
                moment = moments[sources[place]]
            need = max(need, moment) if need >= 0 else passed if moment <= passed else -1
        moments.append(moment)
        latest = max(latest, moment)
        events.append((moment, turn, len(events), place))
        if need >= 0:
            events.append((need, _NEEDED, len(events), place))
    return [(moment, turn, place) for moment, turn, _, place in sorted(events)]


def _untold_slowing(run: Run) -> float:
    compared = [share for _, share in run.facts.kernels_compared_share or ((0, 1.0),)]
    return (1 - float(np.median(compared))) * (1 - 1 / MOST_SLOWED)


def stages_of(
    run: Run,
    rows: Collectives,
    buckets: Collectives,
    first: int,
    steps_ns: Mapping[int, tuple[int, int, int, int]],
) -> Stages | None:
    """Return the courses of the ranks that make a pipeline with the first one, or None.

    - `rows`: the collectives of a step of all ranks, but for the buckets of gradients. The times of
      the first rank's are given.
    - `steps_ns`: when the step of each rank began and ended, and its backward pass did.
    """
    matched = matched_rows(rows)
    ranks = _of_one_pipeline(rows, matched, first)
    if len(ranks) < 2 or not set(ranks) <= set(steps_ns):
        return None
    kinds = _places_of_kinds(rows, first)
    of_rank: list[list[tuple[int, int, int]]] = []  # own time, turn, message
    own_ns, passes_ns, ready_ns = [], [], []
    for rank in ranks:
        mine = np.flatnonzero(rows.rank == rank)
        waits = buckets.rows(buckets.rank == rank)
        events, moments = _events_of_rank(run, rows.rows(mine), waits, steps_ns[rank])
        of_rank.append([(at, turn, int(matched[mine[row]])) for at, turn, row in events])
        own_ns.append(moments[0])
        passes_ns.append(moments[1:3])
        ready_ns.append(moments[3:])
    ordered = _in_order(of_rank)
    if ordered is None:
        return None
    most_ns = max(own_ns)
    line: dict[tuple[int, str], int] = {}
    messages: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())] * (int(matched.max()) + 1)
    of_all = np.flatnonzero(np.isin(rows.rank, ranks))
    for row in of_all.tolist():
        own = line.setdefault((int(rows.rank[row]), str(rows.group[row])), len(line))
        place, times = kinds(row)
        messages[matched[row]] = (place, times, (*messages[matched[row]][2], own))
    return Stages(
        events=tuple((rank, at / most_ns, message, turn) for rank, at, message, turn in ordered),
        messages=tuple(messages),
        over=tuple(own / most_ns for own in own_ns),
        own_ns=most_ns,
        passes=tuple((begin / most_ns, end / most_ns) for begin, end in passes_ns),
        ready=tuple(tuple(each_ns / most_ns for each_ns in of_rank) for of_rank in ready_ns),
        rows=rows.rows(of_all),
        of_row=tuple(matched[of_all].tolist()),
        untold_slowing=_untold_slowing(run),
        are_a_ring=not are_between_stages(rows).any(),
    )


def matched_rows(rows: Collectives) -> Whole:
    """Return the number of the collective that each row is one rank's part of.

    A trace without sequences is numbered by operation. A transfer has a sender and a receiver. The
    numbers are in the order of groups, then of operations, and then of sequences.
    """
    ops = np.where(np.isin(rows.op, _TRANSFERS), "transfer", rows.op).astype(str)
    group, kind = (
        np.unique(names, return_inverse=True)[1].reshape(-1)
        for names in (rows.group.astype(str), ops)
    )
    order = np.lexsort((rows.sequence, kind, group))
    keys = np.stack([group, kind, rows.sequence])[:, order]
    number = np.zeros(len(rows), np.int64)
    number[order[1:]] = np.cumsum((keys[:, 1:] != keys[:, :-1]).any(axis=0))
    return number


def _of_one_pipeline(rows: Collectives, matched: Whole, first: int) -> list[int]:
    """Return the ranks that transfers join to the first one, directly or by others."""
    is_transfer = np.isin(rows.op, _TRANSFERS)
    ranks = {first}
    while True:
        mine = matched[is_transfer & np.isin(rows.rank, list(ranks))]
        more = set(rows.rank[is_transfer & np.isin(matched, mine)].tolist()) | ranks
        if more == ranks:
            return sorted(ranks)
        ranks = more


def _places_of_kinds(rows: Collectives, first: int) -> Callable[[int], tuple[int, float]]:
    """Return for a row the place of the first rank's most alike, and how many times as long."""
    given = rows.rows(rows.rank == first)
    sent = np.array(["send" if op in _TRANSFERS else op for op in given.op], object)
    known: dict[tuple[str, str, int], tuple[int, float]] = {}

    def place_of(row: int) -> tuple[int, float]:
        op = "send" if rows.op[row] in _TRANSFERS else str(rows.op[row])
        key = op, str(rows.group[row]), int(rows.bytes[row])
        if key not in known:
            off = np.abs(given.bytes - key[2]) + (sent != op) * 2.0**52 + (given.group != key[1])
            place = int(np.argmin(off))
            known[key] = place, key[2] / max(int(given.bytes[place]), 1)
        return known[key]

    return place_of


def _events_of_rank(
    run: Run, rows: Collectives, buckets: Collectives, step_ns: tuple[int, int, int, int]
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Return a rank's events, each with its own time, turn and row, and its own time in the step.

    The latter is that of the whole step, those before and up to the end of its last pass, and those
    up to each gradient.

    It waits for buckets too, but only their own replay tells how long.
    """
    spans = _of_step(run.spans, rows)
    computing = spans.rows(spans.lane == "compute")
    start_ns = np.append(rows.issue_ns, buckets.issue_ns)
    end_ns = np.append(rows.end_ns, buckets.end_ns)
    is_awaited = np.isin(rows.op, ("recv", "allgather"))
    is_awaited = np.append(is_awaited, np.zeros(len(buckets), bool))
    progress, waited_for = _progress(start_ns, end_ns, is_awaited, computing, step_ns[0])
    begun, over = progress.at(rows.issue_ns), progress.at(rows.end_ns)
    # One that was hidden is needed where the next work begins: there the rank comes to another one.
    moments = np.append(np.unique(begun), [2**62])
    following = moments[np.searchsorted(moments, over)]
    needed = np.where(following < 2**62, following, over)
    needed[rows.op == "send"] = -1
    needed = np.where(waited_for[: len(rows)] >= 0, waited_for[: len(rows)], needed)
    # A queued transfer is made when the work before it is over.
    queued = spans.rows((spans.lane == "host") & (spans.name == QUEUED))
    made_ns = dict(zip(queued.end_ns.tolist(), queued.start_ns.tolist(), strict=True))
    come_ns = [made_ns.get(at, at) for at in rows.issue_ns.tolist()]
    come = np.where(rows.op == "send", progress.at(np.array(come_ns, np.int64)), begun)
    is_waited, turns = _waited_for_by_others(rows, begun, over)
    needed[is_waited] = over[is_waited]
    is_shard = np.isin(rows.op, ("allgather", "reducescatter"))
    last = len(rows)
    events = [
        (int(come[row]), turns[row], _COME, row) for row in np.flatnonzero(~is_shard).tolist()
    ]
    for row in np.flatnonzero((needed >= 0) & ~is_shard).tolist():
        turn = turns[row] if is_waited[row] else last
        events.append((max(int(needed[row]), int(come[row])), turn, _NEEDED, row))
    if is_shard.any():
        own = np.flatnonzero(is_shard)[np.lexsort((rows.end_ns[is_shard], rows.issue_ns[is_shard]))]
        shards = rows.rows(own)
        events += [
            (at, last if turn != _BEFORE else turns[own[place]], turn, int(own[place]))
            for at, turn, place in _events_of_shards(
                run, shards, progress, waited_for[own], step_ns[3]
            )
        ]
    # A rank comes to all that it can before it waits, in the order of its device.
    events.sort(key=lambda event: event[:3])
    ordered = [(at, _NEEDED if turn == _NEEDED else _COME, row) for at, _, turn, row in events]
    ready_ns = _of_step(run.gradients, rows).ready_ns
    return ordered, progress.at(np.append(step_ns[1:], ready_ns)).tolist()


def _waited_for_by_others(
    rows: Collectives, begun: Whole, over: Whole
) -> tuple[NDArray[np.bool_], list[int]]:
    """Return those that a rank waits for before it comes to another collective, and the turns.

    Nothing is computed from the beginning of such a one until another collective begins, as soon as
    the first has ended. A stage sends the sum of its last layer so. The other has a later turn at
    the same own time. If it was queued on its own line, it tells nothing.
    """
    is_waited, turns, turn = np.zeros(len(rows), bool), [0] * len(rows), 0
    before, on_line = -1, dict[str, int]()
    for row in np.argsort(rows.issue_ns, kind="stable").tolist():
        at_ns, line = int(rows.issue_ns[row]), str(rows.group[row])
        if before >= 0 and at_ns > on_line.get(line, -1) + _SOON_NS:
            is_idle = begun[before] == over[before] == begun[row]
            is_waited[before] = is_idle and 0 <= at_ns - rows.end_ns[before] <= _SOON_NS
            turn += int(is_waited[before])
        turns[row], before, on_line[line] = turn, row, int(rows.end_ns[row])
    return is_waited, turns


def _in_order(
    of_rank: Sequence[Sequence[tuple[int, int, int]]],
) -> list[tuple[int, int, int, int]] | None:
    """Put the events of all ranks in one order; None where ranks wait for each other forever."""
    left = Counter(message for events in of_rank for _, turn, message in events if turn == _COME)
    place, ordered = [0] * len(of_rank), list[tuple[int, int, int, int]]()
    count = sum(map(len, of_rank))
    while len(ordered) < count:
        before = len(ordered)
        for rank, events in enumerate(of_rank):
            while place[rank] < len(events):
                at, turn, message = events[place[rank]]
                if turn == _NEEDED and left[message]:
                    break
                if turn == _COME:
                    left[message] -= 1
                    turn = _COME if left[message] else _LAST
                ordered.append((rank, at, message, turn))
                place[rank] += 1
        if len(ordered) == before:
            return None
    return ordered


def _sources(start_ns: Whole, end_ns: Whole, op: Text) -> dict[int, int]:
    """Return for each sum the scatter whose shard it adds up, where each scatter has such a sum."""
    sums, scatters = np.flatnonzero(op == "allreduce"), np.flatnonzero(op == "reducescatter")
    if len(sums) != len(scatters) or (start_ns[sums] < end_ns[scatters]).any():
        return {}
    return dict(zip(sums.tolist(), scatters.tolist(), strict=True))


def _progress(
    start_ns: Whole, end_ns: Whole, is_gather: NDArray[np.bool_], computing: Spans, began_ns: int
) -> tuple[_Progress, Whole]:
    """Return the progress of a step, and where in it computing waited for each collective, or -1.

    Computing waits for the gather that ends as it goes on, or else for the last collective. Where
    a gather ends in a rest of the device, the rest has another reason: it is no wait, and does not
    tell that the gather is needed there.
    """
    exposed_ns = without(
        union(start_ns, end_ns), union(computing.start_ns, computing.end_ns, _SOON_NS // 4)
    )
    waited_for = np.full(len(start_ns), -1)
    by_end = np.argsort(end_ns, kind="stable")
    ends_ns = end_ns[by_end]
    first = np.searchsorted(ends_ns, exposed_ns[0], side="right")
    last = np.searchsorted(ends_ns, exposed_ns[1] + _SOON_NS, side="right")
    chosen = np.flatnonzero(last > first)
    places = by_end[last[chosen] - 1]
    for row, wait in enumerate(chosen.tolist()):
        soon = by_end[first[wait] : last[wait]]
        soon = soon[is_gather[soon] & (end_ns[soon] >= exposed_ns[1][wait] - _SOON_NS)]
        places[row] = soon[-1] if len(soon) else places[row]
    ended_ns = np.minimum(end_ns[places], exposed_ns[1][chosen])
    begins_ns = np.append(np.sort(computing.start_ns), 2**62)
    begins_ns = begins_ns[np.searchsorted(begins_ns, ended_ns)]
    rests = (ended_ns + _SOON_NS < begins_ns) & (begins_ns < 2**62)
    is_needed = ~(is_gather[places] & rests)
    until_ns = np.where(is_needed, exposed_ns[1][chosen], ended_ns)
    progress = _Progress(began_ns, (exposed_ns[0][chosen], until_ns))
    waited_for[places[is_needed]] = progress.at(exposed_ns[0][chosen])[is_needed]
    return progress, waited_for
