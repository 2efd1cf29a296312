"""Read the file of an offline run of wandb (`run-ID.wandb`): its history, as metrics.

    https://github.com/wandb/wandb    (wandb/sdk/internal/datastore.py, proto/wandb_internal.proto)

After a head of 7 bytes, the file is a log of LevelDB: blocks of 32 KiB hold pieces of records, each
behind its checksum (CRC-32), length and kind. A record is a message. One row of the history has a
number for each metric, and `_step` and `_timestamp`. wandb's `_step` counts the calls of `log`. A
column with the training's own steps counts before it:

- `global_step`, also `trainer/global_step` of Lightning and `train/global_step` of Hugging Face;
- `step`, `iter` and `iteration`, if they are whole numbers that rise;
- a column such as `my_step` that rises, if the script named it in `define_metric(step_metric=...)`.

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
from itertools import islice, pairwise
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
_STEPS = re.compile(r"(?:.*[./])?(?:steps?|iter(?:ation)?s?)", re.IGNORECASE)
_OF_STEPS = re.compile(r"(?:.*[./_ -])?(?:steps?|iter(?:ation)?s?)", re.IGNORECASE)
_ROWS_TO_TELL = 1000  # which columns count steps
# Numbers of fields: of a record, of its history, of an item, and of the item's step.
_HISTORY, _METRIC, _ITEM, _STEP, _STEP_METRIC = 2, 12, 1, 2, 4
_KEY, _NESTED_KEY, _JSON = 1, 2, 16


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is a run of wandb."""
    if beginning.startswith(_MARK):
        return CERTAIN
    return near_miss(_MARK[:4] in beginning[:64], "its mark in the first bytes")


def read_wandb(paths: Sequence[Path]) -> Run:
    """Read the history of an offline run as the metrics of a run."""

    def rows_in(file: BinaryIO) -> Iterator[Iterator[MetricRow]]:
        defined, usual = _counters(file)
        file.seek(0)
        for number, row in enumerate(islice(_history(file, set()), _MOST_ROWS)):
            at_global = [name for name in row if _GLOBAL_STEP.fullmatch(name)]
            yield _metrics(row, number, [*defined, *at_global, *usual])

    return read_metrics(
        paths, rows_in, wanted="metrics", piece="record", without="its history is empty"
    )


def _counters(file: BinaryIO) -> tuple[list[str], list[str]]:
    """Return the columns that count steps: those that the script defined so, and others."""
    named: set[str] = set()
    values: dict[str, list[float]] = defaultdict(list)
    with suppress(BrokenMessageError):  # damage: the rows before it tell
        for row in islice(_history(file, named), _ROWS_TO_TELL):
            for name, value in row.items():
                if _OF_STEPS.fullmatch(name) and isinstance(value, int | float):
                    values[name].append(value)
    counters = []
    for name, own in values.items():
        rises = sum(after > before for before, after in pairwise(own))
        falls = sum(after < before for before, after in pairwise(own))
        # They fall where each epoch begins anew. A length of a step falls as often as it rises.
        if rises > 4 * falls and all(value % 1 == 0 for value in own):
            counters.append(name)
    defined = [name for name in counters if name in named]
    return defined, [name for name in counters if _STEPS.fullmatch(name)]


def _history(file: BinaryIO, step_metrics: set[str]) -> Iterator[dict[str, object]]:
    """Yield the rows of the history, their values read from JSON; note the step metrics on the way.

    A script defines a step metric when it begins, before the rows that have it.
    """
    for record in _records(file):
        for number, history in fields(record):
            if not isinstance(history, bytes):
                continue
            if number == _METRIC:
                own = dict(fields(history)).get(_STEP_METRIC)
                step_metrics.add(own.decode(errors="replace") if isinstance(own, bytes) else "")
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


def _metrics(row: dict[str, object], number: int, counters: list[str]) -> Iterator[MetricRow]:
    """Yield step, name, value and time of the numbers in a row; `counters` count its own steps."""
    step, time_s = row.get("_step", number), row.get("_timestamp", 0.0)
    own = next((row[name] for name in counters if name in row), None)
    step = int(own) if isinstance(own, int | float) and own % 1 == 0 else step
    if not isinstance(step, int) or not -(2**63) <= step < 2**63:
        raise BrokenMessageError("a row whose step is no whole number")
    if not isinstance(time_s, int | float) or not 0 <= time_s < _LATEST_S:
        raise BrokenMessageError("a row whose time is no number of seconds")
    for name, value in row.items():
        if name.startswith("_") or name in counters:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
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
