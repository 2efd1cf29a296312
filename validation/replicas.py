"""The loss of replicas that synchronise seldom, held against the tables of DiLoCo's papers.

    .venv/bin/python -m validation.replicas ../shared/data/accuracy

The folder holds diloco_loss_by_M_N.csv (replicas by size) and streaming_diloco_loss_M_H.csv
(replicas and steps between synchronisations). The law of `convergence/batches.py` was fitted to
both. So the script fits its constants again without one size after the other, and judges each size
by the law of the others. The last line is JSON.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.convergence.batches import excess
from fullwire.errors import DamagedInput
from fullwire.run.centre import NORMAL_90
from validation import arguments, results

FILES = ("diloco_loss_by_M_N.csv", "streaming_diloco_loss_M_H.csv")
USUAL_STEPS = 30  # between synchronisations, in the table by size
_UNITS = {"M": 1e6, "B": 1e9}
_COLUMN = re.compile(r"s?diloco(?:_fp4)?_M(\d+)(?:_H(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One published loss, in relation to that of data parallel training of the same size."""

    parameters: float
    replicas: int
    steps: int
    ratio: float


def cases(folder: Path) -> list[Case]:
    """Read the losses of both tables, but those of one replica."""
    found = []
    for name in FILES:
        with (folder / name).open(newline="") as file:
            for row in csv.DictReader(file):
                whole = float(row.get("data_parallel") or row["dp"])
                parameters = float(row["params"][:-1]) * _UNITS[row["params"][-1]]
                for column, value in row.items():
                    told = _COLUMN.fullmatch(column or "")
                    if told is None or not value or told[1] == "1":
                        continue
                    found.append(
                        Case(
                            parameters=parameters,
                            replicas=int(told[1]),
                            steps=int(told[2] or USUAL_STEPS),
                            ratio=float(value) / whole,
                        )
                    )
    if not found:
        raise DamagedInput(folder, "expected losses by replicas, found none")
    return found


def fitted(those: list[Case]) -> tuple[Floats, float]:
    """Fit the law: height, three exponents and offset, and the scatter around it."""
    sizes, replicas, steps, truth = _columns(those)
    best, law = np.inf, np.zeros(5)
    for powers in itertools.product(
        np.linspace(0.5, 2, 16), -np.linspace(0.1, 0.5, 21), np.linspace(0, 1, 21)
    ):
        shape = replicas ** powers[0] * sizes ** powers[1] * steps ** powers[2]
        across = np.stack([shape, -np.ones_like(shape)], axis=1)
        found, *_ = np.linalg.lstsq(across, truth, rcond=None)
        squares = float(np.square(across @ found - truth).sum())
        if squares < best:
            best, law = squares, np.array([found[0], *powers, found[1]])
    return law, float(np.sqrt(best / (len(those) - len(law))))


def _columns(those: list[Case]) -> tuple[Floats, Floats, Floats, Floats]:
    return (
        np.array([each.parameters / 1e9 for each in those]),
        np.log2([each.replicas for each in those]),
        np.array([each.steps / USUAL_STEPS for each in those]),
        np.log([each.ratio for each in those]),
    )


def judged(those: list[Case]) -> tuple[list[float], list[bool]]:
    """Return the error of each case and whether its interval held it, by the law of other sizes."""
    errors, held = [], []
    for size in sorted({each.parameters for each in those}):
        law, scatter = fitted([each for each in those if each.parameters != size])
        left = [each for each in those if each.parameters == size]
        sizes, replicas, steps, truth = _columns(left)
        shape = replicas ** law[1] * sizes ** law[2] * steps ** law[3]
        away = law[0] * shape - law[4] - truth
        errors += away.tolist()
        held += (np.abs(away) <= NORMAL_90 * scatter).tolist()
    return errors, held


def main() -> None:
    """Print the law, each of its errors, and the figures as JSON."""
    taken = arguments.parser(__doc__)
    taken.add_argument("folder", type=Path)
    taken.add_argument("--json", action="store_true", help="print the last line only")
    asked = taken.parse_args()
    those = cases(asked.folder)
    law, scatter = fitted(those)
    errors, held = judged(those)
    own = [
        excess(replicas=each.replicas, steps=each.steps, parameters=each.parameters)
        for each in those
    ]
    as_shipped = [each.ratio / case.ratio - 1 for each, case in zip(own, those, strict=True)]
    if not asked.json:
        for case, each in zip(those, own, strict=True):
            print(
                f"{case.parameters / 1e6:>8,.0f} M  {case.replicas} replicas, every {case.steps:>3}"
                f" steps: loss {case.ratio - 1:+.2%}, law {each.ratio - 1:+.2%}"
                f"{'' if each.low <= case.ratio <= each.high else '  *'}"
            )
        print(f"height, exponents, offset: {np.round(law, 5).tolist()}; scatter {scatter:.2%}")
        results.write(
            "replicas",
            asked.folder,
            "accuracy",
            claim="The loss of replicas that synchronise seldom is that of DiLoCo's papers.",
            anchor="final losses of arXiv 2503.09799 and 2501.18512, one size left out at a time",
            measure="relative error of the loss",
            **results.said_of(errors, held),
        )
    print(
        json.dumps(
            {
                "cases": len(those),
                "left_out_median": float(np.median(np.abs(errors))),
                "left_out_worst": float(np.max(np.abs(errors))),
                "coverage": float(np.mean(held)),
                "shipped_median": float(np.median(np.abs(as_shipped))),
                "scatter": scatter,
            }
        )
    )


if __name__ == "__main__":
    main()
