"""Do the packets that were captured beside a job add up to what its interfaces counted?"""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.findings.audit import Line
from fullwire.findings.finding import Finding
from fullwire.run.run import Run


class InterfacesCounted(Finding):
    """The bytes that interfaces counted, and their difference from the captures."""

    template = (
        "interfaces counted {counted_bytes:bytes} sent and received{as_handed:?, before "
        "segmentation}. The captures hold {apart:?{apart:.3%} {is_less:less|more}}"
        "{is_same:the same to the byte|}"
    )

    counted_bytes: int
    as_handed: bool
    apart: float | None  # None where the captures hold the same bytes.
    is_less: bool
    is_same: bool


def _differences(run: Run) -> Iterator[Finding]:
    """Compare captures with the interfaces' own counters, where a run has both.

    A network adapter counts packets as they are on the wire. A virtual interface counts the packets
    that the host hands it, before segmentation. The count shows which of the two an interface does.
    """
    links = run.links
    counters = zip(
        links.host.tolist(),
        links.interface.tolist(),
        (links.tx_bytes + links.rx_bytes).tolist(),
        strict=True,
    )
    first: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    for host, interface, both_ways in counters:  # The samples of each are in the order of time.
        if "/" not in interface:  # RDMA ports count other bytes.
            first.setdefault((host, interface), both_ways)
            last[host, interface] = both_ways
    counted = sum(last.values()) - sum(first.values())
    handed, wire = run.facts.captured_bytes, run.facts.captured_wire_bytes
    if not counted or handed is None or wire is None:
        return
    seen = min(handed, wire, key=lambda seen: abs(seen - counted))
    yield InterfacesCounted(
        counted_bytes=counted,
        as_handed=seen == handed != wire,
        apart=None if seen == counted else abs(seen / counted - 1),
        is_less=seen < counted,
        is_same=seen == counted,
    )


LINE = Line(
    key="capture",
    place=8,
    of=lambda traffic: _differences(traffic.detail.run),
    of_recording=_differences,
)
