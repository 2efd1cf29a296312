"""Predictions of small trainings from each other: python -m validation.cells DIRECTORY

Each job (jobs/cell.py) is recorded in the lab under several conditions: other links, more and fewer
workers. Each recording predicts the others, as `fullwire compare` does. The rules were chosen on
the cells of FITTED. Those of JUDGED were recorded afterwards, and they judge the rules. Runs stay
in DIRECTORY, and an existing run is not recorded again. Recordings during which other work took
much of the processors are marked, because no two of these are alike. Run it from the root of a
checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import fullwire as fw
from fullwire.answers.verification import Verification, verify
from fullwire.run.processors import share_of_others
from fullwire.units import show_time
from validation import arguments, results

LONGEST_S = 90.0
TRIES = 5  # until the links reach their rates, on a machine that has other work
MUCH = 0.15  # of the processors, taken by other work
FITTED = {
    ("sleeping", "gloo"): ("2x300Mbps", "2x6Gbps", "4x2Gbps"),
    ("sleeping", "fullwire"): ("2x500Mbps", "2x5Gbps", "3x8Gbps"),
    ("computing", "gloo"): ("2x700Mbps", "2x5Gbps", "4x8Gbps"),
    ("computing", "fullwire"): ("2x1Gbps", "3x4Gbps"),
    ("halves", "gloo"): ("2x500Mbps", "3x4Gbps"),
    ("adding", "gloo"): ("2x400Mbps", "2x4Gbps", "3x8Gbps"),
    ("by-hand", "gloo"): ("2x1Gbps", "3x5Gbps"),
    ("by-hand", "fullwire"): ("2x800Mbps", "3x6Gbps"),
    ("sharded", "gloo"): ("2x500Mbps", "2x4Gbps"),
    ("small", "gloo"): ("2x500Mbps", "2x2Gbps", "2x10Gbps"),
    ("small", "fullwire"): ("2x500Mbps", "2x3Gbps", "2x8Gbps"),
}
JUDGED = {
    ("sleeping", "gloo"): ("2x400Mbps", "2x8Gbps", "3x3Gbps"),
    ("sleeping", "fullwire"): ("2x700Mbps", "2x6Gbps", "4x4Gbps"),
    ("computing", "gloo"): ("2x900Mbps", "2x4Gbps", "3x6Gbps"),
    ("computing", "fullwire"): ("2x600Mbps", "2x5Gbps"),
    ("halves", "gloo"): ("2x700Mbps", "2x5Gbps"),
    ("adding", "gloo"): ("2x600Mbps", "3x5Gbps"),
    ("by-hand", "gloo"): ("2x700Mbps", "2x6Gbps"),
    ("by-hand", "fullwire"): ("2x1Gbps", "3x4Gbps"),
    ("sharded", "gloo"): ("2x1Gbps", "2x6Gbps", "3x2Gbps"),
    ("small", "gloo"): ("2x1Gbps", "2x3Gbps", "2x8Gbps"),
    ("small", "fullwire"): ("2x700Mbps", "2x2Gbps", "2x10Gbps"),
    ("uneven", "gloo"): ("2x1Gbps", "2x5Gbps"),
    ("deep", "gloo"): ("2x200Mbps", "2x1Gbps", "2x3Gbps", "2x9Gbps"),
    ("wide", "gloo"): ("2x200Mbps", "2x1Gbps", "2x3Gbps", "2x9Gbps"),
    ("convolving", "gloo"): ("2x200Mbps", "2x1Gbps", "2x3Gbps", "2x9Gbps"),
    ("attending", "gloo"): ("2x200Mbps", "2x1Gbps", "2x3Gbps", "2x9Gbps"),
    ("attending", "fullwire"): ("2x300Mbps", "2x2Gbps", "2x8Gbps"),
}


class Held(NamedTuple):
    """A prediction, and whether both recordings had the machine to themselves."""

    found: Verification
    is_quiet: bool
    line: str


COLUMNS = [
    "job",
    "from",
    "to",
    "measured",
    "predicted",
    "interval",
    "error",
    "holds",
    "beside other work",
]


def main() -> None:
    """Record the missing runs, and print the table."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    taken.add_argument(
        "--seconds", type=float, default=1e9, help="begin no recording after so long"
    )
    given = taken.parse_args()
    place: Path = given.directory
    place.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + given.seconds
    missing = 0
    for (kind, backend), cells in (*FITTED.items(), *JUDGED.items()):
        for cell in cells:
            if time.monotonic() < until_s:
                recorded(kind, backend, cell, place)
            missing += not _path(kind, backend, cell, place).exists()
    if missing:
        print(f"{missing} recordings are missing: give the command once more")
        return
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    fitted, judged = (
        [held for job, cells in chosen.items() for held in _crossed(*job, cells, place)]
        for chosen in (FITTED, JUDGED)
    )
    quiet = [held for held in judged if held.is_quiet]
    kinds = (("fitted", fitted), ("judged", judged), ("judged, alone on the machine", quiet))
    split = results.split(
        "predictions",
        [
            (name, [held.found.error for held in chosen], [held.found.holds for held in chosen])
            for name, chosen in kinds
        ],
    )
    told = results.said_of(
        [held.found.error for held in judged], [held.found.holds for held in judged]
    )
    results.renew(
        "cells",
        tables=[
            split,
            results.Table(
                columns=COLUMNS, rows=results.rows([held.line for held in judged]), title="Judged"
            ),
            results.Table(
                columns=COLUMNS, rows=results.rows([held.line for held in fitted]), title="Fitted"
            ),
        ],
        **told,
    )


def _crossed(kind: str, backend: str, cells: Sequence[str], place: Path) -> Iterator[Held]:
    """Predict each recording of a job from each other one, and print it."""
    runs = {cell: recorded(kind, backend, cell, place) for cell in cells}
    beside = {cell: share_of_others(run) for cell, run in runs.items()}
    for shown, before in runs.items():
        for cell, after in runs.items():
            found = None if cell == shown else verify(before, after)
            if found is None:
                continue
            line = (
                f"| {kind}, {backend} | {shown} | {cell} | {show_time(found.measured_s)} | "
                f"{show_time(found.predicted_s)} | {show_time(found.low_s)} to "
                f"{show_time(found.high_s)} | {found.error:+.1%} | "
                f"{'yes' if found.holds else 'NO'} | {beside[shown]:.0%}, {beside[cell]:.0%} |"
            )
            print(line, flush=True)
            yield Held(found, max(beside[shown], beside[cell]) < MUCH, line)


def recorded(kind: str, backend: str, cell: str, place: Path) -> fw.Run:
    """Open a recording of a job; make the recording first if it is missing."""
    job = ("validation.jobs.cell", kind)
    return in_the_lab(_path(kind, backend, cell, place), cell, job, backend)


def _path(kind: str, backend: str, cell: str, place: Path) -> Path:
    return place / f"{kind}_{backend}_{cell}.run"


def in_the_lab(path: Path, cell: str, job: Sequence[str], backend: str) -> fw.Run:
    """Open a recording; make the recording in the lab first if it is missing."""
    workers, rate = cell.split("x")
    for _ in range(TRIES):
        if path.exists():
            break
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "fullwire",
                "lab",
                "run",
                "--workers",
                workers,
                "--rate",
                rate,
                "-o",
                str(path),
                "--",
                sys.executable,
                "-m",
                *job,
            ],
            env={**os.environ, "BACKEND": backend},
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        sys.stderr.write(done.stderr if done.returncode else "")
    return fw.read(path)


if __name__ == "__main__":
    main()
