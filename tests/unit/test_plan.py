"""The search for parallel plans: what fits, what is best, what is refused, what it costs."""

from __future__ import annotations

import json
import math
import os
import pickle
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.plan_measured import MeasuredTable, measured_steps
from fullwire.answers.plan_networks import device_of
from fullwire.answers.plan_search import usable
from fullwire.answers.planned import Lasting, PlanAnswer, Planned, Range
from fullwire.clusters import names as cluster_names
from fullwire.clusters.cluster import Cluster, Inside, Nics
from fullwire.clusters.measured import Measured, Shown
from fullwire.collectives.usual import USUAL_PROTOCOLS
from fullwire.errors import DamagedInput, UsageError
from fullwire.findings.collective import NicsAreUnknown, RestsOnLeastRate
from fullwire.findings.goodput import PublishedFailures, UsualHours, UsualRestart, UsualStorage
from fullwire.findings.plans import (
    ColumnsPassedOver,
    DevicesLeftOut,
    EvenExperts,
    FastestStands,
    LessToExperts,
    MemoryOfAnother,
    OtherType,
)
from fullwire.report.plans import in_words, plan_data, plot_plans, print_plan
from fullwire.run.run import Collectives
from fullwire.simulation.plan_space import Space, every_plan
from fullwire.words import sentence
from fullwire.workloads.accelerators import accelerator
from fullwire.workloads.architecture_files import architecture
from fullwire.workloads.layout import divisors
from fullwire.workloads.stage_memory import GIB, layers_of_stages, stage_layers
from tests.conftest import Cli

ASKED: dict[str, Any] = {"cluster": "dgx-h100", "nodes": 8, "global_batch": 256, "seq": 8192}
OURS = replace(fw.cluster("cloud-100g-tcp"), name="ours", device="")
WORDS = ("plan", "llama3-70b", "--cluster", "dgx-h100", "--nodes", "8")
BATCH = ("--global-batch", "256", "--seq", "8192")


@cache
def usual() -> PlanAnswer:
    return fw.plan("llama3-70b", **ASKED, why=True, hours=1000, price=2, top=50)


def test_plans_are_sorted_fit_and_are_valid() -> None:
    result = usual()
    steps = [one.step_s for one in result.plans]
    assert steps == sorted(steps)
    for one in result.plans:
        assert one.tp * one.pp * one.dp * one.cp == one.devices == 64
        assert 256 % (one.dp * one.microbatch) == 0
        assert one.memory.peak_reserved_bytes < result.device_bytes
        assert one.interval.low_s < one.step_s < one.interval.high_s
        assert one.model_flops_utilization is not None
        assert 0.2 < one.model_flops_utilization < 0.8
    assert result.considered == len(result.plans) + sum(result.left_out.values())


def test_utilization_counts_each_active_parameter_and_attention() -> None:
    result, model = usual(), architecture("llama3-70b")
    tokens = 256 * 8192
    attention = model.layers * 12 * model.hidden * (8192 + 1) / 2 * tokens
    flops = 6 * model.active_parameters * tokens + attention
    for one in result.plans:
        peak = 64 * 989.4e12 * one.step_s
        assert one.model_flops_utilization == pytest.approx(flops / peak, rel=1e-3)


def test_parts_of_the_step_add_up() -> None:
    for one in usual().plans:
        parts = [one.compute_s, one.bubble_s, one.slowdown_s, one.optimizer_s, one.host_s]
        parts += asdict(one.exposed).values()
        assert sum(parts) == pytest.approx(one.step_s)


def test_the_components_of_memory_add_up() -> None:
    memory = usual().best.memory
    parts = memory.params_bytes + memory.gradients_bytes + memory.optimizer_bytes
    parts += memory.activations_bytes + memory.buffers_bytes
    assert memory.peak_allocated_bytes == pytest.approx(parts, abs=8)
    assert memory.peak_reserved_bytes > memory.peak_allocated_bytes


def test_equal_plans_are_within_the_noise_of_sites() -> None:
    result = usual()
    limit_s = 1.03 * result.best.step_s
    assert all(one.equal == (one.step_s <= limit_s) for one in result.plans)


def test_fixed_degrees_hold() -> None:
    result = fw.plan("llama3-70b", **ASKED, fix="tp=8,pp=4,recompute=full")
    assert {(one.tp, one.pp, one.recompute) for one in result.plans} == {(8, 4, "full")}
    assert result.best.step_s >= usual().best.step_s


def test_why_gives_the_best_plan_that_chooses_otherwise() -> None:
    worths = {worth.choice: worth for worth in usual().why}
    tp = worths["tp"]
    other = fw.plan("llama3-70b", **ASKED, fix={"tp": int(tp.other)})
    assert other.best.step_s == pytest.approx(tp.step_s)
    assert tp.slower >= 0


def test_a_slower_network_has_its_own_best_plan() -> None:
    result = fw.plan("llama3-70b", **ASKED, bandwidth="10Gbps,400Gbps")
    slow, usual_network = result.networks
    assert slow.plan is not None
    assert usual_network.plan is not None
    assert slow.plan.step_s > usual_network.plan.step_s
    assert usual_network.plan.step_s == pytest.approx(result.best.step_s)
    assert result.half_bandwidth is not None
    assert result.half_bandwidth.bandwidth_bps == 200e9


def test_the_whole_answer_is_for_a_single_other_network() -> None:
    """The best plan was once that of the described NICs, with the other network in one row."""
    asked: dict[str, Any] = {"cluster": "dgx-h100", "nodes": 2, "global_batch": 64}
    described = fw.plan("llama3-8b", **asked)
    slow = fw.plan("llama3-8b", bandwidth="1Gbps", **asked)
    (row,) = slow.networks
    assert row.plan is not None
    assert row.bandwidth_bps == 1e9
    assert slow.best.step_s == row.plan.step_s > 2 * described.best.step_s
    assert slow.half_bandwidth is not None
    assert slow.half_bandwidth.bandwidth_bps == 0.5e9
    several = fw.plan("llama3-8b", bandwidth="1Gbps,400Gbps", **asked)
    assert several.best.step_s == described.best.step_s
    first, second = several.networks
    assert first.plan is not None
    assert second.plan is not None
    assert (first.plan.step_s, second.plan.step_s) == (slow.best.step_s, described.best.step_s)


def test_a_cluster_that_is_as_good_as_the_best_is_said_to_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: dict[str, Any] = {"cluster": "dgx-h100,dgx-h100", "nodes": 2, "global_batch": 64}
    for objective, told in (("step", "as long"), ("cost", "as many device-hours")):
        print_plan(fw.plan("llama3-8b", objective=objective, **asked))
        said = capsys.readouterr().out
        assert f"Best of 2 clusters: dgx-h100. dgx-h100 takes {told}." in said


def test_other_clusters_and_oversubscription_are_compared() -> None:
    clusters = fw.plan("llama3-8b", **{**ASKED, "cluster": "dgx-h100,dgx-a100"}).networks
    assert [there.cluster for there in clusters] == ["dgx-h100", "dgx-a100"]
    h100, a100 = (there.plan for there in clusters)
    assert h100 is not None
    assert a100 is not None
    assert a100.step_s > 1.5 * h100.step_s
    spines = fw.plan("llama3-8b", **{**ASKED, "nodes": 64}, oversubscription="1,8").networks
    wide, narrow = (there.plan for there in spines)
    assert wide is not None
    assert narrow is not None
    assert wide.step_s <= narrow.step_s


@pytest.mark.parametrize("objective", ["step", "cost", "goodput"])
def test_the_answer_is_that_of_the_best_compared_cluster(
    objective: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {**ASKED, "nodes": 4, "objective": objective, "top": 3}
    asked |= {"hours": 1000, "price": "2 EUR/device-hour"}
    both = ("dgx-a100", "dgx-h100")
    alone = {name: fw.plan("llama3-8b", **{**asked, "cluster": name}) for name in both}
    answers = [fw.plan("llama3-8b", **{**asked, "cluster": order}) for order in (both, both[::-1])]
    for result in answers:
        assert (result.cluster, result.device) == ("dgx-h100", "NVIDIA H100")
        assert result.plans == alone["dgx-h100"].plans
        assert result.lasting == alone["dgx-h100"].lasting
        [other] = result.other_clusters
        rows = {there.cluster: there for there in result.networks}
        old, new = (rows[name] for name in both)
        assert (old.plan, new.plan) == tuple(alone[name].best for name in both)
        assert old.plan is not None
        assert new.plan is not None
        assert old.lasting is not None
        assert new.lasting is not None
        # The same steps: the older devices need more hours, and more money at the same price.
        slower = old.plan.step_s / new.plan.step_s
        assert new.lasting == result.lasting
        assert old.lasting.work_s == pytest.approx(slower * 1000 * 3600)
        assert old.lasting.cost == pytest.approx(2 * old.lasting.device_hours)
        assert other.times == pytest.approx(
            old.plan.device_hours / new.plan.device_hours if objective == "cost" else slower,
            rel=0.01,
        )
        print_plan(result)
        said = " ".join(capsys.readouterr().out.split())
        assert f"Best of 2 clusters: dgx-h100. dgx-a100 takes {other.times:.3g} times" in said
        assert "1,000 hours of training on dgx-h100 take" in said
        assert f"{old.lasting.cost:,.0f} EUR" in said
        data = plan_data(result)
        assert data["goodput"]["currency"] == "EUR"
        assert {row["goodput"]["work_s"] for row in data["networks"]} == {
            old.lasting.work_s,
            new.lasting.work_s,
        }


def test_clusters_of_equally_many_devices_are_compared() -> None:
    asked = {**ASKED, "cluster": "dgx-h100,gb200-nvl72,p3dn", "nodes": None, "devices": 64}
    networks = fw.plan("llama3-8b", **asked, top=1).networks
    assert [there.plan.devices for there in networks if there.plan] == [64] * 3
    asked |= {"cluster": "gb200-nvl72", "devices": 72, "global_batch": 288}
    rack = fw.plan("llama3-8b", **asked, fix="dp=9")
    assert (rack.best.devices, rack.best.dp) == (72, 9)
    with pytest.raises(UsageError, match="devices: expected a cluster that has them"):
        fw.plan(recorded="a.run", devices=8)


def test_no_plan_waits_less_than_not_at_all() -> None:
    asked = {**ASKED, "nodes": 4, "fix": "pp=1", "top": 400}
    plans = fw.plan("llama3-8b", **asked).plans
    assert all(0 <= one.bubble_s < 1e-9 for one in plans)


def test_hours_may_have_a_unit() -> None:
    asked: dict[str, Any] = {**ASKED, "fix": "tp=8,pp=4,dp=2", "top": 1}
    told = [fw.plan("llama3-70b", **asked, hours=given).lasting for given in (48, "48", "2d")]
    assert told[0] is not None
    assert told == [told[0]] * 3


def test_failures_make_a_training_longer() -> None:
    lasting = usual().lasting
    assert lasting is not None
    assert lasting.wall_interval.low_s < lasting.wall_s < lasting.wall_interval.high_s
    lost_s = sum(lasting.losses.values())
    assert lasting.work_s + lost_s == pytest.approx(lasting.wall_s, rel=0.01)
    assert lasting.cost == pytest.approx(2 * lasting.device_hours)
    rare = fw.plan("llama3-70b", **ASKED, hours=1000, failures=1e7).lasting
    assert rare is not None
    assert rare.wall_s < lasting.wall_s
    assert rare.cost is None


@pytest.mark.parametrize("name", ["tp", "dp", "pp", "cp"])
def test_a_degree_of_0_is_refused_in_python_too(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: expected a whole number from 1"):
        fw.plan("llama3-8b", **ASKED, fix={name: 0})


def test_failures_may_be_a_range_and_each_number_is_named() -> None:
    asked: dict[str, Any] = {**ASKED, "fix": "tp=8,pp=4,dp=2", "top": 1, "hours": 1000}
    told = [
        fw.plan("llama3-70b", **asked, failures=given).lasting
        for given in (1000, "500-2000", " 800 - 1250.0")
    ]
    wide, same, narrow = told
    assert wide is not None
    assert same is not None
    assert narrow is not None
    assert (same.wall_s, same.wall_interval) == (wide.wall_s, wide.wall_interval)
    assert narrow.wall_s == pytest.approx(wide.wall_s)
    assert narrow.wall_interval.high_s < wide.wall_interval.high_s
    for wrong in ("often", "2000-500", "1-2-3", "0"):
        with pytest.raises(UsageError, match="failures: expected device-hours between two of them"):
            fw.plan("llama3-70b", **asked, failures=wrong)


def test_restarts_and_the_storage_may_be_ranges_that_widen_the_interval() -> None:
    asked: dict[str, Any] = {**ASKED, "fix": "tp=8,pp=4,dp=2", "top": 1, "hours": 1000}
    asked["failures"] = "1000-1000"

    def lasting(**given: Any) -> Lasting:
        told = fw.plan("llama3-70b", **asked, **given).lasting
        assert told is not None
        return told

    short, long, slow, quick = (
        lasting(restart=restart, storage=storage)
        for restart, storage in [
            ("5min", "20GB/s"), ("20min", "20GB/s"), ("10min", "1GB/s"), ("10min", "4GB/s"),
        ]
    )  # fmt: skip
    assert short.wall_interval.low_s == short.wall_s == short.wall_interval.high_s
    for restart in ("5min-20min", "5 - 20 min"):
        ranged = lasting(restart=restart, storage="20GB/s")
        assert ranged.wall_interval.low_s == pytest.approx(short.wall_s)
        assert ranged.wall_interval.high_s == pytest.approx(long.wall_s)
        assert ranged.wall_s == pytest.approx(lasting(restart="10min", storage="20GB/s").wall_s)
    ranged = lasting(restart="10min", storage="1GB/s-4GB/s")
    assert ranged.wall_interval.low_s == pytest.approx(quick.wall_s)
    assert ranged.wall_interval.high_s == pytest.approx(slow.wall_s)
    for name, wrong in [("restart", "20min-5min"), ("restart", "0-5min"), ("storage", "1-2-3")]:
        with pytest.raises(UsageError, match=f"{name}: expected .* or the least and the most, "):
            lasting(**{name: wrong})


def test_a_training_that_may_never_end_has_no_date(capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {**ASKED, "fix": "tp=1,pp=1,zero=3", "top": 1, "hours": 10}

    def said(failures: float) -> str:
        print_plan(fw.plan("llama3-8b", **asked, failures=failures, price=2))
        return " ".join(capsys.readouterr().out.split())

    assert "likely, it may never end. Expected losses" in said(3)
    assert "days (19.2 h or more): goodput" in said(3)
    assert "may never end" not in said(1000)
    never = said(0.6)
    assert "10 hours of training may never end: with a failure each 33.8 s, less" in never
    assert "Cost" not in never


def test_oversubscription_of_a_job_below_one_leaf_changes_nothing_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "All nodes of dgx-h100 lie below one leaf, so oversubscription changes nothing."
    for nodes, is_said in ((32, True), (64, False)):
        asked = {**ASKED, "nodes": nodes, "fix": "tp=8,pp=4", "top": 1}
        result = fw.plan("llama3-70b", **asked, oversubscription="1,8")
        print_plan(result)
        assert (line in capsys.readouterr().out) == is_said
        steps_s = {there.plan.step_s for there in result.networks if there.plan}
        assert (len(steps_s) == 1) == is_said
    print_plan(fw.plan("llama3-70b", **{**asked, "nodes": 8}, bandwidth="200Gbps,400Gbps"))
    assert line not in capsys.readouterr().out


def test_the_cheapest_plan_needs_no_more_device_hours_than_the_fastest() -> None:
    asked = {**ASKED, "nodes": 32}
    cheap = fw.plan("llama3-8b", **asked, objective="cost").best
    assert cheap.device_hours <= fw.plan("llama3-8b", **asked).best.device_hours
    assert cheap.devices < 256


def test_the_cheapest_plans_are_those_of_all_parts_of_the_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = {**ASKED, "nodes": 16}
    result = fw.plan("llama3-8b", **asked, objective="cost", top=400)
    hours = [one.device_hours for one in result.plans]
    assert hours == sorted(hours)
    assert all(one.equal == (one.device_hours <= 1.03 * hours[0]) for one in result.plans)
    assert [part.nodes for part in result.parts] == [16, 8, 4, 2, 1]
    listed = {(one.devices, one.device_hours) for one in result.plans if one.equal}
    for part in result.parts:
        if part.plan.device_hours < 1.02 * hours[0]:
            assert (part.plan.devices, part.plan.device_hours) in listed
    assert len({devices for devices, _ in listed}) > 1
    for part in result.parts:
        assert part.plan.equal == (part.plan.device_hours <= 1.03 * hours[0])
    print_plan(replace(result, plans=result.plans[:1]))
    told = capsys.readouterr().out
    marked = [line.split() for line in told.splitlines() if ") = " in line]
    equal = [part.nodes for part in result.parts if part.plan.equal]
    nodes = result.best.devices // 8
    assert [int(row[0]) for row in marked] == [each for each in equal if each != nodes]
    assert len(marked) > 1
    assert "= cannot be told from the best" in told
    assert (
        f"{nodes} of 16 nodes, {result.best.devices} devices: {hours[0]:.4g} device-hours" in told
    )
    other = next(place for place, one in enumerate(result.plans) if one.devices != 8 * nodes)
    assert result.run(other).facts.workers == result.plans[other].devices


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("h800", "its nearest family stands for it"),
        ("mine", "nor of a family like it: what all measured families have in common"),
        ("rtx-4090", "nor of a family like it: what all measured families have in common"),
    ],
)
def test_a_device_that_nobody_measured_tells_what_stands_for_it(family: str, said: str) -> None:
    def asked(spread: float) -> PlanAnswer:
        device = replace(accelerator("h100"), family=family, spread=spread)
        return fw.plan("llama3-70b", **{**ASKED, "device": device})

    narrow, wide = asked(0.05), asked(0.6)
    assert any(said in sentence(one) for one in narrow.assumed)
    assert narrow.best.step_s == wide.best.step_s
    assert wide.best.interval.high_s > 2 * narrow.best.interval.high_s


def test_measured_steps_calibrate(tmp_path: Path) -> None:
    best = usual().best
    table = tmp_path / "measured.csv"
    names = ("tp", "pp", "vpp", "dp", "cp", "zero", "recompute", "microbatch")
    cells = ",".join(str(getattr(best, name)) for name in names)
    lines = [f"{','.join(names)},step_time_s", *[f"{cells},{1.2 * best.step_s}"] * 2]
    table.write_text("\n".join(lines) + "\n")
    its_degrees = {name: getattr(best, name) for name in names}
    result = fw.plan("llama3-70b", **ASKED, calibrate=table, fix=its_degrees)
    assert result.best.step_s == pytest.approx(1.2 * best.step_s, rel=1e-2)
    others = fw.plan("llama3-70b", **ASKED, calibrate=table).best
    assert best.step_s < others.step_s < 1.2 * best.step_s  # they share only some of the difference
    narrow, wide = result.best.interval, best.interval
    assert narrow.high_s / narrow.low_s < wide.high_s / wide.low_s
    for wrong, said in (
        ("TP,tp,step_time_s\n8,8,7\n", "expected one column tp"),
        ("mbs,microbatch,step_time_s\n1,1,7\n", "expected one column microbatch"),
        ("micro_batch,mbs,step_time_s\n1,1,7\n", "expected one column microbatch"),
        ("tp,notes,step_time_s\n8,x,7,9\n", "measured.csv:2: expected 3 cells in a row"),
        ("tp,step_time_s\n8,7\nx,7\n", "measured.csv:3: tp: expected a whole number"),
    ):
        table.write_text(wrong)
        with pytest.raises((DamagedInput, UsageError), match=said):
            fw.plan("llama3-70b", **ASKED, calibrate=table)
    table.write_text("tp,step_time_s\n8,soon\n")
    with pytest.raises(DamagedInput, match=r"measured.csv:2: step_time_s: expected seconds"):
        fw.plan("llama3-70b", **ASKED, calibrate=table)


@pytest.mark.parametrize("times", [0.7, 1.1, 1.3])
def test_a_measured_plan_takes_as_long_as_measured_and_plans_like_it_go_along(
    times: float, tmp_path: Path
) -> None:
    names = ("tp", "pp", "vpp", "dp", "cp", "zero", "recompute", "microbatch")
    own = {name: getattr(usual().best, name) for name in names}
    table = tmp_path / "measured.csv"
    rows = [
        [*map(str, own.values()), str(share * usual().best.step_s * times)] for share in (0.9, 1.1)
    ]
    table.write_text("\n".join(",".join(row) for row in ([*names, "step_time_s"], *rows)) + "\n")
    itself = fw.plan("llama3-70b", **ASKED, fix=own, calibrate=table).best
    assert itself.step_s == pytest.approx(times * usual().best.step_s, rel=1e-9)
    fewer_chunks = {**own, "vpp": own["vpp"] // 2}
    before = fw.plan("llama3-70b", **ASKED, fix=fewer_chunks).best
    after = fw.plan("llama3-70b", **ASKED, fix=fewer_chunks, calibrate=table).best
    assert math.log(after.step_s / before.step_s) / math.log(times) > 0.9
    either = {name: value for name, value in own.items() if name != "vpp"}
    both = fw.plan("llama3-70b", **ASKED, fix=either, calibrate=table).plans
    assert next(one for one in both if one.vpp == own["vpp"]).equal  # to the best
    widths = [one.interval.high_s / one.interval.low_s for one in (itself, after, before)]
    assert widths == sorted(widths)
    assert widths[0] < widths[1]


def test_tokens_of_a_device_in_a_second_are_as_good_as_the_time_of_a_step(tmp_path: Path) -> None:
    table = tmp_path / "measured.csv"
    tokens_s = 256 * 8192 / (64 * 20)  # of a step of 20 s on 64 devices
    steps_s = []
    for content in (
        "tp,pp,step_time_s\n8,4,20\n",
        f"tp,pp,tokens_s_gpu\n8,4,{tokens_s}\n",
        f"tp,pp,tokens_s_gpu,step_time_s,gpus,gbs\n8,4,{tokens_s},,64,256\n",
        f"tp,pp,tokens_s_gpu,step_time_s\n8,4,{9 * tokens_s},20\n",  # the time is surer
    ):
        table.write_text(content)
        told = fw.plan("llama3-70b", **ASKED, calibrate=table, fix="tp=8,pp=4", top=1)
        steps_s.append(told.best.step_s)
    assert steps_s == pytest.approx(4 * steps_s[:1])
    for rate, said in (
        ("quick", r"measured.csv:2: tokens_s_gpu: expected tokens of a device in a second"),
        ("1e6", r"measured.csv:2: tokens_s_gpu: expected a step of .* at the peak"),
    ):
        table.write_text(f"tp,pp,tokens_s_gpu\n8,4,{rate}\n")
        with pytest.raises(DamagedInput, match=said):
            fw.plan("llama3-70b", **ASKED, calibrate=table)
    table.write_text(f"tp,pp,tokens_s_gpu\n8,4,{tokens_s / 50}\n")
    notes = fw.plan("llama3-70b", **ASKED, calibrate=table, top=1).assumed
    assert any("tokens_s_gpu is of one device in a second" in sentence(one) for one in notes)


def test_odd_measured_steps_are_told(tmp_path: Path) -> None:
    table = tmp_path / "measured.csv"

    def told(*lines: str) -> str:
        table.write_text("\n".join(lines) + "\n")
        notes = fw.plan("llama3-70b", **ASKED, calibrate=table).assumed
        return " ".join(sentence(note) for note in notes)

    heads = "tp,pp,dp,microbatch,step_time_s"
    step_s = usual().best.step_s
    plain = told(heads, f"8,4,2,1,{step_s}", f"8,4,2,1,{1.1 * step_s}")
    assert "measured steps is right" not in plain
    assert "count alike" not in plain
    assert "nothing of a plan" not in plain
    in_ms = told(heads, f"8,4,2,1,{1000 * step_s}")
    assert "line 2 of the measured steps is right, though " in in_ms
    assert "times as long as priced: step_time_s is in seconds" in in_ms
    between_nodes = told(heads, f"64,1,1,1,{0.7 * step_s}")
    assert "times as short as priced" in between_nodes
    with pytest.raises(
        DamagedInput, match=r"csv:2: step_time_s: expected a step of .* at the peak"
    ):
        told(heads, f"8,4,2,1,{step_s / 1000}")
    differ = told(heads, f"8,4,2,1,{step_s}", f"8,4,2,1,{2 * step_s}")
    assert "the measured steps of dp=2,microbatch=1,pp=4,tp=8 count alike, though" in differ
    unread = told("tp,foo,gbs,step_time_s", f"8,4,256,{step_s}")
    assert "column foo of the measured steps tells nothing of a plan" in unread


def test_measured_steps_name_columns_as_tables_of_runs_do(tmp_path: Path) -> None:
    table, steps_s = tmp_path / "measured.csv", set()
    for heads in (
        "tp,pp,dp,microbatch,step_time_s",
        "TP,PP,DP,Microbatch,Step_time_s",
        "tp,pp,dp,mbs,step_time_s",
        " tp , pp , dp , micro_batch , step_s",
        "tensor_model_parallel_size,pipeline_model_parallel_size,dp_size,micro-batch-size,iter_s",
        "Tensor Parallel,Pipeline Parallel,data_parallel_degree,micro_batch_size,step time (s)",
    ):
        table.write_text(f"{heads}\n8,4,2,1,{usual().best.step_s}\n")
        answer = fw.plan("llama3-70b", **ASKED, calibrate=table, top=1)
        steps_s.add(answer.best.step_s)
        assert not any(isinstance(one, ColumnsPassedOver) for one in answer.assumed)
    assert len(steps_s) == 1


@pytest.mark.parametrize(
    "content",
    [
        "TP,PP,DP,MBS,Step Time (s)\n8,4,2,1,25.5\n",
        "tp;pp;dp;microbatch;step_time_s\n8;4;2;1;25,5\n",
        "tp\tpp\tdp\tmicrobatch\tstep-time-s\n8\t4\t2\t1\t25.5\n",
        "tp, pp, dp, microbatch, step_time_s\r\n8, 4, 2, 1, 25.5 s\r\n\r\n",
        "tp,pp,dp,microbatch,step_time_s\n8.0,4.0,2,1.0,25500ms\n",
        "# of last week\ntp,pp,dp,microbatch,gpus,step_time_s\n#8,1,1,1,,9\n8,4,2,1,nan,25.5\n",
        'tp,pp,dp,microbatch,step_time_s\n8,4,2,1,"25,500ms"\n',
        "# tp,pp,dp,microbatch,step_time_s\n8,4,2,1,25.5\n",
    ],
)
def test_measured_steps_are_read_as_people_and_programs_write_them(
    tmp_path: Path, content: str
) -> None:
    plain, table = tmp_path / "plain.csv", tmp_path / "measured.csv"
    plain.write_text("tp,pp,dp,microbatch,step_time_s\n8,4,2,1,25.5\n")
    table.write_bytes(content.encode())
    plans = [fw.plan("llama3-70b", **ASKED, calibrate=each) for each in (plain, table)]
    assert plans[0].best == plans[1].best
    assert plans[0].assumed == plans[1].assumed


def test_sequences_beyond_the_learned_positions_are_told() -> None:
    asked: dict[str, Any] = {"cluster": "dgx-h100", "nodes": 16, "global_batch": 64, "top": 1}
    told = [sentence(note) for note in fw.plan("gpt3-13b", **asked, seq=8192).assumed]
    assert any("positions for 2,048 tokens, and sequences have 8,192" in one for one in told)
    for model, length in (("gpt3-13b", 2048), ("llama3-8b", 16384)):
        notes = fw.plan(model, **asked, seq=length).assumed
        assert not any("learned positions" in sentence(note) for note in notes)


def test_rows_of_measured_steps_may_have_numbers(tmp_path: Path) -> None:
    table, steps_s = tmp_path / "measured.csv", set()
    for first in ("1", "#1"):
        table.write_text(f"our steps\n\n#,tp,pp,step_time_s\n{first},8,4,25.5\n")
        steps_s.add(fw.plan("llama3-70b", **ASKED, calibrate=table, top=1).best.step_s)
    assert len(steps_s) == 1


def test_a_measured_row_without_a_time_is_passed_over_and_told(tmp_path: Path) -> None:
    table = tmp_path / "measured.csv"
    table.write_text("tp,pp,step_time_s\n8,4,25.5\n8,2,OOM\n\n4,4,\n8,4,250\n")
    notes = fw.plan("llama3-70b", **ASKED, calibrate=table).assumed
    told = " ".join(map(sentence, notes))
    assert "lines 3, 5 of the measured steps have no time and are left out" in told
    assert "line 6 of the measured steps is right, though" in told
    table.write_text("tp,pp,step_time_s\n8,4,OOM\n")
    with pytest.raises(UsageError, match="expected rows with step_time_s or tokens_s_gpu"):
        fw.plan("llama3-70b", **ASKED, calibrate=table)


def test_measured_steps_may_have_other_units_separators_and_rows_that_failed(
    tmp_path: Path,
) -> None:
    def calibrated_by(text: str) -> tuple[float, str]:
        table = tmp_path / "measured.csv"
        table.write_text(text)
        answer = fw.plan("llama3-70b", **ASKED, calibrate=table, top=1)
        return answer.best.step_s, " ".join(map(sentence, answer.assumed))

    step_s, told = calibrated_by("tp,pp,dp,microbatch,step_time_s\n8,4,2,1,61.5\n")
    assert "no time" not in told
    for text in (
        "tp,pp,dp,mbs,step_time_ms\n8,4,2,1,61500\n",
        "tp,pp,dp,mbs,elapsed time per iteration (ms)\n8,4,2,1,61500.0\n",
        "tp,pp,dp,mbs,step_time\n8,4,2,1,61.5 s\n",
        "tp,pp,dp,mbs,step_time_s\n8.0,4.0,2.0,1.0,61500 ms\n",
        "tp;pp;dp;mbs;step_time_s;note\n8;4;2;1;61,5;warm\n",
        "tp\tpp\tdp\tmbs\tcp\tstep_time_s\n8\t4\t2\t1\t-\t61.5\n",
        '"tp", "pp", "dp", "mbs", "step_time_s"\n8, 4, 2, 1, 61.5\n',
        "# of Monday\n\ntp,pp,dp,mbs,step_time_s\n8,4,2,1,61.5\n",
        f'tp,pp,dp,mbs,tokens/s/GPU\n8,4,2,1,"{256 * 8192 / 64 / 61.5:.6f}"\n',
    ):
        assert calibrated_by(text)[0] == pytest.approx(step_s, rel=1e-6), text
    also, told = calibrated_by("tp,pp,dp,mbs,step_time_s\n8,4,2,1,61.5\n8,1,8,1,OOM\n8,2,4,1,\n")
    assert also == step_s
    assert "lines 3, 4 of the measured steps have no time and are left out" in told


def measured(folder: Path, text: str, **question: int) -> MeasuredTable:
    table = folder / "measured.csv"
    table.write_text(text)
    return measured_steps(table, 32768, **question)


@pytest.mark.parametrize(
    "remark",
    [
        "# Step time",
        "# tp, step_time_s",
        "# columns: tp, pp, step time",
        "# Step time\n#",
        "Step time",
    ],
)
def test_a_remark_that_names_a_time_is_no_heading(tmp_path: Path, remark: str) -> None:
    (step,) = measured(tmp_path, f"{remark}\ntp,step_time_s\n8,9.1\n").steps
    assert (step.degrees, step.step_s) == ({"tp": 8}, 9.1)


def test_each_column_of_the_job_is_compared_with_it(tmp_path: Path) -> None:
    """Two columns may tell one value, as the frameworks' names are many."""
    for columns, cells, wrong in (
        ("seq,seq_len", "2048,4096", "seq: expected 4096 as asked, got '2048'"),
        ("seq,seq_len", "4096,2048", "seq: expected 4096 as asked, got '2048'"),
        ("GPUs,world_size", "256,512", "gpus: expected 512 as asked, got '256'"),
    ):
        with pytest.raises(DamagedInput, match=wrong):
            measured(tmp_path, f"{columns},step_time_s\n{cells},9\n", seq=4096, gpus=512)
    for length in ("4096.0", '"4,096"', "4_096"):
        text = f"seq,seq_len,step_time_s\n{length},4096,9\n"
        assert measured(tmp_path, text, seq=4096).steps


@pytest.mark.parametrize(
    ("columns", "cells", "passed_over"),
    [
        ("step_time_s,step_time_ms", "9,9000", "step_time_ms"),
        ("step_time,step_time_s", "8 s,9", "step_time"),
        ("tokens_per_sec_per_gpu,tokens_s_gpu,step_time_s", "1,1,9", "tokens_per_sec_per_gpu"),
        ("zero_stage,zero,step_time_s", "3,1,9", "zero_stage"),
        ("zero,data_parallel,step_time_s", "1,FSDP,9", "data_parallel"),
        ("zero,pipeline_parallelism,step_time_s", "1,1F1B,9", "pipeline_parallelism"),
        ("zero,context_parallelism,step_time_s", "1,ring,9", "context_parallelism"),
        ("zero,expert_parallel,step_time_s", "1,no,9", "expert_parallel"),
    ],
)
def test_a_column_beside_one_of_its_own_name_and_a_column_of_words_are_passed_over(
    tmp_path: Path, columns: str, cells: str, passed_over: str
) -> None:
    table = measured(tmp_path, f"{columns}\n{cells}\n")
    assert table.passed_over == (passed_over,)
    assert table.steps[0].step_s == 9
    assert table.steps[0].degrees == ({"zero": 1} if "zero" in columns else {})


def test_a_degree_of_words_and_numbers_is_refused(tmp_path: Path) -> None:
    for columns, cells in (("data_parallel", "2\nFSDP"), ("data_parallel_size", "FSDP")):
        rows = "".join(f"{cell},9\n" for cell in cells.split())
        with pytest.raises(DamagedInput, match="dp: expected a whole number"):
            measured(tmp_path, f"{columns},step_time_s\n{rows}")


def test_a_word_or_a_dash_for_nothing_leaves_a_cell_empty(tmp_path: Path) -> None:
    for nothing in ("None", "\u2014", "\u2212", "n/a", "--"):
        text = (
            f"tp,virtual_pipeline_model_parallel_size,step_time_s\n8,{nothing},9\n8,2,{nothing}\n"
        )
        table = measured(tmp_path, text)
        assert [step.degrees for step in table.steps] == [{"tp": 8}]
        assert table.unmeasured == (3,)
    (step,) = measured(tmp_path, "recompute_granularity,step_time_s\nNone,9\n").steps
    assert step.degrees == {"recompute": "none"}
    failed = ("CUDA OOM", "torch.OutOfMemoryError", "CUDA out of memory")
    text = "".join(f"8,{word}\n" for word in failed)
    assert measured(tmp_path, f"tp,step_time_s\n8,9\n{text}").unmeasured == (3, 4, 5)


@pytest.mark.parametrize(
    ("text", "step_s"),
    [
        ("step_time_s\n9.1 sec\n", 9.1),
        ("step_time_s\n9.1 Seconds\n", 9.1),
        ("step_time_s\n9100 msec\n", 9.1),
        ("step_time_s\n9_100 milliseconds\n", 9.1),
        ("tp,step_time_s\n8,1_000\n", 1000),
        ("tp;step_time_s\n8;1.234,5\n", 1234.5),
        ("tok/s/device\n3276.8\n", 10),
        ("tokens/GPU/s\n3276.8\n", 10),
        ("tok/s/GPU\n3276.8\n", 10),
        # The other times tell what a comma means.
        ("tp;step_time_ms\n8;9,100\n8;9100.5\n", 9.1),
        ("tp\tstep_time_s\n8\t9,100\n8\t9,12\n", 9.1),
        ("tp;step_time_ms\n8;9.100\n8;9100,5\n", 9.1),
        ("tp;step_time_s\n8;9.100\n", 9.1),
        ('tp,step_time_ms\n8,"9,100"\n', 9.1),
    ],
)
def test_a_measured_time_is_read_with_its_unit_and_marks(
    tmp_path: Path, text: str, step_s: float
) -> None:
    assert measured(tmp_path, text).steps[0].step_s == pytest.approx(step_s)


@pytest.mark.parametrize(
    "text",
    [
        "tp\tstep_time_s\n8\t9,100\n",
        "tp;step_time_ms\n8;9,100\n",
        "tp;tokens_s_gpu\n8;9,100\n",
        "tp;step_time_s\n8;9,100\n8;9,1\n8;9.1\n",
    ],
)
def test_a_comma_that_may_be_a_decimal_one_or_not_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DamagedInput, match=r"csv:2: .*: expected 9100 or 9\.100, got '9,100'"):
        measured(tmp_path, text)


def test_a_measured_step_stands_for_the_fastest_plan_that_fits_it(tmp_path: Path) -> None:
    table, fix = tmp_path / "measured.csv", {"tp": 8, "pp": 4, "dp": 2, "microbatch": 1}
    before = fw.plan("llama3-70b", **ASKED, fix=fix).best
    names = ("tp", "pp", "dp", "microbatch", "vpp", "zero", "recompute")

    def calibrated_by(step_s: float, *left_out: str) -> PlanAnswer:
        kept = [name for name in names if name not in left_out]
        cells = ",".join(str(getattr(before, name)) for name in kept)
        table.write_text(f"{','.join(kept)},step_time_s\n{cells},{step_s}\n")
        return fw.plan("llama3-70b", **ASKED, fix=fix, calibrate=table)

    some = calibrated_by(before.step_s, "vpp", "zero", "recompute")
    assert some.best.step_s == pytest.approx(before.step_s)  # as predicted: nothing is corrected
    left_out = [one for one in some.assumed if isinstance(one, FastestStands)]
    assert {"vpp", "zero", "recompute"} <= set(left_out[0].degrees)
    whole = calibrated_by(before.step_s)
    assert not any(isinstance(one, FastestStands) for one in whole.assumed)
    widths = [one.best.interval.high_s / one.best.interval.low_s for one in (some, whole)]
    assert widths[0] > widths[1]
    longer = [calibrated_by(share * before.step_s, "vpp").best.step_s for share in (1, 1.1, 1.2)]
    assert longer == sorted(longer)


@pytest.mark.parametrize(
    ("cluster", "lacking", "instead"),
    [
        ("dgx-h100", "nvfp4", "fp8"),
        ("dgx-h100", "mxfp8", "fp8"),
        ("dgx-a100", "fp8", "bf16"),
        ("dgx-a100", "nvfp4", "bf16"),
        ("p3dn", "bf16", "fp16"),
    ],
)
def test_a_type_that_the_device_lacks_is_named_and_costs_as_the_one_that_stands_for_it(
    cluster: str, lacking: str, instead: str
) -> None:
    asked = {**ASKED, "cluster": cluster}
    without = fw.plan("llama3-8b", **asked, precision=lacking)
    other = fw.plan("llama3-8b", **asked, precision=instead)
    assert without.plans == other.plans
    notes = [one for one in without.assumed if isinstance(one, OtherType)]
    assert [one.instead for one in notes] == [instead]
    assert not any(isinstance(one, OtherType) for one in other.assumed)


def test_racks_use_a_power_of_two_of_their_devices() -> None:
    result = fw.plan("qwen3-30b-a3b", cluster="gb200-nvl72", nodes=1, global_batch=256, seq=4096)
    assert result.best.devices == 64
    assert EvenExperts() in result.assumed


def test_memory_that_a_device_cannot_have_is_ignored_and_told() -> None:
    device = "NVIDIA GH200 480GB"
    result = fw.plan("llama3-8b", cluster="dgx-h100", nodes=1, global_batch=64, device=device)
    assert result.device_bytes == pytest.approx(95.3 * 2**30, rel=0.01)
    notes = [note for note in result.assumed if isinstance(note, MemoryOfAnother)]
    assert [note.stated_gb for note in notes] == [480]
    sentences = plan_data(result)["assumed"]
    assert any("has 95 GiB: the 480 GB in its name are not its own" in one for one in sentences)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"fix": "tp=3"}, "tp: expected a divisor of 64 heads, got 3. The nearest is 2"),
        ({"fix": "pp=7"}, "pp: expected a divisor of 80 layers, got 7. The nearest is 8"),
        ({"fix": "tp"}, "fix: expected NAME=VALUE such as tp=8, got 'tp'"),
        ({"fix": "zp=8"}, "fix: expected one of tp, pp, vpp"),
        ({"fix": "tpp=3"}, "fix: expected one of .*, got 'tpp'. The nearest is tp$"),
        ({"fix": "schedule=1f1c"}, "schedule: .*, got '1f1c'. The nearest is 1f1b$"),
        ({"fix": "recompute=ful"}, "recompute: .*, got 'ful'. The nearest is full$"),
        ({"device": "h1000"}, "device: .* got 'h1000'. The nearest is h100$"),
        (
            {"nodes": 1},
            "memory: no plan fits in 79 GiB: expected [0-9]+ nodes instead of 1. Stage 0 of the "
            "leanest .* GiB of it [a-z ]+$",
        ),
        (
            {"nodes": 4, "fix": "tp=1,pp=4,zero=1,recompute=none,microbatch=1"},
            "memory: no plan fits in 79 GiB: expected zero 3. ",
        ),
        ({"objective": "joy"}, "objective: expected one of step, cost, goodput, got 'joy'"),
        ({"precision": "int8"}, "precision: expected one of fp32"),
        ({"fix": "tp=8,tp=4"}, "fix: expected one tp, got 8 and 4"),
        ({"fix": "zero=x"}, "zero: expected a whole number from 0"),
        (
            {"failures": 100},
            "^hours: expected the hours of training .--hours 1000., which a price, failures",
        ),
        (
            {"price": 1},
            "^hours: expected the hours of training .--hours 1000., which a price, failures",
        ),
        ({"objective": "cost", "price": "3/device-hour"}, "^hours: expected the hours of training"),
        ({"synchronous_checkpoints": True}, "^hours: expected the hours of training"),
        ({"price": -1}, "price: expected more than 0"),
        ({"price": "3", "hours": 1}, "price: expected an amount with its unit, like 2.10/device-h"),
        ({"hours": "3x"}, "hours: expected hours, like 1000, or a time, like 30d, got '3x'"),
        ({"oversubscription": "1,0.5"}, "oversubscription: expected 1 or more, .*, got '0.5'"),
        ({"devices": 512}, "devices: expected --devices or --nodes, got both"),
        (
            {"nodes": None, "devices": "500"},
            "devices: expected as many as whole nodes of dgx-h100 have .* The nearest: 496 and 504",
        ),
        ({"cluster": OURS}, "device: expected one with the cluster ours: --device"),
        ({"cluster": replace(OURS, device="FooChip 9")}, "device: .* got 'FooChip 9'"),
        ({"global_batch": 0}, "global batch: expected a whole number from 1"),
        (
            {"nodes": 11, "global_batch": 64},
            "got 64 on 88 devices \\(it is one on 8 nodes\\). The nearest is 66",
        ),
    ],
)
def test_a_mistake_is_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        fw.plan("llama3-70b", **{**ASKED, **given})


@pytest.mark.parametrize(
    "shape",
    [
        {"model_type": "llama", "num_attention_heads": 0, "hidden_size": 4096},
        {"model_type": "gpt2", "n_head": 0, "n_embd": 768},
    ],
)
def test_a_model_without_heads_is_refused(tmp_path: Path, shape: dict[str, Any]) -> None:
    place = tmp_path / "config.json"
    place.write_text(json.dumps({**shape, "vocab_size": 32, "intermediate_size": 64}))
    with pytest.raises(UsageError, match=r"heads?: expected a whole number above 0, got 0"):
        fw.plan(str(place), **ASKED)


def test_a_pipe_in_place_of_measured_steps_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "steps.csv")
    with pytest.raises(UsageError, match="expected a file, got a pipe"):
        fw.plan("llama3-70b", **ASKED, calibrate=tmp_path / "steps.csv")


def test_the_command_prints_the_answer_first(cli: Cli) -> None:
    done = cli(*WORDS, *BATCH, "--top", "3", "--why", "--hours", "100")
    first = done.stdout.splitlines()[0]
    assert first.startswith("Fits, best of")
    assert "do not fit" in done.stdout
    assert "With half the bandwidth between nodes" in done.stdout
    assert "goodput" in done.stdout


def test_json_holds_the_keys_of_the_contract(cli: Cli) -> None:
    answer = json.loads(cli(*WORDS, *BATCH, "--top", "2", "--json").stdout)
    best = answer["plans"][0]
    assert len(answer["plans"]) == 2
    assert {"considered", "left_out"} <= set(answer)
    assert {"tp", "pp", "vpp", "dp", "cp", "ep", "zero", "recompute", "microbatch"} <= set(best)
    assert set(best["exposed"]) == {"tp_s", "pp_s", "dp_s", "cp_s", "ep_s"}
    assert set(best["interval"]) == {"low_s", "high_s"}
    assert best["fits"] is True
    assert best["memory"]["peak_reserved_bytes"] > best["memory"]["peak_allocated_bytes"]
    assert answer["goodput"] is None


def test_a_result_holds_every_plan_that_fits_for_pictures() -> None:
    result = usual()
    assert result.landscape is not None
    assert np.all(np.diff(result.landscape["step_s"]) >= 0)
    assert in_words(result.best).startswith("TP ")
    assert "landscape" not in plan_data(result)


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("llama3-70b", "tp=4,pp=4,vpp=1"),
        ("llama3-70b", "tp=4,pp=4,vpp=5"),
        ("llama3-8b", "pp=1"),
        ("mixtral-8x7b", "pp=2,vpp=1,ep=4"),
    ],
)
def test_the_step_of_a_plan_is_a_run(name: str, fixed: str) -> None:
    result = fw.plan(name, cluster="dgx-h100", nodes=8, global_batch=64, seq=4096, fix=fixed)
    best, run = result.best, result.run()
    spans, collectives = run.spans, run.collectives
    assert run.provenance.origin == "simulated"
    assert set(spans.rank.tolist()) == set(range(best.pp))
    assert spans.end_ns.max() == pytest.approx(best.step_s * 1e9, abs=2)
    computing = spans.lane == "compute"
    computed_s = (spans.end_ns - spans.start_ns)[computing].sum() / 1e9 / best.pp
    priced_s = best.compute_s + best.slowdown_s + best.optimizer_s
    assert computed_s == pytest.approx(priced_s, rel=5e-3)
    on_last = computing & (spans.rank == best.pp - 1)
    on_last_s = (spans.end_ns - spans.start_ns)[on_last].sum() / 1e9
    beside_s = best.slowdown_s + best.optimizer_s
    assert on_last_s - beside_s == pytest.approx(best.slowest_computing * best.compute_s, rel=5e-3)
    for rank in range(best.pp):  # a device computes one thing at a time
        rows = np.flatnonzero(computing & (spans.rank == rank))
        rows = rows[np.argsort(spans.start_ns[rows], kind="stable")]
        assert (spans.start_ns[rows][1:] >= spans.end_ns[rows][:-1] - 1).all()
    tensor = np.char.startswith(collectives.group.astype(str), "tp of stage")
    sent_s = (collectives.end_ns - collectives.start_ns)[tensor].sum() / 1e9 / best.pp
    assert sent_s == pytest.approx(best.exposed.tp_s, rel=5e-3, abs=1e-9)
    answer = fw.explain(run)
    assert answer.step_s == pytest.approx(best.step_s, rel=1e-3)


@pytest.mark.parametrize("fixed", ["pp=4,tp=8,vpp=1", "pp=8,tp=4,vpp=1", "pp=4,tp=8,vpp=10"])
def test_explain_shows_the_parts_of_a_plan_that_plan_shows(fixed: str) -> None:
    result = fw.plan("llama3-70b", **ASKED, fix=f"{fixed},microbatch=1,cp=1", top=1)
    best, answer = result.best, fw.explain(result.run())
    explained, sent = answer.account, best.exposed
    # What the slowest stage computes beyond the others is the straggler's there.
    computed_s = best.compute_s + best.slowdown_s + best.optimizer_s
    slower_s = (best.slowest_computing - 1) * best.compute_s / (best.pp - 1)
    assert slower_s > 0
    assert explained["compute"] == pytest.approx(computed_s - slower_s, rel=5e-3)
    near_s = 0.01 * best.step_s  # transfers between stages are played, and priced by a formula
    sent_s = sent.tp_s + sent.pp_s + sent.dp_s
    told_s = sum(explained[part] for part in ("line_rate", "transport", "contention"))
    assert told_s == pytest.approx(sent_s, abs=near_s)
    waited_s = explained["bubble"] + explained["straggler"] - slower_s
    assert waited_s == pytest.approx(best.bubble_s, abs=near_s)


@pytest.mark.parametrize(
    ("model", "nodes", "seq", "fixed"),
    [
        ("llama3-8b", 8, 8192, "tp=2,pp=8,cp=2"),
        ("mixtral-8x7b", 8, 4096, "tp=1,pp=4,ep=8"),
        ("deepseek-v3", 32, 4096, "pp=16"),
    ],
)
def test_explain_has_the_bubble_and_the_host_of_a_plan_with_more_kinds_of_parallelism(
    model: str, nodes: int, seq: int, fixed: str
) -> None:
    batch: dict[str, Any] = {"cluster": "dgx-h100", "nodes": nodes, "global_batch": 256, "seq": seq}
    result = fw.plan(model, **batch, fix=fixed, top=1)
    best, explained = result.best, fw.explain(result.run()).account
    near_s = 5e-4 * best.step_s
    assert explained["host"] == pytest.approx(best.host_s, abs=near_s)
    assert explained["bubble"] == pytest.approx(best.bubble_s, abs=near_s)


def test_the_rows_of_a_step_hold_the_bytes_that_were_priced() -> None:
    def sent(model: str, nodes: int, seq: int, fixed: str) -> Collectives:
        job: dict[str, Any] = {"nodes": nodes, "global_batch": 256, "seq": seq}
        return fw.plan(model, cluster="dgx-h100", fix=fixed, top=1, **job).run().collectives

    latent = sent("deepseek-v2", 16, 8192, "tp=4,pp=4,cp=2,ep=16,microbatch=1,vpp=15")
    around = latent.bytes[latent.group == "cp of stage 3 inside a node"]
    assert set(around.tolist()) == {2 * 8192 * 32 * (128 + 64 + 128)}  # one layer, 32 heads
    shared = {}
    for fixed in ("tp=8,etp=2,ep=4", "tp=2,etp=2,ep=4"):
        table = sent("mixtral-8x7b", 4, 4096, f"{fixed},pp=1,cp=1,microbatch=1,zero=1")
        shared[fixed[:4]] = set(table.bytes[table.group == "tp of stage 0 inside a node"].tolist())
    # Each of 32 layers sums tokens behind attention, and two rows of each token in its experts.
    tokens_bytes = 2 * 4096 * 4096
    assert shared["tp=8"] == {32 * (tokens_bytes + tokens_bytes // 8 * 2 * 2)}
    assert shared["tp=2"] == {32 * (tokens_bytes + tokens_bytes // 2 * 2 * 2)}


def test_shard_groups_add_up_the_gradients_of_a_device_once() -> None:
    job: dict[str, Any] = {"cluster": "dgx-h100", "nodes": 4, "global_batch": 128, "seq": 2048}
    for shard in (8, 32):
        fix = f"tp=1,pp=1,cp=1,zero=3,shard={shard},microbatch=1"
        result = fw.plan("llama3-8b", **job, fix=fix, top=1)
        assert result.architecture is not None
        table = result.run().collectives
        assert table.bytes.tolist() == [4 * result.architecture.parameters]  # each in 32 bits
        # The row has the time of all that data parallelism sends, sums between groups among it.
        lasts_s = float(table.end_ns[0] - table.start_ns[0]) * 1e-9
        assert lasts_s == pytest.approx(result.best.exposed.dp_s, rel=1e-6)


@pytest.mark.parametrize(("nodes", "inside"), [(1, " inside a node"), (2, "")])
def test_sums_of_tied_embeddings_over_two_nodes_are_not_inside_one(nodes: int, inside: str) -> None:
    job: dict[str, Any] = {"cluster": "dgx-h100", "nodes": nodes, "global_batch": 128, "seq": 2048}
    fix = {"tp": 1, "pp": 2, "vpp": 1, "cp": 1, "dp": 4 * nodes, "zero": 1, "microbatch": 1}
    table = fw.plan("qwen2.5-0.5b", **job, fix=fix, top=1).run().collectives
    sums = [name for name in set(table.group.tolist()) if name.startswith("dp")]
    assert sorted(sums) == [f"dp of stage {stage}{inside}" for stage in range(2)]


def test_both_ends_of_a_transfer_between_stages_agree() -> None:
    table = fw.plan("llama3-70b", **ASKED, fix="pp=4,vpp=1", top=1).run().collectives
    sent = table.rows(table.op == "sendrecv")
    ends: dict[tuple[str, int], list[int]] = {}
    columns = (sent.group.tolist(), sent.sequence.tolist(), sent.start_ns.tolist())
    for group, number, start_ns in zip(*columns, strict=True):
        ends.setdefault((group, number), []).append(start_ns)
    assert ends
    assert all(len(both) == 2 and both[0] == both[1] for both in ends.values())
    assert (sent.issue_ns <= sent.start_ns).all()


def test_commands_read_the_step_of_a_plan(cli: Cli, tmp_path: Path) -> None:
    words = (*WORDS, *BATCH, "--top", "1")
    for name, pipeline in (("a.run", "pp=4,vpp=1"), ("b.run", "pp=2,vpp=1")):
        cli(*words, "--fix", pipeline, "-o", str(tmp_path / name))
    explained = json.loads(cli("explain", str(tmp_path / "a.run"), "--json").stdout)
    assert sum(explained["account"].values()) == pytest.approx(explained["step_s"], rel=1e-6)
    both = str(tmp_path / "a.run"), str(tmp_path / "b.run")
    compared = cli("compare", *both).stdout
    assert "step" in compared
    cli("report", both[0], "-o", str(tmp_path / "page.html"))
    assert "backward" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("pipeline", ["pp=1", "pp=4,vpp=1"])
def test_explain_finds_the_communication_that_the_plan_has(pipeline: str) -> None:
    result = fw.plan("llama3-70b", **ASKED, fix=f"tp=8,cp=1,{pipeline}", top=1)
    parts = fw.explain(result.run()).account
    shown = result.best.exposed
    assert parts["unexplained"] == 0
    sent_s = sum(parts[part] for part in ("line_rate", "transport", "latency"))
    assert parts["contention"] == pytest.approx(result.best.slowdown_s, rel=1e-3)
    assert sent_s == pytest.approx(shown.tp_s + shown.pp_s + shown.dp_s, rel=0.05)


def test_groups_inside_a_node_use_no_line_between_nodes() -> None:
    asked: dict[str, Any] = {"cluster": "dgx-h100", "seq": 4096, "top": 1}
    asked["fix"] = "tp=8,pp=1,microbatch=1,cp=1"
    for nodes in (1, 4):
        result = fw.plan("llama3-8b", **asked, nodes=nodes, global_batch=8 * nodes)
        answer, shown = fw.explain(result.run()), result.best.exposed
        assert answer.detail.inside_s == pytest.approx(shown.tp_s, rel=0.02)
        sent_s = answer.account["line_rate"] + answer.account["transport"]
        assert sent_s == pytest.approx(shown.tp_s + shown.dp_s, rel=0.02)
        assert answer.account["line_rate"] <= shown.dp_s * 1.001
        assert answer.account["contention"] == pytest.approx(result.best.slowdown_s, rel=1e-3)
        assert answer.verdict.kind == "transport"
        assert answer.verdict.kind != "overlap"
        assert not answer.fixes
        assert not any("line rate" in sentence(note) for note in answer.notes)
    assert "the links inside nodes cost" in answer.verdict.sentence
    few = fw.plan(
        "llama3-8b",
        cluster="dgx-h100",
        nodes=8,
        global_batch=64,
        seq=4096,
        top=1,
        fix="tp=8,pp=8,dp=1,vpp=1,microbatch=2,cp=1",
    )
    said = fw.explain(few.run()).verdict
    assert said.kind == "bubble"
    assert "is lost to the links inside nodes" in said.sentence
    # Sums of tensor parallelism over nodes cannot move beside computing.
    wide = fw.plan(
        "llama3-8b",
        cluster="dgx-h100",
        nodes=2,
        global_batch=8,
        seq=4096,
        top=1,
        fix="tp=16,pp=1,dp=1,microbatch=1,cp=1",
    )
    assert fw.explain(wide.run()).verdict.kind in ("line_rate", "transport")


def test_nodes_are_not_asked_for_where_no_number_of_them_is_enough() -> None:
    job: dict[str, Any] = {"cluster": "dgx-h100", "seq": 8192, "global_batch": 512}
    with pytest.raises(UsageError, match=r"in 79 GiB: expected zero 3\. Stage"):
        fw.plan("llama3-70b", **job, nodes=64, fix="tp=1,pp=1,zero=0")
    with pytest.raises(UsageError, match=r"expected \d+ nodes instead of 2"):
        fw.plan("llama3-70b", **job, nodes=2)


def test_nodes_are_not_asked_for_where_no_other_number_allows_the_fixed_degrees() -> None:
    fixed = "tp=4,pp=1,dp=4,cp=1,microbatch=1,zero=1,recompute=selective"
    with pytest.raises(UsageError, match=r"in 79 GiB: expected zero 2\. Stage"):
        fw.plan(
            "llama3-8b", cluster="dgx-h100", nodes=2, global_batch=64, seq=65536, fix=fixed, top=1
        )


def test_the_nearest_number_of_nodes_may_be_one_that_allows_other_degrees() -> None:
    """Beside TP 8, 14 nodes leave CP 2 at most. Their leanest plan shares less than one of 16."""
    asked: dict[str, Any] = {"cluster": "dgx-h100", "global_batch": 64, "fix": "recompute=none"}
    with pytest.raises(UsageError, match="expected 16 nodes instead of 14"):
        fw.plan("llama3-405b", nodes=14, **asked)
    with pytest.raises(UsageError, match="expected 16 nodes instead of 18"):
        fw.plan("llama3-405b", nodes=18, **asked)
    assert fw.plan("llama3-405b", nodes=16, top=1, **asked).best.cp == 8


@pytest.mark.parametrize(
    ("dp", "line", "helps"),
    [
        (
            4,
            "dp: expected what tp x pp x cp leave of 120 devices, got 4. The nearest is 3, with a "
            "global batch of 63",
            {"fix": "dp=3", "global_batch": 63},
        ),
        (
            5,
            "global batch: expected a multiple of dp=5, got 64 on 120 devices. The nearest is 65",
            {"fix": "dp=5", "global_batch": 65},
        ),
    ],
)
def test_a_fixed_degree_that_other_degrees_do_not_leave_is_told_with_what_helps(
    dp: int, line: str, helps: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"cluster": "dgx-h100", "nodes": 15, "global_batch": 64, "top": 1}
    with pytest.raises(UsageError, match=f"^{line}$"):
        fw.plan("llama3-8b", **asked, fix=f"dp={dp}")
    assert f"dp={fw.plan('llama3-8b', **{**asked, **helps}).best.dp}" == helps["fix"]


def test_a_batch_that_is_too_small_for_a_cluster_names_the_nodes_that_it_fits() -> None:
    asked: dict[str, Any] = {"cluster": "dgx-h100", "seq": 8192, "top": 1, "global_batch": 8}
    fits = r"of dp, got 8 on 256 devices \(it is one on 8 nodes\)\. The nearest is 32$"
    for size in ({"nodes": 32}, {"devices": 256}):
        with pytest.raises(UsageError, match=fits):
            fw.plan("llama3-8b", **{**asked, **size}, fix="tp=2,pp=4,cp=1")
    assert fw.plan("llama3-8b", **asked, nodes=8, fix="tp=2,pp=4,cp=1").best.dp == 8
    # Four devices are no whole nodes.
    with pytest.raises(UsageError, match=r"of dp, got 4 on 8 devices. The nearest is 8$"):
        fw.plan("llama3-8b", **{**asked, "global_batch": 4}, nodes=1, fix="tp=1,pp=1,cp=1")
    # No nodes help a batch that the microbatch does not divide, or groups that they do not have.
    for batch, fix in ((13, "microbatch=2"), (64, "zero=3,shard=128")):
        with pytest.raises(UsageError, match=r"global batch: .* devices\. The nearest is \d+$"):
            fw.plan(
                "llama3-8b",
                **{**asked, "global_batch": batch},
                nodes=32,
                fix=f"tp=1,pp=1,cp=1,{fix}",
            )


def test_memory_is_named_where_it_refuses_the_nearest_batch_too() -> None:
    """On 13 nodes, dp is a multiple of 13. No batch of such plans fits in the devices."""
    asked: dict[str, Any] = {"cluster": "dgx-h100", "global_batch": 2048, "seq": 8192}
    with pytest.raises(
        UsageError, match=r"memory: no plan fits .* expected 14 nodes instead of 13"
    ):
        fw.plan("llama3-405b", nodes=13, **asked)
    assert fw.plan("llama3-405b", nodes=14, **asked).plans
    with pytest.raises(UsageError, match=r"global batch: .* \(it is one on 16 nodes\)"):
        fw.plan("llama3-405b", nodes=26, **asked)


def test_a_part_of_an_hour_is_told_as_it_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for hours, said in ((0.4, "0.4 hours of training"), (1000, "1,000 hours of training")):
        print_plan(fw.plan("llama3-70b", **ASKED, fix="pp=4,vpp=1,tp=8", top=1, hours=hours))
        assert said in capsys.readouterr().out


def test_a_schedule_that_is_not_played_is_refused() -> None:
    result = fw.plan("llama3-70b", **ASKED, fix="pp=4,schedule=zero-bubble", top=1)
    with pytest.raises(UsageError, match="expected 1f1b or interleaved for a simulated step"):
        result.run()


@pytest.mark.parametrize(
    ("fixed", "nearest"),
    [("cp=3", "2"), ("microbatch=3", "2"), ("pp=4,vpp=3", "2"), ("zero=9", "3")],
)
def test_a_degree_that_no_plan_has_names_the_nearest(fixed: str, nearest: str) -> None:
    name, value = fixed.split(",")[-1].split("=")
    with pytest.raises(UsageError, match=f"^{name}: .*got {value}. The nearest is {nearest}$"):
        fw.plan("llama3-70b", **ASKED, fix=fixed)


def test_a_model_that_is_too_large_names_nodes_on_which_it_fits() -> None:
    asked: dict[str, Any] = {"cluster": "dgx-h100", "global_batch": 256}
    with pytest.raises(UsageError, match="expected 3 nodes instead of 1"):
        fw.plan("llama3-70b", nodes=1, **asked)
    assert fw.plan("llama3-70b", nodes=3, **asked).best.pp == 3  # 27, 27 and 26 layers
    with pytest.raises(UsageError, match="expected 14 nodes instead of 1"):
        fw.plan("llama3-405b", nodes=1, **asked)
    with pytest.raises(UsageError, match="expected 14 nodes instead of 13"):  # not batch 260
        fw.plan("llama3-405b", nodes=13, **asked)


def test_the_plan_with_the_best_goodput_depends_on_the_failures_that_are_given() -> None:
    asked: dict[str, Any] = {"cluster": "dgx-h100", "nodes": 16, "global_batch": 128}
    often = fw.plan("llama3-8b", objective="goodput", failures=20, restart="1h", **asked)
    seldom = fw.plan("llama3-8b", objective="goodput", failures=1e6, **asked)
    assert often.best.devices < seldom.best.devices == 128


def test_to_is_named_where_its_degree_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"to: expected one of tp, .*, got 'order'"):
        fw.plan(recorded=tmp_path, to="order=ring")
    with pytest.raises(UsageError, match=r"to: expected one of tp, .*, got 'order'"):
        fw.plan(recorded=tmp_path, to={"order": 1})


def test_fix_names_the_degrees_before_it_reads_a_value() -> None:
    with pytest.raises(UsageError, match=r"fix: expected one of tp, .*, got 'order'"):
        fw.plan("llama3-8b", cluster="dgx-h100", nodes=1, global_batch=64, fix="order=ring")


def test_kinds_of_context_parallelism_are_searched_and_fixed() -> None:
    def best(kind: str) -> Planned:
        fixed = {"tp": 4, "cp": 8, "context": kind}
        asked = fw.plan(
            "llama3-70b", cluster="dgx-h100", nodes=8, global_batch=8, seq=131072, fix=fixed, top=1
        )
        return asked.best

    times = {kind: best(kind).exposed.cp_s for kind in ("ring", "all-gather", "ulysses")}
    assert best("ulysses").context_kind == "ulysses"
    assert len(set(times.values())) == 3
    assert times["ring"] < times["all-gather"]  # scores hide what a gather shows
    with pytest.raises(UsageError, match="context: expected one of ring, all-gather, ulysses"):
        best("spiral")


def test_shard_groups_and_sharded_gradients_are_searched() -> None:
    def best(fix: str) -> Planned:
        return fw.plan(
            "llama3-8b", cluster="dgx-h100", nodes=4, global_batch=256, fix=fix, top=1
        ).best

    same = "zero=3,tp=1,cp=1,microbatch=1,recompute=selective"
    whole, in_node = best(f"{same},shard=32"), best(f"{same},shard=8")
    assert (whole.shard, in_node.shard) == (32, 8)
    assert in_node.memory.optimizer_bytes > 3 * whole.memory.optimizer_bytes
    assert in_node.exposed.dp_s + in_node.slowdown_s < whole.exposed.dp_s + whole.slowdown_s
    gradients = best("zero=2,tp=1,cp=1,microbatch=2")
    assert gradients.memory.gradients_bytes < best("zero=1,tp=1").memory.gradients_bytes / 8
    with pytest.raises(UsageError, match=r"shard: .*got 3\. The nearest is"):
        best("zero=3,shard=3")


@pytest.mark.parametrize(
    ("name", "pp", "layers"),
    [
        ("deepseek-v3", 16, [3, *[4] * 14, 3]),  # 61 and one that predicts a further token
        ("deepseek-v3", 3, [20, 21, 21]),
        ("kimi-k2", 16, [*[4] * 15, 1]),
        ("kimi-k2", 8, [*[8] * 7, 5]),
        ("llama3-405b", 16, [7, *[8] * 14, 7]),
        ("llama3-70b", 3, [27, 27, 26]),
    ],
)
def test_stages_at_the_ends_may_lack_layers_and_memory_counts_as_the_price_does(
    name: str, pp: int, layers: list[int]
) -> None:
    model = architecture(name)
    first, most, last = (int(each) for each in stage_layers(model, np.asarray(pp)))
    assert [first, *[most] * (pp - 2), last] == layers
    for vpp in divisors(most):
        dense, experts = layers_of_stages(model, pp, vpp)
        assert (dense + experts).tolist() == layers
    fixed = {"pp": pp, "tp": 8, "cp": 1, "recompute": "full"}
    nodes = 96 if pp == 3 else 128
    result = fw.plan(name, cluster="dgx-h100", nodes=nodes, global_batch=768, fix=fixed, top=50)
    assert {one.pp for one in result.plans} == {pp}
    assert all(most % one.vpp == 0 for one in result.plans)


def test_the_published_plan_of_deepseek_v3_is_priced_with_its_schedule() -> None:
    fixed = "pp=16,tp=1,ep=64,cp=1,schedule=dualpipe"
    asked: dict[str, Any] = {
        "cluster": "dgx-h100",
        "nodes": 256,
        "global_batch": 15360,
        "seq": 4096,
    }
    beside = fw.plan("deepseek-v3", **asked, fix=fixed).best
    behind = fw.plan("deepseek-v3", **asked, fix=f"{fixed},ep_overlap=0").best
    assert (beside.pp, beside.schedule, beside.ep_overlap) == (16, "dualpipe", True)
    assert not behind.ep_overlap
    assert beside.exposed.ep_s < 0.5 * behind.exposed.ep_s


@pytest.mark.parametrize(
    ("nodes", "batch", "fixed", "refusal"),
    [
        (3, 8, "pp=3,tp=8,microbatch=8", "pp: .* even number .* got 3. No even .*, tp=8"),
        (6, 96, "pp=3,tp=8,microbatch=2", "pp: .* even number .* got 3. The nearest is 2"),
        (8, 64, "pp=8,tp=8,microbatch=16", "microbatch: .* 2 x pp, .* got 16. The nearest is 4"),
        (8, 8, "pp=8,tp=8,microbatch=1", "global batch: .* got 8. The nearest is 16"),
        (8, 17, "pp=8,tp=8", "global batch: .* got 17. The nearest is 16"),
    ],
)
def test_dualpipe_is_refused_where_it_cannot_run(
    nodes: int, batch: int, fixed: str, refusal: str
) -> None:
    asked: dict[str, Any] = {"cluster": "dgx-h100", "nodes": nodes, "global_batch": batch}
    with pytest.raises(UsageError, match=refusal):
        fw.plan("llama3-8b", **asked, fix=f"{fixed},schedule=dualpipe")


def test_dualpipe_is_searched_with_even_stages_that_it_fills() -> None:
    asked: dict[str, Any] = {"cluster": "dgx-h100", "nodes": 4, "global_batch": 64}
    result = fw.plan("llama3-8b", **asked, fix="schedule=dualpipe", top=1000)
    for one in result.plans:
        microbatches = 64 // one.dp // one.microbatch
        assert one.pp % 2 == microbatches % 2 == 0
        assert microbatches >= 2 * one.pp


def test_a_value_that_is_fixed_need_not_keep_to_the_habits_of_the_search() -> None:
    def best(**fixed: int | str) -> Planned:
        asked: dict[str, Any] = {"cluster": "dgx-h100", "nodes": 4, "global_batch": 96}
        return fw.plan("llama3-8b", **asked, fix=fixed, top=1).best

    assert best(microbatch=3, tp=1, pp=1).microbatch == 3
    assert best(tp=16).exposed.tp_s > best(tp=8).exposed.tp_s  # between nodes
    same: dict[str, int | str] = {
        "pp": 2,
        "vpp": 1,
        "tp": 1,
        "cp": 1,
        "microbatch": 1,
        "recompute": "none",
    }
    sharded, whole = best(zero=3, shard=16, **same), best(zero=1, **same)
    assert sharded.memory.params_bytes == pytest.approx(whole.memory.params_bytes / 16)
    assert sharded.exposed.dp_s + sharded.slowdown_s > whole.exposed.dp_s + whole.slowdown_s
    some = best(recompute_layers=3, **{**same, "recompute": "full"})
    none, every = best(**same), best(**{**same, "recompute": "full"})
    assert some.recompute_layers == 3
    assert none.step_s < some.step_s < every.step_s
    shown = best(tp=8, tp_overlap=0, pp=1, microbatch=1).exposed.tp_s
    assert best(tp=8, tp_overlap=1, pp=1, microbatch=1).exposed.tp_s < shown


def test_layers_that_are_computed_again_are_whole_ones() -> None:
    asked: dict[str, Any] = {"cluster": "p3dn", "nodes": 5, "global_batch": 64}
    asked |= {"seq": 32768, "precision": "fp16", "top": 1000}
    partly = [
        one
        for one in fw.plan("llama3-8b", **asked, fix="cp=2,recompute=full,tp=4").plans
        if one.recompute_layers is not None
    ]
    assert {one.pp for one in partly} == {5}  # a stage has seven layers
    for one in partly:
        degrees = {name: getattr(one, name) for name in ("tp", "pp", "vpp", "dp", "cp", "zero")}
        again = {**degrees, "microbatch": one.microbatch, "recompute_layers": one.recompute_layers}
        again |= {"context": one.context_kind} | ({"shard": one.shard} if one.zero == 3 else {})
        itself = fw.plan("llama3-8b", **asked, fix=again).best
        assert (itself.step_s, itself.memory) == (one.step_s, one.memory)
    asked |= {"cluster": "gb200-nvl72", "nodes": 2, "seq": 1024, "precision": "bf16"}
    of_one_layer = fw.plan("llama3-8b", **asked, fix="pp=32,recompute=full").plans
    assert {one.recompute_layers for one in of_one_layer} == {None}


def test_the_table_shows_each_communication_that_the_sentence_below_it_tells(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: dict[str, Any] = {"cluster": "gb200-nvl72", "nodes": 2, "global_batch": 128}
    result = fw.plan("llama3-8b", **asked, precision="nvfp4", top=1)
    assert result.best.step_s / 200 < result.best.exposed.dp_s < 0.005
    print_plan(result)
    said = capsys.readouterr().out
    assert "data parallelism 1%" in said
    assert f"{result.best.exposed.dp_s:.2g} s" in said


def test_ranks_that_share_an_expert_hold_less_of_it() -> None:
    def best(fixed: str) -> Planned:
        asked: dict[str, Any] = {"cluster": "dgx-h100", "nodes": 8, "global_batch": 256}
        return fw.plan("mixtral-8x7b", **asked, fix=f"tp=2,pp=4,cp=1,ep=4,{fixed}").best

    assert best("etp=2").etp == 2
    assert best("etp=2").memory.params_bytes < best("etp=1").memory.params_bytes


@pytest.mark.parametrize(
    ("fixed", "line"),
    [
        ("etp=2", "etp: expected a divisor of 1 columns of an expert, got 2. The nearest is 1"),
        ("ep_overlap=2", "ep_overlap: expected 0 or 1, got 2"),
        ("recompute_layers=2,recompute=none", "recompute_layers: expected recompute=full beside"),
        ("recompute_layers=21,pp=4", "recompute_layers: expected at most 20 layers of a stage"),
    ],
)
def test_a_choice_that_has_no_price_is_refused(fixed: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        fw.plan("llama3-70b", **ASKED, fix=fixed)


def test_the_named_device_counts_for_each_compared_cluster() -> None:
    asked: dict[str, Any] = {**ASKED, "nodes": 2, "cluster": "cloud-100g-tcp,dgx-h100"}
    networks = fw.plan("llama3-8b", **asked, device="h100").networks
    assert [there.device for there in networks] == ["NVIDIA H100"] * 2
    with pytest.raises(UsageError, match="device: expected one with the cluster ours: --device"):
        fw.plan("llama3-8b", **{**asked, "cluster": ["dgx-h100", OURS]})
    stated = replace(OURS, device="A100-SXM-40GB")
    networks = fw.plan("llama3-8b", **{**asked, "cluster": ["dgx-h100", stated]}).networks
    assert [there.device for there in networks] == ["NVIDIA H100", "NVIDIA A100"]


def test_every_built_in_cluster_tells_its_device() -> None:
    titles = {name: device_of(fw.cluster(name), None).title for name in cluster_names()}
    assert titles == {
        "p3dn": "NVIDIA V100",
        "cloud-100g-tcp": "NVIDIA A100",
        "dgx-a100": "NVIDIA A100",
        "dgx-h100": "NVIDIA H100",
        "gb200-nvl72": "NVIDIA GB200",
        "p4d": "NVIDIA A100",
        "nd-a100-v4": "NVIDIA A100",
        "p5": "NVIDIA H100",
        "a3-high": "NVIDIA H100",
        "a3-mega": "NVIDIA H100",
        "a3-ultra": "NVIDIA H200",
    }
    # Virtual machines with 8 A100 of 40 GB.
    assert device_of(fw.cluster("cloud-100g-tcp"), None).memory_bytes < 41 * GIB


@pytest.mark.parametrize("order", [("dgx-h100", "gb200-nvl72"), ("gb200-nvl72", "dgx-h100")])
def test_a_compared_cluster_on_which_nothing_fits_keeps_its_row(
    order: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"nodes": 1, "global_batch": 64, "top": 1}
    result = fw.plan("llama3-70b", cluster=",".join(order), **asked)
    rows = {there["cluster"]: there for there in plan_data(result)["networks"]}
    assert rows["dgx-h100"]["plan"] is None
    assert "memory: no plan fits in 79 GiB" in rows["dgx-h100"]["does_not_fit"]
    assert rows["gb200-nvl72"]["plan"]["devices"] == result.best.devices == 64
    print_plan(result)
    said = " ".join(capsys.readouterr().out.split())
    assert "dgx-h100 does not fit: memory: no plan fits" in said
    assert "Best of 2 clusters: gb200-nvl72. dgx-h100 has no plan that fits." in said
    assert [(one.cluster, one.times) for one in result.other_clusters] == [("dgx-h100", None)]
    plot_plans(result, tmp_path / "page.html")
    with pytest.raises(UsageError, match="memory: no plan fits"):
        fw.plan("llama3-405b", cluster="dgx-h100,dgx-a100", **asked)


def test_measured_steps_of_another_job_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "measured.csv"
    for name, same, other in (
        ("gbs", "256.0", "512"),
        ("global_batch", "256", "512"),
        ("seq", "8192", "4096"),
        ("gpus", "64", "many"),
        ("precision", "BF16", "fp8"),
        ("model", "Llama-3-70B", "llama3-8b"),
        ("model", "our own", "llama3-8b"),
        ("gpu", "H100-80GB", "A100"),
        ("gpu", "H100 (MIG off)", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"),
        ("gpu", "H100", "A100-SXM4-80GB MIG 3g.40gb"),
        ("gpu", "our own", "h100_1g.10gb"),
    ):
        table.write_text(f"tp,{name},step_time_s\n8,{same},20\n8,{other},20\n")
        with pytest.raises(
            DamagedInput, match=rf"csv:3: {name}: expected .* as asked, got '{other}"
        ):
            fw.plan("llama3-70b", **ASKED, calibrate=table)


def test_a_mark_of_byte_order_before_measured_steps_hides_no_column(tmp_path: Path) -> None:
    table = tmp_path / "measured.csv"
    tables = [f"{mark}tp,pp,step_time_s\n8,4,20\n" for mark in ("", "\ufeff")]
    steps_s = []
    for text in tables:
        table.write_text(text)
        steps_s.append(fw.plan("llama3-70b", **ASKED, calibrate=table).best.step_s)
    assert steps_s[0] == steps_s[1]


def test_an_interleaved_schedule_has_several_chunks() -> None:
    best = fw.plan("llama3-70b", **ASKED, fix="pp=4,schedule=interleaved").plans
    assert {one.schedule for one in best} == {"interleaved"}
    with pytest.raises(UsageError, match=r"vpp: expected .*schedule=interleaved.*, got 1"):
        fw.plan("llama3-70b", **ASKED, fix="pp=4,schedule=interleaved,vpp=1")


def test_figures_of_a_training_that_nobody_gives_are_named() -> None:
    asked: dict[str, Any] = {**ASKED, "objective": "goodput", "fix": "tp=8,pp=4,dp=2"}
    kinds = (PublishedFailures, UsualStorage, UsualRestart, UsualHours)
    usual = fw.plan("llama3-70b", **asked).assumed
    assert [type(one) for one in usual if isinstance(one, kinds)] == list(kinds)
    given = fw.plan(
        "llama3-70b", **asked, hours=10, failures=1e4, storage="9GB/s", restart="9s"
    ).assumed
    assert not any(isinstance(one, kinds) for one in given)


@pytest.mark.parametrize(
    ("model", "batch", "fix"),
    [
        ("qwen2.5-7b", 256, "tp=8"),
        ("qwen2.5-7b", 256, "tp=7"),
        ("llama3-8b", 100, "dp=8"),
        ("llama3-8b", 100, "dp=10"),
        ("llama3-8b", 256, "pp=6"),
        ("llama3-8b", 256, "pp=5"),
        ("llama3-8b", 256, "pp=5,tp=8,dp=4"),
        ("qwen3-30b-a3b", 256, "ep=7"),
    ],
)
def test_the_nearest_value_of_a_degree_has_a_plan(model: str, batch: int, fix: str) -> None:
    asked = {**ASKED, "global_batch": batch}
    with pytest.raises(UsageError, match=r"The nearest is \d+") as refused:
        fw.plan(model, **asked, fix=fix)
    name = str(refused.value).partition(":")[0]
    nearest = str(refused.value).partition("The nearest is ")[2].partition(":")[0]
    other = [part for part in fix.split(",") if not part.startswith(name)]
    result = fw.plan(model, **asked, fix=[*other, f"{name}={nearest}"])
    assert str(getattr(result.best, name)) == nearest


@pytest.mark.parametrize("kv_heads", [8, 24])
def test_the_search_keeps_to_tensor_parallelism_that_divides_all_heads_and_nodes(
    kv_heads: int,
) -> None:
    model = replace(architecture("llama3-8b"), heads=24, kv_heads=kv_heads, ffn=9216)
    job: dict[str, Any] = {"model": model, "global_batch": 48, "sequence": 12288}
    space = Space(**job, devices=24, devices_per_node=8, precision="bf16")
    # Three neighbours of eight would reach from one node into the next.
    assert set(every_plan(space, {}).tp.tolist()) == {1, 2, 4, 8}
    one_node = Space(**job, devices=6, devices_per_node=6, precision="bf16")
    assert set(every_plan(one_node, {}).tp.tolist()) == ({1, 2} if kv_heads == 8 else {1, 2, 3, 6})


def test_tensor_parallelism_that_divides_no_heads_of_keys_is_refused() -> None:
    asked: dict[str, Any] = {"cluster": "dgx-h100", "nodes": 7, "global_batch": 56, "seq": 7168}
    line = "tp: expected a divisor of 2 heads of keys and values, or a multiple of them, got 7. "
    with pytest.raises(UsageError, match=f"{line}The nearest is 2"):
        fw.plan("qwen2.5-0.5b", **asked, fix="tp=7")


def test_devices_of_a_node_that_no_plan_uses_are_told_and_paid_for() -> None:
    result = fw.plan(
        "qwen3-30b-a3b", cluster="gb200-nvl72", nodes=1, global_batch=256, seq=4096, hours=1, top=1
    )
    assert DevicesLeftOut(used=64, whole=72, is_chosen=True) in result.assumed
    tokens, best = 256 * 4096, result.best
    assert best.device_hours == pytest.approx(72 * best.step_s / 3600 / tokens * 1e6)
    assert result.lasting is not None
    assert result.lasting.device_hours == pytest.approx(72 * result.lasting.wall_s / 3600)


def test_a_search_on_a_crew_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        """Tasks and results cross processes, as they do with Ray."""

        def each(self, function: Any, tasks: Any) -> Any:
            for task in tasks:
                yield pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(task)))))

    asked: dict[str, Any] = {**ASKED, "nodes": 2, "objective": "cost", "bandwidth": "25Gbps"}
    here = plan_data(fw.plan("llama3-8b", **asked))
    monkeypatch.setattr("fullwire.answers.plan.crew", lambda on: nullcontext(Elsewhere()))
    assert plan_data(fw.plan("llama3-8b", **asked, on="ray")) == here


@pytest.mark.parametrize(
    ("devices", "nics", "of_device", "left"),
    [
        (6, 1, (), (4, 1)),  # the four others have the shared NIC whole
        (6, 2, (), (4, 2)),
        (6, 3, (), (4, 2)),  # two NICs of two devices each, and the third is idle
        (6, 6, (), (4, 4)),
        (72, 72, (), (64, 64)),
        (6, 2, (0, 0, 0, 0, 0, 1), (4, 1)),  # three devices or more share the first NIC
        (8, 1, (), (8, 1)),
    ],
)
def test_devices_that_are_left_out_send_nothing(
    devices: int, nics: int, of_device: tuple[int, ...], left: tuple[int, int]
) -> None:
    nics_there = Nics(rate_bps=1e11, per_node=nics, of_device=of_device)
    inside = Inside(kind="switch", rate_bps=2.4e12, latency_s=3e-6)
    whole = Cluster(name="odd", nodes=4, devices_per_node=devices, inside=inside, nics=nics_there)
    used = usable(whole, {})
    assert (used.devices_per_node, used.nics_per_node) == left
    assert used.nics.rate_bps == 1e11


def test_a_bandwidth_that_the_cluster_has_gives_the_same_step() -> None:
    inside = Inside(kind="switch", rate_bps=2.4e12, latency_s=3e-6)
    nics = Nics(rate_bps=1e11, latency_s=2e-5)
    six = Cluster(name="six", nodes=4, devices_per_node=6, inside=inside, nics=nics)
    four = replace(six, name="four", devices_per_node=4)
    asked: dict[str, Any] = {"device": "a100", "global_batch": 64, "top": 1}
    result = fw.plan("llama3-8b", cluster=[six, four], bandwidth="100Gbps", **asked)
    steps_s = {there.plan.step_s for there in result.networks if there.plan}
    assert steps_s == {result.best.step_s}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "dualpipe"])
def test_a_schedule_that_chunks_do_not_tell_is_named(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = f"schedule={schedule},pp=4,vpp=1,microbatch=1"
    result = fw.plan("llama3-8b", cluster="dgx-h100", nodes=4, global_batch=64, fix=fixed, top=2)
    print_plan(result)
    told = capsys.readouterr().out
    is_named = schedule != "1f1b"
    assert (f"PP 4 ({schedule})" in told) == is_named
    assert ("schedule" in told.partition("recompute")[0]) == is_named


def test_degrees_that_divide_whole_nodes_only_use_all_devices() -> None:
    """Nodes of six devices have four in use, unless a decided degree divides no others."""
    inside = Inside(kind="switch", rate_bps=2.4e12, latency_s=3e-6)
    nics = Nics(rate_bps=1e11, per_node=2)
    six = Cluster(name="six", nodes=4, devices_per_node=6, inside=inside, nics=nics)
    asked: dict[str, Any] = {"device": "h100", "global_batch": 96, "cluster": six, "top": 1}
    whole = fw.plan("llama3-8b", **asked, fix="dp=24")
    assert whole.best.devices == 24
    assert not any(isinstance(note, DevicesLeftOut) for note in whole.assumed)
    assert fw.plan("llama3-8b", **asked, fix="dp=4").best.devices == 16
    with pytest.raises(UsageError, match=r"16 devices \(4 of the 6 of each node\), got 5"):
        fw.plan("llama3-8b", **asked, fix="pp=5")


def test_each_compared_cluster_tells_its_own_assumptions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clusters = ["gb200-nvl72", "dgx-h100", "dgx-a100"]
    asked: dict[str, Any] = {**ASKED, "nodes": 4, "cluster": ",".join(clusters)}
    result = fw.plan("llama3-8b", **asked, precision="nvfp4", top=1)
    told = {row["cluster"]: row["assumed"] for row in plan_data(result)["networks"]}
    alone = {
        each: fw.plan("llama3-8b", **{**asked, "cluster": each}, precision="nvfp4", top=1)
        for each in clusters
    }
    assert told == {each: plan_data(answer)["assumed"] for each, answer in alone.items()}
    print_plan(result)
    said = " ".join(capsys.readouterr().out.split())
    assert "Assumed on dgx-h100: NVIDIA H100 has no nvfp4: fp8 stands for it" in said
    assert "Assumed on dgx-a100: NVIDIA A100 has no nvfp4: bf16 stands for it" in said
    assert said.count("usual share of the described links") == 1


@pytest.mark.parametrize(
    ("nodes", "batch", "nearest"),
    [(211, 1024, 1688), (3, 100, 96), (2, 100, 96)],
)
def test_the_nearest_batch_has_a_plan_with_the_fixed_degrees(
    nodes: int, batch: int, nearest: int
) -> None:
    asked: dict[str, Any] = {"cluster": "dgx-h100", "nodes": nodes, "seq": 8192, "top": 1}
    fix = "tp=1,pp=1,cp=1,zero=3"
    with pytest.raises(UsageError, match=f"^global batch: .*got {batch} .*nearest is {nearest}$"):
        fw.plan("llama3-8b", **asked, global_batch=batch, fix=fix)
    assert fw.plan("llama3-8b", **asked, global_batch=nearest, fix=fix).best.dp == 8 * nodes


def test_nodes_are_not_asked_for_where_the_batch_allows_no_more_of_them() -> None:
    """Shards among eight devices are as large on any number of nodes."""
    asked: dict[str, Any] = {"cluster": "dgx-h100", "nodes": 128, "global_batch": 1024}
    with pytest.raises(UsageError, match=r"in 79 GiB: expected tp 2 and dp 512\. Stage"):
        fw.plan("mixtral-8x7b", **asked, fix="tp=1,pp=1,cp=1,ep=1,zero=3,shard=8")


@pytest.mark.parametrize(("fixed", "least"), [("zero=-1", 0), ("tp_overlap=-1", 0), ("tp=0", 1)])
def test_the_least_value_of_a_degree_is_named(fixed: str, least: int) -> None:
    with pytest.raises(UsageError, match=f"expected a whole number from {least} to"):
        fw.plan("llama3-8b", **ASKED, fix=fixed)


def test_memory_that_the_name_of_a_device_does_not_state_is_told() -> None:
    asked: dict[str, Any] = {**ASKED, "fix": "pp=4", "top": 1}
    open_one = plan_data(fw.plan("llama3-8b", **asked, device="a100"))["assumed"]
    said = "NVIDIA A100 has 79 GiB: its name states no memory, and such devices come with 40 GB"
    assert any(said in one for one in open_one)
    for stated in ("a100-80gb", "dgx-h100", "h200", "b200"):
        told = plan_data(fw.plan("llama3-8b", **asked, device=stated))["assumed"]
        assert not any("states no memory" in one for one in told)


@pytest.mark.parametrize(
    ("heading", "said"),
    [
        ("tp,pp,tp,step_time_s", "expected one column tp, got 'tp,pp,tp,step_time_s'"),
        ("tp;pp;tflops", "expected a column step_time_s or tokens_s_gpu, got 'tp;pp;tflops'"),
        ("tp,pp,step", "expected a column step_time_s or tokens_s_gpu, got 'tp,pp,step'"),
    ],
)
def test_a_bad_heading_of_measured_steps_is_named(tmp_path: Path, heading: str, said: str) -> None:
    table = tmp_path / "measured.csv"
    table.write_text(f"{heading}\n8,4,4,8.6\n")
    with pytest.raises(DamagedInput, match=f"csv:1: {said}"):
        fw.plan("llama3-70b", **ASKED, calibrate=table)


@pytest.mark.parametrize(
    ("length", "fix", "line"),
    [
        (4097, "cp=2", "cp: expected twice cp to divide the sequence 4097 (the nearest such"),
        (4097, "cp=8", "sequence is 4096), got 8. The nearest is 1"),
        (4098, "cp=2", "cp: expected twice cp to divide the sequence 4098 (the nearest such"),
        (4097, "tp=8", "tp: expected tp to divide the sequence 4097 with sequence parallelism"),
        (4100, "cp=2,tp=4", "tp x cp 2 to divide the sequence 4100"),
        (8192, "cp=3", "the sequence 8192 (the nearest such sequence is 8190), got 3. The nearest"),
    ],
)
def test_a_sequence_that_degrees_do_not_divide_is_named(length: int, fix: str, line: str) -> None:
    with pytest.raises(UsageError) as refused:
        fw.plan("llama3-8b", **{**ASKED, "seq": length}, fix=fix)
    assert line in str(refused.value)


def test_degrees_that_are_searched_divide_the_sequence() -> None:
    result = fw.plan("llama3-8b", **{**ASKED, "seq": 4098}, top=10_000)
    assert {(one.tp, one.cp) for one in result.plans} == {(1, 1), (2, 1)}


@pytest.mark.parametrize(
    ("model", "nodes", "sequence", "fix", "leanest"),
    [
        ("deepseek-v3", 4, 4096, None, "tp 4, pp 1, dp 2, cp 4, ep 32, zero 3,"),
        (
            "llama3-8b",
            1,
            32768,
            "tp=1,cp=8,zero=1,recompute=none",
            "tp 1, pp 1, dp 1, cp 8, zero 1,",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_named_with_all_of_its_degrees(
    model: str, nodes: int, sequence: int, fix: str | None, leanest: str
) -> None:
    job: dict[str, Any] = {"cluster": "dgx-h100", "nodes": nodes, "seq": sequence}
    with pytest.raises(UsageError, match="of the leanest") as refused:
        fw.plan(model, **job, global_batch=128 if nodes == 4 else 8, fix=fix)
    assert f"of the leanest ({leanest}" in str(refused.value)


@pytest.mark.parametrize(("experts", "is_told"), [(1, False), (8, True), (16, False)])
def test_an_answer_tells_that_messages_to_experts_of_a_node_take_less_than_their_rows(
    experts: int, is_told: bool
) -> None:
    job: dict[str, Any] = {"cluster": "dgx-h100", "nodes": 4, "seq": 4096, "global_batch": 128}
    fixed = f"tp=1,pp=1,dp=32,ep={experts},zero=3,microbatch=1"
    result = fw.plan("qwen3-30b-a3b", **job, fix=fixed, top=1)
    told = [one.share for one in result.assumed if isinstance(one, LessToExperts)]
    assert told == ([pytest.approx(0.53, abs=0.005)] if is_told else [])


def test_plans_on_links_of_a_least_rate_reach_down_to_the_fastest_known() -> None:
    machine = fw.cluster("dgx-a100")
    assert machine.inside is not None
    asked: dict[str, Any] = {"nodes": 2, "global_batch": 64, "seq": 4096, "fix": "tp=8"}
    slow, least, fastest = (
        fw.plan(
            "llama3-8b",
            cluster=replace(
                machine,
                inside=replace(machine.inside, rate_bps=rate_bps, rate_is_least=is_least),
            ),
            **asked,
        )
        for rate_bps, is_least in ((20e9, False), (20e9, True), (7.2e12, False))
    )
    assert least.plans[0].step_s == slow.plans[0].step_s
    assert least.plans[0].interval.low_s == pytest.approx(fastest.plans[0].interval.low_s)
    assert least.plans[0].interval.high_s == slow.plans[0].interval.high_s
    told = [
        any(isinstance(each, RestsOnLeastRate) for each in answer.assumed)
        for answer in (slow, least)
    ]
    assert told == [False, True]


def test_plans_on_nics_that_no_table_tells_hold_slow_and_fast_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = fw.cluster("dgx-a100", 2)
    shown = (Shown(op="allreduce", workers=8, bytes=(2**20,), times=(1.0,)),)
    measured = Measured(
        protocols=USUAL_PROTOCOLS,
        tree_share=0.9,
        pair_share=0.7,
        spread=0.1,
        source="a test",
        shown=shown,
    )
    asked: dict[str, Any] = {"global_batch": 64, "seq": 4096, "fix": "tp=8"}
    known, made = (
        fw.plan(
            "llama3-8b",
            cluster=replace(
                machine, measured=measured, nics=replace(machine.nics, of_tables=of_tables)
            ),
            **asked,
        )
        for of_tables in (False, True)
    )
    assert made.plans[0].step_s == known.plans[0].step_s
    assert made.plans[0].interval.low_s < known.plans[0].interval.low_s
    assert made.plans[0].interval.high_s > 2 * known.plans[0].interval.high_s
    told = [
        any(isinstance(each, NicsAreUnknown) for each in answer.assumed) for answer in (known, made)
    ]
    assert told == [False, True]
    print_plan(made)
    text = capsys.readouterr().out.replace("\n  ", " ")
    assert "or fit these with --cluster FILE that states nics.rate.\n" in text
    assert "Assumed: the rate of the NICs is a guess" in text
    far = replace(known.plans[0], step_s=7.711, interval=Range(low_s=6.31, high_s=1412.3))
    print_plan(replace(known, plans=(far,)))
    assert "7.71 s (6.31-1,410)" in capsys.readouterr().out
