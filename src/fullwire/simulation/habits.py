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
from numpy.typing import NDArray

from fullwire.clusters.cluster import Floats
from fullwire.run.centre import NORMAL_90

Framework: TypeAlias = Literal["megatron", "fsdp", "deepspeed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Factors on the times of operations, and times of their own.

    - `gemm`, `experts`: multiplications, and those of experts besides.
    - `attention`, `plain_attention`: scores and values, fused or written to memory.
    - `biased_attention`: fused scores with a bias by distance (ALiBi), besides. Until 2024 only the
      kernel in Triton had one; FlashAttention-2 is 1.3 to 2.5 times as fast (Dao 2023).
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
    biased_attention: float = 1.8
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
    "gemm a100 bf16": 0.052,
    "gemm h100 bf16": 0.175,
    "gemm b200 bf16": 0.174,
    "gemm b300 bf16": 0.161,
    "gemm h100 fp8": 0.115,
    "gemm b200 fp8": 0.114,
    "gemm b300 fp8": -0.083,
    "gemm b200 mxfp8": 0.043,
    "gemm b300 mxfp8": -0.136,
    "gemm b200 nvfp4": 0.128,
    "gemm b300 nvfp4": 0.118,
    "gemm fsdp": 0.095,
    "gemm deepspeed": 0.221,
    "experts": 0.016,
    "attention a100": 0.025,
    "attention h100": 0.007,
    "attention b200": 0.059,
    "attention biased": -0.034,
    "attention plain": 0.000,
    "vector": 0.246,
    "vector fsdp": 0.047,
    "casts": -0.304,
    "tp": -0.019,
    "tp shown": 0.033,
    "ep": -0.640,
    "ep between": 0.099,
    "gathering deepspeed": 1.912,
    "slowdown": 0.121,
    "microbatch": 0.023,
    "step": 0.198,
    "launch": 0.158,
    "routing": -0.779,
    "expert launches": 1.245,
}


# Standard deviations of the logarithm of predicted over measured, for models without and with
# experts, and runs of sources that no constant has seen (`validation.plan_fit`).
_SPREAD = {False: 0.12, True: 0.25}
# What an assumption adds to it.
_ASSUMED = {
    "recomputation": 0.05,
    "precision": 0.15,
    "eight bits": 0.22,  # that a device with fp8 may have used; dense steps take 0.65 of the time
    "four bits": 0.48,  # dense steps take 0.35 to 0.5 of the time
    "microbatch": 0.08,
    "global batch": 0.08,
    "network": 0.04,
    "overlap": 0.03,
    "interleaving": 0.05,
    "heads": 0.04,
    "dimensions": 0.25,
    "parallel plan": 0.25,
    "sharding": 0.05,
    "device": 0.15,
    "experts of a token": 0.2,
    "feed-forward": 0.1,
    "sequence": 0.25,
    "tokens of a step": 0.9,  # where only the time of the whole step is known
    "devices": 0.25,
}


# How far times may be off, as variances of logarithms: each part of a step by a factor of its own,
# which the steps of one source and device have in common; all parts alike; steps of one model; one
# plan alone. A measured time itself is off by 3 %. They suit the runs of data/llm with `split=fit`,
# with each laboratory left out.
DOUBTED = (
    *("products_s", "experts_s", "attention_s", "moved_s"),
    *("tp_s", "ep_s", "sums_s", "host_s"),
)
_PARTS = np.array([0.004, 0.05, 0.04, 0.035, 0.3, 0.05, 0.3, 0.3])
_ALIKE, _MODEL, _ALONE, _MEASURED = 0.0015, 0.001, 0.005, 0.001
# With experts, a release may be 1.6 times as fast as the one before. Most models share that, so
# more of a measured step carries over; some stay behind.
_EXPERTS = 0.1, 0.02, 0.02  # alike, of one model, alone
_UNLIKE = 0.1  # more of what is alike, on a family of devices that nobody measured
_TAILS = 4.0  # degrees of freedom: few, so a step far off says little of others
_SAME = 1e-9  # shares that differ by less are those of one plan
# How much of what makes a step odd is of its machine, which other plans there share. Were it
# nothing, a step that is off far would make other plans faster the further it is off. With each
# laboratory left out, the runs of data/llm are about as likely from 0.2 to 0.5, and less so at 0.
_ODD_IN_COMMON = 0.3
# So far apart in their shares, plans of one model have a third of what is alone in common: by the
# likelihood of the runs of data/llm with `split=fit`, each given one other.
_FAR = 0.05


@dataclass(frozen=True, eq=False, slots=True)
class Calibration:
    """What measured steps tell about others of the same source and device.

    A measured plan takes as long as it was measured. A step that is mostly sums of gradients tells
    much about sums, and little about computing. So a measured difference carries over to another
    plan as far as both consist of the same parts. The less alike two plans are, the less of what
    one shows alone carries over. A step of a model whose dimensions are guessed tells of that
    model. If a step is off far more than steps usually are, most of its difference stays with the
    plans that are like its own. Plans of its model that consist of the same parts share the rest.
    """

    logs: Floats  # of measured over predicted times, for each measured step
    shares: Floats  # of its predicted step, a column for each doubted part
    # The model of each measured step, and its software where that differs; none: that of all others
    models: tuple[object, ...] = ()
    is_moe: bool = False
    is_unlike: bool = False  # the device is of a family that no constant has seen
    guessed: Floats | float = 0.0  # variance of each measured step by guesses of its model
    unsure: Floats | float = 0.0  # and by guesses of its own plan

    def factors(self, shares: Floats, models: tuple[object, ...] = ()) -> Floats:
        """Return the factors on predicted times, for steps that consist of such shares."""
        one = self._of_means()
        told = np.linalg.solve(one._covariance(one.shares, one.models), one.logs)
        return np.asarray(np.exp(one._covariance(shares, models) @ told))

    def spreads(
        self, shares: Floats, models: tuple[object, ...] = (), guessed: Floats | float = 0.0
    ) -> Floats:
        """Return the standard deviations of the logarithms that are left.

        - `guessed`: variance of each step by guesses of its model.
        """
        one = self._of_means()
        across, near = one._covariance(shares, models), one._likeness(shares, models)
        odd = (1 - _ODD_IN_COMMON) * near**4 + _ODD_IN_COMMON * one._alike(shares, models) ** 2
        before = one._before(shares, guessed) + odd @ one._odd
        known = one._covariance(one.shares, one.models)
        told = (across * np.linalg.solve(known, across.T).T).sum(axis=1)
        # The measured step may be that of a plan that is only like this one.
        mistaken = (near**4 * one.unsure).max(axis=1)
        return np.asarray(np.sqrt(np.maximum(before - told, _MEASURED) + mistaken))

    def has_measured(self, shares: Floats) -> NDArray[np.bool_]:
        """Say which steps are of plans that were measured."""
        return np.asarray(_same_plans(shares, self.shares).any(axis=1))

    def _of_means(self) -> Calibration:
        """Return the same with the mean of each plan's repeats, in which the surest count most."""
        is_same = _same_plans(self.shares, self.shares) & self._of_one_model(
            len(self.logs), self.models
        )
        first = np.flatnonzero(is_same.argmax(axis=1) == np.arange(len(self.logs)))
        weight = is_same[first] / (_MEASURED + self.unsure)
        weight = weight / weight.sum(axis=1, keepdims=True)
        ones = np.ones(len(self.logs))
        return replace(
            self,
            logs=np.log(weight @ np.exp(self.logs)),
            shares=self.shares[first],
            models=tuple(self.models[number] for number in first) if self.models else (),
            guessed=(self.guessed * ones)[first],
            unsure=weight @ (self.unsure * ones),
        )

    @property
    def _variances(self) -> tuple[float, float, float]:
        alike, model, alone = _EXPERTS if self.is_moe else (_ALIKE, _MODEL, _ALONE)
        return alike + _UNLIKE * self.is_unlike, model, alone

    def _before(self, shares: Floats, guessed: Floats | float) -> Floats:
        """Return the variances of steps before anything is measured."""
        return np.asarray(sum(self._variances) + _MEASURED + shares**2 @ _PARTS + guessed)

    @property
    def _odd(self) -> Floats:
        """Return more variance for plans that are off far, by Student's distribution."""
        before = self._before(self.shares, self.guessed)
        off = self.logs**2 / (before + self.unsure)
        return np.asarray(before * np.maximum(0.0, (off - 1) / (_TAILS + 1)))

    def _likeness(self, shares: Floats, models: tuple[object, ...]) -> Floats:
        """Return how much each plan is like each measured one: 1 for the same, 0 for no plan."""
        apart = np.linalg.norm(shares[:, None] - self.shares, axis=2)
        return np.asarray(np.exp(-apart / _FAR) * self._of_one_model(len(shares), models))

    def _alike(self, shares: Floats, models: tuple[object, ...]) -> Floats:
        """Return how much of what a measured step shares with others each step shares: 1 for all.

        Steps of other models share nothing of what is odd.
        """
        in_all, in_model, _ = self._variances
        shared = in_all + in_model + self.guessed
        of_parts = shares * _PARTS @ self.shares.T
        whole = shared + self.shares**2 @ _PARTS
        is_alike = self._of_one_model(len(shares), models)
        return np.asarray(np.minimum((shared + of_parts) / whole, 1.0) * is_alike)

    def _of_one_model(self, count: int, models: tuple[object, ...]) -> NDArray[np.bool_]:
        """Say which steps are of the model of each measured one."""
        if models and self.models:
            return np.array([[one == other for other in self.models] for one in models])
        return np.ones((count, len(self.logs)), np.bool_)

    def _covariance(self, shares: Floats, models: tuple[object, ...]) -> Floats:
        """Return how much each step is off together with each of the measured ones."""
        in_all, in_model, in_plan = self._variances
        both = in_all + shares * _PARTS @ self.shares.T
        near, own = self._likeness(shares, models), self._likeness(self.shares, self.models)
        alike = self._of_one_model(len(shares), models)
        # What is odd about one plan, others share less.
        own_odd, common_odd = (1 - _ODD_IN_COMMON) * self._odd, _ODD_IN_COMMON * self._odd
        of_measured = near**2 * (own_odd + self.unsure) @ (own**2).T
        of_measured += (
            self._alike(shares, models) * common_odd @ self._alike(self.shares, self.models).T
        )
        measuring = _MEASURED * _same_plans(shares, self.shares) * alike
        return np.asarray(
            both + (in_model + self.guessed) * alike + in_plan * near + of_measured + measuring
        )


def _same_plans(shares: Floats, others: Floats) -> NDArray[np.bool_]:
    """Say which steps are of the plan of each other one: a row for each step."""
    return np.asarray(np.abs(shares[:, None] - others).max(axis=2) < _SAME)


_OF_MODEL = (
    "dimensions",
    "tokens of a step",
    "experts of a token",
    "feed-forward",
    "parallel plan",
)


def guessed_variance(assumed: Iterable[str]) -> float:
    """Return how far a step is off, as a variance, where its model or plan is assumed."""
    return assumed_variance(set(assumed) & set(_OF_MODEL))


def assumed_variance(assumed: Iterable[str]) -> float:
    """Return how far a step is off, as a variance, by what is assumed of it."""
    return sum(_ASSUMED[gap] ** 2 for gap in set(assumed))


def interval_factor(
    *,
    is_moe: bool,
    assumed: Iterable[str] = (),
    calibrated_spread: float | None = None,
    device_spread: float = 0.0,
) -> float:
    """Return the factor from a predicted time to the upper end of its 90 % interval.

    A measured run of the same source answers most of what is assumed; `calibrated_spread` is what
    it leaves. On a device that is assumed, operations are off by `device_spread`. On others the
    runs that the spread is of hold that.
    """
    own = _SPREAD[is_moe] if calibrated_spread is None else calibrated_spread
    share = 1.0 if calibrated_spread is None else 0.3
    gaps = set(assumed)
    terms = [share * _ASSUMED.get(gap, 0.02) for gap in gaps]
    terms += [share * device_spread] * ("device" in gaps)
    return math.exp(NORMAL_90 * math.hypot(own, *terms))


# The families whose runs stand for others; the rest take operations as they are.
_LIKE = {
    **dict.fromkeys(("v100", "a100", "a800"), "a100"),
    **dict.fromkeys(("h100", "h800", "h20", "h200", "gh200", "l40s"), "h100"),
    **dict.fromkeys(("b200", "gb200"), "b200"),
    **dict.fromkeys(("b300", "gb300"), "b300"),
}
MEASURED_FAMILIES = ("a100", "h100", "b200", "gb200", "b300", "gb300")
# Attention of Hopper is that of FlashAttention-3, which Megatron reaches by Transformer Engine.
# PyTorch brings FlashAttention-2, which takes 1.5 to 2 times as long there (Shah et al. 2024).
_FLASH_2 = 1.7
# AMD's libraries reach about half of the peak where NVIDIA's reach 0.79 (MI300X, bf16).
_AMD = 0.4
_AMD_FAMILIES = ("mi250", "mi250x", "mi300a", "mi300x", "mi325x", "mi350x", "mi355x")


def has_near_family(family: str) -> bool:
    """Return whether constants of a measured family stand for a family in `habits_of`."""
    return family in _LIKE


def habits_of(
    family: str,
    precision: str,
    framework: Framework = "megatron",
    constants: Mapping[str, float] = FITTED,
) -> Habits:
    """Return the constants for a family of devices, a type and a framework."""
    like = _LIKE.get(family, family)
    kind = {"fp16": "bf16", "fp32": "bf16"}.get(precision, precision)
    is_narrow = kind in ("fp8", "mxfp8", "nvfp4")
    kind = "fp8" if like == "h100" and is_narrow else "bf16" if like == "a100" else kind

    def factor(*names: str) -> float:
        return math.exp(sum(constants.get(name, 0.0) for name in names))

    usual = Habits()
    is_fsdp, is_deepspeed = framework == "fsdp", framework == "deepspeed"
    of_maker = math.exp(_AMD) if family in _AMD_FAMILIES else 1.0
    has_flash_2 = family == "l40s" or (like == "h100" and framework != "megatron")
    # "gathering deepspeed" holds the slowdown of its gathers, too.
    slowdown = 1.0 if is_deepspeed else factor("slowdown")
    return Habits(
        gemm=of_maker * factor(f"gemm {like} {kind}", f"gemm {framework}"),
        experts=factor("experts"),
        attention=(_FLASH_2 if has_flash_2 else 1.0) * factor(f"attention {like}"),
        plain_attention=factor("attention plain"),
        biased_attention=usual.biased_attention * factor("attention biased"),
        vector=factor("vector", *["vector fsdp"] * is_fsdp),
        casts=factor("casts"),
        tp=factor("tp"),
        ep=factor("ep"),
        ep_between=factor("ep between"),
        tp_hidden=max(0.0, 1 - (1 - usual.tp_hidden) * factor("tp shown")),
        hop_exposed=usual.hop_exposed,
        gathering=factor("gathering deepspeed") if is_deepspeed else 1.0,
        overlap_slowdown=1 + (usual.overlap_slowdown - 1) * slowdown,
        launch_s=usual.launch_s * factor("launch"),
        routing_s=usual.routing_s * factor("launch", "routing"),
        expert_s=usual.expert_s * factor("launch", "expert launches"),
        microbatch_s=usual.microbatch_s * factor("microbatch"),
        step_s=usual.step_s * factor("step"),
    )
