"""The fix "overlap": gradients are sent during the backward pass, not after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import Fix, FixKind, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.simulation.schedule import sent_in_buckets
from fullwire.timeline.account import Account


@dataclass(frozen=True, kw_only=True)
class SentMeanwhile(Fix):
    """The script's sums go during the backward pass, not after it."""

    template = "sums during the backward pass"

    kind: str = "overlap"
    how: str = "DistributedDataParallel(model) in place of collectives called after it"


@register
class Overlap(FixKind):
    """Send gradients during the backward pass."""

    key = "overlap"
    label = "overlap"
    addresses = ("overlap", "line_rate", "transport", "latency")
    needs = "an edit of the script"
    begins_sooner = True

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict gradients in buckets, where a script sends them after the pass."""
        step = job.subject.step
        if run.facts.buckets is None and step.sums_only_gradients:
            yield SentMeanwhile(forecast=job.ask(change=sent_in_buckets))
