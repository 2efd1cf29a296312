"""Train with DistributedDataParallel until rank 1 kills itself, as the kernel would."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    end = "rank 1 should have been killed"
    try:
        _train()  # a model that outlives its group can keep torch 2.13 from ever ending
    except RuntimeError as error:  # rank 1 is gone; a traceback would keep the model
        end = str(error)
    dist.destroy_process_group()
    sys.exit(end)


def _train() -> None:
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(1000):
        if step == 40 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)


if __name__ == "__main__":
    main()
