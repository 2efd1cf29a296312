"""A grid of conditions for one run or several, computed together.

numpy computes blocks of points that fit the processor's cache. The result keeps the grid's axes
apart from its measures: a million rows take the memory of the measures only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.crew import ALONE, Crew
from fullwire.errors import UsageError
from fullwire.run.centre import NORMAL_90
from fullwire.run.usual import Alone
from fullwire.simulation.grid import (
    AXES,
    MEASURES,
    Crowding,
    Grid,
    Predictions,
    Residue,
    Subject,
    shaped,
    synchronising,
)
from fullwire.simulation.messages import messages_of
from fullwire.simulation.of_kinds import apart, as_means
from fullwire.simulation.stacked import StackedStep, stacks
from fullwire.simulation.transport import MeasuredTransport, Transport

Progress: TypeAlias = Callable[[int, int], None]

BLOCK_POINTS = 16_384  # three arrays of so many numbers fit the second-level cache
PIECE_POINTS = 2**18  # some 10 MB of measures, computed at once, here or elsewhere
MOST_POINTS = 100_000_000  # 4 GB of measures
_PLACE_OF_WORKERS = 4  # among the axes of a piece, which has no run, buckets and the like
_LEAST_BESIDE = 0.1  # of the bytes: fewer beside computing do not tell their contention
_T1_OFF = 0.12  # of T1: a standard deviation of one run's estimate (validation/contention.py)
_LIKELY_OFF = 0.3  # of the work for messages: a standard deviation of what it delays


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


def with_alone(subject: Subject, alone: Alone, transport: Transport) -> Subject:
    """Return the subject with the T1 of its account, and with the contention that this tells."""
    if alone.tells_contention:
        found = with_contention(subject, alone, transport)
    else:
        waits = _sends_beside_computing(subject)
        step = subject.step.with_alone(round(alone.time_s * 1e9), waits=waits)
        found = replace(subject, step=step)
    return replace(found, step=found.step.with_parts(alone.input_s, alone.host_s))


def _sends_beside_computing(subject: Subject) -> bool:
    """Say whether it sends in all steps, as averages of parameters do not."""
    recorded = subject.recorded
    return recorded is None or subject.sends_beside_computing(*recorded.local_steps)


def with_contention(subject: Subject, alone: Alone, transport: Transport) -> Subject:
    """Return the subject with the T1 of its account; the rest of its step is contention.

    On processors it grows with the bytes that are sent while a worker computes. On devices it grows
    with the time for which they are sent. What these do not explain, beyond the error of T1, all
    predictions keep as recorded. The turns of ranks on a processor are no part of a typical step.
    """
    alone_s, alone_ns, step = alone.time_s, round(alone.time_s * 1e9), subject.step
    # Averages of parameters slow no computing down: all that is not T1 is their exposed time.
    is_beside = _sends_beside_computing(subject)
    if step.step_ns > 0 and (alone_ns > step.step_ns or not is_beside):
        step = step.with_own_work(alone_ns / step.step_ns)
    off = (1 - alone.low_s / alone_s, alone.high_s / alone_s - 1) if alone_s else (0.0, 0.0)
    step = replace(step, crowded_ns=max(step.step_ns - alone_ns, 0), alone_off=off)
    if subject.recorded is None:
        return replace(subject, step=step)
    point = replace(subject.recorded, transports=(transport,))
    busy = min(step.processor_ns / max(step.step_ns, 1), 1.0)
    crowding = Crowding(busy_by_a_rank=busy or 1.0, is_by_time=subject.is_on_devices)
    if isinstance(transport, MeasuredTransport) and busy:
        [recorded_ranks] = subject.ranks_per_processor(point.workers).tolist()
        crowding = replace(crowding, recorded_ranks=recorded_ranks)
    crowded = replace(subject, step=step, crowding=crowding)
    [apart] = point.local_steps
    if not is_beside:
        return crowded
    [policy], [algorithm], [latency_s] = point.buckets, point.algorithms, point.latency_s
    telling = replace(crowded, crowding=replace(crowding, s_each=1.0))
    messages = messages_of(telling, policy, algorithm, latency_s, point)
    asked = slice(None), np.array([[[point.bandwidth_bps[0]]]]), transport, np.ones((1, 1, 1))
    exposed, all_bits = messages.exposed(*asked), float(messages.sent_bits(*asked).sum())
    beside, others_s = float(exposed.beside.sum()), float(exposed.beside_others_s.sum())
    whole, t1_off = all_bits, _T1_OFF
    if crowding.is_by_time:
        beside += float(messages.waited_beside_s(exposed, step.waiting_ns * 1e-9).sum())
        whole = float((exposed.busy_s + exposed.by_others_s).sum()) + others_s
        t1_off = sum(off) / 2 / NORMAL_90  # a device's T1 has an interval of its own
    if not beside + others_s or beside + others_s < _LEAST_BESIDE * whole:
        return crowded
    beside = beside / apart + others_s  # in a step
    told = _Estimate(step.crowded_by_messages_s / beside, t1_off * alone_s / beside)
    if isinstance(transport, MeasuredTransport) and busy and told.off and not crowding.is_by_time:
        # Work for messages delays computing by its own time at most, and only on busy processors.
        ranks = crowding.recorded_ranks
        work = float(exposed.work_s.sum()) / all_bits / max(ranks, 1.0)
        if work:
            told = told.with_another(_Estimate(work * min(busy * ranks, 1.0), work * _LIKELY_OFF))
    crowded_s = step.crowded_by_messages_s
    rest_s = max(crowded_s - told.value * beside - NORMAL_90 * t1_off * alone_s, 0.0)
    crowding = replace(
        crowding,
        s_each=told.value,
        off_s_each=told.off,
        recorded_beside=beside,
        steady_share=rest_s / crowded_s if crowded_s else 0.0,
    )
    return replace(crowded, crowding=crowding)


class _Estimate(NamedTuple):
    value: float
    off: float  # a standard deviation

    def with_another(self, other: _Estimate) -> _Estimate:
        """Return the mean of both, by how sure they are."""
        weight, others = self.off**-2, other.off**-2
        value = (self.value * weight + other.value * others) / (weight + others)
        return _Estimate(value, (weight + others) ** -0.5)


def with_residue(subject: Subject, transport: Transport) -> Subject:
    """Return the subject with the residue between its measured step and this transport's replay."""
    return replace(subject, residues=residues(subject, [transport], [subject.step.measured_ns]))


def residues(
    subject: Subject, transports: Sequence[Transport], measured_ns: Sequence[int | None]
) -> tuple[Residue, ...]:
    """Return the residue between a measured step and its replay, for each of several transports.

    Where nothing was measured, the subject keeps the residue that it has.
    """
    if subject.recorded is None or None in measured_ns:
        return subject.residues * len(transports)
    # Its ranks were placed as recorded, wherever they are asked to be.
    step, plain = subject.step, replace(subject, residues=(Residue(),), ranks_per_host=None)
    point = replace(subject.recorded, transports=tuple(transports))
    played = sweep([plain], point)
    [policy], [algorithm], [latency_s] = point.buckets, point.algorithms, point.latency_s
    messages = messages_of(plain, policy, algorithm, latency_s, point)
    rate_bps, unpacked = np.array([[[point.bandwidth_bps[0]]]]), np.ones((1, 1, 1))
    before_s = (step.waiting_ns + step.packing_ns) * 1e-9
    found = []
    times_s = played["step_s"].tolist(), played["overhead_s"].tolist()
    for at, transport, step_s, overhead_s in zip(measured_ns, transports, *times_s, strict=True):
        assert at is not None  # None in measured_ns has been asked
        hidden_s = messages.exposed(slice(None), rate_bps, transport, unpacked).hidden_s
        found.append(
            Residue(
                time_s=at * 1e-9 - step_s,
                at_overhead_s=overhead_s - before_s,
                at_hidden_s=float(np.max(hidden_s)),
                passes=point.accumulate[0] * point.local_steps[0],
                messages=max(messages.count, 1),
            )
        )
    return tuple(found)


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
        instead_used_s = messages.instead_bits(sizes) / rate_bps[:, rates]
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
                link_s = used_s / apart + instead_used_s
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
