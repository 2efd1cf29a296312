"""Train for three epochs with dropout; print, as JSON, digests of the weights by what loads data.

python epochs.py WAY...   each way is a data set, a sampler or a loop of its own
"""

import hashlib
import json
import logging
import random
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset


class Numbers(Dataset):  # type: ignore[misc]  # torch may be absent when we check
    """Sixty samples, which may depend on the epoch, on random numbers or on what was read."""

    def __init__(self, way: str) -> None:
        self.way, self.epoch, self.read = way, 0, 0
        self.rng = random.Random(5) if way == "generator" else None
        self.file = open(__file__, "rb") if way == "file" else None  # noqa: SIM115
        self.log = logging.getLogger() if way == "logging" else None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> Any:
        sample = torch.full((8,), number / 60 + self.epoch)
        if self.rng is not None:
            sample += self.rng.random()
        if self.file is not None:
            self.file.seek(number)
            sample += self.file.read(1)[0] / 256
        if self.way == "sometimes" and number % 7 == 3:
            sample += torch.rand(())
        if self.way == "counter":
            self.read += 1
            sample += self.read
        return sample


class Backwards(RandomSampler):  # type: ignore[misc]
    """A sampler of the script, which draws at each index."""

    def __iter__(self) -> Any:
        for number in range(59, -1, -1):
            torch.rand(())
            yield number


def noisy(samples: Any) -> Any:
    return torch.stack(samples) + torch.rand(())


def digest(way: str) -> str:
    logging.basicConfig()
    torch.manual_seed(1)
    data: Any = Numbers(way) if way != "tensors" else TensorDataset(torch.rand(60, 8))
    given: dict[str, Any] = {"shuffle": True}
    if way == "given":
        given["generator"] = torch.Generator().manual_seed(3)
    if way == "own sampler":
        given = {"sampler": Backwards(data)}
    if way == "lazily":
        given = {"sampler": RandomSampler(data, True, 60, torch.default_generator)}
    if way == "collated":
        given["collate_fn"] = noisy
    loader = DataLoader(data, 7, **given)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for epoch in range(3):
        if way == "epoch":
            data.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if way == "tensors":
                [batch] = batch
            if way == "leaving" and number == 7:
                break
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(weights).hexdigest()


if __name__ == "__main__":
    sys.stdout.write(json.dumps({way: digest(way) for way in sys.argv[1:]}) + "\n")
