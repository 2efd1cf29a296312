"""Let devices carry out an algorithm that is stated between nodes.

Every device of a node can carry it out with its own share of the message, or one device speaks for
all. The first devices of nodes pass a broadcast on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fullwire.collectives.registry import States, statement
from fullwire.collectives.rings import phases
from fullwire.collectives.stages import Layout, Stage, Stated, stage


def between_nodes(algorithm: str) -> States:
    """Let nodes take the places of an algorithm's ranks."""

    def states(op: str, layout: Layout) -> Stated:
        return statement(op, algorithm).states(op, Layout(nodes=layout.nodes))

    return states


def by_every_device(between: States) -> States:
    """Let every device carry out `between` between nodes, with its own share."""

    def states(op: str, layout: Layout) -> Stated:
        layout = layout.in_equal_groups
        inner = _among_nodes(between, op, layout)
        share, devices = inner.blocks, layout.per_node
        device = np.arange(devices)[:, None]
        parts = []
        for number, stages in enumerate(inner.parts):
            own = share // len(inner.parts)  # parts touch equal numbers of blocks, in turn
            scatter = around_nodes(layout, share, number * own, own, lead=1, reduces=True)
            gather = around_nodes(layout, share, number * own, own, lead=0, reduces=False)
            lifted = tuple(  # devices of one place act as the nodes, on their share
                stage(
                    transfers.source * devices + device,
                    transfers.target * devices + device,
                    device * share + transfers.first_block,
                    reduces=transfers.reduces,
                    block_count=transfers.block_count,
                    block_step=transfers.block_step,
                    rounds=transfers.rounds,
                    shift=transfers.shift,
                    window=transfers.window,
                )
                for transfers in stages
            )
            parts.append(phases(op, (scatter,), lifted, (gather,)))
        places = None
        if op != "allreduce":  # rank r begins or ends with the r-th piece of the message
            pieces = max(inner.blocks // layout.nodes, 1)
            of_node = np.arange(inner.blocks) if inner.places is None else inner.places
            node, piece = np.divmod(of_node, pieces)
            places = ((node * devices + device) * pieces + piece).reshape(-1)
        return Stated(share * devices, tuple(parts), places, inner.switches * devices)

    return states


def by_first_devices(between: States) -> States:
    """Let the first devices of nodes pass the message on, then each within its node."""

    def states(op: str, layout: Layout) -> Stated:
        layout = layout.in_equal_groups
        inner = _among_nodes(between, op, layout)
        [stages] = inner.parts
        passed = [for_all_devices(transfers, layout.per_node) for transfers in stages]
        if layout.per_node > 1:
            [within] = statement(op, "tree").states(op, Layout(nodes=layout.per_node)).parts
            node = np.arange(layout.nodes)[:, None] * layout.per_node
            passed += [
                stage(node + transfers.source, node + transfers.target, reduces=transfers.reduces)
                for transfers in within
            ]
        whole = tuple(replace(transfers, block_count=1) for transfers in passed)
        return Stated(1, (whole,), switches=inner.switches * layout.per_node)

    return states


def _among_nodes(between: States, op: str, layout: Layout) -> Stated:
    return between(op, layout) if layout.nodes > 1 else Stated(1, ((),))


def around_nodes(
    layout: Layout, share: int, first: int, count: int, *, lead: int, reduces: bool
) -> Stage:
    """Go around the devices of every node, with `count` of the `share` blocks of each device."""
    node, device = np.divmod(np.arange(layout.workers), layout.per_node)
    return stage(
        node * layout.per_node + device,
        node * layout.per_node + (device + 1) % layout.per_node,
        (device - lead) % layout.per_node * share + first,
        block_count=count,
        reduces=reduces,
        rounds=layout.per_node - 1,
        shift=-share,
        window=layout.per_node * share,
    )


def for_all_devices(transfers: Stage, devices: int) -> Stage:
    """Turn a stage between nodes into one between their first devices, of the whole message."""
    return replace(
        transfers,
        source=transfers.source * np.int32(devices),
        target=transfers.target * np.int32(devices),
        first_block=transfers.first_block * np.int32(devices),
        block_count=transfers.block_count * devices,
        shift=transfers.shift * devices,
        window=transfers.window * devices,
    )
