"""How sure a verdict is, and why: the second line of an answer."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.finding import Finding
from fullwire.findings.others import OtherWork, about_others
from fullwire.timeline.account import Part

_FEW_STEPS = 10  # of a measured job: fewer may still be warming up
_AS_LARGE = 0.75  # of the largest loss: the next one may be the largest in another recording


class Sureness(Finding):
    """How sure the verdict is: the doubts, the steps it rests on, and the next largest loss."""

    template = (
        "{doubts:?Less sure: {doubts:and}.}{is_sure:?Sure: {steps:,} {steps:step|steps} were "
        "measured.}{after:? Next largest: {after}, {share:.0%}.}"
    )

    doubts: tuple[Finding, ...]
    steps: int
    after: str | None
    share: float

    @property
    def is_sure(self) -> bool:
        """Say whether nothing speaks against the verdict."""
        return not self.doubts


class PartIsMissing(Finding):
    """Some of the run is missing."""

    template = "the run is partial"


class OnlySoMany(Finding):
    """The job was too short to have settled."""

    template = "only {steps:,} {steps:step|steps} were recorded"

    steps: int


class OthersWereBusy(Finding):
    """Other programs used the processors."""

    template = "other programs used {share:.0%} of the processors"

    share: float


class NearlyAsLarge(Finding):
    """Another loss is nearly as large."""

    template = "{part} costs nearly as much"

    part: str


def sureness(case: Case, kind: str) -> Finding | None:
    """Return how sure a verdict of some kind is; None where nothing was decided."""
    account = case.account
    if kind == "unknown" or not case.step_s:
        return None
    losses = sorted(
        ((time_s, key) for key, time_s in account.parts_s.items() if key != Part.COMPUTE.key),
        reverse=True,
    )
    (largest_s, _), (next_s, after), *_ = losses
    steps = int(account.is_typical.sum())
    doubts: list[Finding] = [PartIsMissing()] if case.run.gaps else []
    if case.run.provenance.origin == "measured" and steps < _FEW_STEPS:
        doubts.append(OnlySoMany(steps=steps))
    doubts += [
        OthersWereBusy(share=work.share)
        for work in about_others(case.run)
        if isinstance(work, OtherWork)
    ]
    if case.reaches_threshold(largest_s) and next_s >= _AS_LARGE * largest_s:
        doubts.append(NearlyAsLarge(part=after.replace("_", " ")))
    share = case.share(next_s)
    return Sureness(
        doubts=tuple(doubts),
        steps=steps,
        after=after.replace("_", " ") if round(share, 2) else None,
        share=share,
    )
