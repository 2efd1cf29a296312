"""How far long work has come, on a terminal only; nothing of it stays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

_QUIET_S = 0.5  # work shorter than this shows nothing


@contextmanager
def progress(done_word: str) -> Iterator[Callable[[int, int], None] | None]:
    """Hand out what shows how many of how many are done."""
    if not sys.stderr.isatty():
        yield None
        return
    began_s = shown_s = monotonic()

    def show(done: int, total: int) -> None:
        nonlocal shown_s
        now_s = monotonic()
        if now_s - began_s > _QUIET_S and now_s - shown_s > 0.1:
            shown_s = now_s
            sys.stderr.write(f"\r{done:,} of {total:,} {done_word} ({done / total:.0%})")

    try:
        yield show
    finally:
        if shown_s > began_s:
            sys.stderr.write("\r\x1b[K")
