"""Samples to a target by batch, held against MLPerf's reference convergence points.

    .venv/bin/python -m validation.reference_points ../shared/data/accuracy/mlperf_rcp.csv

A point is a batch, and the mean that several runs needed to reach the target. The script
takes, for each benchmark, the round with the most batches, the latest of several. It leaves out one
batch after the other and predicts it from the rest: at most 500 of a benchmark, spread evenly. A
benchmark needs three batches. Then each pair of batches that differ by 2 to 8 times predicts those
at over twice the larger, or under half of the smaller one. Of many such predictions, about 1,000 of
one benchmark are made and 20,000 in all, spread evenly.

The last line is JSON: benchmarks, points, median and 90th percentile of the relative error, and its
median over the largest batches. `coverage` is the share of points in their 90 % interval.
`coverage_beyond` is that of the pairs, as a mean over benchmarks: one of many batches has many
pairs.

The unit differs between benchmarks: epochs, samples, tokens, and once steps. A `unit` that names
samples, tokens or steps is believed. MLPerf writes "Epochs to converge" where it counts samples or
steps, too. So points of one benchmark in epochs, or in no known unit, may lie far apart: each unit
then has a curve of its own. One of them that falls clearly as the batch grows counts steps, unless
its values may be epochs. Steps times the batch are samples. Rows of one batch are one point, by
their runs. Only the published table renews `results/reference-points.json`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from fullwire.cli.telling import progress
from fullwire.convergence.batches import BatchLaw, Point, fit_batches
from fullwire.errors import DamagedInput
from validation import arguments, results, tables

FEWEST = 3  # batches
FALLING = -0.2  # the slope of log samples by log batch; true samples never fall
MOST_EPOCHS = 1000  # no benchmark goes over its data so often: larger values are another unit
OTHER_UNIT = 20.0  # times: no benchmark's samples grow so much from one point to the next
_PAIR, _BEYOND = (2.0, 8.0), 2.0  # times: how far two batches are apart, and others from both
_MOST_PAIRS, _MOST_FAR, _MOST_FAR_IN_ALL = 100, 1000, 20_000  # predictions beyond: each takes 1 ms
_MOST_LEFT_OUT = 500  # of one benchmark
TABLE = "accuracy/mlperf_rcp.csv"
COLUMNS = ("suite", "benchmark", "batch", "n", "olympic_mean", "std")

UNITS = {
    "epochs": re.compile(r"\bepochs?\b", re.IGNORECASE),
    "steps": re.compile(r"\b(steps?|iterations?|updates?)\b", re.IGNORECASE),
    "samples": re.compile(r"\b(samples?|sequences?|examples?|images?|tokens?)\b", re.IGNORECASE),
}

Curve: TypeAlias = tuple[Point, ...]
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """One batch of a benchmark, predicted from the others."""

    benchmark: str
    batch: float
    true: float
    predicted: float
    low: float
    high: float
    is_largest: bool

    @property
    def error(self) -> float:
        """The relative error."""
        return self.predicted / self.true - 1

    @property
    def is_inside(self) -> bool:
        """Whether the true value lies in the interval."""
        return self.low <= self.true <= self.high


def curves(path: Path) -> dict[str, Curve]:
    """Read one curve for each benchmark, and unit of it."""
    rounds: dict[str, dict[str, dict[str, list[Point]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for row in tables.read(path, COLUMNS):
        mean, batch = row.number("olympic_mean"), row.number("batch")
        unit = _unit(row["unit"])
        point = Point(
            batch=batch,
            samples=mean * (batch if unit == "steps" else 1),
            runs=max(1, int(row.number("n", otherwise=1, may_be_zero=True))),
            spread=row.number("std", otherwise=0, may_be_zero=True) / mean,
        )
        counted = "samples" if unit == "steps" else unit
        rounds[row["benchmark"]][row["suite"]][counted].append(point)
    found: dict[str, Curve] = {}
    for benchmark, of_suites in rounds.items():
        candidates: dict[str, Curve] = {}
        for suite in sorted(of_suites):  # a later round takes the place of an equal one
            of_suite = [
                curve for unit, points in of_suites[suite].items() for curve in _told(points, unit)
            ]
            for number, curve in enumerate(sorted(of_suite, key=len, reverse=True)):
                name = f"{benchmark} ({number + 1})" if number else benchmark
                if len(curve) >= max(FEWEST, len(candidates.get(name, ()))):
                    candidates[name] = curve
        found |= candidates
    return found


def _unit(text: str) -> str:
    """Return the unit that a cell names; "" for none that is known."""
    return next((unit for unit, words in UNITS.items() if words.search(text)), "")


def _told(points: list[Point], unit: str) -> list[Curve]:
    """Return the curves of points in a unit, which are guessed apart where it does not tell."""
    if unit == "samples":
        return [_merged(points)]
    least = MOST_EPOCHS if unit == "epochs" else 0.0
    return [_in_samples(_merged(part), least) for part in _units(points)]


def _merged(points: Iterable[Point]) -> Curve:
    """Return the points in order of their batches, those of one batch joined by their runs."""
    by_batch: dict[float, list[Point]] = defaultdict(list)
    for point in points:
        by_batch[point.batch].append(point)
    return tuple(_joined(by_batch[batch]) for batch in sorted(by_batch))


def _joined(points: list[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    runs = np.array([point.runs for point in points])
    samples = np.array([point.samples for point in points])
    own = np.array([point.spread or 0.0 for point in points]) * samples
    mean = float(np.average(samples, weights=runs))
    variance = float(np.average(np.square(own) + np.square(samples - mean), weights=runs))
    return Point(
        batch=points[0].batch,
        samples=mean,
        runs=int(runs.sum()),
        spread=math.sqrt(variance) / mean,
    )


def _units(points: list[Point]) -> list[list[Point]]:
    """Divide points whose values are in units far apart."""
    by_value = sorted(points, key=lambda point: point.samples)
    parts: list[list[Point]] = [[]]
    for point in by_value:
        if parts[-1] and point.samples > OTHER_UNIT * parts[-1][-1].samples:
            parts.append([])
        parts[-1].append(point)
    return parts


def _in_samples(curve: Curve, least: float) -> Curve:
    """Return a curve that falls, with values above the least ones of steps, in samples."""
    batches, values = np.log([(point.batch, point.samples) for point in curve]).T
    may_be_steps = len(curve) > 1 and min(point.samples for point in curve) > least
    if not may_be_steps or np.polyfit(batches, values, 1)[0] > FALLING:
        return curve
    return tuple(replace(point, samples=point.samples * point.batch) for point in curve)


def left_out(curve: Curve, benchmark: str, done: Callable[[], None] | None = None) -> list[LeftOut]:
    """Predict each point of a curve from the others; of many points, some that are spread evenly.

    Each takes a fit to all others, so all of them would take time by the square of their number.
    The largest batch is always among them. `done` is told of each prediction.
    """
    found = []
    for point in _left_out_of(curve):
        law = fit_batches([other for other in curve if other is not point])
        found.append(_predicted(law, point, curve, benchmark))
        if done is not None:
            done()
    return found


def _left_out_of(curve: Curve) -> list[Point]:
    return [*_spread(curve[:-1], _MOST_LEFT_OUT - 1), curve[-1]]


def beyond(curve: Curve, benchmark: str, most: int = _MOST_FAR) -> list[LeftOut]:
    """Predict, from each two points of a curve, those that lie far beyond both.

    The predictions grow with the cube of the points. Of more than `most`, some are taken, from
    pairs and points that are spread evenly over all.
    """
    batches = np.array([point.batch for point in curve])
    pairs = []
    for first in curve:
        times = batches / first.batch
        others = np.flatnonzero((times >= _PAIR[0]) & (times <= _PAIR[1]))
        pairs += [(first, curve[place]) for place in others.tolist()]
    pairs = _spread(pairs, min(most, _MOST_PAIRS))
    found = []
    for first, second in pairs:
        is_far = (batches > _BEYOND * second.batch) | (batches < first.batch / _BEYOND)
        chosen = _spread(np.flatnonzero(is_far).tolist(), max(1, most // len(pairs)))
        if chosen:
            law = fit_batches([first, second])
            found += [_predicted(law, curve[place], curve, benchmark) for place in chosen]
    return found


def _spread(items: Sequence[_Item], most: int) -> list[_Item]:
    """Return at most so many items, from places that are spread evenly."""
    count = min(most, len(items))
    return [items[int((place + 0.5) * len(items) / count)] for place in range(count)]


def _predicted(law: BatchLaw, point: Point, curve: Curve, benchmark: str) -> LeftOut:
    ends = law.samples(np.array([point.batch]), variance=point.variance)
    middle, low, high = (float(end[0]) for end in ends)
    return LeftOut(
        benchmark=benchmark,
        batch=point.batch,
        true=point.samples,
        predicted=middle,
        low=low,
        high=high,
        is_largest=point is curve[-1],
    )


def coverage_beyond(of_curves: Mapping[str, Curve]) -> float | None:
    """Return the share of `beyond` inside their intervals, as a mean over benchmarks.

    It is None where no benchmark has such batches.
    """
    most = max(1, min(_MOST_FAR, _MOST_FAR_IN_ALL // max(1, len(of_curves))))
    with progress("benchmarks predicted beyond their batches") as told:
        far = []
        for done, (name, curve) in enumerate(of_curves.items(), 1):
            far.append(beyond(curve, name, most))
            if told is not None:
                told(done, len(of_curves))
    shares = [float(np.mean([each.is_inside for each in those])) for those in far if those]
    return float(np.mean(shares)) if shares else None


def _print(those: list[LeftOut]) -> None:
    """Print the predictions of a benchmark at once: a table of many takes minutes."""
    for each in those:
        print(
            f"{each.benchmark:<18} batch {each.batch:>8g}  {each.true:>14,.5g}  predicted "
            f"{each.predicted:>14,.5g} ({each.low:,.5g} - {each.high:,.5g})  {each.error:+.1%}"
            f"{'' if each.is_inside else '  *'}",
            flush=True,
        )


def main() -> None:
    """Print each prediction, and the figures as JSON."""
    taken = arguments.parser(__doc__)
    taken.add_argument("points", type=Path)
    taken.add_argument("--json", action="store_true", help="print the last line only")
    asked = taken.parse_args()
    of_curves = curves(asked.points)
    of_benchmarks: dict[str, list[LeftOut]] = {}
    places = itertools.count(1)
    points = sum(len(_left_out_of(curve)) for curve in of_curves.values())
    with progress("batches predicted from the others") as told:
        for name, curve in of_curves.items():
            each = None if told is None else lambda: told(next(places), points)
            of_benchmarks[name] = left_out(curve, name, each)
            if not asked.json:
                _print(of_benchmarks[name])
    found = [each for those in of_benchmarks.values() for each in those]
    if not found:
        raise DamagedInput(asked.points, f"expected a benchmark with {FEWEST} batches, found none")
    errors = [each.error for each in found]
    spread = results.spread(errors)
    largest = [abs(each.error) for each in found if each.is_largest]
    figures = {
        "benchmarks": len(of_benchmarks),
        "points": len(found),
        "leave_one_out_median": spread["median"],
        "leave_one_out_p90": spread["p90"],
        "largest_batch_median": float(np.median(largest)),
        "coverage": sum(each.is_inside for each in found) / len(found),
        "coverage_beyond": coverage_beyond(of_curves),
    }
    print(json.dumps(figures, allow_nan=False), flush=True)
    if not asked.json:
        results.write(
            "reference-points",
            asked.points,
            TABLE,
            claim="Samples to a target follow E0 (1 + B/Bc): a batch is predicted from the others.",
            anchor=f"MLPerf's reference convergence points, {asked.points.name}, one batch left "
            "out at a time",
            measure="relative error of the samples to the target",
            **results.said_of(errors, [each.is_inside for each in found]),
            tables=[
                results.Table(
                    columns=["benchmark", "batches", "median error", "worst error", "in interval"],
                    rows=[
                        [
                            name,
                            len(those),
                            f"{np.median([abs(each.error) for each in those]):.1%}",
                            f"{max(abs(each.error) for each in those):.1%}",
                            f"{sum(each.is_inside for each in those)} of {len(those)}",
                        ]
                        for name, those in of_benchmarks.items()
                    ],
                )
            ],
        )


if __name__ == "__main__":
    arguments.run(main)
