"""Gradients sent beside the backward pass, not after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import Fix, FixKind, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account


@dataclass(frozen=True, kw_only=True)
class SentMeanwhile(Fix):
    """What a script sends after the backward pass, sent while it goes on."""

    template = "gradients sent while the backward pass goes on"

    kind: str = "overlap"
    how: str = "DistributedDataParallel(model) in place of collectives called after it"


def _predict(run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
    step = job.subject.step
    if run.facts.buckets is None and step.others.are_gradients:
        alone = dataclasses.replace(step, others=type(step.others)())
        yield SentMeanwhile(forecast=job.ask(step=alone))


register(FixKind(key="overlap", risk="exact", label="overlap", predict=_predict))
