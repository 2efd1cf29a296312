"""Train a model for three steps in each of several ways to pass backward; print their names."""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 3
WAYS = (
    "plain",
    "accumulated",
    "checkpointed",
    "unused",
    "static",
    "around",
    "optimizer first",
    "starved",
)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    for way in WAYS:
        if way == "starved":
            starve()
        train(way)
        sys.stdout.write(f"{way}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


def starve() -> None:
    """Make the recorder pause around its reads of the clock, as when other processes compute."""
    recorder = sys.modules.get("fullwire_inside.watch")
    if recorder is None:
        return
    [clock] = [each for each in gc.get_objects() if type(each) is recorder.Clock]
    moment = clock.moment

    def begin_late(account: Any, begun_ns: int) -> None:
        vars(account)["begun_ns"] = begun_ns
        time.sleep(0.02)

    def moment_late() -> Any:
        time.sleep(0.005)
        return moment()

    begun = property(lambda account: vars(account)["begun_ns"], begin_late)
    recorder._Account.begun_ns, clock.moment = begun, moment_late


class Model(nn.Module):  # type: ignore[misc]  # torch may be absent when we check
    """Two layers that are used, perhaps recomputed, and one that is not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8) if way == "unused" else None
        self.is_checkpointed = way == "checkpointed"

    def forward(self, data: torch.Tensor) -> Any:
        if not self.is_checkpointed:
            return self.second(self.first(data))
        seen = checkpoint(self.first, data, use_reentrant=True)
        return checkpoint(self.second, seen, use_reentrant=True)


def train(way: str) -> None:
    model = Model(way)
    if way == "optimizer first":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = DistributedDataParallel(
        model, find_unused_parameters=way == "unused", static_graph=way == "static"
    )
    if way != "optimizer first":
        optimizer = torch.optim.SGD(data.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if way == "accumulated":
            with data.no_sync():
                backward(data)
        backward(data.module if way == "around" else data)
        optimizer.step()


def backward(model: nn.Module) -> None:
    model(torch.randn(4, 8, requires_grad=True)).square().mean().backward()


if __name__ == "__main__":
    main()
