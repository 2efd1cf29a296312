"""The host is the largest loss: nothing is computed, communicated or loaded."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.evidence.host import HostGaps, before_computing, gaps
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Colour, VerdictKind, blames, register
from fullwire.timeline.account import Part
from fullwire.timeline.ahead import usual_ahead_s, usual_gaps


class HostIsBusy(Finding):
    """How long the host keeps devices idle, where in the step, and whether it is surely that."""

    template = (
        "The host is the {is_sure:bottleneck, not the network|largest loss seen here}: nothing is "
        "computed, communicated or loaded for {lost} ({lost.share:.1%}).{where}"
    )

    lost: Amount
    is_sure: bool
    where: Finding | None


class MostlyGaps(Finding):
    """Most of it lies between computations."""

    template = " {gaps}"

    gaps: HostGaps


class MostlyAhead(Finding):
    """Most of it lies before anything is computed."""

    template = " {ahead_s:time} of that is before anything is computed, {does}."

    ahead_s: float
    does: Finding


def _says(case: Case) -> Finding:
    parts = case.account.parts_s
    return HostIsBusy(
        lost=case.of_step(parts[Part.HOST.key]),
        is_sure=not case.reaches_threshold(parts[Part.UNEXPLAINED.key]),
        where=_where(case),
    )


def _where(case: Case) -> Finding | None:
    account, host_s = case.account, case.account.parts_s[Part.HOST.key]
    if usual_gaps(account)[0] > host_s / 2 and (between := gaps(account)) is not None:
        return MostlyGaps(gaps=between)
    ahead_s = usual_ahead_s(account)
    if ahead_s < host_s / 2:
        return None
    return MostlyAhead(ahead_s=min(ahead_s, host_s), does=before_computing(account))


register(
    VerdictKind(
        key="host",
        part=Part.HOST.key,
        rule=blames(Part.HOST.key),
        says=_says,
        label="host, the rest",
        colour=Colour("#b5afa5", "#565c62"),
        lost_to="the host, with nothing computed, communicated or loaded",
        is_of_one=True,
    )
)
