"""The parallelism that groups of processes serve, by the descriptions of frameworks.

A DeviceMesh describes the group of its dimension `tp` as `mesh_tp`. torchtitan, Accelerate, NeMo
and DeepSpeed choose the dimensions' names. Megatron's descriptions stand in its
`parallel_state.py`: `TENSOR_MODEL_PARALLEL_GROUP`. A description may name several kinds of
parallelism (`DATA_PARALLEL_GROUP_WITH_CP`). Its group has their ranks together, so it tells the
degree of none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

_KINDS: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "tensor": ("tp",),
    "pp": ("pp",),
    "pipe": ("pp",),
    "pipeline": ("pp",),
    "cp": ("cp",),
    "context": ("cp",),
    "dp": ("dp",),
    "data": ("dp",),
    "batch": ("dp",),
    "ddp": ("dp",),
    "hsdp": ("dp",),
    "fsdp": ("dp",),
    "shard": ("dp",),
    "replicate": ("dp",),
    "loss": ("dp", "cp"),  # torchtitan sums losses over both
    "ep": ("ep",),
    "expert": ("ep",),
    "experts": ("ep",),
    "etp": ("ep", "tp"),
    "edp": ("ep", "dp"),
    "efsdp": ("ep", "dp"),
    "sp": ("sp",),
    "sequence": ("sp",),
    "ulysses": ("sp",),
}
# A part of the ranks of a kind, or ranks that sample and do not train.
_PARTIAL = {"hierarchical", "hybrid", "inter", "intra", "partial", "infer", "rollout"}
_SHARDS = {"shard", "fsdp"}
_REPLICATES = {"replicate", "ddp"}
_WORD = re.compile(r"[a-z]+")
_SIZE = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Degrees:
    """The degrees that a job's groups tell: only those of which a description names one kind."""

    of: Mapping[str, int]  # among tp, pp, cp, dp, ep, sp
    dp_and_cp: int | None  # their product


@lru_cache(maxsize=4096)  # every message of a group asks
def kinds_of(description: str) -> frozenset[str]:
    """Return the kinds of parallelism that a description names: tp, pp, cp, dp, ep, sp."""
    words = _WORD.findall(description.lower().removeprefix("mesh_"))
    kinds = {kind for word in words for kind in _KINDS.get(word, ())}
    if words[:1] == ["model"]:  # Megatron's MODEL_PARALLEL_GROUP has all ranks of a replica
        kinds |= {"tp", "pp"}
    return frozenset(kinds)


def kind_of_messages(description: str) -> str:
    """Return the kind of parallelism that a group's messages belong to; empty if it is open."""
    kinds = kinds_of(description)
    if "ep" in kinds:
        return "dp" if "dp" in kinds else "ep"
    if len(kinds) > 1 and not kinds <= {"dp", "cp"}:
        return ""  # sums of norms and of scales
    return "dp" if "dp" in kinds else next(iter(kinds), "")


def degrees_of(groups: str) -> Degrees:
    """Return the degrees that a run's groups tell: `mesh_tp 2, mesh_dp_shard_cp 4`."""
    most: dict[str, int] = {}
    for part in groups.split(", "):
        description, _, size = part.rpartition(" ")
        words = set(_WORD.findall(description.lower()))
        kinds = kinds_of(description)
        if not _SIZE.fullmatch(size) or words & _PARTIAL or not kinds:
            continue
        name = "_".join(sorted(kinds))
        if "dp" in kinds and words & (_SHARDS | _REPLICATES):
            name += " shard" if words & _SHARDS else " replicate"
        most[name] = max(most.get(name, 1), int(size))
    replicas = most.get("dp replicate", 1)
    together = most.get("cp_dp")
    if "cp_dp shard" in most:
        together = together or replicas * most["cp_dp shard"]
    elif "dp" not in most and ("dp replicate" in most or "dp shard" in most):
        most["dp"] = replicas * most.get("dp shard", 1)
    kinds_told = ("tp", "pp", "cp", "dp", "ep", "sp")
    return Degrees({kind: most[kind] for kind in kinds_told if kind in most}, together)
