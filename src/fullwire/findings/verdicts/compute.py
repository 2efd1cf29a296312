"""The verdict where computation takes longer than with one worker: the largest loss."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.finding import Finding
from fullwire.findings.verdicts import Colour, VerdictKind, register
from fullwire.timeline.account import Part


class ComputationIsInflated(Finding):
    """The increase of computation over the baseline's step."""

    template = (
        "Computation limits this job: it takes {longer_s:time} longer than on one worker, "
        "{share:.0%} of each step."
    )

    longer_s: float
    share: float


@register
class Compute(VerdictKind):
    """Computation that takes longer than with one worker."""

    key = "compute"
    part = Part.COMPUTE.key
    label = "compute"
    colour = Colour("#6d7e92", "#8293a6")

    def says(self, case: Case) -> Finding:
        """Return the increase of computation."""
        longer_s = case.inflation_s or 0.0
        return ComputationIsInflated(longer_s=longer_s, share=case.share(longer_s))
