"""Traces of the PyTorch profiler (Kineto): CUDA, ROCm or CPU only, one rank or thousands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fullwire.files import files_in
from fullwire.importers._format import (
    CERTAIN,
    LIKELY,
    OF_XLA,
    UNLIKE,
    Format,
    Likeness,
    Options,
    Writing,
    near_miss,
)
from fullwire.importers._recognise import files_among

if TYPE_CHECKING:
    from fullwire.run.run import Run

_SOON_BYTES = 4096  # other tools' files may have these keys too, so they count only this early
_KEYS = (b'"traceEvents"', b'"distributedInfo"', b'"deviceProperties"', b'"schemaVersion"')

# Marks of Kineto's events themselves, for a bare list of events that a user took out of a trace.
# Before Kineto, PyTorch's profiler wrote such lists itself.
_EVENTS = re.compile(
    rb'"cat"\s?:\s?"(?:cpu_op|kernel|cuda_runtime|cuda_driver|gpu_mem(?:cpy|set)|python_function'
    rb'|user_annotation)"|"pid"\s?:\s?"C(?:PU|UDA) functions"'
)
_ENDINGS = (".json", ".json.gz", ".json.xz", ".json.zst")


_OF_AN_EXPORT = 64  # bytes: `fullwire export` begins with its own name


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is a Kineto trace: metadata may come before events."""
    soon = beginning[:_SOON_BYTES].lstrip()
    if soon[:1] == b"[":
        return CERTAIN if _EVENTS.search(beginning) else UNLIKE
    if soon[:1] != b"{":
        return UNLIKE
    if OF_XLA.search(soon) or b'"fullwire"' in soon[:_OF_AN_EXPORT]:
        return UNLIKE
    if sum(key in soon for key in _KEYS) > 1:
        return CERTAIN
    is_one = any(key in soon for key in _KEYS) or b'"traceEvents"' in beginning
    if not is_one and b'"ph"' in soon:
        return near_miss(True, 'the list "traceEvents"')
    return LIKELY if is_one else UNLIKE


def _read(paths: Sequence[Path], options: Options) -> Run:
    from fullwire.importers.kineto.assemble import read_kineto  # late: loads the native scanner

    return read_kineto(paths, _trace_files(paths), communication=options.communication)


def _write(paths: Sequence[Path], options: Options, writing: Writing) -> Path:
    from fullwire.importers.kineto.fleet import import_kineto

    return import_kineto(
        paths,
        list(_trace_files(paths)),
        writing.output,
        communication=options.communication,
        logs=writing.logs,
        left_out=writing.left_out,
        processes=writing.processes,
        on=writing.on,
        replace=writing.replace,
        told=writing.told,
    )


def _traces_in(directory: Path) -> list[Path]:
    """List the files in a directory and below that may be traces.

    Their names show it. If no name does, their beginnings do. Numbers in names are sorted as
    numbers: 10 comes after 9.
    """
    named = [
        path
        for path in files_in(directory)
        if path.name.endswith(_ENDINGS) and path.name != "run.json"  # a run beside its traces
    ]
    named.sort(
        key=lambda path: [
            (int(part), "") if part.isdigit() else (-1, part)
            for part in re.split(r"([0-9]{1,18})", str(path))
        ]
    )
    return named or files_among(FORMAT, [directory])


def _trace_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the given files, and the traces in the given directories."""
    for path in paths:
        if path.is_dir():
            yield from _traces_in(path)
        else:
            yield path


FORMAT = Format(
    key="kineto",
    label="profiler traces",
    looks_like=looks_like,
    read=_read,
    is_of_many=True,
    searches_directories=True,
    tells=60,
    options=("communication",),
    write=_write,
)
