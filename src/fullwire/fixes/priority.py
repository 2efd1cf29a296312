"""What the next forward pass needs first is sent first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import Fix, FixKind, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account


@dataclass(frozen=True, kw_only=True)
class NeededFirst(Fix):
    """Gradients in the order of their next use."""

    template = "what the next forward pass needs first is sent first"

    kind: str = "priority"
    how: str = "not in PyTorch itself; ByteScheduler and its like"


def _predict(run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
    if run.facts.buckets is not None:
        yield NeededFirst(forecast=job.ask(lane="priority"))


register(FixKind(key="priority", risk="exact", label="needed first, sent first", predict=_predict))
