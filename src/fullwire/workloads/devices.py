"""Accelerators, as the time of a layer and the memory of a training see them.

Peaks are NVIDIA's data sheets, without sparsity. The efficiencies belong to a device, never to a
model: with one per model any table can be met, and the next model is still unknown.

Memory is the data sheet's, in decimal gigabytes. The devices have some 5 % more than that. The
driver's context and fragments take about as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator."""

    name: str
    title: str
    precision: str  # of arithmetic and activations
    matrix_flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    matrix_efficiency: float  # share of the peak that matrix work reaches
    memory_efficiency: float  # share of the bandwidth that memory-bound work reaches

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of one activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def winograd_saving(self) -> float:
        """Return how many times fewer multiplications a 3 x 3 convolution with stride 1 takes.

        Winograd's F(2 x 2, 3 x 3) has 16 where the definition has 36 (Lavin and Gray, CVPR 2016).
        cuDNN's fp32 convolutions work so, tensor cores do not. Without it vgg16 was measured above
        the V100's peak.
        """
        return 36 / 16 if self.precision == "fp32" else 1.0


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="t4",
            title="NVIDIA T4 16 GB",
            precision="fp16",  # it has no bf16
            matrix_flops_per_s=65e12,
            memory_bytes_per_s=320e9,
            memory_bytes=16 * 10**9,
            # Assumed, and less than the others': 70 W do not feed its tensor cores for long.
            matrix_efficiency=0.4,
            memory_efficiency=0.75,  # assumed
        ),
        Device(
            name="v100",
            title="NVIDIA V100 SXM2 16 GB",  # 32 GB runs at the same rates
            precision="fp32",
            matrix_flops_per_s=15.7e12,
            memory_bytes_per_s=900e9,
            memory_bytes=16 * 10**9,
            # The one fitted number: with it the modelled backward passes of vgg16 +bn and
            # resnet50 miss the measured ones by the same share, one above, one below.
            matrix_efficiency=0.57,
            # Measured with the logs: adding vectors of 640 MiB moves 827 GB/s.
            memory_efficiency=0.92,
        ),
        Device(
            name="a100",
            title="NVIDIA A100 SXM4 80 GB",
            precision="bf16",
            matrix_flops_per_s=312e12,
            memory_bytes_per_s=2039e9,
            memory_bytes=80 * 10**9,
            # Assumed: 0.7 of the best matmul found, 0.87 (stas00/ml-engineering, accelerators).
            # It gives gpt2 164,000 tokens/s. On 8 of these PyTorch has been seen at 138,000 each,
            # llm.c at 231,000 (10 billion tokens in 90 minutes).
            matrix_efficiency=0.6,
            # Assumed: calculon-ai/calculon (systems/) has 0.75 for 10 MB and 0.9 for 100 MB.
            memory_efficiency=0.85,
        ),
        Device(
            name="h100",
            title="NVIDIA H100 SXM5 80 GB",
            precision="bf16",
            matrix_flops_per_s=989e12,
            memory_bytes_per_s=3350e9,
            memory_bytes=80 * 10**9,
            # Assumed: 0.6 of the best matmul found, 0.80 (same source): faster units are harder
            # to feed. It gives gpt2 367,000 tokens/s; nanoGPT has been seen at 380,000 (its pull
            # request 464), llm.c on 8 at 463,000 each (10 billion tokens in 45 minutes).
            matrix_efficiency=0.5,
            memory_efficiency=0.85,  # as a100
        ),
        Device(
            name="h200",
            title="NVIDIA H200 SXM5 141 GB",  # an h100 with more and faster memory
            precision="bf16",
            matrix_flops_per_s=989e12,
            memory_bytes_per_s=4800e9,
            memory_bytes=141 * 10**9,
            matrix_efficiency=0.5,  # as h100
            memory_efficiency=0.85,  # as a100
        ),
    )
}
