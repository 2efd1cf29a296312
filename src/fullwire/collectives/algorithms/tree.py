"""Trees: an all-reduce over two binary trees at once, a broadcast over a binomial one.

Each of the two binary trees carries half of the message, and a rank is an inner node in at most one
(Sanders, Speck and Träff 2009). Their transfers meet on links. The formula is the time at full
utilization, with every link busy from the first to the last bit. Times in events lie above it
(validation/README.md tells by how much).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import AddTimes, Cost, Floats
from fullwire.collectives.powers_of_two import exactly_at_powers_of_two
from fullwire.collectives.registry import Algorithm, Statement, Wires
from fullwire.collectives.stages import Int32, Layout, Part, Stage, Stated, stage
from fullwire.errors import UsageError


def _two_trees(_op: str, layout: Layout) -> Stated:
    workers = layout.workers
    node = np.arange(1, workers)  # odd nodes are leaves, node 0 is the root
    low = node & -node
    above = (node ^ low) | (low << 1)
    parents = np.where(above < workers, above, node ^ low)
    ranks = np.arange(workers)
    # The second tree is the first one mirrored. Where a mirror would put a rank in the middle of
    # both, it is shifted by one instead. So leaves of one tree are inner nodes of the other.
    second = ranks[::-1] if workers % 2 == 0 else np.roll(ranks, -1)
    return Stated(2, (_up_and_down(parents, ranks, 0), _up_and_down(parents, second, 1)))


def _up_and_down(parents: NDArray[np.int64], ranks: NDArray[np.int64], block: int) -> Part:
    """Add up from the leaves to the root, then hand the sum down again.

    `parents` are those of the nodes from 1 on. A parent's lowest bit is above that of its child.
    """
    children = np.arange(1, len(ranks))
    heights, depths = np.zeros(len(ranks), np.int32), np.zeros(len(ranks), np.int32)
    low = children & -children
    levels = [low == 1 << bit for bit in range(len(ranks).bit_length())]
    for level in levels:
        np.maximum.at(heights, parents[level], heights[children[level]] + 1)
    for level in reversed(levels):
        depths[children[level]] = depths[parents[level]] + 1
    child_rank = ranks[children]
    parent_rank = ranks[parents]
    up = _by_round(heights[children], child_rank, parent_rank, block, reduces=True)
    down = _by_round(depths[children], parent_rank, child_rank, block, reduces=False)
    return (*up, *down)


def _by_round(
    rounds: Int32,
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    block: int,
    *,
    reduces: bool,
) -> Iterator[Stage]:
    for number in np.unique(rounds):
        among = rounds == number
        yield stage(source[among], target[among], block, reduces=reduces)


def _binomial(_op: str, layout: Layout) -> Stated:
    rounds: list[Stage] = []
    reach = 1
    while reach < layout.workers:
        source = np.arange(min(reach, layout.workers - reach))
        rounds.append(stage(source, source + reach, reduces=False))
        reach *= 2
    return Stated(1, (tuple(rounds),))


def _two_trees_cost(workers: int, size: Floats, adds: AddTimes) -> Cost:
    # An inner node of one tree adds two halves, or one with fewer than four ranks. In the other
    # tree it is a leaf. In bytes the two trees together fill its link twice.
    halves = min(workers, 4)
    height = (workers - 1).bit_length()
    return Cost(size * halves / 2, 2 * height, (2 if workers > 2 else 1) * adds(size / 2))


def _two_trees_s(wires: Wires, size_bytes: float, adds: AddTimes, chunks: int) -> float:
    if wires.workers > 2:
        raise UsageError("no closed form is exact for a double tree: ask with --level event")
    return exactly_at_powers_of_two("tree", _two_trees_cost)(wires, size_bytes, adds, chunks)


def _binomial_cost(workers: int, size: Floats, _adds: AddTimes) -> Cost:
    rounds = (workers - 1).bit_length()
    return Cost(size * rounds, rounds, np.zeros_like(size))


ALGORITHM = Algorithm(
    name="tree",
    label="two binary trees, half of the message over each; a broadcast over a binomial tree",
    place=20,
    ops={
        "allreduce": Statement(
            states=_two_trees,
            costs=_two_trees_cost,
            exactly_s=_two_trees_s,
            is_pipelined=True,
        ),
        "broadcast": Statement(
            states=_binomial,
            costs=_binomial_cost,
            exactly_s=exactly_at_powers_of_two("tree", _binomial_cost),
        ),
    },
)
