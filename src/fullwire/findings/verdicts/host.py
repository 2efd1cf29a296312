"""The verdict where the host is the largest loss: no device computes, communicates or loads."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.evidence.host import HostGaps, before_computing, gaps
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Colour, VerdictKind, register
from fullwire.timeline.account import Part
from fullwire.timeline.ahead import checkpoints_s, usual_ahead_s, usual_gaps


class HostIsBusy(Finding):
    """The time that the host keeps devices idle, its place in the step, and the certainty."""

    template = (
        "The host {is_sure:limits this job, not the network|is the largest loss seen here}: it "
        "takes {lost.share:.0%} of {lost.whole.named}.{where}"
    )

    lost: Amount
    is_sure: bool
    where: Finding | None


class MostlyGaps(Finding):
    """Most of the host's time lies between computations."""

    template = " {gaps}"

    gaps: HostGaps


class MostlyAhead(Finding):
    """Most of the host's time lies before the first computation."""

    template = " {ahead_s:time} of that is before the first computation, {does}."

    ahead_s: float
    does: Finding


class MostlyCheckpoints(Finding):
    """Most of the host's time writes checkpoints, while the job waits."""

    template = " {saving_s:time} of that goes to writing checkpoints."

    saving_s: float


@register
class Host(VerdictKind):
    """The host: the rest of a step."""

    key = "host"
    part = Part.HOST.key
    label = "host"
    colour = Colour("#b5afa5", "#565c62")
    lost_to = "the host, with nothing computed, communicated or loaded"
    is_of_one = True

    def says(self, case: Case) -> Finding:
        """Return the time of the host, and where in the step it lies."""
        account, parts = case.account, case.account.parts_s
        host_s, ahead_s, between = parts[Part.HOST.key], usual_ahead_s(account), gaps(account)
        saving_s = checkpoints_s(case.run, account, account.ranks)
        where: Finding | None = None
        if saving_s > host_s / 2:
            where = MostlyCheckpoints(saving_s=min(saving_s, host_s))
        elif usual_gaps(account)[0] > host_s / 2 and between is not None:
            where = MostlyGaps(gaps=between)
        elif ahead_s >= host_s / 2:
            where = MostlyAhead(ahead_s=min(ahead_s, host_s), does=before_computing(account))
        return HostIsBusy(
            lost=case.of_step(host_s),
            is_sure=not case.reaches_threshold(parts[Part.UNEXPLAINED.key]),
            where=where,
        )
