"""Around a ring: every rank hands on to the next, so that all links carry equally much."""

from __future__ import annotations

import numpy as np

from fullwire.collectives.cost import AddTimes, Cost, Floats
from fullwire.collectives.registry import Algorithm, Costs, Exactly, Statement, Wires
from fullwire.collectives.rings import one_ring
from fullwire.collectives.stages import Layout, Stated, stage
from fullwire.errors import UsageError

_MOST_HOPS = 100_000  # each is a stage of its own; to state so many takes some four seconds


def _chain(_op: str, layout: Layout) -> Stated:
    if layout.workers - 1 > _MOST_HOPS:
        raise UsageError(
            f"a broadcast by ring makes {layout.workers - 1:,} hops one after another: at most "
            f"{_MOST_HOPS:,} are played: ask with --level closed, or for --algorithm tree"
        )
    ranks = np.arange(layout.workers)
    hops = (
        stage(ranks[hop : hop + 1], ranks[hop + 1 : hop + 2], reduces=False)
        for hop in range(layout.workers - 1)
    )
    return Stated(1, (tuple(hops),))


def _all_reduce_cost(workers: int, size: Floats, adds: AddTimes) -> Cost:
    steps = workers - 1
    return Cost(2 * size * steps / workers, 2 * steps, steps * adds(size / workers))


def _reduce_scatter_cost(workers: int, size: Floats, adds: AddTimes) -> Cost:
    steps = workers - 1
    return Cost(size * steps / workers, steps, steps * adds(size / workers))


def _all_gather_cost(workers: int, size: Floats, _adds: AddTimes) -> Cost:
    return Cost(size * (workers - 1) / workers, workers - 1, np.zeros_like(size))


def _exactly(costs: Costs, *, reducing: int, copying: int) -> Exactly:
    """Make the exact time of a ring, by how often it goes around reducing and copying."""

    def exactly_s(wires: Wires, size_bytes: float, adds: AddTimes, chunks: int) -> float:
        if chunks == 1:
            return wires.time_s(costs, size_bytes, adds)
        # A rank can begin round r+1 when two things are done. Its first chunk of round r has come
        # round and been added, and its own chunks of round r have left. The later sets the pace.
        steps = wires.workers - 1
        block_bytes = size_bytes / chunks / wires.workers
        send_s = 8 * block_bytes / wires.rate_bps
        add_s = float(adds(block_bytes))
        return_s = [send_s + wires.latency_s + add_s] * (reducing * steps)
        return_s += [send_s + wires.latency_s] * (copying * steps)
        pace_s = [max(chunks * send_s, time_s) for time_s in return_s]
        return sum(pace_s[:-1]) + (chunks - 1) * send_s + return_s[-1]

    return exactly_s


def _chain_s(wires: Wires, size_bytes: float, _adds: AddTimes, chunks: int) -> float:
    """Time a chain: one hop after another, and the chunks behind the first."""
    chunk_s = 8 * (size_bytes / chunks * (wires.workers - 1)) / wires.rate_bps
    first_s = chunk_s + ((wires.workers - 1) * wires.latency_s + 0.0)
    return first_s + (chunks - 1) * 8 * size_bytes / chunks / wires.rate_bps


ALGORITHM = Algorithm(
    name="ring",
    label="around a ring: reduce-scatter, then all-gather. A broadcast goes along a chain",
    place=10,
    ops={
        "allreduce": Statement(
            states=one_ring,
            costs=_all_reduce_cost,
            exactly_s=_exactly(_all_reduce_cost, reducing=1, copying=1),
        ),
        "reducescatter": Statement(
            states=one_ring,
            costs=_reduce_scatter_cost,
            exactly_s=_exactly(_reduce_scatter_cost, reducing=1, copying=0),
        ),
        "allgather": Statement(
            states=one_ring,
            costs=_all_gather_cost,
            exactly_s=_exactly(_all_gather_cost, reducing=0, copying=1),
        ),
        "broadcast": Statement(
            states=_chain,
            costs=lambda workers, size, _: Cost(size, workers - 1, np.zeros_like(size)),
            exactly_s=_chain_s,
            is_pipelined=True,
        ),
    },
)
