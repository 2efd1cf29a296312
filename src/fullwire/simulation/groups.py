"""The number of ranks of a collective: all ranks, or a group such as a model is split over."""

from __future__ import annotations

import numpy as np

from fullwire.run.run import Run


def members_of(run: Run) -> dict[str, int]:
    """Return how many ranks each group has, by its name.

    A group of all ranks in the run counts as a group of all workers: from a few ranks' traces the
    group's other members are unknown.
    """
    workers, table = run.facts.workers or 1, run.collectives
    if not len(table):
        return {}
    names = table.group.tolist()
    place = {name: number for number, name in enumerate(dict.fromkeys(names))}
    of_group = np.fromiter(map(place.__getitem__, names), np.int64, len(names))  # sorts soon
    ranks, of_rank = np.unique(table.rank, return_inverse=True)
    pairs = np.unique(of_group * len(ranks) + of_rank.reshape(-1))
    counts = np.bincount(pairs // len(ranks))
    return {
        name: workers if count == len(ranks) else count
        for name, count in zip(place, counts.tolist(), strict=True)
    }
