"""What a verdict would leave unsaid: which steps have it, what else is lost, what stays open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.findings.case import NOTABLE, Case, is_transfer_alone
from fullwire.findings.finding import Finding
from fullwire.findings.verdicts import VerdictKind, drawn_parts
from fullwire.timeline.account import Part, late_ranks
from fullwire.timeline.steadiness import few_steps
from fullwire.timeline.transfers import recorded_ranks, stands_for_all, world


@dataclass(frozen=True, kw_only=True)
class InFewSteps(Finding):
    """Few of the steps have most of what the verdict is about."""

    template = (
        "Of this loss {share:.0%} is in {few} of {of} steps, which {few:takes|take} "
        "{long_s:time}; the others take {usual_s:time}."
    )

    share: float
    few: int
    of: int
    long_s: float
    usual_s: float


@dataclass(frozen=True, kw_only=True)
class AnotherLoss(Finding):
    """What else reaches the threshold: without it, the job would only wait for that."""

    template = "Another {lost_s:time} ({share:.1%}) is lost to {to}."

    lost_s: float
    share: float
    part: str
    to: str


@dataclass(frozen=True, kw_only=True)
class AnotherIsLate(Finding):
    """Late ranks cost the threshold too."""

    template = (
        "Another {lost_s:time} ({share:.1%}) is lost to waiting, most of it for {ranks:ranks}."
    )

    lost_s: float
    share: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RanksWaitBesides(Finding):
    """Ranks wait for late ones, where the verdict is unknown."""

    template = (
        "Ranks wait for each other for {lost_s:time} besides ({share:.1%}), {of_waiting:.0%} of it "
        "for {ranks:ranks}."
    )

    lost_s: float
    share: float
    of_waiting: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ExposedOfSomeRanks(Finding):
    """More communication is exposed, with ranks that are not in the run."""

    template = (
        "Communication is exposed for another {share:.1%}; whether that is waiting or transfer, "
        "{recorded} of {workers} ranks cannot tell."
    )

    share: float
    recorded: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class WaitingOrTransfer(Finding):
    """The exposed communication that was named is with ranks that are not in the run."""

    template = "Whether that is waiting or transfer, {recorded} of {workers} ranks cannot tell."

    recorded: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class OthersNotSeen(Finding):
    """A verdict that rests on some of the ranks."""

    template = (
        "This is what {recorded} of {workers} ranks {recorded:shows|show}; whether others are "
        "slower, or wait for this, is not in the run."
    )

    recorded: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class ExposedBesides(Finding):
    """More communication is exposed, and nothing explains it."""

    template = (
        "Communication is exposed for {exposed_s:time} besides ({share:.1%}), and this run cannot "
        "tell why."
    )

    exposed_s: float
    share: float


def besides(case: Case, kind: VerdictKind) -> Iterator[Finding]:
    """Go through what stands beside a verdict."""
    yield from _in_few_steps(case, kind)
    yield from _another(case, kind)
    if kind.key == "unknown":
        yield from _waiting(case)
    else:
        yield from _exposed(case, kind)


def _in_few_steps(case: Case, kind: VerdictKind) -> Iterator[Finding]:
    part = next((part for part in Part if part.key == kind.part), None)
    if part is None or kind.key == "unknown":
        return
    rare = few_steps(case.account, part)
    if rare is not None:
        yield InFewSteps(
            share=rare.share,
            few=rare.few,
            of=rare.of,
            long_s=rare.long_s,
            usual_s=rare.usual_s.value,
        )


def _another(case: Case, kind: VerdictKind) -> Iterator[Finding]:
    if kind.key in ("unknown", "scales"):
        return
    others = {
        part: case.account.parts_s[part]
        for part, drawn in drawn_parts().items()
        if drawn.lost_to and drawn != kind and not (kind.is_transfer and drawn.is_transfer)
    }
    part = max(others, key=others.__getitem__)
    if not case.reaches_threshold(others[part]):
        return
    late = late_ranks(case.account) if part == Part.STRAGGLER.key else None
    lost_s, share = others[part], case.share(others[part])
    if late is not None:
        yield AnotherIsLate(lost_s=lost_s, share=share, ranks=late.ranks)
    else:
        yield AnotherLoss(lost_s=lost_s, share=share, part=part, to=drawn_parts()[part].lost_to)


def _waiting(case: Case) -> Iterator[Finding]:
    late, waited_s = late_ranks(case.account), case.account.parts_s[Part.STRAGGLER.key]
    if late is not None and case.reaches_threshold(waited_s):
        yield RanksWaitBesides(
            lost_s=waited_s,
            share=case.share(waited_s),
            of_waiting=late.share,
            ranks=late.ranks,
        )


def _exposed(case: Case, kind: VerdictKind) -> Iterator[Finding]:
    """Say what communication is exposed that nothing explains, where the verdict is another."""
    exposed_s = case.account.parts_s[Part.UNEXPLAINED.key]
    here, of, share = len(recorded_ranks(case.run)), world(case.run), case.share(exposed_s)
    if exposed_s < NOTABLE * case.step_s:
        if here < of and not stands_for_all(case.run):
            yield OthersNotSeen(recorded=here, workers=of)
        return
    if here < of and kind.key == "scales" and case.largest()[0] == Part.UNEXPLAINED.key:
        yield WaitingOrTransfer(recorded=here, workers=of)
    elif here < of:
        yield ExposedOfSomeRanks(share=share, recorded=here, workers=of)
    elif case.reaches_threshold(exposed_s) and not is_transfer_alone(case):
        yield ExposedBesides(exposed_s=exposed_s, share=share)
