"""A step that begins with computing; what the host does before may be its own reading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import Fix, FixKind, fix_kinds, register, without_loss
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account, Part
from fullwire.timeline.ahead import has_loader, usual_ahead_s

_ELSEWHERE = "logs, checkpoints, metrics: less often, or in another process"
_READS = "batches that the script reads by itself: {loader}"


@dataclass(frozen=True, kw_only=True)
class HostIsReady(Fix):
    """Nothing of the host's ahead of the forward pass."""

    template = "no host work before a step"

    kind: str = "host"


def _setting(run: Run, account: Account) -> str:
    if has_loader(account):
        return _ELSEWHERE
    return _READS.format(loader=fix_kinds()["input"].in_few_steps(run, account))


@register
class Host(FixKind):
    """The host out of the way of computing."""

    key = "host"
    label = "host work elsewhere"
    addresses = ("host",)

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Try a step that begins sooner by what the host does ahead."""
        found = job.beginning_sooner(round(usual_ahead_s(account) * 1e9))
        if found is not None:
            yield HostIsReady(how=_setting(run, account), forecast=found)

    def by_account(self, run: Run, account: Account) -> Iterator[Fix]:
        """Take off the step what the host does ahead."""
        lost_s = min(usual_ahead_s(account), account.parts_s[Part.HOST.key])
        found = without_loss(account, lost_s, of_one=True)
        if found is not None:
            yield HostIsReady(how=_setting(run, account), forecast=found)

    def in_few_steps(self, run: Run, account: Account) -> str:
        """Return what to do about work of the host that few steps have."""
        return _ELSEWHERE
