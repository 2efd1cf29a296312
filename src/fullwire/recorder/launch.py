"""Run the job's command in an environment that makes each of its Pythons load the recorder."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullwire.errors import UsageError
from fullwire.recorder.inside import DIRECTORY_VARIABLE
from fullwire.recorder.inside.journal import NOISE_VARIABLE, PROBE_VARIABLE, RUNNING
from fullwire.recorder.inside.notes import HOOKS_VARIABLE
from fullwire.recorder.journals import DAMAGED, Header
from fullwire.recorder.sampler import CAPTURING_SUFFIX, SUFFIX
from fullwire.recorder.samples import header_of

ELSEWHERE = "elsewhere"  # in a recording: where the job within it was recorded
PYTHON_PATH = Path(__file__).parent / "path"  # its sitecustomize enters each Python of a job
_SAMPLER = Path(__file__).parent / "sampler.py"
TOO_LONG = 124  # the status of a command that was ended at its limit
# Slurm warns with SIGUSR1 before a job's time is up.
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a user or a scheduler ends a job
_POLITE_S = 5.0  # between asking a job to end and ending it
_LOOK_S, _LOOKS = 0.005, 400  # looks are counted: on a stalled machine, a time would run out


def recorded_environment(
    directory: Path,
    environment: Mapping[str, str],
    *,
    probe: bool = False,
    noise: bool = False,
) -> dict[str, str]:
    """Return an environment whose Python processes record themselves into a directory.

    With `probe`, communication waits for computing in a few of their steps. With `noise`, they note
    gradient noise. If they would have
    recorded themselves into another directory, a note there names this one.
    """
    if outer := environment.get(DIRECTORY_VARIABLE):
        with contextlib.suppress(OSError):  # the other recording may be gone already
            (Path(outer) / ELSEWHERE).write_text(str(directory.with_suffix("")))
    before = environment.get("PYTHONPATH")
    hooks = importlib.util.find_spec("fullwire._hooks")
    return {
        **environment,
        "PYTHONPATH": f"{PYTHON_PATH}{os.pathsep}{before}" if before else str(PYTHON_PATH),
        DIRECTORY_VARIABLE: str(directory.resolve()),
        PROBE_VARIABLE: "1" if probe else "",
        NOISE_VARIABLE: "1" if noise else "",
        HOOKS_VARIABLE: (hooks and hooks.origin) or "",
    }


def sampled_command(directory: Path, command: Sequence[str], *, packets: bool = False) -> list[str]:
    """Return a command that becomes the given one, with a sampler of its host beside it.

    With `packets`, a second process captures the packets that the host sends and receives.
    """
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]}: expected a command that exists and may be executed")
    how = ["--packets"] if packets else []
    return [sys.executable, str(_SAMPLER), str(directory.resolve()), *how, *command]


def check_capturing() -> None:
    """Refuse before a job starts if this process may not capture packets."""
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    except PermissionError:
        python = os.path.realpath(sys.executable)
        raise UsageError(
            "--packets needs the right to capture (CAP_NET_RAW), which this user has not: run as "
            f"root, or give it to this Python: setcap cap_net_raw+ep {python}"
        ) from None


def wait_for_samplers(directory: Path, concerns_us: Callable[[Header], bool]) -> None:
    """Wait a little for samplers that are about to end, so that they write their last samples."""

    def runs(path: Path) -> bool:
        # The reader of these files reports their problems later.
        with contextlib.suppress(OSError, *DAMAGED):
            header = header_of(path)
            return bool(header["status"] == RUNNING and concerns_us(header))
        return False

    _wait_while(lambda: any(runs(path) for path in directory.glob(f"*{SUFFIX}")))


def wait_for_captures(directory: Path, host: str = "") -> None:
    """Wait a little for captures, of one host or of all, to be written to their end."""
    ours = f"{glob.escape(host)}*{CAPTURING_SUFFIX}"
    _wait_while(lambda: any(directory.glob(ours)))


def _wait_while(is_at_work: Callable[[], bool]) -> None:
    """Wait up to a number of looks, which gives a busy machine as many chances as an idle one."""
    for _ in range(_LOOKS):
        if not is_at_work():
            return
        time.sleep(_LOOK_S)


def run_to_its_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    began: Callable[[subprocess.Popen[bytes]], None] | None = None,
    *,
    limit_s: float | None = None,
) -> int:
    """Run a command on our own input and output, and return the status that a shell would.

    With `began`, its output goes into pipes, and `began` is called with the process. After the
    limit the command is ended with all processes that it started, and the status is 124, that of
    `timeout`.

    This process outlives the job. A terminal sends Ctrl-C to the job itself; this process passes
    other signals on, and an interrupt that no terminal sent. The caller's handlers of signals that
    ask to end hear of them meanwhile. An exception of theirs does not end the wait for the job.
    """
    jobs: list[subprocess.Popen[bytes]] = []  # one, as soon as it is there
    early: list[int] = []  # signals that came before

    def pass_on(number: int, frame: Any) -> None:
        if number != signal.SIGINT or not _is_before_a_terminal():
            if jobs:
                jobs[0].send_signal(number)
            else:
                early.append(number)
        of_caller = of_callers[number]
        if number in ENDING and callable(of_caller):
            # It may leave by raising. The job decides how it ends, and we wait for its status.
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                of_caller(number, frame)

    signals = (*ENDING, *_PASSED_ON)
    of_callers: dict[int, Any] = {number: signal.getsignal(number) for number in signals}
    for number, of_caller in of_callers.items():
        if of_caller != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, pass_on)
    try:
        output = None if began is None else subprocess.PIPE
        try:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        except OSError as error:
            raise UsageError(f"{command[0]}: cannot be run: {error.strerror}") from None
        jobs.append(process)
        for number in early:
            process.send_signal(number)
        if began is not None:
            began(process)
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        started = _descendants(process.pid)
        process.terminate()
        try:
            process.wait(_POLITE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in started:  # a launcher that was killed leaves its ranks behind
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = TOO_LONG
    finally:
        for number, of_caller in of_callers.items():
            signal.signal(number, of_caller)
    return status if status >= 0 else 128 - status


def _is_before_a_terminal() -> bool:
    """Say whether this process and its job get what is typed into a terminal."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is no terminal
        return False


def _descendants(ancestor: int) -> list[int]:
    """Return the processes that a process started, and that those started, and so on."""
    children: dict[int, list[int]] = {}
    for stat in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            text = Path(stat).read_text()
            parent = int(text.rpartition(") ")[2].split()[1])
            children.setdefault(parent, []).append(int(text.partition(" ")[0]))
    found = list(children.get(ancestor, []))
    for pid in found:  # it grows meanwhile
        found += children.get(pid, [])
    return found
