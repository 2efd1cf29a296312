"""The fix "one collective in place of many small ones of its kind"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import MANY, MUCH_BYTES, Fix, FixKind, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account

_JOINED = {
    "allreduce": (
        "all-reduces",
        "dist.all_reduce(torch.cat([...])), where none needs another's sum",
    ),
    "broadcast": (
        "broadcasts",
        "dist.broadcast(torch.cat([...])), of those that come from one rank",
    ),
    "allgather": (
        "all-gathers",
        "dist.all_gather(..., torch.cat([...])), where none needs another's",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Joined(Fix):
    """Many small collectives of a kind become one."""

    template = "{count} small {ops} as one"

    kind: str = "joining"
    count: int
    ops: str


@register
class Joining(FixKind):
    """Join many small collectives of a kind into one."""

    key = "joining"
    label = "joined collectives"
    addresses = ("latency", "transport")
    needs = "an edit of the script"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict the small collectives of each kind as one, where a script has many."""
        step = job.subject.step
        if step.others.sum_gradients or bool((run.collectives.op == "reducescatter").any()):
            return  # shards: a library sums them, not the script
        for op, (named, setting) in _JOINED.items():
            places = step.others.small(op, MUCH_BYTES)
            if len(places) >= MANY:
                # Predict without the residue, because the many small collectives are its cause.
                found = job.as_modelled().ask(step=step.with_joined(places))
                yield Joined(count=len(places), ops=named, how=setting, forecast=found)
