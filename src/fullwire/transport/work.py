"""The work that a collective returns, and tensors and options as torch hands them to it.

Callers wait for a work, or ask it for a Future.

Completing a Future from another thread costs some 80 us, because a thread of Python has to take the
interpreter for it. `wait` works without a Future. It drives the engine itself if no other thread
does.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fullwire.errors import TransportError
from fullwire.transport import programs
from fullwire.transport.rendezvous import lack
from fullwire.transport.untraced import untraced

Places: TypeAlias = list[tuple[int, int]]  # addresses, and their numbers of bytes
_LOOK_UP_S = 0.5
_OF_TENSORS = """
def after(ended: Future[None], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(ended)
    return tensors

def of_tensors(ended: Future[None], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(after, ended, tensors)
"""


@untraced
class Work(dist.Work):  # type: ignore[misc]  # torch may be absent when we check
    """One or more tasks of the engine that are one collective to torch."""

    tells_times = True  # `tasks` know when each began and ended

    def __init__(
        self,
        engine: Any,
        completer: Completer,
        in_flight: InFlight,
        tasks: Sequence[Any],
        result: Any,
        kept: Any,
        afterwards: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self.tasks = tasks
        self._engine = engine
        self._completer = completer
        self._result = result
        self._kept = kept  # tensors that the engine reads or writes
        self._afterwards = afterwards
        self._in_flight = in_flight
        self._finishing = threading.Lock()
        self._ended: Any = None
        self._future: Any = None  # the result or the error, after `_ended`
        self._mark: Any = None  # a Future that ends this work in a profiler
        in_flight.hold(self)
        if torch.autograd._profiler_enabled():
            self._show_to_profiler()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is there, or raise the error."""
        until = time.monotonic() + timeout.total_seconds() if timeout else math.inf
        for task in self.tasks:
            # Python looks up at intervals, so that Ctrl-C ends the wait.
            while not self._engine.wait(task, min(_LOOK_UP_S, until - time.monotonic())):
                if time.monotonic() >= until:
                    raise TransportError(f"it did not end within {timeout}")
        self._finish()
        problem = self.problem()
        if problem:
            raise TransportError(problem)
        return True

    def is_completed(self) -> bool:
        """Say whether the work has ended, with or without an error."""
        return all(task.is_done for task in self.tasks)

    def is_success(self) -> bool:
        """Say whether the work has ended without an error."""
        return self.is_completed() and not self.problem()

    def exception(self) -> TransportError | None:
        """Return the error, if there is one."""
        problem = self.problem()
        return TransportError(problem) if problem else None

    def synchronize(self) -> None:
        """Return when the result is there: processors have no queue of their own."""
        self.wait()

    def result(self) -> Any:
        """Return the tensors that hold the result."""
        return self._result

    def source_rank(self) -> int:
        """Return the rank that a tensor came from."""
        return int(self.tasks[0].sender)

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a Future, which a thread of Python completes."""
        with self._finishing:
            is_first = self._future is None
            if is_first:
                # A Future's own set_exception is for Python alone: DDP's C++ would take the
                # exception for a tensor. A Future whose callback raises has failed for both.
                self._ended = torch._C.Future([])  # without what a class of Python adds to it
                self._future = self._ended.then(self._outcome)
                first = self._result[0] if isinstance(self._result, list) and self._result else None
                is_of_halves = isinstance(first, torch.Tensor) and first.dtype is torch.float16
                if is_of_halves and _is_asked_by_cpp():
                    self._future = _compiled().of_tensors(self._future, self._result)
        if is_first and self.is_completed():
            self.complete()
        elif is_first:
            self._completer.add(self)
        return self._future

    def complete(self) -> None:
        """Give the Future its value."""
        self._finish()
        self._ended.set_result(None)

    def _outcome(self, _: Any) -> Any:
        problem = self.problem()
        if problem:
            raise TransportError(problem)
        return self._result

    def problem(self) -> str | None:
        """Return the words of the error, if the work has ended with one."""
        return next((task.problem for task in self.tasks if task.problem), None)

    def _finish(self) -> None:
        """Do the last step on the bytes, once, and let go of the tensors."""
        with self._finishing:
            afterwards, self._afterwards = self._afterwards, None
            if afterwards is not None and not self.problem():
                afterwards()
            self._kept = None
            mark, self._mark = self._mark, None
            if mark is not None:
                mark.set_result(None)
        self._in_flight.let_go(self)

    def _show_to_profiler(self) -> None:
        """Let an active profiler see this work from here to its end, as it sees Gloo's.

        The end is marked before any caller learns of it. A caller may then end the profiler, and
        torch could no longer mark the end.
        """
        self._mark = torch.futures.Future()
        word = re.split(r"\W", self.tasks[0].description)[0]
        name = "recv" if word == "receive" else word  # the word of torch's own backends
        with torch.autograd.profiler.record_function(f"fullwire:{name}") as shown:
            shown._call_end_callbacks_on_future(self._mark)
        self.get_future()  # so that it is finished even without a wait


def _is_asked_by_cpp() -> bool:
    """Say whether DDP's own C++ asks in a backward pass, instead of a hook in Python."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals["__name__"].startswith("fullwire"):  # a recorder's too
        frame = frame.f_back
    return bool(frame.f_globals["__name__"] == "torch.autograd.graph")


@functools.cache
def _compiled() -> Any:
    """Compile a function that makes a Future whose value C++ also sees as a list of tensors.

    DDP's C++ hook that sends float16 needs such a Future. A Future made in Python holds an object
    of Python. One made by TorchScript holds the tensors themselves, and costs some 40 us.
    """
    return torch.jit.CompilationUnit(_OF_TENSORS)


class InFlight:
    """Works under way: the engine uses a work and its tensor even after the caller drops both."""

    def __init__(self) -> None:
        self._works: set[Work] = set()
        self._most = 1
        self._lock = threading.Lock()

    def hold(self, work: Work) -> None:
        """Keep a work until it has ended."""
        with self._lock:
            if len(self._works) >= self._most:  # some may have ended without a wait
                self._works = {work for work in self._works if not work.is_completed()}
                self._most = 2 * len(self._works) + 1
            self._works.add(work)

    def let_go(self, work: Work) -> None:
        """Forget an ended work at once, because its tensor may be large."""
        with self._lock:
            self._works.discard(work)

    def clear(self) -> None:
        """Forget all works, once the engine is closed."""
        self._works.clear()


class Completer:
    """Threads that complete Futures; the first one exists from the first Future on.

    The callbacks of a Future run in the thread that completes it, and may wait for another Future,
    as PowerSGD's hook does. So before a thread completes a Future, it leaves the watch to another.
    """

    def __init__(self, engine: Any, name: str) -> None:
        self._engine = engine
        self._name = name  # the rank's name, for problems
        self._lock = threading.Lock()
        self._watch = threading.Lock()
        self._waiting: list[Work] = []
        self._threads: list[threading.Thread] = []
        self._on_watch = 0  # threads that watch, or wait to take over

    def add(self, work: Work) -> None:
        """Complete the Future of a work when the work ends."""
        with self._lock:
            self._waiting.append(work)
            has_watch = bool(self._threads) or self._start()
        if not has_watch:
            self._complete_without_threads()
        if work.is_completed():  # it may have ended before it was added
            self._complete_ended()

    def close(self) -> None:
        """Complete the remaining Futures, once the engine is closed."""
        self._complete_ended()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="fullwire-futures", daemon=True)
        self._on_watch += 1
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            self._on_watch -= 1
            self._engine.give_up(f"{self._name}: {lack(error) or error}, for Futures")
            return False
        self._threads.append(thread)
        return True

    def _complete_without_threads(self) -> None:
        """Complete all Futures after the group has ended, because no thread could be started."""
        for work in list(self._waiting):
            for task in work.tasks:
                while not self._engine.wait(task, _LOOK_UP_S):
                    pass
        self._complete_ended()

    def _run(self) -> None:
        """Complete the works that end next, and keep no reference to them during the next watch."""
        while ended := self._watched():
            for work in ended:
                work.complete()
            del work, ended
            with self._lock:
                self._on_watch += 1

    def _watched(self) -> list[Work]:
        """Wait for Futures to complete, one thread at a time; none once the engine is closed."""
        with self._watch:
            while self._engine.wait_for_any():
                if ended := self._taken():
                    with self._lock:
                        self._on_watch -= 1
                        has_watch = self._on_watch > 0 or self._start()
                    if not has_watch:
                        self._complete_without_threads()
                    return ended
        return []

    def _complete_ended(self) -> None:
        for work in self._taken():
            work.complete()

    def _taken(self) -> list[Work]:
        with self._lock:
            ended = [work for work in self._waiting if work.is_completed()]
            self._waiting = [work for work in self._waiting if work not in ended]
        return ended


def memory_of(tensor: Any, *, dense: bool = False) -> tuple[int, int]:
    """Return the address of a tensor's bytes, and their number."""
    if (place := tensor.device).type != "cpu":
        raise ValueError(f"fullwire: expected a tensor of the processor, got one on {place}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"fullwire: expected a dense tensor, got {tensor.layout}")
    if not tensor.is_contiguous() and not (dense and is_without_gaps(tensor)):
        raise ValueError("Tensors must be contiguous")  # the words of Gloo
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def landing_for(outputs: Sequence[Any]) -> tuple[list[Any], Callable[[], None] | None]:
    """Return tensors without gaps to receive in, and a function that copies them to the others."""
    dense = [
        output if output.is_contiguous() else output.new_empty(output.shape) for output in outputs
    ]
    apart = [(out, one) for out, one in zip(outputs, dense, strict=True) if out is not one]

    def spread() -> None:
        for out, one in apart:
            out.copy_(one)

    return dense, spread if apart else None


def is_without_gaps(tensor: Any) -> bool:
    """Say whether a tensor is contiguous in some order of its dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def only(tensors: Any) -> Any:
    """Return the one tensor of a list."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"expected one tensor, got {len(tensors)}")
    return tensors[0]


def listed(tensors: Any) -> Sequence[Any]:
    """Return the tensors for all ranks, which torch may put in a list of one list."""
    return tensors[0] if isinstance(tensors[0], list | tuple) else tensors


def cut(whole: Any, parts: int, part: Any) -> Places:
    """Cut a tensor into places of tensors like the part; check the type, which torch has not."""
    if whole.dtype is not part.dtype:
        raise ValueError(f"expected tensors of one type, got {typed(part)} and {typed(whole)}")
    address, size = memory_of(whole)
    each = part.numel() * part.element_size()
    if size != each * parts:
        raise ValueError(f"expected {parts} times {each} bytes in one tensor, got {size}")
    return [(address + index * each, each) for index in range(parts)]


def split(memory: tuple[int, int], tensor: Any, splits: Sequence[int], parts: int) -> Places:
    """Cut a tensor along its first dimension, into equal parts unless splits are given."""
    rows = int(tensor.shape[0]) if tensor.dim() else 1
    counts = list(splits) or [rows // parts] * parts
    if len(counts) != parts or sum(counts) != rows:
        raise ValueError(f"all_to_all: expected {parts} splits of {rows} rows, got {counts}")
    row_bytes = memory[1] // rows if rows else 0
    firsts = accumulate(counts, initial=0)
    return [
        (memory[0] + first * row_bytes, count * row_bytes)
        for first, count in zip(firsts, counts, strict=False)
    ]


_SUM = dist.ReduceOp.SUM
_CALLED = {getattr(dist.ReduceOp, name): name for name in programs.REDUCTIONS}


def called(opts: Any) -> str:
    """Return the name of the reduction that torch asks for."""
    reduction = getattr(opts, "reduceOp", opts)
    # To look an enumeration of torch up in a dictionary takes two more calls into torch.
    if reduction is None or reduction == _SUM:
        return "SUM"
    kind = getattr(reduction, "op", reduction)
    return _CALLED.get(kind) or str(kind).removeprefix("RedOpType.")


@functools.cache
def arithmetic(reduction: str, dtype: Any) -> tuple[int, int]:
    """Return the engine's numbers of a reduction and of the type that it works on."""
    kind = str(dtype).removeprefix("torch.")
    # A complex number is added as two real ones.
    is_added = dtype.is_complex and reduction in ("SUM", "AVG")
    worked_on = str(dtype.to_real()).removeprefix("torch.") if is_added else kind
    if worked_on not in programs.NUMBERS:
        raise TypeError(f"fullwire cannot reduce {kind} by {reduction}")
    if reduction not in programs.REDUCTIONS:
        raise ValueError(f"fullwire knows no reduction {reduction}")
    if reduction.startswith("B") and dtype.is_floating_point:
        raise ValueError(f"{reduction}: expected whole numbers, got {kind}")
    if reduction == "AVG" and dtype == torch.bool:
        raise ValueError("AVG: expected numbers, got bool")
    return programs.REDUCTIONS[reduction], programs.NUMBERS[worked_on]


def root_of(opts: Any, more: dict[str, Any]) -> int:
    """Return the rank that a collective starts from or ends at."""
    return opts if isinstance(opts, int) else int(more.get("root", getattr(opts, "rootRank", 0)))


def typed(tensor: Any) -> str:
    """Return the name of a tensor's type."""
    return str(tensor.dtype).removeprefix("torch.")


def described(tensor: Any) -> str:
    """Return how many numbers of which type a tensor has."""
    return f"{tensor.numel()} {typed(tensor)}"
