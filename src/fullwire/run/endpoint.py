"""Ends of flows as text, such as `10.0.0.1:29500`, `[fe80::1]:80`; queue pair `10.0.0.2#17`."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address


def address_of(packed: bytes) -> IPv4Address | IPv6Address:
    """Return an address from its 16 bytes; an IPv4 address is mapped into them."""
    address = IPv6Address(packed)
    return address.ipv4_mapped or address


def endpoint(address: IPv4Address | IPv6Address, port: int, mark: str = ":") -> str:
    """Write an address with a port, or with a queue pair after another mark."""
    shown = f"[{address}]" if address.version == 6 else str(address)
    return f"{shown}{mark}{port}"


def host_of(text: str) -> str:
    """Return the address of an endpoint; return text of another form as it is."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    head, _, tail = text.replace("#", ":").rpartition(":")
    return head if head and tail.isdigit() else text
