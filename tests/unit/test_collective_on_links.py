"""Collectives on described clusters: events against a plain reference, folded against unfolded."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fullwire import _native
from fullwire.clusters.cluster import (
    Cluster,
    Inside,
    LeafSpine,
    Nics,
    OtherHost,
    Torus,
    one_switch,
)
from fullwire.collectives.cost import AddTimes
from fullwire.collectives.link_cost import collective_cost
from fullwire.collectives.plan import plan
from fullwire.collectives.playing import CollectiveTime, collective_time
from fullwire.collectives.registry import OPS, fitting, names
from fullwire.errors import UsageError
from tests.reference_network import Move, ReferenceNetwork
from tests.strategies import cases

PAIRS = [(op, algorithm) for op in OPS for algorithm in names(op)]
ADDS = AddTimes(((1e3, 1e-6), (1e6, 2e-5), (1e9, 1e-2)))


def pod(
    nodes: int,
    *,
    slow: tuple[OtherHost, ...] = (),
    ratio: float = 2.0,
    rails: bool = False,
    devices: int = 8,
    nics: int = 8,
    per_leaf: int = 4,
) -> Cluster:
    """Describe nodes behind leaves; uplinks carry a share of the rate of the leaves' ports."""
    return Cluster(
        name="pod",
        nodes=nodes,
        devices_per_node=devices,
        inside=Inside(kind="switch", rate_bps=2.4e12, latency_s=1e-6),
        nics=Nics(rate_bps=400e9, per_node=nics, latency_s=3e-6),
        network=LeafSpine(
            nodes_per_leaf=per_leaf, oversubscription=ratio, by_rail=rails, latency_s=1e-6
        ),
        other_hosts=slow,
    )


@st.composite
def fabrics(draw: st.DrawFn, most_devices: int = 24) -> Cluster:
    devices = draw(st.integers(1, 4))
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    nodes = min(rows * columns, most_devices // devices)
    kind = draw(st.sampled_from(["switch", "leaves", "rails", "torus"]))
    nics = draw(st.sampled_from([each for each in range(1, devices + 1) if devices % each == 0]))
    network: Any = {}
    if kind == "torus" and nodes == rows * columns:
        nics, network = 4, {"network": Torus(rows=rows, columns=columns)}
    elif kind in ("leaves", "rails"):
        leaf = LeafSpine(
            nodes_per_leaf=draw(st.integers(1, nodes)),
            oversubscription=draw(st.sampled_from([1.0, 2.0, 3.0])),
            by_rail=kind == "rails",
            latency_s=draw(st.sampled_from([0.0, 2e-6])),
        )
        network = {"network": leaf}
    slow = draw(st.sets(st.integers(0, nodes - 1), max_size=2))
    return Cluster(
        name="drawn",
        nodes=nodes,
        devices_per_node=devices,
        inside=Inside(
            kind=draw(st.sampled_from(["switch", "pcie"])),
            rate_bps=1e12,
            latency_s=draw(st.sampled_from([0.0, 1e-6])),
        ),
        nics=Nics(rate_bps=1e11, per_node=nics, latency_s=draw(st.sampled_from([0.0, 5e-6]))),
        other_hosts=tuple(OtherHost(node=node, nic_rate_bps=3e10) for node in slow),
        **network,
    )


@cases(100)
@given(
    fabrics(),
    st.sampled_from(PAIRS),
    st.integers(1, 10**8),
    st.integers(1, 3),
    st.booleans(),
    st.data(),
)
def test_what_is_alike_is_played_once_and_takes_as_long_as_all_of_it(
    fabric: Cluster,
    pair: tuple[str, str],
    size: int,
    chunks: int,
    adding: bool,
    data: st.DataObject,
) -> None:
    op, algorithm = pair
    assume(algorithm in fitting(op, fabric))
    moved = algorithm != "in-network" and data.draw(st.booleans())
    order = data.draw(st.permutations(range(fabric.devices))) if moved else None
    folded, whole = (
        collective_time(
            op,
            algorithm,
            fabric,
            size,
            order=order,
            servers=min(2, fabric.devices),
            chunks=chunks,
            adds=ADDS if adding else None,
            folds=folds,
        )
        for folds in (True, False)
    )
    assert folded.time_s == pytest.approx(whole.time_s, rel=1e-9)
    assert folded.transfers == whole.transfers == whole.played
    assert (folded.played or 0) <= (whole.played or 0)


@pytest.mark.parametrize("nodes", [8, 32])  # 64 and 256 devices
@pytest.mark.parametrize("slow", [(), (OtherHost(node=5, nic_rate_bps=100e9),)])
@pytest.mark.parametrize("rails", [False, True])
def test_a_cluster_as_bought_folds_within_a_thousandth(
    nodes: int, slow: tuple[OtherHost, ...], rails: bool
) -> None:
    fabric = pod(nodes, slow=slow, rails=rails)
    for algorithm in ("hierarchical", "hierarchical-halving-doubling", "in-network"):
        folded, whole = (
            collective_time("allreduce", algorithm, fabric, 2**26, folds=folds)
            for folds in (True, False)
        )
        assert folded.time_s == pytest.approx(whole.time_s, rel=1e-3)
        assert 4 * (folded.played or 0) <= (whole.played or 0)


def test_sixteen_thousand_devices_are_a_few_kinds() -> None:
    fabric = pod(2048, per_leaf=32)
    found = collective_time("allreduce", "hierarchical", fabric, 2**30)
    assert found.transfers == 16384 * (7 + 2 * 2047 + 7)
    assert (found.played or 0) < 300_000
    # An eighth of the message goes from each device around 2,048 nodes over its own NIC.
    assert found.time_s > 2 * 2047 / 2048 * 2**27 * 8 / 400e9


@cases(100)
@given(fabrics(), st.sampled_from(PAIRS), st.integers(1, 10**8), st.integers(1, 3))
def test_events_agree_with_every_closed_form_that_is_exact(
    fabric: Cluster, pair: tuple[str, str], size: int, chunks: int
) -> None:
    op, algorithm = pair
    assume(algorithm in fitting(op, fabric))

    def time_s(level: str) -> float:
        return collective_time(
            op,
            algorithm,
            fabric,
            size,
            servers=min(2, fabric.devices),
            chunks=chunks,
            chunk_order="serial",
            level=level,
            adds=ADDS,
        ).time_s

    try:
        closed_s = time_s("closed")
    except UsageError:
        return  # the closed form would be inexact, and the error says so
    assert time_s("event") == pytest.approx(closed_s, rel=1e-9)


def test_where_links_are_equal_and_never_shared_a_closed_form_is_exact() -> None:
    even = pod(8, ratio=1.0, per_leaf=8)
    for op, algorithm in PAIRS:
        if algorithm in ("hierarchical", "in-network", "bidirectional-ring") and op in (
            "allreduce",
            "reducescatter",
            "allgather",
        ):
            # Around all devices hops are within nodes and between them.
            is_alike = algorithm != "bidirectional-ring"
            assert collective_cost(op, algorithm, even).is_exact == is_alike


@pytest.mark.parametrize("rails", [False, True])
def test_closed_forms_come_near_events_where_they_are_not_exact(rails: bool) -> None:
    fabric = pod(8, rails=rails, per_leaf=4)
    for algorithm in fitting("allreduce", fabric):
        if algorithm in ("tree", "hierarchical-tree"):
            continue  # their closed form is full utilization, to which chunks come near
        known = collective_cost("allreduce", algorithm, fabric)
        for size in (2**14, 2**22, 2**30):
            played = collective_time("allreduce", algorithm, fabric, size)
            assert float(known.whole_s(size)) == pytest.approx(played.time_s, rel=0.15)


@cases(60)
@given(fabrics(), st.sampled_from(OPS), st.integers(1, 24))
def test_what_is_applicable_can_be_played(fabric: Cluster, op: str, workers: int) -> None:
    assume(workers <= fabric.devices)
    for algorithm in fitting(op, fabric, workers):
        found = collective_time(op, algorithm, fabric, 1000, workers=workers)
        assert (found.time_s > 0) == (workers > 1)


def test_known_times_of_known_algorithms() -> None:
    even, size = pod(8, ratio=1.0, per_leaf=8), 2**30
    found = collective_time("allreduce", "hierarchical", even, size)
    inside_s = 2 * 7 * (size / 8 * 8 / 2.4e12 + 1e-6)
    between_s = 2 * 7 * (size / 8 / 8 * 8 / 400e9 + 3e-6)
    assert found.time_s == pytest.approx(inside_s + between_s)
    assert found.busiest == "in-node links"
    switched = collective_time("allreduce", "in-network", even, size)
    assert switched.time_s == pytest.approx(inside_s + 2 * (size / 8 * 8 / 400e9 + 1.5e-6))
    nine, eight = (one_switch(workers=each, rate_bps=8e9) for each in (9, 8))
    one_server = collective_time("allreduce", "parameter-server", nine, 10**9)
    assert one_server.time_s == pytest.approx(2 * 8)
    pairwise = collective_time("alltoall", "pairwise", eight, 10**9)
    assert pairwise.time_s == pytest.approx(7 / 8)


def test_a_bad_order_over_an_oversubscribed_spine_costs_what_it_costs() -> None:
    fabric, size = pod(16, ratio=4.0), 2**30

    def ring(order: Sequence[int] | None) -> CollectiveTime:
        return collective_time("allreduce", "ring", fabric, size, order=order)

    together = ring(None)
    assert together.busiest == "NICs"
    assert together.time_s == pytest.approx(2 * 127 / 128 * size * 8 / 400e9, rel=0.02)
    # With leaves in turn every hop of every rank crosses the spine; its uplinks carry a quarter.
    leaves_in_turn = np.arange(128).reshape(4, 4, 8).transpose(2, 1, 0).reshape(-1)
    crossing = ring(leaves_in_turn.tolist())
    assert crossing.busiest == "spine uplinks"
    assert crossing.time_s == pytest.approx(4 * together.time_s, rel=0.02)


def test_a_torus_carries_all_four_ways_at_once() -> None:
    fabric = Cluster(
        name="torus",
        nodes=16,
        network=Torus(rows=4, columns=4),
        nics=Nics(rate_bps=8e9, per_node=4),
    )
    found = collective_time("allreduce", "torus", fabric, 10**9)
    # A quarter each way; in turn over rows and columns, so that every link is always busy.
    assert found.time_s == pytest.approx(2 * 15 / 16 / 4, rel=1e-9)
    assert found.busiest_share == pytest.approx(1)


class Flow(NamedTuple):
    """One transfer as a test writes it: bytes over links of 1 byte per second each."""

    round: int
    source: int
    target: int
    size: float
    links: tuple[int, ...]
    add_s: float = 0.0


def played_s(flows: Sequence[Flow], links: int, latency_s: float = 0.0) -> float:
    """Play flows in the order of rounds; each flow has a connection of its own."""
    begin = np.cumsum([0, *(len(flow.links) for flow in flows)], dtype=np.int64)
    count = len(flows)
    # A stage has one size: every flow is a stage of its own, and a round is not a stage. So only
    # flows of one round are played here.
    assert {flow.round for flow in flows} <= {0}
    parts = [
        (
            np.ones(1, np.int64),
            np.array([0, 1], np.int64),
            np.array([number], np.int32),
            np.array([flow.size]),
            np.array([flow.add_s]),
        )
        for number, flow in enumerate(flows)
    ]
    time_s, transfers = _native.play(
        1 + max((max(flow.source, flow.target) for flow in flows), default=0),
        np.ones(links),
        np.array([flow.source for flow in flows], np.int32),
        np.array([flow.target for flow in flows], np.int32),
        np.full(count, latency_s),
        np.ones(count, np.int64),
        begin,
        np.array([link for flow in flows for link in flow.links], np.int32),
        np.ones(begin[-1], np.int32),
        parts,
        1,
        False,
        None,
    )
    assert transfers == count
    return time_s


def reference_s(flows: Sequence[Flow], latency_s: float) -> float:
    """Share by filling all flows alike, in exact fractions, until all are done."""
    left = {number: Fraction(flow.size) for number, flow in enumerate(flows)}
    now = end = Fraction(0)
    while left:
        rate = fair_shares({number: flows[number].links for number in left})
        step = min(left[number] / rate[number] for number in left)
        now += step
        left = {number: size - rate[number] * step for number, size in left.items()}
        for number in [number for number, size in left.items() if size == 0]:
            end = max(end, now + Fraction(latency_s) + Fraction(flows[number].add_s))
            del left[number]
    return float(end)


def fair_shares(links: dict[int, tuple[int, ...]]) -> dict[int, Fraction]:
    free = {link: Fraction(1) for each in links.values() for link in each}
    settled: dict[int, Fraction] = {}
    while len(settled) < len(links):
        users = {
            link: [number for number in links if link in links[number] and number not in settled]
            for link in free
        }
        share, tight = min((free[link] / len(on), link) for link, on in users.items() if on)
        for number in users[tight]:
            settled[number] = share
            for link in links[number]:
                free[link] -= share
    return settled


flow = st.builds(
    Flow,
    st.just(0),
    st.integers(0, 3),
    st.integers(4, 7),
    st.sampled_from([1.0, 2.0, 3.5, 5.0, 8.25]),
    st.sets(st.integers(0, 6), min_size=1, max_size=4).map(lambda links: tuple(sorted(links))),
    st.sampled_from([0.0, 1.5]),
)


@cases(100)
@given(st.lists(flow, min_size=1, max_size=14), st.sampled_from([0.0, 0.75]))
def test_shares_on_any_routes_are_those_of_a_plain_reference(
    flows: list[Flow], latency_s: float
) -> None:
    assert played_s(flows, 7, latency_s) == pytest.approx(reference_s(flows, latency_s), rel=1e-9)


def test_one_switch_is_the_reference_network_too() -> None:
    made = plan("allreduce", "halving-doubling", 6)
    [part] = made.parts
    moves = [
        Move(int(number), int(source), int(target), Fraction(int(count)), Fraction(0))
        for number, source, target, count in zip(
            part.round, part.source, part.target, part.block_count, strict=True
        )
    ]
    expected = float(ReferenceNetwork([moves], Fraction(1), Fraction(2), 1).play())
    cluster = one_switch(workers=6, rate_bps=8.0, latency_s=2.0)
    found = collective_time("allreduce", "halving-doubling", cluster, made.blocks)
    assert found.time_s == pytest.approx(expected, rel=1e-9)


def test_the_same_play_takes_the_same_time_to_the_last_bit() -> None:
    fabric = pod(6, slow=(OtherHost(node=3, nic_rate_bps=50e9),))
    times = {collective_time("allreduce", "multi-ring", fabric, 10**7).time_s for _ in range(3)}
    assert len(times) == 1


def test_progress_is_told_and_ends_below_what_there_is() -> None:
    heard: list[tuple[int, int]] = []
    collective_time("allreduce", "ring", pod(32), 10**8, told=lambda *each: heard.append(each))
    assert len(heard) > 1
    assert heard == sorted(heard)
    assert all(done <= whole for done, whole in heard)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"order": [0, 0, 1]}, "order: expected 64 different devices"),
        ({"algorithm": "in-network", "order": range(64)}, "order: switches add what is cabled"),
        ({"level": "closed", "algorithm": "tree"}, "no closed form is exact for allreduce by"),
        ({"chunks": 0}, "chunks: expected a whole number"),
        ({"chunks": 10**9}, "different transfers"),
    ],
)
def test_what_cannot_be_played_is_refused(wish: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {
        "op": "allreduce",
        "algorithm": "hierarchical",
        "size_bytes": 2**20,
    } | wish
    with pytest.raises(UsageError, match=said):
        collective_time(cluster=pod(8), **asked)


def test_columns_that_cannot_be_are_refused_before_they_are_followed() -> None:
    good = Flow(0, 0, 1, 1.0, (0,))
    for bad in (
        good._replace(links=(3,)),
        good._replace(size=float("nan")),
        good._replace(source=-1),
        good._replace(add_s=-1.0),
    ):
        with pytest.raises(ValueError, match="cannot be"):
            played_s([bad], 1)
    none, one = np.empty(0, np.int32), np.ones(1, np.int32)
    with pytest.raises(ValueError, match="cannot be"):
        _native.fold(1, one - 1, one, np.zeros(2, np.int64), none, one, none)


def test_a_chain_of_a_million_ranks_is_refused_with_a_bound_before_it_is_stated() -> None:
    where = one_switch(workers=10**6, rate_bps=1e10, latency_s=0.0)
    with pytest.raises(UsageError, match="at most 100,000 are played: ask with --level closed"):
        collective_time("broadcast", "ring", where, 2**20)
    assert collective_time("broadcast", "ring", where, 2**20, level="closed").time_s > 0
