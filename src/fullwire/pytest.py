"""A fixture for pytest: record a training in a test, and fail where its steps became too long.

    def test_a_step_keeps_its_budget(step_time):
        runs = step_time.record("torchrun", "--nproc-per-node=2", "train.py", times=3)
        step_time.within("150ms", runs)

    def test_this_branch_is_not_slower(step_time):
        step_time.not_slower(["main-1.run", "main-2.run"], ["pr-1.run", "pr-2.run"], by="5%")

pytest finds it by itself where Fullwire is installed. Noise fails no test: a step has to be longer
by more than these recordings can show by chance. `pytest -rA` shows what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fullwire.answers.compare import Gate
    from fullwire.answers.opening import RunLike


class StepTime:
    """Records jobs, and holds the length of their steps against a budget or against other runs."""

    def __init__(self, folder: Path, test: pytest.Item) -> None:
        self._folder, self._test = folder, test

    def record(self, *command: str, times: int = 1) -> list[Path]:
        """Record a command so many times, one after the other, and return the runs."""
        from fullwire.recorder.record import record

        first = len(list(self._folder.glob("*.run")))
        runs = []
        for number in range(first, first + times):
            recording = record(command, self._folder / f"{number}.run")
            if recording.exit_status:
                pytest.fail(
                    f"the recorded command ended with status {recording.exit_status}: "
                    f"{' '.join(command)}",
                    pytrace=False,
                )
            runs.append(recording.path)
        return runs

    def within(self, budget: str | float, runs: RunLike | Sequence[RunLike]) -> None:
        """Fail if the usual step is longer than the budget ("150ms"), by more than noise."""
        from fullwire.answers.compare import typical_length
        from fullwire.units import seconds, show_time

        allowed_s, length = seconds(budget, "budget"), typical_length(runs)
        said = f"steps take {show_time(length.step_s)}, and the budget is {show_time(allowed_s)}"
        if length.low_s is not None and length.high_s is not None:
            said += f" (95 % sure: {show_time(length.low_s)} to {show_time(length.high_s)})"
        self._test.add_report_section("call", "step time", said)
        if length.low_s is not None and length.low_s > allowed_s:
            pytest.fail(said, pytrace=False)

    def not_slower(
        self,
        before: RunLike | Sequence[RunLike],
        after: RunLike | Sequence[RunLike],
        by: str | float = "5%",
    ) -> Gate:
        """Fail if the second runs' steps are longer by more than a limit, and than noise."""
        from fullwire.answers.compare import compare

        gate = compare(before, after).gate(by)
        self._test.add_report_section("call", "step time", gate.sentence)
        if gate.state == "slower":
            pytest.fail(gate.sentence, pytrace=False)
        return gate


@pytest.fixture
def step_time(tmp_path: Path, request: pytest.FixtureRequest) -> StepTime:
    """Give what records a training and holds its steps against a budget or other recordings."""
    return StepTime(tmp_path, request.node)
