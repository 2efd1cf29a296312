"""Answers about described clusters: predictions, collectives, drawings, and the slow part."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.clusters import cluster, names
from fullwire.clusters.cluster import Cluster, Nics, OtherHost, one_switch
from fullwire.collectives.library import FITTED_OPS
from fullwire.collectives.playing import TunedTime
from fullwire.errors import UsageError
from fullwire.findings.collective import collective_findings
from fullwire.report.cluster import cluster_sentence, drawing, print_cluster, some
from fullwire.units import show_time
from fullwire.words import sentences
from tests.conftest import Cli
from tests.strategies import cases, fabrics

TWO_TO_ONE = Path(__file__).resolve().parents[2] / "examples" / "two-to-one.toml"


@cases(25)
@given(
    st.integers(1, 40),
    st.floats(1e8, 1e12),
    st.floats(0, 1e-3),
    st.sampled_from(["ring", "tree", "halving-doubling"]),
    st.booleans(),
)
def test_workers_around_a_switch_are_predicted_alike_however_they_are_described(
    workers: int, rate_bps: float, latency_s: float, algorithm: str, gathers: bool
) -> None:
    conditions: dict[str, Any] = {
        "algorithm": algorithm,
        "codec": "4,20GB/s,20GB/s,gather" if gathers else None,
    }
    plain = fw.whatif(
        "resnet50@v100", workers=workers, bandwidth=rate_bps, latency=latency_s, **conditions
    )
    fabric = one_switch(workers=workers, rate_bps=rate_bps, latency_s=latency_s)
    described = fw.whatif("resnet50@v100", cluster=fabric, **conditions)
    for name, column in plain.columns().items():
        assert described[name].tolist() == column.tolist(), name
    one = fw.collective("allreduce", bytes=10**6, level="closed", cluster=fabric)
    alike = fw.collective(
        "allreduce",
        bytes=10**6,
        level="closed",
        workers=workers,
        bandwidth=rate_bps,
        latency=latency_s,
    )
    assert one.time_s == pytest.approx(alike.time_s, rel=1e-12)


def test_a_grid_on_a_cluster_equals_its_points() -> None:
    conditions: dict[str, Any] = {
        "cluster": TWO_TO_ONE,
        "algorithm": "ring,tree",
        "placement": "scattered",
    }
    grid = fw.whatif(
        ["vgg16@v100", "resnet50@v100"],
        nodes="8,16",
        bandwidth="25Gbps,100Gbps",
        compression="1,4",
        **conditions,
    )
    assert len(grid) == 32
    for row in grid.rows():
        point = fw.whatif(
            row["run"],
            workers=row["workers"],
            bandwidth=row["bandwidth_bps"],
            compression=row["compression"],
            **{**conditions, "algorithm": row["algorithm"]},
        )
        assert next(point.rows()) == row


def test_every_algorithm_that_a_cluster_offers_is_predicted() -> None:
    offered = "ring,hierarchical,hierarchical-halving-doubling,multi-ring,in-network"
    result = fw.whatif("vgg16@v100", cluster="dgx-h100", nodes="2,16", algorithm=offered)
    assert len(result) == 10
    step_s = dict(zip(result["algorithm"], result["step_s"], strict=True))  # the last: 16 nodes
    assert step_s["multi-ring"] < step_s["ring"]
    assert step_s["hierarchical"] < step_s["ring"]
    assert result["network_utilization"].max() <= 1
    [usual] = fw.whatif("vgg16@v100", cluster="dgx-h100", nodes=16)["algorithm"]
    assert usual == "multi-ring"
    tuned = fw.whatif("vgg16@v100", cluster="dgx-h100", nodes=16, algorithm="auto")
    assert tuned["step_s"][0] <= min(step_s["multi-ring"], step_s["hierarchical"])
    with pytest.raises(UsageError, match=r"expected all 8 devices .*, got 12 workers"):
        fw.whatif("vgg16@v100", cluster="dgx-h100", workers=12, algorithm="in-network")
    with pytest.raises(UsageError, match="algorithm: expected ring or tree"):
        fw.whatif("vgg16@v100", workers=8, algorithm="hierarchical")


def test_the_algorithm_of_the_default_answer_can_be_played_where_a_node_is_not_full() -> None:
    asked: dict[str, Any] = {"bytes": "96MB", "workers": 12, "cluster": "dgx-h100"}
    usual = fw.collective("alltoall", **asked)
    played = fw.collective("alltoall", level="event", algorithm=usual.algorithm, **asked)
    assert played.algorithm == fw.collective("alltoall", level="event", **asked).algorithm
    assert played.transfers == 12 * 11
    nic_s = 8 * 96e6 * 8 / 12 / cluster("dgx-h100").nics.rate_bps  # of a device in the last node
    assert nic_s < played.time_s < 4 * nic_s


def test_a_cluster_without_a_startup_has_the_usual_one_and_the_answer_says_so() -> None:
    stated = dataclasses.replace(cluster("dgx-h100"), startup_s=1e-9)
    small: dict[str, Any] = {"nodes": 4, "buckets": "none"}
    without = fw.whatif("resnet50@v100", cluster=stated, **small)
    usual = fw.whatif("resnet50@v100", cluster="dgx-h100", **small)
    assert without["communication_s"][0] + 100 * 56e-6 < usual["communication_s"][0]
    told = "dgx-h100 states no start-up: each collective takes 56 us more"
    assert any(told in note for note in usual.warnings)
    assert not any("start-up" in note for note in without.warnings)


@pytest.mark.parametrize("op", FITTED_OPS)
def test_a_stated_startup_changes_the_startup_alone(op: str) -> None:
    """Two descriptions of one machine, of which one states a start-up, once differed twofold."""
    machine = cluster("nd-a100-v4", 2)
    for startup_s in (1e-6, 45e-6, 86e-6):
        stated = dataclasses.replace(machine, startup_s=startup_s)
        for size in ("16KiB", "1GiB"):
            without = fw.collective(op, bytes=size, cluster=machine)
            found = fw.collective(op, bytes=size, cluster=stated)
            assert abs(found.time_s - without.time_s) <= abs(startup_s - 45e-6) * (1 + 1e-9)
        assert found.interval is not None
        assert found.interval.low_s < without.time_s < found.interval.high_s
        told = " ".join(sentences([*collective_findings(found)]))
        assert f"nd-a100-v4 states a start-up of {show_time(startup_s)}" in told
        assert "states no start-up" not in told


@pytest.mark.parametrize("size", ["1MiB", "1GiB"])
def test_scattered_ranks_are_timed_as_packed_ones_are(size: str) -> None:
    """Libraries' protocols were once left out of their time alone, so that they looked quicker."""
    for name, nodes in (("dgx-h100", 40), (TWO_TO_ONE, None)):
        asked: dict[str, Any] = {"bytes": size, "cluster": name, "nodes": nodes}
        packed = fw.collective("allreduce", **asked)
        scattered = fw.collective("allreduce", placement="scattered", **asked)
        assert scattered.level == packed.level == "usual"
        assert scattered.time_s >= packed.time_s * (1 - 1e-9)
        assert scattered.times_packed == pytest.approx(scattered.time_s / packed.time_s)
        assert scattered.interval is not None
        assert scattered.interval.low_s <= packed.time_s <= scattered.interval.high_s
        told = " ".join(sentences([*collective_findings(scattered)]))
        assert "Ranks in this order take" in told
        assert packed.times_packed is None
    auto = fw.collective("allreduce", algorithm="auto", placement="scattered", **asked)
    assert isinstance(auto, TunedTime)
    assert auto.time_s <= scattered.time_s
    assert auto.library_ways


@pytest.mark.parametrize("name", sorted(names()))
def test_no_interval_begins_below_the_time_of_all_bytes_at_the_line_rate(name: str) -> None:
    for nodes in (2, 4, 8):
        machine = cluster(name, nodes)
        if machine.is_torus:
            continue
        found = fw.collective("alltoall", bytes="4GiB", cluster=machine)
        assert found.interval is not None
        away = 1 - 1 / nodes  # the share of a device's bytes that leaves its node
        on_nics = machine.nics.rate_bps * machine.nics_per_node / machine.devices_per_node
        assert found.interval.low_s >= 8 * 2**32 / machine.devices * away / on_nics * (1 - 1e-9)


def test_what_is_not_said_is_as_the_cluster_has_it() -> None:
    result = fw.whatif("resnet50@v100", cluster="p3dn", nodes=2)
    assert result["workers"].tolist() == [16]
    assert result["bandwidth_bps"].tolist() == [100e9]
    assert result["latency_s"].tolist() == [20e-6]


def test_the_spine_is_to_blame_where_ranks_are_scattered_and_not_where_they_are_packed() -> None:
    packed, scattered = fw.whatif("vgg16@v100", cluster=TWO_TO_ONE).suspicions
    assert packed.worst is not None
    assert scattered.worst is not None
    assert (packed.worst.links, scattered.worst.links) == ("NICs", "spine uplinks")
    assert (packed.busiest, scattered.busiest) == ("NICs", "spine uplinks")
    assert scattered.worst.step_s == pytest.approx(packed.step_s, rel=0.01)
    spine = packed.of("spine uplinks")
    assert spine is not None
    assert spine.step_s == pytest.approx(packed.step_s, rel=1e-6)


def test_the_sentence_says_which_links_and_what_a_wider_spine_would_give() -> None:
    packed, scattered = sentences(fw.whatif("vgg16@v100", cluster=TWO_TO_ONE).holding_back)
    assert packed.startswith(
        "vgg16@v100, 128 workers of two-to-one: the NICs hold it back: with NICs twice as fast"
    )
    assert packed.endswith("the 2:1 spine does not: a 1:1 spine would change little.")
    assert "scattered over the leaves: the uplinks of the 2:1 spine hold it back" in scattered
    [fast] = sentences(fw.whatif("resnet50@v100", cluster="dgx-h100", nodes=4).holding_back)
    assert fast.startswith("resnet50@v100, 32 workers of dgx-h100: no link holds it back: a step")


def test_a_replay_on_a_cluster_is_the_point_of_its_grid() -> None:
    run = fw.replay("resnet50@v100", cluster=TWO_TO_ONE, placement="scattered")
    point = fw.whatif("resnet50@v100", cluster=TWO_TO_ONE, placement="scattered")
    length_ns = run.spans.end_ns.max() - run.spans.start_ns.min()
    assert length_ns * 1e-9 == pytest.approx(point["step_s"][0], abs=2e-9)


def test_a_search_for_a_target_knows_the_cluster() -> None:
    result = fw.whatif("vgg16@v100", cluster=TWO_TO_ONE, target=0.9)
    assert result.targets is not None
    [needed] = result.targets.least_bandwidth
    assert needed.bandwidth_bps is not None
    asked = fw.whatif("vgg16@v100", cluster=TWO_TO_ONE, bandwidth=needed.bandwidth_bps)
    assert asked["scaling_factor"][0] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("conditions", "sentence"),
    [
        ({"nodes": 2}, "nodes: expected a described cluster with them"),
        ({"cluster": "p3dn", "nodes": 2, "workers": 8}, "expected nodes or workers, got both"),
        ({"cluster": "p3dn", "nodes": 0}, "nodes: expected a whole number from 1"),
        ({"cluster": "p3dn", "placement": "scattered"}, "expected a cluster with some"),
        ({"cluster": "p3dn", "placement": "odd"}, "placement: expected packed or scattered, got"),
        ({"cluster": "p3dx"}, "expected a file or the built-in p3dn, got 'p3dx'"),
    ],
)
def test_conditions_that_cannot_be_are_refused(conditions: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        fw.whatif("resnet50@v100", **conditions)


def test_a_collective_on_a_cluster_names_its_bottleneck(cli: Cli) -> None:
    where = ["allreduce", "--bytes", "64MiB", "--cluster", TWO_TO_ONE, "--json"]
    played = ["collective", *where, "--level", "event"]
    packed = json.loads(cli(*played).stdout)
    scattered = json.loads(cli(*played, "--placement", "scattered").stdout)
    assert (packed["workers"], packed["cluster"], packed["busiest"]) == (128, "two-to-one", "NICs")
    assert scattered["busiest"] == "spine uplinks"
    assert scattered["time_s"] == pytest.approx(2 * packed["time_s"], rel=0.05)
    usual = json.loads(cli("collective", *where).stdout)
    assert (usual["level"], usual["busiest"]) == ("usual", "NICs")
    assert usual["interval"]["low_s"] < usual["time_s"] < usual["interval"]["high_s"]
    alone = cli("collective", "allreduce", "--bytes", "1MB")
    assert "expected workers and bandwidth, or a described cluster" in alone.stderr


def test_clusters_are_listed_shown_printed_and_drawn(cli: Cli, tmp_path: Path) -> None:
    listed = json.loads(cli("cluster", "list", "--json").stdout)["clusters"]
    assert [each["name"] for each in listed] == list(names())
    shown = cli("cluster", "show", TWO_TO_ONE).stdout
    assert "two-to-one: 16 nodes of 8 devices (128 in all), a fat tree, 4 nodes a leaf" in shown
    assert "╔═" in shown
    printed = tmp_path / "again.toml"
    printed.write_text(cli("cluster", "show", TWO_TO_ONE, "--toml").stdout)
    assert cluster(printed) == cluster(TWO_TO_ONE)
    picture = tmp_path / "cluster.svg"
    large = cli("cluster", "show", "dgx-h100", "--nodes", "2048", "--plot", picture, "--json")
    assert json.loads(large.stdout)["devices"] == 16_384
    drawn = picture.read_text()
    assert "spine" in drawn
    assert "node2016 to 2047" in drawn


def test_mistakes_in_a_file_are_one_line(cli: Cli, tmp_path: Path) -> None:
    ours = tmp_path / "ours.toml"
    ours.write_text(TWO_TO_ONE.read_text().replace('rate = "25Gbps"', 'rate = "25"'))
    done = cli("whatif", "vgg16@v100", "--cluster", ours)
    assert done.returncode == 2
    assert done.stderr == (
        f"fullwire: {ours}: nics.rate: expected a rate with its unit, like 10Gbps or 50GiB/s, "
        "got '25'\n"
    )


@cases(40)
@given(fabrics())
def test_any_cluster_can_be_drawn(fabric: Cluster) -> None:
    lines = list(drawing(fabric))
    assert any("▣" in line for line in lines)
    assert max(len(line) for line in lines) < 120
    assert f"({fabric.devices:,} in all)" in cluster_sentence(fabric)
    print_cluster(fabric)


def test_of_many_the_first_and_the_last_are_drawn() -> None:
    assert some(3, 5) == [0, 1, 2]
    assert some(100, 5) == [0, 1, 2, None, 99]


def test_a_grid_of_a_hundred_thousand_points_stays_one_of_arrays() -> None:
    result = fw.whatif(
        "resnet50@v100",
        cluster="p3dn",
        workers=range(8, 808, 8),
        bandwidth=np.geomspace(1e9, 1e12, 100),
        compression=range(1, 11),
    )
    assert len(result) == 100_000
    assert np.isfinite(result["step_s"]).all()


def test_slow_hosts_and_latencies_are_suspects_too() -> None:
    even = Cluster(name="ours", nodes=6, nics=Nics(rate_bps=100e9, latency_s=5e-6))
    slow = dataclasses.replace(even, other_hosts=(OtherHost(node=1, nic_rate_bps=25e9),))
    [blamed] = fw.whatif("vgg16@v100", cluster=slow).suspicions
    assert blamed.worst is not None
    assert (blamed.worst.links, blamed.worst.change) == ("slow hosts", "every host at 100 Gbps")
    as_even = fw.whatif("vgg16@v100", cluster=even)["step_s"][0]
    assert blamed.worst.step_s == pytest.approx(as_even)
    far = dataclasses.replace(even, nics=Nics(rate_bps=100e9, latency_s=50e-3))
    [sentence] = sentences(fw.whatif("vgg16@v100", cluster=far).holding_back)
    assert "6 workers of ours: the latencies hold it back: with none a step would take" in sentence


def test_nics_and_a_spine_as_wide_as_they_are_are_blamed_together() -> None:
    """Over the leaves of a 1:1 spine, a faster NIC or a faster spine alone would not help."""
    packed, scattered = fw.whatif(
        "llama3-8b@h100", cluster="dgx-h100", nodes=64, algorithm="ring"
    ).suspicions
    assert packed.worst is not None
    assert packed.worst.links == "NICs"
    assert scattered.worst is not None
    assert scattered.worst.links == "NICs and the spine's uplinks together"
    assert scattered.worst.step_s < 0.99 * scattered.step_s


@pytest.mark.parametrize("algorithm", ["hierarchical", "multi-ring", "in-network", "ring"])
def test_a_step_that_was_written_is_explained_by_what_its_links_had_to_carry(
    algorithm: str, tmp_path: Path
) -> None:
    step = fw.replay("gpt2@a100", cluster="dgx-a100", nodes=2, algorithm=algorithm)
    found = fw.explain(fw.write(step, tmp_path / "step.run"))
    lost = found.account["line_rate"] + found.account["latency"]
    assert lost == pytest.approx(found.step_s - found.account["compute"], rel=0.05)
    assert found.predictor is not None
    assert found.predictor.ask().step_s == pytest.approx(found.step_s, rel=1e-6)
    assert not any("of what the line rate allows" in each for each in found.warnings)
