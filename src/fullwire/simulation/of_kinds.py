"""A job whose steps are of several kinds, as the predictor takes it: a subject for each kind.

Each kind is predicted by itself, on the transport of the whole run. The job's step is the mean of
its kinds' steps, each at its share. So are the ends of its interval. A job whose workers add up
once in several steps is no such job: the conditions say after how many steps it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.errors import UsageError
from fullwire.run.gaps import reasons
from fullwire.run.kinds import Kind, kinds_of, run_of_kind, sums_of
from fullwire.run.run import Run
from fullwire.run.usual import Alone, local_steps_of, marks_of_steps
from fullwire.simulation.grid import Predictions, Residue, Subject, Swept
from fullwire.simulation.step import Step
from fullwire.simulation.typical import Sending

NO_COMMUNICATION = "the steps lack communication"


def by_kinds(
    run: Run, make: Callable[[Run, Alone | None, Sending], Subject], alone: Alone | None
) -> Subject:
    """Make the subject of a run, or that of each kind of its steps where these are several.

    `alone` is T1 by the run's account. Several workers whose steps lack communication are refused:
    what they send, if they send anything, is unknown.
    """
    if is_silent(run):
        raise UsageError(
            f"{run.place}: {NO_COMMUNICATION}, so nothing is predicted: each of its "
            f"{run.facts.workers} workers trains by itself, or their communication was not "
            "recorded. Record one worker to predict what sums of its gradients would take"
        )
    kinds = kinds_of(run).kinds
    is_told = all(kind.passes is not None and kind.gradients for kind in kinds)
    if not (kinds and is_told) or local_steps_of(run) > 1:
        return make(run, alone, "gradients")
    of_kinds = (None,) * len(kinds) if alone is None else alone.of_kinds
    subjects = [
        make(run_of_kind(run, place), of_kind, sends)
        for place, (of_kind, sends) in enumerate(zip(of_kinds, _sent(kinds), strict=True))
    ]
    shares = [kind.share for kind in kinds]
    step = _mean_step(shares, [subject.step for subject in subjects])
    most = subjects[int(np.argmax([kind.sent_bytes for kind in kinds]))]
    # A replay plays the mean step alone, with what was left unexplained in the mean.
    residues = tuple(
        Residue(*np.dot(shares, [one.figures for one in each]).tolist())
        for each in zip(*(subject.residues for subject in subjects), strict=True)
    )
    crowding = [subject.crowding for subject in subjects]
    crowded_s = np.multiply(shares, [each.step.crowded_by_messages_s for each in subjects])
    steady_s = float(np.dot(crowded_s, [each.steady_share for each in crowding]))
    s_each = float(np.dot(shares, [each.s_each for each in crowding]))
    steady_share = steady_s / max(float(crowded_s.sum()), np.finfo(float).tiny)
    return replace(
        most,
        step=step,
        residues=residues,
        crowding=replace(most.crowding, s_each=s_each, steady_share=steady_share),
        kinds=tuple(zip(kinds, subjects, strict=True)),
    )


def is_silent(run: Run) -> bool:
    """Say whether steps of several workers lack communication that the recorder would have seen.

    A file of another program may tell of gradients alone, and collectives may be lost.
    """
    is_measured = run.provenance.origin == "measured"
    is_of_one = (run.facts.workers or 1) == 1
    if is_of_one or not is_measured or reasons(run.gaps, ("collectives",)):
        return False
    steps = np.unique(marks_of_steps(run).step)
    waits = run.spans.step[run.spans.lane == "communication"]
    sends = np.isin(steps, np.append(run.collectives.step, waits))
    return bool(len(steps)) and not sends.any()


def _sent(kinds: Sequence[Kind]) -> list[Sending]:
    """Return what the steps of each kind send."""
    sums = sums_of(kinds)
    if not any(sums):  # one worker sent nothing, and it is asked what several would send
        return ["gradients"] * len(kinds)
    return ["buckets" if of_kind else "nothing" for of_kind in sums]


def _mean_step(shares: Sequence[float], steps: Sequence[Step]) -> Step:
    """Return the step whose parts are the means of those of several kinds."""

    def mean(values: Sequence[float]) -> float:
        return float(np.dot(shares, values))

    def off(ends: Sequence[tuple[float, float]], times_ns: Sequence[float]) -> tuple[float, float]:
        below, above = (
            mean([end[side] * time_ns for end, time_ns in zip(ends, times_ns, strict=True)])
            for side in (0, 1)
        )
        whole_ns = max(mean(times_ns), 1.0)
        return below / whole_ns, above / whole_ns

    sent_bytes = [
        0.0 if step.sends_nothing else float(step.bytes.sum()) * step.sent_share for step in steps
    ]
    most = steps[int(np.argmax(sent_bytes))]
    sent_share = most.sent_share
    if min(sent_bytes) < max(sent_bytes):
        sent_share *= mean(sent_bytes) / max(sent_bytes)
    measured_ns = [step.measured_ns or 0 for step in steps]
    alone_ns = [step.alone_ns for step in steps]
    return replace(
        most,
        sent_share=sent_share,
        step_ns=round(mean([step.step_ns for step in steps])),
        forward_ns=round(mean([step.forward_ns for step in steps])),
        backward_ns=round(mean([step.backward_ns for step in steps])),
        waiting_ns=round(mean([step.waiting_ns for step in steps])),
        packing_ns=round(mean([step.packing_ns for step in steps])),
        input_ns=round(mean([step.input_ns for step in steps])),
        host_ns=round(mean([step.host_ns for step in steps])),
        crowded_ns=round(mean([step.crowded_ns for step in steps])),
        crowded_by_ranks_ns=round(mean([step.crowded_by_ranks_ns for step in steps])),
        processor_ns=round(mean([step.processor_ns for step in steps])),
        measured_ns=round(mean(measured_ns)),
        measured_off=off([step.measured_off for step in steps], measured_ns),
        alone_off=off([step.alone_off for step in steps], alone_ns),
        count=min(step.count for step in steps),
    )


def apart(subjects: Sequence[Subject]) -> list[Subject]:
    """Return the subjects with each kind of steps by itself."""
    return [
        kind for subject in subjects for kind in ([each for _, each in subject.kinds] or [subject])
    ]


def as_means(subjects: Sequence[Subject], of_kinds: Predictions) -> Predictions:
    """Return the predictions of subjects from those of their kinds."""
    measures = of_kinds.measures
    found = {name: means(subjects, values) for name, values in measures.items()}
    with np.errstate(divide="ignore", invalid="ignore"):  # a step of 0 is refused later
        found["scaling_factor"] = found["baseline_step_s"] / found["step_s"]
        used_s = means(subjects, measures["network_utilization"] * measures["step_s"])
        found["network_utilization"] = used_s / found["step_s"]
    names = tuple(subject.name for subject in subjects)
    passes = tuple(subject.passes for subject in subjects)
    return Predictions(axes={**of_kinds.axes, "run": names}, measures=found, passes=passes)


def mean_ends(
    subjects: Sequence[Subject], of_kinds: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """Return the ends of the intervals of subjects from those of their kinds."""
    kinds = len(apart(subjects))
    low_s, high_s = (means(subjects, end_s.reshape(kinds, -1)).reshape(-1) for end_s in of_kinds)
    return low_s, high_s


def in_the_mean(subjects: Sequence[Subject], of_kinds: Swept) -> Swept:
    """Return the predictions and intervals of subjects from those of their kinds."""
    if not any(subject.kinds for subject in subjects):
        return of_kinds
    predictions, ends = of_kinds
    return as_means(subjects, predictions), mean_ends(subjects, ends)


def means(subjects: Sequence[Subject], values: Floats) -> Floats:
    """Return the mean over the kinds of each subject, which are on the first axis."""
    rows, first = [], 0
    for subject in subjects:
        shares = [kind.share for kind, _ in subject.kinds] or [1.0]
        rows.append(np.tensordot(shares, values[first : first + len(shares)], 1))
        first += len(shares)
    return np.stack(rows)
