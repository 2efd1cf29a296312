"""A parallel plan as it is asked for and answered: decided degrees, and results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fullwire.answers.conditions import OneOrMany, several
from fullwire.clusters import cluster as described_cluster
from fullwire.clusters.cluster import Cluster
from fullwire.clusters.description import as_toml
from fullwire.display import Result
from fullwire.errors import UsageError
from fullwire.findings.finding import Finding
from fullwire.run.facts import Facts
from fullwire.run.placement import INSIDE_A_NODE
from fullwire.run.run import OF_A_PLAN, SLOWED, Collectives, Provenance, Run, Spans
from fullwire.simulation.group_times import as_seen
from fullwire.simulation.plan_space import FIXABLE, MAY_BE_NONE
from fullwire.simulation.recorded_plan import Ratio
from fullwire.simulation.written_steps import meeting
from fullwire.units import count, nearest_name, shown
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.layout import Layout, passes
from fullwire.workloads.stage_memory import summed_gradients_bytes

Objective: TypeAlias = Literal["step", "cost", "goodput"]
OBJECTIVES: tuple[Objective, ...] = ("step", "cost", "goodput")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A 90 % interval of a time."""

    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the device that holds the most, at its peak."""

    params_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """Communication of a step that no computing hides."""

    tp_s: float
    pp_s: float
    dp_s: float
    cp_s: float
    ep_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One parallel plan and its step.

    Parts of the step are means over the stages, as `explain` has them. What the other stages wait
    for the slowest one is bubble.
    """

    tp: int
    pp: int
    vpp: int
    dp: int
    cp: int
    ep: int
    zero: int
    recompute: str
    recompute_layers: int | None
    microbatch: int
    schedule: str
    context_kind: str | None  # of context parallelism, if there is any
    shard: int  # ranks among which ZeRO shards; 1 without it
    etp: int  # ranks that share one expert
    tp_overlap: bool  # computing hides a part of what tensor parallelism sends
    ep_overlap: bool  # computing hides most of what goes to experts and back
    devices: int
    step_s: float
    interval: Range
    tokens_per_s_per_device: float
    model_flops_utilization: float | None  # None where nobody tells the peak of the device
    memory: Memory
    compute_s: float
    bubble_s: float
    exposed: Exposed
    slowest_computing: float  # of the slowest stage, as times of the mean
    slowest_sending: float  # likewise what its layers send
    slowdown_s: float
    optimizer_s: float
    host_s: float
    device_hours: float  # of a million tokens
    fits: bool
    equal: bool  # cannot be told from the best

    def __post_init__(self) -> None:
        """Take no bubble for none: where stages are alike, rounding leaves less than nothing."""
        object.__setattr__(self, "bubble_s", max(0.0, self.bubble_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The worth of one choice of the best plan: the best plan with another value of it."""

    choice: str
    value: str
    other: str
    step_s: float
    slower: float  # as a share of the best step


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting:
    """The training under failures: expected wall time, losses by name, and its range."""

    wall_s: float
    wall_interval: Range
    work_s: float
    goodput: float
    goodput_low: float
    goodput_high: float
    losses: Mapping[str, float]
    checkpoint_bytes: int
    checkpoint_interval_s: float
    interruptions: float
    failures_device_hours: float
    device_hours: float
    cost: float | None
    currency: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FromRun:
    """The plan of a recorded run, and its work against the model's prices."""

    source: str
    tp: int
    pp: int
    dp: int
    cp: int
    zero: int
    microbatch: int
    recompute: str
    global_batch: int
    sequence: int
    precision: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    step_s: float
    ratios: tuple[Ratio, ...]
    not_recognised: tuple[Finding, ...]
    missing: tuple[str, ...]  # data of the recording


@dataclass(frozen=True, slots=True, kw_only=True)
class OnNetwork:
    """The best plan on one network."""

    cluster: str
    device: str
    bandwidth_bps: float
    oversubscription: float
    is_below_one_leaf: bool  # so that no message passes the spine
    plan: Planned | None
    assumed: tuple[Finding, ...]
    does_not_fit: str | None = None  # why there is no plan
    lasting: Lasting | None = None  # of the same work as the best plan's


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCluster:
    """A compared cluster that is not the best one."""

    cluster: str
    times: float | None  # the objective there, as times of the best plan's; None without a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPart:
    """The best plan on a part of the cluster."""

    nodes: int
    plan: Planned


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class PlanAnswer(Result):
    """Plans that fit, best first."""

    model: str
    cluster: str
    device: str
    objective: Objective
    plans: tuple[Planned, ...]
    considered: int
    left_out: Mapping[str, int]
    device_bytes: int
    global_batch: int
    sequence: int
    precision: str
    assumed: tuple[Finding, ...]
    why: tuple[Worth, ...] = ()
    networks: tuple[OnNetwork, ...] = ()
    other_clusters: tuple[OtherCluster, ...] = ()
    # Where the objective tries parts of the cluster: the whole first.
    parts: tuple[OnPart, ...] = ()
    half_bandwidth: OnNetwork | None = None  # None on one node
    lasting: Lasting | None = None
    recorded: FromRun | None = None
    landscape: Mapping[str, Any] | None = None  # for pictures: every plan's degrees and figures
    architecture: Architecture | None = None
    described: Cluster | None = None  # the cluster of the best plan, with its nodes

    @property
    def best(self) -> Planned:
        """Return the first plan."""
        return self.plans[0]

    def run(self, place: int = 0) -> Run:
        """Return the step of a plan as a simulated run: `place` 0 is the best plan.

        The run has one rank for each pipeline stage, which stands for the devices of its stage.
        """
        return simulated_step(self, self.plans[place])

    def _in_short(self) -> Iterator[str]:
        best = self.best
        yield f"{self.model} on {self.cluster}: tp {best.tp}, pp {best.pp}, dp {best.dp}"
        yield f"step {best.step_s:.3g} s, the best of {self.considered:,} plans"

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        simple = [
            field.name
            for field in fields(Planned)
            if field.name not in ("memory", "interval", "exposed")
        ]
        return {"plans": {name: [getattr(one, name) for one in self.plans] for name in simple}}


def fixed_degrees(
    given: OneOrMany | Mapping[str, int | str], option: str = "fix"
) -> dict[str, int | str]:
    """Read "tp=8,pp=4", as an option gives it: the degrees of a plan that are decided."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {_degree(name, option): _decided(name, value) for name, value in given.items()}
    fixed: dict[str, int | str] = {}
    for part in several(given, str):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise UsageError(f"{option}: expected NAME=VALUE such as tp=8, got {shown(part)}")
        if (name := _degree(name, option)) in fixed:
            raise UsageError(f"{option}: expected one {name}, got {fixed[name]} and {value}")
        fixed[name] = _decided(name, value)
    return fixed


def _decided(name: str, value: int | str) -> int | str:
    is_word = name in ("recompute", "schedule", "context")
    return value if is_word else count(value, name, least=0 if name in MAY_BE_NONE else 1)


def _degree(name: str, option: str) -> str:
    """Return the name of a degree, if it is one; capital letters are as good as small ones."""
    if name.lower() not in FIXABLE:
        raise UsageError(
            f"{option}: expected one of {', '.join(FIXABLE)}, got {shown(name)}"
            f"{nearest_name(name, FIXABLE)}"
        )
    return name.lower()


def simulated_step(answer: PlanAnswer, plan: Planned) -> Run:
    """Play the step of a plan: the passes of each stage, its collectives, the optimizer.

    The last stage stands for the slowest one, and the other stages share what the mean leaves.
    Transfers between stages take as long as the priced step leaves. Rows hold the communication
    that computing does not hide.
    """
    model, cluster = answer.architecture, answer.described
    assert model is not None
    assert cluster is not None
    cluster = described_cluster(cluster, plan.devices // cluster.devices_per_node)
    if plan.pp > 1 and plan.schedule not in ("1f1b", "interleaved"):
        raise UsageError(
            f"schedule: expected 1f1b or interleaved for a simulated step, got {plan.schedule}"
        )
    target_s = plan.step_s - plan.exposed.dp_s - plan.optimizer_s
    sizes = _sent_bytes(answer, plan, model)

    def played_with(hop_s: float) -> _Pipeline:
        return _Pipeline(answer.global_batch, plan, sizes, cluster, hop_s, is_tied=model.is_tied)

    hop_s = 0.0
    if plan.pp > 1:
        hop_s = meeting(lambda tried_s: played_with(tried_s).end_s, target_s, plan.exposed.pp_s)
    played = played_with(hop_s)
    played.update(target_s)
    ranks, lanes, names, starts, ends = zip(*sorted(played.spans), strict=True)
    spans = Spans(
        rank=np.array(ranks),
        step=np.zeros(len(ranks), np.int64),
        lane=np.array(lanes, object),
        name=np.array(names, object),
        start_ns=_whole_ns(starts),
        end_ns=_whole_ns(ends),
    )
    return Run(
        provenance=Provenance(
            origin="simulated", source=f"{OF_A_PLAN}{model.name}", basis="modelled"
        ),
        facts=Facts(
            workers=plan.devices,
            model=model.name,
            device=answer.device,
            precision=answer.precision,
            batch=f"{answer.global_batch / plan.dp:g} sequences of {answer.sequence} tokens",
            line_rate_bps=cluster.nics.rate_bps,
            cluster=as_toml(cluster),
        ),
        spans=spans,
        collectives=played.table(),
    )


def _sent_bytes(answer: PlanAnswer, plan: Planned, model: Architecture) -> dict[str, float]:
    """Return the bytes of each kind of communication in one pass of a microbatch, or of a step.

    A gather and a scatter of the same bytes count as one all-reduce. Data parallelism counts each
    gradient once, though ZeRO may send it several times and groups of shards may sum it again.
    """
    layers = model.layers / plan.pp / plan.vpp
    with_experts = layers * model.moe_layers / model.layers
    sequences_tokens = float(plan.microbatch * answer.sequence)
    tokens_bytes = 2 * sequences_tokens / plan.cp * model.hidden
    routed_bytes = tokens_bytes / plan.tp * (0 if model.moe is None else model.moe.top_k)
    summed_bytes = (2 * layers - with_experts) * tokens_bytes if plan.tp > 1 else 0.0
    if plan.etp > 1:  # the ranks of one expert gather the rows of all of them
        summed_bytes += with_experts * routed_bytes * plan.etp
    names = ("tp", "pp", "vpp", "dp", "cp", "ep", "etp", "zero", "microbatch", "recompute")
    degrees = {name: getattr(plan, name) for name in (*names, "recompute_layers", "schedule")}
    shard = plan.shard if plan.zero else None
    layout = Layout(
        **degrees, shard=shard, global_batch=answer.global_batch, sequence=answer.sequence
    )
    return {
        "tp": summed_bytes,
        "cp": layers * 2 * sequences_tokens * float(model.keys_and_values(plan.tp)),
        "ep": 2 * with_experts * routed_bytes,
        "pp": tokens_bytes / plan.tp,
        "dp": summed_gradients_bytes(model, layout, plan.memory.gradients_bytes),
    }


_OPS = {"tp": "allreduce", "cp": "allgather", "ep": "alltoall"}


class _Pipeline:
    """The passes of a step as each stage's device works through them."""

    def __init__(
        self,
        global_batch: int,
        plan: Planned,
        sizes: Mapping[str, float],
        cluster: Cluster,
        hop_s: float,
        *,
        is_tied: bool,
    ) -> None:
        self.plan, self.sizes = plan, sizes
        self.of_node = cluster.devices_per_node
        self.inside = _kinds_inside(plan, cluster, is_tied=is_tied)
        self.spans: list[tuple[int, str, str, float, float]] = []
        self.collectives: list[tuple[Any, ...]] = []
        self.free_s = [0.0] * plan.pp
        self.passes_s: list[list[tuple[float, float]]] = [[] for _ in range(plan.pp)]
        self.hops: list[tuple[int, int, float, float]] = []  # sender, receiver, begin, issue
        stages, chunks = plan.pp, plan.vpp
        microbatches = global_batch // plan.dp // plan.microbatch
        self.parts = microbatches * chunks
        self.hop_s = hop_s
        self.computing = _of_stages(plan.slowest_computing, stages)
        self.sending = _of_stages(plan.slowest_sending, stages)
        # A pipeline is filled and drained with passes of the mean stage. What the bubble does not
        # repeat comes late: computing beside sums of gradients, and the host's time for a step.
        sent_s = plan.exposed.tp_s + plan.exposed.cp_s + plan.exposed.ep_s
        uneven_s = (self.computing[-1] - 1) * plan.compute_s + (self.sending[-1] - 1) * sent_s
        passes_s = (plan.bubble_s - uneven_s) * chunks * microbatches / max(stages - 1, 1)
        waited_s = max(0.0, passes_s - plan.compute_s - sent_s)
        self.host_s = min(plan.host_s, waited_s if stages > 1 else plan.host_s)
        self.late_s = plan.slowdown_s + plan.host_s - self.host_s
        waiting = [passes(stages, chunks, microbatches, stage)[::-1] for stage in range(stages)]
        here_s: dict[tuple[bool, int, int], float] = {}  # when a pass has its input
        last = stages * chunks - 1
        here_s.update({(True, 0, number): 0.0 for number in range(microbatches)})
        while any(waiting):
            for stage, order in enumerate(waiting):
                while order:
                    forward, chunk, number = order[-1]
                    place = chunk * stages + stage
                    if (forward, place, number) not in here_s:
                        break
                    order.pop()
                    begin_s = max(self.free_s[stage], here_s[forward, place, number])
                    sender = (stage - 1 if forward else stage + 1) % stages
                    if sender != stage and place != (0 if forward else last):
                        self.hops.append((sender, stage, begin_s, self.free_s[stage]))
                        begin_s += hop_s
                    end_s = self._work(stage, begin_s, forward=forward)
                    following = place + (1 if forward else -1)
                    if forward and place == last:
                        here_s[False, place, number] = end_s
                    else:
                        here_s[forward, following, number] = end_s
                    self.passes_s[stage].append((begin_s, end_s))
                    self.free_s[stage] = end_s

    @property
    def end_s(self) -> float:
        """Return the end of the last pass and of what comes late."""
        return max(self.free_s) + self.late_s

    def _transfers(self) -> None:
        """Add the transfers between stages, of which a mean stage shows what the plan prices.

        A hop is as long as the whole step needs. Stages that wait for each other anyway wait longer
        for such hops, which is a part of the bubble. The sender goes on with its next pass, so it
        takes part in a transfer from its start. Only the receiver waits for it.
        """
        shown_s = meeting(self._shown_s, self.plan.exposed.pp_s, self.hop_s)
        for sender, stage, begin_s, issue_s in self.hops:
            group = self._between(min(sender, stage), max(sender, stage))
            start_s = begin_s + self.hop_s - shown_s
            for rank, issued_s in ((sender, start_s), (stage, issue_s)):
                self._collective(rank, group, "sendrecv", "pp", start_s, shown_s, issued_s)

    def _shown_s(self, transfer_s: float) -> float:
        """Return what a mean stage shows of its transfers, if each takes so long."""
        total_s = 0.0
        for rank, passes_s in enumerate(self.passes_s):
            ends = np.sort([hop[2] + self.hop_s for hop in self.hops if rank in hop[:2]])
            begins = ends - transfer_s
            begins[1:] = np.maximum(begins[1:], ends[:-1])  # two at once count once
            edges = np.array(passes_s).ravel()  # of passes, and of the gaps between them
            lengths = np.diff(edges)
            lengths[1::2] = 0.0
            worked = np.append(0.0, np.cumsum(lengths))
            beside = np.interp(ends, edges, worked) - np.interp(begins, edges, worked)
            total_s += float((ends - begins - beside).sum())
        return total_s / len(self.free_s)

    def _work(self, stage: int, begin_s: float, *, forward: bool) -> float:
        """Add one pass: computing, then the communication it waited for, then the host."""
        plan = self.plan
        repeats = 4 if plan.recompute == "full" else 3  # forward, backward twice as long
        part = (1 if forward else repeats - 1) / repeats / self.parts
        end_s = begin_s + part * self.computing[stage] * plan.compute_s
        self.spans.append((stage, "compute", "forward" if forward else "backward", begin_s, end_s))
        for kind, op in _OPS.items():
            sent_s = part * self.sending[stage] * float(getattr(plan.exposed, f"{kind}_s"))
            if sent_s > 0:
                self._collective(stage, self._group(kind, stage), op, kind, end_s, sent_s)
                end_s += sent_s
        return end_s + part * self.host_s

    def _group(self, kind: str, stage: int) -> str:
        """Name the group of one kind on a stage; a group inside a node uses no NIC."""
        return f"{kind} of stage {stage}{INSIDE_A_NODE if kind in self.inside else ''}"

    def _between(self, one: int, other: int) -> str:
        """Name the group of two stages; all their devices may be in one node."""
        devices = self.plan.tp * self.plan.cp * self.plan.dp
        first, last = one * devices // self.of_node, ((other + 1) * devices - 1) // self.of_node
        return f"stages {one} and {other}{INSIDE_A_NODE if first == last else ''}"

    def _collective(
        self,
        rank: int,
        group: str,
        op: str,
        kind: str,
        begin_s: float,
        sent_s: float,
        issue_s: float | None = None,
    ) -> None:
        times_s = (begin_s if issue_s is None else issue_s, begin_s, begin_s + sent_s)
        self.spans.append((rank, "communication", op, *times_s[1:]))
        self.collectives.append((rank, group, op, int(self.sizes[kind]), *times_s))

    def update(self, target_s: float) -> None:
        """End the step: what comes late, sums of gradients, all stages' norm, the optimizer."""
        plan = self.plan
        self._transfers()
        scale = (target_s - self.late_s) / max(self.free_s)
        self.spans = [(*row[:3], row[3] * scale, row[4] * scale) for row in self.spans]
        self.collectives = [
            (*row[:4], *(scale * time_s for time_s in row[4:])) for row in self.collectives
        ]
        for stage, free_s in enumerate(self.free_s):
            begin_s = scale * free_s
            self.free_s[stage] = begin_s + self.late_s
            if plan.slowdown_s > 0:
                self.spans.append((stage, "compute", SLOWED, begin_s, begin_s + plan.slowdown_s))
        op = "allreduce" if plan.zero == 0 else "reducescatter"
        ready_s = target_s + plan.exposed.dp_s
        for stage, free_s in enumerate(self.free_s):
            if plan.exposed.dp_s > 0:
                name = self._group("dp", stage)
                self._collective(stage, name, op, "dp", free_s, plan.exposed.dp_s)
            if plan.pp > 1:  # the norm of all gradients
                self.collectives.append(
                    (stage, "stages", "allreduce", 4, free_s + plan.exposed.dp_s, ready_s, ready_s)
                )
            self.spans.append((stage, "compute", "optimizer", ready_s, plan.step_s))
            self.spans.append((stage, "host", "step", 0.0, plan.step_s))

    def table(self) -> Collectives:
        """Return the collectives, numbered within their group and operation."""
        if not self.collectives:
            return Collectives.empty()
        rows = sorted(self.collectives, key=lambda row: (row[5], row[0]))
        ranks, groups, ops, sizes, issues, starts, ends = zip(*rows, strict=True)
        numbers: Counter[tuple[int, str, str]] = Counter()
        sequence = []
        for key in zip(ranks, groups, ops, strict=True):
            sequence.append(numbers[key])
            numbers[key] += 1
        return Collectives(
            rank=np.array(ranks),
            step=np.zeros(len(rows), np.int64),
            sequence=np.array(sequence),
            group=np.array(groups, object),
            op=np.array(ops, object),
            dtype=np.full(len(rows), "bfloat16", object),
            bytes=np.array(sizes),
            issue_ns=_whole_ns(issues),
            start_ns=_whole_ns(starts),
            end_ns=_whole_ns(ends),
        )


def _kinds_inside(plan: Planned, cluster: Cluster, *, is_tied: bool) -> set[str]:
    """Return the kinds of communication whose groups are inside a node, as they are priced.

    With data parallelism the first and the last stage add up a tied embedding's gradients, too.
    """
    has_tied_ends = is_tied and plan.pp > 1 and plan.devices > cluster.devices_per_node
    ends = ((2, plan.devices - plan.devices // plan.pp),) if has_tied_ends else ()
    layouts = {  # members, and how many ranks they are apart
        "tp": ((plan.tp, 1), (plan.etp, 1)),
        "cp": ((plan.cp, plan.tp),),
        "ep": ((plan.ep, plan.etp),),
        "dp": ((plan.dp * plan.cp, plan.tp), *ends),
    }
    return {
        kind
        for kind, groups in layouts.items()
        if all(as_seen(cluster, ranks, apart).nodes == 1 for ranks, apart in groups)
    }


def _of_stages(slowest: float, stages: int) -> list[float]:
    """Return the work of each stage as times of the mean, where the last one is the slowest."""
    others = max(0.0, (stages - slowest) / max(stages - 1, 1))
    return [others] * (stages - 1) + [slowest]


def _whole_ns(times_s: Sequence[float]) -> NDArray[np.int64]:
    return np.rint(np.array(times_s) * 1e9).astype(np.int64)
