"""The verdict where the transport leaves the line idle, and loses more than the line's rate."""

from __future__ import annotations

import numpy as np

from fullwire.findings.case import FILLED, NOTABLE, Case, exposed_transfer_s
from fullwire.findings.evidence.samples import LinkUtilization, links_of
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.held_back import what_held_transport
from fullwire.findings.verdicts import Blame, Colour, VerdictKind, register
from fullwire.findings.verdicts.overlap import is_limited_by_line, is_used_too_late
from fullwire.fixes import Fix
from fullwire.fixes.fix import MANY, MUCH_BYTES
from fullwire.timeline.account import Part


class LineIsNotFilled(Finding):
    """The time that is lost because the transport does not fill the line."""

    template = (
        "The transport limits this job{is_for_bandwidth:|, not the bandwidth}: "
        "{lost.share:.0%} of {lost.whole.named} is lost by a "
        "transport that does not fill the line{unfilled}{held_back:?, and {held_back}}.{many}"
        "{links:? {links}}{faster}"
    )

    lost: Amount
    is_for_bandwidth: bool  # Whether a faster line would help nevertheless.
    unfilled: Unfilled | None
    links: LinkUtilization | None
    held_back: Finding | None
    many: ManySmall | None
    faster: FasterLine | None


class NodesExchange(Finding):
    """The exposed time of a plan's groups whose devices are in one node."""

    template = (
        "Devices of one node wait for each other's data: the links inside nodes cost "
        "{lost.share:.0%} of {lost.whole.named}. No line between nodes carries that data."
    )

    lost: Amount


class Unfilled(Finding):
    """The used share of the line, and the part of the loss that is the fixed cost of messages."""

    template = (
        "{used:? (exposed transfers used {used:.0%} of it)}"
        "{messages_s:?, {messages_s:time} of that by the fixed cost of messages}"
    )

    used: float | None  # None where the links' own counters say it.
    messages_s: float | None


class ManySmall(Finding):
    """The step has many small collectives, with which no transport fills a line."""

    template = " It has {count:,.0f} collectives to carry in a step, most of {usual_bytes:bytes}."

    count: float
    usual_bytes: int


class FasterLine(Finding):
    """A faster line would help nevertheless, though some transports leave a share of it idle."""

    template = " A faster line would help all the same: {link} by {gain:.0%}, predicted."

    link: Fix
    gain: float


class LineWasNotFull(Finding):
    """Exposed transfers used too little of the line for the line to limit them."""

    template = (
        "exposed transfers used {used:.1%} of the line rate, and below {limit:.0%} it is not the "
        "line that limits them"
    )

    used: float
    limit: float


def _is_inside_nodes(case: Case) -> bool:
    """Say whether the transport's part is mostly on links inside nodes, which are no line."""
    return case.account.inside_s > case.account.parts_s[Part.TRANSPORT.key] / 2


@register
class Transport(VerdictKind):
    """A transport that does not fill the line."""

    key = "transport"
    part = Part.TRANSPORT.key
    label = "transport"
    colour = Colour("#c2502c", "#e57a53")
    lost_to = "a transport that does not fill the line"
    is_transfer = True
    needs_clocks = True

    def loss_in(self, case: Case) -> str:
        """Return what is slow: the links inside nodes, or the transport on the lines between."""
        return "the links inside nodes" if _is_inside_nodes(case) else self.lost_to

    def rule(self, case: Case, blame: Blame) -> tuple[Finding, ...] | None:
        """Hold where transfers were limited by something other than the line."""
        if blame.part == Part.TRANSPORT.key:
            return blame.reasons
        is_line = blame.part == Part.LINE_RATE.key and not is_used_too_late(case)
        if not is_line or is_limited_by_line(case):
            return None
        used = case.floor_s / exposed_transfer_s(case.account)
        return (*blame.reasons, LineWasNotFull(used=used, limit=FILLED))

    def says(self, case: Case) -> Finding:
        """Return the time that the transport loses, and the reason that held it back."""
        parts, links = case.account.parts_s, links_of(case.evidence)
        inside_s = case.account.inside_s
        lost_s, unfilled = parts[Part.TRANSPORT.key] - inside_s, None
        if _is_inside_nodes(case):
            return NodesExchange(lost=case.of_step(inside_s))
        if parts[Part.LINE_RATE.key] > lost_s:  # Then all idle time of the line counts.
            latency_s = parts[Part.LATENCY.key]
            lost_s += latency_s
            unfilled = Unfilled(
                used=None
                if links is not None
                else parts[Part.LINE_RATE.key] / exposed_transfer_s(case.account),
                messages_s=latency_s if latency_s > NOTABLE * case.step_s else None,
            )
        faster = case.faster_link if case.gains_by_link else None
        count = case.collectives_per_step
        sizes = case.run.collectives.bytes[np.isin(case.run.collectives.step, case.account.steps)]
        usual_bytes = int(np.median(sizes)) if len(sizes) else 0
        is_many = count >= MANY and 0 < usual_bytes <= MUCH_BYTES
        return LineIsNotFilled(
            lost=case.of_step(lost_s),
            is_for_bandwidth=case.gains_by_link,
            unfilled=unfilled,
            links=links,
            held_back=what_held_transport(case.evidence),
            many=ManySmall(count=count, usual_bytes=usual_bytes) if is_many else None,
            faster=None if faster is None else FasterLine(link=faster, gain=case.gain),
        )
