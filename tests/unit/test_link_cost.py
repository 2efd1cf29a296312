"""Collectives on described clusters in closed form: right where the answer is known otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullwire.clusters import cluster
from fullwire.clusters.cluster import (
    Cluster,
    Inside,
    LeafSpine,
    Nics,
    OtherHost,
    Torus,
    one_switch,
    scattered,
    with_workers,
)
from fullwire.collectives.closed_form import cost
from fullwire.collectives.cost import AddTimes
from fullwire.collectives.link_cost import LinkCost, collective_cost
from fullwire.collectives.playing import collective_time
from fullwire.collectives.registry import OPS, fitting, with_formula
from fullwire.simulation.on_links import believed_cost
from tests.strategies import cases, fabrics

KNOWN = [(op, algorithm) for op in OPS for algorithm in with_formula(op)]
FAT_TREE = Cluster(
    name="fat tree",
    nodes=16,
    devices_per_node=8,
    nics=Nics(rate_bps=100e9, latency_s=10e-6),
    inside=Inside(kind="switch", rate_bps=1200e9, latency_s=1e-6),
    network=LeafSpine(nodes_per_leaf=4, oversubscription=2, latency_s=2e-6),
)
RAILS = cluster("dgx-h100", 4)
TORUS = Cluster(
    name="torus",
    nodes=64,
    nics=Nics(rate_bps=100e9, per_node=4, latency_s=1e-6),
    network=Torus(rows=4, columns=16),
)
SLOW_BELOW_A_SPINE = replace(FAT_TREE, other_hosts=(OtherHost(node=3, nic_rate_bps=60e9),))


def fabric_cost(
    op: str, algorithm: str, fabric: Cluster, workers: int, *, is_scattered: bool = False
) -> LinkCost:
    order = scattered(fabric)[:workers] if is_scattered else None
    return collective_cost(op, algorithm, fabric, workers=workers, order=order)


def time_s(found: LinkCost, fabric: Cluster, size_bytes: float = 1e9) -> float:
    return float(found.time_s(size_bytes, 1 / fabric.nics.rate_bps))


@cases(60)
@given(
    st.sampled_from(KNOWN),
    st.integers(1, 17),
    st.floats(1e6, 1e12),
    st.floats(0, 1e-3),
    st.floats(1, 1e12),
)
def test_around_one_switch_it_is_the_cost_of_equal_links(
    known: tuple[str, str], workers: int, rate_bps: float, latency_s: float, size_bytes: float
) -> None:
    if known[1] == "halving-doubling" and known[0] != "allreduce":
        workers = 1 << (workers.bit_length() - 1)
    fabric = one_switch(workers=workers, rate_bps=rate_bps, latency_s=latency_s)
    plain = cost(*known, workers, size_bytes, AddTimes())
    found = fabric_cost(*known, fabric, workers)
    expected_s = float(plain.time_s(rate_bps, latency_s))
    assert time_s(found, fabric, size_bytes) == pytest.approx(expected_s, rel=1e-9)


def test_a_ring_is_as_fast_as_the_nics_between_nodes() -> None:
    found = fabric_cost("allreduce", "ring", FAT_TREE, 128)
    wire_s = 2 * 127 / 128 * 8e9 / 100e9
    assert time_s(found, FAT_TREE) == pytest.approx(wire_s + 12e-6)
    assert found.busiest(1e9, 1e-11) == "NICs"
    faster = float(found.time_s(1e9, 1 / 10e12))  # then the link between the devices decides
    assert faster == pytest.approx(2 * 127 / 128 * 8e9 / 1200e9, rel=0.01)


def test_a_small_message_around_a_ring_takes_its_latencies() -> None:
    found = fabric_cost("allreduce", "ring", FAT_TREE, 128)
    round_s = (112 * 1e-6 + 12 * 10e-6 + 4 * 12e-6) / 128
    assert time_s(found, FAT_TREE, 1) == pytest.approx(254 * round_s, rel=1e-3)


def test_a_spine_holds_back_ranks_that_are_scattered_over_its_leaves_and_no_others() -> None:
    wide = replace(FAT_TREE, network=LeafSpine(nodes_per_leaf=4, oversubscription=1))
    for is_scattered, slower in ((False, 1.0), (True, 2.0)):
        both = [
            fabric_cost("allreduce", "ring", each, 128, is_scattered=is_scattered)
            for each in (FAT_TREE, wide)
        ]
        narrow_s, wide_s = (time_s(each, FAT_TREE) for each in both)
        assert narrow_s / wide_s == pytest.approx(slower, rel=1e-3)
        assert both[0].busiest(1e9, 1e-11) == ("spine uplinks" if is_scattered else "NICs")


def test_a_slow_host_slows_all_and_stays_as_slow_at_faster_nics() -> None:
    slow = replace(FAT_TREE, other_hosts=(OtherHost(node=3, nic_rate_bps=25e9),))
    found = fabric_cost("allreduce", "ring", slow, 128)
    assert time_s(found, slow) == pytest.approx(2 * 127 / 128 * 8e9 / 25e9, rel=1e-3)
    assert float(found.time_s(1e9, 1 / 400e9)) == pytest.approx(time_s(found, slow), rel=1e-3)


@pytest.mark.parametrize(
    ("fabric", "algorithm"),
    [
        (TORUS, "torus"),
        (replace(TORUS, other_hosts=(OtherHost(node=5, nic_rate_bps=25e9),)), "torus"),
        (SLOW_BELOW_A_SPINE, "halving-doubling"),
        (SLOW_BELOW_A_SPINE, "hierarchical"),
    ],
)
def test_where_ranks_drift_apart_what_is_believed_is_what_events_say(
    fabric: Cluster, algorithm: str
) -> None:
    plain = collective_cost("allreduce", algorithm, fabric)
    found = believed_cost("allreduce", algorithm, fabric, fabric.devices)
    assert not plain.is_near
    for size_bytes in (10**3, 10**6, 10**9):
        played = collective_time("allreduce", algorithm, fabric, size_bytes)
        assert time_s(found, fabric, size_bytes) == pytest.approx(played.time_s, rel=0.05)


@pytest.mark.parametrize(
    ("op", "algorithm"),
    [("alltoall", "pairwise"), ("broadcast", "tree"), ("allreduce", "parameter-server")],
)
def test_where_steps_go_ways_of_their_own_events_are_believed(op: str, algorithm: str) -> None:
    fabric = replace(SLOW_BELOW_A_SPINE, other_hosts=())
    found = believed_cost(op, algorithm, fabric, fabric.devices)
    for size_bytes in (1024, 10**5, 10**9):
        played = collective_time(op, algorithm, fabric, size_bytes)
        assert time_s(found, fabric, size_bytes) == pytest.approx(played.time_s, rel=0.05)


def test_a_cluster_too_large_to_be_played_keeps_its_closed_form() -> None:
    large = replace(TORUS, nodes=4096, network=Torus(rows=32, columns=128))
    slow = replace(large, other_hosts=(OtherHost(node=5, nic_rate_bps=25e9),))
    assert believed_cost("allreduce", "torus", large, 4096).is_believed  # all but a few are alike
    plain = collective_cost("allreduce", "torus", slow)
    assert believed_cost("allreduce", "torus", slow, 4096) == plain
    assert not plain.is_believed


@pytest.mark.parametrize("algorithm", fitting("allreduce", RAILS))
@pytest.mark.parametrize("size_bytes", [10**5, 10**9])
def test_it_agrees_with_events_where_ranks_are_alike(algorithm: str, size_bytes: int) -> None:
    found = fabric_cost("allreduce", algorithm, RAILS, 32)
    played = collective_time("allreduce", algorithm, RAILS, size_bytes)
    near = {"tree": 0.6, "multi-ring": 0.09, "hierarchical-tree": 0.03}.get(algorithm, 0.011)
    assert time_s(found, RAILS, size_bytes) == pytest.approx(played.time_s, rel=near)


def test_eight_nics_of_a_node_carry_eight_times_as_much_as_one() -> None:
    one, all_eight, shared = (
        time_s(fabric_cost("allreduce", algorithm, RAILS, 32), RAILS)
        for algorithm in ("ring", "multi-ring", "hierarchical")
    )
    assert 7 < one / all_eight <= 8
    assert shared < one / 4


def test_scattered_ranks_are_each_on_a_device_of_their_own() -> None:
    device = scattered(FAT_TREE)
    assert sorted(device.tolist()) == list(range(128))
    assert device[:8].tolist() == list(range(8))
    assert device[8] == 4 * 8  # the first node of the next leaf


@cases(40)
@given(fabrics(), st.sampled_from(KNOWN), st.floats(1, 1e12), st.booleans())
def test_more_of_anything_never_takes_longer_and_more_bytes_never_less(
    fabric: Cluster, known: tuple[str, str], size_bytes: float, is_scattered: bool
) -> None:
    workers = fabric.devices
    if known[1] == "halving-doubling" and known[0] != "allreduce":
        workers = 1 << (workers.bit_length() - 1)
    found = fabric_cost(*known, fabric, workers, is_scattered=is_scattered)
    usual = time_s(found, fabric, size_bytes)
    assert float(found.time_s(size_bytes, 0.5 / fabric.nics.rate_bps)) <= usual
    assert time_s(found, fabric, 2 * size_bytes) >= usual
    assert np.isfinite(usual)
    smaller = with_workers(fabric, max(1, workers // 2))
    assert smaller.devices >= max(1, workers // 2)
