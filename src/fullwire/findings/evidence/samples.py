"""The evidence from samples of links, sockets and processors, and from a transport's own times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fullwire.compression.codec import named_in
from fullwire.findings.evidence import Source
from fullwire.findings.finding import Evidence, Finding
from fullwire.run.run import Run
from fullwire.timeline.timeline import Timeline
from fullwire.timeline.transfers import carried
from fullwire.timeline.utilization import (
    SATURATED,
    links_used,
    processors_used,
    sockets_used,
)

_LOOKED = "{is_exposed:while communication was exposed|over whole steps}"


class LinkUtilization(Evidence):
    """The used share of the links."""

    template = f"Links were {{value:.0%}} used {_LOOKED}."

    is_exposed: bool


class SendBufferLimited(Evidence):
    """The share of time in which send buffers held sockets back."""

    template = (
        "Sockets were held back by their send buffers for {value:.0%} of the time that they had "
        "data to send."
    )


class ReceiveWindowLimited(Evidence):
    """The share of time in which sockets waited for the receiver's window."""

    template = (
        "Sockets waited for the receiver's window for {value:.0%} of the time that they had data "
        "to send."
    )


class SocketIdle(Evidence):
    """The share of time in which sockets had nothing to send."""

    template = f"Sockets had nothing to send for {{value:.0%}} of the time {_LOOKED} (derived)."

    is_exposed: bool


class Retransmits(Evidence):
    """The number of segments that were sent again."""

    template = f"{{value:,}} {{value:segment was|segments were}} sent again {_LOOKED}."

    is_exposed: bool


class CpuBusiest(Evidence):
    """The used share of the busiest processor."""

    template = (
        "Processors were {is_saturated:saturated|not saturated} "
        f"{_LOOKED}: the busiest ({{host}} {{device}}) {{value:.0%}} used."
    )

    host: str
    device: str
    is_saturated: bool
    is_exposed: bool


def sample_evidence(
    run: Run, lines: Sequence[Timeline], rate_bps: Mapping[int, float]
) -> Iterator[Evidence]:
    """Yield the evidence from a run's samples, in order: links, sockets, processors."""
    links, sockets, cpu = (
        links_used(run, lines, rate_bps),
        sockets_used(run, lines),
        processors_used(run, lines),
    )
    if links is not None:
        yield LinkUtilization(value=links.share, is_exposed=links.is_exposed)
    if sockets is not None:
        is_exposed = sockets.is_exposed
        if sockets.send_buffer is not None:
            yield SendBufferLimited(value=sockets.send_buffer)
        if sockets.receive_window is not None:
            yield ReceiveWindowLimited(value=sockets.receive_window)
        if sockets.idle is not None:
            yield SocketIdle(value=sockets.idle, is_exposed=is_exposed)
        yield Retransmits(value=sockets.retransmits, is_exposed=is_exposed)
    if cpu is not None:
        yield CpuBusiest(
            value=cpu.share,
            host=cpu.host,
            device=cpu.device,
            is_saturated=cpu.share >= SATURATED,
            is_exposed=cpu.is_exposed,
        )


def links_of(evidence: Sequence[Evidence]) -> LinkUtilization | None:
    """Return the evidence from the links' own counters, if there is any."""
    return next((figure for figure in evidence if isinstance(figure, LinkUtilization)), None)


_TOLD = (
    "By the transport's own counters a rank waited {waited_s:time} of a step for the first bytes "
    "of others. It transferred for {moved_s:time}, {added_s:time} of it adding"
)


class TransportUtilization(Evidence):
    """The time of collectives, by activity, and the share of the line that they used."""

    template = f"{_TOLD}. Meanwhile it used {{value:.0%}} of the line rate."

    waited_s: float
    moved_s: float
    added_s: float


class TransportTime(Evidence):
    """The time of collectives, by activity, where the line rate is unknown."""

    template = f"{_TOLD}."

    waited_s: float
    moved_s: float
    added_s: float


class Widened(Finding):
    """Some messages exceeded the range of their format."""

    template = (
        ", and {count:,.0f} of {messages:,.0f} messages exceeded its range and had a wider one"
    )

    count: int
    messages: int


class PackingStopped(Finding):
    """The error was above the guard's limit."""

    template = ". After {after} the error was above the limit, and all traveled as float32"

    after: str


class RoundedOnWire(Evidence):
    """The accuracy that a packed transport or a codec cost."""

    template = "Gradients traveled as {name}: {value:.2%} of their size was lost{widened}{stopped}."

    name: str
    widened: Widened | None
    stopped: PackingStopped | None


def rounding_evidence(run: Run) -> Iterator[Evidence]:
    """Yield the loss of the transport's wire format, and of a codec."""
    facts = run.facts
    if facts.wire is not None and facts.wire_error is not None:
        widened, messages = facts.wire_widened or 0, facts.wire_messages or 0
        yield RoundedOnWire(
            value=math.sqrt(facts.wire_error),
            name=facts.wire,
            widened=Widened(count=widened, messages=messages) if widened else None,
            stopped=PackingStopped(after=facts.wire_stopped) if facts.wire_stopped else None,
        )
    codec = named_in(facts.hook)
    if codec is not None and facts.compression_error is not None:
        steps = facts.compression_stopped
        yield RoundedOnWire(
            value=math.sqrt(facts.compression_error),
            name=codec,
            widened=None,
            stopped=None if steps is None else PackingStopped(after=f"{steps} steps"),
        )


def carried_evidence(run: Run, rate_bps: Mapping[int, float]) -> Iterator[Evidence]:
    """Yield how a rank's collectives spent the time of a step, and how full its link was."""
    found = carried(run, rate_bps)
    if found is None:
        return
    times = {"waited_s": found.waited_s, "moved_s": found.moved_s, "added_s": found.added_s}
    if found.used is None:
        yield TransportTime(value=found.moved_s, **times)
    else:
        yield TransportUtilization(value=found.used, **times)


SOURCE = Source(
    key="samples",
    place=2,
    of=lambda run, account, rate_bps: (
        *sample_evidence(run, account.lines, rate_bps),
        *carried_evidence(run, rate_bps),
        *rounding_evidence(run),
    ),
)
