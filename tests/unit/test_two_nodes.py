"""An all-reduce of two nodes by a tree sends half as much as one of more nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.cluster_fit import ClusterFit, made_of
from fullwire.clusters import cluster
from fullwire.clusters.cluster import Cluster, Inside, Nics, with_nodes
from fullwire.clusters.description import as_toml, described
from fullwire.collectives import fitting
from fullwire.collectives.fitting import Table, fitted, residuals
from fullwire.collectives.left_open import FASTEST_NIC_BPS
from fullwire.collectives.library import library_time
from fullwire.collectives.usual import usual
from fullwire.findings.collective import collective_findings
from fullwire.report.cluster import print_cluster_fit
from fullwire.words import sentences

DEVICES = 8
SIZES = [2**power for power in range(12, 34)]
PROTOCOLS = (  # start-up, hop in a node and between nodes (seconds), and filled shares of the links
    (6e-6, 0.7e-6, 12e-6, 0.25, 0.3),
    (8e-6, 1.3e-6, 18e-6, 0.8, 0.75),
    (14e-6, 3.4e-6, 30e-6, 1.0, 1.0),
)
# Bytes a second in a node, and of all NICs of a node together. NICs hold up a tree of two nodes
# in the first four, and not in the last one.
HELD_UP = [(120e9, 12e9), (200e9, 11e9), (150e9, 24e9), (240e9, 75e9)]
BALANCED = (360e9, 368e9)
FAST_NICS = (100e9, 368e9)  # which are faster than the links in a node
WITHOUT_ADDING = (240e9, 170e9)  # balanced too, with switches that do not add


def true_s(op: str, size: int, workers: int, rates: tuple[float, float]) -> float:
    """Time an all-gather by rings, or an all-reduce by the quicker of rings and a double tree.

    In such a tree the busiest node is a leaf of one half and has two children in the other. Among
    two nodes it is the end of one edge, and among three it has one child.
    """
    inside, nics = rates
    nodes, here = -(-workers // DEVICES), min(workers, DEVICES)
    rounds = 2 if op == "allreduce" else 1
    around = rounds * (workers - 1) / workers * size
    through_tree = {2: 1.0, 3: 1.5}.get(nodes, 2.0) * size / 0.92
    ways = []
    for startup_s, hop_s, between_s, fills_inside, fills_nics in PROTOCOLS:
        rate = inside * fills_inside
        if nodes == 1:
            ways.append(startup_s + rounds * (here - 1) * hop_s + around / rate)
            continue
        hops_s = rounds * nodes * ((here - 1) * hop_s + between_s)
        ways.append(startup_s + hops_s + around / min(rate, nics * fills_nics))
        if op != "allreduce":
            continue
        hops_s = 2 * ((here - 1) * hop_s + math.ceil(math.log2(nodes)) * between_s)
        carried_s = max(through_tree / (nics * fills_nics), 2 * size / rate)
        ways.append(startup_s + hops_s + carried_s)
    return min(ways)


def a_table(workers: int, rates: tuple[float, float], op: str = "allreduce") -> Table:
    noise = np.exp(np.random.default_rng(workers).normal(0, 0.02, len(SIZES))).tolist()
    points = tuple(
        (size, true_s(op, size, workers, rates) * each)
        for size, each in zip(SIZES, noise, strict=True)
    )
    return Table(op=op, workers=workers, points=points, source=f"{op}_{workers}.log")


def a_fit(
    rates: tuple[float, float],
    shown: tuple[int, ...],
    *,
    is_described: bool = False,
    gathered: tuple[int, ...] = (),
) -> Cluster:
    tables = [a_table(workers, rates) for workers in shown]
    tables += [a_table(workers, rates, "allgather") for workers in gathered]
    if is_described:
        where = Cluster(
            name="described",
            nodes=16,
            devices_per_node=DEVICES,
            inside=Inside(kind="switch", rate_bps=8 * rates[0] / 0.8),
            nics=Nics(per_node=1, rate_bps=8 * rates[1] / 0.95),
        )
        return fitted(where, tables)
    made = made_of(tables, DEVICES, "made")
    return with_nodes(fitted(made, tables, nics_are_stated=False), 16)


def judged(found: Cluster, workers: int, rates: tuple[float, float]) -> tuple[float, float]:
    """Return the median error from 64 KiB on, and the share of sizes that lie in the interval."""
    errors, holds = [], []
    for size in SIZES[4:]:
        time_s = true_s("allreduce", size, workers, rates)
        said = library_time("allreduce", found, size, workers)
        errors.append(abs(said.time_s / time_s - 1))
        holds.append(said.low_s <= time_s <= said.high_s)
    return float(np.median(errors)), float(np.mean(holds))


@pytest.mark.parametrize("is_described", [False, True])
@pytest.mark.parametrize("rates", HELD_UP)
def test_a_node_and_two_nodes_tell_more_nodes_where_nics_hold_up_a_tree(
    rates: tuple[float, float], is_described: bool
) -> None:
    found = a_fit(rates, (8, 16), is_described=is_described)
    for workers in (24, 32, 64, 128):
        error, share = judged(found, workers, rates)
        assert error < 0.1
        assert share > 0.9
    assert described(as_toml(found), "fitted.toml").measured == found.measured


def test_a_table_of_two_nodes_alone_keeps_the_interval_of_its_own_rows_narrow() -> None:
    """The tree that sends half is one of its fits. Elsewhere the interval holds that one, too."""
    for rates in HELD_UP:
        found = a_fit(rates, (16,))
        said = library_time("allreduce", found, 2**30, 16)
        assert said.high_s / said.low_s < 1.4
        for workers in (16, 24, 32, 64):
            assert judged(found, workers, rates)[1] > 0.9


@pytest.mark.parametrize("rates", HELD_UP)
@pytest.mark.parametrize("shown", [(8, 32), (32,), (64,), (32, 64)])
def test_more_nodes_leave_open_what_two_nodes_send_and_the_interval_says_so(
    rates: tuple[float, float], shown: tuple[int, ...]
) -> None:
    found = a_fit(rates, shown)
    assert judged(found, 16, rates)[1] > 0.9
    error, share = judged(found, 128, rates)
    assert error < 0.1
    assert share > 0.9


@pytest.mark.parametrize("shown", [(32,), (32, 64), (64, 128)])
def test_where_links_in_a_node_are_unknown_too_two_nodes_are_taken_between_both_trees(
    shown: tuple[int, ...],
) -> None:
    errors = [judged(a_fit(rates, shown), 16, rates)[0] for rates in HELD_UP]
    assert max(errors) < 0.63
    for rates, most in ((BALANCED, 0.13), (WITHOUT_ADDING, 0.25), (FAST_NICS, 0.18)):
        error, share = judged(a_fit(rates, shown), 16, rates)
        assert error < most
        assert share == 1


@pytest.mark.parametrize("rates", HELD_UP)
@pytest.mark.parametrize("gathered", [16, 32])
def test_a_table_of_an_all_gather_tells_the_nics_and_so_what_a_tree_of_two_nodes_sends(
    rates: tuple[float, float], gathered: int
) -> None:
    found = a_fit(rates, (16,), gathered=(gathered,))
    for workers in (24, 64):
        assert judged(found, workers, rates)[0] < 0.1


@pytest.mark.parametrize("is_described", [False, True])
@pytest.mark.parametrize("shown", [(16, 24), (16, 64)])
@pytest.mark.parametrize("rates", HELD_UP)
def test_tables_of_two_nodes_and_of_more_tell_how_much_a_tree_of_two_sends(
    rates: tuple[float, float], shown: tuple[int, ...], is_described: bool
) -> None:
    found = a_fit(rates, shown, is_described=is_described)
    assert found.measured is not None
    assert not any(measured.pair_share for measured in found.measured.allowed())
    for workers in (24, 32, 64, 128):
        error, share = judged(found, workers, rates)
        assert error < 0.1
        assert share > 0.9


@pytest.mark.parametrize("rates", [*HELD_UP, WITHOUT_ADDING, BALANCED])
def test_tables_of_one_node_say_nothing_of_nics_and_so_do_intervals(
    rates: tuple[float, float],
) -> None:
    found = a_fit(rates, (4, 8))
    for workers in (16, 24, 128):
        assert judged(found, workers, rates)[1] == 1
    asked: dict[str, Any] = {"bytes": "1GiB", "cluster": found}
    said = fw.collective("allreduce", workers=64, **asked)
    assert said.open_of_nics == "rate"
    assert "rate of the NICs is a guess" in " ".join(sentences([*collective_findings(said)]))
    ways: list[dict[str, Any]] = [{"algorithm": "auto"}, {"algorithm": "multi-ring"}]
    for how in (*ways, {"level": "event"}):
        interval = fw.collective("allreduce", workers=64, **how, **asked).interval
        assert interval is not None
        assert interval.low_s <= true_s("allreduce", 2**30, 64, rates) <= interval.high_s
    assert fw.collective("allreduce", workers=8, **asked).open_of_nics is None
    stated = fw.collective("allreduce", workers=64, bandwidth="100Gbps", **asked)
    assert stated.open_of_nics is None
    assert described(as_toml(found), "fitted.toml") == found


@pytest.mark.parametrize("gathered", [(), (8, 32)])
@pytest.mark.parametrize("rates", HELD_UP)
def test_tables_of_full_nodes_do_not_tell_how_many_nics_a_last_node_uses(
    rates: tuple[float, float], gathered: tuple[int, ...]
) -> None:
    """Four devices of the last node may have all NICs of a node, or half of them."""
    inside, nics = rates
    found = a_fit(rates, (8, 32), gathered=gathered)
    for op in ("allreduce", "allgather") if gathered else ("allreduce",):
        for bytes_s in (nics, nics / 2):
            for size in SIZES[6:]:
                said = library_time(op, found, size, 36)
                assert said.low_s <= true_s(op, size, 36, (inside, bytes_s)) <= said.high_s
    said_of_part, said_of_full = (
        fw.collective("allreduce", bytes="1GiB", workers=workers, cluster=found)
        for workers in (36, 40)
    )
    assert (said_of_part.open_of_nics, said_of_full.open_of_nics) == ("count", None)
    told = " ".join(sentences([*collective_findings(said_of_part)]))
    assert "The last node is partly filled" in told


def test_a_table_of_a_part_node_tells_how_many_nics_it_uses() -> None:
    found = a_fit(HELD_UP[0], (8, 32, 36))
    asked: dict[str, Any] = {"bytes": "1GiB", "cluster": found}
    open_of = [
        fw.collective("allreduce", workers=workers, **asked).open_of_nics
        for workers in (36, 44, 35)
    ]
    assert open_of == [None, None, "count"]


def test_a_stated_rate_of_nics_leaves_their_number_open() -> None:
    found = a_fit(HELD_UP[0], (8, 32))
    asked: dict[str, Any] = {"bytes": "1GiB", "cluster": found, "bandwidth": "100Gbps"}
    assert fw.collective("allreduce", workers=36, **asked).open_of_nics == "count"
    assert fw.collective("allreduce", workers=40, **asked).open_of_nics is None


@pytest.mark.parametrize("shown", [(8,), (8, 32)])
def test_nics_that_devices_are_tied_to_may_be_open_too(shown: tuple[int, ...]) -> None:
    found = a_fit(HELD_UP[0], shown)
    tied = replace(found, nics=replace(found.nics, of_device=tuple(range(DEVICES))))
    asked: dict[str, Any] = {"bytes": "1GiB", "workers": 36}
    said, of_tied = (fw.collective("allreduce", cluster=each, **asked) for each in (found, tied))
    assert of_tied.interval == said.interval


def test_a_guessed_rate_of_nics_is_no_faster_than_the_fastest_that_is_said() -> None:
    found = a_fit((1900e9, 1e9), (4, 8))
    assert found.nics.rate_bps == FASTEST_NIC_BPS


def test_a_played_time_says_that_its_nics_are_a_guess() -> None:
    asked: dict[str, Any] = {"bytes": "1GiB", "cluster": a_fit(HELD_UP[0], (4, 8))}
    ways: list[dict[str, Any]] = [{"algorithm": "ring"}, {"level": "event"}]
    for how in ways:
        said = fw.collective("allreduce", workers=16, **how, **asked)
        assert said.open_of_nics == "rate"


def test_rows_that_do_not_depend_on_a_library_are_fitted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[fitting._Library] = []
    fit = fitting._fit

    def counted(
        where: Cluster, rows: Sequence[fitting._Rows], library: fitting._Library
    ) -> fitting._Fit:
        counts.append(library)
        return fit(where, rows, library)

    monkeypatch.setattr(fitting, "_fit", counted)
    for op, count in (("allreduce", 2), ("allgather", 1)):  # with switches that add and without
        counts.clear()
        where = cluster("dgx-h100", 2)
        found = fitted(where, [a_table(workers, BALANCED, op) for workers in (4, 8)])
        assert found.measured is not None
        assert len(counts) == count
        assert len([*found.measured.allowed()]) == 4


def test_a_named_algorithm_is_timed_by_a_fit_whose_library_has_it() -> None:
    found = a_fit(BALANCED, (8,), is_described=True)
    assert found.measured is not None
    adding = replace(found.measured, switch_share=0.6, other=None)
    without = replace(adding, switch_share=0.0)
    assert found.inside is not None
    inside = replace(found.inside, adds=True)
    times_s = [
        library_time(
            "allreduce", replace(found, inside=inside, measured=measured), 2**30, 8, "nvls"
        ).time_s
        for measured in (adding, replace(without, other=adding), without)
    ]
    assert times_s[0] == times_s[1] > times_s[2]


def test_links_in_a_node_may_hide_slow_nics_and_the_interval_says_so() -> None:
    """Two nodes take as long with NICs of half the rate, because the links in a node hold both."""
    inside, nics = BALANCED
    found = a_fit(BALANCED, (8, 16))
    error, share = judged(found, 64, BALANCED)
    assert error < 0.1
    assert share > 0.9
    assert judged(found, 64, (inside, 0.6 * nics))[1] > 0.9
    assert found.measured is not None
    assert {bool(each.pair_share) for each in found.measured.allowed()} == {True, False}


@pytest.mark.parametrize(("shown", "is_asked"), [((16,), True), ((16, 64), False)])
def test_a_fit_asks_for_tables_of_two_nodes_and_of_more_only_if_it_lacks_them(
    capsys: pytest.CaptureFixture[str], shown: tuple[int, ...], is_asked: bool
) -> None:
    found = a_fit(BALANCED, shown, is_described=True)
    rows = residuals(found, [a_table(workers, BALANCED) for workers in shown])
    print_cluster_fit(ClusterFit(cluster=found, residuals=tuple(rows), choices=()))
    text = " ".join(capsys.readouterr().out.split())
    assert "leave open whether an all-reduce of two nodes" in text
    assert ("Tables of two nodes and of more" in text) == is_asked


@pytest.mark.parametrize(
    ("inside_gb_s", "nics", "nic_gbps", "size", "time_s"),
    [
        (150, 1, 100, 10**9, 0.134),  # NVIDIA/nccl-tests#22: eight V100 a node, 60 Gbps by rings
        (200, 8, 100, 8 * 10**9, 1.875 * 8 / 161),  # #153: eight H800 a node, busbw 161 GB/s
    ],
)
def test_two_nodes_that_are_only_described_may_send_half(
    inside_gb_s: int, nics: int, nic_gbps: int, size: int, time_s: float
) -> None:
    where = Cluster(
        name="described",
        nodes=4,
        devices_per_node=DEVICES,
        inside=Inside(kind="switch", rate_bps=inside_gb_s * 8e9),
        nics=Nics(per_node=nics, rate_bps=nic_gbps * 1e9),
    )
    said = library_time("allreduce", where, size, 16)
    assert said.low_s <= time_s <= said.high_s
    of_more = library_time("allreduce", where, size, 32)
    assert of_more.high_s / of_more.low_s < said.high_s / said.low_s


def test_a_file_may_say_that_a_tree_of_two_nodes_sends_half() -> None:
    found = a_fit(BALANCED, (8, 16), is_described=True)
    assert found.measured is not None
    half = replace(found, measured=replace(found.measured, pair_share=0.0))
    assert described(as_toml(half), "half.toml") == half


@pytest.mark.parametrize("is_described", [False, True])
@pytest.mark.parametrize("shown", [(4, 8), (8, 32), (32, 64), (64,)])
@pytest.mark.parametrize("rates", [*HELD_UP, WITHOUT_ADDING, BALANCED])
def test_without_a_table_of_two_nodes_their_interval_holds_the_tree_that_sends_half(
    rates: tuple[float, float], shown: tuple[int, ...], is_described: bool
) -> None:
    if max(shown) <= DEVICES and not is_described:
        pytest.skip("nothing tells the network between nodes")
    found = a_fit(rates, shown, is_described=is_described)
    error, share = judged(found, 16, rates)
    assert share > 0.9
    if rates in HELD_UP and (is_described or min(shown) <= DEVICES):
        assert error < 0.25  # the links of a node are known, and so is the tree that NCCL takes
    asked: dict[str, Any] = {"bytes": "1GiB", "cluster": found}
    told = sentences([*collective_findings(fw.collective("allreduce", workers=16, **asked))])
    if rates != BALANCED:  # The switches of that machine add, and send half as well.
        assert "whether an all-reduce of two nodes sends half" in " ".join(told)


@pytest.mark.parametrize("workers", [16, 24, 32])
@pytest.mark.parametrize("is_fitted", [False, True])
def test_faster_nics_never_make_an_answer_longer(workers: int, is_fitted: bool) -> None:
    """NICs that hold up a tree of two nodes become others gradually, and so do the times."""
    times_s = []
    for gb_s in np.geomspace(60, 200, 40).tolist():
        rates = (240e9, gb_s * 1e9)
        where = replace(a_fit(rates, (8,), is_described=True), measured=None)
        if is_fitted:
            measured = a_fit(rates, (8, 32), is_described=True).measured
            where = replace(where, measured=measured)
        said = library_time("allreduce", where, 2**28, workers)
        assert said.low_s < said.time_s < said.high_s
        times_s.append(said.time_s)
        assert described(as_toml(where), "open.toml") == where
    steps = np.diff(np.log(times_s))
    assert steps.max() < (0.03 if is_fitted else 1e-9)  # the tables of each fit have noise
    assert steps.min() > -0.1


def test_rings_over_several_nodes_tell_only_the_least_that_nics_can_carry() -> None:
    """Two posted nodes of 8 PCIe devices, with a NIC of 400 Gbps each: links inside are slow."""
    rows = ((2**24, 988e-6), (2**26, 2863.84e-6), (2**28, 10265.1e-6), (2**30, 40692.8e-6))
    tables = [Table(op="allreduce", workers=16, points=rows, source="allreduce_16.log")]
    for more in ((), (Table(op="allreduce", workers=8, points=rows, source="allreduce_8.log"),)):
        made = made_of([*tables, *more], DEVICES, "made")
        found = fitted(made, [*tables, *more], nics_are_stated=False)
        for size, time_s in ((2**26, 1556.34e-6), (2**30, 24470.9e-6)):
            said = library_time("alltoall", found, size, 16)
            assert said.low_s < time_s < said.high_s
        asked: dict[str, Any] = {"bytes": "1GiB", "cluster": found, "workers": 16}
        told = sentences([*collective_findings(fw.collective("alltoall", **asked))])
        assert "The NICs may be faster than the tables show" in " ".join(told)
    described = replace(found, nics=replace(found.nics, of_tables=False))
    said = library_time("alltoall", described, 2**30, 16)
    assert said.open_of_nics is None


@pytest.mark.parametrize(("slower", "is_told"), [(1, False), (3, True)])
def test_a_fit_that_fills_little_of_the_stated_nics_says_so(
    tmp_path: Path, slower: int, is_told: bool
) -> None:
    """As of two posted nodes of H100 that used a part of their NICs (nccl-tests#290)."""
    rows = [(2**30, 4397.4), (2**31, 8766.9), (2**32, 17290.0), (2**33, 34508.0)]
    path = tmp_path / "allreduce.csv"
    lines = [f"allreduce,16,{size},{slower * time_us}" for size, time_us in rows]
    path.write_text("op,ranks,size_bytes,time_us\n" + "\n".join(lines) + "\n")
    fit = fw.fit_cluster([path], cluster="dgx-h100")
    told = [doubt for doubt in fit.doubts if "of the NICs' stated rate" in doubt]
    assert bool(told) == is_told
    undescribed = fw.fit_cluster([path], devices_per_node=8)
    assert not any("of the NICs' stated rate" in doubt for doubt in undescribed.doubts)


@pytest.mark.parametrize(("faster", "is_told"), [(1.0, False), (1.45, True)])
def test_a_fit_that_fills_more_than_the_stated_nics_says_so(
    tmp_path: Path, faster: float, is_told: bool
) -> None:
    path = tmp_path / "allreduce.csv"
    rows = [(2**24, 258), (2**27, 1500), (2**30, 11400)]
    lines = [f"allreduce,64,{size},{time_us / faster}" for size, time_us in rows]
    path.write_text("op,ranks,size_bytes,time_us\n" + "\n".join(lines) + "\n")
    fit = fw.fit_cluster([path], cluster="nd-a100-v4")
    assert any("no NIC carries more than 100%" in doubt for doubt in fit.doubts) == is_told


@pytest.mark.parametrize(
    ("op", "sizes"), [("allreduce", (2**22, 2**24)), ("alltoall", (2**30, 2**33))]
)
def test_small_sizes_and_an_all_to_all_tell_not_how_much_of_the_nics_rings_fill(
    tmp_path: Path, op: str, sizes: tuple[int, int]
) -> None:
    path = tmp_path / f"{op}.csv"
    lines = [f"{op},64,{size},{200 + size / 5e3}" for size in sizes]
    path.write_text("op,ranks,size_bytes,time_us\n" + "\n".join(lines) + "\n")
    fit = fw.fit_cluster([path], cluster="dgx-h100")
    assert fit.protocols[-1].between_share < 0.4
    assert not any("of the NICs' stated rate" in doubt for doubt in fit.doubts)


def test_an_all_to_all_over_several_nodes_tells_little_of_their_sums() -> None:
    """Posted tables of GB300: two racks of 64 take longer than one."""
    of_sums = {4: (18920e-6, 37610e-6), 8: (17930e-6, 35722e-6), 64: (18842e-6, 36350e-6)}
    tables = [
        Table(op="allreduce", workers=workers, points=((2**33, one), (2**34, two)), source="log")
        for workers, (one, two) in of_sums.items()
    ]
    points = ((2**33, 180191e-6), (2**34, 357610e-6))
    tables.append(Table(op="alltoall", workers=128, points=points, source="log"))
    found = fitted(made_of(tables, 64, "made"), tables, nics_are_stated=False)
    said = library_time("allreduce", found, 2**33, 128)
    assert said.low_s < 24050e-6 < said.high_s


def test_rows_of_other_operations_do_not_tell_that_switches_never_add() -> None:
    """One node of eight H200 (ai-dynamo/aiconfigurator): its all-reduces fit adding better."""
    table = Path(__file__).parents[1] / "data" / "inputs" / "h200.csv"
    found = with_nodes(fw.fit_cluster([table], devices_per_node=DEVICES).cluster, 2)
    said = library_time("allreduce", found, 2**28, 16)
    assert said.algorithm == "nvls-tree"
    assert said.time_s == pytest.approx(1.21e-3, rel=0.02)


@pytest.mark.parametrize(("shown", "is_asked"), [((8,), True), ((4, 8), False)])
def test_a_fit_asks_for_several_counts_of_one_node_only_if_it_lacks_them(
    capsys: pytest.CaptureFixture[str], shown: tuple[int, ...], is_asked: bool
) -> None:
    found = a_fit(BALANCED, shown, is_described=True)
    assert found.measured is not None
    either = replace(found.measured, other=replace(found.measured, switch_share=0.0, other=None))
    found = replace(found, measured=replace(either, switch_share=0.8))
    rows = residuals(found, [a_table(workers, BALANCED) for workers in shown])
    print_cluster_fit(ClusterFit(cluster=found, residuals=tuple(rows), choices=()))
    text = " ".join(capsys.readouterr().out.split())
    assert "whether the library lets the switches in the nodes add" in text
    assert ("Tables of one node" in text) == is_asked


def test_three_described_nodes_hold_both_answers_too() -> None:
    """The tree of three nodes also sends less where the one of two sends half."""
    where = cluster("p3dn", 3)
    said = library_time("allreduce", where, 2**28, 24)
    usual_s = library_time(
        "allreduce", replace(where, measured=replace(usual(where), pair_share=0.7)), 2**28, 24
    ).time_s
    assert said.time_s < 0.9 * usual_s < 0.9 * said.high_s
    assert said.pair_is_open


def test_a_described_pair_of_nodes_takes_the_tree_that_sends_half_where_nics_are_slow() -> None:
    for rates in HELD_UP:
        where = replace(a_fit(rates, (8,), is_described=True), measured=None)
        error, share = judged(where, 16, rates)
        assert error < 0.3
        assert share > 0.9
