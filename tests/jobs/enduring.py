"""A rank that joins groups, reduces, leaves, and reports the resources that it still holds."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.jobs.asked import serve

BACKEND = sys.argv[2]


def join(port: int, timeout_s: float, ranks: int) -> dict[str, Any]:
    """Make a group through a store on this port, and use it once."""
    rank, patience = int(os.environ["RANK"]), timedelta(seconds=timeout_s)
    began_s = time.monotonic()
    try:
        # our own store, because torch's waits for all ranks before the group may
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            is_master=rank == 0,
            wait_for_workers=False,
            timeout=patience,
        )
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=ranks, timeout=patience)
        dist.barrier()
    except Exception as error:  # every error is an answer
        return {"error": _said(error), "took_s": time.monotonic() - began_s}
    return {"error": None, "took_s": time.monotonic() - began_s}


def reduce(count: int, lasting_s: float) -> dict[str, Any]:
    """Reduce until rank 0 finds that the time is over, or until an error."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    until_s = time.monotonic() + lasting_s
    values = torch.empty(count + 1)
    times = wrong = 0
    is_over = False
    while not is_over:
        values.fill_(rank + 1)
        values[0] = float(rank == 0 and time.monotonic() > until_s)
        began_s = time.monotonic()
        try:
            dist.all_reduce(values)
        except Exception as error:  # every error is an answer
            waited_s = time.monotonic() - began_s
            return {"error": _said(error), "waited_s": waited_s, "times": times, "wrong": wrong}
        wrong += int((values[1:] != ranks * (ranks + 1) / 2).sum())
        times += 1
        is_over = bool(values[0])
    return {"error": None, "waited_s": 0.0, "times": times, "wrong": wrong}


def leave() -> dict[str, float]:
    """Destroy the group, if there is one."""
    began_s = time.monotonic()
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0  # torch counts failed groups, too
    gc.collect()
    return {"took_s": time.monotonic() - began_s}


def held() -> dict[str, int]:
    """Count the resources of this process, and the freed pages that its allocator keeps."""
    gc.collect()
    untrimmed_bytes = 1024 * int(_status()["VmRSS"].split()[0])
    ctypes.CDLL(None).malloc_trim(0)
    figures = _status()
    memory_bytes = 1024 * int(figures["VmRSS"].split()[0])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(figures["Threads"]),
        "memory_bytes": memory_bytes,
        "kept_bytes": untrimmed_bytes - memory_bytes,
        "allocated_bytes": _allocated_bytes(),
        "python_blocks": sys.getallocatedblocks(),
    }


def _status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines)


class _Mallinfo(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def _allocated_bytes() -> int:
    """Count allocated bytes without the freed bytes that the allocator keeps."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    told = mallinfo()
    return int(told.uordblks + told.hblkhd)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "join": join,
    "reduce": reduce,
    "leave": leave,
    "held": held,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(lambda request: _ANSWERS[request.pop("do")](**request))
