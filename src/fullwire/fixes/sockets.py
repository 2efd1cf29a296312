"""The fix "other settings of TCP": buffers and congestion control belong to the host."""

from __future__ import annotations

from fullwire.fixes.fix import FixKind, register


@register
class Sockets(FixKind):
    """Give connections larger buffers, or another congestion control."""

    key = "sockets"
    label = "other settings of TCP"
    addresses = ("transport",)
    needs = "root on each host: sysctl net.ipv4.tcp_wmem, tcp_rmem, tcp_congestion_control"
