"""Read runs, foreign traces and workloads as a Run: `read` looks at a path and picks the reader.

Each file of this folder is a format, which registers itself as `FORMAT`. Another package adds a
format with an entry point of the group `fullwire.importers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from fullwire.crew import HERE
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import path_of
from fullwire.importers._format import (
    CERTAIN,
    LIKELY,
    POSSIBLE,
    UNLIKE,
    Beside,
    Format,
    Likeness,
    Option,
    Options,
    Writing,
)
from fullwire.importers._recognise import (
    RUN,
    WORKLOAD,
    Given,
    check_name,
    files_among,
    files_of,
    given,
    kinds_of,
    words_of,
)
from fullwire.registry import Registry
from fullwire.run.gaps import gaps_of

if TYPE_CHECKING:
    from fullwire.importers._tables import Table
    from fullwire.run.run import Run

__all__ = [
    "CERTAIN",
    "FORMATS",
    "LIKELY",
    "POSSIBLE",
    "UNLIKE",
    "Format",
    "Likeness",
    "Options",
    "contents",
    "import_run",
    "read",
    "tables",
]

FORMATS = Registry(Format, "fullwire.importers", name="FORMAT", group="fullwire.importers")


def read(
    path: str | Path,
    *more: str | Path,
    format: str | None = None,
    step_time: str | float | None = None,
    reduce_cost: str | Path | None = None,
    communication: str | None = None,
    pattern: str | None = None,
) -> Run:
    """Open a run, a foreign trace, or a built-in workload such as `vgg16@v100`.

    - `path`, `more`: files or directories. Give several where each rank has its own file. NCCL's
      logs beside another trace of the job are added to it.
    - `format`: the reader to use, where the content does not show the format.
    - `communication`: a regular expression for names of kernels that communicate.
    - `pattern`: a regular expression that finds the steps in the log of a script. It has a group
      named s, ms, us or per_s.
    - `step_time` (seconds), `reduce_cost` (a file): values that netx logs lack.

        run = fw.read("job.run")
        run.spans.to_pandas()
    """
    options = Options(
        step_time=step_time, reduce_cost=reduce_cost, communication=communication, pattern=pattern
    )
    return _read(_given("read", (path, *more), format, pattern), options)


def contents(path: str | Path) -> tuple[Run, Mapping[str, int]]:
    """Return a run without its rows, and the number of rows of each table."""
    from fullwire.run.store import counted

    place = path_of(path, "show")
    if kinds_of(FORMATS, place) == [RUN]:
        return counted(place)
    run = read(path)
    return run, {name: len(table) for name, table in run.tables() if len(table)}


def tables(path: str | Path, *, format: str | None = None) -> list[Table]:
    """Read the tables of a benchmark of collectives: nccl-tests, rccl-tests, OSU, or CSV."""
    try:
        given = _given("tables", (path,), format)
    except DamagedInput:  # Say what lacks to such a table, and no option of other formats.
        kinds_of({key: each for key, each in FORMATS.items() if each.tables}, Path(path))
        raise
    form = None if given.kind in (RUN, WORKLOAD) else FORMATS[given.kind]
    if form is None or form.tables is None:
        takers = " or ".join(format_.label for format_ in FORMATS.values() if format_.tables)
        raise UsageError(f"{path}: expected {takers}, got {words_of(FORMATS, given.kind)}")
    return [table for file in files_of(form, given.traces) for table in form.tables(file)]


def import_run(
    output: str | Path,
    path: str | Path,
    *more: str | Path,
    format: str | None = None,
    step_time: str | float | None = None,
    reduce_cost: str | Path | None = None,
    communication: str | None = None,
    pattern: str | None = None,
    processes: int | None = None,
    on: str = HERE,
    replace: bool = False,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Path:
    """Read a foreign trace and write it as a run.

    Ranks of a job are read side by side, in bounded memory. `processes` is the number of processes
    that read at once. If `on` names a Ray cluster ("ray", or its address), its processes read.
    `told` is called with the number of traces read so far and the number of all traces.
    """
    options = Options(
        step_time=step_time, reduce_cost=reduce_cost, communication=communication, pattern=pattern
    )
    given = _given("import", (path, *more), format, pattern)
    if given.kind not in (RUN, WORKLOAD) and (write := FORMATS[given.kind].write):
        _refuse_others(given, options)
        writing = Writing(
            output=output,
            logs=[file for _, files in _beside(given) for file in files],
            left_out=given.left_out,
            processes=processes,
            on=on,
            replace=replace,
            told=told,
        )
        with _told_with_name(given):
            return write(given.traces, options, writing)
    if processes is not None or on != HERE:
        option = "--on" if processes is None else "--processes"
        takers = " and ".join(format_.label for format_ in FORMATS.values() if format_.write)
        kind = words_of(FORMATS, given.kind)
        raise UsageError(f"{path}: {option} belongs to {takers}, not to {kind}")
    from fullwire.run.store import write as write_run

    return write_run(_read(given, options), output, replace=replace)


def _given(
    where: str, paths: Sequence[str | Path], format: str | None, pattern: str | None = None
) -> Given:
    if format is not None:
        check_name(FORMATS, format)
    elif pattern is not None:  # for any script, so its lines do not show the format
        return given(FORMATS, where, paths, "training-log")
    return given(FORMATS, where, paths, format)


def _read(given: Given, options: Options) -> Run:
    """Read the given paths with the reader of their kind, which is imported only now."""
    _refuse_others(given, options)
    if given.kind == WORKLOAD:
        from fullwire import workloads

        return workloads.modelled_run(workloads.workload(str(given.traces[0])))
    if given.kind == RUN:
        from fullwire.run.store import read_run

        return read_run(given.traces[0])
    form = FORMATS[given.kind]
    files = given.traces if form.searches_directories else files_of(form, given.traces)
    with _told_with_name(given):
        run = form.read(files, options)
    if form.beside is None:
        for adding, logs in _beside(given):
            run = adding(run, logs)
    if not given.left_out:
        return run
    return dataclasses.replace(run, gaps=gaps_of([*run.gaps, *given.left_out]))


@contextmanager
def _told_with_name(given: Given) -> Iterator[None]:
    """Tell the errors of another package's reader with its name; those of ours are bugs here."""
    origin = FORMATS.origin(given.kind)
    try:
        yield
    except DamagedInput:
        raise
    except UsageError as error:
        if origin is None:
            raise
        raise UsageError(f"{origin}: {error}") from error
    except Exception as error:
        if origin is None:
            raise
        why = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise DamagedInput(given.traces[0], f"{origin} cannot read it: {why}") from error


def _beside(given: Given) -> Iterator[tuple[Beside, list[Path]]]:
    """Yield each format that adds to others, with its files among the given paths."""
    places = [*given.beside, *(place for place in given.traces if place.is_dir())]
    for format_ in FORMATS.values() if places else ():
        if format_.beside is not None and (files := files_among(format_, places)):
            yield format_.beside, files


def _refuse_others(given: Given, options: Options) -> None:
    """Refuse options that belong to another format."""
    takes = () if given.kind in (RUN, WORKLOAD) else FORMATS[given.kind].options
    asked: tuple[Option, ...] = get_args(Option)
    for option in asked:
        if getattr(options, option) is not None and option not in takes:
            taker = next(format_ for format_ in FORMATS.values() if option in format_.options)
            flags = [f"--{option.replace('_', '-')}" for option in taker.options]
            raise UsageError(
                f"{given.traces[0]}: {' and '.join(flags)} belong{'s' * (len(flags) == 1)} to "
                f"{taker.label}, not to {words_of(FORMATS, given.kind)}"
            )
