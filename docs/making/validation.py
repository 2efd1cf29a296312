"""Tables of validation/results, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from validation import results
from validation.results import Cell, Result

_PLACE = re.compile(r"<!-- results: ([\w-]+) -->")
_FIRST = re.compile(r"<!-- results of all -->")
# The subjects of the site's pages, each with its results in the order in which they are shown.
PAGES = {
    "predictions": (
        "predictions",
        "predictions-each-shown",
        "cells",
        "twice",
        "halves",
        "real-computation",
        "storms-of-tiny-messages",
        "storms-joined",
        "storms-fullwire",
        "groups",
        "closed-loop",
        "emulation",
    ),
    "verdicts": ("causes", "contention", "crowded", "filled-lines", "repeats"),
    "watch": ("watch", "watch-stuck", "flow-records"),
    "tune": ("tune",),
    "collectives": (
        "netx",
        "astra",
        "collectives",
        "machines",
        "nccl",
        "cluster-speed",
        "search",
        "ray",
    ),
    "lab": ("links", "spine", "hierarchies", "papers"),
    "recording": ("recorder", "capturing", "recorder-exhaustion"),
    "captures": ("wires", "wires-labs", "packet-speed", "damaged-captures"),
    "traces": ("importing", "fleet", "fuzz", "damaged-traces", "fuzz-formats", "commands"),
    "transport": (
        "transport",
        "transport-other-days",
        "transport-loopback",
        "transport-engine",
        "far",
        "programs",
        "wire-formats",
        "strangers",
        "exhaustion",
        "faults",
        "soak",
        "torch-tests",
        "membership",
        "elastic-recovery",
        "sharded-recovery",
        "shard-copies",
        "chaos",
        "elastic-bars",
        "elastic-goodput",
    ),
    "compression": (
        "compression-goals",
        "wire-walk",
        "compression",
        "compression-slow-links",
        "codec-steps",
        "torch-hooks",
    ),
    "models": ("models",),
    "operations": ("operations", "memory"),
    "plans": ("plans", "plan-pairs"),
    "time-to-target": (
        "reference-points",
        "time-to-target",
        "settings-to-target",
        "rounds",
        "diloco",
        "replicas",
    ),
}


def with_results(markdown: str) -> str:
    """Put tables into the places that a page marks."""
    markdown = _FIRST.sub(lambda _: first_table(), markdown)
    return _PLACE.sub(lambda place: section(results.read(place[1])), markdown)


def first_table() -> str:
    """Return one line for each result: the claim, the figure, the reference, and the date."""
    rows = [
        [
            f"[{result.claim}]({page}.md)",
            result.summary,
            result.anchor,
            f"{result.date}",
        ]
        for page, names in PAGES.items()
        for result in map(results.read, names)
    ]
    return table(["claim", "measured", "held against", "date"], rows)


def section(result: Result) -> str:
    """Show one result: its figures, its tables, and where they come from."""
    parts = [_figures(result)]
    for each in result.tables:
        parts += [f"**{each.title}**"] if each.title else []
        parts.append(table(each.columns, each.rows))
    parts.append(_origin(result))
    return "\n\n".join(parts)


def _figures(result: Result) -> str:
    names = ["claim", "held against", "cases"]
    row: list[Cell] = [result.claim, result.anchor, f"{result.cases:,}"]
    for name, share in (
        ("median", result.median),
        ("p90", result.p90),
        ("worst", result.worst),
        ("inside the interval", result.coverage),
    ):
        if share is not None:
            names.append(name)
            row.append(percent(share))
    if result.measure:
        row[0] = f"{result.claim} ({result.measure})"
    return table(names, [row])


def percent(share: float) -> str:
    """Print a share with only its meaningful digits."""
    return f"{share:.1%}" if share >= 0.001 or share == 0 else f"{share:.0e}"


def _origin(result: Result) -> str:
    written = "" if result.source == results.HERE else f" Source: {result.source}."
    return (
        f"{result.date}, {result.machine}, commit {result.commit}.{written}\n\n"
        f"```sh\n{result.command}\n```"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Write a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(cell: Cell) -> str:
    return "" if cell is None else str(cell).replace("|", "\\|")
