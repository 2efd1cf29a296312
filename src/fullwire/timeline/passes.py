"""How much work a step is: the passes whose gradients it adds up before they are sent."""

from __future__ import annotations

import numpy as np

from fullwire.run.run import Run

_LAST, _EARLIER = "backward", "earlier backward"  # as the recorder names a step's backward passes


def passes_of_step(run: Run) -> int | None:
    """Return how many passes a step usually has; None where passes are missing."""
    spans = run.spans
    is_pass = (spans.lane == "compute") & ((spans.name == _LAST) | (spans.name == _EARLIER))
    passes = spans.rows(is_pass & (spans.step >= 0))
    if not len(passes):
        return None
    pairs = np.stack([passes.rank, passes.step])
    is_last = passes.name == _LAST
    whole, place = np.unique(pairs, axis=1, return_inverse=True)
    counts, lasts = (
        np.bincount(place.reshape(-1), weights, whole.shape[1])
        for weights in (np.ones(len(passes)), is_last)
    )
    counts = counts[lasts == 1]  # other steps do more than accumulate
    return round(float(np.median(counts))) if len(counts) else None
