"""A run as the predictor takes it: its typical step and the conditions of its recording."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fullwire.clusters.cluster import Cluster
from fullwire.collectives.cost import AddTimes
from fullwire.collectives.registry import with_formula
from fullwire.errors import DamagedInput, UsageError
from fullwire.run.gaps import reasons
from fullwire.run.placement import (
    UNKNOWN_PLACEMENT,
    Placement,
    placement_of,
    sums_on_processors,
)
from fullwire.run.run import Run
from fullwire.run.usual import local_steps_of
from fullwire.simulation.buckets import bucket_policy
from fullwire.simulation.calibrate import line_rate_bps
from fullwire.simulation.grid import BUCKET, Grid, Subject
from fullwire.simulation.groups import Others
from fullwire.simulation.typical import Sending, typical_step

# Our hooks' exchange and gather on Gloo against its all-reduce of as many bytes, less a hook's own
# time: 0.99 to 1.14 between two workers, 1.08 to 1.26 among four, where three senders meet at each
# receiver (twelve cases in a lab, docs/validation/compression.md).
_GLOO_EXCHANGE, _GLOO_MEETING = 1.03, 0.13

_RESTS_ON = ("spans", "collectives", "gradients")  # tables


def plain_subject(
    name: str,
    run: Run,
    unknown: Placement = UNKNOWN_PLACEMENT,
    sends: Sending = "gradients",
) -> Subject:
    """Take a run's typical step as it is, with its ranks at a placement if theirs is unknown."""
    if lost := reasons(run.gaps, _RESTS_ON):
        raise DamagedInput(name, f"nothing is predicted from the rest of it: {lost[0]}")
    _refuse_without_computing(name, run)
    step, fragments = typical_step(run, sends), run.facts.fragments or 1
    if fragments > 1:  # the sums of a fragment have their messages, and count once
        step = replace(step, others=Others())
    points = run.facts.reduce_cost or ()
    adds = AddTimes(points)
    return Subject(
        name=name,
        step=step,
        adds=adds,
        exchange_factor=_GLOO_EXCHANGE if run.facts.backend == "gloo" else 1.0,
        meeting_factor=_GLOO_MEETING if run.facts.backend == "gloo" else 0.0,
        recorded=as_recorded(run),
        placement=placement_of(run) or unknown,
        is_on_devices=not sums_on_processors(run),
        fragments=fragments,
        has_parameters=_has_parameters(run),
        round_s=_round_s(run),
        recorded_rounds=fragments / local_steps_of(run) if run.facts.local_steps else 0.0,
    )


def _has_parameters(run: Run) -> bool:
    """Say whether the gradients of a run are those of parameters, and not whole buckets."""
    if run.facts.gradient_unit is not None:  # a replay has the gradients of its run
        return run.facts.gradient_unit != BUCKET
    # A profiler's trace shows messages, which are taken for gradients that go alone.
    return run.provenance.origin != "imported" or run.facts.buckets != "none"


def _refuse_without_computing(name: str, run: Run) -> None:
    """Refuse a table of collectives, a log or a capture, by what it is and what would do."""
    if run.provenance.origin != "imported" or (run.spans.lane == "compute").any():
        return
    if len(run.spans):
        has = "it tells how long its steps took, and nothing of computing"
        other = ""
    elif len(run.collectives):
        has = "it tells times of collectives, and nothing of steps and computing"
        other = ". The file with the table goes beside a model or a job's run: --transport FILE"
    else:
        return
    raise UsageError(
        f"{name}: expected a job that computes: {has}. A recording of "
        f"the job does (fullwire record), or a profiler's trace of it{other}"
    )


def _round_s(run: Run) -> float:
    """Return what a rank does once in a round beyond the work of a step; 0 where none shows.

    It copies its state, writes its changes, and takes the outer optimizer's step. A round of one
    step has no step without it. With fragments a step that a sum is beside is longer for its
    contention, too, and nothing tells the two apart: predictions keep both as recorded.
    """
    every, sums = run.facts.local_steps or 1, run.collectives
    if every == 1 or (run.facts.fragments or 1) > 1 or not len(sums):
        return 0.0
    marks = run.spans.rows((run.spans.name == "step") & (run.spans.lane == "host"))
    found: list[float] = []
    for rank in np.unique(sums.rank).tolist():
        steps, own = marks.rows(marks.rank == rank), sums.rows(sums.rank == rank)
        length_ns = (steps.end_ns - steps.start_ns).astype(float)
        ends_round = np.isin(steps.step, own.step)
        if not ends_round.any() or ends_round.all():
            return 0.0
        # All averages of a round are on their way at once, and nothing is computed meanwhile.
        of_rounds = (own.rows(own.step == step) for step in steps.step[ends_round].tolist())
        apart_ns = [int(each.end_ns.max() - each.issue_ns.min()) for each in of_rounds]
        beyond_ns = np.median(length_ns[ends_round] - apart_ns) - np.median(length_ns[~ends_round])
        found.append(max(float(beyond_ns), 0.0) * 1e-9)
    return float(np.mean(found))


def as_recorded(run: Run) -> Grid | None:
    """Return the conditions under which several workers were measured, where they are known."""
    workers, rate_bps = run.facts.workers or 1, line_rate_bps(run)
    if workers < 2 or rate_bps is None:
        return None
    latency_s, where = run.facts.latency_s or 0.0, recorded_cluster(run)
    # A simulated run says its algorithm; one that needs a cluster can be asked only on one.
    algorithm = run.facts.algorithm or "ring"
    if where is None and algorithm not in with_formula("allreduce"):
        algorithm = "ring"
    return Grid(
        workers=(workers,),
        bandwidth_bps=(rate_bps,),
        buckets=(bucket_policy(run.facts.buckets or "ddp"),),
        latency_s=(latency_s,),
        algorithms=(algorithm,),
        cluster=where,
        local_steps=(local_steps_of(run),),
    )


def recorded_cluster(run: Run) -> Cluster | None:
    """Return the described cluster that a run was recorded on."""
    text = run.facts.cluster
    if text is None:
        return None
    from fullwire.clusters.description import described  # here: most runs have none

    return described(text, "the run's cluster")
