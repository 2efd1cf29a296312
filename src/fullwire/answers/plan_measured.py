"""Tables of measured steps that a user gives to `plan --calibrate`."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fullwire.answers.planned import fixed_degrees
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import opened
from fullwire.findings.finding import Finding
from fullwire.findings.plans import MeasuredDiffer, MeasuredFarOff
from fullwire.simulation.plan_space import FIXABLE
from fullwire.units import seconds, shown
from fullwire.workloads.accelerators import Accelerator, accelerator
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.architecture_files import built_in

_FAR_OFF = 5.0  # times the price of a step: the wrong unit, or another job
_CONTRADICT = 1.25  # times the step of the same plan: repeats differ by less

# A degree under another name would count for nothing; other columns, such as notes, may stay.
_MISNAMED = ("microbatch_size", "shard_group", "context_kind", "step_s", "step_time")

_TIMES = ("step_time_s", "tokens_s_gpu")  # the first that a row has counts

_ALIASES = {"mbs": "microbatch"}

# Cells that tell nothing, as people and programs leave them. In place of a time, a run failed.
_OPEN = ("", "-", "--", "?", "nan", "n/a", "na", "null")
_FAILED = ("oom", "out of memory", "failed", "error", "crashed", "timeout")

_SEPARATORS = ",;\t"


class MeasuredStep(NamedTuple):
    """A row of such a table."""

    line: int
    degrees: dict[str, int | str]
    step_s: float
    column: str  # that tells the time


class MeasuredSteps(NamedTuple):
    """Such a table: its steps, its columns that name other things, and lines that tell no time."""

    rows: list[MeasuredStep]
    columns_passed_over: tuple[str, ...]
    lines_passed_over: tuple[int, ...]


class Table(NamedTuple):
    """A heading, its names in small letters with _ between words, and rows with their lines."""

    line: int  # of the heading
    heading: list[str]
    names: list[str]
    rows: list[tuple[int, list[str]]]


def measured_steps(
    path: Path, tokens_of_device: float, **question: int | str | Architecture | Accelerator
) -> MeasuredSteps:
    """Read a table of measured steps: a column for each degree, and `step_time_s`.

    A row without a time may have `tokens_s_gpu`, the tokens of a device in a second. Columns are
    named in any case, with any marks between words, and mbs is the microbatch. Other columns, such
    as notes, are passed over. So are rows without a time.

    - `tokens_of_device`: in a step, of the batch that is asked about over its devices.
    - `question`: values that are the same for all plans, by the names of their columns. A row that
      tells another value was measured on another job.
    """
    try:
        with opened(path) as file:
            table = table_of(file.read().decode("utf-8-sig"))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"calibrate: expected a table of measured steps: {error}") from None
    heading, columns = table.heading, [_ALIASES.get(name, name) for name in table.names]
    known = (*FIXABLE, *_TIMES)
    plain = {name.replace("_", "") for name in (*known, *_MISNAMED)}
    for name, told in zip(columns, heading, strict=True):
        if name not in known and name.replace("_", "") in plain:
            raise UsageError(
                f"calibrate: {path}: expected columns among {', '.join(known)}, got {shown(told)}"
            )
    twice = [name for at, name in enumerate(columns) if name in columns[:at]]
    if twice or not set(_TIMES) & set(columns):
        expected = "a column step_time_s or tokens_s_gpu"
        expected = f"one column {twice[0]}" if twice else expected
        raise DamagedInput(
            path, f"expected {expected}, got {shown(','.join(heading))}", line=table.line
        )
    result, without_time = list[MeasuredStep](), list[int]()
    for number, cells in table.rows:
        if len(cells) > len(columns):  # the cells beyond the heading have no name
            raise DamagedInput(
                path, f"expected {len(columns)} cells in a row, as in the heading", line=number
            )
        row = dict(zip(columns, cells, strict=False))
        if all(row.get(name, "").lower() in (*_OPEN, *_FAILED) for name in _TIMES):
            without_time.append(number)
            continue
        measured_s, column = _step_s(row, tokens_of_device, path, number)
        for name, value in question.items():
            told = row.get(name, "")
            if told.lower() not in _OPEN and not _is_same(told, value):
                asked = value if isinstance(value, int | str) else value.name
                raise DamagedInput(
                    path, f"{name}: expected {asked} as asked, got {shown(told)}", line=number
                )
        # A table with gaps often has its whole numbers as 8.0.
        degrees = {name: re.sub(r"^(\d+)\.0*$", r"\1", row.get(name, "")) for name in FIXABLE}
        named = [f"{name}={value}" for name, value in degrees.items() if value.lower() not in _OPEN]
        try:
            result.append(MeasuredStep(number, fixed_degrees(named), measured_s, column))
        except UsageError as error:
            raise DamagedInput(path, str(error), line=number) from None
    if not result:
        times = " or ".join(_TIMES)
        raise UsageError(f"calibrate: expected rows with {times} in {path}, got none")
    passed_over = [name for name in columns if name and name not in known and name not in question]
    return MeasuredSteps(result, tuple(passed_over), tuple(without_time))


def table_of(text: str) -> Table:
    """Read a table as people and programs write it: between commas, semicolons or tabs.

    The heading is the first line that names a time. Other lines that begin with # are comments.
    """
    lines = text.splitlines(keepends=True)

    def name(cell: str) -> str:
        return re.sub(r"[\W_]+", "_", cell.lower()).strip("_")

    headings = (
        (at, separator)
        for at, line in enumerate(lines)
        for separator in _SEPARATORS
        if not set(_TIMES).isdisjoint(map(name, line.split(separator)))
    )
    others = (at for at, line in enumerate(lines) if line.strip() and line.strip()[0] != "#")
    at, separator = next(headings, (next(others, 0), ","))
    reader = csv.reader(io.StringIO("".join(lines[at:]), newline=""), delimiter=separator)
    rows = [(at + reader.line_num, [cell.strip() for cell in row]) for row in reader]
    line, heading = rows[0] if rows else (1, [])
    names = [name(cell) for cell in heading]
    is_numbered = names[:1] == [""]  # rows may begin with #1 then
    rows = [
        (place, row)
        for place, row in rows[1:]
        if any(row) and (is_numbered or not row[0].startswith("#"))
    ]
    if separator == ";":  # a spreadsheet that does so writes 9,1 for nine and a tenth
        point = re.compile(r"^(\d+),(\d+)")
        rows = [(place, [point.sub(r"\1.\2", cell) for cell in row]) for place, row in rows]
    return Table(line, heading, names, rows)


def _step_s(
    row: Mapping[str, str], tokens_of_device: float, path: Path, line: int
) -> tuple[float, str]:
    """Return the time of a row's step, and the column that tells it."""
    name = next(name for name in _TIMES if row.get(name, "").lower() not in (*_OPEN, *_FAILED))
    is_time = name == "step_time_s"
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", row[name])  # a comma before three digits groups
    try:
        value = float(text)
    except ValueError:
        try:
            value = seconds(text) if is_time else 0.0
        except UsageError:
            value = 0.0
    if not 0 < value < math.inf:
        unit = "seconds" if is_time else "tokens of a device in a second"
        said = f"{name}: expected {unit} above 0, got {shown(row[name])}"
        raise DamagedInput(path, said, line=line)
    return value if is_time else tokens_of_device / value, name


def about_measured(rows: Sequence[MeasuredStep], logs: Sequence[float]) -> Iterator[Finding]:
    """Yield what is odd about measured steps: far from their prices, or from each other."""
    for row, log in zip(rows, logs, strict=True):
        if abs(log) > math.log(_FAR_OFF):
            times = math.exp(abs(log))
            is_rate = row.column == "tokens_s_gpu"
            yield MeasuredFarOff(line=row.line, times=times, is_longer=log > 0, is_rate=is_rate)
    of_plans: dict[tuple[tuple[str, int | str], ...], list[float]] = {}
    for row in rows:
        of_plans.setdefault(tuple(sorted(row.degrees.items())), []).append(row.step_s)
    for fixed_so, steps_s in of_plans.items():
        if max(steps_s) > _CONTRADICT * min(steps_s):
            plan = ",".join(f"{name}={value}" for name, value in fixed_so)
            yield MeasuredDiffer(plan=plan, low_s=min(steps_s), high_s=max(steps_s))


def _is_same(told: str, value: int | str | Architecture | Accelerator) -> bool:
    """Return whether a cell holds a value; a table may write a whole number as 512.0.

    A model or a device under a name that nobody knows may be the one that is asked about.
    """
    if isinstance(value, Architecture):
        known = built_in(told)
        return known is None or known.parameters == value.parameters
    try:
        if isinstance(value, Accelerator):
            return accelerator(told).family == value.family
        return told.lower() == value if isinstance(value, str) else float(told) == value
    except UsageError:
        return True
    except ValueError:
        return False
