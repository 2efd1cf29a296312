"""What packets say: the sentences, the tables, and the JSON."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from fullwire.packets.flows import Traffic
from fullwire.packets.usual_iteration import CollectiveSeen, UsualIteration, usual_iteration
from fullwire.report.terminal import print_notes, print_table, say
from fullwire.units import show_bytes, show_time

_MOST_HOSTS = 16  # a matrix of more does not fit a terminal; the JSON has it
_MOST_EDGES = 12
_MOST_COLLECTIVES = 24


def print_traffic(result: Traffic) -> None:
    """Print what packets say, who sent what, one iteration, and the audit."""
    width = min(shutil.get_terminal_size().columns, 100)
    for line in wrap(" ".join(traffic_sentences(result)), width):
        say(line)
    say("")
    if len(result.hosts) <= _MOST_HOSTS:
        _print_matrix(result)
    _print_edges(result)
    for part in _trainings(result):
        usual = usual_iteration(part)
        if usual is not None:
            _print_iteration(usual, part)
    for sentence in result.audit:
        _say_under(sentence, width)
    _print_audits(result, width)
    print_notes(f"PARTIAL: {sentence}" for sentence in result.warnings)


def _trainings(result: Traffic) -> Iterator[Traffic]:
    """Go through the trainings that were told apart, or give the only one."""
    for group in result.groups:
        yield from _trainings(group)
    if not result.groups:
        yield result


def _print_audits(result: Traffic, width: int) -> None:
    for group in result.groups:
        say(f"of {_named(group)}:")
        for sentence in group.audit:
            _say_under(sentence, width)
        _print_audits(group, width)


def _named(group: Traffic) -> str:
    """Name a training by when it was, or else by its hosts."""
    if group.during_s is None:
        return ", ".join(group.hosts)
    begin_s, end_s = group.during_s
    return f"{show_time(begin_s)} to {show_time(end_s)}"


def _say_under(sentence: str, width: int) -> None:
    for number, line in enumerate(wrap(sentence, width - 4)):
        say(f"  {'  ' if number else ''}{line}")


def traffic_sentences(result: Traffic) -> Iterator[str]:
    """Say it as one would in a meeting."""
    if result.groups:
        if result.groups[0].during_s is not None:
            yield (
                f"{len(result.groups)} trainings between {len(result.hosts)} hosts, one after the "
                "other and without a connection in common."
            )
        else:
            yield (
                f"{len(result.hosts)} hosts in {len(result.groups)} groups that send each other "
                "nothing, each a training of its own or none."
            )
        for group in result.groups:
            yield f"{_named(group)}:"
            yield from traffic_sentences(group)
        return
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
        yield f"{show_bytes(result.payload_bytes_per_edge)} per edge and iteration{_moved(result)}"
    yield _slow_link(result)


def _moved(result: Traffic) -> str:
    if result.gradient_bytes is None:
        return "."
    if result.gathered_bytes:
        return (
            f": {show_bytes(result.gathered_bytes)} of parameters are gathered and "
            f"{show_bytes(result.gradient_bytes)} of gradients reduced."
        )
    told = (
        f", so the gradient is {show_bytes(result.gradient_bytes)} "
        f"at N={result.ranks or len(result.pattern.order) or len(result.hosts)}"
    )
    if result.collectives is not None:
        return f"{told}."
    if result.if_sharded_bytes is None:
        return f"{told}, if it is one all-reduce."
    return (
        f"{told} if it is one all-reduce, or {show_bytes(result.if_sharded_bytes)} if parameters "
        "are sharded (FSDP, ZeRO-3) and gathered twice."
    )


def _slow_link(result: Traffic) -> str:
    slow = result.slow_link
    if slow is not None:
        least, most = slow.others_busy
        return (
            f"Host {slow.host} sends over the slow link: busy {slow.busy_fraction:.0%} of the time "
            f"against {least:.0%} to {most:.0%}."
        )
    if result.iterations is None:
        return "Without iterations no link can be called slow."
    if len(result.hosts) == 2 and result.busy_fractions.min(initial=1.0) > 0:
        return "No slow link, as far as two hosts can show one."
    return "No slow link."


def _shape(result: Traffic) -> str:
    kind, parts = result.pattern.kind, result.pattern.parts
    named = [[result.hosts[each] for each in part] for part in parts]
    if kind == "none":
        return "in no pattern that is known"
    if kind == "parameter server":
        return f"a parameter server at {', '.join(named[0])}"
    if kind == "hierarchical":
        return f"a hierarchy of {'; '.join(', '.join(group) for group in named)}"
    if kind == "double tree":
        return f"a double tree around {named[0][0]} and {named[1][0]}"
    if kind == "tree":
        return f"a tree around {result.order[0]}"
    if parts:
        return f"{kind}: {'; '.join(' -> '.join(ring) for ring in named)}"
    if kind.endswith("ring"):
        return f"a {kind} {' -> '.join(result.order)}"
    return "everyone with everyone alike (all-to-all)" if kind == "all-to-all" else f"in {kind}"


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
    print_table(
        ["payload from \\ to", *result.hosts, "sent on the wire"],
        rows,
        texts={"payload from \\ to"},
    )


def _print_edges(result: Traffic) -> None:
    def time(time_s: float | None) -> str:
        return "" if time_s is None else show_time(time_s)

    busy = dict(zip(result.hosts, result.busy_fractions.tolist(), strict=True))
    rows = [
        [
            f"{each.source} -> {each.target}",
            str(each.connections),
            f"{busy[each.source]:.0%}",
            time(each.rtt_least_s),
            time(each.rtt_median_s),
            time(each.rtt_long_s),
            f"{each.bursts}",
            show_bytes(each.burst_bytes),
            f"{each.sent_again:.2%}",
        ]
        for each in result.edges[:_MOST_EDGES]
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


def _print_iteration(usual: UsualIteration, result: Traffic) -> None:
    say(f"iteration {usual.number}, as its collectives:")
    rows = [
        [
            each.op,
            str(each.sequence),
            "" if each.bytes is None else show_bytes(each.bytes),
            f"{each.data_s * 1e3:.2f}",
            f"{each.end_s * 1e3:.2f}",
            _last(each, result),
        ]
        for each in usual.collectives[:_MOST_COLLECTIVES]
    ]
    headings = ["collective", "number", "bytes", "data from (ms)", "to", "last to come"]
    print_table(headings, rows, texts={"collective", "last to come"})


def _last(each: CollectiveSeen, result: Traffic) -> str:
    if each.last_to_come is None:
        return ""
    came_s = each.came_s[each.last_to_come]
    return f"{result.hosts[each.last_to_come]} at {(came_s or 0.0) * 1e3:.2f}"


def traffic_object(result: Traffic) -> dict[str, Any]:
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
        "edges": [_edge_object(each) for each in result.edges],
        "iteration": _iteration_object(usual_iteration(result)),
        "audit": list(result.audit),
        "warnings": list(result.warnings),
        "groups": [traffic_object(group) for group in result.groups],
        "during_s": result.during_s,
    }


def _pattern_object(result: Traffic) -> dict[str, Any]:
    pattern: dict[str, Any] = {"kind": result.pattern.kind, "order": list(result.order)}
    if result.pattern.parts:
        pattern["parts"] = [[result.hosts[each] for each in part] for part in result.pattern.parts]
    return pattern


def _edge_object(edge: Any) -> dict[str, Any]:
    return {name: getattr(edge, name) for name in edge.__slots__}


def _iteration_object(usual: UsualIteration | None) -> dict[str, Any] | None:
    if usual is None:
        return None
    collectives = [
        {name: getattr(each, name) for name in each.__slots__} for each in usual.collectives
    ]
    return {"number": usual.number, "collectives": collectives}
