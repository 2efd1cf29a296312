"""Half of the message around the ring each way."""

from __future__ import annotations

import numpy as np

from fullwire.collectives.registry import Algorithm, Statement, whole_nodes
from fullwire.collectives.rings import rings
from fullwire.collectives.stages import Layout, Stated


def _both_ways(op: str, layout: Layout) -> Stated:
    ranks = np.arange(layout.workers)
    return rings(op, [ranks, ranks[::-1]])


ALGORITHM = Algorithm(
    name="bidirectional-ring",
    label="half of the message around the ring each way",
    place=40,
    ops=dict.fromkeys(("allreduce", "reducescatter", "allgather"), Statement(states=_both_ways)),
    fits=whole_nodes,
)
