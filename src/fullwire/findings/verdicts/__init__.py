"""The kinds of verdict, one a file: when it holds, the part of the account it blames, its sentence.

A new kind is a new file in this folder that calls `register`. The account says which part is to
blame (`fullwire.findings.blame`); the kind whose rule then holds is the verdict.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from fullwire.findings.case import Case
from fullwire.findings.finding import Finding
from fullwire.timeline.account import Part

NOTHING = "nothing"  # no part reaches the threshold
UNTOLD = "unknown"  # the data cannot decide


@dataclass(frozen=True, slots=True)
class Blame:
    """The part of the account that is to blame, or one of the two above, and why."""

    part: str
    reasons: tuple[Finding, ...]


Rule: TypeAlias = Callable[[Case, Blame], tuple[Finding, ...] | None]


def blames(part: str) -> Rule:
    """Return the rule of a kind that holds wherever its part of the account is to blame."""
    return lambda case, blame: blame.reasons if blame.part == part else None


@dataclass(frozen=True, slots=True)
class Colour:
    """How a part of the account is drawn, on light paper and on dark."""

    light: str
    dark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictKind:
    """One kind of verdict. The first five fields are what it is, the others how it is shown."""

    key: str
    part: str  # of the account, which it speaks of; none where it speaks of the whole step
    rule: Rule  # returns the reasons, where it is the verdict
    says: Callable[[Case], Finding]  # what was found, for the verdict's sentence
    lacks: Callable[[Case], Iterator[Finding]] = lambda case: iter(())  # what would settle it
    label: str = ""  # of its part, where that is drawn
    heading: str = ""  # of its part among one rank's, where the label would mislead
    colour: Colour | None = None  # of its part
    lost_to: str = ""  # to what its part is lost, where another kind is the verdict
    within: str = ""  # its part amidst a sentence, where that is not its key
    is_transfer: bool = False  # one of those that share the exposed transfers
    is_of_one: bool = False  # a worker alone may lose it as well
    needs_clocks: bool = False  # told from which rank came when


_KINDS: dict[str, VerdictKind] = {}


def register(kind: VerdictKind) -> VerdictKind:
    """Add a kind of verdict."""
    if kind.key in _KINDS:
        raise ValueError(f"verdict {kind.key}: registered twice")
    _KINDS[kind.key] = kind
    return kind


@cache
def verdict_kinds() -> Mapping[str, VerdictKind]:
    """Return all kinds by key: those that the files of this folder register."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(_KINDS)


@cache
def drawn_parts() -> Mapping[str, VerdictKind]:
    """Return, by part of the account, the kind that says how it is called and drawn."""
    drawn = {kind.part: kind for kind in verdict_kinds().values() if kind.label}
    return {part.key: drawn[part.key] for part in Part}
