"""Figures that speak for or against a verdict: each file is one source of them.

A new source is a new file in this folder that holds a `Source` named `SOURCE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fullwire.findings.finding import Evidence
from fullwire.registry import Registry
from fullwire.run.run import Run
from fullwire.timeline.account import Account

Rates: TypeAlias = Mapping[int, float]  # By rank, for the links whose rate is known.


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source of evidence, and its place among the others."""

    key: str
    place: int
    of: Callable[[Run, Account, Rates], Iterable[Evidence]]


SOURCES = Registry(Source, "fullwire.findings.evidence", name="SOURCE")


def evidence(run: Run, account: Account, rate_bps: Rates) -> tuple[Evidence, ...]:
    """Return all evidence that a run holds."""
    sources = sorted(SOURCES.values(), key=lambda source: source.place)
    return tuple(told for source in sources for told in source.of(run, account, rate_bps))
