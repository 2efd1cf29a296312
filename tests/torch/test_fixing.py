"""Fixes enter an unchanged job: exact ones keep its weights to the bit on two ranks."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fullwire.answers.trials import TrialJob
from fullwire.fixes._recipe import Recipe, as_toml, parse_fix, read_recipe
from fullwire.run.store import read_run
from tests.torch.test_record import JOBS, UNCOMPILED, needs_torch, together

pytestmark = needs_torch
AS_TORCHRUN_DOES = ["env", "OMP_NUM_THREADS=1", "LOCAL_WORLD_SIZE=2"]
JOB = [*AS_TORCHRUN_DOES, *together(2, "fixable.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
BY_TORCHRUN = [*TORCHRUN, UNCOMPILED, str(JOBS / "fixable.py")]
FULLWIRE = [sys.executable, "-m", "fullwire"]
PYTHON_C = [sys.executable, UNCOMPILED, "-c"]
EXACT = {
    "transport": "fullwire",
    "buckets": "1",
    "ddp": "static_graph,gradient_as_bucket_view",
    "input": "2x4",
    "threads": "1",
    "environment": "GLOO_SOCKET_IFNAME=lo",
    **({"processors": "own"} if len(os.sched_getaffinity(0)) > 1 else {}),
}


def ended(*command: str) -> subprocess.CompletedProcess[str]:
    for _ in range(3):  # torch alone sometimes aborts at the end of a Gloo job, one in 14 here
        done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
        if done.returncode != signal.SIGABRT:
            break
    assert done.returncode == 0, done.stderr
    return done


def told_by(*command: str) -> tuple[Mapping[str, Any], str]:
    done = ended(*command)
    return json.loads(done.stdout), done.stderr


@functools.cache
def told_plainly() -> Mapping[str, Any]:
    """Return what some ways of the job tell without fixes."""
    return told_by(*JOB, "manual+accumulating+choosing")[0]


def test_exact_fixes_of_a_recipe_change_the_job_and_no_bit_of_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    fixes = tuple(parse_fix(f"{key}:{setting}") for key, setting in EXACT.items())
    path.write_text(as_toml(Recipe(fixes=fixes)))
    plain, _ = told_by(sys.executable, UNCOMPILED, *BY_TORCHRUN[1:])
    fixed, said = told_by(*FULLWIRE, "run", "--recipe", str(path), "--", *BY_TORCHRUN)
    for same in ("digest", "random"):
        assert fixed[same] == plain[same]
    assert (plain["backend"], plain["loaders"], plain["static_graph"]) == ("gloo", [0, 0], False)
    assert (fixed["backend"], fixed["loaders"]) == ("fullwire", [2, 0])
    assert (fixed["bucket_bytes"], fixed["static_graph"]) == (2**20, True)
    for key, setting in EXACT.items():
        assert f"fix {key}:{setting}: applied: " in said
    assert "not applied: an iterable data set may repeat samples" in said


def test_joined_all_reduces_keep_every_bit_where_ranks_read_at_different_places() -> None:
    plain = told_plainly()["manual"]
    fixed, said = told_by(*FULLWIRE, "apply", "joining:1MiB", "--", *JOB, "manual")
    assert fixed == plain
    assert "fix joining:1MiB: applied: all-reduces wait for their neighbours, in 2 " in said


OTHER_BATCHES = {
    "generator": "the data set gives another sample when it is read again",
    "counter": "the data set gives another sample when it is read again",
    "file": "the data set holds an open file, whose place loading processes would share",
    "collated": "the data set draws random numbers, which would change",
    "sometimes": "the data set draws random numbers, which would change",
    "lazily": "the sampler draws random numbers between the script's",
    "own sampler": "the sampler Backwards is the script's own, and would be asked earlier",
}
SAME_BATCHES = ("plain", "given", "leaving", "tensors", "epoch", "logging")


def test_batches_loaded_ahead_are_those_of_the_script_or_the_script_reads_them() -> None:
    job = [sys.executable, UNCOMPILED, str(JOBS / "epochs.py")]
    apply = [*FULLWIRE, "apply", "input:2", "--", *job]
    plain, _ = told_by(*job, *SAME_BATCHES, *OTHER_BATCHES)
    fixed, said = told_by(*apply, *SAME_BATCHES)
    assert "fix input:2: applied: num_workers 0 -> 2" in said
    for way, reason in OTHER_BATCHES.items():
        told, said = told_by(*apply, way)
        assert f"fix input:2: not applied: {reason}" in said, (way, said)
        fixed = {**fixed, **told}
    assert fixed == plain


SLOW_SAMPLES = """
import time
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, number):
        time.sleep(0.1)
        with open("read", "a") as file:
            file.write(".")
        return number

DataLoader(Slow(), 8)
print(len(open("read").read()))
"""


def test_of_slow_samples_the_start_of_a_job_reads_four_twice(tmp_path: Path) -> None:
    command = [*FULLWIRE, "apply", "input:2", "--", *PYTHON_C, SLOW_SAMPLES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "8\n", done.stderr
    assert "applied: num_workers 0 -> 2" in done.stderr


def test_a_joined_sum_that_one_rank_alone_reads_comes_at_the_end_too() -> None:
    fixed, _ = told_by(*FULLWIRE, "apply", "joining:1MiB", "--", *JOB, "ending")
    assert fixed == {"total": [3.0, 3.0, 3.0]}


def test_a_sum_that_no_mode_sees_does_not_wait() -> None:
    """An all-reduce that doubles stands for the two ranks."""
    done = subprocess.run(
        [sys.executable, UNCOMPILED, str(JOBS / "joined.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told.values()) == {True}, told


def test_a_strict_recipe_knows_the_ranks_of_a_job_without_a_launcher(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(as_toml(Recipe(workers=2)))
    job = (
        "import torch.distributed as dist\n"
        f"store = dist.FileStore({str(tmp_path / 'store')!r}, 1)\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
    )
    whole = [*FULLWIRE, "run", "--strict", "-r", str(path), "--", *PYTHON_C, job]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "workers: the recipe is for 2, the job has 1" in done.stderr


@pytest.mark.parametrize(
    ("fix", "why"),
    [
        ("transport:fullwire", "the job uses fake, and only Gloo can be replaced"),
        ("compression:bf16", "compress: expected a model without a"),
        ("input:2", "the data set draws random numbers"),
        ("threads:1", ""),
    ],
)
def test_a_strict_recipe_refuses_a_job_that_cannot_have_a_fix_before_its_first_step(
    tmp_path: Path, fix: str, why: str
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(as_toml(Recipe(fixes=(parse_fix(fix),))))
    job = [*JOB, "stubborn"]
    if fix.startswith("transport"):
        job = [
            *PYTHON_C,
            "import torch, torch.distributed as dist\n"
            "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
            "dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=1)\n"
            "model = torch.nn.Linear(2, 2)\n"
            "model(torch.ones(2)).sum().backward()\n"
            "torch.optim.SGD(model.parameters(), 0.1).step()\n"
            "print('trained')",
        ]
    whole = [*FULLWIRE, "run", "--strict", "-r", str(path), "--", *job]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout == "") == ((2, True) if why else (0, False)), done.stderr
    refused = [line for line in done.stderr.splitlines() if line.startswith("fullwire: ")]
    assert len(refused) == 1
    assert refused[0].startswith(f"fullwire: fix {fix}: {'not applied: ' if why else 'applied: '}")
    assert why in refused[0]


STARTING = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
{first}
dist.monitored_barrier()
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [dist.get_world_size()] * 3
if dist.get_rank() == 0:
    print(dist.get_backend())
dist.destroy_process_group()  # Gloo's threads may free tensors, which aborts while Python ends
"""
WITH_A_GPU = "torch.cuda.is_available = lambda: True"
BY_STORE = (
    "store = dist.FileStore(sys.argv[1], 2)\n"
    "dist.init_process_group('gloo', store=store, rank=int(os.environ['RANK']), world_size=2)"
)
FAILING = "os.environ['FULLWIRE_INTERFACE'] = 'none0'"
IN_ONE = f"if os.environ['RANK'] == '1': {FAILING}"


@pytest.mark.parametrize(
    ("first", "backend", "did"),
    [
        ("init_device_mesh('cpu', (2,))", "fullwire", "applied: init_process"),
        ("dist.init_process_group('cpu:gloo')", "fullwire", "applied: init_process"),
        (f"{WITH_A_GPU}; dist.init_process_group('cpu:gloo')", "fullwire", "applied: init_process"),
        (f"{WITH_A_GPU}; dist.init_process_group('gloo')", "gloo", "not applied: Gloo may carry"),
        (f"{FAILING}\n{BY_STORE}", "gloo", "undone: "),
        (f"{IN_ONE}\n{BY_STORE}", "gloo", "undone: "),
    ],
)
def test_our_transport_takes_the_place_of_gloo_alone_and_gives_way_if_it_does_not_start(
    tmp_path: Path, first: str, backend: str, did: str
) -> None:
    script = tmp_path / "starting.py"
    script.write_text(STARTING.format(first=first))
    job = together(2, str(script), str(tmp_path / "store"))
    whole = [*FULLWIRE, "apply", "transport:fullwire", "--", *job]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, f"{backend}\n"), done.stderr
    assert f"fix transport:fullwire: {did}" in done.stderr


def test_a_transport_that_does_not_start_gives_way_in_the_store_of_torchrun(
    tmp_path: Path,
) -> None:
    script = tmp_path / "starting.py"
    script.write_text(STARTING.format(first=f"{FAILING}\ndist.init_process_group('gloo')"))
    whole = [*FULLWIRE, "apply", "transport:fullwire", "--", *TORCHRUN, UNCOMPILED, str(script)]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "gloo\n"), done.stderr


def test_a_last_checkpoint_that_is_not_whole_is_the_jobs_status() -> None:
    job = "import torch; torch.save(torch.zeros(1000), '/dev/full')"
    whole = [*FULLWIRE, "apply", "checkpoint:background", "--", *PYTHON_C, job]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "the last checkpoint is not whole: [Errno 28]" in done.stderr


def test_a_barrier_waits_for_a_checkpoint_in_the_background(tmp_path: Path) -> None:
    """Other ranks load the file behind it."""
    job = (
        "import os, sys, torch, torch.distributed as dist\n"
        "os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '0'}\n"
        f"store = dist.FileStore({str(tmp_path / 'store')!r}, 1)\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "weights = torch.zeros(25_000_000)\n"
        f"torch.save(weights, {str(tmp_path / 'a.pt')!r})\n"
        "dist.barrier()\n"
        f"print(os.path.getsize({str(tmp_path / 'a.pt')!r}))\n"
    )
    whole = [*FULLWIRE, "apply", "checkpoint:background", "--", *PYTHON_C, job]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) > 100_000_000


@pytest.mark.parametrize(
    "use",
    [
        "print(os.path.getsize('a.pt'))",
        "print(len(open('a.pt', 'rb').read().replace(bytes(1), b'')))",
        "os.system(PRINT)",
        "os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', PRINT], {}), 0)",
        "subprocess.run(['sh', '-c', PRINT])",
        "print(4 * torch.load('a.pt').count_nonzero().item())",
        "os.fork() or os.execlp('sh', 'sh', '-c', PRINT); os.wait()",
        "os.link('a.pt', 'b.pt'); subprocess.run(['sh', '-c', PRINT])",
        "print(100_000_000, flush=True); os._exit(0)",
    ],
)
def test_a_script_never_meets_a_part_of_a_checkpoint(use: str, tmp_path: Path) -> None:
    """No byte of its numbers is zero, and a part that is not written yet has zeros."""
    job = (
        "import os, subprocess, torch\n"
        "PRINT = 'tr -d \\\\000 < a.pt | wc -c'\n"
        "torch.save(torch.full((25_000_000,), 1.7), 'a.pt')\n"
    )
    whole = [*FULLWIRE, "apply", "checkpoint:background", "--", *PYTHON_C, job + use]
    done = subprocess.run(
        whole, capture_output=True, text=True, timeout=100, check=True, cwd=tmp_path
    )
    assert int(done.stdout) >= 100_000_000
    assert len((tmp_path / "a.pt").read_bytes().replace(bytes(1), b"")) >= 100_000_000


def test_two_passes_that_are_used_by_themselves_are_no_accumulation(tmp_path: Path) -> None:
    apply = [*FULLWIRE, "apply", "accumulation:2", "--", *AS_TORCHRUN_DOES]
    _, said = told_by(*apply, *together(2, "sharpness.py"))
    assert "fix accumulation:2: undone: gradients were used or cleared after pass 1, not 2" in said
    options = ["--steps", "12", "--trials", "1", "--json", "-o", str(tmp_path / "tuned")]
    tune = [*FULLWIRE, "tune", *options, "--", *AS_TORCHRUN_DOES]
    found, _ = told_by(*tune, *together(2, "sharpness.py"))
    assert "accumulation" not in {trial["fix"] for trial in found["trials"]}


def test_accumulated_gradients_are_sent_once_and_checkpoints_behind() -> None:
    fixes = "accumulation:4,ddp:find_unused_parameters=False,checkpoint:background,processors:own"
    fixes += ",threads:2"  # sums within an operation may have another order
    plain = told_plainly()["accumulating"]
    fixed, said = told_by(*FULLWIRE, "apply", fixes, "--", *JOB, "accumulating")
    assert fixed["weights"] == pytest.approx(plain["weights"], rel=1e-6)
    assert (plain["finds_unused"], fixed["finds_unused"]) == (True, False)
    assert fixed["saved"]
    assert said.count(": applied: ") >= 4
    assert "fix accumulation:4: undone: gradients were used or cleared after pass 2, not 4" in said


def test_passes_that_leave_parameters_out_keep_every_bit_without_the_search() -> None:
    plain = told_plainly()["choosing"]
    fix = "ddp:find_unused_parameters=False"
    fixed, _ = told_by(*FULLWIRE, "apply", fix, "--", *JOB, "choosing")
    assert (plain["finds"], fixed["finds"]) == (True, False)
    assert fixed["digest"] == plain["digest"]


def test_gathered_parameters_and_checkpoints_behind_the_steps_keep_every_bit(
    tmp_path: Path,
) -> None:
    fixes = "fsdp:reshard_after_forward=False,forward_prefetch,checkpoint:background"
    words = "fixable.py", "sharded", str(tmp_path)
    plain, _ = told_by(*together(2, *words))
    job = together(2, *words, compiler=True)
    fixed, said = told_by(*FULLWIRE, "apply", fixes, "--", *job)
    assert fixed == plain
    assert len(list(tmp_path.glob("*/.metadata"))) == 5
    for option in ("reshard_after_forward", "forward_prefetch"):
        assert (
            f"fix fsdp:reshard_after_forward=False,forward_prefetch: applied: {option}, in 2"
            in said
        )
    assert "applied: torch.distributed.checkpoint.save writes in a thread, in 2 pro" in said


def test_on_four_ranks_of_two_hosts_exact_fixes_are_equal_up_to_the_order_of_sums() -> None:
    fixes = "transport:fullwire,buckets:1,ddp:gradient_as_bucket_view,placement:0,2,1,3"
    fixes += ",processors:own,fsdp:reshard_after_forward=False,forward_prefetch,shard_inside_hosts"
    job = [*AS_TORCHRUN_DOES, *together(4, "fixable.py", "many")]
    fixed, said = told_by(*FULLWIRE, "apply", fixes, "--", *job)
    assert fixed["backend"] == "fullwire"
    for model in ("ddp", "fsdp"):
        assert fixed[model] == pytest.approx(fixed["alone"], rel=1e-4)
    assert "applied: reshard_after_forward, mesh, in 4 processes" in said
    assert "applied: RANK in another order, in 4 processes" in said


SHARING = """
import json, os, sys, torch.distributed as dist
from fullwire.fixes._shared import share
rank = os.environ["RANK"]
given = {"FULLWIRE_FIXES": '[["threads", "3"]]'} if rank == "0" else {"FULLWIRE_FOLLOW": "1"}
os.environ |= {"LOCAL_WORLD_SIZE": "1", **given}
share(lambda told: True, ())
dist.init_process_group("gloo")
told = [None, None]
dist.all_gather_object(told, [os.environ.get(n) for n in ("FULLWIRE_FIXES", "OMP_NUM_THREADS")])
if rank == "0":
    print(json.dumps(dict(zip(("fixes", "threads"), zip(*told)))))
dist.barrier()
"""


def test_without_a_launcher_that_has_a_store_fixes_travel_once_the_job_has_its_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "sharing.py").write_text(SHARING)
    told, _ = told_by(*together(2, str(tmp_path / "sharing.py")))
    assert told["fixes"] == ['[["threads", "3"]]'] * 2
    assert told["threads"][1] == "3"


def test_a_trial_runs_in_its_folder_and_tells_what_it_writes_elsewhere_and_its_own_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    elsewhere = Path(tempfile.mkdtemp(dir="/var/tmp"))
    (tmp_path / "train.py").write_text(
        f"""import time, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(40):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    for place in ("here.txt", {str(elsewhere / "there.txt")!r}):
        open(place, "a").write("a step")
    print(model.bias)
    time.sleep(0.002)
"""
    )
    monkeypatch.chdir(tmp_path)
    job = TrialJob(
        command=[sys.executable, "train.py"],
        folder=tmp_path,
        lab=None,
        scratch=tmp_path / "scratch",
        steps=12,
    )
    job.end_s = time.monotonic() + 100
    try:
        found = job.recorded([])
    finally:
        shutil.rmtree(elsewhere)
    assert (tmp_path / "scratch/here.txt").exists()
    assert not (tmp_path / "here.txt").exists()
    assert found.seen.wrote == (str(elsewhere / "there.txt"),)
    assert [(work.call, work.place) for work in found.seen.host] == [
        ("print", f"{tmp_path / 'train.py'}:9")
    ]


OUTSIDE = """
import os, shutil, tempfile, torch
os.mkdir("{there}/made")
log = open("{there}/log.txt", "w")
open("{there}/old.txt")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(12):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    tempfile.TemporaryFile().close()
torch.save(model.state_dict(), "{there}/model.pt")
torch.save(model.state_dict(), "{there}/cache/model.pt")
os.rename("{there}/old.txt", "{there}/new.txt")
os.mkdir("{there}/made") if not os.path.exists("{there}/made") else shutil.rmtree("{there}/made")
"""


def test_what_a_job_writes_outside_is_noted_from_its_first_line_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (here, there / "cache"):
        folder.mkdir(parents=True)
    (there / "old.txt").touch()
    monkeypatch.chdir(here)
    command = [*PYTHON_C, OUTSIDE.format(there=there)]
    job = TrialJob(command=command, folder=tmp_path, lab=None, scratch=here, steps=99)
    job.end_s = time.monotonic() + 100
    wrote = job.recorded([]).seen.wrote
    names = ("log.txt", "made", "model.pt", "new.txt", "old.txt")
    assert wrote == tuple(str(there / name) for name in names)


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "package.train", "data", "--data=data", "--out=other", "data/a.txt"],
        ["-m", "torch.distributed.run", "--nproc-per-node=1", "-m", "package.train", "data"],
    ],
    ids=["python", "torchrun"],
)
def test_a_trial_in_another_folder_finds_modules_and_paths_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    for folder in ("package", "data", "scratch"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data/a.txt").touch()
    (tmp_path / "package/train.py").write_text(
        "import os, sys, torch\n"
        "open('words', 'w').write(' '.join(sys.argv[1:]))\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(12):\n"
        "    model(torch.ones(2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    monkeypatch.chdir(tmp_path)
    job = TrialJob(
        command=[sys.executable, *command],
        folder=tmp_path,
        lab=None,
        scratch=tmp_path / "scratch",
        steps=12,
    )
    job.end_s = time.monotonic() + 100
    job.recorded([])
    data = tmp_path / "data"
    whole = [str(data), f"--data={data}", "--out=other", str(data / "a.txt")]
    words = (tmp_path / "scratch/words").read_text().split()
    assert words == whole[: len(words)]
    assert words


MULTIPROCESSING = """
import multiprocessing, sys, tempfile
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(rank, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in torch.utils.data.DataLoader(torch.ones(200, 8), 5):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    del model, optimizer  # they must not outlive the group
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.set_num_threads(1)
    way = multiprocessing.get_context(sys.argv[1])
    store = tempfile.mktemp()
    ranks = [way.Process(target=train, args=(rank, store)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode) for rank in ranks))
"""


def test_a_trial_sees_the_calls_of_ranks_that_are_forked_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(MULTIPROCESSING)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, str(script), "fork"]
    job = TrialJob(command=command, folder=tmp_path, lab=None, scratch=tmp_path, steps=12)
    job.end_s = time.monotonic() + 200
    seen = job.recorded([]).seen
    assert seen.ddp is not None
    assert (seen.backend, seen.loading_processes, seen.sums_per_step) == ("gloo", 0, 1.0)
    assert len(seen.losses) == 12
    for fix in ("threads:2", "buckets:1"):  # one is applied in the parent, one in each rank
        assert job.recorded([parse_fix(fix)]).problem is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_ranks_that_a_script_starts_itself_are_bound_and_keep_their_numbers(
    tmp_path: Path, way: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(MULTIPROCESSING)
    fixes = "processors:own,placement:0,1"
    done = ended(*FULLWIRE, "apply", fixes, "--", sys.executable, str(script), way)
    bound = [line for line in done.stderr.splitlines() if "own: applied: processors " in line]
    assert len(bound) == 2, done.stderr
    assert "fix placement:0,1: not applied: the script numbers its ranks itself" in done.stderr


def test_a_job_that_hangs_ends_its_tuning_with_all_its_processes(tmp_path: Path) -> None:
    options = ["--budget", "24s", "-o", str(tmp_path / "tuned")]
    command = [*FULLWIRE, "tune", *options, "--", *JOB, "hanging"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "the job hangs, or is very slow: tune ended it after 12 s" in done.stderr
    assert str(tmp_path) not in subprocess.run(["ps", "axe"], capture_output=True, text=True).stdout


def test_a_tuning_that_a_scheduler_ends_keeps_the_best_so_far(tmp_path: Path) -> None:
    """SIGTERM ended one trial, and the next one began."""
    options = ["--steps", "12", "-o", str(tmp_path / "tuned")]
    command = [*FULLWIRE, "tune", *options, "--", *JOB, "slow", "ahead"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("fullwire: trial 1: "):
                time.sleep(2)  # the trial runs
                process.terminate()
    assert "fullwire: interrupted: the best so far is kept\n" in said
    assert not any(line.startswith("fullwire: trial 2: ") for line in said)
    assert process.returncode == 0
    assert (tmp_path / "tuned/recipe.toml").exists()


TUNING = """
import os, signal, sys
import fullwire as fw

def say(sentence):
    print(sentence, flush=True)
    if sentence.startswith("before: "):  # it analyses what was recorded
        os.kill(os.getpid(), signal.{name})

found = fw.tune({command!r}, "tuned", steps=12, budget="10min", say=say)
print(len(found.trials), found.recipe)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_between_two_recordings_ends_a_tuning_with_its_recipe(
    tmp_path: Path, name: str
) -> None:
    program = TUNING.format(name=name, command=[*JOB, "slow"])
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    *_, said, last = done.stdout.splitlines()
    assert said == "interrupted: the best so far is kept"
    assert last == "0 tuned/recipe.toml"
    assert read_recipe(tmp_path / "tuned/recipe.toml").before_s
    assert len(list(tmp_path.glob("tuned/*.run"))) <= 3


def test_a_fix_that_does_not_fit_leaves_the_job_as_it_is() -> None:
    fixes = "compression:bf16,input:2,buckets:1"
    told, said = told_by(*FULLWIRE, "apply", fixes, "--", *JOB, "stubborn")
    assert told["loaders"] == [0, 0]
    assert told["bucket_bytes"] == 2**20
    assert "fix compression:bf16: not applied: compress: expected a model without a" in said
    assert "fix input:2: not applied: the data set draws random numbers" in said


def test_a_codec_that_loses_more_than_the_limit_of_the_command_gives_way_to_float32() -> None:
    for how, times in (("1e-9", 1), ("0.5", 0)):
        limit = ["--max-error", how]
        _, said = told_by(*FULLWIRE, "apply", "compression:int8", *limit, "--", *JOB)
        assert "fix compression:int8: applied: int8" in said
        assert said.count("compression int8 stops after step 1: its squared error") == times


@pytest.mark.alone
def test_a_job_that_waits_for_its_data_is_cured_and_nobody_edits_it(tmp_path: Path) -> None:
    job = [*JOB, "slow"]
    folder = tmp_path / "tuned"
    options = ["--steps", "24", "--trials", "1", "--json", "-o", str(folder)]
    found, said = told_by(*FULLWIRE, "tune", *options, "--", *job)
    [trial] = found["trials"]
    assert (trial["fix"], trial["risk"], trial["kept"]) == ("input", "exact", True), said
    assert found["is_significant"]
    assert found["after_s"] < 0.7 * found["before_s"]
    assert trial["measured_s"] == pytest.approx(found["after_s"], rel=0.5)
    recipe = read_recipe(Path(found["recipe"]))
    assert [str(each) for each in recipe.fixes] == [f"input:{trial['setting']}"]
    assert recipe.workers == 2
    assert trial["loss_difference"] == 0.0
    assert trial["interval"]["low_s"] < trial["predicted_s"] < trial["interval"]["high_s"]
    assert trial["words"] in (folder / "report.html").read_text()
    # A trial's run names the user's command, and not the one that applied the fixes.
    assert read_run(folder / "trial-01.run").provenance.source == shlex.join(job)
