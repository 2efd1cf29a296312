"""Many hosts: a job recorded in parts by its tasks, then joined, and launchers on many hosts."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fullwire.recorder.sampler import SUFFIX
from fullwire.run.store import read_run
from tests.conftest import Cli
from tests.lab.test_lab import eventually, finished, lab_run, needs_namespaces
from tests.ports import held_port
from tests.torch.test_record import JOBS, UNCOMPILED, check_rank, needs_torch

FULLWIRE = [sys.executable, "-m", "fullwire"]
DDP = [UNCOMPILED, str(JOBS / "ddp.py")]


def part_of(place: Path, *command: str) -> list[str]:
    return [*FULLWIRE, "record", "--part", "-o", str(place), "--", *command]


@needs_namespaces
@needs_torch
def test_parts_of_two_hosts_in_directories_of_their_own_become_one_run(
    cli: Cli, tmp_path: Path
) -> None:
    part = shlex.join(part_of(Path("job.run"), sys.executable, *DDP))
    own_place = f"mkdir -p {tmp_path}/$RANK && cd {tmp_path}/$RANK && exec {part}"
    done = finished(lab_run("--workers", "2", "--rate", "1Gbps", command=["sh", "-c", own_place]))
    assert done.returncode == 0, done.stderr.decode()
    places = [tmp_path / str(rank) / "job.run.recording" for rank in range(2)]
    joined = cli("join", *places, "-o", tmp_path / "job.run")
    assert joined.returncode == 0, joined.stderr
    run = read_run(tmp_path / "job.run")
    assert run.complete, run.missing
    for rank in (0, 1):
        check_rank(run, rank, steps=5)
    assert run.facts.hosts == "host0,host1"
    assert set(run.links.host) == {"host0", "host1"}
    assert run.facts.exit_status == 0
    assert run.facts.clock_uncertainty_s == ((0.0, 0.0), (1.0, 0.0))
    assert shlex.join(DDP) in run.provenance.source


@needs_namespaces
@needs_torch
@pytest.mark.usefixtures("uncompiled")
def test_torchrun_on_two_hosts_is_recorded(tmp_path: Path) -> None:
    torchrun = (
        "exec torchrun --nnodes=2 --nproc-per-node=1 --node-rank=$RANK --master-addr=$MASTER_ADDR "
        f"--master-port=29511 {shlex.join(DDP)}"
    )
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    options = ["--workers", "2", "--rate", "1Gbps", "-o", str(tmp_path / "job.run")]
    done = subprocess.run(
        lab_run(*options, command=["sh", "-c", torchrun]),
        env=environment,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    run = read_run(tmp_path / "job.run")
    assert run.complete, run.missing
    for rank in (0, 1):
        check_rank(run, rank, steps=5)
    assert any(flow.startswith("10.77.0.1:") and ">10.77.0.2:" in flow for flow in run.sockets.flow)


@needs_torch
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed: mpirun")
def test_mpirun_with_a_part_for_each_task_is_recorded(cli: Cli, tmp_path: Path) -> None:
    with held_port() as port:
        as_ddp_wants = (
            f"RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port} "
            f"exec {sys.executable} {shlex.join(DDP)}"
        )
        part = part_of(tmp_path / "job.run", "sh", "-c", as_ddp_wants)
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *part]
        done = subprocess.run(mpirun, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()
    recording = tmp_path / "job.run.recording"
    assert cli("join", recording, "-o", tmp_path / "job.run").returncode == 0
    run = read_run(tmp_path / "job.run")
    assert run.complete, run.missing
    for rank in (0, 1):
        check_rank(run, rank, steps=5)
    assert len(list(recording.glob(f"*{SUFFIX}"))) <= 2


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "Slurm"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "torch.distributed"),
    ],
)
def test_one_task_of_several_is_told_to_record_a_part(
    cli: Cli, tmp_path: Path, variables: dict[str, str], launcher: str
) -> None:
    environment = {**os.environ, **variables}
    done = cli("record", "-o", tmp_path / "x.run", "--", "true", env=environment)
    assert done.returncode == 2
    assert f"one of 4 tasks ({launcher})" in done.stderr
    assert "--part" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_batch_script_that_starts_tasks_is_none_of_them(cli: Cli, tmp_path: Path) -> None:
    environment = {**os.environ, "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "WORLD_SIZE": "4"}
    done = cli("record", "-o", tmp_path / "x.run", "--", "true", env=environment)
    assert done.returncode == 0, done.stderr


def test_another_jobs_parts_are_not_mixed_with_ours(cli: Cli, tmp_path: Path) -> None:
    command = part_of(tmp_path / "x.run", "true")
    for job in ("7", "7"):
        subprocess.run(command, env={**os.environ, "SLURM_JOB_ID": job}, check=True, timeout=60)
    other = {**os.environ, "SLURM_JOB_ID": "8"}
    done = subprocess.run(
        command, env=other, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "holds the parts of another job (7)" in done.stderr


def test_how_the_parts_ended_is_how_the_job_ended(cli: Cli, tmp_path: Path) -> None:
    for word in ("true", "false"):
        subprocess.run(part_of(tmp_path / "x.run", word), check=False, timeout=60)
    assert cli("join", tmp_path / "x.run.recording", "-o", tmp_path / "x.run").returncode == 0
    assert read_run(tmp_path / "x.run").facts.exit_status == 1


def test_a_part_that_was_killed_is_missing(cli: Cli, tmp_path: Path) -> None:
    with subprocess.Popen(part_of(tmp_path / "x.run", "cat"), stdin=subprocess.PIPE) as part:
        assert eventually(lambda: bool(list(tmp_path.glob(f"x.run.recording/*{SUFFIX}"))))
        part.send_signal(signal.SIGKILL)
    assert cli("join", tmp_path / "x.run.recording", "-o", tmp_path / "x.run").returncode == 0
    missing = read_run(tmp_path / "x.run").missing
    assert any("the end of a part was not seen (cat)" in each for each in missing)
