"""The bytes on the wire beside the payload of the training.

They are headers, packets that were sent again, lost, unseen or mirrored, and packets of other
hosts.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.findings.audit import Line
from fullwire.findings.finding import Finding
from fullwire.packets.edges import Edges
from fullwire.run.run import Run


class Overhead(Finding):
    """The bytes that the payload took on the wire."""

    template = (
        "{payload_bytes:bytes} of payload took {wire_bytes:bytes} on the wire: {share:.1%} for "
        "headers, acknowledgements and retransmission"
    )

    payload_bytes: int
    wire_bytes: int
    share: float


class Counted(Finding):
    """Bytes that the capture counted for one reason."""

    bytes: int


class Retransmitted(Counted):
    """Bytes that were sent again."""

    template = "{bytes:bytes} were sent again (retransmission)"


class Reordered(Counted):
    """Bytes that came out of order but were sent once."""

    template = "{bytes:bytes} came out of order, soon enough not to be retransmission"


class Lost(Counted):
    """Bytes that were never acknowledged."""

    template = "{bytes:bytes} are missing and unacknowledged: lost, or sent after the capture"


class Missed(Counted):
    """Bytes that were acknowledged, but are missing from the capture."""

    template = (
        "{bytes:bytes} went over the wire unseen: sequence numbers say so, and they are counted"
    )


class Mirrored(Counted):
    """Bytes that are twice in the capture, and were once on the wire."""

    template = "{bytes:bytes} on the wire are in the capture again, mirrored twice: counted once"


class SupposedPackets(Finding):
    """Packets whose size on the wire is supposed, because the capture does not show it."""

    template = (
        "{count:,} packets on the wire are supposed: the capture holds larger ones, from before "
        "segmentation, and no opening, which would say the size"
    )

    count: int


class Strangers(Finding):
    """The bytes of other hosts."""

    template = "{bytes:bytes} were sent to, from or within other hosts, and are left out"

    bytes: int


class CaptureClocks(Finding):
    """The offsets between the clocks of several captures."""

    template = "clocks, against that of the first capture: {offsets}"

    offsets: str


_COUNTED: dict[str, type[Counted]] = {  # by fact
    "retransmitted_bytes": Retransmitted,
    "reordered_bytes": Reordered,
    "lost_bytes": Lost,
    "missed_bytes": Missed,
    "mirrored_bytes": Mirrored,
}


def on_the_wire(run: Run, edges: Edges) -> Iterator[Finding]:
    """Yield the findings about all bytes on the wire beside payload."""
    payload, wire = int(edges.payload_bytes.sum()), int(edges.wire_bytes.sum())
    if payload:
        share = wire / payload - 1
        yield Overhead(payload_bytes=payload, wire_bytes=wire, share=share)
    for fact, kind in _COUNTED.items():
        if counted := getattr(run.facts, fact):
            yield kind(bytes=counted)
    if run.facts.supposed_packets:
        yield SupposedPackets(count=run.facts.supposed_packets)
    if edges.strangers_bytes:
        yield Strangers(bytes=int(edges.strangers_bytes))
    if run.facts.capture_clocks is not None:
        yield CaptureClocks(offsets=str(run.facts.capture_clocks))


LINE = Line(
    key="wire", place=3, of=lambda traffic: on_the_wire(traffic.detail.run, traffic.detail.edges)
)
