"""All interleavings of the membership protocol for few ranks, and random ones for many.

    python -m validation.membership --seeds 2000

A world holds the ranks, the bytes on each connection, and the history. `explore` takes each order
of its events, and ends a rank after each of its messages. `play` takes one random order, with
pauses and broken connections. Both check four things:

- One epoch has one membership.
- All ranks that ever commit a step divided its samples in the same way.
- Every step comes, in order.
- Every rank goes on or ends.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from fullwire.resilience.membership import Committed, Ended, Entered, Event, Member, Membership
from validation import arguments, results

LIMIT_NS, PAUSE_NS, SILENCE_NS = 60_000_000_000, 10_000_000, 2_000_000_000
CLOSED = b""  # the end of a connection, after its last message
Sent: TypeAlias = list[tuple[int, bytes]]


class Broken(Exception):
    """An invariant does not hold."""


@dataclass
class History:
    """All that ranks ever did, the dead ones included."""

    epochs: dict[int, Membership] = field(default_factory=dict)
    steps: dict[int, Membership] = field(default_factory=dict)  # the division of its samples

    def note(self, rank: int, events: tuple[Event, ...]) -> None:
        """Check what a rank tells against what others told before."""
        for event in events:
            if isinstance(event, Entered):
                known = self.epochs.setdefault(event.membership.epoch, event.membership)
                same = known == event.membership
            elif isinstance(event, Committed):
                known = self.steps.setdefault(event.step, event.membership)
                same = known == event.membership
            else:
                same = True
            if not same:
                raise Broken(f"rank {rank}: {event}, but another rank has {known}")

    def key(self) -> tuple[Any, ...]:
        """Return the history in a form that can be compared."""
        return tuple(sorted(self.epochs.items())), tuple(sorted(self.steps.items()))


def copied(member: Member) -> Member:
    """Return a rank that can change without the other."""
    copy = object.__new__(Member)
    for name, value in vars(member).items():
        setattr(copy, name, value.copy() if isinstance(value, dict | list) else value)
    return copy


def key_of(member: Member) -> tuple[Any, ...]:
    """Return what decides a rank's future."""
    return tuple(
        tuple(sorted(value.items())) if isinstance(value, dict) else value
        for name, value in vars(member).items()
        if name not in {"events", "_out"}
    )


def act(member: Member, what: tuple[Any, ...], now_ns: int) -> tuple[Sent, tuple[Event, ...]]:
    """Let a rank take one event; return the messages that it sends and the events that it tells."""
    if what[0] == "ready":
        sent = member.ready(now_ns)
    elif what[0] == "leave":
        sent = member.leave()
    elif what[0] == "tick":
        sent = member.tick(now_ns)
    elif what[0] == "silent":
        sent = member.lost(what[1], now_ns, is_certain=False)
    elif what[2] == CLOSED:
        sent = member.lost(what[1], now_ns, is_certain=True)
    else:
        sent = member.receive(what[1], what[2], now_ns)
    before = member.committed - sum(isinstance(event, Committed) for event in member.events)
    events = tuple(member.events)
    member.events.clear()
    steps = [event.step for event in events if isinstance(event, Committed)]
    if steps != list(range(before + 1, member.committed + 1)):
        raise Broken(f"rank {member.rank} commits {steps} after step {before}")
    return sent, events


# All interleavings.


class State(NamedTuple):
    """A world that equals another one has the same future. Ranks are numbers of interned states."""

    ranks: tuple[int, ...]  # -1: dead
    links: tuple[tuple[bytes, ...], ...]  # from a to b: a * count + b
    kills_left: int
    history: tuple[Any, ...]


class Explorer:
    """Walks all states that can be reached."""

    def __init__(self, count: int, *, steps: int, kills: int) -> None:
        self.count, self.steps = count, steps
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._members: list[Member] = []
        self._done: dict[tuple[int, tuple[Any, ...]], tuple[int, Sent, tuple[Event, ...]]] = {}
        first = Membership(0, tuple(range(count)), 0)
        ranks = [Member(r, first, limit_ns=LIMIT_NS, pause_ns=PAUSE_NS) for r in range(count)]
        self.first = State(
            tuple(map(self._number, ranks)), ((),) * (count * count), kills, History().key()
        )

    def _number(self, member: Member) -> int:
        number = self._numbers.setdefault(key_of(member), len(self._members))
        if number == len(self._members):
            self._members.append(member)
        return number

    def _act(self, number: int, what: tuple[Any, ...]) -> tuple[int, Sent, tuple[Event, ...]]:
        if (number, what) not in self._done:
            member = copied(self._members[number])
            sent, events = act(member, what, 0)
            self._done[number, what] = self._number(member), sent, events
        return self._done[number, what]

    def next(self, state: State) -> Iterator[State]:
        """Each event that can come next, and each way in which its rank dies while it answers."""
        for rank, number in enumerate(state.ranks):
            if number < 0:
                continue
            for what, links in self._events(state, rank, number):
                changed, sent, events = self._act(number, what)
                history = History(dict(state.history[0]), dict(state.history[1]))
                history.note(rank, events)
                for event in events:
                    if isinstance(event, Ended) and event.reason != "left":
                        raise Broken(f"rank {rank} ended: {event.reason}")
                ranks = (*state.ranks[:rank], changed, *state.ranks[rank + 1 :])
                yield State(ranks, self._sent(links, rank, sent), state.kills_left, history.key())
                if state.kills_left:
                    ranks = (*state.ranks[:rank], -1, *state.ranks[rank + 1 :])
                    for some in range(len(sent) + 1):
                        closed = [(peer, CLOSED) for peer in range(self.count) if peer != rank]
                        after = self._sent(links, rank, sent[:some] + closed)
                        yield State(ranks, after, state.kills_left - 1, history.key())

    def _events(
        self, state: State, rank: int, number: int
    ) -> Iterator[tuple[tuple[Any, ...], tuple[tuple[bytes, ...], ...]]]:
        member = self._members[number]
        if member.ended:
            return
        if member.committed == self.steps:
            yield ("leave",), state.links
        elif member.ready_step == member.committed and member.forming_since_ns is None:
            yield ("ready",), state.links
        for peer in range(self.count):
            place = peer * self.count + rank
            if state.links[place]:
                rest = (state.links[place][1:],)
                links = state.links[:place] + rest + state.links[place + 1 :]
                yield ("message", peer, state.links[place][0]), links

    def _sent(
        self, links: tuple[tuple[bytes, ...], ...], rank: int, sent: Sent
    ) -> tuple[tuple[bytes, ...], ...]:
        changed = list(links)
        for peer, data in sent:
            changed[rank * self.count + peer] += (data,)
        return tuple(changed)

    def check_end(self, state: State) -> None:
        """Check that all ranks ended, in a state without further events."""
        for rank, number in enumerate(state.ranks):
            if number >= 0 and not self._members[number].ended:
                raise Broken(f"rank {rank} waits for ever")


def explore(count: int, *, steps: int, kills: int) -> int:
    """Return the number of states; raises `Broken` with the first that breaks an invariant."""
    explorer = Explorer(count, steps=steps, kills=kills)
    seen = {explorer.first}
    todo = [explorer.first]
    while todo:
        state = todo.pop()
        is_end = True
        for after in explorer.next(state):
            is_end = False
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if is_end:
            explorer.check_end(state)
    return len(seen)


# Random schedules.


class Played(NamedTuple):
    """The end of one random schedule."""

    ranks: int
    killed: int
    finished: int  # ranks that committed the last step
    stopped: int  # ranks that ended because they were cut off
    epochs: int


class Schedule:
    """One random world, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = self.random.choice([5, 6, 8, 12, 16, 32, 64])
        self.steps = self.random.randint(1, 6)
        self.kills_left = self.random.randint(0, min(self.count - 1, 8))
        self.cuts_left = self.random.randint(0, 3)
        first = Membership(0, tuple(range(self.count)), 0)
        self.members = {
            rank: Member(rank, first, limit_ns=LIMIT_NS, pause_ns=PAUSE_NS)
            for rank in range(self.count)
        }
        self.links: dict[tuple[int, int], deque[bytes]] = {}
        self.busy: list[tuple[int, int]] = []  # connections with messages
        self.cut: dict[tuple[int, int], int] = {}  # until when
        self.slow: dict[int, int] = {}
        self.history = History()
        self.now_ns = 0
        self.killed = 0

    def do(self, rank: int, what: tuple[Any, ...]) -> None:
        """Let a rank take one event; it may die while it answers."""
        member = self.members[rank]
        was_over = member.ended
        sent, events = act(member, what, self.now_ns)
        self.history.note(rank, events)
        dies = self.kills_left > 0 and self.random.random() < 0.01
        if dies:
            sent = sent[: self.random.randint(0, len(sent))]
        for peer, data in sent:
            self.send(rank, peer, data)
        if dies or (member.ended and not was_over):
            for peer in self.members:
                if peer != rank:
                    self.send(rank, peer, CLOSED)
        if dies:
            self.kills_left -= 1
            self.killed += 1
            del self.members[rank]

    def disturb(self) -> None:
        """Break connections between two sides for some time, or make a rank slow."""
        until_ns = self.now_ns + self.random.choice([1, 3, 100]) * 1_000_000_000
        if self.cuts_left and self.random.random() < 0.01:
            self.cuts_left -= 1
            ranks = list(self.members)
            side = set(self.random.sample(ranks, self.random.randint(1, len(ranks))))
            pairs = [(a, b) for a in side for b in ranks if b not in side]
            if self.random.random() < 0.3:
                pairs = pairs[:1]
            for a, b in pairs:
                self.cut[a, b] = until_ns
                if self.random.random() < 0.9:
                    self.cut[b, a] = until_ns
        if self.random.random() < 0.003:
            self.slow[self.random.choice(list(self.members))] = until_ns

    def choice(self) -> tuple[int, tuple[Any, ...]] | None:
        """Draw one of the events that can come next."""
        own: list[tuple[int, tuple[Any, ...]]] = []
        for rank, member in self.members.items():
            if not self.can_act(rank):
                continue
            if member.committed == self.steps:
                own.append((rank, ("leave",)))
            elif member.ready_step == member.committed and member.forming_since_ns is None:
                own.append((rank, ("ready",)))
            if member.wakes_ns is not None and member.wakes_ns <= self.now_ns:
                own.append((rank, ("tick",)))
        if own and self.random.random() < 0.2:
            return self.random.choice(own)
        for _ in range(20):
            at = self.random.randrange(max(len(self.busy), 1))
            if self.busy and self.can_arrive(self.busy[at]):
                return self.arrival(at)
        for at, link in enumerate(self.busy):
            if self.can_arrive(link):
                return self.arrival(at)
        return self.random.choice(own) if own else None

    def can_arrive(self, link: tuple[int, int]) -> bool:
        """Whether the first message of a connection can reach its receiver now."""
        return self.can_act(link[1]) and self.cut.get(link, 0) <= self.now_ns

    def arrival(self, at: int) -> tuple[int, tuple[Any, ...]]:
        """Take the first message of a connection."""
        link = self.busy[at]
        data = self.links[link].popleft()
        if not self.links[link]:
            self.busy[at] = self.busy[-1]
            self.busy.pop()
        return link[1], ("message", link[0], data)

    def send(self, sender: int, receiver: int, data: bytes) -> None:
        """Put bytes on a connection; a rank that has ended reads no more."""
        if receiver in self.members and not self.members[receiver].ended:
            queue = self.links.setdefault((sender, receiver), deque())
            if not queue:
                self.busy.append((sender, receiver))
            queue.append(data)

    def can_act(self, rank: int) -> bool:
        """Whether a rank is there and not held up."""
        member = self.members.get(rank)
        return member is not None and not member.ended and self.slow.get(rank, 0) <= self.now_ns

    def silences(self) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Ranks notice peers that send nothing: cut off, or slow."""
        for rank in list(self.members):
            for peer in range(self.count):
                until_ns = max(self.cut.get((peer, rank), 0), self.slow.get(peer, 0))
                if peer != rank and until_ns > self.now_ns and self.can_act(rank):
                    yield rank, ("silent", peer)

    def wait(self) -> None:
        """Nothing can happen now: go on to the next time at which something can."""
        times = [member.wakes_ns for member in self.members.values() if member.wakes_ns]
        times += [*self.cut.values(), *self.slow.values()]
        later = [at for at in times if at > self.now_ns]
        stuck = [rank for rank, member in self.members.items() if not member.ended]
        if not later:
            raise Broken(f"ranks {stuck} wait for ever")
        self.now_ns = min(min(later), self.now_ns + SILENCE_NS)
        for rank, what in self.silences():
            if self.can_act(rank):
                self.do(rank, what)

    def play(self) -> Played:
        """Play to the end."""
        while any(not member.ended for member in self.members.values()):
            if (drawn := self.choice()) is None:
                self.wait()
                continue
            rank, what = drawn
            self.now_ns += self.random.randint(0, 100_000)
            self.do(rank, what)
            if self.members:
                self.disturb()
        reasons = [member.ended.reason for member in self.members.values() if member.ended]
        return Played(
            self.count,
            self.killed,
            reasons.count("left"),
            len(reasons) - reasons.count("left"),
            len(self.history.epochs) + 1,
        )


def play(seed: int) -> Played:
    """Play the schedule of a seed; raises `Broken` if an invariant does not hold."""
    return Schedule(seed).play()


def main() -> None:
    """Explore, play and write the findings."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    options = parser.parse_args()
    explored: list[list[results.Cell]] = []
    for count, steps, kills in ((2, 2, 1), (3, 1, 2), (3, 2, 1), (3, 2, 2)):
        start = time.perf_counter()
        states = explore(count, steps=steps, kills=kills)
        explored.append([count, steps, kills, states, round(time.perf_counter() - start, 1)])
        print(*explored[-1], flush=True)
    played: dict[int, list[Played]] = {}
    broken = []
    for seed in range(options.first, options.first + options.seeds):
        try:
            one = play(seed)
        except (Broken, AssertionError) as error:
            broken.append(seed)
            print(f"seed {seed}: {error}", flush=True)
        else:
            played.setdefault(one.ranks, []).append(one)
    held = sum(map(len, played.values()))
    results.write(
        "membership",
        claim="The members of a job agree on who trains and which steps count.",
        anchor="the invariants: one membership an epoch, one division of each step's samples, no "
        "step left out, nobody waits for ever",
        summary=f"{sum(int(row[3] or 0) for row in explored):,} states of 2 and 3 ranks, and "
        f"{held:,} of {options.seeds:,} random schedules of 5 to 64 ranks, keep all invariants",
        cases=options.seeds,
        worst=None,
        tables=[
            results.Table(
                title="All interleavings, with a rank's end after each of its messages",
                columns=["ranks", "steps", "ranks lost, at most", "states", "time (s)"],
                rows=explored,
            ),
            results.Table(
                title="Random schedules, with losses, broken connections and slow ranks",
                columns=[
                    "ranks",
                    "schedules",
                    "ranks lost",
                    "finished",
                    "ended as cut off",
                    "most epochs",
                ],
                rows=[
                    [
                        count,
                        len(ones),
                        sum(one.killed for one in ones),
                        sum(one.finished for one in ones),
                        sum(one.stopped for one in ones),
                        max(one.epochs for one in ones),
                    ]
                    for count, ones in sorted(played.items())
                ],
            ),
        ],
    )
    if broken:
        sys.exit(f"{len(broken)} schedules break an invariant, with seeds {broken[:20]}")


if __name__ == "__main__":
    main()
