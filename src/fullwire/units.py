"""Times, sizes and rates: read from what people type, printed as what people read.

k, M, G, T are powers of ten and Ki, Mi, Gi, Ti powers of two. Inside Fullwire a rate is bits per
second, a size is bytes and a time is seconds (whole nanoseconds where it is stored). In Python a
bare number is taken in these units; in text a number without a unit is refused, because nobody can
tell whether "10" was meant as Gbps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from fullwire.errors import UsageError

_PREFIXES: Mapping[str, float] = {
    "": 1,
    "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
_BITS = ("bps", "bit/s", "b/s")
_BYTES_PER_SECOND = ("B/s", "Bps")


class _Kind(NamedTuple):
    """One kind of quantity: its units in the base unit, and how an example looks."""

    name: str
    units: Mapping[str, float]
    example: str


_RATE = _Kind(
    "a rate",
    {p + u: f for p, f in _PREFIXES.items() for u in _BITS}
    | {p + u: 8 * f for p, f in _PREFIXES.items() for u in _BYTES_PER_SECOND},
    "10Gbps or 50GiB/s",
)
_SIZE = _Kind("a size", {p + "B": f for p, f in _PREFIXES.items()}, "25MiB")
_TIME = _Kind(
    "a time",
    {
        "ns": 1e-9,
        "us": 1e-6,
        "µs": 1e-6,
        "μs": 1e-6,
        "ms": 1e-3,
        "s": 1.0,
        "min": 60.0,
        "h": 3600.0,
    },
    "5ms",
)
# ASCII digits only, and a bounded number of them: float() itself takes far more than people type.
_QUANTITY = re.compile(r"([+-]?[0-9]{0,40}\.?[0-9]{0,40}(?:[eE][+-]?[0-9]{1,3})?)\s*([^\s0-9.]*)")


def bits_per_second(value: str | float, what: str = "rate") -> float:
    """Read a line rate, above zero: "10Gbps", "1.5Gbit/s", "50GiB/s", or a number in bit/s."""
    return _above_zero(_base_units(value, _RATE, what), value, what)


def size_bytes(value: str | float, what: str = "size") -> int:
    """Read a size of at least one byte: "25MiB", "64kB", or a number of bytes."""
    size = _above_zero(_base_units(value, _SIZE, what), value, what)
    if size != math.floor(size):
        raise UsageError(f"{what}: expected a whole number of bytes, got {_shown(value)}")
    return int(size)


def seconds(value: str | float, what: str = "time") -> float:
    """Read a time that is zero or more: "5ms", "500ns", or a number of seconds."""
    time_s = _base_units(value, _TIME, what)
    if time_s < 0:
        raise UsageError(f"{what}: expected a time of 0 or more, got {_shown(value)}")
    return time_s


def ratio(value: str | float, what: str = "ratio") -> float:
    """Read a plain number above zero, with no unit: a compression ratio, a share."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{what}: expected a plain number, got {_shown(value)}")
    return _above_zero(number, value, what)


def show_rate(rate_bps: float) -> str:
    """Print a rate as people say it: 2.5e10 is "25 Gbps"."""
    return _scaled(rate_bps, [(1e12, "Tbps"), (1e9, "Gbps"), (1e6, "Mbps"), (1e3, "kbps")], "bps")


def show_bytes(size: float) -> str:
    """Print a size with a decimal prefix, as network people count: 25e6 is "25 MB"."""
    return _scaled(size, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")], "B")


def show_time(time_s: float) -> str:
    """Print a time with the prefix that leaves one to three digits before the point."""
    return _scaled(time_s, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")], "s")


def _base_units(value: str | float, kind: _Kind, what: str) -> float:
    if isinstance(value, str):
        return _parsed(value, kind, what)
    if isinstance(value, bool) or not _is_number(value) or not math.isfinite(value):
        raise UsageError(f"{what}: expected {kind.name} like {kind.example}, got {_shown(value)}")
    return float(value)


def _parsed(text: str, kind: _Kind, what: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    number, unit = match.groups() if match else ("", "")
    expected = (
        f"{what}: expected {kind.name} with its unit, like {kind.example}, got {_shown(text)}"
    )
    if unit not in kind.units:
        raise UsageError(expected)
    try:
        amount = float(number) * kind.units[unit]
    except ValueError:
        raise UsageError(expected) from None
    if not math.isfinite(amount):
        raise UsageError(expected)
    return amount


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__")


def _above_zero(number: float, value: object, what: str) -> float:
    if number <= 0:
        raise UsageError(f"{what}: expected more than 0, got {_shown(value)}")
    return number


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _scaled(amount: float, steps: list[tuple[float, str]], base: str) -> str:
    for factor, unit in steps:
        # 0.9995 and not 1: what would print as 1000 of one unit prints as 1 of the next.
        if abs(amount) >= 0.9995 * factor:
            return f"{amount / factor:.4g} {unit}"
    return f"{amount:.4g} {base}"
