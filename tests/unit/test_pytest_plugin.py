"""The fixture that holds steps against a budget, as a user's test meets it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from fullwire.run.store import write
from tests.builders import steps_run
from tests.unit.test_compare import noisy

pytest_plugins = ["pytester"]
importlib.import_module("fullwire._native")  # loads once in a process, and pytester forgets modules


@pytest.fixture
def runs(pytester: pytest.Pytester) -> Path:
    """Write two recordings of 100 ms a step, and two of 110 ms."""
    for number in (1, 2):
        write(steps_run(noisy(100, number)), pytester.path / f"main-{number}.run")
        write(steps_run(noisy(110, number + 10)), pytester.path / f"pr-{number}.run")
    return pytester.path


def outcome(pytester: pytest.Pytester, body: str) -> tuple[int, int, str]:
    pytester.makepyfile(f"def test_it(step_time):\n    {body}")
    done = pytester.runpytest_inprocess("-p", "fullwire.pytest", "-p", "no:cacheprovider", "-rA")
    counted = done.parseoutcomes()
    return counted.get("passed", 0), counted.get("failed", 0), done.stdout.str()


def test_a_slower_branch_fails_with_the_sentence_of_the_gate(
    pytester: pytest.Pytester, runs: Path
) -> None:
    mains, prs = ["main-1.run", "main-2.run"], ["pr-1.run", "pr-2.run"]
    passed, failed, said = outcome(pytester, f"step_time.not_slower({mains}, {prs}, by='5%')")
    assert (passed, failed) == (0, 1)
    assert "Too slow: steps are" in said
    assert "the limit is 5.0%." in said
    assert "Traceback" not in said


def test_noise_and_what_is_allowed_fail_nothing(pytester: pytest.Pytester, runs: Path) -> None:
    body = "step_time.not_slower('main-1.run', 'main-2.run', by=0.05)"
    assert outcome(pytester, body)[:2] == (1, 0)
    body = "assert step_time.not_slower('main-1.run', 'pr-1.run', by='20%').state == 'kept'"
    assert outcome(pytester, body)[:2] == (1, 0)


@pytest.mark.parametrize(("budget", "fails"), [("90ms", True), ("99ms", False), ("200ms", False)])
def test_a_budget_is_missed_by_more_than_noise_or_not_at_all(
    pytester: pytest.Pytester, runs: Path, budget: str, fails: bool
) -> None:
    body = f"step_time.within({budget!r}, ['main-1.run', 'main-2.run'])"
    passed, failed, said = outcome(pytester, body)
    assert (passed, failed) == (not fails, fails)
    assert f"and the budget is {budget[:-2]} ms (95 % sure: " in said


def test_a_command_that_fails_fails_the_test_and_another_is_recorded_each_time(
    pytester: pytest.Pytester,
) -> None:
    body = "import sys; step_time.record(sys.executable, '-c', 'raise SystemExit(3)')"
    passed, failed, said = outcome(pytester, body)
    assert (passed, failed) == (0, 1)
    assert "the recorded command ended with status 3" in said
    body = (
        "import sys; once = step_time.record('true'); twice = step_time.record('true', times=2); "
        "assert [run.name for run in once + twice] == ['0.run', '1.run', '2.run']"
    )
    assert outcome(pytester, body)[:2] == (1, 0)
