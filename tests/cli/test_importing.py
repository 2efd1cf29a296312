"""Imports of many ranks in processes: no room on the disk, and processes that are killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from tests.lab.test_sampler import is_over
from tests.unit.test_fleet import five_ranks
from tests.unit.test_kineto import GEMM, Job


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("most_bytes", [500, 2_500])
def test_a_disk_without_room_is_one_line_and_leaves_nothing(
    tmp_path: Path, cli: Cli, processes: str, most_bytes: int
) -> None:
    traces = five_ranks(tmp_path / "traces")
    done = cli(
        "import",
        traces,
        "-o",
        tmp_path / "x.run",
        "--processes",
        processes,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
        # Python would leave the beginnings of its own compiled modules, which nothing can import.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "x.run: cannot be written: File too large" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]


def importing(traces: Path, place: Path) -> subprocess.Popen[bytes]:
    """Start an import with two processes, and return when the first trace was read."""
    command: list[str | Path] = [sys.executable, "-m", "fullwire", "import", traces]
    command += ["-o", place, "--processes", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(place.parent.glob(".*.writing-*/scratch/*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def children_of(process: subprocess.Popen[bytes]) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(number) for number in listed]


@pytest.fixture(scope="module")
def many_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write traces that take seconds to read; the tests leave them as they are."""
    folder = tmp_path_factory.mktemp("traces")
    text = Job(0, world=200).step(0, 0, 9e9).text()
    events = ",".join(json.dumps(_kernel(number)) for number in range(20_000))
    for rank in range(100):
        head = text.replace('"rank": 0', f'"rank": {rank}')
        text_of_rank = head.replace('"traceEvents": [', f'"traceEvents": [{events},')
        (folder / f"{rank}.json").write_text(text_of_rank)
    return folder


def _kernel(number: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": GEMM,
        "ts": 10 * number,
        "dur": 5,
        "tid": 7,
        "args": {"device": 0, "stream": 7},
    }


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_an_import_that_is_killed_leaves_no_run_and_no_process(
    tmp_path: Path, many_ranks: Path, how: signal.Signals
) -> None:
    process = importing(many_ranks, tmp_path / "job.run")
    readers = children_of(process)
    assert len(readers) >= 2
    process.send_signal(how)
    assert process.wait(30) != 0
    deadline = time.monotonic() + 30
    while not all(map(is_over, readers)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    left = [path.name for path in tmp_path.iterdir()]
    assert "job.run" not in left
    assert how == signal.SIGKILL or not left
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()


def test_a_reader_that_is_killed_is_said(tmp_path: Path, many_ranks: Path) -> None:
    process = importing(many_ranks, tmp_path / "job.run")
    assert process.stderr is not None
    for number in children_of(process):
        if b"spawn_main" in Path(f"/proc/{number}/cmdline").read_bytes():
            os.kill(number, signal.SIGKILL)
            break
    assert process.wait(30) == 2
    said = process.stderr.read().decode()
    process.stderr.close()
    assert len(said.splitlines()) == 1
    assert "--processes 1 takes the least" in said
    assert not list(tmp_path.iterdir())
