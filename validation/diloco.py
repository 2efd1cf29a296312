"""Compute utilization of DiLoCo and its kin, against the tables that its papers print.

    .venv/bin/python -m validation.diloco ../shared/data/accuracy/streaming_diloco_table4.csv

A row is a model, the time of its step without waiting, and a method. A cell is the least rate at
which workers compute for 50 to 99 % of the time. The papers try the rates of logspace(-1, 3, 50)
Gbit/s, so a cell is a place on that grid, or `1000.0+` beyond it. The last line is JSON: the
cells, those predicted exactly, and those within one place.

Columns: `model` (10B, or a name), `step_s`, `method`, `cu50_gbps` to `cu99_gbps`; optional are
`params_B`, `layers` and `H`. Methods that this model does not describe are named and left out.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fullwire.errors import DamagedInput
from fullwire.simulation.outer import BITS, OVERLAP_STEPS, Outer, utilization
from validation import arguments, results

GRID_GBPS = np.logspace(-1, 3, 50)
BEYOND = len(GRID_GBPS)
COLUMN = re.compile(r"cu(\d+)_gbps")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([BMT])\b", re.IGNORECASE)
UNIT = {"m": 1e6, "b": 1e9, "t": 1e12}
USUAL_H = 100
FP4 = 4 / 16  # of what bf16 takes
# Published depths, by a word of the model's name; others follow their size.
LAYERS = {"deepseek": 61, "405b": 126}
# Depth by size: the models of Streaming DiLoCo's Table 4.
SIZES, DEPTHS = (1e9, 10e9, 100e9), (24, 48, 108)


def outer_of(row: Mapping[str, str]) -> Outer | None:
    """Return how the workers of a row synchronise; None for a method that we do not know."""
    name = row["method"].strip().lower().replace("-", "_").replace(" ", "_")
    asked = re.fullmatch(r"diloco(?:_h(\d+))?", name)
    given = re.sub(r"\.0+$", "", (row.get("H") or "").strip())
    every = int(given) if given.isdigit() and int(given) else USUAL_H
    if name == "data_parallel":
        return Outer()
    if asked is not None:
        return Outer(every=int(asked[1] or every))
    if name == "streaming_diloco":
        return Outer(every=every, is_streaming=True)
    if name in ("streaming_overlap", "streaming_overlap_fp4"):
        bits = BITS * (FP4 if name.endswith("fp4") else 1)
        return Outer(every=every, is_streaming=True, overlap=OVERLAP_STEPS, bits=bits)
    return None


def size_of(row: Mapping[str, str], path: Path, line: int) -> tuple[float, int]:
    """Return the parameters and the layers of a row's model."""
    model = row.get("model") or ""
    said = SIZE.search(model)
    if row.get("params_B"):
        parameters = float(row["params_B"]) * 1e9
    elif said is not None:
        parameters = float(said[1]) * UNIT[said[2].lower()]
    else:
        raise DamagedInput(
            path, f"expected params_B, or a size such as 10B in model, got {model!r}", line=line
        )
    if row.get("layers"):
        return parameters, int(float(row["layers"]))
    known = [layers for word, layers in LAYERS.items() if word in model.lower()]
    if known:
        return parameters, known[0]
    # The exponent of the last two sizes holds beyond them, but models of today are no deeper.
    depth = float(np.exp(np.interp(np.log(parameters), np.log(SIZES), np.log(DEPTHS))))
    return parameters, max(1, round(depth))


def place_of(cell: str) -> int:
    """Return the place of a printed rate on the grid."""
    if cell.strip().endswith("+"):
        return BEYOND
    return int(np.abs(np.log(GRID_GBPS / float(cell))).argmin())


def predicted_places(
    outer: Outer, parameters: float, layers: int, step_s: float, shares: Sequence[float]
) -> list[int]:
    """Return the first place of the grid at which each share of time is computing."""
    reached = utilization(
        outer, parameters=parameters, layers=layers, step_s=step_s, rates_bps=GRID_GBPS * 1e9
    )
    return [int(np.argmax(np.append(reached >= share, [True]))) for share in shares]


def offsets(path: Path) -> tuple[list[tuple[str, list[int]]], list[str]]:
    """Return, by row, how many places each prediction is off; and the methods left out."""
    rows: list[tuple[str, list[int]]] = []
    left_out: list[str] = []
    with path.open(newline="") as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            outer = outer_of(row)
            if outer is None:
                left_out.append(f"{row['model']} {row['method']}")
                continue
            columns = [name for name in row if COLUMN.fullmatch(name or "") and row[name]]
            shares = [int(name[2:4]) / 100 for name in columns]
            predicted = predicted_places(
                outer, *size_of(row, path, line), float(row["step_s"]), shares
            )
            truth = [place_of(row[name]) for name in columns]
            name = " ".join(filter(None, (row["model"], row["method"], f"H={outer.every}")))
            rows.append((name, [mine - its for mine, its in zip(predicted, truth, strict=True)]))
    return rows, left_out


def main() -> None:
    """Print each row's offsets, and the counts as JSON."""
    taken = arguments.parser(__doc__)
    taken.add_argument("table", type=Path)
    taken.add_argument("--json", action="store_true", help="print the last line only")
    asked = taken.parse_args()
    rows, left_out = offsets(asked.table)
    off = [abs(each) for _, those in rows for each in those]
    counts = {
        "cells": len(off),
        "exact": sum(each == 0 for each in off),
        "within_one": sum(each <= 1 for each in off),
    }
    if not asked.json:
        for name, those in rows:
            print(f"{name:<44} {'  '.join(f'{each:+d}' for each in those)}")
        for name in left_out:
            print(f"left out, an unknown method: {name}")
        if off:
            results.write(
                "diloco",
                claim="The rates that DiLoCo and Streaming DiLoCo need follow from a layer model.",
                anchor=f"the papers' own simulation, {asked.table.name}",
                summary=f"{counts['exact']} of {len(off)} cells exact, "
                f"{counts['within_one']} within one place",
                measure="places of the grid, 21 % a place",
                cases=len(off),
                median=float(np.median(off)),
                worst=float(max(off)),
            )
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
