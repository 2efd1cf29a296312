"""The messages between the handle and the supervisor of a lab, pickled over one socket.

The handle sends a LabDescription and gets Ready or Refused. Then it sends Start, Fault and Signal,
which get no answer. The supervisor sends Ended when a process of the job has ended. When either end
closes the socket, the lab ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """The payload rate of a host's NIC or of a leaf's uplinks each way, measured before the job."""

    host: int
    line_rate_bps: float
    payload_limit_bps: float
    sent_bps: float
    received_bps: float
    nic: int = 0

    @property
    def delivered_bps(self) -> float:
        """The payload that the link delivers in its worse direction."""
        return min(self.sent_bps, self.received_bps)

    @property
    def delivered_share(self) -> float:
        """The delivered payload as a share of the payload that the line rate allows."""
        return self.delivered_bps / self.payload_limit_bps


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The lab is ready, with its measurements.

    `in_host_bps` is the rate from one rank to another on the same host, where a host has several.
    """

    links: tuple[LinkRate, ...]
    addresses: tuple[str, ...]
    host_names: tuple[str, ...]
    congestion: str
    warnings: tuple[str, ...]
    uplinks: tuple[LinkRate, ...] = ()
    in_host_bps: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The lab cannot be made; the sentence says why."""

    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a rank's command on its host; in the foreground it gets the terminal.

    `packet_socket` names an environment variable for a command that captures. The variable will
    list open packet sockets of the host, one for each NIC. The supervisor opens them, because a
    command starts without the capability to do so.

    `output` holds open files of the supervisor, in place of its standard output and error.
    """

    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    in_foreground: bool = False
    packet_socket: str | None = None
    output: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to the process groups of all running commands."""

    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's command has ended, with an exit status as a shell shows it.

    `sent_bytes` counts the bytes from its host to the switches since a command began there.
    """

    rank: int
    status: int
    sent_bytes: int = 0
