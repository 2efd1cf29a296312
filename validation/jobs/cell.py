"""A small training of one kind, for predictions: python -m validation.jobs.cell KIND [STEPS].

    sleeping     DDP whose layers sleep as a device would compute
    computing    DDP whose layers compute
    halves       the same with PyTorch's float16 hook
    one-bucket   as `computing`, with one message after the backward pass
    uneven       as `computing`, with layers of several widths, norm layers, and usual buckets
    small        as `computing`, with buckets of 1 MiB
    deep         twenty narrow layers, with buckets of 1 MiB
    wide         three layers, two of them large
    convolving   a convolutional network, with usual buckets
    attending    a transformer, with buckets of 2 MiB
    adding       DDP that synchronises every fourth pass only
    by-hand      no DDP: each gradient is summed by a call after the backward pass
    sharded      FSDP2

BACKEND in the environment is the backend; the default is Gloo. CODEC is a codec of Fullwire for the
gradients, or one of torch's own hooks. WIDTH is the width of computing layers.
"""

from __future__ import annotations

import os
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
from validation.jobs.rank import as_a_rank

PASSES = 4  # passes between two synchronisations, for `adding`
BATCH, WIDTH = 48, int(os.environ.get("WIDTH", "1152"))


def _train(kind: str, steps: str = "16") -> None:
    plain = _sleeping() if kind in ("sleeping", "adding", "by-hand") else MODELS[kind]()
    model: Any = plain
    samples = SAMPLES[kind]() if kind in SAMPLES else torch.ones(BATCH, WIDTH)
    if kind == "sharded":
        for layer in plain:
            fully_shard(layer)
        fully_shard(plain)
    elif kind != "by-hand":
        capacity = CAPACITY_MB.get(kind, 8)
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
                model(samples).square().mean().backward()
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


def _convolving() -> nn.Sequential:
    sides = (3, 64, 128, 256, 256, 512)
    layers = [
        (nn.Conv2d(*each, 3, padding=1), nn.BatchNorm2d(each[1]), nn.ReLU())
        for each in pairwise(sides)
    ]
    parts = [part for layer in layers for part in layer]
    parts[6:6] = [nn.MaxPool2d(2)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sides[-1], 1000))


def _attending() -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Linear(256, 2000))


def _narrow() -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(20) for part in (nn.Linear(448, 448), nn.Tanh())))


def _wide() -> nn.Sequential:
    sides = (512, 4096, 1024, 256)
    return nn.Sequential(
        *(part for each in pairwise(sides) for part in (nn.Linear(*each), nn.ReLU()))
    )


MODELS = {
    **dict.fromkeys(("computing", "halves", "one-bucket", "small", "sharded"), _computing),
    "uneven": _uneven,
    "deep": _narrow,
    "wide": _wide,
    "convolving": _convolving,
    "attending": _attending,
}
SAMPLES = {
    "deep": lambda: torch.randn(256, 448),
    "wide": lambda: torch.randn(96, 512),
    "convolving": lambda: torch.randn(4, 3, 32, 32),
    "attending": lambda: torch.randn(4, 48, 256),
}
CAPACITY_MB = {
    "one-bucket": 64,
    "uneven": 25,
    "convolving": 25,
    "attending": 2,
    "small": 1,
    "deep": 1,
}

if __name__ == "__main__":
    as_a_rank(_train)
