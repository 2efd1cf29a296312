"""A small training of one kind, for predictions: python -m validation.jobs.cell KIND [STEPS].

    sleeping     DDP whose layers sleep as a device would compute
    computing    DDP whose layers compute
    halves       the same with PyTorch's float16 hook
    one-bucket   as `computing`, with one message after the backward pass
    uneven       as `computing`, with layers of several widths, norm layers, and usual buckets
    small        as `computing`, with buckets of 1 MiB
    adding       DDP that synchronises every fourth pass only
    by-hand      no DDP: each gradient is summed by a call after the backward pass
    sharded      FSDP2

BACKEND in the environment is the backend; the default is Gloo. CODEC is a codec of Fullwire for the
gradients, or one of torch's own hooks. WIDTH is the width of computing layers.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from validation.jobs.cause import Layer
from validation.jobs.compressing import send_with

PASSES = 4  # passes between two synchronisations, for `adding`
BATCH, WIDTH = 48, int(os.environ.get("WIDTH", "1152"))


def main() -> None:
    """Train as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    _train(*sys.argv[1:])  # a model that outlives its group can keep torch 2.13 from ever ending
    dist.barrier()
    dist.destroy_process_group()


def _train(kind: str, steps: str = "16") -> None:
    plain = _uneven() if kind == "uneven" else _computing()
    if kind in ("sleeping", "adding", "by-hand"):
        plain = _sleeping()
    model: Any = plain
    if kind == "sharded":
        for layer in plain:
            fully_shard(layer)
        fully_shard(plain)
    elif kind != "by-hand":
        capacity = {"one-bucket": 64, "uneven": 25, "small": 1}.get(kind, 8)
        model = DistributedDataParallel(plain, bucket_cap_mb=capacity)
        send_with(model, os.environ.get("CODEC", "float32"))
    if kind == "halves":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(plain.parameters(), 0.01)
    for _ in range(int(steps)):
        optimizer.zero_grad()
        for number in range(PASSES if kind == "adding" else 1):
            is_last = kind != "adding" or number == PASSES - 1
            with nullcontext() if is_last else model.no_sync():
                # A loss with a least value: numbers that grow to inf take another way in codecs.
                model(torch.ones(BATCH, WIDTH)).square().mean().backward()
        if kind == "by-hand":
            for each in plain.parameters():
                dist.all_reduce(each.grad)
        optimizer.step()


def _computing() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def _uneven() -> nn.Sequential:
    sides = (WIDTH, 2 * WIDTH, WIDTH // 2, WIDTH, WIDTH // 4, 2 * WIDTH, WIDTH)
    layers = [(nn.Linear(*each), nn.LayerNorm(each[1]), nn.ReLU()) for each in pairwise(sides)]
    return nn.Sequential(*(part for layer in layers for part in layer))


def _sleeping() -> nn.Sequential:
    return nn.Sequential(*(Layer(1_500_000, 0.006) for _ in range(14)))


if __name__ == "__main__":
    main()
