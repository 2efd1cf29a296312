"""The verdict: each kind from the account that shows it, or no verdict if the data is unclear."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.errors import FullwireError, UsageError
from fullwire.findings.evidence.samples import carried_evidence
from fullwire.lab.description import describe
from fullwire.report.explanation import next_commands, print_explanation
from fullwire.run.facts import Facts, FactValue
from fullwire.run.gaps import Gap
from fullwire.run.run import Carried, Collectives, Hosts, Links, Run, Sockets, Spans
from fullwire.simulation.as_recorded import with_residue
from fullwire.simulation.forecast import forecaster
from fullwire.simulation.transport import FullTransport
from fullwire.timeline.summary import summarised
from fullwire.words import sentence
from tests.builders import a_run
from tests.conftest import Cli
from tests.jobs_by_hand import GIGABIT, MS, Rank, a_job, a_trained_job

PER_MS = 125_000  # bytes at the line rate of these jobs, 1 Gbps
BACKWARD = ("compute", "backward", 0.0, 50.0)
OLD = Path(__file__).parents[1] / "data" / "format-1"


def computing(until: float) -> tuple[str, str, float, float]:
    return ("compute", "backward", 0.0, until)


def both(length: float, *spans: tuple[str, str, float, float], sent: Any = ()) -> Run:
    rank = Rank(length, [BACKWARD, *spans], sent)
    return a_job(rank, rank)


JOBS = {
    "scales": both(54, sent=[(PER_MS, 10, 54)]),
    "line_rate": both(150, sent=[(90 * PER_MS, 50, 150)]),
    "transport": both(150, sent=[(30 * PER_MS, 50, 150)]),
    "latency": both(150, sent=[(8, 50 + n, 51 + n) for n in range(100)]),
    "overlap": both(90, sent=[(40 * PER_MS, 50, 90)]),
    "codec": both(80, ("communication", "codec", 50.0, 80.0)),
    "input": both(100, ("input", "wait", 51.0, 100.0), sent=[(8, 50, 51)]),
    "host": both(100, sent=[(8, 50, 51)]),
    "straggler": a_job(
        Rank(100, [BACKWARD], [(PER_MS, 50, 100)]),
        Rank(100, [computing(99)], [(PER_MS, 99, 100)]),
    ),
}


@pytest.mark.parametrize("kind", JOBS)
def test_the_largest_part_is_the_verdict(kind: str) -> None:
    found = fw.explain(JOBS[kind])
    assert found.verdict.kind == kind
    assert found.verdict.threshold == 0.10
    assert found.verdict.reasons
    assert not found.verdict.missing
    assert sum(found.account.values()) == pytest.approx(found.step_s)


def test_communication_alone_has_no_scaling_factor() -> None:
    rank = Rank(100, [], [(PER_MS, 0, 50)])
    found = fw.explain(a_job(rank, rank))
    assert found.verdict.kind == "unknown"
    assert found.scaling_factor is None


def test_below_the_threshold_a_job_scales() -> None:
    """A part of 9 ms in 99 does not count, one of 11 ms in 100 does."""
    sent = [(8, 49, 50)]
    assert fw.explain(both(55, ("input", "wait", 50.0, 55.0), sent=sent)).verdict.kind == "scales"
    assert fw.explain(both(57, ("input", "wait", 50.0, 57.0), sent=sent)).verdict.kind == "input"


def test_overlap_becomes_line_rate_when_the_floor_no_longer_fits_under_computation() -> None:
    assert fw.explain(both(99, sent=[(49 * PER_MS, 50, 99)])).verdict.kind == "overlap"
    assert fw.explain(both(101, sent=[(51 * PER_MS, 50, 101)])).verdict.kind == "line_rate"


def test_a_part_of_exactly_the_threshold_reaches_it() -> None:
    small = [(8, 89, 90)]
    rank = Rank(100, [computing(89), ("input", "wait", 90.0, 100.0)], small)
    assert fw.explain(a_job(rank, rank)).verdict.kind == "input"


def test_a_line_that_transfers_do_not_fill_is_not_what_limits_them() -> None:
    """The bytes at line rate are the largest part, but use 60 % of the time of the transfers."""
    computes = [computing(50)]
    unfilled = Rank(150, computes, [(60 * PER_MS, 50, 150)])
    found = fw.explain(a_job(unfilled, unfilled))
    assert found.account["line_rate"] > found.account["transport"]
    assert found.verdict.kind == "transport"
    assert "(exposed transfers used 60% of it)" in found.verdict.sentence
    assert "exposed transfers used 60.0% of the line rate" in found.verdict.reasons[1]
    filled = Rank(150, computes, [(76 * PER_MS, 50, 150)])
    assert fw.explain(a_job(filled, filled)).verdict.kind == "line_rate"


def test_large_messages_that_cost_something_are_no_storm_of_small_ones() -> None:
    """Of 100 ms, 48 are the floor, 40 the cost of messages by a small collective, 12 the rest."""
    small, large = (
        (8, 50, 55),
        [(6 * PER_MS, 60 + 12.5 * n, 72.5 + 12.5 * n) for n in range(8)],
    )
    rank = Rank(160, [computing(40)], [small, *large])
    found = fw.explain(a_job(rank, rank))
    assert found.account["line_rate"] > found.account["latency"] > found.account["transport"]
    assert found.verdict.kind == "transport"
    assert "45 ms of that by the fixed cost of messages" in found.verdict.sentence


def test_what_is_lost_beside_an_unfilled_line_has_to_reach_the_threshold_too() -> None:
    rank = Rank(130, [computing(100)], [(75 * PER_MS, 5, 130)])
    found = fw.explain(a_job(rank, rank))
    assert found.verdict.kind == "line_rate"
    assert "12 ms more is lost as the line is not filled" in found.verdict.sentence


def test_one_late_transfer_that_computation_could_hide_is_overlap_at_any_speed() -> None:
    late = Rank(100, [computing(70)], [(18 * PER_MS, 70, 100)])
    assert fw.explain(a_job(late, late)).verdict.kind == "overlap"
    early = Rank(100, [computing(70)], [(42 * PER_MS, 30, 100)])
    assert fw.explain(a_job(early, early)).verdict.kind == "transport"


def test_much_lost_in_small_parts_is_not_called_scaling_well() -> None:
    waits = ("input", "wait", 91.0, 100.0)
    rank = Rank(100, [computing(64), waits], [(9 * PER_MS, 64, 82)])
    found = fw.explain(a_job(rank, rank))
    assert found.verdict.kind == "scales"
    assert found.verdict.sentence.startswith(
        "Many small losses limit this job: together 36% of each step"
    )
    nothing_lost = Rank(100, [computing(100)], [(PER_MS, 0, 50)])
    sentence = fw.explain(a_job(nothing_lost, nothing_lost)).verdict.sentence
    assert sentence == "This job scales: all of its step is computation."


def test_clocks_worse_than_the_largest_part_tell_nothing_about_it() -> None:
    ranks = (
        Rank(65, [computing(50)], [(10 * PER_MS, 50, 65)]),
        Rank(65, [("compute", "backward", 15.0, 65.0)], [(10 * PER_MS, 0, 15)]),
    )
    found = fw.explain(a_job(*ranks))
    assert found.verdict.kind == "unknown"
    assert "clocks disagree by 35 ms" in found.verdict.reasons[1]
    assert found.verdict.missing[0].startswith("ranks' clocks to better than")


def test_time_between_steps_is_in_no_account_and_is_said() -> None:
    job = JOBS["line_rate"]
    apart = 50 * MS
    spans = dataclasses.replace(
        job.spans,
        start_ns=job.spans.start_ns + job.spans.step * apart,
        end_ns=job.spans.end_ns + job.spans.step * apart,
    )
    assert not any("between steps" in each for each in fw.explain(job).warnings)
    found = fw.explain(dataclasses.replace(job, spans=spans, collectives=Collectives.empty()))
    assert any("21% of the time from the first" in each for each in found.warnings)


@pytest.mark.parametrize(("lasts_ms", "is_first"), [(1, False), (60, True)])
def test_a_long_evaluation_is_on_the_first_screen(
    capsys: pytest.CaptureFixture[str], lasts_ms: int, is_first: bool
) -> None:
    job, count = JOBS["line_rate"], 2
    begin_ns = int(job.spans.start_ns.min()) + np.arange(count) * 100 * MS
    evaluations = Spans(
        rank=np.zeros(count, np.int64),
        step=np.full(count, -1),
        lane=np.full(count, "host", object),
        name=np.full(count, "evaluation", object),
        start_ns=begin_ns,
        end_ns=begin_ns + lasts_ms * MS,
    )
    run = dataclasses.replace(job, spans=Spans.joined([job.spans, evaluations]))
    found = fw.explain(run)
    told = f"2 evaluations took {2 * lasts_ms} ms of the"
    assert any(told in each for each in found.warnings)
    print_explanation(found, is_full=False)
    assert (told in capsys.readouterr().out) == is_first


def test_the_late_rank_is_named_with_what_it_does_longer() -> None:
    sentence = fw.explain(JOBS["straggler"]).verdict.sentence
    assert sentence.startswith("Rank 1 is late")
    assert "49 ms more than usual in computation" in sentence


def test_ranks_that_are_late_in_turns_are_not_blamed() -> None:
    turns = [
        Rank(
            200,
            [computing(first), ("compute", "forward", 100.0, second)],
            [(1000, first, 100), (1000, second, 200)],
        )
        for first, second in ((50.0, 199.0), (99.0, 150.0))
    ]
    found = fw.explain(a_job(*turns))
    assert found.verdict.kind == "straggler"
    assert "now one and now another" in found.verdict.sentence


def test_one_rank_of_several_says_how_much_is_exposed_and_what_would_settle_it() -> None:
    alone = a_job(Rank(100, [BACKWARD], [(PER_MS, 50, 100)]), workers=4)
    found = fw.explain(alone)
    assert found.verdict.kind == "unknown"
    assert "exposed for 50 ms of every 100 ms step (50.0%)" in found.verdict.sentence
    assert found.verdict.missing == ("the other ranks' traces: 1 of 4 ranks are here",)
    assert found.account["unexplained"] == pytest.approx(0.050)


def test_without_a_line_rate_the_verdict_is_unknown_and_giving_one_settles_it() -> None:
    rank = Rank(150, [BACKWARD], [(90 * PER_MS, 50, 150)])
    unknown = fw.explain(a_job(rank, rank, facts={}))
    assert unknown.verdict.kind == "unknown"
    assert unknown.verdict.missing == ("the line rate of the links: --line-rate",)
    known = fw.explain(a_job(rank, rank, facts={}), bandwidth="1Gbps")
    assert known.verdict.kind == "line_rate"
    said = "^line rate: expected 1 Gbps, the line rate in this run, got 10 Gbps"
    with pytest.raises(UsageError, match=said):
        fw.explain(a_job(rank, rank), bandwidth="10Gbps")


@pytest.mark.parametrize("steps", [1, 2])
def test_a_measured_job_of_too_few_steps_is_unknown(steps: int) -> None:
    rank = Rank(150, [BACKWARD], [(90 * PER_MS, 50, 150)])
    found = fw.explain(a_job(rank, rank, steps=steps))
    assert found.verdict.kind == "unknown"
    assert found.verdict.missing == ("more steps: at least 3 after the warm-up",)


def test_a_trace_without_marked_steps_is_one_step_and_unknown() -> None:
    job = JOBS["line_rate"]
    unmarked = dataclasses.replace(job, spans=job.spans.rows(job.spans.name != "step"))
    found = fw.explain(unmarked)
    assert found.verdict.kind == "unknown"
    assert any("No step is marked" in each for each in found.warnings)
    assert found.step_s == pytest.approx(0.750)


def test_a_slow_first_step_does_not_change_the_answer() -> None:
    job = JOBS["overlap"]
    late = job.spans.step >= 1
    shift = 5000 * MS
    spans = dataclasses.replace(
        job.spans,
        start_ns=job.spans.start_ns + np.where(late, shift, 0),
        end_ns=job.spans.end_ns + np.where(late | (job.spans.name == "step"), shift, 0),
    )
    moved = np.where(job.collectives.step >= 1, shift, 0)
    collectives = dataclasses.replace(
        job.collectives,
        issue_ns=job.collectives.issue_ns + moved,
        start_ns=job.collectives.start_ns + moved,
        end_ns=job.collectives.end_ns + moved,
    )
    found = fw.explain(dataclasses.replace(job, spans=spans, collectives=collectives))
    assert found.step_s == pytest.approx(0.090)
    assert found.verdict.kind == "overlap"
    assert any("1 of 5 steps takes over 1.25 times the usual" in each for each in found.warnings)


def test_predictions_take_the_t1_of_a_baseline() -> None:
    job = a_trained_job()
    plain, t1_s = fw.explain(job), 0.6 * fw.explain(job).baseline_step_s
    alone = a_job(Rank(t1_s * 1e3, [computing(t1_s * 1e3)]))
    found = fw.explain(job, baseline=alone)
    assert found.baseline_step_s == pytest.approx(t1_s)
    assert found.fixes
    assert found.predictor is not None
    assert found.predictor.alone_s == pytest.approx(t1_s)
    assert found.full is not None
    assert plain.full is not None
    assert found.full.scaling_factor == pytest.approx(t1_s / found.full.step_s)
    for fix in found.fixes:
        if fix.kind in ("link", "transport"):
            assert fix.scaling_factor * fix.step_s == pytest.approx(t1_s)


def test_a_baseline_gives_t1_and_tells_inflated_computation() -> None:
    alone = a_job(Rank(30, [computing(30)]))
    slower = Rank(60, [BACKWARD], [(PER_MS, 50, 60)])
    found = fw.explain(a_job(slower, slower), baseline=alone)
    assert found.baseline_step_s == pytest.approx(0.030)
    assert found.scaling_factor == pytest.approx(0.5)
    assert found.compute_inflation_s == pytest.approx(0.020)
    assert found.verdict.kind == "compute"
    assert fw.explain(a_job(slower, slower)).compute_inflation_s is None
    with pytest.raises(UsageError, match="expected a run of one worker, got one of 2"):
        fw.explain(a_job(slower, slower), baseline=a_job(slower, slower))
    unmarked = dataclasses.replace(alone, spans=alone.spans.rows(alone.spans.name != "step"))
    with pytest.raises(UsageError, match="baseline: expected marked steps"):
        fw.explain(a_job(slower, slower), baseline=unmarked)
    many, few = (
        dataclasses.replace(run, facts=run.facts | Facts(pass_samples=samples))
        for run, samples in ((a_job(slower, slower), 32), (alone, 64))
    )
    with pytest.raises(UsageError, match="32 samples a pass, got 64 samples a pass"):
        fw.explain(many, baseline=few)
    longer = fw.explain(a_job(slower, slower), baseline=a_job(Rank(90, [computing(90)])))
    assert any("can hardly be the same work" in each for each in longer.warnings)
    assert longer.compute_inflation_s == 0  # no rank computes longer than the one worker
    with pytest.raises(UsageError, match=r"at most 2 times the job's 60 ms.*OMP_NUM_THREADS"):
        fw.explain(a_job(slower, slower), baseline=a_job(Rank(130, [computing(130)])))


def test_each_part_that_differs_from_the_table_of_ranks_has_a_note() -> None:
    """One rank waits 30 ms for data and 10 ms for the host, and the other the opposite."""
    job = a_job(
        *(Rank(100, [computing(60), ("input", "wait", 60.0, until)]) for until in (70.0, 90.0))
    )
    found = fw.explain(job)
    assert found.account["input"] == pytest.approx(0.010)
    told = [each for each in found.warnings if "lower median" in each]
    assert [each.partition(" is that")[0] for each in told] == [
        "The account's wait for input, 10 ms,",
        "The account's host part, 10 ms,",
    ]
    assert "10 ms to 30 ms. 10 ms of it counts as straggler" in told[0]


def test_a_baseline_of_other_threads_is_told() -> None:
    """torchrun gives each of several ranks one thread, and a single rank all of them."""

    def threads(run: Run, count: int) -> Run:
        return dataclasses.replace(run, facts=run.facts | Facts(threads=count))

    slower = Rank(60, [BACKWARD], [(PER_MS, 50, 60)])
    job = dataclasses.replace(
        a_job(slower, slower), facts=a_job(slower, slower).facts | Facts(backend="gloo")
    )
    one = a_job(Rank(30, [computing(30)]))
    told = [
        [each for each in fw.explain(threads(job, 1), baseline=other).warnings if "thread" in each]
        for other in (threads(one, 2), threads(one, 1), one)
    ]
    assert len(told[0]) == 1
    assert "computed with 2 threads, and each rank of this job with 1" in told[0][0]
    assert "record the baseline with 1 thread (OMP_NUM_THREADS, or" in told[0][0]
    assert told[1:] == [[], []]


def test_every_answer_is_of_the_usual_step_and_a_long_one_is_told_beside_it() -> None:
    job = a_trained_job()
    assert not any("times the usual" in each for each in fw.explain(job).warnings)
    later = job.spans.step >= 3
    shift = 40 * MS
    spans = dataclasses.replace(
        job.spans,
        start_ns=job.spans.start_ns + np.where(later, shift, 0),
        end_ns=job.spans.end_ns
        + np.where(later | ((job.spans.name == "step") & (job.spans.step == 2)), shift, 0),
    )
    moved = np.where(job.collectives.step >= 3, shift, 0)
    collectives = dataclasses.replace(
        job.collectives,
        issue_ns=job.collectives.issue_ns + moved,
        start_ns=job.collectives.start_ns + moved,
        end_ns=job.collectives.end_ns + moved,
    )
    gradients = dataclasses.replace(
        job.gradients, ready_ns=job.gradients.ready_ns + np.where(job.gradients.step >= 3, shift, 0)
    )
    uneven = dataclasses.replace(job, spans=spans, collectives=collectives, gradients=gradients)
    found = fw.explain(uneven)
    assert found.median_step_s == pytest.approx(0.146)
    assert found.step_s == pytest.approx(0.146)
    assert sum(found.account.values()) == pytest.approx(found.step_s)
    [said] = [each for each in found.warnings if "times the usual" in each]
    assert "1 of 6 steps takes over 1.25 times the usual: 40 ms more in all" in said
    assert fw.compare(uneven, job).before_s == pytest.approx(found.step_s)
    assert summarised([uneven]).step_s == pytest.approx(found.step_s)
    assert all(fix.scaling_factor <= 1 for fix in found.fixes)
    asked = fw.whatif(uneven, transport="measured")
    assert found.predicted_from_s == asked["baseline_step_s"][0]
    assert asked["step_s"][0] == pytest.approx(0.146)
    assert not any("predictions replay" in each for each in asked.warnings)


def test_a_transport_that_carries_many_small_collectives_is_said_to() -> None:
    many = [(40_000, 50 + 2 * number, 52 + 2 * number) for number in range(30)]
    found = fw.explain(both(110, sent=many))
    assert found.verdict.kind == "transport"
    assert "It has 30 collectives to carry in a step, most of 40 kB." in found.verdict.sentence
    assert "to carry" not in fw.explain(JOBS["transport"]).verdict.sentence


def test_messages_whose_bytes_are_next_to_nothing_cost_what_messages_cost() -> None:
    many = [(40_000, 50 + 5 * number, 55 + 5 * number) for number in range(30)]
    found = fw.explain(both(220, sent=many))
    assert found.verdict.kind == "latency"
    assert "with 30 collectives in a step" in found.verdict.sentence
    large = [(100_000, 50 + 10 * number, 60 + 10 * number) for number in range(30)]
    assert fw.explain(both(370, sent=large)).verdict.kind == "transport"


def test_of_two_causes_the_larger_is_the_verdict_and_the_other_is_named() -> None:
    floor = 80 * PER_MS
    early, late = (Rank(150, [computing(at)], [(floor, at, 150)]) for at in (30, 60))
    found = fw.explain(a_job(early, late))
    assert found.verdict.kind == "line_rate"
    assert found.verdict.sentence.endswith(
        "Another 30 ms (20.0%) is lost to waiting, most of it for rank 1."
    )
    alone = fw.explain(a_job(early, early))
    assert "Another" not in alone.verdict.sentence


def test_the_link_that_holds_up_all_others_is_named() -> None:
    rank = Rank(150, [computing(50)], [(75 * PER_MS // 4, 50, 150)])
    facts: dict[str, FactValue] = {**GIGABIT, "other_line_rates_bps": ((1.0, 2e8),)}
    said = fw.explain(a_job(rank, rank, rank, facts=facts)).verdict.sentence
    assert " Rank 1 has 200 Mbps, the others up to 1 Gbps." in said
    assert (
        "up to" not in fw.explain(a_job(rank, rank, facts={"line_rate_bps": 2e8})).verdict.sentence
    )


def test_a_sum_that_gloo_scatters_is_as_many_bytes_as_one_that_all_get() -> None:
    rank = Rank(150, [computing(50)], [(40 * PER_MS, 50, 150)])
    floors_s = [
        fw.explain(a_job(rank, rank, op=op, facts={**GIGABIT, "backend": backend})).account[
            "line_rate"
        ]
        for op, backend in (
            ("allreduce", "gloo"),
            ("reducescatter", "gloo"),
            ("reducescatter", "nccl"),
        )
    ]
    assert floors_s == pytest.approx([0.04, 0.04, 0.02])


def test_computation_outside_of_steps_is_none_of_theirs() -> None:
    rank = Rank(100, [], [(PER_MS, 20, 90)])
    job = a_job(rank, rank, steps=5)
    outside = dataclasses.replace(
        job.spans.rows(job.spans.step == 0),
        step=np.array([-1, -1]),
        lane=np.array(["compute"] * 2, object),
        start_ns=np.array([-9] * 2),
        end_ns=np.array([-5] * 2),
    )
    found = fw.explain(dataclasses.replace(job, spans=Spans.joined([outside, job.spans])))
    assert found.verdict.kind == "unknown"
    assert found.scaling_factor is None


def test_workers_that_only_meet_outside_their_steps_are_no_job_that_scales() -> None:
    job = a_trained_job()
    apart = dataclasses.replace(job.collectives, step=np.full(len(job.collectives), -1))
    found = fw.explain(dataclasses.replace(job, collectives=apart))
    assert found.verdict.kind == "unknown"
    assert found.verdict.sentence.startswith("The steps hold no communication.")
    assert found.full is None
    assert not found.fixes


def test_a_rate_that_the_collectives_beat_is_not_the_links_rate() -> None:
    rank = Rank(60, [BACKWARD], [(100 * PER_MS, 50, 60)])
    found = fw.explain(a_job(rank, rank))
    assert any("The line rate is too low: collectives were" in each for each in found.warnings)


def test_a_rate_that_was_given_and_is_too_low_is_not_the_links_rate() -> None:
    job = a_trained_job()
    known = job.facts.without(["line_rate_bps"])
    unknown = dataclasses.replace(job, facts=known)
    words = "is too low: even full links would make a step of"
    assert any(words in each for each in fw.explain(unknown, bandwidth="100Mbps").warnings)
    assert not any(words in each for each in fw.explain(unknown, bandwidth="1Gbps").warnings)


def test_clocks_that_disagree_are_said() -> None:
    ranks = Rank(60, [BACKWARD], [(PER_MS, 50, 52)]), Rank(60, [BACKWARD], [(PER_MS, 57, 59)])
    found = fw.explain(a_job(*ranks))
    assert any("clocks disagree" in each and "5 ms" in each for each in found.warnings)


def test_a_simulated_run_is_explained_like_a_measured_one() -> None:
    conditions: dict[str, Any] = {"workers": 8, "bandwidth": "1Gbps", "buckets": "none"}
    played = fw.replay(a_run(), **conditions)
    found = fw.explain(played)
    table = fw.whatif(a_run(), **conditions)
    assert found.verdict.kind == "line_rate"
    assert found.step_s == pytest.approx(table["step_s"][0])
    assert found.account["transport"] == pytest.approx(0, abs=1e-8)
    assert found.account["unexplained"] == 0
    assert found.scaling_factor == pytest.approx(table["scaling_factor"][0])


def test_one_worker_has_nothing_to_scale() -> None:
    found = fw.explain("vgg16@v100")
    assert found.verdict.kind == "unknown"
    assert found.verdict.missing == ("a run of several workers",)
    waits = fw.explain(a_job(Rank(100, [BACKWARD, ("input", "wait", 50.0, 100.0)])))
    assert waits.verdict.kind == "input"


def test_the_step_of_a_job_of_one_worker_is_its_t1() -> None:
    """It is measured, with what DDP sends a worker to itself; the step of a model is estimated."""
    job = a_job(Rank(100, [computing(90)], [(PER_MS, 90, 99)]))
    assert job.facts.workers == 1
    found = fw.explain(job)
    assert found.account["transport"] > 0.005  # to itself
    assert found.scaling_factor == 1
    assert found.baseline_step_s == found.step_s == fw.explain(job, baseline=job).baseline_step_s
    assert not found.is_estimated
    assert fw.explain("vgg16@v100").is_estimated
    for origin in ("simulated", "imported"):  # a prediction, or a trace of one of several ranks
        no_recording = dataclasses.replace(job.provenance, origin=origin)
        found = fw.explain(dataclasses.replace(job, provenance=no_recording))
        assert found.is_estimated
        assert found.scaling_factor == pytest.approx(0.91)


def test_a_fix_of_a_job_of_one_worker_makes_its_t1_as_much_shorter() -> None:
    loading = ("input", "wait", 50.0, 90.0)
    job = a_job(Rank(100, [("compute", "backward", 0.0, 50.0), loading], [(PER_MS, 90, 99)]))
    for baseline in (None, job):
        found = fw.explain(job, baseline=baseline)
        assert found.scaling_factor == 1
        assert [fix.scaling_factor for fix in found.fixes] == [1]
        assert found.fixes[0].step_s == pytest.approx(0.060)


@pytest.mark.parametrize("facts", [{}, GIGABIT])
@pytest.mark.parametrize("sent", [(8, 50, 51), (PER_MS, 50, 90)])
def test_what_one_worker_sends_itself_is_no_network(
    facts: dict[str, FactValue], sent: tuple[int, float, float]
) -> None:
    found = fw.explain(a_job(Rank(100, [BACKWARD, computing(95)], [sent]), facts=facts)).verdict
    assert (found.kind, found.missing) == ("unknown", ("a run of several workers",))
    assert found.sentence.startswith("This job had one worker, and a network has no part in that")
    alone = fw.explain(a_job(Rank(100, [BACKWARD], [sent]), facts={**facts})).verdict
    assert "the network is" not in alone.sentence.lower()


def test_a_prediction_without_an_interval_is_shown_without_one(cli: Cli, tmp_path: Path) -> None:
    played = fw.replay("vgg16@v100", workers=8, bandwidth="10Gbps")
    fw.write(played, tmp_path / "played.run")
    printed = cli("explain", tmp_path / "played.run").stdout
    assert "links of 25 Gbps" in printed
    assert "nan" not in printed


def test_a_simulated_codec_is_told_from_the_wire() -> None:
    played = fw.replay(
        a_run(), workers=8, bandwidth="100Gbps", buckets="none", codec="4,0.5GB/s,0.5GB/s,sum"
    )
    found = fw.explain(played)
    assert found.verdict.kind == "codec"
    assert found.account["transport"] == pytest.approx(0, abs=1e-8)


def test_a_simulation_of_lost_bandwidth_is_the_transports_fault() -> None:
    played = fw.replay(a_run(), workers=8, bandwidth="10Gbps", transport="full:0.2")
    assert fw.explain(played).verdict.kind == "transport"


def sampled(run: Run, *, used: float, blocked: float = 0.0, busiest: float = 0.5) -> Run:
    """Add samples every millisecond: of one host's link, socket and processor."""
    time_ns = np.arange(0, 1000) * MS
    sent = (time_ns // MS * PER_MS * used).astype(np.int64)
    return dataclasses.replace(
        run,
        links=samples(Links, time_ns, interface="eth0", tx_bytes=sent, rx_bytes=sent),
        sockets=samples(
            Sockets,
            time_ns,
            flow="a>b",
            bytes_acked=sent,
            busy_ns=time_ns,
            send_buffer_limited_ns=(time_ns * blocked).astype(np.int64),
        ),
        hosts=samples(Hosts, time_ns, device="cpu0", utilization=np.full(1000, busiest)),
    )


def samples(kind: Any, time_ns: np.ndarray, **columns: Any) -> Any:
    """Make a table of samples of one host; columns that are not named hold zeros."""
    zeros = {name: np.zeros(len(time_ns), dtype) for name, dtype in kind.column_types().items()}
    given = {"host": "one", "time_ns": time_ns, **columns}
    texts = {k: np.full(len(time_ns), v, object) for k, v in given.items() if isinstance(v, str)}
    return kind(**(zeros | given | texts))


def test_samples_become_evidence_and_say_what_held_the_transport_back() -> None:
    found = fw.explain(sampled(JOBS["transport"], used=0.41, blocked=0.8))
    values = {each.key: each.value for each in found.evidence}
    assert values["link_utilization"] == pytest.approx(0.41, rel=0.01)
    assert values["send_buffer_limited"] == pytest.approx(0.8, rel=0.01)
    assert values["cpu_busiest"] == pytest.approx(0.5, rel=0.01)
    assert " Links were 41% used while communication was exposed." in found.verdict.sentence
    assert "limited by its send buffers" in found.verdict.sentence
    assert not any("No samples" in each for each in found.warnings)
    saturated = fw.explain(sampled(JOBS["transport"], used=0.41, busiest=0.97))
    assert "a processor was saturated" in saturated.verdict.sentence


def test_a_run_whose_hosts_sent_far_more_than_its_collectives_has_no_firm_verdict() -> None:
    """A ring of three ranks sends 4/3 of each sum from each host: 96 MB in all steps."""
    job = a_trained_job()
    gap = Gap("rank 0: its groups counted 90 collectives or messages that were not seen")
    facts = job.facts | Facts(hosts="a,b,c")

    def with_links(times: float, gaps: tuple[Gap, ...] = (gap,)) -> Run:
        time_ns = np.arange(0, 1000) * MS
        step_ns = int(job.spans.end_ns.max())
        sent = np.minimum(time_ns / step_ns, 1.0) * times * 32e6
        links = samples(
            Links,
            np.tile(time_ns, 3),
            host=np.repeat(np.array(["a", "b", "c"], object), len(time_ns)),
            interface="eth0",
            tx_bytes=np.tile(sent, 3).astype(np.int64),
        )
        return dataclasses.replace(job, facts=facts, links=links, gaps=gaps)

    usual = fw.explain(with_links(1.1))
    assert usual.verdict.kind != "unknown"
    assert fw.explain(with_links(9.0, gaps=())).verdict.kind == usual.verdict.kind
    found = fw.explain(with_links(9.0))
    assert found.verdict.kind == "unknown"
    seen = "the hosts sent 864 MB in the steps, and those that were seen need 96 MB"
    assert found.verdict.missing == (f"the collectives that were not seen: {seen}",)
    [reason] = found.verdict.reasons
    assert reason.startswith(gap.reason)
    assert (found.scaling_factor, found.fixes) == (None, ())
    with pytest.raises(FullwireError, match="nothing is predicted from a part of its traffic"):
        fw.whatif(with_links(9.0), workers="4")
    # Connections show it too where no link does: on one host.
    time_ns = np.arange(0, 1000) * MS
    sent = (time_ns // MS * 500_000).astype(np.int64)
    connections = samples(Sockets, time_ns, flow="a>b", bytes_acked=sent)
    on_one = job.facts | Facts(hosts="one,one,one", machines=1)
    found = fw.explain(dataclasses.replace(job, facts=on_one, sockets=connections, gaps=(gap,)))
    assert found.verdict.kind == "unknown"
    assert "the hosts sent 438 MB in the steps" in found.verdict.sentence


def test_samples_that_are_missing_are_said_and_coarse_ones_are_of_whole_steps() -> None:
    assert any(
        "The run lacks samples of links, sockets, hosts" in each
        for each in fw.explain(JOBS["transport"]).warnings
    )
    job = sampled(JOBS["transport"], used=0.41)
    coarse = dataclasses.replace(job, links=job.links.rows(np.arange(0, 1000, 200)))
    [links] = [e for e in fw.explain(coarse).evidence if e.key == "link_utilization"]
    assert "over whole steps" in sentence(links)


def test_the_command_prints_the_sentence_first_and_a_bar_that_fills_up(
    cli: Cli, tmp_path: Path
) -> None:
    place = fw.write(JOBS["straggler"], tmp_path / "job.run")
    shown = cli("explain", place, env={"COLUMNS": "100", "PATH": "/usr/bin", "LANG": "C.UTF-8"})
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("Rank 1 is late: the others wait 49% of each step")
    rows = [line for line in shown.stdout.splitlines() if "█" in line or "·" in line]
    pieces = [re.sub("[^█·]", "", row) for row in rows]
    assert len({len(piece) for piece in pieces}) == 1
    assert all(sorted(column)[-1] == "█" for column in zip(*pieces, strict=True))
    assert sum(piece.count("█") for piece in pieces) == len(pieces[0])
    assert "waiting" not in shown.stdout
    assert "waiting" in cli("explain", place, "-v").stdout  # ranks differ, so each has a row


def test_ranks_that_are_alike_are_said_to_be_so(cli: Cli, tmp_path: Path) -> None:
    rank = Rank(100, [BACKWARD], [(PER_MS, 50, 100)])
    place = fw.write(a_job(rank, rank), tmp_path / "job.run")
    assert "and the ranks." in cli("explain", place).stdout
    assert "The 2 ranks are alike: " in cli("explain", place, "-v").stdout


def test_of_many_ranks_those_that_differ_are_shown(cli: Cli, tmp_path: Path) -> None:
    waiting = Rank(100, [BACKWARD], [(PER_MS, 50, 100)])
    late = Rank(100, [computing(99)], [(PER_MS, 99, 100)])
    place = fw.write(a_job(*[waiting] * 38, late, waiting), tmp_path / "job.run")
    shown = cli("explain", place, "-v").stdout
    assert "These 32 of 40 ranks differ most" in shown
    [row] = [line for line in shown.splitlines() if line.startswith("  38  ")]
    assert "99 ms" in row


def test_the_command_keeps_the_keys_that_programs_read(cli: Cli, tmp_path: Path) -> None:
    place = fw.write(JOBS["transport"], tmp_path / "job.run")
    shown = json.loads(cli("explain", place, "--json").stdout)
    assert set(shown["verdict"]) >= {"kind", "sentence", "threshold"}
    parts = (
        "compute",
        "contention",
        "line_rate",
        "latency",
        "transport",
        "straggler",
        "bubble",
        "codec",
        "input",
        "host",
        "unexplained",
    )
    assert tuple(shown["account"]) == parts
    assert sum(shown["account"].values()) == pytest.approx(shown["step_s"])
    assert shown["scaling_factor"] == pytest.approx(shown["baseline_step_s"] / shown["step_s"])
    assert set(shown["ranks"][0]) == {
        "rank",
        "span_s",
        "compute_s",
        "communication_s",
        "exposed_s",
        "overlap_s",
        "waiting_s",
        "idle_s",
    }
    assert (shown["compute_inflation_s"], shown["break_even"], shown["fixes"]) == (None, None, [])
    assert isinstance(shown["warnings"], list)


def test_damaged_and_empty_runs_are_refused_in_one_line(cli: Cli, tmp_path: Path) -> None:
    wrong = a_job(Rank(100, [BACKWARD], [(1_000, 60.0, 50.0)]))
    empty = dataclasses.replace(a_run(), spans=a_run().spans.rows(np.zeros(0, np.int64)))
    for run, status, message in ((wrong, 3, "times that cannot be"), (empty, 2, "expected spans")):
        place = fw.write(run, tmp_path / "job.run", replace=True)
        done = cli("explain", place)
        assert (done.returncode, done.stdout) == (status, "")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_run_whose_collectives_are_lost_is_explained_as_partial(cli: Cli, tmp_path: Path) -> None:
    place = fw.write(JOBS["transport"], tmp_path / "job.run")
    (place / "collectives.parquet").write_bytes(b"PAR1 and no more")
    done = cli("explain", place)
    assert done.returncode == 0, done.stderr
    assert "The run is partial: collectives.parquet: damaged" in done.stdout
    words = " ".join(done.stdout.split())
    assert "What limits the job is not told. Missing: the whole run: its readable part" in words
    assert "Scaling factor" not in words
    assert "Fixes are not predicted" in cli("explain", place, "-v").stdout
    assert cli("whatif", place, "--bandwidth", "1Gbps").returncode == 3


@pytest.mark.parametrize("name", ["spans", "collectives"])
def test_no_verdict_rests_on_a_part_of_what_was_written(name: str) -> None:
    """Without its collectives, the job's waiting is hidden, and its host looks idle."""
    job = JOBS["transport"]
    table = getattr(job, name)
    left = table.rows(np.arange(len(table) // 2))
    lost = f"{name}: {len(table)} rows were written, {len(left)} can be read"
    found = fw.explain(dataclasses.replace(job, gaps=(Gap(lost, name),), **{name: left}))
    assert (found.verdict.kind, found.verdict.reasons) == ("unknown", (lost,))
    assert (found.scaling_factor, found.fixes, found.predictor) == (None, (), None)
    other = dataclasses.replace(job, gaps=(Gap(lost.replace(name, "sockets"), "sockets"),))
    assert fw.explain(other).verdict.kind == "transport"


def test_explaining_loads_neither_torch_nor_pictures(tmp_path: Path) -> None:
    place = fw.write(JOBS["transport"], tmp_path / "job.run")
    code = (
        "import sys; sys.argv[1:] = ['explain', sys.argv[1]]\n"
        "from fullwire.cli import main\nmain()\n"
        "assert not {'torch', 'altair', 'pyroute2'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(place)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_time_in_which_several_streams_transfer_counts_once() -> None:
    """From 10 to 30 ms two collectives transfer, both at once in half of it, and fill the line."""
    whole = {
        "rank": [0, 0, 1],
        "step": [0, 0, 0],
        "sequence": [1, 2, 1],
        "begun_ns": [0, 10 * MS, 0],
        "heard_ns": [10 * MS, 15 * MS, 10 * MS],
        "end_ns": [25 * MS, 30 * MS, 30 * MS],
        "reducing_ns": [MS, MS, MS],
        "sent_bytes": [10 * PER_MS, 10 * PER_MS, 20 * PER_MS],
    }
    carried = Carried(
        group=np.array(["0"] * 3), **{name: np.array(each) for name, each in whole.items()}
    )
    run = dataclasses.replace(JOBS["line_rate"], carried=carried)
    [said] = carried_evidence(run, {0: 1e9, 1: 1e9})
    assert said.key == "transport_utilization"
    assert said.value == pytest.approx(1.0)
    assert "transferred for 20 ms" in sentence(said)


def test_a_verdict_on_one_of_several_ranks_says_what_that_cannot_show() -> None:
    alone = Rank(length=100, spans=[("compute", "backward", 40, 100)], collectives=[(8, 50, 60)])
    some, every = fw.explain(a_job(alone, workers=4)), fw.explain(a_job(alone, alone))
    assert some.verdict.kind == every.verdict.kind == "host"
    assert (
        "Only 1 of 4 ranks is in the run. The others may be slower, or wait for it."
        in some.verdict.sentence
    )
    assert "ranks is in the run" not in every.verdict.sentence


def test_links_that_are_as_good_as_full_are_not_said_to_scale_worse() -> None:
    found = fw.explain(a_trained_job())
    assert found.full is not None
    worse = dataclasses.replace(found, full=dataclasses.replace(found.full, scaling_factor=0.1))
    assert worse.scaling_factor is not None
    assert worse.scaling is not None
    said = sentence(worse.scaling)
    assert "With full links" not in said
    assert "Full links would not raise it." in said


def test_json_tells_the_passes_of_a_step_and_their_samples(cli: Cli, tmp_path: Path) -> None:
    passes = [("compute", "earlier backward", 0.0, 20.0), ("compute", "backward", 20.0, 50.0)]
    rank = Rank(60, passes, [(PER_MS, 50, 60)])
    job = a_job(rank, rank, facts={**GIGABIT, "pass_samples": 8})
    place = fw.write(job, tmp_path / "job.run")
    shown = json.loads(cli("explain", place, "--json").stdout)
    assert (shown["passes"], shown["pass_samples"]) == (2, 8)
    assert "A step adds up the gradients of 2 passes." in cli("show", place).stdout


@pytest.mark.parametrize("name", ["lab-gloo", "lab-late", "emulated-gloo"])
def test_explain_and_whatif_give_the_same_full_utilization(name: str) -> None:
    run = fw.read(OLD / f"{name}.run")
    full, table = fw.explain(run).full, fw.whatif(run, transport="full")
    assert full is not None
    assert full.step_s == pytest.approx(float(table["step_s"][0]))
    assert full.scaling_factor == pytest.approx(float(table["scaling_factor"][0]), rel=1e-4)
    assert (full.low_s, full.high_s) == pytest.approx([float(end[0]) for end in table.interval_s])


def test_a_full_line_is_no_slower_than_the_one_that_was_measured() -> None:
    """T1 is estimated too long, by less than its error, and so is the replay of the step."""
    found = forecaster(fw.read(OLD / "lab-overlap.run"))
    assert found is not None
    full_s = found.as_modelled().ask(transports=(FullTransport(),)).step_s
    step = dataclasses.replace(
        found.subject.step, measured_ns=round(0.95 * full_s * 1e9), alone_off=(0.4, 0.1)
    )
    subject = with_residue(dataclasses.replace(found.subject, step=step), found.grid.transports[0])
    shorter = dataclasses.replace(found, subject=subject)
    now, full = shorter.ask(), shorter.ask(transports=(FullTransport(),))
    assert now.step_s == pytest.approx(0.95 * full_s)
    assert full.step_s <= now.step_s


def test_beside_a_baseline_computing_that_takes_longer_is_contention_where_ranks_share() -> None:
    one = a_job(Rank(30, [computing(30)]))
    apart = Rank(60, [BACKWARD], [(PER_MS, 50, 60)])  # its sum is not beside computing
    beside = Rank(60, [BACKWARD], [(PER_MS, 40, 60)])
    shared: dict[str, FactValue] = {**GIGABIT, "backend": "gloo", "machines": 1, "processors": 2}
    devices: dict[str, FactValue] = {**GIGABIT, "backend": "nccl"}
    for rank, facts, contention_s in (
        (apart, shared, 0.020),
        (beside, devices, 0.010),
        (apart, devices, 0.0),
    ):
        found = fw.explain(a_job(rank, rank, facts=facts), baseline=one)
        assert found.account["contention"] == pytest.approx(contention_s)
        assert found.account["compute"] == pytest.approx(0.050 - contention_s)
        assert sum(found.account.values()) == pytest.approx(found.step_s)
        assert found.baseline_step_s == pytest.approx(0.030)
        assert found.compute_inflation_s == pytest.approx(0.020)
    assert found.verdict.kind == "compute"
    found = fw.explain(a_job(apart, apart, facts=shared), baseline=one)
    assert found.verdict.kind == "contention"


def test_one_rank_of_several_does_not_say_that_the_job_scales_as_surely_as_all() -> None:
    rank = Rank(54, [BACKWARD], [(PER_MS, 10, 54)])
    every = fw.explain(a_job(rank, rank, steps=12))
    one = fw.explain(a_job(rank, workers=2, steps=12))
    assert (every.verdict.kind, one.verdict.kind) == ("scales", "scales")
    assert every.verdict.sentence.startswith("This job scales")
    assert one.verdict.sentence.startswith("As far as 1 of 2 ranks can show, this job scales")
    assert every.verdict.sureness is not None
    assert sentence(every.verdict.sureness).startswith("Sure")
    assert one.verdict.sureness is not None
    assert (
        "Less sure: 1 of 2 ranks cannot show the lateness and the contention of the others"
    ) in sentence(one.verdict.sureness)


TWO_OF_EACH = """
name = "ours"
nodes = 3
devices_per_node = 2
inside = { kind = "switch", rate = "50Gbps" }
nics = { rate = "1Gbps" }
"""


USUAL_FRAMES = {"payload_share": describe(workers=1, rate=["1Gbps"]).payload_share}


@pytest.mark.parametrize(
    ("more", "made_by", "can_tune"),
    [
        ({}, "--workers 3 --rate 1Gbps", True),
        ({"latency_s": 1e-3}, "--workers 3 --rate 1Gbps --latency 1ms", False),
        (
            {"other_line_rates_bps": ((2.0, 3e8),)},
            "--workers 3 --rate 1Gbps --rate 2:300Mbps",
            False,
        ),
        ({"hosts": "host0,host0,host1,host1"}, "--workers 2 --rate 1Gbps", True),
        ({"hosts": "host0,host0", **USUAL_FRAMES}, "--workers 1 --rate 1Gbps", True),
        ({"congestion": "bbr"}, "--workers 3 --rate 1Gbps --congestion bbr", True),
        ({"cluster": TWO_OF_EACH}, None, False),
        ({"faults": "300 ms slow 1 100 Mbps"}, None, False),
        ({"payload_share": 0.9927}, None, False),
    ],
)
def test_the_next_command_makes_the_lab_of_the_run_again(
    more: dict[str, Any], made_by: str | None, can_tune: bool
) -> None:
    """Formerly a lab of other links or hosts, or without the run's faults, so of another job."""
    facts: dict[str, Any] = {"hosts": "host0,host1,host2", "machines": 1} | more
    told = Facts(**facts)
    run = a_trained_job(buckets=8, ranks=len(str(told.hosts).split(",")))
    found = fw.explain(dataclasses.replace(run, facts=run.facts | told))
    [first, *_] = next_commands(found, "job.run", is_full=True)
    assert first.startswith(f"fullwire lab run {made_by} -o") == (made_by is not None)
    codec = next(fix for fix in found.fixes if fix.kind == "compression")
    worth_it = dataclasses.replace(codec.forecast, step_s=0.001)
    found = dataclasses.replace(found, fixes=(dataclasses.replace(codec, forecast=worth_it),))
    [first] = next_commands(found, "job.run", is_full=False)
    assert first.startswith("fullwire tune --allow numeric --lab --workers ") is can_tune
