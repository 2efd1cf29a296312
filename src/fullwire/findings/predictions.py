"""What predictions say: how sure they are, and what reaches a scaling factor.

The second are the sentences that people repeat in a meeting.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from fullwire.collectives.tuning import AUTO
from fullwire.findings.finding import Finding
from fullwire.findings.memory import memory_finding
from fullwire.findings.others import about_others
from fullwire.run.run import Run
from fullwire.simulation.grid import Grid, Subject, tried
from fullwire.simulation.on_links import OnLinks
from fullwire.simulation.target import LEAST_BPS, Reached, Targets
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


class MoreHostsAlike(Finding):
    """Where the ranks of a larger job are taken to be."""

    template = (
        "measured: more workers are taken for more hosts like the recorded {hosts:one|ones}, each "
        "with {ranks:g} {ranks:rank|ranks} on {processors} {processors:processor|processors}; "
        "--ranks-per-host says otherwise."
    )

    hosts: int
    ranks: float
    processors: int


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
    named: Sequence[tuple[str, Run]],
    subjects: Sequence[Subject],
    grid: Grid,
    *,
    ranks_are_placed: bool = False,
) -> Iterator[Finding]:
    """Go through what there is to know; ranks are placed where it was said how many a host has."""
    by_device: dict[tuple[str, str], list[str]] = {}
    for name, run in named:
        if run.provenance.basis == "modelled":
            device = str(run.facts.device), str(run.facts.efficiency)
            by_device.setdefault(device, []).append(name)
    for (title, efficiency), names in by_device.items():
        yield Modelled(names=tuple(names), device=title, efficiency=efficiency)
    for _, run in named:  # built-in workloads that would not fit into their device
        if run.provenance.origin == "modelled":
            load = workload(run.provenance.source)
            if not load.memory.fits:
                yield memory_finding(load)
    measured = [each for each in grid.transports if isinstance(each, MeasuredTransport)]
    for (name, run), subject in zip(named, subjects, strict=True):
        yield from _of_run(name, run, subject, is_measured=bool(measured))
    for compressor in grid.compressors:
        if compressor.caveat:
            yield CodecCost(codec=compressor.name, caveat=compressor.caveat)
    for transport in measured:
        if max(grid.workers) > transport.workers and not ranks_are_placed:
            yield MoreHostsAlike(
                hosts=transport.machines,
                ranks=transport.workers / transport.machines,
                processors=transport.processors,
            )
    for transport in measured:
        limits_bps = {each: transport.line_limits_up_to_bps(each) for each in grid.workers}
        workers = min(limits_bps, key=lambda each: (limits_bps[each], each))
        if max(grid.bandwidth_bps) > limits_bps[workers]:
            yield BeyondTheLine(workers=workers, rate_bps=limits_bps[workers])
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


def _of_run(name: str, run: Run, subject: Subject, *, is_measured: bool) -> Iterator[Finding]:
    if subject.step.is_estimated:
        yield EstimatedFromSeveral(run=name)
    median_ns, mean_s = subject.step.measured_ns, mean_step_s(run)
    if median_ns and mean_s is not None and abs(mean_s / (median_ns * 1e-9) - 1) > NOTABLE:
        yield MedianIsReplayed(run=name, median_s=median_ns * 1e-9, mean_s=mean_s)
    if is_measured:
        yield from (OfRun(run=name, what=each) for each in about_others(run))
    if subject.step.shards > 1:
        yield SummedInGroups(run=name, shards=subject.step.shards)
    yield from (NamedRunIsPartial(run=name, what=each) for each in run.missing)
    if len(recorded_ranks(run)) < world(run) and not stands_for_all(run):
        yield OthersMayBeLater(run=name)


class Label(Finding):
    """The conditions of a case: those that differ from another's."""

    template = (
        "{case.run}, {case.workers} {case.workers:worker|workers}{buckets:?, {buckets}}"
        "{algorithm:?, {algorithm}}{transport:?, transport {transport}}"
        "{latency}{accumulate:?, gradients of {accumulate} passes}"
        "{local_steps:?, local steps {local_steps}}{jitter:?, jitter {jitter}}"
    )

    case: Reached
    buckets: str | None
    algorithm: str | None
    transport: str | None
    latency: LatencyOf | None
    accumulate: int | None
    local_steps: int | None
    jitter: str | None


class LatencyOf(Finding):
    """A latency, also one of 0."""

    template = ", latency {latency_s:time}"

    latency_s: float


class TargetNeeds(Finding):
    """What one case needs to reach the scaling factor."""

    template = "{label}: a scaling factor of {scaling_factor:g} needs {needs:;}."

    label: Label
    scaling_factor: float
    needs: tuple[Finding, ...]


class NoCompression(Finding):
    """It is reached as it is."""

    template = "no compression"


class CompressionOf(Finding):
    """The least ratio."""

    template = "{ratio:.4g}x compression"

    ratio: float


class MoreThanAnyCompression(Finding):
    """No ratio reaches it."""

    template = "more than any compression (best {best:.4f})"

    best: float


class AtRate(Finding):
    """What is needed at a line rate."""

    template = "{needed} at {rate_bps:rate}"

    needed: Finding
    rate_bps: float


class BandwidthOf(Finding):
    """The least line rate."""

    template = "{rate_bps:rate} {how}"

    rate_bps: float
    how: Finding


class NextToNoBandwidth(Finding):
    """Any line reaches it."""

    template = "next to no bandwidth {how}"

    how: Finding


class MoreThanAnyBandwidth(Finding):
    """No line reaches it."""

    template = "more than any bandwidth {how} (best {best:.4f})"

    how: Finding
    best: float


class WithCodec(Finding):
    """A compressor with its cost."""

    template = "with codec {codec}"

    codec: str


class WithoutCompression(Finding):
    """Gradients as they are."""

    template = "without compression"


class WithCompression(Finding):
    """A ratio that costs nothing."""

    template = "with {ratio:g}x compression"

    ratio: float


class AlikeForAllRuns(Finding):
    """All runs need the same."""

    template = "{workers} workers at {rate_bps:rate}: {needed} for any of these runs."

    workers: int
    rate_bps: float
    needed: Finding


class FromLeastToMost(Finding):
    """The runs that need least and most."""

    template = (
        "{workers} workers at {rate_bps:rate}: from {least} ({least_run}) to {most} ({most_run})."
    )

    workers: int
    rate_bps: float
    least: Finding
    least_run: str
    most: Finding
    most_run: str


def target_findings(targets: Targets, varying: Collection[str]) -> Iterator[Finding]:
    """Go through what reaches the target: a finding per case, and one for all runs together.

    `varying` are the axes that have more than one value.
    """
    ratios = _by_label(targets.least_compression, varying)
    rates = _by_label(targets.least_bandwidth, varying)
    for label in rates:
        needs: list[Finding] = [
            AtRate(needed=_needed(case), rate_bps=case.bandwidth_bps or 0.0)
            for case in ratios.get(label, [])
        ]
        # Codecs, and of free ratios the least: those between are in the JSON.
        free = [case for case in rates[label] if case.codec is None]
        with_codec = [case for case in rates[label] if case.codec is not None]
        needs += [_bandwidth(case) for case in free[:1] + with_codec]
        first = rates[label][0]
        conditions = {name: getattr(first, name) if name in varying else None for name in _LABELLED}
        latency_s = conditions.pop("latency_s")
        latency = None if latency_s is None else LatencyOf(latency_s=latency_s)
        yield TargetNeeds(
            label=Label(case=first, latency=latency, **conditions),
            scaling_factor=targets.scaling_factor,
            needs=tuple(needs),
        )
    yield from _summary(targets, varying)


_LABELLED = (
    "buckets",
    "algorithm",
    "transport",
    "latency_s",
    "accumulate",
    "local_steps",
    "jitter",
)


def _by_label(
    reached: Sequence[Reached], varying: Collection[str]
) -> dict[tuple[object, ...], list[Reached]]:
    names = ("run", "workers", *(name for name in _LABELLED if name in varying))

    def label(case: Reached) -> tuple[object, ...]:
        return tuple(getattr(case, name) for name in names)

    return {key: list(cases) for key, cases in groupby(reached, label)}


def _needed(case: Reached) -> Finding:
    if case.compression is None:
        return MoreThanAnyCompression(best=case.best_scaling_factor)
    if case.compression == 1:
        return NoCompression()
    return CompressionOf(ratio=_rounded_up(case.compression))


def _bandwidth(case: Reached) -> Finding:
    how: Finding = WithoutCompression()
    if case.codec is not None:
        how = WithCodec(codec=case.codec)
    elif case.compression is not None and case.compression != 1:
        how = WithCompression(ratio=case.compression)
    if case.bandwidth_bps is None:
        return MoreThanAnyBandwidth(how=how, best=case.best_scaling_factor)
    if case.bandwidth_bps <= LEAST_BPS:
        return NextToNoBandwidth(how=how)
    return BandwidthOf(rate_bps=_rounded_up(case.bandwidth_bps), how=how)


def _summary(targets: Targets, varying: Collection[str]) -> Iterator[Finding]:
    """Draw several runs together, bandwidth by bandwidth, where nothing else varies."""
    if "run" not in varying or set(varying) - {"run", "workers", "bandwidth_bps", "codec"}:
        return
    ordered = sorted(targets.least_compression, key=_place)
    for (workers, rate_bps), cases in groupby(ordered, key=_place):
        least, *_, most = sorted(cases, key=lambda case: case.compression or math.inf)
        needed = _needed(least)
        if needed == _needed(most):
            yield AlikeForAllRuns(workers=workers, rate_bps=rate_bps, needed=needed)
        else:
            yield FromLeastToMost(
                workers=workers,
                rate_bps=rate_bps,
                least=needed,
                least_run=least.run,
                most=_needed(most),
                most_run=most.run,
            )


def _place(case: Reached) -> tuple[int, float]:
    return case.workers, case.bandwidth_bps or 0.0


def _rounded_up(number: float) -> float:
    """Round to three digits, upwards: what is printed still reaches the target."""
    digit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return math.ceil(number / digit - 1e-9) * digit
