"""One table as a Parquet file. The reader checks a file before it uses its content."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullwire.files import planted
from fullwire.run.run import AnyTable, Table

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS = 50_000
_READ_BYTES = 2**20
_LONGEST_REASON = 200  # characters; a Parquet error can quote a whole schema


def read_piece(path: Path, kind: type[AnyTable], crc32: int | None, most_rows: int) -> AnyTable:
    """Read one file of a table; raise an error if the file fails its checks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    refuse_planted(path)
    if crc32 is not None and crc32 != file_crc32(path):
        raise ValueError("it is not as it was written")
    # Arrow's own file: Arrow's threads may still read when the process ends and Python's files are
    # gone.
    with pa.OSFile(os.fsencode(path)) as file:
        parquet = pq.ParquetFile(file)
        if parquet.metadata.num_rows > most_rows:
            raise ValueError(f"{parquet.metadata.num_rows} rows, expected at most {most_rows}")
        table = parquet.read(columns=_columns_in(parquet, kind))
    return _to_table(table, kind)


def batches(path: Path, kind: type[Table], crc32: int | None) -> Iterator[Table]:
    """Read one file of a table some rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    refuse_planted(path)
    if crc32 is not None and crc32 != file_crc32(path):
        raise ValueError("it is not as it was written")
    with pa.OSFile(os.fsencode(path)) as file:
        parquet = pq.ParquetFile(file)
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=_columns_in(parquet, kind)):
            yield _to_table(pa.Table.from_batches([batch]), kind)
    pa.default_memory_pool().release_unused()  # otherwise it keeps the memory of many files


def refuse_planted(path: Path) -> None:
    """Refuse a path that is not a plain file, before it is opened: opening a pipe would wait."""
    if strange := planted(path, path.parent):
        raise ValueError(strange)


def _columns_in(parquet: Any, kind: type[Table]) -> list[str]:
    """Name the table's columns; leave out columns with a default that the file lacks."""
    written = set(parquet.schema_arrow.names)
    return [name for name in kind.column_types() if name in written or name not in kind.defaults()]


def _to_table(table: pa.Table, kind: type[AnyTable]) -> AnyTable:
    wanted = kind.column_types()
    written = set(table.column_names)
    return kind(
        **{
            name: _from_arrow(table, name, dtype)
            for name, dtype in wanted.items()
            if name in written or name not in kind.defaults()
        }
    )


def file_crc32(path: Path) -> int:
    """Return the CRC-32 of a file."""
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
    if column.type != pa.from_numpy_dtype(wanted):  # a cast is rare, and loads all of compute
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


def reason_of(error: Exception) -> str:
    """Say in a few words why a file could not be read."""
    # without the path, which the message names before
    text = getattr(error, "strerror", None) or str(error)
    first = text.partition("\n")[0].rstrip(".") or type(error).__name__
    return first if len(first) <= _LONGEST_REASON else first[:_LONGEST_REASON] + "..."


def write_table(table: Table, path: Path) -> None:
    """Write the rows of a table as one file."""
    import pyarrow as pa

    # pyarrow.parquet uses this writer too, but also loads clients of clouds, for 25 ms and 10 MB.
    from pyarrow._parquet import ParquetWriter

    values = table.columns()
    rows = pa.table({column: _to_arrow(each) for column, each in values.items()})
    with path.open("wb") as file:
        # Times and counts grow by little, or not at all: their differences are small. A dictionary
        # of all values, the default, is larger, slower and needs more memory.
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
    """Convert a column here: pyarrow's own conversion loads more of Arrow and numpy, for 0.1 s."""
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
