"""How much longer operations take within a training than alone: few constants, fitted once.

`validation.plan_fit` fits them to measured runs, each source with the same weight. Each constant
has a physical meaning, and none belongs to a model. The framework counts, too: an older stack
without fused kernels takes longer for the same layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from fullwire.clusters.cluster import Floats

Framework: TypeAlias = Literal["megatron", "fsdp", "deepspeed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Factors on the times of operations, and times of their own.

    - `gemm`, `experts`: multiplications, and those of experts besides.
    - `attention`, `plain_attention`: scores and values, fused or written to memory.
    - `biased_attention`: fused scores with a bias by distance (ALiBi), besides.
    - `vector`, `casts`: operations that only move values, and casts to 8 or 4 bits besides.
    - `tp`, `ep`: communication of tensor and expert parallelism. `ep_between` is that of groups
      over several nodes.
    - `tp_hidden`: share of the former that overlap hides.
    - `hop_exposed`: share of transfers between stages that an interleaved schedule shows.
    - `gathering`: gathers and sums of ZeRO-3.
    - `overlap_slowdown`: computing beside communication takes so many times as long.
    - `launch_s`: the host's time for the kernels of one layer's forward pass. `routing_s` is for
      those of experts besides, and `expert_s` for each expert of the device.
    - `microbatch_s`, `step_s`: the time of a microbatch and of a step that no part explains.
    """

    gemm: float = 1.0
    experts: float = 1.0
    attention: float = 1.0
    plain_attention: float = 1.0
    biased_attention: float = 1.0
    vector: float = 1.0
    casts: float = 1.0
    tp: float = 1.0
    ep: float = 1.0
    ep_between: float = 1.0
    tp_hidden: float = 0.6
    hop_exposed: float = 0.15
    gathering: float = 1.0
    overlap_slowdown: float = 1.25
    launch_s: float = 150e-6
    routing_s: float = 2.5e-3
    expert_s: float = 30e-6
    microbatch_s: float = 1e-3
    step_s: float = 0.02


# Natural logarithms, as `python -m validation.plan_fit` prints them.
FITTED: Mapping[str, float] = {
    "gemm a100 bf16": 0.037,
    "gemm h100 bf16": 0.059,
    "gemm b200 bf16": 0.178,
    "gemm b300 bf16": 0.144,
    "gemm h100 fp8": 0.106,
    "gemm b200 fp8": 0.115,
    "gemm b300 fp8": -0.130,
    "gemm b200 mxfp8": 0.068,
    "gemm b300 mxfp8": -0.199,
    "gemm b200 nvfp4": 0.144,
    "gemm b300 nvfp4": 0.095,
    "gemm fsdp": 0.156,
    "gemm deepspeed": 0.241,
    "experts": 0.040,
    "attention a100": 0.005,
    "attention h100": 0.123,
    "attention b200": 0.076,
    "attention biased": 0.538,
    "attention plain": 0.009,
    "vector": 0.266,
    "vector fsdp": 0.101,
    "casts": -0.341,
    "tp": -0.043,
    "tp shown": -0.133,
    "ep": -0.575,
    "ep between": 0.103,
    "gathering deepspeed": 1.870,
    "slowdown": 0.441,
    "microbatch": 0.012,
    "step": 0.225,
    "launch": 0.426,
    "routing": -0.802,
    "expert launches": 1.265,
}


# Standard deviations of the logarithm of predicted over measured, for models without and with
# experts, and runs of sources that no constant has seen (`validation.plan_fit`).
_SPREAD = {False: 0.13, True: 0.28}
# What an assumption adds to it.
_ASSUMED = {
    "recomputation": 0.05,
    "precision": 0.15,
    "microbatch": 0.08,
    "global batch": 0.08,
    "network": 0.04,
    "overlap": 0.03,
    "heads": 0.04,
    "dimensions": 0.25,
    "parallel plan": 0.25,
    "sharding": 0.05,
    "device": 0.15,
    "experts of a token": 0.2,
}
_WIDTH = 1.645  # standard deviations on each side of a 90 % interval


# How far times may be off, as variances of logarithms: each part of a step by a factor of its own,
# which the steps of one source and device have in common; all parts alike; steps of one model; one
# plan alone. The most likely ones for the runs of data/llm with `split=fit`, with each laboratory
# left out. A measured time itself is off by 3 %.
DOUBTED = (
    *("products_s", "experts_s", "attention_s", "moved_s"),
    *("tp_s", "ep_s", "sums_s", "host_s"),
)
_PARTS = np.array([0.004, 0.05, 0.04, 0.035, 0.3, 0.05, 0.3, 0.1])
_ALIKE, _MODEL, _ALONE, _MEASURED = 0.003, 0.001, 0.004, 0.001
# With experts, more is left over: a release may be 1.6 times as fast as the one before, and some
# models profit more than others. These widen intervals only.
_EXPERTS = 0.025, 0.05, 0.03  # alike, of one model, alone
_EXPERT_PARTS = np.array([0.04, 0.025, 0.06, 0.06, 0.06, 0.06, 0.06, 1.2])
_SAME = 1e-9  # shares that differ by less are those of one plan


@dataclass(frozen=True, eq=False, slots=True)
class Calibration:
    """What measured steps tell about others of the same source and device.

    A step that is mostly sums of gradients tells much about sums, and little about computing. So a
    measured difference carries over to another plan as far as both consist of the same parts, and
    less of it where one plan alone shows it.
    """

    logs: Floats  # of measured over predicted times, for each measured step
    shares: Floats  # of its predicted step, a column for each doubted part
    models: tuple[object, ...] = ()  # the model of each measured step; none: that of all others
    is_moe: bool = False

    def factors(self, shares: Floats, models: tuple[object, ...] = ()) -> Floats:
        """Return the factors on predicted times, for steps that consist of such shares."""
        usual = replace(self, is_moe=False)  # the middle error is least so, with experts too
        told = np.linalg.solve(usual._known(), self.logs)
        across = usual._covariance(shares, models, self.shares, self.models)
        return np.asarray(np.exp(across @ told))

    def spreads(self, shares: Floats, models: tuple[object, ...] = ()) -> Floats:
        """Return the standard deviations of the logarithms that are left."""
        across = self._covariance(shares, models, self.shares, self.models)
        parts, variances = self._variances
        before = sum(variances) + _MEASURED + shares**2 @ parts
        told = (across * np.linalg.solve(self._known(), across.T).T).sum(axis=1)
        return np.asarray(np.sqrt(np.maximum(before - told, _MEASURED)))

    @property
    def _variances(self) -> tuple[Floats, tuple[float, float, float]]:
        if self.is_moe:
            return _EXPERT_PARTS, _EXPERTS
        return _PARTS, (_ALIKE, _MODEL, _ALONE)

    def _known(self) -> Floats:
        own = self._covariance(self.shares, self.models, self.shares, self.models)
        return own + _MEASURED * np.eye(len(self.logs))

    def _covariance(
        self,
        shares: Floats,
        models: tuple[object, ...],
        others: Floats,
        other_models: tuple[object, ...],
    ) -> Floats:
        """Return how much each step is off together with each of the others."""
        parts, (in_all, in_model, in_plan) = self._variances
        both = in_all + shares * parts @ others.T
        is_same = np.abs(shares[:, None] - others).max(axis=2) < _SAME
        if models and other_models:
            alike = np.array([[one == other for other in other_models] for one in models])
        else:
            alike = np.ones_like(is_same)
        return np.asarray(both + in_model * alike + in_plan * is_same)


def interval_factor(
    *, is_moe: bool, assumed: Iterable[str] = (), calibrated_spread: float | None = None
) -> float:
    """Return the factor from a predicted time to the upper end of its 90 % interval.

    A measured run of the same source answers most of what is assumed; `calibrated_spread` is what
    it leaves.
    """
    own = _SPREAD[is_moe] if calibrated_spread is None else calibrated_spread
    share = 1.0 if calibrated_spread is None else 0.3
    terms = [share * _ASSUMED.get(gap, 0.02) for gap in set(assumed)]
    return math.exp(_WIDTH * math.hypot(own, *terms))


# The families whose runs stand for others; the rest take operations as they are.
_LIKE = {
    **dict.fromkeys(("v100", "a100", "a800"), "a100"),
    **dict.fromkeys(("h100", "h800", "h20", "h200", "gh200", "l40s"), "h100"),
    **dict.fromkeys(("b200", "gb200"), "b200"),
    **dict.fromkeys(("b300", "gb300"), "b300"),
}
MEASURED_FAMILIES = ("a100", "h100", "b200", "gb200", "b300", "gb300")
# AMD's libraries reach about half of the peak where NVIDIA's reach 0.79 (MI300X, bf16).
_AMD = 0.4


def habits_of(
    family: str,
    precision: str,
    framework: Framework = "megatron",
    constants: Mapping[str, float] = FITTED,
) -> Habits:
    """Return the constants for a family of devices, a type and a framework."""
    like = _LIKE.get(family, family)
    kind = {"fp16": "bf16", "fp32": "bf16"}.get(precision, precision)
    kind = "fp8" if like == "h100" and kind == "mxfp8" else "bf16" if like == "a100" else kind

    def factor(*names: str) -> float:
        return math.exp(sum(constants.get(name, 0.0) for name in names))

    usual = Habits()
    is_fsdp = framework == "fsdp"
    of_maker = math.exp(_AMD) if family.startswith("mi") else 1.0
    return Habits(
        gemm=of_maker * factor(f"gemm {like} {kind}", f"gemm {framework}"),
        experts=factor("experts"),
        attention=factor(f"attention {like}"),
        plain_attention=factor("attention plain"),
        biased_attention=factor("attention biased"),
        vector=factor("vector", *["vector fsdp"] * is_fsdp),
        casts=factor("casts"),
        tp=factor("tp"),
        ep=factor("ep"),
        ep_between=factor("ep between"),
        tp_hidden=max(0.0, 1 - (1 - usual.tp_hidden) * factor("tp shown")),
        hop_exposed=usual.hop_exposed,
        gathering=factor("gathering deepspeed") if framework == "deepspeed" else 1.0,
        overlap_slowdown=1 + (usual.overlap_slowdown - 1) * factor("slowdown"),
        launch_s=usual.launch_s * factor("launch"),
        routing_s=usual.routing_s * factor("launch", "routing"),
        expert_s=usual.expert_s * factor("launch", "expert launches"),
        microbatch_s=usual.microbatch_s * factor("microbatch"),
        step_s=usual.step_s * factor("step"),
    )
