"""Everything exchanged with partners at distances 1, 2, 4 ...: few messages, and whole ones.

It is the quickest for small messages, because no rank waits for more than log2(N) others in a row.
Fullwire's own transport uses it for them. Ranks beyond a power of two hand their data to a partner
first and get the sum last. The all-reduce is then a little faster than the formula, because some
ranks need not wait for all others.
"""

from __future__ import annotations

import numpy as np

from fullwire.collectives.cost import AddTimes, Cost, Floats
from fullwire.collectives.powers_of_two import exactly_at_powers_of_two, power_of_two_within
from fullwire.collectives.registry import Algorithm, Statement
from fullwire.collectives.stages import Layout, Stated, stage


def _exchanges(_op: str, layout: Layout) -> Stated:
    core = power_of_two_within(layout.workers)
    ranks, extra = np.arange(core), np.arange(core, layout.workers)
    distances = (1 << step for step in range(core.bit_length() - 1))
    stages = [stage(ranks, ranks ^ distance, reduces=True) for distance in distances]
    if len(extra):
        stages.insert(0, stage(extra, extra - core, reduces=True))
        stages.append(stage(extra - core, extra, reduces=False))
    return Stated(1, (tuple(stages),))


def _cost(workers: int, size: Floats, adds: AddTimes) -> Cost:
    core = power_of_two_within(workers)
    exchanges, folds = core.bit_length() - 1, workers > core
    hops = exchanges + (2 if folds else 0)
    # A partner of a rank beyond the power of two only receives at first, and only sends at last.
    return Cost(
        size * hops, hops, (exchanges + folds) * adds(size), size if folds else np.zeros_like(size)
    )


NAME = "recursive-doubling"
ALGORITHM = Algorithm(
    name=NAME,
    label="everything exchanged with partners at distances 1, 2, 4 ...",
    place=35,
    ops={
        "allreduce": Statement(
            states=_exchanges, costs=_cost, exactly_s=exactly_at_powers_of_two(NAME, _cost)
        )
    },
    by_name_only=True,  # NCCL lacks it, and users should be able to get the choice of `auto`
)
