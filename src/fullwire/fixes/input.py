"""A step that finds its data loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fullwire.fixes.fix import Fix, FixKind, register, without_loss
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account, Part

LOADER = "DataLoader(num_workers=8, prefetch_factor=4, persistent_workers=True)"


@dataclass(frozen=True, kw_only=True)
class DataIsThere(Fix):
    """No waiting for data."""

    template = "data that is there when a step begins"

    kind: str = "input"
    how: str = LOADER


def _predict(run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
    input_ns = float(np.median(account.parts_ns[:, account.is_typical, Part.INPUT].mean(axis=0)))
    found = job.beginning_sooner(round(input_ns))
    if found is not None:
        yield DataIsThere(forecast=found)


def _by_account(account: Account) -> Iterator[Fix]:
    found = without_loss(account, account.parts_s[Part.INPUT.key], of_one=True)
    if found is not None:
        yield DataIsThere(forecast=found)


register(
    FixKind(
        key="input",
        risk="exact",
        label="data loaded ahead",
        predict=_predict,
        by_account=_by_account,
        in_few_steps=lambda account: LOADER,
    )
)
