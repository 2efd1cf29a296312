"""Compressed gradients under DistributedDataParallel, on any backend for processors.

    import fullwire

    compression = fullwire.compress(model, "powersgd:rank=2")   # before the first backward pass

DDP calls the hook for bucket after bucket, in the same order on every rank. One thread of the
process sends them, one after another. Backends whose threads also run callbacks would wait for
themselves (pytorch#48478), and two threads could issue collectives in different orders.

A guard measures each codec's loss in every 25th step. Beyond a limit, all ranks go back to float32
together.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from math import nan, sqrt
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fullwire.compression.codec import Choice, hook_of, parse_choice
from fullwire.compression.method import (
    Bucket,
    Loss,
    Tensor,
    asked_error,
    error_limit,
    gathered,
    is_small,
)
from fullwire.errors import UsageError

MEASURED_EVERY = 25  # Steps: measuring costs about as much as unpacking.
_KEPT = 1000  # Measurements.
_LONGEST_CHOICE = 256  # Bytes of its words.
_CPU = torch.device("cpu")
_ENDS_S = 2.0  # The longest wait of a process that ends, for the thread that sends.
_TAG = 0x66770000  # Of the messages of packed bytes: jobs use small tags.


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The loss of one step's gradients on all ranks."""

    step: int
    squared_error: float  # Relative: of what was sent, to what was given.
    zeroed_share: float  # Of the values: they arrive as zero and are none.
    unsent_norm: float  # Of the kept rest, relative to the gradients; 0 without error feedback.
    widened: int  # Messages so far that exceeded the format's range and had a wider one.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The guard found more loss than its limit: from now on gradients travel as float32."""

    template: ClassVar[str] = (
        "compression {codec} stops after step {step}: its squared error {squared_error:.2g} is "
        "above the limit {limit:g} (max_error). Gradients are sent as float32"
    )

    codec: str
    step: int
    squared_error: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftAsTheyAre:
    """Gradients of a type that codecs do not pack travel unchanged."""

    template: ClassVar[str] = (
        "compression {codec} leaves gradients of {dtype} as they are: it packs float32"
    )

    codec: str
    dtype: str


LISTENERS: list[Callable[[Compression, Measured], None]] = []  # They hear each measurement.


class Compression:
    """The codec of one model's gradients: its state, and what its guard has measured."""

    def __init__(
        self,
        model: DistributedDataParallel,
        choice: Choice,
        max_error: float | None = None,
        packs_small: bool = False,
    ) -> None:
        self.choice = choice
        self.packs_small = packs_small
        self.max_error = choice.codec.most_error if max_error is None else max_error
        self.is_off = False  # The guard has found more loss than its limit.
        self.measured: deque[Measured] = deque(maxlen=_KEPT)
        self._method = choice.method()
        self._model = weakref.ref(model)  # DDP holds the hook, and with it this object.
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._errors = _Errors()
        self._steps = 0
        self._losses: list[Loss] = []
        self._group: Any = None
        self._direct: ReceivesFirst | None = None
        self._broken: Any = None  # The group in which a message has failed.
        self.notes: list[Stopped | LeftAsTheyAre] = []  # Each is told once.

    @property
    def steps(self) -> int:
        """Return how many steps have sent gradients."""
        return self._steps

    @property
    def loss(self) -> Measured | None:
        """Return the latest measurement of the guard."""
        return self.measured[-1] if self.measured else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: each rank keeps another unsent rest."""
        return {
            "codec": str(self.choice),
            "steps": self._steps,
            "is_off": self.is_off,
            "unsent": self._errors.copies(),
            "method": {name: tensor.clone() for name, tensor in self._method.state().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the state that a rank has saved; every rank has to load one."""
        if state["codec"] != str(self.choice):
            raise UsageError(
                f"compress: expected the state of {self.choice}, got one of {state['codec']}"
            )
        self._steps, self.is_off = state["steps"], state["is_off"]
        self._errors = _Errors(state["unsent"])
        self._method.restore(state["method"])

    def send(self, bucket: Any) -> Any:
        """Begin to average a bucket over the ranks, and return a future of it: the DDP hook."""
        model = self._model()
        assert model is not None  # It calls.
        flat, parameters = bucket.buffer(), bucket.parameters()
        names = tuple(self._names[id(parameter)] for parameter in parameters)
        dtype = parameters[0].dtype  # Torch hands complex numbers over as pairs of real ones.
        gradients, group = bucket.gradients(), model.process_group
        is_first, is_last = bucket.index() == 0, bucket.is_last()

        def average(_: Any) -> Tensor:
            if self._broken is group:
                raise RuntimeError("fullwire: an earlier message of gradients failed in this group")
            try:
                self._enter(group)
                self._steps += is_first
                is_measured = (self._steps - 1) % MEASURED_EVERY == 0 and not self.is_off
                with torch.no_grad():
                    self._average(flat, gradients, names, dtype, is_measured)
                    if is_measured and is_last:
                        self._judge()
            except BaseException:
                self._broken = group
                raise
            return flat

        begin: Any = torch.futures.Future()
        averaged = begin.then(average)
        # With unused parameters DDP issues a collective of its own before the buckets are sent.
        if model.find_unused_parameters and not model.static_graph:
            begin.set_result(None)
        else:
            _lane.put(begin)
        return averaged

    def _enter(self, group: Any) -> None:
        """Notice another group, in which some ranks may be new, and agree with its ranks."""
        if self._group is group:
            return
        self._group, self._broken = group, None
        is_gloo = isinstance(group._get_backend(_CPU), getattr(dist, "ProcessGroupGloo", ()))
        self._direct = ReceivesFirst(group) if is_gloo else None
        self._method.forget_group()
        own = (
            f"{self.choice} with max_error={self.max_error or 0:g}, packs_small={self.packs_small}"
        )
        told = torch.zeros(_LONGEST_CHOICE, dtype=torch.uint8)
        text = f"{self._steps} {self.is_off:d} {own}".encode()[:_LONGEST_CHOICE]
        told[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = gathered(told, dist.get_world_size(group), group)
        agreed = [bytes(row.tolist()).rstrip(b"\0").decode().split(" ", 2) for row in rows]
        for rank, (_, _, theirs) in enumerate(agreed):
            if theirs != own:
                raise UsageError(
                    f"compress: expected the same on every rank, got {own} on rank "
                    f"{dist.get_rank(group)} and {theirs} on rank {rank}"
                )
        # A rank that is new has counted no steps, and its guard has seen nothing.
        self._steps = max(int(steps) for steps, _, _ in agreed)
        self.is_off = any(is_off == "1" for _, is_off, _ in agreed)

    def _average(
        self,
        flat: Tensor,
        gradients: Sequence[Tensor],
        names: tuple[str, ...],
        dtype: Any,
        is_measured: bool,
    ) -> None:
        ranks = dist.get_world_size(self._group)
        if ranks == 1:
            return
        is_plain = self.is_off or dtype != torch.float32
        keeps_small = not (self.packs_small or self._method.sends_vectors)
        small = [gradient for gradient in gradients if keeps_small and is_small(gradient)]
        if is_plain or len(small) == len(gradients):
            if dtype != torch.float32:
                self._note(LeftAsTheyAre(codec=str(self.choice), dtype=str(dtype)))
            dist.all_reduce(flat, group=self._group)
            flat /= ranks
            return
        error = self._errors.of(names, gradients) if self._method.keeps_error else None
        if error is not None:
            flat += error
        bucket = Bucket(
            values=flat,
            gradients=gradients,
            names=names,
            error=error,
            is_measured=is_measured,
            direct=self._direct,
        )
        # The few bytes of small gradients travel twice: packed in their places, and as they are.
        exact = torch.cat([flat[:0], *(gradient.reshape(-1) for gradient in small)])
        under_way = dist.all_reduce(exact, group=self._group, async_op=True) if small else None
        loss = self._method.average(bucket, self._group)
        if under_way is not None:
            under_way.wait()
            means = (exact / ranks).split([gradient.numel() for gradient in small])
            for gradient, mean in zip(small, means, strict=True):
                gradient.copy_(mean.view_as(gradient))
                if error is not None:
                    bucket.error_of(gradient).zero_()
        if error is not None and not bool(error.sum().isfinite()):
            error.zero_()  # The gradient had inf or NaN, which would stay for ever.
        if loss is not None:
            self._losses.append(loss)

    def _judge(self) -> None:
        """Add up the loss of a step over buckets and ranks, and stop the codec beyond the limit."""
        own = [
            *(float(sum(getattr(loss, of.name) for loss in self._losses)) for of in fields(Loss)),
            self._errors.squared_norm(),
            float(self._method.widened),
        ]
        self._losses.clear()
        sums = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(sums, group=self._group)
        lost, given, zeroed, values, unsent, widened = sums.tolist()
        measured = Measured(
            step=self._steps,
            squared_error=lost / given if given else 0.0,
            zeroed_share=zeroed / values if values else 0.0,
            unsent_norm=sqrt(unsent / given) if given > 0 else nan if given else 0.0,
            widened=int(widened),
        )
        self.measured.append(measured)
        if self.max_error is not None and measured.squared_error > self.max_error:
            self.is_off = True
            self._note(
                Stopped(
                    codec=str(self.choice),
                    step=self._steps,
                    squared_error=measured.squared_error,
                    limit=self.max_error,
                )
            )
        for listener in LISTENERS:
            listener(self, measured)

    def _note(self, note: Stopped | LeftAsTheyAre) -> None:
        """Keep a note, and tell it once in the job's output."""
        if note in self.notes:
            return
        self.notes.append(note)
        if dist.get_rank(self._group) == 0:
            sys.stderr.write(f"fullwire: {note.template.format(**asdict(note))}\n")


def compress(
    model: DistributedDataParallel,
    codec: str,
    *,
    max_error: float | None = None,
    packs_small: bool = False,
) -> Compression:
    """Send a model's gradients with a codec, and return its state.

    - `model`: a DistributedDataParallel whose parameters are on processors.
    - `codec`: a name with settings, such as `"bf16"` or `"powersgd:rank=2"`.
    - `max_error`: the relative squared error beyond which gradients go back to float32. By
      default it is FULLWIRE_MAX_ERROR, or else a usual limit for formats. Codecs with error
      feedback have none.
    - `packs_small`: pack the gradients of norm layers and biases too, and all with fewer than 1024
      numbers. Without it they travel as float32, in any of DDP's buckets.

    Every rank calls this before the first backward pass.

        compression = fw.compress(model, "int8")
        compression.loss                        # measured in every 25th step
    """
    choice = parse_choice(codec)
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"compress: expected a DistributedDataParallel, got {type(model).__name__}"
        )
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise UsageError("compress: expected parameters on processors, got some on a device")
    limit = asked_error() if max_error is None else error_limit(max_error, "compress: max_error")
    if hooks := getattr(model, "_comm_hooks", None):
        there = getattr(hooks[0][0], "__qualname__", "one")
        raise UsageError(
            f"compress: expected a model without a communication hook, got one with {there}: "
            "torch allows one hook"
        )
    compression = Compression(model, choice, limit, packs_small)
    hook = lambda state, bucket: state.send(bucket)  # noqa: E731  # torch reads annotations
    hook.__name__ = hook.__qualname__ = hook_of(choice)
    model.register_comm_hook(compression, hook)
    return compression


class ReceivesFirst(dist.ProcessGroup):  # type: ignore[misc]  # torch may be absent when we check
    """A group on Gloo whose exchanges and gathers use both directions of a link at once.

    Gloo's own all-to-all and all-gather post a send before the receive. If the other rank is ready,
    the data leaves at once, and the word that this rank is ready waits behind it. Then only one
    direction is in use: between two ranks an all-to-all takes twice as long, an all-gather 1.5
    times (docs/validation/compression.md). Here all receives come first.
    """

    tells_times = True  # The recorder notes its collectives, and not the messages they are made of.

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self._name = group.group_name
        self.counts_as = 2 * (group.size() - 1)  # Gloo's own count has each message.
        self._gloo = group._get_backend(_CPU)

    @property
    def group_name(self) -> str:
        """Return the group's name: torch's own lookup asks a back end, and there is none here."""
        return str(self._name)

    def all_to_all_single(self, received: Tensor, given: Tensor, *_: Any) -> Any:
        """Send each rank its row, and receive one from each."""
        return self._moved(received, given.view(self.size(), -1))

    def all_gather_single(self, received: Tensor, given: Tensor, *_: Any) -> Any:
        """Send all ranks the same row, and receive one from each."""
        return self._moved(received, given.expand(self.size(), -1))

    alltoall_base, _allgather_base = all_to_all_single, all_gather_single  # Before torch 2.13.

    def _moved(self, received: Tensor, given: Tensor) -> Any:
        ranks, rank = self.size(), self.rank()
        rows = received.view(ranks, -1)
        nearest_first = [(rank + away) % ranks for away in range(1, ranks)]
        under_way = [self._gloo.recv([rows[other]], other, _TAG) for other in nearest_first[::-1]]
        under_way += [self._gloo.send([given[other]], other, _TAG) for other in nearest_first]
        rows[rank].copy_(given[rank])
        for message in under_way:
            message.wait()
        done: Any = torch.futures.Future()
        done.set_result(received)
        return c10d._create_work_from_future(done)  # type: ignore[attr-defined]  # No stub has it.


class _Errors:
    """What was not sent so far of each parameter's gradient, wherever its bucket places it."""

    def __init__(self, known: dict[str, Tensor] | None = None) -> None:
        self._by_name = {name: rest.clone() for name, rest in (known or {}).items()}
        self._by_bucket: dict[tuple[str, ...], Tensor] = {}

    def of(self, names: tuple[str, ...], gradients: Sequence[Tensor]) -> Tensor:
        """Return the unsent rests of a bucket as one tensor, which the caller changes."""
        if names not in self._by_bucket:
            sizes = [gradient.numel() for gradient in gradients]
            flat = torch.zeros(sum(sizes))
            for name, place in zip(names, flat.split(sizes), strict=True):
                if name in self._by_name:
                    place.copy_(self._by_name[name])
                self._by_name[name] = place
            # DDP has rebuilt its buckets: those that hold the same parameters are gone.
            moved = set(names)
            self._by_bucket = {
                others: tensor
                for others, tensor in self._by_bucket.items()
                if moved.isdisjoint(others)
            }
            self._by_bucket[names] = flat
        return self._by_bucket[names]

    def copies(self) -> dict[str, Tensor]:
        """Return a copy of each parameter's rest."""
        return {name: rest.clone() for name, rest in self._by_name.items()}

    def squared_norm(self) -> float:
        """Return the squared norm of all rests."""
        return sum(float(rest.square().sum()) for rest in self._by_name.values())


class _Lane:
    """The thread that sends the messages of all models of this process, in their order."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, begin: Any) -> None:
        """Complete a future after those before it, in the thread; its callbacks run there."""
        if self._thread is None or not self._thread.is_alive():  # A fork has no threads.
            self._thread = threading.Thread(
                target=self._work, name="fullwire-compression", daemon=True
            )
            self._thread.start()
            atexit.unregister(self._end)
            atexit.register(self._end)
        self._waiting.put(begin)

    def _work(self) -> None:
        while (begin := self._waiting.get()) is not None:
            begin.set_result(None)

    def _end(self) -> None:
        """End the thread before Python ends: one that comes back from torch later is a crash.

        A thread that waits for a lost rank does not hold the process for long.
        """
        if self._thread is not None and self._thread.is_alive():  # A fork has no threads.
            self._waiting.put(None)
            self._thread.join(_ENDS_S)


_lane = _Lane()
