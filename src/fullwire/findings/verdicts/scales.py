"""The verdict where no part reaches the threshold: the job scales, or loses a little everywhere."""

from __future__ import annotations

from fullwire.findings.case import MUCH_IN_ALL, Case, lacks_ranks
from fullwire.findings.finding import Amount, Finding, Length
from fullwire.findings.verdicts import NOTHING, VerdictKind, drawn_parts, register
from fullwire.timeline.account import Part
from fullwire.timeline.transfers import recorded_ranks, world


class ThisJobScales(Finding):
    """All ranks are in the run, and lose little."""

    template = "This job scales"


class SeenRanksLoseLittle(Finding):
    """Some ranks are missing, so the job may scale or not: the others lose little."""

    template = "As far as {recorded} of {workers} ranks can show, this job scales"

    recorded: int
    workers: int


class AllIsComputation(Finding):
    """All of the step is computation."""

    template = "{says}: all of {whole.is_whole_trace:the trace|its step} is computation."

    says: Finding
    whole: Length


class LittleIsLost(Finding):
    """The losses are small, each below the threshold."""

    template = (
        "{says}: {lost.share:.1%} of {lost.whole.named} "
        "is not computation, and the largest part of that, {part}, is {share:.1%}."
    )

    says: Finding
    lost: Amount
    part: str
    share: float


class MuchIsLostInAll(Finding):
    """Each loss is below the threshold, but their sum is large."""

    template = (
        "Many small losses limit this job: together {lost.share:.0%} of {lost.whole.named}. The "
        "largest, {part}, is {share:.1%}."
    )

    lost: Amount
    part: str
    share: float


@register
class Scales(VerdictKind):
    """No loss reaches the threshold."""

    key = "scales"
    meaning = "The verdict where no part reaches 10 % of the step."
    part = NOTHING

    def says(self, case: Case) -> Finding:
        """Return the sum of the losses, and the largest of them."""
        key, next_s = case.largest()
        says: Finding = ThisJobScales()
        if lacks_ranks(case):
            recorded = len(recorded_ranks(case.run))
            says = SeenRanksLoseLittle(recorded=recorded, workers=world(case.run))
        if not next_s:
            return AllIsComputation(says=says, whole=case.whole)
        lost = case.of_step(case.step_s - case.account.parts_s[Part.COMPUTE.key])
        part, share = drawn_parts()[key].within or key, case.share(next_s)
        if lost.time_s < MUCH_IN_ALL * case.step_s:
            return LittleIsLost(says=says, lost=lost, part=part, share=share)
        return MuchIsLostInAll(lost=lost, part=part, share=share)
