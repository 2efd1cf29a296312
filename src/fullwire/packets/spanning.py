"""Taking a graph apart: into two trees over all its nodes, or into rings through all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MOST_TRIES = 20_000  # steps of a search that has no good bound

Edge = tuple[int, int]


def in_two_trees(count: int, edges: list[Edge]) -> tuple[list[Edge], list[Edge]] | None:
    """Divide edges among two spanning trees, if they can be divided so that none is left.

    Matroid partition (Edmonds 1965): an edge that closes a way round in both trees may take the
    place of another one, which moves to the other tree.
    """
    tree_of: list[int | None] = [None] * len(edges)
    for new in range(len(edges)):
        if not _placed(count, edges, tree_of, new):
            return None
    trees = tuple([edges[n] for n, tree in enumerate(tree_of) if tree == t] for t in (0, 1))
    return trees if all(len(tree) == count - 1 for tree in trees) else None  # type: ignore[return-value]


def _placed(count: int, edges: list[Edge], tree_of: list[int | None], new: int) -> bool:
    came_from: dict[int, int | None] = {new: None}
    queue = [new]
    for edge in queue:
        for tree in (0, 1):
            if tree_of[edge] == tree:
                continue
            way = _way_round(count, edges, tree_of, tree, edges[edge])
            if way is None:
                _move(tree_of, came_from, edge, tree)
                return True
            for other in way:
                if other not in came_from:
                    came_from[other] = edge
                    queue.append(other)
    return False


def _move(
    tree_of: list[int | None], came_from: dict[int, int | None], edge: int, tree: int
) -> None:
    """Put an edge into a tree, and into the place that it leaves the one that asked for it."""
    at: int | None = edge
    while at is not None:
        left = tree_of[at]
        tree_of[at] = tree
        tree = 0 if left is None else left
        at = came_from[at]


def _way_round(
    count: int, edges: list[Edge], tree_of: list[int | None], tree: int, edge: Edge
) -> list[int] | None:
    """Return the edges of a tree between the ends of another edge, or nothing if there are none."""
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


def in_rings(units: NDArray[np.int64]) -> list[tuple[int, ...]] | None:
    """Divide directed edges, given how many there are of each, among rings through all nodes."""
    if (units.sum(axis=0) != units[0].sum()).any() or (units.sum(axis=1) != units[0].sum()).any():
        return None
    tries = [_MOST_TRIES]
    return _rings_of(units.copy(), tries)


def _rings_of(left: NDArray[np.int64], tries: list[int]) -> list[tuple[int, ...]] | None:
    if not left.any():
        return []
    return _ring_from([0], left, tries)


def _ring_from(
    path: list[int], left: NDArray[np.int64], tries: list[int]
) -> list[tuple[int, ...]] | None:
    """Complete a ring through all nodes such that the other edges can be divided as well."""
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
