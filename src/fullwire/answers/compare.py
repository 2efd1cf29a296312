"""Did it get better, and by more than noise?

Recordings are compared by the time of their usual step (`run/usual.py`), without warm-up. The
same job, recorded again, has another one, and more steps do not change that. Other work on the
machine, for example, makes a job slower for a second or for an hour. So the usual steps of
recordings should differ as much as those of one recording's fifths. Random scatter
of steps makes the fifths differ less when there are more steps. Lasting changes keep their effect.
Several recordings of a side show the noise directly. Both estimates are of one variance, and the
interval of the ratio is Student's.

A step that adds up the gradients of more passes is more work, and so is a pass of more samples. If
the runs differ in passes, all times are those of one pass. If they differ in samples, the second
side's times are those of as many samples as the first had. If a run shows computing without its
passes, longer steps may be more work. They are then called longer, and not slower.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, geometric_mean
from typing import Any, Literal

import numpy as np

from fullwire.answers.believable import check_steps
from fullwire.answers.opening import (
    RunLike,
    are_one_recording,
    many,
    name_of_run,
    opened,
    refuse_copies,
    with_own_time,
)
from fullwire.collectives.cost import Floats
from fullwire.display import Result, html_table
from fullwire.errors import DamagedInput, UsageError
from fullwire.findings.changes import OneOnBothSides, SentNothing, SidesAreComputed
from fullwire.findings.comparisons import (
    SMALL,
    LongerDecide,
    NoneDecide,
    NotSlowerThanAllowed,
    OtherPasses,
    OtherSamples,
    PassesAreUnknown,
    SlowdownMayHide,
    SlowdownWouldShow,
    SlowerThanAllowed,
    SoManyDecide,
    WorstIsWithinLimit,
    about_means,
    about_recordings,
    bytes_and_time,
    change_of_steps,
    comparison_notes,
    may_have_sent,
    size_of_change,
)
from fullwire.findings.finding import Finding
from fullwire.findings.kinds_of_steps import too_few_of_a_kind
from fullwire.findings.scaling import WorkInTheSameTime
from fullwire.run.facts import NONE, REGISTRY, UNKNOWN
from fullwire.run.gaps import reasons
from fullwire.run.kinds import kinds_of
from fullwire.run.run import Run
from fullwire.run.usual import WARM_UP, marks_of_steps, middle_half, shared_steps
from fullwire.timeline.passes import (
    equal_work,
    passes_in_gradients,
    passes_of_step,
    sums_just_so_much,
)
from fullwire.timeline.timeline import check_collectives, check_times, steps_of
from fullwire.timeline.transfers import world
from fullwire.units import share, show_bytes
from fullwire.words import sentence, sentences

PIECES = 5  # Pieces of a recording, in order of time.
# The standard deviation of a usual step beyond the scatter of its steps. The same job, started
# again, is a little faster or slower as a whole (validation/README.md).
ANEW = 0.005
# The degrees of freedom of two recordings' fifths, beside those of several recordings.
RULE_COUNTS = 8
SURE = 0.95
SAME_GRADIENTS = 0.01  # Totals that differ by more are of different models.
_ALWAYS_DIFFER = {  # They tell of the recording and of its reader, and nobody sets them.
    "remarks",
    "recorder_s",
    "sampler_share",
    "capture_clocks",
    *("captured_packets", "supposed_packets", "alone_less_share", "alone_more_share"),
    "group_names",
}
FEWEST_STEPS = 5  # Of a recording: with fewer, noise is unknown.
_MOST_RECORDINGS = 30  # Of each side: nobody makes more.


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The number of compared steps of a recording, and the time of the usual one."""

    steps: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Noise:
    """The variance of a recording's usual step, and the degrees of freedom of that estimate."""

    variance: float
    freedom: int

    def off(self, shares: Sequence[float]) -> float:
        """Return the possible error of a ratio's logarithm.

        `shares` holds, for each side, one over the number of its recordings.
        """
        return student(SURE, self.freedom) * math.sqrt(self.variance * sum(shares))

    def recordings_for(self, change: float) -> int | None:
        """Return how many recordings of each side tell a change from such noise, if few do."""
        for count in range(1, _MOST_RECORDINGS + 1):
            seen = Noise(self.variance, RULE_COUNTS + 2 * (count - 1))
            if math.expm1(seen.off([1 / count, 1 / count])) <= change:
                return count
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The answer to a limit: whether steps became longer by more than it and than noise."""

    limit: float
    state: Literal["slower", "kept", "open"]  # Open: noise may hide a slowdown of the limit.
    recordings: int | None  # Of each side, to decide an open state.
    finding: Finding

    @property
    def sentence(self) -> str:
        """Return the answer in words."""
        return sentence(self.finding)


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Comparison(Result):
    """Usual steps, their ratio after/before, and whether the difference is more than noise.

    If steps of the runs have different numbers of passes, all times are those of one pass. If
    passes have different numbers of samples, all times are those of the first side's number. With
    several recordings of a side, times are the geometric mean of their usual steps.
    """

    before_s: float
    after_s: float
    before_steps: int
    after_steps: int
    before_recordings: tuple[Recording, ...]
    after_recordings: tuple[Recording, ...]
    ratio: float
    low: float | None  # Of the ratio, 95 %; None with too few steps.
    high: float | None
    is_significant: bool | None
    differing_facts: tuple[tuple[str, str, str], ...]
    workers: tuple[int, int]
    passes: tuple[float, float] | None  # Of a step, if they differ: then times are of one pass.
    has_unknown_passes: bool  # Of a run: then its steps may be other work.
    samples: tuple[int, int] | None  # Of a worker in a pass, if they differ: then times are scaled.
    edge_bytes: tuple[float, float] | None  # Of an iteration, if both runs have packets.
    sent_nothing: Literal["before", "after"] | None  # The side, where the other has collectives.
    are_computed: tuple[bool, ...]  # The sides, if a model made the times of a run there.
    recordings_for_small: int | None  # Of each side, to tell SMALL from noise; None if too many.
    noise: Noise | None  # Of a recording's usual step; None with too few steps.
    notes: tuple[Finding, ...]  # The notes on the comparison.

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the notes on the comparison, a sentence each."""
        return sentences(self.notes)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the answer: the change, then the effect of another size or of other bytes."""
        of_passes = self.passes is not None
        findings: list[Finding] = [
            change_of_steps(
                (self.before_s, self.after_s),
                self.low,
                self.high,
                of_passes=of_passes,
                has_unknown_passes=self.has_unknown_passes,
            )
        ]
        if self.has_unknown_passes and self.is_significant is not False:
            findings.append(PassesAreUnknown(is_shorter=self.ratio < 1))
        if self.passes is not None:
            findings.append(OtherPasses(before=self.passes[0], after=self.passes[1]))
        if self.samples is not None:
            findings.append(OtherSamples(before=self.samples[0], after=self.samples[1]))
        before, after = self.workers
        if before != after:
            findings.append(
                WorkInTheSameTime(
                    before=before,
                    after=after,
                    work=self.work_ratio,
                    perfect=after / before,
                    is_supposed=self.has_unknown_passes,
                )
            )
        if self.edge_bytes is not None:
            findings.append(bytes_and_time(self.edge_bytes, self.ratio))
        if self.sent_nothing is not None:
            findings.append(SentNothing(is_first=self.sent_nothing == "before"))
        if any(self.are_computed):
            findings.append(
                SidesAreComputed(is_first=self.are_computed[0], are_both=all(self.are_computed))
            )
        return tuple(findings)

    @property
    def advice(self) -> tuple[Finding, ...]:
        """Return the advice on more recordings."""
        counts = len(self.before_recordings), len(self.after_recordings)
        is_open = self.is_significant is False
        return tuple(
            about_recordings(counts, self.unseen, self.recordings_for_small, is_open=is_open)
        )

    def gate(self, limit: str | float) -> Gate:
        """Say whether steps became longer by more than a limit, such as "5%", and than noise."""
        allowed = share(limit, "limit")
        told: dict[str, Any] = {
            "of_passes": self.passes is not None,
            "change": size_of_change(self.ratio),
            "limit": allowed,
        }
        if self.noise is None or self.unseen is None:
            finding: Finding = SlowdownMayHide(**told, more=LongerDecide(fewest=FEWEST_STEPS))
            return Gate(limit=allowed, state="open", recordings=None, finding=finding)
        if self.is_significant and self.ratio > 1 + allowed:
            finding = SlowerThanAllowed(**told, has_unknown_passes=self.has_unknown_passes)
            return Gate(limit=allowed, state="slower", recordings=None, finding=finding)
        worst = math.inf if self.high is None else self.high
        if self.unseen <= allowed or worst <= 1 + allowed:
            reason = (
                SlowdownWouldShow(unseen=self.unseen)
                if self.unseen <= allowed
                else WorstIsWithinLimit(worst=size_of_change(worst))
            )
            finding = NotSlowerThanAllowed(
                **told, has_unknown_passes=self.has_unknown_passes, reason=reason
            )
            return Gate(limit=allowed, state="kept", recordings=None, finding=finding)
        needed = self.noise.recordings_for(allowed)
        more = NoneDecide() if needed is None else SoManyDecide(needed=needed)
        finding = SlowdownMayHide(**told, more=more)
        return Gate(limit=allowed, state="open", recordings=needed, finding=finding)

    def _in_short(self) -> Iterator[str]:
        yield from sentences(self.findings[:2])
        yield f"steps compared: {self.before_steps:,} before, {self.after_steps:,} after"

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        sides = ["before"] * len(self.before_recordings) + ["after"] * len(self.after_recordings)
        recordings = (*self.before_recordings, *self.after_recordings)
        return {
            "recordings": {
                "side": sides,
                "steps": [recording.steps for recording in recordings],
                "step_s": [recording.step_s for recording in recordings],
            },
            "facts": {
                name: [row[number] for row in self.differing_facts]
                for number, name in enumerate(("fact", "before", "after"))
            },
        }

    def _picture(self) -> str:
        facts = self._tables()["facts"]
        return html_table(facts) if self.differing_facts else ""

    @property
    def work_ratio(self) -> float:
        """Return the work of the second run in a given time, as a multiple of the first run's."""
        before, after = self.workers
        return after / before / self.ratio

    @property
    def unseen(self) -> float | None:
        """Return the largest change of the step that these recordings cannot tell from noise."""
        return None if self.high is None else self.high / self.ratio - 1


def compare(before: RunLike | Sequence[RunLike], after: RunLike | Sequence[RunLike]) -> Comparison:
    """Say whether the steps of two runs of the same work differ by more than noise.

    - `before`, `after`: a run or its path, or several recordings of that side as a list. Several
      tell smaller changes from noise.

    Times are seconds; `ratio` is after over before, with `low` and `high` its 95 % interval.

        fw.compare("before.run", "after.run").ratio
        fw.compare(["a1.run", "a2.run"], ["b1.run", "b2.run"]).is_significant
    """
    sides = _recordings(before), _recordings(after)
    [first, *others], [second, *_] = sides
    refuse_copies(sides)
    for each in (*others, *sides[1]):
        refuse_other_work(first, each)
    work = equal_work(*sides)
    lengths_s = [
        [step_lengths_s(run) * scale for run, scale in zip(side, scales, strict=True)]
        for side, scales in zip(sides, work.scales, strict=True)
    ]
    are_one = any(itertools.starmap(are_one_recording, itertools.product(*sides)))
    found = [
        tuple(Recording(steps=len(lengths), step_s=usual_length_s(lengths)) for lengths in side)
        for side in lengths_s
    ]
    before_s, after_s = (geometric_mean(recording.step_s for recording in side) for side in found)
    ratio, noise = after_s / before_s, noise_of(lengths_s)
    off = None if noise is None else noise.off([1 / len(side) for side in lengths_s])
    low, high = (None, None) if off is None else (ratio * math.exp(-off), ratio * math.exp(off))
    # Find the facts in which recordings of one side differ, although they should be of one job.
    differing = [
        {name for again in side[1:] for name, *_ in _differing_facts(side[0], again)}
        for side in sides
    ]
    edge_bytes = None
    if len(first.flows) and len(second.flows):
        from fullwire.packets.flows import analyse_flows  # here: few runs hold packets

        of_first, of_second = (analyse_flows(run).payload_bytes_per_edge for run in (first, second))
        if of_first is not None and of_second is not None:
            edge_bytes = (of_first, of_second)
    return Comparison(
        before_s=before_s,
        after_s=after_s,
        before_steps=sum(map(len, lengths_s[0])),
        after_steps=sum(map(len, lengths_s[1])),
        before_recordings=found[0],
        after_recordings=found[1],
        ratio=ratio,
        low=low,
        high=high,
        is_significant=None if low is None or high is None else not low <= 1 <= high,
        differing_facts=_differing_facts(first, second),
        workers=(world(first), world(second)),
        passes=work.passes,
        has_unknown_passes=work.has_unknown_passes,
        samples=work.samples,
        edge_bytes=edge_bytes,
        sent_nothing=_sent_nothing(*sides),
        are_computed=tuple(any(run.provenance.is_computed for run in side) for side in sides),
        recordings_for_small=None if noise is None else noise.recordings_for(SMALL),
        noise=noise,
        notes=(
            *comparison_notes(
                sides, differing, is_significant=off is not None and abs(math.log(ratio)) > off
            ),
            *([OneOnBothSides()] if are_one else []),
            *(
                finding
                for run in itertools.chain(*sides)
                for finding in too_few_of_a_kind(kinds_of(run).unlike, run.place)
            ),
            *about_means(lengths_s, ratio),
        ),
    )


def _sent_nothing(before: Sequence[Run], after: Sequence[Run]) -> Literal["before", "after"] | None:
    """Return the side whose ranks sent nothing, where the other's have collectives.

    One worker has nobody to send to. A partial run may lack what was sent.
    """
    sends_before, sends_after = (
        any(len(run.collectives) for run in side) for side in (before, after)
    )
    quiet = after if sends_before else before
    is_known = all(world(run) > 1 and not may_have_sent(run) for run in quiet)
    if sends_before == sends_after or not is_known:
        return None
    return "after" if sends_before else "before"


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalLength:
    """The usual step of some recordings, and the 95 % interval of that of others like them."""

    step_s: float
    low_s: float | None  # None with too few steps
    high_s: float | None


def typical_length(runs: RunLike | Sequence[RunLike]) -> TypicalLength:
    """Return the length of a job's steps, from one recording or from several."""
    lengths_s = [step_lengths_s(run) for run in _recordings(runs)]
    step_s = geometric_mean(map(usual_length_s, lengths_s))
    noise = noise_of([lengths_s])
    if noise is None:
        return TypicalLength(step_s=step_s, low_s=None, high_s=None)
    times = math.exp(noise.off([1 / len(lengths_s)]))
    return TypicalLength(step_s=step_s, low_s=step_s / times, high_s=step_s * times)


def usual_length_s(lengths_s: Floats) -> float:
    """Return the usual one of some lengths: the mean of their middle half."""
    return float(middle_half(lengths_s).mean())


def paces_s(run: Run) -> Floats:
    """Return the time of each pass, from the begin of a step to the next's, without warm-up.

    Pauses between steps are in it, and long steps.
    """
    marks = marks_of_steps(run)
    if not len(marks):
        return np.zeros(0)
    numbers, place, ranks = np.unique(marks.step, return_inverse=True, return_counts=True)
    began_s = np.bincount(place, marks.start_ns.astype(np.float64)) / ranks * 1e-9
    shared = ranks == ranks.max()
    gaps_s = np.diff(began_s[shared]) / (passes_of_step(run) or 1)
    gaps_s = kinds_of(run).as_mean(numbers[shared][:-1], gaps_s)
    is_usual = gaps_s <= WARM_UP * np.median(gaps_s) if len(gaps_s) else np.zeros(0, bool)
    return np.asarray(gaps_s[int(np.argmax(np.append(is_usual, True))) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """The paces of recordings held against those of others."""

    before_s: float
    after_s: float
    ratio: float
    off: float  # the possible error of the ratio's logarithm

    @property
    def is_significant(self) -> bool:
        """Return whether they differ by more than noise."""
        return abs(math.log(self.ratio)) > self.off

    def around(self, step_s: float) -> tuple[float, float] | None:
        """Return the interval of a side's step.

        Its error is that of the ratio, divided by the square root of two.
        """
        if not math.isfinite(self.off):
            return None
        times = math.exp(self.off / math.sqrt(2))
        return step_s / times, step_s * times


def held_against(
    before: Sequence[Run],
    after: Sequence[Run],
    length_of: Callable[[Floats], float] = usual_length_s,
) -> Against:
    """Hold recordings of a job against others, by the time of a pass."""
    sides = [[paces_s(run) for run in side] for side in (before, after)]
    if not all(len(paces) for side in sides for paces in side):
        raise UsageError("expected a job that makes steps, got one without any")
    before_s, after_s = (geometric_mean(map(length_of, side)) for side in sides)
    noise = noise_of(sides, length_of)
    off = math.inf if noise is None else noise.off([1 / len(side) for side in sides])
    return Against(before_s=before_s, after_s=after_s, ratio=after_s / before_s, off=off)


def _recordings(side: RunLike | Sequence[RunLike]) -> tuple[Run, ...]:
    runs = tuple((given, with_own_time(opened(given))) for given in many(side))
    if not runs:
        raise UsageError("compare: expected at least one recording of each side")
    for given, run in runs:
        refuse_without_steps(run, name_of_run(given, run))
    return tuple(run for _, run in runs)


def noise_of(
    lengths_s: Sequence[Sequence[Floats]], length_of: Callable[[Floats], float] = usual_length_s
) -> Noise | None:
    """Return the noise from drifts and differences of recordings; None with too few steps.

    A side may have no recording with steps: its scatter is unknown then, and the other's counts.
    """
    lengths_s = [side for side in lengths_s if side]
    recordings = [lengths for side in lengths_s for lengths in side]
    if min(map(len, recordings), default=0) < FEWEST_STEPS:
        return None
    drifts = []  # The variance of the fifths' steps; one slow stretch among steady steps is none.
    for lengths in recordings:
        of_pieces = _squares(
            np.log([length_of(piece) for piece in np.array_split(lengths, PIECES)])
        ) / (PIECES - 1)
        away = np.abs(np.log(lengths / np.median(lengths)))
        drifts.append(min(of_pieces, float(1.4826 * np.median(away)) ** 2))
    by_rule = ANEW**2 + float(np.mean(drifts))
    seen = sum(_squares(np.log([length_of(lengths) for lengths in side])) for side in lengths_s)
    freedom = RULE_COUNTS + sum(len(side) - 1 for side in lengths_s)
    return Noise((RULE_COUNTS * by_rule + seen) / freedom, freedom)


def step_lengths_s(run: Run) -> Floats:
    """Return the length of each step of the job, in order of time, without warm-up.

    Where steps are of several kinds, each counts in proportion to its own, as a mean step.
    """
    refuse_without_steps(run, run.place)
    marks = marks_of_steps(run)
    check_times(run, "steps", marks.start_ns, marks.end_ns)
    check_collectives(run)
    for rank in np.unique(marks.rank).tolist():
        steps_of(run, rank, marks.rows(marks.rank == rank))
    numbers, length_ns, _ = shared_steps(run)
    kinds = kinds_of(run)
    is_kept = kinds.kept(numbers, length_ns)
    lengths_s = kinds.as_mean(numbers, length_ns)[is_kept] * 1e-9
    if not middle_half(lengths_s).any():
        raise UsageError(f"{run.place}: expected steps that take time, got 0 s")
    check_steps(run.place, step=lengths_s)
    return np.asarray(lengths_s, np.float64)


def refuse_without_steps(run: Run, name: str) -> None:
    """Refuse a run that has no steps: as damaged if the table of steps is unreadable."""
    if ((run.spans.lane == "host") & (run.spans.name == "step")).any():
        return
    if damage := reasons(run.gaps, {"spans"}):
        raise DamagedInput(name, f"it has no steps left to compare. Missing: {damage[0]}")
    raise UsageError(f"{name}: it has no steps to compare")


def student(share: float, freedom: int) -> float:
    """Return how many standard deviations hold a share of Student's distribution (A&S 26.7.5)."""
    z = NormalDist().inv_cdf((1 + share) / 2)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def _squares(values: Floats) -> float:
    return float(np.square(values - values.mean()).sum())


def refuse_other_work(before: Run, after: Run) -> None:
    """Refuse two runs that differ in a fact which comparable runs share."""
    known, now_known = before.facts.known(), after.facts.known()
    for fact in REGISTRY.values():
        pair = known.get(fact.name), now_known.get(fact.name)
        if fact.must_match and None not in pair and pair[0] != pair[1]:
            raise UsageError(
                f"the runs cannot be compared: {fact.meaning} is {pair[0]!r} in one and "
                f"{pair[1]!r} in the other"
            )
    one, two = gradient_bytes(before) or 0, gradient_bytes(after) or 0
    if one and two and abs(one - two) > SAME_GRADIENTS * max(one, two):
        raise UsageError(
            f"the runs cannot be compared: a step of one has {show_bytes(one)} of gradients, "
            f"of the other {show_bytes(two)}: they train different models, or in another precision"
        )


def gradient_bytes(run: Run) -> int | None:
    """Return the bytes of the gradients that a rank has in a pass, if it has all of them."""
    table = run.gradients
    if not len(table):
        return None
    pairs, place = np.unique(np.stack([table.rank, table.step]), axis=1, return_inverse=True)
    totals = np.bincount(place.reshape(-1), table.bytes, pairs.shape[1])
    own = int(np.median(totals)) // passes_in_gradients(run)
    is_whole = world(run) == 1 or run.facts.buckets is not None or sums_just_so_much(run, own)
    return own if is_whole else None  # else a rank may have a shard of them


def _differing_facts(before: Run, after: Run) -> tuple[tuple[str, str, str], ...]:
    # Measured facts always differ. People change the setup, so its facts are compared.
    measured = {fact.name for fact in REGISTRY.values() if fact.kind is tuple}
    known, now_known = before.facts.known(), after.facts.known()
    names = sorted({*known, *now_known} - measured - _ALWAYS_DIFFER)
    pairs = [
        (
            name,
            str(known.get(name, _lacking(before, name))),
            str(now_known.get(name, _lacking(after, name))),
        )
        for name in names
    ]
    return tuple((name, old, new) for name, old, new in pairs if old != new)


def _lacking(run: Run, name: str) -> str:
    """Say what it means that a run lacks a fact: most foreign files tell only some of them."""
    is_none = REGISTRY[name].may_be_none and run.provenance.origin != "imported"
    return NONE if is_none else UNKNOWN
