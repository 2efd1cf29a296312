"""Failures, restarts and checkpoints of a training, and how long it takes with them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

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
from fullwire.units import NUMBER, ratio, shown
from fullwire.workloads.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Troubles:
    """Failures and checkpoints of a training, as the user gives them. None takes the usual one."""

    device_hours: tuple[float, float, float] | None = None  # between two failures: as `ranges`
    storage_bps: float | None = None
    restart_s: float | None = None
    is_synchronous: bool = False

    def ranges(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Return device-hours between failures and seconds of a restart: low, usual, high."""
        hours, restart_s = self.device_hours or PUBLISHED_DEVICE_HOURS, self.restart_s
        return hours, USUAL_RESTART_S if restart_s is None else (restart_s,) * 3

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
        self,
        cluster: Cluster,
        model: Architecture,
        work_s: float,
        device_hours: float,
        restart_s: float,
    ) -> Goodput:
        """Return the course of a training that takes so long without failures."""
        storage_bps = self.storage_bps
        known = Reliability(
            device_hours=device_hours,
            restart_s=restart_s,
            checkpoint_bytes=CHECKPOINT_BYTES * model.parameters,
            storage_bytes_per_s=(
                NODE_BYTES_PER_S * cluster.nodes if storage_bps is None else storage_bps / 8
            ),
            is_asynchronous=not self.is_synchronous,
        )
        return goodput(work_s, cluster.devices, known)


USUAL_TROUBLES = Troubles()
_RANGE = re.compile(rf"\s*({NUMBER})\s*-\s*({NUMBER})\s*")


def between_failures(given: str | float) -> tuple[float, float, float]:
    """Read device-hours between two failures: the least, the usual and the most.

    A single number may be off by a factor of two. The usual one of a range is the geometric mean
    of its ends, as that of the published trainings.
    """
    both = _RANGE.fullmatch(given) if isinstance(given, str) else None
    try:
        ends = [ratio(end, "failures") for end in ([given] if both is None else both.groups())]
    except UsageError:
        ends = []
    if not ends or ends[0] > ends[-1]:
        raise UsageError(
            "failures: expected device-hours between two of them, like 50000, or the least and the "
            f"most, like 15000-60000, got {shown(given)}"
        )
    if len(ends) == 1:
        return ends[0] / 2, ends[0], 2 * ends[0]
    low, high = ends
    return low, math.sqrt(low * high), high
