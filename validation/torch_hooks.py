"""Torch's communication hooks beside ours, on Gloo in one job: python -m validation.torch_hooks

A lab's ranks send one bucket of 25 MiB with each hook, in turns (jobs/hooked.py). The error is that
of the mean over the ranks, relative to the mean in float64. Run it from the root of a checkout,
with nothing else on the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from validation import arguments, results

LABS = ((2, "1Gbps"), (4, "1Gbps"))
COLUMNS = ["workers", "link", "form", "gradient", "torch", "ours", "times", "error, torch", "ours"]


def main() -> None:
    """Measure, and write the table."""
    taken = arguments.parser(__doc__)
    taken.add_argument("--rounds", type=int, default=5)
    rounds = taken.parse_args().rounds
    rows = [row for lab in LABS for row in side_by_side(*lab, rounds)]
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    both = [row for row in rows if isinstance(row[6], float)]
    results.write(
        "torch-hooks",
        claim="Our hooks on Gloo lose less than torch's of the same form, in about the time.",
        anchor="Torch's own hooks in the same job, in turns.",
        summary=", ".join(
            f"{form} {min(times):.2f} to {max(times):.2f}x"
            for form in dict.fromkeys(str(row[2]) for row in both)
            if (times := [float(row[6] or 0) for row in both if row[2] == form])
        ),
        cases=len(rows),
        tables=[results.Table(columns=COLUMNS, rows=rows)],
    )


def side_by_side(workers: int, rate: str, rounds: int) -> list[list[results.Cell]]:
    """Return a row for each form: the time and the error of torch's hook and of ours."""
    with TemporaryDirectory() as folder:
        place = Path(folder) / "found.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "fullwire", "lab", "run"),
                *("--workers", str(workers), "--rate", rate, "--"),
                *(sys.executable, "-m", "validation.jobs.hooked", str(place), str(rounds)),
            ],
            check=True,
            timeout=300,
        )
        found: list[dict[str, Any]] = json.loads(place.read_text())
    for each in found:
        if "fails" in each:
            print(f"{each['whose']}, {each['form']}: {each['fails']}", file=sys.stderr)
    rows: list[list[results.Cell]] = []
    for form in dict.fromkeys(each["form"] for each in found):
        of = {each["whose"]: each for each in found if each["form"] == form}
        theirs, ours = of.get("torch", of.get("none", {})), of.get("fullwire", {})
        has_both = bool(theirs.get("s") and ours.get("s"))
        rows.append(
            [
                *(workers, rate, form, theirs["gradient"]),
                *(_time(theirs), _time(ours)),
                round(theirs["s"] / ours["s"], 2) if has_both else "",
                *(f"{each['error']:.1e}" if "error" in each else "" for each in (theirs, ours)),
            ]
        )
    return rows


def _time(found: dict[str, Any]) -> str:
    return "fails" if "fails" in found else f"{1e3 * found['s']:.1f} ms" if found else ""


if __name__ == "__main__":
    main()
