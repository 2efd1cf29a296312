"""Fixes: each change is proposed for the jobs that it helps, and only for those."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.verification import verify
from fullwire.fixes import Fix, fix_kinds
from fullwire.fixes.fix import Seen, fix_kind
from fullwire.run.facts import Facts, FactValue
from fullwire.run.run import Collectives, Events, Gradients, Run, Spans
from fullwire.simulation.forecast import forecaster
from fullwire.simulation.transport import FullTransport
from fullwire.simulation.typical import typical_step
from fullwire.timeline.account import account
from fullwire.words import sentence, sentences, setting
from tests.jobs_by_hand import GIGABIT, MS, Rank, a_job, a_job_of_experts, a_trained_job


def fixes_of(run: Run) -> dict[str, Fix]:
    """Return the best fix of each kind."""
    found: dict[str, Fix] = {}
    for fix in fw.explain(run).fixes:
        found.setdefault(fix.kind, fix)
    return found


def with_facts(run: Run, **facts: Any) -> Run:
    return dataclasses.replace(run, facts=run.facts | Facts(**facts))


def without_ddp(run: Run) -> Run:
    """Make a job that sums its gradients itself, when its backward pass is over."""
    backward, rows = run.spans.rows(run.spans.name == "backward"), run.collectives
    over_ns = dict(
        zip(zip(backward.rank, backward.step, strict=True), backward.end_ns, strict=True)
    )
    late_ns = np.array([over_ns[key] for key in zip(rows.rank, rows.step, strict=True)])
    late_ns = np.maximum(late_ns - rows.issue_ns, 0)
    return dataclasses.replace(
        run,
        collectives=dataclasses.replace(
            rows,
            issue_ns=rows.issue_ns + late_ns,
            start_ns=rows.start_ns + late_ns,
            end_ns=rows.end_ns + late_ns,
        ),
        facts=run.facts.without(["buckets"]),
    )


def summed_by_hand() -> Run:
    """Sum each gradient when the backward pass is over, one after the other, in 10 ms each."""
    job = without_ddp(a_trained_job())
    sums = job.collectives
    issue_ns = (sums.step * 146 + 101 + sums.sequence % 4 * 10) * MS
    by_hand = dataclasses.replace(
        sums, issue_ns=issue_ns, start_ns=issue_ns, end_ns=issue_ns + 10 * MS
    )
    return dataclasses.replace(job, collectives=by_hand)


def test_gradients_summed_by_hand_are_sent_once() -> None:
    table = fw.whatif(summed_by_hand(), transport="full", bandwidth="1Gbps")
    sums_s = 4 * 8e6 * 2 * (3 - 1) / 3 / 1e9
    assert table["overhead_s"] == pytest.approx(sums_s)


def test_a_comparison_predicts_sums_in_the_backward_pass_as_the_fix_does() -> None:
    by_hand, as_fixed = summed_by_hand(), with_facts(a_trained_job(), buckets="ddp")
    fix = fixes_of(by_hand)["overlap"]
    found = verify(by_hand, as_fixed)
    assert found is not None
    assert (found.predicted_s, found.low_s, found.high_s) == (fix.step_s, fix.low_s, fix.high_s)
    assert found.predicted_s < 0.99 * 0.146  # the step with sums by hand
    asked = fw.whatif(by_hand, buckets="ddp", transport="measured")
    assert asked["step_s"] == pytest.approx(fix.step_s)
    assert any("predictions send them during the backward pass" in each for each in asked.warnings)
    as_recorded = fw.whatif(by_hand, transport="measured")
    assert as_recorded["step_s"] == pytest.approx(0.146)
    assert not any("during the backward pass" in each for each in as_recorded.warnings)
    # Buckets do not tell how a script sums after the backward pass, on other links either.
    assert verify(as_fixed, with_facts(by_hand, line_rate_bps=10e9)) is None
    # The sums of these jobs are not known to become buckets.
    assert verify(a_job_of_experts(), as_fixed) is None
    sums = by_hand.collectives
    scattered = dataclasses.replace(sums, op=np.full(len(sums), "reducescatter", object))
    assert verify(dataclasses.replace(by_hand, collectives=scattered), as_fixed) is None


def test_sums_of_much_more_than_gradients_do_not_become_buckets_of_gradients() -> None:
    def of_times_the_gradients(times: int) -> Run:
        job = with_facts(summed_by_hand(), line_rate_bps=times * 1e9)
        sums = dataclasses.replace(job.collectives, bytes=job.collectives.bytes * times)
        return dataclasses.replace(job, collectives=sums)

    in_whole_floats = fixes_of(of_times_the_gradients(2))  # of gradients in halves of them
    assert "overlap" in in_whole_floats
    of_more = of_times_the_gradients(5)
    assert not {"overlap", "synchronisation"} & set(fixes_of(of_more))
    asked = fw.whatif(of_more, buckets="ddp", transport="measured")
    assert asked["step_s"] == pytest.approx(0.146)
    assert any("keep these sums as recorded" in each for each in asked.warnings)
    assert not any("during the backward pass" in each for each in asked.warnings)
    for condition in ({"accumulate": 2}, {"local_steps": 4}, {"compression": "int8"}):
        warnings = fw.whatif(of_more, transport="measured", **condition).warnings
        axis = next(iter(condition)).replace("_", " ")
        changed = f"With {axis}, predictions change all of these sums"
        assert any(changed in each for each in warnings)
    as_recorded = fw.whatif(of_more, transport="measured")
    assert not any("than its gradients have" in each for each in as_recorded.warnings)
    # The gradients of other passes are unknown, and may be those of another model.
    forward = of_more.spans.rows(of_more.spans.name == "forward")
    middle_ns = (forward.start_ns + forward.end_ns) // 2
    earlier = dataclasses.replace(
        forward, name=np.full(len(forward), "earlier backward", object), end_ns=middle_ns
    )
    first = of_more.spans.start_ns.copy()
    first[of_more.spans.name == "forward"] = middle_ns
    later = dataclasses.replace(of_more.spans, start_ns=first)
    of_two_models = dataclasses.replace(of_more, spans=Spans.joined([later, earlier]))
    of_both = fixes_of(of_two_models)
    assert {"overlap", "synchronisation"} <= set(of_both)
    of_one = fixes_of(with_facts(summed_by_hand(), line_rate_bps=1e9))["overlap"]
    assert of_both["overlap"].step_s > 0.99 * of_one.step_s  # five times the bytes and the rate
    asked = fw.whatif(of_two_models, buckets="ddp", transport="measured")
    assert not any("keep these sums as recorded" in each for each in asked.warnings)


def a_storm() -> Run:
    """Sum each of four gradients in ten parts: 0.8 ms for each, and 0.2 ms to call for the next."""
    by_hand = with_facts(summed_by_hand(), line_rate_bps=10e9)
    parts = by_hand.collectives.rows(np.repeat(np.arange(len(by_hand.collectives)), 10))
    part = np.arange(len(parts)) % 10
    issue_ns = parts.issue_ns + part * MS
    storm = dataclasses.replace(
        parts,
        bytes=parts.bytes // 10,
        sequence=parts.sequence * 10 + part,
        issue_ns=issue_ns,
        start_ns=issue_ns,
        end_ns=issue_ns + MS * 4 // 5,
    )
    return dataclasses.replace(by_hand, collectives=storm)


def test_many_small_sums_can_be_joined() -> None:
    storm = a_storm()
    joined = fixes_of(storm)["joining"]
    assert sentence(joined) == "40 small all-reduces as one"
    sent_s = 4 * 8e6 * 2 * (3 - 1) / 3 / 10e9
    uncalled_s = 39 * 0.2e-3
    assert joined.low_s < joined.step_s < min(joined.high_s, 0.142)
    job = forecaster(storm)
    assert job is not None
    step = job.subject.step
    whole = step.with_joined(step.others.small("allreduce", 2**20))
    assert whole.others.bytes == (4_000_000,)
    assert whole.others.issue_ns == step.others.issue_ns[-1:]
    assert (step.step_ns - whole.step_ns) * 1e-9 == pytest.approx(uncalled_s)
    full = dataclasses.replace(job.grid, transports=(FullTransport(1.0),))
    alone_s = whole.step_ns * 1e-9
    plain = dataclasses.replace(job, grid=full, calibration=None).as_modelled()
    found = plain.ask(change=lambda _: whole)
    assert found.step_s == pytest.approx(alone_s + sent_s, rel=0.01)


def test_joined_sums_that_a_script_begins_at_once_spare_the_work_of_each_call() -> None:
    """Two ranks began 120 sums a step and then waited: 204 ms, and 32 ms joined."""
    job = forecaster(a_storm())
    assert job is not None
    others = dataclasses.replace(job.subject.step.others, calling_ns=0)
    step = dataclasses.replace(job.subject.step, others=others, step_ns=17 * MS)
    places = others.small("allreduce", 2**20)
    working = dataclasses.replace(step, processor_ns=20 * MS)
    assert working.with_joined(places).processor_ns == 17 * MS
    with_threads = dataclasses.replace(step, processor_ns=60 * MS)  # most of it computes
    assert with_threads.with_joined(places).processor_ns == pytest.approx(52.2 * MS)


def test_only_many_small_sums_of_a_script_are_worth_joining() -> None:
    assert "joining" not in fixes_of(summed_by_hand())  # four, and large
    storm = a_storm()
    rows = storm.collectives
    large = dataclasses.replace(rows, bytes=np.full(len(rows), 2**20 + 4))
    assert "joining" not in fixes_of(dataclasses.replace(storm, collectives=large))
    scattered = dataclasses.replace(rows, op=np.full(len(rows), "reducescatter", object))
    assert "joining" not in fixes_of(dataclasses.replace(storm, collectives=scattered))


def beside_ddp(op: str, *, in_steps: tuple[int, ...] = (0, 1, 2, 3, 4, 5), at_ms: float) -> Run:
    """Have 30 collectives of 16 bytes, 0.3 ms each, and 0.1 ms to call for the next, in steps."""
    job = a_trained_job()
    of_steps = job.collectives.rows(
        np.isin(job.collectives.step, in_steps) & (job.collectives.sequence % 4 == 3)
    )
    rows = of_steps.rows(np.arange(len(of_steps)).repeat(30))
    place = np.arange(len(rows)) % 30
    begin_ns = (rows.step * 146 * MS + at_ms * MS + place * 0.4 * MS).astype(np.int64)
    small = dataclasses.replace(
        rows,
        op=np.full(len(rows), op, object),
        bytes=np.full(len(rows), 16),
        sequence=1000 + rows.step * 30 + place,
        issue_ns=begin_ns,
        start_ns=begin_ns,
        end_ns=begin_ns + 3 * MS // 10,
    )
    return dataclasses.replace(job, collectives=Collectives.joined([job.collectives, small]))


@pytest.mark.parametrize(
    ("op", "named"),
    [("allreduce", "all-reduces"), ("broadcast", "broadcasts"), ("allgather", "all-gathers")],
)
def test_small_collectives_of_one_kind_can_be_joined(op: str, named: str) -> None:
    found = fixes_of(beside_ddp(op, at_ms=120))["joining"]
    assert sentence(found) == f"30 small {named} as one"
    uncalled_s = 29 * 0.1e-3
    assert found.step_s < 0.146 - uncalled_s
    assert "joining" not in fixes_of(beside_ddp("alltoall", at_ms=120))


def test_a_pause_among_small_collectives_is_not_spared() -> None:
    """The last of them comes 6 ms later than it would, for a reason of the host's own."""
    job = beside_ddp("allreduce", at_ms=120)
    rows = job.collectives
    later_ns = np.where(rows.sequence % 30 == (1000 + 29) % 30, 6 * MS, 0) * (rows.bytes == 16)
    paused = dataclasses.replace(
        rows,
        issue_ns=rows.issue_ns + later_ns,
        start_ns=rows.start_ns + later_ns,
        end_ns=rows.end_ns + later_ns,
    )
    for each in (job, dataclasses.replace(job, collectives=paused)):
        assert typical_step(each).others.calling_ns == 29 * MS // 10


def test_sums_that_computation_waits_for_cannot_be_joined() -> None:
    """Split layers sum amidst the forward pass, which waits only for synchronous collectives."""
    job = beside_ddp("allreduce", at_ms=5)
    assert len(typical_step(job).others.small("allreduce", 2**20)) == 30
    rows = job.collectives.rows(job.collectives.bytes == 16)
    waits = Spans(
        rank=rows.rank,
        step=rows.step,
        lane=np.full(len(rows), "communication", object),
        name=np.full(len(rows), "wait", object),
        start_ns=rows.issue_ns,
        end_ns=rows.end_ns,
    )
    split = dataclasses.replace(job, spans=Spans.joined([job.spans, waits]))
    assert not typical_step(split).others.small("allreduce", 2**20)
    assert "joining" not in fixes_of(split)


def test_a_storm_in_one_step_is_not_taken_for_the_usual_step() -> None:
    stormy = beside_ddp("allreduce", in_steps=(3,), at_ms=120)
    assert typical_step(stormy).others.op == ()
    assert "joining" not in fixes_of(stormy)


def test_the_late_rank_is_named_with_where_to_look() -> None:
    late = fixes_of(a_trained_job(late_ms=60))["straggler"]
    assert sentence(late) == "rank 2 as fast as the others"
    assert "nvidia-smi" in setting(late)
    assert late.step_s == pytest.approx(0.146)
    assert "straggler" not in fixes_of(a_trained_job())


def test_a_late_rank_that_runs_longer_has_more_work() -> None:
    """Where processors are taken, it waits longer for them too, but not for the same work."""
    job = a_trained_job(late_ms=60)
    ran = ((0.0, 0.014), (1.0, 0.014), (2.0, 0.044))

    def advice(delays_s: tuple[float, float, float]) -> str:
        delays = tuple((float(rank), delay_s) for rank, delay_s in enumerate(delays_s))
        facts = dataclasses.replace(job.facts, backend="gloo", run_s=ran, run_delay_s=delays)
        return setting(fixes_of(dataclasses.replace(job, facts=facts))["straggler"])

    expected = "its thread runs 44 ms of each step, that of another rank 14 ms"
    assert expected in advice((0.028, 0.028, 0.088))
    assert expected not in advice((0.0, 0.0, 0.088))  # its processor is taken


def test_a_lasting_straggler_gets_fewer_samples_where_computing_is_what_takes_longer() -> None:
    job = a_trained_job(late_ms=60)
    fix = fixes_of(job)["balance"]
    assert sentence(fix) == "fewer samples of each batch for rank 2"
    assert "--balance" in setting(fix)
    [*usual, slow] = sorted(parts["compute"] for parts in fw.explain(job).detail.rank_parts_s())
    assert slow == pytest.approx(usual[0] + 0.060)
    balanced_s = (len(usual) + 1) / (sum(1 / each for each in usual) + 1 / slow)
    alike_s = fixes_of(job)["straggler"].step_s
    assert fix.step_s == pytest.approx(alike_s + balanced_s - usual[0])
    assert "balance" not in fixes_of(a_trained_job())
    assert "balance" not in fixes_of(in_turns(a_trained_job(ranks=2, late_ms=60)))


def test_tune_tries_shares_by_speed_in_an_elastic_job_alone() -> None:
    job = a_trained_job(late_ms=60)
    account, kind = fw.explain(job).detail, fix_kind("balance")
    assert not [*kind.to_try(job, account, Seen(), None)]
    start = np.array([0], np.int64)
    events = Events(
        time_ns=start,
        kind=np.array(["start"], object),
        ranks=np.array(["0,1,2"], object),
        duration_ns=start,
    )
    [trial] = kind.to_try(dataclasses.replace(job, events=events), account, Seen(), None)
    assert trial.setting == "on"
    assert trial.risk == "exact"
    assert kind.environment("on") == {"FULLWIRE_ELASTIC_BALANCE": "1"}
    with pytest.raises(fw.UsageError, match="expected on"):
        kind.checked("off")


def with_a_hook(run: Run, packs_ms: int) -> Run:
    """Make a hook send half the bytes, and pack the last bucket when the backward pass is over."""
    sent, marks = run.collectives, run.spans.rows(run.spans.name == "backward")
    last = np.where(sent.sequence % 4 == 3, packs_ms * MS, 0)
    later = dataclasses.replace(
        sent, bytes=sent.bytes // 2, issue_ns=sent.issue_ns + last, end_ns=sent.end_ns + last
    )
    packing = dataclasses.replace(
        marks,
        lane=np.full(len(marks), "host", object),
        name=np.full(len(marks), "codec", object),
        start_ns=marks.end_ns,
        end_ns=marks.end_ns + packs_ms * MS,
    )
    spans = Spans.joined([run.spans, packing])
    hooked = with_facts(run, hook="packs_much")
    return dataclasses.replace(hooked, spans=spans, collectives=later)


def test_what_a_hook_packs_is_predicted_as_it_was() -> None:
    hooked = with_a_hook(a_trained_job(), packs_ms=20)
    found = fw.explain(hooked)
    assert found.verdict.kind == "codec"
    assert found.account["codec"] == pytest.approx(0.020)
    table = fw.whatif(hooked, transport="measured", bandwidth=["1Gbps", "100Gbps"])
    slow_s, fast_s = table["step_s"]
    assert slow_s == pytest.approx(found.step_s)
    assert found.predicted_from_s + 0.020 < fast_s < slow_s
    assert "compression" not in fixes_of(hooked)
    assert setting(fixes_of(hooked)["codec"]).startswith("no register_comm_hook(...): packs_much")
    assert fixes_of(hooked)["codec"].step_s < slow_s - 0.010


def in_turns(run: Run) -> Run:
    """Make two ranks change places in every other step."""

    def swapped(table: Any) -> Any:
        return dataclasses.replace(table, rank=np.where(table.step % 2, 1 - table.rank, table.rank))

    return dataclasses.replace(
        run,
        spans=swapped(run.spans),
        collectives=swapped(run.collectives),
        gradients=swapped(run.gradients),
    )


def test_ranks_that_are_late_in_turns_cost_what_one_that_always_is_does() -> None:
    always = a_trained_job(ranks=2, late_ms=60)
    one, turns = fw.explain(always), fw.explain(in_turns(always))
    assert turns.verdict.kind == one.verdict.kind == "straggler"
    assert turns.predicted_from_s == one.predicted_from_s
    fix, by_turns = fixes_of(always)["straggler"], fixes_of(in_turns(always))["straggler"]
    assert sentence(by_turns) == "no late rank"
    assert by_turns.step_s == pytest.approx(fix.step_s)
    assert fix.step_s == pytest.approx(one.step_s - 0.060)


@pytest.mark.parametrize("knows_rate", [True, False])
def test_a_late_rank_takes_no_waiting_for_other_ranks_with_it(knows_rate: bool) -> None:
    """In one of the six usual steps rank 1 is late instead, and stays so."""
    always = a_trained_job(ranks=4, late_ms=60, steps=12)
    if not knows_rate:
        facts = always.facts.without(["line_rate_bps"])
        always = dataclasses.replace(always, facts=facts)

    def swapped(table: Any) -> Any:
        other = np.array([0, 3, 2, 1])[table.rank]
        return dataclasses.replace(table, rank=np.where(table.step % 5 == 0, other, table.rank))

    run = dataclasses.replace(
        always,
        spans=swapped(always.spans),
        collectives=swapped(always.collectives),
        gradients=swapped(always.gradients),
    )
    all_s, found = fixes_of(always)["straggler"].step_s, fw.explain(run)
    fix = fixes_of(run)["straggler"]
    assert sentence(fix) == "rank 3 as fast as the others"
    assert fix.step_s == pytest.approx(all_s + 0.060 / 6, abs=0.002)
    assert fix.step_s <= found.step_s - 5 / 6 * found.account["straggler"] + 1e-6


def test_a_link_that_is_slower_than_the_others_is_to_be_looked_at() -> None:
    slow = with_facts(a_trained_job(), line_rate_bps=10e9, other_line_rates_bps=((1.0, 1e9),))
    [named] = [fix for fix in fw.explain(slow).fixes if "as fast as others" in sentence(fix)]
    assert sentence(named) == "the link of rank 1 as fast as others: 10 Gbps"
    assert "ethtool" in setting(named)
    same = with_facts(a_trained_job(), other_line_rates_bps=((1.0, 1e9),))
    assert not any("as fast as others" in sentence(fix) for fix in fw.explain(same).fixes)
    [alike] = [
        fix for fix in fw.explain(a_trained_job()).fixes if sentence(fix) == "links of 5 Gbps"
    ]
    assert setting(alike) == "hardware; nothing to set in the job"
    assert not any(
        "as fast as others" in sentence(fix) for fix in fw.explain(a_trained_job()).fixes
    )


def computing_later_and_waiting(job: Run) -> tuple[Spans, Spans]:
    """Return spans whose forward passes begin 30 ms later, and waits for data meanwhile."""
    forward = job.spans.rows(job.spans.name == "forward")
    waits = dataclasses.replace(
        forward,
        lane=np.full(len(forward), "input", object),
        name=np.full(len(forward), "wait", object),
        end_ns=forward.start_ns + 30 * MS,
    )
    later = np.where(job.spans.name == "forward", 30 * MS, 0)
    return dataclasses.replace(job.spans, start_ns=job.spans.start_ns + later), waits


def test_waiting_for_data_is_worth_what_it_takes_with_one_worker_too() -> None:
    job = a_trained_job()
    spans, waits = computing_later_and_waiting(job)
    found = fixes_of(dataclasses.replace(job, spans=Spans.joined([spans, waits])))
    assert found["input"].step_s == pytest.approx(0.116)
    assert found["input"].scaling_factor == pytest.approx(0.104 / 0.116)
    assert "num_workers" in setting(found["input"])
    assert "input" not in fixes_of(job)
    # A baseline that found its data in a cache takes less time than the job waits for its own.
    waiting = dataclasses.replace(job, spans=Spans.joined([spans, waits]))
    told = dataclasses.replace(account(waiting, {}), baseline_s=0.020)
    [by_account] = fix_kinds()["input"].by_account(waiting, told)
    assert 0 < by_account.scaling_factor < 0.020 / by_account.step_s


def test_loading_ahead_takes_no_work_off_the_processors() -> None:
    """Three ranks on two processors of one host load for 30 ms of a step, and work for 84 ms."""
    job = a_trained_job()
    by_itself, waits = computing_later_and_waiting(job)

    def working(each_s: float, spans: Spans) -> Run:
        each_rank = tuple((rank, each_s) for rank in range(3))
        run = with_facts(job, machines=1, hosts="a,a,a", processors=2, processor_s=each_rank)
        return dataclasses.replace(run, spans=spans)

    with_loader = Spans.joined([by_itself, waits])
    for kind, spans in (("input", with_loader), ("host", by_itself)):

        def by_account(each_s: float, kind: str = kind, spans: Spans = spans) -> list[float]:
            run = working(each_s, spans)
            found = fix_kinds()[kind].by_account(run, account(run, {}))
            return [each.step_s for each in found]

        assert by_account(0.02) == [pytest.approx(0.116, rel=0.01)]
        assert by_account(0.084) == [pytest.approx(0.084 * 3 / 2)]
        assert by_account(0.097) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"backend": "gloo"}, 'init_process_group("fullwire")'),
        ({"backend": "fullwire"}, "no setting of the backend's"),
        ({"backend": "nccl"}, "NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4"),
        ({"backend": "nccl", "nccl_network": "Socket"}, "NCCL_SOCKET_NTHREADS=4"),
        ({"backend": "nccl", "nccl_network": "IB"}, "NCCL_IB_QPS_PER_CONNECTION=4"),
    ],
)
def test_a_slow_transport_has_the_setting_of_its_own_backend(
    facts: dict[str, Any], words: str
) -> None:
    fast = with_facts(a_trained_job(buckets=8), line_rate_bps=10e9, **facts)
    assert fw.explain(fast).account["transport"] > 0.01
    assert words in setting(fixes_of(fast)["transport"])


def test_only_a_transport_below_buckets_is_to_get_larger_ones() -> None:
    job = with_facts(a_trained_job(buckets=8), line_rate_bps=10e9, backend="fullwire")
    assert "larger buckets and more processors fill" in setting(fixes_of(job)["transport"])
    by_hand = setting(fixes_of(without_ddp(job))["transport"])
    assert by_hand == "more processors fill more of it; no setting of the backend's does"


def test_hosts_of_several_ranks_may_sum_within_first() -> None:
    apart = with_facts(a_trained_job(ranks=4), backend="nccl")
    together = with_facts(apart, hosts="one,one,other,other")
    assert sentence(fixes_of(together)["algorithm"]).startswith("sums within each of 2 hosts")
    assert not any("within" in sentence(fix) for fix in fw.explain(apart).fixes)
    assert "init_device_mesh" in setting(
        fixes_of(with_facts(together, backend="gloo"))["algorithm"]
    )


def test_without_a_line_rate_what_is_lost_beside_the_network_can_be_helped() -> None:
    unknown = a_trained_job(late_ms=60).facts.without(["line_rate_bps"])
    late = dataclasses.replace(a_trained_job(late_ms=60), facts=unknown)
    found = fw.explain(late)
    [fix] = found.fixes
    assert (fix.kind, sentence(fix)) == ("straggler", "rank 2 as fast as the others")
    # The late rank delays all buckets, and only a part of that counts as waiting.
    assert fix.step_s == pytest.approx(fw.explain(a_trained_job()).step_s)
    assert fix.scaling_factor == pytest.approx(found.baseline_step_s / fix.step_s)
    assert fix.low_s == fix.step_s
    assert fix.high_s == pytest.approx(found.step_s - found.account["straggler"])
    waits = Rank(100, [("compute", "backward", 50.0, 95.0), ("input", "wait", 0.0, 50.0)])
    [ahead] = fw.explain(a_job(waits)).fixes
    assert ahead.kind == "input"
    assert ahead.step_s == pytest.approx(0.050)
    assert not fw.explain(a_job(waits, steps=2)).fixes


def test_what_a_job_has_already_is_not_offered_again() -> None:
    job = a_trained_job()
    assert "compression" in fixes_of(job)
    assert "compression" not in fixes_of(with_facts(job, hook="fp16_compress_hook"))
    assert "compression" not in fixes_of(with_facts(job, hook="fullwire.compress(int8)"))
    assert "compression" not in fixes_of(with_facts(job, wire="bf16"))
    halves = np.full(len(job.collectives), "bfloat16", object)
    sent = dataclasses.replace(job.collectives, dtype=halves)
    assert "compression" not in fixes_of(dataclasses.replace(job, collectives=sent))


def test_a_codec_is_offered_if_its_whole_interval_lies_below_the_step() -> None:
    run = a_trained_job()
    job = forecaster(run)
    assert job is not None
    account: Any = None  # Not asked.
    kind = fix_kinds()["compression"]
    [fix] = kind.predict(run, job, account)
    assert sentence(fix) == "gradients sent as int8"
    assert setting(fix) == 'fullwire.compress(model, "int8")'
    assert fix.risk == "numeric"
    unsure: Any = SimpleNamespace(
        measured_s=job.measured_s,
        ask=lambda **_: dataclasses.replace(fix.forecast, high_s=1.01 * job.measured_s),
    )
    assert not list(kind.predict(run, unsure, account))
    on_gpus = with_facts(run, backend="nccl")
    job_on_gpus = forecaster(on_gpus)
    assert job_on_gpus is not None
    [halves] = kind.predict(on_gpus, job_on_gpus, account)
    assert sentence(halves) == "gradients sent as float16"


def test_gradients_summed_by_hand_are_told_from_a_model_that_is_sharded() -> None:
    """The setting of DDP helps a script that sums by hand, and not one that shards its model."""
    by_hand = summed_by_hand()
    found = fixes_of(by_hand)
    assert setting(found["overlap"]).startswith("DistributedDataParallel(model)")
    assert 0.120 < found["overlap"].step_s < 0.135  # half is in the last bucket, which is exposed
    assert setting(found["synchronisation"]).startswith("skip all_reduce in 3 of 4 passes")
    assert "compression" not in found  # its setting is a hook of DDP
    gathers = np.full(len(by_hand.collectives), "allgather", object)
    sharded = dataclasses.replace(by_hand.collectives, op=gathers)
    shown = fixes_of(dataclasses.replace(by_hand, collectives=sharded))
    assert not {"overlap", "synchronisation", "compression"} & set(shown)


def test_a_job_that_sums_in_each_pass_is_told_to_sum_once_a_step() -> None:
    """Two passes of 50 ms, and each ends in a sum of 20 ms that nothing hides."""
    spans = [
        ("compute", "earlier forward", 0.0, 20.0),
        ("compute", "earlier backward", 20.0, 50.0),
        ("compute", "forward", 70.0, 90.0),
        ("compute", "backward", 90.0, 120.0),
        ("compute", "optimizer", 140.0, 142.0),
    ]
    rank = Rank(145, spans, [(2_500_000, 50, 70), (2_500_000, 120, 140)])
    facts: dict[str, FactValue] = {**GIGABIT, "buckets": "ddp:25MiB", "backend": "gloo"}
    job = a_job(rank, rank, steps=12, facts=facts)
    ranks, steps = (column.reshape(-1) for column in np.indices((2, 12)))
    gradients = Gradients(
        rank=ranks,
        step=steps,
        order=np.zeros(24, np.int64),
        bytes=np.full(24, 2_500_000),
        ready_ns=(steps * 145 + 120) * MS,
    )
    job = dataclasses.replace(job, gradients=gradients)
    found = fw.explain(job)
    told = [sentence(fix) for fix in found.fixes]
    assert "one sum a step of 2 passes" in told
    assert not any(words.startswith("one sum every") for words in told)
    once = found.fixes[told.index("one sum a step of 2 passes")]
    assert (once.risk, once.kind) == ("exact", "accumulation")
    assert once.step_s == pytest.approx(0.125, rel=0.02)
    assert "model.no_sync() in 1 of the 2 passes" in setting(once)
    # Without a line rate the account alone tells it.
    on_one_host = with_facts(job, hosts="a,a", line_rate_bps=None)
    [once] = [fix for fix in fw.explain(on_one_host).fixes if fix.kind == "accumulation"]
    assert once.step_s == pytest.approx(0.125, rel=0.02)
    # Passes of two models, or of a closure that clears gradients, cannot be sent together.
    of_two = with_facts(job, gradient_sets=2)
    found = fw.explain(of_two)
    assert not {"accumulation", "synchronisation"} & {fix.kind for fix in found.fixes}
    said = sentences(found.notes)
    assert (
        "A step has 2 passes, and not all of their gradients seem to add up: some are of other "
        "parameters, or are cleared, changed or used before the next pass." in said
    )
    assert "A step adds up the gradients of 2 passes." in sentences(fw.explain(job).notes)
    [counts] = [each for each in fw.whatif(of_two).warnings if "2 passes" in each]
    assert counts.endswith("a recorded step has 2 passes, and times here are those of such a step.")
    warned = "not all gradients of its 2 passes a step seem to add up."
    notes = fw.whatif(of_two, accumulate=[1, 4]).notes
    assert warned in " ".join(sentences([each for each in notes if each.is_assumption]))
    assert not any(warned in each for each in fw.whatif(job, accumulate=[1, 4]).warnings)
    seen, kind = Seen(sums_per_step=2.0), fix_kind("accumulation")
    assert [each.setting for each in kind.to_try(job, account(job, {}), seen, None)] == ["2"]
    assert not [*kind.to_try(of_two, account(of_two, {}), seen, None)]


def every_third_waits(host_ms: int) -> Run:
    """Make a job in which every third step writes something for so long, at its end."""
    run = with_facts(a_trained_job(steps=30), line_rate_bps=1e9)
    spans, sums, gradients = run.spans, run.collectives, run.gradients

    def later(step: Any, times_ns: Any) -> Any:
        return times_ns + step // 3 * host_ms * MS

    writes = np.where((spans.step % 3 == 2) & (spans.name == "step"), host_ms * MS, 0)
    return dataclasses.replace(
        run,
        spans=dataclasses.replace(
            spans,
            start_ns=later(spans.step, spans.start_ns),
            end_ns=later(spans.step, spans.end_ns) + writes,
        ),
        collectives=dataclasses.replace(
            sums,
            issue_ns=later(sums.step, sums.issue_ns),
            start_ns=later(sums.step, sums.start_ns),
            end_ns=later(sums.step, sums.end_ns),
        ),
        gradients=dataclasses.replace(
            gradients, ready_ns=later(gradients.step, gradients.ready_ns)
        ),
    )


def test_long_steps_that_one_worker_has_too_leave_t1_with_the_step() -> None:
    """The verdict is of the mean of all steps: T1 of a fixed step is of the same steps."""
    plain, run = fw.explain(every_third_waits(0)), fw.explain(every_third_waits(300))
    assert run.verdict.kind == "host"
    assert run.is_of_all_steps
    known = {fix.kind: fix for fix in run.fixes}
    usual = known["host"]
    assert usual.step_s == pytest.approx(plain.step_s)
    assert usual.scaling_factor == pytest.approx(plain.scaling_factor, rel=0.01)
    others = {fix.kind: fix for fix in plain.fixes}
    mean_longer_s = 0.100
    fix = known["link"]
    assert fix.step_s == pytest.approx(others["link"].step_s + mean_longer_s, rel=0.02)
    alone_s = plain.baseline_step_s + mean_longer_s
    assert fix.scaling_factor == pytest.approx(alone_s / fix.step_s, rel=0.02)
