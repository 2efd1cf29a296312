"""Note each collective's issue and end, and the own work of communication hooks.

The recorder wraps the methods of torch.distributed.ProcessGroup. All of Python's collectives (and
FSDP2's, and communication hooks') go through them. C++ gets groups that send it through the same
methods (`VisibleGroup`). A transfer between two ranks is a collective of these two. It has a group
of its own, in which sender and receiver count alike.

A collective ends when its future is done. A callback of the future notes the time, so waiting for
the collective has no part in it.

A communication hook is called as usual. The time until it returns is its own work, except the time
of issuing collectives and waiting for them. Functions that it leaves for the end of a future count
as its own work too, on any thread.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.optim import optimizer as optimizers
from torch.utils.weak import WeakIdKeyDictionary

from .clock import Clock, Moment
from .ending import at_end
from .journal import Journal, Note, framework_in_use
from .probes import Probes
from .processors import HookWork, left_for_later

_COLLECTIVES = {
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce",
    "allgather": "allgather",
    "_allgather_base": "allgather",
    "all_gather_single": "allgather",
    "allgather_coalesced": "allgather",
    "allgather_into_tensor_coalesced": "allgather",
    "all_gather_single_coalesced": "allgather",
    "reduce_scatter": "reducescatter",
    "_reduce_scatter_base": "reducescatter",
    "reduce_scatter_single": "reducescatter",
    "reduce_scatter_tensor_coalesced": "reducescatter",
    "reduce_scatter_single_coalesced": "reducescatter",
    "alltoall": "alltoall",
    "alltoall_base": "alltoall",
    "all_to_all_single": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
MOST_SIGNATURES = 4096  # kept for use by number; sizes may change with every call
_MUCH_MORE = 1.1  # times what was noted: a loss is noted again
_LOOK_S, _MOST_LOOKS = 0.001, 2000  # a collective never ends if its other ranks are gone
_GOODBYE_S = 0.02
_now = time.monotonic_ns
_SEQUENCES = (list, tuple)
_when_done = torch._C.Future.add_done_callback  # torch's own, as the hooks' use of it is watched


def watch_collectives(journal: Journal, clock: Clock, probes: Probes | None) -> None:
    """Begin to note the collectives of all callers."""
    codec = HookWork(journal)
    collectives = _Collectives(journal, clock, codec, probes)
    for name, op in _COLLECTIVES.items():
        original = vars(dist.ProcessGroup).get(name)
        if original is not None:  # some versions of torch lack some methods
            setattr(dist.ProcessGroup, name, collectives.watched(original, op))
    dist.Work.wait = collectives.waiting(dist.Work.wait)
    _watch_subclasses(dist.ProcessGroup, _COLLECTIVES, collectives.watched)
    _watch_subclasses(
        dist.Work, {"wait": "wait"}, lambda original, _: collectives.waiting(original)
    )
    # Watch DDP's hooks, and the functions that they leave for later. C++ hooks stay unseen.
    register = dist._register_comm_hook

    @functools.wraps(register)
    def register_comm_hook(reducer: Any, state: Any, hook: Callable[..., Any]) -> None:
        register(reducer, state, codec.working(hook))

    dist._register_comm_hook = register_comm_hook
    future = torch._C.Future
    wait = codec.apart(future.wait)
    future.wait = wait if probes is None else probes.waiting(wait)
    for name in ("then", "add_done_callback"):
        setattr(future, name, left_for_later(getattr(future, name), codec))
    watch_reducer(journal, _COLLECTIVES)
    watch_names(_COLLECTIVES)
    optimizers.register_optimizer_step_post_hook(collectives.step_ended)


def _watch_subclasses(
    base: Any, words: Mapping[str, str], watched: Callable[[Any, str], Any]
) -> None:
    """Watch the methods that Python classes override, if the classes note times themselves.

    Other classes forward to a group whose methods are watched already. Some classes exist by now:
    `fullwire apply` changes the process before the recorder begins.
    """

    def watch(cls: Any) -> None:
        if vars(cls).get("tells_times"):
            for name, original in list(vars(cls).items()):
                if name in words:
                    setattr(cls, name, watched(original, words[name]))
        for below in cls.__subclasses__():
            watch(below)

    base.__init_subclass__ = classmethod(lambda cls, **_: watch(cls))
    watch(base)


class _Collectives:
    """Notes each collective's issue and end, and numbers the signatures that they share."""

    def __init__(self, journal: Journal, clock: Clock, codec: HookWork, probes: Any) -> None:
        self._journal = journal
        self._clock = clock
        self._codec = codec
        self._probes = probes
        self._count = itertools.count()
        self._signatures: dict[tuple[Any, ...], int] = {}
        self._numbers = itertools.count()
        self._is_identified = False
        self._without_future = WeakIdKeyDictionary()
        self._under_way: set[int] = set()  # Collectives whose end is still to come.
        # Collectives that keep their own times.
        self._telling: deque[tuple[int, Any, Any]] = deque()
        self._rounding = _Rounding(journal)
        self._unseen = Unseen(journal)
        os.register_at_fork(after_in_child=self._forget)
        at_end(self._await_the_last)

    def _forget(self) -> None:
        self._signatures.clear()
        self._under_way.clear()
        self._telling.clear()
        self._unseen = Unseen(self._journal)
        self._is_identified = False

    def _await_the_last(self) -> None:
        """Wait for the transports' callbacks, which would abort the process while Python ends."""
        self._unseen.say()
        for _ in range(_MOST_LOOKS):  # a count, as their threads stall whenever this one does
            if not self._under_way:
                break
            time.sleep(_LOOK_S)
        self._hear_ends()
        self._rounding.tell()
        if self._signatures:
            time.sleep(_GOODBYE_S)  # the callbacks have returned, and are being freed

    def step_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Look now and then for collectives that the wrappers missed."""
        try:  # a job that sends nothing has a group all the same, which tells its rank
            if not self._is_identified and dist.is_initialized():
                self._identify()
            self._unseen.step_ends()
        except Exception as error:  # the job goes on
            self._journal.give_up(error)

    def watched(self, original: Callable[..., Any], op: str) -> Callable[..., Any]:
        """Wrap one method of ProcessGroup."""
        knows_devices = self._clock.knows_devices

        @functools.wraps(original)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            if self._codec.is_working():
                return apart(group, *args, **kwargs)
            first = next(filter(None, map(_tensors, args)), None) if knows_devices else None
            on_device = bool(first and first[0].is_cuda)
            issued = self._clock.moment() if on_device else _now()
            work = original(group, *args, **kwargs)
            if self._journal.is_open:
                started = self._journal.starts_work()
                try:
                    self._note(group, op, (*args, *kwargs.values()), issued, on_device, work)
                except Exception as error:  # the job goes on
                    self._journal.give_up(error)
                self._journal.ends_work(started)
            return work

        apart = self._codec.apart(collective)
        if self._probes is None:
            return collective
        held_back = self._probes.around(collective, op)

        @functools.wraps(original)
        def chosen(group: Any, *args: Any, **kwargs: Any) -> Any:
            # Another thread sends for a hook: the backward pass goes on beside it in any case.
            send = collective if self._codec.is_working_later() else held_back
            return send(group, *args, **kwargs)

        return chosen

    def _note(
        self,
        group: Any,
        op: str,
        arguments: Sequence[Any],
        issued: Moment,
        on_device: bool,
        work: Any,
    ) -> None:
        """Note the issue of a collective, and arrange the note of its end."""
        number = next(self._count)
        size, dtype = _payload(op, arguments)
        among = group.group_name
        self._unseen.seen[among] += getattr(group, "counts_as", 1)
        if op in ("send", "recv"):
            # A group of two ranks, sender first. A receive from any sender has no rank.
            here = group.rank()
            other = arguments[1] if len(arguments) > 2 else "any"
            among += f" {here}>{other}" if op == "send" else f" {other}>{here}"
        self._clock.note_one(Note.ISSUE, number, issued, self._signature(op, dtype, size, among))
        if work is None:  # part of a coalesced group, which ends as a whole
            return
        if getattr(work, "tells_times", False):
            self._hear_ends()
            self._telling.append((number, work.tasks, group))
            return
        try:
            future = work.get_future()
        except RuntimeError:  # some of Gloo's have no future: only their waiter knows the end
            self._without_future[work] = number
        else:
            self._under_way.add(number)
            _when_done(future, functools.partial(self._ended, number, on_device))

    def _hear_ends(self) -> None:
        """Note the times that a transport has kept, which are exact at any later time."""
        while self._telling and all(task.is_done for task in self._telling[0][1]):
            number, tasks, group = self._telling.popleft()
            self._rounding.add(tasks, group)
            if not any(task.problem for task in tasks):
                _, begun_ns, heard_ns, ended_ns, reducing_ns, sent_bytes = zip(
                    *(task.times for task in tasks), strict=True
                )
                begin_ns, end_ns = min(begun_ns), max(ended_ns)
                heard_ns = min(filter(None, heard_ns), default=begin_ns)  # a lone rank hears none
                for kind, told in (
                    (Note.BEGUN, end_ns - begin_ns),
                    (Note.HEARD, end_ns - heard_ns),
                    (Note.REDUCED, sum(reducing_ns)),
                    (Note.SENT, sum(sent_bytes)),
                    (Note.END, 0),
                ):
                    self._journal.note(kind, number, end_ns, told)

    def waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Work.wait, as Python code calls it."""
        wait_apart = self._codec.apart(original)

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            self._journal.write_if_due()
            began_ns = _now()
            try:
                result = wait_apart(work, *args, **kwargs)
            finally:
                self._journal.note(Note.WAIT, 0, began_ns, _now() - began_ns)
            self._hear_ends()
            if self._without_future and work in self._without_future:
                self._journal.note(Note.END, self._without_future.pop(work), _now(), 1)
            return result

        return wait

    def _ended(self, number: int, on_device: bool, future: Any) -> None:
        # On a device, this is called once all work is queued. The current stream waits for the
        # result, so the moment is an event there. Else this is called once the result is there.
        ended = self._clock.moment() if on_device else _now()
        started = self._journal.starts_work()
        try:
            future.value()
        except Exception:  # the collective failed, for example as a rank died: it has no end
            pass
        else:
            self._clock.note_one(Note.END, number, ended)
        self._under_way.discard(number)
        self._journal.ends_work(started)

    def _signature(self, op: str, dtype: Any, size: int, group: str) -> int:
        number = self._signatures.get((op, dtype, size, group))
        if number is not None:
            return number
        if len(self._signatures) >= MOST_SIGNATURES:
            self._signatures.clear()
        self._identify()
        self._signatures[op, dtype, size, group] = number = next(self._numbers)
        name = "" if dtype is None else str(dtype).removeprefix("torch.")
        self._journal.define(
            kind="signature", number=number, op=op, dtype=name, bytes=size, group=group
        )
        return number

    def _identify(self) -> None:
        """Note the rank and its group's back end, once."""
        if self._is_identified:
            return
        self._is_identified = True
        # An elastic job has groups of its own alone, of Fullwire's transport.
        rank, workers, backend = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1"), ""
        if dist.is_initialized():
            rank, workers, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
        self._journal.define(
            kind="identity", rank=int(rank), workers=int(workers), backend=backend or "fullwire"
        )
        # Fullwire's transport gives its congestion control. Other back ends keep theirs.
        congestion = getattr(dist.group.WORLD, "congestion", None)
        if congestion is not None:
            self._journal.define(kind="fact", name="transport_congestion", value=congestion)
        framework = framework_in_use()
        if framework is not None:
            self._journal.define(kind="fact", name="framework", value=framework)


class _Rounding:
    """What a transport lost by packing, so far: noted where it has grown, and at the end."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._facts: dict[str, Any] = {}
        self._told: dict[str, Any] = {}

    def add(self, tasks: Sequence[Any], group: Any) -> None:
        """Count what the tasks of a collective have packed."""
        packed = [task for task in tasks if any(getattr(task, "rounding", ()))]
        for task in packed:
            error, messages, widened = task.rounding
            so_far = self._facts
            self._facts = {
                "wire": task.description.rpartition(" as ")[2],
                "wire_error": max(error, so_far.get("wire_error", 0.0)),
                "wire_messages": messages + so_far.get("wire_messages", 0),
                "wire_widened": widened + so_far.get("wire_widened", 0),
            }
        if packed and (stopped := getattr(group, "fallen_back_after", "")):
            self._facts["wire_stopped"] = stopped
        has_grown = any(
            self._facts.get(name, 0) > _MUCH_MORE * self._told.get(name, 0)
            for name in ("wire_error", "wire_widened")
        )
        if has_grown or len(self._facts) > len(self._told):
            self.tell()

    def tell(self) -> None:
        """Note what has changed since it was noted last."""
        for name, value in self._facts.items() - self._told.items():
            if not isinstance(value, float) or math.isfinite(value):
                self._journal.define(kind="fact", name=name, value=value)
        self._told = dict(self._facts)


def _payload(op: str, arguments: Sequence[Any]) -> tuple[int, Any]:
    """Return the bytes of the larger side of a collective, and their type if there are any.

    The gathered side of a gather and the scattered side of a scatter are the larger ones. They hold
    the data of all ranks together, as in `fullwire collective`.
    """
    tensors = arguments[0] if op == "allreduce" and arguments else None
    if type(tensors) is list and len(tensors) == 1 and type(tensors[0]) is torch.Tensor:
        # A short way for DDP's buckets: with cold caches, the long way takes 30 us.
        return tensors[0].numel() * tensors[0].element_size(), tensors[0].dtype
    most, dtype = 0, None
    for argument in arguments:
        tensors = _tensors(argument)
        if tensors:
            most = max(most, sum([tensor.numel() * tensor.element_size() for tensor in tensors]))
            dtype = tensors[0].dtype
    return most, dtype


def _tensors(argument: Any) -> list[Any]:
    if isinstance(argument, _SEQUENCES):
        return [tensor for element in argument for tensor in _tensors(element)]
    return [argument] if isinstance(argument, torch.Tensor) else []


_EVERY_NS = 250_000_000
_Look: TypeAlias = dict[str, tuple[int, int]]  # by group: collectives that it counts, and seen ones


class Unseen:
    """Compares the collectives seen of each group with the group's own count."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._first: _Look | None = None
        self._last: _Look = {}
        self._steps = 0
        self._looked_ns = 0
        self.seen: Counter[str] = Counter()  # by name of the group, since the group began

    def step_ends(self) -> None:
        """Look at the counts, if the last look is long enough ago."""
        self._steps += 1
        now_ns = time.monotonic_ns()
        if self._journal.is_open and now_ns - self._looked_ns > _EVERY_NS:
            self._looked_ns, started = now_ns, self._journal.starts_work()
            groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
            self._last = {}
            for group in groups:
                try:
                    counted = int(group._get_sequence_number_for_group())
                except (RuntimeError, AttributeError):  # a transport without a count
                    counted = 0
                self._last[group.group_name] = counted, self.seen[group.group_name]
            if self._first is None:
                self._first, self._steps = self._last, 0
            self._journal.ends_work(started)

    def say(self) -> None:
        """Report the unseen collectives, if steps have some; a few belong to models made later."""
        count = sum((_past_us(self._last) - _past_us(self._first or {})).values())
        if self._steps and count >= self._steps:
            sentence = f"its groups counted {count} collectives or messages that were not seen"
            self._journal.define(kind="missing", sentence=sentence)


def _past_us(look: _Look) -> Counter[str]:
    return +Counter({name: counted - seen for name, (counted, seen) in look.items()})


def watch_reducer(journal: Journal, methods: Iterable[str]) -> None:
    """Give DDP's C++ (its reducer and its broadcasts of buffers) a visible group."""
    build, broadcast = dist.Reducer, dist._broadcast_coalesced
    # The reducer holds only the C++ half of a group. Its Python half must live as long.
    groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    _forward(VisibleGroup, methods)

    @functools.wraps(build)
    def reducer(*args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        for place, argument in enumerate(args):
            if type(argument) is dist.ProcessGroup:
                try:
                    arguments[place] = VisibleGroup(argument)
                except Exception as error:  # DDP trains as usual, but its buckets stay unseen
                    sentence = f"DDP's buckets could not be watched: {error!r}"
                    journal.define(kind="missing", sentence=sentence)
        built = build(*arguments, **kwargs)
        groups[built] = [argument for argument in arguments if isinstance(argument, VisibleGroup)]
        return built

    @functools.wraps(broadcast)
    def broadcast_coalesced(group: Any, *args: Any, **kwargs: Any) -> Any:
        visible = (stand_in for stand_ins in groups.values() for stand_in in stand_ins)
        seen = next((stand_in for stand_in in visible if stand_in.true is group), group)
        return broadcast(seen, *args, **kwargs)

    dist.Reducer, dist._broadcast_coalesced = reducer, broadcast_coalesced


def watch_names(methods: Iterable[str]) -> None:
    """Give C++ a visible group if it asks for a group by name.

    If that fails, C++ finds the true group, and the group's own count shows its collectives.
    """
    _forward(_NamedGroup, methods, _VisibleWork)
    names = _Names(torch._C._distributed_c10d)
    for name in ("_register", "_unregister", "_resolve"):
        _replace(f"{name}_process_group", getattr(names, name.removeprefix("_")))
    _replace("_unregister_all_process_groups", names.unregister_all)
    # Symmetric memory of devices takes the store of the group that it finds, and visible groups
    # have no store.
    memory = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
    for name in ("empty_strided_p2p", "get_mempool_allocator", "rendezvous"):
        if hasattr(memory, name):
            setattr(memory, name, staticmethod(_after(names.give_back, getattr(memory, name))))


class VisibleGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch may be absent when we check
    """A process group that sends C++ callers through the Python methods of the true group."""

    def __init__(self, true: Any) -> None:
        super().__init__(true.rank(), true.size())
        self.true = true
        self.bound_device_id = true.bound_device_id  # a backend is bound to it when it is set
        for device in true._device_types:
            backend = true._get_backend(device)
            kind = self.BackendType.__members__.get(backend.name().upper(), self.BackendType.CUSTOM)
            self._set_default_backend(kind)
            self._register_backend(device, kind, backend)


class _NamedGroup(VisibleGroup):
    """A visible group whose works C++ waits for."""


class _VisibleWork(dist.Work):  # type: ignore[misc]  # torch may be absent when we check
    """Lets C++ wait through the Python method of the true work."""

    def __init__(self, true: Any) -> None:
        super().__init__()
        self._true = true

    def wait(self, *timeout: Any) -> bool:
        """Return when the result is there."""
        return bool(self._true.wait(*timeout))

    def get_future(self) -> Any:
        """Return the true work's future."""
        return self._true.get_future()


class _Names:
    """The visible groups by name, for torch's own registry, which keeps no group alive."""

    def __init__(self, registry: Any) -> None:
        self._register, self._resolve, self._unregister, self._unregister_all = (
            registry._register_process_group,
            registry._resolve_process_group,
            registry._unregister_process_group,
            registry._unregister_all_process_groups,
        )
        self._held: dict[str, _NamedGroup] = {}
        self._may_stand_in = True

    def register(self, group_name: str, group: Any) -> None:
        """Let C++ find the visible group in place of the true one."""
        try:
            is_plain = type(group) is dist.ProcessGroup and self._may_stand_in
            seen = _NamedGroup(group) if is_plain else None
        except Exception:  # the job goes on with its own group
            seen = None
        self._register(group_name, seen or group)
        if seen is not None:
            self._held[group_name] = seen

    def resolve(self, group_name: str) -> Any:
        """Find the true group."""
        group = self._resolve(group_name)
        return group.true if isinstance(group, _NamedGroup) else group

    def unregister(self, group_name: str) -> None:
        """Forget a group."""
        self._unregister(group_name)
        self._held.pop(group_name, None)

    def unregister_all(self) -> None:
        """Forget all groups."""
        self._unregister_all()
        self._held.clear()

    def give_back(self) -> None:
        """Restore the registry: later callers need parts of a group that visible groups lack."""
        self._may_stand_in = False
        while self._held:
            name, seen = self._held.popitem()
            self._unregister(name)
            self._register(name, seen.true)


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(then)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return both


def _replace(name: str, ours: Callable[..., Any]) -> None:
    """Put a function in the place of one of torch's, in all modules that have imported it."""
    true = getattr(torch._C._distributed_c10d, name)
    of_torch = [module for key, module in sys.modules.items() if key.partition(".")[0] == "torch"]
    for module in of_torch:
        if vars(module).get(name) is true:
            setattr(module, name, ours)


def _forward(
    kind: type, methods: Iterable[str], of_work: Callable[[Any], Any] = lambda work: work
) -> None:
    for name in methods:
        if hasattr(dist.ProcessGroup, name):  # some versions of torch lack some methods
            setattr(kind, name, _through(name, of_work))


def _through(name: str, of_work: Callable[[Any], Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return of_work(getattr(self.true, name)(*args, **kwargs))

    return forward
