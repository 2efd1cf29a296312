"""A small training job that is slow for a reason that its options name.

It is real PyTorch with DistributedDataParallel over Gloo. Layers sleep as long as a device would
compute, and give real gradients. So ranks that share a machine do not compete for its processors.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LATE_RANK = 1


class Sleeping(torch.autograd.Function):  # type: ignore[misc]  # torch is not checked
    """A layer's work: a given time in each direction."""

    @staticmethod
    def forward(context: Any, x: Any, weight: Any, forward_s: float, backward_s: float) -> Any:
        """Sleep as long as the layer would compute."""
        context.save_for_backward(weight)
        context.backward_s = backward_s
        time.sleep(forward_s)
        return x + weight[0]

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        """Sleep, and give the weight a gradient of its size."""
        (weight,) = context.saved_tensors
        time.sleep(context.backward_s)
        return gradient, torch.full_like(weight, 1e-3), None, None


class Layer(nn.Module):  # type: ignore[misc]
    """A layer of a given size; a third of its time goes to the forward pass."""

    def __init__(self, size_bytes: int, compute_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size_bytes // 4))
        self.forward_s, self.backward_s = compute_s / 3, compute_s * 2 / 3

    def forward(self, x: Any) -> Any:
        """Apply the layer."""
        return Sleeping.apply(x, self.weight, self.forward_s, self.backward_s)


class Batches(torch.utils.data.Dataset):  # type: ignore[misc]
    """Batches that take some time to load."""

    def __init__(self, count: int, load_s: float) -> None:
        self.count, self.load_s = count, load_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        time.sleep(self.load_s)
        return torch.zeros(1)


def main() -> None:
    """Train by the options."""
    given = argparse.ArgumentParser()
    given.add_argument("--steps", type=int, default=12)
    given.add_argument("--layers", type=int, default=8)
    given.add_argument("--layer-bytes", type=int, default=16 * 1024)
    given.add_argument("--compute-s", type=float, default=0.08, help="of a step")
    given.add_argument("--load-s", type=float, default=0.0, help="of a batch, on every rank")
    given.add_argument("--no-loader", action="store_true", help="batches are read by hand")
    given.add_argument("--late", choices=("forward", "backward", "input", "between"))
    given.add_argument("--late-s", type=float, default=0.06)
    given.add_argument("--bucket-mb", type=float, default=None)
    given.add_argument("--one-by-one", action="store_true", help="no DDP: add up each gradient")
    given.add_argument("--loss", action="store_true", help="add up the loss too")
    options = given.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(options, options.late if dist.get_rank() == LATE_RANK else None)
    dist.barrier()
    dist.destroy_process_group()


def train(options: argparse.Namespace, late: str | None) -> None:
    """Train the steps; in each step this rank sleeps at the point where it is late."""
    layers = [
        Layer(options.layer_bytes, options.compute_s / options.layers)
        for _ in range(options.layers)
    ]
    if late == "forward":
        layers[0].forward_s += options.late_s
    if late == "backward":
        layers[-1].weight.register_hook(lambda gradient: time.sleep(options.late_s))
    inner = nn.Sequential(*layers)
    model = inner
    if not options.one_by_one:
        model = DistributedDataParallel(inner, bucket_cap_mb=options.bucket_mb)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    load_s = options.load_s + (options.late_s if late == "input" else 0.0)
    data = Batches(options.steps, load_s)
    by_hand = (data[number] for number in range(options.steps))
    for batch in by_hand if options.no_loader else torch.utils.data.DataLoader(data):
        optimizer.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        for gradient in (each.grad for each in inner.parameters() if options.one_by_one):
            dist.all_reduce(gradient)
        if options.loss:
            dist.all_reduce(loss.detach())
        optimizer.step()
        if late == "between":
            time.sleep(options.late_s)


if __name__ == "__main__":
    main()
