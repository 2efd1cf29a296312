"""Read people's own tables of collectives: CSV with a size, a time and the ranks of each row.

    nodes,gpus,collective,size_bytes,time_us,algbw,busbw
    2,16,all_reduce,1048576,104.3,10.05,18.85

Columns are found by their names, in any order and spelling; other columns are left alone. A unit
may stand in the name (`time_us`, `Size (MB)`). Sizes are bytes of the whole vector without one, as
nccl-tests counts them. The unit of a time without one follows from a column `algbw`, which has to
agree with all sizes and times. Rows of one operation and number of ranks are a table. A text that
may mean two things is refused.
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

from fullwire.collectives.cost import bus_factor
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import name_of, opened_plain
from fullwire.importers._format import NEAR_BYTES, POSSIBLE, UNLIKE, Format, Likeness, near_miss
from fullwire.importers._tables import Row, Table, op_named, op_told, row_problems, run_of
from fullwire.units import shown

_MOST_BYTES_OF_FILE = 64 * 2**20
_MOST_ROWS = 10_000
_MOST_RANKS = 100_000
_MOST_BYTES = 2**50
_SHORTEST_US, _LONGEST_US = 1e-3, 3.6e9
_NEAR = 0.1  # of an algbw: rounding, and GiB for GB
_FAR = 2.0  # times a row's own algbw: a wrong digit, and no other average
_LAST_DIGIT = 0.01  # of an algbw as it is mostly printed
_MOST_NAMED = 8  # lines that are left out
_BETWEEN_WORDS = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z][a-z])")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?) ?([kKmMgG]?)(i?)([bB]?)(?:ytes)?", re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3}
_MISSING = ("", "-", "n/a", "na", "nan", "none", "null")
# Commas between thousands: surely, where a comma is no decimal point, and maybe.
_SURELY_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3}){2,}(?:\.\d+)?|\d{1,3}(?:,\d{3})*\.\d+")
_MAYBE_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_CUT_IN_THOUSANDS = re.compile(
    r"(?<![^,])[1-9]\d{0,2},\d{3}(?:\.\d+)?(?![^,])"
)  # rows without quotes
# Texts that may be numbers.
_AS_NUMBER = re.compile(r"\d[\d,.]*(?:[eE][+-]?\d+)? ?[kKmMgG]?i?[bB]?(?:ytes)?", re.ASCII)
_OF_RATE = re.compile(r"([GgMm])i?([bB])(?:ps|/s|ytes/s)\W*$")
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
    "count": ("count", "elements", "nelements", "numelements"),
    "algorithm": ("algorithm", "algo", "alg"),
    "protocol": ("protocol", "proto"),
    "in_place": ("inplace", "isinplace"),
}
_NUMBERS = ("size", "time", "algbw", "busbw", "ranks", "nodes", "of_node")
_APART = ("dtype", "algorithm", "protocol", "in_place")  # by these, rows are of several tables
_ROLES = {name: role for role, names in _NAMES.items() for name in names}


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
    rates_each: tuple[float, ...] = (1.0,)  # GB/s; `gbps` in small letters may be either one

    @property
    def lacks(self) -> str:
        """Return the columns that a table needs and this one lacks; "" if it has them."""
        wanted = [role for role in ("size", "time") if role not in self.places]
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
        if (rate := _OF_RATE.search(name)) is not None:
            name = name[: rate.start()]
        words = [word.lower() for word in _BETWEEN_WORDS.split(name) if word]
        unit = words[-1] if len(words) > 1 and words[-1] in _US | _BYTES else ""
        role = _ROLES.get("".join(words[:-1] if unit else words))
        if role is None or (rate and role not in ("algbw", "busbw")):
            continue
        columns.others.setdefault(role, []).append(place)
        if columns.places.setdefault(role, place) != place:
            continue
        columns.names[role] = heading
        if role == "size":
            by_name = 1.0 if "bytes" in name.lower() else None
            columns.bytes_each = _BYTES.get(unit, by_name)
        elif role == "time":
            columns.us_each = _US.get(unit)
        elif role == "algbw" and rate is not None:
            each = {"g": 1.0, "m": 1e-3}[rate[1].lower()]
            is_open = rate[0].islower() and "/" not in rate[0]
            of_bits = (each / 8,) if rate[2] == "b" else ()
            columns.rates_each = (*of_bits, *((each,) if is_open or not of_bits else ()))
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
    columns = _heading(lines[first][:NEAR_BYTES] if lines else "")
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
        entries = [(line, row) for line, row in entries if row and row[0].lstrip()[:1] != "#"]
    except csv.Error as error:
        raise DamagedInput(path, f"expected CSV: {error}") from None
    told = entries[:_MOST_ROWS]
    by_op = {
        at: sum(bool(op_named(cell)) for cell in _column(told, at))
        for at in columns.others.get("op", [])
    }
    if by_op:
        columns.places["op"] = max(by_op, key=lambda at: by_op[at])
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
    path: Path,
    columns: _Columns,
    number: Callable[[str], float | None],
    line: int,
    cells: Sequence[str],
) -> _Entry | str | None:
    """Read a row. Return the reason if it is garbled, "" if it lacks a time, None if it is none."""
    told = {
        role: cells[place].strip() if place < len(cells) else ""
        for role, place in columns.places.items()
    }
    size, time, ranks, nodes, of_node = (
        number(told.get(role, "")) for role in ("size", "time", "ranks", "nodes", "of_node")
    )
    if size == 0 or (size is None and time is None):  # or a line of words, or an empty one
        return None
    if told["time"].lower() in _MISSING:
        return ""
    ranks, nodes, of_node = (int(value or 0) for value in (ranks, nodes, of_node))
    ranks = ranks or nodes * of_node
    size_bytes = round((size or 0) * (columns.bytes_each or 1.0))
    of_ranks = ("ranks",) if "ranks" in columns.places else ("nodes", "of_node")
    for roles, value, most in (
        (("size",), size_bytes, _MOST_BYTES),
        (("time",), time or 0, math.inf),
        (of_ranks, ranks, _MOST_RANKS),
    ):
        if not 0 < value <= most:
            got = " and ".join(f"{columns.names[role]} {shown(told[role])}" for role in roles)
            return f"expected a number above 0, got {got}"
    if nodes > ranks:
        return f"expected a rank on each node, got {ranks:,} on {nodes:,} nodes"
    beyond = [cell for cell in cells[len(columns.heading) :] if number(cell) is not None]
    if beyond and _CUT_IN_THOUSANDS.search(",".join(cells)):
        return f"expected {len(columns.heading)} cells, with quotes where a number has commas"
    row = Row(
        bytes=size_bytes,
        dtype=told.get("dtype", "")[:40],
        time_us=time or 0.0,
        algorithm_gb_s=number(told.get("algbw", "")) or 0.0,
        bus_gb_s=number(told.get("busbw", "")) or 0.0,
        line=line,
    )
    return _Entry(
        (
            op_named(told.get("op", "")) or op_named(path.stem),
            ranks,
            nodes,
            of_node or (-(-ranks // nodes) if nodes else 0),
        ),
        row,
        told.get("system", ""),
        tuple(told.get(role, "").lower() for role in _APART),
        told["size"][-1:].isalpha(),
    )


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
        elif entry:
            garbled[line] = entry
        elif entry is not None:
            lacking.append(line)
    if not read:
        why = "".join(f": {told}" for told in _left_out(garbled))
        raise DamagedInput(
            path, f"expected rows with a size, a time and ranks, and there is none{why}"
        )
    _refuse_mixed(path, columns, read)
    us_each, gb_s_each = _units_of(path, columns, [entry.row for entry in read])
    found: dict[tuple[str, int, int, int], list[Row]] = {}
    for entry in read:
        if reason := _contradiction(entry.row, us_each, gb_s_each):
            garbled[entry.row.line] = reason
        else:
            found.setdefault(entry.table, []).append(entry.row)
    kept = sum(map(len, found.values()))
    damage = row_problems(0, 0, (len(entries[_MOST_ROWS:]), _MOST_ROWS), [])
    if len(garbled) >= kept:
        damage = [*_left_out(garbled), *damage]
        garbled = {}
    problems = [*damage, *_left_out(garbled)]
    if lacking:
        lack = "row lacks" if len(lacking) == 1 else "rows lack"
        problems.append(f"{len(lacking):,} {lack} a time, from line {lacking[0]:,}")
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


def _left_out(garbled: Mapping[int, str]) -> list[str]:
    """Say which rows are left out, and why the first is."""
    if not garbled:
        return []
    first, *others = sorted(garbled)
    are = f"{len(garbled):,} rows are" if others else "1 row is"
    named = [f"{line:,}" for line in others[:_MOST_NAMED]]
    named += ["..."] if len(others) > _MOST_NAMED else []
    more = f" (also lines {', '.join(named)})" if others else ""
    return [f"{are} left out: line {first:,}: {garbled[first]}{more}"]


def _contradiction(row: Row, us_each: float, gb_s_each: float) -> str:
    """Say whether a row's time cannot be, or is of another bandwidth than the row's own."""
    time_us, rate_gb_s = row.time_us * us_each, row.algorithm_gb_s * gb_s_each
    if not _SHORTEST_US <= time_us <= _LONGEST_US:
        return f"expected a time from 1 ns to an hour, got {time_us:.3g} us"
    actual_gb_s = row.bytes * 1e-3 / time_us
    if (
        rate_gb_s
        and not 1 / _FAR <= (actual_gb_s + _LAST_DIGIT) / (rate_gb_s + _LAST_DIGIT) <= _FAR
    ):
        return (
            f"{row.bytes:,} bytes in {time_us:,.6g} us are {actual_gb_s:,.3g} GB/s, and its algbw "
            f"is {rate_gb_s:,.3g}"
        )
    return ""


def _refuse_mixed(path: Path, columns: _Columns, read: Sequence[_Entry]) -> None:
    """Refuse rows of several systems or tables, and sizes that may be elements."""
    systems = dict.fromkeys(entry.system for entry in read)
    if len(systems) > 1:
        some = ", ".join([*systems][:4])
        raise UsageError(f"{path}: its rows are of several systems ({some}): keep those of one")
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
    if not shares and columns.us_each is not None:
        return columns.us_each, 1.0
    usual = median(shares) if shares else 0.0
    units = sorted({*_US.values()}) if columns.us_each is None else [columns.us_each]
    for unit_us, rate in itertools.product(units, columns.rates_each):
        if abs(math.log(usual / unit_us / rate or 1e-300)) < _NEAR:
            return unit_us, rate
    if columns.us_each is None:
        raise UsageError(
            f"{path}: its times have no unit, and no unit fits its algbw: name the column time_us, "
            "time_ms or time_s"
        )
    off = usual / columns.us_each / columns.rates_each[0]
    raise UsageError(
        f"{path}: sizes over times are {off:.3g} times its algbw in the median: expected bytes of "
        "the whole vector, times in the unit that their column names, and algbw in GB/s"
    )


def _numbers(
    path: Path, columns: _Columns, entries: Sequence[tuple[int, list[str]]]
) -> Callable[[str], float | None]:
    """Return how numbers are read: 64M and 8 KiB are sizes, and commas have one meaning in a file.

    A comma is a decimal point where no thousands can be meant, as in 35,5.
    """
    places = {role: columns.places.get(role) for role in _NUMBERS}
    texts = {role: [*_column(entries, place)] for role, place in places.items()}
    every = [text for role in _NUMBERS for text in texts[role] if _AS_NUMBER.fullmatch(text)]
    decimals = [
        text
        for text in every
        if re.fullmatch(r"\d+,\d+", text) and not _MAYBE_THOUSANDS.fullmatch(text)
    ]
    thousands = [text for text in every if _SURELY_THOUSANDS.fullmatch(text)]
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
