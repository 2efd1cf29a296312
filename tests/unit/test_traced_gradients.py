"""Which sums of a trace carry gradients: those of split layers do not, scatters of shards do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fullwire as fw
from fullwire.errors import DamagedInput, UsageError
from fullwire.importers import read
from fullwire.report.terminal import print_whatif
from fullwire.run.run import Run
from fullwire.simulation.interval import interval_s
from fullwire.simulation.sweep import sweep
from tests.unit.test_kineto import ALL_REDUCE, GEMM, Job, reduced

LAYERS, STEPS, SIZE = 4, 6, 4_000_000
BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"
OPTIMIZER = "Optimizer.step#SGD.step"
KERNELS = {
    "allreduce": ALL_REDUCE,
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL",
    "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
    "send": "ncclDevKernel_SendRecv",
    "all_to_all": "ncclDevKernel_SendRecv",
}
# A kernel with its pass and length, a collective with its group, name and size, or the wait for it.
# In a rest the host launches no kernel.
Part = tuple[Any, ...]


def split() -> Iterator[Part]:
    """Yield a step in which each layer needs the sum of the layer before."""
    for is_backward, long_us in ((False, 100), (True, 200)):
        for layer in range(LAYERS):
            yield "work", is_backward, long_us
            yield "send", "allreduce", "1", (is_backward, layer)
            yield "wait", (is_backward, layer)
    yield "work", False, 50


def split_and_summed() -> Iterator[Part]:
    """Yield the same with sums of gradients in another group, each beside the next layer."""
    for part in split():
        yield part
        if part[0] == "work" and part[1]:
            yield "send", "allreduce", "2", "gradients"


def sharded() -> Iterator[Part]:
    """Yield a step that gathers each layer ahead, and scatters its gradients."""
    layers = [(False, each) for each in range(LAYERS)]
    layers += [(True, each) for each in reversed(range(LAYERS))]
    yield "send", "_allgather_base", "1", layers[0]
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        yield "wait", layer
        if following is not None:
            yield "send", "_allgather_base", "1", following
        yield "work", layer[0], 400 if layer[0] else 200
        if layer[0]:
            yield "send", "_reduce_scatter_base", "1", "gradients"
    yield "wait", "gradients"
    yield "work", False, 50


def split_beside() -> Iterator[Part]:
    """Yield a step of split layers whose sums go beside the work for the layers' weights."""
    for layer in range(LAYERS):
        yield "work", False, 200
        yield "send", "allreduce", "1", (False, layer)
        yield "wait", (False, layer)
    for layer in range(LAYERS):
        yield "work", True, 200
        yield "send", "allreduce", "1", (True, layer)
        yield "work", True, 400
        yield "wait", (True, layer)
    yield "work", False, 50


def waited_for() -> Iterator[Part]:
    """Yield a step that sums each gradient and waits for it."""
    yield "work", False, 400
    for _ in range(LAYERS):
        yield "work", True, 200
        yield "send", "allreduce", "1", "gradients"
        yield "wait", "gradients"
    yield "work", False, 50


def sharded_and_summed(group: str, size: int) -> Iterator[Part]:
    """Yield the steps of a sharded model, with an all-reduce after each scatter, and a norm."""
    for part in sharded():
        yield part
        if part[:2] == ("send", "_reduce_scatter_base"):
            yield "send", "allreduce", group, "gradients", size
    yield "send", "allreduce", "1", "norm", 4
    yield "wait", "norm"
    yield "work", False, 50


def sequences_split(size: int) -> Iterator[Part]:
    """Yield a step that gathers and scatters activations, and sums gradients beside them."""
    for is_backward in (False, True):
        for _ in range(LAYERS):
            yield "send", "_allgather_base", "1", "activations"
            yield "wait", "activations"
            yield "work", is_backward, 200
            yield "send", "_reduce_scatter_base", "1", "activations"
            yield "wait", "activations"
            if is_backward:
                yield "send", "allreduce", "2", "gradients", size
    yield "send", "_reduce_scatter_base", "1", "activations", 2 * LAYERS * size
    yield "wait", "gradients"
    yield "work", False, 50


def summed_afterwards() -> Iterator[Part]:
    """Yield a step that sums a loss in its forward pass, and no gradients in its backward pass."""
    yield "work", False, 400
    yield "send", "allreduce", "1", "loss", 4
    yield "wait", "loss"
    yield "work", True, 400
    yield "work", False, 50


def summed_with_a_mean() -> Iterator[Part]:
    """Yield a step whose forward pass has one sum as large as those of gradients."""
    yield "send", "allreduce", "1", "mean"
    yield "wait", "mean"
    yield from waited_for()


def in_stages() -> Iterator[Part]:
    """Yield a step of a pipeline's stage, as far as it sends something."""
    for is_backward in (False, True):
        yield "work", is_backward, 400
        yield "send", "send", "1", "activations"
    yield "work", False, 50


def bucketed(layers: int) -> Iterator[Part]:
    """Yield a step with buckets of so many layers of 4 MB, of eight."""
    yield "work", False, 800
    for layer in range(1, 9):
        yield "work", True, 400
        if layer % layers == 0:
            yield "send", "allreduce", "1", "gradients", layers * SIZE
    yield "wait", "gradients"
    yield "work", False, 50


def with_a_last_bucket(size: int, *, and_a_norm: bool) -> Iterator[Part]:
    """Yield a step whose last bucket is small, and perhaps a norm that is made of the gradients."""
    yield "work", False, 800
    for sent_bytes in (SIZE, SIZE, SIZE, size):
        yield "work", True, 400
        yield "send", "allreduce", "1", "gradients", sent_bytes
    yield "wait", "gradients"
    yield "work", False, 50
    if and_a_norm:
        yield "send", "allreduce", "1", "norm", 4
        yield "wait", "norm"
        yield "work", False, 50


def in_rounds() -> Iterator[Part]:
    """Yield a step that sends nothing and lacks the optimizer, and one with buckets."""
    yield "work", False, 800
    for _ in range(8):
        yield "work", True, 400
    yield ("mark",)
    yield from bucketed(4)
    yield "work", False, 2000


def played(parts: Iterator[Part], rate_gbps: float, job: Job | None = None) -> float:
    """Play the steps of a rank, alike on both, and return the length of one in microseconds.

    Each group has a stream. A sum of 4 MB takes 320 us at 100 Gbps, and other operations half that.
    """
    program, now, began, count, start = list(parts), 0.0, 0.0, 0, 0.0
    for _ in range(STEPS):
        start = now
        over: dict[Any, float] = {}
        began, sent_until = now, {"1": now, "2": now}
        for place, part in enumerate(program):
            launch = began + place
            if part[0] == "mark":
                if job is not None:
                    job.step(count, began, now)
                began, count = now, count + 1
            elif part[0] == "optimizer":
                if job is not None:
                    job.event("user_annotation", OPTIMIZER, launch, launch + 0.5, tid=1)
            elif part[0] == "wait":
                now = max(now, over[part[1]])
            elif part[0] == "rest":
                now += part[1]
            elif part[0] == "work":
                if job is not None:
                    job.kernel(GEMM, now, now + part[2], launch=launch)
                    if part[1]:
                        job.event("cpu_op", BACKWARD, launch - 0.1, launch + 0.8, tid=1)
                now += part[2]
            else:
                _, op, group, name, *of_size = part
                size = sum(of_size) or SIZE
                begin = max(now, sent_until[group])
                long_us = size * 8e-3 / rate_gbps / (1 if op == "allreduce" else 2)
                sent_until[group] = over[name] = begin + long_us
                if job is not None:
                    sizes = {"Collective name": op}
                    if op == "_allgather_base":
                        sizes |= {"In msg nelems": size // 8}
                    if op == "_reduce_scatter_base":
                        sizes |= {"Out msg nelems": size // 8}
                    args = reduced(size // 4, group) | sizes
                    end, stream = begin + long_us, 8 + int(group)
                    job.kernel(KERNELS[op], begin, end, launch=launch, stream=stream, **args)
        now = max(now, *sent_until.values())
        if job is not None:
            job.step(count, began, now)
        count += 1
    return now - start


def traced(where: Path, parts: Any, rate_gbps: float = 100) -> Run:
    for rank in (0, 1):
        job = Job(rank)
        played(parts(), rate_gbps, job)
        job.write(where / f"{rank}.json")
    return read(where)


def test_sums_that_a_split_layer_waits_for_are_no_gradients(tmp_path: Path) -> None:
    run = traced(tmp_path, split)
    assert len(run.gradients) == 0
    assert run.facts.buckets is None
    fixes = fw.explain(run, bandwidth="100Gbps").fixes
    assert [fix.kind for fix in fixes] == ["link", "link"]
    step_s = {played(split(), rate_gbps) * 1e-6 for rate_gbps in (200, 400)}
    assert sorted(fix.step_s for fix in fixes) == pytest.approx(sorted(step_s), rel=0.03)
    table = fw.whatif(run, line_rate="100Gbps", bandwidth="50Gbps", transport="measured")
    assert table["step_s"][0] == pytest.approx(played(split(), 50) * 1e-6, rel=0.03)
    with pytest.raises(UsageError, match="whose collectives sum its gradients"):
        fw.whatif(run, line_rate="100Gbps", buckets="ddp")


@pytest.mark.parametrize(
    ("parts", "rate_gbps"), [(split, 300), (split_and_summed, 300), (in_stages, 100)]
)
def test_transfers_that_layers_wait_for_are_not_used_too_late(
    tmp_path: Path, parts: Any, rate_gbps: int
) -> None:
    run = traced(tmp_path, parts, rate_gbps)
    assert fw.explain(run, bandwidth=f"{rate_gbps}Gbps").verdict.kind == "line_rate"


def test_gradients_beside_a_split_layer_are_told_from_its_sums(tmp_path: Path) -> None:
    run = traced(tmp_path, split_and_summed)
    assert run.facts.buckets == "none"
    assert len(run.gradients) == 2 * STEPS * LAYERS
    first = run.gradients.rows((run.gradients.rank == 0) & (run.gradients.step == 0))
    ended_us = [4 * 420 + 200 + 520 * layer for layer in range(LAYERS)]
    assert first.ready_ns.tolist() == [1000 * each for each in ended_us]


def test_sums_of_a_split_layer_beside_its_work_are_no_gradients(tmp_path: Path) -> None:
    run = traced(tmp_path, split_beside)
    assert len(run.gradients) == 0
    table = fw.whatif(run, line_rate="100Gbps", bandwidth="50Gbps", transport="measured")
    assert table["step_s"][0] == pytest.approx(played(split_beside(), 50) * 1e-6, rel=0.1)


@pytest.mark.parametrize("late_us", [(0, 0), (8, 8), (1, 8)])
@pytest.mark.parametrize("rests_us", [12, -4])
def test_a_wait_for_a_launch_tells_nothing_of_a_sum(
    tmp_path: Path, late_us: tuple[int, int], rests_us: int
) -> None:
    """Eight short kernels, 100 us apart, each with a sum that ends about when the next begins."""
    for rank in (0, 1):
        job = Job(rank)
        for number in range(STEPS):
            begin = 1_000 * number
            job.step(number, begin, begin + 1_000)
            for part in range(8):
                now = begin + 100 * part
                job.event("cpu_op", BACKWARD, now, now + 15, tid=1)
                job.kernel(GEMM, now + late_us[rank], now + 30, launch=now)
                of_sum = reduced(250_000)
                end = now + 100 - rests_us
                job.kernel(ALL_REDUCE, now + 30, end, launch=now + 10, stream=9, **of_sum)
        job.write(tmp_path / f"{rank}.json")
    run = read(tmp_path)
    assert [(run.gradients.rank == rank).sum() for rank in (0, 1)] == [8 * STEPS, 8 * STEPS]
    assert run.facts.buckets == "none"


@pytest.mark.parametrize("parts", [waited_for, summed_with_a_mean])
def test_gradients_that_a_job_waits_for_stay_gradients(tmp_path: Path, parts: Any) -> None:
    run = traced(tmp_path, parts)
    assert len(run.gradients) == 2 * STEPS * LAYERS
    assert run.facts.buckets == "none"
    assert "link" in {fix.kind for fix in fw.explain(run, bandwidth="100Gbps").fixes}
    fw.whatif(run, line_rate="100Gbps", buckets="ddp", compression="fp16")  # is not refused


def test_sums_on_a_processor_are_gradients_up_to_the_end_of_its_pass(tmp_path: Path) -> None:
    """Each sum ends within the operator that issued it; the last comes late in a long operator.

    Two sums of the step before come in the forward pass. They tell of no split layer here.
    """
    for rank in (0, 1):
        job = Job(rank, distributedInfo={"backend": "gloo", "rank": rank, "world_size": 2})
        for number in range(STEPS):
            begin = 100_000 * number
            job.step(number, begin, begin + 90_000)
            job.event("cpu_op", "aten::addmm", begin, begin + 10_000, tid=1)
            issues = [begin + each for each in (1_000, 4_000, 12_000, 22_000, 32_000, 47_200)]
            for part in range(4):
                now = begin + 10_000 * (part + 1)
                job.event("cpu_op", BACKWARD, now, now + 10_000, tid=1)
            for issue in issues:
                of_sum: dict[str, Any] = {"Input Dims": [[250_000]], "Input type": ["float"]}
                mark = "gloo:all_reduce", issue, issue + 2_000
                job.event("user_annotation", *mark, tid=2, **of_sum)
        job.write(tmp_path / f"{rank}.json")
    run = read(tmp_path)
    assert len(run.gradients) == 2 * STEPS * 4
    assert run.facts.buckets == "none"


@pytest.mark.parametrize("late", [0, 3, 4])
def test_gradients_that_a_processor_sums_in_the_next_forward_pass_are_no_sums_of_layers(
    tmp_path: Path, late: int
) -> None:
    layers = 6
    for rank in (0, 1):
        job = Job(rank, distributedInfo={"backend": "gloo", "rank": rank, "world_size": 2})
        job.header |= {"deviceProperties": []}
        for number in range(STEPS):
            began = 100_000 * number
            job.step(number, began, began + 100_000)
            for part in range(2 * layers):
                name, begin = BACKWARD if part >= layers else "aten::addmm", began + 4_000 * part
                job.event("cpu_op", name, begin, begin + 4_000, tid=1)
            for part in range(layers):
                begin = began + 4_000 * (layers + part) + 3_500
                if part >= layers - late:
                    begin = began + 100_200 + 3_500 * (part + late - layers)
                of_sum: dict[str, Any] = {"Input Dims": [[250_000]], "Input type": ["float"]}
                mark = "gloo:all_reduce", begin, begin + 3_000
                job.event("user_annotation", *mark, tid=2, **of_sum)
        job.write(tmp_path / f"{rank}.json")
    assert len(read(tmp_path).gradients) == 2 * STEPS * (layers - late)


@pytest.mark.parametrize("sums_inputs", [True, False])
def test_sums_of_split_layers_on_a_processor_are_no_gradients(
    tmp_path: Path, sums_inputs: bool
) -> None:
    """Each layer waits for its sum, but the first one of the backward pass for none."""
    for rank in (0, 1):
        job = Job(rank, distributedInfo={"backend": "gloo", "rank": rank, "world_size": 2})
        job.header |= {"deviceProperties": [], "host_name": f"host{rank}"}
        for number in range(STEPS):
            began = now = 100_000 * number
            for is_backward in (False, True):
                for layer in range(LAYERS):
                    name = BACKWARD if is_backward else "aten::addmm"
                    job.event("cpu_op", name, now, now + 4_000, tid=1)
                    now += 4_000
                    if layer == LAYERS - 1 and is_backward and not sums_inputs:
                        continue
                    of_sum: dict[str, Any] = {"Input Dims": [[250_000]], "Input type": ["float"]}
                    mark = "gloo:all_reduce", now, now + 3_000
                    job.event("user_annotation", *mark, tid=2, **of_sum)
                    wait = "_c10d_functional::wait_tensor", now, now + 3_000
                    job.event("cpu_op", *wait, tid=1)
                    now += 3_000
            job.step(number, began, now)
        job.write(tmp_path / f"{rank}.json")
    run = read(tmp_path)
    assert len(run.gradients) == 0
    found = fw.explain(run, bandwidth="10Gbps")
    assert found.verdict.kind == "transport"
    assert found.baseline_step_s == pytest.approx(8 * 4e-3, rel=0.01)
    with pytest.raises(UsageError, match="whose collectives sum its gradients"):
        fw.whatif(run, line_rate="10Gbps", buckets="ddp")


def test_buckets_before_a_pass_that_is_marked_too_late_tell_of_no_split_layer(
    tmp_path: Path,
) -> None:
    for rank in (0, 1):
        job = Job(rank)
        played(bucketed(1), 100, job)
        passes = [event for event in job.events if event["cat"] == "cpu_op"]
        job.events = [event for event in job.events if event not in passes[:7]]
        job.write(tmp_path / f"{rank}.json")
    run = read(tmp_path)
    assert len(run.gradients) == 2 * (8 * STEPS - 7)


def test_sums_whose_launch_is_unknown_tell_of_no_split_layer(tmp_path: Path) -> None:
    for rank in (0, 1):
        job = Job(rank)
        played(bucketed(1), 100, job)
        sums = [each["args"]["correlation"] for each in job.events if each["name"] == ALL_REDUCE]
        lost = [number for place, number in enumerate(sums) if place % 2]
        job.events = [
            event
            for event in job.events
            if event["cat"] != "cuda_runtime" or event["args"]["correlation"] not in lost
        ]
        job.write(tmp_path / f"{rank}.json")
    run = read(tmp_path)
    assert len(run.gradients) == 2 * 4 * STEPS


@pytest.mark.parametrize(
    ("parts", "is_sharded"),
    [
        (lambda: sharded_and_summed("2", SIZE // 2), True),  # replicas add up their shards
        (lambda: sharded_and_summed("2", SIZE * 3 // 4), False),
        (lambda: sharded_and_summed("1", SIZE // 2), False),
        (lambda: sequences_split(SIZE // 2), False),
    ],
)
def test_all_reduces_carry_gradients_unless_they_add_up_shards(
    tmp_path: Path, parts: Any, is_sharded: bool
) -> None:
    run = traced(tmp_path, parts)
    assert (run.facts.buckets is None) == is_sharded
    sizes = set(run.gradients.bytes.tolist())
    assert (SIZE in sizes) == is_sharded
    assert len(run.gradients.rows(run.gradients.bytes > 4)) == 2 * STEPS * LAYERS


@pytest.mark.parametrize("parts", [summed_afterwards, in_stages])
def test_a_trace_without_sums_of_gradients_or_of_layers_is_refused(
    tmp_path: Path, parts: Any
) -> None:
    run = traced(tmp_path, parts)
    with pytest.raises(UsageError, match="needs one backward pass with gradients"):
        fw.whatif(run, line_rate="100Gbps", bandwidth="200Gbps")


def test_a_trace_of_split_layers_without_all_sizes_is_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        job = Job(rank)
        played(split(), 100, job)
        sums = [event for event in job.events if event["name"] == ALL_REDUCE]
        for event in sums[:: 2 * LAYERS]:
            del event["args"]["dtype"]
        job.write(tmp_path / f"{rank}.json")
    with pytest.raises(DamagedInput, match="the size is not told"):
        fw.whatif(read(tmp_path), line_rate="100Gbps", bandwidth="200Gbps")


@pytest.mark.parametrize("and_a_norm", [False, True])
def test_a_small_last_bucket_holds_gradients_and_a_norm_of_them_does_not(
    tmp_path: Path, and_a_norm: bool
) -> None:
    run = traced(tmp_path, lambda: with_a_last_bucket(704, and_a_norm=and_a_norm))
    first = run.gradients.rows((run.gradients.rank == 0) & (run.gradients.step == 1))
    assert first.bytes.tolist() == [SIZE, SIZE, SIZE, 704]


def test_a_written_prediction_without_gradients_predicts_too(tmp_path: Path) -> None:
    run = traced(tmp_path, split)
    asked: dict[str, Any] = {"line_rate": "100Gbps", "transport": "full"}
    written = fw.replay(run, **asked, bandwidth="50Gbps")
    [step_s] = fw.whatif(written, bandwidth="200Gbps", transport="full")["step_s"].tolist()
    assert step_s == pytest.approx(played(split(), 200) * 1e-6, rel=0.03)


def test_a_grid_of_a_sharded_model_equals_its_points(tmp_path: Path) -> None:
    run = traced(tmp_path, sharded)
    asked: dict[str, Any] = {"line_rate": "100Gbps", "transport": "measured"}
    grid = fw.whatif(run, **asked, workers="2,4", bandwidth="50Gbps,200Gbps")
    for row in range(4):
        at: dict[str, Any] = {"workers": int(grid["workers"][row])}
        at["bandwidth"] = float(grid["bandwidth_bps"][row])
        point = fw.whatif(run, **asked, **at)
        of_grid = [values[row] for values in (grid["step_s"], *grid.interval_s)]
        assert of_grid == [values[0] for values in (point["step_s"], *point.interval_s)]


def test_the_interval_of_a_sharded_model_is_its_own_beside_another_run(tmp_path: Path) -> None:
    run = traced(tmp_path, sharded, 25)
    found = fw.whatif(run, line_rate="25Gbps", bandwidth="100Gbps")
    [subject] = found.subjects
    # As if the step were shorter than on a full line, which an unsure T1 may explain.
    [residue] = subject.residues
    subject = replace(subject, residues=(replace(residue, of_full_s=residue.time_s),))
    unsure = replace(subject, step=replace(subject.step, alone_off=(0.4, 0.1)))
    low_s = {}
    for subjects in ((subject,), (unsure,), (subject, unsure)):
        low_s[subjects], _ = interval_s(subjects, found.grid, sweep(subjects, found.grid), None)
    assert low_s[unsure,] < low_s[subject,]
    assert low_s[subject, unsure].tolist() == [*low_s[subject,], *low_s[unsure,]]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"compression": "fp16"}, "compression"),
        ({"compression": 10, "buckets": "ddp"}, "buckets, compression"),
        ({"buckets": "none"}, "buckets"),
        ({"lane": "priority"}, "lane"),
        ({"accumulate": 2}, "accumulate"),
        ({"local_steps": 2}, "local steps"),
    ],
)
def test_conditions_of_buckets_are_refused_for_a_sharded_model(
    tmp_path: Path, asked: dict[str, Any], named: str
) -> None:
    run = traced(tmp_path, sharded)
    with pytest.raises(UsageError, match=f"^{named}: expected a run whose gradients go in buckets"):
        fw.whatif(run, line_rate="100Gbps", **asked)


def test_a_sharded_model_has_no_bucket_or_compression_in_its_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fw.whatif(traced(tmp_path, sharded), line_rate="100Gbps", target=0.95)
    print_whatif(found)
    assert "buckets" not in capsys.readouterr().out
    assert found.targets is not None
    assert not found.targets.least_compression


def test_other_buckets_of_a_trace_take_its_gradients_to_come_at_a_steady_pace(
    tmp_path: Path,
) -> None:
    run = traced(tmp_path, lambda: bucketed(4))
    asked: dict[str, Any] = {"line_rate": "100Gbps", "transport": "measured"}
    table = fw.whatif(run, **asked, buckets=["ddp:4MB", "ddp:8MB", "ddp:16MB", "none"])
    step_s = [played(bucketed(layers), 100) * 1e-6 for layers in (1, 2, 4, 4)]
    assert table["step_s"] == pytest.approx(step_s, rel=0.03)
    at_once_s = step_s[-1]  # if each bucket were one gradient, no buckets would be sooner
    assert (table.interval_s[1][:3] >= at_once_s).all()
    assert any("take the gradients to become ready at a steady pace" in w for w in table.warnings)
    [fix] = [fix for fix in fw.explain(run, bandwidth="100Gbps").fixes if fix.kind == "buckets"]
    assert fix.low_s < step_s[0] < at_once_s < fix.high_s


@pytest.mark.parametrize(
    ("without", "reason"),
    [("cpu_op", "ProfilerActivity.CPU"), ("user_annotation", "profiler.step()")],
)
def test_a_trace_without_passes_or_steps_is_refused_with_the_way_to_have_them(
    tmp_path: Path, without: str, reason: str
) -> None:
    for rank in (0, 1):
        job = Job(rank)
        played(bucketed(4), 100, job)
        job.events = [event for event in job.events if event["cat"] != without]
        job.write(tmp_path / f"{rank}.json")
    with pytest.raises(UsageError, match=re.escape(reason)):
        fw.whatif(read(tmp_path), line_rate="100Gbps", bandwidth="200Gbps")
    with pytest.raises(UsageError, match=f"in a step|{re.escape(reason)}"):
        fw.whatif(read(tmp_path), line_rate="100Gbps", transport="measured")


@pytest.mark.parametrize("rate_gbps", [100, 200])
def test_a_steps_own_time_is_the_mean_of_a_round_with_steps_that_send_nothing(
    tmp_path: Path, rate_gbps: float
) -> None:
    run = traced(tmp_path, in_rounds)
    table = fw.whatif(run, line_rate="100Gbps", bandwidth=f"{rate_gbps}Gbps", transport="measured")
    assert table["step_s"][0] == pytest.approx(played(in_rounds(), rate_gbps) / 2e6, rel=0.005)
    assert not any("too low" in each for each in fw.explain(run, bandwidth="100Gbps").warnings)
