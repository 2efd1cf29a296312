"""What the handle and the supervisor of a lab tell each other, pickled over one socket.

The handle sends a LabDescription and gets Ready or Refused. Then it sends Start, Fault and Signal,
none of them answered; Ended comes whenever a job's process has ended. The end of the socket is the
end of the lab.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """What a host's NIC, or a leaf's uplinks, delivered each way before the job, as payload."""

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
        """The same as a share of what the line rate allows."""
        return self.delivered_bps / self.payload_limit_bps


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The lab stands, and this is what was measured in it.

    `in_host_bps` is what one rank sends another on the same host, where there are several.
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
    """The lab cannot be; the sentence says why."""

    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a rank's command on its host; in the foreground it gets the terminal.

    `packet_socket` is the variable that is to name open packet sockets of the host, one for each of
    its NICs, for a command that captures: the capability to open one ends where a command begins.
    """

    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    in_foreground: bool = False
    packet_socket: str | None = None


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to the process groups of all commands that run."""

    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's command has ended, with an exit status as a shell shows it.

    `sent_bytes` is what its host has sent to the switches since a command began there.
    """

    rank: int
    status: int
    sent_bytes: int = 0
