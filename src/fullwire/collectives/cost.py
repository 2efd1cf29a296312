"""What a collective costs in closed form: bytes and messages in a row, and adds.

    time = 8 * wire_bytes / rate + hops * latency + add time

For a ring all-reduce of S bytes over N workers this is the cost that Zhang et al. (NetAI 2020) use,
2 * 8 S (N-1)/N / rate + (N-1) AddEst(S/N), with latency added. It holds where no two transfers meet
on a link and the links are equal. In a double binary tree they do meet: what stands here is then
the time at full utilization, every link busy from the first to the last bit, and a transfer-level
simulation lies above it (validation/README.md says by how much). Beyond a power of two, halving and
a binomial tree are a little faster than this, because some ranks need not wait for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fullwire.clusters.cluster import Cluster
from fullwire.collectives.plan import OPS, algorithms, power_of_two_within
from fullwire.compression.compressor import Combining
from fullwire.errors import UsageError

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class AddTimes:
    """Measured times of adding two vectors; between sizes a straight line, beyond them flat."""

    points: tuple[tuple[float, float], ...] = ()  # (bytes, seconds), bytes ascending

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)):
            raise UsageError("add times: expected sizes in ascending order, each once")

    def __call__(self, size_bytes: ArrayLike) -> Floats:
        """Estimate the time to add two vectors of these sizes; zero without measurements."""
        wanted = np.asarray(size_bytes, np.float64)
        if not self.points:
            return np.zeros_like(wanted)
        sizes, times = zip(*self.points, strict=True)
        return np.asarray(np.interp(wanted, sizes, times), np.float64)


@dataclass(frozen=True, eq=False, slots=True)
class Cost:
    """The three terms of a collective's time, for one size or many."""

    wire_bytes: Floats  # one after another
    hops: int  # messages that wait for each other
    add_s: Floats
    idle_bytes: Floats | float = 0.0  # of the wire's: what the busiest link itself need not send

    @property
    def sent_bytes(self) -> Floats:
        """Return the bytes that the busiest link sends."""
        return self.wire_bytes - self.idle_bytes

    def time_s(self, rate_bps: float, latency_s: float) -> Floats:
        """Return the time on links of this rate and latency."""
        return 8 * self.wire_bytes / rate_bps + (self.hops * latency_s + self.add_s)


def cost(op: str, algorithm: str, workers: int, size_bytes: ArrayLike, adds: AddTimes) -> Cost:
    """Return what a collective of these sizes costs among so many workers."""
    if algorithm not in algorithms(op):
        known = " or ".join(algorithms(op))
        raise UsageError(f"algorithm for {op}: expected {known}, got {algorithm!r}")
    size = np.asarray(size_bytes, np.float64)
    if workers == 1:
        return Cost(np.zeros_like(size), 0, np.zeros_like(size))
    return _COSTS[op, algorithm](workers, size, adds)


def recorded_cost(op: str, workers: int, size_bytes: ArrayLike, adds: AddTimes) -> Cost:
    """Return what a collective of a run costs, whose algorithm nobody has recorded."""
    return cost(*recorded_as(op), workers, size_bytes, adds)


def recorded_as(op: str) -> tuple[str, str]:
    """Return which collective with a known cost stands for one of a run, and its algorithm."""
    return _LIKELY.get(op, _OTHERS)


def sent_as(op: str, backend: object) -> str:
    """Return the collective whose messages a backend sends for one.

    To scatter a sum, Gloo makes it everywhere: a lab's NICs counted an all-reduce's bytes.
    """
    return "allreduce" if (op, backend) == ("reducescatter", "gloo") else op


# Which of the collectives with a known cost stands for each kind.
_LIKELY: Mapping[str, tuple[str, str]] = {
    "allreduce": ("allreduce", "ring"),
    "barrier": ("allreduce", "ring"),
    "reducescatter": ("reducescatter", "ring"),
    "alltoall": ("reducescatter", "ring"),
    "allgather": ("allgather", "ring"),
}
_OTHERS = ("broadcast", "tree")


def chunked_time_s(
    op: str,
    algorithm: str,
    cluster: Cluster,
    size_bytes: float,
    adds: AddTimes,
    *,
    chunks: int,
    serial: bool,
) -> float:
    """Return the time of a collective cut into chunks, where a closed form is exact."""
    workers, rate_bps, latency_s = cluster.workers, cluster.rate_bps, cluster.latency_s
    if (op, algorithm) == ("allreduce", "tree") and workers > 2:
        raise UsageError("no closed form is exact for a double tree: ask with --level event")
    if algorithm != "ring" and workers != power_of_two_within(workers):
        raise UsageError(
            f"no closed form is exact for {algorithm} over {workers} workers, only for a power of "
            "two: ask with --level event"
        )
    whole = cost(op, algorithm, workers, size_bytes / chunks, adds)
    if op == "broadcast" and algorithm == "ring":  # one hop after another
        whole = Cost(whole.wire_bytes * max(workers - 1, 0), whole.hops, whole.add_s)
    one_chunk_s = float(whole.time_s(rate_bps, latency_s))
    if workers == 1 or chunks == 1 or serial:
        return chunks * one_chunk_s
    if algorithm != "ring":
        raise UsageError(
            f"no closed form is exact for pipelined chunks of {algorithm}: "
            "ask with --level event, --chunks 1 or --chunk-order serial"
        )
    if op == "broadcast":
        return one_chunk_s + (chunks - 1) * 8 * size_bytes / chunks / rate_bps
    return _pipelined_ring_s(op, cluster, size_bytes, adds, chunks)


def bus_factor(op: str, workers: int) -> float:
    """Return the bytes through each link of an ideal collective, per byte of message.

    Sizes are of the whole vector: of the input of a reduce-scatter, of the output of an all-gather.
    """
    share = (workers - 1) / workers
    factors = {"allreduce": 2 * share, "barrier": 0.0} | dict.fromkeys(
        ("reducescatter", "allgather", "alltoall", "gather", "scatter"), share
    )
    return factors.get(op, 1.0)


def observed_cost(op: str, algorithm: str, workers: int, size_bytes: ArrayLike) -> Cost:
    """Return the cost of a collective that a trace names, even where there is no plan for it.

    An operation that this algorithm does not carry out is taken for the usual one's; one without
    any plan sends what an ideal one must, around as many ranks.
    """
    size = np.asarray(size_bytes, np.float64)
    if op in OPS:
        usual = algorithms(op)
        return cost(op, algorithm if algorithm in usual else usual[0], workers, size, AddTimes())
    sent = bus_factor(op, workers) if workers > 1 else 0.0
    return Cost(sent * size, workers - 1, np.zeros_like(size))


def gradient_cost(
    combining: Combining, algorithm: str, workers: int, size_bytes: ArrayLike, adds: AddTimes
) -> Cost:
    """Return what one message of gradients costs before any packing."""
    size = np.asarray(size_bytes, np.float64)
    if combining == "sum":
        return cost("allreduce", algorithm, workers, size, adds)
    # What cannot be summed on the way is gathered from every worker and added up on arrival.
    gathered = cost("allgather", "ring", workers, size * workers, adds)
    return replace(gathered, add_s=(workers - 1) * adds(size))


def _pipelined_ring_s(
    op: str, cluster: Cluster, size_bytes: float, adds: AddTimes, chunks: int
) -> float:
    """Time a ring whose chunks follow each other closely.

    A rank can begin round r+1 when its first chunk of round r has come round, been added, and its
    own chunks of round r have left: the later of the two sets the pace.
    """
    block_bytes = size_bytes / chunks / cluster.workers
    send_s = 8 * block_bytes / cluster.rate_bps
    add_s = float(adds(block_bytes))
    reducing = 0 if op == "allgather" else cluster.workers - 1
    copying = 0 if op == "reducescatter" else cluster.workers - 1
    return_s = [send_s + cluster.latency_s + add_s] * reducing
    return_s += [send_s + cluster.latency_s] * copying
    pace_s = [max(chunks * send_s, time_s) for time_s in return_s]
    return sum(pace_s[:-1]) + (chunks - 1) * send_s + return_s[-1]


def _ring_allreduce(workers: int, size: Floats, adds: AddTimes) -> Cost:
    steps = workers - 1
    return Cost(2 * size * steps / workers, 2 * steps, steps * adds(size / workers))


def _ring_reduce_scatter(workers: int, size: Floats, adds: AddTimes) -> Cost:
    steps = workers - 1
    return Cost(size * steps / workers, steps, steps * adds(size / workers))


def _ring_all_gather(workers: int, size: Floats, adds: AddTimes) -> Cost:
    del adds  # nothing is added
    return Cost(size * (workers - 1) / workers, workers - 1, np.zeros_like(size))


def _chain_broadcast(workers: int, size: Floats, adds: AddTimes) -> Cost:
    del adds
    return Cost(size, workers - 1, np.zeros_like(size))


def _binomial_broadcast(workers: int, size: Floats, adds: AddTimes) -> Cost:
    del adds
    rounds = (workers - 1).bit_length()
    return Cost(size * rounds, rounds, np.zeros_like(size))


def _double_tree_allreduce(workers: int, size: Floats, adds: AddTimes) -> Cost:
    # An inner node of one tree adds two halves (one, while there are not yet four ranks) and
    # is a leaf of the other tree; in bytes the two together fill its link twice.
    halves = min(workers, 4)
    height = (workers - 1).bit_length()
    return Cost(size * halves / 2, 2 * height, (2 if workers > 2 else 1) * adds(size / 2))


def _halving_doubling_allreduce(workers: int, size: Floats, adds: AddTimes) -> Cost:
    core = power_of_two_within(workers)
    halvings = core.bit_length() - 1
    folds = workers > core  # ranks beyond the power of two hand over all, and get all back
    wire_bytes = 2 * size * (core - 1) / core + (2 * size if folds else 0)
    add_s = _halving_adds(halvings, size, adds) + (adds(size) if folds else 0)
    # A partner first receives all of it and in the end sends all of it: each way only once.
    return Cost(wire_bytes, 2 * halvings + (2 if folds else 0), add_s, size if folds else 0.0)


def _halving_reduce_scatter(workers: int, size: Floats, adds: AddTimes) -> Cost:
    halvings = workers.bit_length() - 1
    return Cost(size * (workers - 1) / workers, halvings, _halving_adds(halvings, size, adds))


def _doubling_all_gather(workers: int, size: Floats, adds: AddTimes) -> Cost:
    del adds
    return Cost(size * (workers - 1) / workers, workers.bit_length() - 1, np.zeros_like(size))


def _halving_adds(halvings: int, size: Floats, adds: AddTimes) -> Floats:
    add_s = np.zeros_like(size)
    for halving in range(1, halvings + 1):
        add_s = add_s + adds(size / 2**halving)
    return add_s


_COSTS: Mapping[tuple[str, str], Callable[[int, Floats, AddTimes], Cost]] = {
    ("allreduce", "ring"): _ring_allreduce,
    ("allreduce", "tree"): _double_tree_allreduce,
    ("allreduce", "halving-doubling"): _halving_doubling_allreduce,
    ("reducescatter", "ring"): _ring_reduce_scatter,
    ("reducescatter", "halving-doubling"): _halving_reduce_scatter,
    ("allgather", "ring"): _ring_all_gather,
    ("allgather", "halving-doubling"): _doubling_all_gather,
    ("broadcast", "ring"): _chain_broadcast,
    ("broadcast", "tree"): _binomial_broadcast,
}
