"""The idle time of the network in long iterations: a long one shows that something else is slow."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fullwire.findings.audit import Line
from fullwire.findings.finding import Finding
from fullwire.packets.iterations import Iterations

_SLOW = 1.5  # Times the usual period: a longer iteration took long.
_MOSTLY = 0.5  # Of the extra time: the network was idle for most of it.


class LongIterations(Finding):
    """The long iterations, and the share of their extra time in which nothing was sent."""

    template = (
        "{count} of {of} iterations took {longer_s:time} longer than usual together. In {idle:.0%} "
        "of that nothing was sent: {is_idle:the network was idle, so something else was slow, or "
        "paused|most of it was communication, so the network or its slowest member was slow}"
    )

    count: int
    of: int
    longer_s: float
    idle: float
    is_idle: bool


def idle_network(iterations: Iterations | None) -> Iterator[Finding]:
    """Yield the idle share of the network in long iterations."""
    if iterations is None or len(iterations.begins_ns) < 3:
        return
    periods_s = np.diff(iterations.begins_ns) * 1e-9
    lasted_s = (iterations.ends_ns - iterations.begins_ns)[:-1] * 1e-9
    slow = periods_s > _SLOW * iterations.period_s
    if not slow.any():
        return
    longer_s = float((periods_s[slow] - iterations.period_s).sum())
    sending_s = float((lasted_s[slow] - np.median(lasted_s)).clip(0).sum())
    idle = max(1 - sending_s / longer_s, 0.0)
    yield LongIterations(
        count=int(slow.sum()),
        of=len(periods_s),
        longer_s=longer_s,
        idle=idle,
        is_idle=idle > _MOSTLY,
    )


LINE = Line(
    key="idle",
    place=6,
    of=lambda traffic: idle_network(traffic.iterations),
    is_of_one_training=True,
)
