"""Who sends to whom: the shape of one iteration's traffic, from its bytes alone.

Each shape is tried in turn and must hold for every host; what fits none is `none`. In most shapes a
host sends 2(N-1)/N of the gradient in an all-reduce, however it goes about it. Some shapes are the
same bytes: a two-way ring of four is also recursive doubling, one of three everyone with everyone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.spanning import in_rings, in_two_trees
from fullwire.run.run import Real

_FAINT = 0.05  # of the largest edge: an edge of less is no part of the shape
_ALIKE = 0.05  # edges that a shape makes equal differ by less
_APART = 1.1  # two levels of a hierarchy move amounts that differ by more
_MOST_RINGS = 8
_MOST_STEPS = 512  # of all rings together: more take too long to tell apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A shape, the hosts in sending order, and the gradient that an all-reduce of it would add.

    `parts` are its rings where there are several, a hierarchy's groups, or the servers.
    """

    kind: str
    order: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()
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
    edge_bytes = float(np.median(within[links]))
    found = _shape(within, links, (*_SIMPLE, *_COMPOSED)) or Pattern(kind="none")
    return replace(
        found,
        order=tuple(int(hosts[each]) for each in found.order),
        parts=tuple(tuple(int(hosts[each]) for each in part) for part in found.parts),
        edge_bytes=edge_bytes,
    )


def _shape(
    within: Real,
    links: NDArray[np.bool_],
    shapes: tuple[Callable[[Real, NDArray[np.bool_]], Pattern | None], ...],
) -> Pattern | None:
    return next((found for shape in shapes if (found := shape(within, links)) is not None), None)


def _equal(values: Real) -> bool:
    return bool(values.max() <= values.min() * (1 + _ALIKE))


def _of_sent(within: Real) -> float:
    """Return the gradient whose all-reduce makes a host send as much as the median one does."""
    count = len(within)
    return float(np.median(within.sum(axis=1)) * count / (2 * (count - 1)))


def _is_mutual(links: NDArray[np.bool_]) -> bool:
    return bool((links == links.T).all())


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
    """Both ways around, perhaps with other bytes one way than the other."""
    if len(links) < 4 or not _is_mutual(links) or (links.sum(axis=1) != 2).any():
        return None
    order, before = [0], -1
    while True:
        following = [int(each) for each in np.flatnonzero(links[order[-1]]) if each != before]
        before = order[-1]
        if following[0] == 0 or len(order) == len(links):
            break
        order.append(following[0])
    around = list(zip(order, [*order[1:], order[0]], strict=True))
    if len(order) < len(links):
        return None
    one_way = np.array([within[a, b] for a, b in around])
    other_way = np.array([within[b, a] for a, b in around])
    if not _equal(one_way) or not _equal(other_way):
        return None
    return Pattern(kind="two-way ring", order=tuple(order), gradient_bytes=_of_sent(within * links))


def _servers(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Workers that each exchange the same with every server, and nobody else: parameter servers."""
    count = len(links)
    if count < 4 or not _is_mutual(links):
        return None
    is_worker = ~links[int(np.argmin(links.sum(axis=1)))]  # linked with servers only, and the most
    servers, workers = np.flatnonzero(~is_worker), np.flatnonzero(is_worker)
    bipartite = np.zeros_like(links)
    bipartite[np.ix_(servers, workers)] = bipartite[np.ix_(workers, servers)] = True
    if not 0 < len(servers) < len(workers) or (links != bipartite).any():
        return None
    if not _equal(within[links]):
        return None
    return Pattern(
        kind="parameter server",
        order=(*map(int, servers), *map(int, workers)),
        parts=(tuple(map(int, servers)),),
        gradient_bytes=float(np.median(within[links])) * len(servers),
    )


def _tree(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Every edge both ways with the whole gradient, and no way round."""
    count = len(links)
    if count < 3 or not _is_mutual(links) or links.sum() != 2 * (count - 1):
        return None
    order = _from_root(links)
    if len(order) < count or not _equal(within[links]):
        return None
    return Pattern(kind="tree", order=order, gradient_bytes=float(np.median(within[links])))


def _from_root(links: NDArray[np.bool_], root: int | None = None) -> tuple[int, ...]:
    """Return the hosts that are reached from a root, or else from the middle, outwards."""
    order = [_middle(links) if root is None else root]
    for host in order:
        order.extend(int(each) for each in np.flatnonzero(links[host]) if int(each) not in order)
    return tuple(order)


def _middle(links: NDArray[np.bool_]) -> int:
    """Return the host from which the farthest is nearest."""
    count = len(links)
    reach, distance = np.eye(count, dtype=bool), np.zeros(count)
    while not reach.all() and distance.max() < count:
        distance += ~reach.all(axis=1)
        reach = reach | (reach.astype(int) @ links.astype(int) > 0)
    return int(np.argmin(distance))


def _halving_doubling(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Partners 1, 2, 4 ... apart, each with half the bytes of the one before."""
    sent = _by_partner(within, links)
    if sent is None or not all(_equal(column) for column in sent.T):
        return None
    if not np.allclose(sent[:, :-1] / sent[:, 1:], 2, rtol=_ALIKE):
        return None
    order = tuple(range(len(links)))
    return Pattern(kind="halving-doubling", order=order, gradient_bytes=_of_sent(within * links))


def _recursive_doubling(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Partners 1, 2, 4 ... apart, each with the whole gradient."""
    sent = _by_partner(within, links)
    if sent is None or len(links) < 8 or not _equal(sent.ravel()):
        return None
    order = tuple(range(len(links)))
    return Pattern(kind="recursive doubling", order=order, gradient_bytes=float(np.median(sent)))


def _by_partner(within: Real, links: NDArray[np.bool_]) -> Real | None:
    """Return what each host sends to each of its log2(N) partners, the largest first."""
    count = len(links)
    rounds = count.bit_length() - 1
    if count < 4 or count != 1 << rounds or not _is_mutual(links):
        return None
    if (links.sum(axis=1) != rounds).any():
        return None
    return np.asarray(-np.sort(-np.where(links, within, 0), axis=1)[:, :rounds], np.float64)


def _all_to_all(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Everyone with everyone alike; what that adds up to, bytes cannot tell."""
    if len(links) < 3 or not _equal(within[~np.eye(len(links), dtype=bool)]):
        return None
    return Pattern(kind="all-to-all", order=tuple(range(len(links))))


def _double_tree(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Two trees over all hosts, each both ways with half of the gradient."""
    count = len(links)
    units = _units(within, links)
    if units is None or count < 4 or (units != units.T).any() or units.sum() != 4 * (count - 1):
        return None
    edges = [(a, b) for a in range(count) for b in range(a) for _ in range(units[a, b])]
    trees = in_two_trees(count, edges)
    if trees is None:
        return None
    order = _from_root(_links_of(count, trees[0]))
    other = _from_root(_links_of(count, trees[1]))
    gradient = 2 * float(np.median(within[links] / units[links]))
    return Pattern(kind="double tree", order=order, parts=(order, other), gradient_bytes=gradient)


def _links_of(count: int, edges: list[tuple[int, int]]) -> NDArray[np.bool_]:
    links = np.zeros((count, count), bool)
    for a, b in edges:
        links[a, b] = links[b, a] = True
    return links


def _several_rings(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Rings in several orders over the same hosts, as of several channels."""
    units = _units(within, links)
    if units is None or len(links) < 3 or not 1 < units[0].sum() <= _MOST_RINGS:
        return None
    if units.sum() > _MOST_STEPS:
        return None
    rings = in_rings(units)
    if rings is None:
        return None
    return Pattern(
        kind=f"{len(rings)} rings",
        order=rings[0],
        parts=tuple(rings),
        gradient_bytes=_of_sent(within * links),
    )


def _units(within: Real, links: NDArray[np.bool_]) -> NDArray[np.int64] | None:
    """Return the edges as multiples of the smallest, if that is what they are."""
    parts = within / within[links].min()
    units = np.where(links, np.rint(parts), 0)
    if (np.abs(parts - units)[links] > _ALIKE * units[links]).any():
        return None
    return units.astype(np.int64)


def _separate_rings(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Rings that share no host: one for each network card, or groups that do not meet."""
    groups = components(links)
    if len(groups) < 2:
        return None
    rings = [_within(within, links, group, (_ring,)) for group in groups]
    if any(ring is None for ring in rings) or not _equal(within[links]):
        return None
    parts = tuple(ring.order for ring in rings if ring is not None)
    sizes = {ring.gradient_bytes for ring in rings if ring is not None}
    gradient = sizes.pop() if len({len(part) for part in parts}) == 1 else None
    return Pattern(
        kind=f"{len(parts)} separate rings",
        order=sum(parts, ()),
        parts=parts,
        gradient_bytes=gradient,
    )


def _hierarchical(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Groups that reduce among themselves and then, with other amounts, with each other."""
    amounts = np.sort(within[links])
    ratios = amounts[1:] / amounts[:-1]
    if not len(ratios) or ratios.max() < _APART:
        return None
    bound = amounts[int(np.argmax(ratios))]
    heavy, light = links & (within > bound), links & (within <= bound)
    return _levels(within, heavy, light) or _levels(within, light, heavy)


def _levels(within: Real, inner: NDArray[np.bool_], outer: NDArray[np.bool_]) -> Pattern | None:
    groups = [each for each in components(inner) if len(each) > 1]
    across = [each for each in components(outer) if len(each) > 1]
    size, meetings = len(groups[0]), len(across)
    if len(groups) < 2 or len(groups) * size != len(within):
        return None
    if any(len(group) != size for group in groups) or meetings not in (1, size):
        return None
    if any(len(set(each) & set(group)) != 1 for each in across for group in groups):
        return None
    inside = [_within(within, inner, group, _SIMPLE) for group in groups]
    between = [_within(within, outer, each, _SIMPLE) for each in across]
    kinds = {each.kind if each else None for each in inside}
    if len(kinds) > 1 or None in kinds or len({each and each.kind for each in between}) > 1:
        return None
    if between[0] is None or inside[0] is None or between[0].gradient_bytes is None:
        return None
    return Pattern(
        kind="hierarchical",
        order=tuple(host for group in groups for host in group),
        parts=tuple(map(tuple, groups)),
        gradient_bytes=between[0].gradient_bytes * meetings,
    )


def _within(
    within: Real,
    links: NDArray[np.bool_],
    group: list[int],
    shapes: tuple[Callable[[Real, NDArray[np.bool_]], Pattern | None], ...],
) -> Pattern | None:
    """Find the shape among some of the hosts."""
    chosen = np.ix_(group, group)
    found = _shape(within[chosen] * links[chosen], links[chosen], shapes)
    return found and replace(found, order=tuple(group[each] for each in found.order), parts=())


def components(links: NDArray[np.bool_]) -> list[list[int]]:
    """Return the hosts that are linked with each other, directly or not."""
    left, groups = set(range(len(links))), []
    while left:
        group = sorted(_from_root(links | links.T, min(left)))
        left -= set(group)
        groups.append(group)
    return groups


_SIMPLE = (
    _ring,
    _two_way_ring,
    _servers,
    _tree,
    _halving_doubling,
    _recursive_doubling,
    _all_to_all,
)
_COMPOSED = (_double_tree, _several_rings, _separate_rings, _hierarchical)
