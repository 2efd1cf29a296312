"""Tables of measured steps that a user gives to `plan --calibrate`."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fullwire.answers.planned import fixed_degrees
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import opened
from fullwire.findings.finding import Finding
from fullwire.findings.plans import MeasuredDiffer, MeasuredFarOff
from fullwire.simulation.plan_space import FIXABLE
from fullwire.units import printed, seconds, shown
from fullwire.workloads.accelerators import SLICE, Accelerator, accelerator
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.architecture_files import built_in

_FAR_OFF = 5.0  # times the price of a step: the wrong unit, or another job
_CONTRADICT = 1.25  # times the step of the same plan: repeats differ by less

_TIMES = ("step_time_s", "tokens_s_gpu")  # the first that a row has counts

# Columns of the job, by the names that frameworks have for them.
_ALIASES = {
    **dict.fromkeys(("mbs", "micro_batch", "micro_batch_size", "microbatch_size"), "microbatch"),
    **dict.fromkeys(("global_batch_size", "global_bs"), "global_batch"),
    **dict.fromkeys(("seq_length", "seq_len", "sequence_length"), "seq"),
    **dict.fromkeys(("gpu_count", "num_gpus", "world_size", "num_devices"), "gpus"),
    **dict.fromkeys(("recompute_granularity", "recomputation"), "recompute"),
    "zero_stage": "zero",
    "shard_group": "shard",
    "context_kind": "context",
}
_KINDS = {
    "tensor": "tp",
    "pipeline": "pp",
    "virtual_pipeline": "vpp",
    "data": "dp",
    "context": "cp",
    "expert": "ep",
    "expert_tensor": "etp",
}
_DEGREE = re.compile(
    rf"(?:({'|'.join(_KINDS)})(?:_model)?_parallel(?:ism)?|({'|'.join(_KINDS.values())}))"
    r"(?:_size|_degree)?"
)
_STEP_TIME = re.compile(
    r"(?:(?:elapsed_)?time_per_(?:step|iter|iteration)|(?:step|iter|iteration)(?:_time)?)"
    r"_(s|sec|seconds|ms|msec|milliseconds)|(?:step|iter|iteration)_time"
)
_RATE = re.compile(
    r"tok(?:en)?s?_(?:per_)?s(?:ec|econd)?_(?:per_)?(?:gpu|device)"
    r"|tok(?:en)?s?_(?:per_)?(?:gpu|device)_(?:per_)?s(?:ec|econd)?"
)
_TIME = re.compile(f"{_STEP_TIME.pattern}|{_RATE.pattern}")
_SEPARATORS = ",;\t"
# Empty cells, and the words for a step that failed.
_EMPTY = re.compile(r"[-\u2010-\u2015\u2212?]*|n/?a|nan|null|none", re.IGNORECASE)
_FAILED = re.compile(
    r"(?!\d).*(?:\boom\b|out.?of.?memory).*|fail(?:ed)?|error|crashed|timeout", re.IGNORECASE
)
# A mark before three digits is a decimal one or groups thousands. Other numbers tell which.
_EITHER = re.compile(r"[1-9]\d{0,2}[.,]\d{3}[^.,\d]*")
_DECIMAL_COMMA = re.compile(
    r"(?:(?:0|\d{4,}),\d+|\d+,(?:\d{1,2}|\d{4,})|\d{1,3}(?:\.\d{3})+,\d+)[^.,\d]*"
)
_DECIMAL_POINT = re.compile(
    r"(?:\d+\.(?:\d{1,2}|\d{4,})|\d{1,3}(?:,\d{3})+\.\d+|\d{1,3}(?:,\d{3}){2,})[^.,\d]*"
)


class MeasuredStep(NamedTuple):
    """A row of such a table."""

    degrees: dict[str, int | str]
    step_s: float
    column: str  # that tells the time
    line: int


class Table(NamedTuple):
    """A heading, its names in small letters with _ between words, and rows with their lines."""

    line: int  # of the heading
    heading: list[str]
    names: list[str]
    rows: list[tuple[int, list[str]]]
    is_open: bool = False  # whether a comma before three digits may be a decimal one


class MeasuredTable(NamedTuple):
    """The measured steps of a table, and its other columns and lines."""

    steps: list[MeasuredStep]
    passed_over: tuple[str, ...]  # columns of no use for a plan
    unmeasured: tuple[int, ...]  # lines without a time


class _Column(NamedTuple):
    """A column of such a table."""

    name: str
    unit: str = ""  # of its times

    @classmethod
    def headed(cls, heading: str, question: Collection[str]) -> _Column:
        """Return the column under a heading, with any marks between its words."""
        name = _name(heading)
        if name in question:
            return cls(name)
        if found := _STEP_TIME.fullmatch(name):
            return cls(_TIMES[0], found[1] or "?")
        if _RATE.fullmatch(name):
            return cls(_TIMES[1])
        if found := _DEGREE.fullmatch(name):
            return cls(found[2] or _KINDS[found[1]])
        joined = {known.replace("_", ""): known for known in (*FIXABLE, *_TIMES)}
        return cls(_ALIASES.get(name) or joined.get(name.replace("_", ""), name))

    def is_told(self, cell: str) -> bool:
        """Return whether a cell holds a value. Without recomputation, "none" is one."""
        return not _EMPTY.fullmatch(cell) or (self.name == "recompute" and cell.lower() == "none")

    def step_s(self, cell: str, tokens_of_device: float) -> float:
        """Return the time of the step that a cell tells."""
        number = printed(_ungrouped(cell))
        is_rate = self.name == "tokens_s_gpu"
        if not is_rate and number is None and cell[:1].isdigit():
            long_unit = re.compile(r"(m?)(?:illi)?sec(?:ond)?s?$", re.IGNORECASE)
            number = seconds(long_unit.sub(r"\1s", _ungrouped(cell)), self.name)
        elif not is_rate and self.unit == "?":
            raise UsageError(f"step_time: expected a time with its unit, got {shown(cell)}")
        elif number is not None and self.unit.startswith("m"):
            number /= 1000
        if number is None or not 0 < number < math.inf:
            unit = "tokens of a device in a second" if is_rate else "seconds"
            raise UsageError(f"{self.name}: expected {unit} above 0, got {shown(cell)}")
        return tokens_of_device / number if is_rate else number

    def refuse_other(self, cell: str, asked: int | str | Architecture | Accelerator) -> None:
        """Refuse a step that was measured on another job than the one that is asked about.

        A table may write a whole number as 512.0. A model or a device under a name that nobody
        knows may be the one that is asked about. A slice of a device is another one.
        """
        try:
            if isinstance(asked, Architecture):
                known = built_in(cell)
                is_same = known is None or known.parameters == asked.parameters
            elif isinstance(asked, Accelerator):
                is_same = cell.lower() == asked.name.lower() or (
                    not SLICE.search(cell) and accelerator(cell).family == asked.family
                )
            else:
                is_text = isinstance(asked, str)
                is_same = (cell.lower() if is_text else float(_ungrouped(cell))) == asked
        except UsageError:
            return
        except ValueError:
            is_same = False
        if not is_same:
            value = asked if isinstance(asked, int | str) else asked.name
            raise UsageError(f"{self.name}: expected {value} as asked, got {shown(cell)}")


def measured_steps(
    path: Path, tokens_of_device: float, **question: int | str | Architecture | Accelerator
) -> MeasuredTable:
    """Read a table of measured steps: a column for each degree, and `step_time_s`.

    Cells lie between commas, semicolons or tabs. A row without a time may have `tokens_s_gpu`, the
    tokens of a device in a second. Columns may have the names of frameworks' arguments and logs. A
    row without a measured time, of a step that ran out of memory, say, is left out.

    - `tokens_of_device`: in a step, of the batch that is asked about over its devices.
    - `question`: values that are the same for all plans, by the names of their columns. A row that
      tells another value was measured on another job.
    """
    try:
        with opened(path) as file:
            table = table_of(file.read().decode("utf-8-sig"))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"calibrate: expected a table of measured steps: {error}") from None
    columns = columns_of(table, question)
    names = [column.name for column in columns]
    known = (*FIXABLE, *_TIMES)
    twice = [name for place, name in enumerate(names) if name in known and name in names[:place]]
    if twice or not set(_TIMES) & set(names):
        expected = f"one column {twice[0]}" if twice else "a column step_time_s or tokens_s_gpu"
        raise DamagedInput(
            path, f"expected {expected}, got {shown(','.join(table.heading))}", line=table.line
        )
    steps, unmeasured = [], []
    for number, cells in table.rows:
        if any(cells[len(columns) :]):  # the cells beyond the heading have no name
            raise DamagedInput(
                path, f"expected {len(columns)} cells in a row, as in the heading", line=number
            )
        row = [
            (column, cell)
            for column, cell in zip(columns, cells, strict=False)
            if column.is_told(cell)
        ]
        times = sorted(
            (column, cell)
            for column, cell in row
            if column.name in _TIMES and not _FAILED.fullmatch(cell)
        )
        if not times:
            unmeasured.append(number)
            continue
        column, cell = times[0]
        if table.is_open and "," in cell and _EITHER.fullmatch(cell):
            either = f"{cell.replace(',', '')} or {cell.replace(',', '.')}"
            raise DamagedInput(
                path, f"{column.name}: expected {either}, got {shown(cell)}", line=number
            )
        try:
            step_s = column.step_s(cell, tokens_of_device)
            for told, value in row:
                if told.name in question:
                    told.refuse_other(value, question[told.name])
            # Programs write a whole number as 8.0, too.
            fixed = [
                f"{told.name}={re.sub(r'(?<=[0-9])[.]0*$', '', _ungrouped(value.lower()))}"
                for told, value in row
                if told.name in FIXABLE
            ]
            steps.append(MeasuredStep(fixed_degrees(fixed), step_s, column.name, number))
        except UsageError as error:
            raise DamagedInput(path, str(error), line=number) from None
    if not steps:
        raise UsageError(f"calibrate: expected rows with {' or '.join(_TIMES)} in {path}, got none")
    named = (*known, *question)
    passed_over = tuple(
        name
        for name, column in zip(table.names, columns, strict=True)
        if name and column.name not in named
    )
    return MeasuredTable(steps, passed_over, tuple(unmeasured))


def columns_of(table: Table, question: Collection[str]) -> list[_Column]:
    """Return a table's columns. A column without a name is of no use for a plan.

    A column under its own name stands for others of the same value, as `zero` beside `zero_stage`.
    Only mbs is as good as microbatch. A column such as `data_parallel` may hold words.
    """
    columns = []
    for place, (heading, name) in enumerate(zip(table.heading, table.names, strict=True)):
        column = _Column.headed(heading, question)
        cells = [row[place] for _, row in table.rows if place < len(row)]
        told = [_ungrouped(cell) for cell in cells if column.is_told(cell)]
        is_word = bool(re.search("_parallel(?:ism)?$", name) and told) and not any(
            printed(cell) is not None for cell in told
        )
        is_known = column.name in (*FIXABLE, *_TIMES)
        is_other = name not in (column.name, "mbs") and column.name in table.names
        columns.append(_Column("") if is_word or (is_known and is_other) else column)
    return columns


def table_of(text: str) -> Table:
    """Read a table as people and programs write it: between commas, semicolons or tabs.

    The heading is the first line that names a time, without # before it if there is such a line.
    Other lines that begin with # are remarks. A remark of one cell over rows of several is no
    heading. Decimal commas become points where commas do not separate cells.
    """
    lines = text.splitlines(keepends=True)
    others = [at for at, line in enumerate(lines) if line.strip() and line.strip()[0] != "#"]
    have_several = any(mark in lines[at] for at in others[-1:] for mark in _SEPARATORS)
    headings = [
        (line.strip()[0] == "#", at, _SEPARATORS.index(separator))
        for at, line in enumerate(lines)
        for separator in _SEPARATORS
        if any(_TIME.fullmatch(_name(cell)) for cell in line.split(separator))
        and (separator in line or not have_several)
    ]
    _, at, place = min(headings, default=(False, next(iter(others), 0), 0))
    separator = _SEPARATORS[place]
    reader = csv.reader(
        io.StringIO("".join(lines[at:]), newline=""), delimiter=separator, skipinitialspace=True
    )
    rows = [(at + reader.line_num, [cell.strip() for cell in row]) for row in reader]
    line, heading = rows[0] if rows else (1, [])
    names = [_name(cell) for cell in heading]
    is_numbered = names[:1] in ([""], ["id"], ["uid"])  # rows may begin with #1 then
    rows = [
        (place, row)
        for place, row in rows[1:]
        if any(row)
        if not row[0].startswith("#") or (is_numbered and re.fullmatch(r"#\d+", row[0]))
    ]
    if separator == ",":
        return Table(line, heading, names, rows)
    timed = [place for place, name in enumerate(names) if _TIME.fullmatch(name)]
    times = [row[place] for _, row in rows for place in timed if place < len(row)]
    has_commas = any(map(_DECIMAL_COMMA.fullmatch, times))
    has_points = any(map(_DECIMAL_POINT.fullmatch, times))
    for _, row in rows:
        for place, cell in enumerate(row):
            is_decimal = has_commas and not has_points and _EITHER.fullmatch(cell)
            if is_decimal or _DECIMAL_COMMA.fullmatch(cell):
                row[place] = cell.replace(".", "").replace(",", ".")
    return Table(line, heading, names, rows, is_open=has_commas == has_points)


def _ungrouped(cell: str) -> str:
    """Return a cell without the marks between thousands of its number, as in 25,500 or 1_000."""
    grouped = re.match(r"\d{1,3}(?:[,_]\d{3})+(?![\d,_])", cell)
    return re.sub("[,_]", "", grouped[0]) + cell[grouped.end() :] if grouped else cell


def _name(cell: str) -> str:
    """Return a column's name in small letters, with _ between its words."""
    return re.sub(r"[\W_]+", "_", cell.lower()).strip("_")


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
