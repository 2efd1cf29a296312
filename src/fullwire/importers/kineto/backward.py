"""The backward pass of each step and the buckets that leave it, which a what-if replays.

Autograd's operators launch the backward pass: it lasts from the first kernel that they launched to
the end of the last. An all-reduce that was launched meanwhile carries a bucket of gradients, ready
when the kernels launched before it had ended. Without a device the operators themselves are the
pass, and a bucket is ready when its library takes it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fullwire.importers.kineto.collectives import Found
from fullwire.importers.kineto.scan import ABSENT, Trace, last_around
from fullwire.importers.kineto.steps import Launched, Steps
from fullwire.run.run import Gradients, Spans, Whole

_HANDED_OVER_NS = 5_000_000  # after the last operator, at the latest: the last bucket leaves last


def on_device(
    trace: Trace,
    steps: Steps,
    launched: Launched,
    computes: NDArray[np.bool_],
    found: Found,
    issued_ns: Whole,
) -> tuple[Spans, Gradients]:
    """Find each step's backward pass; `issued_ns` is when each collective was launched."""
    operators = trace.operators
    is_backward = operators["is_backward"] == 1
    around = last_around(
        operators["start_ns"],
        operators["end_ns"],
        operators["thread"],
        is_backward,
        launched.time_ns,
        launched.thread,
    )
    mine = computes & (around >= 0) & (launched.step >= 0)
    step, begin_ns = launched.step[mine], trace.work["start_ns"][mine]
    extent = _extent(steps, step, begin_ns, begin_ns + trace.work["duration_ns"][mine])
    launches = _extent(steps, step, launched.time_ns[mine], launched.time_ns[mine])
    # When the computation that was launched before each moment had ended.
    rows = np.flatnonzero(computes & (launched.time_ns != ABSENT))
    rows = rows[np.argsort(launched.time_ns[rows], kind="stable")]
    end_ns = np.maximum.accumulate((trace.work["start_ns"] + trace.work["duration_ns"])[rows])
    place = np.searchsorted(launched.time_ns[rows], issued_ns, side="right")
    ready_ns = np.append([ABSENT], end_ns)[place]
    ready_ns = np.minimum(np.maximum(ready_ns, issued_ns), found.issue_ns)
    return _tables(steps, extent, launches, found, issued_ns, ready_ns)


def on_processor(trace: Trace, steps: Steps, found: Found) -> tuple[Spans, Gradients]:
    """Find each step's backward pass among operators."""
    operators = trace.operators
    step = steps.of(operators["start_ns"])
    mine = (operators["is_backward"] == 1) & (step >= 0)
    extent = _extent(steps, step[mine], operators["start_ns"][mine], operators["end_ns"][mine])
    return _tables(steps, extent, extent, found, found.issue_ns, found.issue_ns)


def _extent(steps: Steps, step: Whole, start_ns: Whole, end_ns: Whole) -> tuple[Whole, Whole]:
    """Return by step the first start and the last end; the end is before the start in none."""
    first = np.full(len(steps.number), -ABSENT - 1)
    last = np.full(len(steps.number), ABSENT)
    np.minimum.at(first, step, start_ns)
    np.maximum.at(last, step, end_ns)
    return first, last


def _tables(
    steps: Steps,
    extent: tuple[Whole, Whole],
    launches: tuple[Whole, Whole],
    found: Found,
    issued_ns: Whole,
    ready_ns: Whole,
) -> tuple[Spans, Gradients]:
    start_ns, end_ns = extent
    kept = end_ns > start_ns
    count = int(kept.sum())
    marks = Spans(
        rank=np.zeros(count, np.int64),
        step=steps.number[kept],
        lane=np.full(count, "host", object),
        name=np.full(count, "backward", object),
        start_ns=start_ns[kept],
        end_ns=end_ns[kept],
    )
    place = np.searchsorted(steps.number, found.step)
    place = np.minimum(place, max(len(steps.number) - 1, 0))
    is_bucket = np.zeros(len(found.step), bool)
    if len(steps.number):
        is_bucket = (found.op == "allreduce") & (found.bytes > 0) & (found.step >= 0)
        is_bucket &= (issued_ns >= launches[0][place]) & kept[place]
        is_bucket &= issued_ns <= np.minimum(launches[1], 2**62)[place] + _HANDED_OVER_NS
    rows = np.flatnonzero(is_bucket)
    rows = rows[np.lexsort((ready_ns[rows], found.step[rows]))]
    return marks, Gradients(
        rank=np.zeros(len(rows), np.int64),
        step=found.step[rows],
        order=np.arange(len(rows)) - np.searchsorted(found.step[rows], found.step[rows]),
        bytes=found.bytes[rows],
        ready_ns=ready_ns[rows],
    )
