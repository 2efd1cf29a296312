"""The conditions under which a step is replayed, as a what-if gives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast, get_args

from fullwire.clusters.cluster import Cluster, one_switch
from fullwire.collectives.registry import names, with_formula
from fullwire.collectives.tuning import AUTO
from fullwire.compression.compressor import Compressor
from fullwire.errors import UsageError
from fullwire.simulation.buckets import BucketPolicy, DdpBuckets
from fullwire.simulation.stragglers import AsRecorded, Jitter
from fullwire.simulation.transport import FullTransport, Transport

Order: TypeAlias = Literal["fifo", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One set of conditions for a training step.

    Workers are around one switch, each behind a link of this line rate. Or they are the first
    devices of a described cluster. Its NICs then have this rate and latency.
    """

    workers: int
    rate_bps: float
    latency_s: float = 0.0
    cluster: Cluster | None = None
    compressor: Compressor = field(default_factory=lambda: Compressor(ratio=1))
    transport: Transport = field(default_factory=FullTransport)
    buckets: BucketPolicy = field(default_factory=DdpBuckets)
    algorithm: str = "ring"
    jitter: Jitter = field(default_factory=AsRecorded)
    lane: Order = "fifo"
    is_scattered: bool = False

    def __post_init__(self) -> None:
        one_switch(workers=self.workers, rate_bps=self.rate_bps, latency_s=self.latency_s)
        is_cluster = self.cluster is not None and not self.cluster.is_flat
        known = (*(names if is_cluster else with_formula)("allreduce"), AUTO)
        if self.algorithm not in known:
            raise UsageError(f"algorithm: expected {' or '.join(known)}, got {self.algorithm!r}")
        if self.algorithm not in (*with_formula("allreduce"), AUTO) and not isinstance(
            self.transport, FullTransport
        ):
            raise UsageError(
                f"algorithm: {self.algorithm} is known with a full transport only, "
                f"got {self.transport}"
            )


def lane_order(text: str) -> Order:
    """Read the order of a communication lane."""
    for order in get_args(Order):
        if text == order:
            return cast(Order, order)
    raise UsageError(f"lane: expected fifo or priority, got {text!r}")
