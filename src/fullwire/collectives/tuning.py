"""Which algorithm is cheapest by the closed forms: for each size on a cluster, and where it turns.

`--algorithm auto` asks this. Of equal times the first algorithm of `algorithms(op)` wins, the usual
one. The formula for a double tree is its time at full utilization: cut into many chunks, it comes
near that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fullwire.clusters.cluster import Cluster
from fullwire.clusters.fabric import Fabric
from fullwire.collectives.cluster_plan import applicable_on
from fullwire.collectives.cost import AddTimes, Floats, cost
from fullwire.collectives.fabric_cost import FabricCost
from fullwire.collectives.plan import algorithms, power_of_two_within

AUTO = "auto"
Times: TypeAlias = Callable[[Floats], Mapping[str, Floats]]  # of sizes, by algorithm
# Not every switch adds, and servers are a way to train of its own.
_ASKED_FOR = ("in-network", "parameter-server")
_LEAST_BYTES, _MOST_BYTES = 1, 2**34


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest algorithm for one size, and what each would take."""

    bytes: int
    algorithm: str
    time_s: float
    times_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Range:
    """The sizes for which an algorithm is the cheapest; both ends belong to it, None is no end."""

    algorithm: str
    from_bytes: int
    to_bytes: int | None


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the formulas say of one cluster: where choices turn, and a table of sizes."""

    ranges: tuple[Range, ...]
    table: tuple[Choice, ...]


def applicable(op: str, workers: int) -> tuple[str, ...]:
    """List the algorithms that so many workers can use."""
    is_even = workers == power_of_two_within(workers)
    return tuple(
        each
        for each in algorithms(op)
        if is_even or each != "halving-doubling" or op == "allreduce"
    )


def around_a_switch(op: str, cluster: Cluster, adds: AddTimes) -> Times:
    """Return what a collective takes by each algorithm, among workers around a switch."""

    def times_s(sizes: Floats) -> Mapping[str, Floats]:
        return {
            each: cost(op, each, cluster.workers, sizes, adds).time_s(
                cluster.rate_bps, cluster.latency_s
            )
            for each in applicable(op, cluster.workers)
        }

    return times_s


def open_to(op: str, fabric: Fabric, workers: int | None) -> tuple[str, ...]:
    """List the algorithms that ranks on a cluster can use without being asked for by name."""
    return tuple(each for each in applicable_on(op, fabric, workers) if each not in _ASKED_FOR)


def over_links(costs: Mapping[str, FabricCost], adds: AddTimes) -> Times:
    """Return what a collective takes by each algorithm, as these costs on a cluster say."""
    return lambda sizes: {name: each.whole_s(sizes, adds) for name, each in costs.items()}


def tuned(times_s: Times) -> Tuning:
    """Say which algorithm is the cheapest for which sizes."""
    sizes = [4**power for power in range(1, 18)]
    return Tuning(ranges=tuple(ranges(times_s)), table=tuple(choices(times_s, sizes)))


def choices(times_s: Times, sizes: Sequence[int]) -> Iterator[Choice]:
    """Choose for each of these sizes."""
    times = times_s(np.array(sizes, np.float64))
    for place, size in enumerate(sizes):
        here = {name: float(each[place]) for name, each in times.items()}
        best = min(here, key=lambda name: here[name])  # of equals the first
        yield Choice(size, best, here[best], here)


def ranges(times_s: Times) -> Iterator[Range]:
    """Go through sizes upwards, and find to the byte where the choice turns."""

    def best(size: int) -> str:
        return next(choices(times_s, [size])).algorithm

    first, begin = best(_LEAST_BYTES), _LEAST_BYTES
    size = _LEAST_BYTES
    while size < _MOST_BYTES:
        if (then := best(2 * size)) != first:
            below, above = size, 2 * size
            while above - below > 1:
                middle = (below + above) // 2
                below, above = (middle, above) if best(middle) == first else (below, middle)
            yield Range(first, begin, below)
            first, begin = then, above
        size *= 2
    yield Range(first, begin, None)
