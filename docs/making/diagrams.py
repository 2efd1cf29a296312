"""Pictures drawn from the code's own tables, as SVG that follows the page's colours."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence

_FONT = 'font-family="monospace" font-size="12" fill="currentColor"'
_LINE, _PAD, _BOX = 16, 10, 210
_MOST_ROOMS = 5  # in a row


def run_tables() -> str:
    """Draw each table of a run with its columns."""
    from fullwire.run.run import TABLES

    boxes = [(name, list(kind.column_types())) for name, kind in TABLES.items()]
    return _svg("Tables of a run and their columns", *_columns_of_boxes(boxes, 4))


def rooms(levels: Mapping[str, int]) -> str:
    """Draw the rooms of the package: each level may import from those above it."""
    width, top, parts = 760, _PAD, list[str]()
    for level in sorted(set(levels.values())):
        if parts:
            parts.append(_text(2, top - 4, "↓"))
        together = [room for room, of_room in levels.items() if of_room == level]
        for first in range(0, len(together), _MOST_ROOMS):
            row = together[first : first + _MOST_ROOMS]
            share = (width - _PAD) / len(row)
            for place, room in enumerate(row):
                left = _PAD + place * share
                parts.append(_box(left, top, share - _PAD, 28))
                parts.append(_text(left + (share - _PAD) / 2, top + 18, room, anchor="middle"))
            top += 34
        top += 10
    height = top
    return _svg("Rooms of the package, from those that import nothing down", width, height, parts)


def account(parts: Sequence[tuple[str, str]]) -> str:
    """Draw the parts of an account with their names."""
    lines: list[str] = []
    for number, (key, meaning) in enumerate(parts):
        top = _PAD + 34 * number
        lines.append(_box(_PAD, top, 150, 24))
        lines.append(_text(_PAD + 75, top + 16, key, anchor="middle"))
        lines.append(_text(180, top + 16, meaning))
    return _svg("Parts of the account", 760, 34 * len(parts) + _PAD, lines)


def _columns_of_boxes(
    boxes: Sequence[tuple[str, Sequence[str]]], columns: int
) -> tuple[float, float, list[str]]:
    heights = [0.0] * columns
    parts: list[str] = []
    for name, lines in boxes:
        column = heights.index(min(heights))
        left, top = _PAD + column * (_BOX + _PAD), heights[column] + _PAD
        height = _LINE * (len(lines) + 1) + _PAD
        parts += [_box(left, top, _BOX, height), _text(left + 8, top + _LINE, name, bold=True)]
        parts += [
            _text(left + 8, top + _LINE * (number + 2), line) for number, line in enumerate(lines)
        ]
        heights[column] = top + height
    return columns * (_BOX + _PAD) + _PAD, max(heights) + _PAD, parts


def _box(left: float, top: float, width: float, height: float) -> str:
    return (
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" rx="4" '
        'fill="none" stroke="currentColor" opacity="0.5"/>'
    )


def _text(left: float, top: float, words: str, *, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{left:.0f}" y="{top:.0f}" {_FONT}{weight} text-anchor="{anchor}">'
        f"{html.escape(words)}</text>"
    )


def _svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    return "".join(_around(title, width, height, parts))


def _around(title: str, width: float, height: float, parts: Sequence[str]) -> Iterator[str]:
    # On one line, because an empty line ends a block of HTML in Markdown.
    yield (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="100%" role="img" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{html.escape(title)}</title>'
    )
    yield from parts
    yield "</svg>"
