"""What a recorded plan tells of other plans of the same job.

`calibrated` prices the recorded plan as any other plan, and compares each class of work with the
trace. The ratios become part of the prices of other plans: a rank that multiplies at half of the
modelled rate does so under each plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from fullwire.clusters.cluster import Cluster, Floats, Inside, Ints, Nics, OneSwitch
from fullwire.errors import UsageError
from fullwire.run.centre import NORMAL_90
from fullwire.run.placement import Hosts
from fullwire.simulation.group_times import GroupTimes, Hops
from fullwire.simulation.habits import MEASURED_FAMILIES, Habits, habits_of
from fullwire.simulation.plan_columns import Plans, plans_of
from fullwire.simulation.priced import Priced
from fullwire.simulation.recognised_plan import Recognised
from fullwire.simulation.step_price import Job, price
from fullwire.units import shown
from fullwire.workloads.accelerators import Accelerator, Attention, Products, accelerator
from fullwire.workloads.layout import Precision

UNKNOWN_CLUSTER = "as recorded"  # the name of a cluster that nobody described
_NETWORK_BPS, _NETWORK_S = 8e9, 2e-5  # of an unknown network; ratios correct it
# The host's time in which PyTorch's tensor parallelism splits the tensors of a layer for one
# microbatch (DTensor, EPYC; the jobs of validation/plan_pairs.py). A GPU works meanwhile.
SPLITTING_S = 9e-3
# Standard deviations of the logarithm of predicted over measured steps: of plans whose parts the
# recording shows (on devices, traces that were played), for each part that it does not show, and
# where more ranks may share the processors. Those of processors are of the jobs above: half of
# them set these numbers, and the other half is judged.
_SPREAD, _ON_PROCESSORS, _UNSEEN, _OPEN_PROCESSORS = 0.12, 0.25, 0.25, 0.5
# Of the step on another device: the prices of both are off on their own, each by 0.12 as the price
# of any device is. A family that nobody measured adds its own (`habits`).
_OTHER_DEVICE, _NOBODY_MEASURED = 0.12 * math.sqrt(2), 0.15


@dataclass(frozen=True, slots=True)
class Ratio:
    """One class of work: its time in the recorded step, and as the model prices it."""

    work: str
    measured_s: float
    modelled_s: float

    @property
    def ratio(self) -> float:
        """Return how many times as long as modelled it took."""
        return self.measured_s / self.modelled_s if self.modelled_s > 0 else 1.0


@dataclass(frozen=True)
class _Paced(GroupTimes):
    """Times of messages as the recorded ones took: longer by a factor and by a fixed time."""

    factor: float = 1.0
    more_s: float = 0.0

    def collective_s(self, op: str, ranks: int, stride: int, sizes_bytes: Floats) -> Floats:
        """Time messages of these sizes."""
        known_s = super().collective_s(op, ranks, stride, sizes_bytes)
        return known_s if ranks == 1 else self.more_s + self.factor * known_s

    def hops(self, stages: Ints, stride: Ints, sizes_bytes: Floats) -> Hops:
        """Time transfers between pipeline stages."""
        known = super().hops(stages, stride, sizes_bytes)
        return Hops(
            self.more_s + self.factor * known.slowest_s,
            (stages - 1) * self.more_s + self.factor * known.all_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recorded plan with the ratios that other plans take over."""

    recognised: Recognised
    device: Accelerator
    cluster: Cluster  # that it was recorded on
    ratios: tuple[Ratio, ...]  # the first three: products, attention, norms
    habits: Habits
    pace: tuple[float, float]  # of messages: times as long as modelled, and seconds more
    factors: Mapping[str, float]  # of parts of a priced step
    pass_s: Mapping[str, float]  # the host's time of one layer and microbatch
    shard_copies: float = 1.0  # of gathered parameters: times as long as modelled
    sums_each_microbatch: bool = False
    longest_sums: float = 1.0  # shown ones, where late ranks make them longer than the modelled
    late_s: float = 0.0  # of shown sums that no message takes, as where a rank comes late
    rest: float = 1.0  # of the whole step, which no class explains
    is_network_told: bool = True  # else the pace is that of an unknown network
    recorded_on: Accelerator | None = None  # where `device` is another one
    processors: int | None = None  # that all ranks share, if it is known
    crowd: float = 1.0  # of the recorded plan, see `crowded`
    hosts: Hosts | None = None  # of its ranks, where the run names them all
    whole_node: int = 0  # devices of a node of the described cluster; 0 where nobody described it

    def as_recorded(self, plans: Plans, fixed: Mapping[str, int | str]) -> Plans:
        """Return plans with the recorded job's other choices, such as sequence parallelism."""
        layout, same = self.recognised.layout, np.ones_like(plans.tp)
        # DDP sums beside the backward pass. FSDP gathers ahead, but not on processors with Gloo.
        usual = np.where(plans.zero == 3, not self.is_on_processors, True)
        return replace(
            plans,
            sequence_parallel=same * layout.sequence_parallel,
            gradient_bytes=same * layout.gradient_bytes,
            tp_overlap=plans.tp_overlap if "tp_overlap" in fixed else 0 * same,
            dp_overlap=same * np.where(self.shards_alike(plans), layout.dp_overlap, usual),
        )

    def shards_alike(self, plans: Plans) -> NDArray[np.bool_]:
        """Say which plans agree with the recorded one on ZeRO-3."""
        return np.asarray((plans.zero == 3) == (self.recognised.layout.zero == 3))

    def on(self, device: Accelerator, precision: Precision) -> Recorded:
        """Return what the recording tells of another device: its work as many times as modelled.

        Messages of a network that nobody described tell nothing of the network beside that device.
        """
        habits = habits_of(device.family, precision)
        gemm, attention, vector = (ratio.ratio for ratio in self.ratios[:3])
        return replace(
            self,
            device=device,
            recorded_on=self.device,
            habits=replace(
                habits,
                gemm=habits.gemm * gemm,
                attention=habits.attention * attention,
                vector=habits.vector * vector,
                microbatch_s=self.habits.microbatch_s,
                step_s=self.habits.step_s,
            ),
            pace=self.pace if self.is_network_told else (1.0, 0.0),
        )

    def split(self, asked: Mapping[str, int | str]) -> dict[str, int]:
        """Return the degrees that split the model: those asked for, the others as recorded."""
        layout = self.recognised.layout
        return {name: int(asked.get(name, getattr(layout, name))) for name in ("tp", "pp", "cp")}

    def fixed(self, asked: Mapping[str, int | str], devices: int) -> dict[str, int | str]:
        """Return the degrees of another plan: those that are asked for, then others as recorded.

        Stages that the recorded job did not have would gather its sharded parameters for each
        microbatch (ZeRO-3). Such a plan shards the optimizer only, unless `zero` is asked for.
        """
        layout, split = self.recognised.layout, self.split(asked)
        kept: dict[str, int | str] = dict(asked)
        others = {
            "vpp": 1,
            "ep": 1,
            "recompute": layout.recompute,
            "microbatch": layout.microbatch,
            "zero": layout.zero,
            **split,
        }
        kept |= {name: value for name, value in others.items() if name not in asked}
        if "zero" not in asked:
            if int(kept["pp"]) > 1 and layout.pp == 1:
                kept["zero"] = min(1, layout.zero)
            if devices == math.prod(split.values()):
                kept["zero"] = 0  # nobody shares with this rank
        if layout.cp > 1 and int(kept["cp"]) > 1 and "context" not in asked:
            kept["context"] = layout.context_kind
        if "vpp" not in asked and kept.get("schedule") == "interleaved":
            del kept["vpp"]
        return kept

    @property
    def is_on_processors(self) -> bool:
        """Return whether nobody tells the device of the recording."""
        return self.device.family == _PROCESSOR

    @property
    def is_elsewhere(self) -> bool:
        """Return whether a host had more ranks than a node of the described cluster can have."""
        return self.hosts is not None and 0 < self.whole_node < max(self.hosts.ranks)

    @property
    def splits_by_mesh(self) -> bool:
        """Return whether tensor parallelism would take the host's time, which no trace shows."""
        found = self.recognised
        return self.is_on_processors and found.has_mesh and found.layout.tp == 1

    def unseen(self, degrees: Mapping[str, int]) -> tuple[str, ...]:
        """Return the degrees whose messages the recorded plan does not have; devices, if on CPUs.

        A trace of ranks on processors does not tell how many processors they share. It names their
        host, which may be known.
        """
        layout = self.recognised.layout
        has = {
            "tp": layout.tp > 1,
            "pp": layout.pp > 1,
            "dp": layout.dp * layout.cp > 1,  # ranks of both add up gradients
            "cp": bool(self.recognised.messages.get("cp")),
        }
        found = [name for name, is_shown in has.items() if degrees[name] > 1 and not is_shown]
        if degrees["zero"] == 3 and layout.zero < 3:
            found.append("zero")
        if degrees["zero"] < 3 and layout.zero == 3 and degrees["dp"] * degrees["cp"] > 1:
            found.append("whole")  # ZeRO-3 adds up gradients in another way: see `shards_alike`
        devices = math.prod(degrees[name] for name in ("tp", "pp", "dp", "cp"))
        if self.is_on_processors and self.processors is None and devices != layout.devices:
            found.append("devices")
        return tuple(found)

    def interval_factor(self, degrees: Mapping[str, int]) -> float:
        """Return the factor from a predicted time to the upper end of its 90 % interval."""
        unseen = self.unseen(degrees)
        messages = sum(name != "devices" for name in unseen)
        terms = [_ON_PROCESSORS if self.is_on_processors else _SPREAD]
        terms += [_UNSEEN * math.sqrt(messages), _OPEN_PROCESSORS * ("devices" in unseen)]
        if self.recorded_on is not None:
            terms.append(_OTHER_DEVICE)
            if self.device.family not in MEASURED_FAMILIES:
                terms += [_NOBODY_MEASURED, self.device.spread]
        return math.exp(NORMAL_90 * math.hypot(*terms))

    def crowded(self, priced: Priced, ranks: Ints) -> Floats:
        """Return how many times as long plans take since their ranks share processors.

        Each rank has one thread. While it waits for another stage, another rank computes.
        """
        if self.processors is None:
            return np.ones(len(ranks))
        share = 1 - (priced.bubble_s + priced.pp_s) / priced.step_s
        return np.maximum(1.0, ranks * share / self.processors)

    def _as_measured(self, job: Job) -> Job:
        """Return a job with the recorded rates of work and the recorded pace of messages."""
        factor, more_s = self.pace
        groups = _Paced(job.groups.cluster, factor=factor, more_s=more_s)
        return replace(job, habits=self.habits, groups=groups)

    def whole_sums_s(self, job: Job) -> Floats:
        """Return the time of sums and gathers that no computing hides."""
        plans = job.plans
        late = replace(plans, dp_overlap=np.zeros_like(plans.dp_overlap))
        known = price(self._as_measured(replace(job, plans=late)))
        return np.asarray(self._sums_of_a_step(plans) * known.dp_s)

    def _sums_of_a_step(self, plans: Plans) -> Ints:
        """Return how often gradients are added up; ZeRO-2 and ZeRO-3 are priced so anyway."""
        is_each = self.sums_each_microbatch & (plans.zero < 2)
        return np.where(is_each, plans.microbatches, 1)

    def priced(self, job: Job) -> Priced:
        """Price plans as the recorded job would work through them."""
        plans = job.plans
        known = price(self._as_measured(job))
        parts = {field.name: getattr(known, field.name) for field in fields(known)}
        passes = plans.microbatches * np.ceil(job.model.layers / plans.pp)
        host_s = passes * (self.pass_s["host"] + (plans.tp > 1) * self.pass_s["dispatch"])
        before_s = _through_s(parts)
        for name, factor in self.factors.items():
            alike = self.shards_alike(plans) if name == "dp_s" else True
            parts[name] = np.where(alike, factor, 1.0) * parts[name]
        # Sums that nothing hides are the longest ones.
        longest = np.where(self.shards_alike(plans), self.longest_sums, 1.0)
        shown_s = self._sums_of_a_step(plans) * parts["dp_s"]
        parts["dp_s"] = np.minimum(shown_s, longest * self.whole_sums_s(job))
        # A late rank is late for any sums. A recording of ZeRO-3 tells no lateness: its sums show
        # the host's own time, too.
        is_late = (plans.dp * plans.cp > 1) & (self.recognised.layout.zero < 3)
        parts["dp_s"] = parts["dp_s"] + np.where(is_late, self.late_s, 0.0)
        parts["dp_s"] = parts["dp_s"] + self.shard_copies * shard_copies_s(job)
        parts["host_s"] = parts["host_s"] + host_s
        parts["bubble_s"] = parts["bubble_s"] * _through_s(parts) / before_s
        parts.pop("step_s")
        shares = {name: parts.pop(name) for name in list(parts) if not name.endswith("_s")}
        parts = {name: self.rest * part_s for name, part_s in parts.items()}
        of_compute = {name: parts.pop(name) for name in ("attention_s", "moved_s", "experts_s")}
        step_s = sum(parts.values(), start=np.zeros(len(plans)))
        priced = Priced(step_s=step_s, **shares, **parts, **of_compute)
        crowd = self.crowded(priced, plans.devices) / self.crowd
        return priced.times(crowd)


def shard_copies_s(job: Job) -> Floats:
    """Return the time of copies into gathered parameters and out of summed gradients (ZeRO-3).

    A microbatch gathers its parameters twice, and each value is read and written: parameters go
    into one message and out of it, and gradients into one.
    """
    plans, model = job.plans, job.model
    values = model.parameters / (plans.tp * plans.pp)
    moved = 2 * values * (2 * (1 + 1 / plans.shard) * job.value_bytes + plans.gradient_bytes)
    return np.where(plans.zero == 3, plans.microbatches * job.memory_s(moved), 0.0)


def _through_s(parts: Mapping[str, Floats]) -> Floats:
    """Return the time of a stage that its bubble is a share of."""
    names = ("compute_s", "tp_s", "cp_s", "ep_s", "host_s")
    return np.asarray(sum(parts[name] for name in names))


def calibrated(
    recognised: Recognised,
    cluster: Cluster | None,
    device: Accelerator | None,
    processors: int | None = None,
) -> Recorded:
    """Price the recorded plan, and compare each class of work with the trace.

    - `cluster`: of the recording, if it is known.
    - `device`: of the recording. None is processors as quick as their own products.
    - `processors`: that all ranks share, if it is known.
    """
    job, pace = _recorded_job(recognised, cluster, device or _processors(recognised))
    device, here, layout = job.device, job.groups.cluster, recognised.layout
    is_known, is_sharded = device.family != _PROCESSOR, layout.zero == 3
    plain = price(job)
    busy_s = recognised.busy_s
    ratios, habits = _of_computing(recognised, job, plain)
    factors = {}
    sent = {"tp": "tensor parallelism", "cp": "context parallelism"}
    for kind, name in sent.items():
        modelled_s = float(getattr(plain, f"{kind}_s")[0])
        if modelled_s > 0 and busy_s[kind] > 0:
            ratios.append(Ratio(name, busy_s[kind], modelled_s))
            factors[f"{kind}_s"] = ratios[-1].ratio
    if busy_s["optimizer"] > 0:
        ratios.append(Ratio("optimizer", busy_s["optimizer"], float(plain.optimizer_s[0])))
        factors["optimizer_s"] = ratios[-1].ratio
    modelled_s = float(shard_copies_s(job)[0])
    if is_sharded and busy_s["shards"] > 0:
        ratios.append(Ratio("copies of shards", busy_s["shards"], modelled_s))
    recorded = Recorded(
        sums_each_microbatch=_sums_each_microbatch(recognised),
        recognised=recognised,
        device=device,
        cluster=here,
        is_network_told=cluster is not None,
        ratios=tuple(ratios),
        habits=habits,
        pace=pace,
        shard_copies=busy_s["shards"] / modelled_s if is_sharded else float(not is_known),
        factors=factors,
        pass_s={"host": 0.0, "dispatch": 0.0} if is_known else _of_host_s(recognised, job.plans),
    )
    job = replace(job, groups=GroupTimes(here))  # the ratios hold the recorded pace
    if is_known:
        of_host, recorded = _with_host(recorded, job)
        ratios.append(of_host)
    alone = recorded.priced(job)
    between_s = float((alone.bubble_s + alone.pp_s)[0])
    if layout.pp > 1 and busy_s["pp"] > 0:
        ratios.append(Ratio("bubble and transfers between stages", busy_s["pp"], between_s))
    if layout.dp * layout.cp > 1 and busy_s["dp"] > 0:
        sums_s = float((alone.dp_s - recorded.shard_copies * shard_copies_s(job))[0])
        ratios.append(Ratio("sums of gradients, shown", busy_s["dp"], sums_s))
        factors["dp_s"] = ratios[-1].ratio
        whole_s = float(recorded.whole_sums_s(job)[0])
        longest, late_s = max(1.0, busy_s["dp"] / whole_s), max(0.0, busy_s["dp"] - whole_s)
        if late_s and not is_sharded:  # added to the longest sums, which show all of them
            longest, factors["dp_s"] = 1.0, whole_s / sums_s
        recorded = replace(recorded, longest_sums=longest, late_s=late_s)
    if not is_known and processors is not None:
        ranks = np.array([layout.devices])
        recorded = replace(recorded, processors=processors)
        crowd = float(recorded.crowded(recorded.priced(job), ranks)[0])
        recorded = replace(recorded, crowd=crowd)
    step_s = float(recorded.priced(job).step_s[0])
    ratios.append(Ratio("the whole step, after these", recognised.step_s, step_s))
    return replace(recorded, ratios=tuple(ratios), rest=recognised.step_s / step_s)


def _of_computing(recognised: Recognised, job: Job, plain: Priced) -> tuple[list[Ratio], Habits]:
    """Compare the computing of the recorded step, and return the habits that it shows."""
    habits, busy_s = job.habits, recognised.busy_s

    def more_s(name: str) -> float:
        """Return what a class of work takes: the step with twice of it is longer by as much."""
        twice = replace(job, habits=replace(habits, **{name: 2 * getattr(habits, name)}))
        return float((price(twice).compute_s - plain.compute_s)[0])

    work_s = {name: more_s(name) for name in ("gemm", "attention", "vector")}
    rest_s = busy_s["rest"] - (float(plain.compute_s[0]) - sum(work_s.values()))
    if recognised.layout.zero < 3:  # then copies are those of the layers
        rest_s += busy_s["shards"]
    moved_s = float(plain.compute_s[0]) - work_s["gemm"] - work_s["attention"]
    if job.device.family != _PROCESSOR:  # kernels of the optimizer bear no mark
        rest_s -= float(plain.optimizer_s[0])
        moved_s += float(plain.optimizer_s[0])
    # If all that moves values takes less time than modelled, so does each part of it.
    least_s = work_s["vector"] * min(1.0, busy_s["rest"] / moved_s)
    ratios = [
        Ratio("matrix products", busy_s["matmul"], work_s["gemm"]),
        Ratio("attention", busy_s["attention"], work_s["attention"]),
        Ratio("norms, activations", max(rest_s, least_s), work_s["vector"]),
    ]
    gemm, attention, vector = (ratio.ratio for ratio in ratios)
    seen = replace(
        habits,
        gemm=habits.gemm * gemm,
        attention=habits.attention * attention,
        vector=habits.vector * vector,
    )
    return ratios, seen


def _with_host(recorded: Recorded, job: Job) -> tuple[Ratio, Recorded]:
    """Compare the time that the device waits for the host, and let other plans take it over.

    The trace shows the time of a microbatch and of a step that no part explains. The host's
    launches stay as modelled: they may count on a plan with less work for each device. Of a
    pipeline's idle time, the bubble comes first, and then transfers of a known pace.
    """
    habits, busy_s = recorded.habits, recorded.recognised.busy_s
    bare = replace(recorded, habits=replace(habits, microbatch_s=0.0, step_s=0.0)).priced(job)
    modelled_s = float(recorded.priced(job).host_s[0])
    is_paced = recorded.is_network_told or recorded.pace != (1.0, 0.0)
    between_s = float(bare.bubble_s[0] + is_paced * bare.pp_s[0])
    waited_s = min(busy_s["host"], max(0.0, busy_s["host"] + busy_s["pp"] - between_s))
    launches_s = float(bare.host_s[0])
    share = max(0.0, waited_s - launches_s) / (modelled_s - launches_s)
    habits = replace(habits, microbatch_s=share * habits.microbatch_s, step_s=share * habits.step_s)
    return Ratio("waits for the host", waited_s, modelled_s), replace(recorded, habits=habits)


def _of_host_s(recognised: Recognised, plans: Plans) -> dict[str, float]:
    """Return the host's time of one layer and microbatch, and more of it by splitting tensors."""
    layout, busy_s = recognised.layout, recognised.busy_s
    passes = float(plans.microbatches[0] * math.ceil(recognised.model.layers / layout.pp))
    if layout.tp > 1:  # splitting tensors takes the host's time, too
        return {"host": 0.0, "dispatch": (busy_s["host"] + busy_s["dispatch"]) / passes}
    return {"host": busy_s["host"] / passes, "dispatch": SPLITTING_S * recognised.has_mesh}


def _sums_each_microbatch(recognised: Recognised) -> bool:
    """Return whether a job without ZeRO-3 adds gradients up after each microbatch."""
    layout = recognised.layout
    own_values = recognised.model.parameters / (layout.tp * layout.pp)
    return layout.zero < 3 and recognised.summed_bytes > 1.5 * layout.gradient_bytes * own_values


_SURE = 0.2  # a smaller share of large messages' rate comes from noise in the small ones
_LARGE_BYTES = 2**20  # from here on a message's time is mostly that of its bytes


def _recorded_job(
    recognised: Recognised, cluster: Cluster | None, device: Accelerator
) -> tuple[Job, tuple[float, float]]:
    """Return the recorded plan as it is priced, and the pace of its messages."""
    here = cluster or _unknown(recognised.layout.devices)
    precision = recognised.layout.precision
    habits = habits_of(device.family, precision)
    plans = plans_of([recognised.layout], recognised.model.layers)
    job = Job(plans, recognised.model, device, GroupTimes(here), habits, precision)
    pace = _pace(recognised, job)
    job = replace(job, groups=_Paced(here, factor=pace[0], more_s=pace[1]))
    if device.family != _PROCESSOR:
        return job, pace
    # A GPU's host has habits of its own. Norms, sums and copies show the rate of memory.
    habits = replace(habits, launch_s=0.0, routing_s=0.0, microbatch_s=0.0, step_s=0.0)
    light = replace(job, habits=replace(habits, gemm=0.0, attention=0.0))
    moved_s, slow_s = recognised.busy_s["rest"], float(price(light).compute_s[0])
    rate = device.memory_bytes_per_s * slow_s / max(moved_s, 1e-9)
    device = replace(device, memory_bytes_per_s=rate)
    return replace(job, habits=habits, device=device), pace


def _pace(recognised: Recognised, job: Job) -> tuple[float, float]:
    """Return how many times as long as modelled messages took, and how much longer besides.

    Messages of one size do not tell these apart. Small ones take a time of their own, large ones
    their bytes' time.
    """
    layout = recognised.layout
    ways = {"tp": (layout.tp, 1), "dp": (layout.dp * layout.cp, layout.tp)}
    rows = [
        (size, float(job.groups.collective_s(op, *ways[kind], np.array([size]))[0]), spent_s)
        for kind in ways
        for op, size, spent_s in recognised.messages.get(kind, ())
        if ways[kind][0] > 1 and op in ("allreduce", "allgather", "reducescatter")
    ]
    sent = [row[1:] for row in recognised.messages.get("pp", ()) if row[0] in ("send", "recv")]
    is_told = job.groups.cluster.name != UNKNOWN_CLUSTER
    if not rows and (is_told or job.device.family == _PROCESSOR or layout.pp == 1 or not sent):
        return 1.0, 0.0
    if not rows:
        # Transfers between stages show an unknown network. Many of them wait for the other stage,
        # so a long time is no sign of a slower network. Gloo ends a send before its bytes arrive.
        stages, stride = np.array([layout.pp]), np.array([layout.devices // layout.pp])
        factors = [
            spent_s / float(job.groups.hops(stages, stride, np.array([size])).slowest_s[0])
            for size, spent_s in sent
        ]
        return min(1.0, float(np.quantile(factors, 0.25))), 0.0
    # Some messages wait for others, or for a late rank: the quicker ones of a size tell.
    size, modelled_s, spent_s = np.array(rows).T
    least, most = size == size.min(), size == size.max()
    small_s, large_s = (float(np.quantile(spent_s[of], 0.25)) for of in (least, most))
    small_modelled_s, large_modelled_s = (float(modelled_s[of][0]) for of in (least, most))
    if size.max() >= 4 * size.min() and size.min() < _LARGE_BYTES:
        factor = (large_s - small_s) / (large_modelled_s - small_modelled_s)
        if factor > _SURE * large_s / large_modelled_s:
            return factor, max(0.0, small_s - factor * small_modelled_s)
    if size.max() >= _LARGE_BYTES or small_s < small_modelled_s:
        return large_s / large_modelled_s, 0.0
    return 1.0, small_s - small_modelled_s


def _unknown(devices: int) -> Cluster:
    """Return one node of devices, for a network of which nothing is known."""
    return Cluster(
        name=UNKNOWN_CLUSTER,
        nodes=1,
        devices_per_node=devices,
        inside=Inside(kind="switch", rate_bps=_NETWORK_BPS, latency_s=_NETWORK_S),
        nics=Nics(per_node=devices, rate_bps=_NETWORK_BPS, latency_s=_NETWORK_S),
        network=OneSwitch(),
    )


_PROCESSOR = "processor"


def device_in(recognised: Recognised, given: Accelerator | None) -> Accelerator | None:
    """Return the device of a trace: the one that it names, else the given one; None names none."""
    if not recognised.device:
        return given
    name = recognised.device.split(", ")[0]
    try:
        return accelerator(name)
    except UsageError:
        if given is not None:
            return given
    raise UsageError(
        "from: expected a trace of a known device, or --device with a file of `fullwire bench "
        f"device` or the name of a similar one, got {shown(name)}"
    )


def _processors(recognised: Recognised) -> Accelerator:
    """Return a device as quick as the products of the trace."""
    model, layout = recognised.model, recognised.layout
    flops = 3 * model.flops(layout.sequence) * layout.tokens / layout.devices
    rate = flops / max(recognised.busy_s["matmul"] + recognised.busy_s["attention"], 1e-9)
    even = Products(
        peak_share=1.0, tile_shares=(1.0,) * 4, ramp=0.0, start_us=0.0, memory_share=1.0, tail=0.0
    )
    return Accelerator(
        name=_PROCESSOR,
        title="the recorded processors",
        family=_PROCESSOR,
        memory_bytes=2**50,  # unknown: every plan fits
        is_memory_stated=False,
        memory_bytes_per_s=rate / 20,
        processors=1,
        power_share=1.0,
        peaks=tuple((kind, rate) for kind in ("fp32", "fp16", "bf16")),
        products=(("bf16", even),),
        attention=Attention(
            forward=1.0,
            backward=1.0,
            wide_forward=1.0,
            wide_backward=1.0,
            forward_ns=0.0,
            backward_ns=0.0,
        ),
        memory_share=1.0,
        spread=0.1,
        is_measured=True,
    )
