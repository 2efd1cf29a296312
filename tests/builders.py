"""Small runs and recordings for tests; a test spells out only the data that it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fullwire.recorder.inside.journal import Journal, Note
from fullwire.run.facts import FactValue, named
from fullwire.run.gaps import gaps_of
from fullwire.run.run import Gradients, Provenance, Run, Spans

MS = 1_000_000  # nanoseconds


def a_run(
    *,
    gradients: Sequence[tuple[float, int]] = ((10.0, 25_000_000), (20.0, 25_000_000)),
    forward_ms: float = 10.0,
    optimizer_ms: float = 0.0,
    source: str = "a test",
    facts: Mapping[str, FactValue] | None = None,
    missing: tuple[str, ...] = (),
) -> Run:
    """Make a run of one worker and one step; gradients are (ready in ms, bytes)."""
    ready_ns = np.array([round(ready * MS) for ready, _ in gradients])
    begin, end = round(forward_ms * MS), round(forward_ms * MS) + int(ready_ns[-1])
    step_end = end + round(optimizer_ms * MS)
    none = np.zeros(len(gradients), np.int64)
    return Run(
        provenance=Provenance(origin="imported", source=source),
        facts=named({"workers": 1} if facts is None else facts),
        gaps=gaps_of(missing),
        spans=spans(
            ("host", "step", 0, step_end),
            ("compute", "forward", 0, begin),
            ("compute", "backward", begin, end),
            *([("compute", "optimizer", end, step_end)] if optimizer_ms else []),
        ),
        gradients=Gradients(
            rank=none,
            step=none,
            order=np.arange(len(gradients)),
            bytes=np.array([size for _, size in gradients]),
            ready_ns=begin + ready_ns,
        ),
    )


def spans(*rows: tuple[str, str, int, int], rank: int = 0, step: int = 0) -> Spans:
    """Make spans of one rank and step from (lane, name, start, end)."""
    lanes, names, starts, ends = zip(*rows, strict=True)
    return Spans(
        rank=np.full(len(rows), rank),
        step=np.full(len(rows), step),
        lane=np.array(lanes, object),
        name=np.array(names, object),
        start_ns=np.array(starts),
        end_ns=np.array(ends),
    )


def steps_run(lengths_ms: Sequence[float], facts: Mapping[str, FactValue] | None = None) -> Run:
    """Make a run that consists of steps of these lengths alone."""
    ends = np.cumsum([round(length * MS) for length in lengths_ms])
    count = len(lengths_ms)
    return Run(
        provenance=Provenance(origin="measured", source="a test"),
        facts=named(facts or {}),
        spans=Spans(
            rank=np.zeros(count, np.int64),
            step=np.arange(count),
            lane=np.full(count, "host", object),
            name=np.full(count, "step", object),
            start_ns=np.concatenate([[0], ends[:-1]]),
            end_ns=ends,
        ),
    )


def a_process(directory: Path, steps: int, rank: int = 0) -> Journal:
    """Write the journal of a process with one optimizer, a gradient and a collective a step."""
    journal = Journal(str(directory))
    journal.define(kind="identity", rank=rank, workers=2, backend="gloo")
    journal.define(kind="parameter", number=0, bytes=400)
    journal.define(
        kind="signature", number=0, op="allreduce", dtype="float32", bytes=400, group="0"
    )
    for step in range(steps):
        begin = 1_000 * step
        journal.note(Note.BACKWARD, 0, begin + 300, 500)
        journal.note(Note.GRADIENT, 0, begin + 600, 0)
        journal.note(Note.ISSUE, step, begin + 650, 0)
        journal.note(Note.END, step, begin + 790, 0)
        journal.note(Note.OPTIMIZER, 0, begin + 900, 100)
        journal.write()
    return journal
