"""Recognise packet captures by their beginning; pcap.py reads them and imports more modules."""

from __future__ import annotations

_PCAP = (b"\xa1\xb2\xc3\xd4", b"\xd4\xc3\xb2\xa1", b"\xa1\xb2\x3c\x4d", b"\x4d\x3c\xb2\xa1")
_PCAPNG = b"\x0a\x0d\x0d\x0a"


def is_capture(beginning: bytes) -> bool:
    """Say whether a file with this beginning is a capture."""
    return beginning.startswith((*_PCAP, _PCAPNG))
