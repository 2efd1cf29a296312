"""Pictures of results: PNG, SVG, or one offline HTML page, by the ending of the file's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullwire.errors import UsageError
from fullwire.units import show_rate

if TYPE_CHECKING:
    import altair as alt

    from fullwire.answers.whatif import WhatIf
    from fullwire.simulation.sweep import Predictions

ENDINGS = (".png", ".svg", ".html")
CURVE_POINTS = 120  # between the first and the last value of the horizontal axis
MOST_MARKS = 50_000  # what a browser still draws without stopping
_INK, _FAINT = "#1f2933", "#d9dee4"
_COLOURS = ["#0b6e99", "#d1495b", "#edae49", "#2e8b57", "#6c5b9e", "#8c6d46", "#4a5568"]
# Which condition makes the best horizontal axis, and which the best colour.
_ACROSS = (
    "bandwidth_bps",
    "workers",
    "compression",
    "latency_s",
    "transport",
    "buckets",
    "algorithm",
)
_TITLES = {
    "bandwidth_bps": "bandwidth (Gbps)", "workers": "workers", "compression": "compression ratio",
    "latency_s": "latency (us)", "run": "", "buckets": "buckets", "algorithm": "algorithm",
    "transport": "transport",
}  # fmt: skip
_SCALES = {"bandwidth_bps": 1e-9, "latency_s": 1e6}


def check_plot_path(path: Path) -> None:
    """Refuse a picture that cannot be written, before the work and not after it."""
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"--plot: expected a file ending in {', '.join(ENDINGS)}, got {path}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot: there is no directory {path.parent}")


def plot_whatif(result: WhatIf, path: Path) -> None:
    """Draw scaling factors against whatever varies most."""
    check_plot_path(path)
    if len(result) > MOST_MARKS:
        raise UsageError(
            f"--plot: {len(result):,} points are too many, expected at most {MOST_MARKS:,}"
        )
    _save(_scaling_chart(result), path)


def _scaling_chart(result: WhatIf) -> alt.Chart:
    import altair as alt

    axes = _varying(result)
    across = max(_ACROSS, key=lambda axis: (len(axes.get(axis, ())), -_ACROSS.index(axis)))
    others = [axis for axis in axes if axis != across]
    colour = "run" if "run" in others else (others[0] if others else None)
    facets = [axis for axis in others if axis != colour][:2]
    chart = alt.Chart(alt.Data(values=_points(result, [across, *others])))
    chart = _lines(chart, across, axes.get(across, ()), colour, result)
    if facets:
        chart = chart.facet(
            **{
                place: alt.Facet(f"{axis}:N", title=None, sort=None)
                for place, axis in zip(("column", "row"), facets, strict=False)
            }
        )
    return _styled(chart, result, set(axes))


def _varying(result: WhatIf) -> dict[str, Sequence[Any]]:
    names = {"codec": "compression"}
    return {
        names.get(axis, axis): values
        for axis, values in result.predictions.axes.items()
        if len(values) > 1
    }


def _points(result: WhatIf, columns: list[str]) -> list[dict[str, Any]]:
    """Return what was asked, and the curve between: straight lines would tell another story."""
    asked = _rows(result.predictions, columns, asked=True)
    between = result.finer(columns[0], CURVE_POINTS)
    return asked if between is None else asked + _rows(between, columns, asked=False)


def _rows(table: Predictions, columns: list[str], *, asked: bool) -> list[dict[str, Any]]:
    """Return points as plain values; what separates lines and panels becomes text."""
    shown: dict[str, list[Any]] = {"scaling": table["scaling_factor"].tolist()}
    for number, name in enumerate(columns):
        values = table[name].tolist()
        shown[name] = [
            value * _SCALES.get(name, 1) if number == 0 and not isinstance(value, str)
            else _worded(name, value)
            for value in values
        ]  # fmt: skip
    shown["asked"] = [asked] * len(table)
    return [dict(zip(shown, row, strict=True)) for row in zip(*shown.values(), strict=True)]


def _worded(name: str, value: Any) -> str:
    if name == "bandwidth_bps":
        return show_rate(value)
    if name == "workers":
        return f"{value} workers"
    return f"{value:g}x" if name == "compression" else str(value)


def _lines(
    chart: alt.Chart, across: str, values: Sequence[Any], colour: str | None, result: WhatIf
) -> alt.Chart:
    import altair as alt

    named = across in ("transport", "buckets", "algorithm")
    spread = (
        not named and len(values) > 2 and max(_numbers(values)) > 12 * min(_numbers(values)) > 0
    )
    ticks = [number * _SCALES.get(across, 1) for number in _numbers(values)] if not named else []
    encoding: dict[str, Any] = {
        "x": alt.X(
            f"{across}:{'N' if named else 'Q'}", title=_TITLES[across],
            scale=alt.Undefined if named else alt.Scale(type=_scale_type(spread), nice=False),
            axis=alt.Axis(values=ticks, format=",.4~r") if 0 < len(ticks) <= 12 else alt.Axis(),
        ),
        "y": alt.Y("scaling:Q", title="scaling factor", scale=alt.Scale(domain=[0, 1], nice=False)),
        "tooltip": alt.Tooltip("scaling:Q", format=".4f"),
    }  # fmt: skip
    if colour:
        encoding["color"] = alt.Color(
            f"{colour}:N",
            title=_TITLES[colour].partition(" (")[0],
            sort=None,
            scale=alt.Scale(range=_COLOURS),
        )
    mark = {} if colour else {"color": _COLOURS[0]}
    layers = chart.mark_line(strokeWidth=2.5, **mark).encode(**encoding)
    layers += (
        chart.mark_point(size=45, filled=True, opacity=1, **mark)
        .encode(**encoding)
        .transform_filter("datum.asked")
    )
    if result.targets is not None:
        layers += _target_rule(chart, result.targets.scaling_factor)
    return layers.properties(width=460, height=290)


def _scale_type(spread: bool) -> str:
    return "log" if spread else "linear"


def _target_rule(chart: alt.Chart, wanted: float) -> alt.Chart:
    import altair as alt

    return chart.mark_rule(strokeDash=[5, 4], color=_INK, opacity=0.6).encode(y=alt.datum(wanted))


def _numbers(values: Sequence[Any]) -> list[float]:
    return [float(getattr(value, "ratio", value)) for value in values]


def _styled(chart: alt.Chart, result: WhatIf, varying: set[str]) -> alt.Chart:
    import altair as alt

    modelled = [name for name, basis in result.basis.items() if basis == "modelled"]
    lines = [_caption(result, varying), f"modelled: {', '.join(modelled)}" if modelled else ""]
    return (
        chart.properties(
            title=alt.Title(
                _headline(result, varying), subtitle=[line for line in lines if line],
                anchor="start", offset=14,
            ),
            padding=18,
        )
        .configure(font="Helvetica, Arial, DejaVu Sans, sans-serif", background="white")
        .configure_title(fontSize=17, color=_INK, subtitleColor="#52606d", subtitleFontSize=12)
        .configure_axis(
            gridColor=_FAINT, domainColor=_INK, tickColor=_INK, labelColor=_INK, titleColor=_INK,
            labelFontSize=12, titleFontSize=12, titleFontWeight="normal",
        )
        .configure_legend(labelFontSize=12, labelColor=_INK, symbolStrokeWidth=3)
        .configure_header(labelFontSize=12, labelColor=_INK, titleFontSize=12)
        .configure_view(stroke=None)
    )  # fmt: skip


def _headline(result: WhatIf, varying: set[str]) -> str:
    return "Scaling factor" if "run" in varying else f"Scaling factor of {result['run'][0]}"


def _caption(result: WhatIf, varying: set[str]) -> str:
    table = result.predictions
    said = []
    for name in ("workers", "bandwidth_bps", "compression"):
        if name not in varying and not (name == "compression" and table[name][0] == 1):
            said.append(_worded(name, table[name][0]))
    said += [
        f"{label} {table[name][0]}"
        for name, label in (("transport", "transport"), ("buckets", "buckets"), ("algorithm", ""))
        if name not in varying
    ]
    return ", ".join(each.strip() for each in said)


def _save(chart: alt.Chart, path: Path) -> None:
    try:
        if path.suffix.lower() == ".html":
            chart.save(str(path), inline=True)  # the drawing code travels with the page
        else:
            chart.save(str(path), ppi=180) if path.suffix.lower() == ".png" else chart.save(
                str(path)
            )
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
