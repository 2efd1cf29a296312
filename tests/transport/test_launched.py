"""Elastic workers that a launcher starts: they meet by its variables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fullwire
from fullwire.resilience.launched import Launcher, first_host
from fullwire.resilience.place import Folder, next_number
from tests.ports import held_port
from tests.transport.test_elastic import DETECT, SCRIPT, UNCOMPILED, check_steps, worker_of

WORKER = Path(__file__).parent / "elastic_worker.py"
TORCHRUN = [
    sys.executable,
    UNCOMPILED,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=3",
]
RUN = [sys.executable, "-m", "fullwire", "run"]


def launched(
    folder: Path, *words: str, epochs: int, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *TORCHRUN,
            *words,
            UNCOMPILED,
            str(SCRIPT),
            str(folder),
            str(epochs),
            more.get("PHASE", "forward"),
        ],
        env=os.environ | {"FULLWIRE_ELASTIC_DETECT_S": "20"} | more,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_workers_of_torchrun_meet_and_a_killed_one_is_replaced(tmp_path: Path) -> None:
    inside = ("--no-python", *RUN, DETECT, "--respawn", "--", sys.executable)
    job = launched(tmp_path, *inside, epochs=20, NEW="4", PAUSE_S="0.005")
    assert job.returncode == 0, job.stderr
    assert "worker 1 was ended by SIGKILL; another starts" in job.stderr
    sizes = check_steps(tmp_path, epochs=20)
    assert [sizes[step] for step in (7, 9, 200)] == [3, 2, 3]
    assert "worker 4 done 200" in job.stdout


def test_workers_of_torchrun_go_on_without_a_lost_one(tmp_path: Path) -> None:
    inside = ("--no-python", *RUN, DETECT, "--min", "2", "--", sys.executable)
    job = launched(tmp_path, *inside, epochs=3)
    assert job.returncode == 0, job.stderr
    assert "worker 1 was ended by SIGKILL; the others go on" in job.stderr
    assert check_steps(tmp_path)[30] == 2


def test_a_script_of_torchrun_needs_no_other_command(tmp_path: Path) -> None:
    job = launched(tmp_path, epochs=1, PHASE="none")
    assert job.returncode == 0, job.stderr
    assert set(check_steps(tmp_path, epochs=1).values()) == {3}


def test_the_variables_of_launchers_name_a_place() -> None:
    common = {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}
    kubernetes = Launcher.told({"RANK": "1", "WORLD_SIZE": "4", **common})
    assert kubernetes is not None
    assert kubernetes[:4] == (1, 4, "gpu1", 29500)
    assert not kubernetes.has_store
    slurm = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": "gpu[07-08,12]",
    }
    first = Launcher.told({**slurm, "SLURM_JOB_ID": "123456"})
    assert first is not None
    assert first[:4] == (3, 8, "gpu07", 23456)
    assert Launcher.told({**slurm, **common}) == (3, 8, "gpu1", 29500, " 0", False)
    assert Launcher.told({}) is Launcher.told({"RANK": "0", "WORLD_SIZE": "1"}) is None
    with pytest.raises(fullwire.UsageError, match="expected MASTER_ADDR and MASTER_PORT"):
        Launcher.told({"RANK": "1", "WORLD_SIZE": "4"})
    assert [first_host(each) for each in ("a,b", "a[1,3]", "", "n-3")] == [
        "a",
        "a1",
        "localhost",
        "n-3",
    ]


def test_a_worker_that_starts_again_has_a_number_of_its_own(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert next_number(folder, 1, 3) == 1
    for rank in range(3):
        folder.set(f"rank {rank}", "")
    assert next_number(folder, 1, 3) == 4
    folder.set("rank 5", "")
    assert (next_number(folder, 1, 3), next_number(folder, 2, 3)) == (7, 8)
    folder.set("gone 7", "")
    assert next_number(folder, 0, 3) == 9


def test_run_without_workers_and_launcher_is_refused() -> None:
    job = subprocess.run([*RUN, "--", "true"], capture_output=True, text=True, timeout=60)
    assert job.returncode == 2
    assert "expected --workers N, --recipe FILE.toml, or a launcher" in job.stderr


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


def test_a_job_goes_on_without_the_host_of_its_store_and_new_workers_find_each_other(
    tmp_path: Path, port: int
) -> None:
    """As in pods: three places, and rank 0 serves the store until its pod is lost."""
    worker = [sys.executable, UNCOMPILED, str(WORKER), "100000", "-1"]
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = []
    for rank in range(3):
        with (tmp_path / f"said {rank}").open("w") as out:
            places.append(
                subprocess.Popen(
                    [*RUN, DETECT, "--respawn", "--", *worker],
                    env=os.environ | common | {"RANK": str(rank)},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )

    def await_word(rank: int, word: str) -> None:
        until = time.monotonic() + 60
        while word not in (tmp_path / f"said {rank}").read_text():
            assert time.monotonic() < until, (tmp_path / f"said {rank}").read_text()
            time.sleep(0.02)

    try:
        for rank in range(3):
            await_word(rank, "step 20 ")
        lost = [places[0].pid, worker_of(places[0].pid, "0")]
        for process in lost:
            os.kill(process, signal.SIGKILL)
        await_word(2, "(1, 2)")
        os.kill(worker_of(places[1].pid, "1"), signal.SIGKILL)
        await_word(2, "(2, 4)")
        os.kill(worker_of(places[2].pid, "2"), signal.SIGKILL)
        for rank in (1, 2):
            await_word(rank, "(4, 5)")
    finally:
        for each in places:
            each.terminate()
    assert [each.wait(20) for each in places] == [-signal.SIGKILL, 143, 143]
