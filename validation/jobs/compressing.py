"""One rank that trains three small models with each codec: compressing.py FILE CELL...

A cell is MODEL/CODEC/SEED. Rank 0 adds a line to FILE for each cell. A training ends when its
loss reaches the model's target, or after LONGEST steps.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import fullwire
from fullwire.compression import hook

LONGEST = 400
LOOK_EVERY = 1
hook.MEASURED_EVERY = 5


class Task(NamedTuple):
    """A model, its batch for a rank and a step, its loss, and the loss that is its target."""

    model: nn.Module
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], Any]
    test: Any
    target: float
    speed: float


def pictures(seed: int) -> Task:
    """Ten kinds of generated pictures, as digits are, for a network of two layers."""
    same = torch.Generator().manual_seed(1)
    centres = torch.randn((10, 64), generator=same)

    def batch(own: torch.Generator) -> Any:
        labels = torch.randint(10, (32,), generator=own)
        return centres[labels] + 1.5 * torch.randn((32, 64), generator=own), labels

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return Task(model, batch, _labelled, _many(batch), 0.15, 0.05)


class Reader(nn.Module):  # type: ignore[misc]  # torch is not checked
    """A transformer of one layer that reads characters."""

    def __init__(self, kinds: int, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(kinds, width), nn.Embedding(length, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 128, 0.0, batch_first=True)
        self.end = nn.Linear(width, kinds)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text: Any) -> Any:
        """Return the scores of each next character."""
        inner = self.letters(text) + self.places.weight
        return self.end(self.layer(inner, src_mask=self.mask)).transpose(1, 2)


def text(seed: int) -> Task:
    """Source text of the standard library, character by character, for a small transformer."""
    written = inspect.getsource(inspect.getmodule(ArgumentParser))  # type: ignore[arg-type]
    kinds = sorted(set(written))
    codes = torch.tensor([kinds.index(letter) for letter in written])

    def batch(own: torch.Generator) -> Any:
        first = torch.randint(len(codes) - 33, (16, 1), generator=own)
        rows = codes[first + torch.arange(33)]
        return rows[:, :-1], rows[:, 1:]

    torch.manual_seed(seed)
    return Task(Reader(len(kinds)), batch, _labelled, _many(batch, 3), 2.40, 0.3)


class Factors(nn.Module):  # type: ignore[misc]
    """A matrix as the product of two thin ones."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.left = nn.Parameter(0.3 * torch.randn(rows, rank))
        self.right = nn.Parameter(0.3 * torch.randn(columns, rank))

    def forward(self, places: Any) -> Any:
        """Return the entries at these places."""
        return (self.left[places[0]] * self.right[places[1]]).sum(1)


def ratings(seed: int) -> Task:
    """Entries of a generated matrix of low rank, for a factorization."""
    same = torch.Generator().manual_seed(2)
    left, right = torch.randn((120, 6), generator=same), torch.randn((90, 6), generator=same)
    whole = left @ right.T / 6**0.5

    def batch(own: torch.Generator) -> Any:
        places = torch.stack(
            [torch.randint(120, (512,), generator=own), torch.randint(90, (512,), generator=own)]
        )
        return places, whole[places[0], places[1]]

    torch.manual_seed(seed)

    def loss(model: nn.Module, given: Any) -> Any:
        return functional.mse_loss(model(given[0]), given[1])

    return Task(Factors(120, 90, 8), batch, loss, _many(batch, 4), 0.05, 8.0)


def _labelled(model: nn.Module, given: Any) -> Any:
    return functional.cross_entropy(model(given[0]), given[1])


def _many(batch: Callable[[torch.Generator], Any], count: int = 16) -> list[Any]:
    other = torch.Generator().manual_seed(9)
    return [batch(other) for _ in range(count)]


def send_with(data: DistributedDataParallel, codec: str, *, packs_small: bool = False) -> Any:
    """Give a model the hook of a codec, ours or torch's; return ours."""
    if codec == "torch-fp16":
        return data.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if codec == "torch-bf16":
        return data.register_comm_hook(None, default_hooks.bf16_compress_hook)
    if codec == "torch-powersgd":
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        return data.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if codec == "float32":
        return None
    return fullwire.compress(data, codec, packs_small=packs_small)


def trained(cell: str) -> dict[str, Any]:
    """Train one model to its target."""
    model, codec, seed = cell.split("/")
    task = {"pictures": pictures, "text": text, "ratings": ratings}[model](int(seed))
    data = DistributedDataParallel(task.model)
    compression = send_with(data, codec, packs_small=True)  # These models have small matrices.
    optimizer = torch.optim.SGD(data.parameters(), task.speed, momentum=0.5)
    own = torch.Generator().manual_seed(1000 * int(seed) + dist.get_rank())
    reached, took_s = None, 0.0
    for step in range(1, LONGEST + 1):
        began_s = time.perf_counter()
        optimizer.zero_grad()
        task.loss(data, task.batch(own)).backward()
        optimizer.step()
        took_s += time.perf_counter() - began_s
        if step % LOOK_EVERY == 0:
            with torch.no_grad():  # Ranks hold the same weights, so they agree.
                loss = sum(float(task.loss(task.model, each)) for each in task.test)
            if loss / len(task.test) <= task.target:
                reached = step
                break
    errors = [each.squared_error for each in compression.measured] if compression else []
    return {
        "cell": cell,
        "steps": reached,
        "step_s": took_s / step,
        "squared_error": sum(errors) / len(errors) if errors else None,
    }


def main() -> None:
    """Train all cells, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for cell in sys.argv[2:]:
        found = trained(cell)
        if dist.get_rank() == 0:
            with Path(sys.argv[1]).open("a") as file:
                file.write(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
