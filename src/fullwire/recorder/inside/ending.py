"""What a process still does when it ends, whichever way Python takes."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from multiprocessing import util


def at_end(last: Callable[[], None]) -> None:
    """Call this at the end of this process, and of each that is forked off; the latest goes first.

    What `multiprocessing` forks ends past atexit, and calls only what was left with itself.
    """
    atexit.register(last)  # which also keeps it alive: the other register does not
    util.register_after_fork(last, lambda function: util.Finalize(None, function, exitpriority=0))


def before_hard_end(last: Callable[[], None]) -> None:
    """Call this before a program ends by os._exit, which passes by all else left for its end."""
    leave = os._exit

    @functools.wraps(leave)
    def _exit(status: int) -> None:
        try:
            last()
        finally:
            leave(status)

    os._exit = _exit  # type: ignore[assignment]  # it returns as little as the true one
