"""The last check of an answer: an impossible number is refused, and never printed.

A run may be well formed and still absurd. Its spans may end where they begin, or its clocks may
have gone astray under load. This check finds the impossible results, in whichever part of the code
they were computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from fullwire.errors import DamagedInput, UsageError

_ROUNDING = 1e-6  # Of 1: sums of shares are that exact.
# In honest recordings, the line rate that a run states and the bytes that the line carried differ
# by up to this.
_OF_A_SHARE = 0.05
_LEAST, _MOST = np.nextafter(0, 1), np.finfo(np.float64).max

Column: TypeAlias = np.ndarray[Any, Any]
Source: TypeAlias = str | Column  # The source of all values, or of each.


def check_times(source: Source, **seconds: ArrayLike | None) -> None:
    """Refuse times below 0 and infinite times; NaN means that the time is unknown."""
    for name, value in _known(seconds):
        if not _lies_within(value, 0, _MOST):
            _refuse(source, name, value, (value < 0) | np.isinf(value), "a time of 0 s or more")


def check_steps(source: Source, **seconds: ArrayLike | None) -> None:
    """Refuse steps of no time, or of a negative time."""
    for name, value in _known(seconds):
        if not _lies_within(value, _LEAST, _MOST, or_unknown=False):
            _refuse(source, name, value, ~(value > 0) | np.isinf(value), "a time above 0 s")


def check_shares(source: Source, **shares: ArrayLike | None) -> None:
    """Refuse shares outside of 0 to 1."""
    for name, value in _known(shares):
        if not _lies_within(value, -_ROUNDING, 1 + _OF_A_SHARE):
            is_wrong = (value < -_ROUNDING) | (value > 1 + _OF_A_SHARE)
            _refuse(source, name, value, is_wrong, "a share of 0 to 1")


def check_use(source: Source, use: ArrayLike) -> None:
    """Refuse predictions that use a link for more than the whole step.

    The bytes and the step both come from the model, so a recording need not be wrong.
    """
    value = np.atleast_1d(np.asarray(use, np.float64))
    if not _lies_within(value, -_ROUNDING, 1 + _OF_A_SHARE):
        is_wrong = (value < -_ROUNDING) | (value > 1 + _OF_A_SHARE)
        for name, used in _wrong(source, value, is_wrong):
            raise UsageError(
                f"{name}: the prediction contradicts itself: its messages would need the link for "
                f"{used:.3g} times the step. The model does not fit this job under these "
                "conditions, though its recording may be true. A recording under them would tell "
                "the step"
            )


def check_scaling(source: Source, workers: ArrayLike, factors: ArrayLike | None) -> None:
    """Refuse scaling factors below 0 or above the number of workers."""
    for name, value in _known({"scaling factor": factors}):
        if not _lies_within(value, 0, 1):  # Above 1 is possible, and rare.
            is_wrong = (value < 0) | (value > np.maximum(workers, 1) + _ROUNDING)
            _refuse(source, name, value, is_wrong, "0 up to the number of workers")


def _known(given: dict[str, Any]) -> Iterable[tuple[str, Column]]:
    for name, value in given.items():
        if value is not None:
            yield name.replace("_", " "), np.atleast_1d(np.asarray(value, np.float64))


def _lies_within(value: Column, least: float, most: float, *, or_unknown: bool = True) -> bool:
    """Say whether all values lie within bounds, without a copy of them."""
    low, high = value.min(initial=least), value.max(initial=most)  # NaN if any value is NaN
    if or_unknown and np.isnan(low):
        low, high = (
            np.fmin.reduce(value, None, initial=least),
            np.fmax.reduce(value, None, initial=most),
        )
    return bool((low, high) == (least, most))


def _refuse(source: Source, name: str, value: Column, is_wrong: Any, expected: str) -> None:
    for place, wrong in _wrong(source, value, is_wrong):
        raise DamagedInput(
            place,
            f"its times cannot all be true: the {name} of the answer would be {wrong:.3g}, "
            f"expected {expected}",
        )


def _wrong(source: Source, value: Column, is_wrong: Any) -> Iterable[tuple[str, float]]:
    """Yield the wrong values, each with its source."""
    sources = np.broadcast_to(np.asarray(source, object), value.shape)
    for place in np.flatnonzero(np.broadcast_to(is_wrong, value.shape)):
        yield sources.flat[place], float(value.flat[place])
