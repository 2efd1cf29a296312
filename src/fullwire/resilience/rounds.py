"""Rounds of local steps, as local SGD and DiLoCo take them.

    in a round      each rank takes some steps with its own optimizer
    at its end      the mean of what these changed, by samples, travels once
    then            an outer optimizer (SGD with Nesterov's momentum) takes it as its gradient

A round counts for all ranks or for none, as a step does otherwise. So a rank keeps the state of its
beginning, and goes back to it where a round is interrupted.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from fullwire.errors import UsageError
from fullwire.resilience.batches import Loop
from fullwire.resilience.fragments import nearest, round_problem
from fullwire.units import shown

_RATE, _MOMENTUM = 0.7, 0.9


class Round:
    """This rank's part of the present round."""

    def __init__(self, steps: int = 0) -> None:
        self.steps_left = steps
        self.samples: list[int] = []
        self.size = 0  # samples of all ranks
        self.is_whole = True  # the last batch of an epoch may be smaller
        self.is_interrupted = False
        self.has_begun_sums = False  # before its last step

    @property
    def weight(self) -> float:
        """Return this rank's part of the samples."""
        return len(self.samples) / self.size


class Outer:
    """The optimizer of the rounds. Workers that join, and checkpoints, have its momentum.

    With several fragments of the parameters, one is summed in each round, and each after so many
    rounds. Its sum travels during the last step of the round. The changes of that step stay.
    """

    def __init__(
        self, every: int, fragments: int, rate: float | None, momentum: float | None
    ) -> None:
        """Without a rate or a momentum, take DiLoCo's."""
        every = _count(every, "sync_every", "step")
        fragments = _count(fragments, "fragments", "part")
        if problem := round_problem(fragments, every):
            raise UsageError(
                f"fullwire.elastic: fragments: {problem}. The nearest is "
                f"{nearest(fragments, every, every)}"
            )
        if every == 1 and (rate, momentum) != (None, None):
            raise UsageError(
                "fullwire.elastic: outer_rate, outer_momentum: expected sync_every above 1 with "
                "them, as nothing else reads them, got 1"
            )
        rate = _number(_RATE if rate is None else rate, "outer_rate")
        momentum = _number(_MOMENTUM if momentum is None else momentum, "outer_momentum")
        if not (0 < rate < math.inf and 0 <= momentum < 1):
            raise UsageError(
                "fullwire.elastic: expected outer_rate above 0 and finite, and outer_momentum from "
                f"0 to below 1, got {rate:g} and {momentum:g}"
            )
        self.every = every  # steps until all fragments are summed
        self.steps = every // fragments  # of a round
        self.fragments = fragments
        self._rate, self._momentum = rate, momentum
        self._of: dict[int, _Summed] = {}  # by bucket

    def serve(self, fragments: Sequence[Sequence[Any]]) -> None:
        """Work on the parameters of these fragments; each has buckets, which travel together."""
        self._fragments = fragments
        self._of = {id(bucket): _Summed(bucket) for bucket in itertools.chain(*fragments)}
        self._note_all()

    def due(self, number: int, loop: Loop) -> Sequence[Any]:
        """Return the buckets of the sums at the end of a round. A loop ends with all of them."""
        if number + 1 == loop.last_round:
            return list(itertools.chain(*self._fragments))
        return self._fragments[number % self.fragments]

    def state_dict(self) -> dict[str, Any]:
        """Return the momentum, and the parameters at the last sums."""
        return {
            "momenta": [each.momentum for each in self._of.values()],
            "summed": [each.begin for each in self._of.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of another rank, or of a checkpoint."""
        parts = zip(self._of.values(), state["momenta"], state["summed"], strict=True)
        for each, momentum, begin in parts:
            each.momentum.copy_(momentum)
            each.begin.copy_(begin)

    def begin(self) -> None:
        """A round begins. With one fragment, the parameters are those of the last sums."""
        if self.fragments == 1:
            self._note_all()

    def _note_all(self) -> None:
        for each in self._of.values():
            each.copy_parameters(each.begin)

    def take_changes(self, buckets: Sequence[Any], weight: float) -> None:
        """Write into buckets what changed since their last sums, times this rank's weight."""
        for bucket in buckets:
            each = self._of[id(bucket)]
            each.copy_parameters(each.sent)
            torch.sub(each.begin, each.sent, out=bucket.flat)
            bucket.flat.mul_(weight)

    def apply(self, buckets: Sequence[Any], *, keeps_later: bool) -> None:
        """Step from the parameters of the last sums by those in the buckets.

        `keeps_later`: the sums began before the last step, and its changes stay.
        """
        for bucket in buckets:
            each = self._of[id(bucket)]
            each.momentum.mul_(self._momentum).add_(bucket.flat)
            each.begin.sub_(bucket.flat, alpha=self._rate)
            each.begin.sub_(each.momentum, alpha=self._rate * self._momentum)
            for parameter, begin, sent in zip(
                bucket.parameters, bucket.parts(each.begin), bucket.parts(each.sent), strict=True
            ):
                if keeps_later:
                    parameter.detach().add_(begin - sent)
                else:
                    parameter.detach().copy_(begin)


def _count(value: Any, name: str, unit: str) -> int:
    """Read a setting that counts something."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise UsageError(
            f"fullwire.elastic: {name}: expected a whole number of {unit}s, got {shown(value)}"
        )
    if number < 1:
        raise UsageError(f"fullwire.elastic: {name}: expected 1 {unit} or more, got {number}")
    return number


def _number(value: Any, name: str) -> float:
    """Read a setting that is a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"fullwire.elastic: {name}: expected a number, got {shown(value)}")
    return float(value)


class _Summed:
    """The outer optimizer's numbers for one bucket."""

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket
        # The parameters at the last sums, and when the present ones began.
        self.begin, self.sent = torch.zeros_like(bucket.flat), torch.zeros_like(bucket.flat)
        self.momentum = torch.zeros_like(bucket.flat)

    def copy_parameters(self, row: Any) -> None:
        """Copy the parameters into a row."""
        bucket = self._bucket
        for parameter, part in zip(bucket.parameters, bucket.parts(row), strict=True):
            part.copy_(parameter.detach())
