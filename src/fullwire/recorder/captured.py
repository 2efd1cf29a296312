"""The packet captures of a job: its flows on the run's clock, and the captures themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fullwire.errors import DamagedInput, UsageError
from fullwire.packets.pcap import read_captures
from fullwire.recorder.journals import files_in
from fullwire.recorder.sampler import CAPTURE_SUFFIX, CAPTURING_SUFFIX
from fullwire.run.run import AnyTable, Run
from fullwire.run.store import CAPTURES


def read_captured(directories: Sequence[Path], zero_ns: int) -> tuple[Run | None, list[str]]:
    """Return the captured flows, if there are any, and the problems of the captures.

    `zero_ns` is the wall clock's time when the run began.
    """
    broken_off = files_in(directories, CAPTURING_SUFFIX)
    captures = [*files_in(directories, CAPTURE_SUFFIX), *broken_off]
    missing = [f"{path.name}: captured until it was killed or the disk full" for path in broken_off]
    if not captures:
        return None, missing
    try:
        run = read_captures(captures, [path.name.rsplit("-", 2)[0] for path in captures])
    except DamagedInput as error:  # killed before its first write
        return None, [*missing, str(error)]
    return dataclasses.replace(
        run,
        flows=_since(run.flows, zero_ns),
        connections=_since(run.connections, zero_ns),
        messages=_since(run.messages, zero_ns),
    ), missing


def _since(table: AnyTable, zero_ns: int) -> AnyTable:
    """Return a table whose times count from `zero_ns`; a time of 0 stays 0 and means never."""
    columns = table.columns()
    for name in columns.keys() & {"start_ns", "end_ns", "begin_ns", "first_ns", "last_ns"}:
        columns[name] = np.where(columns[name] > 0, columns[name] - zero_ns, 0)
    return type(table)(**columns)


def put_captures(directory: Path, run: Path) -> None:
    """Move a job's captures into its run, and name them by their hosts."""
    captures = [*files_in([directory], CAPTURE_SUFFIX), *files_in([directory], CAPTURING_SUFFIX)]
    try:
        for path in captures:
            (run / CAPTURES).mkdir(exist_ok=True)
            path.rename(run / CAPTURES / path.with_suffix(CAPTURE_SUFFIX).name)
    except OSError as error:
        raise UsageError(f"{run}: cannot hold its captures: {error.strerror}") from None
