"""Conditions are read from text, numbers, arrays and generators alike, or refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullwire.answers import conditions
from fullwire.answers.conditions import Asked, compressors, rate, several, worker_count
from fullwire.compression.compressor import Compressor
from fullwire.errors import UsageError
from fullwire.units import MOST_COUNTED
from tests.strategies import cases

ARABIC_EIGHT, SUPERSCRIPT_TWO = "\u0668", "\u00b2"


@pytest.mark.parametrize(
    "typed",
    [
        "8,64",
        " 8 , 64 ",
        [8, 64],
        (8, "64"),
        np.array([8, 64]),
        np.array(["8", "64"]),
        range(8, 65, 56),
        (count for count in (8, 64)),
    ],
)
def test_one_or_many_are_taken_in_every_shape(typed: Any) -> None:
    assert several(typed, worker_count) == (8, 64)


@pytest.mark.parametrize("typed", [8, "8", np.int64(8), np.array(8), [8], {8}])
def test_one_value_stands_for_a_list_of_one(typed: Any) -> None:
    assert several(typed, worker_count) == (8,)


@pytest.mark.parametrize(
    "typed",
    [
        "",
        ",",
        "8,",
        "8,,64",
        "0",
        "-1",
        "8.0",
        "1e3",
        "1_0",
        "0x8",
        "100000001",
        "9" * 5000,
        ARABIC_EIGHT,
        SUPERSCRIPT_TWO,
        0,
        -8,
        8.0,
        True,
        b"8",
        bytearray(b"8"),
        memoryview(b"8"),
        None,
        [None],
        [[8]],
        np.array([[8]]),
        np.timedelta64(8, "s"),
    ],
)
def test_what_is_no_number_of_workers_is_refused_in_a_short_sentence(typed: Any) -> None:
    with pytest.raises(UsageError, match="workers: expected a whole number from 1 to") as refusal:
        several(typed, worker_count)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("typed", [b"10Gbps", memoryview(b"8"), [b"8"]])
def test_bytes_are_not_taken_for_the_numbers_of_their_letters(typed: Any) -> None:
    with pytest.raises(UsageError, match="bandwidth: expected a rate"):
        several(typed, rate)


def test_a_generator_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "MOST_VALUES", 1000)
    with pytest.raises(UsageError, match="expected at most 1,000 values of one condition"):
        several(itertools.repeat(8), worker_count)


@pytest.mark.parametrize("typed", [[], (), np.array([])])
def test_no_ratio_at_all_is_refused(typed: Any) -> None:
    with pytest.raises(UsageError, match="compression: expected at least one value"):
        compressors(typed, None)


@pytest.mark.parametrize("typed", [5, True, None, b"4", object, "4,20GB/s,20GB/s", "nan,1,1,sum"])
def test_what_is_no_codec_is_refused(typed: Any) -> None:
    with pytest.raises(UsageError, match="codec"):
        compressors(None, [typed])


@given(st.text())
@cases(200)
def test_any_text_is_a_number_of_workers_or_refused(text: str) -> None:
    try:
        assert 1 <= worker_count(text) <= MOST_COUNTED
    except UsageError as refusal:
        assert "\n" not in str(refusal)  # noqa: PT017  # not every text is refused


def test_no_compression_may_be_called_none() -> None:
    uncompressed, bf16 = compressors("none,bf16", None)
    assert uncompressed == Compressor(ratio=1)
    assert bf16.ratio == 2
    with pytest.raises(UsageError, match="expected a ratio such as 4, none, or a codec among bf16"):
        compressors("nothing", None)


@pytest.mark.parametrize(
    "target",
    [
        "info",
        "inference_loss",
        "nan_loss",
        "Info",
        "\u0142oss",
        "\u635f\u5931",
        "loss<=0.3",
        "_loss",
    ],
)
def test_a_word_is_a_metric_as_the_target(target: str) -> None:
    """Metrics whose names begin with inf or nan, or with another script, were numbers."""
    assert Asked(target=target).is_metric


@pytest.mark.parametrize(
    "target", ["0.9", "nan", " inf ", "-inf", "Infinity", "+NaN", "", 0.9, None]
)
def test_a_number_is_no_metric_as_the_target(target: Any) -> None:
    assert not Asked(target=target).is_metric
