"""`plan --from` traces of GPUs: groups as frameworks describe them, and work that kernels show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import fullwire as fw
from fullwire.errors import UsageError
from fullwire.findings.plans import (
    OnlyKernels,
    OpenRecomputation,
    OpenVocabulary,
    OtherParallelism,
    UsualMlp,
)
from fullwire.report.contents import fact_rows
from fullwire.run.run import Run
from fullwire.simulation.described_groups import degrees_of, kind_of_messages, kinds_of
from fullwire.simulation.recognised_plan import Recognised, recognised
from fullwire.simulation.recorded_plan import calibrated
from fullwire.workloads.accelerators import accelerator
from fullwire.workloads.architecture import Architecture
from tests.device_traces import (
    FFN,
    HEADS,
    HIDDEN,
    LAYERS,
    MICROBATCHES,
    SEQUENCE,
    VOCAB,
    Job,
    device_traced,
    groups_text,
)

MODEL = Architecture(
    name="given",
    layers=LAYERS,
    hidden=HIDDEN,
    heads=HEADS,
    kv_heads=HEADS,
    head_dim=HIDDEN // HEADS,
    ffn=FFN,
    vocab=VOCAB,
    sequence=SEQUENCE,
)
JOBS = {
    "megatron, tp and dp": Job(framework="megatron", tp=2, shard=4),
    "megatron, all": Job(framework="megatron", tp=2, pp=2, cp=2, shard=2),
    "megatron, two instances of the optimizer": Job(framework="megatron", replicate=2, shard=2),
    "torchtitan, fsdp and tp": Job(framework="torchtitan", tp=2, shard=4),
    "torchtitan, hsdp, cp and tp": Job(framework="torchtitan", tp=2, replicate=2, shard=2, cp=2),
    "torchtitan, pp, ring of cp": Job(framework="torchtitan", pp=2, shard=2, cp=2, is_ring=True),
    "unflattened, hsdp and cp": Job(
        framework="torchtitan-unflattened", tp=2, replicate=2, shard=2, cp=2
    ),
}


def run_of(place: Path, job: Job) -> Run:
    device_traced(place / "traces", job)
    return fw.read(place / "traces")


def found_in(place: Path, job: Job, model: Architecture | None = None) -> Recognised:
    return recognised(run_of(place, job), model)


@pytest.mark.parametrize("name", JOBS)
def test_the_degrees_of_frameworks_groups_are_recognised(tmp_path: Path, name: str) -> None:
    job = JOBS[name]
    found = found_in(tmp_path, job)
    layout, model = found.layout, found.model
    dp = job.replicate * job.shard
    assert (layout.tp, layout.pp, layout.dp, layout.cp) == (job.tp, job.pp, dp, job.cp)
    assert (layout.sequence, layout.global_batch) == (SEQUENCE, MICROBATCHES * dp)
    sizes = (model.layers, model.hidden, model.heads, model.ffn, model.vocab)
    assert sizes == (LAYERS, HIDDEN, HEADS, FFN, VOCAB)
    assert (found.unlike_group, found.other_groups, found.only_kernels) == (None, {}, ())


@pytest.mark.parametrize("name", JOBS)
def test_messages_belong_to_the_kind_that_their_group_is_described_with(
    tmp_path: Path, name: str
) -> None:
    job = JOBS[name]
    messages = found_in(tmp_path, job).messages
    ways = {"tp": job.tp, "pp": job.pp, "dp": job.replicate * job.shard, "cp": job.cp}
    assert {kind: bool(messages[kind]) for kind in ways} == {
        kind: ranks > 1 for kind, ranks in ways.items()
    }
    context = "send" if job.is_ring else "allgather"
    assert {op for op, *_ in messages["cp"]} <= {context}
    assert {op for op, *_ in messages["dp"]} <= {"allreduce", "reducescatter", "allgather"}
    assert {op for op, *_ in messages["tp"]} <= {"allreduce"}


def test_transfers_of_context_parallelism_make_no_stages(tmp_path: Path) -> None:
    ring = Job(framework="torchtitan", tp=2, shard=2, cp=2, is_ring=True)
    run = run_of(tmp_path, ring)
    first = replace(run, operations=run.operations.rows(run.operations.rank < 2))
    for one in (run, first):
        assert (recognised(one).layout.pp, recognised(one).layout.cp) == (1, 2)
        assert not recognised(one).messages["pp"]


def test_messages_of_experts_are_no_sums_and_their_parallelism_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path, Job(framework="megatron", tp=2, shard=4, ep=4))
    found = recognised(run)
    assert "alltoall" in set(run.collectives.op.tolist())
    assert all(op != "alltoall" for sent in found.messages.values() for op, *_ in sent)
    answer = fw.plan(recorded=run, to={"tp": 2}).recorded
    assert answer is not None
    assert answer.not_recognised == (OtherParallelism(kind="expert", ranks=4),)


def test_a_written_run_keeps_what_its_groups_are_for(tmp_path: Path) -> None:
    run = run_of(tmp_path, JOBS["torchtitan, pp, ring of cp"])
    written = fw.read(fw.write(run, tmp_path / "job.run"))
    assert recognised(written).messages == recognised(run).messages
    shown = {name: text for name, text, _ in fact_rows(run)}
    # Of pp, dp_shard, dp and cp four groups of two ranks, of dp_shard_cp and dp_cp two of four.
    assert shown["group_names"] == "20 names"


def test_a_name_that_two_ranks_describe_differently_tells_nothing(tmp_path: Path) -> None:
    place = tmp_path / "traces"
    device_traced(place, Job(framework="torchtitan", tp=2, shard=2))
    assert "mesh_tp: " in str(fw.read(place).facts.group_names)
    text = (place / "rank1.json").read_text()
    (place / "rank1.json").write_text(text.replace("mesh_tp", "mesh_other"))
    # Ranks 0 and 1 share a group of tensor parallelism, and describe it differently.
    told = dict(part.split(": ") for part in str(fw.read(place).facts.group_names).split(", "))
    assert len(told["mesh_tp"].split()) == 1
    assert "mesh_other" not in told


@pytest.mark.parametrize(
    ("groups", "degrees", "together"),
    [
        ("TENSOR_AND_DATA_PARALLEL_GROUP 8, TENSOR_MODEL_PARALLEL_GROUP 2", {"tp": 2}, None),
        ("mesh_dp_shard_cp 4, mesh_tp 2", {"tp": 2}, 4),
        ("mesh_dp_replicate 2, mesh_dp_shard 4", {"dp": 8}, None),
        ("mesh_replicate 2, mesh_shard 4", {"dp": 8}, None),
        ("mesh_dp_replicate 2, mesh_dp_shard_cp 4, mesh_cp 2", {"cp": 2}, 8),
        ("mesh_data_parallel 4, mesh_tensor_parallel 2", {"tp": 2, "dp": 4}, None),  # DeepSpeed
        ("mesh_dp_shard_mod_ep 1, mesh_dp_shard_in_ep 4, mesh_dp 4", {"dp": 4}, None),
        ("mesh_efsdp 2, mesh_ep 4, mesh_etp 2", {"ep": 4}, None),
        ("TENSOR_AND_EXPERT_PARALLEL_GROUP 8, DATA_MODULO_EXPERT_PARALLEL_GROUP 2", {}, None),
        ("mesh_infer_tp 4, mesh_tp 2", {"tp": 2}, None),
        ("mesh_sequence_parallel 2", {"sp": 2}, None),
        ("tp 2, default_pg 8, undefined 4, 7 4, mesh_dim_0 2", {"tp": 2}, None),
    ],
)
def test_only_a_description_of_one_kind_tells_its_degree(
    groups: str, degrees: dict[str, int], together: int | None
) -> None:
    told = degrees_of(groups)
    assert (told.of, told.dp_and_cp) == (degrees, together)


def test_megatrons_groups_tell_each_degree_once() -> None:
    told = degrees_of(groups_text(Job(framework="megatron", tp=2, pp=3, cp=4, shard=5, ep=10)))
    assert told.of == {"tp": 2, "pp": 3, "cp": 4, "dp": 5, "ep": 10}
    assert told.dp_and_cp == 20


@pytest.mark.parametrize(
    ("description", "kinds", "messages"),
    [
        ("DATA_PARALLEL_GROUP_WITH_CP", {"dp", "cp"}, "dp"),
        ("MODEL_PARALLEL_GROUP", {"tp", "pp"}, ""),
        ("PIPELINE_MODEL_PARALLEL_GROUP", {"pp"}, "pp"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", {"tp", "dp", "cp"}, ""),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", {"ep", "tp"}, "ep"),
        ("EXPERT_DATA_PARALLEL_GROUP", {"ep", "dp"}, "dp"),
        ("POSITION_EMBEDDING_GROUP", set(), ""),
        ("mesh_loss_mesh", {"dp", "cp"}, "dp"),
        ("stream 3", set(), ""),
    ],
)
def test_a_description_may_name_several_kinds(
    description: str, kinds: set[str], messages: str
) -> None:
    assert kinds_of(description) == frozenset(kinds)
    assert kind_of_messages(description) == messages


def test_the_ranks_of_a_group_without_a_description_tell_tensor_parallelism(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path, Job(framework="megatron", tp=4, shard=2))
    unnamed = replace(run, facts=replace(run.facts, groups=None, group_names=None))
    # Twice as many heads as the hidden vector is wide.
    shapes = unnamed.operations.shapes.copy()
    local = HEADS // 4
    shapes[:] = [
        text.replace(f"1x{local}x", f"1x{2 * local}x") if "_scaled_dot" in name else text
        for name, text in zip(unnamed.operations.name.tolist(), shapes.tolist(), strict=True)
    ]
    wide = replace(unnamed, operations=replace(unnamed.operations, shapes=shapes))
    found = recognised(wide)
    assert (found.layout.tp, found.layout.dp, found.other_tp) == (4, 2, ())
    some = wide.collectives.rank < 4
    assert recognised(replace(wide, collectives=wide.collectives.rows(some))).other_tp == (4,)


def test_a_group_that_does_not_fit_the_degrees_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path, Job(framework="torchtitan", tp=2, shard=4))
    odd = replace(run, facts=replace(run.facts, groups="mesh_tp 2, mesh_dp_shard_cp 3"))
    assert recognised(odd).unlike_group == 3


def test_an_embedding_is_divided_if_the_head_shows_as_many_rows(tmp_path: Path) -> None:
    for framework in ("megatron", "torchtitan"):
        for divides in (True, False):
            place = tmp_path / f"{framework} {divides}"
            place.mkdir()
            found = found_in(place, Job(framework=framework, tp=4, divides_vocabulary=divides))
            assert (found.model.vocab, found.open_vocabulary) == (VOCAB, None)


def test_without_the_head_the_vocabulary_is_open(tmp_path: Path) -> None:
    run = run_of(tmp_path, Job(framework="megatron", tp=2, pp=2))
    first = replace(run, operations=run.operations.rows(run.operations.rank < 2))
    answer = fw.plan(recorded=first, to={"tp": 2, "pp": 2}).recorded
    assert answer is not None
    assert answer.vocab == VOCAB // 2
    assert answer.not_recognised == (OpenVocabulary(rows=VOCAB // 2),)


def test_products_that_are_no_operations_count_by_their_kernels(tmp_path: Path) -> None:
    hidden = Job(framework="megatron", tp=2, shard=2, attention="flash_attn", shows_products=False)
    shown = replace(hidden, shows_products=True)
    for place in ("hidden", "shown"):
        (tmp_path / place).mkdir()
    usual = found_in(tmp_path / "shown", shown)
    run = run_of(tmp_path / "hidden", hidden)
    for model in (None, MODEL):
        found = recognised(run, model)
        assert found.only_kernels == ("matrix products",)
        assert found.layout == usual.layout
        assert found.busy_s == pytest.approx(usual.busy_s, rel=1e-3)
    assert recognised(run, MODEL).model == MODEL
    answer = fw.plan(recorded=run, to={"tp": 2}).recorded
    assert answer is not None
    assert answer.not_recognised == (UsualMlp(), OnlyKernels(work="matrix products"))


def test_attention_that_is_no_operation_takes_its_sizes_from_the_given_model(
    tmp_path: Path,
) -> None:
    hidden = Job(
        framework="megatron", tp=2, pp=2, cp=2, shard=2, attention="kernels", shows_products=False
    )
    (tmp_path / "shown").mkdir()
    usual = found_in(tmp_path / "shown", replace(hidden, attention="aten", shows_products=True))
    run = run_of(tmp_path, hidden)
    found = recognised(run, MODEL)
    assert (found.model, found.layout) == (MODEL, usual.layout)
    assert found.busy_s == pytest.approx(usual.busy_s, rel=1e-3)
    answer = fw.plan(MODEL, recorded=run, to={"tp": 2, "pp": 2})
    assert answer.best.step_s == pytest.approx(usual.step_s, rel=0.01)
    assert answer.recorded is not None
    assert answer.recorded.not_recognised == (
        OnlyKernels(work="attention"),
        OnlyKernels(work="matrix products"),
        OpenRecomputation(),
    )
    with pytest.raises(UsageError, match=r"expected attention.*give the model too"):
        recognised(run)
    with pytest.raises(UsageError, match=r"model: expected the trace's.* 1024, got given with 16"):
        recognised(run, replace(MODEL, hidden=2 * HIDDEN))
    with pytest.raises(UsageError, match="expected a divisor of 15 heads"):
        recognised(run, replace(MODEL, heads=15, kv_heads=15))
    unnamed = replace(run, facts=replace(run.facts, groups=None, group_names=None))
    with pytest.raises(UsageError, match="expected a description of the group of tensor"):
        recognised(unnamed, MODEL)


def test_free_products_are_refused(tmp_path: Path) -> None:
    job = Job(
        framework="megatron",
        shard=2,
        attention="flash_attn",
        shows_products=False,
        has_product_kernels=False,
    )
    with pytest.raises(UsageError, match=r"expected the time of the layers' matrix products.*none"):
        found_in(tmp_path, job)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("idle_s", [0.0, 0.03])
def test_a_device_waits_for_the_host_as_long_as_its_trace_shows(
    tmp_path: Path, tp: int, pp: int, idle_s: float
) -> None:
    ways = {"tp": tp, "pp": pp}
    job = Job(framework="megatron", tp=tp, pp=pp, idle_us=1e6 * idle_s)
    device_traced(tmp_path / "job", job)
    plain = fw.plan(recorded=tmp_path / "job", to=ways)
    assert plain.recorded is not None
    by_work = {ratio.work: ratio for ratio in plain.recorded.ratios}
    bubble_s = 0.0025 * (pp - 1)  # which a pipeline's idle time holds
    waited_s = by_work["waits for the host"].measured_s
    assert waited_s == pytest.approx(max(0.0, idle_s - bubble_s), abs=1e-3)
    if pp > 1:
        # Transfers show the network, which without a pace would take 20 times as long.
        whole = fw.plan(recorded=tmp_path / "job", to="pp=1")
        assert whole.best.step_s == pytest.approx(plain.best.step_s, rel=0.1)
        return
    # So eight times the batch is eight times the work. Waits are of a step or of microbatches.
    more = fw.plan(recorded=tmp_path / "job", to=ways, global_batch=8 * plain.global_batch)
    work_s = plain.best.step_s - idle_s
    assert idle_s + 0.85 * 8 * work_s < more.best.step_s < 8 * (idle_s + work_s)


def test_norms_are_as_quick_as_the_rest_of_what_moves_values(tmp_path: Path) -> None:
    found = found_in(tmp_path, Job(framework="megatron", tp=2))
    device = accelerator("h100")
    for rest_s in (found.busy_s["rest"] / 2, found.busy_s["rest"]):
        less = replace(found, busy_s={**found.busy_s, "rest": rest_s})
        norms = calibrated(less, None, device).ratios[2]
        assert norms.work == "norms, activations"
        assert norms.measured_s < rest_s
        assert norms.measured_s / rest_s > 0.1


@pytest.mark.parametrize("tp", [1, 8])
def test_sums_of_other_groups_are_no_sums_of_a_rank(tmp_path: Path, tp: int) -> None:
    sharded = Job(framework="megatron", tp=tp, shard=2, shards_optimizer=True)
    for name, job, zero in (
        ("whole", replace(sharded, shards_optimizer=False), 0),
        ("", sharded, 1),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        found = found_in(tmp_path / name, job)
        assert found.layout.zero == zero
        own_bytes = 2 * LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN) // tp
        assert found.summed_bytes == own_bytes
        assert not calibrated(found, None, accelerator("h100")).sums_each_microbatch
