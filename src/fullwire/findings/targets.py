"""What reaches a scaling factor: the sentences that people repeat in a meeting."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from fullwire.findings.finding import Finding
from fullwire.simulation.target import LEAST_BPS, Reached, Targets


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
        needs += [_bandwidth(case) for case in _worth_saying(rates[label])]
        shown = _label(rates[label][0], varying)
        yield TargetNeeds(label=shown, scaling_factor=targets.scaling_factor, needs=tuple(needs))
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


def _label(case: Reached, varying: Collection[str]) -> Label:
    shown = {name: getattr(case, name) if name in varying else None for name in _LABELLED}
    latency_s = shown.pop("latency_s")
    return Label(
        case=case, latency=None if latency_s is None else LatencyOf(latency_s=latency_s), **shown
    )


def _worth_saying(rates: list[Reached]) -> list[Reached]:
    """Keep codecs and the least compression; the ratios between are in the JSON."""
    free = [case for case in rates if case.codec is None]
    return free[:1] + [case for case in rates if case.codec is not None]


def _needed(case: Reached) -> Finding:
    if case.compression is None:
        return MoreThanAnyCompression(best=case.best_scaling_factor)
    if case.compression == 1:
        return NoCompression()
    return CompressionOf(ratio=_rounded_up(case.compression))


def _bandwidth(case: Reached) -> Finding:
    how = _how(case)
    if case.bandwidth_bps is None:
        return MoreThanAnyBandwidth(how=how, best=case.best_scaling_factor)
    if case.bandwidth_bps <= LEAST_BPS:
        return NextToNoBandwidth(how=how)
    return BandwidthOf(rate_bps=_rounded_up(case.bandwidth_bps), how=how)


def _how(case: Reached) -> Finding:
    if case.codec is not None:
        return WithCodec(codec=case.codec)
    if case.compression is None or case.compression == 1:
        return WithoutCompression()
    return WithCompression(ratio=case.compression)


def _summary(targets: Targets, varying: Collection[str]) -> Iterator[Finding]:
    """Draw several runs together, bandwidth by bandwidth, where nothing else varies."""
    if "run" not in varying or set(varying) - {"run", "workers", "bandwidth_bps", "codec"}:
        return
    ordered = sorted(targets.least_compression, key=_place)
    for (workers, rate_bps), cases in groupby(ordered, key=_place):
        least, *_, most = sorted(cases, key=_difficulty)
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


def _difficulty(case: Reached) -> float:
    return math.inf if case.compression is None else case.compression


def _rounded_up(number: float) -> float:
    """Round to three digits, upwards: what is printed still reaches the target."""
    digit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return math.ceil(number / digit - 1e-9) * digit
