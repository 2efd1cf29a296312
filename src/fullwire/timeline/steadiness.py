"""Whether all steps are alike: what a mean step would hide.

A part that only a few steps have (a checkpoint, an evaluation) is a part of the mean step, and no
other step shows it. A job that became slower midway has two usual steps, and the mean is neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.run.centre import Centre, median_of
from fullwire.timeline.account import Account, Part
from fullwire.units import show_time

MOST_OF_IT = 0.75  # of a part: if few steps hold it, it is theirs
FEW = 0.4  # of the steps: then the median step has none of it
CHANGED = 0.10  # between the medians of the first and the second half of the steps
_SCATTERS = 3.0  # times that steps scatter within a half, which is what a change must exceed
_FEWEST_STEPS = 8


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
    is_long, count = of_part >= of_part.max() / 2, len(of_part)
    few, share = int(is_long.sum()), float(of_part[is_long].sum() / max(of_part.sum(), 1e-9))
    if count < _FEWEST_STEPS or few > FEW * count or share < MOST_OF_IT:
        return None
    long_s = float(np.median(length_s[is_long]))
    return FewSteps(few, count, share, long_s, median_of(length_s[~is_long].tolist()))


def few_steps_words(account: Account, part: Part) -> str:
    """Say which steps have a part, if few of them have most of it."""
    found = few_steps(account, part)
    if found is None:
        return ""
    verb = "takes" if found.few == 1 else "take"
    return (
        f"Of this loss {found.share:.0%} is in {found.few} of {found.of} steps, which {verb} "
        f"{show_time(found.long_s)}; the others take {show_time(found.usual_s.value)}"
    )


def change_words(account: Account) -> str:
    """Say how much slower or faster the job became midway, if it did."""
    by_step_s = _by_step_s(account)
    first, second = np.array_split(by_step_s, 2)
    if len(by_step_s) < _FEWEST_STEPS:
        return ""
    before_s, after_s = (float(np.median(half.sum(axis=1))) for half in (first, second))
    scatter_s = max(_scatter_s(half.sum(axis=1)) for half in (first, second))
    if abs(after_s - before_s) < max(CHANGED * before_s, _SCATTERS * scatter_s):
        return ""
    moved_s = np.median(second, axis=0) - np.median(first, axis=0)
    part = Part(int(np.argmax(moved_s * np.sign(after_s - before_s))))
    return (
        f"steps take {show_time(before_s)} in the first half of the run and {show_time(after_s)} "
        f"in the second, most of the difference in {part.key.replace('_', ' ')}"
    )


def _by_step_s(account: Account) -> Floats:
    """Return the parts of each usual step, as the mean rank has them."""
    return np.asarray(account.parts_ns[:, account.is_typical].mean(axis=0) * 1e-9)


def _scatter_s(lengths_s: Floats) -> float:
    return float(1.4826 * np.median(np.abs(lengths_s - np.median(lengths_s))))
