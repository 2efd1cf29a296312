"""Horovod timelines (HOROVOD_TIMELINE): one file, written by rank 0, for the whole job.

    [                                                 without its end, if the job was killed
    {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "tensor"}},
    {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 5, "pid": 1},        microseconds
    {"ph": "X", "name": "0", "ts": 5, "pid": 1, "dur": 0},                rank 0 is ready
    {"ph": "X", "name": "1", "ts": 90, "pid": 1, "dur": 0},               rank 1 is ready
    {"ph": "E", "ts": 91, "pid": 1},
    {"ph": "B", "name": "ALLREDUCE", "ts": 95, "pid": 1},
    {"ph": "B", "name": "NCCL_ALLREDUCE", "ts": 97, "pid": 1}, {"ph": "E", "ts": 140, "pid": 1},
    {"ph": "E", "ts": 141, "pid": 1, "args": {"dtype": "float32", "shape": "[1000, 2048]"}}

A tensor is a "process". Negotiation shows when each rank had the tensor ready, and so which rank
came last. The end is rank 0's, and the reader takes it for all ranks. A tensor comes once in a
step: this is how the reader finds steps. A timeline lacks computation, so hidden and exposed
communication look alike. Where Horovod's cache answers the negotiation, the timeline lacks the
other ranks.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from fullwire.errors import DamagedInput
from fullwire.files import name_of, opened_plain
from fullwire.importers._format import LIKELY, UNLIKE, Format, Likeness, near_miss
from fullwire.run.facts import Facts
from fullwire.run.gaps import gaps_of
from fullwire.run.run import SIZE_UNKNOWN, Collectives, Provenance, Run, Spans, Whole
from fullwire.units import shown

_CHUNK_BYTES = 2**20
_LONGEST_EVENT = 2**20  # bytes
_MOST_TENSORS = 1_000_000
_MOST_EVENTS = 50_000_000
_DEEPEST = 16  # activities within each other; Horovod has two
_LATEST_US = 3.2e13  # a year after the start
_MOST_BYTES = 2**50
_OPS = {
    "ALLREDUCE": "allreduce",
    "ALLGATHER": "allgather",
    "BROADCAST": "broadcast",
    "ALLTOALL": "alltoall",
    "REDUCESCATTER": "reducescatter",
    "ADASUM": "allreduce",
    "BARRIER": "barrier",
}
_ITEM_BYTES = {
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "bool": 1,
}
_A_RANK = re.compile(r"0?\d{1,6}|1000000", re.ASCII)  # up to a million
_SENDS = re.compile(r"(?:NCCL|MPI|GLOO|CCL|DDL|CUDA)_\w+")


class _Args(msgspec.Struct, gc=False):
    name: str = ""
    dtype: str = ""
    shape: str = ""


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    ts: float = math.nan
    pid: int = -1
    args: _Args = msgspec.field(default_factory=_Args)


@dataclass(slots=True)
class _Tensor:
    """The activities under way for one tensor."""

    name: str
    stack: list[tuple[str, int]] = field(default_factory=list)
    negotiated_ns: int = -1
    ready_ns: dict[int, int] = field(default_factory=dict)
    sent_ns: int = -1


@dataclass(frozen=True, slots=True)
class _Collective:
    tensor: str
    op: str
    occurrence: int
    dtype: str
    bytes: int
    begin_ns: int
    ready_ns: dict[int, int]
    start_ns: int
    end_ns: int


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is such a timeline."""
    text = beginning.lstrip()
    is_one = text[:1] == b"[" and (
        b"start_time_since_epoch_in_micros" in text
        or b"NEGOTIATE_" in text
        or b'"CYCLE_START"' in text
        or (b'"process_name"' in text and b'"process_sort_index"' in text)
    )
    if not is_one and text[:1] == b"[" and b'"ph"' in text:
        return near_miss(True, "its events NEGOTIATE_... or CYCLE_START")
    return LIKELY if is_one else UNLIKE


def read_horovod(path: Path) -> Run:
    """Read a timeline as a run of the ranks that it mentions."""
    book = _Book()
    missing = [f"{name_of(path)}: {problem}" for problem in _read(path, book)]
    if not book.collectives:
        raise DamagedInput(
            path, missing[0].partition(": ")[2] if missing else "no collective is in this timeline"
        )
    ranks = sorted({rank for collective in book.collectives for rank in collective.ready_ns} | {0})
    alone = sum(len(collective.ready_ns) < len(ranks) for collective in book.collectives)
    if len(ranks) == 1:
        missing.append("the timeline tells of rank 0 alone: when others were ready is not in it")
    elif alone:
        missing.append(f"of {alone:,} collectives not every rank's readiness is told")
    # A step begins with the first of the tensors that come in every step.
    begins: dict[tuple[str, str], list[int]] = defaultdict(list)
    for one in book.collectives:
        begins[one.tensor, one.op].append(one.begin_ns)
    counts = Counter(len(times) for times in begins.values() if len(times) > 1)
    steps = np.empty(0, np.int64)
    if counts:
        usual = max(counts, key=lambda count: (counts[count] * count, count))
        times = [sorted(begin) for begin in begins.values() if len(begin) == usual]
        steps = np.unique(np.array(times, np.int64).min(axis=0))
    facts = Facts(
        workers=ranks[-1] + 1,
        remarks="collectives end when they do on rank 0, and computation is not in a timeline",
    )
    # The steps of every rank, and rank 0's phases of work on tensors.
    count = max(len(steps) - 1, 0)
    phases = sorted(book.phases, key=lambda phase: (phase[1], phase[2], phase[0]))
    begin_ns = np.array([begin for _, begin, _ in phases], np.int64)
    end_ns = np.array([end for _, _, end in phases], np.int64)
    names = ["step"] * (count * len(ranks)) + [f"{name} (phase)" for name, _, _ in phases]
    return Run(
        provenance=Provenance(origin="imported", source=name_of(path)),
        facts=facts,
        gaps=gaps_of(missing),
        spans=Spans(
            rank=np.concatenate([np.repeat(ranks, count), np.zeros(len(phases), np.int64)]),
            step=np.concatenate([np.tile(np.arange(count), len(ranks)), _step_of(begin_ns, steps)]),
            lane=np.full(len(names), "host", object),
            name=np.array(names, object),
            start_ns=np.concatenate([np.tile(steps[:-1], len(ranks)), begin_ns]),
            end_ns=np.concatenate([np.tile(steps[1:], len(ranks)), end_ns]),
        ),
        collectives=_table(book.collectives, steps),
    )


class _Book:
    """Follows the events of each tensor."""

    def __init__(self) -> None:
        self.collectives: list[_Collective] = []
        self.phases: set[tuple[str, int, int]] = set()
        self.odd = 0  # events that do not fit what came before
        self._tensors: dict[int, _Tensor] = {}
        self._occurrences: Counter[tuple[str, str]] = Counter()

    @property
    def open(self) -> int:
        """Return the number of tensors with an activity under way."""
        return sum(bool(tensor.stack) for tensor in self._tensors.values())

    def note(self, event: _Event) -> None:
        """Take the next event."""
        if event.ph == "M":
            if event.name == "process_name" and len(self._tensors) < _MOST_TENSORS:
                self._tensors[event.pid] = _Tensor(_storable(event.args.name))
            return
        if event.ph == "i":
            return
        tensor = self._tensors.get(event.pid)
        if tensor is None or not 0 <= event.ts <= _LATEST_US:
            self.odd += 1
            return
        time_ns = round(event.ts * 1000)
        if event.ph == "B" and len(tensor.stack) < _DEEPEST:
            if not tensor.stack and event.name.startswith("NEGOTIATE_"):
                tensor.negotiated_ns, tensor.ready_ns = time_ns, {}
            elif tensor.stack and tensor.sent_ns < 0 and _SENDS.match(event.name):
                tensor.sent_ns = time_ns
            tensor.stack.append((event.name, time_ns))
        elif event.ph == "X" and tensor.stack and _A_RANK.fullmatch(event.name):
            tensor.ready_ns.setdefault(int(event.name), time_ns)
        elif event.ph == "E" and tensor.stack:
            name, begin_ns = tensor.stack.pop()
            if time_ns < begin_ns:
                self.odd += 1
            elif tensor.stack:
                self.phases.add((_storable(name), begin_ns, time_ns))
            elif name in _OPS:
                self._finish(tensor, name, begin_ns, time_ns, event.args)
        else:
            self.odd += 1

    def _finish(self, tensor: _Tensor, name: str, begin_ns: int, end_ns: int, args: _Args) -> None:
        op = _OPS[name]
        size, item_bytes = -1, _ITEM_BYTES.get(args.dtype, 0)
        lengths = re.fullmatch(r"\[((?:\d{1,15}(?:, ?\d{1,15})*)?),?\]", args.shape[:2000])
        if item_bytes and lengths is not None:
            size = item_bytes * math.prod(map(int, re.findall(r"\d+", lengths[1])))
            size = size if size <= _MOST_BYTES else -1
        ready_ns = {rank: ns for rank, ns in tensor.ready_ns.items() if ns <= end_ns}
        occurrence = self._occurrences[tensor.name, op]
        self._occurrences[tensor.name, op] += 1
        self.collectives.append(
            _Collective(
                tensor=tensor.name,
                op=op,
                occurrence=occurrence,
                dtype=args.dtype if size >= 0 else SIZE_UNKNOWN,
                bytes=max(size, 0),
                begin_ns=tensor.negotiated_ns
                if 0 <= tensor.negotiated_ns <= begin_ns
                else begin_ns,
                ready_ns=ready_ns or {0: begin_ns},
                start_ns=tensor.sent_ns if tensor.sent_ns >= 0 else begin_ns,
                end_ns=end_ns,
            )
        )
        tensor.negotiated_ns, tensor.ready_ns, tensor.sent_ns = -1, {}, -1


def _read(path: Path, book: _Book) -> Iterator[str]:
    """Hand all events to the book, and yield the problems of the file."""
    count = 0
    rest, problem = b"", ""
    with opened_plain(path) as file:
        rest = file.read(_CHUNK_BYTES).lstrip()
        if rest[:1] != b"[":
            raise DamagedInput(path, "expected a list of events")
        rest = rest[1:]
        while True:
            chunk = file.read(_CHUNK_BYTES)
            cut = len(rest)
            if chunk:  # cut after the last event of this piece whose end is visible
                cut = rest.rfind(b"},")
                while cut >= 0 and rest[cut + 2 : cut + 20].lstrip()[:1] != b"{":
                    cut = rest.rfind(b"},", 0, cut)
                cut += 1
            events, problem = _events(rest[:cut], is_last=not chunk)
            for event in events:
                book.note(event)
            count += len(events)
            rest = rest[cut:].lstrip(b", \t\r\n") + chunk
            if problem or not chunk:
                break
            if count > _MOST_EVENTS or len(rest) > _CHUNK_BYTES + _LONGEST_EVENT:
                problem = f"an event of over {_LONGEST_EVENT} bytes, or more than {_MOST_EVENTS:,}"
                break
    if problem:
        yield f"{problem}; the {count:,} events before are read"
    if book.open:
        yield f"{book.open} tensors were under way when it ended"
    if book.odd:
        yield f"{book.odd:,} events do not fit what came before them, and are left out"


def _events(text: bytes, *, is_last: bool) -> tuple[list[_Event], str]:
    """Decode a list of events at once, or one by one up to the first damaged one."""
    text = text.strip(b", \t\r\n")
    if is_last:
        text = text.removesuffix(b"]").rstrip(b", \t\r\n")
    try:
        return msgspec.json.decode(b"[" + text + b"]", type=list[_Event]), ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        rest = text.decode(errors="replace")
    decoder, place = json.JSONDecoder(), 0
    events: list[_Event] = []
    while place < len(rest):
        try:
            event, place = decoder.raw_decode(rest, place)
        except (ValueError, RecursionError):
            return events, f"it is cut or damaged at {shown(rest[place : place + 40])}"
        try:
            events.append(msgspec.convert(event, _Event))
        except (msgspec.ValidationError, UnicodeEncodeError):  # half a surrogate pair
            events.append(_Event(ph="?"))  # counted as one that does not fit
        while place < len(rest) and rest[place] in ", \t\r\n":
            place += 1
    return events, ""


def _storable(text: str) -> str:
    return text[:300].encode(errors="backslashreplace").decode()


def _table(collectives: list[_Collective], steps: Whole) -> Collectives:
    rows = [
        (collective, rank, ns)
        for collective in collectives
        for rank, ns in sorted(collective.ready_ns.items())
    ]
    begins = np.array([row.begin_ns for row, _, _ in rows], np.int64)
    # Other ranks may be ready before the step begins. The beginning decides the collective's step.
    return Collectives(
        rank=np.array([rank for _, rank, _ in rows], np.int64),
        step=_step_of(begins, steps),
        sequence=np.array([row.occurrence for row, _, _ in rows], np.int64),
        group=np.array([row.tensor for row, _, _ in rows], object),
        op=np.array([row.op for row, _, _ in rows], object),
        dtype=np.array([row.dtype for row, _, _ in rows], object),
        bytes=np.array([row.bytes for row, _, _ in rows], np.int64),
        issue_ns=np.array([ns for _, _, ns in rows], np.int64),
        start_ns=np.array([max(row.start_ns, ns) for row, _, ns in rows], np.int64),
        end_ns=np.array([row.end_ns for row, _, _ in rows], np.int64),
    )


def _step_of(time_ns: Whole, steps: Whole) -> Whole:
    """Return the step of each moment, or -1; the last step lacks an end and does not count."""
    place = np.searchsorted(steps, time_ns, side="right") - 1
    return np.where(place < len(steps) - 1, place, -1)


FORMAT = Format(
    key="horovod",
    label="Horovod timelines",
    looks_like=looks_like,
    read=lambda files, options: read_horovod(files[0]),
)
