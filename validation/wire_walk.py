"""One variable on a slow link and on a fast one: python -m validation.wire_walk DIRECTORY

A job (jobs/walked.py) is recorded on two hosts of a lab at 1 Gbps, over our transport. `whatif`
predicts its step with a wire format. Then the job runs with FULLWIRE_WIRE, and nothing else
changes: its step is held against the prediction, and its losses against the first ones. At 10 Gbps
the job runs with `auto` and without, in turns.

Runs stay in DIRECTORY, and an existing run is not recorded again. Run it from the root of a
checkout, with nothing else on the machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import fullwire as fw
from fullwire.run.processors import share_of_others
from fullwire.units import show_time
from validation import arguments, results
from validation.cells import in_the_lab

WIRES = ("bf16", "int8")
SLOW, FAST = "2x1Gbps", "2x10Gbps"
STEPS = "30"
COLUMNS = ["FULLWIRE_WIRE", "step", "times faster", "predicted before", "interval", "error"]
OF_LOSS = ["largest difference of a loss", "last loss", "beside other work"]


def main() -> None:
    """Record the missing runs, and write the tables."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    taken.add_argument("--rounds", type=int, default=5)
    given = taken.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    plain = recorded(given.directory, SLOW, "float32")
    plain_s, losses = fw.explain(plain).step_s, losses_of(plain)
    busy = f"{share_of_others(plain):.0%}"
    rows: list[list[results.Cell]] = [
        ["float32", show_time(plain_s), 1.0, "", "", "", "", f"{losses[-1]:.4f}", busy]
    ]
    errors, holds, faster = [], [], []
    for name in WIRES:
        table = fw.whatif(plain, compression=name)
        predicted_s = float(table["step_s"][0])
        low_s, high_s = (float(end[0]) for end in table.interval_s)
        run = recorded(given.directory, SLOW, name)
        step_s, others = fw.explain(run).step_s, losses_of(run)
        errors.append(predicted_s / step_s - 1)
        holds.append(low_s <= step_s <= high_s)
        faster.append(plain_s / step_s)
        apart = float(np.abs(np.subtract(others, losses)).max())
        rows.append(
            [
                *(name, show_time(step_s), round(faster[-1], 2), show_time(predicted_s)),
                *(f"{show_time(low_s)} to {show_time(high_s)}", f"{errors[-1]:+.1%}"),
                *(f"{apart:.1e}", f"{others[-1]:.4f}", f"{share_of_others(run):.0%}"),
            ]
        )
    times: dict[str, list[float]] = {"float32": [], "auto": []}
    for number in range(given.rounds):
        for name in sorted(times, reverse=bool(number % 2)):
            found = recorded(given.directory, FAST, name, f"_{number}")
            times[name].append(fw.explain(found).step_s)
    ratio = median(times["auto"]) / median(times["float32"])
    fast: list[list[results.Cell]] = [
        [name, show_time(median(took)), f"{show_time(min(took))} to {show_time(max(took))}"]
        for name, took in times.items()
    ]
    told: dict[str, Any] = results.said_of(errors, holds)
    quicker = ", ".join(f"{name} {by:.2f}x" for name, by in zip(WIRES, faster, strict=True))
    told["summary"] = f"{quicker}; {told['summary']}; auto at 10 Gbps {ratio:.2f} of float32"
    results.write(
        "wire-walk",
        claim="One variable shortens the step on a slow link as predicted, and hurts no fast one.",
        anchor="The same job without the variable, and `whatif` of its recording.",
        measure="predicted over measured step, less 1",
        tables=[
            results.Table(title="Two hosts, 1 Gbps", columns=COLUMNS + OF_LOSS, rows=rows),
            results.Table(
                title=f"Two hosts, 10 Gbps, {given.rounds} recordings each in turns",
                columns=["FULLWIRE_WIRE", "step (median)", "range"],
                rows=fast,
            ),
        ],
        **told,
    )
    print(told["summary"], rows, fast, sep="\n")


def recorded(place: Path, cell: str, wire: str, mark: str = "") -> fw.Run:
    """Open a recording with this variable; make it first if it is missing."""
    os.environ["FULLWIRE_WIRE"] = wire
    path = place / f"{cell}_{wire}{mark}.run"
    return in_the_lab(path, cell, ("validation.jobs.walked", STEPS), "fullwire")


def losses_of(run: fw.Run) -> list[float]:
    """Return the losses that the job has logged, step by step."""
    return [float(value) for value in run.metrics.value[run.metrics.name == "loss"]]


if __name__ == "__main__":
    main()
