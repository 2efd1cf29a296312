"""Traces of a small transformer on GPUs, as Kineto writes them under Megatron and torchtitan.

Collectives are NCCL's: they bear the name of their group, a number. `distributedInfo` describes the
groups of a rank, with all those that the framework makes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias

Framework: TypeAlias = Literal["megatron", "torchtitan", "torchtitan-unflattened"]
Attention: TypeAlias = Literal["aten", "flash_attn", "kernels"]

HIDDEN, HEADS, FFN, LAYERS, VOCAB, SEQUENCE, MICROBATCHES = 1024, 16, 4096, 4, 32000, 2048, 2
_FLOPS_PER_S, _BYTES_PER_S = 4e14, 2e11
# The dimensions of a mesh whose ranks a described group has together; `ep` are some of dp and cp.
MEGATRON = {
    "DATA_PARALLEL_GROUP_WITH_CP": "replicate shard cp",
    "DATA_PARALLEL_GROUP_WITH_CP_AG": "replicate shard cp",
    "DATA_PARALLEL_GROUP_WITH_CP_GLOO": "replicate shard cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "shard cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "shard cp",
    "DATA_PARALLEL_GROUP": "replicate shard",
    "DATA_PARALLEL_GROUP_GLOO": "replicate shard",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0": "cp",
    "MODEL_PARALLEL_GROUP": "pp tp",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EMBEDDING_GROUP": "pp",
    "POSITION_EMBEDDING_GROUP": "",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "replicate shard cp tp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "replicate shard tp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "cp tp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "ep tp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "pp ep tp",
    "EXPERT_DATA_PARALLEL_GROUP": "replicate shard cp",
    "EXPERT_DATA_PARALLEL_GROUP_GLOO": "replicate shard cp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": "replicate",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "pp shard cp tp",
}
TORCHTITAN = {
    "mesh_pp": "pp",
    "mesh_dp_replicate": "replicate",
    "mesh_dp_shard": "shard",
    "mesh_cp": "cp",
    "mesh_tp": "tp",
    "mesh_dp": "replicate shard",
    "mesh_dp_shard_cp": "shard cp",
    "mesh_dp_cp": "replicate shard cp",
}
UNFLATTENED = {
    "mesh_pp": "pp",
    "mesh_batch": "replicate shard",
    "mesh_cp": "cp",
    "mesh_tp": "tp",
    "mesh_loss_mesh": "replicate shard cp",
    "mesh_dp_replicate": "replicate",
    "mesh_fsdp": "shard cp",
    "mesh_efsdp": "shard cp",
    "mesh_ep": "ep",
    "mesh_etp": "tp",
}
_DESCRIPTIONS: Mapping[Framework, Mapping[str, str]] = {
    "megatron": MEGATRON,
    "torchtitan": TORCHTITAN,
    "torchtitan-unflattened": UNFLATTENED,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A framework and its plan; ranks go through tp first, pp last."""

    framework: Framework
    tp: int = 1
    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    ep: int = 1
    is_ring: bool = False  # keys go around by transfers
    divides_vocabulary: bool = True
    attention: Attention = "aten"
    shows_products: bool = True
    has_product_kernels: bool = True
    idle_us: float = 0.0  # of a device, before each step
    shards_optimizer: bool = False  # Megatron's distributed optimizer

    @property
    def sizes(self) -> dict[str, int]:
        """Return the mesh, the slowest dimension first."""
        return {name: getattr(self, name) for name in ("pp", "replicate", "shard", "cp", "tp")}

    def members(self, rank: int, dimensions: str) -> tuple[int, ...]:
        """Return the ranks that share all other coordinates with this one."""
        names = dimensions.split()
        if "ep" in names:
            ways = self.members(rank, "replicate shard cp")
            first = ways.index(rank) // self.ep * self.ep
            others = " ".join(name for name in names if name != "ep")
            return tuple(
                sorted(m for w in ways[first : first + self.ep] for m in self.members(w, others))
            )
        mesh = list(itertools.product(*(range(size) for size in self.sizes.values())))
        fixed = [place for place, name in enumerate(self.sizes) if name not in names]
        own = mesh[rank]
        return tuple(
            number
            for number, other in enumerate(mesh)
            if all(other[place] == own[place] for place in fixed)
        )


def groups_text(job: Job, rank: int = 0) -> str:
    """Return a rank's groups as a run holds them."""
    return ", ".join(f"{name} {len(ranks)}" for name, ranks in _described(job, rank))


def _described(job: Job, rank: int) -> list[tuple[str, tuple[int, ...]]]:
    described = [
        (name, job.members(rank, dimensions))
        for name, dimensions in _DESCRIPTIONS[job.framework].items()
    ]
    if job.framework == "megatron":
        return described
    # A DeviceMesh gives all ranks the default group; torchtitan's first meshes lack degrees of 1.
    world = prod(job.sizes.values())
    least = 2 if job.framework == "torchtitan" else 1
    return [(name, ranks) for name, ranks in described if least <= len(ranks) < world]


@dataclass
class _Rank:
    """The events of one rank, in microseconds."""

    job: Job
    rank: int
    names: dict[str, tuple[str, tuple[int, ...]]]
    events: list[dict[str, Any]] = field(default_factory=list)
    now_us: float = 0.0
    count: int = 0

    def work(
        self, kernel: str, long_us: float, name: str = "", sizes: list[list[int]] | None = None
    ) -> None:
        """Add a kernel; with a name, the operation that launched it."""
        self.count += 1
        here: dict[str, Any] = {"ph": "X", "pid": 1, "tid": 1, "ts": self.now_us}
        args: dict[str, Any] = {"External id": self.count, "Input Dims": sizes or []}
        args["Input type"] = ["c10::BFloat16"] * len(sizes or [])
        if name:
            self.events.append({**here, "cat": "cpu_op", "name": name, "dur": 3.0, "args": args})
        self.launch(here)
        on = {"External id": self.count, "device": 0, "stream": 7, "correlation": self.count}
        self.kernel(kernel, long_us, on)

    def launch(self, here: dict[str, Any]) -> None:
        launch = {**here, "ts": self.now_us + 1, "cat": "cuda_runtime", "name": "cudaLaunchKernel"}
        self.events.append({**launch, "dur": 1.0, "args": {"correlation": self.count}})

    def kernel(self, name: str, long_us: float, args: dict[str, Any]) -> None:
        event = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": args["stream"]}
        self.events.append({**event, "ts": self.now_us + 3, "dur": long_us, "args": args})
        self.now_us += long_us + 4

    def product(self, rows: int, inner: int, outer: int, *, times: int, is_hidden: bool) -> None:
        """Add the product of a matrix forward, or those of both gradients."""
        shapes = [[[rows, inner], [inner, outer]]]
        if times == 2:
            shapes = [[[rows, outer], [outer, inner]], [[outer, rows], [rows, inner]]]
        for sizes in shapes:
            kernel = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT"
            kernel = kernel if self.job.has_product_kernels else "unheard_of"
            long_us = 2.0 * rows * inner * outer / _FLOPS_PER_S * 1e6
            self.work(kernel, long_us, "" if is_hidden else "aten::mm", sizes)

    def message(self, op: str, group: str, values: int, **more: int) -> None:
        """Add a collective of so many bfloat16 values; none if the group has one rank."""
        name, ranks = self.names[group]
        if len(ranks) == 1:
            return
        self.count += 1
        self.launch({"ph": "X", "pid": 1, "tid": 1})
        args: dict[str, Any] = {"device": 0, "stream": 20, "correlation": self.count}
        args |= {"Collective name": op, "In msg nelems": values, "Out msg nelems": values}
        args |= {"Group size": len(ranks), "dtype": "BFloat16", "Process Group Name": name}
        args |= {"Process Group Ranks": str(list(ranks)), **more}
        self.kernel(f"ncclDevKernel_{op}", 10 + 2e6 * values / _BYTES_PER_S, args)


def device_traced(place: Path, job: Job) -> None:
    """Write a trace of two steps for each rank."""
    place.mkdir()
    world = prod(job.sizes.values())
    numbers: dict[tuple[str, tuple[int, ...]], str] = {}
    for rank in range(world):
        default = ("0", tuple(range(world)))
        described = _described(job, rank)
        named = {
            group: numbers.setdefault((group, ranks), str(len(numbers) + 1))
            for group, ranks in described
        }
        every = {
            group: (named.get(group, "0"), job.members(rank, dimensions))
            for group, dimensions in _DESCRIPTIONS[job.framework].items()
        }
        of = _Rank(job, rank, every)
        for step in range(2):
            began_us = of.now_us
            of.now_us += job.idle_us
            _step(of)
            mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "args": {}}
            of.events.append(
                {**mark, "pid": 1, "tid": 1, "ts": began_us, "dur": of.now_us - began_us}
            )
        groups = [{"pg_name": default[0], "pg_desc": "default_pg", "pg_size": world}]
        groups += [
            {"pg_name": named[group], "pg_desc": group, "pg_size": len(ranks), "ranks": list(ranks)}
            for group, ranks in described
        ]
        info = {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": groups}
        trace = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
            "distributedInfo": info,
            "traceEvents": sorted(of.events, key=lambda each: each["ts"]),
        }
        (place / f"rank{rank}.json").write_text(json.dumps(trace))


def _step(of: _Rank) -> None:
    """Add a step of MICROBATCHES passes, each forward and backward, and the sums of gradients."""
    job = of.job
    is_megatron = job.framework == "megatron"
    stage = of.rank // (prod(job.sizes.values()) // job.pp)
    tokens = SEQUENCE // job.cp
    rows = VOCAB // job.tp if job.divides_vocabulary else VOCAB
    for _ in range(MICROBATCHES):
        if stage == 0:
            of.work("vectorized_gather", 5.0, "aten::embedding", [[rows, HIDDEN], [1, tokens]])
        for forward in (True, False):
            if job.pp > 1:
                pipeline = "PIPELINE_MODEL_PARALLEL_GROUP" if is_megatron else "mesh_pp"
                of.message("send", pipeline, tokens * HIDDEN, **_ends(of, pipeline))
            if stage == job.pp - 1:
                of.product(
                    tokens, HIDDEN, VOCAB // job.tp, times=1 if forward else 2, is_hidden=False
                )
            for _ in range(LAYERS // job.pp):
                _layer(of, tokens, forward=forward)
    values = LAYERS // job.pp * (4 * HIDDEN**2 + 3 * HIDDEN * FFN) // job.tp
    if is_megatron and job.shards_optimizer:
        of.message("_reduce_scatter_base", "DATA_PARALLEL_GROUP_WITH_CP", values)
        of.message("_allgather_base", "DATA_PARALLEL_GROUP_WITH_CP", values)
    elif is_megatron:
        of.message("allreduce", "DATA_PARALLEL_GROUP_WITH_CP", values)
    else:
        shard = "mesh_fsdp" if job.framework == "torchtitan-unflattened" else "mesh_dp_shard_cp"
        of.message("_reduce_scatter_base", shard, values)
        of.message("_allgather_base", shard, values)
    of.work("multi_tensor_apply_kernel", 50.0)


def _layer(of: _Rank, tokens: int, *, forward: bool) -> None:
    """Add a layer's products, attention and messages: four matrices, gate and up in one."""
    job, times = of.job, 1 if forward else 2
    is_megatron = job.framework == "megatron"
    own, ffn, heads = HIDDEN // job.tp, FFN // job.tp, HEADS // job.tp
    for inner, outer in ((HIDDEN, 3 * own), (own, HIDDEN), (HIDDEN, 2 * ffn), (ffn, HIDDEN)):
        of.product(tokens, inner, outer, times=times, is_hidden=not job.shows_products)
    head_first = [1, heads, tokens, HIDDEN // HEADS]
    token_first = [1, tokens, heads, HIDDEN // HEADS]
    way = "forward" if forward else "backward"
    suffix = "" if forward else "_backward"
    op, sizes = {
        "aten": (f"aten::_scaled_dot_product_flash_attention{suffix}", head_first),
        "flash_attn": (f"flash_attn::_flash_attn_{way}", token_first),
        "kernels": ("", []),
    }[job.attention]
    kernel = f"cudnn_generated_fort_native_sdpa_sm90_flash_{way[0]}prop_wgmma_f16"
    # Around a ring a call has the keys of one rank, else those of all.
    calls, tokens_place = (job.cp, 0) if job.is_ring else (1, sizes.index(tokens) if sizes else 0)
    keys = list(sizes)
    if not job.is_ring and sizes:
        keys[tokens_place] *= job.cp
    shapes = [sizes] * (1 if forward else 2) + [keys] * 2 if sizes else []
    for _ in range(calls):
        of.work(kernel, 20.0 * times / calls, op, shapes)
    of.work("vectorized_elementwise_kernel", 20.0 * times)
    context, tensor = ("CONTEXT_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP")
    if not is_megatron:
        context, tensor = "mesh_cp", "mesh_tp"
    if job.is_ring and job.cp > 1:
        of.message("send", context, 2 * tokens * own, **_ends(of, context))
    else:
        of.message("_allgather_base", context, 2 * tokens * own * job.cp)
    for _ in range(2):
        of.message("allreduce", tensor, tokens * HIDDEN)
    if job.ep > 1:
        expert = "EXPERT_MODEL_PARALLEL_GROUP" if is_megatron else "mesh_ep"
        of.message("all_to_allv", expert, 3 * tokens * HIDDEN)


def _ends(of: _Rank, group: str) -> dict[str, int]:
    _, ranks = of.names[group]
    place = ranks.index(of.rank)
    return {"Src Rank": place, "Dst Rank": (place + 1) % len(ranks)}
