"""The time of one training step of a large model under parallel plans, many plans at once.

A step is microbatches that pass through the stages of a pipeline, then the sum of gradients and the
optimizer. `price` adds these parts up for arrays of plans:

- a layer's operations, by shape, type and device (`workloads.operations`);
- collectives of tensor, context and expert parallelism in each layer, and transfers between stages,
  on the links that the rank order gives each group (`group_times`);
- the bubble of the schedule;
- sums of gradients and gathers of parameters, as far as computing does not hide them.

Computing beside communication is slower (`overlap_slowdown`), so a hidden second is not free. The
host launches kernels; a layer whose kernels are shorter than their launches takes as long as these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from fullwire.clusters.cluster import Floats, Ints
from fullwire.simulation.group_times import GroupTimes
from fullwire.simulation.habits import Habits
from fullwire.simulation.plan_columns import Plans, spread
from fullwire.simulation.priced import Priced
from fullwire.workloads.accelerators import Accelerator
from fullwire.workloads.architecture import Architecture, Matrix, Moe
from fullwire.workloads.layout import CONTEXT_KINDS, RECOMPUTE, SCHEDULES, Precision
from fullwire.workloads.operations import (
    attention_s,
    cross_entropy_s,
    memory_bound_s,
    optimizer_s,
    product_s,
)
from fullwire.workloads.stage_memory import stage_layers

_EP_SHOWN = 0.3  # of all-to-all beside computing
_LIGHT = 0.5  # of moved values, by norms and activation functions
_LAST_BUCKET = 0.05  # of the gradients, which nothing hides
_LAST_LAYER = 0.03  # of gathered parameters, likewise
# How sharply device and host hide each other: 1 would add their times, infinity take the longer.
_HIDES = 3.0


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """What is priced: plans of one model on equal devices of one cluster."""

    plans: Plans
    model: Architecture
    device: Accelerator
    groups: GroupTimes
    habits: Habits
    precision: Precision

    @property
    def is_narrow(self) -> bool:
        """Whether values are cast to 8 or 4 bits, and parameters sent in 8."""
        return self.device.arithmetic(self.precision) in ("fp8", "fp4")

    @property
    def value_bytes(self) -> int:
        """The bytes of a value outside of products: hidden vectors and gathered parameters."""
        return 4 if self.precision == "fp32" else 2

    @property
    def own_tokens(self) -> Floats:
        """The tokens of a microbatch that a rank of a tensor-parallel group has for itself."""
        ways = np.where(self.plans.sequence_parallel > 0, self.plans.tp, 1)
        return np.asarray(self.plans.rank_tokens / ways)

    def matrices_s(self, matrices: Sequence[Matrix], precision: str | None = None) -> Floats:
        """Return the forward time of multiplying a microbatch with each of some matrices."""
        total = np.zeros(len(self.plans))
        for matrix in matrices:
            columns = matrix.outputs_on_rank(self.plans.tp)
            inner = matrix.inputs_on_rank(self.plans.tp)
            total += self.product_s(self.plans.rank_tokens, columns, inner, 1, precision)
        return self.habits.gemm * total

    def product_s(
        self,
        rows: Floats,
        columns: Floats,
        inner: Floats,
        groups: Floats | int,
        precision: str | None = None,
    ) -> Floats:
        """Time products of matrices; plans share most shapes, so each shape is timed once."""
        count = np.broadcast_to(np.asarray(groups, np.int64), rows.shape)
        sizes = [np.ceil(size).astype(np.int64) for size in (rows, columns, inner)]
        code = sizes[0] * 31_415_926_535 + sizes[1] * 27_182_818 + sizes[2] * 1_618 + count
        _, first, which = np.unique(code, return_index=True, return_inverse=True)
        m, n, k = (size[first] for size in sizes)
        times_s = product_s(
            self.device, m, n, k, precision=precision or self.precision, groups=count[first]
        )
        return np.asarray(times_s[which])

    def attention_s(self) -> tuple[Floats, Floats]:
        """Return the forward and backward time of scores and values, a mean over layers."""
        plans, model = self.plans, self.model
        lengths, which = np.unique(plans.sequence, return_inverse=True)
        layers = range(model.layers)
        seen = [np.mean([model.keys(layer, int(length)) for layer in layers]) for length in lengths]
        mla = model.mla

        def times_s(*, is_fused: bool) -> tuple[Floats, Floats]:
            habit = self.habits.attention if is_fused else self.habits.plain_attention
            if is_fused and model.positions == "alibi":
                habit *= self.habits.biased_attention
            forward_s, backward_s = (
                attention_s(
                    self.device,
                    queries=plans.sequence / plans.cp,
                    keys=np.array(seen)[which],
                    heads=np.ceil(model.heads / plans.tp),
                    head_dim=model.head_dim if mla is None else mla.nope_dim + mla.rope_dim,
                    value_dim=None if mla is None else mla.value_dim,
                    batch=plans.microbatch,
                    backward=backward,
                    is_fused=is_fused,
                )
                for backward in (False, True)
            )
            return habit * forward_s, habit * backward_s

        is_fused = plans.flash_attention > 0
        if is_fused.all():
            return times_s(is_fused=True)
        both = zip(times_s(is_fused=True), times_s(is_fused=False), strict=True)
        forward_s, backward_s = (np.where(is_fused, fused, plain) for fused, plain in both)
        return forward_s, backward_s

    def memory_s(self, moved_bytes: Floats) -> Floats:
        """Time what only moves bytes."""
        return memory_bound_s(self.device, moved_bytes, kernels=0)

    def moved_s(self, ffn: int) -> Floats:
        """Return the forward time of norms, residuals, rotation, activation and casts."""
        plans, model, rows = self.plans, self.model, self.plans.rank_tokens
        # Each norm reads and writes the hidden vectors; each of two sums reads two and writes one.
        wide = (2 * model.layer_norms + 6) * self.own_tokens * model.hidden
        inner = (3 if model.is_gated else 2) * rows * ffn / plans.tp
        turned = 1.5 * rows * model.score_dims / plans.tp
        moved = self.value_bytes * (wide + inner + turned)
        if self.is_narrow:  # a cast reads 2 bytes and writes 1, and once more transposed
            cast = rows * (2 * model.hidden + (model.score_dims / 2 + ffn) / plans.tp)
            moved = moved + 4 * self.habits.casts * cast
        return self.habits.vector * self.memory_s(moved)

    def sums_s(self, op: str, ranks: Ints, stride: Ints, sizes_bytes: Floats) -> Floats:
        """Time a collective of each plan."""
        return self.groups.each_s(op, ranks, stride, sizes_bytes)


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """One microbatch through one layer, forward and backward: on the device, and exposed."""

    forward_s: Floats
    backward_s: Floats  # with recomputation
    weights_s: Floats  # of backward, what only the gradients of weights need
    tp_s: Floats
    cp_s: Floats
    ep_s: Floats
    launch_s: Floats
    attention_s: Floats  # of forward and backward
    moved_s: Floats
    experts_s: Floats
    parameters: Floats  # of one rank, without experts
    expert_parameters: Floats

    @property
    def sent_s(self) -> Floats:
        """The exposed communication."""
        return self.tp_s + self.cp_s + self.ep_s

    @property
    def busy_s(self) -> Floats:
        """The time of both passes on the device, with what is sent."""
        return self.forward_s + self.backward_s + self.sent_s

    @property
    def waited_s(self) -> Floats:
        """The time that the device waits for the host."""
        return self.whole_s - self.busy_s

    @property
    def whole_s(self) -> Floats:
        """The time of both passes: about that of the device or of the host, whichever is longer.

        Some of a layer's kernels are shorter than their launches and some are longer, so neither
        hides the other wholly where both take about as long.
        """
        longer_s = np.maximum(self.busy_s, self.launch_s)
        shorter = np.minimum(self.busy_s, self.launch_s) / longer_s
        return np.asarray(longer_s * (1 + shorter**_HIDES) ** (1 / _HIDES))

    @property
    def heeded(self) -> Floats:
        """How much longer a layer takes where its device takes a second longer."""
        return np.asarray((self.busy_s / self.whole_s) ** (_HIDES - 1))

    def mixed(self, other: Pass, share: float) -> Pass:
        """Return the mean layer where the other kind has this share."""
        return Pass(
            *(
                (1 - share) * getattr(self, field.name) + share * getattr(other, field.name)
                for field in fields(self)
            )
        )


def mean_layer(job: Job) -> Pass:
    """Return the mean of a model's layers, with and without experts."""
    share = job.model.moe_layers / job.model.layers
    if share == 0:
        return layer_pass(job, has_experts=False)
    with_experts = layer_pass(job, has_experts=True)
    return (
        with_experts
        if share == 1
        else layer_pass(job, has_experts=False).mixed(with_experts, share)
    )


def layer_pass(job: Job, *, has_experts: bool) -> Pass:
    """Price one layer of one kind."""
    plans, model, habits = job.plans, job.model, job.habits
    core_s, core_back_s = job.attention_s()
    matrices = model.attention_matrices
    moe = model.moe if has_experts else None
    matrices += model.dense_matrices if moe is None else model.shared_matrices
    multiplied_s = job.matrices_s(matrices)
    moved_s = job.moved_s(model.ffn if moe is None else moe.shared_ffn)
    parameters = np.zeros(len(plans))
    for matrix in matrices:
        parameters = parameters + matrix.parameters_on_rank(plans.tp)
    experts = ep_s = of_experts_s = np.zeros(len(plans))
    if moe is not None:
        experts = moe.experts * model.expert_parameters / (plans.ep * plans.etp)
        of_experts_s, sorted_s, ep_s = _experts(job, moe)
        multiplied_s, moved_s = multiplied_s + of_experts_s, moved_s + sorted_s
    added_s = job.memory_s(2.0 * plans.gradient_bytes * (parameters + experts))
    forward_s = multiplied_s + core_s + moved_s
    again = (plans.recompute == RECOMPUTE.index("full")) * plans.recomputed
    backward_s = 2 * multiplied_s + core_back_s + 2 * moved_s + added_s + again * forward_s
    # Selective: attention's scores where they are kept, else norms and activation functions.
    light_s = np.where(plans.flash_attention > 0, _LIGHT * moved_s, core_s)
    backward_s = backward_s + (plans.recompute == RECOMPUTE.index("selective")) * light_s
    launch_s = np.full(len(plans), habits.launch_s)
    if moe is not None:
        local = np.ceil(moe.experts / plans.ep)
        launch_s = launch_s + habits.routing_s + habits.expert_s * local
    return Pass(
        forward_s=forward_s,
        backward_s=backward_s,
        weights_s=multiplied_s + added_s,
        tp_s=_tensor_parallel_s(job, again, moe),
        cp_s=_context_parallel_s(job, core_s, core_back_s, again),
        ep_s=ep_s * (2 + again),
        launch_s=launch_s * (2.5 + again),
        attention_s=(1 + again) * core_s + core_back_s,
        moved_s=(3 + again) * moved_s,
        experts_s=(3 + again) * of_experts_s,
        parameters=parameters,
        expert_parameters=experts,
    )


def _experts(job: Job, moe: Moe) -> tuple[Floats, Floats, Floats]:
    """Return the forward times of experts, of sorting tokens for them, and of sending tokens."""
    plans, model, habits = job.plans, job.model, job.habits
    own_rows = plans.rank_tokens / plans.tp * moe.top_k  # with balanced routing
    rows = own_rows * plans.etp
    local = np.ceil(moe.experts / plans.ep)
    multiplied_s = np.zeros(len(plans))
    for matrix in model.expert_matrices:
        columns, inner = matrix.outputs_on_rank(plans.etp), matrix.inputs_on_rank(plans.etp)
        multiplied_s += job.product_s(rows / local, columns, inner, local)
    sorted_bytes = job.value_bytes * rows * (6 * model.hidden + 3.5 * moe.ffn / plans.etp)
    if job.is_narrow:
        cast = rows * (model.hidden + moe.ffn / plans.etp)
        sorted_bytes = sorted_bytes + 4 * habits.casts * cast
    if model.biases == "all":  # these experts also clamp: passes of their own over each row
        sorted_bytes += job.value_bytes * rows * (2 * model.hidden + 14 * moe.ffn / plans.etp)
    sorted_bytes = sorted_bytes + 24 * job.own_tokens * moe.experts  # scores of the router
    # Each rank sends its own rows; `_within_experts_s` shares them among the ranks of an expert.
    # A token goes to a node once, and is copied to its experts there.
    nodes = np.maximum(1.0, plans.ep * plans.etp / job.groups.cluster.devices_per_node)
    copies = nodes * (1 - (1 - 1 / nodes) ** moe.top_k) / moe.top_k
    sent = own_rows * np.where(nodes > 1, copies, 1.0)
    sent_s = job.sums_s("alltoall", plans.ep, plans.etp, job.value_bytes * sent * model.hidden)
    between = habits.ep_between / habits.ep
    sent_s = sent_s * np.where(nodes > 1, between, 1.0)
    shown = habits.ep * np.where(plans.ep_overlap > 0, _EP_SHOWN, 1.0)
    return (
        habits.gemm * habits.experts * multiplied_s,
        habits.vector * job.memory_s(sorted_bytes),
        2 * shown * sent_s,  # to the experts and back
    )


def _tensor_parallel_s(job: Job, again: Floats, moe: Moe | None) -> Floats:
    """Return the exposed time of both passes: behind attention, and in an MLP or experts."""
    plans, habits = job.plans, job.habits
    one = np.ones_like(plans.tp)
    tokens_bytes = plans.rank_tokens * job.model.hidden * job.value_bytes
    gathered_s = job.sums_s("allgather", plans.tp, one, tokens_bytes)
    scattered_s = job.sums_s("reducescatter", plans.tp, one, tokens_bytes)
    summed_s = job.sums_s("allreduce", plans.tp, one, tokens_bytes)
    is_parallel = plans.sequence_parallel > 0
    # Backward gathers its input once more, half of it beside the other multiplication.
    by_sequence_s = (2 + again) * (gathered_s + scattered_s) + 0.5 * gathered_s
    whole_s = (2 + again) * summed_s
    shown = habits.tp * np.where(plans.tp_overlap > 0, 1 - habits.tp_hidden, 1.0)
    if moe is not None:  # tokens that sequence parallelism divides go to experts as they are
        return (
            shown * np.where(is_parallel, by_sequence_s, whole_s)
            + np.where(is_parallel, 0.0, whole_s)
            + habits.tp * (2 + again) * _within_experts_s(job, moe)
        )
    return np.asarray(2 * shown * np.where(is_parallel, by_sequence_s, whole_s))


def _within_experts_s(job: Job, moe: Moe) -> Floats:
    """Time the gather of rows among the ranks of one expert, and the scatter of their sums."""
    plans, one = job.plans, np.ones_like(job.plans.etp)
    rows = plans.rank_tokens / plans.tp * moe.top_k * plans.etp
    rows_bytes = job.value_bytes * rows * job.model.hidden
    gathered_s = job.sums_s("allgather", plans.etp, one, rows_bytes)
    return gathered_s + job.sums_s("reducescatter", plans.etp, one, rows_bytes)


def _context_parallel_s(job: Job, core_s: Floats, core_back_s: Floats, again: Floats) -> Floats:
    """Return the exposed time of keys and values that go around while scores are computed."""
    plans = job.plans
    whole = plans.rank_tokens * plans.cp
    kept_bytes = job.value_bytes * whole * job.model.keys_and_values(plans.tp)
    around_s = job.sums_s("allgather", plans.cp, plans.tp, kept_bytes)
    # Ulysses swaps queries and what attention returns, then keys and values.
    turned_bytes = job.value_bytes * plans.rank_tokens * job.model.score_dims / plans.tp / 2
    few_bytes = job.value_bytes * plans.rank_tokens / 2
    few_bytes = few_bytes * job.model.keys_and_values(plans.tp, plans.cp)
    swapped_s = 2 * sum(
        job.sums_s("alltoall", plans.cp, plans.tp, one_bytes)
        for one_bytes in (turned_bytes, few_bytes)
    )
    forward_s = np.maximum(0.15 * around_s, around_s - core_s)
    backward_s = np.maximum(0.3 * around_s, 2 * around_s - core_back_s)
    ring_s = (1 + again) * forward_s + backward_s
    # Attention waits for the gather; backward gathers again, and adds gradients up at the end.
    gathered_s = (3 + again) * around_s
    shown_s = np.select(
        [plans.context_kind == CONTEXT_KINDS.index(kind) for kind in ("ulysses", "all-gather")],
        [(2 + again) * swapped_s, gathered_s],
        ring_s,
    )
    return np.where(plans.cp > 1, shown_s, 0.0)


@dataclass(frozen=True, eq=False, slots=True)
class Stages:
    """The pipeline of each plan: its slowest device for one microbatch, and all devices' mean.

    A device holds one stage. DualPipe gives it two, each of which passes half of the microbatches,
    so the mean of both counts.
    """

    layers: Floats  # of the slowest device
    head_s: Floats  # of it; 0 unless it holds the last stage
    mean_s: Floats
    most_layers: Floats


def stages(job: Job, layer: Pass) -> Stages:
    """Divide the layers among stages, and find the slowest device: the last stage has the head."""
    plans, model = job.plans, job.model
    layers = model.layers + model.mtp_layers
    first, most, last = stage_layers(model, plans.pp)
    heads = 1 + model.mtp_layers
    losses_s = cross_entropy_s(job.device, plans.rank_tokens, model.vocab / plans.tp)
    head_s = heads * (3 * job.matrices_s([model.head_matrix], "bf16") + losses_s)
    # With DualPipe, the device of the last stage holds the first one too. Of two stages, both
    # devices hold both.
    is_dual = plans.schedule == SCHEDULES.index("dualpipe")
    at_end = np.where(is_dual, (first + last) / 2, last)
    head_here_s = np.where(is_dual, head_s / 2, head_s)
    is_end = at_end * layer.whole_s + head_here_s > most * layer.whole_s
    is_end |= is_dual & (plans.pp == 2)
    return Stages(
        layers=np.where(is_end, at_end, most),
        head_s=np.where(is_end, head_here_s, 0.0),
        mean_s=(layers * layer.whole_s + head_s) / plans.pp,
        most_layers=np.asarray(most, np.float64),
    )


def bubble_s(job: Job, layer: Pass, pipe: Stages) -> Floats:
    """Return the time that a stage is idle while the pipeline fills and drains.

    An interleaved schedule divides it by the chunks of a stage. Zero-bubble (ZB-H1, Qi et al. 2024)
    and DualPipe (DeepSeek-V3, table 2) fill it with the gradients of weights.
    """
    plans = job.plans
    weights_s = pipe.layers * layer.weights_s
    plain_s = (plans.pp - 1) * pipe.mean_s / plans.vpp
    zero_s = (plans.pp - 1) * np.maximum(pipe.mean_s - 2 * weights_s, 0.1 * pipe.mean_s)
    both_s = np.maximum(pipe.mean_s - weights_s, 0.2 * pipe.mean_s)
    dual_s = np.maximum(plans.pp / 2 - 1, 0) * both_s
    return np.select(
        [
            plans.schedule == SCHEDULES.index("zero-bubble"),
            plans.schedule == SCHEDULES.index("dualpipe"),
        ],
        [zero_s, dual_s],
        plain_s,
    )


def transfers_s(job: Job, layer: Pass, pipe: Stages) -> Floats:
    """Return the exposed transfers between stages.

    To fill and drain the pipeline, values pass each hop in turn. In between all stages send at the
    same time, so the slowest hop decides.
    An interleaved schedule hides most of them, as far as computing lasts that long. Collectives
    hide none: they may need the same links.
    """
    plans = job.plans
    size_bytes = job.own_tokens * job.model.hidden * job.value_bytes
    hops = job.groups.hops(plans.pp, plans.tp * plans.cp * plans.dp, size_bytes)
    hop_s = hops.slowest_s
    # A stage sends the values of each chunk onwards and their gradients back. Both of two stages
    # are ends of the pipeline, where one chunk sends in one direction alone.
    sent_s = plans.microbatches * hop_s * (2 * plans.vpp - (plans.pp == 2))
    computing_s = pipe.layers * (layer.whole_s - layer.sent_s) + pipe.head_s
    left_s = sent_s - plans.microbatches * computing_s
    among_chunks_s = np.maximum(job.habits.hop_exposed * sent_s, left_s)
    shown_s = np.where(plans.vpp > 1, among_chunks_s, 2 * plans.microbatches * hop_s)
    return np.where(plans.pp > 1, shown_s + 2 * hops.all_s, 0.0)


@dataclass(frozen=True, eq=False, slots=True)
class Replicas:
    """What data parallelism adds to a step."""

    exposed_s: Floats
    hidden_s: Floats
    optimizer_s: Floats


def tied_ends_s(job: Job, among: Ints) -> Floats:
    """Time the sum of a tied embedding's gradients over the first and the last stage.

    It follows the sums over copies, so no computing hides it. DualPipe holds both stages on each
    of these devices, and adds up whole stages anyway.
    """
    plans, model = job.plans, job.model
    is_apart = (plans.pp > 1) & (plans.schedule != SCHEDULES.index("dualpipe")) & model.is_tied
    if not is_apart.any():
        return np.zeros(len(plans))
    # From ZeRO-2 on, each rank keeps the gradients of its own share only.
    own = model.head_matrix.parameters / plans.tp / np.where(plans.zero >= 2, among, 1)
    # All stages may be in one node, whose links join any two of its devices.
    is_inside = plans.devices <= job.groups.cluster.devices_per_node
    stride = np.where(is_inside, 1, plans.devices - plans.devices // plans.pp)
    return job.sums_s("allreduce", np.where(is_apart, 2, 1), stride, plans.gradient_bytes * own)


def replicas(job: Job, layer: Pass, pipe: Stages) -> Replicas:
    """Price sums of gradients, gathers of parameters, and the optimizer."""
    plans, model, habits = job.plans, job.model, job.habits
    layers = (model.layers + model.mtp_layers) / plans.pp
    # A tied head on another stage than the embedding has a copy of it.
    has_head = (plans.pp > 1) | (not model.is_tied)
    ends = model.embedding_parameters + has_head * model.head_matrix.parameters
    dense = layers * layer.parameters + ends / np.minimum(plans.pp, 2) / plans.tp
    experts = layers * layer.expert_parameters
    is_full = plans.zero == 3
    kinds = spread(plans, dense, experts if model.moe is not None else None)

    def over_copies_s(op: str, value_bytes: Ints | int) -> Floats:
        return sum(
            (
                job.sums_s(op, kind.among, kind.stride, value_bytes * kind.parameters)
                for kind in kinds
            ),
            start=np.zeros(len(plans)),
        )

    gathering = np.where(is_full, habits.gathering, 1.0)
    sent_bytes = 1 if job.is_narrow else job.value_bytes
    summed_s = over_copies_s("allreduce", plans.gradient_bytes)
    scattered_s = gathering * over_copies_s("reducescatter", plans.gradient_bytes)
    gathered_s = gathering * over_copies_s("allgather", sent_bytes)
    # Shard groups that hold the same values add their gradients up besides, once a step.
    apart_s = np.zeros(len(plans))
    for kind in kinds:
        own_bytes = plans.gradient_bytes * kind.parameters / kind.among
        between = kind.stride * kind.among
        apart_s = apart_s + job.sums_s("allreduce", kind.groups, between, own_bytes)
    # DualPipe has a second copy of each stage, at the other end: both add their gradients up.
    pairs = np.where(plans.schedule == SCHEDULES.index("dualpipe"), 2, 1)
    both_bytes = plans.gradient_bytes * 2.0 * (dense + experts)
    pairs_s = job.sums_s("allreduce", pairs, np.maximum(plans.devices // 2, 1), both_bytes)
    gradients_s = np.where(plans.zero == 0, summed_s, scattered_s) + pairs_s
    parameters_s = np.where(plans.zero == 0, 0.0, gathered_s)
    # Computing that can hide it. A chunk of an interleaved stage is complete while others go on.
    forward_s = pipe.most_layers * (layer.forward_s + (layer.sent_s + layer.waited_s) / 2.2)
    backward_s = pipe.most_layers * layer.whole_s - forward_s
    waiting = np.minimum(plans.microbatches, plans.pp) * (1 - 1 / plans.vpp) + 1 / plans.vpp
    early = 0.9 * np.where(plans.vpp > 1, waiting, 1.0) * plans.dp_overlap
    once_s = np.maximum(gradients_s - early * backward_s, _LAST_BUCKET * gradients_s)
    once_s = once_s + np.maximum(parameters_s - early * forward_s, _LAST_BUCKET * parameters_s)
    back_s = parameters_s + gradients_s
    ahead = plans.dp_overlap
    each_s = np.maximum(parameters_s - ahead * forward_s, _LAST_LAYER * parameters_s)
    each_s = each_s + np.maximum(back_s - ahead * backward_s, _LAST_LAYER * back_s)
    # ZeRO-2 keeps a share of the gradients, so each microbatch adds its own up.
    more = (plans.zero == 2) * (plans.microbatches - 1)
    once_s = once_s + more * np.maximum(
        gradients_s - early * backward_s, _LAST_BUCKET * gradients_s
    )
    back_s = back_s + more * gradients_s
    exposed_s = np.where(is_full, plans.microbatches * each_s, once_s)
    exposed_s = exposed_s + np.maximum(apart_s - early * backward_s, _LAST_LAYER * apart_s)
    ends_s = tied_ends_s(job, kinds[0].among)
    exposed_s = exposed_s + ends_s
    all_s = np.where(is_full, plans.microbatches * (back_s + parameters_s), back_s) + apart_s
    all_s = all_s + ends_s
    shared = sum((kind.parameters / kind.among for kind in kinds), start=np.zeros(len(plans)))
    # Without ZeRO, each of DualPipe's two copies is updated by itself.
    updated = np.where(plans.zero > 0, shared, pairs * (dense + experts))
    updated_s = optimizer_s(job.device, updated)
    cleared = 10.0 * pairs * np.where(is_full, shared, dense + experts)
    return Replicas(exposed_s, all_s - exposed_s, updated_s + job.memory_s(cleared))


def price(job: Job) -> Priced:
    """Price the plans of a job."""
    plans, habits = job.plans, job.habits
    layer = mean_layer(job)
    pipe = stages(job, layer)
    of_replicas = replicas(job, layer, pipe)
    micro = plans.microbatches
    through = micro * pipe.layers
    computed_s = layer.forward_s + layer.backward_s
    compute_s = through * computed_s + micro * pipe.head_s
    mean_layers = (job.model.layers + job.model.mtp_layers) / plans.pp
    mean_s = pipe.mean_s - mean_layers * (layer.whole_s - computed_s)
    parts = {
        "compute_s": compute_s,
        "bubble_s": bubble_s(job, layer, pipe),
        "tp_s": through * layer.tp_s,
        "pp_s": transfers_s(job, layer, pipe),
        "dp_s": of_replicas.exposed_s,
        "cp_s": through * layer.cp_s,
        "ep_s": through * layer.ep_s,
        "slowdown_s": of_replicas.hidden_s * (1 - 1 / habits.overlap_slowdown),
        "optimizer_s": of_replicas.optimizer_s,
        "host_s": through * layer.waited_s + micro * habits.microbatch_s + habits.step_s,
    }
    return Priced(
        step_s=sum(parts.values(), start=np.zeros(len(plans))),
        attention_s=through * layer.attention_s,
        moved_s=through * layer.moved_s,
        experts_s=through * layer.experts_s,
        heeded=layer.heeded,
        mean_compute=micro * mean_s / compute_s,
        mean_layers=mean_layers / pipe.layers,
        **parts,
    )
