"""Read pickles and protocol buffers as data: nothing that they name is ever imported or called.

A dump of plain values needs dictionaries, lists, tuples, text and numbers. It also needs the marks
of typed lists that PyTorch's own pickler writes (`torch.jit._pickle`). The reader refuses every
other operation, such as importing a name, and says its name. Memory is bounded: there are limits
on the number of values and on the bytes of a text. If a pickle ends early, the reader returns the
values that it had put together.

Protocol buffers are messages, each behind its length, with numbered fields. The encoding is
described at https://protobuf.dev/programming-guides/encoding/. Groups, a kind of field that the
format has given up, count as damage. The format's own reader gives each field its meaning.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias

from fullwire.errors import DamagedInput
from fullwire.units import shown

_MOST_VALUES = 4_000_000
_MOST_TEXT_BYTES = 256 * 1024  # a longer text is passed over
_MOST_NUMBER_BYTES = 32
_READ_BYTES = 64 * 1024
_TYPED = (
    "build_intlist",
    "build_doublelist",
    "build_boollist",
    "build_tensorlist",
    "restore_type_tag",
)
Field: TypeAlias = int | bytes  # a whole number as written, or bytes with a length

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Pickled:
    """A pickle's value, or the values read so far and the problem if it ended early."""

    value: object
    unfinished: tuple[object, ...]
    problem: str


def is_pickle(beginning: bytes) -> bool:
    """Say whether a file with this beginning may be a pickle."""
    return beginning[:1] == b"\x80" and beginning[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


def read_pickle(path: Path, file: BinaryIO) -> Pickled:
    """Read one pickle of protocol 2 or later."""
    reader = _Reader(path, file)
    try:
        value = reader.read()
    except EOFError:
        problem = f"it ends in the middle, at byte {reader.offset:,}"
        return Pickled(value=None, unfinished=tuple(reader.stack), problem=problem)
    return Pickled(value=value, unfinished=(), problem="")


class _Typed:
    """The stand-in for the name of a typed list: calling it gives the list itself."""


class _Reader:
    """The pickle's stack, the marks on it, and the values that it may refer to again."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.stack: list[Any] = []
        self.offset = 0
        self._path, self._file = path, file
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._values = 0

    def read(self) -> object:
        while (code := self.bytes(1)) != b".":
            if code not in _ACTIONS:
                what = shown(code.decode("latin-1"))
                self.refuse(f"the operation {what}, which plain values do not need")
            _ACTIONS[code](self)
        return self.pop()

    def refuse(self, what: str) -> NoReturn:
        raise DamagedInput(self._path, f"at byte {self.offset:,} of this pickle is {what}")

    def bytes(self, count: int) -> bytes:
        data = self._file.read(count)
        self.offset += len(data)
        if len(data) < count:
            raise EOFError
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.bytes(struct.calcsize(form)))[0]

    def line(self) -> str:
        line = self._file.readline(1024)
        self.offset += len(line)
        if line[-1:] != b"\n":
            raise EOFError
        return line[:-1].decode(errors="replace")

    def push(self, value: object) -> None:
        self._values += 1
        if self._values > _MOST_VALUES:
            self.refuse(f"value {self._values:,}, and no dump has so many")
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self._marks[-1] if self._marks else 0):
            self.refuse("an operation on nothing")
        return self.stack.pop()

    def top(self) -> Any:
        self.stack.append(self.pop())
        return self.stack[-1]

    def mark(self) -> None:
        self._marks.append(len(self.stack))
        if len(self._marks) > _MOST_VALUES:
            self.refuse("more nested than any dump")

    def pop_to_mark(self) -> list[Any]:
        if not self._marks:
            self.refuse("an end without a beginning")
        start = self._marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def text(self, length: int) -> None:
        if length <= _MOST_TEXT_BYTES:
            self.push(self.bytes(length).decode(errors="replace"))
            return
        while length > 0:
            length -= len(self.bytes(min(length, _READ_BYTES)))
        self.push("")

    def long(self, length: int) -> None:
        if not 0 <= length <= _MOST_NUMBER_BYTES:
            self.refuse(f"a number of {length:,} bytes")
        self.push(int.from_bytes(self.bytes(length), "little", signed=True))

    def remember(self, place: int) -> None:
        if len(self._memo) > _MOST_VALUES:
            self.refuse("more to remember than any dump")
        self._memo[place] = self.top()

    def recall(self, place: int) -> None:
        if place not in self._memo:
            self.refuse(f"a reference to value {place:,}, which there is not")
        self.push(self._memo[place])

    def memoize(self) -> None:
        self.remember(len(self._memo))

    def append(self, values: list[Any]) -> None:
        into = self.top()
        if not isinstance(into, list):
            self.refuse("an item for what is no list")
        into.extend(values)

    def set(self, pairs: list[Any]) -> None:
        into = self.top()
        if not isinstance(into, dict) or len(pairs) % 2:
            self.refuse("an item for what is no dictionary")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, str):  # a hostile file could choose numbers whose hashes collide
                self.refuse("a key that is no text")
            into[key] = value

    def pair(self) -> list[Any]:
        value = self.pop()
        return [self.pop(), value]

    def tuple(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self.push((*reversed(values),))

    def name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            self.refuse("a name that is no text")
        if module != "torch.jit._pickle" or name not in _TYPED:
            self.refuse(f"the name {shown(f'{module}.{name}')}, and nothing is imported")
        self.push(_Typed())

    def call(self) -> None:
        given, called = self.pop(), self.pop()
        if not isinstance(called, _Typed) or not isinstance(given, tuple) or not given:
            self.refuse("a call, and nothing is called")
        self.push(given[0])

    def protocol(self) -> None:
        if not 2 <= (number := self.number("<B")) <= 5:
            self.refuse(f"protocol {number}, and 2 to 5 are read")


_ACTIONS: Mapping[bytes, Callable[[_Reader], object]] = {
    b"\x80": _Reader.protocol,
    b"\x95": lambda r: r.bytes(8),  # the length of a frame
    b"N": lambda r: r.push(None),
    b"\x88": lambda r: r.push(True),
    b"\x89": lambda r: r.push(False),
    b"J": lambda r: r.push(r.number("<i")),
    b"K": lambda r: r.push(r.number("<B")),
    b"M": lambda r: r.push(r.number("<H")),
    b"\x8a": lambda r: r.long(r.number("<B")),
    b"\x8b": lambda r: r.long(r.number("<i")),
    b"G": lambda r: r.push(r.number(">d")),
    b"X": lambda r: r.text(r.number("<I")),
    b"\x8c": lambda r: r.text(r.number("<B")),
    b"\x8d": lambda r: r.text(r.number("<Q")),
    b"]": lambda r: r.push([]),
    b"}": lambda r: r.push({}),
    b")": lambda r: r.push(()),
    b"(": _Reader.mark,
    b"l": lambda r: r.push(r.pop_to_mark()),
    b"t": lambda r: r.push((*r.pop_to_mark(),)),
    b"\x85": lambda r: r.tuple(1),
    b"\x86": lambda r: r.tuple(2),
    b"\x87": lambda r: r.tuple(3),
    b"a": lambda r: r.append([r.pop()]),
    b"e": lambda r: r.append(r.pop_to_mark()),
    b"s": lambda r: r.set(r.pair()),
    b"u": lambda r: r.set(r.pop_to_mark()),
    b"0": _Reader.pop,
    b"1": _Reader.pop_to_mark,
    b"q": lambda r: r.remember(r.number("<B")),
    b"r": lambda r: r.remember(r.number("<I")),
    b"\x94": _Reader.memoize,
    b"h": lambda r: r.recall(r.number("<B")),
    b"j": lambda r: r.recall(r.number("<I")),
    b"c": lambda r: r.name(r.line(), r.line()),
    b"\x93": lambda r: r.name(*r.pair()),
    b"R": _Reader.call,
}


class BrokenMessageError(ValueError):
    """The bytes are no such message; the text gives the reason, and the caller adds the file."""


def messages(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Yield the messages, each behind its length; raise if the file ends within one."""
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


def fields(message: bytes) -> list[tuple[int, Field]]:
    """Return the fields of a message: number and value."""
    found: list[tuple[int, Field]] = []
    place, end = 0, len(message)
    while place < end:
        # Most keys and lengths have one byte. A call for each would take half of a file's time.
        if (key := message[place]) < 0x80:
            place += 1
        else:
            key, place = varint(message, place)
        number, kind = key >> 3, key & 7
        if kind in (_VARINT, _BYTES):
            if place < end and (value := message[place]) < 0x80:
                place += 1
            else:
                value, place = varint(message, place)
            if kind == _VARINT:
                found.append((number, value))
                continue
        elif kind in (_FIXED64, _FIXED32):
            value = 8 if kind == _FIXED64 else 4
        else:
            raise BrokenMessageError(f"a field of kind {kind}")
        after = place + value
        if after > end:
            raise BrokenMessageError("a field that is longer than its message")
        data = message[place:after]
        found.append((number, data if kind == _BYTES else int.from_bytes(data, "little")))
        place = after
    return found


def signed(value: int) -> int:
    """Return the signed value of an int32 or int64, which writes negative numbers as 64 bits."""
    return value - 2**64 if value >= 2**63 else value


def _length(file: BinaryIO) -> int | None:
    """Return the length of the next message, or None at the end of the file."""
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


def varint(message: bytes, place: int) -> tuple[int, int]:
    """Return the whole number at a place, and the place after it."""
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
