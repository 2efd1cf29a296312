"""The verdict where ranks wait for late ones: always the same few, or others each time."""

from __future__ import annotations

from enum import Enum

import numpy as np

from fullwire.findings.case import THRESHOLD, Case
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Colour, VerdictKind, register
from fullwire.timeline.account import Part
from fullwire.timeline.late import late_ranks


class Excess(Enum):
    """The kinds of time that a late rank spends more of, in the order of the account's excess."""

    COMPUTATION = "computation"
    INPUT = "waiting for input"
    HOST = "the host's work between"


class LateInTurns(Finding):
    """The waiting has many causes: no small group of ranks explains most of it."""

    template = (
        "Ranks wait for each other, now one and now another: {lost.share:.0%} of "
        "{lost.whole.named} is lost to it."
    )

    lost: Amount


class LateRanks(Finding):
    """The few ranks that cause most of the waiting."""

    template = (
        "{ranks:Ranks} {ranks:is|are} late: the others wait {lost.share:.0%} of "
        "{lost.whole.named}, {of_waiting:.0%} of it for "
        "{ranks:this rank|these ranks}{spends}."
    )

    ranks: tuple[int, ...]
    lost: Amount
    of_waiting: float
    spends: SpendsMore | None


class SpendsMore(Finding):
    """The extra time of late ranks, and its kind."""

    template = ", which {is_one:spends|spend} {excess_s:time} more than usual in {on.value}"

    is_one: bool
    excess_s: float
    on: Excess


@register
class Straggler(VerdictKind):
    """Ranks that are late."""

    key = "straggler"
    part = Part.STRAGGLER.key
    label = "straggler"
    heading = "waiting"
    colour = Colour("#d0900f", "#e2aa45")
    lost_to = "waiting for late ranks, now one and now another"
    within = "waiting for late ranks"
    needs_clocks = True

    def says(self, case: Case) -> Finding:
        """Return the late ranks, if they are few, and the kind of their extra time."""
        lost, late = (
            case.of_step(case.account.parts_s[Part.STRAGGLER.key]),
            late_ranks(case.account),
        )
        if late is None:
            return LateInTurns(lost=lost)
        rows = [case.account.ranks.index(rank) for rank in late.ranks]
        excess_ns = case.account.excess_ns[rows][:, case.account.is_typical]
        excess_s = excess_ns.mean(axis=(0, 1)) * 1e-9
        lane, is_one = int(np.argmax(excess_s)), len(rows) == 1
        more_s, on = float(excess_s[lane]), list(Excess)[lane]
        spends = None
        if more_s >= THRESHOLD * case.step_s / 2:
            spends = SpendsMore(is_one=is_one, excess_s=more_s, on=on)
        return LateRanks(ranks=late.ranks, lost=lost, of_waiting=late.share, spends=spends)
