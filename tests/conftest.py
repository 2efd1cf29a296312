"""Fixtures of several test files: the real inputs beside the project, and the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from fullwire.errors import UsageError
from fullwire.lab.description import describe
from fullwire.lab.lab import Lab
from tests.ports import held_port
from tests.strategies import scaled

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
# A case has no deadline, because its time depends on other work of the machine. Generated cases are
# the same in every run, so that a failure comes from the change.
CASES = scaled(100)  # of a test that asks for no number
settings.register_profile("same", deadline=None, max_examples=CASES, derandomize=True)
# for validation/generated.py
settings.register_profile("random", deadline=None, max_examples=CASES, derandomize=False)
settings.load_profile("same")
# A plain shell starts background commands with Ctrl-C ignored, and nohup ignores the end of the
# terminal. The processes of the tests would ignore both too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# If it is set, print writes a word at a time, and the words of a lab's hosts mix.
os.environ.pop("PYTHONUNBUFFERED", None)
# The width of the terminal that starts the tests would decide where sentences break.
os.environ.pop("COLUMNS", None)
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure(config: pytest.Config) -> None:
    """Make the same cases whatever ran before.

    Hypothesis also draws texts and numbers of our modules, of those that are loaded by then. Which
    are depends on how the workers share the tests, so a case came in one run and not in the next.
    """
    if config.getoption("--hypothesis-profile") != "random":
        none = providers._local_constants
        assert not len(none), "Hypothesis has collected constants before the tests began"
        providers._get_local_constants = lambda: none


@pytest.fixture
def shared_data() -> Path:
    """Return the folder of real inputs with known answers; it lies beside the project."""
    if not DATA.is_dir():
        pytest.skip(f"the real inputs are not here: expected {DATA}")
    return DATA


def in_a_process(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the real command line in a process of its own."""
    command = [sys.executable, "-m", "fullwire.cli", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )


@pytest.fixture
def cli() -> Cli:
    """Run the real command line in a process of its own."""
    return in_a_process


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Make a folder with a short name, because names of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="fw", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave torch's compiler out of jobs that our commands start, as jobs/uncompiled.py does."""
    before = os.environ.get("PYTHONPATH")
    ours = str(Path(__file__).with_name("jobs") / "path")
    monkeypatch.setenv("PYTHONPATH", f"{ours}{os.pathsep}{before}" if before else ours)


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip if a lab cannot be made, with the sentence that names the sysctl."""
    try:
        with Lab(describe(workers=1, rate=["1Gbps"])):
            pass
    except UsageError as error:
        if "the lab needs namespaces" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def real_dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dump the Flight Recorder of two ranks that train with DDP over Gloo."""
    pytest.importorskip("torch")
    where, jobs = tmp_path_factory.mktemp("dumps"), Path(__file__).with_name("jobs")
    with held_port() as port:
        ranks = [
            subprocess.Popen(
                [sys.executable, jobs / "uncompiled.py", jobs / "flight_recorder.py", where],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_PORT": str(port),
                    "MASTER_ADDR": "127.0.0.1",
                    "TORCH_FR_BUFFER_SIZE": "1000",
                },
            )
            for rank in range(2)
        ]
        assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    return where
