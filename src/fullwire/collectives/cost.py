"""The cost of a collective in closed form: bytes and messages in a row, and additions.

    time = 8 * wire_bytes / rate + hops * latency + add time

For a ring all-reduce of S bytes over N workers this is the cost that Zhang et al. (NetAI 2020) use,
2 * 8 S (N-1)/N / rate + (N-1) AddEst(S/N), with latency added. It holds where no two transfers meet
on a link and the links are equal. The formula of each algorithm is in its own file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fullwire.errors import UsageError

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class AddTimes:
    """Measured times of adding two vectors; between sizes a straight line, beyond them flat."""

    points: tuple[tuple[float, float], ...] = ()  # (bytes, seconds), bytes ascending

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)):
            raise UsageError("add times: expected sizes in ascending order, each once")

    def __call__(self, size_bytes: ArrayLike) -> Floats:
        """Estimate the time to add two vectors of these sizes; zero without measurements."""
        wanted = np.asarray(size_bytes, np.float64)
        if not self.points:
            return np.zeros_like(wanted)
        sizes, times = zip(*self.points, strict=True)
        return np.asarray(np.interp(wanted, sizes, times), np.float64)


@dataclass(frozen=True, eq=False, slots=True)
class Cost:
    """The three terms of a collective's time, for one size or many."""

    wire_bytes: Floats  # one after another
    hops: int  # messages that wait for each other
    add_s: Floats
    idle_bytes: Floats | float = 0.0  # of `wire_bytes`, those that the busiest link need not send

    @property
    def sent_bytes(self) -> Floats:
        """Return the bytes that the busiest link sends."""
        return self.wire_bytes - self.idle_bytes

    def time_s(self, rate_bps: float, latency_s: float) -> Floats:
        """Return the time on links of this rate and latency."""
        return 8 * self.wire_bytes / rate_bps + (self.hops * latency_s + self.add_s)


def bus_factor(op: str, workers: int) -> float:
    """Return the bytes through each link of an ideal collective, per byte of message.

    Sizes are of the whole vector: the input of a reduce-scatter, and the output of an all-gather.
    """
    share = (workers - 1) / workers
    factors = {"allreduce": 2 * share, "barrier": 0.0} | dict.fromkeys(
        ("reducescatter", "allgather", "alltoall", "gather", "scatter"), share
    )
    return factors.get(op, 1.0)
