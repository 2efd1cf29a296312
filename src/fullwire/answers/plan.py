"""Which parallel plan trains a large model fastest on this cluster, and does it fit?"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fullwire.answers.conditions import OneOrMany
from fullwire.answers.opening import RunLike, opened
from fullwire.answers.plan_goodput import Troubles, between_failures, restart_time, storage_rate
from fullwire.answers.plan_measured import measured_steps
from fullwire.answers.plan_networks import (
    USUAL_HOURS,
    OtherNetwork,
    Work,
    asked_networks,
    assumptions,
    best_cluster,
    device_of,
    found_each,
    named_device,
    networks_of,
    on_devices,
    on_half,
    on_network,
    training_of,
    with_devices,
)
from fullwire.answers.plan_search import (
    ALIKE,
    DEGREES,
    Question,
    Searched,
    best_first,
    calibration_of,
    part_of_nodes,
    planned,
    usable,
)
from fullwire.answers.planned import (
    OBJECTIVES,
    FromRun,
    OnNetwork,
    OnPart,
    OtherCluster,
    PlanAnswer,
    Planned,
    Worth,
    fixed_degrees,
)
from fullwire.clusters import ClusterLike
from fullwire.clusters import cluster as described_cluster
from fullwire.clusters.cluster import Cluster
from fullwire.clusters.description import described
from fullwire.crew import HERE, crew
from fullwire.errors import UsageError
from fullwire.findings.finding import Finding
from fullwire.findings.goodput import UsualHours
from fullwire.findings.plans import (
    ColumnsPassedOver,
    DataParallelFills,
    DevicesLeftOut,
    OnlyKernels,
    OpenRecomputation,
    OpenTensorParallelism,
    OpenVocabulary,
    OptimizerOnly,
    OtherDevice,
    OtherParallelism,
    OtherType,
    ProcessorsStay,
    RowsUnmeasured,
    UnlikeGroup,
    UsualMlp,
)
from fullwire.run.placement import host_of_rank, hosts_of
from fullwire.run.run import Run
from fullwire.simulation.recognised_plan import Recognised, recognised
from fullwire.simulation.recorded_plan import Recorded, device_in
from fullwire.simulation.recorded_plan import calibrated as by_recording
from fullwire.units import count, nearest_name
from fullwire.workloads.accelerators import Accelerator, accelerator
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.architecture_files import ArchitectureLike, architecture
from fullwire.workloads.layout import PRECISIONS, RECOMPUTE, Precision

CHOICES = ("tp", "pp", "vpp", "cp", "ep", "zero", "recompute", "microbatch")
_KINDS = {"ep": "expert", "sp": "sequence"}  # of parallelism that is not recognised
_SIMILAR = 20  # times as long as modelled: products of a device that is another one than was named


def plan(
    model: ArchitectureLike | None = None,
    *,
    cluster: ClusterLike | Sequence[ClusterLike] | None = None,
    nodes: str | int | None = None,
    devices: str | int | None = None,
    global_batch: str | int | None = None,
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
    recorded: RunLike | None = None,
    to: OneOrMany | Mapping[str, int | str] = None,
    on: str = HERE,
) -> PlanAnswer:
    """Search the parallel plans of a large model: those that fit, best first.

    - `model`: a name such as `"llama3-70b"`, a Hugging Face folder, or a `config.json`.
    - `cluster`, `nodes`: a described cluster, by name or file, and how many nodes it has. Several
      clusters are compared, and the answer is the best one's.
    - `devices`: how many devices plans use, in place of `nodes`: each cluster has as many.
    - `global_batch`, `seq`: sequences of a step, and tokens of a sequence.
    - `precision`: of the multiplications in the layers: `"bf16"`, `"fp8"`, `"mxfp8"`, `"nvfp4"`.
    - `device`: its name or file, where neither the cluster's name nor the trace tells.
    - `objective`: `"step"`, `"cost"` (device-hours a token, on some of the nodes too), or
      `"goodput"` (with failures).
    - `fix`: degrees that are decided, `"tp=8,pp=4"`.
    - `top`, `why`: how many plans the answer holds; also tell the worth of the best one's choices.
    - `bandwidth`, `oversubscription`: of another network; several are compared.
    - `hours`: of training without failures on the best cluster. `failures` (device-hours between
      two), `storage` (rate of checkpoints) and `restart` (its time) may be ranges, `"500-2000"`.
    - `synchronous_checkpoints`: training waits while a checkpoint is written.
    - `price`: of a device, `"2.10 EUR/device-hour"`; a number has no currency.
    - `calibrate`: a table of measured steps: their degrees, `step_time_s` or `tokens_s_gpu`.
    - `recorded`: a traced run of the job. Its plan is recognised, its work corrects the prices, and
      it gives model, batch and sequence that are not given.
    - `to`: the plan that is asked about, `"tp=4,pp=8"`. Other choices stay as recorded,
      but data parallelism fills the devices.
    - `on`: `"ray"`, or a Ray cluster's address, searches there.

        fw.plan("llama3-70b", cluster="dgx-h100", nodes=64, global_batch=512, seq=8192).best
        fw.plan(recorded="traces", to="tp=1,pp=2").best.step_s
    """
    if recorded is None and to is not None:
        raise UsageError("to: expected a recorded run that the plan is worked out from (--from)")
    model = None if model is None else architecture(model)
    other = fixed_degrees(to, "to")
    if devices is not None:
        cluster = with_devices(_clusters(cluster), nodes, devices, {**fixed_degrees(fix), **other})
    known = None if recorded is None else _known(recorded, cluster, nodes, model, device)
    idle = 0  # devices of each node that a recording leaves out
    if known is not None:
        layout, model = known.recognised.layout, model or known.recognised.model
        global_batch = layout.global_batch if global_batch is None else global_batch
        seq = layout.sequence if seq is None else seq
        precision = layout.precision if precision == "bf16" else precision
        cluster, nodes, idle = _target(known, cluster, nodes, other)
    asked = model, nodes, global_batch, seq, precision, device, objective, fix, known, other, idle
    questions = [_asked(here, *asked) for here in _clusters(cluster)] or [_asked(None, *asked)]
    wanted, only = asked_networks(bandwidth, oversubscription, is_recorded=known is not None)
    troubles = _troubles(failures, storage, restart, synchronous_checkpoints)
    training = training_of(hours, price, troubles, objective)
    with crew(on) as those:
        compared = found_each(_with_measured(questions, calibrate, troubles, only), those)
        searches, others = best_cluster(compared)
        work = Work.of_best(searches, training)
        networks = networks_of(compared, wanted, only, work, those)
    return _answer(searches, count(top, "top"), work, why=why, networks=networks, others=others)


def _with_measured(
    questions: Sequence[Question],
    calibrate: str | Path | None,
    troubles: Troubles,
    only: OtherNetwork | None,
) -> list[Question]:
    """Add what was measured: failures and checkpoints, and steps that correct the prices.

    The steps were measured on the described network, also where another one is asked about.
    """
    asked = [replace(each, troubles=troubles) for each in questions]
    there = asked if only is None else [on_network(each, only) for each in asked]
    if calibrate is None:
        return there
    question, path = asked[0], Path(calibrate)
    devices = question.cluster.devices
    table = measured_steps(
        path,
        question.global_batch * question.sequence / devices,
        **dict.fromkeys(("global_batch", "gbs"), question.global_batch),
        **dict.fromkeys(("sequence", "seq"), question.sequence),
        **dict.fromkeys(("devices", "gpus"), devices),
        precision=question.precision,
        model=question.model,
        **dict.fromkeys(("gpu", "device"), question.device),
    )
    measured, notes = calibration_of(question, path, table.steps)
    unread: list[Finding] = []
    if table.passed_over:
        unread.append(ColumnsPassedOver(columns=table.passed_over))
    if table.unmeasured:
        unread.append(RowsUnmeasured(lines=table.unmeasured))
    about = (*notes, *unread)
    return [replace(each, calibration=measured, notes=(*each.notes, *about)) for each in there]


def _answer(
    searches: Sequence[Searched],
    top: int,
    work: Work,
    *,
    why: bool,
    networks: tuple[OnNetwork, ...],
    others: tuple[OtherCluster, ...],
) -> PlanAnswer:
    """Return the best plan found, with its course under failures where asked."""
    ranked = list(islice(best_first(searches), top))
    best = ranked[0][1]
    question, recorded = searches[0].question, searches[0].question.recorded
    lasting, training = work.lasting(best, ranked[0][2]), work.training
    considered = sum(len(one.plans) for one in searches)
    distinct = sum(len(one.order) for one in searches)
    fitting = sum(int(one.memory.fits(one.question.device.memory_bytes).sum()) for one in searches)
    return PlanAnswer(
        model=question.model.name,
        cluster=question.cluster.name,
        device=question.device.title,
        objective=question.objective,
        plans=tuple(_against(ranked[0][0], *each) for each in ranked),
        considered=considered,
        left_out={
            "does_not_fit": considered - fitting,
            "slower": fitting - min(top, distinct),
        },
        device_bytes=question.device.memory_bytes,
        global_batch=question.global_batch,
        sequence=question.sequence,
        precision=question.precision,
        assumed=(
            *assumptions(best),
            *(question.troubles.assumptions() if lasting is not None else ()),
            *(
                [UsualHours(hours=USUAL_HOURS)]
                if training is not None and training.is_usual
                else []
            ),
        ),
        why=_worths(best) if why else (),
        networks=networks,
        other_clusters=others,
        parts=tuple(
            OnPart(nodes=one.question.cluster.nodes, plan=_against(ranked[0][0], value, one, row))
            for each in (searches if len(searches) > 1 else ())
            for value, one, row in [next(best_first([each]))]
        ),
        half_bandwidth=on_half(best.question),
        lasting=lasting,
        recorded=None if recorded is None else _from_run(recorded),
        landscape=_landscape(best),
        architecture=question.model,
        described=best.question.cluster,
    )


def _against(best: float, value: float, searched: Searched, row: int) -> Planned:
    """Return a plan with whether the objective's value can be told from the best one."""
    return replace(planned(searched, row), equal=value <= (1 + ALIKE) * best)


def _asked(
    cluster: ClusterLike | None,
    model: ArchitectureLike | None,
    nodes: str | int | None,
    global_batch: str | int | None,
    seq: str | int | None,
    precision: str,
    device: str | None,
    objective: str,
    fix: OneOrMany | Mapping[str, int | str],
    recorded: Recorded | None,
    to: Mapping[str, int | str],
    idle: int,
) -> Question:
    if model is None or cluster is None or global_batch is None:
        missing = "model" if model is None else "cluster" if cluster is None else "global batch"
        like = {"model": "llama3-8b", "cluster": "dgx-h100", "global batch": "512"}[missing]
        raise UsageError(f"{missing}: expected one, like {like}; only a --from job tells it")
    known = architecture(model)
    machine = described_cluster(cluster, None if nodes is None else count(nodes, "nodes"))
    if precision not in PRECISIONS:
        raise UsageError(
            f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}"
            f"{nearest_name(precision, PRECISIONS)}"
        )
    if objective not in OBJECTIVES:
        raise UsageError(
            f"objective: expected one of {', '.join(OBJECTIVES)}, got {objective!r}"
            f"{nearest_name(objective, OBJECTIVES)}"
        )
    fixed = fixed_degrees(fix)
    asked = {**fixed, **to}
    used = usable(machine, asked if recorded is None else _degrees_on(recorded, asked))
    notes: list[Finding] = []
    whole_node = machine.devices_per_node + idle
    if used.devices_per_node < whole_node:
        is_chosen = used.devices_per_node < machine.devices_per_node
        notes.append(
            DevicesLeftOut(used=used.devices_per_node, whole=whole_node, is_chosen=is_chosen)
        )
    if recorded is None:
        target = device_of(machine, device)
    else:
        target, recorded, about = _for_device(recorded, machine, device, precision)
        notes += about
    if recorded is None or recorded.recorded_on is not None:
        asked_for, precision = precision, target.runs_as(precision)
        if precision != asked_for:
            notes.append(OtherType(device=target.title, lacks=asked_for, instead=precision))
    if recorded is not None and to:
        for name, value in to.items():
            if fixed.get(name, value) != value:
                raise UsageError(
                    f"fix: expected {name}={value} as in --to, got {name}={fixed[name]}"
                )
        fixed, layout = recorded.fixed(asked, used.devices), recorded.recognised.layout
        zero, dp = layout.zero, used.devices // math.prod(recorded.split(asked).values())
        if "dp" not in asked and dp not in (0, layout.dp):
            notes.append(DataParallelFills(dp=dp, recorded=layout.dp, devices=used.devices))
        if zero > 1 and fixed["zero"] == 1 and "zero" not in asked:
            notes.append(OptimizerOnly(zero=zero))
    return Question(
        model=known,
        cluster=used,
        device=target,
        global_batch=count(global_batch, "global batch"),
        sequence=known.sequence if seq is None else count(seq, "seq"),
        precision=precision,
        fixed=fixed,
        objective=objective,
        recorded=recorded,
        idle_of_node=whole_node - used.devices_per_node,
        notes=tuple(notes),
    )


def _for_device(
    known: Recorded, machine: Cluster, given: str | None, precision: Precision
) -> tuple[Accelerator, Recorded, list[Finding]]:
    """Return the device of other plans, and what the recording tells of it.

    The device that the user names, or that the cluster's name tells, replaces the recorded one.
    """
    told = named_device(machine) if given is None else accelerator(given)
    if told is None or told.family == known.device.family:
        return known.device if told is None or given is None else told, known, []
    if known.is_on_processors:
        return known.device, known, [ProcessorsStay(device=told.title)]
    note = OtherDevice(
        recorded=known.device.title, device=told.title, is_network_told=known.is_network_told
    )
    return told, known.on(told, precision), [note]


def _known(
    recorded: RunLike,
    cluster: ClusterLike | Sequence[ClusterLike] | None,
    nodes: str | int | None,
    model: Architecture | None,
    device: str | None,
) -> Recorded:
    """Recognise the plan of a run; a network that it does not tell is the one that is given.

    A given cluster of another device is not where the run was recorded.
    """
    run = opened(recorded).run
    seen = recognised(run, model)
    given = None if device is None else accelerator(device)
    here_device, hosts = device_in(seen, given), hosts_of(run)
    here, whole_node = _recorded_on(run, seen, _clusters(cluster), here_device, given)
    processors = _processors_of_this_host(run) if cluster is None else None
    known = by_recording(seen, here, here_device, processors)
    known = replace(known, hosts=hosts, whole_node=whole_node)
    if known.is_elsewhere:  # the pace of an unknown network tells nothing of the given one
        known = replace(known, pace=(1.0, 0.0))
    if not seen.device and known.ratios[0].ratio > _SIMILAR:
        raise UsageError(
            f"device: expected the device of the trace, got {device}: products of the trace took "
            f"{known.ratios[0].ratio:,.0f} times as long as on this one"
        )
    return known


def _recorded_on(
    run: Run,
    seen: Recognised,
    clusters: Sequence[ClusterLike],
    device: Accelerator | None,
    given: Accelerator | None,
) -> tuple[Cluster | None, int]:
    """Return the cluster of a recording, as far as its ranks used it, and the devices of a node.

    A node has as many devices in use as a host had ranks. None is a cluster that nobody described,
    or one whose nodes have fewer devices than that.
    """
    hosts, devices = hosts_of(run), seen.layout.devices
    most = 1 if hosts is None else max(hosts.ranks)
    machines = [described_cluster(one, None) for one in clusters]
    if run.facts.cluster is not None:
        machines = [described(run.facts.cluster, "the run's cluster")]
        if machines[0].devices_per_node < most:
            raise UsageError(
                f"from: expected nodes of at least {most} devices in the cluster that the run "
                f"describes, as one of its hosts had {most} ranks, got "
                f"{machines[0].devices_per_node}"
            )
    else:
        families = [named_device(machine) or given for machine in machines]
        machines = [
            machine
            for machine, told in zip(machines, families, strict=True)
            if told is None or device is None or told.family == device.family
        ]
    fitting = [machine for machine in machines if machine.devices_per_node >= most]
    if not fitting:
        return None, machines[0].devices_per_node if machines else 0
    [here, *_], whole_node = fitting, fitting[0].devices_per_node
    if hosts is not None:
        return described_cluster(part_of_nodes(here, most), len(hosts.ranks)), whole_node
    if run.facts.cluster is None:
        here = described_cluster(here, max(1, -(-devices // whole_node)))
    return usable(here, {"dp": devices}), whole_node


def _processors_of_this_host(run: Run) -> int | None:
    """Return this machine's processors if the traces name it as the host of all ranks."""
    hosts = host_of_rank(run)
    is_here = set(hosts.values()) == {platform.node()} and len(hosts) == run.facts.workers
    return len(os.sched_getaffinity(0)) if is_here else None


def _target(
    known: Recorded,
    cluster: ClusterLike | Sequence[ClusterLike] | None,
    nodes: str | int | None,
    to: Mapping[str, int | str],
) -> tuple[ClusterLike | Sequence[ClusterLike], str | int | None, int]:
    """Return the cluster of other plans, its nodes, and devices of each that it leaves out.

    It is the given one, else that of the recording with nodes for the plan.
    """
    if cluster is not None:
        return cluster, nodes, 0
    here, degrees = known.cluster, _degrees_on(known, to)
    devices = math.prod(degrees.values())
    if not known.is_network_told:
        devices = devices if to else known.recognised.layout.devices
        nics = replace(here.nics, per_node=devices)
        return replace(here, devices_per_node=devices, nics=nics), None, 0
    if devices % here.devices_per_node == 0:
        here = described_cluster(here, devices // here.devices_per_node)
    elif devices < here.devices_per_node:
        here = described_cluster(part_of_nodes(here, devices), 1)
    else:
        here = on_devices(here, devices, degrees, what="to")
    return here, None, known.whole_node - here.devices_per_node


def _degrees_on(known: Recorded, to: Mapping[str, int | str]) -> dict[str, int]:
    """Return the degrees of another plan, where data parallelism fills the recorded devices."""
    split = known.split(to)
    rest = max(1, known.recognised.layout.devices // math.prod(split.values()))
    return {**split, "dp": int(to.get("dp", rest))}


def _from_run(known: Recorded) -> FromRun:
    found, model, layout = known.recognised, known.recognised.model, known.recognised.layout
    kept = ("tp", "pp", "dp", "cp", "zero", "microbatch", "recompute", "global_batch", "sequence")
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    not_recognised: list[Finding] = []
    if found.unlike_group is not None:
        not_recognised.append(UnlikeGroup(ranks=found.unlike_group))
    if found.has_usual_mlp:
        not_recognised.append(UsualMlp())
    if found.open_vocabulary is not None:
        not_recognised.append(OpenVocabulary(rows=found.open_vocabulary))
    if found.other_tp:
        not_recognised.append(OpenTensorParallelism(tp=layout.tp, others=found.other_tp))
    for kind, ranks in found.other_groups.items():
        not_recognised.append(OtherParallelism(kind=_KINDS[kind], ranks=ranks))
    not_recognised += [OnlyKernels(work=work) for work in found.only_kernels]
    if "attention" in found.only_kernels:
        not_recognised.append(OpenRecomputation())
    return FromRun(
        **{name: getattr(layout, name) for name in (*kept, "precision")},
        **{name: getattr(model, name) for name in sizes},
        source=found.source,
        step_s=found.step_s,
        ratios=known.ratios,
        not_recognised=tuple(not_recognised),
        missing=found.missing,
    )


def _troubles(
    failures: str | float | None, storage: str | None, restart: str | None, is_synchronous: bool
) -> Troubles:
    return Troubles(
        device_hours=None if failures is None else between_failures(failures),
        storage_bps=None if storage is None else storage_rate(storage),
        restart_s=None if restart is None else restart_time(restart),
        is_synchronous=is_synchronous,
    )


def _clusters(given: ClusterLike | Sequence[ClusterLike] | None) -> list[ClusterLike]:
    if given is None:
        return []
    if isinstance(given, str):
        return [name.strip() for name in given.split(",") if name.strip()] or [given]
    return [given] if isinstance(given, Path | Cluster) else list(given)


def _worths(searched: Searched) -> tuple[Worth, ...]:
    """Return, for each choice, the best plan that chooses otherwise."""
    best = searched.order[0]
    best_s = float(searched.step_s[best])
    rows = np.array(searched.order)
    worths = []
    for name in CHOICES:
        column = getattr(searched.plans, name)
        others = rows[column[rows] != column[best]]
        if len(others):
            other = int(others[0])
            other_s = float(searched.step_s[other])
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


def _landscape(searched: Searched) -> dict[str, Any]:
    """Return every plan that fits as columns, for pictures."""
    rows = np.array(searched.order)
    return {
        **{name: getattr(searched.plans, name)[rows] for name in DEGREES},
        "step_s": searched.step_s[rows],
        "peak_reserved_bytes": searched.memory.peak_reserved_bytes[rows],
    }
