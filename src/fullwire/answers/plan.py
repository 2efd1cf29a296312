"""Which parallel plan trains a large model fastest on this cluster, and does it fit?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from fullwire.answers.conditions import OneOrMany, count, rate, several
from fullwire.answers.planned import (
    OBJECTIVES,
    Exposed,
    Lasting,
    Memory,
    Objective,
    OnNetwork,
    PlanAnswer,
    Planned,
    Range,
    Worth,
    device_of,
    fixed_degrees,
    measured_steps,
)
from fullwire.clusters import ClusterLike
from fullwire.clusters import cluster as described_cluster
from fullwire.clusters.cluster import Cluster, Floats, Ints, LeafSpine
from fullwire.errors import DamagedInput, UsageError
from fullwire.simulation.goodput import (
    CHECKPOINT_BYTES,
    NODE_BYTES_PER_S,
    PUBLISHED_DEVICE_HOURS,
    USUAL_RESTART_S,
    Goodput,
    Reliability,
    goodput,
)
from fullwire.simulation.group_times import GroupTimes
from fullwire.simulation.habits import (
    MEASURED_FAMILIES,
    Calibration,
    habits_of,
    interval_factor,
)
from fullwire.simulation.plan_space import Space, every_plan
from fullwire.simulation.step_price import Job, Plans, Priced, price
from fullwire.units import ratio, seconds
from fullwire.workloads.accelerators import Accelerator
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.architecture_files import ArchitectureLike, architecture
from fullwire.workloads.layout import PRECISIONS, RECOMPUTE, SCHEDULES, Precision
from fullwire.workloads.stage_memory import BESIDE_BYTES, GIB, MOST_RESERVED, Columns, Held, peaks

ALIKE = 0.03  # of the step: sites that run the same plan differ by as much
CHOICES = ("tp", "pp", "vpp", "cp", "ep", "zero", "recompute", "microbatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model, its batch and its devices, and what narrows the search."""

    model: Architecture
    cluster: Cluster
    device: Accelerator
    global_batch: int
    sequence: int
    precision: Precision
    fixed: Mapping[str, int | str]
    calibration: Calibration | None = None
    objective: Objective = "step"

    @property
    def assumed(self) -> tuple[str, ...]:
        """Return what widens intervals."""
        return () if self.device.family in MEASURED_FAMILIES else ("device",)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Searched:
    """All plans of a question with their figures."""

    question: Question
    plans: Plans
    priced: Priced
    memory: Held
    order: tuple[int, ...]  # those that fit, best first

    @property
    def step_s(self) -> Floats:
        """The time of a step."""
        return self.priced.step_s


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
    found = _search_each(question)
    best = min(found, key=lambda one: _score(one)[one.order[0]])
    networks = _networks(question, cluster, nodes, bandwidth, oversubscription)
    lasting = None
    if hours is not None or objective == "goodput":
        work_hours = ratio(hours if hours is not None else 24.0, "hours")
        lasting = _lasting(
            best, work_hours, failures, storage, restart, synchronous_checkpoints, price
        )
    elif synchronous_checkpoints or (failures, storage, restart, price) != (None,) * 4:
        raise UsageError("hours: expected the hours of training that failures or a price are for")
    return PlanAnswer(
        model=question.model.name,
        cluster=question.cluster.name,
        device=question.device.title,
        objective=question.objective,
        plans=tuple(_planned(best, row) for row in best.order[: count(top, "top")]),
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
    return question if calibrate is None else _calibrated(question, Path(calibrate))


def _clusters(given: ClusterLike | Sequence[ClusterLike]) -> list[ClusterLike]:
    if isinstance(given, str):
        return [name.strip() for name in given.split(",") if name.strip()] or [given]
    return [given] if isinstance(given, Path | Cluster) else list(given)


def usable(cluster: Cluster) -> Cluster:
    """Return a cluster whose nodes have a power of two of devices: degrees divide no others."""
    whole = cluster.devices_per_node
    used: int = 2 ** int(math.log2(whole))
    if used == whole:
        return cluster
    nics = replace(cluster.nics, per_node=min(cluster.nics.per_node, used), of_device=())
    rate_bps = nics.rate_bps * cluster.nics.per_node * used / whole / nics.per_node
    return replace(cluster, devices_per_node=used, nics=replace(nics, rate_bps=rate_bps))


def _search_each(question: Question) -> list[Searched]:
    """Search on all nodes; where fewer devices may be better, on parts of them too."""
    found = [_search(question)]
    nodes = question.cluster.nodes
    while question.objective != "step" and nodes % 2 == 0 and len(found) < 6:
        nodes //= 2
        fewer = replace(question, cluster=described_cluster(question.cluster, nodes))
        try:
            found.append(_search(fewer))
        except UsageError:
            break  # too few devices for the model or for the fixed degrees
    return found


def _search(question: Question) -> Searched:
    model, cluster = question.model, question.cluster
    space = Space(
        model=model,
        devices=cluster.devices,
        devices_per_node=cluster.devices_per_node,
        global_batch=question.global_batch,
        sequence=question.sequence,
        precision=question.precision,
    )
    plans = every_plan(space, question.fixed)
    job = _job(question, plans)
    priced = price(job)
    if question.calibration is not None:
        priced = priced.calibrated(question.calibration)
    memory = peaks(model, cast(Columns, plans), precision=question.precision)
    fits = np.flatnonzero(memory.fits(question.device.memory_bytes))
    if not len(fits):
        raise UsageError(_too_large(question, memory, plans))
    order = fits[np.argsort(priced.step_s[fits], kind="stable")]
    return Searched(
        question=question,
        plans=plans,
        priced=priced,
        memory=memory,
        order=tuple(_distinct(plans, priced, order)),
    )


def _job(question: Question, plans: Plans) -> Job:
    return Job(
        plans=plans,
        model=question.model,
        device=question.device,
        groups=GroupTimes(question.cluster),
        habits=habits_of(question.device.family, question.precision),
        precision=question.precision,
    )


def _distinct(plans: Plans, priced: Priced, order: Ints) -> Iterator[int]:
    """Go through plans, without those that ask for less sharding or more work at the same time."""
    seen = set()
    names = ("tp", "pp", "vpp", "dp", "cp", "ep", "recompute", "recomputed", "microbatch")
    for row in order:
        key = (*(float(getattr(plans, name)[row]) for name in names), float(priced.step_s[row]))
        if key not in seen:
            seen.add(key)
            yield int(row)


def _too_large(question: Question, memory: Held, plans: Plans) -> str:
    """Say which component is too large in the plan that needs the least, and what would fit."""
    needed = MOST_RESERVED * memory.peak_allocated_bytes + BESIDE_BYTES
    row = int(np.argmin(needed))
    parts = {name.removesuffix("_bytes"): float(getattr(memory, name)[row]) for name in _COMPONENTS}
    largest = max(parts, key=lambda name: parts[name])
    has = question.device.memory_bytes
    return (
        f"memory: no plan fits in {has / GIB:.0f} GiB: the leanest (tp {plans.tp[row]}, pp "
        f"{plans.pp[row]}, dp {plans.dp[row]}) needs {needed[row] / GIB:.0f} GiB, "
        f"{parts[largest] / GIB:.0f} GiB of it {largest}; expected at least "
        f"{math.ceil(question.cluster.nodes * needed[row] / has)} nodes instead of "
        f"{question.cluster.nodes}"
    )


_COMPONENTS = (
    *("params_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes"),
    *("gathered_bytes", "buffers_bytes"),
)


def _score(found: Searched) -> Floats:
    """Return what the objective makes small."""
    question, step_s = found.question, found.step_s
    if question.objective == "cost":
        return step_s * question.cluster.devices
    if question.objective == "goodput":
        usual = _reliability(question, PUBLISHED_DEVICE_HOURS[1], None, USUAL_RESTART_S[1], True)
        return step_s / goodput(86400.0, question.cluster.devices, usual).share
    return step_s


def _planned(found: Searched, row: int) -> Planned:
    question, plans, priced = found.question, found.plans, found.priced
    step_s = float(found.step_s[row])
    factor = interval_factor(
        is_moe=question.model.moe is not None,
        assumed=question.assumed,
        is_calibrated=question.calibration is not None,
    )

    def part_s(name: str) -> float:
        return float(getattr(priced, name)[row])

    devices = question.cluster.devices
    tokens = question.global_batch * question.sequence
    layers = -(-question.model.layers // int(plans.pp[row]))
    is_partly = plans.recomputed[row] < 1 and RECOMPUTE[plans.recompute[row]] == "full"
    flops = 3 * question.model.flops(question.sequence) * tokens
    peak = question.device.peak_flops_per_s(question.precision) * devices
    return Planned(
        **{name: int(getattr(plans, name)[row]) for name in _DEGREES},
        recompute=RECOMPUTE[plans.recompute[row]],
        recompute_layers=layers // 2 if is_partly else None,
        schedule=SCHEDULES[plans.schedule[row]],
        devices=devices,
        step_s=step_s,
        interval=Range(low_s=step_s / factor, high_s=step_s * factor),
        tokens_per_s_per_device=tokens / step_s / devices,
        model_flops_utilization=flops / step_s / peak,
        memory=_memory(found.memory, row),
        compute_s=part_s("compute_s"),
        bubble_s=part_s("bubble_s"),
        exposed=Exposed(**{field.name: part_s(field.name) for field in fields(Exposed)}),
        slowdown_s=part_s("slowdown_s"),
        optimizer_s=part_s("optimizer_s"),
        host_s=part_s("host_s"),
        device_hours=step_s * devices / 3600 / tokens * 1e6,
        fits=True,
        equal=bool(step_s <= (1 + ALIKE) * float(found.step_s[found.order[0]])),
    )


def _memory(held: Held, row: int) -> Memory:
    names = ("params_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")
    return Memory(
        **{name: int(getattr(held, name)[row]) for name in names},
        buffers_bytes=int(held.gathered_bytes[row] + held.buffers_bytes[row]),
        peak_allocated_bytes=int(held.peak_allocated_bytes[row]),
        peak_reserved_bytes=int(held.peak_reserved_bytes[row]),
    )


_DEGREES = ("tp", "pp", "vpp", "dp", "cp", "ep", "zero", "microbatch")


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
    found = _search(replace(question, cluster=cluster))
    network = cluster.network
    return OnNetwork(
        cluster=cluster.name,
        bandwidth_bps=cluster.nics.rate_bps,
        oversubscription=network.oversubscription if isinstance(network, LeafSpine) else 1.0,
        plan=_planned(found, found.order[0]),
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


def _reliability(
    question: Question,
    device_hours: float,
    storage_bps: float | None,
    restart_s: float,
    is_asynchronous: bool,
) -> Reliability:
    return Reliability(
        device_hours=device_hours,
        restart_s=restart_s,
        checkpoint_bytes=CHECKPOINT_BYTES * question.model.parameters,
        storage_bytes_per_s=(
            NODE_BYTES_PER_S * question.cluster.nodes if storage_bps is None else storage_bps / 8
        ),
        is_asynchronous=is_asynchronous,
    )


def _lasting(
    found: Searched,
    hours: float,
    failures: str | float | None,
    storage: str | None,
    restart: str | None,
    is_synchronous: bool,
    price: str | float | None,
) -> Lasting:
    """Return the course of a training; its range is that of failures, of restarts and of steps."""
    question = found.question
    devices, work_s = question.cluster.devices, hours * 3600
    storage_bps = None if storage is None else rate(storage)
    given = None if failures is None else ratio(failures, "failures")
    low, usual, high = PUBLISHED_DEVICE_HOURS if given is None else (given / 2, given, 2 * given)
    restarts = USUAL_RESTART_S if restart is None else (seconds(restart, "restart"),) * 3

    def course(device_hours: float, restart_s: float) -> Goodput:
        known = _reliability(question, device_hours, storage_bps, restart_s, not is_synchronous)
        return goodput(work_s, devices, known)

    worst, middle, best = (
        course(low, restarts[2]),
        course(usual, restarts[1]),
        course(high, restarts[0]),
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
        failures_device_hours=usual,
        device_hours=wall_hours * devices,
        cost=None if price is None else ratio(price, "price") * wall_hours * devices,
    )


def _calibrated(question: Question, path: Path) -> Question:
    """Return the question with what measured steps of this model and cluster tell."""
    rows = measured_steps(path)
    logs, shares = [], []
    for number, (fixed, measured_s) in enumerate(rows, start=2):
        try:
            found = every_plan(
                Space(
                    model=question.model,
                    devices=question.cluster.devices,
                    devices_per_node=question.cluster.devices_per_node,
                    global_batch=question.global_batch,
                    sequence=question.sequence,
                    precision=question.precision,
                ),
                fixed,
            )
        except UsageError as error:
            raise DamagedInput(path, str(error), line=number) from None
        priced = price(_job(question, found))
        middle = np.argsort(priced.step_s)[len(found) // 2]
        logs.append(math.log(measured_s / priced.step_s[middle]))
        shares.append(priced.shares[middle])
    return replace(question, calibration=Calibration(np.array(logs), np.array(shares)))


def _landscape(found: Searched) -> dict[str, Any]:
    """Return every plan that fits as columns, for pictures."""
    rows = np.array(found.order)
    return {
        **{name: getattr(found.plans, name)[rows] for name in _DEGREES},
        "step_s": found.step_s[rows],
        "peak_reserved_bytes": found.memory.peak_reserved_bytes[rows],
    }
