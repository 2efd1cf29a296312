"""The reason that held the transport back, from logs and samples, the surest first."""

from __future__ import annotations

from collections.abc import Sequence

from fullwire.findings.evidence.nccl import FALLS_SHORT
from fullwire.findings.evidence.samples import (
    CpuBusiest,
    ReceiveWindowLimited,
    SendBufferLimited,
    SocketIdle,
)
from fullwire.findings.finding import Evidence, Finding
from fullwire.timeline.utilization import LIMITED, SATURATED


class BySendBuffers(Finding):
    """Sockets had more to send than their buffers could hold."""

    template = "the transport was limited by its send buffers"


class ByReceiveWindow(Finding):
    """Receivers took fewer bytes than were sent."""

    template = "the transport was limited by the receiver's window"


class ByProcessor(Finding):
    """A processor had no time left."""

    template = "a processor was saturated"


class ByIdleSockets(Finding):
    """Sockets waited for the program."""

    template = "its sockets often had nothing to send"


_HELD: tuple[tuple[type[Evidence], float, Finding], ...] = (
    (SendBufferLimited, LIMITED, BySendBuffers()),
    (ReceiveWindowLimited, LIMITED, ByReceiveWindow()),
    (CpuBusiest, SATURATED, ByProcessor()),
    (SocketIdle, LIMITED, ByIdleSockets()),
)


def set_up_short(evidence: Sequence[Evidence]) -> Evidence | None:
    """Return the first shortcoming in the setup of communication, independent of its cost."""
    return next((figure for figure in evidence if isinstance(figure, FALLS_SHORT)), None)


def what_held_transport(evidence: Sequence[Evidence]) -> Finding | None:
    """Return the reason that held the transport back."""
    short = set_up_short(evidence)
    if short is not None:
        return short
    for kind, least, held in _HELD:
        if any(isinstance(figure, kind) and figure.value >= least for figure in evidence):
            return held
    return None
