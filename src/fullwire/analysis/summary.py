"""What a recorded run amounts to, in the few figures that are said when the job has ended.

Exposed communication is the time within steps when a collective was outstanding and the rank had no
computation to run: outside its compute spans, or inside one but blocked on a collective.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullwire.analysis.compare import step_lengths_s
from fullwire.model.run import Run, Whole


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
        exposed_s=sum(_exposed_ns(run, rank) for rank in np.unique(run.spans.rank)) * 1e-9
        / rank_steps,
    )  # fmt: skip


def _exposed_ns(run: Run, rank: int) -> int:
    """Return how long a rank had communication outstanding in its steps, and nothing to compute."""
    spans = run.spans.rows(run.spans.rank == rank)
    outstanding = run.collectives.rows(run.collectives.rank == rank)
    is_wait = (spans.lane == "communication") & (spans.name == "wait")
    masks = {
        "step": (spans.lane == "host") & (spans.name == "step"),
        "compute": spans.lane == "compute",
        "wait": is_wait,
    }
    chosen = {name: (spans.start_ns[mask], spans.end_ns[mask]) for name, mask in masks.items()}
    chosen["collective"] = (outstanding.issue_ns, outstanding.end_ns)
    moments = np.unique(np.concatenate([times for pair in chosen.values() for times in pair]))
    covered = {name: _covers(moments, *pair) for name, pair in chosen.items()}
    is_computing = covered["compute"] & ~covered["wait"]
    exposed = covered["step"] & covered["collective"] & ~is_computing
    return int((np.diff(moments) * exposed[:-1]).sum())


def _covers(
    moments: Whole, start_ns: Whole, end_ns: Whole
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Say for each moment whether an interval covers the time from it to the next one."""
    change = np.zeros(len(moments), np.int64)
    np.add.at(change, np.searchsorted(moments, start_ns), 1)
    np.add.at(change, np.searchsorted(moments, end_ns), -1)
    return np.asarray(np.cumsum(change) > 0)
