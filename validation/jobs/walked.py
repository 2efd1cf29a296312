"""A training whose gradients fill a slow link, with its loss in the recording: walked.py STEPS

The model tells generated pictures of ten kinds apart. BACKEND in the environment is the backend.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fullwire
from validation.jobs.rank import as_a_rank

WIDTH, BATCH, KINDS, BLUR = 1152, 48, 10, 2.0


def _train(steps: str) -> None:
    torch.manual_seed(0)
    hidden = []
    for _ in range(6):
        hidden.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()))
    model = DistributedDataParallel(nn.Sequential(*hidden, nn.Linear(WIDTH, KINDS)))
    optimizer = torch.optim.SGD(model.parameters(), 0.005)  # Rounding grows where it jumps.
    centres = torch.randn(KINDS, WIDTH)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(int(steps)):
        kinds = torch.randint(KINDS, (BATCH,), generator=own)
        pictures = centres[kinds] + BLUR * torch.randn(BATCH, WIDTH, generator=own)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pictures), kinds)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            fullwire.log(loss=loss.item())


if __name__ == "__main__":
    as_a_rank(_train)
