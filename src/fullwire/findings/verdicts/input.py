"""The verdict where waiting for data is the largest loss."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Colour, VerdictKind, register
from fullwire.timeline.account import Part


class DataIsLate(Finding):
    """The time that ranks wait for data, and whether the network may cost much too."""

    template = (
        "The input {is_sure:limits this job, not the network|is the largest loss seen here}: "
        "ranks wait for data for {lost.share:.0%} of {lost.whole.named}."
    )

    lost: Amount
    is_sure: bool


@register
class Input(VerdictKind):
    """Ranks wait for data."""

    key = "input"
    part = Part.INPUT.key
    label = "input"
    colour = Colour("#2b8a66", "#53b590")
    lost_to = "waiting for data"
    is_of_one = True

    def says(self, case: Case) -> Finding:
        """Return the time that ranks wait for data."""
        parts = case.account.parts_s
        is_sure = not case.reaches_threshold(parts[Part.UNEXPLAINED.key])
        return DataIsLate(lost=case.of_step(parts[Part.INPUT.key]), is_sure=is_sure)
