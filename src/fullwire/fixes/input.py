"""A step that finds its data loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fullwire.fixes.fix import Fix, FixKind, register, who_takes_processors, without_loss
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account, Part

_LOADER = {
    None: "DataLoader(num_workers=8, prefetch_factor=4, persistent_workers=True)",
    "job": (
        "batches that are stored as they are read, or fewer threads that compute "
        "(torch.set_num_threads): no processor is free for more loaders"
    ),
    "others": (
        "end or move the other work that takes the processors: none is free for more loaders"
    ),
}


@dataclass(frozen=True, kw_only=True)
class DataIsThere(Fix):
    """No waiting for data."""

    template = "data that is there when a step begins"

    kind: str = "input"


@register
class Input(FixKind):
    """Data that is loaded ahead."""

    key = "input"
    label = "data loaded ahead"
    addresses = ("input",)

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Try a step that begins sooner by its waiting for data."""
        input_ns = float(
            np.median(account.parts_ns[:, account.is_typical, Part.INPUT].mean(axis=0))
        )
        found = job.beginning_sooner(round(input_ns))
        if found is not None:
            yield DataIsThere(how=self.in_few_steps(run, account), forecast=found)

    def by_account(self, run: Run, account: Account) -> Iterator[Fix]:
        """Take the waiting for data off the step."""
        found = without_loss(account, account.parts_s[Part.INPUT.key], of_one=True)
        if found is not None:
            yield DataIsThere(how=self.in_few_steps(run, account), forecast=found)

    def in_few_steps(self, run: Run, account: Account) -> str:
        """Return how more data is loaded ahead."""
        return _LOADER[who_takes_processors(run)]
