"""Packing and unpacking gradients is the largest loss."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Colour, VerdictKind, blames, register
from fullwire.timeline.account import Part


class PackingIsDear(Finding):
    """What a codec takes, and whether much else may be the network's."""

    template = (
        "Packing and unpacking gradients is the {is_sure:bottleneck, not the network|largest loss "
        "seen here}: it takes {lost} ({lost.share:.1%})."
    )

    lost: Amount
    is_sure: bool


def _says(case: Case) -> Finding:
    parts = case.account.parts_s
    is_sure = not case.reaches_threshold(parts[Part.UNEXPLAINED.key])
    return PackingIsDear(lost=case.of_step(parts[Part.CODEC.key]), is_sure=is_sure)


register(
    VerdictKind(
        key="codec",
        part=Part.CODEC.key,
        rule=blames(Part.CODEC.key),
        says=_says,
        label="packing, unpacking",
        colour=Colour("#8660a5", "#b08ed0"),
        lost_to="packing and unpacking gradients",
        is_of_one=True,
    )
)
