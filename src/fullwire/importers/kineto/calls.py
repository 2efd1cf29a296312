"""Match kernels that communicate with the calls behind them, as marks on the processor tell them.

A call's mark spans its launch. But NCCL launches several transfers at once where a job batches them
(`batch_isend_irecv`, as Megatron's pipelines do): their marks end before that, and the kernel bears
no arguments. Such a kernel carries the transfers that its thread has called since its last batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fullwire.importers.kineto.recognise import Known, kinds_of, op_of
from fullwire.importers.kineto.scan import ABSENT, Columns, Trace, last_around
from fullwire.importers.kineto.steps import Launched
from fullwire.run.run import Whole

_TRANSFERS = ("send", "recv")
_MAY_BE_BATCHES = ("", "sendrecv", "send", "recv")  # operations that a kernel's name tells


def with_launches_in_turn(trace: Trace) -> Trace:
    """Return the trace with launches for collectives' kernels, where the match is sure.

    ROCm 6.1 numbers the launches of RCCL's kernels, but gives the kernels the number 0. A stream
    runs its kernels in the order of their launches. So if the launches of collectives that lack a
    kernel are as many as these kernels, they match in order.
    """
    work, launches, marks = trace.work, trace.launches, trace.marks
    is_known = kinds_of(trace.names, None) == Known.COMMUNICATES
    is_communication = (work["kind"] == 0) & is_known[work["name"]]
    lost = np.flatnonzero((work["correlation"] <= 0) & is_communication)
    lanes = set(zip(work["device"][lost].tolist(), work["stream"][lost].tolist(), strict=True))
    if len(lanes) != 1:
        return trace
    mark = last_around(
        marks["start_ns"],
        marks["start_ns"] + marks["duration_ns"],
        marks["thread"],
        is_of_a_library(trace) | tells_an_operation(trace),
        launches["time_ns"],
        launches["thread"],
    )
    leads_nowhere = ~np.isin(launches["correlation"], work["correlation"])
    unmatched = np.flatnonzero(leads_nowhere & (mark >= 0))
    if len(unmatched) != len(lost):
        return trace
    lost = lost[np.argsort(work["start_ns"][lost], kind="stable")]
    unmatched = unmatched[np.argsort(launches["time_ns"][unmatched], kind="stable")]
    correlation = work["correlation"].copy()
    correlation[lost] = launches["correlation"][unmatched]
    told = Columns(by_name={**work.by_name, "correlation": correlation})
    return replace(trace, work=told)


def is_inside_a_mark(trace: Trace, launched: Launched, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Say which kernels a collective launched, by the marks of libraries or arguments."""
    is_chosen = is_of_a_library(trace) | tells_an_operation(trace)
    return np.asarray(marks_around(trace, launched, rows, is_chosen) >= 0)


def tells_an_operation(trace: Trace) -> NDArray[np.bool_]:
    """Say which marks are of record_param_comms with arguments (PyTorch 2.3 and later)."""
    name, note = trace.marks["name"], trace.marks["note"]
    is_named = np.array([name == "record_param_comms" for name in trace.names])[name]
    has_op = np.array([bool(name) for name in trace.names])[at(trace.notes["op"], note)]
    return np.asarray(is_named & (note >= 0) & has_op)


def is_of_a_library(trace: Trace) -> NDArray[np.bool_]:
    """Say which marks are a library's own, such as nccl:all_reduce."""
    is_library = [":" in name and "#" not in name and "::" not in name for name in trace.names]
    return np.asarray(np.array(is_library)[trace.marks["name"]])


def at(column: Whole, row: Whole) -> Whole:
    """Return the column's values at these rows, and 0 for rows below 0."""
    if not len(column):
        return np.zeros(len(row), np.int64)
    return np.where(row >= 0, column[np.maximum(row, 0)], 0)


def marks_around(
    trace: Trace, launched: Launched, rows: NDArray[np.intp], is_chosen: NDArray[np.bool_]
) -> Whole:
    """Return for each kernel the last chosen mark that its launch lies in, or -1."""
    marks = trace.marks
    return last_around(
        marks["start_ns"],
        marks["start_ns"] + marks["duration_ns"],
        marks["thread"],
        is_chosen,
        launched.time_ns[rows],
        launched.thread[rows],
    )


def parts_of_batches(
    trace: Trace, launched: Launched, rows: NDArray[np.intp]
) -> tuple[NDArray[np.intp], Whole]:
    """Return the kernels, one that carries a batch once for each transfer, and these' notes.

    The note of all others is -1. If the trace lacks a batch's launch, the next batch would get its
    calls. So a batch is unknown if a kernel without a launch began since the last one. It is also
    unknown if it had more calls of one kind to one rank than is usual.
    """
    marks, work = trace.marks, trace.work
    none = np.full(len(rows), -1)
    ops = np.array([op_of(name) for name in trace.names], object)
    tells = tells_an_operation(trace)
    told_op = ops[at(trace.notes["op"], marks["note"])] if len(marks["note"]) else ops[:0]
    is_transfer = tells & np.isin(told_op, _TRANSFERS)
    if not is_transfer.any():
        return rows, none
    own = marks_around(trace, launched, rows, tells)
    is_transfer[own[own >= 0]] = False  # it has a kernel of its own
    is_bare = (work["note"][rows] < 0) & np.isin(ops[work["name"][rows]], _MAY_BE_BATCHES)
    is_lost = is_bare & (launched.time_ns[rows] == ABSENT)
    lost_ns = np.sort(work["start_ns"][rows[is_lost]])
    is_open = is_bare & ~is_lost & (own < 0)
    calls, batches = np.flatnonzero(is_transfer), np.flatnonzero(is_open)
    calls = calls[np.argsort(marks["start_ns"][calls], kind="stable")]
    batches = batches[np.argsort(launched.time_ns[rows[batches]], kind="stable")]
    carried: dict[int, list[int]] = {}  # notes, by the place of the kernel
    unknown: set[int] = set()
    for thread in sorted(set(launched.thread[rows[batches]].tolist())):
        of_thread = batches[launched.thread[rows[batches]] == thread]
        mine = calls[marks["thread"][calls] == thread]
        over_ns = marks["start_ns"][mine] + marks["duration_ns"][mine]
        place = np.searchsorted(launched.time_ns[rows[of_thread]], over_ns)
        for call, at_batch in zip(mine.tolist(), place.tolist(), strict=True):
            if at_batch < len(of_thread):
                note = int(marks["note"][call])
                carried.setdefault(int(of_thread[at_batch]), []).append(note)
        lost = np.searchsorted(lost_ns, work["start_ns"][rows[of_thread]])
        unknown |= {*of_thread[np.diff(np.maximum.accumulate(lost), prepend=0) > 0].tolist()}
    told = [trace.notes[name].tolist() for name in ("op", "group", "source", "target")]
    alike = {
        place: max(Counter(tuple(column[note] for column in told) for note in notes).values())
        for place, notes in carried.items()
    }
    usual = sorted(alike.values())[len(alike) // 2] if alike else 0
    unknown |= {place for place, count in alike.items() if count > usual}
    carried = {place: notes for place, notes in carried.items() if place not in unknown}
    parts = [carried.get(place, [-1]) for place in range(len(rows))]
    return np.repeat(rows, [*map(len, parts)]), np.array([*itertools.chain(*parts)], np.int64)
