"""Do the packets that were captured beside a job add up to what its interfaces counted?"""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.run.run import Run
from fullwire.units import show_bytes


def capture_audit(run: Run) -> Iterator[str]:
    """Compare captures with the interfaces' own counters, where a run has both.

    A network adapter counts packets as they are on the wire, a virtual interface what the host
    hands it, before segmentation; which of the two an interface does shows in its count.
    """
    counted = _counted_bytes(run)
    handed, wire = run.facts.captured_bytes, run.facts.captured_wire_bytes
    if not counted or handed is None or wire is None:
        return
    seen = min(handed, wire, key=lambda seen: abs(seen - counted))
    as_handed = ", before segmentation" if seen == handed != wire else ""
    apart = f"{abs(seen / counted - 1):.3%} {'less' if seen < counted else 'more'}"
    yield (
        f"interfaces counted {show_bytes(counted)} sent and received{as_handed}; "
        f"the captures hold {'the same to the byte' if seen == counted else apart}"
    )


def _counted_bytes(run: Run) -> int:
    """Return what interfaces counted while they were sampled; RDMA ports count other things."""
    links = run.links
    seen = zip(
        links.host.tolist(),
        links.interface.tolist(),
        (links.tx_bytes + links.rx_bytes).tolist(),
        strict=True,
    )
    first: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    for host, interface, both_ways in seen:  # of each in the order of time
        if "/" not in interface:
            first.setdefault((host, interface), both_ways)
            last[host, interface] = both_ways
    return sum(last.values()) - sum(first.values())
