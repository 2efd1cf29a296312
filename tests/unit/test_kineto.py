"""Profiler traces: real ones with known answers, made ones with known causes, and broken ones."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire
from fullwire.errors import DamagedInput, FullwireError, UsageError
from fullwire.importers import read
from fullwire.importers.kineto.recognise import Known, dtype_of, kinds_of, op_of
from fullwire.run.run import Run
from fullwire.timeline.passes import passes_of_step
from fullwire.words import sentences
from tests.conftest import Cli
from tests.strategies import cases, scaled

Event = dict[str, Any]
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "ampere_sgemm_128x64_tn"


class Job:
    """Builds the trace of one rank, in microseconds."""

    def __init__(self, rank: int | None = 0, world: int = 2, **header: Any) -> None:
        info = {"backend": "nccl", "world_size": world} | ({} if rank is None else {"rank": rank})
        self.header: dict[str, Any] = {"schemaVersion": 1, "distributedInfo": info} | header
        self.events: list[Event] = []

    def step(self, number: int, start: float, end: float) -> Job:
        return self.event("user_annotation", f"ProfilerStep#{number}", start, end, tid=1)

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        *,
        launch: float | None = None,
        stream: int = 7,
        **arguments: Any,
    ) -> Job:
        number = len(self.events)
        if launch is not None:
            self.event(
                "cuda_runtime", "cudaLaunchKernel", launch, launch + 1, tid=1, correlation=number
            )
        given = {"device": 0, "stream": stream, "correlation": number} | arguments
        return self.event("kernel", name, start, end, tid=stream, **given)

    def event(
        self, category: str, name: str, start: float, end: float, *, tid: int, **arguments: Any
    ) -> Job:
        length = round(end - start, 3)
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": start,
                "dur": length,
                "args": arguments,
            }
        )
        return self

    def text(self) -> str:
        return json.dumps(self.header | {"traceEvents": self.events})

    def write(self, path: Path) -> Path:
        path.write_text(self.text())
        return path


def reduced(elements: int, group: str = "0", members: str = "[0, 1]", **more: Any) -> Event:
    return {
        "Collective name": "allreduce",
        "In msg nelems": elements,
        "dtype": "Float",
        "Out msg nelems": elements,
        "Process Group Name": group,
        "Group size": 2,
        "Process Group Ranks": members,
    } | more


def two_ranks(where: Path, *, late_us: float = 0.0, clock_us: float = 0.0) -> Path:
    """Make a job in which rank 1 comes to each all-reduce late, by a clock that is ahead."""
    for rank in (0, 1):
        job = Job(rank)
        for number in range(6):
            begin = 1_000.0 * number
            own = begin + clock_us * rank
            issue = own + 500 + late_us * rank
            job.step(number, own, own + 1_000)
            job.kernel(GEMM, own, issue, launch=own)
            end = begin + 500 + late_us + 100 + clock_us * rank + 3 * (number % 2) * rank
            job.kernel(ALL_REDUCE, issue, end, launch=own + 5, stream=9, **reduced(1_000_000))
        job.write(where / f"trace-{rank}.json")
    return where


@pytest.mark.parametrize(
    "name",
    [
        "df_index_resolver_rank1_of_2",
        "nccl_data_rank0_of_2",
        "negqueue_rank0_of_16",
        "control_rank3_of_8",
        "sampled_rank0_of_128",
        "sampled_rank1_of_128",
    ],
)
def test_ranks_agree_with_interval_arithmetic_on_real_traces(shared_data: Path, name: str) -> None:
    known = json.loads((shared_data / "kineto/expected.json").read_text())["traces"]
    expected = known[f"{name}.json.gz"]
    run = read(shared_data / f"kineto/{name}.json.gz")
    found = fullwire.explain(run).ranks[0]
    within_us = max(2.0, 2e-4 * expected["span_us"])
    assert found.rank == expected["rank"]
    assert run.facts.workers == expected["world"]
    assert len(run.collectives) == expected["n_comm"]
    for got_s, key in (
        (found.span_s, "span_us"),
        (found.compute_s, "compute_us"),
        (found.idle_s, "idle_us"),
        (found.communication_s, "comm_us"),
        (found.overlap_s, "overlap_us"),
        (found.exposed_s, "exposed_comm_us"),
    ):
        assert got_s * 1e6 == pytest.approx(expected[key], abs=within_us), key


def test_collectives_of_a_real_trace_have_their_sizes_groups_and_types(shared_data: Path) -> None:
    run = read(shared_data / "kineto/nccl_data_rank0_of_2.json.gz")
    table = run.collectives
    assert sorted(set(table.op)) == ["allreduce", "broadcast"]
    assert set(table.dtype) == {"float32", "int64"}
    assert set(table.group) == {"0"}
    assert 6_637_568 * 4 in table.bytes
    assert set(table.step) <= {4, 5, 6, -1}


def test_sizes_come_from_the_mark_around_the_launch_where_kernels_have_none(
    shared_data: Path,
) -> None:
    table = read(shared_data / "kineto/sampled_rank0_of_128.json.gz").collectives
    assert "allreduce" in set(table.op)
    assert 19_618_307 * 4 in table.bytes


@pytest.mark.parametrize("name", ["edge_rank_missing", "edge_distributed_info_missing"])
def test_a_trace_without_its_devices_is_not_judged(shared_data: Path, name: str) -> None:
    run = read(shared_data / f"kineto/{name}.json.gz")
    found = fullwire.explain(run)
    assert found.verdict.kind == "unknown"
    assert "its trace holds no device" in (run.facts.remarks or "")
    assert any("does not say which rank" in sentence for sentence in run.missing)
    assert any("how many ranks" in sentence for sentence in run.missing)


def test_gloo_on_processors_is_communication(shared_data: Path) -> None:
    run = read(shared_data / "kineto/gloo_cpu_only_rank34_of_300.json.gz")
    assert set(run.collectives.op) == {"allreduce"}
    assert set(run.collectives.bytes) == {321_271 * 4, 2_082_411 * 4}
    assert fullwire.explain(run).verdict.kind == "unknown"
    assert "1 of 300 ranks are here" in run.missing


def test_on_processors_neither_a_wait_nor_a_message_is_computing(tmp_path: Path) -> None:
    """Gloo copies in its own thread. Our backend marks the thread that goes on computing."""
    job = Job(0, 1, distributedInfo={"backend": "gloo", "rank": 0, "world_size": 2})
    job.step(0, 0, 1000)
    floats: dict[str, Any] = {"Input type": ["float", "float"]}
    job.event("cpu_op", "aten::mm", 10, 200, tid=1, **{"Input Dims": [[8, 8], [8, 8]]}, **floats)
    told = {"Input Dims": [[200], [100], [], []], **floats}
    job.event("cpu_op", "c10d::_allgather_base_", 195, 200, tid=1, **told)
    given = {"Input Dims": [[100]], "Input type": ["float"]}
    job.event("user_annotation", "gloo:all_gather", 200, 400, tid=9, **given)
    job.event("cpu_op", "aten::copy_", 210, 290, tid=9)
    job.event("user_annotation", "fullwire:all_reduce", 300, 500, tid=1, **given)
    job.event("cpu_op", "aten::add", 300, 400, tid=1).event("cpu_op", "aten::add", 400, 490, tid=1)
    job.event("cpu_op", "autograd::engine::evaluate_function: X", 490, 900, tid=1)
    job.event("user_annotation", "FSDP::pre_backward (layers.1)", 500, 700, tid=1)
    job.event("cpu_op", "fsdp::chunk_cat", 600, 650, tid=1)
    run = read(job.write(tmp_path / "rank0.json"))
    computing = run.spans.rows(run.spans.lane == "compute")
    stretches = zip(computing.start_ns.tolist(), computing.end_ns.tolist(), strict=True)
    lengths_us = sorted((end - start) / 1000 for start, end in stretches)
    assert lengths_us == [50, 190, 200, 200]  # 600 to 650, 10 to 200, 300 to 500, 700 to 900
    gathers = run.collectives.rows(run.collectives.op == "allgather")
    assert gathers.bytes.tolist() == [800]


@pytest.mark.parametrize("shapes", [{}, {"Input Dims": [[8, 8]], "Input type": ["float"]}])
def test_on_processors_a_wait_for_a_tensor_is_no_computing(
    tmp_path: Path, shapes: dict[str, Any]
) -> None:
    """The operator that needs the tensor waits within."""
    job = Job(0, 1, distributedInfo={"backend": "gloo", "rank": 0}, deviceProperties=[])
    job.step(0, 0, 1000)
    job.event("cpu_op", "aten::mm", 0, 300, tid=1, **shapes)
    job.event("user_annotation", "gloo:all_reduce", 300, 600, tid=9, **shapes)
    job.event("cpu_op", "aten::add", 300, 700, tid=1, **shapes)
    job.event("cpu_op", "_c10d_functional::wait_tensor", 350, 600, tid=1)
    run = read(job.write(tmp_path / "rank0.json"))
    computing = run.spans.rows(run.spans.lane == "compute")
    assert (computing.start_ns.tolist(), computing.end_ns.tolist()) == (
        [0, 600_000],
        [350_000, 700_000],
    )
    assert (len(run.operations) > 0) == bool(shapes)


def test_on_processors_a_wait_in_one_thread_leaves_the_computing_of_another(
    tmp_path: Path,
) -> None:
    job = Job(0, 1, distributedInfo={"backend": "gloo", "rank": 0}, deviceProperties=[])
    job.step(0, 0, 1000)
    job.event("user_annotation", "gloo:all_reduce", 300, 600, tid=9)
    job.event("cpu_op", "autograd::engine::evaluate_function: X", 0, 500, tid=1)
    for ends in ((200, 400), (210, 390)):  # a dispatcher may call it within itself
        job.event("cpu_op", "_c10d_functional::wait_tensor", *ends, tid=3)
    job.event("cpu_op", "aten::add", 450, 700, tid=3)
    job.event("cpu_op", "_c10d_functional::wait_tensor", 460, 600, tid=3)
    run = read(job.write(tmp_path / "rank0.json"))
    computing = run.spans.rows(run.spans.lane == "compute")
    assert computing.start_ns.tolist() == [0, 600_000]
    assert computing.end_ns.tolist() == [500_000, 700_000]


@pytest.mark.parametrize(
    ("whole", "part", "size_bytes"),
    [
        ([192, 2, 384], [96, 2, 384], 192 * 2 * 384 * 4),
        ([4, 2, 96, 64], [2, 2, 96, 64], 4 * 2 * 96 * 64 * 4),
        ([2**40] * 60, [96, 2, 384], 0),  # more than any memory holds
        ([2] * 100_000, [96, 2, 384], 0),
        ([-192, 2, -384], [96, 2, 384], 0),
        ([[192], 2, 384], [96, 2, 384], 0),
        (["192", 2, 384], [96, 2, 384], 0),
        ([], [96, 2, 384], 0),
    ],
)
def test_a_gathering_of_tensors_with_dimensions_has_the_size_of_the_whole(
    tmp_path: Path, whole: list[Any], part: list[int], size_bytes: int
) -> None:
    job = Job(0, 1, distributedInfo={"backend": "gloo", "rank": 0, "world_size": 2})
    job.step(0, 0, 1000)
    floats: dict[str, Any] = {"Input type": ["float", "float"]}
    job.event("cpu_op", "aten::mm", 10, 100, tid=1, **{"Input Dims": [[8, 8], [8, 8]]}, **floats)
    told = {"Input Dims": [whole, part, [], []], **floats}
    job.event("cpu_op", "c10d::_allgather_base_", 195, 200, tid=1, **told)
    given = {"Input Dims": [part], "Input type": ["float"]}
    job.event("user_annotation", "gloo:all_gather", 200, 400, tid=9, **given)
    run = read(job.write(tmp_path / "rank0.json"))
    assert run.collectives.bytes.tolist() == [size_bytes]
    assert any("the size is not told" in text for text in run.missing) == (not size_bytes)


def test_a_rank_that_is_late_is_named_and_waiting_is_no_transfer(tmp_path: Path) -> None:
    found = fullwire.explain(read(two_ranks(tmp_path, late_us=300)))
    assert found.verdict.kind == "straggler"
    assert "Rank 1" in found.verdict.sentence
    first, second = found.ranks
    assert first.waiting_s == pytest.approx(6 * 300e-6)
    assert second.waiting_s == 0


def test_clocks_are_set_by_the_ends_of_collectives(tmp_path: Path) -> None:
    apart = read(two_ranks(tmp_path, late_us=300, clock_us=7_000_000))
    assert "rank 1's was 7 s ahead of rank 0's" in (apart.facts.remarks or "")
    found = fullwire.explain(apart)
    assert found.verdict.kind == "straggler"
    assert found.ranks[0].waiting_s == pytest.approx(6 * 300e-6, abs=6 * 5e-6)


@pytest.mark.parametrize(
    ("hosts", "later_us", "sums", "told"),
    [
        (("a", "a"), 60e6, 0, "trace of rank 1 begins 59.99 s after that of rank 0 ends"),
        (("a", "b"), 60e6, 0, ""),  # clocks of hosts may differ
        (("a", "a"), 60e6, 6, ""),  # so may those of hosts with one name: their sums end together
        (("a", "a"), 2e3, 0, ""),
    ],
)
def test_traces_of_one_host_that_were_taken_at_different_times_are_told(
    tmp_path: Path, hosts: tuple[str, str], later_us: float, sums: int, told: str
) -> None:
    for rank, host in enumerate(hosts):
        job = Job(rank, host_name=host, baseTimeNanoseconds=10**18)
        for number in range(6):
            begin = later_us * rank + 1e3 * number
            job.step(number, begin, begin + 1e3).kernel(GEMM, begin, begin + 900, launch=begin)
            if number < sums:
                job.kernel(
                    ALL_REDUCE, begin + 900, begin + 990, launch=begin, stream=9, **reduced(1_000)
                )
        job.write(tmp_path / f"{rank}.json")
    found = [text for text in read(tmp_path).missing if "may be of several runs" in text]
    assert len(found) == bool(told)
    assert told in " ".join(found)


@pytest.mark.parametrize(("calls", "size", "is_told"), [(4, 1, 0), (3, 1, 0), (2, 1, 1), (4, 2, 1)])
def test_ranks_of_one_group_call_the_same_collectives_or_are_of_several_runs(
    tmp_path: Path, calls: int, size: int, is_told: bool
) -> None:
    """The edges of a trace may lack a collective; half of them are no edge."""
    for rank, (own_calls, own_size) in enumerate(((4, 1), (calls, size))):
        job = Job(rank)
        for step in range(2):
            job.step(step, 1e3 * step, 1e3 * (step + 1))
            for call in range(own_calls):
                begin = 1e3 * step + 200.0 * call
                job.kernel(
                    ALL_REDUCE, begin, begin + 100, launch=begin, **reduced(10_000 * own_size)
                )
        job.write(tmp_path / f"{rank}.json")
    found = [text for text in read(tmp_path).missing if text.endswith("they are of several runs")]
    assert len(found) == is_told


def test_the_base_of_each_trace_counts(tmp_path: Path) -> None:
    for rank, base_ns in ((0, 10**18), (1, 10**18 + 5_000)):
        job = Job(rank, baseTimeNanoseconds=base_ns).step(0, 0, 50)
        job.kernel(GEMM, 10 - 5 * rank, 20 - 5 * rank, launch=1)
        job.write(tmp_path / f"{rank}.json")
    spans = read(tmp_path).spans
    assert spans.start_ns[spans.lane == "compute"].tolist() == [10_000, 10_000]


def test_stamps_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    job = Job(world=1).kernel(GEMM, 0, 5).kernel(GEMM, 1, 2)
    text = job.text().replace('"ts": 0,', '"ts": 1669783687464181.123,', 1)
    text = text.replace('"ts": 1,', '"ts": "1669783687464190.0019",', 1)
    (tmp_path / "a.json").write_text(text)
    assert read(tmp_path / "a.json").spans.start_ns.tolist() == [0, 8_878]


def test_a_device_that_lags_keeps_its_work_in_the_step_that_launched_it(tmp_path: Path) -> None:
    job = Job(world=1)
    for number in range(4):  # the processor runs two steps ahead
        job.step(number, 100 * number, 100 * number + 100)
        job.kernel(GEMM, 250 + 200 * number, 440 + 200 * number, launch=100 * number + 10)
    run = read(job.write(tmp_path / "lag.json"))
    kernels = run.spans.rows(run.spans.lane == "compute")
    marks = run.spans.rows(run.spans.name == "step")
    assert kernels.step.tolist() == [0, 1, 2, 3]
    assert (marks.start_ns[1:] <= kernels.start_ns[1:]).all()
    assert (kernels.end_ns <= marks.end_ns).all()
    account = fullwire.explain(run).detail
    assert account.parts_ns[0, 1:3, 0].tolist() == [190_000, 190_000]


def test_work_launched_before_the_trace_goes_with_its_stream(tmp_path: Path) -> None:
    job = Job(world=1).step(3, 100, 200).step(4, 200, 300)
    job.kernel(GEMM, 90, 120).kernel(GEMM, 130, 140, launch=110).kernel(GEMM, 150, 160)
    run = read(job.write(tmp_path / "early.json"))
    assert run.spans.rows(run.spans.lane == "compute").step.tolist() == [-1, 3, 3]


def test_steps_come_from_the_optimizer_where_there_are_no_marks(tmp_path: Path) -> None:
    job = Job(world=1)
    for number in range(5):
        job.kernel(GEMM, 100 * number + 10, 100 * number + 60, launch=100 * number + 5)
        job.event(
            "user_annotation",
            "Optimizer.step#SGD.step",
            100 * number + 80,
            100 * number + 90,
            tid=1,
        )
    run = read(job.write(tmp_path / "optimizer.json"))
    marks = run.spans.rows(run.spans.name == "step")
    assert marks.step.tolist() == [0, 1, 2, 3]
    assert (marks.end_ns - marks.start_ns).tolist() == [100_000] * 4


def test_without_steps_the_verdict_is_unknown_and_figures_stay(tmp_path: Path) -> None:
    job = Job().kernel(GEMM, 0, 50, launch=0)
    job.kernel(ALL_REDUCE, 40, 90, launch=1, stream=9, **reduced(10))
    found = fullwire.explain(read(job.write(tmp_path / "none.json")))
    assert found.verdict.kind == "unknown"
    assert found.ranks[0].exposed_s == pytest.approx(40e-6)


def test_unknown_long_kernels_are_named_and_a_pattern_settles_them(tmp_path: Path) -> None:
    job = Job().step(0, 0, 100).kernel(GEMM, 0, 30, launch=0)
    job.kernel("void mystery::shuffle<4>(int*)", 30, 90, launch=1)
    path = job.write(tmp_path / "unknown.json")
    before, after = read(path), read(path, communication="mystery::")
    assert "void mystery::shuffle<4>(int*)" in (before.facts.remarks or "")
    assert "60%" not in (after.facts.remarks or "")
    assert fullwire.explain(before).ranks[0].communication_s == 0
    assert fullwire.explain(after).ranks[0].communication_s == pytest.approx(60e-6)
    with pytest.raises(UsageError, match="regular expression"):
        read(path, communication="(")


def test_unknown_kernels_on_a_stream_that_only_communicates_communicate(tmp_path: Path) -> None:
    job = Job().kernel(ALL_REDUCE, 0, 10, stream=9, **reduced(10)).kernel("zyx", 20, 50, stream=9)
    run = read(job.kernel("zyx", 60, 70, stream=7).write(tmp_path / "stream.json"))
    assert run.spans.rows(run.spans.name == "zyx").lane.tolist() == ["communication", "compute"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        (ALL_REDUCE, Known.COMMUNICATES),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", Known.COMMUNICATES),
        ("void deep_ep::internode::dispatch<false, 8>(int4*)", Known.COMMUNICATES),
        ("void dpsk::ep::intranode::combine<bf16>(x)", Known.COMMUNICATES),
        ("nvshmemi_barrier_kernel", Known.COMMUNICATES),
        ("mscclpp::allreduce_packet(void*)", Known.COMMUNICATES),
        ("void vllm::cross_device_reduce_1stage<__half, 8>(RankData*)", Known.COMMUNICATES),
        ("void quickreduce::allreduce_prototype_twoshot<x>(int)", Known.COMMUNICATES),
        ("void c10d::symmetric_memory::barrier_kernel(unsigned int**)", Known.COMMUNICATES),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<x>(T*)", Known.COMMUNICATES),
        ("kuserbuffers_pushrecv(int, int, int*, int*, int)", Known.COMMUNICATES),
        ("mori::moe::EpDispatchIntraNodeKernel(x)", Known.COMMUNICATES),
        ("ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f32(x)", Known.COMMUNICATES),
        ("void flashinfer::allreduce_fusion_kernel_oneshot_lamport<x>(y)", Known.COMMUNICATES),
        ("triton_poi_fused_all_reduce_wait_tensor_3", Known.COMPUTES),
        ("void at::native::reduce_kernel<512, 1>(R)", Known.COMPUTES),
        ("Cijk_Ailk_Bljk_SB_MT64x64x16", Known.COMPUTES),
        ("FuncClosure", Known.NOTHING),
    ],
)
def test_kernels_are_known_by_name(name: str, known: Known) -> None:
    assert kinds_of([name], None).tolist() == [known]


def test_operations_and_types_have_one_name() -> None:
    named = [
        "_allgather_base",
        "nccl:_reduce_scatter_base",
        "ReduceScatter",
        "ALLREDUCE",
        "void aiter::cross_device_reduce_2stage<__half, 8>(RankData*)",
        "x",
    ]
    assert [op_of(name) for name in named] == [
        "allgather",
        "reducescatter",
        "reducescatter",
        "allreduce",
        "allreduce",
        "",
    ]
    assert dtype_of("c10::BFloat16") == ("bfloat16", 2)
    assert dtype_of("Float8_e4m3fn") == ("float8_e4m3fn", 1)
    assert dtype_of("nonsense") == ("", 0)


def test_groups_of_one_name_with_other_members_are_not_matched(tmp_path: Path) -> None:
    for rank in range(4):
        job = Job(rank, world=4).step(0, 0, 100).kernel(GEMM, 0, 10 + rank, launch=1)
        members = "[0, 1]" if rank < 2 else "[2, 3]"
        job.kernel(ALL_REDUCE, 10 + rank, 60, launch=2, stream=9, **reduced(10, "1", members))
        job.write(tmp_path / f"{rank}.json")
    run = read(tmp_path)
    assert sorted(set(run.collectives.group)) == ["1 [0, 1]", "1 [2, 3]"]
    assert [rank.waiting_s for rank in fullwire.explain(run).ranks] == pytest.approx(
        [1e-6, 0, 1e-6, 0]
    )


def test_the_trace_s_own_sequence_wins(tmp_path: Path) -> None:
    for rank in (0, 1):
        job = Job(rank)
        for sequence in (7, 8, 9)[rank:]:  # rank 1 joined the trace one collective later
            job.kernel(
                ALL_REDUCE,
                100 * sequence,
                100 * sequence + 50,
                stream=9,
                **reduced(10, Seq=sequence),
            )
        job.write(tmp_path / f"{rank}.json")
    table = read(tmp_path).collectives
    assert table.sequence.tolist() == [7, 8, 9, 8, 9]


def a_ddp_step(job: Job, number: int) -> None:
    """Add a step of 1 ms: 300 us forward, 400 us backward, two buckets of 4 MB."""
    begin = 1_000 * number
    job.step(number, begin, begin + 1_000).kernel(GEMM, begin, begin + 300, launch=begin)
    name = "autograd::engine::evaluate_function: AddmmBackward0"
    for part in (0, 1):
        launch = begin + 20 + 30 * part
        job.event("cpu_op", name, launch - 5, launch + 20, tid=1)
        job.event("cpu_op", "AddmmBackward0", launch - 4, launch + 19, tid=1)
        job.kernel(GEMM, begin + 300 + 200 * part, begin + 500 + 200 * part, launch=launch)
        sent = begin + 500 + 300 * part
        job.kernel(ALL_REDUCE, sent, sent + 300, launch=launch + 10, stream=9, **reduced(1_000_000))


def test_a_what_if_replays_the_backward_pass_of_a_trace(tmp_path: Path) -> None:
    for rank in (0, 1):
        job = Job(rank)
        for number in range(3, 9):
            a_ddp_step(job, number)
        job.kernel(GEMM, 9_100, 9_200).write(tmp_path / f"{rank}.json")
    run = read(tmp_path)
    table = run.gradients
    first = table.rows((table.rank == 1) & (table.step == 4))
    assert first.ready_ns.tolist() == [1_500_000, 1_700_000]
    assert first.bytes.tolist() == [4_000_000, 4_000_000]
    marks = run.spans.rows(run.spans.name == "backward")
    assert set(marks.end_ns - marks.start_ns) == {400_000}
    predicted = fullwire.whatif(run, bandwidth="100Gbps", workers=2)
    # The second bucket leaves when the first has arrived: 4 MB in 320 us, from 500 us on.
    assert predicted["overhead_s"][0] == pytest.approx(440e-6, rel=0.01)
    assert fullwire.explain(run).ranks[0].compute_s == pytest.approx(6 * 700e-6 + 100e-6)


def test_buckets_that_queue_on_their_stream_are_counted_once(tmp_path: Path) -> None:
    # Two buckets of 4 MB take 8 ms each on 4 Gbps, so the second begins long after the backward
    # pass. A third sum of the step is of a logged loss.
    for rank in (0, 1):
        job = Job(rank)
        for number in range(8):
            begin = 20_000 * number
            job.step(number, begin, begin + 20_000)
            job.kernel(GEMM, begin, begin + 300, launch=begin)
            backward = "autograd::engine::evaluate_function: AddmmBackward0"
            for part in (0, 1):
                launch, ready = begin + 20 + 30 * part, begin + 500 + 200 * part
                job.event("cpu_op", backward, launch - 5, launch + 20, tid=1)
                job.kernel(GEMM, ready - 200, ready, launch=launch)
                sent, of_sum = begin + 500 + 8_000 * part, reduced(1_000_000)
                job.kernel(ALL_REDUCE, sent, sent + 8_000, launch=launch + 10, stream=9, **of_sum)
            ended, of_loss = begin + 16_500, reduced(1)
            job.kernel(ALL_REDUCE, ended, ended + 20, launch=begin + 90, stream=9, **of_loss)
            job.kernel(GEMM, ended, begin + 20_000, launch=begin + 95)
        job.write(tmp_path / f"{rank}.json")
    asked: dict[str, Any] = {"line_rate": "4Gbps", "transport": "measured"}
    table = fullwire.whatif(read(tmp_path), **asked, compression=[1, 2, 4])
    expected_s = np.array([20e-3, 12e-3, 8e-3])  # a sum of half the bytes takes half as long
    assert table["step_s"] == pytest.approx(expected_s, rel=0.03)
    full = fullwire.whatif(read(tmp_path), line_rate="4Gbps", transport="full")
    assert full["step_s"][0] <= 20.1e-3


def test_a_gather_beside_the_sums_does_not_hide_the_transport(tmp_path: Path) -> None:
    """Without sequences in the trace, sums and gathers of a step are both numbered from 0."""
    for rank in (0, 1):
        job = Job(rank)
        for number in range(8):
            begin = 1_000 * number
            a_ddp_step(job, number)
            of_losses = reduced(2) | {"Collective name": "_allgather_base", "In msg nelems": 1}
            job.kernel(
                "ncclDevKernel_AllGather_RING_LL",
                begin + 1_100,
                begin + 1_105,
                launch=begin + 90,
                stream=9,
                **of_losses,
            )
        job.write(tmp_path / f"{rank}.json")
    asked: dict[str, Any] = {"line_rate": "100Gbps", "transport": "measured"}
    table = fullwire.whatif(read(tmp_path), **asked)
    assert table["step_s"][0] == pytest.approx(1.0e-3, rel=0.03)


def test_sizes_that_are_not_told_are_said_and_unexplained(tmp_path: Path) -> None:
    for rank in (0, 1):
        job = Job(rank)
        for number in range(5):
            begin = 100 * number
            job.step(number, begin, begin + 100).kernel(GEMM, begin, begin + 40, launch=begin)
            job.kernel(ALL_REDUCE, begin + 40, begin + 100, launch=begin + 1, stream=9)
        job.write(tmp_path / f"{rank}.json")
    run = read(tmp_path)
    assert "of 10 of 10 collectives the size is not told" in run.missing
    found = fullwire.explain(run, bandwidth="10Gbps")
    assert found.verdict.kind == "unknown"
    assert found.account["unexplained"] == pytest.approx(60e-6)
    assert "Missing: the sizes of 10 of 10 collectives." in found.verdict.sentence


def test_waiting_for_data_is_input(tmp_path: Path) -> None:
    job = Job(world=1).kernel(GEMM, 0, 10, launch=0).kernel(GEMM, 70, 100, launch=65)
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    run = read(job.event("user_annotation", name, 20, 60, tid=1).write(tmp_path / "data.json"))
    assert run.spans.rows(run.spans.lane == "input").start_ns.tolist() == [20_000]


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_trace_cut_anywhere_is_read_as_far_as_it_goes(
    tmp_path: Path, is_compressed: bool
) -> None:
    content = two_ranks(tmp_path).joinpath("trace-0.json").read_bytes()
    whole = read(tmp_path / "trace-0.json").spans
    path = tmp_path / ("cut.json.gz" if is_compressed else "cut.json")
    content = gzip.compress(content) if is_compressed else content
    for end in range(0, len(content), 97):
        path.write_bytes(content[:end])
        try:
            run = read(path)
        except DamagedInput:
            continue
        assert len(run.spans) <= len(whole)
        assert any("ends in the middle" in each or "damaged" in each for each in run.missing)


def test_times_that_cannot_be_are_counted_and_left_out(tmp_path: Path) -> None:
    job = Job(world=1).kernel(GEMM, 0, 10).kernel(GEMM, 20, 10).kernel(GEMM, 30, 40)
    for event, wrong in zip(job.events[2:], (float("nan"),), strict=True):
        event["ts"] = wrong
    run = read(job.write(tmp_path / "wrong.json"))
    assert len(run.spans) == 1
    assert any("2 events lack a possible time" in sentence for sentence in run.missing)


def test_a_rank_given_twice_is_taken_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Job(0, world=1).kernel(GEMM, 0, 10).write(tmp_path / f"{name}.json")
    run = read(tmp_path)
    assert len(run.spans) == 1
    assert any("rank 0 is in" in sentence for sentence in run.missing)


def test_ranks_merged_into_one_file_are_refused(tmp_path: Path) -> None:
    merged = Job().kernel(GEMM, 0, 10, launch=0)
    for event in Job(1).kernel(GEMM, 5, 10, launch=1).events:
        merged.events.append(event | {"pid": "[TP01] 2"})
    with pytest.raises(DamagedInput, match="2 processes launched what is in it"):
        read(merged.write(tmp_path / "merged.json"))


def test_a_bare_list_of_its_events_is_a_trace(tmp_path: Path) -> None:
    job = Job(None).step(0, 0, 100).kernel(GEMM, 10, 40, launch=5)
    job.event("cpu_op", "aten::mm", 4, 6, tid=1)
    meta = {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "python"}}
    sort = {**meta, "name": "process_sort_index", "args": {"sort_index": 5}}
    text = json.dumps([meta, sort, *job.events])
    (tmp_path / "list.json").write_text(f"{text}\n")
    whole, listed = read(job.write(tmp_path / "whole.json")), read(tmp_path / "list.json")
    assert len(listed.spans) == len(whole.spans) == 2
    assert (listed.spans.end_ns == whole.spans.end_ns).all()
    (tmp_path / "list.json").write_text(text[:-40])
    assert any(
        "it ends in the middle" in sentence for sentence in read(tmp_path / "list.json").missing
    )


def test_the_profiler_before_kineto_is_read(tmp_path: Path) -> None:
    """As torch/autograd/profiler_util.py writes it: EventList.export_chrome_trace."""
    cpu, cuda = '"pid": "CPU functions", ', '"pid": "CUDA functions", '
    arrow = '"id": %s, "cat": "cpu_to_cuda", "args": {}}, '
    ran = '{"name": "%s", "ph": "X", "ts": %s, "dur": %s, "tid": %s, %s"args": {}}, '
    text = "["
    for number, (name, start) in enumerate((("aten::mm", 100), ("aten::add", 300))):
        text += ran % (name, start, 50.5, 1, cpu)
        text += f'{{"name": "{name}", "ph": "s", "ts": {start}, "tid": 1, {cpu}{arrow % number}'
        text += f'{{"name": "k", "ph": "f", "ts": {start + 20}, "tid": 0, {cuda}{arrow % number}'
        text += ran % ("k", start + 20, 70.0, 0, cuda)
    (tmp_path / "legacy.json").write_text(text[:-2] + "]")
    run = read(tmp_path / "legacy.json")
    kernels = run.spans.rows(run.spans.lane == "compute")
    assert (kernels.end_ns - kernels.start_ns).tolist() == [70_000, 70_000]
    assert (kernels.start_ns[1] - kernels.start_ns[0]) == 200_000
    (tmp_path / "legacy.json").write_text(text[:200])
    with pytest.raises(DamagedInput, match="not a profiler trace"):
        read(tmp_path / "legacy.json")


def test_a_device_with_a_process_of_its_own_is_one_rank(tmp_path: Path) -> None:
    """In an inference trace, the launches of the device's own process have numbers of their own."""
    trace = Job(None).kernel(GEMM, 0, 10, launch=0).kernel(GEMM, 20, 30, launch=18)
    for event in trace.events[2:]:
        event["pid"] = 4_000_007
    run = read(trace.write(tmp_path / "trace.json"))
    kernels = run.spans.rows(run.spans.lane == "compute")
    assert (kernels.end_ns - kernels.start_ns).tolist() == [10_000, 10_000]
    assert not any("merged" in sentence for sentence in run.missing)


def test_files_without_a_rank_are_taken_as_their_names_count(tmp_path: Path) -> None:
    for number in range(12):
        job = Job(None, world=12).step(0, 0, 100).kernel(GEMM, 0, 10 + number, launch=1)
        job.write(tmp_path / f"worker{number}.json")
    spans = read(tmp_path).spans
    kernels = spans.rows(spans.lane == "compute")
    assert (kernels.end_ns - kernels.start_ns).tolist() == [1_000 * n for n in range(10, 22)]


def test_a_folder_names_the_rank_of_its_only_trace(tmp_path: Path) -> None:
    for folder, name in (("rank5", "a"), ("rank_2", "a"), ("rank7", "a"), ("rank7", "b")):
        (tmp_path / folder).mkdir(exist_ok=True)
        Job(None, world=9).kernel(GEMM, 0, 10).write(tmp_path / folder / f"{name}.json")
    assert sorted(set(read(tmp_path).spans.rank)) == [0, 1, 2, 5]


def test_a_damaged_rank_leaves_the_others(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    (tmp_path / "trace-1.json").write_text("garbage")
    run = read(tmp_path)
    assert set(run.spans.rank) == {0}
    assert any("not a profiler trace" in sentence for sentence in run.missing)


@pytest.mark.parametrize(
    "content",
    [
        b'{"traceEvents": [' + b"[" * 5_000_000,
        b'{"traceEvents": [{"name": ' + b"[" * 5_000_000,
        b'{"schemaVersion": ' + b"{" * 5_000_000,
        b'{"traceEvents": [{"a": 1, ' * 200_000,
        b'{"traceEvents": [{"ph"}]}',
        b'{"traceEvents": 7}',
        b'{"traceEvents": [1, 2]}',
        b'{"traceEvents": null, "distributedInfo": [[[]]]}',
        b'{"distributedInfo": ' + b"[" * 100_000 + b"]" * 100_000 + b', "traceEvents": []}',
    ],
)
def test_hostile_files_are_refused_or_partial(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hostile.json"
    path.write_bytes(content)
    try:
        run = read(path, format="kineto")
    except FullwireError:
        return
    assert run.missing


def test_names_of_any_length_and_bytes_are_held(tmp_path: Path) -> None:
    strange = ["<script>alert(1)</script>", "\x1b[2J", "n" * 10_000, "é" * 3_000, "\ud800", "step"]
    job = Job(world=1)
    for place, name in enumerate(strange):
        job.kernel(name, 10 * place, 10 * place + 5)
    run = read(job.write(tmp_path / "names.json"))
    fullwire.write(run, tmp_path / "names.run")
    assert max(map(len, run.spans.name)) <= 300
    assert "step" not in set(run.spans.name)
    assert fullwire.explain(tmp_path / "names.run").ranks[0].compute_s == pytest.approx(30e-6)


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    packer = zlib.compressobj(9, wbits=31)
    parts = [packer.compress(b'{"traceEvents": [')]
    parts += [packer.compress(b" " * 2**20) for _ in range(256)]
    (tmp_path / "bomb.json.gz").write_bytes(b"".join([*parts, packer.flush()]))
    with pytest.raises(DamagedInput, match="unpacks to over 300 times"):
        read(tmp_path / "bomb.json.gz")


def test_an_endless_value_is_not_collected(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from fullwire._native import KinetoScanner\n"
        "scanner = KinetoScanner(2**20)\n"
        'scanner.feed(b\'{"traceEvents": [{"name": "\')\n'
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for _ in range(300): scanner.feed(b'k' * 2**20)\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "sys.exit(not scanner.damage or grown > 50_000)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_memory_does_not_grow_with_what_is_passed_over(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from fullwire._native import KinetoScanner\n"
        "scanner = KinetoScanner(2**26)\n"
        'event = b\'{"ph":"X","cat":"python_function","name":"f","ts":1,"dur":1},\'\n'
        "scanner.feed(b'{\"traceEvents\": [')\n"
        "chunk = event * 10_000\n"
        "scanner.feed(chunk)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for _ in range(400): scanner.feed(chunk)\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "sys.exit(scanner.events < 4_000_000 or grown > 20_000)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_how_a_file_comes_in_chunks_changes_nothing() -> None:
    from fullwire._native import KinetoScanner

    job = Job().step(0, 0, 100).kernel(ALL_REDUCE, 1, 5, launch=0, **reduced(3))
    content = job.kernel('quote " and \\ back', 5, 9).text().encode()
    whole = KinetoScanner(2**20)
    whole.feed(content)
    source = random.Random(0)
    for _ in range(200):
        scanner, place = KinetoScanner(2**20), 0
        while place < len(content):
            size = source.randint(1, 60)
            scanner.feed(content[place : place + size])
            place += size
        assert scanner.is_whole
        assert scanner.names() == whole.names()
        assert scanner.header() == whole.header()
        for one, other in zip(_tables(scanner), _tables(whole), strict=True):
            assert one.keys() == other.keys()
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])


def test_an_event_of_many_chunks_is_read_wherever_it_stands(tmp_path: Path) -> None:
    job = Job(world=1).kernel(GEMM, 0, 1).kernel("n" * 3_000_000, 1, 2).kernel(GEMM, 2, 3)
    for content in (job.text(), job.text().partition(', {"ph": "X", "cat": "kernel"')[0] + "]}"):
        (tmp_path / "long.json").write_text(content)
        run = read(tmp_path / "long.json")
        assert not run.missing
        assert len(run.spans) == content.count(GEMM) + content.count("nnn" * 1_000_000)


def test_a_job_that_communicates_has_two_ranks_unless_it_says_how_many(tmp_path: Path) -> None:
    untold = Job(None).kernel(GEMM, 0, 50).kernel(ALL_REDUCE, 50, 90, stream=9)
    del untold.header["distributedInfo"]
    found = fullwire.explain(read(untold.write(tmp_path / "untold.json")))
    assert found.ranks[0].waiting_s is None
    alone = Job(world=1).kernel(GEMM, 0, 50).kernel(ALL_REDUCE, 50, 90, stream=9)
    assert read(alone.write(tmp_path / "alone.json")).facts.workers == 1


def test_elements_that_are_none_are_not_told(tmp_path: Path) -> None:
    job = Job().kernel(GEMM, 0, 50).kernel(ALL_REDUCE, 50, 90, stream=9, **reduced(0))
    run = read(job.write(tmp_path / "coalesced.json"))
    assert set(run.collectives.dtype) == {"unknown"}


@pytest.mark.parametrize("duration", ["4099999999999999999999", "1e300", "1.9e15"])
def test_operations_of_damaged_lengths_are_left_out(tmp_path: Path, duration: str) -> None:
    job = Job().step(0, 0, 900)
    for begin in range(10, 70, 10):
        job.event("cpu_op", "aten::addmm", begin, begin + 5, tid=begin, **_DIMENSIONS)
    job.event("cpu_op", "aten::mm", 80, 95, tid=1, **_DIMENSIONS)
    text = job.text().replace('"dur": 5,', f'"dur": {duration},')
    assert duration in text
    path = tmp_path / "damaged.json"
    path.write_text(text)
    operations = read(path).operations
    assert operations.name.tolist() == ["aten::mm"]
    assert operations.busy_ns.tolist() == [15_000]


def _tables(scanner: Any) -> list[dict[str, Any]]:
    return [
        scanner.work(),
        scanner.launches(),
        scanner.operators(),
        scanner.marks(),
        scanner.notes(),
    ]


_SEED = Job().step(0, 0, 100).kernel(ALL_REDUCE, 1, 5, launch=0, stream=9, **reduced(3))
_SEED.kernel(GEMM, 2, 9, launch=1)
_DIMENSIONS = {"Input Dims": [[3, 4], []], "Input type": ["float"]}
_SEED.event("user_annotation", "nccl:all_reduce", 0, 3, tid=1, **_DIMENSIONS)
_BYTES = _SEED.text().encode()
_SPLICES = (
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\\u",
    b"NaN",
    b"-1",
    b"1e999",
    b"9" * 30,
    b"null",
    b"\0",
    b"\xff",
    b'"ts"',
    b'"dur": -5',
    b'"args": [',
    b"true",
    b'"Seq": 5',
    b"[[1,2",
)


@cases(300)
@given(
    st.lists(
        st.tuples(st.integers(0, len(_BYTES)), st.integers(0, 40), st.sampled_from(_SPLICES)),
        max_size=6,
    )
)
def test_any_damage_gives_a_run_or_one_line(
    tmp_path: Path, edits: list[tuple[int, int, bytes]]
) -> None:
    content = _BYTES
    for place, length, splice in edits:
        content = content[:place] + splice + content[place + length :]
    path = tmp_path / "fuzzed.json"
    path.write_bytes(content)
    with contextlib.suppress(FullwireError):
        fullwire.explain(read(path, format="kineto"))


def test_the_scanner_survives_many_damaged_files() -> None:
    code = (
        "import random, sys\n"
        "from fullwire._native import KinetoScanner\n"
        f"content, splices = {_BYTES!r}, {_SPLICES!r}\n"
        "source = random.Random(1)\n"
        f"for _ in range({scaled(100_000)}):\n"
        "    damaged = bytearray(content)\n"
        "    for _ in range(source.randint(1, 4)):\n"
        "        place = source.randrange(len(damaged) + 1)\n"
        "        damaged[place : place + source.randint(0, 20)] = source.choice(splices)\n"
        "    scanner = KinetoScanner(2**20)\n"
        "    scanner.feed(bytes(damaged))\n"
        "    count = len(scanner.names())\n"
        "    assert all(number < count for number in scanner.marks()['name'])\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_commands_take_traces(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    two_ranks(folder, late_us=300)
    done = cli("import", folder, "-o", tmp_path / "job.run")
    assert done.returncode == 0, done.stderr
    told = json.loads(cli("explain", tmp_path / "job.run", "--json").stdout)
    assert told["verdict"]["kind"] == "straggler"
    assert set(told["ranks"][0]) == {
        "rank",
        "span_s",
        "compute_s",
        "communication_s",
        "exposed_s",
        "overlap_s",
        "waiting_s",
        "idle_s",
    }
    shown = cli("show", tmp_path / "job.run")
    assert "imported" in shown.stdout
    bad = cli("import", folder / "trace-0.json", "--communication", "(", "-o", tmp_path / "x.run")
    assert bad.returncode == 2
    assert "Traceback" not in bad.stderr


def many_ranks(
    where: Path,
    ranks: list[int],
    *,
    transfer_us: int,
    host_us: int = 0,
    late_us: int = 0,
    steps: bool = True,
) -> Path:
    """Make the traces of some of four ranks; rank 2 is late, and clocks are seconds apart."""
    length = 600 + late_us + transfer_us + host_us
    for rank in ranks:
        job = Job(rank, world=4, baseTimeNanoseconds=10**15 + 10**9 * rank * rank)
        for number in range(6):
            begin = 1_000 + length * number
            issue = begin + 500 + late_us * (rank == 2)
            if steps:
                job.step(number, begin, begin + length)
            job.kernel(GEMM, begin, issue, launch=begin)
            job.kernel(
                ALL_REDUCE,
                issue,
                begin + 500 + late_us + transfer_us,
                launch=begin + 5,
                stream=9,
                **reduced(1_000_000, members="[0, 1, 2, 3]"),
            )
        job.write(where / f"{rank}.json")
    return where


def test_transfer_of_all_ranks_is_the_network_even_without_a_line_rate(tmp_path: Path) -> None:
    traces = many_ranks(tmp_path, [0, 1, 2, 3], transfer_us=900)
    verdict = fullwire.explain(read(traces)).verdict
    assert verdict.kind == "unknown"
    assert "this is the network and no late rank" in verdict.sentence
    assert verdict.missing == ("the line rate of the links: --line-rate",)
    assert fullwire.explain(read(traces), bandwidth="60Gbps").verdict.kind == "line_rate"
    assert fullwire.explain(read(traces), bandwidth="400Gbps").verdict.kind == "transport"


def test_a_late_rank_is_not_denied_beside_exposed_transfers(tmp_path: Path) -> None:
    traces = many_ranks(tmp_path, [0, 1, 2, 3], transfer_us=900, late_us=300)
    verdict = fullwire.explain(read(traces)).verdict
    assert verdict.kind == "unknown"
    assert "no late rank" not in verdict.sentence
    assert "one rank spends 300 us more of a step by itself" in verdict.sentence


def test_one_rank_of_many_does_not_pretend_to_know_why(tmp_path: Path) -> None:
    alone = fullwire.explain(read(many_ranks(tmp_path, [1], transfer_us=900))).verdict
    assert alone.kind == "unknown"
    assert "Communication is exposed for 900 us of every 1.5 ms step (60.0%)" in alone.sentence
    assert "the other ranks' traces: 1 of 4 ranks are here" in alone.sentence
    busy = fullwire.explain(read(many_ranks(tmp_path, [1], transfer_us=900, host_us=2_000))).verdict
    assert busy.kind == "host"
    assert "exposed for another 25.7%. 1 of 4 ranks cannot tell whether" in busy.sentence
    three = many_ranks(tmp_path, [0, 1, 3], transfer_us=900)
    assert fullwire.explain(read(three)).verdict.kind == "unknown"


@pytest.mark.parametrize("steps", [True, False])
def test_who_is_late_is_said_with_and_without_steps(tmp_path: Path, steps: bool) -> None:
    traces = many_ranks(tmp_path, [0, 1, 2, 3], transfer_us=100, late_us=400, steps=steps)
    found = fullwire.explain(read(traces))
    assert found.verdict.kind == "straggler"
    assert "Rank 2 is late" in found.verdict.sentence
    assert ("of the trace" in found.verdict.sentence) != steps
    assert [round(rank.waiting_s * 1e6) for rank in found.ranks if rank.waiting_s is not None] == [
        2_400,
        2_400,
        0,
        2_400,
    ]


def test_a_launch_inside_a_collective_s_mark_tells_what_an_unknown_kernel_is(
    tmp_path: Path,
) -> None:
    job = Job().step(0, 0, 100).kernel(GEMM, 0, 10, launch=1).kernel("zyx", 20, 50, launch=32)
    job.event("cpu_op", "record_param_comms", 30, 40, tid=1, **reduced(1_000))
    table = read(job.write(tmp_path / "marked.json")).collectives
    assert (table.op.tolist(), table.bytes.tolist()) == (["allreduce"], [4_000])
    assert (table.issue_ns.tolist(), table.end_ns.tolist()) == ([20_000], [50_000])


def test_other_files_of_a_folder_are_no_ranks(tmp_path: Path) -> None:
    traces = two_ranks(tmp_path)
    (traces / "config.json").write_text('{"lr": 0.1}')
    run = read(traces)
    assert set(run.spans.rank) == {0, 1}
    assert any("config.json: not a profiler trace: there is no event" in s for s in run.missing)


def test_one_rank_of_many_says_what_it_leaves_open(shared_data: Path) -> None:
    run = read(shared_data / "kineto/negqueue_rank0_of_16.json.gz")
    found = fullwire.explain(run)
    assert found.verdict.kind == "host"
    assert "exposed for another 16.1%" in found.verdict.sentence
    assert "1 of 16 ranks cannot tell" in found.verdict.sentence
    [copies] = [each for each in found.evidence if each.key == "device_copies"]
    assert 0 < copies.value < found.account["host"] / found.step_s
    predicted = fullwire.whatif(run, bandwidth="100Gbps")
    assert any("some ranks were not recorded" in each for each in predicted.warnings)


def test_of_traces_of_several_jobs_one_job_is_taken(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    Job(2, world=8).kernel(GEMM, 0, 9).write(tmp_path / "other.json")
    Job(None).kernel(GEMM, 0, 9).write(tmp_path / "a.json")
    run = read(tmp_path)
    assert sorted(set(run.spans.rank)) == [0, 1]
    assert run.facts.workers == 2
    said = " ".join(run.missing)
    assert "other.json: it is of a job of 8 ranks, others are of one of 2, so it is left" in said
    assert "a.json: it does not say which rank it is of, as others do, so it is left out" in said


def a_step_of_passes(
    job: Job, number: int, passes: int, *, length: int = 2_000, has_marks: bool = True
) -> None:
    """Add a step whose passes take 300 us each, of which autograd launches 200 us in two kernels.

    A small kernel of another thread lies within each backward pass. The last pass sends 4 MB.
    """
    begin = length * number
    job.step(number, begin, begin + length)
    for one in range(passes):
        start = begin + 300 * one
        job.kernel(GEMM, start, start + 100, launch=start)
        for part in (0, 1):
            launch = start + 100 + 100 * part
            if has_marks:
                name = "autograd::engine::evaluate_function: AddmmBackward0"
                job.event("cpu_op", name, launch - 1, launch + 9, tid=1)
            job.kernel(GEMM, launch, launch + 90, launch=launch)
            job.kernel(GEMM, launch + 91, launch + 94, launch=launch + 20)
    sent = begin + 300 * passes
    launch = sent - 99
    job.kernel(ALL_REDUCE, sent, sent + 300, launch=launch, stream=9, **reduced(1_000_000))


def a_trace_of_passes(
    folder: Path, passes: int, *, length: int = 2_000, has_marks: bool = True, ranks: int = 2
) -> Run:
    """Write a trace of ten steps of so many passes, and import it."""
    folder.mkdir()
    for rank in range(ranks):
        job = Job(rank)
        for number in range(10):
            a_step_of_passes(job, number, passes, length=length, has_marks=has_marks)
        job.write(folder / f"{rank}.json")
    return read(folder)


@pytest.mark.parametrize("passes", [1, 4])
def test_passes_of_a_trace_are_counted_by_autograds_marks(tmp_path: Path, passes: int) -> None:
    one = a_trace_of_passes(tmp_path / "one", 1)
    several = a_trace_of_passes(tmp_path / "several", passes)
    assert passes_of_step(several) == passes
    told = fullwire.compare(one, several)
    assert told.passes == (None if passes == 1 else (1, passes))
    assert told.after_s == pytest.approx(2e-3 / passes, rel=0.01)


def test_steps_of_unknown_passes_are_longer_and_not_slower(tmp_path: Path) -> None:
    one = a_trace_of_passes(tmp_path / "one", 1, length=700, has_marks=False)
    four = a_trace_of_passes(tmp_path / "four", 4, length=1_600, has_marks=False)
    assert passes_of_step(four) is None
    longer, shorter = fullwire.compare(one, four), fullwire.compare(four, one)
    assert longer.has_unknown_passes
    change, unknown = sentences(longer.findings)
    assert change.startswith("Steps are 2.29x longer, more than noise")
    assert unknown == ("How many passes a step has is unknown, so longer steps may be more work.")
    assert sentences(shorter.findings)[0].startswith("Steps are 2.29x shorter, more than noise")
    assert "shorter steps may be less work" in sentences(shorter.findings)[1]
    assert (longer.gate("5%").state, shorter.gate("5%").state) == ("slower", "kept")
    said = longer.gate("5%").sentence
    assert said.startswith("Too slow, unless a step does more work than before (its passes are ")
    assert "unless a step does less work than before" in shorter.gate("5%").sentence


def test_steps_of_unknown_passes_tell_the_gain_from_workers_on_a_condition(tmp_path: Path) -> None:
    two = a_trace_of_passes(tmp_path / "two", 1, length=700, has_marks=False)
    three = a_trace_of_passes(tmp_path / "three", 1, length=700, has_marks=False, ranks=3)
    told = sentences(fullwire.compare(two, three).findings)
    assert any(each.startswith("If a worker's step is as much work as before, w") for each in told)


def test_unknown_passes_of_one_side_are_enough(tmp_path: Path) -> None:
    known = a_trace_of_passes(tmp_path / "known", 1, length=700, has_marks=True)
    hidden = a_trace_of_passes(tmp_path / "hidden", 1, length=1_400, has_marks=False)
    assert fullwire.compare(known, hidden).has_unknown_passes
    assert not fullwire.compare(known, known).has_unknown_passes
