"""The fix "data loaded ahead": a step finds its batch ready."""

from __future__ import annotations

import io
import itertools
import logging
import multiprocessing
import os
import random
import signal
import time
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fullwire.errors import UsageError
from fullwire.fixes.fix import (
    MUCH,
    PLAIN,
    Fix,
    FixKind,
    Process,
    Seen,
    Worthwhile,
    moved_s,
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

_TRIED_S = 60  # within which another process reads a few samples
_FEW = 16  # samples that are tried, and parts of a list that are looked at
_LEAST, _READING_S = 4, 0.15  # samples: so many at least, and no further one after so long
_DEEP = 4  # parts of parts of a data set, in which an open file is looked for
_FILE_LIBRARIES = ("h5py", "lmdb", "netCDF4", "sqlite3", "tables")  # their objects share a file
# Their samplers draw all numbers of an epoch at its begin.
_KNOWN_SAMPLERS = (
    *("accelerate", "datasets", "lightning", "lightning_fabric", "pytorch_lightning"),
    *("torch", "torchdata", "transformers"),
)

_MOST_LOADERS = 256
_FEW_LOADERS = 2
_MOST_USED = 0.6  # of the processors: beyond it, loading processes delay others
_TAKEN = 0.8  # of them: trials in vain were in jobs that used 0.82 to 0.89
_OF_THE_THREAD = ("compute", "contention", "input", "host")  # parts in which it may run
_HANDED_S = 4e-3  # of a processor, for a batch from another process: measured with 64 to 256 KiB


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
        handed_s = _handed_s(run, account.step_s, input_ns * 1e-9)
        found = job.beginning_sooner(round(input_ns - handed_s * 1e9))
        if found is not None:
            yield self._of(run, account, found)

    def by_account(self, run: Run, account: Account) -> Iterator[Fix]:
        """Subtract the wait for data from the step."""
        from fullwire.timeline.account import Part

        input_s = account.parts_s[Part.INPUT.key]
        lost_s = moved_s(run, account, input_s - _handed_s(run, account.step_s, input_s))
        found = without_loss(account, lost_s, of_one=True)
        if found is not None:
            yield self._of(run, account, found)

    def _of(self, run: Run, account: Account, found: Forecast) -> Fix:
        taken_by = _who_leaves_none(run, account)
        kind = DataIsThere if taken_by else DataIsLoadedAhead
        return kind(how=_LOADER[taken_by], forecast=found)

    def in_few_steps(self, run: Run, account: Account) -> str:
        """Return the setting that loads more data ahead."""
        return _LOADER[_who_leaves_none(run, account)]

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield two loading processes, where the loader has fewer and a step waits for it."""
        from fullwire.run.processors import used_share
        from fullwire.timeline.account import Part

        if _who_leaves_none(run, account):
            return
        if seen.loading_processes is not None and seen.loading_processes < _FEW_LOADERS:
            parts_s = account.parts_s
            waiting_s = parts_s[Part.INPUT.key] + parts_s[Part.STRAGGLER.key] / 2
            words, count = "batches loaded ahead", str(_FEW_LOADERS)
            is_free = _is_asleep(run, account) or (used_share(run) or 1.0) < _MOST_USED
            has_room = seen.loading_processes == 0 and is_free
            saved = 0.95 if has_room else 0.65  # of the wait: loading may only move to busy ones
            usual_s = saved * waiting_s - _handed_s(run, account.step_s, saved * waiting_s)
            if seen.loading_processes == 0:  # one process loads as long as a step waits
                waiting_s = min(waiting_s, account.step_s - waiting_s / _FEW_LOADERS)
                usual_s = min(usual_s, saved * waiting_s)
            if usual_s > 0:
                yield from worthwhile(self, count, words, account, 0.0, waiting_s, usual_s)

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
        import torch
        from torch.utils.data import DataLoader

        def loaded_ahead(given: Mapping[str, Any]) -> Mapping[str, Any]:
            if reason := _why_other_batches(given):
                process.did(f"not applied: {reason}")
                return {}
            process.did(f"applied: num_workers {given.get('num_workers', 0)} -> {setting}")
            processes, _, ready = setting.partition("x")
            # Processes that outlive an epoch would begin the next one without the random number
            # that the script's loader draws there, and its shuffles would be others.
            changed: dict[str, Any] = {"num_workers": int(processes)}
            if ready:
                changed["prefetch_factor"] = int(ready)
            # Pinning makes lists of the tuples that a collate function of the script returns.
            if torch.cuda.is_available() and given.get("collate_fn") is None:
                changed["pin_memory"] = True
            return changed

        process.around(DataLoader, "__init__", loaded_ahead)


def _who_leaves_none(run: Run, account: Account) -> Literal["job", "others"] | None:
    """Return who takes the processors that more loaders would need, if they would need any."""
    return None if _is_asleep(run, account) else who_takes_processors(run, _TAKEN)


def _is_asleep(run: Run, account: Account) -> bool:
    """Say whether the ranks sleep for most of their wait for data, as for a disk or a network.

    The thread that steps is asleep then: it does not run, and is not ready to. It also sleeps while
    it waits for messages and for other ranks. Whether a process that loads data sleeps is not
    recorded.
    """
    facts, parts_s = run.facts, account.parts_s
    if facts.run_s is None or facts.run_delay_s is None or _loading_s(run) > _HANDED_S / 4:
        return False
    if parts_s["input"] < MUCH * account.step_s:  # too little to tell by the other parts
        return False
    ready_s = sum(
        float(np.mean([time_s for _, time_s in of_ranks]))
        for of_ranks in (facts.run_s, facts.run_delay_s)
    )
    elsewhere_s = sum(time_s for key, time_s in parts_s.items() if key not in _OF_THE_THREAD)
    return account.step_s - ready_s - elsewhere_s >= parts_s["input"] / 2


def _loading_s(run: Run) -> float:
    return max((used_s for _, used_s in run.facts.children_processor_s or ()), default=0.0)


def _handed_s(run: Run, step_s: float, saved_s: float) -> float:
    """Return how much longer a step takes because another process hands its batch over.

    That work falls anywhere in the step. It delays the rank where the rank's processor is busy.
    """
    from fullwire.run.placement import ranks_per_processor
    from fullwire.run.processors import used_share

    used = used_share(run) or 0.0
    if _loading_s(run) > _HANDED_S / 4 or used >= _TAKEN:
        return 0.0  # it hands them over already, or no such process helps there
    busy = min(used * step_s / max(step_s - saved_s, 1e-9), 1.0)
    return _HANDED_S * ranks_per_processor(run) * busy


def _why_other_batches(given: Mapping[str, Any]) -> str:
    """Say why loading processes might give a script other batches; "" if they give the same."""
    import torch
    from torch.utils.data import IterableDataset

    dataset = given["dataset"]
    if isinstance(dataset, IterableDataset):
        return "an iterable data set may repeat samples in each process"
    if multiprocessing.current_process().daemon:
        return "a daemonic process may start no others"
    samplers = [given.get("sampler"), given.get("batch_sampler")]
    shared = torch.default_generator
    if given.get("generator") is shared:
        return "the loader draws its shuffles between the script's random numbers"
    while samplers:
        sampler = samplers.pop()
        kind = type(sampler)
        if sampler is None or kind in (list, tuple, range):
            continue
        if kind.__module__.partition(".")[0] not in _KNOWN_SAMPLERS:
            return f"the sampler {kind.__name__} is the script's own, and would be asked earlier"
        if getattr(sampler, "generator", None) is shared:
            return "the sampler draws random numbers between the script's"
        samplers += [part for name, part in vars(sampler).items() if name.endswith("sampler")]
    if _holds_open_file(dataset, _DEEP):
        return "the data set holds an open file, whose place loading processes would share"
    return _try_in_a_fork(dataset, _collated_by(given))


def _collated_by(given: Mapping[str, Any]) -> Any:
    """Return the function with which a loader makes a batch of samples."""
    from torch.utils.data import default_collate

    if given.get("collate_fn") is not None:
        return given["collate_fn"]
    is_batched = given.get("batch_size", 1) is not None or given.get("batch_sampler") is not None
    return default_collate if is_batched else list


def _holds_open_file(value: Any, deep: int) -> bool:
    if type(value).__module__.partition(".")[0] in _FILE_LIBRARIES:
        return True
    if isinstance(value, io.IOBase):
        return not isinstance(value, io.BytesIO | io.StringIO) and not value.closed
    if isinstance(value, Mapping):
        parts = list(itertools.islice(value.values(), _FEW))
    elif isinstance(value, list | tuple):
        parts = list(value[:_FEW])
    elif isinstance(value, types.ModuleType | logging.Logger):
        return False  # they hold files of the process, which no sample is read from
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    return deep > 0 and any(_holds_open_file(part, deep - 1) for part in parts)


def _try_in_a_fork(dataset: Any, collated_by: Any) -> str:
    """Read a few samples twice in another process: those of the job stay as they are."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    reading = fork.Process(target=_tell, args=(dataset, collated_by, theirs), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads in this process, which the other lacks
        reading.start()
    theirs.close()
    try:
        if not ours.poll(_TRIED_S):
            return f"another process could not read a few samples within {_TRIED_S} s"
        return str(ours.recv())
    except EOFError:
        return "another process died as it read a few samples"
    finally:
        reading.kill()
        reading.join()
        ours.close()


def _tell(dataset: Any, collated_by: Any, to: Any) -> None:
    import torch

    silent = os.open(os.devnull, os.O_WRONLY)  # what reading prints is not the job's output
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    torch.set_num_threads(1)  # the threads of the other process are not here
    try:
        few = random.Random(0).sample(range(len(dataset)), min(_FEW, len(dataset)))
        before, began_s = _random_states(), time.monotonic()
        read: list[Any] = []
        for number in few:
            if len(read) >= _LEAST and time.monotonic() >= began_s + _READING_S:
                break
            read.append(dataset[number])
        again = [dataset[number] for number in few[: len(read)]]
        batches = collated_by(read), collated_by(again)
        if not _are_same(before, _random_states()):
            to.send("the data set draws random numbers, which would change")
        elif not _are_same(*batches):
            to.send("the data set gives another sample when it is read again")
        else:
            to.send("")
    except Exception as error:
        words = next(iter(str(error).splitlines()), "")
        to.send(f"another process cannot read and compare samples: {type(error).__name__}: {words}")
    os.kill(os.getpid(), signal.SIGKILL)  # what runs at the end is the job's


def _random_states() -> tuple[Any, ...]:
    import torch

    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _are_same(one: Any, other: Any) -> bool:
    """Say whether two samples are equal to the bit, as far as they can be compared."""
    import torch

    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        one, other = (each.reshape(-1).view(torch.uint8).numpy() for each in (one, other))
    if isinstance(one, np.ndarray) and not one.dtype.hasobject:
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_are_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if one == other or (one != one and other != other):
        return True
    return bool(getattr(one, "__dict__", None)) and _are_same(vars(one), vars(other))
