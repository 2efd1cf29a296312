"""What differs between two runs: changes, what they should do, facts, and parts of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fullwire.findings.comparisons import SMALL
from fullwire.findings.finding import Finding
from fullwire.run.facts import UNKNOWN, shown_text

_MOST_FACTS = 4  # In a sentence.


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
    """The second run sends gradients in another form, by a hook or packed on the wire."""

    template = "{hook}"

    hook: str


class ChangedPasses(Finding):
    """The second run adds up the gradients of several passes before it sends them."""

    template = "gradients summed over {passes:.4g} passes"

    passes: float


class ChangedBackend(Finding):
    """The second run has another backend."""

    template = "backend {backend}"

    backend: str


class Verified(Finding):
    """The prediction for the second run, and its measurement."""

    template = (
        "Predicted {predicted_s:time}{low_s:? ({low_s:time} to {high_s:time})}"
        "{full_s:?, {full_s:time} with full links,} with {changes:list}, measured "
        "{measured_s:time}: {off:.1%} off{low_s:?, {holds:inside|OUTSIDE} the interval}."
    )

    changes: tuple[Finding, ...]
    predicted_s: float
    low_s: float | None  # None if one prediction has no interval
    high_s: float | None
    full_s: float | None
    measured_s: float
    off: float
    holds: bool


# ---- the facts and the parts ---------------------------------------------------------------------


class FactChanged(Finding):
    """A fact of the jobs that differs."""

    template = "{name} {before} -> {after}"

    name: str
    before: str
    after: str


class PartChanged(Finding):
    """A part of the account that differs much."""

    template = "{label} {before_s:time} -> {after_s:time}"

    label: str
    before_s: float
    after_s: float


class FactsChanged(Finding):
    """The facts that differ."""

    template = "Changed: {facts:list}{more:?, and {more} more}."

    facts: tuple[FactChanged, ...]
    more: int


class FactsNotCompared(Finding):
    """The facts that one run alone tells: whether they changed is unknown."""

    template = "Known of one run alone: {facts:list}{more:?, and {more} more}."

    facts: tuple[FactChanged, ...]
    more: int


class SentNothing(Finding):
    """One side has no collectives in its steps, and the other has some."""

    template = (
        "The {is_first:first|second} run has no collectives, and the {is_first:second|first} run "
        "has some: what a step spends on them is part of the difference."
    )

    is_first: bool


class OneOnBothSides(Finding):
    """A recording was given before the change and after it."""

    template = "One recording is on both sides. It tells nothing about a change."


class SidesAreComputed(Finding):
    """The times of one side, or of both, come from a model."""

    template = (
        "{are_both:Both runs are|{is_first:The first run is|The second run is}} simulated: "
        "{are_both:their|its} steps were computed and not measured."
    )

    is_first: bool
    are_both: bool


class PartsChanged(Finding):
    """The parts of a step that became much shorter or longer."""

    template = (
        "Of a {of_passes:pass|step}: {parts:list}. Every other part changed by less than "
        "{rest:.0%} of the shorter {of_passes:pass|step}."
    )

    parts: tuple[PartChanged, ...]
    rest: float
    of_passes: bool


class PartsAsBefore(Finding):
    """No part of a step became much shorter or longer."""

    template = (
        "Each part of a {of_passes:pass|step} changed by less than {rest:.0%} of the shorter "
        "{of_passes:pass|step}."
    )

    rest: float
    of_passes: bool


def about_changes(
    facts: Sequence[tuple[str, str, str]],
    parts: Sequence[tuple[str, float, float]],
    steps_s: tuple[float, float],
    *,
    of_passes: bool,
) -> Iterator[Finding]:
    """Yield what differs between two runs: facts of the jobs, and parts of the step.

    `facts` and `parts` are names or labels, with the values before and after. `steps_s` are the
    steps before and after. The shorter one is the measure of a part, so the same parts are named
    whichever run comes first.
    """
    told = [
        FactChanged(name=name, before=shown_text(name, old), after=shown_text(name, new))
        for name, old, new in facts
    ]
    told.sort(key=lambda each: len(each.before) + len(each.after))  # long ones are for -v
    unknown = [each for each in told if UNKNOWN in (each.before, each.after)]
    changed = [each for each in told if each not in unknown]
    for kind, named in ((FactsChanged, changed), (FactsNotCompared, unknown)):
        if named:
            first = tuple(named[:_MOST_FACTS])
            yield kind(facts=first, more=len(named) - len(first))
    if not parts:
        return
    much = [part for part in parts if abs(part[2] - part[1]) >= SMALL * min(steps_s)]
    if not much:
        yield PartsAsBefore(rest=SMALL, of_passes=of_passes)
        return
    much.sort(key=lambda each: -abs(each[2] - each[1]))
    yield PartsChanged(
        parts=tuple(PartChanged(label=name, before_s=old, after_s=new) for name, old, new in much),
        rest=SMALL,
        of_passes=of_passes,
    )
