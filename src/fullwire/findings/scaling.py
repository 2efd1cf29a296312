"""The scaling factor of a step, the turning point of its verdict, and the needs of a target.

These are the sentences that people repeat in a meeting.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby

from fullwire.findings.finding import Finding
from fullwire.simulation.target import LEAST_BPS, Reached, Targets


class ScalingFactor(Finding):
    """The scaling factor, and T1."""

    template = (
        "Scaling factor {factor:.3f}. One worker takes {alone_s:time}{estimate}.{full}"
        "{longer_s:? Computing takes {longer_s:time} more than alone.}"
    )

    factor: float
    alone_s: float
    estimate: Finding | None
    full: Finding | None
    longer_s: float | None


class Estimated(Finding):
    """T1 is estimated from the run itself, by the named source and within the given range."""

    template = " (estimated{source:? from {source}}{is_between:?: {low_s:time} to {high_s:time}})"

    source: str  # "" if the run does not show computation by itself
    low_s: float
    high_s: float
    is_between: bool  # the range is shown: a source tells contention, or nothing does


class WithFullLinks(Finding):
    """The scaling factor, if the links were used fully."""

    template = " With full links it would be {factor:.3f}."

    factor: float


class NoMoreWithFullLinks(Finding):
    """The links are almost full: the prediction would be no better than the measurement."""

    template = " Full links would not raise it."


class ReplayedWithFullLinks(Finding):
    """The scaling factor of the steps that predictions replay, with full links."""

    template = (
        " With full links, that of the steps that predictions replay would be {factor:.3f} instead "
        "of {now:.3f}."
    )

    factor: float
    now: float


class LineTakesOver(Finding):
    """The line rate up to which the line limits the transport; above it, the processors do."""

    template = " Above {rate_bps:rate} the processors limit this transport, not the line."

    rate_bps: float


class WouldCost(Finding):
    """A slower link, or more workers, would make communication cost the threshold."""

    template = (
        "Communication costs {threshold:.0%} of the step {below_bps:?below "
        "{below_bps:rate}}{is_either:? or }{workers:?with {workers:,} workers or more}."
    )

    threshold: float
    below_bps: float | None
    workers: int | None

    @property
    def is_either(self) -> bool:
        """Say whether both a slower link and more workers would make it cost the threshold."""
        return bool(self.below_bps and self.workers)


class NeverCosts(Finding):
    """Communication stays below the threshold on slower links and with more workers."""

    template = (
        "Communication stays below {threshold:.0%} of the step on slower links and with more "
        "workers."
    )

    threshold: float


class CostsLessAbove(Finding):
    """A faster link, or fewer workers, would make communication cost less than the threshold."""

    template = (
        "Communication costs less than {threshold:.0%} of the step above "
        "{rate_bps:rate}{fewer:?, or with fewer than {fewer:,} workers}.{takes_over}"
    )

    threshold: float
    rate_bps: float
    fewer: int | None
    takes_over: LineTakesOver | None


class WaitingAloneCosts(Finding):
    """Waiting for late ranks alone costs the threshold."""

    template = (
        "On any link, waiting for late ranks alone costs {threshold:.0%} of the step or "
        "more.{takes_over}"
    )

    threshold: float
    takes_over: LineTakesOver | None


class NoLinkIsEnough(Finding):
    """No link is fast enough for communication to cost less than the threshold."""

    template = (
        "On any link, communication costs {threshold:.0%} of the step or more.{fewer:? With "
        "fewer than {fewer:,} workers it costs less.}{takes_over}"
    )

    threshold: float
    fewer: int | None
    takes_over: LineTakesOver | None


def turning(
    *,
    is_limited: bool,
    is_waiting: bool,
    rate_bps: float | None,
    workers: int | None,
    line_bps: float | None,
    threshold: float,
) -> Finding:
    """Choose the finding about the turning point of the verdict."""
    if not is_limited:
        if not rate_bps and not workers:
            return NeverCosts(threshold=threshold)
        return WouldCost(threshold=threshold, below_bps=rate_bps, workers=workers)
    fewer = workers if workers and workers > 2 else None
    takes_over = None if line_bps is None else LineTakesOver(rate_bps=line_bps)
    if rate_bps:
        return CostsLessAbove(
            threshold=threshold, rate_bps=rate_bps, fewer=fewer, takes_over=takes_over
        )
    if is_waiting:
        return WaitingAloneCosts(threshold=threshold, takes_over=takes_over)
    return NoLinkIsEnough(threshold=threshold, fewer=fewer, takes_over=takes_over)


# ---- the needs of a target -----------------------------------------------------------------------


class Label(Finding):
    """The label of a case: the conditions in which it differs from other cases."""

    template = (
        "{case.run}, {case.workers} {case.workers:worker|workers}{buckets:?, {buckets}}"
        "{algorithm:?, {algorithm}}{transport:?, transport {transport}}"
        "{latency}{accumulate:?, gradients of {accumulate:g} "
        "{accumulate:pass|passes}}"
        "{local_steps:?, local steps {local_steps}}{jitter:?, jitter {jitter}}"
    )

    case: Reached
    buckets: str | None
    algorithm: str | None
    transport: str | None
    latency: LatencyOf | None
    accumulate: float | None
    local_steps: int | None
    jitter: str | None


class LatencyOf(Finding):
    """A latency, which may be 0."""

    template = ", latency {latency_s:time}"

    latency_s: float


class TargetNeeds(Finding):
    """The needs of one case to reach the target scaling factor."""

    template = "{label}: a scaling factor of {scaling_factor:g} needs {needs:;}."

    label: Label
    scaling_factor: float
    needs: tuple[Finding, ...]


class NoCompression(Finding):
    """The target is reached without compression."""

    template = "no compression"


class CompressionOf(Finding):
    """The smallest compression ratio that reaches the target."""

    template = "{ratio:.4g}x compression"

    ratio: float


class MoreThanAnyCompression(Finding):
    """No compression ratio reaches the target."""

    template = "more than compression can reach ({best:.4f} at best)"

    best: float


class AtRate(Finding):
    """The compression that is needed at a line rate."""

    template = "{needed} at {rate_bps:rate}"

    needed: Finding
    rate_bps: float


class BandwidthOf(Finding):
    """The smallest line rate that reaches the target."""

    template = "{rate_bps:rate} {how}"

    rate_bps: float
    how: Finding


class NextToNoBandwidth(Finding):
    """Any line reaches the target."""

    template = "next to no bandwidth {how}"

    how: Finding


class MoreThanAnyBandwidth(Finding):
    """No line reaches the target."""

    template = "more than bandwidth can reach {how} ({best:.4f} at best)"

    how: Finding
    best: float


class WithCodec(Finding):
    """A compressor with its cost, by its codec."""

    template = "with codec {codec}"

    codec: str


class WithoutCompression(Finding):
    """The gradients are sent uncompressed."""

    template = "without compression"


class WithCompression(Finding):
    """A compression ratio without cost."""

    template = "with {ratio:g}x compression"

    ratio: float


class AlikeForAllRuns(Finding):
    """All runs need the same."""

    template = (
        "{workers} {workers:worker|workers} at {rate_bps:rate}: {needed} for any of these runs."
    )

    workers: int
    rate_bps: float
    needed: Finding


class FromLeastToMost(Finding):
    """The runs that need the least and the most."""

    template = (
        "{workers} {workers:worker|workers} at {rate_bps:rate}: from {least} ({least_run}) to "
        "{most} ({most_run})."
    )

    workers: int
    rate_bps: float
    least: Finding
    least_run: str
    most: Finding
    most_run: str


def target_findings(
    targets: Targets, varying: Collection[str], passes: Mapping[str, float]
) -> Iterator[Finding]:
    """Yield the needs of the target: a finding for each case, and one for all runs together.

    `varying` are the axes that have more than one value, `passes` those of a recorded step by run.
    """
    ratios = _by_label(targets.least_compression, varying)
    rates = _by_label(targets.least_bandwidth, varying)
    for label in rates:
        needs: list[Finding] = [
            AtRate(needed=_needed(case), rate_bps=case.bandwidth_bps or 0.0)
            for case in ratios.get(label, [])
        ]
        # Take all codecs, but of free ratios only the smallest. The JSON holds the others.
        free = [case for case in rates[label] if case.codec is None]
        with_codec = [case for case in rates[label] if case.codec is not None]
        needs += [_bandwidth(case) for case in free[:1] + with_codec]
        first = rates[label][0]
        conditions = {name: getattr(first, name) if name in varying else None for name in _LABELLED}
        if conditions["accumulate"] is not None:
            conditions["accumulate"] *= passes[first.run]
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
    """Yield a finding for all runs together at each bandwidth, where nothing else varies."""
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
    """Round to three digits, upwards, so that the printed number still reaches the target."""
    digit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return math.ceil(number / digit - 1e-9) * digit


class ChangedSums(Finding):
    """The second run sums gradients once in a step, and the first did in each pass."""

    template = "one sum a step"


class ChangedLocalSteps(Finding):
    """Workers add up once in another number of steps."""

    template = "a sum in {is_each:?every step}{apart:?one of {apart} steps}"

    is_each: bool
    apart: int | None  # None for a sum in each step


class WorkInTheSameTime(Finding):
    """The gain from another number of workers, each of which does the same work in a step."""

    template = (
        "{is_supposed:If a worker's step is as much work as before, with|With} {after:,} "
        "{after:worker|workers} in place of {before:,} the job does {work:.2f} times the work in "
        "the same time. {perfect:.2f} would be perfect."
    )

    before: int
    after: int
    work: float
    perfect: float
    is_supposed: bool  # The passes of a step are unknown.
