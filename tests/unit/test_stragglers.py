"""Synchronising less, and waiting for the slowest of N: by hand, and by laws."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.errors import UsageError
from fullwire.run.facts import Facts
from fullwire.run.run import Run
from fullwire.simulation.forecast import forecaster
from fullwire.simulation.step import Step
from fullwire.simulation.stragglers import AsRecorded, MeasuredJitter, Spread, jitter
from fullwire.simulation.typical import typical_step
from fullwire.words import sentence
from tests.builders import a_run
from tests.jobs_by_hand import a_trained_job
from tests.strategies import cases

LINE = "10Gbps"
jitters = st.sampled_from(["recorded", "none", "lognormal:5%", "lognormal:60%", "exponential:20%"])


def column(name: str, run: Run | str, **conditions: Any) -> list[float]:
    found: list[float] = fw.whatif(run, bandwidth=LINE, **conditions)[name].tolist()
    return found


def a_step(*alone_ns: float, usual_ns: int = 100_000_000) -> Step:
    """Make a step of 100 ms for which ranks took these times."""
    step = typical_step(a_run(gradients=[(10, 1)], forward_ms=90))
    assert step.step_ns == usual_ns
    return Step(
        step_ns=usual_ns,
        forward_ns=step.forward_ns,
        backward_ns=step.backward_ns,
        ready_ns=step.ready_ns,
        bytes=step.bytes,
        is_estimated=False,
        spread=np.array(alone_ns),
    )


def late(scatter: str, workers: int, steps: int = 1) -> float:
    """Return the share of a step by which the slowest of `workers` ranks is late."""
    return float(jitter(scatter).late_s(a_step(), [workers], steps)[0]) / 0.1


# Cases with a known formula


@pytest.mark.parametrize("deviation", [1, 5, 30, 100])
def test_the_slower_of_two_lognormal_ranks_is_known_exactly(deviation: float) -> None:
    sigma = math.sqrt(math.log1p((deviation / 100) ** 2))
    assert late(f"lognormal:{deviation}%", 2) == pytest.approx(math.erf(sigma / 2), rel=1e-10)


@pytest.mark.parametrize("workers", [2, 3, 64, 1000, 1001, 100_000])
def test_the_slowest_of_exponential_ranks_is_a_harmonic_number(workers: int) -> None:
    harmonic = math.fsum(1 / each for each in range(1, workers + 1))
    assert late("exponential:20%", workers) == pytest.approx(0.2 * (harmonic - 1), rel=1e-12)


@pytest.mark.parametrize("steps", [2, 7, 64, 500])
def test_the_slower_of_two_sums_of_exponentials_is_known_too(steps: int) -> None:
    """Such a sum is a gamma variable: its mean difference is G(k + 1/2) / (sqrt(pi) G(k + 1))."""
    difference = math.exp(math.lgamma(steps + 0.5) - math.lgamma(steps + 1)) / math.sqrt(math.pi)
    assert late("exponential:20%", 2, steps) == pytest.approx(0.2 * difference, rel=1e-4)


def test_what_was_recorded_is_weighed_as_if_all_its_tuples_were_listed() -> None:
    taken = (90e6, 98e6, 101e6, 105e6, 131e6)
    mean = sum(taken) / 5
    for workers, steps in ((2, 1), (4, 1), (2, 2), (2, 3)):
        sums = [sum(each) for each in itertools.product(taken, repeat=steps)]
        slowest = [max(each) for each in itertools.product(sums, repeat=workers)]
        expected = (sum(slowest) / len(slowest) / steps - mean) / mean
        found = MeasuredJitter().late_s(a_step(*taken), [workers], steps)[0] / 0.1
        assert found == pytest.approx(expected, rel=1e-9 if steps == 1 else 2e-3)


def test_many_workers_wait_for_the_slowest_that_was_recorded_and_no_longer() -> None:
    found = MeasuredJitter().late_s(a_step(90e6, 100e6, 110e6), [10**8], 1)
    assert found[0] == pytest.approx(0.01)


# Laws


@given(jitters, st.integers(1, 8), st.integers(1, 8))
@cases(20)
def test_one_worker_waits_for_nobody(scatter: str, accumulate: int, local: int) -> None:
    table = fw.whatif(
        a_run(), workers=1, bandwidth=LINE, jitter=scatter, accumulate=accumulate, local_steps=local
    )
    assert table["overhead_s"].tolist() == [0.0]
    assert table["scaling_factor"].tolist() == [1.0]


@given(st.sampled_from([*"12345678"]), st.integers(2, 10**6))
@cases(20)
def test_zero_jitter_changes_nothing(accumulate: str, workers: int) -> None:
    conditions = {"workers": workers, "accumulate": accumulate}
    zero = column("step_s", a_run(), jitter="lognormal:0%", **conditions)
    assert zero == column("step_s", a_run(), jitter="none", **conditions)


@given(jitters, st.sampled_from([1, 2, 30]), st.lists(st.integers(1, 10**8), min_size=2))
@cases(40)
def test_more_workers_never_wait_less(scatter: str, steps: int, workers: list[int]) -> None:
    found = jitter(scatter).late_s(a_step(), sorted(workers), steps)
    assert (np.diff(found) >= 0).all()
    taken = a_step(90e6, 98e6, 101e6, 105e6, 131e6)
    assert (np.diff(MeasuredJitter().late_s(taken, sorted(workers), steps)) >= 0).all()


@given(st.floats(1, 100), st.floats(1, 100), st.integers(2, 10_000))
@cases(30)
def test_more_scatter_never_waits_less(one: float, other: float, workers: int) -> None:
    less, more = sorted([one, other])
    for shape in ("lognormal", "exponential"):
        assert late(f"{shape}:{less}%", workers) <= late(f"{shape}:{more}%", workers)


def test_what_scatters_evens_out_between_synchronisations() -> None:
    found = [late("lognormal:10%", 64, steps) for steps in (1, 4, 16, 64)]
    assert found == sorted(found, reverse=True)
    assert found[2] == pytest.approx(found[0] / 4, rel=0.1)  # as the square root of their number


def test_ranks_that_are_late_by_turns_make_up_for_it_between_sums() -> None:
    by_turns = a_step(90e6, 100e6, 110e6)
    by_turns = replace(by_turns, waiting_ns=8_000_000, lasting_share=0.25)
    found = [AsRecorded().late_s(by_turns, [2], steps)[0] for steps in (1, 4, 10_000)]
    assert found == pytest.approx([0.008, 0.005, 0.00206])
    always = replace(by_turns, lasting_share=1.0)
    assert AsRecorded().late_s(always, [2], 100)[0] == pytest.approx(0.008)


def test_a_recording_tells_whether_one_rank_is_always_late() -> None:
    always, by_turns = (
        typical_step(a_trained_job(late_ms=20, steps=30, by_turns=each)) for each in (False, True)
    )
    assert always.lasting_share == 1.0
    assert by_turns.lasting_share == pytest.approx(1 / 3, abs=0.05)


# Synchronising less


def test_gradients_of_many_passes_pay_for_communication_once() -> None:
    once, fourth = column("overhead_s", a_run(), workers=8, accumulate="1,4")
    assert fourth == once / 4
    once, fourth = column("network_utilization", a_run(), workers=8, accumulate="1,4")
    assert fourth < once


def test_averages_after_local_steps_are_hidden_by_nothing() -> None:
    run = a_run(gradients=[(10, 25_000_000), (200, 2_500)])
    table = fw.whatif(run, workers=8, bandwidth=LINE, local_steps="1,2,8", buckets="none")
    busy_s = table["communication_s"][0]
    assert table["overhead_s"][0] < busy_s / 100  # beside the backward pass, nearly all of it
    assert table["overhead_s"][1:].tolist() == pytest.approx([busy_s / 2, busy_s / 8])


def test_both_together_synchronise_once_in_their_product() -> None:
    both = fw.whatif(a_run(), workers=8, bandwidth=LINE, local_steps=4, accumulate=2)
    eight = fw.whatif(a_run(), workers=8, bandwidth=LINE, local_steps=8)
    assert both["overhead_s"].tolist() == eight["overhead_s"].tolist()


def test_jitter_adds_to_a_step_what_its_slowest_rank_is_late() -> None:
    conditions: dict[str, Any] = {"workers": 64, "buckets": "none"}
    even, scattered = column("step_s", a_run(), jitter="none,lognormal:5%", **conditions)
    alone_s = column("baseline_step_s", a_run(), jitter="none", **conditions)[0]
    assert scattered - even == pytest.approx(alone_s * late("lognormal:5%", 64))


def test_a_grid_of_all_three_equals_its_points() -> None:
    grid = fw.whatif(
        a_run(),
        workers="2,64",
        bandwidth="1Gbps,10Gbps",
        accumulate="1,3",
        local_steps="1,4",
        jitter="none,lognormal:5%",
    )
    for row in grid.rows():
        one = fw.whatif(
            a_run(),
            workers=row["workers"],
            bandwidth=row["bandwidth_bps"],
            jitter=row["jitter"],
            accumulate=row["accumulate"],
            local_steps=row["local_steps"],
        )
        assert next(iter(one.rows())) == row


def test_a_target_is_found_with_jitter_and_fewer_synchronisations() -> None:
    result = fw.whatif(
        a_run(), workers=8, bandwidth=LINE, accumulate="1,8", jitter="none,lognormal:1%", target=0.9
    )
    assert result.targets is not None
    cases = result.targets.least_bandwidth
    assert [(each.accumulate, each.jitter) for each in cases] == [
        (1, "none"),
        (1, "lognormal:1%"),
        (8, "none"),
        (8, "lognormal:1%"),
    ]
    needed = [case.bandwidth_bps or 0.0 for case in cases]
    assert needed[2] < needed[0] < needed[1]


# A recorded run's own


def test_a_recorded_run_lends_its_scatter() -> None:
    run = a_trained_job()
    few, many = column("step_s", run, workers="2,64", jitter="measured")
    assert few <= many
    with pytest.raises(UsageError, match="measured needs a run of several steps or ranks"):
        fw.whatif("vgg16@v100", workers=8, bandwidth=LINE, jitter="measured")


def test_the_fixes_of_a_job_are_the_same_predictions() -> None:
    run = a_trained_job(late_ms=30)
    job = forecaster(run)
    assert job is not None
    considered = fw.explain(run).fixes
    found = {sentence(fix): fix.step_s for fix in considered}
    assert found["one sum every 2 passes"] == job.ask(accumulate=(2,)).step_s
    [alone] = [fix.step_s for fix in considered if fix.kind == "straggler"]
    assert alone == job.ask(jitters=(jitter("none"),)).step_s < job.ask().step_s - 0.025


def test_steps_in_a_row_may_be_shorter_on_processors_that_stay_warm() -> None:
    """A small step took 5.4 ms after waits of 8 ms, and 3.3 ms without any."""
    used = tuple((float(rank), 0.080) for rank in range(3))
    run = a_trained_job(steps=30)
    run = replace(run, facts=replace(run.facts, line_rate_bps=None))  # it shows no transport
    on_processors = replace(run, facts=run.facts | Facts(processor_s=used))
    asked: dict[str, Any] = {"workers": 3, "bandwidth": LINE, "local_steps": "1,4"}
    unknown, known = (fw.whatif(each, **asked).interval_s for each in (run, on_processors))
    assert known[0][0] == unknown[0][0]
    assert unknown[0][1] - known[0][1] == pytest.approx(0.75 * 0.002)
    assert known[1].tolist() == unknown[1].tolist()


@pytest.mark.parametrize(
    "text", ["", "lognormal", "lognormal:5", "lognormal:-5%", "gauss:5%", "lognormal:101%", "5%"]
)
def test_jitter_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"jitter: expected"):
        jitter(text)


def test_what_is_typed_comes_back() -> None:
    for text in ("recorded", "none", "measured", "lognormal:5%", "exponential:12.5%"):
        assert str(jitter(text)) == text
    assert jitter("lognormal:5%") == Spread("lognormal", 0.05)


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"accumulate": "0"}, "accumulate: expected a whole number from 1"),
        ({"local_steps": "1.5"}, "local steps: expected a whole number from 1"),
        ({"accumulate": 1000, "local_steps": 1000}, "once in 1,000,000 passes: expected at most"),
        ({"batch": "32"}, "batch: expected built-in workloads"),
    ],
)
def test_what_cannot_be_is_refused(conditions: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fw.whatif(a_run(), workers=8, bandwidth=LINE, **conditions)
