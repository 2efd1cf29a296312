"""No rank slower than the usual one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fullwire.fixes.fix import Fix, FixKind, register, without_loss
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecast, Forecaster
from fullwire.simulation.stragglers import NoJitter
from fullwire.timeline.account import Account, Late, Part, late_ranks

_EVENLY = "batches of equal work, and nothing else on the ranks' hosts"
_WHERE_A_RANK_IS_SLOW = (  # beyond the usual in computation, input, or neither
    "look at its device: clock, temperature (of a GPU: nvidia-smi -q -d PERFORMANCE), other work",
    "look at its input: DataLoader(num_workers=...), its disk, its share of the data",
    "look at its host: other processes, and what only it does between steps (reading, logs)",
)


@dataclass(frozen=True, kw_only=True)
class NoneIsLate(Fix):
    """Ranks that are late in turns, on time."""

    template = "no late rank"
    place = "hosts"

    kind: str = "straggler"


@dataclass(frozen=True, kw_only=True)
class LateRanksInTime(Fix):
    """The few ranks that most wait for, on time."""

    template = "{ranks:ranks} as fast as the others"
    place = "hosts"

    kind: str = "straggler"
    ranks: tuple[int, ...]


def _setting(account: Account, late: Late | None) -> str:
    """Say where to look: at what the late ranks spend most beyond the usual on."""
    if late is None:
        return _EVENLY
    rows = [account.ranks.index(rank) for rank in late.ranks]
    excess_ns = account.excess_ns[rows][:, account.is_typical].mean(axis=(0, 1))
    return _WHERE_A_RANK_IS_SLOW[int(np.argmax(excess_ns))]


def _fix(account: Account, found: Forecast) -> Fix:
    late = late_ranks(account)
    setting = _setting(account, late)
    if late is None:
        return NoneIsLate(how=setting, forecast=found)
    return LateRanksInTime(ranks=late.ranks, how=setting, forecast=found)


@register
class Straggler(FixKind):
    """No rank slower than the usual one."""

    key = "straggler"
    label = "no late rank"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Try ranks without jitter, where any is waited for."""
        if job.subject.step.waiting_ns:
            yield _fix(account, job.ask(jitters=(NoJitter(),)))

    def by_account(self, account: Account) -> Iterator[Fix]:
        """Take the waiting for ranks off the step."""
        found = without_loss(account, account.parts_s[Part.STRAGGLER.key], of_one=False)
        if found is not None:
            yield _fix(account, found)

    def in_few_steps(self, account: Account) -> str:
        """Return where to look."""
        return _setting(account, late_ranks(account))
