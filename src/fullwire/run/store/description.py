"""run.json: what a run is, besides its tables, and whether that can be believed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fullwire import __version__
from fullwire.errors import DamagedInput, UsageError
from fullwire.run.facts import REGISTRY, Facts, Pairs
from fullwire.run.gaps import Gap
from fullwire.run.run import Basis, Origin, Provenance, Run
from fullwire.units import shown

FORMAT = 2  # `history.py` says what changed with each, and brings runs of the others here
DESCRIPTION = "run.json"
LARGEST_DESCRIPTION = 16 * 2**20

Count = Annotated[int, msgspec.Meta(ge=0)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_STORED: Mapping[type, Any] = {int: _Int64, float: float, str: str, tuple: Pairs}

# One field a fact, of its declared type; what is not known is not written.
StoredFacts = msgspec.defstruct(
    "StoredFacts",
    [
        (fact.name, _STORED[fact.kind] | msgspec.UnsetType, msgspec.UNSET)
        for fact in REGISTRY.values()
    ],
    forbid_unknown_fields=True,
)


class StoredProvenance(msgspec.Struct, forbid_unknown_fields=True):
    """Where the run comes from."""

    origin: Origin
    source: str
    basis: Basis


class StoredGap(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What is missing, of which table and rank where that is known."""

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
        """Make the run of it and of tables; refuse what no run can be."""
        try:
            return Run(
                provenance=Provenance(
                    origin=self.provenance.origin,
                    source=self.provenance.source,
                    basis=self.provenance.basis,
                ),
                facts=Facts(**_given(self.facts)),
                gaps=gaps,
                **tables,
            )
        except UsageError as error:  # what a person cannot have typed: the file says something odd
            raise DamagedInput(path, str(error)) from None

    def said(self) -> list[Gap]:
        """Return what was missing when the run was written."""
        return [Gap(each.reason, each.table, each.rank) for each in self.gaps]


def _given(facts: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in msgspec.structs.asdict(facts).items()
        if value is not msgspec.UNSET
    }


def encoded(run: Run, rows: dict[str, int], crc32: dict[str, int]) -> bytes:
    """Write the description of a run, unless it could not be read again."""
    described = Described(
        format=FORMAT,
        written_by=__version__,
        provenance=StoredProvenance(
            origin=run.provenance.origin, source=run.provenance.source, basis=run.provenance.basis
        ),
        facts=StoredFacts(**run.facts.known()),
        gaps=[StoredGap(each.reason, each.table, each.rank) for each in run.gaps],
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
    """Say whether a description is not as it was written; one without its CRC is believed."""
    return bool(described.crc32) and described.crc32.get(DESCRIPTION) != content_crc32(content)


def content_crc32(content: bytes) -> int:
    """Return the CRC of what run.json says, without itself, whatever the spaces and the order."""
    said = msgspec.json.decode(content)
    said["crc32"].pop(DESCRIPTION, None)
    return zlib.crc32(msgspec.json.encode(said, order="sorted"))


def refuse_twice(content: bytes) -> None:
    """Refuse a key that is given twice, where a decoder keeps the last and says nothing."""
    json.loads(content.decode(), object_pairs_hook=_refuse_twice)


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            raise ValueError(f"{shown(name)} is given {names.count(name)} times")
