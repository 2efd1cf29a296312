"""Protocol buffers' wire format: messages behind their lengths, fields by number, nothing else.

https://protobuf.dev/programming-guides/encoding/ says all that is here. Fields of a kind that was
given up (groups) are damage. A field's meaning is its reader's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, TypeAlias

Field: TypeAlias = int | bytes  # a whole number as it was written, or bytes with a length

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10


class BrokenMessageError(ValueError):
    """What is read is no such message; the text says why, for whoever knows the file's name."""


def messages(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Go through messages, each behind its length; an end in the middle of one raises."""
    while True:
        length = _length(file)
        if length is None:
            return
        if length > most_bytes:
            raise BrokenMessageError(f"a message of {length:,} bytes")
        message = file.read(length)
        if len(message) < length:
            raise BrokenMessageError("it ends within a message")
        yield message


def fields(message: bytes) -> Iterator[tuple[int, Field]]:
    """Go through the fields of a message: number and value."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == _BYTES:
            length, place = _varint(message, place)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise BrokenMessageError(f"a field of kind {kind}")
        end = place + length
        if end > len(message):
            raise BrokenMessageError("a field that is longer than its message")
        data = message[place:end]
        yield number, data if kind == _BYTES else int.from_bytes(data, "little")
        place = end


def signed(value: int) -> int:
    """Return a number as int32 and int64 mean it: negative ones are written as 64 bits."""
    return value - 2**64 if value >= 2**63 else value


def _length(file: BinaryIO) -> int | None:
    """Return the length of the next message; None at the end."""
    length = 0
    for place in range(_MOST_VARINT_BYTES):
        byte = file.read(1)
        if not byte:
            if place:
                raise BrokenMessageError("it ends within a length")
            return None
        length |= (byte[0] & 0x7F) << (7 * place)
        if byte[0] < 0x80:
            return length
    raise BrokenMessageError("a length without an end")


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * _MOST_VARINT_BYTES, 7):
        if place >= len(message):
            raise BrokenMessageError("a number that is cut")
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), place
    raise BrokenMessageError("a number without an end")
