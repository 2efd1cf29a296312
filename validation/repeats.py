"""How often `compare` calls two recordings of a job different: python -m validation.repeats ONE TWO

Runs of the same name in two directories are of the same job, recorded twice. Each pair is compared
as it is. Then it is compared with every time of the second run made shorter by a known share, which
`compare` should find.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import fullwire as fw
from fullwire.run.emulation import undilated
from fullwire.run.run import Run
from validation import arguments, results

FAST_BPS = 3.5e9  # from here on two processors limit these jobs, and not the line
SHORTER = (0.03, 0.05, 0.10)
Calls = list[bool]  # of a pair: called different as it is, and found with each known change


def main() -> None:
    """Print how many pairs were called different, and how many known changes were found."""
    taken = arguments.parser(__doc__)
    taken.add_argument("one", type=Path)
    taken.add_argument("two", type=Path)
    given = taken.parse_args()
    found = list(_calls(given.one, given.two))
    heads = "".join(f"{f'{share:.0%} found':>12}" for share in SHORTER)
    rows: list[list[results.Cell]] = []
    print(f"{'':<14}{'pairs':>6}{'different':>12}{heads}")
    for name, chosen in (
        ("up to 3 Gbps", [calls for is_fast, calls in found if not is_fast]),
        ("from 4 Gbps", [calls for is_fast, calls in found if is_fast]),
    ):
        print(f"{name:<14}{len(chosen):>6}{''.join(_counts(chosen))}")
        rows.append([name, len(chosen), *map(int, _counts(chosen))])
    columns = ["rate", "pairs", "called different", *(f"{share:.0%} found" for share in SHORTER)]
    different = sum(calls[0] for _, calls in found)
    results.renew(
        "repeats",
        summary=f"{different} of {len(found)} pairs called different",
        cases=len(found),
        tables=[results.Table(columns=columns, rows=rows)],
    )


def _calls(first: Path, second: Path) -> Iterator[tuple[bool, Calls]]:
    for place in sorted(first.glob("*.run")):
        if (second / place.name).exists():
            one, other = fw.read(place), fw.read(second / place.name)
            if fw.compare(one, other).is_significant is not None:  # enough steps to tell
                is_fast = float(str(one.facts.line_rate_bps)) > FAST_BPS
                yield is_fast, [_is_different(one, other), *_found(one, other)]


def _is_different(one: Run, other: Run) -> bool:
    return bool(fw.compare(one, other).is_significant)


def _found(one: Run, other: Run) -> Iterator[bool]:
    for share in SHORTER:
        found = fw.compare(one, undilated(other, 1 / (1 - share)))
        yield bool(found.is_significant) and found.ratio < 1


def _counts(chosen: Sequence[Calls]) -> Iterator[str]:
    return (f"{sum(column):>12}" for column in zip(*chosen, strict=True))


if __name__ == "__main__":
    main()
