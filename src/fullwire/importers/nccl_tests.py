"""What nccl-tests print: a table of sizes, times and bandwidths, with NCCL's own lines between.

    #       size         count    type   redop     time   algbw   busbw  error     time  ...
    #        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  ...
      8589934592    2147483648   float     sum    63896  134.44  235.26    N/A    63959  ...

Out of place first, in place after it. With NCCL_DEBUG=INFO, lines of NCCL break rows apart, and
even begin within them: a row is all numbers from its size on until the next row's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fullwire.collectives.cost import bus_factor
from fullwire.errors import DamagedInput
from fullwire.files import lines_of, name_of
from fullwire.importers._format import LIKELY, UNLIKE, Format, Likeness
from fullwire.importers.nccl_log import log_facts, read_nccl_logs
from fullwire.run.facts import NO_FACTS, Facts
from fullwire.run.gaps import Gap, gaps_of
from fullwire.run.run import Collectives, Provenance, Run

_LONGEST_LINE = 64 * 1024
_MOST_LINES = 20_000_000
_MOST_ROWS = 10_000
_MOST_RANKS = 100_000
_MOST_BYTES = 2**50
_LONGEST_US = 3.6e9
_LAST_DIGIT = 0.01  # of bandwidths, as they are printed
_OF_NCCL = re.compile(r"[A-Za-z][\w.-]*:\d+:\d+ \[\d+\] ")
_RANK = re.compile(r"#\s+Rank\s+(\d{1,6})\s.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\](.*)")
_PERF = re.compile(r"\b(\w+)_perf\b")
_BEGINS_TABLE = re.compile(r"#\s+(?:nThread:? |Collective test starting)")  # rccl-tests had a colon
_HEADING = re.compile(rb"#\s+size\s+count(?:\s+\(?elements\)?)?\s+type\s")
_BARE = re.compile(rb"(?:^|\n) *size +count .{0,40}type .{0,80}algbw")
# mpirun and srun put the rank before what it prints, even within a row; srun pads it with spaces.
# Kubernetes puts the time before a line.
_TAGS = re.compile(
    r"(?:\[\d{1,6}(?:,\d{1,6})?\](?:<std\w{3}>:)?|^ {0,6}\d{1,7}:"
    r"|^\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)?) ?"
)
_WRONG = re.compile(r"# Out of bounds values : (\d{1,18}) FAILED")
_OPS = {
    "allreduce": "allreduce",
    "allgather": "allgather",
    "reducescatter": "reducescatter",
    "alltoall": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "sendrecv",
    "gather": "gather",
    "scatter": "scatter",
}
_REDUCTIONS = ("sum", "prod", "min", "max", "avg")
_OF_ALL = ("allreduce", "allgather", "reducescatter", "alltoall", "gather", "scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size: microseconds and GB/s (powers of ten), as printed."""

    bytes: int
    dtype: str
    time_us: float
    algorithm_gb_s: float
    bus_gb_s: float
    in_place_us: float | None
    in_place_bus_gb_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All that one run of nccl-tests printed."""

    op: str  # "" where neither the output nor its name tells
    workers: int
    device: str
    rows: tuple[Row, ...]
    problems: tuple[str, ...]

    def points(self) -> tuple[tuple[float, float], ...]:
        """Return bytes that each rank sends and the seconds that takes, out of place, ascending."""
        last = self.rows[-1]
        told = last.bus_gb_s / last.algorithm_gb_s if last.algorithm_gb_s else 1.0
        factor = bus_factor(self.op, self.workers) if self.op and self.workers > 1 else told
        slowest: dict[float, float] = {}
        for row in self.rows:
            sent = factor * row.bytes
            slowest[sent] = max(slowest.get(sent, 0.0), row.time_us * 1e-6)
        return tuple(sorted(slowest.items()))


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is the output of nccl-tests."""
    begins = (b"# nThread ", b"# nThread: ", b"# Collective test starting")
    has_table = _HEADING.search(beginning) is not None
    if has_table or any(each in beginning for each in begins):
        return LIKELY
    return Likeness(0, "the # before its heading") if _BARE.search(beginning) else UNLIKE


def read_table(path: Path) -> Table:
    """Read the table of a file; of several, that of all-reduces, or else the first."""
    tables = read_tables(path)
    return next((table for table in tables if table.op == "allreduce"), tables[0])


def read_tables(path: Path) -> list[Table]:
    """Read what one or more of nccl-tests printed into a file."""
    tables, reading = list[Table](), _Reading()
    for line in lines_of(path, most=_MOST_LINES, longest=_LONGEST_LINE):
        said = _OF_NCCL.split(line.decode(errors="replace"), maxsplit=1)[0]
        text = _TAGS.sub("", said)
        if _BEGINS_TABLE.search(text) and reading.has_rows:
            tables += reading.tables(path)
            reading = _Reading(op=reading.mentioned)
        reading.take(text)
    tables += reading.tables(path)
    if not tables:
        raise DamagedInput(path, "expected a table of nccl-tests, and no whole row is in it")
    return tables


class _Reading:
    """One table, as far as it has come."""

    def __init__(self, op: str = "") -> None:
        self.mentioned = ""  # since the table's end: the next one's
        self._op, self._has_end, self._broken = op, False, 0
        self._wrong = 0  # values that a validation found
        self._columns, self._row, self._rows = list[str](), list[str](), list[Row]()
        self._hosts: dict[int, str] = {}
        self._reduces, self._has_root = False, False

    @property
    def has_rows(self) -> bool:
        """Say whether any row has begun."""
        return bool(self._row or self._rows)

    def take(self, text: str) -> None:
        """Take a line without what others wrote into it."""
        if (perf := _PERF.search(text)) is not None and (op := _op(perf[1])):
            self._op = self._op or op
            self.mentioned = op if self._has_end else self.mentioned
        if text.startswith("#"):
            self._columns = _columns(text) or self._columns
            rank = _RANK.match(text)
            if rank is not None and len(self._hosts) < _MOST_RANKS:
                self._hosts[int(rank[1])] = rank[3].strip()
            self._has_end = self._has_end or "Avg bus bandwidth" in text
            if (wrong := _WRONG.match(text)) is not None:
                self._wrong = int(wrong[1])
            return
        words = text.split()
        begins_row = (
            len(words) >= 3
            and all(word.isascii() and word.isdigit() and len(word) <= 16 for word in words[:2])
            and words[2][:1].isalpha()
        )
        if self._columns and begins_row:
            self._reduces |= words[3:4] != [] and words[3] in _REDUCTIONS
            self._has_root |= words[4:5] != [] and words[4].isdigit()
            self._broken += not _keep(self._rows, self._row, self._columns)
            self._row = words
        elif (
            self._row
            and len(self._row) < len(self._columns) + 8
            and all(word == "N/A" or _number(word) is not None for word in words)
        ):
            self._row += words

    def tables(self, path: Path) -> Iterator[Table]:
        """Return what was read, if any row is whole."""
        self._broken += not _keep(self._rows, self._row, self._columns)
        if self._rows:
            widest = max(self._rows, key=lambda row: row.bus_gb_s)
            op = self._op or _op(path.stem)
            is_told = not op
            if is_told:
                op = _op_told(widest, len(self._hosts), self._reduces, self._has_root)
            told = _ranks_told(op, widest)
            workers = len(self._hosts) or told or 1
            problems = []
            if self._wrong:
                problems.append(f"{self._wrong:,} values were wrong, by its own validation")
            if self._broken:
                problems.append(f"{self._broken} rows are not whole, and are left out")
            if not self._has_end:
                problems.append("it ends before its average, so sizes may be missing")
            if is_told and op:
                problems.append(f"its operation is not named: by its bandwidths {op}")
            if not self._hosts:
                by = f"by their bandwidths {told}" if told else "taken for one"
                problems.append(f"its ranks are not listed: {by}")
            devices = sorted(set(filter(None, self._hosts.values())))
            yield Table(
                op=op,
                workers=workers,
                device=", ".join(devices[:8]),
                rows=tuple(self._rows),
                problems=tuple(f"{name_of(path)}: {problem}" for problem in problems),
            )


def read_nccl_tests(paths: Sequence[Path]) -> Run:
    """Read the output of nccl-tests as a run: a collective for each size, one after another.

    Of a test that hung before its first row, what NCCL said while it was set up is worth reading.
    """
    said, problems = log_facts(paths)
    try:
        tables = [table for path in paths for table in read_tables(path)]
    except DamagedInput as error:
        if said == NO_FACTS:
            raise
        run = read_nccl_logs(paths)
        return replace(run, gaps=(*run.gaps, Gap(str(error))))
    devices = dict.fromkeys(table.device for table in tables if table.device)
    facts = said | Facts(
        workers=max(table.workers for table in tables),
        backend="nccl",
        device=", ".join(devices).encode(errors="backslashreplace").decode() or None,
    )
    begin_ns = 0
    parts = []
    for number, table in enumerate(tables):  # one after another, each of all its ranks
        ranks, count = table.workers, len(table.rows)
        length_ns = np.array([round(row.time_us * 1e3) for row in table.rows], np.int64)
        end_ns = begin_ns + np.cumsum(length_ns)
        begin_ns = int(end_ns[-1])
        parts.append(
            Collectives(
                rank=np.repeat(np.arange(ranks), count),
                step=np.full(ranks * count, -1),
                sequence=np.tile(np.arange(count), ranks),
                group=np.full(ranks * count, f"nccl-tests {number}", object),
                op=np.full(ranks * count, table.op or "unknown", object),
                dtype=np.array([row.dtype for row in table.rows] * ranks, object),
                bytes=np.tile([row.bytes for row in table.rows], ranks),
                issue_ns=np.tile(end_ns - length_ns, ranks),
                start_ns=np.tile(end_ns - length_ns, ranks),
                end_ns=np.tile(end_ns, ranks),
            )
        )
    return Run(
        provenance=Provenance(origin="imported", source=", ".join(map(name_of, paths))),
        facts=facts,
        gaps=gaps_of([*(problem for table in tables for problem in table.problems), *problems]),
        collectives=Collectives.joined(parts),
    )


def _columns(line: str) -> list[str]:
    """Return the columns before the first time, if this is the table's heading."""
    words = line.lstrip("#").split()
    is_heading = words[:3] == ["size", "count", "type"] and "time" in words
    return words[: words.index("time")] if is_heading else []


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,18}(?:\.\d{1,18})?", text, re.ASCII) else None


def _keep(rows: list[Row], words: list[str], columns: list[str]) -> bool:
    """Add a row if it is whole; without any words there was none."""
    if not words:
        return True
    size, dtype = int(words[0]), words[2][:40]
    # Where nothing is reduced, some versions leave the operation's column empty.
    has_redop = "redop" in columns and words[3:4] != [] and words[3][:1].isalpha()
    first = 3 + has_redop + ("root" in columns)
    numbers = [_number(word) for word in words[first : first + 7]]
    if len(numbers) < 3 or None in numbers[:3] or len(rows) >= _MOST_ROWS or size > _MOST_BYTES:
        return False
    time_us, algorithm, bus = (each or 0.0 for each in numbers[:3])
    if not 0 < time_us <= _LONGEST_US or not math.isfinite(algorithm + bus):
        return False
    rows.append(
        Row(
            bytes=size,
            dtype={"float": "float32", "half": "float16"}.get(dtype, dtype),
            time_us=time_us,
            algorithm_gb_s=algorithm,
            bus_gb_s=bus,
            in_place_us=numbers[4] if len(numbers) > 6 else None,
            in_place_bus_gb_s=numbers[6] if len(numbers) > 6 else None,
        )
    )
    return True


def _ranks_told(op: str, row: Row) -> int | None:
    """Return among how many ranks both bandwidths of a row are as they are, if digits suffice."""
    algorithm_gb_s = max(row.algorithm_gb_s, _LAST_DIGIT)
    share = row.bus_gb_s / algorithm_gb_s / (2 if op == "allreduce" else 1)
    if op not in _OF_ALL or not 0 < share < 1:
        return None
    ranks = 1 / (1 - share)
    unsure = ranks**2 * _LAST_DIGIT / algorithm_gb_s
    return round(ranks) if abs(ranks - round(ranks)) + unsure < 0.5 else None


def _op_told(row: Row, ranks: int, reduces: bool, has_root: bool) -> str:
    """Return the operation whose bus bandwidth is such a share of its algorithm's, if one is.

    Of those that neither reduce nor have a root, several have the same share.
    """
    if ranks < 2 or row.bus_gb_s <= 0 or not (reduces or has_root):
        return ""
    share = row.bus_gb_s / row.algorithm_gb_s
    unsure = max(0.01, 2 * share * _LAST_DIGIT / min(row.algorithm_gb_s, row.bus_gb_s))
    rooted = ["reduce" if reduces else "broadcast"]
    candidates = rooted if has_root else ["allreduce", "reducescatter"]
    fits = [op for op in candidates if abs(bus_factor(op, ranks) - share) <= unsure]
    return fits[0] if len(fits) == 1 else ""


def _op(text: str) -> str:
    plain = text.lower().replace("_", "").replace("-", "")
    return next((op for word, op in _OPS.items() if word in plain), "")


FORMAT = Format(
    key="nccl-tests",
    label="tables of nccl-tests",
    looks_like=looks_like,
    read=lambda files, options: read_nccl_tests(files),
    is_of_many=True,
    tells=20,
)
