"""Findings about a running job that is watched from outside."""

from __future__ import annotations

from dataclasses import dataclass

from fullwire.findings.finding import Finding


class NoStep(Finding):
    """Nothing repeats in the counters of the job."""

    template = "No step repeated {fewest} times within {watched_s:time}."

    fewest: int
    watched_s: float


class OnOtherHosts(Finding):
    """A watcher sees the ranks of its own host alone."""

    template = (
        "{missing:,} of {workers:,} ranks {missing:runs|run} on other hosts and "
        "{missing:was|were} not watched"
    )

    missing: int
    workers: int


class HostNotWatched(Finding):
    """A host cannot be reached, or has no ranks of the job."""

    template = "{host} is not watched: {problem}"

    host: str
    problem: str


class InterfacesServe(Finding):
    """Only root may ask for the connections of another container."""

    template = (
        "{ranks:Ranks} {ranks:runs|run} in a container of {ranks:its|their} own. Only root "
        "(CAP_SYS_ADMIN) may ask for the connections there, so the bytes of all its interfaces are "
        "counted"
    )

    ranks: tuple[int, ...]


class AdaptersServe(Finding):
    """RDMA leaves the kernel's connections out."""

    template = (
        "{ranks:Ranks} {ranks:uses|use} RDMA. Only adapters count its bytes, so those of each host "
        "are divided among its ranks"
    )

    ranks: tuple[int, ...]


class Traced(Finding):
    """Another program traces a rank."""

    template = "Rank {rank} is traced by {tracer}, which may slow it or stop it"

    rank: int
    tracer: str


class TakenForAllReduces(Finding):
    """The counters show bytes, and no collective."""

    template = (
        "watched from outside: which collectives sent the bytes is not told, and they are taken "
        "for all-reduces"
    )


class NothingSeen(Finding):
    """The ranks only waited."""

    template = "The ranks computed and sent nothing."


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


class StepOnGpus(Finding):
    """The counters show the bytes of a step, and not the work of GPUs."""

    template = (
        "A step takes {step_s:time}, and {step_bytes:bytes} flow for {flows:.0%} of it."
        "{is_busy_known:? The GPUs are busy for {busy:.0%} of the time.} Cannot tell from outside "
        "what limits ranks that compute on GPUs. `fullwire record` can."
    )

    step_s: float
    step_bytes: float  # of the rank that sends most
    flows: float
    busy: float | None = None  # None where NVML tells nothing

    @property
    def is_busy_known(self) -> bool:
        """Say whether there is a share to tell; it may be 0 %."""
        return self.busy is not None


class IdlesAt(Finding):
    """A rank was asked a few times what it waits for while it did nothing."""

    template = "Rank {rank} {is_loading:waits for its data|sleeps} at {line}."

    rank: int
    is_loading: bool
    line: str  # Of the script.


class SeveralMayLimit(Finding):
    """Several parts of the step may be the largest, as their ranges overlap."""

    template = "Cannot tell from outside what limits this job: {parts:or}. `fullwire record` can."

    parts: tuple[str, ...]  # In words.


class StuckOnRank(Finding):
    """One rank keeps all others waiting."""

    template = (
        "Stuck for {since_s:time}. {others} {others:rank waits|ranks wait} for rank {rank} on "
        "{host}: {where:;}."
    )

    since_s: float
    others: int
    rank: int
    host: str
    where: tuple[Finding, ...]


class StuckSomewhere(Finding):
    """All ranks wait, as far as the kernel tells."""

    template = "Stuck for {since_s:time}. Nothing tells which rank the others wait for: {where:;}."

    since_s: float
    where: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A job that sends nothing any more, and the rank that the others wait for."""

    rank: int | None  # None if it is unknown
    host: str
    where: tuple[Finding, ...]  # that rank's wait, or the waits of all if it is unknown
    since_s: float
    waiting: tuple[int, ...]

    @property
    def finding(self) -> Finding:
        """Return for how long the job is stuck, and on whom."""
        if self.rank is None:
            return StuckSomewhere(since_s=self.since_s, where=self.where)
        return StuckOnRank(
            since_s=self.since_s,
            others=len(self.waiting),
            rank=self.rank,
            host=self.host,
            where=self.where,
        )


class Computes(Finding):
    """The rank computes; the others wait."""

    template = "it computes with {processors:.1f} processors"

    processors: float


class WaitsFor(Finding):
    """A rank waits, as the kernel or its stack says."""

    template = "{state}"

    state: str


class AskedForFewer(Finding):
    """Ranks that have not asked for a collective in which the others wait."""

    template = (
        "{ranks:ranks} asked for {asked:,} collectives of {group}, {others:,} "
        "other {others:rank|ranks} for {most:,} ({op}), as dumps of the Flight Recorder tell"
    )

    ranks: tuple[int, ...]
    asked: int
    most: int
    others: int
    group: str
    op: str


class RanksWaitFor(Finding):
    """Some ranks wait alike."""

    template = "of {ranks:ranks}, {state}"

    ranks: tuple[int, ...]
    state: str


class Alerted(Finding):
    """A condition that the user gave began to hold."""

    template = "Alert: {figure} is {value}, the limit is {limit}.{stuck:? {stuck}}"

    figure: str
    value: str  # With its unit.
    limit: str
    stuck: Finding | None = None
