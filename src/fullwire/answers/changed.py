"""Where in a step two runs differ: the accounts of both, part by part.

A change that was meant to save transfers and saved computation was something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fullwire.answers.explain import line_rates
from fullwire.answers.opening import Opened
from fullwire.errors import FullwireError
from fullwire.findings.case import RESTS_ON
from fullwire.run.gaps import reasons
from fullwire.timeline.account import account


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The parts of the mean step before and after, in seconds."""

    before: Mapping[str, float]
    after: Mapping[str, float]


def changed(before: Sequence[Opened], after: Sequence[Opened]) -> Changed | None:
    """Return the mean account of each side; None where one has none, or of a part of a run."""
    if any(reasons(each.run.gaps, RESTS_ON) for each in (*before, *after)):
        return None
    try:
        return Changed(before=_mean_account(before), after=_mean_account(after))
    except FullwireError:  # steps alone can be compared, but have no account
        return None


def _mean_account(side: Sequence[Opened]) -> dict[str, float]:
    accounts = [account(each.run, line_rates(each.run), each.parts()).parts_s for each in side]
    return {part: float(np.mean([each[part] for each in accounts])) for part in accounts[0]}
