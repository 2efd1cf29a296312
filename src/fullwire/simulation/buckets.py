"""How gradients are grouped into messages: the policies of the frameworks, and the paper's.

A policy takes the gradients of one step in the order in which they become ready. It decides after
which gradients a message is closed, and when the message may leave.

    none                  every gradient by itself
    ddp                   PyTorch: closed once it holds 1 MiB (the first) or 25 MiB (the others);
                          these are the defaults when bucket_cap_mb is unset
    ddp:50MiB             PyTorch with bucket_cap_mb=50, which holds for the first bucket too
    paper, 64MiB/5ms      Zhang et al.: closed once waits add up to 5 ms or bytes to 64 MiB; the
                          clock starts anew with each message
    horovod:64MiB/5ms     Horovod: every tick of its cycle sends the ready gradients, packed in
                          order into buffers of at most this size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.errors import UsageError
from fullwire.units import seconds, size_bytes

_MIB = 2**20
_EXPECTED = "none, ddp, ddp:SIZE, paper, SIZE/TIME or horovod:SIZE/TIME, like 25MiB/5ms"


@dataclass(frozen=True, eq=False, slots=True)
class Buckets:
    """The messages of a step: how many gradients each holds, its bytes, and when it may leave."""

    gradient_count: NDArray[np.int64]
    bytes: NDArray[np.int64]
    ready_ns: NDArray[np.int64]  # after the backward pass began

    def __len__(self) -> int:
        return len(self.bytes)


class BucketPolicy(Protocol):
    """Groups gradients, given in the order in which they become ready."""

    def group(self, ready_ns: NDArray[np.int64], bytes_: NDArray[np.int64]) -> Buckets:
        """Group the gradients of one step."""

    def __str__(self) -> str:
        """Return the form that `bucket_policy` reads."""


@dataclass(frozen=True, slots=True)
class EachGradient:
    """No buckets: every gradient is a message."""

    def group(self, ready_ns: NDArray[np.int64], bytes_: NDArray[np.int64]) -> Buckets:
        """Make a message of each gradient."""
        return _closed_after(list(range(len(bytes_))), ready_ns, bytes_)

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class DdpBuckets:
    """PyTorch's: a bucket is closed by the gradient that fills it, which may overfill it."""

    cap_bytes: int = 25 * _MIB
    first_cap_bytes: int = _MIB

    def group(self, ready_ns: NDArray[np.int64], bytes_: NDArray[np.int64]) -> Buckets:
        """Close a bucket as soon as it holds its cap."""
        ends, held, cap = [], 0, self.first_cap_bytes
        for index, size in enumerate(bytes_.tolist()):
            held += size
            if held >= cap:
                ends.append(index)
                held, cap = 0, self.cap_bytes
        return _closed_after(ends, ready_ns, bytes_)

    def __str__(self) -> str:
        return "ddp" if self == DdpBuckets() else f"ddp:{_size_text(self.cap_bytes)}"


@dataclass(frozen=True, slots=True)
class WaitOrSize:
    """The paper's: a message is closed by the waiting that it has seen, or by its bytes."""

    cap_bytes: int = 64 * _MIB
    wait_ns: int = 5_000_000

    def group(self, ready_ns: NDArray[np.int64], bytes_: NDArray[np.int64]) -> Buckets:
        """Add waits and bytes up, and close the message when either reaches its limit."""
        ends, held, waited = [], 0, 0
        waits = np.diff(ready_ns, prepend=0)
        for index, (wait, size) in enumerate(zip(waits.tolist(), bytes_.tolist(), strict=True)):
            held += size
            waited += wait
            if waited >= self.wait_ns or held >= self.cap_bytes:
                ends.append(index)
                held, waited = 0, 0
        return _closed_after(ends, ready_ns, bytes_)

    def __str__(self) -> str:
        if self == WaitOrSize():
            return "paper"
        return f"{_size_text(self.cap_bytes)}/{self.wait_ns / 1e6:.12g}ms"


@dataclass(frozen=True, slots=True)
class HorovodTicks:
    """Horovod's: a tick sends the ready gradients, and ticks count from the backward's start."""

    cap_bytes: int = 64 * _MIB
    cycle_ns: int = 5_000_000

    def group(self, ready_ns: NDArray[np.int64], bytes_: NDArray[np.int64]) -> Buckets:
        """Close a buffer when the next gradient would overfill it, or waits for a later tick."""
        ticks = -(-ready_ns // self.cycle_ns) * self.cycle_ns
        ends, held = [], 0
        sizes = bytes_.tolist()
        for index, size in enumerate(sizes):
            held += size
            is_last = index + 1 == len(sizes)
            if (
                is_last
                or ticks[index + 1] != ticks[index]
                or held + sizes[index + 1] > self.cap_bytes
            ):
                ends.append(index)
                held = 0
        return _closed_after(ends, ticks, bytes_)

    def __str__(self) -> str:
        return f"horovod:{_size_text(self.cap_bytes)}/{self.cycle_ns / 1e6:.12g}ms"


def bucket_policy(text: str) -> BucketPolicy:
    """Read a policy from its text."""
    simple: dict[str, BucketPolicy] = {
        "none": EachGradient(),
        "ddp": DdpBuckets(),
        "paper": WaitOrSize(),
    }
    if text in simple:
        return simple[text]
    kind, _, limits = text.rpartition(":")
    size, _, time = limits.partition("/")
    if kind == "ddp" and not time:
        cap = size_bytes(size, "bucket size")
        return DdpBuckets(cap_bytes=cap, first_cap_bytes=cap)
    if kind in ("", "horovod") and time:
        cap, limit_ns = size_bytes(size, "bucket size"), round(seconds(time, "bucket time") * 1e9)
        if limit_ns < 1:
            raise UsageError(f"bucket time: expected at least 1ns, got {time!r}")
        return WaitOrSize(cap, limit_ns) if kind == "" else HorovodTicks(cap, limit_ns)
    raise UsageError(f"buckets: expected {_EXPECTED}, got {text!r}")


def _closed_after(
    ends: list[int], leave_ns: NDArray[np.int64], bytes_: NDArray[np.int64]
) -> Buckets:
    """Cut the gradients after these; the end of the step sends the rest."""
    last = len(bytes_) - 1
    closed = np.array(ends if ends and ends[-1] == last else [*ends, last], np.int64)
    total = np.cumsum(bytes_)[closed]
    return Buckets(np.diff(closed, prepend=-1), np.diff(total, prepend=0), leave_ns[closed])


def _size_text(size: int) -> str:
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def fragment_shares(bytes_: NDArray[np.int64], count: int) -> Floats:
    """Return the share of a step's bytes that each fragment of the parameters has.

    Fragments end between parameters, as those of `fullwire.elastic` do, and each has one parameter
    at the least. So a large parameter makes a large fragment. The gradients are given in the order
    in which they become ready, which is the parameters' order from the last one on.
    """
    passed = np.cumsum(bytes_[::-1].astype(np.float64))
    count = min(count, len(passed))
    ends = [-1]
    for number in range(1, count):
        full = int(np.searchsorted(passed, passed[-1] * number / count))
        ends.append(max(ends[-1] + 1, min(full, len(passed) - 1 - (count - number))))
    edges = np.concatenate([[0.0], passed[ends[1:]], passed[-1:]])
    return np.asarray(np.diff(edges) / passed[-1])
