"""Time to a target: the steps that a training needs, times the length of a predicted step.

Steps come from the metric's curve in recorded runs, and from the law of samples by batch. Codecs
multiply them. Workers that average their parameters every few steps end at a higher loss, so they
need the steps to a lower one. The intervals of all these and that of the step are independent, so
the squares of their logarithms add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fullwire.answers.conditions import (
    Asked,
    OneOrMany,
    Price,
    read_price,
    several,
    worker_count,
)
from fullwire.answers.fragments import only_runnable, only_shown
from fullwire.answers.samples_to_goal import (
    Averaged,
    Evidence,
    evidence,
    global_batch,
    lacks_curve,
    own_work,
)
from fullwire.answers.subjects import Conditions, gradient_bytes, named
from fullwire.collectives.cost import Floats
from fullwire.compression.codec import CODECS
from fullwire.compression.compressor import MoreSteps
from fullwire.compression.method import FLOAT_BYTES
from fullwire.convergence.batches import computing, excess
from fullwire.convergence.curves import Goal, read_goal
from fullwire.errors import UsageError
from fullwire.findings.finding import Finding
from fullwire.findings.targets import (
    BatchBelowWorkers,
    BatchIsUneven,
    BeyondTheCurve,
    Cheapest,
    CodecIsLate,
    CodecStepsMeasured,
    CodecStepsUnknown,
    FarBatches,
    FewerStepsThanLocal,
    IdealCompression,
    LocalStepsBeyondTheCurve,
    LocalStepsCost,
    SamplesCostAlike,
    SamplesCostApart,
    Setting,
    Soonest,
    StepLengthUnsure,
)
from fullwire.run.run import Run
from fullwire.simulation.conditions import CONDITIONS
from fullwire.simulation.grid import Grid, Predictions, Swept
from fullwire.units import count, ratio, shown
from fullwire.words import sentence

_AS_MANY = MoreSteps(1, 1, 1)


class Predicted(Protocol):
    """A what-if, as far as its rows are read here."""

    @property
    def predictions(self) -> Predictions:
        """Return the table."""

    @property
    def interval_s(self) -> tuple[Floats, Floats]:
        """Return the ends of each step's interval."""

    @property
    def grid(self) -> Grid:
        """Return the conditions."""


AnyPredicted = TypeVar("AnyPredicted", bound=Predicted)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ToTarget:
    """The time to a target of each row of a prediction."""

    goal: Goal
    batch: Floats
    steps: Floats
    time_s: Floats
    low_s: Floats
    high_s: Floats
    device_hours: Floats
    price: Price | None
    notes: tuple[Finding, ...]

    @property
    def cost(self) -> Floats | None:
        """The cost of each row, if a price was given."""
        return None if self.price is None else self.device_hours * self.price.amount

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Return the columns by name, as the rows of JSON have them."""
        columns = {
            "batch": self.batch,
            "steps": self.steps,
            "time_to_target_s": self.time_s,
            "device_hours": self.device_hours,
        }
        return columns if self.cost is None else columns | {"cost": self.cost}

    def interval_columns(self) -> dict[str, NDArray[np.float64]]:
        """Return the ends of the interval of each time."""
        return {"time_to_target_low_s": self.low_s, "time_to_target_high_s": self.high_s}

    def front(self) -> list[int]:
        """Return the rows that no other row beats in time and device-hours, soonest first.

        Rows that are equal in both beat none of each other.
        """
        order = np.lexsort((self.device_hours, self.time_s))
        time_s, hours = self.time_s[order], self.device_hours[order]
        best = np.minimum.accumulate(hours)
        is_new = np.append([True], best[1:] < best[:-1])
        first = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
        is_tied = (time_s == time_s[first]) & (hours == hours[first])
        return [int(row) for row in order[is_tied]]

    def soonest(self, count: int) -> list[int]:
        """Return the rows with the shortest times, of those that have one."""
        known = np.flatnonzero(~np.isnan(self.time_s))
        return [int(row) for row in known[np.argsort(self.time_s[known], kind="stable")][:count]]


def to_goal(
    predict: Callable[..., AnyPredicted],
    at_speeds: Callable[..., Swept],
    runs: Sequence[tuple[str, Run]],
    asked: Asked,
    conditions: Conditions,
    more: Mapping[str, OneOrMany],
) -> tuple[AnyPredicted, Predictions, tuple[Floats, Floats], ToTarget]:
    """Predict the time until a metric reaches its value.

    `predict` answers for the length of a step, with other workers than asked. A batch makes
    computing slower or faster for each number of workers. `at_speeds` predicts pairs of both.
    """
    if len(runs) != 1:
        raise UsageError(
            f"target: expected one run to predict, got {len(runs)}. --curve takes runs that show "
            "the metric at other batches"
        )
    [(name, run)] = runs
    price = read_price(asked.price)
    together = several(conditions.accumulate, lambda value: count(value, "accumulate"))
    if len(together) > 1:
        raise UsageError(
            "target: expected one value of --accumulate with a metric, got "
            f"{shown(conditions.accumulate)}"
        )
    batches = _counts(asked.global_batch, "global batch")
    if batches and conditions.workers is not None:
        sizes: tuple[int, ...] = several(conditions.workers, worker_count)
        first = predict(workers=sizes[0])
    else:
        first = predict()
        sizes = first.grid.workers
    many = [(name, run), *(named(asked.curve) if asked.curve else [])]
    goal = read_goal(str(asked.target))
    recorded_batch = _counts(asked.recorded_batch, "recorded batch")
    if lacks_curve(many, goal) and len(recorded_batch) == len(many) - 1:
        # A workload knows its own batch.
        recorded_batch = (global_batch(name, run), *recorded_batch)
    known = evidence(
        many,
        goal,
        recorded_batch=recorded_batch,
        critical_batch=asked.critical_batch,
        is_same_batch=not batches and sizes == (run.facts.workers,),
    )
    works = own_work(many, recorded_batch)
    law, own = computing([(work.run, work.most, work.time_s) for work in works]), works[0]
    passes = together[0] * own.passes  # of a whole step: `together` counts recorded steps
    predictions, between_s = first.predictions, first.interval_s
    speed = several(more.get("compute_speed") or 1, lambda value: ratio(value, "compute speed"))
    if batches:
        if len(speed) > 1:
            raise UsageError(f"compute speed: expected one with --global-batch, got {len(speed)}")
        most = _largest(np.array(batches), np.array(sizes)[:, None])
        own_s = float(law.time_s(np.array(own.most)))
        speeds = own_s / law.time_s(most / passes)
        predictions, between_s = _of_batches(partial(at_speeds, first), sizes, batches, speeds)
    whole = own.samples * passes
    batch = predictions["batch"] if batches else predictions["workers"] * whole
    batch = batch.astype(float)
    parameters = sum(gradient_bytes(run)) / FLOAT_BYTES
    needed = _needed(known, predictions, batch, parameters)
    workers = predictions["workers"]
    samples = _largest(batch, workers) / passes if batches else np.full(len(batch), own.most)
    notes = [*needed.notes, *_about_batches(known, batch, workers, is_asked=bool(batches))]
    if (np.abs(samples / own.most - 1) > 1e-9).any():
        notes.append(
            SamplesCostApart(runs=law.runs, start_s=law.start_s, sample_s=law.sample_s)
            if law.runs
            else SamplesCostAlike(run=name, samples=max(1, round(own.samples)))
        )
    own_s_of_step = law.time_s(samples) * own.passes / speed[0]
    share = np.minimum(own_s_of_step / predictions["step_s"], 1.0)
    doubt = law.doubt(samples) * share
    needed = replace(needed, notes=tuple(notes))
    predictions = predictions.of_several(together[0])
    between_s = between_s[0] * together[0], between_s[1] * together[0]
    times = _times(needed, predictions, between_s, doubt, passes, price)
    return first, predictions, between_s, times


def _counts(given: OneOrMany, what: str) -> tuple[int, ...]:
    return () if given is None else several(given, lambda value: count(value, what))


def _largest(batches: ArrayLike, workers: ArrayLike) -> Floats:
    """Return the samples of the worker that has the most: no sample is divided, and all wait."""
    return np.asarray(np.ceil(np.asarray(batches) / np.asarray(workers)), float)


def _about_batches(
    known: Evidence, batch: Floats, workers: Floats, *, is_asked: bool
) -> Iterator[Finding]:
    """Say how many settings have a batch far from recorded ones, or one that divides unevenly."""
    is_far = known.law.is_far(batch)
    if is_far.any():
        yield FarBatches(count=int(is_far.sum()), largest=known.law.largest)
    is_uneven = (batch % workers > 0) & (batch > workers)
    if is_asked and is_uneven.any():
        yield BatchIsUneven(count=int(is_uneven.sum()))


_MOST_PAIRS = 4096  # whose subjects are in memory together: a job with many gradients is large


def _of_batches(
    at_speeds: Callable[[Sequence[tuple[int, float]]], Swept],
    sizes: Sequence[int],
    batches: Sequence[int],
    speeds: Floats,
) -> Swept:
    """Predict each batch for each number of workers, which are the rows of `speeds`.

    Batches of which a worker has as many samples have one speed, and are predicted once. Rows that
    no job can run are left out of the table.
    """
    all_pairs = [
        (size, each) for size, row in zip(sizes, speeds.tolist(), strict=True) for each in row
    ]
    number_of = {pair: number for number, pair in enumerate(dict.fromkeys(all_pairs))}
    pairs = list(number_of)
    firsts = range(0, len(pairs), _MOST_PAIRS)
    parts = [at_speeds(pairs[first : first + _MOST_PAIRS]) for first in firsts]
    tables, ends_s = zip(*parts, strict=True)
    table = tables[0]
    numbers = np.reshape([number_of[pair] for pair in all_pairs], speeds.shape).T
    of_speed, of_workers = (list(table.axes).index(name) for name in ("compute_speed", "workers"))
    shapes = [tuple(len(values) for values in each.axes.values()) for each in tables]

    def placed(columns: Iterable[Floats]) -> Floats:
        """Put the axis of the workers, which now follows that of the batches, in its place."""
        each = [np.broadcast_to(column, at) for column, at in zip(columns, shapes, strict=True)]
        taken = np.take(np.concatenate(each, axis=of_speed), numbers, axis=of_speed)
        return np.moveaxis(np.squeeze(taken, axis=of_workers + 1), of_speed + 1, of_workers)

    axes = {name.replace("compute_speed", "batch"): values for name, values in table.axes.items()}
    axes |= {"batch": tuple(batches), "workers": tuple(sizes)}
    measures = {name: placed(each.measures[name] for each in tables) for name in table.measures}
    low_s, high_s = (
        placed(each[end].reshape(at) for each, at in zip(ends_s, shapes, strict=True)).reshape(-1)
        for end in (0, 1)
    )
    joined = only_runnable(replace(table, axes=axes, measures=measures, shown=None))
    return joined, only_shown(joined, (low_s, high_s))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Needed:
    """The samples that each row needs to a goal, and how far their logarithm may be off."""

    goal: Goal
    batch: Floats
    samples: Floats  # NaN where the curve cannot tell
    less: Floats
    more: Floats
    notes: tuple[Finding, ...]


def _needed(known: Evidence, predictions: Predictions, batch: Floats, parameters: float) -> _Needed:
    """Find the samples of each row: by its batch, its replicas and its codec.

    An ideal ratio changes no gradient. A codec that changes them needs steps that nobody can tell
    before a training with it has shown them. A single worker sends none, so no codec changes its
    gradients.
    """
    notes = list(known.notes)
    samples, low, high = known.law.samples(batch)
    more, less = np.log(high / samples), np.log(samples / low)
    local = _local_steps(known, predictions, batch, samples, parameters)
    if local is not None:
        rows = local.rows
        samples[rows] *= local.times[0]
        less[rows] = np.hypot(less[rows], np.log(local.times[0] / local.times[1]))
        more[rows] = np.hypot(more[rows], np.log(local.times[2] / local.times[0]))
        notes += local.notes
    place_of_codec = np.where(predictions["workers"] > 1, predictions.place("codec"), -1)
    for place, codec in enumerate(predictions.axes["codec"]):
        rows = place_of_codec == place
        if not rows.any():
            continue
        if codec.steps is None and not codec.is_free:
            samples[rows] = np.nan
        if codec.steps is None or codec.steps == _AS_MANY:
            continue
        plain = samples[rows] / batch[rows]
        steps, fewest, most = codec.steps.of(plain, codec.ratio)
        samples[rows] = steps * batch[rows]
        more[rows] = np.hypot(more[rows], np.log(most / steps))
        less[rows] = np.hypot(less[rows], np.log(steps / fewest))
        late, least_late, most_late = (
            float(end) for end in codec.steps.of(np.zeros(()), codec.ratio)
        )
        notes.append(
            CodecIsLate(codec=codec.label, steps=late, low=least_late, high=most_late)
            if late
            else CodecStepsMeasured(
                codec=codec.label,
                times=codec.steps.times,
                low=codec.steps.low,
                high=codec.steps.high,
            )
        )
    codecs = [
        codec
        for place, codec in enumerate(predictions.axes["codec"])
        if codec.steps is None and (place_of_codec == place).any()
    ]
    ideal = tuple(
        sorted(f"{codec.ratio:g}" for codec in codecs if codec.is_free and codec.ratio > 1)
    )
    if ideal:
        notes.append(IdealCompression(ratios=ideal))
    unknown = tuple(sorted({codec.label for codec in codecs if not codec.is_free}))
    if unknown:
        keys = sorted({label.partition(":")[0] for label in unknown} & CODECS.keys())
        measured = tuple(f"{key}:{settings}" for key in keys for settings in CODECS[key].steps)
        told = CodecStepsUnknown(codecs=unknown, measured=measured)
        if np.isnan(samples).all() and len(unknown) == len(predictions.axes["codec"]):
            raise UsageError(sentence(told).removesuffix("."))
        notes.append(told)
    return _Needed(
        goal=known.goal,
        batch=batch,
        samples=samples,
        less=less,
        more=more,
        notes=tuple(notes),
    )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _LocalSteps:
    """How many times the samples workers need that average their parameters every few steps."""

    rows: NDArray[np.bool_]  # of the predictions, that average in another way than recorded
    times: tuple[Floats, Floats, Floats]  # for these: in the middle, at least and at most
    notes: tuple[Finding, ...]


def _local_steps(
    known: Evidence, predictions: Predictions, batch: Floats, plain: Floats, parameters: float
) -> _LocalSteps | None:
    """Find the samples to the loss that training as recorded must reach; None if all are so.

    It is lower than the goal for workers that average more rarely. `plain` holds the samples of
    training as recorded.
    """
    workers, apart = (predictions.axes[axis] for axis in ("workers", "local_steps"))
    pairs = [Averaged(size, steps) for size in workers for steps in apart]
    place = predictions.place("workers") * len(apart) + predictions.place("local_steps")
    recorded = known.averaged
    is_local = np.array([pair != recorded and max(min(pair), min(recorded)) > 1 for pair in pairs])
    rows = is_local[place]
    if not rows.any():
        return None
    place, batch = place[rows], batch[rows]
    own = excess(replicas=recorded.workers, steps=recorded.local_steps, parameters=parameters)
    found = [
        excess(replicas=size, steps=steps, parameters=parameters).over(own) for size, steps in pairs
    ]
    ratios = np.array([(each.ratio, each.low, each.high) for each in found])
    later = _Later.of(known, ratios[is_local], batch)
    middle, least, most = (later.times(ratios[place, end], batch) for end in range(3))
    steps_each = np.array([pair[1] for pair in pairs])[place]
    all_steps = middle * plain[rows] / batch
    is_seldom = all_steps < steps_each
    is_untold = np.isnan(middle + least + most) | is_seldom
    notes: list[Finding] = []
    if is_untold.any():
        first = int(np.argmax(is_untold))
        size, steps = pairs[place[first]]
        why: Finding = LocalStepsBeyondTheCurve(
            local_steps=steps, workers=size, why=str(later.why_not)
        )
        if is_seldom[first]:
            fewest = float(all_steps[is_seldom & (place == place[first])].min())
            why = FewerStepsThanLocal(local_steps=steps, steps=fewest)
        if is_untold.all() and rows.all():
            raise UsageError(sentence(why))
        notes.append(BeyondTheCurve(why=why, count=int(is_untold.sum())))
    is_beyond = any(each.is_beyond for each, is_so in zip(found, is_local, strict=True) if is_so)
    notes.append(LocalStepsCost(is_beyond=is_beyond))
    return _LocalSteps(
        rows=rows,
        times=(np.where(is_untold, np.nan, middle), least, most),
        notes=tuple(notes),
    )


_MOST_RATIOS, _MOST_BATCHES = 64, 8  # more are read off between these


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Later:
    """How many times the samples a lower loss needs, by its ratio and the batch."""

    ratios: Floats
    batches: Floats
    logs: Floats  # of the times, a row for each ratio; NaN where the curve cannot tell
    why_not: UsageError | None

    @classmethod
    def of(cls, known: Evidence, ratios: Floats, batches: Floats) -> _Later:
        """Fit the law for each ratio, or for some between which the others are read off."""
        at_ratios, at_batches = _some(ratios, _MOST_RATIOS), _some(batches, _MOST_BATCHES)
        plain = np.log(known.law.samples(at_batches)[0])
        logs = np.full((len(at_ratios), len(at_batches)), np.nan)
        why_not: UsageError | None = None
        for place, ratio_ in enumerate(at_ratios.tolist()):
            try:
                law = known.law_of(_lower(known.goal, ratio_))
            except UsageError as error:
                why_not = why_not or error
            else:
                logs[place] = np.log(law.samples(at_batches)[0]) - plain
        return cls(ratios=at_ratios, batches=at_batches, logs=logs, why_not=why_not)

    def times(self, ratios: Floats, batches: Floats) -> Floats:
        """Return how many times the samples each ratio needs, at each batch."""
        by_batch = [
            np.interp(np.log(ratios), np.log(self.ratios), column) for column in self.logs.T
        ]
        place = np.interp(np.log(batches), np.log(self.batches), np.arange(len(self.batches)))
        below = place.astype(int)
        above = np.minimum(below + 1, len(self.batches) - 1)
        lower, upper = (np.choose(at, by_batch) for at in (below, above))
        return np.asarray(np.exp(lower + (place - below) * (upper - lower)))


def _some(values: Floats, most: int) -> Floats:
    """Return the distinct values, or so many from the least to the largest."""
    distinct = np.unique(values)
    return distinct if len(distinct) <= most else np.geomspace(distinct[0], distinct[-1], most)


def _lower(goal: Goal, ratio_: float) -> Goal:
    """Return the goal that plain training must reach, for a loss that is higher by this ratio."""
    if not (goal.is_least and goal.value > 0):
        raise UsageError(
            f"expected a loss above 0 that is to fall, like loss<=0.3, got {goal}: the published "
            "effect of local steps is one on losses"
        )
    return replace(goal, value=goal.value / ratio_)


def _times(
    needed: _Needed,
    predictions: Predictions,
    between_s: tuple[Floats, Floats],
    doubt: Floats,
    passes: float,
    price: Price | None,
) -> ToTarget:
    """Multiply the steps of each row by its length; `doubt` is that of its computing."""
    fewest = predictions["workers"] * passes  # a sample of each worker in each pass
    is_too_small = needed.batch < fewest
    if is_too_small.all():
        raise UsageError(
            f"global batch: expected {fewest.min():,.0f} samples or more, one of each worker in "
            f"each pass, got {needed.batch.max():,.0f}"
        )
    if is_too_small.any():
        needed = replace(
            needed,
            samples=np.where(is_too_small, np.nan, needed.samples),
            notes=(*needed.notes, BatchBelowWorkers(count=int(is_too_small.sum()))),
        )
    if np.isnan(needed.samples).all():
        reasons = (BeyondTheCurve, BatchBelowWorkers, CodecStepsUnknown)
        why = " ".join(sentence(note) for note in needed.notes if isinstance(note, reasons))
        raise UsageError(f"target: no setting has a time to it. {why}".removesuffix("."))
    steps = needed.samples / needed.batch
    time_s = steps * predictions["step_s"]
    is_known = ~np.isnan(between_s[0])
    step_low = np.where(is_known, np.maximum(between_s[0], 1e-12) / predictions["step_s"], 1.0)
    step_high = np.where(is_known, between_s[1] / predictions["step_s"], 1.0)
    less, more = (
        np.hypot(np.hypot(off, np.log(step)), doubt)
        for off, step in ((needed.less, step_low), (needed.more, step_high))
    )
    notes = needed.notes
    unsure = int((~is_known & ~np.isnan(time_s)).sum())
    if unsure:
        notes = (*notes, StepLengthUnsure(count=unsure))
    return ToTarget(
        goal=needed.goal,
        batch=needed.batch,
        steps=steps,
        time_s=time_s,
        low_s=time_s * np.exp(-less),
        high_s=time_s * np.exp(more),
        device_hours=time_s * predictions["workers"] / 3600,
        price=price,
        notes=notes,
    )


def answer(targets: ToTarget, predictions: Predictions) -> tuple[Finding, ...]:
    """Return the soonest setting, and the cheapest if it is another one."""
    soonest, cheapest = targets.soonest(1)[0], int(np.nanargmin(targets.device_hours))
    told: list[Finding] = [
        Soonest(goal=str(targets.goal), setting=_setting(targets, predictions, soonest))
    ]
    if cheapest != soonest:
        told.append(Cheapest(setting=_setting(targets, predictions, cheapest)))
    return tuple(told)


def _setting(targets: ToTarget, predictions: Predictions, row: int) -> Setting:
    varying = [axis for axis, values in predictions.axes.items() if len(values) > 1]
    names = [name for name in varying if name not in ("run", "batch", "codec")]
    if "codec" in varying:
        names.append("codec" if predictions["codec"][row] else "compression")
    if "workers" not in names:
        names.insert(0, "workers")
    hours = float(targets.device_hours[row])
    return Setting(
        conditions=tuple(CONDITIONS[name].worded(predictions[name][row]) for name in names),
        time_s=float(targets.time_s[row]),
        low_s=float(targets.low_s[row]),
        high_s=float(targets.high_s[row]),
        steps=float(targets.steps[row]),
        batch=float(targets.batch[row]),
        device_hours=hours,
        cost="" if targets.price is None else f", {targets.price.show(hours)}",
    )
