"""DDP whose computing and communication meet on processors: python -m validation.jobs.crowded WORK

WORK is heavy or light: the amount of computation for each gradient. BACKEND in the environment is
the backend, and STEPS the number of steps.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from validation.jobs.rank import as_a_rank

WIDTH, LAYERS, BUCKET_MB = 1024, 6, 4
BATCH = {"heavy": 192, "light": 32}


def _train(work: str) -> None:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    samples = torch.randn(BATCH[work], WIDTH)
    for _ in range(int(os.environ.get("STEPS", "40"))):
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    as_a_rank(_train)
