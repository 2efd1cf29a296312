"""Names of hosts and jobs, agents that a pipe stands for, and runs of two hosts that are joined."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.watch import judged
from fullwire.recorder import jobs_here, several_hosts
from fullwire.recorder.jobs_here import JobHere, RankHere, job_named, job_of
from fullwire.recorder.outside import Looks
from fullwire.recorder.several_hosts import HostsWatcher, command_on, host_names
from tests.unit.test_watch import a_job, seen


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        (
            "gpu[08-10,12],me@login.example",
            ["gpu08", "gpu09", "gpu10", "gpu12", "me@login.example"],
        ),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
        ("a,a", ["a"]),
        ("fe80::1%eth0", ["fe80::1%eth0"]),
    ],
)
def test_lists_of_hosts_are_read_as_slurm_writes_them(text: str, names: list[str]) -> None:
    assert host_names(text) == tuple(names)


@pytest.mark.parametrize(
    "text",
    [
        "gpu[1-",
        "gpu[3-1]",
        "gpu[]",
        "gpu[a-b]",
        "-oProxyCommand=x",
        "a b",
        "a;b",
        "a,",
        "x[1-9999]",
    ],
)
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(fw.UsageError, match="--hosts: expected"):
        host_names(text)


def test_ssh_asks_nothing_and_the_host_itself_needs_none() -> None:
    over_ssh = command_on("gpu1", ("watch", "--job", "it's"))
    assert over_ssh[:2] == ["ssh", "-T"]
    assert "BatchMode=yes" in over_ssh
    assert over_ssh[-2] == "gpu1"
    here = command_on(socket.gethostname(), ("watch", "--job", "it's"))
    assert here == [sys.executable, "-m", "fullwire", "watch", "--job", "it's"]


def a_rank(pid: int, rank: int = 0) -> RankHere:
    return RankHere(pid=pid, rank=rank, user="me", command="train.py", network=1, uses_gpu=False)


@pytest.mark.parametrize(
    ("environment", "cgroup", "name"),
    [
        ({"SLURM_JOB_ID": "1234"}, "", "slurm:1234"),
        ({"SLURM_ARRAY_JOB_ID": "1200", "SLURM_ARRAY_TASK_ID": "7"}, "", "slurm:1200_7"),
        ({}, "0::/system.slice/slurmstepd.scope/job_1234/step_0/user/task_0", "slurm:1234"),
        ({}, "4:memory:/slurm/uid_1000/job_1234/step_batch", "slurm:1234"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "bert-worker-0"}, "", "k8s:bert"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "bert-worker-0"}, "",
         "k8s:bert-worker-0"),
        ({}, "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod7a3c_11.slice/"
         "cri-containerd-90.scope", "k8s:7a3c-11"),
        ({}, "0::/kubepods/besteffort/pod7a3c-11/90ab", "k8s:7a3c-11"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, "", "master:10.0.0.1:29500"),
        ({}, "", "rain.p"),
    ],
)  # fmt: skip
def test_a_job_has_the_names_that_its_scheduler_gave(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], cgroup: str, name: str
) -> None:
    meets = ":".join(environment.get(key, "") for key in ("MASTER_ADDR", "MASTER_PORT"))
    jobs = {
        7: JobHere(ranks=(a_rank(7),), workers=1, is_guessed=False, meets=meets),
        8: JobHere(
            ranks=(RankHere(pid=8, rank=0, user="me", command="x", network=1, uses_gpu=False),),
            workers=1,
            is_guessed=False,
        ),
    }
    other = {"SLURM_JOB_ID": "123", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "ber"}
    monkeypatch.setattr(jobs_here, "jobs_here", lambda: tuple(jobs.values()))
    monkeypatch.setattr(jobs_here, "_environment", lambda pid: environment if pid == 7 else other)
    monkeypatch.setattr(
        jobs_here,
        "_cgroup",
        lambda pid: (cgroup if pid == 7 else "0::/job_12345/pod7a3c").replace("\n", "/").split("/"),
    )
    assert job_named(name) is jobs[7]
    with pytest.raises(fw.UsageError, match=r"expected .*2 jobs run here with other ones"):
        job_named(f"{name}9")


def test_a_name_of_another_users_processes_is_told_with_that_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", "other-users-job"],
                          stdin=subprocess.PIPE) as other:  # fmt: skip
        monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
        with pytest.raises(
            fw.UsageError, match=r"1 process of \S+ has them: that user and root alone may watch"
        ):
            job_named("other-users-job")
        other.kill()


HOLDS = """
import mmap, os, sys
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(os.fork() or os.getpid(), flush=True)
sys.stdin.readline()
"""
TRACES = """
import ctypes, sys
print(ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0), flush=True)  # PTRACE_SEIZE
sys.stdin.readline()
"""


def test_a_rank_that_has_forked_and_is_traced_is_one_rank_and_the_tracer_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "libtorch.so").write_bytes(bytes(4096))
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "libtorch.so")]
    environment = os.environ | {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as rank:  # type: ignore[call-overload]
        children = {int(rank.stdout.readline()), int(rank.stdout.readline())} - {rank.pid}
        tracing = [sys.executable, "-c", TRACES, str(rank.pid)]
        with subprocess.Popen(tracing, **pipes) as tracer:  # type: ignore[call-overload]
            is_traced = tracer.stdout.readline() == b"0\n"
            for pid in (rank.pid, *children):
                [found] = job_of(pid).ranks
                assert found.pid == rank.pid
                if is_traced:  # else the kernel lets none of this user trace
                    assert found.tracer.endswith(f"(process {tracer.pid})")
                    assert job_named("master:a:1").ranks == (found,)
            tracer.kill()
        rank.communicate(b"\n")


AGENT = """
import sys, time, msgspec, zlib, numpy as np
from fullwire.recorder.several_hosts import _Said
from fullwire.recorder.jobs_here import JobHere, RankHere
from fullwire.recorder.outside import COLUMNS, Waits
from fullwire.version import __version__
host, ahead_s, told, tells = sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
say = lambda **said: print(msgspec.json.encode(_Said(**said)).decode(), flush=True)
print("Welcome to", host)
if told == "silent": sys.exit("Permission denied (publickey).")
ranks = [7] if told == "nonsense" else [int(rank) for rank in told.split(",")]
say(version=__version__, machine=host, job=JobHere(workers=2, is_guessed=False, ranks=tuple(
    RankHere(pid=7, rank=rank, user="me", command="train\\x1b[2J.py", network=1, uses_gpu=False,
             host=host) for rank in ranks)))
if told == "nonsense": say(rows=b"1234")
for line in sys.stdin:
    word, _, number = line.strip().partition(" ")
    if word == "clock":
        say(clock=int(number), now_ns=time.time_ns() + int(ahead_s * 1e9))
        rows = np.zeros((len(ranks), 1, COLUMNS))
        rows[:, :, 0] = time.time_ns() + ahead_s * 1e9
        say(rows=zlib.compress(rows.tobytes()), took_s=0.01)
        tells -= 1
        if not tells: break
    elif word == "waits":
        say(waits=tuple(Waits("S", "futex", f"at {rank}") for rank in ranks))
"""


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a host be a process of ours: its words are its answers."""
    monkeypatch.setattr(several_hosts, "_ASKED_S", 0.1)
    monkeypatch.setattr(
        several_hosts,
        "command_on",
        lambda host, words: [sys.executable, "-c", AGENT, host, *words[2:]],
    )


def test_the_looks_of_several_hosts_are_on_one_clock(agents: None) -> None:
    watcher = HostsWatcher({
        "gpu1": ("0.0", "0", "0"), "gpu2": ("100.0", "1", "0"), "gpu3": ("0.0", "silent", "0"),
        "gpu4": ("0.0", "1", "0"), "gpu5": ("0.0", "nonsense", "0"),
    })  # fmt: skip
    try:
        assert watcher.watch(0.8)
        looks = watcher.looks
        waits = looks.waits()
    finally:
        watcher.close()
    assert [rank.rank for rank in looks.job.ranks] == [0, 1]
    problems = [host.problem for host in looks.hosts]
    assert problems[:3] == ["", "", "Permission denied (publickey)."]
    assert "it has rank 1 as gpu2 has: another job" in problems[3]
    assert problems[4] == "expected looks at its ranks, got other bytes"
    assert looks.job.ranks[0].command == r"train\x1b[2J.py"  # no terminal obeys it
    assert looks.hosts[1].clock_offset_s == pytest.approx(100, abs=0.5)
    assert looks.by_rank[0][-1, 0] == pytest.approx(looks.by_rank[1][-1, 0], abs=0.9e9)
    assert {rank: told.line for rank, told in waits.items()} == {0: "at 0", 1: "at 1"}
    notes = [str(note) for note in judged(looks, None).notes]
    assert len(notes) == 3


def test_a_host_that_stalls_is_named_and_the_rest_is_judged_alone(
    agents: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_hosts, "_STALLED_S", 0.8)
    watcher = HostsWatcher({"gpu1": ("0.0", "0", "0"), "gpu2": ("0.0", "1", "0")})
    try:
        assert watcher.watch(0.3)
        stalled = watcher._agents[1]
        os.kill(stalled._process.pid, signal.SIGSTOP)
        assert watcher.watch(1.2)
        looks = watcher.looks
        os.kill(stalled._process.pid, signal.SIGCONT)
        assert watcher.watch(0.5)
        assert set(watcher.looks.by_rank) == {0, 1}
    finally:
        watcher.close()
    assert list(looks.by_rank) == [0]
    assert looks.hosts[1].problem.startswith("it has told nothing for ")


def test_a_host_that_is_lost_is_named_and_the_rest_is_watched(agents: None) -> None:
    watcher = HostsWatcher({"gpu1": ("0.0", "0", "0"), "gpu2": ("0.0", "1", "1")})
    try:
        assert watcher.watch(0.8)
        looks = watcher.looks
    finally:
        watcher.close()
    assert list(looks.by_rank) == [0]
    assert looks.hosts[1].problem == "the connection ended (status 0)"
    assert looks.job.workers == 2


def test_without_any_host_the_reasons_are_told(agents: None) -> None:
    with pytest.raises(fw.UsageError, match=r"no host can be watched: a: Permission denied.*; b: "):
        HostsWatcher({"a": ("0.0", "silent", "0"), "b": ("0.0", "silent", "0")})


def watched_alone(rank: int, ahead_s: float = 0.0) -> fw.Run:
    rows = np.array(a_job(0.1, 0.15, 0.05)[rank], float)
    rows[:, 0] += ahead_s * 1e9
    looks: Looks = seen({rank: [tuple(row) for row in rows]})
    run = judged(looks, 1e9).run
    assert run is not None
    return run


def test_runs_of_two_hosts_become_one_whatever_their_clocks_say(tmp_path: Path) -> None:
    fw.write(watched_alone(0), tmp_path / "gpu1.run")
    fw.write(watched_alone(1, ahead_s=0.07), tmp_path / "gpu2.run")
    made = fw.join([tmp_path / "gpu1.run", tmp_path / "gpu2.run"], tmp_path / "job.run")
    run = fw.read(made.path)
    assert set(run.spans.rank) == {0, 1}
    assert dict(run.facts.clock_offset_s or ())[1] == pytest.approx(-0.07, abs=0.012)
    assert not run.gaps
    found = fw.explain(run)
    assert found.step_s == pytest.approx(0.3, rel=0.01)
    assert found.verdict.kind == "line_rate"
    assert found.account["straggler"] < 0.02
    for rank in (0, 1):
        own = run.collectives.rows(run.collectives.rank == rank)
        a_step = own.bytes.sum() / len(np.unique(own.step))
        assert a_step == pytest.approx(0.15e9 / 8, rel=0.05)


def test_runs_that_do_not_fit_are_not_joined(tmp_path: Path) -> None:
    fw.write(watched_alone(0), tmp_path / "gpu1.run")
    fw.write(watched_alone(1, ahead_s=500.0), tmp_path / "later.run")
    fw.write(fw.replay("vgg16@v100", workers=2, bandwidth="10Gbps"), tmp_path / "other.run")
    for other, why in (
        ("later", "flow at other times"),
        ("other", "another; recordings are joined"),
        ("gpu1", "rank 0 is in two"),
    ):
        with pytest.raises(fw.UsageError, match=why):
            fw.join([tmp_path / "gpu1.run", tmp_path / f"{other}.run"], tmp_path / "job.run")
    assert not (tmp_path / "job.run").exists()
