"""A grid of predictions around a job, close enough together to be looked through by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from fullwire.answers.conditions import latency
from fullwire.answers.subjects import Transports, subject_of
from fullwire.collectives.cost import Floats
from fullwire.compression.compressor import Compressor
from fullwire.run.run import Run
from fullwire.simulation.buckets import bucket_policy
from fullwire.simulation.calibrate import PAYLOAD_SHARE, Calibration
from fullwire.simulation.forecast import Forecaster
from fullwire.simulation.grid import Grid, Subject
from fullwire.simulation.interval import interval_s
from fullwire.simulation.subject import as_recorded
from fullwire.simulation.sweep import sweep
from fullwire.simulation.transport import FullTransport, MeasuredTransport, Transport

_DECADES = 4
_MANTISSAS = (1.0, 1.5, 2.0, 2.5, 4.0, 5.0, 8.0)  # rates on sale are among them
_WORKERS = (2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 1024)
_RATIOS = (1, 2, 4, 10, 30, 100)
_GIGABYTE_BPS = 8e9
# What packing and unpacking cost, from nothing to what a processor makes of the largest 1 %.
_PACKINGS = (
    Compressor(ratio=1),
    Compressor(ratio=1, encode_bps=10 * _GIGABYTE_BPS, decode_bps=10 * _GIGABYTE_BPS),
    Compressor(ratio=1, encode_bps=_GIGABYTE_BPS, decode_bps=_GIGABYTE_BPS),
    Compressor(
        ratio=1, encode_bps=_GIGABYTE_BPS, decode_bps=10 * _GIGABYTE_BPS, combining="gather"
    ),
)
_USUAL_BPS = 10e9  # where a run does not say its line rate


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Explorer:
    """Predicted steps; their axes are transports, workers, bandwidths, packings and ratios."""

    transports: tuple[Transport, ...]
    workers: tuple[int, ...]
    bandwidth_bps: tuple[float, ...]
    packings: tuple[Compressor, ...]  # of any ratio but 1, which needs none
    ratios: tuple[float, ...]
    step_s: Floats
    half_s: Floats  # of the interval around each; not a number where there is no evidence for one
    baseline_s: float
    recorded_workers: int | None
    recorded_bps: float | None
    measured_s: float | None  # with these workers at this rate
    shares_processors: bool  # which machines of more workers do as well


def explorer(run: Run, job: Forecaster | None, baseline_s: float) -> Explorer:
    """Predict a grid around a run; `job` is the run ready to be asked, where it can be.

    `baseline_s` is the T1 that a job's scaling factors are held against.
    """
    subject, base, calibration = _of_the_run(run) if job is None else _as_asked(job)
    is_recorded = job is not None
    grid = dataclasses.replace(
        base,
        workers=tuple(sorted({*_WORKERS, *(base.workers if is_recorded else ())})),
        bandwidth_bps=_rates_bps(base.bandwidth_bps[0]),
        compressors=tuple(
            Compressor(ratio=1) if each == 1 else dataclasses.replace(packing, ratio=each)
            for packing in _PACKINGS
            for each in _RATIOS
        ),
    )
    found = sweep([subject], grid)
    low_s, high_s = interval_s([subject], grid, found, calibration)
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
        step_s=found["step_s"].reshape(shape),
        half_s=np.broadcast_to((high_s - low_s) / 2, len(found)).reshape(shape),
        baseline_s=subject.step.step_ns * 1e-9 if job is None else baseline_s,
        recorded_workers=base.workers[0] if is_recorded else None,
        recorded_bps=base.bandwidth_bps[0] if is_recorded else None,
        measured_s=None if job is None else job.measured_s,
        shares_processors=any(each.machines == 1 for each in measured),
    )


def _as_asked(job: Forecaster) -> tuple[Subject, Grid, Calibration | None]:
    """Take the transport that forecasts of this job rest on first, then fuller ones."""
    transports = dict.fromkeys((*job.grid.transports, job.full(), FullTransport()))
    return job.subject, dataclasses.replace(job.grid, transports=tuple(transports)), job.calibration


def _of_the_run(run: Run) -> tuple[Subject, Grid, Calibration | None]:
    """Take a run that shows no transport: a profile of one worker, or links of unknown rate."""
    known = as_recorded(run)
    base = Grid(
        workers=(2,),
        bandwidth_bps=(_USUAL_BPS,) if known is None else known.bandwidth_bps,
        buckets=(bucket_policy(run.facts.buckets or "ddp"),),
        latency_s=(latency(run.facts.latency_s or 0.0),),
        transports=(FullTransport(PAYLOAD_SHARE), FullTransport()),
    )
    return subject_of(run.provenance.source, run, Transports([run], ())), base, None


def _rates_bps(middle_bps: float) -> tuple[float, ...]:
    """Return rates from some 30 times slower to 300 times faster, and the one in the middle."""
    first = np.floor(np.log10(middle_bps / 30))
    decades = 10.0 ** (first + np.arange(_DECADES))
    usual = {float(f"{scale * each:.3g}") for scale in decades.tolist() for each in _MANTISSAS}
    return tuple(sorted({*usual, float(10.0 ** (first + _DECADES)), middle_bps}))
