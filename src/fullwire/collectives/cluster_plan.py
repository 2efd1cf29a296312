"""Collectives for clusters of nodes, each stated once as stages of transfers.

Rank n * D + d is device d of node n, of D devices a node. What moves between nodes is stated over
nodes, and carried out by every device with its own share of the message.

    bidirectional-ring   half of the message around the ring each way
    multi-ring           one ring for each NIC of a node, which leaves and enters nodes there
    hierarchical         reduce-scatter within nodes, then rank d of every node around a ring, then
                         all-gather within nodes; -tree and -halving-doubling say what is between
    hierarchical-leader  the same with one device of a node speaking for all
    torus                rows first and columns first, each both ways around: a quarter each
    parameter-server     every rank sends to the servers, which are ranks, and they answer
    in-network           the switches add: up to the leaf, up to the spine, and down to everybody
    pairwise             all-to-all: in round r every rank sends to the one r places on
    hierarchical         all-to-all: what goes to device d of any node is first handed to the own
                         node's device d, which then exchanges with the device d of every node

What is here beside the plans of plan.py needs to know how ranks are laid out (`Layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fullwire.clusters.fabric import Fabric, LeafSpine, Torus
from fullwire.collectives import plan as flat
from fullwire.collectives.stages import Int32, Part, Plan, Stage
from fullwire.errors import UsageError

MOST_STATED = 6_000_000  # transfers that nothing repeats, and as many connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How ranks are laid out; `nodes_per_leaf` counts the nodes whose traffic a switch can add."""

    nodes: int
    per_node: int = 1
    nics_per_node: int = 1
    nodes_per_leaf: int | None = None
    torus: tuple[int, int] | None = None
    servers: int = 1

    @property
    def workers(self) -> int:
        """How many ranks there are."""
        return self.nodes * self.per_node


class _Stated(NamedTuple):
    """A plan without its names."""

    blocks: int
    parts: tuple[Part, ...]
    places: NDArray[Any] | None = None
    switches: int = 0


_Builder: TypeAlias = Callable[[str, Layout], _Stated]  # the operation comes first


def layout_of(fabric: Fabric, servers: int = 1) -> Layout:
    """Return how ranks are laid out on a described cluster, one on each device."""
    network = fabric.network
    return Layout(
        nodes=fabric.nodes,
        per_node=fabric.devices_per_node,
        nics_per_node=fabric.nics_per_node,
        nodes_per_leaf=(
            None
            if isinstance(network, Torus) or fabric.pods
            else network.nodes_per_leaf
            if isinstance(network, LeafSpine) and fabric.leaves
            else fabric.nodes
        ),
        torus=(network.rows, network.columns) if isinstance(network, Torus) else None,
        servers=servers,
    )


def plan_on(
    op: str, algorithm: str, fabric: Fabric, workers: int | None = None, servers: int = 1
) -> Plan:
    """State a collective among the first so many devices of a cluster, or among all."""
    layout = layout_of(fabric, servers)
    if workers is None or workers == fabric.devices:
        return cluster_plan(op, algorithm, layout)
    if workers > fabric.devices:
        raise UsageError(f"workers: {fabric.name} has {fabric.devices:,} devices, got {workers:,}")
    nodes, others = divmod(workers, fabric.devices_per_node)
    if algorithm in (flat.algorithms(op) if op in flat.OPS else ()):
        return cluster_plan(op, algorithm, replace(layout, nodes=workers, per_node=1))
    if nodes == 0:  # some devices of one node
        return cluster_plan(op, algorithm, replace(layout, nodes=1, per_node=workers))
    if others or layout.torus is not None:
        raise UsageError(
            f"{op} by {algorithm}: expected all {fabric.devices_per_node} devices of every node of "
            f"{fabric.name}, got {workers:,} workers"
        )
    return cluster_plan(op, algorithm, replace(layout, nodes=nodes))


def applicable_on(op: str, fabric: Fabric, workers: int | None = None) -> tuple[str, ...]:
    """List the algorithms that the first so many devices can carry out, the usual one first."""
    among = fabric.devices if workers is None else workers
    is_torus, is_all = isinstance(fabric.network, Torus), among == fabric.devices
    are_whole_nodes = among % fabric.devices_per_node == 0 and (is_all or not is_torus)
    is_even = among == flat.power_of_two_within(among)

    def fits(algorithm: str) -> bool:
        if op in flat.OPS and algorithm in flat.algorithms(op):
            return is_even or op == "allreduce" or algorithm != "halving-doubling"
        if algorithm == "torus":
            return is_torus and is_all
        if algorithm == "in-network":
            return are_whole_nodes and layout_of(fabric).nodes_per_leaf is not None
        return are_whole_nodes or among < fabric.devices_per_node

    return tuple(each for each in cluster_algorithms(op) if fits(each))


def cluster_algorithms(op: str) -> tuple[str, ...]:
    """List the algorithms for a collective on a described cluster, the flat ones first."""
    if op not in CLUSTER_OPS:
        raise UsageError(f"collective: expected one of {', '.join(CLUSTER_OPS)}, got {op!r}")
    usual = flat.algorithms(op) if op in flat.OPS else ()
    return (*usual, *(algorithm for known, algorithm in _BUILDERS if known == op))


def usual_algorithm(op: str, fabric: Fabric) -> str:
    """Return what is taken where nobody says: a ring for each NIC of a node, as NCCL has them."""
    known = cluster_algorithms(op)
    has_several = fabric.nics_per_node > 1 and not isinstance(fabric.network, Torus)
    return "multi-ring" if has_several and "multi-ring" in known else known[0]


def cluster_plan(op: str, algorithm: str, layout: Layout) -> Plan:
    """State a collective among ranks that are laid out like this."""
    known = cluster_algorithms(op)
    if algorithm not in known:
        raise UsageError(f"algorithm for {op}: expected {', '.join(known)}, got {algorithm!r}")
    if (op, algorithm) not in _BUILDERS:
        return flat.plan(op, algorithm, layout.workers)
    blocks, parts, places, switches = (
        _Stated(1, ()) if layout.workers == 1 else _BUILDERS[op, algorithm](op, layout)
    )
    return Plan(
        op=op,
        algorithm=algorithm,
        workers=layout.workers,
        blocks=blocks,
        switches=switches,
        stages=tuple(tuple(each for each in part if each.rounds and len(each)) for part in parts),
        places=None if places is None else places.astype(np.int32),
    )


# --- rings ------------------------------------------------------------------------------------


def _around(order: NDArray[Any], *, base: int, lead: int, reduces: bool) -> Stage:
    """Pass blocks on around the ring of these ranks; the blocks begin at `base`."""
    count = len(order)
    place = np.arange(count)
    return _stage(
        order,
        np.roll(order, -1),
        base + (place - lead) % count,
        reduces=reduces,
        rounds=count - 1,
        shift=-1,
        window=count,
    )


def _rings(op: str, orders: list[NDArray[Any]]) -> _Stated:
    """Go around several rings at once, an equal share of the message on each."""
    size = len(orders[0])
    parts = []
    for number, order in enumerate(orders):
        base = number * size
        scatter = _around(order, base=base, lead=1, reduces=True)
        gather = _around(order, base=base, lead=0, reduces=False)
        parts.append(_phases(op, (scatter,), (), (gather,)))
    places = [order * len(orders) + number for number, order in enumerate(orders)]
    return _Stated(size * len(orders), tuple(parts), np.concatenate(places))


def _phases(op: str, scatter: Part, between: Part, gather: Part) -> Part:
    first = () if op == "allgather" else scatter
    last = () if op == "reducescatter" else gather
    return (*first, *between, *last)


def _bidirectional(op: str, layout: Layout) -> _Stated:
    ranks = np.arange(layout.workers)
    return _rings(op, [ranks, ranks[::-1]])


def _multi_ring(op: str, layout: Layout) -> _Stated:
    nodes, devices = np.divmod(np.arange(layout.workers), layout.per_node)
    firsts = np.arange(layout.nics_per_node) * layout.per_node // layout.nics_per_node
    return _rings(
        op, [nodes * layout.per_node + (devices + first) % layout.per_node for first in firsts]
    )


# --- within nodes and between them --------------------------------------------------------------


def _hierarchical(between: _Builder) -> _Builder:
    """Let every device carry out between nodes what `between` states, with its own share."""

    def build(op: str, layout: Layout) -> _Stated:
        inner = between(op, layout) if layout.nodes > 1 else _Stated(1, ((),))
        return _among_nodes(op, layout, inner)

    return build


def _among_nodes(op: str, layout: Layout, inner: _Stated) -> _Stated:
    share, devices = inner.blocks, layout.per_node
    parts = []
    for number, stages in enumerate(inner.parts):
        own = share // len(inner.parts)  # parts touch equal numbers of blocks, one after another
        scatter = _in_nodes(layout, share, number * own, own, lead=1, reduces=True)
        gather = _in_nodes(layout, share, number * own, own, lead=0, reduces=False)
        lifted = tuple(_by_every_device(stage, devices, share) for stage in stages)
        parts.append(_phases(op, (scatter,), lifted, (gather,)))
    places = None if op == "allreduce" else _places_among_nodes(layout, inner)
    return _Stated(share * devices, tuple(parts), places, inner.switches * devices)


def _in_nodes(
    layout: Layout, share: int, first: int, count: int, *, lead: int, reduces: bool
) -> Stage:
    """Go around the devices of every node; a device's share is so many blocks, of which `count`."""
    node, device = np.divmod(np.arange(layout.workers), layout.per_node)
    return _stage(
        node * layout.per_node + device,
        node * layout.per_node + (device + 1) % layout.per_node,
        (device - lead) % layout.per_node * share + first,
        block_count=count,
        reduces=reduces,
        rounds=layout.per_node - 1,
        shift=-share,
        window=layout.per_node * share,
    )


def _by_every_device(stage: Stage, devices: int, share: int) -> Stage:
    """Turn a stage between nodes into one between the devices of the same place."""
    device = np.arange(devices)[:, None]
    return replace(
        stage,
        source=_column(stage.source * devices + device),
        target=_column(stage.target * devices + device),
        first_block=_column(device * share + stage.first_block),
    )


def _places_among_nodes(layout: Layout, inner: _Stated) -> NDArray[Any]:
    """Return the place of every block: rank r begins or ends with the r-th piece of the message."""
    pieces = max(inner.blocks // layout.nodes, 1)
    of_node = np.arange(inner.blocks) if inner.places is None else inner.places
    node, piece = np.divmod(of_node, pieces)
    device = np.arange(layout.per_node)[:, None]
    return np.asarray(((node * layout.per_node + device) * pieces + piece).reshape(-1))


def _leaders(op: str, layout: Layout) -> _Stated:
    inner = _from_flat("ring")(op, layout) if layout.nodes > 1 else _Stated(1, ((),))
    share, devices = inner.blocks, layout.per_node
    node = np.repeat(np.arange(layout.nodes), devices - 1) * devices
    device = np.tile(np.arange(1, devices), layout.nodes)
    whole = (0, share)
    spoken = tuple(_for_all_devices(stage, devices) for part in inner.parts for stage in part)
    return _Stated(
        share * devices,
        (
            (
                _in_nodes(layout, share, *whole, lead=1, reduces=True),
                _stage(node + device, node, device * share, block_count=share, reduces=False),
                *spoken,
                _stage(node, node + device, device * share, block_count=share, reduces=False),
                _in_nodes(layout, share, *whole, lead=0, reduces=False),
            ),
        ),
    )


def _for_all_devices(stage: Stage, devices: int) -> Stage:
    """Turn a stage between nodes into one between their first devices, of the whole message."""
    return replace(
        stage,
        source=stage.source * np.int32(devices),
        target=stage.target * np.int32(devices),
        first_block=stage.first_block * np.int32(devices),
        block_count=stage.block_count * devices,
        shift=stage.shift * devices,
        window=stage.window * devices,
    )


def _broadcast(between: _Builder) -> _Builder:
    """Let the first devices of nodes pass the message on, then each within its node."""

    def build(op: str, layout: Layout) -> _Stated:
        inner = between(op, layout) if layout.nodes > 1 else _Stated(1, ((),))
        [stages] = inner.parts
        [within] = flat.plan(op, "tree", layout.per_node).stages or ((),)
        passed = [_for_all_devices(stage, layout.per_node) for stage in stages]
        passed += [_in_every_node(stage, layout) for stage in within]
        whole = tuple(replace(stage, block_count=1) for stage in passed)
        return _Stated(1, (whole,), switches=inner.switches * layout.per_node)

    return build


def _in_every_node(stage: Stage, layout: Layout) -> Stage:
    node = np.arange(layout.nodes)[:, None] * layout.per_node
    return _stage(node + stage.source, node + stage.target, reduces=stage.reduces)


def _from_flat(algorithm: str) -> _Builder:
    def build(op: str, layout: Layout) -> _Stated:
        stated = flat.plan(op, algorithm, layout.nodes)
        return _Stated(stated.blocks, stated.stages)

    return build


# --- torus ------------------------------------------------------------------------------------


def _torus(op: str, layout: Layout) -> _Stated:
    if layout.torus is None:
        raise UsageError("algorithm torus: expected a cluster whose nodes form a torus")
    rows, columns = layout.torus
    node = np.arange(layout.nodes).reshape(rows, columns)
    grids = [grid for each in (node, node.T) for grid in (each, each[::-1, ::-1])]
    parts, places = [], []
    for number, grid in enumerate(grids):
        base = number * layout.nodes
        scatter = _lines_then_across(grid, base, lead=1, reduces=True)
        gather = _lines_then_across(grid, base, lead=0, reduces=False)[::-1]
        parts.append(_phases(op, scatter, (), gather))
        places.append(grid.T.reshape(-1) * len(grids) + number)
    return _Stated(layout.nodes * len(grids), tuple(parts), np.concatenate(places))


def _lines_then_across(
    grid: NDArray[Any], base: int, *, lead: int, reduces: bool
) -> tuple[Stage, Stage]:
    """Go around every line of a grid, then across the lines with what each place has by then."""
    lines, places = grid.shape
    line, place = np.indices(grid.shape)
    along = _stage(
        grid,
        np.roll(grid, -1, axis=1),
        base + (place - lead) % places * lines,
        block_count=lines,
        reduces=reduces,
        rounds=places - 1,
        shift=-lines,
        window=places * lines,
    )
    across = _stage(
        grid,
        np.roll(grid, -1, axis=0),
        base + place * lines + (line - lead) % lines,
        reduces=reduces,
        rounds=lines - 1,
        shift=-1,
        window=lines,
    )
    return along, across


# --- servers and switches -----------------------------------------------------------------------


def _parameter_server(op: str, layout: Layout) -> _Stated:
    workers, servers = layout.workers, layout.servers
    if not 1 <= servers <= workers:
        raise UsageError(f"servers: expected 1 to {workers}, as many as workers, got {servers}")
    _refuse_too_many(2 * servers * (workers - 1), "a parameter server")
    block = np.tile(np.arange(servers), workers)
    rank = np.repeat(np.arange(workers), servers)
    server = block * workers // servers
    others = rank != server
    push = _stage(rank[others], server[others], block[others], reduces=True)
    pull = replace(push, source=push.target, target=push.source, reduces=False)
    return _Stated(servers, ((push, pull),))


def _in_network(op: str, layout: Layout) -> _Stated:
    """State what switches add, over nodes: seats from `nodes` on are the leaves, then the spine."""
    if layout.nodes_per_leaf is None:
        raise UsageError("algorithm in-network: expected one switch, or leaves below one spine")
    nodes = np.arange(layout.nodes)
    leaf = layout.nodes + nodes // layout.nodes_per_leaf
    leaves = np.unique(leaf)
    spine = np.full(len(leaves), layout.nodes + len(leaves))
    has_spine = len(leaves) > 1
    up = [_stage(nodes, leaf, reduces=True), _stage(leaves, spine, reduces=True)]
    down = [_stage(spine, leaves, reduces=False), _stage(leaf, nodes, reduces=False)]
    if op == "broadcast":  # up from the first node, down to all others
        up[0] = _stage(nodes[:1], leaf[:1], reduces=False)
        up[1] = _stage(leaves[:1], spine[:1], reduces=False)
        down[-1] = _stage(leaf[1:], nodes[1:], reduces=False)
    stages = (*up, *down) if has_spine else (up[0], down[-1])
    return _Stated(1, (stages,), switches=len(leaves) + has_spine)


# --- all-to-all -------------------------------------------------------------------------------


def _pairwise(op: str, layout: Layout) -> _Stated:
    workers = layout.workers
    _refuse_too_many(workers * (workers - 1), "a pairwise all-to-all")
    rank = np.arange(workers)
    return _Stated(
        workers**2,
        (
            tuple(
                _stage(rank, partner, rank * workers + partner, reduces=False)
                for partner in _others_in_turn(rank, workers)
            ),
        ),
    )


def _hierarchical_all_to_all(op: str, layout: Layout) -> _Stated:
    workers, nodes, devices = layout.workers, layout.nodes, layout.per_node
    _refuse_too_many(workers * (nodes + devices - 2), "a hierarchical all-to-all")
    rank = np.arange(workers)
    node, device = np.divmod(rank, devices)
    handed = [
        _stage(
            rank,
            node * devices + to,
            rank * workers + to,
            block_count=nodes,
            block_step=devices,
            reduces=False,
        )
        for to in _others_in_turn(device, devices)
    ]
    exchanged = [
        _stage(
            rank,
            to * devices + device,
            (rank - device) * workers + to * devices + device,
            block_count=devices,
            block_step=workers,
            reduces=False,
        )
        for to in _others_in_turn(node, nodes)
    ]
    return _Stated(workers**2, ((*handed, *exchanged),))


def _others_in_turn(own: NDArray[Any], count: int) -> Iterator[NDArray[Any]]:
    return ((own + hop) % count for hop in range(1, count))


def _refuse_too_many(transfers: int, what: str) -> None:
    if transfers > MOST_STATED:
        raise UsageError(
            f"{what} has {transfers:,} different transfers here, at most {MOST_STATED:,} can be "
            "stated: ask for fewer workers"
        )


def _stage(
    source: NDArray[Any], target: NDArray[Any], first_block: NDArray[Any] | int = 0, **how: Any
) -> Stage:
    return Stage(
        source=_column(source),
        target=_column(target),
        first_block=_column(np.broadcast_to(np.asarray(first_block), source.shape)),
        **how,
    )


def _column(values: NDArray[Any]) -> Int32:
    return np.asarray(values.reshape(-1), np.int32)


_SCATTERING: tuple[tuple[str, _Builder], ...] = (
    ("bidirectional-ring", _bidirectional),
    ("multi-ring", _multi_ring),
    ("hierarchical", _hierarchical(_from_flat("ring"))),
    ("torus", _hierarchical(_torus)),
)
_KNOWN: Mapping[str, tuple[tuple[str, _Builder], ...]] = {
    "allreduce": (
        *_SCATTERING,
        ("hierarchical-tree", _hierarchical(_from_flat("tree"))),
        ("hierarchical-halving-doubling", _hierarchical(_from_flat("halving-doubling"))),
        ("hierarchical-leader", _leaders),
        ("parameter-server", _parameter_server),
        ("in-network", _hierarchical(_in_network)),
    ),
    "reducescatter": _SCATTERING,
    "allgather": _SCATTERING,
    "broadcast": (
        ("hierarchical", _broadcast(_from_flat("tree"))),
        ("in-network", _broadcast(_in_network)),
    ),
    "alltoall": (("pairwise", _pairwise), ("hierarchical", _hierarchical_all_to_all)),
}
_BUILDERS: Mapping[tuple[str, str], _Builder] = {
    (op, algorithm): build for op, known in _KNOWN.items() for algorithm, build in known
}
CLUSTER_OPS: tuple[str, ...] = tuple(_KNOWN)
