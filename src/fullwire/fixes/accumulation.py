"""The fix "one sum for the passes of a step": gradients that a script accumulates are sent once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fullwire.errors import UsageError
from fullwire.fixes.fix import (
    PLAIN,
    Fix,
    FixKind,
    Process,
    Seen,
    Worthwhile,
    register,
    sending_s,
    without_loss,
    worthwhile,
)
from fullwire.run.kinds import kinds_of
from fullwire.units import shown

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecast, Forecaster
    from fullwire.timeline.account import Account

_MOST = 4096
_AS_IT_IS = -1  # DDP sends as the script says


@dataclass(frozen=True, kw_only=True)
class OneSumOfDdp(Fix):
    """The gradients of a step's passes go in one sum, instead of one in each pass."""

    template = "one sum a step of {passes} passes"
    lines: ClassVar[Mapping[str, str]] = {
        PLAIN: """\
from contextlib import nullcontext

for number, batch in enumerate(loader, 1):
    is_sent = number % {passes} == 0
    with nullcontext() if is_sent else model.no_sync():
        (loss_of(model, batch) / {passes}).backward()
    if is_sent:
        optimizer.step()
        optimizer.zero_grad()
""",
    }

    kind: str = "accumulation"
    passes: float


@dataclass(frozen=True, kw_only=True)
class OneSumOfUnevenSteps(OneSumOfDdp):
    """The gradients of a step's passes go in one sum, where some steps have more passes."""

    template = "one sum a step"
    lines: ClassVar[Mapping[str, str]] = {
        PLAIN: """\
from contextlib import nullcontext

# where `batches` has those of one step, as many as it has passes:
for number, batch in enumerate(batches, 1):
    is_sent = number == len(batches)
    with nullcontext() if is_sent else model.no_sync():
        (loss_of(model, batch) / len(batches)).backward()
optimizer.step()
optimizer.zero_grad()
""",
    }


@register
class Accumulation(FixKind):
    """Send gradients in the last pass of each step, where a script sends them in every pass."""

    key = "accumulation"
    label = "one sum for the passes of a step"
    addresses = ("line_rate", "transport", "latency", "contention")
    example = "4"
    setting = "the passes of each step, of a script that accumulates"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict the step without the sums of its passes before the last."""
        from fullwire.timeline.passes import passes_that_each_sum

        passes = passes_that_each_sum(run)
        if not passes:
            return
        if not job.sums_early:
            yield from self.by_account(run, account)
            return
        yield _one_sum(run, passes, job.ask(change=lambda step: step.summed_once()))

    def by_account(self, run: Run, account: Account) -> Iterator[Fix]:
        """Subtract the time in which the sums of passes before the last were exposed."""
        from fullwire.timeline.passes import passes_that_each_sum

        passes = passes_that_each_sum(run)
        if not passes:
            return
        found = without_loss(account, sending_s(account) * (passes - 1) / passes, of_one=False)
        if found is not None:
            yield _one_sum(run, passes, found)

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield the passes that the job makes with sums in each step of its optimizer."""
        from fullwire.timeline.passes import passes_add_up

        passes = round(seen.sums_per_step)
        if (
            seen.clears_between_passes
            or not passes_add_up(run)
            or kinds_of(run).kinds  # no number of passes fits all steps
            or passes < 2
            or abs(seen.sums_per_step - passes) > 0.1 * passes
        ):
            return
        # Exposed sums go, except for the last pass; the work of sums beside computation goes too.
        gone_s = sending_s(account) * (passes - 1) / passes
        words = f"gradients of {passes} passes sent once"
        yield from worthwhile(self, str(passes), words, account, 0.8 * gone_s, 1.3 * gone_s)

    def checked(self, setting: str) -> str:
        """Take a number of passes."""
        if not (setting.isascii() and setting.isdigit() and 1 < int(setting) <= _MOST):
            raise UsageError(
                f"fix accumulation: expected 2 to {_MOST} passes, got {shown(setting)}"
            )
        return str(int(setting))

    def by_hand(self, setting: str) -> str:
        """Return the context of the passes before the last."""
        return (
            f"with model.no_sync():  # in all but the last of {setting} passes\n"
            "    loss_of(model(batch)).backward()"
        )

    def apply(self, setting: str, process: Process) -> None:
        """Let DDP send gradients in every so manieth pass.

        A step that comes sooner, as at an epoch's end, has its gradients sent before it begins, and
        before torch clips, clears or unscales them. From then on DDP sends them in each pass again,
        for a script with such steps may read gradients by code of its own.
        """
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim import optimizer as optimizers

        passes, unsent = int(setting), weakref.WeakKeyDictionary[Any, int]()

        def sent_in_the_last(given: Mapping[str, Any]) -> Mapping[str, Any]:
            model = given["self"]
            if not torch.is_grad_enabled():
                return {}
            if model not in unsent and not model.require_backward_grad_sync:
                process.did("not applied: the script uses no_sync itself")
                unsent[model] = _AS_IT_IS
            if (before := unsent.get(model, 0)) != _AS_IT_IS:
                is_sent = before + 1 == passes
                model.require_backward_grad_sync = is_sent
                unsent[model] = 0 if is_sent else before + 1
                process.did(f"applied: sums in every {passes}th pass")
            return {}

        def send_the_rest(*of_a_hook: Any) -> None:
            for model, count in list(unsent.items()):
                if count > 0:
                    _send_now(model)
                    unsent[model] = _AS_IT_IS
                    model.require_backward_grad_sync = True
                    process.did(
                        f"undone: gradients were used or cleared after pass {count}, not {passes}"
                    )

        def before_it(given: Mapping[str, Any]) -> Mapping[str, Any]:
            send_the_rest()
            return {}

        process.around(DistributedDataParallel, "forward", sent_in_the_last, may_repeat=False)
        readers = [(torch.nn.utils, "clip_grad_norm_"), (torch.nn.utils, "clip_grad_value_")]
        readers += [(torch.nn.utils, "get_total_norm"), (torch.amp.GradScaler, "unscale_")]
        readers += [(torch.optim.Optimizer, "zero_grad"), (torch.nn.Module, "zero_grad")]
        for owner, name in readers:
            process.around(owner, name, before_it, may_repeat=False)
        optimizers.register_optimizer_step_pre_hook(send_the_rest)


def _send_now(model: Any) -> None:
    """Make the gradients means over the ranks, as DDP would have in the last pass."""
    import torch
    import torch.distributed as dist

    group = model.process_group
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A rank may lack a gradient that another one has.
    have = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    have = have.to(parameters[0].device)
    dist.all_reduce(have, dist.ReduceOp.MAX, group=group)
    for parameter, somebody_has in zip(parameters, have.tolist(), strict=True):
        if somebody_has:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


def _one_sum(run: Run, passes: float, forecast: Forecast) -> OneSumOfDdp:
    if kinds_of(run).kinds:
        how = "with model.no_sync() in all passes of a step but the last"
        return OneSumOfUnevenSteps(passes=passes, how=how, forecast=forecast)
    how = f"with model.no_sync() in {passes - 1} of the {passes} passes of each step"
    return OneSumOfDdp(passes=passes, how=how, forecast=forecast)
