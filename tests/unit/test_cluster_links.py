"""Described clusters: their links, and the links that a transfer uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullwire.clusters.cluster import (
    CORE,
    SPINE,
    Cluster,
    Inside,
    LeafSpine,
    Nics,
    OneSwitch,
    OtherHost,
    Torus,
    one_switch,
    with_nodes,
)
from fullwire.collectives.placed import routes
from fullwire.errors import UsageError
from tests.strategies import cases, fabrics

NVSWITCH = Inside(kind="switch", rate_bps=3.6e12, latency_s=1e-6)
RAILS = Cluster(
    name="rails",
    nodes=6,
    devices_per_node=4,
    inside=NVSWITCH,
    nics=Nics(rate_bps=4e11, per_node=4, latency_s=2e-6),
    network=LeafSpine(nodes_per_leaf=2, oversubscription=2, by_rail=True, latency_s=3e-6),
)
FAT_TREE = replace(RAILS, network=LeafSpine(nodes_per_leaf=2, oversubscription=2, latency_s=3e-6))


def route(fabric: Cluster, source: int, target: int) -> Sequence[str]:
    found = routes(fabric, [source], [target])
    assert found.begin.tolist() == [0, len(found.link)]
    return [fabric.link_names[link] for link in found.link.tolist()]


def latency_s(fabric: Cluster, source: int, target: int) -> float:
    return float(routes(fabric, [source], [target]).latency_s[0])


def all_pairs(fabric: Cluster) -> tuple[np.ndarray, np.ndarray]:
    source, target = np.divmod(np.arange(fabric.devices**2), fabric.devices)
    return source, target


def test_a_transfer_inside_a_node_uses_no_nic() -> None:
    assert route(RAILS, 1, 3) == ["node0.device1.up", "node0.device3.down"]
    assert latency_s(RAILS, 1, 3) == 1e-6
    assert route(RAILS, 3, 3) == []
    assert latency_s(RAILS, 3, 3) == 0


def test_a_transfer_on_its_rail_stays_on_its_leaf() -> None:
    assert route(RAILS, 1, 5) == ["node0.nic1.up", "node1.nic1.down"]
    assert latency_s(RAILS, 1, 5) == 2e-6


def test_a_transfer_to_another_rail_changes_rails_inside_its_node() -> None:
    path = ["node0.device1.up", "node0.device3.down", "node0.nic3.up", "node1.nic3.down"]
    assert route(RAILS, 1, 7) == path
    assert latency_s(RAILS, 1, 7) == pytest.approx(3e-6)


def test_a_transfer_to_another_leaf_crosses_the_spine() -> None:
    assert route(RAILS, 1, 9) == [
        "node0.nic1.up",
        "leaf0.rail1.spine.up",
        "leaf1.rail1.spine.down",
        "node2.nic1.down",
    ]
    assert route(FAT_TREE, 1, 9)[1:3] == ["leaf0.spine.up", "leaf1.spine.down"]
    assert latency_s(FAT_TREE, 1, 9) == pytest.approx(5e-6)


def test_what_leaves_a_node_of_pcie_goes_over_the_devices_lanes() -> None:
    fabric = Cluster(
        name="pcie",
        nodes=2,
        devices_per_node=2,
        nics=Nics(rate_bps=1e11),
        inside=Inside(kind="pcie", rate_bps=1e11),
    )
    assert route(fabric, 0, 3) == [
        "node0.device0.up",
        "node0.nic0.up",
        "node1.nic0.down",
        "node1.device1.down",
    ]


def test_in_a_torus_a_transfer_goes_along_the_row_then_the_column_the_shorter_way() -> None:
    fabric = Cluster(
        name="torus",
        nodes=20,
        nics=Nics(rate_bps=1e11, per_node=4, latency_s=1e-6),
        network=Torus(rows=4, columns=5),
    )
    assert route(fabric, 0, 1) == ["node0.east"]
    assert route(fabric, 0, 13) == ["node0.west", "node4.west", "node3.south", "node8.south"]
    assert latency_s(fabric, 0, 13) == pytest.approx(4e-6)


def test_uplinks_carry_what_their_ports_do_divided_by_the_oversubscription() -> None:
    of_spine = [name for name in RAILS.link_names if "spine" in name]
    assert len(of_spine) == 3 * 4 * 2  # three leaves a rail, up and down
    rates_bps = RAILS.link_rate_bps[RAILS.link_kind == SPINE]
    assert set(rates_bps) == {2 * 4e11 / 2}
    assert set(FAT_TREE.link_rate_bps[FAT_TREE.link_kind == SPINE]) == {8 * 4e11 / 2}
    one_leaf = replace(FAT_TREE, network=LeafSpine(nodes_per_leaf=6, oversubscription=2))
    assert not (one_leaf.link_kind == SPINE).any()


def test_between_pods_a_transfer_goes_through_the_core_and_within_one_it_does_not() -> None:
    for by_rail, rail in ((False, ""), (True, ".rail1")):
        network = LeafSpine(
            nodes_per_leaf=1,
            oversubscription=2,
            by_rail=by_rail,
            latency_s=3e-6,
            leaves_per_pod=2,
            core_oversubscription=4,
        )
        pods = replace(RAILS, network=network)
        assert route(pods, 1, 5)[1:-1] == [f"leaf0{rail}.spine.up", f"leaf1{rail}.spine.down"]
        assert route(pods, 1, 9)[1:-1] == [
            f"leaf0{rail}.spine.up",
            f"pod0{rail}.core.up",
            f"pod1{rail}.core.down",
            f"leaf2{rail}.spine.down",
        ]
        assert (latency_s(pods, 1, 5), latency_s(pods, 1, 9)) == pytest.approx((5e-6, 8e-6))
        ports = 1 if by_rail else 4
        assert pods.pods == 3 * (4 if by_rail else 1)
        assert pods.core_rate_bps == 2 * (ports * 4e11 / 2) / 4
        assert set(pods.link_rate_bps[pods.link_kind == CORE]) == {pods.core_rate_bps}
        assert with_nodes(pods, 2).pods == 0


def test_a_slow_host_is_slow_both_ways() -> None:
    slow = replace(FAT_TREE, other_hosts=(OtherHost(node=3, nic_rate_bps=1e11),))
    different = np.flatnonzero(slow.link_rate_bps != FAT_TREE.link_rate_bps)
    assert {slow.link_names[link].split(".")[0] for link in different.tolist()} == {"node3"}
    assert len(different) == 2 * 4
    torus = Cluster(
        name="torus",
        nodes=9,
        nics=Nics(rate_bps=2e11, per_node=4),
        network=Torus(rows=3, columns=3),
        other_hosts=(OtherHost(node=4, nic_rate_bps=1e11),),
    )
    slower = [
        torus.link_names[link] for link in np.flatnonzero(torus.link_rate_bps == 1e11).tolist()
    ]
    assert set(slower) == {
        "node4.east",
        "node4.west",
        "node4.south",
        "node4.north",
        "node3.east",
        "node5.west",
        "node1.south",
        "node7.north",
    }


def test_fewer_nodes_are_the_first_ones() -> None:
    slow = replace(FAT_TREE, other_hosts=(OtherHost(node=3, nic_rate_bps=1e11),))
    assert with_nodes(slow, 4).other_hosts == slow.other_hosts
    assert with_nodes(slow, 3).other_hosts == ()
    assert with_nodes(slow, 60).devices == 240


def test_headers_take_their_share_of_a_link() -> None:
    fabric = Cluster(name="tcp", nodes=2, nics=Nics(rate_bps=1e11, payload_share=0.95))
    assert fabric.link_rate_bps.tolist() == [0.95e11] * 4


@cases(60)
@given(st.integers(1, 9), st.data())
def test_workers_around_one_switch_are_the_simplest_cluster(
    workers: int, data: st.DataObject
) -> None:
    slow = data.draw(st.dictionaries(st.integers(0, workers - 1), st.floats(1e3, 1e12)))
    cluster = one_switch(workers=workers, rate_bps=1e10, latency_s=5e-6, other_rates_bps=slow)
    rates_bps = [cluster.node_rate_bps(worker) for worker in range(workers)]
    assert cluster.devices == workers
    assert cluster.link_rate_bps.tolist() == rates_bps * 2
    for source in range(workers):
        for target in set(range(workers)) - {source}:
            assert route(cluster, source, target) == [
                f"node{source}.nic0.up",
                f"node{target}.nic0.down",
            ]
            assert latency_s(cluster, source, target) == 5e-6


@cases(150)
@given(fabrics())
def test_every_route_leads_from_its_source_to_its_target(fabric: Cluster) -> None:
    source, target = all_pairs(fabric)
    found = routes(fabric, source, target)
    for number, (one, other) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        links = found.link[found.begin[number] : found.begin[number + 1]].tolist()
        path = [fabric.link_names[link] for link in links]
        assert len(set(path)) == len(path)
        assert bool(path) == (one != other)
        if path:
            from_node, to_node = one // fabric.devices_per_node, other // fabric.devices_per_node
            assert follow(path, fabric, from_node) == to_node


def follow(path: Sequence[str], fabric: Cluster, node: int) -> int:
    """Walk along a path by the names of its links, and return the node where it ends."""
    switch: str | None = None  # the switch where the transfer is, or None in a node
    for link in path:
        place, _, way = link.rpartition(".")
        if way in ("east", "west", "south", "north"):
            assert place == f"node{node}"
            node = neighbour(fabric, node, way)
        elif "spine" in place or "core" in place:
            switch = place
        elif "device" in place:
            assert place.startswith(f"node{node}.")
        elif way == "up":
            assert place.startswith(f"node{node}.")
            switch = "leaf"
        else:
            assert switch is not None
            switch, node = None, int(re.findall(r"\d+", place)[0])
    assert switch is None
    return node


def neighbour(fabric: Cluster, node: int, way: str) -> int:
    assert isinstance(fabric.network, Torus)
    row, column = divmod(node, fabric.network.columns)
    down, right = {"east": (0, 1), "west": (0, -1), "south": (1, 0), "north": (-1, 0)}[way]
    return (row + down) % fabric.network.rows * fabric.network.columns + (
        column + right
    ) % fabric.network.columns


@cases(60)
@given(fabrics())
def test_every_link_has_a_name_of_its_own_a_rate_and_a_kind(fabric: Cluster) -> None:
    names = list(fabric.link_names)
    assert len(names) == len(set(names)) == fabric.link_count
    assert len(fabric.link_rate_bps) == len(fabric.link_kind) == fabric.link_count
    assert (fabric.link_rate_bps > 0).all()


@cases(60)
@given(fabrics())
def test_on_rails_nothing_goes_from_rail_to_rail(fabric: Cluster) -> None:
    if not isinstance(fabric.network, LeafSpine) or not fabric.network.by_rail:
        fabric = RAILS
    found = routes(fabric, *all_pairs(fabric))
    for begin, end in zip(found.begin[:-1], found.begin[1:], strict=True):
        path = [fabric.link_names[link] for link in found.link[begin:end]]
        assert len({rail for link in path for rail in re.findall(r"(?:nic|rail)(\d+)", link)}) <= 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"nodes": 0}, "nodes: expected at least 1, got 0"),
        ({"nodes": 10**7}, "devices: expected at most 1,000,000, got 40,000,000"),
        ({"inside": None}, "inside: expected the links between the 4 devices of a node"),
        (
            {"nics": Nics(rate_bps=1e11, per_node=3)},
            "nics.per_node: 4 devices cannot be shared out evenly among 3 NICs: "
            "name each device's in nics.of_device",
        ),
        (
            {"nics": Nics(rate_bps=1e11, per_node=8)},
            "nics.per_node: expected at most one for each of 4 devices, got 8: "
            "describe the NICs of one device as one NIC of their common rate",
        ),
        (
            {"nics": Nics(rate_bps=1e11, per_node=2, of_device=(0, 1, 2, 0))},
            "nics.of_device: expected a NIC from 0 to 1 for each of 4 devices, got 0, 1, 2, 0",
        ),
        (
            {"network": Torus(rows=2, columns=2)},
            "network: 2 rows x 2 columns are 4 nodes, expected 6",
        ),
        (
            {"other_hosts": (OtherHost(node=6, nic_rate_bps=1e9),)},
            "hosts.node: expected a node from 0 to 5, each once, got 6",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        replace(RAILS, **changes)  # type: ignore[arg-type]
    assert str(refused.value) == sentence


def test_rates_shares_and_times_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match=r"nics\.rate: expected a rate in bit/s above 0, got -1"):
        Nics(rate_bps=-1)
    with pytest.raises(UsageError, match=r"inside\.payload_share: expected above 0, up to 1"):
        Inside(kind="switch", rate_bps=1, payload_share=1.5)
    with pytest.raises(UsageError, match=r"network\.oversubscription: expected a ratio above 0"):
        LeafSpine(nodes_per_leaf=1, oversubscription=0)
    with pytest.raises(UsageError, match="routes: expected devices from 0 to 23"):
        routes(RAILS, [0], [24])
    with pytest.raises(UsageError, match="routes: expected as many targets as sources"):
        routes(RAILS, [0, 1], [2])
    assert len(routes(RAILS, [], [])) == 0
    assert replace(RAILS, network=OneSwitch()).leaves == 0
