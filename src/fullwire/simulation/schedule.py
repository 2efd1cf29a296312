"""One worker's step as a schedule: gradients become ready, messages leave, the step ends.

Time 0 is the start of the backward pass. Messages leave over one communication lane:

    fifo        in the order in which they are ready; the optimizer, and with it the next forward,
                waits for the last one (PyTorch DDP, Horovod)
    priority    among those that are ready, first the one that the next forward needs first; each
                part of the next forward waits only for its own message (ByteScheduler, P3). The
                forward's time is spread over the messages as the backward's is: an assumption,
                since few traces tell the two apart by layer

Every function here works on arrays of any shape, point by point, so that a grid of scenarios gives
the same bits as its points asked one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from fullwire.errors import DamagedInput, UsageError
from fullwire.model.cost import Floats
from fullwire.model.run import Run, Whole
from fullwire.simulation.buckets import BucketPolicy, Buckets

MOST_NS = 2**61  # seventy years on any clock, and sums of two still fit 64 bits
MOST_BYTES = 2**50  # of one gradient


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Step:
    """A worker's step as it would be if it had nobody to wait for."""

    step_ns: int
    forward_ns: int  # from the start of the step to the start of the backward pass
    backward_ns: int
    ready_ns: Whole  # after the backward pass began
    bytes: Whole
    is_estimated: bool  # taken from a run of several workers: its own waiting is left out


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Timeline:
    """When each message of a step is on the lane, in seconds, in the order of the messages."""

    start_s: list[Floats]
    end_s: list[Floats]


def typical_step(run: Run) -> Step:
    """Take the step of median length from the run's first rank."""
    marks = _spans_named(run, "host", "step")
    rows = _only_first_rank(run, marks)
    length_ns = run.spans.end_ns[rows] - run.spans.start_ns[rows]
    mark = rows[np.argsort(length_ns, kind="stable")[(len(rows) - 1) // 2]]
    return _step_at(run, int(mark))


def grouped(step: Step, policy: BucketPolicy) -> Buckets:
    """Group the step's gradients into messages."""
    return policy.group(step.ready_ns, step.bytes)


def fifo_end_and_busy_s(
    ready_s: Sequence[float], cost_s: Iterable[Floats]
) -> tuple[Floats, Floats]:
    """Return when the last message has ended, and how long the lane was busy.

    It is `fifo_timeline` with nothing kept, for grids: one pass, three arrays.
    """
    end_s = busy_s = np.zeros(())
    for ready, cost in zip(ready_s, cost_s, strict=True):
        end_s = np.maximum(end_s, ready, out=end_s if end_s.shape == cost.shape else None)
        end_s = np.add(end_s, cost, out=end_s if end_s.shape == cost.shape else None)
        busy_s = np.add(busy_s, cost, out=busy_s if busy_s.shape == cost.shape else None)
    return end_s, busy_s


def fifo_timeline(ready_s: Sequence[float], cost_s: Sequence[Floats]) -> Timeline:
    """Send the messages in order: each begins when it is ready and the one before has ended."""
    starts: list[Floats] = []
    ends: list[Floats] = []
    lane_free_s: Floats = np.zeros(())
    for ready, cost in zip(ready_s, cost_s, strict=True):
        start = np.maximum(lane_free_s, ready)
        lane_free_s = start + cost
        starts.append(start)
        ends.append(lane_free_s)
    return Timeline(start_s=starts, end_s=ends)


def priority_timeline(ready_s: Sequence[float], cost_s: Sequence[Floats]) -> Timeline:
    """Send, of the messages that are ready, always the last one made: it is needed first."""
    ready = np.array(ready_s)
    cost = np.stack(np.broadcast_arrays(*cost_s))
    ready_column = ready.reshape((-1,) + (1,) * (cost.ndim - 1))
    start, waits = np.zeros_like(cost), np.ones(cost.shape, bool)
    lane_free_s: Floats = np.zeros(cost.shape[1:])
    for _ in range(len(ready)):
        next_ready_s = np.where(waits, ready_column, np.inf).min(axis=0)
        now_s = np.maximum(lane_free_s, next_ready_s)
        can_leave = waits & (ready_column <= now_s)
        chosen = _last_true(can_leave)
        np.put_along_axis(start, chosen, now_s[None], axis=0)
        np.put_along_axis(waits, chosen, np.False_, axis=0)
        lane_free_s = now_s + np.take_along_axis(cost, chosen, axis=0)[0]
    return Timeline(start_s=list(start), end_s=list(start + cost))


def fifo_overhead_s(step: Step, last_end_s: Floats) -> Floats:
    """Return what the step loses: the optimizer waits for the last message."""
    backward_s = step.backward_ns * 1e-9
    return np.maximum(last_end_s, backward_s) - backward_s


def priority_overhead_s(step: Step, buckets: Buckets, timeline: Timeline) -> Floats:
    """Return what the step loses: each part of the next forward waits for its own message."""
    backward_s = step.backward_ns * 1e-9
    rest_s = (step.step_ns - step.backward_ns) * 1e-9
    made_ns = step.ready_ns[np.cumsum(buckets.gradient_count) - 1]
    share = np.diff(made_ns, prepend=0) / max(int(made_ns[-1]), 1)
    now_s: Floats = np.full(timeline.end_s[-1].shape, backward_s)
    for part_s, end_s in zip(share[::-1] * rest_s, timeline.end_s[::-1], strict=True):
        now_s = np.maximum(now_s, end_s) + part_s
    return np.maximum(now_s - (backward_s + rest_s), 0.0)


def _last_true(mask: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return, for each point, the last row that is true, shaped for take_along_axis."""
    last: NDArray[np.intp] = len(mask) - 1 - np.argmax(mask[::-1], axis=0)
    return last[None]


def _spans_named(run: Run, lane: str, name: str) -> NDArray[np.intp]:
    rows = np.flatnonzero((run.spans.lane == lane) & (run.spans.name == name))
    if not len(rows):
        _refuse(
            run,
            f"a what-if needs a {lane} span named {name!r}, "
            f"and this run has none among its {len(run.spans)} spans",
        )
    return rows


def _refuse(run: Run, problem: str) -> NoReturn:
    """Refuse a run: as damaged if something of it is gone, else as one that cannot answer."""
    source = run.provenance.source
    if run.missing:
        raise DamagedInput(source, f"{problem}; missing: {run.missing[0]}")
    raise UsageError(f"{source}: {problem}")


def _only_first_rank(run: Run, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    ranks = run.spans.rank[rows]
    kept: NDArray[np.intp] = rows[ranks == ranks.min()]
    return kept


def _step_at(run: Run, mark: int) -> Step:
    spans, rank, number = run.spans, run.spans.rank[mark], run.spans.step[mark]
    here = (spans.rank == rank) & (spans.step == number)
    backward = [row for row in _spans_named(run, "compute", "backward") if here[row]]
    chosen = (run.gradients.rank == rank) & (run.gradients.step == number)
    gradients = run.gradients.rows(chosen)
    if len(backward) != 1 or not len(gradients):
        _refuse(
            run,
            "a what-if needs one backward pass with gradients in a step; "
            f"step {number} of rank {rank} has {len(backward)} and {len(gradients)} gradients",
        )
    _check_possible(run, rank, number)
    begin_ns = int(spans.start_ns[backward[0]])
    order = np.argsort(gradients.order, kind="stable")
    is_estimated = int(run.facts.get("workers", 1)) > 1  # type: ignore[arg-type]
    busy_ns = _busy_ns(run, here & (spans.lane == "compute"))
    return Step(
        step_ns=busy_ns if is_estimated else int(spans.end_ns[mark] - spans.start_ns[mark]),
        forward_ns=begin_ns - int(spans.start_ns[mark]),
        backward_ns=int(spans.end_ns[backward[0]]) - begin_ns,
        ready_ns=np.maximum.accumulate(gradients.ready_ns[order] - begin_ns),
        bytes=gradients.bytes[order],
        is_estimated=is_estimated,
    )


def _check_possible(run: Run, rank: int, number: int) -> None:
    """Refuse times that run backwards and gradients without bytes: no answer could rest on them."""
    here = (run.spans.rank == rank) & (run.spans.step == number)
    spans = run.spans.rows(here)
    chosen = (run.gradients.rank == rank) & (run.gradients.step == number)
    gradients = run.gradients.rows(chosen)
    times_ns = np.concatenate([spans.start_ns, spans.end_ns, gradients.ready_ns])
    if (
        (spans.end_ns < spans.start_ns).any()
        or (gradients.bytes <= 0).any()
        or (gradients.bytes > MOST_BYTES).any()
        or (abs(times_ns) > MOST_NS).any()
    ):
        place = f"{run.provenance.source}, step {number} of rank {rank}"
        raise DamagedInput(place, "times or gradient sizes that cannot be")


def _busy_ns(run: Run, chosen: NDArray[np.bool_]) -> int:
    """Return the length of the union of the chosen spans."""
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(run.spans.start_ns[rows], kind="stable")]
    start, end = run.spans.start_ns[rows], run.spans.end_ns[rows]
    covered = np.maximum.accumulate(np.concatenate([start[:1], end[:-1]]))
    return int(np.maximum(end - np.maximum(start, covered), 0).sum())
