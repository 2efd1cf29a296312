"""A step that begins with computing; what the host does before may be its own reading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import Fix, FixKind, register, without_loss
from fullwire.fixes.input import LOADER
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account, Part
from fullwire.timeline.ahead import has_loader, usual_ahead_s

_ELSEWHERE = "logs, checkpoints, metrics: less often, or in another process"
_READS = f"batches that the script reads by itself: {LOADER}"


@dataclass(frozen=True, kw_only=True)
class HostIsReady(Fix):
    """Nothing of the host's ahead of the forward pass."""

    template = "nothing of the host's before a step computes"

    kind: str = "host"


def _predict(run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
    found = job.beginning_sooner(round(usual_ahead_s(account) * 1e9))
    if found is not None:
        yield HostIsReady(how=_setting(account), forecast=found)


def _by_account(account: Account) -> Iterator[Fix]:
    lost_s = min(usual_ahead_s(account), account.parts_s[Part.HOST.key])
    found = without_loss(account, lost_s, of_one=True)
    if found is not None:
        yield HostIsReady(how=_setting(account), forecast=found)


def _setting(account: Account) -> str:
    return _ELSEWHERE if has_loader(account) else _READS


register(
    FixKind(
        key="host",
        risk="exact",
        label="host work elsewhere",
        predict=_predict,
        by_account=_by_account,
        in_few_steps=lambda account: _ELSEWHERE,
    )
)
