"""Timelines of JAX and TensorFlow, in the form that XLA's profiler writes.

The form is that of tensorflow/tensorflow (tsl/profiler/convert/trace_events_to_json.cc) with the
names of tsl/profiler/utils/xplane_schema.cc. The GPU's lines are those that AMD's TraceLens and
published JAX traces show ("Stream #14(Compute)", NCCL's kernels, step_num on the host).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import fullwire
from fullwire.errors import DamagedInput, FullwireError
from fullwire.importers import read

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def meta(pid: int, name: str, tid: int | None = None) -> dict[str, Any]:
    kind = "process_name" if tid is None else "thread_name"
    where = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return {"ph": "M", **where, "name": kind, "args": {"name": name}}


def did(pid: int, tid: int, ts: float, dur: float, name: str, **args: str) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name, "args": args}


def timeline(where: Path, events: list[dict[str, Any]], name: str = "vm.trace.json") -> Path:
    whole = {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}}
    (where / name).write_text(json.dumps({**whole, "traceEvents": [*events, {}]}))
    return where / name


def of_gpus(gpus: int = 2) -> list[dict[str, Any]]:
    events = [meta(701, "/host:CPU"), meta(701, "python3", 9)]
    for number in range(3):
        events.append(did(701, 9, 1000 * number, 900, "train", step_num=str(number)))
    for gpu in range(1, gpus + 1):
        events += [meta(gpu, f"/device:GPU:{gpu - 1}"), meta(gpu, "Stream #14(Compute)", 14)]
        events += [meta(gpu, "Stream #15(MemcpyD2D)", 15), meta(gpu, "XLA Ops", 3)]
        for number in range(3):
            events += [
                did(gpu, 14, 1000 * number + 10, 400, "loop_fusion_kernel", hlo_op="fusion.1"),
                did(gpu, 3, 1000 * number + 10, 400, "fusion.1"),
                did(gpu, 14, 1000 * number + 500 + gpu, 200, NCCL, hlo_op="all-reduce.1"),
                did(gpu, 15, 1000 * number + 20, 5, "MemcpyD2D"),
            ]
    return events


def of_a_tpu() -> list[dict[str, Any]]:
    events = [meta(3, "/device:TPU:0"), meta(3, "Steps", 1), meta(3, "XLA Modules", 2)]
    events.append(meta(3, "XLA Ops", 3))
    for number in range(2):
        events.append(did(3, 1, 2000 * number, 1000, str(number + 7)))
        events.append(did(3, 2, 2000 * number, 1000, "jit_train_step(123)"))
        events.append(did(3, 3, 2000 * number, 600, "fusion.12"))
        events.append(did(3, 3, 2000 * number + 600, 300, "all-reduce.3"))
    return events


def test_each_gpu_is_a_rank_with_its_steps(tmp_path: Path) -> None:
    run = read(timeline(tmp_path, of_gpus()))
    assert run.facts.workers == 2
    steps = run.spans.rows(run.spans.name == "step")
    assert sorted(zip(steps.rank.tolist(), steps.step.tolist(), strict=True)) == [
        (rank, number) for rank in (0, 1) for number in range(3)
    ]
    sums = run.collectives
    assert (set(sums.op), set(sums.dtype), len(sums)) == ({"allreduce"}, {"unknown"}, 6)
    assert sums.step.tolist() == [0, 1, 2] * 2
    assert (sums.end_ns - sums.start_ns).tolist() == [200_000] * 6
    assert set(run.spans.lane[run.spans.name == "MemcpyD2D"]) == {"host"}
    assert "fusion.1" not in set(run.spans.name)


def test_work_is_counted_once_though_several_lines_tell_it(tmp_path: Path) -> None:
    run = read(timeline(tmp_path, of_a_tpu()))
    work = run.spans.rows(run.spans.lane == "compute")
    assert work.name.tolist() == ["fusion.12", "fusion.12"]
    assert work.step.tolist() == [7, 8]
    assert run.collectives.op.tolist() == ["allreduce", "allreduce"]


def test_a_packed_timeline_is_explained(tmp_path: Path) -> None:
    plain = timeline(tmp_path, of_gpus())
    packed = tmp_path / "vm.trace.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    explanation = fullwire.explain(read(packed))
    assert explanation.step_s == pytest.approx(1e-3, rel=0.2)
    assert explanation.account["compute"] == pytest.approx(400e-6)


def test_a_timeline_of_the_host_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedInput, match="without a device: host work alone"):
        read(timeline(tmp_path, [meta(1, "/host:CPU"), did(1, 2, 0, 5, "TfOp")]))
    with pytest.raises(DamagedInput, match="whose devices did nothing"):
        read(timeline(tmp_path, [meta(1, "/device:GPU:0"), did(1, 2, 0, 5, "other line")]))


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.95])
def test_a_timeline_that_is_cut_is_refused_in_one_line(tmp_path: Path, cut: float) -> None:
    path = timeline(tmp_path, of_gpus())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * cut)])
    with pytest.raises(FullwireError) as refused:
        read(path)
    assert "\n" not in str(refused.value)


def test_operations_of_hlo_are_told_by_their_whole_names(tmp_path: Path) -> None:
    names = {
        "reduce-window.1": None,
        "select-and-scatter.2": None,
        "optimization-barrier": None,
        "all-reduce.3": "allreduce",
        "reduce-scatter.4.remat": "reducescatter",
        "ragged-all-to-all": "alltoall",
        "collective-permute.5": "sendrecv",
    }
    events = [meta(3, "/device:TPU:0"), meta(3, "XLA Ops", 3)]
    events += [did(3, 3, 10 * place, 5, name) for place, name in enumerate(names)]
    run = read(timeline(tmp_path, events))
    assert run.collectives.op.tolist() == [op for op in names.values() if op]
    assert run.spans.name.tolist() == [name for name, op in names.items() if op is None]
    assert set(run.spans.lane) == {"compute"}


def test_a_collective_beside_computation_lasts_from_its_start_to_its_end(tmp_path: Path) -> None:
    events = [meta(3, "/device:TPU:0"), meta(3, "XLA Ops", 3)]
    for ts, dur, name in (
        (0, 1, "all-gather-start.1"),
        (1, 1, "all-gather-start.2"),
        (2, 30, "fusion.1"),
        (32, 4, "all-gather-done.7"),
        (40, 5, "all-gather-done.8"),
    ):
        events.append(did(3, 3, ts, dur, name))
    sums = read(timeline(tmp_path, events)).collectives
    assert (sums.start_ns.tolist(), sums.end_ns.tolist()) == ([0, 1000], [36_000, 45_000])
