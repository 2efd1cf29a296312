"""The membership protocol: every order of messages for few ranks, random ones for many.

`python -m validation.membership` explores more of both.
"""

from __future__ import annotations

import msgspec
import pytest

from fullwire.errors import UsageError
from fullwire.resilience.membership import Committed, Entered, Member, Membership, Message
from validation.membership import LIMIT_NS, PAUSE_NS, Broken, explore, play


def members(count: int) -> list[Member]:
    first = Membership(0, tuple(range(count)), 0)
    return [Member(rank, first, limit_ns=LIMIT_NS, pause_ns=PAUSE_NS) for rank in range(count)]


def deliver(ranks: dict[int, Member], sent: list[tuple[int, int, bytes]]) -> None:
    """Deliver messages, and the answers to them, in the order in which they were sent."""
    while sent:
        sender, receiver, data = sent.pop(0)
        if receiver in ranks:
            answers = ranks[receiver].receive(sender, data, 0)
            sent += [(receiver, peer, answer) for peer, answer in answers]


@pytest.mark.parametrize(("count", "steps", "kills"), [(2, 2, 1), (3, 1, 1)])
def test_every_order_of_messages_keeps_the_invariants(count: int, steps: int, kills: int) -> None:
    assert explore(count, steps=steps, kills=kills) > 100


@pytest.mark.parametrize("seed", range(12))
def test_a_random_schedule_of_many_ranks_keeps_the_invariants(seed: int) -> None:
    assert play(seed).ranks >= 5


def test_a_step_is_committed_by_all_or_none() -> None:
    ranks = dict(enumerate(members(3)))
    sent = [(0, peer, data) for peer, data in ranks[0].ready(0)]
    sent += [(1, peer, data) for peer, data in ranks[1].ready(0)]
    deliver(ranks, sent)
    assert not any(rank.events for rank in ranks.values())
    deliver(ranks, [(2, peer, data) for peer, data in ranks[2].ready(0)])
    assert all(rank.events == [Committed(1, rank.membership)] for rank in ranks.values())


def test_survivors_form_the_next_epoch_without_the_first_rank() -> None:
    ranks = dict(enumerate(members(3)))
    del ranks[0]
    sent = [
        (rank, peer, data)
        for rank, member in ranks.items()
        for peer, data in member.lost(0, 0, is_certain=True)
    ]
    deliver(ranks, sent)
    second = Membership(1, (1, 2), 0)
    assert all(rank.events == [Entered(second)] for rank in ranks.values())


def test_a_rank_that_is_cut_off_does_not_go_on_alone() -> None:
    alone = members(3)[2]
    for peer in (0, 1):
        alone.lost(peer, 0, is_certain=False)
    assert alone.wakes_ns == LIMIT_NS
    alone.tick(LIMIT_NS)
    assert alone.ended is not None
    assert alone.ended.reason == "no quorum"


def test_a_rank_outside_of_the_members_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 3 is not among the members"):
        Member(3, Membership(0, (0, 1), 0), limit_ns=1, pause_ns=1)


def test_a_protocol_that_commits_before_all_are_ready_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def commit(member: Member, now_ns: int) -> None:
        member.committed += 1
        member.events.append(Committed(member.committed, member.membership))

    monkeypatch.setattr(Member, "_commit_what_all_hold", commit)
    with pytest.raises((Broken, AssertionError)):
        explore(3, steps=1, kills=1)


def test_a_protocol_in_which_each_side_decides_alone_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Member, "_is_quorum", lambda *_: True)
    with pytest.raises((Broken, AssertionError)):
        list(map(play, range(400)))


def test_a_rank_that_asks_comes_in_at_the_end_of_a_step() -> None:
    ranks = dict(enumerate(members(2)))
    first, second = ranks[0].membership, Membership(1, (0, 1, 7), 1)
    assert [*ranks[0].admit(7, -1, 0), *ranks[1].admit(7, -1, 0)] == []
    sent = [(rank, peer, data) for rank in ranks for peer, data in ranks[rank].ready(0)]
    told = [data for _, peer, data in sent if peer == 7]
    while sent:
        sender, receiver, data = sent.pop(0)
        if receiver == 7:
            told.append(data)
        else:
            sent += [
                (receiver, peer, said) for peer, said in ranks[receiver].receive(sender, data, 0)
            ]
    assert all(rank.events == [Committed(1, first), Entered(second)] for rank in ranks.values())
    assert msgspec.msgpack.decode(told[-1], type=Message).sender_at == second
    ranks[7] = Member(7, second, limit_ns=LIMIT_NS, pause_ns=PAUSE_NS)
    for rank in ranks.values():
        rank.events.clear()
    everyone = [(r, p, data) for r, rank in ranks.items() for p, data in rank.ready(0)]
    deliver(ranks, everyone)
    assert all(rank.events == [Committed(2, second)] for rank in ranks.values())


def test_only_the_leader_lets_a_rank_in_and_only_once() -> None:
    leader, other = members(2)
    assert other.admit(7, -1, 0) == []
    assert other.forming_since_ns is None
    assert leader.admit(1, -1, 0)[0][0] == 1  # a member that has not heard so is told
    assert leader.forming_since_ns is None
    leader.admit(1, 0, 0)  # it has left this epoch
    assert leader.membership == Membership(1, (0,), 0)


def test_an_epoch_is_renewed_with_the_same_ranks() -> None:
    ranks = dict(enumerate(members(3)))
    deliver(ranks, [(2, peer, data) for peer, data in ranks[2].renew(0)])
    again = Membership(1, (0, 1, 2), 0)
    assert all(rank.events == [Entered(again)] for rank in ranks.values())
