"""Over a torus: rows first and columns first, each both ways around, a quarter each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.lifting import by_every_device
from fullwire.collectives.registry import Algorithm, Statement
from fullwire.collectives.rings import phases
from fullwire.collectives.stages import Layout, Stage, Stated, stage
from fullwire.errors import UsageError


def _four_ways(op: str, layout: Layout) -> Stated:
    if layout.torus is None:
        raise UsageError("algorithm torus: expected a cluster whose nodes form a torus")
    rows, columns = layout.torus
    node = np.arange(layout.nodes).reshape(rows, columns)
    grids = [grid for turned in (node, node.T) for grid in (turned, turned[::-1, ::-1])]
    parts, places = [], []
    for number, grid in enumerate(grids):
        base = number * layout.nodes
        scatter = _lines_then_across(grid, base, lead=1, reduces=True)
        gather = _lines_then_across(grid, base, lead=0, reduces=False)[::-1]
        parts.append(phases(op, scatter, (), gather))
        places.append(grid.T.reshape(-1) * len(grids) + number)
    return Stated(layout.nodes * len(grids), tuple(parts), np.concatenate(places))


def _lines_then_across(
    grid: NDArray[Any], base: int, *, lead: int, reduces: bool
) -> tuple[Stage, Stage]:
    """Go around every line of a grid, then across lines with the blocks each place has by then."""
    lines, places = grid.shape
    line, place = np.indices(grid.shape)
    along = stage(
        grid,
        np.roll(grid, -1, axis=1),
        base + (place - lead) % places * lines,
        block_count=lines,
        reduces=reduces,
        rounds=places - 1,
        shift=-lines,
        window=places * lines,
    )
    across = stage(
        grid,
        np.roll(grid, -1, axis=0),
        base + place * lines + (line - lead) % lines,
        reduces=reduces,
        rounds=lines - 1,
        shift=-1,
        window=lines,
    )
    return along, across


ALGORITHM = Algorithm(
    name="torus",
    label="rows first and columns first, each both ways around, a quarter each",
    place=70,
    ops=dict.fromkeys(
        ("allreduce", "reducescatter", "allgather"),
        Statement(states=by_every_device(_four_ways)),
    ),
    fits=lambda _op, cluster, workers: cluster.is_torus and workers == cluster.devices,
)
