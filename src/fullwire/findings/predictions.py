"""What there is to know about predictions: where they are estimated, modelled or less sure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fullwire.collectives.tuning import AUTO
from fullwire.findings.finding import Finding
from fullwire.findings.memory import memory_finding
from fullwire.findings.others import about_others
from fullwire.run.run import Run
from fullwire.simulation.on_links import OnLinks
from fullwire.simulation.sweep import Grid, Subject, tried
from fullwire.simulation.transport import MeasuredTransport
from fullwire.timeline.account import mean_step_s
from fullwire.timeline.transfers import recorded_ranks, stands_for_all, world
from fullwire.workloads import workload

NOTABLE = 0.01  # of the step: a median that differs from the mean by less is not said


class Modelled(Finding):
    """Runs whose times come from a model of a device."""

    template = (
        "{names:list} {names:is|are} modelled, not measured: operations on one {device} with "
        "{efficiency}."
    )

    names: tuple[str, ...]
    device: str
    efficiency: str


class EstimatedFromSeveral(Finding):
    """T1 comes from a job of several workers."""

    template = "{run}: T1 is estimated from the computation of a job of several workers."

    run: str


class MedianIsReplayed(Finding):
    """The step that is replayed is not the one that explain accounts for."""

    template = (
        "{run}: the median step is replayed, {median_s:time}; the mean step, which explain "
        "accounts for, is {mean_s:time}."
    )

    run: str
    median_s: float
    mean_s: float


class OfRun(Finding):
    """Something that is said of one run among several."""

    template = "{run}: {what}"

    run: str
    what: Finding


class SummedInGroups(Finding):
    """Gradients are summed by groups of ranks, which grow with the workers."""

    template = (
        "{run}: gradients are summed in groups of one in {shards} ranks; with more workers these "
        "groups grow, and the others stay as they are."
    )

    run: str
    shards: int


class NamedRunIsPartial(Finding):
    """Something of a run is missing."""

    template = "{run} is partial: {what}."

    run: str
    what: str


class OthersMayBeLater(Finding):
    """Ranks that were not recorded may be later than those that were."""

    template = (
        "{run}: ranks that are not here may be later than those that are, and then every step is "
        "longer than predicted."
    )

    run: str


class BeyondTheLine(Finding):
    """From some line rate on, a measured transport has no more use for it."""

    template = (
        "measured: with {workers:,} workers the line is what limits this transport up to "
        "{rate_bps:rate}; above, the work of sending and receiving does, and a faster line changes "
        "little. Faster processors, or another transport, would."
    )

    workers: int
    rate_bps: float


class RanksDriftApart(Finding):
    """No closed form is near, and the cluster is too large to be played."""

    template = (
        "{algorithms:list}: among {workers:,} workers of {cluster} ranks drift apart, and there "
        "are too many to play: these predictions may be off by a third (fullwire collective "
        "--cluster plays one)."
    )

    algorithms: tuple[str, ...]
    workers: int
    cluster: str


class CodecCost(Finding):
    """The cost of a codec is not known, or not from a measurement here."""

    template = "{codec}: {caveat}."

    codec: str
    caveat: str


class TreeAtItsBest(Finding):
    """A double tree's closed form is its best."""

    template = (
        "tree: the time at full utilization; played transfer by transfer, with links shared, a "
        "double tree takes 9 % longer at the least (fullwire collective --algorithm tree)."
    )


def prediction_notes(
    named: Sequence[tuple[str, Run]], subjects: Sequence[Subject], grid: Grid
) -> Iterator[Finding]:
    """Go through what there is to know about predictions."""
    yield from _modelled(named)
    yield from _too_large(named)
    for (name, run), subject in zip(named, subjects, strict=True):
        yield from _of_run(name, run, subject, grid)
    for compressor in grid.compressors:
        if compressor.caveat:
            yield CodecCost(codec=compressor.name, caveat=compressor.caveat)
    for transport in (each for each in grid.transports if isinstance(each, MeasuredTransport)):
        limits_bps = {each: transport.line_limits_up_to_bps(each) for each in grid.workers}
        workers = min(limits_bps, key=lambda each: (limits_bps[each], each))
        if max(grid.bandwidth_bps) > limits_bps[workers]:
            yield BeyondTheLine(workers=workers, rate_bps=limits_bps[workers])
    yield from _drifting(grid)
    if {"tree", AUTO} & set(grid.algorithms) and max(grid.workers) > 2:
        yield TreeAtItsBest()


def _of_run(name: str, run: Run, subject: Subject, grid: Grid) -> Iterator[Finding]:
    if subject.step.is_estimated:
        yield EstimatedFromSeveral(run=name)
    median_ns, mean_s = subject.step.measured_ns, mean_step_s(run)
    if median_ns and mean_s is not None and abs(mean_s / (median_ns * 1e-9) - 1) > NOTABLE:
        yield MedianIsReplayed(run=name, median_s=median_ns * 1e-9, mean_s=mean_s)
    if any(isinstance(each, MeasuredTransport) for each in grid.transports):
        yield from (OfRun(run=name, what=each) for each in about_others(run))
    if subject.step.shards > 1:
        yield SummedInGroups(run=name, shards=subject.step.shards)
    yield from (NamedRunIsPartial(run=name, what=each) for each in run.missing)
    if len(recorded_ranks(run)) < world(run) and not stands_for_all(run):
        yield OthersMayBeLater(run=name)


def _drifting(grid: Grid) -> Iterator[Finding]:
    where = OnLinks.of(grid.cluster, grid.latency_s[0], is_scattered=grid.is_scattered)
    if where is None:
        return
    workers = max(grid.workers)
    asked = {*grid.algorithms, *(tried(grid) if AUTO in grid.algorithms else ())} - {AUTO}
    names = tuple(
        each for each in sorted(asked) if not where.cost("allreduce", each, workers).is_believed
    )
    if names:
        yield RanksDriftApart(algorithms=names, workers=workers, cluster=where.cluster.name)


def _too_large(named: Sequence[tuple[str, Run]]) -> Iterator[Finding]:
    """Say which built-in workloads would not fit into their device."""
    for _, run in named:
        if run.provenance.origin == "modelled":
            load = workload(run.provenance.source)
            if not load.memory.fits:
                yield memory_finding(load)


def _modelled(named: Sequence[tuple[str, Run]]) -> Iterator[Finding]:
    """Say of each device which of the runs are modelled on it."""
    by_device: dict[tuple[str, str], list[str]] = {}
    for name, run in named:
        if run.provenance.basis == "modelled":
            device = str(run.facts.device), str(run.facts.efficiency)
            by_device.setdefault(device, []).append(name)
    for (title, efficiency), names in by_device.items():
        yield Modelled(names=tuple(names), device=title, efficiency=efficiency)
