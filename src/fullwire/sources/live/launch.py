"""The job's command, in an environment that makes each of its Pythons load the recorder."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fullwire.errors import UsageError
from fullwire.sources.live.inside import DIRECTORY_VARIABLE

_ON_PATH = Path(__file__).parent / "path"


def recorded_environment(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose Python processes record themselves into a directory."""
    before = environment.get("PYTHONPATH")
    return {
        **environment,
        "PYTHONPATH": f"{_ON_PATH}{os.pathsep}{before}" if before else str(_ON_PATH),
        DIRECTORY_VARIABLE: str(directory.resolve()),
    }


def run_to_its_end(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command on our own input and output, and return the status that a shell would."""
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise UsageError(f"{command[0]}: cannot be run: {error.strerror}") from None
    with _signals_left_to(process):
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _signals_left_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Outlive the job: a terminal sends it Ctrl-C itself, other signals are passed on."""

    def pass_on(number: int, frame: Any) -> None:
        process.send_signal(number)

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
        signal.SIGHUP: signal.signal(signal.SIGHUP, pass_on),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
