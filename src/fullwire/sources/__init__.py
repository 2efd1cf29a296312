"""Anything becomes a Run: `read` looks at a path and picks the reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fullwire.errors import DamagedInput, UsageError
from fullwire.sources.captures import is_capture
from fullwire.sources.files import opened, path_of
from fullwire.units import seconds, shown

if TYPE_CHECKING:
    from fullwire.model.run import Run

FORMATS = ("run", "workload", "netx", "kineto", "capture", "horovod", "nccl-tests")


def read(
    path: str | Path,
    *more: str | Path,
    format: str | None = None,
    step_time: str | float | None = None,
    reduce_cost: str | Path | None = None,
    communication: str | None = None,
) -> Run:
    """Open a run, a foreign trace, or a built-in workload such as `vgg16@v100`.

    Profiler traces may be `more` than one, or directories of them: one for each rank;
    `communication` is a regular expression for names of kernels that communicate. `step_time` and
    `reduce_cost` (a file) belong to netx logs, which do not hold them.
    """
    place = path_of(path, "read")
    kind = _recognised(place) if format is None else format
    if not isinstance(kind, str) or kind not in FORMATS:
        raise UsageError(f"format: expected one of {', '.join(FORMATS)}, got {shown(kind)}")
    _refuse_others(place, kind, more, step_time, reduce_cost, communication)
    # Each where it is needed: none loads what another one needs.
    if kind == "netx":
        from fullwire.sources import netx

        step_time_s = None if step_time is None else seconds(step_time, "step time")
        table = None if reduce_cost is None else path_of(reduce_cost, "reduce cost")
        return netx.read_netx(place, step_time_s=step_time_s, reduce_cost=table)
    if kind == "kineto":
        from fullwire.sources.kineto import read_kineto

        places = [place, *(path_of(each, "read") for each in more)]
        return read_kineto(places, communication=communication)
    if kind == "capture":
        from fullwire.sources.pcap import read_captures

        return read_captures([place])
    if kind == "horovod":
        from fullwire.sources.horovod import read_horovod

        return read_horovod(place)
    if kind == "nccl-tests":
        from fullwire.sources.nccl_tests import read_nccl_tests

        return read_nccl_tests(place)
    if kind == "workload":
        from fullwire.model import workloads
        from fullwire.sources.modelled import modelled_run

        return modelled_run(workloads.workload(str(path)))
    from fullwire.store import read_run

    return read_run(place)


def contents(path: str | Path) -> tuple[Run, Mapping[str, int]]:
    """Return what a run says besides its rows, and how many of them each table has."""
    from fullwire.store import counted, is_run

    place = path_of(path, "show")
    if _recognised(place) == "run" and is_run(place):
        return counted(place)
    run = read(path)
    return run, {name: len(table) for name, table in run.tables() if len(table)}


def import_run(
    output: str | Path,
    path: str | Path,
    *more: str | Path,
    format: str | None = None,
    step_time: str | float | None = None,
    reduce_cost: str | Path | None = None,
    communication: str | None = None,
    processes: int | None = None,
    replace: bool = False,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Path:
    """Read a foreign trace and write it as a run; ranks of a job side by side, in bounded memory.

    `processes` read at once; `told` hears how many of how many traces are read.
    """
    place = path_of(path, "import")
    kind = _recognised(place) if format is None else format
    if kind == "kineto":
        from fullwire.sources.kineto import import_kineto

        _refuse_others(place, kind, more, step_time, reduce_cost, communication)
        places = [place, *(path_of(each, "import") for each in more)]
        return import_kineto(places, output, communication=communication, processes=processes,
                             replace=replace, told=told)  # fmt: skip
    if processes is not None:
        raise UsageError(f"{place}: --processes belongs to profiler traces, not to a {kind}")
    from fullwire.store import write

    run = read(place, *more, format=kind, step_time=step_time, reduce_cost=reduce_cost,
               communication=communication)  # fmt: skip
    return write(run, output, replace=replace)


def _refuse_others(
    path: Path, kind: str, more: Sequence[str | Path], step_time: object, reduce_cost: object,
    communication: object,
) -> None:  # fmt: skip
    """Refuse what belongs to another format."""
    if kind != "netx" and (step_time is not None or reduce_cost is not None):
        raise UsageError(
            f"{path}: --step-time and --reduce-cost belong to netx logs, not to a {kind}"
        )
    if kind != "kineto" and communication is not None:
        raise UsageError(f"{path}: --communication belongs to profiler traces, not to a {kind}")
    if kind != "kineto" and more:
        raise UsageError(f"read: one file makes a run of a {kind}, got {1 + len(more)}")


def _recognised(path: Path) -> str:
    try:
        is_directory = path.is_dir()
        is_there = is_directory or path.exists()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if is_directory:
        return _of_directory(path)
    if is_there:
        return _by_beginning(path)
    if "@" in str(path):
        return "workload"
    raise UsageError(f"{path}: there is no such file, and no built-in workload of this name")


def _of_directory(path: Path) -> str:
    from fullwire.sources.kineto import traces_in
    from fullwire.store import is_run

    return "kineto" if not is_run(path) and traces_in(path) else "run"


def _by_beginning(path: Path) -> str:
    from fullwire.sources import (  # here: a built-in workload needs none of it
        horovod,
        kineto,
        nccl_tests,
        netx,
    )

    with opened(path) as file:
        beginning = file.read(4096)
    if netx.looks_like(beginning):
        return "netx"
    if kineto.looks_like(beginning):
        return "kineto"
    if is_capture(beginning):
        return "capture"
    if nccl_tests.looks_like(beginning):
        return "nccl-tests"
    if horovod.looks_like(beginning):
        return "horovod"
    if not beginning:
        raise DamagedInput(path, "the file is empty")
    raise DamagedInput(
        path, "none of the formats that are read: a run, a profiler trace, a Horovod timeline, "
        "what nccl-tests print, a packet capture, or a netx backward log"
    )  # fmt: skip
