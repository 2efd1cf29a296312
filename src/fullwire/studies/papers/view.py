"""A study for people and programs: the table of claims, and the files of its directory.

Each figure is one PNG, drawn from the same rows as the CSV beside it.
"""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullwire.errors import UsageError
from fullwire.report.charts import COLOURS, check_pictures, save, titled
from fullwire.report.terminal import columns, print_notes, say
from fullwire.units import show_rate

if TYPE_CHECKING:
    import altair as alt

    from fullwire.studies.papers import Study
    from fullwire.studies.papers.claims import Holds
    from fullwire.studies.papers.figures import Figure, FigureName, Row

_WIDTH = 100
_PANEL_WIDTH, _PANEL_HEIGHT = 250, 200
_COLOURS = [*COLOURS, "#c98bb9"]  # three settings and five devices in one figure
_TICKS = (1, 2, 5, 10, 25, 50, 100)
_SIZES = (1, 10, 100, 1e3, 1e4, 1e5)
_TIMES = (1e-3, 0.01, 0.1, 1, 10, 100)
_MARKS: Mapping[Holds, str] = {"yes": "holds", "no": "does NOT hold", "in part": "holds in part"}


def write_study(result: Study) -> list[Path]:
    """Write claims.csv, trials.csv, predictions.csv and each figure as CSV and PNG."""
    check_pictures("study")
    place = result.directory
    try:
        written = [
            _csv([asdict(claim) for claim in result.claims], place / "claims.csv"),
            _csv(list(_trial_rows(result)), place / "trials.csv"),
            _csv(list(_prediction_rows(result)), place / "predictions.csv"),
        ]
        for figure in result.figures:
            written.append(_csv(figure.rows, place / f"{figure.name}.csv"))
            picture = place / f"{figure.name}.png"
            draw_figure(figure, picture)
            if figure.rows:
                written.append(picture)
    except OSError as error:
        raise UsageError(
            f"{error.filename or place}: cannot be written: {error.strerror}"
        ) from None
    return written


def _csv(rows: Sequence[Row], path: Path) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def _trial_rows(result: Study) -> Iterator[dict[str, Any]]:
    for measured in result.measured:
        row = asdict(measured)
        trial = row.pop("trial")
        ring = row.pop("sends_to")
        yield {
            "trial": measured.trial.name,
            **trial,
            **row,
            "network_utilization": measured.network_utilization,
            "busy_utilization": measured.busy_utilization,
            "sends_to": "" if ring is None else " ".join(map(str, ring)),
        }


def _prediction_rows(result: Study) -> Iterator[dict[str, Any]]:
    for predicted in result.predicted:
        row = asdict(predicted)
        row.pop("trial")
        yield {
            "trial": predicted.trial.name,
            **row,
            "error": predicted.error,
            "holds": predicted.holds,
        }


def study_object(result: Study, written: Sequence[Path]) -> dict[str, Any]:
    """Return a study as a JSON object."""
    return {
        "claims": [asdict(claim) for claim in result.claims],
        "trials": list(_trial_rows(result)),
        "predictions": list(_prediction_rows(result)),
        "explained": [asdict(explained) for explained in result.explained],
        "failed": [{"trial": trial.name, "problem": problem} for trial, problem in result.failed],
        "files": [str(path) for path in written],
    }


def print_study(result: Study, written: Sequence[Path]) -> None:
    """Print the claims, the failed trials, and the place of the figures."""
    paper = ""
    for claim in result.claims:
        if claim.paper != paper:
            paper = claim.paper
            say(paper)
        say(f"  {_MARKS.get(claim.holds, claim.holds).ljust(15)} {claim.claim}")
        for words in (claim.measured, claim.why):
            for line in (
                textwrap.wrap(words, max(min(columns(), _WIDTH) - 18, 20)) if words != "-" else ()
            ):
                say(f"{'':18}{line}")
    say("")
    print_notes(f"{trial.name} failed: {problem}" for trial, problem in result.failed)
    figures = [path for path in written if path.suffix == ".png"]
    tables = [path for path in written if path.suffix == ".csv"]
    say(f"{len(figures)} figures and {len(tables)} tables in {result.directory}:")
    for path in (*figures, *tables[:1]):
        say(f"  {path}")


def draw_figure(figure: Figure, path: Path) -> None:
    """Draw one figure; if it has no rows, delete the picture of an earlier study."""
    path.unlink(missing_ok=True)
    if figure.rows:
        rows = [dict(row) for row in figure.rows]
        for row in rows:  # as words and in people's units
            if "rate_bps" in row:
                row["rate"] = show_rate(row["rate_bps"])
                row["rate_gbps"] = row["rate_bps"] * 1e-9
            if "workers" in row:
                row["of"] = f"{row['workers']} workers"
            if "gradient_bytes" in row:
                row["size_mb"] = row["gradient_bytes"] * 1e-6
        save(titled(_DRAWN[figure.name](rows), figure.title, [figure.note]), path)


def _base(rows: Sequence[Row]) -> alt.Chart:
    import altair as alt

    return alt.Chart(alt.Data(values=list(rows)))


def _colour(field: str, title: str = "") -> alt.Color:
    import altair as alt

    scale = alt.Scale(range=_COLOURS)
    return alt.Color(f"{field}:N", title=title or None, sort=None, scale=scale)


def _log(field: str, title: str, ticks: Sequence[float] = _TICKS) -> alt.X:
    import altair as alt

    return alt.X(
        f"{field}:Q",
        title=title,
        scale=alt.Scale(type="log", nice=False, padding=14),
        axis=alt.Axis(format=",.3~r", values=list(ticks)),
    )


def _workers() -> alt.X:
    import altair as alt

    return alt.X("workers:O", title="workers", axis=alt.Axis(labelAngle=0))


def _panels(
    chart: alt.Chart, column: str, rows: Sequence[Row], columns: int = 3, *, alike: bool = True
) -> alt.Chart:
    """Draw one panel for each value of a column, in the order of the rows.

    The panels stand beside each other and are no facets. Facets draw axes where the last row has no
    panel, and omit them below the panels above.
    """
    import altair as alt

    values = list(dict.fromkeys(row[column] for row in rows))
    panels = [
        chart.transform_filter(alt.FieldEqualPredicate(field=column, equal=value)).properties(
            width=_PANEL_WIDTH,
            height=_PANEL_HEIGHT,
            title=alt.Title(value, fontSize=12, fontWeight="normal"),
        )
        for value in values
    ]
    together = alt.concat(*panels, columns=columns)
    if not alike:
        return together
    return together.resolve_scale(x="shared", y="shared", xOffset="independent")


def _scaling(rows: list[dict[str, Any]]) -> alt.Chart:
    import altair as alt

    for row in rows:
        dilated = ", faster processors" if "processors" in row["setting"] else ""
        row["panel"] = f"{row['model'].partition('@')[0]}, {row['rate']}{dilated}"
    by = ("model", "setting", "rate_bps", "workers")
    ordered = sorted(rows, key=lambda row: ["processors" in row["setting"], *map(row.get, by)])
    chart = _base(ordered).encode(
        x=_workers(),
        xOffset=alt.XOffset("kind:N", sort=None),
        y=alt.Y("scaling_factor:Q", title="scaling factor", scale=alt.Scale(domain=[0, 1])),
        color=_colour("kind"),
    )
    return _panels(chart.mark_bar(), "panel", ordered)


def _computation(rows: list[dict[str, Any]]) -> alt.Chart:
    import altair as alt

    chart = _base(rows).encode(
        x=_workers(),
        xOffset=alt.XOffset("model:N", sort=None),  # many values are 1, and would lie on each other
        y=alt.Y("over_one_worker:Q", title="computation, over one worker's"),
        color=_colour("model"),
    )
    return _panels(chart.mark_point(size=70, filled=True, opacity=0.8), "setting", rows)


def _utilization(rows: list[dict[str, Any]]) -> alt.Chart:
    import altair as alt

    kinds = {
        "network_while_communicating": "network, while communicating",
        "network_whole_step": "network, whole step",
        "processors": "processors",
    }
    long = [
        {**row, "of_what": words, "share": row[name], "panel": f"{row['setting']}, {row['of']}"}
        for row in sorted(rows, key=lambda row: (row["setting"], row["workers"], row["rate_bps"]))
        for name, words in kinds.items()
    ]
    chart = _base(long).encode(
        x=_log("rate_gbps", "line rate (Gbps)"),
        y=alt.Y(
            "share:Q",
            title="in use",
            scale=alt.Scale(domain=[0, 1.05], nice=False),
            axis=alt.Axis(format="%"),
        ),
        color=_colour("of_what"),
        shape=alt.Shape("model:N", title=None),
    )
    return _panels(chart.mark_point(size=70, filled=True, opacity=0.85), "panel", long, 2)


def _compression(rows: list[dict[str, Any]]) -> alt.Chart:
    import altair as alt

    for row in rows:
        row["panel"] = f"{row['of']}, {row['rate']}"
    base = _base(rows).encode(
        x=_log("compression", "compression ratio"),
        y=alt.Y("scaling_factor:Q", title="scaling factor", scale=alt.Scale(domain=[0, 1])),
        color=_colour("model"),
    )
    lines = base.mark_line(strokeWidth=2.5).transform_filter("datum.kind == 'predicted'")
    points = base.mark_point(size=80, filled=True, opacity=1, stroke="white")
    both = lines + points.transform_filter("datum.kind == 'measured'")
    return _panels(both, "panel", rows, 2)


def _bytes(rows: list[dict[str, Any]]) -> alt.Chart:
    import altair as alt

    largest = max(row["size_mb"] for row in rows)
    ring = [
        {"size_mb": size, "sent_mb": size * factor, "of": of}
        for of, factor in sorted({(row["of"], row["ring"]) for row in rows})
        for size in (0.0, largest)
    ]
    points = [
        {**row, "sent_mb": row["sent_bytes"] * 1e-6}
        for row in sorted(rows, key=lambda row: row["workers"])
    ]
    encoding = {
        "x": alt.X("size_mb:Q", title="gradients (MB)"),
        "y": alt.Y("sent_mb:Q", title="sent by each host in an iteration (MB)"),
        "color": _colour("of"),
    }
    lines = _base(ring).mark_line(strokeWidth=1.5).encode(**encoding)
    marks = _base(points).mark_point(size=70, filled=True, opacity=0.85).encode(**encoding)
    return (lines + marks).properties(width=2 * _PANEL_WIDTH, height=300)


def _ring(rows: list[dict[str, Any]]) -> alt.Chart:
    import altair as alt

    ordered = sorted(rows, key=lambda row: row["workers"])
    base = _base(ordered).encode(
        x=alt.X("sends_to:O", title="receiving host", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("host:O", title="sending host"),
    )
    squares = base.mark_rect(color=COLOURS[0], opacity=0.85)
    counts = base.mark_text(color="white", fontSize=13).encode(text="count():Q")
    return _panels(squares + counts, "of", ordered, 2, alike=False)


def _iteration(rows: list[dict[str, Any]]) -> alt.Chart:
    import altair as alt

    for row in rows:
        row["panel"] = f"{row['basis']}, {row['rate']}"
        row["on"] = row["device"].upper() if row["basis"] == "modelled" else row["device"]
    ordered = sorted(rows, key=lambda row: (row["basis"], row["rate_bps"]))
    chart = _base(ordered).encode(
        x=_log("size_mb", "gradients (MB)", _SIZES),
        y=alt.Y(
            "step_s:Q",
            title="iteration (s)",
            axis=alt.Axis(format=",.3~r", values=_TIMES),
            scale=alt.Scale(type="log", nice=False, padding=14),
        ),
        color=_colour("on"),
    )
    return _panels(chart.mark_point(size=60, filled=True, opacity=0.85), "panel", ordered)


def _explained(rows: list[dict[str, Any]]) -> alt.Chart:
    import altair as alt

    kinds = {"alone": "R2 by itself", "only_it": "lost without it"}
    long = [
        {**row, "share": row[name], "kind": words} for row in rows for name, words in kinds.items()
    ]
    chart = _base(long).encode(
        x=alt.X("condition:N", title=None, sort=None, axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("kind:N", sort=None),
        y=alt.Y("share:Q", title="share of the variance", scale=alt.Scale(domain=[0, 1])),
        color=_colour("kind"),
    )
    return _panels(chart.mark_bar(), "basis", long, 2, alike=False)


_DRAWN: Mapping[FigureName, Callable[[list[dict[str, Any]]], alt.Chart]] = {
    "scaling": _scaling,
    "computation": _computation,
    "utilization": _utilization,
    "compression": _compression,
    "bytes": _bytes,
    "ring": _ring,
    "iteration": _iteration,
    "explained": _explained,
}
