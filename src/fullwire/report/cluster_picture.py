"""The picture of a described cluster: its network from the spine down, and one of its nodes.

The width of a band is its capacity. With a spine of 2:1, the uplinks of a leaf are half as wide as
all links from its nodes together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from fullwire.clusters.cluster import Cluster, LeafSpine, Torus
from fullwire.report.charts import COLOURS, check_plot_path, save, titled
from fullwire.report.cluster import cluster_sentence, some
from fullwire.units import show_rate

if TYPE_CHECKING:
    import altair as alt

_INK, _PALE, _LINE = "#1f2933", "#e6edf2", "#9fb1bf"
_BLUE, _RED = COLOURS[0], COLOURS[1]
_WIDE = 980
_MOST_LEAVES, _MOST_IN_LEAF, _MOST_ON_SWITCH, _MOST_IN_ROW = 8, 4, 14, 16
_MOST_RAILS = 8
# without the red that marks slow links
_RAIL_COLOURS = [COLOURS[0], *COLOURS[2:], "#3c8dad", "#a3b18a"]
_SPINE, _LEAF, _NODE = (16, 46), 118, 226  # heights, from the top
_RAIL_STEP = 7
_CORE_ROOM = 84
_FULL = 0.6  # of a leaf's room: as wide as all links up to it


def plot_cluster(cluster: Cluster, path: Path) -> None:
    """Draw a cluster as PNG, SVG or HTML, by the ending of the file's name."""
    check_plot_path(path)
    import altair as alt

    network = _Sheet()
    if isinstance(cluster.network, Torus):
        _draw_torus(network, cluster, cluster.network)
    elif cluster.leaves:
        _draw_leaves(network, cluster)
    else:
        _draw_switch(network, cluster)
    node = _Sheet()
    _draw_node(node, cluster)
    chart = alt.vconcat(network.chart(), node.chart(), spacing=30)
    save(titled(chart, cluster_sentence(cluster), wrap(cluster.rests_on, 150)), path)


@dataclass(frozen=True, slots=True)
class _Sheet:
    """Boxes, bands and words on a drawing; coordinates are pixels from the top left."""

    boxes: list[dict[str, Any]] = field(default_factory=list)
    words: list[dict[str, Any]] = field(default_factory=list)

    def box(
        self, x: float, y: float, x2: float, y2: float, colour: str, edge: str | None = None
    ) -> None:
        """Draw a box, a band or a line."""
        place = {"x": x, "x2": x2, "y": y, "y2": y2}
        self.boxes.append({**place, "colour": colour, "edge": edge or colour})

    def band(self, x: float, y: float, y2: float, wide: float, colour: str) -> None:
        """Draw an upright band around x, wide enough to be seen."""
        half = max(wide, 1.4) / 2
        self.box(x - half, y, x + half, y2, colour)

    def word(
        self,
        x: float,
        y: float,
        text: str,
        *,
        colour: str = _INK,
        align: str = "center",
        size: int = 11,
    ) -> None:
        """Write a word; y is its middle."""
        self.words.append(
            {"x": x, "y": y, "text": text, "colour": colour, "align": align, "size": size}
        )

    def chart(self) -> alt.LayerChart:
        import altair as alt

        lowest = max(box["y2"] for box in self.boxes)
        height = max([lowest, *(word["y"] + 8 for word in self.words)]) + 4
        across = {"axis": None, "scale": alt.Scale(domain=[0, _WIDE], nice=False)}
        down = {"axis": None, "scale": alt.Scale(domain=[height, 0], nice=False)}
        boxes = (
            alt.Chart(alt.Data(values=self.boxes))
            .mark_rect(strokeWidth=1, opacity=1)
            .encode(
                x=alt.X("x:Q", **across),
                x2="x2:Q",
                y=alt.Y("y:Q", **down),
                y2="y2:Q",
                color=alt.Color("colour:N", scale=None),
                stroke=alt.Stroke("edge:N", scale=None),
            )
        )
        words = [
            alt.Chart(alt.Data(values=[word for word in self.words if word["align"] == align]))
            .mark_text(baseline="middle", align=align)
            .encode(
                x=alt.X("x:Q", **across),
                y=alt.Y("y:Q", **down),
                text="text:N",
                color=alt.Color("colour:N", scale=None),
                size=alt.Size("size:Q", scale=None),
            )
            for align in ("left", "center", "right")
        ]
        return alt.layer(boxes, *words).properties(width=_WIDE, height=height)


def _draw_leaves(sheet: _Sheet, cluster: Cluster) -> None:
    """Draw the spine, the uplinks of each leaf, and the leaf, or its rails, over its nodes."""
    network = cluster.network
    assert isinstance(network, LeafSpine)
    sheet.box(0, _SPINE[0], _WIDE, _SPINE[1], _PALE, _LINE)
    narrow = network.oversubscription > 1
    colour = _RED if narrow else _BLUE
    sheet.word(
        _WIDE / 2, sum(_SPINE) / 2, "a spine in each pod" if cluster.pods else "spine", size=13
    )
    over = f"uplinks {network.oversubscription:g}:1{', by rail' if network.by_rail else ''}"
    sheet.word(10, sum(_SPINE) / 2, over, align="left", colour=colour, size=12)
    groups = some(-(-cluster.nodes // network.nodes_per_leaf), _MOST_LEAVES)
    room = _WIDE / len(groups)
    full = _FULL * room
    rails = min(cluster.nics_per_node, _MOST_RAILS) if network.by_rail else 1
    wide = full / max(network.oversubscription, 1) / rails
    half = _SPINE[1] + (_LEAF - _SPINE[1]) / 2
    for place, group in enumerate(groups):
        middle = (place + 0.5) * room
        if group is None:
            sheet.word(middle, (_LEAF + _NODE) / 2, "…", size=20)
            continue
        for rail in range(rails):
            x = middle + (rail - (rails - 1) / 2) * full / rails
            sheet.band(x, _SPINE[1], _LEAF, wide - (2.5 if rails > 1 else 0), colour)
        sheet.box(middle - 34, half - 9, middle + 34, half + 9, "white", "white")
        sheet.word(middle, half, show_rate(cluster.uplink_rate_bps), colour=colour)
        left, right = middle - 0.44 * room, middle + 0.44 * room
        if network.by_rail:
            below = _rails(sheet, cluster, left, right)
        else:
            below = _LEAF + 24
            sheet.box(left, _LEAF, right, below, _PALE, _LINE)
            sheet.word(middle, _LEAF + 12, f"leaf{group}", size=12)
        first = group * network.nodes_per_leaf
        count = min(network.nodes_per_leaf, cluster.nodes - first)
        shown = some(count, _MOST_IN_LEAF)
        step = (right - left) / len(shown)
        link = min(_FULL * room / count, 0.8 * step) if len(shown) == count else 0.5 * step
        for position, number in enumerate(shown):
            x = left + (position + 0.5) * step
            if number is None:
                sheet.word(x, _NODE + 10, "…", size=14)
            else:
                _draw_host(sheet, cluster, first + number, (x, step), below, link)
        named = f"node{first}" if count == 1 else f"node{first} to {first + count - 1}"
        sheet.word(middle, _NODE + 34, named)
    if cluster.pods:
        _draw_core(sheet, cluster, network)


def _draw_core(sheet: _Sheet, cluster: Cluster, network: LeafSpine) -> None:
    """Draw the core above the spines, and the links up to it from each pod."""
    colour = _RED if network.core_oversubscription > 1 else _BLUE
    _move_up(sheet, -_CORE_ROOM)
    below = _CORE_ROOM + _SPINE[0]
    sheet.box(0, _SPINE[0], _WIDE, _SPINE[1], _PALE, _LINE)
    sheet.word(_WIDE / 2, sum(_SPINE) / 2, "core", size=13)
    pods = some(cluster.pods // (cluster.nics_per_node if network.by_rail else 1), _MOST_LEAVES)
    room = _WIDE / len(pods)
    wide = _FULL * room / max(network.core_oversubscription, 1)
    for place, pod in enumerate(pods):
        x, half = (place + 0.5) * room, (_SPINE[1] + below) / 2
        if pod is None:
            sheet.word(x, half, "…", size=20)
            continue
        sheet.band(x, _SPINE[1], below, wide, colour)
        sheet.box(x - 60, half - 9, x + 60, half + 9, "white", "white")
        sheet.word(x, half, f"pod{pod}: {show_rate(cluster.core_rate_bps)}", colour=colour)
    over = (
        f"uplinks {network.core_oversubscription:g}:1 from pods of {network.leaves_per_pod} leaves"
    )
    sheet.word(10, sum(_SPINE) / 2, over, align="left", colour=colour, size=12)


def _rails(sheet: _Sheet, cluster: Cluster, left: float, right: float) -> float:
    """Draw the rails of some nodes as bars, each in its colour, and return where they end."""
    rails = min(cluster.nics_per_node, _MOST_RAILS)
    for rail in range(rails):
        top = _LEAF + rail * _RAIL_STEP
        sheet.box(left, top, right, top + 4, _RAIL_COLOURS[rail])
    return _LEAF + rails * _RAIL_STEP


def _draw_host(
    sheet: _Sheet, cluster: Cluster, node: int, place: tuple[float, float], top: float, wide: float
) -> None:
    """Draw a node and its NICs' links up; one of another rate is red, and its width is its rate."""
    x, step = place
    other = next(
        (other_host for other_host in cluster.other_hosts if other_host.node == node), None
    )
    share = 1.0 if other is None else other.nic_rate_bps / cluster.nics.rate_bps
    half = min(0.4 * step, 26)
    by_rail = isinstance(cluster.network, LeafSpine) and cluster.network.by_rail
    if by_rail:
        rails = min(cluster.nics_per_node, _MOST_RAILS)
        for rail in range(rails):
            at = x + (rail - (rails - 1) / 2) * min(2 * half / rails, 5)
            colour = _RAIL_COLOURS[rail] if other is None else _RED
            sheet.band(at, _LEAF + rail * _RAIL_STEP + 4, _NODE, 1.4, colour)
    else:
        sheet.band(x, top, _NODE, wide * min(share, 1.0), _BLUE if other is None else _RED)
    sheet.box(
        x - half,
        _NODE,
        x + half,
        _NODE + 22,
        "white" if other is None else "#fbe9eb",
        _INK if other is None else _RED,
    )
    if half > 12:
        sheet.word(x, _NODE + 11, str(node), size=10)
    if other is not None:
        sheet.box(x - 26, _NODE - 22, x + 26, _NODE - 6, "white", "white")
        sheet.word(x, _NODE - 14, show_rate(other.nic_rate_bps), colour=_RED, size=10)


def _draw_switch(sheet: _Sheet, cluster: Cluster) -> None:
    by_rail = isinstance(cluster.network, LeafSpine) and cluster.network.by_rail
    if by_rail:
        sheet.word(0, _LEAF - 14, f"{cluster.nics_per_node} rails, a switch each", align="left")
        below = _rails(sheet, cluster, 0, _WIDE)
    else:
        below = float(_LEAF + 26)
        sheet.box(0, _LEAF, _WIDE, below, _PALE, _LINE)
        sheet.word(_WIDE / 2, _LEAF + 13, "switch", size=13)
    shown = some(cluster.nodes, _MOST_ON_SWITCH)
    step = _WIDE / max(len(shown), 3)
    begin = (_WIDE - step * len(shown)) / 2
    for place, node in enumerate(shown):
        x = begin + (place + 0.5) * step
        if node is None:
            sheet.word(x, _NODE + 11, "…", size=16)
        else:
            _draw_host(sheet, cluster, node, (x, step), below, min(0.3 * step, 14))
    nics = f"{cluster.nics_per_node} x {show_rate(cluster.nics.rate_bps)} a node"
    sheet.word(_WIDE / 2, _NODE + 36, nics)
    _move_up(sheet, _LEAF - 24)


def _move_up(sheet: _Sheet, by: float) -> None:
    """Move the drawing up into the room of a missing spine, or down."""
    for shape in (*sheet.boxes, *sheet.words):
        shape["y"] -= by
    for box in sheet.boxes:
        box["y2"] -= by


def _draw_torus(sheet: _Sheet, cluster: Cluster, torus: Torus) -> None:
    step = 62
    slow = {other_host.node: other_host.nic_rate_bps for other_host in cluster.other_hosts}
    columns, rows = some(torus.columns, 12), some(torus.rows, 8)
    begin = (_WIDE - step * len(columns)) / 2
    for line, row in enumerate(rows):
        y = 20 + (line + 0.5) * step
        sheet.box(begin, y - 1, begin + step * len(columns), y + 1, _BLUE)
        for place, column in enumerate(columns):
            x = begin + (place + 0.5) * step
            if line == 0:
                sheet.box(x - 1, 20, x + 1, 20 + step * len(rows), _BLUE)
            if row is None or column is None:
                sheet.box(x - 14, y - 9, x + 14, y + 9, "white", "white")
                sheet.word(x, y, "…", size=14)
                continue
            node = row * torus.columns + column
            edge = _RED if node in slow else _INK
            sheet.box(x - 18, y - 12, x + 18, y + 12, "white", edge)
            sheet.word(x, y, str(node), size=10, colour=edge)
    words = f"each row and each column is a ring of links of {show_rate(cluster.nics.rate_bps)}"
    sheet.word(_WIDE / 2, 20 + step * len(rows) + 14, words)


def _draw_node(sheet: _Sheet, cluster: Cluster) -> None:
    """Draw one node: the links between its devices, the devices, and the NIC that each uses."""
    shown = some(cluster.devices_per_node, _MOST_IN_ROW)
    step = min(_WIDE / len(shown), 92)
    begin = (_WIDE - step * len(shown)) / 2
    end = begin + step * len(shown)
    sheet.box(begin - 12, 0, end + 12, 196, "#fafbfc", _LINE)
    sheet.word(begin - 2, 12, "each node", align="left", size=12)
    if cluster.inside is not None:
        joined = "switch in the node" if cluster.inside.kind == "switch" else "PCIe"
        sheet.box(begin, 24, end, 46, _PALE, _LINE)
        sheet.word(
            (begin + end) / 2,
            35,
            f"{joined}, {show_rate(cluster.inside.rate_bps)} a device each way",
        )
    of_nic: dict[int, list[float]] = {}
    for place, device in enumerate(shown):
        x = begin + (place + 0.5) * step
        if device is None:
            sheet.word(x, 92, "…", size=16)
            continue
        if cluster.inside is not None:
            sheet.band(x, 46, 78, 7, _LINE)
        nic = -1 if isinstance(cluster.network, Torus) else int(cluster.nic_of_device[device])
        of_nic.setdefault(nic, []).append(x)
        sheet.box(x - 20, 78, x + 20, 106, "white", _INK)
        sheet.word(x, 92, str(device))
    for nic, places in of_nic.items():  # below the devices that use it
        middle = sum(places) / len(places)
        colour = _RAIL_COLOURS[nic % len(_RAIL_COLOURS)] if nic >= 0 else _BLUE
        for x in places:
            sheet.band(x, 106, 130, 2, colour)
        if len(places) > 1:
            sheet.box(min(places), 129, max(places), 131, colour)
        sheet.band(middle, 130, 146, 4, colour)
        name = "east, west, south, north" if nic < 0 else f"nic{nic}"
        half = max(min(step / 2 - 5, 40), 20) if nic >= 0 else 90
        sheet.box(middle - half, 146, middle + half, 168, "white", colour)
        sheet.word(middle, 157, name)
        if step > 60 or nic < 0 or len(places) > 1:
            sheet.word(middle, 182, show_rate(cluster.nics.rate_bps), colour=colour)
