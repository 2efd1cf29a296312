"""Figures of invented traces against a slow reference that shares no code with the reader.

A case is a few ranks whose kernels, copies and collectives have whole microseconds. The reference
goes through them microsecond by microsecond. The same case is then written as profilers of several
years and makers write it. The figures must stay the same.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire
from fullwire.importers import read
from tests.strategies import cases

END_US = 120  # of a case
COMPUTING = (
    "ampere_sgemm_128x64_tn",
    "Cijk_Ailk_Bljk_SB_MT64x64x16_SE_K1",
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>(int)",
    "nobody knows this one",
)
SENDING = (
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
    "rcclGenericKernel_AllReduce(ncclDevComm*)",
    "mscclpp::allreduce<float>(void*)",
    "void mscclKernel_Sum_float_Simple_false(ncclDevComm*)",
)
# names that tell no operation
UNNAMED = ("nvshmemi_proxy_quiet", "void deep_ep::intranode::dispatch<4>(int4*)")
_BARE = "@"  # Around a number that is written literally, because a float of 10^15 is inexact.
Interval = tuple[int, int]


@dataclass(frozen=True)
class Rank:
    """The work of one rank: intervals of microseconds, without their ends."""

    computing: tuple[Interval, ...]
    copying: tuple[Interval, ...]
    unnamed: tuple[Interval, ...]
    collectives: tuple[Interval, ...]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Rank, ...]:
    intervals = st.lists(
        st.tuples(st.integers(0, END_US - 40), st.integers(1, 40)).map(lambda x: (x[0], sum(x))),
        max_size=5,
    ).map(tuple)
    count = draw(st.integers(1, 3))
    ends = sorted(draw(st.sets(st.integers(1, END_US), max_size=4)))
    ranks = []
    for _ in range(count):
        issues = [draw(st.integers(0, end - 1)) for end in ends]
        issues = [max(each, before) for each, before in zip(issues, [0, *ends], strict=False)]
        computing = draw(intervals) or ((0, 1),)
        ranks.append(
            Rank(
                computing,
                draw(intervals),
                draw(intervals) if draw(st.booleans()) else (),
                tuple(zip(issues, ends, strict=True)),
            )
        )
    return tuple(ranks)


def reference(job: tuple[Rank, ...]) -> list[dict[str, int | None]]:
    """Go through each rank's microseconds."""
    count = len(job[0].collectives)
    latest = [max(rank.collectives[number][0] for rank in job) for number in range(count)]
    found = []
    for rank in job:
        sums = dict.fromkeys(("compute", "communication", "exposed", "overlap", "waiting"), 0)
        recorded, busy = [], 0
        untold = 0
        for us in range(END_US + 1):
            computes = any(begin <= us < end for begin, end in rank.computing)
            copies = any(begin <= us < end for begin, end in rank.copying)
            outstanding = [
                n for n, (begin, end) in enumerate(rank.collectives) if begin <= us < end
            ]
            unnamed = any(begin <= us < end for begin, end in rank.unnamed)
            communicates = bool(outstanding) or unnamed
            transfers = any(latest[number] <= us for number in outstanding)
            sums["compute"] += computes
            sums["communication"] += communicates
            sums["exposed"] += communicates and not computes
            sums["overlap"] += communicates and computes
            sums["waiting"] += bool(outstanding) and not (computes or transfers or unnamed)
            untold += unnamed and not (computes or transfers)
            busy += computes or copies or communicates
            recorded += [us] if computes or copies or communicates else []
        span = recorded[-1] - recorded[0] + 1
        found.append(
            {
                "span": span,
                **sums,
                "idle": span - busy,
                "waiting": None if untold > 0.05 * sums["exposed"] else sums["waiting"],
            }
        )
    return found


@dataclass(frozen=True)
class Dialect:
    """A profiler's way of writing; the content is the same in all of them."""

    sending: str = SENDING[0]
    origin_us: int = 0
    base_ns: int | None = None
    are_strings: bool = False
    fraction: str = ""  # of a microsecond, behind every start
    is_compressed: bool = False
    has_arguments: bool = True
    has_marks: bool = False  # `record_param_comms` around launches, where kernels have no details.
    is_old: bool = False  # the categories of PyTorch 1.8
    has_others: bool = False  # events that the reader ignores
    reversed: bool = False
    spaces: int | None = None


DIALECTS = [
    Dialect(),
    *(Dialect(sending=name) for name in SENDING),
    Dialect(origin_us=1_669_783_687_464_181, fraction=".123"),
    Dialect(origin_us=5_000_000, base_ns=1_755_000_000_000_000_000, fraction=".007"),
    Dialect(are_strings=True, fraction=".5"),
    Dialect(is_compressed=True, spaces=2),
    Dialect(has_arguments=False, has_marks=True),
    Dialect(has_arguments=False, has_marks=True, sending="kernel_of_an_unknown_library"),
    Dialect(is_old=True),
    Dialect(has_others=True, reversed=True),
]


def written(job: tuple[Rank, ...], where: Path, dialect: Dialect) -> None:
    for number, rank in enumerate(job):
        text = json.dumps(_trace(number, len(job), rank, dialect), indent=dialect.spaces)
        text = text.replace(f'"{_BARE}', "").replace(f'{_BARE}"', "")
        if dialect.is_compressed:
            (where / f"{number}.pt.trace.json.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (where / f"{number}.pt.trace.json").write_text(text)


def _trace(number: int, world: int, rank: Rank, dialect: Dialect) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    for kind, category, intervals in (
        ("compute", "Kernel" if dialect.is_old else "kernel", rank.computing),
        ("copy", "Memcpy" if dialect.is_old else "gpu_memcpy", rank.copying),
        ("unnamed", "Kernel" if dialect.is_old else "kernel", rank.unnamed),
        ("send", "Kernel" if dialect.is_old else "kernel", rank.collectives),
    ):
        for place, interval in enumerate(intervals):
            events += _work(kind, category, place, interval, len(events), world, dialect)
    if dialect.has_others:
        events += _others()
    trace: dict[str, Any] = {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "distributedInfo": {"backend": "nccl", "rank": number, "world_size": world},
    }
    if dialect.base_ns is not None:
        trace["baseTimeNanoseconds"] = dialect.base_ns
    trace["traceEvents"] = events[::-1] if dialect.reversed else events
    return trace | {"traceName": "/tmp/x.json"}


def _work(
    kind: str,
    category: str,
    place: int,
    interval: Interval,
    number: int,
    world: int,
    dialect: Dialect,
) -> list[dict[str, Any]]:
    names = {
        "compute": COMPUTING[place % len(COMPUTING)],
        "copy": "Memcpy HtoD (Pinned -> Device)",
        "unnamed": UNNAMED[place % len(UNNAMED)],
        "send": dialect.sending,
    }
    streams = {"compute": 7 + place % 2, "copy": 30, "unnamed": 31, "send": 20}
    stream = streams[kind]
    arguments: dict[str, Any] = {"device": 0, "stream": stream, "correlation": number}
    told = {
        "Collective name": "allreduce",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "dtype": "Float",
        "Group size": world,
        "Process Group Name": "0",
    }
    if kind == "send" and dialect.has_arguments:
        arguments |= told
    events = [_event(category, names[kind], interval, stream, arguments, dialect)]
    if kind == "send" and dialect.has_marks:
        launch = (-1_000 + 20 * place, -990 + 20 * place)
        inner = (launch[0] + 2, launch[1] - 2)
        events += [
            _event("cpu_op", "record_param_comms", launch, 1, told, dialect),
            _event(
                "cuda_runtime", "cudaLaunchKernelExC", inner, 1, {"correlation": number}, dialect
            ),
        ]
    return events


def _event(
    category: str,
    name: str,
    interval: Interval,
    thread: int,
    arguments: dict[str, Any],
    dialect: Dialect,
) -> dict[str, Any]:
    start, length = interval[0] + dialect.origin_us, interval[1] - interval[0]
    exact = f"{start}{dialect.fraction}"
    if not dialect.are_strings:
        exact = f"{_BARE}{exact}{_BARE}"
    told = str(length) if dialect.are_strings else length
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": exact,
        "dur": told,
        "args": arguments,
    }


def _others() -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "x"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 1, "tid": 1, "ts": 3},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 1, "tid": 7, "ts": 4, "bp": "e"},
        {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": 2, "args": {}},
        {
            "ph": "X",
            "cat": "python_function",
            "name": "nccl",
            "pid": 1,
            "tid": 1,
            "ts": -9e5,
            "dur": 9e6,
            "args": {"Python id": 1},
        },
        {
            "ph": "X",
            "cat": "gpu_user_annotation",
            "name": "nccl:all_reduce",
            "pid": 0,
            "tid": 7,
            "ts": -500,
            "dur": 4_000,
            "args": {},
        },
        {
            "ph": "X",
            "cat": "cuda_sync",
            "name": "Stream Wait Event",
            "pid": 0,
            "tid": 7,
            "ts": -70,
            "dur": 900,
            "args": {"stream": 7},
        },
        {
            "ph": "X",
            "cat": "overhead",
            "name": "Buffer Flush",
            "pid": -1,
            "tid": 0,
            "ts": 1,
            "dur": 400,
        },
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "pid": "Spans",
            "ts": -5_000,
            "dur": 99_000,
            "tid": "PyTorch Profiler",
        },
    ]


def figures(where: Path) -> list[dict[str, float | None]]:
    keys = ("span", "compute", "communication", "exposed", "overlap", "waiting", "idle")
    ranks = fullwire.explain(read(where)).ranks
    return [
        {
            key: None if (s := getattr(rank, f"{key}_s")) is None else round(s * 1e6, 6)
            for key in keys
        }
        for rank in ranks
    ]


@cases(250)
@given(jobs(), st.sampled_from(DIALECTS))
def test_every_figure_of_every_rank_agrees_with_the_reference(
    job: tuple[Rank, ...], dialect: Dialect
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        written(job, Path(folder), dialect)
        found = figures(Path(folder))
    expected = reference(job)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == {key: theirs[key] for key in mine}


@pytest.mark.parametrize("dialect", DIALECTS, ids=range(len(DIALECTS)))
def test_one_job_is_the_same_in_every_dialect(tmp_path: Path, dialect: Dialect) -> None:
    job = (
        Rank(((0, 30), (20, 50), (70, 90)), ((45, 60),), (), ((40, 80), (85, 110))),
        Rank(((0, 60), (62, 75)), (), (), ((65, 80), (81, 110))),
    )
    written(job, tmp_path, dialect)
    assert figures(tmp_path) == [
        {
            "span": 110,
            "compute": 70,
            "communication": 65,
            "exposed": 40,
            "overlap": 25,
            "waiting": 15,
            "idle": 0,
        },
        {
            "span": 110,
            "compute": 73,
            "communication": 44,
            "exposed": 34,
            "overlap": 10,
            "waiting": 4,
            "idle": 3,
        },
    ]
