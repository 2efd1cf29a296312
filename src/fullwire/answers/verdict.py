"""What an account amounts to: the kind of verdict, what was found, and what would settle it."""

from __future__ import annotations

from dataclasses import dataclass

from fullwire.findings.blame import besides, kind_of
from fullwire.findings.case import THRESHOLD, Case
from fullwire.findings.finding import Finding
from fullwire.words import sentences


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the account amounts to, and why. Its sentences are filled in when they are read."""

    kind: str  # a key of `fullwire.findings.verdicts.verdict_kinds()`
    threshold: float
    findings: tuple[Finding, ...]  # the verdict itself, then what it would leave unsaid
    why: tuple[Finding, ...]
    needed: tuple[Finding, ...]  # what would settle it, where the kind is unknown

    @property
    def sentence(self) -> str:
        """Return the verdict in words."""
        return " ".join(sentences(self.findings))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why, a clause each."""
        return sentences(self.why)

    @property
    def missing(self) -> tuple[str, ...]:
        """Return what would settle it, a clause each."""
        return sentences(self.needed)


def judged(case: Case) -> Verdict:
    """Judge a case."""
    kind, why = kind_of(case)
    return Verdict(
        kind=kind.key,
        threshold=THRESHOLD,
        findings=(kind.says(case), *besides(case, kind)),
        why=why,
        needed=tuple(kind.lacks(case)),
    )
