"""Gradients added up locally: only some steps pay for sending them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fullwire.fixes.fix import Fix, FixKind, Risk, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account

_SYNCHRONISED_EVERY = (2, 4)
_BY_DDP = "with model.no_sync() in {without} of {every} steps; the batch is {every}x larger"
_BY_SCRIPT = (
    "no all_reduce in {without} of {every} steps, gradients left to add up; the batch is {every}x "
    "larger"
)


@dataclass(frozen=True, kw_only=True)
class FewerSums(Fix):
    """Gradients of several steps in one sum."""

    template = "gradients summed over {every} steps before they are sent"

    kind: str = "synchronisation"
    risk: Risk = "semantic"
    every: int

    @property
    def without(self) -> int:
        """Return how many of so many steps send nothing."""
        return self.every - 1


@register
class Synchronisation(FixKind):
    """Gradients added up locally."""

    key = "synchronisation"
    risk: ClassVar[Risk] = "semantic"
    label = "fewer synchronizations"
    addresses = ("line_rate", "transport", "latency", "codec", "contention")

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Try to send the gradients of several steps together."""
        if run.facts.buckets is not None:
            setting = _BY_DDP
        elif job.subject.step.others.are_gradients:
            setting = _BY_SCRIPT
        else:
            return
        for every in _SYNCHRONISED_EVERY:
            yield FewerSums(every=every, how=setting, forecast=job.ask(accumulate=(every,)))
