"""The verdict where transfers would fit under computation, but begin too late."""

from __future__ import annotations

from fullwire.findings.case import (
    FILLED,
    LATE,
    Case,
    exposed_transfer_s,
    unhidden_compute_s,
)
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Blame, VerdictKind, register
from fullwire.simulation.groups import share_for_layers
from fullwire.timeline.account import Part

_MOSTLY = 0.5  # of the bytes
_NO_OTHER_LOSS = (Part.COMPUTE.key, Part.LINE_RATE.key, Part.LATENCY.key, Part.TRANSPORT.key)


class UsedTooLate(Finding):
    """The transfers that computation could have hidden, and the time of that computation."""

    template = (
        "The network is used too late: {transfers.share:.0%} of "
        "{transfers.whole.named} is transfers that would fit "
        "under {free_s:time} of computation."
    )

    transfers: Amount
    free_s: float


class WouldFit(Finding):
    """The computation that ran without communication."""

    template = "it would fit under {free_s:time} of computation without communication"

    free_s: float


def is_used_too_late(case: Case) -> bool:
    """Say whether the bytes at line rate would fit under computation that ran without them.

    As a rule, the line has to limit the transfers. If hardly any communication was overlapped, it
    began too late on any line. If a prediction gains nothing from beginning sooner, the bytes begin
    in time. A plan's step holds only what computing cannot hide, so that nothing there is late. A
    layer that is split over ranks, or a stage of a pipeline, computes only after its transfers.
    """
    account = case.account
    if case.gains_by_sooner is False or case.run.provenance.is_plan:
        return False
    if case.floor_s > unhidden_compute_s(account):
        return False
    if share_for_layers(case.run) > _MOSTLY:
        return False
    hidden_s = float(account.overlapped_ns[:, account.is_typical].mean()) * 1e-9
    together_s = hidden_s + exposed_transfer_s(account)
    return is_limited_by_line(case) or not together_s or hidden_s < LATE * together_s


def is_limited_by_line(case: Case) -> bool:
    """Say whether the line limits transfers: it is full, or its idle time is short.

    It is short below the threshold, and where some loss that is no transfer is longer.
    """
    exposed_s, parts = exposed_transfer_s(case.account), case.account.parts_s
    unfilled_s = exposed_s - case.floor_s
    others_s = max(time_s for part, time_s in parts.items() if part not in _NO_OTHER_LOSS)
    others_s = max(others_s, case.account.inside_s)
    is_short = not case.reaches_threshold(unfilled_s) or unfilled_s < others_s
    return case.floor_s >= FILLED * exposed_s or is_short


@register
class Overlap(VerdictKind):
    """Transfers that begin too late."""

    key = "overlap"
    meaning = "The verdict where transfers would fit under computation, but begin too late."
    part = Part.LINE_RATE.key
    is_transfer = True

    def rule(self, case: Case, blame: Blame) -> tuple[Finding, ...] | None:
        """Hold where the transfers would fit under computation that ran without them."""
        if blame.part != Part.LINE_RATE.key or not is_used_too_late(case):
            return None
        return (*blame.reasons, WouldFit(free_s=unhidden_compute_s(case.account)))

    def says(self, case: Case) -> Finding:
        """Return the transfers that computation could have hidden."""
        return UsedTooLate(
            transfers=case.of_step(case.account.parts_s[Part.LINE_RATE.key]),
            free_s=unhidden_compute_s(case.account),
        )
