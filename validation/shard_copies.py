"""The cost of a second copy of each shard in another rank's memory.

    python -m validation.shard_copies

A model of 17 MB trains with FSDP2 and Adam in `fullwire.elastic`, in a lab. Its workers take steps
with copies and without in turns. The ratio of two neighbours' times says what the copies cost. The
workers of a cell compute for some time beside the collectives, as an accelerator would.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from validation import arguments, results

GOAL = 1.03
CELLS = (("10Gbps", 2), ("10Gbps", 4))
SHARES_OF_COMPUTING = (0.0, 0.5, 0.8)  # of a step without copies


def ratios(rate: str, workers: int, steps: int, step_s: float) -> tuple[float, list[float]]:
    """Train in a lab; return the usual time without copies, and the ratios of neighbours."""
    lab = [sys.executable, "-m", "fullwire", "lab", "run", "--workers", str(workers)]
    with tempfile.TemporaryDirectory() as name:
        job = [sys.executable, "-m", "validation.jobs.sharded", name, str(steps), "copies"]
        subprocess.run(
            [*lab, "--rate", rate, "--", *job],
            check=True,
            env=os.environ | {"STEP_S": f"{step_s:.4f}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        times = np.loadtxt(Path(name) / "times")
    return float(np.median(times[:, 1])), list(times[:, 0] / times[:, 1])


def main() -> None:
    """Measure each cell, and write the findings."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--steps", type=int, default=96)
    options = parser.parse_args()
    rows: list[list[results.Cell]] = []
    medians: list[float] = []
    for rate, workers in CELLS:
        bare_s, _ = ratios(rate, workers, 60, 0.0)
        for share in SHARES_OF_COMPUTING:
            step_s = bare_s * share / (1 - share)
            usual_s, found = ratios(rate, workers, options.steps, step_s)
            low, high = np.quantile(found, [0.25, 0.75])
            medians.append(float(np.median(found)))
            of_pairs = f"{low:.2f} to {high:.2f}"
            figures = [round(1e3 * usual_s, 1), round(medians[-1], 3)]
            rows.append([rate, workers, f"{share:.0%}", *figures, of_pairs, len(found)])
            print(*rows[-1], flush=True)
    results.write(
        "shard-copies",
        claim="A copy of each shard on another rank costs less, the more of a step is computed.",
        anchor=f"steps without copies, in turns with those that have them; goal: {GOAL:g} times",
        summary=f"{min(medians):.2f} to {max(medians):.2f} times a step without copies",
        measure="step with copies over step without, less 1",
        cases=len(medians),
        **results.spread([each - 1 for each in medians]),
        tables=[
            results.Table(
                columns=[
                    *("rate", "workers", "of a step computed", "ms without", "ratio"),
                    *("quartiles", "pairs"),
                ],
                rows=rows,
            )
        ],
    )
    if max(medians) > GOAL:
        sys.exit(f"{max(medians):.3f} times, above {GOAL:g}")


if __name__ == "__main__":
    main()
