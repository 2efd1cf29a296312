"""The contents of a run for the terminal: its facts, its tables and the curves of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fullwire.errors import UsageError
from fullwire.report.terminal import print_table, say
from fullwire.units import show_bytes, show_rate, show_time

if TYPE_CHECKING:
    from fullwire.convergence.curves import Curve
    from fullwire.run.run import Metrics, Run

_RANKS_SAID = 4  # for facts that each rank has
_CURVE = 32  # characters of a metric's curve


def print_run(run: Run, rows: Mapping[str, int], name: str, work: str | None = None) -> None:
    """Print the contents of a run: where it comes from, facts, tables, completeness.

    `work` says what a step does, as far as that is known.
    """
    from fullwire.run.run import TABLES  # here: other tables are printed without numpy

    origin, basis = run.provenance.origin, run.provenance.basis
    rests = "" if basis == "measured" or origin == "modelled" else f", resting on {basis} times"
    say(f"{name}: {origin} from {run.provenance.source}{rests}")
    if work is not None:
        say(work)
    say("complete" if run.complete else "PARTIAL:")
    for gap in run.missing:
        say(f"  {gap}")
    say("")
    print_table(["fact", "value", "meaning"], fact_rows(run), texts={"fact", "value", "meaning"})
    tables = [
        [table, f"{count:,}", ", ".join(TABLES[table].column_types())]
        for table, count in rows.items()
    ]
    print_table(["table", "rows", "columns"], tables, texts={"table", "columns"})


def print_metrics(metrics: Metrics) -> None:
    """Print each metric: its ends, and its curve over the steps."""
    from fullwire.convergence.curves import curve_of  # here: other tables need no numpy

    rows = []
    for name in sorted(set(metrics.name.tolist())):
        try:
            curve = curve_of(metrics, name, name)
        except UsageError:  # it has no value that is a number
            rows.append([name, f"{int((metrics.name == name).sum()):,}", "no number", "", "", ""])
            continue
        values = curve.values
        means = _over_steps(curve)
        low, high = min(means), max(means)
        levels = [round(7 * (mean - low) / (high - low)) if high > low else 0 for mean in means]
        rows.append(
            [
                name,
                f"{len(values):,}",
                f"{values[0]:.4g}",
                f"{values[-1]:.4g}",
                f"{curve.steps[-1]:,}",
                "".join("▁▂▃▄▅▆▇█"[level] for level in levels),
            ]
        )
    if rows:
        say("")
        headings = ["metric", "values", "first", "last", "at step", "curve"]
        print_table(headings, rows, texts={"metric", "curve"})


def _over_steps(curve: Curve) -> list[float]:
    """Return the means of a curve over equal numbers of steps, one for each character.

    Steps without a value, as of a metric that became rare, lie on the line between those with one.
    """
    import numpy as np

    edges = np.linspace(curve.steps[0], curve.steps[-1] + 1, min(_CURVE, len(curve.values)) + 1)
    place = np.searchsorted(edges, curve.steps, side="right") - 1
    filled, place = np.unique(place, return_inverse=True)
    means = np.bincount(place, curve.values) / np.bincount(place)
    return [float(mean) for mean in np.interp(np.arange(len(edges) - 1), filled, means)]


def fact_rows(run: Run) -> list[list[str]]:
    """Return the facts of a run as name, value and meaning."""
    from fullwire.run.facts import REGISTRY, shown_text

    shows: Mapping[str, Callable[[float], str]]
    shows = {"bit/s": show_rate, "s": show_time, "B": show_bytes, "": "{:.3g}".format}
    rows = []
    for name, value in run.facts.known().items():
        unit = REGISTRY[name].unit
        if isinstance(value, tuple):
            # The values of few ranks. Of many ranks, and of other pairs, only their number.
            text = f"{len(value)} points {unit}"
            if unit.startswith("(rank,") and len(value) <= _RANKS_SAID:
                show = shows[unit.removeprefix("(rank, ").removesuffix(")")]
                text = ", ".join(f"rank {rank:g}: {show(amount)}" for rank, amount in value)
        elif name == "group_names":  # a large job has thousands
            names = [part.rpartition(": ")[2].split() for part in str(value).split(", ")]
            text = f"{sum(map(len, names)):,} names"
        else:
            text = shown_text(name, str(value))
        rows.append([name, text, REGISTRY[name].meaning])
    return rows
