"""How the recorder looks at parameters around each pass, and which sets of gradients it counts."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from fullwire.recorder.inside.gradients import ADDS, BEGINS, UNKNOWN, Adding
from fullwire.recorder.inside.journal import Journal
from fullwire.recorder.reported import _sets_of_gradients
from fullwire.recorder.steps import Steps


class Parameter:
    """As much of a parameter as is looked at."""

    requires_grad = is_leaf = True
    _version = 0
    reads = 0

    @property
    def grad(self) -> Any:
        Parameter.reads += 1


def reads_of_a_pass(adding: Adding) -> int:
    Parameter.reads = 0
    adding.pass_begins()
    adding.pass_ended()
    return Parameter.reads


def test_a_pass_costs_as_little_in_a_program_that_makes_many_optimizers() -> None:
    adding = Adding(Journal(""))
    model = [Parameter() for _ in range(1000)]
    adding.watch(model)
    of_one = reads_of_a_pass(adding)
    assert 0 < of_one <= 10
    adding.watch(model)  # by its optimizer
    assert reads_of_a_pass(adding) == of_one
    for _ in range(200):
        adding.watch([Parameter()])
    gc.collect()
    assert reads_of_a_pass(adding) <= of_one  # the others are gone
    for parameter in model:  # each by its own optimizer
        adding.watch([parameter])
    assert of_one < reads_of_a_pass(adding) <= 100


def test_the_time_of_looking_counts_as_the_recorders() -> None:
    journal = Journal("")
    adding = Adding(journal)
    model = [Parameter() for _ in range(5)]
    adding.watch(model)
    for _ in range(100):
        reads_of_a_pass(adding)
    assert journal.notes.spent_ns > 0


B, A, U = BEGINS, ADDS, UNKNOWN


@pytest.mark.parametrize(
    ("steps", "sets"),
    [
        ([[B]] * 4, []),  # one pass each
        ([[U, U]] * 4, []),
        ([[B, A]] * 4, [1]),
        ([[U, A]] * 4, [1]),
        ([[A, A]] * 4, [1]),  # it adds to a gradient that the step before left
        ([[A, B]] * 4, [2]),
        ([[B, B, B]] * 4, [3]),
        ([[B, B]] + [[B, A]] * 10, [1]),  # the first step is unlike the others
        ([[B, B]] * 2 + [[B, A]] * 9, [2]),
        ([[U, U]] * 9 + [[B, B]], [2]),
    ],
)
def test_the_sets_of_a_step_are_the_most_but_for_a_tenth_of_the_steps(
    steps: list[list[int]], sets: list[int]
) -> None:
    ends_ns = np.arange(1, len(steps) + 1) * 100
    backward = [
        [did, 100 * number + 10 * place, 5]
        for number, passes in enumerate(steps)
        for place, did in enumerate(passes)
    ]
    of_steps = Steps(start_ns=ends_ns - 100, end_ns=ends_ns)
    assert _sets_of_gradients(np.array(backward[::-1]), of_steps) == sets
