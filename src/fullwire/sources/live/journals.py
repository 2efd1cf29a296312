"""The files of a recorded job's processes, read as far as they are whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """What one process left: its header, its notes by kind, what their numbers mean."""

    path: Path
    header: Mapping[str, Any]
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


def read_journals(directory: Path) -> tuple[list[Journal], list[str]]:
    """Read every journal in a directory; a file without a readable header gets a sentence."""
    journals, unreadable = [], []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            journals.append(_read(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            unreadable.append(f"{path.name}: not a readable recording ({error})")
    return journals, unreadable


def _read(path: Path) -> Journal:
    content = path.read_bytes()
    header = json.loads(content[:HEADER_BYTES])
    notes, definitions = [np.empty((0, 4), np.int64)], []
    place = HEADER_BYTES
    while (block := _block_at(content, place)) is not None:
        kind, payload = block
        if kind == NOTES:
            notes.append(np.frombuffer(payload, np.int64).reshape(-1, 4))
        elif kind == DEFINITIONS:
            definitions += json.loads(payload)
        place += BLOCK.size + len(payload)
    return Journal(
        path=path,
        header={**header, "rank": int(header["rank"]), "attempt": int(header["attempt"])},
        notes=np.concatenate(notes),
        definitions=tuple(definitions),
        bytes_not_read=len(content) - place,
    )


def _block_at(content: bytes, place: int) -> tuple[int, bytes] | None:
    """Return the block that begins here, or None where the file ends or is torn."""
    if place + BLOCK.size > len(content):
        return None
    tag, kind, length, checksum = BLOCK.unpack_from(content, place)
    payload = content[place + BLOCK.size : place + BLOCK.size + length]
    is_whole = tag == TAG and len(payload) == length and zlib.crc32(payload) == checksum
    return (kind, payload) if is_whole else None
