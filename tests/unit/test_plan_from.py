"""`plan --from`: the plan of a traced job is recognised, and other plans are worked out from it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.answers.planned import PlanAnswer
from fullwire.clusters.cluster import Cluster, Inside, Nics
from fullwire.clusters.description import as_toml
from fullwire.errors import DamagedInput, FullwireError, UsageError
from fullwire.findings.finding import Finding
from fullwire.findings.notes import EmulationSendsGradientsOnly
from fullwire.findings.plans import (
    DataParallelFills,
    DevicesLeftOut,
    NotInRecording,
    OnHalfTheBandwidth,
    OpenTensorParallelism,
    OptimizerOnly,
    OtherDevice,
    OtherNodes,
    ProcessorsNotTold,
    ProcessorsShared,
    ProcessorsStay,
    ScatteredRanks,
    SplitByMesh,
    UnlikeGroup,
    UnlikeHosts,
    UsualMlp,
)
from fullwire.importers.kineto import scan, shapes
from fullwire.report.plans import plan_data, print_plan
from fullwire.run.gaps import Gap
from fullwire.run.run import Collectives, Provenance, Run
from fullwire.simulation import recorded_plan
from fullwire.simulation.recognised_plan import Recognised, recognised
from fullwire.words import sentence
from fullwire.workloads.architecture import Architecture
from tests.strategies import cases
from tests.traced_plans import BATCH, FFN, HEADS, HIDDEN, LAYERS, SEQUENCE, VOCAB, Speeds, traced

PLANS = [
    dict(zip(("tp", "pp", "dp"), degrees, strict=True))
    for degrees in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2))
]


@pytest.fixture(scope="module")
def steps(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, dict[str, int], float]]:
    place = tmp_path_factory.mktemp("traces")
    found = {}
    for degrees in PLANS:
        name = " ".join(f"{kind} {ways}" for kind, ways in degrees.items())
        tp, pp, dp = degrees.values()
        step_s = traced(place / name, tp=tp, pp=pp, dp=dp)
        found[name] = (place / name, degrees, step_s)
    return found


def test_the_plan_and_the_model_are_recognised(
    steps: dict[str, tuple[Path, dict[str, int], float]],
) -> None:
    for path, degrees, step_s in steps.values():
        found = fw.plan(recorded=path, to=degrees).recorded
        assert found is not None
        assert {name: getattr(found, name) for name in degrees} == degrees
        in_capitals = {name.upper(): ways for name, ways in degrees.items()}
        assert fw.plan(recorded=path, to=in_capitals).recorded == found
        sizes = (found.layers, found.hidden, found.heads, found.kv_heads, found.ffn, found.vocab)
        assert sizes == (LAYERS, HIDDEN, HEADS, HEADS, FFN, VOCAB)
        assert (found.global_batch, found.sequence, found.microbatch) == (BATCH, SEQUENCE, 1)
        assert found.precision == "fp32"
        assert found.step_s == pytest.approx(step_s, rel=0.01)
        assert found.not_recognised == ()


def test_the_recorded_plan_gets_its_own_time(
    steps: dict[str, tuple[Path, dict[str, int], float]],
) -> None:
    for path, degrees, step_s in steps.values():
        assert fw.plan(recorded=path, to=degrees).best.step_s == pytest.approx(step_s, rel=0.01)


def test_another_plan_is_predicted_within_a_tenth(
    steps: dict[str, tuple[Path, dict[str, int], float]],
) -> None:
    errors = []
    for path, recorded, _ in steps.values():
        for _, degrees, step_s in steps.values():
            if degrees != recorded:
                found = fw.plan(recorded=path, to=degrees)
                errors.append(abs(found.best.step_s / step_s - 1))
    assert sorted(errors)[len(errors) // 2] < 0.04
    assert max(errors) < 0.10


def test_a_trace_without_shapes_and_a_plan_without_a_run_are_refused(
    steps: dict[str, tuple[Path, dict[str, int], float]],
) -> None:
    with pytest.raises(UsageError, match=r"record_shapes=True.*got 'tests"):
        fw.plan(recorded="tests/data/inputs/kineto-cpu", to="tp=2")
    recording = replace(
        fw.read("tests/data/inputs/kineto-cpu"),
        provenance=Provenance(origin="measured", source="torchrun job.py"),
    )
    without = r"record_shapes.*got a recording of `fullwire record` without shapes$"
    with pytest.raises(UsageError, match=without):
        fw.plan(recorded=recording, to="tp=2")
    with pytest.raises(UsageError, match="to: expected a recorded run"):
        fw.plan("llama3-8b", cluster="dgx-h100", global_batch=64, to="tp=2")
    with pytest.raises(UsageError, match="cluster: expected one"):
        fw.plan("llama3-8b", global_batch=64)
    [path, *_] = next(iter(steps.values()))
    with pytest.raises(UsageError, match="tp: expected a divisor of 8 heads, got 3"):
        fw.plan(recorded=path, to="tp=3")
    whole = steps["tp 2 pp 2 dp 1"][0]  # nobody shares with a rank
    with pytest.raises(UsageError, match=r"zero: expected a degree .* got 3\. The nearest is 0"):
        fw.plan(recorded=whole, to="zero=3")
    with pytest.raises(UsageError, match="fix: expected tp=2 as in --to, got tp=1"):
        fw.plan(recorded=path, to="tp=2", fix="tp=1")


def test_a_written_run_tells_the_same_as_its_traces(
    steps: dict[str, tuple[Path, dict[str, int], float]], tmp_path: Path
) -> None:
    path = steps["tp 2 pp 2 dp 1"][0]
    whole = fw.write(path, tmp_path / "job.run")
    other = {"tp": 1, "pp": 2, "dp": 2}
    written, read = (fw.plan(recorded=given, to=other) for given in (whole, path))
    assert written.best.step_s == read.best.step_s


def test_the_terminal_shows_what_was_recognised(
    steps: dict[str, tuple[Path, dict[str, int], float]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = fw.plan(recorded=steps["tp 2 pp 2 dp 1"][0], to="tp=1,pp=2")
    print_plan(found)
    printed = capsys.readouterr().out
    assert "\nmatrix products " in printed  # to the left, as texts of all tables
    assert "\n\n\n" not in printed
    assert "\nFits: TP 1, PP 2, DP 2, " in printed  # nobody asked about other plans
    assert "more are slower" not in printed
    said = " ".join(printed.split())
    assert "TP 2, PP 2, DP 1, microbatch 1, global batch 8 of 128 tokens, fp32" in said
    assert "4 layers of 512, 8 heads" in said
    assert "matrix products" in said
    assert re.search(r" · [1-9][0-9]* MiB ", said)
    assert " 0 GiB" not in said
    assert plan_data(found)["recorded"]["ratios"][0]["work"] == "matrix products"


def test_nodes_that_nobody_described_are_told_and_odd_ones_are_taken_as_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six ranks on two hosts of three, as one node, and with the hosts described."""
    step_s = traced(tmp_path / "job", tp=2, dp=3)
    alone = fw.plan(recorded=tmp_path / "job", to="tp=2,dp=3")
    print_plan(alone)
    said = " ".join(capsys.readouterr().out.split())
    told = "its 6 devices are one node with equal links"
    assert told in said
    assert told in " ".join(plan_data(alone)["assumed"])
    odd = Cluster(
        name="odd",
        nodes=2,
        devices_per_node=3,
        inside=Inside(kind="switch", rate_bps=8e10),
        nics=Nics(rate_bps=8e9),
    )
    described = fw.plan(recorded=tmp_path / "job", cluster=odd, to="tp=2,dp=3")
    assert described.described is not None
    assert (described.described.nodes, described.described.devices_per_node) == (2, 3)
    assert described.best.step_s == pytest.approx(step_s, rel=0.01)
    assert told not in " ".join(plan_data(described)["assumed"])


NODES = Cluster(
    name="nodes of 8",
    nodes=4,
    devices_per_node=8,
    inside=Inside(kind="switch", rate_bps=8e11),
    nics=Nics(rate_bps=8e9, per_node=8),
)


def on_hosts(job: Run, hosts: str, cluster: Cluster | None = None) -> Run:
    """Return the job as one of these hosts, which may be nodes of a described cluster."""
    told = None if cluster is None else as_toml(cluster)
    return replace(job, facts=replace(job.facts, hosts=hosts, cluster=told))


def test_messages_are_priced_between_the_hosts_that_the_run_names(job: Run) -> None:
    """Two ranks on each of two hosts send over NICs, though a node could have all four."""
    step_s = recognised(job).step_s
    here, apart = (
        fw.plan(recorded=on_hosts(job, hosts), cluster=NODES, nodes=2, to="tp=2,dp=8").best
        for hosts in ("a,a,a,a", "a,a,b,b")
    )
    assert here.exposed.dp_s > 3 * apart.exposed.dp_s
    again = fw.plan(recorded=on_hosts(job, "a,a,b,b", NODES), to="tp=2,dp=2")
    assert again.described is not None
    assert (again.described.nodes, again.described.devices_per_node) == (2, 2)
    assert again.best.step_s == pytest.approx(step_s, rel=0.01)
    assert DevicesLeftOut(used=2, whole=8, is_chosen=False) in again.assumed


def test_hosts_that_contradict_the_nodes_are_told_or_refused(job: Run) -> None:
    small = replace(NODES, devices_per_node=2, nics=replace(NODES.nics, per_node=2))
    elsewhere = fw.plan(recorded=on_hosts(job, "a,a,a,a"), cluster=small, nodes=2, to="tp=2,dp=2")
    assert OtherNodes(cluster=small.name, ranks=4, devices=2) in elsewhere.assumed
    both = fw.plan(recorded=on_hosts(job, "a,a,a,a"), cluster=[small, NODES], nodes=2, to="tp=2")
    assert not any(isinstance(note, OtherNodes) for note in both.assumed)
    with pytest.raises(UsageError, match=r"from: expected nodes of at least 4 devices.*got 2"):
        fw.plan(recorded=on_hosts(job, "a,a,a,a", small), to="tp=2,dp=2")
    for hosts, note in {
        "a,a,a,b": UnlikeHosts(least=1, most=3),
        "a,b,a,b": ScatteredRanks(),
    }.items():
        assert note in fw.plan(recorded=on_hosts(job, hosts), cluster=NODES, nodes=1).assumed
    even = fw.plan(recorded=on_hosts(job, "a,a,b,b"), cluster=NODES, nodes=1).assumed
    assert not any(isinstance(note, UnlikeHosts | ScatteredRanks) for note in even)


def test_idle_devices_of_the_recorded_cluster_are_told_and_paid_for(job: Run) -> None:
    odd = replace(NODES, devices_per_node=3, nics=Nics(rate_bps=8e9))
    for to, nodes, used in (("tp=2,dp=4", 4, 2), ("tp=2,dp=2", 2, 2), ("tp=2,dp=1", 1, 2)):
        answer = fw.plan(recorded=on_hosts(job, "a,a,a,b", odd), to=to)
        assert answer.described is not None
        assert (answer.described.nodes, answer.described.devices_per_node) == (nodes, used)
        assert [note.whole for note in answer.assumed if isinstance(note, DevicesLeftOut)] == [3]
        hours = nodes * 3 * answer.best.step_s / 3600 / (BATCH * SEQUENCE) * 1e6
        assert answer.best.device_hours == pytest.approx(hours)
    part = fw.plan(
        recorded=replace(job, facts=replace(job.facts, cluster=as_toml(NODES))), to="tp=2"
    )
    assert part.described is not None
    assert (part.described.nodes, part.described.devices_per_node) == (1, 4)


def test_what_a_trace_leaves_open_is_told_in_the_terminal_and_in_json(
    steps: dict[str, tuple[Path, dict[str, int], float]], capsys: pytest.CaptureFixture[str]
) -> None:
    from fullwire.report.plans import plan_data, print_plan

    run = fw.read(steps["tp 2 pp 2 dp 1"][0])
    unlike = replace(run, facts=replace(run.facts, groups="tp 2, pp 2, dp 3"))
    found = fw.plan(recorded=unlike, to="tp=1,pp=2")
    assert found.recorded is not None
    assert found.recorded.not_recognised == (UnlikeGroup(ranks=3),)
    found = replace(found, recorded=replace(found.recorded, not_recognised=(UsualMlp(),)))
    told = "the MLP, which is taken for one of four times the hidden vector"
    assert plan_data(found)["recorded"]["not_recognised"] == [told]
    print_plan(found)
    assert f"Not recognised: {told}." in " ".join(capsys.readouterr().out.split())


def test_a_partial_recording_is_told_as_such(
    steps: dict[str, tuple[Path, dict[str, int], float]], capsys: pytest.CaptureFixture[str]
) -> None:
    from fullwire.report.plans import plan_data, print_plan

    run = fw.read(steps["tp 2 pp 2 dp 1"][0])
    found = fw.plan(recorded=replace(run, gaps=(Gap("rank 1 ends early"),)), to="tp=1,pp=2")
    assert plan_data(found)["recorded"]["missing"] == ("rank 1 ends early",)
    print_plan(found)
    assert "\nThe run is partial: rank 1 ends early.\n" in capsys.readouterr().out


def test_plain_attention_and_groups_without_names_are_recognised(tmp_path: Path) -> None:
    for degrees in ((2, 1, 2), (1, 2, 2), (2, 2, 1)):
        tp, pp, dp = degrees
        path = tmp_path / f"{tp}{pp}{dp}"
        traced(path, tp=tp, pp=pp, dp=dp, is_plain=True)
        found = fw.plan(recorded=path, to={"tp": tp, "pp": pp, "dp": dp}).recorded
        assert found is not None
        assert (found.tp, found.pp, found.dp, found.microbatch) == (tp, pp, dp, 1)
        assert (found.layers, found.heads, found.ffn, found.vocab) == (LAYERS, HEADS, FFN, VOCAB)
        assert found.global_batch == BATCH


def test_an_operation_that_waits_for_a_sum_is_not_taken_for_computing(tmp_path: Path) -> None:
    step_s = [traced(tmp_path / str(tp), tp=tp, dp=4 // tp, is_plain=True) for tp in (2, 1)]
    found = fw.plan(recorded=tmp_path / "2", to={"tp": 1, "dp": 4})
    assert found.best.step_s == pytest.approx(step_s[1], rel=0.1)


def test_tensor_parallelism_by_hand_splits_nothing(tmp_path: Path) -> None:
    """A mesh splits tensors on the host. Groups without names are those of a job by hand."""
    step_s = [traced(tmp_path / str(tp), tp=tp, dp=4 // tp, is_plain=True) for tp in (1, 2)]
    found = fw.plan(recorded=tmp_path / "1", to={"tp": 2, "dp": 2})
    assert found.best.step_s == pytest.approx(step_s[1], rel=0.1)
    assert not any(isinstance(note, SplitByMesh) for note in found.assumed)


def test_a_mesh_that_has_no_tensor_parallelism_yet_will_split_tensors(
    steps: dict[str, tuple[Path, dict[str, int], float]],
) -> None:
    found = fw.plan(recorded=steps["tp 1 pp 1 dp 2"][0], to={"tp": 2, "dp": 1})
    assert any(isinstance(note, SplitByMesh) for note in found.assumed)


def test_operations_that_are_cut_between_chunks_are_whole(
    steps: dict[str, tuple[Path, dict[str, int], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = steps["tp 2 pp 2 dp 1"][0] / "rank0.json"
    whole = scan.scanned(path).shaped
    monkeypatch.setattr(shapes, "_BLOCK_BYTES", 2000)
    monkeypatch.setattr(scan, "_PACKED_BYTES", 701)  # what is read of a plain file at once
    assert scan.scanned(path).shaped == whole


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            OnHalfTheBandwidth(step_s=1.234, slower=0.012, is_slower=False, plan=""),
            "With half the bandwidth between nodes: 1.23 s (+1%). The network is not your problem.",
        ),
        (
            OnHalfTheBandwidth(step_s=2.5, slower=0.25, is_slower=True, plan="TP 2, PP 4"),
            "With half the bandwidth between nodes: 2.5 s (+25%), with TP 2, PP 4. "
            "The network counts.",
        ),
        (
            EmulationSendsGradientsOnly(count=1, kinds=("broadcast",)),
            "1 other collective of each recorded step (broadcast) is left out: emulated "
            "accelerators send gradients only",
        ),
        (
            EmulationSendsGradientsOnly(count=2, kinds=("allgather", "broadcast")),
            "2 other collectives of each recorded step (allgather, broadcast) are left out: "
            "emulated accelerators send gradients only",
        ),
    ],
)
def test_findings_that_count_are_told_in_the_right_number(found: Finding, said: str) -> None:
    assert sentence(found) == said


@pytest.fixture(scope="module")
def job(steps: dict[str, tuple[Path, dict[str, int], float]]) -> Run:
    return fw.read(steps["tp 2 pp 1 dp 2"][0])


def test_stages_take_zero_1_where_the_recorded_job_shards_its_parameters(
    job: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharding(monkeypatch)
    staged = fw.plan(recorded=job, to="tp=1,pp=2,dp=2")
    assert {one.zero for one in staged.plans} == {1}
    assert OptimizerOnly(zero=3) in staged.assumed
    for asked in ("tp=1,pp=2,dp=2,zero=3", "tp=1,pp=1,dp=4"):
        as_asked = fw.plan(recorded=job, to=asked)
        assert {one.zero for one in as_asked.plans} == {3}
        assert OptimizerOnly(zero=3) not in as_asked.assumed


def test_sums_of_the_other_kind_of_sharding_are_not_in_the_recording(
    job: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def width(answer: PlanAnswer) -> float:
        return answer.best.interval.high_s / answer.best.interval.low_s

    whole = fw.plan(recorded=job, to="tp=1,dp=4,zero=0")
    sharding(monkeypatch)
    same = fw.plan(recorded=job, to="tp=1,dp=4,zero=3")
    other = fw.plan(recorded=job, to="tp=1,dp=4,zero=0")
    alone = fw.plan(recorded=job, to="tp=4,dp=1")
    unseen = NotInRecording(messages="sums of gradients without ZeRO-3")
    assert unseen in other.assumed
    assert not {unseen} & {*whole.assumed, *same.assumed, *alone.assumed}
    assert width(other) > 1.2 * max(width(whole), width(same))


def with_a_late_rank(place: Path, late_us: float) -> Path:
    """Let rank 1 come to the first sum of each step so much later, where rank 0 waits for it."""
    for rank in (0, 1):
        file = place / f"rank{rank}.json"
        told = json.loads(file.read_text())
        events = [event for event in told["traceEvents"] if "ts" in event]
        began_us = [each["ts"] for each in events if each["name"].startswith("ProfilerStep")]
        sums_us = [each["ts"] for each in events if each["name"].startswith("gloo:")]
        first_us = [min(time for time in sums_us if time >= begin) for begin in began_us]
        for event in events:
            is_first = event["ts"] in first_us and event["name"].startswith("gloo:")
            if event["name"].startswith("ProfilerStep") or (is_first and rank == 0):
                event["dur"] += late_us
            times_late = sum(event["ts"] > time for time in first_us)
            event["ts"] += (times_late + (is_first and rank == 1)) * late_us
        file.write_text(json.dumps(told))
    return place


def test_a_rank_that_is_late_for_sums_is_late_for_shards_too(tmp_path: Path) -> None:
    """Waiting for it is no message, so it does not make shards quicker than whole sums."""
    late_s = 0.6
    step_s = traced(tmp_path / "even", dp=2)
    traced(tmp_path / "late", dp=2)
    late = with_a_late_rank(tmp_path / "late", late_s * 1e6)
    even_s = fw.plan(recorded=tmp_path / "even", to="zero=3").best.step_s
    whole_s, scattered_s, sharded_s = (
        fw.plan(recorded=late, to=f"zero={zero}").best.step_s for zero in (0, 2, 3)
    )
    even_scattered_s = fw.plan(recorded=tmp_path / "even", to="zero=2").best.step_s
    assert scattered_s == pytest.approx(even_scattered_s + late_s, rel=0.03)
    assert whole_s == pytest.approx(step_s + late_s, rel=0.01)
    assert sharded_s == pytest.approx(even_s + late_s, rel=0.03)


def test_a_recorded_microbatch_of_three_is_kept(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sharding(monkeypatch, microbatch=3, global_batch=12)
    assert fw.plan(recorded=job, to="tp=1,pp=2,dp=2").best.microbatch == 3


def sharding(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Make the recorded job one that shards its parameters."""

    def changed(run: Run, model: Architecture | None) -> Recognised:
        found = recognised(run, model)
        return replace(found, layout=replace(found.layout, zero=3, **more))

    monkeypatch.setattr("fullwire.answers.plan.recognised", changed)


def on_gpu(job: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return the recorded job as one of a GPU, whose work takes a thousandth of the time."""

    def changed(run: Run, model: Architecture | None) -> Recognised:
        found = recognised(run, model)
        quick = {kind: busy_s * 1e-3 for kind, busy_s in found.busy_s.items()}
        return replace(found, busy_s=quick, step_s=1e-3 * found.step_s)

    monkeypatch.setattr("fullwire.answers.plan.recognised", changed)
    return replace(job, facts=replace(job.facts, device=name))


def test_the_device_of_the_cluster_replaces_the_recorded_one(
    job: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = on_gpu(job, "NVIDIA A100-SXM4-80GB", monkeypatch)
    there = {name: fw.plan(recorded=run, cluster=name, nodes=1, to="tp=2,dp=4") for name in BOTH}
    old, new = (there[name] for name in BOTH)
    assert (old.device, new.device) == ("NVIDIA A100", "NVIDIA H100")
    note = OtherDevice(recorded="NVIDIA A100", device="NVIDIA H100", is_network_told=False)
    assert note in new.assumed
    assert not any(isinstance(note, OtherDevice) for note in old.assumed)
    assert new.best.compute_s < old.best.compute_s
    wide, narrow = new.best.interval, old.best.interval
    assert wide.high_s / wide.low_s > narrow.high_s / narrow.low_s
    named = fw.plan(recorded=run, cluster="dgx-a100", nodes=1, device="h100", to="tp=2,dp=4")
    assert named.device == "NVIDIA H100"
    both = fw.plan(recorded=run, cluster=",".join(BOTH), nodes=1, to="tp=2,dp=4").networks
    assert [one.device for one in both] == ["NVIDIA A100", "NVIDIA H100"]


BOTH = ("dgx-a100", "dgx-h100")


def test_a_trace_of_an_unknown_device_takes_the_named_one(
    job: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = on_gpu(job, "Frobnicator 3000", monkeypatch)
    with pytest.raises(UsageError, match="expected a trace of a known device, or --device with"):
        fw.plan(recorded=run, to="tp=2,dp=2")
    named = fw.plan(recorded=run, device="a100", to="tp=2,dp=2")
    assert named.device == "NVIDIA A100"
    assert named.best.step_s == pytest.approx(1e-3 * recognised(job).step_s, rel=0.01)


def test_a_trace_of_processors_does_not_tell_the_work_of_a_gpu(
    job: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="device: expected the device of the trace, got h100"):
        fw.plan(recorded=job, device="h100", to="tp=2,dp=2")
    stays = fw.plan(recorded=job, cluster="dgx-h100", nodes=1, to="tp=2,dp=4")
    assert stays.device == "the recorded processors"
    assert stays.best.model_flops_utilization is None
    print_plan(stays)
    assert "of peak" not in capsys.readouterr().out
    assert ProcessorsStay(device="NVIDIA H100") in stays.assumed


ODD = st.sampled_from(
    ["", ":", "x", "0", "0x0", "4x0x4x4 4x4x4x4", "2x", "\u0663x2", "9" * 5000, "tp"]
)


@cases(40)
@given(
    shapes=st.dictionaries(st.integers(0, 10_000), ODD),
    groups=st.lists(
        st.sampled_from(["tp", "dp", "pp", "cp"]).flatmap(
            lambda kind: ODD.map(lambda size: f"{kind} {size}")
        )
    ),
)
def test_shapes_and_groups_are_free_text(
    job: Run, shapes: dict[int, str], groups: list[str]
) -> None:
    texts = job.operations.shapes.copy()
    for row, text in shapes.items():
        texts[texts == texts[row % len(texts)]] = text
    odd = replace(
        job,
        operations=replace(job.operations, shapes=texts),
        facts=replace(job.facts, groups=", ".join(groups) or job.facts.groups),
    )
    with contextlib.suppress(FullwireError), np.errstate(all="raise"):
        assert fw.plan(recorded=odd, to={"tp": 2}).best.step_s > 0


def test_ranks_on_this_machine_share_its_processors(
    job: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks on two processors: eight of them take twice as long, and two half as long."""
    here = replace(job, facts=replace(job.facts, hosts=",".join([platform.node()] * 4)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for to, factor in {"tp=2,dp=1": 0.5, "tp=2,dp=2": 1.0, "tp=2,dp=4": 2.0}.items():
        apart, shared = (fw.plan(recorded=run, to=to) for run in (job, here))
        assert shared.best.step_s == pytest.approx(factor * apart.best.step_s, rel=1e-6)
        assert ProcessorsShared(processors=2) in shared.assumed
        assert not any(isinstance(note, ProcessorsNotTold) for note in shared.assumed)
    # While a stage waits for another one, other ranks compute.
    apart, shared = (fw.plan(recorded=run, to="tp=1,pp=2,dp=2") for run in (job, here))
    best = apart.best
    less_s = (best.slowest_computing - 1) * best.compute_s  # of the mean stage than of the slowest
    waits = (best.bubble_s - less_s + best.exposed.pp_s) / best.step_s
    assert shared.best.step_s == pytest.approx((1 - waits) * apart.best.step_s, rel=1e-6)
    elsewhere = fw.plan(recorded=here, cluster="dgx-h100", nodes=1, to="tp=2,dp=4")
    assert not any(isinstance(note, ProcessorsShared) for note in elsewhere.assumed)
    half = replace(job, facts=replace(job.facts, hosts=",".join([platform.node()] * 2)))
    open_ = fw.plan(recorded=half, to="tp=2,dp=4").assumed  # two ranks have no trace
    assert not any(isinstance(note, ProcessorsShared) for note in open_)


def test_a_job_that_gathers_its_metrics_shards_nothing(
    steps: dict[str, tuple[Path, dict[str, int], float]],
) -> None:
    run = fw.read(steps["tp 1 pp 1 dp 2"][0])
    table = run.collectives
    gathers = replace(table, op=np.full(len(table), "allgather", object))
    metrics = replace(gathers, bytes=np.full(len(table), 4096))
    for more, zero in ((gathers, 3), (metrics, 0)):
        told = replace(run, collectives=Collectives.joined([table, more]))
        assert recognised(told).layout.zero == zero


def test_sums_of_each_microbatch_are_those_of_the_recorded_kind(
    steps: dict[str, tuple[Path, dict[str, int], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO-3 adds gradients up for each microbatch anyway, so its price does not change."""
    job = steps["tp 1 pp 1 dp 2"][0]
    once = fw.plan(recorded=job, to="dp=2,zero=3").best
    monkeypatch.setattr(recorded_plan, "_sums_each_microbatch", lambda _: True)
    each = fw.plan(recorded=job, to="dp=2,zero=3").best
    assert each.exposed.dp_s < 2 * once.exposed.dp_s


def test_degrees_that_are_left_out_stay_as_recorded(
    steps: dict[str, tuple[Path, dict[str, int], float]],
) -> None:
    """Ranks that share the data take the rest of the devices; if none is left, there are more."""
    job = steps["tp 2 pp 2 dp 1"][0]
    for to, (tp, pp, dp) in {
        "pp=1": (2, 1, 2),
        "tp=1": (1, 2, 2),
        "dp=2": (2, 2, 2),
        "tp=4": (4, 2, 1),
        "microbatch=1": (2, 2, 1),
    }.items():
        answer = fw.plan(recorded=job, to=to)
        assert {(each.tp, each.pp, each.dp) for each in answer.plans} == {(tp, pp, dp)}, to
        told = [note for note in answer.assumed if isinstance(note, DataParallelFills)]
        assert [note.dp for note in told] == ([2] if to in ("pp=1", "tp=1") else []), to


def test_a_job_of_three_ranks_is_asked_about_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks are no node of which a part is left out: each of them is used."""
    monkeypatch.setattr("tests.traced_plans.LAYERS", 6)
    step_s = traced(tmp_path / "three", tp=1, pp=3, dp=1)
    again = fw.plan(recorded=tmp_path / "three", to="pp=3").best
    assert (again.pp, again.devices) == (3, 3)
    assert again.step_s == pytest.approx(step_s, rel=0.01)
    assert fw.plan(recorded=tmp_path / "three", to="pp=6").best.devices == 6
    anything = fw.plan(recorded=tmp_path / "three", global_batch=6, top=400)
    assert {one.devices for one in anything.plans} == {3}
    assert (1, 3, 1) in {(one.tp, one.pp, one.dp) for one in anything.plans}


def test_sums_of_activations_tell_tensor_parallelism_where_heads_are_wide_or_few(
    tmp_path: Path,
) -> None:
    """Heads times their width need not be the hidden vector's width."""
    for heads, degrees in (
        (16, (2, 1)),
        (16, (1, 2)),
        (4, (1, 2)),
        (4, (2, 1)),
        (8, (4, 1)),
        (8, (4, 2)),
    ):
        for is_plain in (False, True):
            tp, dp = degrees
            place = tmp_path / f"{heads} {tp} {dp} {is_plain}"
            traced(place, tp=tp, dp=dp, heads=heads, is_plain=is_plain)
            found = recognised(fw.read(place))
            assert (found.layout.tp, found.layout.dp, found.model.heads) == (tp, dp, heads)
            assert (found.model.ffn, found.layout.global_batch) == (FFN, BATCH)
            assert bool(found.messages["tp"]) == (tp > 1)
            assert bool(found.messages["dp"]) == (dp > 1)


def without_names(run: Run) -> Run:
    """Return a run whose groups nobody describes."""
    return replace(run, facts=replace(run.facts, groups=None, group_names=None))


def without_losses(run: Run) -> Run:
    """Return a run whose loss is no operation of its own."""
    return replace(run, operations=run.operations.rows(run.operations.name != LOSS))


LOSS = "aten::nll_loss_forward"


@pytest.mark.parametrize(
    ("heads", "tp", "dp", "other"), [(16, 4, 2, 2), (16, 4, 4, 2), (4, 2, 4, 4), (4, 4, 4, 8)]
)
def test_the_vocabulary_of_a_rank_tells_tensor_parallelism_or_its_degree_is_open(
    tmp_path: Path, heads: int, tp: int, dp: int, other: int
) -> None:
    """All heads together are twice as wide as the hidden vector, or half."""
    traced(tmp_path / "job", tp=tp, dp=dp, heads=heads, is_plain=True)
    run = without_names(fw.read(tmp_path / "job"))
    found = recognised(run)
    assert (found.layout.tp, found.layout.dp, found.other_tp) == (tp, dp, ())
    found = recognised(without_losses(run))
    assert found.layout.tp == other
    assert tp in found.other_tp
    told = fw.plan(recorded=without_losses(run), to={"tp": 1, "dp": 1}).recorded
    assert told is not None
    assert OpenTensorParallelism(tp=other, others=found.other_tp) in told.not_recognised
    model = replace(found.model, heads=heads, kv_heads=heads)
    assert recognised(without_losses(run), model).layout.tp == tp


def test_a_degree_that_neither_sums_nor_heads_tell_is_refused_or_the_models(tmp_path: Path) -> None:
    """Of 8 ranks that sum activations, and gradients besides, 2 or 4 share a layer."""
    traced(tmp_path / "job", tp=4, dp=2, heads=32, is_plain=True)
    run = fw.read(tmp_path / "job")
    with pytest.raises(UsageError, match=r"description of the group of tensor parallelism.*of 8 "):
        recognised(run)
    traced(tmp_path / "narrow", tp=2, dp=2, heads=4)
    narrow = fw.read(tmp_path / "narrow")
    assert recognised(narrow).layout.tp == 2
    hidden_groups = without_names(narrow)
    assert recognised(hidden_groups).layout.tp == 2  # the loss has twice as many words as the head
    hidden_groups = without_losses(hidden_groups)
    with pytest.raises(UsageError, match=r"description of the group of tensor parallelism.*of 4 "):
        recognised(hidden_groups)  # gradients of 128 rows may be what 128 tokens sum
    traced(tmp_path / "stages", pp=2, heads=4)
    assert recognised(fw.read(tmp_path / "stages")).layout.pp == 2
    traced(tmp_path / "usual", dp=2, heads=32)
    model = recognised(fw.read(tmp_path / "usual")).model
    assert (model.heads, model.head_dim) == (32, HIDDEN // HEADS)
    assert recognised(run, model).layout.tp == 4
    traced(tmp_path / "two", tp=2, heads=32)
    two = fw.read(tmp_path / "two")
    assert recognised(two, model).layout.tp == 2
    with pytest.raises(UsageError, match="model: expected the trace's, with 32 heads"):
        recognised(two, replace(model, heads=16, kv_heads=16))


@pytest.mark.parametrize(
    ("is_plain", "told", "damaged"),
    [
        (False, f"{VOCAB}x{HIDDEN}", f"{VOCAB}x0"),
        (False, f"{VOCAB}x{HIDDEN}", "0x0"),
        (False, f"8x{SEQUENCE}x64", f"0x{SEQUENCE}x64"),
        (True, f"8x{SEQUENCE}x64 8x64x{SEQUENCE}", f"0x{SEQUENCE}x64 0x64x{SEQUENCE}"),
    ],
)
def test_tensors_without_values_are_refused(
    tmp_path: Path, is_plain: bool, told: str, damaged: str
) -> None:
    traced(tmp_path / "job", dp=2, is_plain=is_plain)
    run = fw.read(tmp_path / "job")
    shapes = run.operations.shapes.copy()
    shapes[:] = [text.replace(told, damaged) for text in shapes.tolist()]
    with pytest.raises(UsageError, match=r"expected (an embedding|attention)"):
        recognised(replace(run, operations=replace(run.operations, shapes=shapes)))


def test_products_of_one_tensor_tell_no_keys(tmp_path: Path) -> None:
    traced(tmp_path / "job", dp=2, is_plain=True)
    run = fw.read(tmp_path / "job")
    shapes = run.operations.shapes.copy()
    is_product = run.operations.name == "aten::bmm"
    shapes[is_product] = [text.partition(" ")[0] for text in shapes[is_product].tolist()]
    found = recognised(replace(run, operations=replace(run.operations, shapes=shapes)))
    assert (found.layout.dp, found.layout.cp) == (2, 1)


@pytest.mark.parametrize("is_plain", [False, True])
def test_keys_of_attention_tell_context_parallelism(tmp_path: Path, is_plain: bool) -> None:
    """Ranks gather the keys of all: attention has more keys than queries."""
    cp = 4 if is_plain else 2  # half of the tokens are as many as a head is wide
    traced(tmp_path / "job", cp=cp, is_plain=is_plain)
    found = recognised(fw.read(tmp_path / "job"))
    layout = found.layout
    assert (layout.tp, layout.pp, layout.dp, layout.cp) == (1, 1, 1, cp)
    assert (layout.global_batch, layout.sequence, found.model.heads) == (BATCH, SEQUENCE, HEADS)
    keys_bytes = 4.0 * SEQUENCE * HIDDEN
    assert {(op, size) for op, size, _ in found.messages["cp"]} == {
        ("allgather", keys_bytes),
        ("allreduce", keys_bytes),
    }
    assert len(found.messages["cp"]) == 4 * LAYERS * BATCH * found.steps
    assert {op for op, *_ in found.messages["dp"]} == {"allreduce"}
    each_s = Speeds().message_s + keys_bytes / Speeds().bytes_per_s
    assert found.busy_s["cp"] == pytest.approx(4 * LAYERS * BATCH * each_s, rel=0.05)
    answer = fw.plan(recorded=tmp_path / "job", to={"cp": cp}).recorded
    assert answer is not None
    ratios = {ratio.work for ratio in answer.ratios}
    assert {"context parallelism", "sums of gradients, shown"} <= ratios


@pytest.mark.parametrize(("cp", "is_skipping"), [(2, False), (2, True), (4, True)])
def test_a_ring_of_keys_calls_attention_once_for_each_rank(
    tmp_path: Path, cp: int, is_skipping: bool
) -> None:
    """Each call has the keys of one rank. With a causal mask early queries may skip late keys."""
    traced(tmp_path / "job", cp=cp)
    run = fw.read(tmp_path / "job")
    table, sent = run.operations, run.collectives
    shapes, calls = table.shapes.copy(), table.calls.copy()
    ops, groups = sent.op.copy(), sent.group.copy()
    is_attention = np.array(["attention" in name for name in table.name.tolist()])
    own = f"1x{HEADS}x{SEQUENCE // cp}x{HIDDEN // HEADS}"
    sizes = np.char.count(shapes[is_attention].astype(str), " ") + 1
    shapes[is_attention] = [" ".join([own] * count) for count in sizes.tolist()]
    calls[is_attention] *= (table.rank[is_attention] + 1) if is_skipping else cp
    # Gloo marks a transfer with no group.
    is_sent = sent.bytes == 4 * SEQUENCE * HIDDEN
    is_sent &= np.isin(sent.op, ["allgather", "allreduce"])
    ops[is_sent], groups[is_sent] = "send", ""
    ring = replace(
        run,
        facts=replace(run.facts, groups=f"cp {cp}, default_pg {cp}"),
        operations=replace(table, shapes=shapes, calls=calls),
        collectives=replace(sent, op=ops, group=groups),
    )
    found = recognised(ring)
    model, layout = found.model, found.layout
    assert (layout.pp, layout.cp, layout.context_kind) == (1, cp, "ring")
    assert (model.layers, model.ffn, model.is_gated, layout.sequence) == (
        LAYERS,
        FFN,
        True,
        SEQUENCE,
    )
    assert {op for op, *_ in found.messages["cp"]} == {"send"}
    assert not found.messages["pp"]


def test_context_parallelism_stays_of_its_kind_and_without_messages_is_assumed(
    tmp_path: Path,
) -> None:
    step_s = traced(tmp_path / "job", cp=2)
    run = fw.read(tmp_path / "job")
    same = fw.plan(recorded=run, to="cp=2")
    assert same.best.context_kind == "all-gather"
    assert same.best.step_s == pytest.approx(step_s, rel=0.01)
    assert fw.plan(recorded=run, to="cp=2", fix="context=ring").best.context_kind == "ring"
    lacking = NotInRecording(messages="messages of context parallelism")
    assert lacking not in same.assumed
    table = run.collectives
    silent = replace(run, collectives=table.rows(table.bytes > 4 * SEQUENCE * HIDDEN))
    traced(tmp_path / "plain", dp=2)
    for recorded in (silent, tmp_path / "plain"):
        assert lacking in fw.plan(recorded=recorded, to="cp=2").assumed
    sums = NotInRecording(messages="sums of gradients")
    assert sums not in fw.plan(recorded=run, to="cp=1,dp=2").assumed


def test_a_job_that_exchanges_tokens_has_experts(tmp_path: Path) -> None:
    traced(tmp_path / "job", dp=2, is_exchanging=True)
    with pytest.raises(UsageError, match="a model of dense layers, got one with experts"):
        recognised(fw.read(tmp_path / "job"))


def test_sends_in_each_layer_that_no_group_describes_are_refused(tmp_path: Path) -> None:
    """Keys go around a ring of context parallelism, or a pipeline interleaves its stages."""
    traced(tmp_path / "job", dp=2, is_exchanging=True)
    run = fw.read(tmp_path / "job")
    operations, sent = run.collectives.op.copy(), run.collectives.group.copy()
    is_exchange = operations == "alltoall"
    operations[is_exchange], sent[is_exchange] = "send", ""
    ring = replace(run, collectives=replace(run.collectives, op=operations, group=sent))
    with pytest.raises(UsageError, match=r"sends of rank 0 in a step .*ring of context parallel"):
        recognised(ring)
    # One pass of a pipeline's first stage sends once, however few layers the stage has.
    traced(tmp_path / "stages", pp=LAYERS)
    assert recognised(without_names(fw.read(tmp_path / "stages"))).layout.pp == LAYERS


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_may_send_several_tensors_of_a_microbatch(tmp_path: Path, pp: int) -> None:
    """Two tensors of one size, such as a residual beside the hidden vectors, and small ones."""
    traced(tmp_path / "stages", pp=pp)
    run = without_names(fw.read(tmp_path / "stages"))
    table = run.collectives
    told = {field.name: getattr(table, field.name) for field in fields(table)}
    parts = [told]
    for size_bytes in (None, None, 2048, 4096):
        sent = {**told, "op": np.full_like(table.op, "send")}
        if size_bytes is not None:
            sent["bytes"] = np.full_like(table.bytes, size_bytes)
        parts.append(sent)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in told}
    layout = recognised(replace(run, collectives=Collectives(**columns))).layout
    assert (layout.pp, layout.tp, layout.dp, layout.cp) == (pp, 1, 1, 1)


@pytest.mark.parametrize("pp", [2, 4])
def test_a_part_of_the_ranks_does_not_tell_how_many_stages_send(pp: int, tmp_path: Path) -> None:
    """The first stage alone would be taken for the whole model, of ranks that share the batch."""
    traced(tmp_path / "job", pp=pp)
    run = without_names(fw.read(tmp_path / "job"))
    assert recognised(run).layout.pp == pp
    missing = Gap(f"1 of {pp} ranks are here")
    first = replace(
        run,
        operations=run.operations.rows(run.operations.rank == 0),
        collectives=run.collectives.rows(run.collectives.rank == 0),
        spans=run.spans.rows(run.spans.rank == 0),
    )
    lacking = r"the traces of all ranks, or a description of the pipeline's group \(mesh_pp\)"
    with pytest.raises(UsageError, match=rf"{lacking}, got those of 1 of {pp} ranks"):
        recognised(first)
    with pytest.raises(DamagedInput, match=rf"{lacking}: 1 of {pp} ranks are here"):
        recognised(replace(first, gaps=(missing,)))
    told = replace(first.facts, groups=f"mesh_pp {pp}")
    plan = recognised(replace(first, facts=told))
    assert (plan.layout.pp, plan.layout.dp, plan.model.layers) == (pp, 1, LAYERS)
    assert plan.layout.global_batch == BATCH


def test_ranks_of_several_runs_are_no_plan(tmp_path: Path) -> None:
    """One rank of a job with tensor parallelism lies beside one of a job with stages."""
    traced(tmp_path / "layers", tp=2)
    traced(tmp_path / "stages", pp=2)
    (tmp_path / "stages" / "rank1.json").replace(tmp_path / "layers" / "rank1.json")
    mixed = fw.read(tmp_path / "layers")
    with pytest.raises(
        UsageError, match=r"traces of one run.* 4 heads of 64 on rank 0 and of 8 heads of 64 on"
    ):
        recognised(mixed)
    for path in (tmp_path / "layers").iterdir():  # no group of one rank, so each one has both
        trace = json.loads(path.read_text())
        del trace["distributedInfo"]["pg_config"][1:]
        path.write_text(json.dumps(trace))
    # Per microbatch, each of the layers sums its activations twice in each pass.
    unlike = f"a step of rank 0 has {4 * LAYERS * BATCH} allreduce .*, and one of rank 1 has none"
    with pytest.raises(UsageError, match=rf"traces of one run: ranks 0 and 1 share .* {unlike}"):
        fw.plan(recorded=tmp_path / "layers", to="tp=1,pp=1")


def test_attention_over_more_tokens_than_a_rank_embeds_is_ulysses(tmp_path: Path) -> None:
    traced(tmp_path / "job", dp=2, is_exchanging=True)
    run = fw.read(tmp_path / "job")
    table = run.operations
    shapes = table.shapes.copy()
    embeds = table.name == "aten::embedding"
    shapes[embeds] = f"{VOCAB}x{HIDDEN} 1x{SEQUENCE // 2}"
    with pytest.raises(UsageError, match=r"tokens that a rank embeds.*\(Ulysses\)"):
        recognised(replace(run, operations=replace(table, shapes=shapes)))


def test_a_trace_that_is_cut_before_its_backward_pass_is_told_as_damaged(tmp_path: Path) -> None:
    traced(tmp_path / "cut", tp=1, pp=2, dp=1)
    path = sorted((tmp_path / "cut").iterdir())[0]
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"_for_cpu_backward") - 200])
    with pytest.raises(DamagedInput, match=r"backward pass of attention: .*ends in the middle"):
        fw.plan(recorded=tmp_path / "cut", to="pp=1")


@pytest.mark.parametrize(
    ("first", "lacking"),
    [
        (b"aten::mm", "a trace of whole steps"),
        (b"scaled_dot_product", "attention, as one operation"),
    ],
)
def test_a_trace_that_is_cut_before_a_whole_step_is_told_as_damaged(
    first: bytes, lacking: str, tmp_path: Path
) -> None:
    traced(tmp_path / "cut", tp=1, pp=1, dp=2)
    for path in (tmp_path / "cut").iterdir():
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.index(first) - 200])
    with pytest.raises(DamagedInput, match=rf"expected {lacking}.*ends in the middle"):
        fw.plan(recorded=tmp_path / "cut", to="pp=2")


@pytest.mark.parametrize("share", [0.1, 0.3, 0.45, 0.6, 0.8])
def test_a_step_that_is_cut_in_its_middle_tells_no_layers(share: float, tmp_path: Path) -> None:
    """Each step has half of the trace: the first one, if it is whole, tells the plan."""
    step_s = traced(tmp_path / "cut", dp=2)
    for path in (tmp_path / "cut").iterdir():
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])
    if share < 0.5:
        needed = r"a whole step of each rank: .*A trace needs a whole step .* forward and backward$"
        with pytest.raises(DamagedInput, match=needed):
            fw.plan(recorded=tmp_path / "cut", to="dp=2")
        return
    found = fw.plan(recorded=tmp_path / "cut", to="dp=2").recorded
    assert found is not None
    assert (found.layers, found.global_batch) == (LAYERS, BATCH)
    assert found.step_s == pytest.approx(step_s, rel=0.01)


def test_a_trace_without_a_rank_that_embeds_says_which_ranks_do(tmp_path: Path) -> None:
    traced(tmp_path / "job", pp=2)
    (tmp_path / "job" / "rank0.json").unlink()
    with pytest.raises(DamagedInput, match=r"embedding .* as ranks of the first stage have"):
        fw.plan(recorded=tmp_path / "job", to="pp=1")
