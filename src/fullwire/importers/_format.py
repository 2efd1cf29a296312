"""The description of a trace format: its names, how its files are recognised, and its reader."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple, TypeAlias

from fullwire.errors import DamagedInput, UsageError
from fullwire.files import name_of, named_by_folder, opened_plain
from fullwire.importers._encodings import BrokenMessageError
from fullwire.units import shown

if TYPE_CHECKING:
    from fullwire.importers._tables import Table
    from fullwire.run.run import Run

Option: TypeAlias = Literal["step_time", "reduce_cost", "communication", "pattern"]
MetricRow: TypeAlias = tuple[int, str, float, int]  # step, name, value, time in nanoseconds


class Likeness(NamedTuple):
    """How much the beginning of a file looks like a format."""

    score: float
    lacks: str = ""  # for a near miss: the mark that this file lacks


CERTAIN = Likeness(1.0)  # The file names its format, at the place reserved for that.
LIKELY = Likeness(0.8)  # Only this format has these names of fields.
POSSIBLE = Likeness(0.5)  # It holds lines of this format, maybe among others.
UNLIKE = Likeness(0.0)
NEAR_BYTES = 64 * 1024  # of a beginning, in which near misses are looked for
OF_XLA = re.compile(rb'"/(?:job|host|device):')  # processes of TensorFlow and JAX


def near_miss(is_near: object, lacks: str) -> Likeness:
    """Return a file's likeness to a format that it is not: if near, with the mark that it lacks."""
    return Likeness(0.0, lacks) if is_near else UNLIKE


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Options:
    """Values that users add to files, for formats that take them."""

    step_time: str | float | None = None
    reduce_cost: str | Path | None = None
    communication: str | None = None
    pattern: str | None = None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Writing:
    """Settings for writing the ranks of a job as a run while they are read."""

    output: str | Path
    logs: Sequence[Path]  # NCCL's logs beside the traces
    left_out: Sequence[str]
    processes: int | None
    on: str
    replace: bool
    told: Callable[[int, int], None]  # gets the number of traces read, and of all traces


def compiled(option: Option, pattern: str) -> re.Pattern[str]:
    """Compile a regular expression that the user gave for an option, or refuse it."""
    try:
        return re.compile(pattern)
    except (re.error, TypeError, RecursionError) as error:
        raise UsageError(
            f"{option}: expected a regular expression, got {shown(pattern)}: {error}"
        ) from None


# Adds facts from other files of the job to its run.
Beside: TypeAlias = "Callable[[Run, Sequence[Path]], Run]"


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Format:
    """A trace format; `read` gets its files, or directories if `searches_directories` is set."""

    key: str
    label: str  # the plural, as in "a folder of profiler traces"
    looks_like: Callable[[bytes], Likeness]
    read: Callable[[Sequence[Path], Options], Run]
    is_of_many: bool = False  # each rank, host or test has a file; all of them make one run
    searches_directories: bool = False
    tells: int = 0  # how much it tells of a job: a folder is read in its most telling format
    options: tuple[Option, ...] = ()
    beside: Beside | None = None  # its files may stand beside those of another format
    write: Callable[[Sequence[Path], Options, Writing], Path] | None = None  # in bounded memory
    tables: Callable[[Path], list[Table]] | None = None  # for benchmarks of collectives


def read_metrics(
    paths: Sequence[Path],
    rows_in: Callable[[BinaryIO], Iterable[Iterable[MetricRow]]],
    *,
    wanted: str,
    piece: str,
    without: str,
) -> Run:
    """Read metrics, each file up to a damaged piece, as a run; refuse files without any."""
    rows_of: dict[Path, list[MetricRow]] = {}
    problems: list[str] = []
    for path in paths:
        rows = rows_of.setdefault(Path(os.path.abspath(path)).parent, [])
        try:
            with opened_plain(path) as file:
                for of_piece in rows_in(file):
                    rows += of_piece
        except BrokenMessageError as error:
            problems.append(f"{path.name}: read up to a damaged {piece}: {error}")
    if not any(rows_of.values()):
        raise DamagedInput(paths[0], f"expected {wanted}; {problems[0] if problems else without}")
    return run_of_metrics(paths[0], _named(rows_of), problems)


def _named(rows_of: Mapping[Path, Sequence[MetricRow]]) -> list[MetricRow]:
    """Return the rows of all folders; a metric that several of them have is named after each."""
    own = [
        (folder, name)
        for folder, rows in rows_of.items()
        for name in dict.fromkeys(row[1] for row in rows)
    ]
    full_names = dict(zip(own, named_by_folder(own), strict=True))
    taken: dict[str, Path] = {}
    for (folder, _), full_name in full_names.items():
        other = taken.setdefault(full_name, folder)
        if other != folder:
            raise UsageError(
                f"{os.path.commonpath(rows_of)}: expected a name for each metric, got "
                f"{shown(full_name)} from {shown(name_of(other))} and from "
                f"{shown(name_of(folder))}: name one of the two"
            )
    return [
        (step, full_names[folder, name], value, time_ns)
        for folder, rows in rows_of.items()
        for step, name, value, time_ns in rows
    ]


def run_of_metrics(source: Path, rows: Sequence[MetricRow], problems: Sequence[str]) -> Run:
    """Return a run that has metrics only."""
    import numpy as np

    from fullwire.run.gaps import gaps_of
    from fullwire.run.run import Metrics, Provenance, Run

    steps, names, values, times_ns = zip(*rows, strict=True)
    whole_ns = np.array(times_ns, np.int64)
    return Run(
        provenance=Provenance(origin="imported", source=str(source)),
        gaps=gaps_of(problems),
        metrics=Metrics(
            step=np.array(steps, np.int64),
            name=np.array(names, object),
            value=np.array(values, float),
            time_ns=whole_ns - whole_ns.min(),
        ),
    )
