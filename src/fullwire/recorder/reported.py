"""Metrics of a job: those that its ranks report, and those that it prints; and its gradient noise.

Ranks mostly report the same metrics, so each name comes from the lowest rank that reports it. Its
times are on the run's clock. A metric without a step of its own has the number of steps that had
ended. Of a job that was started again, earlier attempts give the metrics with a step of their own:
where the last attempt went on, the number of its steps does not tell.

The squared gradients of ranks are averaged; the mean's is that of the lowest rank. No mean is
longer than its parts, so a communication hook that sums and does not divide shows itself: its
"mean" is then divided by the number of ranks.

The samples of a step are those that all ranks took from their loaders since the step before, as a
mean over steps: batches may differ, and steps times their mean are all samples.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.files import named_by_folder
from fullwire.recorder.inside.gradients import ADDS, BEGINS
from fullwire.recorder.inside.journal import Note
from fullwire.recorder.inside.metrics import EVENTS_SUFFIX, value_of
from fullwire.recorder.journals import Journal
from fullwire.recorder.printed import SUFFIX
from fullwire.recorder.steps import OUTSIDE, Steps
from fullwire.run.facts import Facts
from fullwire.run.run import Events, Metrics, Noise, Whole

_NOISE = Note.OWN_NOISE, Note.MEAN_NOISE, Note.SHARD_NOISE
KINDS = (*_NOISE, Note.SAMPLES, Note.FORWARD, Note.BACKWARD)
# So small a share of steps that took nothing, as where a thread reads, leaves the mean as it is.
_FEW_WITHOUT = 0.1
_ALIKE = 0.1  # of the samples of a step: rows that differ less from them are samples
_MOST_STEPS = 0.9  # of several passes: a few, such as the first, may make more sets
_EVER = 2**63 - 1
_PARTS = 4  # of a run, in each of which a steady program takes about as much


class Reported:
    """Takes ranks one by one, in order."""

    def __init__(self) -> None:
        self._samples: list[float | None] = []  # of a step of each rank
        self._taken: list[Whole] = []  # samples of each step of each rank, where it took some
        self._passes: list[float] = []  # of a step of each rank, where it has some
        self._sets: list[int] = []  # of gradients, of a step of each rank that has several passes
        self._names: set[str] = set()
        self._metrics: list[Metrics] = []
        self._own: dict[int, list[float]] = defaultdict(list)
        self._mean: dict[int, tuple[int, float]] = {}  # passes and squared norm, by step
        self._shards: dict[int, list[float]] = defaultdict(list)
        self._first: tuple[Steps, int] | None = None
        self._ranks = 0
        self._took: list[range] = []  # the job's steps that each rank took

    def add_earlier(self, journal: Journal, shift_ns: int) -> None:
        """Take the metrics with a step that the next rank had reported in an earlier attempt."""
        names = {number: name for number, name in _named(journal) if name not in self._names}
        if names:
            self._metrics.append(_metrics(journal, names, None, shift_ns))

    def add(
        self,
        journal: Journal,
        steps: Steps,
        notes: Mapping[int, Whole],
        shift_ns: int,
        first_step: int = 0,
    ) -> None:
        """Take what one rank reported: its journal, and all of its notes of `KINDS`.

        `first_step` is the job's step that is the first of a rank that joined later.
        """
        self._ranks += 1
        self._took.append(range(first_step, first_step + len(steps)))
        if self._first is None or not len(self._first[0]):  # a rank without steps tells no clock
            self._first = steps, shift_ns
        taken = _of_training(notes[Note.SAMPLES], notes[Note.BACKWARD], steps)
        self._samples.append(_mean_samples(taken, notes[Note.FORWARD], steps))
        by_step = _samples_by_step(taken, steps)
        self._taken += [by_step] if by_step.any() else []
        passes = _by_step(notes[Note.BACKWARD], steps)
        self._passes += [float(np.median(passes[passes > 0]))] if passes.any() else []
        self._sets += _sets_of_gradients(notes[Note.BACKWARD], steps)
        fresh = {number: name for number, name in _named(journal) if name not in self._names}
        if fresh:
            self._names |= set(fresh.values())
            self._metrics.append(_metrics(journal, fresh, steps, shift_ns))
        own, mean, shards = (notes[kind] for kind in _NOISE)
        for at, (_, _, bits) in zip(_ended(steps, own), own.tolist(), strict=True):
            self._own[first_step + at].append(value_of(bits))
        for at, (passes, _, bits) in zip(_ended(steps, mean), mean.tolist(), strict=True):
            self._mean.setdefault(first_step + at, (passes, value_of(bits)))
        for at, (passes, _, bits) in zip(_ended(steps, shards), shards.tolist(), strict=True):
            self._shards[at].append(value_of(bits))
            if len(self._shards[at]) == self._ranks:
                self._mean[at] = (passes, sum(self._shards[at]))

    def metrics(self, directories: Sequence[Path], workers: int | None = 0) -> Metrics:
        """Return the metrics of all ranks, and those that the job printed, with samples so far.

        `workers` is None where some joined later: then the samples so far are unknown. 0 stands for
        the ranks that were read.
        """
        tables = list(self._metrics)
        if self._first is not None:
            steps, shift_ns = self._first
            printed = read_printed(
                directories,
                shift_ns,
                lambda times_ns: np.searchsorted(steps.end_ns, times_ns, side="right"),
            )
            tables.append(printed.rows(~np.isin(printed.name, list(self._names))))
        table = Metrics.joined(tables)
        return replace(table, samples=self._samples_at(table, workers))

    def _samples_at(self, table: Metrics, workers: int | None) -> Floats:
        """Return the samples that all workers took up to the step of each metric.

        A metric of a step may be told before its optimizer has ended. Any other step of its own
        counts something else, or goes on from an earlier attempt: the steps that had ended count.
        """
        unknown = np.full(len(table), np.nan)
        if workers is None or self._first is None or not self._taken or not self.rank_samples:
            return unknown
        steps, shift_ns = self._first
        count = min(map(len, [steps.end_ns, *self._taken]))
        so_far = np.cumsum(sum(each[:count] for each in self._taken), dtype=float)
        if not so_far.any():
            return unknown
        # Batches that are cut into steps, and those of the first step, count as in the mean.
        so_far *= self.rank_samples * (workers or self._ranks) * count / so_far[-1]
        ended = np.searchsorted(steps.end_ns + shift_ns, table.time_ns, side="right")
        at = np.where(table.step == ended + 1, table.step, ended)
        is_known = (at <= count) & (table.time_ns >= steps.start_ns[0] + shift_ns)
        return np.where(is_known, np.append(0.0, so_far)[np.minimum(at, count)], unknown)

    def events(self, directories: Sequence[Path]) -> Events:
        """Return what an elastic job told of its workers and checkpoints, in order."""
        shift_ns = 0 if self._first is None else self._first[1]
        rows: list[tuple[int, str, str, int]] = []
        for directory in directories:
            for path in sorted(directory.glob(f"*{EVENTS_SUFFIX}")):
                *whole, _ = path.read_text().split("\n")  # the last line may be torn
                for line in whole:
                    time_ns, kind, ranks, duration_ns = json.loads(line)
                    rows.append((time_ns + shift_ns, kind, ",".join(map(str, ranks)), duration_ns))
        times_ns, kinds, ranks, durations_ns = (
            zip(*sorted(rows), strict=True) if rows else ((),) * 4
        )
        return Events(
            time_ns=np.array(times_ns, np.int64),
            kind=np.array(kinds, object),
            ranks=np.array(ranks, object),
            duration_ns=np.array(durations_ns, np.int64),
        )

    @property
    def rank_samples(self) -> float | None:
        """The samples that a rank takes in a step, as a mean: one may read those of others."""
        if not self._samples or None in self._samples:
            return None
        taken = sum(samples for samples in self._samples if samples) / self._ranks
        return taken or None

    @property
    def _rank_passes(self) -> float:
        return float(np.median(self._passes)) if self._passes else 1.0

    def facts(self, workers: int) -> Facts:
        """Return the samples and the sets of gradients of a step of so many workers."""
        passes = Facts(gradient_sets=max(self._sets, default=None))
        if self.rank_samples is None:
            return passes
        return passes | Facts(
            step_samples=max(1, round(self.rank_samples * (workers or self._ranks))),
            pass_samples=max(1, round(self.rank_samples / self._rank_passes)),
        )

    def noise(self) -> Noise:
        """Return the gradient noise of the steps that all ranks of that time noted."""
        took = {at: sum(at in steps for steps in self._took) for at in self._mean}
        steps = [at for at in sorted(self._mean) if len(self._own[at]) == took[at]]
        ranks = np.array([took[at] for at in steps], np.int64)
        own = np.array([float(np.mean(self._own[at])) for at in steps])
        mean = np.array([self._mean[at][1] for at in steps])
        if len(steps) and np.median(mean) > np.median(own):  # a sum, and no mean
            mean = mean / ranks**2
        samples = (self.rank_samples or 0) / self._rank_passes
        return Noise(
            step=np.array(steps, np.int64),
            ranks_squared_norm=own,
            mean_squared_norm=mean,
            samples=np.array([round(self._mean[at][0] * samples) for at in steps], np.int64),
            ranks=ranks,
        )


def _by_step(notes: Whole, steps: Steps, *, of_numbers: bool = False) -> Whole:
    """Count the notes in each step, or add up their numbers."""
    step = steps.of(notes[:, 1])
    weights = notes[step != OUTSIDE, 0] if of_numbers else None
    return np.bincount(step[step != OUTSIDE], weights, len(steps)).astype(np.int64)


def _sets_of_gradients(backward: Whole, steps: Steps) -> list[int]:
    """Return the most sets of gradients of a step with several passes, if any shows them.

    A tenth of these steps may make more.
    """
    backward = backward[np.argsort(backward[:, 1], kind="stable")]
    step = steps.of(backward[:, 1])
    is_inside = step != OUTSIDE
    did, step = backward[is_inside, 0], step[is_inside]
    passes, shows = (np.bincount(step, by, len(steps)) for by in (None, did > 0))
    of_first = did[np.searchsorted(step, np.arange(len(steps))[passes > 1])]
    begun = np.bincount(step, did == BEGINS, len(steps))[passes > 1] + (of_first == ADDS)
    begun = begun[shows[passes > 1] > 0]
    if not len(begun):
        return []
    return [max(1, int(np.quantile(begun, _MOST_STEPS, method="lower")))]


def _samples_by_step(taken: Whole, steps: Steps) -> Whole:
    """Return the samples of each step, where the first one has those taken shortly before it.

    A batch of training that is taken between two steps, as after an evaluation, is of the later
    one. An elastic job hands out the first batch before anything begins the first step. A program
    may also have taken batches of later steps by then. So what came before fills the first step up
    to the largest other one.
    """
    by_step = _by_step(taken, steps, of_numbers=True)
    if len(by_step) > 1:
        between = taken[(steps.of(taken[:, 1]) == OUTSIDE) & (taken[:, 1] > steps.start_ns[0])]
        later = np.searchsorted(steps.start_ns, between[:, 1])
        np.add.at(by_step, later[later < len(by_step)], between[later < len(by_step), 0])
        before = int(taken[taken[:, 1] < steps.start_ns[0], 0].sum())
        most = int(by_step[1:].max())
        by_step[0] = max(int(by_step[0]), min(int(by_step[0]) + before, most))
    return by_step


def _of_training(taken: Whole, backward: Whole, steps: Steps) -> Whole:
    """Return the notes of samples without those of evaluations.

    An evaluation goes through its loader without a backward pass, up to the next batch of any other
    loader. One loader for all evaluations is used in several pauses between steps, and in no step.
    Where a rank notes no backward pass at all, batches of training are those taken in steps.
    """
    if not len(taken):
        return taken
    taken = taken[np.argsort(taken[:, 1], kind="stable")]
    is_inside = steps.of(taken[:, 1]) != OUTSIDE
    later = np.searchsorted(steps.start_ns, taken[:, 1])
    is_kept = np.empty(len(taken), bool)
    is_kept[:] = is_inside | (later == 0)
    if not len(backward):
        return taken[is_kept]
    times_ns = np.append(taken[:, 1], _EVER)
    by_way = np.argsort(taken[:, 2], kind="stable")
    _, begin, of_way = np.unique(taken[by_way, 2], return_index=True, return_inverse=True)
    first, last = by_way[begin], by_way[np.append(begin[1:], len(taken)) - 1]
    passed = np.sort(backward[:, 1])
    trains = np.searchsorted(passed, times_ns[first]) < np.searchsorted(passed, times_ns[last + 1])
    if is_inside.any():
        trains &= np.maximum.reduceat(is_inside[by_way], begin) | (later[first] == later[last])
    is_kept[by_way] = trains[of_way.reshape(-1)]
    return taken[is_kept]


def _mean_samples(taken: Whole, forward: Whole, steps: Steps) -> float | None:
    """Return the samples that a rank takes in a step, as a mean; None where nothing tells.

    A step may cut one batch into passes, or take several. A rank that took none at all may have
    those of another. The first step may take batches of later steps as well, so it counts as no
    more than the largest other one. A last step that takes less had the rest, if the rest is less
    than a step's samples. All steps between these two must have taken the same.

    A program that cuts a batch into several steps takes nothing in most of them. Its mean is right
    from one taking to the last one. One that takes several steps with a whole batch looks alike. So
    where many steps took nothing, the rows that its forward passes were given tell. Without them,
    or where the other steps did not take steadily, a step's part of what was read is unknown. One
    that reads ahead in each epoch takes several batches first, and none in the last steps: all its
    samples are those of all its steps.
    """
    by_step = _samples_by_step(taken, steps)
    if not len(taken) or not len(by_step):
        return 0.0
    ahead = 0
    if len(by_step) > 1:
        most = int(by_step[1:].max())
        ahead = max(int(by_step[0]) - most, 0)
        by_step[0] -= ahead
        if ahead < most and by_step[-1] and (by_step[1:-1] == most).all():
            by_step[-1] += min(ahead, most - int(by_step[-1]))
    takes = np.flatnonzero(by_step)
    if not len(takes):
        return None
    if len(takes) == len(by_step):
        return float(by_step.mean())
    if len(takes) < (1 - _FEW_WITHOUT) * len(by_step):
        parts = np.array([part.mean() for part in np.array_split(by_step, _PARTS)])
        mean = float(by_step.mean())
        if parts.min() < mean / 2 or parts.max() > 2 * mean:
            return None
        if len(takes) < 2:
            return None
        batches = _samples_by_step(np.column_stack([taken[:, :1] > 0, taken[:, 1:]]), steps)[takes]
        reads_ahead = not ahead and batches[0] > np.median(batches)
        between = slice(None) if reads_ahead else slice(takes[0], takes[-1])
        rows = float(_by_step(forward, steps, of_numbers=True)[between].mean())
        mean = float(by_step[between].mean())
        again = (takes[-1] - takes[0]) / (len(takes) - 1)  # steps with each batch
        if abs(rows - mean * again) <= _ALIKE * mean:
            return rows
        return mean if abs(rows - mean) <= _ALIKE * mean else None
    return float(by_step[takes[0] : takes[-1]].mean()) if len(takes) > 1 else None


def _ended(steps: Steps, notes: Whole) -> list[int]:
    """Return the step at whose end each note was taken."""
    return [*map(int, np.searchsorted(steps.end_ns, notes[:, 1]))]


def _named(journal: Journal) -> Iterator[tuple[int, str]]:
    """Yield the number and the name of each metric; one of several folders is named after it."""
    defined = [*journal.defined("metric")]
    kept = [metric for metric in defined if metric.get("folder")]  # older recorders told none
    full_names = named_by_folder([(Path(metric["folder"]), metric["name"]) for metric in kept])
    name_of = dict(zip([metric["number"] for metric in kept], full_names, strict=True))
    for metric in defined:
        yield metric["number"], name_of.get(metric["number"], metric["name"])


def _metrics(
    journal: Journal, names: dict[int, str], steps: Steps | None, shift_ns: int
) -> Metrics:
    """Return the metrics of these names; without steps, only those with a step of their own."""
    blocks = (block.rows for block in journal.blocks())
    rows = np.concatenate(
        [
            np.empty((0, 4), np.int64),
            *(block[np.isin(block[:, 0], (Note.METRIC, Note.METRIC_STEP))] for block in blocks),
        ]
    )
    is_metric = rows[:, 0] == Note.METRIC
    has_step = is_metric & ~np.concatenate([[True], is_metric])[:-1]  # its step stands before it
    step = np.searchsorted([] if steps is None else steps.end_ns, rows[:, 2], side="right")
    step[has_step] = rows[np.flatnonzero(has_step) - 1, 1]
    chosen = (is_metric if steps is not None else has_step) & np.isin(rows[:, 1], list(names))
    return Metrics(
        step=step[chosen],
        name=np.array([names[number] for number in rows[chosen, 1].tolist()], object),
        value=rows[chosen, 3].copy().view(float),
        time_ns=rows[chosen, 2] + shift_ns,
    )


def read_printed(
    directories: Sequence[Path], shift_ns: int, count_steps: Callable[[Any], Any]
) -> Metrics:
    """Return the metrics that jobs printed, with times on the run's clock."""
    rows: list[tuple[int | None, str, float, int]] = []
    for directory in directories:
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            *whole, _ = path.read_text().split("\n")  # a full disk may cut the last line
            for line in whole:
                values: dict[str, Any] = json.loads(line)
                time_ns = int(values.pop("monotonic_ns"))
                told = values.pop("step", None)
                # A fraction, as of "0.001k", is no step: the number of steps so far counts then.
                step = int(told) if told is not None and float(told).is_integer() else None
                rows += [(step, name, float(value), time_ns) for name, value in values.items()]
    steps, names, numbers, times_ns = zip(*rows, strict=True) if rows else ((), (), (), ())
    all_ns = np.array(times_ns, np.int64)
    counted = count_steps(all_ns).tolist()
    pairs = zip(steps, counted, strict=True)
    return Metrics(
        step=np.array([count if step is None else step for step, count in pairs], np.int64),
        name=np.array(names, object),
        value=np.array(numbers, float),
        time_ns=all_ns + shift_ns,
    )
