"""The ranks that cause most of the waiting in an account."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fullwire.timeline.account import Account, Part
from fullwire.timeline.steadiness import few_steps, of_few_steps

CULPRIT = 0.5  # of all waiting; ranks that cause more are named, if they are at most half of all
_OFTEN = 0.75  # of the steps; so often each of several ranks has to be among the latest


@dataclass(frozen=True, slots=True)
class Late:
    """The ranks that cause most of the waiting, and their share of it."""

    ranks: tuple[int, ...]
    share: float

    @property
    def it(self) -> str:
        """Return the pronoun for them."""
        return "it" if len(self.ranks) == 1 else "them"


def late_ranks(account: Account) -> Late | None:
    """Return the ranks that cause most of the waiting, if they are few and mostly the same."""
    by_step_ns = account.caused_ns[:, account.is_typical]
    caused_ns = by_step_ns.sum(axis=1)
    if not caused_ns.sum():
        return None
    rows = np.flatnonzero(caused_ns >= caused_ns.max() / 2)
    count, total = len(rows), len(caused_ns)
    share = float(caused_ns[rows].sum() / caused_ns.sum())
    # Of two ranks, one causes at least half by chance alone, and so do any two of four.
    is_much = share > max(CULPRIT, 1.5 * count / total) and count <= total / 2
    if not is_much:
        return None
    if count > 1:  # in most steps each of them has to cause at least half as much as the worst
        most_ns = by_step_ns.max(axis=0)
        is_among = by_step_ns[rows] >= most_ns / 2
        if not (is_among[:, most_ns > 0].mean(axis=1) >= _OFTEN).all():
            return None
    return Late(tuple(account.ranks[row] for row in rows.tolist()), share)


def late_for_most(account: Account) -> tuple[Late | None, Account]:
    """Return the ranks that cause most of the waiting, with the account in which they do.

    Where few steps have most of it, these tell, in an account of all steps. In all others, ranks
    that are a little late by turns also let each other wait beside their computing, and that costs
    nothing.
    """
    late = late_ranks(account)
    if late is not None or not account.is_over_all:
        return late, account
    few = few_steps(account, Part.STRAGGLER)
    if few is not None:
        of_few = of_few_steps(account, Part.STRAGGLER)
        then = late_ranks(of_few)
        if then is not None and few.share * then.share > CULPRIT:
            return replace(then, share=few.share * then.share), of_few
    return None, account


def names_others_later(account: Account) -> bool:
    """Return whether the first and the second half of the usual steps name other late ranks.

    Then another recording of the same job may name others, too.
    """
    usual = np.flatnonzero(account.is_typical)
    places = np.arange(len(account.is_typical))
    found = [
        late_ranks(replace(account, is_typical=np.isin(places, half)))
        for half in np.array_split(usual, 2)
    ]
    first, second = (late and late.ranks for late in found)
    return len(usual) > 1 and first != second
