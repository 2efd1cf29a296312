"""The fix "no host work before a step": the step begins with computation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import LESS_SAVING, Fix, FixKind, fix_kinds, moved_s, register, without_loss
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account, Part
from fullwire.timeline.ahead import checkpoints_s, has_loader, usual_ahead_s
from fullwire.timeline.steadiness import of_few_steps

_ELSEWHERE = "logs, checkpoints, metrics: less often, or in another process"
_READS = "batches that the script reads by itself: {loader}"


@dataclass(frozen=True, kw_only=True)
class HostIsReady(Fix):
    """The host does nothing before the forward pass."""

    template = "no host work before a step"

    kind: str = "host"


def _setting(run: Run, account: Account) -> str:
    if has_loader(account):
        return _ELSEWHERE
    return _READS.format(loader=fix_kinds()["input"].in_few_steps(run, account))


@register
class Host(FixKind):
    """Move the host's work out of the way of computation."""

    key = "host"
    label = "host work elsewhere"
    addresses = ("host",)
    needs = "an edit of the script"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict a step that begins sooner, by the host's time before computation."""
        found = job.beginning_sooner(round(usual_ahead_s(account) * 1e9))
        if found is not None:
            yield HostIsReady(how=_setting(run, account), forecast=found)

    def by_account(self, run: Run, account: Account) -> Iterator[Fix]:
        """Subtract the host's time before computation from the step."""
        lost_s = min(usual_ahead_s(account), account.parts_s[Part.HOST.key])
        if not has_loader(account):  # it may read batches, as loading processes would
            lost_s = moved_s(run, account, lost_s)
        found = without_loss(account, lost_s, of_one=True)
        if found is not None:
            yield HostIsReady(how=_setting(run, account), forecast=found)

    def in_few_steps(self, run: Run, account: Account) -> str:
        """Return the remedy for work of the host in few steps."""
        there = of_few_steps(account, Part.HOST)
        is_saving = checkpoints_s(run, there, there.ranks) > there.parts_s[Part.HOST.key] / 2
        return LESS_SAVING if is_saving else _ELSEWHERE
