"""Typed quantities are read exactly or refused with a sentence; printed ones read back."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullwire.errors import UsageError
from fullwire.units import (
    bits_per_second,
    ratio,
    seconds,
    show_bytes,
    show_change,
    show_duration,
    show_mean_count,
    show_memory,
    show_number,
    show_rate,
    show_ratio,
    show_time,
    show_times,
    shown,
    size_bytes,
    visible,
)
from tests.strategies import ODD_TEXT, cases

Reader = Callable[[Any, str], float]
ARABIC, WIDE = "\u0661\u0660", "\uff11\uff10"  # both mean 10 where any digit counts
READERS: tuple[Reader, ...] = (bits_per_second, size_bytes, seconds, ratio)


def is_refused(read: Reader, value: object) -> bool:
    try:
        read(value, "it")
    except UsageError as refusal:
        return len(str(refusal)) < 200
    return False


@pytest.mark.parametrize(
    ("text", "rate_bps"),
    [
        ("10Gbps", 10e9),
        ("1.5Gbit/s", 1.5e9),
        ("50GiB/s", 50 * 2**30 * 8),
        ("10 Gbps", 10e9),
        (" 1Tb/s ", 1e12),
        ("1Kibps", 1024),
        ("8bps", 8),
        ("1B/s", 8),
        ("1GBps", 8e9),
        (".5kbps", 500),
        ("5.Mbps", 5e6),
        ("+1e3Mbps", 1e9),
        ("1e18bps", 1e18),
    ],
)
def test_rates_are_read_with_their_units(text: str, rate_bps: float) -> None:
    assert bits_per_second(text) == rate_bps


@pytest.mark.parametrize(
    ("text", "size"),
    [("25MiB", 25 * 2**20), ("64kB", 64_000), ("1B", 1), ("0.5KiB", 512), ("1.5e3B", 1500)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "time_s"),
    [
        ("5ms", 5e-3),
        ("500ns", 5e-7),
        ("2us", 2e-6),
        ("2µs", 2e-6),
        ("2μs", 2e-6),
        ("0s", 0.0),
        ("1min", 60.0),
        ("1.5h", 5400.0),
    ],
)
def test_times_are_read_with_their_units(text: str, time_s: float) -> None:
    assert seconds(text) == time_s


def test_text_is_read_exactly_where_binary_fractions_would_not_be() -> None:
    assert size_bytes("9007199254740993B") == 2**53 + 1
    assert [size_bytes(f"0.{n:03}GB") for n in range(1, 1000)] == [
        n * 10**6 for n in range(1, 1000)
    ]
    assert seconds("0.1ms") == 1e-4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10",
        "Gbps",
        "10gbps",
        "nan",
        "nanGbps",
        "infGbps",
        "1_0Gbps",
        ARABIC + "Gbps",
        WIDE + "Gbps",
        "0x10Gbps",
        "1,000Gbps",
        "8,,64",
        "10Gbps,",
        "10 G bps",
        "10Gbps 20Gbps",
        ".Gbps",
        "--1bps",
        "1e1000bps",
        "1" * 41 + "bps",
        "1." + "1" * 41 + "bps",
        "10Gbps\x1b[31m",
        "10\0Gbps",
    ],
)
def test_text_that_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"^bandwidth: expected a rate with its unit"):
        bits_per_second(text, "bandwidth")


@pytest.mark.parametrize(
    ("read", "value", "expected"),
    [
        (bits_per_second, "0Gbps", "more than 0"),
        (bits_per_second, "-1Gbps", "more than 0"),
        (bits_per_second, "1e400Gbps", "from 1 bps to a million Tbps"),
        (bits_per_second, "1e-400Gbps", "from 1 bps"),
        (bits_per_second, 10**400, "from 1 bps"),
        (size_bytes, "0B", "more than 0"),
        (size_bytes, "0.5B", "more than 0"),
        (size_bytes, "1.5B", "a whole number of bytes"),
        (size_bytes, 2**63, "below 2^63 bytes"),
        (seconds, "-1s", "a time of 0 or more"),
        (seconds, "293e9s", "below 292 years"),
        (ratio, "0", "more than 0"),
        (ratio, "4x", "a plain number"),
        (ratio, ARABIC, "a plain number"),
        (ratio, "1e999", "from 1e-18 to 1e18"),
    ],
)
def test_a_quantity_out_of_bounds_is_refused(read: Reader, value: Any, expected: str) -> None:
    with pytest.raises(UsageError) as refusal:
        read(value, "it")
    assert str(refusal.value).startswith("it: expected ")
    assert expected in str(refusal.value)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        np.True_,
        math.nan,
        math.inf,
        -math.inf,
        8j,
        b"8",
        [8],
        np.array(8.0),
        np.array([8, 9]),
        np.timedelta64(5, "ms"),
        np.float64("nan"),
        object,
        int,
    ],
    ids=repr,
)
def test_what_is_no_number_is_refused_in_python_too(read: Reader, value: object) -> None:
    with pytest.raises(UsageError, match=r"^it: expected "):
        read(value, "it")


@pytest.mark.parametrize("value", [8, 8.0, np.int64(8), np.uint8(8), np.float32(8), Fraction(8)])
def test_numbers_of_python_and_numpy_are_in_base_units(value: Any) -> None:
    assert [read(value, "it") for read in READERS] == [8, 8, 8, 8]


@given(st.floats(1, 1e18))
@cases(100)
def test_a_rate_in_bits_per_second_reads_back_to_the_last_digit(rate_bps: float) -> None:
    assert bits_per_second(f"{rate_bps!r}bps") == bits_per_second(rate_bps) == rate_bps


@given(st.integers(1, 2**63 - 1))
@cases(100)
def test_a_size_in_bytes_reads_back_to_the_last_byte(size: int) -> None:
    assert size_bytes(f"{size}B") == size_bytes(size) == size


@given(st.floats(0, 9e9))
@cases(100)
def test_a_time_in_seconds_reads_back_to_the_last_digit(time_s: float) -> None:
    assert seconds(f"{time_s!r}s") == seconds(time_s) == time_s


@given(st.floats(1, 1e17))
@cases(200)
def test_what_is_printed_reads_back_to_four_digits(amount: float) -> None:
    assert bits_per_second(show_rate(amount)) == pytest.approx(amount, rel=5e-4)
    assert seconds(show_time(amount * 1e-9)) == pytest.approx(amount * 1e-9, rel=5e-4)
    assert show_bytes(amount).endswith("B")


@given(st.floats(1, 9.999e14))
@cases(200)
def test_one_to_three_digits_stand_before_the_point(amount: float) -> None:
    for text in (show_rate(amount), show_bytes(amount), show_time(amount * 1e-9)):
        number = float(text.split()[0])
        assert 1 <= number < 1000 or text.endswith((" Tbps", " TB", " s"))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 KiB"), (300_000, "293 KiB"), (2**20, "1 MiB"), (500 * 2**20, "500 MiB"),
        (2**30 - 1, "1 GiB"), (1023 * 2**20, "1,023 MiB"), (2**30, "1 GiB"),
        (79.4 * 2**30, "79 GiB"), (2000 * 2**30, "2,000 GiB"),
    ],
)  # fmt: skip
def test_memory_has_the_binary_unit_that_leaves_a_whole_number(size: float, text: str) -> None:
    assert show_memory(size) == text


def test_what_would_print_as_1000_prints_as_1_of_the_next_unit() -> None:
    assert show_rate(999.96e6) == "1 Gbps"
    assert show_rate(999.6e6) == "999.6 Mbps"
    assert show_time(0.99996e-3) == "1 ms"


@given(st.text())
@cases(500)
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in READERS:
        assert is_refused(read, text) or math.isfinite(read(text, "it"))


@given(st.from_regex(r"\A[-+0-9.eE_ ]{0,8}[kKMGT]?i?(bps|B|s|B/s|ms)\Z"))
@cases(500)
def test_text_like_a_quantity_is_read_as_arithmetic_says_or_refused(text: str) -> None:
    if not is_refused(seconds, text):
        number = float(text.strip().removesuffix("s").removesuffix("m"))
        unit_s = 1e-3 if text.endswith("ms") else 1
        assert seconds(text) == pytest.approx(number * unit_s, rel=1e-12, abs=1e-300)


@given(st.text() | st.sampled_from(ODD_TEXT))
@cases(200)
def test_visible_text_moves_no_cursor(text: str) -> None:
    assert visible(text).isprintable()
    assert visible(visible(text)) == visible(text)


def test_what_is_shown_fits_a_line() -> None:
    assert shown("x" * 1000) == "'" + "x" * 56 + "..."
    assert shown(10**5000) == "a very large int"
    assert "\n" not in shown(np.zeros((3, 3)))


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (16852.3, "16,850"),
        (999.96, "1,000"),
        (225.64, "225.6"),
        (2.5e6, "2,500,000"),
        (0.05, "0.05"),
        (3.2e-05, "0.000032"),
        (-1.23456e-07, "-0.0000001235"),
        (1.5e-12, "1.5e-12"),
        (0.0, "0"),
    ],
)
def test_numbers_have_no_exponent(number: float, shown: str) -> None:
    assert show_number(number) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(0.0913, "0.091"), (3.16, "3.2"), (9.96, "10"), (1234.6, "1,235")]
)
def test_an_expected_count_below_ten_keeps_two_digits(count: float, shown: str) -> None:
    assert show_mean_count(count) == shown


@pytest.mark.parametrize(
    ("factor", "times", "as_ratio"),
    [
        (6.4321, "6.43x", "6.432"),
        (1.02, "1.02x", "1.020"),
        (1.003, "just above 1x", "1.003"),
        (1.0003, "just above 1x", "just above 1"),
        (0.9999, "just below 1x", "just below 1"),
        (1.0, "1x", "1.000"),
    ],
)
def test_a_ratio_near_1_says_on_which_side_it_lies(
    factor: float, times: str, as_ratio: str
) -> None:
    """The bound of an interval beyond noise never reads as 1."""
    assert show_times(factor) == times
    assert show_ratio(factor) == as_ratio


def test_many_days_are_no_power_of_ten() -> None:
    assert show_duration(7167.4 * 86400) == "7,170 days"
    assert show_duration(1.82e6 * 86400) == "1,820,000 days"
    assert show_duration(999 * 86400) == "999 days"


@pytest.mark.parametrize(
    ("before_s", "after_s", "expected"),
    [
        (0.05451, 0.05451 + 7.143e-11, "0 s"),
        (0.054515 - 1e-12, 0.054515 + 1e-12, "0 s"),  # they print unlike, and differ by noise
        (0.05451, 0.054514, "0 s"),
        (0.05769, 0.09026, "+32.57 ms"),
        (0.09026, 0.05769, "-32.57 ms"),
        (0.0, 7e-11, "+7e-11 s"),  # nothing became something
    ],
)
def test_a_change_below_the_printed_digits_is_zero(
    before_s: float, after_s: float, expected: str
) -> None:
    assert show_change(before_s, after_s) == expected
