"""Anything becomes a Run: `read` looks at a path and picks the reader."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from fullwire.crew import HERE
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import (
    beginning_of,
    files_in,
    files_like,
    name_of,
    path_of,
    refuse_packed,
)
from fullwire.packed import unpacked_elsewhere
from fullwire.packets.captures import is_capture
from fullwire.run.gaps import gaps_of
from fullwire.units import seconds, shown

if TYPE_CHECKING:
    from fullwire.run.run import Run

LooksLike: TypeAlias = Callable[[bytes], bool]
FORMATS = (
    "run",
    "workload",
    "netx",
    "kineto",
    "capture",
    "horovod",
    "nccl-tests",
    "nccl-log",
    "flight-recorder",
    "chakra",
    "chrome",
)
# Of these many files make a run: of each rank, host or test. Of several in a directory, the first.
_OF_MANY = ("kineto", "flight-recorder", "chakra", "capture", "nccl-tests", "nccl-log")
_FORMATS_IN_WORDS = (
    "profiler traces, Horovod timelines, Flight Recorder dumps, Chakra traces, NCCL's logs, what "
    "nccl-tests print, packet captures, exports of a run, or netx backward logs"
)
_SOON_BYTES = 4096  # in which traces say what they are; logs may begin with what others print
_ARCHIVE = "archives"  # and what is packed in a way that is not unpacked here
_MOST_NAMED = 5  # files, in a sentence
_MOST_SNIFFED = 1_000  # files of a directory, to find out what they are: some 0.1 ms each


class _Given(NamedTuple):
    """What somebody wants read: of one kind, with NCCL's logs and what is left out beside it."""

    kind: str
    traces: list[Path]
    logs: list[Path]
    left_out: list[str]


def read(
    path: str | Path,
    *more: str | Path,
    format: str | None = None,
    step_time: str | float | None = None,
    reduce_cost: str | Path | None = None,
    communication: str | None = None,
) -> Run:
    """Open a run, a foreign trace, or a built-in workload such as `vgg16@v100`.

    Where ranks have a file each, there may be `more` of them, or directories of them; NCCL's logs
    beside another trace of the job are added to it. `communication` is a regular expression for
    names of kernels that communicate. `step_time` and `reduce_cost` (a file) belong to netx logs,
    which do not hold them.
    """
    given = _sorted_out("read", (path, *more), format)
    return _read_sorted(given, step_time, reduce_cost, communication)


def _read_sorted(
    given: _Given,
    step_time: str | float | None,
    reduce_cost: str | Path | None,
    communication: str | None,
) -> Run:
    """Read what was given, once it is known what it is."""
    kind, traces, logs, left_out = given
    _refuse_others(traces[0], kind, step_time, reduce_cost, communication)
    # Each where it is needed: none loads what another one needs.
    if kind == "netx":
        from fullwire.importers import netx

        step_time_s = None if step_time is None else seconds(step_time, "step time")
        table = None if reduce_cost is None else path_of(reduce_cost, "reduce cost")
        log = _only_one(kind, files_like(traces, netx.looks_like), traces[0])
        return netx.read_netx(log, step_time_s=step_time_s, reduce_cost=table)
    if kind == "workload":
        from fullwire import workloads
        from fullwire.workloads.modelled import modelled_run

        return modelled_run(workloads.workload(str(traces[0])))
    if kind == "run":
        from fullwire.run.store import read_run

        return read_run(traces[0])
    run = _read(kind, traces, communication)
    run = run if kind == "nccl-log" else _with_logs(run, logs, traces)
    return dataclasses.replace(run, gaps=gaps_of([*run.gaps, *left_out])) if left_out else run


def _sorted_out(where: str, paths: Sequence[str | Path], format: str | None) -> _Given:
    """Say what the paths are, which hold it, and what they hold besides."""
    if format is not None and (not isinstance(format, str) or format not in FORMATS):
        raise UsageError(f"format: expected one of {', '.join(FORMATS)}, got {shown(format)}")
    places = [path_of(each, where) for each in paths]
    found = [[format] if format else _recognised(place) for place in places]
    kinds = [each[0] for each in found]
    kind = next((each for each in kinds if each != "nccl-log"), "nccl-log")
    _refuse_mixed(places, kinds, kind)
    traces = [place for place, each in zip(places, kinds, strict=True) if each == kind]
    logs = [place for place in places if place not in traces]
    others = zip(places, found, strict=True)
    return _Given(kind, traces, logs, [each for pair in others for each in _left_out(*pair, kind)])


def _left_out(place: Path, found: Sequence[str], kind: str) -> Iterator[str]:
    """Say what else is in a directory: NCCL's logs are used beside anything, others are not."""
    others = sorted(set(found) - {kind, "nccl-log"})
    if others:
        yield (
            f"{name_of(place)}: left out is what else is in it ({', '.join(others)}): a run is "
            f"made of one kind, here {kind}"
        )


def _with_logs(run: Run, logs: Sequence[Path], traces: Sequence[Path]) -> Run:
    """Add what NCCL's logs say."""
    if not (found := _all_logs(logs, traces)):
        return run
    from fullwire.importers.nccl_log import with_logs

    return with_logs(run, found)


def _all_logs(logs: Sequence[Path], traces: Sequence[Path]) -> list[Path]:
    """Return NCCL's logs: those that were given, and those in directories of traces."""
    directories = [place for place in traces if place.is_dir()]
    if not logs and not directories:
        return []
    from fullwire.importers.nccl_log import logs_in

    return list(logs_in([*logs, *directories]))


def _read(kind: str, places: Sequence[Path], communication: str | None) -> Run:
    """Call the reader of a foreign format with its files; each is loaded when it is called."""
    if kind == "kineto":
        from fullwire.importers.kineto import read_kineto

        return read_kineto(places, communication=communication)
    files = files_like(places, _looks_like_a(kind))
    if kind not in _OF_MANY:
        files = [_only_one(kind, files, places[0])]
    if kind == "nccl-log":
        from fullwire.importers.nccl_log import read_nccl_logs

        return read_nccl_logs(files)
    if kind == "flight-recorder":
        from fullwire.importers.flight_recorder import read_flight_recorder

        return read_flight_recorder(files)
    if kind == "chakra":
        from fullwire.importers.chakra import read_chakra

        return read_chakra(files)
    if kind == "capture":
        from fullwire.packets.pcap import read_captures

        return read_captures(files)
    if kind == "nccl-tests":
        from fullwire.importers.nccl_tests import read_nccl_tests

        return read_nccl_tests(files)
    if kind == "chrome":
        from fullwire.importers.chrome import read_chrome

        return read_chrome(files[0])
    from fullwire.importers.horovod import read_horovod

    return read_horovod(files[0])


def _only_one(kind: str, files: Sequence[Path], place: Path) -> Path:
    """Return the file of a format of which one makes a run."""
    if len(files) != 1:
        named = ", ".join(name_of(each.name) for each in files[:_MOST_NAMED])
        more = ", ..." if len(files) > _MOST_NAMED else ""
        raise UsageError(
            f"{place}: one file makes a run of a {kind}, and here are {len(files)}: {named}{more}"
        )
    return files[0]


def _refuse_mixed(places: Sequence[Path], kinds: Sequence[str], kind: str) -> None:
    """Refuse files that do not make one run together."""
    for place, each in zip(places, kinds, strict=True):
        if each not in (kind, "nccl-log"):
            raise UsageError(f"read: {places[0]} is a {kinds[0]}, and {place} is a {each}")
    count = sum(each == kind for each in kinds)
    if kind not in _OF_MANY and count > 1:
        raise UsageError(f"read: one file makes a run of a {kind}, got {count}")


def contents(path: str | Path) -> tuple[Run, Mapping[str, int]]:
    """Return what a run says besides its rows, and how many of them each table has."""
    from fullwire.run.store import counted, is_run

    place = path_of(path, "show")
    if _recognised(place) == ["run"] and is_run(place):
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
    on: str = HERE,
    replace: bool = False,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Path:
    """Read a foreign trace and write it as a run; ranks of a job side by side, in bounded memory.

    `processes` read at once, or those of a Ray cluster if `on` names one ("ray", or its address);
    `told` hears how many of how many traces are read.
    """
    given = _sorted_out("import", (path, *more), format)
    kind, traces, logs, left_out = given
    if kind == "kineto":
        from fullwire.importers.kineto import import_kineto

        _refuse_others(traces[0], kind, step_time, reduce_cost, communication)
        return import_kineto(
            traces,
            output,
            communication=communication,
            logs=_all_logs(logs, traces),
            left_out=left_out,
            processes=processes,
            on=on,
            replace=replace,
            told=told,
        )
    if processes is not None or on != HERE:
        option = "--on" if processes is None else "--processes"
        raise UsageError(f"{path}: {option} belongs to profiler traces, not to a {kind}")
    from fullwire.run.store import write

    run = _read_sorted(given, step_time, reduce_cost, communication)
    return write(run, output, replace=replace)


def _refuse_others(
    path: Path, kind: str, step_time: object, reduce_cost: object, communication: object
) -> None:
    """Refuse what belongs to another format."""
    if kind != "netx" and (step_time is not None or reduce_cost is not None):
        raise UsageError(
            f"{path}: --step-time and --reduce-cost belong to netx logs, not to a {kind}"
        )
    if kind != "kineto" and communication is not None:
        raise UsageError(f"{path}: --communication belongs to profiler traces, not to a {kind}")


def _recognised(path: Path) -> list[str]:
    """Return what a path is; a directory may be of several kinds, of which the first counts."""
    try:
        is_directory = path.is_dir()
        is_there = is_directory or path.exists()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if is_directory:
        return _of_directory(path)
    if is_there:
        return [_of_file(path)]
    if "@" in str(path):
        return ["workload"]
    _refuse_unfinished(path, path.with_name(f"{path.name}.recording"))
    raise UsageError(f"{path}: there is no such file, and no built-in workload of this name")


def _of_directory(path: Path) -> list[str]:
    """Return what a directory is of: of several formats, first the one that tells most of a job."""
    from fullwire.run.store import is_run

    if is_run(path):
        return ["run"]
    some = list(itertools.islice(files_in(path), _MOST_SNIFFED))
    found = {_by_beginning(beginning_of(file)) for file in some} - {""}
    if not found - {_ARCHIVE}:
        _refuse_unfinished(path, path)
        refuse_packed(some)
        which = "" if len(some) < _MOST_SNIFFED else f", by its first {len(some):,} files"
        raise DamagedInput(path, f"neither a run nor a folder of {_FORMATS_IN_WORDS}{which}")
    return sorted(found, key=(*_OF_MANY, *sorted(found)).index)


def _refuse_unfinished(path: Path, recording: Path) -> None:
    """Say what makes a run of a recording, if there is one."""
    if any(recording.glob("*.journal")):
        raise UsageError(
            f"{path}: no run yet, only its recording, which goes on or was interrupted: "
            f"`fullwire join {recording} -o NAME.run` makes a run of it"
        )


def _of_file(path: Path) -> str:
    beginning = beginning_of(path)
    kind = _by_beginning(beginning)
    if kind == _ARCHIVE:
        refuse_packed([path])
    if kind:
        return kind
    if not beginning:
        raise DamagedInput(path, "the file is empty")
    from fullwire.run.store import is_run

    if is_run(path.parent):
        raise UsageError(f"{path}: it is part of a run: name the folder, {path.parent}")
    raise DamagedInput(path, f"none of the formats that are read: a run, {_FORMATS_IN_WORDS}")


def _by_beginning(beginning: bytes) -> str:
    if unpacked_elsewhere(beginning):
        return _ARCHIVE  # whose members would be taken for it
    return next((kind for kind, looks_like in _looks_like() if looks_like(beginning)), "")


def _looks_like_a(kind: str) -> LooksLike:
    return next(looks_like for each, looks_like in _looks_like() if each == kind)


def _looks_like() -> Iterator[tuple[str, LooksLike]]:
    """Go through the formats with what tells from a beginning; of two that do, the first is right.

    Each is loaded when it is its turn: the most usual ones come early.
    """
    from fullwire.importers import chrome

    yield "chrome", chrome.looks_like
    from fullwire.importers import kineto

    yield "kineto", _soon(kineto.looks_like)
    yield "capture", is_capture
    from fullwire.importers import netx

    yield "netx", _soon(netx.looks_like)
    from fullwire.importers import horovod

    yield "horovod", _soon(horovod.looks_like)
    from fullwire.importers import flight_recorder

    yield "flight-recorder", flight_recorder.looks_like
    from fullwire.importers import chakra

    yield "chakra", chakra.looks_like
    from fullwire.importers import nccl_log, nccl_tests

    yield "nccl-tests", nccl_tests.looks_like
    yield "nccl-log", nccl_log.looks_like


def _soon(looks_like: LooksLike) -> LooksLike:
    return lambda beginning: looks_like(beginning[:_SOON_BYTES])
