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
from fullwire.workloads.accelerators import Accelerator, accelerator
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
    r"tok(?:en)?s_(?:per_)?s(?:ec|econd)?_(?:per_)?(?:gpu|device)"
    r"|tok(?:en)?s_per_(?:gpu|device)_(?:per_)?s(?:ec|econd)?"
)
_TIME = re.compile(f"{_STEP_TIME.pattern}|{_RATE.pattern}")
_SEPARATORS = ",;\t"
# Empty cells, and the words for a step that failed.
_EMPTY = ("", "-", "--", "?", "n/a", "na", "nan", "null")
_NOT_MEASURED = (*_EMPTY, "oom", "out of memory", "failed", "fail", "error", "crashed", "timeout")


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

    def step_s(self, cell: str, tokens_of_device: float) -> float:
        """Return the time of the step that a cell tells."""
        number = printed(cell)
        is_rate = self.name == "tokens_s_gpu"
        if not is_rate and number is None and cell[:1].isdigit():
            whole = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", cell)  # such a comma groups thousands
            number = seconds(whole, self.name)  # with its unit
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
        knows may be the one that is asked about.
        """
        try:
            if isinstance(asked, Architecture):
                known = built_in(cell)
                is_same = known is None or known.parameters == asked.parameters
            elif isinstance(asked, Accelerator):
                is_same = accelerator(cell).family == asked.family
            else:
                is_same = cell.lower() == asked if isinstance(asked, str) else float(cell) == asked
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
    columns = [_Column.headed(cell, question) for cell in table.heading]
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
        row = dict(zip(columns, cells, strict=False))
        times = sorted(
            (column, cell)
            for column, cell in row.items()
            if column.name in _TIMES and cell.lower() not in _NOT_MEASURED
        )
        if not times:
            unmeasured.append(number)
            continue
        column, cell = times[0]
        try:
            step_s = column.step_s(cell, tokens_of_device)
            for told, value in row.items():
                if told.name in question and value.lower() not in _EMPTY:
                    told.refuse_other(value, question[told.name])
            # Programs write a whole number as 8.0, too.
            fixed = [
                f"{told.name}={re.sub(r'(?<=[0-9])[.]0*$', '', value)}"
                for told, value in row.items()
                if told.name in FIXABLE and value.lower() not in _EMPTY
            ]
            steps.append(MeasuredStep(fixed_degrees(fixed), step_s, column.name, number))
        except UsageError as error:
            raise DamagedInput(path, str(error), line=number) from None
    if not steps:
        raise UsageError(f"calibrate: expected rows with {' or '.join(_TIMES)} in {path}, got none")
    named = (*known, *question)
    passed_over = tuple(name for name in names if name and name not in named)
    return MeasuredTable(steps, passed_over, tuple(unmeasured))


def table_of(text: str) -> Table:
    """Read a table as people and programs write it: between commas, semicolons or tabs.

    The heading is the first line that names a time. Other lines that begin with # are remarks.
    """
    lines = text.splitlines(keepends=True)
    headings = (
        (at, separator)
        for at, line in enumerate(lines)
        for separator in _SEPARATORS
        if any(_TIME.fullmatch(_name(cell)) for cell in line.split(separator))
    )
    others = (at for at, line in enumerate(lines) if line.strip() and line.strip()[0] != "#")
    at, separator = next(headings, (next(others, 0), ","))
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
    if separator == ";":  # a spreadsheet that does so writes 9,1 for nine and a tenth
        point = re.compile(r"^(\d+),(\d+)")
        rows = [(place, [point.sub(r"\1.\2", cell) for cell in row]) for place, row in rows]
    return Table(line, heading, names, rows)


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
