"""Rows of local steps and fragments that no elastic job can run: they are refused or left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.errors import UsageError
from fullwire.findings.predictions import FragmentsLeftOut
from fullwire.resilience.fragments import nearest, parameters_problem, round_problem
from fullwire.simulation.grid import Predictions, Subject


def refuse_fragments(
    asked: Sequence[int], local_steps: Sequence[int], subjects: Sequence[Subject]
) -> None:
    """Refuse fragments that no asked number of local steps can have."""
    most = max(local_steps)
    if max(asked) > 1 and most == 1:
        raise UsageError(
            "fragments: expected local steps with them, as parameters are averaged after these: "
            "--local-steps 30"
        )
    for fragments in asked:
        if any(
            _runs(steps, fragments, _parameters(subject))
            for steps, subject in itertools.product(local_steps, subjects)
        ):
            continue
        parameters = max(map(_parameters, subjects))
        problem = (
            f"expected at most {most} with {most} local steps, one after each step, got {fragments}"
            if fragments > most
            else parameters_problem(fragments, parameters) or round_problem(fragments, most)
        )
        raise UsageError(
            f"fragments: {problem}. The nearest is {nearest(fragments, most, parameters)}"
        )


def only_runnable(predictions: Predictions, subjects: Sequence[Subject]) -> Predictions:
    """Return a table without the rows that no elastic job can run; a subject for each run."""
    if "fragments" not in predictions.axes:
        return predictions
    rows = zip(
        predictions["local_steps"].tolist(),
        predictions["fragments"].tolist(),
        predictions.place("run").tolist(),
        strict=True,
    )
    parameters = [*map(_parameters, subjects)]
    runs = [_runs(steps, fragments, parameters[run]) for steps, fragments, run in rows]
    return predictions if all(runs) else replace(predictions, shown=np.flatnonzero(runs))


def only_shown(predictions: Predictions, ends_s: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Return the ends of the intervals of the rows that a table shows, from those of all rows."""
    if predictions.shown is None:
        return ends_s
    low_s, high_s = (end_s.reshape(-1)[predictions.shown] for end_s in ends_s)
    return low_s, high_s


def left_out(
    asked: Sequence[int], local_steps: Sequence[int], subjects: Sequence[Subject]
) -> Iterator[FragmentsLeftOut]:
    """Name the settings without rows."""
    pairs = [
        (steps, fragments)
        for steps, fragments in itertools.product(local_steps, asked)
        if not all(_runs(steps, fragments, _parameters(subject)) for subject in subjects)
    ]
    if pairs:
        yield FragmentsLeftOut(
            settings=tuple(
                f"{steps} local step{'s' * (steps > 1)} in {fragments} fragments"
                for steps, fragments in pairs
            )
        )


def _runs(steps: int, fragments: int, parameters: int) -> bool:
    return fragments == 1 or (
        steps > 1
        and round_problem(fragments, steps) is None
        and parameters_problem(fragments, parameters) is None
    )


def _parameters(subject: Subject) -> int:
    return len(subject.step.bytes)
