"""Note each collective's issue and end, and the own work of communication hooks.

The recorder wraps the methods of torch.distributed.ProcessGroup. All of Python's collectives (and
FSDP2's, and communication hooks') go through them. C++ gets groups that send it through the same
methods (`VisibleGroup`). A transfer between two ranks is a collective of these two. It has a group
of its own, in which sender and receiver count alike.

A collective ends when its future is done. A callback of the future notes the time, so waiting for
the collective has no part in it.

DDP's buckets have a short way of their own (buckets.py).

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
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from .buckets import NEVER_NS, Bucket, Buckets, is_well, when_done
from .clock import Clock, Moment
from .ending import at_end
from .journal import Journal, Note, framework_in_use
from .notes import native_hooks
from .probes import Probes
from .processors import HookWork, left_for_later
from .visible import VisibleGroup

COLLECTIVES = {
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


def watch_collectives(journal: Journal, clock: Clock, probes: Probes | None) -> Collectives:
    """Begin to note the collectives of all callers."""
    codec = HookWork(journal)
    collectives = Collectives(journal, clock, codec, probes)
    for name, op in COLLECTIVES.items():
        original = vars(dist.ProcessGroup).get(name)
        if original is not None:  # some versions of torch lack some methods
            setattr(dist.ProcessGroup, name, collectives.watched(original, op))
    dist.Work.wait = collectives.waiting(dist.Work.wait)
    _watch_subclasses(dist.ProcessGroup, COLLECTIVES, collectives.watched)
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
    future.wait = wait if probes is None else probes.asking(wait, waits=True)
    if probes is not None:
        future.done = probes.asking(future.done, waits=False)
    for name in ("then", "add_done_callback"):
        setattr(future, name, left_for_later(getattr(future, name), codec))
    VisibleGroup.allreduce = collectives.buckets.allreduce
    return collectives


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


class Collectives:
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
        # Each callback that a transport has holds one of these. So their counts of references say
        # when the last one was called and freed, which a thread of the transport does.
        self.buckets = self._make_buckets()
        self._callbacks = self.buckets.held_by_callbacks, self._ended
        self._references = self._count_references()
        # Collectives that keep their own times.
        self._telling: deque[tuple[int, Any, Any]] = deque()
        self._rounding = _Rounding(journal)
        self._unseen = Unseen(journal)
        os.register_at_fork(after_in_child=self._forget)
        at_end(self._await_the_last)

    def _forget(self) -> None:
        self._signatures.clear()
        self.buckets.forget()
        self._telling.clear()
        self._unseen = Unseen(self._journal)
        self._is_identified = False
        self._references = self._count_references()  # of threads that this process does not have

    def _await_the_last(self) -> None:
        """Wait for the transports' callbacks, which would abort the process while Python ends."""
        self._unseen.say()
        for _ in range(_MOST_LOOKS):  # a count, as their threads stall whenever this one does
            if self._count_references() <= self._references:
                break
            time.sleep(_LOOK_S)
        self._hear_ends()
        self.buckets.settle(NEVER_NS)
        self._rounding.tell()
        if self._signatures:
            time.sleep(_GOODBYE_S)  # the transports are freeing the last tensors

    def _count_references(self) -> int:
        return sum(map(sys.getrefcount, self._callbacks))

    def step_ended(self) -> None:
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

        probes = self._probes

        @functools.wraps(original)
        def chosen(group: Any, *args: Any, **kwargs: Any) -> Any:
            if probes.is_timed and op == "allreduce" and probes.is_timing():
                return probes.timed(functools.partial(chosen, **kwargs), group, *args)
            if not probes.is_on:
                return collective(group, *args, **kwargs)
            # Another thread sends for a hook: the backward pass goes on beside it in any case.
            send = collective if self._codec.is_working_later() else held_back
            return send(group, *args, **kwargs)

        return chosen

    def _make_buckets(self) -> Buckets:
        """Make the all-reduce of visible groups, which DDP's C++ calls for a bucket."""
        probes, native = self._probes, native_hooks()

        def otherwise(group: VisibleGroup, tensors: Sequence[Any], *options: Any) -> Any:
            if probes is not None and probes.is_timed and probes.is_timing():
                return probes.timed(buckets.allreduce, group, tensors, *options)
            return group.true.allreduce(tensors, *options)

        def note_other(group: Any, tensors: Sequence[Any], issued_ns: int, work: Any) -> None:
            self._note(group, "allreduce", (tensors,), issued_ns, False, work)

        if native:
            native.use_torch(when_done)
        buckets: Buckets = (native.Buckets if native else Buckets)(
            self._journal,
            self._codec,
            probes,
            vars(dist.ProcessGroup)["allreduce"],  # torch's own
            dist.Work,
            otherwise,
            self._bucket,
            note_other,
            self._count,
            self._clock.knows_devices,
        )
        return buckets

    def _bucket(self, tensor: Any, group: str) -> Bucket:
        """Describe a bucket, for as long as its tensor lives: mostly the model's life."""
        try:
            size = tensor.nbytes
        except RuntimeError:  # a sparse gradient, counted as if it were dense
            size = tensor.numel() * tensor.element_size()
        signature = self._signature("allreduce", tensor.dtype, size, group)
        return weakref.ref(tensor), group, signature, self._unseen.seen[group]

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
        self._unseen.seen[among][0] += getattr(group, "counts_as", 1)
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
            when_done(future, functools.partial(self._callbacks[1], number, on_device))

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
        if is_well(future):
            self._clock.note_one(Note.END, number, ended)
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


_EVERY_NS, _AT_MOST_EVERY_NS = 250_000_000, 2_000_000_000
_Look: TypeAlias = dict[str, tuple[int, int]]  # by group: collectives that it counts, and seen ones


class Unseen:
    """Compares the collectives seen of each group with the group's own count."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._first: _Look | None = None
        self._last: _Look = {}
        self._steps = self._steps_then = 0  # since the first look, and those up to the last one
        self._looked_ns = self._gap_ns = 0
        # By name of the group, since the group began: a number that others keep and count up.
        self.seen: defaultdict[str, list[int]] = defaultdict(lambda: [0])

    def step_ends(self) -> None:
        """Look at the counts, if the last look is long enough ago; the gaps grow."""
        self._steps += 1
        now_ns = time.monotonic_ns()
        if self._journal.is_open and now_ns - self._looked_ns > self._gap_ns:
            # An eighth longer each time, so that the last look is never long before the end.
            self._gap_ns = min(self._gap_ns + self._gap_ns // 8 or _EVERY_NS, _AT_MOST_EVERY_NS)
            self._looked_ns, started = now_ns, self._journal.starts_work()
            groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
            self._last = {}
            for group in groups:
                try:
                    counted = int(group._get_sequence_number_for_group())
                except (RuntimeError, AttributeError):  # a transport without a count
                    counted = 0
                self._last[group.group_name] = counted, self.seen[group.group_name][0]
            if self._first is None:
                self._first, self._steps = self._last, 0
            self._steps_then = self._steps
            self._journal.ends_work(started)

    def say(self) -> None:
        """Report those unseen up to the last look, if its steps have some each.

        A few belong to models made later. Steps after the last look tell nothing.
        """
        count = sum((_past_us(self._last) - _past_us(self._first or {})).values())
        if 0 < self._steps_then <= count:
            sentence = f"its groups counted {count} collectives or messages that were not seen"
            self._journal.define(kind="missing", sentence=sentence)


def _past_us(look: _Look) -> Counter[str]:
    return +Counter({name: counted - seen for name, (counted, seen) in look.items()})
