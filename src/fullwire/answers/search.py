"""The best few of a grid of predictions, and what each of their conditions is worth.

Best is what gives most: workers times scaling factor, which is how many times faster than one
worker a job gets through its data. What comes within `NEAR` of each other counts as equal, and then
the less demanding comes first: less bandwidth, fewer workers, more frequent synchronisation, less
compression, and what was named first. Runs are not compared with each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.errors import UsageError
from fullwire.simulation.grid import Predictions

NEAR = 0.01


@dataclass(frozen=True, slots=True)
class Instead:
    """The best other value of one condition, all others as they are, and what it would change."""

    condition: str
    value: Any
    instead: Any
    change: float  # of the speed: -0.1 is a tenth slower


@dataclass(frozen=True, slots=True)
class Best:
    """One of the best rows of a table, by its number."""

    row: int
    speedup: float
    instead: tuple[Instead, ...]


def best(found: Predictions, count: int) -> tuple[Best, ...]:
    """Return the best rows of each run, so many of each."""
    if count < 1:
        raise UsageError(f"best: expected at least 1, got {count}")
    by_run = np.arange(len(found)).reshape(len(found.axes["run"]), -1)
    alone_s = found["baseline_step_s"].reshape(by_run.shape)
    # Where devices change, one worker is that of the first row of its run.
    speedup = found["workers"] * found["scaling_factor"] * (alone_s[:, :1] / alone_s).reshape(-1)
    rows = [row for rows in by_run for row in _first(found, speedup, rows, count)]
    return tuple(
        Best(row, float(speedup[row]), tuple(_instead(found, speedup, row))) for row in rows
    )


def _first(found: Predictions, speedup: Floats, rows: Any, count: int) -> list[int]:
    """Sort the rows that are near enough to the best to come into question."""
    here = speedup[rows]
    least = np.partition(here, -min(count, len(here)))[-min(count, len(here))]
    rows = rows[here >= least / (1 + NEAR) ** 2]
    place = np.floor(np.log(speedup[rows].max() / speedup[rows]) / np.log1p(NEAR) + 1e-9)
    apart = found["accumulate"][rows] * found["local_steps"][rows]
    keys = (
        rows,
        found["compression"][rows],
        apart,
        found["workers"][rows],
        found["bandwidth_bps"][rows],
        place,
    )
    return [int(each) for each in rows[np.lexsort(keys)][:count]]


def _instead(found: Predictions, speedup: Floats, row: int) -> Iterator[Instead]:
    shape = tuple(len(values) for values in found.axes.values())
    table, place = speedup.reshape(shape), np.unravel_index(row, shape)
    for number, (axis, values) in enumerate(found.axes.items()):
        if len(values) < 2 or axis == "run":
            continue
        line: Any = (*place[:number], slice(None), *place[number + 1 :])
        along = table[line]
        own = int(place[number])
        other = int(np.argmax(np.where(np.arange(len(values)) == own, -np.inf, along)))
        yield Instead(axis, values[own], values[other], float(along[other] / along[own] - 1))
