"""Groups of a trace: how many ranks each has, and how much of a link their sums use."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fullwire as fw
from fullwire.errors import FullwireError
from fullwire.importers import read
from fullwire.run.facts import Facts
from fullwire.run.process_groups import listed_name, told_ranks
from fullwire.simulation.groups import members_of
from tests.jobs_by_hand import a_trained_job
from tests.unit.test_kineto import ALL_REDUCE, GEMM, Job, reduced
from tests.unit.test_stages import (
    Played,
    all_forward_first,
    batched,
    by_turns,
    in_batches,
    in_chunks,
    sharded_stage,
    stage,
)
from tests.unit.test_traced_gradients import (
    BACKWARD,
    SIZE,
    Part,
    played,
    split,
    split_and_summed,
    traced,
)

WORKERS, LAYERS, VALUES, GRADIENTS = 8, 4, 1_000_000, 2_500_000
# The bits of a step on a link: two ranks sum each layer twice, and four sum the gradients.
BITS = 32 * (2 * LAYERS * VALUES + 1.5 * GRADIENTS)
NAMED = {"Process Group Name", "Process Group Ranks"}


def traced_alone(where: Path, without: set[str]) -> fw.Run:
    """Trace rank 0 of a model that is split over two ranks, at 100 Gbps, without some arguments."""
    job = Job(0, WORKERS)

    def summed(begin: float, launch: float, values: int, members: list[int]) -> float:
        told: dict[str, Any] = reduced(values, str(len(members)), str(members))
        told |= {"Group size": len(members)}
        long_us = 2 * (len(members) - 1) / len(members) * 32e-5 * values
        job.kernel(
            ALL_REDUCE,
            begin,
            begin + long_us,
            launch=launch,
            stream=8 + len(members),
            **{name: value for name, value in told.items() if name not in without},
        )
        return begin + long_us

    for number in range(6):
        begin = now = 10_000.0 * number
        launch = begin
        for is_backward in (False, True):
            for _ in range(LAYERS):
                job.kernel(GEMM, now, now + 500, launch=launch)
                if is_backward:
                    job.event("cpu_op", BACKWARD, launch - 0.1, launch + 0.8, tid=1)
                now = summed(now + 500, launch + 2, VALUES, [0, 1])
                launch += 4
        now = summed(now, launch - 3, GRADIENTS, [0, 2, 4, 6])
        job.step(number, begin, now)
    job.write(where / "rank0.json")
    return read(where)


def exchanged(*, sums: bool) -> Iterator[Part]:
    """Yield a step whose layers exchange their experts' inputs and outputs, of unlike sizes."""
    for is_backward, long_us in ((False, 200), (True, 400)):
        for layer in range(LAYERS):
            for turn in (1, 2):
                yield "work", is_backward, long_us
                yield "send", "all_to_all", "1", "values", 8 * turn * SIZE // (4 + layer)
                yield "wait", "values"
    yield "work", True, 100
    if sums:
        yield "send", "allreduce", "2", "gradients"
        yield "wait", "gradients"
    yield "work", False, 50


@pytest.mark.parametrize("sums", [True, False])
def test_experts_wait_for_what_they_exchange_in_both_passes(tmp_path: Path, sums: bool) -> None:
    program = partial(exchanged, sums=sums)
    run = traced(tmp_path, program, 200)
    assert fw.explain(run, bandwidth="200Gbps").verdict.kind == "line_rate"
    rates_gbps = (50, 100, 400)
    rates = [f"{rate}Gbps" for rate in rates_gbps]
    table = fw.whatif(run, line_rate="200Gbps", transport="full", bandwidth=rates)
    expected = [played(program(), rate) * 1e-6 for rate in rates_gbps]
    assert table["step_s"].tolist() == pytest.approx(expected, rel=0.01)


def split_stage(rank: int, replicas: int = 1) -> Iterator[Part]:
    """Yield a step of a stage of two (1F1B): pairs of ranks sum each layer, and so do replicas."""
    place, batches = rank // (2 * replicas), 4
    ranks = (rank // 2 * 2, rank // 2 * 2 + 1)
    alike = tuple(2 * (replicas * place + each) + rank % 2 for each in range(replicas))

    def passed(is_backward: bool, batch: int) -> Iterator[Part]:
        other = rank + 2 * replicas if place == 0 else rank - 2 * replicas
        if is_backward == (place == 0):
            yield "send", "recv", (is_backward, batch), (other, rank), 2 * SIZE
            yield "wait", (is_backward, batch)
        for layer in range(2):
            yield "work", is_backward, 600 if is_backward else 300
            yield "send", "allreduce", (is_backward, batch, layer), ranks, SIZE // 2
            yield "wait", (is_backward, batch, layer)
            if is_backward and batch == batches - 1 and replicas > 1:
                yield "send", "allreduce", ("gradients", layer), alike, 2 * SIZE
        if is_backward != (place == 0):
            yield "send", "send", (is_backward, batch, "on"), (rank, other), 2 * SIZE

    yield from by_turns(passed, batches, 1 - place)
    if replicas > 1:
        yield "wait", ("gradients", 1)
    yield "work", False, 100
    yield "send", "allreduce", "norm", tuple(range(4 * replicas)), 4
    yield "wait", "norm"


@pytest.mark.parametrize("recorded_gbps", [20, 100])
def test_a_stage_sends_what_its_ranks_have_summed(tmp_path: Path, recorded_gbps: int) -> None:
    def at_rate(rate_gbps: int) -> Played:
        return Played(rate_gbps, programs=[split_stage(rank) for rank in range(4)])

    run, line = at_rate(recorded_gbps).traced(tmp_path), f"{recorded_gbps}Gbps"
    rates_gbps = (10, 50, 400)
    rates = [f"{rate}Gbps" for rate in rates_gbps]
    for transport in ("measured", "full"):
        table = fw.whatif(run, line_rate=line, transport=transport, bandwidth=rates)
        for row, rate_gbps in enumerate(rates_gbps):
            step_s = at_rate(rate_gbps).length_us * 1e-6  # of which 10 us for each message
            assert table["step_s"][row] == pytest.approx(step_s, rel=0.045)


def test_a_written_step_of_stages_split_over_ranks_has_no_other_t1(tmp_path: Path) -> None:
    programs = [split_stage(rank, replicas=2) for rank in range(8)]
    run = Played(100, programs=programs).traced(tmp_path)
    asked: dict[str, Any] = {"line_rate": "100Gbps", "transport": "full"}
    written = fw.replay(run, bandwidth="25Gbps", **asked)
    direct = fw.whatif(run, bandwidth=["25Gbps", "400Gbps"], **asked)
    found = fw.explain(written)
    assert found.step_s == pytest.approx(direct["step_s"][0])
    assert found.baseline_step_s == pytest.approx(direct["baseline_step_s"][0])
    again = fw.whatif(written, bandwidth=["25Gbps", "400Gbps"], transport="full")
    assert again["step_s"].tolist() == pytest.approx(direct["step_s"].tolist(), rel=0.01)


@pytest.mark.parametrize("asked_gbps", [1, 5, 25])
def test_buckets_of_written_stages_wait_for_the_sums_of_layers_before_them(
    tmp_path: Path, asked_gbps: int
) -> None:
    def at_rate(rate_gbps: int) -> Played:
        return Played(rate_gbps, programs=[split_stage(rank, replicas=2) for rank in range(8)])

    run = at_rate(2).traced(tmp_path)
    asked: dict[str, Any] = {"line_rate": "2Gbps", "transport": "full"}
    written = fw.replay(run, bandwidth=f"{asked_gbps}Gbps", **asked)
    direct = fw.whatif(run, bandwidth=f"{asked_gbps}Gbps", **asked)
    assert fw.explain(written).step_s == pytest.approx(direct["step_s"][0])
    rates_gbps = (1, 5, 25, 400)
    rates = [f"{rate}Gbps" for rate in rates_gbps]
    again = fw.whatif(written, bandwidth=rates, transport="full")
    assert again["baseline_step_s"][0] == pytest.approx(direct["baseline_step_s"][0])
    for row, rate_gbps in enumerate(rates_gbps):
        step_s = at_rate(rate_gbps).length_us * 1e-6
        assert again["step_s"][row] == pytest.approx(step_s, rel=0.03)


def test_a_written_pipeline_keeps_a_transport_that_fills_little_of_the_line(
    tmp_path: Path,
) -> None:
    run = Played(100, programs=[in_chunks(rank) for rank in range(4)]).traced(tmp_path)
    asked: dict[str, Any] = {"line_rate": "400Gbps", "bandwidth": "400Gbps"}
    written = fw.replay(run, transport="measured", **asked)
    of_trace, of_written = fw.explain(run, bandwidth="400Gbps"), fw.explain(written)
    assert of_written.verdict.kind == of_trace.verdict.kind == "transport"
    assert of_written.account["bubble"] == pytest.approx(of_trace.account["bubble"], rel=0.05)
    direct = fw.whatif(run, line_rate="400Gbps", bandwidth="200Gbps", transport="full")
    again = fw.whatif(written, bandwidth="200Gbps", transport="full")
    assert again["step_s"][0] == pytest.approx(direct["step_s"][0], rel=0.002)


def test_a_written_pipeline_waits_for_late_ranks_and_does_not_compute_then(tmp_path: Path) -> None:
    programs = [all_forward_first(rank, 4) for rank in range(4)]
    run = Played(100, programs=programs).traced(tmp_path)
    asked: dict[str, Any] = {"line_rate": "100Gbps", "bandwidth": "25Gbps"}
    asked["jitter"] = "lognormal:5%"
    written, table = fw.replay(run, **asked), fw.whatif(run, **asked)
    found = fw.explain(written)
    assert found.step_s == pytest.approx(table["step_s"][0])
    assert found.baseline_step_s == pytest.approx(table["baseline_step_s"][0])
    on_time = fw.whatif(run, **asked | {"jitter": "none"})["step_s"][0]
    assert found.account["straggler"] == pytest.approx(table["step_s"][0] - on_time)


def test_written_stages_of_shards_keep_them_among_more_workers(tmp_path: Path) -> None:
    run = Played(100, programs=[sharded_stage(rank) for rank in range(4)]).traced(tmp_path)
    written = fw.replay(run, line_rate="100Gbps", bandwidth="25Gbps", workers=8)
    assert ">" not in str(written.facts.groups)
    again = fw.whatif(written, bandwidth="25Gbps")
    assert again["step_s"][0] == pytest.approx(fw.explain(written).step_s, rel=0.002)


def test_a_name_with_a_comma_tells_the_size_of_its_group() -> None:
    told = told_ranks(Facts(groups=f"{listed_name('rows, then columns')} 4"))
    assert told("rows, then columns") == 4


@pytest.mark.parametrize(
    "without", [set(), {"Process Group Name"}, NAMED], ids=["named", "without a name", "neither"]
)
def test_the_sums_of_one_ranks_trace_tell_the_ranks_of_their_groups(
    tmp_path: Path, without: set[str]
) -> None:
    run = traced_alone(tmp_path, without)
    assert sorted(members_of(run).values()) == [2, 4]
    found = fw.explain(run, bandwidth="100Gbps")
    assert not any("line rate" in str(warning) for warning in found.warnings)
    rates_gbps = (50, 100, 400)
    rates = [f"{rate}Gbps" for rate in rates_gbps]
    table = fw.whatif(run, line_rate="100Gbps", transport="full", bandwidth=rates)
    for row, rate_gbps in enumerate(rates_gbps):
        sent_s = BITS / (rate_gbps * 1e9)
        step_s = 2 * LAYERS * 500e-6 + sent_s
        assert table["step_s"][row] == pytest.approx(step_s, rel=0.01)
        assert table["network_utilization"][row] == pytest.approx(sent_s / step_s, rel=0.01)


def test_sums_of_layers_use_the_link_beside_those_of_gradients(tmp_path: Path) -> None:
    run = traced(tmp_path, split_and_summed, 400)
    table = fw.whatif(run, line_rate="400Gbps", transport="full", bandwidth=["200Gbps", "400Gbps"])
    # Eight sums of layers and four of gradients, of 32 Mbit each.
    sent_s = 12 * 32e6 / table["bandwidth_bps"]
    expected = (sent_s / table["step_s"]).tolist()
    assert table["network_utilization"].tolist() == pytest.approx(expected, rel=0.01)


def without_transfers(rank: int) -> list[Part]:
    """Return the step of a stage that is split over ranks and replicas, and is the only one."""
    parts = split_stage(rank, replicas=2)
    names = [part for part in parts if part[:2] not in {("send", "send"), ("send", "recv")}]
    return [
        part
        for part in names
        if part[0] != "wait" or len(part[1]) != 2 or part[1][0] not in {True, False}
    ]


@pytest.mark.parametrize("kept", [(0, 1, 2, 3), (0,)], ids=["half", "one"])
@pytest.mark.parametrize("without", [set(), NAMED], ids=["named", "without names"])
def test_groups_of_several_sizes_that_share_a_name_keep_theirs(
    tmp_path: Path, kept: tuple[int, ...], without: set[str]
) -> None:
    def at_rate(rate_gbps: int) -> Played:
        return Played(rate_gbps, programs=[iter(without_transfers(rank)) for rank in range(8)])

    for rank in kept:
        job = at_rate(100).jobs[rank]
        for event in job.events:
            for name in without:
                event["args"].pop(name, None)
        job.write(tmp_path / f"{rank}.json")
    run = read(tmp_path)
    assert set(members_of(run).values()) == {2, 8}
    rates = ["10Gbps", "100Gbps"]
    table = fw.whatif(run, line_rate="100Gbps", transport="full", bandwidth=rates)
    expected = [at_rate(rate).length_us * 1e-6 for rate in (10, 100)]
    assert table["step_s"].tolist() == pytest.approx(expected, rel=0.03)


def test_a_transfer_is_not_listed_with_the_size_of_its_pipeline(tmp_path: Path) -> None:
    pipeline = Played(100, programs=[in_batches(rank, 4, 8) for rank in range(4)])
    for rank in (1, 2):
        batched(pipeline.jobs[rank])
        for event in pipeline.jobs[rank].events:
            if event["args"].get("Collective name") in ("send", "recv"):
                event["args"] |= {"Process Group Name": "9", "Group size": 4}
        pipeline.jobs[rank].write(tmp_path / f"{rank}.json")
    run = read(tmp_path)
    assert ">" not in (run.facts.groups or "")
    assert {size for name, size in members_of(run).items() if ">" in name} == {2}


def test_a_batch_after_one_without_a_launch_does_not_get_its_transfers(tmp_path: Path) -> None:
    def rows_of(where: Path, lost: slice) -> Counter[Any]:
        pipeline = Played(100, programs=[in_batches(rank, 4, 8) for rank in range(4)])
        for job in pipeline.jobs:
            batched(job)
        events = pipeline.jobs[1].events
        kernels = [each for each in events if "SendRecv" in each["name"]]
        numbers = {each["args"]["correlation"] for each in kernels if each["cat"] == "kernel"}
        launches = [each for each in events if each["cat"] == "cuda_runtime"]
        launches = [each for each in launches if each["args"].get("correlation") in numbers]
        for launch in sorted(launches, key=lambda each: float(each["ts"]))[lost]:
            events.remove(launch)
        where.mkdir()
        rows = pipeline.traced(where).collectives
        rows = rows.rows((rows.rank == 1) & (rows.dtype != "unknown"))
        return Counter(zip(rows.op, rows.group, rows.issue_ns.tolist(), strict=True))

    of_all = rows_of(tmp_path / "all", slice(0))
    for first in range(3):
        told = rows_of(tmp_path / str(first), slice(first, None, 11))
        assert told <= of_all
        assert told.total() > of_all.total() // 2


def test_a_rank_that_takes_a_transfer_sends_nothing(tmp_path: Path) -> None:
    run = Played(10, programs=[stage(rank, 2, 8, 2, 1.0) for rank in range(4)]).traced(tmp_path)
    table = fw.whatif(run, line_rate="10Gbps", transport="full", bandwidth="10Gbps")
    rows = run.collectives.rows((run.collectives.rank == 0) & (run.collectives.step == 2))
    sent_s = 8e-10 * int(rows.bytes[rows.op != "recv"].sum())  # two ranks send as much for a sum
    assert table["network_utilization"][0] == pytest.approx(sent_s / table["step_s"][0], rel=0.02)


def test_layers_within_a_node_use_none_of_its_nics(tmp_path: Path) -> None:
    run = traced(tmp_path, split_and_summed, 100)
    table = fw.whatif(run, line_rate="100Gbps", cluster="dgx-h100", nodes=[1, 2])
    assert table["network_utilization"][0] == 0
    assert 0 < table["network_utilization"][1] < 1


def test_groups_of_some_ranks_are_said_to_use_the_links_asked_for(tmp_path: Path) -> None:
    """Inside a node they would not, and the answer for slow links rested on that silently."""
    run = traced_alone(tmp_path, set())
    told = "links asked for. If a group is inside one node, its links are faster"
    assert any(told in note for note in fw.whatif(run, bandwidth="10Gbps").warnings)
    apart = Facts(hosts=",".join(f"n{rank}" for rank in range(WORKERS)))
    on_hosts = dataclasses.replace(run, facts=run.facts | apart)
    notes = fw.whatif(on_hosts, bandwidth="10Gbps").warnings
    assert not any("links asked for" in note for note in notes)
    whole = fw.whatif(a_trained_job(), bandwidth="10Gbps")
    assert not any("links asked for" in note for note in whole.warnings)


def test_sums_among_all_ranks_that_would_need_more_than_the_step_are_refused(
    tmp_path: Path,
) -> None:
    run = traced(tmp_path, split, 100)
    with pytest.raises(FullwireError, match=r"would need the link for \S+ times the step"):
        fw.whatif(run, line_rate="10Gbps", transport="measured", bandwidth="10Gbps")
