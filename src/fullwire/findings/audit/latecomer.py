"""The host that the others wait for, where a library's headers tell when each host began."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fullwire.findings.audit import Line
from fullwire.findings.finding import Finding
from fullwire.packets.iterations import Iterations
from fullwire.packets.messages import SeenCollectives

_LEAST_WAIT = 0.1  # Of the period: a shorter wait is negligible.
_MOSTLY = 0.5  # Of the waiting: one host causes most of it.


class ComesLast(Finding):
    """One host comes late to most collectives."""

    template = (
        "{host} comes last to {share:.0%} of the collectives, {waited_s:time} an iteration after "
        "the others: they wait for it, not for the network"
    )

    host: str
    share: float
    waited_s: float


def latecomer(
    hosts: tuple[str, ...], iterations: Iterations | None, seen: SeenCollectives | None
) -> Iterator[Finding]:
    """Yield the host that comes late to most collectives, if the waiting is long enough."""
    if seen is None or iterations is None or iterations.basis != "messages" or len(hosts) < 2:
        return
    of = np.searchsorted(iterations.begins_ns, seen.first_ns, "right") - 1
    inside = (of >= 0) & (seen.first_ns <= iterations.ends_ns[of.clip(0)])
    never = np.iinfo(np.int64).max
    came_ns = np.full((len(seen), len(hosts)), never)
    np.minimum.at(came_ns, (seen.part, seen.source), seen.part_begin_ns)
    whole = inside & (came_ns < never).all(axis=1)
    if not whole.any():
        return
    came_ns = came_ns[whole]
    last = np.argmax(came_ns, axis=1)
    waited_s = (came_ns.max(axis=1) - np.median(came_ns, axis=1)) * 1e-9
    by_host = np.bincount(last, waited_s, len(hosts))
    worst = int(np.argmax(by_host))
    each_s = float(by_host[worst]) / len(iterations.begins_ns)
    if by_host[worst] < _MOSTLY * waited_s.sum() or each_s < _LEAST_WAIT * iterations.period_s:
        return
    yield ComesLast(host=hosts[worst], share=float(np.mean(last == worst)), waited_s=each_s)


LINE = Line(
    key="latecomer",
    place=4,
    of=lambda traffic: latecomer(
        traffic.detail.edges.hosts, traffic.iterations, traffic.collectives
    ),
    is_of_one_training=True,
)
