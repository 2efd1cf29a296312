"""Predict one recorded job under changed conditions: one number at a time, with its interval.

The transport is the measured one where the run shows it. Else it is full utilization with room for
packet headers, and every forecast that rests on it says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fullwire.errors import UsageError
from fullwire.run.facts import Facts
from fullwire.run.placement import UNKNOWN_PLACEMENT
from fullwire.run.run import Run
from fullwire.run.usual import Alone
from fullwire.simulation.as_recorded import with_alone, with_residue
from fullwire.simulation.calibrate import (
    OURS_APART,
    OURS_OF_GLOOS_HOP,
    OURS_OF_GLOOS_WORK,
    PAYLOAD_SHARE,
    SHARE_OF_PAYLOAD,
    Calibration,
    calibrated,
)
from fullwire.simulation.grid import Grid, Residue, Subject
from fullwire.simulation.interval import interval_s
from fullwire.simulation.of_kinds import by_kinds
from fullwire.simulation.step import Step
from fullwire.simulation.subject import as_recorded, plain_subject
from fullwire.simulation.sweep import sweep
from fullwire.simulation.transport import FullTransport, MeasuredTransport, full_transport
from fullwire.simulation.typical import Sending

# A call of our transport takes this share of the time of one of Gloo, whose threads then wake. It
# was chosen on the gradients of validation/storms.py; its metrics judge it.
_OURS_OF_CALLS = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A predicted step."""

    step_s: float
    scaling_factor: float
    low_s: float
    high_s: float


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Forecaster:
    """A job with the conditions in which it was recorded, ready to be asked."""

    subject: Subject
    grid: Grid
    calibration: Calibration | None
    payload_share: float

    @property
    def measured_s(self) -> float:
        """Return the step as it was measured."""
        assert self.subject.step.measured_ns is not None  # forecaster() saw to it
        return self.subject.step.measured_ns * 1e-9

    @property
    def alone_s(self) -> float:
        """Return the time of the same step with one worker."""
        return self.subject.step.alone_ns * 1e-9

    @property
    def workers(self) -> int:
        """Return the workers with which it was recorded."""
        return self.grid.workers[0]

    @property
    def rate_bps(self) -> float:
        """Return the line rate at which it was recorded."""
        return self.grid.bandwidth_bps[0]

    @property
    def sums_early(self) -> bool:
        """Say whether its steps have sums that were issued before their last pass."""
        steps = [kind.step for _, kind in self.subject.kinds] or [self.subject.step]
        return any(
            step.meetings or len(step.others.of_the_last_pass().op) < len(step.others.op)
            for step in steps
        )

    def full(self) -> FullTransport:
        """Return the transport that fills the line, except for packet headers."""
        return FullTransport(self.payload_share)

    def filling(self) -> Forecaster:
        """Return the job on our own transport: a full line, as far as its processors can fill it.

        The processor time of the measured transport tells how far they can.
        """
        found = self._on(filling)
        return dataclasses.replace(
            found, subject=found.subject.with_new_step(lambda step: step.with_calls(_OURS_OF_CALLS))
        )

    def unhindered(self) -> Forecaster:
        """Return the job on a transport that fills the line, and has the same cost of a message."""
        return self._on(unhindered)

    def _on(self, other: Callable[[Calibration, float], Calibration]) -> Forecaster:
        """Return the job on another transport, or on a full one if none was measured."""
        if self.calibration is None:
            return dataclasses.replace(
                self, grid=dataclasses.replace(self.grid, transports=(self.full(),))
            )
        found = other(self.calibration, self.payload_share)
        grid = dataclasses.replace(self.grid, transports=(found.transport,))
        # The step was measured on another transport, so a replay cannot be matched to it.
        return dataclasses.replace(self.as_modelled(), grid=grid, calibration=found)

    def as_modelled(self) -> Forecaster:
        """Return the job as modelled, without the residue that matches its measured step."""
        plain = partial(dataclasses.replace, residues=(Residue(),), recorded=None)
        return dataclasses.replace(self, subject=self.subject.each(plain))

    def ask(self, *, change: Callable[[Step], Step] | None = None, **changed: Any) -> Forecast:
        """Predict the step with these axes of the grid changed, or with a change of the step."""
        subject = self.subject if change is None else self.subject.with_new_step(change)
        grid = dataclasses.replace(self.grid, **changed)
        found = sweep([subject], grid)
        lows_s, highs_s = interval_s([subject], grid, found, self.calibration)
        return Forecast(
            step_s=float(found["step_s"][0]),
            scaling_factor=float(found["scaling_factor"][0]),
            low_s=float(lows_s[0]),
            high_s=float(highs_s[0]),
        )

    def beginning_sooner(self, sooner_ns: int) -> Forecast | None:
        """Predict the step with the time before its forward pass shortened by so much."""

        def shorter_ns(step: Step) -> int:
            return min(sooner_ns, step.forward_ns, step.alone_ns)

        if shorter_ns(self.subject.step) <= 0:
            return None
        return self.ask(
            change=lambda step: dataclasses.replace(
                step,
                step_ns=step.step_ns - shorter_ns(step),
                forward_ns=step.forward_ns - shorter_ns(step),
            )
        )


def filling(calibration: Calibration, payload_share: float) -> Calibration:
    """Return our own transport on the processors on which Gloo was measured.

    Other programs on these processors stay, and so does what messages wait for them.
    """

    def ours(
        line_off: float = 0.0, work_off: float = 0.0, hop_off: float = 0.0, apart: float = 0.0
    ) -> MeasuredTransport:
        share = payload_share * SHARE_OF_PAYLOAD.off_by(line_off)
        work = calibration.transport.processor_s_per_byte * OURS_OF_GLOOS_WORK.off_by(work_off)
        hop = calibration.transport.processor_s_per_hop * OURS_OF_GLOOS_HOP.off_by(hop_off)
        return dataclasses.replace(
            calibration.transport,
            share=min(share, 1.0),
            processor_s_per_byte=work,
            processor_s_per_hop=hop,
            apart=apart,
            wait_s_per_hop=calibration.wait_s_per_hop,
            gathers_late=0.0,
        )

    # In pairs, one for each sign. The share apart has 0 in place of a negative value.
    variants = (
        ours(line_off=-1),
        ours(line_off=1),
        ours(work_off=-1),
        ours(work_off=1),
        ours(hop_off=-1),
        ours(hop_off=1),
        ours(apart=0.0),
        ours(apart=OURS_APART.value),
    )
    return dataclasses.replace(
        calibration, transport=ours(), variants=variants, between=(ours(), ours())
    )


def unhindered(calibration: Calibration, payload_share: float) -> Calibration:
    """Return a transport without work for bytes; the cost and the waits of a message stay."""
    no_work = dataclasses.replace(
        calibration.transport,
        share=payload_share,
        processor_s_per_byte=0.0,
        apart=0.0,
        wait_s_per_hop=calibration.wait_s_per_hop,
        gathers_late=0.0,
    )
    return dataclasses.replace(
        calibration, transport=no_work, variants=(), between=(no_work, no_work)
    )


def unmeasured_transport(run: Run) -> FullTransport:
    """Return the transport of a run that shows none: the share of the line that headers leave.

    A simulated run names its own transport.
    """
    played = run.facts.transport or ""
    if played.startswith("full"):
        return full_transport(played)
    return FullTransport(run.facts.payload_share or PAYLOAD_SHARE)


def forecaster(
    run: Run,
    line_rate_bps: float | None = None,
    calibrate: Sequence[Run] = (),
    *,
    alone: Alone | None = None,
) -> Forecaster | None:
    """Make a job ready to be asked; None where it had one worker or its line rate is unknown.

    Other runs of the same cluster, in `calibrate`, tell more about its transport. `alone` is T1 by
    the run's account.
    """
    if line_rate_bps is not None and run.facts.line_rate_bps is None:
        run = dataclasses.replace(run, facts=run.facts | Facts(line_rate_bps=line_rate_bps))
    grid = as_recorded(run)
    if grid is None:
        return None
    share = unmeasured_transport(run).share
    try:
        calibration = calibrated([run, *calibrate])
    except UsageError:  # it shows no transport: a simulated run, or one rank's trace
        calibration = None
    transport = FullTransport(share) if calibration is None else calibration.transport
    placement = UNKNOWN_PLACEMENT if calibration is None else calibration.placement

    def make(steps: Run, own: Alone | None, sends: Sending) -> Subject:
        subject = plain_subject(run.provenance.source, steps, placement, sends)
        if own is not None:
            subject = with_alone(subject, own, transport)
        return subject if calibration is None else with_residue(subject, transport)

    return Forecaster(
        subject=by_kinds(run, make, alone),
        grid=dataclasses.replace(grid, transports=(transport,)),
        calibration=calibration,
        payload_share=share,
    )
