"""Find the shape of one iteration's traffic between hosts, from its bytes alone.

Each shape is tried in turn and must hold for every host. Traffic that fits no shape is `none`. In
most shapes a host sends 2(N-1)/N of the gradient in an all-reduce, in any order of steps. Some
shapes have the same bytes. A two-way ring of four is also recursive doubling. A two-way ring of
three is also everyone with everyone.

The search finds several rings, or two trees, over the same hosts by taking their graph apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.edges import median
from fullwire.run.run import Real

_FAINT = 0.05  # Share of the largest edge: an edge with less is no part of the shape.
_ALIKE = 0.05  # Equal edges of a shape differ by less.
_APART = 1.1  # The amounts on two levels of a hierarchy differ by more.
_MOST_RINGS = 8
_MOST_STEPS = 512  # Steps of all rings together: more take too long to separate.
_MOST_TRIES = 20_000  # Steps of a search that lacks a good bound.

Edge: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A shape, the hosts in sending order, and the size of the gradient that it all-reduces.

    `parts` are its rings if it has several, a hierarchy's groups, or the servers.
    """

    kind: str
    order: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()
    edge_bytes: float | None = None
    gradient_bytes: float | None = None


Shape: TypeAlias = Callable[[Real, NDArray[np.bool_]], Pattern | None]
_SIMPLE: list[Shape] = []  # in the order in which they are tried
_COMPOSED: list[Shape] = []  # made of simple shapes, and tried after these


def _simple(shape: Shape) -> Shape:
    _SIMPLE.append(shape)
    return shape


def _composed(shape: Shape) -> Shape:
    _COMPOSED.append(shape)
    return shape


def find_pattern(sent: Real) -> Pattern:
    """Find the shape of a matrix of bytes, in which the row's host sends to the column's."""
    hosts = np.flatnonzero((sent.sum(axis=0) + sent.sum(axis=1)) > 0)
    if len(hosts) < 2:
        return Pattern(kind="none")
    within = sent[np.ix_(hosts, hosts)]
    links = within > _FAINT * within.max()
    used = np.flatnonzero(links.any(axis=0) | links.any(axis=1))
    hosts, within, links = hosts[used], within[np.ix_(used, used)], links[np.ix_(used, used)]
    edge_bytes = float(median(within[links]))
    pattern = _first_of((*_SIMPLE, *_COMPOSED), within, links) or Pattern(kind="none")
    return replace(
        pattern,
        order=tuple(int(hosts[place]) for place in pattern.order),
        parts=tuple(tuple(int(hosts[place]) for place in part) for part in pattern.parts),
        edge_bytes=edge_bytes,
    )


def _first_of(shapes: Sequence[Shape], within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    tried = (shape(within, links) for shape in shapes)
    return next((pattern for pattern in tried if pattern is not None), None)


def _equal(values: Real) -> bool:
    return bool(values.max() <= values.min() * (1 + _ALIKE))


def _of_sent(within: Real) -> float:
    """Return the gradient whose all-reduce makes each host send as much as the median host."""
    count = len(within)
    return float(median(within.sum(axis=1)) * count / (2 * (count - 1)))


def _is_mutual(links: NDArray[np.bool_]) -> bool:
    return bool((links == links.T).all())


@_simple
def _ring(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    if (links.sum(axis=0) != 1).any() or (links.sum(axis=1) != 1).any():
        return None
    order = [0]  # follow the edges from host to host until one comes again
    while (following := int(np.argmax(links[order[-1]]))) not in order:
        order.append(following)
    if len(order) < len(links) or not _equal(within[links]):
        return None
    return Pattern(kind="ring", order=tuple(order), gradient_bytes=_of_sent(within * links))


@_simple
def _two_way_ring(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Find a ring that goes both ways around, perhaps with other bytes in each direction."""
    if len(links) < 4 or not _is_mutual(links) or (links.sum(axis=1) != 2).any():
        return None
    order, before = [0], -1
    while True:
        following = [int(host) for host in np.flatnonzero(links[order[-1]]) if host != before]
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


@_simple
def _servers(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Find parameter servers: workers that exchange the same bytes with every server only."""
    count = len(links)
    if count < 4 or not _is_mutual(links):
        return None
    is_worker = ~links[int(np.argmin(links.sum(axis=1)))]  # workers link to the servers only
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
        gradient_bytes=float(median(within[links])) * len(servers),
    )


@_simple
def _tree(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Find a tree: every edge carries the whole gradient both ways, and there is no cycle."""
    count = len(links)
    if count < 3 or not _is_mutual(links) or links.sum() != 2 * (count - 1):
        return None
    order = _from_root(links)
    if len(order) < count or not _equal(within[links]):
        return None
    return Pattern(kind="tree", order=order, gradient_bytes=float(median(within[links])))


def _from_root(links: NDArray[np.bool_], root: int | None = None) -> tuple[int, ...]:
    """Return the hosts in order of distance from a root, or else from the middle."""
    if root is None:  # the middle: the host from which the farthest is nearest
        count = len(links)
        reach, distance = np.eye(count, dtype=bool), np.zeros(count)
        while not reach.all() and distance.max() < count:
            distance += ~reach.all(axis=1)
            reach = reach | (reach.astype(int) @ links.astype(int) > 0)
        root = int(np.argmin(distance))
    order = [root]
    for host in order:
        order.extend(
            int(linked) for linked in np.flatnonzero(links[host]) if int(linked) not in order
        )
    return tuple(order)


@_simple
def _halving_doubling(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Find partners 1, 2, 4 ... apart, each with half the bytes of the one before."""
    sent = _by_partner(within, links)
    if sent is None or not all(_equal(column) for column in sent.T):
        return None
    if not np.allclose(sent[:, :-1] / sent[:, 1:], 2, rtol=_ALIKE):
        return None
    order = tuple(range(len(links)))
    return Pattern(kind="halving-doubling", order=order, gradient_bytes=_of_sent(within * links))


@_simple
def _recursive_doubling(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Find partners 1, 2, 4 ... apart, each with the whole gradient."""
    sent = _by_partner(within, links)
    if sent is None or len(links) < 8 or not _equal(sent.ravel()):
        return None
    order = tuple(range(len(links)))
    return Pattern(kind="recursive doubling", order=order, gradient_bytes=float(median(sent)))


def _by_partner(within: Real, links: NDArray[np.bool_]) -> Real | None:
    """Return the bytes that each host sends to each of its log2(N) partners, largest first."""
    count = len(links)
    rounds = count.bit_length() - 1
    if count < 4 or count != 1 << rounds or not _is_mutual(links):
        return None
    if (links.sum(axis=1) != rounds).any():
        return None
    return np.asarray(-np.sort(-np.where(links, within, 0), axis=1)[:, :rounds], np.float64)


@_simple
def _all_to_all(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Find equal bytes between all hosts; they leave the size of the gradient open."""
    if len(links) < 3 or not _equal(within[~np.eye(len(links), dtype=bool)]):
        return None
    return Pattern(kind="all-to-all", order=tuple(range(len(links))))


@_composed
def _double_tree(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Find two trees over all hosts, each with half of the gradient both ways."""
    count = len(links)
    units = _units(within, links)
    if units is None or count < 4 or (units != units.T).any() or units.sum() != 4 * (count - 1):
        return None
    edges = [(a, b) for a in range(count) for b in range(a) for _ in range(units[a, b])]
    tree_of: list[int | None] = [None] * len(edges)
    for new in range(len(edges)):
        if not _placed(count, edges, tree_of, new):
            return None
    first, second = ([edges[n] for n, at in enumerate(tree_of) if at == tree] for tree in (0, 1))
    if not len(first) == len(second) == count - 1:
        return None
    order = _from_root(_links_of(count, first))
    other = _from_root(_links_of(count, second))
    gradient = 2 * float(median(within[links] / units[links]))
    return Pattern(kind="double tree", order=order, parts=(order, other), gradient_bytes=gradient)


def _links_of(count: int, edges: list[tuple[int, int]]) -> NDArray[np.bool_]:
    links = np.zeros((count, count), bool)
    for a, b in edges:
        links[a, b] = links[b, a] = True
    return links


@_composed
def _several_rings(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Find rings in several orders over the same hosts, as several channels make them."""
    units = _units(within, links)
    if units is None or len(links) < 3 or not 1 < units[0].sum() <= _MOST_RINGS:
        return None
    if units.sum() > _MOST_STEPS:
        return None
    if (units.sum(axis=0) != units[0].sum()).any() or (units.sum(axis=1) != units[0].sum()).any():
        return None
    rings = _rings_of(units.copy(), [_MOST_TRIES])
    if rings is None:
        return None
    return Pattern(
        kind=f"{len(rings)} rings",
        order=rings[0],
        parts=tuple(rings),
        gradient_bytes=_of_sent(within * links),
    )


def _units(within: Real, links: NDArray[np.bool_]) -> NDArray[np.int64] | None:
    """Return the edges as whole multiples of the smallest one, if they are such."""
    parts = within / within[links].min()
    units = np.where(links, np.rint(parts), 0)
    if (np.abs(parts - units)[links] > _ALIKE * units[links]).any():
        return None
    return units.astype(np.int64)


@_composed
def _separate_rings(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Find rings on separate hosts: one for each network card, or separate groups."""
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


@_composed
def _hierarchical(within: Real, links: NDArray[np.bool_]) -> Pattern | None:
    """Find groups that reduce among themselves and then, with other amounts, with each other."""
    amounts = np.sort(within[links])
    ratios = amounts[1:] / amounts[:-1]
    if not len(ratios) or ratios.max() < _APART:
        return None
    bound = amounts[int(np.argmax(ratios))]
    heavy, light = links & (within > bound), links & (within <= bound)
    return _levels(within, heavy, light) or _levels(within, light, heavy)


def _levels(within: Real, inner: NDArray[np.bool_], outer: NDArray[np.bool_]) -> Pattern | None:
    groups = [group for group in components(inner) if len(group) > 1]
    across = [meeting for meeting in components(outer) if len(meeting) > 1]
    size, meetings = len(groups[0]), len(across)
    if len(groups) < 2 or len(groups) * size != len(within):
        return None
    if any(len(group) != size for group in groups) or meetings not in (1, size):
        return None
    if any(len(set(meeting) & set(group)) != 1 for meeting in across for group in groups):
        return None
    inside = [_within(within, inner, group, _SIMPLE) for group in groups]
    between = [_within(within, outer, meeting, _SIMPLE) for meeting in across]
    kinds = {pattern.kind if pattern else None for pattern in inside}
    kinds_between = {pattern and pattern.kind for pattern in between}
    if len(kinds) > 1 or None in kinds or len(kinds_between) > 1:
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
    shapes: Sequence[Shape],
) -> Pattern | None:
    """Find the shape among some of the hosts."""
    chosen = np.ix_(group, group)
    pattern = _first_of(shapes, within[chosen] * links[chosen], links[chosen])
    return pattern and replace(
        pattern, order=tuple(group[place] for place in pattern.order), parts=()
    )


def components(links: NDArray[np.bool_]) -> list[list[int]]:
    """Return groups of hosts that are linked with each other, directly or through others."""
    left, groups = set(range(len(links))), []
    while left:
        group = sorted(_from_root(links | links.T, min(left)))
        left -= set(group)
        groups.append(group)
    return groups


def _placed(count: int, edges: list[Edge], tree_of: list[int | None], new: int) -> bool:
    """Put an edge into one of two trees; move others if that keeps both trees free of cycles.

    This is matroid partition (Edmonds 1965): an edge that closes a cycle in both trees may take the
    place of another edge, which moves to the other tree.
    """
    came_from: dict[int, int | None] = {new: None}
    queue = [new]
    for edge in queue:
        for tree in (0, 1):
            if tree_of[edge] == tree:
                continue
            way = _way_round(count, edges, tree_of, tree, edges[edge])
            if way is None:
                # The edge fits here. The place that it leaves goes to the edge that needs it.
                at: int | None = edge
                while at is not None:
                    left = tree_of[at]
                    tree_of[at] = tree
                    tree = 0 if left is None else left
                    at = came_from[at]
                return True
            for other in way:
                if other not in came_from:
                    came_from[other] = edge
                    queue.append(other)
    return False


def _way_round(
    count: int, edges: list[Edge], tree_of: list[int | None], tree: int, edge: Edge
) -> list[int] | None:
    """Return the edges of a tree that connect the ends of another edge, or None."""
    reached: dict[int, tuple[int, int] | None] = {edge[0]: None}
    queue = [edge[0]]
    for node in queue:
        for number, (a, b) in enumerate(edges):
            if tree_of[number] == tree and node in (a, b) and (a + b - node) not in reached:
                reached[a + b - node] = (number, node)
                queue.append(a + b - node)
    if edge[1] not in reached:
        return None
    way, at = [], reached[edge[1]]
    while at is not None:
        way.append(at[0])
        at = reached[at[1]]
    return way


def _rings_of(left: NDArray[np.int64], tries: list[int]) -> list[tuple[int, ...]] | None:
    if not left.any():
        return []
    return _ring_from([0], left, tries)


def _ring_from(
    path: list[int], left: NDArray[np.int64], tries: list[int]
) -> list[tuple[int, ...]] | None:
    """Complete a ring through all hosts so that the other edges form rings too."""
    tries[0] -= 1
    if tries[0] < 0:
        return None
    here = path[-1]
    nexts = [0] if len(path) == len(left) else [n for n in range(len(left)) if n not in path]
    for following in nexts:
        if not left[here, following]:
            continue
        left[here, following] -= 1
        if len(path) == len(left):
            others = _rings_of(left, tries)
            rings = None if others is None else [tuple(path), *others]
        else:
            rings = _ring_from([*path, following], left, tries)
        left[here, following] += 1
        if rings is not None:
            return rings
    return None
