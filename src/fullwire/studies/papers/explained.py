"""How much of the iteration time do model size, batch, device and bandwidth explain?

The answer is a regression of logarithms, by least squares. It gives two figures for each condition:
the share that the condition explains alone (R2 alone), and the share lost when only this condition
is left out. Measured trials and modelled steps are kept apart: the device varies only in modelled
steps, and the batch only in real trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullwire import workloads
from fullwire.answers.whatif import whatif
from fullwire.studies.papers.measures import Measured

FEWEST_SPARE = 2  # observations beyond the number of coefficients
MODELLED_RATES = ("1Gbps", "10Gbps", "25Gbps", "100Gbps")
MODELLED_WORKERS = 4
Columns = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Shares of the variance of log(step) over some runs."""

    basis: str
    count: int
    alone: Mapping[str, float]
    only_it: Mapping[str, float]
    together: float


def shares_of_measured(results: Sequence[Measured]) -> Explained | None:
    """Explain the real trials of two workers, in which size, batch and bandwidth vary."""
    chosen = [
        result
        for result in results
        if result.trial.kind == "real" and result.trial.workers == 2 and not result.trial.half
    ]
    return shares(
        "measured: real trials of 2 workers",
        {
            "model size": _logs([result.gradient_bytes for result in chosen])[:, None],
            "batch size": _logs([result.trial.batch for result in chosen])[:, None],
            "bandwidth": _logs([result.trial.rate_bps for result in chosen])[:, None],
        },
        _logs([result.step_s for result in chosen]),
    )


def modelled_rows() -> list[dict[str, Any]]:
    """Predict every built-in model on every device and some links, at full utilization."""
    loads = {load.name: load for load in map(workloads.workload, workloads.names())}
    table = whatif(list(loads), workers=MODELLED_WORKERS, bandwidth=",".join(MODELLED_RATES))
    return [
        {
            "basis": "modelled",
            "model": row["run"],
            "device": loads[row["run"]].device.name,
            "batch": loads[row["run"]].batch,
            "workers": row["workers"],
            "rate_bps": row["bandwidth_bps"],
            "gradient_bytes": float(loads[row["run"]].gradient_bytes.sum()),
            "step_s": row["step_s"],
        }
        for row in table.rows()
    ]


def shares_of_modelled(rows: Sequence[Mapping[str, Any]]) -> Explained | None:
    """Explain modelled steps, in which size, device and bandwidth vary."""
    devices = sorted({str(row["device"]) for row in rows})
    indicators = [[float(row["device"] == device) for device in devices[1:]] for row in rows]
    return shares(
        f"modelled: {MODELLED_WORKERS} workers, full utilization",
        {
            "model size": _logs([row["gradient_bytes"] for row in rows])[:, None],
            "device": np.array(indicators),
            "bandwidth": _logs([row["rate_bps"] for row in rows])[:, None],
        },
        _logs([row["step_s"] for row in rows]),
    )


def shares(basis: str, columns: Columns, wanted: NDArray[np.float64]) -> Explained | None:
    """Explain some values by columns; return None if there are too few values."""
    usable = {
        name: column
        for name, column in columns.items()
        if len(column) and np.ptp(column, axis=0).any()
    }
    width = 1 + sum(column.shape[1] for column in usable.values())
    if not usable or len(wanted) < width + FEWEST_SPARE:
        return None
    together = _explained(list(usable.values()), wanted)
    only_it = {}
    for name in usable:
        others = [column for other, column in usable.items() if other != name]
        only_it[name] = max(0.0, together - _explained(others, wanted))
    return Explained(
        basis=basis,
        count=len(wanted),
        together=together,
        alone={name: _explained([column], wanted) for name, column in usable.items()},
        only_it=only_it,
    )


def _explained(columns: Sequence[NDArray[np.float64]], wanted: NDArray[np.float64]) -> float:
    """Return R2 of a regression with a constant."""
    matrix = np.column_stack([np.ones(len(wanted)), *columns])
    left = wanted - matrix @ np.linalg.lstsq(matrix, wanted, rcond=None)[0]
    total = float(np.square(wanted - wanted.mean()).sum())
    return 1 - float(left @ left) / total if total else 0.0


def _logs(values: Sequence[float]) -> NDArray[np.float64]:
    return np.log(np.array(values, np.float64))
