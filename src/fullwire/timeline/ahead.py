"""What the host does before a step computes anything, and between: where its time is lost.

Before, a script reads its own batches. Waiting for a DataLoader is known as input; batches that a
script reads by itself are the host's time, like logs and checkpoints. But where in its steps that
time lies is known, and of a recorded DDP job also whether the program's thread worked meanwhile or
waited, and what it read from disks. Between, many gaps mean that a device waits for the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from fullwire.run.facts import Pairs
from fullwire.run.run import Run
from fullwire.timeline.account import Account, Part
from fullwire.timeline.utilization import Evidence
from fullwire.units import show_bytes, show_time

MUCH = 0.05  # of the step: less is not worth a sentence
WORKS, WAITS = 0.7, 0.3  # of that time on a processor: from the one on it works, up to the other
MANY = 50  # gaps between a step's computations: a program that gives a device little at a time
_READ = 1e5  # bytes a step: what is less was no batch


def usual_ahead_s(account: Account) -> float:
    """Return what ranks usually leave to the host before they compute, a step."""
    ahead_ns = np.sort(account.ahead_ns[:, account.is_typical], axis=0)
    return float(ahead_ns[(len(ahead_ns) - 1) // 2].mean()) * 1e-9


def usual_gaps(account: Account) -> tuple[float, float]:
    """Return how long the host lets ranks idle between computations, a step, and how often."""
    gaps_s = float(np.median(account.gaps_ns[:, account.is_typical])) * 1e-9
    count = float(np.median(account.gap_count[:, account.is_typical]))
    return min(gaps_s, account.parts_s[Part.HOST.key]), count  # a part of that, which is a mean


def gap_words(account: Account) -> str:
    """Say what many gaps mean; nothing where there are few."""
    gaps_s, count = usual_gaps(account)
    if count < MANY or gaps_s < MUCH * account.step_s:
        return ""
    return (
        f"{show_time(gaps_s)} of a step are {count:,.0f} gaps between computations, in which "
        "devices wait for the program: torch.compile or CUDA graphs give them much at once"
    )


def has_loader(account: Account) -> bool:
    """Say whether ranks were seen to wait for data, as a DataLoader shows."""
    return bool(account.parts_ns[:, :, Part.INPUT].any() or account.excess_ns[:, :, 1].any())


def ahead_evidence(run: Run, account: Account) -> Iterator[Evidence]:
    """Say how much of a step that is, usually and on the rank with most of it, and what it is."""
    usual_s, least_s = usual_ahead_s(account), MUCH * account.step_s
    if not account.step_s:
        return
    if words := gap_words(account):
        gaps_s, _ = usual_gaps(account)
        yield Evidence(name="host_gaps", value=gaps_s / account.step_s, sentence=f"{words}.")
    by_rank_s = (account.ahead_ns[:, account.is_typical].mean(axis=1) * 1e-9).tolist()
    most_s, rank = max(zip(by_rank_s, account.ranks, strict=True))
    if most_s - usual_s >= least_s:
        who, ahead_s, used = f"On rank {rank}, {show_time(most_s)}", most_s, [rank]
    elif usual_s >= least_s:
        who, ahead_s, used = show_time(usual_s), usual_s, list(account.ranks)
    else:
        return
    yield Evidence(
        name="host_ahead",
        value=ahead_s / account.step_s,
        sentence=f"{who} of a step is the host's before anything is computed, "
        f"{where_batches_are_read(account)}.",
    )
    yield from _what_it_does(run, ahead_s, used)


def where_batches_are_read(account: Account) -> str:
    """Say what a script may be doing there."""
    if has_loader(account):
        return "beside what it waits for its DataLoader: logs, checkpoints, copies to the device"
    return "where a script that reads its own batches does so"


def _what_it_does(run: Run, ahead_s: float, ranks: list[int]) -> Iterator[Evidence]:
    used_s = _mean(run.facts.before_forward_processor_s, ranks)
    if used_s is None:
        return
    share = min(used_s / ahead_s, 1.0)
    read = _mean(run.facts.before_forward_read_bytes, ranks) or 0.0
    also = f" and read {show_bytes(round(read))} from disks" if read >= _READ else ""
    yield Evidence(
        name="host_ahead_processor",
        value=share,
        sentence=f"Meanwhile the program's thread was on a processor for {share:.0%} of the time"
        f"{also}: {_words(share)}.",
    )


def _words(share: float) -> str:
    if share >= WORKS:
        return "it works, as at decoding, which other processes could do ahead"
    if share <= WAITS:
        return "it waits, as for a disk, a server, a queue or a sleep"
    return "it works and waits by turns"


def _mean(by_rank: Pairs | None, ranks: list[int]) -> float | None:
    known: Mapping[float, float] = dict(by_rank or ())
    here = [known[rank] for rank in ranks if rank in known]
    return float(np.mean(here)) if here else None
