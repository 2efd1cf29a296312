"""A trace format: its names, how a file of it is recognised, and its reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from fullwire.importers._tables import Table
    from fullwire.run.run import Run

Option: TypeAlias = Literal["step_time", "reduce_cost", "communication", "pattern"]


class Likeness(NamedTuple):
    """How much the beginning of a file looks like a format."""

    score: float
    lacks: str = ""  # of a near miss: the mark that such a file has and this one lacks


CERTAIN = Likeness(1.0)  # it says so itself, in a place where nothing else can stand
LIKELY = Likeness(0.8)  # it has names of fields that no other format has
POSSIBLE = Likeness(0.5)  # it holds lines of this format, maybe among others
UNLIKE = Likeness(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Values that people add to files, for formats that take them."""

    step_time: str | float | None = None
    reduce_cost: str | Path | None = None
    communication: str | None = None
    pattern: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How the ranks of a job are written as a run while they are read."""

    output: str | Path
    logs: Sequence[Path]  # of NCCL, beside the traces
    left_out: Sequence[str]
    processes: int | None
    on: str
    replace: bool
    told: Callable[[int, int], None]  # hears how many of how many traces are read


# Adds to the run of a job what other files say of it.
Beside: TypeAlias = "Callable[[Run, Sequence[Path]], Run]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A trace format; `read` gets its files, and directories if it searches them itself."""

    key: str
    label: str  # of several such files, as in "a folder of profiler traces"
    looks_like: Callable[[bytes], Likeness]
    read: Callable[[Sequence[Path], Options], Run]
    is_of_many: bool = False  # a rank, host or test has a file each, and all of them make a run
    searches_directories: bool = False
    tells: int = 0  # of a job: in a folder of several formats the most telling one is read
    options: tuple[Option, ...] = ()
    beside: Beside | None = None  # its files may stand beside those of another format
    write: Callable[[Sequence[Path], Options, Writing], Path] | None = None  # in bounded memory
    tables: Callable[[Path], list[Table]] | None = None  # of a benchmark of collectives
