"""Did it get better, and by more than noise?

Two runs are compared by the length of their steps; a step of a job is as long as on its slowest
rank. The interval of the ratio comes from resampling both runs' steps with a fixed seed, so it is
the same every time it is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullwire.errors import UsageError
from fullwire.model.cost import Floats
from fullwire.model.facts import REGISTRY
from fullwire.model.run import Run

RESAMPLES = 2_000
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
    edge_bytes: tuple[float, float] | None  # of an iteration, where both runs have packets


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
        differing_facts=_differing_facts(before, after), edge_bytes=_edge_bytes(before, after),
    )  # fmt: skip


def _edge_bytes(before: Run, after: Run) -> tuple[float, float] | None:
    """Return what an edge carries in an iteration of each run, if packets say it of both."""
    if not len(before.flows) or not len(after.flows):
        return None
    from fullwire.analysis.flows import analyse_flows  # here: few runs hold packets

    first = analyse_flows(before).payload_bytes_per_edge
    second = analyse_flows(after).payload_bytes_per_edge
    return None if first is None or second is None else (first, second)


def step_lengths_s(run: Run) -> Floats:
    """Return the length of each step of the job, in order of steps."""
    rows = np.flatnonzero((run.spans.lane == "host") & (run.spans.name == "step"))
    if not len(rows):
        raise UsageError(f"{run.provenance.source}: it has no steps to compare")
    numbers, place = np.unique(run.spans.step[rows], return_inverse=True)
    longest_ns = np.zeros(len(numbers), np.int64)
    np.maximum.at(longest_ns, place, run.spans.end_ns[rows] - run.spans.start_ns[rows])
    return np.asarray(longest_ns * 1e-9, np.float64)


def _ratio_interval(before: Floats, after: Floats) -> tuple[float, float]:
    random = np.random.default_rng(0)
    ratios = np.median(random.choice(after, (RESAMPLES, len(after))), axis=1) / np.median(
        random.choice(before, (RESAMPLES, len(before))), axis=1
    )
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def refuse_other_work(before: Run, after: Run) -> None:
    """Refuse two runs that differ in a fact which must match to compare them."""
    for fact in REGISTRY.values():
        pair = before.facts.get(fact.name), after.facts.get(fact.name)
        if fact.must_match and None not in pair and pair[0] != pair[1]:
            raise UsageError(
                f"the runs cannot be compared: {fact.meaning} is {pair[0]!r} in one and "
                f"{pair[1]!r} in the other"
            )


def _differing_facts(before: Run, after: Run) -> tuple[tuple[str, str, str], ...]:
    # What was measured differs always; how it was set up is what people changed.
    measured = {fact.name for fact in REGISTRY.values() if fact.kind is tuple}
    names = sorted({*before.facts, *after.facts} - measured - _ALWAYS_DIFFER)
    pairs = [(n, str(before.facts.get(n, "-")), str(after.facts.get(n, "-"))) for n in names]
    return tuple((name, old, new) for name, old, new in pairs if old != new)
