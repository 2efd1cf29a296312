"""run.json: the description of a run, besides its tables, and the check that it is intact.

A run that any past version wrote opens as one of today. The history of the format:

Format 1   The first one. `missing` holds sentences, and facts are checked by name.
Format 2   `gaps` in place of `missing`: a reason, with its table and rank, so that a reader need
           not search sentences for the name of a table. `written_by` names the version, so
           that an older one can say which reads the run. Impossible values of facts are refused.
           The CRC of run.json is of its content with its keys sorted: a fact that is declared
           between two others does not make older runs look edited.

The format number rises when programs of the old format would misread a new run. A new fact, a new
table or a new column with a default leaves the number as it is. An older program reports the
unknown fact or table, and reads the table without the column. A withdrawn fact is still read, and
dropped. Each past format has a class with its shape and a step to the next one. A recorded run of
each is below `tests/data/format-*`.
"""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fullwire.errors import DamagedInput, UsageError
from fullwire.files import planted
from fullwire.run.facts import REGISTRY, Facts, Pairs
from fullwire.run.gaps import Gap
from fullwire.run.run import TABLES, Basis, Origin, Provenance, Run
from fullwire.units import shown
from fullwire.version import __version__

FORMAT = 2
DESCRIPTION = "run.json"
LARGEST_DESCRIPTION = 16 * 2**20

Count = Annotated[int, msgspec.Meta(ge=0)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_STORED: Mapping[type, Any] = {int: _Int64, float: float, str: str, tuple: Pairs}

_WITHDRAWN = {"probe_run_s": Pairs}  # Facts of older programs: they are read and left out.
# Older programs stated the ratio 1 where a simulation had no compression.
_NO_COMPRESSION = "1"

# One field for each fact, with its declared type; unknown facts are not written.
StoredFacts = msgspec.defstruct(
    "StoredFacts",
    [
        (name, kind | msgspec.UnsetType, msgspec.UNSET)
        for name, kind in (
            *((fact.name, _STORED[fact.kind]) for fact in REGISTRY.values()),
            *_WITHDRAWN.items(),
        )
    ],
    forbid_unknown_fields=True,
)


class StoredProvenance(msgspec.Struct, forbid_unknown_fields=True):
    """Where the run comes from."""

    origin: Origin
    source: str
    basis: Basis


class StoredGap(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A reason why something is missing, with its table and rank where they are known."""

    reason: str
    table: str | None = None
    rank: int | None = None


class Described(msgspec.Struct, forbid_unknown_fields=True):
    """The shape of run.json."""

    format: int
    written_by: str
    provenance: StoredProvenance
    facts: StoredFacts  # type: ignore[valid-type]  # made of the declarations of facts
    gaps: list[StoredGap]
    rows: dict[str, Count]
    crc32: dict[str, int] = {}  # msgspec copies it for each instance

    def run(self, path: Path, gaps: tuple[Gap, ...], **tables: Any) -> Run:
        """Make a run of the description and its tables; refuse facts that no run can have."""
        try:
            return Run(
                provenance=Provenance(
                    origin=self.provenance.origin,
                    source=self.provenance.source,
                    basis=self.provenance.basis,
                ),
                facts=Facts(**self._facts()),
                gaps=gaps,
                read_from=str(path.parent),
                **tables,
            )
        except UsageError as error:  # the error is in the file, and not in a user's input
            raise DamagedInput(path, str(error)) from None

    def _facts(self) -> dict[str, Any]:
        """Return the facts in the words of today's programs."""
        facts = {
            name: value
            for name, value in msgspec.structs.asdict(self.facts).items()
            if value is not msgspec.UNSET and name not in _WITHDRAWN
        }
        is_simulated = self.provenance.origin == "simulated"
        if is_simulated and facts.get("compression") == _NO_COMPRESSION:
            del facts["compression"]
        return facts

    def said(self) -> list[Gap]:
        """Return the gaps of the run when it was written."""
        return [Gap(gap.reason, gap.table, gap.rank) for gap in self.gaps]


def encoded(run: Run, rows: dict[str, int], crc32: dict[str, int]) -> bytes:
    """Write the description of a run; refuse one that could not be read again."""
    described = Described(
        format=FORMAT,
        written_by=__version__,
        provenance=StoredProvenance(
            origin=run.provenance.origin, source=run.provenance.source, basis=run.provenance.basis
        ),
        facts=StoredFacts(**run.facts.known()),
        gaps=[StoredGap(gap.reason, gap.table, gap.rank) for gap in run.gaps],
        rows=rows,
        crc32=crc32,
    )
    described.crc32[DESCRIPTION] = content_crc32(msgspec.json.encode(described))
    content = msgspec.json.format(msgspec.json.encode(described), indent=1)
    try:
        problem = "" if decoded(content) == described else "they read back as others"
    except (ValueError, msgspec.DecodeError) as error:
        problem = str(error)
    if problem or len(content) > LARGEST_DESCRIPTION:
        problem = problem or f"they take {len(content):,} bytes of at most {LARGEST_DESCRIPTION:,}"
        raise UsageError(f"the facts of this run cannot be written: {problem}")
    return content


def decoded(content: bytes) -> Described:
    """Read a description of today's format."""
    described = msgspec.json.decode(content, type=Described)
    refuse_twice(content)
    return described


def was_edited(described: Described, content: bytes) -> bool:
    """Say whether a description was changed after it was written; believe one that lacks a CRC."""
    return bool(described.crc32) and described.crc32.get(DESCRIPTION) != content_crc32(content)


def content_crc32(content: bytes) -> int:
    """Return the CRC of the content of run.json, apart from the CRC, spaces and order of keys."""
    said = msgspec.json.decode(content)
    said["crc32"].pop(DESCRIPTION, None)
    return zlib.crc32(msgspec.json.encode(said, order="sorted"))


def refuse_twice(content: bytes) -> None:
    """Refuse a duplicate key, of which a decoder would silently keep the last."""
    json.loads(content.decode(), object_pairs_hook=_refuse_twice)


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            raise ValueError(f"{shown(name)} is given {names.count(name)} times")


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
        """Return this description in format 2."""
        gaps = []
        for sentence in self.missing:  # a sentence about a table or a rank begins with its name
            table = re.match(rf"({'|'.join(TABLES)})(?:: |\.parquet: |/)", sentence)
            rank = re.match(r"rank (\d{1,9}): ", sentence)
            gaps.append(
                StoredGap(
                    sentence,
                    None if table is None else table[1],
                    None if rank is None else int(rank[1]),
                )
            )
        return {
            "format": 2,
            "written_by": "",
            "provenance": msgspec.to_builtins(self.provenance),
            "facts": self.facts,
            "gaps": msgspec.to_builtins(gaps),
            "rows": self.rows,
            "crc32": self.crc32,
        }


def read_description(place: Path) -> Described:
    """Read run.json of today's or a past format, and note changes since it was written."""
    path = place / DESCRIPTION
    content = _content(place)
    try:
        version = msgspec.json.decode(content, type=_Version)
        if version.format == FORMAT:
            described = decoded(content)
            is_edited = was_edited(described, content)
        elif 0 < version.format < FORMAT:
            refuse_twice(content)
            past = msgspec.json.decode(content, type=_Format1)
            described = msgspec.convert(past.next(), type=Described)
            is_edited = past.was_edited()
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        problem = f"{_placed(str(error), content)}{_by(content)}"
        raise DamagedInput(path, f"not the description of a run: {problem}") from None
    if version.format < 1:
        problem = f"there is no format {version.format}{_by(content)}"
        raise DamagedInput(path, f"not the description of a run: {problem}")
    if version.format > FORMAT:
        reader = f"Fullwire {_plain(version.written_by)} wrote and reads it"
        if not version.written_by:
            reader = "a newer version wrote and reads it"
        elif version.written_by == __version__:
            reader = "this version wrote the run, so the number was changed since"
        problem = f"expected 1 to {FORMAT}, which Fullwire {__version__} reads; {reader}"
        raise DamagedInput(path, f"format {version.format}: {problem}")
    if is_edited:
        described.gaps.append(_EDITED)
    described.gaps += [
        StoredGap(f"{shown(name)}: {rows} rows of a table that this version does not know")
        for name, rows in sorted(described.rows.items())
        if name not in TABLES
    ]
    return described


def _placed(problem: str, content: bytes) -> str:
    """Name the entry of a problem, or the last field before the place that is no JSON."""
    if entries := re.search(r"\$\.(rows|crc32)\[\.\.\.\]", problem):
        with contextlib.suppress(
            ValueError, msgspec.DecodeError, RecursionError
        ):  # more is damaged
            for name, count in msgspec.json.decode(content)[entries[1]].items():
                if type(count) is not int or not 0 <= count < 2**63:
                    return problem.replace("[...]", f"[{_plain(name)}]")
    place = re.search(r"\(byte (\d+)\)$", problem)
    if "$" in problem or not (place or "truncated" in problem):
        return problem  # it names its field
    before = content[: int(place[1])] if place else content
    fields = re.findall(rb'"([\w.]{1,40})"\s*:', before)
    return f"{problem}, at or after `{fields[-1].decode()}`" if fields else problem


def _by(content: bytes) -> str:
    """Name the version that wrote a description, if that may explain why it cannot be read."""
    try:
        by = msgspec.json.decode(content, type=_Version).written_by
    except (ValueError, msgspec.DecodeError, RecursionError):
        return ""  # the damage hides even the version
    return f"; Fullwire {_plain(by)} wrote it" if by not in ("", __version__) else ""


def _plain(version: str) -> str:
    return version if re.fullmatch(r"[\w.+-]{1,40}", version, re.ASCII) else shown(version)


def _content(place: Path) -> bytes:
    path = place / DESCRIPTION
    try:
        if not place.is_dir():
            raise UsageError(f"{place}: expected a run, which is a directory, and found none")
        if not path.is_file():
            raise DamagedInput(place, "no run.json in it: expected a finished run")
        if strange := planted(path, place):
            raise DamagedInput(path, strange)
        with path.open("rb") as file:
            content = file.read(LARGEST_DESCRIPTION + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_DESCRIPTION:
        raise DamagedInput(path, f"larger than {LARGEST_DESCRIPTION} bytes")
    return content
