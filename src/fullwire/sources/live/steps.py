"""From the notes of one process to its steps: where each begins and ends, and what it was made of.

A step ends with the optimizer. With several optimizers a step is a round of them: it ends with the
last one before one of them comes round again, or before a new one takes over for good. It begins
where the step before ended, so a checkpoint or a log line between two steps counts as the host's
time in the second. There are two exceptions: an evaluation between steps belongs to none, and the
next step begins after it; the first step begins with the first thing seen of it (data, gradients
cleared, forward, backward).

The backward pass of a step is its last one; earlier ones, as in gradient accumulation, are spans of
their own name. A backward pass ends when its last gradient is ready: what follows inside the call
is waiting for DDP's buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.model.run import Lane, Whole
from fullwire.sources.live.inside.journal import Note
from fullwire.sources.live.journals import Journal

OUTSIDE = -1  # the step of what happened in none


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Steps:
    """When each step of a process began and ended, in order."""

    start_ns: Whole
    end_ns: Whole

    def __len__(self) -> int:
        return len(self.start_ns)

    def of(self, times_ns: Whole) -> Whole:
        """Return the step that each time falls into, `OUTSIDE` where it falls into none."""
        if not len(self):
            return np.full(len(times_ns), OUTSIDE, np.int64)
        step = np.searchsorted(self.start_ns, times_ns, side="right") - 1
        inside = (step >= 0) & (times_ns <= self.end_ns[step])
        return np.where(inside, step, OUTSIDE)


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of work of a process."""

    step: int
    lane: Lane
    name: str
    start_ns: int
    end_ns: int


def found_steps(journal: Journal) -> Steps:
    """Find the steps of a process."""
    ends = np.array(list(_round_ends(_outermost(journal.of(Note.OPTIMIZER)))), np.int64)
    starts = np.empty(len(ends), np.int64)
    if len(ends):
        starts[0] = _first_sign(journal, int(ends[0]))
        starts[1:] = ends[:-1]
    evaluations = _evaluations(journal, ends)
    before = np.searchsorted(ends, evaluations)  # an evaluation lies before the step of this number
    for number, evaluation_end in zip(before.tolist(), evaluations.tolist(), strict=True):
        if number < len(ends):
            starts[number] = max(starts[number], evaluation_end)
    return Steps(start_ns=starts, end_ns=ends)


def spans_of(journal: Journal, steps: Steps) -> Iterator[Span]:
    """Go through the spans of a process, by kind."""
    for number in range(len(steps)):
        yield Span(number, "host", "step", int(steps.start_ns[number]), int(steps.end_ns[number]))
    yield from _passes(journal, steps)
    optimizers = _outermost(journal.of(Note.OPTIMIZER))
    yield from _plain(steps, "compute", "optimizer", optimizers[:, 1:])
    yield from _plain(steps, "input", "wait", journal.of(Note.INPUT)[:, 1:])
    yield from _plain(steps, "communication", "wait", journal.of(Note.WAIT)[:, 1:])
    forwards = journal.of(Note.FORWARD)
    yield from _plain(steps, "compute", "evaluation", forwards[forwards[:, 0] == 1, 1:])


def last_backward_start_ns(journal: Journal, steps: Steps) -> Whole:
    """Return when each step's last backward pass began; the step's start where there is none."""
    begin = steps.start_ns.copy()
    starts = journal.of(Note.BACKWARD)[:, 1]
    step = steps.of(starts)
    np.maximum.at(begin, step[step != OUTSIDE], starts[step != OUTSIDE])
    return begin


def _round_ends(optimizers: Whole) -> Iterator[int]:
    """Go through the ends of rounds: of the last step before an optimizer comes round again."""
    numbers = optimizers[:, 0].tolist()
    first = {number: row for row, number in reversed(list(enumerate(numbers)))}
    last = {number: row for row, number in enumerate(numbers)}
    stepped: set[int] = set()
    last_end = 0
    for row, (optimizer, _, end) in enumerate(optimizers.tolist()):
        takes_over = first[optimizer] == row and all(last[each] < row for each in stepped)
        if optimizer in stepped or (stepped and takes_over):
            yield last_end
            stepped.clear()
        stepped.add(optimizer)
        last_end = end
    if stepped:
        yield last_end


def _outermost(optimizers: Whole) -> Whole:
    """Leave out steps taken inside other steps, as by an optimizer that wraps another."""
    ordered = optimizers[np.lexsort((-optimizers[:, 2], optimizers[:, 1]))]
    reached = np.maximum.accumulate(np.concatenate([[-1], ordered[:-1, 2]]))
    kept: Whole = ordered[ordered[:, 2] > reached]
    return kept


def _first_sign(journal: Journal, end_ns: int) -> int:
    passes = [journal.of(kind)[:, 1] for kind in (Note.BACKWARD, Note.INPUT, Note.ZERO_GRAD)]
    forwards = journal.of(Note.FORWARD)
    seen = np.concatenate([*passes, forwards[forwards[:, 0] == 0, 1], [end_ns]])
    return int(seen.min())


def _evaluations(journal: Journal, step_ends: Whole) -> Whole:
    """Return when evaluations ended, by Module.train() or by the last forward without gradients.

    A time in evaluation mode with a step in it is none: some layers stay so while others train.
    """
    modes = journal.of(Note.EVALUATION)[:, 1:]
    if len(modes):
        steps_in = np.searchsorted(step_ends, modes[:, 1]) - np.searchsorted(step_ends, modes[:, 0])
        modes = modes[steps_in == 0]
    forwards = journal.of(Note.FORWARD)
    return np.concatenate([modes[:, 1], forwards[forwards[:, 0] == 1, 2]]).astype(np.int64)


def _passes(journal: Journal, steps: Steps) -> Iterator[Span]:
    """Go through the forward and backward passes; a forward lasts until its backward begins."""
    calls = journal.of(Note.BACKWARD)
    step = steps.of(calls[:, 1])
    calls, step = calls[step != OUTSIDE], step[step != OUTSIDE]
    is_last = np.append(step[1:] != step[:-1], [True]) if len(step) else np.empty(0, bool)
    forward_start = _forward_starts(journal, steps, calls, step)
    end = _computed_ends(journal.of(Note.GRADIENT)[:, 1], calls)
    rows = zip(step.tolist(), is_last, forward_start, calls[:, 1], end, strict=True)
    for number, last, forward, backward, finish in rows:
        earlier = "" if last else "earlier "
        yield Span(number, "compute", f"{earlier}forward", int(forward), int(backward))
        yield Span(number, "compute", f"{earlier}backward", int(backward), int(finish))


def _forward_starts(journal: Journal, steps: Steps, calls: Whole, step: Whole) -> Whole:
    """Say when the forward before each backward began: with DDP's, or after what came before."""
    forwards = journal.of(Note.FORWARD)
    wrapped = np.sort(forwards[forwards[:, 0] == 0, 1])
    before = [
        np.concatenate([[0], calls[:-1, 2]]),  # the backward before this one
        steps.start_ns[step],
        _latest_before(journal.of(Note.INPUT)[:, 2], calls[:, 1]),
        _latest_before(journal.of(Note.ZERO_GRAD)[:, 1], calls[:, 1]),
    ]
    earliest = np.maximum.reduce(before) if len(calls) else np.empty(0, np.int64)
    place = np.searchsorted(wrapped, earliest)
    first_wrapped = np.append(wrapped, [np.iinfo(np.int64).max])[place]
    return np.where(first_wrapped < calls[:, 1], first_wrapped, earliest)


def _latest_before(times_ns: Whole, limits_ns: Whole) -> Whole:
    ordered = np.concatenate([[0], np.sort(times_ns)])
    latest: Whole = ordered[np.searchsorted(ordered, limits_ns, side="right") - 1]
    return latest


def _computed_ends(ready_ns: Whole, calls: Whole) -> Whole:
    """Return when the last gradient of each backward was ready, or when it returned without one."""
    last = _latest_before(ready_ns, calls[:, 2])
    return np.where(last >= calls[:, 1], last, calls[:, 2])


def _plain(steps: Steps, lane: Lane, name: str, intervals: NDArray[np.int64]) -> Iterator[Span]:
    numbers = steps.of(intervals[:, 0])
    for number, (start, end) in zip(numbers.tolist(), intervals.tolist(), strict=True):
        yield Span(number, lane, name, start, end)
