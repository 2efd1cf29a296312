"""Predicted steps of large models beside measured ones, from tables of published runs.

    .venv/bin/python -m validation.plans RUNS.csv [--memory GOLDENS.csv] [--json]

Blind: the time of each row from its description alone. One run given: one row of each source and
device calibrates, and the others are judged. Each row calibrates in turn, and the errors of all
choices count. The columns are those of data/llm/train_runs.csv; empty
cells are assumed by the rules of `plan_rows.py`, and the interval grows. The last line is one JSON
object. Errors are shares of the measured time. Sources weigh the same, and rows of one
`config_group` count as one. Rows that cannot be judged are counted by reason: `refused` for runs,
and `memory.refused` for GOLDENS.csv.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fullwire.clusters.cluster import Floats
from fullwire.errors import UsageError
from fullwire.simulation.habits import Calibration, guessed_variance, interval_factor
from validation import arguments, memory, results
from validation.plan_fit import Batches, left_out, weighted, weights
from validation.plan_rows import Measured, read
from validation.tables import is_published

TABLE = "llm/train_runs.csv"  # of the published result


@dataclass(frozen=True, slots=True)
class Judged:
    """A predicted time beside its measured one."""

    row: Measured
    predicted_s: float
    factor: float  # to the upper end of the interval
    weight: float

    @property
    def error(self) -> float:
        """Return the share of the measured time that the prediction is off."""
        return abs(self.predicted_s / self.row.step_s - 1)

    @property
    def is_inside(self) -> bool:
        """Whether the measured time is in the interval."""
        ratio = self.row.step_s / self.predicted_s
        return 1 / self.factor <= ratio <= self.factor


def blind(rows: Sequence[Measured], predicted_s: Floats) -> list[Judged]:
    """Judge each row by its description."""
    shares = weights(rows)
    return [
        Judged(
            row,
            float(time_s),
            interval_factor(
                is_moe=row.is_moe, assumed=row.assumed, device_spread=row.device.spread
            ),
            float(share),
        )
        for row, time_s, share in zip(rows, predicted_s, shares, strict=True)
    ]


def one_run_given(rows: Sequence[Measured], predicted_s: Floats, parts: Floats) -> list[Judged]:
    """Judge the rows of each source and device by each of their others as calibration.

    `parts` holds the shares of each row's step that are doubted most.
    """
    shares = weights(rows)
    groups: dict[tuple[str, str, float, bool], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        device = row.device
        groups[row.source, device.family, device.memory_bytes, row.is_moe].append(number)
    judged = []
    for numbers in groups.values():
        for known in numbers:
            given = rows[known]
            others = [number for number in numbers if rows[number].group != given.group]
            if not others:
                continue
            log = np.log([given.step_s / predicted_s[known]])
            told = Calibration(
                log,
                parts[[known]],
                (_kind_of_step(given),),
                is_moe=given.is_moe,
                is_unlike="device" in given.assumed,
                guessed=guessed_variance(given.assumed),
            )
            models = tuple(_kind_of_step(rows[number]) for number in others)
            guessed = np.array([guessed_variance(rows[number].assumed) for number in others])
            factors = told.factors(parts[others], models)
            spreads = told.spreads(parts[others], models, guessed)
            for number, factor, spread in zip(others, factors, spreads, strict=True):
                row = rows[number]
                judged.append(
                    Judged(
                        row,
                        float(predicted_s[number] * factor),
                        interval_factor(
                            is_moe=row.is_moe,
                            assumed=row.assumed,
                            calibrated_spread=float(spread),
                            device_spread=row.device.spread,
                        ),
                        float(shares[number]) / len(numbers),
                    )
                )
    return judged


def _kind_of_step(row: Measured) -> tuple[str, str]:
    """Return the model and the software of a run: one source compares two kinds of software."""
    return row.architecture.name, row.framework


def figures(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return rows, sources, the middle and the ninth tenth of the errors, and the coverage."""
    if not judged:
        return {"rows": 0, "sources": 0, "median": None, "p90": None, "coverage": None}
    errors = np.array([one.error for one in judged])
    share = np.array([one.weight for one in judged])
    inside = np.array([one.is_inside for one in judged])
    return {
        "rows": len({id(one.row) for one in judged}),
        "sources": len({one.row.source for one in judged}),
        "median": round(weighted(errors, share, 0.5), 4),
        "p90": round(weighted(errors, share, 0.9), 4),
        "coverage": round(float(share[inside].sum() / share.sum()), 4),
    }


def by_kind(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """Return the figures of models without and with experts."""
    return {
        kind: figures([one for one in judged if one.row.is_moe == is_moe])
        for kind, is_moe in (("dense", False), ("moe", True))
    }


def ranking(rows: Sequence[Measured], predicted_s: Floats) -> dict[str, Any]:
    """Return how much the plan that looks best costs against the best measured one."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        model, layout = row.architecture, row.layout
        where = (row.source, row.device.family, row.device.memory_bytes, layout.devices)
        job = (layout.sequence, layout.precision, row.batch_share * layout.global_batch)
        what = (model.layers, model.hidden, model.heads, model.moe)
        groups[(*where, *job, *what)].append(number)
    regrets = []
    for numbers in groups.values():
        plans = {repr(rows[number].layout) for number in numbers}
        if len(plans) > 1:
            chosen = min(numbers, key=lambda number: predicted_s[number])
            best_s = min(rows[number].step_s for number in numbers)
            regrets.append(rows[chosen].step_s / best_s - 1)
    return {
        "groups": len(regrets),
        "regret_median": round(median(regrets), 4) if regrets else None,
        "regret_worst": round(max(regrets), 4) if regrets else None,
    }


def judged_memory(path: Path | None) -> dict[str, Any]:
    """Return the errors of peak memory, where a table of it is given; each test counts once.

    Refused rows are counted here, apart from those of runs: most are of architectures that no plan
    has.
    """
    of_tests: dict[str, list[float]] = defaultdict(list)
    cases, refused = ([], Counter[str]()) if path is None else memory.cases(path)
    for case in cases:
        of_tests[case.test].append(abs(case.error))
    errors = [median(errors) for errors in of_tests.values()]
    return {
        "rows": sum(map(len, of_tests.values())),
        "median": round(median(errors), 4) if errors else None,
        "p90": round(float(np.quantile(errors, 0.9)), 4) if errors else None,
        "within_10": round(float(np.mean(np.array(errors) <= 0.1)), 4) if errors else None,
        "refused": dict(refused.most_common()),
    }


def show(rows: Sequence[Measured], predicted_s: Floats, write: Callable[[str], object]) -> None:
    """Write a line for each source and device, and each assumption with its rows."""
    lines: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row, time_s in zip(rows, predicted_s, strict=True):
        kind = "moe" if row.is_moe else "dense"
        lines[row.source, row.device.family, kind].append(time_s / row.step_s - 1)
    write(f"{'source':24} {'device':8} {'kind':6} {'rows':>5}  error: median, low, high\n")
    for (source, device, kind), errors in sorted(lines.items()):
        low, high = min(errors), max(errors)
        write(
            f"{source:24} {device:8} {kind:6} {len(errors):5}  "
            f"{median(errors):+.0%} {low:+.0%} {high:+.0%}\n"
        )
    assumed = Counter(gap for row in rows for gap in row.assumed)
    for gap, count in assumed.most_common():
        write(f"assumed in {count} rows: {gap}\n")


def write_left_out(rows: Sequence[Measured]) -> None:
    """Write the figures of the fitted runs, and of each laboratory when it is left out."""
    batches = Batches(rows)
    seen_s = batches.predicted_s()
    seen_shares = batches.shares.copy()
    unseen_s, unseen_shares = left_out(batches)
    lines: list[list[results.Cell]] = []
    for title in ("blind", "one run given"):
        for kind in ("dense", "moe"):
            for source, times_s, shares in (
                ("fitted", seen_s, seen_shares),
                ("left out", unseen_s, unseen_shares),
            ):
                is_blind = title == "blind"
                judged = blind(rows, times_s) if is_blind else one_run_given(rows, times_s, shares)
                found = by_kind(judged)[kind]
                parts = [f"{found[name]:.1%}" for name in ("median", "p90", "coverage")]
                lines.append([title, kind, source, found["rows"], found["sources"], *parts])
    dense = by_kind(blind(rows, unseen_s))["dense"]
    order = ranking(rows, seen_s)
    results.write(
        "plans",
        claim="The step of a large model under a parallel plan is predicted from its description.",
        anchor="published runs on A100 to GB300, 16 sources",
        summary=f"dense, laboratories left out: median {dense['median']:.1%}, p90 "
        f"{dense['p90']:.1%}, {dense['coverage']:.0%} in their interval",
        measure="error of the step, dense models, blind, of laboratories that no constant has seen",
        cases=dense["rows"],
        median=dense["median"],
        p90=dense["p90"],
        coverage=dense["coverage"],
        tables=[
            results.Table(
                columns=[
                    *("judged", "model", "constants", "rows", "sources", "median", "p90"),
                    "in the interval",
                ],
                rows=lines,
            ),
            results.Table(
                title="The plan that looks best among those measured for one job",
                columns=["jobs", "slower than the best measured, median", "worst"],
                rows=[
                    [
                        order["groups"],
                        f"{order['regret_median']:.1%}",
                        f"{order['regret_worst']:.1%}",
                    ]
                ],
            ),
        ],
    )


def main(given: Sequence[str] | None = None) -> None:
    """Judge a table, and end with one line of JSON."""
    parser = arguments.parser(__doc__)
    parser.add_argument("runs", type=Path, help="a table of measured runs")
    parser.add_argument("--memory", type=Path, help="a table of measured peak memory")
    parser.add_argument(
        "--left-out", action="store_true", help="judge by constants without each laboratory; write"
    )
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    asked = parser.parse_args(given)
    for table in (asked.runs, asked.memory):
        if table is not None and not table.is_file():
            parser.error(f"{table}: expected a table of runs, found no file")
    if asked.left_out and not is_published(asked.runs, TABLE):
        parser.error(f"--left-out writes our result: expected the published table {TABLE}")
    try:
        rows, refused = read(asked.runs)
        of_memory = judged_memory(asked.memory)
    except UsageError as error:
        parser.error(str(error))
    batches = Batches(rows)
    predicted_s = batches.predicted_s()
    if asked.left_out:
        write_left_out([row for row in rows if row.split == "fit" and row.quality in "AB"])
        return
    if not asked.json:
        show(rows, predicted_s, sys.stdout.write)
    result = {
        "blind": by_kind(blind(rows, predicted_s)),
        "one_run_given": by_kind(one_run_given(rows, predicted_s, batches.shares)),
        "memory": of_memory,
        "ranking": ranking(rows, predicted_s),
        "refused": refused,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
