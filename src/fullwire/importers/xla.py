"""Timelines of JAX and TensorFlow: the Chrome trace beside a profile of XLA (.trace.json.gz).

    {"displayTimeUnit": "ns", "metadata": {"highres-ticks": true}, "traceEvents": [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
    {"ph": "M", "pid": 1, "tid": 4, "name": "thread_name", "args": {"name": "Stream #4(Compute)"}},
    {"ph": "X", "pid": 1, "tid": 4, "ts": 5.1, "dur": 20.5, "name": "loop_fusion", "args": {...}},
    {}]}                                                               the last one is always empty

tensorflow and openxla write it (tsl/profiler/convert/trace_events_to_json.cc; names of devices and
lines are in tsl/profiler/utils/xplane_schema.cc). Each device is a rank. Work is on "Stream #..."
of a GPU and on "XLA Ops" of a TPU; other lines repeat it. Steps are the line "Steps", or the host's
marks with a step_num. The trace lacks the sizes of collectives.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fullwire.errors import DamagedInput
from fullwire.files import name_of, opened_plain
from fullwire.importers._format import (
    LIKELY,
    NEAR_BYTES,
    OF_XLA,
    Format,
    Likeness,
    near_miss,
)
from fullwire.importers.kineto.recognise import Known, asked_for, kinds_of, op_of, span_name
from fullwire.run.facts import Facts
from fullwire.run.gaps import gaps_of
from fullwire.run.run import SIZE_UNKNOWN, Collectives, Provenance, Run, Spans

_MOST_BYTES = 2 * 2**30
_LATEST_US = 3.2e13  # a year after the start
_DEVICE = re.compile(r"/device:(GPU|TPU|CUSTOM):?(\d{1,6})\b")
_COPIES = re.compile(r"Mem(?:cpy|set)", re.IGNORECASE)
# An operation of HLO that communicates, as XLA names it: "all-reduce.3", or its start and its end.
_COLLECTIVE = re.compile(
    r"%?(?:ragged-)?(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    r"|collective-broadcast)(?:-(start|done))?(?:\.[\w.]*)?"
)
_OPS = {
    "all-reduce": "allreduce",
    "all-gather": "allgather",
    "reduce-scatter": "reducescatter",
    "all-to-all": "alltoall",
    "collective-permute": "sendrecv",
    "collective-broadcast": "broadcast",
}


class _Args(msgspec.Struct, gc=False):
    name: Any = ""
    step_num: Any = None


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    pid: int = -1
    tid: int = -1
    ts: float = -1.0
    dur: float = 0.0
    name: str = ""
    args: _Args = msgspec.field(default_factory=_Args)


class _Timeline(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is such a timeline."""
    is_trace = beginning.lstrip()[:1] == b"{" and b'"traceEvents"' in beginning
    if is_trace and OF_XLA.search(beginning):
        return LIKELY
    is_near = b'"hlo_op"' in beginning[:NEAR_BYTES] or b'"XLA Ops"' in beginning[:NEAR_BYTES]
    return near_miss(is_near, 'the list "traceEvents" with processes such as "/device:GPU:0"')


def read_xla(path: Path, *, communication: str | None = None) -> Run:
    """Read a timeline as a run with a rank for each device."""
    pattern = asked_for(communication)
    with opened_plain(path) as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise DamagedInput(path, f"larger than {_MOST_BYTES:,} bytes unpacked")
    try:
        events = msgspec.json.decode(content, type=_Timeline).events
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedInput(path, f"expected a timeline of JAX or TensorFlow: {error}") from None
    processes: dict[int, str] = {}
    lines: dict[tuple[int, int], str] = {}
    for event in events:
        if event.ph == "M" and event.name == "process_name":
            processes[event.pid] = str(event.args.name)
        elif event.ph == "M" and event.name == "thread_name":
            lines[event.pid, event.tid] = str(event.args.name)
    named = {pid: _DEVICE.fullmatch(name) for pid, name in processes.items()}
    devices = sorted(
        ((found[1], int(found[2]), pid) for pid, found in named.items() if found),
    )
    rank_of = {pid: rank for rank, (_, _, pid) in enumerate(devices)}
    if not rank_of:
        raise DamagedInput(
            path, "a timeline of JAX or TensorFlow without a device: host work alone"
        )
    with_streams = {pid for (pid, _), line in lines.items() if line.startswith("Stream #")}
    usable = [event for event in events if 0 <= event.ts <= _LATEST_US and event.dur >= 0]
    work: list[tuple[int, str, int, int]] = []  # rank, name, start, end
    steps: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # number, start, end
    for event in usable:
        if event.ph != "X" or event.dur > _LATEST_US:
            continue
        line = lines.get((event.pid, event.tid), "")
        start_ns, end_ns = round(event.ts * 1e3), round((event.ts + event.dur) * 1e3)
        rank = rank_of.get(event.pid)
        if rank is None:
            number = str(event.args.step_num)
            if number.isdecimal() and len(number) < 10:
                steps[-1].append((int(number), start_ns, end_ns))
        elif line == "Steps" and event.name.isdecimal() and len(event.name) < 10:
            steps[rank].append((int(event.name), start_ns, end_ns))
        elif line.startswith("Stream #") or (line == "XLA Ops" and event.pid not in with_streams):
            work.append((rank, event.name, start_ns, end_ns))
    if not work:
        raise DamagedInput(path, "a timeline of JAX or TensorFlow whose devices did nothing in it")
    zero_ns = min(start_ns for _, _, start_ns, _ in work)
    remarks = [f"each of its {len(devices)} devices is taken for a rank"]
    if not any(steps.values()):
        remarks.append("it marks no steps")
    odd = sum(event.ph == "X" for event in events) - sum(event.ph == "X" for event in usable)
    gaps = [f"{name_of(path)}: {odd:,} events have no time that can be, and are left out"]
    spans, collectives = _tables(work, steps, len(devices), zero_ns, pattern)
    if len(collectives):
        gaps.append(
            f"of {len(collectives):,} of {len(collectives):,} collectives the size is not told"
        )
    return Run(
        provenance=Provenance(origin="imported", source=name_of(path)),
        facts=Facts(workers=len(devices), remarks="; ".join(remarks)),
        gaps=gaps_of(gaps if odd else gaps[1:]),
        spans=spans,
        collectives=collectives,
    )


def _tables(
    work: list[tuple[int, str, int, int]],
    steps: dict[int, list[tuple[int, int, int]]],
    ranks: int,
    zero_ns: int,
    pattern: re.Pattern[str] | None,
) -> tuple[Spans, Collectives]:
    """Divide the devices' work into spans and collectives, each in its rank's step."""
    names = list(dict.fromkeys(name for _, name, _, _ in work))
    kinds = dict(zip(names, kinds_of(names, pattern).tolist(), strict=True))
    named = {name: _COLLECTIVE.fullmatch(name) for name in names}
    ops = {name: _OPS[hlo[1]] if hlo else op_of(name) for name, hlo in named.items()}
    marks = {
        rank: sorted(steps[rank] or steps[-1], key=lambda mark: mark[1]) for rank in range(ranks)
    }
    begins = {rank: np.array([start for _, start, _ in of], np.int64) for rank, of in marks.items()}
    spans: list[tuple[int, int, str, str, int, int]] = [
        (rank, number, "host", "step", start_ns, end_ns)
        for rank, of in marks.items()
        for number, start_ns, end_ns in of
    ]
    found: list[tuple[int, int, int, str, int, int]] = []
    counted: Counter[tuple[int, int, str]] = Counter()
    under_way: dict[tuple[int, str], deque[int]] = defaultdict(deque)  # places in `found`
    for rank, name, start_ns, end_ns in sorted(work, key=lambda row: (row[0], row[2])):
        place = int(np.searchsorted(begins[rank], start_ns, "right")) - 1
        is_inside = place >= 0 and start_ns < marks[rank][place][2]
        step = marks[rank][place][0] if is_inside else -1
        hlo = named[name]
        communicates = hlo is not None or kinds[name] == Known.COMMUNICATES
        if communicates and ops[name]:
            # What runs beside computation has two operations: it lasts from its start to its end.
            part = hlo[2] if hlo else None
            if part == "start":
                under_way[rank, ops[name]].append(len(found))
            elif part == "done" and under_way[rank, ops[name]]:
                begun = under_way[rank, ops[name]].popleft()
                found[begun] = (*found[begun][:5], max(found[begun][5], end_ns))
                continue
            found.append((rank, step, counted[rank, step, ops[name]], ops[name], start_ns, end_ns))
            counted[rank, step, ops[name]] += 1
            continue
        lane = "communication" if communicates else "host" if _COPIES.match(name) else "compute"
        spans.append((rank, step, lane, span_name(name), start_ns, end_ns))
    columns = [*zip(*spans, strict=True)] or [()] * 6
    of_all = [*zip(*found, strict=True)] or [()] * 6
    begin_ns = np.array(of_all[4], np.int64) - zero_ns
    return Spans(
        rank=np.array(columns[0], np.int64),
        step=np.array(columns[1], np.int64),
        lane=np.array(columns[2], object),
        name=np.array(columns[3], object),
        start_ns=np.array(columns[4], np.int64) - zero_ns,
        end_ns=np.array(columns[5], np.int64) - zero_ns,
    ), Collectives(
        rank=np.array(of_all[0], np.int64),
        step=np.array(of_all[1], np.int64),
        sequence=np.array(of_all[2], np.int64),
        group=np.full(len(found), "devices", object),
        op=np.array(of_all[3], object),
        dtype=np.full(len(found), SIZE_UNKNOWN, object),
        bytes=np.zeros(len(found), np.int64),
        issue_ns=begin_ns,
        start_ns=begin_ns,
        end_ns=np.array(of_all[5], np.int64) - zero_ns,
    )


FORMAT = Format(
    key="xla",
    label="timelines of JAX and TensorFlow",
    looks_like=looks_like,
    read=lambda files, options: read_xla(files[0], communication=options.communication),
    tells=55,
    options=("communication",),
)
