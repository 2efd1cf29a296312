"""The network of native/events/playing.hpp around one switch: plain, slow, exact, easy to check.

The shares of all connections are calculated anew at each event, in exact fractions.

Two transfers of different parts or chunks may become ready for one connection at the same instant.
Their order is then a choice, not a fact: the engine goes by chunks, parts and stages, and its
instants are rounded. `is_tied` says that a play met such a choice.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple


class Move(NamedTuple):
    """One transfer of a plan."""

    round: int
    source: int
    target: int
    size: Fraction
    add: Fraction


@dataclass
class Sending:
    """The transfer that a connection is sending, and the bytes that are left."""

    key: tuple[int, int, int]  # part, chunk, position in the part
    left: Fraction


class ReferenceNetwork:
    """Plays parts of moves, `chunks` copies of each at once."""

    def __init__(
        self, parts: list[list[Move]], rate: Fraction, latency: Fraction, chunks: int
    ) -> None:
        self.parts, self.rate, self.latency = parts, rate, latency
        self.waiting: set[tuple[int, int, int]] = {
            (part, chunk, position)
            for part, moves in enumerate(parts)
            for chunk in range(chunks)
            for position in range(len(moves))
        }
        self.received: set[tuple[int, int, int]] = set()
        self.left: set[tuple[int, int, int]] = set()
        self.queues: dict[tuple[int, int], deque[tuple[int, int, int]]] = defaultdict(deque)
        self.active: dict[tuple[int, int], Sending] = {}
        self.flying: list[tuple[Fraction, tuple[int, int, int]]] = []
        self.now = Fraction(0)
        self.is_tied = False

    def play(self) -> Fraction:
        """Return the time when the last move was received."""
        end = Fraction(0)
        self.release()
        while self.active or self.flying:
            rates = self.shares()
            due = [self.now + each.left / rates[link] for link, each in self.active.items()]
            then = min(due + [time for time, _ in self.flying])
            for link, each in self.active.items():
                each.left -= rates[link] * (then - self.now)
            self.now = then
            self.deliver()
            end = max(end, self.now)
            self.release()
        assert not self.waiting
        return end

    def deliver(self) -> None:
        done = [link for link, each in self.active.items() if each.left == 0]
        for link in done:
            key = self.active.pop(link).key
            self.left.add(key)
            self.flying.append((self.now + self.latency_of(link) + self.move(key).add, key))
        self.received |= {key for time, key in self.flying if time <= self.now}
        self.flying = [(time, key) for time, key in self.flying if time > self.now]

    def release(self) -> None:
        ready = [key for key in self.waiting if self.may_leave(key)]
        groups: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        for key in sorted(ready, key=lambda key: (key[1], key[0], key[2])):
            link = self.move(key).source, self.move(key).target
            self.waiting.discard(key)
            self.queues[link].append(key)
            groups[link].add(key[:2])
        if self.now > 0:  # moves that are ready at once go by chunk and part
            self.is_tied |= any(len(group) > 1 for group in groups.values())
        for link, queue in self.queues.items():
            if queue and link not in self.active:
                key = queue.popleft()
                self.active[link] = Sending(key, self.move(key).size)

    def may_leave(self, key: tuple[int, int, int]) -> bool:
        part, chunk, _ = key
        move = self.move(key)
        before = [
            (part, chunk, i) for i, other in enumerate(self.parts[part]) if other.round < move.round
        ]
        return all(
            (self.move(other).target != move.source or other in self.received)
            and (self.move(other).source != move.source or other in self.left)
            for other in before
        )

    def shares(self) -> dict[tuple[int, int], Fraction]:
        """Fill all connections alike, settle those on a full link, and repeat with the others."""
        ends, free = self.links_of, self.rates()
        unsettled = set(self.active)
        settled: dict[tuple[int, int], Fraction] = {}
        while unsettled:
            users = {end: [link for link in unsettled if end in ends(link)] for end in free}
            offers = [(free[end] / len(on), end) for end, on in users.items() if on]
            if not offers:  # a move that uses no link arrives at once
                return settled | dict.fromkeys(unsettled, Fraction(10**30))
            share, tight = min(offers)
            for link in users[tight]:
                settled[link] = share
                unsettled.discard(link)
                for end in ends(link):
                    free[end] -= share
        return settled

    def move(self, key: tuple[int, int, int]) -> Move:
        return self.parts[key[0]][key[2]]

    def rates(self) -> dict[tuple[str, int], Fraction]:
        return {end: self.rate for link in self.active for end in self.links_of(link)}

    def links_of(self, link: tuple[int, int]) -> Iterable[tuple[str, int]]:
        return ("up", link[0]), ("down", link[1])

    def latency_of(self, link: tuple[int, int]) -> Fraction:
        del link
        return self.latency


class ReferenceFabric(ReferenceNetwork):
    """The same over links of any number and rate; links are named by numbers."""

    def __init__(
        self,
        parts: list[list[Move]],
        chunks: int,
        links: dict[tuple[int, int], list[int]],
        rates: dict[int, Fraction],
        latencies: dict[tuple[int, int], Fraction],
    ) -> None:
        super().__init__(parts, Fraction(1), Fraction(0), chunks)
        self.links, self.link_rates, self.latencies = links, rates, latencies

    def rates(self) -> dict[tuple[str, int], Fraction]:
        used = {end for link in self.active for end in self.links_of(link)}
        return {end: self.link_rates[end[1]] for end in used}

    def links_of(self, link: tuple[int, int]) -> Iterable[tuple[str, int]]:
        return [("link", each) for each in self.links[link]]

    def latency_of(self, link: tuple[int, int]) -> Fraction:
        return self.latencies[link]
