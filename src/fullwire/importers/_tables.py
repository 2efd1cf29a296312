"""Tables of sizes, times and bandwidths that benchmarks of collectives print.

`Table` holds the columns that nccl-tests, rccl-tests and the OSU benchmarks have in common. Sizes
are of the whole vector, as `collectives/cost.py` counts them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np

from fullwire.collectives.cost import bus_factor
from fullwire.errors import DamagedInput
from fullwire.files import name_of, plain_line
from fullwire.run.facts import Facts
from fullwire.run.gaps import gaps_of
from fullwire.run.run import Collectives, Provenance, Run

# mpirun and srun put the rank before its output, even within a row; srun pads it with spaces.
# Kubernetes puts the time before a line.
TAG = (
    r"(?:\[\d{1,6}(?:,\d{1,6})?\](?:<std\w{3}>:)?|^ {0,6}\d{1,7}:"
    r"|^\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)?) ?"
)
_TAGS = re.compile(TAG)
# How mpirun and srun are told the ranks, the nodes, and the ranks of a node. `-N` is the number of
# nodes for srun, and that of ranks of a node for mpirun.
_RANKS = re.compile(r"\s--?(?:np|n|ntasks)[ =]?(\d{1,7})(?=\s)")
_NODES = re.compile(r"\s--n?nodes[ =](\d{1,6})(?=\s)")
_OF_A_NODE = re.compile(
    r"\s(?:--?(?:ntasks-per-node|npernode|ppn|perhost)[ =]?|--?map-by[ =]ppr:)(\d{1,6})(?=\s|:node)"
)
_NODES_OR_OF_A_NODE = re.compile(r"\s-N[ =]?(\d{1,6})(?=\s)")
_LAUNCHER = re.compile(
    r"(?<![\w.-])"
    r"(mpirun(?:\.\w+|_rsh)?|mpiexec(?:\.\w+|_mpt)?|orterun|prterun|prun|aprun|jsrun|srun)\s"
)
# Its name, where that is no file of its output.
_BENCHMARK = re.compile(
    r"\b(?:osu_[a-z]\w*|\w*_perf(?:_mpi)?)\b(?!\.(?:log|txt|out|err|csv|dat)\b)"
)
_COMMANDS = re.compile(r"(?:\"[^\"]*\"|'[^']*'|[^;&|])+")  # of a line: a shell may run several
_WORDS = re.compile(r"(?:\"[^\"]*\"|'[^']*'|\S)+")
# Of a launcher's options: those without a value, and those with two.
_FLAGS = (
    *("allow-run-as-root", "oversubscribe", "nooversubscribe", "bycore", "bynode", "byslot"),
    *("bind-to-core", "tag-output", "timestamp-output", "display-map", "display-allocation"),
    *("report-bindings", "use-hwthread-cpus", "exclusive", "overlap", "overcommit", "label"),
    *("unbuffered", "quiet", "verbose", "l", "u", "v", "q", "O", "K", "k", "nolocal"),
    *("merge-stderr-to-stdout", "prepend-rank", "genvall", "envall"),
)
_OF_TWO = ("mca", "gmca", "omca", "pmixmca", "prtemca", "genv", "env")
_MOST_RANKS = 100_000
_WIDTHS_BYTES = {"int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_WIDTHS_BYTES |= {"double": 8, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8}
_WIDTHS_BYTES |= {"f8e4m3": 1, "f8e5m2": 1}
_MOST_PREFIXES = 16
_LONGEST_PREFIX = 200
_LAST_DIGIT = 0.01  # the last printed digit of bandwidths
_OF_AVERAGE = 1e-3  # of an average: by so much rounded rows may differ from it
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
_SHORT_OPS = {"ar": "allreduce", "ag": "allgather", "rs": "reducescatter", "a2a": "alltoall"}
_SHORT_OPS |= {"bcast": "broadcast"}
_OF_ALL = ("allreduce", "allgather", "reducescatter", "alltoall", "gather", "scatter")
_MOST_NAMED = 8  # lines that are left out
# Units behind a bandwidth, and those of times and sizes.
OF_RATE = re.compile(r"([GgMm])(i?)([bB])(its?|ytes?)?(?:ps|/s|/sec)\W*$")
US_OF = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
US_OF |= {"usec": 1.0, "usecs": 1.0, "msec": 1e3, "sec": 1e6, "secs": 1e6, "seconds": 1e6}
US_OF |= {"microseconds": 1.0, "milliseconds": 1e3}
BYTES_OF = {"b": 1.0, "bytes": 1.0, "byte": 1.0}
BYTES_OF |= {f"{name}b": 1000.0**power for name, power in (("k", 1), ("m", 2), ("g", 3))}
BYTES_OF |= {f"{name}ib": 1024.0**power for name, power in (("k", 1), ("m", 2), ("g", 3))}


def without_tags(line: str) -> str:
    """Return a line without the words that launchers put before it and into it."""
    return _TAGS.sub("", plain_line(line))


class Prefixes:
    """Words that a launcher or a collector of logs puts before each line, such as its host.

    They are learned from the headings, which show by a mark, `#`, where the output itself begins.
    """

    def __init__(self) -> None:
        self._known: dict[str, re.Pattern[str]] = {}

    def without(self, line: str, mark: re.Pattern[str]) -> str:
        """Return a line from its mark on, and learn the words before; else cut known words."""
        if "#" in line and (found := mark.search(line)) is not None:
            self._learn(line[: found.start()])
            return line[found.start() :]
        for pattern in self._known.values():
            if (known := pattern.match(line)) is not None:
                return line[known.end() :]
        return line

    def _learn(self, prefix: str) -> None:
        """Remember words before a heading; other lines may have other numbers in them."""
        if prefix.strip() and len(prefix) <= _LONGEST_PREFIX:
            pattern = re.sub(r"\d+", r"\\d+", re.escape(prefix.rstrip()))
            if pattern not in self._known and len(self._known) < _MOST_PREFIXES:
                self._known[pattern] = re.compile(pattern, re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The ranks that a command starts, its hosts, and the ranks of the fullest; 0 if unknown."""

    ranks: int
    nodes: int = 0
    fullest: int = 0


def placement_of(line: str) -> Placement | None:
    """Return how the launcher of a benchmark places its ranks; None if a line has no launcher."""
    commands = [command for command in _COMMANDS.findall(line) if _BENCHMARK.search(command)]
    launchers = [found for command in commands for found in _LAUNCHER.finditer(command)]
    if not launchers:
        return None
    if len(commands) > 1:  # each may be the table's
        return Placement(ranks=0)
    launcher = launchers[-1]
    parts = commands[0][launcher.end() :].split(" : ")  # mpirun may start several programs
    options = [_options(part) for part in parts]
    ranks = sum(_number_of(_RANKS, part) for part in options)
    text = " ".join(options)
    nodes, fullest = _number_of(_NODES, text), _number_of(_OF_A_NODE, text)
    if fullest or launcher[1] == "srun":
        nodes = nodes or _number_of(_NODES_OR_OF_A_NODE, text)
    else:
        fullest = _number_of(_NODES_OR_OF_A_NODE, text)
    ranks = ranks or nodes * fullest
    if not 0 < ranks <= _MOST_RANKS:
        return Placement(ranks=0)
    fullest = min(fullest, ranks)
    if not nodes and fullest:
        nodes = -(-ranks // fullest)
    return Placement(ranks=ranks, nodes=nodes, fullest=fullest)


def _options(text: str) -> str:
    """Return a launcher's own options, which end where the program that it starts begins."""
    own, values = list[str](), 0
    for word in _WORDS.findall(text):
        if word.startswith("-"):
            name = word.lstrip("-")
            has_own = name in _FLAGS or re.search(r"=|\d$", name) is not None
            values = 0 if has_own else 2 if name in _OF_TWO else 1
        elif values and _BENCHMARK.fullmatch(word.rpartition("/")[2]) is None:
            values -= 1
        else:
            break
        own.append(word)
    return f" {' '.join(own)} "


def _number_of(option: re.Pattern[str], text: str) -> int:
    """Return the number that a command gives with an option; 0 if it has none."""
    return int(found[1]) if (found := option.search(text)) is not None else 0


@dataclass(slots=True)
class Launch:
    """The command above a table of nccl-tests, as far as it is surely the table's own."""

    line: int = 0  # of the last line that names a benchmark; 0 if none does
    of_process: int = 1  # ranks of each process: its threads, by the devices of each
    headings: int = 0
    _op: str = ""
    _processes: int = 0  # 0 if unknown

    def take_command(self, text: str, line: int, op: str) -> None:
        """Read a line that names a benchmark; it may start this without a launcher."""
        placed = placement_of(text)
        self._processes = 0 if placed is None else placed.ranks
        self.line, self._op = line, op

    def take_heading(self, of_process: int) -> None:
        """Read the threads and the devices of each process."""
        self.of_process = of_process
        self.headings += 1

    def off_ranks(self, op: str, listed: int) -> list[str]:
        """Say whether it starts more ranks than its table lists, of which the last are then cut.

        Processes that have no MPI print a table each. A table may follow a command of another test.
        """
        started = self._processes * self.of_process
        if not 0 < listed < started or self.headings > 1 or self._op != op:
            return []
        are = "is" if listed == 1 else "are"
        alone = ", as many as one process has: a build without MPI=1 runs each process alone"
        return [
            f"line {self.line:,} starts {started:,} ranks, and {listed:,} {are} listed"
            + (alone if listed == self.of_process else "")
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size: microseconds and GB/s (powers of ten), as printed."""

    bytes: int
    dtype: str
    time_us: float
    algorithm_gb_s: float
    bus_gb_s: float
    in_place_us: float | None = None
    in_place_bus_gb_s: float | None = None
    line: int = 0  # in its file; 0 if the file has no lines of rows


def gb_s_each(unit: re.Match[str]) -> tuple[float, ...]:
    """Return the GB/s of a unit of bandwidths; `gbps` in small letters may be of bits or bytes."""
    giga, mega = (2**30, 2**20) if unit[2] else (10**9, 10**6)
    each = (giga if unit[1] in "Gg" else mega) * 1e-9
    if unit[3] == "B" or unit[4] in ("yte", "ytes"):
        return (each,)
    is_open = unit[0].islower() and "/" not in unit[0]
    return (each / 8, each) if is_open else (each / 8,)


def is_size_and_count(words: list[str]) -> bool:
    """Say whether a line is the beginning of a row that was cut there: its size and its count."""
    if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
        return False
    size, count = (int(word[:19]) for word in words)
    return 0 < count <= size and size % count == 0


def number(text: str) -> float | None:
    """Return a plain number as benchmarks print it, or None."""
    return float(text) if re.fullmatch(r"\d{1,18}(?:\.\d{1,18})?", text, re.ASCII) else None


def off_rate(size: int, printed: Sequence[str], line: int = 0) -> list[str]:
    """Say whether a bandwidth is not the size by the time, to the printed digits of both."""
    values = [number(text) for text in printed]
    if len(values) < 2 or values[0] is None or values[1] is None:
        return []
    time_us, rate_gb_s = values[0], values[1]
    time_digit, rate_digit = (10.0 ** -len(text.partition(".")[2]) for text in printed)
    least = size / (time_us + time_digit) * 1e-3 - rate_digit
    most = size / (time_us - time_digit) * 1e-3 + rate_digit if time_us > time_digit else math.inf
    if least <= rate_gb_s <= most:
        return []
    where = f"line {line:,}: " if line else ""
    return [where + another_rate(size, time_us, rate_gb_s)]


def another_rate(size: int, time_us: float, rate_gb_s: float) -> str:
    """Say which bandwidth a size and a time give instead of the one in their row."""
    actual = f"{size / time_us * 1e-3:,.2f} GB/s" if time_us else "no bandwidth"
    return f"{size:,} bytes in {time_us:,g} us are {actual}, and its algbw is {rate_gb_s:,g}"


def off_count(row: Row, count: int, ranks: int) -> list[str]:
    """Say whether a row's elements are neither its bytes nor the part of one rank of them.

    - `ranks`: of all groups; 0 if unknown.
    """
    width_bytes = _WIDTHS_BYTES.get(row.dtype)
    if width_bytes is None:
        return []
    elements = row.bytes // width_bytes
    # The numbers of parts of which each has so many elements. Ranks may be in groups of as many.
    parts = range(elements // (count + 1) + 1, (elements // count if count else _MOST_RANKS) + 1)
    if not ranks and parts:
        return []
    if any(ranks % each == 0 for each in range(parts.start, min(parts.stop, ranks + 1))):
        return []
    return [
        f"line {row.line:,}: {count:,} elements of {row.dtype} are {count * width_bytes:,} bytes, "
        f"and its size is {row.bytes:,}"
    ]


def off_average(averages_gb_s: Sequence[float], rows: Sequence[Row]) -> list[str]:
    """Say whether the printed average of the bus bandwidths is not that of these rows.

    It is of all places that were timed. So of another average a row is missing, or was changed.
    """
    outside = [row.bus_gb_s for row in rows]
    both = outside + [row.in_place_bus_gb_s for row in rows if row.in_place_bus_gb_s is not None]
    if len(averages_gb_s) != 1:  # without an end, or with the ends of several tests
        return []
    told = averages_gb_s[0]
    if any(abs(mean(of) - told) <= _OF_AVERAGE * told + _LAST_DIGIT for of in (both, outside)):
        return []
    return [
        f"its average bus bandwidth is {told:g} GB/s, and that of its rows {mean(both):g}, so rows "
        "are missing or changed"
    ]


def row_problems(
    wrong: int,
    broken: int,
    beyond: tuple[int, int],
    off: Sequence[str],
    broken_line: int = 0,
) -> list[str]:
    """Say which rows and values of a table cannot be trusted or are missing.

    - `beyond`: how many rows are beyond the most that are read, and this most.
    """
    problems = []
    if wrong:
        were = "value was" if wrong == 1 else "values were"
        problems.append(f"{wrong:,} {were} wrong, by its own validation")
    if broken:
        are = "row is not whole, and is" if broken == 1 else "rows are not whole, and are"
        where = f", from line {broken_line:,}" if broken_line else ""
        problems.append(f"{broken:,} {are} left out{where}")
    if off:
        more = f" (and {len(off) - 1:,} more)" if len(off) > 1 else ""
        problems.append(f"{off[0]}{more}")
    more_rows, most_rows = beyond
    if more_rows:
        are = "row is" if more_rows == 1 else "rows are"
        problems.append(f"{more_rows:,} {are} left out, for it has over {most_rows:,}")
    return problems


def left_out(garbled: Mapping[int, str]) -> list[str]:
    """Say which rows are left out, and why the first is."""
    if not garbled:
        return []
    first, *others = sorted(garbled)
    are = f"{len(garbled):,} rows are" if others else "1 row is"
    named = [f"{line:,}" for line in others[:_MOST_NAMED]]
    named += ["..."] if len(others) > _MOST_NAMED else []
    more = f" (also lines {', '.join(named)})" if others else ""
    return [f"{are} left out: line {first:,}: {garbled[first]}{more}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The whole output of one run of a benchmark."""

    op: str  # "" if unknown: the output and its name both lack it
    workers: int
    device: str
    rows: tuple[Row, ...]
    problems: tuple[str, ...]
    tool: str = "nccl-tests"
    backend: str = "nccl"
    nodes: int = 0  # number of hosts, where the output lists them
    fullest: int = 0  # ranks of the host with the most, where the output lists them
    is_damaged: bool = False  # rows are missing, cut or wrong
    line: int = 0  # of its last listed rank, or the command that tells the ranks; 0 if unknown

    def refuse_damage(self, path: Path) -> None:
        """Refuse a table that is not whole, with the first of its problems."""
        if self.is_damaged:
            problem = self.problems[0].removeprefix(f"{name_of(path)}: ")
            raise DamagedInput(path, f"{problem}: expected a whole table here, so none is used")

    def points(self) -> tuple[tuple[float, float], ...]:
        """Return the bytes that each rank sends and the seconds out of place, ascending."""
        last = self.rows[-1]
        told = last.bus_gb_s / last.algorithm_gb_s if last.algorithm_gb_s else 1.0
        factor = bus_factor(self.op, self.workers) if self.op and self.workers > 1 else told
        slowest: dict[float, float] = {}
        for row in self.rows:
            sent = factor * row.bytes
            slowest[sent] = max(slowest.get(sent, 0.0), row.time_us * 1e-6)
        return tuple(sorted(slowest.items()))


def ranks_told(op: str, row: Row) -> int | None:
    """Return the number of ranks that both bandwidths of a row imply, if their digits suffice."""
    algorithm_gb_s = max(row.algorithm_gb_s, _LAST_DIGIT)
    share = row.bus_gb_s / algorithm_gb_s / (2 if op == "allreduce" else 1)
    if op not in _OF_ALL or not 0 < share < 1:
        return None
    ranks = 1 / (1 - share)
    unsure = ranks**2 * _LAST_DIGIT / algorithm_gb_s
    return round(ranks) if abs(ranks - round(ranks)) + unsure < 0.5 else None


def one_group(path: Path, places: Sequence[tuple[int, str]]) -> tuple[int, list[int], list[str]]:
    """Return the ranks of one group, and those of each of its hosts; say if ranks are split.

    Groups of several sizes are refused: the rows are of all of them at once.
    """
    hosts: dict[int, Counter[str]] = {}
    for group, host in places:
        hosts.setdefault(group, Counter())[host] += 1
    sizes = sorted({(of_group.total(), len(of_group)) for of_group in hosts.values()})
    if len(sizes) > 1:
        told = ", ".join(f"{ranks} on {nodes}" for ranks, nodes in sizes[:8])
        raise DamagedInput(path, f"expected groups of as many ranks and hosts each, got {told}")
    ranks = sizes[0][0] if sizes else 0
    on_hosts = sorted(next(iter(hosts.values())).values()) if hosts else []
    if len(hosts) < 2:
        return ranks, on_hosts, []
    split = f"its {len(places):,} ranks ran as {len(hosts):,} groups of {ranks:,} side by side"
    return ranks, on_hosts, [f"{split} (NCCL_TESTS_SPLIT), and is read as one of them"]


def not_all_listed(listed: int, ranks: int) -> list[str]:
    """Say that a list lacks ranks before its last one."""
    are = "rank is" if listed == 1 else "ranks are"
    return [f"{listed:,} {are} listed, the last is rank {ranks - 1}"] if listed < ranks else []


def not_listed(ranks: int, told: int | None) -> list[str]:
    """Say that a table lists no ranks, and the number that is taken instead."""
    taken = f"by their bandwidths {told}" if told else "taken for one"
    return [] if ranks else [f"its ranks are not listed: {taken}"]


def off_ratio(op: str, rows: Sequence[Row], ranks: int, *, is_exact: bool = False) -> list[str]:
    """Say which row's bus bandwidth is in a wrong ratio to its algorithm bandwidth, if one is.

    The ratio follows from the operation and its ranks. The fastest row shows it best: if that is
    not the ratio of the named operation, the file may have a wrong name. A row may differ from the
    others alone, by a wrong digit.

    - `is_exact`: the rows have two decimals, and are held to the ratio of the fastest by these
      alone. Rows of several tables may differ by little more.
    """
    told = [row for row in rows if min(row.algorithm_gb_s, row.bus_gb_s) > 0]
    if not told:
        return []
    off, expected = max(told, key=lambda row: row.bus_gb_s), ""
    if op and ranks > 1 and not _fits(off, factor := bus_factor(op, ranks)):
        expected = f"and the named operation, {op} among {ranks:,}, has {factor:.3g}"
    else:
        sure = [row for row in told if min(row.algorithm_gb_s, row.bus_gb_s) >= 100 * _LAST_DIGIT]
        if len(sure) > 2 or is_exact:
            usual = median(
                row.bus_gb_s / row.algorithm_gb_s for row in ([off] if is_exact else sure)
            )
            others = [row for row in sure if not _fits(row, usual, 0.0 if is_exact else 0.01)]
            if others:
                off, expected = others[0], f"and {usual:.3g} times in other rows"
    if not expected:
        return []
    where = f"line {off.line:,}: " if off.line else ""
    return [f"{where}busbw is {off.bus_gb_s / off.algorithm_gb_s:.3g} times algbw, {expected}"]


def _fits(row: Row, factor: float, least: float = 0.01) -> bool:
    """Say whether a row's bus bandwidth is so many times its algorithm bandwidth, by its digits."""
    share = row.bus_gb_s / row.algorithm_gb_s
    unsure = max(least, 2 * share * _LAST_DIGIT / min(row.algorithm_gb_s, row.bus_gb_s))
    return abs(factor - share) <= unsure


def op_named(text: str) -> str:
    """Return the operation that a text names, as benchmarks and people spell it, or ""."""
    plain = text.lower().replace("_", "").replace("-", "").replace(" ", "")
    return next((op for word, op in _OPS.items() if word in plain), "")


def op_in(cell: str) -> str:
    """Return the operation that a cell names, or ""."""
    return _SHORT_OPS.get(cell.strip().lower()) or op_named(cell)


def op_told(row: Row, ranks: int, reduces: bool, has_root: bool) -> str:
    """Return the operation that the ratio of a row's bus to algorithm bandwidth implies, or "".

    The result is "" for operations that just move data and lack a root: several have one ratio.
    Of a sum among unknown ranks, the ratio is above 1 if all ranks get it, and else below 1.
    """
    if min(row.bus_gb_s, row.algorithm_gb_s) <= 0 or not (reduces or has_root):
        return ""
    if ranks < 2:
        share = row.bus_gb_s / row.algorithm_gb_s
        is_told = not has_root and row.algorithm_gb_s >= 100 * _LAST_DIGIT
        is_told &= abs(share - 1) > 0.01  # sendrecv prints a sum, too, and two equal bandwidths
        return ("allreduce" if share > 1 else "reducescatter") * is_told
    rooted, rootless = ["reduce" if reduces else "broadcast"], ["allreduce", "reducescatter"]
    fits = [op for op in (rooted if has_root else rootless) if _fits(row, bus_factor(op, ranks))]
    return fits[0] if len(fits) == 1 else ""


def run_of(paths: Sequence[Path], tables: Sequence[Table]) -> Run:
    """Return tables as a run: a collective of all ranks for each size, one after another."""
    devices = dict.fromkeys(table.device for table in tables if table.device)
    facts = Facts(
        workers=max(table.workers for table in tables),
        backend=", ".join(dict.fromkeys(table.backend for table in tables)),
        device=", ".join(devices).encode(errors="backslashreplace").decode() or None,
    )
    begin_ns = 0
    parts = []
    for number, table in enumerate(tables):
        ranks, count = table.workers, len(table.rows)
        length_ns = np.array([round(row.time_us * 1e3) for row in table.rows], np.int64)
        end_ns = begin_ns + np.cumsum(length_ns)
        begin_ns = int(end_ns[-1])
        parts.append(
            Collectives(
                rank=np.repeat(np.arange(ranks), count),
                step=np.full(ranks * count, -1),
                sequence=np.tile(np.arange(count), ranks),
                group=np.full(ranks * count, f"{table.tool} {number}", object),
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
        gaps=gaps_of(dict.fromkeys(problem for table in tables for problem in table.problems)),
        collectives=Collectives.joined(parts),
    )
