"""The cost of a collective by formula, whether it is planned or was seen in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from fullwire.collectives.cost import AddTimes, Cost, bus_factor
from fullwire.collectives.plan import plan
from fullwire.collectives.registry import OPS, Wires, statement, with_formula
from fullwire.compression.compressor import Combining
from fullwire.errors import UsageError

_MOST_PLAYED = 64  # ranks whose transfers are counted


def cost(op: str, algorithm: str, workers: int, size_bytes: ArrayLike, adds: AddTimes) -> Cost:
    """Return the cost of a collective of these sizes among so many workers."""
    costs = statement(op, algorithm).costs
    if costs is None:
        usual = " or ".join(with_formula(op))
        raise UsageError(f"algorithm for {op}: expected {usual}, got {algorithm!r}")
    size = np.asarray(size_bytes, np.float64)
    if workers == 1:
        return Cost(np.zeros_like(size), 0, np.zeros_like(size))
    return costs(workers, size, adds)


def recorded_cost(op: str, workers: int, size_bytes: ArrayLike, adds: AddTimes) -> Cost:
    """Return the cost of a run's collective; no run records its algorithm."""
    return cost(*recorded_as(op), workers, size_bytes, adds)


@cache
def host_load(op: str, algorithm: str, workers: int, per_host: int) -> float:
    """Return the bytes that a host's link carries each way, over those of a rank with its own link.

    Ranks are on hosts in their order. A ring then crosses each link once in either direction. In an
    all-to-all each rank of a host sends to each rank of the others.
    """
    if per_host == 1 or (algorithm == "ring" and op != "alltoall"):
        return 1.0
    if op == "alltoall":
        return per_host * (workers - per_host) / (workers - 1)
    among = per_host * max(2, _MOST_PLAYED // per_host)  # larger jobs have about the same loads
    found = plan(op, algorithm, min(workers, among))
    host = np.arange(found.seats) // per_host
    sent, by_rank = np.zeros((2, host[-1] + 1)), np.zeros((2, found.seats))
    for part in found.parts:
        ends = part.source, part.target
        crosses = host[ends[0]] != host[ends[1]]
        for way, end in enumerate(ends):
            np.add.at(sent[way], host[end][crosses], part.block_count[crosses])
            np.add.at(by_rank[way], end, part.block_count)
    return float(sent.max() / by_rank.max())


def mean_sent_bytes(op: str, workers: int, size_bytes: float) -> float:
    """Return the bytes that a rank sends in a run's collective, as the mean of its ranks.

    A run does not name the roots of its broadcasts. Where ranks own parameters, each is one. A rank
    that takes a transfer sends nothing.
    """
    if op == "recv":
        return 0.0
    if op == "broadcast":
        return size_bytes * (1 - 1 / workers)
    return float(recorded_cost(op, workers, size_bytes, AddTimes()).sent_bytes)


def half_a_part(op: str, workers: int) -> float:
    """Return half of a rank's part of a gather, as a share of its bytes on the wire.

    It is 0 among more ranks, where other ranks than those that send to one receive from it.
    """
    return 0.5 if (op, workers) == ("allgather", 2) else 0.0


def recorded_as(op: str) -> tuple[str, str]:
    """Return the collective with a known cost that stands for one of a run, and its algorithm."""
    return _LIKELY.get(op, _OTHERS)


def on_wire(op: str) -> tuple[str, str]:
    """Return the collective whose transfers those of a run resemble, and its algorithm."""
    return ("alltoall", "ring") if op == "alltoall" else recorded_as(op)


def sent_as(op: str, backend: object) -> str:
    """Return the collective whose messages a backend sends for one.

    Gloo carries out a reduce-scatter as an all-reduce: a lab's NICs counted the bytes of one.
    """
    return "allreduce" if (op, backend) == ("reducescatter", "gloo") else op


# The collective with a known cost that stands for each kind.
_LIKELY: Mapping[str, tuple[str, str]] = {
    "allreduce": ("allreduce", "ring"),
    "barrier": ("allreduce", "ring"),
    "reducescatter": ("reducescatter", "ring"),
    "alltoall": ("reducescatter", "ring"),
    "allgather": ("allgather", "ring"),
}
_OTHERS = ("broadcast", "tree")


def exact_s(
    op: str,
    algorithm: str,
    wires: Wires,
    size_bytes: float,
    adds: AddTimes,
    *,
    chunks: int,
    serial: bool,
) -> float:
    """Return the time of a collective cut into chunks, where a formula is exact."""
    exactly_s = statement(op, algorithm).exactly_s
    if exactly_s is None:
        raise UsageError(f"no closed form is exact for {op} by {algorithm}: ask with --level event")
    if wires.workers == 1:
        return 0.0
    if serial:
        return chunks * exactly_s(wires, size_bytes / chunks, adds, 1)
    return exactly_s(wires, size_bytes, adds, chunks)


def observed_cost(op: str, algorithm: str, workers: int, size_bytes: ArrayLike) -> Cost:
    """Return the cost of a collective that a trace names, even where there is no plan for it.

    Where this algorithm lacks the operation, the usual algorithm's cost counts. An operation
    without any plan sends as much as an ideal one must, around as many ranks.
    """
    size = np.asarray(size_bytes, np.float64)
    usual = with_formula(op) if op in OPS else ()
    if usual:
        return cost(op, algorithm if algorithm in usual else usual[0], workers, size, AddTimes())
    sent = bus_factor(op, workers) if workers > 1 else 0.0
    return Cost(sent * size, workers - 1, np.zeros_like(size))


def gradient_cost(
    combining: Combining, algorithm: str, workers: int, size_bytes: ArrayLike, adds: AddTimes
) -> Cost:
    """Return the cost of one message of gradients before any packing."""
    size = np.asarray(size_bytes, np.float64)
    if combining == "sum":
        return cost("allreduce", algorithm, workers, size, adds)
    if combining == "exchange":
        # A ring's bytes and additions. All parts go to their owners at once; a ring gathers them.
        return replace(cost("allreduce", "ring", workers, size, adds), hops=workers)
    # Messages that cannot be summed on the way go to every worker, which adds them on arrival.
    gathered = cost("allgather", "ring", workers, size * workers, adds)
    return replace(gathered, add_s=(workers - 1) * adds(size))
