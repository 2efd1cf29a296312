"""The way in which fields are written into sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from fullwire.words import filled, sentence, setting


@dataclass
class Told:
    template: str
    value: Any
    other: Any = None


@pytest.mark.parametrize(
    ("template", "value", "said"),
    [
        ("{value:time}", 0.0125, "12.5 ms"),
        ("{value:rate}", 1e9, "1 Gbps"),
        ("{value:bytes}", 25e6, "25 MB"),
        ("{value:ranks} wait", (1, 6), "ranks 1 and 6 wait"),
        ("{value:Ranks} {value:is|are} late", (3,), "Rank 3 is late"),
        ("{value:.0%} used", 0.5, "50% used"),
        ("{value:,} {value:step|steps}", 1200, "1,200 steps"),
        ("{value} {value:step|steps}", 1, "1 step"),
        ("it is {value:full|idle}", False, "it is idle"),
        ("{value:list}", ("a", "b", "c"), "a, b, c"),
        ("{value:or none}", ("a", "b"), "a, b"),
        ("{value:or none}", (), "none"),
        ("{value:or none}", None, "none"),
        ("{value:or none}", 0, "0"),
        ("{value:and}", ("a", "b"), "a and b"),
        ("{value:;}", ("a", "b"), "a; b"),
        ("sent{value:? over {value}}", "ib0", "sent over ib0"),
        ("sent{value:? over {value}}", "", "sent"),
        ("sent{value}", None, "sent"),
        ("{value:time}", None, ""),
        ("{value}", (Told("a {value}, ", 1), Told("b {value}", 2)), "a 1, b 2"),
    ],
)
def test_a_field_is_written_as_its_template_asks(template: str, value: Any, said: str) -> None:
    assert sentence(Told(template, value)) == said


def test_braces_in_what_is_filled_in_are_no_fields() -> None:
    assert sentence(Told("of {value}", "{other} | {0}")) == "of {other} | {0}"


def test_what_a_file_holds_cannot_choose_words() -> None:
    assert filled("read{value:? from {value}}", Told("", "a|b: {x}")) == "read from a|b: {x}"


def test_how_a_fix_is_made_is_filled_in_as_well() -> None:
    class Fix:
        how = "bucket_cap_mb={cap_mib}"
        cap_mib = 25

    assert setting(Fix()) == "bucket_cap_mb=25"
