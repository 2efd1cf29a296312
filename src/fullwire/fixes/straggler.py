"""The fix "no late rank": late ranks become as fast as the usual one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fullwire.fixes.fix import (
    LESS_SAVING,
    Fix,
    FixKind,
    register,
    who_takes_processors,
    without_loss,
)
from fullwire.run.placement import sums_on_processors
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecast, Forecaster
from fullwire.simulation.stragglers import NoJitter
from fullwire.timeline.account import Account, Part
from fullwire.timeline.ahead import checkpoints_s
from fullwire.timeline.late import Late, late_for_most, late_ranks
from fullwire.timeline.steadiness import of_few_steps
from fullwire.units import show_time

_EVENLY = {
    None: "batches of equal work, and nothing else on the ranks' hosts",
    "job": "batches of equal work, and fewer threads (torch.set_num_threads): no processor is free",
    "others": "end or move the other work that takes the ranks' processors",
}
_ON_TAKEN_PROCESSORS = {
    "job": "fewer threads (torch.set_num_threads), or a host of its own: no processor is free",
    "others": "end or move the other work that takes its processors",
}
_MORE_WORK = 1.5  # times the running time of the others: memory traffic alone costs less
_MORE_DELAY = 1.25  # times the others' wait for a processor, for the same running time
_WHERE_A_RANK_IS_SLOW = (  # By the largest excess of a rank: computation, input, or neither.
    "look at its device: clock, temperature (of a GPU: nvidia-smi -q -d PERFORMANCE), other work",
    "look at its input: DataLoader(num_workers=...), its disk, its share of the data",
    "look at its host: other processes, and its own work between steps (reading, logs)",
)


@dataclass(frozen=True, kw_only=True)
class NoneIsLate(Fix):
    """The ranks that are late in turns come on time."""

    template = "no late rank"
    place = "hosts"

    kind: str = "straggler"


@dataclass(frozen=True, kw_only=True)
class LateRanksInTime(Fix):
    """The few ranks that cause most of the waiting come on time."""

    template = "{ranks:ranks} as fast as the others"
    place = "hosts"

    kind: str = "straggler"
    ranks: tuple[int, ...]


def _setting(run: Run, account: Account, late: Late | None) -> str:
    """Return where to look: at the activity on which late ranks spend most more than usual."""
    taken_by = who_takes_processors(run)
    if late is None:
        return _EVENLY[taken_by]
    rows = [account.ranks.index(rank) for rank in late.ranks]
    excess_ns = account.excess_ns[rows][:, account.is_typical].mean(axis=(0, 1))
    most = int(np.argmax(excess_ns))
    if most == 0 and sums_on_processors(run):
        if worked_longer := _who_worked_longer(run, late):
            return worked_longer
        if taken_by is not None:
            return _ON_TAKEN_PROCESSORS[taken_by]
    if most == 2 and checkpoints_s(run, account, late.ranks) > excess_ns[most] * 1e-9 / 2:
        return LESS_SAVING
    return _WHERE_A_RANK_IS_SLOW[most]


def _who_worked_longer(run: Run, late: Late) -> str:
    """Say so if late ranks run longer, as with a larger share of the batch; "" otherwise.

    Where processors are taken, a rank that runs longer also waits longer for them. So its wait
    counts only where it is longer for the same running time.
    """
    run_s, delay_s = dict(run.facts.run_s or ()), dict(run.facts.run_delay_s or ())
    known = [rank for rank in run_s if rank in delay_s and run_s[rank] > 0]
    theirs = [rank for rank in known if rank in late.ranks]
    others = [rank for rank in known if rank not in late.ranks]
    if not theirs or not others:
        return ""
    theirs_s = float(np.mean([run_s[rank] for rank in theirs]))
    others_s = float(np.median([run_s[rank] for rank in others]))
    delayed, usual = (
        float(np.median([delay_s[rank] / run_s[rank] for rank in ranks]))
        for ranks in (theirs, others)
    )
    if theirs_s < _MORE_WORK * others_s or 1 + delayed > _MORE_DELAY * (1 + usual):
        return ""
    it, threads = ("it", "its thread runs") if len(theirs) == 1 else ("them", "their threads run")
    return (
        f"give {it} batches of equal work: {threads} {show_time(theirs_s)} of each step, that of "
        f"another rank {show_time(others_s)}. If the batches are equal, look at the processor's "
        "clock"
    )


def _fix(run: Run, account: Account, late: Late | None, found: Forecast) -> Fix:
    setting = _setting(run, account, late)
    if late is None:
        return NoneIsLate(how=setting, forecast=found)
    return LateRanksInTime(ranks=late.ranks, how=setting, forecast=found)


@register
class Straggler(FixKind):
    """Make late ranks as fast as the usual one."""

    key = "straggler"
    label = "no late rank"
    addresses = ("straggler",)
    needs = "hosts that are equal, or shares of the batch by speed: an edit of the script"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict equal ranks, where any rank is waited for.

        Equal ranks that share a processor still compute by turns, and are late for each other.
        """
        step, late = job.subject.step, late_ranks(account)
        by_others = 0.0 if late is None else 1 - late.share
        left = max(job.subject.crowding.late_for_each_other, by_others)
        # Stages of a pipeline wait by its schedule: no rank is late for that.
        late_s, drained_s = (account.parts_s[part.key] for part in (Part.STRAGGLER, Part.BUBBLE))
        left = max(left, drained_s / (late_s + drained_s) if drained_s else 0.0)
        if step.waiting_ns and left:
            equal = job.ask(
                change=lambda each: replace(each, waiting_ns=round(each.waiting_ns * left))
            )
            yield _fix(run, account, late, equal)
        elif step.waiting_ns:
            yield _fix(run, account, late, job.ask(jitters=(NoJitter(),)))

    def by_account(self, run: Run, account: Account) -> Iterator[Fix]:
        """Subtract the waiting for ranks from the step, or what a few late ranks do beyond others.

        A late rank delays the transfers of other buckets too, of which the account does not know
        that they waited for it. Links that are busy all the time may hide a part of its excess.
        Late ranks take their share of the waiting with them, or less: where the others are late by
        turns, each step still waits for the latest of them.
        """
        least_s = most_s = account.parts_s[Part.STRAGGLER.key]
        late, there = late_for_most(account)
        if late is not None and there is not account:
            least_s = most_s = late.share * least_s
        elif late is not None:
            excess_ns = account.excess_ns[:, account.is_typical].sum(axis=2)
            is_late = np.isin(account.ranks, late.ranks)
            late_ns, others_ns = excess_ns[is_late].max(axis=0), excess_ns[~is_late].max(axis=0)
            beyond_ns = np.maximum(late_ns - others_ns, 0)
            all_ns = float(np.maximum(late_ns, others_ns).sum())
            most_s = max(late.share * least_s, float(beyond_ns.mean()) * 1e-9)
            least_s *= min(late.share, float(beyond_ns.sum()) / all_ns if all_ns else 1.0)
        found = without_loss(account, most_s, of_one=False)
        if found is not None and most_s > least_s:
            found = replace(found, low_s=found.step_s, high_s=account.step_s - least_s)
        if found is not None:
            yield _fix(run, there, late, found)

    def in_few_steps(self, run: Run, account: Account) -> str:
        """Return where to look."""
        there = of_few_steps(account, Part.STRAGGLER)
        return _setting(run, there, late_ranks(there))
