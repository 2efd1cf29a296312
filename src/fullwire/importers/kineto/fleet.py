"""Traces of many ranks, read side by side and written rank by rank: memory does not grow with them.

    scan      each trace becomes tables, which wait in a file, and an outline
    compare   once all outlines are known, each rank's collectives are numbered, and give their ends
    place     once all clocks are known, each rank's tables become a piece of the run

Each is done by a crew, one trace at a time in each process. A task may be done twice, if a node of
Ray is lost: so what it writes appears whole, and what it reads stays until its result is here.

What is in memory of all ranks is their outlines and the ends of at most 20,000 collectives each, 16
bytes an end.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fullwire.crew import HERE, Crew, crew
from fullwire.errors import DamagedInput, UsageError
from fullwire.importers.kineto.assemble import Job, Move, Naming
from fullwire.importers.kineto.clocks import Ends, ends_of
from fullwire.importers.kineto.rank import Outline, Tables, read_rank
from fullwire.importers.kineto.recognise import asked_for
from fullwire.importers.kineto.scan import scanned
from fullwire.run.store import Piece, RunWriter

_MOST_PROCESSES = 16  # unless asked for: each takes some 100 MB
_WORTH_A_POOL_BYTES = 16 * 2**20  # of files: less is read before a pool has started


def import_kineto(
    paths: Sequence[Path],
    files: Sequence[Path],
    place: str | Path,
    *,
    communication: str | None = None,
    logs: Sequence[Path] = (),
    left_out: Sequence[str] = (),
    processes: int | None = None,
    on: str = HERE,
    replace: bool = False,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Path:
    """Write the run of many ranks' traces and NCCL's `logs`, and say what was `left_out`.

    The files are those that the asked-for paths stand for.
    `told` hears how many of how many traces are read.
    """
    asked_for(communication)  # refused before anything is read
    with (
        RunWriter(place, replace=replace) as writer,
        _crew(on, processes, files, paths, writer) as readers,
    ):
        try:
            scans = [(path, writer.scratch / str(number)) for number, path in enumerate(files)]
            found: list[Outline | str] = []
            for outline in readers.each(partial(_scan, communication), scans):
                found.append(outline)
                told(len(found), len(files))
            job = Job(found)
            job.refuse_nothing(paths)
            waiting = {rank: scans[number][1] for rank, number in sorted(job.traces.items())}
            # Clocks of all ranks are compared; then each rank's tables go where they belong.
            naming = job.naming()
            ends = readers.each(partial(_ends, naming), list(waiting.values()))
            places = job.places(dict(zip(waiting, ends, strict=True)))
            tasks = [
                _Place(rank, tables, places.moves[rank], writer.piece())
                for rank, tables in waiting.items()
            ]
            for task, rows in zip(tasks, readers.each(partial(_place, naming), tasks), strict=True):
                writer.took(rows)
                task.waiting.unlink()
            run = job.outline(paths, places.clocks)
            if logs:
                from fullwire.importers.nccl_log import with_logs  # here: few jobs have any

                run = with_logs(run, logs)
        except OSError as error:
            raise writer.refusal(error) from None
        return writer.finish(run.provenance, run.facts, (*run.gaps, *left_out))


@dataclass(frozen=True, slots=True)
class _Place:
    """One rank that is to be written."""

    rank: int
    waiting: Path
    move: Move
    piece: Piece


def _scan(communication: str | None, task: tuple[Path, Path]) -> Outline | str:
    """Make tables of a trace, which wait in a file; or say why there are none."""
    path, waiting = task
    try:
        outline, tables = read_rank(scanned(path), asked_for(communication))
    except DamagedInput as error:
        return str(error)
    writing = waiting.with_name(f"{waiting.name}-{os.urandom(4).hex()}")
    writing.write_bytes(pickle.dumps(tables, protocol=5))
    writing.replace(waiting)
    return outline


def _ends(naming: Naming, waiting: Path) -> Ends:
    return ends_of(naming.of(_waiting(waiting)))


def _place(naming: Naming, task: _Place) -> dict[str, int]:
    tables = _waiting(task.waiting)
    found = task.move.placed(task.rank, tables, naming.of(tables))
    return task.piece.write(
        {"spans": found.spans, "gradients": found.gradients, "collectives": found.collectives}
    )


def _waiting(path: Path) -> Tables:
    tables = pickle.loads(path.read_bytes())  # `_scan` wrote it a moment ago
    assert isinstance(tables, Tables)
    return tables


def _crew(
    on: str, processes: int | None, files: Sequence[Path], paths: Sequence[Path], writer: RunWriter
) -> AbstractContextManager[Crew]:
    """Gather those who read: none but this process, if it is enough."""
    if on != HERE:
        if processes is not None:
            raise UsageError("--processes is for work that is done here, not on Ray")
        return crew(on, shared=[*filter(Path.exists, paths), writer.scratch])
    if processes is None:
        total_bytes = 0
        for path in files:
            with contextlib.suppress(OSError):  # said when it is read
                total_bytes += path.stat().st_size
        is_small = total_bytes < _WORTH_A_POOL_BYTES
        processes = 1 if is_small else min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    return crew(processes=min(processes, max(len(files), 1)))
