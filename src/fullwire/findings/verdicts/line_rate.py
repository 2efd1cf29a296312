"""The verdict where the line is full, and its bytes are the largest loss: bandwidth is short."""

from __future__ import annotations

from fullwire.findings.case import FILLED, Case, exposed_transfer_s
from fullwire.findings.evidence.samples import LinkUtilization, links_of
from fullwire.findings.finding import Amount, Finding
from fullwire.findings.verdicts import Blame, Colour, VerdictKind, register
from fullwire.findings.verdicts.overlap import is_limited_by_line, is_used_too_late
from fullwire.timeline.account import Part


class SlowLinks(Finding):
    """The few slow links that delay all others."""

    template = (
        " {ranks:Ranks} {ranks:has|have} {rate_bps:rate}, the others up to {fastest_bps:rate}."
    )

    ranks: tuple[int, ...]
    rate_bps: float
    fastest_bps: float


class BandwidthIsShort(Finding):
    """The line is full, or nearly full."""

    template = (
        "The network limits this job: {lost.share:.0%} of {lost.whole.named} is bytes at line "
        "rate.{slow}{links:? {links}}"
    )

    lost: Amount
    slow: SlowLinks | None
    links: LinkUtilization | None


class BandwidthIsMostOfIt(Finding):
    """The line is not full, but its bytes take longer than its idle time."""

    template = (
        "The network limits this job: {lost.share:.0%} of {lost.whole.named} is bytes at line "
        "rate, and {unfilled_s:time} more is lost as the line is not filled.{slow}"
        "{links:? {links}}"
    )

    lost: Amount
    unfilled_s: float
    slow: SlowLinks | None
    links: LinkUtilization | None


@register
class LineRate(VerdictKind):
    """The bytes at line rate."""

    key = "line_rate"
    part = Part.LINE_RATE.key
    label = "line rate"
    colour = Colour("#0b6e99", "#4fa9d3")
    lost_to = "bytes at line rate"
    within = "line rate"
    is_transfer = True
    needs_clocks = True

    def rule(self, case: Case, blame: Blame) -> tuple[Finding, ...] | None:
        """Hold where the line limits transfers, and they begin in time."""
        is_it = blame.part == Part.LINE_RATE.key and is_limited_by_line(case)
        return blame.reasons if is_it and not is_used_too_late(case) else None

    def says(self, case: Case) -> Finding:
        """Return the time of the bytes, and the idle time of a line that is not full."""
        lost = case.of_step(case.account.parts_s[Part.LINE_RATE.key])
        exposed_s = exposed_transfer_s(case.account)
        rates, links, slow = case.rate_bps, links_of(case.evidence), None
        slowest_bps = min(rates.values(), default=0.0)
        slow_ranks = tuple(rank for rank, rate_bps in rates.items() if rate_bps == slowest_bps)
        if 0 < 2 * len(slow_ranks) <= len(rates):
            fastest_bps = max(rates.values())
            slow = SlowLinks(ranks=slow_ranks, rate_bps=slowest_bps, fastest_bps=fastest_bps)
        if lost.time_s >= FILLED * exposed_s:
            return BandwidthIsShort(lost=lost, slow=slow, links=links)
        unfilled_s = exposed_s - lost.time_s
        return BandwidthIsMostOfIt(lost=lost, unfilled_s=unfilled_s, slow=slow, links=links)
