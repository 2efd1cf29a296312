"""Two hosts made of namespaces, each with its processes; a program in the place of ssh enters them.

The processes, the sockets and the agents are real. An agent sees its own host alone.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers import watched
from fullwire.answers.watch import judged
from fullwire.recorder import outside
from fullwire.recorder.jobs_here import job_of
from fullwire.words import sentences
from tests.conftest import Cli
from tests.lab.test_lab import eventually

JOB = Path(__file__).parents[1] / "stand_in_job.py"
NAMESPACES = ("--net", "--uts", "--mount", "--pid")
SSH = """#!/bin/sh
while [ "$1" = -o ] || [ "$1" = -T ]; do [ "$1" = -o ] && shift; shift; done
host=$1; shift
[ -f {folder}/$host ] || {{ echo "ssh: Could not resolve hostname $host" >&2; exit 255; }}
exec nsenter --target $(cat {folder}/$host) {namespaces} sh -c "$*"
"""


def first_child(pid: int) -> int:
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError("it has no child")


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make gpu1 and gpu2, joined by a cable; the folder holds `ssh` and the number of each."""
    folder = tmp_path_factory.mktemp("hosts")
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("hosts of namespaces need root, unshare, nsenter and ip")
    held = [
        subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c",
             f"hostname gpu{number} && echo && exec sleep 300"], stdout=subprocess.PIPE
        )
        for number in (1, 2)
    ]  # fmt: skip
    try:
        for number, each in enumerate(held, 1):
            if not each.stdout or not each.stdout.readline():
                pytest.skip("namespaces are not open here")
            (folder / f"gpu{number}").write_text(str(first_child(each.pid)))
        pids = [(folder / f"gpu{number}").read_text() for number in (1, 2)]
        entering = ["nsenter", "--target", pids[0], "--net", "ip"]
        subprocess.run(
            [*entering, *f"link add e0 type veth peer name e0 netns {pids[1]}".split()], check=True
        )
        for number, pid in enumerate(pids, 1):
            for words in (
                f"addr add 10.9.0.{number}/24 dev e0",
                "link set e0 up",
                "link set lo up",
            ):
                entering[2] = pid
                subprocess.run([*entering, *words.split()], check=True)
        ssh = folder / "ssh"
        ssh.write_text(SSH.format(folder=folder, namespaces=" ".join(NAMESPACES)))
        ssh.chmod(0o755)
        (folder / "libtorch.so").write_bytes(bytes(4096))
        yield folder
    finally:
        for each in held:
            each.kill()
            each.communicate()


class Running(NamedTuple):
    """A rank on each host: their processes as this machine numbers them, and rank 0's words."""

    pids: list[int]
    said: Path

    def step_s(self, start_s: float) -> float:
        """Return the step by the job's own words since then: a busy machine makes it longer."""
        ends_s = np.array([float(line) for line in self.said.read_text().splitlines()])
        return float(np.median(np.diff(ends_s[ends_s > start_s])))


@pytest.fixture
def a_job(two_hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Run a rank on each host."""
    monkeypatch.setenv("PATH", f"{two_hosts}:{os.environ['PATH']}")
    where = {"MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "2950", "WORLD_SIZE": "2"}
    ranks = []
    for rank in (0, 1):
        command = ["nsenter", "--target", (two_hosts / f"gpu{rank + 1}").read_text(), *NAMESPACES]
        command += [sys.executable, str(JOB), str(two_hosts / "libtorch.so"), "10.9.0.1", "2950"]
        command += ["forks"] if rank else []
        environment = os.environ | where | {"RANK": str(rank)}
        with (tmp_path / f"said {rank}").open("w") as out:
            ranks.append(subprocess.Popen(command, env=environment, stdout=out))
    pids = [first_child(each.pid) for each in ranks]  # nsenter waits for them
    try:
        said = tmp_path / "said 0"
        assert eventually(lambda: said.stat().st_size > 0)
        yield Running(pids, said)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # a rank ends by itself once the other is gone
                os.kill(pid, signal.SIGKILL)
        for each in ranks:
            each.kill()  # it stopped itself when its child was stopped
            each.wait()


@pytest.mark.alone  # it measures a step
def test_a_job_on_two_hosts_has_a_step_and_the_rank_it_waits_for_is_named_with_its_host(
    a_job: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_s = time.monotonic()
    found = fw.watch("stand_in", hosts="gpu[1-2],gpu9", seconds=20)
    assert found.explanation is not None, found.no_step
    assert 0.08 < found.explanation.step_s < 0.2
    assert found.explanation.step_s == pytest.approx(a_job.step_s(start_s), rel=0.4)
    assert [(rank.rank, rank.host) for rank in found.job.ranks] == [(0, "gpu1"), (1, "gpu2")]
    assert [host.problem for host in found.hosts] == [
        "",
        "",
        "ssh: Could not resolve hostname gpu9",
    ]
    assert all(rank.sent_bytes > 1e6 for rank in found.ranks)
    assert not found.run.gaps if found.run else False
    monkeypatch.setattr(watched, "STUCK_AFTER_S", 1.0)
    os.kill(a_job.pids[1], signal.SIGSTOP)
    try:
        found = fw.watch("master:10.9.0.1:2950", hosts="gpu[1-2]", seconds=4)
    finally:
        os.kill(a_job.pids[1], signal.SIGCONT)
    assert found.stuck is not None
    assert (found.stuck.rank, found.stuck.host) == (1, "gpu2")
    assert "stopped by a signal" in found.sentence


@pytest.mark.alone  # it measures a step
def test_ranks_in_containers_are_watched_from_the_machine_and_a_container_says_that_it_is_one(
    a_job: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fw.watch(a_job.pids[1], seconds=20)  # a rank that forks all the time
    assert found.explanation is not None, found.no_step
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert not found.notes
    monkeypatch.setattr(outside, "_libc", SimpleNamespace(setns=lambda network, kind: -1))
    watcher = outside.Watcher(job_of(a_job.pids[0]))
    assert watcher.watch(0.3)
    [note] = sentences(judged(watcher.looks, None).notes)
    assert note.startswith("Ranks 0 and 1 run in a container of their own. Only root")
    watched_there = shlex.join([sys.executable, "-m", "fullwire", "watch", "4000000", "--once"])
    refused = subprocess.run(["ssh", "gpu1", watched_there], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "got 4000000; this is a container" in refused.stderr


def test_an_interface_without_a_link_is_told(a_job: Running, two_hosts: Path) -> None:
    # The kernel tells of a new cable a moment after it is there.
    assert eventually(lambda: outside.waits_of(a_job.pids[1]).link_down == "")
    there = ["nsenter", "--target", (two_hosts / "gpu2").read_text(), "--net", "ip", "link", "set"]
    subprocess.run([*there, "e0", "down"], check=True)
    try:
        waits = outside.waits_of(a_job.pids[1])
    finally:
        subprocess.run([*there, "e0", "up"], check=True)
    assert waits.link_down == "e0"
    assert str(waits).endswith(", and its interface e0 is down")


@pytest.mark.alone  # it measures a step
def test_jobs_of_two_hosts_are_listed_and_watched_by_hand_and_joined(
    a_job: Running, two_hosts: Path, cli: Cli, tmp_path: Path
) -> None:
    def by_hand(number: int) -> subprocess.CompletedProcess[bytes]:
        words = [
            "watch",
            "--job",
            "stand_in",
            "--once",
            "--json",
            "-o",
            str(tmp_path / f"{number}.run"),
        ]
        command = ["ssh", f"gpu{number}", shlex.join([sys.executable, "-m", "fullwire", *words])]
        return subprocess.run(command, capture_output=True, check=True)

    start_s = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(by_hand, (1, 2)))
    assert [json.loads(each.stdout)["processes"][0]["rank"] for each in told] == [0, 1]
    own_s = a_job.step_s(start_s)
    fw.join([tmp_path / "1.run", tmp_path / "2.run"], tmp_path / "job.run")
    run = fw.read(tmp_path / "job.run")
    assert (run.facts.hosts or "").count("gpu") == 2
    assert fw.explain(run).step_s == pytest.approx(0.1, rel=0.5)
    assert fw.explain(run).step_s == pytest.approx(own_s, rel=0.4)
    listed = json.loads(cli("watch", "--hosts", "gpu[1-2],gpu9", "--json").stdout)
    assert [(job["host"], job["ranks"]) for job in listed["jobs"]] == [("gpu1", [0]), ("gpu2", [1])]
    assert listed["problems"] == [
        {"host": "gpu9", "problem": "ssh: Could not resolve hostname gpu9"}
    ]
