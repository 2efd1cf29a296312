"""Predicted steps of devices as runs hold them: computing, the waits in it, and the messages.

They are written as a trace shows them, so they are predicted again as the trace is. One rank stands
for all where a model is sharded. It does not tell when the stages of a pipeline wait for each
other, so the step of each stage is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.run.facts import Facts
from fullwire.run.kinds import LAST, LAYERS, QUEUED
from fullwire.run.process_groups import listed_name
from fullwire.run.run import SLOWED, Collectives, Gradients, Lane, Run, Spans, Whole
from fullwire.simulation.beside_layers import Course, Stages
from fullwire.simulation.groups import members_of, ranks_among
from fullwire.simulation.schedule import Timeline
from fullwire.simulation.step import Step

_MOST_DOUBLED = 2.0**20  # messages that nobody waits for lengthen no step
_MOST_TRIALS, _EXACT = 12, 1e-6  # to meet a target, and how near to it they come


def meeting(value: Callable[[float], float], target: float, most: float) -> float:
    """Return where a value that rises from 0 to `most` meets the target, or the nearer end.

    Each trial is where the line through the nearest two meets it. A side that stays counts half
    (Illinois), so few trials do for a value that rises nearly evenly.
    """
    low, high, below, above = 0.0, most, value(0.0) - target, value(most) - target
    if below >= 0 or above <= 0:
        return low if below >= 0 else high
    tried, last_off = low, 0.0
    for _ in range(_MOST_TRIALS):
        tried = low - below * (high - low) / (above - below)
        off = value(tried) - target
        if abs(off) < _EXACT * target:
            break
        stays = 0.5 if off * last_off > 0 else 1.0
        if off > 0:
            high, above, below = tried, off, stays * below
        else:
            low, below, above = tried, off, stays * above
        last_off = off
    return tried


def with_shards(
    step: Step, course: Course, each_s: Floats, stalled_s: float
) -> tuple[Step, Timeline, list[tuple[int, int]]]:
    """Return a step of shards with the waits for them, its collectives, and its computing.

    Collectives are as much shorter as the step is than they explain. The computing goes on after
    the passes where it waits there again, as for the parameters that an optimizer has changed.
    """
    rest_s = step.others.rest_ns * 1e-9
    own_s = (step.step_ns + step.waiting_ns) * 1e-9 + rest_s
    each_s = each_s * meeting(
        lambda times: float(course.stalled_s([*(times * each_s)], own_s)), stalled_s - rest_s, 1.0
    )
    played = course.played([*each_s], own_s)
    passes_ns = step.forward_ns + step.backward_ns
    waits_ns = [(round(float(at) * 1e9), round(float(wait) * 1e9)) for at, wait in played.waits_s]
    waits_ns = [(at_ns, wait_ns) for at_ns, wait_ns in waits_ns if wait_ns]
    goes_on = any(at_ns > passes_ns for at_ns, _ in waits_ns) and step.step_ns > passes_ns
    over_ns = step.step_ns if goes_on else passes_ns
    waits_ns = [each for each in waits_ns if goes_on or each[0] < passes_ns]
    within_ns = sum(wait_ns for at_ns, wait_ns in waits_ns if at_ns < passes_ns)
    edges_ns, before_ns = [0], 0
    for at_ns, wait_ns in waits_ns:
        edges_ns += [at_ns + before_ns, at_ns + before_ns + wait_ns]
        before_ns += wait_ns
    edges_ns.append(over_ns + before_ns)
    begin_ns = step.forward_ns + sum(wait for at, wait in waits_ns if at <= step.forward_ns)
    scatters = [place for place, op in enumerate(step.others.op) if op == "reducescatter"]
    come_ns = [round(float(played.come_s[place]) * 1e9) for place in scatters]
    ready_ns = np.sort(np.array(come_ns, np.int64)) - begin_ns
    waiting = replace(
        step,
        step_ns=step.step_ns + before_ns,
        forward_ns=begin_ns,
        backward_ns=passes_ns + within_ns - begin_ns,
        ready_ns=ready_ns if len(ready_ns) == len(step.ready_ns) else step.ready_ns,
    )
    ends_s = [played.end_s[place] - begin_ns * 1e-9 for place in range(len(each_s))]
    starts_s = [end_s - long_s for end_s, long_s in zip(ends_s, each_s, strict=True)]
    layers = [(first, last) for first, last in zip(edges_ns[::2], edges_ns[1::2], strict=True)]
    return waiting, Timeline(start_s=starts_s, end_s=ends_s), layers


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Lasting:
    """How long the parts of a predicted step take."""

    step_s: float
    own_s: float  # of the slowest rank: computing, with contention and recorded lateness
    slowed_s: float  # of it: contention
    late_s: float  # in which all ranks wait for late ones, without the recorded lateness
    rest_s: float  # in which devices rest for another reason than messages
    each_s: Floats  # of the collectives that are no buckets

    def played(
        self, course: Stages, for_buckets_s: float
    ) -> tuple[list[_Rank], Collectives, Whole]:
        """Play the messages. Return the ranks, their parts of messages, and when each was made."""
        own_s, each_s = self.own_s, self.each_s
        stalled_s = self.step_s - own_s - self.late_s - self.rest_s - for_buckets_s

        def stalled_with(times: float) -> float:
            return float(course.stalled_s([*(times * self.each_s)], own_s))

        most = 1.0  # times as long as they are predicted
        while most < _MOST_DOUBLED and stalled_with(most) < stalled_s:
            most *= 2
        if most < _MOST_DOUBLED:
            each_s = self.each_s * meeting(stalled_with, stalled_s, most)
        played = course.played([*each_s], own_s)
        numbers = np.unique(course.rows.rank).tolist()
        ranks = [
            _Rank(
                number,
                own_s,
                course.over[place],
                course.passes[place],
                course.ready[place],
                [(at, float(wait_s)) for at, wait_s in played.waits_s[place]],
                for_buckets_s,
            )
            for place, number in enumerate(numbers)
        ]
        after_s = {
            (place, message): ranks[place].waited_for_buckets_s(share)
            for place, share, message, _ in course.events
        }
        late_s: dict[int, float] = {}  # by the message, as its last rank waits for buckets
        for (_, message), wait_s in after_s.items():
            late_s[message] = max(wait_s, late_s.get(message, 0.0))
        of_row = [*zip(map(numbers.index, course.rows.rank.tolist()), course.of_row, strict=True)]
        made_ns = np.array(
            [_ns(float(played.come_s[key]) + after_s[key]) for key in of_row], np.int64
        )
        end_ns = np.array([_ns(float(played.end_s[m]) + late_s[m]) for _, m in of_row], np.int64)
        # A rank's line to a group carries one message after another.
        begin_ns, free_ns = made_ns.copy(), dict[tuple[int, str], int]()
        for row in np.argsort(end_ns, kind="stable").tolist():
            line = of_row[row][0], str(course.rows.group[row])
            begin_ns[row] = min(max(int(made_ns[row]), free_ns.get(line, 0)), int(end_ns[row]))
            free_ns[line] = int(end_ns[row])
        rows = replace(
            course.rows,
            step=np.zeros(len(of_row), np.int64),
            sequence=np.array(course.of_row, np.int64),
            group=np.array([listed_name(name) for name in course.rows.group.tolist()], object),
            issue_ns=begin_ns,
            start_ns=begin_ns,
            end_ns=end_ns,
        )
        return ranks, rows, made_ns


@dataclass(frozen=True, eq=False, slots=True)
class _Rank:
    """When a rank computes in the step: its own time, its waits, and those for its buckets."""

    number: int
    own_s: float  # that all shares are of
    over: float  # the share that its step takes
    last_pass: tuple[float, float]  # the shares at which its last pass begins and ends
    ready: tuple[float, ...]  # the shares after which its gradients are ready
    waits: Sequence[tuple[float, float]]  # after which share, and how long
    for_buckets_s: float  # after its last pass

    @property
    def begun_ns(self) -> int:
        """Return when its last pass begins: after the wait for its inputs."""
        share = self.last_pass[0]
        return _ns(share * self.own_s + sum(wait_s for at, wait_s in self.waits if at <= share))

    @property
    def goes_on_ns(self) -> int:
        """Return when it goes on after its last pass, buckets aside: after the waits there."""
        share = self.last_pass[1]
        return _ns(share * self.own_s + sum(wait_s for at, wait_s in self.waits if at <= share))

    @property
    def passed_ns(self) -> int:
        """Return when its last pass ends: before the waits there."""
        share = self.last_pass[1]
        return _ns(share * self.own_s + sum(wait_s for at, wait_s in self.waits if at < share))

    def ready_ns(self, written: Whole, until_ns: int) -> Whole:
        """Return when its gradients are ready: in the pass, after their layers and all waits there.

        If it was recorded with another number of them, they keep their distance to the pass's end.
        """
        if len(self.ready) != len(written):
            return np.maximum(written + self.passed_ns - until_ns, 0)
        waits_s = (sum(wait_s for at, wait_s in self.waits if at <= share) for share in self.ready)
        moments_s = (s * self.own_s + wait_s for s, wait_s in zip(self.ready, waits_s, strict=True))
        return np.sort(np.minimum(np.array([*map(_ns, moments_s)], np.int64), self.passed_ns))

    def waited_for_buckets_s(self, share: float) -> float:
        """Return how long it has waited for its buckets when so much is over."""
        return self.for_buckets_s if share > self.last_pass[1] else 0.0

    def computing_ns(self) -> Iterator[tuple[int, int]]:
        """Go through its computing, from one wait to the next."""
        begin_s = share = 0.0
        edges = [*self.waits, (self.last_pass[1], self.for_buckets_s), (self.over, 0.0)]
        for at, wait_s in sorted(edges):
            if not wait_s and at < self.over:
                continue
            end_s = begin_s + (at - share) * self.own_s
            if _ns(end_s) > _ns(begin_s):
                yield _ns(begin_s), _ns(end_s)
            begin_s, share = end_s + wait_s, at

    def spans(self, lasting: Lasting, mine: Collectives, made_ns: Whole) -> Spans:
        """Lay out its step: its computing, its last pass, and the bubble and wait at its end."""
        step_ns = _ns(lasting.step_s)
        computing = [*self.computing_ns()]
        rows: list[tuple[Lane, str, int, int]] = [("host", "step", 0, step_ns)]
        rows.append(("host", LAST, self.begun_ns, self.passed_ns))
        rows += [("compute", LAYERS, *ends) for ends in computing]
        left_ns = _ns(lasting.slowed_s * self.over)
        for begin_ns, end_ns in reversed(computing):
            if (slowed_ns := min(left_ns, end_ns - begin_ns)) > 0:
                rows.append(("compute", SLOWED, end_ns - slowed_ns, end_ns))
                left_ns -= slowed_ns
        queued = (mine.op == "send") & (made_ns < mine.issue_ns)
        for begin_ns, end_ns in zip(made_ns[queued], mine.issue_ns[queued], strict=True):
            rows.append(("host", QUEUED, int(begin_ns), int(end_ns)))
        over_ns = max([0, *mine.end_ns.tolist(), *(end_ns for _, end_ns in computing)])
        late_ns = step_ns - min(_ns(lasting.late_s), max(step_ns - over_ns, 0))
        if over_ns < late_ns:
            rows.append(("host", "bubble", over_ns, late_ns))
        if late_ns < step_ns:
            rows.append(("host", "wait", late_ns, step_ns))
        lanes, names, starts, ends = zip(*rows, strict=True)
        return Spans(
            rank=np.full(len(rows), self.number),
            step=np.zeros(len(rows), np.int64),
            lane=np.array(lanes, object),
            name=np.array(names, object),
            start_ns=np.array(starts),
            end_ns=np.array(ends),
        )


def in_stages(written: Run, step: Step, course: Stages, lasting: Lasting, recorded: Run) -> Run:
    """Return a written step with all ranks of its pipeline in place of the one that it has.

    Its messages are as much shorter or longer as the step is than they explain. Groups have as many
    ranks as they were recorded with, or as the workers of the prediction make them.
    """
    buckets = Collectives.empty() if step.sends_no_buckets else written.collectives
    until_ns = step.forward_ns + step.backward_ns
    for_buckets_s = max(int(buckets.end_ns.max(initial=0)) - until_ns, 0) * 1e-9
    ranks, sent, made_ns = lasting.played(course, for_buckets_s)
    spans, gradients, of_buckets = [], [], []
    for rank in ranks:
        mine = sent.rank == rank.number
        spans.append(rank.spans(lasting, sent.rows(mine), made_ns[mine]))
        ready_ns = rank.ready_ns(written.gradients.ready_ns, until_ns)
        # Buckets keep their distance to the waits after the pass, but begin with their gradients.
        off_ns = rank.goes_on_ns - until_ns
        last = np.searchsorted(written.gradients.ready_ns, buckets.issue_ns, side="right") - 1
        end_ns = buckets.end_ns + off_ns
        issue_ns = np.minimum(ready_ns[np.maximum(last, 0)] if len(ready_ns) else end_ns, end_ns)
        scattered = mine & (sent.op == "reducescatter")
        if step.others.sum_gradients and scattered.sum() == len(ready_ns):
            ready_ns = np.sort(sent.issue_ns[scattered])
        number = np.full(len(ready_ns), rank.number)
        gradients.append(replace(written.gradients, rank=number, ready_ns=ready_ns))
        of_buckets.append(
            replace(
                buckets,
                rank=np.full(len(buckets), rank.number),
                group=np.full(len(buckets), f"gradients {rank.number}", object),
                issue_ns=issue_ns,
                start_ns=np.clip(buckets.start_ns + off_ns, issue_ns, end_ns),
                end_ns=end_ns,
            )
        )
    workers, before = written.facts.workers or 1, recorded.facts.workers or 1
    members = members_of(recorded)
    of_all = {name for name, size in members.items() if size == before}
    for name, message in zip(course.rows.group.tolist(), course.of_row, strict=True):
        among = step.others.members[course.messages[message][0]]
        if among < 0 and members[name] == ranks_among(among, before):
            members[name] = ranks_among(among, workers)
    some = [name for name in members if name not in of_all and ">" not in name]  # no transfers
    sizes = {listed_name(name): members[name] for name in some}
    if len(buckets):
        summing = workers // step.shards
        sizes |= {f"gradients {rank.number}": summing for rank in ranks}
    groups = ", ".join(f"{name} {size}" for name, size in sorted(sizes.items()))
    return replace(
        written,
        facts=written.facts | Facts(groups=groups or None),
        spans=Spans.joined(spans),
        gradients=Gradients.joined(gradients),
        collectives=Collectives.joined([sent, *of_buckets]),
    )


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)
