"""A Run on disk: a directory of Parquet tables and one run.json.

    job.run/run.json             format number, provenance, facts, gaps, rows per table, and the
                                 CRC-32 of every file as it was written
    job.run/TABLE.parquet        a table with rows; tables without rows have no file
    job.run/TABLE/*.parquet      or a table in numbered pieces; pieces of one number belong
                                 together, as `RunWriter` was given them: whole steps of ranks
    job.run/packets/*.pcapng     packets captured beside the job; other tools read them, too

`description.py` holds run.json in today's format and in past ones, and `parquet.py` one table. This
module writes the whole run beside its place, and moves it there when it is complete. After a crash,
the place holds no partial run. A hidden directory `.NAME.writing-*` may remain beside it.

A run opens even if a table is missing, truncated, changed or of another shape. A gap then names the
table. A run whose run.json cannot be read is refused. A file without a CRC is taken as it is, and a
run.json that was edited by hand still opens: a gap reports the edit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from fullwire.errors import UsageError
from fullwire.files import planted
from fullwire.run.facts import Facts
from fullwire.run.gaps import Gap, gaps_of
from fullwire.run.run import MARKS, TABLE_NAMES, TABLES, AnyTable, Provenance, Run, Spans, Table
from fullwire.run.store.description import (
    DESCRIPTION,
    Described,
    encoded,
    read_description,
)
from fullwire.run.store.parquet import batches, file_crc32, read_piece, reason_of, write_table
from fullwire.units import shown

MOST_ROWS = 100_000_000  # of one table in memory: some 5 GB
CAPTURES = "packets"  # the folder of captures in a run
PIECE_ROWS = 60_000  # of all tables together, where a run is written part by part: some 3 MB
PRIVATE = 0o700  # the mode of a folder that only its user may enter
_SCRATCH = "scratch"
# bytes that a file system takes; the prefix and suffix that we add need some of them
_LONGEST_NAME = 255
_RANDOM_BYTES = 4


def is_run(path: Path) -> bool:
    """Say whether a path holds a run, complete or damaged."""
    return path.is_dir() and (path / DESCRIPTION).is_file()


def table_files(path: Path, name: str) -> list[Path]:
    """List the Parquet files of one table, in the order in which they are read."""
    whole = path / f"{name}.parquet"
    return ([whole] if whole.exists() else []) + sorted((path / name).glob("*.parquet"))


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


def read_run(path: str | Path, *, only: Collection[str] = tuple(TABLES)) -> Run:
    """Open a run, or some of its tables; leave damaged tables out and name them in `missing`."""
    place = Path(path)
    stored = read_description(place)
    gaps = stored.said()
    tables = {}
    for name in only:
        rows, files = stored.rows.get(name, 0), table_files(place, name)
        pieces = list(_pieces(place, files, TABLES[name], stored, rows, gaps))
        gaps += _about_rows(name, rows, files, sum(map(len, pieces)))
        if pieces:
            tables[name] = TABLES[name].joined(pieces)
    return _run_of(place, stored, tables, gaps)


def counted(path: str | Path) -> tuple[Run, Mapping[str, int]]:
    """Open a run without its rows, and count the readable rows, a file at a time."""
    place = Path(path)
    stored = read_description(place)
    gaps = stored.said()
    found: dict[str, int] = {}
    for name, kind in TABLES.items():
        rows, files = stored.rows.get(name, 0), table_files(place, name)
        found[name] = sum(map(len, _pieces(place, files, kind, stored, rows, gaps)))
        gaps += _about_rows(name, rows, files, found[name])
    outline = _run_of(place, stored, {}, gaps)
    return outline, {name: count for name, count in found.items() if count}


def rows_written(path: str | Path) -> Mapping[str, int]:
    """Return how many rows each table of a run had when it was written."""
    return read_description(Path(path)).rows


def read_parts(path: str | Path, *, only: Collection[str] = tuple(TABLES)) -> Iterator[Run]:
    """Open a run a piece at a time, if it was written so; a step of a rank is in one piece.

    Each part has the facts of the whole run, and its `missing` names the gaps of this part.
    """
    place = Path(path)
    stored = read_description(place)
    numbers = sorted({file.name for name in only for file in (place / name).glob("*.parquet")})
    if not numbers:
        yield read_run(path, only=only)
    for number in numbers:
        gaps: list[Gap] = []
        tables: dict[str, Table] = {}
        for name in only:
            files = [file for file in [place / name / number] if file.exists()]
            rows = stored.rows.get(name, 0)
            for piece in _pieces(place, files, TABLES[name], stored, rows, gaps):
                tables[name] = piece
        yield _run_of(place, stored, tables, gaps)


@dataclass(frozen=True, eq=False, slots=True)
class ByRanks:
    """A run of many ranks whose spans are read some ranks at a time, in order of rank.

    Its outline is the run with few of its spans: those named `step`, `probe` or `backward`, and all
    spans of the first ranks. For a rank without step marks, the outline holds the span that begins
    first and the span that ends last.
    """

    outline: Run
    _place: Path
    _stored: Described
    _groups: tuple[tuple[Path, ...], ...]

    def spans(self) -> Iterator[Spans]:
        """Yield the ranks' spans; note unreadable files in `missing` of the outline."""
        for files in self._groups:
            yield _spans_in(self._place, files, self._stored, [])


def by_ranks(path: str | Path, least_rows: int) -> ByRanks | None:
    """Open a large run rank by rank; return None for a small run or one in another order."""
    place = Path(path)
    stored = read_description(place)
    if stored.rows.get("spans", 0) < least_rows:
        return None
    groups = _rank_groups(place)
    if len(groups) < 2:
        return None
    gaps: list[Gap] = []
    found, count = [], 0
    for files in groups:
        spans = _spans_in(place, files, stored, gaps)
        found.append(_telling(spans, is_first=not count))
        count += len(spans)
    gaps += _about_rows("spans", stored.rows["spans"], groups[0], count)
    rest = read_run(place, only=[name for name in TABLES if name != "spans"])
    tables = dict(rest.tables()) | {"spans": Spans.joined(found)}
    outline = _run_of(place, stored, tables, [*rest.gaps, *gaps])
    return ByRanks(outline, place, stored, groups)


def _rank_groups(place: Path) -> tuple[tuple[Path, ...], ...]:
    """Group the files of spans that share ranks, by the statistics that Parquet keeps in each file.

    Damaged files come last, so that the reader reports them. If a file lacks statistics, there are
    no groups.
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
    """Return the first and the last rank in a file; a file without them raises a Python error."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if strange := planted(path, path.parent):  # opening a pipe would wait
        raise OSError(strange)
    with pa.OSFile(os.fsencode(path)) as file:
        parquet = pq.ParquetFile(file)
        column = parquet.schema_arrow.get_field_index("rank")
        noted = [
            parquet.metadata.row_group(number).column(column).statistics
            for number in range(parquet.metadata.num_row_groups)
        ]
    return int(min(statistics.min for statistics in noted)), int(
        max(statistics.max for statistics in noted)
    )


def _spans_in(place: Path, files: Collection[Path], stored: Described, gaps: list[Gap]) -> Spans:
    rows = stored.rows.get("spans", 0)
    return Spans.joined(list(_pieces(place, list(files), Spans, stored, rows, gaps)))


def _telling(spans: Spans, *, is_first: bool) -> Spans:
    """Choose the spans that an outline holds."""
    if is_first or not len(spans):
        return spans
    kept = np.isin(spans.name, [*MARKS, "backward", "earlier backward"])
    is_unmarked = ~np.isin(spans.rank, spans.rank[(spans.name == "step") & (spans.lane == "host")])
    for order in (
        np.lexsort((spans.start_ns, spans.rank)),
        np.lexsort((-spans.end_ns, spans.rank)),
    ):
        ranks = spans.rank[order]
        kept[order[np.append([True], ranks[1:] != ranks[:-1]) & is_unmarked[order]]] = True
    return spans.rows(kept)


def read_rows(path: str | Path, name: str, gaps: list[Gap]) -> Iterator[Table]:
    """Yield one table a few rows at a time, in whichever layout it was written; note damage."""
    import pyarrow as pa

    place = Path(path)
    stored = read_description(place)
    for file in table_files(place, name):
        piece = str(file.relative_to(place))
        try:
            yield from batches(file, TABLES[name], stored.crc32.get(piece))
        except (pa.ArrowException, OSError, ValueError, UsageError) as error:
            gaps.append(Gap(f"{piece}: damaged, not read ({reason_of(error)})", name))


def _about_rows(name: str, rows: int, files: Collection[Path], found: int) -> Iterator[Gap]:
    if rows and not files:
        yield Gap(f"{name}: {rows} rows were written, the file is gone", name)
    elif found and found != rows:
        yield Gap(f"{name}: {rows} rows were written, {found} can be read", name)


def _run_of(
    place: Path, stored: Described, tables: Mapping[str, Table], gaps: Sequence[Gap]
) -> Run:
    return stored.run(place / DESCRIPTION, tuple(gaps), **tables)


def _pieces(
    place: Path,
    files: list[Path],
    kind: type[AnyTable],
    stored: Described,
    rows: int,
    gaps: list[Gap],
) -> Iterator[AnyTable]:
    """Read the files that pass their checks, and no more rows than were written."""
    import pyarrow as pa

    table = TABLE_NAMES[kind]
    for path in files:
        name = str(path.relative_to(place))
        try:
            piece = read_piece(path, kind, stored.crc32.get(name), min(rows, MOST_ROWS))
        except (pa.ArrowException, OSError, ValueError, UsageError) as error:
            gaps.append(Gap(f"{name}: damaged, not read ({reason_of(error)})", table))
            continue
        rows -= len(piece)
        yield piece
