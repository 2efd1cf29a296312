"""How long a training takes with failures, checkpoints and restarts.

Failures come at random, at a constant rate (Daly 2006). A failure loses the work since the last
checkpoint, then the time to restart. The expected time of a stretch of work and its checkpoint is
`M exp(R/M) (exp((T + C)/M) - 1)`, with M between failures, R to restart, T of work and C of the
checkpoint. `best_interval_s` is the T for which the whole takes the least.

An asynchronous checkpoint stops the training only while states are copied to the host. It still has
to be written before the next one, so the interval is no shorter than that. A failure while it is
written also loses the stretch before it. So after a failure, the job has to get through R, T + C
and the time L that writing goes on: the expected time is `exp(L/M)` times as long, for all
stretches but one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fullwire.errors import UsageError
from fullwire.run.centre import NORMAL_90
from fullwire.run.run import Events

# Device-hours between interruptions of published trainings: OPT-175B 15,300, RSC-1 29,500, Llama 3
# 50,700, BLOOM 64,500. The middle is their geometric mean.
PUBLISHED_DEVICE_HOURS = (15_300.0, 35_000.0, 64_500.0)
# From a failure to the next step, without reading the checkpoint. MegaScale found and diagnosed
# failures in less than 10 minutes; by hand it takes half an hour.
USUAL_RESTART_S = (180.0, 600.0, 1800.0)
CHECKPOINT_BYTES = 14  # of a parameter: bf16, and float32 of weight and moments (BLOOM)
NODE_BYTES_PER_S = 1e9  # BLOOM wrote 1.2 GB/s a node, Llama 3 1 GB/s
_TO_HOST_BYTES_PER_S = 20e9  # of each device, over PCIe


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Failures, and what keeps a training from starting over."""

    device_hours: float  # between two interruptions
    restart_s: float
    checkpoint_bytes: float
    storage_bytes_per_s: float
    is_asynchronous: bool = True
    start_s: float = 600.0  # before the first step

    def __post_init__(self) -> None:
        for name in ("device_hours", "checkpoint_bytes", "storage_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}: expected above 0, got {getattr(self, name):g}")
        if self.restart_s < 0:
            raise UsageError(f"restart: expected 0 s or more, got {self.restart_s:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The expected wall time of a training, and its losses by name. Losses and work add up."""

    wall_s: float
    work_s: float
    start_s: float
    checkpoint_s: float
    repeated_s: float
    recovery_s: float
    interruptions: float
    interval_s: float  # of work between two checkpoints

    @property
    def share(self) -> float:
        """Return the goodput: time of committed steps over wall time."""
        return self.work_s / self.wall_s

    @property
    def losses_s(self) -> dict[str, float]:
        """Return the losses by name, as data."""
        return {
            "start_s": self.start_s,
            "checkpoint_s": self.checkpoint_s,
            "repeated_work_s": self.repeated_s,
            "recovery_s": self.recovery_s,
        }


def _of_the_job(events: Events) -> list[tuple[int, str, int]]:
    """Return time, kind and length of what a job told, in order: faults of a lab are no losses."""
    columns = events.time_ns, events.kind, events.duration_ns
    rows = sorted(zip(*(column.tolist() for column in columns), strict=True))
    return [row for row in rows if not row[1].startswith("fault:")]


def observed(events: Events) -> Goodput | None:
    """Return the course of a job that told its events; None without them.

    A second start throws away the work since the last checkpoint.
    """
    rows = _of_the_job(events)
    if not any(kind == "start" for _, kind, _ in rows):
        return None
    lost_ns = dict.fromkeys(("start", "checkpoint", "repeated work", "recovery", "join"), 0)
    kept_ns = began_ns = rows[0][0]
    ended_ns, since = began_ns, 0  # losses since `kept_ns`
    checkpoints, interruptions = 0, 0
    for time_ns, kind, duration_ns in rows:
        is_again = kind == "start" and time_ns > began_ns
        if is_again:
            lost_ns["repeated work"] += max(time_ns - kept_ns - since, 0)
        interruptions += is_again or kind == "recovery"
        if kind in lost_ns:
            lost_ns["recovery" if is_again else kind] += duration_ns
            since += duration_ns
        if kind in ("start", "checkpoint"):
            kept_ns, since = time_ns + duration_ns, 0
            checkpoints += kind == "checkpoint"
        ended_ns = max(ended_ns, time_ns + duration_ns)
    wall_s, lost_s = (ended_ns - began_ns) * 1e-9, {k: v * 1e-9 for k, v in lost_ns.items()}
    work_s = max(wall_s - sum(lost_s.values()), 0.0)
    return Goodput(
        wall_s=wall_s,
        work_s=work_s,
        start_s=lost_s["start"],
        checkpoint_s=lost_s["checkpoint"],
        repeated_s=lost_s["repeated work"],
        recovery_s=lost_s["recovery"] + lost_s["join"],
        interruptions=interruptions,
        interval_s=work_s / max(checkpoints, 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """An event of an elastic job: a loss of time by its name, or a fault that a lab made."""

    kind: str
    at_s: float
    lasts_s: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Who took part in an elastic job, from the start of its processes on."""

    length_s: float
    present_s: dict[int, list[tuple[float, float]]]  # by worker: from, until
    events: tuple[Happened, ...]


def membership(events: Events) -> Membership | None:
    """Return who took part when; None for a job that told no start of elastic workers."""
    columns = events.time_ns, events.duration_ns, events.kind, events.ranks
    rows = sorted(zip(*(column.tolist() for column in columns), strict=True))
    starts_ns = [time_ns for time_ns, _, kind, _ in rows if kind == "start"]
    if not starts_ns:
        return None
    happened: list[Happened] = []
    present_s: dict[int, list[tuple[float, float]]] = {}
    since_s: dict[int, float] = {}  # of those that take part
    last_ns = max(time_ns + lasts_ns for time_ns, _, lasts_ns in _of_the_job(events))
    length_s = (last_ns - starts_ns[0]) * 1e-9

    def leave(ranks: Iterable[int], at_s: float) -> None:
        for rank in ranks:
            if rank in since_s:
                present_s.setdefault(rank, []).append((since_s.pop(rank), at_s))

    for time_ns, lasts_ns, kind, text in rows:
        at_s, lasts_s = (time_ns - starts_ns[0]) * 1e-9, lasts_ns * 1e-9
        ranks = tuple(int(rank) for rank in text.split(",") if rank)
        happened.append(Happened(kind=kind, at_s=at_s, lasts_s=lasts_s, ranks=ranks))
        if kind == "start":
            leave(list(since_s), at_s)
        elif kind == "recovery":
            leave(ranks, at_s)
        if kind in ("start", "join"):
            since_s |= {rank: at_s + lasts_s for rank in ranks if rank not in since_s}
    leave(list(since_s), length_s)
    return Membership(
        length_s=length_s, present_s=dict(sorted(present_s.items())), events=tuple(happened)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticGoodput:
    """The goodput of an elastic job that loses a worker at another rate than it did."""

    between_failures_s: float
    goodput: float
    low: float
    high: float
    lost_s: float  # for each failure: repeated work, recovery, and letting the new worker in
    checkpoint_share: float  # of the work
    failures: int  # that this rests on


_MOST_SPREAD = 0.5  # of what a failure costs, where the run saw one alone


def with_failures(events: Events, between_s: float) -> ElasticGoodput | None:
    """Return the goodput with a failure each so often; None for a job that lost no worker.

    Each failure costs what those of the job cost in the mean, and the rest of the time goes into
    steps and checkpoints. The start is left out: it is no matter of failures.
    """
    course = observed(events)
    losses_s: list[float] = []
    repeated_s = joined_s = 0.0
    for _, kind, lasted_ns in _of_the_job(events):
        if kind == "repeated work":
            repeated_s = lasted_ns * 1e-9
        elif kind == "recovery":
            losses_s.append(repeated_s + lasted_ns * 1e-9)
            repeated_s = 0.0
        elif kind == "join":
            joined_s += repeated_s + lasted_ns * 1e-9
            repeated_s = 0.0
    if course is None or not losses_s:
        return None
    count = len(losses_s)
    mean_s = sum(losses_s) / count
    spread_s = _MOST_SPREAD * mean_s
    if count > 1:
        variance = sum((each - mean_s) ** 2 for each in losses_s) / (count - 1)
        spread_s = NORMAL_90 * math.sqrt(variance / count)
    checkpoint_share = course.checkpoint_s / course.work_s if course.work_s else 0.0

    def share(lost_s: float) -> float:
        return max(1 - (lost_s + joined_s / count) / between_s, 0.0) / (1 + checkpoint_share)

    return ElasticGoodput(
        between_failures_s=between_s,
        goodput=share(mean_s),
        low=share(mean_s + spread_s),
        high=share(max(mean_s - spread_s, 0.0)),
        lost_s=mean_s + joined_s / count,
        checkpoint_share=checkpoint_share,
        failures=count,
    )


def goodput(work_s: float, devices: int, given: Reliability) -> Goodput:
    """Return the expected course of a training of so much undisturbed work."""
    between_s = given.device_hours * 3600 / devices
    written_s = given.checkpoint_bytes / given.storage_bytes_per_s
    stopped_s = written_s
    if given.is_asynchronous:
        copied_s = given.checkpoint_bytes / (devices * _TO_HOST_BYTES_PER_S)
        stopped_s = min(written_s, copied_s)
    back_s = given.restart_s + written_s  # the checkpoint is read again
    interval_s = best_interval_s(between_s, stopped_s, written_s if given.is_asynchronous else 0.0)
    interval_s = min(interval_s, work_s)
    stretches = work_s / interval_s
    # A checkpoint counts once it is written, which an asynchronous one is in the next stretch.
    late_s = written_s - stopped_s if given.is_asynchronous else 0.0
    failures_rate = 1 / between_s
    exposed_s = interval_s + stopped_s
    if (exposed_s + late_s + back_s) * failures_rate > 500:
        raise UsageError(
            f"failures: expected longer between two of them than a restart of {back_s:,.0f} s "
            f"and a checkpoint take, got one in {between_s:,.0f} s on {devices:,} devices"
        )
    # From one written checkpoint to the next takes `exposed_s` without a failure. After a failure
    # the next one is written only `late_s` after so much work. The first stretch starts without
    # a checkpoint, and the last one waits for none: together they count `late_s` once.
    late_stretches = 1 + (stretches - 1) * math.exp(late_s * failures_rate)
    failures = late_stretches * math.expm1(exposed_s * failures_rate)
    wall_s = given.start_s + between_s * math.exp(back_s * failures_rate) * failures
    checkpoint_s = stretches * stopped_s
    recovery_s = between_s * math.expm1(back_s * failures_rate) * failures
    repeated_s = wall_s - given.start_s - work_s - checkpoint_s - recovery_s
    return Goodput(
        wall_s=wall_s,
        work_s=work_s,
        start_s=given.start_s,
        checkpoint_s=checkpoint_s,
        repeated_s=max(repeated_s, 0.0),
        recovery_s=recovery_s,
        # Failures strike during restarts and repeated work, too: at one rate after the start.
        interruptions=(wall_s - given.start_s) / between_s,
        interval_s=interval_s,
    )


def best_interval_s(between_s: float, stopped_s: float, least_s: float = 0.0) -> float:
    """Return the work between two checkpoints for which the training takes the least time."""
    least_s = max(least_s, 1.0)
    most_s = max(20 * between_s, 2 * least_s)
    intervals_s = np.geomspace(least_s, most_s, 2000)
    exposed = np.minimum((intervals_s + stopped_s) / between_s, 700)
    return float(intervals_s[np.argmin(np.expm1(exposed) / intervals_s)])
