"""The file that one process of the job appends to: what happened when, in small whole blocks.

    header    512 bytes: JSON padded with spaces. Its `status` is rewritten in place when the
              process ends or its recorder fails, which needs no room on a full disk
    blocks    tag, kind, length, CRC-32, then so many bytes:
                 notes        rows of four whole numbers: a kind from `Note`, and three values
                 definitions  JSON: the meaning of the numbers that notes use, and facts

A block is written by one call, so a process that is killed leaves whole blocks and at most one torn
one at the end, which the CRC finds. Between two writes notes wait in memory, at most `MOST_WAITING`
of them. Times are `time.monotonic_ns`; the header holds the wall clock at one moment of it.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import threading
import time
import zlib
from collections import deque
from itertools import chain
from typing import Any

HEADER_BYTES = 512
BLOCK = struct.Struct("<4sBxxxII")
TAG = b"FWJ1"
NOTES, DEFINITIONS = 1, 2
SUFFIX = ".journal"
MOST_WAITING = 2048  # notes of 32 bytes: some 0.4 MB as Python holds them
MOST_HELD = 16 * MOST_WAITING  # what one backward pass may bring before anything else is noted
LONGEST_WAIT_NS = 250_000_000  # what kill -9 may take with it
RUNNING, ENDED, FAILED = "running", "ended", "failed"


class Note:
    """What a row says; times are nanoseconds, numbers refer to definitions.

    Plain integers and no IntEnum, which costs a microsecond a note on its way into an array.
    """

    OPTIMIZER = 1  # number of the optimizer, start, end
    FORWARD = 2  # 1 where gradients are off, start, end
    BACKWARD = 3  # 0, start, end
    GRADIENT = 4  # number of the parameter, when its gradient was ready, 0
    ISSUE = 5  # number of the collective, number of its signature, when it was issued
    END = 6  # number of the collective, when its result was there, 1 if only its waiter knows
    WAIT = 7  # 0, start, end of the program waiting for a collective
    INPUT = 8  # 0, start, end of waiting for data
    EVALUATION = 9  # 0, start, end
    ZERO_GRAD = 10  # 0, when gradients were cleared, 0
    PROCESSOR = 20  # processor time so far, of it in communication's threads, when that was


class Journal:
    """Takes notes in bounded memory and appends them to the process's file.

    It never raises into the job: when it cannot go on it stops, and its header says why.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        # The same one for life, so that the hottest hook can hold on to its append.
        self.waiting: deque[tuple[int, int, int, int]] = deque(maxlen=MOST_HELD)
        self._defined: list[dict[str, Any]] = []
        self.start_anew()

    def start_anew(self) -> None:
        """Begin with nothing, as a process does that was just forked off."""
        self.is_open = True
        self.write_ns = 0
        self.noted = 0
        self.waiting.clear()
        # Hooks that were there before a fork go on with their numbers; the rank is another.
        self._definitions = [each for each in self._defined if each["kind"] != "identity"]
        self._file = -1
        self._written_ns = time.monotonic_ns()
        self._writing = threading.Lock()

    def note(self, kind: int, first: int, second: int, third: int) -> None:
        """Remember one thing that happened."""
        if self.is_open:
            self.waiting.append((kind, first, second, third))
            if len(self.waiting) >= MOST_WAITING:
                self.write()

    def define(self, **definition: Any) -> None:
        """Remember what a number means, or a fact."""
        if self.is_open:
            self._defined.append(definition)
            self._definitions.append(definition)

    def write_if_due(self) -> None:
        """Write if the last time is long enough ago."""
        if self.is_open and time.monotonic_ns() - self._written_ns > LONGEST_WAIT_NS:
            self.write()

    def write(self) -> None:
        """Append what waits; another thread that is at it already does it for both."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            began_ns = time.thread_time_ns()  # processor time: waiting for one is not our work
            if self.is_open and (self.waiting or self._definitions):
                self._append()
            self._written_ns = time.monotonic_ns()
            self.write_ns += time.thread_time_ns() - began_ns
        except Exception as error:  # a full disk must not end the job
            self.give_up(error)
        finally:
            self._writing.release()

    def give_up(self, error: BaseException) -> None:
        """Stop recording, and leave the reason in the file."""
        self.is_open = False
        self.waiting.clear()
        self._definitions.clear()
        self._mark(FAILED, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Write the rest and mark the file as whole."""
        self.write()
        if self.is_open:
            self.is_open = False
            self._mark(ENDED)

    def _append(self) -> None:
        if self._file < 0:
            self._file = self._opened()
        definitions, self._definitions = self._definitions, []
        blocks = b""
        if definitions:
            blocks += _block(DEFINITIONS, json.dumps(definitions).encode())
        taken = [self.waiting.popleft() for _ in range(len(self.waiting))]  # others may add more
        rows = array.array("q", chain.from_iterable(taken))
        if rows:
            blocks += _block(NOTES, rows.tobytes())
        self.noted += len(rows) // 4
        written = os.write(self._file, blocks)
        if written < len(blocks):
            raise OSError(f"the file took {written} of {len(blocks)} bytes: is the disk full?")

    def _opened(self) -> int:
        self._began = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
        name = f"{socket.gethostname()}-{os.getpid()}-{self._began['monotonic_ns']}{SUFFIX}"
        path = os.path.join(self.directory, name)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.write(file, self._header(RUNNING))
        return file

    def _header(self, status: str, reason: str = "") -> bytes:
        header = {
            "format": 1, "status": status, "host": socket.gethostname()[:64], "pid": os.getpid(),
            "machine": _machine(), "processors": len(os.sched_getaffinity(0)),
            "rank": _rank_by_environment(),
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            **self._began, "reason": reason[:120],
        }  # fmt: skip
        return json.dumps(header).encode()[:HEADER_BYTES].ljust(HEADER_BYTES)

    def _mark(self, status: str, reason: str = "") -> None:
        if self._file < 0:
            return
        try:
            os.pwrite(self._file, self._header(status, reason), 0)
            os.close(self._file)
        except OSError:
            pass  # the header still says "running", which reads as a process that was killed
        self._file = -1


def _block(kind: int, content: bytes) -> bytes:
    return BLOCK.pack(TAG, kind, len(content), zlib.crc32(content)) + content


def _machine() -> str:
    """Name the running kernel: hosts that share it share its processors and its clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read().strip()
    except OSError:
        return socket.gethostname()[:64]


def _rank_by_environment() -> int:
    """Return the rank that the launcher announced; a process group, once there, knows better."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0
