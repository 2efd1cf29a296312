"""One ring for each NIC of a node; it leaves and enters nodes through that NIC, as in NCCL.

Where the last node is not full, there are as many rings as that node's devices have NICs.
"""

from __future__ import annotations

import numpy as np

from fullwire.collectives.registry import Algorithm, Statement, some_of_the_last_node
from fullwire.collectives.rings import rings
from fullwire.collectives.stages import Layout, Stated


def _a_ring_each_nic(op: str, layout: Layout) -> Stated:
    full = layout.nodes * layout.per_node
    least = layout.others or layout.per_node
    count = max(layout.nics_per_node * least // layout.per_node, 1)
    rank = np.arange(layout.workers)
    size = np.where(rank < full, layout.per_node, layout.others)
    first = np.where(rank < full, rank - rank % layout.per_node, full)
    return rings(
        op, [first + (rank - first + ring * size // count) % size for ring in range(count)]
    )


ALGORITHM = Algorithm(
    name="multi-ring",
    label="one ring for each NIC of a node, which leaves and enters nodes there",
    place=50,
    ops=dict.fromkeys(
        ("allreduce", "reducescatter", "allgather"), Statement(states=_a_ring_each_nic)
    ),
    fits=some_of_the_last_node,
)
