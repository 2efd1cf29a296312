"""A job on a lab, recorded: real hosts, real training, and a run that knows its links."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fullwire.run.store import read_run
from tests.lab.test_lab import finished, lab_run, needs_namespaces
from tests.torch.test_record import JOBS, UNCOMPILED, needs_torch, solo

pytestmark = [needs_namespaces, needs_torch]

DDP = str(JOBS / "ddp.py")


def test_every_host_is_recorded_and_the_run_knows_its_links(tmp_path: Path) -> None:
    place = tmp_path / "job.run"
    options = ["--workers", "3", "--rate", "200Mbps", "--rate", "2:100Mbps", "-o", str(place)]
    options += ["--metric", "(?P<digit>[0-9])"]
    done = finished(lab_run(*options, command=[sys.executable, UNCOMPILED, DDP]))
    assert done.returncode == 0, done.stderr.decode()
    assert len(set(done.stdout.split())) == 1  # the job's own output, and no other
    assert b"3 ranks, 5 steps" in done.stderr
    run = read_run(place)
    assert run.complete
    assert set(run.spans.rank.tolist()) == {0, 1, 2}
    assert run.metrics.name.tolist() == ["digit"] * 3  # of the same digest
    assert len(set(run.metrics.value.tolist())) == 1
    assert run.facts.line_rate_bps == 200e6
    assert run.facts.other_line_rates_bps == ((2.0, 100e6),)
    assert run.facts.hosts == "host0,host1,host2"
    delivered = run.facts.delivered_out_bps
    assert isinstance(delivered, tuple)
    limits = [191e6, 191e6, 95.6e6]
    for (_, bps), limit_bps in zip(delivered, limits, strict=True):
        assert 0.9 * limit_bps <= bps
    assert not list(tmp_path.glob("*.recording"))


def test_where_a_host_has_several_ranks_each_knows_its_own_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPS", "12")  # the gradient noise is noted in one of ten
    place = tmp_path / "job.run"
    options = ["--workers", "2", "--rate", "200Mbps", "--rate", "1:100Mbps", "-o", str(place)]
    options += ["--noise"]
    torchrun = (
        'exec "$0" "$1" -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --node-rank=$RANK '
        '--master-addr=$MASTER_ADDR --master-port=$MASTER_PORT "$@"'
    )
    job = ["bash", "-c", torchrun, sys.executable, UNCOMPILED, DDP]
    done = finished(lab_run(*options, command=job))
    assert done.returncode == 0, done.stderr.decode()
    run = read_run(place)
    facts = run.facts
    assert len(run.noise)
    assert facts.hosts == "host0,host0,host1,host1"
    assert facts.other_line_rates_bps == ((2.0, 100e6), (3.0, 100e6))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_job_leaves_the_run_of_what_it_did(tmp_path: Path, number: int) -> None:
    place = tmp_path / "job.run"
    options = ["--workers", "1", "--rate", "1Gbps", "-o", str(place)]
    command = lab_run(*options, command=solo("endless"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"thirty steps\n"
        job.send_signal(number)
        said = job.communicate(timeout=40)[1]
    assert job.returncode == 128 + number, said.decode()
    run = read_run(place)
    assert run.facts.exit_status == 128 + number
    assert len(run.spans) > 0


def test_a_run_in_the_way_is_refused_before_the_lab_is_made(tmp_path: Path) -> None:
    (tmp_path / "job.run").mkdir()
    options = ["--workers", "2", "--rate", "1Gbps", "-o", str(tmp_path / "job.run")]
    done = finished(lab_run(*options, command=["true"]))
    assert done.returncode == 2
    assert b"links deliver" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_job_gets_the_environment_that_it_would_have_without_us(tmp_path: Path) -> None:
    ours = "import os; print(sorted(os.environ))"
    options = ["--workers", "1", "--rate", "1Gbps", "-o", str(tmp_path / "job.run")]
    command = lab_run(*options, command=[sys.executable, "-c", ours])
    # The C library's environment, because it holds more than os.environ does.
    given = dict(os.environ)
    done = subprocess.run(command, env=given, capture_output=True, timeout=100, check=True)
    added = set(eval(done.stdout)) - set(given)  # a list of words that we printed ourselves
    assert added <= {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "NODE_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_NODE_RANK",
        "PET_NNODES",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
        "PET_RDZV_ENDPOINT",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
        "FULLWIRE_PROBE",
        "FULLWIRE_NOISE",
        "FULLWIRE_HOOKS",
        "FULLWIRE_RECORD_INTO",
    }
