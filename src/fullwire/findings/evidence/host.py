"""The host's time in a step: before the first computation, and between computations."""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.findings.case import NOTABLE
from fullwire.findings.evidence import Source
from fullwire.findings.finding import Evidence, Finding
from fullwire.run.run import Run
from fullwire.timeline.account import Account
from fullwire.timeline.ahead import (
    MUCH,
    has_loader,
    many_gaps,
    thread_of_script,
    usual_ahead_s,
)

WORKS, WAITS = 0.7, 0.3  # Shares on a processor: from WORKS on it works, up to WAITS it waits.
_READ = 1e5  # Bytes a step: fewer are no batch.


class HostGaps(Evidence):
    """Many gaps between computations: the program gives the device little work at a time."""

    template = (
        "{gaps_s:time} of a step are {count:,.0f} gaps between computations, in which devices wait "
        "for the program: torch.compile or CUDA graphs give them much at once."
    )

    gaps_s: float
    count: float


class BesideTheLoader(Finding):
    """The likely work of a script that waits for its DataLoader elsewhere in the step."""

    template = "beside what it waits for its DataLoader: logs, checkpoints, copies to the device"


class ReadsItself(Finding):
    """The likely work of a script that has no DataLoader."""

    template = "where a script that reads its own batches does so"


class HostAhead(Evidence):
    """The time of the host before the first computation of a step."""

    template = "{rank}{ahead_s:time} of a step is the host's before anything is computed, {does}."

    rank: OnRank | None  # The rank with much more of it than the others, if there is one.
    ahead_s: float
    does: Finding


class OnRank(Finding):
    """The rank that the finding is about."""

    template = "On rank {rank}, "

    rank: int


class ItWorks(Finding):
    """The thread was on a processor for most of that time."""

    template = "it works, as at decoding, which other processes could do ahead"


class ItWaits(Finding):
    """The thread was hardly on a processor."""

    template = "it waits, as for a disk, a server, a queue or a sleep"


class ItDoesBoth(Finding):
    """The thread was on a processor for some of that time."""

    template = "it works and waits by turns"


class HostAheadProcessor(Evidence):
    """The share of that time in which the program's thread was on a processor."""

    template = (
        "Meanwhile the program's thread was on a processor for {value:.0%} of the time"
        "{read_bytes:? and read {read_bytes:bytes} from disks}: {does}."
    )

    read_bytes: int
    does: Finding


class DeviceCopies(Evidence):
    """The part of the host's time in which devices are not idle, but copy."""

    template = (
        "Devices copied or filled memory, and computed nothing meanwhile, for {copies_s:time} of a "
        "step. That is counted to the host."
    )

    copies_s: float


def gaps(account: Account) -> HostGaps | None:
    """Return the finding about many gaps; None where there are few."""
    found = many_gaps(account)
    if found is None:
        return None
    gaps_s, count = found
    return HostGaps(value=gaps_s / account.step_s, gaps_s=gaps_s, count=count)


def before_computing(account: Account) -> Finding:
    """Return the likely work of a script before it computes."""
    return BesideTheLoader() if has_loader(account) else ReadsItself()


def host_evidence(run: Run, account: Account) -> Iterator[Evidence]:
    """Yield the host's time in a step, usual or on the rank with most, and its likely cause."""
    usual_s, least_s = usual_ahead_s(account), MUCH * account.step_s
    if not account.step_s:
        return
    between = gaps(account)
    if between is not None:
        yield between
    by_rank_s = (account.ahead_ns[:, account.is_typical].mean(axis=1) * 1e-9).tolist()
    most_s, rank = max(zip(by_rank_s, account.ranks, strict=True))
    if most_s - usual_s >= least_s:
        on, ahead_s, used = OnRank(rank=rank), most_s, [rank]
    elif usual_s >= least_s:
        on, ahead_s, used = None, usual_s, list(account.ranks)
    else:
        return
    share, does = ahead_s / account.step_s, before_computing(account)
    yield HostAhead(value=share, rank=on, ahead_s=ahead_s, does=does)
    thread = thread_of_script(run, used)
    if thread is None:
        return
    on_processor = min(thread.processor_s / ahead_s, 1.0)
    activity: Finding = ItDoesBoth()
    if on_processor >= WORKS:
        activity = ItWorks()
    elif on_processor <= WAITS:
        activity = ItWaits()
    yield HostAheadProcessor(
        value=on_processor,
        read_bytes=round(thread.read_bytes) if thread.read_bytes >= _READ else 0,
        does=activity,
    )


def copies_evidence(account: Account) -> Iterator[Evidence]:
    """Yield the time that devices copied, if it is worth a sentence."""
    has_devices = any(breakdown.compute_s for breakdown in account.breakdowns)
    if has_devices and account.copies_s > NOTABLE * account.step_s:
        yield DeviceCopies(value=account.copies_s / account.step_s, copies_s=account.copies_s)


SOURCE = Source(
    key="host",
    place=3,
    of=lambda run, account, rate_bps: (*copies_evidence(account), *host_evidence(run, account)),
)
