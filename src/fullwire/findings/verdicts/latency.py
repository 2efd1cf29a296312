"""The verdict where the fixed cost of messages is the largest loss: many small collectives."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Colour, VerdictKind, register
from fullwire.timeline.account import Part


class TooManyMessages(Finding):
    """The cost of the messages of a step, which is independent of their bytes."""

    template = (
        "Too many small collectives limit this job: {lost.share:.0%} of "
        "{lost.whole.named} is the fixed cost of messages, with "
        "{collectives:,.0f} {collectives:collective|collectives} in a step."
    )

    lost: Amount
    collectives: float


@register
class Latency(VerdictKind):
    """The fixed cost of messages."""

    key = "latency"
    part = Part.LATENCY.key
    label = "latency"
    colour = Colour("#5aa9cf", "#2f7fa6")
    lost_to = "the fixed cost of messages"
    is_transfer = True
    needs_clocks = True

    def says(self, case: Case) -> Finding:
        """Return the cost of the messages, and the number of collectives."""
        lost = case.of_step(case.account.parts_s[Part.LATENCY.key])
        return TooManyMessages(lost=lost, collectives=case.collectives_per_step)
