"""What collectives have in common in which everybody talks to everybody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from fullwire.errors import UsageError

MOST_STATED = 6_000_000  # transfers that nothing repeats, and as many connections


def others_in_turn(own: NDArray[Any], count: int) -> Iterator[NDArray[Any]]:
    """Go through everybody else, each beginning with the next, so that nobody is asked by all."""
    return ((own + hop) % count for hop in range(1, count))


def refuse_too_many(transfers: int, what: str) -> None:
    """Refuse more transfers than can be held, none of which repeats another."""
    if transfers > MOST_STATED:
        raise UsageError(
            f"{what} has {transfers:,} different transfers here, at most {MOST_STATED:,} can be "
            "stated: ask for fewer workers"
        )
