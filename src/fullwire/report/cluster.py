"""A described cluster for the terminal: drawn from the spine to the devices, then its links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fullwire.clusters.cluster import (
    Cluster,
    LeafSpine,
    Network,
    OneSwitch,
    Torus,
    leaf_name,
    link_classes,
)
from fullwire.report.charts import save, titled
from fullwire.report.terminal import columns, draw, print_table, say, say_flush
from fullwire.units import show_bytes, show_rate, show_time

if TYPE_CHECKING:
    import altair as alt

    from fullwire.answers.cluster_fit import ClusterFit

_LABEL, _CELL = 12, 16
_FEWEST_CELLS, _MOST_CELLS = 3, 5
_MOST_IN_ROW = 16
_MOST_STRANDS = 8
_PANEL_WIDTH, _ROW_HEIGHT, _ONLY_ROW_HEIGHT = 400, 220, 340  # of the picture of a fit
_LEGEND_LINES = 14
_ZERO = "#1f2933"
_TREE_IS_OPEN = (
    "The tables leave open whether the library has a tree between nodes. The file keeps every fit "
    "that they allow, and intervals hold all answers. Tables of more nodes tell it."
)
_PAIR_IS_OPEN = (
    "The tables leave open whether an all-reduce of two nodes sends half as much as one of more "
    "nodes. The file keeps every fit that they allow, and intervals hold all answers."
)
_ADDING_IS_OPEN = (
    "The tables leave open whether the library lets the switches in the nodes add. The file keeps "
    "every fit that they allow, and intervals hold all answers."
)
_SEVERAL_IN_A_NODE = "Tables of one node, with several numbers of devices, mostly tell it."
_PAIRS_AND_MORE = "Tables of two nodes and of more, together, mostly tell it."
_CARRIED_OVER = (
    "The file keeps how a row differs from its protocol. Other device counts take that over: less "
    "of it, the farther away they are."
)


def print_cluster(cluster: Cluster) -> None:
    """Print a cluster: a sentence, a drawing, its links, and the sources of its figures."""
    say(cluster_sentence(cluster))
    say("")
    for line in drawing(cluster):
        draw(line)
    say("")
    rows = []
    for links in link_classes(cluster):
        least, most = show_rate(links.slowest_bps), show_rate(links.fastest_bps)
        rate = least if least == most else f"{least} to {most}"
        payload, latency = f"{links.payload_share:.1%}", show_time(links.latency_s)
        rows.append([links.kind, f"{links.count:,}", rate, payload, latency])
    heads = ["links", "how many", "line rate", "for payload", "latency"]
    print_table(heads, rows, texts={"links"})
    say_flush(cluster.rests_on)


def print_clusters(clusters: Sequence[Cluster]) -> None:
    """Print the built-in clusters, a line each."""
    rows = [
        [
            cluster.name,
            f"{cluster.devices_per_node}",
            "" if cluster.inside is None else show_rate(cluster.inside.rate_bps),
            f"{cluster.nics_per_node} x {show_rate(cluster.nics.rate_bps)}",
            network_words(cluster.network),
        ]
        for cluster in clusters
    ]
    heads = ["cluster", "devices a node", "in the node", "NICs a node", "network"]
    print_table(heads, rows, texts={"cluster", "network"})
    for one in clusters:
        if one.rests_on:
            say(f"{one.name}: {one.rests_on}")


def cluster_sentence(cluster: Cluster) -> str:
    """Describe the cluster in a sentence."""
    devices = "1 device" if cluster.devices_per_node == 1 else f"{cluster.devices_per_node} devices"
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    others = ""
    if cluster.other_hosts:
        named = ", ".join(
            f"node{other_host.node} at {show_rate(other_host.nic_rate_bps)}"
            for other_host in cluster.other_hosts[:4]
        )
        more = len(cluster.other_hosts) - 4
        others = f", but {named}" + (f" and {more} more" if more > 0 else "")
    return (
        f"{cluster.name}: {nodes} of {devices} ({cluster.devices:,} in all), "
        f"{network_words(cluster.network)}{others}"
    )


def network_words(network: Network) -> str:
    """Return the usual name of a network."""
    if isinstance(network, OneSwitch):
        return "one switch"
    if isinstance(network, Torus):
        return f"a torus of {network.rows} x {network.columns}"
    kind = "rails" if network.by_rail else "a fat tree"
    nodes = "1 node" if network.nodes_per_leaf == 1 else f"{network.nodes_per_leaf} nodes"
    core = ""
    if network.leaves_per_pod is not None:
        core = f", {network.leaves_per_pod} leaves a pod, {network.core_oversubscription:g}:1"
    adds = ", switches that add" if network.adds else ""
    return f"{kind}, {nodes} a leaf, {network.oversubscription:g}:1{core}{adds}"


def drawing(cluster: Cluster) -> Iterator[str]:
    """Yield a drawing of the cluster from the top down; each row is named."""
    network = cluster.network
    if isinstance(network, Torus):
        across = some(network.columns, _MOST_CELLS)
        for row in some(network.rows, _MOST_CELLS):
            if row is None:
                yield f"{'':{_LABEL}}   " + "    ".join("⋮".center(9) for _ in across).rstrip()
                continue
            names = ["…" if n is None else f"node{row * network.columns + n}" for n in across]
            yield f"{'':{_LABEL}}╶─ " + " ── ".join(name.center(9) for name in names) + " ─╴"
        yield f"{'':{_LABEL}}each row and each column is a ring"
    elif cluster.leaves:
        yield from _leaves(cluster)
    else:
        cells = _cells(cluster.nodes)
        by_rail = isinstance(network, LeafSpine) and network.by_rail and cluster.nics_per_node > 1
        rails = f"{cluster.nics_per_node} switches, one for each rail"
        yield _switch(rails if by_rail else "switch", cells)
        yield _row("NICs", [_or_gap(cell, _strands(cluster.nics_per_node)) for cell in cells])
        rate = f"{cluster.nics_per_node} x {show_rate(cluster.nics.rate_bps)}"
        yield _row("", [_or_gap(cell, rate) for cell in cells])
        yield _row("nodes", [_or_gap(cell, f"node{cell}") for cell in cells])
    yield ""
    # One node: its devices as squares, below them the NIC that each of them uses.
    shown = some(cluster.devices_per_node, _MOST_IN_ROW)
    if cluster.inside is not None:
        joined = "a switch in the node" if cluster.inside.kind == "switch" else "PCIe"
        yield _labelled("each node", f"{joined}, {show_rate(cluster.inside.rate_bps)} a device")
        yield _labelled("", "┬───" * (len(shown) - 1) + "┬")
    squares = [" … " if device is None else "▣   " for device in shown]
    yield _labelled("each node" if cluster.inside is None else "", "".join(squares).rstrip())
    if isinstance(network, Torus) or not len(cluster.nic_of_device):
        yield _labelled("NICs", "east, west, south, north, of every device")
    else:
        places = [
            f"{'…' if device is None else cluster.nic_of_device[device]:<4}" for device in shown
        ]
        yield _labelled("NIC", "".join(places).rstrip())


def some(count: int, most: int) -> list[int | None]:
    """Return the numbers from 0 to `count` that are drawn; None stands for those left out."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


def _cells(count: int) -> list[int | None]:
    """Return the numbers of the nodes or leaves that stand side by side within the terminal."""
    room = (columns() - _LABEL) // _CELL
    return some(count, max(_FEWEST_CELLS, min(room, _MOST_CELLS)))


def _leaves(cluster: Cluster) -> Iterator[str]:
    """Draw the spine, or the core over a spine in each pod, and leaves with their nodes below."""
    network = cluster.network
    assert isinstance(network, LeafSpine)
    leaves = _cells(-(-cluster.nodes // network.nodes_per_leaf))
    yield _switch("core" if cluster.pods else "spine", leaves)
    if cluster.pods:
        width = _CELL * len(leaves)
        ratio = f"{network.core_oversubscription:g}:1"
        narrow = " ◀" if network.core_oversubscription > 1 else ""
        yield _row(ratio, [f"{show_rate(cluster.core_rate_bps)} up from each pod"], width) + narrow
        yield _row("pods", [f"a spine over every {network.leaves_per_pod} leaves"], width)
    ports = network.nodes_per_leaf * (1 if network.by_rail else cluster.nics_per_node)
    uplink = show_rate(cluster.uplink_rate_bps)
    yield _row("uplinks", [_or_gap(leaf, "┃") for leaf in leaves])
    narrow = " ◀" if network.oversubscription > 1 else ""
    over = f"{network.oversubscription:g}:1"
    yield _row(over, [_or_gap(leaf, uplink) for leaf in leaves]) + narrow
    names, nodes = [], []
    for leaf in leaves:
        if leaf is None:
            names.append("…")
            nodes.append("…")
            continue
        rails = f"leaf{leaf}.rail0-{cluster.nics_per_node - 1}"
        names.append(f"[{rails if network.by_rail else leaf_name(cluster, leaf)}]")
        first = leaf * network.nodes_per_leaf
        last = min(first + network.nodes_per_leaf, cluster.nodes) - 1
        nodes.append(f"node{first}" if first == last else f"node{first}-{last}")
    yield _row("leaves", names)
    down = f"{ports} x {show_rate(cluster.nics.rate_bps)}"
    yield _row("NICs", [_or_gap(leaf, _strands(ports)) for leaf in leaves])
    yield _row("", [_or_gap(leaf, down) for leaf in leaves])
    yield _row("nodes", nodes)


def _switch(title: str, cells: Sequence[int | None]) -> str:
    """Draw a switch that spans all cells."""
    width = _CELL * len(cells)
    return _row("", ["╔" + f" {title} ".center(width - 2, "═") + "╗"], width)


def _strands(count: int) -> str:
    return "│" * count if count <= _MOST_STRANDS else "│" * (_MOST_STRANDS - 2) + "…│"


def _labelled(label: str, text: str) -> str:
    return f"{label:>{_LABEL - 2}}  {text}".rstrip()


def _row(label: str, cells: Sequence[str], width: int = _CELL) -> str:
    return _labelled(label, "".join(cell.center(width) for cell in cells))


def _or_gap(number: int | None, text: str) -> str:
    return "…" if number is None else text


def print_cluster_fit(fit: ClusterFit) -> None:
    """Print a fitted cluster: its protocols, the choices of the machine, and the fit's errors."""
    say(cluster_sentence(fit.cluster))
    heads = ["protocol", "start-up", "hop in a node", "hop between", "fills inside", "fills NICs"]
    rows = [
        [
            protocol.name,
            show_time(protocol.startup_s),
            show_time(protocol.inside_hop_s),
            show_time(protocol.between_hop_s),
            f"{protocol.inside_share:.1%}",
            f"{protocol.between_share:.1%}",
        ]
        for protocol in fit.protocols
    ]
    print_table(heads, rows, texts={"protocol"})
    heads = ["collective", "workers", "from", "to", "algorithm", "protocol"]
    rows = [
        [
            choice.op,
            f"{choice.workers}",
            show_bytes(choice.from_bytes),
            "" if choice.to_bytes is None else show_bytes(choice.to_bytes),
            choice.algorithm,
            choice.protocol,
        ]
        for choice in fit.choices
    ]
    print_table(heads, rows, texts={"collective", "algorithm", "protocol"})
    names = _table_names(fit)
    errors = {(residual.table, residual.bytes): residual.error for residual in fit.residuals}
    off = f"median {fit.quantile(0.5):.1%}, p90 {fit.quantile(0.9):.1%}"
    say(f"The protocols against the tables, off by size ({off}):")
    rows = [
        [
            show_bytes(size),
            *(
                "" if (error := errors.get((table, size))) is None else f"{error:+.1%}"
                for table in names
            ),
        ]
        for size in sorted({residual.bytes for residual in fit.residuals})
    ]
    print_table(["bytes", *names.values()], rows, texts=set())
    say("")
    for reason in fit.unused:
        say_flush(f"left out: {reason}")
    for doubt in fit.doubts:
        say_flush(doubt)
    say_flush(_CARRIED_OVER)
    assert fit.cluster.measured is not None
    allowed = [*fit.cluster.measured.allowed()]
    if len({bool(measured.tree_share) for measured in allowed}) > 1:
        say_flush(_TREE_IS_OPEN)
    devices = fit.cluster.devices_per_node
    reduces = {each.workers for each in fit.residuals if each.op == "allreduce"}
    if len({bool(measured.switch_share) for measured in allowed}) > 1:
        has_several = len([workers for workers in reduces if workers <= devices]) > 1
        say_flush(_ADDING_IS_OPEN if has_several else f"{_ADDING_IS_OPEN} {_SEVERAL_IN_A_NODE}")
    if fit.cluster.nodes > 1 and len({bool(measured.pair_share) for measured in allowed}) > 1:
        nodes = {-(-workers // devices) for workers in reduces}
        has_both = 2 in nodes and max(nodes) > 2
        say_flush(_PAIR_IS_OPEN if has_both else f"{_PAIR_IS_OPEN} {_PAIRS_AND_MORE}")


def _table_names(fit: ClusterFit) -> dict[int, str]:
    """Return the name of each table by its number; alike ones are told apart by the number."""
    asked = {residual.table: (residual.op, residual.workers) for residual in fit.residuals}
    several = [*asked.values()]
    return {
        table: f"{op} {workers}" + (f", table {table}" if several.count((op, workers)) > 1 else "")
        for table, (op, workers) in asked.items()
    }


def plot_cluster_fit(fit: ClusterFit, path: Path) -> None:
    """Draw the tables as points, the fitted protocols as lines, and how far these are off.

    Each operation has a row of its own, and each device count a colour on one scale.
    """
    import altair as alt

    ops = list(dict.fromkeys(residual.op for residual in fit.residuals))
    height = _ROW_HEIGHT if len(ops) > 1 else _ONLY_ROW_HEIGHT
    counts = len({residual.workers for residual in fit.residuals})
    legend = alt.Legend(symbolLimit=0, columns=-(-counts // _LEGEND_LINES))
    rows = []
    for op in ops:
        points = [
            {
                "bytes": residual.bytes,
                "measured": residual.measured_s * 1e6,
                "predicted": residual.predicted_s * 1e6,
                "error": residual.error,
                "devices": residual.workers,
                "table": residual.table,
            }
            for residual in fit.residuals
            if residual.op == op
        ]
        rows.append(_fit_panels(op, points, height, legend))
    off = f"median {fit.quantile(0.5):.1%}, p90 {fit.quantile(0.9):.1%}"
    lines = [
        "left: points are measured, lines are the fitted protocols",
        f"right: how far the protocols are off, above 0 % where they are slower ({off})",
    ]
    chart = alt.vconcat(*rows, spacing=24)
    save(titled(chart, cluster_sentence(fit.cluster), lines), path)


def _fit_panels(
    op: str, points: Sequence[Mapping[str, float]], height: int, legend: alt.Legend
) -> alt.HConcatChart:
    """Draw the times of an operation by size, and beside them the errors."""
    import altair as alt

    tens = [10.0**power for power in range(-3, 16)]  # lines at these only: others hide the points
    axis = alt.Axis(format="~s", values=tens)
    base = alt.Chart(alt.Data(values=points)).encode(
        x=alt.X("bytes:Q", scale=alt.Scale(type="log"), title="bytes", axis=axis),
        color=alt.Color(
            "devices:O",  # as numbers in order, and not as words
            title="devices",
            scale=alt.Scale(scheme=alt.SchemeParams(name="viridis", extent=[0, 0.92])),
            legend=legend,
        ),
        detail="table:N",
    )
    down = {"scale": alt.Scale(type="log"), "title": "microseconds", "axis": axis}
    times = alt.layer(
        base.mark_line().encode(y=alt.Y("predicted:Q", **down)),
        base.mark_point(filled=True).encode(y=alt.Y("measured:Q", **down)),
    )
    error = alt.Y("error:Q", title="predicted against measured", axis=alt.Axis(format="+.0%"))
    errors = alt.layer(
        alt.Chart(alt.Data(values=[{"error": 0}])).mark_rule(color=_ZERO).encode(y=error),
        base.mark_line(strokeWidth=1, opacity=0.6).encode(y=error),
        base.mark_point(filled=True).encode(y=error),
    )
    panels = (
        panel.properties(
            width=_PANEL_WIDTH, height=height, title=alt.Title(title, fontSize=13, anchor="start")
        )
        for panel, title in ((times, f"{op}, times"), (errors, f"{op}, errors"))
    )
    return alt.hconcat(*panels, spacing=32)
