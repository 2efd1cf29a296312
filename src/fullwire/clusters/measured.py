"""Figures of a cluster from tables of measured collectives; its description cannot know them.

A collective library moves bytes by a few protocols. One starts quickly and fills little of a link,
one fills links and starts slowly, and one is between these. NCCL calls them LL, LL128 and Simple.
For each operation, size and number of workers the library takes a protocol and an algorithm. Each
protocol has a start-up, and the costs of a hop within a node and between nodes. It also has the
shares of the two line rates that it fills. `collectives.library` makes times of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.errors import UsageError

MOST_SHARE = 4.0  # of a described line rate: switches that add let an all-reduce exceed it


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One way in which the library moves bytes."""

    name: str
    startup_s: float
    inside_hop_s: float  # the cost of each message in a row within a node
    between_hop_s: float  # and from node to node
    inside_share: float  # the filled shares of the line rates
    between_share: float

    def __post_init__(self) -> None:
        for key in ("startup_s", "inside_hop_s", "between_hop_s"):
            value = getattr(self, key)
            if not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"{key.removesuffix('_s')}: expected 0 s or more, got {value}")
        for key in ("inside_share", "between_share"):
            value = getattr(self, key)
            if not 0 < value <= MOST_SHARE:
                raise UsageError(f"{key}: expected above 0, up to {MOST_SHARE:g}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One table: at each size, how many times as long as the protocols predict it took."""

    op: str
    workers: int
    bytes: tuple[int, ...]  # ascending
    times: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.bytes or len(self.bytes) != len(self.times):
            raise UsageError(
                f"times: expected one for each of {len(self.bytes)} sizes, got {len(self.times)}"
            )
        if list(self.bytes) != sorted(set(self.bytes)):
            raise UsageError("bytes: expected sizes in ascending order, each once")
        if not all(value > 0 and math.isfinite(value) for value in self.times):
            raise UsageError("times: expected numbers above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a fit: protocols, the tree between nodes, each table, and the uncertainty.

    A tree fills `tree_share` of the rate that a ring fills (0 if the library has no tree). Of the
    NICs, trees and all-to-alls fill `tree_nics_share` of a ring's share. Between two nodes a tree
    may gain nothing over a ring (`pair_share` 1) or send half as much (0). If nothing tells which,
    a time may lie between both: `half_weight` of the way to the second. Switches that add fill
    `switch_share` of the rate that a ring fills (0 in older fits, which did not know them).
    `spread` is the standard deviation of the logarithm of a time, on a device count that the tables
    have. `other` is a fit that the tables allow as well, and may have an `other` of its own.
    """

    protocols: tuple[Protocol, ...]
    tree_share: float
    pair_share: float
    spread: float
    source: str
    shown: tuple[Shown, ...] = ()
    switch_share: float = 0.0
    half_weight: float = 0.0
    tree_nics_share: float = 1.0
    other: Measured | None = None

    def __post_init__(self) -> None:
        if not self.protocols:
            raise UsageError("protocols: expected at least one")
        if not 0 <= self.tree_share <= MOST_SHARE:
            raise UsageError(f"tree_share: expected 0 or more, got {self.tree_share}")
        if not 0 <= self.switch_share <= MOST_SHARE:
            raise UsageError(f"switch_share: expected 0 or more, got {self.switch_share}")
        if not 0 <= self.pair_share <= 1:
            raise UsageError(f"pair_share: expected from 0 to 1, got {self.pair_share}")
        if not 0 < self.tree_nics_share <= 1:
            raise UsageError(
                f"tree_nics_share: expected above 0, up to 1, got {self.tree_nics_share}"
            )
        if not 0 <= self.half_weight <= 1:
            raise UsageError(f"half_weight: expected from 0 to 1, got {self.half_weight}")
        if not (self.spread >= 0 and math.isfinite(self.spread)):
            raise UsageError(f"spread: expected 0 or more, got {self.spread}")

    @property
    def half(self) -> float:
        """Return how far it is from the usual tree of two nodes to the one that sends half."""
        return self.half_weight if self.pair_share else 1.0

    def allowed(self) -> Iterator[Measured]:
        """Yield this fit and the others that the tables allow, the likeliest first."""
        measured: Measured | None = self
        while measured is not None:
            yield measured
            measured = measured.other
