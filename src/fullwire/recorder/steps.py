"""Find the steps of one process in its notes: where each begins and ends, and its spans.

A step ends with the optimizer. With several optimizers, a step is a round of them. It ends with the
last one before one of them comes round again, or before a new one takes over for good. A step
begins where the step before ended. So a checkpoint or a log line between two steps counts as the
host's time in the second. There are two exceptions. An evaluation between steps belongs to no step,
and the next step begins after it. The first step begins with the first note of it (data, gradients
cleared, forward, backward).

A forward without gradients belongs to the step where most steps have one, or where one of that
step's optimizers went before it. A GAN makes samples so, and a teacher its targets.

The backward pass of a step is its last one. Earlier ones, as in gradient accumulation, are spans
with a name of their own. A backward pass ends when its last gradient is ready. The rest of the call
waits for DDP's buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.recorder.inside.journal import Note
from fullwire.recorder.journals import Journal, Notes
from fullwire.run.run import Lane, Whole

OUTSIDE = -1  # the step number of moments outside all steps
_EVER = 2**63 - 1


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Steps:
    """The beginning and end of each step of a process, in order."""

    start_ns: Whole
    end_ns: Whole

    def __len__(self) -> int:
        return len(self.start_ns)

    def of(self, times_ns: Whole) -> Whole:
        """Return the step that each time falls into, or `OUTSIDE`."""
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


def found_steps(journal: Journal, notes: Mapping[int, Whole]) -> Steps:
    """Find the steps of a process from all its notes of optimizers and evaluations."""
    ends = np.fromiter(_round_ends(_outermost(notes[Note.OPTIMIZER])), np.int64)
    starts = np.empty(len(ends), np.int64)
    if len(ends):
        begun_ns = int(notes[Note.OPTIMIZER][:, 1].min())  # All that a parameter server notes.
        kinds = (Note.BACKWARD, Note.INPUT, Note.ZERO_GRAD, Note.FORWARD)
        starts[0] = min(
            [*(journal.first_ns[kind] for kind in kinds if kind in journal.first_ns), begun_ns]
        )
        starts[1:] = ends[:-1]
    # Evaluations end with Module.train() or with the last forward without gradients. A period in
    # evaluation mode that contains a step is no evaluation: some layers stay in it during training.
    modes = _without_steps(notes[Note.EVALUATION][:, 1:], ends)
    inferences = notes[Note.INFERENCE][:, 1:]
    if 2 * len(np.unique(np.searchsorted(ends, inferences[:, 1]))) > len(ends):
        inferences = inferences[:0]
    stepped_ns = np.sort(notes[Note.OPTIMIZER][:, 2])
    for begun, ended in np.concatenate([modes, inferences]).tolist():
        number = int(np.searchsorted(ends, ended))  # of the step after it, or around it
        stepped = np.searchsorted(stepped_ns, (ends[number - 1] if number else -1, begun), "right")
        if number < len(ends) and stepped[0] == stepped[1]:
            starts[number] = max(starts[number], ended)
    return Steps(start_ns=starts, end_ns=ends)


def marks_of(steps: Steps, notes: Mapping[int, Whole]) -> NDArray[np.object_]:
    """Return the name of each step's mark, from all its notes of probe steps and of turns."""
    marks = np.full(len(steps) + 1, "step", object)  # the last is for notes outside of steps
    marks[steps.of(notes[Note.PROBE][:, 1])] = "probe"
    turns = notes[Note.TURNS]
    marks[steps.of(turns[:, 1])] = np.where(turns[:, 0] > 0, "turns", "broken turns")
    return marks[:-1]


def whole_steps(journal: Journal, steps: Steps, most_notes: int) -> Iterator[tuple[range, Notes]]:
    """Yield a process's notes in parts: the steps that end in each, and all notes up to then.

    A part holds whole steps. It has more than `most_notes` notes only if one step has. Notes of
    other threads, such as the ends of collectives, may come in a later part.
    """
    held: list[Notes] = []
    done = 0
    for block in journal.blocks():
        held.append(block)
        if sum(len(part.rows) for part in held) >= most_notes:
            notes = Notes.joined(held)
            # All steps before the last optimizer step have surely ended.
            latest_ns = notes.of(Note.OPTIMIZER)[:, 2].max(initial=0)
            ended = int(np.searchsorted(steps.end_ns, latest_ns, side="right"))
            if ended > done or ended == len(steps):
                limit_ns = int(steps.end_ns[ended - 1]) if ended < len(steps) else _EVER
                notes, late = notes.until(limit_ns)
                yield range(done, ended), notes
                held, done = [late], ended
    yield range(done, len(steps)), Notes.joined(held)


def spans_of(notes: Notes, steps: Steps, ended: range) -> Iterator[Span]:
    """Yield the spans of some whole steps, by kind."""
    for number in ended:
        yield Span(number, "host", "step", int(steps.start_ns[number]), int(steps.end_ns[number]))
    # The backward passes in steps, and the beginning of the forward pass before each.
    calls = notes.of(Note.BACKWARD)
    step = steps.of(calls[:, 1])
    calls, step = calls[step != OUTSIDE], step[step != OUTSIDE]
    # The forward began with DDP's forward, or else at the end of the event before.
    wrapped = np.sort(notes.of(Note.FORWARD)[:, 1])
    before = [
        np.concatenate([[0], calls[:-1, 2]]),  # the backward before this one
        steps.start_ns[step],
        _latest_before(notes.of(Note.INPUT)[:, 2], calls[:, 1]),
        _latest_before(notes.of(Note.ZERO_GRAD)[:, 1], calls[:, 1]),
    ]
    earliest = np.maximum.reduce(before) if len(calls) else np.empty(0, np.int64)
    first_wrapped = np.append(wrapped, [_EVER])[np.searchsorted(wrapped, earliest)]
    forward_start = np.where(first_wrapped < calls[:, 1], first_wrapped, earliest)
    # A forward lasts until its backward begins. A backward lasts until its last gradient is ready,
    # or until it returns if it makes no gradient.
    is_last = np.append(step[1:] != step[:-1], [True]) if len(step) else np.empty(0, bool)
    ready = _latest_before(notes.of(Note.GRADIENT)[:, 1], calls[:, 2])
    end = np.where(ready >= calls[:, 1], ready, calls[:, 2])
    rows = zip(step.tolist(), is_last, forward_start, calls[:, 1], end, strict=True)
    for number, last, forward, backward, finish in rows:
        earlier = "" if last else "earlier "
        yield Span(number, "compute", f"{earlier}forward", int(forward), int(backward))
        yield Span(number, "compute", f"{earlier}backward", int(backward), int(finish))
    optimizers = _outermost(notes.of(Note.OPTIMIZER))[:, 1:]
    # An optimizer such as LBFGS may ask for passes, which do not count as its own time.
    asked = np.searchsorted(calls[:, 1], optimizers)  # the first of these passes, and the end
    own = []
    for (begun, ended_ns), (one, other) in zip(optimizers.tolist(), asked.tolist(), strict=True):
        begins = [begun, *calls[one:other, 2].tolist()]
        ends = [*forward_start[one:other].tolist(), ended_ns]
        own += [times for times in zip(begins, ends, strict=True) if times[0] < times[1]]
    yield from _plain(steps, "compute", "optimizer", np.array(own, np.int64).reshape(-1, 2))
    yield from _plain(steps, "input", "wait", notes.of(Note.INPUT)[:, 1:])
    yield from _plain(steps, "communication", "wait", notes.of(Note.WAIT)[:, 1:])
    yield from _plain(steps, "host", "wait", notes.of(Note.TURN)[:, 1:])
    packing = notes.of(Note.CODEC)
    yield from _plain(steps, "host", "codec", packing[packing[:, 0] == 0, 1:])
    yield from _plain(steps, "communication", "codec", packing[packing[:, 0] != 0, 1:])
    yield from _plain(steps, "compute", "evaluation", notes.of(Note.INFERENCE)[:, 1:])
    modes = _without_steps(notes.of(Note.EVALUATION)[:, 1:], steps.end_ns)
    yield from _plain(steps, "host", "evaluation", modes)
    saves = _outermost(notes.of(Note.CHECKPOINT))[:, 1:]  # one function may call another
    yield from _plain(steps, "host", "checkpoint", saves)


def last_backward_start_ns(notes: Notes, steps: Steps, among: range) -> Whole:
    """Return when each step's last backward pass began, or the step's start without one."""
    begin = steps.start_ns[among.start : among.stop].copy()
    starts = notes.of(Note.BACKWARD)[:, 1]
    step = steps.of(starts)
    is_among = (step >= among.start) & (step < among.stop)
    np.maximum.at(begin, step[is_among] - among.start, starts[is_among])
    return begin


def _without_steps(intervals: Whole, ends_ns: Whole) -> Whole:
    """Return the intervals in which no step ends."""
    steps_in = np.searchsorted(ends_ns, intervals[:, 1]) - np.searchsorted(ends_ns, intervals[:, 0])
    return np.asarray(intervals[steps_in == 0], np.int64)


def _round_ends(optimizers: Whole) -> Iterator[int]:
    """Yield the ends of rounds, each that of the last step before an optimizer comes again."""
    numbers, ends_ns = optimizers[:, 0], optimizers[:, 2]
    first = {number: int(np.argmax(numbers == number)) for number in np.unique(numbers)}
    last = {number: len(numbers) - 1 - int(np.argmax(numbers[::-1] == number)) for number in first}
    stepped: set[int] = set()
    last_end = 0
    for row, (optimizer, end) in enumerate(zip(numbers, ends_ns, strict=True)):
        takes_over = first[optimizer] == row and all(last[other] < row for other in stepped)
        if optimizer in stepped or (stepped and takes_over):
            yield last_end
            stepped.clear()
        stepped.add(optimizer)
        last_end = int(end)
    if stepped:
        yield last_end


def _outermost(optimizers: Whole) -> Whole:
    """Leave out optimizer steps inside others, which an optimizer that wraps another takes."""
    if (optimizers[1:, 1] >= optimizers[:-1, 2]).all():  # nearly always: one after the other
        return optimizers
    ordered = optimizers[np.lexsort((-optimizers[:, 2], optimizers[:, 1]))]
    reached = np.maximum.accumulate(np.concatenate([[-1], ordered[:-1, 2]]))
    kept: Whole = ordered[ordered[:, 2] > reached]
    return kept


def _latest_before(times_ns: Whole, limits_ns: Whole) -> Whole:
    ordered = np.concatenate([[0], np.sort(times_ns)])
    latest: Whole = ordered[np.searchsorted(ordered, limits_ns, side="right") - 1]
    return latest


def _plain(steps: Steps, lane: Lane, name: str, intervals: NDArray[np.int64]) -> Iterator[Span]:
    numbers = steps.of(intervals[:, 0])
    for number, (start, end) in zip(numbers.tolist(), intervals.tolist(), strict=True):
        yield Span(number, lane, name, start, end)
