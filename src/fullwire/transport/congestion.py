"""Which congestion control the transport's connections send with, and why.

BBR sends a little at a time by a timer, which costs processor time that both directions of a fast
link need. Where BBR is only the kernel's default, connections take cubic instead. Where this
process may not choose cubic (`net.ipv4.tcp_allowed_congestion_control`), they take reno. The page
docs/guides/congestion-control.md has the measured cost of each.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass

_INSTEAD_OF_BBR = ("cubic", "reno")  # the best first
_UNKNOWN = "unknown"
_NAME_BYTES = 16  # TCP_CA_NAME_MAX


@dataclass(frozen=True, slots=True)
class CongestionControl:
    """The name of a congestion control, and why it was chosen."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def congestion_control() -> CongestionControl:
    """Return the choice for this process's connections; a route may name another, which wins."""
    with socket.socket() as unconnected:
        return choose(unconnected)


def choose(unconnected: socket.socket) -> CongestionControl:
    """Choose for a socket that listens or will connect, and for the connections it accepts.

    Call it before the connection exists: a connection that began with BBR stays paced.
    """
    try:
        default = name_of(unconnected)
    except OSError as error:
        return CongestionControl(_UNKNOWN, f"the kernel does not tell it ({error.strerror})")
    if not default.startswith("bbr"):
        return CongestionControl(default, "the kernel's default")
    refused: list[str] = []
    for name in _INSTEAD_OF_BBR:
        try:
            unconnected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            is_forbidden = isinstance(error, PermissionError)
            refused.append(f"; {name} is not {'allowed' if is_forbidden else 'available'} here")
        else:
            why = f"in place of the kernel's default, {default}"
            return CongestionControl(name, why + "".join(refused))
    return CongestionControl(default, "the kernel's default" + "".join(refused))


def in_use(chosen: CongestionControl, connections: Iterable[int]) -> CongestionControl:
    """Return the congestion control in use; a route may have named another than the chosen one."""
    if chosen.name == _UNKNOWN:  # this kernel names it for no socket
        return chosen
    names: set[str] = set()
    for connection in connections:
        with socket.fromfd(connection, socket.AF_INET, socket.SOCK_STREAM) as known:
            names.add(name_of(known))
    if names <= {chosen.name}:
        return chosen
    return CongestionControl(", ".join(sorted(names)), "a route between the ranks names it")


def name_of(connection: socket.socket) -> str:
    """Return the name of a socket's congestion control."""
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    return name.rstrip(b"\0").decode()
