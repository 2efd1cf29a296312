"""A small training whose ranks sum many small tensors in every step, apart or joined into one.

python -m validation.jobs.storm gradients|metrics apart|joined: 120 gradients of 60 layers, by hand,
or 80 metrics beside DDP. A sleep of 10 ms stands for an accelerator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from validation.jobs.rank import as_a_rank

STEPS, LAYERS, WIDTH, METRICS = 40, 60, 96, 80


def _train(what: str, way: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = nn.parallel.DistributedDataParallel(network) if what == "metrics" else network
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    add_up = _joined if way == "joined" else _apart
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(256, WIDTH)).square().mean().backward()
        time.sleep(0.01)
        metrics = [torch.ones(4) for _ in range(METRICS)]
        add_up([each.grad for each in network.parameters()] if what == "gradients" else metrics)
        optimizer.step()


def _apart(tensors: Sequence[torch.Tensor]) -> None:
    for each in tensors:
        dist.all_reduce(each)


def _joined(tensors: Sequence[torch.Tensor]) -> None:
    whole = torch.cat([each.flatten() for each in tensors])
    dist.all_reduce(whole)
    parts = whole.split([each.numel() for each in tensors])
    for each, part in zip(tensors, parts, strict=True):
        each.copy_(part.view_as(each))


if __name__ == "__main__":
    as_a_rank(_train)
