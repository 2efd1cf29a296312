"""Recording real jobs: the jobs stay as they are, and the run shows the real events."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fullwire.answers.explain import explain
from fullwire.errors import UsageError
from fullwire.findings.between import CheckpointsTook, EvaluationsTook
from fullwire.importers import read
from fullwire.recorder.inside import after_import
from fullwire.recorder.inside.journal import (
    HEADER_BYTES,
    MOST_PASSES,
    MOST_WAITING,
    Journal,
    Note,
)
from fullwire.recorder.journals import read_journals
from fullwire.recorder.record import join, record
from fullwire.run.gaps import NOT_SEEN
from fullwire.run.run import Run
from fullwire.run.store import read_parts, read_run, write
from fullwire.timeline.summary import summarised
from tests.builders import a_process
from tests.conftest import Cli
from tests.jobs_by_hand import a_trained_job
from tests.lab.test_lab import children_of, eventually

JOBS = Path(__file__).parents[1] / "jobs"
UNCOMPILED = str(JOBS / "uncompiled.py")
GRADIENT_BYTES = 6 * (64 * 64 + 64) * 4  # of the model in jobs/ddp.py
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="recording a job needs torch, which is not installed: pip install torch",
)
NAMESPACES_ARE_NOT_PERMITTED = (
    "needs a mount namespace: as root, or with kernel.unprivileged_userns_clone=1"
)


def namespaces_are_permitted() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def recorded(
    tmp_path: Path, *command: str, status: int = 0
) -> tuple[Run, subprocess.CompletedProcess[bytes]]:
    """Record a command with the real command line, and open its run."""
    place = tmp_path / "job.run"
    fullwire = [sys.executable, "-m", "fullwire", "record", "-o", str(place), "--"]
    done = subprocess.run([*fullwire, *command], capture_output=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr.decode()
    assert not (tmp_path / "job.run.recording").exists()
    return read_run(place), done


def together(workers: int, job: str, *arguments: str, compiler: bool = False) -> list[str]:
    """Start `workers` processes of a job, which finds torch's compiler only if it needs it."""
    script = [str(JOBS / job)] if compiler else [UNCOMPILED, str(JOBS / job)]
    return [sys.executable, str(JOBS / "together.py"), str(workers), *script, *arguments]


def solo(mode: str) -> list[str]:
    return [sys.executable, UNCOMPILED, str(JOBS / "solo.py"), mode]


def digests(command: list[str]) -> set[str]:
    for _ in range(3):  # torch alone sometimes aborts at the end of a Gloo job
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != signal.SIGABRT:
            break
    assert done.returncode == 0, done.stderr
    return weights(done.stdout)


HOOKS = ("none", "fp16", "builtin-fp16", "powersgd", "int8", "buffers")


@functools.cache
def digests_of_hooks(steps: str) -> dict[str, set[str]]:
    """Return what two unrecorded ranks of ddp.py print after so many steps with each hook."""
    told: dict[str, set[str]] = {hook: set() for hook in HOOKS}
    for line in digests(["env", f"STEPS={steps}", *together(2, "ddp.py", *HOOKS)]):
        hook, digest = line.split()
        told[hook].add(digest)
    return told


def weights(printed: str) -> set[str]:
    """Return the digests that the ranks printed: one, if they agree."""
    return set(printed.splitlines())


def span_count(run: Run, lane: str, name: str) -> int:
    return int(((run.spans.lane == lane) & (run.spans.name == name)).sum())


def steps_in_order(run: Run, rank: int) -> tuple[np.ndarray, np.ndarray]:
    marks = (run.spans.rank == rank) & (run.spans.lane == "host") & (run.spans.name == "step")
    return run.spans.start_ns[marks], run.spans.end_ns[marks]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Record a DDP job of two workers once; return its run and its output."""
    place = tmp_path_factory.mktemp("ddp")
    _, done = recorded(place, *together(2, "ddp.py", compiler=True))
    return place / "job.run", done.stdout.decode()


@needs_torch
def test_a_job_that_ends_before_its_collectives_ends_as_it_would(tmp_path: Path) -> None:
    # Refuses another exit status than 0.
    run, _ = recorded(tmp_path, *together(2, "unfinished.py"))
    assert len(run.collectives) >= 2 * 3


SENDS_NOTHING = """
import sys, torch, torch.distributed as dist
if "alone" not in sys.argv:
    dist.init_process_group("gloo")
if "in stages" in sys.argv:
    import torch.distributed.pipelining
torch.set_num_threads(3 + int("differ" in sys.argv and dist.get_rank()))
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(5):
    weight.sum().backward()
    optimizer.step()
torch.set_num_threads(2)
torch.optim.SGD([weight], 0.1).step()
"""


@needs_torch
def test_a_job_that_sends_nothing_still_tells_its_back_end_and_its_torch(tmp_path: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text(SENDS_NOTHING)
    run, _ = recorded(tmp_path, *together(2, str(script)))
    version = importlib.metadata.version("torch")
    assert len(run.collectives) == 0
    assert (run.facts.workers, run.facts.backend) == (2, "gloo")
    assert version in str(run.facts.torch)
    assert run.facts.threads == 3
    (tmp_path / "job.run").rename(tmp_path / "silent.run")
    run, _ = recorded(tmp_path, *together(2, str(script), "differ"))
    assert run.facts.threads is None
    (tmp_path / "job.run").rename(tmp_path / "differ.run")
    run, _ = recorded(tmp_path, sys.executable, UNCOMPILED, str(script), "alone")
    assert (run.facts.backend, run.facts.torch is None) == (None, False)
    assert run.facts.pipelining is None
    (tmp_path / "job.run").rename(tmp_path / "alone.run")
    run, _ = recorded(tmp_path, sys.executable, str(script), "alone", "in stages")
    assert run.facts.pipelining == "torch"


LIVE_LINE = re.compile(rb"\r\x1b\[Kfullwire: (\d+) steps, lately [\d.]+ ms each\r")
STEPS_UNTIL_TOLD = """
import os, sys, time, torch
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], 0.1)
until = time.monotonic() + 60
while not os.path.exists(sys.argv[1]) and time.monotonic() < until:
    weight.sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""


@needs_torch
def test_on_a_terminal_one_line_says_how_the_job_goes_and_leaves_no_trace(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    fullwire = [sys.executable, "-m", "fullwire", "record", "-o", str(tmp_path / "job.run")]
    enough = tmp_path / "enough"
    script = tmp_path / "steps.py"
    script.write_text(STEPS_UNTIL_TOLD)
    command = [*fullwire, "--", sys.executable, UNCOMPILED, str(script), str(enough)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as job:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # a terminal whose other side has gone
            while piece := os.read(ours, 4096):
                shown += piece
                if len(set(LIVE_LINE.findall(shown))) >= 2:
                    enough.touch()
        assert job.stdout is not None
        assert job.stdout.read() == b""
    os.close(ours)
    lines = LIVE_LINE.findall(shown)
    assert len(lines) >= 2, shown
    assert int(lines[0]) < int(lines[-1])
    after = shown.rpartition(b"each\r")[2]
    assert after.startswith(b"\r\x1b[K")  # erased before any other output


@needs_torch
def test_ddp_trains_to_the_same_bits_and_every_row_makes_sense(ddp: tuple[Path, str]) -> None:
    run, printed = read_run(ddp[0]), ddp[1]
    assert weights(printed) == digests_of_hooks("5")["none"]
    assert run.complete
    assert run.provenance.origin == "measured"
    assert run.facts.workers == 2
    assert run.facts.backend == "gloo"
    assert run.facts.buckets == "ddp:52428B"
    for rank in (0, 1):
        check_rank(run, rank, steps=5)


def check_rank(run: Run, rank: int, steps: int) -> None:
    start, end = steps_in_order(run, rank)
    assert len(start) == steps
    assert (start[1:] == end[:-1]).all()
    collectives = run.collectives.rows(run.collectives.rank == rank)
    assert (collectives.issue_ns <= collectives.start_ns).all()
    assert (collectives.start_ns <= collectives.end_ns).all()
    for step in range(steps):
        check_step(run, rank, step)


def check_step(run: Run, rank: int, step: int) -> None:
    gradients = run.gradients.rows((run.gradients.rank == rank) & (run.gradients.step == step))
    assert gradients.bytes.sum() == GRADIENT_BYTES
    assert (np.diff(gradients.ready_ns) >= 0).all()
    assert gradients.order.tolist() == list(range(12))
    here = (run.collectives.rank == rank) & (run.collectives.step == step)
    sent = run.collectives.rows(here & (run.collectives.op == "allreduce"))
    assert sent.bytes.sum() == GRADIENT_BYTES
    assert sent.issue_ns.min() >= gradients.ready_ns[0]
    for name in ("forward", "backward", "optimizer"):
        chosen = (run.spans.rank == rank) & (run.spans.step == step) & (run.spans.name == name)
        assert chosen.sum() == 1, name


@needs_torch
def test_a_recorded_job_can_be_shown_compared_and_replayed(cli: Cli, ddp: tuple[Path, str]) -> None:
    place, _ = ddp
    assert "complete" in cli("show", place).stdout
    assert cli("compare", place, place).returncode == 0
    told = cli("whatif", place, "--bandwidth", "1Gbps", "-v").stdout
    assert "T1, the step of one worker, is" in " ".join(told.split())


@needs_torch
@pytest.mark.parametrize(("workers", "hook"), [(3, "fp16"), (2, "builtin-fp16")])
def test_workers_with_a_hook_of_their_own_train_to_the_same_bits(
    tmp_path: Path, workers: int, hook: str
) -> None:
    job = together(workers, "ddp.py", hook)
    run, done = recorded(tmp_path, *job)
    plain = digests_of_hooks("5")[hook] if workers == 2 else digests(job)
    assert weights(done.stdout.decode()) == plain
    assert "FP16_COMPRESS" in (run.facts.hook or "").upper()
    sent = run.collectives.rows((run.collectives.step == 4) & (run.collectives.rank == 1))
    assert set(sent.dtype) == {"float16"}
    assert sent.bytes.sum() == GRADIENT_BYTES // 2
    assert run.complete


@needs_torch
def test_a_hook_with_several_collectives_trains_to_the_same_bits(tmp_path: Path) -> None:
    run, done = recorded(tmp_path, *together(2, "ddp.py", "powersgd"))
    assert weights(done.stdout.decode()) == digests_of_hooks("5")["powersgd"]
    assert span_count(run, "host", "codec") > 2 * 5
    assert run.complete


@needs_torch
@pytest.mark.parametrize(
    ("loaded", "framework"),
    [
        (["transformers.trainer"], "transformers"),
        (["accelerate.state", "used"], "accelerate"),
        (["accelerate.state"], None),  # as a model of transformers loads it
        (["json"], None),
    ],
)
def test_the_framework_that_runs_the_job_is_noted(
    tmp_path: Path, loaded: list[str], framework: str | None
) -> None:
    run, _ = recorded(tmp_path, *together(1, "framework.py", *loaded))
    assert run.facts.framework == framework


@needs_torch
def test_a_compiled_model_trains_as_it_would(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path, *together(1, "ddp.py", "compiled", compiler=True))
    assert run.complete
    check_rank(run, 0, steps=5)


@needs_torch
def test_buffers_that_a_step_begins_with_are_seen_and_train_to_the_same_bits(
    tmp_path: Path,
) -> None:
    run, done = recorded(tmp_path, *together(2, "ddp.py", "buffers"))
    assert weights(done.stdout.decode()) == digests_of_hooks("5")["buffers"]
    assert run.complete
    told = run.collectives.rows(run.collectives.op == "broadcast")
    for dtype, size in (("float32", 2 * 64 * 4), ("int64", 8)):
        seen = told.rows(told.dtype == dtype)
        assert set(seen.bytes) == {size}
        assert sorted(zip(seen.rank, seen.step, strict=True)) == [
            (rank, step) for rank in (0, 1) for step in range(5)
        ]


@needs_torch
def test_sparse_gradients_are_recorded_and_train_to_the_same_bits(tmp_path: Path) -> None:
    run, done = recorded(tmp_path, *together(2, "ddp.py", "sparse"))
    assert weights(done.stdout.decode()) == digests(together(2, "ddp.py", "sparse"))
    assert run.complete, run.missing
    sums = run.collectives.rows(run.collectives.op == "allreduce")
    embedding = sums.rows(sums.bytes == 128 * 64 * 4)  # the whole one, whatever rows were used
    assert sorted(zip(embedding.rank, embedding.step, strict=True)) == [
        (rank, step) for rank in (0, 1) for step in range(5)
    ]
    assert len(sums) > len(embedding)


@needs_torch
@pytest.mark.parametrize("way", ["seen", "unseen"])
def test_collectives_that_cpp_issues_are_seen_or_else_counted(tmp_path: Path, way: str) -> None:
    run, _ = recorded(tmp_path, *together(1, "functional.py", way))
    sums = run.collectives.rows(run.collectives.op == "allreduce")
    if way == "seen":
        assert run.complete
        assert len(sums) == 10 + 10  # by hand, and by C++
        waits = run.spans.rows((run.spans.lane == "communication") & (run.spans.step == 4))
        assert len(waits) == 2 + 2  # C++ waits for its own
    else:
        assert len(sums) == 10
        [sentence] = run.missing
        found = re.fullmatch(
            rf"rank 0: its groups counted (\d+) collectives or messages that were {NOT_SEEN}",
            sentence,
        )
        assert found is not None
        assert 4 <= int(found[1]) <= 8  # of five steps, but not the first, and the last may be late


@needs_torch
def test_exchanges_of_an_applied_codec_are_seen_and_no_message_of_them(tmp_path: Path) -> None:
    apply = [sys.executable, "-m", "fullwire", "apply", "compression:int8", "--"]
    run, done = recorded(tmp_path, *apply, *together(2, "ddp.py"))
    assert weights(done.stdout.decode()) == digests_of_hooks("5")["int8"]
    assert run.complete, run.missing
    in_step = run.collectives.rows((run.collectives.rank == 0) & (run.collectives.step == 4))
    exchanged, gathered = (in_step.bytes[in_step.op == op] for op in ("alltoall", "allgather"))
    assert len(exchanged) > 1
    assert exchanged.tolist() == gathered.tolist()
    # 64 x 64 numbers of each of six layers have one byte each, beside their scales.
    assert 6 * 64 * 64 < exchanged.sum() < 1.1 * 6 * 64 * 65


@pytest.mark.alone  # a busy machine makes short pieces of a hook long
@needs_torch
def test_what_a_hook_works_is_codec_and_what_it_waits_for_is_not(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path, *together(2, "ddp.py", "slow"))
    for rank in (0, 1):
        in_last = (run.spans.rank == rank) & (run.spans.step == 4)
        codec = run.spans.rows(in_last & (run.spans.name == "codec"))
        sent = run.collectives.rows(
            (run.collectives.rank == rank)
            & (run.collectives.step == 4)
            & (run.collectives.op == "allreduce")
        )
        assert len(sent) > 1
        on_host, later = (codec.rows(codec.lane == lane) for lane in ("host", "communication"))
        lengths_ns = on_host.end_ns - on_host.start_ns
        # Packing ends before a sum is sent. The rest of the hook is short, unless others hold the
        # processor, or unless the sum is there at once: then it unpacks.
        ends_ns = [on_host.end_ns[on_host.end_ns <= at_ns].max() for at_ns in sent.issue_ns]
        is_packing = np.isin(on_host.end_ns, ends_ns)
        assert is_packing.sum() == len(sent)
        assert (lengths_ns[is_packing] > 19_000_000).all()
        assert (later.end_ns - later.start_ns > 9_000_000).all()
        at_once = (lengths_ns[~is_packing] > 9_000_000).sum()
        assert len(later) + at_once == len(sent)
        for issue_ns, end_ns in zip(sent.issue_ns, sent.end_ns, strict=True):
            assert not ((codec.start_ns < issue_ns) & (codec.end_ns > end_ns)).any()


@needs_torch
def test_transfers_between_two_ranks_are_told_alike_by_both(tmp_path: Path) -> None:
    run, done = recorded(tmp_path, *together(2, "transfers.py"))
    assert sorted(done.stdout.decode().split()) == ["0.0", "1000.0"]
    assert run.complete
    seen = {
        (op, group.rpartition(" ")[2], rank, size)
        for op, group, rank, size in zip(
            run.collectives.op,
            run.collectives.group,
            run.collectives.rank.tolist(),
            run.collectives.bytes.tolist(),
            strict=True,
        )
        if op in ("send", "recv")
    }
    assert seen == {
        ("send", "0>1", 0, 4000),
        ("recv", "0>1", 1, 4000),
        ("send", "1>0", 1, 4000),
        ("recv", "1>0", 0, 4000),
        ("recv", "any>0", 0, 4000),
    }
    for end in (0, 1):  # both count the messages of a pair alike
        to_one = run.collectives.rank == end
        to_one &= np.array([group.endswith("0>1") for group in run.collectives.group])
        assert run.collectives.sequence[to_one].tolist() == list(range(2 * 3))


@needs_torch
def test_fsdp_tensor_parallel_and_reductions_by_hand_train_to_the_same_bits(tmp_path: Path) -> None:
    run, done = recorded(tmp_path, *together(2, "sharded.py", compiler=True))
    assert weights(done.stdout.decode()) == digests(together(2, "sharded.py"))
    assert run.complete
    by_hand = run.collectives.rows((run.collectives.op == "allreduce") & (run.collectives.step < 3))
    assert by_hand.bytes[by_hand.step >= 0].sum() == 2 * 3 * 2 * (32 * 32 + 32) * 4
    assert {"allgather", "reducescatter"} <= set(run.collectives.op)
    assert len(set(run.collectives.group)) >= 2
    assert span_count(run, "host", "step") == 2 * 9
    whole, part = [128, 128, 4096, 4096], [64, 128, 2048, 2048]
    for first, made in ((0, whole), (3, whole), (6, part)):  # FSDP gathers, tensor parallelism not
        mine = run.gradients.rows((run.gradients.rank == 1) & (run.gradients.step == first + 1))
        assert sorted(mine.bytes.tolist()) == made
    by_tensors = run.collectives.rows(run.collectives.step > 6)  # issued by C++
    assert set(by_tensors.op) == {"allreduce"}
    assert by_tensors.bytes.tolist() == 2 * 2 * [4 * 32 * 4]  # the output of a split layer


@needs_torch
def test_ranks_that_are_forked_off_are_recorded_to_their_end_and_nobody_else(
    tmp_path: Path,
) -> None:
    run, _ = recorded(tmp_path, sys.executable, str(JOBS / "forked.py"))
    assert run.missing == ()
    assert run.facts.workers == 2
    assert [len(steps_in_order(run, rank)[0]) for rank in (0, 1)] == [6, 6]
    assert run.facts.recorder_s is not None


@needs_torch
def test_after_kill_9_of_a_rank_the_rest_opens_and_says_so(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path, *together(2, "killed.py"), status=9)
    assert any("rank 1" in sentence and "killed" in sentence for sentence in run.missing)
    for rank in (0, 1):
        assert 20 <= len(steps_in_order(run, rank)[0]) <= 40


@needs_torch
def test_of_a_job_that_ends_hard_output_status_and_all_steps_are_kept(tmp_path: Path) -> None:
    run, done = recorded(tmp_path, *solo("hard"))
    assert done.stdout == b"done\x00\xff\r\n"
    assert run.complete
    assert run.facts.workers == 1
    assert span_count(run, "host", "step") == 6
    waits = run.spans.rows((run.spans.lane == "input") & (run.spans.step >= 0))
    assert waits.step.tolist() == list(range(6))


@needs_torch
def test_a_step_is_a_round_of_all_optimizers_and_a_failing_job_keeps_its_status(
    tmp_path: Path,
) -> None:
    run, _ = recorded(tmp_path, *solo("optimizers"), status=7)
    assert run.facts.exit_status == 7
    assert span_count(run, "host", "step") == 6
    assert span_count(run, "compute", "optimizer") == 12


@needs_torch
def test_accumulated_gradients_make_one_step(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path, *solo("accumulation"))
    assert span_count(run, "host", "step") == 6
    assert span_count(run, "compute", "backward") == 6
    assert span_count(run, "compute", "earlier backward") == 12
    assert len(run.gradients) == 6 * 2


@needs_torch
@pytest.mark.parametrize("mode", ["evaluation", "evaluation-by-train", "evaluation-of-frozen"])
def test_an_evaluation_belongs_to_no_step(tmp_path: Path, mode: str) -> None:
    run, _ = recorded(tmp_path, *solo(mode))
    start, end = steps_in_order(run, 0)
    assert len(start) == 6
    assert start[3] - end[2] > 25_000_000  # ten thousand forwards, beside which a pause is short
    assert (start[[1, 2, 4, 5]] == end[[0, 1, 3, 4]]).all()
    [note] = (note for note in explain(run).notes if isinstance(note, EvaluationsTook))
    assert note.count == 1
    assert note.total_s == pytest.approx((start[3] - end[2]) * 1e-9, rel=0.1)


@needs_torch
@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_samples_that_a_gan_makes_without_gradients_belong_to_its_step(
    tmp_path: Path, first: str
) -> None:
    """Formerly the step began after them, and the generator's update was in no step."""
    job = [sys.executable, UNCOMPILED, str(JOBS / "gan.py"), first]
    run, _ = recorded(tmp_path, *job)
    start, end = steps_in_order(run, 0)
    assert len(start) == 9
    assert (start[1:] == end[:-1]).all()
    assert span_count(run, "compute", "earlier backward") == span_count(run, "compute", "backward")
    made = run.spans.rows(run.spans.name == "evaluation")
    assert sorted(made.step) == list(range(9))
    assert not any(isinstance(note, EvaluationsTook) for note in explain(run).notes)


@needs_torch
def test_a_checkpoint_is_named_with_its_time(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path, *solo("checkpoint"))
    start, end = steps_in_order(run, 0)
    [note] = (note for note in explain(run).notes if isinstance(note, CheckpointsTook))
    assert note.count == 1
    assert note.within_s == note.total_s  # the step after the optimizer's waits for it
    assert 0.005 < note.total_s < (end[3] - start[3]) * 1e-9


@needs_torch
@pytest.mark.parametrize("mode", ["full-disk", "broken"])
def test_when_the_recorder_fails_the_job_goes_on_and_the_run_says_so(
    tmp_path: Path, mode: str
) -> None:
    run, done = recorded(tmp_path, *solo(mode))
    assert done.stdout == b"done\x00\xff\r\n"
    assert not run.complete


@needs_torch
def test_finders_of_old_do_not_stop_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:  # as zipimport and Python 2's hooks were
        def find_module(self, name: str, path: object = None) -> None:
            raise AssertionError

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    loaded: list[str] = []
    after_import("colorsys", lambda: loaded.append("colorsys"))
    importlib.import_module("colorsys")
    assert loaded == ["colorsys"]


def test_several_parts_may_wait_for_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the recorder and a trial do for checkpoints: each asked the other for ever."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    loaded: list[int] = []
    for number in range(3):
        after_import("colorsys", functools.partial(loaded.append, number))
    importlib.import_module("colorsys")
    assert sorted(loaded) == [0, 1, 2]


def test_a_job_that_never_ends_a_step_leaves_a_run_that_says_so(cli: Cli, tmp_path: Path) -> None:
    run, _ = recorded(tmp_path, *solo("no-step"))
    assert run.missing == ("rank 0: its torch optimizers took no step",)
    assert "took no step" in cli("show", tmp_path / "job.run").stdout


@needs_torch
@pytest.mark.parametrize("whom", ["launcher", "everything"])
def test_after_kill_9_what_was_recorded_can_be_joined(tmp_path: Path, whom: str) -> None:
    place = tmp_path / "job.run"
    fullwire = [sys.executable, "-m", "fullwire", "record", "-o", str(place), "--"]
    job = solo("endless" if whom == "everything" else "plain")
    with subprocess.Popen([*fullwire, *job], stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None
        if whom == "everything":
            process.stdout.readline()  # most of thirty steps are written
            os.killpg(process.pid, signal.SIGKILL)
        else:
            assert eventually(lambda: bool(children_of(process.pid)))  # the job has been started
            process.kill()
        process.stdout.read()  # until all processes of the job have ended
    run = join([tmp_path / "job.run.recording"], place).run
    assert span_count(run, "host", "step") >= 6
    killed = "rank 0: its process ended without closing its recording (was it killed?)"
    if whom == "launcher":
        assert run.missing == ()
    else:
        assert run.missing[0] == killed
        assert all("sampler ended before the job" in each for each in run.missing[1:])


@needs_torch
@pytest.mark.skipif(not namespaces_are_permitted(), reason=NAMESPACES_ARE_NOT_PERMITTED)
def test_on_a_full_disk_the_job_goes_on_and_what_was_written_can_be_joined(
    cli: Cli, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    fullwire = f"{sys.executable} -m fullwire"
    script = f"""
        mount -t tmpfs -o size=48k none {small}
        {fullwire} record -o {small}/job.run -- {" ".join(solo("long"))}
        echo status $?
        {fullwire} join {small}/job.run.recording -o {tmp_path}/job.run
    """
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.endswith(b"done\x00\xff\r\nstatus 2\n")
    assert b"No space left on device; the recording is in" in done.stderr
    run = read_run(tmp_path / "job.run")
    assert span_count(run, "host", "step") > 10
    assert any("its recorder failed and the job went on" in each for each in run.missing)


@pytest.mark.skipif(not namespaces_are_permitted(), reason=NAMESPACES_ARE_NOT_PERMITTED)
def test_a_job_that_fails_on_a_full_disk_ends_with_its_own_status(tmp_path: Path) -> None:
    fullwire = f"{sys.executable} -m fullwire"
    script = f"""
        mount -t tmpfs -o size=48k none {tmp_path}
        {fullwire} record -o {tmp_path}/x.run -- sh -c "yes > {tmp_path}/all; exit 7"
    """
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)
    assert done.returncode == 7
    assert "No space left on device; the recording is in" in done.stderr


@needs_torch
@pytest.mark.parametrize("gap_s", [0.02, 0.3, 1.0])
def test_after_ctrl_c_twice_what_was_recorded_opens(tmp_path: Path, gap_s: float) -> None:
    """As in a terminal: the job and its recorder both get the signal, at any moment of the end."""
    place = tmp_path / "job.run"
    fullwire = [sys.executable, "-m", "fullwire", "record", "-o", str(place), "--"]
    # The job may print two tracebacks, the second while it handles the first: it writes elsewhere.
    job = ["sh", "-c", 'exec "$@" 2> "$0"', str(tmp_path / "job.said"), *solo("endless")]
    pipe = subprocess.PIPE
    with subprocess.Popen([*fullwire, *job], stdout=pipe, stderr=pipe, process_group=0) as process:
        assert process.stdout is not None
        process.stdout.readline()  # most of thirty steps are written
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(gap_s)
        with contextlib.suppress(ProcessLookupError):  # all of them may have ended
            os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in said
    if not place.exists():
        join([tmp_path / "job.run.recording"], place)
    assert span_count(read_run(place), "host", "step") >= 6


def test_who_is_interrupted_while_making_the_run_is_told_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("fullwire.recorder.record.assemble", interrupted)
    with pytest.raises(UsageError, match="interrupted before a run was made; the") as told:
        record(["true"], tmp_path / "job.run")
    assert told.value.exit_status == 130
    assert [each.name for each in tmp_path.iterdir()] == ["job.run.recording"]


@pytest.mark.parametrize("status", [0, 5])
def test_a_part_ends_with_its_job_s_status_where_its_end_cannot_be_noted(
    status: int, cli: Cli, tmp_path: Path
) -> None:
    left = tmp_path / "x.run.recording"
    # The sampler may just begin its file there.
    command = ["sh", "-c", f"until rm -rf {left} 2> {os.devnull}; do :; done; exit {status}"]
    done = cli("record", "--part", "-o", tmp_path / "x.run", "--", *command)
    assert done.returncode == status
    assert "how this part ended cannot be noted: No such file or directory" in done.stderr
    assert done.stderr.count("\n") == 1


def test_work_within_work_of_the_recorder_counts_once(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    before_ns = time.thread_time_ns()
    outer = journal.starts_work()
    inner = journal.starts_work()
    sum(range(100_000))
    within_ns = time.thread_time_ns() - before_ns
    journal.ends_work(inner)
    assert journal.notes.spent_ns > 0
    sum(range(100_000))
    journal.ends_work(outer)
    assert within_ns < journal.notes.spent_ns <= time.thread_time_ns() - before_ns


@pytest.fixture(params=["native", "python"])
def hooks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that the test starts have the hooks in C++, or those in Python."""
    found = importlib.util.find_spec("fullwire._hooks")
    assert found is not None
    is_native = request.param == "native"
    monkeypatch.setenv("FULLWIRE_HOOKS", str(found.origin) if is_native else "")


def run_with_collectives(job: str, directory: Path) -> None:
    """Run statements beside a journal and the watch of its collectives, in a process of its own."""
    before = (
        "import os, sys\n"
        "from fullwire.recorder.inside.clock import Clock\n"
        "from fullwire.recorder.inside.collectives import Collectives, when_done\n"
        "from fullwire.recorder.inside.journal import Journal, Note\n"
        "from fullwire.recorder.inside.processors import HookWork\n"
        "journal = Journal(sys.argv[1])\n"
        "collectives = Collectives(journal, Clock(journal), HookWork(journal), None)\n"
        "is_native = type(collectives.buckets).__module__ == 'fullwire._hooks'\n"
        "assert is_native == bool(os.environ.get('FULLWIRE_HOOKS'))\n"
        "ended, settle = collectives.buckets.ended, collectives.buckets.settle\n"
        "NEVER_NS = 2**63 - 1\n"
    )
    command = [sys.executable, "-c", before + job, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@needs_torch
@pytest.mark.usefixtures("hooks")
def test_of_two_buckets_the_one_that_failed_has_no_end(tmp_path: Path) -> None:
    job = (
        "import torch\n"
        "good, bad = torch.futures.Future(), torch.futures.Future()\n"
        "good.set_result([])\n"
        "bad.set_exception(ValueError('a rank died'))\n"
        "ended(0, 0, 0, bad)\n"
        "ended(1, 0, 0, good)\n"
        "assert not journal.notes.waiting\n"
        "settle(NEVER_NS)\n"
        "assert [note[:2] for note in journal.notes.rows()] == [(Note.END, 1)]\n"
    )
    run_with_collectives(job, tmp_path)


@needs_torch
@pytest.mark.usefixtures("hooks")
def test_no_bucket_of_a_pass_that_went_well_is_asked_whether_it_failed(tmp_path: Path) -> None:
    """DDP has asked each of them: a question takes 5 us, with caches full of the job's data."""
    job = (
        "import threading\n"
        "class Asked:\n"
        "    def value(self): raise AssertionError('DDP knows')\n"
        "here = threading.get_ident()\n"
        "ended(0, 1000, here, Asked())\n"
        "settle(1000)\n"
        "ended(1, 2000, here, Asked())\n"
        "settle(NEVER_NS)\n"
        "assert [note[:2] for note in journal.notes.rows()] == [(Note.END, 0)]\n"
    )
    run_with_collectives(job, tmp_path)


@needs_torch
@pytest.mark.usefixtures("hooks")
def test_a_bucket_that_failed_after_its_pass_or_beside_it_has_no_end(tmp_path: Path) -> None:
    """A pass that goes well next, or on another thread, knows nothing of it."""
    job = (
        "import threading, torch\n"
        "good, bad = torch.futures.Future(), torch.futures.Future()\n"
        "good.set_result([])\n"
        "bad.set_exception(ValueError('a rank died'))\n"
        "here = threading.get_ident()\n"
        "settle(NEVER_NS)\n"
        "ended(0, 999, here, bad)\n"
        "ended(1, 999, here, good)\n"
        "ended(2, 1001, here + 1, bad)\n"
        "ended(3, 1001, here + 1, good)\n"
        "ended(4, 1002, here, good)\n"
        "settle(1000)\n"
        "assert [note[1] for note in journal.notes.rows()] == [1, 3, 4]\n"
    )
    run_with_collectives(job, tmp_path)


A_GROUP = (
    "import types, torch, torch.distributed as dist\n"
    "class Group:\n"
    "    name, true = 'of all', None\n"
    "done = torch.futures.Future()\n"
    "done.set_result([])\n"
    "Work = types.SimpleNamespace\n"
    "collectives._is_identified = True\n"
    "def buckets_that(send, describe=collectives._bucket):\n"
    "    return type(collectives.buckets)(\n"
    "        journal, HookWork(journal), None, send, Work, None, describe, None,\n"
    "        collectives._count, False)\n"
)


@needs_torch
@pytest.mark.usefixtures("hooks")
def test_the_bucket_of_a_later_model_is_not_taken_for_an_earlier_one(tmp_path: Path) -> None:
    """Torch frees a bucket's tensor with its model, and another may get its identity."""
    job = A_GROUP + (
        "buckets = buckets_that(lambda *_: Work(get_future=lambda: done))\n"
        "early, late = torch.zeros(4), torch.zeros(9)\n"
        "for tensor in (early, late, early):\n"
        "    buckets.allreduce(Group, [tensor])\n"
        "buckets.known[id(late)] = buckets.known[id(early)]\n"
        "buckets.allreduce(Group, [late])\n"
        "signatures = [note[3] for note in journal.notes.rows() if note[0] == Note.ISSUE]\n"
        "assert signatures == [0, 1, 0, 1], signatures\n"
        "sizes = [each['bytes'] for each in journal._definitions]\n"
        "assert sizes == [16, 36], sizes\n"
        "assert collectives._unseen.seen['of all'] == [4]\n"
        "buckets.settle(NEVER_NS)\n"
        "ends = [note[1] for note in journal.notes.rows() if note[0] == Note.END]\n"
        "assert ends == [0, 1, 2, 3], ends\n"
    )
    run_with_collectives(job, tmp_path)


@needs_torch
@pytest.mark.usefixtures("hooks")
def test_a_job_goes_on_where_its_buckets_cannot_be_noted(tmp_path: Path) -> None:
    job = A_GROUP + (
        "def full(tensor, group): raise MemoryError('full')\n"
        "work = Work(get_future=lambda: done)\n"
        "buckets = buckets_that(lambda *_: work, describe=full)\n"
        "assert buckets.allreduce(Group, [torch.zeros(4)]) is work\n"
        "assert not journal.is_open\n"
    )
    run_with_collectives(job, tmp_path)


@needs_torch
@pytest.mark.usefixtures("hooks")
def test_an_error_of_the_transport_is_the_jobs_and_leaves_no_note(tmp_path: Path) -> None:
    job = A_GROUP + (
        "def fails(*_): raise RuntimeError('a rank died')\n"
        "try:\n"
        "    buckets_that(fails).allreduce(Group, [torch.zeros(4)])\n"
        "except RuntimeError as error:\n"
        "    assert str(error) == 'a rank died'\n"
        "else:\n"
        "    raise AssertionError('no error')\n"
        "assert journal.is_open and not journal.notes.waiting\n"
    )
    run_with_collectives(job, tmp_path)


@needs_torch
@pytest.mark.usefixtures("hooks")
def test_a_hundred_thousand_buckets_leave_nothing_behind(tmp_path: Path) -> None:
    job = A_GROUP + (
        "import gc, resource, sys\n"
        "buckets = buckets_that(lambda *_: Work(get_future=lambda: done))\n"
        "tensor, seen = torch.zeros(4), collectives._unseen.seen['of all']\n"
        "def some(count):\n"
        "    for _ in range(count):\n"
        "        buckets.allreduce(Group, [tensor])\n"
        "        buckets.settle(NEVER_NS)\n"
        "        journal.notes.take()\n"
        "    kept = (Group, tensor, done, buckets, journal, collectives._callbacks[0], seen)\n"
        "    return [sys.getrefcount(each) for each in kept]\n"
        "before, used_kb = some(1000), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert some(100_000) == before\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < used_kb + 2000\n"
    )
    run_with_collectives(job, tmp_path)


@needs_torch
def test_groups_are_asked_for_their_counts_less_and_less_often(tmp_path: Path) -> None:
    job = (
        "import time\n"
        "unseen, looks = collectives._unseen, set()\n"
        "for now_ns in range(10**12, 10**12 + 20 * 10**9, 10**7):\n"
        "    time.monotonic_ns = lambda: now_ns\n"
        "    unseen.step_ends()\n"
        "    looks.add(unseen._looked_ns)\n"
        "gaps_s = [(then - now) / 1e9 for now, then in zip(sorted(looks), sorted(looks)[1:])]\n"
        "assert 0.25 < gaps_s[0] <= 0.51 and 2 < gaps_s[-1] < 2.02, gaps_s\n"
    )
    run_with_collectives(job, tmp_path)


@needs_torch
@pytest.mark.parametrize(
    ("step_s", "job_s"), [(0.01, 0.5), (0.3, 2.4), (0.3, 3), (0.5, 10), (1.9, 60), (0.01, 60)]
)
def test_one_unseen_collective_a_step_is_told_whatever_came_after_the_last_look(
    tmp_path: Path, step_s: float, job_s: float
) -> None:
    steps = round(job_s / step_s)
    job = (
        "import time, torch.distributed as dist\n"
        "class Group:\n"
        "    group_name, issued = 'of all', 0\n"
        "    def _get_sequence_number_for_group(self): return self.issued\n"
        "group, now_ns = Group(), 10**12\n"
        "dist.is_initialized = lambda: True\n"
        "dist.distributed_c10d._world.pg_map[group] = None\n"
        "time.monotonic_ns = lambda: now_ns\n"
        f"for _ in range({steps}):\n"
        f"    now_ns, group.issued = now_ns + {round(step_s * 1e9)}, group.issued + 1\n"
        "    collectives._unseen.step_ends()\n"
        "del dist.distributed_c10d._world.pg_map[group]\n"
        "collectives._unseen.say()\n"
        "[said] = [it['sentence'] for it in journal._definitions if it['kind'] == 'missing']\n"
        "count = int(said.split()[3])\n"
        # At most an eighth of the job came after the last look, or a quarter of a second at first.
        f"assert {steps} * 7 / 8 - 0.25 / {step_s} - 2 <= count < {steps}, said\n"
    )
    run_with_collectives(job, tmp_path)


@needs_torch
@pytest.mark.usefixtures("hooks")
def test_a_program_ends_when_the_last_callback_is_freed(tmp_path: Path) -> None:
    """A thread of the transport frees it with Python's lock, which aborts while Python ends."""
    job = (
        "import functools, threading, time, torch\n"
        "for held in collectives._callbacks:\n"
        "    futures = [torch.futures.Future()]\n"
        "    when_done(futures[0], lambda future, held=held: None)\n"
        "    threading.Timer(0.3, lambda: futures.pop().set_result(None)).start()\n"
        "    collectives._await_the_last()\n"
        "    assert not futures\n"
        "del held\n"
        "began_s = time.monotonic()\n"
        "collectives._await_the_last()\n"
        "assert time.monotonic() - began_s < 0.3\n"
    )
    run_with_collectives(job, tmp_path)


def test_a_recording_cut_anywhere_opens_up_to_its_last_whole_block(tmp_path: Path) -> None:
    directory = tmp_path / "job.run.recording"
    directory.mkdir()
    a_process(directory, steps=4)
    [file] = directory.iterdir()
    whole = file.read_bytes()
    steps = []
    for length in range(HEADER_BYTES, len(whole) + 1, 37):
        file.write_bytes(whole[:length])
        run = join([directory], tmp_path / "job.run", replace=True).run
        assert "rank 1: nothing was recorded" in run.missing or not len(run.spans)
        steps.append(span_count(run, "host", "step"))
    assert steps == sorted(steps)
    assert steps[0] == 0
    assert steps[-1] >= 3


def test_who_asks_about_a_recording_is_told_what_makes_a_run_of_it(tmp_path: Path) -> None:
    directory = tmp_path / "job.run.recording"
    directory.mkdir()
    a_process(directory, steps=1)
    for place in (tmp_path / "job.run", directory):
        with pytest.raises(UsageError, match=f"`fullwire join {re.escape(str(directory))} -o"):
            read(place)


def test_of_a_killed_process_it_is_not_said_that_no_step_ended(tmp_path: Path) -> None:
    directory = tmp_path / "job.run.recording"
    directory.mkdir()
    a_process(directory, steps=0).close()
    journal = a_process(directory, steps=0, rank=1)
    journal.note(Note.ZERO_GRAD, 0, 1_000, 0)
    journal.write()
    missing = join([directory], tmp_path / "job.run").run.missing
    assert "rank 1: its process ended without closing its recording (was it killed?)" in missing
    assert not any("took no step" in sentence for sentence in missing)


def test_where_nothing_was_recorded_nothing_is_joined(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no recording")
    for place, said in ((tmp_path, "nothing was recorded here"), (tmp_path / "x", "there is none")):
        with pytest.raises(UsageError, match=said):
            join([place], tmp_path / "job.run")
    assert not (tmp_path / "job.run").exists()


def test_a_backward_pass_ends_with_its_last_gradient_and_not_with_waiting(tmp_path: Path) -> None:
    a_process(tmp_path, steps=2).close()
    run = join([tmp_path], tmp_path / "job.run").run
    backward = run.spans.rows(run.spans.name == "backward")
    assert (backward.end_ns - backward.start_ns).tolist() == [300, 300]
    assert summarised([run]).exposed_s == pytest.approx(140e-9)


def test_a_long_recording_is_made_into_a_run_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "job.run.recording"
    directory.mkdir()
    a_process(directory, steps=200).close()
    whole = join([directory], tmp_path / "whole.run").run
    monkeypatch.setattr("fullwire.recorder.assemble.PART_NOTES", 64)
    monkeypatch.setattr("fullwire.run.store.PIECE_ROWS", 100)
    place = join([directory], tmp_path / "parts.run").path
    parts = list(read_parts(place))
    assert len(parts) > 10
    for part in parts:
        assert set(part.gradients.step) <= set(part.spans.step)
    assert summarised(parts) == summarised([whole])
    for (name, ours), (_, theirs) in zip(read_run(place).tables(), whole.tables(), strict=True):
        for column, values in ours.columns().items():
            assert values.tolist() == theirs.columns()[column].tolist(), f"{name}.{column}"


def test_a_longer_recording_is_written_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_ns = now_ns = 10**12
    monkeypatch.setattr("time.monotonic_ns", lambda: now_ns)
    journal, written_ns = Journal(str(tmp_path)), [began_ns]
    for now_ns in range(began_ns, began_ns + 30 * 10**9, 10**7):  # a step each 10 ms
        journal.note(Note.ZERO_GRAD, 0, now_ns, 0)
        journal.write_if_due()
        if not journal.notes.waiting:
            written_ns.append(now_ns)
    gaps_ns = np.diff(written_ns)
    assert gaps_ns[0] == pytest.approx(0.25e9, rel=0.1)
    assert gaps_ns[-1] == pytest.approx(1e9, rel=0.1)
    # A signal takes at most the first wait and an eighth of the recording.
    assert (gaps_ns <= 0.27e9 + (np.array(written_ns[:-1]) - began_ns) / 8).all()


def test_journals_of_short_steps_are_deflated_though_writes_come_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write comes each 64 passes too: such a block has some 10 KB of notes, or 6 KB of passes."""
    now_ns = 10**12
    monkeypatch.setattr("time.monotonic_ns", lambda: now_ns)
    journal = Journal(str(tmp_path))
    for step in range(10 * MOST_PASSES):
        for note in range(12):
            journal.note(Note.ISSUE, step, now_ns + note * 1000, note)
        journal.notes.add_pass(0, now_ns, 0, [10_000 * number for number in range(20)])
        now_ns += 2_000_000
        journal.write_if_due()
    journal.close()
    [file] = tmp_path.iterdir()
    plain_bytes = 10 * MOST_PASSES * (12 * 13 + 20 * 4)
    assert file.stat().st_size < plain_bytes / 2


def test_notes_wait_in_bounded_memory(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    for number in range(10 * MOST_WAITING):
        journal.note(Note.GRADIENT, 0, number, 0)
        assert journal.notes.waiting < MOST_WAITING
    assert journal.noted == 10 * MOST_WAITING


@pytest.mark.parametrize("count", [1, 80, 5_000])
@pytest.mark.parametrize("last_after_ns", [2_000_000, 5_000_000_000])
def test_a_pass_told_at_once_reads_as_a_note_of_each_gradient(
    tmp_path: Path, count: int, last_after_ns: int
) -> None:
    after_ns = np.linspace(last_after_ns, 1, count).astype(int).tolist()
    journal = Journal(str(tmp_path))
    journal.notes.add_pass(3, 1_000, 0, after_ns)
    journal.note(Note.BACKWARD, 0, 1_000, last_after_ns)
    journal.close()
    [[recorded_again], _] = read_journals([tmp_path])
    first = next(recorded_again.blocks())  # before the notes that were taken by then
    assert first.of(Note.GRADIENT).tolist() == [
        [3 + place, 1_000 + each, 0] for place, each in enumerate(after_ns)
    ]
    assert recorded_again.counts == {Note.GRADIENT: count, Note.BACKWARD: 1}


def test_passes_wait_in_bounded_memory(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    for begun_ns in range(10 * MOST_PASSES):
        journal.notes.add_pass(0, begun_ns, 0, [1, 2])
        journal.write_if_due()
    journal.close()
    [[recorded_again], _] = read_journals([tmp_path])
    assert recorded_again.counts == {Note.GRADIENT: 20 * MOST_PASSES}
    assert len(list(recorded_again.blocks())) == 10


def test_a_job_that_closes_our_file_has_nothing_written_into_its_own(tmp_path: Path) -> None:
    """A daemon closes all inherited files, and its next file takes the number of ours."""
    journal = Journal(str(tmp_path))
    journal.note(Note.ZERO_GRAD, 0, 1000, 0)
    journal.write()
    os.close(journal._file)
    with (tmp_path / "own").open("wb") as own:
        assert own.fileno() == journal._file
        journal.note(Note.ZERO_GRAD, 1, 1001, 0)
        journal.close()
        assert os.fstat(own.fileno()).st_size == 0
    [[recorded_again], _] = read_journals([tmp_path])
    assert recorded_again.header["status"] == "ended"
    assert [notes.rows[:, 1].tolist() for notes in recorded_again.blocks()] == [[0], [1]]


def test_a_job_without_torch_is_left_alone(tmp_path: Path) -> None:
    code = "import sys; print('fullwire_inside.watch' in sys.modules); sys.exit(5)"
    run, done = recorded(tmp_path, sys.executable, "-c", code, status=5)
    assert done.stdout == b"False\n"
    [sentence] = run.missing
    assert "no process that the recorder saw trained or communicated with torch" in sentence


def test_a_job_whose_ranks_get_an_environment_of_their_own_is_not_said_to_train_nowhere(
    tmp_path: Path,
) -> None:
    """Its launcher is a Python that the recorder sees. The ranks are not."""
    rank = "import torch; torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], env={{}})"
    run, _ = recorded(tmp_path, sys.executable, "-c", code)
    [sentence] = run.missing
    assert "It sees no Python that starts with -I, -E or -S" in sentence
    assert "whose environment lacks the PYTHONPATH that `fullwire record` sets" in sentence


def test_a_job_that_the_recorder_cannot_enter_is_told_apart(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path, sys.executable, "-I", "-c", "")
    [sentence] = run.missing
    assert "the job ran other programs only, or a Python that does not see PYTHONPATH" in sentence


def test_a_job_that_records_itself_is_recorded_there(tmp_path: Path) -> None:
    inner = [sys.executable, "-m", "fullwire", "record", "-o", str(tmp_path / "inner.run")]
    run, _ = recorded(tmp_path, *inner, "--", "true")
    assert run.missing == (
        f"nothing was recorded: the job recorded itself into {tmp_path / 'inner.run'}",
    )


def test_an_optimizer_is_not_what_its_closures_compute(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.note(Note.ZERO_GRAD, 0, 1_000, 0)
    for begin in (1_100, 1_500):  # two passes within one step, as LBFGS requests
        journal.note(Note.FORWARD, 0, begin, 50)
        journal.note(Note.BACKWARD, 0, begin + 100, 200)
    journal.note(Note.OPTIMIZER, 0, 1_050, 950)
    journal.close()
    run = join([tmp_path], tmp_path / "job.run").run
    spans = run.spans.rows(run.spans.lane == "compute")
    told = list(zip(spans.name, spans.start_ns.tolist(), spans.end_ns.tolist(), strict=True))
    assert told == [
        ("optimizer", 50, 100),
        ("earlier forward", 100, 200),
        ("earlier backward", 200, 400),
        ("optimizer", 400, 500),
        ("forward", 500, 600),
        ("backward", 600, 800),
        ("optimizer", 800, 1_000),
    ]


def test_a_sitecustomize_that_was_there_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.marked = True")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import sys; print(sys.marked, sys.modules['sitecustomize'].__file__)"
    _, done = recorded(tmp_path, sys.executable, "-c", code)
    assert done.stdout.decode() == f"True {tmp_path / 'sitecustomize.py'}\n"


def test_an_unknown_command_is_a_mistake_and_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    done = cli("record", "-o", tmp_path / "x.run", "--", "no-such-command")
    assert done.returncode == 2
    assert "no-such-command: expected a command that exists" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_recorded_the_job_does_not_begin_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    record = f"{sys.executable} -m fullwire record -o {tmp_path}/job.run -- echo begun"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 0; exec {record}"], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"job.run.recording: cannot be recorded into: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_name_of_its_own_is_refused(cli: Cli, tmp_path: Path) -> None:
    run = write(a_trained_job(), tmp_path / "job.run")
    done = cli("record", "-o", ".", "--force", "--", "true", cwd=run)
    assert done.returncode == 2
    assert done.stderr == "fullwire: write: expected the name of a new run, got '.'\n"


@pytest.mark.usefixtures("uncompiled")
def test_processes_that_load_data_are_the_jobs_own(tmp_path: Path) -> None:
    """Their processor time is told apart, so that `explain` blames no other program."""
    script = tmp_path / "job.py"
    script.write_text(
        "import time, torch\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Slow(Dataset):\n"
        "    def __len__(self): return 150\n"
        "    def __getitem__(self, at):\n"
        "        began_s = time.process_time()\n"
        "        while time.process_time() - began_s < 0.01: pass\n"
        "        return torch.ones(3)\n"
        "weight = torch.nn.Parameter(torch.ones(3))\n"
        "optimizer = torch.optim.SGD([weight], 0.001)\n"
        "for batch in DataLoader(Slow(), num_workers=1):\n"
        "    (weight * batch).square().sum().backward(); optimizer.step()\n"
    )
    command = [sys.executable, "-m", "fullwire", "record", "-o", str(tmp_path / "job.run"), "--"]
    subprocess.run([*command, sys.executable, str(script)], timeout=120, check=True)
    facts = read_run(tmp_path / "job.run").facts
    [(rank, loading_s)] = facts.children_processor_s or ()
    assert rank == 0
    assert 0.008 < loading_s < 0.03
    [(_, own_s)] = facts.processor_s or ()
    assert own_s < loading_s
