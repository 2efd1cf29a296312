"""The backward-pass logs of Zhang et al. (github netx-repo/training-bottleneck).

    first line is for explaination; ...     an explanation
    1                                       batches: always one, since the waits are averages
    58                                      layers, that is gradients
    483.5,4000                              microseconds waited for this gradient, its bytes
    ...                                     in the order in which gradients become ready

The log lacks the length of a step, so the user gives it (`step_time`). The rest of the step is put
before the backward pass. Beside the log lies a table of vector-addition times, `bytes,seconds` a
line (`reduce_cost`).

A log that was cut within its last number still has the announced lines. Only the missing newline
shows the cut, so the run of a log without a last newline is marked partial.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from fullwire.collectives.cost import AddTimes
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import lines_of, name_of, path_of
from fullwire.importers._format import CERTAIN, Format, Likeness, Options, near_miss
from fullwire.run.facts import Facts
from fullwire.run.gaps import gaps_of
from fullwire.run.run import Gradients, Provenance, Real, Run, Spans, Whole
from fullwire.units import NUMBER, seconds, shown

_NO_HEADER = re.compile(rb"\d{1,9}\n\d{1,9}\n(?:\d[\d.]{0,20},\d{1,15}\n){2}")
HEADER = "first line is for"
_LONGEST_LINE = 1_000  # Characters; a real line has some 30.
_MOST_LINES = 1_100_000  # Blank lines cost time too.
_MOST_GRADIENTS = 1_000_000
_MOST_POINTS = 100_000
_LONGEST_WAIT_US = 3.6e9  # an hour: a larger number is in another unit
_LONGEST_ADD_S = 3.6e3
_LONGEST_STEP_S = 86_400
_LARGEST_GRADIENT = 2**46
_TWO_NUMBERS = re.compile(rf"({NUMBER})[ \t]*,[ \t]*({NUMBER})")


class _Line(NamedTuple):
    """A line of a log; `has_end` is false for the last line of a file that was cut."""

    number: int
    text: str
    has_end: bool


class _Log(NamedTuple):
    """The numbers of a log, and whether the last one is certain."""

    waits_us: Real
    sizes: Whole
    has_end: bool


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is such a log."""
    if beginning.startswith(HEADER.encode()):
        return CERTAIN
    return near_miss(_NO_HEADER.match(beginning), "its first line, which explains it")


def read_netx(path: Path, *, step_time_s: float | None, reduce_cost: Path | None) -> Run:
    """Read a backward-pass log as a run of one worker and one step."""
    log = _read_log(path)
    ready_ns = np.rint(np.cumsum(log.waits_us) * 1e3).astype(np.int64)
    backward_ns = int(ready_ns[-1])
    if step_time_s is None:
        raise UsageError(
            f"{path}: a netx log holds no step time: give it, like --step-time 194.5ms"
        )
    if step_time_s > _LONGEST_STEP_S:
        raise UsageError(f"step time: expected at most a day, got {step_time_s:g} s")
    step_ns = round(step_time_s * 1e9)
    if step_ns < backward_ns:
        raise UsageError(
            f"{path}: the step time of {step_time_s:g} s is shorter than the backward pass, "
            f"which takes {backward_ns / 1e9:g} s"
        )
    cost = None if reduce_cost is None else read_reduce_cost(reduce_cost).points
    name = name_of(path)
    cut = () if log.has_end else (f"{name}: its last line has no end, so it may have been cut",)
    one, each = np.zeros(3, np.int64), np.zeros(len(log.sizes), np.int64)
    return Run(
        provenance=Provenance(origin="imported", source=name),
        facts=Facts(workers=1, reduce_cost=cost),
        gaps=gaps_of(cut),
        spans=Spans(
            rank=one,
            step=one,
            lane=np.array(["host", "compute", "compute"], object),
            name=np.array(["step", "forward", "backward"], object),
            start_ns=np.array([0, 0, step_ns - backward_ns]),
            end_ns=np.array([step_ns, step_ns - backward_ns, step_ns]),
        ),
        gradients=Gradients(
            rank=each,
            step=each,
            order=np.arange(len(log.sizes)),
            bytes=log.sizes,
            ready_ns=step_ns - backward_ns + ready_ns,
        ),
    )


def read_reduce_cost(path: Path) -> AddTimes:
    """Read a table of measured vector additions."""
    points: list[tuple[float, float]] = []
    for line in _lines(path):
        if not line.text:
            continue
        size, time_s = _two_numbers(path, line, "bytes,seconds")
        if points and size <= points[-1][0]:
            raise DamagedInput(
                path, f"expected sizes in ascending order, got {size:g}", line=line.number
            )
        if time_s > _LONGEST_ADD_S:
            raise DamagedInput(
                path, f"an addition of {time_s:g} s is over an hour", line=line.number
            )
        points.append((size, time_s))
        if len(points) > _MOST_POINTS:
            raise DamagedInput(path, f"more than {_MOST_POINTS} sizes", line=line.number)
    if not points:
        raise DamagedInput(path, "expected lines of bytes,seconds and found none")
    return AddTimes(tuple(points))


def _read_log(path: Path) -> _Log:
    lines = _lines(path)
    header = next(lines, None)
    if header is None:
        raise DamagedInput(path, "the file is empty: expected a netx backward log")
    if not header.text.startswith(HEADER):
        raise DamagedInput(path, f"expected a line beginning {HEADER!r}", line=1)
    if _whole(path, next(lines, None), 2, "the number of batches", most=2**31) != 1:
        raise DamagedInput(path, "expected 1 batch: waits are averages over batches", line=2)
    most = _MOST_GRADIENTS
    declared = _whole(path, next(lines, None), 3, "the number of gradients", most=most)
    waits_us, sizes = np.empty(declared), np.empty(declared, np.int64)
    count, has_end = 0, True
    for line in itertools.islice(lines, declared):
        wait_us, size = _two_numbers(path, line, "microseconds,bytes")
        if wait_us > _LONGEST_WAIT_US:
            raise DamagedInput(path, f"a wait of {wait_us:g} us is over an hour", line=line.number)
        if not (size.is_integer() and 0 < size <= _LARGEST_GRADIENT):
            raise DamagedInput(
                path, f"expected whole bytes above 0, got {size:g}", line=line.number
            )
        waits_us[count], sizes[count] = wait_us, size
        count, has_end = count + 1, line.has_end
    if count < declared:
        raise DamagedInput(
            path,
            f"line 3 announces {declared} gradients, the file ends after {count}",
            line=4 + count,
        )
    for line in lines:
        if line.text:
            raise DamagedInput(
                path, f"line 3 announces {declared} gradients, here is one more", line=line.number
            )
    return _Log(waits_us, sizes, has_end)


def _lines(path: Path) -> Iterator[_Line]:
    lines = lines_of(path, most=_MOST_LINES, longest=_LONGEST_LINE)
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("ascii").strip(" \t\r\n")
        except UnicodeDecodeError:
            raise DamagedInput(path, "expected plain text, got other bytes", line=number) from None
        yield _Line(number, text, line.endswith(b"\n"))


def _whole(path: Path, line: _Line | None, number: int, what: str, *, most: int) -> int:
    if line is None:
        raise DamagedInput(path, f"expected {what}, and the file ends", line=number)
    text = line.text
    if not (text.isdigit() and len(text) <= 12 and 1 <= int(text) <= most):
        raise DamagedInput(
            path, f"expected {what}, from 1 to {most}, got {shown(text)}", line=number
        )
    return int(text)


def _two_numbers(path: Path, line: _Line, form: str) -> tuple[float, float]:
    match = _TWO_NUMBERS.fullmatch(line.text)
    if match is None:
        _refuse(path, line, form)
    first, second = float(match[1]), float(match[2])
    if not (math.isfinite(first) and math.isfinite(second)):
        _refuse(path, line, form)
    if first < 0 or second < 0:
        raise DamagedInput(
            path, f"expected nothing negative, got {shown(line.text)}", line=line.number
        )
    return first, second


def _refuse(path: Path, line: _Line, form: str) -> NoReturn:
    raise DamagedInput(
        path, f"expected {form}, two numbers, got {shown(line.text)}", line=line.number
    )


def _read(files: Sequence[Path], options: Options) -> Run:
    given, table = options.step_time, options.reduce_cost
    return read_netx(
        files[0],
        step_time_s=None if given is None else seconds(given, "step time"),
        reduce_cost=None if table is None else path_of(table, "reduce cost"),
    )


FORMAT = Format(
    key="netx",
    label="netx logs",
    looks_like=looks_like,
    read=_read,
    options=("step_time", "reduce_cost"),
)
