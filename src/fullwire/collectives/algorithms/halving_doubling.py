"""Halves exchanged at distances N/2 ... 1 and back.

In an all-reduce, ranks beyond a power of two hand their data to a partner first. The all-reduce is
then a little faster than the formula, because some ranks need not wait for all others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fullwire.collectives.cost import AddTimes, Cost, Floats
from fullwire.collectives.powers_of_two import (
    even_unless_all_reduce,
    exactly_at_powers_of_two,
    power_of_two_within,
)
from fullwire.collectives.registry import Algorithm, Costs, Statement
from fullwire.collectives.stages import Layout, Stage, Stated, stage
from fullwire.errors import UsageError


def _halving(workers: int) -> Iterator[Stage]:
    """Exchange halves with ever nearer partners: rank r ends with the sum of block r."""
    ranks = np.arange(workers)
    distance = workers // 2
    while distance:
        partner = ranks ^ distance
        yield stage(ranks, partner, partner & ~(distance - 1), block_count=distance, reduces=True)
        distance //= 2


def _doubling(workers: int) -> Iterator[Stage]:
    """Exchange all held blocks with ever farther partners, until every rank has every block."""
    ranks = np.arange(workers)
    distance = 1
    while distance < workers:
        yield stage(
            ranks, ranks ^ distance, ranks & ~(distance - 1), block_count=distance, reduces=False
        )
        distance *= 2


def _one_way(op: str, layout: Layout) -> Stated:
    workers = layout.workers
    if workers != power_of_two_within(workers):
        raise UsageError(
            f"{op} by halving-doubling: expected a power of two of workers, got {workers}"
        )
    exchanges = _halving if op == "reducescatter" else _doubling
    return Stated(workers, (tuple(exchanges(workers)),))


def _all_reduce(_op: str, layout: Layout) -> Stated:
    workers = layout.workers
    core = power_of_two_within(workers)
    stages = [*_halving(core), *_doubling(core)]
    if core < workers:
        extra = np.arange(core, workers)
        stages.insert(0, stage(extra, extra - core, block_count=core, reduces=True))
        stages.append(stage(extra - core, extra, block_count=core, reduces=False))
    return Stated(core, (tuple(stages),))


def _all_reduce_cost(workers: int, size: Floats, adds: AddTimes) -> Cost:
    core = power_of_two_within(workers)
    halvings = core.bit_length() - 1
    folds = workers > core  # ranks beyond the power of two hand over all, and get all back
    wire_bytes = 2 * size * (core - 1) / core + (2 * size if folds else 0)
    add_s = _halving_adds(halvings, size, adds) + (adds(size) if folds else 0)
    # A partner first receives all of it and in the end sends all of it: each way only once.
    return Cost(wire_bytes, 2 * halvings + (2 if folds else 0), add_s, size if folds else 0.0)


def _one_way_cost(*, reduces: bool) -> Costs:
    def costs(workers: int, size: Floats, adds: AddTimes) -> Cost:
        exchanges = workers.bit_length() - 1
        add_s = _halving_adds(exchanges if reduces else 0, size, adds)
        return Cost(size * (workers - 1) / workers, exchanges, add_s)

    return costs


def _halving_adds(halvings: int, size: Floats, adds: AddTimes) -> Floats:
    add_s = np.zeros_like(size)
    if adds.points:  # without any, searches need not add up zeros a million times
        for halving in range(1, halvings + 1):
            add_s += adds(size / 2**halving)
    return add_s


NAME = "halving-doubling"
ALGORITHM = Algorithm(
    name=NAME,
    label="halves exchanged at distances N/2 ... 1 and back",
    place=30,
    ops={
        op: Statement(states=states, costs=costs, exactly_s=exactly_at_powers_of_two(NAME, costs))
        for op, states, costs in (
            ("allreduce", _all_reduce, _all_reduce_cost),
            ("reducescatter", _one_way, _one_way_cost(reduces=True)),
            ("allgather", _one_way, _one_way_cost(reduces=False)),
        )
    },
    fits=even_unless_all_reduce,
)
