"""Read people's own tables of collectives: CSV with a size, a time and the ranks of each row.

    nodes,gpus,collective,size_bytes,time_us,algbw,busbw
    2,16,all_reduce,1048576,104.3,10.05,18.85

Columns are found by their names, in any order and spelling; other columns are left alone. Lines of
words may be above the heading. A unit may stand in the name (`time_us`, `Size (MB)`), and that of a
time or a bandwidth in its cell (`1.2 ms`). Sizes are bytes of the whole vector without one, as
nccl-tests counts them. The unit of a time without one follows from a column `algbw`, which has to
agree with all sizes and times. Without a column of times, bandwidths tell them. Rows of one
operation and number of ranks are a table. A text that may mean two things is refused.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TypeAlias

from fullwire.collectives.cost import bus_factor
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import name_of, opened_plain
from fullwire.importers._format import NEAR_BYTES, POSSIBLE, UNLIKE, Format, Likeness, near_miss
from fullwire.importers._tables import (
    BYTES_OF,
    OF_RATE,
    US_OF,
    Row,
    Table,
    another_rate,
    gb_s_each,
    left_out,
    op_in,
    op_named,
    op_told,
    row_problems,
    run_of,
)
from fullwire.units import shown

_MOST_BYTES_OF_FILE = 64 * 2**20
_MOST_ROWS = 10_000
_MOST_RANKS = 100_000
_MOST_BYTES = 2**50
_SHORTEST_US, _LONGEST_US = 1e-3, 3.6e9
_NEAR = 0.1  # of an algbw: rounding, and GiB for GB
_ROUGH = 0.05  # half of the last digit, as a share of a bandwidth that tells a time
_FAR = 2.0  # times a row's own algbw: a wrong digit, and no other average
_LAST_DIGIT = 0.01  # of an algbw as it is mostly printed
_MOSTLY = 10  # times as many numbers say what a comma means
_BETWEEN_WORDS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z][a-z])")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?) ?([kKmMgG]?)(i?)([bB]?)(?:ytes)?", re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3}
_MOST_LINES_ABOVE = 20  # of a heading
_MISSING = ("", "-", "n/a", "na", "nan", "none", "null")
# Commas between thousands: surely, where a comma is no decimal point, and maybe.
_SURELY_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3}){2,}(?:\.\d+)?|\d{1,3}(?:,\d{3})*\.\d+")
_MAYBE_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_WITH_POINT = re.compile(r"(?:\d+|\d{1,3}(?:,\d{3})+)\.\d+")  # before its decimals
# Texts that may be numbers.
_AS_NUMBER = re.compile(r"\d[\d,.]*(?:[eE][+-]?\d+)? ?[kKmMgG]?i?[bB]?(?:ytes)?", re.ASCII)
# Words behind a number of ranks.
_OF_RANKS = re.compile(r" ?x? ?(?:gpus?|ranks?|devices?|workers?|nodes?|hosts?)?$", re.IGNORECASE)
# A time with its unit.
_TIMED = re.compile(rf"(.*\d) ?({'|'.join(US_OF)}|[µμ]s)", re.IGNORECASE)
_NAMES: Mapping[str, tuple[str, ...]] = {
    "size": (
        *("size", "bytes", "nbytes", "messagesize", "msgsize", "messagebytes", "msgbytes"),
        *("datasize", "buffersize", "payload", "payloadsize", "totalbytes", "totalsize"),
    ),
    "time": (
        *("time", "latency", "duration", "avgtime", "avglatency", "averagetime", "averagelatency"),
        *("meantime", "meanlatency", "mediantime", "medianlatency", "timeavg", "latencyavg"),
        *("timemean", "timemedian", "ooptime", "outofplacetime", "timeoop", "elapsed", "lat"),
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
    "count": ("count", "elements", "nelements", "numelements"),
    "algorithm": ("algorithm", "algo", "alg"),
    "protocol": ("protocol", "proto"),
    "in_place": ("inplace", "isinplace"),
}
# Beside a unit of time, these are times, where no column has a name of times.
_STATISTICS = ("avg", "average", "mean", "median", "p50")
# A column of both places has these words. Of sizes with both, rows out of place count, as of
# nccl-tests.
_IN_PLACE = ("1", "true", "yes", "ip", "in", "inplace")
_OUT_OF_PLACE = ("0", "false", "no", "oop", "out", "outofplace")
_NUMBERS = ("size", "time", "algbw", "busbw", "ranks", "nodes", "of_node")
_APART = ("dtype", "algorithm", "protocol", "in_place")  # by these, rows are of several tables
_RANKS_OF_ALL = ("ranks", "nranks", "numranks", "totalgpus", "worldsize", "world")  # nodes
_ROLES = {name: role for role, names in _NAMES.items() for name in names}


_Number: TypeAlias = Callable[[str], float | None]  # how the numbers of a file are read


@dataclass(slots=True)
class _Columns:
    """The columns of a heading by their role, and the units in the names."""

    separator: str
    heading: list[str] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of these places
    others: dict[str, list[int]] = field(default_factory=dict)  # further columns of a role
    bytes_each: float | None = None  # None: the name lacks a unit
    us_each: float | None = None
    needs_unit: bool = False  # of times, in each cell
    # The GB/s of bandwidths by their role; `gbps` in small letters may be either one.
    rates_each: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def rate(self) -> str:
        """Return the role of the bandwidths that tell times; "" if there is none."""
        return next((role for role in ("algbw", "busbw") if role in self.places), "")

    @property
    def lacks(self) -> str:
        """Return the columns that a table needs and this one lacks; "" if it has them."""
        wanted = ["size"] if "size" not in self.places else []
        if "time" not in self.places and not self.rate:
            wanted.append("time")
        if "ranks" not in self.places and not {"nodes", "of_node"} <= {*self.places}:
            wanted.append("ranks")
        return ", ".join(wanted)


def _heading(line: str) -> _Columns:
    """Find the columns of a heading; rows tell which of several names an operation."""
    separator = max(",;\t|", key=line.count)
    columns = _Columns(separator)
    line = line.lstrip("\ufeff# ").replace("µ", "u").replace("μ", "u")
    columns.heading = next(csv.reader([line], delimiter=separator, skipinitialspace=True))
    for place, name in enumerate(columns.heading):
        heading = name.strip()
        if (rate := OF_RATE.search(name)) is not None:
            name = name[: rate.start()]
        first, *words = [word.lower() for word in _BETWEEN_WORDS.split(name) if word] or [""]
        unit = next((word for word in reversed(words) if word in US_OF | BYTES_OF), "")
        plain = "".join([first, *(word for word in words if word != unit)])
        is_average = unit in US_OF and plain in _STATISTICS
        role = "average" if is_average else _ROLES.get(plain)
        if role is None or (rate and role not in ("algbw", "busbw")):
            continue
        columns.others.setdefault(role, []).append(place)
        if columns.places.setdefault(role, place) != place:
            continue
        columns.names[role] = heading
        if role == "size":
            by_name = 1.0 if "bytes" in name.lower() else None
            columns.bytes_each = BYTES_OF.get(unit, by_name)
        elif role == "time" or (role == "average" and "time" not in columns.places):
            columns.us_each = US_OF.get(unit)
        elif rate is not None:
            columns.rates_each[role] = gb_s_each(rate)
    if "average" in columns.places:
        columns.places.setdefault("time", columns.places.pop("average"))
        columns.names.setdefault("time", columns.names.pop("average"))
    return columns


def _find_heading(lines: Sequence[str]) -> tuple[int, _Columns]:
    """Return the first of the first lines that has all columns, or the first one, and its number.

    Lines that begin with ## are remarks.
    """
    told = [at for at, line in enumerate(lines) if line.strip() and line[:2] != "##"]
    headings = [(at, _heading(lines[at][:NEAR_BYTES])) for at in told[:_MOST_LINES_ABOVE]]
    whole = (heading for heading in headings if not heading[1].lacks)
    return next(whole, headings[0] if headings else (0, _Columns(",")))


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning has the columns of such a table."""
    lines = beginning[:NEAR_BYTES].decode(errors="replace").splitlines()
    _, columns = _find_heading(lines)
    if len(columns.heading) < 3:
        return UNLIKE
    if not columns.lacks:
        return POSSIBLE
    has_time = "time" in columns.places or bool(columns.rate)
    is_near = "size" in columns.places and has_time + len({"op", "ranks"} & {*columns.places}) > 1
    return near_miss(is_near, f"columns: {columns.lacks}")


def read_tables(path: Path) -> list[Table]:
    """Read the tables of a file: one for each operation and number of ranks."""
    with opened_plain(path) as file:
        content = file.read(_MOST_BYTES_OF_FILE + 1)
    if len(content) > _MOST_BYTES_OF_FILE:
        raise DamagedInput(path, f"larger than {_MOST_BYTES_OF_FILE:,} bytes unpacked")
    text = content.decode(errors="replace")
    lines = text.replace("\ufffds", "us").splitlines()  # µs, as spreadsheets store it
    first, columns = _find_heading(lines)
    if columns.lacks:
        raise DamagedInput(
            path, f"expected columns of size, time and ranks; missing: {columns.lacks}"
        )
    cells = csv.reader(lines[first + 1 :], delimiter=columns.separator, skipinitialspace=True)
    try:
        entries = [(first + 1 + cells.line_num, row) for row in cells]
        entries = [(line, row) for line, row in entries if row and row[0].lstrip()[:1] != "#"]
    except csv.Error as error:
        raise DamagedInput(path, f"expected CSV: {error}") from None
    told = entries[:_MOST_ROWS]
    if columns.us_each is None and any(
        _TIMED.fullmatch(cell) for cell in _column(told, columns.places.get("time"))
    ):
        columns.us_each, columns.needs_unit = 1.0, True
    if columns.us_each is None and "time" in columns.places and "algbw" not in columns.places:
        raise UsageError(
            f"{path}: its times have no unit: name the column time_us, time_ms or time_s"
        )
    by_op = {
        at: sum(bool(op_in(cell)) for cell in _column(told, at))
        for at in columns.others.get("op", [])
    }
    if any(by_op.values()):
        columns.places["op"] = max(by_op, key=lambda at: by_op[at])
    else:
        columns.places.pop("op", None)  # such as names of runs: the name of the file may tell it
    if all(cell.isdigit() for cell in _column(told, columns.places.get("system"))):
        columns.places.pop("system", None)  # such as numbers of devices
    return [*_tables(path, columns, entries)]


def _column(entries: Sequence[tuple[int, list[str]]], place: int | None) -> Iterator[str]:
    """Yield the cells of a column that are not empty."""
    for _, cells in entries:
        if place is not None and place < len(cells) and (text := cells[place].strip()):
            yield text


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row of the file, its table, and the cells that may part it from others there."""

    table: tuple[str, int, int, int]  # operation, ranks, nodes, ranks of the fullest node
    row: Row  # with its time and its algbw in the units of the file
    system: str
    apart: tuple[str, ...]  # the cells of `_APART`
    has_unit: bool  # of the size, in its cell


def _entry(
    path: Path, columns: _Columns, number: _Number, line: int, cells: Sequence[str]
) -> _Entry | str | None:
    """Read a row. Return why it is garbled, "" for a missing time, or None for words."""
    told = {
        role: cells[place].strip() if place < len(cells) else ""
        for role, place in columns.places.items()
    }
    named = "" if told.get("op", "").lower() in _MISSING else told["op"]
    op = op_in(named) if named else op_named(path.stem)
    counts = {
        role: number(_OF_RANKS.sub("", told.get(role, "")))
        for role in ("size", "of_node", "nodes", "ranks")
    }
    size_bytes = round(min((counts["size"] or 0) * (columns.bytes_each or 1.0), 2.0 * _MOST_BYTES))
    of_node, nodes, ranks = (int(counts[role] or 0) for role in ("of_node", "nodes", "ranks"))
    ranks = ranks or nodes * of_node
    of_time = "time" if "time" in columns.places else columns.rate
    of_busbw = bus_factor(op, ranks) if op and ranks > 1 else 0.0
    time = _time_of(
        columns, number, told[of_time], size_bytes * (of_busbw if columns.rate == "busbw" else 1)
    )
    has_digits = any(re.search(r"\d", told.get(role, "")) for role in _NUMBERS)
    if counts["size"] == 0 or not has_digits:  # or a line of words, or an empty one
        return None
    if any(cell.strip() for cell in cells[len(columns.heading) :]):  # it may be shifted
        return f"expected {len(columns.heading)} cells, got {len(cells)}"
    if told[of_time].lower() in _MISSING or (time is not None and math.isnan(time)):
        return ""
    if named and not op:
        return f"expected an operation, such as allreduce, got {shown(named)}"
    has_unit = told["size"][-1:].isalpha()
    if has_unit or columns.bytes_each not in (None, 1.0):
        del counts["size"]  # may be a fraction
    for role, count in counts.items():
        if (count or 0) % 1:
            return f"expected a whole number, got {columns.names[role]} {shown(told[role])}"
    of_ranks = ("ranks",) if "ranks" in columns.places else ("nodes", "of_node")
    for roles, value, most in (
        (("size",), size_bytes, _MOST_BYTES),
        (of_ranks, ranks, _MOST_RANKS),
        ((of_time,), time or 0, math.inf),
    ):
        if not 0 < value <= most:
            wanted = "a time with its unit" if columns.needs_unit else "a number above 0"
            if roles == ("busbw",) and (not op or ranks < 2):
                wanted = "2 ranks or more" if op else "an operation"
                wanted += ", without which this bandwidth tells no time"
            got = " and ".join(f"{columns.names[role]} {shown(told[role])}" for role in roles)
            return f"expected {wanted if of_time in roles else 'a number above 0'}, got {got}"
    if nodes > ranks:
        return f"expected a rank on each node, got {ranks:,} on {nodes:,} nodes"
    algbw, busbw = (
        _rate_of(columns, number, role, told.get(role, "")) or 0.0 for role in ("algbw", "busbw")
    )
    row = Row(
        bytes=size_bytes,
        dtype=told.get("dtype", "")[:40],
        time_us=time or 0.0,
        algorithm_gb_s=algbw if of_time == "time" else 0.0,
        bus_gb_s=busbw,
        line=line,
    )
    return _Entry(
        (op, ranks, nodes, of_node or (-(-ranks // nodes) if nodes else 0)),
        row,
        told.get("system", ""),
        tuple(re.sub("[ _-]", "", told.get(role, "").lower()) for role in _APART),
        has_unit,
    )


def _rate_of(columns: _Columns, number: _Number, role: str, cell: str) -> float | None:
    """Return the bandwidth in a cell in the unit of its column, or None; K, M, G are of sizes."""
    unit, text = OF_RATE.search(cell), OF_RATE.sub("", cell).strip()
    rate = None if text[-1:].isalpha() else number(text)
    if rate is None or unit is None:
        return rate
    each, *others = gb_s_each(unit)
    return None if others else rate * each / columns.rates_each.get(role, (1.0,))[0]


def _time_of(columns: _Columns, number: _Number, cell: str, sent_bytes: float) -> float | None:
    """Return the time in a cell in the file's unit, or None; nan if it has too few digits.

    A time may have a unit of its own. Without a column of times, a bandwidth tells them: a busbw
    does by its operation.
    """
    if "time" in columns.places:
        timed = _TIMED.fullmatch(cell)
        if timed is None:
            is_bare = not (columns.needs_unit or cell[-1:].isalpha())  # K and M are of sizes
            return number(cell) if is_bare else None
        value = number(timed[1])
        unit_us = US_OF.get(timed[2].lower(), 1.0)  # µs has two spellings
        return None if value is None else value * unit_us / (columns.us_each or 1.0)
    rate, printed = _rate_of(columns, number, columns.rate, cell), number(OF_RATE.sub("", cell))
    if rate is None or printed is None:
        return None
    decimals = re.search(r"[.,](\d+)\D*$", cell)
    if rate < 1e-9 or 0.5 * 10.0 ** -(len(decimals[1]) if decimals else 0) > _ROUGH * printed:
        return math.nan
    each, *_ = columns.rates_each.get(columns.rate, (1.0,))
    return sent_bytes * 1e-3 / (rate * each)


def _tables(
    path: Path, columns: _Columns, entries: Sequence[tuple[int, list[str]]]
) -> Iterator[Table]:
    """Put rows of one operation and number of ranks together. Garbled rows are left out and told.

    Where as many rows are garbled as not, the others may be misread, too: these are damage.
    """
    read, garbled, lacking = list[_Entry](), dict[int, str](), list[int]()
    number = _numbers(path, columns, entries)
    for line, cells in entries[:_MOST_ROWS]:
        entry = _entry(path, columns, number, line, cells)
        if isinstance(entry, _Entry):
            read.append(entry)
        elif not (other := _heading(columns.separator.join(cells)[:NEAR_BYTES])).lacks:
            if other.heading != columns.heading:
                raise UsageError(f"{path}, line {line:,}: another heading: expected one in a file")
        elif entry:
            garbled[line] = entry
        elif entry is not None:
            lacking.append(line)
    if not read:
        why = "".join(f": {told}" for told in left_out(garbled))
        raise DamagedInput(
            path, f"expected rows with a size, a time and ranks, and there is none{why}"
        )
    place, whole = _APART.index("in_place"), len(read)
    outside = {
        (entry.table, entry.row.bytes) for entry in read if entry.apart[place] in _OUT_OF_PLACE
    }
    read = [
        entry
        for entry in read
        if entry.apart[place] not in _IN_PLACE or (entry.table, entry.row.bytes) not in outside
    ]
    in_place = whole - len(read)
    _refuse_mixed(path, columns, read)
    us_each, gb_s_each = _units_of(path, columns, [entry.row for entry in read])
    found: dict[tuple[str, int, int, int], list[Row]] = {}
    for entry in read:
        if reason := _contradiction(entry.row, us_each, gb_s_each):
            garbled[entry.row.line] = reason
        else:
            found.setdefault(entry.table, []).append(entry.row)
    damage = row_problems(0, 0, (len(entries[_MOST_ROWS:]), _MOST_ROWS), [])
    if len(garbled) >= in_place + sum(map(len, found.values())):
        damage = [*left_out(garbled), *damage]
        garbled = {}
    problems = [*damage, *left_out(garbled)]
    if lacking:
        lack = "row lacks" if len(lacking) == 1 else "rows lack"
        rate = "" if "time" in columns.places else columns.names[columns.rate]
        lack += f" enough digits of {rate}" if rate else " a time"
        problems.append(f"{len(lacking):,} {lack}, from line {lacking[0]:,}")
    if in_place:
        are = "row is" if in_place == 1 else "rows are"
        problems.append(f"{in_place:,} in-place {are} left out beside rows out of place")
    if not found:
        raise DamagedInput(path, f"expected a row that is whole, and there is none: {problems[0]}")
    for (named, ranks, nodes, fullest), rows in found.items():
        widest = max(rows, key=attrgetter("bus_gb_s"))
        op = named or op_told(widest, ranks, "redop" in columns.places, has_root=False)
        by_rates = [f"its operation is not named: by its bandwidths {op}"] if op != named else []
        factor = bus_factor(op, ranks) if op and ranks > 1 else 1.0
        yield Table(
            op=op,
            workers=ranks,
            device=read[0].system,
            rows=tuple(_timed(row, row.time_us * us_each, factor) for row in rows),
            problems=tuple(f"{name_of(path)}: {problem}" for problem in problems + by_rates),
            tool="csv",
            backend="unknown",
            nodes=nodes,
            fullest=fullest,
            is_damaged=bool(damage),
            line=rows[0].line,
        )


def _contradiction(row: Row, us_each: float, gb_s_each: float) -> str:
    """Say whether a row's time cannot be, or is of another bandwidth than the row's own."""
    time_us, rate_gb_s = row.time_us * us_each, row.algorithm_gb_s * gb_s_each
    if not _SHORTEST_US <= time_us <= _LONGEST_US:
        return f"expected a time from 1 ns to an hour, got {time_us:.3g} us"
    share = (row.bytes * 1e-3 / time_us + _LAST_DIGIT) / (rate_gb_s + _LAST_DIGIT)
    if rate_gb_s and not 1 / _FAR <= share <= _FAR:
        return another_rate(row.bytes, time_us, rate_gb_s)
    return ""


def _refuse_mixed(path: Path, columns: _Columns, read: Sequence[_Entry]) -> None:
    """Refuse rows of several systems or tables, and sizes that may be elements."""
    systems = dict.fromkeys(entry.system for entry in read)
    if len(systems) > 1:
        some = ", ".join([*systems][:4])
        raise UsageError(f"{path}: its rows are of several systems ({some}): keep those of one")
    of_nodes = sorted({(nodes, ranks) for _, ranks, nodes, _ in (entry.table for entry in read)})
    most_ranks = {nodes: ranks for nodes, ranks in of_nodes if nodes}
    name, few, many = (
        columns.names.get("ranks", ""),
        min(most_ranks, default=0),
        max(most_ranks, default=0),
    )
    is_open = "of_node" not in columns.places and few < many
    is_open &= "".join(_BETWEEN_WORDS.split(name)).lower() not in _RANKS_OF_ALL
    if is_open and max(most_ranks.values()) == most_ranks[few]:
        on_many = "" if most_ranks[many] == most_ranks[few] else f"{most_ranks[many]:,} "
        raise UsageError(
            f"{path}: {name} is {most_ranks[few]:,} on {few:,} and {on_many}on {many:,} nodes: "
            "name the column gpus_per_node if it counts those of a node, else total_gpus"
        )
    of_sizes: dict[tuple[object, ...], list[tuple[str, ...]]] = {}
    for entry in read:
        of_sizes.setdefault((entry.table, entry.row.bytes), []).append(entry.apart)
    for place, role in enumerate(_APART):
        several = max(({cells[place] for cells in alike} for alike in of_sizes.values()), key=len)
        if len(several) > 1:
            some = ", ".join([*sorted(several)][:4])
            raise UsageError(
                f"{path}: rows of one size differ in their {role} ({some}): keep those of one"
            )
    is_told = columns.bytes_each is not None or "count" in columns.places
    is_told |= all(entry.has_unit for entry in read)
    is_told |= any(entry.row.algorithm_gb_s for entry in read)
    if "dtype" in columns.places and not is_told:
        raise UsageError(
            f"{path}: its sizes beside a dtype may be bytes or elements: expected size_bytes"
        )


def _timed(row: Row, time_us: float, factor: float) -> Row:
    """Return a row with its time, and the bandwidths that follow."""
    rate_gb_s = row.bytes * 1e-3 / time_us
    return replace(row, time_us=time_us, algorithm_gb_s=rate_gb_s, bus_gb_s=factor * rate_gb_s)


def _units_of(path: Path, columns: _Columns, rows: Sequence[Row]) -> tuple[float, float]:
    """Return the units of times and algbw, in us and GB/s. They must agree with the sizes."""
    shares = [  # 1 if times are microseconds, and bandwidths GB/s
        row.bytes * 1e-3 / row.time_us / row.algorithm_gb_s for row in rows if row.algorithm_gb_s
    ]
    if "time" not in columns.places and len(columns.rates_each.get(columns.rate, (1.0,))) > 1:
        raise UsageError(
            f"{path}: {columns.names[columns.rate]} may be of bits or of bytes: expected Gbit/s or "
            "GB/s"
        )
    if "time" not in columns.places:
        return 1.0, 1.0
    if not shares and columns.us_each is not None:
        return columns.us_each, 1.0
    usual = median(shares) if shares else 0.0
    units = sorted({*US_OF.values()}) if columns.us_each is None else [columns.us_each]
    rates_each = columns.rates_each.get("algbw", (1.0,))
    for unit_us, rate in itertools.product(units, rates_each):
        if abs(math.log(usual / unit_us / rate or 1e-300)) < _NEAR:
            return unit_us, rate
    if columns.us_each is None:
        raise UsageError(
            f"{path}: its times have no unit, and no unit fits its algbw: name the column time_us, "
            "time_ms or time_s"
        )
    off = usual / columns.us_each / rates_each[0]
    raise UsageError(
        f"{path}: sizes over times are {off:.3g} times its algbw in the median: expected bytes of "
        "the whole vector, times in the unit that their column names, and algbw in GB/s"
    )


def _numbers(path: Path, columns: _Columns, entries: Sequence[tuple[int, list[str]]]) -> _Number:
    """Return how numbers are read: 64M and 8 KiB are sizes, and commas have one meaning in a file.

    A comma is a decimal point where no thousands can be meant, as in 35,5.
    """
    places = {role: columns.places.get(role) for role in _NUMBERS}
    texts = {role: [*_column(entries, place)] for role, place in places.items()}
    texts["time"] = [_TIMED.sub(r"\1", text) for text in texts["time"]]
    for role in ("algbw", "busbw"):
        texts[role] = [OF_RATE.sub("", text).strip() for text in texts[role]]
    every = [text for role in _NUMBERS for text in texts[role] if _AS_NUMBER.fullmatch(text)]
    decimals = [
        text
        for text in every
        if re.fullmatch(r"\d+,\d+", text) and not _MAYBE_THOUSANDS.fullmatch(text)
    ]
    thousands = [text for text in every if _SURELY_THOUSANDS.fullmatch(text)]
    if _MOSTLY * len(decimals) < sum(map(bool, map(_WITH_POINT.fullmatch, every))):
        decimals = []  # the few are garbled
    in_sizes = [text for text in texts["size"] if "," in text and _AS_NUMBER.fullmatch(text)]
    is_of_bytes = columns.bytes_each in (None, 1.0)
    is_open = not (decimals or thousands) and any("," in text for text in every)
    if is_open and is_of_bytes and len(in_sizes) == sum("," in text for text in every):
        is_open = False  # bytes are whole numbers
    if is_open or (decimals and (thousands or (is_of_bytes and in_sizes))):
        odd = next(text for text in [*decimals, *every] if "," in text)
        raise UsageError(
            f"{path}: a comma, as in {odd!r}, may stand between thousands or before decimals: "
            "expected numbers such as 1234.5"
        )

    def number(text: str) -> float | None:
        text = text.strip()
        if "," in text:
            is_whole = decimals or _MAYBE_THOUSANDS.fullmatch(text)
            text = text.replace(",", "." if decimals else "") if is_whole else "?"
        found = _NUMBER.fullmatch(text)
        if found is None:
            return None
        base = 1000 if found[4] and not found[3] else 1024  # as in size_MB, and as nccl-tests says
        value = float(found[1]) * base ** _POWERS[found[2].lower()]
        return value if math.isfinite(value) else None

    return number


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
