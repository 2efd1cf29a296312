"""Jobs played by rules of their own: each rank follows a program, and collectives share its link.

Collectives of a group go one after another. Those of several groups that a rank is in share its
link evenly. Of a gather that is late, the rank that came first has its data sooner. So predictions
are judged by a truth that they have no part in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from fullwire.collectives.closed_form import half_a_part, sent_as
from fullwire.run.facts import FactValue, named
from fullwire.run.run import Collectives, Gradients, Provenance, Run
from fullwire.simulation.transport import MeasuredTransport
from tests.jobs_by_hand import in_ns, spans_of
from tests.trained_jobs import a_transport, message_s

_NEVER = float("inf")


class Compute(NamedTuple):
    """Compute for so long, in the pass of this name."""

    name: str
    ms: float


class Call(NamedTuple):
    """Begin a collective, and wait for its end if it is awaited."""

    group: str
    members: tuple[int, ...]
    op: str
    size: int
    is_awaited: bool = True


class Ready(NamedTuple):
    """A gradient of so many bytes is ready."""

    size: int


class Wait(NamedTuple):
    """Wait for all collectives that were begun."""


Program: TypeAlias = Sequence[Compute | Call | Ready | Wait]
# The transport that a recording without clocks of processors is taken to have.
LIKE_GLOO = a_transport(
    share=0.997 * 0.956, processor_s_per_byte=1.0e-9, processor_s_per_hop=0.4e-3, apart=0.28
)


def played(
    program: Callable[[int], Program],
    workers: int,
    rate_bps: float,
    *,
    steps: int = 10,
    jitter: float = 0.02,
    transport: MeasuredTransport = LIKE_GLOO,
    facts: Mapping[str, FactValue] | None = None,
) -> Run:
    """Play the programs of the ranks, each on a machine of its own with a link of this rate."""
    player = _Player([program(rank) for rank in range(workers)], steps, jitter, transport)
    player.play(rate_bps)
    known: dict[str, FactValue] = {
        "workers": workers,
        "line_rate_bps": rate_bps,
        "payload_share": 0.956,
        "backend": "gloo",
        "machines": workers,
        "processors": 2,
    }
    return Run(
        provenance=Provenance(origin="measured", source=f"{workers} workers"),
        facts=named({**known, **(facts or {})}),
        spans=spans_of(player.spans),
        gradients=_gradients(player.gradients),
        collectives=_collectives(list(player.sent.values())),
    )


@dataclass(slots=True)
class _Sent:
    call: Call
    step: int
    number: int
    issued_ms: dict[int, float] = field(default_factory=dict)
    ops: dict[int, str] = field(default_factory=dict)  # of two ranks one sends, and one receives
    left_ms: float = _NEVER  # with the link alone, once all members have come
    late_ms: float = 0.0  # of it, when the rank that came first has its data
    end_ms: dict[int, float] = field(default_factory=dict)

    @property
    def next_ms(self) -> float:
        """Return how soon it is over for some rank."""
        return self.left_ms if self.end_ms else self.left_ms - self.late_ms

    def go_on(self, for_ms: float, now_ms: float) -> None:
        """Go on for so long with the link alone."""
        self.left_ms -= for_ms
        first = min(self.issued_ms, key=self.issued_ms.__getitem__)
        if self.late_ms and not self.end_ms and self.left_ms < self.late_ms + 1e-9:
            self.end_ms[first] = now_ms
        elif self.left_ms < 1e-9:
            self.left_ms = 0.0
            self.end_ms = dict.fromkeys(self.call.members, now_ms) | self.end_ms


@dataclass(slots=True)
class _Rank:
    left: list[tuple[int, Compute | Call | Ready | Wait | None]]  # with the step; None ends it
    until_ms: float = 0.0
    waits_for: set[tuple[str, int]] = field(default_factory=set)
    begun: set[tuple[str, int]] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    since_ms: float | None = None  # it waits for a call
    began_ms: float = 0.0
    passes: dict[str, list[float]] = field(default_factory=dict)
    orders: int = 0


class _Player:
    def __init__(
        self, programs: Sequence[Program], steps: int, jitter: float, transport: MeasuredTransport
    ) -> None:
        random = np.random.default_rng(3)
        self.transport, self.now_ms = transport, 0.0
        self.sent: dict[tuple[str, int], _Sent] = {}
        self.spans: list[tuple[int, int, str, str, float, float]] = []
        self.gradients: list[tuple[int, int, int, int, float]] = []
        self.ranks = []
        for program in programs:
            left: list[tuple[int, Compute | Call | Ready | Wait | None]] = []
            for step in range(steps):
                for one in program:
                    if isinstance(one, Compute):
                        one = one._replace(ms=one.ms * random.uniform(1 - jitter, 1 + jitter))
                    left.append((step, one))
                left.append((step, None))
            self.ranks.append(_Rank(left[::-1]))

    def play(self, rate_bps: float) -> None:
        while True:
            for number, rank in enumerate(self.ranks):
                self._go_on(number, rank)
            under_way = self._under_way(rate_bps)
            ends_ms = [self.now_ms + one.next_ms * shares for one, shares in under_way]
            ends_ms += [each.until_ms for each in self.ranks if each.left and not each.waits_for]
            if not ends_ms:
                return
            passed_ms = min(ends_ms) - self.now_ms
            self.now_ms += passed_ms
            for one, shares in under_way:
                one.go_on(passed_ms / shares, self.now_ms)

    def _under_way(self, rate_bps: float) -> list[tuple[_Sent, int]]:
        """Return the collectives on the links, with how many share the busiest link of each."""
        first = {key[0]: one for key, one in reversed(self.sent.items()) if one.left_ms > 0}
        going = [one for one in first.values() if len(one.issued_ms) == len(one.call.members)]
        for one in going:
            if one.left_ms == _NEVER:
                among, size = len(one.call.members), one.call.size
                op = one.call.op
                op = "broadcast" if op in ("send", "recv") else sent_as(op, "gloo")
                alone_s = message_s(self.transport, among, rate_bps, size, crowd_of=1, op=op)
                one.left_ms = 1e3 * alone_s
                late = self.transport.gathers_late * half_a_part(op, among)
                one.late_ms = one.left_ms * late / (1 + late)
        load = np.zeros(len(self.ranks), int)
        for one in going:
            load[list(one.call.members)] += 1
        return [(one, int(load[list(one.call.members)].max())) for one in going]

    def _go_on(self, number: int, rank: _Rank) -> None:
        """Let a rank go on until it computes or waits."""
        while rank.left and rank.until_ms <= self.now_ms + 1e-9:
            rank.waits_for = {key for key in rank.waits_for if number not in self.sent[key].end_ms}
            if rank.waits_for:
                return
            step, what = rank.left.pop()
            if rank.since_ms is not None:
                waited = rank.since_ms, self.now_ms
                self.spans.append((number, step, "communication", "wait", *waited))
                rank.since_ms = None
            if isinstance(what, Compute):
                rank.passes.setdefault(what.name, [self.now_ms, 0.0])
                rank.until_ms = rank.passes[what.name][1] = self.now_ms + what.ms
            elif isinstance(what, Call):
                key = what.group, rank.counts.get(what.group, 0)
                rank.counts[what.group] = key[1] + 1
                one = self.sent.setdefault(key, _Sent(what, step, key[1]))
                one.issued_ms[number], one.ops[number] = self.now_ms, what.op
                rank.begun.add(key)
                if what.is_awaited:
                    rank.waits_for, rank.since_ms = {key}, self.now_ms
            elif isinstance(what, Ready):
                self.gradients.append((number, step, rank.orders, what.size, self.now_ms))
                rank.orders += 1
            elif isinstance(what, Wait):
                rank.waits_for, rank.begun = rank.begun, set()
            else:
                self._end(number, rank, step)

    def _end(self, number: int, rank: _Rank, step: int) -> None:
        self.spans.append((number, step, "host", "step", rank.began_ms, self.now_ms))
        for name, (began_ms, ended_ms) in rank.passes.items():
            self.spans.append((number, step, "compute", name, began_ms, ended_ms))
        rank.began_ms, rank.passes, rank.orders = self.now_ms, {}, 0


def _gradients(rows: Sequence[tuple[int, int, int, int, float]]) -> Gradients:
    rank, step, order, size, ready_ms = zip(*rows, strict=True)
    return Gradients(
        rank=np.array(rank),
        step=np.array(step),
        order=np.array(order),
        bytes=np.array(size),
        ready_ns=in_ns(ready_ms),
    )


def _collectives(sent: Sequence[_Sent]) -> Collectives:
    rows = [(rank, at_ms, one) for one in sent for rank, at_ms in one.issued_ms.items()]
    issue_ns = in_ns([at_ms for _, at_ms, _ in rows])
    words = {
        "group": [one.call.group for *_, one in rows],
        "op": [one.ops[rank] for rank, _, one in rows],
        "dtype": ["float32"] * len(rows),
    }
    return Collectives(
        rank=np.array([rank for rank, *_ in rows]),
        step=np.array([one.step for *_, one in rows]),
        sequence=np.array([one.number for *_, one in rows]),
        bytes=np.array([one.call.size for *_, one in rows]),
        issue_ns=issue_ns,
        start_ns=issue_ns,
        end_ns=in_ns([one.end_ms[rank] for rank, _, one in rows]),
        **{name: np.array(values, object) for name, values in words.items()},
    )
