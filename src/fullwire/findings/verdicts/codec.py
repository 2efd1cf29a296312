"""The verdict where packing and unpacking gradients is the largest loss."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Colour, VerdictKind, register
from fullwire.timeline.account import Part


class PackingIsDear(Finding):
    """The time that the codec takes, and whether the network may cost much too."""

    template = (
        "Packing gradients {is_sure:limits this job, not the network|is the largest loss seen "
        "here}: it costs {lost.share:.0%} of {lost.whole.named}."
    )

    lost: Amount
    is_sure: bool


@register
class Codec(VerdictKind):
    """The codec packs and unpacks gradients."""

    key = "codec"
    part = Part.CODEC.key
    label = "codec"
    colour = Colour("#8660a5", "#b08ed0")
    lost_to = "packing and unpacking gradients"
    is_of_one = True

    def says(self, case: Case) -> Finding:
        """Return the time that the codec takes."""
        parts = case.account.parts_s
        is_sure = not case.reaches_threshold(parts[Part.UNEXPLAINED.key])
        return PackingIsDear(lost=case.of_step(parts[Part.CODEC.key]), is_sure=is_sure)
