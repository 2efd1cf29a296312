"""Did it get better, and by more than noise?

Two runs are compared by the median of their steps, warm-up aside; a step of a job is as long as on
its slowest rank. The interval of the ratio comes from resampling both runs' steps, several in a row
at a time, because neighbours resemble each other, with a fixed seed, so that it is the same every
time it is asked. What steps of one run cannot show is added: the same job, run again, is a little
faster or slower as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fullwire.analysis.account import typical_steps
from fullwire.analysis.transfers import recorded_ranks, stands_for_all, world
from fullwire.errors import UsageError
from fullwire.model.cost import Floats
from fullwire.model.facts import REGISTRY
from fullwire.model.run import Run
from fullwire.units import show_bytes

RESAMPLES = 2_000
AT_ONCE = 2_000_000  # steps that are resampled together: 16 MB
# Standard deviation of the ratio of two runs of one job. Of 20 pairs of labs with nothing changed
# between them whose lines were the limit, 16 differed by 1.1 % at most, the others by up to 5.5 %.
# Where processors were, by up to 17 %: such runs carry a warning, which is passed on.
RUN_TO_RUN = 0.01
SAME_GRADIENTS = 0.01  # totals that differ by more are of different models
_ALWAYS_DIFFER = {
    "recorder_s", "sampler_share", "capture_clocks", "captured_packets", "supposed_packets",
}  # fmt: skip
FEWEST_STEPS = 5  # below this, resampling says nothing about noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Median steps, their ratio after/before, and whether the difference is more than noise."""

    before_s: float
    after_s: float
    before_steps: int
    after_steps: int
    ratio: float
    low: float | None  # of the ratio, 95 %; None where there are too few steps
    high: float | None
    is_significant: bool | None
    differing_facts: tuple[tuple[str, str, str], ...]
    workers: tuple[int, int]
    edge_bytes: tuple[float, float] | None  # of an iteration, where both runs have packets
    warnings: tuple[str, ...]

    @property
    def work_ratio(self) -> float:
        """Return how many times the work the second run does in the same time."""
        before, after = self.workers
        return after / before / self.ratio


def compare(before: Run, after: Run) -> Comparison:
    """Compare the steps of two runs of the same work."""
    refuse_other_work(before, after)
    first, second = step_lengths_s(before), step_lengths_s(after)
    ratio = float(np.median(second) / np.median(first))
    low = high = None
    if min(len(first), len(second)) >= FEWEST_STEPS:
        low, high = _ratio_interval(first, second)
    return Comparison(
        before_s=float(np.median(first)), after_s=float(np.median(second)),
        before_steps=len(first), after_steps=len(second), ratio=ratio, low=low, high=high,
        is_significant=None if low is None or high is None else not low <= 1 <= high,
        differing_facts=_differing_facts(before, after), workers=(world(before), world(after)),
        edge_bytes=_edge_bytes(before, after), warnings=tuple(_warnings(before, after)),
    )  # fmt: skip


def _warnings(before: Run, after: Run) -> Iterator[str]:
    for run, which in ((before, "first"), (after, "second")):
        for sentence in run.missing:
            yield f"The {which} run is partial: {sentence}."
        if "warnings" in run.facts:
            yield f"Where the {which} run was recorded: {run.facts['warnings']}."
        here = len(recorded_ranks(run))
        if here < world(run) and not stands_for_all(run):
            yield f"Of the {which} run {here} of {world(run)} ranks are here: others may be slower."
    if before.facts.get("dilation", 1.0) != after.facts.get("dilation", 1.0):
        yield "The runs differ in dilation, and so in how fast their processors count as."


def _edge_bytes(before: Run, after: Run) -> tuple[float, float] | None:
    """Return what an edge carries in an iteration of each run, if packets say it of both."""
    if not len(before.flows) or not len(after.flows):
        return None
    from fullwire.analysis.flows import analyse_flows  # here: few runs hold packets

    first = analyse_flows(before).payload_bytes_per_edge
    second = analyse_flows(after).payload_bytes_per_edge
    return None if first is None or second is None else (first, second)


def step_lengths_s(run: Run) -> Floats:
    """Return the length of each step of the job, in order of time, without warm-up."""
    rows = np.flatnonzero((run.spans.lane == "host") & (run.spans.name == "step"))
    if not len(rows):
        raise UsageError(f"{run.provenance.source}: it has no steps to compare")
    numbers, place = np.unique(run.spans.step[rows], return_inverse=True)
    longest_ns = np.zeros(len(numbers), np.int64)
    np.maximum.at(longest_ns, place, run.spans.end_ns[rows] - run.spans.start_ns[rows])
    lengths_s = longest_ns[typical_steps(longest_ns)] * 1e-9
    if not np.median(lengths_s):
        raise UsageError(f"{run.provenance.source}: its steps take no time, so none is to compare")
    return np.asarray(lengths_s, np.float64)


def _ratio_interval(before: Floats, after: Floats) -> tuple[float, float]:
    random = np.random.default_rng(0)
    ratios = _medians(after, random) / _medians(before, random)
    ratio = float(np.median(after) / np.median(before))
    low, high = np.quantile(ratios, [0.025, 0.975]).tolist()
    beside = 1.96 * RUN_TO_RUN * ratio
    return ratio - math.hypot(ratio - low, beside), ratio + math.hypot(high - ratio, beside)


def _medians(lengths_s: Floats, random: np.random.Generator) -> Floats:
    """Return medians of steps drawn anew, in stretches of some that follow each other."""
    count = len(lengths_s)
    stretch = round(count ** (1 / 3))
    stretches, offsets = -(-count // stretch), np.arange(stretch)
    medians = []
    for first in range(0, RESAMPLES, drawn := max(1, AT_ONCE // count)):
        starts = random.integers(0, count, (min(drawn, RESAMPLES - first), stretches, 1))
        places = ((starts + offsets) % count).reshape(len(starts), -1)[:, :count]
        medians.append(np.median(lengths_s[places], axis=1))
    return np.concatenate(medians)


def refuse_other_work(before: Run, after: Run) -> None:
    """Refuse two runs that differ in a fact which must match to compare them."""
    for fact in REGISTRY.values():
        pair = before.facts.get(fact.name), after.facts.get(fact.name)
        if fact.must_match and None not in pair and pair[0] != pair[1]:
            raise UsageError(
                f"the runs cannot be compared: {fact.meaning} is {pair[0]!r} in one and "
                f"{pair[1]!r} in the other"
            )
    pair = gradient_bytes(before), gradient_bytes(after)
    if None not in pair and abs(pair[0] - pair[1]) > SAME_GRADIENTS * max(pair):  # type: ignore[operator,type-var]
        raise UsageError(
            f"the runs cannot be compared: a step of one has {show_bytes(pair[0])} of gradients, "  # type: ignore[arg-type]
            f"of the other {show_bytes(pair[1])}: they train different models"  # type: ignore[arg-type]
        )


def gradient_bytes(run: Run) -> int | None:
    """Return the bytes of the gradients that a rank has in a step, where it has all of them."""
    table = run.gradients
    if not len(table) or "buckets" not in run.facts:  # without DDP it may have a shard
        return None
    pairs, place = np.unique(np.stack([table.rank, table.step]), axis=1, return_inverse=True)
    totals = np.bincount(place.reshape(-1), table.bytes, pairs.shape[1])
    return int(np.median(totals))


def _differing_facts(before: Run, after: Run) -> tuple[tuple[str, str, str], ...]:
    # What was measured differs always; how it was set up is what people changed.
    measured = {fact.name for fact in REGISTRY.values() if fact.kind is tuple}
    names = sorted({*before.facts, *after.facts} - measured - _ALWAYS_DIFFER)
    pairs = [(n, str(before.facts.get(n, "-")), str(after.facts.get(n, "-"))) for n in names]
    return tuple((name, old, new) for name, old, new in pairs if old != new)
