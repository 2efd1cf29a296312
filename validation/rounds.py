"""Rounds of local steps on a slow link, beside DDP: python -m validation.rounds DIRECTORY

Three small models train on two workers of a lab, on links of 100 Mbps, until their held-out loss is
at a target. They sum at each step (DDP), or once in 10 or 30 steps (`fullwire.elastic` with
`sync_every`). Each training has two seeds. One recording of DDP at 1 Gbps predicts the mean step of
all three. Finished trainings and recordings stay in DIRECTORY, and the script goes on where it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import fullwire as fw
from validation import arguments, results
from validation.settings_to_target import wide

RATE, RECORDED_RATE, WORKERS = "100Mbps", "1Gbps", 2
EVERY, SEEDS = (0, 10, 30), (0, 1)
LONGEST_S = 600.0


def main() -> None:
    """Train what is missing, and write the table."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    directory = taken.parse_args().directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "trained.jsonl"
    cells = {
        (training.name, every, seed): f"{training.name}/{every}/{seed}"
        for seed in SEEDS
        for training in wide()
        for every in EVERY
    }
    for cell in cells.values():
        if cell not in finished(file):
            train(RATE, file, cell)
    done = finished(file)
    rows: list[list[results.Cell]] = []
    times: list[float] = []
    errors: list[float] = []
    holds: list[bool] = []
    for model in dict.fromkeys(name for name, _, _ in cells):
        usual_s = mean(done[cells[model, 0, seed]]["time_s"] for seed in SEEDS)
        run = directory / f"{model}.run"
        if not run.exists():
            train(RECORDED_RATE, Path("/dev/null"), cells[model, 0, 0], "-o", str(run))
        steps_s = [each or 1 for each in EVERY]
        predicted = fw.whatif(run, bandwidth=RATE, local_steps=steps_s)
        for place, every in enumerate(EVERY):
            of_seeds = [done[cells[model, every, seed]] for seed in SEEDS]
            steps, time_s, step_s = (
                mean(one[name] for one in of_seeds) for name in ("steps", "time_s", "step_s")
            )
            times.append(usual_s / time_s)
            low_s, high_s = (float(end[place]) for end in predicted.interval_s)
            holds += [low_s <= one["step_s"] <= high_s for one in of_seeds]
            errors.append(float(predicted["step_s"][place]) / step_s - 1)
            words = f"each {every} steps" if every else "each step (DDP)"
            cost = [f"{steps:.0f}", f"{1e3 * step_s:.1f}", f"{time_s:.1f}", f"{times[-1]:.1f}x"]
            told = [f"{1e3 * float(predicted['step_s'][place]):.1f}", f"{errors[-1]:+.0%}"]
            rows.append([model, words, *cost, *told])
            print("  ".join(map(str, rows[-1])), flush=True)
    best = [max(times[place : place + len(EVERY)]) for place in range(0, len(times), len(EVERY))]
    said = results.said_of(errors, holds)
    said["summary"] = (
        f"{min(best):.1f} to {max(best):.1f} times sooner at {RATE}; {said['summary']}"
    )
    results.write(
        "rounds",
        claim="Workers on a slow link reach a loss sooner if they sum once in many steps.",
        anchor="DDP on the same backend, the same models and links",
        measure="error of the predicted mean step",
        **said,
        tables=[
            results.Table(
                columns=[
                    *("model", "sums", "steps", "ms a step", "s to the loss", "sooner"),
                    *("predicted ms", "error"),
                ],
                rows=rows,
            )
        ],
    )


def finished(file: Path) -> dict[str, dict[str, Any]]:
    """Return the finished trainings by their cell."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["cell"]: row for row in map(json.loads, lines)}


def train(rate: str, file: Path, cell: str, *options: str) -> None:
    """Train one cell in a lab of its own."""
    lab = [sys.executable, "-m", "fullwire", "lab", "run", "--workers", str(WORKERS)]
    job = [sys.executable, "-m", "validation.jobs.rounds", str(file), cell]
    subprocess.run([*lab, "--rate", rate, *options, "--", *job], check=True, timeout=LONGEST_S)


if __name__ == "__main__":
    main()
