"""The conditions under which a step is replayed: what is asked when someone says "what if"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast, get_args

from fullwire.clusters.cluster import Cluster
from fullwire.clusters.fabric import Fabric
from fullwire.collectives.cluster_plan import cluster_algorithms
from fullwire.collectives.plan import algorithms
from fullwire.collectives.tuning import AUTO
from fullwire.compression.compressor import Compressor
from fullwire.errors import UsageError
from fullwire.simulation.buckets import BucketPolicy, DdpBuckets
from fullwire.simulation.stragglers import AsRecorded, Jitter
from fullwire.simulation.transport import FullTransport, Transport

Order: TypeAlias = Literal["fifo", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One set of conditions for a training step."""

    cluster: Cluster
    compressor: Compressor = field(default_factory=lambda: Compressor(ratio=1))
    transport: Transport = field(default_factory=FullTransport)
    buckets: BucketPolicy = field(default_factory=DdpBuckets)
    algorithm: str = "ring"
    jitter: Jitter = field(default_factory=AsRecorded)
    lane: Order = "fifo"
    fabric: Fabric | None = None
    is_scattered: bool = False

    def __post_init__(self) -> None:
        self.cluster.check_equal_links()
        is_cluster = self.fabric is not None and not self.fabric.is_flat
        known = (*(cluster_algorithms if is_cluster else algorithms)("allreduce"), AUTO)
        if self.algorithm not in known:
            raise UsageError(f"algorithm: expected {' or '.join(known)}, got {self.algorithm!r}")
        if self.algorithm not in (*algorithms("allreduce"), AUTO) and not isinstance(
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
