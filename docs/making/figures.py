"""The README's table of figures, made from validation/results.

.venv/bin/python -m docs.making.figures          # writes it anew into README.md
"""

from __future__ import annotations

import re
from pathlib import Path

from docs.making.validation import percent, table
from validation import results

README = Path(__file__).resolve().parents[2] / "README.md"
_PLACE = re.compile(
    r"(<!-- figures: made by \S+ from validation/results -->\n).*?(<!-- end of figures -->)", re.S
)
SHOWN = ("netx", "nccl", "predictions", "cells", "closed-loop", "causes", "wires", "recorder")


def figures() -> str:
    """Return the table: one line a claim."""
    rows = []
    for name in SHOWN:
        result = results.read(name)
        inside = "" if result.coverage is None else percent(result.coverage)
        rows.append([result.claim, result.summary, inside, result.date])
    return table(["claim", "measured", "inside the interval", "date"], rows)


def with_figures(readme: str) -> str:
    """Put the table into the README."""
    return _PLACE.sub(lambda place: f"{place[1]}{figures()}\n{place[2]}", readme)


def main() -> None:
    """Write the README anew."""
    README.write_text(with_figures(README.read_text()))


if __name__ == "__main__":
    main()
