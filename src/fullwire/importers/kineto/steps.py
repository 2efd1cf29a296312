"""Find where steps begin and end, on the processor and on the device, which runs behind it.

Steps come from ProfilerStep marks. A job that accumulates gradients may have one for each pass. So
where an optimizer runs once in N marks, a step is N marks. All ranks of a job take the same N.
Without these marks, a step lasts from the end of one optimizer step to the end of the next.

Correlation numbers assign a device's work to the step that launched it. The processor may be in a
later step by then: devices lag by more than a step in some jobs. So a step begins on the device
with its first computation. If the device had run out of work, the step begins when the processor
began it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fullwire.importers.kineto.scan import ABSENT, Trace
from fullwire.run.run import Whole

_PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_OPTIMIZER = "Optimizer.step#"
_FEWEST_TOLD = 2  # marks with an optimizer: so many tell how many marks are a step
NO_STEP = -1


class Marks(NamedTuple):
    """How many of the profiler's marks are a step, and which of them an optimizer runs in."""

    in_step: int
    last: int  # the remainder of its number, divided by `in_step`


EACH = Marks(1, 0)  # is a step


@dataclass(frozen=True, eq=False, slots=True)
class Steps:
    """The steps of a rank on the processor, in order and without overlap."""

    number: Whole
    start_ns: Whole
    end_ns: Whole
    is_numbered: bool  # the same on every rank, as ProfilerStep marks are
    marks: Marks = EACH
    tells_marks: bool = False  # by the optimizers of its own trace

    def of(self, time_ns: Whole) -> Whole:
        """Return the place of the step that each moment of the processor lies in."""
        place = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        if not len(self.start_ns):
            return np.full(len(time_ns), NO_STEP)
        return np.where((place >= 0) & (time_ns < self.end_ns[place]), place, NO_STEP)

    def numbered(self, place: Whole) -> Whole:
        """Return the numbers of the steps at these places."""
        if not len(self.number):
            return np.full(len(place), NO_STEP)
        return np.where(place >= 0, self.number[place], NO_STEP)


@dataclass(frozen=True, eq=False, slots=True)
class Launched:
    """The launch of each work of a device: its time, its thread, and the place of its step."""

    time_ns: Whole  # ABSENT where it is unknown
    thread: Whole
    step: Whole
    is_by_launch: bool  # else the trace lacks launches, and the processor's marks divide the work


def found_steps(trace: Trace, agreed: Marks | None = None) -> Steps:
    """Find the steps of a trace, of as many marks as the ranks of its job agreed on."""
    told = [_PROFILER_STEP.fullmatch(name) for name in trace.names]
    numbers = np.array([int(match[1]) if match else NO_STEP for match in told], np.int64)
    number, start_ns = numbers[trace.marks["name"]], trace.marks["start_ns"]
    columns = [number, start_ns, start_ns + trace.marks["duration_ns"]]
    marks = np.column_stack(columns).astype(np.int64)[number >= 0]
    is_numbered = bool(len(marks))
    if not is_numbered:
        marks = _between_optimizers(trace)
    marks = marks[np.argsort(marks[:, 1], kind="stable")]
    _, first = np.unique(marks[:, 0], return_index=True)
    marks = marks[np.sort(first)]
    number, start_ns, end_ns = marks.T
    start_ns = np.maximum(start_ns, np.append([ABSENT], np.maximum.accumulate(end_ns)[:-1]))
    kept = end_ns > start_ns
    steps = Steps(number[kept], start_ns[kept], end_ns[kept], is_numbered)
    return _up_to_optimizers(trace, steps, agreed) if is_numbered else steps


def _up_to_optimizers(trace: Trace, steps: Steps, agreed: Marks | None) -> Steps:
    """Return steps of as many marks as an optimizer runs once in, as far as they are whole."""
    is_optimizer = np.array([name.startswith(_OPTIMIZER) for name in trace.names], bool)
    begun_ns = trace.marks["start_ns"][is_optimizer[trace.marks["name"]]]
    last = np.unique(steps.of(begun_ns))
    ran_in = steps.number[last[last >= 0]]
    every, marks = np.diff(ran_in), EACH
    tells = len(ran_in) >= _FEWEST_TOLD
    if tells and (every == every[0]).all():
        marks = Marks(int(every[0]), int(ran_in[0] % every[0]))
    marks = marks if agreed is None else agreed
    count = marks.in_step
    if count == 1:
        return replace(steps, tells_marks=tells)
    last = np.flatnonzero(steps.number % count == marks.last)
    first = last - count + 1
    whole = first >= 0
    first, last = first[whole], last[whole]
    whole = steps.number[last] - steps.number[first] == count - 1
    number, start_ns = steps.number[last] // count, steps.start_ns[first]
    return Steps(number[whole], start_ns[whole], steps.end_ns[last][whole], True, marks, tells)


def launched(trace: Trace, steps: Steps) -> Launched:
    """Assign the work of a trace's devices to the steps that launched it."""
    work, launches = trace.work, trace.launches
    order = np.argsort(launches["correlation"], kind="stable")
    known = launches["correlation"][order]
    place = np.searchsorted(known, work["correlation"])
    is_found = np.zeros(len(place), bool)
    if len(known):
        row = order[np.minimum(place, len(known) - 1)]
        is_found = launches["correlation"][row] == work["correlation"]
    time_ns, thread = np.full(len(place), ABSENT), np.full(len(place), -1)
    if is_found.any():
        time_ns[is_found] = launches["time_ns"][row[is_found]]
        thread[is_found] = launches["thread"][row[is_found]]
        step = _like_the_one_before(trace, steps.of(time_ns), is_found)
    else:
        step = steps.of(work["start_ns"])
    return Launched(time_ns, thread, step, bool(is_found.any()))


def on_device(
    trace: Trace, steps: Steps, step: Whole, computes: NDArray[np.bool_]
) -> tuple[Whole, Whole]:
    """Return when each step began and ended on the device; `step` gives each work's step.

    A step begins when the stream that computes most begins it. Other streams run ahead: they copy
    the next batch and gather weights.
    """
    count = len(steps.number)
    start, end = trace.work["start_ns"], trace.work["start_ns"] + trace.work["duration_ns"]
    first_ns, last_ns = np.full(count, np.iinfo(np.int64).max), np.full(count + 1, ABSENT)
    inside = step >= 0
    lanes, lane = trace.lanes()
    busy_ns = np.bincount(lane, np.where(computes, trace.work["duration_ns"], 0), len(lanes))
    leading = inside & computes & (lane == (np.argmax(busy_ns) if len(lanes) else 0))
    np.minimum.at(first_ns, step[leading], start[leading])
    others = inside & ~np.isin(step, step[leading])
    np.minimum.at(first_ns, step[others], start[others])
    # Work without a launching step that began before the first step's work lies before all steps.
    is_before = ~inside & (start < first_ns.min(initial=np.iinfo(np.int64).max))
    np.maximum.at(
        last_ns, np.where(inside, step + 1, 0)[inside | is_before], end[inside | is_before]
    )
    reached_ns = np.maximum.accumulate(last_ns)
    start_ns = np.minimum(first_ns, np.maximum(steps.start_ns, reached_ns[:-1]))
    start_ns = np.maximum.accumulate(start_ns)
    end_ns = np.maximum(np.maximum(steps.end_ns, last_ns[1:]), start_ns)
    end_ns[:-1] = np.minimum(end_ns[:-1], start_ns[1:])
    return start_ns, end_ns


_LEAST_FORWARD = 0.25  # of the work before a step's first backward pass; less begins no new pass


def passes_of_work(
    step: Whole, launched_ns: Whole, length_ns: Whole, is_backward: NDArray[np.bool_]
) -> Whole:
    """Return the place among the backward passes of its step of each work of one, and -1 of others.

    A row is a piece of work: its step, its launch, its length, and whether autograd launched it. A
    pass begins where about a forward pass of other work lies before it. A few kernels of a hook or
    of another thread lie within a pass.
    """
    order = np.lexsort((launched_ns, step))
    rows = np.flatnonzero(is_backward[order])
    found = np.full(len(step), -1)
    if not len(rows):
        return found
    other_ns = np.where(is_backward, 0, length_ns)[order]
    before_ns = np.cumsum(other_ns) - other_ns
    numbers = step[order][rows]
    is_first = np.append([True], numbers[1:] != numbers[:-1])
    since_ns = np.diff(before_ns[rows], prepend=0)
    since_ns[is_first] = (before_ns[rows] - before_ns[np.searchsorted(step[order], numbers)])[
        is_first
    ]
    of_step = np.cumsum(is_first) - 1
    forward_ns = since_ns[is_first][of_step]
    begins = is_first | ((forward_ns > 0) & (since_ns >= _LEAST_FORWARD * forward_ns))
    count = np.cumsum(begins)
    found[order[rows]] = count - count[is_first][of_step]
    return found


def _between_optimizers(trace: Trace) -> Whole:
    """Return the intervals between an optimizer's ends; of several in turn, the last one's."""
    is_optimizer = np.array([name.startswith(_OPTIMIZER) for name in trace.names])
    rows = np.flatnonzero(is_optimizer[trace.marks["name"]])
    if not len(rows):
        return np.empty((0, 3), np.int64)
    end_ns = trace.marks["start_ns"][rows] + trace.marks["duration_ns"][rows]
    last = trace.marks["name"][rows[np.argmax(end_ns)]]
    ends = np.unique(end_ns[trace.marks["name"][rows] == last])
    return np.column_stack([np.arange(len(ends) - 1), ends[:-1], ends[1:]])


def _like_the_one_before(trace: Trace, step: Whole, is_found: NDArray[np.bool_]) -> Whole:
    """Give work whose launch is missing the step of the work before it on its stream."""
    order = np.lexsort((trace.work["start_ns"], trace.work["stream"], trace.work["device"]))
    lane = np.column_stack([trace.work["device"], trace.work["stream"]])[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (lane[1:] != lane[:-1]).any(axis=1)
    told = is_found[order] | is_first
    source = np.maximum.accumulate(np.where(told, np.arange(len(order)), 0))
    filled = np.empty(len(order), np.int64)
    filled[order] = np.where(is_found[order], step[order], NO_STEP)[source]
    return filled
