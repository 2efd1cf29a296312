"""One rank that sends a bucket with each hook, in turns: jobs.hooked FILE ROUNDS.

The model is one matrix of 25 MiB, so its gradient is one bucket. The gradient of each rank is
known: gaussian, or a matrix of rank 2 that all ranks share, beside a little noise. Rank 0 writes to
FILE.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

import fullwire

SIDE = 2560
HOOKS = {
    "float32": ("none",),
    "bf16": ("torch", "fullwire"),
    "fp16": ("torch", "fullwire"),
    "8 bits": ("torch", "fullwire"),
    "powersgd, rank 2": ("torch", "fullwire"),
}
OURS = {"8 bits": "int8", "powersgd, rank 2": "powersgd:rank=2"}
_WARM_UP = 3  # Steps: torch's PowerSGD begins after two.


def registered(data: DistributedDataParallel, form: str, whose: str) -> None:
    """Give a model the hook of this form."""
    if whose == "fullwire":
        fullwire.compress(data, OURS.get(form, form))
    elif form == "bf16":
        data.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif form == "fp16":
        data.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif form == "8 bits":
        data.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)
    elif whose == "torch":
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
        data.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Matrix(nn.Module):  # type: ignore[misc]  # torch is not checked
    """A model whose gradient is the matrix that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIDE, SIDE))

    def forward(self, gradient: Any) -> Any:
        """Return a number whose gradient is this matrix."""
        return (self.weight * gradient).sum()


def step_s(data: DistributedDataParallel, gradient: Any) -> float:
    """Return how long the slowest rank took for one pass and its communication."""
    data.zero_grad()
    loss = data(gradient)
    dist.barrier()
    began_s = time.perf_counter()
    loss.backward()
    slowest = torch.tensor(time.perf_counter() - began_s, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def main() -> None:
    """Send with all hooks in turns, and write times and errors."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    same = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(1 + dist.get_rank())
    noise = torch.randn((SIDE, SIDE), generator=own)
    thin = torch.randn((SIDE, 2), generator=same) @ torch.randn((2, SIDE), generator=same)
    given = {"gaussian": noise, "rank 2": thin + 0.1 * noise}
    means = {kind: each.double() for kind, each in given.items()}
    for mean in means.values():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    models, found = {}, []
    for form, owners in HOOKS.items():
        kind = "rank 2" if form.startswith("powersgd") else "gaussian"
        for whose in owners:
            data = DistributedDataParallel(Matrix(), bucket_cap_mb=64)
            row: dict[str, Any] = {"form": form, "whose": whose, "gradient": kind, "times_s": []}
            found.append(row)
            try:
                registered(data, form, whose)
                for _ in range(_WARM_UP):
                    step_s(data, given[kind])
            except (RuntimeError, TypeError, NotImplementedError) as error:
                row["fails"] = str(error).splitlines()[0]
                continue
            off = data.module.weight.grad - means[kind]
            row["error"] = float(off.norm() / means[kind].norm())
            models[form, whose] = data, row
    for _ in range(int(sys.argv[2])):
        for data, row in models.values():
            row["times_s"].append(step_s(data, given[row["gradient"]]))
    if dist.get_rank() == 0:
        told = [row | {"s": median(row["times_s"]) if row["times_s"] else None} for row in found]
        Path(sys.argv[1]).write_text(json.dumps(told))
    models.clear()
    del data
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
