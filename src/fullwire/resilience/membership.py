"""The rules by which ranks agree on their members and on committed steps, apart from sockets.

`Member` is one rank. It takes messages, lost connections and the time. It returns messages, and
leaves events. A job that survives the loss of workers carries its bytes. `validation/membership.py`
explores it. `docs/design/elastic.md` has the protocol, its proof and the roads not taken. In short:

- A step: a rank whose sums are complete tells all members `ready`. A rank commits the step when all
  members are ready.
- A loss: survivors agree on the next membership by Paxos among the members of this epoch. The
  lowest rank that is not lost proposes. A rank commits nothing of the old epoch once it has voted.
- A rank that asks to join is a member of the next epoch. It has no vote before that epoch begins.
- The step of a new epoch is the lowest for which one of its voters was ready. If any rank, a dead
  one included, has committed a step, then all were ready for it. So no step is ever taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from fullwire.errors import UsageError

Ballot: TypeAlias = tuple[int, int]  # round, proposer
NO_BALLOT: Ballot = (0, -1)
Reason: TypeAlias = Literal["left", "excluded", "no quorum"]
Kind: TypeAlias = Literal[
    "ready", "left", "form", "prepare", "promise", "accept", "accepted", "refused", "now"
]


class Membership(NamedTuple):
    """The ranks of one epoch, and how many steps were committed before it."""

    epoch: int
    members: tuple[int, ...]
    base_step: int


class Committed(NamedTuple):
    """The step counts now: apply it. Its samples were divided among the ranks of `membership`."""

    step: int
    membership: Membership


class Entered(NamedTuple):
    """A new epoch began. The caller discards a step that is under way and was not committed."""

    membership: Membership


class Ended(NamedTuple):
    """This rank takes no further part."""

    reason: Reason


Event: TypeAlias = Committed | Entered | Ended


class Message(NamedTuple):
    """A message between ranks. Each carries the sender's membership, so an old one shows."""

    kind: Kind
    sender_at: Membership
    step: int = 0  # ready, promise: the last step for which the sender was ready
    ballot: Ballot = NO_BALLOT
    accepted_at: Ballot = NO_BALLOT  # promise: the ballot of `proposal`
    proposal: Membership | None = None
    silent: tuple[int, ...] = ()  # the ranks that the sender cannot reach


class Member:
    """One rank's part in the protocol. Methods return messages as (receiver, bytes)."""

    def __init__(self, rank: int, membership: Membership, *, limit_ns: int, pause_ns: int) -> None:
        if rank not in membership.members:
            raise UsageError(f"rank {rank} is not among the members {membership.members}")
        self.rank = rank
        self.membership = membership
        self.committed = self.ready_step = membership.base_step
        self.ended: Ended | None = None
        self.events: list[Event] = []  # the caller empties it
        self._limit_ns = limit_ns  # the longest wait for a new epoch
        self._pause_ns = pause_ns  # before a refused proposer tries again
        self._out: list[tuple[int, bytes]] = []
        self._dead: frozenset[int] = frozenset()  # they will never act again
        self._silent: frozenset[int] = frozenset()  # they may be alive
        self._joiners: frozenset[int] = frozenset()  # ranks outside that asked for the next epoch
        self._begin_epoch(membership)

    def _begin_epoch(self, membership: Membership) -> None:
        self.membership = membership
        self._joiners = self._joiners.difference(membership.members)
        self._silent = self._dead  # a rank that was silent has another chance
        self._ready = dict.fromkeys(membership.members, membership.base_step)
        self.forming_since_ns: int | None = None
        self._promised = self._accepted_at = self._ballot = NO_BALLOT
        self._accepted: Membership | None = None
        self._promises: dict[int, Message] = {}
        self._accepts: frozenset[int] = frozenset()
        self._asked: frozenset[int] = frozenset()  # leaders that were asked to form
        self._retry_ns: int | None = None
        self._tries = 0

    # Events from the caller.

    def ready(self, now_ns: int) -> list[tuple[int, bytes]]:
        """This rank holds the complete sums of its next step."""
        if not self.ended and self.forming_since_ns is None and self.ready_step == self.committed:
            self.ready_step += 1
            self._ready[self.rank] = self.ready_step
            self._tell(self._others(), "ready", step=self.ready_step)
            self._commit_what_all_hold(now_ns)
        return self._sent()

    def leave(self) -> list[tuple[int, bytes]]:
        """This rank has finished, or wants to go. The others count it as dead."""
        if not self.ended:
            self._tell(self._others(), "left")
            self._end("left")
        return self._sent()

    def lost(self, peer: int, now_ns: int, *, is_certain: bool) -> list[tuple[int, bytes]]:
        """A connection broke: certain if the peer's kernel closed it, not if it is silent."""
        if is_certain:
            self._dead |= {peer}
        self._silent |= {peer}
        self._joiners -= {peer}
        if not self.ended and peer in self.membership.members and peer != self.rank:
            self._form(now_ns)
        return self._sent()

    def admit(self, peer: int, left_epoch: int, now_ns: int) -> list[tuple[int, bytes]]:
        """A rank asks to be a member of an epoch later than the one that it left (-1: none)."""
        if self.ended or peer in self._dead:
            return []
        if peer not in self.membership.members:
            self._joiners |= {peer}  # they come in at the end of a step, which nobody repeats
        elif left_epoch < self.membership.epoch:
            self._tell([peer], "now")  # it is a member already, and has not heard so
        else:
            return self.lost(peer, now_ns, is_certain=False)
        return self._sent()

    def renew(self, now_ns: int) -> list[tuple[int, bytes]]:
        """Begin a new epoch: the sums of this one failed, and all ranks seem alive."""
        if not self.ended:
            self._form(now_ns)
        return self._sent()

    def tick(self, now_ns: int) -> list[tuple[int, bytes]]:
        """Time has passed: see `wakes_ns`."""
        if self.ended or self.forming_since_ns is None:
            return []
        if now_ns - self.forming_since_ns >= self._limit_ns:
            self._end("no quorum")
        elif self._retry_ns is not None and now_ns >= self._retry_ns:
            self._propose(now_ns)
        return self._sent()

    @property
    def wakes_ns(self) -> int | None:
        """The time at which `tick` has something to do."""
        if self.ended or self.forming_since_ns is None:
            return None
        limit_ns = self.forming_since_ns + self._limit_ns
        return limit_ns if self._retry_ns is None else min(limit_ns, self._retry_ns)

    def receive(self, peer: int, data: bytes, now_ns: int) -> list[tuple[int, bytes]]:
        """Take one message of a peer."""
        message = msgspec.msgpack.decode(data, type=Message)
        if self.ended:
            return []
        if message.kind == "left":
            return self.lost(peer, now_ns, is_certain=True)
        if message.sender_at.epoch > self.membership.epoch:
            self._enter(message.sender_at, now_ns)
        if self.ended or message.sender_at.epoch < self.membership.epoch:
            # An old "ready" needs no answer: its sender will ask, or it is told.
            if message.kind in {"form", "prepare", "accept"}:
                self._tell([peer], "now")
        elif message.kind == "ready":
            self._ready[peer] = message.step
            if self.forming_since_ns is None:
                self._commit_what_all_hold(now_ns)
        elif message.kind == "form":
            self._form(now_ns)
        elif message.kind in {"prepare", "accept"}:
            self._vote(peer, message, now_ns)
        elif message.ballot == self._ballot == self._promised:
            self._count(peer, message, now_ns)
        return self._sent()

    # Steps.

    def _commit_what_all_hold(self, now_ns: int) -> None:
        if min(self._ready.values()) > self.committed:
            self.committed += 1
            self.events.append(Committed(self.committed, self.membership))
            if self._joiners and self.rank == self._leader():
                self._form(now_ns)

    # Forming the next epoch.

    def _form(self, now_ns: int) -> None:
        """Stop commits of this epoch; propose the next one, or ask the rank whose part that is."""
        if self.forming_since_ns is None:
            self.forming_since_ns = now_ns
        leader = self._leader()
        if leader != self.rank:
            if leader not in self._asked:
                self._asked |= {leader}
                self._tell([leader], "form")
        elif self._ballot == NO_BALLOT or self._ballot != self._promised:
            self._propose(now_ns)
        else:
            self._go_on(now_ns)

    def _leader(self) -> int:
        members = self.membership.members
        return min(rank for rank in members if rank == self.rank or rank not in self._silent)

    def _propose(self, now_ns: int) -> None:
        self._retry_ns = None
        self._ballot = self._promised = (self._promised[0] + 1, self.rank)
        self._accepts = frozenset()
        self._promises = {
            self.rank: Message(
                "promise",
                self.membership,
                self.ready_step,
                self._ballot,
                self._accepted_at,
                self._accepted,
                tuple(sorted(self._silent)),
            )
        }
        self._tell(self._others(), "prepare", ballot=self._ballot)
        self._go_on(now_ns)

    def _vote(self, peer: int, message: Message, now_ns: int) -> None:
        if self.forming_since_ns is None:
            self.forming_since_ns = now_ns
        if message.ballot < self._promised:
            self._tell([peer], "refused", step=self._promised[0], ballot=message.ballot)
            return
        self._promised = message.ballot
        if message.kind == "prepare":
            self._tell(
                [peer],
                "promise",
                step=self.ready_step,
                ballot=message.ballot,
                accepted_at=self._accepted_at,
                proposal=self._accepted,
            )
        else:
            self._accepted_at, self._accepted = message.ballot, message.proposal
            self._tell([peer], "accepted", ballot=message.ballot)

    def _count(self, peer: int, message: Message, now_ns: int) -> None:
        if message.kind == "promise" and self._accepts == frozenset():
            self._promises[peer] = message
        elif message.kind == "accepted":
            self._accepts |= {peer}
        elif message.kind == "refused":
            # Two proposers: the pauses differ by rank and grow, so one of them gets through.
            self._promised = (max(message.step, self._promised[0]), self.rank)
            self._ballot = NO_BALLOT
            self._tries += 1
            index = self.membership.members.index(self.rank) + 1
            self._retry_ns = now_ns + self._pause_ns * index * 2 ** min(self._tries, 6)
            return
        self._go_on(now_ns)

    def _go_on(self, now_ns: int) -> None:
        """Propose a membership when all in reach have promised; enter it when a quorum accepts."""
        reachable = {rank for rank in self.membership.members if rank not in self._silent}
        if not self._accepts:
            if not reachable <= self._promises.keys() or not self._is_quorum(self._promises.keys()):
                return
            earlier = max(self._promises.values(), key=lambda promise: promise.accepted_at)
            proposal = earlier.proposal or Membership(
                self.membership.epoch + 1,
                tuple(sorted({*self._ranks_that_reach_each_other(), *self._joiners})),
                min(promise.step for promise in self._promises.values()),
            )
            self._accepted_at, self._accepted = self._ballot, proposal
            self._accepts = frozenset({self.rank})
            self._tell(self._others(), "accept", ballot=self._ballot, proposal=proposal)
        if self._accepted is not None and self._is_quorum(self._accepts):
            self._enter(self._accepted, now_ns)

    def _ranks_that_reach_each_other(self) -> tuple[int, ...]:
        """Of two ranks with a broken connection, the higher one goes; the proposer stays.

        A rank that was silent, or is stuck, has a vote, and asks to be let in again.
        """
        kept = [self.rank]
        for rank in sorted(self._promises.keys() - {self.rank} - self._silent):
            cut_off = self._promises[rank].silent
            if not any(k in cut_off or rank in self._promises[k].silent for k in kept[1:]):
                kept.append(rank)
        return tuple(sorted(kept))

    def _is_quorum(self, voters: Collection[int]) -> bool:
        """Whether every other set of voters that decides has one of these.

        Most of the members are enough, and so are all who are not known to be dead. Half of them
        are enough with the lowest rank.
        """
        members = self.membership.members
        absent = set(members).difference(voters)
        return (
            absent <= self._dead
            or 2 * len(voters) > len(members)
            or (2 * len(voters) == len(members) and members[0] in voters)
        )

    def _enter(self, membership: Membership, now_ns: int) -> None:
        """Take a membership that was decided: here by votes, or in a message of a peer."""
        told = set(self._others())
        if self._accepted != membership or self._ballot != self._promised:
            told -= set(membership.members)  # the proposer tells them
        else:
            told |= set(membership.members) - {self.rank}  # those who join, too
        if self.rank not in membership.members:
            self.membership = membership
            self._end("excluded")
            return
        if membership.base_step > self.committed:
            self.committed += 1  # every rank of the new epoch was ready for it
            self.events.append(Committed(self.committed, self.membership))
        assert self.committed == membership.base_step <= self.ready_step
        self.ready_step = membership.base_step
        self._begin_epoch(membership)
        self.events.append(Entered(membership))
        self._tell(sorted(told), "now")
        if self._dead.intersection(membership.members):
            self._form(now_ns)

    # Sending.

    def _others(self) -> list[int]:
        return [r for r in self.membership.members if r != self.rank and r not in self._dead]

    def _tell(
        self,
        peers: Iterable[int],
        kind: Kind,
        *,
        step: int = 0,
        ballot: Ballot = NO_BALLOT,
        accepted_at: Ballot = NO_BALLOT,
        proposal: Membership | None = None,
    ) -> None:
        silent = tuple(sorted(self._silent))
        message = Message(kind, self.membership, step, ballot, accepted_at, proposal, silent)
        data = msgspec.msgpack.encode(message)
        self._out.extend((peer, data) for peer in peers)

    def _end(self, reason: Reason) -> None:
        self.ended = Ended(reason)
        self.events.append(self.ended)

    def _sent(self) -> list[tuple[int, bytes]]:
        sent, self._out = self._out, []
        return sent
