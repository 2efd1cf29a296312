"""A stranger on a host: finds the ports that listen there, and disturbs them.

python stranger.py SOCKET: on request it scans, sends short and long noise, and echoes the data that
it receives. It leaves connections half open until it ends.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from pathlib import Path
from typing import Any

from tests.jobs.asked import serve

_LISTENS = "0A"
_ROUNDS = 10


def listening_ports() -> set[int]:
    """Return the ports that listen on this host."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == _LISTENS:
                found.add(int(local.rpartition(":")[2], 16))
    return found


def disturbed(address: str, port: int, chance: random.Random) -> list[socket.socket]:
    """Disturb a port, and return the connections that stay half open."""
    half_open = []
    for _ in range(_ROUNDS):
        with contextlib.suppress(OSError):
            half_open.append(socket.create_connection((address, port), 1))
            socket.create_connection((address, port), 1).close()  # a scanner
            for size in (1, 16, 40, 4096, 1 << 20):
                with contextlib.suppress(OSError):
                    noisy(address, port, chance.randbytes(size))
            echo(address, port)
            half_way = socket.create_connection((address, port), 1)
            half_open.append(half_way)
            half_way.sendall(chance.randbytes(chance.randrange(1, 64)))
    return half_open


def noisy(address: str, port: int, noise: bytes) -> None:
    with socket.create_connection((address, port), 1) as connection:
        connection.sendall(noise)


def echo(address: str, port: int) -> None:
    """Answer with the first bytes of the other side."""
    with socket.create_connection((address, port), 1) as connection:
        connection.settimeout(0.05)
        with contextlib.suppress(OSError):
            connection.sendall(connection.recv(4096))


def main() -> None:
    """Disturb every open port, on request."""
    kept = []

    def disturb(request: dict[str, Any]) -> int:
        address, not_this = request["address"], request["not_this"]
        until_s = time.monotonic() + request["within_s"]
        while not (ports := listening_ports() - {not_this}) and time.monotonic() < until_s:
            time.sleep(0.02)
        chance = random.Random(0)
        for port in sorted(ports):
            kept.extend(disturbed(address, port, chance))
        return len(ports)

    serve(disturb)


if __name__ == "__main__":
    main()
