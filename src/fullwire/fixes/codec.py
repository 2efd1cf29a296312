"""The fix "no communication hook", where the hook packs longer than it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from fullwire.fixes.fix import Fix, FixKind, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account


@dataclass(frozen=True, kw_only=True)
class SentWhole(Fix):
    """Gradients are sent without the script's communication hook."""

    template = "gradients sent without a hook"

    kind: str = "codec"
    how: str = "no register_comm_hook(...): {hook} packs longer than it saves"
    hook: str


@register
class Codec(FixKind):
    """Remove the communication hook."""

    key = "codec"
    label = "no compression"
    addresses = ("codec",)
    needs = "the script chooses its hook"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict the step without a hook, where the run has one that packs."""
        step = job.subject.step
        if run.facts.hook is not None and step.packing_ns:
            whole = partial(dataclasses.replace, packing_ns=0, sent_share=1.0)
            yield SentWhole(hook=str(run.facts.hook), forecast=job.ask(change=whole))
