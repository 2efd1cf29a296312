"""How many connections two ranks have: several where one would not fill the line between them.

One connection has no more on its way than its buffers hold, so over a long way it fills
`window / round trip`. And whatever the way, one thread drives it, which moves and adds up some
10 Gbps. All ranks open the most that any of them would: that is for the slowest of them.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from fullwire.errors import TransportError
from fullwire.transport.calibrate import Trials
from fullwire.transport.programs import Links
from fullwire.transport.rendezvous import interface_address

STREAMS_VARIABLE = "FULLWIRE_STREAMS"  # so many, instead of what is found here
MOST_STREAMS = 16
_MOST_CHOSEN = 8
_ONE_THREAD_BPS = 10e9
_SETTINGS = Path("/proc/sys/net/ipv4")
_DEVICES = Path("/sys/class/net")
_MIN_RTT_OFFSET = 148  # in struct tcp_info


def agreed(trials: Trials, links: Links, sockets: Sequence[int], processors: float) -> int:
    """Return how many connections every rank opens to each other one."""
    wanted = _wanted()
    most, least = trials.most(wanted, -wanted)
    if most != -least:
        raise TransportError(
            f"{STREAMS_VARIABLE}: expected the same on every rank, got {-least:g} and {most:g}"
        )
    return wanted or int(trials.most(best(links, sockets, processors))[0])


def best(links: Links, sockets: Sequence[int], processors: float) -> int:
    """Count those that fill the longest way, and those for which there are processors."""
    found, window_bytes = 1.0, _window_bytes()
    for address, round_trip_s in _longest_ways_s(sockets).items():
        interface_bps = _interface_bps(address)
        on_the_way_bytes = (interface_bps or links.rate_bps) / 8 * round_trip_s
        for_threads = min(interface_bps / _ONE_THREAD_BPS, processors // 2)
        found = max(found, on_the_way_bytes / window_bytes, for_threads)
    return min(math.ceil(found), _MOST_CHOSEN)


def _longest_ways_s(sockets: Sequence[int]) -> dict[str, float]:
    """Return the longest round trip from each of the own addresses, of which there are few."""
    ways_s: dict[str, float] = {}
    for connection in filter(lambda each: each >= 0, sockets):
        with socket.fromfd(connection, socket.AF_INET, socket.SOCK_STREAM) as known:
            address = known.getsockname()[0]
            ways_s[address] = max(ways_s.get(address, 0.0), _round_trip_s(known))
    return ways_s


def _wanted() -> int:
    said = os.environ.get(STREAMS_VARIABLE)
    if said is None:
        return 0
    if not said.isdecimal() or not 1 <= int(said) <= MOST_STREAMS:
        raise TransportError(
            f"{STREAMS_VARIABLE}: expected a number from 1 to {MOST_STREAMS}, got {said!r}"
        )
    return int(said)


def _round_trip_s(connection: socket.socket) -> float:
    """Return the shortest that the kernel has seen, which knows of no process that sleeps."""
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(told) < _MIN_RTT_OFFSET + 4:  # an old kernel
        return 0.0
    return int.from_bytes(told[_MIN_RTT_OFFSET : _MIN_RTT_OFFSET + 4], sys.byteorder) / 1e6


def _window_bytes() -> float:
    """Return what a connection may grow to: half of what it receives into is the kernel's own."""
    try:
        sent, received = (
            int((_SETTINGS / name).read_text().split()[2]) for name in ("tcp_wmem", "tcp_rmem")
        )
    except (OSError, ValueError, IndexError):
        return math.inf
    return max(min(sent, received / 2), 1)


def _interface_bps(address: str) -> float:
    """Return the rate of the interface with this address, 0 where nobody says."""
    try:
        megabits = int((_DEVICES / _interface_of(address) / "speed").read_text())
    except (OSError, ValueError):
        return 0.0
    return max(megabits, 0) * 1e6


def _interface_of(address: str) -> str:
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if interface_address(name) == address), "")
