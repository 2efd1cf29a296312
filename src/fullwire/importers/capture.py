"""Packet captures (pcap and pcapng) as a format; `packets/pcap.py` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fullwire.importers._format import CERTAIN, UNLIKE, Format, Likeness, Options
from fullwire.packets.captures import is_capture

if TYPE_CHECKING:
    from fullwire.run.run import Run


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning is a capture."""
    return CERTAIN if is_capture(beginning) else UNLIKE


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
