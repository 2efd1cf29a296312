"""Read the OSU micro-benchmarks: blocking collectives, latency and bandwidth, MPI or NCCL.

    mpirun -n 8 osu_allreduce              only such a line tells the number of ranks
    # OSU MPI Allreduce Latency Test v7.5
    # Datatype: MPI_INT.                                        since 7.1
    # Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
    4                      10.05

The columns behind the average come with --full. For all-gather, all-to-all, gather and scatter, a
size is that of one rank's part. For all other operations it is that of the whole vector. Some tests
measure something else and are left out by name: those that go both ways at once, have several
pairs, are one-sided or do not block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fullwire.collectives.cost import bus_factor
from fullwire.errors import DamagedInput
from fullwire.files import lines_of, name_of
from fullwire.importers._format import LIKELY, NEAR_BYTES, Format, Likeness, near_miss
from fullwire.importers._tables import (
    Placement,
    Prefixes,
    Row,
    Table,
    placement_of,
    run_of,
    without_tags,
)
from fullwire.run.run import Run

_LONGEST_LINE = 64 * 1024
_MOST_LINES = 20_000_000
_MOST_ROWS = 10_000  # rows of a table
_MOST_TABLES = 1_000
_MOST_BYTES = 2**50
_LONGEST_US = 3.6e9
_MARK = re.compile(r"# (?:OSU|OMB Python) ")
_TITLE = re.compile(
    r"# (?:OSU|OMB Python) (MPI|NCCL|RCCL|XCCL)(?:-\w+)?[ _](.{1,80}?) [Tt]est(?: v\S+)?"
)
_BEGINS = re.compile(rb"# (?:OSU|OMB Python) (?:MPI|NCCL|RCCL|XCCL)[-_ ]")
_NO_TITLE = re.compile(rb"# Size {2,20}(?:Avg )?(?:Latency|Bandwidth) ?\(")
_ROW = re.compile(r"\s*(\d{1,16})\s+(\d{1,18}(?:\.\d{1,6})?)(?:\s+\S+){0,8}\s*$", re.ASCII)
_ALONE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,6})?)(?:\s+\S+){0,3}\s*$", re.ASCII)
_WITHOUT_SIZE = re.compile(r"(?:\S*\d\S*\s+)?\d{1,18}\.\d{1,6}", re.ASCII)
_DATATYPE = re.compile(r"# Datatype: (MPI_\w{1,20})")
_DTYPES = {"MPI_CHAR": "int8", "MPI_INT": "int32", "MPI_FLOAT": "float32", "MPI_DOUBLE": "float64"}
# By the title without "Latency". A final v allows parts of unequal sizes, but these are equal.
_OPS = {
    "allreduce": "allreduce",
    "allgather": "allgather",
    "allgatherv": "allgather",
    "all-to-all personalized exchange": "alltoall",
    "all-to-allv personalized exchange": "alltoall",
    "alltoall": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "reduce_scatter": "reducescatter",
    "gather": "gather",
    "gatherv": "gather",
    "scatter": "scatter",
    "scatterv": "scatter",
    "barrier": "barrier",
}
# By the end of a command's name.
_OPS_OF_COMMANDS = _OPS | {
    "alltoallv": "alltoall",
    "bcast": "broadcast",
    "latency": "sendrecv",
    "bw": "sendrecv",
}
_COMMAND = re.compile(r"\bosu_(?:[nrx]ccl_)?([a-z]\w*)")
_BY_PART = ("allgather", "alltoall", "gather", "scatter")  # sizes are those of one rank's part


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning holds such a table."""
    if _BEGINS.search(beginning):
        return LIKELY
    is_near = _NO_TITLE.search(beginning, 0, NEAR_BYTES)
    return near_miss(is_near, 'a title such as "# OSU MPI Allreduce Latency Test"')


@dataclass(slots=True)
class _Reading:
    """One table while its lines are read."""

    library: str
    op: str
    placed: Placement  # of 0 ranks if unknown
    is_bandwidth: bool
    command_line: int  # the line that tells the ranks; 0 if none does
    dtype: str = ""
    rows: list[tuple[int, float, int]] = field(default_factory=list)  # size, microseconds, line
    words: int = 2  # of a row
    decimals: int | None = None  # of a printed time or bandwidth
    damaged: list[int] = field(default_factory=list)  # lines
    suspects: list[int] = field(default_factory=list)  # lines that are damaged if a row follows

    def take(self, text: str, line: int) -> None:
        """Read a line; pass over lines that are no row of this table."""
        if (told := _DATATYPE.match(text)) is not None:
            self.dtype = _DTYPES.get(told[1], "")
        row = (_ALONE if self.op == "barrier" else _ROW).fullmatch(text)
        if len(self.rows) >= _MOST_ROWS:
            return
        if row is None:
            if self._is_like_a_row(text.split()):
                self.damaged.append(line)
            elif self.rows and _WITHOUT_SIZE.fullmatch(text):
                self.suspects.append(line)
            return
        number = row[row.lastindex or 1]
        size, value = 0 if self.op == "barrier" else int(row[1]), float(number)
        time_us = (size / value if value else 0.0) if self.is_bandwidth else value
        if self.is_bandwidth and not value:
            return  # too slow for its decimals
        decimals = len(number.partition(".")[2])
        if not self._is_next(size):
            # The benchmarks print sizes in ascending order. So this row is at a wrong place if it
            # looks like the others, and else it is of the output after the table.
            looks_alike = (decimals, len(text.split())) == (self.decimals, self.words)
            if looks_alike and self.op != "barrier":
                self.damaged.append(line)
            return
        if not 0 < time_us <= _LONGEST_US or size > _MOST_BYTES:
            self.damaged.append(line)
            return
        if self.decimals is None:
            self.decimals, self.words = decimals, len(text.split())
        if decimals == self.decimals:
            self.rows.append((size, time_us, line))
            self.damaged += self.suspects
            self.suspects.clear()
        else:  # The benchmarks print as many decimals in each row: this number is cut.
            self.damaged.append(line)

    def _is_next(self, size: int) -> bool:
        """Say whether sizes go on with this one; else a line is of the output after the table."""
        return not self.rows or size > self.rows[-1][0]

    def _is_like_a_row(self, words: list[str]) -> bool:
        """Say whether a line that is no row was one: it begins with the next size, or is as long.

        A line that is as long has a time at its place, and at least a digit of a size.
        """
        if self.op == "barrier" or not 0 < len(words) <= self.words:
            return False
        first = words[0]
        if first.isascii() and first.isdigit():
            return len(first) <= 16 and self._is_next(int(first))
        has_time = len(words) == self.words and re.fullmatch(r"\d+\.\d+", words[1]) is not None
        return has_time and first[0] in "-0123456789"

    def table(self, path: Path, problems: Sequence[str]) -> Table:
        """Return the table that was read."""
        damage = [
            f"line {line:,} is not whole or not in order, and is left out"
            for line in self.damaged[:1]
        ]
        if len(self.damaged) > 1:
            damage[0] += f" (and {len(self.damaged) - 1:,} more)"
        told = self.placed.ranks
        workers = 2 if self.op == "sendrecv" else told or 1
        is_told = told or workers == 2
        unsure = [] if is_told else ["its number of ranks is not told: taken for one"]
        parts = workers if self.op in _BY_PART else 1
        factor = bus_factor(self.op, workers)
        return Table(
            op=self.op,
            workers=workers,
            device="",
            rows=tuple(
                Row(
                    bytes=size * parts,
                    dtype=self.dtype,
                    time_us=time_us,
                    algorithm_gb_s=size * parts / time_us * 1e-3,
                    bus_gb_s=size * parts * factor / time_us * 1e-3,
                    line=line,
                )
                for size, time_us, line in self.rows
            ),
            problems=tuple(
                f"{name_of(path)}: {problem}" for problem in [*damage, *unsure, *problems]
            ),
            tool="osu",
            backend=self.library.lower(),
            nodes=self.placed.nodes,
            fullest=self.placed.fullest,
            is_damaged=bool(damage),
            line=self.command_line,
        )


def read_tables(path: Path) -> list[Table]:
    """Read the tables that one or more of the benchmarks printed into a file."""
    readings: list[_Reading] = []
    left_out: dict[str, None] = {}
    unknown = Placement(ranks=0)
    placed, command_line, started, is_inside, prefixes = unknown, 0, "", False, Prefixes()
    lines = lines_of(path, most=_MOST_LINES, longest=_LONGEST_LINE)
    for number, line in enumerate(lines, 1):
        text = prefixes.without(without_tags(line.decode(errors="replace")), _MARK).strip()
        if (command := _COMMAND.search(text)) is not None:
            told = placement_of(text)
            if told is None and is_inside and readings[-1].rows:
                told = unknown  # this starts another test than the one whose rows came before
            if told is not None:
                placed, command_line = told, number if told.ranks else 0
                started = _OPS_OF_COMMANDS.get(command[1], "")
        if (title := _TITLE.match(text)) is not None:
            what = title[2].lower().removesuffix(" latency")
            op = "sendrecv" if what in ("latency", "bandwidth") else _OPS.get(what, "")
            is_inside = op != "" and len(readings) < _MOST_TABLES
            if is_inside:
                if started and started != op:  # the command is of a test before this one
                    placed, command_line = unknown, 0
                readings.append(_Reading(title[1], op, placed, what == "bandwidth", command_line))
            else:
                left_out[title[2].encode(errors="backslashreplace").decode()] = None
        elif is_inside:
            readings[-1].take(text, number)
    problems = [f"these tables are not read: {', '.join([*left_out][:8])}"] if left_out else []
    found = [reading for reading in readings if reading.rows]
    if not found:
        why = problems[0] if problems else "no whole row is in it"
        raise DamagedInput(path, f"expected a table of the OSU benchmarks; {why}")
    first, *others = found
    return [first.table(path, problems), *(reading.table(path, ()) for reading in others)]


def read_osu(paths: Sequence[Path]) -> Run:
    """Read the output of the benchmarks as a run: a collective for each size, one after another."""
    return run_of(paths, [table for path in paths for table in read_tables(path)])


FORMAT = Format(
    key="osu",
    label="tables of the OSU benchmarks",
    looks_like=looks_like,
    read=lambda files, options: read_osu(files),
    is_of_many=True,
    tells=15,
    tables=read_tables,
)
