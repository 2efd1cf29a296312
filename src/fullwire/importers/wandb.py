"""Read the file of an offline run of wandb (`run-ID.wandb`): its history, as metrics.

    https://github.com/wandb/wandb    (wandb/sdk/internal/datastore.py, proto/wandb_internal.proto)

After a head of 7 bytes, the file is a log of LevelDB: blocks of 32 KiB hold pieces of records, each
behind its checksum (CRC-32), length and kind. A record is a message. One row of the history has a
number for each metric, and `_step` and `_timestamp`. wandb's `_step` counts the calls of `log`. A
column with the training's own steps counts before it, for each metric the first of:

- a column such as `my_step` that rises, if the script named it for this metric, as in
  `define_metric("loss", step_metric="my_step")` or `define_metric("train/*", ...)`;
- `global_step`, also `trainer/global_step` of Lightning and `train/global_step` of Hugging Face;
- `step`, `iter` and `iteration`, also `train/step`, if most of their values rise and none falls.
  One that falls is the place in an epoch. They do not count where the script gives `_step` itself.

A row without the column has its last value.

All else, such as the configuration and the host's own counters, is passed over.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from fullwire.importers._encodings import BrokenMessageError, fields
from fullwire.importers._format import (
    CERTAIN,
    Format,
    Likeness,
    MetricRow,
    near_miss,
    read_metrics,
)
from fullwire.run.run import Run
from fullwire.units import NO_NUMBER

_MARK = b":W&B\xe1\xbe"
_HEAD_BYTES = 7  # the mark, and the version of the log
_BLOCK_BYTES = 32 * 1024
_PIECE = struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _FIRST, _LAST = 1, 2, 4
_MOST_RECORD_BYTES = 64 * 2**20
_MOST_ROWS = 10_000_000
_MOST_COLUMNS = 4096  # of a row
_NO_JSON = re.compile(NO_NUMBER.encode())
_LATEST_S = 9e9  # the year 2255: later nanoseconds are no int64
# Parts of a nested name have points between. A step metric may count epochs or tokens instead.
_GLOBAL_STEP = re.compile(r"(?:.*[./])?global_step")
_STEPS = re.compile(
    r"(?:(?:train(?:er)?|batch|val|eval)[./])?(?:steps?|iter(?:ation)?s?)", re.IGNORECASE
)
_OF_STEPS = re.compile(r"(?:.*[./_ -])?(?:steps?|iter(?:ation)?s?)", re.IGNORECASE)
_OF_OTHERS = ("", "train", "trainer", "batch")  # their steps count for any metric, in this order
_MOST_COUNTERS = 32
_MOST_SERIES = 200_000  # of columns beside metrics
# Numbers of fields: of a record, of its history, of an item, of the item's step, of a definition.
_HISTORY, _METRIC, _ITEM, _STEP = 2, 12, 1, 2
_NAME, _GLOB, _STEP_METRIC = 1, 2, 4
_KEY, _NESTED_KEY, _JSON = 1, 2, 16


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is a run of wandb."""
    if beginning.startswith(_MARK):
        return CERTAIN
    return near_miss(_MARK[:4] in beginning[:64], "its mark in the first bytes")


def read_wandb(paths: Sequence[Path]) -> Run:
    """Read the history of an offline run as the metrics of a run."""

    def rows_in(file: BinaryIO) -> Iterator[Iterator[MetricRow]]:
        counters = _Counters(file)
        file.seek(0)
        for number, row in enumerate(islice(_history(file, {}), _MOST_ROWS)):
            yield _metrics(row, number, counters)

    return read_metrics(
        paths, rows_in, wanted="metrics", piece="record", without="its history is empty"
    )


@dataclass(slots=True)
class _Series:
    """The values of a column in the rows of a metric, one after another."""

    late: int  # rows of the metric before the column: one is a check before the training
    latest: object = None
    count: int = 0
    rises: int = 0
    falls: int = 0
    is_whole: bool = True

    def add(self, value: object) -> None:
        """Add the column's value in the next row of the metric."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
            self.is_whole = False
        elif isinstance(self.latest, int | float):
            self.rises += value > self.latest
            self.falls += value < self.latest
        self.count += 1
        self.latest = value

    @property
    def is_steady(self) -> bool:
        """Whether these are steps: at least half of the values rise, and none falls."""
        return self.is_whole and not self.falls and 2 * self.rises >= self.count - 1


class _Counters:
    """The columns that count steps, and the one that each metric has."""

    def __init__(self, file: BinaryIO) -> None:
        self._definitions: dict[str, str] = {}  # the step metric, by a name or a beginning with *
        self._series: dict[tuple[str, str], _Series] = {}  # by metric and column
        self.latest: dict[str, object] = {}  # of each column, at first its first value
        counts, is_given = self._read(file)
        named = set(self._definitions.values())
        self._rising: set[str] = set()
        self._steady: set[str] = set()
        for column in self.latest:
            own = self._series.get((column, column))
            if own is None:
                continue
            # A column that the script defined may fall where each epoch begins anew.
            if column in named and own.is_whole and own.rises > 4 * own.falls:
                self._rising.add(column)
            if _STEPS.fullmatch(column) and not is_given and own.rises and own.is_steady:
                self._steady.add(column)
        self.columns = self._rising | self._steady
        self.of = {name: (self.defined_for(name), self.usual_for(name)) for name in counts}

    def _read(self, file: BinaryIO) -> tuple[dict[str, int], bool]:
        """Return the rows of each metric, and whether `_step` jumps: the script gave it."""
        counts: dict[str, int] = defaultdict(int)
        latest: dict[str, object] = {}
        before: object = None
        is_given = False
        with suppress(BrokenMessageError):  # damage: the rows before it tell
            for row in islice(_history(file, self._definitions), _MOST_ROWS):
                step = row.get("_step")
                is_given |= isinstance(step, int) and isinstance(before, int) and step > before + 1
                before = step
                names = [name for name in row if not name.startswith("_")]
                for name in names:
                    if name in latest:
                        latest[name] = row[name]
                    elif name not in counts and len(latest) < _MOST_COUNTERS:
                        is_named = name in self._definitions.values() and _OF_STEPS.fullmatch(name)
                        if is_named or _STEPS.fullmatch(name):
                            latest[name] = self.latest[name] = row[name]
                for name in names:
                    for column, value in latest.items():
                        series = self._series.get((name, column))
                        if series is None and len(self._series) < _MOST_SERIES:
                            series = self._series[name, column] = _Series(counts[name])
                        if series is not None:
                            series.add(value)
                    counts[name] += 1
        return counts, is_given

    def defined_for(self, name: str) -> str:
        """Return the column that the script defined for a metric, or else ""."""
        globs = (text for text in self._definitions if text[-1:] == "*")
        longest = max((text for text in globs if name.startswith(text[:-1])), key=len, default="")
        column = self._definitions.get(name) or self._definitions.get(longest, "")
        series = self._series.get((name, column))
        return column if column in self._rising and series and series.late <= 1 else ""

    def usual_for(self, name: str) -> str:
        """Return the column such as `step` or `iter` that counts a metric's steps, or else ""."""
        own_prefix = re.split(r"[./]", name)[0].lower()
        candidates = []
        for column in self._steady:
            prefix = column.lower().replace(".", "/").rpartition("/")[0]
            series = self._series.get((name, column))
            if series is None or series.late > 1 or not series.is_steady:
                continue
            if prefix == own_prefix or prefix in _OF_OTHERS:
                place = -1 if prefix == own_prefix else _OF_OTHERS.index(prefix)
                candidates.append((place, "iter" in column.lower(), column))
        return min(candidates)[-1] if candidates else ""


def _history(file: BinaryIO, defined: dict[str, str]) -> Iterator[dict[str, object]]:
    """Yield the rows of the history, their values read from JSON; note the step metrics on the way.

    A script defines a step metric when it begins, before the rows that have it.
    """
    for record in _records(file):
        for number, history in fields(record):
            if not isinstance(history, bytes):
                continue
            if number == _METRIC:
                own = {
                    kind: text.decode(errors="replace").replace("\\.", ".")
                    for kind, text in fields(history)
                    if isinstance(text, bytes)
                }
                if column := own.get(_STEP_METRIC):
                    defined[own.get(_NAME) or own.get(_GLOB, "")] = column
            if number != _HISTORY:
                continue
            row: dict[str, object] = {}
            for kind, field in fields(history):
                if kind == _ITEM and isinstance(field, bytes) and len(row) < _MOST_COLUMNS:
                    name, value = _item(field)
                    row[name] = value
                elif kind == _STEP and isinstance(field, bytes):
                    row["_step"] = dict(fields(field)).get(1, 0)
            yield row


def _records(file: BinaryIO) -> Iterator[bytes]:
    """Yield whole records, put together of their pieces."""
    place = len(file.read(_HEAD_BYTES))
    parts: list[bytes] = []
    held_bytes = 0
    while True:
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _PIECE.size:  # padding: no piece begins here
            place += len(file.read(left))
            continue
        head = file.read(_PIECE.size)
        if not head and not parts:
            return
        if len(head) < _PIECE.size:
            raise BrokenMessageError("it ends within a record")
        told, length, kind = _PIECE.unpack(head)
        if not _WHOLE <= kind <= _LAST or length > left - _PIECE.size:
            raise BrokenMessageError(f"a piece of kind {kind} with {length:,} bytes")
        piece = file.read(length)
        place += _PIECE.size + len(piece)
        if len(piece) < length:
            raise BrokenMessageError("it ends within a record")
        if zlib.crc32(piece, zlib.crc32(bytes([kind]))) != told:
            raise BrokenMessageError("a piece with another checksum")
        if (kind in (_WHOLE, _FIRST)) is bool(parts):
            raise BrokenMessageError("pieces in another order")
        held_bytes += length
        if held_bytes > _MOST_RECORD_BYTES:
            raise BrokenMessageError(f"a record of more than {_MOST_RECORD_BYTES:,} bytes")
        parts.append(piece)
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)
            parts, held_bytes = [], 0


def _item(message: bytes) -> tuple[str, object]:
    """Return the name and the value of one column of a row."""
    name, nested, value = "", [], b""
    for number, field in fields(message):
        if not isinstance(field, bytes):
            continue
        if number == _KEY:
            name = field.decode(errors="backslashreplace")
        elif number == _NESTED_KEY:
            nested.append(field.decode(errors="backslashreplace"))
        elif number == _JSON:
            value = field
    name = name or ".".join(nested)
    if _NO_JSON.fullmatch(word := value.strip(b'"')):
        return name, float(word)
    try:
        return name, msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return name, None  # a text or a table


def _metrics(row: dict[str, object], number: int, counters: _Counters) -> Iterator[MetricRow]:
    """Yield step, name, value and time of the numbers in a row."""
    time_s = row.get("_timestamp", 0.0)
    if not isinstance(time_s, int | float) or not 0 <= time_s < _LATEST_S:
        raise BrokenMessageError("a row whose time is no number of seconds")
    latest = counters.latest
    latest.update((name, row[name]) for name in latest if name in row)
    at_global = next((row[name] for name in row if _GLOBAL_STEP.fullmatch(name)), None)
    for name, value in row.items():
        if name.startswith("_") or name in counters.columns or _GLOBAL_STEP.fullmatch(name):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        defined, usual = counters.of.get(name, ("", ""))  # new where the file still grows
        step = row.get("_step", number)
        for own in (latest.get(defined), at_global, latest.get(usual)):
            if isinstance(own, int | float) and own % 1 == 0:
                step = int(own)
                break
        if not isinstance(step, int) or not -(2**63) <= step < 2**63:
            raise BrokenMessageError("a row whose step is no whole number")
        try:
            yield step, name, float(value), round(time_s * 1e9)
        except OverflowError:
            yield step, name, math.inf, round(time_s * 1e9)


FORMAT = Format(
    key="wandb",
    label="offline runs of wandb",
    looks_like=looks_like,
    read=lambda files, options: read_wandb(files),
    tells=5,
)
