"""The findings of a comparison of two runs: its answer, its predictions and its notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import geometric_mean

from fullwire.collectives.cost import Floats
from fullwire.findings.finding import Finding
from fullwire.run.run import Run
from fullwire.timeline.transfers import recorded_ranks, stands_for_all, world

SMALL = 0.05  # A change of this size interests people.
_MEANS_DIFFER = 0.05  # A larger difference from usual steps: others changed.
_NOT_SHOWN = 0.0005  # Of the step: a smaller change would print as 0.
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


class TooFewToTell(Finding):
    """The steps are too few to tell the change from noise."""

    template = "{of_passes:Passes|Steps} are {change}; too few steps to tell this from noise."

    of_passes: bool
    change: Finding


class RatioInterval(Finding):
    """The 95 % interval of the ratio of the steps."""

    template = "95 %: after/before {low:.4f} to {high:.4f}"

    low: float
    high: float


class NoDifference(Finding):
    """The change is within noise."""

    template = (
        "No difference beyond noise: {of_passes:passes|steps} are {change} ({interval}); less than "
        "{unseen:.1%} would not show."
    )

    of_passes: bool
    change: Finding
    interval: RatioInterval
    unseen: float


class NoiseMayBeAll(Finding):
    """The change is large, but noise may be as large."""

    template = (
        "Whether anything changed is not told: {of_passes:passes|steps} are {change}, but these "
        "recordings scatter as much ({interval}); less than {unseen:.1%} would not show."
    )

    of_passes: bool
    change: Finding
    interval: RatioInterval
    unseen: float


class MoreThanNoise(Finding):
    """The change is beyond noise."""

    template = "{of_passes:Passes|Steps} are {change}, more than noise ({interval})."

    of_passes: bool
    change: Finding
    interval: RatioInterval


def size_of_change(ratio: float) -> Finding:
    """Return the size of the change of the steps."""
    if abs(ratio - 1) < _NOT_SHOWN:
        return AsLongAsBefore()
    return LongerOrShorter(share=abs(ratio - 1), is_shorter=ratio < 1)


def change_of_steps(
    ratio: float, low: float | None, high: float | None, *, of_passes: bool = False
) -> Finding:
    """Say whether the second run's steps are shorter or longer, and whether that exceeds noise."""
    change = size_of_change(ratio)
    if low is None or high is None:
        return TooFewToTell(of_passes=of_passes, change=change)
    interval = RatioInterval(low=low, high=high)
    if low <= 1 <= high:
        unseen = high / ratio - 1
        kind = NoDifference if abs(ratio - 1) < SMALL else NoiseMayBeAll
        return kind(of_passes=of_passes, change=change, interval=interval, unseen=unseen)
    return MoreThanNoise(of_passes=of_passes, change=change, interval=interval)


class SlowerThanAllowed(Finding):
    """The change is beyond noise and beyond the limit."""

    template = (
        "Too slow: {of_passes:passes|steps} are {change}, more than noise, and the limit is "
        "{limit:.1%}."
    )

    of_passes: bool
    change: Finding
    limit: float


class NotSlowerThanAllowed(Finding):
    """The change is within the limit, and a larger one would show in these recordings."""

    template = (
        "Within the limit of {limit:.1%}: {of_passes:passes|steps} are {change}; a slowdown of "
        "{unseen:.1%} would show."
    )

    of_passes: bool
    change: Finding
    limit: float
    unseen: float


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


class OtherPasses(Finding):
    """The steps of the runs have different numbers of passes, so single passes are compared."""

    template = (
        "A step has {after} {after:pass|passes} in place of {before}: times are those of one pass."
    )

    before: int
    after: int


class WorkInTheSameTime(Finding):
    """The gain from another number of workers, each of which does the same work in a step."""

    template = (
        "With {after:,} {after:worker|workers} in place of {before:,} the job does {work:.2f} "
        "times the work in the same time; {perfect:.2f} would be perfect."
    )

    before: int
    after: int
    work: float
    perfect: float


class BytesAndTime(Finding):
    """Whether the length of iterations follows their bytes, as packets show them."""

    template = (
        "An iteration moves {times:.2f} times the bytes ({after_bytes:bytes} per edge against "
        "{before_bytes:bytes}) and takes {ratio:.2f} times as long"
        "{is_against:: bytes alone do not set its time|}."
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


# ---- the predictions -----------------------------------------------------------------------------


class ChangedLinks(Finding):
    """The second run has another line rate."""

    template = "links of {rate_bps:rate}"

    rate_bps: float


class ChangedWorkers(Finding):
    """The second run has another number of workers."""

    template = "{workers} {workers:worker|workers}"

    workers: int


class ChangedBuckets(Finding):
    """The second run has another bucket policy."""

    template = "buckets {buckets}"

    buckets: str


class ChangedHook(Finding):
    """The second run has another communication hook."""

    template = "{hook}"

    hook: str


class ChangedPasses(Finding):
    """The second run adds up the gradients of several passes before it sends them."""

    template = "gradients summed over {passes} passes"

    passes: int


class ChangedBackend(Finding):
    """The second run has another backend."""

    template = "backend {backend}"

    backend: str


class Verified(Finding):
    """The prediction for the second run, and its measurement."""

    template = (
        "With {changes:list}: predicted {predicted_s:time} ({low_s:time} to {high_s:time}"
        "{full_s:?; {full_s:time} on a full wire}), measured {measured_s:time}: {off:.1%} off, "
        "{holds:within|OUTSIDE} the interval."
    )

    changes: tuple[Finding, ...]
    predicted_s: float
    low_s: float
    high_s: float
    full_s: float | None
    measured_s: float
    off: float
    holds: bool


# ---- the notes -----------------------------------------------------------------------------------


class Side(Finding):
    """One side of the comparison, and which of its recordings, if it has several."""

    template = "{is_first:first|second} run{recording:?, recording {recording}}"

    is_first: bool
    recording: int | None


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
        "One recording of each: whatever else changed between them counts as the change. {more}: "
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
    sides: Sequence[Sequence[Run]], differing: Sequence[Sequence[str]]
) -> Iterator[Finding]:
    """Yield the notes on a comparison.

    `differing` names, for each side, the facts in which its recordings differ.
    """
    for side, facts, is_first in zip(sides, differing, (True, False), strict=True):
        for number, run in enumerate(side, 1):
            named = Side(is_first=is_first, recording=number if len(side) > 1 else None)
            yield from (SideIsPartial(side=named, what=each) for each in run.missing)
            if run.facts.warnings is not None:
                yield SideWarned(side=named, what=str(run.facts.warnings))
            here = len(recorded_ranks(run))
            if here < world(run) and not stands_for_all(run):
                yield SideLacksRanks(side=named, here=here, workers=world(run))
        if facts:
            whole = Side(is_first=is_first, recording=None)
            yield RecordingsDiffer(side=whole, facts=tuple(facts))
    [before, *_], [after, *_] = sides
    if (before.facts.dilation or 1.0) != (after.facts.dilation or 1.0):
        yield DilationDiffers()


def about_means(lengths_s: Sequence[Sequence[Floats]], ratio: float) -> Iterator[Finding]:
    """Yield the change of the means, where it differs from that of usual steps."""
    before_s, after_s = (geometric_mean(float(each.mean()) for each in side) for side in lengths_s)
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
