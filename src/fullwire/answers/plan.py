"""Which parallel plan trains a large model fastest on this cluster, and does it fit?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fullwire.answers.conditions import OneOrMany, count, rate, several
from fullwire.answers.plan_search import (
    DEGREES,
    Question,
    Searched,
    Troubles,
    calibrated,
    planned,
    score,
    search,
    search_each,
    usable,
)
from fullwire.answers.planned import (
    OBJECTIVES,
    Lasting,
    OnNetwork,
    PlanAnswer,
    Range,
    Worth,
    device_of,
    fixed_degrees,
)
from fullwire.clusters import ClusterLike
from fullwire.clusters import cluster as described_cluster
from fullwire.clusters.cluster import Cluster, LeafSpine
from fullwire.errors import UsageError
from fullwire.simulation.goodput import (
    CHECKPOINT_BYTES,
    PUBLISHED_DEVICE_HOURS,
)
from fullwire.simulation.habits import (
    MEASURED_FAMILIES,
)
from fullwire.units import ratio, seconds
from fullwire.workloads.architecture_files import ArchitectureLike, architecture
from fullwire.workloads.layout import PRECISIONS, RECOMPUTE

CHOICES = ("tp", "pp", "vpp", "cp", "ep", "zero", "recompute", "microbatch")


def plan(
    model: ArchitectureLike,
    *,
    cluster: ClusterLike | Sequence[ClusterLike],
    nodes: str | int | None = None,
    global_batch: str | int,
    seq: str | int | None = None,
    precision: str = "bf16",
    device: str | None = None,
    objective: str = "step",
    fix: OneOrMany | Mapping[str, int | str] = None,
    top: int = 20,
    why: bool = False,
    bandwidth: OneOrMany = None,
    oversubscription: OneOrMany = None,
    hours: str | float | None = None,
    failures: str | float | None = None,
    storage: str | None = None,
    restart: str | None = None,
    synchronous_checkpoints: bool = False,
    price: str | float | None = None,
    calibrate: str | Path | None = None,
) -> PlanAnswer:
    """Search the parallel plans of a large model: those that fit, best first.

    - `model`: a name such as `"llama3-70b"`, a Hugging Face folder, or a `config.json`.
    - `cluster`, `nodes`: a described cluster, by name or file, and how many nodes it has. Several
      clusters are compared.
    - `global_batch`, `seq`: sequences of a step, and tokens of a sequence.
    - `precision`: of the multiplications in the layers: `"bf16"`, `"fp8"`, `"mxfp8"`, `"nvfp4"`.
    - `device`: its name, where the cluster's name does not tell.
    - `objective`: `"step"`, `"cost"` (device-hours a token, on some of the nodes too), or
      `"goodput"` (with failures).
    - `fix`: degrees that are decided, `"tp=8,pp=4"`.
    - `top`: how many plans the answer holds.
    - `why`: what each choice of the best plan is worth.
    - `bandwidth`, `oversubscription`: other NICs and networks, each with its own best plan.
    - `hours`: hours of training without failures. `failures` are device-hours between two of them,
      `storage` the rate at which checkpoints are written, `restart` the time to start again.
    - `synchronous_checkpoints`: training waits while a checkpoint is written.
    - `price`: of a device in an hour.
    - `calibrate`: a table of measured steps, with a column for each degree and `step_time_s`.

        fw.plan("llama3-70b", cluster="dgx-h100", nodes=64, global_batch=512, seq=8192).best
    """
    question = _asked(
        model, cluster, nodes, global_batch, seq, precision, device, objective, fix, calibrate
    )
    question = replace(
        question, troubles=_troubles(failures, storage, restart, synchronous_checkpoints)
    )
    found = search_each(question)
    best = min(found, key=lambda one: score(one)[one.order[0]])
    networks = _networks(question, cluster, nodes, bandwidth, oversubscription)
    lasting = None
    if hours is not None or objective == "goodput":
        lasting = _lasting(best, ratio(hours if hours is not None else 24.0, "hours"), price)
    elif price is not None or question.troubles != Troubles():
        raise UsageError("hours: expected the hours of training with failures or a price")
    return PlanAnswer(
        model=question.model.name,
        cluster=question.cluster.name,
        device=question.device.title,
        objective=question.objective,
        plans=tuple(planned(best, row) for row in best.order[: count(top, "top")]),
        considered=sum(len(one.plans) for one in found),
        left_out=_left_out(found, min(top, len(best.order))),
        device_bytes=question.device.memory_bytes,
        global_batch=question.global_batch,
        sequence=question.sequence,
        precision=question.precision,
        assumed=_assumptions(question, failures is None and lasting is not None),
        why=_worths(best) if why else (),
        networks=networks,
        half_bandwidth=_half(best.question),
        lasting=lasting,
        landscape=_landscape(best),
        architecture=question.model,
        fabric=best.question.cluster,
    )


def _asked(
    model: ArchitectureLike,
    cluster: ClusterLike | Sequence[ClusterLike],
    nodes: str | int | None,
    global_batch: str | int,
    seq: str | int | None,
    precision: str,
    device: str | None,
    objective: str,
    fix: OneOrMany | Mapping[str, int | str],
    calibrate: str | Path | None,
) -> Question:
    known = architecture(model)
    fabric = described_cluster(
        _clusters(cluster)[0], None if nodes is None else count(nodes, "nodes")
    )
    if precision not in PRECISIONS:
        raise UsageError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    if objective not in OBJECTIVES:
        raise UsageError(f"objective: expected one of {', '.join(OBJECTIVES)}, got {objective!r}")
    question = Question(
        model=known,
        cluster=usable(fabric),
        device=device_of(fabric, device),
        global_batch=count(global_batch, "global batch"),
        sequence=known.sequence if seq is None else count(seq, "seq"),
        precision=precision,
        fixed=fixed_degrees(fix),
        objective=objective,
    )
    return question if calibrate is None else calibrated(question, Path(calibrate))


def _troubles(
    failures: str | float | None, storage: str | None, restart: str | None, is_synchronous: bool
) -> Troubles:
    return Troubles(
        device_hours=None if failures is None else ratio(failures, "failures"),
        storage_bps=None if storage is None else rate(storage),
        restart_s=None if restart is None else seconds(restart, "restart"),
        is_synchronous=is_synchronous,
    )


def _clusters(given: ClusterLike | Sequence[ClusterLike]) -> list[ClusterLike]:
    if isinstance(given, str):
        return [name.strip() for name in given.split(",") if name.strip()] or [given]
    return [given] if isinstance(given, Path | Cluster) else list(given)


def _left_out(found: Sequence[Searched], shown_plans: int) -> dict[str, int]:
    fitting = sum(int(one.memory.fits(one.question.device.memory_bytes).sum()) for one in found)
    return {
        "does_not_fit": sum(len(one.plans) for one in found) - fitting,
        "slower": fitting - shown_plans,
    }


def _assumptions(question: Question, has_usual_failures: bool) -> tuple[str, ...]:
    notes = []
    if question.device.family not in MEASURED_FAMILIES:
        notes.append(
            f"no measured run of {question.device.title}: its nearest family stands for it"
        )
    if question.cluster.measured is None:
        notes.append("collectives take the usual share of the described links")
    if question.model.moe is not None:
        notes.append("tokens are spread evenly over the experts")
    if has_usual_failures:
        low, usual, high = PUBLISHED_DEVICE_HOURS
        notes.append(
            f"{usual:,.0f} device-hours between two failures; published trainings had "
            f"{low:,.0f} to {high:,.0f}"
        )
    return tuple(notes)


def _worths(found: Searched) -> tuple[Worth, ...]:
    """Return, for each choice, the best plan that chooses otherwise."""
    best = found.order[0]
    best_s = float(found.step_s[best])
    rows = np.array(found.order)
    worths = []
    for name in CHOICES:
        column = getattr(found.plans, name)
        others = rows[column[rows] != column[best]]
        if len(others):
            other = int(others[0])
            other_s = float(found.step_s[other])
            worths.append(
                Worth(
                    choice=name,
                    value=_named(name, int(column[best])),
                    other=_named(name, int(column[other])),
                    step_s=other_s,
                    slower=other_s / best_s - 1,
                )
            )
    return tuple(sorted(worths, key=lambda worth: -worth.slower))


def _named(name: str, value: int) -> str:
    return RECOMPUTE[value] if name == "recompute" else str(value)


def _networks(
    question: Question,
    clusters: ClusterLike | Sequence[ClusterLike],
    nodes: str | int | None,
    bandwidth: OneOrMany,
    oversubscription: OneOrMany,
) -> tuple[OnNetwork, ...]:
    """Search on each network anew: another network may have another best plan."""
    given = _clusters(clusters)
    if bandwidth is None and oversubscription is None and len(given) == 1:
        return ()
    rates = (None,) if bandwidth is None else several(bandwidth, rate)
    ratios = (
        (None,)
        if oversubscription is None
        else several(oversubscription, lambda value: ratio(value, "oversubscription"))
    )
    several_nodes = None if nodes is None else count(nodes, "nodes")
    answers = []
    for name in given:
        fabric = usable(described_cluster(name, several_nodes))
        is_first = fabric.name == question.cluster.name
        device = question.device if is_first else device_of(fabric, None)
        asked = replace(question, device=device, objective="step")
        for rate_bps in rates:
            for over in ratios:
                answers.append(_best_on(asked, _with_network(fabric, rate_bps, over)))
    return tuple(answers)


def _best_on(question: Question, cluster: Cluster) -> OnNetwork:
    found = search(replace(question, cluster=cluster))
    network = cluster.network
    return OnNetwork(
        cluster=cluster.name,
        bandwidth_bps=cluster.nics.rate_bps,
        oversubscription=network.oversubscription if isinstance(network, LeafSpine) else 1.0,
        plan=planned(found, found.order[0]),
    )


def _half(question: Question) -> OnNetwork | None:
    """Return the best plan with half of the bandwidth between nodes."""
    cluster = question.cluster
    if cluster.nodes == 1:
        return None
    return _best_on(question, _with_network(cluster, cluster.nics.rate_bps / 2, None))


def _with_network(cluster: Cluster, rate_bps: float | None, over: float | None) -> Cluster:
    if rate_bps is not None:
        cluster = replace(cluster, nics=replace(cluster.nics, rate_bps=rate_bps), other_hosts=())
    if over is None:
        return cluster
    if not isinstance(cluster.network, LeafSpine):
        raise UsageError(
            f"oversubscription: expected a cluster with leaves and a spine, got {cluster.name}"
        )
    return replace(cluster, network=replace(cluster.network, oversubscription=over))


def _lasting(found: Searched, hours: float, price: str | float | None) -> Lasting:
    """Return the course of a training; its range is that of failures, of restarts and of steps."""
    question, troubles = found.question, found.question.troubles
    devices, work_s = question.cluster.devices, hours * 3600
    between, restarts_s = troubles.ranges()
    worst, middle, best = (
        troubles.goodput(question, work_s, device_hours, restart_s)
        for device_hours, restart_s in zip(between, reversed(restarts_s), strict=True)
    )
    wall_hours = middle.wall_s / 3600
    return Lasting(
        wall_s=middle.wall_s,
        wall_interval=Range(low_s=best.wall_s, high_s=worst.wall_s),
        work_s=work_s,
        goodput=middle.share,
        goodput_low=worst.share,
        goodput_high=best.share,
        losses={
            "start_s": middle.start_s,
            "checkpoint_s": middle.checkpoint_s,
            "repeated_work_s": middle.repeated_s,
            "recovery_s": middle.recovery_s,
        },
        checkpoint_bytes=int(CHECKPOINT_BYTES * question.model.parameters),
        checkpoint_interval_s=middle.interval_s,
        interruptions=middle.interruptions,
        failures_device_hours=between[1],
        device_hours=wall_hours * devices,
        cost=None if price is None else ratio(price, "price") * wall_hours * devices,
    )


def _landscape(found: Searched) -> dict[str, Any]:
    """Return every plan that fits as columns, for pictures."""
    rows = np.array(found.order)
    return {
        **{name: getattr(found.plans, name)[rows] for name in DEGREES},
        "step_s": found.step_s[rows],
        "peak_reserved_bytes": found.memory.peak_reserved_bytes[rows],
    }
