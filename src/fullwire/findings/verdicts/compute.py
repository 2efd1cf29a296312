"""Computation takes longer than with one worker, and nothing else loses more."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.finding import Finding
from fullwire.findings.verdicts import Colour, VerdictKind, register
from fullwire.timeline.account import Part


class ComputationIsInflated(Finding):
    """How much longer computation takes than in the baseline's step."""

    template = (
        "Computation limits this job: it takes {longer_s:time} longer than on one worker, "
        "{share:.0%} of each step."
    )

    longer_s: float
    share: float


@register
class Compute(VerdictKind):
    """Computation, longer than with one worker."""

    key = "compute"
    part = Part.COMPUTE.key
    label = "compute"
    colour = Colour("#6d7e92", "#8293a6")

    def says(self, case: Case) -> Finding:
        """Say how much longer it takes."""
        longer_s = case.inflation_s or 0.0
        return ComputationIsInflated(longer_s=longer_s, share=case.share(longer_s))
