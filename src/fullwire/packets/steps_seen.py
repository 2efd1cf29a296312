"""Whether the iterations that packets show are the steps that a recorder counted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fullwire.packets.iterations import Iterations
from fullwire.run.run import Run
from fullwire.units import show_time

FROM_PACKETS = "its steps are iterations that packets show"


def steps_said(run: Run, iterations: Iterations | None) -> Iterator[str]:
    """Hold iterations against the steps that were recorded, where there are any."""
    if FROM_PACKETS in (run.facts.remarks or ""):
        return  # these steps are themselves what packets said
    is_step = (run.spans.lane == "host") & (run.spans.name == "step")
    if not is_step.any():
        return
    begins_ns, place = run.spans.start_ns[is_step], run.spans.step[is_step]
    steps, number = np.unique(place, return_inverse=True)
    first_ns = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(first_ns, number, begins_ns)
    recorded = f"{len(steps)} steps" + (
        f" of {show_time(float(np.median(np.diff(np.sort(first_ns)))) * 1e-9)}"
        if len(steps) > 1
        else ""
    )
    if iterations is None:
        yield f"the recorder counted {recorded}, which packets do not show"
    elif iterations.count == len(steps):
        yield f"the recorder counted {recorded}, as many as packets show"
    else:
        yield (
            f"the recorder counted {recorded}, packets show {iterations.count} iterations: "
            "steps without communication, or iterations that could not be parted"
        )
