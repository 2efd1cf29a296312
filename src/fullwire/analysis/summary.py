"""What a recorded run amounts to, in the few figures that are said when the job has ended.

Exposed communication is the time within steps when a collective was outstanding and the rank did
not compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullwire.analysis.compare import step_lengths_s
from fullwire.analysis.timeline import timelines
from fullwire.analysis.transfers import transfers_of
from fullwire.model.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures per step are means over steps and ranks; None where there is no step."""

    ranks: int
    steps: int
    step_s: float | None  # median over steps, of the slowest rank
    step_low_s: float | None  # 10th and 90th percentile
    step_high_s: float | None
    collective_bytes: float | None  # per rank and step, as the program gave them
    exposed_s: float | None


def summarised(run: Run) -> Summary:
    """Sum a run up."""
    marks = (run.spans.lane == "host") & (run.spans.name == "step")
    ranks = len(np.unique(np.concatenate([run.spans.rank, run.collectives.rank])))
    if not marks.any():
        return Summary(ranks=ranks, steps=0, step_s=None, step_low_s=None, step_high_s=None,
                       collective_bytes=None, exposed_s=None)  # fmt: skip
    lengths_s = step_lengths_s(run)
    low_s, median_s, high_s = np.quantile(lengths_s, [0.1, 0.5, 0.9]).tolist()
    rank_steps = int(marks.sum())
    in_steps = run.collectives.bytes[run.collectives.step >= 0]
    return Summary(
        ranks=ranks, steps=len(lengths_s), step_s=median_s, step_low_s=low_s, step_high_s=high_s,
        collective_bytes=float(in_steps.sum()) / rank_steps,
        exposed_s=_exposed_ns(run) * 1e-9 / rank_steps,
    )  # fmt: skip


def _exposed_ns(run: Run) -> int:
    """Return how long all ranks together communicated in their steps without computing."""
    return sum(
        line.total_ns((line.step >= 0) & line.is_communicating & ~line.is_computing)
        for line in timelines(run, transfers_of(run, {}))
    )
