"""A step that finds its data loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fullwire.fixes.fix import PLAIN, Fix, FixKind, register, without_loss
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account, Part

_LOADER = "DataLoader(num_workers=8, prefetch_factor=4, persistent_workers=True)"


@dataclass(frozen=True, kw_only=True)
class DataIsThere(Fix):
    """No waiting for data."""

    template = "batches loaded ahead"
    lines: ClassVar[Mapping[str, str]] = {
        PLAIN: """\
from torch.utils.data import DataLoader

# beside your own arguments:
loader = DataLoader(
    dataset, num_workers=8, prefetch_factor=4, persistent_workers=True
)
""",
        "transformers": """\
from transformers import TrainingArguments

# beside your own arguments:
args = TrainingArguments(
    dataloader_num_workers=8,
    dataloader_prefetch_factor=4,
    dataloader_persistent_workers=True,
)
""",
        "torchtitan": """\
--dataloader.num_workers=8 --dataloader.prefetch_factor=4 \\
--dataloader.persistent_workers
""",
    }

    kind: str = "input"
    how: str = _LOADER


@register
class Input(FixKind):
    """Data that is loaded ahead."""

    key = "input"
    label = "data loaded ahead"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Try a step that begins sooner by its waiting for data."""
        input_ns = float(
            np.median(account.parts_ns[:, account.is_typical, Part.INPUT].mean(axis=0))
        )
        found = job.beginning_sooner(round(input_ns))
        if found is not None:
            yield DataIsThere(forecast=found)

    def by_account(self, account: Account) -> Iterator[Fix]:
        """Take the waiting for data off the step."""
        found = without_loss(account, account.parts_s[Part.INPUT.key], of_one=True)
        if found is not None:
            yield DataIsThere(forecast=found)

    def in_few_steps(self, account: Account) -> str:
        """Return how more data is loaded ahead."""
        return _LOADER
