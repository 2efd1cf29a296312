"""While a job runs, one line on a terminal says how it goes, from the tail of a rank's journal.

The line ends with a return of the carriage and no new line, so whatever the job prints takes its
place. Where standard error is no terminal there is none.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fullwire.recorder.inside.journal import BLOCK, HEADER_BYTES, NOTES, SUFFIX, Note
from fullwire.recorder.journals import blocks_in, unpacked
from fullwire.units import show_time

_EVERY_S = 1.0
_RECENT = 20  # steps, whose usual length is shown
_ERASE = "\r\x1b[K"


@contextmanager
def live_line(directory: Path) -> Iterator[None]:
    """Say how the job that records itself into a directory goes, while the block runs."""
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    teller = threading.Thread(target=_tell, args=(Progress(directory), ended), daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        sys.stderr.write(_ERASE)
        sys.stderr.flush()


def _tell(progress: Progress, ended: threading.Event) -> None:
    while not ended.wait(_EVERY_S):
        try:
            line = progress.line()
        except (OSError, ValueError):  # a file that just goes, or is not whole yet
            continue
        if line:
            sys.stderr.write(f"{_ERASE}{line}\r")
            sys.stderr.flush()


class Progress:
    """What the journal of one rank says so far."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._journal: Path | None = None
        self._place = HEADER_BYTES
        self._steps = 0
        self._ends_ns: list[int] = []

    def line(self) -> str:
        """Read what has been written since the last time, and sum it up; empty before any step."""
        self._read_on()
        if not self._steps:
            return ""
        text = f"fullwire: {self._steps:,} step{'' if self._steps == 1 else 's'}"
        if len(self._ends_ns) > 1:
            usual_s = float(np.median(np.diff(self._ends_ns))) * 1e-9
            text += f", lately {show_time(usual_s)} each"
        return text

    def _read_on(self) -> None:
        self._journal = self._journal or min(self._directory.glob(f"*{SUFFIX}"), default=None)
        if self._journal is None:
            return
        length = self._journal.stat().st_size
        for kind, payload in blocks_in(self._journal, length, self._place):
            self._place += BLOCK.size + len(payload)
            if kind == NOTES:
                ends_ns = unpacked(payload).of(Note.OPTIMIZER)[:, 2].tolist()
                self._steps += len(ends_ns)
                self._ends_ns = [*self._ends_ns, *ends_ns][-_RECENT - 1 :]
