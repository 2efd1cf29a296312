"""The interfaces of a host: the speed that each tells, and the rate between hosts over each.

An interface may be slower than it tells, for its cable, its switch or its other users. Many tell
nothing. So one rank of each host sends to the next host over each interface that a job may use, for
a moment at the end of a recording.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from fullwire.transport.calibrate import shortest_round_trip_s
from fullwire.transport.rendezvous import interface_address

_INTERFACES = Path("/sys/class/net")
_KEY = "fullwire/interfaces"
_SENDS_S, _WARM_S = 1.2, 0.5  # TCP takes long to begin where others fill the queue
_SHORTEST_S = 0.3  # of what counts
_PATIENCE_S = 3.0  # with a host whose ranks do not end as this one's
_PIECE = 1 << 20
# Bytes under way. More would overflow the queue before a slow line. The kernel's own size of a
# buffer begins small, and grows too slowly there.
_IN_FLIGHT = 1 << 18
# One connection of one process may carry just that. A line with this rate may be faster.
_MOST_BPS = 8e9


def speeds_mbps(folder: Path = _INTERFACES) -> dict[str, float]:
    """Return the interfaces that are up and have an address, with their speed; 0 if unknown."""
    speeds = {}
    for interface in folder.glob("*"):
        try:
            is_up = (interface / "operstate").read_text().strip() == "up"
            is_virtual = (interface / "bridge").exists() or (interface / "tun_flags").exists()
        except OSError:  # it has gone
            continue
        if not is_up or is_virtual or not interface_address(interface.name):
            continue
        try:
            speeds[interface.name] = max(float((interface / "speed").read_text()), 0.0)
        except (OSError, ValueError):  # a driver may tell none
            speeds[interface.name] = 0.0
    return speeds


def rates_bps(interfaces: Iterable[str], store: Any, hosts: int) -> dict[str, float]:
    """Return the rate of payload of the slowest host, over each interface that all hosts have.

    It is 0 where a host does not reach the next one. An interface that is faster than can be
    measured is left out. One process of each host calls this at about the same time; they meet in
    the job's store.
    """
    number, token = store.add(_KEY, 1) - 1, secrets.token_hex(16)
    with contextlib.ExitStack() as opened:
        doors = {}
        for name in interfaces:
            if address := interface_address(name):
                doors[name] = opened.enter_context(socket.create_server((address, 0)))
                doors[name].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _IN_FLIGHT)
        places = {name: door.getsockname() for name, door in doors.items()}
        store.set(f"{_KEY}/{number}", json.dumps({"token": token, "places": places}))
        of_hosts = [_told(store, f"{_KEY}/{host}") for host in range(hosts)]
        following = of_hosts[(number + 1) % hosts]
        found: dict[str, tuple[float | None, float]] = {}
        for name in sorted(set.intersection(*(set(host["places"]) for host in of_hosts))):
            store.set(f"{_KEY}/{number}/{name}", "")
            for host in range(hosts):
                store.wait([f"{_KEY}/{host}/{name}"], timedelta(seconds=_PATIENCE_S))
            to = tuple(following["places"][name])
            found[name] = _one_rate_bps(doors[name], token, to, following["token"])
    store.set(f"{_KEY}/{number}/rates", json.dumps(found))
    told = [_told(store, f"{_KEY}/{host}/rates") for host in range(hosts)]
    least: dict[str, float] = {}
    for name in found:
        received = [host[name][0] for host in told]
        limits = [told[host - 1][name][1] for host in range(hosts)]  # of the one before, that sent
        if all(
            rate is not None and rate < min(_MOST_BPS, limit / 2)
            for rate, limit in zip(received, limits, strict=True)
        ):
            least[name] = min(received)
    return least


def _told(store: Any, key: str) -> Any:
    """Return what a host wrote into the store."""
    store.wait([key], timedelta(seconds=_PATIENCE_S))
    return json.loads(store.get(key))


def _one_rate_bps(
    door: socket.socket, token: str, to: tuple[str, int], its_token: str
) -> tuple[float | None, float]:
    """Send to the next host, and receive from the one before.

    Return two rates. One is of the bytes that came: 0 if nobody came, None if too few came. The
    other is the most that our own bytes under way could carry.
    """
    limits_bps: list[float] = []
    sending = threading.Thread(
        target=_send, args=(door.getsockname()[0], to, its_token, limits_bps), daemon=True
    )
    sending.start()
    came, rate_bps = 0, None
    end_s = time.monotonic() + _PATIENCE_S
    begun_s = last_s = 0.0
    buffer = bytearray(_PIECE)
    peer = _who_knows(token, door, end_s)
    if peer is not None:
        with peer, contextlib.suppress(OSError):  # it is silent, or has gone
            warm_s = time.monotonic() + _WARM_S
            while (got := peer.recv_into(buffer)) and last_s < end_s:
                last_s = time.monotonic()
                if begun_s:
                    came += got
                elif last_s >= warm_s:
                    begun_s = last_s
        if last_s - begun_s >= _SHORTEST_S and begun_s:
            rate_bps = came * 8 / (last_s - begun_s)
    sending.join(_PATIENCE_S)
    return (0.0 if peer is None else rate_bps), min(limits_bps, default=float("inf"))


def _who_knows(token: str, door: socket.socket, end_s: float) -> socket.socket | None:
    """Return the first connection that begins with a token; None if none comes in time."""
    while (left_s := end_s - time.monotonic()) > 0:
        door.settimeout(left_s)
        try:
            peer = door.accept()[0]
        except OSError:
            return None
        peer.settimeout(left_s)
        with contextlib.suppress(OSError):
            if peer.recv(len(token), socket.MSG_WAITALL) == token.encode():
                return peer
        peer.close()  # a stranger
    return None


def _send(own: str, to: tuple[str, int], token: str, limits_bps: list[float]) -> None:
    """Send from an address for a moment."""
    piece, end_s = bytes(_IN_FLIGHT), time.monotonic() + _SENDS_S
    with (
        contextlib.suppress(OSError),  # the other host has ended, or there is no way to it
        socket.create_connection(to, _PATIENCE_S, (own, 0)) as peer,
    ):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _IN_FLIGHT)
        peer.sendall(token.encode())
        while time.monotonic() < end_s:
            peer.sendall(piece)
        if least_s := shortest_round_trip_s(peer):
            limits_bps.append(_IN_FLIGHT * 8 / least_s)
