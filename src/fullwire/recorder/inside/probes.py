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

In some further probe steps, ranks of one machine also compute one after another. In other probe
steps they compute at once, and share the machine's memory and perhaps its processors, so each takes
longer than one worker would. In a turn the others sleep.

A step has two turns of each rank: its passes until the last gradient is ready, and the rest of the
step after the sums. A rank waits until the ranks before it have had theirs. After its own it waits
for those behind it, so all ranks begin their sums, and their next step, together.

The ranks of a machine share a file in the recording's folder. Each of them writes its own places in
it, and counts its turns there. The first of them also announces the next step with turns. It does
so one step ahead: the sums of the step between end on no rank before the announcement.

A thread that computes also issues its sums. In a turn it holds them back instead, which is quicker,
and they are issued afterwards. So the thread is timed in both: while it issues the sums of a step
shortly before, and while it holds back those of its turn.

Nothing may harm the job. A rank that waits too long ends the turns of all ranks for good. So does
one that issues another collective in its turn, because the others have to join it. So shards, sums
by hand, several passes with sums, several optimizers, and an optimizer that sends end them. Such a
job has one step in which this is found. It is no probe, and is left out of step times too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from .journal import Journal, Note, machine_here
from .processors import ran_and_waited_ns

# Steps, counted from 0: a job of 24 steps has all these probes. Jobs whose steps take turns, two to
# four kinds of them, have probes of each kind.
FIRST = (5, 8, 13, 15, 18)
# A long job has more probes, as the machine may change. The number is a prime for the same reason.
THEN_EVERY, UP_TO = 53, 1000
# Steps, counted from 0, that are no other probes. Some programs do more in each second, third,
# fourth or fifth step, and at most two of the first three are such.
IN_TURNS = (6, 10, 17, 32, 43)
_LONGEST_S = 10.0  # that the turns of a step may add to it
# A rank waits for so many times as long as the turns of all should take, and for these seconds.
_PATIENCE, AT_LEAST_S = 4.0, 3.0
# A rank that waits pauses so long between two looks, for each rank that it waits for. More looks
# would slow down the rank whose turn it is. After longer pauses, ranks would go on far apart.
_POLL_S = 2e-3
_OVER, _ANNOUNCED, _FIRST_RANK = 0, 1, 2  # places in the file; then each rank has three
_IS_HERE, _COUNT, _STEP = 0, 1, 2  # a rank's: the turns that it has had, and the steps
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
        self._timing: set[int] = set()  # threads
        # The processor time of issuing sums in a backward pass, and of holding them back.
        self._issues_ns: list[int] = []
        self._holds_ns: list[int] = []
        self._is_spoiled = False  # this step, by a sum beside its backward pass
        self._turns = Turns(journal)
        self.is_on = False
        # In this step the thread that computes is timed while it issues sums, or holds them back.
        self.is_timed = False

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
            more_ns = self._more_to_issue_ns() if self._turns.is_on else 0
            self._turns.step_ended(self._steps, is_kept_apart=is_kept_apart, more_ns=more_ns)
            self.is_on = is_probe or self._turns.is_on
            self.is_timed = self._turns.is_on or (self._turns.are_next and not is_probe)
        else:
            self._turns.stop()
            self.is_on = self.is_timed = False
        if self.is_timed:
            self._holds_ns = []
            self._issues_ns = self._issues_ns if self.is_on else []

    def _more_to_issue_ns(self) -> int:
        """Return how much longer it takes to issue the sums of a turn than to hold them back."""
        if not self._issues_ns:
            return 0
        # Other ranks make some of them longer. The quicker ones are nearer to those of one worker.
        issue_ns = sorted(self._issues_ns)[len(self._issues_ns) // 4]
        return issue_ns * len(self._holds_ns) - sum(self._holds_ns)

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
        self._may_hold = self.is_on = self.is_timed = False

    def is_timing(self) -> bool:
        """Say whether a sum that begins here is timed: in a backward pass, and in no other sum.

        A group may send through another group, whose method is watched as well. And hooks issue
        sums during a release.
        """
        thread = threading.get_ident()
        is_inner = thread in self._timing or thread in self._releasing
        return self.is_timed and not is_inner and torch._C._current_graph_task_id() >= 0

    def timed(self, send: Callable[..., Any], *args: Any) -> Any:
        """Issue a sum or hold it back, and time the thread in that."""
        thread, began_ns = threading.get_ident(), time.thread_time_ns()
        self._timing.add(thread)
        try:
            work = send(*args)
            if isinstance(work, _Held) or getattr(work, "tells_times", False):
                work.get_future()  # DDP asks for it next, and Python makes it
        finally:
            self._timing.discard(thread)
        took_ns = self._holds_ns if isinstance(work, _Held) else self._issues_ns
        took_ns.append(time.thread_time_ns() - began_ns)
        return work

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


_State: TypeAlias = Literal["before", "in passes", "in the sums", "after the sums"]
_IN_A_TURN = ("in passes", "after the sums")


class Turns:
    """Lets the ranks of one machine compute one after another in a few steps."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._file = -1  # that the ranks share
        self._rank, self._world, self._count = -1, 0, 0
        self._members: Sequence[int] = ()  # the ranks of this machine
        self._ended_s = self._step_s = 0.0  # when the last step ended, and how long it was
        self._state: _State = "before"
        self._sums_since_ns = 0
        self.is_on = False
        self.are_next = False  # in one of the next two steps, if they are not too long

    def step_ended(self, steps: int, *, is_kept_apart: bool, more_ns: int) -> None:
        """Note a step with turns that ends, and decide whether step number `steps` has turns.

        The thread that computes takes `more_ns` longer to issue the sums than to hold them back.
        """
        if self.is_on:
            is_whole = self._state == "after the sums" and is_kept_apart
            began_ns = time.monotonic_ns()
            self._end("before")
            self._note_wait(began_ns)
            is_whole = is_whole and not self._places()[_OVER]
            self._journal.note(Note.TURNS, int(is_whole), time.monotonic_ns(), more_ns)
            if not is_whole:
                self.stop()
        now_s = time.monotonic()
        self._step_s, self._ended_s = now_s - self._ended_s, now_s
        self.is_on = self.are_next = False
        if steps <= IN_TURNS[-1] and self._joined(steps):
            self.is_on = steps in IN_TURNS and self._places()[_ANNOUNCED] == steps
            self.are_next = steps + 1 in IN_TURNS or steps + 2 == IN_TURNS[0]
            if steps + 1 in IN_TURNS and self._rank == self._members[0]:
                self._announce(steps + 1)

    def passes_begin(self) -> None:
        """Wait for this rank's turn to compute the passes of a step."""
        if self._state == "before":
            began_ns = time.monotonic_ns()
            self._begin("in passes")
            self._note_wait(began_ns)
        elif self._state == "after the sums":  # these passes have sums of their own
            self.stop()

    def passes_end(self) -> None:
        """End this rank's turn, and wait for those of the others."""
        if self._state == "in passes":
            self._sums_since_ns = time.monotonic_ns()
            self._end("in the sums")
        elif self._state == "after the sums":
            self.stop()

    def sums_end(self) -> None:
        """Wait for this rank's turn to do the rest of the step."""
        if self._state == "in the sums":
            self._begin("after the sums")
            self._note_wait(self._sums_since_ns)  # no time of the sums is the program's own

    def optimizer_begins(self, *, is_leading: bool) -> None:
        """Check that this is the one optimizer of the step, and that its sums could wait.

        An optimizer with a closure begins before the passes.
        """
        if self._state == "in passes" or not is_leading:
            self.stop()

    def interrupted(self) -> None:
        """Say that this rank issues a collective that the others have to join."""
        if self._state in _IN_A_TURN:
            self.stop()

    def stop(self) -> None:
        """End the turns of all ranks, in this step and in those to come."""
        self._put(_OVER, 1)

    def _places(self) -> Sequence[int]:
        """Read all places; they say that turns are over where nothing can be read."""
        size = 8 * (_FIRST_RANK + 3 * self._world)
        with contextlib.suppress(OSError):
            if self._file >= 0 and len(told := os.pread(self._file, size, 0)) == size:
                return memoryview(told).cast("q")
        return [1] * (size // 8)

    def _put(self, place: int, value: int) -> None:
        if self._file >= 0:
            try:
                os.pwrite(self._file, value.to_bytes(8, sys.byteorder), 8 * place)
            except OSError:  # as on a full disk: there are no more turns here, and the others' end
                self._file = -1

    def _place(self, which: int, rank: int | None = None) -> int:
        return _FIRST_RANK + 3 * (self._rank if rank is None else rank) + which

    def _joined(self, steps: int) -> bool:
        """Say whether this rank takes part in turns, and tell the others its number of steps."""
        if self._rank < 0:
            self._join()
        places = self._places()
        if places[_OVER]:
            return False
        self._put(self._place(_STEP), steps)
        if not self._members and steps + 2 >= IN_TURNS[0]:  # all ranks have ended their first step
            ranks = range(self._world)
            self._members = [rank for rank in ranks if places[self._place(_IS_HERE, rank)]]
        return len(self._members) > 1

    def _join(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            return
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        if self._world < 2 or torch.cuda.is_initialized():
            return  # devices have their own memory
        # Each job, and each attempt of it, has a file of its own.
        names = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        name = ".".join(["turns", machine_here(), *(os.environ.get(name, "") for name in names)])
        path = Path(self._journal.directory) / name
        building = path.with_name(f"{name}.{self._rank}")
        try:
            building.write_bytes(bytes(8 * (_FIRST_RANK + 3 * self._world)))
            with contextlib.suppress(FileExistsError):  # another rank was first
                os.link(building, path)
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError):  # as on a full disk: there are no turns
            return
        finally:
            with contextlib.suppress(OSError):  # not made, or in a folder that is read-only now
                building.unlink()
        self._put(self._place(_IS_HERE), 1)

    def _announce(self, step: int) -> None:
        """Announce the next step with turns if it does not take too long.

        A rank that joined the job late has taken fewer steps than the others.
        """
        places = self._places()
        taken = [places[self._place(_STEP, rank)] for rank in self._members]
        if max(taken) - min(taken) <= 1 and len(self._members[1:]) * self._step_s <= _LONGEST_S:
            self._put(_ANNOUNCED, step)

    def _begin(self, state: _State) -> None:
        place = self._members.index(self._rank)
        self._wait_for(self._members[:place], self._count + 1)
        self._state = state

    def _end(self, state: _State) -> None:
        """Count a turn that ends, and wait until all others have had as many."""
        if self._state in _IN_A_TURN:
            self._count += 1
            self._put(self._place(_COUNT), self._count)
            self._wait_for(self._members, self._count)
        self._state = state

    def _wait_for(self, ranks: Sequence[int], count: int) -> None:
        """Wait until these ranks have had so many turns, but not for long."""
        patience_s = min(_PATIENCE * len(self._members) * self._step_s, _PATIENCE * _LONGEST_S)
        until_s = time.monotonic() + AT_LEAST_S + patience_s
        at = [self._place(_COUNT, rank) for rank in ranks]
        while not (places := self._places())[_OVER]:
            left = sum(places[each] < count for each in at)
            if not left:
                return
            if time.monotonic() > until_s:
                self.stop()
            time.sleep(_POLL_S * left)

    def _note_wait(self, since_ns: int) -> None:
        self._journal.note(Note.TURN, 0, since_ns, time.monotonic_ns() - since_ns)
