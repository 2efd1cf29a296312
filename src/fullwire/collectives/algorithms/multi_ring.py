"""One ring for each NIC of a node, which leaves and enters nodes there, as NCCL has them."""

from __future__ import annotations

import numpy as np

from fullwire.collectives.registry import Algorithm, Statement, whole_nodes
from fullwire.collectives.rings import rings
from fullwire.collectives.stages import Layout, Stated


def _a_ring_each_nic(op: str, layout: Layout) -> Stated:
    nodes, devices = np.divmod(np.arange(layout.workers), layout.per_node)
    firsts = np.arange(layout.nics_per_node) * layout.per_node // layout.nics_per_node
    return rings(
        op, [nodes * layout.per_node + (devices + first) % layout.per_node for first in firsts]
    )


ALGORITHM = Algorithm(
    name="multi-ring",
    label="one ring for each NIC of a node, which leaves and enters nodes there",
    place=50,
    ops=dict.fromkeys(
        ("allreduce", "reducescatter", "allgather"), Statement(states=_a_ring_each_nic)
    ),
    fits=whole_nodes,
)
