"""Train under DDP for some steps of 64 samples of both ranks, which come in different ways.

- python loaders.py passes|cut|uneven|ahead|split|sent|kept|made: each pass takes a batch of its
  loader; a step cuts one batch into passes, or into unequal ones; a loader with workers asks ahead;
  each rank's sampler takes its part of a batch, as accelerate's with split_batches; rank 0 loads
  for both, as with its dispatch_batches; all batches are read before the first step; or the script
  makes its samples without a loader.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

STEPS, WHOLE = 12, 64
PASSES = {"passes": 4, "cut": 4, "uneven": 3}
OF_LOADER = {"passes": 8, "split": 64}  # the batch size that the loader has, elsewhere 32


class Part:
    """Takes a rank's part of each batch, and has the batch size of the whole."""

    def __init__(self, whole: BatchSampler) -> None:
        self.whole, self.batch_size = whole, whole.batch_size

    def __iter__(self) -> Iterator[Any]:
        size = self.batch_size // dist.get_world_size()
        first = size * dist.get_rank()
        return (batch[first : first + size] for batch in self.whole)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()


def train(way: str) -> None:
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    given = batches(way)
    passes = PASSES.get(way, 1)
    for _ in range(STEPS):
        if way == "passes":
            parts = [next(given) for _ in range(passes)]
        else:
            parts = torch.tensor_split(next(given), passes)
        for part in parts:
            model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # an evaluation reads its own samples
            next(iter(DataLoader(torch.zeros(100, 16), batch_size=100)))


def batches(way: str) -> Iterator[torch.Tensor]:
    data = torch.randn(STEPS * WHOLE, 16)
    size = OF_LOADER.get(way, WHOLE // 2)
    if way == "made":
        return (torch.randn(size, 16) for _ in range(STEPS))
    if way == "split":
        part = Part(BatchSampler(SequentialSampler(data), size, drop_last=True))
        return iter(DataLoader(data, batch_sampler=part))
    if way == "sent":
        return sent(DataLoader(data, batch_size=size))
    loader = DataLoader(data, batch_size=size, num_workers=2 if way == "ahead" else 0)
    return iter(list(loader)) if way == "kept" else iter(loader)


def sent(loader: DataLoader) -> Iterator[torch.Tensor]:
    given, ranks = iter(loader), dist.get_world_size()
    while True:
        whole = torch.empty(WHOLE, 16)
        if dist.get_rank() == 0:
            whole = torch.cat([next(given) for _ in range(ranks)])
        dist.broadcast(whole, 0)
        yield whole.chunk(ranks)[dist.get_rank()]


if __name__ == "__main__":
    main()
