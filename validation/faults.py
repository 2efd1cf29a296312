"""The transport while a rank is killed, paused, slowed or cut off: how do the other ranks end?

    python -m validation.faults [--rounds 1000] [--seed 0] [--only NUMBER] [--journal FILE]

Three hosts of a lab have a rank each, and a fourth holds torch's store. In each round the ranks
make a group, reduce, and end it. The sums travel as float32 or in a wire format, in clear or
encrypted. Meanwhile one rank is hit by a fault: at the start, in a
collective, when it connects once more, or at the end. A round passes if

- every other rank ends in time,
- all sums are right, to the bit (in int8 to 1 %),
- each error of another rank names the rank that was hit, and
- the rank that was hit ends too, once it may go on.

The number of a round and the seed decide what it does, so `--only` plays one again. `--journal`
keeps a line for each round, and goes on from there if it is interrupted.
"""

from __future__ import annotations

import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from fullwire.lab.description import describe
from fullwire.lab.faults import Fault
from fullwire.lab.lab import Lab
from fullwire.lab.session import rank_environment
from tests.rank_processes import RankProcesses, Silent
from validation import results
from validation.arguments import parser

RANKS = 3
FAULTS = ("kill", "pause", "slow", "cut")
MOMENTS = ("start", "collective", "reconnect", "end")
WIRES = ("float32", "bf16", "int8", "bf16 encrypted")
_PORT = 29_400
_TIMEOUT_S = 2.0
_ROOM_S = 15.0  # a shared machine may stand still for a while
_LONG_S = _TIMEOUT_S + 1.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What happens in a round."""

    number: int
    fault: str
    moment: str
    victim: int
    after_s: float  # after the victim has reached the moment
    lasts_s: float  # until it may go on; a killed rank never does
    rate_bps: float  # of a slow link
    count: int  # elements of a sum
    lasting_s: float  # of reducing
    wire: str  # how sums of 64 KiB and more travel


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the ranks of a round."""

    plan: Plan
    hangs: int = 0
    wrong: int = 0
    unnamed: int = 0  # errors of other ranks that do not name the rank that was hit
    named: int = 0
    unharmed: int = 0  # ranks that ended without an error
    said: list[str] = []


def plan_of(number: int, seed: int) -> Plan:
    """Decide what happens in a round; all faults, moments and wire formats take turns."""
    turns = list(product(FAULTS, MOMENTS))
    fault, moment = turns[number % len(turns)]
    chance = random.Random(f"{seed} {number}")
    return Plan(
        number=number,
        fault=fault,
        moment=moment,
        victim=chance.randrange(RANKS),
        after_s=chance.choice((0.0, chance.uniform(0, 0.003), chance.uniform(0, 0.1))),
        lasts_s=chance.choice((chance.uniform(0.05, 0.5), _LONG_S)),
        rate_bps=chance.choice((1e6, 20e6)),
        count=chance.choice((1, 1000, 100_000)),
        lasting_s=chance.choice((0.0, 0.1, 0.3)) if moment == "end" else chance.uniform(0.2, 1.0),
        wire=WIRES[number // len(turns) % len(WIRES)],
    )


class Hosts:
    """The hosts of the lab, each with a process that starts the rank of a round."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._hosts = RankProcesses(self._launch, "faulted", RANKS + 1, "fullwire")
        self._hosts.ask({"do": "hold", "port": _PORT}, [RANKS])

    def close(self) -> None:
        """Let the processes end."""
        self._hosts.close()

    def play(self, plan: Plan, name: str) -> Outcome:
        """Play a round and judge it."""
        victim = plan.victim
        others = [rank for rank in range(RANKS) if rank != victim]
        begin = {
            "do": "begin",
            "address": self._lab.addresses[RANKS],
            "port": _PORT,
            "name": name,
            "timeout_s": _TIMEOUT_S,
            "count": plan.count,
            "lasting_s": plan.lasting_s,
            "is_again": plan.moment == "reconnect",
            "wire": plan.wire,
        }
        number = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP}.get(plan.fault)
        hit = [plan.moment, plan.after_s, number] if number else None
        for rank in range(RANKS):
            self._hosts.ask({**begin, "hit": hit if rank == victim else None}, [rank])
        try:
            reached = {"do": "reached", "moment": plan.moment, "within_s": _ROOM_S}
            [is_there] = self._hosts.ask(reached, [victim], 2 * _ROOM_S)
            time.sleep(plan.after_s)
            with self._hit(plan):
                # A fault that lasts is over only after the others have ended because of it.
                is_lasting = plan.fault == "kill" or plan.lasts_s >= _LONG_S
                answers = self._results(others, _ROOM_S) if is_lasting else {}
                time.sleep(0 if is_lasting else plan.lasts_s)
            answers |= self._results([rank for rank in others if rank not in answers], _ROOM_S)
            until_s = time.monotonic() + _ROOM_S
            while plan.fault != "kill" and answers.get(victim) is None:
                # A rank that pauses itself may do so late.
                self._hosts.ask({"do": "signal", "number": signal.SIGCONT}, [victim])
                answers |= self._results([victim], 1.0)
                if time.monotonic() > until_s:
                    break
        finally:
            self._hosts.ask({"do": "end"}, range(RANKS))
        return judged(plan, answers, [] if is_there else ["the victim did not reach the moment"])

    def _results(self, ranks: Sequence[int], within_s: float) -> dict[int, Any]:
        asked = {"do": "result", "within_s": within_s}
        return dict(zip(ranks, self._hosts.ask(asked, ranks, 2 * within_s), strict=True))

    @contextmanager
    def _hit(self, plan: Plan) -> Iterator[None]:
        """Hit the victim's link, and let the victim go on afterwards."""
        if plan.fault in ("kill", "pause"):  # it signals itself
            yield
            self._hosts.ask({"do": "signal", "number": signal.SIGCONT}, [plan.victim])
            return
        rate_bps = plan.rate_bps if plan.fault == "slow" else None
        kind: Any = plan.fault
        self._lab.disturb(Fault(at_s=0, kind=kind, host=plan.victim, rate_bps=rate_bps))
        try:
            yield
        finally:
            self._lab.disturb(Fault(at_s=0, kind="restore", host=plan.victim))

    def _launch(self, rank: int, command: Any, environment: Any) -> None:
        self._lab.start(rank, command, {**rank_environment(self._lab, rank), **environment})


def judged(plan: Plan, answers: dict[int, Any], said: Sequence[str] = ()) -> Outcome:
    """Judge the last words of the ranks."""
    counted: Counter[str] = Counter()
    odd = list(said)
    for rank, answer in answers.items():
        if answer is None:
            kind = "hangs"
        elif answer["wrong"]:
            kind = "wrong"
        elif answer["error"] is None:
            kind = "unharmed"
        elif rank == plan.victim or re.search(rf"\brank {plan.victim}\b", answer["error"]):
            kind = "named"
        else:
            kind = "unnamed"
        counted[kind] += 1
        if kind in ("hangs", "wrong", "unnamed"):
            odd.append(f"rank {rank}: {kind}: {answer}")
    return Outcome(plan=plan, said=odd, **counted)


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Bring up the lab and its hosts."""
    with Lab(describe(workers=RANKS + 1, rate=["1Gbps"])) as lab:
        made = Hosts(lab)
        try:
            yield made
        finally:
            made.close()


def played(plans: Sequence[Plan]) -> Iterator[Outcome]:
    """Play rounds in turn; a host that does not answer ends the lab, and a new one begins."""
    left = list(plans)
    while left:
        with hosts() as lab:
            for attempt in range(len(left)):
                plan = left[0]
                try:
                    yield lab.play(plan, f"{plan.number}.{attempt}")
                except Silent as silent:
                    yield Outcome(plan=plan, hangs=1, said=[f"the host: {silent}"])
                    left.pop(0)
                    break
                left.pop(0)


def main() -> None:
    """Play the rounds; exit with an error if one did not pass."""
    taken = parser(__doc__)
    taken.add_argument("--rounds", type=int, default=1000)
    taken.add_argument("--seed", type=int, default=0)
    taken.add_argument("--only", type=int)
    taken.add_argument("--journal", type=Path)
    given = taken.parse_args()
    wanted = range(given.rounds) if given.only is None else [given.only]
    plans = [plan_of(number, given.seed) for number in wanted]
    lines = (
        given.journal.read_bytes().splitlines() if given.journal and given.journal.exists() else []
    )
    known = {
        outcome.plan: outcome
        for outcome in (msgspec.json.decode(line, type=Outcome) for line in lines)
    }
    outcomes = [known[plan] for plan in plans if plan in known]
    for outcome in played([plan for plan in plans if plan not in known]):
        outcomes.append(outcome)
        plan = outcome.plan
        print(f"{plan.number:>5} {plan.fault:<6} {plan.moment:<11} rank {plan.victim}: ", end="")
        print(
            "; ".join(outcome.said) or f"{outcome.named} named, {outcome.unharmed} unharmed",
            flush=True,
        )
        if given.journal:
            with given.journal.open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
    totals = {
        name: sum(getattr(each, name) for each in outcomes)
        for name in ("hangs", "wrong", "unnamed", "named", "unharmed")
    }
    summary = f"{len(outcomes)} rounds: " + ", ".join(
        f"{totals[name]} {name}" for name in ("hangs", "wrong", "unnamed")
    )
    print(summary)
    if given.only is None:
        by_wire: list[list[results.Cell]] = []
        for wire in WIRES:
            mine = [each for each in outcomes if each.plan.wire == wire]
            by_wire.append([wire, len(mine), *(sum(getattr(e, n) for e in mine) for n in totals)])
        columns = [
            "fault",
            "moment",
            "rounds",
            "hangs",
            "wrong sums",
            "errors that name no rank",
            "errors that name it",
            "ranks without an error",
        ]
        rows: list[list[results.Cell]] = []
        for fault, moment in product(FAULTS, MOMENTS):
            mine = [
                each for each in outcomes if (each.plan.fault, each.plan.moment) == (fault, moment)
            ]
            rows.append(
                [
                    fault,
                    moment,
                    len(mine),
                    *(sum(getattr(each, name) for each in mine) for name in totals),
                ]
            )
        results.write(
            "faults",
            claim="Other ranks end in time and name one that is killed, paused, slowed or cut off.",
            anchor="three hosts of a lab, the store on a fourth; sums are held against true ones",
            summary=summary,
            cases=len(outcomes),
            tables=[
                results.Table(columns=columns, rows=rows),
                results.Table(columns=["sums as", *columns[2:]], rows=by_wire),
            ],
        )
    sys.exit(bool(totals["hangs"] or totals["wrong"] or totals["unnamed"]))


if __name__ == "__main__":
    main()
