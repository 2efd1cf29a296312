"""Gathers and scatters of shards beside the layers that need them: traces played at other rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.importers import read
from fullwire.run.run import Provenance, Run
from fullwire.simulation.beside_layers import Course
from fullwire.simulation.typical import typical_step
from tests.unit.test_kineto import GEMM, Job, reduced
from tests.unit.test_traced_gradients import (
    BACKWARD,
    KERNELS,
    LAYERS,
    SIZE,
    STEPS,
    Part,
    played,
    sharded,
    traced,
)

MEASURED: dict[str, Any] = {"line_rate": "100Gbps", "transport": "measured"}


def gathered_late() -> Iterator[Part]:
    """Yield a step that gathers each layer when it begins, behind the scatter of the one before."""
    for is_backward in (False, True):
        for layer in range(LAYERS):
            yield "send", "_allgather_base", "1", (is_backward, layer)
            yield "wait", (is_backward, layer)
            yield "work", is_backward, 400 if is_backward else 200
            if is_backward:
                yield "send", "_reduce_scatter_base", "1", "gradients"
    yield "wait", "gradients"
    yield "work", False, 50


def of_unlike_layers() -> Iterator[Part]:
    """Yield a sharded step whose layers have a third, once and twice the work."""
    times = iter([1 / 3, 1, 2, 1, 1, 2, 1, 1 / 3])
    for part in sharded():
        is_layer = part[0] == "work" and part[2] > 50
        yield (*part[:2], part[2] * next(times)) if is_layer else part


def with_rests(rest_us: float) -> Iterator[Part]:
    """Yield a sharded step whose kernels are launched late, beside the gather of the next layer."""
    for part in sharded():
        if part[0] == "work" and part[2] > 50:
            yield "rest", rest_us
        yield part


PARTS = {"ahead": sharded, "late": gathered_late, "unlike": of_unlike_layers}


@pytest.mark.parametrize("recorded_gbps", [40, 100])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_faster_link_hides_what_the_layers_leave_room_for(
    tmp_path: Path, parts: Any, recorded_gbps: int
) -> None:
    run = traced(tmp_path, parts, recorded_gbps)
    rates_gbps = (25, recorded_gbps, 60, 200, 400)
    asked = MEASURED | {"line_rate": f"{recorded_gbps}Gbps"}
    table = fw.whatif(run, **asked, bandwidth=[f"{rate}Gbps" for rate in rates_gbps])
    for row, rate_gbps in enumerate(rates_gbps):
        step_s = played(parts(), rate_gbps) * 1e-6
        assert table["step_s"][row] == pytest.approx(step_s, rel=0.06)
        low_s, high_s = (ends[row] for ends in table.interval_s)
        assert low_s <= step_s <= high_s


@pytest.mark.parametrize(
    ("rest_us", "recorded_gbps", "rate_gbps"),
    [(60, 100, 400), (60, 40, 200), (140, 400, 100)],  # in the last, gathers end in the rests
)
def test_a_rest_beside_a_gather_stays_on_another_link(
    tmp_path: Path, rest_us: float, recorded_gbps: int, rate_gbps: int
) -> None:
    run = traced(tmp_path, lambda: with_rests(rest_us), recorded_gbps)
    asked = MEASURED | {"line_rate": f"{recorded_gbps}Gbps"}
    table = fw.whatif(run, **asked, bandwidth=f"{rate_gbps}Gbps")
    step_s = played(with_rests(rest_us), rate_gbps) * 1e-6
    assert table["step_s"][0] == pytest.approx(step_s, rel=0.05)
    assert table.interval_s[0][0] <= step_s <= table.interval_s[1][0]


def test_a_rest_beside_a_gather_is_the_same_at_each_speed_of_a_grid(tmp_path: Path) -> None:
    run = traced(tmp_path, lambda: with_rests(60))
    speeds = [0.5, 2.0]
    grid = fw.whatif(run, **MEASURED, compute_speed=speeds)
    for row, speed in enumerate(speeds):
        point = fw.whatif(run, **MEASURED, compute_speed=speed)
        assert grid["step_s"][row] == point["step_s"][0]


def test_an_interval_holds_contention_of_kernels_that_never_ran_alone(tmp_path: Path) -> None:
    run = traced(tmp_path, sharded, 60)
    ends_s = {}
    for compared in (1.0, 0.4):
        told = {"kernels_compared_share": compared, "kernels_slowed_share": 0.0}
        pairs: dict[str, Any] = {name: ((0, share), (1, share)) for name, share in told.items()}
        changed = dataclasses.replace(run, facts=dataclasses.replace(run.facts, **pairs))
        asked = MEASURED | {"line_rate": "60Gbps", "bandwidth": ["60Gbps", "400Gbps"]}
        ends_s[compared] = fw.whatif(changed, **asked).interval_s
    (low_s, high_s), (open_low_s, open_high_s) = ends_s.values()
    assert open_low_s[0] == pytest.approx(low_s[0])  # as recorded, the step is known
    assert open_low_s[1] < 0.97 * low_s[1]
    assert open_high_s == pytest.approx(high_s)


def test_a_recording_without_the_devices_own_times_has_an_interval_for_all_that_may_hide(
    tmp_path: Path,
) -> None:
    run = traced(tmp_path, sharded, 40)
    recorded = dataclasses.replace(run, provenance=Provenance(origin="measured", source="job"))
    step = typical_step(recorded)
    assert step.others.sum_gradients
    assert step.others.course is None
    table = fw.whatif(recorded, line_rate="40Gbps", transport="measured", bandwidth="100Gbps")
    step_s = played(sharded(), 100) * 1e-6
    assert table["step_s"][0] > 1.05 * step_s
    low_s, high_s = table.interval_s
    assert low_s[0] <= step_s <= high_s[0]


def in_lockstep(where: Path, times: tuple[float, float], gather_us: float) -> float:
    """Write the traces of two ranks that compute so many times as long as usual.

    Each layer waits for its gather. Return the length of a step in microseconds.
    """
    jobs, began, together = [Job(rank) for rank in (0, 1)], 0.0, 0.0
    layers = [(False, 200)] * LAYERS + [(True, 400)] * LAYERS
    for number in range(STEPS):
        began, now = together, [together, together]
        launch = began
        for is_backward, long_us in layers:
            ops = ["_allgather_base", "_reduce_scatter_base"][: 1 + is_backward]
            for op in ops:
                end = max(now) + gather_us
                for rank, job in enumerate(jobs):
                    more = {"In msg nelems": SIZE // 8} if op == ops[0] else {}
                    more |= {"Out msg nelems": SIZE // 8} if op != ops[0] else {}
                    args = reduced(SIZE // 4, "1") | {"Collective name": op} | more
                    job.kernel(KERNELS[op], now[rank], end, launch=launch, stream=9, **args)
                    now[rank] = end
                    if op == ops[0]:
                        of_layer = end + long_us * times[rank]
                        job.kernel(GEMM, end, of_layer, launch=launch + 0.2)
                        if is_backward:
                            mark = launch + 0.1, launch + 1
                            job.event("cpu_op", BACKWARD, *mark, tid=1)
                        now[rank] = of_layer
                launch += 1.5
        together = max(now)
        for job in jobs:
            job.step(number, began, together)
    for rank, job in enumerate(jobs):
        job.write(where / f"{rank}.json")
    return together - began


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_stays_late_on_a_faster_link(tmp_path: Path, late: int) -> None:
    times = (1.3, 1.0) if late == 0 else (1.0, 1.3)
    for place in ("before", "after"):
        (tmp_path / place).mkdir()
    in_lockstep(tmp_path / "before", times, 160)
    step_us = in_lockstep(tmp_path / "after", times, 40)
    table = fw.whatif(read(tmp_path / "before"), **MEASURED, bandwidth="400Gbps")
    assert table["step_s"][0] == pytest.approx(step_us * 1e-6, rel=0.03)


def scattered_at_the_end(where: Path, times: tuple[float, float], rate_gbps: float) -> float:
    """Write the traces of two ranks like `in_lockstep`, which gather all parameters at once.

    The scatters queue up beside the backward pass, and end after it.
    """
    jobs, together, began = [Job(rank) for rank in (0, 1)], 0.0, 0.0
    long_us = SIZE * 4e-3 / rate_gbps
    for number in range(STEPS):
        began = free = together
        now = [began, began]
        for layer in range(2 * LAYERS + 1):
            is_backward, is_last = layer >= LAYERS, layer == 2 * LAYERS
            launch = began + 2 * layer
            for rank, job in enumerate(jobs):
                end = now[rank] + (400 if is_backward else 200) * times[rank]
                if not is_last:
                    job.kernel(GEMM, now[rank], end, launch=launch)
                    now[rank] = end
                    if is_backward:
                        job.event("cpu_op", BACKWARD, launch - 0.1, launch + 0.8, tid=1)
            if is_backward:
                op = "_allgather_base" if is_last else "_reduce_scatter_base"
                size = {"In msg nelems" if is_last else "Out msg nelems": SIZE // 8}
                args = reduced(SIZE // 4, "1") | {"Collective name": op} | size
                end = max(free, *now) + long_us
                for rank, job in enumerate(jobs):
                    begin = max(now[rank], free)
                    job.kernel(KERNELS[op], begin, end, launch=launch, stream=9, **args)
                free = end
        together = free
        for job in jobs:
            job.step(number, began, together)
    for rank, job in enumerate(jobs):
        job.write(where / f"{rank}.json")
    return together - began


@pytest.mark.parametrize("rate_gbps", [50, 400])
def test_a_late_rank_whose_scatters_end_after_its_pass_is_late_once(
    tmp_path: Path, rate_gbps: int
) -> None:
    for place in ("before", "after"):
        (tmp_path / place).mkdir()
    scattered_at_the_end(tmp_path / "before", (1.0, 1.3), 25)
    step_us = scattered_at_the_end(tmp_path / "after", (1.0, 1.3), rate_gbps)
    asked = MEASURED | {"line_rate": "25Gbps", "bandwidth": f"{rate_gbps}Gbps"}
    table = fw.whatif(read(tmp_path / "before"), **asked)
    assert table["step_s"][0] == pytest.approx(step_us * 1e-6, rel=0.03)
    assert table.interval_s[0][0] <= step_us * 1e-6 <= table.interval_s[1][0]


def hybrid() -> Iterator[Part]:
    """Yield a sharded step in which another group adds up the shards."""
    for part in sharded():
        yield part
        if part[:2] == ("send", "_reduce_scatter_base"):
            yield "wait", "gradients"
            yield "send", "allreduce", "2", "gradients", SIZE // 2


def test_a_sum_of_shards_waits_for_the_scatter_that_it_adds_up(tmp_path: Path) -> None:
    others = typical_step(traced(tmp_path, hybrid)).others
    assert isinstance(others.course, Course)
    issued = {place: share for share, place, is_needed in others.course.events if not is_needed}
    scatters = [issued[place] for place, op in enumerate(others.op) if op == "reducescatter"]
    assert [issued[place] for place, op in enumerate(others.op) if op == "allreduce"] == scatters


@pytest.mark.parametrize("parts", [sharded, hybrid])
def test_the_link_carries_the_gathers_and_scatters_of_a_sharded_step(
    tmp_path: Path, parts: Any
) -> None:
    run = traced(tmp_path, parts, 25)
    table = fw.whatif(run, line_rate="25Gbps", transport="measured", workers=[1, 2])
    others = typical_step(run).others
    # Of two ranks each sends a half in a gather or a scatter, and the whole in a sum.
    sent_bytes = sum(
        size if op == "allreduce" else size / 2
        for op, size in zip(others.op, others.bytes, strict=True)
    )
    used = min(sent_bytes * 8 / 25e9 / table["step_s"][1], 1)  # two groups send at once here
    assert used > 0.85
    assert table["network_utilization"] == pytest.approx([0, used], rel=0.01)


def test_a_model_whose_shards_another_group_adds_up_is_predicted_on_a_cluster(
    tmp_path: Path,
) -> None:
    """Ranks 0 and 1, and 2 and 3, hold the model together. Ranks 0 and 2, and 1 and 3, add up."""
    for rank in range(4):
        job = Job(rank, 4)
        played(hybrid(), 100, job)
        for event in job.events:
            group = event["args"].get("Process Group Name")
            if group is not None:
                members = sorted((rank, rank ^ (1 if group == "1" else 2)))
                event["args"]["Process Group Name"] = f"{group}{members[0]}"
                event["args"]["Process Group Ranks"] = str(members)
        job.write(tmp_path / f"{rank}.json")
    run = read(tmp_path)
    assert typical_step(run).others.shards == 2
    table = fw.whatif(run, line_rate="100Gbps", cluster="dgx-h100", nodes=2)
    assert table["workers"].tolist() == [16]


def test_the_course_of_some_collectives_leaves_out_the_events_of_others(tmp_path: Path) -> None:
    others = typical_step(traced(tmp_path, sharded)).others
    assert others.course is not None
    last = len(others.op) - 1
    joined = others.joined([last - 1, last])
    assert isinstance(joined.course, Course)
    assert {place for _, place, _ in joined.course.events} == set(range(last))
    each_s = [np.array(1e-4)] * last
    assert joined.course.stalled_s(each_s, 1e-3) >= 0


def of_one_rank(run: Run) -> Run:
    tables = {
        name: getattr(run, name).rows(getattr(run, name).rank == 0)
        for name in ("spans", "gradients", "collectives")
    }
    return dataclasses.replace(run, **tables)


def test_a_rank_without_computing_paces_no_others(tmp_path: Path) -> None:
    run = traced(tmp_path, sharded)
    spans = run.spans.rows((run.spans.rank == 0) | (run.spans.lane == "host"))
    step = typical_step(dataclasses.replace(run, spans=spans))
    assert step.others.exposed_ns == typical_step(of_one_rank(run)).others.exposed_ns


def gathered_afterwards() -> Iterator[Part]:
    """Yield a step that scatters gradients, and gathers what its optimizer has changed (ZeRO-2)."""
    yield "work", False, 800
    for _ in range(4):
        yield "work", True, 400
        yield "send", "_reduce_scatter_base", "1", "gradients", 2 * SIZE
    yield "wait", "gradients"
    yield "work", False, 50
    for _ in range(2):
        yield "send", "_allgather_base", "1", "parameters", 4 * SIZE
        yield "wait", "parameters"


@pytest.mark.parametrize(
    ("parts", "recorded_gbps"),
    [(sharded, 60), (gathered_late, 100), (gathered_afterwards, 100)],
)
def test_a_written_prediction_of_shards_predicts_as_the_trace_does(
    tmp_path: Path, parts: Any, recorded_gbps: int
) -> None:
    run = traced(tmp_path, parts, recorded_gbps)
    line, rates = f"{recorded_gbps}Gbps", ["25Gbps", "100Gbps", "200Gbps", "400Gbps"]
    direct = fw.whatif(run, line_rate=line, bandwidth=rates, transport="full")
    for transport in ("measured", "full"):
        written = fw.replay(run, line_rate=line, bandwidth="100Gbps", transport=transport)
        again = fw.whatif(written, bandwidth=rates, transport="full")
        assert again["step_s"].tolist() == pytest.approx(direct["step_s"].tolist(), rel=0.03)
        [step_s] = fw.whatif(run, line_rate=line, bandwidth="100Gbps", transport=transport)[
            "step_s"
        ].tolist()
        found = fw.explain(written)
        assert found.step_s == pytest.approx(step_s)
        assert found.baseline_step_s == pytest.approx(direct["baseline_step_s"][0], rel=0.01)
