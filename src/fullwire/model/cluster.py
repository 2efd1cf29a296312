"""The cluster, as traffic sees it: workers around one switch that never is the bottleneck.

Every worker has a link of its own, full duplex: what it sends does not slow what it receives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullwire.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """So many workers, each behind a link of this line rate; `latency_s` is one way."""

    workers: int
    rate_bps: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers: expected at least 1, got {self.workers}")
        if not (self.rate_bps > 0 and math.isfinite(self.rate_bps)):
            raise UsageError(f"line rate: expected more than 0 bit/s, got {self.rate_bps}")
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise UsageError(f"latency: expected 0 s or more, got {self.latency_s}")
