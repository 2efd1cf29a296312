"""The hosts to which packets are lost more than elsewhere, and to which several send at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fullwire.findings.audit import Line
from fullwire.findings.finding import Finding
from fullwire.packets.edges import Edges

_LOSSY = 0.001  # Of the packets, sent again: TCP slows down long before a percent.
_MUCH_LOSSIER = 4  # Times the share elsewhere: a hot spot.
_CROWDED = 0.2  # Of the time that a host receives, from several at once: incast.


class HotSpot(Finding):
    """The way to a host loses more packets than the ways to others."""

    template = (
        "the way to {host} is a hot spot: {lost:.2%} of its packets were sent again, against "
        "{elsewhere:.2%} elsewhere{senders:?. {senders} hosts send to it at once (incast)}"
    )

    host: str
    lost: float
    elsewhere: float
    senders: int | None  # None where only one sends at a time.


def hot_spots(edges: Edges) -> Iterator[HotSpot]:
    """Yield the hosts to which many packets are sent again."""
    packets, again = edges.matrix(edges.packets), edges.matrix(edges.retransmits)
    for target, host in enumerate(edges.hosts):
        lost = again[:, target].sum() / max(packets[:, target].sum(), 1)
        elsewhere = (again.sum() - again[:, target].sum()) / max(
            packets.sum() - packets[:, target].sum(), 1
        )
        if lost > _LOSSY and lost > _MUCH_LOSSIER * elsewhere:
            # Find the largest number of hosts that send to a host at once, and how often several
            # do.
            rows = (edges.target == target) & (
                edges.payload_bytes > edges.payload_bytes.max() / 100
            )
            pairs = np.unique(edges.slot[rows] * len(edges.hosts) + edges.source[rows])
            _, senders = np.unique(pairs // len(edges.hosts), return_counts=True)
            is_crowded = len(senders) and np.mean(senders > 1) > _CROWDED
            yield HotSpot(
                host=host,
                lost=float(lost),
                elsewhere=float(elsewhere),
                senders=int(senders.max()) if is_crowded else None,
            )


LINE = Line(
    key="hot-spots",
    place=5,
    of=lambda traffic: hot_spots(traffic.detail.edges),
    is_of_one_training=True,
)
