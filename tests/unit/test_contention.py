"""Contention: computation that the job's own communication and ranks slow down."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.explain import Verdict, judged
from fullwire.answers.samples_to_goal import own_work
from fullwire.findings.case import Case
from fullwire.fixes.fix import fix_kind
from fullwire.recorder.assemble import _Rank
from fullwire.recorder.journals import Journal
from fullwire.recorder.steps import Steps
from fullwire.report.as_data import explanation_object
from fullwire.run.facts import Facts, FactValue, named
from fullwire.run.placement import processors_of_machine, ranks_per_processor
from fullwire.run.processors import share_of_others
from fullwire.run.run import Hosts, Run, Spans
from fullwire.simulation.forecast import forecaster
from fullwire.simulation.typical import typical_step
from fullwire.timeline.account import Part, account
from fullwire.timeline.alone import alone, alone_by_account
from fullwire.words import setting
from tests.jobs_by_hand import Rank, a_job, a_trained_job

DATA = Path(__file__).parents[1] / "data"

RATES = {0: 1e9, 1: 1e9, 2: 1e9}


def judged_with(crowded_share: float) -> Verdict:
    """Judge a job in which this share of the computation is contention."""
    run = a_trained_job()
    found = account(run, RATES)
    parts_ns = found.parts_ns.copy()
    crowded_ns = (parts_ns[:, :, Part.COMPUTE] * crowded_share).astype(parts_ns.dtype)
    parts_ns[:, :, Part.COMPUTE] -= crowded_ns
    parts_ns[:, :, Part.CONTENTION] = crowded_ns
    crowded = dataclasses.replace(found, parts_ns=parts_ns)
    assert crowded.step_s == pytest.approx(found.step_s)
    return judged(Case(run=run, account=crowded, inflation_s=None, evidence=(), rate_bps=RATES))


def test_contention_is_the_verdict_where_it_is_the_largest_loss() -> None:
    found = judged_with(0.4)
    assert found.kind == "contention"
    assert "cost it 27% of each step" in found.sentence
    assert "Another 34 ms (23.3%) is lost to the host" in found.sentence


def test_contention_is_named_beside_a_larger_loss() -> None:
    found = judged_with(0.2)
    assert found.kind == "host"
    assert "is lost to ranks and communication that share processors" in found.sentence


def test_no_contention_is_told_of_a_job_that_shows_none() -> None:
    run = a_trained_job()
    assert account(run, {}).parts_s["contention"] == 0.0


def test_a_step_of_computation_alone_names_no_part_that_it_does_not_have() -> None:
    both = Rank(length=100, spans=[("compute", "forward", 0, 100)], collectives=[(8, 10, 20)])
    found = fw.explain(a_job(both, both))
    assert found.verdict.kind == "scales"
    assert found.verdict.reasons == ("all of the step is compute",)


# ---- ranks that share a host ---------------------------------------------------------------------

ON_ONE_HOST: dict[str, FactValue] = {
    "hosts": "vm,vm",
    "backend": "gloo",
    "machines": 1,
    "processors": 2,
}
BLAMED = ("network", "line rate", "bandwidth", "links", "transport")


def on_one_host(**facts: Any) -> fw.Run:
    """Make a job of two ranks whose sums, 40 of 100 ms, are fully exposed."""
    both = Rank(
        length=100, spans=[("compute", "backward", 0, 60)], collectives=[(50_000_000, 60, 100)]
    )
    return a_job(both, both, facts=ON_ONE_HOST | facts)


@pytest.mark.parametrize("bandwidth", [None, "10Gbps"])
@pytest.mark.parametrize("known", [{}, {"line_rate_bps": 1e10}])
def test_ranks_that_share_a_host_lose_nothing_to_a_line(
    bandwidth: str | None, known: dict[str, float]
) -> None:
    found = fw.explain(on_one_host(**known), bandwidth=bandwidth)
    assert found.verdict.kind == "contention"
    assert found.account["contention"] == pytest.approx(0.04)
    assert found.account["line_rate"] == found.account["transport"] == 0
    assert found.account["unexplained"] == 0
    assert not [word for word in BLAMED if word in found.verdict.sentence]
    assert found.scaling_factor == pytest.approx(0.6)
    assert found.break_even is None
    assert not [fix for fix in found.fixes if fix.kind in ("link", "transport")]


def test_a_rate_that_is_given_for_ranks_of_one_host_is_said_to_be_of_no_use() -> None:
    found = fw.explain(on_one_host(), bandwidth="10Gbps")
    assert any("The given 10 Gbps has no effect" in each for each in found.warnings)
    assert not any("--line-rate gives it" in each for each in fw.explain(on_one_host()).warnings)
    assert any("a host for each rank" in each for each in found.warnings)


def test_a_prediction_from_one_host_says_that_each_rank_has_a_link_of_its_own() -> None:
    told = "its ranks share one host and use no link. Here each rank has a link of its own"
    run = a_trained_job()
    one = dataclasses.replace(run, facts=run.facts | named({"hosts": "a,a,a", "machines": 1}))
    assert any(told in each for each in fw.whatif(one, bandwidth=["10Gbps"]).warnings)
    across = fw.whatif(run, bandwidth=["10Gbps"])
    assert not any("a link of its own" in each for each in across.warnings)
    pairs = dataclasses.replace(run, facts=run.facts | named({"hosts": "a,a,b", "machines": 2}))
    told = "up to 2 workers share one host and use no link"
    for workers, is_told in (([2, 3, 8], True), ([3, 8], False)):
        found = fw.whatif(pairs, bandwidth=["10Gbps"], workers=workers).warnings
        assert any(told in each for each in found) == is_told


def test_the_verdict_says_that_the_processors_are_taken() -> None:
    run = on_one_host()
    times_ns = np.arange(0, 500_000_000, 10_000_000)
    one = np.ones(len(times_ns))
    hosts = Hosts(
        host=np.full(len(times_ns), "vm", object),
        device=np.full(len(times_ns), "cpu0", object),
        time_ns=times_ns,
        utilization=one,
        memory_bytes=np.zeros(len(times_ns), np.int64),
    )
    taken = fw.explain(dataclasses.replace(run, hosts=hosts)).verdict.sentence
    assert "The processors are taken: 100% used." in taken
    busy = dataclasses.replace(run, hosts=dataclasses.replace(hosts, utilization=0.88 * one))
    free = fw.explain(busy).verdict.sentence
    assert "The busiest processor was 88% used." in free
    assert "taken" not in free
    delayed = dataclasses.replace(busy, facts=busy.facts | Facts(run_delay_s=by_rank(0.02, 2)))
    waited = fw.explain(delayed).verdict.sentence
    assert "was 88% used, and a rank still waited 20 ms of each step for a processor" in waited
    assert "taken" not in waited
    assert "is not recorded" in fw.explain(run).verdict.sentence


def test_a_group_within_a_host_uses_no_line_and_one_across_hosts_does() -> None:
    facts: dict[str, FactValue] = {"hosts": "a,a,b,b", "backend": "gloo", "line_rate_bps": 1e10}
    both = Rank(
        length=100, spans=[("compute", "backward", 0, 60)], collectives=[(50_000_000, 60, 100)]
    )
    job = a_job(both, both, both, both, facts=facts)
    across = fw.explain(job)
    assert across.account["contention"] == 0
    assert across.account["line_rate"] > 0
    group = np.array(["ab"[rank // 2] for rank in job.collectives.rank], object)
    pairs = dataclasses.replace(job.collectives, group=group)
    within = fw.explain(dataclasses.replace(job, collectives=pairs))
    assert within.account["contention"] == pytest.approx(0.04)
    assert within.account["line_rate"] == within.account["transport"] == 0


def test_devices_of_one_host_have_links_between_them() -> None:
    found = fw.explain(on_one_host(backend="nccl", line_rate_bps=1e12))
    assert found.account["contention"] == 0
    assert found.account["line_rate"] > 0


# ---- computing beside communication --------------------------------------------------------------

COMPUTES_MS = 100.0  # of a step of the job by hand, on every rank


def probed(
    run: fw.Run,
    alone_ms: float,
    *,
    probes: int = 3,
    mark: str = "probe",
    host_ms: float = 34.0,
    **facts: Any,
) -> fw.Run:
    """Add probe steps to a job; each rank computes for `alone_ms` in them.

    In turns, the host takes its part after that, and then the rank waits.
    """
    last_ns, rows = int(run.spans.end_ns.max()), []
    for number in range(probes):
        begin_ns = last_ns + round(number * 200e6)
        for rank in range(run.facts.workers or 0):
            end_ns = begin_ns + round(alone_ms * 1e6)
            rows.append((rank, "host", mark, begin_ns, begin_ns + round(190e6)))
            rows.append((rank, "compute", "backward", begin_ns, end_ns))
            if mark == "turns":
                own_ns = end_ns + round(host_ms * 1e6)
                rows.append((rank, "host", "wait", own_ns, begin_ns + round(190e6)))
    rank_, lane, name, start, end = zip(*rows, strict=True)
    added = Spans(
        rank=np.array(rank_),
        step=np.full(len(rows), -1),
        lane=np.array(lane, object),
        name=np.array(name, object),
        start_ns=np.array(start),
        end_ns=np.array(end),
    )
    spans = Spans.joined([run.spans, added])
    return dataclasses.replace(run, spans=spans, facts=run.facts | named(facts))


def by_rank(value: float, ranks: int = 3) -> tuple[tuple[float, float], ...]:
    return tuple((float(rank), value) for rank in range(ranks))


def test_what_a_probe_step_computes_less_is_contention() -> None:
    plain = fw.explain(a_trained_job())
    found = fw.explain(probed(a_trained_job(), 0.8 * COMPUTES_MS))
    assert found.step_s == plain.step_s
    assert found.account["contention"] == pytest.approx(0.020)
    assert found.account["compute"] == pytest.approx(0.080)
    assert sum(found.account.values()) == pytest.approx(found.step_s)
    assert found.baseline_step_s == pytest.approx(plain.baseline_step_s - 0.020)
    low_s, high_s = found.baseline_between_s
    assert low_s < found.baseline_step_s < high_s


def in_turns(alone_ms: float, beside_ms: float, host_ms: float = 34.0, **facts: Any) -> fw.Run:
    """Add probe steps, and some in which ranks compute one by one, to a job."""
    run = probed(a_trained_job(), beside_ms, **facts)
    return probed(run, alone_ms, mark="turns", host_ms=host_ms)


def test_turns_tell_what_a_rank_computes_without_the_others_of_its_machine() -> None:
    found = fw.explain(in_turns(0.7 * COMPUTES_MS, 0.8 * COMPUTES_MS))
    assert found.account["contention"] == pytest.approx(0.030)
    assert found.account["compute"] == pytest.approx(0.070)
    assert sum(found.account.values()) == pytest.approx(found.step_s)
    [note] = [each for each in found.warnings if "probe steps are left out" in each]
    assert "In 3 of them ranks of a machine computed one after another." in note
    ran = fw.explain(probed(a_trained_job(), 0.7 * COMPUTES_MS))
    assert found.baseline_step_s == pytest.approx(ran.baseline_step_s)
    low_s, high_s = found.baseline_between_s
    assert high_s - low_s < ran.baseline_between_s[1] - ran.baseline_between_s[0]


def test_one_workers_host_takes_as_long_as_in_turns() -> None:
    """Beside sums, the host's part is in their shadow, or waits for a processor."""
    for host_ms in (30.0, 50.0):
        run = in_turns(70.0, 80.0, host_ms=host_ms)
        found = fw.explain(run)
        assert found.baseline_step_s == pytest.approx(0.070 + host_ms * 1e-3)
        [note] = [each for each in found.warnings if "one worker's step has that" in each]
        assert f"is {host_ms:.0f} ms where" in note
        assert "it is 34 ms:" in note
    long = fw.explain(in_turns(70.0, 80.0, host_ms=90.0))  # as for a log in these steps alone
    assert long.baseline_step_s == pytest.approx(long.step_s)


def test_one_worker_also_issues_its_sums_while_it_computes() -> None:
    """In a turn they are held back, which takes its thread less time."""
    run = in_turns(70.0, 80.0)
    lacking = in_turns(70.0, 80.0, turns_lack_s=by_rank(0.005))
    before, found = fw.explain(run), fw.explain(lacking)
    assert found.baseline_step_s == pytest.approx(before.baseline_step_s + 0.005)
    assert found.account["contention"] == pytest.approx(before.account["contention"] - 0.005)
    probes = probed(a_trained_job(), 80.0, turns_lack_s=by_rank(0.005))
    assert fw.explain(probes).baseline_step_s == pytest.approx(
        fw.explain(probed(a_trained_job(), 80.0)).baseline_step_s
    )


def test_a_host_part_that_is_as_in_turns_is_no_news() -> None:
    found = fw.explain(in_turns(70.0, 80.0, host_ms=34.0)).warnings
    assert not any("one worker's step has that" in each for each in found)


def test_a_rank_on_each_host_is_slowed_by_no_other() -> None:
    asked: dict[str, Any] = {"bandwidth": ["1Gbps"], "workers": [3]}
    beside, turned = probed(a_trained_job(), 80.0), in_turns(70.0, 80.0)
    [was_s] = fw.whatif(beside, ranks_per_host=1, **asked)["step_s"]
    [found_s] = fw.whatif(turned, ranks_per_host=1, **asked)["step_s"]
    assert found_s == pytest.approx(was_s - 0.010, rel=1e-6)


def test_a_wait_for_processors_comes_off_probe_steps_and_not_off_turns() -> None:
    """In a turn nobody else of the job computes: its waits are for other programs."""
    run = in_turns(0.7 * COMPUTES_MS, 0.9 * COMPUTES_MS, probe_run_delay_s=by_rank(0.010))
    assert fw.explain(run).account["contention"] == pytest.approx(0.030)
    known = alone_by_account(run)
    assert known is not None
    assert known.by_ranks_s == pytest.approx(0.010)


def test_broken_turns_tell_nothing_and_are_left_out() -> None:
    run = probed(a_trained_job(), 0.8 * COMPUTES_MS)
    broken = probed(run, 0.5 * COMPUTES_MS, mark="broken turns")
    before, found = fw.explain(run), fw.explain(broken)
    assert (found.step_s, found.account) == (before.step_s, before.account)
    assert found.baseline_between_s == before.baseline_between_s


def test_predictions_keep_what_ranks_that_send_nothing_cost_each_other() -> None:
    """A faster line ends none of it, and one worker meets none of it."""
    beside, turned = probed(a_trained_job(), 80.0), in_turns(70.0, 80.0)
    asked: dict[str, Any] = {"bandwidth": ["1Gbps", "100Gbps"], "workers": [1, 3]}
    before, found = (fw.whatif(run, **asked) for run in (beside, turned))
    less_s = np.where(np.array(found["workers"]) == 1, 0.010, 0.0)
    assert np.array(found["step_s"]) == pytest.approx(np.array(before["step_s"]) - less_s, rel=1e-6)


def test_the_work_of_a_pass_is_t1_of_the_account() -> None:
    run = probed(a_trained_job(), 0.8 * COMPUTES_MS, pass_samples=8)
    known = alone_by_account(run)
    assert known is not None
    [work] = own_work([("job", run)], ())
    assert work.time_s == pytest.approx(known.time_s)
    assert work.time_s < 0.9 * typical_step(run, "gradients").alone_ns * 1e-9


def test_computing_that_is_as_long_in_probe_steps_has_no_contention() -> None:
    found = fw.explain(probed(a_trained_job(), 1.1 * COMPUTES_MS))
    assert found.account["contention"] == 0


def test_one_probe_step_is_not_believed() -> None:
    found = fw.explain(probed(a_trained_job(), 0.5 * COMPUTES_MS, probes=1))
    assert found.account["contention"] == 0


def test_ranks_that_take_turns_on_a_processor_are_contention_in_probe_steps_too() -> None:
    delays: dict[str, Any] = {"probe_run_delay_s": by_rank(0.030)}
    found = fw.explain(probed(a_trained_job(), 0.9 * COMPUTES_MS, **delays))
    assert found.account["contention"] == pytest.approx(0.040)


@pytest.mark.parametrize(
    ("ran_s", "before_forward_s", "expected_s"),
    [(0.050, 0.0, 0.060), (0.080, 0.0, 0.080), (0.080, 0.049, 0.065), (0.120, 0.0, 0.090)],
    ids=["less than the rest", "more than the rest", "some of it before", "more than computing"],
)
@pytest.mark.parametrize("reads", [False, True])
def test_computing_takes_no_less_than_its_thread_ran(
    reads: bool, ran_s: float, before_forward_s: float, expected_s: float
) -> None:
    """Some of the wait is outside of computing: without it, T1 of four ranks was 18 % short."""
    outside_s = 0.034  # of the job's step: its thread runs there, too
    job = a_trained_job()
    if reads:  # a loader without workers reads in the program's thread
        reading = job.spans.rows(job.spans.name == "optimizer")
        waits = {"lane": "input", "name": "wait"}
        words = {name: np.full(len(reading), word, object) for name, word in waits.items()}
        begin_ns, end_ns = (reading.start_ns - 1_000_000 * ms for ms in (29, 9))
        reading = dataclasses.replace(reading, start_ns=begin_ns, end_ns=end_ns, **words)
        job = dataclasses.replace(job, spans=Spans.joined([job.spans, reading]))
    run = probed(
        job,
        0.9 * COMPUTES_MS,
        probe_run_delay_s=by_rank(0.030),
        probe_compute_s=by_rank(ran_s + outside_s),
        before_forward_processor_s=by_rank(before_forward_s),
    )
    found = fw.explain(run)
    assert found.account["input"] == pytest.approx(0.020 * reads)
    assert found.account["input"] + found.account["host"] == pytest.approx(outside_s)
    assert found.baseline_step_s - outside_s == pytest.approx(expected_s)


def busy_hosts(run: Run) -> Hosts:
    """Return samples of one machine whose processors are in use for 0.9 of the run."""
    times_ns = np.arange(0, run.spans.end_ns.max(), 10_000_000)
    return Hosts(
        host=np.full(len(times_ns), "vm", object),
        device=np.full(len(times_ns), "cpu0", object),
        time_ns=times_ns,
        utilization=np.full(len(times_ns), 0.9),
        memory_bytes=np.zeros(len(times_ns), np.int64),
    )


def test_a_comparison_names_the_processors_that_other_programs_used() -> None:
    """Formerly the second job was slower, more than noise, and nothing named them."""
    told: dict[str, Any] = {"machines": 1, "processors": 3, "processor_s": by_rank(0.030)}
    quiet = probed(a_trained_job(), 80.0, **told)
    longer = probed(a_trained_job(late_ms=200.0), 80.0, **told)
    same_length = dataclasses.replace(quiet, hosts=busy_hosts(quiet))
    beside = dataclasses.replace(longer, hosts=busy_hosts(longer))
    of_others = f"{share_of_others(beside):.0%}"
    assert fw.compare(quiet, beside).warnings[0] == (
        f"Other programs used 0% of the processors beside the first run and {of_others} beside the "
        "second: the change may be theirs, or a part of it."
    )
    for before, after in ((quiet, longer), (quiet, same_length), (same_length, beside)):
        assert not any("programs" in note for note in fw.compare(before, after).warnings)


@pytest.mark.parametrize("delay_s", [0.0, 0.030])
def test_other_programs_share_the_wait_of_probe_steps_and_make_the_interval_longer(
    delay_s: float,
) -> None:
    """One worker may wait for a processor that others have, or find one free."""
    told: dict[str, Any] = {"machines": 1, "processors": 3, "processor_s": by_rank(0.030)}
    run = probed(a_trained_job(), 80.0, probe_run_delay_s=by_rank(delay_s), **told)
    beside = dataclasses.replace(run, hosts=busy_hosts(run))
    share = share_of_others(beside)
    assert 0.3 < share < 0.8
    loading = Facts(children_processor_s=by_rank(0.01))  # its loaders are no others
    of_loaders = share_of_others(dataclasses.replace(beside, facts=beside.facts | loading))
    assert share / 5 < of_loaders < share - 0.02
    quiet, busy = fw.explain(run), fw.explain(beside)
    of_others_s = delay_s * share / 0.9
    assert busy.baseline_step_s == pytest.approx(quiet.baseline_step_s + of_others_s)
    assert busy.account["contention"] == pytest.approx(quiet.account["contention"] - of_others_s)
    longer = busy.baseline_step_s / quiet.baseline_step_s
    low_s, high_s = (end_s * longer for end_s in quiet.baseline_between_s)
    computes = busy.account["compute"] / busy.baseline_step_s  # the rest is the host's
    assert busy.baseline_between_s[0] == pytest.approx(low_s * (1 - share * computes))
    # One worker beside these programs does no more than each of the two.
    longest_s = high_s * (1 + (1 / (1 - share) - 1) * computes)
    assert longest_s > 1.15 * busy.step_s
    assert busy.baseline_between_s[1] == pytest.approx(1.15 * busy.step_s)
    ran = Facts(probe_compute_s=by_rank(0.075))  # without others it takes as long, at the least
    floor_s, _ = fw.explain(
        dataclasses.replace(beside, facts=beside.facts | ran)
    ).baseline_between_s
    assert floor_s > 0.85 * 0.075


def test_other_programs_make_the_wait_for_data_no_less_sure() -> None:
    run = probed(a_trained_job(), 80.0, probe_run_delay_s=by_rank(0.0))
    rows = (run.spans.lane == "compute") & (run.spans.name == "forward") & (run.spans.step >= 0)
    reading = run.spans.rows(rows)
    assert len(reading)
    of_input = dataclasses.replace(
        reading,
        lane=np.full(len(reading), "input", object),
        name=np.full(len(reading), "wait", object),
    )
    spans = Spans.joined([run.spans.rows(~rows), of_input])
    found = fw.explain(dataclasses.replace(run, spans=spans))
    input_s = found.account["input"]
    assert input_s > 0.02
    low_s, high_s = found.baseline_between_s
    assert low_s >= 0.85 * input_s
    assert high_s <= 1.15 * input_s + 3 * (found.baseline_step_s - input_s)


def test_other_programs_may_leave_one_worker_the_processor_that_the_ranks_waited_for() -> None:
    """Two ranks of 75 to 102 ms beside a busy program waited, and one worker took 25 ms."""
    run = a_trained_job()
    told: dict[str, Any] = {"machines": 1, "processors": 3, "processor_s": by_rank(0.030)}
    told |= {"run_delay_s": by_rank(0.06), "run_s": by_rank(0.04)}
    quiet = dataclasses.replace(run, facts=run.facts | Facts(**told))
    busy = dataclasses.replace(quiet, hosts=busy_hosts(run))
    own = 1 - share_of_others(busy) / 0.9
    assert 0.1 < own < 0.7
    found = fw.explain(busy)
    assert found.account["contention"] == pytest.approx(own * 0.6 * 0.100)
    low_s, high_s = found.baseline_between_s
    rest_s = found.baseline_step_s - found.account["compute"]
    ran_s = 0.4 * 0.100
    assert low_s == pytest.approx(0.6 * (ran_s + rest_s))
    assert high_s == pytest.approx(1.3 * found.baseline_step_s)  # it may wait as the ranks did
    assert fw.explain(quiet).baseline_between_s[0] == pytest.approx(0.6 * (ran_s + rest_s))


def test_without_probe_steps_run_delay_tells_a_lower_bound() -> None:
    run = a_trained_job()
    found = fw.explain(dataclasses.replace(run, facts=run.facts | Facts(run_delay_s=by_rank(0.03))))
    assert found.account["contention"] == pytest.approx(0.030)
    probes = fw.explain(probed(run, 70.0)).baseline_between_s
    low_s, high_s = found.baseline_between_s
    assert high_s - low_s > probes[1] - probes[0]


def test_only_computings_share_of_the_run_delay_makes_computing_longer() -> None:
    """A thread is ready at the end of each sum: 120 sums took 93 % of computing away."""
    told = Facts(run_delay_s=by_rank(0.06), run_s=by_rank(0.140))
    run = a_trained_job()
    found = fw.explain(dataclasses.replace(run, facts=run.facts | told))
    assert found.account["contention"] == pytest.approx(0.3 * 0.100)


@pytest.mark.parametrize(("ran_s", "contention_s"), [(0.05, 0.0), (0.07, 0.023)])
def test_run_delay_of_a_thread_that_waits_for_an_accelerator_is_no_contention(
    ran_s: float, contention_s: float
) -> None:
    """It was ready for 73 % of computing, and waited for the rest. At 93 % it computes itself."""
    told = Facts(run_delay_s=by_rank(0.023), run_s=by_rank(ran_s))
    run = a_trained_job()
    found = fw.explain(dataclasses.replace(run, facts=run.facts | told))
    assert found.account["contention"] == pytest.approx(contention_s)


def test_a_what_if_takes_the_one_t1_that_the_account_tells() -> None:
    run = probed(a_trained_job(), 0.8 * COMPUTES_MS)
    table = fw.whatif(run, workers=[1, 3])
    found = fw.explain(run)
    assert table["baseline_step_s"] == pytest.approx(found.baseline_step_s)
    assert table["step_s"][0] == pytest.approx(found.baseline_step_s)
    between_s = [end_s[0] for end_s in table.interval_s]
    assert between_s == pytest.approx(found.baseline_between_s)
    assert any("T1 is without that. Predicted" in each for each in table.warnings)


def test_an_account_that_was_drawn_up_is_not_drawn_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = probed(a_trained_job(), 0.8 * COMPUTES_MS)
    found = alone(run, account(run, RATES))
    monkeypatch.delattr("fullwire.timeline.account.transfers_of")
    assert alone_by_account(run) == found


def test_a_what_if_takes_t1_from_an_account_that_tells_no_contention() -> None:
    run = probed(a_trained_job(), 0.8 * COMPUTES_MS, probes=1)  # of which none is believed
    found = alone_by_account(run)
    assert found is not None
    assert not found.tells_contention
    table = fw.whatif(run, workers=[1, 3])
    assert table["baseline_step_s"] == pytest.approx(fw.explain(run).baseline_step_s)


@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in DATA.glob("format-*/*.run/run.json"))
)
def test_explain_whatif_and_compare_have_one_t1(name: str) -> None:
    """A step's own time is drawn once: the lower medians of parts are less than that of sums."""
    run = fw.read(next(DATA.glob(f"format-*/{name}")))
    found = fw.explain(run)
    if found.predictor is None:
        return
    table = fw.whatif(run, bandwidth=["1Gbps", "10Gbps"], transport="full", algorithm="ring")
    assert table["baseline_step_s"] == pytest.approx(found.baseline_step_s, rel=1e-6)
    assert found.predicted_from_s == pytest.approx(found.baseline_step_s, rel=1e-6)
    job = forecaster(run, alone=alone_by_account(run))  # as `compare` makes it
    assert job is not None
    assert job.alone_s == pytest.approx(found.baseline_step_s, rel=1e-6)


def test_time_of_unpacking_after_the_last_bucket_is_the_hooks_and_not_the_workers() -> None:
    run = fw.read(next(DATA.glob("format-*/lab-slow-hook.run")))
    parts = fw.explain(run).account
    own_s = sum(parts[name] for name in ("compute", "input", "host"))
    step = typical_step(run)
    assert step.step_ns * 1e-9 == pytest.approx(own_s, rel=0.06)  # it was 3.3 times as long
    assert step.packing_ns * 1e-9 == pytest.approx(parts["codec"], rel=0.03)


def contention_s(**conditions: Any) -> Any:
    """Return the contention in predictions of the job with 20 ms of it as recorded."""
    plain, crowded = a_trained_job(), probed(a_trained_job(), 0.8 * COMPUTES_MS)
    without, carried = (fw.whatif(run, **conditions)["step_s"] for run in (plain, crowded))
    return carried - without + 0.020


def test_contention_follows_the_bytes_that_are_sent_beside_computing() -> None:
    """A ring of 64 sends 63/32 of the gradients, and one of two sends them once."""
    on_two, on_many = contention_s(workers=[2, 64], bandwidth="100Gbps")
    assert on_many / on_two == pytest.approx(63 / 32, rel=1e-3)
    [slow, fast] = contention_s(bandwidth=["100Mbps", "10Gbps"])
    assert slow < 0.008 < fast  # beside the same computing a slow link carries few of them


def test_contention_of_as_many_bytes_is_as_recorded() -> None:
    assert contention_s(bandwidth="1Gbps")[0] == pytest.approx(0.020, rel=0.05)
    one, four = contention_s(bandwidth="1Gbps", accumulate=[1, 4])
    assert four == pytest.approx(one / 4)


def test_a_what_if_keeps_contention_that_no_bytes_beside_computing_cause() -> None:
    run = a_trained_job(buckets=1)  # it leaves when computing is over
    before, found = (
        fw.whatif(each, bandwidth=["1Gbps", "10Gbps"]) for each in (run, probed(run, 80.0))
    )
    assert found["step_s"] == pytest.approx(before["step_s"])
    assert found["baseline_step_s"] == pytest.approx(before["baseline_step_s"] - 0.020)
    assert any("Predictions keep that as recorded" in each for each in found.warnings)


def test_contention_that_follows_bytes_is_never_said_to_be_kept() -> None:
    """Little of it in the step, and a long wait for processors."""
    run = probed(a_trained_job(), 0.99 * COMPUTES_MS)
    waiting = dataclasses.replace(run, facts=run.facts | Facts(run_delay_s=by_rank(0.03)))
    warnings = fw.whatif(waiting, bandwidth="10Gbps").warnings
    assert any("the bytes sent beside computing" in warning for warning in warnings)
    assert not any("Predictions keep that as recorded" in warning for warning in warnings)


def test_devices_compute_on_no_processor_that_sums_take() -> None:
    run = a_trained_job()
    facts = run.facts | Facts(run_delay_s=by_rank(0.03), backend="nccl")
    assert fw.explain(dataclasses.replace(run, facts=facts)).account["contention"] == 0


def test_probe_steps_are_mentioned_and_are_no_time_between_steps() -> None:
    found = fw.explain(probed(a_trained_job(), COMPUTES_MS, probes=5))
    assert any("5 probe steps are left out" in each for each in found.warnings)
    assert not any("between steps" in each for each in found.warnings)


def test_the_fix_for_contention_is_named() -> None:
    found = fw.explain(probed(a_trained_job(), 0.5 * COMPUTES_MS))
    assert found.verdict.kind == "contention"
    [fix] = [fix for fix in found.fixes if fix.kind == "contention"]
    assert fix.step_s == pytest.approx(found.step_s - found.account["contention"])


def test_only_a_job_with_buckets_is_told_to_enlarge_them() -> None:
    """FSDP and collectives by hand have no buckets, and no second way to the backend in use."""
    crowded = probed(a_trained_job(), 0.5 * COMPUTES_MS)
    told = {}
    for buckets in ("ddp:25MiB", None):
        for backend in ("gloo", "fullwire", "nccl"):
            facts = crowded.facts.without(("buckets", "backend"))
            facts |= Facts(buckets=buckets, backend=backend)
            kind = fix_kind("contention")
            run = dataclasses.replace(crowded, facts=facts)
            [fix] = kind.by_account(run, account(crowded, RATES))
            told[buckets, backend] = setting(fix)
    for (buckets, backend), words in told.items():
        assert ("larger buckets" in words) == (buckets is not None)
        assert ("the fullwire backend" in words) == (backend == "gloo")
    assert "NCCL_MAX_CTAS" in told[None, "nccl"]


def test_json_has_the_interval_and_the_source_of_t1() -> None:
    told = explanation_object(fw.explain(probed(a_trained_job(), 80.0)))
    assert told["baseline_source"] == "estimated"
    interval = told["baseline_interval"]
    assert interval["low_s"] < told["baseline_step_s"] < interval["high_s"]
    by_one = fw.explain(a_trained_job(), baseline=a_trained_job(ranks=1))
    assert explanation_object(by_one)["baseline_source"] == "measured"


# ---- the processors that ranks share ------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound_to", "sampled", "expected"),
    [(1, 2, 2), (2, 2, 2), (1, 1, 1), (2, 0, 2), (1, 64, 4)],
    ids=["each on its own", "all on both", "all on one", "no samples", "other processors too"],
)
def test_ranks_that_are_bound_to_different_processors_do_not_share_them(
    bound_to: int, sampled: int, expected: int
) -> None:
    hosts = Hosts(
        host=np.full(sampled, "vm", object),
        device=np.array([f"cpu{number}" for number in range(sampled)], object),
        time_ns=np.zeros(sampled, np.int64),
        utilization=np.ones(sampled),
        memory_bytes=np.zeros(sampled, np.int64),
    )
    facts = Facts(workers=4, machines=1, processors=bound_to)
    run = dataclasses.replace(a_trained_job(), facts=facts, hosts=hosts)
    assert processors_of_machine(run) == expected
    assert ranks_per_processor(run) == 4 / expected


def test_what_runs_and_waits_in_the_sums_of_a_probe_step_is_not_computing() -> None:
    """Sums wait for processors too: their wait made T1 of four ranks on two 38 % short.

    The thread also moves their bytes: with that, its time was 25 to 55 % longer than computing.
    """
    ms, ends = 1_000_000, np.arange(1, 7) * 100
    steps = Steps(start_ns=(ends - 100) * ms, end_ns=ends * ms)
    delays = np.array([[20 * ms, end * ms + 1, 50 * ms] for end in ends.tolist()])
    rank = _Rank(
        journal=cast(Journal, None),
        processors=delays[:0],
        children=delays[:0],
        before_forward=delays[:0],
        delays=delays,
        reported={},
        steps=steps,
        marks=np.array(["step", "step", "probe", "turns", "probe", "step"], object),
        in_sums_ns=np.array([[0, 0], [0, 0], [12, 18], [0, 0], [14, 22], [0, 0]]) * ms,
        turns_lack_ns=np.array([200_000]),
        shift_ns=0,
    )
    assert rank.delays_s(of_probes=True) == pytest.approx((0.007, 0.030))
    assert rank.delays_s(of_probes=False) == pytest.approx((0.020, 0.050))
