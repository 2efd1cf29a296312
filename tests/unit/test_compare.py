"""Better, worse, or noise?"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.changed import changed
from fullwire.answers.opening import Opened
from fullwire.answers.verification import verify
from fullwire.errors import DamagedInput, UsageError
from fullwire.findings.changes import about_changes
from fullwire.findings.comparisons import sends_unseen
from fullwire.report.explanation import comparison_markdown
from fullwire.run.facts import Facts
from fullwire.run.gaps import NOT_SEEN, Gap, gaps_of
from fullwire.run.run import Run, Sockets, Spans
from fullwire.run.store import write
from fullwire.simulation.forecast import forecaster
from fullwire.words import lines_to_paste, sentence, sentences, setting
from tests.builders import a_run, steps_run
from tests.conftest import Cli
from tests.jobs_by_hand import Rank, a_job, a_trained_job
from tests.trained_jobs import a_trained_job as a_job_on_a_transport
from tests.trained_jobs import a_transport

DATA = Path(__file__).parents[1] / "data"


def noisy(median_ms: float, seed: int, steps: int = 60) -> list[float]:
    spread = 0.03 * np.random.default_rng(seed).standard_normal(steps)
    return [median_ms * (1 + each) for each in spread.tolist()]


def test_a_real_improvement_is_told_from_noise() -> None:
    found = fw.compare(steps_run(noisy(100, 1)), steps_run(noisy(90, 2)))
    assert found.is_significant is True
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.9 < found.high < 1


def test_what_differs_from_run_to_run_is_no_improvement() -> None:
    """The steps of one run scatter little, but medians differ from run to run of the same job."""
    one, again = steps_run([100.0, 100.1] * 500), steps_run([99.0, 99.1] * 500)
    assert fw.compare(one, again).is_significant is False
    assert fw.compare(one, steps_run([96.0, 96.1] * 500)).is_significant is True


def test_a_drift_is_not_taken_for_so_many_independent_steps() -> None:
    def drifting(seed: int) -> Run:
        walk = np.cumsum(np.random.default_rng(seed).standard_normal(400))
        return steps_run((100 + walk).tolist())

    calls = [fw.compare(drifting(seed), drifting(seed + 50)) for seed in range(12)]
    widths = [each.high - each.low for each in calls if each.high and each.low]
    assert np.median(widths) > 0.05


def test_runs_of_different_lengths_are_compared_without_their_warm_up() -> None:
    found = fw.compare(steps_run([900, 300, *[100.0] * 30]), steps_run([800, *[80.0] * 300]))
    assert (found.before_steps, found.after_steps) == (30, 300)
    assert found.ratio == pytest.approx(0.8)
    assert found.is_significant is True


def test_another_number_of_workers_is_other_work_in_a_step() -> None:
    two, four = (steps_run(noisy(100, n), facts={"workers": n}) for n in (2, 4))
    found = fw.compare(two, four)
    assert found.workers == (2, 4)
    assert found.work_ratio == pytest.approx(2 / found.ratio)


def accumulated(passes: int) -> Run:
    """Make each step of a job add up the gradients of more passes, 134 ms each, before its own."""
    run, usual_ms, earlier_ms = a_trained_job(), 146.0, 134.0 * (passes - 1)

    def later(table: Any) -> Any:
        columns = table.columns()
        off_ns = np.round((table.step + 1) * earlier_ms * 1e6).astype(np.int64)
        for name in (name for name in columns if name.endswith("_ns")):
            columns[name] = columns[name] + off_ns
        return type(table)(**columns)

    spans = later(run.spans)
    is_step = spans.name == "step"
    start_ns = np.where(is_step, spans.start_ns - round(earlier_ms * 1e6), spans.start_ns)
    marks = spans.rows(is_step)
    begin_ns = np.round(marks.step * (usual_ms + earlier_ms) * 1e6).astype(np.int64)
    earlier = [
        Spans(
            rank=marks.rank,
            step=marks.step,
            lane=np.full(len(marks), "compute", object),
            name=np.full(len(marks), name, object),
            start_ns=begin_ns + round((134 * number + begin) * 1e6),
            end_ns=begin_ns + round((134 * number + end) * 1e6),
        )
        for number in range(passes - 1)
        for name, begin, end in (("earlier forward", 0, 38), ("earlier backward", 38, 134))
    ]
    return dataclasses.replace(
        run,
        spans=Spans.joined([dataclasses.replace(spans, start_ns=start_ns), *earlier]),
        collectives=later(run.collectives),
        gradients=later(run.gradients),
    )


def test_steps_of_other_work_are_compared_by_the_pass() -> None:
    one, four = accumulated(1), accumulated(4)
    found = fw.compare(one, four)
    assert found.passes == (1.0, 4.0)
    assert found.before_s == pytest.approx(0.146)
    assert found.after_s == pytest.approx(0.137)
    assert found.ratio == pytest.approx(0.137 / 0.146)
    said = " ".join(sentences(found.findings))
    assert "Passes are 6.2% shorter" in said
    assert "A step has 4 passes in place of 1: times are those of one pass." in said
    assert fw.compare(four, four).passes is None
    assert not found.has_unknown_passes  # the recorder names each pass
    parts = changed([Opened(one)], [Opened(four)])
    assert parts is not None
    assert sum(parts.after.values()) == pytest.approx(0.137)


def test_steps_of_a_capture_are_longer_and_never_slower() -> None:
    """It shows the bytes of steps, and no computing whose passes could be counted."""
    before = fw.read(DATA / "format-1" / "capture.run")
    spans = before.spans
    origin_ns = spans.start_ns.min()
    stretched = dataclasses.replace(
        spans,
        start_ns=origin_ns + 2 * (spans.start_ns - origin_ns),
        end_ns=origin_ns + 2 * (spans.end_ns - origin_ns),
    )
    found = fw.compare(before, dataclasses.replace(before, spans=stretched))
    assert found.has_unknown_passes
    said = " ".join(sentences(found.findings))
    assert "Steps are 2x longer, more than noise" in said
    assert "longer steps may be more work" in said
    assert "slower" not in said
    assert "unless a step does more work" in sentence(found.gate("5%").finding)


def test_other_samples_in_a_pass_are_compared_by_the_sample() -> None:
    small, large = (
        steps_run(noisy(length, 8), facts={"workers": 2, "pass_samples": samples})
        for length, samples in ((100, 32), (190, 64))
    )
    found = fw.compare(small, large)
    assert found.samples == (32, 64)
    assert found.ratio == pytest.approx(0.95, rel=0.02)
    told = " ".join(sentences(found.findings))
    assert "A worker takes 64 samples in a pass in place of 32: all times are those of 32." in told
    assert fw.compare(small, small).samples is None
    assert verify(small, large) is None


def test_the_advice_to_accumulate_is_held_against_what_it_did() -> None:
    found = verify(accumulated(1), accumulated(4))
    assert found is not None
    assert found.changes == ("gradients summed over 4 passes",)
    assert found.measured_s == pytest.approx(0.137)
    assert found.predicted_s == pytest.approx(0.137, rel=0.03)


def test_more_passes_are_predicted_from_whole_steps_of_a_job_that_accumulates() -> None:
    found = verify(accumulated(2), accumulated(4))
    assert found is not None
    assert found.changes == ("gradients summed over 4 passes",)
    assert found.measured_s == pytest.approx(0.137)
    assert found.predicted_s == pytest.approx(0.137, rel=0.03)
    assert verify(accumulated(4), accumulated(2)) is None
    assert verify(accumulated(2), accumulated(3)) is None
    # More passes of a closure that clears gradients have their own sums.
    two = accumulated(2)
    of_closure = dataclasses.replace(two, facts=two.facts | Facts(gradient_sets=2))
    assert verify(of_closure, accumulated(4)) is None


def test_the_advice_to_a_job_that_accumulates_counts_its_own_passes() -> None:
    run = accumulated(4)
    answer = fw.explain(run)
    assert "A step adds up the gradients of 4 passes." in sentences(answer.notes)
    assert "A step adds up" not in " ".join(sentences(fw.explain(accumulated(1)).notes))
    fixes = {sentence(fix): fix for fix in answer.fixes if fix.kind == "synchronisation"}
    assert set(fixes) == {"one sum every 8 passes", "one sum every 16 passes"}
    eight = fixes["one sum every 8 passes"]
    assert setting(eight) == "with model.no_sync() in 7 of 8 passes; the batch is 2x larger"
    assert "gradient_accumulation_steps=8" in lines_to_paste(eight, "transformers")
    warned = " ".join(fw.whatif(run, accumulate=2).warnings)
    assert "a recorded step adds up 4 passes, and times here are those of such a step." in warned
    job = forecaster(run)
    assert job is not None
    assert eight.step_s == job.ask(accumulate=(2,)).step_s


def test_an_answer_counts_the_passes_in_one_sum_with_the_recorded_ones() -> None:
    once, four = accumulated(1), accumulated(4)
    assert "gradients of 1 pass)" in sentence(fw.whatif(once, accumulate="1,2").answer)
    table = fw.whatif(four, accumulate="1,2", target=0.5)
    words = sentence(table.answer)
    assert "gradients of 4 passes" in words
    assert "gradients of 8 passes" in words
    assert table["accumulate"].tolist() == [1, 2]  # as asked
    assert table.predictions.told_column("accumulate").tolist() == [4, 8]
    needs = " ".join(sentences(table.reaching))
    assert "gradients of 4 passes" in needs
    assert "gradients of 8 passes" in needs


def test_what_is_missing_is_said_with_the_answer() -> None:
    whole, part = steps_run(noisy(100, 1)), a_job(Rank(90, [("compute", "b", 0, 9)]), workers=4)
    found = fw.compare(
        whole, dataclasses.replace(part, gaps=(Gap("rank 3: nothing was recorded", rank=3),))
    )
    assert "The second run is partial: rank 3: nothing was recorded." in found.warnings
    assert any("1 of 4 ranks are here" in each for each in found.warnings)
    assert fw.compare(whole, whole).warnings == ()
    busy = steps_run(noisy(100, 1), facts={"warnings": "processors may be the limit"})
    [said] = fw.compare(whole, busy).warnings
    assert said == "Where the second run was recorded: processors may be the limit."


def test_models_of_other_sizes_are_not_compared() -> None:
    four, five = a_trained_job(buckets=4), a_trained_job(buckets=5)
    with pytest.raises(UsageError, match="one has 4 MB of gradients, of the other 5 MB"):
        fw.compare(four, five)


def by_hand(buckets: int, op: str = "allreduce", ranks: int = 3) -> Run:
    """Make a run whose script sums each gradient itself, or scatters the sums as shards."""
    job = a_trained_job(buckets=buckets, ranks=ranks)
    sums = dataclasses.replace(job.collectives, op=np.full(len(job.collectives), op, object))
    return dataclasses.replace(
        job, facts=dataclasses.replace(job.facts, buckets=None), collectives=sums
    )


def test_models_of_other_sizes_are_not_compared_where_scripts_sum_gradients_themselves() -> None:
    """Formerly "1.2x slower, more than noise": without buckets a rank might have had a shard."""
    for other in (by_hand(5), a_trained_job(buckets=5), by_hand(5, ranks=2)):
        with pytest.raises(
            UsageError, match=r"has 4 MB of gradients, of the other 5 MB.*precision"
        ):
            fw.compare(by_hand(4), other)
    assert fw.compare(by_hand(4), a_trained_job(buckets=4)).ratio == pytest.approx(1)
    shards = by_hand(5, "reducescatter")  # those of a larger part, as of fewer ranks
    assert fw.compare(by_hand(4), shards).ratio > 1


def test_a_job_is_not_compared_with_another_models_profile() -> None:
    with pytest.raises(UsageError, match="they train different models"):
        fw.compare(a_trained_job(), fw.read("vgg16@v100"))


def test_steps_of_no_time_are_not_compared() -> None:
    with pytest.raises(UsageError, match="expected steps that take time"):
        fw.compare(steps_run([0, 0, 0]), steps_run([100]))


def test_the_command_says_what_more_workers_are_worth(cli: Cli, tmp_path: Path) -> None:
    places = [
        fw.write(steps_run(noisy(length, n), facts={"workers": n}), tmp_path / f"{n}.run")
        for n, length in ((2, 100), (4, 110))
    ]
    shown = cli("compare", *places)
    assert shown.returncode == 0, shown.stderr
    assert "With 4 workers in place of 2 the job does 1.8" in shown.stdout
    assert "note: Of the first run 1 of 2 ranks are here: others may be slower." in shown.stdout
    told = json.loads(cli("compare", *places, "--json").stdout)
    assert told["workers"] == [2, 4]


def test_noise_alone_is_called_noise() -> None:
    calls = [
        fw.compare(steps_run(noisy(100, seed)), steps_run(noisy(100, seed + 100))).is_significant
        for seed in range(20)
    ]
    assert calls.count(True) <= 3  # a 95 % interval is wrong now and then


def test_the_answer_is_the_same_every_time() -> None:
    one, other = steps_run(noisy(100, 1)), steps_run(noisy(99, 2))
    assert fw.compare(one, other) == fw.compare(one, other)


def recorded(median_ms: float, *off: float, seed: int = 0) -> list[Run]:
    """Record a job of steady steps several times; each recording is slower as a whole by `off`."""
    return [
        steps_run([median_ms * (1 + each) * (1 + noise) for noise in 0.01 * steady])
        for number, each in enumerate(off)
        for steady in [np.random.default_rng(seed + number).standard_normal(60)]
    ]


def test_several_recordings_tell_a_smaller_change_than_one_of_each() -> None:
    before, after = recorded(100, 0, 0, 0, 0), recorded(98.5, 0, 0, 0, 0, seed=50)
    assert fw.compare(before[0], after[0]).is_significant is False
    found = fw.compare(before, after)
    assert found.is_significant is True
    assert found.ratio == pytest.approx(0.985, abs=0.005)
    assert [each.steps for each in found.before_recordings] == [60] * 4
    assert found.before_steps == 240


def test_how_recordings_of_a_side_differ_counts_however_little_their_steps_do() -> None:
    before, after = recorded(100, -0.05, 0, 0.05), recorded(96, -0.05, 0, 0.05, seed=50)
    assert fw.compare(before[1], after[1]).is_significant is True
    assert fw.compare(before, after).is_significant is False


def test_recordings_of_a_side_that_are_not_of_one_job_are_told() -> None:
    one, other = (steps_run(noisy(100, n), facts={"workers": n}) for n in (2, 4))
    found = fw.compare([one, other], one)
    assert "Recordings of the first run differ in workers." in found.warnings


def test_how_many_recordings_would_show_a_small_change_is_said() -> None:
    rng = np.random.default_rng(3)
    uneven = [steps_run((100 + 8 * rng.standard_normal(40)).tolist()) for _ in range(2)]
    needed = fw.compare(*uneven).recordings_for_small
    assert needed is not None
    assert 2 <= needed <= 10
    assert fw.compare(steps_run([100.0] * 60), steps_run([101.0] * 60)).recordings_for_small == 1


def test_long_steps_that_changed_are_said_though_the_usual_did_not() -> None:
    before, after = steps_run([100.0, 100, 100, 300] * 15), steps_run([100.0, 100, 100, 600] * 15)
    [said] = [each for each in fw.compare(before, after).warnings if "mean of all steps" in each]
    assert "from 150 ms to 225 ms (+50.0%)" in said
    assert not any("mean of all" in each for each in fw.compare(before, before).warnings)


def test_a_large_change_within_the_noise_is_not_called_no_difference() -> None:
    rough = (20 + 400 * np.random.default_rng(3).random(40)).cumsum().tolist()
    found = fw.compare(steps_run(rough), steps_run([1.5 * each for each in rough]))
    assert found.is_significant is False
    [said] = sentences(found.findings)
    assert said.startswith("Not decided: 4.14 s -> 6.211 s a step, 50.0% longer, but")


def test_what_would_not_show_is_said(cli: Cli, tmp_path: Path) -> None:
    place = fw.write(steps_run(noisy(100, 1)), tmp_path / "one.run")
    done = cli("compare", place, place)
    assert "No difference beyond noise" in done.stdout
    assert "a step, as long as before (95" in done.stdout
    assert "would not show" in done.stdout
    assert "note: One recording of each" in done.stdout


def test_the_command_takes_several_recordings_of_each(cli: Cli, tmp_path: Path) -> None:
    places = [
        fw.write(run, tmp_path / f"{number}.run")
        for number, run in enumerate((*recorded(100, 0, 0.01), *recorded(80, 0, 0.01, seed=9)))
    ]
    wide = os.environ | {"COLUMNS": "300"}
    done = cli("compare", "-v", *places[:2], "--", *places[2:], env=wide)
    assert done.returncode == 0, done.stderr
    assert "more than noise" in done.stdout
    assert all(str(place) in done.stdout for place in places)
    assert "One recording of each" not in done.stdout
    refused = cli("compare", *places)
    assert refused.returncode == 2
    assert "expected BEFORE.run and AFTER.run, or -- between several of each" in refused.stderr
    assert "expected runs on both sides of --" in cli("compare", places[0], "--").stderr


def test_the_command_says_which_part_of_the_step_changed(cli: Cli, tmp_path: Path) -> None:
    places = [fw.write(a_trained_job(late_ms=late), tmp_path / f"{late}.run") for late in (0, 60)]
    done = cli("compare", *places, "-v")
    [line] = [each for each in done.stdout.splitlines() if each.startswith("straggler")]
    late_s = fw.explain(places[1]).account["straggler"]
    assert line.split()[-2:] == [f"+{1e3 * late_s:.4g}", "ms"]
    told = json.loads(cli("compare", *places, "--json").stdout)
    assert told["account"]["after"]["straggler"] == pytest.approx(late_s)


def test_a_fact_that_changed_has_its_unit(cli: Cli, tmp_path: Path) -> None:
    runs = [steps_run(noisy(100, 1), facts={"line_rate_bps": rate}) for rate in (4e9, 0.5e9)]
    places = [fw.write(run, tmp_path / f"{n}.run") for n, run in enumerate(runs)]
    assert "Changed: line_rate_bps 4 Gbps -> 500 Mbps." in cli("compare", *places).stdout


def test_a_fact_that_one_run_lacks_is_unknown_and_not_changed(cli: Cli, tmp_path: Path) -> None:
    one = steps_run(noisy(100, 1), facts={"torch": "2.13.0", "backend": "gloo", "buckets": "ddp"})
    other = steps_run(noisy(100, 2), facts={"backend": "fullwire"})
    places = [fw.write(run, tmp_path / f"{n}.run") for n, run in enumerate((one, other))]
    shown = " ".join(cli("compare", *places).stdout.split())
    assert "Changed: buckets ddp -> none, backend gloo -> fullwire." in shown
    assert "Known of one run alone: torch 2.13.0 -> unknown." in shown
    told = cli("compare", *places, "-v").stdout.splitlines()
    assert ["torch", "2.13.0", "unknown"] in [line.split() for line in told]
    assert "torch: 2.13.0 before, unknown after" in cli("compare", *places, "--markdown").stdout


def test_an_imported_run_that_lacks_a_fact_does_not_say_that_there_is_none() -> None:
    one = steps_run(noisy(100, 1), facts={"hook": "bf16"})
    other = steps_run(noisy(100, 2))
    foreign = dataclasses.replace(
        other, provenance=dataclasses.replace(other.provenance, origin="imported")
    )
    assert ("hook", "bf16", "none") in fw.compare(one, other).differing_facts
    assert ("hook", "bf16", "unknown") in fw.compare(one, foreign).differing_facts


def silent(job: Run) -> Run:
    """Leave out what a job sends."""
    return dataclasses.replace(
        job,
        collectives=job.collectives.rows(np.zeros(0, np.int64)),
        spans=job.spans.rows(job.spans.lane != "communication"),
    )


def test_communication_that_a_recorder_did_not_see_is_not_compared() -> None:
    """A job may send by MPI, and then has sockets and no collectives."""
    job = a_trained_job()
    carried = int(job.gradients.bytes.sum())
    by_mpi = dataclasses.replace(silent(job), sockets=connection((0, carried)))
    little = dataclasses.replace(silent(job), sockets=connection((0, 1000)))
    missed = dataclasses.replace(job, gaps=gaps_of([f"rank 0: 96 collectives {NOT_SEEN}"]))
    told = "of the second run, so whole steps are comparable, and the times and bytes of"
    for other in (by_mpi, missed):
        found = fw.compare(job, other)
        assert [told in each for each in found.warnings].count(True) == 1
        assert found.sent_nothing is None
    found = fw.compare(missed, by_mpi)
    assert [" of both runs, so whole" in each for each in found.warnings].count(True) == 1
    # A connection that was there before had carried as much; one worker has nobody to send to.
    before = dataclasses.replace(silent(job), sockets=connection((carried, carried + 1000)))
    assert not sends_unseen(before)
    alone = dataclasses.replace(
        by_mpi,
        facts=dataclasses.replace(by_mpi.facts, workers=1),
        spans=by_mpi.spans.rows(by_mpi.spans.rank == 0),
        gradients=by_mpi.gradients.rows(by_mpi.gradients.rank == 0),
    )
    assert sends_unseen(by_mpi)
    assert not sends_unseen(alone)
    found = fw.compare(job, little)
    assert found.sent_nothing == "after"
    assert not any("so whole steps" in each for each in found.warnings)


def connection(acked_bytes: tuple[int, int]) -> Sockets:
    """Return two samples of one connection."""
    known = ("host", "flow", "time_ns", "bytes_acked")
    others = (field.name for field in dataclasses.fields(Sockets) if field.name not in known)
    rest: dict[str, Any] = dict.fromkeys(others, np.zeros(2, np.int64))
    return Sockets(
        host=np.full(2, "host0", object),
        flow=np.full(2, "10.0.0.1:1>10.0.0.2:2", object),
        time_ns=np.array([0, 1_000_000_000]),
        bytes_acked=np.array(acked_bytes),
        **rest,
    )


def test_a_side_that_sends_nothing_is_said_to_in_one_sentence() -> None:
    job = a_trained_job()
    quiet = silent(job)
    said = "The second run has no collectives, and the first run has some"
    assert any(each.startswith(said) for each in sentences(fw.compare(job, quiet).findings))
    [told] = [e for e in sentences(fw.compare(quiet, job).findings) if "no collectives" in e]
    assert told.startswith("The first run has no collectives, and the second run has some")
    lost = dataclasses.replace(quiet, gaps=gaps_of(["collectives: 96 rows were lost"]))
    alone = silent(a_trained_job(ranks=1))
    for one, other in ((job, job), (quiet, quiet), (job, lost), (job, alone)):
        assert fw.compare(one, other).sent_nothing is None


def test_the_first_screen_holds_the_answer_and_what_changed(cli: Cli, tmp_path: Path) -> None:
    faster = noisy(50, 2)
    runs = steps_run(noisy(100, 1)), steps_run(faster, facts={"hook": "h"})
    places = [fw.write(run, tmp_path / f"{n}.run") for n, run in enumerate(runs)]
    shown = cli("compare", *places).stdout.splitlines()
    assert re.match(r"[12]\.\d*x faster, more than noise \(95 %: [\d.]+x to [\d.]+x\): ", shown[0])
    assert "Changed: hook none -> h." in shown
    assert any(line.startswith("-v shows each recording") for line in shown)
    assert len(shown) < 24
    assert max(map(len, shown)) <= 80
    slower = cli("compare", *reversed(places)).stdout
    assert re.match(r"[12]\.\d*x slower, more than noise", slower)


def test_a_small_change_is_told_as_a_share() -> None:
    found = fw.compare(steps_run([100.0, 100.2] * 300), steps_run([96.0, 96.2] * 300))
    [said] = sentences(found.findings)
    assert re.match(r"Steps are 4\.0% shorter, more than noise \(95 %: [\d.]+% shorter to ", said)


def test_the_parts_that_changed_most_come_first() -> None:
    parts = [("compute", 0.2, 0.2), ("host", 0.1, 0.16), ("line rate", 0.7, 0.3)]
    [told] = sentences(list(about_changes((), parts, (1.0, 0.66), of_passes=False)))
    assert told.startswith("Of a step: line rate 700 ms -> 300 ms, host 100 ms -> 160 ms. Every")
    [same] = sentences(list(about_changes((), parts[:1], (1.0, 1.0), of_passes=True)))
    assert same == "Each part of a pass changed by less than 5% of the shorter pass."


def test_the_same_parts_are_named_whichever_run_comes_first() -> None:
    parts = [("line rate", 0.9, 0.35), ("compute", 0.03, 0.07), ("host", 0.07, 0.08)]
    swapped = [(label, after_s, before_s) for label, before_s, after_s in parts]
    [told] = sentences(list(about_changes((), parts, (1.0, 0.5), of_passes=False)))
    [back] = sentences(list(about_changes((), swapped, (0.5, 1.0), of_passes=False)))
    rest = "Every other part changed by less than 5% of the shorter step."
    assert told == f"Of a step: line rate 900 ms -> 350 ms, compute 30 ms -> 70 ms. {rest}"
    assert back == f"Of a step: line rate 350 ms -> 900 ms, compute 70 ms -> 30 ms. {rest}"


def test_no_part_of_a_step_changed_because_rows_of_a_recording_are_lost() -> None:
    job = a_trained_job()
    lost = dataclasses.replace(
        job, gaps=gaps_of(["collectives: 96 rows were written, 0 can be read"], table="collectives")
    )
    assert changed([Opened(job)], [Opened(job)]) is not None
    assert changed([Opened(job)], [Opened(lost)]) is None
    assert changed([Opened(lost)], [Opened(job)]) is None


def test_too_few_steps_tell_nothing_about_noise() -> None:
    found = fw.compare(steps_run([100, 101]), steps_run([50, 51]))
    assert found.is_significant is None
    assert found.ratio == pytest.approx(50.5 / 100.5)


def test_runs_of_other_work_are_not_compared() -> None:
    one = steps_run([100], facts={"model": "VGG16"})
    other = steps_run([100], facts={"model": "ResNet50"})
    with pytest.raises(UsageError, match="the network being trained is 'VGG16' in one"):
        fw.compare(one, other)


def test_a_run_without_steps_is_refused() -> None:
    empty = fw.Run(provenance=a_run().provenance)
    with pytest.raises(UsageError, match="no steps to compare"):
        fw.compare(empty, a_run())


def test_what_watching_cost_is_no_difference_between_jobs() -> None:
    one, other = (
        steps_run([100], facts={"recorder_s": cost, "sampler_share": cost, "hosts": "a"})
        for cost in (0.1, 0.2)
    )
    assert fw.compare(one, other).differing_facts == ()


def test_remarks_of_a_trace_reader_are_no_difference_between_jobs() -> None:
    one = steps_run([100], facts={"remarks": "one kernel is 11% of rank 3's trace"})
    other = steps_run([100], facts={"remarks": "one kernel is 15% of rank 3's trace"})
    assert fw.compare(one, other).differing_facts == ()


def test_one_recording_given_several_times_is_no_evidence_of_noise() -> None:
    run, other = a_trained_job(), a_trained_job(late_ms=30.0)
    with pytest.raises(UsageError, match="recordings 1 and 3 after are one and the same"):
        fw.compare(run, [other, run, other])
    assert fw.compare(run, run).ratio == 1.0  # a question of its own


def test_a_simulated_step_verifies_no_prediction(cli: Cli, tmp_path: Path) -> None:
    job = a_job_on_a_transport(a_transport())
    played = fw.replay(job, bandwidth="2Gbps")
    assert verify(job, a_job_on_a_transport(a_transport(), rate_bps=2e9)) is not None
    assert verify(job, played) is None
    assert verify(played, job) is None
    told = sentences(fw.compare(job, played).findings)
    assert told[-1] == ("The second run is simulated: its steps were computed and not measured.")
    slower = fw.replay(job, bandwidth="500Mbps")
    told = sentences(fw.compare(played, slower).findings)
    assert told[-1] == "Both runs are simulated: their steps were computed and not measured."
    places = [fw.write(run, tmp_path / f"{n}.run") for n, run in enumerate((job, played))]
    shown = " ".join(cli("compare", *places).stdout.split())
    assert "The second run is simulated" in shown
    assert "Predicted" not in shown
    assert "compression" not in shown  # neither run compresses


def test_one_recording_on_both_sides_is_told() -> None:
    run = a_trained_job()
    [note] = [each for each in fw.compare(run, dataclasses.replace(run)).warnings if "both" in each]
    assert note == "One recording is on both sides. It tells nothing about a change."
    other = a_trained_job(late_ms=30.0)
    assert not any("both sides" in each for each in fw.compare(run, other).warnings)
    slow, fast = (fw.replay("vgg16@v100", workers=1, bandwidth=rate) for rate in ("1Gbps", "2Gbps"))
    assert not any("both sides" in each for each in fw.compare(slow, fast).warnings)


def test_times_that_explain_refuses_are_not_compared() -> None:
    run = a_trained_job()
    long = dataclasses.replace(
        run.spans, end_ns=np.where(run.spans.name == "step", 2**62, run.spans.end_ns)
    )
    twice = dataclasses.replace(run.spans, step=np.zeros(len(run.spans), np.int64))
    sums = run.collectives
    large = dataclasses.replace(sums, bytes=np.full(len(sums), 2**62))
    back = dataclasses.replace(sums, end_ns=sums.issue_ns - 1)
    odd_runs = [dataclasses.replace(run, spans=spans) for spans in (long, twice)]
    odd_runs += [dataclasses.replace(run, collectives=odd) for odd in (large, back)]
    for odd in odd_runs:
        for question in (fw.explain, lambda odd: fw.compare(run, odd)):
            with pytest.raises(DamagedInput):
                question(odd)
    for odd in odd_runs[2:]:
        with pytest.raises(DamagedInput):
            fw.whatif(odd, bandwidth="10Gbps")


def test_a_damaged_run_is_named_with_its_damage(cli: Cli, tmp_path: Path) -> None:
    write(a_trained_job(), tmp_path / "a.run")
    write(a_trained_job(late_ms=30.0), tmp_path / "b.run")
    (tmp_path / "b.run" / "spans.parquet").write_bytes(b"damaged")
    done = cli("compare", tmp_path / "a.run", tmp_path / "b.run")
    assert done.returncode == 3
    assert f"{tmp_path / 'b.run'}: it has no steps left to compare. Missing: spans" in done.stderr


def drifting(seed: int) -> Run:
    walk = np.cumsum(np.random.default_rng(seed).standard_normal(400))
    return steps_run((100 + walk).tolist())


@pytest.mark.parametrize(
    ("after_ms", "limit", "state"),
    [
        (110, "5%", "slower"),
        (110, "20%", "kept"),  # slower by more than noise, and within the limit
        (100, "5%", "kept"),
        (90, "5%", "kept"),
    ],
)
def test_a_gate_fails_on_a_slowdown_beyond_noise_and_beyond_the_limit(
    after_ms: float, limit: str, state: str
) -> None:
    gate = fw.compare(steps_run(noisy(100, 1)), steps_run(noisy(after_ms, 2))).gate(limit)
    assert gate.state == state
    assert gate.recordings is None


def test_the_gate_names_the_reason_for_which_steps_are_within_the_limit() -> None:
    quiet = fw.compare(steps_run(noisy(100, 1)), steps_run(noisy(100, 2)))
    gate = quiet.gate("5%")
    assert gate.sentence.endswith(f"A slowdown of {quiet.unseen:.1%} would show.")
    scattered = fw.compare(drifting(0), steps_run(noisy(50, 1)))
    assert scattered.unseen is not None
    assert scattered.high is not None
    assert scattered.unseen > 0.05
    gate = scattered.gate("5%")
    assert gate.state == "kept"
    assert "would show" not in gate.sentence
    worst = f"{1 - scattered.high:.1%} shorter"
    assert gate.sentence.endswith(f"the 95 % interval is within the limit: {worst}.")


def test_a_gate_that_cannot_decide_says_how_many_recordings_would() -> None:
    found = fw.compare(steps_run(noisy(100, 1)), steps_run(noisy(101, 2)))
    gate = found.gate("2%")
    assert gate.state == "open"
    assert gate.recordings is not None
    assert gate.recordings > 1
    assert f"{gate.recordings} recordings of each side would decide." in gate.sentence
    hopeless = fw.compare(drifting(0), drifting(1)).gate(0.001)
    assert (hopeless.state, hopeless.recordings) == ("open", None)
    assert "find a quieter machine" in hopeless.sentence
    short = fw.compare(steps_run([100.0] * 4), steps_run([200.0] * 4)).gate("5%")
    assert "Recordings of at least 5 steps would decide." in short.sentence


def test_the_gate_on_the_command_line_ends_with_1_and_options_may_follow_the_runs(
    cli: Cli, tmp_path: Path
) -> None:
    for number in (1, 2):
        write(steps_run(noisy(100, number)), tmp_path / f"main-{number}.run")
        write(steps_run(noisy(110, number + 10)), tmp_path / f"pr-{number}.run")
    mains, prs = ["main-1.run", "main-2.run"], ["pr-1.run", "pr-2.run"]
    slower = cli("compare", *mains, "--", *prs, "--fail-if-slower", "5%", "--json", cwd=tmp_path)
    assert slower.returncode == 1
    gate = json.loads(slower.stdout)["gate"]
    assert (gate["state"], gate["limit"]) == ("slower", 0.05)
    assert "Too slow" in gate["sentence"]
    shown = cli("compare", *prs, "--", *mains, "--fail-if-slower", "5%", "--markdown", cwd=tmp_path)
    assert shown.returncode == 0
    assert shown.stdout.startswith("### Within the limit of 5.0%: steps are ")
    assert "| before | 2 | 120 | " in shown.stdout
    wrong = cli("compare", *mains, "--", *prs, "--fail-if-slower", "5", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "expected a percentage, like 5%, got '5'" in wrong.stderr


def test_names_in_a_run_are_no_markup_in_markdown() -> None:
    one = steps_run(noisy(100, 1), facts={"hook": "a|b <script> @all"})
    other = steps_run(noisy(100, 2), facts={"hook": "c"})
    shown = comparison_markdown(fw.compare(one, other), None, None)
    assert r"a\|b \<script\> \@all" in shown


def test_a_compressed_run_is_held_against_the_prediction_of_its_codec() -> None:
    before = a_trained_job()
    for hook, least in (("fullwire.compress(bf16)", 0.4), ("fullwire.compress(int8)", 0.2)):
        facts = before.facts | Facts(hook=hook)
        found = verify(before, dataclasses.replace(before, facts=facts))
        assert found is not None
        [change] = found.made
        assert hook in sentence(change)
        asked = hook.partition("(")[2][:-1]
        table = fw.whatif(before, transport="measured", compression=asked)
        assert found.predicted_s == pytest.approx(float(table["step_s"][0]), rel=0.02)
        assert found.predicted_s < found.measured_s
        assert found.predicted_s > least * found.measured_s


def test_a_run_that_packs_on_the_wire_is_held_against_a_prediction() -> None:
    before = a_trained_job()
    for wire, times in (("bf16", 1.94), ("fp16", 1.98), ("int8", 3.9)):
        found = verify(before, dataclasses.replace(before, facts=before.facts | Facts(wire=wire)))
        assert found is not None
        assert [sentence(change) for change in found.made] == [f"{wire} on the wire"]
        table = fw.whatif(before, transport="measured", compression=times)
        assert found.predicted_s == pytest.approx(float(table["step_s"][0]), rel=0.02)
    packed = dataclasses.replace(before, facts=before.facts | Facts(wire="bf16"))
    assert verify(packed, packed) is None
