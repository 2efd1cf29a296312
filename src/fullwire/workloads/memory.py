"""The device memory that a training needs, and the batch that would fit.

Weights, gradients and the optimizer's state have 4 bytes a value on every device. Where autocast
computes in 16 bits, it also holds the weights in 16 bits. Activations are the tensors that layers
keep for their backward pass. The sum is the least that plain training needs. Left out are DDP's
buckets (the gradients once more, except with gradient_as_bucket_view=True), the workspaces of
single kernels, and the tensors that unfused layers keep. Nothing is recomputed, offloaded or
sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fullwire.workloads.devices import Device
from fullwire.workloads.layers import FP32_BYTES, Layer
from fullwire.workloads.optimizers import Optimizer


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
