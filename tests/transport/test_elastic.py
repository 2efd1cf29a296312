"""Elastic training: a worker is killed in each phase of a step; every sample counts once."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import fullwire
from fullwire.resilience import checkpoints
from fullwire.resilience.pace import shares
from fullwire.resilience.state import State, parts_of

SCRIPT = Path(__file__).parent / "elastic_training.py"
UNCOMPILED = str(Path(__file__).parents[1] / "jobs" / "uncompiled.py")
TRAINING = [sys.executable, UNCOMPILED, str(SCRIPT)]
RUN = [sys.executable, "-m", "fullwire", "run", "--workers"]
SAMPLES, BATCH = 480, 48
# A killed worker is missed at once, by its closed connection. A silent one is missed after this
# time, in which a busy machine lets each worker run.
DETECT = "--detect=20s"


def command(folder: Path, phase: str, *options: str, epochs: int = 3) -> list[str]:
    return [*RUN, "3", DETECT, *options, "--", *TRAINING, str(folder), str(epochs), phase]


def played(
    folder: Path, phase: str, *options: str, epochs: int = 3, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, phase, *options, epochs=epochs),
        env=os.environ | more,
        cwd=folder,  # where a job that ends leaves its last checkpoint
        capture_output=True,
        text=True,
        timeout=120,
    )


def check_steps(folder: Path, epochs: int = 3, *, even: bool = True) -> dict[int, int]:
    """Hold every noted step against the others; return the world size of each step."""
    parts: dict[int, list[int]] = defaultdict(list)
    digests: dict[int, set[str]] = defaultdict(set)
    sizes: dict[int, set[int]] = defaultdict(set)
    ranks: dict[int, list[int]] = defaultdict(list)
    steps_in_epoch = math.ceil(SAMPLES / BATCH)
    orders = [
        torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        for epoch in range(epochs)
    ]
    for path in folder.glob("**/steps of *"):
        steps = []
        for line in path.read_text().splitlines():
            number, digest, *others = line.split()
            step, (rank, size, *samples) = int(number), map(int, others)
            epoch, place = divmod(step - 1, steps_in_epoch)
            whole = orders[epoch][place * BATCH : (place + 1) * BATCH]
            # A worker that still catches up applies steps in which it has no part.
            share = [*shares(len(whole), [1] * size), slice(0)][rank]
            assert not even or samples == whole[share]
            parts[step] += samples
            digests[step].add(digest)
            sizes[step].add(size)
            ranks[step].append(rank)
            steps.append(step)
        assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
    assert sorted(digests) == list(range(1, epochs * steps_in_epoch + 1))
    assert all(len(each) == 1 for each in digests.values()), "parameters differ after a step"
    assert all(len(each) == 1 for each in sizes.values())
    if not even:
        for step, samples in parts.items():
            epoch, place = divmod(step - 1, steps_in_epoch)
            assert sorted(samples) == sorted(orders[epoch][place * BATCH : (place + 1) * BATCH])
    for each in ranks.values():
        assert len(each) == len(set(each)), "two workers took the same part of a step"
    return {step: next(iter(size)) for step, size in sizes.items()}


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_worker_is_killed_in_each_phase(tmp_path: Path, place: str) -> None:
    """Of the workers that are left, the first one leads."""
    order = (0, 1, 2, 3) if place == "first" else (5, 4, 3, 2)
    phases, steps = ("forward", "backward", "optimizer", "between"), (7, 12, 17, 22)
    killed = list(zip(order, phases, steps, strict=True))
    endings = " ".join(f"{worker}:{phase}:{step}" for worker, phase, step in killed)
    run = [*RUN, "6", DETECT, "--", *TRAINING, str(tmp_path), "3", "no"]
    job = subprocess.run(
        run,
        env=os.environ | {"ENDS": "no", "ENDINGS": endings},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("done 30") == 2
    sizes = check_steps(tmp_path)
    for left, (worker, _, step) in zip((5, 4, 3, 2), killed, strict=True):
        assert f"worker {worker} was ended by SIGKILL, {left} go on" in job.stderr
        assert sizes[step] == left + 1
        assert sizes[step + 2] == left


def test_a_wire_format_stays_when_a_worker_is_lost_and_spares_biases(tmp_path: Path) -> None:
    job = played(tmp_path, "backward", epochs=2, FULLWIRE_WIRE="bf16", WIDTH="8000")
    assert job.returncode == 0, job.stderr
    assert check_steps(tmp_path, epochs=2)[20] == 2
    assert job.stdout.count("rounded to bf16: [True, False, True, False]") == 2


def test_a_lost_worker_is_replaced_and_gets_its_state_from_the_others(tmp_path: Path) -> None:
    job = played(tmp_path, "forward", "--respawn", epochs=20, NEW="3", PAUSE_S="0.005")
    assert job.returncode == 0, job.stderr
    sizes = check_steps(tmp_path, epochs=20)
    assert [sizes[step] for step in (7, 9, 200)] == [3, 2, 3]
    assert "worker 3 done 200" in job.stdout


def test_a_new_worker_receives_a_large_state_while_the_others_train(tmp_path: Path) -> None:
    more = {"BALLAST": str(8 * 2**20), "NEW": "3", "PAUSE_S": "0.003", "AWAITED_S": "0.003"}
    job = played(tmp_path, "forward", "--respawn", epochs=60, **more)
    assert job.returncode == 0, job.stderr
    sizes = check_steps(tmp_path, epochs=60)  # its parameters, too, after each step of others
    assert [sizes[step] for step in (7, 9, 600)] == [3, 2, 3]
    lines = (tmp_path / "steps of 3").read_text().splitlines()
    followed = [line.split() for line in lines if len(line.split()) == 4]
    assert followed, "it waited for the state with the others"
    assert {(words[2], words[3]) for words in followed} == {("2", "2")}
    assert job.stdout.count("ballast [0.0]") == 3


def test_the_others_train_while_the_script_of_a_new_worker_prepares(tmp_path: Path) -> None:
    more = {"NEW": "3", "PREPARES": "1", "AWAITED_S": "0.02"}
    job = played(tmp_path, "forward", "--respawn", epochs=20, **more)
    assert job.returncode == 0, job.stderr
    sizes = check_steps(tmp_path, epochs=20)
    assert [sizes[step] for step in (7, 29, 200)] == [3, 2, 3]
    assert "worker 3 done 200" in job.stdout


def test_all_workers_are_lost_and_the_job_begins_again(tmp_path: Path) -> None:
    job = played(tmp_path, "between", "--respawn", ENDS="all")
    assert job.returncode == 0, job.stderr
    assert "no worker is left that has the parameters. The job begins again" in job.stderr
    assert "done 30" in job.stdout


def test_a_job_that_has_too_few_workers_goes_on_from_its_checkpoint_with_another_number(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    kept = ("--checkpoint", str(tmp_path / "kept"), "--every", "0.01s", "--keep", "2")
    # The worker that ends waits for a first checkpoint, which begins before step 7.
    options, folder = ("--min", "3", *kept), str(tmp_path / "kept")
    job = played(tmp_path / "a", "forward", *options, KEPT=folder, PAUSE_S="0.01")
    assert job.returncode == 4
    assert "the job ended with fewer than --min 3 of 3 workers, after step 7" in job.stderr
    place = tmp_path / "kept/step-000000007"
    assert f"--checkpoint {tmp_path / 'kept'} goes on from {place}" in job.stderr
    assert len(list((tmp_path / "kept").glob("step-*"))) == 2
    command = [*RUN, "2", DETECT, *kept, "--", *TRAINING, str(tmp_path / "b"), "3", "no"]
    job = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stderr
    assert f"goes on after step 7, from {place}" in job.stderr
    assert set(check_steps(tmp_path).values()) == {2, 3}
    last = max((tmp_path / "kept").glob("step-*"))
    assert {path.name for path in last.glob("part-*")} == {"part-0-of-2", "part-1-of-2"}


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    state = State({"model": {"weight": torch.arange(6.0)}})
    places = [checkpoints.write_whole(tmp_path, step, state, keep=3) for step in (1, 2, 3, 4)]
    assert not places[0].exists()
    (places[3] / "part-0-of-1").write_bytes(b"less")
    (places[2] / "manifest.json").unlink()
    found = checkpoints.newest(tmp_path)
    assert found is not None
    place, step, problems = found
    assert (place, step, len(problems)) == (places[1], 2, 2)
    description, row, _ = checkpoints.read(place)
    parts = parts_of(description, torch.frombuffer(row, dtype=torch.uint8))
    assert torch.equal(parts["model"]["weight"], torch.arange(6.0))


def test_the_time_between_checkpoints_follows_from_failures_and_their_cost() -> None:
    clock = checkpoints.Clock(None, workers=8)
    began_s = time.monotonic()
    rare_s = clock.interval_s(began_s + 1000)
    clock.failures = 10
    assert clock.interval_s(began_s + 1000) == pytest.approx((2 * 0.1 * 100) ** 0.5, rel=0.01)
    assert rare_s > 100 * clock.interval_s(began_s + 1000)
    clock.written_s = 60
    assert clock.interval_s(began_s + 1000) == 60  # no faster than they are written
    assert checkpoints.Clock(5.0, workers=8).interval_s(began_s) == 5


PLAIN = """
import os, pathlib, signal, sys, time
rank, size, note = os.environ["RANK"], os.environ["WORLD_SIZE"], pathlib.Path(sys.argv[1])
if size == "3" and not note.exists():
    note.with_name("here " + rank).touch()
    if rank == "1":
        while not all(note.with_name("here " + other).exists() for other in "02"):
            time.sleep(0.01)
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
print("rank", rank, "of", size, flush=True)
"""


@pytest.mark.parametrize(("option", "size"), [("--min=1", 2), ("--respawn", 3)])
def test_a_script_that_is_not_elastic_starts_again(tmp_path: Path, option: str, size: int) -> None:
    script = [sys.executable, "-c", PLAIN, str(tmp_path / "note")]
    job = subprocess.run(
        [*RUN, "3", option, "--", *script], capture_output=True, text=True, timeout=60
    )
    assert job.returncode == 0, job.stderr
    assert f"worker 1 was ended by SIGKILL; {size} workers start again" in job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} of {size}" for rank in range(size)]


@pytest.mark.parametrize(
    ("workers", "given", "threads"),
    [(2, {}, "1"), (2, {"OMP_NUM_THREADS": "3"}, "3"), (1, {}, "-")],
)
def test_workers_of_one_host_have_a_thread_each_unless_the_user_set_another_number(
    workers: int, given: dict[str, str], threads: str
) -> None:
    without = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    job = subprocess.run(
        [*RUN, str(workers), "--", "sh", "-c", "echo ${OMP_NUM_THREADS:--}"],
        env=without | given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert job.stdout.split() == [threads] * workers


def test_a_worker_is_killed_while_the_ranks_form_an_epoch(tmp_path: Path) -> None:
    running = subprocess.Popen(
        command(tmp_path, "change", "--min", "1", epochs=60),
        env=os.environ | {"ENDS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    noted = tmp_path / "steps of 0"
    while not noted.exists() or len(noted.read_text().splitlines()) < 20:
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(worker_of(running.pid, "2"), signal.SIGKILL)  # and worker 1 ends itself after that
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    assert output.count("done 600") == 1
    assert check_steps(tmp_path, epochs=60)[600] == 1


def worker_of(launcher: int, number: str) -> int:
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if f"FULLWIRE_ELASTIC_WORKER={number}".encode() in environment:
            return int(child)
    raise AssertionError(f"no worker {number}")


def test_a_job_alone_trains_as_a_plain_loop() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Linear(4, 1)

    data = torch.randn(10, 4)
    ours, plain = model(), model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    job = fullwire.elastic(ours, optimizer)
    seen: list[int] = []
    for batch in job.batches(data, batch_size=4, shuffle=False):
        with job.step():
            optimizer.zero_grad()
            ours(batch).square().mean().backward()
            optimizer.step()
        seen += job.samples
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in data.split(4):
        other.zero_grad()
        plain(batch).square().mean().backward()
        other.step()
    assert seen == list(range(10))
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True)
    )


def test_misuse_is_told() -> None:
    ours = torch.nn.Linear(4, 1)
    job = fullwire.elastic(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    with pytest.raises(fullwire.UsageError, match="expected one backward"), job.step():
        pass
    with pytest.raises(fullwire.UsageError, match=r"got 0 samples"):
        next(job.batches([], batch_size=4))
    with pytest.raises(fullwire.UsageError, match=r"with job.step"):
        list(job.batches(torch.zeros(4, 4), batch_size=2))
    with pytest.raises(fullwire.UsageError, match="inside"):
        ours(torch.zeros(1, 4)).sum().backward()
    with pytest.raises(fullwire.UsageError, match="state_dict"):
        job.state({"counter": 3})


@pytest.mark.parametrize(("count", "size"), [(48, 5), (7, 3), (2, 3), (0, 2)])
def test_shares_divide_a_batch(count: int, size: int) -> None:
    parts = [list(range(count))[share] for share in shares(count, [1] * size)]
    assert list(itertools.chain(*parts)) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_exit_status_signals_and_lines_of_workers() -> None:
    lines = "import sys\nfor i in range(200): print('x' * 5000)"
    job = subprocess.run(
        [
            sys.executable,
            "-m",
            "fullwire",
            "run",
            "--workers",
            "3",
            "--",
            sys.executable,
            "-c",
            lines,
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert job.returncode == 0
    assert set(job.stdout.splitlines()) == {"x" * 5000}
    assert len(job.stdout.splitlines()) == 600
    running = subprocess.Popen(
        [*RUN, "2", "--", "sh", "-c", "echo ready; exec sleep 100"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with running:
        assert running.stdout is not None
        assert [running.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 128 + signal.SIGTERM


def test_workers_that_never_start_end_the_job() -> None:
    job = subprocess.run(
        [*RUN, "2", "--respawn", "--", "false"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert job.returncode == 4
    assert job.stderr.count("2 workers start again") == 3
