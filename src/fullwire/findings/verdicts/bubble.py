"""The verdict where stages of a pipeline wait for each other."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Colour, VerdictKind, register
from fullwire.timeline.account import Part


class StagesWait(Finding):
    """The bubble of the pipeline: the time in which stages have nothing to compute."""

    template = (
        "The pipeline's bubble limits this job: stages wait {lost.share:.0%} of "
        "{lost.whole.named} for each other. More microbatches, or stages in chunks, shorten it."
    )

    lost: Amount


@register
class Bubble(VerdictKind):
    """The bubble of a pipeline."""

    key = "bubble"
    part = Part.BUBBLE.key
    label = "bubble"
    heading = "waiting for other stages"
    colour = Colour("#b5651d", "#d39a5f")
    lost_to = "stages of the pipeline that wait for each other"
    within = "the pipeline's bubble"
    needs_clocks = True

    def says(self, case: Case) -> Finding:
        """Return the time that stages wait."""
        return StagesWait(lost=case.of_step(case.account.parts_s[Part.BUBBLE.key]))
