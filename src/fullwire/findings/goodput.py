"""The findings about goodput: what a training loses to failures and checkpoints, and its cost."""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.findings.finding import Finding
from fullwire.run.run import Events
from fullwire.simulation.goodput import observed


class PublishedFailures(Finding):
    """The user gave no failures."""

    template = (
        "{usual:,.0f} device-hours between two failures, where published trainings had {low:,.0f} "
        "to {high:,.0f}"
    )
    is_assumption = True

    usual: float  # Device-hours.
    low: float
    high: float


class UsualStorage(Finding):
    """The user gave no rate of the storage."""

    template = "each node writes {node_bytes_per_s:bytes} a second of a checkpoint (--storage)"
    is_assumption = True

    node_bytes_per_s: float


class UsualRestart(Finding):
    """The user gave no time of a restart."""

    template = (
        "a restart takes {usual_s:duration}, {low_s:duration} to {high_s:duration} (--restart)"
    )
    is_assumption = True

    usual_s: float
    low_s: float
    high_s: float


class UsualHours(Finding):
    """The user asked for goodput and gave no hours of training."""

    template = "goodput is that of {hours:,.7g} hours of training (--hours)"
    is_assumption = True

    hours: float


class TrainingTakes(Finding):
    """The expected length of a training under failures, and its goodput."""

    template = (
        "{hours:,.7g} hours of training{cluster:? on {cluster}} take {wall_s:duration} "
        "({low_s:duration} {may_end:to {high_s:duration}|or more}): goodput {goodput:.1%} "
        "({goodput_low:.1%} to {goodput_high:.1%}).{may_end:| With the most failures that are "
        "likely, it may never end.}"
    )

    hours: float  # Without failures.
    cluster: str = ""  # If several are compared: the one that trains so long.
    wall_s: float
    low_s: float
    high_s: float
    may_end: bool = True  # Even where failures come as often as they may.
    goodput: float  # Share of the time that goes into steps that stay.
    goodput_low: float
    goodput_high: float


class TrainingNeverEnds(Finding):
    """A training that failures undo nearly as fast as it goes on."""

    template = (
        "{hours:,.7g} hours of training{cluster:? on {cluster}} may never end: with a failure each "
        "{between_s:duration}, less than {least:.1%} of the time goes into steps that stay."
    )

    hours: float  # Without failures.
    cluster: str = ""
    between_s: float
    least: float


class SameTraining(Finding):
    """The training whose length the table of networks has."""

    template = (
        "Same training: the steps that take {hours:,.7g} hours without failures with the best plan "
        "on {cluster}."
    )

    hours: float
    cluster: str


class Loss(Finding):
    """The time that a training loses for one reason."""

    template = "{reason} {lost_s:duration}"

    reason: str
    lost_s: float


class ExpectedLosses(Finding):
    """The losses of a training, by name."""

    template = "Expected losses: {losses:list}, in {interruptions:mean count} interruptions."

    losses: tuple[Loss, ...]
    interruptions: float


class BestCheckpoints(Finding):
    """The interval between checkpoints that loses the least."""

    template = (
        "Best interval between checkpoints: {interval_s:duration} of work. A checkpoint has "
        "{checkpoint_bytes:bytes}."
    )

    interval_s: float
    checkpoint_bytes: int


class DeviceHours(Finding):
    """The device-hours of a training, and their price."""

    template = "Device-hours: {device_hours:,.0f}.{cost:? Cost at your price: {cost}.}"

    device_hours: float
    cost: str  # With the user's currency.


class GoodputWas(Finding):
    """The share of the job's time that went into committed steps, and its losses by name."""

    template = (
        "Goodput {share:.1%} of {wall_s:time}: start {start_s:time}, checkpoints "
        "{checkpoint_s:time}, repeated work {repeated_s:time}, recovery {recovery_s:time} after "
        "{interruptions:,} {interruptions:loss|losses} of workers."
    )

    share: float
    wall_s: float
    start_s: float
    checkpoint_s: float
    repeated_s: float
    recovery_s: float
    interruptions: int


def about_goodput(events: Events) -> Iterator[Finding]:
    """Yield how much of an elastic job's time went into committed steps."""
    course = observed(events)
    if course is not None and course.wall_s > 0:
        yield GoodputWas(
            share=course.share,
            wall_s=course.wall_s,
            start_s=course.start_s,
            checkpoint_s=course.checkpoint_s,
            repeated_s=course.repeated_s,
            recovery_s=course.recovery_s,
            interruptions=int(course.interruptions),
        )


class GoodputWith(Finding):
    """The goodput that an elastic job would have, if it lost workers at another rate."""

    template = (
        "With a worker lost each {between_failures_s:time}: goodput {goodput:.1%} ({low:.1%} to "
        "{high:.1%}). A loss costs {lost_s:time}, as {failures:,} {failures:loss|losses} of this "
        "job did, and checkpoints {checkpoint_share:.1%} of the work."
    )

    between_failures_s: float
    goodput: float
    low: float
    high: float
    lost_s: float
    checkpoint_share: float
    failures: int
