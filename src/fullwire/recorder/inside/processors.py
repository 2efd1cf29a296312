"""Note the processor time of the process, and that of its communication threads.

Transports that run on processors reach their limit there, before the line's. Their threads have
names, and the kernel keeps a clock for every thread. Listing threads costs most, some 100 us with
cold caches, and is done rarely. That is enough: a new thread's clock counts since its beginning.

Data loaders work in processes of their own, which are the job's too: the kernel also keeps a clock
for each child.

A computing thread may be ready to run but wait for a processor. The kernel counts this time too. It
is read at the end of each step, for the thread that steps and for others that compute as much.

The program's own thread uses processor time between a step and the next forward pass, or it waits
there, for example for a disk. Its notes show which.

A communication hook packs gradients on some thread. Its own work is noted apart.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

from .journal import Journal, Note
from .notes import Notes, native_hooks

# The beginnings of communication threads' names.
COMMUNICATING = ("fullwire", "gloo", "pt_gloo", "NCCL", "UCX", "mscclpp")
_EVERY_NS = 250_000_000
_LIST_EVERY_NS = 2_000_000_000
_WORTH_A_NOTE_NS = 1_000_000
_MOST_COMPUTING = 4  # Threads whose run delay is read: each takes some 10 us of a step.
_AS_MUCH = 0.5  # Share of the stepping thread's processor time: a thread with more computes too.
# With the number of a thread or a process before it: its processor clock (posix-timers).
_OF_A_THREAD, _OF_A_PROCESS = 6, 2


def ran_and_waited_ns(thread: int) -> tuple[int, int]:
    """Return how long a thread has run, and how long it was ready and had no processor."""
    file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
    try:
        return _two_of(os.read(file, 100))
    finally:
        os.close(file)


def _two_of(content: bytes) -> tuple[int, int]:
    run_ns, delay_ns, _ = content.split()
    return int(run_ns), int(delay_ns)


class _OwnTimes:
    """The running and waiting time of the calling thread, from a file that is kept open.

    Opening and closing the file takes three times as long as reading it. A job may close files that
    it does not know, and then give their numbers to its own. So what is read must look like the
    times of a thread, and only our own file is closed.
    """

    def __init__(self) -> None:
        self.thread = self._file = -1  # the kernel's number of the thread that read last
        self._known_as: int | None = None  # Python's: to ask for the kernel's is a system call
        self._identity: os.stat_result | None = None
        os.register_at_fork(after_in_child=self.forget)

    @property
    def file(self) -> int:
        """Return the file that is kept open."""
        return self._file

    def forget(self) -> None:
        """Open the file anew: a child's thread has the name of the one that forked it off.

        Python calls this after its own forks. A child that C code forked off reads the times of its
        parent's thread for as long as it keeps the file.
        """
        self._known_as = None

    def read(self) -> tuple[int, int]:
        """Return how long this thread has run, and how long it was ready and had no processor."""
        if threading.get_ident() == self._known_as:
            try:  # contextlib would be three calls in each step
                return _two_of(os.pread(self._file, 100, 0))
            except (OSError, ValueError):  # not our file, or a thread with the name of an older one
                pass
        with contextlib.suppress(OSError):
            if self._identity and os.path.samestat(os.fstat(self._file), self._identity):
                os.close(self._file)
        self._known_as, self.thread = None, threading.get_native_id()
        path = f"/proc/self/task/{self.thread}/schedstat"
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._identity, self._known_as = os.fstat(self._file), threading.get_ident()
        return _two_of(os.pread(self._file, 100, 0))


class NoShortDelay:
    """Stands for the short way of `Processors.note_delay`, where it is not there.

    `native/hooks/` holds the short way: it reads the kept file of the thread that steps.
    """

    def __init__(self, notes: Notes) -> None:
        pass

    def note(self) -> bool:
        """Say that nothing was noted."""
        return False

    def use(self, file: int, run_ns: int, delay_ns: int) -> None:
        """Count from these times of this thread on."""

    def stop(self) -> tuple[int, int] | None:
        """Return what was read last, if anything was."""
        return None


class Processors:
    """Notes from time to time the processor time of the process since its beginning."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.due_ns = self._listed_ns = 0
        self._is_communicating: dict[int, bool] = {}
        self._used_ns: dict[int, int] = {}
        self._told_ns = 0, 0  # Notes hold differences, which are small numbers.
        self._children_ns: dict[int, int] = {}  # By process, of those that run.
        self._ended_ns = self._children_told_ns = 0  # Of those that ended; of all, as noted.
        self._computing: list[int] = []  # Threads beside the one that steps.
        self._delays_ns: dict[int, tuple[int, int]] = {}  # By thread: time running, time waiting.
        self._delay_noted_ns = 0
        self._own = _OwnTimes()
        native = native_hooks()
        self.short: NoShortDelay = (native.ShortDelay if native else NoShortDelay)(journal.notes)
        os.register_at_fork(after_in_child=self.short.stop)

    def note_if_due(self) -> None:
        """Note the processor time if the last note is long enough ago."""
        now_ns = time.monotonic_ns()
        if self._journal.is_open and now_ns >= self.due_ns:
            self.due_ns = now_ns + _EVERY_NS
            try:
                if now_ns - self._listed_ns > _LIST_EVERY_NS:
                    self._listed_ns = now_ns
                    for thread in map(int, os.listdir("/proc/self/task")):
                        with contextlib.suppress(OSError):  # the thread has just ended
                            if thread not in self._is_communicating:
                                with open(f"/proc/self/task/{thread}/comm") as name:
                                    is_one = name.read().startswith(COMMUNICATING)
                                self._is_communicating[thread] = is_one
                            if self._is_communicating[thread]:
                                self._used_ns.setdefault(thread, 0)
                    self._find_computing()
                    for thread in {os.getpid(), threading.get_native_id()}:  # that start loaders
                        with contextlib.suppress(OSError):
                            with open(f"/proc/self/task/{thread}/children") as found:
                                children = map(int, found.read().split())
                            self._children_ns = dict.fromkeys(children, 0) | self._children_ns
                for thread in self._used_ns:
                    try:
                        now_used_ns = time.clock_gettime_ns((~thread << 3) | _OF_A_THREAD)
                    except OSError:  # the thread has ended: its time up to then stays counted
                        continue
                    self._used_ns[thread] = now_used_ns
                used_ns = sum(self._used_ns.values())
            except OSError as error:  # no /proc, or another kernel: the rest is recorded
                self._journal.define(kind="missing", sentence=f"processor time unknown: {error}")
                self.due_ns = 2**63
            else:
                whole_ns = time.process_time_ns()
                before_whole_ns, before_part_ns = self._told_ns
                self._told_ns = whole_ns, used_ns
                self._journal.note(
                    Note.PROCESSOR, whole_ns - before_whole_ns, now_ns, used_ns - before_part_ns
                )
                if self._children_ns:
                    self._note_children(now_ns)

    def _note_children(self, now_ns: int) -> None:
        """Note their time since the last; one that has ended keeps its last time."""
        for child in [*self._children_ns]:  # a job may start others in each epoch
            try:
                self._children_ns[child] = time.clock_gettime_ns((~child << 3) | _OF_A_PROCESS)
            except OSError:
                self._ended_ns += self._children_ns.pop(child)
        whole_ns = self._ended_ns + sum(self._children_ns.values())
        self._journal.note(Note.CHILDREN, whole_ns - self._children_told_ns, now_ns, 0)
        self._children_told_ns = whole_ns

    def _find_computing(self) -> None:
        here = threading.get_native_id()
        used_ns = {}
        for thread in (known for known, sends in self._is_communicating.items() if not sends):
            with contextlib.suppress(OSError):  # the thread has ended
                used_ns[thread] = time.clock_gettime_ns((~thread << 3) | _OF_A_THREAD)
        own_ns = used_ns.pop(here, 0)
        busy = [thread for thread, ns in used_ns.items() if ns >= _AS_MUCH * own_ns]
        self._computing = sorted(busy, key=lambda thread: -used_ns[thread])[: _MOST_COMPUTING - 1]
        if self._computing and (known := self.short.stop()) is not None:
            self._delays_ns = {self._own.thread: known}

    def note_delay(self) -> None:
        """Note how long computing threads ran, and waited for a processor, since the last time.

        They work at the same time, so the longest wait is the loss of the step. Steps shorter than
        a millisecond are noted together.
        """
        now_ns = time.monotonic_ns()
        if not self._journal.is_open or now_ns - self._delay_noted_ns < _WORTH_A_NOTE_NS:
            return
        self._delay_noted_ns = now_ns
        if (known := self.short.stop()) is not None:
            self._delays_ns = {self._own.thread: known}
        if not self._computing:
            try:
                run_ns, delay_ns = read = self._own.read()
            except (OSError, ValueError):  # no kernel counts this
                self._delays_ns = {}
                return
            since = self._delays_ns.get(self._own.thread)
            # Not of others, which may be computing again later.
            self._delays_ns = {self._own.thread: read}
            self.short.use(self._own.file, *read)  # from now on, until others compute as well
            if since is not None:
                self._journal.notes.add(Note.DELAY, delay_ns - since[1], now_ns, run_ns - since[0])
            return
        here, before = threading.get_native_id(), self._delays_ns
        self._delays_ns = {}
        for thread in (here, *self._computing):
            with contextlib.suppress(OSError, ValueError):  # it has ended, or no kernel counts this
                is_here = thread == here
                self._delays_ns[thread] = self._own.read() if is_here else ran_and_waited_ns(thread)
        passed = [
            (delay_ns - before[thread][1], run_ns - before[thread][0])
            for thread, (run_ns, delay_ns) in self._delays_ns.items()
            if thread in before
        ]
        if passed:
            self._journal.notes.add(Note.DELAY, max(passed)[0], now_ns, passed[0][1])


class BeforeForward:
    """Notes the program thread's processor time from a step or a batch to the forward pass."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._here = threading.local()  # `since`: the beginning, and the thread's use up to then

    def begins(self) -> None:
        """Begin to count now."""
        self._here.since = _so_far()

    def ends(self) -> None:
        """Note the use if it took long enough; a forward before the first step has no note."""
        since = vars(self._here).pop("since", None)
        if since is None or time.monotonic_ns() - since[0] < _WORTH_A_NOTE_NS:
            return
        now_ns, used_ns, blocks = (
            now - before for now, before in zip(_so_far(), (0, *since[1:]), strict=True)
        )
        self._journal.notes.add(Note.BEFORE_FORWARD, used_ns, now_ns, blocks)


def before_forward_of(journal: Journal) -> BeforeForward:
    """Make the one of this process: `native/hooks/` holds the same class in C++."""
    native = native_hooks()
    made: BeforeForward = native.BeforeForward(journal.notes) if native else BeforeForward(journal)
    return made


def _so_far() -> tuple[int, int, int]:
    """Return the time, this thread's processor time, and the blocks that it read from disks."""
    blocks = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
    return time.monotonic_ns(), time.thread_time_ns(), blocks


class HookWork:
    """Measures the communication hooks' own work on each thread."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.is_in_use = False  # from the first hook on
        self._here = threading.local()  # its since_ns: when the hook's work went on here, or 0

    def working(
        self, function: Callable[..., Any], *, is_later: bool = False
    ) -> Callable[..., Any]:
        """Wrap a hook, or a function that it leaves to be called later, on any thread."""
        self.is_in_use = True

        @functools.wraps(function)
        def work(*args: Any, **kwargs: Any) -> Any:
            if self.is_working():
                return function(*args, **kwargs)
            self._here.is_later = is_later
            self.resume()
            try:
                return function(*args, **kwargs)
            finally:
                self.pause()

        return work

    def is_working(self) -> bool:
        """Say whether this thread is in a hook."""
        return self.is_in_use and bool(getattr(self._here, "since_ns", 0))

    def is_working_later(self) -> bool:
        """Say whether this thread is in a function that a hook has left for later."""
        return self.is_working() and bool(self._here.is_later)

    def pause(self) -> None:
        """Note the hook's work up to now."""
        here = self._here
        lasted_ns = time.monotonic_ns() - here.since_ns
        self._journal.note(Note.CODEC, here.is_later, here.since_ns, lasted_ns)
        self._here.since_ns = 0

    def resume(self) -> None:
        """Count from now on as the hook's work."""
        self._here.since_ns = time.monotonic_ns()

    def apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that hooks may call, but that is not their own work."""

        @functools.wraps(function)
        def other(*args: Any, **kwargs: Any) -> Any:
            if not self.is_working():
                return function(*args, **kwargs)
            self.pause()
            try:
                return function(*args, **kwargs)
            finally:
                self.resume()

        return other


def left_for_later(original: Callable[..., Any], codec: HookWork) -> Callable[..., Any]:
    """Wrap what leaves a function for later: a hook's function is the hook's work."""

    @functools.wraps(original)
    def later(future: Any, callback: Callable[..., Any]) -> Any:
        if codec.is_working():
            callback = codec.working(callback, is_later=True)
        return original(future, callback)

    return later
