"""Results for programs: JSON objects and CSV, with units in the names."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from math import inf, isnan
from typing import TYPE_CHECKING, Any, TextIO

from fullwire.words import lines_to_paste, sentence, sentences, setting

if TYPE_CHECKING:
    from fullwire.answers.audited import AuditedTraffic
    from fullwire.answers.changed import Changed
    from fullwire.answers.cluster_fit import ClusterFit
    from fullwire.answers.codecs import Codecs
    from fullwire.answers.compare import Comparison, Gate
    from fullwire.answers.explain import Explanation
    from fullwire.answers.idle import Idle
    from fullwire.answers.time_to_target import ToTarget
    from fullwire.answers.trials import Tuning
    from fullwire.answers.until import Until
    from fullwire.answers.verification import Verification
    from fullwire.answers.watched import Watched
    from fullwire.answers.whatif import WhatIf
    from fullwire.clusters.cluster import Cluster
    from fullwire.findings.watching import Stuck
    from fullwire.recorder.jobs_here import JobHere
    from fullwire.run.run import Run
    from fullwire.simulation.goodput import Goodput, Membership
    from fullwire.workloads import Workload
    from fullwire.workloads.architecture import Architecture


def whatif_object(result: WhatIf, best: int | None = None) -> dict[str, Any]:
    """Return a what-if as a JSON object, with its best rows if `best` is given."""
    rows = list(result.rows())
    intervals = zip(*(end_s.tolist() for end_s in result.interval_s), strict=True)
    for number, (row, (low_s, high_s)) in enumerate(zip(rows, intervals, strict=True)):
        row["interval"] = _interval_object(low_s, high_s)
        if kinds := result.kinds(number):
            row["kinds"] = [
                {
                    "name": kind.name,
                    "passes": kind.passes,
                    "share": kind.share,
                    "step_s": kind.step_s,
                    "interval": _interval_object(kind.low_s, kind.high_s),
                }
                for kind in kinds
            ]
    data: dict[str, Any] = {
        "basis": dict(result.basis),
        "lane": result.lane,
        "rows": rows,
        "warnings": list(result.warnings),
    }
    if result.goodputs:
        data["under_failures"] = [
            {**asdict(found), "sentence": sentence(found)} for found in result.goodputs
        ]
    if result.to_target is not None:
        return _with_target(data, result, result.to_target, best)
    data["sentence"] = sentence(result.answer)
    told, further = result.to_record, result.further
    if told is not None and further is not None:
        data["further_recording"] = {**asdict(further), "sentence": sentence(told)}
    if result.tuning:
        data["tuning"] = [asdict(tuned) for tuned in result.tuning]
    if best is not None:
        data["best"] = [
            {
                **data["rows"][top.row],
                "speedup": top.speedup,
                "instead": [
                    {**asdict(one), "value": _plain(one.value), "instead": _plain(one.instead)}
                    for one in top.instead
                ],
            }
            for top in result.best(best)
        ]
    if result.targets is not None:
        least = {
            name: [
                {**asdict(target), "reachable": target.is_reachable}
                for target in getattr(result.targets, name)
            ]
            for name in ("least_bandwidth", "least_compression")
        }
        data["target"] = {
            "scaling_factor": result.targets.scaling_factor,
            **least,
            "sentences": list(sentences(result.reaching)),
        }
    if result.suspicions:
        data["cluster"] = [asdict(suspicion) for suspicion in result.suspicions]
        data["cluster_sentences"] = list(sentences(result.holding_back))
    return data


def _with_target(
    data: dict[str, Any], result: WhatIf, targets: ToTarget, best: int | None
) -> dict[str, Any]:
    """Add the times to a target to a what-if."""
    ends = zip(targets.low_s.tolist(), targets.high_s.tolist(), strict=True)
    names = tuple(targets.columns())
    for row, (low_s, high_s) in zip(data["rows"], ends, strict=True):
        row["time_to_target_interval"] = _interval_object(low_s, high_s)
        for name in names:
            row[name] = None if isnan(row[name]) else row[name]
    data["target"] = {
        "metric": targets.goal.metric,
        "value": targets.goal.value,
        "currency": None if targets.price is None else targets.price.currency or None,
        "front": targets.front(),
        "sentences": list(sentences(result.reaching)),
    }
    if best is not None:
        data["best"] = [data["rows"][row] for row in targets.soonest(best)]
    return data


def _plain(value: Any) -> int | float | str:
    return value if isinstance(value, int | float | str) else str(value)


def _stuck_object(stuck: Stuck) -> dict[str, Any]:
    return {
        "rank": stuck.rank,
        "host": stuck.host,
        "where": "; ".join(sentences(stuck.where)),
        "since_s": stuck.since_s,
        "waiting": list(stuck.waiting),
        "sentence": sentence(stuck.finding),
    }


def _idle_object(idle: Idle | None) -> dict[str, Any] | None:
    if idle is None or idle.is_loading is None:
        return None
    return {"rank": idle.rank, "line": idle.line, "is_loading": idle.is_loading}


def watched_object(result: Watched) -> dict[str, Any]:
    """Return what was seen of a running job as a JSON object: an explanation, and its doubts."""
    explanation, stuck = result.explanation, result.stuck
    seen = {rank.rank: rank for rank in result.ranks}
    data: dict[str, Any] = (
        {"verdict": {"kind": "unknown"}, "step_s": result.step_s, "account": None}
        if explanation is None
        else explanation_object(explanation)
    )
    data["verdict"] |= {"kind": result.kind, "sentence": result.sentence}
    if len(result.possible) > 1:
        data["verdict"]["near"] = list(result.possible)
    return data | {
        "source": result.source,
        "confidence": result.confidence,
        "ranges": {part: list(between) for part, between in result.ranges.items()},
        "transfer_s": list(result.transfer_s),
        "stuck": None if stuck is None else _stuck_object(stuck),
        "idle": _idle_object(result.idle),
        "watched_s": result.seconds,
        "watching_share": result.looked_share,
        "has_ended": result.has_ended,
        "alerts": sentences(result.alerts),
        "notes": sentences(result.notes),
        "hosts": [asdict(host) for host in result.hosts],
        "processes": [
            {"rank": rank.rank, "host": rank.host, "pid": rank.pid, "command": rank.command}
            | (asdict(seen[rank.rank]) if rank.rank in seen else {})
            for rank in result.job.ranks
        ],
    }


def explanation_object(result: Explanation) -> dict[str, Any]:
    """Return an explanation as a JSON object."""
    verdict, turns = result.verdict, result.break_even
    return {
        "verdict": {
            "kind": verdict.kind,
            "sentence": verdict.sentence,
            "threshold": verdict.threshold,
            "sureness": None
            if result.verdict.sureness is None
            else sentence(result.verdict.sureness),
            "reasons": list(verdict.reasons),
            "missing": list(verdict.missing),
            "near": list(verdict.near),
        },
        "scaling_factor": result.scaling_factor,
        "step_s": result.step_s,
        "median_step_s": result.median_step_s,
        "goodput": _goodput_object(result.goodput),
        "membership": _membership_object(result.membership),
        "baseline_step_s": result.baseline_step_s,
        "baseline_interval": _interval_object(*result.baseline_between_s),
        "baseline_source": "estimated" if result.is_estimated else "measured",
        "baseline_is_estimated": result.is_estimated,
        "account": dict(result.account),
        "compute_inflation_s": result.compute_inflation_s,
        "passes": result.passes,
        "pass_samples": result.facts.pass_samples,
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
        "fixes": [
            {
                "change": sentence(fix),
                "setting": setting(fix),
                "lines": lines_to_paste(fix, result.facts.framework),
                "kind": fix.kind,
                "risk": fix.risk,
                **_forecast_object(asdict(fix.forecast)),
            }
            for fix in result.fixes
        ],
        "fixes_from_s": result.fixes_from_s,
        "warnings": list(result.warnings),
    }


def until_object(result: Until | None) -> dict[str, Any] | None:
    """Return the times to a metric's value as a JSON object, if they were asked for."""
    if result is None:
        return None
    return {
        "metric": result.goal.metric,
        "value": result.goal.value,
        "before": [asdict(reached) for reached in result.before],
        "after": [asdict(reached) for reached in result.after],
        "ratio": result.ratio,
        "ratio_interval": {"low": result.low, "high": result.high},
        "is_significant": result.is_significant,
        "sentence": sentence(result.finding),
    }


def verification_object(result: Verification | None) -> dict[str, Any] | None:
    """Return a prediction beside its measurement as a JSON object, if there is one."""
    if result is None:
        return None
    return {
        "changes": list(result.changes),
        "predicted_s": result.predicted_s,
        "interval": _interval_object(result.low_s, result.high_s),
        "full_s": result.full_s,
        "measured_s": result.measured_s,
        "error": result.error,
        "holds": None if isnan(result.low_s) else result.holds,
    }


def comparison_object(result: Comparison) -> dict[str, Any]:
    """Return a comparison as a JSON object."""
    data = {field.name: getattr(result, field.name) for field in fields(result)}
    del data["notes"], data["noise"]
    for side in ("before_recordings", "after_recordings"):
        data[side] = [asdict(recording) for recording in data[side]]
    return {**data, "warnings": list(result.warnings)}


def whole_comparison(
    result: Comparison,
    parts: Changed | None,
    verification: Verification | None,
    gate: Gate | None,
    goal: Until | None,
) -> dict[str, Any]:
    """Return a comparison, with the accounts, the prediction, the gate and the target."""
    return {
        **comparison_object(result),
        "account": None if parts is None else asdict(parts),
        "prediction": verification_object(verification),
        "gate": gate_object(gate),
        "until": until_object(goal),
    }


def tuning_object(result: Tuning) -> dict[str, Any]:
    """Return a tuning as a JSON object."""

    def between(low_s: float | None, high_s: float | None) -> dict[str, float] | None:
        return None if low_s is None or high_s is None else {"low_s": low_s, "high_s": high_s}

    trials = []
    for trial in result.trials:
        data = {**asdict(trial), "reason": trial.reason}
        del data["outcome"]
        data["interval"] = between(data.pop("low_s"), data.pop("high_s"))
        trials.append(data)
    riskier = None
    if (fix := result.riskier) is not None:
        names = ("fix", "setting", "risk", "predicted_s")
        riskier = {name: getattr(fix, name) for name in names} | {
            "words": fix.why,
            "interval": between(fix.low_s, fix.high_s),
        }
    return {
        "before_s": result.before_s,
        "before_interval": between(*(result.before_interval or (None, None))),
        "after_s": result.after_s,
        "after_interval": between(*(result.after_interval or (None, None))),
        "is_significant": result.is_significant,
        "trials": trials,
        "riskier": riskier,
        "host_work": [asdict(work) for work in result.host_work],
        "wrote": list(result.wrote),
        "took_s": result.took_s,
        "recipe": str(result.recipe),
    }


def gate_object(gate: Gate | None) -> dict[str, Any] | None:
    """Return the gate's answer, whether a slowdown passes, as a JSON object."""
    if gate is None:
        return None
    return {
        "limit": gate.limit,
        "state": gate.state,
        "recordings": gate.recordings,
        "sentence": gate.sentence,
    }


def _forecast_object(shown: dict[str, Any]) -> dict[str, Any]:
    """Bring the ends of the interval together; leave it out if there is no evidence for it."""
    low_s, high_s = shown.pop("low_s"), shown.pop("high_s")
    return {**shown, "interval": _interval_object(low_s, high_s)}


def _interval_object(low_s: float, high_s: float) -> dict[str, float] | None:
    return None if isnan(low_s) else {"low_s": low_s, "high_s": high_s}


def write_whatif_csv(result: WhatIf, file: TextIO) -> None:
    """Write a what-if as CSV: a heading, and a line for each row."""
    columns = result.columns()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))


def run_object(run: Run, rows: Mapping[str, int]) -> dict[str, Any]:
    """Return the contents of a run, except its rows."""
    return {
        "origin": run.provenance.origin,
        "source": run.provenance.source,
        "basis": run.provenance.basis,
        "complete": run.complete,
        "missing": list(run.missing),
        "facts": run.facts.known(),
        "tables": dict(rows),
    }


def architecture_object(model: Architecture) -> dict[str, Any]:
    """Return a large transformer with its counts."""
    moe = model.moe
    return {
        "name": model.name,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "ffn": model.ffn,
        "vocab": model.vocab,
        "sequence": model.sequence,
        "experts": 0 if moe is None else moe.experts,
        "experts_of_token": 0 if moe is None else moe.top_k,
        "forward_flops_per_token": model.flops(),
    }


def workload_object(load: Workload, *, with_gradients: bool) -> dict[str, Any]:
    """Return a built-in workload, on request with every gradient in backward order."""
    device, memory = load.device, load.memory
    data: dict[str, Any] = {
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
        "memory": {
            "weights_bytes": memory.weights,
            "gradients_bytes": memory.gradients,
            "optimizer_bytes": memory.optimizer,
            "activations_bytes": memory.activations,
            "activations_of_sample_bytes": memory.activations_of_sample,
            "needed_bytes": memory.needed,
            "device_bytes": memory.device,
            "fits": memory.fits,
            "largest_batch": memory.largest_batch,
        },
    }
    if with_gradients:
        ready_ns = load.gradient_ready_ns.tolist()
        columns = (load.gradient_names, load.gradient_bytes.tolist(), ready_ns)
        data["gradients"] = [
            {"name": name, "bytes": size, "ready_s": moment_ns * 1e-9}
            for name, size, moment_ns in zip(*columns, strict=True)
        ]
    return data


def cluster_object(cluster: Cluster) -> dict[str, Any]:
    """Return a described cluster: its shape, and each kind of link."""
    from fullwire.clusters.cluster import link_classes  # other results start 5 ms sooner without

    return {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "devices": cluster.devices,
        "device": cluster.device or None,
        "nics_per_node": cluster.nics_per_node,
        "leaves": cluster.leaves,
        "inside": None if cluster.inside is None else asdict(cluster.inside),
        "nics": asdict(cluster.nics),
        "network": {"kind": cluster.network.kind, **asdict(cluster.network)},
        "other_hosts": [asdict(other_host) for other_host in cluster.other_hosts],
        "links": [asdict(one_class) for one_class in link_classes(cluster)],
        "rests_on": cluster.rests_on,
        "measured": None if cluster.measured is None else asdict(cluster.measured),
    }


def codecs_object(result: Codecs) -> dict[str, Any]:
    """Return a table of codecs; one that pays at every bandwidth has no bandwidth, and says so."""
    shown = asdict(result)
    for row in shown["codecs"]:
        row["pays_always"] = row["pays_below_bps"] == inf
        row["pays_below_bps"] = None if row["pays_always"] else row["pays_below_bps"]
    return shown


def jobs_object(jobs: Sequence[JobHere]) -> dict[str, Any]:
    """Return the jobs of this host, each by its first rank."""
    return {
        "jobs": [
            {
                "pid": job.ranks[0].pid,
                "ranks": [one.rank for one in job.ranks],
                "workers": job.workers,
                "user": job.ranks[0].user,
                "command": job.ranks[0].command,
                "host": job.ranks[0].host,
            }
            for job in jobs
        ]
    }


def cluster_fit_object(fit: ClusterFit) -> dict[str, Any]:
    """Return a fitted cluster, its error for each row, and the choices of the machine."""
    return {
        "cluster": cluster_object(fit.cluster),
        "median": fit.quantile(0.5),
        "p90": fit.quantile(0.9),
        "residuals": [{**asdict(residual), "error": residual.error} for residual in fit.residuals],
        "choices": [asdict(choice) for choice in fit.choices],
        "unused": list(fit.unused),
        "doubts": list(fit.doubts),
    }


def traffic_object(result: AuditedTraffic) -> dict[str, Any]:
    """Return the findings from packets as a JSON object."""
    from fullwire.packets.usual_iteration import usual_iteration

    iterations, slow, usual = result.iterations, result.slow_link, usual_iteration(result)
    pattern: dict[str, Any] = {"kind": result.pattern.kind, "order": list(result.order)}
    if result.pattern.parts:
        pattern["parts"] = [[result.hosts[host] for host in part] for part in result.pattern.parts]
    return {
        "hosts": list(result.hosts),
        "matrix_payload_bytes": result.matrix_payload_bytes.tolist(),
        "matrix_wire_bytes": result.matrix_wire_bytes.tolist(),
        "pattern": pattern,
        "iterations": {
            "count": 0 if iterations is None else iterations.count,
            "period_s": None if iterations is None else iterations.period_s,
            "communicating_s": None if iterations is None else iterations.communicating_s,
            "payload_bytes_per_edge": result.payload_bytes_per_edge,
            "confidence": 0.0 if iterations is None else iterations.confidence,
            "basis": None if iterations is None else iterations.basis,
        },
        "gradient_bytes": result.gradient_bytes,
        "gathered_bytes": result.gathered_bytes,
        "if_sharded_bytes": result.if_sharded_bytes,
        "ranks": result.ranks,
        "busy_fractions": result.busy_fractions.tolist(),
        "slow_link": None
        if slow is None
        else {"host": slow.host, "busy_fraction": slow.busy_fraction},
        "edges": [asdict(edge) for edge in result.edges],
        "iteration": None
        if usual is None
        else {
            "number": usual.number,
            "collectives": [asdict(collective) for collective in usual.collectives],
        },
        "audit": list(result.audit),
        "warnings": list(result.warnings),
        "groups": [traffic_object(group) for group in result.groups],
        "during_s": result.during_s,
    }


def _membership_object(found: Membership | None) -> dict[str, Any] | None:
    """Return who took part in an elastic job over time, and what happened."""
    if found is None:
        return None
    return {
        "length_s": found.length_s,
        "workers": [
            {
                "worker": worker,
                "present": [{"from_s": from_s, "until_s": until_s} for from_s, until_s in spans],
            }
            for worker, spans in found.present_s.items()
        ],
        "events": [
            {
                "kind": each.kind,
                "at_s": each.at_s,
                "lasts_s": each.lasts_s,
                "workers": list(each.ranks),
            }
            for each in found.events
        ],
    }


def _goodput_object(course: Goodput | None) -> dict[str, Any] | None:
    """Return the course of an elastic job under the keys that `plan` has for a training."""
    if course is None:
        return None
    return {
        "goodput": course.share,
        "wall_s": course.wall_s,
        "work_s": course.work_s,
        "losses": course.losses_s,
        "interruptions": int(course.interruptions),
    }
