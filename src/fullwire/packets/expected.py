"""What the bytes of an iteration amount to: the gradient, and how many ranks add it up.

A ring of N ranks moves 2(N-1)/N of the gradient over each edge, and so it does between hosts,
however many of the ranks a host has: so bytes tell ranks, where the model's size is known. It is
known if somebody says it, or from the broadcast with which training starts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.edges import Edges
from fullwire.packets.iterations import Iterations
from fullwire.packets.messages import SeenCollectives, broadcast_bytes, bytes_of
from fullwire.packets.pattern import Pattern
from fullwire.run.run import Whole

_MOST_RANKS = 64  # on one host
AGREES = 0.005  # bytes that are that close are the same, but for headers of messages
LARGE = 0.1  # of a gradient: what start-up broadcasts
RINGS = ("ring", "two-way ring")
_SHARDED = 1.5  # times the bytes of an all-reduce: parameters are gathered twice, gradients once
_AT_ONCE = 0.3  # of the time that the less busy way is used: so much is chance
_FAINT = 0.05  # of a slot's bytes: acknowledgements by a library
_ABOUT = 0.02
_REDUCES = ("allreduce", "reducescatter")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Expected:
    """What an iteration's bytes amount to; `None` where they do not say it."""

    edge_bytes: float | None = None
    gradient_bytes: float | None = None
    ranks: int | None = None
    gathered_bytes: float = 0.0  # of parameters, in an iteration
    before: Whole | None = None  # who sent what before the first iteration
    model_bytes: float | None = None
    model_is_told: bool = False  # by a person, not by a broadcast
    if_sharded_bytes: float | None = None  # the gradient, where it may be that instead


def expected_bytes(
    edges: Edges,
    pattern: Pattern,
    iterations: Iterations | None,
    seen: SeenCollectives | None,
    known_ranks: int | None,
    model_bytes: float | None,
) -> Expected:
    """Say what the gradient is, and how many ranks add it up."""
    if iterations is None or not pattern.edge_bytes:
        return Expected(ranks=known_ranks)
    edge_bytes = iterations.usual_bytes
    gradient = pattern.gradient_bytes
    gradient = None if gradient is None else gradient * edge_bytes / pattern.edge_bytes
    before = edges.matrix(np.where(edges.slot < iterations.first_slot, edges.payload_bytes, 0))
    before[~_taking_part(iterations, len(edges.hosts))] = 0
    told = None if seen is None else broadcast_bytes(seen)
    model = model_bytes or told
    if model is None and gradient is not None:
        model = _broadcast(edges, iterations, before, gradient, len(pattern.order))
    ranks = known_ranks
    if pattern.kind in RINGS and gradient is not None:
        ranks = known_ranks or _ranks(len(pattern.order), edge_bytes, model)
        count = ranks or len(pattern.order)
        way = 1 if pattern.kind == "ring" else 2
        gradient = way * edge_bytes * count / (2 * (count - 1))
    gathered, if_sharded = 0.0, None
    if pattern.kind in RINGS and gradient is not None and seen is None:
        turns = _in_turns(edges, pattern, iterations)
        if turns is not None:
            gradient, gathered = turns
        elif model is None:
            if_sharded = gradient / _SHARDED
        elif abs(gradient / _SHARDED / model - 1) < AGREES:
            gradient, gathered = gradient / _SHARDED, 2 * gradient / _SHARDED
    if seen is not None and iterations.basis == "messages":
        world = ranks or len(edges.hosts)
        reduced = sum(bytes_of(seen, iterations, (op,), len(edges.hosts), world) for op in _REDUCES)
        gathered = bytes_of(seen, iterations, ("allgather",), len(edges.hosts), world)
        gradient = reduced or gradient
    return Expected(
        edge_bytes=edge_bytes,
        gradient_bytes=gradient,
        ranks=ranks,
        gathered_bytes=gathered,
        before=before,
        model_bytes=model,
        model_is_told=model_bytes is not None,
        if_sharded_bytes=if_sharded,
    )


def _in_turns(edges: Edges, pattern: Pattern, iterations: Iterations) -> tuple[float, float] | None:
    """Return what is reduced and what is gathered, where a two-way ring goes one way at a time.

    An all-reduce over both ways uses them at once. Libraries that gather one way and reduce the
    other do it for sharded parameters, gathered forwards and backwards; what is reduced goes around
    once, or twice where a reduce-scatter is an all-reduce.
    """
    if pattern.kind != "two-way ring":
        return None
    count, hosts = len(pattern.order), len(edges.hosts)
    here, following, before = pattern.order[0], pattern.order[1], pattern.order[-1]
    ways = [here * hosts + following, here * hosts + before]
    within = (edges.slot >= iterations.first_slot) & (edges.slot <= iterations.last_slot)
    busy = []
    for way in ways:
        rows = within & (edges.edge == way) & (edges.payload_bytes > 0)
        large = edges.payload_bytes > _FAINT * edges.payload_bytes[rows].max(initial=0)
        busy.append(np.unique(edges.slot[rows & large]))
    both = len(np.intersect1d(busy[0], busy[1], assume_unique=True))
    if both > _AT_ONCE * min(map(len, busy)):
        return None
    usual = dict(zip(iterations.edges.tolist(), iterations.edge_bytes.tolist(), strict=True))
    less, more = sorted(usual.get(way, 0.0) for way in ways)
    whole = less * count / (count - 1)
    if abs(more / less - 1) < _ABOUT:
        return whole / 2, whole
    return (whole, 2 * whole) if abs(more / less / 2 - 1) < _ABOUT else None


def _taking_part(iterations: Iterations, hosts: int) -> NDArray[np.bool_]:
    """Say between which hosts, source by target, what is sent may belong to the training."""
    member = np.zeros(hosts, bool)
    member[iterations.edges // hosts] = member[iterations.edges % hosts] = True
    return np.logical_and.outer(member, member)


def _broadcast(
    edges: Edges, iterations: Iterations, before: Whole, gradient: float, hosts: int
) -> float | None:
    """Return what start-up broadcast over each edge that it used, or over each connection.

    Over one edge it goes several times, if there are several ranks on a host.
    """
    members = _taking_part(iterations, len(edges.hosts))
    early = (edges.slot < iterations.first_slot) & members[edges.source, edges.target]
    single = np.bincount(edges.connection[early], edges.payload_bytes[early])
    sizes = [
        float(np.median(sent[sent > LARGE * gradient]))
        for sent in (before, single)
        if (sent > LARGE * gradient).any()
    ]
    fitting = (each for each in sizes if _ranks(hosts, iterations.usual_bytes, each))
    return next(fitting, sizes[0] if sizes else None)


def _ranks(hosts: int, edge_bytes: float, model_bytes: float | None) -> int | None:
    """Count ranks rather than hosts, where the model's size says which number it must be."""
    if model_bytes is None:
        return None
    counts = np.arange(hosts, _MOST_RANKS * hosts + 1, hosts)
    shares = 2 * (counts - 1) / counts
    error = np.abs(edge_bytes / model_bytes - shares)
    nearest = int(np.argmin(error[:-1]))
    apart = shares[nearest + 1] - shares[nearest]
    if error[nearest] > min(AGREES * shares[nearest], apart / 4):
        return None
    return int(counts[nearest])
