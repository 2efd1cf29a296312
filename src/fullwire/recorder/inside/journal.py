"""The file that one process of the job appends to: what happened when, in small whole blocks.

    header    512 bytes: JSON padded with spaces. Its `status` is rewritten in place when the
              process ends or its recorder fails, which needs no room on a full disk
    blocks    tag, kind, length, CRC-32, then so many bytes:
                 notes        rows of a kind from `Note`, a number, a time and a rest, packed
                 definitions  JSON: the meaning of the numbers that notes use, and facts
                 passes       when all gradients of backward passes were ready, packed

Packed notes are four columns, one after the other, deflated if they are many: kinds in a byte each,
then numbers, times and rests, each as a letter of `array` and as many whole numbers. Of the times,
the first stands, and of each other how much later it is than the one before. A note takes some 4
bytes so, and less processor time than 32 bytes took as they were.

A packed pass is when it began, the number of its first parameter and of how many it tells, and how
long after its beginning the gradient of each was ready, as differences. It stands before the notes
that were taken until then, so who reads in order knows a step's gradients when he comes to its end.

A block is written by one call, so a process that is killed leaves whole blocks and at most one torn
one at the end, which the CRC finds. Between two writes notes wait in memory, at most `MOST_WAITING`
of them. Times are `time.monotonic_ns`; the header holds the wall clock at one moment of it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from operator import sub
from typing import Any

HEADER_BYTES = 512
BLOCK = struct.Struct("<4sBxxxII")
_COUNT = struct.Struct("<I")
PASS = struct.Struct("<qII")
TAG = b"FWJ2"
NOTES, DEFINITIONS, PASSES = 1, 2, 3
SUFFIX = ".journal"
PROBE_VARIABLE = "FULLWIRE_PROBE"  # set where some steps are to be probes
MOST_WAITING = 2048  # notes of 32 bytes: some 0.4 MB as Python holds them
MOST_HELD = 16 * MOST_WAITING  # what one backward pass may bring before anything else is noted
MOST_PASSES = 64  # that wait; four bytes for each gradient
WORTH_DEFLATING_BYTES = 4096  # less, four times a second, is at most 60 MB an hour
PLAIN = b"p"  # how content begins that is not deflated, and deflated content never
LONGEST_WAIT_NS = 250_000_000  # what kill -9 may take with it
RUNNING, ENDED, FAILED = "running", "ended", "failed"
# Hooks that were there before a fork go on with their numbers, which the child defines anew; the
# rank is another, and signatures are counted anew.
_LASTING = ("parameter", "fact", "missing")


class Note:
    """What a row says: a number that a definition explains, a time, and the rest; nanoseconds.

    Plain integers and no IntEnum, which costs a microsecond a note on its way into an array.
    """

    OPTIMIZER = 1  # number of the optimizer, start, length
    FORWARD = 2  # 0, start, length
    BACKWARD = 3  # 0, start, length
    GRADIENT = 4  # number of the parameter, when its gradient was ready, 0
    ISSUE = 5  # number of the collective, when it was issued, number of its signature
    END = 6  # number of the collective, when its result was there, 1 if only its waiter knows
    WAIT = 7  # 0, start, length of the program waiting for a collective
    INPUT = 8  # 0, start, length of waiting for data
    EVALUATION = 9  # 0, start, length
    ZERO_GRAD = 10  # 0, when gradients were cleared, 0
    INFERENCE = 12  # 0, start, length of a forward where gradients are off
    CODEC = 11  # 0, or 1 if left for later; start, length of a communication hook's own work
    # Of a collective whose transport tells, each with its number and its end; before END.
    BEGUN = 13  # how long before the end the transport took it up
    HEARD = 14  # how long before the end the first bytes of another rank had come
    REDUCED = 15  # how long it was added up
    SENT = 16  # bytes
    BEFORE_FORWARD = 17  # processor time since the last step or batch, when, blocks read from disks
    DELAY = 18  # how long a computing thread had no processor since the last, when, how long it ran
    PROBE = 19  # collectives kept apart from computing, when in the step, 0
    PROCESSOR = 20  # processor time since the last, when, of it in communication's threads


class Journal:
    """Takes notes in bounded memory and appends them to the process's file.

    It never raises into the job: when it cannot go on it stops, and its header says why.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        # The same one for life, so that the hottest hook can hold on to its append.
        self.waiting: deque[tuple[int, int, int, int]] = deque(maxlen=MOST_HELD)
        self._passes: deque[bytes] = deque(maxlen=16 * MOST_PASSES)
        self._defined: list[dict[str, Any]] = []
        self.start_anew()

    def start_anew(self) -> None:
        """Begin with nothing, as a process does that was just forked off."""
        self.is_open = True
        self.spent_ns = 0  # processor time of the recorder's own work, but for single notes
        self.noted = 0
        self.waiting.clear()
        self._passes.clear()
        self._definitions = list(self._defined)
        self._file = -1
        self._written_ns = time.monotonic_ns()
        self._writing = threading.Lock()

    def note(self, kind: int, number: int, time_ns: int, rest: int) -> None:
        """Remember one thing that happened."""
        if self.is_open:
            self.waiting.append((kind, number, time_ns, rest))
            if len(self.waiting) >= MOST_WAITING:
                self.write()

    def note_pass(self, first: int, begun_ns: int, after_ns: Sequence[int]) -> None:
        """Remember how long after a pass began each gradient was ready, from that parameter on."""
        if self.is_open:
            later_ns = [after_ns[0], *map(sub, after_ns[1:], after_ns)]
            self._passes.append(PASS.pack(begun_ns, first, len(after_ns)) + _narrow(later_ns))
            if len(self._passes) >= MOST_PASSES:
                self.write()

    def starts_work(self) -> int:
        """Begin to count this thread's processor time as ours; work within this counts once.

        Waiting for a processor is no work of ours. What another thread counts in the meantime is
        lost: as one thread is in Python at a time, that is little.
        """
        return time.thread_time_ns() - self.spent_ns

    def ends_work(self, started: int) -> None:
        """Count no further."""
        self.spent_ns = time.thread_time_ns() - started

    def define(self, **definition: Any) -> None:
        """Remember what a number means, or a fact."""
        if self.is_open:
            if definition["kind"] in _LASTING:
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
            started = self.starts_work()
            # What is only defined waits for the first note: who starts ranks, or loads their data,
            # may have made a model and is no rank.
            has_notes = self.waiting or self._passes
            if self.is_open and (has_notes or (self._definitions and self._file >= 0)):
                self._append()
            self._written_ns = time.monotonic_ns()
            self.ends_work(started)
        except Exception as error:  # a full disk must not end the job
            self.give_up(error)
        finally:
            self._writing.release()

    def give_up(self, error: BaseException) -> None:
        """Stop recording, and leave the reason in the file."""
        self.is_open = False
        self.waiting.clear()
        self._passes.clear()
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
            self._began = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
            name = f"{socket.gethostname()}-{os.getpid()}-{self._began['monotonic_ns']}{SUFFIX}"
            self._path = os.path.join(self.directory, name)
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            self._file, self._identity = file, os.fstat(file)
            os.write(file, self._header(RUNNING))
        elif not self._is_ours():
            file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            os.lseek(file, 0, os.SEEK_END)
            self._file = file
        if len(self.waiting) >= MOST_HELD:
            self.define(kind="missing", sentence=f"more than {MOST_HELD} notes came at once")
        definitions, self._definitions = self._definitions, []
        blocks = b""
        if definitions:
            blocks += _block(DEFINITIONS, json.dumps(definitions).encode())
        taken = [self.waiting.popleft() for _ in range(len(self.waiting))]  # others may add more
        # After the notes, so that no note is written before the pass that it follows.
        passes = [self._passes.popleft() for _ in range(len(self._passes))]
        if passes:
            blocks += _block(PASSES, _tight(b"".join(passes)))
        if taken:
            kinds, numbers, times_ns, rests = zip(*taken, strict=True)
            later_ns = [times_ns[0], *map(sub, times_ns[1:], times_ns)]
            content = array.array("B", kinds).tobytes()
            # The first time stands alone: it is the only one that never fits into 32 bits.
            content += array.array("q", later_ns[:1]).tobytes()
            for column in (numbers, later_ns[1:], rests):
                content += _narrow(column)
            blocks += _block(NOTES, _COUNT.pack(len(taken)) + _tight(content))
        self.noted += len(taken)
        written = os.write(self._file, blocks)
        if written < len(blocks):
            raise OSError(f"the file took {written} of {len(blocks)} bytes: is the disk full?")

    def _is_ours(self) -> bool:
        """Say whether the number still means our file: a job may close what it did not open."""
        try:
            return os.path.samestat(os.fstat(self._file), self._identity)
        except OSError:
            return False

    def _header(self, status: str, reason: str = "") -> bytes:
        # The rank that the launcher announced; a process group, once there, knows better.
        texts = (
            os.environ.get(name, "")
            for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
        )
        announced = (int(text) for text in texts if text.isdigit())
        # The running kernel: hosts that share it share its processors and its clock.
        try:
            with open("/proc/sys/kernel/random/boot_id") as boot:
                machine = boot.read().strip()
        except OSError:
            machine = socket.gethostname()[:64]
        header = {
            "format": 3,
            "status": status,
            "host": socket.gethostname()[:64],
            "pid": os.getpid(),
            "machine": machine,
            "processors": len(os.sched_getaffinity(0)),
            "rank": next(announced, 0),
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            **self._began,
            "reason": reason[:120],
        }
        return json.dumps(header).encode()[:HEADER_BYTES].ljust(HEADER_BYTES)

    def _mark(self, status: str, reason: str = "") -> None:
        if self._file < 0 or not self._is_ours():
            return
        # Without room or memory for it the header still says "running", as of a process that was
        # killed.
        with contextlib.suppress(OSError, MemoryError):
            os.pwrite(self._file, self._header(status, reason), 0)
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = -1


def _block(kind: int, content: bytes) -> bytes:
    return BLOCK.pack(TAG, kind, len(content), zlib.crc32(content)) + content


def _tight(content: bytes) -> bytes:
    """Deflate what is worth it: it begins with cold caches, which takes 50 us of the job's time.

    With a window of 4 KiB: the usual one takes 260 KiB of memory, and of the job's caches.
    """
    if len(content) < WORTH_DEFLATING_BYTES:
        return PLAIN + content
    packer = zlib.compressobj(1, zlib.DEFLATED, 12, 5)
    return packer.compress(content) + packer.flush()


def _narrow(column: Sequence[int]) -> bytes:
    try:
        return b"i" + array.array("i", column).tobytes()
    except OverflowError:
        return b"q" + array.array("q", column).tobytes()
