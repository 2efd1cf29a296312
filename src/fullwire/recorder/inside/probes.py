"""Probe steps: a few steps in which sums wait until the backward pass is done.

Computing and communication do not overlap in probe steps. So they show the time of computing
without contention from the job's own communication. Results stay the same: the same sums are made
of the same tensors, in the same order.

An all-reduce is held back and issued at the end of the backward pass, before DDP waits for it. The
engine of autograd calls its callbacks in the order of their registration, and DDP registers its own
when its last bucket is ready. Other transfers of shards are waited for at their issue. Any other
collective first issues those held back, so the order is the same in every step, on every rank.

A backward pass may ask for a sum until it has ended, and a held-back one would never end. So its
question issues them too. To any other thread a held-back sum has not ended yet. A wait of such a
thread issues them beside the pass, and the step is then no probe.

In some further probe steps, ranks of one machine also compute one after another (turns.py).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .journal import Journal, Note
from .processors import ran_and_waited_ns
from .turns import Turns

# Steps, counted from 0: a job of 24 steps has all these probes. Jobs whose steps take turns, two to
# four kinds of them, have probes of each kind.
FIRST = (5, 8, 13, 15, 18)
# A long job has more probes, as the machine may change. The number is a prime for the same reason.
THEN_EVERY, UP_TO = 53, 1000
_WAITED_FOR = ("allgather", "reducescatter")


class Probes:
    """Chooses the probe steps, and keeps communication apart from computing in them."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._held: list[_Held] = []
        self._leading: int | None = None  # the optimizer whose steps are counted
        self._others: set[int] = set()  # optimizers that stepped since the leading one did
        self._steps = 0
        self._apart = 0  # collectives that were kept apart from computing in this step
        # In these collectives this thread ran for so long, and waited so long for a processor.
        self._ran_ns = self._waited_ns = 0
        self._may_hold = True
        # Other threads of the program may wait or send meanwhile. The order of sums stays that of
        # their calls.
        self._in_order = threading.RLock()
        self._releasing: set[int] = set()  # threads
        self._is_spoiled = False  # this step, by a sum beside its backward pass
        self._turns = Turns(journal)
        self.is_on = False

    def step_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note a probe step that ends, and decide whether the next step is a probe."""
        number = id(optimizer)
        if self._leading is None:
            self._leading = number
        elif number in self._others:  # the leading optimizer has stopped stepping
            self._leading, self._steps = number, 1
        if number != self._leading:
            self._others.add(number)
            return
        self._others.clear()
        is_kept_apart = bool(self._apart) and not self._is_spoiled
        if is_kept_apart and not self._turns.is_on:
            self._journal.note(Note.PROBE, self._ran_ns, time.monotonic_ns(), self._waited_ns)
        self._steps, self._apart, self._is_spoiled = self._steps + 1, 0, False
        self._ran_ns = self._waited_ns = 0
        is_probe = self._steps in FIRST
        is_probe |= self._steps <= UP_TO and self._steps % THEN_EVERY == 0
        if self._may_hold and self._journal.is_open:
            self._turns.step_ended(self._steps, is_kept_apart=is_kept_apart)
            is_probe |= self._turns.is_on
        self.is_on = is_probe and self._may_hold and self._journal.is_open

    def before_passes(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a forward pass: it waits for this rank's turn, if the step has turns."""

        @functools.wraps(forward)
        def in_turn(*args: Any, **kwargs: Any) -> Any:
            if self._turns.is_on and torch.is_grad_enabled():
                self._turns.passes_begin()
            return forward(*args, **kwargs)

        return in_turn

    def step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Tell the turns of a step which optimizer begins."""
        if self._turns.is_on:
            self._turns.optimizer_begins(is_leading=id(optimizer) == self._leading)

    def stop(self) -> None:
        """Make no more probe steps, because a C++ hook refuses a Future made in Python."""
        self._may_hold = self.is_on = False

    def around(self, collective: Callable[..., Any], op: str) -> Callable[..., Any]:
        """Wrap one method of a process group."""

        @functools.wraps(collective)
        def apart(group: Any, *args: Any, **kwargs: Any) -> Any:
            # During a release, hooks issue the collectives that follow their first sum.
            if not self.is_on or threading.get_ident() in self._releasing:
                return collective(group, *args, **kwargs)
            if op == "allreduce":
                with self._in_order:
                    if not self._is_spoiled and self._is_backward():
                        issue = functools.partial(collective, group, *args, **kwargs)
                        held = _Held(self, issue, args)
                        self._held.append(held)
                        self._apart += 1
                        return held
            self._turns.interrupted()
            self.release_for(waits=True)
            with self._beside_computing():
                work = collective(group, *args, **kwargs)
                if op in _WAITED_FOR and work is not None:
                    work.wait()
                    if torch.cuda.is_initialized():
                        torch.cuda.synchronize()
                    self._apart += 1
            return work

        return apart

    def _is_backward(self) -> bool:
        """Say whether a backward pass is under way; its end issues the held-back all-reduces."""
        if not self._held:
            try:
                torch.autograd.Variable._execution_engine.queue_callback(self.release)
            except RuntimeError:
                return False
        return True

    def release(self) -> None:
        """Issue the held-back all-reduces, and wait for them."""
        thread = threading.get_ident()
        is_inner = thread in self._releasing  # as where a hook asks during a release
        with self._in_order:  # or another thread is still issuing them
            if not self._held:
                return
        self._releasing.add(thread)
        self._turns.passes_end()
        try:
            with self._beside_computing():
                with self._in_order:
                    held, self._held = self._held, []
                    for work in held:
                        work.issue()
                for work in held:
                    work.finish()
        finally:
            if not is_inner:
                self._releasing.discard(thread)
        self._turns.sums_end()

    @contextlib.contextmanager
    def _beside_computing(self) -> Iterator[None]:
        """Count for how long this thread runs, and waits for a processor, in collectives."""
        thread, before_ns = threading.get_native_id(), None
        with contextlib.suppress(OSError, ValueError):  # no kernel counts this
            before_ns = ran_and_waited_ns(thread)
        yield
        with contextlib.suppress(OSError, ValueError):
            if before_ns is not None:
                ran_ns, waited_ns = ran_and_waited_ns(thread)
                self._ran_ns += ran_ns - before_ns[0]
                self._waited_ns += waited_ns - before_ns[1]

    def release_for(self, *, waits: bool) -> None:
        """Issue the held-back all-reduces for a caller that needs one to end."""
        is_beside = torch._C._current_graph_task_id() < 0  # a thread without a backward pass
        if waits or not is_beside:
            if is_beside and self._held:
                self._is_spoiled = True
                self._turns.stop()
            self.release()

    def asking(self, ask: Callable[..., Any], *, waits: bool) -> Callable[..., Any]:
        """Wrap a question to a future, or a wait: it may belong to a held-back all-reduce."""

        @functools.wraps(ask)
        def released(*args: Any, **kwargs: Any) -> Any:
            if self._held:
                self.release_for(waits=waits)
            return ask(*args, **kwargs)

        return released


class _Held(dist.Work):  # type: ignore[misc]  # torch may be absent when we check
    """The work of a held-back all-reduce, as its caller sees it."""

    def __init__(self, probes: Probes, issue: Callable[[], Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self._probes = probes
        self._issue = issue
        self._tensors = list(args[0]) if isinstance(args[0], list | tuple) else [args[0]]
        self._work: Any = None
        self._problem: Exception | None = None
        devices = {tensor.device for tensor in self._tensors if tensor.is_cuda}
        self._ended = torch.futures.Future(devices=list(devices))
        self._future: Any = None

    def issue(self) -> None:
        """Issue the true all-reduce."""
        self._work = self._issue()

    def finish(self) -> None:
        """Wait for the end of the all-reduce, and complete the future."""
        try:  # by its future if it has one: our transport works in the thread that waits
            if getattr(self._work, "tells_times", False):
                self._work.get_future().wait()
            else:
                self._work.wait()
        except Exception as error:  # raised again for the waiters, like the true work's
            self._problem = error
        self._ended.set_result(self._tensors)

    def wait(self, *timeout: Any) -> bool:
        """Return when the result is there; a waiting caller ends the holding back."""
        if self._work is None:
            self._probes.release_for(waits=True)
        return bool(self._work.wait(*timeout))

    def get_future(self) -> Any:
        """Return a future of the result."""
        if self._future is None:  # an error in a callback makes it fail for C++ as well
            self._future = self._ended.then(self._outcome)
        return self._future

    def _outcome(self, _: Any) -> Any:
        if self._problem is not None:
            raise self._problem
        return self._tensors

    def is_completed(self) -> bool:
        """Say whether it has ended.

        In its own backward pass this takes until it has. A caller may ask again and again.
        """
        self._probes.release_for(waits=False)
        return self._work is not None and bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Say whether it has ended well, which takes as long as `is_completed`."""
        self._probes.release_for(waits=False)
        return self._work is not None and bool(self._work.is_success())

    def exception(self) -> Any:
        """Return the error of the all-reduce."""
        return self._problem

    def result(self) -> Any:
        """Return the tensors that hold the result."""
        return self._tensors

    def synchronize(self) -> None:
        """Return when the result is there."""
        self.wait()
