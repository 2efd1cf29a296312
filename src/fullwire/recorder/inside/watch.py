"""Watch torch, through torch's own hooks where it has them.

    steps          the optimizer's global step hooks
    gradients      DDP's reducer keeps their times for its own statistics and returns them: one
                   question a pass for a model under DDP. Elsewhere a hook on every parameter notes
                   the time, which costs some microseconds each with caches full of the job's data.
                   Hooks are also used if the reducer's times would be incomplete: if unused
                   parameters count as ready, in a static graph, on a device (its times are events
                   in its queue), and after a step that the reducer knows nothing of
    backward       torch.autograd.backward, which Tensor.backward calls
    forward        DistributedDataParallel.forward; other models have no common place
    input          the data loader's __next__
    the rest       the thread's use between a step, or a batch, and DistributedDataParallel's
                   forward, for scripts that read their own batches
    evaluation     Module.train(False), which eval() calls, until Module.train()
    collectives    collectives.py

The recorder never reads or changes a tensor. It keeps weak references to the tensors of DDP's
buckets. It keeps a bucket's future, which holds the result, until the pass ends; if the bucket ends
later, until the next step or pass. It adds no synchronisation. The module clock.py takes times on
a CUDA device. ARCHITECTURE.md describes the other ways that were possible.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader
from torch.utils.weak import WeakIdKeyDictionary

from .buckets import NEVER_NS
from .clock import Clock, Moment, clock_of_this_torch
from .collectives import COLLECTIVES, Collectives, watch_collectives
from .ending import at_end, before_hard_end
from .gradients import UNKNOWN, Adding, gradient_bytes
from .journal import NOISE_VARIABLE, PROBE_VARIABLE, Journal, Note
from .metrics import watch_metrics
from .noise import SHARDING, GradientNoise
from .probes import Probes
from .processors import BeforeForward, Processors, before_forward_of
from .visible import watch_names, watch_reducer

_now = time.monotonic_ns
_CALIBRATION = 200
_SAVES = {  # The functions that write checkpoints, by module.
    "torch": ("save",),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "safetensors.torch": ("save_file",),
}
_WORTH_A_NOTE_NS = 1_000_000
_MOST_ASKED = 4096  # batches of a loader, ahead of the one that it gives


def watch(directory: str, after_import: Callable[[str, Callable[[], None]], None]) -> None:
    """Begin to record this process into a file in a directory."""
    after_import("torch._dynamo", _stay_out_of_graphs)
    journal = Journal(directory)
    journal.define(kind="fact", name="torch", value=str(torch.__version__))
    clock = clock_of_this_torch(journal)
    os.register_at_fork(after_in_child=journal.start_anew)
    noise = GradientNoise(journal) if os.environ.get(NOISE_VARIABLE) else None
    if noise is not None:
        after_import(SHARDING, noise.watch_shards)
    close = functools.partial(_close, journal, clock, noise)
    at_end(close)
    before_hard_end(close)
    after_import("fullwire.compression.hook", functools.partial(_watch_compression, journal))
    pipelining = functools.partial(journal.define, kind="fact", name="pipelining", value="torch")
    after_import("torch.distributed.pipelining", pipelining)
    gradients = watch_gradients(journal, clock, noise)
    before_forward = before_forward_of(journal)
    probes = None
    if os.environ.get(PROBE_VARIABLE) and dist.is_available():
        probes = Probes(journal)  # made first, so that its notes lie within the steps
        optimizers.register_optimizer_step_pre_hook(probes.step_begins)
        optimizers.register_optimizer_step_post_hook(probes.step_ended)
    collectives = None
    if dist.is_available():
        watch_reducer(journal, COLLECTIVES)
        watch_names(COLLECTIVES)
        collectives = watch_collectives(journal, clock, probes)
        _watch_data_parallel(journal, clock, before_forward, probes)
    _watch_steps(journal, clock, gradients, before_forward, collectives)
    _watch_input(journal, before_forward)
    watch_metrics(journal, after_import)
    _watch_evaluation(journal, gradients)
    for place, names in _SAVES.items():
        after_import(place, functools.partial(_watch_saving, journal, place, names))
    _watch_backward(journal, clock, gradients, noise, collectives)


def _stay_out_of_graphs() -> None:
    """Make torch.compile skip our functions: it would trace them, and some would end the job."""
    with contextlib.suppress(Exception):  # the job goes on
        torch._dynamo.trace_rules.add(__package__)


def _close(journal: Journal, clock: Clock, noise: GradientNoise | None) -> None:
    clock.close()
    if noise is not None:
        noise.close()
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
            note_ns=note_ns,  # spent_ns includes some notes as well
            spent_ns=journal.notes.spent_ns,
        )
    journal.close()


def _watch_steps(
    journal: Journal,
    clock: Clock,
    gradients: Gradients,
    before_forward: BeforeForward,
    collectives: Collectives | None,
) -> None:
    numbers = _ByObject()
    began: dict[int, Moment] = {}
    count = itertools.count()
    processors = Processors(journal)
    settle = None if collectives is None else collectives.buckets.settle
    note_short_delay = processors.short.note

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        number = numbers.get(id(optimizer))
        if number is None:
            number = next(count)
            numbers.put(optimizer, number)
            if number == 0:  # Only now: a script may set the threads before it trains.
                journal.define(kind="fact", name="threads", value=torch.get_num_threads())
        if not gradients.is_in_pass:
            if gradients.due:
                gradients.tell(0)  # for a pass that did not go through torch.autograd.backward
            gradients.expect(optimizer)
        began[number] = clock.moment()
        if settle is not None:
            settle(NEVER_NS)  # buckets that ended after their pass, or in one that nobody saw

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        ended, started = clock.moment(), journal.starts_work()
        number = numbers[id(optimizer)]
        clock.note(Note.OPTIMIZER, number, began[number], ended)
        gradients.adding.step_ended(number)
        if clock.knows_devices:
            clock.collect()
        if not note_short_delay():
            processors.note_delay()
        if _now() >= processors.due_ns:
            processors.note_if_due()
        if collectives is not None:
            collectives.step_ended()
        journal.write_if_due()
        journal.ends_work(started)
        before_forward.begins()

    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)
    clear, note_now = optimizers.Optimizer.zero_grad, journal.notes.add_now

    @functools.wraps(clear)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        note_now(Note.ZERO_GRAD, 0)
        return clear(self, *args, **kwargs)

    optimizers.Optimizer.zero_grad = zero_grad


def _watch_backward(
    journal: Journal,
    clock: Clock,
    gradients: Gradients,
    noise: GradientNoise | None,
    collectives: Collectives | None,
) -> None:
    backward, adding = torch.autograd.backward, gradients.adding
    settle = None if collectives is None else collectives.buckets.settle

    @functools.wraps(backward)
    def backward_(*args: Any, **kwargs: Any) -> Any:
        if gradients.is_in_pass:  # a checkpoint's pass, inside the noted one
            return backward(*args, **kwargs)
        journal.write_if_due()
        # In this order, because no gradient may be ready before its pass began.
        adding.pass_begins()
        gradients.is_in_pass, began, after_ns = True, clock.moment(), _now()
        well_since_ns = NEVER_NS  # if the pass fails
        try:
            result = backward(*args, **kwargs)
            well_since_ns = after_ns
        finally:
            gradients.is_in_pass = False
            gradients.backwards += 1
            ended = clock.moment()
            made = adding.pass_ended() if adding.looks else UNKNOWN
            clock.note(Note.BACKWARD, made, began, ended)
            if settle is not None:
                settle(well_since_ns)
        if gradients.due:
            gradients.tell(after_ns)
        if noise is not None:
            noise.pass_ended()
        return result

    torch.autograd.backward = backward_


def _watch_compression(journal: Journal) -> None:
    """Note what a codec's guard measures; all ranks measure the same."""

    def note(compression: Any, found: Any) -> None:
        for name, value in (
            ("compression_error", found.squared_error),
            ("compression_zeroed_share", found.zeroed_share),
            ("compression_unsent_norm", found.unsent_norm),
            ("compression_widened", found.widened),
            ("compression_stopped", compression.steps if compression.is_off else None),
        ):
            if value is not None and math.isfinite(value):
                journal.define(kind="fact", name=name, value=value)

    sys.modules["fullwire.compression.hook"].LISTENERS.append(note)


def _watch_input(journal: Journal, before_forward: BeforeForward) -> None:
    """Note how long each batch of a loader took, and how many samples the loader asked for.

    Libraries divide a loader's batches among ranks, so its own batch size tells too little. The
    indices of a batch do not. A loader with workers asks for some batches ahead, in order.
    """
    iterator = dataloader._BaseDataLoaderIter
    original, ask, reset = iterator.__next__, iterator._next_index, iterator._reset
    # The number of each way through a loader, and the samples that it has asked for.
    asked: weakref.WeakKeyDictionary[Any, tuple[int, deque[int]]] = weakref.WeakKeyDictionary()
    ways = itertools.count()

    @functools.wraps(ask)
    def next_index(self: Any) -> Any:
        index = ask(self)
        is_batch = isinstance(index, list) or (self._auto_collation and hasattr(index, "__len__"))
        samples = len(index) if is_batch else 0  # nothing tells them
        if self not in asked:
            asked[self] = next(ways), deque(maxlen=_MOST_ASKED)
        asked[self][1].append(samples)
        return index

    @functools.wraps(reset)
    def begins_again(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.pop(self, None)  # batches that the program left
        return reset(self, *args, **kwargs)

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        journal.write_if_due()
        began_ns = _now()
        try:
            result = original(*args, **kwargs)
        finally:
            ended_ns = _now()
            journal.note(Note.INPUT, 0, began_ns, ended_ns - began_ns)
            before_forward.begins()
        way, ahead = asked.get(args[0], (0, None))
        samples = ahead.popleft() if ahead else 0
        if samples and torch.is_grad_enabled():  # else it is an evaluation's loader
            journal.note(Note.SAMPLES, samples, ended_ns, way)
        return result

    iterator.__next__, iterator._next_index, iterator._reset = timed, next_index, begins_again


def _watch_evaluation(journal: Journal, gradients: Gradients) -> None:
    """Note the time without a backward pass from Module.train(False) to Module.train().

    A part of a model that stays frozen is put in this mode too, and then a backward pass follows.
    """
    began: list[tuple[int, int]] = []  # the time, and the backward passes up to then
    train = torch.nn.Module.train

    @functools.wraps(train)
    def train_(self: Any, mode: bool = True) -> Any:
        if began and began[0][1] != gradients.backwards:
            began.clear()
        if began and mode:
            start_ns, _ = began.pop()
            journal.note(Note.EVALUATION, 0, start_ns, _now() - start_ns)
        elif not mode and not began and self.training:  # eval() calls this too
            began.append((_now(), gradients.backwards))
        return train(self, mode)

    torch.nn.Module.train = train_


def _watch_saving(journal: Journal, place: str, names: Sequence[str]) -> None:
    """Note how long the program's own thread writes checkpoints."""

    def timed(save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def saves(*args: Any, **kwargs: Any) -> Any:
            began_ns = _now()
            try:
                return save(*args, **kwargs)
            finally:
                lasted_ns = _now() - began_ns
                is_own = threading.current_thread() is threading.main_thread()
                if is_own and lasted_ns > _WORTH_A_NOTE_NS:
                    journal.note(Note.CHECKPOINT, 0, began_ns, lasted_ns)

        return saves

    module = sys.modules[place]
    for name in names:
        if hasattr(module, name):
            setattr(module, name, timed(getattr(module, name)))


def _watch_data_parallel(
    journal: Journal, clock: Clock, before_forward: BeforeForward, probes: Probes | None
) -> None:
    build, forward = DistributedDataParallel.__init__, DistributedDataParallel.forward
    register = DistributedDataParallel.register_comm_hook
    register_builtin = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # it replaces one
        build(self, *args, **kwargs)
        if getattr(self, "bucket_bytes_cap_default", False):
            policy = "ddp"
        else:
            mebibytes, rest = divmod(int(self.bucket_bytes_cap), 2**20)
            policy = f"ddp:{self.bucket_bytes_cap}B" if rest else f"ddp:{mebibytes}MiB"
        journal.define(kind="fact", name="buckets", value=policy)

    @functools.wraps(forward)
    def forward_(self: Any, *args: Any, **kwargs: Any) -> Any:
        before_forward.ends()
        first: Any = args[0] if args else None
        rows = first.size(0) if type(first) is torch.Tensor and first.dim() else _rows(args, kwargs)
        began = clock.moment()
        try:
            return forward(self, *args, **kwargs)
        finally:
            kind = Note.FORWARD if torch.is_grad_enabled() else Note.INFERENCE
            clock.note(kind, rows, began, clock.moment())

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Any) -> None:
        register(self, state, hook)
        name = getattr(hook, "__qualname__", type(hook).__name__)
        journal.define(kind="fact", name="hook", value=name)

    @functools.wraps(register_builtin)
    def register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        register_builtin(self, comm_hook_type)
        if probes is not None:
            probes.stop()
        journal.define(kind="fact", name="hook", value=str(comm_hook_type))

    replaced = DistributedDataParallel
    replaced.__init__, replaced.forward = __init__, forward_
    run = getattr(replaced, "_run_ddp_forward", None)  # when the ranks have exchanged buffers
    if probes is not None and run is not None:
        replaced._run_ddp_forward = probes.before_passes(run)
    replaced.register_comm_hook = register_comm_hook
    replaced._register_builtin_comm_hook = register_builtin_comm_hook


def _rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the rows of the first tensor that is given, which are mostly samples."""
    tensors = (
        each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim()
    )
    return next(map(len, tensors), 0)


class _ByObject(dict[int, Any]):
    """Values by the identity of an object, which go with the object.

    Objects may be equal to others, or have no hash. A question costs a tenth of what it costs a
    WeakIdKeyDictionary, whose references are Python's own.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}

    def put(self, thing: Any, value: Any) -> None:
        """Keep a value as long as the object lives."""
        key = id(thing)

        def drop(_: object) -> None:
            self.pop(key, None)
            self._references.pop(key, None)

        self._references[key], self[key] = weakref.ref(thing, drop), value


class Gradients:
    """Numbers parameters, and notes when their gradients are ready."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._count = itertools.count()
        self._hooked = WeakIdKeyDictionary()  # parameters with hooks
        self._account_of = WeakIdKeyDictionary()  # accounts of the parameters that reducers hold
        self.by_reducer = _ByObject()  # accounts
        self._by_optimizer = _ByObject()  # accounts, with their passes at its last step
        self.due: set[_Account] = set()  # accounts whose pass has begun
        self.adding = Adding(journal)
        self.is_in_pass = False
        self.backwards = 0  # passes through torch.autograd.backward

    def watch(self, optimizer: Any, parameters: Iterable[Any]) -> None:
        """Hook the parameters of an optimizer, except those whose times a reducer gives."""
        accounts, parameters = self._by_optimizer.get(id(optimizer)), [*parameters]
        if accounts is None:
            accounts = {}
            self._by_optimizer.put(optimizer, accounts)
            self.adding.watch(parameters)
        for parameter, size in zip(parameters, gradient_bytes(parameters), strict=True):
            account = self._account_of.get(parameter)
            if account is not None and account.is_kept:
                accounts[account] = account.passes
            elif parameter.requires_grad and parameter.is_leaf and parameter not in self._hooked:
                self._hooked[parameter] = True
                number = self._number(size)
                if parameter.is_cuda:
                    hook = _device_hook(self._clock, number)
                else:
                    hook = hook_of(self._journal, number)
                parameter.register_post_accumulate_grad_hook(hook)

    def _number(self, size: int) -> int:
        number = next(self._count)
        self._journal.define(kind="parameter", number=number, bytes=size)
        return number

    def keep_account(self, reducer: Any, parameters: Sequence[Any]) -> None:
        """Use a reducer's times from now on, unless its parameters have hooks or device events."""
        if not any(parameter.is_cuda or parameter in self._hooked for parameter in parameters):
            first, *_ = [self._number(size) for size in gradient_bytes(parameters)]
            account = _Account(reducer, first, len(parameters))
            self.by_reducer.put(reducer, account)
            for parameter in parameters:
                self._account_of[parameter] = account

    def distrust(self, reducer: Any) -> None:
        """Leave the parameters of a reducer to hooks."""
        account = self.by_reducer.get(id(reducer))
        if account is not None:
            account.is_kept = False
            self.by_reducer.put(reducer, None)

    def tell(self, since_ns: int) -> None:
        """Note the gradients of the passes that have ended; all were ready after `since_ns`."""
        started = self._journal.starts_work()
        try:
            while self.due:
                self.due.pop().tell(self._journal, since_ns)
        except Exception as error:  # the job goes on
            self._journal.give_up(error)
        self._journal.ends_work(started)

    def expect(self, optimizer: Any) -> None:
        """Hook parameters that an optimizer steps again while reducers saw no further pass."""
        accounts = self._by_optimizer.get(id(optimizer))
        if not accounts:
            return
        is_silent = False
        for account, passes in accounts.items():
            accounts[account] = account.passes
            if account.passes == passes:
                account.is_kept, is_silent = False, True
        if is_silent:
            for account in [account for account in accounts if not account.is_kept]:
                del accounts[account]
            for group in optimizer.param_groups:
                self.watch(optimizer, group["params"])


class _Account:
    """The times that one reducer gives for its parameters."""

    def __init__(self, reducer: Any, first: int, count: int) -> None:
        self._reducer = weakref.ref(reducer)
        self._first = first  # the number of its first parameter; the others follow
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
        # Another thread may have had the processor between our reading of the clock and the
        # reducer's.
        journal.notes.add_pass(self._first, self.begun_ns, since_ns, ready_ns)


def watch_gradients(
    journal: Journal, clock: Clock, noise: GradientNoise | None = None
) -> Gradients:
    """Begin to note the gradients of optimizers' parameters."""
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
    if not dist.is_available() or not hasattr(dist.Reducer, "get_backward_stats"):
        return gradients
    build, build_model = dist.Reducer, DistributedDataParallel.__init__
    prepare = vars(build)["prepare_for_backward"]  # the form that binds to an instance
    by_reducer, due = gradients.by_reducer, gradients.due

    @functools.wraps(build)
    def reducer(parameters: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        built = build(parameters, *args, **kwargs)
        try:
            gradients.keep_account(built, parameters)
            gradients.adding.watch(parameters)
            if noise is not None:
                noise.watch(parameters)
        except Exception as error:  # the job goes on
            journal.give_up(error)
        return built

    @functools.wraps(prepare)
    def prepare_for_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        account = by_reducer.get(id(self))
        if account is not None:
            account.begun_ns = _now()  # the reducer counts from here
            due.add(account)
        if noise is not None:
            noise.reduces(self)
        return prepare(self, *args, **kwargs)

    @functools.wraps(build_model)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # it replaces one
        build_model(self, *args, **kwargs)
        if self.find_unused_parameters or self.static_graph:
            gradients.distrust(getattr(self, "reducer", None))

    build.prepare_for_backward = prepare_for_backward
    dist.Reducer = reducer
    DistributedDataParallel.__init__ = __init__
    return gradients


def hook_of(journal: Journal, number: int) -> Callable[[Any], None]:
    """Make the hook of a parameter on the host."""
    note_now, kind = journal.notes.add_now, Note.GRADIENT

    def ready(parameter: Any) -> None:
        note_now(kind, number)  # without journal.note, as every parameter calls this

    return ready


def _device_hook(clock: Clock, number: int) -> Callable[[Any], None]:
    def ready(parameter: Any) -> None:
        clock.note_one(Note.GRADIENT, number, clock.moment())

    return ready
