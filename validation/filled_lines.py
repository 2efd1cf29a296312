"""Is a line with room left ever the limit? Runs, each compared with its own fit.

    .venv/bin/python -m validation.filled_lines DIRECTORY...

`used` is the share of the line rate that exposed transfers used; the verdict depends on it. `limit`
is the rate up to which the line limits the transport, by the transport that is fitted to the run.
The verdict does not use `limit`. It counts as right if it names the line below this rate, or the
transport above it. Other verdicts, such as `contention` and `scales`, are left out. All runs in the
directories are taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import fullwire as fw
from fullwire.findings.case import exposed_transfer_s
from fullwire.units import show_rate
from validation import arguments, results


class Seen(NamedTuple):
    """One run's share of its line, its rate, and the rate that its transport could fill."""

    name: str
    used: float
    rate_bps: float
    limit_bps: float
    kind: str

    @property
    def is_above(self) -> bool:
        """Say whether the line is faster than the transport can fill."""
        return self.rate_bps > self.limit_bps

    @property
    def names_either(self) -> bool:
        """Say whether the verdict names the line or the transport."""
        return self.kind in ("line_rate", "transport")

    @property
    def is_right(self) -> bool:
        """Say whether the verdict names the one that limits the job."""
        return self.kind == ("transport" if self.is_above else "line_rate")


def seen(run: Path) -> Seen | None:
    """Explain a run; return None if its exposed transfers or its transport are missing."""
    found = fw.explain(str(run))
    exposed_s = exposed_transfer_s(found.detail)
    if found.break_even is None or found.predictor is None or not exposed_s:
        return None
    limit_bps = found.break_even.line_takes_over_bps
    if limit_bps is None:
        return None
    used = found.account["line_rate"] / exposed_s
    return Seen(run.name, used, found.predictor.rate_bps, limit_bps, found.verdict.kind)


def main() -> None:
    """Print a line for the runs on either side of their transport's limit."""
    taken = arguments.parser(__doc__)
    taken.add_argument("places", nargs="+", type=Path, metavar="directory")
    runs = [run for place in taken.parse_args().places for run in sorted(place.rglob("*.run"))]
    found = [each for run in runs if (each := seen(run)) is not None]
    rows: list[list[results.Cell]] = []
    print(f"{'line rate':<16} {'runs':>5}  {'used':<12} {'the limit lies':<24} verdicts")
    for is_above, words in ((True, "above the limit"), (False, "below the limit")):
        here = [each for each in found if each.is_above == is_above]
        if not here:
            continue
        used = f"{min(each.used for each in here):.0%} to {max(each.used for each in here):.0%}"
        limits = sorted(each.limit_bps for each in here)
        between = f"{show_rate(limits[0])} to {show_rate(limits[-1])}"
        kinds = {kind: sum(each.kind == kind for each in here) for kind in {e.kind for e in here}}
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        print(f"{words:<16} {len(here):>5}  {used:<12} {between:<24} {shown}")
        rows.append([words, len(here), used, between, shown])
    either = [each for each in found if each.names_either]
    right = sum(each.is_right for each in either)
    wrong: list[list[results.Cell]] = [
        [
            each.name,
            each.kind,
            show_rate(each.rate_bps),
            show_rate(each.limit_bps),
            f"{each.used:.0%}",
        ]
        for each in either
        if not each.is_right
    ]
    for row in wrong:
        print("wrong:", *row)
    columns = ["line rate", "runs", "share of the line used", "the limit lies", "verdicts"]
    others = ["run", "verdict", "line rate", "the limit lies at", "share of the line used"]
    results.renew(
        "filled-lines",
        summary=f"{right} of {len(either)} right; {len(found) - len(either)} other verdicts",
        cases=len(either),
        tables=[
            results.Table(columns=columns, rows=rows),
            results.Table(title="Verdicts that name the other one", columns=others, rows=wrong),
        ],
    )


if __name__ == "__main__":
    main()
