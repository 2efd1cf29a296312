"""A grid of scenarios for one run or several, computed together.

numpy computes blocks of points that fit the processor's cache. The result keeps the grid's axes
apart from its measures: a million rows take the memory of the measures only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.crew import ALONE, Crew
from fullwire.errors import UsageError
from fullwire.simulation.grid import (
    AXES,
    MEASURES,
    Grid,
    Predictions,
    Residue,
    Subject,
    shaped,
    synchronising,
)
from fullwire.simulation.messages import Messages, messages_of
from fullwire.simulation.transport import Transport

Progress: TypeAlias = Callable[[int, int], None]

BLOCK_POINTS = 16_384  # three arrays of so many numbers fit the second-level cache
PIECE_POINTS = 2**18  # some 10 MB of measures: what is computed at once, here or elsewhere
MOST_POINTS = 100_000_000  # 4 GB of measures


def sweep(
    subjects: Sequence[Subject], grid: Grid, progress: Progress | None = None, crew: Crew = ALONE
) -> Predictions:
    """Predict every point of the grid for every subject."""
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
    # What has the same cluster sizes comes in a row, since it shares their routes.
    varied = (subjects, grid.buckets, grid.algorithms, grid.latency_s)
    places = itertools.product(_sizes(grid), *(range(len(axis)) for axis in varied))
    pieces = list(itertools.starmap(_Piece, places))
    computed = crew.each(partial(_predicted, subjects, grid), pieces)
    done = 0
    for piece, measured in zip(pieces, computed, strict=True):
        for name, measure in measures.items():
            measure[piece.place] = measured[name]
        done += measured["step_s"].size
        if progress:
            progress(done, total)
    # Two more depend on nothing but the run.
    by_run, steps = shaped(run=len(subjects)), [subject.step for subject in subjects]
    measures["baseline_step_s"] = np.array([step.step_ns * 1e-9 for step in steps]).reshape(by_run)
    measures["backward_s"] = np.array([step.backward_ns * 1e-9 for step in steps]).reshape(by_run)
    return Predictions(axes=axes, measures=measures)


def with_residue(subject: Subject, transport: Transport) -> Subject:
    """Return the subject with what a replay under this transport lacks of the measured step."""
    measured_ns, recorded = subject.step.measured_ns, subject.recorded
    if measured_ns is None or recorded is None:
        return subject
    plain = replace(subject, residue=Residue())
    played = sweep([plain], replace(recorded, transports=(transport,)))
    lacking_s = measured_ns * 1e-9 - float(played["step_s"][0])
    step = subject.step
    at_s = float(played["overhead_s"][0]) - (step.waiting_ns + step.packing_ns) * 1e-9
    return replace(subject, residue=Residue(lacking_s, at_s))


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is computed at once, by its places on the axes: all that follows from some messages."""

    sizes: slice  # of the workers
    run: int
    buckets: int
    algorithm: int
    latency: int

    @property
    def place(self) -> tuple[Any, ...]:
        """Return where it is on all axes."""
        whole = slice(None)
        return (
            self.run,
            self.buckets,
            self.algorithm,
            whole,
            self.latency,
            whole,
            whole,
            whole,
            self.sizes,
        )


def _sizes(grid: Grid) -> Iterator[slice]:
    """Cut the cluster sizes so that pieces are small; a described one takes long enough alone."""
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
        together = 1
    for first in range(0, len(grid.workers), together):
        yield slice(first, first + together)


def _predicted(subjects: Sequence[Subject], grid: Grid, piece: _Piece) -> dict[str, Floats]:
    """Compute the measures of one piece."""
    messages = messages_of(
        subjects[piece.run],
        grid.buckets[piece.buckets],
        grid.algorithms[piece.algorithm],
        grid.latency_s[piece.latency],
        grid,
        piece.sizes,
    )
    shape = (
        len(grid.transports),
        len(grid.accumulate),
        len(grid.local_steps),
        len(grid.jitters),
        len(messages.workers),
        len(grid.bandwidth_bps),
        len(grid.compressors),
    )
    measures = {name: np.empty(shape) for name in MEASURES}
    for number, transport in enumerate(grid.transports):
        block = {name: measure[number] for name, measure in measures.items()}
        _fill(block, messages, transport, grid)
    return measures


def _fill(
    block: Mapping[str, Floats], messages: Messages, transport: Transport, grid: Grid
) -> None:
    """Compute the measures of one transport, block by block."""
    rate_bps = np.array(grid.bandwidth_bps)[None, :, None]
    ratio = np.array([codec.ratio for codec in grid.compressors])[None, None, :]
    baseline_s = messages.subject.step.step_ns * 1e-9
    for sizes, rates in _blocks(len(messages.workers), len(grid.bandwidth_bps), ratio.size):
        asked = (sizes, rate_bps[:, rates], transport, ratio)
        exposed = messages.exposed(*asked)
        used_s = messages.sent_bits(*asked) / rate_bps[:, rates]
        for place, (accumulate, local_steps, jitter) in synchronising(grid):
            here: Any = (*place, sizes, rates)
            overhead_s = messages.overhead_s(
                exposed, sizes, transport, accumulate, local_steps, jitter
            )
            apart = accumulate * local_steps
            block["overhead_s"][here] = overhead_s
            block["communication_s"][here] = exposed.busy_s / apart
            step_s = np.add(baseline_s, overhead_s, out=block["step_s"][here])
            np.divide(baseline_s, step_s, out=block["scaling_factor"][here])
            np.divide(used_s / apart, step_s, out=block["network_utilization"][here])


def _blocks(workers: int, rates: int, compressors: int) -> Iterator[tuple[slice, slice]]:
    rate_step = max(1, min(rates, BLOCK_POINTS // compressors))
    worker_step = max(1, BLOCK_POINTS // (compressors * rates))
    for first_worker in range(0, workers, worker_step):
        for first_rate in range(0, rates, rate_step):
            yield (
                slice(first_worker, first_worker + worker_step),
                slice(first_rate, first_rate + rate_step),
            )
