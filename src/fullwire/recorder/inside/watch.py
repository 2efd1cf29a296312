"""What is watched in torch, and how: through torch's own hooks where it has them.

    steps          the optimizer's global step hooks
    gradients      gradients.py
    backward       torch.autograd.backward, which Tensor.backward calls
    forward        DistributedDataParallel.forward; other models have no one place
    input          the data loader's __next__
    the rest       what the thread uses between a step, or a batch, and DistributedDataParallel's
                   forward, where a script reads its own batches
    evaluation     Module.eval() until Module.train()
    collectives    collectives.py

No tensor is read, changed or kept, nothing is synchronised. Times on a CUDA device are clock.py's
matter. ARCHITECTURE.md says which other ways there were.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader
from torch.utils.weak import WeakIdKeyDictionary

from . import after_import
from .clock import Clock, Moment, clock_of_this_torch
from .collectives import watch_collectives
from .ending import at_end, before_hard_end
from .gradients import Gradients, hook_of, watch_gradients
from .journal import Journal, Note
from .processors import BeforeForward, Processors

_now = time.monotonic_ns
_CALIBRATION = 200


def watch(directory: str) -> None:
    """Begin to record this process into a file in a directory."""
    after_import("torch._dynamo", _stay_out_of_graphs)
    journal = Journal(directory)
    clock = clock_of_this_torch(journal)
    os.register_at_fork(after_in_child=journal.start_anew)
    close = functools.partial(_close, journal, clock)
    at_end(close)
    before_hard_end(close)
    gradients = watch_gradients(journal, clock)
    before_forward = BeforeForward(journal)
    _watch_steps(journal, clock, gradients, before_forward)
    _watch_backward(journal, clock, gradients)
    _watch_input(journal, before_forward)
    _watch_evaluation(journal)
    if dist.is_available():
        watch_collectives(journal, clock)
        _watch_data_parallel(journal, clock, before_forward)


def _stay_out_of_graphs() -> None:
    """Let torch.compile pass our functions by: it would trace them, and end the job at some."""
    with contextlib.suppress(Exception):  # the job goes on
        torch._dynamo.trace_rules.add(__package__)


def _close(journal: Journal, clock: Clock) -> None:
    clock.close()
    journal.write()
    if journal.is_open and journal.noted:
        # Time the shortest hook on a journal that is thrown away.
        scratch = Journal("")
        parameter = torch.zeros(1)
        hook = hook_of(scratch, 0)
        began_ns = time.thread_time_ns()
        for _ in range(_CALIBRATION):
            hook(parameter)
        note_ns = (time.thread_time_ns() - began_ns) / _CALIBRATION
        journal.define(
            kind="cost",
            notes=journal.noted,
            note_ns=note_ns,  # some notes are part of the next as well
            spent_ns=journal.spent_ns,
        )
    journal.close()


def _watch_steps(
    journal: Journal, clock: Clock, gradients: Gradients, before_forward: BeforeForward
) -> None:
    numbers = WeakIdKeyDictionary()
    began: dict[int, Moment] = {}
    count = itertools.count()
    processors = Processors(journal)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        number = numbers.get(optimizer)
        if number is None:
            number = numbers[optimizer] = next(count)
        if not gradients.is_in_pass:
            gradients.tell(0)  # of a pass that did not come through torch.autograd.backward
            gradients.expect(optimizer)
        began[number] = clock.moment()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        ended, started = clock.moment(), journal.starts_work()
        number = numbers[optimizer]
        clock.note(Note.OPTIMIZER, number, began[number], ended)
        clock.collect()
        processors.note_if_due()
        journal.write_if_due()
        journal.ends_work(started)
        before_forward.begins()

    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)
    clear = optimizers.Optimizer.zero_grad

    @functools.wraps(clear)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        journal.note(Note.ZERO_GRAD, 0, _now(), 0)
        return clear(self, *args, **kwargs)

    optimizers.Optimizer.zero_grad = zero_grad


def _watch_backward(journal: Journal, clock: Clock, gradients: Gradients) -> None:
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def backward_(*args: Any, **kwargs: Any) -> Any:
        if gradients.is_in_pass:  # a checkpoint's, inside the one that is noted
            return backward(*args, **kwargs)
        journal.write_if_due()
        # In this order: no gradient is told to have been ready before its pass began.
        gradients.is_in_pass, began, after_ns = True, clock.moment(), _now()
        try:
            result = backward(*args, **kwargs)
        finally:
            gradients.is_in_pass = False
            clock.note(Note.BACKWARD, 0, began, clock.moment())
        gradients.tell(after_ns)
        return result

    torch.autograd.backward = backward_


def _watch_input(journal: Journal, before_forward: BeforeForward) -> None:
    iterator = dataloader._BaseDataLoaderIter
    original = iterator.__next__

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        journal.write_if_due()
        began_ns = _now()
        try:
            return original(*args, **kwargs)
        finally:
            journal.note(Note.INPUT, 0, began_ns, _now() - began_ns)
            before_forward.begins()

    iterator.__next__ = timed


def _watch_evaluation(journal: Journal) -> None:
    began_ns: list[int] = []
    module = torch.nn.Module
    evaluate, train = module.eval, module.train

    @functools.wraps(evaluate)
    def eval_(self: Any) -> Any:
        if not began_ns and self.training:
            began_ns.append(_now())
        return evaluate(self)

    @functools.wraps(train)
    def train_(self: Any, mode: bool = True) -> Any:
        if began_ns and mode:
            start_ns = began_ns.pop()
            journal.note(Note.EVALUATION, 0, start_ns, _now() - start_ns)
        return train(self, mode)

    module.eval, module.train = eval_, train_


def _watch_data_parallel(journal: Journal, clock: Clock, before_forward: BeforeForward) -> None:
    build, forward = DistributedDataParallel.__init__, DistributedDataParallel.forward
    register = DistributedDataParallel.register_comm_hook
    register_builtin = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # it replaces one
        build(self, *args, **kwargs)
        journal.define(kind="fact", name="buckets", value=_bucket_policy(self))

    @functools.wraps(forward)
    def forward_(self: Any, *args: Any, **kwargs: Any) -> Any:
        before_forward.ends()
        began = clock.moment()
        try:
            return forward(self, *args, **kwargs)
        finally:
            kind = Note.FORWARD if torch.is_grad_enabled() else Note.INFERENCE
            clock.note(kind, 0, began, clock.moment())

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Any) -> None:
        register(self, state, hook)
        name = getattr(hook, "__qualname__", type(hook).__name__)
        journal.define(kind="fact", name="hook", value=name)

    @functools.wraps(register_builtin)
    def register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        register_builtin(self, comm_hook_type)
        journal.define(kind="fact", name="hook", value=str(comm_hook_type))

    replaced = DistributedDataParallel
    replaced.__init__, replaced.forward = __init__, forward_
    replaced.register_comm_hook = register_comm_hook
    replaced._register_builtin_comm_hook = register_builtin_comm_hook


def _bucket_policy(model: Any) -> str:
    if getattr(model, "bucket_bytes_cap_default", False):
        return "ddp"
    mebibytes, rest = divmod(int(model.bucket_bytes_cap), 2**20)
    return f"ddp:{model.bucket_bytes_cap}B" if rest else f"ddp:{mebibytes}MiB"
