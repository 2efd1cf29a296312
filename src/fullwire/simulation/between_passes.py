"""Sums that a device waits for between the backward passes of a step.

DDP without `no_sync` sums gradients in every pass of a step that accumulates them. After each pass
the device waits for all sums of it, and then begins the next forward pass. So these waits are no
time of a worker's own, and sums of one pass do not go beside the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fullwire.run.intervals import union, within, without
from fullwire.run.kinds import EARLIER, LATE_PART
from fullwire.run.run import Collectives, Run, Spans, Whole
from fullwire.simulation.step_table import Steps, is_in

_SOON_NS = 20_000  # of computing beside a sum that a device waits for, at most
_USUALLY = 0.5  # of the steps


class Meeting(NamedTuple):
    """A moment between two passes at which computing waits for all sums so far."""

    gradients: int  # that are ready before it
    after_ns: int  # of a worker's own time, after the first backward pass began


@dataclass(frozen=True, eq=False, slots=True)
class Meetings:
    """The waits between passes: an axis for ranks, one for steps, and one for the waits."""

    gradients: tuple[int, ...]  # that are ready before each
    passed_ns: Whole  # when the pass before each was over
    waits_ns: Whole

    def left_out(self, table: Steps) -> Steps:
        """Return the steps without these waits."""
        ready_ns, all_ns = table.ready_ns.copy(), self.waits_ns.sum(axis=2)
        for place, count in enumerate(self.gradients):
            ready_ns[:, :, count:] -= self.waits_ns[:, :, place, None]
        return replace(
            table,
            end_ns=table.end_ns - all_ns,
            computed_ns=table.computed_ns - all_ns,
            ready_ns=ready_ns,
            waits_ns=all_ns,
        )

    def of_step(self, table: Steps) -> tuple[Meeting, ...]:
        """Return the usual time of each, in the time of a worker that does not wait."""
        before_ns = np.cumsum(self.waits_ns, axis=2) - self.waits_ns
        own_ns = (self.passed_ns - before_ns).max(axis=0)
        after_ns = (own_ns - table.backward_ns.max(axis=0)[:, None])[table.usual].mean(axis=0)
        return tuple(map(Meeting, self.gradients, np.round(after_ns).astype(int).tolist()))


def without_waits(table: Steps, meetings: Meetings | None) -> tuple[Steps, tuple[Meeting, ...]]:
    """Return the steps as if no rank waited between its passes, and where it did."""
    if meetings is None:
        return table, ()
    table = meetings.left_out(table)
    return table, meetings.of_step(table)


def meetings_of(run: Run, table: Steps, buckets: Collectives) -> Meetings | None:
    """Return the waits for sums between the passes of these steps, or None.

    A device that computes on beside the sums of a pass does not wait for them. Where steps differ
    in their passes, or in the gradients of each, waits are not told apart.
    """
    marks = run.spans.rows((run.spans.lane == "host") & (run.spans.name == EARLIER))
    marks = marks.rows(is_in(marks, table.ranks, table.numbers))
    in_marks = _of_steps(table, marks, marks.start_ns)
    in_buckets = _of_steps(table, buckets, buckets.issue_ns)
    ready_ns = table.ready_ns
    if in_marks is None or in_buckets is None or in_buckets.shape != ready_ns.shape:
        return None
    began_ns, passed_ns = marks.start_ns[in_marks], marks.end_ns[in_marks]
    until_ns = passed_ns + (passed_ns - began_ns) // LATE_PART
    # By ranks, steps, and passes, the gradients that were ready.
    counts = (ready_ns[:, :, None, :] <= until_ns[:, :, :, None]).sum(axis=3)
    if (counts != counts[:1, :1]).any():
        return None
    # Sums go in order, so those so far have ended with the last of them.
    all_over_ns = np.maximum.accumulate(buckets.end_ns[in_buckets], axis=2)
    # After a pass under `no_sync`, the sums of the pass before have been waited for already.
    chosen = np.flatnonzero(np.diff(counts[0, 0], prepend=0))
    gradients = counts[0, 0, chosen]
    passed_ns, over_ns = passed_ns[:, :, chosen], all_over_ns[:, :, gradients - 1]
    over_ns = np.maximum(over_ns, passed_ns)
    waits_ns, goes_on = np.zeros_like(over_ns), np.zeros(over_ns.shape, bool)
    for place, rank in enumerate(table.ranks.tolist()):
        computing = run.spans.rows((run.spans.rank == rank) & (run.spans.lane == "compute"))
        busy = union(computing.start_ns, computing.end_ns)
        own = buckets.rows(buckets.rank == rank)
        exposed = without(union(own.issue_ns, own.end_ns), busy)
        between = passed_ns[place].reshape(-1), over_ns[place].reshape(-1)
        waits_ns[place] = within(*between, exposed).reshape(waits_ns[place].shape)
        goes_on[place] = (within(*between, busy) > _SOON_NS).reshape(waits_ns[place].shape)
    is_wait = goes_on.mean(axis=(0, 1)) < _USUALLY
    if not is_wait.any():
        return None
    of_waits = gradients[is_wait].tolist()
    return Meetings(tuple(of_waits), passed_ns[:, :, is_wait], waits_ns[:, :, is_wait])


def _of_steps(table: Steps, rows: Spans | Collectives, time_ns: Whole) -> Whole | None:
    """Return rows by rank, step and time, where all steps have as many; else None."""
    cells = len(table.ranks) * len(table.numbers)
    rank, step = np.searchsorted(table.ranks, rows.rank), np.searchsorted(table.numbers, rows.step)
    each = np.bincount(rank * len(table.numbers) + step, minlength=cells)
    if not len(rows) or (each != each[0]).any():
        return None
    order = np.lexsort((time_ns, step, rank))
    return order.reshape(len(table.ranks), len(table.numbers), -1)
