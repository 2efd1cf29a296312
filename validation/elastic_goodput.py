"""The goodput of an elastic job under failures, predicted from the same job with fewer of them.

    python -m validation.elastic_goodput --rounds 3

Each round records two jobs in the lab: hosts are killed once in each 20 s, and once in each 8 s.
The goodput of the second is predicted from the first, for the time between failures that the second
had. The start of the job is left out of both, because failures do not change it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import fullwire
from fullwire.simulation.goodput import Goodput, observed, with_failures
from validation import arguments, results

JOB = Path(__file__).parent / "jobs/elastic.py"
RARE_S, OFTEN_S = 20.0, 8.0
GOAL_POINTS = 2.0
COLUMNS = ["seed", "losses before", "losses", "s between", "predicted", "measured", "points"]


def recorded(folder: Path, every_s: float, seed: int, steps: int) -> fullwire.Run:
    """Record a job of three hosts that are killed by chance."""
    notes, run = folder / f"notes {every_s:g}", folder / f"{every_s:g}.run"
    notes.mkdir()
    lab = ["fullwire", "lab", "run", "--workers", "3", "--rate", "1Gbps", "--no-probe"]
    chaos = ["--chaos", f"kill every {every_s:g}s", "--seed", str(seed), "-o", str(run)]
    job = [sys.executable, str(JOB), str(notes), str(steps), "elastic"]
    subprocess.run([sys.executable, "-m", *lab, *chaos, "--", *job], check=True)
    return fullwire.read(run)


def without_start(course: Goodput) -> float:
    """Return the share of the time after the start that went into steps."""
    return course.work_s / (course.wall_s - course.start_s)


def main() -> None:
    """Play the rounds and write the findings."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4000, help="of each job, of some 11 ms")
    options = parser.parse_args()
    rows: list[list[results.Cell]] = []
    inside = 0
    for seed in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            rare = recorded(Path(name), RARE_S, seed, options.steps)
            often = recorded(Path(name), OFTEN_S, seed + 100, options.steps)
        course = observed(often.events)
        if course is None or not course.interruptions:
            raise SystemExit("the job with many kills lost no worker")
        between_s = (course.wall_s - course.start_s) / course.interruptions
        found = with_failures(rare.events, between_s)
        if found is None:
            raise SystemExit("the job with few kills lost no worker: expected more steps")
        measured = without_start(course)
        inside += found.low <= measured <= found.high
        points = 100 * (found.goodput - measured)
        losses, told = int(course.interruptions), (found.goodput, measured)
        shares = [round(share, 4) for share in told]
        rows.append([seed, found.failures, losses, round(between_s, 1), *shares, round(points, 2)])
        print(*rows[-1], flush=True)
    errors = [abs(float(row[-1] or 0)) / 100 for row in rows]
    spread = results.spread(errors)
    results.write(
        "elastic-goodput",
        claim="`whatif --failures` predicts the goodput of an elastic job.",
        anchor=f"goal: within {GOAL_POINTS:g} points of the goodput in the lab",
        summary=f"{100 * spread['median']:.2f} points off in the median of {len(rows)} jobs, "
        f"{100 * spread['worst']:.2f} in the worst; {inside} of {len(rows)} inside the interval",
        measure="absolute error of the goodput",
        cases=len(rows),
        **spread,
        tables=[
            results.Table(
                title="Goodput of a job whose hosts are killed once in 8 s, from one with 20 s",
                columns=COLUMNS,
                rows=rows,
            )
        ],
    )
    if spread["worst"] > GOAL_POINTS / 100:
        sys.exit(f"{100 * spread['worst']:.2f} points off in the worst job")


if __name__ == "__main__":
    main()
