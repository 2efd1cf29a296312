"""The plans of one model, batch and cluster: all are priced, and those that fit are sorted."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

import numpy as np

from fullwire.answers.plan_goodput import USUAL_TROUBLES, Troubles
from fullwire.answers.plan_measured import MeasuredStep, about_measured
from fullwire.answers.planned import (
    Exposed,
    Memory,
    Objective,
    Planned,
    Range,
)
from fullwire.clusters import cluster as described_cluster
from fullwire.clusters.cluster import Cluster, Floats, Ints, Torus, with_fastest_inside
from fullwire.collectives.left_open import nics_left_open
from fullwire.crew import Crew
from fullwire.errors import DamagedInput, UsageError
from fullwire.findings.finding import Finding
from fullwire.findings.plans import FastestStands
from fullwire.simulation.group_times import GroupTimes
from fullwire.simulation.habits import (
    MEASURED_FAMILIES,
    Calibration,
    assumed_variance,
    habits_of,
    interval_factor,
)
from fullwire.simulation.plan_columns import Plans
from fullwire.simulation.plan_space import FIXABLE, BatchDoesNotDivide, Space, every_plan
from fullwire.simulation.priced import Priced
from fullwire.simulation.recorded_plan import Recorded
from fullwire.simulation.step_price import Job, price
from fullwire.units import show_memory
from fullwire.workloads.accelerators import Accelerator
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.layout import CONTEXT_KINDS, RECOMPUTE, SCHEDULES, Precision
from fullwire.workloads.stage_memory import Columns, Held, peaks, stage_layers, verdict

ALIKE = 0.03  # of the step: sites that run the same plan differ by as much
DEGREES = ("tp", "pp", "vpp", "dp", "cp", "ep", "zero", "microbatch")
_MOST_TRIED = 12  # numbers of nodes, in search of one on which a plan fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model, its batch and its devices, and the limits of the search."""

    model: Architecture
    cluster: Cluster
    device: Accelerator
    global_batch: int
    sequence: int
    precision: Precision
    fixed: Mapping[str, int | str]
    calibration: Calibration | None = None
    objective: Objective = "step"
    troubles: Troubles = USUAL_TROUBLES
    recorded: Recorded | None = None  # a run: its plan and its work are known
    idle_of_node: int = 0  # devices of each node that no plan uses
    notes: tuple[Finding, ...] = ()

    @property
    def assumed(self) -> tuple[str, ...]:
        """Return what widens intervals."""
        is_recorded = self.recorded is not None and self.recorded.recorded_on is None
        is_known = is_recorded or self.device.family in MEASURED_FAMILIES
        return () if is_known else ("device",)

    @property
    def paid_devices(self) -> int:
        """Return the devices of whole nodes: those that no plan uses are paid for, too."""
        return self.cluster.devices + self.cluster.nodes * self.idle_of_node


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Searched:
    """All plans of a question with their figures."""

    question: Question
    plans: Plans
    priced: Priced
    memory: Held
    order: tuple[int, ...]  # those that fit, best first
    ends: tuple[Priced, ...] = ()  # on links as they may be where a fit leaves them open

    @property
    def step_s(self) -> Floats:
        """The time of a step."""
        return self.priced.step_s


def usable(cluster: Cluster, degrees: Mapping[str, int | str]) -> Cluster:
    """Return a cluster whose nodes have a power of two of devices: few degrees divide others.

    - `degrees`: decided ones. Nodes stay whole if these divide all devices, and not those in use.
    """
    used = 1 << (cluster.devices_per_node.bit_length() - 1)  # a power of two
    ranks = math.prod(int(degrees.get(name, 1)) for name in ("tp", "pp", "cp", "dp"))
    is_whole = cluster.devices % ranks == 0 and cluster.nodes * used % ranks > 0
    return cluster if is_whole else part_of_nodes(cluster, used)


def part_of_nodes(cluster: Cluster, used: int) -> Cluster:
    """Return a cluster of which so many devices of each node are in use.

    Devices that are left out send nothing, so the others have each NIC whole. A NIC that only such
    devices use is idle. Of NICs that would serve unlike numbers of devices, the busiest counts.
    """
    if used == cluster.devices_per_node:
        return cluster
    if isinstance(cluster.network, Torus):  # every device uses every NIC
        return replace(cluster, devices_per_node=used)
    served = np.bincount(cluster.nic_of_device)
    busiest = 1  # devices of a NIC, where those that are left out are chosen well
    while np.minimum(served, busiest).sum() < used:
        busiest += 1
    most = used // busiest
    even = next(number for number in range(most, 0, -1) if used % number == 0)
    nics = replace(cluster.nics, per_node=even, of_device=())
    return replace(cluster, devices_per_node=used, nics=nics)


def search_each(question: Question, those: Crew) -> list[Searched]:
    """Search on all nodes; where fewer devices may be better, on parts of them too."""
    asked, nodes = [question], question.cluster.nodes
    while question.objective != "step" and nodes % 2 == 0 and len(asked) < 6:
        nodes //= 2
        asked.append(replace(question, cluster=described_cluster(question.cluster, nodes)))
    searches: list[Searched] = []
    for found in those.each(search_or_refusal, asked):
        if isinstance(found, Searched):
            searches.append(found)
        elif searches:
            break  # too few devices for the model or for the fixed degrees
        else:
            raise found
    return searches


def search_or_refusal(question: Question) -> Searched | UsageError:
    """Search, or return why there is no plan: a crew would end its work at an error."""
    try:
        return search(question)
    except UsageError as error:
        return error


def search(question: Question) -> Searched:
    """Price all plans on all nodes; refuse a model that no plan fits in the devices' memory."""
    try:
        plans = _plans(question)
    except BatchDoesNotDivide as error:
        raise batch_or_memory(question, error) from None
    where = question.cluster
    open_to = [with_fastest_inside(where), *nics_left_open(where, where.devices)[1]]
    priced, *ends = (
        _priced(replace(question, cluster=each), plans)
        for each in (where, *(end for end in open_to if end is not where))
    )
    if (known := question.calibration) is not None:
        priced, *ends = (each.calibrated(known) for each in (priced, *ends))
    memory = _held(question, plans)
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
        ends=tuple(ends),
    )


def batch_or_memory(question: Question, error: BatchDoesNotDivide) -> UsageError:
    """Return the reason for which there is no plan: memory, if it refuses the nearest batch too."""
    try:
        plans = _plans(replace(question, global_batch=error.nearest))
    except UsageError:
        return error
    memory = _held(question, plans)
    if memory.fits(question.device.memory_bytes).any():
        return error
    return UsageError(_too_large(question, memory, plans))


def _plans(question: Question, fixed: Mapping[str, int | str] | None = None) -> Plans:
    recorded = question.recorded
    space = Space(
        model=question.model,
        devices=question.cluster.devices,
        devices_per_node=question.cluster.devices_per_node,
        idle_of_node=question.idle_of_node,
        global_batch=question.global_batch,
        sequence=question.sequence,
        precision=question.precision,
        sequence_parallel=recorded is None or recorded.recognised.layout.sequence_parallel,
    )
    fixed = question.fixed if fixed is None else fixed
    plans = every_plan(space, fixed)
    return plans if recorded is None else recorded.as_recorded(plans, fixed)


def _priced(question: Question, plans: Plans) -> Priced:
    job, recorded = job_of(question, plans), question.recorded
    return price(job) if recorded is None else recorded.priced(job)


def _held(question: Question, plans: Plans) -> Held:
    return peaks(question.model, cast(Columns, plans), precision=question.precision)


def job_of(question: Question, plans: Plans) -> Job:
    """Return what `price` takes."""
    return Job(
        plans=plans,
        model=question.model,
        device=question.device,
        groups=GroupTimes(question.cluster),
        habits=habits_of(question.device.family, question.precision),
        precision=question.precision,
    )


def _distinct(plans: Plans, priced: Priced, order: Ints) -> Iterator[int]:
    """Go through plans, without those that ask for less sharding or more work at the same time.

    Of the kinds of context parallelism and of the shard groups, the best stands for the others.
    """
    seen: set[tuple[object, ...]] = set()
    names = ("tp", "pp", "vpp", "dp", "cp", "ep", "recompute", "recomputed", "microbatch")
    for row in order:
        degrees = tuple(float(getattr(plans, name)[row]) for name in names)
        keys = {
            (*degrees, float(priced.step_s[row])),
            (*degrees, "zero and schedule", int(plans.zero[row]), int(plans.schedule[row])),
        }
        if not keys & seen:
            yield int(row)
        seen |= keys


def _too_large(question: Question, memory: Held, plans: Plans) -> str:
    """Name the stage and component that are too large in the leanest plan, and a plan that fits.

    A single change fits only where the user fixed a choice: the search tries all others.
    """
    row = int(np.argmin(memory.peak_allocated_bytes))
    has, nodes = question.device.memory_bytes, question.cluster.nodes
    layout = plans.layout(row, question.precision, question.model)
    leanest = verdict(question.model, layout, has)
    needed = leanest.needed_bytes
    least_bytes = int(memory.peak_allocated_bytes[row])
    enough = _enough_nodes(question, math.ceil(nodes * needed / has), least_bytes)
    ways = [f"{enough} instead of {nodes}"] if enough else []
    ways += [leanest.change_name] if leanest.change_name else []
    expected = f"expected {', or '.join(ways)}" if ways else "more nodes do not make it smaller"
    return (
        f"memory: no plan fits in {show_memory(has)}: {expected}. Stage "
        f"{leanest.stage} of the leanest ({layout.name}) needs {show_memory(needed)}, "
        f"{show_memory(leanest.component_bytes)} of it {leanest.component}"
    )


def _enough_nodes(question: Question, least: int, here_bytes: int) -> str | None:
    """Search for the nearest number of nodes on which a plan fits: degrees do not divide each one.

    More nodes share at best what a plan needs here (`here_bytes`) beyond a constant. Less than
    `least` may do where they allow degrees that do not divide these nodes. The result is None where
    that constant does not fit, or no other number allows a plan: the decided degrees forbid it.
    """
    has_bytes, here = question.device.memory_bytes, question.cluster.nodes
    constants = []

    def constant_bytes(nodes: int, there: Held) -> float:
        there_bytes = int(there.peak_allocated_bytes.min())
        return (there_bytes * nodes - here_bytes * here) / (nodes - here)

    least = max(least, here + 1)
    doubled = here * 2 ** math.ceil(math.log2(least / here))  # degrees divide most such numbers
    apart = 2 ** max(0, math.ceil(math.log2((least - here) / _MOST_TRIED)))
    sooner = (*range(max(1, here - _MOST_TRIED), here), *range(here - here % apart, least, apart))
    tried = {*sooner, *range(least, least + _MOST_TRIED), 2 * here, doubled} - {0, here}
    for nodes in sorted(tried, key=lambda nodes: (abs(nodes - here), nodes)):
        memory = _held_on(question, nodes)
        if memory is not None and memory.fits(has_bytes).any():
            return f"{nodes} nodes"
        if memory is not None and nodes > here:
            constants.append(constant_bytes(nodes, memory))
    # The batch may allow no plan on more devices. Then fewer ones tell what they do not share.
    fewer = None if constants or here == 1 else _held_on(question, here // 2)
    if fewer is not None:
        constants.append(constant_bytes(here // 2, fewer))
    if not constants or min(constants) > has_bytes:
        return None
    return f"more than {least + _MOST_TRIED - 1} nodes"


def _held_on(question: Question, nodes: int) -> Held | None:
    """Return the memory of all plans on other nodes; None where no degrees divide devices."""
    other = replace(question, cluster=described_cluster(question.cluster, nodes))
    try:
        return _held(other, _plans(other))
    except UsageError:
        return None


def score(searched: Searched) -> Floats:
    """Return what the objective makes small."""
    question, step_s = searched.question, searched.step_s
    if question.objective == "cost":
        return step_s * question.paid_devices
    if question.objective == "goodput":
        _, usual, _ = question.troubles.goodput(question.cluster, question.model, 86400.0)
        return step_s / usual.share
    return step_s


def best_first(searches: Sequence[Searched]) -> Iterator[tuple[float, Searched, int]]:
    """Yield the plans of all parts of a cluster, best first, each after its score."""

    def of_part(one: Searched) -> Iterator[tuple[float, Searched, int]]:
        values = score(one)
        return ((float(values[row]), one, row) for row in one.order)

    return heapq.merge(*map(of_part, searches), key=lambda plan: plan[0])


def planned(searched: Searched, row: int) -> Planned:
    """Return one plan with its interval and figures."""
    question, plans, priced = searched.question, searched.plans, searched.priced
    step_s = float(searched.priced.step_s[row])
    ends_s = [step_s, *(float(each.step_s[row]) for each in searched.ends)]
    degrees = {name: int(getattr(plans, name)[row]) for name in DEGREES}
    factor = _interval_factor(searched, row)
    if is_measured(searched, row):
        ends_s = [step_s]  # whatever its links are

    def part(name: str) -> float:
        return float(getattr(priced, name)[row])

    # The slowest stage sets the pace. Its parts become those of the mean stage, which waits for it.
    computing, layers = part("mean_compute"), part("mean_layers")
    of_mean = {"compute_s": computing, **dict.fromkeys(("tp_s", "cp_s", "ep_s"), layers)}
    waiting_s = sum((1 - share) * part(name) for name, share in of_mean.items())

    devices = question.cluster.devices
    tokens = question.global_batch * question.sequence
    again = round(float(plans.recomputed[row] * stage_layers(question.model, plans.pp[row])[1]))
    is_partly = plans.recomputed[row] < 1 and RECOMPUTE[plans.recompute[row]] == "full"
    flops = question.model.model_flops(question.sequence) * tokens
    peak = question.device.peak_flops_per_s(question.precision) * devices
    # Recorded processors are as quick as their products of some shapes, which is no peak.
    is_peak_told = question.recorded is None or not question.recorded.is_on_processors
    return Planned(
        **degrees,
        recompute=RECOMPUTE[plans.recompute[row]],
        recompute_layers=again if is_partly else None,
        schedule=SCHEDULES[plans.schedule[row]],
        context_kind=CONTEXT_KINDS[plans.context_kind[row]] if degrees["cp"] > 1 else None,
        shard=int(plans.shard[row]) if degrees["zero"] else 1,
        etp=int(plans.etp[row]),
        tp_overlap=bool(plans.tp_overlap[row]),
        ep_overlap=bool(plans.ep_overlap[row]),
        devices=devices,
        step_s=step_s,
        interval=Range(low_s=min(ends_s) / factor, high_s=max(ends_s) * factor),
        tokens_per_s_per_device=tokens / step_s / devices,
        model_flops_utilization=flops / step_s / peak if is_peak_told else None,
        memory=_memory(searched.memory, row),
        compute_s=computing * part("compute_s"),
        bubble_s=part("bubble_s") + waiting_s,
        exposed=Exposed(
            **{each.name: of_mean.get(each.name, 1.0) * part(each.name) for each in fields(Exposed)}
        ),
        slowest_computing=1 / computing,
        slowest_sending=1 / layers,
        slowdown_s=part("slowdown_s"),
        optimizer_s=part("optimizer_s"),
        host_s=part("host_s"),
        device_hours=step_s * question.paid_devices / 3600 / tokens * 1e6,
        fits=True,
        equal=_is_equal(searched, row),
    )


def _interval_factor(searched: Searched, row: int) -> float:
    """Return the factor from a plan's time to the upper end of its interval."""
    question = searched.question
    if question.recorded is not None:
        degrees = {name: int(getattr(searched.plans, name)[row]) for name in DEGREES}
        return question.recorded.interval_factor(degrees)
    spread = None
    if question.calibration is not None:
        spread = float(question.calibration.spreads(searched.priced.shares[[row]])[0])
    return interval_factor(
        is_moe=question.model.moe is not None,
        assumed=question.assumed,
        calibrated_spread=spread,
        device_spread=question.device.spread,
    )


def _is_equal(searched: Searched, row: int) -> bool:
    """Say whether a plan cannot be told from the best.

    A measured plan is sure, and a plan that nobody measured may be as slow as its interval says.
    """
    best = searched.order[0]
    slower = float(searched.step_s[row] / searched.step_s[best])
    if is_measured(searched, row):
        return slower <= max(1 + ALIKE, _interval_factor(searched, best))
    return slower <= 1 + ALIKE


def is_measured(searched: Searched, row: int) -> bool:
    """Say whether the user has measured this plan."""
    known = searched.question.calibration
    return known is not None and bool(known.has_measured(searched.priced.shares[[row]])[0])


def _memory(held: Held, row: int) -> Memory:
    names = ("params_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")
    return Memory(
        **{name: int(getattr(held, name)[row]) for name in names},
        buffers_bytes=int(held.gathered_bytes[row] + held.buffers_bytes[row]),
        peak_allocated_bytes=int(held.peak_allocated_bytes[row]),
        peak_reserved_bytes=int(held.peak_reserved_bytes[row]),
    )


# Columns of plans that a measured row may leave open, with the assumption that each one is.
_OPEN = {
    **dict.fromkeys(("tp", "pp", "dp", "cp", "ep"), "parallel plan"),
    **dict.fromkeys(("vpp", "schedule"), "interleaving"),
    **dict.fromkeys(("zero", "shard"), "sharding"),
    **dict.fromkeys(("recompute", "recomputed"), "recomputation"),
    "microbatch": "microbatch",
}


def _least_step_s(question: Question) -> float:
    """Return the time of a step whose products all run at the peak of the devices.

    It is 0 where no peak is known: processors that a recording tells are as quick as it shows.
    """
    if question.recorded is not None and question.recorded.is_on_processors:
        return 0.0
    tokens = question.global_batch * question.sequence
    peak = question.device.peak_flops_per_s(question.precision) * question.cluster.devices
    return 3 * question.model.flops(question.sequence) * tokens / peak


def calibration_of(
    question: Question, path: Path, rows: Sequence[MeasuredStep]
) -> tuple[Calibration, tuple[Finding, ...]]:
    """Return the correction by measured steps of this model and cluster, and what it assumes.

    People run the fastest plan that fits, so that one stands for the degrees that a row leaves out.

    - `path`: of the table that holds the rows.
    """
    logs, shares, unsure = [], [], []
    left_out: set[str] = set()
    least_s = _least_step_s(question)
    for fixed, measured_s, column, line in rows:
        if measured_s < least_s:
            raise DamagedInput(
                path,
                f"{column}: expected a step of {least_s:.3g} s or more: the products of a step "
                f"take as long at the peak of {question.cluster.devices:,} devices, got "
                f"{measured_s:.3g} s",
                line=line,
            )
        try:
            plans = _plans(question, fixed)
        except UsageError as error:
            raise DamagedInput(path, str(error), line=line) from None
        priced, memory = _priced(question, plans), _held(question, plans)
        might = np.flatnonzero(memory.fits(question.device.memory_bytes))
        if not len(might):  # it ran, so the leanest did
            might = np.flatnonzero(memory.peak_allocated_bytes == memory.peak_allocated_bytes.min())
        taken = might[np.argmin(priced.step_s[might])]
        logs.append(math.log(measured_s / priced.step_s[taken]))
        shares.append(priced.shares[taken])
        is_open = {name for name in _OPEN if len(set(getattr(plans, name)[might])) > 1}
        unsure.append(assumed_variance({_OPEN[name] for name in is_open}))
        left_out |= {"recompute_layers" if name == "recomputed" else name for name in is_open}
    known = Calibration(
        np.array(logs),
        np.array(shares),
        is_moe=question.model.moe is not None,
        is_unlike="device" in question.assumed,
        unsure=np.array(unsure),
    )
    degrees = tuple(name for name in FIXABLE if name in left_out)
    notes = [FastestStands(degrees=degrees)] if degrees else []
    return known, (*notes, *about_measured(rows, logs))
