"""Rows of local steps and fragments that no elastic job can run: they are refused or left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.errors import UsageError
from fullwire.findings.finding import Finding
from fullwire.findings.predictions import FragmentsLeftOut, FragmentsTakenAlike
from fullwire.resilience.fragments import nearest, parameters_problem, round_problem
from fullwire.simulation.grid import Predictions, Subject

if TYPE_CHECKING:
    from fullwire.simulation.target import Targets


def refuse_fragments(
    asked: Sequence[int], local_steps: Sequence[int], subjects: Sequence[Subject]
) -> None:
    """Refuse fragments that one of the runs cannot have, with any asked number of local steps.

    Where the gradients are whole buckets, nothing tells how many parameters the model has.
    """
    most = max(local_steps)
    if max(asked) > 1 and most == 1:
        raise UsageError(
            "fragments: expected local steps with them, as parameters are averaged after these: "
            "--local-steps 30"
        )
    known = (len(subject.step.bytes) for subject in subjects if subject.has_parameters)
    parameters = min(known, default=max(*asked, most))
    for fragments in asked:
        problem = parameters_problem(fragments, parameters)
        if fragments == 1 or (
            problem is None and any(_runs(steps, fragments) for steps in local_steps)
        ):
            continue
        if fragments > most:
            problem = f"expected at most {most} with {most} local steps, one after each step"
            problem += f", got {fragments}"
        problem = problem or f"expected a divisor of {most} local steps, got {fragments}"
        raise UsageError(
            f"fragments: {problem}. The nearest is {nearest(fragments, most, parameters)}"
        )


def only_runnable(predictions: Predictions) -> Predictions:
    """Return a table without the rows that no elastic job can run."""
    if "fragments" not in predictions.axes:
        return predictions
    pairs = zip(predictions["local_steps"].tolist(), predictions["fragments"].tolist(), strict=True)
    runs = [_runs(*pair) for pair in pairs]
    return predictions if all(runs) else replace(predictions, shown=np.flatnonzero(runs))


def only_shown(predictions: Predictions, ends_s: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Return the ends of the intervals of the rows that a table shows, from those of all rows."""
    if predictions.shown is None:
        return ends_s
    low_s, high_s = (end_s.reshape(-1)[predictions.shown] for end_s in ends_s)
    return low_s, high_s


def only_reachable(targets: Targets, fragments: Mapping[str, int]) -> Targets:
    """Return what reaches a target in settings that an elastic job can run; `fragments` by run."""
    bandwidths, ratios = (
        tuple(case for case in cases if _runs(case.local_steps, fragments[case.run]))
        for cases in (targets.least_bandwidth, targets.least_compression)
    )
    return replace(targets, least_bandwidth=bandwidths, least_compression=ratios)


def about_fragments(
    asked: Sequence[int], local_steps: Sequence[int], subjects: Sequence[Subject]
) -> Iterator[Finding]:
    """Name the settings without rows, and the runs that do not tell how large a fragment is."""
    if max(asked) > 1:
        runs = tuple(subject.name for subject in subjects if not subject.has_parameters)
        if runs:
            yield FragmentsTakenAlike(runs=runs)
    settings = tuple(
        f"{steps} local step{'s' * (steps > 1)} in {fragments} fragments"
        for steps, fragments in itertools.product(local_steps, asked)
        if not _runs(steps, fragments)
    )
    if settings:
        yield FragmentsLeftOut(settings=settings)


def _runs(steps: int, fragments: int) -> bool:
    return fragments == 1 or (steps > 1 and round_problem(fragments, steps) is None)
