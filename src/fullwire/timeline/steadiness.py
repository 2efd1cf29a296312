"""Whether all steps are alike: the differences that one step would hide.

The usual step lacks a part that only a few steps have, such as a checkpoint. A job that became
slower midway has two usual steps, and their mean is neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.run.centre import Centre, median_of
from fullwire.run.usual import rows_of_rounds
from fullwire.timeline.account import Account, Part

MOST_OF_IT = 0.75  # of a part: if few steps hold as much, the part belongs to them
FEW = 0.4  # of the steps: then the usual step lacks the part
CHANGED = 0.10  # between the medians of the first and the second half of the steps
_SCATTERS = 3.0  # times the scatter of steps within a half; a change must exceed that
_FEWEST_STEPS = 8  # or rounds of steps
_MIX_MOVED = 0.4  # of the steps; halves of three blocks by turns have shares that differ by 1/3


@dataclass(frozen=True, slots=True)
class FewSteps:
    """The few steps that have most of a part, and how long they and the others take."""

    few: int
    of: int
    share: float  # of the part
    long_s: float
    usual_s: Centre  # of the others


def few_steps(account: Account, part: Part) -> FewSteps | None:
    """Find the steps that have a part, if few of them have most of it."""
    by_step_s = _by_step_s(account)
    of_part, length_s = by_step_s[:, part], by_step_s.sum(axis=1)
    is_long, count = _have_much(of_part), len(of_part)
    few, share = int(is_long.sum()), float(of_part[is_long].sum() / max(of_part.sum(), 1e-9))
    if count < _FEWEST_STEPS or few > FEW * count or share < MOST_OF_IT:
        return None
    long_s = float(np.median(length_s[is_long]))
    return FewSteps(few, count, share, long_s, median_of(length_s[~is_long].tolist()))


def of_few_steps(account: Account, part: Part) -> Account:
    """Return the account of the few steps that have most of a part, or as it is without such."""
    if few_steps(account, part) is None:
        return account
    is_long = account.is_kept.copy()
    is_long[account.is_kept] = _have_much(_by_step_s(account)[:, part])
    return replace(account, is_typical=is_long)


def _have_much(of_part: Floats) -> NDArray[np.bool_]:
    return np.asarray(of_part >= of_part.max() / 2)


def judged_account(account: Account, least: float) -> Account:
    """Return the account that a verdict is of.

    It is that of all steps, where few of them hold the largest loss and this is at least such a
    share of the time. The usual step would hide it, unless these steps are a kind of their own.
    """
    whole = account.over_all()
    lost_s = {part: whole.parts_s[part.key] for part in Part if part != Part.COMPUTE}
    part = max(lost_s, key=lost_s.__getitem__)
    is_rare = lost_s[part] >= least * whole.step_s > 0 and few_steps(whole, part) is not None
    has_kinds = account.kinds.kinds or account.kinds.every > 1
    is_usual = has_kinds and account.parts_s[part.key] >= MOST_OF_IT * lost_s[part]
    return whole if is_rare and not is_usual else account


@dataclass(frozen=True, slots=True)
class Change:
    """How long steps take in the first and in the second half of a run, and in which part."""

    before_s: float
    after_s: float
    part: Part


def changed_midway(account: Account) -> Change | None:
    """Return the change, if the job became slower or faster midway, else None.

    Steps that take turns are no change. Each step is held against its own kind, unless one half
    has many more of a kind than the other has. Rounds of steps are compared as wholes where they
    are enough, and else each step with those at its place in a round.
    """
    by_step_s, kinds = _by_step_s(account), account.kinds
    numbers = account.steps[account.is_kept]
    rounds = rows_of_rounds(kinds.rounds, numbers)
    if len(rounds) >= _FEWEST_STEPS:
        by_step_s = by_step_s[rounds].mean(axis=1)
    elif len(rounds):
        of_rounds_s = by_step_s[rounds]
        of_rounds_s = of_rounds_s - of_rounds_s.mean(axis=0) + of_rounds_s.mean(axis=(0, 1))
        by_step_s = of_rounds_s.reshape(-1, len(Part))
    elif kinds.kinds:
        halves = np.array_split(kinds.of(numbers), 2)
        shares = [[np.mean(half == at) for half in halves] for at in range(len(kinds.kinds))]
        if np.abs(np.diff(shares)).max() <= _MIX_MOVED:
            is_usual = account.is_typical[account.is_kept]
            usual_s = by_step_s[is_usual].mean(axis=0)
            by_step_s = by_step_s - kinds.expected(numbers, is_usual, by_step_s) + usual_s
    first, second = np.array_split(by_step_s, 2)
    if len(by_step_s) < _FEWEST_STEPS:
        return None
    halves_s = [half.sum(axis=1) for half in (first, second)]
    before_s, after_s = (float(np.median(half_s)) for half_s in halves_s)
    scatter_s = max(
        1.4826 * float(np.median(np.abs(half_s - np.median(half_s)))) for half_s in halves_s
    )
    if abs(after_s - before_s) < max(CHANGED * before_s, _SCATTERS * scatter_s):
        return None
    moved_s = np.median(second, axis=0) - np.median(first, axis=0)
    part = Part(int(np.argmax(moved_s * np.sign(after_s - before_s))))
    return Change(before_s, after_s, part)


def _by_step_s(account: Account) -> Floats:
    """Return the parts of each kept step, as the mean rank has them."""
    return np.asarray(account.parts_ns[:, account.is_kept].mean(axis=0) * 1e-9)
