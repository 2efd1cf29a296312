"""Accelerators, as the time of a layer and the memory of a training see them.

Peaks are NVIDIA's data sheets, without sparsity. The efficiencies belong to a device, never to a
model: with one per model any table can be met, and the next model is still unknown.

Memory is the data sheet's, in decimal gigabytes. The devices have some 5 % more than that. The
driver's context and fragments take about as much.

Weights, gradients and the optimizer's state have 4 bytes a value on every device. Where autocast
computes in 16 bits, it also holds the weights in 16 bits. Activations are the tensors that layers
keep for their backward pass. The sum is the least that plain training needs. Left out are DDP's
buckets (the gradients once more, except with gradient_as_bucket_view=True), the workspaces of
single kernels, and the tensors that unfused layers keep. Nothing is recomputed, offloaded or
sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fullwire.workloads.layers import FP32_BYTES, Layer
from fullwire.workloads.optimizers import Optimizer


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The bytes that a training needs on a device, and those that the device has."""

    weights: int
    gradients: int
    optimizer: int
    activations_of_sample: int
    samples: int
    device: int

    @property
    def state(self) -> int:
        """Return the bytes that do not depend on the batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def activations(self) -> int:
        """Return the bytes that the whole batch keeps for its backward pass."""
        return self.samples * self.activations_of_sample

    @property
    def needed(self) -> int:
        """Return the sum of all needs."""
        return self.state + self.activations

    @property
    def fits(self) -> bool:
        """Return whether the device has enough memory."""
        return self.needed <= self.device

    @property
    def largest_batch(self) -> int:
        """Return the number of samples that would fit, which may be 0."""
        return max(0, (self.device - self.state) // self.activations_of_sample)

    @property
    def least_shards(self) -> int | None:
        """Return the number of devices over which to spread the state for a batch of one.

        It is None where the activations of one sample alone are too many.
        """
        left = self.device - self.activations_of_sample
        return None if left <= 0 else -(-self.state // left)


def memory(
    layers: Iterable[Layer], parameters: int, optimizer: Optimizer, device: Device, samples: int
) -> Memory:
    """Add up the memory that a training needs."""
    width = device.activation_bytes
    copied = 0 if width == FP32_BYTES else width
    kept = sum(width * layer.kept_values + layer.kept_bytes for layer in layers)
    return Memory(
        weights=parameters * (FP32_BYTES + copied),
        gradients=parameters * FP32_BYTES,
        optimizer=parameters * FP32_BYTES * optimizer.state_values,
        activations_of_sample=kept,
        samples=samples,
        device=device.memory_bytes,
    )
