"""Derive the size of the gradient and the number of ranks from the bytes of an iteration.

A ring of N ranks moves 2(N-1)/N of the gradient over each edge. The same holds between hosts, for
any number of ranks on a host. So the bytes give the number of ranks if the model's size is known.
The user may give that size, or the broadcast at the start of training shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.edges import Edges, median
from fullwire.packets.iterations import Iterations
from fullwire.packets.messages import SeenCollectives, broadcast_bytes, bytes_of
from fullwire.packets.pattern import Pattern
from fullwire.run.run import Whole

_MOST_RANKS = 64  # Ranks on one host.
AGREES = 0.005  # Sizes that differ by less are the same, except for headers of messages.
LARGE = 0.1  # Share of a gradient: start-up broadcasts at least so much.
RINGS = ("ring", "two-way ring")
_SHARDED = 1.5  # Times an all-reduce's bytes: two gatherings of parameters, one reduce-scatter.
_AT_ONCE = 0.3  # Share of the less busy way's time: the ways overlap so much by chance.
_FAINT = 0.05  # Share of a slot's bytes: acknowledgements by a library.
_ABOUT = 0.02
_REDUCES = ("allreduce", "reducescatter")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Expected:
    """The sizes that an iteration's bytes imply; `None` where they leave a value open."""

    edge_bytes: float | None = None
    gradient_bytes: float | None = None
    ranks: int | None = None
    gathered_bytes: float = 0.0  # bytes of parameters gathered in an iteration
    before: Whole | None = None  # bytes by source and target before the first iteration
    model_bytes: float | None = None
    model_is_told: bool = False  # the size is the user's, not a broadcast's
    if_sharded_bytes: float | None = None  # the gradient, if the job may be sharded instead


def expected_bytes(
    edges: Edges,
    pattern: Pattern,
    iterations: Iterations | None,
    seen: SeenCollectives | None,
    known_ranks: int | None,
    model_bytes: float | None,
) -> Expected:
    """Return the size of the gradient, the number of ranks, and how both were found."""
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
    """Return the reduced and the gathered bytes, if a two-way ring goes one way at a time.

    An all-reduce over both ways uses them at once. Some libraries gather one way and reduce the
    other for sharded parameters. They gather the parameters forwards and backwards. The gradients
    go around once, or twice if an all-reduce stands in for the reduce-scatter.
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
    """Say for each source and target whether their traffic may belong to the training."""
    member = np.zeros(hosts, bool)
    member[iterations.edges // hosts] = member[iterations.edges % hosts] = True
    return np.logical_and.outer(member, member)


def _broadcast(
    edges: Edges, iterations: Iterations, before: Whole, gradient: float, hosts: int
) -> float | None:
    """Return the bytes that start-up broadcast over each edge that it used, or each connection.

    If a host has several ranks, the broadcast goes over one edge several times.
    """
    members = _taking_part(iterations, len(edges.hosts))
    early = (edges.slot < iterations.first_slot) & members[edges.source, edges.target]
    single = np.bincount(edges.connection[early], edges.payload_bytes[early])
    sizes = [
        float(median(sent[sent > LARGE * gradient]))
        for sent in (before, single)
        if (sent > LARGE * gradient).any()
    ]
    fitting = (size for size in sizes if _ranks(hosts, iterations.usual_bytes, size))
    return next(fitting, sizes[0] if sizes else None)


def _ranks(hosts: int, edge_bytes: float, model_bytes: float | None) -> int | None:
    """Return the number of ranks, if the model's size fits only one number."""
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
