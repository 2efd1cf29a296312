"""Times, sizes and rates: read from text that people type, and printed for people.

k, M, G, T are powers of ten and Ki, Mi, Gi, Ti powers of two. Inside Fullwire a rate is bits per
second, a size is bytes and a time is seconds (whole nanoseconds where it is stored). In Python a
bare number has these units. In text a number without a unit is refused, because "10" may have been
meant as Gbps.

Text is read exactly: "0.007GB" is 7,000,000 bytes, without the error of binary fractions.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from fractions import Fraction
from typing import NamedTuple, SupportsIndex

from fullwire.errors import UsageError

_PREFIXES: Mapping[str, int] = {
    "": 1,
    "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
_BITS = ("bps", "bit/s", "b/s")
_BYTES_PER_SECOND = ("B/s", "Bps")
_NANOSECOND = Fraction(1, 10**9)
MOST_COUNTED = 100_000_000
_MOST_NAMED = 8  # ranks, in a sentence
_LEAST_CHANGE = 5e-5  # of a time with four digits: at most half of the last digit
_LEAST_PLAIN = 1e-9  # a smaller number has more zeros than people count


class _Kind(NamedTuple):
    """One kind of quantity: its units in the base unit, its allowed range, and an example."""

    name: str
    units: Mapping[str, Fraction | int]
    example: str
    least: Fraction
    most: Fraction
    span: str


_RATE = _Kind(
    "a rate with its unit",
    {p + u: f for p, f in _PREFIXES.items() for u in _BITS}
    | {p + u: 8 * f for p, f in _PREFIXES.items() for u in _BYTES_PER_SECOND},
    "10Gbps or 50GiB/s",
    Fraction(1),
    Fraction(10**18),
    "more than 0, from 1 bps to a million Tbps",
)
_SIZE = _Kind(
    "a size with its unit",
    {p + "B": f for p, f in _PREFIXES.items()},
    "25MiB",
    Fraction(1),
    Fraction(2**63 - 1),
    "more than 0, below 2^63 bytes",
)
_TIME = _Kind(
    "a time with its unit",
    {
        "ns": _NANOSECOND,
        "us": 1000 * _NANOSECOND,
        "µs": 1000 * _NANOSECOND,
        "μs": 1000 * _NANOSECOND,
        "ms": 10**6 * _NANOSECOND,
        "s": 1,
        "min": 60,
        "h": 3600,
        "d": 86400,
    },
    "5ms",
    Fraction(0),
    (2**63 - 1) * _NANOSECOND,
    "a time of 0 or more, below 292 years",
)
_RATIO = _Kind(
    "a plain number",
    {"": 1},
    "4",
    Fraction(1, 10**18),
    Fraction(10**18),
    "more than 0, from 1e-18 to 1e18",
)
_SHARE = _Kind(
    "a percentage",
    {"%": Fraction(1, 100)},
    "5%",
    Fraction(1, 10**6),
    Fraction(10),
    "more than 0%, up to 1000%",
)

# ASCII digits only, and a bounded number of them: float() itself takes far more than people type.
NUMBER = r"[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?"
_QUANTITY = re.compile(rf"({NUMBER})\s*([^\s0-9.]*)")
NO_NUMBER = r"[+-]?(?:[nN][aA][nN]|[iI][nN][fF](?:[iI][nN][iI][tT][yY])?)"  # as programs print it
_PRINTED = re.compile(rf"{NUMBER}|{NO_NUMBER}")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3}){1,10}(?:\.[0-9]{0,40})?")


def bits_per_second(value: str | float, what: str = "rate") -> float:
    """Read a line rate, above zero: "10Gbps", "1.5Gbit/s", "50GiB/s", or a number in bit/s."""
    return float(_quantity(value, _RATE, what))


def size_bytes(value: str | float, what: str = "size") -> int:
    """Read a size of at least one byte: "25MiB", "64kB", or a number of bytes."""
    size = _quantity(value, _SIZE, what)
    if size.denominator != 1:
        raise UsageError(f"{what}: expected a whole number of bytes, got {shown(value)}")
    return int(size)


def seconds(value: str | float, what: str = "time") -> float:
    """Read a time that is zero or more: "5ms", "500ns", or a number of seconds."""
    return float(_quantity(value, _TIME, what))


def ratio(value: str | float, what: str = "ratio") -> float:
    """Read a plain number above zero, with no unit: a compression ratio, a share."""
    return float(_quantity(value, _RATIO, what))


def share(value: str | float, what: str = "share") -> float:
    """Read a share above zero: "5%", or the number 0.05.

    A number above 1 is refused, because 5 may have been meant as 5%. Text tells them apart.
    """
    found = float(_quantity(value, _SHARE, what))
    if found > 1 and not isinstance(value, str):
        raise UsageError(f"{what}: expected a percentage, like 5%, or 0.05, got {shown(value)}")
    return found


def count(value: object, what: str, most: int = MOST_COUNTED, least: int = 1) -> int:
    """Read a count of something: 8, or "8"."""
    number = whole(value)
    if number is None or not least <= number <= most:
        raise UsageError(
            f"{what}: expected a whole number from {least} to {most:,}, got {shown(value)}"
        )
    return number


def whole(value: object) -> int | None:
    """Read a whole number, or the digits of one that is not negative; None if it is neither."""
    if isinstance(value, str):
        digits = value.strip()
        return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 12 else None
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several numbers
        return None


def printed(text: str) -> float | None:
    """Read a number that a program printed, also "NaN" or "-Infinity"; None if it is none.

    It may have commas between thousands, and the end of a sentence behind it.
    """
    text = text.strip().rstrip(".,")
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return float(text) if _PRINTED.fullmatch(text) else None


def show_rate(rate_bps: float) -> str:
    """Return a rate as people write it: 2.5e10 is "25 Gbps"."""
    return _scaled(rate_bps, [(1e12, "Tbps"), (1e9, "Gbps"), (1e6, "Mbps"), (1e3, "kbps")], "bps")


def show_bytes(size: float) -> str:
    """Return a size with a decimal prefix, as network people count: 25e6 is "25 MB"."""
    return _scaled(size, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")], "B")


def show_memory(size_bytes: float) -> str:
    """Return memory in whole binary units, as device tools count it: 7e10 is "65 GiB"."""
    # What would print as 1,024 of one unit prints as 1 of the next.
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if size_bytes >= (1 - 2**-11) * factor:
            return f"{size_bytes / factor:,.0f} {unit}"
    return f"{size_bytes / 2**10:,.0f} KiB"


def show_time(time_s: float) -> str:
    """Return a time with the prefix that leaves one to three digits before the point."""
    return _scaled(time_s, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")], "s")


def show_change(before_s: float, after_s: float) -> str:
    """Return how much a time grew, with its sign: one below the digits of both times is 0."""
    change_s = after_s - before_s
    is_noise = abs(change_s) < _LEAST_CHANGE * max(abs(before_s), abs(after_s))
    if is_noise or show_time(before_s) == show_time(after_s):
        return "0 s"
    return f"{'-' if change_s < 0 else '+'}{show_time(abs(change_s))}"


def show_duration(time_s: float) -> str:
    """Return a long time as people say it: 5400 s is "90 min"."""
    for factor, unit, least in ((86400, "days", 3), (3600, "h", 2), (60, "min", 3)):
        if abs(time_s) >= least * factor:
            rounded = float(f"{time_s / factor:.3g}")
            return f"{rounded:,.0f} {unit}" if abs(rounded) >= 1000 else f"{rounded:g} {unit}"
    return _scaled(float(f"{time_s:.2e}"), [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")], "s")


def show_short(number: float) -> str:
    """Return a number with three digits, without an exponent from 1000 on: "1,410"."""
    return f"{float(f'{number:.3g}'):,.15g}"


def show_number(number: float) -> str:
    """Return a number with four digits, whole from 1000 on: 16852.3 is "16,850"."""
    rounded = float(f"{number:.4g}")
    if _LEAST_PLAIN <= abs(rounded) < 1e-4:  # where Python would print an exponent
        return f"{rounded:.{3 - math.floor(math.log10(abs(rounded)))}f}".rstrip("0")
    return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:.4g}"


def show_ratio(factor: float) -> str:
    """Return a ratio with three decimals; one that would print as 1 says on which side it lies."""
    return _off_one(factor, f"{factor:.3f}")


def show_times(factor: float) -> str:
    """Return a ratio with three digits, "2.54x"; one near 1 as in `show_ratio`."""
    return f"{_off_one(factor, f'{factor:.3g}')}x"


def _off_one(factor: float, shown: str) -> str:
    if float(shown) != 1 or factor == 1:
        return shown
    return "just above 1" if factor > 1 else "just below 1"


def show_mean_count(count: float) -> str:
    """Return an expected count: whole from 10 on, else two digits, as 0.0913 is "0.091"."""
    return f"{count:,.0f}" if count >= 9.5 else f"{count:.2g}"


def show_count(number: int, word: str) -> str:
    """Return how many there are of something: "1 node", "4,096 nodes"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def show_ranks(ranks: Sequence[int]) -> str:
    """Return the names of ranks: "rank 3", "ranks 1 and 6", "ranks 4 to 7, 12 and 13"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [
        word
        for run in runs
        for word in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    ]
    if len(words) > _MOST_NAMED:
        words = [*words[:_MOST_NAMED], "others"]
    return f"rank{'' if len(ranks) == 1 else 's'} {listed(words)}"


def listed(words: Sequence[str]) -> str:
    """Return words as people list them: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def shown(value: object) -> str:
    """Return the text of a value that someone gave, in a length that fits a message."""
    try:
        text = repr(value).replace("\n", " ")
    except ValueError:  # Python prints no whole number of more than 4,300 digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def nearest_name(given: object, known: Collection[str]) -> str:
    """Return the end of a refusal: the known name that is most like the given one, if one is."""
    near = get_close_matches(str(given).lower(), known, n=1)
    return f". The nearest is {near[0]}" if near else ""


def visible(text: str) -> str:
    """Return text from files and arguments in a form that no terminal obeys."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _quantity(value: object, kind: _Kind, what: str) -> Fraction:
    exact = _typed(value, kind) if isinstance(value, str) else _number(value)
    if exact is None:
        raise UsageError(f"{what}: expected {kind.name}, like {kind.example}, got {shown(value)}")
    if not kind.least <= exact <= kind.most:
        raise UsageError(f"{what}: expected {kind.span}, got {shown(value)}")
    return exact


def _typed(text: str, kind: _Kind) -> Fraction | None:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in kind.units:
        return None
    return Fraction(match[1]) * kind.units[match[2]]


def _number(value: object) -> Fraction | None:
    """Return a Python or numpy number exactly; None for a truth value, an array or a numpy time."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        if isinstance(value, numbers.Integral):
            return Fraction(operator.index(value))
        return Fraction(float(value))
    except (TypeError, ValueError, OverflowError):  # a numpy time, NaN, an infinity
        return None


def _scaled(amount: float, steps: list[tuple[float, str]], base: str) -> str:
    # Round first: an amount that would print as 1000 of one unit prints as 1 of the next.
    rounded = float(f"{amount:.3e}")
    for factor, unit in steps:
        if abs(rounded) >= factor:
            return f"{rounded / factor:.4g} {unit}"
    return f"{rounded:.4g} {base}"
