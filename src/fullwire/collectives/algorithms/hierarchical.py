"""Within nodes, then between them, then within nodes again.

First comes a reduce-scatter within nodes. Then device d of every node reduces with device d of all
other nodes. Then comes an all-gather within nodes. Between nodes it uses a ring, or the algorithm
in the name's ending: -tree or -halving-doubling.

In an all-to-all, data for device d of any node first goes to device d of the sender's own node.
That device then exchanges with device d of every node.

Where the last node is not full, groups of one size take the places of nodes. The size is the
greatest that divides both a full node and the last one.
"""

from __future__ import annotations

import numpy as np

from fullwire.collectives.exchanges import others_in_turn, refuse_too_many
from fullwire.collectives.lifting import between_nodes, by_every_device, by_first_devices
from fullwire.collectives.registry import Algorithm, Statement, some_of_the_last_node
from fullwire.collectives.stages import Layout, Stated, stage


def _all_to_all(_op: str, layout: Layout) -> Stated:
    layout = layout.in_equal_groups
    workers, nodes, devices = layout.workers, layout.nodes, layout.per_node
    refuse_too_many(workers * (nodes + devices - 2), "a hierarchical all-to-all")
    rank = np.arange(workers)
    node, device = np.divmod(rank, devices)
    handed = [
        stage(
            rank,
            node * devices + to,
            rank * workers + to,
            block_count=nodes,
            block_step=devices,
            reduces=False,
        )
        for to in others_in_turn(device, devices)
    ]
    exchanged = [
        stage(
            rank,
            to * devices + device,
            (rank - device) * workers + to * devices + device,
            block_count=devices,
            block_step=workers,
            reduces=False,
        )
        for to in others_in_turn(node, nodes)
    ]
    return Stated(workers**2, ((*handed, *exchanged),))


_WITH_RINGS = Statement(states=by_every_device(between_nodes("ring")))
ALGORITHM = (
    Algorithm(
        name="hierarchical",
        label="within nodes, then rank d of every node around a ring, then within nodes",
        place=60,
        ops={
            "allreduce": _WITH_RINGS,
            "reducescatter": _WITH_RINGS,
            "allgather": _WITH_RINGS,
            "broadcast": Statement(states=by_first_devices(between_nodes("tree"))),
            "alltoall": Statement(states=_all_to_all),
        },
        fits=some_of_the_last_node,
    ),
    *(
        Algorithm(
            name=f"hierarchical-{between}",
            label=f"within nodes, then {between} between nodes, then within nodes",
            place=80 + number,
            ops={"allreduce": Statement(states=by_every_device(between_nodes(between)))},
            fits=some_of_the_last_node,
        )
        for number, between in enumerate(("tree", "halving-doubling"))
    ),
)
