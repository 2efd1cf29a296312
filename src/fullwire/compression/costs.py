"""The costs of codecs, read from what `fullwire codecs --json` printed on some machine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fullwire.compression.codec import Cost
from fullwire.errors import DamagedInput, UsageError


class _PrintedSpeeds(msgspec.Struct):
    pack_bps: float
    unpack_bps: float


class _PrintedCodec(msgspec.Struct):
    codec: str
    speeds: list[_PrintedSpeeds]


class _Printed(msgspec.Struct):
    machine: str
    codecs: list[_PrintedCodec]


def costs_in(path: Path) -> dict[str, Cost]:
    """Read the costs of codecs from what `fullwire codecs --json` printed."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Printed)
    except OSError as error:
        raise UsageError(f"codec costs: {path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedInput(
            str(path), f"expected the output of fullwire codecs --json: {error}"
        ) from None
    return {
        each.codec: Cost(
            encode_bps=each.speeds[0].pack_bps,
            decode_bps=each.speeds[0].unpack_bps,
            source=f"measured on {found.machine}",
        )
        for each in found.codecs
        if each.speeds and min(each.speeds[0].pack_bps, each.speeds[0].unpack_bps) > 0
    }
