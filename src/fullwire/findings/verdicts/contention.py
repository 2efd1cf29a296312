"""The job slows down its own computation: its communication and its ranks share processors."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Colour, VerdictKind, blames, register
from fullwire.timeline.account import Part


class ComputationIsCrowded(Finding):
    """What the job's own communication, and its other ranks on a host, cost computation."""

    template = (
        "The job slows down its own computation: its communication and its other ranks on the same "
        "host cost it {lost} ({lost.share:.1%})."
    )

    lost: Amount


def _says(case: Case) -> Finding:
    return ComputationIsCrowded(lost=case.of_step(case.account.parts_s[Part.CONTENTION.key]))


register(
    VerdictKind(
        key="contention",
        part=Part.CONTENTION.key,
        rule=blames(Part.CONTENTION.key),
        says=_says,
        label="contention",
        colour=Colour("#c96f9b", "#d98bb2"),
        lost_to="computation that the job itself slows down",
    )
)
