"""Faster links: the next ones on sale, or the few slow ones as fast as the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.fixes.fix import Fix, FixKind, register
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account

_ON_SALE_BPS = (1e9, 2.5e9, 5e9, 10e9, 25e9, 40e9, 50e9, 100e9, 200e9, 400e9, 800e9)
_FASTER_LINKS = 2  # the next so many on sale


@dataclass(frozen=True, kw_only=True)
class LinksAsTheOthers(Fix):
    """A few slow links as fast as the rest."""

    template = "the link of {ranks:ranks} as fast as others: {rate_bps:rate}"

    kind: str = "link"
    how: str = "look at its cable, its port, the speed that they agreed on (ethtool), who shares it"
    ranks: tuple[int, ...]
    rate_bps: float


@dataclass(frozen=True, kw_only=True)
class FasterLinks(Fix):
    """All links faster."""

    template = "links of {rate_bps:rate}"

    kind: str = "link"
    how: str = "hardware; nothing to set in the job"
    rate_bps: float


def _predict(run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
    """Try links on sale that are faster; first, where few are slower, these as the others are."""
    slow, next_bps = _slow_links(run, job)
    if slow:
        found = job.ask(bandwidth_bps=(next_bps,))
        yield LinksAsTheOthers(ranks=slow, rate_bps=next_bps, forecast=found)
    faster = [rate_bps for rate_bps in _ON_SALE_BPS if rate_bps > next_bps]
    for rate_bps in faster[:_FASTER_LINKS]:
        yield FasterLinks(rate_bps=rate_bps, forecast=job.ask(bandwidth_bps=(rate_bps,)))


def _slow_links(run: Run, job: Forecaster) -> tuple[tuple[int, ...], float]:
    """Return the few ranks that have the slowest links, if not all do, and the next rate to it."""
    usual_bps, others = run.facts.line_rate_bps, run.facts.other_line_rates_bps or ()
    slow = tuple(int(rank) for rank, rate_bps in others if rate_bps == job.rate_bps)
    known_bps = [each for each in (usual_bps, *dict(others).values()) if isinstance(each, float)]
    faster_bps = [rate_bps for rate_bps in known_bps if rate_bps > job.rate_bps]
    if not faster_bps or not 0 < 2 * len(slow) <= job.workers:
        return (), job.rate_bps
    return slow, min(faster_bps)


register(FixKind(key="link", risk="exact", label="faster links", predict=_predict))
