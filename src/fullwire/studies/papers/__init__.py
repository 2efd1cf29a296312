"""Both papers redone in the lab on this machine: `fullwire study`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fullwire.answers.whatif import whatif
from fullwire.display import Result, html_table
from fullwire.errors import FullwireError, UsageError
from fullwire.run.run import Run
from fullwire.studies.papers import figures as drawn
from fullwire.studies.papers.claims import Claim, Findings, claims
from fullwire.studies.papers.explained import (
    Explained,
    modelled_rows,
    shares_of_measured,
    shares_of_modelled,
)
from fullwire.studies.papers.figures import Figure
from fullwire.studies.papers.measures import Measured, measured
from fullwire.studies.papers.predicted import FULL, Predicted, predictions
from fullwire.studies.papers.trials import Trial, check_machine, finished, planned, play
from fullwire.units import show_time

_LAB_S, _RANK_S = 3.0, 1.5  # start-up of a lab and of each of its ranks, on two cores
_REAL_STEP_S = 0.15


@dataclass(frozen=True, eq=False, repr=False, slots=True, kw_only=True)
class Study(Result):
    """Measured and predicted trials, the data of the figures, and the papers' claims."""

    directory: Path
    measured: tuple[Measured, ...]
    predicted: tuple[Predicted, ...]
    explained: tuple[Explained, ...]
    figures: tuple[Figure, ...]
    claims: tuple[Claim, ...]
    failed: tuple[tuple[Trial, str], ...]  # each with its error

    def _in_short(self) -> Iterator[str]:
        yield f"{len(self.claims)} claims held against {len(self.measured)} measured trials"
        yield f"{len(self.figures)} figures, {len(self.failed)} trials failed, in {self.directory}"

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        names = [field.name for field in fields(Claim)]
        return {"claims": {name: [getattr(one, name) for one in self.claims] for name in names}}

    def _picture(self) -> str:
        return html_table(self._tables()["claims"])


def study(
    directory: str | Path,
    *,
    quick: bool = False,
    trials: tuple[Trial, ...] | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Study:
    """Record the trials that the directory lacks, and judge the papers' claims by all trials.

    - `directory`: where the runs of the trials are, or will be.
    - `quick`: fewer trials, for a first look.
    - `trials`: the trials to record, in place of both sets.
    - `say`: a function that is called with a sentence about each trial.

        fw.study("papers", quick=True).claims
    """
    place = Path(directory)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{place}: expected a directory for the study: {error.strerror}") from None
    chosen = planned(quick) if trials is None else trials
    runs, failed = _played(chosen, place, say)
    results = []
    for trial in chosen:
        if trial.name in runs:
            try:
                results.append(measured(trial, runs[trial.name]))
            except FullwireError as error:  # the trial ended well, but its run cannot be read
                failed.append((trial, str(error)))
    predicted = predictions(results, runs)
    modelled = modelled_rows()
    shares = (shares_of_measured(results), shares_of_modelled(modelled))
    explained = tuple(share for share in shares if share is not None)
    return Study(
        directory=place,
        measured=tuple(results),
        predicted=tuple(predicted),
        explained=explained,
        figures=(
            drawn.scaling(results, predicted),
            drawn.computation(results),
            drawn.utilization(results),
            drawn.compression(results),
            drawn.sent_bytes(results),
            drawn.ring(results),
            drawn.iteration(results, modelled),
            drawn.explained(explained),
        ),
        claims=claims(Findings(measured=results, predicted=predicted, explained=explained)),
        failed=tuple(failed),
    )


def _played(
    trials: tuple[Trial, ...], place: Path, say: Callable[[str], None]
) -> tuple[dict[str, Run], list[tuple[Trial, str]]]:
    """Return the run of each trial, recorded now or before, and the trials that failed."""
    runs = {trial.name: run for trial in trials if (run := finished(trial, place)) is not None}
    if runs:
        say(f"{len(runs)} of {len(trials)} trials are in {place} already")
    failed = []
    left = [trial for trial in trials if trial.name not in runs]
    if left:
        check_machine()
    clock = _Clock(left)
    for trial, words in clock.through():
        say(words)
        problem = play(trial, place, expected_s(trial))
        run = finished(trial, place) if problem is None else None
        if run is None:
            failed.append((trial, problem or "its run cannot be read"))
            say(f"{trial.name} failed: {problem}; the rest goes on")
        else:
            runs[trial.name] = run
    return runs, failed


class _Clock:
    """Estimates the remaining time from the trials so far: actual time over expected time."""

    def __init__(self, trials: list[Trial]) -> None:
        self._trials = trials
        self._expected_s = [expected_s(trial) for trial in trials]

    def through(self) -> Iterator[tuple[Trial, str]]:
        """Yield the trials, each with the line that announces it."""
        began_s = time.monotonic()
        for number, trial in enumerate(self._trials):
            done_s = sum(self._expected_s[:number])
            pace = (time.monotonic() - began_s) / done_s if done_s else 1.0
            left_s = pace * sum(self._expected_s[number:])
            yield (
                trial,
                f"[{number + 1}/{len(self._trials)}] {trial.name}; {show_time(round(left_s))} left",
            )


def expected_s(trial: Trial) -> float:
    """Return how long a trial should take, its lab included."""
    start_s = _LAB_S + _RANK_S * trial.workers
    if trial.kind == "real":
        return start_s + trial.steps * _REAL_STEP_S
    step_s = 0.2
    if trial.workers > 1:
        answer = whatif(
            trial.model,
            workers=trial.workers,
            bandwidth=trial.rate,
            transport=FULL,
            compression=trial.compression,
        )
        step_s = float(answer["step_s"][0])
    return start_s + (trial.steps + 2) * step_s * trial.dilation
