"""The last check of an answer: a number that cannot be is refused, never printed.

What a run holds may be well formed and absurd all the same: spans that end where they begin, or
clocks that went astray under load. Whatever came of that is seen here, whoever computed it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fullwire.errors import DamagedInput

_ROUNDING = 1e-6  # of 1: sums of shares are that exact
# A line rate that a run tells, and what the line carried, are off by as much in honest recordings.
_OF_A_SHARE = 0.05


def check_times(source: str, **seconds: ArrayLike | None) -> None:
    """Refuse times below 0, and those that are not finite; NaN says that nobody knows."""
    for name, value in _known(seconds):
        _refuse(source, name, value, (value < 0) | np.isinf(value), "a time of 0 s or more")


def check_steps(source: str, **seconds: ArrayLike | None) -> None:
    """Refuse steps that take no time at all, or less."""
    for name, value in _known(seconds):
        _refuse(source, name, value, ~(value > 0) | np.isinf(value), "a time above 0 s")


def check_shares(source: str, **shares: ArrayLike | None) -> None:
    """Refuse shares outside of 0 to 1."""
    for name, value in _known(shares):
        is_wrong = (value < -_ROUNDING) | (value > 1 + _OF_A_SHARE)
        _refuse(source, name, value, is_wrong, "a share of 0 to 1")


def check_scaling(source: str, workers: ArrayLike, factors: ArrayLike | None) -> None:
    """Refuse scaling factors below 0 or above the number of workers."""
    for name, value in _known({"scaling factor": factors}):
        is_wrong = (value < 0) | (value > np.maximum(workers, 1))
        _refuse(source, name, value, is_wrong, "0 up to the number of workers")


def _known(given: dict[str, Any]) -> Iterable[tuple[str, np.ndarray[Any, Any]]]:
    for name, value in given.items():
        if value is not None:
            yield name.replace("_", " "), np.atleast_1d(np.asarray(value, np.float64))


def _refuse(source: str, name: str, value: Any, is_wrong: Any, expected: str) -> None:
    wrong = np.flatnonzero(np.broadcast_to(is_wrong, value.shape))
    if len(wrong):
        raise DamagedInput(
            source,
            f"its times cannot all be true: the {name} of the answer would be "
            f"{value[wrong[0]]:.3g}, expected {expected}",
        )
