"""Opens a run, whole, by parts or by ranks, and checks everything that it reads.

A run opens even if a table is missing, truncated, changed or of another shape. A gap then names the
table. A run whose run.json cannot be read is refused. A file without a CRC is taken as it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fullwire.errors import UsageError
from fullwire.files import planted
from fullwire.run.gaps import Gap
from fullwire.run.run import TABLE_NAMES, TABLES, AnyTable, Run, Spans, Table
from fullwire.run.store.description import DESCRIPTION, Described, read_description
from fullwire.run.store.parquet import batches, read_piece, reason_of
from fullwire.run.store.places import MOST_ROWS, table_files


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
    kept = np.isin(spans.name, ["step", "probe", "backward"])
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
