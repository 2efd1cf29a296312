"""What is watched in torch, and how: through torch's own hooks where it has them.

    steps          the optimizer's global step hooks
    gradients      a post-accumulate hook on every parameter that an optimizer is given
    backward       torch.autograd.backward, which Tensor.backward calls
    forward        DistributedDataParallel.forward; other models have no one place
    input          the data loader's __next__
    evaluation     Module.eval() until Module.train()
    collectives    the methods of torch.distributed.ProcessGroup, which all of Python's collectives
                   (and FSDP2's, and communication hooks') go through; DDP's reducer is C++, so it
                   is given a group that forwards to the true one through the same methods

A collective ends when its future says so: a callback notes the time, not whoever waits. No tensor
is read, changed or kept, nothing is synchronised. ARCHITECTURE.md says which other ways there were.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader
from torch.utils.weak import WeakIdKeyDictionary

from .journal import Journal, Note
from .processors import Processors

_COLLECTIVES = {
    "allreduce": "allreduce", "allreduce_coalesced": "allreduce",
    "allgather": "allgather", "_allgather_base": "allgather", "all_gather_single": "allgather",
    "allgather_coalesced": "allgather", "allgather_into_tensor_coalesced": "allgather",
    "all_gather_single_coalesced": "allgather",
    "reduce_scatter": "reducescatter", "_reduce_scatter_base": "reducescatter",
    "reduce_scatter_single": "reducescatter", "reduce_scatter_tensor_coalesced": "reducescatter",
    "reduce_scatter_single_coalesced": "reducescatter",
    "alltoall": "alltoall", "alltoall_base": "alltoall", "all_to_all_single": "alltoall",
    "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter",
    "barrier": "barrier",
}  # fmt: skip
_now = time.monotonic_ns
_CALIBRATION = 200


def watch(directory: str) -> None:
    """Begin to record this process into a file in a directory."""
    journal = Journal(directory)
    os.register_at_fork(after_in_child=journal.start_anew)
    atexit.register(_close, journal)
    _watch_steps(journal)
    _watch_gradients(journal)
    _watch_backward(journal)
    _watch_input(journal)
    _watch_evaluation(journal)
    if dist.is_available():
        _watch_collectives(journal)
        _watch_data_parallel(journal)


def _close(journal: Journal) -> None:
    if journal.is_open and journal.noted:
        journal.write()
        journal.define(
            kind="cost", notes=journal.noted, note_ns=_note_cost_ns(), write_ns=journal.write_ns
        )
    journal.close()


def _note_cost_ns() -> float:
    """Time the shortest hook on a journal that is thrown away."""
    scratch = Journal("")
    parameter = torch.zeros(1)
    hook = _gradient_hook(scratch, 0)
    began_ns = time.thread_time_ns()
    for _ in range(_CALIBRATION):
        hook(parameter)
    return (time.thread_time_ns() - began_ns) / _CALIBRATION


def _watch_steps(journal: Journal) -> None:
    numbers = WeakIdKeyDictionary()
    began_ns: dict[int, int] = {}
    count = itertools.count()
    processors = Processors(journal)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer not in numbers:
            numbers[optimizer] = next(count)
        began_ns[numbers[optimizer]] = _now()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        number = numbers[optimizer]
        journal.note(Note.OPTIMIZER, number, began_ns[number], _now())
        processors.note_if_due()
        journal.write_if_due()

    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)
    clear = optimizers.Optimizer.zero_grad

    @functools.wraps(clear)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        journal.note(Note.ZERO_GRAD, 0, _now(), 0)
        return clear(self, *args, **kwargs)

    optimizers.Optimizer.zero_grad = zero_grad


def _watch_gradients(journal: Journal) -> None:
    numbers = WeakIdKeyDictionary()
    count = itertools.count()
    add = optimizers.Optimizer.add_param_group

    @functools.wraps(add)
    def add_param_group(self: Any, param_group: Any) -> None:
        add(self, param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                if parameter.requires_grad and parameter.is_leaf and parameter not in numbers:
                    numbers[parameter] = number = next(count)
                    _watch_gradient(journal, parameter, number)
        except Exception as error:  # the job goes on
            journal.give_up(error)

    optimizers.Optimizer.add_param_group = add_param_group


def _watch_gradient(journal: Journal, parameter: Any, number: int) -> None:
    journal.define(kind="parameter", number=number, bytes=_payload([parameter])[0])
    parameter.register_post_accumulate_grad_hook(_gradient_hook(journal, number))


def _gradient_hook(journal: Journal, number: int) -> Callable[[Any], None]:
    append, kind = journal.waiting.append, Note.GRADIENT

    def ready(parameter: Any, now: Callable[[], int] = time.monotonic_ns) -> None:
        append((kind, number, now(), 0))  # past journal.note: this is called for every parameter

    return ready


def _watch_backward(journal: Journal) -> None:
    torch.autograd.backward = _timed(journal, Note.BACKWARD, torch.autograd.backward)


def _watch_input(journal: Journal) -> None:
    iterator = dataloader._BaseDataLoaderIter
    iterator.__next__ = _timed(journal, Note.INPUT, iterator.__next__)


def _timed(journal: Journal, kind: int, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        journal.write_if_due()
        began_ns = _now()
        try:
            return original(*args, **kwargs)
        finally:
            journal.note(kind, 0, began_ns, _now())

    return timed


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
            journal.note(Note.EVALUATION, 0, began_ns.pop(), _now())
        return train(self, mode)

    module.eval, module.train = eval_, train_


def _watch_collectives(journal: Journal) -> None:
    collectives = _Collectives(journal)
    for name, op in _COLLECTIVES.items():
        original = vars(dist.ProcessGroup).get(name)
        if original is not None:  # which of them exist depends on torch's version
            setattr(dist.ProcessGroup, name, collectives.watched(original, op))
    dist.Work.wait = collectives.waiting(dist.Work.wait)


class _Collectives:
    """Notes each collective's issue and end, and numbers what they have in common."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._count = itertools.count()
        self._signatures: dict[tuple[Any, ...], int] = {}
        self._numbers = itertools.count()
        self._without_future = WeakIdKeyDictionary()
        os.register_at_fork(after_in_child=self._signatures.clear)

    def watched(self, original: Callable[..., Any], op: str) -> Callable[..., Any]:
        """Wrap one method of ProcessGroup."""

        @functools.wraps(original)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            issued_ns = _now()
            work = original(group, *args, **kwargs)
            if self._journal.is_open:
                try:
                    self._note(group, op, [*args, *kwargs.values()], issued_ns, work)
                except Exception as error:  # the job goes on
                    self._journal.give_up(error)
            return work

        return collective

    def _note(self, group: Any, op: str, arguments: list[Any], issued_ns: int, work: Any) -> None:
        number = next(self._count)
        size, dtype = _payload(arguments)
        signature = self._signature(op, dtype, size, group.group_name)
        self._journal.note(Note.ISSUE, number, signature, issued_ns)
        if work is not None:  # part of a coalesced group, which ends as a whole
            self._await_end(number, work)

    def _await_end(self, number: int, work: Any) -> None:
        try:
            future = work.get_future()
        except RuntimeError:  # Gloo's reduce-scatter has none: its end is known to who waits for it
            self._without_future[work] = number
        else:
            future.add_done_callback(functools.partial(self._ended, number))

    def waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Work.wait, as Python code calls it."""
        timed = _timed(self._journal, Note.WAIT, original)

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = timed(work, *args, **kwargs)
            if self._without_future and work in self._without_future:
                self._journal.note(Note.END, self._without_future.pop(work), _now(), 1)
            return result

        return wait

    def _ended(self, number: int, future: Any) -> None:
        ended_ns = _now()
        try:
            future.value()
        except Exception:  # the collective failed, as when a rank dies: it has no end
            return
        self._journal.note(Note.END, number, ended_ns, 0)

    def _signature(self, *words: Any) -> int:
        if words not in self._signatures:
            if not self._signatures:
                self._journal.define(
                    kind="identity", rank=dist.get_rank(), workers=dist.get_world_size(),
                    backend=dist.get_backend(), torch=torch.__version__,
                )  # fmt: skip
            self._signatures[words] = number = next(self._numbers)
            op, dtype, size, group = words
            self._journal.define(
                kind="signature", number=number, op=op, dtype=dtype, bytes=size, group=group
            )
        return self._signatures[words]


def _payload(arguments: list[Any]) -> tuple[int, str]:
    """Return the bytes of the larger side of a collective, and their type.

    The gathered side of a gather and the scattered side of a scatter are the larger: what all ranks
    together hold, as in `fullwire collective`.
    """
    sizes, dtype = [0], ""
    for argument in arguments:
        tensors = list(_tensors(argument))
        if tensors:
            sizes.append(sum(each.numel() * each.element_size() for each in tensors))
            dtype = str(tensors[0].dtype).removeprefix("torch.")
    return max(sizes), dtype


def _tensors(argument: Any) -> Iterator[Any]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from _tensors(each)


def _watch_data_parallel(journal: Journal) -> None:
    build, forward = DistributedDataParallel.__init__, DistributedDataParallel.forward
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # it replaces one
        build(self, *args, **kwargs)
        journal.define(kind="fact", name="buckets", value=_bucket_policy(self))

    @functools.wraps(forward)
    def forward_(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_ns = _now()
        try:
            return forward(self, *args, **kwargs)
        finally:
            journal.note(Note.FORWARD, int(not torch.is_grad_enabled()), began_ns, _now())

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Any) -> None:
        register(self, state, hook)
        name = getattr(hook, "__qualname__", type(hook).__name__)
        journal.define(kind="fact", name="hook", value=name)

    replaced = DistributedDataParallel
    replaced.__init__, replaced.forward = __init__, forward_
    replaced.register_comm_hook = register_comm_hook
    _watch_reducer(journal)


def _bucket_policy(model: Any) -> str:
    if getattr(model, "bucket_bytes_cap_default", False):
        return "ddp"
    mebibytes, rest = divmod(int(model.bucket_bytes_cap), 2**20)
    return f"ddp:{model.bucket_bytes_cap}B" if rest else f"ddp:{mebibytes}MiB"


def _watch_reducer(journal: Journal) -> None:
    """Give DDP's reducer, which is C++, a process group whose collectives can be seen."""
    build = dist.Reducer
    # The reducer holds the C++ half of a group only: its Python half must live as long.
    groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(build)
    def reducer(*args: Any, **kwargs: Any) -> Any:
        arguments = [_visible(each, journal) for each in args]
        built = build(*arguments, **kwargs)
        groups[built] = [each for each in arguments if isinstance(each, _VisibleGroup)]
        return built

    dist.Reducer = reducer


def _visible(argument: Any, journal: Journal) -> Any:
    if type(argument) is not dist.ProcessGroup:
        return argument
    try:
        return _VisibleGroup(argument)
    except Exception as error:  # DDP trains as it would; its buckets are not seen
        journal.define(kind="missing", sentence=f"DDP's buckets could not be watched: {error!r}")
        return argument


class _VisibleGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch may be absent when we check
    """A process group that sends C++ callers through the Python methods of the true one."""

    def __init__(self, true: Any) -> None:
        super().__init__(true.rank(), true.size())
        self._true = true
        for device in true._device_types:
            backend = true._get_backend(device)
            kind = self.BackendType.__members__.get(backend.name().upper(), self.BackendType.CUSTOM)
            self._set_default_backend(kind)
            self._register_backend(device, kind, backend)


def _forwarding(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._true, name)(*args, **kwargs)

    return forward


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(_VisibleGroup, _name, _forwarding(_name))
