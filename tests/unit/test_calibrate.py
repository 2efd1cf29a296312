"""A measured transport: fitted to a run's own collectives, and used for other conditions."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.explain import break_even
from fullwire.answers.verification import verify
from fullwire.clusters import cluster
from fullwire.collectives.closed_form import host_load
from fullwire.compression.compressor import Compressor
from fullwire.errors import UsageError
from fullwire.findings.predictions import MoreHostsAlike
from fullwire.fixes.straggler import Straggler
from fullwire.report.terminal import print_whatif
from fullwire.run.facts import Facts, FactValue
from fullwire.run.placement import Placement, placement_of
from fullwire.run.processors import KERNEL_FACTOR, own_work_s
from fullwire.run.run import Collectives, Hosts, Run, Spans
from fullwire.run.usual import Alone
from fullwire.simulation.as_recorded import residues, with_contention, with_residue
from fullwire.simulation.buckets import bucket_policy
from fullwire.simulation.calibrate import PAYLOAD_SHARE, calibrated
from fullwire.simulation.forecast import Forecaster, filling, forecaster
from fullwire.simulation.grid import AXES, MEASURES, Crowding, Grid, Residue
from fullwire.simulation.interval import interval_s
from fullwire.simulation.messages import BY_BITS
from fullwire.simulation.stragglers import jitter
from fullwire.simulation.subject import plain_subject
from fullwire.simulation.sweep import sweep
from fullwire.simulation.transport import FullTransport
from fullwire.simulation.typical import typical_step
from fullwire.timeline.account import account
from fullwire.words import sentence, setting
from tests.builders import a_run
from tests.conftest import Cli
from tests.jobs_by_hand import a_trained_job as trained_by_hand
from tests.trained_jobs import MIB, MS, a_trained_job, a_transport, message_s

GBPS = 1e9


def used(processor_s: float) -> dict[str, tuple[tuple[float, float], ...]]:
    return {"communication_processor_s": ((0.0, processor_s), (1.0, processor_s))}


def told(alone_s: float) -> Alone:
    return Alone(alone_s, 0.8 * alone_s, 1.2 * alone_s)


def a_forecaster(run: Run) -> Forecaster:
    found = forecaster(run)
    assert found is not None
    return found


def predicted_s(shown: Run, truth: Run) -> float:
    is_other = truth.facts.workers != shown.facts.workers
    table = fw.whatif(
        shown,
        workers=truth.facts.workers,
        ranks_per_host=truth.facts.workers if is_other else None,  # all are on one machine
        bandwidth=truth.facts.line_rate_bps,
        buckets=truth.facts.buckets,
        transport="measured",
    )
    return float(table["step_s"][0])


def measured_s(run: Run) -> float:
    measured_ns = typical_step(run).measured_ns
    assert measured_ns is not None
    return measured_ns * 1e-9


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("rate_bps", [0.3 * GBPS, 1 * GBPS, 10 * GBPS])
def test_a_replay_as_recorded_gives_back_the_measured_step(rate_bps: float, noise: float) -> None:
    run = a_trained_job(a_transport(), rate_bps=rate_bps, noise=noise, slower_ms=3)
    assert predicted_s(run, run) == pytest.approx(measured_s(run), abs=2e-9)


def test_what_a_line_bound_run_shows_holds_on_other_lines() -> None:
    shown = a_trained_job(a_transport(), facts=used(0.05 / 1.42))
    for rate_bps in (0.4 * GBPS, 2 * GBPS, 4 * GBPS):
        truth = a_trained_job(a_transport(), rate_bps=rate_bps)
        assert predicted_s(shown, truth) == pytest.approx(measured_s(truth), rel=0.03)


def test_processor_time_says_what_a_slow_line_hides() -> None:
    lazy, busy = (
        calibrated([a_trained_job(a_transport(), facts=used(processor_s))]).transport
        for processor_s in (0.02, 0.2)
    )
    assert busy.processor_s_per_byte > 3 * lazy.processor_s_per_byte


def test_a_run_that_the_processors_hold_up_shows_their_cost() -> None:
    run = a_trained_job(a_transport(processor_s_per_byte=2.5e-9), rate_bps=100 * GBPS, steps=40)
    found = calibrated([run]).transport
    assert found.processor_s_per_byte == pytest.approx(2.5e-9, rel=0.15)


def test_our_backend_is_not_believed_to_work_for_nothing() -> None:
    """A slow line hides our backend's work; Gloo's work is known, and ours is a share of it."""
    ours = a_transport(processor_s_per_byte=0.9e-9, processor_s_per_hop=0.04e-3, apart=0.05)
    shown = a_trained_job(ours, facts={"backend": "fullwire"})
    truth = a_trained_job(ours, rate_bps=25 * GBPS)
    table = fw.whatif(shown, bandwidth="25Gbps", transport="measured")
    assert table.interval_s[0][0] < measured_s(truth) < table.interval_s[1][0]
    assert table["step_s"][0] == pytest.approx(measured_s(truth), rel=0.1)


def test_a_devices_own_cost_of_bytes_is_not_that_of_a_processor() -> None:
    """A line of 160 Gbps hides it, and one of 2,560 Gbps would show it."""
    nccl = a_transport(processor_s_per_byte=0.0, processor_s_per_hop=5e-6)
    job: dict[str, Any] = {"gradients_mib": (400, 400), "facts": {"backend": "nccl"}}
    shown = a_trained_job(nccl, rate_bps=160 * GBPS, **job)
    truth = a_trained_job(nccl, rate_bps=2560 * GBPS, **job)
    assert predicted_s(shown, truth) == pytest.approx(measured_s(truth), rel=0.01)


def test_where_a_faster_line_changes_little_the_answer_says_so() -> None:
    run = a_trained_job(a_transport(processor_s_per_byte=2.5e-9), facts=used(0.12))
    fast = fw.whatif(run, bandwidth="1Gbps,25Gbps", transport="measured")
    [said] = [each for each in fast.warnings if "the processors limit this transport" in each]
    assert "From 2.9" in said
    assert "on, the processors limit this transport (2 workers)" in said
    assert not any(
        "faster line" in each
        for each in fw.whatif(run, bandwidth="1Gbps", transport="measured").warnings
    )


def test_idle_processors_tell_less_than_the_work_of_busy_ones() -> None:
    """On both lines, threads use as much time for the same bytes; computing fills the caches."""
    for facts, least, most in ((used(0.06), 1.1, 1.35), (computing(0.065, 0.06), 1.35, 1.9)):
        slow, fast = (
            calibrated([a_trained_job(a_transport(), rate_bps=rate_bps, facts=facts)])
            for rate_bps in (0.7 * GBPS, 10 * GBPS)
        )
        times = slow.transport.processor_s_per_byte / fast.transport.processor_s_per_byte
        assert least < times < most
        off = [
            max(variant.processor_s_per_byte for variant in each.variants)
            / each.transport.processor_s_per_byte
            for each in (slow, fast)
        ]
        assert off[0] > off[1]


def test_a_late_rank_that_does_not_compute_changes_no_work_for_a_byte() -> None:
    per_byte = [
        calibrated(
            [a_trained_job(a_transport(), slower_ms=late_ms, facts=computing(0.03, 0.06))]
        ).transport.processor_s_per_byte
        for late_ms in (0, 40)
    ]
    assert per_byte[1] == pytest.approx(per_byte[0], rel=0.03)


def test_smaller_segments_on_slow_lines_take_more_work_for_the_same_bytes() -> None:
    """Below 600 Mbps a segment holds less, so the same time of threads tells less work."""
    found = [
        calibrated([a_trained_job(a_transport(), rate_bps=rate_bps, facts=used(0.06))])
        for rate_bps in (0.02 * GBPS, 0.2 * GBPS, 0.6 * GBPS, 0.7 * GBPS)
    ]
    slowest, slow, plain, faster = (each.transport.processor_s_per_byte for each in found)
    assert 0.5 * plain < slow < 0.75 * plain
    # So far from what was measured, the usual work of Gloo counts as well.
    assert 0.3 * plain < slowest < slow
    assert faster == pytest.approx(plain, rel=0.02)
    off = [max(v.processor_s_per_byte for v in each.variants) for each in found]
    assert off[0] / slowest > 1.1 * off[2] / plain


def test_a_dilated_line_has_the_segments_of_the_real_one() -> None:
    dilated_facts: dict[str, FactValue] = {**used(0.06), "dilation": 10.0}  # really 200 Mbps
    plain, dilated = (
        calibrated([a_trained_job(a_transport(), rate_bps=2 * GBPS, facts=facts)])
        for facts in (used(0.06), dilated_facts)
    )
    per_byte = [each.transport.processor_s_per_byte for each in (plain, dilated)]
    assert per_byte[1] < 0.8 * per_byte[0]


def test_probe_steps_and_evaluations_are_no_computing_of_steps() -> None:
    run = a_trained_job(a_transport(), rate_bps=0.7 * GBPS, facts=computing(0.065, 0.06))
    spans = run.spans
    outside = spans.rows(spans.lane == "compute")
    outside = dataclasses.replace(outside, step=np.full(len(outside.step), -1))
    with_outside = dataclasses.replace(run, spans=Spans.joined([spans, outside]))
    both = [calibrated([each]).transport for each in (run, with_outside)]
    assert both[1] == both[0]


def test_ranks_that_share_a_processor_use_each_others_pauses() -> None:
    transport = a_transport(processor_s_per_byte=1e-9, processor_s_per_hop=0.0)
    bytes_ = np.array(1e6)
    alone_s, *shared_s = (
        float(transport.work_s(bytes_, np.array(0.0), np.array(crowd)))
        for crowd in (1.0, 1.5, 2.0, 8.0)
    )
    assert alone_s == pytest.approx(1e-3)
    assert shared_s == pytest.approx([1.425e-3, 1.8e-3, 7.2e-3])
    assert transport.line_limits_up_to_bps(1.0) == pytest.approx(
        1.8 * transport.line_limits_up_to_bps(2.0)
    )


def test_a_second_run_of_the_cluster_narrows_the_interval() -> None:
    slow = a_trained_job(a_transport())
    fast = a_trained_job(a_transport(), rate_bps=100 * GBPS)
    asked: dict[str, Any] = {
        "workers": 4,
        "ranks_per_host": 4,
        "bandwidth": "40Gbps",
        "transport": "measured",
    }
    alone = fw.whatif(slow, **asked)
    both = fw.whatif(slow, **asked, calibrate=[fast])
    widths = [high[0] - low[0] for low, high in (alone.interval_s, both.interval_s)]
    assert widths[1] < 0.7 * widths[0]
    truth = measured_s(a_trained_job(a_transport(), workers=4, rate_bps=40 * GBPS))
    assert both["step_s"][0] == pytest.approx(truth, rel=0.05)


def test_the_recording_that_is_asked_for_narrows_the_interval_as_far_as_said() -> None:
    slow = a_trained_job(a_transport())
    asked: dict[str, Any] = {"workers": 2, "bandwidth": "40Gbps", "transport": "measured"}
    alone = fw.whatif(slow, **asked)
    assert alone.further is not None
    assert alone.further.rate_bps is not None
    wished = a_trained_job(a_transport(), rate_bps=alone.further.rate_bps)
    both = fw.whatif(slow, **asked, calibrate=[wished])
    width_s, now_s = (high[0] - low[0] for low, high in (alone.interval_s, both.interval_s))
    assert now_s / width_s == pytest.approx(alone.further.share, rel=0.2)
    assert alone.to_record is not None
    assert f"would make it {alone.further.share:.0%} as wide" in sentence(alone.to_record)


def test_where_no_recording_narrows_the_interval_none_is_asked_for() -> None:
    near = fw.whatif(a_trained_job(a_transport()), transport="measured", bandwidth="1Gbps")
    assert near.further is None
    assert near.to_record is None


@pytest.mark.parametrize(("workers", "rate_bps"), [(2, 0.3 * GBPS), (3, 1 * GBPS), (2, 2 * GBPS)])
def test_steps_of_two_kinds_leave_open_which_of_them_is_the_usual(
    workers: int, rate_bps: float
) -> None:
    shown = a_trained_job(a_transport(), steps=11, every_second=0.06, facts=used(0.05 / 1.42))
    steady = a_trained_job(a_transport(), steps=11, facts=used(0.05 / 1.42))
    truth = a_trained_job(a_transport(), workers=workers, rate_bps=rate_bps)
    found, usual = (
        fw.whatif(run, workers=workers, bandwidth=rate_bps, transport="measured")
        for run in (shown, steady)
    )
    assert found["step_s"][0] > 1.02 * measured_s(truth)  # the longer kind was the median
    assert found.interval_s[0][0] < measured_s(truth) < found.interval_s[1][0]
    widths = [high[0] - low[0] for low, high in (found.interval_s, usual.interval_s)]
    assert widths[1] < widths[0] < 3 * widths[1]


def test_a_rank_works_no_longer_in_a_step_than_its_processors_have_time_for() -> None:
    """The mean of all steps had four of 250 ms in it, which the usual step of 40 ms leaves out.

    Formerly its ranks worked for 69 ms. A step with our transport was predicted at 81 ms.
    """
    disturbed = used(0.01) | {"processor_s": ((0.0, 0.9), (1.0, 0.9))}
    run = a_trained_job(a_transport(), facts=disturbed)
    assert own_work_s(run) == pytest.approx(measured_s(run))
    four = a_trained_job(a_transport(), workers=4, facts=disturbed)  # on two processors
    assert own_work_s(four) == pytest.approx(measured_s(four) / 2)


@pytest.mark.parametrize(("ranks_per_host", "is_lower"), [(None, True), (1, False)])
def test_ranks_that_slow_each_other_a_lot_may_do_so_less_in_another_run(
    ranks_per_host: int | None, is_lower: bool
) -> None:
    found = a_forecaster(a_trained_job(a_transport(), facts=used(0.03)))
    [subject], grid = [found.subject], found.subject.recorded
    assert grid is not None
    reach_s = {}
    for share in (0.1, 0.4):  # of T1, of which a tenth is usual
        by_ranks_ns = round(share / (1 + share) * subject.step.step_ns)
        step = dataclasses.replace(
            subject.step, crowded_ns=by_ranks_ns, crowded_by_ranks_ns=by_ranks_ns
        )
        slowed = dataclasses.replace(subject, step=step, ranks_per_host=ranks_per_host)
        point = dataclasses.replace(grid, bandwidth_bps=(0.5 * GBPS,))
        table = sweep([slowed], point)
        ends_s = interval_s([slowed], point, table, found.calibration)
        reach_s[share] = float(table["step_s"][0] - ends_s[0][0])
    further_s = np.sqrt(max(reach_s[0.4] ** 2 - reach_s[0.1] ** 2, 0.0))
    assert further_s == pytest.approx(
        (0.4 - 0.1) * slowed.step.alone_ns * 1e-9 * is_lower, abs=1e-3
    )


def test_the_interval_grows_with_the_distance_from_what_was_measured() -> None:
    run = a_trained_job(a_transport(), noise=0.02, facts=used(0.03))
    table = fw.whatif(run, bandwidth="1Gbps,3Gbps,10Gbps,40Gbps", transport="measured")
    low_s, high_s = table.interval_s
    shares = (high_s - low_s) / table["step_s"]
    assert (np.diff(shares) > 0).all()


@pytest.mark.parametrize(("workers", "rate_bps"), [(4, 0.2 * GBPS), (4, 3 * GBPS), (8, 1 * GBPS)])
def test_a_model_that_is_split_over_ranks_sums_gradients_among_the_others(
    workers: int, rate_bps: float
) -> None:
    shown = a_trained_job(a_transport(), workers=4, split_mib=8, facts=used(0.05 / 1.42))
    assert typical_step(shown).shards == 2
    truth = a_trained_job(a_transport(), workers=workers, rate_bps=rate_bps, split_mib=8)
    assert predicted_s(shown, truth) == pytest.approx(measured_s(truth), rel=0.05)
    [*_, said] = fw.whatif(shown, transport="measured").warnings
    assert "groups of one in 2 ranks sum gradients" in said


@pytest.mark.parametrize("workers", [4, 8, 16])
def test_sums_by_hand_of_a_split_model_grow_among_the_ranks_with_the_same_part(
    workers: int,
) -> None:
    shown, truth = (
        a_trained_job(a_transport(), workers=count, split_mib=8, by_hand=True)
        for count in (4, workers)
    )
    assert typical_step(shown).shards == 2
    assert predicted_s(shown, truth) == pytest.approx(measured_s(truth), rel=0.05)
    with pytest.raises(UsageError, match=r"a multiple of 2 for .* got 7"):
        fw.whatif(shown, workers=7)


@pytest.mark.parametrize(("again_mib", "growing"), [(25, "allreduce"), (8, "reducescatter")])
def test_a_group_whose_shards_of_sums_another_adds_up_stays_and_the_other_grows(
    again_mib: int, growing: str
) -> None:
    """Pairs sum half of the 50 MiB after the others' sums, or something else."""
    run = a_trained_job(
        a_transport(), workers=4, split_mib=again_mib, by_hand=True, op="reducescatter"
    )
    rows = run.collectives
    is_again = np.char.startswith(rows.group.astype(str), "pair")
    summed_ns = {step: rows.end_ns[rows.step == step].max() for step in set(rows.step.tolist())}
    late_ns = np.array([summed_ns[step] for step in rows.step.tolist()])
    rows = dataclasses.replace(
        rows,
        op=np.where(is_again, "allreduce", rows.op).astype(object),
        **{
            name: np.where(is_again, late_ns, getattr(rows, name))
            for name in ("issue_ns", "start_ns", "end_ns")
        },
    )
    step = typical_step(dataclasses.replace(run, collectives=rows))
    ops = zip(step.others.op, step.others.members, strict=True)
    assert {op for op, members in ops if members < 0} == {growing}
    assert step.shards == 2


def test_a_transport_that_fills_the_line_still_costs_each_message_something() -> None:
    """Many tiny messages leave the line idle, so their cost is not the line's."""
    run = a_trained_job(
        a_transport(processor_s_per_hop=0.2), gradients_mib=[0.001] * 40, buckets="ddp:1kB"
    )
    job = a_forecaster(run)
    gained_s = job.measured_s - job.filling().ask().step_s
    assert 0.5 * (job.measured_s - job.alone_s) < gained_s
    assert job.filling().ask().step_s > 1.5 * job.alone_s
    assert job.unhindered().ask().step_s == pytest.approx(job.measured_s, rel=0.1)


def test_no_step_is_expected_shorter_than_a_worker_alone_takes() -> None:
    table = fw.whatif(
        a_trained_job(a_transport(), noise=2.0), bandwidth="10Mbps,1Gbps", transport="measured"
    )
    low_s, _ = table.interval_s
    assert (low_s > 0.5 * table["baseline_step_s"]).all()


def test_ranks_on_one_machine_share_its_processors_and_elsewhere_they_do_not() -> None:
    here = Placement(ranks=8, machines=1, processors=2)
    apart = dataclasses.replace(here, machines=4)
    assert here.ranks_per_processor([1, 2, 3, 8]).tolist() == [0.5, 1, 1.5, 4]
    assert apart.ranks_per_processor([1, 2, 3, 8]).tolist() == [1, 1, 1, 1]


def test_a_model_among_the_hosts_of_a_lab_has_their_links() -> None:
    facts: dict[str, FactValue] = {"machines": 1, "hosts": "host0,host1", "processors": 2}
    lab = a_trained_job(a_transport(), facts=facts)
    slow_s, fast_s = (
        fw.whatif(
            "resnet50@v100",
            workers=2,
            ranks_per_host=2,
            bandwidth=rate,
            transport="measured",
            calibrate=lab,
        )["step_s"][0]
        for rate in ("100Mbps", "1Gbps")
    )
    assert slow_s == pytest.approx(10 * fast_s, rel=0.3)


def test_ranks_of_one_host_of_a_lab_have_no_link() -> None:
    facts: dict[str, FactValue] = {"machines": 1, "hosts": "host0,host0,host1,host1"}
    lab = a_trained_job(a_transport(), workers=4, facts=facts)
    where = placement_of(lab)
    assert where is not None
    assert not where.has_links
    steps_s = fw.whatif(
        "resnet50@v100",
        workers=2,
        ranks_per_host=2,
        bandwidth="100Mbps,1Gbps",
        transport="measured",
        calibrate=lab,
    )["step_s"]
    assert steps_s[0] == steps_s[1]


def test_a_lab_without_named_hosts_has_links() -> None:
    job = a_trained_job(a_transport())
    where = placement_of(
        dataclasses.replace(job, facts=dataclasses.replace(job.facts, processors=None))
    )
    assert where is not None
    assert where.has_links


def test_hosts_without_a_number_of_processors_have_their_ranks() -> None:
    run = a_trained_job(a_transport(), workers=4)
    facts = run.facts.without(["processors", "machines"]) | Facts(hosts="one,one,two,two")
    run = dataclasses.replace(run, facts=facts)
    table = fw.whatif(run, workers="4,8", transport="measured")
    assert (
        "More workers are more hosts like the recorded ones, each with 2 ranks. "
        "--ranks-per-host changes that." in table.warnings
    )
    apart = placement_of(run)
    assert apart is not None
    assert apart.ranks_per_processor([2, 8]).tolist() == [1, 1]


def test_hosts_with_unequal_numbers_of_ranks_count_like_the_fullest_one() -> None:
    run = a_trained_job(a_transport(), workers=4)
    asked: dict[str, Any] = {"workers": "4,8", "bandwidth": "100Tbps", "transport": "measured"}

    def on(hosts: str) -> Run:
        facts = run.facts | Facts(hosts=hosts, machines=2, processors=1)
        return dataclasses.replace(run, facts=facts)

    uneven, even = placement_of(on("one,one,one,two")), placement_of(on("one,one,two,two"))
    assert uneven is not None
    assert even is not None
    assert uneven.ranks_per_processor([2, 4, 8]).tolist() == [2, 3, 3]
    assert even.ranks_per_processor([2, 4, 8]).tolist() == [2, 2, 2]
    said = "each with 3 ranks as the fullest of them on 1 processor. --ranks-per-host"
    assert any(said in line for line in fw.whatif(on("one,one,one,two"), **asked).warnings)
    assert any("each with 2 ranks on 1" in line for line in fw.whatif(on(""), **asked).warnings)
    in_the_mean = sentence(MoreHostsAlike(at=Placement(ranks=3, machines=2, processors=1)))
    assert "each with 1.5 ranks in the mean on 1 processor" in in_the_mean


def test_more_workers_are_more_hosts_like_the_recorded_one() -> None:
    here = Placement(ranks=3, machines=1, processors=2)
    assert here.ranks_per_processor([1, 2, 3, 8]).tolist() == [0.5, 1, 1.5, 1.5]
    assert here.ranks_per_processor([2, 16], 4).tolist() == [1, 2]
    run = a_trained_job(a_transport(), facts=computing(0.065))
    asked: dict[str, Any] = {"workers": "2,16", "bandwidth": "100Tbps", "transport": "measured"}
    as_recorded, crowded = fw.whatif(run, **asked), fw.whatif(run, **asked, ranks_per_host=16)
    assert crowded["step_s"][0] == as_recorded["step_s"][0]
    assert crowded["step_s"][1] > 2 * as_recorded["step_s"][1]
    assert crowded["ranks_per_host"].tolist() == [16, 16]
    said = (
        "More workers are more hosts like the recorded one, each with 2 ranks "
        "on 2 processors. --ranks-per-host changes that."
    )
    assert said in as_recorded.warnings
    assert said not in crowded.warnings


@pytest.mark.parametrize("ranks", ["0", "-1", "1.5", "many", "", 0, True, "9" * 5000])
def test_what_is_no_number_of_ranks_is_refused(ranks: object) -> None:
    with pytest.raises(UsageError, match="ranks per host: expected a whole number from 1 to"):
        fw.whatif("vgg16@v100", workers=8, bandwidth="1Gbps", ranks_per_host=ranks)


def test_ranks_of_a_host_are_refused_where_no_transport_takes_processors() -> None:
    with pytest.raises(UsageError, match="ranks per host: expected a run that shows how"):
        fw.whatif("vgg16@v100", workers=8, bandwidth="1Gbps", ranks_per_host=2)


def computing(own_s: float, communicating_s: float = 0.03) -> dict[str, FactValue]:
    """Return the facts about two ranks' processors: in all, and in the threads that communicate."""
    whole = tuple((float(rank), own_s + communicating_s) for rank in range(2))
    return {**used(communicating_s), "processor_s": whole}


def test_ranks_that_compute_throughout_take_each_others_processors() -> None:
    shown = a_trained_job(a_transport(), facts=computing(0.065))
    sleeping = a_trained_job(a_transport(), facts=computing(0.01))
    asked: dict[str, Any] = {
        "workers": [2, 3, 4],
        "ranks_per_host": 4,
        "bandwidth": "100Tbps",
        "transport": "measured",
    }
    alone_s = typical_step(shown).step_ns * 1e-9
    assert alone_s == pytest.approx(0.065)
    steps_s, others_s = (fw.whatif(run, **asked)["step_s"] for run in (shown, sleeping))
    assert (steps_s > alone_s * np.array([1, 1.5, 2])).all()
    assert steps_s[2] > others_s[2] + 0.9 * alone_s


def test_turns_of_other_ranks_hide_some_of_the_messages() -> None:
    asked: dict[str, Any] = {"workers": 4, "ranks_per_host": 4, "transport": "measured"}
    each: dict[str, Any] = {"gradients_mib": (10, 10, 10, 10), "buckets": "ddp:10MiB"}
    longer_s = []
    for rate in ("100Tbps", "1Gbps"):  # without and with messages to hide
        computes, sleeps = (
            fw.whatif(a_trained_job(a_transport(), facts=facts, **each), bandwidth=rate, **asked)
            for facts in (computing(0.065), computing(0.01))
        )
        longer_s.append(float(computes["step_s"][0] - sleeps["step_s"][0]))
    assert longer_s[1] < 0.065 < longer_s[0]
    # A turn takes 65 ms. In 30 of them the first bucket is ready and the backward pass goes on.
    assert 0.005 < 0.065 - longer_s[1] < 0.03


def test_messages_beside_computing_tell_little_of_their_work() -> None:
    """Clocks tell it, where computing on the same processors makes messages longer."""
    slowed = a_transport(processor_s_per_byte=2.5e-9)
    shared = computing(0.075, 12.2 * MIB * 1e-9 / KERNEL_FACTOR)
    small: dict[str, Any] = {"gradients_mib": (3, 3, 3, 3, 0.2), "buckets": "ddp:3MiB"}
    beside, alone = (
        calibrated([a_trained_job(slowed, rate_bps=100 * GBPS, steps=40, facts=facts, **small)])
        for facts in (shared, {**shared, "processors": 4000, "machines": 2})
    )
    # The last small bucket follows the computing.
    assert max(each.longer for each in beside.observations) > 0.3
    assert max(each.longer for each in alone.observations) < 0.01
    per_byte = [each.transport.processor_s_per_byte for each in (beside, alone)]
    assert per_byte[0] < 0.9 * per_byte[1]


@pytest.mark.parametrize(
    ("rate_bps", "facts"),
    [
        pytest.param(GBPS / 10, computing(0.065), id="the line takes the time"),
        pytest.param(100 * GBPS, computing(0.065, 0.0), id="no clock tells the work"),
        pytest.param(
            100 * GBPS, {**computing(0.065), "processors": 32, "machines": 2}, id="idle processors"
        ),
    ],
)
def test_times_of_messages_are_believed_where_computing_cannot_lengthen_them(
    rate_bps: float, facts: dict[str, FactValue]
) -> None:
    found = calibrated([a_trained_job(a_transport(), rate_bps=rate_bps, facts=facts)])
    assert max(each.longer for each in found.observations) < 0.05


@pytest.mark.filterwarnings("error")
def test_a_run_that_lacks_the_collectives_of_a_rank_is_refused_in_one_line() -> None:
    run = a_trained_job(a_transport(), facts=computing(0.065))
    lacks = dataclasses.replace(run, collectives=run.collectives.rows(run.collectives.rank == 0))
    with pytest.raises(UsageError, match="nothing is known about the transport"):
        calibrated([lacks])


def test_a_fast_line_does_not_hide_one_work_behind_another_on_the_same_processor() -> None:
    shown = a_trained_job(a_transport(), facts=computing(0.065, 0.05))
    table = fw.whatif(shown, bandwidth="100Tbps", transport="measured")
    assert 0.065 + 0.05 < table["step_s"][0] < 0.065 + 2 * 0.05


def test_a_late_rank_adds_nothing_where_work_takes_all_processors() -> None:
    """While one rank is late, the others' work goes on."""
    on_time, late = (
        a_trained_job(
            a_transport(),
            gradients_mib=(20, 10, 10, 10),
            slower_ms=slower_ms,
            facts=computing(0.065, 0.06),
        )
        for slower_ms in (0, 10)
    )
    asked: dict[str, Any] = {"bandwidth": "100Tbps", "transport": "measured"}
    steps_s = [fw.whatif(run, **asked)["step_s"][0] for run in (on_time, late)]
    assert steps_s[1] == pytest.approx(steps_s[0], abs=0.001)


@pytest.mark.parametrize("late_ms", [0, 20])
def test_processor_time_beyond_t1_is_no_work_of_the_rank(late_ms: int) -> None:
    """The kernel charges its work for messages to the thread that it interrupts."""
    charged, own = (
        a_trained_job(a_transport(), slower_ms=late_ms, facts=computing(own_s, 0.06))
        for own_s in (0.075, 0.065)
    )
    asked: dict[str, Any] = {"bandwidth": "100Tbps", "transport": "measured"}
    steps_s = [fw.whatif(run, **asked)["step_s"][0] for run in (charged, own)]
    assert steps_s[0] == pytest.approx(steps_s[1])


def crowded(rate_bps: float, own_s: float, crowded_s: float = 0.005, mib: int = 10) -> Crowding:
    """Return the contention of a job whose T1 is so much less than its step's own time."""
    run = a_trained_job(
        a_transport(),
        rate_bps=rate_bps,
        gradients_mib=(mib, mib, mib, mib),
        buckets=f"ddp:{mib}MiB",
        facts=computing(own_s, 0.06),
    )
    subject = plain_subject("a job", run)
    return with_contention(subject, told(0.065 - crowded_s), a_transport()).crowding


def test_few_bytes_beside_computing_tell_little_of_contention() -> None:
    """Then the work for messages counts, which delays computing on busy processors alone."""
    slow, fast = crowded(2 * GBPS, 0.065), crowded(20 * GBPS, 0.065)
    work = (1e-9 / 8) ** BY_BITS
    assert fast.recorded_beside > 2.5 * slow.recorded_beside
    assert crowded(0.1 * GBPS, 0.065).s_each == pytest.approx(work, rel=0.06)
    assert slow.s_each == pytest.approx(work, rel=0.1) != 0.005 / slow.recorded_beside
    assert 0.005 / fast.recorded_beside < fast.s_each < 0.6 * slow.s_each
    assert fast.off_s_each < 0.72 * slow.off_s_each
    assert crowded(2 * GBPS, 0.005, crowded_s=0.0).s_each < 0.1 * work
    assert crowded(2 * GBPS, 0.065, crowded_s=0.0).s_each > 0.8 * work


def test_the_same_bits_in_less_time_beside_computing_delay_it_less() -> None:
    """Their work delays it, and so does each of their waking up."""
    slow, fast = (crowded(rate_bps, 0.065, mib=1) for rate_bps in (1 * GBPS, 2 * GBPS))
    times = fast.recorded_beside / slow.recorded_beside
    assert times == pytest.approx(0.5 ** (1 - BY_BITS), rel=0.03)


@pytest.mark.parametrize("taken", [0.0, 0.5, 1.0])
def test_ranks_that_are_late_by_turns_on_busy_processors_are_crowded(taken: float) -> None:
    step = plain_subject("a job", a_trained_job(a_transport(), slower_ms=20)).step
    step = dataclasses.replace(step, lasting_share=0.25)
    assert step.waiting_ns > 0
    moved = step.with_lateness_as_contention(taken)
    assert moved.crowded_ns == round(taken * 0.75 * step.waiting_ns)
    assert moved.alone_ns == step.alone_ns
    assert moved.step_ns + moved.waiting_ns == step.step_ns + step.waiting_ns


def test_many_tiny_sums_price_a_bit_as_one_large_sum_does() -> None:
    """A message in a row costs time, and delays no more for each of its bits."""
    here = a_transport(processor_s_per_hop=2e-4)

    def priced(mib: float, count: int) -> float:
        run = a_trained_job(
            here,
            rate_bps=0.2 * GBPS,
            gradients_mib=(mib,) * count,
            buckets=f"ddp:{mib}MiB",
            facts=computing(0.02 + 0.01 * count, 0.06),
        )
        subject = plain_subject("a job", run)
        own_s = subject.step.step_ns * 1e-9
        return with_contention(subject, told(own_s - 0.005), here).crowding.s_each

    assert priced(0.125, 40) == pytest.approx(priced(1.25, 4), rel=0.1)


@pytest.mark.parametrize("shown_bps", [0.2 * GBPS, 2 * GBPS])
def test_a_full_line_is_no_slower_than_the_measured_one_and_never_slower_for_being_faster(
    shown_bps: float,
) -> None:
    run = a_trained_job(
        a_transport(),
        rate_bps=shown_bps,
        gradients_mib=(10, 10, 10, 10),
        buckets="ddp:10MiB",
        facts=computing(0.065, 0.06),
    )
    job = a_forecaster(run)
    subject = with_contention(job.subject, told(0.06), a_transport())
    rates_bps = tuple(float(rate) for rate in np.geomspace(0.1, 1000, 30) * GBPS)
    grid = dataclasses.replace(
        job.grid, bandwidth_bps=rates_bps, transports=(job.full(), a_transport())
    )
    full_s, measured_s = sweep([subject], grid)["step_s"].reshape(2, -1)
    assert (full_s <= 1.02 * measured_s).all()
    assert (np.diff(full_s) <= 0.03 * full_s[1:]).all()


def test_another_jitter_has_its_own_lateness_and_not_that_of_contention_too() -> None:
    run = a_trained_job(a_transport(), slower_ms=10, facts=computing(0.065, 0.06))
    subject = plain_subject("a job", run)
    step = dataclasses.replace(subject.step, lasting_share=0.0)
    own_s = step.step_ns * 1e-9
    crowded = with_contention(dataclasses.replace(subject, step=step), told(own_s), a_transport())
    assert crowded.crowding.lateness_share == pytest.approx(1.0)
    assert crowded.recorded is not None
    jitters = (jitter("recorded"), jitter("none"))
    recorded_s, none_s = sweep(
        [crowded],
        dataclasses.replace(crowded.recorded, transports=(a_transport(),), jitters=jitters),
    )["step_s"]
    assert none_s < recorded_s - 0.002


def test_messages_keep_processors_busy_for_no_more_than_the_room_of_the_recorded_step() -> None:
    run = a_trained_job(a_transport(), rate_bps=20 * GBPS, facts=computing(0.065, 0.06))
    subject = plain_subject("a job", run)
    assert subject.step.measured_ns is not None
    slow, slowest = (a_transport(processor_s_per_byte=s_per_byte) for s_per_byte in (1.5e-9, 9e-9))
    found = with_contention(subject, told(0.065), slow)
    assert found.recorded is not None
    crowding, room_s = found.crowding, subject.step.measured_ns * 1e-9 - 0.065
    assert crowding.most_busy_share * crowding.recorded_work_s == pytest.approx(room_s)
    assert crowding.most_busy_share < 0.9
    # Work that was not seen is doubtful, but more ranks will cause some. So half of it stays.
    assert with_contention(subject, told(0.065), slowest).crowding.most_busy_share == 0.5
    quick = a_transport(processor_s_per_byte=1e-10)
    assert with_contention(subject, told(0.065), quick).crowding.most_busy_share == 1.0


def test_contention_beside_no_bits_shrinks_with_the_transports_work() -> None:
    """A script that sums after its passes sends nothing beside them."""
    here = a_transport()
    run = a_trained_job(here, by_hand=True, gradients_mib=[0.01] * 20, facts=computing(0.22, 0.06))
    subject = plain_subject("a job", run)
    own_s = subject.step.step_ns * 1e-9
    crowded = with_contention(subject, told(own_s - 0.02), here)
    assert crowded.recorded is not None
    assert crowded.crowding.s_each == 0
    tenth = dataclasses.replace(
        here,
        processor_s_per_byte=here.processor_s_per_byte / 10,
        processor_s_per_hop=here.processor_s_per_hop / 10,
    )
    unknown = dataclasses.replace(crowded.crowding, recorded_work_s=0.0)
    grid = dataclasses.replace(crowded.recorded, transports=(here, tenth))
    steps_s, kept_s = (
        sweep([dataclasses.replace(crowded, crowding=crowding)], grid)["step_s"]
        for crowding in (crowded.crowding, unknown)
    )
    assert (kept_s - steps_s).tolist() == pytest.approx([0.0, 0.9 * 0.02], abs=1e-5)


def test_quicker_calls_end_the_step_sooner_if_it_has_room_after_its_passes() -> None:
    step = plain_subject("a job", a_trained_job(a_transport(), by_hand=True)).step
    step = dataclasses.replace(
        step, others=dataclasses.replace(step.others, calling_ns=4 * MS), processor_ns=50 * MS
    )
    after_ns = step.step_ns - step.forward_ns - step.backward_ns
    assert after_ns >= 3 * MS
    quicker = step.with_calls(0.4)
    assert quicker.step_ns == step.step_ns - round(2.4 * MS)
    assert quicker.processor_ns == 50 * MS - round(2.4 * MS)
    assert quicker.others.calling_ns == round(1.6 * MS)
    full = dataclasses.replace(step, step_ns=step.forward_ns + step.backward_ns)
    assert full.with_calls(0.4).step_ns == full.step_ns


def test_a_faster_link_saves_no_more_than_the_bytes_and_contention_stays() -> None:
    """Much more contention than the transport's work explains does not go with the bytes."""
    rate_bps, here = 2 * GBPS, a_transport()
    run = a_trained_job(
        here,
        rate_bps=rate_bps,
        gradients_mib=(10, 10, 10, 10),
        buckets="ddp:10MiB",
        facts=computing(0.065, 0.06),
    )
    crowded = with_contention(plain_subject("a job", run), told(0.025), here)
    subject = with_residue(crowded, here)
    assert subject.recorded is not None
    assert crowded.step.measured_ns is not None
    assert crowded.crowding.steady_share > 0.15
    grid = dataclasses.replace(
        subject.recorded, transports=(here,), bandwidth_bps=(rate_bps, 1.01 * rate_bps, 1e13)
    )
    recorded_s, sooner_s, soonest_s = sweep([subject], grid)["step_s"]
    assert recorded_s == pytest.approx(crowded.step.measured_ns * 1e-9)
    bits = float(8 * crowded.step.bytes.sum())
    assert recorded_s - sooner_s < 1.05 * bits / rate_bps * (1 - 1 / 1.01) / here.share
    kept_s = crowded.step.crowded_ns * 1e-9 * crowded.crowding.steady_share
    assert soonest_s > crowded.step.alone_ns * 1e-9 + kept_s


def test_a_residue_shrinks_by_the_hidden_communication_or_a_misfit() -> None:
    residue = Residue(0.05, at_overhead_s=0.02, at_hidden_s=0.01, messages=40)

    def beside(overhead_s: float, hidden_s: float, passes: int = 1, messages: int = 40) -> float:
        asked = np.array(overhead_s), np.array(hidden_s), passes, messages
        return float(residue.beside(*asked))

    assert beside(0.02, 0.01) == pytest.approx(0.05)
    assert beside(0.04, 0.02) == pytest.approx(0.05)  # more communication
    assert beside(0.01, 0.01) == pytest.approx(0.05 - 0.05 * 0.02 / 2)
    assert beside(0.01, 0.006) == pytest.approx(0.046)
    assert beside(0.005, 0.01, passes=4) == pytest.approx(0.0125)  # one sum of four
    assert beside(0.01, 0.01, messages=10) == pytest.approx(0.025)  # not below the overhead's share
    shorter = dataclasses.replace(residue, time_s=-0.05)
    assert float(shorter.beside(np.array(0.01), np.array(0.0), 1, 40)) == pytest.approx(-0.025)


def test_on_a_device_the_wait_for_a_late_rank_is_beside_computing_too() -> None:
    on_time, late = (
        with_contention(
            plain_subject(
                "a job",
                a_trained_job(
                    a_transport(),
                    rate_bps=100 * GBPS,
                    gradients_mib=(1, 1, 1, 1),
                    buckets="ddp:1MiB",
                    slower_ms=slower_ms,
                    facts={"backend": "nccl"},
                ),
            ),
            told(0.06),
            a_transport(),
        ).crowding
        for slower_ms in (0, 5)
    )
    assert on_time.is_by_time
    assert late.recorded_beside - on_time.recorded_beside == pytest.approx(0.005, rel=0.1)
    assert late.s_each < on_time.s_each


def test_ranks_that_leave_a_processor_take_their_contention_along() -> None:
    half_busy = Crowding(s_each=1e-10, busy_by_a_rank=0.5, recorded_ranks=1.0)
    assert half_busy.with_ranks(np.array([0.5, 1.0, 2.0, 4.0])).tolist() == [0.5, 1.0, 2.0, 2.0]


def four_ranks_by_turns(rate_bps: float = 2 * GBPS, slower_ms: float = 0.0) -> Run:
    """Return a job of four ranks on two processors, each of which computes without a pause."""
    facts: dict[str, FactValue] = {
        name: tuple((float(rank), time_s) for rank in range(4))
        for name, time_s in (("communication_processor_s", 0.03), ("processor_s", 0.095))
    }
    return a_trained_job(
        a_transport(),
        workers=4,
        rate_bps=rate_bps,
        gradients_mib=(10, 10, 10, 10),
        buckets="ddp:10MiB",
        slower_ms=slower_ms,
        facts=facts,
    )


def test_messages_of_ranks_by_turns_cause_contention_by_their_own_work() -> None:
    """Two ranks on each processor take twice as long; a bit of each is as much work as before."""
    crowded = [
        with_contention(
            plain_subject("a job", four_ranks_by_turns(rate_bps)), told(0.065), a_transport()
        ).crowding
        for rate_bps in (0.5 * GBPS, 2 * GBPS)
    ]
    by_own_work = (0.9e-9 / 8) ** BY_BITS  # in the pauses of the other rank of the processor
    assert [each.recorded_ranks for each in crowded] == [2, 2]
    assert crowded[0].s_each == pytest.approx(by_own_work, rel=0.1)
    # More of the faster messages are beside computing, and this step shows no contention.
    assert 0.7 * by_own_work < crowded[1].s_each < crowded[0].s_each


def test_ranks_that_shared_a_processor_are_late_for_each_other() -> None:
    half, ranks = Crowding(recorded_ranks=2.0), np.array([0.5, 1.0, 2.0, 4.0])
    assert half.still_late(ranks).tolist() == [0.5, 0.5, 1.0, 1.0]
    asleep = dataclasses.replace(half, busy_by_a_rank=0.1)
    assert asleep.still_late(ranks).tolist() == [0.95, 0.95, 1.0, 1.0]
    assert Crowding().still_late(ranks).tolist() == [1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(("way", "share"), [("recorded", 0.5), ("lognormal:20%", 1.0)])
def test_recorded_lateness_alone_follows_the_ranks_on_a_processor(
    way: str, share: float, is_full: bool
) -> None:
    here = a_transport()
    run = four_ranks_by_turns(slower_ms=5)
    subject = with_contention(plain_subject("a job", run), told(0.065), here)
    recorded = subject.recorded
    assert recorded is not None
    grid = dataclasses.replace(
        recorded,
        transports=(FullTransport(0.95) if is_full else here,),
        jitters=(jitter("none"), jitter(way)),
    )

    def late_s(ranks_per_host: int) -> float:
        asked = dataclasses.replace(subject, ranks_per_host=ranks_per_host)
        usual_s, later_s = sweep([asked], grid)["step_s"]
        return float(later_s - usual_s)

    assert late_s(2) == pytest.approx(share * late_s(4), rel=0.01)


def test_the_place_of_other_ranks_does_not_change_how_the_recorded_step_is_explained() -> None:
    """The recorded placement, asked for by name, has the same interval as without the name."""
    found = a_forecaster(four_ranks_by_turns(slower_ms=5))
    transports, measured_ns = found.grid.transports, [found.subject.step.measured_ns]
    fewer = dataclasses.replace(found.subject, ranks_per_host=2)
    assert residues(fewer, transports, measured_ns) == residues(
        found.subject, transports, measured_ns
    )
    asked: dict[str, Any] = {"workers": 4, "bandwidth": "2Gbps", "transport": "measured"}
    usual, named = (
        fw.whatif(four_ranks_by_turns(slower_ms=5), **asked, ranks_per_host=ranks).interval_s
        for ranks in (None, 4)
    )
    assert np.array(named) == pytest.approx(np.array(usual))


def test_each_of_several_runs_keeps_its_own_placement() -> None:
    """Their order decides nothing: four ranks share two processors, and two have one each."""
    two, four = (
        dataclasses.replace(run, provenance=dataclasses.replace(run.provenance, source=name))
        for name, run in (
            ("two", a_trained_job(a_transport(), facts=computing(0.065))),
            ("four", four_ranks_by_turns()),
        )
    )
    asked: dict[str, Any] = {"workers": "2,4,8", "bandwidth": "2Gbps", "transport": "measured"}
    steps = [
        dict(zip(zip(table["run"], table["workers"], strict=True), table["step_s"], strict=True))
        for table in (fw.whatif(runs, **asked) for runs in ([two, four], [four, two]))
    ]
    assert steps[0] == pytest.approx(steps[1])


def test_other_transports_beside_it_do_not_change_an_answer() -> None:
    """Ranks compute by turns whatever carries their sums, and full links do not end that."""
    run = four_ranks_by_turns()
    asked: dict[str, Any] = {"workers": 4, "bandwidth": "10Gbps"}
    alone = fw.whatif(run, **asked, transport="full")
    [beside_s, measured_s] = fw.whatif(run, **asked, transport="full,measured")["step_s"]
    assert alone["step_s"].tolist() == [beside_s]
    assert 2 * alone["baseline_step_s"][0] < beside_s < measured_s
    spread = fw.whatif(run, **asked, transport="full,measured", ranks_per_host=2)["step_s"]
    assert spread[0] < 0.7 * beside_s


def test_runs_on_several_backends_have_no_transport_in_common() -> None:
    """Each keeps what it shows by itself, and the measured transport of both is refused."""
    named = {
        backend: dataclasses.replace(
            run,
            facts=run.facts | Facts(backend=backend),
            provenance=dataclasses.replace(run.provenance, source=backend),
        )
        for backend, run in (("gloo", four_ranks_by_turns()), ("fullwire", four_ranks_by_turns()))
    }
    with pytest.raises(UsageError, match="gloo has gloo, fullwire has fullwire"):
        fw.whatif(list(named.values()), transport="measured")
    with pytest.raises(UsageError, match="gloo has gloo, fullwire has fullwire"):
        fw.whatif(named["gloo"], transport="measured", calibrate=named["fullwire"])
    with pytest.raises(UsageError, match="runs on gloo, as gloo: fullwire is on fullwire"):
        fw.explain(named["gloo"], calibrate=named["fullwire"])
    both = fw.whatif(list(named.values()), workers=4, bandwidth="10Gbps")["step_s"].tolist()
    assert both == [
        fw.whatif(run, workers=4, bandwidth="10Gbps")["step_s"][0] for run in named.values()
    ]


def test_equal_ranks_that_share_a_processor_stay_late_for_each_other() -> None:
    """Half of the lateness of two ranks on each processor is their turns, which no fix ends."""
    run = four_ranks_by_turns(slower_ms=20)
    alone = a_forecaster(run)
    by_turns = with_contention(alone.subject, told(0.065), a_transport())
    shared = dataclasses.replace(alone, subject=by_turns)

    def gained_s(job: Forecaster) -> float:
        [fix] = Straggler().predict(run, job, account(run, {}))
        return job.ask().step_s - fix.step_s

    assert gained_s(shared) == pytest.approx(gained_s(alone) / 2, rel=0.1)


def test_a_change_that_changes_nothing_keeps_the_interval() -> None:
    run = a_trained_job(a_transport(), steps=80, noise=0.3)
    asked: dict[str, Any] = {"workers": 2, "bandwidth": "1Gbps"}
    usual, same = (fw.whatif(run, **asked, compute_speed=speed).interval_s for speed in (None, 1))
    assert np.ptp(usual) > 0.02 * np.mean(usual)
    assert np.array(same) == pytest.approx(np.array(usual))


def test_turns_that_are_in_a_step_are_not_counted_twice() -> None:
    """Two ranks on a processor rest most of the time: no turns are taken out of their step."""
    step = typical_step(a_trained_job(a_transport(), workers=4, facts=computing(0.02)))
    assert (step.shared_by, step.crowded_by_messages_s) == (2.0, 0.0)
    shown = dataclasses.replace(step, crowded_ns=step.step_ns - 30 * 10**6)
    turns_s = shown.by_turns_s(2.0)
    assert turns_s == pytest.approx(0.01)
    assert shown.crowded_by_messages_s == pytest.approx(shown.crowded_ns * 1e-9 - turns_s)
    assert typical_step(four_ranks_by_turns()).shared_by == 0  # they are out of this one


@pytest.mark.parametrize("workers", [2, 4])
def test_gloos_gathers_wait_for_half_a_part_on_every_line(workers: int) -> None:
    """A fast line shows it, and a slow one has it too; with our backend there is none."""

    def gathering(rate_bps: float) -> Run:
        run = a_trained_job(
            a_transport(gathers_late=0.8, processor_s_per_byte=0.3e-9),
            workers=workers,
            rate_bps=rate_bps,
            by_hand=True,
            op="allgather",
        )
        small = np.full_like(run.gradients.bytes, 4)  # they are gathered as parameters
        return dataclasses.replace(run, gradients=dataclasses.replace(run.gradients, bytes=small))

    shown, truth = gathering(4 * GBPS), gathering(0.3 * GBPS)
    assert predicted_s(shown, truth) == pytest.approx(measured_s(truth), rel=0.04)
    found = calibrated([shown])
    assert found.transport.gathers_late > 0
    assert filling(found, PAYLOAD_SHARE).transport.gathers_late == 0


def test_a_rank_among_too_many_is_taken_for_one_with_a_processor_of_its_own() -> None:
    crowded = a_trained_job(a_transport(), workers=4, facts=computing(0.0325))
    idle = a_trained_job(a_transport(), workers=4, facts=computing(0.02))
    assert typical_step(crowded).step_ns * 1e-9 == pytest.approx(0.0325)
    assert typical_step(idle).step_ns * 1e-9 == pytest.approx(0.065)
    assert predicted_s(crowded, crowded) == pytest.approx(measured_s(crowded), abs=2e-9)


def test_gradients_that_are_summed_by_hand_are_sent_once() -> None:
    shown, truth = (
        a_trained_job(a_transport(), rate_bps=rate_bps, by_hand=True, facts=used(0.04))
        for rate_bps in (4 * GBPS, 0.5 * GBPS)
    )
    table = fw.whatif(shown, bandwidth="500Mbps", transport="measured")
    assert table["step_s"][0] == pytest.approx(measured_s(truth), rel=0.03)
    halves = fw.whatif(shown, bandwidth="500Mbps", transport="measured", compression=2)
    assert halves["overhead_s"][0] < 0.6 * table["overhead_s"][0]


def test_the_answer_names_buckets_of_a_script_that_sums_itself_only_where_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is predicted as recorded, and the heading said "buckets ddp". So did JSON and CSV."""
    job = a_trained_job(a_transport(), rate_bps=4 * GBPS, by_hand=True, facts=used(0.04))
    for buckets, told in ((None, "recorded"), ("ddp", "ddp")):
        table = fw.whatif(job, bandwidth="500Mbps", transport="measured", buckets=buckets)
        print_whatif(table)
        assert ("buckets ddp" in capsys.readouterr().out) is (buckets is not None)
        assert [row["buckets"] for row in table.rows()] == [told] == table["buckets"].tolist()
    jobs = [job, fw.read("vgg16@v100")]
    both = fw.whatif(jobs, workers=2, bandwidth="500Mbps", transport="full")
    assert both["buckets"].tolist() == ["recorded", "ddp"]
    print_whatif(both)
    assert re.search(r"^run +buckets ", capsys.readouterr().out, re.MULTILINE)


def with_halves(job: Run) -> Run:
    """Return the job with the fact that it sends halves of its gradients."""
    gradients = dataclasses.replace(job.gradients, bytes=2 * job.gradients.bytes)
    facts = job.facts | Facts(hook="fp16_compress_hook")
    return dataclasses.replace(job, gradients=gradients, facts=facts)


def test_what_a_hook_sends_is_what_is_sent_on_another_line() -> None:
    shown, truth = (
        with_halves(
            a_trained_job(a_transport(), rate_bps=rate_bps, buckets="ddp:1GiB", facts=used(0.04))
        )
        for rate_bps in (4 * GBPS, 0.5 * GBPS)
    )
    assert predicted_s(shown, truth) == pytest.approx(measured_s(truth), rel=0.03)


def beside_others(job: Run, utilization: float) -> Run:
    """Return the job with the utilization of the two processors on which it was recorded."""
    moments = np.arange(0, job.spans.end_ns.max(), 10_000_000)
    count = 2 * len(moments)
    hosts = Hosts(
        host=np.full(count, "host0", object),
        device=np.array(["cpu0", "cpu1"] * len(moments), object),
        time_ns=moments.repeat(2),
        utilization=np.full(count, utilization),
        memory_bytes=np.zeros(count, np.int64),
    )
    return dataclasses.replace(job, hosts=hosts)


def test_a_run_beside_other_work_says_so_and_is_less_sure_of_others() -> None:
    job = a_trained_job(a_transport(), facts=computing(0.03))
    step_s, own_s = measured_s(job), 0.03 + 1.28 * 0.03
    quiet, busy = (beside_others(job, own_s / step_s + others) for others in (0.0, 0.5))
    asked: dict[str, Any] = {"bandwidth": "10Gbps", "transport": "measured"}
    tables = [fw.whatif(run, **asked) for run in (quiet, busy)]
    widths = [float(high[0] - low[0]) for low, high in (each.interval_s for each in tables)]
    assert widths[1] > 2 * widths[0]
    said = [[each for each in table.warnings if "Other work" in each] for table in tables]
    assert said[0] == []
    assert "Other work took 50% of the processors meanwhile" in said[1][0]
    assert any("Other work took 50%" in each for each in fw.explain(busy).warnings)


def test_a_comparison_allows_for_what_was_beside_the_second_run_too() -> None:
    faster = a_trained_job(a_transport(), rate_bps=4 * GBPS, facts=computing(0.03))
    before = a_trained_job(a_transport(), facts=computing(0.03))
    found = [verify(before, beside_others(faster, share)) for share in (0.0, 1.0)]
    widths = [each.high_s - each.low_s for each in found if each is not None]
    assert widths[1] > 1.5 * widths[0]


def test_another_model_is_predicted_with_the_transport_of_a_run() -> None:
    shown = a_trained_job(a_transport(), facts=used(0.03))
    table = fw.whatif(
        "resnet50@v100", workers=4, bandwidth="1Gbps", transport="measured", calibrate=shown
    )
    full = fw.whatif("resnet50@v100", workers=4, bandwidth="1Gbps")
    assert table["step_s"][0] > full["step_s"][0]
    assert table.interval_s[0][0] < table["step_s"][0] < table.interval_s[1][0]


def test_messages_wait_for_processors_that_others_have_on_any_transport() -> None:
    """Processors worked for 0.2 ms of each 3 ms that a small message took."""
    quiet = a_trained_job(
        a_transport(processor_s_per_hop=1.5e-3),
        gradients_mib=[0.001] * 40,
        buckets="ddp:1kB",
        by_hand=True,
        facts={**used(0.008), "processor_s": ((0.0, 0.02), (1.0, 0.02))},
    )
    crowded = beside_others(quiet, 0.9)
    alone, beside = (a_forecaster(run) for run in (quiet, crowded))
    ours, waiting = alone.filling().ask(), beside.filling().ask()
    messages_s = beside.measured_s - beside.alone_s
    assert ours.step_s < beside.alone_s + 0.2 * messages_s
    assert waiting.step_s > beside.alone_s + 0.25 * messages_s
    assert waiting.low_s < beside.alone_s + 0.2 * messages_s
    assert waiting.high_s > beside.measured_s
    assert beside.unhindered().ask().step_s > alone.unhindered().ask().step_s + 0.2 * messages_s


def test_full_utilization_of_one_profile_has_no_interval() -> None:
    low_s, high_s = fw.whatif("resnet50@v100", workers=4, bandwidth="1Gbps").interval_s
    assert np.isnan(low_s).all()
    assert np.isnan(high_s).all()


def test_more_bandwidth_never_slows_a_measured_transport() -> None:
    run = a_trained_job(a_transport(), facts=used(0.05))
    rates = np.geomspace(1e7, 1e12, 200)
    steps_s = fw.whatif(run, bandwidth=rates, workers=3, transport="measured")["step_s"]
    assert (np.diff(steps_s) <= 1e-12).all()


def test_collectives_that_overlap_count_once() -> None:
    run = a_trained_job(a_transport(), gradients_mib=(8, 8, 8), buckets="ddp:8MiB")
    [seen] = calibrated([run]).observations
    assert len(seen.wire_bytes) == 3
    lane_s = sum(message_s(a_transport(), 2, 1e9, 8 * 2**20) for _ in range(3))
    assert seen.time_s == pytest.approx(lane_s)


@pytest.mark.parametrize("without", ["collectives", "line_rate_bps", "workers"])
def test_without_evidence_a_measured_transport_is_refused(without: str) -> None:
    run = a_trained_job(a_transport())
    if without == "collectives":
        run = dataclasses.replace(run, collectives=Collectives.empty())
    else:
        run = dataclasses.replace(run, facts=run.facts.without([without]))
    with pytest.raises(UsageError, match="nothing is known about the transport"):
        fw.whatif(run, workers=4, bandwidth="10Gbps", transport="measured")


def test_collectives_of_one_rank_alone_are_refused_by_the_missing_ranks() -> None:
    run = a_trained_job(a_transport())
    run = dataclasses.replace(run, collectives=run.collectives.rows(run.collectives.rank == 1))
    with pytest.raises(UsageError, match="of its 2 ranks, only the collectives of rank 1 are here"):
        fw.whatif(run, workers=4, bandwidth="10Gbps", transport="measured")


def test_a_run_without_a_transport_is_refused_by_its_name_and_with_the_reason(
    tmp_path: Path,
) -> None:
    run = a_trained_job(a_transport())
    unknown = dataclasses.replace(run, facts=run.facts.without(["line_rate_bps"]))
    place = fw.write(unknown, tmp_path / "job.run")
    with pytest.raises(
        UsageError, match=r"job\.run: the line rate of its links is not known"
    ) as at:
        fw.whatif(str(place), workers=4, bandwidth="10Gbps", transport="measured")
    assert "give it with --line-rate" in str(at.value)
    here = dataclasses.replace(run, facts=run.facts | Facts(hosts="vm,vm", backend="gloo"))
    with pytest.raises(UsageError, match="its ranks share one host, and use no link"):
        fw.whatif(here, workers=4, bandwidth="10Gbps", transport="measured")
    table = fw.write(run, tmp_path / "cut.run") / "collectives.parquet"
    table.write_bytes(table.read_bytes()[:900])
    with pytest.raises(UsageError, match=r"are missing: collectives\.parquet: damaged"):
        fw.whatif(str(table.parent), workers=4, bandwidth="10Gbps", transport="measured")


# A line rate that a run does not know


def test_a_line_rate_completes_a_recorded_run_in_every_command_that_reads_one(
    tmp_path: Path, cli: Cli
) -> None:
    known = fw.write(a_trained_job(a_transport()), tmp_path / "known.run")
    bare = a_trained_job(a_transport())
    bare = dataclasses.replace(bare, facts=bare.facts.without(["line_rate_bps"]))
    job = fw.write(bare, tmp_path / "job.run")
    other = fw.write(a_trained_job(a_transport(), rate_bps=2e9), tmp_path / "other.run")
    told = ("--line-rate", "1Gbps")
    how = ("--transport", "measured", "--bandwidth", "10Gbps", "--json")
    [row] = json.loads(cli("whatif", job, *told, *how).stdout)["rows"]
    [own] = json.loads(cli("whatif", known, *how).stdout)["rows"]
    assert (row["step_s"], row["interval"]) == (own["step_s"], own["interval"])
    assert cli("whatif", known, "--calibrate", job, *how).returncode == 0
    compared = cli("compare", job, other, *told)
    assert compared.returncode == 2
    assert "expected 2 Gbps, as " in compared.stderr
    compared = cli("compare", job, known, *told, "--json")
    assert json.loads(compared.stdout)["account"]["before"]["unexplained"] == 0
    page = tmp_path / "page.html"
    assert cli("report", job, "-o", page, *told).returncode == 0
    assert "--line-rate gives it" not in page.read_text()


def test_a_line_rate_is_refused_where_it_would_be_ignored() -> None:
    run = a_trained_job(a_transport())
    with pytest.raises(UsageError, match="expected a recorded run, got the built-in workload"):
        fw.whatif("vgg16@v100", line_rate="1Gbps")
    here = dataclasses.replace(run, facts=run.facts | Facts(hosts="vm,vm", backend="gloo"))
    with pytest.raises(UsageError, match=r"expected ranks on several hosts, all of .* share one"):
        fw.whatif(here, line_rate="1Gbps")
    with pytest.raises(UsageError, match=r"expected 1 Gbps, as .* has it, got 10 Gbps"):
        fw.whatif(run, line_rate="10Gbps")


# Advice


def test_every_fix_is_what_the_model_says_of_the_changed_job() -> None:
    run = a_trained_job(a_transport(), buckets="ddp:64MiB", facts=used(0.03))
    found = {fix.kind: fix for fix in fw.explain(run).fixes}
    faster = a_trained_job(a_transport(), buckets="ddp:64MiB", rate_bps=2.5 * GBPS)
    links = [fix for fix in fw.explain(run).fixes if fix.kind == "link"]
    assert [sentence(fix) for fix in links] == ["links of 5 Gbps", "links of 2.5 Gbps"]
    assert links[1].step_s == pytest.approx(measured_s(faster), rel=0.03)
    smaller = a_trained_job(a_transport(), buckets="ddp:5MiB")
    assert found["buckets"].step_s <= measured_s(smaller) * 1.03
    assert "bucket_cap_mb=" in setting(found["buckets"])
    assert found["transport"].step_s < measured_s(run)
    assert all(fix.low_s <= fix.step_s <= fix.high_s for fix in found.values())


def test_fixes_come_sorted_and_none_of_them_is_worthless() -> None:
    run = a_trained_job(a_transport(), slower_ms=15, facts=used(0.03))
    steps_s = [fix.step_s for fix in fw.explain(run).fixes]
    assert steps_s == sorted(steps_s)
    assert max(steps_s) < 0.99 * measured_s(run)


def test_a_slow_rank_is_a_fix_of_its_own_and_worth_what_it_costs() -> None:
    run = a_trained_job(a_transport(), slower_ms=15, rate_bps=100 * GBPS, facts=used(0.001))
    [fix] = [fix for fix in fw.explain(run).fixes if fix.kind == "straggler"]
    assert measured_s(run) - fix.step_s == pytest.approx(15e-3, rel=0.05)


def test_summing_over_steps_shares_the_overhead() -> None:
    run = a_trained_job(a_transport(), facts=used(0.03))
    step = typical_step(run)
    [half] = [fix for fix in fw.explain(run).fixes if "every 2 passes" in sentence(fix)]
    assert half.step_s == pytest.approx((step.step_ns * 1e-9 + measured_s(run)) / 2)


def test_halves_spare_the_line_and_not_the_processors_that_add_them() -> None:
    def gained(rate_bps: float) -> float:
        job = a_forecaster(a_trained_job(a_transport(), rate_bps=rate_bps, facts=used(0.05 / 1.42)))
        halves = Compressor(ratio=2, work_per_byte=2)
        return 1 - job.ask(compressors=(halves,)).step_s / job.measured_s

    assert gained(0.2 * GBPS) > 0.4
    assert abs(gained(100 * GBPS)) < 0.01


def test_where_a_faster_line_helps_the_sentence_does_not_say_otherwise() -> None:
    """A transport may leave a share of any line unused."""
    lazy = a_trained_job(
        a_transport(share=0.4), gradients_mib=[1] * 24, buckets="ddp:1MiB", facts=used(0.02)
    )
    found = fw.explain(lazy)
    assert found.verdict.kind == "transport"
    assert "not the bandwidth" not in found.verdict.sentence
    assert "A faster line would help all the same: links of 2.5 Gbps by " in found.verdict.sentence
    busy = a_trained_job(a_transport(processor_s_per_byte=3e-9), rate_bps=10 * GBPS)
    found = fw.explain(busy)
    assert found.verdict.kind == "transport"
    assert "not the bandwidth" in found.verdict.sentence


def test_the_break_even_is_where_the_share_crosses_the_threshold() -> None:
    quick = a_transport(processor_s_per_byte=2e-11)
    job = a_forecaster(a_trained_job(quick, facts=used(0.001)))
    found = break_even(job, 0.10)
    assert found.is_limited
    assert found.bandwidth_bps is not None
    for rate_bps, is_below in ((found.bandwidth_bps * 1.02, True), (job.rate_bps, False)):
        forecast = job.ask(bandwidth_bps=(rate_bps,))
        assert (1 - forecast.scaling_factor < 0.10) == is_below
    assert f"{found.bandwidth_bps / 1e9:.4g} Gbps" in found.sentence


@pytest.mark.parametrize(("processors_used_s", "is_said"), [(0.03, True), (0.0003, False)])
def test_a_transport_that_the_line_hides_is_given_no_rate_of_its_own(
    processors_used_s: float, is_said: bool
) -> None:
    run = a_trained_job(a_transport(), facts=used(processors_used_s))
    found = break_even(a_forecaster(run), 0.10)
    assert found.is_limited
    assert (found.line_takes_over_bps is not None) == is_said
    assert ("the processors limit this transport" in found.sentence) == is_said


@pytest.mark.parametrize(("gradient_mib", "is_said"), [(0.3, True), (0.03, False)])
def test_no_line_is_said_to_limit_messages_that_a_faster_one_would_not_shorten(
    gradient_mib: float, is_said: bool
) -> None:
    """24 sums by hand: of 32 KiB each, 10 Gbps in place of 1 Gbps gains nothing."""
    run = a_trained_job(
        a_transport(processor_s_per_hop=2e-3),
        rate_bps=GBPS,
        gradients_mib=[gradient_mib] * 24,
        by_hand=True,
        buckets="none",
        facts=used(0.03),
    )
    job = a_forecaster(run)
    found = break_even(job, 0.10)
    assert found.line_takes_over_bps is not None
    faster = job.ask(bandwidth_bps=(10 * GBPS,))
    assert (faster.step_s < 0.99 * job.ask().step_s) == is_said
    assert ("the processors limit this transport" in found.sentence) == is_said


def test_a_line_just_below_the_rate_that_processors_allow_still_limits() -> None:
    """From 1 Gbps to 1.004 Gbps the step gains little, and from 1 to 10 Gbps it gains a lot."""
    job = a_forecaster(
        a_trained_job(
            a_transport(processor_s_per_byte=88e-9),
            rate_bps=GBPS,
            gradients_mib=[4] * 6,
            by_hand=True,
            buckets="none",
            facts=used(0.04),
        )
    )
    found = break_even(job, 0.10)
    assert found.line_takes_over_bps == pytest.approx(1.004 * GBPS, rel=1e-3)
    assert job.ask(bandwidth_bps=(10 * GBPS,)).step_s < 0.95 * job.ask().step_s
    assert "the processors limit this transport" in found.sentence


def test_a_job_that_scales_says_when_it_would_not() -> None:
    run = a_trained_job(
        a_transport(processor_s_per_byte=1e-10),
        rate_bps=100 * GBPS,
        gradients_mib=(1, 1, 1, 1),
        facts=used(0.0005),
    )
    found = break_even(a_forecaster(run), 0.10)
    assert not found.is_limited
    assert found.sentence.startswith("Communication costs 10% of the step below ")


def test_where_ranks_wait_for_each_other_no_link_is_blamed_for_it() -> None:
    late = break_even(a_forecaster(trained_by_hand(late_ms=60)), 0.10)
    assert late.is_limited
    assert late.sentence.startswith("On any link, waiting for late ranks alone costs 10%")
    # An account with little waiting, 1.6 %, is not contradicted.
    little = break_even(a_forecaster(trained_by_hand(late_ms=60)), 0.10, waited=0.016)
    assert little.sentence.startswith("On any link, communication costs 10%")
    on_time = break_even(a_forecaster(trained_by_hand()), 0.10)
    assert "waiting" not in on_time.sentence


def test_a_simulated_job_is_forecast_as_it_was_played() -> None:
    for transport in (FullTransport(), FullTransport(0.5)):
        played = fw.replay("resnet50@v100", workers=8, bandwidth="10Gbps", transport=str(transport))
        job = a_forecaster(played)
        assert job.calibration is None
        assert job.grid.transports == (transport,)
        assert job.ask().step_s == pytest.approx(measured_s(played))


def test_a_forecast_counts_what_adding_costs() -> None:
    slow_adds = ((1.0, 0.02), (1e9, 0.02))
    run = a_run(facts={"workers": 1, "reduce_cost": slow_adds})
    played = fw.replay(run, workers=4, bandwidth="10Gbps")
    assert a_forecaster(played).ask().step_s == pytest.approx(measured_s(played))
    asked = a_forecaster(played).ask(workers=(8,)).step_s
    assert asked > measured_s(played) + 4 * 0.02  # four more additions, one after another


def test_one_worker_has_nothing_to_forecast() -> None:
    assert forecaster(a_run()) is None


# Measured against predicted


def test_a_change_is_held_against_its_prediction() -> None:
    before = a_trained_job(a_transport(), facts=used(0.03))
    after = a_trained_job(a_transport(), workers=4, rate_bps=2 * GBPS, buckets="ddp:8MiB")
    found = verify(before, after)
    assert found is not None
    assert found.changes == ("links of 2 Gbps", "4 workers", "buckets ddp:8MiB")
    assert found.measured_s == measured_s(after)
    assert found.predicted_s == pytest.approx(predicted_s(before, after))
    assert abs(found.error) < 0.05
    assert found.holds


@pytest.mark.parametrize(
    ("rate_gbps", "work", "apart"),
    [(1, 1.0, 0.0), (10, 0.7, 0.0), (10, 0.8, 0.0), (10, 0.9, 0.0), (5, 1.0, 0.12)],
)
def test_our_backend_is_predicted_to_fill_the_line_as_far_as_processors_can(
    rate_gbps: float, work: float, apart: float
) -> None:
    before = a_trained_job(
        a_transport(), rate_bps=rate_gbps * GBPS, facts={"backend": "gloo", **used(0.041)}
    )
    ours = a_transport(
        share=PAYLOAD_SHARE, processor_s_per_byte=work * 1e-9, processor_s_per_hop=0.0, apart=apart
    )
    after = a_trained_job(ours, rate_bps=rate_gbps * GBPS, facts={"backend": "fullwire"})
    found = verify(before, after)
    assert found is not None
    assert found.changes == ("backend fullwire",)
    assert found.holds
    table = fw.whatif(before, transport=f"full:{PAYLOAD_SHARE}")
    assert found.full_s is not None
    assert found.full_s == pytest.approx(float(table["step_s"][0]), rel=1e-3)
    assert found.full_s <= found.predicted_s < measured_s(before)
    if rate_gbps == 1:  # the line alone decides
        assert found.predicted_s == pytest.approx(found.full_s, rel=0.02)
    assert verify(after, before) is None  # this run does not show Gloo's time


def test_nothing_is_verified_where_nothing_changed_that_can_be_predicted() -> None:
    run = a_trained_job(a_transport())
    assert verify(run, run) is None
    hooked = dataclasses.replace(run, facts=run.facts | Facts(hook="a hook of their own"))
    assert verify(run, hooked) is None


def test_the_command_prints_predicted_and_measured_on_one_line(cli: Cli, tmp_path: Path) -> None:
    fw.write(a_trained_job(a_transport(), facts=used(0.03)), tmp_path / "a.run")
    fw.write(a_trained_job(a_transport(), rate_bps=2 * GBPS), tmp_path / "b.run")
    done = cli("compare", tmp_path / "a.run", tmp_path / "b.run")
    [line] = [each for each in done.stdout.splitlines() if each.startswith("Predicted")]
    assert "with links of 2 Gbps, measured " in line
    shown = json.loads(cli("compare", "--json", tmp_path / "a.run", tmp_path / "b.run").stdout)
    assert shown["prediction"]["interval"]["low_s"] < shown["prediction"]["predicted_s"]
    assert shown["prediction"]["holds"] is True


def test_explain_prints_fixes_and_the_break_even(cli: Cli, tmp_path: Path) -> None:
    fw.write(a_trained_job(a_transport(), facts=used(0.03)), tmp_path / "a.run")
    shown = json.loads(cli("explain", "--json", tmp_path / "a.run").stdout)
    first = shown["fixes"][0]
    assert {"change", "step_s", "scaling_factor", "interval"} <= set(first)
    assert shown["break_even"]["sentence"]
    assert shown["full_utilization"]["scaling_factor"] > shown["scaling_factor"]
    printed = cli("explain", "-v", tmp_path / "a.run").stdout
    assert "What would help" in printed
    assert first["change"] in printed
    assert " ".join(first["setting"].split()) in " ".join(printed.split())


@pytest.mark.parametrize("name", ["one switch", "dgx-a100"])
def test_transports_that_are_computed_at_once_give_the_bits_of_each_alone(name: str) -> None:
    fits = [
        a_transport(share=share, apart=share / 2, gathers_late=late)
        for share, late in ((0.5, 0.0), (0.7, 0.0), (0.9, 0.0), (0.9, 0.8))
    ]
    residues = tuple(Residue(time_s, 0.01) for time_s in (-1e-3, 0.0, 2e-3, 0.0, 1e-3))
    described = None if name == "one switch" else cluster(name)
    plain = plain_subject("job", a_trained_job(fits[0]))
    subject = dataclasses.replace(plain, residues=residues)
    grid = Grid(
        workers=(1, 16),
        bandwidth_bps=(1e9, 25e9),
        transports=(*fits[:3], FullTransport(), fits[3]),
        buckets=(bucket_policy("ddp"),),
        algorithms=("auto",) if described is None else ("ring",),
        accumulate=(1, 4),
        cluster=described,
    )
    whole = sweep([subject], grid).measures
    at = AXES.index("transport")
    for number, (transport, residue) in enumerate(zip(grid.transports, residues, strict=True)):
        one = dataclasses.replace(subject, residues=(residue,))
        alone = sweep([one], dataclasses.replace(grid, transports=(transport,))).measures
        for measure in MEASURES:
            part = np.take(whole[measure], [number], axis=at)
            np.testing.assert_array_equal(part, alone[measure])


@pytest.mark.parametrize("ask", [fw.whatif, fw.explain])
def test_a_run_that_shows_no_transport_cannot_calibrate(ask: Any) -> None:
    """It would go unused, and the answer would not tell."""
    with pytest.raises(UsageError, match=r"calibrate: expected runs that show.*it had one worker"):
        ask("vgg16@v100", calibrate="vgg16@v100")


def test_a_bucket_that_left_late_in_one_step_is_no_other_collective_of_the_usual_step() -> None:
    """The steps in the middle were shorter, and that is no communication of others."""
    run = a_trained_job(a_transport(), workers=2, steps=80, noise=0.5)
    rows = run.collectives
    late = rows.issue_ns + np.where(rows.step == 40, 10**9, 0)
    moved = dataclasses.replace(rows, issue_ns=late, end_ns=np.maximum(rows.end_ns, late))
    odd = typical_step(dataclasses.replace(run, collectives=moved))
    assert (odd.others.op, odd.others.exposed_ns) == ((), 0)
    assert odd.step_ns == pytest.approx(typical_step(run).step_ns, rel=0.01)


def test_ranks_of_a_host_share_its_link() -> None:
    """A ring crosses it once each way, an all-to-all for each rank, and one host has none."""
    ring = [host_load("allreduce", "ring", workers, 2) for workers in (4, 8, 100)]
    assert ring == [1, 1, 1]
    # Each of two ranks sends to the two of six, of eight, that are elsewhere.
    assert host_load("alltoall", "ring", 4, 2) == pytest.approx(2 * 2 / 3)
    assert host_load("alltoall", "ring", 8, 2) == pytest.approx(2 * 6 / 7)
    # Each rank exchanges halves with one of the other host, and quarters with its neighbour.
    assert host_load("allreduce", "halving-doubling", 4, 2) == pytest.approx(4 / 3)
    hosts: dict[str, FactValue] = {"machines": 2, "hosts": "a,b", "processors": 2}
    run = a_trained_job(a_transport(), facts={**computing(0.01), **hosts})
    lab: dict[str, FactValue] = {**hosts, "machines": 1}
    of_lab = a_trained_job(a_transport(), facts={**computing(0.01), **lab})
    asked: dict[str, Any] = {"workers": [2, 4], "bandwidth": "1Gbps", "ranks_per_host": 2}
    apart, found = fw.whatif(run, **{**asked, "ranks_per_host": 1}), fw.whatif(run, **asked)
    assert found["step_s"][1] == pytest.approx(apart["step_s"][1])
    assert found["communication_s"][0] == 0 < apart["communication_s"][0]
    assert found["network_utilization"][0] == 0
    assert fw.whatif(of_lab, **asked)["communication_s"][0] > 0  # its hosts had links between them
    said = " ".join(found.warnings)
    assert "Up to 2 workers fit on one host. Their sums use no link" in said
    assert "has a link of its own" not in said
    assert "a link for each" in " ".join(fw.whatif(of_lab, **asked).warnings)
    packed, packed_apart = (
        fw.whatif(
            run,
            workers=4,
            bandwidth="100Mbps",
            codec="4,20GB/s,20GB/s,exchange",
            ranks_per_host=ranks,
        )
        for ranks in (2, 1)
    )
    assert packed["communication_s"][0] > 1.1 * packed_apart["communication_s"][0]


def test_ranks_of_one_host_without_a_link_are_refused_by_their_name() -> None:
    alone = a_trained_job(a_transport(), facts={"machines": 1, "hosts": "a,a", "processors": 2})
    with pytest.raises(
        UsageError, match=r"has its ranks on one host\. Give a run on several hosts"
    ):
        fw.whatif(alone, workers=4, bandwidth="1Gbps", ranks_per_host="1,2,4")
