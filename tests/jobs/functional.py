"""Train with collectives that torch issues from C++, in steps of a fifth of a second.

python functional.py none|all: how many of its gradients go that way
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional


def main(way: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        time.sleep(0.2)
        optimizer.zero_grad()
        model(torch.randn(2, 8)).square().mean().backward()
        for each in model.parameters():
            assert each.grad is not None
            dist.all_reduce(each.grad)
            if way == "all":
                each.grad = functional.all_reduce(each.grad, "sum", dist.group.WORLD).clone()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
