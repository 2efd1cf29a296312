"""The findings about the links of a cluster that hold a job back."""

from __future__ import annotations

from dataclasses import dataclass

from fullwire.clusters.cluster import LINK_KINDS, SPINE
from fullwire.findings.finding import Finding

WORTH_BLAMING = 0.01  # Of the step.


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Suspect:
    """One kind of link, a change of it, and the step after that change."""

    links: str
    change: str
    step_s: float


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Suspicion:
    """A job on a described cluster, and its step with each kind of link made wider."""

    run: str
    cluster: str
    workers: int
    is_scattered: bool
    oversubscription: float | None  # None if transfers stay below the spine
    step_s: float
    overhead_s: float
    busiest: str | None  # The links that take most of a collective's time.
    suspects: tuple[Suspect, ...]

    @property
    def worst(self) -> Suspect | None:
        """Return the links that cost most, if their cost is worth mentioning."""
        least = min(self.suspects, key=lambda each: each.step_s, default=None)
        return least if least is not None and self.is_to_blame(least) else None

    def is_to_blame(self, suspect: Suspect) -> bool:
        """Say whether the change would make the step noticeably shorter."""
        return suspect.step_s < (1 - WORTH_BLAMING) * self.step_s

    def of(self, links: str) -> Suspect | None:
        """Return the finding about one kind of link."""
        return next((suspect for suspect in self.suspects if suspect.links == links), None)


_WHERE = (
    "{job.run}, {job.workers} workers of {job.cluster}"
    "{job.is_scattered:, scattered over the leaves|}: "
)


class NoLinkHoldsBack(Finding):
    """No kind of link would make the step noticeably shorter."""

    template = (
        f"{_WHERE}no link holds it back"
        "{job.oversubscription:?, the {job.oversubscription:g}:1 spine included}: a step takes "
        "{job.step_s:time}."
    )

    job: Suspicion


class LinksHoldBack(Finding):
    """The kind of link that costs most, and the share of the spine in that."""

    template = (
        f"{_WHERE}the {{links}} hold it back: with {{worst.change}} a step would take "
        "{worst.step_s:time} instead of {job.step_s:time} ({shorter:.1%} less){spine}."
    )

    job: Suspicion
    links: Finding
    worst: Suspect
    shorter: float
    spine: Finding | None


class NamedLinks(Finding):
    """A kind of link."""

    template = "{name}"

    name: str


class SpineUplinks(Finding):
    """The uplinks of a spine."""

    template = "uplinks of the {oversubscription:g}:1 spine"

    oversubscription: float | None


class SpineDoesNot(Finding):
    """A wide spine would change almost nothing."""

    template = ", and the {oversubscription:g}:1 spine does not: {change} would change little"

    oversubscription: float | None
    change: str


class SpineAlone(Finding):
    """The step with a wide spine alone."""

    template = "; {change} alone would give {step_s:time}"

    change: str
    step_s: float


def suspicion_finding(job: Suspicion) -> Finding:
    """Return the finding about a job on a described cluster."""
    worst, spine = job.worst, job.of(LINK_KINDS[SPINE])
    if worst is None:
        return NoLinkHoldsBack(job=job)
    ratio = job.oversubscription
    links: Finding = NamedLinks(name=worst.links)
    of_spine: Finding | None = None
    if worst.links == LINK_KINDS[SPINE]:
        links = SpineUplinks(oversubscription=ratio)
    elif spine is not None and job.is_to_blame(spine):
        of_spine = SpineAlone(change=spine.change, step_s=spine.step_s)
    elif spine is not None:
        of_spine = SpineDoesNot(oversubscription=ratio, change=spine.change)
    shorter = 1 - worst.step_s / job.step_s
    return LinksHoldBack(job=job, links=links, worst=worst, shorter=shorter, spine=of_spine)
