"""Probe steps: sums wait for computing, and the rest of the job stays as it is."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fullwire.recorder.inside.journal import Journal, Note
from fullwire.recorder.inside.probes import FIRST, IN_TURNS, THEN_EVERY, Probes, Turns, _Held
from fullwire.recorder.record import record
from fullwire.run.run import PROBES, Run
from fullwire.simulation.typical import typical_step
from tests.torch.test_record import digests, digests_of_hooks, needs_torch, span_count, together

STEPS = 24
RANKS = 2
TURNS = [step for step in IN_TURNS if step < STEPS]


def probed(tmp_path: Path, *job: str) -> tuple[Run, set[str]]:
    """Record a job of two ranks with probe steps; return its run and its output."""
    words = together(RANKS, *job)
    printed = tmp_path / "printed"
    recording = record(
        ["sh", "-c", f'"$@" > {printed}', "sh", *words], tmp_path / "job.run", probe=True
    )
    assert recording.exit_status == 0
    return recording.run, set(printed.read_text().splitlines())


@pytest.fixture(autouse=True)
def a_short_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", str(STEPS))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, set[str]]:
    """Record a job without a hook once; return its run and its output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPS", str(STEPS))
        return probed(tmp_path_factory.mktemp("plain"), "ddp.py", "none")


@needs_torch
@pytest.mark.parametrize("hook", ["none", "fp16", "powersgd"])
def test_a_short_job_has_probe_steps_and_the_same_weights(
    tmp_path: Path, hook: str, plain: tuple[Run, set[str]]
) -> None:
    run, weights = plain if hook == "none" else probed(tmp_path, "ddp.py", hook)
    assert weights == digests_of_hooks(str(STEPS))[hook]
    assert span_count(run, "host", "probe") == RANKS * len(FIRST)
    assert span_count(run, "host", "turns") == RANKS * len(TURNS)
    assert span_count(run, "host", "step") == RANKS * (STEPS - len(FIRST) - len(TURNS))


@needs_torch
def test_no_sum_begins_in_a_probe_step_before_the_backward_pass_is_done(
    plain: tuple[Run, set[str]],
) -> None:
    run, _ = plain
    spans, table = run.spans, run.collectives
    for at in np.flatnonzero(np.isin(spans.name, PROBES)).tolist():
        begin_ns, end_ns = spans.start_ns[at], spans.end_ns[at]
        is_mine = spans.rank == spans.rank[at]
        inside = is_mine & (spans.start_ns >= begin_ns) & (spans.end_ns <= end_ns)
        [computed_ns] = spans.end_ns[inside & (spans.name == "backward")]
        sums = (table.rank == spans.rank[at]) & (table.issue_ns >= begin_ns)
        sums &= table.issue_ns <= end_ns
        assert sums.sum() > 1
        assert (table.issue_ns[sums] >= computed_ns).all()


@needs_torch
@pytest.mark.parametrize("asked", ["work", "future", "thread"])
def test_whoever_asks_in_a_backward_pass_until_a_sum_has_ended_sees_it_end(
    tmp_path: Path, asked: str
) -> None:
    """Held back until that pass is done, the sum would never end."""
    words = together(RANKS, "polled.py", asked)
    plain = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    alone = ["timeout", "60", *words]  # a job that hangs fails here
    recording = record(
        ["sh", "-c", f'"$@" > {tmp_path}/printed', "sh", *alone], tmp_path / "job.run", probe=True
    )
    assert recording.exit_status == 0
    assert (tmp_path / "printed").read_text() == plain.stdout


@needs_torch
@pytest.mark.parametrize("asked", [None, "1", "2"])
def test_a_thread_that_asks_changes_neither_the_order_of_sums_nor_their_time(
    asked: str | None,
) -> None:
    """A hook may send a second sum after each first one. All ranks need the same order."""
    torch = pytest.importorskip("torch")
    sent: list[str] = []
    told: list[int] = []

    def collective(group: str, tensors: list[Any]) -> Any:
        sent.append(group)
        return SimpleNamespace(wait=lambda: True, is_completed=lambda: True)

    journal = SimpleNamespace(is_open=True, note=lambda kind, *_: told.append(kind))
    probes = Probes(cast(Any, journal))
    probes.is_on = True
    all_reduce = probes.around(collective, "allreduce")

    def ready(gradient: Any) -> None:
        for first in "123":
            work = all_reduce(first, [gradient])
            work.get_future().then(lambda _, first=first: all_reduce(first + "b", [gradient]))
            if first == asked:
                for ask in (work.is_completed, work.is_success):
                    asking = threading.Thread(target=ask)
                    asking.start()
                    asking.join()
        assert not sent

    parameter = torch.zeros(1, requires_grad=True)
    parameter.register_hook(ready)
    parameter.sum().backward()
    assert sent == ["1", "2", "3", "1b", "2b", "3b"]
    probes.step_ended(probes, (), {})
    assert told == [Note.PROBE]


@needs_torch
def test_a_step_in_which_another_thread_waits_is_no_probe() -> None:
    torch = pytest.importorskip("torch")
    sent: list[str] = []
    told: list[int] = []

    def collective(group: str, tensors: list[Any]) -> Any:
        sent.append(group)
        return SimpleNamespace(wait=lambda: True)

    journal = SimpleNamespace(is_open=True, note=lambda kind, *_: told.append(kind))
    probes = Probes(cast(Any, journal))
    probes.is_on = True
    all_reduce = probes.around(collective, "allreduce")
    is_waited_for = True

    def ready(gradient: Any) -> None:
        first = all_reduce("first", [gradient])
        if is_waited_for:
            waiting = threading.Thread(target=first.wait)
            waiting.start()
            waiting.join()
            assert sent == ["first"]
            all_reduce("second", [gradient])
            assert sent == ["first", "second"]

    parameter = torch.zeros(1, requires_grad=True)
    parameter.register_hook(ready)
    parameter.sum().backward()
    probes.step_ended(probes, (), {})
    assert not told
    probes.is_on, is_waited_for = True, False
    parameter.sum().backward()
    probes.step_ended(probes, (), {})
    assert told == [Note.PROBE]


@needs_torch
def test_sums_keep_their_order_while_another_thread_waits_for_the_first() -> None:
    torch = pytest.importorskip("torch")
    sent: list[str] = []
    begun = threading.Event()

    def collective(group: str, tensors: list[Any]) -> Any:
        if group == "first":
            begun.set()
            time.sleep(0.05)
        sent.append(group)
        return SimpleNamespace(wait=lambda: True, is_completed=lambda: True)

    probes = Probes(cast(Any, SimpleNamespace(is_open=True)))
    probes.is_on = True
    all_reduce = probes.around(collective, "allreduce")

    def ready(gradient: Any) -> None:
        first = all_reduce("first", [gradient])
        asking = threading.Thread(target=first.wait)
        asking.start()
        assert begun.wait(10)
        all_reduce("second", [gradient])
        asking.join()

    parameter = torch.zeros(1, requires_grad=True)
    parameter.register_hook(ready)
    parameter.sum().backward()
    assert sent == ["first", "second"]


@needs_torch
def test_probe_steps_are_left_out_of_what_a_step_is(plain: tuple[Run, set[str]]) -> None:
    run, _ = plain
    numbers = np.arange(STEPS)
    left = numbers[~np.isin(numbers, [*FIRST, *TURNS])]
    for table in (run.collectives, run.gradients):
        assert np.unique(table.step[table.step >= 0]).tolist() == left.tolist()
    assert not (run.spans.step[np.isin(run.spans.name, PROBES)] >= 0).any()


@needs_torch
def test_ranks_compute_one_after_another_in_turns(plain: tuple[Run, set[str]]) -> None:
    """The passes of the second rank wait for those of the first, and so does its optimizer."""
    run, _ = plain
    spans = run.spans.rows(np.argsort(run.spans.start_ns))
    marks = [spans.rows((spans.name == "turns") & (spans.rank == rank)) for rank in range(RANKS)]
    for at in range(len(TURNS)):
        first, second = (
            spans.rows(
                (spans.rank == rank)
                & (spans.start_ns >= mine.start_ns[at])
                & (spans.start_ns < mine.end_ns[at])
            )
            for rank, mine in enumerate(marks)
        )
        waits = second.rows((second.name == "wait") & (second.lane == "host"))
        before_passes_ns, before_optimizer_ns = np.sort(waits.end_ns)[:2]
        [passed_ns] = first.end_ns[first.name == "backward"]
        [steps_ns] = first.start_ns[first.name == "optimizer"]
        assert passed_ns <= before_passes_ns < steps_ns <= before_optimizer_ns


def probed_counts(tmp_path: Path, script: str) -> dict[str, int]:
    """Record a script of two ranks with probe steps; return how many marks of a name it has."""
    job = tmp_path / "job.py"
    job.write_text(script)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    alone = ["timeout", "60", *words, "--master-port", "0", "--standalone", str(job)]
    recording = record(alone, tmp_path / "job.run", probe=True)
    assert recording.exit_status == 0
    return {name: span_count(recording.run, "host", name) for name in ("step", "turns")}


TWO_PASSES = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
one, other = (DDP(torch.nn.Linear(8, 8)) for _ in range(2))
optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], 0.1)
for _ in range(14):
    a, b = one(torch.ones(2, 8)).sum(), other(torch.ones(2, 8)).sum()
    a.backward()
    b.backward()
    optimizer.step()
"""
WITH_A_CLOSURE = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def passes():
    loss = model(torch.ones(2, 8)).sum()
    loss.backward()
    return loss
for _ in range(14):
    optimizer.step(passes)
"""
WITHOUT_A_GROUP_AT_THE_END = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    model(torch.ones(2, 8)).sum().backward() if step < 2 else None
    optimizer.step()
    if step == 1:
        dist.destroy_process_group()
"""


@needs_torch
@pytest.mark.parametrize(
    ("script", "turns"),
    [(TWO_PASSES, 0), (WITH_A_CLOSURE, 2), (WITHOUT_A_GROUP_AT_THE_END, 0)],
    ids=["two passes with sums", "with a closure", "without a group"],
)
def test_turns_end_where_ranks_need_each_other_in_them(
    tmp_path: Path, script: str, turns: int
) -> None:
    """Else a rank would wait in its second sum for one that waits for its turn."""
    assert probed_counts(tmp_path, script)["turns"] == RANKS * turns


def turns_of(directory: Path, rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Make the turns of one of several ranks that have ended their first step."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: ranks)
    journal = SimpleNamespace(directory=str(directory), note=lambda *_: None)
    turns = Turns(cast(Any, journal))
    turns.step_ended(1, is_kept_apart=False, more_ns=0)
    return turns


@needs_torch
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_joined_late_ends_no_step_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """It counts its steps from its own first one, so the others would wait for it in vain."""
    ranks = [turns_of(tmp_path, rank, 2, monkeypatch) for rank in (0, 1)]
    for number in range(2, IN_TURNS[-1]):
        for rank, turns in enumerate(ranks):
            turns.step_ended(max(number - 3 * (rank == late), 1), is_kept_apart=False, more_ns=0)
            assert not turns.is_on


@needs_torch
def test_ranks_of_an_earlier_attempt_take_no_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have been on this machine, and have moved to another one."""
    turns_of(tmp_path, 0, 4, monkeypatch)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    ranks = [turns_of(tmp_path, rank, 4, monkeypatch) for rank in (1, 2)]
    for number in range(2, IN_TURNS[0] + 1):
        for turns in ranks:
            turns.step_ended(number, is_kept_apart=False, more_ns=0)
    assert all(turns.is_on for turns in ranks)
    ranks[0].passes_begin()  # it waits for nobody
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    ranks[0].interrupted()
    ranks[1].passes_begin()


@needs_torch
def test_a_folder_that_takes_no_file_leaves_the_job_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file system that became read-only: even to remove a file is an error."""

    def refused(*_: object, **__: object) -> None:
        raise OSError("read-only file system")

    for name in ("write_bytes", "unlink"):
        monkeypatch.setattr(Path, name, refused)
    ranks = [turns_of(tmp_path, rank, 2, monkeypatch) for rank in (0, 1)]
    for number in range(2, IN_TURNS[0] + 1):
        for turns in ranks:
            turns.step_ended(number, is_kept_apart=False, more_ns=0)
            assert not turns.is_on


@needs_torch
def test_a_rank_that_waits_in_vain_ends_the_turns_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the first rank never computes, as if it had died or had met another branch."""
    monkeypatch.setattr("fullwire.recorder.inside.probes.AT_LEAST_S", 0.05)
    ranks = [turns_of(tmp_path, rank, 2, monkeypatch) for rank in (0, 1)]
    for number in range(2, IN_TURNS[0] + 1):
        for turns in ranks:
            turns.step_ended(number, is_kept_apart=False, more_ns=0)
    assert all(turns.is_on for turns in ranks)
    ranks[1].passes_begin()
    for number in range(IN_TURNS[0] + 1, IN_TURNS[1] + 1):
        for turns in ranks:
            turns.step_ended(number, is_kept_apart=True, more_ns=0)
            assert not turns.is_on


@needs_torch
def test_our_transport_is_probed_as_well(tmp_path: Path) -> None:
    run, _ = probed(tmp_path, "on_fullwire.py")
    assert span_count(run, "host", "probe") == RANKS * len(FIRST)


@needs_torch
def test_shards_are_probed_and_their_weights_are_the_same(tmp_path: Path) -> None:
    run, weights = probed(tmp_path, "sharded.py")
    assert weights == digests(together(RANKS, "sharded.py"))
    assert span_count(run, "host", "probe") > 0


@needs_torch
def test_a_codec_sends_from_its_own_thread_and_its_loss_is_in_the_run(tmp_path: Path) -> None:
    run, weights = probed(tmp_path, "ddp.py", "int8")
    assert weights == digests_of_hooks(str(STEPS))["int8"]
    assert span_count(run, "host", "probe") == 0  # Its thread sends beside the backward pass.
    assert run.facts.hook == "fullwire.compress(int8)"
    assert run.facts.compression_error is not None
    assert 1e-6 < run.facts.compression_error < 1e-3
    assert run.facts.compression_unsent_norm == run.facts.compression_widened == 0
    assert run.facts.compression_stopped is None
    step = typical_step(run)
    assert step.sent_share == pytest.approx(1 / 3.938, rel=0.1)  # Parts are whole blocks.
    assert not step.others.op  # Both collectives of a bucket belong to it.
    assert step.packing_ns > 0
    # The transfers of which an exchange is made on Gloo are neither noted nor missed.
    noted = run.collectives
    assert set(noted.op.tolist()) == {"alltoall", "allgather", "broadcast", "allreduce", "barrier"}
    exchanged, gathered = (noted.bytes[noted.op == op].tolist() for op in ("alltoall", "allgather"))
    # Before the first bucket, each rank gathers the codecs of all in 512 bytes.
    assert exchanged == [size for size in gathered if size != 512]
    assert gathered.count(512) == RANKS
    assert not [gap for gap in run.missing if "not seen" in gap]


@needs_torch
def test_a_hook_in_cpp_is_left_alone(tmp_path: Path) -> None:
    run, _ = probed(tmp_path, "ddp.py", "builtin-fp16")
    assert span_count(run, "host", "probe") == 0
    assert span_count(run, "host", "step") == RANKS * STEPS


@needs_torch
def test_a_run_knows_how_long_computing_had_no_processor(plain: tuple[Run, set[str]]) -> None:
    run, _ = plain
    facts = run.facts
    for told in (
        *(facts.run_delay_s, facts.run_s),
        *(facts.probe_run_delay_s, facts.probe_compute_s),
    ):
        assert told is not None
        assert [rank for rank, _ in told] == [0, 1]
        assert all(0 <= delay_s < 10 for _, delay_s in told)


@needs_torch
def test_a_run_knows_how_long_issuing_sums_takes_beyond_its_turns(
    plain: tuple[Run, set[str]],
) -> None:
    run, _ = plain
    told = run.facts.turns_lack_s
    assert told is not None
    assert [rank for rank, _ in told] == [0, 1]
    assert all(0 < abs(lack_s) < 0.01 for _, lack_s in told)  # 0 where none was timed


@needs_torch
def test_sums_are_timed_in_backward_passes_only_and_once_each(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    probes = Probes(Journal(str(tmp_path)))
    probes.is_timed = True
    works: list[Any] = []

    def spin_ms(length_ms: float) -> None:
        until_ns = time.thread_time_ns() + length_ms * 1e6
        while time.thread_time_ns() < until_ns:
            pass

    def send(through: int) -> Any:
        """Send through so many groups, each of which is watched."""
        if through:
            return watched(through - 1)
        spin_ms(5)
        return works[-1]

    def watched(through: int) -> Any:
        return probes.timed(send, through) if probes.is_timing() else send(through)

    works.append(SimpleNamespace(tells_times=True, get_future=lambda: spin_ms(2)))
    watched(0)
    assert not probes._issues_ns  # in no backward pass
    leaf = torch.zeros(2, requires_grad=True)
    leaf.register_hook(lambda gradient: (watched(2), gradient)[1])
    leaf.sum().backward()
    assert not probes._holds_ns
    [issue_ns] = probes._issues_ns
    assert 7e6 <= issue_ns < 12e6  # with the Future, which Python makes
    works.append(_Held(probes, lambda: None, ([torch.zeros(1)],)))
    leaf.sum().backward()
    leaf.sum().backward()
    assert (len(probes._issues_ns), len(probes._holds_ns)) == (1, 2)
    assert probes._more_to_issue_ns() == 2 * issue_ns - sum(probes._holds_ns)
    probes._issues_ns = []
    assert probes._more_to_issue_ns() == 0  # no sum was issued in a step before


@needs_torch
def test_sums_are_timed_in_turns_and_in_a_step_before_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [turns_of(tmp_path, rank, 2, monkeypatch) for rank in (0, 1)]
    timed = []
    for number in range(2, 24):
        for rank, turns in enumerate(ranks):
            turns.step_ended(number, is_kept_apart=False, more_ns=0)
            if rank == 0 and (turns.is_on or turns.are_next):
                timed.append(number)
            turns.is_on = False  # as no rank waits here
    assert timed == [4, 5, 6, 9, 10, 16, 17]  # the fifth is a probe, and not timed


@pytest.mark.parametrize("kinds", [2, 3, 4])
def test_steps_that_take_turns_have_probes_of_each_kind(kinds: int) -> None:
    assert {step % kinds for step in FIRST} == set(range(kinds))
    assert {step * THEN_EVERY % kinds for step in range(kinds)} == set(range(kinds))
    assert all(later - step > 1 for step, later in pairwise(FIRST))
    assert max(FIRST) < 24 - 1
