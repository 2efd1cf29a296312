"""Rounds of local steps, as local SGD and DiLoCo take them.

    in a round      each rank takes `steps` steps with its own optimizer, and sends nothing
    at its end      the mean of what these changed, by samples, travels once
    then            an outer optimizer (SGD with Nesterov's momentum) takes it as its gradient

A round counts for all ranks or for none, as a step does otherwise. So a rank keeps the state of its
beginning, and goes back to it where a round is interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fullwire.errors import UsageError


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


class Round:
    """What this rank has of the present round."""

    def __init__(self, steps: int = 0) -> None:
        self.steps_left = steps
        self.samples: list[int] = []
        self.size = 0  # samples of all ranks
        self.is_whole = True  # the last batch of an epoch may be smaller
        self.is_interrupted = False

    @property
    def weight(self) -> float:
        """Return this rank's part of the samples."""
        return len(self.samples) / self.size


class Outer:
    """The optimizer of the rounds. Workers that join, and checkpoints, have its momentum."""

    def __init__(self, steps: int, rate: float, momentum: float) -> None:
        if steps < 1:
            raise UsageError(f"fullwire.elastic: sync_every: expected 1 step or more, got {steps}")
        if rate <= 0 or not 0 <= momentum < 1:
            raise UsageError(
                "fullwire.elastic: expected outer_rate above 0 and outer_momentum from 0 to below "
                f"1, got {rate:g} and {momentum:g}"
            )
        self.steps = steps
        self._rate, self._momentum = rate, momentum
        self._buckets: Sequence[Any] = ()
        self._begins: list[Any] = []  # the parameters at the beginning of the round
        self._momenta: list[Any] = []

    def serve(self, buckets: Sequence[Any]) -> None:
        """Work on the parameters of these buckets, whose sums travel together."""
        self._buckets = buckets
        self._begins = [torch.zeros_like(bucket.flat) for bucket in buckets]
        self._momenta = [torch.zeros_like(bucket.flat) for bucket in buckets]

    def state_dict(self) -> dict[str, Any]:
        """Return the momentum."""
        return {"momenta": self._momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the momentum of another rank, or of a checkpoint."""
        for own, given in zip(self._momenta, state["momenta"], strict=True):
            own.copy_(given)

    def begin(self) -> None:
        """Note the parameters at the beginning of a round."""
        for bucket, begins in zip(self._buckets, self._begins, strict=True):
            for parameter, begin in zip(bucket.parameters, _parts(bucket, begins), strict=True):
                begin.copy_(parameter.detach())

    def take_changes(self, weight: float) -> None:
        """Write into the buckets how far this rank's steps went from there, times its weight."""
        for bucket, begins in zip(self._buckets, self._begins, strict=True):
            parts = zip(bucket.parameters, _parts(bucket, begins), bucket.views, strict=True)
            for parameter, begin, view in parts:
                torch.sub(begin, parameter.detach(), out=view)
            bucket.flat.mul_(weight)

    def apply(self) -> None:
        """Step from the parameters of the beginning by the sums in the buckets."""
        for bucket, begins, momentum in zip(
            self._buckets, self._begins, self._momenta, strict=True
        ):
            momentum.mul_(self._momentum).add_(bucket.flat)
            begins.sub_(bucket.flat, alpha=self._rate)
            begins.sub_(momentum, alpha=self._rate * self._momentum)
            for parameter, begin in zip(bucket.parameters, _parts(bucket, begins), strict=True):
                parameter.detach().copy_(begin)


def _parts(bucket: Any, flat: Any) -> list[Any]:
    """Return the part of a row that belongs to each parameter."""
    sizes = [parameter.numel() for parameter in bucket.parameters]
    return [
        part.view_as(parameter)
        for part, parameter in zip(flat.split(sizes), bucket.parameters, strict=True)
    ]
