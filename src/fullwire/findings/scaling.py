"""What a step loses to having several workers, and what links used to the full would leave."""

from __future__ import annotations

from dataclasses import dataclass

from fullwire.findings.finding import Finding


@dataclass(frozen=True, kw_only=True)
class ScalingFactor(Finding):
    """The scaling factor, T1, and the step that was measured."""

    template = (
        "Scaling factor {factor:.3f}: a step alone would take {alone_s:time}"
        "{is_estimated: (estimated)|}, it takes {step_s:time}.{full}"
        "{longer_s:? Computing takes {longer_s:time} more than alone.}"
    )

    factor: float
    alone_s: float
    is_estimated: bool
    step_s: float
    full: Finding | None
    longer_s: float | None


@dataclass(frozen=True, kw_only=True)
class WithFullLinks(Finding):
    """The scaling factor, were links used to the full."""

    template = " Were its links used to the full, it would be {factor:.3f}."

    factor: float


@dataclass(frozen=True, kw_only=True)
class NoMoreWithFullLinks(Finding):
    """The links are as good as full: the prediction would be no better than what was measured."""

    template = " Links used to the full would not raise it."


@dataclass(frozen=True, kw_only=True)
class MedianWithFullLinks(Finding):
    """The same, where predictions start from another step than the mean one."""

    template = (
        " Were its links used to the full, that of the median step would be {factor:.3f} instead "
        "of {now:.3f}."
    )

    factor: float
    now: float
