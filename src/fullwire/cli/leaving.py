"""How a command that holds something leaves when it is told to: by the way that releases it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer


@contextmanager
def signals_end_it() -> Iterator[None]:
    """Turn the signals that ask us to end into exits that release everything first."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _leave)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
