"""The history of the format: a run that any past version wrote opens as one of today.

Format 1   The first one. `missing` holds sentences, and facts are checked by name.
Format 2   `gaps` in place of `missing`: a reason, and of which table and rank it is told, so that
           nobody searches sentences for the name of a table. `written_by` names the version, so
           that an older one can say which reads the run. Facts that cannot be are refused. The
           CRC of run.json is of its content with its keys sorted: a fact that is declared between
           two others does not make older runs look edited.

A format ends when readers of it would misread what is written next. A new fact, a new table or a
new column with a default is none of that: an older program says that it does not know the fact or
the table, and goes on without the column. Each past format has a class with its shape and a step
to the next one, and a recorded run of each is below `tests/data/format-*`.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import msgspec

from fullwire import __version__
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import planted
from fullwire.run.run import TABLES
from fullwire.run.store.description import (
    DESCRIPTION,
    FORMAT,
    LARGEST_DESCRIPTION,
    Count,
    Described,
    StoredGap,
    StoredProvenance,
    decoded,
    refuse_twice,
    was_edited,
)
from fullwire.units import shown

_EDITED = StoredGap(f"{DESCRIPTION}: it was changed after it was written")


class _Version(msgspec.Struct):
    format: int
    written_by: str = ""


class _Format1(msgspec.Struct, forbid_unknown_fields=True):
    """The shape of run.json in format 1."""

    format: int
    provenance: StoredProvenance
    facts: dict[str, Any]
    missing: list[str]
    rows: dict[str, Count]
    crc32: dict[str, int] = {}

    def was_edited(self) -> bool:
        others = {name: crc for name, crc in self.crc32.items() if name != DESCRIPTION}
        content = msgspec.json.encode(msgspec.structs.replace(self, crc32=others))
        return bool(self.crc32) and self.crc32.get(DESCRIPTION) != zlib.crc32(content)

    def next(self) -> dict[str, Any]:
        """Return what it says as format 2 says it."""
        return {
            "format": 2,
            "written_by": "",
            "provenance": msgspec.to_builtins(self.provenance),
            "facts": self.facts,
            "gaps": [msgspec.to_builtins(_told_by(sentence)) for sentence in self.missing],
            "rows": self.rows,
            "crc32": self.crc32,
        }


def _told_by(sentence: str) -> StoredGap:
    """Make a gap of a sentence: those about a table or a rank begin with its name."""
    table = re.match(rf"({'|'.join(TABLES)})(?:: |\.parquet: |/)", sentence)
    rank = re.match(r"rank (\d{1,9}): ", sentence)
    return StoredGap(
        sentence,
        None if table is None else table[1],
        None if rank is None else int(rank[1]),
    )


def read_description(place: Path) -> Described:
    """Read run.json of any format so far, and note where it is not as it was written."""
    path = place / DESCRIPTION
    content = _content(place)
    try:
        version = msgspec.json.decode(content, type=_Version)
        if version.format <= FORMAT:
            described, is_edited = _read(content, version.format)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise DamagedInput(path, f"not the description of a run: {error}{_by(content)}") from None
    if version.format > FORMAT:
        raise DamagedInput(path, _too_new(version))
    if is_edited:
        described.gaps.append(_EDITED)
    described.gaps += [
        StoredGap(f"{shown(name)}: {rows} rows of a table that this version does not know")
        for name, rows in sorted(described.rows.items())
        if name not in TABLES
    ]
    return described


def _read(content: bytes, number: int) -> tuple[Described, bool]:
    """Read a description of a format so far, and say whether it is not as it was written."""
    if number < 1:
        raise ValueError(f"there is no format {number}")
    if number == FORMAT:
        described = decoded(content)
        return described, was_edited(described, content)
    refuse_twice(content)
    past = msgspec.json.decode(content, type=_Format1)
    return msgspec.convert(past.next(), type=Described), past.was_edited()


def _by(content: bytes) -> str:
    """Name the version that wrote a description, where that may be why it cannot be read."""
    try:
        by = msgspec.json.decode(content, type=_Version).written_by
    except (ValueError, msgspec.DecodeError, RecursionError):
        return ""  # it is damaged beyond that
    return f"; Fullwire {_plain(by)} wrote it" if by not in ("", __version__) else ""


def _too_new(version: _Version) -> str:
    by = f"Fullwire {_plain(version.written_by)}" if version.written_by else "a newer version"
    return (
        f"format {version.format}: {by} wrote and reads it; "
        f"this is Fullwire {__version__}, which reads up to format {FORMAT}"
    )


def _plain(version: str) -> str:
    return version if re.fullmatch(r"[\w.+-]{1,40}", version, re.ASCII) else shown(version)


def _content(place: Path) -> bytes:
    path = place / DESCRIPTION
    try:
        if not place.is_dir():
            raise UsageError(f"{place}: expected a run, which is a directory; there is none")
        if not path.is_file():
            raise DamagedInput(
                place, "no run.json in it: not a run, or one that was never finished"
            )
        if strange := planted(path, place):
            raise DamagedInput(path, strange)
        with path.open("rb") as file:
            content = file.read(LARGEST_DESCRIPTION + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_DESCRIPTION:
        raise DamagedInput(path, f"larger than {LARGEST_DESCRIPTION} bytes")
    return content
