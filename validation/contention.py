"""The scaling factor without a run of one worker: python -m validation.contention DIRECTORY

Each cell is a small training in the lab (jobs/crowded.py), recorded with probe steps. The same
training with one worker comes right before and right after it. The recording of the cell gives one
T1, and the mean of the two gives the reference. The rule of T1 and the width of its interval
(`answers/explain.py`) were chosen on the cells at 4 Gbps, which count as fitted. The other cells
judge the rule. A cell is disturbed where other programs took much of the processors in one of its
runs, or where the two references differ much: the reference then had another machine. Disturbed
cells do not count, and --again records them again.

The recordings also predict each other, as `fullwire compare` does: the same training on another
link, and with more or fewer ranks on the same processors.

Runs stay in DIRECTORY, and an existing run is not recorded again. With --seconds, recording stops
after that time, and a later call continues. Run it from the root of a checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import permutations, product
from pathlib import Path
from typing import NamedTuple

import fullwire as fw
from fullwire.answers.verification import verify
from fullwire.run.processors import share_of_others
from fullwire.units import show_time
from validation import arguments, results

LONGEST_S = 150.0
# The processors of a host: all of them, or one that it shares with every second host.
ON_ALL, ON_ONE = "all", "one"
FITTED_AT = "4Gbps"
DISTURBED = 0.2  # Of the processors: other programs took so much in one of the runs.
UNLIKE = 0.1  # The two references differ by so much.
LINKS = (("1Gbps", ON_ONE), ("2Gbps", ON_ALL), ("4Gbps", ON_ONE), ("10Gbps", ON_ALL))
STEPS = 32


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

    @property
    def job(self) -> tuple[str, str, str]:
        """What stays the same where only the link or the number of workers changes."""
        return self.backend, self.work, self.on


CELLS = [
    Cell(workers, backend, work, rate, on)
    for (rate, on), workers, backend, work in product(
        LINKS, (2, 4), ("gloo", "fullwire"), ("heavy", "light")
    )
]


class Held(NamedTuple):
    """An estimate or a prediction, and its measurement."""

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
    "references differ by",
]
PREDICTED = ["job", "from", "to", "measured", "predicted", "interval", "error", "holds"]


def main() -> None:
    """Record the missing runs, and print the tables."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    taken.add_argument("--seconds", type=float, default=1e9, help="begin no cell after so long")
    taken.add_argument("--again", action="store_true", help="record disturbed cells again")
    given = taken.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + given.seconds
    for cell in CELLS:
        if time.monotonic() < until_s:
            _record_missing(given.directory, cell, is_again=given.again)
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    held = list(_held(given.directory))
    counted = [each for each in held if not each.is_disturbed]
    judged = [each for each in counted if not each.is_fitted]
    if not judged:
        print("\nno judged cell is recorded and undisturbed: nothing is written")
        return
    fitted = [each for each in counted if each.is_fitted]
    split = results.split(
        "cells",
        [
            (name, [each.error for each in chosen], [each.holds for each in chosen])
            for name, chosen in (("fitted", fitted), ("judged", judged))
        ],
    )
    recorded = f"of {len(CELLS)} cells, {len(held)} are recorded, {len(counted)} undisturbed"
    figures = results.said_of([e.error for e in judged], [e.holds for e in judged])
    results.write(
        "contention",
        claim="T1 is known without a run of one worker.",
        anchor="the same job with one worker, measured right before and right after",
        measure="error of T1",
        tables=[
            split,
            results.Table(columns=COLUMNS, rows=results.rows([e.line for e in counted])),
        ],
        **{**figures, "summary": f"{figures['summary']} (judged cells; {recorded})"},
    )
    print(f"\n| {' | '.join(PREDICTED)} |\n{'|---' * len(PREDICTED)}|")
    crossed = list(_crossed(given.directory))
    if crossed:
        figures = results.said_of([e.error for e in crossed], [e.holds for e in crossed])
        print(f"\n{len(crossed)} predictions, {figures['summary']}")
        results.write(
            "crowded",
            claim="Steps on other links and with other numbers of ranks are predicted where ranks "
            "and communication share processors.",
            anchor="the same job under those conditions",
            measure="error of the step",
            tables=[results.Table(columns=PREDICTED, rows=results.rows([e.line for e in crossed]))],
            **figures,
        )


def _record_missing(place: Path, cell: Cell, *, is_again: bool) -> None:
    """Record the runs of a cell that are missing, and all of a disturbed one if so asked."""
    if is_again and (held := _held_in(place, cell)) is not None and held.is_disturbed:
        for path in _paths(place, cell):
            shutil.rmtree(path)
    job, before, after = _paths(place, cell)
    _record(cell, 1, before)
    _record(cell, cell.workers, job)
    _record(cell, 1, after)


def _paths(place: Path, cell: Cell) -> tuple[Path, Path, Path]:
    """Return the paths of a cell's run and of its two references."""
    job, before, after = (place / f"{cell.name}{name}.run" for name in ("", "_before", "_after"))
    return job, before, after


def _held(place: Path) -> Iterator[Held]:
    """Compare each cell's T1 with its runs of one worker, and print it."""
    for cell in CELLS:
        held = _held_in(place, cell)
        if held is not None:
            print(held.line, flush=True)
            yield held


def _held_in(place: Path, cell: Cell) -> Held | None:
    paths = _paths(place, cell)
    if not all(path.exists() for path in paths):
        return None
    found, *alone = map(fw.explain, paths)
    low_s, high_s = found.baseline_between_s
    truth_s = sum(each.step_s for each in alone) / len(alone)
    apart = max(each.step_s for each in alone) / min(each.step_s for each in alone) - 1
    error = found.baseline_step_s / truth_s - 1
    holds = low_s <= truth_s <= high_s
    is_fitted = cell.rate == FITTED_AT
    beside = [share_of_others(fw.read(path)) for path in paths]
    line = (
        f"| {cell.name} | {show_time(found.step_s)} | {show_time(truth_s)} | "
        f"{show_time(found.baseline_step_s)} | {show_time(low_s)} to {show_time(high_s)} | "
        f"{error:+.1%} | {'yes' if holds else 'NO'} | "
        f"{show_time(found.account['contention'])} | {found.verdict.kind} | "
        f"{'fitted' if is_fitted else 'judged'} | {', '.join(f'{each:.0%}' for each in beside)} | "
        f"{apart:.1%} |"
    )
    is_disturbed = max(beside) >= DISTURBED or apart >= UNLIKE
    return Held(is_fitted, is_disturbed, error, holds, line)


def _crossed(place: Path) -> Iterator[Held]:
    """Predict each undisturbed cell from each other one of its job, and print it."""
    runs = {cell: fw.read(path) for cell in CELLS if (path := place / f"{cell.name}.run").exists()}
    quiet = [cell for cell, run in runs.items() if share_of_others(run) < DISTURBED]
    for shown, asked in permutations(quiet, 2):
        found = verify(runs[shown], runs[asked]) if shown.job == asked.job else None
        if found is None:
            continue
        line = (
            f"| {', '.join(shown.job[:2])} | {shown.workers}x{shown.rate} | "
            f"{asked.workers}x{asked.rate} | {show_time(found.measured_s)} | "
            f"{show_time(found.predicted_s)} | {show_time(found.low_s)} to "
            f"{show_time(found.high_s)} | {found.error:+.1%} | {'yes' if found.holds else 'NO'} |"
        )
        print(line, flush=True)
        yield Held(False, False, found.error, found.holds, line)


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
        env={**os.environ, "BACKEND": cell.backend, "STEPS": str(STEPS)},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    sys.stderr.write(done.stderr if done.returncode else "")


if __name__ == "__main__":
    main()
