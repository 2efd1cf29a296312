"""A run as a Chrome trace, which Perfetto opens: a process for each rank, lanes as threads.

The trace has one event a line. It is written a few rows at a time, so memory does not grow with the
run. Viewers expect that slices of a thread do not overlap, so overlapping slices go to further
threads of their lane. Times are microseconds with three decimals, which are whole nanoseconds. The
facts are at the end. From them and the events, `fullwire import` makes the same run
(`importers/chrome.py`). Samples and packets are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import msgspec
import numpy as np

from fullwire.importers import read
from fullwire.outputs import refuse_existing, written
from fullwire.run.gaps import Gap
from fullwire.run.run import Collectives, Gradients, Run, Spans, Table, Whole
from fullwire.run.store import is_run, read_rows, read_run

_ROWS = 50_000  # at a time
_MOST_THREADS = 100  # of a lane; further overlapping slices are drawn over each other
_LANES = ("steps", "compute", "communication", "collectives", "gradients", "input", "host")
_ENCODER = msgspec.json.Encoder()
_Event: TypeAlias = "dict[str, object]"


def export(run: Run | str | Path, output: str | Path, *, replace: bool = False) -> tuple[str, ...]:
    """Write a run as a Chrome trace, for Perfetto, and return what is missing from it.

    - `run`: a run, or the path of one or of a trace.
    - `output`: the file. It is there when it is whole.
    - `replace`: a file that exists is replaced.

        fw.export("job.run", "job.trace.json")
    """
    place = Path(output)
    refuse_existing(place, replace)
    with written(place) as beside, beside.open("wb") as file:
        return write_chrome(run, file)


def write_chrome(run: Run | str | Path, file: BinaryIO) -> tuple[str, ...]:
    """Write a run as a Chrome trace into an open file, and return what is missing from it."""
    place = None if isinstance(run, Run) or not is_run(Path(run)) else Path(run)
    described = read_run(place, only=()) if place else run if isinstance(run, Run) else read(run)
    gaps = list(described.gaps)
    file.write(b'{"fullwire": 1, "displayTimeUnit": "ms", "traceEvents": [')
    gap = b"\n"
    for event in _events(described, place, gaps):
        file.write(gap + _ENCODER.encode(event))
        gap = b",\n"
    missing = tuple(gap.reason for gap in gaps)
    about = {
        "provenance": {
            name: getattr(described.provenance, name) for name in ("origin", "source", "basis")
        },
        "facts": described.facts.known(),
        "missing": missing,
    }
    file.write(b'\n], "otherData": ' + _ENCODER.encode(about) + b"}\n")
    return missing


def _events(run: Run, place: Path | None, gaps: list[Gap]) -> Iterator[_Event]:
    """Yield all events; note the unreadable tables of a stored run in `gaps`."""
    threads = _Threads()
    for name, table in run.tables():
        if name not in ("spans", "gradients", "collectives"):
            continue
        firsts = range(0, len(table), _ROWS)
        slices = (table.rows(np.arange(n, min(n + _ROWS, len(table)))) for n in firsts)
        for rows in read_rows(place, name, gaps) if place else slices:
            for row in _drawn(rows):
                thread, named = threads.of(row.rank, row.lane, row.start_ns, row.end_ns)
                yield from named
                is_moment = row.category == "gradient"
                yield {
                    **({"ph": "i", "s": "t"} if is_moment else {"ph": "X"}),
                    "cat": row.category,
                    "name": row.name,
                    "pid": row.rank,
                    "tid": thread,
                    "ts": _us(row.start_ns),
                    **({} if is_moment else {"dur": _us(row.end_ns - row.start_ns)}),
                    "args": row.args,
                }


class _Threads:
    """The threads of a trace, and the time until which each is taken."""

    def __init__(self) -> None:
        self._lanes = {lane: place for place, lane in enumerate(_LANES)}
        self._taken_until_ns: dict[tuple[int, str], list[int]] = {}

    def of(self, rank: int, lane: str, start_ns: int, end_ns: int) -> tuple[int, list[_Event]]:
        """Return the first thread of a lane that is free at `start_ns`; name a new thread."""
        taken = self._taken_until_ns.setdefault((rank, lane), [])
        place = next((n for n, until_ns in enumerate(taken) if until_ns <= start_ns), len(taken))
        place = min(place, _MOST_THREADS - 1)
        first = self._lanes.setdefault(lane, len(self._lanes)) * _MOST_THREADS
        if place < len(taken):
            taken[place] = max(taken[place], end_ns)
            return first + place, []
        taken.append(end_ns)
        named = lane if place == 0 else f"{lane} {place + 1}"
        return first + place, [
            _naming("process_name", rank, 0, f"rank {rank}"),
            _naming("thread_name", rank, first + place, named),
        ]


def _naming(what: str, rank: int, thread: int, name: str) -> _Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


class _Drawn(NamedTuple):
    """The data of an event: a row of any table."""

    category: str
    name: str
    rank: int
    lane: str
    start_ns: int
    end_ns: int
    args: dict[str, object]


def _drawn(table: Table) -> Iterator[_Drawn]:
    """Yield the rows of a table by time."""
    if isinstance(table, Spans):
        for rank, step, lane, name, start_ns, end_ns in _in_order(table, table.start_ns):
            shown_in = "steps" if (lane, name) == ("host", "step") else lane
            args = {"step": step, "lane": lane}
            yield _Drawn("span", name, rank, shown_in, start_ns, end_ns, args)
    elif isinstance(table, Collectives):
        for rank, step, number, group, op, dtype, size, issue_ns, start_ns, end_ns in _in_order(
            table, table.issue_ns
        ):
            args = {
                "step": step,
                "sequence": number,
                "group": group,
                "dtype": dtype,
                "bytes": size,
                "queued_us": _us(start_ns - issue_ns),
            }
            yield _Drawn("collective", op, rank, "collectives", issue_ns, end_ns, args)
    else:
        assert isinstance(table, Gradients)
        for rank, step, order, size, ready_ns in _in_order(table, table.ready_ns):
            args = {"step": step, "order": order, "bytes": size}
            yield _Drawn("gradient", "gradient", rank, "gradients", ready_ns, ready_ns, args)


def _in_order(table: Table, time_ns: Whole) -> Iterator[tuple[Any, ...]]:
    """Yield rows by time, as values of Python."""
    ordered = table.rows(np.argsort(time_ns, kind="stable"))
    columns = [column.tolist() for column in ordered.columns().values()]
    return zip(*columns, strict=True)


def _us(time_ns: int) -> msgspec.Raw:
    whole, rest = divmod(abs(time_ns), 1000)
    return msgspec.Raw(f"{'-' if time_ns < 0 else ''}{whole}.{rest:03}".encode())
