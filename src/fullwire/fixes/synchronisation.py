"""The fix "gradients added up locally": only some steps pay for sending them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fullwire.fixes.fix import PLAIN, Fix, FixKind, Risk, register
from fullwire.run.run import Run
from fullwire.run.usual import local_steps_of
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account
from fullwire.timeline.passes import passes_add_up, passes_of_step, passes_that_each_sum

_TIMES_AS_MANY = (2, 4)  # passes between sums, in place of the recorded ones
_BY_DDP = "with model.no_sync() in {without} of {every} passes; the batch is {times}x larger"
_BY_SCRIPT = (
    "skip all_reduce in {without} of {every} passes and let gradients add up; "
    "the batch is {times}x larger"
)


@dataclass(frozen=True, kw_only=True)
class FewerSums(Fix):
    """The gradients of more passes than the recorded ones go in one sum."""

    template = "one sum every {every} passes"
    lines: ClassVar[Mapping[str, str]] = {
        "transformers": """\
from transformers import TrainingArguments

# beside your own arguments:
args = TrainingArguments(gradient_accumulation_steps={every})
""",
        "accelerate": """\
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps={every})
# around forward, backward and optimizer.step():
#     with accelerator.accumulate(model):
""",
        "lightning": """\
from lightning.pytorch import Trainer

# beside your own arguments:
trainer = Trainer(accumulate_grad_batches={every})
""",
        "deepspeed": """\
{{
  "gradient_accumulation_steps": {every}
}}
""",
        "torchtitan": "--training.global_batch_size=N  # {times} times the present one\n",
    }

    kind: str = "synchronisation"
    risk: Risk = "semantic"
    passes: float  # in one sum, as recorded; a mean where steps have different numbers
    times: int  # as many as these

    @property
    def every(self) -> int:
        """Return how many passes are in one sum with the fix."""
        return round(self.passes * self.times)

    @property
    def without(self) -> int:
        """Return how many of `every` passes send nothing."""
        return self.every - 1


@dataclass(frozen=True, kw_only=True)
class FewerSumsOfDdp(FewerSums):
    """The gradients of several steps go in one sum, which DistributedDataParallel makes."""

    template = FewerSums.template
    lines: ClassVar[Mapping[str, str]] = {
        **FewerSums.lines,
        PLAIN: """\
from contextlib import nullcontext

for number, batch in enumerate(loader, 1):
    is_sent = number % {every} == 0
    with nullcontext() if is_sent else model.no_sync():
        (loss_of(model, batch) / {every}).backward()
    if is_sent:
        optimizer.step()
        optimizer.zero_grad()
""",
    }


@register
class Synchronisation(FixKind):
    """Add gradients up locally."""

    key = "synchronisation"
    risk: ClassVar[Risk] = "semantic"
    label = "fewer synchronizations"
    addresses = ("line_rate", "transport", "latency", "codec", "contention")
    needs = "an edit of the script: no_sync(), or local steps (fullwire whatif --local-steps)"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict sending the gradients of several steps together."""
        if passes_that_each_sum(run):
            return  # One sum a step comes first, and the batch stays as it is.
        if not passes_add_up(run):
            return  # Of several models or a closure: passes in a row may be unable to share a sum.
        kind: type[FewerSums]
        if run.facts.buckets is not None:
            kind, setting = FewerSumsOfDdp, _BY_DDP
        elif job.subject.step.sums_only_gradients:
            kind, setting = FewerSums, _BY_SCRIPT
        else:
            return
        # A forecast replays whole recorded steps, or rounds of them, and each may add up several
        # passes already.
        passes = (passes_of_step(run) or 1) * local_steps_of(run)
        for times in _TIMES_AS_MANY:
            forecast = job.ask(accumulate=(times,))
            yield kind(passes=passes, times=times, how=setting, forecast=forecast)
