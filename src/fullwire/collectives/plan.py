"""A collective by one algorithm among ranks, as stages of transfers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fullwire.clusters.cluster import Cluster, LeafSpine, Torus
from fullwire.collectives.registry import known, statement
from fullwire.collectives.stages import Layout, Plan, Stated
from fullwire.errors import UsageError


def plan(op: str, algorithm: str, layout: Layout | int) -> Plan:
    """State a collective among ranks with this layout, or among so many ranks."""
    states = statement(op, algorithm).states
    if isinstance(layout, int):
        if layout < 1:
            raise UsageError(f"workers: expected at least 1, got {layout}")
        layout = Layout(nodes=layout)
    blocks, parts, places, switches = Stated(1, ()) if layout.workers == 1 else states(op, layout)
    return Plan(
        op=op,
        algorithm=algorithm,
        workers=layout.workers,
        blocks=blocks,
        switches=switches,
        stages=tuple(
            tuple(stage for stage in part if stage.rounds and len(stage)) for part in parts
        ),
        places=None if places is None else places.astype(np.int32),
    )


def layout_of(cluster: Cluster, servers: int = 1) -> Layout:
    """Return how ranks are laid out on a cluster, one on each device."""
    network = cluster.network
    nodes_per_leaf: int | None = cluster.nodes
    if isinstance(network, Torus) or cluster.pods:
        nodes_per_leaf = None
    elif isinstance(network, LeafSpine) and cluster.leaves:
        nodes_per_leaf = network.nodes_per_leaf
    return Layout(
        nodes=cluster.nodes,
        per_node=cluster.devices_per_node,
        nics_per_node=cluster.nics_per_node,
        nodes_per_leaf=nodes_per_leaf,
        torus=(network.rows, network.columns) if isinstance(network, Torus) else None,
        servers=servers,
    )


def plan_on(
    op: str, algorithm: str, cluster: Cluster, workers: int | None = None, servers: int = 1
) -> Plan:
    """State a collective among the first so many devices of a cluster, or among all."""
    layout = layout_of(cluster, servers)
    if workers is None or workers == cluster.devices:
        return plan(op, algorithm, layout)
    if workers > cluster.devices:
        raise UsageError(
            f"workers: {cluster.name} has {cluster.devices:,} devices, got {workers:,}"
        )
    nodes, others = divmod(workers, cluster.devices_per_node)
    if statement(op, algorithm).costs is not None:  # it takes ranks as they come
        return plan(op, algorithm, replace(layout, nodes=workers, per_node=1))
    if nodes == 0:  # some devices of one node
        return plan(op, algorithm, replace(layout, nodes=1, per_node=workers))
    if others and known(op)[algorithm].fits(op, cluster, workers):
        return plan(op, algorithm, replace(layout, nodes=nodes, others=others))
    if others or layout.torus is not None:
        raise UsageError(
            f"{op} by {algorithm}: expected all {cluster.devices_per_node} devices of every node "
            f"of {cluster.name}, got {workers:,} workers"
        )
    return plan(op, algorithm, replace(layout, nodes=nodes))
