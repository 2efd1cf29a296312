"""Launchers in a lab: the variables that they read, and warnings about jobs that never meet."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from fullwire.fixes._recipe import Recipe, as_toml, parse_fix
from fullwire.lab.description import describe
from fullwire.lab.lab import Lab
from fullwire.lab.session import run_job, summary, words_of
from tests.lab.test_lab import needs_namespaces
from tests.torch.test_record import JOBS, UNCOMPILED, needs_torch

TORCHRUN = [sys.executable, UNCOMPILED, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
# Three sources: the variables that give Lightning a rank's number (LightningEnvironment), those
# that Accelerate reads beside RANK (PartialState), and torchrun's for its options
# (argparse_util.env).
VARIABLES = {
    "NODE_RANK": "{rank}",
    "LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "{rank}",
    "PET_MASTER_ADDR": "10.77.0.1",
    "PET_MASTER_PORT": "29500",
    "PET_RDZV_ENDPOINT": "10.77.0.1:29500",
}
JOB = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g}\\n", end="", flush=True)
dist.destroy_process_group()
"""

pytestmark = needs_namespaces


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


def played(*command: str | Path) -> list[str]:
    """Run a command on two hosts to its good end, and return the lab's messages."""
    sentences: list[str] = []
    with Lab(describe(workers=2, rate=["1Gbps"])) as lab:
        assert run_job(lab, [str(word) for word in command], say=sentences.append) == 0
    return sentences


def test_each_rank_has_what_frameworks_and_launchers_read(
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = f"import os; print({{name: os.environ[name] for name in {list(VARIABLES)}}})"
    assert played(sys.executable, "-c", program) == []
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [
        str({name: value.format(rank=rank) for name, value in VARIABLES.items()}) for rank in (0, 1)
    ]


@pytest.mark.parametrize("given", [None, "3"])
@pytest.mark.parametrize("workers", [1, 2])
def test_each_rank_has_one_thread_unless_the_user_set_another_number(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    workers: int,
    given: str | None,
) -> None:
    """Formerly each rank had a thread on every processor, and slowed the ranks of other hosts."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    with Lab(describe(workers=workers, rate=["1Gbps"])) as lab:
        told = "Each rank has OMP_NUM_THREADS=1, since OMP_NUM_THREADS is not set here"
        assert (told in summary(lab)) == (given is None)
        assert run_job(lab, ["sh", "-c", "echo $OMP_NUM_THREADS"]) == 0
    assert capfd.readouterr().out.split() == [given or "1"] * workers


@needs_torch
def test_a_recipe_inside_torchrun_changes_the_ranks_of_both_hosts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the guide to tuning shows it: rank 0's host has the file, and the other one follows."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(as_toml(Recipe(fixes=(parse_fix("transport:fullwire"),))))
    script = tmp_path / "train.sh"
    run = f"exec {sys.executable} -m fullwire run"
    script.write_text(
        f'#!/bin/sh\n[ $RANK = 0 ] && {run} -r {recipe} -- "$@"\n{run} --follow -- "$@"\n'
    )
    script.chmod(0o755)
    inside: list[str | Path] = [
        "--no-python",
        script,
        sys.executable,
        UNCOMPILED,
        JOBS / "fixable.py",
    ]
    assert played(*TORCHRUN, *inside) == []
    told = capfd.readouterr()
    assert json.loads(told.out)["backend"] == "fullwire"
    assert told.err.count("fullwire: fix transport:fullwire: applied: ") == 2


# As `tune` does on the host of rank 0: a trial, then the end.
TUNING = """
import sys, time
from pathlib import Path
from fullwire.answers.trials import TrialJob
from fullwire.fixes._recipe import parse_fix
folder = Path(sys.argv[1])
job = TrialJob(command=sys.argv[2:], folder=folder, lab=None, scratch=folder, steps=24)
job.end_s = time.monotonic() + 120
found = job.recorded([parse_fix("transport:fullwire"), parse_fix("buckets:1")])
job.part()
ranks = sorted(set(found.run.spans.rank.tolist()))
print(f"ranks {ranks}, backend {found.run.facts.backend}, problem {found.problem}", flush=True)
"""


@needs_torch
@pytest.mark.usefixtures("uncompiled")
def test_a_trial_reaches_the_ranks_of_another_host_through_the_store_of_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tuning, script = tmp_path / "tuning.py", tmp_path / "each.sh"
    tuning.write_text(TUNING)
    script.write_text(
        f"""#!/bin/sh
[ $PET_NODE_RANK = 0 ] && exec {sys.executable} {tuning} {tmp_path} "$@"
exec {sys.executable} -m fullwire run --follow -- "$@"
"""
    )
    script.chmod(0o755)
    torchrun = [word for word in TORCHRUN if word != UNCOMPILED]  # which a trial must recognise
    assert played(script, *torchrun, UNCOMPILED, JOBS / "fixable.py", "slow") == []
    told = capfd.readouterr()
    assert "ranks [0, 1], backend fullwire, problem None" in told.out
    trial = "trial 1 of rank 0's host: transport:fullwire, buckets:1, status 0"
    assert [line for line in told.err.splitlines() if "trial" in line] == [f"fullwire: {trial}"]


@needs_torch
@pytest.mark.parametrize("more", [[], ["--rdzv-backend", "c10d"], ["--nnodes", "2"]])
def test_torchrun_on_each_host_is_one_job(
    job: Path, capfd: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """Formerly each host silently ran a job of its own, or waited for the other in vain."""
    assert played(*TORCHRUN, *more, UNCOMPILED, job) == []
    assert sorted(capfd.readouterr().out.split("\n"))[1:] == ["rank 0 of 2: 2", "rank 1 of 2: 2"]


@needs_torch
def test_torchrun_that_is_told_to_stay_alone_is_warned_of(
    job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/sh\nexec {' '.join(TORCHRUN)} --standalone {UNCOMPILED} {job}\n")
    script.chmod(0o755)
    before, after = played(script)
    assert sorted(capfd.readouterr().out.split("\n"))[1:] == ["rank 0 of 1: 1"] * 2
    assert before.startswith("warning: each host runs a job of its own (--standalone): expected")
    assert after == (
        "warning: hosts 0, 1 sent nothing to another host: ranks there met only each other"
    )


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (
            "accelerate launch --multi_gpu train.py",
            "accelerate reads no variable that names the others",
        ),
        ("mpirun -n 2 python train.py", "mpirun reads no variable that names the others"),
        ("torchrun --nnodes=1 train.py", "--nnodes=1"),
        ("torchrun --rdzv-endpoint localhost:0 train.py", "--rdzv-endpoint localhost:0"),
    ],
)
def test_launchers_that_know_of_no_other_host_are_named(
    tmp_path: Path, words: str, cause: str
) -> None:
    name, *options = words.split()
    (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / name).chmod(0o755)
    before, after = played(tmp_path / name, *options)
    assert f"each host runs a job of its own ({cause})" in before
    assert "sent nothing to another host" in after


@pytest.mark.parametrize("more", ["", " --main_process_ip 127.0.0.1"])
def test_accelerate_that_sets_the_address_of_rank_0_is_warned_of(tmp_path: Path, more: str) -> None:
    """Every rank but rank 0 would wait there for ever."""
    (tmp_path / "accelerate").write_text("#!/bin/sh\n")
    (tmp_path / "accelerate").chmod(0o755)
    options = f"launch --num_processes 2{more} train.py".split()
    before, after = played(tmp_path / "accelerate", *options)
    assert before == (
        "warning: each rank looks for rank 0 on its own host (--num_processes 2): leave this "
        "option of accelerate out, or add --main_process_ip 10.77.0.1"
    )
    assert "sent nothing to another host" in after


@pytest.mark.parametrize(
    ("config", "options", "warned"),
    [
        (
            "num_processes: 2\n",
            "",
            "(--num_processes 2 from {file}): add --num_processes 1, or --m",
        ),
        ('{"num_processes": 2}', "", "(--num_processes 2 from {file})"),
        ("distributed_type: MULTI_GPU\n", "", "each host runs a job of its own"),
        ("distributed_type: 'NO'\nnum_processes: 1\n", "", None),
        ("num_processes: 2\n", "--num_processes 1 ", None),
        ("num_processes: 2\nmain_process_ip: 10.77.0.1\n", "", None),
        ("num_processes: 2\n", "--cpu ", None),
    ],
)
def test_the_configuration_file_of_accelerate_tells_its_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    options: str,
    warned: str | None,
) -> None:
    """Formerly a job with such a file waited for ever, and the lab said nothing."""
    file = tmp_path / "home" / "accelerate" / "default_config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(config)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "accelerate").write_text("#!/bin/sh\n")
    (tmp_path / "accelerate").chmod(0o755)
    [*before, _] = played(tmp_path / "accelerate", *f"launch {options}train.py".split())
    assert len(before) == (warned is not None)
    assert all(str(warned).format(file=file) in each for each in before)
    if options != "--cpu " and warned:  # a file of another name tells the same
        named = file.rename(tmp_path / "my.yaml")
        [first, _] = played(
            tmp_path / "accelerate", "launch", "--config_file", str(named), "train.py"
        )
        assert warned.format(file=named) in first


def test_the_file_that_accelerate_reads_is_the_one_that_the_warning_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly the usual file counted for a shell script, and the script's own for accelerate."""
    usual = tmp_path / "accelerate" / "default_config.yaml"
    usual.parent.mkdir()
    usual.write_text("num_processes: 1\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "accelerate").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "accelerate").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    two, script = tmp_path / "two.json", tmp_path / "go.sh"
    two.write_text('{"distributed_type": "NO", "num_processes": 2}')
    script.write_text(f"accelerate launch --config_file {two} train.py\n")
    [first, _] = played("sh", script)
    assert f"(--num_processes 2 from {two})" in first
    [silent] = played("accelerate", "launch", "train.py", "--config_file", two)
    assert "sent nothing" in silent


@needs_torch
@pytest.mark.parametrize("options", ["--cpu", "--num_processes 2 --main_process_ip 10.77.0.1"])
def test_accelerate_that_passes_the_variables_on_runs_one_job(
    tmp_path: Path, job: Path, options: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """On processors it starts its script once, and all ranks are there: no warning is due."""
    (tmp_path / "accelerate").write_text(f"#!/bin/sh\nexec {sys.executable} {UNCOMPILED} {job}\n")
    (tmp_path / "accelerate").chmod(0o755)
    own = ("--num_processes", "4")  # of the script
    assert played(tmp_path / "accelerate", "launch", *options.split(), job, *own) == []
    told = sorted(capfd.readouterr().out.split("\n"))
    assert told[-2:] == ["rank 0 of 2: 2", "rank 1 of 2: 2"]


def test_a_long_command_without_traffic_is_said_to_have_none() -> None:
    assert played("true") == []
    [said] = played("sleep", "2.5")
    assert "hosts 0, 1 sent nothing to another host" in said
    send = "test $RANK = 1 || head -c 4000 /dev/zero > /dev/udp/10.77.0.2/9; sleep 2.5"
    [said] = played("bash", "-c", send)
    assert said.startswith("warning: host 1 sent nothing")


def test_only_shell_scripts_tell_which_launcher_a_command_starts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "tool").write_text("#!/usr/bin/env python\nimport torchrun  # torchrun\n")
    (tmp_path / "data").write_text("torchrun")
    assert "torchrun" not in words_of([str(path) for path in tmp_path.iterdir()])
    (tmp_path / "start").write_text("#!/usr/bin/env -S bash -e\nexec torchrun train.py\n")
    assert "torchrun" in words_of([str(tmp_path / "start")])
    (tmp_path / "start.sh").write_text("torchrun train.py\n")
    assert "torchrun" in words_of(["sh", str(tmp_path / "start.sh")])
