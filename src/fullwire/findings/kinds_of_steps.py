"""The kinds of a job's steps in words: how many there are, and what the steps of each do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from fullwire.findings.finding import Finding
from fullwire.run.kinds import FEWEST, Kind, sums_of
from fullwire.units import show_bytes

_ALIKE = 0.01  # of the larger figure: kinds that differ by less in it have other names


class KindOfSteps(Finding):
    """One kind of steps: its share of the steps, how long such a step takes, and what it does."""

    template = "{share:.0%} take {step_s:time}, with {does}"

    share: float
    step_s: float
    does: str


class SeveralKinds(Finding):
    """The steps of a job are of several kinds, by what they do."""

    template = "Steps are of {count} kinds: {kinds:;}. The usual step is their mean."

    count: int
    kinds: tuple[KindOfSteps, ...]


class TooFewOfAKind(Finding):
    """Some steps do other work than the rest, and are too few for a kind of their own."""

    template = (
        "{run:?{run}: }{count} {count:step does|steps do} other work than the rest, and "
        "{count:takes|take} another time. A kind of steps needs {fewest} of them. So {count:it "
        "counts|they count} like any other step, and another recording may find another usual "
        "step. A longer recording tells the kinds apart."
    )

    count: int
    fewest: int = FEWEST
    run: str | None = None  # where several are asked about


class StepAddsUpPasses(Finding):
    """A step adds up the gradients of several passes before the optimizer runs."""

    template = "A step adds up the gradients of {passes:.3g} passes{is_mean:? in the mean}."

    passes: float
    is_mean: bool = False  # of several kinds of steps


class StepMakesSetsOfGradients(Finding):
    """The passes of a step are of several models, or of a closure that clears gradients."""

    template = (
        "A step has {passes:.3g} passes{is_mean:? in the mean}, and not all of their gradients "
        "seem to add up: some are of other parameters, or are cleared, changed or used before the "
        "next pass."
    )

    passes: float
    is_mean: bool = False  # of several kinds of steps


def about_passes(passes: float, *, add_up: bool, is_mean: bool = False) -> Finding:
    """Say what the passes of a step with several do."""
    kind = StepAddsUpPasses if add_up else StepMakesSetsOfGradients
    return kind(passes=passes, is_mean=is_mean)


def names_of(kinds: Sequence[Kind]) -> tuple[str, ...]:
    """Name each kind of steps by the first figure in which all of them differ."""
    sent_bytes = sums_of(kinds)
    named = (
        ([kind.passes for kind in kinds], lambda passes: _counted(passes, "pass", "passes")),
        (sent_bytes, _sent),
        ([kind.gradients for kind in kinds], lambda few: _counted(few, "gradient", "gradients")),
    )
    for figures, words in named:
        known = [figure for figure in figures if figure is not None]
        apart = (high - low > _ALIKE * high for low, high in pairwise(sorted(known)))
        if len(known) == len(kinds) and all(apart):
            return tuple(map(words, known))
    return tuple(
        f"{'' if kind.passes is None else _counted(kind.passes, 'pass', 'passes') + ' and '}"
        f"{_counted(kind.gradients, 'gradient', 'gradients')}, {_sent(sent)}"
        for kind, sent in zip(kinds, sent_bytes, strict=True)
    )


def too_few_of_a_kind(unlike: int, run: str | None = None) -> Iterator[TooFewOfAKind]:
    """Say how many steps do other work and are too few for a kind, if any are."""
    if unlike:
        yield TooFewOfAKind(count=unlike, run=run)


def told_kinds(kinds: Sequence[Kind], steps_s: Sequence[float]) -> SeveralKinds:
    """Say what kinds of steps there are, with the time of a step of each."""
    return SeveralKinds(
        count=len(kinds),
        kinds=tuple(
            KindOfSteps(share=kind.share, step_s=step_s, does=does)
            for kind, step_s, does in zip(kinds, steps_s, names_of(kinds), strict=True)
        ),
    )


def _counted(count: float, one: str, several: str) -> str:
    return f"{count:.4g} {one if count == 1 else several}"


def _sent(size_bytes: float) -> str:
    return f"{show_bytes(size_bytes)} sent" if size_bytes else "nothing sent"
