"""A simulated run is a run: shown, stored, compared, and asked again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.errors import UsageError
from fullwire.run.facts import Facts
from fullwire.run.kinds import EARLIER
from fullwire.run.run import Collectives, Gradients
from fullwire.simulation.grid import Residue
from fullwire.simulation.subject import plain_subject
from fullwire.simulation.sweep import replay
from fullwire.timeline.passes import passes_of_step
from tests.builders import a_run
from tests.jobs_by_hand import Rank, a_job, a_job_of_experts, a_trained_job, with_data
from tests.trained_jobs import a_transport


def test_a_replay_has_the_step_that_the_table_predicts() -> None:
    run = a_run()
    for lane in ("fifo", "priority"):
        table = fw.whatif(run, workers=8, bandwidth="10Gbps", buckets="none", lane=lane)
        played = fw.replay(run, workers=8, bandwidth="10Gbps", buckets="none", lane=lane)
        mark = played.spans.rows(played.spans.name == "step")
        assert mark.end_ns[0] * 1e-9 == pytest.approx(table["step_s"][0], abs=1e-9)


def test_a_replay_sends_every_message_after_it_is_ready_and_never_two_at_once() -> None:
    played = fw.replay("resnet50@v100", workers=64, bandwidth="25Gbps")
    messages = played.collectives
    assert len(messages) > 1
    assert (messages.start_ns >= messages.issue_ns).all()
    assert (messages.start_ns[1:] >= messages.end_ns[:-1]).all()
    assert messages.bytes.sum() == played.gradients.bytes.sum() == 4 * 25_557_032


def test_one_worker_replays_without_messages() -> None:
    played = fw.replay(a_run(optimizer_ms=5), workers=1, bandwidth="10Gbps")
    assert len(played.collectives) == 0
    assert played.spans.end_ns[0] == 35_000_000


def test_a_replay_asked_again_gives_back_the_same_step() -> None:
    run = a_run(optimizer_ms=5)
    conditions: dict[str, Any] = {
        "workers": 8,
        "bandwidth": "10Gbps",
        "latency": "10us",
        "buckets": "64MiB/5ms",
    }
    played = fw.replay(run, **conditions)
    again = fw.whatif(played)  # as recorded: the same cluster, buckets and algorithm
    assert len(again) == 1
    assert again["step_s"][0] == fw.whatif(run, **conditions)["step_s"][0]
    assert any("is estimated from a job of several" in sentence for sentence in again.warnings)


def test_a_replay_of_a_job_that_keeps_its_gradients_has_its_own_collectives() -> None:
    run = a_job_of_experts()
    played = fw.replay(run, bandwidth="500Mbps")
    table = fw.whatif(run, bandwidth="500Mbps")
    assert played.collectives.op.tolist() == ["alltoall"] * 4
    assert played.collectives.bytes.tolist() == [1_000_000] * 4
    assert played.facts.buckets is None
    mark = played.spans.rows(played.spans.name == "step")
    assert mark.end_ns[0] * 1e-9 == pytest.approx(table["step_s"][0], abs=1e-9)
    assert fw.whatif(played)["step_s"][0] == pytest.approx(table["step_s"][0], rel=1e-6)


def test_a_replay_is_stored_and_compared_like_any_run(tmp_path: Path) -> None:
    slow = fw.replay("vgg16@v100", workers=64, bandwidth="10Gbps")
    fast = fw.replay("vgg16@v100", workers=64, bandwidth="100Gbps")
    fw.write(slow, tmp_path / "slow.run")
    found = fw.compare(fw.read(tmp_path / "slow.run"), fast)
    assert found.ratio < 0.2
    assert found.is_significant is None  # one step each: noise is unknown
    assert ("line_rate_bps", "10000000000.0", "100000000000.0") in found.differing_facts


def test_a_replay_of_a_workload_takes_its_batch() -> None:
    small, large = (
        fw.replay("vgg16@v100", workers=8, bandwidth="10Gbps", batch=b) for b in (8, 64)
    )
    assert fw.explain(small).step_s < fw.explain(large).step_s
    with pytest.raises(UsageError, match="one value of each condition"):
        fw.replay("vgg16@v100", workers=8, bandwidth="10Gbps", batch=[8, 64])


def test_a_replay_needs_one_value_of_each_condition() -> None:
    with pytest.raises(UsageError, match="one value of each condition"):
        fw.replay(a_run(), workers="8,64", bandwidth="10Gbps")
    with pytest.raises(UsageError, match="expected conditions among"):
        fw.replay(a_run(), workers=8, bandwidth="10Gbps", target=0.9)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="expected accumulate 1"):
        fw.replay(a_run(), workers=8, bandwidth="10Gbps", accumulate=4)


@pytest.mark.parametrize("is_crowded", [False, True])
@pytest.mark.parametrize("conditions", [{"bandwidth": "500Mbps"}, {"workers": 4}])
def test_a_replay_has_the_t1_of_the_answer_that_made_it(
    tmp_path: Path, conditions: dict[str, Any], is_crowded: bool
) -> None:
    """The passes of several ranks hold waiting and contention, which one worker has not."""
    job = a_trained_job(late_ms=40.0, by_turns=True)
    if is_crowded:
        delay, ran = (tuple((rank, time_s) for rank in range(3)) for time_s in (0.02, 0.08))
        crowded = Facts(backend="gloo", run_delay_s=delay, run_s=ran)
        job = dataclasses.replace(job, facts=job.facts | crowded)
    told = fw.whatif(job, **conditions)
    played = fw.read(fw.write(fw.replay(job, **conditions), tmp_path / "x.run"))
    found, again = fw.explain(played), fw.whatif(played)
    for factor in (found.scaling_factor, again["scaling_factor"][0]):
        assert factor == pytest.approx(told["scaling_factor"][0], rel=1e-4)
    assert found.baseline_step_s == pytest.approx(told["baseline_step_s"][0], rel=1e-4)
    assert again["step_s"][0] == pytest.approx(told["step_s"][0], abs=2e-9)
    assert found.account["straggler"] > 0.01
    assert (found.account["contention"] > 0.01) is is_crowded
    assert (found.detail.crowding.source == "the simulation") is is_crowded


def test_a_replay_is_as_unsure_of_t1_as_the_job_that_it_is_from(tmp_path: Path) -> None:
    """Run delay tells a processor's contention less surely than a device's kernels do."""
    job = a_trained_job(late_ms=40.0, by_turns=True)
    delay, ran = (tuple((rank, time_s) for rank in range(3)) for time_s in (0.02, 0.08))
    crowded = Facts(backend="gloo", run_delay_s=delay, run_s=ran)
    job = dataclasses.replace(job, facts=job.facts | crowded)
    played = fw.read(fw.write(fw.replay(job, bandwidth="500Mbps"), tmp_path / "x.run"))
    of_job, of_replay = (
        (low_s / found.baseline_step_s, high_s / found.baseline_step_s)
        for found in map(fw.explain, (job, played))
        for low_s, high_s in [found.baseline_between_s]
    )
    assert of_replay == pytest.approx(of_job, rel=1e-3)
    assert of_job == pytest.approx((0.6, 1.3), abs=0.05)


def test_a_replay_waits_for_data_and_for_its_host_as_recorded() -> None:
    job = with_data(a_trained_job(), 20.0)
    recorded, played = fw.explain(job).account, fw.explain(fw.replay(job)).account
    assert recorded["input"] == pytest.approx(0.02)
    for part in ("compute", "input", "host"):
        assert played[part] == pytest.approx(recorded[part], abs=1e-5)


def test_a_replay_counts_what_it_leaves_unexplained_as_its_messages() -> None:
    """Else they would seem to wait for each other, where they wait for the transport."""
    job, here = a_trained_job(late_ms=10.0), a_transport()
    subject = plain_subject("a job", job)
    assert subject.recorded is not None
    point = dataclasses.replace(subject.recorded, transports=(here,))
    longer = dataclasses.replace(subject, residues=(Residue(0.03, at_overhead_s=0.01),))
    plain, slow = (fw.explain(replay(job, each, point)).account for each in (subject, longer))
    sent_s, slow_s = (
        account["line_rate"] + account["transport"] + account["latency"]
        for account in (plain, slow)
    )
    assert slow_s == pytest.approx(sent_s + 0.03, abs=1e-6)
    assert slow["straggler"] == pytest.approx(plain["straggler"], abs=1e-6)


def test_a_replay_keeps_its_backend_and_its_passes() -> None:
    job = a_trained_job()
    spans = job.spans
    forward = spans.rows(spans.name == "forward")
    middle_ns = (forward.start_ns + forward.end_ns) // 2
    earlier = dataclasses.replace(
        forward, name=np.full(len(forward), EARLIER, object), end_ns=middle_ns
    )
    start_ns = spans.start_ns.copy()
    start_ns[spans.name == "forward"] = middle_ns
    shorter = dataclasses.replace(spans, start_ns=start_ns)
    twice = dataclasses.replace(job, spans=type(spans).joined([shorter, earlier]))
    played = fw.replay(twice)
    assert passes_of_step(twice) == passes_of_step(played) == 2
    assert passes_of_step(fw.replay(job)) == 1
    assert played.facts.backend == "gloo"
    assert fw.explain(played).step_s == pytest.approx(fw.whatif(twice)["step_s"][0])


def a_sharded_job() -> fw.Run:
    """Gather each of four shards before the pass, and scatter its sum when the pass is over."""
    job = a_trained_job()
    sums = dataclasses.replace(job.collectives, op=np.full(len(job.collectives), "reducescatter"))
    early_ns = 200_000_000
    gathers = dataclasses.replace(
        sums,
        op=np.full(len(sums), "allgather"),
        sequence=sums.sequence + 1000,
        issue_ns=np.maximum(sums.issue_ns - early_ns, 0),
        start_ns=np.maximum(sums.start_ns - early_ns, 0),
        end_ns=np.maximum(sums.end_ns - early_ns, 0),
    )
    return dataclasses.replace(
        job,
        collectives=Collectives.joined([gathers, sums]),
        facts=job.facts.without(["buckets"]) | Facts(line_rate_bps=1e9, backend="nccl"),
    )


def test_a_replay_of_shards_gathers_and_scatters_them() -> None:
    job = a_sharded_job()
    one = (job.collectives.rank == 0) & (job.collectives.step == 2)
    sent = job.collectives.rows(one)
    found = fw.replay(job, bandwidth="1Gbps").collectives
    assert sorted(found.op.tolist()) == sorted(sent.op.tolist())
    assert "allreduce" not in found.op.tolist()
    for op in ("allgather", "reducescatter"):
        recorded, played = sent.bytes[sent.op == op], found.bytes[found.op == op]
        assert sorted(played.tolist()) == sorted(recorded.tolist())


def test_a_replay_on_gloo_names_scatters_as_the_job_issued_them(tmp_path: Path) -> None:
    """Gloo makes the whole sum everywhere, so a scatter costs as much as an all-reduce."""
    job = a_sharded_job()
    job = dataclasses.replace(job, facts=job.facts | Facts(backend="gloo"))
    rows = job.collectives
    is_sum = rows.op == "reducescatter"
    as_sums = dataclasses.replace(rows, op=np.where(is_sum, "allreduce", rows.op))
    asked: dict[str, Any] = {"bandwidth": ["1Gbps", "4Gbps"], "transport": "full"}
    told = fw.whatif(job, **asked)
    summed = fw.whatif(dataclasses.replace(job, collectives=as_sums), **asked)
    assert told["step_s"].tolist() == summed["step_s"].tolist()
    played = fw.read(fw.write(fw.replay(job, bandwidth="1Gbps"), tmp_path / "x.run"))
    recorded = rows.rows((rows.rank == 0) & (rows.step == 2))
    assert sorted(played.collectives.op.tolist()) == sorted(recorded.op.tolist())
    # A prediction from the replay counts the bytes of the whole sums again.
    slower: dict[str, Any] = {"bandwidth": "100Mbps", "transport": "full"}
    expected, again = (fw.whatif(each, **slower)["step_s"][0] for each in (job, played))
    assert again == pytest.approx(expected, rel=0.05)


def test_shards_that_the_passes_wait_for_are_played_as_transfers() -> None:
    """Each rank gathers amid its forward pass, waits 40 ms for it, and computes on."""
    late = Rank(
        120.0,
        [("compute", "forward", 0.0, 10.0), ("compute", "backward", 50.0, 100.0)],
        [(32_000_000, 10.0, 50.0), (32_000_000, 100.0, 120.0)],
    )
    job = a_job(late, late, facts={"line_rate_bps": 12.8e9, "backend": "nccl"})
    sums = job.collectives
    is_gather = sums.sequence % 2 == 0
    gathered = dataclasses.replace(sums, op=np.where(is_gather, "allgather", "reducescatter"))
    marks = job.spans.rows(job.spans.name == "backward")
    made = Gradients(
        rank=marks.rank,
        step=marks.step,
        order=np.zeros(len(marks), np.int64),
        bytes=np.full(len(marks), 32_000_000),
        ready_ns=marks.end_ns,
    )
    job = dataclasses.replace(job, collectives=gathered, gradients=made)
    played = fw.replay(job, bandwidth="12.8Gbps")
    assert set(played.collectives.op.tolist()) == {"allgather", "reducescatter"}
    account = fw.explain(played).account
    assert account["compute"] == pytest.approx(0.060)
    assert account["line_rate"] == pytest.approx(0.020)
    assert account["straggler"] == 0


def test_a_written_step_says_that_collectives_beside_buckets_stay_as_they_are() -> None:
    """As the broadcasts of ZeRO-1: asked about faster links, it was silently 1.7 times too slow."""
    job = a_trained_job()
    sums = job.collectives
    last = sums.rows(np.isin(sums.sequence % 4, [3]))
    shared = dataclasses.replace(
        last,
        sequence=last.sequence + 1_000,
        op=np.full(len(last), "broadcast", object),
        issue_ns=last.end_ns + 1_000_000,
        start_ns=last.end_ns + 1_000_000,
        end_ns=last.end_ns + 10_000_000,
    )
    job = dataclasses.replace(job, collectives=Collectives.joined([sums, shared]))
    told = "does not hold the collectives beside those of gradients. Predictions keep their "
    for run, is_told in ((a_trained_job(), False), (job, True)):
        played = fw.replay(run, bandwidth="1Gbps", transport="full")
        notes = fw.whatif(played, bandwidth="10Gbps").warnings
        assert any(told in note for note in notes) is is_told
        assert any("A predicted step does not show how much steps scatter." in n for n in notes)
