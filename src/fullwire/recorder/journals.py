"""Read the files of a recorded job's processes, piece by piece, as far as they are whole."""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from fullwire.errors import DamagedInput
from fullwire.files import planted
from fullwire.recorder.inside.journal import (
    BLOCK,
    DEFINITIONS,
    HEADER_BYTES,
    NOTES,
    PASSES,
    PLAIN,
    SUFFIX,
    TAG,
    Note,
)
from fullwire.recorder.inside.notes import PASS
from fullwire.run.run import Whole

Header: TypeAlias = Mapping[str, Any]

# What reading a file raises whose blocks are whole and whose content cannot be.
DAMAGED = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    *(struct.error, zlib.error),
)
_COUNT = struct.Struct("<I")
_LONGEST_BLOCK = 64 * 2**20
_MOST_LOOSE_BYTES = 4 * _LONGEST_BLOCK  # of a packed block: a few bytes may unpack to gigabytes
_TEXTS = ("status", "host", "machine", "reason")
_WHOLE_NUMBERS = ("rank", "attempt", "processors", "monotonic_ns", "unix_ns")
_INTERVALS = (
    Note.OPTIMIZER,
    Note.FORWARD,
    Note.BACKWARD,
    Note.WAIT,
    Note.TURN,
    Note.INPUT,
    Note.EVALUATION,
    Note.INFERENCE,
    Note.CODEC,
    Note.CHECKPOINT,
)


@dataclass(frozen=True, eq=False, slots=True)
class Notes:
    """Some notes of one process: rows of kind, number, time and rest, in order of writing."""

    rows: Whole

    def of(self, kind: int) -> Whole:
        """Return number, time and rest of each note of a kind; an interval's rest is its end."""
        chosen: Whole = self.rows[self.rows[:, 0] == kind, 1:]
        if kind in _INTERVALS:
            chosen[:, 2] += chosen[:, 1]
        return chosen

    def until(self, time_ns: int) -> tuple[Notes, Notes]:
        """Divide the notes into those up to a time and those after it."""
        is_early = self.rows[:, 2] <= time_ns
        return Notes(self.rows[is_early]), Notes(self.rows[~is_early])

    @classmethod
    def joined(cls, parts: Iterable[Notes]) -> Notes:
        """Return the notes of several parts."""
        return cls(np.concatenate([np.empty((0, 4), np.int64), *(part.rows for part in parts)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The file of one process: its header, the meaning of numbers, and a summary of its notes."""

    path: Path
    header: Header
    definitions: tuple[Mapping[str, Any], ...]
    counts: Mapping[int, int]  # number of notes by kind
    first_ns: Mapping[int, int]  # time of the first note, by kind
    late_ends: int
    bytes_read: int
    bytes_not_read: int

    @property
    def rank(self) -> int:
        """The rank that the process group had, or else the one that the launcher announced."""
        return int(next(self.defined("identity"), self.header)["rank"])

    @property
    def attempt(self) -> int:
        """The number of times that the launcher had restarted the job before."""
        return int(self.header["attempt"])

    def defined(self, kind: str) -> Iterator[Mapping[str, Any]]:
        """Yield the definitions of a kind."""
        return (definition for definition in self.definitions if definition["kind"] == kind)

    def blocks(self) -> Iterator[Notes]:
        """Yield the notes in order of writing, some thousand at a time."""
        for kind, payload in blocks_in(self.path, self.bytes_read):
            if kind in _NOTES_OF:
                yield _NOTES_OF[kind](payload)

    def only(self, kinds: Collection[int]) -> Mapping[int, Whole]:
        """Return all notes of some kinds as `Notes.of` does, at 24 bytes a note."""
        rows_of = {kind: np.empty((self.counts.get(kind, 0), 3), np.int64) for kind in kinds}
        filled = dict.fromkeys(kinds, 0)
        for block in self.blocks():
            for kind in kinds:
                rows = block.of(kind)
                rows_of[kind][filled[kind] : filled[kind] + len(rows)] = rows
                filled[kind] += len(rows)
        return rows_of


def read_journals(directories: Sequence[Path]) -> tuple[list[Journal], list[str]]:
    """Survey every journal in some directories; return a sentence for each unreadable header."""
    journals, unreadable = [], []
    for path in files_in(directories, SUFFIX):
        try:
            journals.append(_surveyed(path))
        except (OSError, *DAMAGED) as error:
            unreadable.append(f"{path.name}: not a readable recording ({error})")
    return journals, unreadable


def refuse_planted(directory: Path) -> None:
    """Refuse a recording that holds a link or a pipe: opening one may wait, or read elsewhere."""
    for path in sorted(directory.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # its process has just renamed it
            if not (path.is_dir() and not path.is_symlink()) and (
                strange := planted(path, directory)
            ):
                raise DamagedInput(path, strange)


def files_in(directories: Sequence[Path], suffix: str) -> list[Path]:
    """List the files of one kind, in the same order on every file system."""
    paths = [path for directory in directories for path in sorted(directory.glob(f"*{suffix}"))]
    for path in paths:
        if strange := planted(path, path.parent):
            raise DamagedInput(path, strange)
    return paths


def read_header(path: Path, whole_numbers: Sequence[str]) -> Header:
    """Read a process's header: the texts that every header has, and some whole numbers."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(HEADER_BYTES))
    whole = {name: int(header[name]) for name in whole_numbers}
    return {**{name: str(header[name]) for name in _TEXTS}, **whole}


def _surveyed(path: Path) -> Journal:
    header = read_header(path, _WHOLE_NUMBERS)
    definitions: list[Mapping[str, Any]] = []
    counts: dict[int, int] = {}
    first_ns: dict[int, int] = {}
    late_ends, place = 0, HEADER_BYTES
    length = path.stat().st_size
    for kind, payload in blocks_in(path, length):
        place += BLOCK.size + len(payload)
        if kind == DEFINITIONS:
            definitions += json.loads(payload)
        elif kind in _NOTES_OF:
            rows = _NOTES_OF[kind](payload).rows
            late_ends += int(((rows[:, 0] == Note.END) & (rows[:, 3] == 1)).sum())
            for number in np.unique(rows[:, 0]).tolist():
                times_ns = rows[rows[:, 0] == number, 2]
                counts[number] = counts.get(number, 0) + len(times_ns)
                first_ns[number] = min(first_ns.get(number, int(times_ns[0])), int(times_ns.min()))
    return Journal(
        path=path,
        header=header,
        definitions=tuple(definitions),
        counts=counts,
        first_ns=first_ns,
        late_ends=late_ends,
        bytes_read=place,
        bytes_not_read=max(0, length - place),
    )


def blocks_in(path: Path, end: int, begin: int = HEADER_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield the blocks of a file, up to its end or its first torn block."""
    with path.open("rb") as file:
        file.seek(begin)
        while (block := block_from(file, end - file.tell())) is not None:
            yield block


def block_from(file: BinaryIO, most_bytes: int = _LONGEST_BLOCK) -> tuple[int, bytes] | None:
    """Read a block of at most `most_bytes` bytes; return None if the next one is incomplete."""
    head = file.read(BLOCK.size)
    if len(head) < BLOCK.size or most_bytes < BLOCK.size:
        return None
    tag, kind, length, checksum = BLOCK.unpack(head)
    if tag != TAG or length > min(most_bytes - BLOCK.size, _LONGEST_BLOCK):
        return None
    payload = file.read(length)
    is_whole = len(payload) == length and zlib.crc32(payload) == checksum
    return (kind, payload) if is_whole else None


def unpacked(payload: bytes) -> Notes:
    """Read the columns that `inside.journal` packed."""
    [count] = _COUNT.unpack_from(payload)
    content = _loose(payload[_COUNT.size :])
    _check_count(count, content)
    rows = np.empty((count, 4), np.int64)
    rows[:, 0] = np.frombuffer(content, np.uint8, count)
    rows[0, 2] = np.frombuffer(content, np.int64, 1, count)[0]
    place = count + 8
    for column, length in ((rows[:, 1], count), (rows[1:, 2], count - 1), (rows[:, 3], count)):
        kind = np.dtype(content[place : place + 1].decode())
        column[:] = np.frombuffer(content, kind, length, place + 1)
        place += 1 + length * kind.itemsize
    np.cumsum(rows[:, 2], out=rows[:, 2])
    return Notes(rows)


def _unpacked_passes(payload: bytes) -> Notes:
    """Return the times when gradients were ready, as one note for each gradient."""
    content, place, passes = _loose(payload), 0, []
    while place < len(content):
        begun_ns, first, count = PASS.unpack_from(content, place)
        kind = np.dtype(content[place + PASS.size : place + PASS.size + 1].decode())
        _check_count(count, content)
        rows = np.zeros((count, 4), np.int64)
        rows[:, 0] = Note.GRADIENT
        rows[:, 1] = np.arange(first, first + count)
        later_ns = np.frombuffer(content, kind, count, place + PASS.size + 1)
        np.cumsum(later_ns, out=rows[:, 2])
        rows[:, 2] += begun_ns
        passes.append(Notes(rows))
        place += PASS.size + 1 + count * kind.itemsize
    return Notes.joined(passes)


def _check_count(count: int, content: bytes) -> None:
    """Refuse a count of rows that the content cannot hold, before there is memory for them."""
    if not 0 < count <= len(content):
        raise ValueError(f"{count} notes in {len(content)} bytes")


def _loose(content: bytes) -> bytes:
    if content[:1] == PLAIN:
        return content[1:]
    loose = zlib.decompressobj()
    found = loose.decompress(content, _MOST_LOOSE_BYTES)
    if not loose.eof:
        raise ValueError(f"a block that is cut, or larger than {_MOST_LOOSE_BYTES} bytes")
    return found


_NOTES_OF = {NOTES: unpacked, PASSES: _unpacked_passes}


def last_attempts(
    journals: Sequence[Journal],
) -> tuple[list[Journal], dict[int, list[Journal]], list[str]]:
    """Keep one journal per rank: the fullest one of the job's last attempt.

    Return these, each rank's journals of earlier attempts, and what was left out in words.
    """
    latest: dict[int, Journal] = {}
    left_out: dict[int, list[Journal]] = defaultdict(list)
    for journal in sorted(
        journals, key=lambda attempt: (attempt.attempt, sum(attempt.counts.values()))
    ):
        if journal.rank in latest:
            left_out[journal.rank].append(latest[journal.rank])
        latest[journal.rank] = journal
    sentences = [
        f"rank {rank}: {len(others)} earlier or smaller recording{'s' * (len(others) > 1)} of the "
        "same rank left out, as after a restart"
        for rank, others in sorted(left_out.items())
    ]
    earlier = {
        rank: [other for other in others if other.attempt < latest[rank].attempt]
        for rank, others in left_out.items()
    }
    return [latest[rank] for rank in sorted(latest)], earlier, sentences
