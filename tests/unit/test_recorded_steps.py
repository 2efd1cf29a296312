"""The steps of a process, as found in its notes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from fullwire.recorder.inside.journal import Note
from fullwire.recorder.steps import Steps, found_steps


def found(
    optimizers: list[tuple[int, int, int]],
    inferences: Sequence[tuple[int, int]] = (),
    modes: Sequence[tuple[int, int]] = (),
    first_ns: int | None = 1,
) -> list[tuple[int, int]]:
    """Return the beginning and end of each step; the first data came at `first_ns`, if at all."""
    journal: Any = SimpleNamespace(first_ns={} if first_ns is None else {Note.INPUT: first_ns})
    notes = {
        Note.OPTIMIZER: np.array(optimizers, np.int64),
        Note.INFERENCE: np.array([(0, *each) for each in inferences], np.int64).reshape(-1, 3),
        Note.EVALUATION: np.array([(0, *each) for each in modes], np.int64).reshape(-1, 3),
    }
    steps: Steps = found_steps(journal, notes)
    return list(zip(steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True))


ONE = [(0, 90, 100), (0, 190, 200), (0, 290, 300), (0, 390, 400)]
TWO = [
    (number, at + 40 * number, at + 40 * number + 10) for at in (50, 150, 250) for number in (0, 1)
]


def test_the_step_after_an_evaluation_begins_after_it() -> None:
    evaluated = [(210, 220), (230, 240)]
    expected = [(1, 100), (100, 200), (240, 300), (300, 400)]
    assert found(ONE, inferences=evaluated) == expected
    assert found(ONE, modes=evaluated) == expected


def test_a_forward_without_gradients_in_most_steps_is_a_part_of_them() -> None:
    made = [(10, 20), (110, 120), (310, 320)]
    assert found(ONE, made) == [(1, 100), (100, 200), (200, 300), (300, 400)]
    # Where the job also evaluates, in the mode for it, this is still between steps.
    assert found(ONE, made, [(205, 250)])[2] == (250, 300)
    assert found(ONE, made[:2])[:2] == [(20, 100), (120, 200)]


def test_what_comes_after_one_of_the_steps_optimizers_is_a_part_of_it() -> None:
    rounds = [(1, 100), (100, 200), (200, 300)]
    assert found(TWO) == rounds
    for between in ([(62, 70)], [(162, 170)]):
        assert found(TWO, inferences=between) == rounds
        assert found(TWO, modes=between) == rounds
    assert found(TWO, inferences=[(105, 110)]) == [(1, 100), (110, 200), (200, 300)]


def test_the_first_step_of_a_job_of_optimizers_alone_takes_time() -> None:
    """Of no time, as once of a parameter server, `compare` refused its run."""
    assert found(ONE, first_ns=None)[:2] == [(90, 100), (100, 200)]
