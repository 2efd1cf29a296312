"""How much processor time the process has used, and how much of it its communication threads.

Transports that run on processors reach their limit there and not on the line. Their threads have
names, and the kernel keeps a clock for every thread; reading both costs some 20 us, done rarely.
"""

from __future__ import annotations

import contextlib
import os
import time

from .journal import Journal, Note

# What their names begin with.
COMMUNICATING = ("fullwire", "gloo", "pt_gloo", "NCCL", "UCX", "mscclpp")
_EVERY_NS = 250_000_000
_OF_A_THREAD = 6  # with the thread's number before it: the clock of what it has run (posix-timers)


class Processors:
    """Notes from time to time what the process has used since it began."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._noted_ns = 0
        self._is_communicating: dict[int, bool] = {}
        self._used_ns: dict[int, int] = {}
        self._told_ns = 0, 0  # differences are noted, which are small numbers

    def note_if_due(self) -> None:
        """Note it if the last time is long enough ago."""
        now_ns = time.monotonic_ns()
        if self._journal.is_open and now_ns - self._noted_ns > _EVERY_NS:
            self._noted_ns = now_ns
            try:
                used_ns = self._communication_ns()
            except OSError as error:  # no /proc, or another kernel: the rest is recorded
                self._journal.define(kind="missing", sentence=f"processor time unknown: {error}")
                self._noted_ns = 2**63
            else:
                self._note(time.process_time_ns(), used_ns, now_ns)

    def _note(self, whole_ns: int, part_ns: int, now_ns: int) -> None:
        before_whole_ns, before_part_ns = self._told_ns
        self._told_ns = whole_ns, part_ns
        self._journal.note(
            Note.PROCESSOR, whole_ns - before_whole_ns, now_ns, part_ns - before_part_ns
        )

    def _communication_ns(self) -> int:
        for thread in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(OSError):  # it has just ended: what it had used stays counted
                if self._communicates(thread):
                    self._used_ns[thread] = time.clock_gettime_ns((~thread << 3) | _OF_A_THREAD)
        return sum(self._used_ns.values())

    def _communicates(self, thread: int) -> bool:
        if thread not in self._is_communicating:
            with open(f"/proc/self/task/{thread}/comm") as name:
                self._is_communicating[thread] = name.read().startswith(COMMUNICATING)
        return self._is_communicating[thread]
