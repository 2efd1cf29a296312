"""The conditions under which a step is replayed: what is asked when someone says "what if"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast, get_args

from fullwire.errors import UsageError
from fullwire.model.cluster import Cluster
from fullwire.model.compressor import Compressor
from fullwire.model.plan import algorithms
from fullwire.simulation.buckets import BucketPolicy, DdpBuckets
from fullwire.units import ratio

Order: TypeAlias = Literal["fifo", "priority"]


@dataclass(frozen=True, slots=True)
class FullTransport:
    """The paper's full utilization: this share of the line rate carries payload, all the time."""

    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"transport share: expected above 0, up to 1, got {self.share:g}")

    def __str__(self) -> str:
        return "full" if self.share == 1 else f"full:{self.share:.12g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One set of conditions for a training step."""

    cluster: Cluster
    compressor: Compressor = field(default_factory=lambda: Compressor(ratio=1))
    transport: FullTransport = FullTransport()
    buckets: BucketPolicy = field(default_factory=DdpBuckets)
    algorithm: str = "ring"
    lane: Order = "fifo"

    def __post_init__(self) -> None:
        self.cluster.check_equal_links()
        if self.algorithm not in algorithms("allreduce"):
            known = " or ".join(algorithms("allreduce"))
            raise UsageError(f"algorithm: expected {known}, got {self.algorithm!r}")


def lane_order(text: str) -> Order:
    """Read the order of a communication lane."""
    for order in get_args(Order):
        if text == order:
            return cast(Order, order)
    raise UsageError(f"lane: expected fifo or priority, got {text!r}")


def transport(text: str) -> FullTransport:
    """Read "full", or "full:0.956" which leaves room for packet headers (1448/1514)."""
    kind, colon, share = text.partition(":")
    if kind != "full" or bool(colon) != bool(share):
        raise UsageError(f"transport: expected full or full:SHARE, like full:0.956, got {text!r}")
    number = ratio(share, "transport share") if share else 1.0
    return FullTransport(number)
