"""The bytes of an iteration against what theory asks for, and what else was on the wire.

A ring of N ranks moves 2(N-1)/N of the gradient over each edge, and so it does between hosts,
however many of the ranks a host has: so bytes tell ranks, where the model's size is known. It is
known if somebody says it, or from the broadcast with which training starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.packets.edges import Edges
from fullwire.packets.iterations import Iterations
from fullwire.packets.messages import SeenCollectives, broadcast_bytes, bytes_of
from fullwire.packets.pattern import Pattern
from fullwire.run.run import Run, Whole
from fullwire.units import show_bytes

_MOST_RANKS = 64  # on one host
_AGREES = 0.005  # bytes that are that close are the same, but for headers of messages
_LARGE = 0.1  # of a gradient: what start-up broadcasts
_RINGS = ("ring", "two-way ring")
_SHARDED = 1.5  # times the bytes of an all-reduce: parameters are gathered twice, gradients once
_AT_ONCE = 0.3  # of the time that the less busy way is used: so much is chance
_FAINT = 0.05  # of a slot's bytes: acknowledgements by a library
_ABOUT = 0.02
_REDUCES = ("allreduce", "reducescatter")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Expected:
    """What an iteration's bytes amount to; `None` where they do not say it."""

    edge_bytes: float | None = None
    gradient_bytes: float | None = None
    ranks: int | None = None
    gathered_bytes: float = 0.0  # of parameters, in an iteration
    before: Whole | None = None  # who sent what before the first iteration
    model_bytes: float | None = None
    model_is_told: bool = False  # by a person, not by a broadcast
    if_sharded_bytes: float | None = None  # the gradient, where it may be that instead


def expected_bytes(
    edges: Edges,
    pattern: Pattern,
    iterations: Iterations | None,
    seen: SeenCollectives | None,
    known_ranks: int | None,
    model_bytes: float | None,
) -> Expected:
    """Say what the gradient is, and how many ranks add it up."""
    if iterations is None or not pattern.edge_bytes:
        return Expected(ranks=known_ranks)
    edge_bytes = iterations.usual_bytes
    gradient = pattern.gradient_bytes
    gradient = None if gradient is None else gradient * edge_bytes / pattern.edge_bytes
    before = edges.matrix(np.where(edges.slot < iterations.first_slot, edges.payload_bytes, 0))
    before[~_taking_part(iterations, len(edges.hosts))] = 0
    told = None if seen is None else broadcast_bytes(seen)
    model = model_bytes or told
    if model is None and gradient is not None:
        model = _broadcast(edges, iterations, before, gradient, len(pattern.order))
    ranks = known_ranks
    if pattern.kind in _RINGS and gradient is not None:
        ranks = known_ranks or _ranks(len(pattern.order), edge_bytes, model)
        count = ranks or len(pattern.order)
        way = 1 if pattern.kind == "ring" else 2
        gradient = way * edge_bytes * count / (2 * (count - 1))
    gathered, if_sharded = 0.0, None
    if pattern.kind in _RINGS and gradient is not None and seen is None:
        turns = _in_turns(edges, pattern, iterations)
        if turns is not None:
            gradient, gathered = turns
        elif model is None:
            if_sharded = gradient / _SHARDED
        elif abs(gradient / _SHARDED / model - 1) < _AGREES:
            gradient, gathered = gradient / _SHARDED, 2 * gradient / _SHARDED
    if seen is not None and iterations.basis == "messages":
        world = ranks or len(edges.hosts)
        reduced = sum(bytes_of(seen, iterations, (op,), len(edges.hosts), world) for op in _REDUCES)
        gathered = bytes_of(seen, iterations, ("allgather",), len(edges.hosts), world)
        gradient = reduced or gradient
    return Expected(
        edge_bytes=edge_bytes,
        gradient_bytes=gradient,
        ranks=ranks,
        gathered_bytes=gathered,
        before=before,
        model_bytes=model,
        model_is_told=model_bytes is not None,
        if_sharded_bytes=if_sharded,
    )


def _in_turns(edges: Edges, pattern: Pattern, iterations: Iterations) -> tuple[float, float] | None:
    """Return what is reduced and what is gathered, where a two-way ring goes one way at a time.

    An all-reduce over both ways uses them at once. Libraries that gather one way and reduce the
    other do it for sharded parameters, gathered forwards and backwards; what is reduced goes around
    once, or twice where a reduce-scatter is an all-reduce.
    """
    if pattern.kind != "two-way ring":
        return None
    count, hosts = len(pattern.order), len(edges.hosts)
    here, following, before = pattern.order[0], pattern.order[1], pattern.order[-1]
    ways = [here * hosts + following, here * hosts + before]
    within = (edges.slot >= iterations.first_slot) & (edges.slot <= iterations.last_slot)
    busy = []
    for way in ways:
        rows = within & (edges.edge == way) & (edges.payload_bytes > 0)
        large = edges.payload_bytes > _FAINT * edges.payload_bytes[rows].max(initial=0)
        busy.append(np.unique(edges.slot[rows & large]))
    both = len(np.intersect1d(busy[0], busy[1], assume_unique=True))
    if both > _AT_ONCE * min(map(len, busy)):
        return None
    usual = dict(zip(iterations.edges.tolist(), iterations.edge_bytes.tolist(), strict=True))
    less, more = sorted(usual.get(way, 0.0) for way in ways)
    whole = less * count / (count - 1)
    if abs(more / less - 1) < _ABOUT:
        return whole / 2, whole
    return (whole, 2 * whole) if abs(more / less / 2 - 1) < _ABOUT else None


def _taking_part(iterations: Iterations, hosts: int) -> NDArray[np.bool_]:
    """Say between which hosts, source by target, what is sent may belong to the training."""
    member = np.zeros(hosts, bool)
    member[iterations.edges // hosts] = member[iterations.edges % hosts] = True
    return np.logical_and.outer(member, member)


def _broadcast(
    edges: Edges, iterations: Iterations, before: Whole, gradient: float, hosts: int
) -> float | None:
    """Return what start-up broadcast over each edge that it used, or over each connection.

    Over one edge it goes several times, if there are several ranks on a host.
    """
    members = _taking_part(iterations, len(edges.hosts))
    early = (edges.slot < iterations.first_slot) & members[edges.source, edges.target]
    single = np.bincount(edges.connection[early], edges.payload_bytes[early])
    sizes = [
        float(np.median(sent[sent > _LARGE * gradient]))
        for sent in (before, single)
        if (sent > _LARGE * gradient).any()
    ]
    fitting = (each for each in sizes if _ranks(hosts, iterations.usual_bytes, each))
    return next(fitting, sizes[0] if sizes else None)


def _ranks(hosts: int, edge_bytes: float, model_bytes: float | None) -> int | None:
    """Count ranks rather than hosts, where the model's size says which number it must be."""
    if model_bytes is None:
        return None
    counts = np.arange(hosts, _MOST_RANKS * hosts + 1, hosts)
    shares = 2 * (counts - 1) / counts
    error = np.abs(edge_bytes / model_bytes - shares)
    nearest = int(np.argmin(error[:-1]))
    apart = shares[nearest + 1] - shares[nearest]
    if error[nearest] > min(_AGREES * shares[nearest], apart / 4):
        return None
    return int(counts[nearest])


def byte_audit(
    run: Run, edges: Edges, pattern: Pattern, iterations: Iterations | None, expected: Expected
) -> Iterator[str]:
    """Say how bytes compare with theory, and what else than an iteration's was on the wire."""
    yield from _against_theory(edges, pattern, expected)
    yield from _outside(edges, iterations, expected)
    yield from _half_seen(edges)
    yield from _on_the_wire(run, edges)


def _against_theory(edges: Edges, pattern: Pattern, expected: Expected) -> Iterator[str]:
    gradient, model = expected.gradient_bytes, expected.model_bytes
    if expected.gathered_bytes and gradient:
        yield (
            f"an iteration gathers {show_bytes(expected.gathered_bytes)} and reduces "
            f"{show_bytes(gradient)}: parameters are sharded, as by FSDP or ZeRO"
        )
    if gradient is None or expected.edge_bytes is None or expected.gathered_bytes:
        return
    count = expected.ranks or len(pattern.order)
    if expected.ranks is not None and expected.ranks > len(pattern.order):
        yield (
            f"by its bytes the {pattern.kind} has {expected.ranks} ranks on "
            f"{len(pattern.order)} hosts"
        )
    if model is None:
        if pattern.kind in _RINGS:
            yield from _if_more_ranks(expected.edge_bytes, len(pattern.order), pattern, expected)
        return
    source = "the gradient given" if expected.model_is_told else "what start-up broadcast"
    error = gradient / model - 1
    if abs(error) < _AGREES:
        yield (
            f"{show_bytes(expected.edge_bytes)} per edge is 2({count}-1)/{count} of {source}, "
            f"{show_bytes(model)}, within {max(abs(error), 1e-5):.2%}"
            if pattern.kind == "ring"
            else f"the gradient agrees with {source}, {show_bytes(model)}, within "
            f"{max(abs(error), 1e-5):.2%}"
        )
    else:
        yield f"{_cause(gradient / model)} ({source} is {show_bytes(model)})"


def _if_more_ranks(
    edge_bytes: float, hosts: int, pattern: Pattern, expected: Expected
) -> Iterator[str]:
    if expected.ranks is None:
        way = 1 if pattern.kind == "ring" else 2
        least, more = way * edge_bytes / 2, 4 * hosts
        yield (
            f"how many ranks a host has is not seen: with {more} ranks in all the gradient would "
            f"be {show_bytes(way * edge_bytes * more / (2 * (more - 1)))}, with very many "
            f"{show_bytes(least)}"
        )


def _cause(share: float) -> str:
    """Say why an iteration moves another amount than the model has."""
    for bits, ratio in ((16, 0.5), (8, 0.25), (4, 0.125), (1, 1 / 32)):
        if abs(share / ratio - 1) < 2 * _AGREES:
            return f"the edges carry 1/{1 / ratio:g} of the model: gradients go as {bits} bits each"
    if share < 1:
        return (
            f"the edges carry {share:.2f} of the model: gradients are compressed {1 / share:.1f} "
            "times, or not all of the model is trained"
        )
    if abs(share - round(share)) < 2 * _AGREES * share:
        return (
            f"the edges carry {round(share)} times the model: it is reduced {round(share)} times "
            "in an iteration, or sharded and gathered"
        )
    return (
        f"the edges carry {share:.2f} times the model: other ranks than the hosts, or parameters "
        "that are gathered too"
    )


def _outside(edges: Edges, iterations: Iterations | None, expected: Expected) -> Iterator[str]:
    """Say what was sent before the first iteration, and between and after them."""
    if iterations is None or expected.before is None:
        return
    before, gradient = expected.before, expected.gradient_bytes or expected.edge_bytes or 0.0
    large = np.argwhere(before > _LARGE * gradient)
    if len(large):
        sizes = before[before > _LARGE * gradient]
        named = ", ".join(f"{edges.hosts[a]} -> {edges.hosts[b]}" for a, b in large[:8])
        yield (
            f"before the first iteration {show_bytes(float(np.median(sizes)))} went over each of "
            f"{len(large)} edges: a start-up broadcast "
            f"({named}{', ...' if len(large) > 8 else ''})"
        )
    total = float(edges.payload_bytes.sum())
    theirs = iterations.count * float(iterations.edge_bytes.sum())
    rest = total - theirs - float(before.sum())
    if total and abs(rest) > 1e-4 * total and iterations.basis != "bytes":
        yield (
            f"{theirs / total:.2%} of the payload is of iterations, "
            f"{float(before.sum()) / total:.2%} came before them"
            + (f", {show_bytes(rest)} between and after" if rest > 0 else "")
        )


def _half_seen(edges: Edges) -> Iterator[str]:
    """Say where everything that was captured went to or from one host: others may talk as well."""
    payload = edges.matrix(edges.payload_bytes)
    touched = payload.sum(axis=0) + payload.sum(axis=1)
    for host, name in enumerate(edges.hosts):
        if len(edges.hosts) > 2 and touched[host] == payload.sum():
            yield (
                f"all packets are to or from {name}: if it is there that they were captured, what "
                "other hosts say to each other is not seen, and no pattern is sure"
            )


def _on_the_wire(run: Run, edges: Edges) -> Iterator[str]:
    payload, wire = int(edges.payload_bytes.sum()), int(edges.wire_bytes.sum())
    if payload:
        yield (
            f"{show_bytes(payload)} of payload took {show_bytes(wire)} on the wire: "
            f"{wire / payload - 1:.1%} for headers, acknowledgements and retransmission"
        )
    facts = run.facts
    for size, sentence in (
        (facts.retransmitted_bytes, "{} were sent again (retransmission)"),
        (facts.reordered_bytes, "{} came out of order, soon enough not to be retransmission"),
        (
            facts.lost_bytes,
            _LOST,
        ),
        (
            facts.missed_bytes,
            _MISSED,
        ),
        (
            facts.mirrored_bytes,
            _MIRRORED,
        ),
    ):
        if size:
            yield sentence.format(show_bytes(size))
    if run.facts.supposed_packets:
        yield (
            f"{run.facts.supposed_packets:,} packets on the wire are supposed: the capture "
            "holds larger ones, from before segmentation, and no opening, which would say the size"
        )
    if edges.strangers_bytes:
        yield (
            f"{show_bytes(edges.strangers_bytes)} were sent to, from or within other hosts, and "
            "are left out"
        )
    if run.facts.capture_clocks is not None:
        yield f"clocks, against that of the first capture: {run.facts.capture_clocks}"


_LOST = "{} were never seen and never acknowledged: lost, or sent after the capture"
_MISSED = "{} went over the wire unseen: sequence numbers say so, and they are counted"
_MIRRORED = "{} on the wire are in the capture again, mirrored twice: counted once"
