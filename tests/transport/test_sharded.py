"""Elastic training of an FSDP2 model: shards have a copy on another rank, and outlive their own."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import fullwire
from fullwire.errors import UsageError
from fullwire.resilience import checkpoints
from fullwire.resilience.batches import order_of
from fullwire.resilience.pace import shares
from fullwire.resilience.place import Folder, Keeping, Place
from fullwire.resilience.sharded import check
from fullwire.resilience.shards import Form, holders, move, rows
from tests.transport.sharded_model import (
    BATCH,
    SAMPLES,
    STEPS_IN_EPOCH,
    a_model,
    an_optimizer,
    the_data,
    undisturbed,
)
from tests.transport.test_elastic import DETECT

HERE = Path(__file__).parent
UNCOMPILED = str(HERE.parent / "jobs" / "uncompiled.py")
ROOT = str(HERE.parents[1])


def played(
    folder: Path, *options: str, workers: int = 3, epochs: int = 2, **more: str
) -> subprocess.CompletedProcess[str]:
    training = [sys.executable, UNCOMPILED, str(HERE / "sharded_training.py")]
    run = [sys.executable, "-m", "fullwire", "run", "--workers", str(workers), DETECT]
    return subprocess.run(
        [*run, *options, "--", *training, str(folder), str(epochs)],
        env=os.environ | {"PYTHONPATH": ROOT} | more,
        cwd=folder,  # where a job that ends leaves its last checkpoint
        capture_output=True,
        text=True,
        timeout=120,
    )


def check_steps(*folders: Path, epochs: int = 2) -> dict[int, int]:
    """Hold the workers' notes of each step against each other; return the world sizes."""
    samples: dict[int, list[int]] = defaultdict(list)
    places: dict[int, dict[int, int]] = defaultdict(dict)  # the world size, by step and rank
    checksums: dict[tuple[int, str], list[str]] = defaultdict(list)  # of a shard, and of its copy
    for path in itertools.chain(*(folder.glob("steps of *") for folder in folders)):
        for line in path.read_text().splitlines():
            number, rank, size, held, *own = line.split()
            step = int(number)
            assert int(rank) not in places[step], "two workers took the same part of a step"
            places[step][int(rank)] = int(size)
            epoch, place = divmod(step - 1, STEPS_IN_EPOCH)
            whole = order_of(SAMPLES, 0, epoch)[place * BATCH : (place + 1) * BATCH]
            assert list(map(int, own)) == whole[shares(len(whole), [1] * int(size))[int(rank)]]
            samples[step] += map(int, own)
            for part in held.split(","):
                index, checksum = part.split("=")
                checksums[step, index].append(checksum)
    assert sorted(places) == list(range(1, epochs * STEPS_IN_EPOCH + 1))
    sizes = {}
    for step, by_rank in places.items():
        (sizes[step],) = set(by_rank.values())
        if len(by_rank) == sizes[step]:  # else one was killed before it noted its step
            epoch, place = divmod(step - 1, STEPS_IN_EPOCH)
            whole = order_of(SAMPLES, 0, epoch)[place * BATCH : (place + 1) * BATCH]
            assert sorted(samples[step]) == sorted(whole)
    for (step, index), each in checksums.items():
        assert len(set(each)) == 1, f"the copy of shard {index} differs after step {step}"
        if len(places[step]) == sizes[step] > 1:
            assert len(each) == 2
    return sizes


def check_model(folder: Path, epochs: int = 2) -> None:
    """Put the model and its Adam together from the shards that the workers had at the end."""
    shards = dict(torch.load(path) for path in folder.glob("shard of *"))
    model, optimizer = undisturbed(epochs * STEPS_IN_EPOCH)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        wholes = [
            torch.cat([shards[index][name][place] for index in range(len(shards))])
            for place in range(3)
        ]
        wanted = [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]
        torch.testing.assert_close(wholes, wanted, rtol=1e-4, atol=1e-5)


def test_workers_are_lost_in_each_phase_of_a_step(tmp_path: Path) -> None:
    """The model is that of a run without losses, and each sample counts once an epoch."""
    phases = ("forward", "backward", "optimizer", "commit", "between")
    killed = list(zip((0, 3, 5, 1, 6), phases, (2, 5, 8, 12, 15), strict=True))
    endings = ",".join(f"{worker}:{phase}:{step}" for worker, phase, step in killed)
    job = played(tmp_path, workers=7, ENDINGS=endings)
    assert job.returncode == 0, job.stderr
    sizes = check_steps(tmp_path)
    for left, (worker, _, step) in zip(range(6, 1, -1), killed, strict=True):
        assert f"worker {worker} was ended by SIGKILL, {left} go on" in job.stderr
        assert (sizes[step], sizes[step + 2]) == (left + 1, left)
    check_model(tmp_path)
    assert job.stdout.count("done 22 [0.008192") == 2


def test_workers_are_lost_while_the_others_build_and_take_their_shards(tmp_path: Path) -> None:
    endings = "0:forward:4,2:build:4,4:change:4"
    job = played(tmp_path, workers=5, ENDINGS=endings)
    assert job.returncode == 0, job.stderr
    assert [check_steps(tmp_path)[step] for step in (4, 6)] == [5, 2]
    check_model(tmp_path)


def test_a_new_worker_gets_its_shard_and_all_that_is_not_sharded(tmp_path: Path) -> None:
    job = played(tmp_path, "--respawn", ENDINGS="0:forward:4", NEW="3")
    assert job.returncode == 0, job.stderr
    sizes = check_steps(tmp_path)
    assert [sizes[step] for step in (4, 5, 22)] == [3, 2, 3]
    check_model(tmp_path)
    assert "worker 3 done 22 [0.008192" in job.stdout
    assert job.stdout.count("numbers of 1") == 2  # its own, and that of worker 3


def test_a_stuck_worker_is_left_out_and_comes_back_as_a_new_one(tmp_path: Path) -> None:
    stuck = "2:hangs in forward:7"
    # Workers tell each other eight times within that time whether they wait.
    detect = "--detect=4s"
    job = played(tmp_path, detect, epochs=4, ENDINGS=stuck, FULLWIRE_ELASTIC_STUCK_S="1")
    assert job.returncode == 0, job.stderr
    sizes = check_steps(tmp_path, epochs=4)
    assert [sizes[step] for step in (7, 9, 44)] == [3, 2, 3]
    check_model(tmp_path, epochs=4)


def test_one_worker_is_left_and_another_comes(tmp_path: Path) -> None:
    job = played(tmp_path, "--respawn", workers=2, ENDINGS="1:forward:4", NEW="2")
    assert job.returncode == 0, job.stderr
    assert {check_steps(tmp_path)[step] for step in (5, 22)} == {1, 2}
    check_model(tmp_path)


def test_a_shard_and_its_copy_are_lost_at_once(tmp_path: Path) -> None:
    job = played(tmp_path, ENDINGS="1:forward:4,2:forward:4", workers=4)
    said = "fullwire: a worker and the one with the copy of its shard were lost at once\n"
    assert (job.returncode, job.stderr.count(said)) == (4, 1), job.stderr


def test_the_job_begins_again_at_its_checkpoint_when_a_shard_and_its_copy_are_lost(
    tmp_path: Path,
) -> None:
    kept = ("--respawn", "--checkpoint", str(tmp_path / "kept"), "--every", "0.01s")
    endings = "1:between:14,2:between:14"
    job = played(tmp_path, *kept, ENDINGS=endings, KEPT=str(tmp_path / "kept"), PAUSE_S="0.01")
    assert job.returncode == 0, job.stderr
    assert "no worker is left that has the parameters. The job begins again" in job.stderr
    assert "fullwire: the job goes on after step" in job.stderr
    check_model(tmp_path)


def test_another_number_of_workers_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Torch's own `load` reads the folder, too."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    kept = ("--checkpoint", str(tmp_path / "kept"), "--every", "0.01s", "--keep", "2")
    # The worker that ends waits for a first checkpoint, which begins before step 7.
    options, folder = ("--min", "3", *kept), str(tmp_path / "kept")
    job = played(tmp_path / "a", *options, ENDINGS="1:forward:7", KEPT=folder, PAUSE_S="0.01")
    assert job.returncode == 4, job.stderr
    assert "the job ended with fewer than --min 3 of 3 workers, after step 7" in job.stderr
    place = tmp_path / "kept/step-000000007"
    assert f"--checkpoint {tmp_path / 'kept'} goes on from {place}" in job.stderr
    assert len(list((tmp_path / "kept").glob("step-*"))) == 2
    assert {path.name for path in place.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    job = played(tmp_path / "b", *kept, workers=4)
    assert job.returncode == 0, job.stderr
    assert f"goes on after step 7, from {place}" in job.stderr
    assert set(check_steps(tmp_path / "a", tmp_path / "b").values()) == {3, 4}
    check_model(tmp_path / "b")
    last = max((tmp_path / "kept").glob("step-*"))
    assert len(list(last.glob("*.distcp"))) == 4  # written while the job ran
    assert checkpoints.check(last).is_sharded
    model = a_model()
    optimizer = an_optimizer(model)
    read = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that it reads without a process group
        dcp.load(read, checkpoint_id=last, no_dist=True)
    wanted = undisturbed(int(last.name.removeprefix("step-")))[0].state_dict()
    torch.testing.assert_close(read["model"], wanted, rtol=1e-4, atol=1e-5)
    assert read["optimizer"]["state"]["0.weight"]["step"] == int(last.name.removeprefix("step-"))
    with pytest.raises(UsageError, match="got one of a sharded model"):
        checkpoints.read(last)


def build_alone(mesh: Any) -> Any:
    model = torch.nn.Linear(8, 1)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def _no_group_after_it() -> Any:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_no_group_after_it")
def test_a_sharded_job_alone_trains_as_a_plain_loop() -> None:
    torch.manual_seed(1)
    plain = torch.nn.Linear(8, 1)
    torch.manual_seed(1)
    job = fullwire.elastic(build_alone)
    inputs, wanted = the_data().tensors
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for given, target in job.batches(the_data(), batch_size=40, shuffle=False):
        with job.step():
            job.optimizer.zero_grad()
            torch.nn.functional.mse_loss(job.model(given), target).backward()
            job.optimizer.step()
    for given, target in zip(inputs.split(40), wanted.split(40), strict=True):
        other.zero_grad()
        torch.nn.functional.mse_loss(plain(given), target).backward()
        other.step()
    torch.testing.assert_close(job.model.weight.full_tensor(), plain.weight)
    with pytest.raises(UsageError, match="expected one job"), job.step():
        pass
    with job.step():
        job.model(inputs[:2]).sum().backward()
        job.optimizer.step()
        with pytest.raises(UsageError, match="got a second one"):
            job.optimizer.step()
    with pytest.raises(UsageError, match="got one outside"):
        job.optimizer.step()
    with pytest.raises(UsageError, match="without a closure"), job.step():
        job.optimizer.step(lambda: 0.0)
    with pytest.raises(UsageError, match="expected no process group yet"):
        fullwire.elastic(build_alone)


@pytest.mark.usefixtures("_no_group_after_it")
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda mesh: torch.nn.Linear(2, 1), "returns a model and an optimizer.*got Linear"),
        (
            lambda mesh: (model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters())),
            "got one that is not sharded on this mesh: weight",
        ),
        (
            lambda mesh: (
                build_alone(mesh)[0],
                torch.optim.SGD(torch.nn.Linear(2, 1).parameters()),
            ),
            "build it after fully_shard",
        ),
    ],
)
def test_a_function_that_builds_something_else_is_refused(build: Any, said: str) -> None:
    job = fullwire.elastic(build)
    with pytest.raises(UsageError, match=said):
        next(job.batches(the_data(), batch_size=2))


@pytest.mark.parametrize(
    ("given", "more", "said"),
    [
        (torch.nn.Linear(2, 1), {}, "got Linear alone"),
        (build_alone, {"sync_every": 4}, "expected sync_every=1 with a sharded model.*got 4"),
    ],
)
def test_settings_of_sharded_jobs_are_checked(given: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        fullwire.elastic(given, **more)


@pytest.mark.parametrize(
    "more", [{"balances": True}, {"evicts": True}, {"keeping": Keeping(is_whole=True)}]
)
def test_options_of_whole_models_are_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    place = Place(Folder(tmp_path), 0, 2, **more)
    with pytest.raises(UsageError, match="expected a whole model with --balance, --evict-slow"):
        check(build_alone, place, sync_every=1)


def test_an_optimizer_that_needs_whole_tensors_is_refused(tmp_path: Path) -> None:
    job = played(tmp_path, workers=2, OPTIMIZER="Normed")
    assert job.returncode == 4
    assert "works on each number by itself" in job.stderr
    assert "with Normed they differ" in job.stderr


@pytest.mark.parametrize(("length", "size"), [(31, 3), (1, 3), (4, 3), (6, 4), (8, 2), (0, 2)])
def test_shards_are_those_of_torch(length: int, size: int) -> None:
    cut = [rows(length, size, index) for index in range(size)]
    chunks = [len(chunk) for chunk in torch.empty(length).chunk(size)] if length else []
    assert [high - low for low, high in cut] == [*chunks, *[0] * (size - len(chunks))]
    assert cut[0][0] == 0
    assert cut[-1][1] == length


def test_a_shard_is_found_at_its_own_rank_else_as_a_copy() -> None:
    ring = [[index, (index - 1) % 4] for index in range(4)]
    assert holders(4, ring) == {index: index for index in range(4)}
    assert holders(4, [[], *ring[1:]]) == {0: 1, 1: 1, 2: 2, 3: 3}
    assert holders(4, [ring[0], [], ring[2], []]) == {0: 0, 1: 2, 2: 2, 3: 0}
    assert holders(4, [[], [], *ring[2:]]) is None  # rank 1 had the copy of shard 0


class Post:
    """Bytes between ranks that run one after the other: the second round has all of the first."""

    def __init__(self, size: int) -> None:
        self.sent: list[list[Any]] = [[] for _ in range(size)]

    def of(self, rank: int, *, is_last: bool) -> Any:
        count = itertools.count()

        def alltoall(outputs: list[Any], inputs: list[Any]) -> Any:
            number = next(count)
            if not is_last:
                self.sent[rank].append([each.clone() for each in inputs])
            for source, output in enumerate(outputs if is_last else ()):
                output.copy_(self.sent[source][number][rank])
            return SimpleNamespace(wait=lambda: None)

        return SimpleNamespace(alltoall=alltoall)


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 5), (2, 7), (2, 1), (3, 3)])
def test_shards_move_to_another_number_of_ranks(before: int, after: int) -> None:
    torch.manual_seed(before * after)
    wholes = [
        [torch.randn(31, 4), torch.randn(31, 4).bfloat16()],
        [torch.randn(2)],
        [torch.randn(3, 20), torch.randn(3, 20)],
    ]
    dims = (0, 0, 1)
    forms = [
        Form(list(each[0].shape), dim, [str(one.dtype).removeprefix("torch.") for one in each])
        for each, dim in zip(wholes, dims, strict=True)
    ]

    def cut(size: int, index: int) -> list[list[torch.Tensor]]:
        parts = []
        for form, each in zip(forms, wholes, strict=True):
            low, high = rows(form.shape[form.dim], size, index)
            parts.append([one.narrow(form.dim, low, high - low) for one in each])
        return parts

    # Rank 1 is lost; new ones, without shards, come last.
    held = [[index, (index - 1) % before] for index in range(before) if index != 1]
    held += [[] for _ in range(after - len(held))]
    wanted = [[index, (index - 1) % after] for index in range(after)]
    post = Post(after)
    for is_last in (False, True):
        for rank in range(after):
            pieces = {index: cut(before, index) for index in held[rank]}
            group = post.of(rank, is_last=is_last)
            moved = move(forms, pieces, held, before, wanted, group, rank)
            for index in wanted[rank] if is_last else ():
                for got, true in zip(moved[index], cut(after, index), strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(got, true, strict=True))
