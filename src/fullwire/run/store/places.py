"""The places of files in the directory of a run."""

from __future__ import annotations

from pathlib import Path

from fullwire.run.store.description import DESCRIPTION

MOST_ROWS = 100_000_000  # of one table in memory: some 5 GB
CAPTURES = "packets"


def is_run(path: Path) -> bool:
    """Say whether a path holds a run, complete or damaged."""
    return path.is_dir() and (path / DESCRIPTION).is_file()


def table_files(path: Path, name: str) -> list[Path]:
    """List the Parquet files of one table, in the order in which they are read."""
    whole = path / f"{name}.parquet"
    return ([whole] if whole.exists() else []) + sorted((path / name).glob("*.parquet"))
