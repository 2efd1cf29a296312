"""The common parts of collectives in which every rank talks to every other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from fullwire.errors import UsageError

MOST_STATED = 6_000_000  # different transfers, and as many connections


def others_in_turn(own: NDArray[Any], count: int) -> Iterator[NDArray[Any]]:
    """Go through all other ranks, each rank from its next one on, so that they spread evenly."""
    return ((own + hop) % count for hop in range(1, count))


def refuse_too_many(transfers: int, what: str) -> None:
    """Refuse more transfers than fit in memory; each of them is different."""
    if transfers > MOST_STATED:
        raise UsageError(
            f"{what} has {transfers:,} different transfers here, at most {MOST_STATED:,} can be "
            "stated: ask for fewer workers"
        )
