"""Train with collectives that torch issues from C++, in steps of a fifth of a second.

python functional.py seen|unseen: whether a group in Python sees these collectives.
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
            if way == "seen":
                each.grad = functional.all_reduce(each.grad, "sum", dist.group.WORLD).clone()
            else:
                gathered = torch.ops._c10d_functional.all_gather_into_tensor_out(
                    each.grad, 1, dist.group.WORLD.group_name, out=torch.empty_like(each.grad)
                )
                torch.ops._c10d_functional.wait_tensor(gathered)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
