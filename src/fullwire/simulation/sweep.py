"""A grid of conditions for one run or several, computed together.

numpy computes blocks of points that fit the processor's cache. The result keeps the grid's axes
apart from its measures: a million rows take the memory of the measures only. A single point is
played to a run, which is explained and drawn like any other (`replay`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from fullwire.clusters.cluster import with_workers
from fullwire.collectives.cost import Floats
from fullwire.crew import ALONE, Crew
from fullwire.errors import UsageError
from fullwire.run.facts import Facts
from fullwire.run.kinds import EARLIER, EARLIER_FORWARD, LAST, LAYERS
from fullwire.run.run import SLOWED, Collectives, Gradients, Lane, Provenance, Run, Spans, Whole
from fullwire.simulation.beside_layers import Course, Stages
from fullwire.simulation.grid import (
    AXES,
    BUCKET,
    MEASURES,
    Grid,
    Predictions,
    Residue,
    Subject,
    shaped,
    synchronising,
)
from fullwire.simulation.messages import Exposed, Messages, messages_of
from fullwire.simulation.of_kinds import apart, as_means
from fullwire.simulation.schedule import (
    Timeline,
    fifo_timeline,
    meetings_s,
    of_computing_alone,
    priority_timeline,
    timeline_of,
)
from fullwire.simulation.stacked import StackedStep, stacks
from fullwire.simulation.step import Step
from fullwire.simulation.stragglers import Jitter, NoJitter
from fullwire.simulation.transport import MeasuredTransport, Transport
from fullwire.simulation.written_steps import Lasting, in_stages, with_shards

Progress: TypeAlias = Callable[[int, int], None]

BESIDE_BUCKETS = "other collectives"  # in a written step: their time, and not each of them
BLOCK_POINTS = 16_384  # three arrays of so many numbers fit the second-level cache
PIECE_POINTS = 2**18  # some 10 MB of measures, computed at once, here or elsewhere
MOST_POINTS = 100_000_000  # 4 GB of measures
_PLACE_OF_WORKERS = 4  # among the axes of a piece, which has no run, buckets and the like
# Facts that the conditions leave as they are.
_KEPT = ("model", "device", "batch", "precision", "efficiency", "reduce_cost", "hook", "backend")


def sweep(
    subjects: Sequence[Subject], grid: Grid, progress: Progress | None = None, crew: Crew = ALONE
) -> Predictions:
    """Predict every point of the grid for every subject."""
    if any(subject.kinds for subject in subjects):
        return as_means(subjects, sweep(apart(subjects), grid, progress, crew))
    values = (
        tuple(subject.name for subject in subjects),
        grid.buckets,
        grid.algorithms,
        grid.transports,
        grid.latency_s,
        grid.accumulate,
        grid.local_steps,
        grid.jitters,
        grid.workers,
        grid.bandwidth_bps,
        grid.compressors,
    )
    axes: dict[str, tuple[Any, ...]] = dict(zip(AXES, values, strict=True))
    shape = tuple(len(values) for values in axes.values())
    total = int(np.prod([float(size) for size in shape]))
    if total > MOST_POINTS:
        raise UsageError(f"a grid of {total:,} points: expected at most {MOST_POINTS:,}")
    measures = {name: np.empty(shape) for name in MEASURES}
    # Pieces with the same cluster sizes come in a row, since they share routes.
    varied = (grid.buckets, grid.algorithms, grid.latency_s)
    others = (
        grid.transports,
        grid.accumulate,
        grid.local_steps,
        grid.jitters,
        grid.bandwidth_bps,
        grid.compressors,
    )
    together = max(1, PIECE_POINTS // math.prod(map(len, others)))
    if grid.cluster is not None and not grid.cluster.is_flat:
        together = 1  # one size of a described cluster takes long enough alone
    sizes = [slice(first, first + together) for first in range(0, len(grid.workers), together)]
    if grid.own_workers is not None:
        sizes = [slice(None)]
    of_runs = stacks(subjects, grid, BLOCK_POINTS)
    places = itertools.product(sizes, of_runs, *(range(len(axis)) for axis in varied))
    pieces = list(itertools.starmap(_Piece, places))
    parts = [{name: piece.part(all_) for name, all_ in measures.items()} for piece in pieces]
    predicted = partial(_predicted, subjects, grid)
    if crew is ALONE:  # then each piece is computed in its place
        computed: Iterator[dict[str, Floats]] = map(predicted, pieces, parts)
    else:
        computed = crew.each(predicted, pieces)
    done = 0
    for part, measured in zip(parts, computed, strict=True):
        if measured is not part:
            for name, measure in part.items():
                measure[...] = measured[name]
        done += part["step_s"].size
        if progress:
            progress(done, total)
    # Two more depend only on the run.
    by_run, steps = shaped(run=len(subjects)), [subject.step for subject in subjects]
    measures["baseline_step_s"] = np.array([step.alone_ns * 1e-9 for step in steps]).reshape(by_run)
    measures["backward_s"] = np.array([step.backward_ns * 1e-9 for step in steps]).reshape(by_run)
    passes = tuple(subject.passes for subject in subjects)
    return Predictions(axes=axes, measures=measures, passes=passes)


@dataclass(frozen=True, eq=False, slots=True)
class _Piece:
    """A piece that is computed at once, by its places on the axes: all points of some messages."""

    sizes: slice  # of the workers
    runs: slice  # one, or a stack of them with one size
    buckets: int
    algorithm: int
    latency: int

    def part(self, measure: Floats) -> Floats:
        """Return its part of a measure, where the runs of a stack take the place of the workers."""
        whole = slice(None)
        messages = (self.runs, self.buckets, self.algorithm, whole, self.latency)
        part: Floats = measure[(*messages, whole, whole, whole, self.sizes)]
        if len(part) == 1:
            [part] = part
            return part
        return np.moveaxis(part[..., 0, :, :], 0, _PLACE_OF_WORKERS)


def _predicted(
    subjects: Sequence[Subject], grid: Grid, piece: _Piece, out: dict[str, Floats] | None = None
) -> dict[str, Floats]:
    """Compute the measures of one piece, block by block; `out` holds them if it is given."""
    stack, grid = subjects[piece.runs], grid.among(piece.runs)
    subject = stack[0]
    if len(stack) > 1:
        subject = replace(subject, step=StackedStep.of([each.step for each in stack]))
    messages = messages_of(
        subject,
        grid.buckets[piece.buckets],
        grid.algorithms[piece.algorithm],
        grid.latency_s[piece.latency],
        grid,
        piece.sizes,
    )
    rows = max(len(messages.workers), len(stack))
    shape = (
        len(grid.transports),
        len(grid.accumulate),
        len(grid.local_steps),
        len(grid.jitters),
        rows,
        len(grid.bandwidth_bps),
        len(grid.compressors),
    )
    measures = out or {name: np.empty(shape) for name in MEASURES}
    rate_bps = np.array(grid.bandwidth_bps)[None, :, None]
    ratio = np.array([codec.ratio for codec in grid.compressors])[None, None, :]
    baseline_s = messages.subject.step.alone_ns * 1e-9
    residues = messages.subject.residues
    blocks = list(_blocks(rows, len(grid.bandwidth_bps), ratio.size))
    groups = _alike(grid, math.prod(shape[4:]))
    for together, (sizes, rates) in itertools.product(groups, blocks):
        transports = grid.transports[together]
        left = [residues[number % len(residues)] for number in range(*together.indices(shape[0]))]
        transport, residue = transports[0], left[0]
        if len(left) > 1:
            transport, residue = MeasuredTransport.stacked(transports), Residue.stacked(left)
        asked = (sizes, rate_bps[:, rates], transport, ratio)
        exposed = messages.exposed(*asked)
        used_s = messages.sent_bits(*asked) / rate_bps[:, rates]
        for place, (accumulate, local_steps, jitter) in synchronising(grid):
            here: Any = (together, *place, sizes, rates)
            overhead_s = messages.overhead_s(
                exposed, sizes, transport, residue, accumulate, local_steps, jitter
            )
            apart = accumulate * local_steps
            measures["overhead_s"][here] = overhead_s
            measures["communication_s"][here] = exposed.busy_s / apart + exposed.instead_s
            step_s = np.add(baseline_s, overhead_s, out=measures["step_s"][here])
            with np.errstate(divide="ignore", invalid="ignore"):  # a step of 0 is refused later
                np.divide(baseline_s, step_s, out=measures["scaling_factor"][here])
                link_s = used_s / apart
                if messages.others:
                    all_s, of_some_s = (
                        messages.others_bits(sizes, accumulate, of_all=of_all) / rate_bps[:, rates]
                        for of_all in (True, False)
                    )
                    all_s = all_s if subject.step.sends_no_buckets else all_s + link_s
                    link_s = all_s if subject.step.others.course is None else link_s
                    # Groups may have links of their own, so the line has at most a step's bits.
                    most_s = np.minimum(all_s + of_some_s, step_s)
                    link_s = np.where(link_s > step_s, link_s, most_s)
                np.divide(link_s, step_s, out=measures["network_utilization"][here])
    return measures


def _alike(grid: Grid, points: int) -> list[slice]:
    """Return the transports that are computed at once: measured ones in a row.

    Small grids ask for many of them, for their intervals, and then each array operation counts.
    """
    together: list[slice] = []
    is_measured = False
    for number, transport in enumerate(grid.transports):
        was_measured, is_measured = is_measured, isinstance(transport, MeasuredTransport)
        first = together[-1].start if together else 0
        if was_measured and is_measured and (number - first) * points < BLOCK_POINTS:
            together[-1] = slice(first, number + 1)
        else:
            together.append(slice(number, number + 1))
    return together


def _blocks(workers: int, rates: int, compressors: int) -> Iterator[tuple[slice, slice]]:
    rate_step = max(1, min(rates, BLOCK_POINTS // compressors))
    worker_step = max(1, BLOCK_POINTS // (compressors * rates))
    for first_worker in range(0, workers, worker_step):
        for first_rate in range(0, rates, rate_step):
            yield (
                slice(first_worker, first_worker + worker_step),
                slice(first_rate, first_rate + rate_step),
            )


def replay(run: Run, subject: Subject, point: Grid) -> Run:
    """Play the run's typical step under the conditions of a grid that has one point.

    All ranks do the same, so the first stands for them all; those of a pipeline do not. Times are
    rounded to nanoseconds.
    """
    written, course = _of_one_rank(run, subject, point), subject.step.others.course
    if not isinstance(course, Stages) or course.are_a_ring or point.workers == (1,):
        return written
    [rate_bps], [latency_s], [compressor] = point.bandwidth_bps, point.latency_s, point.compressors
    [transport], [jitter] = point.transports, point.jitters
    messages = messages_of(subject, point.buckets[0], point.algorithms[0], latency_s, point)
    asked = slice(None), np.array([[[rate_bps]]]), transport, np.array([[[compressor.ratio]]])
    exposed = messages.exposed(*asked)
    overhead_s, unexplained_s, late_s = _parts_of_overhead_s(messages, exposed, transport, jitter)
    step = subject.step
    of_messages_s = float(np.max(exposed.by_others_s + exposed.by_buckets_s))
    slowed_s = overhead_s - unexplained_s - late_s - of_messages_s - step.packing_ns * 1e-9
    slowed_s, recorded_s = max(slowed_s, 0.0), min(late_s, step.waiting_ns * 1e-9)
    lasting = Lasting(
        step_s=step.alone_ns * 1e-9 + overhead_s,
        own_s=step.alone_ns * 1e-9 + slowed_s + recorded_s,
        slowed_s=slowed_s,
        late_s=late_s - recorded_s,
        rest_s=step.others.rest_ns * 1e-9,
        each_s=messages.each_instead_s(asked[1], transport),
    )
    return in_stages(written, step, course, lasting, run)


def _of_one_rank(run: Run, subject: Subject, point: Grid) -> Run:
    """Return the step of one rank, which stands for all."""
    [workers], [rate_bps], [latency_s] = point.workers, point.bandwidth_bps, point.latency_s
    [compressor], [transport], [jitter] = point.compressors, point.transports, point.jitters
    [policy], [algorithm] = point.buckets, point.algorithms
    if subject.step.sends_no_buckets:
        subject = replace(subject, step=subject.step.without_waits())
    messages = messages_of(subject, policy, algorithm, latency_s, point)
    asked = slice(None), np.array([[[rate_bps]]]), transport, np.array([[[compressor.ratio]]])
    step = subject.step
    exposed = messages.exposed(*asked)
    overhead_s, unexplained_s, late_s = _parts_of_overhead_s(messages, exposed, transport, jitter)
    course, conditions, layers = step.others.course, Facts(), list[tuple[int, int]]()
    if isinstance(course, Course) and workers > 1:
        each_s = messages.each_instead_s(asked[1], transport)
        step, timeline, layers = with_shards(step, course, each_s, overhead_s - late_s)
    elif step.sends_no_buckets:
        timeline = messages.instead_timeline(asked[1], transport)
    else:
        if step.others.waits_ns:  # those of the recording's link
            step, buckets = of_computing_alone(step, messages.buckets)
            messages = replace(messages, buckets=buckets)
        is_fifo = point.lane == "fifo" or step.others.waits_ns
        on_lane = fifo_timeline if is_fifo else priority_timeline
        costs_s = [each_s[0, 0, 0] for each_s in messages.cost_s(*asked)]
        timeline = timeline_of(messages.subject.step, messages.buckets, on_lane, costs_s)
        conditions = Facts(
            buckets=str(policy),
            algorithm=algorithm,
            compression=None if compressor.is_none else str(compressor),
            lane=point.lane,
        )
    below, above = step.alone_off
    if below or above:  # T1 is as unsure as in the run that the step is from
        conditions |= Facts(alone_less_share=below, alone_more_share=above)
    others_s = 0.0 if step.sends_no_buckets else float(np.max(exposed.by_others_s))
    others_ns = _whole_ns(others_s)
    length_ns = subject.step.alone_ns + _whole_ns(overhead_s)
    sent = None if workers == 1 else timeline
    step, ready_ns = _with_waits(step, messages, sent)
    if sent is not None:
        room_ns = length_ns - step.alone_ns - min(step.crowded_ns, step.computing_ns)
        room_ns -= _whole_ns(late_s) + others_ns + step.packing_ns
        sent = _with_unexplained(step, sent, exposed, unexplained_s, room_ns)
    order = np.flatnonzero(step.bytes)  # one without bytes stands for none
    first = np.zeros(len(order), np.int64)  # the only step, of the only rank
    where, description = point.cluster, None
    if where is not None:  # as asked for: the loads of its links follow from it
        from fullwire.clusters.description import as_toml

        nics = replace(where.nics, rate_bps=rate_bps, latency_s=latency_s)
        description = as_toml(with_workers(replace(where, nics=nics), workers))
    return Run(
        provenance=Provenance(
            origin="simulated", source=run.provenance.source, basis=run.provenance.basis
        ),
        facts=run.facts.only(_KEPT)
        | Facts(
            workers=workers,
            line_rate_bps=rate_bps,
            latency_s=latency_s,
            transport=str(transport),
            cluster=description,
            gradient_unit=None if subject.has_parameters else BUCKET,
            marked_passes=round(subject.passes) if layers or step.others.stages else None,
            stages=step.others.stages,
        )
        | conditions,
        spans=_spans(step, length_ns, sent, others_ns, layers or round(subject.passes)),
        gradients=Gradients(
            rank=first,
            step=first,
            order=order,
            bytes=step.bytes[order],
            ready_ns=step.forward_ns + step.ready_ns[order],
        ),
        collectives=_collectives(step, messages, sent, ready_ns),
    )


def _with_waits(step: Step, messages: Messages, timeline: Timeline | None) -> tuple[Step, Whole]:
    """Return the step with the waits between its passes, and when its messages are then ready."""
    ready_ns, waits_ns = messages.buckets.ready_ns, _waits_ns(timeline)
    if not sum(waits_ns):
        return step, ready_ns
    of_gradients, before_ns, meetings = step.ready_ns.copy(), 0, []
    ready_ns = ready_ns.copy()
    counts = [count for count, _ in meetings_s(messages.subject.step, messages.buckets)]
    for each, count, wait_ns in zip(step.meetings, counts, waits_ns, strict=True):
        of_gradients[each.gradients :] += wait_ns
        ready_ns[count:] += wait_ns
        meetings.append(each._replace(after_ns=each.after_ns + before_ns))
        before_ns += wait_ns
    waiting = replace(
        step,
        step_ns=step.step_ns + before_ns,
        backward_ns=step.backward_ns + before_ns,
        ready_ns=of_gradients,
        meetings=tuple(meetings),
    )
    return waiting, ready_ns


def _waits_ns(timeline: Timeline | None) -> list[int]:
    return [] if timeline is None else [_whole_ns(float(wait_s)) for wait_s in timeline.waits_s]


def _parts_of_overhead_s(
    messages: Messages, exposed: Exposed, transport: Transport, jitter: Jitter
) -> tuple[float, float, float]:
    """Return the loss of a step at one point, and of it what is unexplained and what is late."""
    none = Residue()
    ways = ((messages.subject.residues[0], jitter), (none, jitter), (none, NoJitter()))
    whole_s, explained_s, on_time_s = (
        float(messages.overhead_s(exposed, slice(None), transport, residue, 1, 1, way)[0, 0, 0])
        for residue, way in ways
    )
    return whole_s, max(whole_s - explained_s, 0.0), max(explained_s - on_time_s, 0.0)


def _after_computing_ns(step: Step, timeline: Timeline) -> int:
    """Return for how long messages are on the lane after the backward pass."""
    pieces = zip(*_on_the_lane(timeline), strict=True)
    after_s = step.backward_ns * 1e-9
    return _whole_ns(sum(max(end_s - max(start_s, after_s), 0.0) for start_s, end_s in pieces))


def _with_unexplained(
    step: Step, timeline: Timeline, exposed: Exposed, unexplained_s: float, room_ns: int
) -> Timeline:
    """Return the messages with what the replay leaves unexplained, which counts as theirs.

    Those after the backward pass take so much longer together, each by the same factor, as far as
    there is room. So they do where they make the waits for other sums longer.
    """
    told_ns, from_s = _after_computing_ns(step, timeline), step.backward_ns * 1e-9
    if step.others.waits_ns:
        unexplained_s += max(float(np.max(exposed.by_buckets_s)) - told_ns * 1e-9, 0.0)
    longer_s = min(unexplained_s, max(room_ns - told_ns, 0) * 1e-9)
    starts_s, ends_s = _on_the_lane(timeline)
    after_s = max([end_s for end_s in ends_s if end_s > from_s], default=from_s) - from_s
    if not after_s:
        return timeline
    times = 1 + longer_s / after_s

    def moved(moments_s: list[float]) -> list[Floats]:
        return [np.array(max((at - from_s) * times, at - from_s) + from_s) for at in moments_s]

    return replace(timeline, start_s=moved(starts_s), end_s=moved(ends_s))


def _spans(
    step: Step,
    length_ns: int,
    timeline: Timeline | None,
    others_ns: int,
    passes: int | Sequence[tuple[int, int]],
) -> Spans:
    """Lay the step out from time 0: forward, backward, and the messages beside and after it.

    The wait for data comes first. The host's part has no span of its own.
    """
    begin_ns = step.forward_ns
    backward_end_ns = begin_ns + step.backward_ns
    rest_ns = step.step_ns - backward_end_ns
    _, after_ns = step.parts_of_host_ns
    rows: list[tuple[Lane, str, int, int]] = [
        ("host", "step", 0, length_ns),
    ]
    if isinstance(passes, int):
        rows += _passes(step, passes, _waits_ns(timeline))
    else:  # computing between waits for shards
        rows.append(("host", LAST, begin_ns, backward_end_ns))
        rows += [("compute", LAYERS, *ends) for ends in passes]

    goes_on = not isinstance(passes, int) and passes[-1][1] > backward_end_ns
    if goes_on:
        rest_ns = 0
    if rest_ns > 0:
        rows.append(("compute", "optimizer", length_ns - rest_ns, length_ns - after_ns))
    if step.input_ns > 0:
        rows.append(("input", "data", 0, step.input_ns))
    starts_s, ends_s = _on_the_lane(timeline)
    ops = step.others.op if step.sends_no_buckets and starts_s else ("allreduce",) * len(starts_s)
    for op, start_s, end_s in zip(ops, starts_s, ends_s, strict=True):
        start_ns, end_ns = begin_ns + _whole_ns(start_s), begin_ns + _whole_ns(end_s)
        rows.append(("communication", op, start_ns, end_ns))
    if timeline is not None:
        rows += _besides(step, rows, others_ns, until_ns=length_ns - max(rest_ns, 0))
    lanes, names, starts, ends = zip(*rows, strict=True)
    none = np.zeros(len(rows), np.int64)
    return Spans(
        rank=none,
        step=none,
        lane=np.array(lanes, object),
        name=np.array(names, object),
        start_ns=np.array(starts),
        end_ns=np.array(ends),
    )


def _passes(
    step: Step, passes: int, waits_ns: Sequence[int]
) -> Iterator[tuple[Lane, str, int, int]]:
    """Yield the forward and backward passes; only the last sends gradients.

    The earlier ones take all the time before, each as long as the others and as their last, as far
    as there is room. Where each pass sends its own, they go from one wait to the next.
    """
    before_ns, _ = step.parts_of_host_ns
    begin_ns = step.input_ns + before_ns
    if step.meetings:
        yield "compute", "forward", begin_ns, step.forward_ns
        begin_ns, computed_ns = step.forward_ns, step.forward_ns + step.backward_ns
        yield "host", LAST, begin_ns, computed_ns
        none = [0] * len(step.meetings)
        for each, wait_ns in zip(step.meetings, waits_ns or none, strict=True):
            end_ns = step.forward_ns + each.after_ns
            yield "host", EARLIER, begin_ns, end_ns
            yield "compute", EARLIER, begin_ns, end_ns
            begin_ns = end_ns + wait_ns
        yield "compute", LAST, begin_ns, computed_ns
        return
    room_ns = step.forward_ns - begin_ns
    each_ns = min(step.backward_ns, room_ns // (2 * passes - 1))
    for _ in range(1, passes):
        end_ns = begin_ns + (room_ns - (passes - 1) * each_ns) // passes
        yield "compute", EARLIER_FORWARD, begin_ns, end_ns
        yield "compute", EARLIER, end_ns, end_ns + each_ns
        begin_ns = end_ns + each_ns
    yield "compute", "forward", begin_ns, step.forward_ns
    yield "compute", LAST, step.forward_ns, step.forward_ns + step.backward_ns


def _besides(
    step: Step, rows: Sequence[tuple[Lane, str, int, int]], others_ns: int, until_ns: int
) -> Iterator[tuple[Lane, str, int, int]]:
    """Yield what a step has beyond T1 and its messages, so that its account gives back this T1.

    After the last message come collectives that are no buckets, and packing. The rest of the time
    is contention, as far as the subject has it, and waiting for late ranks. The passes are those of
    all ranks together, so they hold waiting as well. They hold contention of all computing.
    """
    begin_ns, computed_ns = rows[0][2], step.forward_ns + step.backward_ns
    sent = sorted((start, end) for lane, _, start, end in rows if lane == "communication")
    busy_ns, reached_ns = 0, computed_ns
    for start_ns, end_ns in sent:
        start_ns, end_ns = max(start_ns, reached_ns), min(end_ns, until_ns)
        busy_ns += max(end_ns - start_ns, 0)
        reached_ns = max(reached_ns, end_ns)
    named: tuple[tuple[Lane, str, int], ...] = (
        ("communication", BESIDE_BUCKETS, others_ns),
        ("host", "codec", step.packing_ns),
    )
    for lane, name, time_ns in named:
        end_ns = min(reached_ns + time_ns, until_ns)
        if end_ns > reached_ns:
            yield lane, name, reached_ns, end_ns
            busy_ns, reached_ns = busy_ns + end_ns - reached_ns, end_ns
    # Waits between computing after the passes are in T1 here, and beside messages as well.
    after = [(start, end) for _, name, start, end in rows if name == LAYERS and end > computed_ns]
    if after:
        busy_ns -= (
            after[-1][1] - computed_ns - sum(end - max(start, computed_ns) for start, end in after)
        )
    left_ns = max(rows[0][3] - begin_ns - busy_ns - step.alone_ns, 0)
    slowed_ns = min(step.crowded_ns, left_ns, step.computing_ns)
    if slowed_ns > 0:
        yield "compute", SLOWED, computed_ns - slowed_ns, computed_ns
    late_ns = left_ns - slowed_ns
    after_ns = min(late_ns, max(until_ns - reached_ns, 0))
    # A wait within the passes is before the first message, beside which it would count as transfer.
    sends_ns = min([computed_ns, *(start_ns for start_ns, _ in sent)])
    within_ns = min(late_ns - after_ns, sends_ns)
    for time_ns, end_ns in ((after_ns, until_ns), (within_ns, sends_ns)):
        if time_ns > 0:
            yield "host", "wait", end_ns - time_ns, end_ns


def _on_the_lane(timeline: Timeline | None) -> tuple[list[float], list[float]]:
    if timeline is None:
        return [], []
    return [*map(float, timeline.start_s)], [*map(float, timeline.end_s)]


def _collectives(
    step: Step, messages: Messages, timeline: Timeline | None, ready_ns: Whole
) -> Collectives:
    if timeline is None:
        return Collectives.empty()
    starts, ends = _on_the_lane(timeline)
    count = len(starts)
    start_ns = step.forward_ns + np.array([_whole_ns(start_s) for start_s in starts])
    ops, sizes = _all("allreduce", count), messages.buckets.bytes
    issue_ns = step.forward_ns + ready_ns
    if step.sends_no_buckets:  # where the script issues them is not known
        ops, sizes = np.array(step.others.op, object), np.array(step.others.bytes, np.int64)
        issue_ns = start_ns
    end_ns = step.forward_ns + np.array([_whole_ns(end_s) for end_s in ends])
    if step.sends_no_buckets and count:  # a script's calls touch nowhere: each shows its own time
        apart_ns = np.append(start_ns[:1], end_ns[:-1] + 1)
        start_ns = issue_ns = np.minimum(np.maximum(start_ns, apart_ns), end_ns)
    return Collectives(
        rank=np.zeros(count, np.int64),
        step=np.zeros(count, np.int64),
        sequence=np.arange(count),
        group=_all("world", count),
        op=ops,
        dtype=_all("float32", count),
        bytes=sizes,
        issue_ns=issue_ns,
        start_ns=start_ns,
        end_ns=end_ns,
    )


def _all(text: str, count: int) -> np.ndarray:
    return np.full(count, text, object)


def _whole_ns(time_s: float) -> int:
    return round(time_s * 1e9)
