"""The fix "one collective in place of many small ones of its kind"."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fullwire.errors import UsageError
from fullwire.fixes.fix import (
    MANY,
    MUCH_BYTES,
    Fix,
    FixKind,
    Process,
    Seen,
    Worthwhile,
    register,
    sending_s,
    worthwhile,
)
from fullwire.units import shown, size_bytes

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecaster
    from fullwire.simulation.step import Step
    from fullwire.timeline.account import Account

_JOINED = {
    "allreduce": (
        "all-reduces",
        "dist.all_reduce(torch.cat([...])), where none needs another's sum",
    ),
    "broadcast": (
        "broadcasts",
        "dist.broadcast(torch.cat([...])), of those that come from one rank",
    ),
    "allgather": (
        "all-gathers",
        "dist.all_gather(..., torch.cat([...])), where none needs another's",
    ),
}


_MOST_BYTES = 2**30
_NO_BACKWARD_PASS = -1  # the number that torch gives for none
_AT_ONCE_BYTES = 2**24  # waiting: more are sent
_MOST_FOLLOWERS = 64  # expected sums
_FEW_SHARED = 64  # weak references to shared memory: more are looked through
_WAITING_S = 3e-5  # of a processor, for each all-reduce that waits: 20 to 40 us were measured
# Calls of torch.distributed before which everything that waits is sent.
_CALLS = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all"),
    *("all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list"),
    *("destroy_process_group", "gather", "irecv", "isend", "monitored_barrier", "new_group"),
    *("recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
)
_SCALINGS = ("div_", "mul_")
_VIEWS = ("detach", "view", "alias", "_reshape_alias", "t", "transpose", "unsqueeze", "squeeze")
_READS = ("tolist",)  # beside operations
_SHARES = ("data_ptr", "numpy", "untyped_storage", "__dlpack__")  # the memory is read later, unseen
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor", "symm_mem")  # namespaces of operations
_Use = Literal["collective", "scaling", "view", "other"]
_Sum: TypeAlias = tuple[int, int, Any, Any]  # tensors, elements of all, their type and device


@dataclass(frozen=True, kw_only=True)
class Joined(Fix):
    """Many small collectives of a kind become one."""

    template = "{count} small {ops} as one"
    applied = "{setting}"

    kind: str = "joining"
    count: int
    ops: str
    setting: str = ""  # Only all-reduces are joined without an edit.


@register
class Joining(FixKind):
    """Join many small collectives of a kind into one."""

    key = "joining"
    label = "joined collectives"
    addresses = ("latency", "transport")
    example = "1MiB"
    setting = "the largest all-reduce that is joined with its neighbours"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict the small collectives of each kind as one, where a script has many."""
        from fullwire.timeline.account import Part

        step = job.subject.step
        if step.others.sum_gradients or bool((run.collectives.op == "reducescatter").any()):
            return  # shards: a library sums them, not the script
        for op, (named, setting) in _JOINED.items():
            places = step.others.small(op, MUCH_BYTES)

            def joined(each: Step, op: str = op) -> Step:
                small = each.others.small(op, MUCH_BYTES)
                return each.with_joined(small) if len(small) > 1 else each

            if len(places) >= MANY:
                # Predict without the residue, because the many small collectives are its cause.
                forecast = job.as_modelled().ask(change=joined)
                if op == "allreduce":
                    # Each sum that waits costs the host a little. On our backend, ranks agree on
                    # the number of sums in each step: one small sum more.
                    is_ours = run.facts.backend == "fullwire"
                    agreeing_s = is_ours * account.parts_s[Part.LATENCY.key] / len(places)
                    waiting_s = len(places) * _WAITING_S + agreeing_s
                    step_s = forecast.step_s + waiting_s
                    forecast = replace(
                        forecast,
                        step_s=step_s,
                        scaling_factor=forecast.scaling_factor * forecast.step_s / step_s,
                        high_s=forecast.high_s + 2 * waiting_s,
                    )
                yield Joined(
                    count=len(places),
                    ops=named,
                    how=setting,
                    forecast=forecast,
                    setting=self.example if op == "allreduce" else "",
                )

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield joining where a script has many small all-reduces, and no line rate is known."""
        sent = run.collectives
        is_small = (sent.op == "allreduce") & (sent.bytes <= MUCH_BYTES)
        count = int(is_small.sum()) / max(len(account.steps) * len(account.ranks), 1)
        if count >= MANY and seen.ddp is None:
            most_s = sending_s(account)
            words = f"{count:.0f} small all-reduces as one"
            yield from worthwhile(self, self.example, words, account, 0.3 * most_s, most_s)

    def checked(self, setting: str) -> str:
        """Take a size."""
        if not 0 < size_bytes(setting, "fix joining") <= _MOST_BYTES:
            raise UsageError(f"fix joining: expected up to 1GiB, got {shown(setting)}")
        return setting

    def by_hand(self, setting: str) -> str:
        """Return the call."""
        return _JOINED["allreduce"][1]

    def apply(self, setting: str, process: Process) -> None:
        """Join all-reduces that follow each other before the script reads one of them."""
        _Joining(round(size_bytes(setting, "fix joining")), process).begin()


@dataclass
class _Waiting:
    """An all-reduce that has yet to be sent, and the scalings that the script made of its sum."""

    tensor: Any
    scalings: list[tuple[Any, float]] = field(default_factory=list)  # operation, number


class _Joining:
    """Makes `dist.all_reduce` wait for its neighbours, until an operation needs a sum.

    A mode of torch sees each operation. A view leaves a sum unread, and a scaling in place is made
    later; any other operation on the memory of a waiting tensor sends all that wait. So do a
    backward pass and each other collective. Ranks may read at different places, as where rank 0
    alone prints. So before each sending, ranks agree on the least number that waits on any of them.
    The order of the sums is the script's on each rank.

    Most jobs send the same sums in each step. A sum that followed another one before is expected
    after it. Then ranks do not agree first: each adds a number to the sum, which is 0 if it has the
    expected one. If a rank has another, all drop the result and agree after all.

    Some sums do not wait, because no mode sees their readers:

    - Numpy or another process has their memory too.
    - They come from a thread beside the first, from compiled code, or within another mode.

    A sum that a script begins amidst a backward pass (`async_op`) travels beside the computation.
    """

    def __init__(self, most_bytes: int, process: Process) -> None:
        import torch
        import torch.distributed as dist
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils import _python_dispatch

        self._most_bytes, self._process = most_bytes, process
        self._waiting: dict[int, _Waiting] = {}  # by the memory of their tensors, in order
        self._waiting_bytes = 0
        # Memory of which somebody has the address. While torch's weak reference lives, no other
        # memory is known by that number.
        self._shared: dict[int, Any] = {}
        self._weak_reference, self._most_shared = StorageWeakRef, _FEW_SHARED
        self._group: Any = None  # its ranks sent these sums
        self._last: _Sum | None = None
        self._followers: dict[_Sum, _Sum | None] = {}  # by the sum before; None: they vary
        self._uses: dict[Any, _Use] = {}  # by operation
        self._is_over = self._is_hooked = False
        self._of_modules: Any = None  # the hook, while our mode sees operations
        self._thread = threading.get_ident()
        self._alike: Any = None  # the type and device of all that wait
        self._dist, self._all_reduce, self._sum = dist, dist.all_reduce, dist.ReduceOp.SUM
        self._tensor, self._strided = torch.Tensor, torch.strided
        self._usual_types = torch.Tensor, torch.nn.Parameter
        self._storage = torch.Tensor.untyped_storage
        self._same_memory = torch.Tensor._make_subclass  # like detach, but no mode sees it
        self._count_modes = torch._C._len_torch_dispatch_stack
        self._backward_pass = torch._C._current_graph_task_id
        self._mode_at = torch._C._get_dispatch_stack_at
        self._before_modules = torch.nn.modules.module.register_module_forward_pre_hook
        joining = self

        class Watching(_python_dispatch.TorchDispatchMode):  # type: ignore[misc]
            @classmethod
            def _should_skip_dynamo(cls) -> bool:
                return False  # no compiled code comes here, and skipping takes 4 us an operation

            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if joining._waiting and joining._is_put_off(func, args, kwargs or {}):
                    return args[0]
                return func(*args, **(kwargs or {}))

        class Begun(dist.Work):  # type: ignore[misc]
            """An all-reduce that the script began and has yet to wait for; asking it sends it."""

            def __init__(self, tensor: Any) -> None:
                super().__init__()
                self._tensor = tensor

            def wait(self, timeout: Any = None) -> bool:
                joining._settle()
                return True

            is_completed = is_success = synchronize = block_current_stream = wait

            def result(self) -> list[Any]:
                self.wait()
                return [self._tensor]

            def get_future(self) -> Any:
                future: Any = torch.futures.Future()
                future.set_result(self.result())
                return future

        self._mode: Any = Watching()
        self._begun = Begun

    def begin(self) -> None:
        """Take the place of torch's functions."""
        import torch
        import torch.distributed as dist

        dist.all_reduce = self._put_off
        for name in _CALLS:
            setattr(dist, name, self._after_sending(getattr(dist, name)))
        for owner, names in (
            (torch.Tensor, (*_READS, "backward")),
            (torch.autograd, ("backward", "grad", "_engine_run_backward")),
        ):
            for name in names:
                setattr(owner, name, self._after_sending(getattr(owner, name)))
        for name in _SHARES:
            setattr(torch.Tensor, name, self._after_sharing(getattr(torch.Tensor, name)))
        self._process.around(torch, "compile", self._end_for_compiled_code)
        atexit.register(self._at_end)

    def _put_off(
        self, tensor: Any, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        # A job has thousands of these calls in a second, so each look at torch counts.
        is_sum = op is None or op == self._sum
        is_of_all = is_sum and (group is None or group is self._dist.group.WORLD)
        is_plain = (
            type(tensor) in self._usual_types
            and tensor.layout is self._strided
            and not tensor.requires_grad
            and 0 < tensor.nbytes <= self._most_bytes
        )
        is_beside = async_op and self._backward_pass() != _NO_BACKWARD_PASS
        if is_beside or not (is_plain and is_of_all):
            self._settle()
            return self._all_reduce(tensor, self._sum if op is None else op, group, async_op)
        if not self._is_hooked:
            self._hook()
        of_script = tensor
        # Hold the memory, because the script may give its own tensor other memory.
        tensor = self._same_memory(self._tensor, tensor)
        storage = self._storage(tensor)
        address = storage._cdata
        if self._waiting:
            is_alike = (tensor.dtype, tensor.device) == self._alike
            is_much = self._waiting_bytes > _AT_ONCE_BYTES
            if not is_alike or is_much or address in self._waiting:
                self._send()
        if not self._waiting:
            self._alike = tensor.dtype, tensor.device
        self._waiting[address] = _Waiting(tensor)
        self._waiting_bytes += tensor.nbytes
        modes = self._count_modes()
        if not self._sees_all_of(tensor, storage, modes):
            self._send()  # here alone: on another rank it may wait
        elif modes == 0:
            self._mode.__enter__()
            self._of_modules = self._before_modules(self._settle)
        return self._begun(of_script) if async_op else None

    def _hook(self) -> None:
        """Put off scalings, and send before optimizers go on; only jobs with small sums pay."""
        import torch
        from torch.optim import optimizer as optimizers

        # A mode costs an operation more than all else here, so scalings are caught before it.
        for name in (*_SCALINGS, "__itruediv__", "__imul__"):
            setattr(torch.Tensor, name, self._scaled_later(getattr(torch.Tensor, name)))
        optimizers.register_optimizer_step_pre_hook(self._settle)
        self._is_hooked = True
        self._process.did("applied: all-reduces wait for their neighbours")

    def _sees_all_of(self, tensor: Any, storage: Any, modes: int) -> bool:
        """Say whether each reader of this memory goes through our mode."""
        return (
            not self._is_over
            and threading.get_ident() == self._thread
            and (modes == 0 or (modes == 1 and self._mode_at(0) is self._mode))
            and storage._cdata not in self._shared
            # Memory of numpy, of a file or of another library does not grow.
            and (not tensor.is_cpu or (storage.resizable() and not storage.is_shared()))
        )

    def _end_for_compiled_code(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        self._is_over = True
        self._process.did("undone: the script compiles, and compiled code reads unseen")
        return {}

    def _is_put_off(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Say whether an operation scales a waiting sum; send the sums that another one uses."""
        import torch

        use = self._uses.get(func) or self._use_of(func)
        if use == "collective":
            self._send()
            return False
        if use == "scaling" and not kwargs and isinstance(args[1], int | float):
            return self._is_scaled_later(func, *args)
        groups = (
            given if isinstance(given, list) else [given] for given in (*args, *kwargs.values())
        )
        is_touched = any(
            isinstance(value, torch.Tensor)
            and value.layout == torch.strided
            and self._storage(value)._cdata in self._waiting
            for group in groups
            for value in group
        )
        if is_touched and use != "view":
            self._send()
        return False

    def _is_scaled_later(self, scale: Any, tensor: Any, number: float) -> bool:
        """Say whether a scaling waits with its sum; send where it scales another part of one."""
        waiting = tensor.layout is self._strided and self._waiting.get(self._storage(tensor)._cdata)
        if not waiting:
            return False
        summed = waiting.tensor
        is_whole = tensor.shape == summed.shape and tensor.stride() == summed.stride()
        if is_whole and summed.dtype.is_floating_point:
            waiting.scalings.append((scale, number))
            return True
        self._send()
        return False

    def _use_of(self, func: Any) -> _Use:
        name = func.overloadpacket.__name__
        use: _Use = "scaling" if name in _SCALINGS else "view" if name in _VIEWS else "other"
        self._uses[func] = "collective" if func.namespace in _COLLECTIVES else use
        return self._uses[func]

    def _send(self) -> None:
        import torch

        with torch.no_grad():
            while self._waiting:
                sent, self._waiting = list(self._waiting.items()), {}
                self._waiting_bytes = 0
                count = self._as_expected(sent) or self._as_agreed(sent)
                self._waiting = dict(sent[count:])

    def _as_expected(self, sent: Sequence[tuple[int, _Waiting]]) -> int:
        """Send the sum that followed the last one before; return 0 where a rank has another."""
        import torch
        import torch.distributed as dist

        if self._group is not dist.group.WORLD:  # its ranks may be new, and expect nothing
            self._group, self._last, self._followers = dist.group.WORLD, None, {}
        before = self._last
        expected = None if before is None else self._followers.get(before)
        if before is None or expected is None:
            return 0
        count, size, dtype, device = expected
        together = [waiting for _, waiting in sent]
        has_another = torch.zeros(1, dtype=dtype, device=device)
        if _sum_of(together) == expected:
            flat = torch._C._nn.flatten_dense_tensors([*_tensors(together), has_another])
        else:
            flat = torch.cat([has_another.expand(size), has_another + 1])
        self._all_reduce(flat)
        if flat[-1] != 0:
            self._followers[before] = None
            return 0
        self._last = expected
        _share_out(flat[:-1], together)
        return count

    def _as_agreed(self, sent: Sequence[tuple[int, _Waiting]]) -> int:
        """Send as many sums as wait on each rank, and return their number."""
        import torch
        import torch.distributed as dist

        agreed = torch.tensor([len(sent)], device=sent[0][1].tensor.device)
        self._all_reduce(agreed, dist.ReduceOp.MIN)
        count = int(agreed)
        together = [waiting for _, waiting in sent[:count]]
        flat = torch._C._nn.flatten_dense_tensors(_tensors(together))
        self._all_reduce(flat)
        _share_out(flat, together)
        now = _sum_of(together)
        # Our backend may send fewer bits, which could lose the number that a rank adds.
        if flat.is_floating_point() and "fullwire" not in dist.get_backend():
            if self._last is not None and len(self._followers) < _MOST_FOLLOWERS:
                self._followers.setdefault(self._last, now)
            self._last = now
        else:
            self._last = None
        return count

    def _settle(self, *of_a_hook: Any) -> None:
        # First, for our own operations need no watching.
        if (modes := self._count_modes()) and self._mode_at(modes - 1) is self._mode:
            self._mode.__exit__(None, None, None)
            self._of_modules.remove()  # it would slow each module of the next forward pass
        if self._waiting:
            self._send()

    def _at_end(self) -> None:
        """Send what nobody here read: another rank may read it."""
        if not self._waiting or hasattr(sys, "last_value"):  # after an error nobody has an answer
            return
        import torch.distributed as dist

        self._settle()
        # Gloo's threads may still hold the last tensors. They abort if Python ends before them.
        dist.destroy_process_group()

    def _scaled_later(self, scale: Any) -> Any:
        @functools.wraps(scale)
        def called(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if (
                self._waiting
                and len(args) == 1
                and type(args[0]) in (int, float)
                and type(tensor) is self._tensor
                and not kwargs
                and self._is_scaled_later(scale, tensor, args[0])
            ):
                return tensor
            return scale(tensor, *args, **kwargs)

        return called

    def _after_sending(self, function: Any) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._waiting:
                self._send()
            return function(*args, **kwargs)

        return called

    def _after_sharing(self, function: Any) -> Any:
        """Let no sum in this memory wait from now on: its address leaves torch."""
        sent = self._after_sending(function)

        @functools.wraps(function)
        def called(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # it has no memory
                storage = self._storage(tensor)
                if storage._cdata not in self._shared:
                    self._shared[storage._cdata] = self._weak_reference(storage)
                    if len(self._shared) > self._most_shared:  # forget freed memory
                        for address, memory in list(self._shared.items()):
                            if memory.expired():
                                del self._shared[address]
                        self._most_shared = max(_FEW_SHARED, 2 * len(self._shared))
            return sent(tensor, *args, **kwargs)

        return called


def _tensors(together: Sequence[_Waiting]) -> list[Any]:
    return [waiting.tensor for waiting in together]


def _sum_of(together: Sequence[_Waiting]) -> _Sum:
    tensors = _tensors(together)
    elements = sum(tensor.numel() for tensor in tensors)
    return len(tensors), elements, tensors[0].dtype, tensors[0].device


def _share_out(flat: Any, together: Sequence[_Waiting]) -> None:
    """Give each tensor its part of the sum, scaled as the script asked."""
    import torch

    tensors = _tensors(together)
    first = together[0].scalings
    are_alike = all(waiting.scalings == first for waiting in together)
    for scale, number in first if are_alike else ():
        scale(flat, number)
    torch._foreach_copy_(tensors, torch._C._nn.unflatten_dense_tensors(flat, tensors))
    for waiting in () if are_alike else together:
        for scale, number in waiting.scalings:
            scale(waiting.tensor, number)
