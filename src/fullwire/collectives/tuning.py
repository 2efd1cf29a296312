"""The algorithm that is cheapest by the closed forms: for each size, and where the choice turns.

`--algorithm auto` uses this. Of equal times the first algorithm of `algorithms(op)` wins, the usual
one. The formula for a double tree is its time at full utilization: cut into many chunks, it comes
near that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fullwire.clusters.cluster import Cluster
from fullwire.collectives.closed_form import cost
from fullwire.collectives.cost import AddTimes, Floats
from fullwire.collectives.library import library_times_s
from fullwire.collectives.link_cost import LinkCost
from fullwire.collectives.registry import open_to

AUTO = "auto"
LIBRARY = "library"  # for each size what the library of a fitted cluster takes, by its tables
Times: TypeAlias = Callable[[Floats], Mapping[str, Floats]]  # of sizes, by algorithm
_LEAST_BYTES, MOST_BYTES = 1, 2**34


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest algorithm for one size, and the time of each."""

    bytes: int
    algorithm: str
    time_s: float
    times_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Range:
    """The sizes for which an algorithm is the cheapest, with both ends; None is an open end."""

    algorithm: str
    from_bytes: int
    to_bytes: int | None


@dataclass(frozen=True, slots=True)
class Tuning:
    """The choices on one cluster by the formulas: where they turn, and a table of sizes."""

    ranges: tuple[Range, ...]
    table: tuple[Choice, ...]
    in_one_piece: tuple[str, ...] = ()  # that chunks may make quicker than they are here


def around_a_switch(op: str, cluster: Cluster, adds: AddTimes) -> Times:
    """Return the time of a collective by each algorithm with a formula, on a single switch."""
    names, nics = open_to(op, cluster), cluster.nics

    def times_s(sizes: Floats) -> Mapping[str, Floats]:
        costs = {name: cost(op, name, cluster.devices, sizes, adds) for name in names}
        return {name: cost.time_s(nics.rate_bps, nics.latency_s) for name, cost in costs.items()}

    return times_s


def over_links(costs: Mapping[str, Sequence[LinkCost]], adds: AddTimes) -> Times:
    """Return the time of a collective by each algorithm, from these costs on a cluster.

    An algorithm has a cost for each protocol of the cluster's library; the quickest is taken.
    """

    def quickest_s(sizes: Floats) -> Mapping[str, Floats]:
        return {
            name: np.min([cost.whole_s(sizes, adds) for cost in of_name], axis=0)
            for name, of_name in costs.items()
        }

    return quickest_s


def or_in_chunks(times_s: Times, curves: Mapping[str, Sequence[tuple[Floats, Floats]]]) -> Times:
    """Return the same times, where chunks take less: by algorithm, times of ascending sizes.

    Smaller messages are not cut so often.
    """

    def quicker_s(sizes: Floats) -> Mapping[str, Floats]:
        quicker = dict(times_s(sizes))
        for name, of_name in curves.items():
            for shown, shown_s in of_name:
                chunked_s = np.interp(sizes, shown, shown_s, left=np.inf)
                quicker[name] = np.minimum(quicker[name], chunked_s)
        return quicker

    return quicker_s


def or_as_libraries(times_s: Times, op: str, cluster: Cluster, workers: int) -> Times:
    """Return the same times, where libraries take less by their usual protocols theirs.

    Tables of the cluster itself say what its library takes, so they count though they say more.
    """

    def quicker_s(sizes: Floats) -> Mapping[str, Floats]:
        quicker = dict(times_s(sizes))
        for name, library_s in library_times_s(op, cluster, workers, sizes).items():
            played_s = quicker.get(name) if cluster.measured is None else None
            quicker[name] = library_s if played_s is None else np.minimum(played_s, library_s)
        return quicker

    return quicker_s


def tuned(times_s: Times, in_one_piece: tuple[str, ...] = ()) -> Tuning:
    """Return the cheapest algorithm for each size, and the sizes where it changes."""
    sizes = [4**power for power in range(1, 18)]
    return Tuning(
        ranges=tuple(ranges(times_s)),
        table=tuple(choices(times_s, sizes)),
        in_one_piece=in_one_piece,
    )


def choices(times_s: Times, sizes: Sequence[int]) -> Iterator[Choice]:
    """Choose for each of these sizes."""
    times = times_s(np.array(sizes, np.float64))
    for place, size in enumerate(sizes):
        here = {name: float(times_s[place]) for name, times_s in times.items()}
        best = min(here, key=lambda name: here[name])  # of equals the first
        yield Choice(size, best, here[best], here)


def ranges(times_s: Times) -> Iterator[Range]:
    """Go through sizes upwards, and find to the byte where the choice turns."""

    def best(size: int) -> str:
        return next(choices(times_s, [size])).algorithm

    first, begin = best(_LEAST_BYTES), _LEAST_BYTES
    size = _LEAST_BYTES
    while size < MOST_BYTES:
        if (then := best(2 * size)) != first:
            below, above = size, 2 * size
            while above - below > 1:
                middle = (below + above) // 2
                below, above = (middle, above) if best(middle) == first else (below, middle)
            yield Range(first, begin, below)
            first, begin = then, above
        size *= 2
    yield Range(first, begin, None)
