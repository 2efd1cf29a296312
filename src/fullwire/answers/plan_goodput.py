"""Failures, restarts and checkpoints of a training, and how long it takes with them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from fullwire.clusters.cluster import Cluster
from fullwire.errors import UsageError
from fullwire.findings.finding import Finding
from fullwire.findings.goodput import PublishedFailures, UsualRestart, UsualStorage
from fullwire.simulation.goodput import (
    CHECKPOINT_BYTES,
    NODE_BYTES_PER_S,
    PUBLISHED_DEVICE_HOURS,
    USUAL_RESTART_S,
    Goodput,
    Reliability,
    goodput,
)
from fullwire.units import NUMBER, bits_per_second, ratio, seconds, shown
from fullwire.workloads.architecture import Architecture

Ends: TypeAlias = tuple[float, float, float]  # low, usual, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Troubles:
    """Failures and checkpoints of a training, as the user gives them. None takes the usual one."""

    device_hours: Ends | None = None  # between two failures
    storage_bps: Ends | None = None
    restart_s: Ends | None = None
    is_synchronous: bool = False

    def assumptions(self) -> Iterator[Finding]:
        """Yield what stands for the figures that the user does not give."""
        if self.device_hours is None:
            low, usual, high = PUBLISHED_DEVICE_HOURS
            yield PublishedFailures(usual=usual, low=low, high=high)
        if self.storage_bps is None:
            yield UsualStorage(node_bytes_per_s=NODE_BYTES_PER_S)
        if self.restart_s is None:
            low, usual, high = USUAL_RESTART_S
            yield UsualRestart(usual_s=usual, low_s=low, high_s=high)

    def goodput(
        self, cluster: Cluster, model: Architecture, work_s: float
    ) -> tuple[Goodput, Goodput, Goodput]:
        """Return the course of a training that takes so long without failures.

        First the worst one, with the most failures, the longest restarts and the slowest storage,
        then the usual one, then the best.
        """
        usual_bps = 8 * NODE_BYTES_PER_S * cluster.nodes
        each = zip(
            self.device_hours or PUBLISHED_DEVICE_HOURS,
            reversed(self.restart_s or USUAL_RESTART_S),
            self.storage_bps or (usual_bps,) * 3,
            strict=True,
        )
        worst, usual, best = (
            goodput(
                work_s,
                cluster.devices,
                Reliability(
                    device_hours=device_hours,
                    restart_s=restart_s,
                    checkpoint_bytes=CHECKPOINT_BYTES * model.parameters,
                    storage_bytes_per_s=storage_bps / 8,
                    is_asynchronous=not self.is_synchronous,
                ),
            )
            for device_hours, restart_s, storage_bps in each
        )
        return worst, usual, best


USUAL_TROUBLES = Troubles()
_UNIT = "[A-DF-Za-df-z][A-Za-z/]*"  # no unit begins with the e of an exponent
_RANGE = re.compile(
    rf"\s*(?P<low>{NUMBER})\s*(?P<low_unit>(?:{_UNIT})?)\s*-"
    rf"\s*(?P<high>{NUMBER})\s*(?P<unit>(?:{_UNIT})?)\s*"
)


def between_failures(given: str | float) -> Ends:
    """Read device-hours between two failures. A single number may be off by a factor of two."""
    expected = "device-hours between two of them, like 50000, or the least and the most, like"
    low, high = _ends(given, ratio, "failures", f"{expected} 15000-60000")
    is_range = _RANGE.fullmatch(str(given)) is not None
    return _around(low, high) if is_range else (low / 2, low, 2 * low)


def restart_time(given: str | float) -> Ends:
    """Read the seconds from a failure to reading the checkpoint. A single time is exact."""
    expected = "a time, like 10min, or the least and the most, like 5min-30min"
    return _around(*_ends(given, seconds, "restart", expected))


def storage_rate(given: str | float) -> Ends:
    """Read the bits a second at which checkpoints are written. A single rate is exact."""
    expected = "a rate, like 200GB/s, or the least and the most, like 100GB/s-200GB/s"
    return _around(*_ends(given, bits_per_second, "storage", expected))


def _ends(
    given: str | float, read: Callable[[str | float, str], float], name: str, expected: str
) -> tuple[float, float]:
    """Read a range LOW-HIGH, or one value as both ends.

    A low end without a unit has that of the high end.
    """
    ends = [given]
    if both := _RANGE.fullmatch(str(given)):
        ends = [both["low"] + (both["low_unit"] or both["unit"]), both["high"] + both["unit"]]
    try:
        low, high = read(ends[0], name), read(ends[-1], name)
    except UsageError:
        raise UsageError(f"{name}: expected {expected}, got {shown(given)}") from None
    why = "the first is more than the second" if low > high else "the least is 0"
    if low > high or (low == 0 and both):
        raise UsageError(f"{name}: expected {expected}, got {shown(given)}: {why}")
    return low, high


def _around(low: float, high: float) -> Ends:
    """Return both ends with their geometric mean, as that of the published trainings."""
    return low, math.sqrt(low * high), high
