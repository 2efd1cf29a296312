"""The fix "data loaded ahead": a step finds its batch ready."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fullwire.fixes.fix import PLAIN, Fix, FixKind, register, who_takes_processors, without_loss
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecast, Forecaster
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
    """The ranks find their batches loaded."""

    template = "batches loaded ahead"

    kind: str = "input"


@dataclass(frozen=True, kw_only=True)
class DataIsLoadedAhead(DataIsThere):
    """The ranks find their batches loaded, by more loaders on free processors."""

    template = DataIsThere.template
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


@register
class Input(FixKind):
    """Load data ahead."""

    key = "input"
    label = "data loaded ahead"
    addresses = ("input",)

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict a step that begins sooner, by its wait for data."""
        input_ns = float(
            np.median(account.parts_ns[:, account.is_typical, Part.INPUT].mean(axis=0))
        )
        found = job.beginning_sooner(round(input_ns))
        if found is not None:
            yield self._of(run, found)

    def by_account(self, run: Run, account: Account) -> Iterator[Fix]:
        """Subtract the wait for data from the step."""
        found = without_loss(account, account.parts_s[Part.INPUT.key], of_one=True)
        if found is not None:
            yield self._of(run, found)

    def _of(self, run: Run, found: Forecast) -> Fix:
        taken_by = who_takes_processors(run)
        kind = DataIsThere if taken_by else DataIsLoadedAhead
        return kind(how=_LOADER[taken_by], forecast=found)

    def in_few_steps(self, run: Run, account: Account) -> str:
        """Return the setting that loads more data ahead."""
        return _LOADER[who_takes_processors(run)]
