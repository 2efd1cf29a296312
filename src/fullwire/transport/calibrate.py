"""The measured links of a new group, and the number of connections that two ranks need.

A few collectives, run before the group is handed out, measure the rate and the latency of its
links. All ranks choose algorithms by these two numbers, so all take the same ones: the worst that
any rank has measured.

Two ranks open several connections if one cannot fill the line between them. The buffers of one
connection limit its bytes on the way, so its rate is at most `window / round trip`. On any link,
one thread drives a connection, and moves and adds up some 10 Gbps. Each rank counts the connections
that it needs. All ranks open the largest of these counts, which is that of the slowest rank.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from ctypes import addressof, create_string_buffer
from pathlib import Path
from typing import Any

from fullwire.errors import TransportError
from fullwire.transport import programs
from fullwire.transport.programs import Links
from fullwire.transport.rendezvous import interface_address

STREAMS_VARIABLE = "FULLWIRE_STREAMS"  # the number of connections, instead of the measured one
MOST_STREAMS = 16
_MOST_CHOSEN = 8
_ONE_THREAD_BPS = 10e9
_SETTINGS = Path("/proc/sys/net/ipv4")
_DEVICES = Path("/sys/class/net")
_MIN_RTT_OFFSET = 148  # in struct tcp_info

_SMALL_TRIALS = 5
_LARGE_BYTES = 2**18
_LARGE_TRIALS = 2
_LOOK_UP_S = 0.5  # the interval at which Python looks for a Ctrl-C


class Trials:
    """Collectives of a group before it is handed out."""

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
        """Return the largest of each value over all ranks."""
        form = f"{len(values)}d"
        struct.pack_into(form, self._space, 0, *values)
        self._carry_out(self._exchange, struct.calcsize(form), "float64", "MAX")
        return struct.unpack_from(form, self._space, 0)

    def allreduce_s(self, count: int, wire: int | None) -> float:
        """Measure a sum of zeros of so many bytes, packed in a wire format or as it is."""
        if len(self._space) < count:
            self._space = create_string_buffer(count)
        if wire is None:
            segments = programs.ring_segments(self._size, count)
            ring = programs.allreduce("ring", self._size, self._rank, segments)
            return self._mean_s(ring, count, _LARGE_TRIALS)
        direct = programs.packed_allreduce(self._size, self._rank)
        return self._mean_s(direct, count, _LARGE_TRIALS, wire)

    def _mean_s(self, program: Any, count: int, trials: int, wire: int | None = None) -> float:
        # The first lets all ranks begin together, and several in a row follow. In a single one, the
        # last rank to come finds all messages there, and would measure almost no time.
        self._carry_out(program, count, wire=wire)
        began = time.perf_counter()
        for _ in range(trials):
            self._carry_out(program, count, wire=wire)
        return (time.perf_counter() - began) / trials

    def _carry_out(
        self,
        program: Any,
        count: int,
        number: str = "float32",
        reduction: str = "SUM",
        wire: int | None = None,
    ) -> None:
        place = [(addressof(self._space), count)]
        task = self._engine.collective(
            "the calibration of a new group",
            program,
            place,
            place,
            programs.REDUCTIONS[reduction],
            programs.NUMBERS[number],
            1,
            self._timeout_s,
            True,
            *(() if wire is None else (wire, math.inf)),
        )
        while not self._engine.wait(task, _LOOK_UP_S):
            pass
        if task.problem:
            raise TransportError(task.problem)


def processors_of_a_rank(machines: list[str], rank: int) -> float:
    """Return the processors for each rank of this machine, in this group or in others."""
    of_the_job = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun sets it
    neighbours = max(
        machines.count(machines[rank]), int(of_the_job) if of_the_job.isdecimal() else 0
    )
    return len(os.sched_getaffinity(0)) / neighbours


def streams(trials: Trials, links: Links, sockets: Sequence[int], processors: float) -> int:
    """Return the number of connections that every rank opens to each other rank."""
    asked = os.environ.get(STREAMS_VARIABLE)
    if asked is not None and not (asked.isdecimal() and 1 <= int(asked) <= MOST_STREAMS):
        raise TransportError(
            f"{STREAMS_VARIABLE}: expected a number from 1 to {MOST_STREAMS}, got {asked!r}"
        )
    wanted = int(asked or 0)
    most, least = trials.most(wanted, -wanted)
    if most != -least:
        raise TransportError(
            f"{STREAMS_VARIABLE}: expected the same on every rank, got {-least:g} and {most:g}"
        )
    return wanted or int(trials.most(best_streams(links, sockets, processors))[0])


def best_streams(links: Links, sockets: Sequence[int], processors: float) -> int:
    """Return the larger need: connections to fill the longest round trip, or threads to drive."""
    # The longest round trip from each of this rank's addresses, of which there are few.
    ways_s: dict[str, float] = {}
    for connection in filter(lambda handle: handle >= 0, sockets):
        with socket.fromfd(connection, socket.AF_INET, socket.SOCK_STREAM) as known:
            address = known.getsockname()[0]
            ways_s[address] = max(ways_s.get(address, 0.0), shortest_round_trip_s(known))
    needed, window_bytes = 1.0, _window_bytes()
    for address, round_trip_s in ways_s.items():
        interface_bps = _interface_bps(address)
        on_the_way_bytes = (interface_bps or links.rate_bps) / 8 * round_trip_s
        for_threads = min(interface_bps / _ONE_THREAD_BPS, processors // 2)
        needed = max(needed, on_the_way_bytes / window_bytes, for_threads)
    return min(math.ceil(needed), _MOST_CHOSEN)


def shortest_round_trip_s(connection: socket.socket) -> float:
    """Return the shortest round trip that the kernel saw, 0 where an old one does not tell.

    Sleeping processes do not lengthen it.
    """
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(told) < _MIN_RTT_OFFSET + 4:
        return 0.0
    return int.from_bytes(told[_MIN_RTT_OFFSET : _MIN_RTT_OFFSET + 4], sys.byteorder) / 1e6


def _window_bytes() -> float:
    """Return the largest window of a connection: the kernel keeps half of the receive buffer."""
    try:
        sent, received = (
            int((_SETTINGS / name).read_text().split()[2]) for name in ("tcp_wmem", "tcp_rmem")
        )
    except (OSError, ValueError, IndexError):
        return math.inf
    return max(min(sent, received / 2), 1)


def _interface_bps(address: str) -> float:
    """Return the rate of the interface with this address, 0 where it is unknown."""
    names = (name for _, name in socket.if_nameindex())
    interface = next((name for name in names if interface_address(name) == address), "")
    try:
        megabits = int((_DEVICES / interface / "speed").read_text())
    except (OSError, ValueError):
        return 0.0
    return max(megabits, 0) * 1e6
