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

import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from fullwire.importers._encodings import BrokenMessageError, fields, signed
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
_MOST_EVENT_BYTES = 64 * 2**20
_LARGE_BYTES = 64 * 1024  # no scalar is so large: the rest is passed over without its checksum
_MOST_EVENTS = 10_000_000  # of a file
_LATEST_S = 9e9  # the year 2255: later nanoseconds are no int64
_FLOAT, _DOUBLE = 1, 2  # of a tensor's numbers
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
    while head := file.read(_HEAD.size):
        if len(head) < _HEAD.size:
            raise BrokenMessageError("it ends within a length")
        length, told = _HEAD.unpack(head)
        if masked_crc32c(head[:8]) != told:
            raise BrokenMessageError("a length with another checksum")
        if length > _MOST_EVENT_BYTES:
            raise BrokenMessageError(f"an event of {length:,} bytes")
        event, ending = file.read(length), file.read(_SUM.size)
        if len(event) < length or len(ending) < _SUM.size:
            raise BrokenMessageError("it ends within an event")
        if length > _LARGE_BYTES:
            continue
        if masked_crc32c(event) != _SUM.unpack(ending)[0]:
            raise BrokenMessageError("an event with another checksum")
        yield event


def _scalars(event: bytes) -> Iterator[MetricRow]:
    """Yield the scalars of one event: step, name, value and time."""
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
    if not 0 <= time_s < _LATEST_S:
        raise BrokenMessageError(f"a time of {time_s:g} seconds")
    for value in values:
        name, scalar = _named_scalar(value)
        if scalar is not None:
            yield step, name, scalar, round(time_s * 1e9)


def _named_scalar(value: bytes) -> tuple[str, float | None]:
    name, scalar = "", None
    for number, field in fields(value):
        if number == 1 and isinstance(field, bytes):
            name = field.decode(errors="backslashreplace")
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


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _table()
FORMAT = Format(
    key="tensorboard",
    label="event files of TensorBoard",
    looks_like=looks_like,
    read=lambda files, options: read_tensorboard(files),
    is_of_many=True,
    tells=5,
)
