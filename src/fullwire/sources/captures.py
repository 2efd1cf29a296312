"""How packet captures begin, plain or packed. Reading them is in pcap.py, which loads more."""

from __future__ import annotations

GZIP, XZ, ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_PCAP = (b"\xa1\xb2\xc3\xd4", b"\xd4\xc3\xb2\xa1", b"\xa1\xb2\x3c\x4d", b"\x4d\x3c\xb2\xa1")
_PCAPNG = b"\x0a\x0d\x0d\x0a"


def is_capture(beginning: bytes) -> bool:
    """Say whether a file with this beginning is a capture, or packed as captures are."""
    return beginning.startswith((*_PCAP, _PCAPNG, GZIP, XZ, ZSTD))
