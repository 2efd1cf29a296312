"""How much work a step is: the passes whose gradients it adds up before they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fullwire.run.kinds import EARLIER, LAST, LATE_PART, kinds_of
from fullwire.run.run import Run

_ALMOST = 0.1  # of the passes: small sums come beside those of gradients


def passes_of_step(run: Run) -> float | None:
    """Return how many passes a step usually has; None where passes are missing.

    In a job with several kinds of steps it is their mean, each kind at its share.
    """
    if kinds := kinds_of(run).kinds:
        if any(kind.passes is None for kind in kinds):
            return None
        mean = sum(kind.share * (kind.passes or 0.0) for kind in kinds)
        return round(mean) if abs(mean - round(mean)) < 1e-6 else mean
    spans = run.spans
    is_pass = (spans.lane == "compute") & ((spans.name == LAST) | (spans.name == EARLIER))
    passes = spans.rows(is_pass & (spans.step >= 0))
    if not len(passes):
        return run.facts.marked_passes
    pairs = np.stack([passes.rank, passes.step])
    is_last = passes.name == LAST
    whole, place = np.unique(pairs, axis=1, return_inverse=True)
    counts, lasts = (
        np.bincount(place.reshape(-1), weights, whole.shape[1])
        for weights in (np.ones(len(passes)), is_last)
    )
    counts = counts[lasts == 1]  # other steps do more than accumulate
    return round(float(np.median(counts))) if len(counts) else None


def passes_add_up(run: Run) -> bool:
    """Say whether the passes of a step add up to one set of gradients, as far as a run tells."""
    return (run.facts.gradient_sets or 1) == 1


def hides_passes(run: Run) -> bool:
    """Say whether a run hides the passes of its steps, as a trace without autograd's marks does.

    So does what another program saw of communication alone: a capture, or a log of collectives. The
    recorder names each pass, unless the job computes none. A modelled step is known whole.
    """
    names = run.spans.name[run.spans.lane == "compute"]
    is_silent = not len(names) and run.provenance.origin != "imported"
    if is_silent or run.provenance.basis == "modelled":
        return False
    has_names = bool(((names == LAST) | (names == EARLIER)).any())
    return not has_names and run.facts.marked_passes is None


def passes_that_each_sum(run: Run) -> float:
    """Return the passes of a step that adds them up, where DDP sums in each of them; else 0.

    Then a step sends its gradients so many times. In a job with several kinds of steps it is their
    mean, and each kind does so.
    """
    passes = passes_of_step(run) or 1
    if passes <= 1 or run.facts.buckets is None or not passes_add_up(run):
        return 0
    kinds = kinds_of(run).kinds
    if not kinds:
        return passes if _sends_times(run, passes) else 0
    each_sums = all(_sends_times(run, kind.passes or 1, place) for place, kind in enumerate(kinds))
    return passes if each_sums else 0


def sums_once(run: Run) -> bool:
    """Say whether DDP sums all gradients once in each step, whatever its passes."""
    places = [*range(len(kinds_of(run).kinds))] or [None]
    return run.facts.buckets is not None and all(_sends_times(run, 1, place) for place in places)


def _sends_times(run: Run, passes: float, place: int | None = None) -> bool:
    """Say whether a step, or one of the kind at this place, sends its gradients so many times."""
    gradients, sums = run.gradients, run.collectives
    if not len(gradients):
        return False
    first = gradients.rank[0]
    made = gradients.rows(gradients.rank == first)
    if place is not None:
        made = made.rows(kinds_of(run).of(made.step) == place)
    if not len(made):
        return False
    own = passes_in_gradients(run)
    steps, of_made = np.unique(made.step, return_inverse=True)
    is_sum = (sums.rank == first) & (sums.op == "allreduce") & np.isin(sums.step, steps)
    sent = np.bincount(np.searchsorted(steps, sums.step[is_sum]), sums.bytes[is_sum], len(steps))
    whole = np.bincount(of_made, made.bytes) / own
    times = float(np.median(sent[whole > 0] / whole[whole > 0]))
    return abs(times - passes) <= _ALMOST * passes


def sums_just_so_much(run: Run, gradient_bytes: int) -> bool:
    """Say whether steps sum as many bytes among all ranks as a rank has gradients, and little else.

    So does a script that sums its gradients itself. Where the model is split over the ranks they
    send other things, or sum other sizes.
    """
    table, workers = run.collectives, run.facts.workers or 1
    sums = table.rows((table.step >= 0) & (table.op != "barrier"))
    if set(sums.op.tolist()) != {"allreduce"}:
        return False
    ranks_of: dict[str, set[int]] = {}
    for group, rank in zip(sums.group.tolist(), sums.rank.tolist(), strict=True):
        ranks_of.setdefault(group, set()).add(rank)
    if any(len(ranks) < workers for ranks in ranks_of.values()):
        return False
    first = sums.rows(sums.rank == sums.rank[0])
    summed = np.bincount(np.unique(first.step, return_inverse=True)[1].reshape(-1), first.bytes)
    return gradient_bytes <= float(np.median(summed)) <= (1 + _ALMOST) * gradient_bytes


def passes_in_gradients(run: Run) -> int:
    """Return how many passes of a step the gradients of a run are of.

    A recording has those of the last pass. A trace has all buckets that leave a step, so it has
    those of each pass where DDP sends them without `no_sync`.
    """
    spans, gradients = run.spans, run.gradients
    marks = spans.rows((spans.lane == "host") & (spans.name == EARLIER))
    if not len(marks) or not len(gradients):
        return 1
    marks = marks.rows((marks.rank == gradients.rank[0]) & np.isin(marks.step, gradients.step))
    counts = []
    for step in np.unique(marks.step).tolist():
        mine = marks.rows(marks.step == step)
        made = gradients.rows((gradients.rank == gradients.rank[0]) & (gradients.step == step))
        over_ns = np.sort(mine.end_ns + (mine.end_ns - mine.start_ns) // LATE_PART)
        place = np.searchsorted(over_ns, made.ready_ns)
        bytes_ = np.bincount(place, made.bytes, len(mine) + 1)
        are_alike = bytes_.min() >= (1 - _ALMOST) * bytes_.max()
        counts.append(len(bytes_) if are_alike else 1)
    return round(float(np.median(counts))) if counts else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualWork:
    """How the work of a step differs between two sides, and what makes their times comparable."""

    passes: tuple[float, float] | None  # of a step, if they differ
    has_unknown_passes: bool  # of a run: then its steps may be other work
    samples: tuple[int, int] | None  # of a worker in a pass, if they differ
    scales: tuple[tuple[float, ...], tuple[float, ...]]  # of each recording's step


def equal_work(before: Sequence[Run], after: Sequence[Run]) -> EqualWork:
    """Return what scales the steps of two sides to one pass of as many samples as the first had."""
    sides = before, after
    known = [[passes_of_step(run) or 0 for run in side] for side in sides]
    has_other_passes = 0 not in known[0] + known[1] and len({*known[0], *known[1]}) > 1
    samples = [[run.facts.pass_samples or 0 for run in side] for side in sides]
    has_other_samples = 0 not in samples[0] + samples[1] and len({*samples[0], *samples[1]}) > 1
    scales = [
        tuple(
            (samples[0][0] / taken if has_other_samples else 1.0)
            / (passes if has_other_passes else 1)
            for passes, taken in zip(*each, strict=True)
        )
        for each in zip(known, samples, strict=True)
    ]
    return EqualWork(
        passes=(known[0][0], known[1][0]) if has_other_passes else None,
        has_unknown_passes=any(hides_passes(run) for run in (*before, *after)),
        samples=(samples[0][0], samples[1][0]) if has_other_samples else None,
        scales=(scales[0], scales[1]),
    )
