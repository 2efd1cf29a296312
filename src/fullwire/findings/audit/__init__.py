"""What packets say besides: bytes against theory, what else was on the wire, who was waited for.

Each kind of line has its rule and its sentence in one file of this folder, which is its entry: a
new kind is a new file that holds a `Line` named `LINE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fullwire.findings.finding import Finding
from fullwire.packets.flows import Traffic
from fullwire.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One kind of line of the audit, and its place among the others."""

    key: str
    place: int
    of: Callable[[Traffic], Iterator[Finding]]
    is_of_one_training: bool = False  # nothing to say of several trainings together


LINES = Registry(Line, "fullwire.findings.audit", name="LINE")


def audit(traffic: Traffic) -> Iterator[Finding]:
    """Go through what else there is to say of traffic, one training or all hosts together."""
    for line in sorted(LINES.values(), key=lambda line: line.place):
        if not (line.is_of_one_training and traffic.groups):
            yield from line.of(traffic)
