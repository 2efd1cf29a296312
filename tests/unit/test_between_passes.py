"""Traces of jobs that sum gradients in each pass of a step, as DDP does without `no_sync`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.verification import verify
from fullwire.importers import read
from fullwire.importers.kineto.fleet import import_kineto
from fullwire.run.facts import Facts
from fullwire.run.run import Run
from tests.unit.test_kineto import Job
from tests.unit.test_traced_gradients import LAYERS, STEPS, Part, played, traced

MEASURED: dict[str, Any] = {"transport": "measured"}


def summed_in(sends: Sequence[bool], *, waits: bool = True) -> Iterator[Part]:
    """Yield a step whose passes have a bucket for each layer, or send nothing."""
    for number, sends_here in enumerate(sends):
        yield "work", False, 200 * LAYERS
        for _ in range(LAYERS):
            yield "work", True, 400
            if sends_here:
                yield "send", "allreduce", "1", ("gradients", number)
        if sends_here and (waits or number == len(sends) - 1):
            yield "wait", ("gradients", number)
    yield "work", False, 50


def accumulated(passes: int, *, in_each: bool = True, waits: bool = True) -> Iterator[Part]:
    """Yield a step of some passes, with a bucket for each layer in each pass or in the last."""
    return summed_in([*[in_each] * (passes - 1), True], waits=waits)


def of_accumulated(where: Path, rate_gbps: float = 100, **of_step: Any) -> Run:
    where.mkdir(exist_ok=True)
    return traced(where, partial(accumulated, **of_step), rate_gbps)


def true_s(rate_gbps: float, **of_step: Any) -> float:
    return played(accumulated(**of_step), rate_gbps) * 1e-6


@pytest.mark.parametrize("passes", [2, 4])
@pytest.mark.parametrize("recorded_gbps", [20, 100])
def test_each_pass_of_a_traced_step_waits_for_its_own_sums(
    tmp_path: Path, passes: int, recorded_gbps: int
) -> None:
    run = of_accumulated(tmp_path, recorded_gbps, passes=passes)
    rates_gbps = (30, recorded_gbps, 60, 200, 400)
    asked = MEASURED | {"line_rate": f"{recorded_gbps}Gbps"}
    table = fw.whatif(run, **asked, bandwidth=[f"{rate}Gbps" for rate in rates_gbps])
    for row, rate_gbps in enumerate(rates_gbps):
        step_s = true_s(rate_gbps, passes=passes)
        assert table["step_s"][row] == pytest.approx(step_s, rel=0.04)
        low_s, high_s = (ends[row] for ends in table.interval_s)
        assert low_s <= step_s <= high_s


@pytest.mark.parametrize(
    "sends", [(True, False), (True, False, True), (False, True, False)], ids=str
)
@pytest.mark.parametrize("lane", ["fifo", "priority"])
def test_a_pass_without_sums_waits_for_those_of_the_pass_before(
    tmp_path: Path, sends: Sequence[bool], lane: str
) -> None:
    run = traced(tmp_path, partial(summed_in, sends), 20)
    asked = MEASURED | {"line_rate": "20Gbps", "lane": lane}
    rates_gbps = (20, 40, 100)
    table = fw.whatif(run, **asked, bandwidth=[f"{rate}Gbps" for rate in rates_gbps])
    for row, rate_gbps in enumerate(rates_gbps):
        step_s = played(summed_in(sends), rate_gbps) * 1e-6
        if lane == "fifo" or not sends[-1]:
            assert table["step_s"][row] == pytest.approx(step_s, rel=0.03)
        else:  # the next forward waits for a part of the last sums alone
            assert table["step_s"][row] <= step_s
    replayed = fw.replay(run, **asked, bandwidth="40Gbps")
    assert fw.explain(replayed).step_s == pytest.approx(table["step_s"][1], rel=0.01)
    assert fw.explain(run, bandwidth="20Gbps").fixes


def test_passes_that_do_not_wait_let_their_sums_go_beside_the_next_pass(tmp_path: Path) -> None:
    run = of_accumulated(tmp_path, 20, passes=3, waits=False)
    table = fw.whatif(run, **MEASURED, line_rate="20Gbps", bandwidth="40Gbps")
    step_s = true_s(40, passes=3, waits=False)
    assert table["step_s"][0] == pytest.approx(step_s, rel=0.03)


@pytest.mark.parametrize("lane", ["fifo", "priority"])
def test_buckets_of_one_pass_hold_no_gradients_of_the_next(tmp_path: Path, lane: str) -> None:
    run = of_accumulated(tmp_path, passes=2)
    asked = MEASURED | {"line_rate": "100Gbps", "lane": lane}
    rows = fw.whatif(run, **asked, buckets=["none", "ddp:1GiB"])["step_s"]
    pass_s = 1e-6 * (200 + 400 + 320) * LAYERS  # all of its sums after it
    assert rows[1] == pytest.approx(2 * pass_s + 50e-6, rel=0.03)
    assert rows[0] < 0.9 * rows[1]


def summed_at_the_end(buckets: int) -> Iterator[Part]:
    """Yield a step of four passes, of which the last sums 40 MB in so many buckets."""
    for number in range(4):
        yield "work", False, 200 * LAYERS
        for layer in range(1, LAYERS + 1):
            yield "work", True, 400
            if number == 3 and layer * buckets % LAYERS == 0:
                yield "send", "allreduce", "1", "gradients", 40_000_000 // buckets
    yield "wait", "gradients"
    yield "work", False, 50


def test_gradients_of_a_sum_at_the_end_are_of_the_last_pass(tmp_path: Path) -> None:
    run = traced(tmp_path, partial(summed_at_the_end, 1), 20)
    asked = MEASURED | {"line_rate": "20Gbps", "buckets": "ddp:20MB"}
    step_s = played(summed_at_the_end(2), 20) * 1e-6
    assert fw.whatif(run, **asked)["step_s"][0] == pytest.approx(step_s, rel=0.02)


def test_speeds_of_a_grid_with_passes_equal_its_points(tmp_path: Path) -> None:
    run = of_accumulated(tmp_path, passes=2)
    asked = MEASURED | {"line_rate": "100Gbps"}
    grid = fw.whatif(run, **asked, compute_speed=[0.5, 2.0])
    for row, speed in enumerate((0.5, 2.0)):
        assert grid["step_s"][row] == fw.whatif(run, **asked, compute_speed=speed)["step_s"][0]


def test_one_sum_for_all_passes_of_a_traced_step_is_predicted_and_verified(tmp_path: Path) -> None:
    each = of_accumulated(tmp_path / "each", 20, passes=4)
    once = of_accumulated(tmp_path / "once", 20, passes=4, in_each=False)
    once_s = true_s(20, passes=4, in_each=False)
    fixes = {fix.kind: fix for fix in fw.explain(each, bandwidth="20Gbps").fixes}
    assert fixes["accumulation"].step_s == pytest.approx(once_s, rel=0.03)
    assert fixes["accumulation"].risk == "exact"
    assert not {"synchronisation", "straggler"} & set(fixes)
    assert "accumulation" not in {fix.kind for fix in fw.explain(once, bandwidth="20Gbps").fixes}
    assert fw.compare(each, once).ratio == pytest.approx(once_s / true_s(20, passes=4), rel=0.01)
    line = Facts(line_rate_bps=2e10)
    found = verify(*(replace(run, facts=run.facts | line) for run in (each, once)))
    assert found is not None
    assert found.low_s <= once_s <= found.high_s


def test_a_written_prediction_of_passes_predicts_as_the_trace_does(tmp_path: Path) -> None:
    run = of_accumulated(tmp_path, 20, passes=3)
    rates = ["10Gbps", "40Gbps", "100Gbps"]
    direct = fw.whatif(run, line_rate="20Gbps", bandwidth=rates, transport="full")
    written = fw.replay(run, line_rate="20Gbps", bandwidth="40Gbps", transport="full")
    found = fw.explain(written)
    assert found.baseline_step_s == pytest.approx(3 * LAYERS * 600e-6 + 50e-6, rel=0.01)
    again = fw.whatif(written, bandwidth=rates, transport="full")
    assert again["step_s"].tolist() == pytest.approx(direct["step_s"].tolist(), rel=0.01)


def marked(passes: int, *, in_each: bool, each_steps: bool = False) -> Iterator[Part]:
    """Yield the same with a mark of the profiler for each pass, and one optimizer or several."""
    waited = 0
    for part in accumulated(passes, in_each=in_each):
        if part[:2] == ("work", False) and part[2] > 50:
            waited += 1
            if waited > 1:
                if each_steps:
                    yield ("optimizer",)
                yield ("mark",)
        yield part
    yield ("optimizer",)


@pytest.mark.parametrize("in_each", [True, False])
def test_marks_of_passes_make_one_step_up_to_the_optimizer(tmp_path: Path, in_each: bool) -> None:
    run = traced(tmp_path, partial(marked, 3, in_each=in_each), 20)
    plain = of_accumulated(tmp_path / "plain", 20, passes=3, in_each=in_each)
    assert len(np.unique(run.spans.step)) == len(np.unique(plain.spans.step))
    assert run.facts.marked_passes == 3
    assert "the optimizer runs once in 3 of the profiler's marks" in (run.facts.remarks or "")
    for told, known in zip(
        *(fw.explain(each).account.items() for each in (run, plain)), strict=True
    ):
        assert told[1] == pytest.approx(known[1], rel=0.01)
    asked = MEASURED | {"line_rate": "20Gbps", "bandwidth": "40Gbps"}
    step_s = fw.whatif(plain, **asked)["step_s"][0]
    assert fw.whatif(run, **asked)["step_s"][0] == pytest.approx(step_s, rel=0.01)


@pytest.mark.parametrize("short", ["ends early", "lacks optimizers"])
@pytest.mark.parametrize("written", [False, True], ids=["read", "imported"])
def test_all_ranks_make_their_steps_of_as_many_marks(
    tmp_path: Path, short: str, written: bool
) -> None:
    step_us = true_s(20, passes=3, in_each=False) * 1e6
    for rank in (0, 1):
        job = Job(rank)
        played(marked(3, in_each=False), 20, job)
        if rank and short == "ends early":  # so one optimizer is seen
            job.events = [each for each in job.events if each["ts"] + each["dur"] <= 1.9 * step_us]
        elif rank:
            job.events = [each for each in job.events if not each["name"].startswith("Optimizer")]
        job.write(tmp_path / f"{rank}.json")
    files = sorted(tmp_path.glob("*.json"))
    run = read(tmp_path)
    if written:
        run = fw.read(import_kineto(files, files, tmp_path / "written"))
    marks = run.spans.rows((run.spans.lane == "host") & (run.spans.name == "step"))
    lengths_us = (marks.end_ns - marks.start_ns) / 1000
    assert lengths_us.tolist() == pytest.approx([step_us] * len(marks), rel=0.001)
    assert set(marks.rank.tolist()) == {0, 1}
    assert "clocks" not in (run.facts.remarks or "")
    found = fw.explain(run, bandwidth="20Gbps")
    assert found.step_s == pytest.approx(step_us * 1e-6, rel=0.001)
    assert "unexplained" not in {name for name, part_s in found.account.items() if part_s}
    asked = MEASURED | {"line_rate": "20Gbps", "bandwidth": "20Gbps"}
    assert fw.whatif(run, **asked)["step_s"][0] == pytest.approx(step_us * 1e-6, rel=0.01)


def test_ranks_that_tell_other_marks_keep_each_mark_as_a_step(tmp_path: Path) -> None:
    for rank in (0, 1):
        job = Job(rank)
        played(marked(3, in_each=True, each_steps=rank == 1), 20, job)
        job.write(tmp_path / f"{rank}.json")
    run = read(tmp_path)
    for rank in (0, 1):
        assert len(np.unique(run.spans.step[run.spans.rank == rank])) == 3 * STEPS


def test_marks_stay_steps_where_each_has_an_optimizer(tmp_path: Path) -> None:
    run = traced(tmp_path, partial(marked, 3, in_each=True, each_steps=True), 20)
    assert len(np.unique(run.spans.step)) == 3 * STEPS
