"""Find the collectives of one rank: from a device's kernels, or from marks on the processor.

A sum that is launched in a backward pass carries gradients. On a device, the sums of layers that
are split over ranks are told apart (`run/split_layers.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fullwire.importers.kineto.calls import (
    at,
    is_of_a_library,
    marks_around,
    parts_of_batches,
    tells_an_operation,
)
from fullwire.importers.kineto.gloo import DefaultGroup, Threads, groups_of_threads, threads_of
from fullwire.importers.kineto.recognise import dtype_of, op_of
from fullwire.importers.kineto.scan import ABSENT, MOST_RANKS, Group, Trace, last_around
from fullwire.importers.kineto.steps import Launched, Steps, passes_of_work
from fullwire.run.kinds import EARLIER, LAST, QUEUED
from fullwire.run.run import SIZE_UNKNOWN, Collectives, Gradients, Spans, Text, Whole
from fullwire.run.split_layers import LEAST_BYTES, are_of_split_layers

# Libraries whose marks last as long as the collective; NCCL's last as long as its launch.
_TIMED_LIBRARIES = ("gloo:", "mpi:", "ucc:", "fullwire:")
_GATHERS = ("allgather", "gather")
_MAY_SEND_NOTHING = ("barrier", "alltoall")
_MOST_BYTES = 2**50
_HANDED_OVER_NS = 5_000_000  # the last bucket leaves at most this long after the last operator
_SOON_NS, _SOON = 500_000, 0.2  # after a wait a thread goes on so soon, or by this share of it
_AS_MANY = 0.05  # of the shards' bytes: sums that differ by less add up the shards
_NEXT_TO_NOTHING = 0.01  # of the scattered bytes: sums of fewer are no gradients
_STEP_SEQUENCE = 2**20  # sequences count within a step, as ranks may begin at different steps


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Found:
    """A rank's collectives before numbering, with each group's ranks as the trace lists them."""

    op: Text
    group: Text
    members: Text
    dtype: Text
    bytes: Whole
    is_unlike: NDArray[np.bool_]  # a matrix, or more, of other sizes than any gradient
    ranks: Whole  # in the group; below 2 where the trace does not tell them
    sequence: Whole  # as the trace gives it, or ABSENT
    step: Whole  # number
    called_ns: Whole  # when the job called it, where that is told; else its issue
    issue_ns: Whole
    end_ns: Whole

    @property
    def group_ranks(self) -> dict[str, int]:
        """Return how many ranks each group has, and 0 where its collectives do not agree on it."""
        pairs = {*zip(self.group.tolist(), self.ranks.tolist(), strict=True)}
        told = Counter(name for name, _ in pairs)
        is_size = {name: told[name] == 1 and 1 < ranks <= MOST_RANKS for name, ranks in pairs}
        return {name: ranks if is_size[name] else 0 for name, ranks in pairs}


def of_kernels(
    trace: Trace, steps: Steps, launched: Launched, rows: NDArray[np.intp]
) -> tuple[Found, NDArray[np.intp]]:
    """Describe the communication kernels with a known operation; the second value tells which.

    A kernel that carries several transfers has a row for each.
    """
    work = trace.work
    rows = rows[np.argsort(work["start_ns"][rows], kind="stable")]
    rows, note = parts_of_batches(trace, launched, rows)
    arguments = marks_around(trace, launched, rows, tells_an_operation(trace))
    mark = marks_around(trace, launched, rows, is_of_a_library(trace))
    note = np.where(note < 0, work["note"][rows], note)
    for other in (arguments, mark):
        note = np.where((note < 0) & (other >= 0), at(trace.marks["note"], other), note)
    ops = _texts([op_of(name) for name in trace.names])
    mark_ops = np.where(mark >= 0, ops[at(trace.marks["name"], mark)], "")
    # A group without a name gets the place of its stream among all streams. The streams' own
    # numbers may differ between ranks. Their order of use depends on where a trace begins.
    streams = list(zip(work["device"][rows].tolist(), work["stream"][rows].tolist(), strict=True))
    number = {stream: place for place, stream in enumerate(sorted(set(streams)))}
    found = _found(
        trace,
        note,
        [mark_ops, ops[work["name"][rows]]],
        _texts([f"stream {number[stream]}" for stream in streams]),
        steps.numbered(launched.step[rows]),
        work["start_ns"][rows],
        work["duration_ns"][rows],
    )
    named = np.flatnonzero(found.op != "")
    named = named[np.argsort(rows[named], kind="stable")]
    ordered = Found(**{name: getattr(found, name)[named] for name in Found.__slots__})
    return ordered, rows[named]


def of_marks(trace: Trace, steps: Steps, default: DefaultGroup) -> tuple[Found, Threads | None]:
    """Describe the collectives that libraries mark on the processor, from start to end.

    The second value is the evidence of their threads for their groups.
    """
    rows = np.flatnonzero(_is_timed(trace))
    rows = rows[np.argsort(trace.marks["start_ns"][rows], kind="stable")]
    ops = _texts([op_of(name.partition(":")[2]) for name in trace.names])
    start_ns, duration_ns = trace.marks["start_ns"][rows], trace.marks["duration_ns"][rows]
    found = _found(
        trace,
        trace.marks["note"][rows],
        [ops[trace.marks["name"][rows]]],
        _texts([""] * len(rows)),
        steps.numbered(steps.of(start_ns)),
        start_ns,
        duration_ns,
        groups_of_threads(trace, rows, default),
    )
    return found, threads_of(trace, steps, rows)


def within_marks(trace: Trace) -> NDArray[np.bool_]:
    """Say which operators are a part of a collective: Gloo copies parts while it gathers them.

    They are those of threads that do nothing else. A mark of our backend lies on the thread that
    issued the collective and computes meanwhile.
    """
    marks, operators = trace.marks, trace.operators
    place = last_around(
        marks["start_ns"],
        marks["start_ns"] + marks["duration_ns"],
        marks["thread"],
        _is_timed(trace),
        operators["start_ns"],
        operators["thread"],
    )
    elsewhere = operators["thread"][place < 0]
    return np.asarray((place >= 0) & ~np.isin(operators["thread"], elsewhere))


def waits_of_calls(trace: Trace) -> tuple[Whole, Whole]:
    """Return when threads waited, within an operator, for a collective that they had called.

    A layer that is split over ranks may call collectives in an autograd function of its own, which
    lasts until they end. The thread goes on after the last end of a collective before its next
    operator. After a call that does not wait, the next operator begins before such an end, or long
    after it: meanwhile the operator computes.
    """
    marks, pauses = trace.marks, trace.pauses
    rows = np.flatnonzero(_is_timed(trace))
    ends_ns = np.sort(marks["start_ns"][rows] + marks["duration_ns"][rows])
    last = np.searchsorted(ends_ns, pauses["end_ns"], side="right")
    last_ns = np.append([ABSENT], ends_ns)[last]
    waited_ns, late_ns = last_ns - pauses["start_ns"], pauses["end_ns"] - last_ns
    is_soon = late_ns <= np.maximum(_SOON_NS, _SOON * waited_ns)
    waited = (last_ns > pauses["start_ns"]) & is_soon
    return pauses["start_ns"][waited], last_ns[waited]


def _is_timed(trace: Trace) -> NDArray[np.bool_]:
    is_timed = np.array([name.startswith(_TIMED_LIBRARIES) for name in trace.names], bool)
    return np.asarray(is_timed[trace.marks["name"]])


def numbered(
    collectives: Found, uses_own: frozenset[str], ambiguous: frozenset[str]
) -> Collectives:
    """Number the collectives of each group by step; groups in `uses_own` keep their own numbers.

    Collectives are counted in the order of time, which may differ from the order of the file. If a
    group's name is `ambiguous` (it has several lists of members), the members become part of it.
    """
    group = [
        f"{name} {members}" if name in ambiguous else name
        for name, members in zip(
            collectives.group.tolist(), collectives.members.tolist(), strict=True
        )
    ]
    count: Counter[tuple[str, str, int]] = Counter()
    sequence = collectives.sequence.tolist()
    names, keys = (
        collectives.group.tolist(),
        list(zip(group, collectives.op, collectives.step.tolist(), strict=True)),
    )
    for row in np.argsort(collectives.issue_ns, kind="stable").tolist():
        if names[row] not in uses_own:
            key = keys[row]
            sequence[row] = (key[2] + 1) * _STEP_SEQUENCE + count[key]
            count[key] += 1
    return Collectives(
        rank=np.zeros(len(collectives.op), np.int64),
        step=collectives.step,
        sequence=np.array(sequence, np.int64),
        group=_texts(group),
        op=collectives.op,
        dtype=collectives.dtype,
        bytes=collectives.bytes,
        issue_ns=collectives.issue_ns,
        start_ns=collectives.issue_ns,
        end_ns=collectives.end_ns,
    )


def _found(
    trace: Trace,
    note: Whole,
    ops: list[Text],
    unnamed: Text,
    step: Whole,
    start_ns: Whole,
    duration_ns: Whole,
    own: Sequence[Group] = (),
) -> Found:
    """Describe collectives; `own` are their groups, where other things than notes tell them."""
    rows = _described(trace, note)
    ranks = np.where(note >= 0, at(trace.notes["group_size"], note), 0)
    if own:
        ranks = np.array([of.ranks for of in own], np.int64)
        rows = [
            replace(row, group=of.name, members=of.members)
            for row, of in zip(rows, own, strict=True)
        ]
    among = ranks.tolist()
    op, group, members, dtype, size = [], [], [], [], []
    for place, row in enumerate(rows):
        named = row.op or next((str(op[place]) for op in ops if op[place]), "")
        op.append(named)
        group.append(row.group or str(unnamed[place]))
        members.append(row.members)
        amount = row.bytes(named, trace.gathered, among[place])
        size.append(max(amount, 0))
        dtype.append(row.dtype if amount >= 0 or named == "barrier" else SIZE_UNKNOWN)
    elements = np.maximum(
        at(trace.notes["in_elements"], note), at(trace.notes["first_input_elements"], note)
    )
    is_unlike = np.isin(elements, sorted(trace.unlike_gradients)) & (note >= 0)
    # The inputs of a pipeline's later stages have gradients, too, of the sizes of its layers' sums.
    is_unlike &= (np.array(op) == "allreduce") & ("send" not in op) & ("recv" not in op)
    called_ns = start_ns.copy()
    for number, times_ns in trace.called.items():
        mine = np.flatnonzero((elements == number) & (np.array(op) == "allreduce"))
        mine = mine[np.argsort(start_ns[mine], kind="stable")]
        # Calls of one size begin in their order. At the edges of a trace, some lack the other part.
        if len(mine) == len(times_ns) and (times_ns <= start_ns[mine]).all():
            called_ns[mine] = times_ns
    sequence = trace.notes["sequence"]
    told = np.where(note >= 0, at(sequence, note), ABSENT)
    return Found(
        op=_texts(op),
        group=_texts(group),
        members=_texts(members),
        dtype=_texts(dtype),
        bytes=np.array(size, np.int64),
        is_unlike=is_unlike,
        ranks=ranks,
        sequence=told,
        step=step,
        called_ns=called_ns,
        issue_ns=start_ns,
        end_ns=start_ns + duration_ns,
    )


@dataclass(frozen=True, slots=True)
class _Described:
    """The description of a collective by its arguments."""

    op: str = ""
    group: str = ""
    members: str = ""
    dtype: str = ""
    item_bytes: int = 0
    elements: int = -1  # number of elements of its larger side
    first_elements: int = -1  # those of its first input, where the rest is unknown

    def bytes(self, op: str, gathered: Mapping[int, int], ranks: int) -> int:
        """Return the bytes of the larger side; below 0 if they are unknown."""
        if not self.item_bytes:
            return 0 if op == "barrier" else -1
        elements = self.elements
        if elements < 0:  # in a gathering, the input is the smaller side
            first = self.first_elements
            whole = first * ranks if ranks > 1 else -1
            elements = gathered.get(first, whole) if op in _GATHERS else first
        size = elements * self.item_bytes
        least = 0 if op in _MAY_SEND_NOTHING else 1  # a coalesced one says 0 but sends bytes
        return size if least <= size <= _MOST_BYTES else -1


_TOLD = (
    "op",
    "dtype",
    "first_input_type",
    "group",
    "ranks",
    "in_elements",
    "out_elements",
    "first_input_elements",
    "source",
    "target",
)


def _described(trace: Trace, note: Whole) -> list[_Described]:
    """Describe the notes' collectives; steps repeat notes, so each note is decoded once."""
    known: dict[tuple[int, ...], _Described] = {}
    found = []
    columns = [at(trace.notes[name], note).tolist() for name in _TOLD]
    for row, told in zip(note.tolist(), zip(*columns, strict=True), strict=True):
        if row < 0:
            found.append(_Described())
            continue
        if told not in known:
            op, dtype, first_type, group, ranks, inputs, outputs, first, source, target = told
            type_name, item_bytes = dtype_of(trace.names[dtype] or trace.names[first_type])
            op_name, group_name = op_of(trace.names[op]), trace.names[group]
            if op_name in ("send", "recv") and min(source, target) >= 0:
                group_name += f" {source}>{target}"
            known[told] = _Described(
                op_name,
                group_name,
                trace.names[ranks],
                type_name,
                item_bytes,
                max(inputs, outputs, -1),
                max(first, -1),
            )
        found.append(known[told])
    return found


def _texts(values: list[str]) -> Text:
    column = np.empty(len(values), object)
    column[:] = values
    return column


class Backward(NamedTuple):
    """The work of backward passes: the place of its step, its launch, its beginning, its end."""

    step: Whole
    launched_ns: Whole | None  # None on the processor, where work is its own launch
    start_ns: Whole
    end_ns: Whole
    of_pass: Whole | None = None  # the place of its pass in the step, where it is known


@dataclass(frozen=True, eq=False, slots=True)
class SentBackward:
    """The backward pass of each step, and the sums of gradients that leave it."""

    passes: Spans  # from the first to the last of each step, and those before; queued transfers
    gradients: Gradients
    are_buckets: bool  # all-reduces; else the scatters of a sharded model, or none

    @property
    def usual_passes(self) -> int | None:
        """Return the passes of a usual step; None where no step has one."""
        names, steps = self.passes.name, self.passes.step
        whole = np.sort(steps[names == LAST])
        if not len(whole):
            return None
        earlier = np.bincount(np.searchsorted(whole, steps[names == EARLIER]), minlength=len(whole))
        return 1 + round(float(np.median(earlier)))


def sent_backward(
    steps: Steps,
    backward: Backward,
    found: Found,
    issued_ns: Whole,
    ready_ns: Whole,
    worked_ns: Whole | None = None,
) -> SentBackward:
    """Find each step's backward pass, and the sums of gradients that leave it.

    `issued_ns` is each collective's launch, `ready_ns` the end of the work launched before it, and
    `worked_ns` the last launch of that work, which devices tell.
    """
    start_ns, end_ns = _extent(steps, backward.step, backward.start_ns, backward.end_ns)
    launches = start_ns, end_ns
    if backward.launched_ns is not None:
        launches = _extent(steps, backward.step, backward.launched_ns, backward.launched_ns)
    kept = end_ns > start_ns
    marks = _marks(steps.number[kept], LAST, start_ns[kept], end_ns[kept])
    place = np.searchsorted(steps.number, found.step)
    place = np.minimum(place, max(len(steps.number) - 1, 0))
    is_sum = np.zeros(len(found.step), bool)
    if len(steps.number):
        is_inside = (found.bytes > 0) & (found.step >= 0) & kept[place] & (issued_ns != ABSENT)
        is_before = is_inside & (issued_ns < launches[0][place])
        is_sum = is_inside & ~is_before & np.isin(found.op, ("allreduce", "reducescatter"))
        is_sum &= issued_ns <= np.minimum(launches[1], 2**62)[place] + _HANDED_OVER_NS
        which = (found.group, found.op, found.bytes, found.step.tolist())
        on_processors = backward.launched_ns is None
        is_layers = are_of_split_layers(*which, is_before, is_sum, as_many=on_processors)
        is_scatter = found.op == "reducescatter"
        # A group that scatters activations scatters no gradients.
        of_layers = set(found.group[is_layers & is_scatter].tolist())
        is_layers |= is_scatter & np.array([name in of_layers for name in found.group], bool)
        # A layer may sum in its backward pass alone, and gather in the forward pass.
        if on_processors:
            is_layers |= found.is_unlike & (issued_ns <= launches[1][place])
        is_sum &= ~is_layers
    if len(steps.number) and worked_ns is not None:
        # A norm that is summed after the pass is no gradient: kernels came between, as it was made
        # of the gradients. A stage of a pipeline may have no other sum, and keeps its gradients.
        is_small = is_sum & (found.bytes < LEAST_BYTES)
        is_norm = is_small & (worked_ns > launches[1][place])
        if (is_sum & ~is_norm).any():
            is_sum &= ~is_norm
        elif np.isin(found.op, ("send", "recv", "sendrecv")).any():
            is_sum &= ~(is_small & (issued_ns > launches[1][place]))
    is_bucket = is_sum & (found.op == "allreduce")
    is_sharded = are_scattered(found, is_bucket, is_sum & ~is_bucket)
    rows = np.flatnonzero(is_sum & ~is_bucket if is_sharded else is_bucket)
    rows = rows[np.lexsort((ready_ns[rows], found.step[rows]))]
    gradients = Gradients(
        rank=np.zeros(len(rows), np.int64),
        step=found.step[rows],
        order=np.arange(len(rows)) - np.searchsorted(found.step[rows], found.step[rows]),
        bytes=found.bytes[rows],
        ready_ns=ready_ns[rows],
    )
    marks = Spans.joined([marks, _earlier_passes(steps, backward)])
    return SentBackward(marks, gradients, are_buckets=bool(len(rows)) and not is_sharded)


def _earlier_passes(steps: Steps, backward: Backward) -> Spans:
    """Return the backward passes of each step before its last, where passes are known."""
    if backward.of_pass is None or not len(backward.step):
        return Spans.empty()
    most = int(backward.of_pass.max()) + 1
    place, of_row = np.unique(backward.step * most + backward.of_pass, return_inverse=True)
    start_ns, end_ns = np.full(len(place), -ABSENT - 1), np.full(len(place), ABSENT)
    np.minimum.at(start_ns, of_row.reshape(-1), backward.start_ns)
    np.maximum.at(end_ns, of_row.reshape(-1), backward.end_ns)
    step = place // most
    is_earlier = np.append(step[1:] == step[:-1], [False])
    number = steps.number[step[is_earlier]]
    return _marks(number, EARLIER, start_ns[is_earlier], end_ns[is_earlier])


def _marks(step: Whole, name: str, start_ns: Whole, end_ns: Whole) -> Spans:
    return Spans(
        rank=np.zeros(len(step), np.int64),
        step=step,
        lane=np.full(len(step), "host", object),
        name=np.full(len(step), name, object),
        start_ns=start_ns,
        end_ns=end_ns,
    )


def sent_on_device(
    trace: Trace,
    steps: Steps,
    launched: Launched,
    computes: NDArray[np.bool_],
    found: Found,
    issued_ns: Whole,
) -> SentBackward:
    """Find each step's backward pass and the buckets that leave it, which a what-if replays.

    Autograd's operators launch the pass. It lasts from the first kernel that they launched to the
    end of the last. A sum of gradients is ready when the kernels launched before it have ended.
    `issued_ns` is each collective's launch.
    """
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
    begin_ns = trace.work["start_ns"][mine]
    end_ns = begin_ns + trace.work["duration_ns"][mine]
    known = np.flatnonzero(computes & (launched.step >= 0) & (launched.time_ns != ABSENT))
    of_pass = np.full(len(computes), -1)
    of_pass[known] = passes_of_work(
        launched.step[known],
        launched.time_ns[known],
        trace.work["duration_ns"][known],
        around[known] >= 0,
    )
    backward = Backward(
        launched.step[mine], launched.time_ns[mine], begin_ns, end_ns, of_pass[mine]
    )
    # For each moment, the end of all computation launched before it.
    rows = np.flatnonzero(computes & (launched.time_ns != ABSENT))
    rows = rows[np.argsort(launched.time_ns[rows], kind="stable")]
    end_ns = np.maximum.accumulate((trace.work["start_ns"] + trace.work["duration_ns"])[rows])
    place = np.searchsorted(launched.time_ns[rows], issued_ns, side="right")
    worked_ns = np.append([ABSENT], launched.time_ns[rows])[place]
    ready_ns = np.append([ABSENT], end_ns)[place]
    ready_ns = np.minimum(np.maximum(ready_ns, issued_ns), found.issue_ns)
    sent = sent_backward(steps, backward, found, issued_ns, ready_ns, worked_ns)
    queued = np.flatnonzero((found.op == "send") & (found.step >= 0) & (ready_ns < found.issue_ns))
    marks = _marks(found.step[queued], QUEUED, ready_ns[queued], found.issue_ns[queued])
    return replace(sent, passes=Spans.joined([sent.passes, marks]))


def are_scattered(
    found: Found, is_bucket: NDArray[np.bool_], is_scatter: NDArray[np.bool_]
) -> bool:
    """Return whether the scatters of a backward pass carry the gradients, and no all-reduces do.

    Replicas of a sharded model add up what was scattered, in another group. A sum of a norm or of a
    loss has next to no bytes. All other all-reduces carry gradients.
    """
    if not is_bucket.any():
        return bool(is_scatter.any())
    gathering = set(found.group[found.op == "allgather"].tolist())  # the weights
    is_shard = is_scatter & np.array([name in gathering for name in found.group.tolist()], bool)
    sharding = set(found.group[is_shard].tolist())
    of_ranks = is_shard & (found.ranks > 1)
    shard_bytes = float((found.bytes[of_ranks] / found.ranks[of_ranks]).sum())
    summed_bytes: Counter[str] = Counter()
    for group, size in zip(found.group[is_bucket], found.bytes[is_bucket].tolist(), strict=True):
        summed_bytes[group] += size
    few = _NEXT_TO_NOTHING * float(found.bytes[is_shard].sum(dtype=np.float64))
    return all(
        size <= few or (group not in sharding and abs(size - shard_bytes) <= _AS_MANY * shard_bytes)
        for group, size in summed_bytes.items()
    )


def _extent(steps: Steps, step: Whole, start_ns: Whole, end_ns: Whole) -> tuple[Whole, Whole]:
    """Return by step the first start and the last end; an empty step ends before it starts."""
    first = np.full(len(steps.number), -ABSENT - 1)
    last = np.full(len(steps.number), ABSENT)
    np.minimum.at(first, step, start_ns)
    np.maximum.at(last, step, end_ns)
    return first, last
