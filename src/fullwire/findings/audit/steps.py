"""The iterations that packets show, compared with the steps that a recorder counted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fullwire.findings.audit import Line
from fullwire.findings.finding import Finding
from fullwire.packets.iterations import Iterations
from fullwire.packets.wire_steps import FROM_PACKETS
from fullwire.run.run import Run

_COUNTED = "the recorder counted {steps} steps{usual_s:? of {usual_s:time}}"


class StepsUnseen(Finding):
    """The packets show no iterations."""

    template = f"{_COUNTED}, which packets do not show"

    steps: int
    usual_s: float | None


class StepsAgree(Finding):
    """The packets show as many iterations as the recorder has steps."""

    template = f"{_COUNTED}, as many as packets show"

    steps: int
    usual_s: float | None


class StepsDiffer(Finding):
    """The packets show more or fewer iterations than the recorder has steps."""

    template = (
        f"{_COUNTED}, packets show {{iterations}} iterations: steps without communication, or "
        "iterations that look like one"
    )

    steps: int
    usual_s: float | None
    iterations: int


def steps_against(run: Run, iterations: Iterations | None) -> Iterator[Finding]:
    """Compare iterations with the recorded steps, if there are any."""
    if FROM_PACKETS in (run.facts.remarks or ""):
        return  # These steps came from the packets themselves.
    is_step = (run.spans.lane == "host") & (run.spans.name == "step")
    if not is_step.any():
        return
    begins_ns, place = run.spans.start_ns[is_step], run.spans.step[is_step]
    steps, number = np.unique(place, return_inverse=True)
    first_ns = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(first_ns, number, begins_ns)
    usual_s = float(np.median(np.diff(np.sort(first_ns)))) * 1e-9 if len(steps) > 1 else None
    if iterations is None:
        yield StepsUnseen(steps=len(steps), usual_s=usual_s)
    elif iterations.count == len(steps):
        yield StepsAgree(steps=len(steps), usual_s=usual_s)
    else:
        yield StepsDiffer(steps=len(steps), usual_s=usual_s, iterations=iterations.count)


LINE = Line(
    key="steps",
    place=7,
    of=lambda traffic: steps_against(traffic.detail.run, traffic.iterations),
    is_of_one_training=True,
)
