"""Train a model with FSDP2, one with all_reduce by hand, one split as DTensors; print a digest."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

STEPS = int(os.environ.get("STEPS", "3"))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    by_hand, sharded, split = a_model(), a_model(), a_model()
    everyone = dist.new_group()
    train(by_hand, lambda: average(by_hand, everyone))
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    train(sharded, lambda: None)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("split",))
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    train(split, lambda: None)
    digest = hashlib.sha256()
    whole = (each.full_tensor() for model in (sharded, split) for each in model.parameters())
    for each in [*by_hand.parameters(), *whole]:
        digest.update(each.detach().numpy().tobytes())
    sys.stdout.write(f"{digest.hexdigest()}\n")  # in one piece, unlike print
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def a_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def train(model: nn.Module, after_backward: Callable[[], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        after_backward()
        optimizer.step()


def average(model: nn.Module, group: dist.ProcessGroup) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size()


if __name__ == "__main__":
    main()
