"""Read the tables of nccl-tests and rccl-tests (sizes, times, bandwidths), or their CSV or JSON.

    #       size         count    type   redop     time   algbw   busbw  error     time  ...
    #        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  ...
      8589934592    2147483648   float     sum    63896  134.44  235.26    N/A    63959  ...

Out of place comes first, in place after it. With NCCL_DEBUG=INFO, lines of NCCL break rows apart,
and even begin within them. So a row is all numbers from its size on until the next row's size.
Whole rows are read even if the table lost its heading.

rccl-tests write the same with `-Z csv` or `-Z json`. They write one line out of place and one in
place (src/common.cu there):

    numCycle,collective,ranks,rankspernode,gpusperrank,size,type,redop,inplace,time,algbw,busbw,#wrong
    0,AllReduce,8,1,1,1024,float,sum,0,50.0,0.02048,0.03584,0

nccl-tests writes a JSON of its own with `-J FILE` (src/util.cu there): one object, with the
command (`args`), the devices (`config.devices`) and the rows (`results`), each with `out_of_place`
and `in_place`.

With NCCL_TESTS_SPLIT the ranks are split into groups, which run the test side by side. A table then
has the ranks and hosts of one group.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress
from operator import attrgetter
from pathlib import Path
from statistics import mode
from typing import Any

import msgspec

from fullwire.errors import DamagedInput
from fullwire.files import SNIFFED_BYTES, lines_in, name_of, opened_plain
from fullwire.importers._format import LIKELY, NEAR_BYTES, POSSIBLE, Format, Likeness, near_miss
from fullwire.importers._tables import (
    TAG,
    Launch,
    Prefixes,
    Row,
    Table,
    is_size_and_count,
    not_all_listed,
    not_listed,
    number,
    off_average,
    off_count,
    off_rate,
    off_ratio,
    one_group,
    op_named,
    op_told,
    ranks_told,
    row_problems,
    run_of,
    without_tags,
)
from fullwire.importers.nccl_log import Log, log_facts, read_nccl_logs
from fullwire.run.facts import NO_FACTS
from fullwire.run.gaps import Gap
from fullwire.run.run import Run

_LONGEST_LINE = 64 * 1024
_MOST_LINES = 20_000_000
_MOST_ROWS = 10_000
_MOST_RANKS = 100_000
_MOST_BYTES = 2**50
_LONGEST_US = 3.6e9
_OF_NCCL = re.compile(r"[A-Za-z][\w.-]*:\d+:\d+ \[\d+\] ")
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,6})(?:\s+Group\s+(\d{1,6}))?\s.*?"
    r"\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\](.*)"
)
_PERF = re.compile(r"\b(\w+)_perf(?:_mpi)?\b")  # containers of NVIDIA have all_reduce_perf_mpi
_BEGINS_TABLE = re.compile(r"#\s+(?:nThread:? |Collective test starting)")  # rccl-tests had a colon
_OF_PROCESS = re.compile(r"#\s+nThread:? (\d{1,4}) nGpus:? (\d{1,4})\s")
_AVERAGE = re.compile(r"# Avg bus bandwidth\s+: (\d{1,9}(?:\.\d{1,9})?)\s", re.ASCII)
_STARTING, _CONCLUDED = "# Collective test starting:", "# Collective test concluded:"
_MARK = re.compile(  # the beginning of a line of its own, wherever a launcher's words end
    r"#\s{1,3}(?:nThread:? |Collective test |Using devices|Rank +\d|nccl-tests version "
    r"|Out of bounds |Avg bus )|# {5,8}(?:size +count|\(B\) )"
)
_HEADING = re.compile(rb"#\s+size\s+count(?:\s+\(?elements\)?)?\s+type\s")
# A heading that lost its mark, or a row without its heading, with both places or only the first.
_BARE = re.compile(
    rb"(?m)^(?:" + TAG.encode() + rb"){0,2} {0,40}(?:size +count .{0,40}type .{0,80}algbw"
    rb"|\d{1,16} +\d{1,16} +(?:u?int\d+|float|double|half|bfloat16|f\w+\d\w*) +"
    rb"(?:[a-z]+ +)?(?:-?\d+ +)?"
    rb"\d+(?:\.\d+)? +\d+\.\d\d +\d+\.\d\d +[\dN])"
)
_SEPARATED = re.compile(
    rb"\s{0,40}(?:\[\s{0,40}\{\"numCycle\":|[^\n]{0,200}\bsize,[^\n]{0,200}\btime,\s?algbw,\s?busbw\b)",
    re.IGNORECASE,
)
_REPORT = re.compile(rb'\s{0,40}\{\s{0,40}"version"\s?:\s?\d{1,4},\s{0,40}"start_time"\s?:')
_INFINITE = re.compile(rb":\s?-?inf\b")  # a bandwidth without a time, which is no JSON
_MOST_SEPARATED_BYTES = 64 * 2**20
_WRONG = re.compile(r"# Out of bounds values : (\d{1,18}) FAILED")
_FAILED = re.compile(r"\bTest (?:NCCL |CUDA )?(?:failure|timeout)\b")
# Slurm, OpenMPI, MPICH and a shell write this when they end a test, and the first at other times.
_ENDED = re.compile(
    r"(?:\b|\^C)(?:slurmstepd|srun|mpirun|mpiexec|prterun|orterun): "
    r"(?:error:|Job step aborted|killing job|abort)"
    r"|\bDUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE)\b"
    r"|\b(?:mpirun|prterun) (?:noticed|detected)\b"
    r"|\bBAD TERMINATION OF ONE OF YOUR APPLICATION\b|\bPrimary job +terminated\b"
    r"|(?:^|: line \d+: +\d+ )(?:Killed|Terminated)(?:\s|$)"
)
_DTYPES = {"float": "float32", "half": "float16"}
_OP_COLUMNS = ("collective", "name", "op", "operation", "primitive")
_REDUCTIONS = ("sum", "prod", "min", "max", "avg")


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is the output of nccl-tests."""
    begins = (b"# nThread ", b"# nThread: ", b"# Collective test starting")
    if _HEADING.search(beginning) or any(begin in beginning for begin in begins):
        return LIKELY
    if _SEPARATED.match(beginning) or (_REPORT.match(beginning) and b'"args"' in beginning):
        return LIKELY
    if _BARE.search(beginning, 0, SNIFFED_BYTES):
        return POSSIBLE
    soon = beginning[:NEAR_BYTES]
    return near_miss(b"algbw" in soon and b"busbw" in soon, "whole rows: size, count, type, time")


def read_tables(path: Path, log: Log | None = None) -> list[Table]:
    """Read the tables that one or more of nccl-tests printed into a file.

    `log` takes the lines of NCCL among them.
    """
    tables, reading, prefixes = list[Table](), _Reading(), Prefixes()
    with opened_plain(path) as file:
        beginning = file.read(1024)
        file.seek(0)
        if _SEPARATED.match(beginning) or _REPORT.match(beginning):
            content = file.read(_MOST_SEPARATED_BYTES + 1)
            if len(content) > _MOST_SEPARATED_BYTES:
                raise DamagedInput(path, f"larger than {_MOST_SEPARATED_BYTES:,} bytes unpacked")
            return (
                _reported(path, content) if _REPORT.match(beginning) else _separated(path, content)
            )
        lines = lines_in(file, path, most=_MOST_LINES, longest=_LONGEST_LINE)
        for number, line in enumerate(lines, 1):
            whole = line.decode(errors="replace")
            if log is not None:
                log.take(whole)
            text = prefixes.without(without_tags(_OF_NCCL.split(whole, maxsplit=1)[0]), _MARK)
            if reading.has_rows and (_BEGINS_TABLE.search(text) or reading.restarts(text)):
                if not reading.next_launch.line:  # both may be of processes of one command
                    reading.launch = Launch()
                tables += reading.tables(path)
                reading = _Reading(reading.mentioned, reading.next_launch)
            reading.take(text, number)
    tables += reading.tables(path)
    if not tables:
        raise DamagedInput(path, "expected a table of nccl-tests, and no whole row is in it")
    return tables


class _Reading:
    """One table while its lines are read."""

    def __init__(self, op: str = "", launch: Launch | None = None) -> None:
        self.launch, self.next_launch = launch or Launch(), Launch()  # of a command after the rows
        self.mentioned = ""  # the operation named after the table's end, which is the next table's
        self._op, self._has_end = op, False
        self._broken, self._broken_line = 0, 0  # rows that are not whole, and the line of the first
        self._left_over = list[str]()  # words after the last row
        self._anew_line = 0  # of a row after such words, without a larger size than before them
        self._beyond = 0  # rows beyond the most
        self._off = list[str]()  # values of rows that contradict each other, in words
        self._averages_gb_s = list[float]()  # as printed: one, or one of each test in the file
        self._has_marks = False  # has lines that begin with #; the last such line is the average
        self._failed_line = 0  # of a message that the test failed
        self._ended_line = 0  # of one that it was ended, until a row or the average comes
        self._wrong = 0  # wrong values that the test's validation found
        self._tells_wrong, self._wrong_in_rows = False, 0.0  # some versions count them in each row
        self._widths = list[int]()  # words of each row
        self._columns, self._row, self._rows = list[str](), list[str](), list[Row]()
        self._line, self._rank_line = 0, 0  # of the row, and of the last listed rank
        self._devices: dict[int, str] = {}  # by rank
        self._groups: dict[int, tuple[int, str]] = {}  # each rank's group and host
        self._reduces, self._has_root = False, False

    @property
    def _ranks(self) -> int:
        """Return the number of ranks by the last one in the list; 0 without a list."""
        return max(self._groups, default=-1) + 1

    @property
    def has_rows(self) -> bool:
        """Say whether any row has begun."""
        return bool(self._row or self._rows)

    def restarts(self, text: str) -> bool:
        """Say whether sizes begin anew after other words: `grep` left rows of several tables."""
        size = text[:40].split(maxsplit=1)[0] if text.strip() and self._left_over else ""
        is_bare = bool(self._row) and not self._has_marks
        return is_bare and size.isdecimal() and int(size) <= int(self._row[0])

    def take(self, text: str, line: int) -> None:
        """Read a line, from which other programs' words are removed already."""
        if (perf := _PERF.search(text)) is not None and (op := op_named(perf[1])):
            # A command before a heading is this table's: the test of one before it has failed.
            is_open = not (self.launch.headings or self.has_rows)
            self._op = op if _STARTING in text or is_open else self._op or op
            if self._has_end and _CONCLUDED not in text:
                self.mentioned = op
            if _STARTING not in text and _CONCLUDED not in text:
                launch = self.next_launch if self._has_end or self.has_rows else self.launch
                launch.take_command(text, line, op)
        if (of_process := _OF_PROCESS.match(text)) is not None:
            self.launch.take_heading(int(of_process[1]) * int(of_process[2]))
        if text.startswith("#") or _columns(text):
            self._columns = _columns(text) or self._columns
            self._has_marks, self._left_over = self._has_marks or text.startswith("#"), [text]
            self._tells_wrong |= "#wrong" in text
            rank = _RANK.match(text)
            if rank is not None and int(rank[1]) < _MOST_RANKS:
                self._devices[int(rank[1])] = rank[4].strip()
                self._rank_line = line
                self._groups[int(rank[1])] = int(rank[2] or 0), rank[3]
            if (average := _AVERAGE.match(text)) is not None:
                self._averages_gb_s.append(float(average[1]))
            if "Avg bus bandwidth" in text:
                self._has_end, self._ended_line = True, 0
                self._failed_line *= self._failed_line < self._line  # else no size is missing
            if (wrong := _WRONG.match(text)) is not None:
                self._wrong = int(wrong[1])
            return
        is_running = self.has_rows and not self._has_end
        message = (_FAILED.search(text) or _ENDED.search(text)) if is_running else None
        words = text[: message.start() if message else None].split()
        begins_row = (
            len(words) >= 3
            and all(word.isascii() and word.isdigit() and len(word) <= 16 for word in words[:2])
            and words[2][:1].isalpha()
        )
        if begins_row and not self._columns:
            self._columns = _columns_of(words)
        if begins_row and self._left_over and self._row and int(words[0]) <= int(self._row[0]):
            self._anew_line = self._anew_line or line
        self._left_over = [] if begins_row else words or self._left_over
        if message and not (begins_row and len(words) >= max([len(self._row), *self._widths])):
            pass  # a row before it was about to be measured
        elif self._columns and begins_row:
            self._reduces |= words[3:4] != [] and words[3] in _REDUCTIONS
            if "root" in self._columns:
                root = words[3 + _has_redop(words, self._columns) :][:1]
                self._has_root |= root != [] and root[0].isdigit()
            self._ended_line = 0
            self._end_row()
            self._row, self._line = words, line
        elif (
            self._row
            and len(self._row) < len(self._columns) + 8
            and all(word == "N/A" or number(word) is not None for word in words)
        ):
            self._row, self._ended_line, self._left_over = self._row + words, 0, []
        elif self._columns and (self._is_like_a_row(words) or is_size_and_count(words)):
            self._broken, self._broken_line = self._broken + 1, self._broken_line or line
        # Messages repeat. Another row tells that the test was started again.
        if message and message.re is _ENDED:
            self._ended_line = self._ended_line or line
        elif message and self._line > self._failed_line:
            self._failed_line = line

    def _is_like_a_row(self, words: list[str]) -> bool:
        """Say whether a line that is no row was one: most of as many words are numbers."""
        length = len(self._row) or len(self._columns) + 8  # as long as the row before
        numbers = sum(number(word) is not None for word in words)
        is_as_long = length - 1 <= len(words) <= length + 1  # a space may join or part two
        return is_as_long and len(words) < 2 * numbers < 2 * len(words)

    def _end_row(self) -> None:
        """Keep the row that was read if it is whole."""
        was_cut = len(self._row) < max(self._widths, default=0)
        if not self._row or (was_cut and max(self._failed_line, self._ended_line) > self._line):
            return  # or it was about to be measured
        row = _row_of(self._row, self._columns, self._line)
        if row is None:
            self._broken, self._broken_line = self._broken + 1, self._broken_line or self._line
        elif len(self._rows) < _MOST_ROWS:
            self._rows.append(row)
            self._widths.append(len(self._row))
            first = 3 + _has_redop(self._row, self._columns) + ("root" in self._columns)
            for place in (first, first + 4):  # out of place, and in place
                self._off += off_rate(row.bytes, self._row[place : place + 2], row.line)
            self._off += off_count(row, int(self._row[1]), self._ranks)
            if self._tells_wrong:
                counted = map(number, self._row[first + 3 : first + 8 : 4])
                self._wrong_in_rows += sum(filter(None, counted))
        else:
            self._beyond += 1

    def _leave_out_cut_rows(self) -> None:
        """Leave out rows with fewer words than most rows have: their ends were cut."""
        usual = mode(self._widths) if self._widths else 0
        is_whole = [width >= usual for width in self._widths]
        cut = [row for row, whole in zip(self._rows, is_whole, strict=True) if not whole]
        if cut:
            self._rows = [*compress(self._rows, is_whole)]
            self._broken += len(cut)
            self._broken_line = min(cut[0].line, self._broken_line or cut[0].line)

    def tables(self, path: Path) -> Iterator[Table]:
        """Yield the table, if it has a whole row."""
        self._end_row()
        self._leave_out_cut_rows()
        is_open = self._has_marks and not self._has_end
        if is_open and " ".join(self._left_over).replace(" ", "").isdigit():
            self._broken += 1  # a row that was cut within its size or count
        if self._rows:
            widest = max(self._rows, key=attrgetter("bus_gb_s"))
            named = self._op or op_named(path.stem)
            listed, hosts, split = one_group(path, [*self._groups.values()])
            short = not_all_listed(len(self._groups), self._ranks)
            if short and not split:  # people shorten the list: its last rank tells how many
                listed = self._ranks
            op = named or op_told(widest, listed, self._reduces, self._has_root)
            told = ranks_told(op, widest)
            wrong, beyond = max(self._wrong, int(self._wrong_in_rows)), (self._beyond, _MOST_ROWS)
            problems = row_problems(wrong, self._broken, beyond, self._off, self._broken_line)
            ratio = off_ratio(op, self._rows, listed, is_exact=not listed)
            is_cut = split or ratio or told != listed  # and was not just shortened
            problems += short if short and is_cut else ratio
            failed = max(self._ended_line, self._failed_line)
            is_open &= not (is_last := failed >= self._line)  # and no row was measured after it
            if is_open and self._anew_line:
                problems.append(f"line {self._anew_line:,}: sizes begin anew after other words")
            problems += self.launch.off_ranks(op, self._ranks)
            is_damaged = bool(problems)
            # The rows that are left are good: their reader may have taken others away.
            problems = problems or off_average(self._averages_gb_s, self._rows)
            if not is_damaged and short:
                problems.append(f"{short[0]}: by its bandwidths {listed:,}")
            problems += ["it ends before its average, so sizes may be missing"] * is_open
            if failed:
                after = ": later sizes are missing" if is_last else ""
                problems.append(f"its test failed or was ended in line {failed:,}{after}")
            if op != named:
                problems.append(f"its operation is not named: by its bandwidths {op}")
            problems += split + not_listed(listed, told)
            yield Table(
                op=op,
                workers=listed or told or 1,
                device=", ".join(sorted(set(filter(None, self._devices.values())))[:8]),
                rows=tuple(self._rows),
                problems=tuple(f"{name_of(path)}: {problem}" for problem in problems),
                nodes=0 if short else len(hosts),
                fullest=max(hosts, default=0),
                is_damaged=is_damaged,
                line=self._rank_line or self._rows[0].line,
            )


def read_nccl_tests(paths: Sequence[Path]) -> Run:
    """Read the output of nccl-tests as a run: a collective for each size, one after another.

    If a test hung before its first row, the run holds NCCL's messages from the set-up.
    """
    log = Log()
    try:
        tables = [table for path in paths for table in read_tables(path, log)]
    except DamagedInput as error:
        if log_facts(paths)[0] == NO_FACTS:
            raise
        run = read_nccl_logs(paths)
        return replace(run, gaps=(*run.gaps, Gap(str(error))))
    return log.added_to(run_of(paths, tables))


def _columns(line: str) -> list[str]:
    """Return the columns before the first time if the line is the table's heading."""
    words = line.lstrip("#").split()
    is_heading = words[:3] == ["size", "count", "type"] and "time" in words
    return words[: words.index("time")] if is_heading else []


def _columns_of(words: list[str]) -> list[str]:
    """Return the columns before the first time, by a whole row; a root makes its words odd."""
    columns = ["size", "count", "type"]
    if words[3:4] != [] and words[3][:1].isalpha():
        columns.append("redop")
    numbers = words[len(columns) :]
    is_whole = len(numbers) in (4, 5, 8, 9) and all(
        word in ("N/A", "-1") or number(word) is not None for word in numbers
    )
    return [*columns, "root"][: len(columns) + len(numbers) % 2] if is_whole else []


def _separated(path: Path, content: bytes) -> list[Table]:
    """Read the CSV or the JSON of rccl-tests: one table for each operation and number of ranks."""
    text = content.decode(errors="replace")
    try:
        if text.lstrip()[:1] == "[":
            results: Any = msgspec.json.decode(content, type=list[dict[str, str | int | float]])
            given = [(0, result) for result in results]
        else:
            reader = csv.DictReader(text.splitlines(), restkey="", restval="")
            given = [(reader.line_num, result) for result in reader]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, csv.Error) as error:
        raise DamagedInput(path, f"expected the results of rccl-tests: {error}") from None
    tables: dict[tuple[str, int], dict[tuple[str, str, str, str], Row]] = {}
    broken, wrong, off = 0, 0.0, list[str]()
    for line, entry in given[:_MOST_ROWS]:
        told = {key.lower().strip(): str(value).strip(' "') for key, value in entry.items()}
        named = next((told[key] for key in _OP_COLUMNS if key in told), path.stem)
        op = op_named(named)
        counts = [number(told[name]) for name in ("ranks", "gpusperrank", "gpus") if name in told]
        time_us, algorithm, bus, size = (
            number(told.get(name, "")) for name in ("time", "algbw", "busbw", "size")
        )
        ranks = math.prod(count or 0 for count in counts)
        is_usable = None not in (time_us, algorithm, bus, size) and 0 < ranks <= _MOST_RANKS
        if not is_usable or not 0 < (time_us or 0) <= _LONGEST_US or (size or 0) > _MOST_BYTES:
            broken += 1
            continue
        wrong += number(told.get("#wrong", told.get("wrong", ""))) or 0
        off += off_rate(int(size or 0), [told["time"], told["algbw"]], line)
        dtype = told.get("type", "")[:40]
        rows = tables.setdefault((op, int(ranks) if counts else 0), {})
        key = (told.get("numcycle", ""), told.get("size", ""), dtype, told.get("redop", ""))
        if told.get("inplace") == "1" and key in rows:
            rows[key] = replace(rows[key], in_place_us=time_us, in_place_bus_gb_s=bus)
        elif told.get("inplace", "0") == "0":
            rows[key] = Row(
                bytes=int(size or 0),
                dtype=_DTYPES.get(dtype, dtype),
                time_us=time_us or 0.0,
                algorithm_gb_s=algorithm or 0.0,
                bus_gb_s=bus or 0.0,
                line=line,
            )
    problems = row_problems(int(wrong), broken, (len(given[_MOST_ROWS:]), _MOST_ROWS), off)
    for (op, ranks), rows in tables.items():
        problems += off_ratio(op, [*rows.values()], ranks)
    found = [
        Table(
            op=op,
            workers=ranks or told or 1,
            device="",
            rows=(*rows.values(),),
            problems=tuple(
                f"{name_of(path)}: {problem}" for problem in problems + not_listed(ranks, told)
            ),
            is_damaged=bool(problems),
        )
        for (op, ranks), rows in tables.items()
        if rows
        for told in [ranks_told(op, max(rows.values(), key=attrgetter("bus_gb_s")))]
    ]
    if not found:
        raise DamagedInput(path, "expected the results of rccl-tests, and no whole row is in it")
    return found


class _Device(msgspec.Struct, gc=False):
    group: int = 0
    hostname: str | None = ""
    device_info: str | None = ""


class _Config(msgspec.Struct, gc=False):
    devices: list[_Device] = []


class _Place(msgspec.Struct, gc=False):
    time: float | None = None
    cpu_time: float | None = None
    alg_bw: float | str | None = None
    bus_bw: float | str | None = None
    nwrong: float | str | None = None


class _Result(msgspec.Struct, gc=False):
    size: int
    type: str
    out_of_place: _Place | None = None
    in_place: _Place | None = None


class _Report(msgspec.Struct, gc=False):
    args: list[str | None] = []
    config: _Config = msgspec.field(default_factory=_Config)
    results: list[_Result] = []
    end_time: str = ""


def _reported(path: Path, content: bytes) -> list[Table]:
    """Read the JSON that nccl-tests writes with -J: one table."""
    try:
        report = msgspec.json.decode(_INFINITE.sub(b":null", content), type=_Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedInput(path, f"expected the JSON of nccl-tests: {error}") from None
    rows, broken, wrong, off = list[Row](), 0, 0.0, list[str]()
    for result in report.results[:_MOST_ROWS]:
        outside, inside = result.out_of_place or _Place(), result.in_place or _Place()
        time_us = outside.time or outside.cpu_time or 0.0
        rates = [
            rate if isinstance(rate, float) and 0 <= rate < math.inf else None
            for rate in (outside.alg_bw, outside.bus_bw, inside.bus_bw)
        ]
        is_usable = 0 < time_us <= _LONGEST_US and 0 <= result.size <= _MOST_BYTES
        if not is_usable or rates[0] is None or rates[1] is None:
            broken += 1
            continue
        wrong += sum(
            place.nwrong
            for place in (outside, inside)
            if isinstance(place.nwrong, float) and 0 < place.nwrong < math.inf
        )
        rows.append(
            Row(
                bytes=result.size,
                dtype=_DTYPES.get(result.type[:40], result.type[:40]),
                time_us=time_us,
                algorithm_gb_s=rates[0],
                bus_gb_s=rates[1],
                in_place_us=inside.time or inside.cpu_time,
                in_place_bus_gb_s=rates[2],
            )
        )
        off += off_rate(result.size, [str(time_us), str(rates[0])])
        off += off_rate(result.size, [str(rows[-1].in_place_us), str(inside.alg_bw)])
    if not rows:
        raise DamagedInput(path, "expected the JSON of nccl-tests, and no whole row is in it")
    op = op_named(Path((report.args or [""])[0] or path.stem).name)
    devices, widest = report.config.devices, max(rows, key=lambda row: row.bus_gb_s)
    beyond = len(report.results[_MOST_ROWS:])
    problems = row_problems(int(wrong), broken, (beyond, _MOST_ROWS), off)
    listed, hosts, split = one_group(path, [(each.group, each.hostname or "") for each in devices])
    problems += off_ratio(op, rows, listed)
    is_damaged = bool(problems)
    problems += split
    if not report.end_time:
        problems.append("it ends before its average, so sizes may be missing")
    if not listed:
        problems.append("its ranks are not listed")
    return [
        Table(
            op=op,
            workers=listed or ranks_told(op, widest) or 1,
            device=", ".join(sorted({device.device_info or "" for device in devices} - {""})[:8]),
            rows=tuple(rows),
            problems=tuple(f"{name_of(path)}: {problem}" for problem in problems),
            nodes=len(hosts),
            fullest=max(hosts, default=0),
            is_damaged=is_damaged,
        )
    ]


def _has_redop(words: list[str], columns: list[str]) -> bool:
    """Say whether a row names its reduction; some versions leave it empty if there is none."""
    return "redop" in columns and words[3:4] != [] and words[3][:1].isalpha()


def _row_of(words: list[str], columns: list[str], line: int) -> Row | None:
    """Return the row of these words, or None if it is not whole."""
    size, dtype = int(words[0]), words[2][:40]
    first = 3 + _has_redop(words, columns) + ("root" in columns)
    numbers = [number(word) for word in words[first : first + 7]]
    if len(numbers) < 3 or None in numbers[:3] or size > _MOST_BYTES:
        return None
    in_place = zip(numbers[4:], words[first + 4 : first + 7], strict=True)
    if any(number is None and word not in ("N/A", "inf") for number, word in in_place):
        return None
    time_us, algorithm, bus = (number or 0.0 for number in numbers[:3])
    if not 0 < time_us <= _LONGEST_US or not math.isfinite(algorithm + bus):
        return None
    return Row(
        bytes=size,
        dtype=_DTYPES.get(dtype, dtype),
        time_us=time_us,
        algorithm_gb_s=algorithm,
        bus_gb_s=bus,
        in_place_us=numbers[4] if len(numbers) > 6 else None,
        in_place_bus_gb_s=numbers[6] if len(numbers) > 6 else None,
        line=line,
    )


FORMAT = Format(
    key="nccl-tests",
    label="tables of nccl-tests",
    looks_like=looks_like,
    read=lambda files, options: read_nccl_tests(files),
    is_of_many=True,
    tells=20,
    tables=read_tables,
)
