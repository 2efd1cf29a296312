"""Many small sums joined into one, predicted and tried: python -m validation.storms DIRECTORY

Each job (jobs/storm.py) is recorded in the lab with its sums apart and joined; what the first says
that joining them gives stands beside the second. Runs stay in DIRECTORY, and what is there already
is not recorded again. From the root of a checkout.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import fullwire as fw
from fullwire.answers.fixes import Fix
from fullwire.simulation.typical import typical_step
from fullwire.units import show_time
from validation import arguments
from validation.cells import in_the_lab

CELLS = {
    "gradients": ("2x300Mbps", "2x1Gbps", "2x10Gbps", "3x1Gbps", "3x2Gbps"),
    "metrics": ("2x1Gbps", "2x5Gbps", "3x300Mbps", "3x1Gbps"),
}


def main() -> None:
    """Record what is missing, and print the table."""
    taken = arguments.parser(__doc__)
    taken.add_argument("directory", type=Path)
    place = taken.parse_args().directory
    place.mkdir(parents=True, exist_ok=True)
    print("| sums of | cell | apart | joined | predicted | interval | error | holds |")
    print("|---|---|---|---|---|---|---|---|")
    errors = [_tried(what, cell, place) for what, cells in CELLS.items() for cell in cells]
    print(f"\nmedian error {statistics.median(errors):.1%}, worst {max(errors):.1%}")


def _tried(what: str, cell: str, place: Path) -> float:
    """Print what joining was predicted to give and what it gave, and return how far these are."""
    apart, joined = (
        in_the_lab(
            place / f"{what}_{cell}_{way}.run", cell, ("validation.jobs.storm", what, way), "gloo"
        )
        for way in ("apart", "joined")
    )
    fix, measured_s = _joining(apart), _step_s(joined)
    holds = fix.low_s <= measured_s <= fix.high_s
    error = fix.step_s / measured_s - 1
    print(
        f"| {what} | {cell} | {show_time(_step_s(apart))} | {show_time(measured_s)} | "
        f"{show_time(fix.step_s)} | {show_time(fix.low_s)} to {show_time(fix.high_s)} | "
        f"{error:+.1%} | {'yes' if holds else 'NO'} |",
        flush=True,
    )
    return abs(error)


def _joining(run: fw.Run) -> Fix:
    return next(fix for fix in fw.explain(run).fixes if fix.kind == "joining")


def _step_s(run: fw.Run) -> float:
    measured_ns = typical_step(run).measured_ns
    assert measured_ns is not None  # of a recorded job
    return measured_ns * 1e-9


if __name__ == "__main__":
    main()
