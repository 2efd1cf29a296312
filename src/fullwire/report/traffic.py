"""What packets say: the sentences, the tables, and the JSON."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from fullwire.answers.audited import AuditedTraffic
from fullwire.findings.traffic import training
from fullwire.packets.usual_iteration import CollectiveSeen, UsualIteration, usual_iteration
from fullwire.report.terminal import print_notes, print_table, say
from fullwire.units import show_bytes, show_time
from fullwire.words import sentence, sentences

_MOST_HOSTS = 16  # a matrix of more does not fit a terminal; the JSON has it
_MOST_EDGES = 12
_MOST_COLLECTIVES = 24


def print_traffic(result: AuditedTraffic) -> None:
    """Print what packets say, who sent what, one iteration, and the audit."""
    width = min(shutil.get_terminal_size().columns, 100)
    for line in wrap(" ".join(sentences(result.story)), width):
        say(line)
    say("")
    if len(result.hosts) <= _MOST_HOSTS:
        _print_matrix(result)
    _print_edges(result)
    for part in _trainings(result):
        usual = usual_iteration(part)
        if usual is not None:
            _print_iteration(usual, part)
    for line in result.audit:
        _say_under(line, width)
    _print_audits(result, width)
    print_notes(f"PARTIAL: {warning}" for warning in result.warnings)


def _trainings(result: AuditedTraffic) -> Iterator[AuditedTraffic]:
    """Go through the trainings that were told apart, or give the only one."""
    for group in result.groups:
        yield from _trainings(group)
    if not result.groups:
        yield result


def _print_audits(result: AuditedTraffic, width: int) -> None:
    for group in result.groups:
        say(f"of {sentence(training(group))}:")
        for line in group.audit:
            _say_under(line, width)
        _print_audits(group, width)


def _say_under(sentence: str, width: int) -> None:
    for number, line in enumerate(wrap(sentence, width - 4)):
        say(f"  {'  ' if number else ''}{line}")


def _print_matrix(result: AuditedTraffic) -> None:
    rows = [
        [host, *("" if not size else show_bytes(size) for size in row), show_bytes(sum(wire))]
        for host, row, wire in zip(
            result.hosts,
            result.matrix_payload_bytes.tolist(),
            result.matrix_wire_bytes.tolist(),
            strict=True,
        )
    ]
    print_table(
        ["payload from \\ to", *result.hosts, "sent on the wire"],
        rows,
        texts={"payload from \\ to"},
    )


def _print_edges(result: AuditedTraffic) -> None:
    def time(time_s: float | None) -> str:
        return "" if time_s is None else show_time(time_s)

    busy = dict(zip(result.hosts, result.busy_fractions.tolist(), strict=True))
    rows = [
        [
            f"{edge.source} -> {edge.target}",
            str(edge.connections),
            f"{busy[edge.source]:.0%}",
            time(edge.rtt_least_s),
            time(edge.rtt_median_s),
            time(edge.rtt_long_s),
            f"{edge.bursts}",
            show_bytes(edge.burst_bytes),
            f"{edge.sent_again:.2%}",
        ]
        for edge in result.edges[:_MOST_EDGES]
    ]
    headings = [
        "edge",
        "flows",
        "sender busy",
        "rtt least",
        "median",
        "95%",
        "bursts",
        "of",
        "sent again",
    ]
    print_table(headings, rows, texts={"edge"})


def _print_iteration(usual: UsualIteration, result: AuditedTraffic) -> None:
    say(f"iteration {usual.number}, as its collectives:")
    rows = [
        [
            collective.op,
            str(collective.sequence),
            "" if collective.bytes is None else show_bytes(collective.bytes),
            f"{collective.data_s * 1e3:.2f}",
            f"{collective.end_s * 1e3:.2f}",
            _last(collective, result),
        ]
        for collective in usual.collectives[:_MOST_COLLECTIVES]
    ]
    headings = ["collective", "number", "bytes", "data from (ms)", "to", "last to come"]
    print_table(headings, rows, texts={"collective", "last to come"})


def _last(each: CollectiveSeen, result: AuditedTraffic) -> str:
    if each.last_to_come is None:
        return ""
    came_s = each.came_s[each.last_to_come]
    return f"{result.hosts[each.last_to_come]} at {(came_s or 0.0) * 1e3:.2f}"


def traffic_object(result: AuditedTraffic) -> dict[str, Any]:
    """Return what packets say as JSON takes it."""
    found = result.iterations
    slow = result.slow_link
    return {
        "hosts": list(result.hosts),
        "matrix_payload_bytes": result.matrix_payload_bytes.tolist(),
        "matrix_wire_bytes": result.matrix_wire_bytes.tolist(),
        "pattern": _pattern_object(result),
        "iterations": {
            "count": 0 if found is None else found.count,
            "period_s": None if found is None else found.period_s,
            "communicating_s": None if found is None else found.communicating_s,
            "payload_bytes_per_edge": result.payload_bytes_per_edge,
            "confidence": 0.0 if found is None else found.confidence,
            "basis": None if found is None else found.basis,
        },
        "gradient_bytes": result.gradient_bytes,
        "gathered_bytes": result.gathered_bytes,
        "if_sharded_bytes": result.if_sharded_bytes,
        "ranks": result.ranks,
        "busy_fractions": result.busy_fractions.tolist(),
        "slow_link": None
        if slow is None
        else {"host": slow.host, "busy_fraction": slow.busy_fraction},
        "edges": [{name: getattr(edge, name) for name in edge.__slots__} for edge in result.edges],
        "iteration": _iteration_object(usual_iteration(result)),
        "audit": list(result.audit),
        "warnings": list(result.warnings),
        "groups": [traffic_object(group) for group in result.groups],
        "during_s": result.during_s,
    }


def _pattern_object(result: AuditedTraffic) -> dict[str, Any]:
    pattern: dict[str, Any] = {"kind": result.pattern.kind, "order": list(result.order)}
    if result.pattern.parts:
        pattern["parts"] = [[result.hosts[each] for each in part] for part in result.pattern.parts]
    return pattern


def _iteration_object(usual: UsualIteration | None) -> dict[str, Any] | None:
    if usual is None:
        return None
    collectives = [
        {name: getattr(collective, name) for name in collective.__slots__}
        for collective in usual.collectives
    ]
    return {"number": usual.number, "collectives": collectives}
