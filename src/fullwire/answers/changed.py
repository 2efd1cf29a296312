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
from fullwire.timeline.passes import passes_of_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The parts of the usual step before and after, in seconds; of one pass, if passes differ."""

    before: Mapping[str, float]
    after: Mapping[str, float]


def changed(before: Sequence[Opened], after: Sequence[Opened]) -> Changed | None:
    """Return the mean account of each side, or None.

    The result is None if a side lacks an account, or has one of a part of a run only.
    """
    if any(reasons(recording.run.gaps, RESTS_ON) for recording in (*before, *after)):
        return None
    try:
        is_of_pass = (
            len({passes_of_step(recording.run) for recording in (*before, *after)} - {None}) > 1
        )
        return Changed(
            before=_mean_account(before, of_pass=is_of_pass),
            after=_mean_account(after, of_pass=is_of_pass),
        )
    except FullwireError:  # steps alone can be compared, but have no account
        return None


def _mean_account(side: Sequence[Opened], *, of_pass: bool) -> dict[str, float]:
    accounts = [
        account(recording.run, line_rates(recording.run), recording.parts()).parts_s
        for recording in side
    ]
    passes = [(passes_of_step(recording.run) or 1) if of_pass else 1 for recording in side]
    return {
        part: float(
            np.mean([each[part] / count for each, count in zip(accounts, passes, strict=True)])
        )
        for part in accounts[0]
    }
