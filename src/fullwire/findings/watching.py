"""Findings about a running job that is watched from outside."""

from __future__ import annotations

from fullwire.findings.finding import Finding


class NoStep(Finding):
    """Nothing repeats in the counters of the job."""

    template = "No step repeated {fewest} times within {watched_s:time}."

    fewest: int
    watched_s: float


class NothingSeen(Finding):
    """The ranks only waited."""

    template = "The ranks neither computed nor sent."


class NothingSent(Finding):
    """The ranks computed and exchanged no gradients."""

    template = "The ranks have sent each other nothing yet."


class TransferOrContention(Finding):
    """Transfer is small, and contention does not show from outside."""

    template = (
        "Transfer that nothing hides is {low:.0%} to {high:.0%} of each step. Cannot tell from "
        "outside whether the job's own communication slows its computing."
    )

    low: float  # Shares of a step.
    high: float


class NetworkLimits(Finding):
    """The line or the transport limits the job; the counters fit both."""

    template = (
        "The network limits this job: {low:.0%} to {high:.0%} of each step is transfer. Cannot "
        "tell from outside whether the line or the transport does."
    )

    low: float
    high: float


class SeveralMayLimit(Finding):
    """Several parts of the step may be the largest, as their ranges overlap."""

    template = "Cannot tell from outside what limits this job: {parts:or}. `fullwire record` can."

    parts: tuple[str, ...]  # In words.


class Stuck(Finding):
    """The job sends nothing any more."""

    host: str
    where: tuple[Finding, ...]  # What the rank does that the others wait for, else what all do.
    since_s: float


class StuckOnRank(Stuck):
    """One rank keeps all others waiting."""

    template = (
        "Stuck for {since_s:time}. {others} {waiting:rank waits|ranks wait} for rank {rank} on "
        "{host}: {where:;}."
    )

    rank: int
    waiting: tuple[int, ...]

    @property
    def others(self) -> int:
        """Return how many ranks wait."""
        return len(self.waiting)


class StuckSomewhere(Stuck):
    """All ranks wait, as far as the kernel tells."""

    template = (
        "Stuck for {since_s:time}. Nothing on {host} tells which rank the others wait for: "
        "{where:;}."
    )


class Computes(Finding):
    """The rank computes; the others wait."""

    template = "it computes with {processors:.1f} processors"

    processors: float


class WaitsFor(Finding):
    """What the kernel or the stack says of a rank's wait."""

    template = "{state}"

    state: str


class RanksWaitFor(Finding):
    """What the kernel or the stacks say of ranks that wait alike."""

    template = "of {ranks:ranks}, {state}"

    ranks: tuple[int, ...]
    state: str
