"""The fix "options of DistributedDataParallel": less work of its own in each step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fullwire.fixes.fix import (
    FixKind,
    Process,
    Risk,
    Seen,
    Worthwhile,
    as_arguments,
    options_among,
    register,
    sums_on_processors_s,
    worthwhile,
)

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecaster
    from fullwire.timeline.account import Account

_ALL_USED = "find_unused_parameters=False"
_OPTIONS = ("static_graph", "gradient_as_bucket_view", _ALL_USED)
_COPIES_PER_S = 3e9  # bytes that a processor copies in a second, beside other work


@register
class Ddp(FixKind):
    """Switch options of DistributedDataParallel. A trial measures them."""

    key = "ddp"
    label = "options of DDP"
    tries_each = True
    addresses = ("host", "compute", "latency")
    adds_up = True
    example = "gradient_as_bucket_view"
    setting = f"one or more of {', '.join(_OPTIONS)}"

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield the search for unused parameters switched off, and gradients without copies."""
        from fullwire.timeline.account import Part

        options, parts_s = seen.ddp or {}, account.parts_s
        if options.get("find_unused_parameters") and not options.get("static_graph"):
            # The search walks the graph, and sums one bitmap after the last bucket. Where ranks
            # share processors, one sum of several takes its share of their contention.
            own_s = parts_s[Part.LATENCY.key] + parts_s[Part.TRANSPORT.key]
            sums = len(run.collectives) / max(len(account.steps) * len(account.ranks), 1)
            own_s += sums_on_processors_s(account) / max(sums, 1.0)
            most_s = own_s + 0.15 * parts_s[Part.COMPUTE.key]
            words = "no search for unused parameters"
            yield from worthwhile(self, _ALL_USED, words, account, 0.0, most_s)
        elif options and not options.get("gradient_as_bucket_view"):
            sent_bytes = int(run.collectives.bytes.sum()) / max(len(account.steps), 1)
            copied_s = sent_bytes / max(len(account.ranks), 1) / _COPIES_PER_S
            words = "gradients that lie in their buckets"
            yield from worthwhile(self, _OPTIONS[1], words, account, 0.0, copied_s)

    def by_hand(self, setting: str) -> str:
        """Return the constructor's call."""
        return f"model = DistributedDataParallel(model, {as_arguments(setting)})"

    def risk_of(self, setting: str) -> Risk:
        """Return semantic for a graph that is recorded once: another one ends the job."""
        return "semantic" if "static_graph" in setting.split(",") else "exact"

    def checked(self, setting: str) -> str:
        """Take options, each once, in the order of this file."""
        return options_among(_OPTIONS, setting, self.key)

    def apply(self, setting: str, process: Process) -> None:
        """Make each DistributedDataParallel with these options."""
        from torch.nn.parallel import DistributedDataParallel

        chosen = {
            name.partition("=")[0]: not name.endswith("=False") for name in setting.split(",")
        }
        searched: set[int] = set()

        def with_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
            process.did(f"applied: {setting}")
            if given.get("find_unused_parameters") and not given.get("static_graph"):
                searched.add(id(given["self"]))
            return chosen

        process.around(DistributedDataParallel, "__init__", with_options)
        if _ALL_USED in setting:
            make = DistributedDataParallel.__init__

            @functools.wraps(make)
            def made(model: Any, *args: Any, **kwargs: Any) -> None:
                make(model, *args, **kwargs)
                if id(model) in searched and not model.find_unused_parameters:
                    _WithoutSearch(model)
                searched.discard(id(model))

            DistributedDataParallel.__init__ = made


class _WithoutSearch:
    """A model without the search for unused parameters, whose passes end as with the search.

    A pass that leaves a parameter out does not fill its bucket, and the ranks wait for each other.
    At the end of such a pass this rank gives the parameters that its outputs do not reach a
    gradient of -0.0. It adds nothing to the sum of other ranks. A sum that is -0.0 everywhere comes
    from ranks that all left the parameter out. Then it has no gradient again, as with the search.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._forward = model, model.forward
        self._roots: list[Any] = []  # the nodes of the graph that made the outputs of this pass
        self._is_noted = False
        model.forward = self._passed

    def _passed(self, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.nn.parallel.distributed import _find_tensors

        outputs = self._forward(*args, **kwargs)
        if torch.is_grad_enabled() and self._model.require_backward_grad_sync:
            for tensor in _find_tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_begins)
                    self._roots.append(tensor.grad_fn)
        return outputs

    def _backward_begins(self, gradient: Any) -> None:
        from torch.autograd import Variable

        engine = Variable._execution_engine
        if not self._is_noted:
            self._is_noted = True
            # DDP ends its sums in such a callback. Queued from one of ours, the second comes later.
            engine.queue_callback(lambda: engine.queue_callback(self._backward_ended))

    def _backward_ended(self) -> None:
        import torch

        self._is_noted = False
        roots, self._roots = self._roots, []
        try:
            self._model.reducer._check_reducer_finalized()
        except RuntimeError:
            used = _parameters_of(roots)
            left_out = [
                parameter
                for parameter in self._model._module_parameters
                if id(parameter) not in used
            ]
            had_none = [parameter for parameter in left_out if parameter.grad is None]
            torch.autograd.backward(
                left_out, [torch.full_like(parameter, -0.0) for parameter in left_out]
            )
            for parameter in had_none:
                if not parameter.grad.any() and parameter.grad.signbit().all():
                    parameter.grad = None


def _parameters_of(roots: Sequence[Any]) -> set[int]:
    """Return the ids of the parameters below these nodes of a graph."""
    seen, parameters, ahead = set(), set(), list(roots)
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += [follower for follower, _ in node.next_functions if follower is not None]
            if hasattr(node, "variable"):
                parameters.add(id(node.variable))
    return parameters
