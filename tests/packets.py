"""Packets and captures as bytes, as hosts and tools write them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from ipaddress import ip_address

SYN, RST, ACK = 2, 4, 16
Packet = tuple[int, bytes]  # nanoseconds, frame


def tcp(
    seq: int,
    payload: int,
    *,
    ports: tuple[int, int] = (1000, 2000),
    ack: int = 0,
    flags: int = ACK,
    options: bytes = b"",
) -> bytes:
    header = struct.pack(
        ">HHIIBBHHH",
        *ports,
        seq % 2**32,
        ack % 2**32,
        (20 + len(options)) // 4 << 4,
        flags,
        65535,
        0,
        0,
    )
    return header + options + bytes(payload)


def udp(payload: bytes, *, ports: tuple[int, int] = (1000, 2000)) -> bytes:
    return struct.pack(">HHHH", *ports, 8 + len(payload), 0) + payload


def roce(psn: int, payload: int, *, opcode: int = 1, queue_pair: int = 7) -> bytes:
    header = struct.pack(">BBHII", opcode, 0, 0xFFFF, queue_pair, psn % 2**24)
    return udp(header + bytes(payload) + bytes(4), ports=(50_000, 4791))


def fragments(datagram: bytes, size: int, identification: int = 9) -> list[bytes]:
    """Cut an IP datagram into fragments that carry `size` bytes each, a multiple of 8."""
    head, body = bytearray(datagram[:20]), datagram[20:]
    if datagram[0] >> 4 == 6:
        head, body = bytearray(datagram[:40]), datagram[40:]
    parts = []
    for offset in range(0, len(body), size):
        part, has_more = body[offset : offset + size], offset + size < len(body)
        if datagram[0] >> 4 == 6:
            extension = struct.pack(">BBHI", head[6], 0, offset | has_more, identification)
            parts.append(
                head[:4] + struct.pack(">HB", 8 + len(part), 44) + head[7:] + extension + part
            )
        else:
            of_all = struct.pack(
                ">HHH", 20 + len(part), identification, has_more << 13 | offset // 8
            )
            parts.append(head[:2] + of_all + head[8:] + part)
    return [bytes(part) for part in parts]


def ip(
    body: bytes,
    source: str = "10.0.0.1",
    target: str = "10.0.0.2",
    *,
    protocol: int = 6,
    claimed: int | None = None,
) -> bytes:
    """Put a body into IP; `claimed` is the total length in the header, if it should be false."""
    a, b = ip_address(source), ip_address(target)
    if a.version == 6:
        length = len(body) if claimed is None else claimed
        return struct.pack(">IHBB", 6 << 28, length, protocol, 64) + a.packed + b.packed + body
    length = 20 + len(body) if claimed is None else claimed
    head = struct.pack(">BBHHHBBH", 0x45, 0, length, 0, 0, 64, protocol, 0)
    return head + a.packed + b.packed + body


def kind(packet: bytes) -> int:
    return 0x86DD if packet[0] >> 4 == 6 else 0x0800


def ethernet(packet: bytes, *, vlans: int = 0) -> bytes:
    tags = b"".join(struct.pack(">HH", 0x8100, 5) for _ in range(vlans))
    return bytes(12) + tags + struct.pack(">H", kind(packet)) + packet


def mpls(packet: bytes, *, labels: int = 1) -> bytes:
    """Put labels before a packet; the last label is marked as the last (RFC 3032)."""
    stack = b"".join(
        struct.pack(">I", (100 + each) << 12 | (each == labels - 1) << 8 | 64)
        for each in range(labels)
    )
    return bytes(12) + struct.pack(">H", 0x8847) + stack + packet


def pppoe(packet: bytes) -> bytes:
    """Put a packet into a PPPoE session (RFC 2516)."""
    protocol = 0x0057 if packet[0] >> 4 == 6 else 0x0021
    head = struct.pack(">BBHHH", 0x11, 0, 7, 2 + len(packet), protocol)
    return bytes(12) + struct.pack(">H", 0x8864) + head + packet


def cooked(packet: bytes) -> bytes:
    return bytes(14) + struct.pack(">H", kind(packet)) + packet


def cooked2(packet: bytes, interface: int = 3) -> bytes:
    return struct.pack(">HHI", kind(packet), 0, interface) + bytes(12) + packet


def tunnel(body: bytes, protocol: int) -> bytes:
    """Return a frame with the content of a tunnel between two other hosts."""
    return ethernet(ip(body, "1.0.0.1", "1.0.0.2", protocol=protocol))


def vxlan(frame: bytes, port: int = 4789) -> bytes:
    return tunnel(udp(b"\x08" + bytes(7) + frame, ports=(5, port)), 17)


def vxlan_gpe(inner: bytes, following: int) -> bytes:
    """Put a packet or a frame into VXLAN-GPE; its header says which of them it is."""
    return tunnel(udp(bytes([0x0C, 0, 0, following]) + bytes(4) + inner, ports=(5, 4790)), 17)


def geneve(inner: bytes, type: int = 0x6558, options: bytes = b"") -> bytes:
    head = struct.pack(">BBHI", len(options) // 4, 0, type, 9 << 8)
    return tunnel(udp(head + options + inner, ports=(5, 6081)), 17)


def gre(inner: bytes, type: int, *, flags: int = 0, more: bytes = b"") -> bytes:
    """Put a packet into GRE; `more` holds the fields that the flags announce, and further bytes."""
    return tunnel(struct.pack(">HH", flags, type) + more + inner, 47)


def pcap(
    packets: Iterable[Packet],
    *,
    link: int = 1,
    order: str = "<",
    nano: bool = True,
    snap: int = 1 << 18,
) -> bytes:
    magic = 0xA1B23C4D if nano else 0xA1B2C3D4
    parts = [struct.pack(f"{order}IHHiIII", magic, 2, 4, 0, 0, snap, link)]
    for time_ns, frame in packets:
        seconds, rest = divmod(time_ns, 10**9)
        fraction = rest if nano else rest // 1000
        head = struct.pack(f"{order}IIII", seconds, fraction, min(len(frame), snap), len(frame))
        parts += [head, frame[:snap]]
    return b"".join(parts)


def block(kind: int, body: bytes, order: str = "<") -> bytes:
    body += bytes(-len(body) % 4)
    length = struct.pack(f"{order}I", len(body) + 12)
    return struct.pack(f"{order}I", kind) + length + body + length


def section(order: str = "<") -> bytes:
    return block(0x0A0D0D0A, struct.pack(f"{order}IHHq", 0x1A2B3C4D, 1, 0, -1), order)


def option(code: int, value: bytes, order: str = "<") -> bytes:
    return struct.pack(f"{order}HH", code, len(value)) + value + bytes(-len(value) % 4)


def interface(
    link: int = 1, *, resolution: int | None = 9, order: str = "<", more: bytes = b""
) -> bytes:
    options = b"" if resolution is None else option(9, bytes([resolution]), order)
    return block(1, struct.pack(f"{order}HHI", link, 0, 1 << 18) + options + more, order)


def enhanced(ticks: int, frame: bytes, *, number: int = 0, order: str = "<") -> bytes:
    head = struct.pack(f"{order}IIIII", number, ticks >> 32, ticks % 2**32, len(frame), len(frame))
    return block(6, head + frame, order)


def pcapng(packets: Iterable[Packet], *, link: int = 1, order: str = "<") -> bytes:
    blocks = [enhanced(time_ns, frame, order=order) for time_ns, frame in packets]
    return section(order) + interface(link, order=order) + b"".join(blocks)


def segment(seq: int, payload: int, **how: object) -> bytes:
    """Return a frame with a TCP segment from 10.0.0.1 to 10.0.0.2."""
    return ethernet(ip(tcp(seq, payload, **how)))  # type: ignore[arg-type]


def answer(ack: int, *, seq: int = 1, payload: int = 0) -> bytes:
    """Return a frame that acknowledges, the other way."""
    return ethernet(ip(tcp(seq, payload, ports=(2000, 1000), ack=ack), "10.0.0.2", "10.0.0.1"))
