"""The fix "faster links": the next ones on sale, or the few slow ones as fast as the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import Fix, FixKind, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account

_ON_SALE_BPS = (1e9, 2.5e9, 5e9, 10e9, 25e9, 40e9, 50e9, 100e9, 200e9, 400e9, 800e9)
_FASTER_LINKS = 2  # The number of next rates on sale that are tried.


@dataclass(frozen=True, kw_only=True)
class LinksAsTheOthers(Fix):
    """The few slow links become as fast as the rest."""

    template = "the link of {ranks:ranks} as fast as others: {rate_bps:rate}"
    place = "hosts"

    kind: str = "link"
    how: str = "look at its cable, its port, its negotiated speed (ethtool), and other users of it"
    ranks: tuple[int, ...]
    rate_bps: float


@dataclass(frozen=True, kw_only=True)
class FasterLinks(Fix):
    """All links become faster."""

    template = "links of {rate_bps:rate}"
    place = "purchase"

    kind: str = "link"
    how: str = "hardware; nothing to set in the job"
    rate_bps: float


@register
class Link(FixKind):
    """Use faster links."""

    key = "link"
    label = "faster links"
    addresses = ("line_rate", "transport")
    needs = "hardware"

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Predict faster links on sale; first, where few are slow, these as fast as the others."""
        next_bps = job.rate_bps
        usual_bps, others = run.facts.line_rate_bps, run.facts.other_line_rates_bps or ()
        slow = tuple(int(rank) for rank, rate_bps in others if rate_bps == job.rate_bps)
        known_bps = [bps for bps in (usual_bps, *dict(others).values()) if isinstance(bps, float)]
        faster_bps = [rate_bps for rate_bps in known_bps if rate_bps > job.rate_bps]
        if faster_bps and 0 < 2 * len(slow) <= job.workers:
            next_bps = min(faster_bps)
            found = job.ask(bandwidth_bps=(next_bps,))
            yield LinksAsTheOthers(ranks=slow, rate_bps=next_bps, forecast=found)
        faster = [rate_bps for rate_bps in _ON_SALE_BPS if rate_bps > next_bps]
        for rate_bps in faster[:_FASTER_LINKS]:
            yield FasterLinks(rate_bps=rate_bps, forecast=job.ask(bandwidth_bps=(rate_bps,)))
