"""Take times on the host, or on a CUDA device, which works off a queue behind the host.

On a device, a moment is an event in its queue. The recorder never waits for an event. It asks now
and then whether events have passed (`query`), and makes notes of those that have. A reference moves
their times to the host's clock. It is an event on an otherwise empty stream, and the host knows its
time to some microseconds. A new reference is made every second, because CUDA gives the time between
two events in 32-bit floating point. That is exact to 0.1 us over a second, but to 0.2 ms over an
hour.

Without devices, each call within a call counts, as the job has filled the processor's caches since
the last one. There a moment is the host's clock itself.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from .journal import Journal

Moment: TypeAlias = Any  # nanoseconds of the host's monotonic clock, or an event on a device
MOST_PENDING = 16_384  # notes that wait for their events: above it, the oldest are given up
REFERENCE_LASTS_NS = 1_000_000_000
_LONGEST_LOOK_NS = 1_000_000
_now = time.monotonic_ns


class Clock:
    """Takes moments, and writes their notes as soon as their times are known."""

    def __init__(self, journal: Journal, cuda: Any = None) -> None:
        self._journal = journal
        self._device = None if cuda is None else _Device(journal, cuda)
        self.knows_devices = cuda is not None  # whether moments may be on a device
        # Returns the present moment, on the device if this process uses one.
        self.moment: Callable[[], Moment] = _now
        # Note an interval between two moments of one kind of clock, and a moment.
        self.note: Callable[[int, int, Moment, Moment], None] = journal.notes.add_interval
        self.note_one: Callable[..., None] = journal.note
        if self._device is not None:
            self.moment = self._moment
            self.note, self.note_one = self._device.note, self._device.note_one

    def _moment(self) -> Moment:
        assert self._device is not None
        try:
            return self._device.moment()
        except Exception as error:  # the job goes on
            self._journal.give_up(error)
            return _now()

    def collect(self) -> None:
        """Write the notes whose events have passed on the device since the last time."""
        if self._device is not None:
            try:
                self._device.collect()
            except Exception as error:  # the job goes on
                self._journal.give_up(error)

    def close(self) -> None:
        """Write the notes whose events have passed, and report the others as missing."""
        self.collect()
        if self._device is not None:
            self._device.say_what_is_missing()


def clock_of_this_torch(journal: Journal) -> Clock:
    """Make the clock of this process; a torch built for CPU only has no devices."""
    return Clock(journal, torch.cuda if torch.version.cuda or torch.version.hip else None)


class _Device:
    """Events on the current device, and those that have yet to pass."""

    def __init__(self, journal: Journal, cuda: Any) -> None:
        self._journal = journal
        self._cuda = cuda
        self._pending: deque[tuple[int, int, Moment, Moment | None, int]] = deque()
        self._given_up = 0
        self._reference: tuple[Any, int] | None = None
        self._stream: Any = None
        os.register_at_fork(after_in_child=self._pending.clear)

    def moment(self) -> Moment:
        """Put an event in the queue, or use the host before the program's own first use of CUDA."""
        if not self._may_be_asked():
            return _now()
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, kind: int, number: int, start: Moment, end: Moment) -> None:
        if type(start) is int and type(end) is int:
            self._journal.notes.add_interval(kind, number, start, end)
        else:
            self.note_later(kind, number, start, end, 0)

    def note_one(self, kind: int, number: int, moment: Moment, rest: int = 0) -> None:
        if type(moment) is int:
            self._journal.note(kind, number, moment, rest)
        else:
            self.note_later(kind, number, moment, None, rest)

    def note_later(
        self, kind: int, number: int, start: Moment, end: Moment | None, rest: int
    ) -> None:
        if len(self._pending) >= MOST_PENDING:
            self._pending.popleft()
            self._given_up += 1
        self._pending.append((kind, number, start, end, rest))

    def collect(self) -> None:
        if not self._pending or not self._may_be_asked():
            return
        self._renew_reference()
        while self._reference and self._pending:
            moments = self._pending[0][2:4]
            if not all(when is None or type(when) is int or when.query() for when in moments):
                break
            kind, number, start, end, rest = self._pending.popleft()
            start_ns = self._host_ns(start)
            length_ns = rest if end is None else self._host_ns(end) - start_ns
            self._journal.note(kind, number, start_ns, length_ns)

    def say_what_is_missing(self) -> None:
        count = self._given_up + len(self._pending)
        if count:
            sentence = f"{count} times of the device are missing: their events had not passed"
            self._journal.define(kind="missing", sentence=sentence)

    def _may_be_asked(self) -> bool:
        """Say whether CUDA is in use and records no graph, which any question would spoil."""
        return bool(self._cuda.is_initialized()) and not self._cuda.is_current_stream_capturing()

    def _renew_reference(self) -> None:
        if self._reference and _now() - self._reference[1] < REFERENCE_LASTS_NS:
            return
        if self._stream is None:
            self._stream = self._cuda.Stream()
        event = self._cuda.Event(enable_timing=True)
        before_ns = _now()
        event.record(self._stream)
        while not event.query():
            if _now() - before_ns > _LONGEST_LOOK_NS:
                return  # the device is busy: use the old reference a little longer
        self._reference = event, (before_ns + _now()) // 2

    def _host_ns(self, moment: Moment) -> int:
        if isinstance(moment, int):
            return moment
        assert self._reference is not None
        event, at_ns = self._reference
        elapsed_ms: float = event.elapsed_time(moment)
        return at_ns + round(elapsed_ms * 1e6)
