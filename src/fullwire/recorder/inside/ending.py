"""Call functions at the end of a process, on each of the ways in which Python ends it."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from multiprocessing import util


def at_end(last: Callable[[], None]) -> None:
    """Call a function at the end of this process and its forks; the latest function goes first.

    Processes that `multiprocessing` forks end without atexit. They call only the functions that
    were registered with `multiprocessing`.
    """
    atexit.register(last)  # also keeps it alive, which the other register does not
    util.register_after_fork(last, lambda function: util.Finalize(None, function, exitpriority=0))


def before_hard_end(last: Callable[[], None]) -> None:
    """Call a function before a program ends by os._exit, which skips all other functions."""
    leave = os._exit

    @functools.wraps(leave)
    def _exit(status: int) -> None:
        try:
            last()
        finally:
            leave(status)

    os._exit = _exit  # type: ignore[assignment]  # like the true one, it never returns
