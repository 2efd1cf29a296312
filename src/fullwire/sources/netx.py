"""The backward-pass logs of Zhang et al. (github netx-repo/training-bottleneck).

    first line is for explaination; ...     an explanation
    1                                       batches: always one, since the waits are averages
    58                                      layers, that is gradients
    483.5,4000                              microseconds waited for this gradient, its bytes
    ...                                     in the order in which gradients become ready

The log does not say how long a step takes, so whoever reads it must (`step_time`); what is not
backward is put before it. Beside it lies a table of vector-addition times, `bytes,seconds` a line
(`reduce_cost`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from fullwire.errors import DamagedInput, UsageError
from fullwire.model.cost import AddTimes
from fullwire.model.facts import FactValue
from fullwire.model.run import Gradients, Provenance, Run, Spans

HEADER = "first line is for"
_LONGEST_LINE = 1_000  # characters; a real line has some 30
_MOST_GRADIENTS = 1_000_000
_MOST_POINTS = 100_000
_LONGEST_WAIT_US = 3.6e9  # an hour: what is above is not a wait but another unit
_LARGEST_GRADIENT = 2**46


def looks_like(beginning: bytes) -> bool:
    """Say whether a file with this beginning is such a log."""
    return beginning.startswith(HEADER.encode())


def read_netx(path: Path, *, step_time_s: float | None, reduce_cost: Path | None) -> Run:
    """Read a backward-pass log as a run of one worker and one step."""
    waits_us, sizes = _read_gradients(path)
    if step_time_s is None:
        raise UsageError(
            f"{path}: a netx log holds no step time: give it, like --step-time 194.5ms"
        )
    ready_ns = np.rint(np.cumsum(waits_us) * 1e3).astype(np.int64)
    step_ns, backward_ns = round(step_time_s * 1e9), int(ready_ns[-1])
    if step_ns < backward_ns:
        raise UsageError(
            f"{path}: the step time of {step_time_s:g} s is shorter than the backward pass, "
            f"which takes {backward_ns / 1e9:g} s"
        )
    facts: dict[str, FactValue] = {"workers": 1}
    if reduce_cost is not None:
        facts["reduce_cost"] = read_reduce_cost(reduce_cost).points
    return Run(
        provenance=Provenance(origin="imported", source=str(path)),
        facts=facts,
        spans=_spans(step_ns, backward_ns),
        gradients=_gradients(step_ns - backward_ns + ready_ns, sizes),
    )


def read_reduce_cost(path: Path) -> AddTimes:
    """Read a table of measured vector additions."""
    points: list[tuple[float, float]] = []
    for number, line in _lines(path):
        if not line:
            continue
        size, time = _two_numbers(path, number, line, "bytes,seconds")
        if points and size <= points[-1][0]:
            raise DamagedInput(
                path, f"expected sizes in ascending order, got {size:g}", line=number
            )
        points.append((size, time))
        if len(points) > _MOST_POINTS:
            raise DamagedInput(path, f"more than {_MOST_POINTS} sizes", line=number)
    if not points:
        raise DamagedInput(path, "expected lines of bytes,seconds and found none")
    return AddTimes(tuple(points))


def _read_gradients(path: Path) -> tuple[list[float], list[int]]:
    lines = _lines(path)
    header = next(lines, None)
    if header is None:
        raise DamagedInput(path, "the file is empty: expected a netx backward log")
    if not header[1].startswith(HEADER):
        raise DamagedInput(path, f"expected a line beginning {HEADER!r}", line=1)
    if _whole(path, lines, "the number of batches", most=2**31) != 1:
        raise DamagedInput(path, "expected 1 batch: waits are averages over batches", line=2)
    declared = _whole(path, lines, "the number of gradients", most=_MOST_GRADIENTS)
    waits_us, sizes = [], []
    for number, line in itertools.islice(lines, declared):
        wait_us, size = _two_numbers(path, number, line, "microseconds,bytes")
        if wait_us > _LONGEST_WAIT_US:
            raise DamagedInput(path, f"a wait of {wait_us:g} us is over an hour", line=number)
        if not (size.is_integer() and 0 < size <= _LARGEST_GRADIENT):
            raise DamagedInput(path, f"expected whole bytes above 0, got {size:g}", line=number)
        waits_us.append(wait_us)
        sizes.append(int(size))
    if len(sizes) != declared:
        raise DamagedInput(
            path, f"line 3 announces {declared} gradients, the file has {len(sizes)}"
        )
    for number, line in lines:
        if line:
            raise DamagedInput(path, f"line 3 announces {declared} gradients, here is one more",
                               line=number)  # fmt: skip
    return waits_us, sizes


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read line by line in bounded memory: a line without end is refused, not collected."""
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(_LONGEST_LINE + 1)
                if not line:
                    return
                if len(line) > _LONGEST_LINE:
                    raise DamagedInput(path, f"longer than {_LONGEST_LINE} bytes", line=number)
                yield number, _text(path, number, line)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _text(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("ascii").strip()
    except UnicodeDecodeError:
        raise DamagedInput(path, "expected plain text, got other bytes", line=number) from None


def _whole(path: Path, lines: Iterator[tuple[int, str]], what: str, *, most: int) -> int:
    number, line = next(lines, (None, ""))
    if number is None:
        raise DamagedInput(path, f"the file ends before {what}")
    if not (line.isdigit() and len(line) <= 12 and 1 <= int(line) <= most):
        raise DamagedInput(
            path, f"expected {what}, from 1 to {most}, got {_short(line)}", line=number
        )
    return int(line)


def _two_numbers(path: Path, number: int, line: str, form: str) -> tuple[float, float]:
    fields = line.split(",")
    if len(fields) != 2:
        _refuse(path, number, line, form)
    try:
        first, second = float(fields[0]), float(fields[1])
    except ValueError:
        _refuse(path, number, line, form)
    if not (np.isfinite(first) and np.isfinite(second)):
        _refuse(path, number, line, form)
    if first < 0 or second < 0:
        raise DamagedInput(path, f"expected nothing negative, got {_short(line)}", line=number)
    return first, second


def _refuse(path: Path, number: int, line: str, form: str) -> NoReturn:
    raise DamagedInput(path, f"expected {form}, two numbers, got {_short(line)}", line=number)


def _short(line: str) -> str:
    return repr(line if len(line) <= 40 else line[:37] + "...")


def _spans(step_ns: int, backward_ns: int) -> Spans:
    none = np.zeros(3, np.int64)
    return Spans(
        rank=none, step=none,
        lane=np.array(["host", "compute", "compute"], object),
        name=np.array(["step", "forward", "backward"], object),
        start_ns=np.array([0, 0, step_ns - backward_ns]),
        end_ns=np.array([step_ns, step_ns - backward_ns, step_ns]),
    )  # fmt: skip


def _gradients(ready_ns: np.ndarray, sizes: list[int]) -> Gradients:
    none = np.zeros(len(sizes), np.int64)
    return Gradients(
        rank=none, step=none, order=np.arange(len(sizes)), bytes=np.array(sizes), ready_ns=ready_ns
    )
