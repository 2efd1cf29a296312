"""Searches in grids: the best few rows of one, and a grid around a job to explore by hand.

For each of the best rows, the answer gives the worth of each condition. The best row gives the
largest product of workers and scaling factor: how many times faster than one worker a job gets
through its data. Rows within `NEAR` of each other count as equal. Among equals the less demanding
comes first: less bandwidth, fewer workers, more frequent synchronisation, less compression, then
the order of the values. Runs are not compared with each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fullwire.answers.believable import check_steps
from fullwire.answers.conditions import latency
from fullwire.answers.subjects import Transports, subject_of
from fullwire.collectives.cost import Floats
from fullwire.compression.compressor import Compressor
from fullwire.errors import UsageError
from fullwire.run.run import Run
from fullwire.simulation.buckets import bucket_policy
from fullwire.simulation.calibrate import PAYLOAD_SHARE
from fullwire.simulation.forecast import Forecaster
from fullwire.simulation.grid import Grid, Predictions
from fullwire.simulation.interval import interval_s
from fullwire.simulation.subject import as_recorded
from fullwire.simulation.sweep import sweep
from fullwire.simulation.transport import FullTransport, MeasuredTransport, Transport

NEAR = 0.01
_DECADES = 4
_MANTISSAS = (1.0, 1.5, 2.0, 2.5, 4.0, 5.0, 8.0)  # Rates on sale are among them.
_WORKERS = (2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 1024)
_RATIOS = (1, 2, 4, 10, 30, 100)
_GIGABYTE_BPS = 8e9
# The cost of packing and unpacking, from nothing to that of the largest 1 % on a processor.
_PACKINGS = (
    Compressor(ratio=1),
    Compressor(ratio=1, encode_bps=10 * _GIGABYTE_BPS, decode_bps=10 * _GIGABYTE_BPS),
    Compressor(ratio=1, encode_bps=_GIGABYTE_BPS, decode_bps=_GIGABYTE_BPS),
    Compressor(
        ratio=1, encode_bps=_GIGABYTE_BPS, decode_bps=10 * _GIGABYTE_BPS, combining="gather"
    ),
)
_USUAL_BPS = 10e9  # For a run without a line rate.


@dataclass(frozen=True, slots=True)
class Instead:
    """The best other value of one condition, all others unchanged, and its effect."""

    condition: str
    value: Any
    instead: Any
    change: float  # Of the speed: -0.1 is a tenth slower.


@dataclass(frozen=True, slots=True)
class Best:
    """One of the best rows of a table, by its number."""

    row: int
    speedup: float
    instead: tuple[Instead, ...]


def best(predictions: Predictions, count: int) -> tuple[Best, ...]:
    """Return the `count` best rows of each run."""
    if count < 1:
        raise UsageError(f"best: expected at least 1, got {count}")
    run = predictions.place("run")
    by_run = [np.flatnonzero(run == number) for number in range(len(predictions.axes["run"]))]
    alone_s = predictions["baseline_step_s"]
    first_s = np.array([alone_s[rows[0]] for rows in by_run])[run]
    # Where devices change, one worker is that of the first row of its run.
    speedup = predictions["workers"] * predictions["scaling_factor"] * (first_s / alone_s)
    rows = [row for rows in by_run for row in _first(predictions, speedup, rows, count)]
    return tuple(
        Best(row, float(speedup[row]), tuple(_instead(predictions, speedup, row))) for row in rows
    )


def _first(predictions: Predictions, speedup: Floats, rows: Any, count: int) -> list[int]:
    """Return the first `count` rows of a run, sorted from those that are near the best."""
    here = speedup[rows]
    least = np.partition(here, -min(count, len(here)))[-min(count, len(here))]
    rows = rows[here >= least / (1 + NEAR) ** 2]
    place = np.floor(np.log(speedup[rows].max() / speedup[rows]) / np.log1p(NEAR) + 1e-9)
    apart = predictions["accumulate"][rows] * predictions["local_steps"][rows]
    keys = (
        rows,
        predictions["compression"][rows],
        apart,
        predictions["workers"][rows],
        predictions["bandwidth_bps"][rows],
        place,
    )
    return [int(row) for row in rows[np.lexsort(keys)][:count]]


def _instead(predictions: Predictions, speedup: Floats, row: int) -> Iterator[Instead]:
    shape = tuple(len(values) for values in predictions.axes.values())
    table = np.full(shape, -np.inf)  # where no row is shown
    table.reshape(-1)[slice(None) if predictions.shown is None else predictions.shown] = speedup
    place = np.unravel_index(predictions.combination(row), shape)
    for number, (axis, values) in enumerate(predictions.axes.items()):
        if len(values) < 2 or axis == "run":
            continue
        line: Any = (*place[:number], slice(None), *place[number + 1 :])
        along = table[line]
        own = int(place[number])
        other = int(np.argmax(np.where(np.arange(len(values)) == own, -np.inf, along)))
        if np.isfinite(along[other]) and other != own:
            yield Instead(axis, values[own], values[other], float(along[other] / along[own] - 1))


# ---- the grid to explore by hand -----------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Explorer:
    """Predicted steps; their axes are transports, workers, bandwidths, packings and ratios."""

    transports: tuple[Transport, ...]
    workers: tuple[int, ...]
    bandwidth_bps: tuple[float, ...]
    packings: tuple[Compressor, ...]  # Of any ratio but 1, which needs no packing.
    ratios: tuple[float, ...]
    step_s: Floats
    half_s: Floats  # Of the interval around each; NaN without evidence.
    baseline_s: float
    recorded_workers: int | None
    recorded_bps: float | None
    measured_s: float | None  # With the recorded workers at the recorded rate.
    shares_processors: bool  # Measured on one machine; more workers would share its processors.


def explorer(run: Run, job: Forecaster | None, baseline_s: float) -> Explorer:
    """Predict a grid around a run; `job` is the run ready for predictions, if it can be.

    `baseline_s` is the T1 to which a job's scaling factors refer.
    """
    if job is not None:  # The transport of its forecasts first, then fuller ones.
        transports = tuple(dict.fromkeys((*job.grid.transports, job.full(), FullTransport())))
        base = dataclasses.replace(job.grid, transports=transports)
        subject, calibration = job.subject, job.calibration
    else:  # A run that shows no transport: a profile of one worker, or links of unknown rate.
        known = as_recorded(run)
        base = Grid(
            workers=(2,),
            bandwidth_bps=(_USUAL_BPS,) if known is None else known.bandwidth_bps,
            buckets=(bucket_policy(run.facts.buckets or "ddp"),),
            latency_s=(latency(run.facts.latency_s or 0.0),),
            transports=(FullTransport(PAYLOAD_SHARE), FullTransport()),
        )
        subject = subject_of(run.provenance.source, run, Transports([run], ()))
        calibration = None
    is_recorded, middle_bps = job is not None, base.bandwidth_bps[0]
    # Rates from some 30 times slower to 300 times faster, and the one in the middle.
    first = np.floor(np.log10(middle_bps / 30))
    decades = (10.0 ** (first + np.arange(_DECADES))).tolist()
    usual = {float(f"{scale * mantissa:.3g}") for scale in decades for mantissa in _MANTISSAS}
    rates_bps = sorted({*usual, float(10.0 ** (first + _DECADES)), middle_bps})
    grid = dataclasses.replace(
        base,
        workers=tuple(sorted({*_WORKERS, *(base.workers if is_recorded else ())})),
        bandwidth_bps=tuple(rates_bps),
        compressors=tuple(
            Compressor(ratio=1) if ratio == 1 else dataclasses.replace(packing, ratio=ratio)
            for packing in _PACKINGS
            for ratio in _RATIOS
        ),
    )
    predictions = sweep([subject], grid)
    alone_s = subject.step.alone_ns * 1e-9 if job is None else baseline_s
    check_steps(run.place, step=predictions["step_s"], step_of_one_worker=alone_s)
    low_s, high_s = interval_s([subject], grid, predictions, calibration)
    points = (grid.transports, grid.workers, grid.bandwidth_bps, _PACKINGS, _RATIOS)
    shape = tuple(len(axis) for axis in points)
    measured = [
        transport for transport in grid.transports if isinstance(transport, MeasuredTransport)
    ]
    return Explorer(
        transports=grid.transports,
        workers=grid.workers,
        bandwidth_bps=grid.bandwidth_bps,
        packings=_PACKINGS,
        ratios=_RATIOS,
        step_s=predictions["step_s"].reshape(shape),
        half_s=np.broadcast_to((high_s - low_s) / 2, len(predictions)).reshape(shape),
        baseline_s=alone_s,
        recorded_workers=base.workers[0] if is_recorded else None,
        recorded_bps=base.bandwidth_bps[0] if is_recorded else None,
        measured_s=None if job is None else job.measured_s,
        shares_processors=bool(measured) and subject.placement.shares_processors,
    )
