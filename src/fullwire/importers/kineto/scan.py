"""Read one trace file as columns, be it whole, truncated or hostile, in bounded memory.

A damaged file gives no traceback. The native scanner reads one chunk at a time and keeps some 60
bytes of an event. So a file of 87 MB takes 10 MB. A compressed file is unpacked chunk by chunk.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from fullwire._native import KinetoScanner
from fullwire.errors import DamagedInput
from fullwire.files import name_of, opened
from fullwire.importers.kineto.shapes import Shaped, Shapes, fit_for_files, text_of, whole_number
from fullwire.packed import (
    BROKEN,
    BYTE_ORDER_MARK,
    GZIP,
    MOST_EXPANSION,
    XZ,
    ZSTD,
    has_no_end,
    unpacker,
)
from fullwire.run.gaps import DAMAGED, ENDS_IN_THE_MIDDLE
from fullwire.run.run import Whole

ABSENT = np.iinfo(np.int64).min  # Stands for a number that an event lacks.
_CHUNK_BYTES = 2**16  # Small enough to stay in the processor's caches.
_PACKED_BYTES = 2**14  # They unpack to some chunks.
_MOST_VALUE_BYTES = 64 * 2**20  # For one event, or the list of all groups of a large job.
_MOST_LIST_BYTES = 2**30  # For lists of the profiler before Kineto, which traced some steps.
MOST_RANKS = 100_000_000
_MOST_DIGITS = 18  # of a thread's number
_MOST_MEMBERS = 2**16  # characters of a group's list of ranks
_UNDESCRIBED = ("", "default_pg", "undefined")  # as torch writes it


class _Legacy(msgspec.Struct, gc=False):
    """An event of PyTorch's profiler before Kineto."""

    name: str = ""
    ph: str = ""
    pid: str = ""
    tid: int | str = 0
    ts: float = -1.0
    dur: float = 0.0
    id: int = -1


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Columns:
    """Columns of one kind of event, by name."""

    by_name: Mapping[str, NDArray[Any]]

    def __getitem__(self, name: str) -> Whole:
        return self.by_name[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group of several ranks that a rank is in, as the trace lists it."""

    name: str
    description: str  # or the name, where it has none
    ranks: int
    members: str  # as the marks of NCCL tell them: [0, 2]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Trace:
    """The content of one file, in its own clock; columns refer to `names` by number."""

    path: Path
    rank: int | None
    world: int | None
    backend: str
    device: str
    host: str
    base_ns: int | None
    work: Columns
    launches: Columns
    operators: Columns
    pauses: Columns  # of operators that called a collective, until their next operator
    marks: Columns
    notes: Columns
    names: tuple[str, ...]
    threads: tuple[int, ...]  # the system's number of each; -1 if it has none
    problems: tuple[str, ...]
    events: int
    own_groups: tuple[Group, ...]  # in the order in which the job made them
    groups: Mapping[str, int]  # ranks of the largest group with each description
    group_names: Mapping[str, str]  # descriptions by the name that collectives bear
    shaped: tuple[Shaped, ...]
    waits_ns: tuple[Whole, Whole]  # for tensors, on the processor
    hooks_wait_ns: tuple[Whole, Whole]  # for collectives, where FSDP's hooks do on the processor
    called: Mapping[int, Whole]  # when sums of so many elements were called
    unlike_gradients: frozenset[int]  # elements of summed tensors that no gradient has
    gathered: Mapping[int, int]  # elements of a whole gathering by those of a rank's part

    @property
    def libraries(self) -> frozenset[str]:
        """Return the libraries that mark their collectives: nccl of `nccl:all_reduce`."""
        marked = (self.names[number] for number in set(self.marks["name"].tolist()))
        parts = (name.partition(":") for name in marked)
        return frozenset(name for name, colon, rest in parts if colon and rest[:1] != ":")

    def lanes(self) -> tuple[Whole, Whole]:
        """Return the streams of all devices, and which of them each work ran on."""
        # Both numbers have 32 bits, and few values: sorting all took a tenth of the tables' time.
        number = (self.work["device"] << 32) + self.work["stream"]
        lanes = np.array(sorted(set(number.tolist())), np.int64)
        return lanes, np.searchsorted(lanes, number)


def last_around(
    start_ns: Whole,
    end_ns: Whole,
    thread: Whole,
    is_chosen: NDArray[np.bool_],
    time_ns: Whole,
    on_thread: Whole,
) -> Whole:
    """Return for each moment on a thread the last chosen interval that it lies in, or -1."""
    rows = np.flatnonzero(is_chosen)
    rows = rows[np.lexsort((start_ns[rows], thread[rows]))]
    places = np.full(len(time_ns), -1)
    for number in sorted(set(thread[rows].tolist())):  # np.unique loads masked arrays, for 20 ms
        here = rows[thread[rows] == number]
        mine = np.flatnonzero(on_thread == number)
        place = np.searchsorted(start_ns[here], time_ns[mine], side="right") - 1
        row = here[np.maximum(place, 0)]
        places[mine] = np.where((place >= 0) & (time_ns[mine] <= end_ns[row]), row, -1)
    return places


def scanned(path: Path) -> Trace:
    """Read one file."""
    scanner = KinetoScanner(_MOST_VALUE_BYTES)
    shapes = Shapes()
    problems: list[str] = []
    with opened(path) as file:
        chunks = _chunks(path, file, problems)
        first = next(chunks, b"")
        is_list = first.lstrip()[:1] == b"["
        for chunk in _of_list(path, first, chunks) if is_list else chain([first], chunks):
            scanner.feed(chunk)
            shapes.feed(chunk)
            if scanner.is_whole or scanner.damage:
                break
        else:
            scanner.feed(b"")
    shapes.feed(b"")
    if scanner.damage:
        problems.append(
            f"{DAMAGED} {scanner.bytes_read:,} ({scanner.damage}); "
            f"the {scanner.events:,} events before are read"
        )
    elif not scanner.is_whole:
        problems.append(
            f"{ENDS_IN_THE_MIDDLE}, as a killed job leaves it, after {scanner.events:,} events"
        )
    if unusable := scanner.unusable:
        problems.append(f"{unusable:,} events lack a possible time and are left out")
    if not scanner.events:
        is_cut = not scanner.is_whole
        why = scanner.damage or f"{'it ends before its first' if is_cut else 'there is no'} event"
        raise DamagedInput(path, f"not a profiler trace: {problems[0] if problems else why}")
    # In a file merged from several ranks, each rank has numbered its own launches, so numbers
    # collide. A device with a process of its own shares the numbers of the rank that uses it.
    launched = scanner.launches()["correlation"].tolist() if scanner.processes > 1 else []
    if len(set(launched)) < len(launched):
        raise DamagedInput(
            path,
            f"{scanner.processes} processes launched what is in it, as where ranks' traces "
            "are merged: give each rank's own trace",
        )
    return _trace(path, scanner, shapes, problems)


def _of_list(path: Path, first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Make a trace of a bare list of events, Kineto's or of PyTorch's profiler before it.

    The older list (torch/autograd/profiler_util.py) holds functions of the CPU, kernels, and an
    arrow from each function to the kernel that it launched.
    """
    if b'"CPU functions"' not in first:
        yield b'{"traceEvents":'
        end = b""
        for chunk in chain([first], chunks):
            yield chunk
            end = (end + chunk)[-64:]
        yield b"}" * end.rstrip().endswith(b"]")
        return
    content = bytearray()
    for chunk in chain([first], chunks):
        content += chunk
        if len(content) > _MOST_LIST_BYTES:
            raise DamagedInput(path, f"a list of over {_MOST_LIST_BYTES:,} bytes")
    try:
        events = msgspec.json.decode(content, type=list[_Legacy])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedInput(path, f"not a profiler trace: {error}") from None
    before = b'{"traceEvents":['
    for number, event in enumerate(events):
        told: dict[str, object] = {"ph": "X", "name": event.name, "pid": 1, "tid": str(event.tid)}
        told |= {"ts": event.ts, "dur": event.dur, "cat": "cpu_op"}
        if event.ph == "s":
            told |= {"cat": "cuda_runtime", "args": {"correlation": event.id}}
        elif event.ph == "X" and event.pid != "CPU functions":
            launch = events[number - 1].id if events[number - 1].ph == "f" else -1
            told |= {"cat": "kernel", "args": {"device": event.tid, "correlation": launch}}
        elif event.ph != "X":
            continue
        yield before + msgspec.json.encode(told)
        before = b","
    yield b"]}" if before == b"," else before + b"]}"


def _chunks(path: Path, file: BinaryIO, problems: list[str]) -> Iterator[bytes]:
    data = file.read(_PACKED_BYTES)
    if data.startswith((XZ, ZSTD, BYTE_ORDER_MARK)):
        unpack, given = unpacker(data), 0  # a cut file gives all content before the cut
        assert unpack is not None
        file.seek(0)
        try:
            with unpack(file) as stream:
                while chunk := stream.read1(_CHUNK_BYTES):
                    given += len(chunk)
                    _refuse_endless(path, file.tell(), given)
                    yield chunk
        except BROKEN as error:
            problems.append(f"its compressed bytes are damaged ({error})")
        return
    if not data.startswith(GZIP):
        while data:
            yield data
            data = file.read(_CHUNK_BYTES)
        return
    taken, given = 0, 0
    inflating = zlib.decompressobj(wbits=47)
    while data:
        taken += len(data)
        while data:
            try:
                chunk = inflating.decompress(data, _CHUNK_BYTES)
            except zlib.error as error:
                problems.append(f"its compressed bytes are damaged ({error})")
                return
            given += len(chunk)
            _refuse_endless(path, taken, given)
            yield chunk
            data = inflating.unconsumed_tail
            if inflating.eof:
                data, inflating = inflating.unused_data, zlib.decompressobj(wbits=47)
                if data[:1] == b"\0" or not data:  # padding, or the end
                    data = b""
        data = file.read(_PACKED_BYTES)


def _refuse_endless(path: Path, packed_bytes: int, unpacked_bytes: int) -> None:
    if has_no_end(packed_bytes, unpacked_bytes):
        raise DamagedInput(
            path, f"it unpacks to over {MOST_EXPANSION} times its size, as no trace does"
        )


def _trace(path: Path, scanner: KinetoScanner, shapes: Shapes, problems: list[str]) -> Trace:
    header = {key.decode(errors="replace"): _decoded(value) for key, value in scanner.header()}
    given = header.get("distributedInfo")
    info: Mapping[str, object] = given if isinstance(given, dict) else {}
    devices = header.get("deviceProperties")
    device = devices[0] if isinstance(devices, list) and devices else {}
    own_groups, groups, group_names = _groups(info.get("pg_config"))
    return Trace(
        path=path,
        rank=whole_number(info.get("rank"), MOST_RANKS),
        world=whole_number(info.get("world_size"), MOST_RANKS),
        backend=text_of(info.get("backend")),
        device=text_of(device.get("name") if isinstance(device, dict) else ""),
        host=text_of(header.get("host_name")),
        base_ns=whole_number(header.get("baseTimeNanoseconds"), 2**61),
        work=_columns(scanner.work()),
        launches=_columns(scanner.launches()),
        operators=_columns(scanner.operators()),
        pauses=_columns(scanner.pauses()),
        marks=_columns(scanner.marks()),
        notes=_columns(scanner.notes()),
        names=tuple(map(_name, scanner.names())),
        threads=tuple(
            int(name) if name.isdigit() and len(name) < _MOST_DIGITS else -1
            for name in scanner.threads()
        ),
        problems=tuple(f"{name_of(path)}: {problem}" for problem in problems),
        events=scanner.events,
        own_groups=own_groups,
        groups=groups,
        group_names=group_names,
        shaped=tuple(shapes.shaped()),
        waits_ns=shapes.waits_ns(),
        hooks_wait_ns=shapes.hooks_wait_ns(),
        called=shapes.called(),
        unlike_gradients=shapes.unlike_gradients(),
        gathered=shapes.gathered(),
    )


def _groups(told: object) -> tuple[tuple[Group, ...], dict[str, int], dict[str, str]]:
    """Return the groups, the ranks of the largest one of each description, and all descriptions."""
    own: list[Group] = []
    groups: dict[str, int] = {}
    names: dict[str, str] = {}
    for entry in told if isinstance(told, list) else []:
        if isinstance(entry, dict):
            ranks = entry.get("ranks")
            size = whole_number(entry.get("pg_size"), MOST_RANKS) or 0
            size = size or (len(ranks) if isinstance(ranks, list) else 0)
            name, description = text_of(entry.get("pg_name")), text_of(entry.get("pg_desc"))
            if size and (description or name):
                groups[description or name] = max(size, groups.get(description or name, 0))
            if name and size > 1:
                members = str(ranks) if isinstance(ranks, list) else ""
                own.append(
                    Group(
                        name=name,
                        description=description or name,
                        ranks=size,
                        members=members[:_MOST_MEMBERS],
                    )
                )
            if name and size != 1 and description not in _UNDESCRIBED:
                names[name] = description
    return tuple(own), groups, names


def _columns(columns: Mapping[str, NDArray[Any]]) -> Columns:
    return Columns(by_name={name: column.astype(np.int64) for name, column in columns.items()})


def _decoded(value: bytes) -> object:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _name(raw: bytes) -> str:
    """Undo the escapes of a name; keep it as it is if it was cut within one."""
    decoded = _decoded(b'"' + raw + b'"') if b"\\" in raw else None
    return fit_for_files(decoded if isinstance(decoded, str) else raw.decode(errors="replace"))
