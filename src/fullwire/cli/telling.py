"""Messages on standard error: progress, written files, the lab of a job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from fullwire.units import visible

if TYPE_CHECKING:
    from fullwire.lab.lab import Lab

_QUIET_S = 0.5  # work shorter than this shows nothing


@contextmanager
def progress(done_word: str) -> Iterator[Callable[[int, int], None] | None]:
    """Hand out what shows how many of how many are done; on a terminal only, and nothing stays."""
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


def tell(line: str) -> None:
    """Print one line on standard error."""
    sys.stderr.write(f"{visible(line)}\n")
    sys.stderr.flush()


def say(sentence: str) -> None:
    """Print a sentence beside the output of a job, with our name before it."""
    tell(f"fullwire: {sentence}")


def introduce(lab: Lab) -> None:
    """Say what a lab is, and what about it is to be known."""
    from fullwire.lab.session import summary

    say(summary(lab))
    if lab.description.dilation > 1:
        say(
            f"dilated {lab.description.dilation:g} times: compute and links are that much slower. "
            "Times of the job are told undilated"
        )
    for warning in lab.warnings:
        say(f"warning: {warning}")
