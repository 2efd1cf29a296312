"""Compute utilization of DiLoCo and its kin, against the tables that its papers print.

    .venv/bin/python -m validation.diloco ../shared/data/accuracy/streaming_diloco_table4.csv

A row is a model, the time of its step without waiting, and a method. A cell is the least rate at
which workers compute for 50 to 99 % of the time. The papers try the rates of logspace(-1, 3, 50)
Gbit/s, so a cell is a place on that grid, or `1000.0+` beyond it. Cells such as n/a are left out.
The last line is JSON: the cells, those predicted exactly, and those within one place.

Columns: `model` (10B, or a name), `step_s`, `method`, `cu50_gbps` to `cu99_gbps`; optional are
`params_B`, `layers` and `H`. Methods that this model does not describe are named and left out. Only
the published table renews `results/diloco.json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fullwire.errors import DamagedInput
from fullwire.simulation.outer import BITS, OVERLAP_STEPS, Outer, utilization
from validation import arguments, results, tables

GRID_GBPS = np.logspace(-1, 3, 50)
BEYOND = len(GRID_GBPS)
TABLE = "accuracy/streaming_diloco_table4.csv"
COLUMN = re.compile(r"cu(\d+)_gbps")
_NUMBER = r"(\d[\d,]*(?:\.\d*)?)"
BEYOND_GRID = re.compile(rf">\s*{_NUMBER}\+?|{_NUMBER}\+")
BELOW_GRID = re.compile(r"<=?\s*(\d+\.\d*[1-9]\d*)")
_HALF_A_PLACE = float((GRID_GBPS[1] / GRID_GBPS[0]) ** 0.5)
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([BMT])\b", re.IGNORECASE)
UNIT = {"m": 1e6, "b": 1e9, "t": 1e12}
USUAL_H = 100
FP4 = 4 / 16  # of what bf16 takes
STREAMING: dict[str, dict[str, Any]] = {
    "streaming_diloco": {"is_streaming": True},
    "streaming_overlap": {"is_streaming": True, "overlap": OVERLAP_STEPS},
    "streaming_overlap_fp4": {"is_streaming": True, "overlap": OVERLAP_STEPS, "bits": BITS * FP4},
}
# Published depths, by a word of the model's name; others follow their size.
LAYERS = {"deepseek": 61, "405b": 126}
# Depth by size: the models of Streaming DiLoCo's Table 4.
SIZES, DEPTHS = (1e9, 10e9, 100e9), (24, 48, 108)


def outer_of(row: tables.Row) -> Outer | None:
    """Return how the workers of a row synchronise; None for a method that we do not know."""
    name = row["method"].lower().replace("-", "_").replace(" ", "_")
    if name == "data_parallel":
        return Outer()
    if not name:
        raise row.damaged("method: expected a name such as diloco, got none")
    asked = re.fullmatch(r"diloco(?:_h(\d+))?", name)
    if asked is None and name not in STREAMING:
        return None
    named = None if asked is None or not asked[1] else int(asked[1])
    usual = USUAL_H if named is None else named
    every = row.number("H", otherwise=usual)
    if named is not None and every != named:
        raise row.damaged(f"H: expected {named}, as the method {row['method']} says, got {every:g}")
    if every != round(every):
        raise row.damaged(f"H: expected a whole number of steps, got {row['H']!r}")
    return Outer(every=round(every), **STREAMING.get(name, {}))


def size_of(row: tables.Row) -> tuple[float, int]:
    """Return the parameters and the layers of a row's model."""
    model = row["model"]
    said = SIZE.search(model)
    if billions := row.number("params_B", otherwise=0):
        parameters = billions * 1e9
    elif said is not None:
        parameters = float(said[1]) * UNIT[said[2].lower()]
    else:
        raise row.damaged(f"expected params_B, or a size such as 10B in model, got {model!r}")
    if depth := row.number("layers", otherwise=0):
        return parameters, max(1, round(depth))
    known = [layers for word, layers in LAYERS.items() if word in model.lower()]
    if known:
        return parameters, known[0]
    # The exponent of the last two sizes holds beyond them, but models of today are no deeper.
    depth = float(np.exp(np.interp(np.log(parameters), np.log(SIZES), np.log(DEPTHS))))
    return parameters, max(1, round(depth))


def place_of(row: tables.Row, column: str) -> int:
    """Return the place of a printed rate on the grid; `1000.0+` or `>1000` is beyond it.

    `<0.1` is the first place: the lowest rate of the grid is enough.
    """
    below = BELOW_GRID.fullmatch(row[column])
    if below is not None and abs(math.log(float(below[1]) / GRID_GBPS[0])) < math.log(
        _HALF_A_PLACE
    ):
        return 0
    beyond = BEYOND_GRID.fullmatch(row[column])
    if beyond is None:
        rate_gbps = row.number(column)
    else:
        rate_gbps = float((beyond[1] or beyond[2]).replace(",", ""))
    is_beyond = beyond is not None
    least, most = GRID_GBPS[0] / _HALF_A_PLACE, GRID_GBPS[-1] * _HALF_A_PLACE
    if not (GRID_GBPS[-1] / _HALF_A_PLACE if is_beyond else least) <= rate_gbps <= most:
        raise row.damaged(
            f"{column}: expected a rate of the grid, {GRID_GBPS[0]:g} to {GRID_GBPS[-1]:g}, or "
            f"{GRID_GBPS[-1]:g}+ beyond it, got {row[column]!r}"
        )
    return BEYOND if is_beyond else int(np.abs(np.log(GRID_GBPS / rate_gbps)).argmin())


def shares_of(row: tables.Row) -> dict[str, float]:
    """Return the share of time that each filled column of a row is about."""
    shares = {}
    for name in row.cells:
        asked = COLUMN.fullmatch(name)
        if asked is None or not row[name] or tables.NOTHING.fullmatch(row[name]):
            continue
        shares[name] = int(asked[1]) / 100
        if not 0 < shares[name] < 1:
            raise row.damaged(f"{name}: expected a share of the time from 1 to 99 %")
    return shares


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
    for row in tables.read(path, ("step_s", "method")):
        outer = outer_of(row)
        if outer is None:
            left_out.append(f"{row['model']} {row['method']}")
            continue
        shares = shares_of(row)
        predicted = predicted_places(
            outer, *size_of(row), row.number("step_s"), list(shares.values())
        )
        truth = [place_of(row, column) for column in shares]
        name = " ".join(filter(None, (row["model"], row["method"], f"H={outer.every}")))
        rows.append((name, [mine - its for mine, its in zip(predicted, truth, strict=True)]))
    if rows and not any(those for _, those in rows):
        raise DamagedInput(path, "expected cells in columns such as cu50_gbps, got none")
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
    print(json.dumps(counts), flush=True)
    if off and not asked.json:
        results.write(
            "diloco",
            asked.table,
            TABLE,
            claim="The rates that DiLoCo and Streaming DiLoCo need follow from a layer model.",
            anchor=f"the papers' own simulation, {asked.table.name}",
            summary=f"{counts['exact']} of {len(off)} cells exact, "
            f"{counts['within_one']} within one place",
            measure="places of the grid, 21 % a place",
            cases=len(off),
            median=float(np.median(off)),
            worst=float(max(off)),
        )


if __name__ == "__main__":
    arguments.run(main)
