"""Traces of a job's ranks become one Run.

    compute         kernels, by name; on the processor alone, operators (where they lie side by side
                    or inside each other, one span)
    communication   collectives, in their table; kernels that communicate but name no operation, as
                    those of DeepEP or NVSHMEM do, as spans: nothing is known of other ranks' part
    host            copies and fills of device memory, and the marks of steps and backward passes
    input           waiting for a DataLoader, as far as it lies within what the devices did

A collective is issued when its kernel begins: the device has come to it, and waits for others from
then on. Times are moved to one zero by the base that the profiler states and, between ranks, by
the clocks' difference as the ends of collectives show it (`clocks.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fullwire.errors import DamagedInput, UsageError
from fullwire.model.facts import FactValue
from fullwire.model.run import (
    SIZE_UNKNOWN,
    AnyTable,
    Collectives,
    Gradients,
    Provenance,
    Run,
    Spans,
    Text,
    Whole,
)
from fullwire.sources.files import name_of
from fullwire.sources.kineto import backward
from fullwire.sources.kineto import collectives as found_collectives
from fullwire.sources.kineto.clocks import Clocks, clocks_of
from fullwire.sources.kineto.collectives import Found
from fullwire.sources.kineto.recognise import Known, asked_for, kinds_of
from fullwire.sources.kineto.scan import ABSENT, MOST_RANKS, Trace, scanned
from fullwire.sources.kineto.steps import Launched, Steps, found_steps, launched, on_device
from fullwire.units import show_time, shown

_ENDINGS = (".json", ".json.gz")
LONG = 0.02  # of the span: unknown kernels that together take less change no answer
_MOST_NAMED = 5  # unknown kernels, in a warning
_LONGEST_NAME = 300  # characters of a kernel's name; templates can fill a page
_LOADING = "enumerate(DataLoader)#"
_MEANT = ("step", "wait", "codec", "forward", "backward")  # names that mean something in a Run
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,9})", re.IGNORECASE)
_REPORTED_NS = 100_000  # of a clock's difference: less is within what hosts usually keep


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Rank:
    """What one trace amounts to, in the trace's own clock."""

    rank: int
    trace: Trace
    spans: Spans
    gradients: Gradients
    found: Found
    is_numbered: bool
    unknown: Mapping[str, float]  # long kernels that nobody recognises: share of the span
    remarks: tuple[str, ...]


def read_kineto(paths: Sequence[Path], *, communication: str | None = None) -> Run:
    """Read the traces of one or more ranks; a directory stands for the traces in it."""
    pattern = asked_for(communication)
    missing: list[str] = []
    ranks: dict[int, _Rank] = {}
    for path in _files(paths):
        try:
            trace = scanned(path)
        except DamagedInput as error:
            missing.append(str(error))
            continue
        missing += trace.problems
        rank = _rank_of(trace, ranks, missing)
        if rank in ranks:
            missing.append(
                f"{name_of(path)}: rank {rank} is in {name_of(ranks[rank].trace.path)} already, "
                "so this one is left out"
            )
            continue
        ranks[rank] = _rank(rank, trace, pattern)
    if not ranks:
        raise DamagedInput(paths[0], missing[0] if missing else "no profiler trace is in it")
    return _run(paths, [ranks[number] for number in sorted(ranks)], missing)


def traces_in(directory: Path) -> list[Path]:
    """List what may be traces in a directory and below."""
    try:
        found = sorted(path for path in directory.rglob("*") if path.name.endswith(_ENDINGS))
        return [path for path in found if path.is_file()]
    except OSError as error:
        raise UsageError(f"{directory}: cannot be read: {error.strerror or error}") from None


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from traces_in(path)
        else:
            yield path


def _rank_of(trace: Trace, taken: Mapping[int, _Rank], missing: list[str]) -> int:
    """Return the rank that a trace names, or its file, or else the first one free."""
    if trace.rank is not None:
        return trace.rank
    named = _RANK_IN_NAME.search(trace.path.name)
    rank = int(named[1]) if named else next(n for n in range(len(taken) + 1) if n not in taken)
    where = "as its name says" if named else "for want of better"
    missing.append(
        f"{name_of(trace.path)}: it does not say which rank it is of, so it is taken for rank "
        f"{rank}, {where}"
    )
    return rank


def _rank(rank: int, trace: Trace, pattern: re.Pattern[str] | None) -> _Rank:
    steps = found_steps(trace)
    by_launch = launched(trace, steps)
    kinds = _kinds(trace, pattern)
    if len(kinds):
        spans, gradients, found = _device_tables(rank, trace, steps, by_launch, kinds)
    else:
        found = found_collectives.of_marks(trace, steps)
        passes, gradients = backward.on_processor(rank, trace, steps, found)
        spans = _joined([_processor_spans(rank, trace, steps), passes])
    return _Rank(
        rank=rank, trace=trace, spans=spans, gradients=gradients, found=found,
        is_numbered=steps.is_numbered,
        unknown=_long_unknown(trace, kinds), remarks=tuple(_remarks(rank, trace, by_launch)),
    )  # fmt: skip


def _kinds(trace: Trace, pattern: re.Pattern[str] | None) -> NDArray[np.int8]:
    """Say for each work of a device what is known of it; copies and fills compute nothing."""
    by_name = kinds_of(trace.names, pattern)
    kinds = by_name[trace.work["name"]]
    is_kernel = trace.work["kind"] == 0
    kinds[is_kernel & (trace.work["note"] >= 0)] = Known.COMMUNICATES
    kinds[_is_on_communication_stream(trace, kinds) & is_kernel & (kinds == Known.NOTHING)] = (
        Known.COMMUNICATES
    )
    kinds[~is_kernel & (kinds != Known.COMMUNICATES)] = Known.NOTHING
    return kinds


def _is_on_communication_stream(trace: Trace, kinds: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Say what ran on streams that do nothing but communicate, as far as names tell."""
    lanes = np.column_stack([trace.work["device"], trace.work["stream"]])
    _, lane = np.unique(lanes, axis=0, return_inverse=True)
    lane = lane.reshape(-1)
    computes = np.bincount(lane, kinds == Known.COMPUTES)
    communicates = np.bincount(lane, kinds == Known.COMMUNICATES)
    return np.asarray((communicates > 0) & (computes == 0))[lane]


def _device_tables(
    rank: int, trace: Trace, steps: Steps, by_launch: Launched, kinds: NDArray[np.int8]
) -> tuple[Spans, Gradients, Found]:
    work = trace.work
    is_kernel = work["kind"] == 0
    sending = np.flatnonzero(kinds == Known.COMMUNICATES)
    found, is_named = found_collectives.of_kernels(trace, steps, by_launch, sending)
    lane = np.where(is_kernel, "compute", "host").astype(object)
    lane[sending] = "communication"
    in_spans = np.ones(len(kinds), bool)
    in_spans[sending[is_named]] = False
    rows = np.flatnonzero(in_spans)
    names = _span_names(trace)
    end_ns = work["start_ns"] + work["duration_ns"]
    spans = _spans(
        rank, steps.numbered(by_launch.step[rows]), lane[rows], names[work["name"][rows]],
        work["start_ns"][rows], end_ns[rows],
    )  # fmt: skip
    marks = _marked(rank, steps, *on_device(trace, steps, by_launch.step))
    window = (int(work["start_ns"].min()), int(end_ns.max()))
    named = _only(found, is_named)
    computes = is_kernel & (kinds != Known.COMMUNICATES)
    passes, gradients = backward.on_device(
        rank, trace, steps, by_launch, computes, named, by_launch.time_ns[sending[is_named]]
    )
    return _joined([spans, marks, passes, _loading(rank, trace, steps, window)]), gradients, named


def _processor_spans(rank: int, trace: Trace, steps: Steps) -> Spans:
    """Take operators for computation, in a job whose trace holds no device."""
    lane = "host" if _lacks_its_devices(trace) else "compute"
    start_ns, end_ns = _united(trace.operators["start_ns"], trace.operators["end_ns"])
    count = len(start_ns)
    spans = _spans(
        rank, steps.numbered(steps.of(start_ns)), np.full(count, lane, object),
        np.full(count, "operators", object), start_ns, end_ns,
    )  # fmt: skip
    marks = _marked(rank, steps, steps.start_ns, steps.end_ns)
    window = (-(2**62), 2**62)
    return _joined([spans, marks, _loading(rank, trace, steps, window)])


def _lacks_its_devices(trace: Trace) -> bool:
    """Say whether a job of devices was traced without them: its operators are launches, no more."""
    is_of_devices = bool({trace.backend, *trace.libraries} & {"nccl", "rccl"})
    return is_of_devices and not len(trace.work["kind"])


def _united(start_ns: Whole, end_ns: Whole) -> tuple[Whole, Whole]:
    order = np.argsort(start_ns, kind="stable")
    start, reached = start_ns[order], np.maximum.accumulate(end_ns[order])
    first = np.flatnonzero(np.append([True], start[1:] > reached[:-1])[: len(start)])
    last = np.append(first[1:], len(start)) - 1 if len(start) else first
    return start[first], reached[last]


def _marked(rank: int, steps: Steps, start_ns: Whole, end_ns: Whole) -> Spans:
    kept = end_ns > start_ns
    count = int(kept.sum())
    return _spans(
        rank, steps.number[kept], np.full(count, "host", object), np.full(count, "step", object),
        start_ns[kept], end_ns[kept],
    )  # fmt: skip


def _loading(rank: int, trace: Trace, steps: Steps, window: tuple[int, int]) -> Spans:
    is_loading = np.array([name.startswith(_LOADING) for name in trace.names])
    rows = np.flatnonzero(is_loading[trace.marks["name"]])
    begin_ns = trace.marks["start_ns"][rows]
    start_ns = np.maximum(begin_ns, window[0])
    end_ns = np.minimum(begin_ns + trace.marks["duration_ns"][rows], window[1])
    kept = end_ns > start_ns
    count = int(kept.sum())
    return _spans(
        rank, steps.numbered(steps.of(begin_ns[kept])), np.full(count, "input", object),
        np.full(count, "DataLoader", object), start_ns[kept], end_ns[kept],
    )  # fmt: skip


def _spans(rank: int, step: Whole, lane: Text, name: Text, start_ns: Whole, end_ns: Whole) -> Spans:
    return Spans(
        rank=np.full(len(step), rank), step=step, lane=lane, name=name, start_ns=start_ns,
        end_ns=end_ns,
    )  # fmt: skip


def _span_names(trace: Trace) -> Text:
    """Return the names as spans bear them: short, and none that means something else there."""
    names = np.empty(len(trace.names), object)
    names[:] = [
        f"{name} (kernel)" if name in _MEANT else name[:_LONGEST_NAME] for name in trace.names
    ]
    return names


def _only(found: Found, chosen: NDArray[np.bool_]) -> Found:
    return Found(**{name: getattr(found, name)[chosen] for name in Found.__slots__})


def _long_unknown(trace: Trace, kinds: NDArray[np.int8]) -> Mapping[str, float]:
    work = trace.work
    rows = np.flatnonzero((kinds == Known.NOTHING) & (work["kind"] == 0))
    if not len(rows):
        return {}
    span_ns = int((work["start_ns"] + work["duration_ns"]).max() - work["start_ns"].min())
    total_ns = np.bincount(work["name"][rows], work["duration_ns"][rows])
    long = np.flatnonzero(total_ns >= LONG * max(span_ns, 1))
    return {trace.names[number]: float(total_ns[number] / max(span_ns, 1)) for number in long}


def _remarks(rank: int, trace: Trace, by_launch: Launched) -> Iterator[str]:
    work = trace.work
    if _lacks_its_devices(trace):
        yield (
            f"rank {rank}: the job communicates by NCCL, and its trace holds nothing of devices: "
            "neither their computation nor their communication can be told"
        )
    if len(work["kind"]) and not by_launch.is_by_launch:
        yield (
            f"rank {rank}: no launch is in the trace, so the device's work is cut at the "
            "processor's marks of steps, which it may lag behind"
        )
    devices = np.unique(work["device"])
    if len(devices) > 1:
        yield f"rank {rank}: it used {len(devices)} devices, which are taken for one"


def _run(paths: Sequence[Path], ranks: Sequence[_Rank], missing: list[str]) -> Run:
    if len({each.trace.base_ns is None for each in ranks}) > 1:
        missing.append("some traces lack baseTimeNanoseconds, so their times stand apart")
    tables = _numbered_alike(ranks)
    spans = [_shifted(each.spans, each.trace.base_ns or 0) for each in ranks]
    clocks = clocks_of(tables)
    shifts = [-clocks.ahead_ns.get(each.rank, 0) for each in ranks]
    zero_ns = min(
        (int(start_ns.min()) + shift
         for each, table, shift in zip(spans, tables, shifts, strict=True)
         for start_ns in (each.start_ns, table.issue_ns) if len(start_ns)), default=0,
    )  # fmt: skip
    sources = ", ".join(map(name_of, paths[:_MOST_NAMED]))
    return Run(
        provenance=Provenance(
            origin="imported",
            source=sources if len(paths) <= _MOST_NAMED else f"{sources} and others",
        ),
        facts=_facts(ranks, clocks),
        missing=(*missing, *_absent_ranks(ranks), *_absent_sizes(tables)),
        spans=_joined([_shifted(each, shift - zero_ns)
                       for each, shift in zip(spans, shifts, strict=True)]),
        gradients=_joined([
            _shifted(each.gradients, (each.trace.base_ns or 0) + shift - zero_ns)
            for each, shift in zip(ranks, shifts, strict=True)
        ]),
        collectives=_joined([_shifted(each, shift - zero_ns)
                             for each, shift in zip(tables, shifts, strict=True)]),
    )  # fmt: skip


def _numbered_alike(ranks: Sequence[_Rank]) -> list[Collectives]:
    """Number every rank's collectives so that those of one sequence belong together."""
    own = _groups_with_own_numbers(ranks)
    several = _names_of_several_groups(ranks)
    return [
        _shifted(
            found_collectives.numbered(_with_members(each.found, several), each.rank, own),
            each.trace.base_ns or 0,
        )
        for each in ranks
    ]


def _shifted(table: AnyTable, by_ns: int) -> AnyTable:
    return type(table)(**{
        name: column + by_ns if name.endswith("_ns") else column
        for name, column in table.columns().items()
    })  # fmt: skip


def _joined(tables: Sequence[AnyTable]) -> AnyTable:
    columns = [table.columns() for table in tables]
    return type(tables[0])(**{
        name: np.concatenate([each[name] for each in columns])
        for name in tables[0].column_types()
    })  # fmt: skip


def _groups_with_own_numbers(ranks: Sequence[_Rank]) -> frozenset[str]:
    """Find the groups whose collectives the traces number themselves, each once on every rank."""
    seen: set[str] = set()
    wrong: set[str] = set()
    for each in ranks:
        keys = list(zip(each.found.group.tolist(), each.found.op.tolist(),
                        each.found.sequence.tolist(), strict=True))  # fmt: skip
        seen |= {group for group, _, _ in keys}
        wrong |= {key[0] for key, count in Counter(keys).items() if count > 1 or key[2] == ABSENT}
    return frozenset(seen - wrong)


def _with_members(found: Found, several: set[str]) -> Found:
    """Tell groups of one name apart that have other members, as those of a device mesh do."""
    group = np.empty(len(found.group), object)
    group[:] = [
        f"{name} {members}" if name in several else name
        for name, members in zip(found.group.tolist(), found.members.tolist(), strict=True)
    ]
    columns = {name: getattr(found, name) for name in Found.__slots__}
    return Found(**(columns | {"group": group}))


def _names_of_several_groups(ranks: Sequence[_Rank]) -> set[str]:
    members: dict[str, set[str]] = {}
    for each in ranks:
        for name, of in set(zip(each.found.group.tolist(), each.found.members.tolist(),
                                strict=True)):  # fmt: skip
            members.setdefault(name, set()).add(of)
    return {name for name, of in members.items() if len(of - {""}) > 1}


def _facts(ranks: Sequence[_Rank], clocks: Clocks) -> dict[str, FactValue]:
    facts: dict[str, FactValue] = {"workers": _world(ranks)}
    if any(len(each.gradients) for each in ranks):
        facts["buckets"] = "none"  # what is known as a gradient is a bucket already
    for name, values in (
        ("backend", [each.trace.backend for each in ranks]),
        ("device", [each.trace.device for each in ranks]),
    ):
        told = sorted(set(filter(None, values)))
        if told:
            facts[name] = ", ".join(told[:8])
    hosts = [each.trace.host for each in ranks]
    if all(hosts) and [each.rank for each in ranks] == list(range(len(ranks))):
        facts["hosts"] = ",".join(host.replace(",", ".") for host in hosts)
    if len(ranks) > 1:
        facts["clock_scatter_s"] = tuple(
            (rank, scatter_ns * 1e-9) for rank, scatter_ns in sorted(clocks.scatter_ns.items())
        )
    remarks = "; ".join([*_about_ranks(ranks), *_about_clocks(ranks, clocks)])
    return facts | {"remarks": remarks} if remarks else facts


def _world(ranks: Sequence[_Rank]) -> int:
    """Return how many ranks the job had, or at least had: one that communicates has two."""
    told = [each.trace.world for each in ranks if each.trace.world]
    groups = [int(each.trace.notes["group_size"].max(initial=0)) for each in ranks]
    least = 2 if any(each.trace.libraries for each in ranks) else 1
    return max([*told, *(size for size in groups if size <= MOST_RANKS), ranks[-1].rank + 1, least])


def _absent_ranks(ranks: Sequence[_Rank]) -> Iterator[str]:
    world = _world(ranks)
    if len(ranks) < world:
        yield f"{len(ranks)} of {world} ranks are here"
    if not any(each.trace.world for each in ranks):
        yield f"no trace says how many ranks the job had; it had at least {world}"


def _absent_sizes(tables: Sequence[Collectives]) -> Iterator[str]:
    total = sum(map(len, tables))
    unknown = sum(int((table.dtype == SIZE_UNKNOWN).sum()) for table in tables)
    if unknown:
        yield f"of {unknown:,} of {total:,} collectives the size is not told"


def _about_ranks(ranks: Sequence[_Rank]) -> Iterator[str]:
    unknown: dict[str, tuple[float, int]] = {}
    for each in ranks:
        for name, share in each.unknown.items():
            unknown[name] = max(unknown.get(name, (0.0, 0)), (share, each.rank))
    longest = sorted(unknown.items(), key=lambda item: -item[1][0])[:_MOST_NAMED]
    if longest:
        named = ", ".join(
            f"{shown(name)} ({share:.0%} of rank {rank}'s trace)" for name, (share, rank) in longest
        )
        yield (
            f"nobody recognises these long kernels, which are taken for computation: {named}; "
            "--communication REGEX says which communicate"
        )
    said = [remark for each in ranks for remark in each.remarks]
    yield from said[:_MOST_NAMED]
    if len(said) > _MOST_NAMED:
        yield f"and {len(said) - _MOST_NAMED} more remarks of this kind"


def _about_clocks(ranks: Sequence[_Rank], clocks: Clocks) -> Iterator[str]:
    moved = {rank: ahead for rank, ahead in clocks.ahead_ns.items() if abs(ahead) > _REPORTED_NS}
    if moved:
        rank = max(moved, key=lambda each: abs(moved[each]))
        direction = "ahead of" if moved[rank] > 0 else "behind"
        yield (
            f"clocks of {len(moved)} ranks were corrected, by the ends of their collectives; rank "
            f"{rank}'s was {show_time(abs(moved[rank]) * 1e-9)} {direction} rank {ranks[0].rank}'s"
        )
    if clocks.unsettled:
        yield (
            f"the clocks of ranks {', '.join(map(str, clocks.unsettled[:8]))} could not be held "
            "against the others', for want of common collectives"
        )
