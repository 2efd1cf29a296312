"""The event engine on plans of any shape: its rules in small examples, then laws on random plans.

Collectives are in test_collective.py; here each test makes its own plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fullwire.clusters.cluster import one_switch
from fullwire.collectives.cost import AddTimes
from fullwire.collectives.plan import plan
from fullwire.collectives.playing import collective_time
from fullwire.collectives.registry import OPS, with_formula
from fullwire.errors import UsageError
from tests.around_a_switch import Wish, play_wishes
from tests.reference_network import Move, ReferenceNetwork
from tests.strategies import cases

PAIRS = [(op, algorithm) for op in OPS for algorithm in with_formula(op)]


def play_s(
    *parts: Sequence[Wish],
    latency_s: float = 0.0,
    chunks: int = 1,
    serial: bool = False,
    rate: float = 1.0,
    scale: float = 1.0,
) -> float:
    """Play parts of wishes; `scale` stretches every time."""
    return play_wishes(
        [[wish._replace(add_s=wish.add_s * scale) for wish in part] for part in parts],
        bytes_per_s=rate / scale,
        latency_s=latency_s * scale,
        chunks=chunks,
        serial=serial,
    )


def test_a_link_carries_both_directions_at_once() -> None:
    assert play_s([Wish(0, 0, 1), Wish(0, 1, 0)]) == 1


def test_two_that_meet_share_the_link_and_the_longer_then_has_it_alone() -> None:
    assert play_s([Wish(0, 0, 2, 1.0), Wish(0, 1, 2, 2.0)]) == 3
    assert play_s([Wish(0, 2, 0, 1.0), Wish(0, 2, 1, 2.0)]) == 3


def test_shares_are_max_min_fair_not_merely_equal() -> None:
    into_two = [Wish(0, rank, 2, 1.0) for rank in (0, 3, 4)]  # a third of the rate each
    assert play_s([*into_two, Wish(0, 0, 1, 2.0)]) == pytest.approx(3, rel=1e-15)


def test_a_share_that_ends_is_felt_two_links_away() -> None:
    # Until 3 s, 0 sends at a third of the rate to each of three; 3 sends at two thirds to 2 and at
    # a third to 4. Then 0 sends to 2 only, at a half, so 3 sends to 2 at a half until both end at
    # 5 s, and to 4 at a half, then alone.
    short = [Wish(0, 0, 1, 1.0), Wish(0, 0, 5, 1.0)]
    chain = [Wish(0, 0, 2, 2.0), Wish(0, 3, 2, 3.0), Wish(0, 3, 4, 5.0)]
    assert play_s([*short, *chain]) == pytest.approx(8, rel=1e-15)


def test_transfers_between_the_same_two_ranks_go_one_after_another() -> None:
    twice = [Wish(0, 0, 1, 1.0), Wish(0, 0, 1, 5.0)]
    answer = Wish(1, 1, 0, 1.0)
    assert play_s(twice) == 6
    assert play_s([*twice, answer]) == 7
    assert play_s([twice[0], answer], [twice[1]]) == 6  # another part does not wait


def test_a_round_waits_for_what_was_received_and_added_and_for_what_was_sent() -> None:
    assert play_s([Wish(0, 0, 1, 1.0, add_s=4.0), Wish(1, 1, 2, 1.0)], latency_s=2.0) == 10
    assert play_s([Wish(0, 0, 1, 6.0), Wish(1, 0, 2, 1.0)]) == 7


def test_an_add_does_not_keep_the_link() -> None:
    chunks = [Wish(0, 0, 1, 1.0, add_s=10.0)]
    assert play_s(chunks, chunks=3) == 13
    assert play_s(chunks, chunks=3, serial=True) == 33


def test_a_later_round_may_arrive_first_and_is_remembered() -> None:
    late, early = Wish(0, 0, 2, 5.0), Wish(1, 1, 2, 1.0)
    assert play_s([late, early, Wish(2, 2, 3, 1.0)]) == 7


def test_an_empty_message_costs_latency_and_an_empty_plan_nothing() -> None:
    assert play_s([Wish(0, 0, 1, 0.0), Wish(1, 1, 0, 0.0)], latency_s=3.0) == 6
    assert play_s([]) == play_s() == 0


kinds = st.sampled_from([(3.0, 0.0), (4.0, 0.0), (2.0, 1.5)])  # few, so that many are equal


@st.composite
def wishes(draw: st.DrawFn, most: int = 12) -> list[Wish]:
    count = draw(st.integers(1, most))
    rounds = sorted(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    workers = draw(st.integers(2, 7))
    made = []
    for number in rounds:
        source = draw(st.integers(0, workers - 1))
        hop = draw(st.integers(1, workers - 1))
        made.append(Wish(number, source, (source + hop) % workers, *draw(kinds)))
    return made


any_parts = st.lists(wishes(), min_size=1, max_size=2)
latencies = st.sampled_from([0.0, 0.75, 5.0])


def reference_s(parts: list[list[Wish]], latency_s: float, chunks: int) -> float:
    """Return the exact time; reject a case that depends on the order of two equal transfers."""
    network = ReferenceNetwork(
        [
            [Move(*wish[:3], Fraction(wish.size), Fraction(wish.add_s)) for wish in part]
            for part in parts
        ],
        rate=Fraction(1),
        latency=Fraction(latency_s),
        chunks=chunks,
    )
    end_s = float(network.play())
    assume(not network.is_tied)
    return end_s


@cases(250)
@given(any_parts, latencies, st.integers(1, 3))
def test_equal_transfers_that_meet_take_as_long_as_in_the_plain_reference(
    parts: list[list[Wish]], latency_s: float, chunks: int
) -> None:
    expected_s = reference_s(parts, latency_s, chunks)
    assert play_s(*parts, latency_s=latency_s, chunks=chunks) == pytest.approx(expected_s, rel=1e-9)


@cases(50)
@given(any_parts, latencies, st.integers(1, 3))
def test_serial_chunks_take_as_long_as_one_so_many_times(
    parts: list[list[Wish]], latency_s: float, chunks: int
) -> None:
    expected_s = reference_s(parts, latency_s, 1)
    found_s = play_s(*parts, latency_s=latency_s, chunks=chunks, serial=True)
    assert found_s == pytest.approx(chunks * expected_s, rel=1e-9)


@settings(deadline=None)
@given(st.lists(wishes(most=40), min_size=1, max_size=3), latencies, st.integers(1, 4))
def test_no_play_is_faster_than_its_busiest_link_or_slower_than_one_at_a_time(
    parts: list[list[Wish]], latency_s: float, chunks: int
) -> None:
    moves = [wish for part in parts for wish in part]
    through: dict[tuple[str, int], float] = {}
    for wish in moves:
        for link in (("up", wish.source), ("down", wish.target)):
            through[link] = through.get(link, 0.0) + chunks * wish.size
    alone_s = chunks * sum(wish.size + latency_s + wish.add_s for wish in moves)
    found_s = play_s(*parts, latency_s=latency_s, chunks=chunks)
    assert max(through.values()) * (1 - 1e-9) <= found_s <= alone_s * (1 + 1e-9)


@settings(deadline=None)
@given(any_parts, latencies, st.integers(1, 3), st.booleans())
def test_the_same_play_takes_the_same_time_to_the_last_bit_and_scales_exactly(
    parts: list[list[Wish]], latency_s: float, chunks: int, serial: bool
) -> None:
    once_s, again_s, twice_s = (
        play_s(*parts, latency_s=latency_s, chunks=chunks, serial=serial, rate=1.1, scale=scale)
        for scale in (1.0, 1.0, 2.0)
    )
    assert once_s == again_s == twice_s / 2


@cases(300)
@given(
    st.sampled_from(PAIRS),
    st.integers(1, 40),
    st.integers(1, 2**30),
    st.integers(1, 9),
    st.sampled_from(["serial", "pipelined"]),
    st.floats(1e8, 1e12),
    st.sampled_from([0.0, 5e-7, 2e-5, 1e-3]),
    st.booleans(),
)
def test_events_agree_with_every_closed_form_that_is_offered(
    pair: tuple[str, str],
    workers: int,
    size: int,
    chunks: int,
    order: str,
    rate_bps: float,
    latency_s: float,
    adding: bool,
) -> None:
    adds = AddTimes(((1e3, 1e-6), (1e6, 2e-5), (1e9, 1e-2)) if adding else ())
    cluster = one_switch(workers=workers, rate_bps=rate_bps, latency_s=latency_s)

    def time_s(level: str) -> float:
        return collective_time(
            *pair, cluster, size, chunks=chunks, chunk_order=order, level=level, adds=adds
        ).time_s

    try:
        closed_s = time_s("closed")
    except UsageError:
        return  # the closed form would be inexact, and the error says so
    assert time_s("event") == pytest.approx(closed_s, rel=1e-9)


def test_every_transfer_of_every_chunk_is_played_once() -> None:
    for op, algorithm in PAIRS:
        for workers in (2, 4, 16):
            for order in ("serial", "pipelined"):
                found = collective_time(
                    op,
                    algorithm,
                    one_switch(workers=workers, rate_bps=1e9),
                    10**6,
                    chunks=3,
                    chunk_order=order,
                )
                assert found.transfers == 3 * plan(op, algorithm, workers).transfer_count()


@given(st.integers(2, 30), st.floats(0, 1e-3), st.floats(0, 1e-3), st.integers(1, 5))
def test_less_latency_never_slows_a_ring(
    workers: int, latency_s: float, more_s: float, chunks: int
) -> None:
    near_s, far_s = (
        collective_time(
            "allreduce",
            "ring",
            one_switch(workers=workers, rate_bps=1e10, latency_s=each),
            10**6,
            chunks=chunks,
        ).time_s
        for each in (latency_s, latency_s + more_s)
    )
    assert near_s <= far_s * (1 + 1e-12)


@pytest.mark.parametrize("kind", [(float("nan"), 0.0), (-1.0, 0.0), (1.0, -1.0)])
def test_sizes_that_cannot_be_are_refused(kind: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="sizes that cannot be: expected finite numbers"):
        play_s([Wish(0, 0, 1, *kind)])


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_that_cannot_be_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="bytes per second: expected"):
        play_s([Wish(0, 0, 1)], rate=rate)


def test_latencies_and_chunks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="latency: expected"):
        play_s([Wish(0, 0, 1)], latency_s=-1.0)
    with pytest.raises(ValueError, match="chunks: expected at least 1"):
        play_s([Wish(0, 0, 1)], chunks=0)
