"""The cluster, as traffic sees it: workers around one switch that never is the bottleneck.

Every worker has a link of its own, full duplex: what it sends does not slow what it receives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullwire.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """So many workers, each behind a link of this line rate; `latency_s` is one way.

    `other_rates_bps` names the workers whose line rate differs: pairs of worker and rate.
    """

    workers: int
    rate_bps: float
    latency_s: float = 0.0
    other_rates_bps: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers: expected at least 1, got {self.workers}")
        for rate_bps in (self.rate_bps, *(rate for _, rate in self.other_rates_bps)):
            if not (rate_bps > 0 and math.isfinite(rate_bps)):
                raise UsageError(f"line rate: expected more than 0 bit/s, got {rate_bps}")
        for worker, _ in self.other_rates_bps:
            if not 0 <= worker < self.workers:
                raise UsageError(
                    f"line rate: expected a worker from 0 to {self.workers - 1}, got {worker}"
                )
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise UsageError(f"latency: expected 0 s or more, got {self.latency_s}")

    def check_equal_links(self) -> None:
        """Refuse links that differ, for a model that knows one line rate."""
        if self.other_rates_bps:
            raise UsageError("this prediction needs links of one line rate; some workers' differ")

    def link_rate_bps(self, worker: int) -> float:
        """Return the line rate of one worker's link."""
        return dict(self.other_rates_bps).get(worker, self.rate_bps)
