"""Read the traces of many ranks side by side and write them rank by rank, in bounded memory.

    scan      each trace becomes tables, which wait in a file, and an outline
    compare   once all outlines are known, each rank's collectives are numbered, and give their ends
    place     once all clocks are known, each rank's tables become a piece of the run

A crew of processes does each of these, one trace at a time in each process. If a node of Ray is
lost, a task is done twice. So a task's output file appears whole or not at all, and its input file
stays until the result has arrived.

For all ranks at once, memory holds their outlines and the ends of at most 20,000 collectives each,
16 bytes an end.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fullwire.crew import HERE, Crew, crew
from fullwire.errors import DamagedInput, UsageError
from fullwire.importers.kineto.assemble import Job, Move, Naming
from fullwire.importers.kineto.clocks import Ends, ends_of
from fullwire.importers.kineto.rank import NOT_YET, Agreed, Outline, Tables, read_rank
from fullwire.importers.kineto.recognise import asked_for
from fullwire.importers.kineto.scan import scanned
from fullwire.run.store import Piece, RunWriter

_MOST_PROCESSES = 16  # unless asked for: each takes some 100 MB
_WORTH_A_POOL_BYTES = 16 * 2**20  # smaller inputs are read before a pool has started


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
    """Write the run of many ranks' traces and NCCL's `logs`; its gaps name what was `left_out`.

    `files` are the traces at the user's `paths`. `told` is called with the number of traces read so
    far and the number of all traces.
    """
    asked_for(communication)  # refuses a bad pattern before any file is read
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

            def again(places: Sequence[int], agreed: Agreed) -> Iterator[Outline | str]:
                some = [scans[place] for place in places]
                return readers.each(partial(_scan, communication, agreed=agreed), some)

            job = Job(found).as_agreed(found, again)
            job.refuse_nothing(paths)
            waiting = {rank: scans[number][1] for rank, number in sorted(job.traces.items())}
            # Compare the clocks of all ranks, then place each rank's tables.
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
                from fullwire.importers.nccl_log import with_logs  # late: few jobs have logs

                run = with_logs(run, logs)
        except OSError as error:
            raise writer.refusal(error) from None
        return writer.finish(run.provenance, run.facts, (*run.gaps, *left_out))


@dataclass(frozen=True, slots=True)
class _Place:
    """One rank to write."""

    rank: int
    waiting: Path
    move: Move
    piece: Piece


def _scan(
    communication: str | None, task: tuple[Path, Path], *, agreed: Agreed = NOT_YET
) -> Outline | str:
    """Make tables of a trace and keep them in a file; return the outline, or the problem."""
    path, waiting = task
    try:
        outline, tables = read_rank(scanned(path), asked_for(communication), agreed)
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
        {
            "spans": found.spans,
            "gradients": found.gradients,
            "collectives": found.collectives,
            "operations": found.operations,
        }
    )


def _waiting(path: Path) -> Tables:
    tables = pickle.loads(path.read_bytes())  # `_scan` wrote it a moment ago
    assert isinstance(tables, Tables)
    return tables


def _crew(
    on: str, processes: int | None, files: Sequence[Path], paths: Sequence[Path], writer: RunWriter
) -> AbstractContextManager[Crew]:
    """Start the processes that read; small inputs need only this one."""
    if on != HERE:
        if processes is not None:
            raise UsageError("--processes is for work that is done here, not on Ray")
        return crew(on, shared=[*filter(Path.exists, paths), writer.scratch])
    if processes is None:
        total_bytes = 0
        for path in files:
            with contextlib.suppress(OSError):  # reading the file reports it
                total_bytes += path.stat().st_size
        is_small = total_bytes < _WORTH_A_POOL_BYTES
        processes = 1 if is_small else min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    return crew(processes=min(processes, max(len(files), 1)))
