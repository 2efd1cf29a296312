"""A Run on disk: a directory of Parquet tables and one run.json.

    job.run/run.json             format number, provenance, facts, what is missing, rows per table
    job.run/TABLE.parquet        a table with rows; tables without rows have no file
    job.run/TABLE/*.parquet      or a table in pieces, one per group of ranks

Format 1: the tables of `fullwire.model.run`.

A run is written beside its place and moved there when it is whole, so a crash leaves nothing that
opens as complete. Reading believes nothing: a table that is missing, truncated or of another shape
leaves a run that opens, with a sentence in `missing`; without a readable run.json there is no run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fullwire.errors import DamagedInput, UsageError
from fullwire.model.facts import FactValue
from fullwire.model.run import TABLES, Basis, Origin, Provenance, Run, Table

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
SUFFIX = ".run"
_LARGEST_RUN_JSON = 16 * 2**20


class _StoredProvenance(msgspec.Struct, forbid_unknown_fields=True):
    origin: Origin
    source: str
    basis: Basis


class _StoredRun(msgspec.Struct, forbid_unknown_fields=True):
    """The shape of run.json in format 1."""

    format: int
    provenance: _StoredProvenance
    facts: dict[str, int | float | str | list[tuple[float, float]]]
    missing: list[str]
    rows: dict[str, int]


class _FormatOnly(msgspec.Struct):
    format: int


def write(run: Run, path: str | Path, *, replace: bool = False) -> Path:
    """Write a run so that it appears whole or not at all."""
    place = Path(path)
    refuse_taken(place, replace)
    building = place.with_name(f".{place.name}.writing-{os.getpid()}")
    try:
        building.mkdir(parents=True)
        _write_tables(run, building)
        _write_synced(building / "run.json", msgspec.json.format(_encoded(run), indent=1))
        _sync_directory(building)
        if place.exists():
            shutil.rmtree(place)
        building.rename(place)
        _sync_directory(place.parent)
    except OSError as error:
        raise UsageError(f"{place}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)  # gone already if all went well
    return place


def read_run(path: str | Path) -> Run:
    """Open a run; what is damaged is left out and named in `missing`."""
    place = Path(path)
    stored = _read_description(place)
    missing = list(stored.missing)
    tables = {}
    for name, kind in TABLES.items():
        table = _read_table(place, name, kind, stored.rows.get(name, 0), missing)
        if table is not None:
            tables[name] = table
    try:
        return Run(
            provenance=Provenance(
                origin=stored.provenance.origin,
                source=stored.provenance.source,
                basis=stored.provenance.basis,
            ),
            facts={name: _fact(value) for name, value in stored.facts.items()},
            missing=tuple(missing),
            **tables,  # type: ignore[arg-type]  # by name from TABLES, which names the fields
        )
    except UsageError as error:  # what a person cannot have typed: the file says something odd
        raise DamagedInput(place / "run.json", str(error)) from None


def is_run(path: Path) -> bool:
    """Say whether a path holds a run, whole or not."""
    return path.is_dir() and (path / "run.json").is_file()


def table_files(path: Path, name: str) -> list[Path]:
    """List the Parquet files of one table, in the order in which they are read."""
    whole = path / f"{name}.parquet"
    return ([whole] if whole.is_file() else []) + sorted((path / name).glob("*.parquet"))


def refuse_taken(place: Path, replace: bool) -> None:
    """Refuse a place that cannot be written: taken, and not by a run that is to be replaced."""
    if not place.exists():
        return
    if not replace:
        raise UsageError(f"{place} exists: name another, or ask for --force to replace it")
    if not is_run(place):
        raise UsageError(f"{place} exists and is not a run, so it is not replaced")


def _encoded(run: Run) -> bytes:
    stored = _StoredRun(
        format=FORMAT,
        provenance=_StoredProvenance(
            origin=run.provenance.origin, source=run.provenance.source, basis=run.provenance.basis
        ),
        facts={name: list(v) if isinstance(v, tuple) else v for name, v in run.facts.items()},
        missing=list(run.missing),
        rows={name: len(table) for name, table in run.tables() if len(table)},
    )
    return msgspec.json.encode(stored)


def _write_tables(run: Run, building: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, table in run.tables():
        if not len(table):
            continue
        columns = {column: _to_arrow(values) for column, values in table.columns().items()}
        with (building / f"{name}.parquet").open("wb") as file:
            pq.write_table(pa.table(columns), file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())


def _to_arrow(values: np.ndarray[Any, Any]) -> pa.Array:
    import pyarrow as pa

    if values.dtype == np.object_:  # names repeat: each is stored once
        return pa.array(values, pa.string()).dictionary_encode()
    return pa.array(values)


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
    path = place / "run.json"
    try:
        if not place.is_dir():
            raise UsageError(f"{place}: expected a run, which is a directory; there is none")
        if path.stat().st_size > _LARGEST_RUN_JSON:
            raise DamagedInput(path, f"larger than {_LARGEST_RUN_JSON} bytes")
        content = path.read_bytes()
    except FileNotFoundError:
        raise DamagedInput(place, "no run.json in it: not a run, or one that was never finished"
                           ) from None  # fmt: skip
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        number = msgspec.json.decode(content, type=_FormatOnly).format
        if number > FORMAT:
            raise DamagedInput(
                path, f"format {number}: this version reads up to {FORMAT}, a newer one is needed"
            )
        return msgspec.json.decode(content, type=_StoredRun)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DamagedInput(path, f"not the description of a run: {error}") from None


def _read_table(
    place: Path, name: str, kind: type[Table], rows: int, missing: list[str]
) -> Table | None:
    files = table_files(place, name)
    if not files:
        if rows:
            missing.append(f"{name}: {rows} rows were written, the file is gone")
        return None
    pieces = [piece for file in files for piece in _read_pieces(file, kind, missing)]
    if not pieces:
        return None
    table = kind(**{
        column: np.concatenate([piece[column] for piece in pieces])
        for column in kind.column_types()
    })  # fmt: skip
    if len(table) != rows:
        missing.append(f"{name}: {rows} rows were written, {len(table)} can be read")
    return table


def _read_pieces(
    path: Path, kind: type[Table], missing: list[str]
) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = path.relative_to(path.parent.parent)
    try:
        table = pq.read_table(path)
        yield {
            column: _from_arrow(table.column(column), wanted)
            for column, wanted in kind.column_types().items()
        }
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        missing.append(f"{place}: damaged, not read ({reason})")


def _from_arrow(column: pa.ChunkedArray, wanted: type[np.generic]) -> np.ndarray[Any, Any]:
    import pyarrow as pa

    if column.null_count:
        raise ValueError(f"{column.null_count} values are missing")
    if wanted is np.object_:
        return np.asarray(column.cast(pa.string()).to_numpy(zero_copy_only=False), object)
    return np.asarray(column.cast(pa.from_numpy_dtype(wanted)).to_numpy(), wanted)


def _fact(value: int | float | str | list[tuple[float, float]]) -> FactValue:
    return tuple((size, time) for size, time in value) if isinstance(value, list) else value
