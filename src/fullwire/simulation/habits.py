"""How much longer operations take within a training than alone: few constants, fitted once.

`validation.plan_fit` fits them to measured runs, each source with the same weight. Each constant
has a physical meaning, and none belongs to a model. The framework counts, too: an older stack
without fused kernels takes longer for the same layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fullwire.clusters.cluster import Floats

Framework: TypeAlias = Literal["megatron", "fsdp", "deepspeed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Factors on the times of operations, and times of their own.

    - `gemm`, `experts`: multiplications, and those of experts besides.
    - `attention`, `plain_attention`: scores and values, fused or written to memory.
    - `vector`, `casts`: operations that only move values, and casts to 8 or 4 bits besides.
    - `tp`, `ep`: communication of tensor and expert parallelism.
    - `tp_hidden`: share of the former that overlap hides.
    - `hop_exposed`: share of transfers between stages that an interleaved schedule shows.
    - `gathering`: gathers and sums of ZeRO-3.
    - `overlap_slowdown`: computing beside communication takes so many times as long.
    - `launch_s`: the host's time for the kernels of one layer's forward pass; `routing_s` for those
      of experts besides.
    - `microbatch_s`, `step_s`: the time of a microbatch and of a step that no part explains.
    """

    gemm: float = 1.0
    experts: float = 1.0
    attention: float = 1.0
    plain_attention: float = 1.0
    vector: float = 1.0
    casts: float = 1.0
    tp: float = 1.0
    ep: float = 1.0
    tp_hidden: float = 0.6
    hop_exposed: float = 0.15
    gathering: float = 1.0
    overlap_slowdown: float = 1.25
    launch_s: float = 150e-6
    routing_s: float = 400e-6
    microbatch_s: float = 1e-3
    step_s: float = 0.02


# Natural logarithms, as `python -m validation.plan_fit` prints them.
FITTED: Mapping[str, float] = {
    "gemm a100 bf16": 0.043,
    "gemm h100 bf16": 0.021,
    "gemm b200 bf16": 0.221,
    "gemm b300 bf16": 0.207,
    "gemm h100 fp8": 0.088,
    "gemm b200 fp8": 0.105,
    "gemm b300 fp8": -0.131,
    "gemm b200 mxfp8": 0.105,
    "gemm b300 mxfp8": -0.154,
    "gemm b200 nvfp4": 0.138,
    "gemm b300 nvfp4": 0.087,
    "gemm fsdp": 0.206,
    "gemm deepspeed": 0.236,
    "experts": 0.207,
    "attention a100": 0.176,
    "attention h100": 0.078,
    "attention b200": 0.088,
    "attention fsdp h100": 0.454,
    "attention plain": 0.004,
    "vector": 0.270,
    "vector fsdp": 0.148,
    "casts": -0.072,
    "tp": -0.057,
    "tp shown": -0.174,
    "ep": -0.516,
    "gathering deepspeed": 1.832,
    "slowdown": 0.500,
    "microbatch": 0.099,
    "step": 0.110,
}


# Standard deviations of the logarithm of predicted over measured, for models without and with
# experts. `left out` is for runs of sources that no constant has seen, from `validation.plan_fit`,
# and `one run` for those of a source and device of which one run calibrates. With experts it is the
# wider one: the middle error falls from 30 to 23 %, but one odd run misleads the others.
_SPREAD = {("left out", False): 0.13, ("left out", True): 0.28}
_SPREAD |= {("one run", False): 0.095, ("one run", True): 0.34}
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


# How far times may be off together, as variances of logarithms: in all parts of a step alike, in
# parts that differ most between machines and software, and in one plan alone. Chosen on the runs of
# data/llm with `split=fit`, with each laboratory left out. A measured time itself is off by 3 %.
_ALIKE, _ALONE, _MEASURED = 0.05, 0.04, 0.001
_SAME = 1e-9  # shares that differ by less are those of one plan
DOUBTED: Mapping[str, float] = {"dp_s": 1.0, "ep_s": 1.0, "host_s": 3.0}


@dataclass(frozen=True, eq=False, slots=True)
class Calibration:
    """What measured steps tell about others of the same source.

    A step that is mostly sums of gradients tells much about sums, and little about computing. So a
    measured difference carries over to another plan as far as both consist of the same parts, and
    less of it where one plan alone shows it.
    """

    logs: Floats  # of measured over predicted times, for each measured step
    shares: Floats  # of its predicted step, a column for each doubted part

    def factors(self, shares: Floats) -> Floats:
        """Return the factors on predicted times, for steps that consist of such shares."""
        known = self._covariance(self.shares) + _MEASURED * np.eye(len(self.logs))
        told = np.linalg.solve(known, self.logs)
        return np.asarray(np.exp(self._covariance(shares) @ told))

    def _covariance(self, shares: Floats) -> Floats:
        """Return how much each step is off together with each measured one."""
        both = _ALIKE + shares * np.array(list(DOUBTED.values())) @ self.shares.T
        is_same = np.abs(shares[:, None] - self.shares).max(axis=2) < _SAME
        return np.asarray(both + _ALONE * is_same)


def interval_factor(
    *, is_moe: bool, assumed: Iterable[str] = (), is_calibrated: bool = False
) -> float:
    """Return the factor from a predicted time to the upper end of its 90 % interval.

    A measured run of the same source answers most of what is assumed.
    """
    own = _SPREAD["one run" if is_calibrated else "left out", is_moe]
    share = 0.5 if is_calibrated else 1.0
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
        attention=factor(f"attention {like}", *[f"attention fsdp {like}"] * is_fsdp),
        plain_attention=factor("attention plain"),
        vector=factor("vector", *["vector fsdp"] * is_fsdp),
        casts=factor("casts"),
        tp=factor("tp"),
        ep=factor("ep"),
        tp_hidden=max(0.0, 1 - (1 - usual.tp_hidden) * factor("tp shown")),
        hop_exposed=usual.hop_exposed,
        gathering=factor("gathering deepspeed") if framework == "deepspeed" else 1.0,
        overlap_slowdown=1 + (usual.overlap_slowdown - 1) * factor("slowdown"),
        launch_s=usual.launch_s,
        routing_s=usual.routing_s,
        microbatch_s=usual.microbatch_s * factor("microbatch"),
        step_s=usual.step_s * factor("step"),
    )
