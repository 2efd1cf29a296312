"""Ranks that run out of a resource: roles for `in_processes`."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.transport_ranks import joined

LACKING = 1  # the rank that runs out


def _told(work: Callable[[], Any]) -> str:
    """Return the error, and leave the group."""
    try:
        work()
    except RuntimeError as error:
        return str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "nothing"


def without_descriptors(
    free: int, rank: int, size: int, store: Any, timeout: timedelta
) -> tuple[str, float, float]:
    """Start a group where one rank has only a few descriptors left."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    if rank == LACKING:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(free):
            os.close(taken.pop())
    began_s, began_wall_s = time.process_time(), time.monotonic()
    said = _told(lambda: joined(rank, size, store, timeout))
    used_s, wall_s = time.process_time() - began_s, time.monotonic() - began_wall_s
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for each in taken:
        os.close(each)
    return said, used_s, wall_s


def without_threads(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    """Request a Future where no thread can be started, and wait for it."""
    joined(rank, size, store, timeout)
    if rank == LACKING:
        setattr(threading.Thread, "start", _no_thread)  # noqa: B010  # mypy allows no other way

    def asked() -> None:
        if rank != LACKING:
            store.wait(["asked"])  # a sum that is complete needs no thread
        works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(50)]
        try:
            futures = [work.get_future() for work in works]
        finally:
            store.set("asked", "")
        for future in futures:
            future.wait()

    return _told(asked)


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def without_engine_threads(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    """Start a group where the native part gets no thread."""
    from fullwire import _native

    class NoStreams:
        def __init__(self, _: int, sockets: list[int], *__: Any) -> None:
            for each in sockets:
                if each >= 0:
                    os.close(each)
            raise RuntimeError(f"rank {rank}: no new thread")

    if rank == LACKING:
        _native.TransportStreams = NoStreams  # type: ignore[assignment,misc]
    return _told(lambda: joined(rank, size, store, timeout))


def without_memory(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    """Reduce where the transport has no memory for data that it must put aside."""
    joined(rank, size, store, timeout)
    given = torch.ones(3 << 24)
    output = torch.empty(1 << 24)
    dist.barrier()
    # A rank that has left the barrier may fail while others are still in it, and they hear of it.
    store.set(f"past the barrier {rank}", "")
    store.wait([f"past the barrier {each}" for each in range(size)])
    if rank == LACKING:
        with open("/proc/self/statm") as statm:
            used_bytes = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        room_bytes = used_bytes + (16 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (room_bytes, resource.RLIM_INFINITY))
    said = _told(lambda: dist.reduce_scatter_tensor(output, given))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return said


def begun_anew(rank: int, size: int, store: Any, timeout: timedelta) -> float:
    """Read the messages of a failed attempt in a store that is used again."""
    from fullwire.transport.rendezvous import leave_word

    if rank == 0:
        for before in ("default_pg//cpu/", "default_pg//cpu", "0//cpu/", "0//cpu"):
            inner = dist.PrefixStore(before, store)  # a prefix as torch gives one to a group
            inner.set("number", "00" * 32)
            leave_word(inner, 1, "rank 1: out of memory")
        store.set("prepared", "")
    store.wait(["prepared"])
    joined(rank, size, store, timeout)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return float(tensor)
