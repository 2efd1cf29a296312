"""Numbers in the cells of a table of measured training runs, as their sources write them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from fullwire.errors import UsageError
from fullwire.workloads.accelerators import accelerator

_DEVICES = re.compile(r"([\d,]+)\s*(?:[x\u00d7]\s*([\d,]+)\s*)?(?:[x\u00d7]?\s*([a-z].*))?")
_SEVERAL = re.compile(r"node|host|server|machine|rack|pod|[dh]gx")  # what holds several devices


def devices_in(row: Mapping[str, str]) -> int | None:
    """Return the devices that a row counts, as in "32", "1,024 H100" and "4x8" of nodes."""
    found = _DEVICES.fullmatch(row.get("gpus", "").strip().lower())
    if found is None or not _is_one_device(found[3] or ""):
        return whole(row, "gpus")
    counts = [whole({"": part}, "") or 0 for part in found.groups()[:2] if part]
    return math.prod(counts) or None


def _is_one_device(name: str) -> bool:
    """Say whether words after a count name one device, or nothing."""
    if name and _UNITS.get(name) != 1:
        try:
            accelerator(name)
        except UsageError:
            return False
    return _SEVERAL.search(name) is None


def sequences_in(row: Mapping[str, str], length: int) -> int | None:
    """Return the sequences of a global batch.

    A cell may give it in tokens ("4M tokens"), or with the length of its sequences ("256 x 4096").
    """
    text = row.get("gbs", "").lower()
    by_length = re.fullmatch(r"\s*([\d,]+)\s*[x\u00d7]\s*([\d,]+)\s*", text)
    if by_length is not None and whole({"": by_length[2]}, "") == length:
        return whole({"": by_length[1]}, "")
    found = re.match(r"(.*?\d)\s*([km]?)\s*tok", text)
    if found is None:
        return whole(row, "gbs")
    tokens = (number_in({"": found[1]}, "") or 0) * {"k": 2**10, "m": 2**20}.get(found[2], 1)
    return max(1, round(tokens / length)) if tokens else None


def whole(row: Mapping[str, str], name: str) -> int | None:
    """Return a cell as a whole number above 0, or None."""
    value = number_in(row, name)
    return round(value) if value and value >= 0.5 else None


def number_in(row: Mapping[str, str], name: str) -> float | None:
    """Return a cell as a number above 0, or None where it is empty or no number of known unit.

    A unit may follow, as in "12.3 s", "850 ms" and "4k" tokens.
    """
    text = (row.get(name) or "").lower().replace("\u00d7", "x")  # a product is no plain number
    found = re.match(r"\s*~?\s*(\d[\d,]*\.?\d*(?:e[+-]?\d+)?)\s*([^\W\d_]*)", text)
    if found is None or found[2] not in _UNITS:
        return None
    # A comma before three digits groups them. Any other one is a decimal point.
    is_grouped = re.fullmatch(r"\d{1,3}(?:,\d{3})*(?:\.\d*)?(?:e[+-]?\d+)?", found[1])
    value = float(found[1].replace(",", "" if is_grouped else "."))
    value *= _UNITS[found[2]]
    return value if 0 < value < 1e12 else None


_PLAIN = (
    *("", "sec", "second", "token", "tok", "sequence", "seq", "sample", "layer", "head", "expert"),
    *("gpu", "device", "chip", "rank", "way", "gib"),
)
_UNITS: Mapping[str, float] = {  # what may follow a number
    **{f"{word}{end}": 1 for word in _PLAIN for end in ("", "s")},
    **dict.fromkeys(("min", "mins"), 60),
    "k": 1024,
    "b": 1,
    "ms": 1e-3,
    "gb": 1e9 / 2**30,
}
