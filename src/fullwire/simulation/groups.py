"""How many ranks a collective is among: all of them, or a group such as a model is split over."""

from __future__ import annotations

import numpy as np

from fullwire.model.run import Run


def members_of(run: Run) -> dict[str, int]:
    """Return how many ranks each group has, by its name.

    A group of all ranks that are in the run counts as one of all workers: of a few ranks' traces
    nobody knows who else is in it.
    """
    workers, table = run.facts.get("workers", 1), run.collectives
    if not isinstance(workers, int) or not len(table):
        return {}
    names, place = np.unique(table.group.astype(str), return_inverse=True)
    pairs = np.unique(np.stack([place.reshape(-1), table.rank]), axis=1)
    counts = np.bincount(pairs[0], minlength=len(names))
    here = len(np.unique(table.rank))
    return {
        name: workers if count == here else count
        for name, count in zip(names.tolist(), counts.tolist(), strict=True)
    }
