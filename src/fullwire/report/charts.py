"""Pictures of results: PNG, SVG, or one offline HTML page, by the ending of the file's name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from math import isinf, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fullwire.errors import UsageError
from fullwire.outputs import refuse_existing, written
from fullwire.simulation.conditions import CONDITIONS
from fullwire.units import show_rate
from fullwire.words import sentences

if TYPE_CHECKING:
    import altair as alt

    from fullwire.answers.codecs import Codecs
    from fullwire.answers.time_to_target import ToTarget
    from fullwire.answers.whatif import WhatIf
    from fullwire.simulation.grid import Predictions

ENDINGS = (".png", ".svg", ".html")
CURVE_POINTS = 120  # between the first and the last value of the horizontal axis
MOST_MARKS = 50_000  # a browser still draws that many without stopping
_INK, _FAINT = "#1f2933", "#d9dee4"
COLOURS = ["#0b6e99", "#d1495b", "#edae49", "#2e8b57", "#6c5b9e", "#8c6d46", "#4a5568"]
_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0), ("milliseconds", 1e-3))
_FRONT_WIDTH, _FRONT_HEIGHT = 520, 320  # pixels
_LABEL_WIDTH, _LABEL_HEIGHT = 34, 16  # pixels around the numbers of a point
_MOST_NAMED = 12  # settings of a front, that a picture spells out
_WIDE = 12  # times the least value: an axis is then logarithmic
_MARGIN = 0.06  # of an axis, on each side
MOST_VARYING = 4  # one across, one by colour, one in columns and one in rows


def check_plot_path(path: Path, *, replace: bool = True) -> None:
    """Refuse a path where no picture can be written, before the work starts."""
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"--plot: expected a file ending in {', '.join(ENDINGS)}, got {path}")
    refuse_existing(path, replace, "--plot")
    check_pictures("--plot")


def check_pictures(asked_by: str) -> None:
    """Refuse an install that lacks the packages for pictures, before the work starts."""
    missing = [name for name in ("altair", "vl_convert") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{asked_by}: pictures need the extra `pictures`, and {missing[0]} is not installed: "
            "pip install 'fullwire[pictures]'"
        )


def plot_whatif(result: WhatIf, path: Path) -> None:
    """Draw scaling factors against the condition with the most values."""
    check_plot_path(path)
    if len(result) > MOST_MARKS:
        raise UsageError(
            f"--plot: {len(result):,} points are too many, expected at most {MOST_MARKS:,}"
        )
    if result.to_target is None:
        save(_scaling_chart(result), path)
    else:
        save(_front_chart(result, result.to_target), path)


def _front_chart(result: WhatIf, found: ToTarget) -> alt.Chart:
    """Draw the time to a target against device-hours or cost, with the settings none beats."""
    import altair as alt

    table, front = result.predictions, set(found.front())
    varying = [axis for axis, values in table.axes.items() if len(values) > 1 and axis != "run"]
    dear = found.device_hours if found.cost is None else found.cost
    paid = "device-hours" if found.price is None else f"cost {found.price.currency}".strip()
    known = found.soonest(len(table))
    middle_s = float(found.time_s[known[len(known) // 2]])
    unit, unit_s = next((each for each in _UNITS if middle_s >= each[1]), _UNITS[-1])
    labels = {axis: _labels(table, axis) for axis in varying}
    points: list[dict[str, Any]] = [
        {
            "time": float(found.time_s[row]) / unit_s,
            "low": float(found.low_s[row]) / unit_s,
            "high": float(found.high_s[row]) / unit_s,
            "paid": float(dear[row]),
            "setting": ", ".join(labels[axis][row] for axis in varying) or "as asked",
            "workers": f"{table['workers'][row]:,} "
            f"{'worker' if table['workers'][row] == 1 else 'workers'}",
            "front": row in front,
        }
        for row in sorted(known)
    ]
    ends = [point[end] for point in points for end in ("low", "high") if point["front"]]
    across = _Axis.of([point["paid"] for point in points], _FRONT_WIDTH)
    up = _Axis.of([*(point["time"] for point in points), *ends], _FRONT_HEIGHT)
    chart = alt.Chart(alt.Data(values=points))
    where = {
        "x": alt.X("paid:Q", title=paid, scale=across.scale),
        "y": alt.Y("time:Q", title=f"{unit} to {found.goal}", scale=up.scale),
    }
    on_front = chart.transform_filter("datum.front")
    layers = on_front.mark_line(color=_INK, strokeWidth=1.5, strokeDash=[5, 4]).encode(**where)
    layers += on_front.mark_rule(color=_INK, opacity=0.35).encode(
        x="paid:Q", y="low:Q", y2="high:Q"
    )
    layers += chart.mark_point(size=60, filled=True, opacity=0.9).encode(
        **where,
        color=alt.Color("workers:N", title=None, sort=None, scale=alt.Scale(range=COLOURS)),
        tooltip=["setting:N", "time:Q", "paid:Q"],
    )
    best = sorted((point for point in points if point["front"]), key=lambda point: point["time"])
    marks = alt.Chart(alt.Data(values=_numbered(best, across, up)))
    # No point lies on the lower left of one of the front, so labels there cover none.
    layers += marks.mark_text(align="right", dx=-6, dy=9, fontSize=11, color=_INK).encode(
        **where, text="numbers:N"
    )
    soonest, *_ = sentences(result.reaching)
    named = [f"{number}: {point['setting']}" for number, point in enumerate(best, 1)]
    more = len(named) - _MOST_NAMED
    lines = [soonest, *named[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]
    layers = layers.properties(width=_FRONT_WIDTH, height=_FRONT_HEIGHT)
    return titled(layers, f"Time to {found.goal}", lines)


class _Axis(NamedTuple):
    """An axis whose scale is known here, so that labels can be kept apart."""

    low: float
    high: float
    is_log: bool
    length: int  # pixels

    @classmethod
    def of(cls, values: Sequence[float], length: int) -> _Axis:
        """Make the axis of these values: logarithmic where they are wide apart."""
        low, high = min(values), max(values)
        if is_log := high > _WIDE * low > 0:
            edge = (high / low) ** _MARGIN
            return cls(low / edge, high * edge, is_log, length)
        edge = _MARGIN * (high - low) or abs(high) or 1.0
        return cls(low - edge, high + edge, is_log, length)

    @property
    def scale(self) -> alt.Scale:
        import altair as alt

        kind: Any = "log" if self.is_log else "linear"
        return alt.Scale(type=kind, domain=[self.low, self.high], nice=False, zero=False)

    def place(self, value: float) -> float:
        """Return the place of a value in pixels."""
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = log(low), log(high), log(value)
        return self.length * (at - low) / (high - low)


def _numbered(
    best: Sequence[dict[str, Any]], across: _Axis, up: _Axis
) -> list[dict[str, float | str]]:
    """Number the points of a front. Neighbours that are too near for labels share one: "2-4"."""
    groups: list[list[int]] = []
    for number, point in enumerate(best):
        first = best[groups[-1][0]] if groups else None
        if first is not None and (
            abs(across.place(point["paid"]) - across.place(first["paid"])) < _LABEL_WIDTH
            and abs(up.place(point["time"]) - up.place(first["time"])) < _LABEL_HEIGHT
        ):
            groups[-1].append(number)
        else:
            groups.append([number])
    return [
        {
            "paid": best[group[0]]["paid"],
            "time": best[group[0]]["time"],
            "numbers": "-".join(dict.fromkeys((str(group[0] + 1), str(group[-1] + 1)))),
        }
        for group in groups
    ]


def _scaling_chart(result: WhatIf) -> alt.Chart:
    import altair as alt

    table = result.predictions
    # The conditions with more than one value; free compressors are drawn by their ratio.
    axes: dict[str, Sequence[Any]] = {
        axis: values for axis, values in table.axes.items() if len(values) > 1
    }
    if "codec" in axes and all(codec.is_free for codec in axes["codec"]):
        axes["compression"] = axes.pop("codec")
    across = max(
        (condition for condition in CONDITIONS.values() if condition.across),
        key=lambda each: (len(axes.get(each.axis, ())), each.across),
    ).axis
    others = [axis for axis in axes if axis != across]
    if len(axes) > MOST_VARYING:
        raise UsageError(
            f"--plot: a picture shows {MOST_VARYING} conditions that vary, got {', '.join(axes)}"
        )
    colour = "run" if "run" in others else (others[0] if others else None)
    # The curve has points between the requested values, because straight lines would mislead.
    points = _rows(table, [across, *others], asked=True)
    between = result.finer(across, CURVE_POINTS)
    if between is not None:
        points += _rows(between, [across, *others], asked=False)
    chart = alt.Chart(alt.Data(values=points))
    ticks = dict.fromkeys(table.told_column(across).tolist()) if across == "accumulate" else ()
    chart = _lines(chart, across, [*ticks] or axes.get(across, ()), colour, result)
    facets = [axis for axis in others if axis != colour]
    if facets:  # panels, in the order in which the values were given
        panels = {
            place: alt.Facet(
                f"{axis}:N", title=None, sort=list(dict.fromkeys(_labels(table, axis)))
            )
            for place, axis in zip(("column", "row"), facets, strict=False)
        }
        chart = chart.facet(**panels)
    fixed = [
        " or ".join(map(condition.worded, dict.fromkeys(table.told_column(axis).tolist())))
        for axis, condition in CONDITIONS.items()
        if axis != "run" and axis not in axes and axis in table.names()
        if table[axis][0] != condition.usual
    ]
    modelled = [name for name, basis in result.basis.items() if basis == "modelled"]
    lines = [", ".join(fixed), f"modelled: {', '.join(modelled)}" if modelled else ""]
    return titled(
        chart,
        "Scaling factor" if "run" in axes else f"Scaling factor of {result['run'][0]}",
        [line for line in lines if line],
    )


def _rows(table: Predictions, columns: list[str], *, asked: bool) -> list[dict[str, Any]]:
    """Return points as plain values; the conditions that separate lines and panels become text."""
    shown: dict[str, list[Any]] = {"scaling": table["scaling_factor"].tolist()}
    for number, name in enumerate(columns):
        scale = CONDITIONS[name].scale
        if number == 0 and scale is not None:
            shown[name] = [value * scale for value in table.told_column(name).tolist()]
        else:
            shown[name] = _labels(table, name)
    shown["asked"] = [asked] * len(table)
    return [dict(zip(shown, row, strict=True)) for row in zip(*shown.values(), strict=True)]


def _labels(table: Predictions, name: str) -> list[str]:
    if name != "codec":
        return [_label(name, value) for value in table.told_column(name).tolist()]
    pairs = zip(table["codec"].tolist(), table["compression"].tolist(), strict=True)
    return [codec or _label("compression", ratio) for codec, ratio in pairs]


def _label(name: str, value: Any) -> str:
    """Return a number in words, and a name unchanged: the title names the quantity."""
    condition = CONDITIONS[name]
    return str(value) if condition.scale is None else condition.worded(value)


def _lines(
    chart: alt.Chart, across: str, values: Sequence[Any], colour: str | None, result: WhatIf
) -> alt.Chart:
    """Draw a line of each colour, with a tick for each requested value, if they are few."""
    import altair as alt

    condition = CONDITIONS[across]
    if condition.scale is None:
        axis = alt.Axis(labelAngle=-25, grid=True)  # names may be long
        horizontal = alt.X(f"{across}:N", title=condition.title, sort=None, axis=axis)
    else:
        numbers = [float(getattr(value, "ratio", value)) * condition.scale for value in values]
        is_wide = len(numbers) > 2 and max(numbers) > 12 * min(numbers) > 0
        few = 0 < len(numbers) <= 12
        horizontal = alt.X(
            f"{across}:Q",
            title=condition.title,
            scale=alt.Scale(type="log" if is_wide else "linear", nice=False),
            axis=alt.Axis(values=numbers, format=",.4~r") if few else alt.Axis(),
        )
    encoding: dict[str, Any] = {
        "x": horizontal,
        "y": alt.Y("scaling:Q", title="scaling factor", scale=alt.Scale(domain=[0, 1], nice=False)),
        "tooltip": alt.Tooltip("scaling:Q", format=".4f"),
        "color": alt.value(COLOURS[0]),
    }
    if colour:
        title = CONDITIONS[colour].title.partition(" (")[0]
        scale = alt.Scale(range=COLOURS)
        encoding["color"] = alt.Color(f"{colour}:N", title=title, sort=None, scale=scale)
    dots = chart.mark_point(size=45, filled=True, opacity=1).encode(**encoding)
    layers = dots.transform_filter("datum.asked")
    if condition.scale is not None:  # between names a line would mean nothing
        layers = chart.mark_line(strokeWidth=2.5).encode(**encoding) + layers
    if result.targets is not None:
        rule = chart.mark_rule(strokeDash=[5, 4], color=_INK, opacity=0.6)
        layers += rule.encode(y=alt.datum(result.targets.scaling_factor))
    return layers.properties(width=460, height=290)


def titled(chart: alt.Chart, title: str, lines: Sequence[str]) -> alt.Chart:
    """Give a chart its title, the lines below it, and the look of all our pictures."""
    import altair as alt

    return (
        chart.properties(
            title=alt.Title(title, subtitle=list(lines), anchor="start", offset=14), padding=18
        )
        .configure(font="Helvetica, Arial, DejaVu Sans, sans-serif", background="white")
        .configure_title(fontSize=17, color=_INK, subtitleColor="#52606d", subtitleFontSize=12)
        .configure_axis(
            gridColor=_FAINT,
            domainColor=_INK,
            tickColor=_INK,
            labelColor=_INK,
            titleColor=_INK,
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
        )
        .configure_legend(labelFontSize=12, labelColor=_INK, symbolStrokeWidth=3, labelLimit=360)
        .configure_header(labelFontSize=12, labelColor=_INK, titleFontSize=12)
        .configure_view(stroke=None)
    )


def save(chart: alt.Chart, path: Path) -> None:
    """Write a picture in the format that its name ends in.

    An HTML page holds the code that draws the chart, and loads nothing from elsewhere.
    """
    ending = path.suffix.lower()
    with written(path) as beside:
        if ending == ".html":
            import vl_convert

            # A name such as "</script>" would end the script early, so every "<" is escaped.
            drawing = json.dumps(chart.to_dict()).replace("<", "\\u003c")
            code = vl_convert.javascript_bundle(_EXPORT)
            page = _PAGE.format(code=code, drawing=drawing, fitting=_FITTING)
            beside.write_text(page, encoding="utf-8")
        else:
            chart.save(str(beside), format=ending[1:], **({"ppi": 180} if ending == ".png" else {}))


_EXPORT = "window.vegaEmbed = vegaEmbed;"
# A chart that is wider than its window is drawn anew for it: its views one below the other, its
# legends below them. What is still too wide, as a row of panels, is made smaller as a whole.
_FITTING = r"""const place = document.getElementById("chart");
const how = { mode: "vega-lite", actions: false, renderer: "svg" };
const show = (drawn) => vegaEmbed(place, drawn, how);
const isWide = () => place.querySelector("svg").width.baseVal.value > place.clientWidth;
function eachView(view, change) {
  if (view.hconcat) { view.vconcat = view.hconcat; delete view.hconcat; }
  change(view);
  const inner = view.vconcat ?? view.layer ?? (view.spec ? [view.spec] : []);
  for (const part of inner) eachView(part, change);
}
function narrow() {
  const drawn = structuredClone(drawing), axes = 140, least = 160, letter = 7;
  eachView(drawn, (view) => {
    // A diagram, which has no axes, places its words by its width.
    if (typeof view.width === "number" && !JSON.stringify(view).includes('"axis":null'))
      view.width = Math.min(view.width, Math.max(place.clientWidth - axes, least));
  });
  Object.assign(drawn.config.legend, { orient: "bottom", columns: 1 });
  const letters = Math.max(Math.floor((place.clientWidth - 40) / letter), 20);
  const line = new RegExp(`.{1,${letters}}(\\s|$)`, "g");
  const lines = (said) => [said ?? []].flat().flatMap((each) => each.match(line) ?? [each]);
  const { text, subtitle } = drawn.title;
  Object.assign(drawn.title, { text: lines(text), subtitle: lines(subtitle) });
  return drawn;
}
async function fit() {
  await show(drawing);
  if (isWide()) await show(narrow());
}
let fittedTo = 0;
new ResizeObserver(() => {
  if (place.clientWidth === fittedTo) return;
  fittedTo = place.clientWidth;
  fit();
}).observe(place);"""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Fullwire</title>
<style>#chart {{ width: 100%; }} #chart svg {{ max-width: 100%; height: auto; }}</style>
</head>
<body>
<div id="chart"></div>
<script type="module">
{code}
const drawing = {drawing};
{fitting}
</script>
</body>
</html>
"""


def plot_codecs(result: Codecs, path: Path) -> None:
    """Draw the step by bandwidth for each codec, with the bandwidths at which it stops to pay."""
    import altair as alt

    points: list[dict[str, Any]] = [
        {"codec": codec, "gbps": rate_bps / 1e9, "step": step_s}
        for codec, steps in result.step_s.items()
        for rate_bps, step_s in zip(result.bandwidth_bps, steps, strict=True)
    ]
    across = alt.X("gbps:Q", title="bandwidth (Gbps)", scale=alt.Scale(type="log", nice=False))
    up = alt.Y("step:Q", title="step (s)", scale=alt.Scale(type="log"))
    colour = alt.Color("codec:N", sort=None, scale=alt.Scale(range=COLOURS))
    chart: Any = alt.Chart(alt.Data(values=points)).mark_line(strokeWidth=2.5)
    chart = chart.encode(x=across, y=up, color=colour)
    crossings = [
        {
            "codec": row.codec,
            "gbps": row.pays_below_bps / 1e9,
            "step": _step_at(result, row.pays_below_bps),
            "words": f"{row.codec} pays below {show_rate(row.pays_below_bps)}",
        }
        for row in result.codecs
        if row.pays_below_bps is not None and not isinf(row.pays_below_bps)
    ]
    if crossings:
        dots = alt.Chart(alt.Data(values=crossings)).mark_point(size=80, filled=True, opacity=1)
        chart += dots.encode(x=across, y=up, color=colour, tooltip=alt.Tooltip("words:N"))
    lines = [f"{result.workers} workers, full line. Dots: a codec pays below this bandwidth"]
    save(titled(chart.properties(width=520, height=320), f"Steps of {result.model}", lines), path)


def _step_at(result: Codecs, rate_bps: float) -> float:
    """Return the uncompressed step at a bandwidth, between those that were predicted."""
    import numpy as np

    rates, steps = np.log(result.bandwidth_bps), np.log(result.step_s["float32"])
    return float(np.exp(np.interp(np.log(rate_bps), rates, steps)))
