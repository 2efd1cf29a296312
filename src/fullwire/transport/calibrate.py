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


def calibrated(engine: Any, rank: int, size: int, timeout_s: float) -> Links:
    """Measure how long an empty message takes and how fast a large one moves."""
    if size == 1:
        return Links(rate_bps=1e12, latency_s=1e-6)
    exchange = programs.allreduce("exchange", size, rank)
    ring = programs.allreduce("ring", size, rank)
    space = create_string_buffer(_LARGE_BYTES)

    def carry_out(program: Any, count: int, number: int = _UINT8, reduction: int = _SUM) -> None:
        place = [(addressof(space), count)]
        task = engine.collective(
            "the calibration of a new group", program, place, place, reduction, number, 1,
            timeout_s, True,
        )  # fmt: skip
        while not engine.wait(task, _LOOK_UP_S):
            pass
        if task.problem:
            raise TransportError(task.problem)

    def mean_s(program: Any, count: int, trials: int) -> float:
        # Several in a row after one that lets all begin together: of a single one, who comes last
        # finds everything there and thinks that it took no time.
        carry_out(program, count)
        began = time.perf_counter()
        for _ in range(trials):
            carry_out(program, count)
        return (time.perf_counter() - began) / trials

    latency_s = mean_s(exchange, 8, _SMALL_TRIALS) / (size - 1).bit_length()
    large_s = mean_s(ring, _LARGE_BYTES, _LARGE_TRIALS)
    wire_bytes = 2 * _LARGE_BYTES * (size - 1) / size
    byte_s = max(large_s - 2 * (size - 1) * latency_s, large_s / 10) / wire_bytes
    struct.pack_into("2d", space, 0, latency_s, byte_s)
    carry_out(exchange, 16, _FLOAT64, _MAXIMUM)
    latency_s, byte_s = struct.unpack_from("2d", space, 0)
    return Links(rate_bps=8 / byte_s, latency_s=latency_s)
