"""Make tables of one trace, in its own clock and without the number of its rank.

    compute         kernels, by name; on the processor alone, operators (where they lie side by side
                    or inside each other, one span)
    communication   kernels that communicate but name no operation, such as DeepEP's or NVSHMEM's:
                    spans, as the other ranks' part is unknown (all others are collectives)
    host            copies and fills of device memory, and the marks of steps and backward passes
    input           waiting for a DataLoader, as far as it lies within the devices' work

A collective is issued when its kernel begins: the device has come to it, and waits for other ranks
from then on. The outline of a rank holds the facts that placing its tables beside others' needs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fullwire.importers.kineto import collectives as found_collectives
from fullwire.importers.kineto.calls import is_inside_a_mark, with_launches_in_turn
from fullwire.importers.kineto.collectives import Backward, Found, SentBackward, sent_backward
from fullwire.importers.kineto.contention import Slowing, slowing_of
from fullwire.importers.kineto.gloo import DefaultGroup, Threads
from fullwire.importers.kineto.recognise import Known, kinds_of, span_name
from fullwire.importers.kineto.scan import ABSENT, MOST_RANKS, Trace
from fullwire.importers.kineto.shapes import MOST_US
from fullwire.importers.kineto.steps import (
    Launched,
    Marks,
    Steps,
    found_steps,
    launched,
    on_device,
)
from fullwire.run.intervals import union, without
from fullwire.run.run import SIZE_UNKNOWN, Operations, Spans, Text, Whole

LONG = 0.02  # Share of the span: unknown kernels that together take less change no answer.
_MOST_STEPS = 20_000  # Steps whose ends are kept, to give one step the same number on every rank.
_JOINT = ("allreduce", "allgather", "reducescatter")  # each member of a group calls as many
_LOADING = "enumerate(DataLoader)#"


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Outline:
    """The facts of a rank that must be known before any rank's tables are placed."""

    path: Path
    rank: int | None  # that the trace names
    world: int | None
    largest_group: int
    backend: str
    device: str
    host: str
    is_distributed: bool
    base_ns: int | None
    first_ns: int | None  # The first beginning, in the trace's own clock.
    last_ns: int | None  # The last end, in the trace's own clock.
    step_ends_ns: Whole  # Ends of steps that lack numbers, in the trace's own clock.
    has_steps: bool
    marks: Marks
    tells_marks: bool  # by the optimizers of its own trace
    has_buckets: bool
    passes: int | None  # Of a usual step; None where no mark of autograd tells them.
    collectives: int
    # Means of a step, by group and its members.
    joint: Mapping[tuple[str, str], Mapping[str, float]]
    without_size: int  # Number of collectives without a size.
    members: Mapping[str, frozenset[str]]  # The lists of ranks that bear each group's name.
    miscounted: frozenset[str]  # Groups whose collectives lack numbers in the trace.
    unknown: Mapping[str, float]  # Long kernels of unknown kind: their share of the span.
    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    groups: Mapping[str, int]
    group_names: Mapping[str, str]
    group_ranks: Mapping[str, int]  # by the names of groups; 0 where collectives differ in it
    slowing: Slowing | None
    threads: Threads | None = None  # of Gloo's marks


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the ranks of a job agree on, where one trace may not tell it."""

    marks: Marks | None = None  # of a step
    default: DefaultGroup = "used"  # Gloo's


NOT_YET = Agreed()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Tables:
    """The tables of one rank whose number is still open: it is 0 in them."""

    spans: Spans
    sent: SentBackward
    found: Found
    operations: Operations


def read_rank(
    trace: Trace, pattern: re.Pattern[str] | None, agreed: Agreed = NOT_YET
) -> tuple[Outline, Tables]:
    """Make tables of a trace; `pattern` finds names of kernels that communicate.

    `agreed` is what all ranks of the job take, as far as it is known.
    """
    trace = with_launches_in_turn(trace)
    steps = found_steps(trace, agreed.marks)
    by_launch = launched(trace, steps)
    kinds = _kinds(trace, by_launch, pattern)
    if len(kinds):
        tables, threads = _device_tables(trace, steps, by_launch, kinds), None
    else:
        found, threads = found_collectives.of_marks(trace, steps, agreed.default)
        # The backward pass is among the operators: a bucket is ready when it is called. Gloo may
        # begin it later, after the buckets before it.
        operators = trace.operators
        step = steps.of(operators["start_ns"])
        mine = (operators["is_backward"] == 1) & (step >= 0)
        begin_ns, end_ns = operators["start_ns"][mine], operators["end_ns"][mine]
        backward = Backward(step[mine], None, begin_ns, end_ns)
        sent = sent_backward(steps, backward, found, found.called_ns, found.called_ns)
        spans = Spans.joined([_processor_spans(trace, steps), sent.passes])
        operations = _operations(trace, steps)
        tables = Tables(spans=spans, sent=sent, found=found, operations=operations)
    remarks = []
    if _lacks_its_devices(trace):
        remarks.append(
            "the job communicates by NCCL, and its trace holds no device: their computation "
            "and their communication are unknown"
        )
    if len(kinds) and not by_launch.is_by_launch:
        remarks.append(
            "no launch is in the trace, so the device's work is cut at the "
            "processor's marks of steps, which it may lag behind"
        )
    if steps.marks.in_step > 1:
        remarks.append(
            f"the optimizer runs once in {steps.marks.in_step} of the profiler's marks, so a step "
            "is that many of them"
        )
    devices = set(trace.work["device"].tolist())
    if len(devices) > 1:
        remarks.append(f"it used {len(devices)} devices, which are taken for one")
    outline = _outline(trace, steps, by_launch, tables, kinds, tuple(remarks))
    return replace(outline, threads=threads), tables


def _outline(
    trace: Trace,
    steps: Steps,
    by_launch: Launched,
    tables: Tables,
    kinds: NDArray[np.int8],
    remarks: tuple[str, ...],
) -> Outline:
    found = tables.found
    begins = [
        int(column.min()) for column in (tables.spans.start_ns, found.issue_ns) if len(column)
    ]
    ends_ns = [int(column.max()) for column in (tables.spans.end_ns, found.end_ns) if len(column)]
    group_size = trace.notes["group_size"]
    ends = list(zip(found.group.tolist(), found.members.tolist(), strict=True))
    members: dict[str, set[str]] = {}
    for group, of_group in ends:
        members.setdefault(group, set()).add(of_group)
    numbers = Counter(zip(ends, found.op.tolist(), found.sequence.tolist(), strict=True))
    # Long kernels of unknown kind: how long each name took.
    work = trace.work
    rows = np.flatnonzero((kinds == Known.NOTHING) & (work["kind"] == 0))
    end_ns = work["start_ns"] + work["duration_ns"]
    span_ns = max(int(end_ns.max() - work["start_ns"].min()), 1) if len(rows) else 1
    total_ns = np.bincount(work["name"][rows], work["duration_ns"][rows])
    long = np.flatnonzero(total_ns >= LONG * span_ns)
    return Outline(
        path=trace.path,
        rank=trace.rank,
        world=trace.world,
        largest_group=int(group_size[group_size <= MOST_RANKS].max(initial=0)),
        backend=trace.backend,
        device=trace.device,
        host=trace.host,
        is_distributed=bool(trace.libraries),
        base_ns=trace.base_ns,
        first_ns=min(begins, default=None),
        last_ns=max(ends_ns, default=None),
        step_ends_ns=steps.end_ns[: 0 if steps.is_numbered else _MOST_STEPS],
        has_steps=bool(len(steps.number)),
        marks=steps.marks,
        tells_marks=steps.tells_marks,
        has_buckets=tables.sent.are_buckets,
        passes=tables.sent.usual_passes if len(kinds) else None,
        collectives=len(found.op),
        joint=_joint(steps, found),
        without_size=int((found.dtype == SIZE_UNKNOWN).sum()),
        members={group: frozenset(of_group) for group, of_group in members.items()},
        miscounted=frozenset(
            group
            for ((group, _), _, sequence), count in numbers.items()
            if count > 1 or sequence == ABSENT
        ),
        unknown={trace.names[name]: float(total_ns[name] / span_ns) for name in long},
        problems=trace.problems,
        remarks=remarks,
        groups=trace.groups,
        group_names=trace.group_names,
        group_ranks=found.group_ranks,
        slowing=slowing_of(
            trace,
            (work["kind"] == 0) & (kinds != Known.COMMUNICATES),
            kinds == Known.COMMUNICATES,
        ),
    )


def _joint(steps: Steps, found: Found) -> dict[tuple[str, str], dict[str, float]]:
    """Return the mean calls of a step and the bytes of its sums, of collectives that need all."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    chosen = np.isin(found.op, _JOINT) & (found.step >= 0)
    columns = (found.group, found.members, found.op, found.bytes)
    for group, members, op, size in zip(*(each[chosen].tolist() for each in columns), strict=True):
        total = totals.setdefault((group, members), Counter())
        total[op] += 1
        if op == "allreduce":  # ranks may gather or scatter parts of unlike sizes
            total["bytes"] += size
    return {
        group: {name: amount / len(steps.number) for name, amount in total.items()}
        for group, total in totals.items()
    }


def _kinds(trace: Trace, by_launch: Launched, pattern: re.Pattern[str] | None) -> NDArray[np.int8]:
    """Return the known kind of each work of a device; copies and fills are no computation."""
    by_name = kinds_of(trace.names, pattern)
    kinds = by_name[trace.work["name"]]
    is_kernel = trace.work["kind"] == 0
    kinds[is_kernel & (trace.work["note"] >= 0)] = Known.COMMUNICATES
    unknown = np.flatnonzero(is_kernel & (kinds == Known.NOTHING))
    kinds[unknown[is_inside_a_mark(trace, by_launch, unknown)]] = Known.COMMUNICATES
    # Kernels on streams that only communicate, as far as names tell, communicate too.
    _, lane = trace.lanes()
    computes = np.bincount(lane, kinds == Known.COMPUTES)
    communicates = np.bincount(lane, kinds == Known.COMMUNICATES)
    is_beside = np.asarray((communicates > 0) & (computes == 0))[lane]
    kinds[is_beside & is_kernel & (kinds == Known.NOTHING)] = Known.COMMUNICATES
    kinds[~is_kernel & (kinds != Known.COMMUNICATES)] = Known.NOTHING
    return kinds


def _device_tables(
    trace: Trace, steps: Steps, by_launch: Launched, kinds: NDArray[np.int8]
) -> Tables:
    work = trace.work
    is_kernel = work["kind"] == 0
    sending = np.flatnonzero(kinds == Known.COMMUNICATES)
    found, of_work = found_collectives.of_kernels(trace, steps, by_launch, sending)
    lane = np.where(is_kernel, "compute", "host").astype(object)
    lane[sending] = "communication"
    in_spans = np.ones(len(kinds), bool)
    in_spans[of_work] = False
    rows = np.flatnonzero(in_spans)
    names = np.empty(len(trace.names), object)  # shortened, and apart from the Run's own names
    names[:] = [span_name(name) for name in trace.names]
    end_ns = work["start_ns"] + work["duration_ns"]
    spans = _spans(
        steps.numbered(by_launch.step[rows]),
        lane[rows],
        names[work["name"][rows]],
        work["start_ns"][rows],
        end_ns[rows],
    )
    computes = is_kernel & (kinds != Known.COMMUNICATES)
    marks = _marked(steps, *on_device(trace, steps, by_launch.step, computes))
    window = (int(work["start_ns"].min()), int(end_ns.max()))
    sent = found_collectives.sent_on_device(
        trace, steps, by_launch, computes, found, by_launch.time_ns[of_work]
    )
    spans = Spans.joined([spans, marks, sent.passes, _loading(trace, steps, window)])
    operations = _operations(trace, steps)
    return Tables(spans=spans, sent=sent, found=found, operations=operations)


def _operations(trace: Trace, steps: Steps) -> Operations:
    """Return each step's operations, those of one name and shape together."""
    shaped = trace.shaped
    starts_ns = np.array([kernel.start_ns for kernel in shaped], np.int64)
    calls: Counter[tuple[int, str, str, str]] = Counter()
    busy_ns: Counter[tuple[int, str, str, str]] = Counter()
    step = steps.numbered(steps.of(starts_ns)).tolist()
    for each, number in zip(shaped, step, strict=True):
        key = (number, each.name, each.shapes, each.dtype)
        calls[key] += 1
        busy_ns[key] += each.busy_ns
    for key in [key for key, total_ns in busy_ns.items() if total_ns > MOST_US * 1000]:
        del calls[key], busy_ns[key]  # a damaged trace: no step lasts that long
    columns = list(zip(*calls, strict=True)) if calls else [(), (), (), ()]
    return Operations(
        rank=np.zeros(len(calls), np.int64),
        step=np.array(columns[0], np.int64),
        name=np.array(columns[1], object),
        shapes=np.array(columns[2], object),
        dtype=np.array(columns[3], object),
        calls=np.array(list(calls.values()), np.int64),
        busy_ns=np.array(list(busy_ns.values()), np.int64),
    )


def _processor_spans(trace: Trace, steps: Steps) -> Spans:
    """Return operators as computation, for a job whose trace lacks a device."""
    lane = "host" if _lacks_its_devices(trace) else "compute"
    # Operators that lie side by side or inside each other make one span.
    computes = ~found_collectives.within_marks(trace)
    operators = trace.operators
    own_ns = operators["start_ns"][computes], operators["end_ns"][computes]
    calls_ns = found_collectives.waits_of_calls(trace)
    waits_ns = [np.concatenate(each) for each in zip(trace.waits_ns, calls_ns, strict=True)]
    ends_ns = *own_ns, *waits_ns
    times_ns = np.concatenate(ends_ns)
    order = np.argsort(times_ns, kind="stable")
    # Each thread has one operator at a time. A wait takes its thread out, while others compute.
    threads = np.cumsum(np.repeat((1, -1, -1, 1), [len(part) for part in ends_ns])[order])
    times_ns, working = times_ns[order], threads[:-1] > 0
    start_ns, end_ns = union(times_ns[:-1][working], times_ns[1:][working])
    start_ns, end_ns = without((start_ns, end_ns), trace.hooks_wait_ns)
    count = len(start_ns)
    spans = _spans(
        steps.numbered(steps.of(start_ns)),
        np.full(count, lane, object),
        np.full(count, "operators", object),
        start_ns,
        end_ns,
    )
    marks = _marked(steps, steps.start_ns, steps.end_ns)
    window = (-(2**62), 2**62)
    return Spans.joined([spans, marks, _loading(trace, steps, window)])


def _lacks_its_devices(trace: Trace) -> bool:
    """Say whether the trace of a job with devices lacks them: its operators are only launches."""
    is_of_devices = bool({trace.backend, *trace.libraries} & {"nccl", "rccl"})
    return is_of_devices and not len(trace.work["kind"])


def _marked(steps: Steps, start_ns: Whole, end_ns: Whole) -> Spans:
    kept = end_ns > start_ns
    count = int(kept.sum())
    return _spans(
        steps.number[kept],
        np.full(count, "host", object),
        np.full(count, "step", object),
        start_ns[kept],
        end_ns[kept],
    )


def _loading(trace: Trace, steps: Steps, window: tuple[int, int]) -> Spans:
    is_loading = np.array([name.startswith(_LOADING) for name in trace.names])
    rows = np.flatnonzero(is_loading[trace.marks["name"]])
    begin_ns = trace.marks["start_ns"][rows]
    start_ns = np.maximum(begin_ns, window[0])
    end_ns = np.minimum(begin_ns + trace.marks["duration_ns"][rows], window[1])
    kept = end_ns > start_ns
    count = int(kept.sum())
    return _spans(
        steps.numbered(steps.of(begin_ns[kept])),
        np.full(count, "input", object),
        np.full(count, "DataLoader", object),
        start_ns[kept],
        end_ns[kept],
    )


def _spans(step: Whole, lane: Text, name: Text, start_ns: Whole, end_ns: Whole) -> Spans:
    return Spans(
        rank=np.zeros(len(step), np.int64),
        step=step,
        lane=lane,
        name=name,
        start_ns=start_ns,
        end_ns=end_ns,
    )
