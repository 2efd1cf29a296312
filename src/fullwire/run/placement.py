"""Which host each rank was on, and how fast the line of each host is, as far as a run says."""

from __future__ import annotations

from fullwire.run.run import Run


def host_of_rank(run: Run) -> dict[int, str]:
    """Return the host of each rank that is known."""
    hosts = (run.facts.hosts or "").split(",")
    return {rank: host for rank, host in enumerate(hosts) if host}


def host_line_rates_bps(run: Run) -> dict[str, float]:
    """Return the line rate of each host, where the run knows it."""
    common = run.facts.line_rate_bps
    if common is None:
        return {}
    own = {int(rank): rate_bps for rank, rate_bps in run.facts.other_line_rates_bps or ()}
    return {host: own.get(rank, common) for rank, host in host_of_rank(run).items()}
