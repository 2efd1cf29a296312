"""The file that one process of the job appends its notes to, in small whole blocks.

    header    512 bytes: JSON padded with spaces. Its `status` is rewritten in place when the
              process ends or its recorder fails, which needs no room on a full disk
    blocks    tag, kind, length, CRC-32, then as many bytes as the length says:
                 notes        rows of a kind from `Note`, a number, a time and a rest, packed
                 definitions  JSON: the meaning of the numbers that notes use, and facts
                 passes       when all gradients of backward passes were ready, packed

Packed notes are four columns, one after the other, deflated if they are many. The kinds have a byte
each. The numbers, times and rests each have a letter of `array`, then their whole numbers. The
first time is whole, and each other one is its difference to the time before. So a note takes some 4
bytes, and less processor time than writing it as 32 plain bytes.

A packed pass has the time of its beginning, the number of its first parameter, and the number of
its parameters. Then it has the time from its beginning until the gradient of each was ready, as
differences. It stands before the notes taken until then. So a reader in order knows a step's
gradients at the step's end.

One call writes a block. So a process that is killed leaves whole blocks and at most one torn one at
the end, which the CRC finds. Between two writes, at most `MOST_WAITING` notes wait in memory. Times
are `time.monotonic_ns`, and the header holds the wall clock at one such time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

from .notes import Notes, native_hooks

HEADER_BYTES = 512
BLOCK = struct.Struct("<4sBxxxII")
_COUNT = struct.Struct("<I")
TAG = b"FWJ2"
NOTES, DEFINITIONS, PASSES = 1, 2, 3
SUFFIX = ".journal"
PROBE_VARIABLE = "FULLWIRE_PROBE"  # Set if some steps are to be probes.
NOISE_VARIABLE = "FULLWIRE_NOISE"  # Set if gradient noise is to be noted.
MOST_WAITING = 2048  # Notes of 32 bytes, which are some 0.4 MB in Python.
MOST_HELD = 16 * MOST_WAITING  # One backward pass may bring this many before any other note.
MOST_PASSES = 64  # Passes that wait, with eight bytes for each gradient.
# Writes come each second, and each 64 passes too: larger limits double the journals of short steps.
WORTH_DEFLATING_BYTES = 4096
PLAIN = b"p"  # Plain content begins so, and deflated content never does.
# Notes of so much time may be lost to kill -9: at first, and from some six seconds on, as samples
# are. The code for a write has left the caches by the next one, so a longer write costs no more.
FIRST_WAIT_NS, LONGEST_WAIT_NS = 250_000_000, 1_000_000_000
RUNNING, ENDED, FAILED = "running", "ended", "failed"
# Hooks from before a fork keep their numbers, which the child defines anew. The child has another
# rank, and counts signatures anew.
_LASTING = ("parameter", "fact", "missing", "metric")


class Note:
    """The kinds of rows in a block of notes.

    A row has a number that a definition explains, a time, and a rest. Times are in nanoseconds. The
    kinds are plain integers. An IntEnum costs a microsecond a note on its way into an array.
    """

    OPTIMIZER = 1  # Number of the optimizer, start, length.
    FORWARD = 2  # Rows of the first tensor given, or 0 if unknown, start, length.
    BACKWARD = 3  # BEGINS, ADDS or UNKNOWN of gradients.py, start, length.
    GRADIENT = 4  # Number of the parameter, time when its gradient was ready, 0.
    ISSUE = 5  # Number of the collective, time of its issue, number of its signature.
    END = 6  # Number of the collective, time of its result, 1 if only its waiter knows.
    WAIT = 7  # 0, start, length of the program's wait for a collective.
    INPUT = 8  # 0, start, length of waiting for data.
    EVALUATION = 9  # 0, start, length.
    ZERO_GRAD = 10  # 0, time when gradients were cleared, 0.
    INFERENCE = 12  # The same of a forward where gradients are off.
    CODEC = 11  # 0 (or 1 if left for later), start, length of a communication hook's own work.
    # The next four come before END, if the transport notes them. Each has the collective's number
    # and its end.
    BEGUN = 13  # Time from the transport's beginning to the end.
    HEARD = 14  # Time from the first bytes of another rank to the end.
    REDUCED = 15  # Time of adding up.
    SENT = 16  # Bytes.
    BEFORE_FORWARD = 17  # Processor time since the last step or batch, time, disk blocks read.
    DELAY = 18  # A computing thread's wait for a processor since the last, time, its running time.
    # Of the collectives kept apart from computing: the running time of the thread in them, a time
    # in the step, the thread's wait for a processor in them.
    PROBE = 19
    PROCESSOR = 20  # Processor time since the last, time, communication threads' part of it.
    METRIC = 21  # Number of the metric, time, the bits of its value.
    METRIC_STEP = 22  # The job's own step of the next metric, time, 0.
    OWN_NOISE = 23  # Passes of the step, time, the bits of the rank's own squared gradient.
    MEAN_NOISE = 24  # Passes of the step, time, the bits of the mean's squared gradient.
    SHARD_NOISE = 25  # The same of the rank's shard of the mean: the ranks' sum is the mean's.
    CHECKPOINT = 26  # 0, start, length of the program's writing of a checkpoint.
    CHILDREN = 27  # Processor time of the process's children since the last, time, 0.
    SAMPLES = 28  # Samples that the program took with gradients on, time, the loader's way.
    # 1 if the ranks of a machine computed in turns in a probe step, a time in it, and how much
    # longer it takes the computing thread to issue its sums than to hold them back.
    TURNS = 29
    TURN = 30  # 0, start, length of a wait for the turns of other ranks, and of the sums between.


def machine_here() -> str:
    """Name the running kernel: hosts that have the same one share its processors and its clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read().strip()
    except OSError:
        return socket.gethostname()[:64]


class Journal:
    """Takes notes in bounded memory and appends them to the process's file.

    It never raises an error into the job. If it fails it stops, and its header has the reason.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        native = native_hooks()
        # It is the same object for life, so that the hottest hooks can keep its methods.
        self.notes: Notes = (native.Notes if native else Notes)(MOST_HELD, 16 * MOST_PASSES)
        self.starts_work, self.ends_work = self.notes.starts_work, self.notes.ends_work
        self._defined: list[dict[str, Any]] = []
        self.start_anew()

    def start_anew(self) -> None:
        """Begin without notes, as a process does that was just forked off."""
        self.is_open = True
        self.noted = 0
        self.notes.open()
        self._definitions = list(self._defined)
        self._file = -1
        self._written_ns, self._wait_ns = time.monotonic_ns(), FIRST_WAIT_NS
        self._writing = threading.Lock()

    def note(self, kind: int, number: int, time_ns: int, rest: int = 0) -> None:
        """Remember one event."""
        self.notes.add(kind, number, time_ns, rest)
        if self.notes.waiting >= MOST_WAITING:
            self.write()

    def note_all(self, events: Sequence[tuple[int, int, int, int]]) -> None:
        """Remember some events that no other thread's event may part."""
        self.notes.add_all(events)
        if self.notes.waiting >= MOST_WAITING:
            self.write()

    def define(self, **definition: Any) -> None:
        """Remember the meaning of a number, or a fact."""
        if self.is_open:
            if definition["kind"] in _LASTING:
                self._defined.append(definition)
            self._definitions.append(definition)

    def write_if_due(self) -> None:
        """Write if the last write is long enough ago, or much is waiting."""
        if self.is_open and time.monotonic_ns() - self._written_ns > self._wait_ns:
            # An eighth longer each time, so kill -9 takes at most that share of a long recording.
            self._wait_ns = min(self._wait_ns + self._wait_ns // 8, LONGEST_WAIT_NS)
            self.write()
        elif self.notes.waiting >= MOST_WAITING or self.notes.passes >= MOST_PASSES:
            self.write()  # those of the hottest hooks, which do not ask

    def write(self) -> None:
        """Append the waiting notes; if another thread is writing already, it writes for both."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            started = self.starts_work()
            # Definitions alone wait for the first note. A process that starts ranks, or loads their
            # data, may have made a model and is no rank.
            has_notes = self.notes.waiting or self.notes.passes
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
        self.notes.close()
        self._definitions.clear()
        self._mark(FAILED, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Write the rest and mark the file as whole."""
        self.write()
        if self.is_open:
            self.is_open = False
            self.notes.close()
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
        count, notes, passes, missed = self.notes.take()
        if missed:
            self.define(kind="missing", sentence=f"more than {MOST_HELD} notes came at once")
        definitions, self._definitions = self._definitions, []
        blocks = b""
        if definitions:
            blocks += _block(DEFINITIONS, json.dumps(definitions).encode())
        if passes:
            blocks += _block(PASSES, _tight(passes))
        if count:
            blocks += _block(NOTES, _COUNT.pack(count) + _tight(notes))
        self.noted += count
        written = os.write(self._file, blocks)
        if written < len(blocks):
            raise OSError(f"the file took {written} of {len(blocks)} bytes: is the disk full?")

    def _is_ours(self) -> bool:
        """Say whether the number still means our file: a job may close others' files."""
        try:
            return os.path.samestat(os.fstat(self._file), self._identity)
        except OSError:
            return False

    def _header(self, status: str, reason: str = "") -> bytes:
        # The rank that the launcher announced; the process group's own rank replaces it later.
        texts = (
            os.environ.get(name, "")
            for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
        )
        announced = (int(text) for text in texts if text.isdigit())
        header = {
            "format": 3,
            "status": status,
            "host": socket.gethostname()[:64],
            "pid": os.getpid(),
            "machine": machine_here(),
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
        # If the disk or the memory is full, the header still says "running", like that of a killed
        # process.
        with contextlib.suppress(OSError, MemoryError):
            os.pwrite(self._file, self._header(status, reason), 0)
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = -1


def _block(kind: int, content: bytes) -> bytes:
    return BLOCK.pack(TAG, kind, len(content), zlib.crc32(content)) + content


def _tight(content: bytes) -> bytes:
    """Deflate content if it is large: a start with cold caches takes 50 us of the job's time.

    The window has 4 KiB. The usual window takes 260 KiB of memory, and of the job's caches.
    """
    if len(content) < WORTH_DEFLATING_BYTES:
        return PLAIN + content
    packer = zlib.compressobj(1, zlib.DEFLATED, 12, 5)
    return packer.compress(content) + packer.flush()


_FRAMEWORKS = {  # by the module that jobs load; a trainer comes before the library below it
    "torchtitan": "torchtitan",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "transformers.trainer": "transformers",
    "deepspeed": "deepspeed",
}


def framework_in_use() -> str | None:
    """Return the library whose trainer runs this job, or None if the script has its own loop."""
    for module, name in _FRAMEWORKS.items():
        if module in sys.modules:
            return name
    # Models of transformers load accelerate as well. A job that uses it has made its state.
    state = sys.modules.get("accelerate.state")
    return "accelerate" if state is not None and state.PartialState._shared_state else None
