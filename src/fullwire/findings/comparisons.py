"""The findings of a comparison of two runs: its answer and its notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from statistics import geometric_mean
from typing import Any

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.findings.finding import Finding
from fullwire.run.gaps import NOT_SEEN
from fullwire.run.processors import share_of_others
from fullwire.run.run import Run
from fullwire.simulation.calibrate import MUCH_BESIDE
from fullwire.timeline.transfers import recorded_ranks, stands_for_all, world
from fullwire.timeline.utilization import series

SMALL = 0.05  # A change of this size interests people.
_MUCH_OF_GRADIENTS = 0.5  # of their bytes: a ring of two sends all of them, another more
_MEANS_DIFFER = 0.05  # A larger difference from usual steps: others changed.
_NOT_SHOWN = 0.0005  # Of the step: a smaller change would print as 0.
_LARGE = 1.1  # Times: a larger change is told in times, a smaller one as a share.
_MUCH = 0.05  # A sentence needs a change of bytes, or of length, above this.


# ---- the answer ----------------------------------------------------------------------------------


class AsLongAsBefore(Finding):
    """The change is too small to print."""

    template = "as long as before"


class LongerOrShorter(Finding):
    """The size of the change of the steps."""

    template = "{share:.1%} {is_shorter:shorter|longer}"

    share: float
    is_shorter: bool


class TimesFaster(Finding):
    """The size of a large change: how many times faster or slower."""

    template = "{times:.3g}x {is_faster:faster|slower}"

    times: float
    is_faster: bool


class TimesLonger(Finding):
    """The size of a large change of steps whose work is unknown, so it tells of no speed."""

    template = "{times:.3g}x {is_shorter:shorter|longer}"

    times: float
    is_shorter: bool


class StepsAre(Finding):
    """The change of the steps, where it is small or where their work is unknown."""

    template = "{of_passes:Passes|Steps} are {change}"

    of_passes: bool
    change: Finding


class TimesBetween(Finding):
    """The 95 % interval of a large change."""

    template = "95 %: {low:times} to {high:times}"

    low: float
    high: float


class SharesBetween(Finding):
    """The 95 % interval of a small change."""

    template = "95 %: {low} to {high}"

    low: Finding
    high: Finding


class TooFewToTell(Finding):
    """The steps are too few to tell the change from noise."""

    template = (
        "Too few steps to tell a change from noise: {before_s:time} -> {after_s:time} a "
        "{of_passes:pass|step}, {change}."
    )

    of_passes: bool
    change: Finding
    before_s: float
    after_s: float


class WithinNoise(Finding):
    """A change that noise may explain."""

    of_passes: bool
    change: Finding
    interval: SharesBetween
    unseen: float
    before_s: float
    after_s: float


class NoDifference(WithinNoise):
    """The change is within noise."""

    template = (
        "No difference beyond noise: {before_s:time} -> {after_s:time} a {of_passes:pass|step}, "
        "{change} ({interval}). A change of less than {unseen:.1%} would not show."
    )


class NoiseMayBeAll(WithinNoise):
    """The change is large, but noise may be as large."""

    template = (
        "Not decided: {before_s:time} -> {after_s:time} a {of_passes:pass|step}, {change}, but "
        "these recordings scatter as much ({interval}). A change of less than {unseen:.1%} would "
        "not show."
    )


class MoreThanNoise(Finding):
    """The change is beyond noise."""

    template = (
        "{change}, more than noise ({interval}): {before_s:time} -> {after_s:time} a "
        "{of_passes:pass|step}."
    )

    of_passes: bool
    change: Finding
    interval: Finding
    before_s: float
    after_s: float


def size_of_change(ratio: float) -> Finding:
    """Return the size of the change of the steps."""
    if abs(ratio - 1) < _NOT_SHOWN:
        return AsLongAsBefore()
    return LongerOrShorter(share=abs(ratio - 1), is_shorter=ratio < 1)


def change_of_steps(
    times_s: tuple[float, float],
    low: float | None,
    high: float | None,
    *,
    of_passes: bool = False,
    has_unknown_passes: bool = False,
) -> Finding:
    """Say whether steps became shorter or longer, and whether that exceeds noise.

    `low` and `high` are the ends of the interval of the ratio of `times_s`, after over before.
    Longer steps are slower only if they are as much work, so their passes have to be known.
    """
    before_s, after_s = times_s
    ratio = after_s / before_s
    change = size_of_change(ratio)
    told: dict[str, Any] = {"of_passes": of_passes, "before_s": before_s, "after_s": after_s}
    if low is None or high is None:
        return TooFewToTell(change=change, **told)
    ends = sorted((low, high), key=lambda end: abs(end - 1))
    if low <= 1 <= high:
        between = SharesBetween(low=size_of_change(low), high=size_of_change(high))
        kind = NoDifference if abs(ratio - 1) < SMALL else NoiseMayBeAll
        return kind(change=change, interval=between, unseen=high / ratio - 1, **told)
    if max(ratio, 1 / ratio) < _LARGE:
        least, most = (size_of_change(end) for end in ends)
        return MoreThanNoise(
            change=StepsAre(of_passes=of_passes, change=change),
            interval=SharesBetween(low=least, high=most),
            **told,
        )
    least_times, most_times = sorted(max(end, 1 / end) for end in ends)
    times, is_shorter = max(ratio, 1 / ratio), ratio < 1
    longer = StepsAre(of_passes=of_passes, change=TimesLonger(times=times, is_shorter=is_shorter))
    faster = TimesFaster(times=times, is_faster=is_shorter)
    return MoreThanNoise(
        change=longer if has_unknown_passes else faster,
        interval=TimesBetween(low=least_times, high=most_times),
        **told,
    )


class SlowerThanAllowed(Finding):
    """The change is beyond noise and beyond the limit."""

    template = (
        "Too slow{has_unknown_passes:, unless a step does more work than before (its passes are "
        "unknown)|}: {of_passes:passes|steps} are {change}, more than noise, and the limit is "
        "{limit:.1%}."
    )

    of_passes: bool
    has_unknown_passes: bool
    change: Finding
    limit: float


class NotSlowerThanAllowed(Finding):
    """The change is within the limit, and the recordings are sure enough of it."""

    template = (
        "Within the limit of {limit:.1%}{has_unknown_passes:, unless a step does less work than "
        "before (its passes are unknown)|}: {of_passes:passes|steps} are {change}. {reason}"
    )

    of_passes: bool
    has_unknown_passes: bool
    change: Finding
    limit: float
    reason: Finding


class SlowdownWouldShow(Finding):
    """A slowdown of the limit's size would be more than noise in these recordings."""

    template = "A slowdown of {unseen:.1%} would show."

    unseen: float


class WorstIsWithinLimit(Finding):
    """The interval of the change ends below the limit, however wide it is."""

    template = "Even the upper end of the 95 % interval is within the limit: {worst}."

    worst: Finding


class SlowdownMayHide(Finding):
    """Noise may hide a slowdown as large as the limit."""

    template = (
        "Not decided: noise may hide a slowdown of {limit:.1%}. {of_passes:Passes|Steps} are "
        "{change}. {more}"
    )

    of_passes: bool
    change: Finding
    limit: float
    more: Finding


class SoManyDecide(Finding):
    """The number of recordings that would show a slowdown as large as the limit."""

    template = "{needed} recordings of each side would decide."

    needed: int


class NoneDecide(Finding):
    """The decision would take more recordings than anybody makes."""

    template = "These recordings scatter too much: find a quieter machine, or allow more."


class LongerDecide(Finding):
    """The recordings have too few steps to measure noise."""

    template = "Recordings of at least {fewest} steps would decide."

    fewest: int


class PassesAreUnknown(Finding):
    """A run does not tell the passes of its steps, so the change may be one of their work."""

    template = (
        "How many passes a step has is unknown, so "
        "{is_shorter:shorter steps may be less|longer steps may be more} work."
    )

    is_shorter: bool


class OtherPasses(Finding):
    """The steps of the runs have different numbers of passes, so single passes are compared."""

    template = (
        "A step has {after:.4g} {after:pass|passes} in place of {before:.4g}: times are those of "
        "one pass."
    )

    before: float
    after: float


class OtherSamples(Finding):
    """The passes of the runs have different numbers of samples, so times are scaled."""

    template = (
        "A worker takes {after:,} {after:sample|samples} in a pass in place of {before:,}: all "
        "times are those of {before:,}."
    )

    before: int
    after: int


class BytesAndTime(Finding):
    """Whether the length of iterations follows their bytes, as packets show them."""

    template = (
        "An iteration moves {times:.2f} times the bytes ({after_bytes:bytes} per edge against "
        "{before_bytes:bytes}) and takes {ratio:.2f} times as long."
        "{is_against: Bytes alone do not set its time.|}"
    )

    times: float
    before_bytes: float
    after_bytes: float
    ratio: float
    is_against: bool  # More bytes in less time, or fewer bytes in more time.


def bytes_and_time(edge_bytes: tuple[float, float], ratio: float) -> BytesAndTime:
    """Compare the change of the bytes of iterations with the change of their lengths."""
    before, after = edge_bytes
    times = after / before
    return BytesAndTime(
        times=times,
        before_bytes=before,
        after_bytes=after,
        ratio=ratio,
        is_against=abs(times - 1) > _MUCH and (times - 1) * (ratio - 1) < -(_MUCH**2),
    )


# ---- the notes -----------------------------------------------------------------------------------


class Side(Finding):
    """One side of the comparison, and which of its recordings, if it has several."""

    template = "{is_first:first|second} run{recording:?, recording {recording}}"

    is_first: bool
    recording: int | None


class OthersUsedProcessors(Finding):
    """Other programs used the processors beside one run more, so the change may be theirs."""

    template = (
        "Other programs used {before:.0%} of the processors beside the first run and {after:.0%} "
        "beside the second: the change may be theirs, or a part of it."
    )

    before: float
    after: float


class OnlyStepsCompare(Finding):
    """The recorder did not see some collectives of a side."""

    template = (
        "The recorder did not see some collectives of "
        "{are_both:both runs|{is_first:the first|the second} run}, so whole steps are comparable, "
        "and the times and bytes of communication are not."
    )

    is_first: bool
    are_both: bool


class SideIsPartial(Finding):
    """Some data of a run is missing."""

    template = "The {side} is partial: {what}."

    side: Side
    what: str


class SideWarned(Finding):
    """A warning of the recorder or of the lab."""

    template = "Where the {side} was recorded: {what}."

    side: Side
    what: str


class SideLacksRanks(Finding):
    """Some ranks of a run were not recorded."""

    template = "Of the {side} {here} of {workers} ranks are here: others may be slower."

    side: Side
    here: int
    workers: int


class RecordingsDiffer(Finding):
    """The recordings of one side are of different jobs."""

    template = "Recordings of the {side} differ in {facts:list}."

    side: Side
    facts: tuple[str, ...]


class DilationDiffers(Finding):
    """The two runs are emulations with different clocks."""

    template = "The runs differ in dilation, and so in how fast their processors count as."


class MeansChangedOtherwise(Finding):
    """The change of the means differs from that of usual steps."""

    template = (
        "The mean of all steps changed otherwise: from {before_s:time} to {after_s:time} "
        "({change:+.1%}). Some steps take much longer than the usual ones, and these changed."
    )

    before_s: float
    after_s: float
    change: float


class OneRecordingEach(Finding):
    """Each side has one recording; more recordings would tell more."""

    template = (
        "One recording of each: any other difference between them counts as the change. {more}: "
        "fullwire compare before*.run -- after*.run"
    )

    more: Finding


class SeveralTellMore(Finding):
    """Several recordings of each side would tell more."""

    template = "Several, made in turns, tell more"


class SoManyWouldShow(Finding):
    """The number of recordings that would show a small change."""

    template = "Some {needed} of each, made in turns, would show {small:.0%}"

    needed: int
    small: float


class MoreRecordings(Finding):
    """More recordings would show a small change."""

    template = "{more}."

    more: SoManyWouldShow


def comparison_notes(
    sides: Sequence[Sequence[Run]], differing: Sequence[Set[str]], *, is_significant: bool
) -> Iterator[Finding]:
    """Yield the notes on a comparison.

    `differing` names, for each side, the facts in which its recordings differ. `is_significant` is
    true where the change is more than noise.
    """
    by_others = [float(np.mean([*map(share_of_others, side)])) for side in sides]
    if is_significant and abs(by_others[1] - by_others[0]) >= MUCH_BESIDE:
        yield OthersUsedProcessors(before=by_others[0], after=by_others[1])
    for side, facts, is_first in zip(sides, differing, (True, False), strict=True):
        for number, run in enumerate(side, 1):
            named = Side(is_first=is_first, recording=number if len(side) > 1 else None)
            yield from (SideIsPartial(side=named, what=gap) for gap in run.missing)
            if run.facts.warnings is not None:
                yield SideWarned(side=named, what=str(run.facts.warnings))
            here = len(recorded_ranks(run))
            if here < world(run) and not stands_for_all(run):
                yield SideLacksRanks(side=named, here=here, workers=world(run))
        if facts - {"warnings"}:
            whole = Side(is_first=is_first, recording=None)
            yield RecordingsDiffer(side=whole, facts=tuple(sorted(facts)))
    unseen = [any(map(sends_unseen, side)) for side in sides]
    if any(unseen):
        yield OnlyStepsCompare(is_first=unseen[0], are_both=all(unseen))
    [before, *_], [after, *_] = sides
    if (before.facts.dilation or 1.0) != (after.facts.dilation or 1.0):
        yield DilationDiffers()


def may_have_sent(run: Run) -> bool:
    """Say whether a run without collectives may be of a job that sent something."""
    is_seen = (run.spans.lane == "communication").any()
    return bool(run.missing) or sends_unseen(run) or bool(is_seen)


def sends_unseen(run: Run) -> bool:
    """Say whether a job had collectives that its recorder did not see, as those of MPI.

    The recorder says so, or connections carried gradients and no collective is recorded.
    """
    if any(gap.reason.endswith(NOT_SEEN) for gap in run.gaps):
        return True
    if len(run.collectives) or world(run) == 1 or not len(run.gradients):
        return False
    sockets = run.sockets
    sent_bytes = sum(
        int(np.ptp(sockets.bytes_acked[rows]))
        for _, rows in series(sockets, sockets.host, sockets.flow)
    )
    return sent_bytes >= _MUCH_OF_GRADIENTS * int(run.gradients.bytes.sum())


def about_means(lengths_s: Sequence[Sequence[Floats]], ratio: float) -> Iterator[Finding]:
    """Yield the change of the means, where it differs from that of usual steps."""
    before_s, after_s = (geometric_mean(float(run.mean()) for run in side) for side in lengths_s)
    change = after_s / before_s - 1
    if abs(after_s / before_s / ratio - 1) > _MEANS_DIFFER:
        yield MeansChangedOtherwise(before_s=before_s, after_s=after_s, change=change)


def about_recordings(
    counts: tuple[int, int], unseen: float | None, needed: int | None, *, is_open: bool
) -> Iterator[Finding]:
    """Yield that more recordings tell more, and the number that would show a small change."""
    would_show = None
    if is_open and (unseen or 0) > SMALL and needed is not None:
        would_show = SoManyWouldShow(needed=needed, small=SMALL)
    if counts == (1, 1):
        yield OneRecordingEach(more=would_show or SeveralTellMore())
    elif would_show is not None:
        yield MoreRecordings(more=would_show)
