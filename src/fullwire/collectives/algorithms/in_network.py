"""The switches add: up to the leaf, up to the spine, and down to everybody.

Stated over nodes: seats from `nodes` on are the leaves, then the spine.
"""

from __future__ import annotations

import numpy as np

from fullwire.clusters.cluster import Cluster
from fullwire.collectives.lifting import by_every_device, by_first_devices
from fullwire.collectives.registry import Algorithm, Statement
from fullwire.collectives.stages import Layout, Stated, stage
from fullwire.errors import UsageError


def _over_switches(op: str, layout: Layout) -> Stated:
    if layout.nodes_per_leaf is None:
        raise UsageError("algorithm in-network: expected one switch, or leaves below one spine")
    nodes = np.arange(layout.nodes)
    leaf = layout.nodes + nodes // layout.nodes_per_leaf
    leaves = np.unique(leaf)
    spine = np.full(len(leaves), layout.nodes + len(leaves))
    has_spine = len(leaves) > 1
    up = [stage(nodes, leaf, reduces=True), stage(leaves, spine, reduces=True)]
    down = [stage(spine, leaves, reduces=False), stage(leaf, nodes, reduces=False)]
    if op == "broadcast":  # up from the first node, down to all others
        up[0] = stage(nodes[:1], leaf[:1], reduces=False)
        up[1] = stage(leaves[:1], spine[:1], reduces=False)
        down[-1] = stage(leaf[1:], nodes[1:], reduces=False)
    stages = (*up, *down) if has_spine else (up[0], down[-1])
    return Stated(1, (stages,), switches=len(leaves) + has_spine)


def _has_one_spine(_op: str, cluster: Cluster, workers: int) -> bool:
    is_tree = not cluster.is_torus and not cluster.pods
    return is_tree and workers % cluster.devices_per_node == 0


ALGORITHM = Algorithm(
    name="in-network",
    label="the switches add: up to the leaf, up to the spine, and down to everybody",
    place=110,
    ops={
        "allreduce": Statement(states=by_every_device(_over_switches)),
        "broadcast": Statement(states=by_first_devices(_over_switches)),
    },
    fits=_has_one_spine,
    switches_add=True,
)
