"""The picture at the head of the README: the output of `fullwire explain`, as SVG.

.venv/bin/python -m docs.making.picture before.run docs/pictures/answer.svg
"""

from __future__ import annotations

import html
import re
import sys
import tempfile
from pathlib import Path

from docs.making.blocks import ROOT, printed_by, session, workplace

PICTURE = ROOT / "docs/pictures/answer.svg"
_WIDE, _HIGH, _LEFT, _TOP = 8.4, 19, 18, 34
_COLUMNS = 84
_INK, _PAPER, _BAR, _BLAMED = "#d7dce2", "#15191f", "#5b8bd0", "#e0a23c"


def picture(run: Path) -> str:
    """Draw the first screen of the answer."""
    command = f"fullwire explain {run.name}"
    printed = printed_by(command, run.parent)
    # The rules below headings stay out: only text and bars are drawn.
    screen = [line for line in printed.splitlines() if not line.startswith("─")]
    lines = [f"$ {command}", "", *screen]
    height = _TOP + _HIGH * len(lines) + 8
    rows = "\n".join(_row(line, number) for number, line in enumerate(lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_COLUMNS * _WIDE:.0f} {height}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">\n'
        f"<title>{html.escape(lines[2])}</title>\n"
        f'<rect width="100%" height="100%" rx="8" fill="{_PAPER}"/>\n{rows}\n</svg>\n'
    )


def _row(line: str, number: int) -> str:
    """Draw one line; pieces of bars become rectangles."""
    top, parts = _TOP + _HIGH * number, []
    blamed = "◀" in line
    for run in re.finditer("█+", line):
        left, width = _LEFT + run.start() * _WIDE, len(run[0]) * _WIDE
        colour = _BLAMED if blamed else _BAR
        parts.append(
            f'<rect x="{left:.1f}" y="{top - 13}" width="{width:.1f}" height="15" fill="{colour}"/>'
        )
    text = re.sub("[█·]", " ", line)
    for word in re.finditer(r"\S+(?: \S+)*", text):
        left = _LEFT + word.start() * _WIDE
        parts.append(
            f'<text x="{left:.1f}" y="{top}" fill="{_INK}" '
            f'textLength="{len(word[0]) * _WIDE:.1f}">{html.escape(word[0])}</text>'
        )
    return "".join(parts)


def main() -> None:
    """Draw the named run, or the one that the README's first command records."""
    with tempfile.TemporaryDirectory() as name:
        if len(sys.argv) > 1:
            run = Path(sys.argv[1]).resolve()
        else:
            run = Path(name, "before.run")
            workplace(run.parent)
            printed_by(session(ROOT / "README.md").commands[0].command, run.parent)
        PICTURE.write_text(picture(run))


if __name__ == "__main__":
    main()
