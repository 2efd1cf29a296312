"""When each parameter's gradient was ready.

DDP's reducer keeps these times for its own statistics and tells them for the asking: for a model
under DDP that is one question a pass. Elsewhere a hook on every parameter notes the time, which
costs some microseconds each while the caches are the job's. It is hooks as well where the reducer's
account would not be whole: where unused parameters count as ready, in a static graph, on a device,
whose times are events in its queue, and from the moment that a step was taken of which it knows
nothing.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.weak import WeakIdKeyDictionary

from .clock import Clock
from .journal import Journal, Note

_now = time.monotonic_ns


class Gradients:
    """Numbers parameters, and notes when their gradients are ready."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._count = itertools.count()
        self._hooked = WeakIdKeyDictionary()  # parameters
        self._account_of = WeakIdKeyDictionary()  # parameters that a reducer holds
        self._by_reducer: weakref.WeakKeyDictionary[Any, _Account] = weakref.WeakKeyDictionary()
        self._by_optimizer = WeakIdKeyDictionary()  # accounts, and their passes up to its last step
        self._due: set[_Account] = set()  # whose pass has begun
        self.is_in_pass = False

    def watch(self, optimizer: Any, parameters: Iterable[Any]) -> None:
        """Hook what an optimizer steps, except where a reducer tells of it."""
        accounts = self._by_optimizer.setdefault(optimizer, {})
        for parameter in parameters:
            account = self._account_of.get(parameter)
            if account is not None and account.is_kept:
                accounts[account] = account.passes
            elif parameter.requires_grad and parameter.is_leaf and parameter not in self._hooked:
                self._hooked[parameter] = True
                number = self._number(parameter)
                if parameter.is_cuda:
                    hook = _device_hook(self._clock, number)
                else:
                    hook = hook_of(self._journal, number)
                parameter.register_post_accumulate_grad_hook(hook)

    def _number(self, parameter: Any) -> int:
        number = next(self._count)
        size = parameter.numel() * parameter.element_size()
        self._journal.define(kind="parameter", number=number, bytes=size)
        return number

    def keep_account(self, reducer: Any, parameters: Sequence[Any]) -> None:
        """Ask a reducer from now on, unless its parameters have hooks or their times are events."""
        if not any(parameter.is_cuda or parameter in self._hooked for parameter in parameters):
            first, *_ = [self._number(parameter) for parameter in parameters]
            account = _Account(reducer, first, len(parameters))
            self._by_reducer[reducer] = account
            for parameter in parameters:
                self._account_of[parameter] = account

    def distrust(self, reducer: Any) -> None:
        """Leave the parameters of a reducer to hooks."""
        if reducer in self._by_reducer:
            self._by_reducer.pop(reducer).is_kept = False

    def begin(self, reducer: Any) -> None:
        """Remember when a pass began: from here its reducer counts."""
        account = self._by_reducer.get(reducer)
        if account is not None:
            account.begun_ns = _now()
            self._due.add(account)

    def tell(self, since_ns: int) -> None:
        """Note what was ready in the passes that have ended; nothing was before that time."""
        started = self._journal.starts_work()
        try:
            while self._due:
                self._due.pop().tell(self._journal, since_ns)
        except Exception as error:  # the job goes on
            self._journal.give_up(error)
        self._journal.ends_work(started)

    def expect(self, optimizer: Any) -> None:
        """Hook what an optimizer steps again although no reducer has told of another pass."""
        accounts = self._by_optimizer.get(optimizer, {})
        silent = [account for account, passes in accounts.items() if account.passes == passes]
        for account in silent:
            account.is_kept = False
            del accounts[account]
        for group in optimizer.param_groups if silent else ():
            self.watch(optimizer, group["params"])
        for account in accounts:
            accounts[account] = account.passes


class _Account:
    """What one reducer tells of its parameters."""

    def __init__(self, reducer: Any, first: int, count: int) -> None:
        self._reducer = weakref.ref(reducer)
        self._first = first  # its parameters have the numbers from this one on
        self._latest = [0] * count
        self.begun_ns = 0
        self.passes = 0
        self.is_kept = True

    def tell(self, journal: Journal, since_ns: int) -> None:
        """Note each gradient of the pass that has ended, if there was one."""
        reducer = self._reducer()
        ready_ns = reducer.get_backward_stats() if reducer and self.is_kept else self._latest
        if ready_ns == self._latest:
            return
        self._latest = ready_ns
        self.passes += 1
        # Between our look at the clock and the reducer's, another may have had the processor.
        journal.note_pass(self._first, max(self.begun_ns, since_ns - min(ready_ns)), ready_ns)


def watch_gradients(journal: Journal, clock: Clock) -> Gradients:
    """Begin to note gradients of what optimizers step."""
    gradients = Gradients(journal, clock)
    add = optimizers.Optimizer.add_param_group

    @functools.wraps(add)
    def add_param_group(self: Any, param_group: Any) -> None:
        add(self, param_group)
        try:
            gradients.watch(self, self.param_groups[-1]["params"])
        except Exception as error:  # the job goes on
            journal.give_up(error)

    optimizers.Optimizer.add_param_group = add_param_group
    if dist.is_available() and hasattr(dist.Reducer, "get_backward_stats"):
        _watch_reducers(journal, gradients)
    return gradients


def _watch_reducers(journal: Journal, gradients: Gradients) -> None:
    build, build_model = dist.Reducer, DistributedDataParallel.__init__
    prepare = vars(build)["prepare_for_backward"]  # as it binds to an instance

    @functools.wraps(build)
    def reducer(parameters: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        built = build(parameters, *args, **kwargs)
        try:
            gradients.keep_account(built, parameters)
        except Exception as error:  # the job goes on
            journal.give_up(error)
        return built

    @functools.wraps(prepare)
    def prepare_for_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        gradients.begin(self)
        return prepare(self, *args, **kwargs)

    @functools.wraps(build_model)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # it replaces one
        build_model(self, *args, **kwargs)
        if self.find_unused_parameters or self.static_graph:
            gradients.distrust(getattr(self, "reducer", None))

    build.prepare_for_backward = prepare_for_backward
    dist.Reducer = reducer
    DistributedDataParallel.__init__ = __init__


def hook_of(journal: Journal, number: int) -> Callable[[Any], None]:
    """Make the hook of a parameter on the host."""
    append, kind = journal.waiting.append, Note.GRADIENT

    def ready(parameter: Any, now: Callable[[], int] = time.monotonic_ns) -> None:
        append((kind, number, now(), 0))  # past journal.note: this is called for every parameter

    return ready


def _device_hook(clock: Clock, number: int) -> Callable[[Any], None]:
    def ready(parameter: Any) -> None:
        clock.note_one(Note.GRADIENT, number, clock.moment())

    return ready
