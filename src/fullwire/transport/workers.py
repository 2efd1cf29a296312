"""Starts the workers of an elastic job, replaces lost ones, and passes on what they print.

Workers agree among themselves who takes part (`membership`), so they go on while this process does
nothing. It keeps no state that they need: their addresses are files in a folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, BinaryIO

from fullwire.errors import UsageError
from fullwire.transport import place
from fullwire.transport.keys import KEY_FILE_VARIABLE, KEY_VARIABLE
from fullwire.transport.place import TOO_FEW_STATUS, Folder

_FOR_SCRIPTS = (signal.SIGUSR1, signal.SIGUSR2)
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, *_FOR_SCRIPTS)
_GRACE_S = 10.0  # for workers that are told to end
_LAST_ONES_S = 15.0  # for workers that have not ended when others completed the job
_MOST_EARLY_DEATHS = 3  # of new workers in a row, before they took part


@dataclass
class _Worker:
    """A process of the job, and its unfinished lines."""

    number: int
    process: subprocess.Popen[bytes]
    lines: dict[int, bytes]  # by descriptor
    is_late: bool  # it replaces another one


class Workers:
    """The processes of one job."""

    def __init__(
        self, command: Sequence[str], count: int, least: int, *, respawns: bool, detect_s: float
    ) -> None:
        if count < 1 or not 1 <= least <= count:
            raise UsageError(
                f"run: expected --workers from 1 on and --min from 1 to --workers, got --workers "
                f"{count} and --min {least}"
            )
        if detect_s <= 0:
            raise UsageError(f"run: expected --detect above 0 s, got {detect_s:g} s")
        self._command, self._count, self._least = list(command), count, least
        self._respawns, self._detect_s = respawns, detect_s
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, _Worker] = {}
        self._next = 0
        self._early_deaths = 0
        self._completed_s: float | None = None
        self._ends_s: float | None = None
        self._signal = 0

    def run(self) -> int:
        """Run the job, and return its exit status."""
        path = Path(tempfile.mkdtemp(prefix="fullwire-job-"))  # for its owner alone
        self._folder = Folder(path)
        self._folder.set("number", secrets.token_hex(32))
        self._variables = {
            place.FOLDER_VARIABLE: str(path),
            place.STARTERS_VARIABLE: str(self._count),
            place.LEAST_VARIABLE: str(self._least),
            place.DETECT_VARIABLE: str(self._detect_s),
            place.RESPAWN_VARIABLE: str(int(self._respawns)),
        }
        if KEY_VARIABLE not in os.environ and KEY_FILE_VARIABLE not in os.environ:
            self._variables[KEY_VARIABLE] = secrets.token_hex(32)
        try:
            with self._passing_on_signals():
                for _ in range(self._count):
                    self._start(is_late=False)
                while self._running:
                    self._look()
            return self._status()
        finally:
            for worker in self._running.values():  # only where this process fails itself
                worker.process.kill()
            shutil.rmtree(path)

    def _start(self, *, is_late: bool) -> None:
        number, self._next = self._next, self._next + 1
        try:
            process = subprocess.Popen(
                self._command,
                env=os.environ | self._variables | {place.WORKER_VARIABLE: str(number)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C comes through here, once
            )
        except OSError as error:
            raise UsageError(f"run: {self._command[0]}: {error.strerror}") from None
        worker = _Worker(number, process, {}, is_late)
        self._running[number] = worker
        for stream, out in _streams(process):
            os.set_blocking(stream.fileno(), False)
            worker.lines[stream.fileno()] = b""
            self._selector.register(stream, selectors.EVENT_READ, (worker, out))

    def _look(self) -> None:
        """Pass lines on, and see who has ended."""
        for key, _ in self._selector.select(0.05):
            worker, out = key.data
            self._pass_on(worker, key.fd, out)
        for worker in list(self._running.values()):
            if worker.process.poll() is not None:
                self._bury(worker)
        now_s = time.monotonic()
        late = self._completed_s is not None and now_s - self._completed_s > _LAST_ONES_S
        if late and self._ends_s is None:
            self._tell(signal.SIGTERM)
        if self._ends_s is not None and now_s > self._ends_s:
            self._tell(signal.SIGKILL)

    def _pass_on(self, worker: _Worker, descriptor: int, out: BinaryIO) -> None:
        """Write the whole lines of a worker at once, so that no other's come between."""
        with contextlib.suppress(BlockingIOError):
            piece = os.read(descriptor, 2**16)
            lines, _, worker.lines[descriptor] = (worker.lines[descriptor] + piece).rpartition(
                b"\n"
            )
            if lines:
                out.write(lines + b"\n")
            if not piece:
                self._selector.unregister(descriptor)
                if worker.lines[descriptor]:
                    out.write(worker.lines[descriptor] + b"\n")
                    worker.lines[descriptor] = b""
            out.flush()

    def _bury(self, worker: _Worker) -> None:
        """A worker has ended: tell the others, and replace it where that helps."""
        del self._running[worker.number]
        for stream, out in _streams(worker.process):
            while stream.fileno() in self._selector.get_map():
                before = worker.lines[stream.fileno()]
                self._pass_on(worker, stream.fileno(), out)
                if worker.lines[stream.fileno()] == before:  # a child of it holds the pipe open
                    break
            with contextlib.suppress(KeyError):
                self._selector.unregister(stream)
            stream.close()
        self._folder.set(f"gone {worker.number}", "")
        took_part = self._folder.check([f"rank {worker.number}"])
        (self._folder.path / f"rank {worker.number}").unlink(missing_ok=True)
        status = worker.process.returncode
        if status == 0:
            if self._completed_s is None:
                self._completed_s = time.monotonic()
                self._folder.set("finished", "")
            return
        if self._completed_s is not None or self._ends_s is not None:
            return
        self._early_deaths = 0 if took_part else self._early_deaths + 1
        if self._respawns and self._early_deaths < _MOST_EARLY_DEATHS and status != TOO_FEW_STATUS:
            sys.stderr.write(f"fullwire: worker {worker.number} {_ended(status)}; another starts\n")
            self._start(is_late=True)
        elif status != TOO_FEW_STATUS:
            left = len(self._running)
            sys.stderr.write(f"fullwire: worker {worker.number} {_ended(status)}; {left} go on\n")
            if left < self._least:
                # Elastic workers end by themselves, at a step; others cannot go on.
                self._ends_s = time.monotonic() + _GRACE_S

    def _status(self) -> int:
        if self._signal:
            return 128 + self._signal
        if self._completed_s is not None:
            return 0
        steps = [
            int(self._folder.get(f"ended {worker}").split()[1])
            for worker in self._folder.numbers("ended")
        ]
        after = f", after step {max(steps)}" if steps else ""
        sys.stderr.write(
            f"fullwire: the job ended with fewer than --min {self._least} of {self._count} "
            f"workers{after}\n"
        )
        return TOO_FEW_STATUS

    def _tell(self, number: int) -> None:
        """Send a signal to all workers; unless it is one for the script, the job ends soon."""
        for worker in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, number)
        if number not in _FOR_SCRIPTS:
            self._ends_s = time.monotonic() + _GRACE_S

    @contextlib.contextmanager
    def _passing_on_signals(self) -> Iterator[None]:
        """Pass signals to all workers. Those that end a job end it."""

        def heard(number: int, _: FrameType | None) -> None:
            self._tell(number)
            if number not in _FOR_SCRIPTS:
                self._signal = number

        before = {number: signal.signal(number, heard) for number in _PASSED_ON}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def run_workers(
    command: Sequence[str],
    *,
    workers: int,
    least: int = 1,
    respawn: bool = False,
    detect_s: float = 2.0,
) -> int:
    """Run a command in several workers that may be lost; return the exit status of the job.

    It is 0 when the job was completed, however many workers were lost, and 4 with too few.

    - `command`: the program of one worker, whose script uses `fullwire.elastic`.
    - `workers`: the number of processes to start.
    - `least`: with fewer workers the job ends.
    - `respawn`: replace lost workers.
    - `detect_s`: the silence in seconds after which a worker counts as lost.

        fw.run_workers(["python", "train.py"], workers=4, least=2, respawn=True)
    """
    return Workers(command, workers, least, respawns=respawn, detect_s=detect_s).run()


def _streams(process: subprocess.Popen[bytes]) -> tuple[tuple[IO[bytes], BinaryIO], ...]:
    """Return what a worker prints to, each with where it goes."""
    assert process.stdout is not None
    assert process.stderr is not None
    return (process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"
