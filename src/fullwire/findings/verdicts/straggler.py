"""The verdict where ranks wait for late ones: always the same few, or others each time."""

from __future__ import annotations

from enum import Enum

import numpy as np

from fullwire.findings.case import THRESHOLD, Case
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Colour, VerdictKind, register
from fullwire.timeline.account import Account, Part
from fullwire.timeline.ahead import checkpoints_s
from fullwire.timeline.late import Late, late_for_most


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


class LateInFewSteps(Finding):
    """The few ranks that cause most of the waiting, in few steps."""

    template = (
        "{ranks:Ranks} {ranks:is|are} late in few steps: the others wait {lost.share:.0%} of "
        "{lost.whole.named}, most of it for {ranks:this rank|these ranks}{spends}."
    )

    ranks: tuple[int, ...]
    lost: Amount
    spends: SpendsMore | None


class SpendsMore(Finding):
    """The extra time of late ranks, and its kind."""

    template = (
        ", which {is_one:spends|spend} {excess_s:time} more than usual "
        "{is_of_each:in each of these steps, |}in {on.value}"
        "{is_saving:, most of it writing checkpoints|}"
    )

    is_one: bool
    excess_s: float
    on: Excess
    is_of_each: bool  # of few steps; else the mean of all
    is_saving: bool


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
        lost = case.of_step(case.account.parts_s[Part.STRAGGLER.key])
        late, account = late_for_most(case.account)
        if late is None:
            return LateInTurns(lost=lost)
        spends = _spends_more(case, late, account)
        if account is not case.account:
            return LateInFewSteps(ranks=late.ranks, lost=lost, spends=spends)
        return LateRanks(ranks=late.ranks, lost=lost, of_waiting=late.share, spends=spends)


def _spends_more(case: Case, late: Late, account: Account) -> SpendsMore | None:
    """Return the kind of the late ranks' extra time, if it is much."""
    rows = [account.ranks.index(rank) for rank in late.ranks]
    excess_s = account.excess_ns[rows][:, account.is_typical].mean(axis=(0, 1)) * 1e-9
    lane = int(np.argmax(excess_s))
    more_s, on = float(excess_s[lane]), list(Excess)[lane]
    if more_s < THRESHOLD * account.step_s / 2:
        return None
    saving_s = checkpoints_s(case.run, account, late.ranks) if on == Excess.HOST else 0.0
    return SpendsMore(
        is_one=len(rows) == 1,
        excess_s=more_s,
        on=on,
        is_of_each=account is not case.account,
        is_saving=saving_s > more_s / 2,
    )
