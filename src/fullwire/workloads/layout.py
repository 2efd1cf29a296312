"""How the training of a large model is divided among devices: one parallel plan.

The words are Megatron's. Tensor parallelism (`tp`) divides each matrix, pipeline parallelism (`pp`)
divides the layers into stages, and context parallelism (`cp`) divides each sequence. Data
parallelism (`dp`) divides the batch, and expert parallelism (`ep`) divides the experts of a layer.
Ranks are numbered as Megatron numbers them: TP innermost, then CP, then DP, and PP outermost.
Experts use the ranks of TP, CP and DP once more: EP innermost, where each expert is on `etp` ranks.

A plan that cannot be carried out is refused in one line, with the nearest value that can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from fullwire.errors import UsageError
from fullwire.workloads.architecture import Architecture

Recompute: TypeAlias = Literal["none", "selective", "full"]
Schedule: TypeAlias = Literal["1f1b", "interleaved", "zero-bubble", "dualpipe"]
Precision: TypeAlias = Literal["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
ContextKind: TypeAlias = Literal["ring", "all-gather", "ulysses"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
CONTEXT_KINDS: tuple[ContextKind, ...] = get_args(ContextKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A parallel plan with its batch. Each degree is a number of ranks.

    - `vpp`: chunks of layers on each pipeline stage. Above 1 the schedule is interleaved.
    - `etp`: ranks that share one expert.
    - `zero`: 0 keeps everything on each rank, 1 shards the optimizer, 2 gradients, 3 parameters.
    - `shard`: ranks that share one shard group with ZeRO. None takes all of DP and CP.
    - `recompute_layers`: with full recomputation, layers of a stage that are recomputed. None
      takes all.
    - `microbatch`: sequences of one microbatch on one data-parallel rank.
    - `gradient_bytes`: bytes of a gradient where it is added up and reduced.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 1
    shard: int | None = None
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    microbatch: int = 1
    global_batch: int
    sequence: int
    sequence_parallel: bool = True
    precision: Precision = "bf16"
    schedule: Schedule = "1f1b"
    context_kind: ContextKind = "ring"
    gradient_bytes: int = 4
    flash_attention: bool = True
    tp_overlap: bool = False
    dp_overlap: bool = True
    ep_overlap: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "dp", "cp", "ep", "etp", "microbatch", "global_batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.sequence < 1:
            raise UsageError(f"sequence: expected 1 token or more, got {self.sequence}")
        if self.zero not in range(4):
            raise UsageError(f"zero: expected 0, 1, 2 or 3, got {self.zero}")
        _check_choice("recompute", self.recompute, RECOMPUTE)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("precision", self.precision, PRECISIONS)
        _check_choice("context_kind", self.context_kind, CONTEXT_KINDS)
        self._check_groups()

    def _check_groups(self) -> None:
        together = self.dp * self.microbatch
        if self.global_batch % together:
            raise UsageError(
                f"global batch: expected a multiple of dp {self.dp} x microbatch "
                f"{self.microbatch}, got {self.global_batch}. The nearest is "
                f"{nearest_multiple(self.global_batch, together)}"
            )
        ranks = self.tp * self.cp * self.dp
        if ranks % (self.ep * self.etp):
            raise UsageError(
                f"ep: expected a divisor of tp x cp x dp = {ranks} over etp {self.etp}, got "
                f"{self.ep}. The nearest is {nearest_divisor(ranks // self.etp or 1, self.ep)}"
            )
        if self.shard is not None and (self.shard < 1 or self.dp * self.cp % self.shard):
            raise UsageError(
                f"shard: expected a divisor of dp x cp = {self.dp * self.cp}, got {self.shard}. "
                f"The nearest is {nearest_divisor(self.dp * self.cp, self.shard)}"
            )
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(f"vpp: expected 1 without pipeline stages, got {self.vpp}")
        if self.sequence % sequence_step(tp=self.tp, cp=self.cp, sequence_parallel=False):
            half = self.sequence // 2 if self.sequence % 2 == 0 else 1
            raise UsageError(
                f"cp: expected twice cp {self.cp} to divide the sequence {self.sequence}. The "
                f"nearest is {nearest_divisor(half, self.cp)}"
            )

    @property
    def devices(self) -> int:
        """Return the ranks of the whole job."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def microbatches(self) -> int:
        """Return how many microbatches a data-parallel rank works through in one step."""
        return self.global_batch // (self.dp * self.microbatch)

    @property
    def tokens(self) -> int:
        """Return the tokens of a step, over the whole job."""
        return self.global_batch * self.sequence

    @property
    def rank_tokens(self) -> int:
        """Return the tokens of one microbatch on one context-parallel rank."""
        return self.microbatch * self.sequence // self.cp

    @property
    def expert_dp(self) -> int:
        """Return the ranks that hold copies of the same expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def shard_group(self) -> int:
        """Return the ranks among which ZeRO shards what is not an expert."""
        return self.shard or self.dp * self.cp

    @property
    def name(self) -> str:
        """Return the plan in short, such as "tp 8, pp 4, dp 16, zero 1, recompute selective"."""
        parts = [f"{name} {getattr(self, name)}" for name in ("tp", "pp", "dp")]
        names = ("vpp", "cp", "ep", "etp")
        parts += [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        return ", ".join(
            [*parts, f"zero {self.zero}", f"recompute {self.recompute}", f"mb {self.microbatch}"]
        )


def undivided(model: Architecture, tp: int) -> str:
    """Name what `tp` ranks of tensor parallelism cannot share equally; empty if there is nothing.

    Each rank takes whole heads of queries, and whole heads of keys and values. Where it takes more
    ranks than these, several ranks hold a copy of the same one. An MLP is divided by its columns.
    """
    if tp < 1 or model.heads % tp:
        return f"{model.heads} heads"
    # MLA expands one latent vector to as many keys and values as it has heads.
    if model.mla is None and model.kv_heads % tp and tp % model.kv_heads:
        return f"{model.kv_heads} heads of keys and values, or a multiple of them"
    has_dense = model.moe_layers < model.layers
    widths = {
        "columns of an MLP": model.ffn if has_dense else 0,
        "columns of the shared experts": model.moe.shared_ffn if model.moe else 0,
    }
    return next((f"{width} {what}" for what, width in widths.items() if width % tp), "")


def tensor_ways(model: Architecture) -> list[int]:
    """List the degrees of tensor parallelism that divide a model, in ascending order."""
    return [ways for ways in divisors(model.heads) if not undivided(model, ways)]


def check_model(layout: Layout, model: Architecture, *, layers: int | None = None) -> None:
    """Refuse a plan that cannot divide a model.

    - `layers`: how many layers equal stages have together, where the ends lack a few.
    """
    heads, experts = model.heads, model.moe.experts if model.moe else 0
    layers = model.layers if layers is None else layers
    ways = tensor_ways(model)
    if what := undivided(model, layout.tp):
        raise UsageError(
            f"tp: expected a divisor of {what}, got {layout.tp}. The nearest is "
            f"{nearest_of(ways, layout.tp)}"
        )
    tokens = layout.sequence // layout.cp
    if layout.sequence_parallel and tokens % layout.tp:
        raise UsageError(
            f"tp: expected a divisor of {tokens} tokens of a sequence on a rank (sequence "
            f"parallelism), got {layout.tp}. The nearest is "
            f"{nearest_of([way for way in ways if tokens % way == 0], layout.tp)}"
        )
    if layout.context_kind == "ulysses" and heads % (layout.tp * layout.cp):
        raise UsageError(
            f"cp: expected tp {layout.tp} x cp to divide {heads} heads with Ulysses, got "
            f"{layout.cp}. The nearest is {nearest_divisor(heads // layout.tp, layout.cp)}"
        )
    if layers < layout.pp * layout.vpp:
        raise UsageError(
            f"pp: expected at most {layers} stages for {layers} layers, got pp {layout.pp} x vpp "
            f"{layout.vpp}. The nearest is pp {max(1, layers // layout.vpp)}"
        )
    if layers % layout.pp:
        raise UsageError(
            f"pp: expected a divisor of {layers} layers, got {layout.pp}. The nearest is "
            f"{nearest_divisor(layers, layout.pp)}"
        )
    if layers // layout.pp % layout.vpp:
        raise UsageError(
            f"vpp: expected a divisor of {layers // layout.pp} layers a stage, got {layout.vpp}. "
            f"The nearest is {nearest_divisor(layers // layout.pp, layout.vpp)}"
        )
    if layout.ep > 1 and (experts == 0 or experts % layout.ep):
        raise UsageError(
            f"ep: expected a divisor of {experts} experts, got {layout.ep}. The nearest is "
            f"{nearest_divisor(max(experts, 1), layout.ep)}"
        )


def sequence_step(*, tp: int, cp: int, sequence_parallel: bool) -> int:
    """Return the number of tokens of which a plan's sequence must be a multiple.

    Each rank of CP takes two equal chunks, one early and one late, so that all see as many keys.
    With sequence parallelism the ranks of TP divide the tokens of such a rank equally.
    """
    return math.lcm(2 * cp if cp > 1 else 1, tp * cp if sequence_parallel else 1)


MOST_FEWER = 3  # layers that the stages at the ends may lack


def even_layers(layers: int, further: int, pp: int) -> int | None:
    """Return how many layers equal stages would have, of which the ends may lack a few.

    None where they would lack more than `MOST_FEWER`, or where a stage would be empty.
    `stage_memory.stage_layers` tells which stage lacks them.

    - `further`: layers that predict further tokens, on the last stage.
    """
    whole = layers + further
    for count in (whole, whole + 2, layers, layers + 2):
        if count % pp == 0:
            return count
    fewer = -whole % pp
    is_filled = (whole + fewer) // pp > fewer
    return whole + fewer if fewer <= MOST_FEWER and is_filled else None


def divisors(number: int) -> list[int]:
    """List the divisors of a number in ascending order."""
    low = [part for part in range(1, int(number**0.5) + 1) if number % part == 0]
    return sorted({*low, *(number // part for part in low)})


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor that is nearest, the smaller of two."""
    return nearest_of(divisors(number), wanted)


def nearest_of(values: Sequence[int], wanted: int) -> int:
    """Return the value that is nearest, the smaller of two."""
    return min(values, key=lambda value: (abs(value - wanted), value))


def nearest_multiple(number: int, step: int) -> int:
    """Return the multiple of a step that is nearest to a number, at least one step."""
    return max(step, round(number / step) * step)


def _check_choice(name: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise UsageError(f"{name}: expected one of {', '.join(known)}, got {given!r}")


def passes(stages: int, chunks: int, microbatches: int, stage: int) -> list[tuple[bool, int, int]]:
    """List a stage's passes in order (1F1B, interleaved): is forward, chunk, microbatch.

    The order is that of Narayanan et al. 2021, figure 4. Forward passes fill the pipeline, then
    forward and backward passes take turns, and the backward passes that are left end it.
    """
    total = microbatches * chunks
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    ahead = min(ahead, total)

    def one(number: int, *, forward: bool) -> tuple[bool, int, int]:
        round_, place = divmod(number, stages * chunks)
        chunk, within = divmod(place, stages)
        if chunks == 1:
            return forward, 0, number
        return forward, chunk if forward else chunks - 1 - chunk, round_ * stages + within

    order = [one(number, forward=True) for number in range(ahead)]
    for number in range(ahead, total):
        order += [one(number, forward=True), one(number - ahead, forward=False)]
    return order + [one(number, forward=False) for number in range(total - ahead, total)]
