"""The host's time before a step computes anything, and between computations.

Before the first computation, a script reads its own batches. Waiting for a DataLoader is known as
input. Batches that a script reads by itself are the host's time, like logs and checkpoints. But the
place of that time in a step is known. For a recorded DDP job it is also known whether the program's
thread worked meanwhile or waited, and how much it read from disks. Many gaps between computations
mean that a device waits for the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fullwire.run.facts import Pairs
from fullwire.run.run import Run
from fullwire.timeline.account import Account, Part

MUCH = 0.05  # of the step: less is not worth a sentence
MANY = 50  # gaps between a step's computations: a program that gives a device little at a time


def usual_ahead_s(account: Account) -> float:
    """Return the host's usual time in a step before ranks compute.

    In an account of all steps, a few have an evaluation or a checkpoint before them. Only these
    would begin sooner without it, so the median counts there.
    """
    ahead_ns = np.sort(account.ahead_ns[:, account.is_typical], axis=0)
    of_middle_ns = ahead_ns[(len(ahead_ns) - 1) // 2]
    usual_ns = np.median(of_middle_ns) if account.is_over_all else of_middle_ns.mean()
    return float(usual_ns) * 1e-9


def usual_gaps(account: Account) -> tuple[float, float]:
    """Return the usual time of a step's gaps between computations, and their number."""
    gaps_s = float(np.median(account.gaps_ns[:, account.is_typical])) * 1e-9
    count = float(np.median(account.gap_count[:, account.is_typical]))
    return min(gaps_s, account.parts_s[Part.HOST.key]), count  # the part is a mean


def many_gaps(account: Account) -> tuple[float, float] | None:
    """Return the usual gaps if they are many and take much time, else None."""
    gaps_s, count = usual_gaps(account)
    return None if count < MANY or gaps_s < MUCH * account.step_s else (gaps_s, count)


def has_loader(account: Account) -> bool:
    """Return whether ranks were seen to wait for data, as a DataLoader shows."""
    return bool(account.parts_ns[:, :, Part.INPUT].any() or account.excess_ns[:, :, 1].any())


def checkpoints_s(run: Run, account: Account, ranks: Sequence[int]) -> float:
    """Return how long these ranks write checkpoints in a step of the account, in the mean."""
    spans = run.spans
    steps = account.steps[account.is_typical]
    is_there = (spans.lane == "host") & (spans.name == "checkpoint")
    is_there &= np.isin(spans.rank, ranks) & np.isin(spans.step, steps)
    lasted_ns = int((spans.end_ns - spans.start_ns)[is_there].sum())
    return lasted_ns * 1e-9 / max(len(steps) * len(ranks), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptThread:
    """The work of the program's thread before the forward pass of a step."""

    processor_s: float
    read_bytes: float  # from disks


def thread_of_script(run: Run, ranks: list[int]) -> ScriptThread | None:
    """Return the recorder's figures of the thread, or None."""
    processor_s = _mean(run.facts.before_forward_processor_s, ranks)
    if processor_s is None:
        return None
    read_bytes = _mean(run.facts.before_forward_read_bytes, ranks) or 0.0
    return ScriptThread(processor_s=processor_s, read_bytes=read_bytes)


def _mean(by_rank: Pairs | None, ranks: list[int]) -> float | None:
    known: Mapping[float, float] = dict(by_rank or ())
    here = [known[rank] for rank in ranks if rank in known]
    return float(np.mean(here)) if here else None
