"""Traces of processors, where Gloo's marks name neither their group nor the size of a gathering."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fullwire as fw
from fullwire.importers import read
from fullwire.importers.kineto.fleet import import_kineto
from fullwire.run.run import Run
from fullwire.simulation.groups import members_of
from tests.unit.test_kineto import ALL_REDUCE, GEMM, Job, reduced

STEPS, LAYERS, COMPUTE_US = 6, 4, 3_000
ACTIVATIONS, WEIGHTS = [64, 1_000], [500, 1_000]  # of one layer, on one rank
BACKWARD = "autograd::engine::evaluate_function: "


def groups_of(rank: int, *, described: bool = True) -> list[dict[str, Any]]:
    """Return the groups of a mesh of two by two ranks, as a trace lists them."""
    of_rank = [("default_pg", [0, 1, 2, 3])]
    of_rank.append(("mesh_dp", [0, 2] if rank % 2 == 0 else [1, 3]))
    of_rank.append(("mesh_tp", [0, 1] if rank < 2 else [2, 3]))
    return [
        {
            "pg_name": str(number),
            "pg_desc": name if described else "undefined" if number else name,
            "pg_size": len(ranks),
            "ranks": ranks,
        }
        for number, (name, ranks) in enumerate(of_rank)
    ]


class Rank:
    """The trace of one rank, whose clock goes on with each event."""

    def __init__(self, rank: int, world: int, rate_bps: float, **info: Any) -> None:
        told = {"backend": "gloo", "rank": rank, "world_size": world} | info
        self.job = Job(rank, distributedInfo=told, deviceProperties=[], host_name=f"host{rank}")
        self.rate_bps = rate_bps
        self.now_us = 0.0
        self.calls: Counter[tuple[int, int]] = Counter()  # by the threads of a group

    def compute(self, name: str, length_us: float) -> None:
        """Compute in one operator."""
        self.job.event("cpu_op", name, self.now_us, self.now_us + length_us, tid=1)
        self.now_us += length_us

    def wait(self, op: str, sizes: list[int], threads: tuple[int, int], within: str = "") -> None:
        """Call a collective, and wait for it; its operator lasts as long if it has one."""
        sent_bytes = 4 * math.prod(sizes)  # of a sum among two ranks, as much as its tensor
        begin, end = self.now_us + 20, self.now_us + 20 + 8e6 * sent_bytes / self.rate_bps
        if within:
            self.job.event("cpu_op", within, self.now_us, end + 10, tid=1)
            self.job.event("cpu_op", f"c10d::{op}_", begin - 10, begin, tid=1)
        told: dict[str, Any] = {"Input Dims": [sizes], "Input type": ["float"]}
        thread = threads[self.calls[threads] % 2]
        self.calls[threads] += 1
        self.job.event("user_annotation", f"gloo:{op}", begin, end, tid=thread, **told)
        self.now_us = end + 10


def split_and_summed(
    folder: Path, rate_bps: float, *, described: bool = True, late_us: float | None = None
) -> float:
    """Write the traces of a tensor and data parallel job; return the time of a step.

    All ranks sum a loss, which takes no time. If `late_us` is given, they do not: the ranks of one
    half of the data then begin every other step's sums of gradients so much later.
    """
    folder.mkdir()
    for number in range(4):
        rank = Rank(number, 4, rate_bps, pg_config=groups_of(number, described=described))
        for step in range(STEPS):
            began = rank.now_us
            for _ in range(LAYERS):
                rank.compute("aten::addmm", COMPUTE_US)
                rank.wait("all_reduce", ACTIVATIONS, (105, 106), "ReduceFrom")
            for _ in range(LAYERS):
                rank.compute(f"{BACKWARD}AddmmBackward0", 2 * COMPUTE_US)
                rank.wait("all_reduce", ACTIVATIONS, (105, 106), f"{BACKWARD}CopyToBackward")
            if late_us is None:
                rank.wait("all_reduce", [1 + step % 2], (90, 91))
            rank.now_us += (late_us or 0.0) * ((step + number) % 2)
            for _ in range(LAYERS):
                rank.wait("all_reduce", WEIGHTS, (101, 102))
            rank.now_us += (late_us or 0.0) * ((step + number + 1) % 2)
            rank.job.step(step, began, rank.now_us)
        rank.job.write(folder / f"rank{number}.json")
    return (rank.now_us - began) * 1e-6


def computing_s(run: Run) -> float:
    """Return what a rank computes in a step."""
    computing = run.spans.rows((run.spans.lane == "compute") & (run.spans.rank == 0))
    return float((computing.end_ns - computing.start_ns).sum()) * 1e-9 / STEPS


def test_a_wait_within_an_operator_for_a_collective_that_it_called_is_no_computing(
    tmp_path: Path,
) -> None:
    split_and_summed(tmp_path / "job", 1e9)
    run = read(tmp_path / "job")
    assert computing_s(run) == pytest.approx(3 * LAYERS * COMPUTE_US * 1e-6, rel=0.03)
    assert fw.explain(run, bandwidth="1Gbps").verdict.kind == "line_rate"


def computed_s(place: Path, length_us: int, *events: tuple[str, str, int, int]) -> float:
    """Return the computing in steps of these events: kind, name, beginning and end in us."""
    rank = Rank(0, 2, 1e9)
    for step in range(STEPS):
        began = rank.now_us
        for kind, name, start_us, end_us in events:
            thread = 9 if kind == "user_annotation" else 1
            rank.job.event(kind, name, began + start_us, began + end_us, tid=thread)
        rank.job.step(step, began, began + length_us)
        rank.now_us += length_us
    return computing_s(read(rank.job.write(place / "rank0.json")))


def test_an_operator_that_calls_a_collective_and_goes_on_computes(tmp_path: Path) -> None:
    found = computed_s(
        tmp_path,
        1_000,
        ("cpu_op", "Ahead", 0, 1_000),
        ("cpu_op", "c10d::allreduce_", 100, 110),
        ("user_annotation", "gloo:all_reduce", 120, 900),
        ("cpu_op", "aten::mm", 115, 700),
        ("cpu_op", "aten::add", 705, 1_000),
    )
    assert found == pytest.approx(1e-3)


def test_an_operator_that_goes_on_long_after_a_collective_computes_beside_it(
    tmp_path: Path,
) -> None:
    """It runs no operators: a compiled region, or one of the user's own."""
    found = computed_s(
        tmp_path,
        6_000,
        ("cpu_op", "Ahead", 0, 5_000),
        ("cpu_op", "c10d::allreduce_", 100, 110),
        ("user_annotation", "gloo:all_reduce", 120, 4_000),
    )
    assert found == pytest.approx(5e-3)


def test_a_wait_begins_when_the_outer_one_of_two_calls_returns(tmp_path: Path) -> None:
    """A call may hand its collective on to another group by a call of its own."""
    found = computed_s(
        tmp_path,
        6_000,
        ("cpu_op", "Layer", 0, 5_000),
        ("cpu_op", "c10d::allreduce_", 100, 1_000),
        ("cpu_op", "c10d::broadcast_", 200, 210),
        ("user_annotation", "gloo:all_reduce", 1_000, 5_000),
        ("cpu_op", "aten::add", 5_500, 6_000),
    )
    assert found == pytest.approx(1.5e-3)


@pytest.mark.parametrize("described", [True, False])
def test_the_threads_of_gloo_tell_the_groups_of_its_marks(tmp_path: Path, described: bool) -> None:
    """A prediction takes each group's own ranks: two exchange fewer bytes than four."""
    split_and_summed(tmp_path / "job", 1e9, described=described)
    run = read(tmp_path / "job")
    assert sorted(members_of(run).values()) == [2, 2, 2, 2, 4]
    for rate, rate_bps in (("200Mbps", 2e8), ("5Gbps", 5e9)):
        wanted_s = split_and_summed(tmp_path / rate, rate_bps)
        [row] = fw.whatif(run, bandwidth=rate).rows()
        assert row["step_s"] == pytest.approx(wanted_s, rel=0.05)


def test_a_few_ranks_tell_the_size_of_groups_that_are_described(tmp_path: Path) -> None:
    split_and_summed(tmp_path / "job", 1e9)
    whole, first = read(tmp_path / "job"), read(tmp_path / "job" / "rank0.json")
    assert members_of(first) == {"0": 4, "1": 2, "2": 2}
    [row], [wanted] = (fw.whatif(run, bandwidth="200Mbps").rows() for run in (first, whole))
    assert row["step_s"] == pytest.approx(wanted["step_s"], rel=0.01)


@pytest.mark.parametrize("size", ["²", "0", "1", "5", "9" * 5_000])
def test_groups_of_sizes_that_cannot_be_have_all_workers(tmp_path: Path, size: str) -> None:
    split_and_summed(tmp_path / "job", 1e9)
    run = read(tmp_path / "job" / "rank0.json")
    run = replace(run, facts=replace(run.facts, groups=f"mesh_tp {size}, mesh_dp 2"))
    assert members_of(run) == {"0": 4, "1": 2, "2": 4}


@pytest.mark.parametrize(
    ("threads", "groups"),
    [
        ([101, 102, 105, 106], [""] * 4),  # the default group may be one of them
        ([90, 91, 101, 102, 105, 106], ["0", "0", "1", "1", "2", "2"]),
        ([90, 101, 102, 105, 106], ["0", "1", "1", "2", "2"]),  # one of two had nothing to do
        ([90, 91, 101, 105, 106], ["0", "0", "1", "2", "2"]),
        ([90, 101, 105, 106], [""] * 4),  # two had nothing to do, of any group
        ([101, 105, 107], [""] * 3),
        ([101, 102], ["", ""]),  # of which group, nothing tells
        ([90, 91, 95, 96, 101, 102, 105, 106], [""] * 8),  # more than there are
        (["a", "b", "c", "d"], [""] * 4),
    ],
)
def test_threads_that_fit_no_order_of_groups_leave_marks_without_one(
    tmp_path: Path, threads: list[Any], groups: list[str]
) -> None:
    told = {"backend": "gloo", "rank": 0, "world_size": 4, "pg_config": groups_of(0)}
    job = Job(0, distributedInfo=told, deviceProperties=[])
    job.step(0, 0, 10_000).event("cpu_op", "aten::mm", 0, 5_000, tid=1)
    for place, thread in enumerate(threads):
        begin = 5_000 + 100 * place
        given = {"Input Dims": [[1_000 + place]], "Input type": ["float"]}
        job.event("user_annotation", "gloo:all_reduce", begin, begin + 50, tid=thread, **given)
    run = read(job.write(tmp_path / "rank0.json"))
    assert run.collectives.group.tolist() == groups


def test_sends_lie_on_a_thread_of_no_group_and_leave_all_marks_without_one(tmp_path: Path) -> None:
    """Pipelines send from their main thread. Of a group with another number, one is idle."""
    for sends in (0, 1):
        rank = Rank(0, 4, 1e9, pg_config=groups_of(0))
        for _ in range(2):
            for pair in [(90, 91), (101, 102), (105, 106)][sends:]:
                rank.wait("all_reduce", [64, 1_000], pair)
            for op in ("send", "recv")[: 2 * sends]:
                rank.wait(op, [64, 1_000], (1, 1))
        rank.job.step(0, 0, rank.now_us)
        run = read(rank.job.write(tmp_path / f"rank{sends}.json"))
        assert set(run.collectives.group.tolist()) == ({""} if sends else {"0", "1", "2"})


@pytest.mark.parametrize(("late_us", "groups"), [(40_000, {"1", "2"}), (0, {""})])
def test_ranks_that_are_not_in_step_tell_that_the_default_group_is_idle(
    tmp_path: Path, late_us: float, groups: set[str]
) -> None:
    """In step, they may sum in the default group, while the one of the data is idle."""
    split_and_summed(tmp_path / "job", 1e9, late_us=late_us)
    run = read(tmp_path / "job")
    assert {name.partition(" ")[0] for name in run.collectives.group.tolist()} == groups
    files = sorted((tmp_path / "job").iterdir())
    written = import_kineto([tmp_path / "job"], files, tmp_path / "job.run", processes=2)
    assert members_of(read(written)) == members_of(run)


def renumbered(folder: Path, rank: int, threads: dict[int, int]) -> None:
    """Give the marks on some threads of a rank to others; those on thread 0 are left out."""
    file = folder / f"rank{rank}.json"
    told = json.loads(file.read_text())
    for event in told["traceEvents"]:
        event["tid"] = threads.get(event["tid"], event["tid"])
    told["traceEvents"] = [event for event in told["traceEvents"] if event["tid"]]
    file.write_text(json.dumps(told))


def test_threads_that_another_process_comes_between_are_of_one_group_if_all_have_much_to_do(
    tmp_path: Path,
) -> None:
    split_and_summed(tmp_path / "job", 1e9, late_us=40_000)
    renumbered(tmp_path / "job", 2, {102: 103})
    assert set(members_of(read(tmp_path / "job")).values()) == {2}


def test_marks_of_all_ranks_have_groups_or_those_of_none(tmp_path: Path) -> None:
    """A collective has the same group on each of its ranks."""
    split_and_summed(tmp_path / "job", 1e9)
    renumbered(tmp_path / "job", 3, {90: 0, 91: 0})  # so any of its groups may be idle
    assert members_of(read(tmp_path / "job")) == {"": 4}


@pytest.mark.parametrize(
    ("threads", "ranks"),
    [([(105, 106)], 2), ([(101, 102), (105, 106)], 2), ([], 4)],
)
def test_a_gathering_into_a_list_has_the_parts_of_all_ranks_of_its_group(
    tmp_path: Path, threads: list[tuple[int, int]], ranks: int
) -> None:
    """No event shows the list's tensors, so the group tells how many they are."""
    listed = (
        groups_of(0) if len(threads) == 2 else groups_of(0)[2:] if threads else groups_of(0)[:1]
    )
    rank = Rank(0, 4, 1e9, pg_config=listed)
    rank.compute("aten::mm", 1_000)
    if len(threads) == 2:  # all groups are in use, so their threads tell them
        rank.wait("barrier", [], (90, 90))
    for pair in threads or [(90, 91)]:
        rank.wait("all_gather", [64, 1_000], pair, "Gather")
        rank.wait("all_gather", [64, 1_000], pair, "Gather")
    rank.job.step(0, 0, rank.now_us)
    run = read(rank.job.write(tmp_path / "rank0.json"))
    gathers = run.collectives.rows(run.collectives.op == "allgather")
    assert set(gathers.bytes.tolist()) == {ranks * 64 * 1_000 * 4}


def with_shapes(job: Job, folder: Path) -> Run:
    """Read a trace with the sizes of its layers' sums, and of gradients that have others."""
    for event in job.events:
        if event["name"] == "torch::autograd::AccumulateGrad":
            event["args"] = {"Input Dims": [WEIGHTS], "Input type": ["float"]}
        elif event["name"] == "c10d::all_reduce_":
            event["name"] = "c10d::allreduce_"
            event["args"] = {"Input Dims": [[ACTIVATIONS], [], []], "Input type": []}
    return read(job.write(folder / f"rank{job.header['distributedInfo']['rank']}.json"))


@pytest.mark.parametrize("also", ["nothing", "flat bucket", "send"])
def test_sums_of_tensors_that_no_gradient_has_the_sizes_of_are_no_gradients(
    tmp_path: Path, also: str
) -> None:
    """Layers that gather their outputs sum in the backward pass alone.

    A flat bucket of as many elements may be summed, too. In a pipeline, the later stages alone make
    gradients of their inputs, which have the sizes of the layers' sums.
    """
    for number in range(2):
        rank = Rank(number, 2, 1e9, pg_config=groups_of(0)[2:])
        for step in range(STEPS):
            began = rank.now_us
            for _ in range(LAYERS):
                rank.compute("aten::addmm", COMPUTE_US)
                rank.wait("all_gather", [64, 500], (105, 106), "Gather")
            for _ in range(LAYERS):
                rank.compute(f"{BACKWARD}AddmmBackward0", 2 * COMPUTE_US)
                rank.wait("all_reduce", ACTIVATIONS, (105, 106), f"{BACKWARD}CopyToBackward")
                rank.compute("torch::autograd::AccumulateGrad", 50)
            if also == "flat bucket":
                called: dict[str, Any] = {"Input Dims": [[[64_000]], [], []], "Input type": []}
                at = rank.now_us, rank.now_us + 10
                rank.job.event("cpu_op", "c10d::allreduce_", *at, tid=1, **called)
                rank.wait("all_reduce", [64_000], (105, 106))
            elif also == "send":
                rank.wait("send", [1], (1, 1))
            rank.job.step(step, began, rank.now_us)
        with_shapes(rank.job, tmp_path)
    run = read(tmp_path)
    assert (len(run.gradients) == 0) == (also == "nothing")
    if also != "send":
        [row] = fw.whatif(run, bandwidth="1Gbps").rows()
        assert row["step_s"] == pytest.approx((rank.now_us - began) * 1e-6, rel=0.02)


def test_sizes_tell_only_all_reduces_of_processors_from_gradients(tmp_path: Path) -> None:
    """Devices' gradients may be summed in other pieces, and a scatter has its own input."""
    job = Job(0, 2)
    for step in range(STEPS):
        began = 10_000 * step
        job.event("cpu_op", f"{BACKWARD}AddmmBackward0", began + 10, began + 2_000, tid=1)
        job.kernel(GEMM, began + 100, began + 5_000, launch=began + 20)
        job.kernel(ALL_REDUCE, began + 5_000, began + 6_000, launch=began + 30, **reduced(64_000))
        job.event("cpu_op", "torch::autograd::AccumulateGrad", began + 40, began + 50, tid=1)
        job.event("cpu_op", "c10d::all_reduce_", began + 25, began + 35, tid=1)
        job.step(step, began, began + 7_000)
    assert len(with_shapes(job, tmp_path).gradients) == STEPS


def bucketed(folder: Path, rate_bps: float) -> float:
    """Write the traces of a data-parallel job whose buckets queue; return the time of a step."""
    folder.mkdir()
    values, send_us = 500_000, 8e6 * 4 * 500_000 / rate_bps
    for number in range(2):
        job = Job(number, distributedInfo={"backend": "gloo", "rank": number, "world_size": 2})
        job.header |= {"deviceProperties": [], "host_name": f"host{number}"}
        now = 0.0
        for step in range(STEPS):
            began, free = now, 0.0
            job.event("cpu_op", "aten::addmm", now, now + LAYERS * COMPUTE_US, tid=1)
            now += LAYERS * COMPUTE_US
            for bucket in range(LAYERS):
                length = 2 * COMPUTE_US
                job.event("cpu_op", f"{BACKWARD}AddmmBackward0", now, now + length, tid=1)
                now += length
                called = {"Input Dims": [[[values]], [], []], "Input type": []}
                job.event("cpu_op", "c10d::allreduce_", now - 20, now - 10, tid=1, **called)
                begin = free = max(now, free)
                free += send_us
                told: dict[str, Any] = {"Input Dims": [[values]], "Input type": ["float"]}
                mark = "gloo:all_reduce", begin, free
                job.event("user_annotation", *mark, tid=105 + bucket % 2, **told)
            now = free
            job.step(step, began, now)
        job.write(folder / f"rank{number}.json")
    return (now - began) * 1e-6


def test_buckets_that_wait_for_the_link_are_gradients_from_their_call(tmp_path: Path) -> None:
    """On a slow link, most of them begin long after the backward pass."""
    bucketed(tmp_path / "slow", 1e8)
    run = read(tmp_path / "slow")
    assert len(run.gradients) == 2 * STEPS * LAYERS
    for rate, rate_bps in (("100Mbps", 1e8), ("10Gbps", 1e10)):
        [row] = fw.whatif(run, bandwidth=rate).rows()
        assert row["step_s"] == pytest.approx(bucketed(tmp_path / rate, rate_bps), rel=0.03)


def test_ranks_whose_waits_move_from_step_to_step_are_predicted(tmp_path: Path) -> None:
    """In each step, half of the ranks wait for layers less than the mean of all ranks."""
    for number in range(4):
        rank = Rank(number, 4, 1e10, pg_config=groups_of(number))
        for step in range(STEPS):
            began = rank.now_us
            rank.rate_bps = 1e10 if (step + number // 2) % 2 else 2.8e8
            for name, split in (("aten::addmm", "ReduceFrom"), (f"{BACKWARD}X", f"{BACKWARD}Y")):
                for _ in range(LAYERS):
                    rank.compute(name, COMPUTE_US)
                    rank.wait("all_reduce", ACTIVATIONS, (105, 106), split)
            rank.rate_bps = 8e6 * 4 * math.prod(WEIGHTS) / (began + 140_000 - rank.now_us)
            rank.wait("all_reduce", WEIGHTS, (101, 102))
            rank.wait("all_reduce", [1], (90, 91))
            rank.job.step(step, began, rank.now_us)
        rank.job.write(tmp_path / f"rank{number}.json")
    [row] = fw.whatif(tmp_path, bandwidth="200Mbps").rows()
    assert row["step_s"] == pytest.approx(0.186, rel=0.2)
