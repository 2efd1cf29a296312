"""All-to-all in turn: in round r every rank sends to the one r places on."""

from __future__ import annotations

import numpy as np

from fullwire.collectives.exchanges import others_in_turn, refuse_too_many
from fullwire.collectives.registry import Algorithm, Statement, some_of_the_last_node
from fullwire.collectives.stages import Layout, Stated, stage


def _in_turn(_op: str, layout: Layout) -> Stated:
    workers = layout.workers
    refuse_too_many(workers * (workers - 1), "a pairwise all-to-all")
    rank = np.arange(workers)
    rounds = tuple(
        stage(rank, partner, rank * workers + partner, reduces=False)
        for partner in others_in_turn(rank, workers)
    )
    return Stated(workers**2, (rounds,))


ALGORITHM = Algorithm(
    name="pairwise",
    label="in round r every rank sends to the one r places on",
    place=10,
    ops={"alltoall": Statement(states=_in_turn)},
    fits=some_of_the_last_node,
)
