"""The scaling factor without a run of one worker: python -m validation.contention DIRECTORY

Each cell is a small training in the lab (jobs/crowded.py), recorded with probe steps. The same
training with one worker follows right after it. The first run alone gives one scaling factor, and
both runs together give the reference. Runs stay in DIRECTORY, and an existing run is not recorded
again. With --seconds, recording stops after that time, and a later call continues. The rule of T1
and the width of its interval (`answers/explain.py`) were chosen on the cells at 1 Gbps, which count
as fitted. The remaining cells judge them. A cell counts only where other programs took little of
the processors in both of its runs: otherwise the reference had another machine. Remove the runs of
a disturbed cell to record them again. Run it from the root of a checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import fullwire as fw
from fullwire.simulation.calibrate import share_of_others
from fullwire.units import show_time
from validation import arguments, results

LONGEST_S = 150.0
# The processors of a host: all of them, or one that it shares with every second host.
ON_ALL, ON_ONE = "all", "one"
FITTED_AT = "1Gbps"
DISTURBED = 0.2  # Of the processors: other programs took so much in one of the two runs.
LINKS = (("1Gbps", ON_ALL), ("4Gbps", ON_ONE), ("10Gbps", ON_ALL))


class Cell(NamedTuple):
    """One condition."""

    workers: int
    backend: str
    work: str
    rate: str
    on: str

    @property
    def name(self) -> str:
        """The name of its runs."""
        return f"{self.workers}x{self.rate}_{self.backend}_{self.work}_{self.on}"


CELLS = [
    Cell(workers, backend, work, rate, on)
    for (rate, on), workers, backend, work in product(
        LINKS, (2, 4), ("gloo", "fullwire"), ("heavy", "light")
    )
]


class Held(NamedTuple):
    """An estimate and its measurement."""

    is_fitted: bool
    is_disturbed: bool
    error: float
    holds: bool
    line: str


COLUMNS = [
    "cell",
    "step",
    "alone",
    "estimated",
    "interval",
    "error",
    "holds",
    "contention",
    "verdict",
    "cell is",
    "beside other work",
]


def main() -> None:
    """Record the missing runs, and print the table."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    taken.add_argument("--seconds", type=float, default=1e9, help="begin no cell after so long")
    given = taken.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    held = list(_held(given.directory, time.monotonic() + given.seconds))
    counted = [each for each in held if not each.is_disturbed]
    fitted = [each for each in counted if each.is_fitted]
    judged = [each for each in counted if not each.is_fitted]
    for name, chosen in (("fitted", fitted), ("judged", judged)):
        if chosen:
            figures = results.said_of([e.error for e in chosen], [e.holds for e in chosen])
            print(f"\n{name}: {len(chosen)} cells, {figures['summary']}")
    if not counted:
        print("\nno cell is recorded and undisturbed: nothing is written")
        return
    chosen, kind = (judged, "judged") if judged else (fitted, "fitted")
    figures = results.said_of([e.error for e in chosen], [e.holds for e in chosen])
    recorded = (
        f"{kind} cells; of {len(CELLS)}, {len(held)} are recorded, {len(counted)} undisturbed"
    )
    results.write(
        "contention",
        claim="T1 is known without a run of one worker.",
        anchor="the same job with one worker, measured right after",
        measure="error of T1",
        tables=[results.Table(columns=COLUMNS, rows=results.rows([e.line for e in counted]))],
        **{**figures, "summary": f"{figures['summary']} ({recorded})"},
    )


def _held(place: Path, until_s: float) -> Iterator[Held]:
    for cell in CELLS:
        job, alone = place / f"{cell.name}.run", place / f"{cell.name}_alone.run"
        if time.monotonic() < until_s:
            _record(cell, cell.workers, job)
            _record(cell, 1, alone)
        if not (job.exists() and alone.exists()):
            continue
        found = fw.explain(job)
        truth = fw.explain(alone)
        low_s, high_s = found.baseline_between_s
        error = found.baseline_step_s / truth.step_s - 1
        holds = low_s <= truth.step_s <= high_s
        is_fitted = cell.rate == FITTED_AT
        beside = share_of_others(fw.read(job)), share_of_others(fw.read(alone))
        line = (
            f"| {cell.name} | {show_time(found.step_s)} | {show_time(truth.step_s)} | "
            f"{show_time(found.baseline_step_s)} | {show_time(low_s)} to {show_time(high_s)} | "
            f"{error:+.1%} | {'yes' if holds else 'NO'} | "
            f"{show_time(found.account['contention'])} | {found.verdict.kind} | "
            f"{'fitted' if is_fitted else 'judged'} | {beside[0]:.0%}, {beside[1]:.0%} |"
        )
        print(line, flush=True)
        is_disturbed = max(beside) >= DISTURBED
        yield Held(is_fitted, is_disturbed, error, holds, line)


def _record(cell: Cell, workers: int, path: Path) -> None:
    """Record a cell in the lab, if it is missing."""
    if path.exists():
        return
    pinned = [f"{host}:{host % (os.cpu_count() or 1)}" for host in range(workers)]
    cpus = [word for each in pinned for word in ("--cpus", each)] if cell.on == ON_ONE else []
    lab = ["lab", "run", "--workers", str(workers), "--rate", cell.rate, *cpus, "-o", str(path)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fullwire.cli", *lab),
            *("--", sys.executable, "-m", "validation.jobs.crowded", cell.work),
        ],
        env={**os.environ, "BACKEND": cell.backend},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    sys.stderr.write(done.stderr if done.returncode else "")


if __name__ == "__main__":
    main()
