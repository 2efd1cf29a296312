"""Starts the workers of an elastic job, replaces lost ones, and passes on their output.

Workers agree among themselves who takes part (`membership`), so they go on while this process does
nothing. It keeps no state that they need: their addresses are files in a folder.

A script that does not use `fullwire.elastic` starts again when a worker ends: all that are left
start, with torchrun's variables for so many. The script reads its own checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, BinaryIO

import msgspec

from fullwire.errors import UsageError
from fullwire.resilience import checkpoints, place
from fullwire.resilience.launched import seat_here
from fullwire.resilience.pace import SLOW_STATUS
from fullwire.resilience.place import TOO_FEW_STATUS, Folder, Keeping, Place
from fullwire.units import count, seconds, show_count, shown

_FOR_SCRIPTS = (signal.SIGUSR1, signal.SIGUSR2)
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, *_FOR_SCRIPTS)
_GRACE_S = 10.0  # for workers that are told to end
_LAST_CHECKPOINT_S = 600.0  # for workers that write what they have
_LAST_ONES_S = 15.0  # for workers that have not ended when others completed the job
_STORE_STAYS_S = 10.0  # that of rank 0, for the others' last look
_LOOKS_S = 0.5
_MOST_FAILED_STARTS = 3  # in a row, without a worker that was killed
_MOST_EARLY_DEATHS = 3  # of new workers in a row, before they took part


@dataclass
class _Worker:
    """A process of the job, and its unfinished lines."""

    number: int
    process: subprocess.Popen[bytes]
    lines: dict[int, bytes]  # by descriptor


class Workers:
    """The processes of one job."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        least: int,
        *,
        respawns: bool,
        detect_s: float,
        keeping: Keeping | None = None,
        balances: bool = False,
        evicts: bool = False,
    ) -> None:
        if least > count:
            raise UsageError(
                f"run: expected --min from 1 to --workers, got --workers {count} and --min {least}"
            )
        self._keeping = keeping or Keeping()
        self._command, self._least = list(command), least
        self._count = self._asked = count  # a script that starts again may have fewer
        self._respawns, self._detect_s = respawns, detect_s
        self._balances, self._evicts = balances, evicts
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, _Worker] = {}
        self._next = self._done = 0
        self._is_elastic = False  # until a worker of this job says so
        self._failed_starts = 0  # in a row, of a script without `fullwire.elastic`
        self._paths: list[Path] = []
        self._early_deaths = 0
        self._completed_s: float | None = None
        self._ends_s: float | None = None
        self._signal = 0

    def run(self) -> int:
        """Run the job, and return its exit status."""
        self._variables = place.new_key()  # of all workers, besides their places
        try:
            with self._passing_on_signals():
                self._begin()
                while self._running:
                    self._look()
            return self._status()
        finally:
            for worker in self._running.values():  # only where this process fails itself
                worker.process.kill()
            for path in self._paths:
                shutil.rmtree(path)

    def _begin(self) -> None:
        """Start all workers, in a folder of their own."""
        path = Path(tempfile.mkdtemp(prefix="fullwire-job-"))  # for its owner alone
        self._paths.append(path)
        self._folder = Folder(path)
        self._folder.set("number", secrets.token_hex(32))
        self._place = self._of_this_job(
            Place(self._folder, 0, self._count, keeping=self._where_it_begins())
        )
        with socket.socket() as free:
            free.bind((self._folder.host, 0))
            port = free.getsockname()[1]
        self._variables |= {
            "WORLD_SIZE": str(self._count),
            "LOCAL_WORLD_SIZE": str(self._count),
            "MASTER_ADDR": self._folder.host,
            "MASTER_PORT": str(port),
        }
        self._next = self._done = 0
        for _ in range(self._count):
            self._start()

    def _of_this_job(self, part: Place) -> Place:
        """Complete a worker's part with the options of this job."""
        return replace(
            part,
            least=self._least,
            detect_s=self._detect_s,
            is_replaced=self._respawns,
            balances=self._balances,
            evicts=self._evicts,
        )

    def _where_it_begins(self) -> Keeping:
        """Look for the last checkpoint."""
        keeping = self._keeping
        if keeping.is_on:
            folder = Path(keeping.folder).absolute()
            keeping = msgspec.structs.replace(keeping, folder=str(folder))
            if (found := checkpoints.newest(folder)) is not None:
                source, step, problems = found
                for problem in problems:
                    sys.stderr.write(f"fullwire: {problem}. An earlier checkpoint is used\n")
                sys.stderr.write(f"fullwire: the job goes on after step {step}, from {source}\n")
                keeping = msgspec.structs.replace(keeping, first_step=step, source=str(source))
        return keeping

    def _begin_again(self) -> None:
        """Begin at the last checkpoint, or at the first step: nobody is left who could go on."""
        sys.stderr.write(
            "fullwire: no worker is left that has the parameters. The job begins again\n"
        )
        for worker in list(self._running.values()):
            worker.process.kill()
            worker.process.wait()
            self._close(worker)
        self._begin()

    def _restart(self, first: _Worker) -> None:
        """Start all workers of a plain script again, less the lost ones."""
        others = list(self._running.values())
        lost = 1 + sum((worker.process.poll() or 0) < 0 for worker in others)
        by_signal = first.process.returncode < 0 or lost > 1
        self._failed_starts = 0 if by_signal else self._failed_starts + 1
        left = self._count if self._respawns else self._count - lost
        why = f"fullwire: worker {first.number} {_ended(first.process.returncode)}"
        self._tell(signal.SIGTERM)
        until_s, self._ends_s = time.monotonic() + _GRACE_S, None
        for worker in others:
            while worker.process.poll() is None and time.monotonic() < until_s:
                time.sleep(0.01)
            worker.process.kill()
            worker.process.wait()
            self._close(worker)
        if left < self._least or self._failed_starts > _MOST_FAILED_STARTS or self._signal:
            sys.stderr.write(f"{why}; the job ends\n")
            return
        sys.stderr.write(
            f"{why}; {show_count(left, 'worker')} {'starts' if left == 1 else 'start'} again\n"
        )
        self._count = left
        self._begin()

    def _start(self) -> None:
        number, self._next = self._next, self._next + 1
        # As torchrun does: with a thread on each processor, the workers would slow each other.
        threads = {"OMP_NUM_THREADS": "1"} if self._asked > 1 else {}
        try:
            process = subprocess.Popen(
                self._command,
                env=threads
                | os.environ
                | {"LOCAL_RANK": str(number)}
                | self._variables
                | replace(self._place, worker=number).variables(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C comes through here, once
            )
        except OSError as error:
            raise UsageError(f"run: {self._command[0]}: {error.strerror}") from None
        worker = _Worker(number, process, {})
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
            is_there = self._running.get(worker.number) is worker  # the job may have begun again
            if is_there and worker.process.poll() is not None:
                self._bury(worker)
        now_s = time.monotonic()
        late = self._completed_s is not None and now_s - self._completed_s > _LAST_ONES_S
        is_over = self._ends_s is not None and now_s > self._ends_s
        # Workers that are stopped would never end.
        if is_over or (
            late and all(_is_stopped(worker.process.pid) for worker in self._running.values())
        ):
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
        self._close(worker)
        self._is_elastic = self._is_elastic or bool(self._folder.numbers("rank"))
        took_part = self._folder.check([f"holds {worker.number}"])
        self._folder.bury(worker.number)
        status = worker.process.returncode
        if status == 0:
            self._done += 1
            if self._is_elastic and self._completed_s is None:
                self._completed_s = time.monotonic()
                self._folder.set("finished", "")
            return
        if self._completed_s is not None or self._ends_s is not None:
            return
        if not self._is_elastic:
            self._restart(worker)
            return
        is_slow = status == SLOW_STATUS and self._folder.check([f"slow {worker.number}"])
        if is_slow:
            sys.stderr.write(f"fullwire: worker {worker.number} left, because it was slow\n")
            return
        if status != -signal.SIGKILL:  # anybody may kill a worker, as often as they like
            self._early_deaths = 0 if took_part else self._early_deaths + 1
        if self._respawns and self._early_deaths < _MOST_EARLY_DEATHS and status != TOO_FEW_STATUS:
            if not self._can_go_on():
                self._begin_again()
                return
            sys.stderr.write(f"fullwire: worker {worker.number} {_ended(status)}, another starts\n")
            self._start()
        elif status != TOO_FEW_STATUS:
            left = len(self._running)
            sys.stderr.write(f"fullwire: worker {worker.number} {_ended(status)}, {left} go on\n")
            if left < self._least:
                # Elastic workers end by themselves, at a step; others cannot go on.
                grace_s = _LAST_CHECKPOINT_S if self._folder.numbers("holds") else _GRACE_S
                self._ends_s = time.monotonic() + grace_s

    def _can_go_on(self) -> bool:
        """Say whether a worker is left that has the parameters, or that can be a first one."""
        holders = self._folder.numbers("holds")
        return any(number < self._count or number in holders for number in self._running)

    def _close(self, worker: _Worker) -> None:
        """Pass on the last lines of a worker that has ended."""
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

    def _status(self) -> int:
        if self._signal:
            return 128 + self._signal
        if self._completed_s is not None or self._done == self._count:
            return 0
        said = [
            self._folder.get(f"ended {worker}").decode().split(" ", 2)
            for worker in self._folder.numbers("ended")
        ]
        after = f", after step {max(int(words[1]) for words in said)}" if said else ""
        written = next((words[2] for words in said if words[2]), "")
        if "/step-" in written:
            folder = written.rpartition("/")[0]
            after += f"; --checkpoint {folder} goes on from {written}"
        elif said:
            after += f"; no checkpoint was written{': ' if written else ''}{written}"
        sys.stderr.write(
            f"fullwire: the job ended with fewer than --min {self._least} of {self._asked} "
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


class OnePlace(Workers):
    """The worker at this process's place in a job that a launcher started, and its successors."""

    _lost_status: int | None = None  # of this place's last worker

    def _begin(self) -> None:
        self._variables = {"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}  # the key is the user's
        self._seat = seat_here(self._where_it_begins())
        self._folder = self._seat.folder
        if self._folder.is_of_one_host:
            self._paths.append(self._folder.path)
        self._start()

    def _start(self) -> None:
        self._place = self._of_this_job(self._seat.next_place())
        self._next = self._place.worker
        super()._start()

    def _bury(self, worker: _Worker) -> None:
        self._close(worker)
        number, status = worker.number, worker.process.returncode
        took_part = self._folder.check([f"holds {number}"])
        self._is_elastic = self._is_elastic or self._folder.check([f"rank {number}"])
        self._folder.bury(number)
        if status == 0:
            self._done += 1
            self._folder.set("finished", "")
        self._copy()
        if status == 0 or self._ends_s is not None:
            return
        self._early_deaths = 0 if took_part or status == -signal.SIGKILL else self._early_deaths + 1
        if status == TOO_FEW_STATUS or not self._is_elastic:
            self._lost_status = status
        elif self._respawns and self._early_deaths < _MOST_EARLY_DEATHS and status != SLOW_STATUS:
            sys.stderr.write(f"fullwire: worker {number} {_ended(status)}; another starts\n")
            self._start()
        else:
            sys.stderr.write(f"fullwire: worker {number} {_ended(status)}; the others go on\n")
            self._lost_status = self._await_others(status)

    def _copy(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the store has ended
            self._seat.copy()

    def _await_others(self, status: int) -> int:
        """Wait until another place has completed the job, or none is left; return the status."""
        while not self._signal and self._seat.is_connected:
            if self._folder.check(["finished"]):
                return 0
            if not self._folder.numbers("rank"):
                return TOO_FEW_STATUS
            time.sleep(0.1)
        return status

    def _status(self) -> int:
        # Others read here that the job is complete.
        if self._seat.serves:
            until_s = time.monotonic() + _STORE_STAYS_S
            while self._folder.numbers("rank") and time.monotonic() < until_s:
                time.sleep(0.05)
            time.sleep(_LOOKS_S)
        if self._signal:
            return 128 + self._signal
        if self._done:
            return 0
        status = self._lost_status or 0
        return status if status >= 0 else 128 - status


def run_workers(
    command: Sequence[str],
    *,
    workers: int | None = None,
    least: int = 1,
    respawn: bool = False,
    detect_s: str | float = 2.0,
    checkpoint: str | Path | None = None,
    every_s: str | float | None = None,
    keep: int = 3,
    whole: bool = False,
    balance: bool = False,
    evict_slow: bool = False,
) -> int:
    """Run a command in several workers that may be lost; return the exit status of the job.

    It is 0 when the job was completed, however many workers were lost, and 4 with too few.

    - `command`: the program of one worker. Its script uses `fullwire.elastic`.
    - `workers`: the number of processes to start. Without it, a launcher has started this process
      and others like it, and its variables name them; each starts one.
    - `least`: with fewer workers the job ends.
    - `respawn`: replace lost workers.
    - `detect_s`: the silence in seconds after which a worker counts as lost.
    - `checkpoint`: a folder for checkpoints. The job goes on from the last one there.
    - `every_s`: the seconds between two checkpoints, in place of those that cost the job least.
    - `keep`: how many checkpoints stay.
    - `whole`: one file a checkpoint, in place of one for each worker.
    - `balance`: workers get shares of the global batch by their measured speed.
    - `evict_slow`: a worker that stays slow leaves the job.

        fw.run_workers(["python", "train.py"], workers=4, least=2, respawn=True)
    """
    least, keep = count(least, "run: --min"), count(keep, "run: --keep")
    if workers is not None:
        workers = count(workers, "run: --workers")
    detect_s = _above_zero_s(detect_s, "--detect")
    if every_s is not None:
        every_s = _above_zero_s(every_s, "--every")
    keeping = Keeping(every_s=every_s, keep=keep, is_whole=whole, is_on=checkpoint is not None)
    if checkpoint is not None:
        keeping.folder = str(checkpoint)
    elif every_s is not None or whole:
        raise UsageError("run: expected --checkpoint FOLDER with --every and --whole")
    if balance and evict_slow:
        raise UsageError("run: expected --balance or --evict-slow, got both")
    job = (OnePlace if workers is None else Workers)(
        command,
        least if workers is None else workers,
        least,
        respawns=respawn,
        detect_s=detect_s,
        keeping=keeping,
        balances=balance,
        evicts=evict_slow,
    )
    return job.run()


def _above_zero_s(given: str | float, option: str) -> float:
    """Read a time that is above zero: seconds, or text with a unit."""
    time_s = seconds(given, f"run: {option}")
    if time_s <= 0:
        raise UsageError(f"run: expected {option} above 0 s, got {shown(given)}")
    return time_s


def _streams(process: subprocess.Popen[bytes]) -> tuple[tuple[IO[bytes], BinaryIO], ...]:
    """Return what a worker prints to, each with where it goes."""
    assert process.stdout is not None
    assert process.stderr is not None
    return (process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)


def _is_stopped(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"
