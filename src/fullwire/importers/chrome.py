"""Read the export of `fullwire export --format chrome`: one event a line, facts at the end.

    {"fullwire": 1, "displayTimeUnit": "ms", "traceEvents": [
    {"ph": "X", "cat": "collective", "name": "allreduce", "pid": 0, "tid": 300, "ts": 12.345, ...},
    ], "otherData": {"provenance": {...}, "facts": {...}, "missing": []}}

Other tools' Chrome traces lack these fields. Those of the PyTorch profiler have a reader of their
own. The others describe no job that Fullwire could explain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from fullwire.errors import DamagedInput, UsageError
from fullwire.files import name_of, opened_plain
from fullwire.importers._format import CERTAIN, Format, Likeness, near_miss
from fullwire.run.facts import Facts, named
from fullwire.run.gaps import gaps_of
from fullwire.run.run import AnyTable, Collectives, Gradients, Provenance, Run, Spans

_BEGINNING = b'{"fullwire": 1, "displayTimeUnit": "ms", "traceEvents": ['
_ANEW = re.compile(rb'\s{0,40}\{\s{0,40}"fullwire"\s?:')
_LONGEST_LINE = 2**20
_MOST_EVENTS = 200_000_000
_ROWS = 50_000  # rows that wait before they become columns
_MOST_US = Decimal(2**62) / 1000

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Arguments(msgspec.Struct, gc=False):
    step: _Int64 = -1
    lane: str = ""
    sequence: _Int64 = 0
    group: str = ""
    dtype: str = ""
    bytes: _Int64 = 0
    queued_us: Decimal = Decimal(0)
    order: _Int64 = 0


class _Event(msgspec.Struct, gc=False):
    ph: str
    cat: str = ""
    name: str = ""
    pid: _Int64 = 0
    ts: Decimal = Decimal(0)
    dur: Decimal = Decimal(0)
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Provenance(msgspec.Struct):
    origin: str
    source: str
    basis: str


class _About(msgspec.Struct):
    provenance: _Provenance
    facts: dict[str, int | float | str | list[tuple[float, float]]]
    missing: list[str]


_DECODER = msgspec.json.Decoder(_Event)
_ARGUMENTS = msgspec.json.Decoder(_Arguments)


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is such an export."""
    if beginning.startswith(_BEGINNING):
        return CERTAIN
    return near_miss(_ANEW.match(beginning), "its lines: another program wrote it anew")


def read_chrome(path: Path) -> Run:
    """Read an export as the run that it was made of."""
    rows = _Rows()
    about = None
    with opened_plain(path) as file:
        if file.readline(_LONGEST_LINE).rstrip() != _BEGINNING:
            raise DamagedInput(path, "expected a trace as `fullwire export` writes it")
        while line := file.readline(_LONGEST_LINE):
            if line.startswith(b'], "otherData": '):
                content = (line + file.read(_LONGEST_LINE * 16)).rstrip()
                content = content.removeprefix(b'], "otherData": ').removesuffix(b"}")
                try:
                    about = msgspec.json.decode(content, type=_About)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise DamagedInput(path, f"its facts cannot be read: {error}") from None
                break
            rows.take(line)
    missing = [f"{name_of(path)}: {problem}" for problem in rows.problems()]
    if about is None:
        missing.append(f"{name_of(path)}: it ends before its facts, so events may be missing too")
    if about is None and not rows.count:
        raise DamagedInput(path, "it ends before its first event")
    provenance = Provenance(origin="imported", source=name_of(path))
    facts = Facts()
    try:
        if about is not None:
            given: Any = msgspec.structs.asdict(about.provenance)
            provenance = Provenance(**given)
            missing = [*about.missing, *missing]
            facts = named(
                {
                    name: tuple(value) if isinstance(value, list) else value
                    for name, value in about.facts.items()
                }
            )
        return Run(
            provenance=provenance,
            facts=facts,
            gaps=gaps_of(missing),
            spans=rows.table(Spans),
            gradients=rows.table(Gradients),
            collectives=rows.table(Collectives),
        )
    except UsageError as error:  # no user typed these values: the file holds an odd one
        raise DamagedInput(path, str(error)) from None


class _Rows:
    """Collects rows and turns them into tables, in parts."""

    def __init__(self) -> None:
        self.count = 0
        self._odd = 0
        self._waiting: dict[str, list[tuple[Any, ...]]] = {"X": [], "C": [], "i": []}
        self._parts: dict[str, list[Any]] = {"X": [], "C": [], "i": []}

    def take(self, line: bytes) -> None:
        """Add the event of a line; count a line that holds no event of Fullwire's."""
        try:
            event = _DECODER.decode(line.rstrip(b",\r\n "))
            if event.ph == "M":
                return
            kind, row = _row(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            self._odd += 1
            return
        self.count += 1
        waiting = self._waiting[kind]
        waiting.append(row)
        if len(waiting) >= _ROWS:
            self._parts[kind].append(_KINDS[kind](**_columns(_KINDS[kind], waiting)))
            waiting.clear()

    def table(self, kind: type[AnyTable]) -> AnyTable:
        """Return all rows of a table."""
        [key] = [key for key, each in _KINDS.items() if each is kind]
        last = kind(**_columns(kind, self._waiting[key]))
        return kind.joined([*self._parts[key], last])

    def problems(self) -> Iterator[str]:
        """Say how many lines were left out."""
        if self._odd:
            yield f"{self._odd:,} lines are no events as they are written, and are left out"


_KINDS: dict[str, Any] = {"X": Spans, "C": Collectives, "i": Gradients}


def _columns(kind: type[Any], rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    types = kind.column_types()
    columns = zip(*rows, strict=True) if rows else ((),) * len(types)
    return {
        name: np.array(column, type_)
        for (name, type_), column in zip(types.items(), columns, strict=True)
    }


def _row(event: _Event) -> tuple[str, tuple[Any, ...]]:
    """Return the table of an event and its row; raise ValueError for an unknown event."""
    told = _ARGUMENTS.decode(event.args)
    start_ns = _ns(event.ts)
    end_ns = start_ns + _ns(event.dur)
    if (event.ph, event.cat) == ("X", "span"):
        return "X", (event.pid, told.step, told.lane, event.name, start_ns, end_ns)
    if (event.ph, event.cat) == ("X", "collective"):
        return "C", (
            event.pid,
            told.step,
            told.sequence,
            told.group,
            event.name,
            told.dtype,
            told.bytes,
            start_ns,
            start_ns + _ns(told.queued_us),
            end_ns,
        )
    if (event.ph, event.cat) == ("i", "gradient"):
        return "i", (event.pid, told.step, told.order, told.bytes, start_ns)
    raise ValueError(event.ph)


def _ns(time_us: Decimal) -> int:
    if not -_MOST_US <= time_us <= _MOST_US:
        raise ValueError(time_us)
    return int(time_us * 1000)


FORMAT = Format(
    key="chrome",
    label="Chrome traces of a run",
    looks_like=looks_like,
    read=lambda files, options: read_chrome(files[0]),
)
