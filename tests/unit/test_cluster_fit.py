"""A cluster is fitted to measured tables, and predicts other sizes and device counts."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.cluster_fit import made_of
from fullwire.clusters import cluster
from fullwire.clusters.cluster import (
    LINK_KINDS,
    NIC,
    Cluster,
    Inside,
    LeafSpine,
    Nics,
    OtherHost,
    with_nodes,
)
from fullwire.clusters.description import as_toml, described
from fullwire.clusters.measured import Measured, Protocol
from fullwire.collectives.cost import AddTimes, bus_factor
from fullwire.collectives.fitting import Table, fitted
from fullwire.collectives.library import (
    library_time,
    needs,
    ways_s,
    with_large,
)
from fullwire.collectives.playing import TunedTime
from fullwire.collectives.usual import USUAL_PROTOCOLS, usual, with_usual_startup
from fullwire.errors import UsageError
from fullwire.findings.collective import collective_findings, tuning_findings
from fullwire.report.cluster import plot_cluster_fit, print_cluster_fit
from fullwire.simulation.group_times import GroupTimes
from fullwire.simulation.on_links import OnLinks
from fullwire.words import sentence, sentences
from tests.builders import a_run

ECHO = Path(__file__).parents[3] / "shared/data/llm/nccl_multi_node_a100.csv"
SIZES = [2**power for power in range(10, 33)]


def a_machine(nodes: int = 16) -> Cluster:
    """Return a cluster whose library has unusual start-up, hop and fill times."""
    where = replace(cluster("dgx-h100", nodes), measured=None)
    found = usual(where)
    slower = [
        replace(
            each,
            startup_s=1.6 * each.startup_s,
            between_hop_s=2 * each.between_hop_s,
            between_share=0.7 * each.between_share,
        )
        for each in found.protocols
    ]
    return replace(where, measured=replace(found, protocols=tuple(slower)))


def a_table(machine: Cluster, workers: int, op: str = "allreduce") -> Table:
    points = [(size, library_time(op, machine, size, workers).time_s) for size in SIZES]
    return Table(op=op, workers=workers, points=tuple(points), source=f"{op}_{workers}.log")


def errors(found: Cluster, table: Table, least: int = 2**16) -> list[float]:
    return [
        abs(library_time(table.op, found, size, table.workers).time_s / time_s - 1)
        for size, time_s in table.points
        if size >= least
    ]


def nccl_text(table: Table, per_host: int = 8, whole: bool = True, device: str = "H100") -> str:
    """Print a table as nccl-tests does."""
    ranks = [
        f"#  Rank {rank:2} Group  0 Pid {rank} on host{rank // per_host} device "
        f"{rank % per_host} [0x00] {device}"
        for rank in range(table.workers)
    ]
    rows, bus_gb_s = [], []
    for size, time_s in table.points:
        bus_gb_s.append(bus_factor(table.op, table.workers) * size / time_s / 1e9)
        place = f"{time_s * 1e6:.2f} {size / time_s / 1e9:.2f} {bus_gb_s[-1]:.2f} 0"
        rows.append(f"{size:12} {size // 4:12} float sum -1 {place} {place}")
    head = "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    average = f"# Avg bus bandwidth    : {np.mean(bus_gb_s):g}"
    end = ["# Out of bounds values : 0 OK", average] if whole else []
    lines = ["# nThread 1 nGpus 1", *ranks, "# all_reduce_perf", head, *rows, *end]
    return "\n".join(lines) + "\n"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_two_tables_tell_other_device_counts() -> None:
    machine = a_machine()
    found = fitted(replace(machine, measured=None), [a_table(machine, n) for n in (16, 64)])
    for workers, most in ((8, 0.07), (32, 0.05), (128, 0.05)):
        assert np.median(errors(found, a_table(machine, workers))) < most
    before = replace(machine, measured=None)
    assert np.median(errors(before, a_table(machine, 128))) > 0.2


def test_a_fitted_machine_is_within_its_interval_and_a_far_count_is_less_sure() -> None:
    machine = a_machine()
    found = fitted(replace(machine, measured=None), [a_table(machine, n) for n in (8, 16)])
    widths, holds = {}, []
    for workers in (16, 64, 128):
        for size, time_s in a_table(machine, workers).points:
            said = library_time("allreduce", found, size, workers)
            holds.append(said.low_s <= time_s <= said.high_s)
            widths[workers] = said.high_s / said.low_s
    assert sum(holds) >= 0.85 * len(holds)
    assert widths[128] > widths[16]


def test_a_size_at_which_the_library_chooses_badly_is_carried_over() -> None:
    machine = a_machine()
    odd = 2**17
    table = a_table(machine, 32)
    points = [(size, time_s * (2 if size == odd else 1)) for size, time_s in table.points]
    found = fitted(replace(machine, measured=None), [replace(table, points=tuple(points))])
    usual_s = library_time("allreduce", machine, odd, 64).time_s
    assert library_time("allreduce", found, odd, 64).time_s == pytest.approx(1.6 * usual_s, rel=0.2)
    assert library_time("allreduce", found, 2**26, 64).time_s == pytest.approx(
        library_time("allreduce", machine, 2**26, 64).time_s, rel=0.1
    )


def test_a_fitted_file_is_an_ordinary_cluster_that_reads_back_equal() -> None:
    found = fitted(replace(a_machine(), measured=None), [a_table(a_machine(), 16)])
    assert described(as_toml(found), "fitted.toml") == found


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("inside_share = 0.37", "inside_share = 9.0", "inside_share: expected above 0, up to 4"),
        ("tree_share = 0.9", "tree_share = true", "measured.tree_share: expected a number"),
        ("pair_share = 0.7", "pair_share = -0.1", "measured.pair_share: expected 0 or more"),
        ("spread", "spraed", "measured.spraed: no such key, is spread meant"),
    ],
)
def test_a_mistake_in_what_was_measured_is_named(old: str, new: str, sentence: str) -> None:
    measured = usual(cluster("dgx-h100"))
    text = as_toml(replace(cluster("dgx-h100"), measured=replace(measured, source="a.log")))
    assert old in text
    with pytest.raises(fw.UsageError, match=sentence):
        described(text.replace(old, new), "ours.toml")


def test_a_ring_has_two_hops_a_rank_and_a_tree_has_few() -> None:
    where = cluster("dgx-h100", 16)
    of = needs("allreduce", where, 128)
    ring, tree = of["multi-ring"], of["hierarchical-tree"]
    assert (ring.inside_hops, ring.between_hops) == (254 - 32, 32)
    assert (tree.inside_hops, tree.between_hops) == (14, 8)
    measured = Measured(
        protocols=USUAL_PROTOCOLS, tree_share=0.9, pair_share=0.5, spread=0.1, source=""
    )
    _, times_s = ways_s(measured, of, [1024.0, 2.0**33])
    assert times_s[0, 0] > times_s[3, 0]
    assert times_s[2, 1] < times_s[5, 1]


def test_nodes_that_are_not_full_cost_what_their_few_nics_carry() -> None:
    where = cluster("gb200-nvl72")
    full, half = (library_time("allreduce", where, 2**30, workers).time_s for workers in (144, 128))
    assert 0.9 * full < half < 2 * full
    one_more = needs("allreduce", where, 73)["multi-ring"]
    assert one_more.between_s == pytest.approx(2 * 72 / 73 * 8 / 400e9)


@pytest.mark.parametrize(("workers", "busiest"), [(16, 8), (17, 16), (20, 16), (24, 16), (25, 24)])
def test_each_nic_carries_what_its_own_devices_send_to_other_nodes(
    workers: int, busiest: int
) -> None:
    where = cluster("dgx-h100", 4)  # a NIC a device, all of one rate
    pairs = needs("alltoall", where, workers)["pairwise"]
    assert pairs.between_s == pytest.approx(busiest / workers * 8 / 400e9)


def test_a_slow_host_and_a_host_that_is_not_full_are_two_hosts() -> None:
    where = replace(
        cluster("dgx-h100", 3), other_hosts=(OtherHost(node=0, nic_rate_bps=200e9),), measured=None
    )
    assert needs("allgather", where, 17)["multi-ring"].between_s == pytest.approx(
        16 / 17 * 8 / 400e9  # the lone NIC of the last node, and not the eight slow ones
    )
    assert needs("alltoall", where, 17)["pairwise"].between_s == pytest.approx(
        9 / 17 * 8 / 200e9  # a slow NIC: less from each device takes longer
    )


@pytest.mark.parametrize("by_rail", [False, True])
def test_a_node_that_is_not_full_does_not_fill_the_uplinks_of_full_ones(by_rail: bool) -> None:
    narrow = LeafSpine(nodes_per_leaf=2, oversubscription=4, by_rail=by_rail)
    where = replace(cluster("dgx-h100", 5), network=narrow)
    carried = 2 * 8 * (33 - 16) / 33  # by a leaf of full nodes, eight uplinks' worth
    uplinks_bps = 2 * 8 * 400e9 / 4
    pairs = needs("alltoall", where, 33)["pairwise"]
    assert pairs.between_s == pytest.approx(carried * 8 / uplinks_bps)
    lone_s = 8 / 400e9 * (2 if by_rail else 1)  # a rail's uplinks are half as fast as one NIC
    around = needs("allgather", where, 33)["multi-ring"]
    assert around.between_s == pytest.approx(32 / 33 * lone_s)


@pytest.mark.parametrize("has_tree", [False, True])
@pytest.mark.parametrize("shown", [(16, 64), (8, 32, 128), (16, 32, 64)])
def test_tables_of_several_counts_of_nodes_tell_whether_a_library_has_a_tree(
    has_tree: bool, shown: tuple[int, ...]
) -> None:
    machine = a_machine(64)
    assert machine.measured is not None
    share = machine.measured.tree_share if has_tree else 0.0
    machine = replace(
        machine, measured=replace(machine.measured, tree_share=share, switch_share=0.0)
    )
    tables = [a_table(machine, workers) for workers in shown]
    found = fitted(replace(machine, measured=None), tables)
    assert found.measured is not None
    assert bool(found.measured.tree_share) == has_tree
    assert max(errors(found, a_table(machine, 512))) < 0.15
    assert described(as_toml(found), "fitted.toml").measured == found.measured


@pytest.mark.parametrize("shown", [(2, 4), (2, 8)])
@pytest.mark.parametrize(
    ("startup_s", "hop_s", "bytes_per_s"), [(110e-6, 30e-6, 3e9), (20e-6, 5e-6, 23e9)]
)
def test_rings_alone_are_found_or_intervals_hold_them(
    shown: tuple[int, ...], startup_s: float, hop_s: float, bytes_per_s: float
) -> None:
    """Rows tell the two apart; how unusual the machine's start-up and hops are does not."""

    def ring_s(size: int, nodes: int) -> float:
        moved = 2 * (nodes - 1) / nodes * size
        return startup_s + 2 * (nodes - 1) * hop_s + moved / bytes_per_s

    def table(nodes: int) -> Table:
        noise = np.random.default_rng(nodes).normal(1, 0.01, len(SIZES)).tolist()
        points = [
            (size, ring_s(size, nodes) * each) for size, each in zip(SIZES, noise, strict=True)
        ]
        return Table(op="allreduce", workers=nodes, points=tuple(points), source=f"{nodes}.log")

    tables = [table(nodes) for nodes in shown]
    found = fitted(made_of(tables, 1, "rings"), tables)
    assert found.measured is not None
    assert not found.measured.tree_share or found.measured.other is not None
    found = with_nodes(found, 32)
    for nodes in (3, 12, 32):
        for size in (2**16, 2**20, 2**24):
            said = library_time("allreduce", found, size, nodes)
            assert said.low_s <= ring_s(size, nodes) <= said.high_s


def test_tables_of_one_number_of_nodes_leave_a_tree_open_and_answers_say_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine = a_machine(64)
    assert machine.measured is not None
    for share in (0.0, machine.measured.tree_share):
        measured = replace(machine.measured, tree_share=share, switch_share=0.0)
        has_tree = replace(machine, measured=measured)
        tables = [a_table(has_tree, workers) for workers in (8, 16)]
        found = fitted(replace(machine, measured=None), tables)
        assert found.measured is not None
        assert found.measured.other is not None
        for size in SIZES[6:]:
            said = library_time("allreduce", found, size, 512)
            truth_s = library_time("allreduce", has_tree, size, 512).time_s
            assert said.low_s <= truth_s <= said.high_s
        assert described(as_toml(found), "fitted.toml") == found
        told = fw.collective("allreduce", bytes=2**16, workers=512, cluster=found)
        assert "leave open whether this library has a tree" in " ".join(
            sentences([*collective_findings(told)])
        )
    paths = [
        written(tmp_path / f"{table.workers}.log", nccl_text(table))
        for table in (a_table(machine, 8), a_table(machine, 16))
    ]
    print_cluster_fit(fw.fit_cluster(paths, cluster="dgx-h100"))
    assert "leave open whether the library has a tree" in " ".join(capsys.readouterr().out.split())


def test_a_fit_reads_nccl_tests_osu_and_our_own_bench(tmp_path: Path) -> None:
    machine = a_machine()
    ours = written(tmp_path / "ours.log", nccl_text(a_table(machine, 16)))
    rows = "\n".join(f"{size} {time_s * 1e6:.2f}" for size, time_s in a_table(machine, 64).points)
    osu = written(
        tmp_path / "osu.txt",
        f"$ mpirun -np 64 osu_allreduce\n# OSU MPI Allreduce Latency Test v7.5\n"
        f"# Size       Avg Latency(us)\n{rows}\n",
    )
    bench = {"workers": 2, "rows": [{"bytes": 2**20, "ours_s": 1e-3, "theirs_s": 2e-3}]}
    of_bench = written(tmp_path / "bench.json", json.dumps(bench))
    found = fw.fit_cluster([ours, osu], cluster="dgx-h100")
    assert {(each.op, each.workers) for each in found.residuals} == {
        ("allreduce", 16),
        ("allreduce", 64),
    }
    assert fw.fit_cluster([of_bench], devices_per_node=1).cluster.devices == 2


def test_packed_tables_and_packed_bench_answers_are_read_as_plain_ones_are(tmp_path: Path) -> None:
    rows = [{"bytes": 2**20, "ours_s": 1e-3, "theirs_s": 2e-3}]
    packed = tmp_path / "bench.json.gz"
    packed.write_bytes(gzip.compress(json.dumps({"workers": 2, "rows": rows}).encode()))
    assert fw.fit_cluster([packed], devices_per_node=1).cluster.devices == 2
    table = tmp_path / "ours.log.gz"
    table.write_bytes(gzip.compress(nccl_text(a_table(a_machine(), 16)).encode()))
    with pytest.raises(fw.UsageError, match=r"line \d+: allreduce of .*nics.rate of p3dn"):
        fw.fit_cluster([table], cluster="p3dn")


def test_several_servers_on_a_fitted_machine_are_played_and_not_looked_up(tmp_path: Path) -> None:
    path = written(tmp_path / "fitted.toml", as_toml(a_machine(2)))
    said = fw.collective("allreduce", bytes="1MiB", cluster=path, algorithm="auto", servers=2)
    assert said.level != "tables"


@pytest.mark.parametrize("op", ["allreduce", "alltoall"])
def test_auto_on_a_fitted_machine_plays_what_its_library_lacks(op: str) -> None:
    asked: dict[str, Any] = {"bytes": "64MiB", "cluster": a_machine(8)}
    plain = fw.collective(op, **asked)
    tuned = fw.collective(op, algorithm="auto", **asked)
    assert isinstance(tuned, TunedTime)
    assert tuned.in_use == plain.algorithm
    assert tuned.times_s[plain.algorithm] == pytest.approx(plain.time_s)
    played = set(tuned.times_s) - set(tuned.library_ways)
    assert "hierarchical" in played
    assert tuned.time_s == min(tuned.times_s.values())
    said = [sentence(finding) for finding in tuning_findings(tuned)]
    assert any(f"Without --algorithm, its library takes {plain.algorithm}." in one for one in said)
    for row in tuned.tuning.table:
        if row.bytes == 2**26:
            assert row.times_s[plain.algorithm] == pytest.approx(plain.time_s)


def test_what_is_played_on_a_fitted_machine_waits_for_its_fitted_hops() -> None:
    machine = a_machine(8)
    assert machine.measured is not None
    protocols = tuple(
        replace(each, between_hop_s=each.between_hop_s + 100e-6)
        for each in machine.measured.protocols
    )
    slow = replace(machine, measured=replace(machine.measured, protocols=protocols))
    asked: dict[str, Any] = {"bytes": "64KiB", "cluster": slow}
    tuned = fw.collective("allreduce", algorithm="auto", **asked)
    assert isinstance(tuned, TunedTime)
    # Halving and doubling has three rounds between eight nodes, there and back.
    assert tuned.times_s["halving-doubling"] > 6 * 100e-6
    rings_s = tuned.times_s["ring"], tuned.times_s["multi-ring"]
    assert max(rings_s) < 1.5 * min(rings_s)
    alone = fw.collective("allreduce", algorithm="halving-doubling", **asked)
    assert alone.time_s == pytest.approx(tuned.times_s["halving-doubling"])


@pytest.mark.parametrize("workers", [2, 4, 8, 16, 64])
def test_a_group_of_a_plan_takes_as_long_as_its_collective_on_a_fitted_machine(
    workers: int,
) -> None:
    machine = a_machine(8)
    inside, between = (a_table(machine, n) for n in (8, 16))
    odd = tuple((size, time_s * (1.5 if size == 2**20 else 1.0)) for size, time_s in inside.points)
    found = fitted(replace(machine, measured=None), [replace(inside, points=odd), between])
    for size in (2**12, 2**20, 2**28):
        alone = fw.collective("allreduce", bytes=size, workers=workers, cluster=found)
        of_plan = GroupTimes(found).collective_s("allreduce", workers, 1, np.array([size]))
        assert of_plan[0] == pytest.approx(alone.time_s)


@pytest.mark.parametrize("size", [2**10, 2**16, 2**28])
@pytest.mark.parametrize("workers", [8, 64])
def test_a_what_if_on_a_fitted_machine_takes_the_protocol_of_each_size(
    size: int, workers: int
) -> None:
    """A message of a what-if takes as long as `collective` and a plan say, small or large."""
    machine = a_machine(8)
    where = OnLinks.of(machine, machine.nics.latency_s, is_scattered=False)
    assert where is not None
    by_name = where.cost("allreduce", "multi-ring", workers).whole_s(size)
    asked: dict[str, Any] = {"bytes": size, "workers": workers, "cluster": machine}
    alone = fw.collective("allreduce", algorithm="multi-ring", **asked)
    assert by_name == pytest.approx(alone.time_s)
    for op in ("allreduce", "allgather", "reducescatter", "alltoall"):
        of_run = where.recorded(op, workers).whole_s(size)
        of_plan = GroupTimes(machine).collective_s(op, workers, 1, np.array([size]))
        assert of_run == pytest.approx(of_plan[0])
        assert of_run == pytest.approx(fw.collective(op, **asked).time_s)
    faster = replace(machine, nics=replace(machine.nics, rate_bps=2 * machine.nics.rate_bps))
    twice_s = where.recorded("allreduce", workers).time_s(size, 1 / faster.nics.rate_bps)
    assert twice_s == pytest.approx(library_time("allreduce", faster, size, workers).time_s)


@pytest.mark.parametrize("gradient_bytes", [2**10, 2**17, 2**28])
@pytest.mark.parametrize("workers", [8, 16, 64])
def test_a_what_if_without_an_algorithm_takes_what_the_library_of_the_machine_does(
    gradient_bytes: int, workers: int
) -> None:
    """Its tables tell the way for each size, as `collective` takes it: a ring, a tree, switches."""
    machine = a_machine(8)
    job = a_run(gradients=[(1, gradient_bytes)])
    asked: dict[str, Any] = {"workers": workers, "cluster": machine}
    table = fw.whatif(job, **asked)
    alone = fw.collective("allreduce", bytes=gradient_bytes, **asked)
    assert table["algorithm"].tolist() == ["library"]
    assert table["communication_s"] == pytest.approx(alone.time_s)
    by_rings = fw.whatif(job, algorithm="multi-ring", **asked)
    assert by_rings["communication_s"] >= table["communication_s"]
    with pytest.raises(UsageError, match=r"algorithm: expected ring or .* got 'library'"):
        fw.whatif(
            job, workers=workers, cluster=replace(machine, measured=None), algorithm="library"
        )


def test_targets_and_replays_on_a_fitted_machine_take_its_library_too() -> None:
    machine = a_machine(8)
    job = a_run(gradients=[(1, 2**28)])
    found = fw.whatif(job, workers=16, cluster=machine, target=0.5)
    assert found.targets is not None
    played = fw.replay(job, workers=16, cluster=machine)
    assert played.facts.algorithm == "library"
    again = fw.whatif(played, workers=16)
    assert again["step_s"] == pytest.approx(found["step_s"])
    by_auto = fw.replay(job, workers=16, cluster=machine, algorithm="auto")
    assert fw.explain(by_auto).step_s == pytest.approx(played_step_s(by_auto))


def played_step_s(run: fw.Run) -> float:
    marks = run.spans.rows(run.spans.name == "step")
    return float(marks.end_ns[0] - marks.start_ns[0]) * 1e-9


def test_a_what_if_by_another_algorithm_takes_the_quickest_protocol_too() -> None:
    machine = a_machine(8)
    assert machine.measured is not None
    machine = with_large(machine, machine.measured)
    where = OnLinks.of(machine, machine.nics.latency_s, is_scattered=False)
    assert where is not None
    for size in (1024, 2**20, 2**30):
        cost = where.cost("allreduce", "halving-doubling", 64)
        asked: dict[str, Any] = {"algorithm": "halving-doubling", "cluster": machine}
        played = fw.collective("allreduce", bytes=size, **asked)
        assert cost.whole_s(size) == pytest.approx(played.time_s, rel=0.05)


def test_a_longer_way_between_nodes_lengthens_each_hop_of_a_fitted_machine() -> None:
    machine = a_machine(8)
    near, far = (
        OnLinks.of(machine, machine.nics.latency_s + longer_s, is_scattered=False)
        for longer_s in (0.0, 1e-3)
    )
    assert near is not None
    assert far is not None
    hops = needs("allgather", machine, 64)["multi-ring"].between_hops
    later_s = far.recorded("allgather", 64).whole_s(1) - near.recorded("allgather", 64).whole_s(1)
    assert later_s == pytest.approx(hops * 1e-3)
    assert far.recorded("allgather", 8).whole_s(1) == near.recorded("allgather", 8).whole_s(1)


def test_a_small_transfer_between_stages_goes_by_a_protocol_that_starts_quickly() -> None:
    machine = a_machine(8)
    assert machine.measured is not None
    *_, middle, large = machine.measured.protocols
    alone = replace(machine, measured=replace(machine.measured, protocols=(large,)))

    def hop_s(where: Cluster, size_bytes: float) -> float:
        hops = GroupTimes(where).hops(np.array([2]), np.array([32]), np.array([size_bytes]))
        return float(hops.slowest_s[0])

    sooner_s = (large.between_hop_s - middle.between_hop_s) / 2
    assert sooner_s > 0
    assert hop_s(machine, 1) == pytest.approx(hop_s(alone, 1) - sooner_s, rel=1e-3)
    assert hop_s(machine, 2**30) == pytest.approx(hop_s(alone, 2**30))


def test_an_algorithm_of_the_library_has_one_time_on_a_fitted_machine() -> None:
    asked: dict[str, Any] = {"bytes": "64KiB", "cluster": a_machine(8)}
    plain = fw.collective("allreduce", **asked)
    named = fw.collective("allreduce", algorithm=plain.algorithm, **asked)
    assert (named.time_s, named.level) == (plain.time_s, "tables")
    in_chunks = fw.collective("allreduce", algorithm=plain.algorithm, chunks=4, **asked)
    assert in_chunks.level == "event"


def test_a_small_message_is_played_by_a_protocol_that_starts_quickly() -> None:
    machine = a_machine(8)
    assert machine.measured is not None
    small, _, large = machine.measured.protocols
    alone = replace(machine, measured=replace(machine.measured, protocols=(large,)))
    asked: dict[str, Any] = {"algorithm": "halving-doubling"}
    played_s, by_large_s = (
        fw.collective("allreduce", bytes=1024, cluster=where, **asked).time_s
        for where in (machine, alone)
    )
    assert by_large_s - played_s > large.startup_s - small.startup_s > 0
    # A ring that is played takes about as long as the library's own rings.
    rings_s = [
        fw.collective("allgather", bytes=1024, cluster=where, algorithm="ring").time_s
        for where in (machine, alone)
    ]
    own_s = fw.collective("allgather", bytes=1024, cluster=machine).time_s
    assert own_s < rings_s[0] < 1.2 * own_s < rings_s[1]
    whole_s, large_s = (
        fw.collective("allreduce", bytes=2**30, cluster=where, **asked).time_s
        for where in (machine, alone)
    )
    assert whole_s == pytest.approx(large_s)


def test_auto_leaves_out_switches_that_a_fitted_machine_does_not_use() -> None:
    machine = a_machine(8)
    assert machine.measured is not None
    without = replace(machine, measured=replace(machine.measured, switch_share=0.0))
    tuned = fw.collective("allreduce", bytes="64MiB", cluster=without, algorithm="auto")
    assert isinstance(tuned, TunedTime)
    assert "nvls-tree" not in tuned.times_s
    assert "does not use it" in tuned.left_out["nvls-tree"]
    assert without.measured is not None
    either = replace(without, measured=replace(without.measured, other=machine.measured))
    tuned = fw.collective("allreduce", bytes="64MiB", cluster=either, algorithm="auto")
    assert isinstance(tuned, TunedTime)
    assert tuned.left_out["nvls-tree"].startswith("its tables leave open whether the library")


def test_the_busiest_link_of_a_tree_of_two_nodes_carries_both_its_directions() -> None:
    machine = a_machine(2)
    assert machine.measured is not None
    # Costly hops within a node choose the tree. Its NICs take 2.5 ps a byte each way, NVLinks 4.4.
    hops = Protocol(
        name="Simple",
        startup_s=0,
        inside_hop_s=1e-3,
        between_hop_s=0,
        inside_share=1,
        between_share=1,
    )
    measured = replace(machine.measured, protocols=(hops,), pair_share=1.0, tree_share=1.0)
    measured = replace(measured, switch_share=0.0)
    said = library_time("allreduce", replace(machine, measured=measured), 2**20, 16)
    assert (said.algorithm, said.busiest) == ("hierarchical-tree", LINK_KINDS[NIC])


@pytest.mark.parametrize(("workers", "way"), [(8, "nvls"), (16, "nvls-tree")])
def test_switches_of_nodes_add_where_they_can(workers: int, way: str) -> None:
    where = cluster("dgx-h100")
    assert where.inside is not None
    said = library_time("allreduce", where, 2**30, workers)
    cannot = replace(where, inside=replace(where.inside, adds=False))
    without = library_time("allreduce", cannot, 2**30, workers)
    assert said.algorithm == way
    assert 0.6 * without.time_s < said.time_s < 0.9 * without.time_s
    # H100 fills 475 of 450 GB/s of bus bandwidth that way, and 360 by a ring.
    small = library_time("allreduce", where, 2**16, workers)
    assert small == library_time("allreduce", cannot, 2**16, workers)


def test_a_library_of_rings_alone_has_no_tree_of_switches_between_nodes() -> None:
    machine = a_machine()
    assert machine.measured is not None
    rings = replace(machine, measured=replace(machine.measured, tree_share=0.0))
    assert library_time("allreduce", rings, 2**30, 8).algorithm == "nvls"
    for workers in (16, 64):
        assert library_time("allreduce", rings, 2**30, workers).algorithm == "multi-ring"


@pytest.mark.parametrize("shown", [(8, 32), (32, 128), (16,)])
def test_tables_leave_open_or_tell_whether_switches_add(
    shown: tuple[int, ...], tmp_path: Path
) -> None:
    """A library may not let them, though their rate or their description says that they can."""
    machine = a_machine()
    assert machine.measured is not None
    without = replace(machine, measured=replace(machine.measured, switch_share=0.0))
    found = fitted(
        replace(machine, measured=None), [a_table(without, workers) for workers in shown]
    )
    assert found.measured is not None
    for workers in (8, 16, 64):
        for size, true_s in a_table(without, workers).points[6:]:
            said = library_time("allreduce", found, size, workers)
            assert said.low_s <= true_s <= said.high_s
    is_open = len({bool(fit.switch_share) for fit in found.measured.allowed()}) == 2
    asked: dict[str, Any] = {"bytes": "1GiB", "workers": 8, "cluster": found}
    told = " ".join(sentences([*collective_findings(fw.collective("allreduce", **asked))]))
    assert ("whether this library lets the switches" in told) == is_open
    assert described(as_toml(found), "fitted.toml") == found


def test_a_described_machine_may_add_or_not_unless_it_says_so() -> None:
    where = cluster("dgx-h100")
    assert where.inside is not None
    asked: dict[str, Any] = {"bytes": "1GiB", "workers": 16}
    intervals = {}
    for adds in (True, None, False):
        stated = replace(where, inside=replace(where.inside, adds=adds))
        said = fw.collective("allreduce", cluster=stated, **asked)
        assert said.interval is not None
        assert (said.may_add is not None) == (adds is None)
        intervals[adds] = said.interval
    assert intervals[None].low_s == intervals[True].low_s
    assert intervals[None].high_s == intervals[False].high_s > intervals[True].high_s


def test_switches_add_as_stated_or_as_usual_at_their_rate() -> None:
    inside = cluster("dgx-h100").inside
    assert inside is not None
    usual_ones = {rate: replace(inside, adds=None, rate_bps=8e9 * rate) for rate in (300, 450)}
    assert (usual_ones[300].can_add, usual_ones[450].can_add) == (False, True)
    assert replace(usual_ones[300], adds=True).can_add
    with pytest.raises(fw.UsageError, match=r'inside\.adds: expected kind = "switch", got "pcie"'):
        replace(inside, kind="pcie")


def test_a_fit_without_adding_switches_keeps_its_answers() -> None:
    text = as_toml(a_machine())
    assert "switch_share" in text
    older = "\n".join(line for line in text.splitlines() if "switch_share" not in line)
    said = library_time("allreduce", described(older, "older"), 2**30, 8)
    assert said.algorithm == "multi-ring"


@pytest.mark.parametrize(
    ("shown", "op", "workers", "how"),
    [
        ([("allreduce", 8)], "allreduce", 8, "as its tables say, by protocol"),
        ([("allreduce", 8)], "allreduce", 64, "for no table is of several nodes"),
        ([("allreduce", 8)], "alltoall", 64, "for no table is of alltoall or of several nodes"),
        ([("allreduce", 8)], "allgather", 8, "for no table is of allgather"),
        (
            [("allreduce", 16), ("allgather", 8)],
            "allgather",
            64,
            "for no table is of allgather over several nodes",
        ),
        ([("allreduce", 16)], "allreduce", 4, "for no table is of one node"),
        ([("allreduce", 8)], "allreduce", 1, "(one worker sends nothing)"),
    ],
)
def test_an_answer_says_what_no_table_shows(
    shown: list[tuple[str, int]], op: str, workers: int, how: str
) -> None:
    where = fitted(
        replace(a_machine(), measured=None),
        [a_table(a_machine(), table_workers, table_op) for table_op, table_workers in shown],
    )
    said = fw.collective(op, bytes="64MiB", workers=workers, cluster=where)
    assert how in " ".join(sentences(list(collective_findings(said))))
    assert bool(said.tables_lack) == ("no table" in how)


def test_an_odd_size_moves_with_the_devices_where_tables_say_so() -> None:
    machine = a_machine()

    def odd(workers: int, at: int) -> Table:
        table = a_table(machine, workers)
        points = [(size, time_s * (1.6 if size == at else 1)) for size, time_s in table.points]
        return replace(table, points=tuple(points))

    for at, expected in (((2**21, 2**22), 2**23), ((2**22, 2**22), 2**22)):
        shown = [odd(workers, size) for workers, size in zip((2, 4), at, strict=True)]
        found = fitted(replace(machine, measured=None), shown)
        beyond = {
            size: library_time("allreduce", found, size, 8).time_s
            / library_time("allreduce", machine, size, 8).time_s
            for size in (2**22, 2**23)
        }
        assert max(beyond, key=lambda size: beyond[size]) == expected


def test_a_chunk_order_that_does_not_exist_is_refused_where_tables_answer_too() -> None:
    with pytest.raises(fw.UsageError, match="nonsense"):
        fw.collective("allreduce", bytes="1MiB", cluster="dgx-h100", chunk_order="nonsense")


def test_without_a_description_the_hosts_of_a_table_say_how_many_devices_share_one(
    tmp_path: Path,
) -> None:
    ours = written(tmp_path / "ours.log", nccl_text(a_table(a_machine(), 16)))
    found = fw.fit_cluster([ours])
    assert (found.cluster.nodes, found.cluster.devices_per_node) == (2, 8)
    assert found.cluster.rests_on == (
        "Line rates are the best bandwidths of the tables over their usual shares. "
        f"Fitted by fullwire cluster fit to {ours}."
    )
    path = written(tmp_path / "fitted.toml", as_toml(found.cluster))
    said = fw.collective("allreduce", bytes="64MiB", workers=64, cluster=path)
    assert said.level == "tables"
    assert said.interval is not None
    assert "latency" not in sentences(list(collective_findings(said)))[0]  # it is in the protocols


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"devices_per_node": 4}, "devices_per_node: dgx-h100 states 8, got --devices-per-node 4"),
        (
            {"cluster": "gb200-nvl72"},
            r"ours\.log, line 17: 16 ranks on 2 hosts, and devices_per_node = 72",
        ),
        (
            {"cluster": cluster("dgx-h100", 1)},
            r"ours\.log, line 17: 16 ranks, and dgx-h100 states nodes = 1 and devices_per_node = 8",
        ),
        ({"cluster": "p3dn"}, r"line \d+: allreduce of .*nics.rate of p3dn"),
    ],
)
def test_tables_that_contradict_the_description_are_refused(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    ours = written(tmp_path / "ours.log", nccl_text(a_table(a_machine(), 16)))
    asked: dict[str, object] = {"cluster": "dgx-h100", **changes}
    with pytest.raises(fw.UsageError, match=sentence):
        fw.fit_cluster([ours], **asked)  # type: ignore[arg-type]


def test_tables_that_cannot_be_fitted_are_named_with_their_reason(tmp_path: Path) -> None:
    whole = written(tmp_path / "all_reduce.log", nccl_text(a_table(a_machine(), 16)))
    pairs = tmp_path / "pairs.log"
    row = "1048576 262144 float none -1 104.9 10.00 10.00 0 104.9 10.00 10.00 0"
    head = "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    text = f"# nThread 1 nGpus 1\n# sendrecv_perf\n{head}\n{row}\n# Avg bus bandwidth    : 10\n"
    written(pairs, text)
    short = replace(a_table(a_machine(), 8), points=((512, 1e-5),))
    tiny = written(tmp_path / "tiny.log", nccl_text(short))
    unnamed = written(tmp_path / "unnamed.log", text.replace("# sendrecv_perf\n", ""))
    found = fw.fit_cluster([whole, unnamed, pairs, tiny])
    assert [reason.rpartition("/")[2] for reason in found.unused] == [
        "unnamed.log does not name its operation: expected the command above the table, such as "
        "`# alltoall_perf -b 8 -e 1G`, or a file name like alltoall_16.log",
        "pairs.log is of sendrecv, which is not fitted",
        "tiny.log has only sizes below 1.024 kB",
    ]
    with pytest.raises(fw.UsageError, match=r"tiny\.log has only sizes below 1\.024 kB"):
        fw.fit_cluster([tiny])
    both = written(tmp_path / "both.log", nccl_text(a_table(a_machine(), 16)) + text)
    (reason,) = fw.fit_cluster([both]).unused  # one of the two tables of the file
    assert f"both.log, line {both.read_text().splitlines().index(row) + 1} is of send" in reason


def test_a_line_rate_that_a_bench_states_is_that_of_the_cluster(tmp_path: Path) -> None:
    rows = [{"bytes": 2**20, "ours_s": 2e-3}]
    paths = [
        written(
            tmp_path / f"{rate}.json", json.dumps({"workers": 2, "rate_bps": rate, "rows": rows})
        )
        for rate in (5e9, 1e10)
    ]
    found = fw.fit_cluster(paths[:1], devices_per_node=1).cluster
    assert found.nics.rate_bps == 5e9
    with pytest.raises(fw.UsageError, match="links of one rate, got 5 Gbps and 10 Gbps"):
        fw.fit_cluster(paths, devices_per_node=1)
    other = replace(found, measured=None, nics=replace(found.nics, rate_bps=2e9))
    with pytest.raises(fw.UsageError, match=r"rate_bps is 5 Gbps.*nics.rate of fitted"):
        fw.fit_cluster(paths[:1], cluster=other)


@pytest.mark.parametrize(
    ("nodes", "size", "time_s"),
    [  # 8 MI325X a node with 400 Gbps each and NCCL_ALGO=Ring; 8 MI355X with 400 Gbps each
        (2, 2**34, 91973e-6),
        (4, 2**34, 94942e-6),
        (8, 2**34, 96405e-6),
        (2, 2**33, 43643e-6),
    ],
)
def test_rings_fill_most_of_fast_nics(nodes: int, size: int, time_s: float) -> None:
    """Posted tables: 350 to 370 GB/s of 400 on the bus."""
    where = Cluster(
        name="described",
        nodes=8,
        devices_per_node=8,
        inside=Inside(kind="switch", rate_bps=8 * 500e9, adds=False),
        nics=Nics(per_node=8, rate_bps=400e9),
    )
    said = library_time("allreduce", where, size, 8 * nodes)
    assert said.time_s == pytest.approx(time_s, rel=0.08)
    assert said.low_s <= time_s <= said.high_s
    found = fitted(where, [a_table(where, 16)])
    assert found.measured is not None
    assert found.measured.tree_nics_share == pytest.approx(0.78 / 0.88)
    assert described(as_toml(found), "fitted.toml") == found


@pytest.mark.parametrize(
    ("name", "op", "devices", "size", "time_s"),
    [
        ("nd-a100-v4", "allreduce", 16, 2**28, 3013.5e-6),
        ("nd-a100-v4", "allreduce", 16, 2**33, 85129e-6),
        ("nd-a100-v4", "allreduce", 32, 2**32, 43557e-6),
        ("a3-ultra", "allgather", 16, 2**26, 278.1e-6),
        ("a3-ultra", "allgather", 16, 2**33, 24724e-6),
        ("a3-mega", "allgather", 16, 2**27, 1122.1e-6),
        ("a3-mega", "allgather", 16, 2**33, 42603e-6),
        ("a3-high", "allgather", 16, 2**24, 964.5e-6),
        ("p5", "allreduce", 16, 2**26, 597.4e-6),
        ("p5", "allreduce", 16, 2**34, 66988e-6),
        ("p4d", "allreduce", 16, 2**26, 2446.7e-6),
        ("p4d", "allreduce", 32, 2**30, 70253e-6),
    ],
)
def test_built_in_clouds_take_as_long_as_posted_tables_say(
    name: str, op: str, devices: int, size: int, time_s: float
) -> None:
    """The figures of p5, a3-high and a3-mega were chosen after a look at these tables."""
    said = library_time(op, cluster(name), size, devices)
    # Of 200 Gbps, two nodes of A100 fill more than the usual share; Echo's 16 nodes fill less.
    most = 0.24 if name == "nd-a100-v4" else 0.2
    assert said.time_s == pytest.approx(time_s, rel=most)
    assert said.low_s <= time_s <= said.high_s


def test_the_interval_of_a_cloud_holds_the_quickest_and_the_slowest_of_its_transports() -> None:
    """Of p5, tables differ by a factor of three between versions of its software."""
    where = cluster("p5", 2)
    once = replace(where.nics, lengthens_hops=False)
    slow = replace(where.nics, latency_s=75e-6, payload_share=0.5)
    for size in (2**power for power in range(14, 34)):
        told = library_time("allreduce", where, size, 16)
        for nics in (once, slow):
            time_s = library_time("allreduce", replace(where, nics=nics), size, 16).time_s
            assert told.low_s <= time_s * (1 + 1e-9)
            assert time_s <= told.high_s * (1 + 1e-9)


@pytest.mark.parametrize("latency_s", [0.0, 0.5e-6, 5e-6])
def test_the_latency_of_an_adapter_does_not_rule_a_slow_network_out(latency_s: float) -> None:
    """It moves no time, so the upper end still has 120 us more."""
    nics = Nics(rate_bps=400e9, per_node=8, latency_s=latency_s)
    where = replace(cluster("dgx-h100", 4), nics=nics)
    for op in ("allreduce", "alltoall"):
        for size in (2**13, 2**16, 2**24):
            told = library_time(op, where, size, 32)
            assert told.high_s > 1.3 * told.time_s + 120e-6


def test_a_clouds_latency_lengthens_hops_by_a_factor_and_any_other_counts_once() -> None:
    """Up to the latency of the slowest known network; beyond it, a distance counts once."""
    clouds, others = (
        [
            [each.between_hop_s for each in usual(of_latency(cluster(name), latency_us)).protocols]
            for latency_us in (0, 5, 10, 75, 175)
        ]
        for name in ("p5", "dgx-h100")
    )
    assert clouds[:2] == others[:2] == [others[0]] * 2
    assert clouds[2] == pytest.approx([2 * hop_s for hop_s in clouds[0]])
    assert clouds[3] == pytest.approx([15 * hop_s for hop_s in clouds[0]])
    assert clouds[4] == pytest.approx([hop_s + 100e-6 for hop_s in clouds[3]])
    for longer_us, hops_s in ((5, others[2]), (70, others[3]), (170, others[4])):
        assert hops_s == pytest.approx([hop_s + longer_us * 1e-6 for hop_s in others[0]])


@pytest.mark.parametrize("name", ["p4d", "p5", "a3-high", "a3-mega"])
@pytest.mark.parametrize("size", [2**16, 2**20, 2**24, 2**27])
def test_auto_plays_algorithms_with_the_hops_of_a_cloud(name: str, size: int) -> None:
    """So it ranks like costs: one algorithm is about as quick when played as in a library."""
    told = fw.collective("allreduce", bytes=size, cluster=name, nodes=4)
    auto = fw.collective("allreduce", bytes=size, cluster=name, nodes=4, algorithm="auto")
    assert isinstance(auto, TunedTime)
    way = "hierarchical-tree"
    by_library = library_time("allreduce", cluster(name, 4), size, 32, way)
    assert 0.7 * by_library.time_s < auto.times_s[way] <= by_library.time_s
    assert auto.time_s > 0.6 * told.time_s
    assert auto.interval is not None
    assert auto.interval.high_s < 2.5 * auto.time_s + 50e-6


def test_whatif_pays_the_hops_of_a_cloud_too() -> None:
    """Of 1 MiB, a hop of a few messages takes longer than its bytes."""
    where = cluster("p4d", 4)
    once = replace(where, nics=replace(where.nics, lengthens_hops=False))
    cost_s = []
    for each in (where, once):
        links = OnLinks.of(with_usual_startup(each), each.nics.latency_s, is_scattered=False)
        assert links is not None
        cost = links.cost("allreduce", "hierarchical-tree", 32)
        cost_s.append(float(cost.whole_s(2.0**20, AddTimes())))
    by_library = library_time("allreduce", where, 2**20, 32, "hierarchical-tree").time_s
    assert cost_s[0] > 1.3 * cost_s[1]
    assert cost_s[0] == pytest.approx(by_library, rel=0.3)


def of_latency(where: Cluster, latency_us: float) -> Cluster:
    """Return the cluster with another latency between nodes."""
    return replace(where, nics=replace(where.nics, latency_s=latency_us * 1e-6))


def test_the_hosts_of_a_rack_alone_are_parts_of_its_nodes(tmp_path: Path) -> None:
    """Two racks alone exchange what NICs carry. No host has as many devices as a rack's node."""
    racks = cluster("gb200-nvl72", 2)
    assert racks.inside is not None
    table = a_table(replace(racks, inside=replace(racks.inside, adds=False)), 144)
    path = written(tmp_path / "racks.log", nccl_text(table, per_host=4))
    fit = fw.fit_cluster([path], cluster="gb200-nvl72")
    assert fit.cluster.devices_per_node == 72
    assert max(errors(fit.cluster, table)) < 0.05
    assert any("36 hosts" in note and "parts of a node" in note for note in fit.problems)
    of_hosts = written(tmp_path / "ours.toml", as_toml(replace(cluster("dgx-h100"), name="ours")))
    with pytest.raises(fw.UsageError, match="36 hosts, and devices_per_node = 8 of ours"):
        fw.fit_cluster([path], cluster=of_hosts)


@pytest.mark.parametrize(
    ("device", "where", "says"),
    [
        ("NVIDIA H100 80GB HBM3", "gb200-nvl72", "describes GB200"),
        ("NVIDIA GB200", "gb200-nvl72", ""),
        ("NVIDIA H100 80GB HBM3", "dgx-h100", ""),
        ("NVIDIA H200", "dgx-h100", "describes H100"),
        ("A device", "dgx-h100", ""),
    ],
)
def test_a_table_of_other_devices_than_the_described_ones_is_told(
    tmp_path: Path, device: str, where: str, says: str
) -> None:
    table = a_table(cluster(where, 2), 2 * cluster(where).devices_per_node)
    text = nccl_text(table, per_host=cluster(where).devices_per_node, device=device)
    path = written(tmp_path / "t.log", text)
    fit = fw.fit_cluster([path], cluster=where)
    told = [problem for problem in fit.problems if "was measured on" in problem]
    assert told == ([f"{path} was measured on {device}, and {where} {says}"] if says else [])


@pytest.mark.parametrize(
    ("ranks", "per_host", "states"),
    [
        (256, 8, {"devices_per_node": 64}),
        (256, 8, {"devices_per_node": 32}),
        (256, 4, {"devices_per_node": 64}),
        (144, 8, {"cluster": "gb200-nvl72"}),
        (144, 1, {"cluster": "gb200-nvl72"}),
    ],
)
def test_hosts_that_no_rack_has_are_no_parts_of_a_stated_node(
    tmp_path: Path, ranks: int, per_host: int, states: dict[str, Any]
) -> None:
    """Racks of 36 and 72 devices have hosts of 2 and 4. Others contradict their description."""
    where = cluster("dgx-h100", ranks // 8)
    table = a_table(replace(where, nics=replace(where.nics, rate_bps=40e9)), ranks)
    path = written(tmp_path / "hosts.log", nccl_text(table, per_host=per_host))
    with pytest.raises(fw.UsageError, match=f"{ranks} ranks on {ranks // per_host} hosts"):
        fw.fit_cluster([path], **states)


def test_an_all_to_all_fills_no_more_of_fast_nics_than_of_others() -> None:
    """Tables show only of rings that they do: per bit, NICs of 200 and 400 Gbps take as long."""
    where = cluster("dgx-h100")
    by_rate = [
        replace(where, nics=replace(where.nics, rate_bps=rate_bps)) for rate_bps in (200e9, 400e9)
    ]
    slow, fast = (library_time("alltoall", where, 2**33, 64).time_s for where in by_rate)
    assert fast == pytest.approx(slow / 2, rel=0.02)
    slow, fast = (library_time("allgather", where, 2**33, 64).time_s for where in by_rate)
    assert fast == pytest.approx(slow / 2 * 0.78 / 0.88, rel=0.02)
    asked: dict[str, Any] = {"bytes": "8GiB", "workers": 64, "algorithm": "pairwise"}
    slow, fast = (fw.collective("alltoall", cluster=where, **asked).time_s for where in by_rate)
    assert fast == pytest.approx(slow / 2, rel=0.06)


def test_a_little_more_of_the_nics_rate_shortens_a_time_a_little() -> None:
    """The share that rings fill rises from 200 to 400 Gbps, and has no step."""
    where = cluster("dgx-h100")
    rates_bps = np.arange(190e9, 410e9, 1e9)
    times_s = [
        library_time(
            "allgather", replace(where, nics=replace(where.nics, rate_bps=rate_bps)), 2**30, 64
        ).time_s
        for rate_bps in rates_bps
    ]
    steps = np.diff(times_s) / times_s[1:]
    assert steps.max() <= 0
    assert steps.min() > -0.01


def test_an_all_to_all_over_pcie_leaves_the_node_by_the_devices_own_link() -> None:
    """Two posted nodes of 8 PCIe 5 devices with 400 Gbps each: 1 GiB takes 24.5 ms."""
    where = Cluster(
        name="described",
        nodes=2,
        devices_per_node=8,
        inside=Inside(kind="pcie", rate_bps=8 * 64e9),
        nics=Nics(per_node=8, rate_bps=400e9),
    )
    said = library_time("alltoall", where, 2**30, 16)
    assert said.time_s == pytest.approx(24470.9e-6, rel=0.15)
    by_switch = replace(where, inside=Inside(kind="switch", rate_bps=8 * 64e9))
    assert library_time("alltoall", by_switch, 2**30, 16).time_s < said.time_s
    assert library_time("alltoall", by_switch, 2**30, 8) == library_time(
        "alltoall", where, 2**30, 8
    )


@pytest.mark.parametrize("devices", [8, 16])
def test_a_nic_has_the_rate_that_an_all_to_all_shows_of_it(devices: int) -> None:
    """In an all-to-all each device uses its own NIC, and for other nodes' parts alone."""
    where = replace(a_machine(), devices_per_node=devices, nodes=16)
    where = replace(where, nics=replace(where.nics, per_node=devices))
    counts = (devices, 2 * devices, 4 * devices)
    tables = [a_table(where, workers, "alltoall") for workers in counts]
    made = made_of(tables, devices, "made")
    assert made.nics.rate_bps == pytest.approx(0.7 * where.nics.rate_bps, rel=0.1)
    found = fitted(made, tables)
    far = a_table(where, 8 * devices, "alltoall")
    assert np.median(errors(with_nodes(found, 8), far)) < 0.05


def test_of_tables_of_several_nodes_the_rate_within_a_node_is_only_the_least(
    tmp_path: Path,
) -> None:
    machine = a_machine()
    slow = replace(machine, nics=replace(machine.nics, rate_bps=25e9))
    paths = [
        written(tmp_path / f"{workers}.log", nccl_text(a_table(slow, workers)))
        for workers in (8, 16, 64)
    ]
    found = fw.fit_cluster(paths[1:], devices_per_node=8)
    assert found.cluster.inside is not None
    assert found.cluster.inside.rate_is_least
    assert "no table is of one node" in found.doubts[-1]
    assert described(as_toml(found.cluster), "fitted.toml") == found.cluster
    for size, true_s in a_table(slow, 8).points:
        said = library_time("allreduce", found.cluster, size, 8)
        assert said.low_s <= true_s <= said.high_s
    of_many = library_time("allreduce", found.cluster, 2**30, 64)
    assert of_many.high_s / of_many.low_s < 2
    asked: dict[str, Any] = {"bytes": "1GiB", "workers": 8, "cluster": found.cluster}
    [true_s] = [time_s for size, time_s in a_table(slow, 8).points if size == 2**30]
    for level in (None, "event"):  # by the tables, and played
        interval = fw.collective("allreduce", level=level, **asked).interval
        assert interval is not None
        assert interval.low_s <= true_s <= interval.high_s
    told = " ".join(sentences(list(collective_findings(fw.collective("allreduce", **asked)))))
    assert "They may be much faster" in told
    both = fw.fit_cluster(paths, devices_per_node=8)
    assert both.cluster.inside is not None
    assert not both.cluster.inside.rate_is_least
    assert not both.doubts


def test_tables_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    table = a_table(a_machine(), 16)
    slower = replace(table, points=tuple((size, 5 * time_s) for size, time_s in table.points))
    paths = [
        written(tmp_path / f"{name}.log", nccl_text(each))
        for name, each in (("one", table), ("other", slower))
    ]
    told = r"other\.log, line \d+: allreduce of .* among 16 takes .*, and .*one\.log, line \d+ has"
    with pytest.raises(fw.UsageError, match=told):
        fw.fit_cluster(paths, devices_per_node=8)
    once = replace(table, points=(*table.points[:9], *slower.points[9:10], *table.points[10:]))
    written(paths[1], nccl_text(once))
    fw.fit_cluster(paths, devices_per_node=8)


def test_a_fit_that_is_far_from_its_tables_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = a_table(a_machine(), 16)
    shrinking = tuple((size, 1e-2 * (2**10 / size) ** 0.2) for size, _ in table.points[:16])
    path = written(tmp_path / "shrinking.log", nccl_text(replace(table, points=shrinking)))
    fit = fw.fit_cluster([path], cluster="dgx-h100")
    assert fit.quantile(0.5) > 0.15
    [doubt] = fit.doubts
    assert doubt.startswith("Half of the rows are at least ")
    print_cluster_fit(fit)
    assert "do not describe" in " ".join(capsys.readouterr().out.split())
    path = written(tmp_path / "usual.log", nccl_text(table))
    assert not fw.fit_cluster([path], cluster="dgx-h100").doubts


@pytest.mark.parametrize("rows", [[], [{"bytes": 2**20, "ours_s": 2e-3, "wire": "bf16"}]])
def test_a_bench_without_a_plain_row_is_left_out_for_that(
    tmp_path: Path, rows: list[dict[str, object]]
) -> None:
    path = written(tmp_path / "bench.json", json.dumps({"workers": 2, "rows": rows}))
    with pytest.raises(fw.UsageError, match=r"bench\.json has no row of float32$"):
        fw.fit_cluster([path], devices_per_node=1)


@pytest.mark.parametrize(("least", "most"), [(2**10, 2**20), (2**24, 2**32)])
def test_sizes_that_no_table_shows_are_told_and_less_sure(least: int, most: int) -> None:
    machine = a_machine()
    tables = [
        replace(table, points=tuple(point for point in table.points if least <= point[0] <= most))
        for table in (a_table(machine, 16), a_table(machine, 32))
    ]
    found = fitted(replace(machine, measured=None), tables)
    sure = fitted(replace(machine, measured=None), [a_table(machine, 16), a_table(machine, 32)])
    for size in SIZES:
        said = library_time("allreduce", found, size, 64)
        true_s = library_time("allreduce", machine, size, 64).time_s
        assert said.low_s <= true_s <= said.high_s
        if not least <= size <= most:
            known = library_time("allreduce", sure, size, 64)
            assert said.high_s / said.time_s >= known.high_s / known.time_s - 0.05
    far = 2**32 if least == 2**10 else 2**16
    word = "above 1.049 MB" if least == 2**10 else "below 16.78 MB"
    assert library_time("allreduce", found, far, 64).lacks == (f"sizes {word}",)
    assert not library_time("allreduce", sure, far, 64).lacks


def test_a_host_with_more_ranks_than_a_node_has_devices_is_refused(tmp_path: Path) -> None:
    text = nccl_text(a_table(a_machine(), 16))
    moved = text.replace("on host1 device 0", "on host0 device 8")
    assert moved != text
    path = written(tmp_path / "uneven.log", moved)
    with pytest.raises(fw.UsageError, match="9 of its 16 ranks are on one host, and devices_per_n"):
        fw.fit_cluster([path], devices_per_node=8)


@pytest.mark.parametrize("workers", [0, 2, 2_000_000_000])
@pytest.mark.parametrize("size", [0, 2**20, 10**21])
@pytest.mark.parametrize("time_s", [0.0, 1e-30, 1e-3])
def test_sizes_and_times_of_a_bench_that_cannot_be_are_damage(
    tmp_path: Path, workers: int, size: int, time_s: float
) -> None:
    bench = {"workers": workers, "rows": [{"bytes": size, "ours_s": time_s}]}
    path = written(tmp_path / "bench.json", json.dumps(bench))
    if (workers, size, time_s) == (2, 2**20, 1e-3):
        assert fw.fit_cluster([path], devices_per_node=1).cluster.devices == 2
    else:
        with pytest.raises(fw.DamagedInput, match="expected JSON of fullwire bench transport"):
            fw.fit_cluster([path], devices_per_node=1)


def test_a_contradiction_names_the_line_of_the_table_that_has_it(tmp_path: Path) -> None:
    """Of two tables in one file, the first has the size too, and is within a node."""
    first, second = (nccl_text(a_table(a_machine(), workers)) for workers in (8, 16))
    path = written(tmp_path / "both.log", first + second)
    slow = cluster("dgx-h100")
    slow = replace(slow, nics=replace(slow.nics, rate_bps=1e10))
    with pytest.raises(fw.UsageError, match=r"nics\.rate of dgx-h100") as told:
        fw.fit_cluster([path], cluster=slow)
    line = int(str(told.value).partition("line ")[2].partition(":")[0])
    assert line > first.count("\n")
    osu = written(
        tmp_path / "osu.txt",
        "# mpirun -np 16 osu_allgather\n# OSU MPI Allgather Latency Test v7.5\n"
        "# Size       Avg Latency(us)\n1048576    1.00\n",
    )
    with pytest.raises(fw.UsageError, match=r"osu\.txt, line 4: allgather of 16.78 MB"):
        fw.fit_cluster([osu], cluster="dgx-h100")
    with pytest.raises(fw.UsageError, match=r"osu\.txt, line 1: 16 ranks, and dgx-h100 states"):
        fw.fit_cluster([osu], cluster=cluster("dgx-h100", 1))


def test_a_table_that_fills_half_more_than_the_links_in_a_node_is_refused(tmp_path: Path) -> None:
    ours = written(tmp_path / "ours.log", nccl_text(a_table(a_machine(), 8)))
    slower = cluster("dgx-h100")
    assert slower.inside is not None
    slower = replace(slower, inside=replace(slower.inside, rate_bps=slower.inside.rate_bps / 2))
    with pytest.raises(fw.UsageError, match=r"line \d+: allreduce of .*inside.rate of dgx-h100"):
        fw.fit_cluster([ours], cluster=slower)
    fw.fit_cluster([ours], cluster="dgx-h100")


@pytest.mark.parametrize(
    ("op", "program", "field"),
    [
        ("allreduce", "all_reduce", "inside.rate"),
        ("allreduce", "all_reduce", "nics.rate"),
        ("alltoall", "alltoall", "nics.rate"),
    ],
)
def test_a_table_of_several_nodes_contradicts_links_that_are_too_slow(
    tmp_path: Path, op: str, program: str, field: str
) -> None:
    """All bytes of a device leave it by the links of its node or by its share of the NICs."""
    text = nccl_text(a_table(a_machine(), 16, op)).replace("all_reduce_perf", f"{program}_perf")
    path = written(tmp_path / f"{op}.log", text)
    where = cluster("dgx-h100")
    assert where.inside is not None
    if field == "inside.rate":
        slow = replace(where, inside=replace(where.inside, rate_bps=8e9))
    else:
        slow = replace(where, nics=replace(where.nics, rate_bps=8e9))
    with pytest.raises(fw.UsageError, match=rf"line \d+: {op} of .*{field} of dgx-h100"):
        fw.fit_cluster([path], cluster=slow)
    fw.fit_cluster([path], cluster="dgx-h100")


def test_the_picture_of_a_fit_shows_errors_by_size_and_device_counts_in_order(
    tmp_path: Path,
) -> None:
    machine = a_machine()
    tables = [
        written(
            tmp_path / f"{op}_{workers}.log",
            nccl_text(a_table(machine, workers, op)).replace("all_reduce_perf", f"{program}_perf"),
        )
        for op, program in (("allreduce", "all_reduce"), ("allgather", "all_gather"))
        for workers in (128, 16, 2, 24)
    ]
    fit = fw.fit_cluster(tables, devices_per_node=8)
    plot_cluster_fit(fit, tmp_path / "fit.svg")
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "fit.svg").read_text())
    assert {"allreduce, errors", "allgather, errors", "predicted against measured"} <= set(shown)
    assert "+0%" in shown
    begin = shown.index("devices") - 4
    assert shown[begin : begin + 4] == ["2", "16", "24", "128"]


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    text = nccl_text(a_table(a_machine(), 16))
    for number, cut in enumerate((text[: len(text) * 2 // 3], text[:300])):
        with pytest.raises(fw.DamagedInput):
            fw.fit_cluster([written(tmp_path / f"cut{number}.log", cut)], cluster="dgx-h100")
    with pytest.raises(fw.UsageError, match="expected a file"):
        fw.fit_cluster([tmp_path / "none.log"], cluster="dgx-h100")


def test_tables_of_one_operation_and_count_keep_columns_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = a_table(a_machine(), 16)
    slower = replace(table, points=tuple((size, 1.2 * time_s) for size, time_s in table.points))
    paths = [
        written(tmp_path / f"{number}.log", nccl_text(each))
        for number, each in enumerate((table, slower))
    ]
    fit = fw.fit_cluster(paths, cluster="dgx-h100")
    off = {each.table: each.error for each in fit.residuals if each.bytes == 2**26}
    assert off[1] > off[2]
    print_cluster_fit(fit)
    shown = capsys.readouterr().out
    assert "allreduce 16, table 1" in shown
    assert "allreduce 16, table 2" in shown


def echo_tables() -> dict[int, Table]:
    """Return the tables of a real machine by their number of ranks."""
    if not ECHO.exists():
        pytest.skip(f"the tables of a real machine are not at {ECHO}")
    points = defaultdict(list)
    with ECHO.open() as file:
        for row in csv.DictReader(file):
            points[int(row["gpus"])].append((int(row["size"]), float(row["oop_time_us"]) * 1e-6))
    return {
        workers: Table(op="allreduce", workers=workers, points=tuple(sorted(rows)), source="echo")
        for workers, rows in points.items()
    }


def test_a_real_machine_is_predicted_from_two_tables() -> None:
    tables = echo_tables()
    where = replace(cluster("dgx-a100", 16), startup_s=0.0)
    found = fitted(where, [tables[8], tables[32]])
    off = [each for workers in (16, 64, 128) for each in errors(found, tables[workers])]
    assert np.median(off) < 0.10
    assert np.quantile(off, 0.9) < 0.25


@pytest.mark.parametrize(
    ("shown", "most"), [((32,), 0.045), ((128,), 0.075), ((32, 64, 128), 0.03)]
)
def test_two_nodes_of_a_real_machine_are_predicted_from_more_nodes_alone(
    shown: tuple[int, ...], most: float
) -> None:
    tables = echo_tables()
    seen = [tables[workers] for workers in shown]
    found = with_nodes(fitted(made_of(seen, 8, "made"), seen, nics_are_stated=False), 16)
    assert np.median(errors(found, tables[16])) < most
