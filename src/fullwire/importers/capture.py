"""Packet captures (pcap and pcapng) as a format; `packets/pcap.py` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fullwire.importers._format import CERTAIN, Format, Likeness, Options, near_miss
from fullwire.packets.captures import is_capture

if TYPE_CHECKING:
    from fullwire.run.run import Run


# snoop, Microsoft Network Monitor, pcap as Kuznetzov changed it
_OTHER_CAPTURES = (b"snoop\0\0\0", b"GMBU", b"\x34\xcd\xb2\xa1", b"\xa1\xb2\xcd\x34")


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is a capture."""
    if is_capture(beginning):
        return CERTAIN
    is_near = beginning.startswith(_OTHER_CAPTURES)
    return near_miss(is_near, "the mark of pcap: `editcap FILE NEW` converts it")


def _read(files: Sequence[Path], options: Options) -> Run:
    from fullwire.packets.pcap import read_captures  # imported late: recognising needs less

    return read_captures(files)


FORMAT = Format(
    key="capture",
    label="packet captures",
    looks_like=looks_like,
    read=_read,
    is_of_many=True,
    tells=30,
)
