"""The notes that wait for the journal's next write, and how they are packed.

A job fills the processor's caches between two hooks. After that a call of a Python function costs
some 3 us, and a call of a function in C less. So `native/hooks/` holds the same class in C++, for
where this Python can load it. A test compares the two: they pack the same bytes.
"""

from __future__ import annotations

import array
import functools
import importlib.machinery
import importlib.util
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from operator import sub
from typing import Any

HOOKS_VARIABLE = "FULLWIRE_HOOKS"  # the file of the native part, as the launcher found it
PASS = struct.Struct("<qII")


class Notes:
    """Takes notes of four whole numbers (kind, number, time, rest), and the times of passes."""

    def __init__(self, most: int, most_passes: int) -> None:
        self._most, self._most_passes = most, most_passes
        self.open()

    def open(self) -> None:
        """Forget all, and take notes from now on."""
        self._rows: deque[tuple[int, int, int, int]] = deque()
        self._passes: deque[tuple[int, int, array.array[int]]] = deque()
        self._missed = 0
        self._takes = True
        self.spent_ns = 0  # processor time of the recorder's own work, except single notes

    def close(self) -> None:
        """Forget all, and take no more notes."""
        self.open()
        self._takes = False

    @property
    def waiting(self) -> int:
        """Return how many notes wait."""
        return len(self._rows)

    @property
    def passes(self) -> int:
        """Return how many passes wait."""
        return len(self._passes)

    @property
    def takes(self) -> bool:
        """Return whether notes are taken."""
        return self._takes

    def add(self, kind: int, number: int, time_ns: int, rest: int) -> None:
        """Take a note, unless too many wait."""
        if not self._takes:
            return
        try:
            if len(self._rows) < self._most:
                self._rows.append((kind, number, time_ns, rest))
                return
        except MemoryError:  # the job goes on
            pass
        self._missed += 1

    def add_interval(self, kind: int, number: int, start_ns: int, end_ns: int) -> None:
        """Take a note of an interval, by its beginning and its end."""
        self.add(kind, number, start_ns, end_ns - start_ns)

    def add_now(self, kind: int, number: int) -> None:
        """Take a note of this moment."""
        self.add(kind, number, time.monotonic_ns(), 0)

    def add_all(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """Take some notes that no other thread's note may part."""
        if self._takes and len(self._rows) + len(rows) <= self._most:
            self._rows.extend(rows)  # one call, during which no other thread runs
        elif self._takes:
            self._missed += len(rows)

    def add_pass(self, first: int, begun_ns: int, since_ns: int, after_ns: list[int]) -> None:
        """Take the time from a pass's beginning to each gradient, from parameter `first` on.

        The pass began at a time that was read, or later: all gradients were ready after `since_ns`.
        """
        if not self._takes or not after_ns:
            return
        if len(self._passes) >= self._most_passes:
            self._missed += 1
            return
        # Packing waits for the write: its code would come into the caches for each pass anew.
        noted = max(begun_ns, since_ns - min(after_ns)), first, array.array("q", after_ns)
        self._passes.append(noted)

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Return the notes that wait."""
        return [*self._rows]

    def take(self) -> tuple[int, bytes, bytes, int]:
        """Return the number of notes that waited, the notes, the passes, and the number missed."""
        rows = [self._rows.popleft() for _ in range(len(self._rows))]  # threads may add more
        # After the notes, so that no note is written before the pass that it follows.
        passes = [self._passes.popleft() for _ in range(len(self._passes))]
        missed, self._missed = self._missed, 0
        content = b""
        if rows:
            kinds, numbers, times_ns, rests = zip(*rows, strict=True)
            later_ns = [times_ns[0], *map(sub, times_ns[1:], times_ns)]
            content = array.array("B", kinds).tobytes()
            # The first time is stored alone, because it never fits into 32 bits.
            content += array.array("q", later_ns[:1]).tobytes()
            for column in (numbers, later_ns[1:], rests):
                content += _narrow(column)
        packed = b""
        for begun_ns, first, after_ns in passes:
            later_ns = [after_ns[0], *map(sub, after_ns[1:], after_ns)]
            packed += PASS.pack(begun_ns, first, len(after_ns)) + _narrow(later_ns)
        return len(rows), content, packed, missed

    def starts_work(self) -> int:
        """Begin to count this thread's processor time as ours; work within this counts once.

        Waiting for a processor does not count. The count of another thread in the meantime is lost.
        That is little, as only one thread runs Python at a time.
        """
        return time.thread_time_ns() - self.spent_ns

    def ends_work(self, started: int) -> None:
        """Stop counting."""
        self.spent_ns = time.thread_time_ns() - started


def _narrow(column: Sequence[int]) -> bytes:
    try:
        return b"i" + array.array("i", column).tobytes()
    except OverflowError:
        return b"q" + array.array("q", column).tobytes()


@functools.cache
def native_hooks() -> Any:
    """Load the native part. Return None if there is none, or if this Python is of another kind.

    It keeps to CPython's stable ABI. Builds without a lock, or that trace references, have others.
    """
    path = os.environ.get(HOOKS_VARIABLE)
    is_other = sys.implementation.name != "cpython" or "t" in sys.abiflags
    if not path or is_other or hasattr(sys, "getobjects"):
        return None
    try:
        loader = importlib.machinery.ExtensionFileLoader("_hooks", path)
        spec = importlib.util.spec_from_loader("_hooks", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except Exception:  # another machine, or another kind of library: Python does the same
        return None
    return module
