"""The findings of predictions: what is predicted, and how sure that is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.collectives.tuning import AUTO
from fullwire.compression.codec import named_in
from fullwire.findings.finding import Finding
from fullwire.findings.kinds_of_steps import too_few_of_a_kind
from fullwire.findings.sureness import (
    PassesMayNotShareASum,
    StepCountsAsPass,
    about_contention,
    about_evidence,
    about_links,
    about_others,
    about_rounds,
)
from fullwire.run.kinds import kinds_of, usual_step_s
from fullwire.run.placement import Placement, sums_on_processors
from fullwire.run.run import Run
from fullwire.run.usual import local_steps_of
from fullwire.simulation.buckets import EachGradient
from fullwire.simulation.conditions import CONDITIONS
from fullwire.simulation.grid import Grid, Predictions, Subject, tried
from fullwire.simulation.interval import Further, ends_of_nics, rests_on_least
from fullwire.simulation.on_links import OnLinks
from fullwire.simulation.transport import MeasuredTransport
from fullwire.timeline.passes import passes_add_up, passes_of_step
from fullwire.timeline.transfers import recorded_ranks, stands_for_all, world
from fullwire.units import show_rate
from fullwire.workloads import workload

NOTABLE = 0.01  # Of the step: a smaller difference of two steps is left out.
KEPT = 0.05  # Of the step: less contention is left out.


class Modelled(Finding):
    """Some runs have times from a model of a device."""

    is_assumption = True
    template = (
        "{names:list} {names:is|are} modelled, not measured: operations on one {device} with "
        "{efficiency}."
    )

    names: tuple[str, ...]
    device: str
    efficiency: str


class EstimatedFromSeveral(Finding):
    """T1 is estimated from a job of several workers."""

    template = "{run}: T1, the step of one worker, is estimated from a job of several workers."

    run: str


class WholeStepsAreReplayed(Finding):
    """Predictions replay other steps than explain accounts for."""

    template = (
        "{run}: predictions replay steps that are whole on every rank, {replayed_s:time}. The step "
        "that explain accounts for takes {usual_s:time}."
    )

    run: str
    replayed_s: float
    usual_s: float


class OfRun(Finding):
    """A finding about one run among several."""

    template = "{run}: {what}"

    run: str
    what: Finding


class SummedInGroups(Finding):
    """Gradients are summed by groups of ranks, which grow with the number of workers."""

    template = (
        "{run}: groups of one in {shards} ranks sum gradients. With more workers these groups "
        "grow, and other groups keep their size."
    )

    run: str
    shards: int


class SumsGoInBuckets(Finding):
    """A script sums gradients itself, and buckets were asked for."""

    is_assumption = True
    template = (
        "{run}: its script sums gradients itself, after the backward pass. With the buckets asked "
        "for, predictions send them during the backward pass, as DistributedDataParallel does."
    )

    run: str


class SumsAreOfMore(Finding):
    """A script sums more than gradients, and buckets of gradients were asked for."""

    is_assumption = True
    template = (
        "{run}: its script sums many more bytes than its gradients have. Predictions keep these "
        "sums as recorded: buckets of gradients do not apply."
    )

    run: str


class SumsTakenForGradients(Finding):
    """A script sums more than gradients, and a condition that changes those of gradients varies."""

    is_assumption = True
    template = (
        "{run}: its script sums many more bytes than its gradients have. With {asked:list}, "
        "predictions change all of these sums, though some may have to stay as they are."
    )

    run: str
    asked: tuple[str, ...]


class GradientsTakenEvenly(Finding):
    """The gradients of a run's buckets are unknown, and other buckets were asked for."""

    template = (
        "{run}: the trace shows buckets, and not the gradients in them. Predictions of other "
        "buckets take the gradients to become ready at a steady pace. Their intervals reach to "
        "gradients that become ready with the last one of their bucket."
    )
    is_assumption = True

    run: str


class GradientsStayLocal(Finding):
    """No collective sums the gradients, as where layers or experts are split over ranks."""

    is_assumption = True
    template = (
        "{run}: its collectives sum fewer bytes than its gradients have. Predictions send these "
        "collectives and nothing else: buckets and algorithms of sums do not apply."
    )

    run: str


class NamedRunIsPartial(Finding):
    """Some data of a run is missing."""

    template = "{run} is partial: {what}."

    run: str
    what: str


class OthersMayBeLater(Finding):
    """Ranks that were not recorded may be later than the recorded ones."""

    is_assumption = True
    template = (
        "{run}: some ranks were not recorded. If they are later than the others, every step is "
        "longer than predicted."
    )

    run: str


class BeyondTheLine(Finding):
    """Above some line rate, the processors limit a measured transport, not the line."""

    template = (
        "From {rate_bps:rate} on, the processors limit this transport "
        "({workers:,} {workers:worker|workers}). "
        "Faster processors or another transport help there, faster links hardly."
    )

    workers: int
    rate_bps: float


class MoreHostsAlike(Finding):
    """The hosts on which a larger job's ranks are supposed to run."""

    is_assumption = True
    template = (
        "More workers are more hosts like the recorded {at.machines:one|ones}{runs:? of {runs:and}}"
        ", each with {at.ranks_of_each:.3g} {at.ranks_of_each:rank|ranks}{at.are_means:? in the "
        "mean}{at.are_unequal:? as the fullest of them}{at.processors:? on "
        "{at.processors} {at.processors:processor|processors}}. --ranks-per-host changes that."
    )

    at: Placement
    runs: tuple[str, ...] = ()  # Where others were recorded elsewhere.


class RanksDriftApart(Finding):
    """Closed forms are inexact here, and the cluster is too large to be played."""

    is_assumption = True
    template = (
        "{algorithms:list}: ranks of {cluster} drift apart. {workers:,} workers are too many to "
        "play, so these predictions may be off by a third. fullwire collective --cluster plays "
        "one collective."
    )

    algorithms: tuple[str, ...]
    workers: int
    cluster: str


class LinksInNodesMayBeFaster(Finding):
    """The rate within a node comes from tables of several nodes, and may be higher."""

    template = (
        "The rate of the links within a node of {cluster} is only known to be reached, because no "
        "table is of one node. They may be much faster, and steps shorter. Intervals reach down to "
        "the fastest known. Fit a table of one node, or state inside.rate."
    )

    cluster: str


class NicsOfClusterAreOpen(Finding):
    """Tables of a fit leave open how fast or how many the NICs are."""

    template = (
        "The tables of {cluster} tell too little of its NICs for {workers:list} workers: their "
        "rate, or their number in a node that is not full. Intervals, where there are any, hold "
        "what may be. Fit a table of two nodes or more, or fit these with --cluster FILE that "
        "states nics.rate and nics.per_node."
    )

    cluster: str
    workers: tuple[int, ...]


class UsualStartup(Finding):
    """The description of a cluster states no start-up of its collectives."""

    is_assumption = True
    template = (
        "{cluster} states no start-up: each collective takes {startup_s:time} more, the median of "
        "public tables of GPU nodes. Its file may state another (startup), or fullwire cluster fit."
    )

    cluster: str
    startup_s: float


class CodecCost(Finding):
    """The cost of a codec was not measured on this kind of device."""

    template = "{codec}: its cost on {device} is {source}."

    codec: str
    device: str
    source: str


class UnknownCodecCost(Finding):
    """Nobody knows the cost of a codec on this kind of device."""

    template = "{codec}: its cost on {device} is unknown and counts as nothing."

    codec: str
    device: str


class PacksAlready(Finding):
    """Another compressor is asked for, and the recorded job sends packed gradients already."""

    is_assumption = True
    template = "{run}: its gradients traveled packed ({how}). A codec comes on top of that here."

    run: str
    how: str


class TreeAtItsBest(Finding):
    """The closed form of a double tree is its best time."""

    template = (
        "tree: this is the time at full utilization. Played transfer by transfer, with shared "
        "links, a double tree takes at least 9 % longer (fullwire collective --algorithm tree)."
    )


class StepPredicted(Finding):
    """The answer of one prediction."""

    template = (
        "{run} with {conditions:list}: a step takes {step_s:time}"
        "{low_s:? ({low_s:time} to {high_s:time})}{recorded_s:?; {recorded_s:time} in the run}. "
        "Scaling factor {factor:.3f}."
    )

    run: str
    conditions: tuple[str, ...]
    step_s: float
    low_s: float | None
    high_s: float | None
    recorded_s: float | None
    factor: float


class StepsPredicted(Finding):
    """The answer of several predictions: the ends of the scaling factor, and of steps."""

    template = (
        "Scaling factor {least:.3f} ({least_with:list}) to {most:.3f} ({most_with:list}). Steps "
        "take {shortest_s:time} to {longest_s:time}{recorded_s:?, {recorded_s:time} in the run}."
    )

    least: float
    least_with: tuple[str, ...]
    most: float
    most_with: tuple[str, ...]
    shortest_s: float
    longest_s: float
    recorded_s: float | None


class FragmentsLeftOut(Finding):
    """Settings that no elastic job can run; they have no rows."""

    template = (
        "Left out, because fullwire.elastic cannot run {settings:it|them}: {settings:list}. "
        "Fragments divide the local steps, and each has a parameter at least."
    )
    is_assumption = True

    settings: tuple[str, ...]


class FragmentsTakenAlike(Finding):
    """The fragments of a run whose gradients are whole buckets are taken to be alike."""

    template = (
        "{runs:list}: the trace shows buckets of gradients, and not the parameters in them. Its "
        "fragments are taken to be of one size. fullwire.elastic ends them between parameters, and "
        "each has a parameter at least."
    )
    is_assumption = True

    runs: tuple[str, ...]


class StepsPredictedAlike(Finding):
    """The answer of several predictions that all have the same step."""

    template = (
        "{run}: a step takes {step_s:time} in each of {count:,} settings"
        "{recorded_s:?; {recorded_s:time} in the run}. Scaling factor {factor:.3f}."
    )

    count: int
    run: str
    step_s: float
    recorded_s: float | None
    factor: float


class FasterLinksNarrow(Finding):
    """A recording on other links would narrow the widest interval."""

    template = (
        "The widest interval ({conditions:list}): no link of {rate_bps:rate} was recorded. One "
        "more recording there, given with --calibrate more.run, would make it {share:.0%} as wide"
        "{command:?: {command}}."
    )

    conditions: tuple[str, ...]
    share: float
    rate_bps: float
    command: str  # that records in the lab; "" for a job of other machines


class QuietProcessorsNarrow(Finding):
    """A recording without other work would narrow the widest interval."""

    template = (
        "The widest interval ({conditions:list}) would be {share:.0%} as wide after a recording "
        "without other programs on the processors."
    )

    conditions: tuple[str, ...]
    share: float


def predicted_answer(
    table: Predictions, around_s: tuple[Floats, Floats], recorded_s: float | None
) -> Finding:
    """Return the answer of a table: the only prediction, or the ends of all of them.

    `recorded_s` is the step of the only run, as it was measured.
    """
    step_s, factor = table["step_s"], table["scaling_factor"]
    if len(table) == 1:
        has_interval = not np.isnan(around_s[0][0])
        return StepPredicted(
            run=str(table["run"][0]),
            conditions=_conditions_of(table, 0, every=True),
            step_s=float(step_s[0]),
            low_s=float(around_s[0][0]) if has_interval else None,
            high_s=float(around_s[1][0]) if has_interval else None,
            recorded_s=recorded_s,
            factor=float(factor[0]),
        )
    least, most = int(np.argmin(factor)), int(np.argmax(factor))
    if len(table.axes["run"]) == 1 and step_s.min() == step_s.max() and least == most:
        return StepsPredictedAlike(
            count=len(table),
            run=str(table["run"][0]),
            step_s=float(step_s[0]),
            recorded_s=recorded_s,
            factor=float(factor[0]),
        )
    return StepsPredicted(
        least=float(factor[least]),
        least_with=_conditions_of(table, least),
        most=float(factor[most]),
        most_with=_conditions_of(table, most),
        shortest_s=float(step_s.min()),
        longest_s=float(step_s.max()),
        recorded_s=recorded_s,
    )


def further_finding(table: Predictions, further: Further) -> Finding:
    """Return the recording that would narrow the widest interval of a table."""
    conditions = _conditions_of(table, further.row, every=len(table) == 1)
    if further.rate_bps is None:
        return QuietProcessorsNarrow(conditions=conditions, share=further.share)
    command = ""
    if further.lab_workers is not None:
        rate = show_rate(further.rate_bps).replace(" ", "")
        command = f"fullwire lab run --workers {further.lab_workers} --rate {rate} -o more.run"
    return FasterLinksNarrow(
        conditions=conditions, share=further.share, rate_bps=further.rate_bps, command=command
    )


def _conditions_of(table: Predictions, row: int, *, every: bool = False) -> tuple[str, ...]:
    """Return the conditions of a row that vary; on demand also the usual ones of a question."""
    varying = {axis for axis, values in table.axes.items() if len(values) > 1}
    asked = varying | ({"workers", "bandwidth_bps", "compression"} if every else set())
    if "codec" in varying:
        asked.add("compression")
        if all(codec.is_free for codec in table.axes["codec"]):
            asked.discard("codec")
    values = {axis: table[axis][row] for axis in CONDITIONS if axis in asked}
    return tuple(
        CONDITIONS[axis].worded(table.told(axis, value, row))
        for axis, value in values.items()
        if not (every and value == CONDITIONS[axis].usual)
    )


def prediction_notes(
    named: Sequence[tuple[str, Run]],
    subjects: Sequence[Subject],
    grid: Grid,
    *,
    per_host: Sequence[int] = (),
) -> Iterator[Finding]:
    """Yield the notes on predictions, missing data first.

    `per_host` are the numbers of ranks of each host that the user gave.
    """
    for name, run in named:
        yield from (NamedRunIsPartial(run=name, what=gap) for gap in run.missing)
    by_device: dict[tuple[str, str], list[str]] = {}
    for name, run in named:
        if run.provenance.basis == "modelled":
            device = str(run.facts.device), str(run.facts.efficiency)
            by_device.setdefault(device, []).append(name)
    for (title, efficiency), names in by_device.items():
        yield Modelled(names=tuple(names), device=title, efficiency=efficiency)
    for _, run in named:  # Yield the built-in workloads that do not fit into their device.
        if run.provenance.origin == "modelled":
            load = workload(run.provenance.source)
            if not load.memory.fits:
                from fullwire.findings.memory import memory_finding

                yield memory_finding(load)
    measured = [each for each in grid.transports if isinstance(each, MeasuredTransport)]
    for (name, run), subject in zip(named, subjects, strict=True):
        yield from about_links(name, run, subject, grid, per_host)
        yield from _of_run(name, run, subject, grid, is_measured=bool(measured))
        is_other = any(not isinstance(policy, EachGradient) for policy in grid.buckets)
        if grid.are_buckets_asked and is_other and not subject.has_parameters:
            yield GradientsTakenEvenly(run=name)
        yield from about_rounds(name, local_steps_of(run), grid.local_steps, grid.accumulate)
        hook = run.facts.hook if subject.step.sent_share < 1 or named_in(run.facts.hook) else None
        how = hook or (run.facts.wire and f"{run.facts.wire} on the wire")
        if how and any(compressor.ratio > 1 for compressor in grid.compressors):
            yield PacksAlready(run=name, how=how)
    for compressor in grid.compressors:
        codec, packed_on = compressor.name, compressor.unmeasured_on
        if packed_on and compressor.cost_source:
            yield CodecCost(codec=codec, device=packed_on, source=compressor.cost_source)
        elif packed_on:
            yield UnknownCodecCost(codec=codec, device=packed_on)
    placed = {subject.placement: subject for subject in subjects if measured}
    for at in placed:
        if max(grid.workers) > at.ranks and not per_host:
            runs = tuple(each.name for each in subjects if each.placement == at)
            yield MoreHostsAlike(at=at, runs=runs if len(placed) > 1 else ())
    for transport, subject in itertools.product(measured, placed.values()):
        if subject.is_on_devices:  # no processor carries out its collectives
            continue
        crowds = subject.crowd(grid.workers)
        limit_bps = transport.line_limits_up_to_bps(float(crowds.max()))
        if max(grid.bandwidth_bps) > limit_bps:
            yield BeyondTheLine(workers=grid.workers[int(crowds.argmax())], rate_bps=limit_bps)
    if grid.cluster is not None and grid.is_startup_usual:
        yield UsualStartup(cluster=grid.cluster.name, startup_s=grid.cluster.startup_s)
    if grid.cluster is not None and rests_on_least(subjects, grid):
        yield LinksInNodesMayBeFaster(cluster=grid.cluster.name)
    if grid.cluster is not None and (ends := [*ends_of_nics(grid)]):
        open_to = {workers for among, _ in ends for workers in among}
        yield NicsOfClusterAreOpen(cluster=grid.cluster.name, workers=tuple(sorted(open_to)))
    where = OnLinks.of(grid.cluster, grid.latency_s[0], is_scattered=grid.is_scattered)
    if where is not None:
        most = max(grid.workers)
        asked = {*grid.algorithms, *(tried(grid) if AUTO in grid.algorithms else ())} - {AUTO}
        costs = {name: where.cost("allreduce", name, most) for name in sorted(asked)}
        apart = tuple(name for name, cost in costs.items() if not cost.is_believed)
        if apart:
            yield RanksDriftApart(algorithms=apart, workers=most, cluster=where.cluster.name)
    if {"tree", AUTO} & set(grid.algorithms) and max(grid.workers) > 2:
        yield TreeAtItsBest()


def _of_run(
    name: str, run: Run, subject: Subject, grid: Grid, *, is_measured: bool
) -> Iterator[Finding]:
    if subject.step.is_estimated:
        yield EstimatedFromSeveral(run=name)
    replayed_ns, usual_s = subject.step.measured_ns, usual_step_s(run)
    usual_s = usual_s if local_steps_of(run) == 1 else None  # another note tells of rounds
    if replayed_ns and usual_s is not None and abs(usual_s / (replayed_ns * 1e-9) - 1) > NOTABLE:
        yield WholeStepsAreReplayed(run=name, replayed_s=replayed_ns * 1e-9, usual_s=usual_s)
    yield from too_few_of_a_kind(kinds_of(run).unlike, name)
    is_modelled = run.provenance.basis == "modelled"  # with one pass in a step, which is its own
    yield from about_evidence(name, run, subject, grid, is_measured=is_measured)
    if not is_modelled and (passes := passes_of_step(run) or 1) > 1:
        add_up = passes_add_up(run)
        yield StepCountsAsPass(run=name, passes=passes, add_up=add_up)
        if not add_up and max(grid.accumulate) > 1:
            yield PassesMayNotShareASum(run=name, passes=passes)
    delays = [seconds for _, seconds in run.facts.run_delay_s or ()]
    is_shared = delays and subject.step.is_estimated and sums_on_processors(run)
    delay_s = float(np.median(delays)) if is_shared else 0.0
    crowded_s, notable_s = subject.step.crowded_ns * 1e-9, KEPT * (replayed_ns or 0) * 1e-9
    if max(crowded_s, delay_s) > notable_s > 0:
        yield about_contention(
            name,
            is_carried=bool(subject.crowding.s_each),
            is_on_devices=subject.is_on_devices,
        )
    for found in about_others(run, widens=is_measured):
        yield OfRun(run=name, what=found)
    if subject.keeps_gradients:
        yield GradientsStayLocal(run=name)
    if subject.step.shards > 1:
        yield SummedInGroups(run=name, shards=subject.step.shards)
    if len(recorded_ranks(run)) < world(run) and not stands_for_all(run):
        yield OthersMayBeLater(run=name)
    if grid.are_buckets_asked and subject.sums_by_hand:
        yield SumsGoInBuckets(run=name)
    if grid.are_buckets_asked and subject.sums_more_by_hand:
        yield SumsAreOfMore(run=name)
    are_changed = {
        "compression": not all(codec.is_none for codec in grid.compressors),
        "accumulate": max(grid.accumulate) > 1,
        "local steps": max(grid.local_steps) > local_steps_of(run),
    }
    changing = tuple(axis for axis, is_changed in are_changed.items() if is_changed)
    if changing and subject.sums_more_by_hand:
        yield SumsTakenForGradients(run=name, asked=changing)
