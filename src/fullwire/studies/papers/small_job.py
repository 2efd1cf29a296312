"""The real job of a study: a small network trained under DDP, one thread a rank.

python small_job.py WIDTH BATCH STEPS [half]: an ordinary script that does not import Fullwire.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Train as one of the workers."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    _train()  # a model that outlives its group can keep torch 2.13 from ever ending
    dist.barrier()
    dist.destroy_process_group()


def _train() -> None:
    """Train on random digits for the given number of steps."""
    import torch
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    width, batch, steps = map(int, sys.argv[1:4])
    network = nn.Sequential(
        nn.Linear(784, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )
    model = DistributedDataParallel(network)
    if sys.argv[4:] == ["half"]:
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(batch, 784), torch.randint(10, (batch,))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
