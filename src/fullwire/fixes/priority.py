"""The fix "priority": gradients that the next forward pass needs first are sent first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import Fix, FixKind, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account


@dataclass(frozen=True, kw_only=True)
class NeededFirst(Fix):
    """The gradients go in the order of their next use."""

    template = "sums in order of next use"

    kind: str = "priority"
    how: str = "not in PyTorch itself; ByteScheduler and its like"


@register
class Priority(FixKind):
    """Send gradients in the order of their next use."""

    key = "priority"
    label = "needed first, sent first"
    addresses = ("overlap", "line_rate")
    needs = "a library that PyTorch lacks"
    begins_sooner = True

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict the order of the next use, where there are buckets to order."""
        if run.facts.buckets is not None:
            yield NeededFirst(forecast=job.ask(lane="priority"))
