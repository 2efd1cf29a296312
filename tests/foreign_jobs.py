"""Jobs played by hand, with known answers, and written as profilers of several makers and years do.

A rank is a processor that launches and streams that carry out. A collective ends for all of its
members together, some time after the last of them has come to it. This module shares no code with
the reader. The work of each rank is kept as intervals, which `figures` adds up piece by piece. The
begin and end of each collective on each rank are kept in the same way.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

LAUNCH_NS = 4_000
REACHED_NS = 2_000  # from a launch to the kernel, at the soonest
COMPUTE, NETWORK, NEARBY = 7, 20, 24  # streams
Of = Callable[[int, int], int]  # by rank and step
Interval = tuple[int, int]
Groups = dict[str, list[tuple[int, ...]]]  # the lists of ranks that bear a name
Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Do:
    """One action of every rank, and its length in microseconds."""

    what: Literal["compute", "copy", "collective", "input", "host", "sync", "unnamed"]
    us: Of | int = 0
    op: str = "allreduce"
    elements: int = 1_000_000
    group: str = "all"
    stream: int = COMPUTE
    is_waited_for: bool = True  # by the next computation
    is_backward: bool = False
    every: int = 1  # steps between two of these actions
    is_after_compute: bool = True  # the data that a collective sends was computed before

    def ns(self, rank: int, step: int) -> int:
        return 1_000 * (self.us if isinstance(self.us, int) else self.us(rank, step))


@dataclass(kw_only=True)
class Work:
    """A kernel or a copy as it was carried out."""

    do: Do
    launch_ns: int
    start_ns: int
    end_ns: int
    members: tuple[int, ...] = ()
    sequence: int = 0


@dataclass
class Played:
    """The work of one rank, on the one true clock."""

    rank: int
    work: list[Work] = field(default_factory=list)
    loading: list[Interval] = field(default_factory=list)
    steps: list[Interval] = field(default_factory=list)
    now_ns: int = 0  # of its processor
    free_ns: dict[int, int] = field(default_factory=dict)  # by stream


def everyone(world: int) -> Groups:
    return {"all": [tuple(range(world))]}


def play(
    program: Sequence[Do],
    *,
    ranks: int,
    steps: int,
    seed: int = 1,
    groups: Groups | None = None,
    begins_ns: Of = lambda rank, step: 0,
) -> list[Played]:
    """Make ranks carry out a program step by step."""
    source = random.Random(seed)
    groups = groups or everyone(ranks)
    played = [Played(rank, now_ns=1_000_000 + begins_ns(rank, 0)) for rank in range(ranks)]
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    for step in range(steps):
        began = [each.now_ns for each in played]
        for do in (each for each in program if step % each.every == each.every - 1):
            if do.what == "collective":
                for members in groups[do.group]:
                    number = counts[do.group, members] = counts.get((do.group, members), 0) + 1
                    _meet(do, [played[rank] for rank in members], step, number, source)
            else:
                for each in played:
                    _alone(do, each, step, source)
        for each, begin in zip(played, began, strict=True):
            each.steps.append((begin, each.now_ns))
    return played


def _alone(do: Do, each: Played, step: int, source: random.Random) -> None:
    length = do.ns(each.rank, step)
    if do.what == "input":
        each.loading.append((each.now_ns, each.now_ns + length))
        each.now_ns += length
    elif do.what == "host":
        each.now_ns += length
    elif do.what == "sync":
        each.now_ns = max(each.now_ns, *each.free_ns.values()) + LAUNCH_NS
    else:
        launch, start = _reached(do, each)
        length += source.randrange(-300, 301) if length > 10_000 else 0
        each.work.append(Work(do=do, launch_ns=launch, start_ns=start, end_ns=start + length))
        each.free_ns[do.stream] = start + length


def _meet(do: Do, members: list[Played], step: int, number: int, source: random.Random) -> None:
    begun = []
    for each in members:
        launch, start = _reached(do, each)
        if do.is_after_compute:
            start = max(start, each.free_ns.get(COMPUTE, 0) + 500)
        begun.append((each, launch, start))
    end = max(start for _, _, start in begun) + do.ns(members[0].rank, step)
    for each, launch, start in begun:
        mine = end + source.randrange(0, 1_500)
        each.work.append(
            Work(
                do=do,
                launch_ns=launch,
                start_ns=start,
                end_ns=mine,
                sequence=number,
                members=tuple(one.rank for one in members),
            )
        )
        each.free_ns[do.stream] = mine
        if do.is_waited_for:
            each.free_ns[COMPUTE] = max(each.free_ns.get(COMPUTE, 0), mine)


def _reached(do: Do, each: Played) -> tuple[int, int]:
    launch = each.now_ns
    each.now_ns += LAUNCH_NS
    return launch, max(launch + REACHED_NS, each.free_ns.get(do.stream, 0))


def figures(played: Sequence[Played], among: Sequence[int]) -> list[dict[str, float | None]]:
    """Add up the work of each recorded rank, piece by piece, in seconds, as `explain` prints it."""
    latest: dict[tuple[str, tuple[int, ...], int], int] = {}
    for each in played:
        for work in each.work:
            if work.members:
                key = (work.do.group, work.members, work.sequence)
                latest[key] = max(latest.get(key, 0), work.start_ns)
    return [_sums(played[rank], latest, set(among) >= set(range(len(played)))) for rank in among]


def _sums(
    each: Played, latest: dict[tuple[str, tuple[int, ...], int], int], is_told: bool
) -> dict[str, float | None]:
    moments = sorted(
        {t for work in each.work for t in (work.start_ns, work.end_ns)}
        | {
            t
            for work in each.work
            if work.members
            for t in (min(latest[work.do.group, work.members, work.sequence], work.end_ns),)
        }
    )
    sums = dict.fromkeys(("compute", "communication", "exposed", "overlap", "waiting", "busy"), 0)
    for begin, end in itertools.pairwise(moments):
        here = [work for work in each.work if work.start_ns <= begin < work.end_ns]
        computes = any(work.do.what == "compute" for work in here)
        sending = [work for work in here if work.do.what in ("collective", "unnamed")]
        transfers = any(
            work.do.what == "unnamed" or latest[work.do.group, work.members, work.sequence] <= begin
            for work in sending
        )
        length = end - begin
        sums["compute"] += length * computes
        sums["communication"] += length * bool(sending)
        sums["exposed"] += length * (bool(sending) and not computes)
        sums["overlap"] += length * (bool(sending) and computes)
        sums["waiting"] += length * (bool(sending) and not computes and not transfers)
        sums["busy"] += length * bool(here)
    span = moments[-1] - moments[0]
    found: dict[str, float | None] = {key: value * 1e-9 for key, value in sums.items()}
    found |= {"span": span * 1e-9, "idle": (span - sums["busy"]) * 1e-9}
    del found["busy"]
    if not is_told or any(work.do.what == "unnamed" for work in each.work):
        del found["waiting"]
    return found


NCCL_2_20 = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "allgather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reducescatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)",
    "alltoall": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}


@dataclass(frozen=True, kw_only=True)
class Writing:
    """A format in which a profiler writes a job; the content is the same in all of them."""

    names: dict[str, str] = field(default_factory=lambda: NCCL_2_20)
    arguments: Literal["kernel", "marks", "library", "none"] = "kernel"
    marks: Literal["profiler", "optimizer", "none"] = "profiler"
    is_hip: bool = False
    is_old: bool = False  # the categories of PyTorch 1.8
    base_ns: int | None = None
    stamps: Literal["whole", "decimal", "text"] = "decimal"
    clock_ns: Of = lambda rank, step: 0
    origin_us: int = 1_700_000_000_000_000
    is_packed: bool = False
    has_distributed_info: bool = True
    has_sequence: bool = False
    has_devices: bool = True
    compute_names: tuple[str, ...] = (
        "ampere_sgemm_128x64_tn",
        "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>(int)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
    )
    first_step: Of = lambda rank, step: 3
    name: Callable[[int], str] = lambda rank: f"host_{4000 + rank}.17000{rank:05}.pt.trace.json"
    form: Callable[[Event], list[Event]] = lambda event: [event]  # of each event, in its file


NCCL_2_10 = {
    "allreduce": "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    "allgather": "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)",
    "reducescatter": "ncclKernel_ReduceScatter_RING_LL_Sum_half(ncclWorkElem)",
    "alltoall": "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)",
    "broadcast": "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclWorkElem)",
}
NCCL_2_8 = {
    "allreduce": "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",
    "allgather": "ncclAllGatherRingLLKernel_copy_i8(ncclColl)",
    "reducescatter": "ncclReduceScatterRingLLKernel_sum_f32(ncclColl)",
    "alltoall": "ncclSendRecvKernel_copy_i8(ncclColl)",
    "broadcast": "ncclBroadcastRingLLKernel_copy_i8(ncclColl)",
}
GENERIC = dict.fromkeys(NCCL_2_20, "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)")
OLD_RCCL = dict.fromkeys(NCCL_2_20, "ncclKernel_Generic(ncclDevComm*, unsigned long, ncclWork*)")
MSCCLPP = dict.fromkeys(NCCL_2_20, "void mscclpp::allreduce7<__half>(__half*, __half*)")
_ROCM_COMPUTE = (
    "Cijk_Ailk_Bljk_SB_MT64x64x16_SE_K1",
    "void at::native::modern::elementwise_kernel<at::native::AddFunctor>(int)",
    "miopenSp3AsmConv_v21_1_2_gfx9_fp32_stride1",
)
_MARKS = {
    "allreduce": "nccl:all_reduce",
    "allgather": "nccl:_all_gather_base",
    "reducescatter": "nccl:_reduce_scatter_base",
    "alltoall": "nccl:all_to_all",
    "broadcast": "nccl:broadcast",
}
_TOLD_OPS = {
    "allreduce": "allreduce",
    "allgather": "_allgather_base",
    "reducescatter": "_reduce_scatter_base",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}
ROCM = Writing(is_hip=True, compute_names=_ROCM_COMPUTE, names=GENERIC)


def of_torch_2_3_on_rocm(event: Event) -> list[Event]:
    """Give only the place of a device's work; an arrow leads to it from its launch."""
    number = event.get("args", {}).get("correlation")
    if number is None:
        return [event]
    is_launch = event["cat"] == "cuda_runtime"
    if not is_launch:
        event = event | {"pid": event["args"]["device"], "args": {"External id": number + 7}}
    arrow = {"ph": "s", "id": number, "cat": "ac2g", "name": "ac2g"}
    arrow |= {key: event[key] for key in ("pid", "tid", "ts")}
    return [event, arrow if is_launch else arrow | {"ph": "f", "bp": "e"}]


def of_rocm_6_1(event: Event) -> list[Event]:
    """Number the launches of RCCL's kernels, and leave the kernels without numbers."""
    if event.get("cat") == "kernel" and "nccl" in event["name"]:
        event = event | {"args": event["args"] | {"correlation": 0}}
    return [event]


def of_an_intel_device(event: Event) -> list[Event]:
    """Name queues and libraries as the plugin for Level Zero does."""
    arguments = {
        "sycl queue" if key == "stream" else key: value for key, value in event["args"].items()
    }
    name, category = event["name"].replace("nccl:", "xccl:"), event.get("cat", "")
    changed = {"name": name, "cat": category.replace("cuda_", "xpu_"), "args": arguments}
    return [event | (changed if event["ph"] == "X" else {})]


def of_kineto_in_2026(event: Event) -> list[Event]:
    """Use categories that name no maker."""
    return [event | {"cat": event["cat"].removeprefix("cuda_")}] if "cat" in event else [event]


def of_mtia(event: Event) -> list[Event]:
    """Use the categories of Meta's own devices."""
    own = {"cuda_runtime": "mtia_runtime", "kernel": "mtia_ccp_events"}
    category = event.get("cat", "")
    return [event | {"cat": own.get(category, category)}]


def write(
    played: Sequence[Played], where: Path, writing: Writing, ranks: Sequence[int] | None = None
) -> Path:
    """Write the traces of some ranks."""
    where.mkdir(parents=True, exist_ok=True)
    for rank in range(len(played)) if ranks is None else ranks:
        text = json.dumps(_trace(played[rank], len(played), writing))
        text = text.replace('"@', "").replace('@"', "")
        path = where / writing.name(rank)
        if writing.is_packed:
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(text.encode(), 1))
        else:
            path.write_text(text)
    return where


def _trace(each: Played, world: int, writing: Writing) -> dict[str, Any]:
    events = list(_events(each, world, writing))
    random.Random(each.rank).shuffle(events)  # profilers promise no order
    events = [event for before in events for event in writing.form(before)]
    trace: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms"}
    if writing.has_distributed_info:
        trace["distributedInfo"] = {
            "backend": "nccl",
            "rank": each.rank,
            "world_size": world,
            "pg_count": 2,
        }
    if writing.base_ns is not None:
        trace["baseTimeNanoseconds"] = writing.base_ns + 10_000 * each.rank
    return trace | {"traceEvents": events, "traceName": "/tmp/trace.json"}


def _events(each: Played, world: int, writing: Writing) -> Iterator[dict[str, Any]]:
    at = _Stamps(each.rank, writing)
    yield {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "p"}}
    for number, step in enumerate(each.steps):
        yield from _marked(number, step, each.rank, writing, at)
    for interval in each.loading:
        name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        yield at.event("user_annotation", name, interval, 77, {})
    for number, work in enumerate(each.work, start=100):
        yield from _launched(work, number, each.rank, world, writing, at)


def _marked(
    number: int, step: Interval, rank: int, writing: Writing, at: _Stamps
) -> Iterator[dict[str, Any]]:
    yield at.event("python_function", "train.py(3): step", step, 77, {"Python id": 5})
    if writing.marks == "profiler":
        name = f"ProfilerStep#{writing.first_step(rank, 0) + number}"
        yield at.event("user_annotation", name, step, 77, {})
        yield at.event("gpu_user_annotation", name, step, 7, {})
    elif writing.marks == "optimizer":
        last = (step[1] - 20_000, step[1] - 1_000)
        yield at.event("user_annotation", "Optimizer.step#AdamW.step", last, 77, {})


def _launched(
    work: Work, number: int, rank: int, world: int, writing: Writing, at: _Stamps
) -> Iterator[dict[str, Any]]:
    launch = (work.launch_ns + 1_000, work.launch_ns + 3_000)
    inside = (work.launch_ns, work.launch_ns + LAUNCH_NS)
    told = _arguments(work, world, writing)
    thread = 78 if work.do.is_backward else 77
    if work.do.what == "collective" and writing.arguments == "marks":
        yield at.event("cpu_op", "record_param_comms", inside, thread, told)
    if work.do.what == "collective" and writing.arguments in ("marks", "library", "kernel"):
        yield at.event("user_annotation", _MARKS[work.do.op], inside, thread, {})
    if work.do.is_backward:
        name = "autograd::engine::evaluate_function: AddmmBackward0"
        yield at.event("cpu_op", name, inside, thread, {})
    call = "hipExtLaunchKernel" if writing.is_hip else "cudaLaunchKernelExC"
    runtime = "Runtime" if writing.is_old else "cuda_runtime"
    yield at.event(runtime, call, launch, thread, {"correlation": number, "cbid": 211})
    if not writing.has_devices:
        return
    kernel, copy = ("Kernel", "Memcpy") if writing.is_old else ("kernel", "gpu_memcpy")
    arguments = {"device": rank % 8, "stream": work.do.stream, "correlation": number, "context": 1}
    if work.do.what == "collective" and writing.arguments == "kernel":
        arguments |= told
    category = copy if work.do.what == "copy" else kernel
    name = _kernel_name(work, number, writing)
    yield at.event(category, name, (work.start_ns, work.end_ns), work.do.stream, arguments)


def _kernel_name(work: Work, number: int, writing: Writing) -> str:
    if work.do.what == "collective":
        return writing.names[work.do.op]
    if work.do.what == "unnamed":
        return (
            "nvshmemi_proxy_quiet_kernel",
            "void deep_ep::intranode::dispatch<8>(int4*)",
            "void deep_ep::internode::combine<false>(int4*)",
        )[number % 3]
    if work.do.what == "copy":
        return "CopyHostToDevice" if writing.is_hip else "Memcpy HtoD (Pinned -> Device)"
    return writing.compute_names[number % len(writing.compute_names)]


def _arguments(work: Work, world: int, writing: Writing) -> dict[str, Any]:
    op, size, members = work.do.op, work.do.elements, len(work.members)
    smaller = size // max(members, 1)
    told = {
        "Collective name": _TOLD_OPS[op],
        "dtype": "Float",
        "Group size": members,
        "In msg nelems": smaller if op == "allgather" else size,
        "Out msg nelems": smaller if op == "reducescatter" else size,
        "Process Group Name": {"all": "0", "near": "1", "far": "2"}.get(work.do.group, "9"),
        "Process Group Description": "default_pg",
        "Process Group Ranks": json.dumps(list(work.members)),
        "In split size": "[]",
    }
    return told | ({"Seq": work.sequence} if writing.has_sequence else {})


class _Stamps:
    """Writes times as a rank's own clock has them."""

    def __init__(self, rank: int, writing: Writing) -> None:
        self._form = writing.stamps
        # makes up for the base of the times
        zero = 0 if writing.base_ns is None else -10_000 * rank
        origin_ns = 0 if writing.base_ns is not None else 1_000 * writing.origin_us
        self._ahead_ns = origin_ns + zero + writing.clock_ns(rank, 0)

    def event(
        self, category: str, name: str, interval: Interval, thread: int, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        start_ns, length_ns = interval[0] + self._ahead_ns, interval[1] - interval[0]
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 77,
            "tid": thread,
            "ts": self._number(start_ns),
            "dur": self._number(length_ns),
            "args": arguments,
        }

    def _number(self, ns: int) -> str:
        if self._form == "whole":
            return f"@{round(ns / 1000)}@"
        text = f"{'-' if ns < 0 else ''}{abs(ns) // 1000}.{abs(ns) % 1000:03}"
        return text if self._form == "text" else f"@{text}@"


__all__ = ["Do", "Played", "Writing", "figures", "play", "replace", "write"]


def cut(each: Played, first: int, last: int) -> Played:
    """Return the part that a profiler saw which was on from one step to another."""
    begin, end = each.steps[first][0], each.steps[last][1]
    return Played(
        each.rank,
        [work for work in each.work if begin <= work.launch_ns < end],
        [interval for interval in each.loading if begin <= interval[0] < end],
        each.steps[first : last + 1],
    )
