"""Read TensorBoard's event files: the scalars that a job wrote, as metrics.

    https://www.tensorflow.org/tensorboard    (tensorboard/compat/proto/event.proto)

A file is a row of records: length, its checksum, an event, its checksum (CRC-32C, masked). The
first event names the format. A scalar is a plain number in older files, and a tensor with one
number in newer ones. All else, such as images and histograms, is passed over.

Files of one folder are one run of TensorBoard, as of a job that was started again. Jobs often write
their training and their validation to two folders, under the same name. Then the name of the folder
comes first, as TensorBoard shows it: `train/loss` and `validation/loss`.

A run of these files has metrics and no steps of its own. It is the curve of another run:
`whatif job.run --curve runs/large --target 'loss<=0.3'`.
"""

from __future__ import annotations

import functools
import itertools
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fullwire.importers._encodings import BrokenMessageError, fields, signed, varint
from fullwire.importers._format import (
    CERTAIN,
    NEAR_BYTES,
    Format,
    Likeness,
    MetricRow,
    near_miss,
    read_metrics,
)
from fullwire.run.run import Run

_MARK, _HEAD_BYTES = b"brain.Event:", 12
_HEAD, _SUM = struct.Struct("<QI"), struct.Struct("<I")
_TIME, _NUMBER = struct.Struct("<d"), struct.Struct("<f")
_MOST_EVENT_BYTES = 64 * 2**20
_LARGE_BYTES = 64 * 1024  # no scalar is so large: the rest is passed over without its checksum
_MOST_EVENTS = 10_000_000  # of a file
_HELD_BYTES = 2**18  # of events whose checksums are computed together
_TOGETHER_BYTES = (4, 32, 64, 128, 256, 1024)  # lengths between two of these, filled up to a width
_LATEST_S = 9e9  # the year 2255: later nanoseconds are no int64
_FLOAT, _DOUBLE = 1, 2  # of a tensor's numbers
# The usual event: a time, a step unless it is 0, and one plain number with its name. The groups are
# these, and the lengths of the summary, of its value and of the name.
_USUAL = re.compile(
    rb"\x09(.{8})(\x10[\x80-\xff]{0,8}[\x00-\x7f])?\x2a(.)\x0a(.)\x0a(.)(.*)\x15(.{4})", re.DOTALL
)
_POLYNOMIAL, _MASK = 0x82F63B78, 0xA282EAD8


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is an event file."""
    if _MARK in beginning[_HEAD_BYTES : _HEAD_BYTES + 64]:
        return CERTAIN
    return near_miss(_MARK in beginning[:NEAR_BYTES], "its version at the beginning")


def read_tensorboard(paths: Sequence[Path]) -> Run:
    """Read the scalars of event files as the metrics of a run."""
    return read_metrics(
        paths,
        lambda file: map(_scalars, islice(_events(file), _MOST_EVENTS)),
        wanted="scalars",
        piece="event",
        without="no scalar is in it",
    )


def _events(file: BinaryIO) -> Iterator[bytes]:
    """Yield the events of a file, each after a check of its checksums."""
    problem = ""
    while not problem:
        events, told, problem = _unchecked(file)
        if not events and not problem:
            return
        wrong = np.flatnonzero(masked_crc32c_of(events) != np.array(told, np.uint32))
        yield from events[: wrong[0] if len(wrong) else None]
        if len(wrong):
            raise BrokenMessageError("an event with another checksum")
    raise BrokenMessageError(problem)


def _unchecked(file: BinaryIO) -> tuple[list[bytes], list[int], str]:
    """Return the next events, the checksums that the file tells, and the damage after them."""
    events: list[bytes] = []
    told: list[int] = []
    held_bytes = 0
    while held_bytes < _HELD_BYTES and (head := file.read(_HEAD.size)):
        if len(head) < _HEAD.size:
            return events, told, "it ends within a length"
        length, told_of_length = _HEAD.unpack(head)
        if _length_sum(head[:8]) != told_of_length:
            return events, told, "a length with another checksum"
        if length > _MOST_EVENT_BYTES:
            return events, told, f"an event of {length:,} bytes"
        event = file.read(length + _SUM.size)
        if len(event) < length + _SUM.size:
            return events, told, "it ends within an event"
        if length <= _LARGE_BYTES:
            events.append(event[:length])
            told += _SUM.unpack_from(event, length)
            held_bytes += length + _HEAD.size
    return events, told, ""


def _scalars(event: bytes) -> Iterable[MetricRow]:
    """Return the scalars of one event: step, name, value and time."""
    usual = _USUAL.fullmatch(event)
    if usual is None:
        return _scalars_by_fields(event)
    time, step, of_summary, of_value, of_name, name, number = usual.groups()
    size = len(name)
    if of_name[0] != size or of_value[0] != size + 7 or of_summary[0] != size + 9 or size > 118:
        return _scalars_by_fields(event)
    time_ns = _nanoseconds(_TIME.unpack(time)[0])
    told = varint(step, 1)[0] if step else 0
    return ((told, _text(name), _NUMBER.unpack(number)[0], time_ns),)


def _scalars_by_fields(event: bytes) -> Iterator[MetricRow]:
    """Yield the scalars of an event of any shape."""
    time_s, step = 0.0, 0
    values: list[bytes] = []
    for number, field in fields(event):
        if number == 1 and isinstance(field, int):
            time_s = struct.unpack("<d", field.to_bytes(8, "little"))[0]
        elif number == 2 and isinstance(field, int):
            step = signed(field)
        elif number == 5 and isinstance(field, bytes):
            for place, value in fields(field):
                if place == 1 and isinstance(value, bytes):
                    values.append(value)
    time_ns = _nanoseconds(time_s)
    for value in values:
        name, scalar = _named_scalar(value)
        if scalar is not None:
            yield step, name, scalar, time_ns


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _nanoseconds(time_s: float) -> int:
    if not 0 <= time_s < _LATEST_S:
        raise BrokenMessageError(f"a time of {time_s:g} seconds")
    return round(time_s * 1e9)


def _named_scalar(value: bytes) -> tuple[str, float | None]:
    name, scalar = "", None
    for number, field in fields(value):
        if number == 1 and isinstance(field, bytes):
            name = _text(field)
        elif number == 2 and isinstance(field, int):
            if field >= 2**32:
                raise BrokenMessageError("a value of more than four bytes")
            scalar = struct.unpack("<f", field.to_bytes(4, "little"))[0]
        elif number == 8 and isinstance(field, bytes):
            scalar = _tensor_scalar(field)
    return name, None if scalar is None else float(scalar)


def _tensor_scalar(tensor: bytes) -> float | None:
    """Return the number of a tensor that holds one."""
    kind, numbers = 0, b""
    for number, field in fields(tensor):
        if number == 1 and isinstance(field, int):
            kind = field
        elif number in (4, 5, 6):  # the content, or the list of floats or of doubles
            numbers = field.to_bytes(8, "little") if isinstance(field, int) else field
    form = {_FLOAT: "<f", _DOUBLE: "<d"}.get(kind)
    if form is None:
        return None
    size = struct.calcsize(form)
    if len(numbers) not in (size, 8):  # 8: one fixed number, not packed
        return None
    return float(struct.unpack(form, numbers[:size])[0])


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of Castagnoli, rotated and moved as TensorFlow stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


def masked_crc32c_of(texts: Sequence[bytes]) -> NDArray[np.uint32]:
    """Return the checksum of each text. Those of like lengths are computed together."""
    sums = np.empty(len(texts), np.uint32)
    lengths = np.array([len(text) for text in texts], np.int64)
    for least, most in itertools.pairwise(_TOGETHER_BYTES):
        places = np.flatnonzero((lengths >= least) & (lengths < most))
        if len(places):
            of_these = [texts[place] for place in places.tolist()]
            sums[places] = _together(of_these, lengths[places])
    apart = (lengths < _TOGETHER_BYTES[0]) | (lengths >= _TOGETHER_BYTES[-1])
    for place in np.flatnonzero(apart).tolist():
        sums[place] = masked_crc32c(texts[place])
    return sums


def _together(texts: Sequence[bytes], lengths: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the checksums of texts of four bytes or more, a byte of each at a time."""
    width = int(lengths.max())
    joined = bytearray().join([text.rjust(width, b"\0") for text in texts])
    rows = np.frombuffer(joined, np.uint8).reshape(-1, width)
    # A sum that begins with ones is one that begins with zeros, of a text whose first 32 bits are
    # inverted. Zeros before such a text do not change its sum.
    first = (width - lengths)[:, None] + np.arange(4)
    rows[np.arange(len(rows))[:, None], first] ^= 0xFF
    crc = np.zeros(len(rows), np.uint32)
    for column in np.ascontiguousarray(rows.T):
        crc = _COLUMN_TABLE[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    crc = ~crc
    rotated = (crc >> np.uint32(15)) | (crc << np.uint32(17))
    return rotated + np.uint32(_MASK)


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _table()
_COLUMN_TABLE = np.array(_TABLE, np.uint32)
_length_sum = functools.lru_cache(4096)(masked_crc32c)  # events of one kind have equal lengths
FORMAT = Format(
    key="tensorboard",
    label="event files of TensorBoard",
    looks_like=looks_like,
    read=lambda files, options: read_tensorboard(files),
    is_of_many=True,
    tells=5,
)
