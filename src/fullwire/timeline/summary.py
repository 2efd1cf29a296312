"""What a recorded run amounts to, in the few figures that are said when the job has ended.

Exposed communication is the time within steps when a collective was outstanding and the rank did
not compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fullwire.run.run import Run
from fullwire.timeline.timeline import timelines
from fullwire.timeline.transfers import transfers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures per step are means over steps and ranks; None where there is no step."""

    ranks: int
    steps: int
    step_s: float | None  # median over steps, of the slowest rank
    step_low_s: float | None  # 10th and 90th percentile
    step_high_s: float | None
    mean_step_s: float | None
    collective_bytes: float | None  # per rank and step, as the program gave them
    exposed_s: float | None


def summarised(parts: Iterable[Run]) -> Summary:
    """Sum a run up, of which each part holds whole steps; one part may be all of it."""
    sums = _Sums()
    for part in parts:
        sums.add(part)
    return sums.summary()


class _Sums:
    """What is known of the parts so far."""

    def __init__(self) -> None:
        self._ranks: set[int] = set()
        self._longest_ns = np.zeros(0, np.int64)  # by step
        self._rank_steps = self._steps_ns = self._bytes = self._exposed_ns = 0

    def add(self, part: Run) -> None:
        ranks = np.unique(np.concatenate([part.spans.rank, part.collectives.rank])).tolist()
        self._ranks |= set(ranks)
        marks = part.spans.rows((part.spans.lane == "host") & (part.spans.name == "step"))
        lengths_ns = marks.end_ns - marks.start_ns
        longest_ns = np.zeros(max(len(self._longest_ns), marks.step.max(initial=-1) + 1), np.int64)
        longest_ns[: len(self._longest_ns)] = self._longest_ns
        np.maximum.at(longest_ns, marks.step, lengths_ns)
        self._longest_ns = longest_ns
        self._rank_steps += len(marks)
        self._steps_ns += int(lengths_ns.sum())
        self._bytes += int(part.collectives.bytes[part.collectives.step >= 0].sum())
        self._exposed_ns += _exposed_ns(part)

    def summary(self) -> Summary:
        lengths_s = self._longest_ns[self._longest_ns > 0] * 1e-9
        if not len(lengths_s):
            return Summary(
                ranks=len(self._ranks),
                steps=0,
                step_s=None,
                step_low_s=None,
                step_high_s=None,
                mean_step_s=None,
                collective_bytes=None,
                exposed_s=None,
            )
        low_s, median_s, high_s = np.quantile(lengths_s, [0.1, 0.5, 0.9]).tolist()
        return Summary(
            ranks=len(self._ranks),
            steps=len(lengths_s),
            step_s=median_s,
            step_low_s=low_s,
            step_high_s=high_s,
            mean_step_s=self._steps_ns * 1e-9 / self._rank_steps,
            collective_bytes=self._bytes / self._rank_steps,
            exposed_s=self._exposed_ns * 1e-9 / self._rank_steps,
        )


def _exposed_ns(run: Run) -> int:
    """Return how long all ranks together communicated in their steps without computing."""
    return sum(
        line.total_ns((line.step >= 0) & line.is_communicating & ~line.is_computing)
        for line in timelines(run, transfers_of(run, {}))
    )
