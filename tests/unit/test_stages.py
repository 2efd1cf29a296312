"""Traces of pipelines: all stages are played together, as they wait for each other's transfers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.errors import DamagedInput, UsageError
from fullwire.importers import read
from fullwire.run.run import Run
from fullwire.simulation.beside_layers import Stages
from fullwire.simulation.typical import typical_step
from fullwire.words import sentence
from tests.unit.test_kineto import GEMM, Job, reduced
from tests.unit.test_traced_gradients import BACKWARD, KERNELS

STEPS, START_US, ACTIVATIONS, GRADIENTS, WEIGHTS = 5, 10.0, 8_000_000, 50_000_000, 16_000_000
MEASURED: dict[str, Any] = {"transport": "measured"}
# A kernel with its pass and length, a collective or a transfer with its name, its ranks and its
# size, or the wait for it.
Part = tuple[Any, ...]


def by_turns(
    passed: Callable[[bool, int], Iterator[Part]], batches: int, warm: int
) -> Iterator[Part]:
    """Yield so many forward passes, then a forward and a backward pass by turns (1F1B)."""
    for turn in range(batches + warm):
        if turn < batches:
            yield from passed(False, turn)
        if turn >= warm:
            yield from passed(True, turn - warm)


def stage(rank: int, stages: int, batches: int, replicas: int, slower: float) -> Iterator[Part]:
    """Yield a step of a rank, one forward and one backward pass by turns (1F1B)."""
    place, before, after = rank // replicas, rank - replicas, rank + replicas
    is_first, is_last = place == 0, place == stages - 1
    times = slower if is_last else 1.0

    def passed(is_backward: bool, batch: int) -> Iterator[Part]:
        source, target = (after, before) if is_backward else (before, after)
        if not (is_last if is_backward else is_first):
            yield "send", "recv", (is_backward, batch), (source, rank), ACTIVATIONS
            yield "wait", (is_backward, batch)
        yield "work", is_backward, times * (2000 if is_backward else 1000)
        if not (is_first if is_backward else is_last):
            yield "send", "send", (is_backward, batch, "on"), (rank, target), ACTIVATIONS

    warm = min(stages - place - 1, batches)
    yield from by_turns(passed, batches, warm)
    if replicas > 1:
        ranks = tuple(range(place * replicas, (place + 1) * replicas))
        yield "send", "allreduce", "gradients", ranks, GRADIENTS
        yield "wait", "gradients"
    yield "work", False, 100
    yield "send", "allreduce", "norm", tuple(range(stages * replicas)), 4
    yield "wait", "norm"


def all_forward_first(rank: int, stages: int, *, waits: bool = False) -> Iterator[Part]:
    """Yield a step of a rank that ends all forward passes first (GPipe), and may wait to send."""
    for is_backward in (False, True):
        source, target = (rank + 1, rank - 1) if is_backward else (rank - 1, rank + 1)
        for batch in range(6):
            if 0 <= source < stages:
                yield "send", "recv", (is_backward, batch), (source, rank), ACTIVATIONS
                yield "wait", (is_backward, batch)
            yield "work", is_backward, 2000 if is_backward else 1000
            if 0 <= target < stages:
                sent = is_backward, batch, "on"
                yield "send", "send", sent, (rank, target), ACTIVATIONS
                if waits:
                    yield "wait", sent
    yield "work", False, 100
    yield "send", "allreduce", "norm", tuple(range(stages)), 4
    yield "wait", "norm"


def in_chunks(rank: int, *, later_us: float = 0.0) -> Iterator[Part]:
    """Yield a step of four stages with two chunks of layers each (Megatron's interleaved 1F1B)."""
    stages, chunks, batches = 4, 2, 8
    total = chunks * batches
    warm = min(total, (stages - rank - 1) * 2 + (chunks - 1) * stages)

    def passed(is_backward: bool, turn: int) -> Iterator[Part]:
        chunk, batch = turn // stages % chunks, turn // (stages * chunks) * stages + turn % stages
        chunk = chunks - 1 - chunk if is_backward else chunk
        source, target = (rank - 1) % stages, (rank + 1) % stages
        ends = [(rank, chunk) == (0, 0), (rank, chunk) == (stages - 1, chunks - 1)]
        if is_backward:
            source, target, ends = target, source, ends[::-1]
        own = is_backward, chunk, batch
        if not ends[0]:
            yield "send", "recv", own, (source, rank), ACTIVATIONS
            yield "wait", own
        yield "work", is_backward, later_us + (1000 if is_backward else 500)
        if not ends[1]:
            yield "send", "send", (*own, "on"), (rank, target), ACTIVATIONS

    yield from by_turns(passed, total, warm)
    yield "work", False, 100
    yield "send", "allreduce", "norm", tuple(range(stages)), 4
    yield "wait", "norm"


def without_bubble(rank: int) -> Iterator[Part]:
    """Yield a step of four stages that make gradients of weights when idle (ZB-H1)."""
    stages, batches = 4, 8
    warm, kept = stages - rank - 1, 0
    for turn in range(batches + warm):
        for is_backward, batch in ((False, turn), (True, turn - warm)):
            if not 0 <= batch < batches:
                continue
            source, target = (rank + 1, rank - 1) if is_backward else (rank - 1, rank + 1)
            if 0 <= source < stages:
                yield "send", "recv", (is_backward, batch), (source, rank), ACTIVATIONS
                yield "wait", (is_backward, batch)
            yield "work", is_backward, 1000
            if 0 <= target < stages:
                yield "send", "send", (is_backward, batch, "on"), (rank, target), ACTIVATIONS
            kept += is_backward
        if kept > (rank if turn < batches else 0):
            yield "work", True, 1000
            kept -= 1
    for _ in range(kept):
        yield "work", True, 1000
    yield "work", False, 100
    yield "send", "allreduce", "norm", tuple(range(stages)), 4
    yield "wait", "norm"


def in_batches(rank: int, stages: int, batches: int) -> Iterator[Part]:
    """Yield a step of a rank (1F1B) that sends to a stage and takes from it at once."""
    warm = min(stages - rank - 1, batches)

    def sent(is_backward: bool, batch: int) -> Iterator[Part]:
        other = rank - 1 if is_backward else rank + 1
        if 0 <= other < stages and 0 <= batch < batches:
            own = is_backward, batch, "on"
            yield "send", "send", own, (rank, other), ACTIVATIONS

    def taken(is_backward: bool, batch: int) -> Iterator[Part]:
        other = rank + 1 if is_backward else rank - 1
        if 0 <= other < stages and 0 <= batch < batches:
            yield "send", "recv", (is_backward, batch), (other, rank), ACTIVATIONS

    def at_once(*parts: Iterator[Part]) -> Iterator[Part]:
        messages = [message for part in parts for message in part]
        yield from messages
        yield from (("wait", message[2]) for message in messages)

    for batch in range(warm):
        yield from at_once(taken(False, batch))
        yield "work", False, 1000
        yield from at_once(sent(False, batch))
    yield from at_once(taken(False, warm))
    for batch in range(batches):
        if batch + warm < batches:
            yield "work", False, 1000
            yield from at_once(sent(False, batch + warm), taken(True, batch))
        else:
            yield from at_once(taken(True, batch))
        yield "work", True, 2000
        following = taken(False, batch + warm + 1)
        yield from at_once(sent(True, batch), following)
    yield "work", False, 100
    yield "send", "allreduce", "norm", tuple(range(stages)), 4
    yield "wait", "norm"


def batched(job: Job) -> None:
    """Let transfers that begin at once go in one kernel without arguments, after their calls."""
    bare = ("device", "stream", "correlation")
    launches = {
        event["args"]["correlation"]: event
        for event in job.events
        if event["cat"] == "cuda_runtime"
    }
    kernels: dict[float, Any] = {}
    for event in [*job.events]:
        args = event["args"]
        if event["cat"] != "kernel" or args.get("Collective name") not in ("send", "recv"):
            continue
        launch = launches[args["correlation"]]
        told = {name: args.pop(name) for name in [*args] if name not in bare}
        called = launch["ts"]
        job.event("cpu_op", "record_param_comms", called, called + 0.1, tid=1, **told)
        launch["ts"] += 0.2
        first = kernels.setdefault(event["ts"], event)
        if first is not event:
            first["dur"] = max(first["dur"], event["dur"])
            own = launches[first["args"]["correlation"]]
            own["ts"] = max(own["ts"], launch["ts"])
            job.events = [each for each in job.events if each is not event and each is not launch]


def sharded_stage(rank: int) -> Iterator[Part]:
    """Yield a step of a stage of two on two ranks each, which gathers its weights for each pass."""
    ranks = (rank // 2 * 2, rank // 2 * 2 + 1)
    parts = [part for part in stage(rank, 2, 4, 2, 1.0) if "gradients" not in part]
    passes = [number for number, part in enumerate(parts) if part[0] == "work" and part[2] > 100]
    yield "send", "_allgather_base", ("weights", passes[0]), ranks, WEIGHTS
    for number, part in enumerate(parts):
        if number in passes:
            for following in passes[passes.index(number) + 1 :][:1]:
                yield "send", "_allgather_base", ("weights", following), ranks, WEIGHTS
            yield "wait", ("weights", number)
        if part[:2] == ("work", False) and part[2] == 100:
            yield "wait", "scattered"
        yield part
        if part[:2] == ("work", True):
            yield "send", "_reduce_scatter_base", "scattered", ranks, WEIGHTS


def sharded_ring(rank: int, handed_bytes: int) -> Iterator[Part]:
    """Yield a step of shards on four ranks, which also hand something around for each layer."""
    everyone, following, before = (0, 1, 2, 3), (rank + 1) % 4, (rank - 1) % 4
    layers = [(is_backward, layer) for is_backward in (False, True) for layer in range(4)]
    yield "send", "_allgather_base", layers[0], everyone, WEIGHTS // 2
    for own, next_own in zip(layers, [*layers[1:], None], strict=True):
        if next_own is not None:
            yield "send", "_allgather_base", next_own, everyone, WEIGHTS // 2
        yield "wait", own
        for turn in range(3):
            yield "send", "send", (own, turn, "on"), (rank, following), handed_bytes
            yield "send", "recv", (own, turn), (before, rank), handed_bytes
            yield "work", own[0], 450 if own[0] else 225
            yield "wait", (own, turn)
            yield "wait", (own, turn, "on")
        yield "work", own[0], 450 if own[0] else 225
        if own[0]:
            yield "send", "_reduce_scatter_base", "scattered", everyone, WEIGHTS // 2
    yield "wait", "scattered"
    yield "work", False, 100


def around(rank: int, ranks: int) -> Iterator[Part]:
    """Yield a step whose keys go around a ring of ranks, each beside the work for those before."""
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    for is_backward in (False, True):
        long_us = 600 if is_backward else 300
        for layer in range(3):
            for turn in range(ranks - 1):
                own = is_backward, layer, turn
                yield "send", "send", (*own, "on"), (rank, following), ACTIVATIONS // 2
                yield "send", "recv", own, (before, rank), ACTIVATIONS // 2
                yield "work", is_backward, long_us
                yield "wait", own
                yield "wait", (*own, "on")
            yield "work", is_backward, 2 * long_us
    yield "send", "allreduce", "gradients", tuple(range(ranks)), GRADIENTS
    yield "wait", "gradients"
    yield "work", False, 100


class Played:
    """The steps of all ranks of a pipeline at a rate, in microseconds."""

    def __init__(
        self,
        rate_gbps: float,
        *,
        stages: int = 4,
        batches: int = 8,
        replicas: int = 1,
        slower: float = 1.0,
        programs: Sequence[Iterator[Part]] = (),
    ) -> None:
        world = len(programs) or stages * replicas
        of_stages = (stage(rank, stages, batches, replicas, slower) for rank in range(world))
        self.programs = [list(parts) for parts in programs or of_stages]
        self.rate_gbps, self.now = rate_gbps, [0.0] * world
        self.jobs = [Job(rank, world) for rank in range(world)]
        self.free: dict[Any, float] = {}
        self.length_us = 0.0
        for number in range(STEPS):
            began = list(self.now)
            self._step()
            for job, begin, end in zip(self.jobs, began, self.now, strict=True):
                job.step(number, begin, end)
            self.length_us = self.now[0] - began[0]

    def _step(self) -> None:
        """Let each rank go on until it waits for a message that lacks a rank, in turns."""
        begins, place = [now + 1 for now in self.now], [0] * len(self.now)
        come: dict[Any, dict[int, tuple[float, float, str]]] = {}
        over: dict[Any, float] = {}
        count: dict[Any, int] = {}
        names: list[dict[Any, Any]] = [{} for _ in self.now]
        while any(at < len(program) for at, program in zip(place, self.programs, strict=True)):
            for rank, program in enumerate(self.programs):
                while place[rank] < len(program):
                    part, launch = program[place[rank]], begins[rank] + place[rank]
                    if part[0] == "work":
                        self._kernel(rank, launch, part[1], part[2])
                    elif part[0] == "wait":
                        key = names[rank][part[1]]
                        if key not in over:
                            break
                        self.now[rank] = max(self.now[rank], over[key])
                    else:
                        _, op, name, ranks, size = part
                        numbered = rank, op, ranks
                        count[numbered] = count.get(numbered, 0) + 1
                        kind = "transfer" if op in ("send", "recv") else op
                        key = names[rank][name] = ranks, kind, count[numbered]
                        come.setdefault(key, {})[rank] = (self.now[rank], launch, op)
                        if len(come[key]) == len(ranks):
                            over[key] = self._sent(come[key], ranks, size)
                    place[rank] += 1

    def _kernel(self, rank: int, launch: float, is_backward: bool, long_us: float) -> None:
        job, now = self.jobs[rank], self.now[rank]
        job.kernel(GEMM, now, now + long_us, launch=launch)
        if is_backward:
            job.event("cpu_op", BACKWARD, launch - 0.1, launch + 0.8, tid=1)
        self.now[rank] += long_us

    def _sent(
        self, come: dict[int, tuple[float, float, str]], ranks: tuple[int, ...], size: int
    ) -> float:
        begin = {rank: max(at, self.free.get((rank, ranks), 0)) for rank, (at, *_) in come.items()}
        (*_, op), *_ = come.values()
        share = (len(ranks) - 1) / len(ranks)
        times = 1 if op in ("send", "recv") else share * (2 if op == "allreduce" else 1)
        end = max(begin.values()) + START_US + times * 8e-3 * size / self.rate_gbps
        for rank, (_, launch, op) in come.items():
            self.free[rank, ranks] = end
            named = {"Collective name": op, "Group size": len(ranks)}
            if op in ("send", "recv"):
                named |= {"Src Rank": ranks[0], "Dst Rank": ranks[1]}
            if op == "_allgather_base":
                named |= {"In msg nelems": size // 4 // len(ranks)}
            if op == "_reduce_scatter_base":
                named |= {"Out msg nelems": size // 4 // len(ranks)}
            args = reduced(size // 4, str(min(ranks)), str([*sorted(ranks)])) | named
            stream = 10 + hash(ranks) % 1000
            name = KERNELS["send" if op == "recv" else op]
            self.jobs[rank].kernel(name, begin[rank], end, launch=launch, stream=stream, **args)
        return end

    def traced(self, where: Path) -> Run:
        for rank, job in enumerate(self.jobs):
            job.write(where / f"{rank}.json")
        return read(where)


JOBS: dict[str, dict[str, Any]] = {
    "two": {"stages": 2, "batches": 4},
    "four": {"stages": 4, "batches": 8},
    "few batches": {"stages": 4, "batches": 4},
    "a long stage": {"stages": 4, "batches": 8, "slower": 1.3},
    "replicas": {"stages": 2, "batches": 8, "replicas": 2},
}


@pytest.mark.parametrize("recorded_gbps", [10, 100])
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_stages_of_a_pipeline_are_played_together(
    tmp_path: Path, job: dict[str, Any], recorded_gbps: int
) -> None:
    recorded = Played(recorded_gbps, **job)
    run = recorded.traced(tmp_path)
    step = typical_step(run)
    assert isinstance(step.others.course, Stages)
    assert step.measured_ns == pytest.approx(1000 * recorded.length_us, rel=0.001)
    rates_gbps = (10, 25, 50, 100, 400)
    asked = MEASURED | {"line_rate": f"{recorded_gbps}Gbps"}
    table = fw.whatif(run, **asked, bandwidth=[f"{rate}Gbps" for rate in rates_gbps])
    for row, rate_gbps in enumerate(rates_gbps):
        step_s = Played(rate_gbps, **job).length_us * 1e-6
        assert table["step_s"][row] == pytest.approx(step_s, rel=0.04)
        low_s, high_s = (ends[row] for ends in table.interval_s)
        assert low_s <= step_s <= high_s < 1.3 * step_s


def test_transfers_around_a_ring_are_needed_where_the_next_work_begins(tmp_path: Path) -> None:
    run = Played(200, programs=[around(rank, 4) for rank in range(4)]).traced(tmp_path)
    rates_gbps = (25, 50, 100, 400)
    asked = MEASURED | {"line_rate": "200Gbps"}
    table = fw.whatif(run, **asked, bandwidth=[f"{rate}Gbps" for rate in rates_gbps])
    for row, rate_gbps in enumerate(rates_gbps):
        true = Played(rate_gbps, programs=[around(rank, 4) for rank in range(4)])
        step_s = true.length_us * 1e-6
        assert table["step_s"][row] == pytest.approx(step_s, rel=0.05)
        assert table.interval_s[0][row] <= step_s <= table.interval_s[1][row]


@pytest.mark.parametrize(
    ("parts", "recorded_gbps"),
    [(sharded_stage, 20), (sharded_stage, 100), (partial(sharded_ring, handed_bytes=64), 20)],
    ids=["stages", "fast stages", "flags"],
)
def test_shards_beside_transfers_are_needed_where_their_layers_begin(
    tmp_path: Path, parts: Any, recorded_gbps: int
) -> None:
    run = Played(recorded_gbps, programs=[parts(rank) for rank in range(4)]).traced(tmp_path)
    rates_gbps = (20, 50, 100, 400)
    asked = MEASURED | {"line_rate": f"{recorded_gbps}Gbps"}
    table = fw.whatif(run, **asked, bandwidth=[f"{rate}Gbps" for rate in rates_gbps])
    for row, rate_gbps in enumerate(rates_gbps):
        true = Played(rate_gbps, programs=[parts(rank) for rank in range(4)])
        step_s = true.length_us * 1e-6
        assert table["step_s"][row] == pytest.approx(step_s, rel=0.05)
        assert table.interval_s[0][row] <= step_s <= table.interval_s[1][row]


@pytest.mark.parametrize("recorded_gbps", [10, 100])
@pytest.mark.parametrize("waits", [False, True], ids=["queued", "waited for"])
@pytest.mark.parametrize("stages", [2, 4])
def test_transfers_that_queue_leave_in_turn_and_a_rank_may_wait_for_its_own(
    tmp_path: Path, stages: int, waits: bool, recorded_gbps: int
) -> None:
    def at_rate(rate_gbps: int) -> Played:
        ranks = range(stages)
        programs = [all_forward_first(rank, stages, waits=waits) for rank in ranks]
        return Played(rate_gbps, programs=programs)

    run = at_rate(recorded_gbps).traced(tmp_path)
    rates_gbps = (10, 25, 50, 100, 400)
    asked = MEASURED | {"line_rate": f"{recorded_gbps}Gbps"}
    table = fw.whatif(run, **asked, bandwidth=[f"{rate}Gbps" for rate in rates_gbps])
    for row, rate_gbps in enumerate(rates_gbps):
        step_s = at_rate(rate_gbps).length_us * 1e-6
        assert table["step_s"][row] == pytest.approx(step_s, rel=0.04)
        assert table.interval_s[0][row] <= step_s <= table.interval_s[1][row]
    full = fw.whatif(run, line_rate=asked["line_rate"], transport="full", bandwidth="50Gbps")
    step_s = at_rate(50).length_us * 1e-6  # of which 10 us for each transfer are no full line's
    assert full["step_s"][0] == pytest.approx(step_s, rel=0.006)


@pytest.mark.parametrize("recorded_gbps", [10, 100])
@pytest.mark.parametrize(
    "parts",
    [in_chunks, lambda rank: in_chunks(rank, later_us=300.0 * (rank == 2)), without_bubble],
    ids=["chunks", "chunks and a late rank", "no bubble"],
)
def test_schedules_with_less_of_a_bubble_are_played_too(
    tmp_path: Path, parts: Any, recorded_gbps: int
) -> None:
    def at_rate(rate_gbps: int) -> Played:
        return Played(rate_gbps, programs=[parts(rank) for rank in range(4)])

    recorded = at_rate(recorded_gbps)
    run, line = recorded.traced(tmp_path), f"{recorded_gbps}Gbps"
    parts_us = [[part[2] for part in own if part[0] == "work"] for own in recorded.programs]
    own_us = [sum(parts) for parts in parts_us]
    account = fw.explain(run, bandwidth=line).account
    assert account["compute"] == pytest.approx(min(own_us) * 1e-6)
    # One rank has the additional work, and the three others wait for it.
    assert account["straggler"] == pytest.approx((sum(own_us) / 4 - min(own_us)) * 1e-6, abs=1e-5)
    assert account["bubble"] > 0.1e-6 * recorded.length_us
    rates_gbps = (10, 50, 400)
    for transport in ("measured", "full"):
        table = fw.whatif(
            run, line_rate=line, transport=transport, bandwidth=[f"{r}Gbps" for r in rates_gbps]
        )
        for row, rate_gbps in enumerate(rates_gbps):
            step_s = at_rate(rate_gbps).length_us * 1e-6
            assert table["step_s"][row] == pytest.approx(step_s, rel=0.045)
            assert table.interval_s[0][row] <= step_s <= table.interval_s[1][row]


@pytest.mark.parametrize("recorded_gbps", [20, 100])
@pytest.mark.parametrize("stages", [2, 4])
def test_kernels_that_carry_several_transfers_are_told_by_the_calls_before_them(
    tmp_path: Path, stages: int, recorded_gbps: int
) -> None:
    def at_rate(rate_gbps: int) -> Played:
        return Played(rate_gbps, programs=[in_batches(rank, stages, 8) for rank in range(stages)])

    played, line = at_rate(recorded_gbps), f"{recorded_gbps}Gbps"
    for job in played.jobs:
        batched(job)
    run = played.traced(tmp_path)
    assert not run.missing
    account = fw.explain(run, bandwidth=line).account
    assert account["compute"] == pytest.approx(24.1e-3, rel=0.001)
    assert account["straggler"] < 0.01 * played.length_us * 1e-6
    rates_gbps = (10, 50, 400)
    rates = [f"{rate}Gbps" for rate in rates_gbps]
    table = fw.whatif(run, line_rate=line, transport="full", bandwidth=rates)
    for row, rate_gbps in enumerate(rates_gbps):
        step_s = at_rate(rate_gbps).length_us * 1e-6  # of which 10 us for each transfer
        assert table["step_s"][row] == pytest.approx(step_s, rel=0.02)


def test_a_transfer_of_two_stages_stays_between_two_ranks_of_more_workers(tmp_path: Path) -> None:
    run = Played(20, stages=2, batches=4).traced(tmp_path)
    steps_s = fw.whatif(run, **MEASURED, line_rate="20Gbps", workers=[2, 4, 16])["step_s"]
    assert steps_s.tolist() == pytest.approx([steps_s[0]] * 3, rel=0.02)


def test_replicas_of_stages_have_the_gradients_of_their_last_batch_alone(tmp_path: Path) -> None:
    played = Played(20, stages=2, batches=4, replicas=2)
    programs = []
    for rank, parts in enumerate(played.programs):
        last = max(number for number, part in enumerate(parts) if part[:2] == ("work", True))
        halves: list[Part] = []
        for number in (0, 1):
            own = "gradients", number
            halves.append(("work", True, 1000))
            pair = (rank // 2 * 2, rank // 2 * 2 + 1)
            halves.append(("send", "allreduce", own, pair, GRADIENTS // 2))
        rest = [part for part in parts[last + 1 :] if "gradients" not in part]
        waits = [("wait", ("gradients", number)) for number in (0, 1)]
        at = next(number for number, part in enumerate(rest) if part[0] == "work")
        programs.append(iter([*parts[:last], *halves, *rest[:at], *waits, *rest[at:]]))
    step_s = Played(20, programs=programs).length_us * 1e-6
    asked = MEASURED | {"line_rate": "20Gbps", "buckets": "ddp:24MB"}
    predicted_s = fw.whatif(played.traced(tmp_path), **asked)["step_s"][0]
    assert predicted_s == pytest.approx(step_s, rel=0.02)


def test_stages_at_other_speeds_equal_the_points_of_their_grid(tmp_path: Path) -> None:
    run = Played(100, stages=2, batches=4).traced(tmp_path)
    asked = MEASURED | {"line_rate": "100Gbps"}
    grid = fw.whatif(run, **asked, compute_speed=[0.5, 2.0])
    for row, speed in enumerate((0.5, 2.0)):
        assert grid["step_s"][row] == fw.whatif(run, **asked, compute_speed=speed)["step_s"][0]


@pytest.mark.parametrize("group_names", ["PIPELINE_MODEL_PARALLEL_GROUP: 0 1 2", None])
def test_stages_that_wait_for_each_other_are_a_bubble_and_no_late_ranks(
    tmp_path: Path, group_names: str | None
) -> None:
    run = Played(100, stages=4, batches=4).traced(tmp_path)
    facts = dataclasses.replace(run.facts, group_names=group_names)
    found = fw.explain(dataclasses.replace(run, facts=facts), bandwidth="100Gbps")
    assert found.verdict.kind == "bubble"
    assert found.account["straggler"] < 0.01 * found.step_s
    assert found.account["bubble"] > 0.3 * found.step_s
    assert sum(found.account.values()) == pytest.approx(found.step_s)
    assert "straggler" not in {fix.kind for fix in found.fixes}


def test_ranks_of_a_recording_that_wait_as_stages_do_may_be_late_by_schedule(
    tmp_path: Path,
) -> None:
    """A script writes its pipeline itself, and nothing tells so: a rank was surely late."""
    run = Played(100, stages=4, batches=4).traced(tmp_path)
    written = dataclasses.replace(
        run, provenance=dataclasses.replace(run.provenance, origin="measured")
    )

    def doubts(job: Run) -> str:
        found = fw.explain(job, bandwidth="100Gbps").verdict
        assert found.kind == "straggler"
        return "" if found.sureness is None else sentence(found.sureness)

    told = "in sends and receives between ranks: if they are stages of a pipeline, its schedule"
    assert told in doubts(written)
    sums = written.collectives.op.astype(str)
    sums[np.isin(sums, ("send", "recv"))] = "broadcast"
    others = dataclasses.replace(written.collectives, op=sums.astype(object))
    assert told not in doubts(dataclasses.replace(written, collectives=others))


def served(rank: int, workers: int, slower: float) -> Iterator[Part]:
    """Yield a step of a rank that hands gradients to a server, which is rank 0."""
    yield "work", False, slower * 1000
    yield "work", True, slower * 2000
    if rank:
        yield "send", "send", "gradients", (rank, 0), ACTIVATIONS
        yield "send", "recv", "parameters", (0, rank), ACTIVATIONS
        yield "wait", "parameters"
        return
    for worker in range(1, workers + 1):
        yield "send", "recv", ("gradients", worker), (worker, 0), ACTIVATIONS
    for worker in range(1, workers + 1):
        yield "wait", ("gradients", worker)
    yield "work", False, 2000
    for worker in range(1, workers + 1):
        yield "send", "send", ("parameters", worker), (0, worker), ACTIVATIONS


def test_a_worker_of_a_server_that_computes_longer_is_late_and_no_schedule_makes_others_wait(
    tmp_path: Path,
) -> None:
    """Formerly the sentence named the rank and its work, and the next one said that none is."""
    programs = [served(rank, 2, 4.0 if rank == 1 else 1.0) for rank in range(3)]
    run = Played(100, programs=programs).traced(tmp_path)
    run = dataclasses.replace(
        run, provenance=dataclasses.replace(run.provenance, origin="measured")
    )
    found = fw.explain(run, bandwidth="100Gbps").verdict
    told = " ".join(map(sentence, (*found.findings, found.sureness)))  # type: ignore[arg-type]
    assert "Rank 1 is late" in told
    assert "more than usual in computation" in told
    assert "stages of a pipeline" not in told


WRITTEN: dict[str, Any] = {
    "1F1B": lambda: [stage(rank, 4, 4, 1, 1.0) for rank in range(4)],
    "a late rank": lambda: [in_chunks(rank, later_us=300.0 * (rank == 2)) for rank in range(4)],
    "replicas": lambda: [stage(rank, 2, 8, 2, 1.0) for rank in range(4)],
    "queued": lambda: [all_forward_first(rank, 4) for rank in range(4)],
    "waited for": lambda: [all_forward_first(rank, 4, waits=True) for rank in range(4)],
}


@pytest.mark.parametrize("programs", WRITTEN.values(), ids=WRITTEN)
def test_a_written_prediction_of_a_pipeline_predicts_as_its_trace_does(
    tmp_path: Path, programs: Any
) -> None:
    run = Played(100, programs=programs()).traced(tmp_path)
    rates = ["10Gbps", "50Gbps", "400Gbps"]
    direct = fw.whatif(run, line_rate="100Gbps", bandwidth=rates, transport="full")
    for transport in ("measured", "full"):
        asked: dict[str, Any] = {"line_rate": "100Gbps", "bandwidth": "25Gbps"}
        asked["transport"] = transport
        written, table = fw.replay(run, **asked), fw.whatif(run, **asked)
        found = fw.explain(written)
        assert found.step_s == pytest.approx(table["step_s"][0])
        assert found.baseline_step_s == pytest.approx(table["baseline_step_s"][0])
        assert found.account["bubble"] > 0.05 * found.step_s
        of_trace = fw.explain(run, bandwidth="100Gbps").account["straggler"]
        assert found.account["straggler"] == pytest.approx(of_trace, abs=2e-5)
        again = fw.whatif(written, bandwidth=rates, transport="full")
        assert again["step_s"].tolist() == pytest.approx(direct["step_s"].tolist(), rel=0.002)


def test_one_stage_of_a_pipeline_as_an_earlier_version_wrote_it_predicts_nothing(
    tmp_path: Path,
) -> None:
    run = Played(20, stages=2, batches=4).traced(tmp_path)
    written = fw.replay(run, line_rate="20Gbps", bandwidth="20Gbps", **MEASURED)
    alone = {name: getattr(written, name) for name in ("spans", "gradients", "collectives")}
    alone = {name: table.rows(table.rank == 0) for name, table in alone.items()}
    with pytest.raises(UsageError, match="ask the run that it was predicted from"):
        fw.whatif(dataclasses.replace(written, **alone), bandwidth="10Gbps")


def test_ranks_of_a_ring_are_no_stages_of_a_pipeline(tmp_path: Path) -> None:
    run = Played(20, programs=[around(rank, 4) for rank in range(4)]).traced(tmp_path)
    written = fw.replay(run, line_rate="20Gbps", bandwidth="20Gbps", **MEASURED)
    for each in (run, written):
        assert fw.explain(each, bandwidth="20Gbps").account["bubble"] == 0
    assert fw.whatif(written, bandwidth="40Gbps")["step_s"][0] > 0


@pytest.mark.parametrize("unsized", [("send", "recv"), ("recv",)], ids=["both", "received"])
def test_a_pipeline_without_all_sizes_is_refused(tmp_path: Path, unsized: tuple[str, ...]) -> None:
    played = Played(100, stages=2, batches=4)
    for job in played.jobs:
        for event in job.events:
            if event.get("args", {}).get("Collective name") in unsized:
                for name in ("In msg nelems", "Out msg nelems", "dtype"):
                    event["args"].pop(name, None)
    with pytest.raises(DamagedInput, match="collectives the size is not told"):
        fw.whatif(played.traced(tmp_path), line_rate="100Gbps", bandwidth="200Gbps")
