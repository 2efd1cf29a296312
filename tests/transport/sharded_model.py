"""The model, optimizer and data of sharded trainings in tests, and their undisturbed run."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullwire.resilience.batches import order_of

SAMPLES, BATCH, CLIP = 210, 20, 0.5
STEPS_IN_EPOCH = math.ceil(SAMPLES / BATCH)  # the last batch is smaller


def a_model() -> torch.nn.Sequential:
    """Return a model whose parameters do not divide by three; one has fewer rows than ranks."""
    layers = [torch.nn.Linear(8, 31), torch.nn.ReLU(), torch.nn.Linear(31, 14), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(14, 1))


class Normed(torch.optim.SGD):  # type: ignore[misc]  # torch may be absent when we check
    """An optimizer whose step depends on the whole of a tensor."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                norm = parameter.grad.norm()
                parameter.grad /= norm.full_tensor() if isinstance(norm, DTensor) else norm
        super().step(closure)


def an_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    if os.environ.get("OPTIMIZER") == "Normed":
        return Normed(model.parameters(), lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def the_data() -> torch.utils.data.TensorDataset:
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


def undisturbed(steps: int, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Train the same in one process without any of this."""
    torch.manual_seed(seed)
    model = a_model()
    optimizer = an_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
    inputs, wanted = the_data().tensors
    for number in range(steps):
        epoch, step = divmod(number, STEPS_IN_EPOCH)
        part = order_of(SAMPLES, 0, epoch)[step * BATCH : (step + 1) * BATCH]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[part]), wanted[part]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
    return model, optimizer
