"""Transfers would fit under computation that they did not use: they begin too late."""

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
from fullwire.timeline.account import Account, Part


class UsedTooLate(Finding):
    """Transfers that computation could have hidden, and how much of that there is."""

    template = (
        "The network is not too slow, it is used too late: {transfers} went to transfers that "
        "would fit under {free_s:time} of computation with no communication beside it."
    )

    transfers: Amount
    free_s: float


class WouldFit(Finding):
    """The computation that had no communication beside it."""

    template = "it would fit under {free_s:time} of computation without communication"

    free_s: float


def is_used_too_late(case: Case) -> bool:
    """Say whether the bytes at line rate would fit under computation that they did not use.

    A line that is not full limits nothing; but what had next to nothing beside it was begun late
    whatever the line.
    """
    floor_s = case.account.parts_s[Part.LINE_RATE.key]
    if floor_s > unhidden_compute_s(case.account):
        return False
    return is_limited_by_line(case) or _overlapped(case.account) < LATE


def is_limited_by_line(case: Case) -> bool:
    """Say whether the line is full, or what it is not full for is little."""
    floor_s, exposed_s = (
        case.account.parts_s[Part.LINE_RATE.key],
        exposed_transfer_s(case.account),
    )
    return floor_s >= FILLED * exposed_s or not case.reaches_threshold(exposed_s - floor_s)


def _overlapped(account: Account) -> float:
    """Return the share of communication that had computation beside it."""
    hidden_s = float(account.overlapped_ns[:, account.is_typical].mean()) * 1e-9
    together_s = hidden_s + exposed_transfer_s(account)
    return hidden_s / together_s if together_s else 0.0


def _rule(case: Case, blame: Blame) -> tuple[Finding, ...] | None:
    if blame.part != Part.LINE_RATE.key or not is_used_too_late(case):
        return None
    return (*blame.reasons, WouldFit(free_s=unhidden_compute_s(case.account)))


def _says(case: Case) -> Finding:
    return UsedTooLate(
        transfers=case.of_step(case.account.parts_s[Part.LINE_RATE.key]),
        free_s=unhidden_compute_s(case.account),
    )


register(
    VerdictKind(key="overlap", part=Part.LINE_RATE.key, rule=_rule, says=_says, is_transfer=True)
)
