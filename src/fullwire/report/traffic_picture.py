"""The picture of the traffic in packets: pattern, matrix, edges over time, one iteration."""

from __future__ import annotations

from collections.abc import Iterator
from math import atan2, cos, degrees, pi, sin
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fullwire.findings.traffic import traffic_findings
from fullwire.packets.edges import host_names, hosts_of
from fullwire.packets.flows import Traffic
from fullwire.packets.usual_iteration import UsualIteration, usual_iteration
from fullwire.report.charts import COLOURS, check_plot_path, save, titled
from fullwire.run.run import Real, Run
from fullwire.units import show_bytes
from fullwire.words import sentences

if TYPE_CHECKING:
    import altair as alt

_INK, _FAINT, _BAND = "#1f2933", "#c3cbd4", "#eef3f7"
_SLOTS = 700  # of the picture, from left to right
_MOST_EDGES = 10
_MOST_ITERATIONS = 30
_MOST_IN_MATRIX, _MOST_WITH_WORDS = 16, 5
_SMALL_EDGE = 0.02  # of the largest: smaller edges are left out
_ALIKE = 0.02  # edges that differ by less count as equal
_MOST_SAID = 12  # edges that carry different amounts, each with its own
_WIDE, _SIDE = 720, 300
_LONGEST_TITLE = 90
_Align: TypeAlias = Literal["left", "center", "right"]  # of a host's name
_MANY = 8  # hosts: with more, dots and arrows are smaller


def plot_traffic(run: Run, result: Traffic, path: Path) -> None:
    """Draw the pattern and the matrix, and beside them the bytes of each edge over time."""
    check_plot_path(path)
    import altair as alt

    left = [_pattern(result)]
    if len(result.hosts) <= _MOST_IN_MATRIX:
        left.append(_matrix(result))
    right = [_over_time(run, result)]
    usual = usual_iteration(result)
    if usual is not None:
        right.append(_iteration(usual, result))
    over = alt.vconcat(*right, spacing=28).resolve_scale(color="independent")
    first, *others = sentences(tuple(traffic_findings(result)))
    if len(first) > _LONGEST_TITLE:
        first, others = f"{len(result.hosts)} hosts: {result.pattern.kind}", [first, *others]
    chart = alt.hconcat(alt.vconcat(*left, spacing=28), over, spacing=44).resolve_scale(
        color="independent"
    )
    save(titled(chart, first, wrap(" ".join(others), 150)), path)


class _Place(NamedTuple):
    """The place of a host in the picture, and of its name beside it."""

    x: float
    y: float
    name_x: float
    name_y: float
    align: _Align


def _places(result: Traffic) -> dict[int, _Place]:
    """Put the hosts on a circle, in sending order, from the top and clockwise; or draw a tree."""
    order = [*result.pattern.order]
    if result.pattern.kind == "tree" and len(order) == len(result.hosts):
        return _in_generations(order, _edge_bytes(result))
    order += [host for host in range(len(result.hosts)) if host not in order]
    turn = 2 * pi / max(len(order), 1)
    around = {host: (sin(n * turn), cos(n * turn)) for n, host in enumerate(order)}
    places = {}
    for host, (x, y) in around.items():  # the name stays outside of the circle
        align: _Align = "center" if abs(x) < 0.3 else "left" if x > 0 else "right"
        places[host] = _Place(x, y, x * 1.15, y * 1.18, align)
    return places


def _in_generations(order: list[int], sent: Real) -> dict[int, _Place]:
    """Put a tree's root to the left, and each host's children beside it, around its height."""
    generation, children = {order[0]: 0}, {host: list[int]() for host in order}
    for host in order[1:]:  # outwards, so that a host's parent has come before
        parent = max(generation, key=lambda other: float(sent[other, host]))
        generation[host] = generation[parent] + 1
        children[parent].append(host)
    leaves = _leaves(order[0], children)
    across, down = 2 / max(generation.values()), 2 / max(len(leaves) - 1, 1)
    y: dict[int, float] = {host: 1 - row * down for row, host in enumerate(leaves)}
    for host in reversed(order):
        if children[host]:
            y[host] = sum(y[child] for child in children[host]) / len(children[host])
    places = {}
    for host in order:
        x, above = generation[host] * across - 1, 0.2 if y[host] >= y[order[0]] else -0.2
        if host == order[0]:
            places[host] = _Place(x, y[host], x - 0.15, y[host], "right")
        elif children[host]:
            places[host] = _Place(x, y[host], x + 0.08, y[host] + above, "right")
        else:
            places[host] = _Place(x, y[host], x + 0.15, y[host], "left")
    return places


def _leaves(host: int, children: dict[int, list[int]]) -> list[int]:
    return [leaf for child in children[host] for leaf in _leaves(child, children)] or [host]


def _edge_bytes(result: Traffic) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the bytes of each edge in an iteration, or in the whole capture if there are none."""
    sent = result.matrix_payload_bytes.astype(np.float64)
    if result.iterations is not None:
        usual = np.zeros(sent.size)
        usual[result.iterations.edges] = result.iterations.edge_bytes
        sent = usual.reshape(sent.shape)
    return sent


def _pattern(result: Traffic) -> alt.LayerChart:
    import altair as alt

    places, sent = _places(result), _edge_bytes(result)
    scale_down = min(_MANY / max(len(places), 1), 1.0)
    drawn = [
        _arrow(places[source][:2], places[target][:2], float(size / sent.max()), scale_down)
        | {"colour": _colour(result, source)}
        | {"said": show_bytes(float(size))}
        for (source, target), size in np.ndenumerate(sent)
        if size > _SMALL_EDGE * sent.max()
    ]
    hosts = [
        {
            "x": place.x,
            "y": place.y,
            "lx": place.name_x,
            "ly": place.name_y,
            "align": place.align,
            "host": result.hosts[host],
            "colour": _colour(result, host),
        }
        for host, place in places.items()
    ]
    plain = {"axis": None, "scale": alt.Scale(domain=[-1.7, 1.7], nice=False)}
    at = {"x": alt.X("x:Q", **plain), "y": alt.Y("y:Q", **plain)}
    own_colour = alt.Color("colour:N", scale=None)
    edges = alt.Chart(alt.Data(values=drawn))
    lines = edges.mark_rule(strokeCap="round").encode(
        **at,
        x2="x2:Q",
        y2="y2:Q",
        strokeWidth=alt.StrokeWidth("width:Q", scale=None),
        color=own_colour,
    )
    heads = edges.mark_point(shape="triangle-up", filled=True, opacity=1).encode(
        x=alt.X("hx:Q", **plain),
        y=alt.Y("hy:Q", **plain),
        size=alt.Size("head:Q", scale=None),
        angle=alt.Angle("angle:Q", scale=None),
        color=own_colour,
    )
    dots = alt.Chart(alt.Data(values=hosts)).mark_circle(size=260 * scale_down, opacity=1)
    names = [
        alt.Chart(alt.Data(values=[host for host in hosts if host["align"] == align]))
        .mark_text(fontSize=12, color=_INK, align=align)
        .encode(x=alt.X("lx:Q", **plain), y=alt.Y("ly:Q", **plain), text="host:N")
        for align in ("left", "center", "right")
    ]
    sizes = sent[sent > _SMALL_EDGE * sent.max()]
    least, most = float(sizes.min()), float(sizes.max())
    of_what = "an iteration" if result.iterations is not None else "in all"
    title, amounts = f"{show_bytes(least)} to {show_bytes(most)} over an edge, {of_what}", []
    if most <= least * (1 + _ALIKE):
        title = f"{show_bytes(float(np.median(sizes)))} over each edge, {of_what}"
    elif len(sizes) <= _MOST_SAID:
        title = f"over each edge, {of_what}"
        behind = {"stroke": "white", "strokeWidth": 3, "strokeOpacity": 0.9}
        amounts = [
            edges.mark_text(fontSize=10, color=_INK, **mark).encode(
                x=alt.X("mx:Q", **plain), y=alt.Y("my:Q", **plain), text="said:N"
            )
            for mark in (behind, {})
        ]
    kind = "who sends to whom" if result.pattern.kind == "none" else result.pattern.kind
    return alt.layer(
        lines, heads, *amounts, dots.encode(**at, color=own_colour), *names
    ).properties(width=_SIDE, height=_SIDE, title=_small(f"{kind}: {title}"))


def _small(text: str) -> alt.Title:
    import altair as alt

    return alt.Title(text, fontSize=13, anchor="start", fontWeight="normal", color=_INK)


def _colour(result: Traffic, host: int) -> str:
    is_slow = result.slow_link is not None and result.hosts[host] == result.slow_link.host
    return COLOURS[1] if is_slow else COLOURS[0]


def _arrow(
    start: tuple[float, float], end: tuple[float, float], of_most: float, scale_down: float
) -> dict[str, Any]:
    """Draw from host to host, a little to the left, so that both directions are visible."""
    (x, y), (x2, y2) = start, end
    long = max(((x2 - x) ** 2 + (y2 - y) ** 2) ** 0.5, 1e-9)
    dx, dy = (x2 - x) / long, (y2 - y) / long
    side, cut = 0.05 * scale_down, 0.16 * scale_down
    x, y = x + dx * cut - dy * side, y + dy * cut + dx * side
    x2, y2 = x2 - dx * cut - dy * side, y2 - dy * cut + dx * side
    share = of_most**0.5
    return {
        "x": x,
        "y": y,
        "x2": x2 - dx * 0.04,
        "y2": y2 - dy * 0.04,
        "hx": x2 - dx * 0.02,
        "hy": y2 - dy * 0.02,
        "angle": degrees(atan2(dx, dy)),
        "width": 0.8 + 2.7 * share,
        "mx": (x + x2) / 2 - dy * 0.1,
        "my": (y + y2) / 2 + dx * 0.1,
        "head": (60 + 110 * share) * scale_down,
    }


def _matrix(result: Traffic) -> alt.LayerChart:
    import altair as alt

    most = max(int(result.matrix_payload_bytes.max()), 1)
    cells = [
        {
            "from": source,
            "to": target,
            "share": size / most,
            "said": show_bytes(size),
            "ink": "white" if size > 0.55 * most else _INK,
        }
        for source, row in zip(result.hosts, result.matrix_payload_bytes.tolist(), strict=True)
        for target, size in zip(result.hosts, row, strict=True)
        if size
    ]
    base = alt.Chart(alt.Data(values=cells)).encode(
        x=alt.X(
            "to:N",
            sort=list(result.hosts),
            title="to",
            axis=alt.Axis(labelAngle=-35 if len(result.hosts) <= _MANY else -90),
        ),
        y=alt.Y("from:N", sort=list(result.hosts), title="from"),
    )
    scale = alt.Scale(domain=[0, 1], range=["#f2f6f9", COLOURS[0]])
    squares = base.mark_rect(stroke="white").encode(
        color=alt.Color("share:Q", scale=scale, legend=None)
    )
    words = base.mark_text(fontSize=10).encode(text="said:N", color=alt.Color("ink:N", scale=None))
    layers = [squares, words] if len(result.hosts) <= _MOST_WITH_WORDS else [squares]
    return (
        alt.layer(*layers)
        # words are black or white, independent of the other colours
        .resolve_scale(color="independent")
        .properties(width=_SIDE, height=_SIDE * 0.8, title=_small("payload sent, in all"))
    )


def _over_time(run: Run, result: Traffic) -> alt.VConcatChart:
    import altair as alt

    # The part of the capture that is drawn: the iterations, or the first of them if there are many.
    found = result.iterations
    begin, end = int(run.flows.start_ns.min()), int(run.flows.end_ns.max())
    if found is not None and len(found.begins_ns):
        begin = int(found.begins_ns[0])
        end = int(found.ends_ns[min(len(found.ends_ns), _MOST_ITERATIONS) - 1])
        beside = round((end - begin) * 0.02)
        begin, end = begin - beside, end + beside
    bands = []
    if found is not None:
        until_ns = np.minimum(found.ends_ns, np.append(found.begins_ns[1:], found.ends_ns[-1:]))
        ends_ns = zip(found.begins_ns.tolist(), until_ns.tolist(), strict=True)
        bands = [
            {
                "time": (first - begin) * 1e-9,
                "until": (last - begin) * 1e-9,
                "middle": (first + last - 2 * begin) / 2e9,
                "number": number,
            }
            for number, (first, last) in enumerate(ends_ns, 1)
            if first < end
        ]
    panels = list(_rates(run, result, begin, end))
    most = max((value["rate"] for _, _, values in panels for value in values), default=1.0)
    height = max(26, min(70, 420 // max(len(panels), 1)))
    seconds = alt.Scale(domain=[0, (end - begin) * 1e-9], nice=False)
    rates = alt.Scale(domain=[0, most], nice=False)
    shaded = alt.Chart(alt.Data(values=bands))
    band = shaded.mark_rect(color=_BAND, stroke="white").encode(
        x=alt.X("time:Q", scale=seconds), x2="until:Q"
    )
    numbers = shaded.mark_text(y=-7, fontSize=10, color="#52606d").encode(
        x="middle:Q", text="number:N"
    )
    at_right = {"align": "left", "baseline": "middle", "x": _WIDE + 8, "y": height / 2}
    charts = []
    for number, (name, colour, values) in enumerate(panels):
        is_last = number == len(panels) - 1
        across = alt.X(
            "time:Q",
            title="time (s)" if is_last else None,
            scale=seconds,
            axis=alt.Axis(labels=is_last, ticks=is_last, grid=False),
        )
        up = alt.Axis(tickCount=2, grid=False, format=".2~g")
        area = (
            alt.Chart(alt.Data(values=values))
            .mark_area(interpolate="step-after", color=colour, opacity=0.9)
            .encode(x=across, y=alt.Y("rate:Q", title=None, scale=rates, axis=up))
        )
        label = (
            alt.Chart(alt.Data(values=[{"name": name}]))
            .mark_text(**at_right, fontSize=11, color=_INK)
            .encode(text="name:N")
        )
        above = [numbers] if number == 0 and bands else []
        layers = alt.layer(band, area, *above, label)
        charts.append(layers.properties(width=_WIDE, height=height))
    edges = int((_edge_bytes(result) > _SMALL_EDGE * _edge_bytes(result).max()).sum())
    title = "Gbps on each edge"
    if edges > len(panels):
        title = f"Gbps on the first {len(panels)} of {edges} edges"
    if bands:
        title += f", iterations shaded: {bands[0]['number']} to {bands[-1]['number']}"
    return alt.vconcat(*charts, spacing=6).properties(title=_small(title))


def _rates(
    run: Run, result: Traffic, begin: int, end: int
) -> Iterator[tuple[str, str, list[dict[str, float]]]]:
    """Return each edge's rate over time, in slots as wide as a picture can show."""
    flows, names = run.flows, host_names(run)
    bin_ns = max(int((flows.end_ns - flows.start_ns).max()), 1)
    width_ns = bin_ns * max(-(-(end - begin) // (_SLOTS * bin_ns)), 1)  # as many bins in each
    source = hosts_of(flows.source, result.hosts, names)
    target = hosts_of(flows.destination, result.hosts, names)
    slot = (flows.start_ns - begin) // width_ns
    slots = -(-(end - begin) // width_ns)
    within = (slot >= 0) & (slot < slots)
    carried = _edge_bytes(result)
    for edge in result.edges[:_MOST_EDGES]:
        a, b = result.hosts.index(edge.source), result.hosts.index(edge.target)
        if carried[a, b] <= _SMALL_EDGE * carried.max():
            continue  # its data is before the iterations
        rows = within & (source == a) & (target == b)
        sent = np.bincount(slot[rows], flows.wire_bytes[rows], slots)
        values = [
            {"time": place * width_ns * 1e-9, "rate": size * 8 / width_ns}
            for place, size in enumerate(sent.tolist())
        ]
        yield f"{edge.source} → {edge.target}", _colour(result, a), values


def _iteration(usual: UsualIteration, result: Traffic) -> alt.LayerChart:
    import altair as alt

    # A lane for each collective, so that none hides another at the same time.
    until_s: list[float] = []
    lanes = []
    for collective in usual.collectives:
        free = [lane for lane, end_s in enumerate(until_s) if end_s <= collective.data_s]
        lane = free[0] if free else len(until_s)
        until_s[lane : lane + 1] = [collective.end_s]
        lanes.append(lane)
    bars = [
        {
            "host": result.hosts[host],
            "came": came_s * 1e3,
            "data": max(each.data_s, came_s) * 1e3,
            "end": each.end_s * 1e3,
            "op": each.op,
            "lane": lane,
        }
        for each, lane in zip(usual.collectives, lanes, strict=True)
        for host, came_s in enumerate(each.came_s)
        if came_s is not None
    ]
    base = alt.Chart(alt.Data(values=bars)).encode(
        y=alt.Y("host:N", sort=list(result.hosts), title=None),
        yOffset=alt.YOffset("lane:O", scale=alt.Scale(domain=sorted(set(lanes)))),
    )
    waits = base.mark_bar(height=3, color=_FAINT, opacity=1).encode(
        x=alt.X("came:Q", title="time in the iteration (ms)"), x2="data:Q"
    )
    ops = list(dict.fromkeys(bar["op"] for bar in bars))
    sends = base.mark_bar(height=11, stroke="white").encode(
        x="data:Q",
        x2="end:Q",
        color=alt.Color(
            "op:N",
            title=None,
            scale=alt.Scale(domain=ops, range=COLOURS[: len(ops)]),
            legend=alt.Legend(orient="top", symbolStrokeWidth=0),
        ),
    )
    ticks = base.mark_tick(thickness=2, size=13, color=_INK).encode(x="came:Q")
    return (waits + sends + ticks).properties(
        width=_WIDE,
        height=max(len(result.hosts) * (10 + 14 * len(set(lanes))), 60),
        title=_small(
            f"iteration {usual.number} as its collectives; a tick is a host's first packet for one"
        ),
    )
