"""What a step loses to having several workers, and where that would turn."""

from __future__ import annotations

from fullwire.findings.finding import Finding


class ScalingFactor(Finding):
    """The scaling factor, T1, and the step that was measured."""

    template = (
        "Scaling factor {factor:.3f}: a step alone would take {alone_s:time}"
        "{estimate}, it takes {step_s:time}.{full}"
        "{longer_s:? Computing takes {longer_s:time} more than alone.}"
    )

    factor: float
    alone_s: float
    estimate: Finding | None
    step_s: float
    full: Finding | None
    longer_s: float | None


class Estimated(Finding):
    """T1 comes from the run itself: what it was estimated from, and how far it may be off."""

    template = " (estimated{probes:? from {probes} probe steps}: {low_s:time} to {high_s:time})"

    probes: int | None
    low_s: float
    high_s: float


class WithFullLinks(Finding):
    """The scaling factor, were links used to the full."""

    template = " Were its links used to the full, it would be {factor:.3f}."

    factor: float


class NoMoreWithFullLinks(Finding):
    """The links are as good as full: the prediction would be no better than what was measured."""

    template = " Links used to the full would not raise it."


class MedianWithFullLinks(Finding):
    """The same, where predictions start from another step than the mean one."""

    template = (
        " Were its links used to the full, that of the median step would be {factor:.3f} instead "
        "of {now:.3f}."
    )

    factor: float
    now: float


class LineTakesOver(Finding):
    """The rate up to which the line is slower than the transport."""

    template = (
        " Up to {rate_bps:rate} the line is what limits this transport; above, the work of sending "
        "and receiving does."
    )

    rate_bps: float


class WouldCost(Finding):
    """A slower link, or more workers, would make communication cost the threshold."""

    template = (
        "Communication would cost {threshold:.0%} of the step {below_bps:?below {below_bps:rate}}"
        "{is_either:? or }{workers:?with {workers:,} workers or more}."
    )

    threshold: float
    below_bps: float | None
    workers: int | None

    @property
    def is_either(self) -> bool:
        """Say whether both would."""
        return bool(self.below_bps and self.workers)


class NeverCosts(Finding):
    """Neither would."""

    template = (
        "Neither a slower link nor more workers would make communication cost {threshold:.0%} of "
        "the step."
    )

    threshold: float


class CostsLessAbove(Finding):
    """A faster link, or fewer workers, would make communication cost less than the threshold."""

    template = (
        "Communication would cost less than {threshold:.0%} of the step above {rate_bps:rate}"
        "{fewer:?, or with fewer than {fewer:,} workers}.{takes_over}"
    )

    threshold: float
    rate_bps: float
    fewer: int | None
    takes_over: LineTakesOver | None


class WaitingAloneCosts(Finding):
    """Late ranks alone cost the threshold."""

    template = (
        "However fast the links, waiting for late ranks alone costs more than {threshold:.0%} of "
        "the step.{takes_over}"
    )

    threshold: float
    takes_over: LineTakesOver | None


class NoLinkIsEnough(Finding):
    """No link is fast enough."""

    template = (
        "No link is fast enough for communication to cost less than {threshold:.0%} of the step"
        "{fewer:?; it does with fewer than {fewer:,} workers}.{takes_over}"
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
    """Choose what there is to say of where the verdict turns."""
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
