"""The fix "data loaded ahead": a step finds its batch ready."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fullwire.errors import UsageError
from fullwire.fixes.fix import (
    PLAIN,
    Fix,
    FixKind,
    Process,
    Seen,
    Worthwhile,
    register,
    who_takes_processors,
    without_loss,
    worthwhile,
)
from fullwire.units import shown

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecast, Forecaster
    from fullwire.timeline.account import Account

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


_MOST_LOADERS = 256
_FEW_LOADERS = 2
_MOST_USED = 0.6  # of the processors: beyond it, loading processes delay others
_TAKEN = 0.8  # of them: trials in vain were in jobs that used 0.82 to 0.89


@dataclass(frozen=True, kw_only=True)
class DataIsThere(Fix):
    """The ranks find their batches loaded."""

    template = "batches loaded ahead"

    kind: str = "input"


@dataclass(frozen=True, kw_only=True)
class DataIsLoadedAhead(DataIsThere):
    """The ranks find their batches loaded, by more loaders on free processors."""

    template = DataIsThere.template
    applied = "4"
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
    example = "4"
    setting = "the loading processes of each rank; 4x8: each holds 8 batches ready"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict a step that begins sooner, by its wait for data."""
        from fullwire.timeline.account import Part

        input_ns = float(
            np.median(account.parts_ns[:, account.is_typical, Part.INPUT].mean(axis=0))
        )
        found = job.beginning_sooner(round(input_ns))
        if found is not None:
            yield self._of(run, found)

    def by_account(self, run: Run, account: Account) -> Iterator[Fix]:
        """Subtract the wait for data from the step."""
        from fullwire.timeline.account import Part

        found = without_loss(account, account.parts_s[Part.INPUT.key], of_one=True)
        if found is not None:
            yield self._of(run, found)

    def _of(self, run: Run, found: Forecast) -> Fix:
        taken_by = who_takes_processors(run, _TAKEN)
        kind = DataIsThere if taken_by else DataIsLoadedAhead
        return kind(how=_LOADER[taken_by], forecast=found)

    def in_few_steps(self, run: Run, account: Account) -> str:
        """Return the setting that loads more data ahead."""
        return _LOADER[who_takes_processors(run, _TAKEN)]

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield two loading processes, where the loader has fewer and a step waits for it."""
        from fullwire.run.processors import used_share
        from fullwire.timeline.account import Part

        if who_takes_processors(run, _TAKEN):
            return
        if seen.loading_processes is not None and seen.loading_processes < _FEW_LOADERS:
            parts_s = account.parts_s
            waiting_s = parts_s[Part.INPUT.key] + parts_s[Part.STRAGGLER.key] / 2
            words, count = "batches loaded ahead", str(_FEW_LOADERS)
            saved = 0.65  # of the wait, as a rule; loading may only move to processors in use
            if seen.loading_processes == 0:  # what a step waits is what one process loads
                waiting_s = min(waiting_s, account.step_s - waiting_s / _FEW_LOADERS)
                saved = 0.95 if (used_share(run) or 1.0) < _MOST_USED else saved
            yield from worthwhile(self, count, words, account, 0.0, waiting_s, saved * waiting_s)

    def by_hand(self, setting: str) -> str:
        """Return the constructor's call."""
        processes, _, ready = setting.partition("x")
        ahead = f", prefetch_factor={ready}" if ready else ""
        return f"DataLoader(dataset, num_workers={processes}{ahead})"

    def checked(self, setting: str) -> str:
        """Take a number of loading processes, and of the batches that each holds ready."""
        words = setting.split("x")
        counts = [int(word) if word.isascii() and word.isdigit() else 0 for word in words]
        if len(words) > 2 or not all(0 < each <= _MOST_LOADERS for each in counts):
            raise UsageError(
                f"fix input: expected 1 to {_MOST_LOADERS} loading processes, got {shown(setting)}"
            )
        return "x".join(map(str, counts))

    def apply(self, setting: str, process: Process) -> None:
        """Give data loaders processes that load ahead, where batches stay the same."""
        import multiprocessing

        import torch
        from torch.utils.data import DataLoader, IterableDataset

        def loaded_ahead(given: Mapping[str, Any]) -> Mapping[str, Any]:
            if isinstance(given["dataset"], IterableDataset):
                process.did("not applied: an iterable data set may repeat samples in each process")
            elif multiprocessing.current_process().daemon:
                process.did("not applied: a daemonic process may start no others")
            elif _draws_random_numbers(given["dataset"]):
                process.did("not applied: the data set draws random numbers, which would change")
            else:
                before = given.get("num_workers", 0)
                process.did(f"applied: num_workers {before} -> {setting}")
                processes, _, ready = setting.partition("x")
                # Processes that outlive an epoch would begin the next one without the random number
                # that the script's loader draws there, and its shuffles would be others.
                changed: dict[str, Any] = {"num_workers": int(processes)}
                if ready:
                    changed["prefetch_factor"] = int(ready)
                if torch.cuda.is_available():
                    changed["pin_memory"] = True
                return changed
            return {}

        process.around(DataLoader, "__init__", loaded_ahead)


def _draws_random_numbers(dataset: Any) -> bool:
    """Say whether reading a sample draws random numbers; their states are left as they were."""
    import random

    import torch

    if not len(dataset):
        return False
    of_numpy: Any = np.random.get_state()
    states = (random.getstate(), of_numpy, torch.get_rng_state())
    try:
        dataset[0]
        now: Any = np.random.get_state()
        return (
            random.getstate() != states[0]
            or now[2:] != of_numpy[2:]
            or not np.array_equal(now[1], of_numpy[1])
            or not torch.equal(torch.get_rng_state(), states[2])
        )
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
