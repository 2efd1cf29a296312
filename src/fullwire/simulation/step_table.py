"""The moments of the steps that all ranks of a run share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from fullwire.collectives.cost import Floats
from fullwire.errors import DamagedInput, UsageError
from fullwire.run.kinds import kinds_of
from fullwire.run.run import Collectives, Gradients, Run, Spans, Whole
from fullwire.run.usual import shared_steps
from fullwire.simulation import groups

MOST_NS = 2**61  # seventy years on any clock, and sums of two still fit 64 bits
MOST_BYTES = 2**50  # of one gradient
_LOOKED_AT = 20  # steps, for how long other collectives are exposed

# The marks that a what-if needs, and how PyTorch's profiler writes them.
_NEEDED = {
    "step": ("marks of steps", "profiler.step() in the loop"),
    "backward": (
        "marks of backward passes",
        "ProfilerActivity.CPU, if no CUDA graph holds the passes",
    ),
}


@dataclass(frozen=True, eq=False, slots=True)
class Steps:
    """The moments of the steps that all ranks share: a row per rank, a column per step."""

    ranks: Whole
    numbers: Whole
    start_ns: Whole
    end_ns: Whole
    backward_ns: Whole
    computed_ns: Whole  # the end of the backward pass
    ready_ns: Whole  # with a third axis, the gradients in their order
    bytes: Whole
    usual: NDArray[np.bool_]  # the steps that enter the means
    waits_ns: Whole | int = 0  # that were left out of the moments after them

    @property
    def length_ns(self) -> Floats:
        """Return the length of each step, on the mean of its ranks."""
        return np.asarray((self.end_ns + self.waits_ns - self.start_ns).mean(axis=0))

    @property
    def looked_at(self) -> Whole:
        """Return the places of the usual steps in the middle, which are examined one by one."""
        places = np.flatnonzero(self.usual)
        first = max(0, len(places) // 2 - _LOOKED_AT // 2)
        return places[first : len(places) // 2 + _LOOKED_AT // 2 + 1]

    def mean_of_rounds_ns(self, run: Run, own_ns: Whole) -> int:
        """Return a worker's own mean step in a round, from its own time in each of these steps.

        A trace shows no gradients in a round's other steps, so these steps lack them. They send
        nothing, and may lack an optimizer: a worker alone takes the whole of their time.
        """
        summing_ns = float(own_ns[self.usual].mean())
        numbers, lengths_ns, _ = shared_steps(run)
        is_usual = kinds_of(run).usual(numbers, lengths_ns)
        is_silent = is_usual & ~np.isin(numbers, run.gradients.step)
        if not is_silent.any():
            return round(summing_ns)
        share = float(is_silent.sum() / is_usual.sum())
        return round(summing_ns + (float(lengths_ns[is_silent].mean()) - summing_ns) * share)

    def side_by_side(self) -> Steps:
        """Return the steps as if all ranks began each at the same moment."""
        ahead_ns = self.start_ns - np.round(self.start_ns.mean(axis=0)).astype(np.int64)
        return replace(
            self,
            start_ns=self.start_ns - ahead_ns,
            end_ns=self.end_ns - ahead_ns,
            backward_ns=self.backward_ns - ahead_ns,
            computed_ns=self.computed_ns - ahead_ns,
            ready_ns=self.ready_ns - ahead_ns[:, :, None],
        )


def table_of_steps(run: Run) -> Steps:
    """Return the moments of a run's whole steps; refuse a run that has none, or impossible ones."""
    marks = _spans_named(run, "host", "step")
    if run.facts.stages is not None and len(np.unique(run.spans.rank)) < run.facts.stages:
        _refuse(
            run,
            "an earlier version wrote one stage of this step of a pipeline, which does not "
            "tell when other stages wait: ask the run that it was predicted from",
        )
    # A backward pass is one span, or a mark over its kernels.
    is_mark = (run.spans.lane == "host") & (run.spans.name == "backward")
    has_marks = is_mark.any()
    backwards = run.spans.rows(is_mark) if has_marks else _spans_named(run, "compute", "backward")
    gradients = run.gradients
    ranks, numbers = _shared_steps(run, marks, backwards)
    # Times that run backwards and gradients without bytes make every answer wrong. The check avoids
    # absolute values: that of the smallest whole number is itself.
    spans = run.spans
    too_far = (spans.start_ns < -MOST_NS) | (spans.end_ns > MOST_NS)
    bad_spans = (spans.end_ns < spans.start_ns) | too_far
    is_size = (gradients.bytes > 0) & (gradients.bytes <= MOST_BYTES)
    too_far = (gradients.ready_ns < -MOST_NS) | (gradients.ready_ns > MOST_NS)
    for table, is_bad in ((spans, bad_spans), (gradients, ~is_size | too_far)):
        rows = np.flatnonzero(is_bad)
        rows = rows[is_in(table.rows(rows), ranks, numbers)]
        if len(rows):
            step, rank = table.step[rows[0]], table.rank[rows[0]]
            place = f"{run.place}, step {step} of rank {rank}"
            raise DamagedInput(place, "times or gradient sizes that cannot be")
    start_ns, end_ns = _in_table(marks, ranks, numbers, "start_ns", "end_ns")
    begin_ns, computed_ns = _in_table(backwards, ranks, numbers, "start_ns", "end_ns")
    kept = gradients.rows(is_in(gradients, ranks, numbers))
    if not _is_ordered(kept.rank, kept.step, kept.order):
        kept = kept.rows(np.lexsort((kept.order, kept.step, kept.rank)))
    shape = (len(ranks), len(numbers), -1)
    ready_ns, sizes = kept.ready_ns.reshape(shape), kept.bytes.reshape(shape)
    if not len(kept):  # one without bytes stands for those that stay with their ranks
        ready_ns, sizes = computed_ns[:, :, None], np.zeros((*computed_ns.shape, 1), np.int64)
    return Steps(
        ranks=ranks,
        numbers=numbers,
        start_ns=start_ns,
        end_ns=end_ns,
        backward_ns=begin_ns,
        computed_ns=computed_ns,
        ready_ns=ready_ns,
        bytes=sizes[0, len(numbers) // 2],
        usual=kinds_of(run).usual(numbers, (end_ns - start_ns).mean(axis=0)),
    )


def _shared_steps(run: Run, marks: Spans, backwards: Spans) -> tuple[Whole, Whole]:
    """Find the steps that are whole on every rank: marked, one backward, the usual gradients."""
    counts = [_counted(table) for table in (marks, backwards, run.gradients)]
    sizes, times = np.unique(np.fromiter(counts[2].values(), np.int64), return_counts=True)
    usual = int(sizes[np.argmax(times)]) if len(sizes) else 0
    whole = [
        key
        for key, count in counts[0].items()
        if count == counts[1].get(key, 0) == 1 and counts[2].get(key, 0) == usual
    ]
    if not whole or not (usual or groups.splits_model(run, backwards)):
        rank, number = next(iter(counts[0]))
        backward, gradients = counts[1].get((rank, number), 0), counts[2].get((rank, number), 0)
        _refuse(
            run,
            "a what-if needs one backward pass with gradients in a step; "
            f"step {number} of rank {rank} has {backward} and {gradients} gradients",
        )
    ranks = sorted({rank for rank, _ in whole})
    steps_of = [{number for key, number in whole if key == rank} for rank in ranks]
    shared = set.intersection(*steps_of)
    if not shared:  # some ranks ended before others began: those with most steps stand for them
        ranks, shared = _together(dict(zip(ranks, steps_of, strict=True)))
    return np.array(ranks, np.int64), np.array(sorted(shared), np.int64)


def _together(steps_of: Mapping[int, set[int]]) -> tuple[list[int], set[int]]:
    """Return the ranks that have most steps together, and these steps."""
    longest = sorted(steps_of, key=lambda rank: (-len(steps_of[rank]), rank))
    best, together = longest[:1], steps_of[longest[0]]
    ranks, shared = best, together
    for rank in longest[1:]:
        if steps := shared & steps_of[rank]:
            ranks, shared = [*ranks, rank], steps
            if len(ranks) * len(shared) >= len(best) * len(together):
                best, together = ranks, shared
    return sorted(best), together


def _counted(table: Spans | Gradients) -> dict[tuple[int, int], int]:
    """Count rows by rank and step; those of a step usually stand together, and count at once."""
    is_new = np.ones(len(table), bool)
    is_new[1:] = (table.rank[1:] != table.rank[:-1]) | (table.step[1:] != table.step[:-1])
    first = np.flatnonzero(is_new)
    length = np.diff(np.append(first, len(table)))
    counts: dict[tuple[int, int], int] = {}
    for rank, step, count in zip(
        table.rank[first].tolist(), table.step[first].tolist(), length.tolist(), strict=True
    ):
        counts[rank, step] = counts.get((rank, step), 0) + count
    return dict(sorted(counts.items()))


def is_in(
    table: Spans | Gradients | Collectives, ranks: Whole, numbers: Whole
) -> NDArray[np.bool_]:
    """Say which rows are of these ranks and steps."""
    return np.isin(table.rank, ranks) & np.isin(table.step, numbers)


def _is_ordered(*columns: Whole) -> bool:
    """Return whether rows are in order by these columns, the first first, as most were written."""
    is_equal = np.ones(max(len(columns[0]) - 1, 0), bool)
    for column in columns:
        if (is_equal & (column[1:] < column[:-1])).any():
            return False
        is_equal &= column[1:] == column[:-1]
    return True


def _in_table(table: Spans, ranks: Whole, numbers: Whole, *columns: str) -> list[Whole]:
    kept = table.rows(is_in(table, ranks, numbers))
    kept = kept.rows(np.lexsort((kept.step, kept.rank)))
    shape = (len(ranks), len(numbers))
    return [getattr(kept, name).reshape(shape) for name in columns]


def _spans_named(run: Run, lane: str, name: str) -> Spans:
    rows = run.spans.rows((run.spans.lane == lane) & (run.spans.name == name))
    if not len(rows):
        needed, how = _NEEDED[name]
        hint = (
            f". A profiler's trace has them with {how}"
            if run.provenance.origin == "imported"
            else ""
        )
        _refuse(run, f"a what-if needs {needed}, and this run has none{hint}")
    return rows


def _refuse(run: Run, problem: str) -> NoReturn:
    """Refuse a run: as damaged if a part of it is missing, else as one that cannot answer."""
    source = run.place
    if run.missing:
        raise DamagedInput(source, f"{problem}; missing: {run.missing[0]}")
    raise UsageError(f"{source}: {problem}")
