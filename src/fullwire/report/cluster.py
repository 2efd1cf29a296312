"""A described cluster for the terminal: drawn from the spine to the devices, then its links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

import numpy as np

from fullwire.clusters.cluster import (
    Cluster,
    LeafSpine,
    Network,
    OneSwitch,
    Torus,
    leaf_name,
    link_classes,
)
from fullwire.report.terminal import print_table, say
from fullwire.units import show_rate, show_time

_LABEL, _CELL, _WIDE = 12, 16, 92
_MOST_CELLS = 5
_MOST_IN_ROW = 16
_MOST_STRANDS = 8


def print_cluster(fabric: Cluster) -> None:
    """Print a cluster: a sentence, a drawing, its links, and what its figures rest on."""
    say(cluster_sentence(fabric))
    say("")
    for line in drawing(fabric):
        say(line)
    say("")
    heads = ["links", "how many", "line rate", "for payload", "latency"]
    print_table(heads, list(_link_rows(fabric)), texts={"links"})
    for line in wrap(fabric.rests_on, _WIDE):
        say(line)


def print_clusters(fabrics: Sequence[Cluster]) -> None:
    """Print the built-in clusters, a line each."""
    rows = [
        [
            fabric.name,
            f"{fabric.devices_per_node}",
            "" if fabric.inside is None else show_rate(fabric.inside.rate_bps),
            f"{fabric.nics_per_node} x {show_rate(fabric.nics.rate_bps)}",
            network_words(fabric.network),
        ]
        for fabric in fabrics
    ]
    heads = ["cluster", "devices a node", "in the node", "NICs a node", "network"]
    print_table(heads, rows, texts={"cluster", "network"})
    for each in fabrics:
        for number, line in enumerate(wrap(each.rests_on, _WIDE - 4)):
            say(f"    {line}" if number else f"{each.name}: {line}")


def cluster_sentence(fabric: Cluster) -> str:
    """Say in a sentence what the cluster is."""
    devices = "1 device" if fabric.devices_per_node == 1 else f"{fabric.devices_per_node} devices"
    nodes = "1 node" if fabric.nodes == 1 else f"{fabric.nodes:,} nodes"
    others = ""
    if fabric.other_hosts:
        named = ", ".join(
            f"node{each.node} at {show_rate(each.nic_rate_bps)}" for each in fabric.other_hosts[:4]
        )
        more = len(fabric.other_hosts) - 4
        others = f", but {named}" + (f" and {more} more" if more > 0 else "")
    return (
        f"{fabric.name}: {nodes} of {devices} ({fabric.devices:,} in all), "
        f"{network_words(fabric.network)}{others}"
    )


def network_words(network: Network) -> str:
    """Name a network as people do."""
    if isinstance(network, OneSwitch):
        return "one switch"
    if isinstance(network, Torus):
        return f"a torus of {network.rows} x {network.columns}"
    kind = "rails" if network.by_rail else "a fat tree"
    nodes = "1 node" if network.nodes_per_leaf == 1 else f"{network.nodes_per_leaf} nodes"
    core = ""
    if network.leaves_per_pod is not None:
        core = f", {network.leaves_per_pod} leaves a pod, {network.core_oversubscription:g}:1"
    return f"{kind}, {nodes} a leaf, {network.oversubscription:g}:1{core}"


def _link_rows(fabric: Cluster) -> Iterator[list[str]]:
    for each in link_classes(fabric):
        least, most = show_rate(each.slowest_bps), show_rate(each.fastest_bps)
        yield [
            each.kind,
            f"{each.count:,}",
            least if least == most else f"{least} to {most}",
            f"{each.payload_share:.1%}",
            show_time(each.latency_s),
        ]


def drawing(fabric: Cluster) -> Iterator[str]:
    """Draw the cluster from the top down, each row with a word about what it is."""
    if isinstance(fabric.network, Torus):
        yield from _torus(fabric.network)
    elif fabric.leaves:
        yield from _leaves(fabric)
    else:
        yield from _one_switch(fabric)
    yield ""
    yield from _node(fabric)


def some(count: int, most: int) -> list[int | None]:
    """Return the numbers that are drawn of so many; None stands for those left out."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


def _leaves(fabric: Cluster) -> Iterator[str]:
    network = fabric.network
    assert isinstance(network, LeafSpine)
    cells = some(-(-fabric.nodes // network.nodes_per_leaf), _MOST_CELLS)
    ports = network.nodes_per_leaf * (1 if network.by_rail else fabric.nics_per_node)
    width = _CELL * len(cells)
    yield from _spines(fabric, width)
    uplink = show_rate(fabric.uplink_rate_bps)
    yield _row("uplinks", [_or_gap(cell, "┃") for cell in cells])
    narrow = " ◀" if network.oversubscription > 1 else ""
    over = f"{network.oversubscription:g}:1"
    yield _row(over, [_or_gap(each, uplink) for each in cells]) + narrow
    yield _row("leaves", [_or_gap(each, f"[{_leaf_words(fabric, each)}]") for each in cells])
    down = f"{ports} x {show_rate(fabric.nics.rate_bps)}"
    yield _row("NICs", [_or_gap(each, _strands(ports)) for each in cells])
    yield _row("", [_or_gap(each, down) for each in cells])
    yield _row("nodes", [_or_gap(each, _nodes_of(fabric, each)) for each in cells])


def _spines(fabric: Cluster, width: int) -> Iterator[str]:
    """Draw the spine, or the core, what goes up to it, and that each pod has a spine."""
    network = fabric.network
    title = " core " if fabric.pods else " spine "
    yield _row("", ["╔" + title.center(width - 2, "═") + "╗"], width)
    if fabric.pods:
        assert isinstance(network, LeafSpine)
        ratio = f"{network.core_oversubscription:g}:1"
        narrow = " ◀" if network.core_oversubscription > 1 else ""
        yield _row(ratio, [f"{show_rate(fabric.core_rate_bps)} up from each pod"], width) + narrow
        yield _row("pods", [f"a spine over every {network.leaves_per_pod} leaves"], width)


def _leaf_words(fabric: Cluster, group: int | None) -> str:
    network = fabric.network
    assert isinstance(network, LeafSpine)
    if group is None:
        return ""
    if not network.by_rail:
        return leaf_name(fabric, group)
    return f"leaf{group}.rail0-{fabric.nics_per_node - 1}"


def _nodes_of(fabric: Cluster, group: int | None) -> str:
    if group is None:
        return ""
    assert isinstance(fabric.network, LeafSpine)
    first = group * fabric.network.nodes_per_leaf
    last = min(first + fabric.network.nodes_per_leaf, fabric.nodes) - 1
    return f"node{first}" if first == last else f"node{first}-{last}"


def _one_switch(fabric: Cluster) -> Iterator[str]:
    cells = some(fabric.nodes, _MOST_CELLS)
    width = _CELL * len(cells)
    rails = fabric.nics_per_node if isinstance(fabric.network, LeafSpine) else 1
    by_rail = isinstance(fabric.network, LeafSpine) and fabric.network.by_rail and rails > 1
    title = f" {rails} switches, one for each rail " if by_rail else " switch "
    yield _row("", ["╔" + title.center(width - 2, "═") + "╗"], width)
    yield _row("NICs", [_or_gap(cell, _strands(fabric.nics_per_node)) for cell in cells])
    rate = f"{fabric.nics_per_node} x {show_rate(fabric.nics.rate_bps)}"
    yield _row("", [_or_gap(each, rate) for each in cells])
    yield _row("nodes", [_or_gap(each, f"node{each}") for each in cells])


def _strands(count: int) -> str:
    return "│" * count if count <= _MOST_STRANDS else "│" * (_MOST_STRANDS - 2) + "…│"


def _torus(torus: Torus) -> Iterator[str]:
    columns = some(torus.columns, _MOST_CELLS)
    for row in some(torus.rows, _MOST_CELLS):
        if row is None:
            yield f"{'':{_LABEL}}   " + "    ".join("⋮".center(9) for _ in columns).rstrip()
            continue
        names = [
            "…" if column is None else f"node{row * torus.columns + column}" for column in columns
        ]
        yield f"{'':{_LABEL}}╶─ " + " ── ".join(name.center(9) for name in names) + " ─╴"
    yield f"{'':{_LABEL}}each row and each column is a ring"


def _node(fabric: Cluster) -> Iterator[str]:
    """Draw one node: its devices as squares, below them the NIC that each of them uses."""
    per_node = fabric.devices_per_node
    shown = some(per_node, _MOST_IN_ROW)
    if fabric.inside is not None:
        joined = "a switch in the node" if fabric.inside.kind == "switch" else "PCIe"
        yield _labelled("each node", f"{joined}, {show_rate(fabric.inside.rate_bps)} a device")
        yield _labelled("", "┬───" * (len(shown) - 1) + "┬")
    squares = [" … " if each is None else "▣   " for each in shown]
    yield _labelled("each node" if fabric.inside is None else "", "".join(squares).rstrip())
    nics = np.zeros(0, np.int64) if isinstance(fabric.network, Torus) else fabric.nic_of_device
    if len(nics):
        places = [f"{'…' if each is None else nics[each]:<4}" for each in shown]
        yield _labelled("NIC", "".join(places).rstrip())
    else:
        yield _labelled("NICs", "east, west, south, north, of every device")


def _labelled(label: str, text: str) -> str:
    return f"{label:>{_LABEL - 2}}  {text}".rstrip()


def _row(label: str, cells: Sequence[str], width: int = _CELL) -> str:
    return _labelled(label, "".join(cell.center(width) for cell in cells))


def _or_gap(number: int | None, text: str) -> str:
    return "…" if number is None else text
