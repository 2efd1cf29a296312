"""Each trial and its predictions: with the measured transport, and with full utilization.

The measured transport comes from one trial for each kind and dilation. A dilated trial stands for
processors that are faster by that factor. Its transport therefore does not apply to trials of
another dilation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fullwire.answers.verification import verify
from fullwire.answers.whatif import WhatIf, whatif
from fullwire.errors import FullwireError
from fullwire.importers import read
from fullwire.run.run import Run
from fullwire.studies.papers.measures import Measured
from fullwire.studies.papers.trials import Trial

FULL = "full:0.9564"  # the share that headers leave of the line: 1448/1514


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One trial's step: as measured, and as predicted from others."""

    trial: Trial
    measured_s: float
    full_s: float
    transport_s: float | None  # with the transport measured in another trial
    low_s: float | None
    high_s: float | None
    was_shown: bool

    @property
    def error(self) -> float | None:
        """The relative error of the prediction with measured transport, if there is one."""
        if self.transport_s is None or self.was_shown:
            return None
        return self.transport_s / self.measured_s - 1

    @property
    def holds(self) -> bool:
        """Whether the interval holds the measured step."""
        if self.low_s is None or self.high_s is None:
            return False
        return self.low_s <= self.measured_s <= self.high_s


def predictions(results: Sequence[Measured], runs: Mapping[str, Run]) -> list[Predicted]:
    """Predict every trial of several workers whose computation is known from another."""
    # The transport is taken from the first trial of two workers, in the order of the plan, that
    # sends uncompressed gradients.
    shown_of: dict[tuple[str, int], Trial] = {}
    for result in results:
        trial = result.trial
        if trial.workers == 2 and trial.compression == 1 and not trial.half:
            shown_of.setdefault((trial.kind, trial.dilation), trial)
    predicted = []
    for result in results:
        trial = result.trial
        base = shown_of.get((trial.kind, trial.dilation))
        if trial.workers < 2 or base is None:
            continue
        # An emulated trial's computation is its profile; a real one's is that of the same job.
        is_same_job = (trial.model, trial.batch, trial.workers) == (
            base.model,
            base.batch,
            base.workers,
        )
        if trial.kind != "emulated" and not is_same_job:
            continue
        shown = runs[base.name]
        subject = shown if trial.model == base.model else read(trial.model)
        transport_s, low_s, high_s = _with_transport(subject, trial, shown, runs[trial.name])
        predicted.append(
            Predicted(
                trial=trial,
                measured_s=result.step_s,
                full_s=float(_asked(subject, trial, FULL)["step_s"][0]),
                transport_s=transport_s,
                low_s=low_s,
                high_s=high_s,
                was_shown=trial == base,
            )
        )
    return predicted


def _with_transport(
    subject: Run, trial: Trial, shown: Run, truth: Run
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Predict a step and its interval; None if the run shows too little of its transport."""
    if trial.half:  # a hook that casts has a cost of its own, unknown to a what-if
        held = verify(shown, truth)
        return (None, None, None) if held is None else (held.predicted_s, held.low_s, held.high_s)
    try:
        answer = _asked(subject, trial, "measured", shown)
    except FullwireError:
        return None, None, None
    [low_s], [high_s] = answer.interval_s
    return float(answer["step_s"][0]), float(low_s), float(high_s)


def _asked(subject: Run, trial: Trial, transport: str, base: Run | None = None) -> WhatIf:
    return whatif(
        subject,
        workers=trial.workers,
        bandwidth=trial.rate,
        buckets=trial.buckets,
        compression=2 if trial.half else trial.compression,
        transport=transport,
        calibrate=() if base is None else base,
    )
