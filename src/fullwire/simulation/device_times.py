"""The time of an operation of a large model on a family of accelerators, by its shape.

A multiplication takes as long as the slower of its arithmetic and its memory traffic. Arithmetic
reaches a share of the dense peak, less of it where a dimension is short or is no multiple of 64.
The shares of A100 to GB200 are medians of measured multiplications with n and k from 4096 on
(ai-dynamo/aiconfigurator). B300 and GB300 take those of their predecessors, and V100, MI, TPU and
Gaudi that of the nearest measured family. `habits.py` corrects all of them by measured runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fullwire.clusters.cluster import Floats
from fullwire.errors import UsageError

KINDS = ("bf16", "fp8", "nvfp4")
_KERNEL_S = 3e-6  # the least time of a kernel
_FILLED = 0.8  # of the memory's bandwidth, by what only moves values
_READ = 0.85  # of it, by a multiplication
_POWER = 0.55  # the clock follows the power limit to about this power


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Accelerators that compute alike: dense peaks, and the shares that multiplications reach.

    Peaks and shares are those of bf16, fp8 and nvfp4; 0 where a type is missing.
    """

    title: str
    peak_tflops: tuple[float, float, float]
    share: tuple[float, float, float]
    attention_share: float  # of the bf16 peak, by fused attention, forward
    memory_bytes_per_s: float
    memory_bytes: float
    devices_per_node: int
    inside_bytes_per_s: float  # of each device within a node, one way
    nic_bytes_per_s: float  # of each device
    power_w: float
    like: str  # the family that fitted constants come from


def _family(
    title: str,
    peaks: tuple[float, float, float],
    shares: tuple[float, float, float],
    attention: float,
    memory: tuple[float, float],
    node: tuple[int, float, float],
    power_w: float,
    like: str,
) -> Family:
    return Family(
        title=title,
        peak_tflops=peaks,
        share=shares,
        attention_share=attention,
        memory_bytes_per_s=memory[0] * 1e12,
        memory_bytes=memory[1] * 1e9,
        devices_per_node=node[0],
        inside_bytes_per_s=node[1] * 1e9,
        nic_bytes_per_s=node[2] * 1e9,
        power_w=power_w,
        like=like,
    )


_A100, _H100 = (0.84, 0.0, 0.0), (0.79, 0.62, 0.0)
_B200, _GB200 = (0.66, 0.52, 0.40), (0.62, 0.50, 0.40)
_ULTRA = (0.62, 0.50, 0.30)

# Peaks, memory and links are the makers' data sheets, without sparsity. The last word is the family
# whose measured runs stand for it.
FAMILIES: Mapping[str, Family] = {
    "v100": _family("V100", (125, 0, 0), _A100, 0.4, (0.9, 32), (8, 150, 12.5), 300, "a100"),
    "a100": _family("A100", (312, 0, 0), _A100, 0.62, (2.039, 80), (8, 300, 25), 400, "a100"),
    "h800": _family("H800", (989, 1979, 0), _H100, 0.5, (3.35, 80), (8, 200, 50), 700, "h100"),
    "h20": _family("H20", (148, 296, 0), _A100, 0.62, (4.0, 96), (8, 450, 50), 500, "h100"),
    "h100": _family("H100", (989, 1979, 0), _H100, 0.5, (3.35, 80), (8, 450, 50), 700, "h100"),
    "h200": _family("H200", (989, 1979, 0), _H100, 0.5, (4.8, 141), (8, 450, 50), 700, "h100"),
    "gh200": _family("GH200", (989, 1979, 0), _H100, 0.5, (4.0, 96), (4, 450, 25), 700, "h100"),
    "b200": _family(
        "B200", (2250, 4500, 9000), _B200, 0.42, (8.0, 180), (8, 900, 50), 1000, "b200"
    ),
    "gb200": _family(
        "GB200", (2500, 5000, 10000), _GB200, 0.42, (8.0, 186), (64, 900, 50), 1200, "b200"
    ),
    "b300": _family(
        "B300", (2250, 4500, 13500), _ULTRA, 0.42, (8.0, 270), (8, 900, 100), 1100, "b300"
    ),
    "gb300": _family(
        "GB300", (2500, 5000, 15000), _ULTRA, 0.42, (8.0, 279), (64, 900, 100), 1400, "b300"
    ),
    "mi250x": _family("MI250X", (383, 0, 0), (0.5, 0, 0), 0.3, (3.2, 128), (8, 100, 25), 560, ""),
    "mi300x": _family(
        "MI300X", (1307, 2614, 0), (0.5, 0.4, 0), 0.3, (5.3, 192), (8, 448, 50), 750, ""
    ),
    "mi325x": _family(
        "MI325X", (1307, 2614, 0), (0.5, 0.4, 0), 0.3, (6.0, 256), (8, 448, 50), 1000, ""
    ),
    "mi355x": _family(
        "MI355X", (2300, 4600, 9200), (0.55, 0.45, 0.3), 0.3, (8.0, 288), (8, 538, 50), 1400, ""
    ),
    "gaudi2": _family(
        "Gaudi 2", (432, 865, 0), (0.8, 0.6, 0), 0.4, (2.45, 96), (8, 262, 37), 600, ""
    ),
    "gaudi3": _family(
        "Gaudi 3", (1835, 1835, 0), (0.6, 0.6, 0), 0.4, (3.7, 128), (8, 525, 75), 900, ""
    ),
    "tpu-v4": _family("TPU v4", (275, 0, 0), (0.85, 0, 0), 0.5, (1.2, 32), (64, 135, 25), 192, ""),
    "tpu-v5e": _family(
        "TPU v5e", (197, 0, 0), (0.85, 0, 0), 0.5, (0.82, 16), (256, 200, 12), 200, ""
    ),
    "tpu-v5p": _family(
        "TPU v5p", (459, 0, 0), (0.85, 0, 0), 0.5, (2.77, 95), (64, 540, 25), 500, ""
    ),
    "tpu-v6e": _family(
        "TPU v6e", (918, 0, 0), (0.7, 0, 0), 0.45, (1.64, 32), (256, 360, 25), 300, ""
    ),
    "tpu7x": _family(
        "TPU7x", (2307, 4614, 0), (0.6, 0.5, 0), 0.4, (7.38, 192), (64, 540, 50), 900, ""
    ),
}


def family(name: str) -> Family:
    """Return a family by its name."""
    if name not in FAMILIES:
        raise UsageError(f"device: expected one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Times of operations on one device; `power_share` is its share of the usual power limit."""

    family: Family
    power_share: float = 1.0
    memory_share: float = 1.0  # of the family's usual bandwidth

    @property
    def clock(self) -> float:
        """Return the clock as a share of the clock at full power."""
        return float(self.power_share**_POWER)

    @property
    def memory_bytes_per_s(self) -> float:
        """Return the peak bandwidth of the memory."""
        return self.family.memory_bytes_per_s * self.memory_share

    def peak_flops_per_s(self, kind: str) -> float:
        """Return the dense peak of a type, or of bf16 where the device lacks it."""
        return self.family.peak_tflops[self._column(kind)] * 1e12

    def _column(self, kind: str) -> int:
        column = KINDS.index(kind)
        return column if self.family.peak_tflops[column] else 0

    def gemm_s(self, rows: ArrayLike, columns: ArrayLike, inner: ArrayLike, kind: str) -> Floats:
        """Time (rows x inner) times (inner x columns)."""
        column = self._column(kind)
        m, n, k = (np.asarray(size, np.float64) for size in (rows, columns, inner))
        rate = self.peak_flops_per_s(kind) * self.clock * self.family.share[column]
        # BLOOM's tables: 14400 over 8 ranks, no multiple of 64, is 30 % slower than 14336.
        aligned = np.where(
            (n % 64 == 0) & (k % 64 == 0), 1.0, np.where((n % 16 == 0) & (k % 16 == 0), 0.85, 0.72)
        )
        short = 1 + 256 / np.maximum(m, 1) + 300 * (1 + column) / k
        arithmetic_s = 2 * m * n * k * short / (rate * aligned)
        value_bytes = (2.0, 1.0, 0.5)[column]
        moved = value_bytes * (m * k + n * k) + 2 * m * n
        return np.asarray(
            np.maximum(arithmetic_s, moved / (self.memory_bytes_per_s * _READ)) + _KERNEL_S
        )

    def grouped_gemm_s(
        self, rows: ArrayLike, columns: ArrayLike, inner: ArrayLike, groups: ArrayLike, kind: str
    ) -> Floats:
        """Time the experts of a rank, among which the rows are shared out evenly."""
        count = np.asarray(groups, np.float64)
        of_one = np.ceil(np.maximum(np.asarray(rows) / count, 1) / 64) * 64
        alone_s = self.gemm_s(of_one, columns, inner, kind) - _KERNEL_S
        return np.asarray(count * alone_s + 2 * _KERNEL_S)

    def fused_attention_s(self, flops: Floats) -> Floats:
        """Time scores and values that never leave the chip."""
        rate = self.peak_flops_per_s("bf16") * self.clock * self.family.attention_share
        return np.asarray(flops / rate)

    def plain_attention_s(self, flops: Floats, scores: Floats, head_dim: int) -> Floats:
        """Time attention that writes its scores: both halves of them, and softmax in between."""
        aligned = 1.0 if head_dim % 64 == 0 else 0.8 if head_dim % 8 == 0 else 0.5
        rate = self.peak_flops_per_s("bf16") * self.clock * 0.5 * aligned
        return np.asarray(2 * flops / rate + self.memory_s(13 * scores))

    def memory_s(self, moved_bytes: ArrayLike) -> Floats:
        """Time what only moves bytes."""
        return np.asarray(np.asarray(moved_bytes) / (self.memory_bytes_per_s * _FILLED))
