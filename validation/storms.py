"""Many small sums, and the changes that help, tried: python -m validation.storms DIRECTORY

Each job (jobs/storm.py) is recorded in the lab in three ways: with its sums apart, joined into one,
and apart on our backend. The first recording predicts the gain of each change, and the other two
measure it. Runs stay in DIRECTORY, and an existing run is not recorded again. Run it from the root
of a checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import fullwire as fw
from fullwire.simulation.typical import typical_step
from fullwire.units import show_time
from validation import arguments, results
from validation.cells import in_the_lab

CELLS = {
    "gradients": ("2x300Mbps", "2x1Gbps", "2x10Gbps", "3x1Gbps", "3x2Gbps"),
    "metrics": ("2x1Gbps", "2x5Gbps", "3x300Mbps", "3x1Gbps"),
}


class Change(NamedTuple):
    """A job's change: how it sums, its backend, and the kind of the fix that predicts the gain."""

    way: str
    backend: str
    fix: str


AS_IT_WAS = Change("apart", "gloo", "")
CHANGES = {
    "joined": Change("joined", "gloo", "joining"),
    "fullwire": Change("apart", "fullwire", "transport"),
}


def main() -> None:
    """Record the missing runs, and print the table."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    place = taken.parse_args().directory
    place.mkdir(parents=True, exist_ok=True)
    columns = [
        "sums of",
        "cell",
        "as it was",
        "change",
        "then",
        "predicted",
        "interval",
        "error",
        "holds",
    ]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    summaries = []
    for name, change in CHANGES.items():
        tried = [
            _tried(name, change, what, cell, place)
            for what, cells in CELLS.items()
            for cell in cells
        ]
        told = results.said_of([error for error, _, _ in tried], [holds for _, holds, _ in tried])
        table = results.Table(columns=columns, rows=results.rows([line for _, _, line in tried]))
        results.renew(f"storms-{name}", tables=[table], **told)
        summaries.append(f"{name}: {told['summary']}")
    print("", *summaries, sep="\n")


def _tried(name: str, change: Change, what: str, cell: str, place: Path) -> tuple[float, bool, str]:
    """Print the predicted and the measured gain of a change; return error, hold and row."""
    before = _recorded(what, cell, AS_IT_WAS, place)
    measured_s = _step_s(_recorded(what, cell, change, place))
    fix = next(fix for fix in fw.explain(before).fixes if fix.kind == change.fix)
    holds = fix.low_s <= measured_s <= fix.high_s
    error = fix.step_s / measured_s - 1
    line = (
        f"| {what} | {cell} | {show_time(_step_s(before))} | {name} | {show_time(measured_s)} | "
        f"{show_time(fix.step_s)} | {show_time(fix.low_s)} to {show_time(fix.high_s)} | "
        f"{error:+.1%} | {'yes' if holds else 'NO'} |"
    )
    print(line, flush=True)
    return error, holds, line


def _recorded(what: str, cell: str, change: Change, place: Path) -> fw.Run:
    path = place / f"{what}_{cell}_{change.way}_{change.backend}.run"
    return in_the_lab(path, cell, ("validation.jobs.storm", what, change.way), change.backend)


def _step_s(run: fw.Run) -> float:
    measured_ns = typical_step(run).measured_ns
    assert measured_ns is not None  # of a recorded job
    return measured_ns * 1e-9


if __name__ == "__main__":
    main()
