"""Fit the constants of `simulation/habits.py` to measured runs, and judge them by other sources.

    .venv/bin/python -m validation.plan_fit ../shared/data/llm/train_runs.csv

The fit minimizes the squared logarithm of predicted over measured time, where a far row counts less
(Huber). Sources weigh the same, and rows of one configuration as one. Each constant stays near the
operation's own time unless runs say otherwise (a ridge). `left_out` gives the constants without one
laboratory: its rows are then judged by constants that have not seen it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fullwire.clusters.cluster import Floats, Ints
from fullwire.simulation.group_times import GroupTimes
from fullwire.simulation.habits import DOUBTED, FITTED, Habits, habits_of
from fullwire.simulation.plan_columns import plans_of
from fullwire.simulation.step_price import Job, price
from validation import arguments
from validation.plan_rows import Measured, read

# How far each logarithm may go from 0 at the price of one standard deviation.
NAMES: Mapping[str, float] = {
    **{f"gemm {like} bf16": 0.25 for like in ("a100", "h100", "b200", "b300")},
    **{f"gemm {like} fp8": 0.25 for like in ("h100", "b200", "b300")},
    **{f"gemm {like} mxfp8": 0.25 for like in ("b200", "b300")},
    **{f"gemm {like} nvfp4": 0.25 for like in ("b200", "b300")},
    "gemm fsdp": 0.25, "gemm deepspeed": 0.25, "experts": 0.25,
    "attention a100": 0.25, "attention h100": 0.25, "attention b200": 0.25,
    "attention biased": 0.5, "attention plain": 0.25, "vector": 0.4, "vector fsdp": 0.4,
    "casts": 0.7, "tp": 0.25, "tp shown": 0.5, "ep": 0.5, "ep between": 0.5,
    "gathering deepspeed": 1.0, "slowdown": 0.7, "microbatch": 1.0, "step": 1.0, "launch": 0.7,
    "routing": 1.0, "expert launches": 1.0,
}  # fmt: skip
LABORATORIES = (
    ("megatron_sc21", "korthikanti"),
    ("bloom",),
    ("mtnlg",),
    ("mosaic",),
    ("mcore08",),
    ("nemo_",),
    ("mbridge",),
    ("mlperf",),
)
_FAR = 0.12  # from here on a row counts less
_STEP = 0.05
_TOGETHER = 100.0  # as if so many rows were independent of each other


class Remembered(GroupTimes):
    """Times of collectives, each counted once: no constant changes them."""

    def each_s(self, op: str, ranks: Ints, stride: Ints, sizes_bytes: Floats) -> Floats:
        """Time one message of each row."""
        key = (op, ranks.tobytes(), stride.tobytes(), sizes_bytes.tobytes())
        known = _KNOWN.setdefault(self.cluster.name + str(self.cluster.nodes), {})
        if key not in known:
            known[key] = super().each_s(op, ranks, stride, sizes_bytes)
        return known[key]


_KNOWN: dict[str, dict[tuple[str, bytes, bytes, bytes], Floats]] = {}


class RememberedJob(Job):
    """A job whose products of matrices are counted once: no constant changes them either."""

    def product_s(
        self,
        rows: Floats,
        columns: Floats,
        inner: Floats,
        groups: Floats | int,
        precision: str | None = None,
    ) -> Floats:
        """Time products of matrices."""
        sizes = b"".join(np.asarray(size).tobytes() for size in (rows, columns, inner, groups))
        key = (self.device.name, precision or self.precision, sizes)
        if key not in _PRODUCTS:
            _PRODUCTS[key] = super().product_s(rows, columns, inner, groups, precision)
        return _PRODUCTS[key]


_PRODUCTS: dict[tuple[str, str, bytes], Floats] = {}


class Batches:
    """Rows of one model, device, cluster and framework, priced together."""

    def __init__(self, rows: Sequence[Measured]) -> None:
        self.rows = rows
        self.shares = np.zeros((len(rows), len(DOUBTED)))  # of the last prediction
        self._known: dict[tuple[int, Habits], tuple[Floats, Floats]] = {}
        alike: dict[object, list[int]] = defaultdict(list)
        groups: dict[str, Remembered] = {}
        for number, row in enumerate(rows):
            here = repr(row.cluster)
            groups.setdefault(here, Remembered(row.cluster))
            key = (repr(row.architecture), row.device, here, row.layout.precision, row.framework)
            alike[key].append(number)
        self.batches = [
            (
                numbers,
                plans_of([rows[number].layout for number in numbers], first.architecture.layers),
                first,
                groups[repr(first.cluster)],
            )
            for numbers, first in ((numbers, rows[numbers[0]]) for numbers in alike.values())
        ]

    def predicted_s(self, constants: Mapping[str, float] = FITTED) -> Floats:
        """Return the time of each row's step."""
        result = np.zeros(len(self.rows))
        for place, (numbers, plans, first, groups) in enumerate(self.batches):
            precision, model = first.layout.precision, first.architecture
            habits = habits_of(first.device.family, precision, first.framework, constants)
            if model.moe is None:  # so that constants of experts leave the others as they were
                habits = replace(
                    habits, experts=1.0, ep=1.0, ep_between=1.0, routing_s=0.0, expert_s=0.0
                )
            if (place, habits) not in self._known:
                job = RememberedJob(
                    plans=plans,
                    model=model,
                    device=first.device,
                    groups=groups,
                    habits=habits,
                    precision=precision,
                )
                priced = price(job)
                self._known[place, habits] = priced.step_s, priced.shares
            result[numbers], self.shares[numbers] = self._known[place, habits]
        return np.asarray(result * [row.batch_share for row in self.rows])


def weights(rows: Sequence[Measured]) -> Floats:
    """Return the weight of each row: sources weigh the same, configurations within one too."""
    alike = Counter((row.source, row.group) for row in rows)
    groups: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        groups[row.source].add(row.group)
    shares = [1 / alike[row.source, row.group] / len(groups[row.source]) for row in rows]
    return np.array(shares, np.float64)


def fit(batches: Batches, rounds: int = 3) -> dict[str, float]:
    """Return the constants that fit all rows, beginning with those that are in use."""
    constants = {name: FITTED.get(name, 0.0) for name in NAMES}
    shares = weights(batches.rows)
    for _ in range(rounds):
        errors, slopes = _slopes(batches, constants)
        constants = _moved(constants, errors, slopes, shares)
    return constants


def left_out(batches: Batches) -> tuple[Floats, Floats]:
    """Return the time of each row and its shares by constants that have not seen the row.

    Each laboratory is left out of a fit in turn; its sources share people and software.
    """
    times_s = batches.predicted_s()
    shares = batches.shares.copy()
    for names in LABORATORIES:
        away = np.array([row.source.startswith(names) for row in batches.rows])
        if away.any() and not away.all():
            others = Batches([row for row in batches.rows if not row.source.startswith(names)])
            times_s[away] = batches.predicted_s(fit(others))[away]
            shares[away] = batches.shares[away]
    return times_s, shares


def _slopes(batches: Batches, constants: Mapping[str, float]) -> tuple[Floats, Floats]:
    measured = np.log([row.step_s for row in batches.rows])
    here = np.log(batches.predicted_s(constants))
    columns = [
        (np.log(batches.predicted_s({**constants, name: constants[name] + _STEP})) - here) / _STEP
        for name in NAMES
    ]
    return here - measured, np.stack(columns, axis=1)


def _moved(
    constants: Mapping[str, float],
    errors: Floats,
    slopes: Floats,
    shares: Floats,
) -> dict[str, float]:
    """Return constants after one step of Gauss and Newton."""
    near = np.minimum(1, _FAR / np.maximum(np.abs(errors), 1e-9))
    weight = shares * near * len(errors) / shares.sum()
    ridge = np.diag([0.0225 * len(errors) / _TOGETHER / width**2 for width in NAMES.values()])
    now = np.array([constants[name] for name in NAMES])
    left = slopes.T @ (weight[:, None] * slopes) + ridge
    right = -slopes.T @ (weight * errors) - ridge @ now
    step = np.clip(np.linalg.solve(left, right), -0.6, 0.6)
    return dict(zip(NAMES, (now + step).tolist(), strict=True))


def main() -> None:
    """Fit, and print the constants for `habits.FITTED`."""
    parser = arguments.parser(__doc__)
    parser.add_argument("runs", type=Path, help="a table of measured runs")
    rows, _ = read(parser.parse_args().runs)
    batches = Batches([row for row in rows if row.split == "fit" and row.quality in "AB"])
    constants = fit(batches)
    print("FITTED: Mapping[str, float] = {")
    for name, value in constants.items():
        print(f'    "{name}": {value:.3f},')
    print("}")
    measured = np.log([row.step_s for row in batches.rows])
    unseen_s, _ = left_out(batches)
    for title, times_s in (("seen", batches.predicted_s(constants)), ("left out", unseen_s)):
        errors = np.log(times_s) - measured
        for is_moe in (False, True):
            here = np.array([row.is_moe == is_moe for row in batches.rows])
            far, share = np.abs(np.expm1(errors[here])), weights(batches.rows)[here]
            middle, high = (weighted(far, share, part) for part in (0.5, 0.9))
            print(f"{title}, {'moe' if is_moe else 'dense'}: {middle:.1%}, p90 {high:.1%}")


def weighted(values: Floats, shares: Floats, part: float) -> float:
    """Return the quantile of values that weigh differently."""
    order = np.argsort(values)
    reached = np.cumsum(shares[order]) / shares.sum()
    return float(values[order][min(int(np.searchsorted(reached, part)), len(values) - 1)])


if __name__ == "__main__":
    main()
