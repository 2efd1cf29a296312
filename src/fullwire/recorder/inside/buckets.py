"""The short way of DDP's buckets, which are most of a usual job's collectives.

It does no more than `collectives.py` does for a plain tensor on the host. The job has filled the
processor's caches since the last bucket, so each call of a Python function costs some 3 us, and
each call into torch 5 to 25 us. So a bucket's size is asked for once in the life of its tensor.
After a pass that went well, none of its buckets is asked whether it failed: DDP has asked.

`native/hooks/` holds the same class in C++, for where this Python can load it.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from .journal import Journal, Note

NEVER_NS = 2**63 - 1
_MOST_KNOWN = 4096
_MOST_UNSETTLED = 64  # buckets; a program may take its steps without an optimizer of torch
_now, _thread_time, _thread = time.monotonic_ns, time.thread_time_ns, threading.get_ident
_ISSUE, _END, _partial = Note.ISSUE, Note.END, functools.partial  # each look into a module counts
# A bucket of DDP: its tensor, its group's name, its signature's number, and its group's count.
Bucket: TypeAlias = tuple["weakref.ref[Any]", str, int, list[int]]
when_done = torch._C.Future.add_done_callback  # torch's own, as the hooks' use of it is watched


class Buckets:
    """Notes the issue and the end of each bucket.

    - `original`: torch's own all-reduce of a group, and `plain`: the type of what it returns
    - `otherwise`: sends what does not take the short way
    - `describe`: makes the Bucket of a tensor and its group's name
    - `other`: notes a collective whose transport returned something else
    - `numbers`: counts collectives
    """

    def __init__(
        self,
        journal: Journal,
        codec: Any,
        probes: Any,
        original: Callable[..., Any],
        plain: type[Any],
        otherwise: Callable[..., Any],
        describe: Callable[[Any, str], Bucket],
        other: Callable[[Any, Any, int, Any], None],
        numbers: Iterator[int],
        knows_devices: bool,
    ) -> None:
        self._journal = journal
        self.known: dict[int, Bucket] = {}  # by the identity of their tensors
        # Buckets that have ended, well or badly: number, time of issue, its thread, end and Future.
        self._unsettled: deque[tuple[int, int, int, int, Any]] = deque()
        note, ended, known, unsettled = journal.notes.add, self.ended, self.known, self._unsettled

        def allreduce(group: Any, tensors: Sequence[Any], *options: Any) -> Any:
            is_probe = probes is not None and probes.is_on
            if (
                codec.is_in_use
                or is_probe
                or (probes is not None and probes.is_timed and probes.is_timing())
                or not journal.notes.takes
                or len(tensors) != 1
                or (knows_devices and tensors[0].is_cuda)
            ):
                return otherwise(group, tensors, *options)
            issued_ns = _now()
            work = original(group.true, tensors, *options)
            started = _thread_time() - journal.notes.spent_ns  # as `starts_work` does
            try:
                if type(work) is not plain:  # a transport's own, which may tell more
                    other(group.true, tensors, issued_ns, work)
                else:
                    number, tensor, name = next(numbers), tensors[0], group.name
                    bucket = known.get(id(tensor))
                    if bucket is None or bucket[0]() is not tensor or bucket[1] != name:
                        if len(known) >= _MOST_KNOWN:
                            known.clear()
                        known[id(tensor)] = bucket = describe(tensor, name)
                    bucket[3][0] += 1
                    note(_ISSUE, number, issued_ns, bucket[2])
                    if len(unsettled) >= _MOST_UNSETTLED:
                        self.settle(NEVER_NS)
                    when_done(work.get_future(), _partial(ended, number, issued_ns, _thread()))
            except Exception as error:  # the job goes on
                journal.give_up(error)
            journal.notes.spent_ns = _thread_time() - started
            return work

        self.allreduce = allreduce
        self.held_by_callbacks = ended  # each callback that a transport has holds a reference

    def forget(self) -> None:
        """Forget all buckets."""
        self.known.clear()
        self._unsettled.clear()

    def ended(self, number: int, issued_ns: int, thread: int, future: Any) -> None:
        """Remember the time; to ask the future whether it failed would keep Gloo's thread."""
        self._unsettled.append((number, issued_ns, thread, _now(), future))

    def settle(self, well_since_ns: int) -> None:
        """Note the ends of the buckets that did not fail; to ask each takes 5 us.

        DDP has asked those that this thread issued since a time, in a pass that went well. Others
        may have failed after their own pass did, or in another thread's.
        """
        unsettled, here = self._unsettled, _thread()
        if not unsettled:
            return
        started = self._journal.starts_work()
        while unsettled:
            try:
                number, issued_ns, thread, ended_ns, future = unsettled.popleft()
            except IndexError:  # another thread took it
                break
            if (issued_ns >= well_since_ns and thread == here) or is_well(future):
                self._journal.notes.add(_END, number, ended_ns, 0)
        self._journal.ends_work(started)


def is_well(future: Any) -> bool:
    """Say whether a collective has an end; it has none if it failed, as when a rank died."""
    try:
        future.value()
    except Exception:
        return False
    return True
