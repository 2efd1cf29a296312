"""How results show themselves in Python: a short repr, HTML in a notebook, tables as data frames.

A result may hold text from anybody's trace. Control characters are made visible, lines are cut, and
in HTML every text is escaped.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, Literal

from fullwire.errors import UsageError
from fullwire.units import show_time, shown, visible

LONGEST = 240  # characters of a line
_MOST_ROWS = 20  # of a table in a notebook
_BARS_FROM, _BARS_WIDE, _ROW_HIGH, _WIDE = 210, 360, 24, 720  # pixels of the picture of a step


@dataclass(frozen=True, eq=False, slots=True)
class Bar:
    """One part of a step, as the picture of its account shows it."""

    label: str
    time_s: float
    colour: str
    is_blamed: bool = False


class Result(ABC):
    """The base of every result. Its `repr` has one to three lines; a notebook shows more of it."""

    __slots__ = ()

    @abstractmethod
    def _in_short(self) -> Iterator[str]:
        """Go through the lines that say what this is: the first is the answer."""

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the columns of each table by its name; the first is the one that counts."""
        return {}

    def _picture(self) -> str:
        """Return HTML that stands below the lines in a notebook."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}: " + "\n  ".join(
            shortened(line) for line in self._in_short()
        )

    def _repr_html_(self) -> str:
        import html  # here and below: only notebooks need it

        first, *others = (html.escape(shortened(line)) for line in self._in_short())
        lines = "".join(f"<br>{line}" for line in others)
        return f'<div class="fullwire"><p><b>{first}</b>{lines}</p>{self._picture()}</div>'

    def to_pandas(self, table: str | None = None) -> Any:
        """Return a table as a pandas data frame; without a name the first of those there are.

        Columns say their unit: `_s` seconds, `_ns` nanoseconds, `_bps` bits per second, `_bytes`.
        """
        return self._frame("pandas", table)

    def to_polars(self, table: str | None = None) -> Any:
        """Return a table as a Polars data frame; see `to_pandas`."""
        return self._frame("polars", table)

    def _frame(self, package: Literal["pandas", "polars"], table: str | None) -> Any:
        tables = self._tables()
        if not tables:
            raise UsageError(f"to_{package}: expected a result with a table, got {self!r}")
        name = next(iter(tables)) if table is None else table
        if name not in tables:
            raise UsageError(
                f"to_{package}: expected a table among {', '.join(tables)}, got {shown(table)}"
            )
        try:
            frames = importlib.import_module(package)
        except ImportError:
            raise UsageError(
                f"to_{package}: expected {package} beside fullwire: pip install {package}"
            ) from None
        # Text is a list: of an array of objects, Polars makes a column that it can do little with.
        columns = {
            column: list(values) if getattr(values, "dtype", "") == "object" else values
            for column, values in tables[name].items()
        }
        return frames.DataFrame(columns)


def html_table(columns: Mapping[str, Any]) -> str:
    """Return the first rows of a table as HTML."""
    import html

    def cell(value: Any) -> str:
        text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
        return f"<td>{html.escape(shortened(text))}</td>"

    head = "".join(f"<th>{html.escape(shortened(name))}</th>" for name in columns)
    count = max(map(len, columns.values()), default=0)
    body = "".join(
        "<tr>" + "".join(map(cell, row)) + "</tr>"
        for row in islice(zip(*columns.values(), strict=True), _MOST_ROWS)
    )
    left_out = count - _MOST_ROWS
    more = f"<p>and {left_out:,} more rows</p>" if left_out > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def html_account(bars: Sequence[Bar]) -> str:
    """Draw a step as SVG: a row for each part, which begins where the one above ended.

    Text has the notebook's own colour, so that it can be read on light and on dark.
    """
    import html

    total_s = sum(bar.time_s for bar in bars)
    high = _ROW_HIGH * len(bars) + 6
    words = "; ".join(f"{bar.label} {show_time(bar.time_s)}" for bar in bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDE} {high}" '
        f'width="{_WIDE}" height="{high}" font-family="sans-serif" font-size="13" '
        f'fill="currentColor" style="max-width:100%"><title>{html.escape(visible(words))}</title>'
    ]
    ends = accumulate(bar.time_s for bar in bars)
    for row, (bar, end_s) in enumerate(zip(bars, ends, strict=True)):
        y = row * _ROW_HIGH
        x = _BARS_FROM + _BARS_WIDE * (end_s - bar.time_s) / total_s
        wide = max(_BARS_WIDE * bar.time_s / total_s, 0.5)
        weight = ' font-weight="bold"' if bar.is_blamed else ""
        text = f'<text y="{y + 18}"{weight}'
        parts.append(
            f'{text} x="{_BARS_FROM - 10}" text-anchor="end">'
            f"{html.escape(shortened(bar.label))}</text>"
            f'<rect x="{x:.1f}" y="{y + 5}" width="{wide:.1f}" height="16" '
            f'fill="{html.escape(bar.colour)}"/>'
            f'{text} x="{_BARS_FROM + _BARS_WIDE + 12}">'
            f"{show_time(bar.time_s)}, {bar.time_s / total_s:.1%}</text>"
        )
    return "".join(parts) + "</svg>"


def shortened(text: str, length: int = LONGEST) -> str:
    """Make every character of a text visible; a text that is longer ends with a mark."""
    text = visible(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"
