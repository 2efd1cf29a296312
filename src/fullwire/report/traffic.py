"""What packets say: the sentences, the matrix, the JSON, and the picture."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from fullwire.analysis.flows import Traffic
from fullwire.model.endpoint import host_of
from fullwire.model.run import Run
from fullwire.report.terminal import print_notes, print_table, say
from fullwire.units import show_bytes, show_time

_MOST_HOSTS = 16  # a matrix of more does not fit a terminal; the JSON has it
_SLOTS = 600  # of a picture, from left to right


def print_traffic(result: Traffic) -> None:
    """Print what packets say, the matrix, and the audit."""
    width = min(shutil.get_terminal_size().columns, 100)
    for line in wrap(" ".join(traffic_sentences(result)), width):
        say(line)
    say("")
    if len(result.hosts) <= _MOST_HOSTS:
        _print_matrix(result)
    for sentence in result.audit:
        say(f"  {sentence}")
    print_notes(f"PARTIAL: {sentence}" for sentence in result.warnings)


def traffic_sentences(result: Traffic) -> Iterator[str]:
    """Say it as one would in a meeting."""
    yield f"{len(result.hosts)} hosts, {_shape(result)}."
    found = result.iterations
    if found is None:
        yield "No iterations were found: nothing repeats with the same bytes after silence."
    else:
        yield (
            f"{found.count} iterations of {show_time(found.period_s)} "
            f"({show_time(found.communicating_s)} communicating), "
            f"confidence {found.confidence:.2f}."
        )
    if result.payload_bytes_per_edge is not None:
        yield f"{show_bytes(result.payload_bytes_per_edge)} per edge and iteration" + (
            "."
            if result.gradient_bytes is None
            else f", so the gradient is {show_bytes(result.gradient_bytes)} "
            f"at N={result.ranks or len(result.pattern.order)}, if it is one all-reduce."
        )
    slow = result.slow_link
    if slow is None:
        yield "No slow link."
    else:
        least, most = slow.others_busy
        yield (
            f"Host {slow.host} sends over the slow link: busy {slow.busy_fraction:.0%} of the time "
            f"against {least:.0%} to {most:.0%}."
        )


def _shape(result: Traffic) -> str:
    if result.pattern.kind == "none":
        return "in no pattern that is known"
    article = "an" if result.pattern.kind[0] == "a" else "a"
    return f"{article} {result.pattern.kind} {' -> '.join(result.order)}"


def _print_matrix(result: Traffic) -> None:
    rows = [
        [host, *("" if not size else show_bytes(size) for size in row), show_bytes(sum(wire))]
        for host, row, wire in zip(
            result.hosts,
            result.matrix_payload_bytes.tolist(),
            result.matrix_wire_bytes.tolist(),
            strict=True,
        )
    ]
    print_table(["payload from \\ to", *result.hosts, "sent on the wire"], rows,
                texts={"payload from \\ to"})  # fmt: skip


def traffic_object(result: Traffic) -> dict[str, Any]:
    """Return what packets say as JSON takes it."""
    found = result.iterations
    slow = result.slow_link
    return {
        "hosts": list(result.hosts),
        "matrix_payload_bytes": result.matrix_payload_bytes.tolist(),
        "matrix_wire_bytes": result.matrix_wire_bytes.tolist(),
        "pattern": {"kind": result.pattern.kind, "order": list(result.order)},
        "iterations": {
            "count": 0 if found is None else found.count,
            "period_s": None if found is None else found.period_s,
            "communicating_s": None if found is None else found.communicating_s,
            "payload_bytes_per_edge": result.payload_bytes_per_edge,
            "confidence": 0.0 if found is None else found.confidence,
        },
        "gradient_bytes": result.gradient_bytes,
        "ranks": result.ranks,
        "busy_fractions": result.busy_fractions.tolist(),
        "slow_link": None
        if slow is None
        else {"host": slow.host, "busy_fraction": slow.busy_fraction},
        "audit": list(result.audit),
        "warnings": list(result.warnings),
    }


def plot_traffic(run: Run, result: Traffic, path: Path) -> None:
    """Draw the traffic matrix, and what each host sends over time."""
    import altair as alt

    from fullwire.report.charts import save

    matrix = alt.Chart(alt.Data(values=_cells(result))).mark_rect().encode(
        x=alt.X("to:N", sort=None, title="to"), y=alt.Y("from:N", sort=None, title="from"),
        color=alt.Color("bytes:Q", title="payload (MB)", scale=alt.Scale(scheme="blues")),
    ).properties(width=240, height=240)  # fmt: skip
    over_time = alt.Chart(alt.Data(values=_rates(run, result))).mark_area().encode(
        x=alt.X("time:Q", title="time (s)"),
        y=alt.Y("rate:Q", title="Gbps"),
        row=alt.Row("host:N", sort=None, title=None),
    ).properties(width=620, height=60)  # fmt: skip
    title = alt.Title(" ".join(list(traffic_sentences(result))[:2]), anchor="start")
    save(alt.hconcat(matrix, over_time).properties(title=title, padding=18), path)


def _cells(result: Traffic) -> list[dict[str, Any]]:
    return [
        {"from": source, "to": target, "bytes": int(size) / 1e6}
        for source, row in zip(result.hosts, result.matrix_payload_bytes, strict=True)
        for target, size in zip(result.hosts, row, strict=True)
    ]


def _rates(run: Run, result: Traffic) -> list[dict[str, Any]]:
    """Return each host's rate over time, in slots as wide as a picture can show."""
    flows = run.flows
    first = int(flows.start_ns.min())
    width_ns = max(-(-int(flows.end_ns.max() - first) // _SLOTS), int(1e6))
    slot = (flows.start_ns - first) // width_ns
    senders = np.array([host_of(end) for end in flows.source.tolist()], object)
    shown = []
    for host in result.hosts:
        chosen = senders == host
        sent = np.bincount(slot[chosen], flows.wire_bytes[chosen], int(slot.max()) + 1)
        shown += [
            {"host": host, "time": place * width_ns * 1e-9, "rate": size * 8 / width_ns}
            for place, size in enumerate(sent.tolist())
        ]
    return shown
