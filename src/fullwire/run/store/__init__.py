"""A Run on disk: a directory of Parquet tables and one run.json.

    job.run/run.json             format number, provenance, facts, what is missing, rows per table,
                                 and the CRC-32 of every file as it was written
    job.run/TABLE.parquet        a table with rows; tables without rows have no file
    job.run/TABLE/*.parquet      or a table in numbered pieces; pieces of one number belong
                                 together, as `RunWriter` was given them: whole steps of ranks
    job.run/packets/*.pcapng     what was captured beside the job; other tools read it, too

Format 1: the tables of `fullwire.run.run`.

A run is written beside its place and moved there when it is whole, so a crash leaves nothing that
opens as complete; what it leaves is a hidden directory `.NAME.writing-*`. Reading believes nothing:
a table that is missing, truncated, changed or of another shape leaves a run that opens, with a
sentence in `missing`; without a readable run.json there is no run. A run.json that was edited by
hand still opens, and `missing` says that it was. A file without a CRC is taken as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from fullwire.errors import DamagedInput, UsageError
from fullwire.files import planted
from fullwire.run.facts import Facts, FactValue, named
from fullwire.run.run import TABLES, AnyTable, Basis, Origin, Provenance, Run, Spans, Table
from fullwire.units import shown

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
MOST_ROWS = 100_000_000  # of one table in memory: some 5 GB
PIECE_ROWS = 60_000  # of all tables together, where a run is written part by part: some 3 MB
_LARGEST_DESCRIPTION = 16 * 2**20
CAPTURES = "packets"
_DESCRIPTION = "run.json"
_SCRATCH = "scratch"
_BATCH_ROWS = 50_000  # of `read_rows`
_READ_BYTES = 2**20
_LONGEST_REASON = 200  # characters; a Parquet error can quote a whole schema

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _StoredProvenance(msgspec.Struct, forbid_unknown_fields=True):
    origin: Origin
    source: str
    basis: Basis


class _StoredRun(msgspec.Struct, forbid_unknown_fields=True):
    """The shape of run.json in format 1."""

    format: int
    provenance: _StoredProvenance
    facts: dict[str, _Int64 | float | str | list[tuple[float, float]]]
    missing: list[str]
    rows: dict[str, _Count]
    crc32: dict[str, int] = {}  # msgspec copies it for each instance


class _FormatOnly(msgspec.Struct):
    format: int


def write(run: Run, path: str | Path, *, replace: bool = False) -> Path:
    """Write a run so that it appears whole or not at all."""
    if not isinstance(run, Run):
        raise UsageError(f"write: expected a Run, got {shown(run)}")
    if not isinstance(replace, bool):  # "no" would count as yes
        raise UsageError(f"replace: expected True or False, got {shown(replace)}")
    with RunWriter(path, replace=replace) as writer:
        writer.add(**dict(run.tables()))
        return writer.finish(run.provenance, run.facts, run.missing)


class RunWriter:
    """Writes a run of which only a part is in memory; it appears whole, at `finish`, or not at all.

    What is added together stays together: see `read_parts`. A run that fits into one piece is
    written like any other, with one file for each table.
    """

    def __init__(self, path: str | Path, *, replace: bool = False) -> None:
        self._place = new_place(path)
        self._replace = replace
        self._building = self._place.with_name(f".{self._place.name}.writing-{os.urandom(4).hex()}")
        self._waiting: dict[str, list[Table]] = {name: [] for name in TABLES}
        self._rows = dict.fromkeys(TABLES, 0)
        self._pieces = 0

    def __enter__(self) -> RunWriter:
        try:
            refuse_taken(self._place, self._replace)
            self._building.mkdir(parents=True)
        except OSError as error:
            raise self.refusal(error) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._building, ignore_errors=True)  # gone already if all went well

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
        """A directory for what is needed while the run is written, and no longer."""
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

    def finish(self, provenance: Provenance, facts: Facts, missing: Sequence[str]) -> Path:
        """Write what still waits and the description, and move the run to its place."""
        outline = Run(provenance=provenance, facts=facts, missing=tuple(missing))
        rows = {name: count for name, count in self._rows.items() if count}
        try:
            shutil.rmtree(self._building / _SCRATCH, ignore_errors=True)
            self._write_rest()
            _write_synced(
                self._building / _DESCRIPTION,
                _description(outline, rows, dict(_crcs(self._building))),
            )
            _sync_directory(self._building)
            _put_in_place(self._building, self._place)
        except OSError as error:
            raise self.refusal(error) from None
        return self._place

    def _write_rest(self) -> None:
        if self._pieces:
            self._write_piece()
            return
        for name, table in self._taken():
            _write_table(table, self._building / f"{name}.parquet")

    def _write_piece(self) -> None:
        try:
            self.piece().write(dict(self._taken()))
        except OSError as error:
            raise self.refusal(error) from None

    def _taken(self) -> Iterator[tuple[str, Table]]:
        """Give away what waits, by table."""
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

    Each of its files appears whole, so it does not matter if one of two writers ends in between.
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
                _write_table(table, writing)
                writing.replace(directory / f"{self.number:06}.parquet")
                _sync_directory(directory)
        pa.default_memory_pool().release_unused()  # else it keeps what several pieces took
        return {name: len(table) for name, table in tables.items()}


def read_run(path: str | Path, *, only: Collection[str] = tuple(TABLES)) -> Run:
    """Open a run, or some of its tables; what is damaged is left out and named in `missing`."""
    place = Path(path)
    stored = _read_description(place)
    missing = [*stored.missing, *_edited(stored), *_unknown_tables(stored)]
    tables = {}
    for name in only:
        table = _read_table(place, name, TABLES[name], stored, missing)
        if table is not None:
            tables[name] = table
    return _run_of(place, stored, tables, missing)


def counted(path: str | Path) -> tuple[Run, Mapping[str, int]]:
    """Open a run without its rows, and count those that can be read, a file at a time."""
    place = Path(path)
    stored = _read_description(place)
    missing = [*stored.missing, *_edited(stored), *_unknown_tables(stored)]
    found: dict[str, int] = {}
    for name, kind in TABLES.items():
        rows, files = stored.rows.get(name, 0), table_files(place, name)
        found[name] = sum(map(len, _pieces(place, files, kind, stored, rows, missing)))
        missing += _about_rows(name, rows, files, found[name])
    outline = _run_of(place, stored, {}, missing)
    return outline, {name: count for name, count in found.items() if count}


def rows_written(path: str | Path) -> Mapping[str, int]:
    """Return how many rows each table of a run had when it was written."""
    return _read_description(Path(path)).rows


def read_parts(path: str | Path, *, only: Collection[str] = tuple(TABLES)) -> Iterator[Run]:
    """Open a run a piece at a time, where it was written so; a step of a rank is in one piece.

    Each part has the facts of the whole, and says in `missing` what is missing from this part.
    """
    place = Path(path)
    stored = _read_description(place)
    numbers = sorted({file.name for name in only for file in (place / name).glob("*.parquet")})
    if not numbers:
        yield read_run(path, only=only)
    for number in numbers:
        missing: list[str] = []
        tables: dict[str, Table] = {}
        for name in only:
            files = [file for file in [place / name / number] if file.exists()]
            rows = stored.rows.get(name, 0)
            for piece in _pieces(place, files, TABLES[name], stored, rows, missing):
                tables[name] = piece
        yield _run_of(place, stored, tables, missing)


@dataclass(frozen=True, eq=False, slots=True)
class ByRanks:
    """A run of many ranks whose spans are read some ranks at a time, in order of rank.

    Its outline is the run with few of its spans: those named `step` or `backward`, all of the first
    ranks, and of a rank without marks of steps what begins first and what ends last.
    """

    outline: Run
    _place: Path
    _stored: _StoredRun
    _groups: tuple[tuple[Path, ...], ...]

    def spans(self) -> Iterator[Spans]:
        """Go through the ranks' spans; whatever cannot be read is in `missing` of the outline."""
        for files in self._groups:
            yield _spans_in(self._place, files, self._stored, [])


def by_ranks(path: str | Path, least_rows: int) -> ByRanks | None:
    """Open a run that is to be read by ranks; None for one that is small, or not written so."""
    place = Path(path)
    stored = _read_description(place)
    if stored.rows.get("spans", 0) < least_rows:
        return None
    groups = _rank_groups(place)
    if len(groups) < 2:
        return None
    missing: list[str] = []
    found, count = [], 0
    for files in groups:
        spans = _spans_in(place, files, stored, missing)
        found.append(_telling(spans, is_first=not count))
        count += len(spans)
    missing += _about_rows("spans", stored.rows["spans"], groups[0], count)
    rest = read_run(place, only=[name for name in TABLES if name != "spans"])
    tables = dict(rest.tables()) | {"spans": Spans.joined(found)}
    outline = _run_of(place, stored, tables, [*rest.missing, *missing])
    return ByRanks(outline, place, stored, groups)


def _rank_groups(place: Path) -> tuple[tuple[Path, ...], ...]:
    """Put the files of spans together that share ranks, as what Parquet notes of them tells.

    Damaged files come last, for somebody to say so; there is no group where a file notes nothing.
    """
    import pyarrow as pa

    ranges: list[tuple[int, int, Path]] = []
    damaged: list[Path] = []
    for path in table_files(place, "spans"):
        try:
            ranges.append((*_ranks_in(path), path))
        except (pa.ArrowException, OSError):
            damaged.append(path)
        except (AttributeError, IndexError, TypeError, ValueError):
            return ()
    groups: list[list[Path]] = []
    reached = 0
    for first, last, path in sorted(ranges):
        if not groups or first > reached:
            groups.append([])
        groups[-1].append(path)
        reached = max(reached, last)
    return (*(tuple(sorted(group)) for group in groups), *((path,) for path in damaged))


def _ranks_in(path: Path) -> tuple[int, int]:
    """Return the first and the last rank in a file; what it lacks is an error of Python's."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pa.OSFile(os.fsencode(path)) as file:
        parquet = pq.ParquetFile(file)
        column = parquet.schema_arrow.get_field_index("rank")
        noted = [
            parquet.metadata.row_group(number).column(column).statistics
            for number in range(parquet.metadata.num_row_groups)
        ]
    return int(min(each.min for each in noted)), int(max(each.max for each in noted))


def _spans_in(
    place: Path, files: Collection[Path], stored: _StoredRun, missing: list[str]
) -> Spans:
    rows = stored.rows.get("spans", 0)
    return Spans.joined(list(_pieces(place, list(files), Spans, stored, rows, missing)))


def _telling(spans: Spans, *, is_first: bool) -> Spans:
    """Choose the spans that an outline holds."""
    if is_first or not len(spans):
        return spans
    kept = (spans.name == "step") | (spans.name == "backward")
    is_unmarked = ~np.isin(spans.rank, spans.rank[(spans.name == "step") & (spans.lane == "host")])
    for order in (
        np.lexsort((spans.start_ns, spans.rank)),
        np.lexsort((-spans.end_ns, spans.rank)),
    ):
        ranks = spans.rank[order]
        kept[order[np.append([True], ranks[1:] != ranks[:-1]) & is_unmarked[order]]] = True
    return spans.rows(kept)


def read_rows(path: str | Path, name: str, missing: list[str]) -> Iterator[Table]:
    """Go through one table a few rows at a time, however it was written; damage is noted."""
    import pyarrow as pa

    place = Path(path)
    stored = _read_description(place)
    for file in table_files(place, name):
        piece = str(file.relative_to(place))
        try:
            yield from _batches(file, TABLES[name], stored.crc32.get(piece))
        except (pa.ArrowException, OSError, ValueError, UsageError) as error:
            missing.append(f"{piece}: damaged, not read ({_reason(error)})")


def _run_of(
    place: Path, stored: _StoredRun, tables: Mapping[str, Table], missing: Sequence[str]
) -> Run:
    try:
        return Run(
            provenance=Provenance(
                origin=stored.provenance.origin,
                source=stored.provenance.source,
                basis=stored.provenance.basis,
            ),
            facts=named({name: _fact(value) for name, value in stored.facts.items()}),
            missing=tuple(missing),
            **tables,  # type: ignore[arg-type]  # by name from TABLES, which names the fields
        )
    except UsageError as error:  # what a person cannot have typed: the file says something odd
        raise DamagedInput(place / _DESCRIPTION, str(error)) from None


def unread(run: Run, names: Collection[str]) -> tuple[str, ...]:
    """Return what reading these tables of a run said, where it could not read all of them."""
    return tuple(
        each
        for each in run.missing
        for name in names
        if each.startswith((f"{name}: ", f"{name}.parquet: ", f"{name}/"))
    )


def is_run(path: Path) -> bool:
    """Say whether a path holds a run, whole or not."""
    return path.is_dir() and (path / _DESCRIPTION).is_file()


def table_files(path: Path, name: str) -> list[Path]:
    """List the Parquet files of one table, in the order in which they are read."""
    whole = path / f"{name}.parquet"
    return ([whole] if whole.exists() else []) + sorted((path / name).glob("*.parquet"))


def new_place(path: str | Path) -> Path:
    """Return where a new run is to be, unless nothing can be made there."""
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise UsageError(f"write: expected a path, got {shown(path)}")
    place = Path(path)
    if place.name in ("", ".."):
        raise UsageError(f"write: expected the name of a new run, got {shown(str(path))}")
    return place


def refuse_taken(place: Path, replace: bool) -> None:
    """Refuse a place where something is, unless it is a run, nothing else, and may be replaced."""
    if not os.path.lexists(place):
        return
    if not replace:
        raise UsageError(f"{place} exists: name another, or ask for --force to replace it")
    if place.is_symlink() or not is_run(place):
        raise UsageError(f"{place} exists and is not a run, so it is not replaced")
    ours = {_DESCRIPTION, CAPTURES, *TABLES, *(f"{name}.parquet" for name in TABLES)}
    for other in sorted({entry.name for entry in place.iterdir()} - ours):
        raise UsageError(f"{place} holds {other}, which is no part of a run: it is not replaced")


def _crcs(building: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(building.rglob("*.parquet")):
        yield str(path.relative_to(building)), _crc32(path)


def _write_table(table: Table, path: Path) -> None:
    import pyarrow as pa

    # What pyarrow.parquet writes with; that loads clients of clouds besides, for 25 ms and 10 MB.
    from pyarrow._parquet import ParquetWriter

    values = table.columns()
    rows = pa.table({column: _to_arrow(each) for column, each in values.items()})
    with path.open("wb") as file:
        # Times and counts grow by little, or not at all: their differences are small. A dictionary
        # of all that occurs, which is the default, is larger, slower and needs more memory.
        writer = ParquetWriter(
            file,
            rows.schema,
            version="2.6",
            writer_engine_version="V2",
            compression="zstd",
            use_dictionary=[name for name, each in values.items() if each.dtype == np.object_],
            column_encoding={
                name: "DELTA_BINARY_PACKED"
                for name, each in values.items()
                if each.dtype == np.int64
            },
        )
        writer.write_table(rows)
        writer.close()
        file.flush()
        os.fsync(file.fileno())


def _to_arrow(values: np.ndarray[Any, Any]) -> pa.Array:
    """Hand a column over; what would load more of Arrow and numpy, for 0.1 s, is done here."""
    import pyarrow as pa

    if values.dtype != np.object_:
        kind = pa.from_numpy_dtype(values.dtype)
        buffer = pa.py_buffer(np.ascontiguousarray(values))
        return pa.Array.from_buffers(kind, len(values), [None, buffer])
    texts = values.tolist()  # names repeat: each is stored once
    number = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    codes = np.fromiter(map(number.__getitem__, texts), np.int32, len(texts))
    indices = pa.Array.from_buffers(pa.int32(), len(texts), [None, pa.py_buffer(codes)])
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(number), pa.string()))


def _description(run: Run, rows: dict[str, int], crc32: dict[str, int]) -> bytes:
    stored = _StoredRun(
        format=FORMAT,
        provenance=_StoredProvenance(
            origin=run.provenance.origin, source=run.provenance.source, basis=run.provenance.basis
        ),
        facts={
            name: list(v) if isinstance(v, tuple) else v for name, v in run.facts.known().items()
        },
        missing=list(run.missing),
        rows=rows,
        crc32=crc32,
    )
    stored.crc32[_DESCRIPTION] = _own_crc32(stored)
    content = msgspec.json.format(msgspec.json.encode(stored), indent=1)
    try:
        problem = "" if _decoded(content) == stored else "they read back as others"
    except (ValueError, msgspec.DecodeError) as error:
        problem = str(error)
    if problem or len(content) > _LARGEST_DESCRIPTION:
        problem = problem or f"they take {len(content):,} bytes of at most {_LARGEST_DESCRIPTION:,}"
        raise UsageError(f"the facts of this run cannot be written: {problem}")
    return content


def _own_crc32(stored: _StoredRun) -> int:
    """Return the CRC of what run.json says, without itself and whatever the spaces."""
    others = {name: crc for name, crc in stored.crc32.items() if name != _DESCRIPTION}
    return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(stored, crc32=others)))


def _put_in_place(building: Path, place: Path) -> None:
    """Move a whole run to its place; the run that was there is whole until the new one is."""
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


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_description(place: Path) -> _StoredRun:
    path = place / _DESCRIPTION
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
            content = file.read(_LARGEST_DESCRIPTION + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > _LARGEST_DESCRIPTION:
        raise DamagedInput(path, f"larger than {_LARGEST_DESCRIPTION} bytes")
    try:
        number = msgspec.json.decode(content, type=_FormatOnly).format
        if number > FORMAT:
            raise DamagedInput(
                path, f"format {number}: this version reads up to {FORMAT}, a newer one is needed"
            )
        return _decoded(content)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise DamagedInput(path, f"not the description of a run: {error}") from None


def _decoded(content: bytes) -> _StoredRun:
    stored = msgspec.json.decode(content, type=_StoredRun)
    if stored.format < 1:
        raise ValueError(f"there is no format {stored.format}")
    json.loads(content.decode(), object_pairs_hook=_refuse_twice)
    return stored


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    """Refuse a key that is given twice, where a decoder keeps the last and says nothing."""
    names = [name for name, _ in pairs]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            raise ValueError(f"{shown(name)} is given {names.count(name)} times")


def _edited(stored: _StoredRun) -> Iterator[str]:
    written = stored.crc32.get(_DESCRIPTION)
    if stored.crc32 and written != _own_crc32(stored):
        yield f"{_DESCRIPTION}: it was changed after it was written"


def _unknown_tables(stored: _StoredRun) -> Iterator[str]:
    for name in sorted(stored.rows.keys() - TABLES.keys()):
        yield f"{shown(name)}: {stored.rows[name]} rows of a table that this version does not know"


def _read_table(
    place: Path, name: str, kind: type[Table], stored: _StoredRun, missing: list[str]
) -> Table | None:
    rows, files = stored.rows.get(name, 0), table_files(place, name)
    pieces = list(_pieces(place, files, kind, stored, rows, missing))
    missing += _about_rows(name, rows, files, sum(map(len, pieces)))
    return kind.joined(pieces) if pieces else None


def _about_rows(name: str, rows: int, files: Collection[Path], found: int) -> Iterator[str]:
    if rows and not files:
        yield f"{name}: {rows} rows were written, the file is gone"
    elif found and found != rows:
        yield f"{name}: {rows} rows were written, {found} can be read"


def _pieces(
    place: Path,
    files: list[Path],
    kind: type[AnyTable],
    stored: _StoredRun,
    rows: int,
    missing: list[str],
) -> Iterator[AnyTable]:
    """Read the files that can be believed; no more rows are taken than were written."""
    import pyarrow as pa

    for path in files:
        name = str(path.relative_to(place))
        try:
            piece = _read_piece(path, kind, stored.crc32.get(name), min(rows, MOST_ROWS))
        except (pa.ArrowException, OSError, ValueError, UsageError) as error:
            missing.append(f"{name}: damaged, not read ({_reason(error)})")
            continue
        rows -= len(piece)
        yield piece


def _read_piece(path: Path, kind: type[AnyTable], crc32: int | None, most_rows: int) -> AnyTable:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if strange := planted(path, path.parent):  # a pipe would be waited for
        raise ValueError(strange)
    if crc32 is not None and crc32 != _crc32(path):
        raise ValueError("it is not as it was written")
    # Arrow's own file: its threads may be at work when the process ends, where Python's are gone.
    with pa.OSFile(os.fsencode(path)) as file:
        parquet = pq.ParquetFile(file)
        if parquet.metadata.num_rows > most_rows:
            raise ValueError(f"{parquet.metadata.num_rows} rows, expected at most {most_rows}")
        wanted = kind.column_types()
        table = parquet.read(columns=list(wanted))
    return kind(**{name: _from_arrow(table, name, kind) for name, kind in wanted.items()})


def _batches(path: Path, kind: type[Table], crc32: int | None) -> Iterator[Table]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if crc32 is not None and crc32 != _crc32(path):
        raise ValueError("it is not as it was written")
    wanted = kind.column_types()
    with pa.OSFile(os.fsencode(path)) as file:
        for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=list(wanted)):
            table = pa.Table.from_batches([batch])
            yield kind(**{name: _from_arrow(table, name, type_) for name, type_ in wanted.items()})
    pa.default_memory_pool().release_unused()  # else it keeps what many files took


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            crc = zlib.crc32(part, crc)
    return crc


def _from_arrow(table: pa.Table, name: str, wanted: type[np.generic]) -> np.ndarray[Any, Any]:
    import pyarrow as pa

    if table.column_names.count(name) != 1:
        raise ValueError(f"expected one column {name}, got {table.column_names.count(name)}")
    column = table.column(name)
    if column.null_count:
        raise ValueError(f"{name}: {column.null_count} values are missing")
    if wanted is np.object_:
        return _texts(name, column)
    is_taken = pa.types.is_integer if wanted is np.int64 else pa.types.is_floating
    if not is_taken(column.type):
        raise ValueError(f"{name}: expected {np.dtype(wanted)}, got {column.type}")
    if column.type != pa.from_numpy_dtype(wanted):  # a cast, which is rare, loads all of compute
        column = column.cast(pa.from_numpy_dtype(wanted))
    return np.asarray(column.to_numpy(), wanted)


def _texts(name: str, column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return a column of text in which equal values are one object."""
    import pyarrow as pa

    is_encoded = pa.types.is_dictionary(column.type)
    type_ = column.type.value_type if is_encoded else column.type
    if not (pa.types.is_string(type_) or pa.types.is_large_string(type_)):
        raise ValueError(f"{name}: expected text, got {column.type}")
    encoded = column if is_encoded else column.dictionary_encode()
    chunks = [
        np.array(chunk.dictionary.to_pylist(), object)[chunk.indices.to_numpy()]
        for chunk in encoded.chunks
    ]
    return np.concatenate([np.empty(0, object), *chunks])


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)  # without the path, which is said before
    first = text.partition("\n")[0].rstrip(".") or type(error).__name__
    return first if len(first) <= _LONGEST_REASON else first[:_LONGEST_REASON] + "..."


def _fact(value: int | float | str | list[tuple[float, float]]) -> FactValue:
    return tuple((size, time) for size, time in value) if isinstance(value, list) else value
