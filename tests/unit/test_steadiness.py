"""Unsteady steps: the findings that the mean step would hide."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

import fullwire as fw
from fullwire.report.explanation import print_explanation
from fullwire.run.facts import Facts
from fullwire.run.run import Collectives, Provenance, Run, Spans
from fullwire.run.usual import kept_steps, regular_steps
from fullwire.timeline.account import Part
from fullwire.timeline.steadiness import few_steps
from fullwire.units import show_time
from fullwire.words import sentence, setting
from tests.builders import MS, spans
from tests.trained_jobs import a_trained_job, a_transport, with_long_steps


def a_job(waits_ms: Sequence[int], computes_ms: Sequence[int]) -> Run:
    """Make a run of two ranks whose steps wait for data and compute for the given times."""
    rows, start = [], 0
    for step, (waits, computes) in enumerate(zip(waits_ms, computes_ms, strict=True)):
        begin, end = start + waits * MS, start + (waits + computes) * MS
        rows += [
            spans(
                ("host", "step", start, end),
                ("input", "wait", start, begin),
                ("compute", "backward", begin, end),
                ("communication", "wait", end - MS, end),
                rank=rank,
                step=step,
            )
            for rank in (0, 1)
        ]
        start = end
    return Run(
        provenance=Provenance(origin="measured", source="a test"),
        facts=Facts(workers=2, line_rate_bps=1e9),
        spans=Spans.joined(rows),
    )


def test_a_loss_of_few_steps_is_said_to_be_theirs() -> None:
    found = fw.explain(a_job([100 * (step % 5 == 4) for step in range(20)], [100] * 20))
    assert found.verdict.kind == "input"
    assert found.verdict.sentence.endswith(
        "Of this loss 100% is in 4 of 20 steps, which take 200 ms. The others take 100 ms."
    )
    assert "Of this loss" not in fw.explain(a_job([30] * 20, [100] * 20)).verdict.sentence


def test_what_few_steps_lose_is_the_first_thing_that_would_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = fw.explain(
        with_long_steps(a_trained_job(a_transport(), steps=20), every=3, longer_ms=2000)
    )
    assert found.verdict.kind == "host"
    first = found.fixes[0]
    assert sentence(first) == "6 long steps of 20 like the others"
    whole_s = found.detail.over_all().step_s
    assert first.step_s < found.step_s < whole_s
    assert found.fixes_from_s == pytest.approx(whole_s)
    assert all(first.step_s < each.step_s < whole_s for each in found.fixes[1:])
    print_explanation(found)
    shown = capsys.readouterr().out
    assert f"step (mean of all {show_time(whole_s)})" in shown
    assert any("The verdict and the fixes are of all 20 steps" in each for each in found.warnings)


def test_what_few_steps_lose_is_the_first_fix_without_a_line_rate_too() -> None:
    """Ranks of one host have no line rate: the account alone gives the step without the loss."""
    job = with_long_steps(a_trained_job(a_transport(), steps=20), every=3, longer_ms=2000)
    found = fw.explain(dataclasses.replace(job, facts=job.facts.without(("line_rate_bps",))))
    assert found.verdict.kind == "host"
    first = found.fixes[0]
    assert sentence(first) == "6 long steps of 20 like the others"
    assert "less often" in setting(first)
    usual = few_steps(found.detail.over_all(), Part.HOST)
    assert usual is not None
    assert first.step_s == pytest.approx(usual.usual_s.value)
    # One worker has the loss too: without it, a step with one worker only computes.
    computes_s = found.detail.over_all().parts_s[Part.COMPUTE.key]
    assert first.scaling_factor == pytest.approx(computes_s / first.step_s)
    steady = a_trained_job(a_transport(), steps=20)
    found = fw.explain(dataclasses.replace(steady, facts=steady.facts.without(("line_rate_bps",))))
    assert not any("long steps" in sentence(fix) for fix in found.fixes)


def test_a_storm_of_few_steps_is_to_be_joined_there() -> None:
    """Every fifth step sums 200 numbers, one after the other, and takes 10 ms for each."""
    job = with_long_steps(a_trained_job(a_transport(), steps=20), every=5, longer_ms=2000)
    ends = job.spans.rows((job.spans.name == "step") & (job.spans.step % 5 == 4))
    row, place = np.repeat(np.arange(len(ends)), 200), np.tile(np.arange(200), len(ends))
    issue_ns = ends.end_ns[row] + (place - 200) * 10 * MS
    rows = job.collectives.rows(np.zeros(len(row), np.int64))
    storm = dataclasses.replace(
        rows,
        rank=ends.rank[row],
        step=ends.step[row],
        bytes=np.full(len(row), 16),
        sequence=10_000 + ends.step[row] * 200 + place,
        issue_ns=issue_ns,
        start_ns=issue_ns,
        end_ns=issue_ns + 10 * MS,
    )
    collectives = type(rows).joined([job.collectives, storm])
    found = fw.explain(dataclasses.replace(job, collectives=collectives))
    assert found.verdict.kind == "latency"
    assert sentence(found.fixes[0]) == "4 long steps of 20 like the others"
    assert "join them into one" in setting(found.fixes[0])
    assert all(fix.step_s > found.fixes[0].step_s for fix in found.fixes[1:])


def test_a_job_that_becomes_slower_midway_is_said_to() -> None:
    [said] = midway(a_job([1] * 20, [100] * 10 + [150] * 10))
    assert "101 ms in the first half of the run and 151 ms in the second" in said
    assert "difference is in compute" in said
    assert not midway(a_job([1] * 20, [100, 150] * 10))
    assert not midway(a_job([1] * 20, [100] * 20))


def midway(run: Run) -> list[str]:
    return [each for each in fw.explain(run).warnings if "midway" in each]


def test_what_would_help_speaks_of_the_step_that_it_is_predicted_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = a_trained_job(a_transport(), steps=20)
    found = fw.explain(job)
    print_explanation(found)
    assert f"step (now {show_time(found.step_s)})" in capsys.readouterr().out
    rarely = fw.explain(with_long_steps(job, every=5, longer_ms=300))
    assert rarely.step_s == pytest.approx(found.step_s)  # 4 of 20 are outside the middle half
    [said] = [each for each in rarely.warnings if "times the usual" in each]
    assert (
        said == "4 of 20 steps take over 1.25 times the usual: 1.2 s more in all, most of it host."
    )


@pytest.mark.parametrize(
    ("places", "regular"),
    [
        (range(29, 300, 30), range(29, 300, 30)),  # a sum once in 30 steps
        ((*range(29, 300, 30), 100), range(29, 300, 30)),  # and a pause of the machine
        ([*range(29, 120, 30)], ()),  # too few to tell
        ((3, 40, 55, 101, 222, 290), ()),  # at no distance
        ((100, 101, 102, 103, 104, 105), ()),  # one pause over several steps
    ],
)
def test_long_steps_at_equal_distances_are_the_jobs_own(
    places: Iterable[int], regular: Iterable[int]
) -> None:
    length_ns = np.full(300, 2e6)
    length_ns[[*places]] = 90e6
    assert np.flatnonzero(regular_steps(length_ns)).tolist() == [*regular]
    assert not kept_steps(length_ns)[[*places]].any()


def test_a_loss_of_rare_regular_steps_is_the_verdict() -> None:
    """One step in 30 waits 20 times as long as it computes: two thirds of the time."""
    waits_ms = [200 if step % 30 == 29 else 0 for step in range(300)]
    found = fw.explain(a_job(waits_ms, [10] * 300))
    assert found.verdict.kind == "input"
    assert found.is_of_all_steps
    assert "10 of 300 steps" in found.verdict.sentence
    irregular_ms = [200 if step in (3, 40, 55, 101, 222, 290) else 0 for step in range(300)]
    assert not fw.explain(a_job(irregular_ms, [10] * 300)).is_of_all_steps


def a_job_that_saves(
    *,
    late: tuple[int, ...],
    saves: bool = False,
    scatter: int = 0,
    sent_ms: int = 0,
    pause_ms: int = 300,
    longer_ms: int = 0,
    then: tuple[int, ...] = (),
) -> Run:
    """Let some ranks of two pause in each fifth of 20 steps of 100 ms, and others in the 25th.

    Rank 0 may pause for longer than rank 1.
    In the other steps both begin their sum later by turns, and compute meanwhile. A sum that sends
    for some time begins only after a rank has computed.
    """
    rows, sums, start = [], [], 0
    for step in range(25 if then else 20):
        paused = (then if step == 24 else late) if step % 5 == 4 else ()
        lengths = (pause_ms + longer_ms) * MS, pause_ms * MS
        pauses = [lengths[rank] * (rank in paused) for rank in (0, 1)]
        turns = [0 if paused else scatter * MS * ((step + rank) % 2) for rank in (0, 1)]
        before_ns = (100 if sent_ms else 10) * MS
        issues = [
            start + pause + before_ns + turn for pause, turn in zip(pauses, turns, strict=True)
        ]
        end = max(start + max(pauses) + 100 * MS, max(issues) + sent_ms * MS)
        for rank in (0, 1):
            begin = start + pauses[rank]
            computed = max(begin + 100 * MS, issues[rank])
            rows += [
                spans(("host", "step", start, end), rank=rank, step=step),
                spans(("compute", "forward", begin, computed), rank=rank, step=step),
            ]
            if pauses[rank] and saves:
                rows.append(spans(("host", "checkpoint", start, begin), rank=rank, step=step))
            sums.append((rank, step, issues[rank], max(issues) + (sent_ms or 5) * MS))
        start = end
    rank_, step_, issue, ended = map(np.array, zip(*sums, strict=True))
    collectives = Collectives(
        rank=rank_,
        step=step_,
        sequence=step_,
        group=np.full(len(sums), "all", object),
        op=np.full(len(sums), "allreduce", object),
        dtype=np.full(len(sums), "float32", object),
        bytes=np.full(len(sums), max(sent_ms * MS // 8, 1000)),
        issue_ns=issue,
        start_ns=issue,
        end_ns=ended,
    )
    return Run(
        provenance=Provenance(origin="measured", source="a test"),
        facts=Facts(workers=2, line_rate_bps=1e9),
        spans=Spans.joined(rows),
        collectives=collectives,
    )


@pytest.mark.parametrize("saves", [True, False])
def test_a_checkpoint_of_one_rank_is_named_where_the_others_wait_for_it(saves: bool) -> None:
    found = fw.explain(a_job_that_saves(late=(0,), saves=saves))
    said = found.verdict.sentence
    assert said.startswith("Rank 0 is late")
    assert "the host's work between" in said
    assert ("most of it writing checkpoints" in said) == saves
    told = [setting(fix) for fix in found.fixes if fix.kind == "straggler"]
    assert len(told) >= 1
    assert all(("async_save" in each) == saves for each in told)


def test_a_rank_that_is_late_in_few_steps_is_named_beside_small_turns() -> None:
    found = fw.explain(a_job_that_saves(late=(0,), saves=False, scatter=80))
    assert found.verdict.kind == "straggler"
    said = found.verdict.sentence
    assert said.startswith("Rank 0 is late in few steps: the others wait ")
    assert "ms more than usual in each of these steps, in the host's work between" in said
    assert "in 4 of 20 steps" in said
    assert not any("other work that takes" in setting(fix) for fix in found.fixes)


def told_of(found: fw.Explanation) -> str:
    """Return the verdict, what stands beside it, and how sure it is."""
    verdict = found.verdict
    assert verdict.sureness is not None
    return " ".join(sentence(each) for each in (*verdict.findings, verdict.sureness))


def test_a_rank_that_is_late_in_few_steps_may_be_another_in_a_repeat() -> None:
    doubt = "a repeat may name other ranks as late"
    always = a_job_that_saves(late=(0,), scatter=80, then=(0,))
    assert "Rank 0 is late in few steps" in told_of(fw.explain(always))
    assert doubt not in told_of(fw.explain(always))
    mostly = a_job_that_saves(late=(0,), scatter=80, then=(1,))
    assert "Rank 0 is late in few steps" in told_of(fw.explain(mostly))
    assert doubt in told_of(fw.explain(mostly))


def test_a_rank_that_is_late_in_few_steps_is_named_beside_another_loss_of_them() -> None:
    found = fw.explain(a_job_that_saves(late=(0, 1), scatter=102, longer_ms=300))
    assert (found.verdict.kind, found.is_of_all_steps) == ("host", True)
    assert "is lost to waiting, most of it for rank 0." in told_of(found)


def test_a_rank_that_is_late_in_few_steps_takes_its_share_of_the_waiting_alone() -> None:
    """Of 54 ms that a mean step of 172 ms waits, 42 ms are for rank 0."""
    found = fw.explain(a_job_that_saves(late=(0,), scatter=105))
    [long, in_time] = [fix for fix in found.fixes if fix.kind == "straggler"]
    assert sentence(in_time) == "rank 0 as fast as the others"
    assert in_time.step_s == pytest.approx(0.130)
    assert long.step_s == pytest.approx(0.115)  # which has no long steps


def test_a_rank_that_is_late_in_few_steps_is_not_named_for_a_loss_of_the_usual_step() -> None:
    job = a_job_that_saves(late=(0,), saves=True, scatter=40, sent_ms=200, pause_ms=700)
    found = fw.explain(job)
    assert (found.verdict.kind, found.is_of_all_steps) == ("line_rate", False)
    assert "40 ms (11.8%) is lost to waiting for late ranks, now one and" in told_of(found)
    assert [sentence(fix) for fix in found.fixes if fix.kind == "straggler"] == ["no late rank"]


@pytest.mark.parametrize("saves", [True, False])
def test_checkpoints_that_all_ranks_write_are_named_as_the_hosts_time(saves: bool) -> None:
    found = fw.explain(a_job_that_saves(late=(0, 1), saves=saves))
    assert found.verdict.kind == "host"
    assert ("of that goes to writing checkpoints." in found.verdict.sentence) == saves
    [long] = [each for each in found.fixes if "long steps" in sentence(each)]
    assert ("async_save" in setting(long)) == saves
