"""Jobs with several kinds of steps: the usual step, the account, predictions and comparisons."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.verification import verify
from fullwire.findings.kinds_of_steps import TooFewOfAKind, names_of
from fullwire.fixes.synchronisation import FewerSums
from fullwire.report.as_data import whatif_object
from fullwire.report.explanation import print_explanation
from fullwire.report.recording import recording_lines
from fullwire.run.facts import named
from fullwire.run.kinds import kinds_of, usual_step_s
from fullwire.run.run import Collectives, Gradients, Run
from fullwire.run.usual import Alone, means_of_rounds, steps_of_a_round
from fullwire.simulation.calibrate import calibrated
from fullwire.simulation.forecast import forecaster
from fullwire.simulation.typical import typical_step
from fullwire.timeline.account import account
from fullwire.timeline.alone import alone
from fullwire.timeline.contention import FEWEST_PROBES
from fullwire.timeline.passes import passes_of_step, passes_that_each_sum
from fullwire.timeline.summary import summarised
from fullwire.words import sentence
from tests.jobs_by_hand import a_job_by_turns, a_trained_job

BY_TURNS = [1, 3] * 12
ONE_S, THREE_S = 0.0494, 0.1294  # a step of so many passes, without its scatter
RATES = {0: 1e9, 1: 1e9}


def test_steps_are_of_one_kind_by_what_they_do_and_not_by_their_time() -> None:
    found = kinds_of(a_job_by_turns(BY_TURNS))
    assert [(kind.share, kind.passes) for kind in found.kinds] == [(0.5, 1.0), (0.5, 3.0)]
    assert found.places.tolist() == [0, 1] * 12
    assert not kinds_of(a_job_by_turns([2] * 24)).kinds


def test_a_rare_kind_and_kinds_that_take_as_long_make_no_kinds() -> None:
    assert not kinds_of(a_job_by_turns([1] * 21 + [3] * 3)).kinds
    assert not kinds_of(a_job_by_turns([1] * 60 + [3] * 4)).kinds
    # A rare kind is one of the job if its steps come regularly.
    rare, often = [1] * 19 + [3], kinds_of(a_job_by_turns(([1] * 19 + [3]) * 4)).kinds
    assert [kind.share for kind in often] == pytest.approx([0.95, 0.05])
    assert not kinds_of(a_job_by_turns(rare + [1] * 30 + rare * 3)).kinds
    long = a_job_by_turns([20, 21] * 12)  # 5 % longer
    assert not kinds_of(long).kinds


def test_a_tiny_sum_makes_no_kind_and_a_large_one_does() -> None:
    run = a_job_by_turns([1] * 24)
    every_other = (run.collectives.step % 2 == 0) & (run.collectives.sequence % 2 == 0)
    small = run.collectives.bytes + np.where(every_other, 400, 0)
    logged = dataclasses.replace(run, collectives=dataclasses.replace(run.collectives, bytes=small))
    assert not kinds_of(logged).kinds
    kept = run.collectives.rows((run.collectives.step % 2 == 0) | (run.collectives.step < 0))
    spans = run.spans
    is_short = (spans.name == "step") & (spans.step % 2 == 1)
    ends_ns = np.where(is_short, spans.end_ns - 12_000_000, spans.end_ns)
    every_other_sums = dataclasses.replace(
        run, collectives=kept, spans=dataclasses.replace(spans, end_ns=ends_ns)
    )
    found = kinds_of(every_other_sums).kinds
    assert [kind.sent_bytes for kind in found] == [0.0, 2_000_000.0]


@pytest.mark.parametrize("steps", [18, 22, 26])
def test_steps_that_take_turns_are_no_change_midway(steps: int) -> None:
    """Each half has an odd number of steps, so most of the first are of one kind."""
    found = fw.explain(a_job_by_turns([1, 3] * (steps // 2)))
    assert not [each for each in found.warnings if "midway" in each]


@pytest.mark.parametrize(
    "passes",
    [
        [1] * 12 + [3] * 12,
        [1] * 8 + [2] * 8 + [3] * 8,  # a batch that grows
        [1, 1, 1, 3] * 4 + [3, 3, 3, 1] * 4,
    ],
)
def test_steps_that_become_of_another_kind_midway_are_a_change(passes: list[int]) -> None:
    [told] = [each for each in fw.explain(a_job_by_turns(passes)).warnings if "midway" in each]
    assert re.search(r"take (49|50)\S* ms in the first half of the run and 12[789]", told)


def test_blocks_of_steps_that_take_turns_are_no_change_midway() -> None:
    found = fw.explain(a_job_by_turns(([1] * 4 + [3] * 4) * 3))
    assert not [each for each in found.warnings if "midway" in each]


@pytest.mark.parametrize(
    ("every", "steps"), [(2, 14), (3, 15), (4, 28), (4, 40), (10, 60), (10, 70)]
)
def test_a_job_that_becomes_slower_midway_is_told_from_few_rounds_too(
    every: int, steps: int
) -> None:
    silent = [number for number in range(steps) if number % every < every - 1]

    def told(slow: range) -> list[str]:
        run = a_job_by_turns([1] * steps, silent=silent, slow=slow)
        return [each for each in fw.explain(run).warnings if "midway" in each]

    assert not told(range(0))
    [change] = told(range(steps // 2, steps))
    assert "in compute" in change


def test_the_usual_step_has_each_kind_at_its_share() -> None:
    run = a_job_by_turns([1, 1, 3] * 10)
    mean_s = (2 * ONE_S + THREE_S) / 3
    assert usual_step_s(run) == pytest.approx(mean_s, rel=0.005)
    found = account(run, RATES)
    assert found.step_s == pytest.approx(usual_step_s(run), abs=1e-8)
    assert [kind.step_s for kind in found.by_kind()] == pytest.approx([ONE_S, THREE_S], rel=0.01)
    assert summarised([run]).step_s == pytest.approx(found.step_s, abs=1e-8)
    assert fw.compare(run, run_again(run)).before_s == pytest.approx(found.step_s, rel=1e-6)


def run_again(run: Run) -> Run:
    """Return the same run a microsecond later, so that it is no copy."""
    spans = run.spans
    moved = dataclasses.replace(spans, start_ns=spans.start_ns + 1000, end_ns=spans.end_ns + 1000)
    return dataclasses.replace(run, spans=moved)


def test_missing_steps_of_a_kind_do_not_move_the_usual_step() -> None:
    run = a_job_by_turns([1, 3] * 16, probes=(5, 9, 13, 17, 21))  # all of one kind
    assert [kind.share for kind in kinds_of(run).kinds] == [0.5, 0.5]
    assert usual_step_s(run) == pytest.approx((ONE_S + THREE_S) / 2, rel=0.005)
    assert summarised([run]).step_s == pytest.approx(usual_step_s(run), abs=1e-8)


def test_the_explanation_names_the_kinds_where_it_prints_the_step() -> None:
    found = fw.explain(a_job_by_turns(BY_TURNS))
    [told] = [note for note in found.warnings if "kinds" in note]
    assert "Steps are of 2 kinds: 50% take 49" in told
    assert "with 1 pass" in told
    assert "with 3 passes" in told
    assert not [note for note in found.warnings if "over 1.25 times" in note]


def test_probe_steps_of_a_kind_tell_the_contention_of_that_kind() -> None:
    run = a_job_by_turns([1, 3] * 12, probes=(5, 8, 13, 16, 21))
    where = named({"hosts": "a,b", "machines": 2, "processors": 4})
    placed = dataclasses.replace(run, facts=run.facts | where)
    found = account(placed, RATES)
    assert [crowding.probes for crowding in found.of_kinds] == [FEWEST_PROBES, 3]
    computing_s = [kind.crowding.alone_s for kind in found.by_kind()]
    assert computing_s == pytest.approx([0.036, 0.108], rel=0.03)
    told = alone(placed, found)
    assert told.time_s == pytest.approx(0.073, rel=0.03)
    low_s, high_s = (told.low_s / told.time_s, told.high_s / told.time_s)
    assert low_s > 0.8
    assert high_s < 1.25


def test_passes_of_a_step_are_a_mean_and_a_pass_is_compared_with_a_pass() -> None:
    by_turns, two, one = (
        a_job_by_turns(BY_TURNS),
        a_job_by_turns([2] * 24),
        a_job_by_turns([1] * 24),
    )
    assert passes_of_step(by_turns) == 2
    assert passes_of_step(a_job_by_turns([1, 1, 3] * 10)) == pytest.approx(5 / 3)
    found = fw.compare(two, by_turns)
    assert found.passes is None
    assert found.ratio == pytest.approx(1.0, abs=0.01)
    found = fw.compare(one, by_turns)
    assert found.passes == (1.0, 2.0)
    assert found.after_s == pytest.approx((ONE_S + THREE_S) / 4, rel=0.01)


def asked(run: Run | list[Run], **conditions: object) -> fw.WhatIf:
    """Predict a run on its measured transport."""
    return fw.whatif(run, transport="measured", **conditions)  # type: ignore[arg-type]


def test_each_kind_is_predicted_by_itself_and_the_job_is_their_mean() -> None:
    run = a_job_by_turns(BY_TURNS)
    found = asked(run, bandwidth="1Gbps")
    one, three = found.kinds(0)
    assert (one.name, one.share, one.passes) == ("1 pass", 0.5, 1.0)
    assert (three.name, three.share, three.passes) == ("3 passes", 0.5, 3.0)
    for kind, measured in zip((one, three), account(run, RATES).by_kind(), strict=True):
        assert kind.low_s < measured.step_s < kind.high_s
        assert kind.step_s == pytest.approx(measured.step_s, rel=0.005)
        assert kind.high_s - kind.low_s < 0.25 * kind.step_s
    assert found["step_s"][0] == pytest.approx((one.step_s + three.step_s) / 2)
    assert found.interval_s[0][0] == pytest.approx((one.low_s + three.low_s) / 2)
    assert found.interval_s[1][0] == pytest.approx((one.high_s + three.high_s) / 2)
    ratio = found["baseline_step_s"][0] / found["step_s"][0]
    assert found["scaling_factor"][0] == pytest.approx(ratio)
    [row] = whatif_object(found)["rows"]
    assert row["kinds"][1]["interval"] == {"low_s": three.low_s, "high_s": three.high_s}
    assert "kinds" not in whatif_object(asked(a_job_by_turns([2] * 24)))["rows"][0]


@pytest.mark.parametrize(("shown_bps", "asked_bps"), [(1e9, 4e9), (4e9, 1e9)])
def test_other_links_change_each_kind_as_they_would(shown_bps: float, asked_bps: float) -> None:
    shown = a_job_by_turns(BY_TURNS, rate_bps=shown_bps)
    truth = account(a_job_by_turns(BY_TURNS, rate_bps=asked_bps), {})
    found = asked(shown, bandwidth=asked_bps)
    assert found["step_s"][0] == pytest.approx(truth.step_s, rel=0.03)
    for kind, measured in zip(found.kinds(0), truth.by_kind(), strict=True):
        assert kind.low_s < measured.step_s < kind.high_s


def test_the_rows_of_changes_and_of_other_runs_have_their_own_kinds() -> None:
    by_turns, alike = a_job_by_turns(BY_TURNS), a_job_by_turns([2] * 24)
    found = asked([alike, by_turns], bandwidth="1Gbps,4Gbps", compute_speed="1,2")
    kinds = [found.kinds(row) for row in range(len(found))]
    assert [len(each) for each in kinds] == [0] * 4 + [2] * 4
    for row, each in list(enumerate(kinds))[4:]:
        mean_s = sum(kind.share * kind.step_s for kind in each)
        assert found["step_s"][row] == pytest.approx(mean_s)
    assert kinds[4][1].step_s > 1.5 * kinds[6][1].step_s


def test_fixes_and_targets_are_of_the_mean_step() -> None:
    run = a_job_by_turns(BY_TURNS)
    job = forecaster(run)
    assert job is not None
    assert job.measured_s == pytest.approx(account(run, RATES).step_s, rel=1e-6)
    assert job.ask().step_s == pytest.approx(job.measured_s, rel=0.005)
    sooner = job.beginning_sooner(1_000_000)
    assert sooner is not None
    assert sooner.step_s == pytest.approx(job.as_modelled().ask().step_s - 0.001, rel=0.01)
    # No step loses more than T1 has, where contention is a part of computing.
    crowded = a_trained_job(late_ms=0.0)
    every = forecaster(crowded, alone=Alone(0.02, 0.01, 0.03))
    assert every is not None
    all_gone = every.beginning_sooner(10**12)
    assert all_gone is not None
    assert all_gone.scaling_factor >= 0
    found = asked(run, bandwidth="1Gbps", target="0.9")
    assert found.targets is not None
    [least] = found.targets.least_bandwidth
    played = fw.replay(run, transport="measured", bandwidth="4Gbps", workers=2)
    predicted_s = asked(run, bandwidth="4Gbps")["step_s"][0]
    assert usual_step_s(played) == pytest.approx(predicted_s, rel=0.005)
    reached = asked(run, bandwidth=least.bandwidth_bps)
    assert reached["scaling_factor"][0] == pytest.approx(0.9, abs=1e-6)


def test_a_prediction_is_held_against_the_mean_step_of_the_second_run() -> None:
    shown, after = a_job_by_turns(BY_TURNS), a_job_by_turns([1, 1, 3] * 10, rate_bps=4e9)
    usual_s = usual_step_s(after)
    assert usual_s is not None
    assert typical_step(after).measured_ns == pytest.approx(usual_s * 1e9, rel=1e-6)
    found = verify(shown, a_job_by_turns(BY_TURNS, rate_bps=4e9))
    assert found is not None
    assert found.measured_s == pytest.approx((ONE_S + THREE_S) / 2 - 0.0063, rel=0.02)
    assert found.predicted_s == pytest.approx(found.measured_s, rel=0.03)


def test_kinds_that_send_other_bytes_do_not_make_the_transport_unsure() -> None:
    run = a_job_by_turns([1] * 24)
    table = run.collectives
    kept = table.rows((table.step % 2 == 0) | (table.sequence % 2 == 0))
    spans = run.spans
    is_short = (spans.name == "step") & (spans.step % 2 == 1)
    ends_ns = np.where(is_short, spans.end_ns - 8_400_000, spans.end_ns)
    by_turns = dataclasses.replace(
        run, collectives=kept, spans=dataclasses.replace(spans, end_ns=ends_ns)
    )
    assert len(kinds_of(by_turns).kinds) == 2
    sooner, later = calibrated([by_turns]).between
    for name in ("share", "processor_s_per_byte"):
        assert getattr(sooner, name) == pytest.approx(getattr(later, name), rel=0.1)


UNEVEN = [0, 3, 4, 9, 11, 15, 16, 22]  # the only steps that send, at no equal distances


def sums_unevenly(rate_bps: float = 1e9) -> Run:
    """Make a run of 24 steps, of which a third send all gradients and the others nothing."""
    silent = [step for step in range(24) if step not in UNEVEN]
    return a_job_by_turns([1] * 24, rate_bps=rate_bps, silent=silent)


def test_a_kind_that_sends_nothing_is_predicted_without_messages() -> None:
    run, slower = sums_unevenly(), sums_unevenly(rate_bps=1e8)
    truth = account(slower, {})
    found = asked(run, bandwidth="100Mbps")
    assert found["step_s"][0] == pytest.approx(truth.step_s, rel=0.03)
    for kind, measured in zip(found.kinds(0), truth.by_kind(), strict=True):
        assert kind.step_s == pytest.approx(measured.step_s, rel=0.05)
    for policy in ("none", "horovod:64MiB/5ms"):  # whatever the buckets
        [at_any_rate] = {
            round(asked(run, bandwidth=rate, buckets=policy).kinds(0)[0].step_s, 6)
            for rate in ("100Mbps", "10Gbps")
        }
        assert at_any_rate == pytest.approx(0.041, rel=0.01)
    assert verify(run, slower) is not None
    played = usual_step_s(fw.replay(run, transport="measured", bandwidth="100Mbps", workers=2))
    assert played is not None
    assert played < 1.05 * truth.step_s


def test_a_few_bytes_beside_the_sums_of_another_kind_are_nothing() -> None:
    kinds = kinds_of(sums_unevenly()).kinds
    few = dataclasses.replace(kinds[0], sent_bytes=1.085)
    assert names_of([few, kinds[1]]) == names_of(kinds) == ("nothing sent", "2 MB sent")


@pytest.mark.parametrize("share", [0.02, 0.2])
def test_steps_are_named_by_their_bytes_where_these_are_predicted(share: float) -> None:
    run = sums_unevenly()
    ends = run.spans.rows(run.spans.name == "step")
    ends = ends.rows(~np.isin(ends.step, UNEVEN))
    logged = dataclasses.replace(
        run.collectives.rows(np.zeros(len(ends), np.int64)),
        rank=ends.rank,
        step=ends.step,
        sequence=100 + ends.step,
        bytes=np.full(len(ends), round(share * 2_000_000)),
        issue_ns=ends.end_ns - 500_000,
        start_ns=ends.end_ns - 500_000,
        end_ns=ends.end_ns,
    )
    few = dataclasses.replace(run, collectives=Collectives.joined([run.collectives, logged]))
    kinds = kinds_of(few).kinds
    assert min(kind.sent_bytes for kind in kinds) == share * 2_000_000
    found = fw.whatif(few).subjects[0].kinds
    predicted = [0.0 if of.step.sends_nothing else kind.sent_bytes for kind, of in found]
    named_so = [name == "nothing sent" for name in names_of(kinds)]
    assert named_so == [sent == 0.0 for sent in predicted]


def with_half_of_the_gradients(run: Run) -> Run:
    """Return the run with every other step making one of its two gradients, and sending both."""
    gradients = run.gradients
    kept = (gradients.step % 2 == 1) | (gradients.order == 1)
    return dataclasses.replace(run, gradients=gradients.rows(kept))


@pytest.mark.parametrize("asked_bps", [1e8, 4e9])
def test_a_kind_that_sends_more_than_its_gradients_is_predicted_by_its_buckets(
    asked_bps: float,
) -> None:
    run = with_half_of_the_gradients(a_job_by_turns(BY_TURNS))
    assert [kind.gradients for kind in kinds_of(run).kinds] == [1, 2]
    truth = account(with_half_of_the_gradients(a_job_by_turns(BY_TURNS, rate_bps=asked_bps)), {})
    found = asked(run, bandwidth=asked_bps)
    for kind, measured in zip(found.kinds(0), truth.by_kind(), strict=True):
        assert kind.step_s == pytest.approx(measured.step_s, rel=0.03)


def test_a_round_is_told_in_spite_of_tiny_broadcasts_and_of_probe_steps() -> None:
    """DDP tells its new buckets after the first sum, and a probe step has no number."""
    silent = [step for step in range(60) if step % 4 != 3]
    run = a_job_by_turns([1] * 60, probes=(11, 14, 27, 30, 43, 46), silent=silent)
    table = run.collectives
    first = np.flatnonzero(table.step == 3)
    tiny = dataclasses.replace(
        table.rows(first), step=table.step[first] + 1, bytes=np.full(len(first), 32)
    )
    told = dataclasses.replace(run, collectives=type(table).joined([table, tiny]))
    assert steps_of_a_round(told) == 4
    numbers = np.array([step for step in range(60) if step not in (11, 14, 27, 30, 43, 46)])
    lengths = np.where(numbers % 4 == 3, 30.0, 2.0)
    rounds = means_of_rounds(told, numbers, lengths)
    assert rounds.tolist() == [9.0] * 11  # of fourteen, three have probe steps


def test_alike_steps_that_send_more_than_their_gradients_are_predicted_by_their_buckets() -> None:
    """DDP sends the places of a branch that never runs, too."""
    run, slower = (a_job_by_turns([1] * 24, rate_bps=rate_bps) for rate_bps in (1e9, 1e8))
    half = dataclasses.replace(run, gradients=run.gradients.rows(run.gradients.order == 1))
    found = asked(half, bandwidth="100Mbps")
    assert found["step_s"][0] == pytest.approx(account(slower, {}).step_s, rel=0.03)


@pytest.mark.parametrize("times", [1, 3])
def test_gradients_that_a_rank_keeps_are_not_in_its_buckets(times: int) -> None:
    """Experts are outside DDP. Their gradients were once sent, too: twice the bytes of the job."""
    run, slower = (a_job_by_turns([1] * 24, rate_bps=rate_bps) for rate_bps in (1e9, 1e8))
    kept = run.gradients.rows(run.gradients.order == 0)
    more = [dataclasses.replace(kept, order=kept.order + 2 + place) for place in range(times)]
    experts = dataclasses.replace(run, gradients=Gradients.joined([run.gradients, *more]))
    for rate, truth in (("1Gbps", run), ("100Mbps", slower)):
        found = asked(experts, bandwidth=rate)
        assert found["step_s"][0] == pytest.approx(account(truth, {}).step_s, rel=0.03)
    # A trace may have lost sums, and of a recording some may not be found.
    lost = dataclasses.replace(
        experts, provenance=dataclasses.replace(run.provenance, origin="imported")
    )
    assert asked(lost, bandwidth="100Mbps")["step_s"][0] > 1.3 * account(slower, {}).step_s


def test_uneven_steps_that_sum_in_each_pass_are_told_to_sum_once() -> None:
    """They were told to sum once in several steps, which changes the training."""
    passes = [4, 4, 1] * 12
    run, once = a_job_by_turns(passes, sums_each=True), a_job_by_turns(passes)
    assert passes_that_each_sum(run) == pytest.approx(3)
    assert passes_that_each_sum(once) == 0
    [fix] = [fix for fix in fw.explain(run).fixes if fix.kind == "accumulation"]
    assert not [fix for fix in fw.explain(run).fixes if fix.kind == "synchronisation"]
    assert fix.risk == "exact"
    assert sentence(fix) == "one sum a step"
    assert fix.step_s == pytest.approx(usual_step_s(once), rel=0.02)


@pytest.mark.parametrize("passes", [[4] * 24, [4, 4, 1] * 12])
def test_a_comparison_holds_one_sum_a_step_against_its_prediction(passes: list[int]) -> None:
    each, once = a_job_by_turns(passes, sums_each=True), a_job_by_turns(passes)
    found = verify(each, once)
    assert found is not None
    assert found.changes == ("one sum a step",)
    assert found.predicted_s == pytest.approx(found.measured_s, rel=0.01)
    assert found.holds
    assert verify(once, each) is None  # nobody saw the sums of its earlier passes
    slower = verify(each, a_job_by_turns(passes, rate_bps=5e8))
    assert slower is not None
    assert slower.changes == ("links of 500 Mbps", "one sum a step")
    assert slower.predicted_s == pytest.approx(slower.measured_s, rel=0.02)


@pytest.mark.parametrize("has_all_gradients", [True, False])
def test_a_job_in_rounds_has_its_kinds_of_passes(has_all_gradients: bool) -> None:
    """Each third step has two passes, and each second one sums."""
    passes, silent = [2, 1, 1] * 20, range(1, 60, 2)
    run = a_job_by_turns(passes, silent=silent)
    if not has_all_gradients:
        made = run.gradients
        run = dataclasses.replace(run, gradients=made.rows(made.step % 2 == 0))
    usual, slower = account(run, RATES), a_job_by_turns(passes, silent=silent, rate_bps=1e8)
    told = alone(run, usual)
    step = typical_step(run)
    assert step.measured_ns == pytest.approx(usual.step_s * 1e9, rel=1e-6)
    assert step.alone_ns == pytest.approx(told.time_s * 1e9, rel=0.01)
    found = asked(run, bandwidth="1Gbps,100Mbps")
    assert found["local_steps"].tolist() == [2, 2]
    assert found["step_s"][0] == pytest.approx(usual.step_s, rel=0.005)
    assert found["step_s"][1] == pytest.approx(account(slower, {}).step_s, rel=0.06)


def test_ranks_that_share_no_steps_and_have_a_kind_each_have_an_account() -> None:
    """Then the account is of one rank, whose steps are alike."""
    run = a_job_by_turns([1] * 12 + [3] * 12)
    spans, gradients = run.spans, run.gradients
    parted = dataclasses.replace(
        run,
        spans=spans.rows((spans.rank == 0) == (spans.step < 12)),
        gradients=gradients.rows((gradients.rank == 0) == (gradients.step < 12)),
        collectives=type(run.collectives).empty(),
    )
    assert len(kinds_of(parted).kinds) == 2
    found = account(parted, RATES)
    assert found.by_kind() == ()
    assert found.step_s == pytest.approx(ONE_S, rel=0.02)


def test_a_recording_without_steps_has_no_kinds_and_a_summary() -> None:
    run = a_job_by_turns(BY_TURNS)
    spans = run.spans.rows(run.spans.name != "step")
    unmarked = dataclasses.replace(run, spans=spans)
    assert not kinds_of(unmarked).kinds
    assert summarised([unmarked]).step_s is None
    assert summarised([run]).kinds == 2


def test_all_commands_have_one_step_of_a_job_in_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    """Workers that sum once in four steps: the account had each step by itself, and was shorter."""
    job = a_job_by_turns([1, 1, 1, 3] * 8)
    sums = job.collectives
    rounds = dataclasses.replace(job, collectives=sums.rows(sums.step % 4 == 1))
    kinds, found, step = kinds_of(rounds), account(rounds, RATES), typical_step(rounds)
    assert kinds.rounds.tolist() == [
        [first, first + 1, first + 2, first + 3] for first in range(1, 28, 4)
    ]
    assert step.measured_ns is not None
    assert found.step_s == pytest.approx(step.measured_ns * 1e-9)
    assert usual_step_s(rounds) == pytest.approx(found.step_s)
    assert summarised([rounds]).step_s == pytest.approx(found.step_s)
    assert int(found.is_typical.sum()) % 4 == 0
    print_explanation(fw.explain(rounds))
    assert "7 rounds of 4 steps" in capsys.readouterr().out.replace("\n", " ")


def test_a_round_of_no_sync_ends_in_a_sum_beside_the_backward_pass() -> None:
    """Other rounds take what their recordings take; the sum counted as exposed as a whole."""
    rounds = {
        every: a_job_by_turns([1] * 48, silent=[at for at in range(48) if at % every])
        for every in (1, 2, 4, 8)
    }
    assert steps_of_a_round(rounds[4]) == 4
    asked_of = asked(rounds[4], local_steps=(1, 2, 4, 8))
    measured_s = [account(run, RATES).step_s for run in rounds.values()]
    assert asked_of["step_s"] == pytest.approx(measured_s, rel=0.01)
    fixes = fw.explain(rounds[4]).fixes
    assert {fix.every for fix in fixes if isinstance(fix, FewerSums)} == {8, 16}


def test_a_prediction_is_held_against_steps_with_fewer_gradients_too() -> None:
    def with_branch(run: Run) -> Run:
        made = run.gradients
        return dataclasses.replace(
            run, gradients=made.rows((made.step % 2 == 1) | (made.order == 1))
        )

    before, after = (with_branch(a_job_by_turns(BY_TURNS, rate_bps=rate)) for rate in (1e9, 2e8))
    found = verify(before, after)
    assert found is not None
    assert [kind.gradients for kind in kinds_of(after).kinds] == [1.0, 2.0]
    assert found.measured_s == pytest.approx(usual_step_s(after))


@pytest.mark.parametrize("slow_of_ten", [3, 5, 6])
def test_steps_of_two_lengths_have_one_usual_step_in_the_account_and_in_predictions(
    slow_of_ten: int,
) -> None:
    slow = [number for number in range(40) if number % 10 < slow_of_ten]
    run = a_job_by_turns([1] * 40, slow=slow)
    assert not kinds_of(run).kinds
    of_run, step = account(run, RATES), typical_step(run)
    assert step.measured_ns == pytest.approx(of_run.step_s * 1e9, abs=2)
    assert step.alone_ns == pytest.approx(of_run.alone_s * 1e9, rel=1e-4)
    computing_ns = step.forward_ns + step.backward_ns
    assert computing_ns == pytest.approx(of_run.parts_s["compute"] * 1e9, rel=1e-4)
    # A step on the fastest links loses no more than the account has of communication.
    fastest = fw.whatif(run, bandwidth="100Tbps").predictions.measures
    assert float(fastest["baseline_step_s"].item()) == pytest.approx(of_run.alone_s, rel=1e-4)
    assert float(fastest["step_s"].item()) >= of_run.alone_s * (1 - 1e-4)


def test_few_steps_of_a_kind_have_the_same_usual_ones_in_the_account_and_in_predictions() -> None:
    run = a_job_by_turns([1, 3, 3] * 7, slow=[8, 10, 11, 12, 13, 17, 18])
    of_run = account(run, RATES)
    [of_subject] = fw.whatif(run).subjects
    measured_s = [(of_kind.step.measured_ns or 0) * 1e-9 for _, of_kind in of_subject.kinds]
    assert measured_s == pytest.approx([kind.step_s for kind in of_run.by_kind()], rel=1e-6)
    assert (of_subject.step.measured_ns or 0) * 1e-9 == pytest.approx(of_run.step_s, rel=0.01)


@pytest.mark.parametrize(
    ("passes", "unlike"),
    [([1, 1, 3] * 3, 3), ([1, 3] * 3, 3), ([1, 3] * 4, 0), ([2] * 9, 0), ([1] * 60 + [3] * 3, 0)],
)
def test_every_command_says_that_unlike_steps_are_too_few_for_a_kind(
    passes: list[int], unlike: int
) -> None:
    run = a_job_by_turns(passes)
    assert summarised([run]).unlike == unlike
    compared = fw.compare(run, a_job_by_turns([1] * 12)).notes
    for notes in (fw.explain(run).notes, fw.whatif(run).notes, compared):
        said = [note for note in notes if isinstance(note, TooFewOfAKind)]
        assert [note.count for note in said] == ([unlike] if unlike else [])
        for note in said:
            assert f"{unlike} steps do other work than the rest, and take" in sentence(note)


def test_the_lines_after_a_recording_tell_of_unlike_steps_that_are_too_few(tmp_path: Path) -> None:
    for passes, is_said in (([1, 1, 3] * 3, True), ([1] * 9, False)):
        place = fw.write(a_job_by_turns(passes), tmp_path / f"{is_said}.run")
        assert ("3 steps do other work" in " ".join(recording_lines(place))) == is_said
