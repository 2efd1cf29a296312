"""The kinds of verdict, one in each file: its rule, the part that it blames, its sentence.

A new kind is a new file in this folder with a class that `register` marks. The account says which
part is to blame. The verdict is the kind whose rule then holds, and some findings stand beside it.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, TypeVar

from fullwire.findings.case import (
    NEAR,
    NOTABLE,
    THRESHOLD,
    Case,
    communicates,
    computes,
    enough_steps,
    is_alone,
    is_transfer_alone,
)
from fullwire.findings.finding import Finding
from fullwire.timeline.account import Part
from fullwire.timeline.late import late_for_most
from fullwire.timeline.steadiness import few_steps
from fullwire.timeline.transfers import recorded_ranks, stands_for_all, world

NOTHING = ""  # Blamed where no part reaches the threshold.
UNTOLD = Part.UNEXPLAINED.key  # Blamed where the data cannot decide.


@dataclass(frozen=True, slots=True)
class Blame:
    """The part of the account that is to blame, or one of the two above, and the reasons."""

    part: str
    reasons: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Colour:
    """The colours of a part of the account, on light paper and on dark."""

    light: str
    dark: str


class VerdictKind(ABC):
    """One kind of verdict: its rule, its sentence, and the display of its part."""

    key: ClassVar[str]
    part: ClassVar[str]  # Its part of the account, or "" for the whole step.
    label: ClassVar[str] = ""  # The label of its part in a drawing.
    heading: ClassVar[str] = ""  # Its label among one rank's parts, where `label` would mislead.
    colour: ClassVar[Colour | None] = None  # The colours of its part.
    lost_to: ClassVar[str] = ""  # The loss in words, for the verdicts of other kinds.
    meaning: ClassVar[str] = ""  # Its meaning, if no part of the account has the same name.
    within: ClassVar[str] = ""  # Its part within a sentence, if not the key.
    is_transfer: ClassVar[bool] = False  # It shares the exposed transfers with others.
    is_of_one: ClassVar[bool] = False  # A single worker can lose it too.
    needs_clocks: ClassVar[bool] = False  # It depends on the order in which ranks came.

    def rule(self, case: Case, blame: Blame) -> tuple[Finding, ...] | None:
        """Return the reasons if the rule holds, by default if its part is to blame; else None."""
        return blame.reasons if blame.part == self.part else None

    def loss_in(self, case: Case) -> str:
        """Return the loss of a case in words, for the verdicts of other kinds."""
        return self.lost_to

    @abstractmethod
    def says(self, case: Case) -> Finding:
        """Return the finding that is the verdict's sentence."""

    def lacks(self, case: Case) -> Iterator[Finding]:
        """Yield the missing data that would settle the verdict."""
        return iter(())


KindT = TypeVar("KindT", bound=VerdictKind)
_KINDS: dict[str, VerdictKind] = {}


def register(kind: type[KindT]) -> type[KindT]:
    """Add a kind of verdict."""
    if kind.key in _KINDS:
        raise ValueError(f"verdict {kind.key}: registered twice")
    _KINDS[kind.key] = kind()
    return kind


@cache
def verdict_kinds() -> Mapping[str, VerdictKind]:
    """Return all kinds by key, as the files of this folder register them."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(_KINDS)


@cache
def drawn_parts() -> Mapping[str, VerdictKind]:
    """Return, by part of the account, the kind that gives its name and its colours."""
    drawn = {kind.part: kind for kind in verdict_kinds().values() if kind.label}
    return {part.key: drawn[part.key] for part in Part}


# ---- the choice of the verdict -------------------------------------------------------------------


def kind_of(case: Case) -> tuple[VerdictKind, tuple[Finding, ...]]:
    """Return the kind of verdict whose rule holds, and its reasons."""
    return _holding(case, blamed(case))


def _holding(case: Case, blame: Blame) -> tuple[VerdictKind, tuple[Finding, ...]]:
    """Return the kind whose rule holds; one with a rule of its own comes before a part's usual one.

    So a new kind can take some of the cases of a part, without a change to the kind of that part.
    """
    for kind in sorted(
        verdict_kinds().values(), key=lambda kind: type(kind).rule is VerdictKind.rule
    ):
        reasons = kind.rule(case, blame)
        if reasons is not None:
            return kind, reasons
    raise AssertionError(f"no verdict blames {blame.part}")


def blamed(case: Case) -> Blame:
    """Return the part of the account that is to blame, if the data can decide.

    It is the largest part of the step other than compute, if it reaches the threshold.

        overlap    in place of line_rate, if the exposed bytes at line rate would fit under
                   computation that had no communication beside it
        transport  in place of either, if the line did not limit transfers: exposed transfers used
                   less than FILLED of it, and the rest of their time, latency included, reaches
                   the threshold and no other loss is longer than it; overlap stays where hardly
                   any communication was overlapped
        compute    if computation takes longer than with one worker, and no part is larger
        scales     if no part reaches the threshold
        unknown    if the largest part is unexplained, the steps are too few, some rows of the run
                   cannot be read, or the hosts sent far more than the noted collectives need
    """
    reasons = tuple(_why_untold(case))
    if reasons:
        return Blame(UNTOLD, reasons)
    key, largest_s = case.largest()
    inflation_s = case.inflation_s or 0.0
    if inflation_s >= largest_s and case.reaches_threshold(inflation_s):
        less = PartIsLess(part=drawn_parts()[key].label, share=case.share(largest_s))
        return Blame(Part.COMPUTE.key, (ComputesLonger(longer_s=inflation_s), less))
    drawn, is_much = drawn_parts()[key], case.reaches_threshold(largest_s)
    if is_alone(case) and not (drawn.is_of_one and is_much):
        return Blame(UNTOLD, (OneWorker(),))
    if not largest_s:
        return Blame(NOTHING, (NothingIsLost(),))
    share = case.share(largest_s)
    largest = LargestPart(part=drawn.label, share=share, is_much=is_much, limit=THRESHOLD)
    if not is_much:
        return Blame(NOTHING, (largest,))
    if drawn.needs_clocks and case.clock_error_s > largest_s:
        return Blame(UNTOLD, (largest, ClocksDisagreeByMore(error_s=case.clock_error_s)))
    return Blame(key, (largest,))  # If this is the unexplained part, the verdict is unknown.


def near_kinds(case: Case, kind: VerdictKind) -> tuple[str, ...]:
    """Return the other kinds that hold if a part is larger or smaller by `NEAR` of the step.

    A repeat of the same job differs by as much. The result is empty where the data cannot decide.
    """
    if not case.step_s or any(_why_untold(case)):
        return ()
    account, near_s, least_s = case.account, NEAR * case.step_s, THRESHOLD * case.step_s
    inflation_s = case.inflation_s or 0.0
    largest_s = max(case.largest()[1], inflation_s)
    found = {"scales"} if abs(largest_s - least_s) <= near_s else set()
    if inflation_s + near_s >= max(largest_s, least_s):
        found.add("compute")
    for part, drawn in drawn_parts().items():
        part_s = account.parts_s[part]
        if part == Part.COMPUTE.key or part_s + near_s < max(largest_s, least_s):
            continue
        if is_alone(case) and not drawn.is_of_one:
            continue
        if drawn.needs_clocks and case.clock_error_s > part_s - near_s:
            found.add("unknown")
        found |= {
            _holding(replace(case, floor_off_s=off_s), Blame(part, ()))[0].key
            for off_s in (-near_s, 0.0, near_s)
        }
    return tuple(key for key in verdict_kinds() if key in found - {kind.key})


def _why_untold(case: Case) -> Iterator[Finding]:
    """Yield the first reason why the account cannot decide, if any."""
    account = case.account
    if not case.step_s:
        yield NothingLasts()
    elif case.lost:
        yield from (RowsLost(table=table) for table in case.lost)
    elif (unseen := case.unseen) is not None:
        yield HostsSentMore(
            what=unseen.reason, sent_bytes=unseen.sent_bytes, noted_bytes=unseen.noted_bytes
        )
    elif account.is_whole_trace and not enough_steps(case):
        yield NoStepToJudgeBy()
    elif not enough_steps(case):
        count, total = int(account.is_kept.sum()), len(account.steps)
        yield StepsToJudgeBy(count=count, left_out=total - count)
    elif world(case.run) > 1 and not communicates(case):
        yield NoCommunication(workers=world(case.run), is_whole_trace=account.is_whole_trace)
    elif not computes(case):
        yield NoComputation()
        late, _ = late_for_most(account)
        if late is not None:
            yield CameLast(ranks=late.ranks, share=late.share)


class LargestPart(Finding):
    """The largest part, and whether it reaches the threshold."""

    template = (
        "{part} is {share:.1%} of the step, the largest part besides compute, and "
        "{is_much:reaches|below} the threshold of {limit:.0%}"
    )

    part: str
    share: float
    is_much: bool
    limit: float


class NothingIsLost(Finding):
    """No part other than compute takes any time."""

    template = "all of the step is compute"


class ComputesLonger(Finding):
    """Computation takes longer than in the baseline's step."""

    template = "computation takes {longer_s:time} longer than with one worker"

    longer_s: float


class PartIsLess(Finding):
    """The largest part other than compute is smaller than the increase of computation."""

    template = "{part} is less: {share:.1%} of the step"

    part: str
    share: float


class ClocksDisagreeByMore(Finding):
    """The ranks' clocks disagree by more than the part."""

    template = "ranks' clocks disagree by {error_s:time}, more than that"

    error_s: float


class OneWorker(Finding):
    """The job had one worker."""

    template = "there was one worker, and so nothing to scale or wait for"


class NothingLasts(Finding):
    """The run holds no times."""

    template = "the run holds events without times"


class RowsLost(Finding):
    """A table that the account rests on cannot be read completely."""

    template = "{table}"

    table: str


class HostsSentMore(Finding):
    """Collectives were not seen, and the hosts sent far more than the others need."""

    template = (
        "{what}. In the steps the hosts sent {sent_bytes:bytes}, and the collectives that were "
        "seen need {noted_bytes:bytes}"
    )

    what: str
    sent_bytes: int
    noted_bytes: int


class NoStepToJudgeBy(Finding):
    """The run is a measured trace in which no step is marked."""

    template = "no marked step to judge by"


class StepsToJudgeBy(Finding):
    """The steps are too few to show the usual step."""

    template = (
        "{count} {count:step|steps}{left_out:?, {left_out} left out as warm-up or exceptions} "
        "to judge by"
    )

    count: int
    left_out: int


class NoCommunication(Finding):
    """The job had several workers, and no communication between them was recorded."""

    template = "{workers} workers, and no communication in {is_whole_trace:the run|its steps}"

    workers: int
    is_whole_trace: bool


class NoComputation(Finding):
    """No computation was recorded."""

    template = "the run lacks computation, which would tell hidden from exposed communication"


class CameLast(Finding):
    """The ranks that caused most of the waiting."""

    template = "{ranks:ranks} came last most: {share:.0%} of all waiting was for {ranks:it|them}"

    ranks: tuple[int, ...]
    share: float


class InFewSteps(Finding):
    """Few of the steps have most of the loss that the verdict names."""

    template = (
        "Of this loss {share:.0%} is in {few} of {of} steps, which {few:takes|take} "
        "{long_s:time}. The others take {usual_s:time}."
    )

    share: float
    few: int
    of: int
    long_s: float
    usual_s: float


class AnotherLoss(Finding):
    """Another part reaches the threshold: if the first loss ended, this one would remain."""

    template = "Another {lost_s:time} ({share:.1%}) is lost to {to}."

    lost_s: float
    share: float
    part: str
    to: str


class AnotherIsLate(Finding):
    """Waiting for late ranks reaches the threshold too."""

    template = (
        "Another {lost_s:time} ({share:.1%}) is lost to waiting, most of it for {ranks:ranks}."
    )

    lost_s: float
    share: float
    ranks: tuple[int, ...]


class RanksWaitBesides(Finding):
    """Ranks wait for late ones, while the verdict is unknown."""

    template = (
        "Ranks wait for each other for {lost_s:time} besides ({share:.1%}), {of_waiting:.0%} of it "
        "for {ranks:ranks}."
    )

    lost_s: float
    share: float
    of_waiting: float
    ranks: tuple[int, ...]


class ExposedOfSomeRanks(Finding):
    """More communication is exposed, with ranks that the run does not hold."""

    template = (
        "Communication is exposed for another {share:.1%}. {recorded} of {workers} ranks cannot "
        "tell whether that is waiting or transfer."
    )

    share: float
    recorded: int
    workers: int


class WaitingOrTransfer(Finding):
    """The exposed communication is with ranks that the run does not hold."""

    template = "Whether that is waiting or transfer, {recorded} of {workers} ranks cannot tell."

    recorded: int
    workers: int


class OthersNotSeen(Finding):
    """The verdict rests on some of the ranks only."""

    template = (
        "Only {recorded} of {workers} ranks {recorded:is|are} in the run. The others may be "
        "slower, or wait for {recorded:it|them}."
    )

    recorded: int
    workers: int


class ExposedBesides(Finding):
    """More communication is exposed, and no rule explains it."""

    template = (
        "Communication is exposed for {exposed_s:time} besides ({share:.1%}), and this run cannot "
        "tell why."
    )

    exposed_s: float
    share: float


class CloseToAnother(Finding):
    """A repeat of the same job may give another verdict."""

    template = (
        "This is close: a part larger or smaller by {band:.0%} of the step, as in a repeat, would "
        "say {kinds:list}."
    )

    kinds: tuple[str, ...]
    band: float


def besides(case: Case, kind: VerdictKind) -> Iterator[Finding]:
    """Yield the findings that stand beside a verdict."""
    account, run = case.account, case.run
    near = near_kinds(case, kind)
    if near:
        yield CloseToAnother(kinds=near, band=NEAR)
    (late, _), waited_s = late_for_most(account), account.parts_s[Part.STRAGGLER.key]
    if kind.key == "unknown":
        if late is not None and case.reaches_threshold(waited_s):
            share = case.share(waited_s)
            yield RanksWaitBesides(
                lost_s=waited_s, share=share, of_waiting=late.share, ranks=late.ranks
            )
        return
    part = next((part for part in Part if part.key == kind.part), None)
    rare = None if part is None else few_steps(account, part)
    if rare is not None:
        yield InFewSteps(
            share=rare.share,
            few=rare.few,
            of=rare.of,
            long_s=rare.long_s,
            usual_s=rare.usual_s.value,
        )
    others = {
        part: account.parts_s[part]
        for part, drawn in drawn_parts().items()
        if drawn.lost_to and part != kind.part and not (kind.is_transfer and drawn.is_transfer)
    }
    other = max(others, key=others.__getitem__)
    if kind.key != "scales" and case.reaches_threshold(others[other]):
        lost_s, share = others[other], case.share(others[other])
        if late is not None and other == Part.STRAGGLER.key:
            yield AnotherIsLate(lost_s=lost_s, share=share, ranks=late.ranks)
        else:
            to = drawn_parts()[other].loss_in(case)
            yield AnotherLoss(lost_s=lost_s, share=share, part=other, to=to)
    # Some exposed communication may have no explanation.
    exposed_s = account.parts_s[Part.UNEXPLAINED.key]
    here, of, share = len(recorded_ranks(run)), world(run), case.share(exposed_s)
    if exposed_s < NOTABLE * case.step_s:
        if here < of and not stands_for_all(run):
            yield OthersNotSeen(recorded=here, workers=of)
    elif here < of and kind.key == "scales" and case.largest()[0] == Part.UNEXPLAINED.key:
        yield WaitingOrTransfer(recorded=here, workers=of)
    elif here < of:
        yield ExposedOfSomeRanks(share=share, recorded=here, workers=of)
    elif case.reaches_threshold(exposed_s) and not is_transfer_alone(case):
        yield ExposedBesides(exposed_s=exposed_s, share=share)
