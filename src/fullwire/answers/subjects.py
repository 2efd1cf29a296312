"""Runs and conditions, prepared for predictions.

Runs are opened and named, with the transport that they show. Conditions become a grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fullwire.answers.conditions import (
    OneOrMany,
    compressors,
    is_scattered,
    latency,
    rate,
    several,
    worker_count,
)
from fullwire.answers.opening import (
    Opened,
    RunLike,
    completed,
    many,
    name_of_run,
    with_line_rate,
    with_own_time,
)
from fullwire.clusters import ClusterLike, cluster
from fullwire.clusters.cluster import Cluster, with_nodes
from fullwire.collectives.library import has_tables
from fullwire.collectives.registry import usual_algorithm
from fullwire.collectives.tuning import LIBRARY
from fullwire.collectives.usual import with_usual_startup
from fullwire.compression.codec import costs_in
from fullwire.compression.compressor import Compressor
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import name_of
from fullwire.run.gaps import reasons
from fullwire.run.placement import UNKNOWN_PLACEMENT, shares_one_host
from fullwire.run.run import Run
from fullwire.run.usual import Alone, local_steps_of
from fullwire.simulation.as_recorded import with_alone, with_residue
from fullwire.simulation.buckets import bucket_policy
from fullwire.simulation.calibrate import Calibration, calibrated, line_rate_bps
from fullwire.simulation.forecast import unmeasured_transport
from fullwire.simulation.grid import MOST_APART, Grid, Subject, lane_order
from fullwire.simulation.of_kinds import by_kinds
from fullwire.simulation.schedule import sent_in_buckets
from fullwire.simulation.stragglers import jitter
from fullwire.simulation.subject import plain_subject, recorded_cluster
from fullwire.simulation.transport import FullTransport, TableTransport, Transport, full_transport
from fullwire.simulation.typical import Sending
from fullwire.timeline.alone import alone_by_account, beside_computing_s
from fullwire.timeline.passes import passes_in_gradients, passes_of_step
from fullwire.timeline.timeline import check_collectives
from fullwire.timeline.utilization import sent_unseen
from fullwire.units import bits_per_second, count, show_time, shown
from fullwire.workloads import MOST_SAMPLES

# The default conditions, if the user and the run give none: sizes and speeds on sale.
USUAL_WORKERS = (2, 4, 8, 16, 32, 64)
USUAL_BANDWIDTHS = ("1Gbps", "10Gbps", "25Gbps", "100Gbps", "400Gbps")
_RATE_UNKNOWN = "the line rate of its links is not known"


def named(
    runs: RunLike | Sequence[RunLike], line_rate: str | float | None = None
) -> list[tuple[str, Run]]:
    """Open runs, each with the name that it was given, or else its source.

    `line_rate` is the rate of their links, for runs that lack it.
    """
    asked = many(runs)
    if not asked:
        raise UsageError("whatif: expected at least one run, got none")
    found = []
    for wanted in asked:  # A run in memory has its source as its name.
        run = with_own_time(completed(wanted, line_rate))
        check_collectives(run)
        found.append((name_of_run(wanted, run), run))
    if len({name for name, _ in found}) < len(found):
        return [(f"{name} ({number})", run) for number, (name, run) in enumerate(found, 1)]
    return found


def with_batches(
    runs: RunLike | Sequence[RunLike], batch: OneOrMany
) -> RunLike | Sequence[RunLike]:
    """Return built-in workloads with each of these batches; a recorded run has its own."""
    if batch is None:
        return runs
    sizes = several(batch, lambda value: count(value, "batch", MOST_SAMPLES))
    given = [runs] if isinstance(runs, str | Path | Run | Opened) else list(runs)
    for run in given:
        if not isinstance(run, str) or "@" not in run or ":" in run or Path(run).exists():
            raise UsageError(
                "batch: expected built-in workloads such as vgg16@v100, "
                f"got {shown(name_of(run) if isinstance(run, str | Path) else 'a run')}"
            )
    return [f"{name}:{size}" for name in given for size in sizes]


class Transports:
    """The transports of a question, by their names."""

    def __init__(
        self,
        runs: Sequence[Run],
        calibrate: RunLike | Sequence[RunLike],
        names: tuple[str, ...] = (),
        line_rate: str | float | None = None,
    ) -> None:
        calibrating = named(calibrate) if calibrate else []
        others = [run for _, run in calibrating]
        if line_rate is not None:  # Of the same cluster; where links differ, runs know theirs.
            rate_bps = bits_per_second(line_rate, "line rate")
            others = [with_line_rate(run, rate_bps) for run in others]
        check_calibrating(others)
        self._runs = [*runs, *others]
        self._names = names or tuple(run.provenance.source for run in runs)
        self._names += tuple(name for name, _ in calibrating)

    @cached_property
    def _showing(self) -> dict[str | None, list[Run]]:
        """The runs that show their transport, by backend."""
        showing: dict[str | None, list[Run]] = {}
        for run in self._runs:
            if _shows_no_transport(run) is None:
                showing.setdefault(run.facts.backend, []).append(run)
        return showing

    @cached_property
    def _fits(self) -> dict[str | None, Calibration | None]:
        return {backend: _fit(runs) for backend, runs in self._showing.items()}

    @property
    def calibration(self) -> Calibration | None:
        """Return what the runs show of their transport, if they show one, and the same."""
        [fit, *others] = self._fits.values() or [None]
        return None if others else fit

    def of(self, run: Run) -> Calibration | None:
        """Return what a run shows of its transport, and others on its backend.

        Each answer rests on it, as it tells how much of a step is contention.
        """
        return self._fits.get(run.facts.backend, self.calibration)

    def named(self, text: str) -> Transport:
        """Return a transport by its name."""
        if text != "measured" and Path(text).is_file():
            from fullwire.importers import tables

            of_file = tables(text)
            fitting = [rows for rows in of_file if rows.op == "allreduce"]
            if len(fitting) != 1:
                names = ", ".join(
                    f"{rows.op or 'an unnamed one'} of {rows.workers} ranks" for rows in of_file
                )
                raise UsageError(
                    f"{text}: expected one table of allreduce, and its tables are: {names}"
                )
            [table] = fitting
            table.refuse_damage(Path(text))
            if table.workers == 1 and not any(row.bus_gb_s for row in table.rows):
                raise UsageError(
                    f"{text}: expected a table of several ranks: one alone sends nothing"
                )
            return TableTransport(name=Path(text).name, points=table.points())
        if text != "measured":
            return full_transport(text)
        why = [_shows_no_transport(run) for run in self._runs]
        if None not in why:
            pairs = zip(self._names, why, strict=True)
            told = "; ".join(f"{name}: {reason}" for name, reason in pairs)
            give = "give it with --line-rate, " if _RATE_UNKNOWN in why else ""
            raise UsageError(
                f"{told}. So nothing is known about the transport: {give}name a run on links "
                "of a known rate with --calibrate, or ask for --transport full"
            )
        if len(self._showing) > 1:
            told = ", ".join(
                f"{name} has {run.facts.backend}"
                for name, run in zip(self._names, self._runs, strict=True)
            )
            raise UsageError(
                f"transport measured: expected runs on one backend, got several: {told}. Ask about "
                "the runs of each backend by themselves"
            )
        return (self.calibration or calibrated(self._runs)).transport


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Conditions:
    """The conditions of a prediction or of a replay, as people give them."""

    bandwidth: OneOrMany = None
    workers: OneOrMany = None
    compression: OneOrMany = None
    codec: OneOrMany = None
    codec_costs: str | Path | None = None
    transport: OneOrMany = "full"
    buckets: OneOrMany = None
    algorithm: OneOrMany = None
    latency: OneOrMany = None
    cluster: ClusterLike | None = None
    nodes: OneOrMany = None
    placement: str = "packed"
    accumulate: OneOrMany = 1
    local_steps: OneOrMany = None
    jitter: OneOrMany = "recorded"
    lane: str = "fifo"

    def grid(self, runs: Sequence[Run], known: Transports) -> Grid:
        """Read them; those that were left out are as recorded, or else usual."""
        if self.cluster is None:  # The one on which all runs were recorded, if it is the same.
            recorded = {recorded_cluster(run) for run in runs}
            chosen = recorded.pop() if len(recorded) == 1 else None
        else:
            chosen = cluster(self.cluster)
        transports = several(self.transport, lambda text: known.named(str(text)))
        stated = chosen
        # A measured transport has its own start-up.
        if self.cluster is not None and all(
            isinstance(transport, FullTransport) for transport in transports
        ):
            chosen = with_usual_startup(cluster(self.cluster))
        recorded_workers = _recorded(runs, "workers", None)
        if recorded_workers == 1:  # A profile of one worker: the question is how it will scale.
            recorded_workers = None
        usual_workers = _first(recorded_workers, USUAL_WORKERS)
        usual_rates, usual_latency, usual = None, None, "ring"
        if chosen is not None:
            has_one_ring = all(run.facts.backend in ("gloo", "fullwire") for run in runs)
            usual = "ring" if has_one_ring else usual_algorithm("allreduce", chosen)
            is_full = all(isinstance(transport, FullTransport) for transport in transports)
            apart = is_scattered(chosen, self.placement)
            if is_full and not has_one_ring and has_tables(chosen, is_scattered=apart):
                usual = LIBRARY
            usual_workers = chosen.devices
            usual_rates, usual_latency = chosen.nics.rate_bps, chosen.nics.latency_s
        rates = (usual_rates, _recorded(runs, "line_rate_bps", None), USUAL_BANDWIDTHS)
        latencies = (usual_latency, _recorded(runs, "latency_s", 0.0))
        usual_steps = {local_steps_of(run) for run in runs}
        devices = self._devices(chosen)
        was = _recorded(runs, "algorithm", usual)  # a fitted cluster's, where it is the library's
        return Grid(
            workers=several(_first(self.workers, devices, usual_workers), worker_count),
            bandwidth_bps=several(_first(self.bandwidth, *rates), rate),
            compressors=self._compressors(runs),
            transports=transports,
            buckets=several(
                _first(self.buckets, _recorded(runs, "buckets", "ddp")),
                lambda text: bucket_policy(str(text)),
            ),
            are_buckets_asked=self.buckets is not None,
            algorithms=several(_first(self.algorithm, was if was != LIBRARY else usual), str),
            latency_s=several(_first(self.latency, *latencies), latency),
            accumulate=several(
                self.accumulate, lambda value: count(value, "accumulate", MOST_APART)
            ),
            local_steps=several(
                _first(self.local_steps, usual_steps.pop() if len(usual_steps) == 1 else 1),
                lambda value: count(value, "local steps", MOST_APART),
            ),
            jitters=several(self.jitter, lambda text: jitter(str(text))),
            lane=lane_order(self.lane),
            cluster=chosen,
            is_startup_usual=chosen != stated,
            is_scattered=is_scattered(chosen, self.placement),
        )

    def _devices(self, cluster: Cluster | None) -> list[int] | None:
        """Return the devices of so many nodes, if nodes were given."""
        if self.nodes is None:
            return None
        if cluster is None:
            raise UsageError(
                "nodes: expected a described cluster with them: --cluster FILE or a name"
            )
        if self.workers is not None:
            raise UsageError("nodes: expected nodes or workers, got both")
        counts = several(self.nodes, lambda text: count(text, "nodes"))
        return [with_nodes(cluster, nodes).devices for nodes in counts]

    def _compressors(self, runs: Sequence[Run]) -> tuple[Compressor, ...]:
        # Gradients are on a GPU with NCCL; every device of the built-in workloads is one.
        is_on_gpu = all(
            run.facts.backend == "nccl" or run.provenance.basis == "modelled" for run in runs
        )
        return compressors(
            self.compression,
            self.codec,
            on_gpu=is_on_gpu,
            models=[gradient_bytes(run) for run in runs] if self.compression is not None else (),
            costs=None if self.codec_costs is None else costs_in(Path(self.codec_costs)),
        )


def _fit(runs: Sequence[Run]) -> Calibration | None:
    """Fit a transport to runs, if any takes such times."""
    try:
        return calibrated(runs)
    except UsageError:  # a question for the measured transport says it, and others need no fit
        return None


def check_calibrating(runs: Sequence[Run], asked: Run | None = None) -> None:
    """Refuse a run that was given to calibrate and would go unused with any line rate.

    A run on another backend than the asked one shows another transport.
    """
    for run in runs:
        if (why := _shows_no_transport(run)) not in (None, _RATE_UNKNOWN):
            name = run.place
            raise UsageError(f"calibrate: expected runs that show their transport: {name}: {why}")
        if asked is not None and run.facts.backend != asked.facts.backend:
            raise UsageError(
                f"calibrate: expected runs on {asked.facts.backend}, as {asked.place}: "
                f"{run.place} is on {run.facts.backend}"
            )


def _shows_no_transport(run: Run) -> str | None:
    """Return why a run hides its transport; None if it may show it."""
    if (run.facts.workers or 1) < 2:
        return "it had one worker"
    if shares_one_host(run):
        return "its ranks share one host, and use no link"
    if line_rate_bps(run) is None:
        return _RATE_UNKNOWN
    if not len(run.collectives):
        lost = reasons(run.gaps, ("collectives",))
        return f"its collectives are missing: {lost[0]}" if lost else "it has no collectives"
    if not (run.collectives.step >= 0).any():
        return "none of its collectives is in a step"
    [first, *others] = sorted(set(run.collectives.rank.tolist()))
    if not others:  # when a collective could begin, the rank that came last tells
        return f"of its {run.facts.workers} ranks, only the collectives of rank {first} are here"
    return None


def refuse_unseen(name: str, run: Run) -> None:
    """Refuse to predict from a run whose hosts sent mostly collectives that were not seen."""
    if (unseen := sent_unseen(run)) is not None:
        raise DamagedInput(
            name, f"nothing is predicted from a part of its traffic: {unseen.reason}"
        )


def subject_of(name: str, run: Run, transports: Transports) -> Subject:
    """Return a run's typical step, with the time that the measured transport leaves unexplained."""
    refuse_unseen(name, run)
    known, alone = transports.of(run), alone_by_account(run)
    input_s, host_s = beside_computing_s(run)
    transport, placement = (
        (unmeasured_transport(run), UNKNOWN_PLACEMENT)
        if known is None
        else (known.transport, known.placement)
    )

    def make(steps: Run, own: Alone | None, sends: Sending) -> Subject:
        subject = plain_subject(name, steps, placement, sends)
        if own is not None:
            subject = with_alone(subject, own, transport)
        elif input_s or host_s:
            subject = replace(subject, step=subject.step.with_parts(input_s, host_s))
        return subject if known is None else with_residue(subject, transport)

    subject = by_kinds(run, make, alone)
    refuse_without_own_step(name, subject)
    return subject


def refuse_without_own_step(name: str, subject: Subject) -> None:
    """Refuse to predict from ranks whose steps have no time of computing in common."""
    step = subject.step
    is_short = step.alone_ns <= 0 < (step.measured_ns or 0)
    if step.is_estimated and is_short and step.others.exposed_ns > 0:
        exposed = show_time(step.others.exposed_ns * 1e-9)
        raise UsageError(
            f"{name}: its ranks' steps are too unlike to predict from: one rank waits {exposed} "
            "for its collectives in a usual step, which is as long as a whole step of another "
            "rank. Record more steps, without other programs on the processors"
        )


def subjects_of(
    many: Sequence[tuple[str, Run]], transports: Transports, grid: Grid
) -> list[Subject]:
    """Return the subject of each run, and refuse conditions of sums for a run that has none."""
    subjects: list[Subject] = []
    for name, run in many:
        # A modelled step has one pass. To count passes imports what its prediction needs not.
        is_modelled = run.provenance.basis == "modelled"
        passes = 1 if is_modelled else passes_of_step(run) or 1
        subjects.append(replace(subject_of(name, run, transports), passes=passes))
        _refuse_split_groups(subjects[-1], run.facts.workers or 1, grid.workers)
    for (_, run), subject in zip(many, subjects, strict=True):
        are_asked = {
            "buckets": grid.are_buckets_asked,
            "compression": not all(codec.is_none for codec in grid.compressors),
            "accumulate": max(grid.accumulate) > 1,
            "local steps": max(grid.local_steps) > local_steps_of(run),
            "lane": grid.lane != "fifo",
        }
        asked = [name for name, is_asked in are_asked.items() if is_asked]
        if asked and subject.sends_no_buckets:
            expected, found = (
                ("collectives sum its gradients", "sum fewer bytes than its gradients have")
                if subject.keeps_gradients
                else ("gradients go in buckets", "sum them in other ways, as shards are summed")
            )
            raise UsageError(
                f"{', '.join(asked)}: expected a run whose {expected}, and the collectives of "
                f"{subject.name} {found}. Leave {'it' if len(asked) == 1 else 'them'} out"
            )
    return subjects


def _refuse_split_groups(subject: Subject, recorded: int, workers: Sequence[int]) -> None:
    """Refuse numbers of workers that do not fill the groups of ranks which a model is split over.

    One worker stands for T1. Groups that do not divide the recorded ranks either split no model.
    """
    ranks = max(subject.step.shards, 1)
    for members in subject.step.others.members:
        if members > 0 and recorded % members == 0:
            ranks = math.lcm(ranks, members)
    for count_of_all in workers:
        if count_of_all > 1 and count_of_all % ranks:
            raise UsageError(
                f"workers: expected a multiple of {ranks} for {subject.name}, whose model is split "
                f"over groups of ranks, got {count_of_all:,}"
            )


def in_asked_buckets(subjects: Sequence[Subject], grid: Grid) -> list[Subject]:
    """Return the subjects with sums by hand in buckets, if buckets were asked for."""
    return [
        each.with_new_step(sent_in_buckets)
        if grid.are_buckets_asked and each.sums_by_hand
        else each
        for each in subjects
    ]


def gradient_bytes(run: Run) -> list[int]:
    """Return the bytes of the gradients in the last pass of one step of one rank."""
    rows = run.gradients
    if not len(rows):
        return []
    first = rows.rows((rows.rank == rows.rank[0]) & (rows.step == rows.step[0]))
    sizes: list[int] = first.bytes.tolist()
    return sizes[len(sizes) - len(sizes) // passes_in_gradients(run) :]


def _first(*choices: OneOrMany) -> OneOrMany:
    return next(choice for choice in choices if choice is not None)


def _recorded(runs: Sequence[Run], fact: str, otherwise: OneOrMany) -> OneOrMany:
    """Return the fact if all runs hold the same value of it."""
    values = {run.facts.known().get(fact) for run in runs}
    [value, *others] = values
    return otherwise if others or value is None else value
