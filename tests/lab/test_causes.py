"""Real jobs that are slow for a known reason, recorded in the lab: the verdict names it.

validation/causes.py has all of them, five times each. Here are short ones with wide margins.
"""

from __future__ import annotations

import sys

import pytest

from tests.lab.test_lab import needs_namespaces
from tests.torch.test_record import UNCOMPILED, needs_torch
from validation.causes import CAUSES, explained, is_right

pytestmark = [needs_namespaces, needs_torch, pytest.mark.alone]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("slow link", ["--steps", "5"]),
        ("late in backward", ["--steps", "5", "--late-s", "0.3"]),
        ("slow input", ["--steps", "5", "--load-s", "0.3"]),
    ],
)
def test_a_known_cause_is_named(name: str, options: list[str]) -> None:
    found = explained(CAUSES[name], options, [sys.executable, UNCOMPILED])
    assert is_right(CAUSES[name], found), found.verdict
    assert found.account["unexplained"] < 0.05 * found.step_s
    assert sum(found.account.values()) == pytest.approx(found.step_s)
