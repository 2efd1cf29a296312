"""Tables of measured steps that a user gives to `plan --calibrate`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fullwire.answers.planned import fixed_degrees
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import opened
from fullwire.findings.finding import Finding
from fullwire.findings.plans import MeasuredDiffer, MeasuredFarOff
from fullwire.simulation.plan_space import FIXABLE
from fullwire.units import shown
from fullwire.workloads.accelerators import Accelerator, accelerator
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.architecture_files import built_in

_FAR_OFF = 5.0  # times the price of a step: the wrong unit, or another job
_CONTRADICT = 1.25  # times the step of the same plan: repeats differ by less

# A degree under another name would count for nothing; other columns, such as notes, may stay.
_MISNAMED = ("microbatch_size", "shard_group", "context_kind", "step_s", "step_time")

_TIMES = ("step_time_s", "tokens_s_gpu")  # the first that a row has counts

_ALIASES = {"mbs": "microbatch"}


class MeasuredStep(NamedTuple):
    """A row of such a table."""

    degrees: dict[str, int | str]
    step_s: float
    column: str  # that tells the time


def measured_steps(
    path: Path, tokens_of_device: float, **question: int | str | Architecture | Accelerator
) -> tuple[list[MeasuredStep], tuple[str, ...]]:
    """Read a table of measured steps: a column for each degree, and `step_time_s`.

    A row without a time may have `tokens_s_gpu`, the tokens of a device in a second. Capital
    letters in names of columns are as good as small ones, and mbs is the microbatch. Columns that
    say nothing of the plan, such as notes, are passed over. They are the second part of the result.

    - `tokens_of_device`: in a step, of the batch that is asked about over its devices.
    - `question`: values that are the same for all plans, by the names of their columns. A row that
      tells another value was measured on another job.
    """
    try:
        with opened(path) as file:
            table = csv.DictReader(io.StringIO(file.read().decode("utf-8-sig"), newline=""))
            heading = list(table.fieldnames or ())
            columns = [_ALIASES.get(name, name) for name in map(str.lower, heading)]
            table.fieldnames = columns
            rows = list(table)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"calibrate: expected a table of measured steps: {error}") from None
    known = (*FIXABLE, *_TIMES)
    plain = {name.replace("_", "") for name in (*known, *_MISNAMED)}
    for name, told in zip(columns, heading, strict=True):
        if name not in known and name.replace("_", "") in plain:
            raise UsageError(
                f"calibrate: {path}: expected columns among {', '.join(known)}, got {shown(told)}"
            )
    twice = [name for place, name in enumerate(columns) if name in columns[:place]]
    if twice or not set(_TIMES) & set(columns):
        expected = "a column step_time_s or tokens_s_gpu between commas"
        expected = f"one column {twice[0]}" if twice else expected
        raise DamagedInput(path, f"expected {expected}, got {shown(','.join(heading))}", line=1)
    result = []
    for number, row in enumerate(rows, start=2):
        if len(row) > len(columns):  # the cells beyond the heading have no name
            raise DamagedInput(
                path, f"expected {len(columns)} cells in a row, as in the heading", line=number
            )
        measured_s, column = _step_s(row, tokens_of_device, path, number)
        for name, value in question.items():
            told = (row.get(name) or "").strip()
            if told and not _is_same(told, value):
                asked = value if isinstance(value, int | str) else value.name
                raise DamagedInput(
                    path, f"{name}: expected {asked} as asked, got {shown(told)}", line=number
                )
        named = [f"{name}={row[name]}" for name in FIXABLE if row.get(name)]
        try:
            result.append(MeasuredStep(fixed_degrees(named), measured_s, column))
        except UsageError as error:
            raise DamagedInput(path, str(error), line=number) from None
    if not result:
        times = " or ".join(_TIMES)
        raise UsageError(f"calibrate: expected rows with {times} in {path}, got none")
    passed_over = [name for name in columns if name and name not in known and name not in question]
    return result, tuple(passed_over)


def _step_s(
    row: Mapping[str, str | None], tokens_of_device: float, path: Path, line: int
) -> tuple[float, str]:
    """Return the time of a row's step, and the column that tells it."""
    told = {name: text for name in _TIMES if (text := (row.get(name) or "").strip())}
    asked = next(name for name in _TIMES if name in row)
    name, text = next(iter(told.items()), (asked, ""))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        unit = "seconds" if name == "step_time_s" else "tokens of a device in a second"
        raise DamagedInput(path, f"{name}: expected {unit} above 0, got {shown(text)}", line=line)
    return value if name == "step_time_s" else tokens_of_device / value, name


def about_measured(rows: Sequence[MeasuredStep], logs: Sequence[float]) -> Iterator[Finding]:
    """Yield what is odd about measured steps: far from their prices, or from each other."""
    for number, (row, log) in enumerate(zip(rows, logs, strict=True), start=2):
        if abs(log) > math.log(_FAR_OFF):
            times = math.exp(abs(log))
            is_rate = row.column == "tokens_s_gpu"
            yield MeasuredFarOff(line=number, times=times, is_longer=log > 0, is_rate=is_rate)
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
