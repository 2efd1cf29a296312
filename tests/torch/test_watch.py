"""A real job of two ranks, watched from outside; then one rank is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fullwire.answers import watch as watching
from fullwire.answers import watched
from fullwire.recorder.jobs_here import jobs_here
from tests.conftest import Cli
from tests.ports import held_port

JOB = """
import time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
sums = torch.zeros(4_000_000)
while True:
    until_s = time.monotonic() + 0.1
    while time.monotonic() < until_s:
        torch.ones(100, 100) @ torch.ones(100, 100)
    dist.all_reduce(sums)
    print(time.monotonic(), flush=True)
"""


@pytest.mark.alone  # it measures a step
@pytest.mark.usefixtures("uncompiled")
def test_a_running_job_has_a_step_and_a_stopped_rank_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with held_port() as port:
        watch_a_job(port, monkeypatch)


def watch_a_job(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOB],
            env=os.environ | where | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        assert ranks[0].stdout is not None
        ranks[0].stdout.readline()
        here = [each for each in jobs_here() if each.ranks[0].pid == ranks[0].pid]
        assert [rank.pid for rank in here[0].ranks] == [each.pid for each in ranks]
        start_s = time.monotonic()
        found = watching.watch(ranks[1].pid, seconds=6, bandwidth="100Gbps")
        end_s = time.monotonic()
        assert found.explanation is not None, found.no_step
        # On a busy machine a step of this job lasts longer, so the job says how long.
        ends_s = np.array([float(ranks[0].stdout.readline())])
        while ends_s[-1] < end_s:
            ends_s = np.append(ends_s, float(ranks[0].stdout.readline()))
        own_s = float(np.median(np.diff(ends_s[ends_s > start_s])))
        assert own_s > 0.1
        assert found.explanation.step_s == pytest.approx(own_s, rel=0.15)
        monkeypatch.setattr(watched, "STUCK_AFTER_S", 1.0)
        ranks[1].send_signal(signal.SIGSTOP)
        found = watching.watch(ranks[0].pid, seconds=4)
        assert found.stuck is not None
        assert (found.stuck.rank, found.stuck.waiting) == (1, (0,))
        assert "stopped by a signal" in found.sentence
    finally:
        for each in ranks:
            each.kill()
            each.communicate()


LOADS = """
import time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

class Slow(IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(0.2 * dist.get_rank())
            yield torch.zeros(1)

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sums = torch.zeros(1_000_000)
    for batch in DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"):
        until_s = time.monotonic() + 0.05
        while time.monotonic() < until_s:
            torch.ones(100, 100) @ torch.ones(100, 100)
        dist.all_reduce(sums)
        print(flush=True)
"""


@pytest.mark.alone  # it measures which line a rank waits at
@pytest.mark.usefixtures("uncompiled")
def test_a_rank_that_waits_for_its_data_is_late_and_the_line_is_named(tmp_path: Path) -> None:
    """Neither rank computes longer than the other, and both sleep for most of a step."""
    if not (Path(sys.executable).parent / "py-spy").exists():
        pytest.skip("py-spy is not installed: pip install 'fullwire[watch]'")
    script = tmp_path / "train.py"
    script.write_text(LOADS)
    with held_port() as port:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env=os.environ | where | {"RANK": str(rank)},
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                start_new_session=True,
            )
            for rank in (0, 1)
        ]
        try:
            assert ranks[0].stdout is not None
            ranks[0].stdout.readline()
            found = watching.watch(ranks[0].pid, seconds=20, bandwidth="100Gbps")
            assert found.kind == "straggler", (found.possible, found.no_step)
            assert found.sentence.startswith("Rank 1 is late")
            assert "Rank 1 waits for its data at train.py:" in found.sentence
        finally:
            for each in ranks:
                os.killpg(each.pid, signal.SIGKILL)
                each.communicate()


HANGS = """
import sys, threading, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(3):
    dist.all_reduce(torch.zeros(100_000))
def dump():  # as torch does when a collective has waited for too long
    time.sleep(2)
    open(sys.argv[1] + str(rank), "wb").write(torch._C._distributed_c10d._dump_fr_trace())
    print(flush=True)
threading.Thread(target=dump).start()
if rank == 1:
    dist.recv(torch.zeros(1), 0)
dist.all_reduce(torch.zeros(100_000))
"""


@pytest.mark.usefixtures("uncompiled")
def test_the_flight_recorder_names_the_rank_that_misses_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks sleep alike, and only their dumps tell who has not asked."""
    beginning = f"{tmp_path}/rank_"
    monkeypatch.setattr(watched, "STUCK_AFTER_S", 1.0)
    with held_port() as port:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        where |= {"TORCH_FR_DUMP_TEMP_FILE": beginning, "TORCH_FR_BUFFER_SIZE": "100"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", HANGS, beginning],
                env=os.environ | where | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]
        try:
            for each in ranks:
                assert each.stdout is not None
                assert each.stdout.readline()
            found = watching.watch(ranks[0].pid, seconds=10)
            assert found.stuck is not None
            assert found.stuck.rank == 1
            assert "(allreduce), as dumps of the Flight Recorder tell" in found.sentence
        finally:
            for each in ranks:
                each.kill()
                each.communicate()


@pytest.mark.usefixtures("uncompiled")
def test_a_listed_job_writes_nothing_to_the_terminal(cli: Cli) -> None:
    code = "import torch, time; print(flush=True); time.sleep(60)"
    hostile = "train\x1b[2J\u202e.py"
    with subprocess.Popen([sys.executable, "-c", code, hostile], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        listed = cli("watch").stdout
        job.kill()
    assert str(job.pid) in listed
    assert all(line.isprintable() for line in listed.splitlines())
    assert r"\x1b[2J\u202e" in listed
