"""Times on a device, with a stand-in for torch.cuda: no GPU has run this yet."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

from fullwire.recorder.inside.journal import Journal, Note

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the recorder's clock needs torch"
)


class Event:
    """An event that passes when the stand-in's device has reached its time."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.at_ms = 0.0

    def record(self, stream: object = None) -> None:
        self.at_ms = self.cuda.queued_ms if stream is None else self.cuda.passed_ms

    def query(self) -> bool:
        return self.at_ms <= self.cuda.passed_ms

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


class Cuda:
    """The part of torch.cuda that the clock uses; it has no way to wait for anything."""

    def __init__(self) -> None:
        self.queued_ms = self.passed_ms = 0.0
        self.is_capturing = False

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def Stream(self) -> object:  # noqa: N802  # as torch calls it
        return object()

    def Event(self, enable_timing: bool) -> Event:  # noqa: N802
        assert enable_timing
        return Event(self)


def test_an_interval_is_noted_when_its_events_have_passed_and_not_before(tmp_path: Path) -> None:
    from fullwire.recorder.inside.clock import Clock

    journal, cuda = Journal(str(tmp_path)), Cuda()
    clock = Clock(journal, cuda)
    began_ns = time.monotonic_ns()
    cuda.queued_ms = 100
    start = clock.moment()
    cuda.queued_ms = 130
    clock.note(Note.BACKWARD, 0, start, clock.moment())
    clock.collect()
    assert not journal.notes.waiting
    cuda.passed_ms = 130
    clock.collect()
    [(kind, _, start_ns, length_ns)] = journal.notes.rows()
    assert kind == Note.BACKWARD
    assert length_ns == 30_000_000
    assert 100_000_000 <= start_ns - began_ns < 60_000_000_000


def test_while_a_graph_is_captured_the_device_is_not_asked(tmp_path: Path) -> None:
    from fullwire.recorder.inside.clock import Clock

    journal, cuda = Journal(str(tmp_path)), Cuda()
    clock = Clock(journal, cuda)
    cuda.is_capturing = True
    assert isinstance(clock.moment(), int)


def test_what_never_passed_is_said_to_be_missing(tmp_path: Path) -> None:
    from fullwire.recorder.inside.clock import Clock

    journal, cuda = Journal(str(tmp_path)), Cuda()
    clock = Clock(journal, cuda)
    cuda.queued_ms = 1
    clock.note_one(Note.END, 0, clock.moment())
    clock.close()
    [sentence] = [each["sentence"] for each in journal._definitions if each["kind"] == "missing"]
    assert sentence == "1 times of the device are missing: their events had not passed"
