"""Computation that the job's own communication and ranks slow down no more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import Fix, FixKind, register, without_loss
from fullwire.run.placement import shares_one_host, sums_on_processors
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account

_FEWER_THREADS = (
    "a processor that only communication uses: taskset for the ranks, OMP_NUM_THREADS one lower; "
    "fewer ranks on a host; larger buckets; init_process_group('fullwire') takes less of it"
)
_FEWER_CHANNELS = "fewer SMs for NCCL: NCCL_MAX_CTAS=8 or NCCL_MAX_NCHANNELS=8; larger buckets"
_EITHER = f"on processors, {_FEWER_THREADS}; on GPUs, {_FEWER_CHANNELS}"


@dataclass(frozen=True, kw_only=True)
class ComputesUndisturbed(Fix):
    """Computing that takes as long as by itself."""

    template = "computing that shares no processors with communication or other ranks"

    kind: str = "contention"


def _predict(run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
    if not shares_one_host(run):
        how = _FEWER_THREADS if sums_on_processors(run) else _FEWER_CHANNELS
        yield from _without(account, how)


def _by_account(account: Account) -> Iterator[Fix]:
    yield from _without(account, _EITHER)


def _without(account: Account, how: str) -> Iterator[Fix]:
    found = without_loss(account, account.crowded_s, of_one=False)
    if found is not None:
        yield ComputesUndisturbed(how=how, forecast=found)


register(
    FixKind(
        key="contention",
        risk="exact",
        label="undisturbed computing",
        predict=_predict,
        by_account=_by_account,
    )
)
