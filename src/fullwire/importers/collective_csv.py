"""Read people's own tables of collectives: CSV with a size, a time and the ranks of each row.

    nodes,gpus,collective,size_bytes,time_us,algbw,busbw
    2,16,all_reduce,1048576,104.3,10.05,18.85

Columns are found by their names, in any order and spelling; other columns are left alone. A unit
may stand in the name (`time_us`, `Size (MB)`). Sizes are bytes of the whole vector without one, as
nccl-tests counts them. The unit of a time without one follows from a column `algbw`. Rows of one
operation and number of ranks are a table.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from statistics import median

from fullwire.collectives.cost import bus_factor
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import name_of, opened_plain
from fullwire.importers._format import NEAR_BYTES, POSSIBLE, UNLIKE, Format, Likeness, near_miss
from fullwire.importers._tables import Row, Table, op_named, op_told, row_problems, run_of

_MOST_BYTES_OF_FILE = 64 * 2**20
_MOST_ROWS = 10_000
_MOST_RANKS = 100_000
_MOST_BYTES = 2**50
_SHORTEST_US, _LONGEST_US = 1e-3, 3.6e9
_NEAR = 0.1  # of an algbw: rounding, and GiB for GB
_BETWEEN_WORDS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z][a-z])")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?) ?([kKmMgG]?)i?(?:[bB](?:ytes)?)?", re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3}
_US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
_US |= {"usec": 1.0, "usecs": 1.0, "msec": 1e3, "sec": 1e6, "secs": 1e6, "seconds": 1e6}
_US |= {"microseconds": 1.0, "milliseconds": 1e3}
_BYTES = {"b": 1.0, "bytes": 1.0, "byte": 1.0}
_BYTES |= {f"{name}b": 1000.0**power for name, power in (("k", 1), ("m", 2), ("g", 3))}
_BYTES |= {f"{name}ib": 1024.0**power for name, power in (("k", 1), ("m", 2), ("g", 3))}
_NAMES: Mapping[str, tuple[str, ...]] = {
    "size": (
        *("size", "bytes", "nbytes", "messagesize", "msgsize", "messagebytes", "msgbytes"),
        *("datasize", "buffersize", "payload", "payloadsize", "totalbytes", "totalsize"),
    ),
    "time": (
        *("time", "latency", "duration", "avgtime", "avglatency", "averagetime", "averagelatency"),
        *("meantime", "meanlatency", "mediantime", "medianlatency", "timeavg", "latencyavg"),
        *("timemean", "timemedian", "ooptime", "outofplacetime", "timeoop", "elapsed"),
    ),
    "algbw": ("algbw", "algobw", "algbandwidth", "algobandwidth", "algorithmbandwidth", "oopalgbw"),
    "busbw": ("busbw", "busbandwidth", "oopbusbw"),
    "redop": ("redop", "reduction"),
    "ranks": (
        *("ranks", "nranks", "numranks", "gpus", "ngpus", "numgpus", "totalgpus", "gpucount"),
        *("worldsize", "world", "workers", "numworkers", "devices", "ndevices", "numdevices"),
        *("np", "nprocs", "procs", "processes"),
    ),
    "nodes": ("nodes", "nnodes", "numnodes", "hosts", "nhosts", "numhosts", "nodecount"),
    "of_node": (
        *("gpuspernode", "rankspernode", "devicespernode", "ppn", "procspernode"),
        *("nprocpernode", "nprocspernode", "gpusnode", "rankspernodes"),
    ),
    "op": ("collective", "op", "operation", "primitive", "coll", "test", "function", "name"),
    "system": ("system", "machine", "cluster", "gpu", "gputype", "device", "hardware", "platform"),
    "dtype": ("dtype", "datatype", "type"),
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names}


@dataclass(slots=True)
class _Columns:
    """The columns of a heading by their role, and the units in the names."""

    separator: str
    places: dict[str, int] = field(default_factory=dict)
    bytes_each: float = 1.0
    us_each: float | None = None  # None: the name lacks a unit

    @property
    def lacks(self) -> str:
        """Return the columns that a table needs and this one lacks; "" if it has them."""
        wanted = [role for role in ("size", "time") if role not in self.places]
        if "ranks" not in self.places and not {"nodes", "of_node"} <= {*self.places}:
            wanted.append("ranks")
        return ", ".join(wanted)


def _heading(line: str) -> _Columns:
    """Find the columns of a heading; the first of several names of one role counts."""
    separator = max(",;\t|", key=line.count)
    columns = _Columns(separator)
    line = line.lstrip("\ufeff# ").replace("µ", "u").replace("μ", "u")
    for place, name in enumerate(line.split(separator)):
        words = [word.lower() for word in _BETWEEN_WORDS.split(name) if word]
        unit = words[-1] if len(words) > 1 and words[-1] in _US | _BYTES else ""
        role = _ROLES.get("".join(words[:-1] if unit else words))
        if role is None or role in columns.places:
            continue
        columns.places[role] = place
        if role == "size":
            columns.bytes_each = _BYTES.get(unit, 1.0)
        elif role == "time":
            columns.us_each = _US.get(unit)
    return columns


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning has the columns of such a table."""
    lines = beginning[:NEAR_BYTES].decode(errors="replace").splitlines()
    heading = next((line for line in lines if line.strip() and not line.startswith("##")), "")
    if len(lines) < 2 or max(map(heading.count, ",;\t|")) < 2:
        return UNLIKE
    columns = _heading(heading)
    if not columns.lacks:
        return POSSIBLE
    is_near = {"size", "time"} <= {*columns.places} and "op" in columns.places
    return near_miss(is_near, f"columns: {columns.lacks}")


def read_tables(path: Path) -> list[Table]:
    """Read the tables of a file: one for each operation and number of ranks."""
    with opened_plain(path) as file:
        content = file.read(_MOST_BYTES_OF_FILE + 1)
    if len(content) > _MOST_BYTES_OF_FILE:
        raise DamagedInput(path, f"larger than {_MOST_BYTES_OF_FILE:,} bytes unpacked")
    lines = content.decode(errors="replace").splitlines()
    first = next(
        (number for number, line in enumerate(lines) if line.strip() and line[:2] != "##"), 0
    )
    columns = _heading(lines[first] if lines else "")
    if columns.lacks:
        raise DamagedInput(
            path, f"expected columns of size, time and ranks; missing: {columns.lacks}"
        )
    if "algbw" not in columns.places and columns.us_each is None:
        raise UsageError(
            f"{path}: its times have no unit: name the column time_us, time_ms or time_s"
        )
    cells = csv.reader(lines[first + 1 :], delimiter=columns.separator, skipinitialspace=True)
    try:
        entries = [(first + 1 + cells.line_num, row) for row in cells]
    except csv.Error as error:
        raise DamagedInput(path, f"expected CSV: {error}") from None
    return [*_tables(path, columns, entries)]


def _tables(
    path: Path, columns: _Columns, entries: Sequence[tuple[int, list[str]]]
) -> Iterator[Table]:
    found: dict[tuple[str, int, int, int], list[Row]] = {}
    systems, broken, shares = dict[str, None](), list[int](), list[float]()
    for line, cells in entries[:_MOST_ROWS]:
        told = {
            role: cells[place].strip() if place < len(cells) else ""
            for role, place in columns.places.items()
        }
        size, time = (_number(told[role], columns.separator) for role in ("size", "time"))
        if size is None and time is None:  # a line of words, or an empty one
            continue
        ranks, nodes, of_node = (
            int(_number(told.get(role, ""), columns.separator) or 0)
            for role in ("ranks", "nodes", "of_node")
        )
        ranks = ranks or nodes * of_node
        is_sane = 0 < ranks <= _MOST_RANKS and nodes <= ranks
        if not size or not time or not is_sane or size * columns.bytes_each > _MOST_BYTES:
            broken.append(line)
            continue
        op = op_named(told.get("op", "")) or op_named(path.stem)
        systems.setdefault(told.get("system", ""))
        size_bytes = round(size * columns.bytes_each)
        if (rate := _number(told.get("algbw", ""), columns.separator)) is not None and rate > 0:
            shares.append(size_bytes * 1e-3 / time / rate)  # 1 if times are microseconds
        row = Row(
            bytes=size_bytes,
            dtype=told.get("dtype", "")[:40],
            time_us=time,
            algorithm_gb_s=rate or 0.0,
            bus_gb_s=_number(told.get("busbw", ""), columns.separator) or 0.0,
            line=line,
        )
        fullest = of_node or (-(-ranks // nodes) if nodes else 0)
        found.setdefault((op, ranks, nodes, fullest), []).append(row)
    if len(systems) > 1:
        some = ", ".join([*systems][:4])
        raise UsageError(f"{path}: its rows are of several systems ({some}): keep those of one")
    if not found:
        raise DamagedInput(path, "expected rows with a size, a time and ranks, and there is none")
    us_each = columns.us_each or _unit_of(path, shares)
    for row in itertools.chain.from_iterable(found.values()):
        if not _SHORTEST_US <= row.time_us * us_each <= _LONGEST_US:
            raise DamagedInput(path, f"line {row.line:,}: expected a time from 1 ns to an hour")
    beyond = (len(entries[_MOST_ROWS:]), _MOST_ROWS)
    problems = row_problems(0, len(broken), beyond, [], *broken[:1])
    for (named, ranks, nodes, fullest), rows in found.items():
        widest = max(rows, key=attrgetter("bus_gb_s"))
        op = named or op_told(widest, ranks, "redop" in columns.places, has_root=False)
        by_rates = [f"its operation is not named: by its bandwidths {op}"] if op != named else []
        factor = bus_factor(op, ranks) if op and ranks > 1 else 1.0
        yield Table(
            op=op,
            workers=ranks,
            device=next(iter(systems)),
            rows=tuple(_timed(row, row.time_us * us_each, factor) for row in rows),
            problems=tuple(f"{name_of(path)}: {problem}" for problem in problems + by_rates),
            tool="csv",
            backend="unknown",
            nodes=nodes,
            fullest=fullest,
            is_damaged=bool(problems),
            line=rows[0].line,
        )


def _timed(row: Row, time_us: float, factor: float) -> Row:
    """Return a row with its time, and the bandwidths that follow."""
    rate_gb_s = row.bytes * 1e-3 / time_us
    return replace(row, time_us=time_us, algorithm_gb_s=rate_gb_s, bus_gb_s=factor * rate_gb_s)


def _unit_of(path: Path, shares: Sequence[float]) -> float:
    """Return the microseconds of the unit of times whose bandwidths are so many times theirs."""
    usual = median(shares) if shares else 0.0
    for unit_us in sorted({*_US.values()}):
        if abs(math.log(usual * unit_us**-1 or 1e-300)) < _NEAR:
            return unit_us
    raise UsageError(
        f"{path}: its times have no unit, and no unit fits its algbw: name the column time_us, "
        "time_ms or time_s"
    )


def _number(text: str, separator: str) -> float | None:
    """Return a number as people write it: 64M and 8 KiB are sizes, 1,5 is one and a half."""
    text = text.strip()
    if "," in text:
        is_decimal = separator != "," and re.fullmatch(r"\d+,\d+", text) is not None
        text = text.replace(",", "." if is_decimal else "")
    found = _NUMBER.fullmatch(text)
    value = math.nan if found is None else float(found[1]) * 1024 ** _POWERS[found[2].lower()]
    return value if math.isfinite(value) else None


FORMAT = Format(
    key="collective-csv",
    label="tables of collectives in CSV",
    looks_like=looks_like,
    read=lambda files, options: run_of(
        files, [table for file in files for table in read_tables(file)]
    ),
    is_of_many=True,
    tells=20,
    tables=read_tables,
)
