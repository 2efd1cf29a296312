"""How far a predicted step may be off: from what the calibration left open, and from the steps.

The prediction is made again with every transport that fits the observations nearly as well; each of
them, too, has to give back the measured step under the conditions in which it was measured. The
deviations are independent of each other and of how the steps vary, so their squares add up, and the
interval is two standard deviations wide on each side; but no step is shorter than a worker's own. A
number that rests on one unrepeated profile and on no measured transport has no interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fullwire.crew import ALONE, Crew
from fullwire.model.cost import Floats
from fullwire.simulation.calibrate import Calibration
from fullwire.simulation.sweep import Grid, Predictions, Subject, shaped, sweep, with_residue
from fullwire.simulation.transport import MeasuredTransport

_WIDTH = 2.0  # standard deviations
_FROM_RUN_TO_RUN = 0.01  # of the same computation on the same machine
_ENOUGH_STEPS = 3


def interval_s(
    subjects: Sequence[Subject],
    grid: Grid,
    predictions: Predictions,
    calibration: Calibration | None,
    crew: Crew = ALONE,
) -> tuple[Floats, Floats]:
    """Return the least and the largest step time to be expected, for every row."""
    is_known = _has_evidence(subjects, grid)
    if not is_known.any():
        nothing = np.broadcast_to(np.nan, len(predictions))
        return nothing, nothing
    step_s = predictions.measures["step_s"]
    of_steps = _of_the_steps(subjects)
    variance = np.square(of_steps * step_s)
    if calibration is not None:
        variance = variance + _of_the_transport(subjects, grid, step_s, calibration, crew)
    half_s = np.where(is_known, _WIDTH * np.sqrt(variance), np.nan)
    low_s = np.maximum(step_s - half_s, _alone_s(subjects) * (1 - _WIDTH * of_steps))
    return low_s.reshape(-1), (step_s + half_s).reshape(-1)


def _alone_s(subjects: Sequence[Subject]) -> Floats:
    """Return what a worker's own step takes, without any communication."""
    own_s = [each.step.step_ns * 1e-9 for each in subjects]
    return np.array(own_s).reshape(shaped(run=len(subjects)))


def _has_evidence(subjects: Sequence[Subject], grid: Grid) -> NDArray[np.bool_]:
    repeated = np.array([each.step.count >= _ENOUGH_STEPS for each in subjects])
    measured = np.array([isinstance(each, MeasuredTransport) for each in grid.transports])
    both: NDArray[np.bool_] = repeated[:, None] | measured[None, :]
    return both.reshape(shaped(run=len(subjects), transport=len(grid.transports)))


def _of_the_steps(subjects: Sequence[Subject]) -> Floats:
    """Return the standard deviation of the usual step, as a share of it."""
    steps = [each.step for each in subjects]
    shares = [
        np.hypot(_FROM_RUN_TO_RUN, 1.25 * step.deviation / np.sqrt(step.count)) for step in steps
    ]
    return np.array(shares).reshape(shaped(run=len(subjects)))


def _of_the_transport(
    subjects: Sequence[Subject], grid: Grid, step_s: Floats, calibration: Calibration, crew: Crew
) -> Floats:
    """Return the variance that comes from the transport: of its directions, the worse sign each."""
    variance = np.zeros(step_s.shape)
    for one, other in zip(calibration.variants[::2], calibration.variants[1::2], strict=True):
        away_s = [np.abs(_with(each, subjects, grid, crew) - step_s) for each in (one, other)]
        variance += np.square(np.maximum(*away_s))
    return variance


def _with(
    transport: MeasuredTransport, subjects: Sequence[Subject], grid: Grid, crew: Crew
) -> Floats:
    transports = tuple(
        transport if isinstance(each, MeasuredTransport) else each for each in grid.transports
    )
    others = [with_residue(each, transport) for each in subjects]
    return sweep(others, replace(grid, transports=transports), crew=crew).measures["step_s"]
