"""Packing and unpacking gradients is the largest loss."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Colour, VerdictKind, register
from fullwire.timeline.account import Part


class PackingIsDear(Finding):
    """What a codec takes, and whether much else may be the network's."""

    template = (
        "Packing and unpacking gradients is the {is_sure:bottleneck, not the network|largest loss "
        "seen here}: it takes {lost} ({lost.share:.1%})."
    )

    lost: Amount
    is_sure: bool


@register
class Codec(VerdictKind):
    """Packing and unpacking."""

    key = "codec"
    part = Part.CODEC.key
    label = "packing, unpacking"
    colour = Colour("#8660a5", "#b08ed0")
    lost_to = "packing and unpacking gradients"
    is_of_one = True

    def says(self, case: Case) -> Finding:
        """Say what packing takes."""
        parts = case.account.parts_s
        is_sure = not case.reaches_threshold(parts[Part.UNEXPLAINED.key])
        return PackingIsDear(lost=case.of_step(parts[Part.CODEC.key]), is_sure=is_sure)
