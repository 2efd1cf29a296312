"""The common parts of algorithms that exchange with partners at distances 1, 2, 4 ..."""

from __future__ import annotations

from fullwire.clusters.cluster import Cluster
from fullwire.collectives.cost import AddTimes
from fullwire.collectives.registry import Costs, Exactly, Wires
from fullwire.errors import UsageError


def power_of_two_within(workers: int) -> int:
    """Return the largest power of two up to `workers`."""
    return int(1 << (workers.bit_length() - 1))


def even_unless_all_reduce(op: str, _cluster: Cluster, workers: int) -> bool:
    """Fit any number of workers in an all-reduce, else a power of two."""
    return op == "allreduce" or workers == power_of_two_within(workers)


def exactly_at_powers_of_two(name: str, costs: Costs) -> Exactly:
    """Take a formula as exact for a power of two of workers and one chunk, and refuse others."""

    def exactly_s(wires: Wires, size_bytes: float, adds: AddTimes, chunks: int) -> float:
        if wires.workers != power_of_two_within(wires.workers):
            raise UsageError(
                f"no closed form is exact for {name} over {wires.workers} workers, only for a "
                "power of two: ask with --level event"
            )
        if chunks > 1:
            raise UsageError(
                f"no closed form is exact for pipelined chunks of {name}: "
                "ask with --level event, --chunks 1 or --chunk-order serial"
            )
        return wires.time_s(costs, size_bytes, adds)

    return exactly_s
