"""The batches of an elastic job, and the samples of each."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Loop(NamedTuple):
    """A script's loop over batches: its place among all rounds and steps of the job."""

    first_round: int = 0
    rounds: int = 0
    first_step: int = 0
    steps: int = 0
    steps_of_a_round: int = 1

    @property
    def last_round(self) -> int:
        """Return the rounds that are committed when the loop ends."""
        return self.first_round + self.rounds

    def next(self, steps: int) -> Loop:
        """Return the loop after this one. Its last round may be shorter."""
        rounds = math.ceil(steps / self.steps_of_a_round)
        first_step = self.first_step + self.steps
        return self._replace(
            first_round=self.last_round, rounds=rounds, first_step=first_step, steps=steps
        )

    def steps_of(self, number: int) -> range:
        """Return the steps of a round, counted from the first one of this loop."""
        begin = (number - self.first_round) * self.steps_of_a_round
        return range(begin, min(begin + self.steps_of_a_round, self.steps))

    def steps_before(self, number: int) -> int:
        """Return the steps of the job before a round."""
        before = (number - self.first_round) * self.steps_of_a_round
        return self.first_step + min(max(before, 0), self.steps)


def order_of(size: int, seed: int, number: int) -> list[int]:
    """Return the order of the samples in an epoch. All workers compute the same one."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def collated(dataset: Any, indices: list[int], collate: Callable[[list[Any]], Any] | None) -> Any:
    """Return these samples of a dataset as a batch."""
    if isinstance(dataset, torch.Tensor):
        return dataset[indices]
    if collate is None and isinstance(dataset, torch.utils.data.TensorDataset):
        return [tensor[indices] for tensor in dataset.tensors]
    given = [dataset[index] for index in indices]
    return (collate or torch.utils.data.default_collate)(given)


def tell_of_batch_statistics(model: Any, rank: int) -> None:
    """Name the layers whose result depends on how a batch is divided: shares change it."""
    names = [
        f"{name or 'the model'} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)
    ]
    if names and rank == 0:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        sys.stderr.write(
            f"fullwire: --balance changes the result of {', '.join(names[:3])}{more}: their "
            "statistics are those of each worker's own samples, and shares differ\n"
        )
