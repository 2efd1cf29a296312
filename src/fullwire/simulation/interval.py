"""How far a predicted step may be off: by the uncertainty of the calibration, and of the steps.

The prediction is made again with every transport that fits the observations nearly as well. A
replay with each of them must also match the measured step under its own conditions. The predicted
run will be a run of its own: its line and processors differ a little from the recorded run's. The
speed of packing gradients is known from elsewhere. These deviations are independent of each other,
so their squares add up, and the interval is two standard deviations wide on each side.

Then the uncertainty of the recorded steps' median is added: steps of two kinds may have it at
either. A step is never shorter than a worker's own. An interval needs repeated steps or a measured
transport. A number from one unrepeated profile, on any other transport, has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.crew import ALONE, Crew
from fullwire.simulation.calibrate import Calibration, in_another_run, in_another_step
from fullwire.simulation.grid import Grid, Predictions, Subject, shaped
from fullwire.simulation.sweep import sweep, with_residue
from fullwire.simulation.transport import MeasuredTransport

_WIDTH = 2.0  # standard deviations
_FROM_RUN_TO_RUN = 0.01  # of the same computation on the same machine
_ENOUGH_STEPS = 3
_CODEC_SLOWER = 1.5  # times: a standard deviation of speeds that were not measured in this job


def interval_s(
    subjects: Sequence[Subject],
    grid: Grid,
    predictions: Predictions,
    calibration: Calibration | None,
    crew: Crew = ALONE,
) -> tuple[Floats, Floats]:
    """Return the least and the largest step time to be expected, for every row."""
    repeated = np.array([subject.step.count >= _ENOUGH_STEPS for subject in subjects])
    measured = np.array([isinstance(way, MeasuredTransport) for way in grid.transports])
    has_evidence = repeated[:, None] | measured[None, :]
    is_known = has_evidence.reshape(shaped(run=len(subjects), transport=len(grid.transports)))
    if not is_known.any():
        nothing = np.broadcast_to(np.nan, len(predictions))
        return nothing, nothing
    step_s = predictions.measures["step_s"]
    variance = np.square(_FROM_RUN_TO_RUN * step_s) + _of_the_codec(subjects, grid, step_s, crew)
    own_s = [subject.step.step_ns * 1e-9 for subject in subjects]  # of a worker, at the least
    if calibration is None:
        below, above = _shares_of_median(subjects)
        sooner_s, later_s = step_s * below, step_s * above
    else:
        busier = [
            replace(subject, step=in_another_step(subject.step, calibration))
            for subject in subjects
        ]
        for place, (subject, other) in enumerate(zip(subjects, busier, strict=True)):
            work_s, longer_s = subject.step.processor_ns * 1e-9, other.step.step_ns * 1e-9
            less_s = own_s[place] - _WIDTH * (longer_s - own_s[place])
            own_s[place] = max(less_s, min(own_s[place], work_s))
        # For each direction of the transport take the worse sign. Then take another run: one with a
        # slower line, and one with slower work.
        of_transport, of_run = np.zeros(step_s.shape), np.zeros(step_s.shape)
        for pair in zip(calibration.variants[::2], calibration.variants[1::2], strict=True):
            away_s = [np.abs(_with(variant, subjects, grid, crew) - step_s) for variant in pair]
            of_transport += np.square(np.maximum(*away_s))
        slower_line, slower_work = in_another_run(calibration)
        for transport, those in ((slower_line, subjects), (slower_work, busier)):
            those_s = sweep(those, _on(transport, grid), crew=crew).measures["step_s"]
            of_run += np.square(those_s - step_s)
        variance = variance + of_transport + of_run
        sooner_s, later_s = _of_the_median(subjects, grid, step_s, calibration, crew)
    half_s = np.where(is_known, _WIDTH * np.sqrt(variance), np.nan)
    by_run = shaped(run=len(subjects))
    alone_s = np.array(own_s).reshape(by_run) * (1 - _WIDTH * _FROM_RUN_TO_RUN)
    # An interval of a step that scatters a lot may be wider than the step. Times end at 0.
    low_s = np.maximum(np.maximum(step_s - half_s - sooner_s, alone_s), 0.0)
    return low_s.reshape(-1), (step_s + half_s + later_s).reshape(-1)


def _shares_of_median(subjects: Sequence[Subject]) -> tuple[Floats, Floats]:
    """Return how far below and above the measured step its median may be, as shares of it."""
    shares = []
    for step in (subject.step for subject in subjects):
        usual_ns, bounds_ns = step.measured_ns, step.measured_between_ns
        if not usual_ns or bounds_ns is None:
            shares.append((0.0, 0.0))
        else:
            shares.append((1 - bounds_ns[0] / usual_ns, bounds_ns[1] / usual_ns - 1))
    below, above = np.array(shares).T
    return below.reshape(shaped(run=len(subjects))), above.reshape(shaped(run=len(subjects)))


def _of_the_median(
    subjects: Sequence[Subject], grid: Grid, step_s: Floats, calibration: Calibration, crew: Crew
) -> tuple[Floats, Floats]:
    """Return how much shorter and longer the step is with the measured one at its bounds."""
    at_bounds_s = []
    for which, transport in enumerate(calibration.between):
        those = []
        for subject in subjects:
            step = subject.step
            if step.measured_between_ns is not None and step.measured_ns is not None:
                step = replace(step, measured_ns=step.measured_between_ns[which])
            those.append(replace(subject, step=step))
        at_bounds_s.append(_with(transport, those, grid, crew))
    low_s, high_s = np.minimum(*at_bounds_s), np.maximum(*at_bounds_s)
    return np.maximum(step_s - low_s, 0.0), np.maximum(high_s - step_s, 0.0)


def _of_the_codec(subjects: Sequence[Subject], grid: Grid, step_s: Floats, crew: Crew) -> Floats:
    """Return the variance from the speed of packing and unpacking gradients."""
    if all(codec.is_free for codec in grid.compressors):
        return np.zeros_like(step_s)
    slower = [
        replace(
            codec,
            encode_bps=codec.encode_bps / _CODEC_SLOWER,
            decode_bps=codec.decode_bps / _CODEC_SLOWER,
        )
        for codec in grid.compressors
    ]
    those_s = sweep(subjects, replace(grid, compressors=tuple(slower)), crew=crew)
    return np.square(those_s.measures["step_s"] - step_s)


def _with(
    transport: MeasuredTransport, subjects: Sequence[Subject], grid: Grid, crew: Crew
) -> Floats:
    others = [with_residue(subject, transport) for subject in subjects]
    return sweep(others, _on(transport, grid), crew=crew).measures["step_s"]


def _on(transport: MeasuredTransport, grid: Grid) -> Grid:
    transports = tuple(
        transport if isinstance(other, MeasuredTransport) else other for other in grid.transports
    )
    return replace(grid, transports=transports)
