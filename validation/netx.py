"""The paper's model, compared with its 240 rows computed exactly, through the command line.

    .venv/bin/python -m validation.netx ../shared/data/netx

Expected values: overhead and scaling factor of VGG16 and ResNet50 for 4 cluster sizes, 5 bandwidths
and 6 compression ratios. Exit status 1 if any is off by more than TOLERANCE.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from validation import arguments, results

TOLERANCE = 1e-5
STEP_TIME_S = {"vgg16": "0.19452352295080985s", "resnet50": "0.12808580219559176s"}


def fullwire(*arguments: str | Path) -> str:
    """Run the command line and return its output."""
    command = [sys.executable, "-m", "fullwire", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def predicted(data: Path, model: str, rows: list[dict[str, str]], workplace: Path) -> Any:
    """Predict all rows of one model with one command."""
    run = workplace / f"{model}.run"
    fullwire(
        "import",
        data / f"{model}.bk.log",
        "--step-time",
        STEP_TIME_S[model],
        "--reduce-cost",
        data / "cuda_vec_add.log",
        "-o",
        run,
    )
    printed = fullwire(
        "whatif",
        run,
        "--workers",
        _distinct(rows, "N"),
        "--bandwidth",
        ",".join(f"{rate}Gbps" for rate in _distinct(rows, "bw_gbps").split(",")),
        "--compression",
        _distinct(rows, "compression"),
        "--buckets",
        "paper",
        "--transport",
        "full",
        "--algorithm",
        "ring",
        "--json",
    )
    return {
        (row["workers"], row["bandwidth_bps"], row["compression"]): row
        for row in json.loads(printed)["rows"]
    }


def worst_errors(data: Path) -> dict[tuple[str, str], tuple[int, float]]:
    """Return, by model and column, how many rows were compared and the worst relative error."""
    with (data / "expected.csv").open() as file:
        expected = list(csv.DictReader(file))
    found: dict[tuple[str, str], tuple[int, float]] = {}
    with tempfile.TemporaryDirectory() as workplace:
        for model in STEP_TIME_S:
            rows = [row for row in expected if row["model"] == model]
            answers = predicted(data, model, rows, Path(workplace))
            for ours, theirs in (("scaling_factor", "scaling"), ("overhead_s", "overhead_s")):
                errors = [abs(_answer(answers, row)[ours] / float(row[theirs]) - 1) for row in rows]
                found[model, ours] = (len(errors), max(errors))
    return found


def _distinct(rows: list[dict[str, str]], column: str) -> str:
    return ",".join(dict.fromkeys(row[column] for row in rows))


def _answer(answers: Any, row: dict[str, str]) -> Any:
    return answers[int(row["N"]), float(row["bw_gbps"]) * 1e9, float(row["compression"])]


def main() -> None:
    """Print the worst error of each model and column."""
    taken = arguments.parser(__doc__)
    taken.add_argument("data", type=Path)
    data = taken.parse_args().data
    found = worst_errors(data)
    print("model     column           rows  worst relative error")
    for (model, column), (count, error) in found.items():
        print(f"{model:<9} {column:<15} {count:>5}  {error:.1e}")
    worst = max(error for _, error in found.values())
    cases = sum(count for count, _ in found.values())
    results.write(
        "netx",
        data,
        "netx",
        claim="The paper's own model is reproduced exactly.",
        anchor="240 configurations of the paper's code, computed exactly",
        summary=f"worst relative error {worst:.0e} in {cases} values",
        measure="relative error of scaling factor and overhead",
        cases=cases,
        worst=worst,
        tables=[
            results.Table(
                columns=["model", "column", "rows", "worst relative error"],
                rows=[[*key, count, f"{error:.1e}"] for key, (count, error) in found.items()],
            )
        ],
    )
    sys.exit(any(error > TOLERANCE for _, error in found.values()))


if __name__ == "__main__":
    main()
