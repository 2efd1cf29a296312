"""One device of a node speaks for all: it gathers its node's sum and exchanges with other nodes.

It goes around a ring of nodes, and then hands the sum out within its node.
"""

from __future__ import annotations

import numpy as np

from fullwire.collectives.lifting import around_nodes, between_nodes, for_all_devices
from fullwire.collectives.registry import Algorithm, Statement, some_of_the_last_node
from fullwire.collectives.stages import Layout, Stated, stage


def _leaders(op: str, layout: Layout) -> Stated:
    layout = layout.in_equal_groups
    inner = between_nodes("ring")(op, layout) if layout.nodes > 1 else Stated(1, ((),))
    share, devices = inner.blocks, layout.per_node
    node = np.repeat(np.arange(layout.nodes), devices - 1) * devices
    device = np.tile(np.arange(1, devices), layout.nodes)
    spoken = (for_all_devices(stated, devices) for part in inner.parts for stated in part)
    stages = (
        around_nodes(layout, share, 0, share, lead=1, reduces=True),
        stage(node + device, node, device * share, block_count=share, reduces=False),
        *spoken,
        stage(node, node + device, device * share, block_count=share, reduces=False),
        around_nodes(layout, share, 0, share, lead=0, reduces=False),
    )
    return Stated(share * devices, (stages,))


ALGORITHM = Algorithm(
    name="hierarchical-leader",
    label="one device of a node speaks for all around a ring of nodes",
    place=90,
    ops={"allreduce": Statement(states=_leaders)},
    fits=some_of_the_last_node,
)
