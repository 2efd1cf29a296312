"""How much of a job's links and processors was in use, on its whole steps and while communicating.

Utilization of a link is bits sent / (line rate x window). Counters are taken as growing evenly
between two samples, which lie some 10 ms apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fullwire.model.run import Run, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What one link carried out of its host; shares are None where nothing was measured."""

    host: str
    interface: str
    line_rate_bps: float
    in_steps: float | None
    while_communicating: float | None


def links_in_use(run: Run) -> list[LinkUse]:
    """Return the use of each host's busiest link whose line rate is known."""
    rates_bps = host_line_rates_bps(run)
    found = []
    for host in sorted(set(run.links.host) & set(rates_bps)):
        here = run.links.rows(run.links.host == host)
        sent = {name: int(np.ptp(here.tx_bytes[here.interface == name])) for name in here.interface}
        busiest = max(sorted(sent), key=lambda name: sent[name])
        link = here.rows(here.interface == busiest)
        steps, outstanding = _windows(run, host)
        found.append(
            LinkUse(
                host=host, interface=busiest, line_rate_bps=rates_bps[host],
                in_steps=_share(link.time_ns, link.tx_bytes, steps, rates_bps[host]),
                while_communicating=_share(
                    link.time_ns, link.tx_bytes, outstanding, rates_bps[host]
                ),
            )
        )  # fmt: skip
    return found


def processor_use(run: Run) -> float | None:
    """Return the mean share of the job's processors in use while its steps ran."""
    marks = _steps_of(run, np.unique(run.spans.rank))
    if not len(marks):
        return None
    is_processor = np.array([name.startswith("cpu") for name in run.hosts.device], bool)
    inside = (run.hosts.time_ns >= marks[:, 0].min()) & (run.hosts.time_ns <= marks[:, 1].max())
    shares = run.hosts.utilization[is_processor & inside]
    return float(shares.mean()) if len(shares) else None


def host_line_rates_bps(run: Run) -> dict[str, float]:
    """Return the line rate of each host, where the run knows it."""
    common = run.facts.get("line_rate_bps")
    others = run.facts.get("other_line_rates_bps", ())
    if not isinstance(common, float) or not isinstance(others, tuple):
        return {}
    own = {int(rank): rate_bps for rank, rate_bps in others}
    return {host: own.get(rank, common) for rank, host in enumerate(_hosts_of_ranks(run))}


def _hosts_of_ranks(run: Run) -> list[str]:
    return [host for host in str(run.facts.get("hosts", "")).split(",") if host]


def _windows(run: Run, host: str) -> tuple[Whole, Whole]:
    """Return a host's steps, and the times in them when a collective was outstanding."""
    ranks = np.flatnonzero(np.array(_hosts_of_ranks(run), object) == host)
    steps = _union(_steps_of(run, ranks))
    mine = np.isin(run.collectives.rank, ranks)
    collectives = np.stack([run.collectives.issue_ns[mine], run.collectives.end_ns[mine]], axis=1)
    return steps, _common(steps, _union(collectives))


def _steps_of(run: Run, ranks: Whole) -> Whole:
    spans = run.spans
    marks = np.isin(spans.rank, ranks) & (spans.lane == "host") & (spans.name == "step")
    return np.stack([spans.start_ns[marks], spans.end_ns[marks]], axis=1)


def _union(intervals: Whole) -> Whole:
    """Return intervals that cover the same times and do not touch."""
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    if not len(ordered):
        return ordered
    reached = np.maximum.accumulate(ordered[:, 1])
    opens = np.append([True], ordered[1:, 0] > reached[:-1])
    closes = np.append(opens[1:], [True])
    return np.stack([ordered[opens, 0], reached[closes]], axis=1)


def _common(first: Whole, second: Whole) -> Whole:
    """Return the times that both cover; neither touches itself."""
    pieces = list(_overlaps(first, second))
    return np.concatenate(pieces) if pieces else np.empty((0, 2), np.int64)


def _overlaps(first: Whole, second: Whole) -> Iterator[Whole]:
    for start, end in first.tolist():
        low = np.searchsorted(second[:, 1], start, side="right")
        high = np.searchsorted(second[:, 0], end, side="left")
        yield np.clip(second[low:high], start, end)


def _share(time_ns: Whole, tx_bytes: Whole, windows: Whole, rate_bps: float) -> float | None:
    """Return bits sent in the windows over what the line could have sent in them."""
    is_seen = (windows[:, 0] >= time_ns[0]) & (windows[:, 1] <= time_ns[-1])
    seen = windows[is_seen]
    length_ns = int((seen[:, 1] - seen[:, 0]).sum())
    if not length_ns:
        return None
    # From the first sample on: a float holds those differences exactly, and the clock's times not.
    sent = np.interp(seen - time_ns[0], time_ns - time_ns[0], tx_bytes - tx_bytes[0])
    return float((sent[:, 1] - sent[:, 0]).sum()) * 8e9 / (rate_bps * length_ns)
