"""The audit of packets: bytes against theory, other bytes on the wire, late hosts.

Each file of this folder holds one kind of line: its rule, and its sentence. The file itself is the
entry. A new kind is a new file that holds a `Line` named `LINE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fullwire.findings.finding import Finding
from fullwire.packets.flows import Traffic
from fullwire.registry import Registry
from fullwire.run.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One kind of line of the audit, and its place among the others."""

    key: str
    place: int
    of: Callable[[Traffic], Iterator[Finding]]
    is_of_one_training: bool = False  # It has no meaning for several trainings together.
    of_recording: Callable[[Run], Iterator[Finding]] | None = None  # Where it needs no packets.


LINES = Registry(Line, "fullwire.findings.audit", name="LINE")


def audit(traffic: Traffic) -> Iterator[Finding]:
    """Yield the audit's findings about one training, or about all hosts together."""
    for line in sorted(LINES.values(), key=lambda line: line.place):
        if not (line.is_of_one_training and traffic.groups):
            yield from line.of(traffic)


def audit_of_recording(run: Run) -> Iterator[Finding]:
    """Yield the findings about captures beside a recorded job, whose packets nobody reads."""
    for line in sorted(LINES.values(), key=lambda line: line.place):
        if line.of_recording is not None:
            yield from line.of_recording(run)
