"""Elastic ranks as real processes: killed, stopped, stuck, strange, late; without any training."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fullwire.resilience import place
from fullwire.resilience.joining import Follower, Joining, connected
from fullwire.resilience.mesh import Beat, Hearing, Mesh
from tests.transport.test_elastic import UNCOMPILED

WORKER = Path(__file__).parent / "elastic_worker.py"
SECOND_NS = 1_000_000_000
DETECT_S = 60


class Job:
    """Workers that this test started, and what they said.

    A rank whose connection ends is gone at once. One that is silent is gone after `detect_s`, which
    is long enough here for any busy machine, unless a test stops a rank on purpose.
    """

    def __init__(self, folder: Path, starters: int, detect_s: int = DETECT_S) -> None:
        folder.chmod(0o700)
        self.detect_s = detect_s
        place.Folder(folder).set("number", secrets.token_hex(32))
        self.folder, self.starters = folder, starters
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.lines: dict[int, queue.Queue[str]] = {}
        self.readers: list[threading.Thread] = []

    def start(self, worker: int, *, steps: int = 10**6, **more: str) -> None:
        environment = os.environ | {
            place.FOLDER_VARIABLE: str(self.folder),
            place.WORKER_VARIABLE: str(worker),
            place.STARTERS_VARIABLE: str(self.starters),
            place.LEAST_VARIABLE: "1",
            place.DETECT_VARIABLE: str(self.detect_s),
            "FULLWIRE_KEY": "k" * 40,
            **more,
        }
        process = subprocess.Popen(
            [sys.executable, UNCOMPILED, str(WORKER), str(steps), "40"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        lines = self.lines[worker] = queue.Queue()
        self.processes[worker] = process
        self.readers.append(threading.Thread(target=self._read, args=(process, lines)))
        self.readers[-1].start()

    def _read(self, process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put("its output ended")

    def until(self, worker: int, pattern: str, limit_s: float = 120) -> re.Match[str]:
        """Return the next line of a worker that has this form."""
        until = time.monotonic() + limit_s
        while True:
            line = self.lines[worker].get(timeout=max(until - time.monotonic(), 0.01))
            assert line != "its output ended", f"worker {worker}"
            if found := re.match(pattern, line):
                return found

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for reader in self.readers:  # the last words of a dead worker are read, too
            reader.join()


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(tmp_path, 3, getattr(request, "param", DETECT_S))
    try:
        for worker in range(3):
            made.start(worker)
        for worker in range(3):
            made.until(worker, "step 20")
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_survivors_of_a_killed_rank_go_on(job: Job, killed: int) -> None:
    at = time.monotonic()
    job.processes[killed].kill()
    others = tuple(sorted({0, 1, 2} - {killed}))
    for worker in others:
        entered = job.until(worker, rf"epoch 1 {re.escape(str(others))} \d+ (.*)")
        assert float(entered[1]) - at < DETECT_S / 2  # it did not wait for the limit
        job.until(worker, "step ")


def test_the_last_one_goes_on_alone(job: Job) -> None:
    for killed in (0, 1):
        job.processes[killed].kill()
    job.until(2, r"epoch \d+ \(2,\)")
    job.until(2, "step ")


@pytest.mark.parametrize("job", [2], indirect=True)
def test_a_stopped_rank_is_left_out_after_the_limit_and_may_come_back(job: Job) -> None:
    at = time.monotonic()
    job.processes[0].send_signal(signal.SIGSTOP)
    entered = job.until(1, r"epoch 1 \(1, 2\) \d+ (.*)")
    assert float(entered[1]) - at > 1.0
    job.until(2, r"epoch 1 \(1, 2\)")
    job.processes[0].send_signal(signal.SIGCONT)
    for worker in range(3):
        job.until(worker, r"epoch \d+ \(0, 1, 2\)")
        job.until(worker, "step ")


def test_a_new_rank_is_let_in(job: Job) -> None:
    job.processes[1].kill()
    job.until(0, r"epoch 1 \(0, 2\)")
    job.start(3)
    for worker in (0, 2, 3):
        job.until(worker, r"epoch \d+ \(0, 2, 3\)")
        job.until(worker, "step ")


def test_a_stuck_rank_is_left_out(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    for worker in range(3):
        job.start(worker, HANGS="1", FULLWIRE_ELASTIC_STUCK_S="1")
    try:
        job.until(1, "hangs")
        for worker in (0, 2):
            job.until(worker, r"epoch \d+ \(0, 2\)")
            job.until(worker, "step ")
    finally:
        job.end()


def test_a_rank_that_ends_leaves_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    for worker in range(3):
        job.start(worker, steps=60)
    try:
        for worker in range(3):
            job.until(worker, "done 60")
            assert job.processes[worker].wait(10) == 0
    finally:
        job.end()


def test_strangers_and_wrong_keys_are_refused(job: Job) -> None:
    job.start(3, FULLWIRE_KEY="w" * 40)
    host, port, *_ = (job.folder / "rank 0").read_text().split()
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(100))
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    time.sleep(1.0)
    for worker in range(3):
        job.until(worker, "step ")
        while not job.lines[worker].empty():
            assert "epoch" not in job.lines[worker].get()
    assert job.lines[3].empty()
    assert job.processes[3].poll() is None


def test_a_long_step_is_no_failure_and_a_much_longer_one_is() -> None:
    hearing = Hearing(2 * SECOND_NS, 30 * SECOND_NS)
    for step in range(10):
        hearing.committed(step * 10 * SECOND_NS)
    now_ns = 100 * SECOND_NS
    hearing.waits(9, now_ns, is_waiting=True)
    working = Beat(9, 1, waits=False)
    lost_after_s = None
    for tenth in range(10_000):
        at_ns = now_ns + tenth * SECOND_NS // 10
        hearing.heard(1, at_ns, working)
        if hearing.lost([1], at_ns):
            lost_after_s = tenth / 10
            break
    assert lost_after_s == pytest.approx(200, abs=1)  # 20 usual steps


def test_own_silence_is_not_blamed_on_others() -> None:
    hearing = Hearing(2 * SECOND_NS, 30 * SECOND_NS)
    hearing.heard(1, 0)
    assert hearing.lost([1], SECOND_NS // 10) == []
    assert hearing.lost([1], 10 * SECOND_NS) == []  # this process was stopped
    for tenth in range(101, 125):
        lost = hearing.lost([1], tenth * SECOND_NS // 10)
    assert lost == [1]


def test_a_rank_that_joins_is_left_alone_before_it_has_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(tmp_path, 1)
    monkeypatch.setenv("FULLWIRE_KEY", "k" * 40)
    folder = place.Folder(tmp_path)
    meshes = [Mesh(place.Place(folder, worker, starters=1)) for worker in range(2)]
    first, second = meshes
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(second.epoch)
        step = 1
        while first.commit(0, step):  # the second comes in at the end of a step
            step += 1
        together = asked.result()
        assert together.members == (0, 1)
        met = [threads.submit(connected, mesh, together.epoch, [0, 1]) for mesh in meshes]
    of_first, of_second = (each.result() for each in met)
    joining = Joining(together.epoch, together.base_step, sources=(0,), joiners=(1,))
    follower = Follower(second, joining, [], lambda membership, has: (None, [has]))
    follower.start(of_second, (1, 1))
    of_first.abort()
    first.close()
    assert follower.await_state() is None
    assert not follower.has_next()
    assert second.epoch().members == (1,)
    second.close()
