"""Predictions beside the machine's own noise: python -m validation.twice DIRECTORY

Eight trainings (jobs/unseen.py) are recorded in the lab. The rules of predicted steps were chosen
on other jobs. Two ranks train over Gloo and the Fullwire transport, on links of three rates. Then
all are recorded once more.

Two recordings of a job on the same links show the machine's noise, which no prediction can know.
Each recording also predicts those on other links, of both rounds. Gloo's recordings predict those
of the Fullwire transport, too. Runs stay in DIRECTORY, and an existing run is not recorded again.
Run it from the root of a checkout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import NamedTuple

import numpy as np

import fullwire as fw
from fullwire.answers.verification import Verification, verify
from fullwire.run.kinds import usual_step_s
from fullwire.timeline.alone import alone_by_account
from validation import arguments, results
from validation.cells import in_the_lab
from validation.jobs.unseen import KINDS

CELLS = ("2x500Mbps", "2x2Gbps", "2x10Gbps")
BACKENDS = ("gloo", "fullwire")
ROUNDS = ("first", "again")


class Job(NamedTuple):
    """One recording."""

    kind: str
    backend: str
    cell: str
    round: str


def main() -> None:
    """Record the missing runs, and print the tables."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    place: Path = taken.parse_args().directory
    place.mkdir(parents=True, exist_ok=True)
    runs = {job: _recorded(job, place) for job in _jobs()}
    apart = {job: _apart(*pair) for job, pair in _pairs(runs)}
    found = list(_predicted(runs))
    other_links = [each for each in found if each[0].backend == each[1].backend]
    ours = [each for each in found if each[0].backend != each[1].backend]
    table = [
        _row("two recordings of a job: its step", [step for step, _ in apart.values()]),
        *(
            _row(f"on {cell[2:]}", [step for job, (step, _) in apart.items() if job.cell == cell])
            for cell in CELLS
        ),
        _row("two recordings of a job: T1", [alone for _, alone in apart.values()]),
        _predictions("predicted for other links", other_links),
        *(
            _predictions(f"from {before[2:]} to {after[2:]}", _between(other_links, before, after))
            for before, after in permutations(CELLS, 2)
        ),
        _predictions("predicted for the Fullwire transport from Gloo", ours),
    ]
    columns = ["what", "cases", "median", "nine in ten", "worst", "in the interval", "half width"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for row in table:
        print(f"| {' | '.join(row)} |")
    errors = [made.error for _, _, made in found]
    results.write(
        "twice",
        claim="Predictions of jobs that chose no rule of steps, beside the machine's noise.",
        anchor="the same jobs recorded on those links, twice",
        measure="error of the predicted step",
        tables=[results.Table(columns=columns, rows=[list(row) for row in table])],
        **results.said_of(errors, [made.holds for _, _, made in found]),
    )


def _jobs() -> Iterator[Job]:
    for each_round, kind, backend, cell in product(ROUNDS, KINDS, BACKENDS, CELLS):
        yield Job(kind, backend, cell, each_round)


def _recorded(job: Job, place: Path) -> fw.Run:
    path = place / f"{'_'.join(job)}.run"
    sys.stderr.write("" if path.exists() else f"{path.stem}\n")
    return in_the_lab(path, job.cell, ("validation.jobs.unseen", job.kind), job.backend)


def _pairs(runs: dict[Job, fw.Run]) -> Iterator[tuple[Job, tuple[fw.Run, fw.Run]]]:
    first, again = ROUNDS
    for job, run in runs.items():
        if job.round == first:
            yield job, (run, runs[job._replace(round=again)])


def _apart(first: fw.Run, again: fw.Run) -> tuple[float, float]:
    """Return by which share the steps of two recordings differ, and the T1 of their accounts."""
    step_s, again_s = usual_step_s(first), usual_step_s(again)
    alone, alone_again = alone_by_account(first), alone_by_account(again)
    assert step_s
    assert again_s
    assert alone
    assert alone_again
    return again_s / step_s - 1, alone_again.time_s / alone.time_s - 1


def _predicted(runs: dict[Job, fw.Run]) -> Iterator[tuple[Job, Job, Verification]]:
    for before, after in permutations(runs, 2):
        is_changed = before.backend != after.backend or before.cell != after.cell
        if before.kind == after.kind and is_changed:
            made = verify(runs[before], runs[after])
            if made is not None:
                yield before, after, made


def _between(
    found: Sequence[tuple[Job, Job, Verification]], before: str, after: str
) -> list[tuple[Job, Job, Verification]]:
    return [each for each in found if (each[0].cell, each[1].cell) == (before, after)]


def _predictions(name: str, found: Sequence[tuple[Job, Job, Verification]]) -> tuple[str, ...]:
    made = [each for _, _, each in found]
    width = np.median([(each.high_s - each.low_s) / 2 / each.predicted_s for each in made])
    held = f"{sum(each.holds for each in made)} of {len(made)}"
    return (*_row(name, [each.error for each in made])[:-2], held, f"{width:.1%}")


def _row(name: str, errors: Sequence[float]) -> tuple[str, ...]:
    figures = results.spread(errors)
    shares = (f"{figures[each]:.1%}" for each in ("median", "p90", "worst"))
    return (name, str(len(errors)), *shares, "", "")


if __name__ == "__main__":
    main()
