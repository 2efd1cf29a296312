"""Fork two ranks off a process that has made their model; each trains with a worker to load data.

Before it loads torch it checks whether torch is installed, as libraries do. It also forgets its
environment.
"""

import importlib.util
import multiprocessing
import os
import socket
import sys

assert importlib.util.find_spec("torch") is not None
os.environ.clear()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

STEPS = 6


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    take_steps(model, optimizer)
    dist.barrier()
    dist.destroy_process_group()


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    data = torch.utils.data.DataLoader(torch.randn(STEPS * 4, 8), batch_size=4, num_workers=1)
    together = DistributedDataParallel(model)
    for batch in data:
        optimizer.zero_grad()
        together(batch).square().mean().backward()
        optimizer.step()


def main() -> int:
    torch.set_num_threads(1)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    held = socket.socket()  # while they run, no other process gets this port
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # but rank 0 may listen there
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=train, args=(rank, model, optimizer, port)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    held.close()
    return max(abs(each.exitcode or 0) for each in ranks)


if __name__ == "__main__":
    sys.exit(main())
