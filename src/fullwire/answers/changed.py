"""Where in a step do two runs differ? The accounts of both, part by part.

A change that was meant to save transfers, and saved computation, did something else.
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
from fullwire.timeline.passes import equal_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The parts of the usual step before and after, in seconds, and of equal work."""

    before: Mapping[str, float]
    after: Mapping[str, float]


def changed(before: Sequence[Opened], after: Sequence[Opened]) -> Changed | None:
    """Return the mean account of each side, or None.

    The result is None if a side lacks an account, or has one of a part of a run only.
    """
    if any(reasons(recording.run.gaps, RESTS_ON) for recording in (*before, *after)):
        return None
    try:
        of_before, of_after = equal_work(
            [recording.run for recording in before], [recording.run for recording in after]
        ).scales
        return Changed(
            before=_mean_account(before, of_before), after=_mean_account(after, of_after)
        )
    except FullwireError:  # steps alone can be compared, but have no account
        return None


def _mean_account(side: Sequence[Opened], scales: Sequence[float]) -> dict[str, float]:
    accounts = [
        account(recording.run, line_rates(recording.run), recording.parts()).parts_s
        for recording in side
    ]
    return {
        part: float(np.mean([each[part] * by for each, by in zip(accounts, scales, strict=True)]))
        for part in accounts[0]
    }
