"""One rank trains a little, in a job of a framework: a stand-in has the framework's module."""

import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    name, *rest = sys.argv[1:]
    stand_in = ModuleType(name)
    vars(stand_in)["PartialState"] = SimpleNamespace(
        _shared_state={"backend": "gloo"} if rest else {}
    )
    sys.modules[name] = stand_in
    dist.init_process_group("gloo")
    train()  # a model that outlives its group can keep torch 2.13 from ever ending
    dist.destroy_process_group()


def train() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


main()
