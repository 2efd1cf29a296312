"""Contention on devices: kernels beside communication against the same kernels alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fullwire as fw
from fullwire.answers.opening import completed
from fullwire.findings import sureness
from fullwire.importers import read
from fullwire.report.as_data import explanation_object
from fullwire.timeline.account import account
from fullwire.words import sentence, sentences
from tests.unit.test_kineto import ALL_REDUCE, GEMM, Job, reduced

ALONE_US, STEP_US, STEPS = 40.0, 1_000.0, 6
LAUNCH: dict[str, Any] = {"grid": [64, 1, 1], "block": [128, 1, 1], "shared memory": 0}


def a_job(
    where: Path,
    times: float,
    *,
    kinds: int = 2,
    never_alone: int = 0,
    beside: int = 8,
    launch: dict[str, Any] = LAUNCH,
) -> fw.Run:
    """Make a trace: in each step eight kernels alone, then others beside an all-reduce.

    Kernels beside it take `times` as long as alone. `never_alone` of each step are of another grid.
    """
    for rank in (0, 1):
        job = Job(rank)
        for number in range(STEPS):
            begin = now = STEP_US * number
            job.step(number, begin, begin + STEP_US)
            for kernel in range(8):
                length = ALONE_US + 0.2 * (kernel % 3)
                job.kernel(f"{GEMM}{kernel % kinds}", now, now + length, launch=begin, **launch)
                now += length
            sent, backward = now, "autograd::engine::evaluate_function: AddmmBackward0"
            job.event("cpu_op", backward, begin + 15, begin + 40, tid=1)
            for kernel in range(beside):
                length = times * (ALONE_US + 0.2 * (kernel % 3))
                own = launch if kernel >= never_alone else launch | {"grid": [9, 9, kernel]}
                job.kernel(f"{GEMM}{kernel % kinds}", now, now + length, launch=begin + 20, **own)
                now += length
            job.kernel(
                ALL_REDUCE, sent, now + 50, launch=begin + 30, stream=9, **reduced(1_000_000)
            )
        job.write(where / f"{rank}.json")
    return read(where)


def beside_s(times: float, kernels: int = 8) -> float:
    return kernels * times * (ALONE_US + 0.18) * 1e-6


def test_kernels_that_take_longer_beside_communication_are_contention(tmp_path: Path) -> None:
    found = fw.explain(a_job(tmp_path, 1.3))
    assert found.account["contention"] == pytest.approx(0.3 / 1.3 * beside_s(1.3), rel=0.02)
    assert sum(found.account.values()) == pytest.approx(found.step_s)
    plain_s = found.account["compute"] + found.account["input"] + found.account["host"]
    assert found.baseline_step_s == pytest.approx(plain_s)
    assert any(
        "they take 30% longer than the same kernels alone" in each for each in found.warnings
    )


def test_kernels_that_take_as_long_beside_communication_show_no_contention(tmp_path: Path) -> None:
    found = fw.explain(a_job(tmp_path, 1.0))
    assert found.account["contention"] == pytest.approx(0.0, abs=0.01 * beside_s(1.0))


def test_faster_kernels_beside_communication_are_no_negative_contention(tmp_path: Path) -> None:
    assert fw.explain(a_job(tmp_path, 0.9)).account["contention"] == 0.0


@pytest.mark.parametrize(
    ("never_alone", "launch"),
    [(8, LAUNCH), (0, {})],
    ids=["other grids alone", "no grid in the trace"],
)
def test_kernels_that_never_ran_alone_tell_no_contention(
    tmp_path: Path, never_alone: int, launch: dict[str, Any]
) -> None:
    found = fw.explain(a_job(tmp_path, 1.3, never_alone=never_alone, launch=launch))
    assert found.account["contention"] == 0.0
    assert any(
        "Contention is not known, and counts as compute: 0% of the time" in each
        for each in found.warnings
    )
    assert not any("from kernels" in each for each in found.warnings)


def test_kernels_that_never_ran_alone_count_like_the_others_and_widen_t1(tmp_path: Path) -> None:
    whole, some = tmp_path / "whole", tmp_path / "some"
    whole.mkdir()
    some.mkdir()
    all_compared = fw.explain(a_job(whole, 1.3))
    half = fw.explain(a_job(some, 1.3, never_alone=4))
    expected_s = all_compared.account["contention"]
    assert half.account["contention"] == pytest.approx(expected_s, rel=0.02)
    assert any("50% of the time beside communication" in each for each in half.warnings)
    (low_s, high_s), (below_s, above_s) = all_compared.baseline_between_s, half.baseline_between_s
    assert below_s < low_s
    assert above_s > high_s


def test_a_stream_that_hides_behind_a_busier_one_costs_nothing(tmp_path: Path) -> None:
    """The busy stream is never slower. Beside communication, a short one takes twice as long."""
    for rank in (0, 1):
        job = Job(rank)
        for number in range(STEPS):
            begin = STEP_US * number
            job.step(number, begin, begin + STEP_US)
            for kernel in range(10):
                at = begin + 100 * kernel
                job.kernel(GEMM, at, at + 100, launch=begin, **LAUNCH)
                longer = 40 if kernel < 5 else 80
                job.kernel(f"{GEMM}2", at, at + longer, launch=begin, stream=11, **LAUNCH)
            sent = {"stream": 9, **reduced(1_000_000)}
            job.kernel(ALL_REDUCE, begin + 500, begin + 1_000, launch=begin, **sent)
        job.write(tmp_path / f"{rank}.json")
    found = fw.explain(tmp_path)
    assert found.account["contention"] == 0.0
    assert found.baseline_step_s == pytest.approx(STEP_US * 1e-6)


def test_where_no_kernel_tells_contention_t1_may_be_shorter_and_the_verdict_is_less_sure(
    tmp_path: Path,
) -> None:
    found = fw.explain(a_job(tmp_path, 1.6, never_alone=8))
    low_s, _ = found.baseline_between_s
    assert low_s < found.baseline_step_s - 0.6 / 1.6 * beside_s(1.6)
    assert found.verdict.sureness is not None
    [doubts] = sentences([found.verdict.sureness])
    assert doubts.startswith("Less sure: ")
    assert "kernels beside communication may lose up to" in doubts


@pytest.mark.parametrize("rate", ["80Gbps", "100Gbps", "110Gbps", "400Gbps"])
def test_collectives_of_32_kib_whose_time_is_fixed_are_latency_at_rates_nearby(
    tmp_path: Path, rate: str
) -> None:
    for rank in range(4):
        job = Job(rank)
        for number in range(STEPS):
            begin = 10_000.0 * number
            job.step(number, begin, begin + 10_000)
            job.kernel(GEMM, begin, begin + 5_000, launch=begin, **LAUNCH)
            sent = {"stream": 9, **reduced(8_192, members="[0, 1, 2, 3]"), "Group size": 4}
            for at in range(120):
                sent_us = begin + 5_000 + 40 * at
                job.kernel(ALL_REDUCE, sent_us, sent_us + 38, launch=begin, **sent)
        job.write(tmp_path / f"{rank}.json")
    found = fw.explain(completed(read(tmp_path), rate).run)
    assert found.verdict.kind == "latency"
    assert found.account["transport"] < 0.25 * found.account["latency"]


def test_kernels_of_one_launch_that_differ_in_work_are_not_compared(tmp_path: Path) -> None:
    """A product of as many rows may have a longer inner side: alone, its times scatter."""
    for rank in (0, 1):
        job = Job(rank)
        for number in range(STEPS):
            begin = STEP_US * number
            job.step(number, begin, begin + STEP_US)
            for kernel, length in enumerate((40, 40, 160, 160)):
                start = begin + 200 * kernel
                job.kernel(GEMM, start, start + length, launch=begin, **LAUNCH)
            job.kernel(GEMM, begin + 800, begin + 960, launch=begin, **LAUNCH)
            job.kernel(
                ALL_REDUCE, begin + 800, begin + 990, launch=begin, stream=9, **reduced(1_000)
            )
        job.write(tmp_path / f"{rank}.json")
    found = fw.explain(tmp_path)
    assert found.account["contention"] == 0.0


def test_products_of_other_shapes_are_not_compared(tmp_path: Path) -> None:
    """Where the trace tells shapes, kernels of one grid are compared by them too."""
    for rank in (0, 1):
        job = Job(rank)
        for number in range(STEPS):
            begin = STEP_US * number
            job.step(number, begin, begin + STEP_US)
            for place, (start, length, inner) in enumerate(
                ((0, 40, 64), (50, 40, 64), (100, 80, 128))
            ):
                external = 10 * number + place
                dims: dict[str, Any] = {
                    "Input Dims": [[32, inner], [inner, 32]],
                    "External id": external,
                }
                at = begin + start
                job.event("cpu_op", "aten::mm", at, at + 2, tid=1, **dims)
                told = LAUNCH | {"External id": external}
                job.kernel(GEMM, at + 3, at + 3 + length, launch=at + 1, **told)
            job.kernel(
                ALL_REDUCE, begin + 100, begin + 190, launch=begin, stream=9, **reduced(1_000)
            )
        job.write(tmp_path / f"{rank}.json")
    found = fw.explain(tmp_path)
    assert found.account["contention"] == 0.0
    assert any("Contention is not known" in each for each in found.warnings)


def test_contention_of_a_device_is_the_verdict_with_its_fixes_named(tmp_path: Path) -> None:
    found = fw.explain(a_job(tmp_path, 1.8))
    assert found.verdict.kind == "contention"
    assert "kernels take longer beside communication than alone" in found.verdict.sentence
    assert "processors" not in found.verdict.sentence
    [fix] = [fix for fix in found.fixes if fix.kind == "contention"]
    assert "NCCL_MAX_NCHANNELS" in fix.how
    assert "NCCL_MAX_CTAS" in fix.how
    assert fix.step_s == pytest.approx(found.step_s - found.account["contention"])
    told = explanation_object(found)
    assert told["verdict"]["kind"] == "contention"
    assert told["account"]["contention"] == found.account["contention"]
    assert told["baseline_source"] == "estimated"
    assert told["scaling_factor"] == pytest.approx(told["baseline_step_s"] / told["step_s"])
    low_s, high_s = told["baseline_interval"]["low_s"], told["baseline_interval"]["high_s"]
    assert low_s < told["baseline_step_s"] < high_s


def test_a_what_if_takes_the_t1_without_the_contention_of_kernels(tmp_path: Path) -> None:
    run = a_job(tmp_path, 1.3)
    alone_s = fw.whatif(run, bandwidth=["100Gbps"])["baseline_step_s"][0]
    assert alone_s == pytest.approx(fw.explain(run).baseline_step_s, rel=0.01)


def test_a_faster_link_slows_kernels_for_a_shorter_time(tmp_path: Path) -> None:
    """The all-reduce of 4 MB takes 470 us on 68 Gbps, and all but 50 us are beside kernels."""
    run = a_job(tmp_path, 1.3)
    asked: dict[str, Any] = {"line_rate": "68Gbps", "transport": "measured"}
    table = fw.whatif(run, **asked, bandwidth=["34Gbps", "68Gbps", "136Gbps", "272Gbps"])
    longer_s = table["step_s"] - table["baseline_step_s"]
    contention_s = 0.3 / 1.3 * beside_s(1.3)
    sum_s = beside_s(1.3) + 50e-6
    assert longer_s[0] == pytest.approx(contention_s + 50e-6 + sum_s, rel=0.05)
    assert longer_s[1] == pytest.approx(contention_s + 50e-6, rel=0.01)
    # Half of the time, and a quarter, is beside kernels. What is left unexplained shrinks too.
    assert longer_s[2] == pytest.approx(0.3 / 1.3 * sum_s / 2, rel=0.15)
    assert longer_s[3] == pytest.approx(0.3 / 1.3 * sum_s / 4, rel=0.25)


def test_nothing_is_said_of_processors_where_devices_carry_collectives_out(tmp_path: Path) -> None:
    run = a_job(tmp_path, 1.3)
    fast = {"line_rate": "68Gbps", "transport": "measured", "bandwidth": ["68Gbps", "9Tbps"]}
    told = fw.whatif(run, **fast)  # type: ignore[arg-type]
    assert "kernels beside communication take longer than alone" in " ".join(told.warnings)
    found = fw.explain(run, bandwidth="68Gbps")
    assert found.break_even is not None
    assert found.break_even.line_takes_over_bps is None
    assert "processor" not in " ".join([*told.warnings, found.break_even.sentence])


@pytest.mark.parametrize(
    ("name", "low_s", "high_s"),
    [
        ("control_rank3_of_8", 0.002, 0.008),  # of 12.6 ms beside communication
        ("nccl_data_rank0_of_2", 0.0001, 0.0006),  # of 2.4 ms
        ("df_index_resolver_rank1_of_2", 0.0, 0.0),  # nothing overlaps
        ("sampled_rank0_of_128", 0.0, 0.0),  # one step: next to no kernel ran both ways
    ],
)
def test_real_traces_tell_believable_contention(
    shared_data: Path, name: str, low_s: float, high_s: float
) -> None:
    found = fw.explain(shared_data / "kineto" / f"{name}.json.gz")
    assert low_s <= found.account["contention"] <= high_s


@pytest.mark.parametrize(("compared", "tells_rest"), [(1.0, False), (0.31, True)])
def test_only_kernels_that_never_ran_alone_are_taken_to_be_slowed_alike(
    monkeypatch: pytest.MonkeyPatch, shared_data: Path, compared: float, tells_rest: bool
) -> None:
    run = read(shared_data / "kineto" / "nccl_data_rank0_of_2.json.gz")
    monkeypatch.setattr(sureness, "compared_kernels", lambda _: compared)
    [told] = sureness.about_kernels(run, account(run, {}))
    assert ("slowed alike" in sentence(told)) == tells_rest
