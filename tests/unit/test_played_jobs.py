"""Predictions of jobs whose collectives share links, judged by playing them (played_jobs.py)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.verification import verify
from fullwire.run.facts import FactValue
from fullwire.run.run import Run
from fullwire.simulation.buckets import EachGradient
from fullwire.simulation.forecast import forecaster
from fullwire.simulation.schedule import grouped, of_computing_alone
from fullwire.simulation.sweep import replay
from fullwire.timeline.alone import alone_by_account
from tests.played_jobs import LIKE_GLOO, Call, Compute, Program, Ready, Wait, played
from tests.trained_jobs import MS

GBPS = 1e9
RATES_BPS = (0.1 * GBPS, 0.5 * GBPS, 2 * GBPS, 8 * GBPS)
MB = 1_000_000


def errors(program: Callable[[int], Program], workers: int) -> dict[tuple[float, float], float]:
    """Return how far each line rate's job is from its prediction from each other one."""
    runs = {rate_bps: on_ddp(program, workers, rate_bps) for rate_bps in RATES_BPS}
    found = {}
    for shown, asked in itertools.permutations(runs, 2):
        verification = verify(runs[shown], runs[asked])
        assert verification is not None
        found[shown, asked] = verification.error
    return found


def on_ddp(program: Callable[[int], Program], workers: int, rate_bps: float) -> Run:
    return played(program, workers, rate_bps, facts={"buckets": "ddp:2MiB"})


def sharing_optimizer_state(rank: int) -> Program:
    """Step as ZeRO does in its first stage: the owner of parameters broadcasts them at the end."""
    del rank
    everyone = (0, 1)
    steps: list[Compute | Call | Ready | Wait] = [Compute("forward", 10)]
    for _ in range(3):
        bucket = Call("0", everyone, "allreduce", 3 * MB, is_awaited=False)
        steps += [Compute("backward", 8), Ready(3 * MB), bucket]
    steps += [Compute("backward", 1), Wait(), Compute("optimizer", 3)]
    steps += [Call("0", everyone, "broadcast", MB, is_awaited=False)] * 9
    return [*steps, Wait()]


def test_collectives_that_are_begun_at_once_hide_behind_nothing() -> None:
    """Their times overlap, because they share the line, and a step waits for each of its bytes."""
    for conditions, error in errors(sharing_optimizer_state, 2).items():
        assert error == pytest.approx(0, abs=0.01), conditions


def split_and_replicated(*, sums_of: int) -> Callable[[int], Program]:
    """Return steps of four ranks: two split each layer, and each half has two replicas.

    Amidst each layer computing waits for a sum of so many bytes. A bucket goes after two layers.
    """

    def program(rank: int) -> Program:
        pair, others = rank // 2, rank % 2
        split = Call(f"split {pair}", (2 * pair, 2 * pair + 1), "allreduce", sums_of)
        bucket = Call(f"replicas {others}", (others, others + 2), "allreduce", 3 * MB, False)
        steps: list[Compute | Call | Ready | Wait] = [Compute("forward", 4), split] * 6
        steps.append(Compute("forward", 1))
        for layer in range(6):
            steps += [Compute("backward", 4), split, Compute("backward", 4)]
            if layer % 2:
                steps += [Ready(bucket.size), bucket]
        return [*steps, Compute("backward", 0.1), Wait(), Compute("optimizer", 3)]

    return program


def beside_a_sum_of_all_ranks(rank: int) -> Program:
    """Step as in two replicas of a split model, with a sum of all ranks on its way amidst them."""
    steps = [*split_and_replicated(sums_of=MB)(rank)]
    is_backward = [step == Compute("backward", 4) for step in steps]
    steps.insert(is_backward.index(True) + 5, Call("all", (0, 1, 2, 3), "allreduce", 4 * MB, False))
    return steps


def test_a_wait_counts_for_one_of_the_collectives_that_are_on_their_way() -> None:
    for conditions, error in errors(beside_a_sum_of_all_ranks, 4).items():
        assert error == pytest.approx(0, abs=0.07), conditions
    for rate_bps in RATES_BPS:
        predictor = forecaster(on_ddp(beside_a_sum_of_all_ranks, 4, rate_bps))
        assert predictor is not None
        step = predictor.subject.step
        buckets = grouped(step, predictor.grid.buckets[0])
        own, sent = of_computing_alone(step, buckets)
        assert own.backward_ns == pytest.approx(48.1 * MS, rel=0.01)
        assert sent.ready_ns / MS == pytest.approx([16, 32, 48], rel=0.02)


def test_a_pass_of_overlapping_waits_never_goes_back() -> None:
    """Means over steps may overlap. A wait then begins when the one before it has ended."""
    predictor = forecaster(on_ddp(split_and_replicated(sums_of=MB), 4, GBPS))
    assert predictor is not None
    step = predictor.subject.step
    others = dataclasses.replace(
        step.others, waits_ns=tuple(4 * wait_ns for wait_ns in step.others.waits_ns)
    )
    ready_ns = np.arange(1, step.backward_ns, MS)
    step = dataclasses.replace(
        step, others=others, ready_ns=ready_ns, bytes=np.full(len(ready_ns), MB)
    )
    own, sent = of_computing_alone(step, grouped(step, EachGradient()))
    assert own.backward_ns >= 0
    assert (np.diff(sent.ready_ns) >= 0).all()
    assert (sent.ready_ns >= 0).all()


@pytest.mark.parametrize("sums_of", [MB // 10, MB, 3 * MB])
def test_buckets_share_the_link_with_sums_that_computing_waits_for(sums_of: int) -> None:
    """A recording on a slow link has long waits in its backward pass, which hide no bucket."""
    for conditions, error in errors(split_and_replicated(sums_of=sums_of), 4).items():
        assert error == pytest.approx(0, abs=0.015), conditions


def sharding(rank: int) -> Program:
    """Step as FSDP does between two ranks: layers wait for weights, and sums are scattered."""
    everyone = (0, 1)
    gather = Call("0", everyone, "allgather", 4 * MB)
    scatter = Call("0", everyone, "reducescatter", 4 * MB)
    own = 1 + rank / 4  # so that the second rank comes later
    steps: list[Compute | Call | Ready | Wait] = [gather, Compute("forward", 4 * own)] * 4
    for _ in range(4):
        steps += [Compute("backward", own), gather, Compute("backward", 8), Ready(4 * MB), scatter]
    return [*steps, Compute("backward", 0.1), Compute("optimizer", 3)]


def test_a_step_waits_for_the_rank_whose_gather_ends_last() -> None:
    """Between two ranks the one that comes later has its data late; both then meet again."""
    late = dataclasses.replace(LIKE_GLOO, gathers_late=0.9)
    runs = {rate_bps: played(sharding, 2, rate_bps, transport=late) for rate_bps in RATES_BPS}
    for shown, asked in itertools.permutations(runs, 2):
        verification = verify(runs[shown], runs[asked])
        assert verification is not None
        assert verification.error == pytest.approx(0, abs=0.035), (shown, asked)


@pytest.mark.parametrize(
    ("program", "workers", "megabytes"),
    [
        # Buckets and sums of pairs: as many bytes as they have. Rings of two send that much.
        (split_and_replicated(sums_of=MB), 4, 3 * 3 + 12),
        # Gathers send a half, and Gloo sums everywhere what it scatters.
        (sharding, 2, 8 * 4 / 2 + 4 * 4),
        # Buckets, and nine broadcasts of which each rank makes half.
        (sharing_optimizer_state, 2, 3 * 3 + 9 / 2),
    ],
)
def test_the_link_carries_buckets_and_all_other_collectives(
    program: Callable[[int], Program], workers: int, megabytes: float
) -> None:
    facts: dict[str, FactValue] = {} if program is sharding else {"buckets": "ddp:2MiB"}
    run = played(program, workers, GBPS, facts=facts)
    table = fw.whatif(run, transport="measured")
    carried = table["network_utilization"][0] * table["step_s"][0] * GBPS / 8
    assert carried == pytest.approx(megabytes * MB, rel=0.01)


def by_stages(rank: int) -> Program:
    """Step as two stages of a pipeline that take four batches, all forward passes first."""
    steps: list[Compute | Call | Ready | Wait] = []
    there, back = ("0 0>1", (0, 1)), ("0 1>0", (1, 0))
    for name, work_ms, (group, members) in (("forward", 10, there), ("backward", 20, back)):
        is_first = rank == members[0]
        transfer = Call(group, members, "send" if is_first else "recv", MB // 10)
        passed: list[Compute | Call | Ready | Wait] = [transfer, Compute(name, work_ms)]
        steps += (passed[::-1] if is_first else passed) * 4
    return [*steps, Ready(MB), Compute("backward", 0.1), Compute("optimizer", 2)]


def around_a_ring(rank: int) -> Program:
    """Step as ranks do that exchange data in turn: the first one sends first."""
    there, back = ("0 0>1", (0, 1)), ("0 1>0", (1, 0))
    steps: list[Compute | Call | Ready | Wait] = []
    for name in ("forward", "backward"):
        for group, members in (there, back):
            op = "send" if rank == members[0] else "recv"
            steps.append(Call(group, members, op, MB // 10))
        steps.append(Compute(name, 20 + 10 * rank))
    return [*steps, Ready(MB), Compute("backward", 0.1), Compute("optimizer", 2)]


def test_recorded_stages_of_a_pipeline_have_a_bubble_and_no_late_rank() -> None:
    """Most scripts name no group for a pipeline: a library for it and its transfers tell it."""
    with_library: dict[str, FactValue] = {"pipelining": "torch"}
    found = fw.explain(played(by_stages, 2, 10 * GBPS, facts=with_library))
    assert found.verdict.kind == "bubble"
    assert found.account["bubble"] == pytest.approx(0.03, rel=0.1)  # the passes of one batch
    assert found.account["straggler"] < 0.001
    assert not [fix for fix in found.fixes if fix.kind == "straggler"]
    ring = fw.explain(played(around_a_ring, 2, 10 * GBPS, facts=with_library))
    assert ring.account["bubble"] == 0
    assert ring.account["straggler"] > 0.01


def with_a_server(rank: int) -> Program:
    """Step as two workers do that send gradients to a server, which returns parameters."""
    if rank:
        there, back = (rank, 0), (0, rank)
        own: Program = [Compute("forward", 20), Compute("backward", 40 + 5 * rank)]
        sent = Call(f"gradients of {rank}", there, "send", MB)
        return [*own, Ready(MB), sent, Call(f"parameters of {rank}", back, "recv", MB)]
    sums = [Call(f"gradients of {worker}", (worker, 0), "recv", MB) for worker in (1, 2)]
    sent_back = [Call(f"parameters of {worker}", (0, worker), "send", MB) for worker in (1, 2)]
    begun: Program = [Compute("forward", 0.01), Ready(MB), Compute("backward", 0.01)]
    return [*begun, *sums, Compute("optimizer", 5), *sent_back]


def exchanging_models(rank: int) -> Program:
    """Step as two ranks do that send their models, and take each other's after their passes."""
    calls = [Call(f"model of {one}", (one, 1 - one), "send", MB, False) for one in (0, 1)]
    passes = Compute("forward", 10 + 4 * rank), Compute("backward", 20 + 8 * rank), Ready(MB)
    taken = calls[1 - rank]._replace(op="recv")
    return [calls[rank], *passes, Compute("backward", 0.1), taken, Wait(), Compute("optimizer", 2)]


def fed_with_batches(rank: int) -> Program:
    """Step as under DDP, but one rank hands out batches before it, and takes metrics after it."""
    batch = Call("batches", (0, 1), "recv" if rank else "send", MB)
    metrics = Call("metrics", (1, 0), "send" if rank else "recv", 2000)
    bucket = Call("0", (0, 1), "allreduce", 3 * MB, is_awaited=False)
    passes = Compute("forward", 10 + 4 * rank), Compute("backward", 20 + 8 * rank)
    sums = Ready(3 * MB), bucket, Compute("backward", 0.1), Wait()
    return [batch, *passes, *sums, Compute("optimizer", 2), metrics]


@pytest.mark.parametrize(
    ("program", "workers"), [(with_a_server, 3), (exchanging_models, 2), (fed_with_batches, 2)]
)
def test_a_script_that_computes_between_its_transfers_is_no_pipeline_by_that(
    program: Callable[[int], Program], workers: int
) -> None:
    found = fw.explain(on_ddp(program, workers, 5 * GBPS))
    assert found.account["bubble"] == 0
    assert found.account["straggler"] > 0.005
    assert {"straggler", "balance"} <= {fix.kind for fix in found.fixes}


@pytest.mark.parametrize("rate_bps", [0.1 * GBPS, 2 * GBPS, 8 * GBPS])
def test_a_written_prediction_has_no_waits_of_the_recorded_link(rate_bps: float) -> None:
    """Its account tells the computing of one worker, and no rank that is late."""
    run = on_ddp(split_and_replicated(sums_of=MB), 4, 2 * GBPS)
    predictor = forecaster(run, alone=alone_by_account(run))
    assert predictor is not None
    grid = dataclasses.replace(predictor.grid, bandwidth_bps=(rate_bps,))
    written = fw.explain(replay(run, predictor.subject, grid))
    assert written.account["compute"] == pytest.approx(predictor.alone_s, rel=0.01)
    assert written.account["straggler"] < 0.03 * written.step_s


def test_what_follows_the_passes_is_once_in_a_step_of_several() -> None:
    """The owners of parameters broadcast them after the optimizer, not after each pass."""

    def of_passes(passes: int) -> Run:
        earlier = [Compute("forward", 35)] * (passes - 1)  # a forward and a backward pass each
        return on_ddp(lambda rank: [*earlier, *sharing_optimizer_state(rank)], 2, GBPS)

    shown = of_passes(1)
    table = fw.whatif(shown, accumulate="2,4", transport="measured")
    for passes, step_s in zip((2, 4), table["step_s"], strict=True):
        truth_s = fw.explain(of_passes(passes)).step_s / passes
        assert step_s == pytest.approx(truth_s, rel=0.04)  # the optimizer's 3 ms count in each
    bits = table["network_utilization"] * table["step_s"] * GBPS
    assert bits[0] == pytest.approx(2 * bits[1])


def splitting_the_first_layer(rank: int) -> Program:
    """Step as replicas of a split model whose inputs need gradients: a sum ends the pass."""
    pair, others = rank // 2, rank % 2
    split = Call(f"split {pair}", (2 * pair, 2 * pair + 1), "allreduce", 3 * MB)
    bucket = Call(f"replicas {others}", (others, others + 2), "allreduce", MB, False)
    steps: list[Compute | Call | Ready | Wait] = [Compute("forward", 4), split] * 6
    steps.append(Compute("forward", 1))
    for layer in range(6):
        steps.append(Compute("backward", 8))
        if layer % 2:
            steps += [Ready(MB), bucket]
        steps.append(split)
    return [*steps, Wait(), Compute("optimizer", 3)]


@pytest.mark.parametrize("steps", range(7, 13))
def test_the_sum_that_ends_a_pass_is_of_the_pass_in_any_number_of_steps(steps: int) -> None:
    facts: dict[str, FactValue] = {"buckets": "ddp:2MiB"}
    run = played(splitting_the_first_layer, 4, GBPS, steps=steps, jitter=0.05, facts=facts)
    [step_s] = fw.whatif(run, accumulate="4", transport="measured")["step_s"]
    assert step_s == pytest.approx(0.393, rel=0.015)  # a quarter of a step that is played so


def test_broadcasts_of_one_root_fill_its_link() -> None:
    """Before the passes, the first rank sends the buffers of a model to the others."""

    def with_buffers(rank: int) -> Program:
        return [Call("0", (0, 1), "broadcast", 2 * MB), *sharing_optimizer_state(rank)]

    table = fw.whatif(on_ddp(with_buffers, 2, GBPS / 5), transport="measured")
    carried = table["network_utilization"][0] * table["step_s"][0] * GBPS / 5 / 8
    assert carried == pytest.approx((2 + 3 * 3 + 9 / 2) * MB, rel=0.01)


def test_sums_within_a_host_are_on_no_link() -> None:
    hosts: dict[str, FactValue] = {"buckets": "ddp:2MiB", "machines": 2, "hosts": "a,a,b,b"}
    run = played(split_and_replicated(sums_of=MB), 4, GBPS, facts=hosts)
    table = fw.whatif(run, transport="measured")
    carried = table["network_utilization"][0] * table["step_s"][0] * GBPS / 8
    assert carried == pytest.approx(3 * 3 * MB, rel=0.01)


@pytest.mark.parametrize("rate", ["200Mbps", "5Gbps"])
def test_an_order_of_buckets_is_no_quicker_beside_sums_that_computing_waits_for(rate: str) -> None:
    run = on_ddp(split_and_replicated(sums_of=MB), 4, GBPS / 5)
    fifo, priority = (
        fw.whatif(run, lane=lane, bandwidth=rate, transport="measured")["step_s"][0]
        for lane in ("fifo", "priority")
    )
    assert priority == fifo
    assert not [fix for fix in fw.explain(run).fixes if fix.kind == "priority"]
