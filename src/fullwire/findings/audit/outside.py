"""The bytes outside of iterations, and transfers that the capture could not see."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from fullwire.findings.audit import Line
from fullwire.findings.finding import Finding
from fullwire.packets.edges import Edges
from fullwire.packets.expected import LARGE, Expected
from fullwire.packets.iterations import Iterations

_MOST_EDGES = 8


class StartUpBroadcast(Finding):
    """The bytes that start-up sent over edges."""

    template = (
        "before the first iteration {usual_bytes:bytes} went over "
        "{count:one edge|each of {count} edges}: a start-up broadcast "
        "({edges:list}{has_more:?, ...})"
    )

    usual_bytes: float
    count: int
    edges: tuple[str, ...]
    has_more: bool


class NotOfIterations(Finding):
    """The share of the payload that is outside of iterations."""

    template = (
        "{share:.2%} of the payload is of iterations, {before:.2%} came before them"
        "{rest_bytes:?, {rest_bytes:bytes} between and after}"
    )

    share: float
    before: float
    rest_bytes: float | None


class AllToOneHost(Finding):
    """All captured packets went to or from one host: the others may exchange packets unseen."""

    template = (
        "all packets are to or from {host}: a capture made there misses packets between other "
        "hosts, so the pattern is uncertain"
    )

    host: str


def outside(edges: Edges, iterations: Iterations | None, expected: Expected) -> Iterator[Finding]:
    """Yield the bytes that were sent before the first iteration, and between and after them."""
    if iterations is None or expected.before is None:
        return
    before, gradient = expected.before, expected.gradient_bytes or expected.edge_bytes or 0.0
    large = np.argwhere(before > LARGE * gradient)
    if len(large):
        yield StartUpBroadcast(
            usual_bytes=float(np.median(before[before > LARGE * gradient])),
            count=len(large),
            edges=tuple(f"{edges.hosts[a]} -> {edges.hosts[b]}" for a, b in large[:_MOST_EDGES]),
            has_more=len(large) > _MOST_EDGES,
        )
    total = float(edges.payload_bytes.sum())
    theirs = iterations.count * float(iterations.edge_bytes.sum())
    rest = total - theirs - float(before.sum())
    if total and abs(rest) > 1e-4 * total and iterations.basis != "bytes":
        yield NotOfIterations(
            share=theirs / total,
            before=float(before.sum()) / total,
            rest_bytes=rest if rest > 0 else None,
        )


def half_seen(edges: Edges) -> Iterator[Finding]:
    """Yield the host to or from which all captured packets went, if there is one."""
    payload = edges.matrix(edges.payload_bytes)
    touched = payload.sum(axis=0) + payload.sum(axis=1)
    for host, name in enumerate(edges.hosts):
        if len(edges.hosts) > 2 and touched[host] == payload.sum():
            yield AllToOneHost(host=name)


LINE = Line(
    key="outside",
    place=2,
    of=lambda traffic: chain(
        outside(traffic.detail.edges, traffic.iterations, traffic.detail.expected),
        half_seen(traffic.detail.edges),
    ),
)
