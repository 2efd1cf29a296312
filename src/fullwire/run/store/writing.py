"""Writes a run beside its place and moves it there when it is complete.

After a crash, the place holds no partial run. A hidden directory `.NAME.writing-*` may remain
beside it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from fullwire.errors import UsageError
from fullwire.run.facts import Facts
from fullwire.run.gaps import Gap, gaps_of
from fullwire.run.run import TABLES, Provenance, Run, Table
from fullwire.run.store.description import DESCRIPTION, encoded
from fullwire.run.store.parquet import file_crc32, write_table
from fullwire.run.store.places import CAPTURES, MOST_ROWS, is_run
from fullwire.units import shown

PIECE_ROWS = 60_000  # of all tables together, where a run is written part by part: some 3 MB
PRIVATE = 0o700  # the mode of a folder that only its user may enter
_SCRATCH = "scratch"
# bytes that a file system takes; the prefix and suffix that we add need some of them
_LONGEST_NAME = 255
_RANDOM_BYTES = 4


def write(run: Run, path: str | Path, *, replace: bool = False) -> Path:
    """Write a run so that it appears whole or not at all."""
    if not isinstance(run, Run):
        raise UsageError(f"write: expected a Run, got {shown(run)}")
    if not isinstance(replace, bool):  # "no" would count as yes
        raise UsageError(f"replace: expected True or False, got {shown(replace)}")
    with RunWriter(path, replace=replace) as writer:
        writer.add(**dict(run.tables()))
        return writer.finish(run.provenance, run.facts, run.gaps)


class RunWriter:
    """Writes a run of which only a part is in memory; it appears whole, at `finish`, or not at all.

    Rows that are added together stay together: see `read_parts`. A run that fits into one piece is
    written like any other, with one file for each table. Others may read a run as the umask says,
    and not at all if it is `private`.
    """

    def __init__(self, path: str | Path, *, replace: bool = False, private: bool = False) -> None:
        self._place = new_place(path)
        self._mode = PRIVATE if private else 0o777
        self._replace = replace
        self._building = self._place.with_name(
            f".{self._place.name}.writing-{os.urandom(_RANDOM_BYTES).hex()}"
        )
        self._waiting: dict[str, list[Table]] = {name: [] for name in TABLES}
        self._rows = dict.fromkeys(TABLES, 0)
        self._pieces = 0

    def __enter__(self) -> RunWriter:
        try:
            refuse_taken(self._place, self._replace)
            if not self._building.parent.exists():
                self._building.parent.mkdir(parents=True, exist_ok=True)
            self._building.mkdir(self._mode)
        except OSError as error:
            raise self.refusal(error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._building, ignore_errors=True)  # if all went well, it is gone already

    def add(self, **tables: Table) -> None:
        """Add rows to some tables."""
        for name, table in tables.items():
            if len(table) > MOST_ROWS:
                raise UsageError(f"{name}: {len(table):,} rows, expected at most {MOST_ROWS:,}")
        coming = sum(map(len, tables.values()))
        waiting = sum(len(table) for parts in self._waiting.values() for table in parts)
        if waiting and waiting + coming > PIECE_ROWS:
            self._write_piece()
        for name, table in tables.items():
            self._waiting[name].append(table)
            self._rows[name] += len(table)

    @property
    def scratch(self) -> Path:
        """A temporary directory, which is deleted when the run is written."""
        path = self._building / _SCRATCH
        path.mkdir(exist_ok=True)
        return path

    def piece(self) -> Piece:
        """Reserve a piece for another process to write."""
        self._pieces += 1
        return Piece(self._building, self._pieces - 1)

    def took(self, rows: Mapping[str, int]) -> None:
        """Count the rows of a piece that another process wrote."""
        for name, count in rows.items():
            self._rows[name] += count

    def finish(self, provenance: Provenance, facts: Facts, gaps: Iterable[str | Gap]) -> Path:
        """Write the remaining rows and the description, and move the run to its place."""
        outline = Run(provenance=provenance, facts=facts, gaps=gaps_of(gaps))
        rows = {name: count for name, count in self._rows.items() if count}
        building = self._building
        try:
            shutil.rmtree(building / _SCRATCH, ignore_errors=True)
            if self._pieces:
                self._write_piece()
            else:
                for name, table in self._taken():
                    write_table(table, building / f"{name}.parquet")
            crc32 = {
                str(path.relative_to(building)): file_crc32(path)
                for path in sorted(building.rglob("*.parquet"))
            }
            with (building / DESCRIPTION).open("wb") as file:
                file.write(encoded(outline, rows, crc32))
                file.flush()
                os.fsync(file.fileno())
            _sync_directory(building)
            _put_in_place(building, self._place)
        except OSError as error:
            raise self.refusal(error) from error
        return self._place

    def _write_piece(self) -> None:
        try:
            self.piece().write(dict(self._taken()))
        except OSError as error:
            raise self.refusal(error) from error

    def _taken(self) -> Iterator[tuple[str, Table]]:
        """Yield the waiting rows, by table, and forget them."""
        for name, kind in TABLES.items():
            parts = [part for part in self._waiting[name] if len(part)]
            self._waiting[name] = []
            if parts:
                yield name, kind.joined(parts)

    def refusal(self, error: OSError) -> UsageError:
        """Say why the run cannot be written."""
        return UsageError(f"{self._place}: cannot be written: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class Piece:
    """A numbered piece of a run that is being written, by this process or another, or by two.

    Each of its files appears whole, so a writer may end at any moment while the other goes on.
    """

    building: Path
    number: int

    def write(self, tables: Mapping[str, Table]) -> dict[str, int]:
        """Write the rows of some tables, and return how many of each."""
        import pyarrow as pa

        for name, table in tables.items():
            if len(table):
                directory, scratch = self.building / name, self.building / _SCRATCH
                directory.mkdir(exist_ok=True)
                scratch.mkdir(exist_ok=True)
                writing = scratch / f"{name}-{self.number:06}-{os.urandom(4).hex()}"
                write_table(table, writing)
                writing.replace(directory / f"{self.number:06}.parquet")
                _sync_directory(directory)
        pa.default_memory_pool().release_unused()  # otherwise it keeps the memory of several pieces
        return {name: len(table) for name, table in tables.items()}


def new_place(path: str | Path) -> Path:
    """Return where a new run is to be; raise an error if nothing can be made there."""
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise UsageError(f"write: expected a path, got {shown(path)}")
    place = Path(path)
    if place.name in ("", ".."):
        raise UsageError(f"write: expected the name of a new run, got {shown(str(path))}")
    longest = _LONGEST_NAME - len(".recording") - len("..writing-") - 2 * _RANDOM_BYTES
    if (length := len(os.fsencode(place.name))) > longest:
        raise UsageError(
            f"write: the name of a run may be {longest} bytes long, got one of {length}: "
            f"{shown(place.name)}"
        )
    if is_run(place.parent):
        raise UsageError(f"{place.parent} is a run: expected a place outside of it for {place}")
    return place


def refuse_taken(place: Path, replace: bool) -> None:
    """Refuse a place that is taken, unless it holds a run, only a run, and may be replaced."""
    if not os.path.lexists(place):
        return
    if not replace:
        raise UsageError(f"{place} exists: name another, or ask for --force to replace it")
    if place.is_symlink() or not is_run(place):
        raise UsageError(f"{place} exists: expected a run to replace")
    ours = {DESCRIPTION, CAPTURES, *TABLES, *(f"{name}.parquet" for name in TABLES)}
    for other in sorted({entry.name for entry in place.iterdir()} - ours):
        raise UsageError(
            f"{place} holds {other}: expected only files of a run in a place to replace"
        )


def _put_in_place(building: Path, place: Path) -> None:
    """Move a complete run to its place; the run that was there stays until the new one is there."""
    replaced = building.with_name(building.name.replace(".writing-", ".replaced-"))
    if place.exists():
        place.rename(replaced)
    try:
        building.rename(place)
    except OSError:
        if replaced.exists():
            replaced.rename(place)
        raise
    _sync_directory(place.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
