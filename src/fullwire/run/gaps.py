"""The gaps of a run, as data: the table and, where it is known, the rank that lack something."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

NOT_SEEN = "not seen"  # how the sentence about collectives ends that the recorder missed
# The beginnings of sentences about a file whose rest is lost.
ENDS_IN_THE_MIDDLE, DAMAGED = "it ends in the middle", "damaged at byte"
OF_SEVERAL_RUNS = "they are of several runs"  # how the sentence about ranks ends that do so


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that a run should hold and does not. The reason is a sentence without its stop."""

    reason: str
    table: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        return self.reason


def gaps_of(said: Iterable[str | Gap], *, table: str | None = None) -> tuple[Gap, ...]:
    """Make gaps of sentences, all about one table if `table` is given; gaps stay as they are."""
    return tuple(reason if isinstance(reason, Gap) else Gap(reason, table) for reason in said)


def has_lost_its_end(gaps: Iterable[Gap]) -> bool:
    """Say whether the rest of a file that was read is lost."""
    lost = ENDS_IN_THE_MIDDLE, DAMAGED
    return any(words in gap.reason for gap in gaps for words in lost)


def of_several_runs(gaps: Iterable[Gap]) -> str:
    """Return why the ranks of a run cannot be of one job; empty if nothing says so."""
    return next((gap.reason for gap in gaps if gap.reason.endswith(OF_SEVERAL_RUNS)), "")


def reasons(gaps: Iterable[Gap], tables: Collection[str]) -> tuple[str, ...]:
    """Return the reasons of the gaps in these tables."""
    return tuple(gap.reason for gap in gaps if gap.table in tables)
