"""Train a small model on Gloo and tell, as JSON, the weights' digest and what the job has.

- python fixable.py: as scripts usually are.
- python fixable.py slow: data take longer to read than to learn.
- python fixable.py stubborn: with a hook of its own, random data, and an iterable data set.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


class Numbers(Dataset):  # type: ignore[misc]  # torch may be absent when we check
    """Sixty samples or more; random ones change from reading to reading."""

    def __init__(self, is_random: bool, is_slow: bool) -> None:
        self.is_random = is_random
        self.is_slow = is_slow

    def __len__(self) -> int:
        return 400 if self.is_slow else 60

    def __getitem__(self, number: int) -> Any:
        if self.is_slow:
            time.sleep(0.01)
        same = torch.Generator().manual_seed(number)
        return torch.randn(64) if self.is_random else torch.randn(64, generator=same)


class Stream(IterableDataset):  # type: ignore[misc]
    """Three samples in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def main() -> None:
    is_stubborn = sys.argv[1:] == ["stubborn"]
    dist.init_process_group("gloo")
    told = train(is_stubborn)
    dist.barrier()
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        sys.stdout.write(json.dumps(told) + "\n")


def train(is_stubborn: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
    data = DistributedDataParallel(model, None, None)  # some arguments by position
    if is_stubborn:
        data.register_comm_hook(None, default_hooks.fp16_compress_hook)
    numbers = Numbers(is_random=is_stubborn, is_slow=sys.argv[1:] == ["slow"])
    loader = DataLoader(numbers, 5, sampler=DistributedSampler(numbers, seed=7))
    stream = DataLoader(Stream())
    optimizer = torch.optim.Adam(data.parameters(), 0.01)
    for batch in loader:
        optimizer.zero_grad()
        data(batch).square().mean().backward()
        optimizer.step()
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return {
        "digest": hashlib.sha256(weights).hexdigest(),
        "backend": dist.get_backend(),
        "bucket_bytes": data.bucket_bytes_cap,
        "static_graph": data.static_graph,
        "loaders": [loader.num_workers, stream.num_workers],
        "threads": torch.get_num_threads(),
        "random": float(torch.rand(())),
    }


if __name__ == "__main__":
    main()
