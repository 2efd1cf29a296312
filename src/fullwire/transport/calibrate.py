"""What the links of a new group are like, measured by a few collectives of its own.

All ranks choose algorithms by these two numbers, so all take the same: the worst that any has seen.
"""

from __future__ import annotations

import struct
import time
from ctypes import addressof, create_string_buffer
from typing import Any

from fullwire.errors import TransportError
from fullwire.transport import programs
from fullwire.transport.programs import Links

_SMALL_TRIALS = 5
_LARGE_BYTES = 2**18
_LARGE_TRIALS = 2
_LOOK_UP_S = 0.5  # so often Python sees whether somebody wants it to end
_FLOAT64, _UINT8 = 1, 8
_SUM, _MAXIMUM = 0, 3


class Trials:
    """Collectives of a group that nobody has yet."""

    def __init__(self, engine: Any, rank: int, size: int, timeout_s: float) -> None:
        self._engine, self._rank, self._size, self._timeout_s = engine, rank, size, timeout_s
        self._exchange = programs.allreduce("recursive-doubling", size, rank)
        self._space = create_string_buffer(_LARGE_BYTES)

    def links(self) -> Links:
        """Measure how long an empty message takes and how fast a large one moves."""
        if self._size == 1:
            return Links(rate_bps=1e12, latency_s=1e-6)
        rounds = (self._size - 1).bit_length()
        latency_s = self._mean_s(self._exchange, 8, _SMALL_TRIALS) / rounds
        ring = programs.allreduce("ring", self._size, self._rank)
        large_s = self._mean_s(ring, _LARGE_BYTES, _LARGE_TRIALS)
        wire_bytes = 2 * _LARGE_BYTES * (self._size - 1) / self._size
        byte_s = max(large_s - 2 * (self._size - 1) * latency_s, large_s / 10) / wire_bytes
        latency_s, byte_s = self.most(latency_s, byte_s)
        return Links(rate_bps=8 / byte_s, latency_s=latency_s)

    def most(self, *values: float) -> tuple[float, ...]:
        """Return the largest that any rank has of each value."""
        form = f"{len(values)}d"
        struct.pack_into(form, self._space, 0, *values)
        self._carry_out(self._exchange, struct.calcsize(form), _FLOAT64, _MAXIMUM)
        return struct.unpack_from(form, self._space, 0)

    def _mean_s(self, program: Any, count: int, trials: int) -> float:
        # Several in a row after one that lets all begin together: of a single one, who comes last
        # finds everything there and thinks that it took no time.
        self._carry_out(program, count)
        began = time.perf_counter()
        for _ in range(trials):
            self._carry_out(program, count)
        return (time.perf_counter() - began) / trials

    def _carry_out(
        self, program: Any, count: int, number: int = _UINT8, reduction: int = _SUM
    ) -> None:
        place = [(addressof(self._space), count)]
        task = self._engine.collective(
            "the calibration of a new group",
            program,
            place,
            place,
            reduction,
            number,
            1,
            self._timeout_s,
            True,
        )
        while not self._engine.wait(task, _LOOK_UP_S):
            pass
        if task.problem:
            raise TransportError(task.problem)
