"""Connections of a placed plan that do the same at the same times: one is played for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullwire.clusters.cluster import Cluster, Floats, Ints
from fullwire.collectives.placed import Placed
from fullwire.collectives.stages import Int32


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Alike:
    """Connections of which each stands for all that are alike, and the transfers that they make."""

    seats: int
    bytes_per_s: Floats
    source: Int32
    target: Int32
    latency_s: Floats
    stands_for: Ints
    crossings_begin: Ints
    link: Int32
    weight: Int32
    transfers: tuple[tuple[Int32, ...], ...]


def unfolded(where: Placed, cluster: Cluster) -> Alike:
    """Let every connection stand for itself."""
    routes = where.routes
    return Alike(
        seats=where.plan.seats,
        bytes_per_s=cluster.link_rate_bps / 8,
        source=where.source,
        target=where.target,
        latency_s=routes.latency_s,
        stands_for=np.ones(len(where), np.int64),
        crossings_begin=routes.begin,
        link=routes.link,
        weight=np.ones_like(routes.link),
        transfers=where.transfers,
    )


def folded(where: Placed, cluster: Cluster) -> Alike:
    """Let one connection stand for all that are alike."""
    from fullwire import _native  # loaded only where events are asked for

    routes = where.routes
    used, link = np.unique(routes.link, return_inverse=True)
    rates_bps, rate = np.unique(cluster.link_rate_bps[used], return_inverse=True)
    seat_class, class_of, link_class = _native.fold(
        where.plan.seats,
        where.source,
        where.target,
        routes.begin,
        link.astype(np.int32),
        _roles(where),
        rate.astype(np.int32),
    )
    _, first = np.unique(class_of, return_index=True)
    members = np.bincount(link_class)
    # How many connections of a class meet on one link of another.
    pairs = np.repeat(class_of.astype(np.int64), np.diff(routes.begin)) * len(members)
    met, times = np.unique(pairs + link_class[link], return_counts=True)
    classes, links = np.divmod(met, max(len(members), 1))
    begin = np.zeros(len(first) + 1, np.int64)
    np.cumsum(np.bincount(classes, minlength=len(first)), out=begin[1:])
    link_rate_bps = np.empty(len(members))
    link_rate_bps[link_class] = rates_bps[rate]
    is_first = np.zeros(len(where), bool)
    is_first[first] = True
    return Alike(
        seats=int(seat_class.max(initial=-1)) + 1,
        bytes_per_s=link_rate_bps / 8,
        source=seat_class[where.source[first]],
        target=seat_class[where.target[first]],
        latency_s=routes.latency_s[first],
        stands_for=np.bincount(class_of),
        crossings_begin=begin,
        link=links.astype(np.int32),
        weight=(times // members[links]).astype(np.int32),
        transfers=tuple(
            tuple(class_of[stage[is_first[stage]]] for stage in part) for part in where.transfers
        ),
    )


def _roles(where: Placed) -> Int32:
    """Number connections by the stages that they transfer in, and by their latency."""
    # A role is the sum of a random number for each of its stages: two roles with one sum are as
    # likely as two random 64-bit numbers being equal.
    draw = np.random.Generator(np.random.PCG64(8)).integers
    sums = np.zeros(len(where), np.uint64)
    for part in where.transfers:
        for stage in part:
            np.add.at(sums, stage, draw(0, 2**64, dtype=np.uint64))
    _, latency = np.unique(where.routes.latency_s, return_inverse=True)
    _, role = np.unique(sums, return_inverse=True)
    _, both = np.unique(latency * (role.max(initial=0) + 1) + role, return_inverse=True)
    return both.astype(np.int32)
