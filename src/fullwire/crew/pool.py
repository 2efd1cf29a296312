"""Processes of this machine that each do one task at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType

from fullwire.crew import Result, Task
from fullwire.errors import UsageError


class Pool:
    """So many processes; they end with the block, or with the process that started them."""

    def __init__(self, processes: int) -> None:
        self._count = processes

    def __enter__(self) -> Pool:
        # Started anew: a fork would copy locks that other threads of this process hold.
        self._pool = ProcessPoolExecutor(
            self._count, multiprocessing.get_context("spawn"), _end_with_the_parent
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def each(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Do all tasks, and give what they return, in their order."""
        try:
            yield from self._pool.map(function, tasks)
        except BrokenProcessPool:
            raise UsageError(
                f"one of {self._count} processes was killed, as happens where memory is short; "
                "--processes 1 takes the least"
            ) from None


def _end_with_the_parent() -> None:
    """Let a process of the pool end when the one that started it does, whichever way that is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is told to end by the parent
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
