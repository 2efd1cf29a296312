"""Tables that others published, as CSV: a refusal names the file and the line.

Spreadsheets write semicolons or tabs in place of commas, and commas between thousands. In a table
with tabs, a comma stands between thousands only if other numbers have a decimal point.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullwire.errors import DamagedInput, UsageError

NOTHING = re.compile(r"[-\u2010-\u2015.?]+|n/?a|nan|none|null", re.IGNORECASE)  # in a cell
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?")
# Three digits behind a point or a comma may be thousands: another count of digits shows decimals.
_DECIMAL_POINT = re.compile(r"(?:0|\d{4,})\.\d+|\d+\.(?:\d{1,2}|\d{4,})")
_DECIMAL_COMMA = re.compile(_DECIMAL_POINT.pattern.replace(r"\.", ","))
_DELIMITERS = ",;\t"
PUBLISHED = (Path(__file__).resolve().parents[2] / "shared" / "data").resolve()  # may be a link


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of a row, without spaces around them; "" where the row is short.

    The names of columns count in any case. `cells` has them in small letters.
    """

    path: Path
    line: int
    cells: Mapping[str, str]
    has_thousands: bool = True  # a comma between digits; otherwise it may be a decimal one

    def __getitem__(self, column: str) -> str:
        return self.cells.get(column.casefold(), "")

    def number(
        self, column: str, *, otherwise: float | None = None, may_be_zero: bool = False
    ) -> float:
        """Return a number above 0; `otherwise` stands for an empty cell, or one such as n/a."""
        text = self[column]
        if otherwise is not None and (not text or NOTHING.fullmatch(text)):
            return otherwise
        try:
            is_long = self.has_thousands and _THOUSANDS.fullmatch(text)
            number = float(text.replace(",", "") if is_long else text)
        except ValueError:
            number = math.nan
        if not (0 < number < math.inf or (may_be_zero and number == 0)):
            wanted = "a number, 0 or above" if may_be_zero else "a number above 0"
            raise self.damaged(f"{column}: expected {wanted}, got {text!r}")
        return number

    def damaged(self, problem: str) -> DamagedInput:
        """Return the error of this row."""
        return DamagedInput(self.path, problem, line=self.line)


def _lacking(reader: csv.DictReader[str], columns: Sequence[str]) -> list[str]:
    """Return the columns that a table does not have."""
    heads = {head.strip().casefold() for head in reader.fieldnames or ()}
    return [name for name in columns if name.casefold() not in heads]


def _has_decimal_points(rows: Iterable[Sequence[str]]) -> bool:
    """Whether numbers of a table have decimal points, and none has a decimal comma."""
    cells = [cell.strip() for row in rows for cell in row]
    return any(map(_DECIMAL_POINT.fullmatch, cells)) and not any(
        map(_DECIMAL_COMMA.fullmatch, cells)
    )


def read(path: Path, columns: Sequence[str]) -> list[Row]:
    """Read a table that has these columns and maybe more."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = file.readlines()
            # The most frequent delimiter of the heading, unless only another one gives the columns.
            delimiters = sorted(_DELIMITERS, key="".join(lines[:1]).count, reverse=True)
            readers = [csv.DictReader(lines, delimiter=delimiter) for delimiter in delimiters]
            reader = min(readers, key=lambda own: bool(_lacking(own, columns)))
            if lacking := _lacking(reader, columns):
                raise DamagedInput(
                    path, f"expected the columns {', '.join(columns)}: no {lacking[0]}"
                )
            delimiter = delimiters[readers.index(reader)]
            has_thousands = delimiter == "," or (
                delimiter == "\t" and _has_decimal_points(csv.reader(lines, delimiter=delimiter))
            )
            heads = [head.strip() for head in reader.fieldnames or ()]
            folded = [head.casefold() for head in heads]
            counts = Counter(folded)
            if doubled := [head for head in heads if head and counts[head.casefold()] > 1]:
                problem = f"expected each column once, got {doubled[0]} twice or more"
                raise DamagedInput(path, problem, line=reader.line_num)
            rows = []
            for cells in reader:
                if None in cells:
                    count = len(heads) + len(cells[None])
                    problem = f"expected {len(heads)} cells, got {count}"
                    raise DamagedInput(path, problem, line=reader.line_num)
                texts = [(cells[head] or "").strip() for head in reader.fieldnames or ()]
                own = dict(zip(folded, texts, strict=True))
                rows.append(Row(path, reader.line_num, own, has_thousands=has_thousands))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DamagedInput(path, f"expected a CSV file in UTF-8: {error}") from None
    if not rows:
        raise DamagedInput(path, "expected rows below the heading, got none")
    return rows


def is_published(path: Path, name: str) -> bool:
    """Whether this is the published file or folder of that name below the shared data.

    Other tables leave our results alone.
    """
    return path.resolve() == PUBLISHED / name
