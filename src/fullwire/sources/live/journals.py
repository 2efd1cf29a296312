"""The files of a recorded job's processes, read as far as they are whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fullwire.model.run import Whole
from fullwire.sources.live.inside.journal import (
    BLOCK,
    DEFINITIONS,
    HEADER_BYTES,
    NOTES,
    SUFFIX,
    TAG,
)

Header: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """What one process left: its header, its notes by kind, what their numbers mean."""

    path: Path
    header: Header
    notes: Whole  # rows of kind and three values
    definitions: tuple[Mapping[str, Any], ...]
    bytes_not_read: int

    @property
    def rank(self) -> int:
        """The rank, as the process group knew it, or as the launcher announced it."""
        return int(next(self.defined("identity"), self.header)["rank"])

    @property
    def attempt(self) -> int:
        """How often the launcher had restarted the job before."""
        return int(self.header["attempt"])

    def of(self, kind: int) -> Whole:
        """Return the three values of each note of a kind, in the order in which they were taken."""
        chosen: Whole = self.notes[self.notes[:, 0] == kind, 1:]
        return chosen

    def defined(self, kind: str) -> Iterator[Mapping[str, Any]]:
        """Go through the definitions of a kind."""
        return (each for each in self.definitions if each["kind"] == kind)


def read_journals(directories: Sequence[Path]) -> tuple[list[Journal], list[str]]:
    """Read every journal in some directories; a file without a readable header gets a sentence."""
    journals, unreadable = [], []
    for path in files_in(directories, SUFFIX):
        try:
            journals.append(_read(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            unreadable.append(f"{path.name}: not a readable recording ({error})")
    return journals, unreadable


def files_in(directories: Sequence[Path], suffix: str) -> list[Path]:
    """List the files of one kind, in an order that does not depend on the file system."""
    return [path for each in directories for path in sorted(each.glob(f"*{suffix}"))]


def _read(path: Path) -> Journal:
    content = path.read_bytes()
    header = header_of(content)
    blocks, definitions, read_bytes = blocks_of(content)
    notes = [np.frombuffer(each, np.int64).reshape(-1, 4) for kind, each in blocks if kind == NOTES]
    return Journal(
        path=path,
        header={**header, "rank": int(header["rank"]), "attempt": int(header["attempt"])},
        notes=np.concatenate([np.empty((0, 4), np.int64), *notes]),
        definitions=tuple(definitions),
        bytes_not_read=len(content) - read_bytes,
    )


def header_of(content: bytes) -> Header:
    """Return what a file's first bytes say of it."""
    header: Header = json.loads(content[:HEADER_BYTES])
    return header


def blocks_of(content: bytes) -> tuple[list[tuple[int, bytes]], list[dict[str, Any]], int]:
    """Return the whole blocks behind the header, all definitions in them, and where they end."""
    blocks, definitions = [], []
    place = HEADER_BYTES
    while (block := _block_at(content, place)) is not None:
        kind, payload = block
        blocks.append(block)
        if kind == DEFINITIONS:
            definitions += json.loads(payload)
        place += BLOCK.size + len(payload)
    return blocks, definitions, min(place, len(content))


def _block_at(content: bytes, place: int) -> tuple[int, bytes] | None:
    """Return the block that begins here, or None where the file ends or is torn."""
    if place + BLOCK.size > len(content):
        return None
    tag, kind, length, checksum = BLOCK.unpack_from(content, place)
    payload = content[place + BLOCK.size : place + BLOCK.size + length]
    is_whole = tag == TAG and len(payload) == length and zlib.crc32(payload) == checksum
    return (kind, payload) if is_whole else None
