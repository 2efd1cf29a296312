"""Runs that differ only in how long they compute, as one: a job at many speeds of its computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fullwire.run.run import Whole
from fullwire.simulation.buckets import DdpBuckets, EachGradient
from fullwire.simulation.grid import Grid, Subject
from fullwire.simulation.step import Step
from fullwire.simulation.stragglers import AsRecorded, NoJitter


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StackedStep(Step):
    """Several steps of one job as one, which differ only in how long the job computes.

    Its times are arrays along the first axis of the points; the waiting has this axis alone.
    """

    steps: tuple[Step, ...]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> StackedStep:
        """Stack steps that have the same gradients and collectives."""
        first = steps[0]

        def stacked(name: str) -> Any:
            return np.array([getattr(step, name) for step in steps]).reshape(-1, 1, 1)

        passes = ("step_ns", "forward_ns", "backward_ns", "packing_ns")
        names = (*passes, "crowded_ns", "crowded_by_ranks_ns", "processor_ns")
        plain = {each.name: getattr(first, each.name) for each in fields(Step)}
        exposed_ns: Any = np.array([step.others.exposed_ns for step in steps]).reshape(-1, 1, 1)
        return cls(
            **plain
            | {name: stacked(name) for name in names}
            | {
                "waiting_ns": stacked("waiting_ns").reshape(-1),
                "others": replace(first.others, exposed_ns=exposed_ns),
                "steps": tuple(steps),
            }
        )

    @property
    def own_s(self) -> Any:
        """Return the ranks' own processor times, as an array."""
        return np.array([step.own_s for step in self.steps]).reshape(-1, 1, 1)

    @property
    def crowded_by_messages_s(self) -> Any:
        """Return the contention of each, as an array."""
        each_s = [step.crowded_by_messages_s for step in self.steps]
        return np.array(each_s).reshape(-1, 1, 1)

    def ready_after(self, places: Whole) -> Whole:
        """Return when the gradients at these places are ready: an axis for them, then the steps."""
        ready_ns = np.stack([step.ready_ns[places] for step in self.steps], axis=1)
        return ready_ns[..., None, None]


def stacks(subjects: Sequence[Subject], grid: Grid, most_points: int) -> list[slice]:
    """Return the runs that are computed at once: neighbours that differ in computing times alone.

    A job that computes at many speeds has a run for each, and then each array operation counts.
    """
    points = len(grid.bandwidth_bps) * len(grid.compressors)
    can_stack = (
        len(grid.workers) == 1
        and grid.lane == "fifo"
        and all(isinstance(policy, DdpBuckets | EachGradient) for policy in grid.buckets)
        and all(isinstance(jitter, AsRecorded | NoJitter) for jitter in grid.jitters)
    )
    most = most_points // points if can_stack else 1
    found: list[slice] = []
    before: tuple[Any, ...] = ()
    for number, subject in enumerate(subjects):
        now = beside_times(subject)
        if now and grid.own_workers and grid.cluster is not None:  # a size has routes of its own
            now = (*now, grid.own_workers[number])
        first = found[-1].start if found else 0
        if now and now == before and number - first < most:
            found[-1] = slice(first, number + 1)
        else:
            found.append(slice(number, number + 1))
        before = now
    return found


def beside_times(subject: Subject) -> tuple[Any, ...]:
    """Return all that a step's length follows from, but computing times; () if these decide more.

    Arrays and costs are compared as objects: a change of speed leaves them as they are.
    """
    step, others = subject.step, subject.step.others
    if others.are_gradients or others.waits_ns or not subject.has_parameters:
        return ()
    return (
        *map(id, (subject.adds, subject.placement, step.bytes, others.op, others.bytes)),
        id(others.members),
        others.backend,
        others.total_ns,
        others.rest_ns,
        others.sum_gradients,
        subject.exchange_factor,
        subject.meeting_factor,
        subject.residues,
        subject.ranks_per_host,
        subject.crowding,
        subject.fragments,
        subject.round_s,
        subject.recorded_rounds,
        step.lasting_share,
        step.shards,
        step.sent_share,
        step.sends_nothing,
        step.sums_amidst,
        step.shared_by,
        step.alone_off,
        step.own_s > 0,
    )
