"""Results for programs: JSON objects and CSV, with units in the names."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from math import isnan
from typing import TYPE_CHECKING, Any, TextIO

from fullwire.clusters.cluster import Cluster, link_classes
from fullwire.words import sentence, sentences, setting

if TYPE_CHECKING:
    from fullwire.answers.compare import Comparison
    from fullwire.answers.explain import Explanation
    from fullwire.answers.search import Best
    from fullwire.answers.verification import Verification
    from fullwire.answers.whatif import WhatIf
    from fullwire.fixes import Fix
    from fullwire.run.run import Run
    from fullwire.simulation.target import Reached, Targets
    from fullwire.workloads import Workload
    from fullwire.workloads.memory import Memory


def whatif_object(result: WhatIf, best: int | None = None) -> dict[str, Any]:
    """Return a what-if as JSON takes it, if asked with its best rows."""
    shown: dict[str, Any] = {
        "basis": dict(result.basis),
        "lane": result.lane,
        "rows": [
            {**row, "interval": _interval_object(low_s, high_s)}
            for row, low_s, high_s in zip(
                result.rows(), *(each.tolist() for each in result.interval_s), strict=True
            )
        ],
        "warnings": list(result.warnings),
    }
    if result.tuning:
        shown["tuning"] = [asdict(each) for each in result.tuning]
    if best is not None:
        shown["best"] = [_best_object(each, shown["rows"]) for each in result.best(best)]
    if result.targets is not None:
        shown["target"] = _targets_object(result.targets, sentences(result.reaching))
    if result.suspicions:
        shown["cluster"] = [asdict(each) for each in result.suspicions]
        shown["cluster_sentences"] = list(sentences(result.holding_back))
    return shown


def _best_object(best: Best, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    instead = [
        {**asdict(each), "value": _plain(each.value), "instead": _plain(each.instead)}
        for each in best.instead
    ]
    return {**rows[best.row], "speedup": best.speedup, "instead": instead}


def _plain(value: Any) -> int | float | str:
    return value if isinstance(value, int | float | str) else str(value)


def explanation_object(result: Explanation) -> dict[str, Any]:
    """Return an explanation as JSON takes it."""
    verdict, turns = result.verdict, result.break_even
    return {
        "verdict": {
            "kind": verdict.kind,
            "sentence": verdict.sentence,
            "threshold": verdict.threshold,
            "reasons": list(verdict.reasons),
            "missing": list(verdict.missing),
        },
        "scaling_factor": result.scaling_factor,
        "step_s": result.step_s,
        "median_step_s": result.median_step_s,
        "baseline_step_s": result.baseline_step_s,
        "baseline_interval": _interval_object(*result.baseline_between_s),
        "baseline_source": "estimated" if result.is_estimated else "measured",
        "baseline_is_estimated": result.is_estimated,
        "account": dict(result.account),
        "compute_inflation_s": result.compute_inflation_s,
        "ranks": [asdict(rank) for rank in result.ranks],
        "evidence": [
            {"name": figure.key, "value": figure.value, "sentence": sentence(figure)}
            for figure in result.evidence
        ],
        "full_utilization": None if result.full is None else _forecast_object(asdict(result.full)),
        "break_even": None
        if turns is None
        else {
            "bandwidth_bps": turns.bandwidth_bps,
            "workers": turns.workers,
            "line_takes_over_bps": turns.line_takes_over_bps,
            "is_limited": turns.is_limited,
            "sentence": turns.sentence,
        },
        "fixes": [_fix_object(fix) for fix in result.fixes],
        "fixes_from_s": result.fixes_from_s,
        "warnings": list(result.warnings),
    }


def _fix_object(fix: Fix) -> dict[str, Any]:
    named = {"change": sentence(fix), "setting": setting(fix), "kind": fix.kind, "risk": fix.risk}
    return {**named, **_forecast_object(asdict(fix.forecast))}


def verification_object(result: Verification | None) -> dict[str, Any] | None:
    """Return a prediction and what was measured, where there is one."""
    if result is None:
        return None
    return {
        "changes": list(result.changes),
        "predicted_s": result.predicted_s,
        "interval": _interval_object(result.low_s, result.high_s),
        "full_s": result.full_s,
        "measured_s": result.measured_s,
        "error": result.error,
        "holds": result.holds,
    }


def comparison_object(result: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON takes it."""
    shown = {each.name: getattr(result, each.name) for each in fields(result)}
    del shown["notes"]
    for side in ("before_recordings", "after_recordings"):
        shown[side] = [asdict(each) for each in shown[side]]
    return {**shown, "warnings": list(result.warnings)}


def _forecast_object(shown: dict[str, Any]) -> dict[str, Any]:
    """Bring the ends of the interval together; without evidence there is none."""
    low_s, high_s = shown.pop("low_s"), shown.pop("high_s")
    return {**shown, "interval": _interval_object(low_s, high_s)}


def _interval_object(low_s: float, high_s: float) -> dict[str, float] | None:
    return None if isnan(low_s) else {"low_s": low_s, "high_s": high_s}


def write_whatif_csv(result: WhatIf, file: TextIO) -> None:
    """Write a what-if as CSV, a heading and a line per row."""
    columns = result.columns()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))


def run_object(run: Run, rows: Mapping[str, int]) -> dict[str, Any]:
    """Return the contents of a run: everything but the rows."""
    return {
        "origin": run.provenance.origin,
        "source": run.provenance.source,
        "basis": run.provenance.basis,
        "complete": run.complete,
        "missing": list(run.missing),
        "facts": run.facts.known(),
        "tables": dict(rows),
    }


def workload_object(load: Workload, *, with_gradients: bool) -> dict[str, Any]:
    """Return a built-in workload, if asked with every gradient in backward order."""
    device = load.device
    shown: dict[str, Any] = {
        "name": load.name,
        "title": load.model.title,
        "parameters": load.model.parameter_count,
        "gradient_bytes": int(load.gradient_bytes.sum()),
        "batch": load.batch,
        "device": device.title,
        "precision": device.precision,
        "matrix_efficiency": device.matrix_efficiency,
        "memory_efficiency": device.memory_efficiency,
        "forward_s": load.forward_ns * 1e-9,
        "backward_s": load.backward_ns * 1e-9,
        "optimizer_s": load.optimizer_ns * 1e-9,
        "step_s": load.step_ns * 1e-9,
        "basis": "modelled",
        "memory": _memory_object(load.memory),
    }
    if with_gradients:
        shown["gradients"] = list(_gradients(load))
    return shown


def cluster_object(fabric: Cluster) -> dict[str, Any]:
    """Return a described cluster: its shape, and each kind of link."""
    return {
        "name": fabric.name,
        "nodes": fabric.nodes,
        "devices_per_node": fabric.devices_per_node,
        "devices": fabric.devices,
        "nics_per_node": fabric.nics_per_node,
        "leaves": fabric.leaves,
        "inside": None if fabric.inside is None else asdict(fabric.inside),
        "nics": asdict(fabric.nics),
        "network": {"kind": fabric.network.kind, **asdict(fabric.network)},
        "other_hosts": [asdict(each) for each in fabric.other_hosts],
        "links": [asdict(each) for each in link_classes(fabric)],
        "rests_on": fabric.rests_on,
    }


def _memory_object(memory: Memory) -> dict[str, Any]:
    return {
        "weights_bytes": memory.weights,
        "gradients_bytes": memory.gradients,
        "optimizer_bytes": memory.optimizer,
        "activations_bytes": memory.activations,
        "activations_of_sample_bytes": memory.activations_of_sample,
        "needed_bytes": memory.needed,
        "device_bytes": memory.device,
        "fits": memory.fits,
        "largest_batch": memory.largest_batch,
    }


def _gradients(load: Workload) -> Iterator[dict[str, Any]]:
    columns = (load.gradient_names, load.gradient_bytes.tolist(), load.gradient_ready_ns.tolist())
    for name, size, ready_ns in zip(*columns, strict=True):
        yield {"name": name, "bytes": size, "ready_s": ready_ns * 1e-9}


def _targets_object(targets: Targets, said: tuple[str, ...]) -> dict[str, Any]:
    def rows(reached: tuple[Reached, ...]) -> list[dict[str, Any]]:
        return [{**asdict(each), "reachable": each.is_reachable} for each in reached]

    return {
        "scaling_factor": targets.scaling_factor,
        "least_bandwidth": rows(targets.least_bandwidth),
        "least_compression": rows(targets.least_compression),
        "sentences": list(said),
    }
