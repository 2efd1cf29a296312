"""The fix "no contention": the job's sums and other ranks stop slowing its computation down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import FILLS_THE_LINE, Fix, FixKind, has_buckets, register, without_loss
from fullwire.run.placement import sums_on_processors
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account, Part

_ON_PROCESSORS = (
    "fewer threads (torch.set_num_threads), a processor for communication alone (taskset), "
    "{buckets}{backend}or hosts of their own: whatif tells what their links would cost"
)
_ON_DEVICES = (
    "NCCL_MAX_CTAS (NCCL_MAX_NCHANNELS before NCCL 2.17){buckets}. Measure each: with fewer SMs a "
    "sum takes longer, so this step is the best case"
)


def _on_processors(run: Run) -> str:
    """Return the settings that this job can change: one without buckets has none to enlarge."""
    return _ON_PROCESSORS.format(
        buckets="larger buckets, " if has_buckets(run) else "",
        backend="" if run.facts.backend == FILLS_THE_LINE else "the fullwire backend, ",
    )


@dataclass(frozen=True, kw_only=True)
class NothingInTheWay(Fix):
    """Computation has its processors to itself, without sums or other ranks."""

    template = "processors for each rank alone"
    place = "hosts"

    kind: str = "contention"


class FewerSMsForSums(NothingInTheWay):
    """Kernels have the device to themselves, as if communication took none of its SMs."""

    template = "fewer SMs or channels for NCCL"
    place = "settings"


@register
class Contention(FixKind):
    """Give computation its processors, or its device, to itself."""

    key = "contention"
    label = "no contention"
    addresses = ("contention",)
    needs = "more processors (threads:1 may free one)"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Subtract the contention from the step, as the account measured it.

        A prediction would need a recorded step without contention to start from.
        """
        return self.by_account(run, account)

    def by_account(self, run: Run, account: Account) -> Iterator[Fix]:
        """Subtract the contention from the step; a plan has no other settings of NCCL to try."""
        if run.provenance.is_plan:
            return
        found = without_loss(account, account.parts_s[Part.CONTENTION.key], of_one=False)
        if found is not None:
            if sums_on_processors(run):
                yield NothingInTheWay(how=_on_processors(run), forecast=found)
            else:
                or_buckets = ", or larger buckets" if has_buckets(run) else ""
                yield FewerSMsForSums(how=_ON_DEVICES.format(buckets=or_buckets), forecast=found)
