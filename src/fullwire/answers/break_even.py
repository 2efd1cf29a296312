"""Where the verdict would turn: at which line rate, and with how many workers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.findings.finding import Finding
from fullwire.findings.scaling import turning
from fullwire.simulation.forecast import Forecaster
from fullwire.simulation.sweep import sweep
from fullwire.simulation.transport import MeasuredTransport
from fullwire.words import sentence

_POINTS = 600  # rates that are looked at, two of them 1.5 % apart
_FAR = 100.0  # times slower and faster than now: beyond it nobody asks
_MOST_WORKERS = 4096
_SIZES = 100  # that are looked at first


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Where communication begins, or ceases, to cost the threshold; None where it never does."""

    bandwidth_bps: float | None
    workers: int | None
    line_takes_over_bps: float | None  # below it the line is slower than the transport
    is_limited: bool  # now
    finding: Finding

    @property
    def sentence(self) -> str:
        """Return it in words."""
        return sentence(self.finding)


def break_even(job: Forecaster, threshold: float, waited: float | None = None) -> BreakEven:
    """Find where the share of the step that communication costs crosses the threshold.

    `waited` is the share of a step that ranks waited for late ones, as an account has it.
    """
    rates_bps = np.geomspace(job.rate_bps / _FAR, job.rate_bps * _FAR, _POINTS)
    by_rate = _lost(job, bandwidth_bps=tuple(rates_bps.tolist()))
    [now] = _lost(job)
    is_limited = bool(now >= threshold)
    enough = np.flatnonzero(by_rate < threshold)
    rate_bps = float(rates_bps[enough[0]]) if len(enough) and enough[0] > 0 else None
    workers = _fewest_workers(job, threshold)
    line_bps = _line_takes_over_bps(job)
    step = job.subject.step
    is_waiting = step.waiting_ns >= threshold * (step.step_ns + step.waiting_ns)
    is_waiting &= waited is None or waited >= threshold  # else it is scatter that nobody waited for
    finding = turning(
        is_limited=is_limited,
        is_waiting=is_waiting,
        rate_bps=rate_bps,
        workers=workers,
        line_bps=line_bps,
        threshold=threshold,
    )
    return BreakEven(
        bandwidth_bps=rate_bps,
        workers=workers,
        line_takes_over_bps=line_bps,
        is_limited=is_limited,
        finding=finding,
    )


def _fewest_workers(job: Forecaster, threshold: float) -> int | None:
    """Find the smallest job that loses so much: among some sizes, then among all next to them."""
    sizes = np.unique(np.geomspace(2, _MOST_WORKERS, _SIZES).astype(np.int64))
    for _ in ("some", "all"):
        lost = np.flatnonzero(_lost(job, workers=tuple(sizes.tolist())) >= threshold)
        if not len(lost):
            return None
        fewest, below = int(sizes[lost[0]]), int(sizes[max(lost[0] - 1, 0)])
        sizes = np.arange(below, fewest + 1)
    return fewest


def _lost(job: Forecaster, **axis: object) -> Floats:
    grid = dataclasses.replace(job.grid, **axis)  # type: ignore[arg-type]  # an axis of the grid
    return np.asarray(1 - sweep([job.subject], grid)["scaling_factor"])


def _line_takes_over_bps(job: Forecaster) -> float | None:
    [transport] = job.grid.transports
    if not isinstance(transport, MeasuredTransport):
        return None
    line_bps = transport.line_limits_up_to_bps(job.workers)
    return line_bps if line_bps < _FAR * job.rate_bps else None  # so little work was not seen
