"""What is missing from a run, as data: from which table, of which rank, where that is known."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that a run should hold and does not. The reason is a sentence without its stop."""

    reason: str
    table: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        return self.reason


def gaps_of(said: Iterable[str | Gap], *, table: str | None = None) -> tuple[Gap, ...]:
    """Make gaps of sentences, all about one table where that is given; gaps stay as they are."""
    return tuple(each if isinstance(each, Gap) else Gap(each, table) for each in said)


def reasons(gaps: Iterable[Gap], tables: Collection[str]) -> tuple[str, ...]:
    """Return what is said of these tables."""
    return tuple(gap.reason for gap in gaps if gap.table in tables)
