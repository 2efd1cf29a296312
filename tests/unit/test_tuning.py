"""Choosing an algorithm by its cost, and choosing settings out of many."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.answers.search import NEAR
from fullwire.clusters import cluster
from fullwire.clusters.cluster import Cluster, LeafSpine, one_switch
from fullwire.clusters.description import as_toml, described
from fullwire.collectives.closed_form import cost
from fullwire.collectives.cost import AddTimes
from fullwire.collectives.plan import plan_on
from fullwire.collectives.playing import TunedTime
from fullwire.collectives.registry import OPS, fitting, of_one_switch, open_to, with_formula
from fullwire.collectives.tuning import (
    around_a_switch,
    choices,
    ranges,
    tuned,
)
from fullwire.errors import UsageError
from fullwire.findings.collective import by_size, tuning_findings
from fullwire.words import sentence
from tests.builders import a_run
from tests.conftest import Cli
from tests.strategies import cases

TWO_TO_ONE = Path(__file__).resolve().parents[2] / "examples" / "two-to-one.toml"
WITH_FORMULA = [op for op in OPS if with_formula(op)]
clusters = st.builds(
    one_switch,
    workers=st.integers(2, 3000),
    rate_bps=st.floats(1e8, 1e12),
    latency_s=st.floats(0, 1e-3),
)


@given(st.sampled_from(WITH_FORMULA), clusters, st.integers(1, 2**34))
def test_nothing_applicable_is_cheaper_than_what_is_chosen(
    op: str, cluster: Cluster, size: int
) -> None:
    [found] = choices(around_a_switch(op, cluster, AddTimes()), [size])
    for each in open_to(op, cluster):
        time_s = cost(op, each, cluster.devices, size, AddTimes()).time_s(
            cluster.nics.rate_bps, cluster.nics.latency_s
        )
        assert found.time_s <= float(time_s)


def test_auto_tries_switches_that_add_where_the_description_has_them() -> None:
    plain = described(TWO_TO_ONE.read_text(), "two-to-one")
    network = plain.network
    assert isinstance(network, LeafSpine)
    adding = replace(plain, network=replace(network, adds=True))
    assert described(as_toml(adding), "printed") == adding
    assert set(open_to("allreduce", adding)) == {*open_to("allreduce", plain), "in-network"}
    assert "in-network" not in open_to("allreduce", adding, in_order=False)
    for size in ("64KiB", "16MiB"):
        found, without = (
            fw.collective("allreduce", bytes=size, cluster=each, algorithm="auto")
            for each in (adding, plain)
        )
        assert found.algorithm == "in-network"
        assert found.time_s < 0.7 * without.time_s
    steps_s = [
        float(
            fw.whatif("vgg16@v100", cluster=each, algorithm="auto", buckets="ddp:1MiB")["step_s"][0]
        )
        for each in (adding, plain)
    ]
    assert steps_s[0] < steps_s[1]
    by_name = fw.whatif("vgg16@v100", cluster=adding, algorithm="in-network", buckets="ddp:1MiB")
    assert len(by_name.suspicions) == 1  # switches add what is cabled to them, so not scattered
    torn = TWO_TO_ONE.read_text().replace('kind = "fat-tree"', 'kind = "fat-tree"\nadds = 1')
    with pytest.raises(UsageError, match=r"network\.adds: expected true or false, got 1"):
        described(torn, "torn")


@given(st.sampled_from(OPS), st.integers(1, 70))
def test_what_is_applicable_can_be_planned(op: str, workers: int) -> None:
    cluster = one_switch(workers=workers, rate_bps=1e9)
    for each in fitting(op, cluster):
        plan_on(op, each, cluster)


@given(clusters, st.data())
@cases(40)
def test_ranges_join_and_name_the_choice_at_both_of_their_ends(
    cluster: Cluster, data: st.DataObject
) -> None:
    times = around_a_switch("allreduce", cluster, AddTimes())
    served = list(ranges(times))
    assert served[0].from_bytes == 1
    assert served[-1].to_bytes is None
    for one, other in itertools.pairwise(served):
        assert other.from_bytes == (one.to_bytes or 0) + 1
        assert one.algorithm != other.algorithm
    for each in served:
        for size in (each.from_bytes, each.to_bytes):
            if size is not None:
                [found] = choices(times, [size])
                assert found.algorithm == each.algorithm


def test_beyond_a_power_of_two_small_messages_take_a_tree_and_large_ones_a_ring() -> None:
    cluster = one_switch(workers=48, rate_bps=100e9, latency_s=5e-6)
    found = tuned(around_a_switch("allreduce", cluster, AddTimes()))
    assert [each.algorithm for each in found.ranges] == ["tree", "ring"]
    assert [found.table[0].algorithm, found.table[-1].algorithm] == ["tree", "ring"]
    [switch] = [each.to_bytes for each in found.ranges if each.to_bytes]
    # 2 S / r (N-1)/N + 2 (N-1) L = 2 S / r + 12 L
    assert switch == pytest.approx((94 - 12) * 5e-6 * 100e9 / 8 / (2 * (1 - 47 / 48)), rel=1e-6)
    assert sentence(by_size(found.ranges)) == "tree up to 123 MB, ring beyond"


def test_without_latency_it_is_the_usual_one_and_that_is_said(cli: Cli) -> None:
    cluster = one_switch(workers=64, rate_bps=1e9)
    found = tuned(around_a_switch("allreduce", cluster, AddTimes()))
    assert sentence(by_size(found.ranges)) == "ring for every size"
    asked = ("--bytes", "1kB", "--workers", "8", "--bandwidth", "1Gbps", "--algorithm", "auto")
    said = cli("collective", "allreduce", *asked).stdout
    assert "The latency is 0, so fewer messages in a row gain nothing." in said


@pytest.mark.parametrize("size", ["4kB", "64KiB", "16MiB", "1GiB"])
@pytest.mark.parametrize(("name", "workers"), [("dgx-h100", 8), ("dgx-h100", 16), ("p3dn", 16)])
def test_auto_is_not_slower_than_what_a_library_takes(name: str, workers: int, size: str) -> None:
    asked: dict[str, Any] = {"bytes": size, "cluster": name, "workers": workers}
    plain = fw.collective("allreduce", **asked)
    tuned = fw.collective("allreduce", algorithm="auto", **asked)
    assert isinstance(tuned, TunedTime)
    assert tuned.time_s <= plain.time_s
    assert tuned.times_s[plain.algorithm] <= plain.time_s
    assert min(tuned.times_s, key=lambda way: tuned.times_s[way]) == tuned.algorithm


@pytest.mark.parametrize(("size", "workers"), [(2**26, 24), (2**22, 17), (3_000_000, 32)])
def test_the_table_of_sizes_says_what_the_answer_says(size: int, workers: int) -> None:
    found = fw.collective(
        "alltoall", bytes=size, workers=workers, cluster="dgx-h100", algorithm="auto"
    )
    assert isinstance(found, TunedTime)
    assert (found.algorithm, found.chunks > 1) == ("hierarchical", True)
    of_size = [
        one.algorithm
        for one in found.tuning.ranges
        if one.from_bytes <= size and (one.to_bytes is None or size <= one.to_bytes)
    ]
    assert of_size == ["hierarchical"]
    for row in found.tuning.table:
        if row.bytes == size:
            assert dict(row.times_s) == pytest.approx(dict(found.times_s))
    assert not found.tuning.in_one_piece


def test_chunks_that_would_take_long_for_all_sizes_are_said_to_be_left_out() -> None:
    found = fw.collective(
        "alltoall", bytes="1MiB", workers=31, cluster="dgx-h100", algorithm="auto"
    )
    assert isinstance(found, TunedTime)
    assert found.tuning.in_one_piece == ("hierarchical",)
    said = [sentence(finding) for finding in tuning_findings(found)]
    assert any("and hierarchical in one piece, because chunks of" in each for each in said)


def test_auto_tries_as_many_chunks_of_an_all_to_all_as_are_played_in_seconds() -> None:
    asked: dict[str, Any] = {"bytes": "64MiB", "cluster": "p3dn", "nodes": 8}
    found = fw.collective("alltoall", workers=63, algorithm="auto", **asked)
    assert (found.algorithm, found.chunks) == ("hierarchical", 8)
    busiest_s = (found.busiest_share or 0) * found.time_s
    assert found.time_s < 1.01 * busiest_s  # more chunks could gain no more than this


def test_auto_tries_the_adding_switches_of_nodes_or_says_why_not() -> None:
    asked: dict[str, Any] = {"bytes": "1GiB", "cluster": "dgx-h100", "algorithm": "auto"}
    within = fw.collective("allreduce", workers=8, **asked)
    assert isinstance(within, TunedTime)
    assert within.algorithm == "nvls"
    assert "nvls" in within.library_ways
    assert "nvls beyond" in sentence(by_size(within.tuning.ranges))
    played = fw.collective("allreduce", workers=16, level="event", **asked)
    assert isinstance(played, TunedTime)
    assert "a fitted cluster, or public ones. None does with" in played.left_out["nvls-tree"]
    assert not played.library_ways
    with pytest.raises(fw.UsageError, match=r"nvls has no transfers to play.*NVLink SHARP"):
        fw.collective("allreduce", workers=8, **{**asked, "algorithm": "nvls"})


@pytest.mark.parametrize("workers", [1, 2, 12, 16])
@pytest.mark.parametrize("how", [{}, {"chunks": 8}, {"level": "closed"}])
def test_auto_is_as_quick_as_the_quickest_that_can_be_asked_for(
    workers: int, how: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {
        "bytes": "64kB",
        "workers": workers,
        "bandwidth": "10Gbps",
        "latency": "20us",
        **how,
    }
    times = []
    for each in of_one_switch("allreduce"):
        with contextlib.suppress(fw.UsageError):
            times.append(fw.collective("allreduce", algorithm=each, **asked).time_s)
    assert fw.collective("allreduce", algorithm="auto", **asked).time_s == min(times)


def test_where_no_algorithm_can_be_timed_that_is_said() -> None:
    with pytest.raises(fw.UsageError, match=r"no algorithm could be timed: .* too many to play"):
        fw.collective(
            "broadcast", bytes=1000, workers=100_000_000, bandwidth="1Gbps", algorithm="auto"
        )


def test_a_collective_is_tuned_before_it_is_played(cli: Cli) -> None:
    asked = (
        "collective",
        "allreduce",
        "--bytes",
        "64kB",
        "--workers",
        "16",
        "--bandwidth",
        "10Gbps",
        "--latency",
        "20us",
        "--algorithm",
        "auto",
    )
    done = cli(*asked)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("allreduce of 64 kB by halving-doubling over 16 workers")
    assert "halving-doubling is the quickest of 3 (ring 696 us, tree" in done.stdout
    assert "By the formulas, trees cut into many chunks: halving-doubling for" in done.stdout
    found = json.loads(cli(*asked, "--json").stdout)
    assert found["algorithm"] == "halving-doubling"
    assert found["time_s"] == found["times_s"]["halving-doubling"] == min(found["times_s"].values())
    assert found["tuning"]["ranges"][-1]["to_bytes"] is None


@given(
    st.lists(st.tuples(st.floats(0.1, 20), st.integers(1, 200_000_000)), min_size=1, max_size=8),
    st.integers(1, 2_000),
    st.floats(1e8, 1e12),
    st.floats(0, 1e-3),
    st.sampled_from(["fifo", "priority"]),
)
@cases(40)
def test_a_tuned_step_communicates_no_longer_than_with_one_algorithm_for_all(
    waits: list[tuple[float, int]], workers: int, rate: float, latency: float, lane: str
) -> None:
    ready = np.cumsum([wait for wait, _ in waits])
    run = a_run(gradients=[(at, size) for at, (_, size) in zip(ready, waits, strict=True)])
    table = fw.whatif(
        run,
        workers=workers,
        bandwidth=rate,
        latency=latency,
        buckets="none",
        lane=lane,
        algorithm=["auto", *of_one_switch("allreduce")],
    )
    auto, *others = table["communication_s"].tolist()
    assert auto <= min(others)


def test_each_message_of_a_step_goes_its_own_way() -> None:
    run = a_run(gradients=[(10, 1_000), (20, 500_000_000)])
    conditions: dict[str, Any] = {
        "workers": 48,
        "bandwidth": "100Gbps",
        "latency": "5us",
        "buckets": "none",
    }
    table = fw.whatif(run, **conditions, algorithm="auto,ring,tree")
    auto, ring, tree = table["communication_s"].tolist()
    assert auto < min(ring, tree)
    sent = table["network_utilization"] * table["step_s"] * 100e9 / 8
    assert sent[0] == pytest.approx(2 * 500_000_000 * 47 / 48 + 2 * 1_000, rel=1e-9)
    [said] = fw.whatif(run, **conditions, algorithm="auto").tuning
    assert [each.algorithm for each in said.ranges] == ["tree", "ring"]


def test_on_a_described_cluster_every_algorithm_that_fits_is_tried() -> None:
    asked: dict[str, Any] = {"bytes": "64MiB", "cluster": "p3dn", "nodes": 4}
    found = fw.collective("allreduce", algorithm="auto", **asked)
    assert isinstance(found, TunedTime)
    assert {"ring", "tree", "hierarchical", "multi-ring"} <= found.times_s.keys()
    assert not {"in-network", "parameter-server"} & found.times_s.keys()
    assert found.time_s == min(found.times_s.values())
    how: dict[str, Any] = {"algorithm": found.algorithm, "chunks": found.chunks}
    assert found.time_s == fw.collective("allreduce", **asked, **how).time_s
    for left_out in found.left_out:
        with pytest.raises(fw.UsageError):
            fw.collective("allreduce", algorithm=left_out, **asked)
    assert set(found.tuning.table[0].times_s) <= {*found.times_s, *found.left_out}


def test_a_step_on_a_described_cluster_is_tuned_over_its_links() -> None:
    table = fw.whatif(
        "resnet50@v100",
        cluster="p3dn",
        nodes=4,
        buckets="ddp:1MiB",
        algorithm=["auto", "hierarchical", "multi-ring", *of_one_switch("allreduce")],
    )
    auto, *others = table["communication_s"].tolist()
    assert auto <= min(others)
    assert "hierarchical" in {each.algorithm.partition("-")[0] for each in table.tuning[0].ranges}
    with pytest.raises(fw.UsageError, match="algorithm: expected ring or tree"):
        fw.whatif("resnet50@v100", workers=4, algorithm="hierarchical")


def test_an_algorithm_of_clusters_takes_in_a_step_what_it_takes_alone() -> None:
    run = a_run(gradients=[(10, 64 * 2**20)])
    stated = replace(cluster("dgx-h100"), startup_s=7e-6)
    where: dict[str, Any] = {"cluster": stated, "nodes": 4, "bandwidth": "50Gbps"}
    for name in ("hierarchical", "hierarchical-halving-doubling", "ring"):
        found = fw.whatif(run, **where, algorithm=name)
        played = fw.collective("allreduce", bytes="64MiB", **where, algorithm=name, level="event")
        assert found["communication_s"][0] == pytest.approx(played.time_s, rel=1e-6)
    spine: dict[str, Any] = {"cluster": TWO_TO_ONE, "algorithm": "multi-ring"}
    packed, scattered = (
        fw.whatif(run, **spine, placement=each)["communication_s"][0]
        for each in ("packed", "scattered")
    )
    assert scattered > packed


# The best of a grid


def a_search() -> fw.WhatIf:
    return fw.whatif(
        "resnet50@v100",
        workers="8,16,64",
        bandwidth="1Gbps,10Gbps,25Gbps,100Gbps",
        buckets="ddp,paper,none,ddp:100MiB",
        algorithm="ring,tree,halving-doubling",
        latency="20us",
        compression="1,4",
    )


def test_the_best_is_as_fast_as_any_and_asks_for_less() -> None:
    result = a_search()
    speedup = result["workers"] * result["scaling_factor"]
    first, *others = result.best(5)
    assert first.speedup == speedup[first.row] >= speedup.max() / (1 + NEAR)
    near = np.flatnonzero(speedup >= speedup.max() / (1 + NEAR))
    assert result["bandwidth_bps"][first.row] == result["bandwidth_bps"][near].min()
    assert len({first.row, *(each.row for each in others)}) == 5
    worst = min(each.speedup for each in others)
    assert (speedup > worst * (1 + NEAR)).sum() <= 5


def test_what_a_condition_is_worth_is_what_the_table_says_of_its_other_values() -> None:
    result = a_search()
    [first] = result.best(1)
    rows = list(result.rows())
    own = rows[first.row]
    for each in first.instead:
        name = {"codec": "compression"}.get(each.condition, each.condition)
        others = [
            row["workers"] * row["scaling_factor"]
            for row in rows
            if row[name] != own[name] and all(row[k] == own[k] for k in CONDITIONS - {name})
        ]
        assert each.change == pytest.approx(max(others) / first.speedup - 1)


CONDITIONS = {"workers", "bandwidth_bps", "buckets", "algorithm", "compression"}


def test_every_run_has_its_own_best() -> None:
    result = fw.whatif(["vgg16@v100", "resnet50@v100"], workers="8,64", bandwidth="1Gbps,100Gbps")
    found = result.best(2)
    assert [result["run"][each.row] for each in found] == [
        "vgg16@v100",
        "vgg16@v100",
        "resnet50@v100",
        "resnet50@v100",
    ]


def test_the_command_shows_the_best_and_writes_all(cli: Cli) -> None:
    asked = (
        "whatif",
        "resnet50@v100",
        "--workers",
        "8,64",
        "--bandwidth",
        "1Gbps,100Gbps",
        "--buckets",
        "ddp,none",
        "--best",
        "2",
    )
    shown = cli(*asked).stdout.partition("\n\n")[2].splitlines()  # without the answer
    assert shown[2].startswith("────")
    assert shown[3].split()[1:4] == ["64", "100", "Gbps"]
    assert shown[6].startswith("The best of 8. Rows within 1% count as equal, cheaper first.")
    assert re.search(r"Instead .*\b8\s+workers: -", " ".join(shown[7:10]))
    assert len(list(csv.reader(io.StringIO(cli(*asked, "--format", "csv").stdout)))) == 9
    found = json.loads(cli(*asked, "--json").stdout)
    assert len(found["rows"]) == 8
    assert [each["workers"] for each in found["best"]] == [64, 64]
    assert found["best"][0]["instead"][0].keys() == {"condition", "value", "instead", "change"}
    refused = cli(*asked[:-1], "0")
    assert refused.returncode == 2


@pytest.mark.parametrize("op", ["allreduce", "allgather", "reducescatter"])
def test_auto_uses_the_nics_of_nodes_that_are_not_full(op: str) -> None:
    asked: dict[str, Any] = {"bytes": "64MiB", "cluster": "dgx-a100", "algorithm": "auto"}
    whole, partly, ring = (
        fw.collective(op, workers=workers, **asked | how).time_s
        for workers, how in ((16, {}), (12, {}), (12, {"algorithm": "ring"}))
    )
    assert whole < partly < 2.2 * whole  # four of the second node's NICs, in place of eight
    assert ring > 2 * partly  # one NIC
