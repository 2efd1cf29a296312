"""The memory of a device that trains a large model, by component and pipeline stage, at its peak.

Korthikanti et al. (2022) count the tensors that a layer keeps for its backward pass. Here fused
attention keeps no scores, grouped queries share keys and values, and experts keep the rows that
were sent to them. A stage holds as many microbatches as its schedule has in flight there: the
first stage the most. The last stage also holds the scores of the vocabulary while the loss is
computed: in 16 bits and in 32 bits.

`stages` counts all stages of one plan, `peaks` counts many plans at once, and `verdict` says which
component of which stage is too large, and the smallest change that helps. The allocator reserves
4 % more than is allocated in the median of measured runs and 9 % at most. The driver's context
takes 1.5 GiB and NCCL 0.35 GiB. "Fits" counts with the 9 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fullwire.errors import UsageError
from fullwire.workloads.architecture import Architecture, Matrix
from fullwire.workloads.layout import RECOMPUTE, SCHEDULES, Layout, check_model, even_layers

Floats: TypeAlias = NDArray[np.float64]

GIB = 2**30
RESERVED, MOST_RESERVED = 1.04, 1.09  # of what is allocated
BESIDE_BYTES = int(1.85 * GIB)  # context and NCCL
ADAM_BYTES = 12  # of a parameter: its copy in 32 bits and two moments
# Of one score of the vocabulary, at the loss: 16 bits, and 32 bits for the softmax.
LOGIT_BYTES = 6
_WORKSPACE_BYTES = int(0.1 * GIB)  # of cuBLAS and Transformer Engine
_NARROW = ("fp8", "mxfp8", "nvfp4")


class Columns(Protocol):
    """The degrees of many plans, a column each; `Layout` says what they mean.

    `recompute` and `schedule` are indices into `RECOMPUTE` and `SCHEDULES`. `recomputed` is the
    share of a stage's layers that full recomputation covers.
    """

    tp: Any
    pp: Any
    vpp: Any
    dp: Any
    cp: Any
    ep: Any
    etp: Any
    zero: Any
    shard: Any
    recompute: Any
    recomputed: Any
    microbatch: Any
    global_batch: Any
    sequence: Any
    sequence_parallel: Any
    schedule: Any
    gradient_bytes: Any
    flash_attention: Any


@dataclass(frozen=True, eq=False, slots=True)
class Held:
    """Bytes by component, one number for each plan or for each stage."""

    params_bytes: Floats
    gradients_bytes: Floats
    optimizer_bytes: Floats
    layers_bytes: Floats  # what layers keep for their backward pass, without the next two
    scores_bytes: Floats  # of attention that is not fused
    experts_bytes: Floats  # rows sent to experts, and what experts keep
    logits_bytes: Floats  # scores of the vocabulary and their loss
    gathered_bytes: Floats  # ZeRO-3: parameters and gradients of layers at work
    buffers_bytes: Floats  # of communication, of products, and gradients on their way

    @property
    def activations_bytes(self) -> Floats:
        """Return all that depends on the tokens and is no buffer."""
        kept = self.layers_bytes + self.scores_bytes + self.experts_bytes
        return kept + self.logits_bytes

    @property
    def peak_allocated_bytes(self) -> Floats:
        """Return the sum of all components."""
        total: Floats = sum(
            (getattr(self, field.name) for field in fields(self)), start=np.zeros(())
        )
        return total

    @property
    def peak_reserved_bytes(self) -> Floats:
        """Return what the allocator takes from the device, in the median."""
        return RESERVED * self.peak_allocated_bytes

    def fits(self, memory_bytes: ArrayLike) -> NDArray[np.bool_]:
        """Return whether each fits for sure: with the most that allocators were seen to reserve."""
        needed = MOST_RESERVED * self.peak_allocated_bytes + BESIDE_BYTES
        return np.asarray(needed <= np.asarray(memory_bytes))

    def rows(self, which: Any) -> Held:
        """Return some of the plans or stages."""
        return Held(*(getattr(self, field.name)[which] for field in fields(self)))


def stages(model: Architecture, layout: Layout, *, has_dropout: bool = False) -> Held:
    """Count the memory of each pipeline stage of a plan."""
    plans, every = _columns(layout, model), np.arange(layout.pp)
    held = _held(model, plans, every, layout.precision, has_dropout)
    return Held(
        *(np.broadcast_to(getattr(held, field.name), every.shape) for field in fields(held))
    )


def summed_gradients_bytes(model: Architecture, layout: Layout, held_bytes: int) -> float:
    """Return the gradients that a device adds up, of which ZeRO leaves it `held_bytes`.

    An expert has fewer copies than other parameters, so fewer ranks share its gradients.
    """
    held = stages(model, layout)
    fullest = int(np.argmax(held.peak_allocated_bytes))
    whole = stages(model, replace(layout, zero=0)).gradients_bytes
    return float(held_bytes * whole[fullest] / held.gradients_bytes[fullest])


def peaks(model: Architecture, plans: Columns, *, precision: str = "bf16") -> Held:
    """Count the memory of many plans, each on the stage that holds the most.

    That is the first stage, the first one behind the dense layers of a model with experts, or the
    last one.
    """
    pp = np.asarray(plans.pp)
    first, most, _ = stage_layers(model, pp)
    chunk = np.maximum(1, most // plans.vpp)
    dense = 0 if model.moe is None else model.moe.first_dense
    behind = 1 + np.maximum(0, -((first - most + chunk - dense) // chunk))
    tried = [
        _held(model, plans, stage, precision, False)
        for stage in (np.zeros_like(pp), np.minimum(behind, pp - 1), pp - 1)
    ]
    largest = np.argmax([held.peak_allocated_bytes for held in tried], axis=0)
    return Held(
        *(
            np.choose(largest, [getattr(held, field.name) for held in tried])
            for field in fields(Held)
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a plan fits a device, and if it does not, why, and what helps."""

    fits: bool
    stage: int  # the one that needs the most
    component: str  # the largest of that stage
    component_bytes: float
    needed_bytes: float  # with the most that allocators reserve, the context and NCCL
    device_bytes: int
    change: Layout | None  # the plan with the cheapest single change that makes it fit
    change_name: str  # such as "microbatch 2"; empty if none helps


_COMPONENTS = {
    "params_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "layers_bytes": "activations",
    "scores_bytes": "attention scores",
    "experts_bytes": "rows sent to experts",
    "logits_bytes": "scores of the vocabulary",
    "gathered_bytes": "gathered parameters",
    "buffers_bytes": "buffers",
}


def verdict(model: Architecture, layout: Layout, device_bytes: int) -> Verdict:
    """Say whether a plan fits, which component is too large, and the cheapest change that helps."""
    held = stages(model, layout)
    stage = int(np.argmax(held.peak_allocated_bytes))
    sizes = {name: float(getattr(held, name)[stage]) for name in _COMPONENTS}
    component = max(sizes, key=lambda name: sizes[name])
    does_fit = bool(held.fits(device_bytes).all())
    helping = (
        (name, change)
        for name, change in _changes(layout, model)
        if stages(model, change).fits(device_bytes).all()
    )
    name, change = ("", None) if does_fit else next(helping, ("", None))
    return Verdict(
        fits=does_fit,
        stage=stage,
        component=_COMPONENTS[component],
        component_bytes=sizes[component],
        needed_bytes=MOST_RESERVED * float(held.peak_allocated_bytes[stage]) + BESIDE_BYTES,
        device_bytes=device_bytes,
        change=change,
        change_name=name,
    )


def _changes(layout: Layout, model: Architecture) -> Iterator[tuple[str, Layout]]:
    """Yield plans with one change, those first that cost the least time."""
    wanted: list[tuple[str, dict[str, Any]]] = []
    if layout.tp > 1 and not layout.sequence_parallel:
        wanted.append(("sequence parallelism", {"sequence_parallel": True}))
    if layout.zero == 0:
        wanted.append(("zero 1", {"zero": 1}))
    if not layout.flash_attention:
        wanted.append(("fused attention", {"flash_attention": True}))
    smaller = layout.microbatch
    while (smaller := smaller // 2) >= 1:
        wanted.append((f"microbatch {smaller}", {"microbatch": smaller}))
    if layout.recompute == "none":
        wanted.append(("selective recomputation", {"recompute": "selective"}))
    for level in range(max(2, layout.zero + 1), 4):
        wanted.append((f"zero {level}", {"zero": level}))
    for times in (2, 4, 8):
        if layout.dp % times == 0:
            fewer = layout.dp // times
            for degree in ("tp", "pp", "cp"):
                more = getattr(layout, degree) * times
                change = {degree: more, "dp": fewer, "shard": None}
                wanted.append((f"{degree} {more} and dp {fewer}", change))
    if layout.recompute != "full":
        full = {"recompute": "full", "recompute_layers": None}
        wanted.append(("full recomputation", full))
    for name, change in wanted:
        try:
            tried = replace(layout, **change)
            whole = even_layers(model.layers, model.mtp_layers, tried.pp) or model.layers
            check_model(tried, model, layers=whole)
        except UsageError:  # the batch or the model cannot be divided so
            continue
        yield name, tried


def _columns(layout: Layout, model: Architecture) -> Columns:
    names = (
        "tp",
        "pp",
        "vpp",
        "dp",
        "cp",
        "ep",
        "etp",
        "zero",
        "microbatch",
        "global_batch",
        "sequence",
        "sequence_parallel",
        "gradient_bytes",
        "flash_attention",
    )
    even = model.layers / layout.pp
    share = min(1.0, (layout.recompute_layers or even) / even)
    columns = SimpleNamespace(
        **{name: np.asarray(getattr(layout, name)) for name in names},
        shard=np.asarray(layout.shard_group),
        recompute=np.asarray(RECOMPUTE.index(layout.recompute)),
        recomputed=np.asarray(share),
        schedule=np.asarray(SCHEDULES.index(layout.schedule)),
    )
    return cast(Columns, columns)


def stage_layers(model: Architecture, pp: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return the layers of the first stage, of each stage between, and of the last one.

    Where all layers do not divide evenly, the embedding and the head count as a layer each if that
    helps. Where that does not, the same is tried without the layers that predict further tokens:
    the last stage has them besides. Else it has the fewer layers. Prices and memory both count so.
    """
    layers, further = model.layers + model.mtp_layers, model.mtp_layers
    is_even, with_ends = layers % pp == 0, (layers + 2) % pp == 0
    is_even_before, with_ends_before = model.layers % pp == 0, (model.layers + 2) % pp == 0
    kinds = [is_even, with_ends, is_even_before, with_ends_before]
    wholes = [layers, layers + 2, model.layers, model.layers + 2]
    most = np.select(kinds, [whole // pp for whole in wholes], -(-layers // pp))
    rest = np.maximum(layers - most * (pp - 1), 0)
    last = np.select(kinds, [most, most - 1, most + further, most - 1 + further], rest)
    return np.select(kinds, [most, most - 1, most, most - 1], most), most, last


def layers_of_stages(model: Architecture, pp: int, vpp: int) -> tuple[Floats, Floats]:
    """Return the dense layers and those with experts on each stage; MTP layers are on the last."""
    first, most, last = stage_layers(model, np.asarray(pp))
    counts = np.full(pp, most)
    counts[0] = first
    counts[-1] = max(0, last - model.mtp_layers)
    # Chunks go round the stages; of the first stage, the one with the embedding is the shorter.
    sizes = counts // vpp + (np.arange(vpp)[:, None] < counts % vpp)
    sizes[:, 0] = sizes[::-1, 0]
    ends = np.minimum(np.cumsum(sizes.ravel()), model.layers)
    with_experts = np.cumsum([0, *(model.has_experts(layer) for layer in range(model.layers))])
    every = np.diff(ends, prepend=0).reshape(vpp, pp).sum(axis=0)
    experts = np.diff(with_experts[ends], prepend=0).reshape(vpp, pp).sum(axis=0)
    dense, experts = (every - experts).astype(np.float64), experts.astype(np.float64)
    further = experts if model.has_experts(model.layers - 1) else dense
    further[-1] += model.mtp_layers
    return dense, experts


def expert_shards(plans: Columns) -> NDArray[np.int64]:
    """Return the ranks among which ZeRO shards an expert; prices and memory both count so.

    An expert has fewer copies than other parameters, and a shard group takes the same share of
    them. Where that is no whole number, fewer ranks share it, so that all groups are equal.
    """
    ranks_of_all = plans.ep * plans.etp
    copies = plans.tp * plans.dp * plans.cp // ranks_of_all
    here = np.maximum(1, plans.tp * plans.shard // ranks_of_all)
    return np.asarray(np.gcd(copies, here))


def _held(
    model: Architecture, plans: Columns, stage: NDArray[Any], precision: str, has_dropout: bool
) -> Held:
    """Count a stage of each plan."""
    stage, pp, vpp = np.broadcast_arrays(stage, plans.pp, plans.vpp)
    dense, experts = _layers(model, stage, pp, vpp)
    is_first, is_last = stage == 0, stage == pp - 1
    states = _states(model, plans, dense, experts, is_first, is_last, precision)
    kept = _kept(model, plans, dense, experts, stage, precision, has_dropout)
    tokens = plans.microbatch * plans.sequence / plans.cp
    own = tokens / np.where(np.asarray(plans.sequence_parallel) > 0, plans.tp, 1)
    width = 4 if precision == "fp32" else 2
    heads = 1 + model.mtp_layers
    logits = (LOGIT_BYTES * tokens * model.vocab / plans.tp + 4 * own * model.hidden) * heads
    # In the backward pass of a layer: gradients of the inputs and outputs of its MLP. It begins
    # when the scores of the vocabulary are gone.
    inner = model.ffn if model.moe is None else model.moe.ffn * model.moe.top_k
    gates = 2 if model.is_gated else 1
    working = width * (2 * own * model.hidden + gates * tokens * inner / plans.tp)
    messages = np.where(pp > 1, 2 * width * own * model.hidden, 0)
    messages = messages + np.where(
        np.asarray(plans.cp) > 1, 2 * width * tokens * model.keys_and_values(plans.tp), 0
    )
    behind = np.where(is_last, np.maximum(0, working - logits), working)
    return Held(
        *states[:3],
        *kept,
        logits_bytes=np.where(is_last, logits, 0.0),
        gathered_bytes=states[3],
        buffers_bytes=_WORKSPACE_BYTES + messages + behind,
    )


def _layers(
    model: Architecture, stage: NDArray[Any], pp: NDArray[Any], vpp: NDArray[Any]
) -> tuple[Floats, Floats]:
    """Return dense layers and layers with experts on a stage of each plan."""
    keys = pp.astype(np.int64) * 4096 + vpp
    dense, experts = np.zeros(keys.shape), np.zeros(keys.shape)
    for key in np.unique(keys):
        of_dense, of_experts = layers_of_stages(model, int(key) // 4096, int(key) % 4096)
        which = keys == key
        dense[which], experts[which] = of_dense[stage[which]], of_experts[stage[which]]
    return dense, experts


def _states(
    model: Architecture,
    plans: Columns,
    dense: Floats,
    experts: Floats,
    is_first: NDArray[np.bool_],
    is_last: NDArray[np.bool_],
    precision: str,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return parameters, gradients, optimizer, and what ZeRO-3 gathers."""
    tp = plans.tp
    norms = model.layer_norms * model.norm_parameters
    sinks = model.heads / tp if model.has_sinks else 0.0
    # Each rank has all values of a norm, and the matrices that TP leaves whole: routers, and those
    # that MLA makes its latent vectors with.
    inside = sinks + model.attention_norm_parameters
    attention = _on_rank(model.attention_matrices, tp) + inside + norms
    table = model.vocab * model.hidden / tp
    # A tied head on another stage than the embedding has a copy of it.
    has_head = is_last & ~(is_first & model.is_tied)
    ends = is_first * (model.embedding_parameters - model.vocab * model.hidden + table)
    ends = ends + has_head * model.head_matrix.parameters_on_rank(tp)
    shared = (
        (dense + experts) * attention
        + dense * _on_rank(model.dense_matrices, tp)
        + experts * _on_rank(model.shared_matrices, tp)
        + is_last * (model.mtp_layers * 2 * model.hidden**2 / tp + model.norm_parameters)
        + ends
    )
    moe = model.moe
    count = 0.0 if moe is None else moe.experts * model.expert_parameters
    owned = experts * count / (plans.ep * plans.etp)
    zero = np.asarray(plans.zero)

    def sharded(level: int) -> Floats:
        spread = np.where(zero >= level, plans.shard, 1)
        expert_spread = np.where(zero >= level, expert_shards(plans), 1)
        return np.asarray(shared / spread + owned / expert_spread)

    width = 4 if precision == "fp32" else 2
    twice = np.where(np.asarray(plans.schedule) == SCHEDULES.index("dualpipe"), 2, 1)
    # Weights in 8 bits, and transposed, stay beside those in 16 bits. ZeRO-3 makes them of the
    # layers that are gathered, and gives them back with those.
    per_layer = (shared - ends + owned) / np.maximum(1, dense + experts)
    is_gathered = (zero >= 3) & (np.asarray(plans.shard) > 1)
    copies_bytes = 2 if precision in _NARROW else 0
    narrow = np.where(is_gathered, 0.0, copies_bytes * (shared + owned - ends))
    at_work = 2 * (width * np.maximum(per_layer, ends) + copies_bytes * per_layer)
    gathered = np.where(is_gathered, at_work + plans.gradient_bytes * per_layer, 0.0)
    adam = 8 if precision == "fp32" else ADAM_BYTES
    return (
        twice * (width * sharded(3) + narrow),
        twice * plans.gradient_bytes * sharded(2),
        np.where(zero > 0, 1, twice) * adam * sharded(1),  # ZeRO divides it among both copies
        gathered,
    )


def _on_rank(matrices: Sequence[Matrix], tp: NDArray[Any]) -> Floats:
    """Return the parameters of matrices on one rank of tensor parallelism."""
    each = (matrix.parameters_on_rank(tp) for matrix in matrices)
    return sum(each, start=np.zeros(np.shape(tp)))


def _kept(
    model: Architecture,
    plans: Columns,
    dense: Floats,
    experts: Floats,
    stage: NDArray[Any],
    precision: str,
    has_dropout: bool,
) -> tuple[Floats, Floats, Floats]:
    """Return what layers, scores and experts keep for the backward passes in flight."""
    tp, tokens = plans.tp, plans.microbatch * plans.sequence / plans.cp
    own = tokens / np.where(np.asarray(plans.sequence_parallel) > 0, tp, 1)
    width = 4 if precision == "fp32" else 2
    product_width = 1 if precision in _NARROW else width  # inputs of products
    recompute = np.asarray(plans.recompute)
    is_fused = np.asarray(plans.flash_attention) > 0
    is_selective = recompute == RECOMPUTE.index("selective")
    is_light = is_selective & is_fused  # norms and activations are cheap to compute again
    # A norm keeps its input. Of norms before products, one or two, the products keep the output.
    before = min(2, model.layer_norms)
    outputs = np.where(is_light, 0, before * product_width)
    norms = own * model.hidden * (model.layer_norms * width + outputs)
    norms = norms + 2 * has_dropout * own * model.hidden
    base = norms + tokens * _attention_values(model, width, tp)
    scores = tokens * plans.sequence * model.heads / tp * (width + (1 + width) * has_dropout)
    scores = np.where(is_fused | is_selective, 0.0, scores)
    gates = 2 if model.is_gated else 1
    per_inner = width * gates + np.where(is_light, 0, product_width)
    mlp = tokens * model.ffn * per_inner / tp
    moe_shared = moe_rows = np.zeros(())
    if model.moe is not None:
        moe = model.moe
        # Each row takes part in as many experts as it was sent to, on all ranks of an expert.
        rows = tokens / tp * moe.top_k
        moe_shared = tokens * moe.shared_ffn * per_inner / tp + 8 * own * moe.experts
        moe_rows = rows * (plans.etp * model.hidden * (product_width + width) + moe.ffn * per_inner)
    again = np.where(recompute == RECOMPUTE.index("full"), plans.recomputed, 0.0)
    saved = width * own * model.hidden
    layers = dense + experts
    flying = _in_flight(plans, stage)
    at_work = np.minimum(1, again * layers)  # one layer that is computed again

    def total(each: Floats, count: Floats) -> Floats:
        here = (count > 0) * at_work * each
        return np.asarray(flying * count * (1 - again) * each + here)

    return (
        total(base, layers)
        + total(mlp, dense)
        + total(moe_shared, experts)
        + flying * layers * again * saved,
        total(scores, layers),
        total(moe_rows, experts),
    )


def _attention_values(model: Architecture, width: int, tp: Any) -> Floats:
    """Return the bytes of one token that attention keeps, without norms and scores."""
    statistics = 4 * model.heads / tp
    mla = model.mla
    if mla is None:
        values = 2 * model.heads * model.head_dim / tp + model.keys_and_values(tp)
        return np.asarray(width * values + statistics)
    key = mla.nope_dim + mla.rope_dim
    values = model.heads * (2 * key + mla.nope_dim + 2 * mla.value_dim)
    # Short vectors before and behind their norms are whole on each rank.
    short = 2 * ((mla.query_rank or 0) + mla.kv_rank) + mla.rope_dim
    return np.asarray(width * (values / tp + short) + statistics)


def _in_flight(plans: Columns, stage: NDArray[Any]) -> Floats:
    """Return the microbatches whose activations a stage holds at once."""
    pp, vpp = np.asarray(plans.pp), np.asarray(plans.vpp)
    microbatches = plans.global_batch // (plans.dp * plans.microbatch)
    plain = np.minimum(pp - stage, microbatches)
    chunks = np.minimum(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, microbatches * vpp) / vpp
    both = np.minimum(pp + 1, microbatches)  # DualPipe fills the pipeline from both ends
    is_dual = np.asarray(plans.schedule) == SCHEDULES.index("dualpipe")
    return np.asarray(np.where(is_dual, both, np.where(vpp > 1, chunks, plain)), float)
