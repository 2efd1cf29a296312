"""Who sends to whom: the shape of one iteration's traffic, from its bytes alone.

Each shape is tried in turn and must hold for every host; what fits none is `none`. In most shapes a
host sends 2(N-1)/N of the gradient in an all-reduce, however it goes about it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.model.run import Real

_FAINT = 0.05  # of the largest edge: an edge of less is no part of the shape
_ALIKE = 0.05  # edges that a shape makes equal differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A shape, the hosts in sending order, and the gradient that an all-reduce of it would add."""

    kind: str
    order: tuple[int, ...] = ()
    edge_bytes: float | None = None
    gradient_bytes: float | None = None


def find_pattern(sent: Real) -> Pattern:
    """Find the shape of a matrix of bytes: row sends to column."""
    hosts = np.flatnonzero((sent.sum(axis=0) + sent.sum(axis=1)) > 0)
    if len(hosts) < 2:
        return Pattern(kind="none")
    within = sent[np.ix_(hosts, hosts)]
    links = within > _FAINT * within.max()
    used = np.flatnonzero(links.any(axis=0) | links.any(axis=1))
    hosts, within, links = hosts[used], within[np.ix_(used, used)], links[np.ix_(used, used)]
    for shape in (_ring, _two_way_ring, _star, _tree, _halving_doubling, _all_to_all):
        found = shape(within, links)
        if found is not None:
            return Pattern(
                kind=found.kind,
                order=tuple(int(hosts[each]) for each in found.order),
                edge_bytes=float(np.median(within[links])),
                gradient_bytes=found.gradient_bytes,
            )
    return Pattern(kind="none", edge_bytes=float(np.median(within[links])))


def _equal(values: Real) -> bool:
    return bool(values.max() <= values.min() * (1 + _ALIKE))


def _of_sent(within: Real) -> float:
    """Return the gradient whose all-reduce makes a host send as much as the median one does."""
    count = len(within)
    return float(np.median(within.sum(axis=1)) * count / (2 * (count - 1)))


def _walk(links: NDArray[np.bool_]) -> tuple[int, ...]:
    """Follow the links from host to host until one comes again."""
    order = [0]
    while (following := int(np.argmax(links[order[-1]]))) not in order:
        order.append(following)
    return tuple(order)


def _ring(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    if (links.sum(axis=0) != 1).any() or (links.sum(axis=1) != 1).any():
        return None
    order = _walk(links)
    if len(order) < len(links) or not _equal(within[links]):
        return None
    return Pattern(kind="ring", order=order, gradient_bytes=_of_sent(within * links))


def _two_way_ring(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    if len(links) < 4 or (links != links.T).any() or (links.sum(axis=1) != 2).any():
        return None
    order, before = [0], -1
    while True:
        following = [int(each) for each in np.flatnonzero(links[order[-1]]) if each != before]
        before = order[-1]
        if following[0] == 0 or len(order) == len(links):
            break
        order.append(following[0])
    if len(order) < len(links) or not _equal(within[links]):
        return None
    return Pattern(kind="two-way ring", order=tuple(order), gradient_bytes=_of_sent(within * links))


def _star(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """One host that all others send to and hear from, and nobody else: a parameter server."""
    degree = links.sum(axis=1)
    center = int(np.argmax(degree))
    others = np.delete(np.arange(len(links)), center)
    if len(links) < 4 or (links != links.T).any() or (degree[others] != 1).any():
        return None
    if degree[center] != len(others) or not _equal(within[links]):
        return None
    order = (center, *map(int, others))
    gradient = float(np.median(within[links]))
    return Pattern(kind="parameter server", order=order, gradient_bytes=gradient)


def _tree(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Every edge both ways with the whole gradient, and no way round."""
    count = len(links)
    if count < 3 or (links != links.T).any() or links.sum() != 2 * (count - 1):
        return None
    reached, order = {_root(links)}, [_root(links)]
    for host in order:
        below = [int(each) for each in np.flatnonzero(links[host]) if int(each) not in reached]
        reached.update(below)
        order.extend(below)
    if len(order) < count or not _equal(within[links]):
        return None
    gradient = float(np.median(within[links]))
    return Pattern(kind="tree", order=tuple(order), gradient_bytes=gradient)


def _root(links: NDArray[np.bool_]) -> int:
    """Return the host from which the farthest is nearest."""
    count = len(links)
    reach, distance = np.eye(count, dtype=bool), np.zeros(count)
    while not reach.all() and distance.max() < count:
        distance += ~reach.all(axis=1)
        reach = reach | (reach.astype(int) @ links.astype(int) > 0)
    return int(np.argmin(distance))


def _halving_doubling(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Partners 1, 2, 4 ... apart, each with half the bytes of the one before."""
    count = len(links)
    rounds = count.bit_length() - 1
    if count < 4 or count != 1 << rounds or (links != links.T).any():
        return None
    if (links.sum(axis=1) != rounds).any():
        return None
    sent = -np.sort(-np.where(links, within, 0), axis=1)[:, :rounds]
    if not all(_equal(column) for column in sent.T):
        return None
    if not np.allclose(sent[:, :-1] / sent[:, 1:], 2, rtol=_ALIKE):
        return None
    order = tuple(range(count))
    return Pattern(kind="halving-doubling", order=order, gradient_bytes=_of_sent(within * links))


def _all_to_all(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Everyone with everyone alike; what that adds up to, bytes cannot tell."""
    if len(links) < 3 or not _equal(within[~np.eye(len(links), dtype=bool)]):
        return None
    return Pattern(kind="all-to-all", order=tuple(range(len(links))))
