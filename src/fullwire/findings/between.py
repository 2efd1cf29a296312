"""The notes on the time outside of steps: pauses, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fullwire.findings.finding import Finding
from fullwire.run.run import MARKS, Spans
from fullwire.run.usual import (
    Pauses,
    begun_ns,
    gaps_between_steps_s,
    marks_between_gaps,
    pauses,
)

BETWEEN = 0.05  # Of the time from first to last step: a note needs more between steps.
_ONE_CHECKPOINT_NS = 50_000_000  # Between two files of one checkpoint.


class PausesBetweenSteps(Finding):
    """Pauses between steps, as for evaluation or a checkpoint, are in no step's account."""

    template = (
        "{count:,} {count:pause|pauses} of {low_s:?{low_s:time} to }{high_s:time} between steps, "
        "{total_s:time} in all, {count:is|are} not part of a step."
    )

    count: int
    low_s: float | None
    high_s: float
    total_s: float


def between_steps(pauses: Pauses) -> Finding:
    """Return the finding about pauses between steps."""
    return PausesBetweenSteps(
        count=pauses.count,
        low_s=None if pauses.are_alike else pauses.low_s,
        high_s=pauses.middle_s if pauses.are_alike else pauses.high_s,
        total_s=pauses.total_s,
    )


class TimeBetweenSteps(Finding):
    """Some time is outside of all steps, as for evaluation or a checkpoint."""

    template = (
        "{share:.0%} of the time from the first step to the last lies between steps, and is in no "
        "step's account."
    )

    share: float


class EvaluationsTook(Finding):
    """Evaluations between steps: how often, and how long in all."""

    template = (
        "{count:,} {count:evaluation|evaluations} took {total_s:time} of the {run_s:time} from the "
        "first step to the last, in no step's account."
    )

    count: int
    total_s: float
    run_s: float


class CheckpointsTook(Finding):
    """Checkpoints that the job waited for: how often, how long in all, and how much in steps."""

    template = (
        "{count:,} {count:checkpoint|checkpoints} took {total_s:time} of the {run_s:time} from the "
        "first step to the last.{within_s:? {within_s:time} of it is the host's part of the steps "
        "that wrote them.}"
    )

    count: int
    total_s: float
    run_s: float
    within_s: float | None


def outside_of_steps(spans: Spans, step_s: float) -> Iterator[Finding]:
    """Yield the notes on the time of a run that is outside of its steps of this length."""
    yield from _beside_training(spans)
    stopped = pauses(gaps_between_steps_s(spans), step_s)
    if stopped is not None:
        yield between_steps(stopped)
    # Find the share of time between steps where it lies in short gaps.
    is_mark = (spans.lane == "host") & np.isin(spans.name, MARKS)
    marks = spans.rows(is_mark)
    ranks, place = np.unique(marks.rank, return_inverse=True)
    first_ns = np.full(len(ranks), marks.start_ns.max(initial=0))
    last_ns = np.full(len(ranks), marks.end_ns.min(initial=0))
    start_ns = begun_ns(marks)
    np.minimum.at(first_ns, place, start_ns)
    np.maximum.at(last_ns, place, marks.end_ns)
    whole_ns = int((last_ns - first_ns).sum())
    between = 1 - int((marks.end_ns - start_ns).sum()) / max(whole_ns, 1)
    if len(marks) and between > BETWEEN and stopped is None:
        yield TimeBetweenSteps(share=between)


def _beside_training(spans: Spans) -> Iterator[Finding]:
    """Yield how long the first rank's evaluations and checkpoints took, if it has any."""
    marks = marks_between_gaps(spans)
    if not len(marks):
        return
    begin_ns, end_ns = int(marks.start_ns.min()), int(marks.end_ns.max())
    run_s = (end_ns - begin_ns) * 1e-9
    is_there = spans.rank == marks.rank[0]
    is_there &= (spans.start_ns >= begin_ns) & (spans.end_ns <= end_ns)
    for name in ("evaluation", "checkpoint"):
        marked = spans.rows(is_there & (spans.lane == "host") & (spans.name == name))
        if name == "evaluation":
            batches = spans.rows(is_there & (spans.lane == "compute") & (spans.name == name))
            marked, batches = (each.rows(begins_between(each, marks)) for each in (marked, batches))
            marked = marked if len(marked) else in_one_gap(batches, marks)
        if not len(marked):
            continue
        lasted_s = (marked.end_ns - marked.start_ns) * 1e-9
        total_s = float(lasted_s.sum())
        # A trainer writes a checkpoint in several files: in one step, or one soon after the other.
        apart_ns = marked.start_ns[1:] - marked.end_ns[:-1]
        begun = np.searchsorted(np.sort(marks.start_ns), marked.start_ns)
        count = 1 + int(((apart_ns > _ONE_CHECKPOINT_NS) & (np.diff(begun) > 0)).sum())
        if name == "evaluation":
            yield EvaluationsTook(count=len(marked), total_s=total_s, run_s=run_s)
        else:
            within_s = float(lasted_s[marked.step >= 0].sum()) or None
            yield CheckpointsTook(count=count, total_s=total_s, run_s=run_s, within_s=within_s)


def begins_between(evaluations: Spans, marks: Spans) -> NDArray[np.bool_]:
    """Say which evaluations begin in no step; steps may have forwards without gradients.

    The spans of probe steps have no step either.
    """
    probes = marks.rows(marks.name != "step")
    begun, ended = (
        np.searchsorted(np.sort(times_ns), evaluations.start_ns, side="right")
        for times_ns in (probes.start_ns, probes.end_ns)
    )
    return np.asarray((evaluations.step < 0) & (begun == ended))


def in_one_gap(batches: Spans, marks: Spans) -> Spans:
    """Return the batches that lie between the same two steps as one span, as of one evaluation.

    Some trainers evaluate without the mode for it (Lightning keeps the mode of each module), so
    that only the passes of the batches are recorded.
    """
    gap = np.searchsorted(np.sort(marks.start_ns), batches.start_ns)
    order = np.lexsort((batches.start_ns, gap))
    first = np.flatnonzero(np.diff(gap[order], prepend=-1))
    joined = batches.rows(order[first])
    if not len(joined):
        return joined
    return replace(joined, end_ns=np.maximum.reduceat(batches.end_ns[order], first))
