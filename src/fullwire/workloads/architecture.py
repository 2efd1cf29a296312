"""A transformer by its dimensions: its parameters, and its operations for each token.

Everything is counted from the matrices of a layer, so parameters, operations and the shapes that a
device multiplies cannot drift apart. A multiplication of one token with a matrix takes two
operations for each of its values. Backward takes twice the forward pass. Attention also multiplies
each query with the keys that it sees: half of the sequence on average, or a window.

`architecture_files.py` opens descriptions in the words of other tools.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fullwire.errors import UsageError

Split: TypeAlias = Literal["column", "row", "none"]


class Matrix(NamedTuple):
    """A matrix that each token is multiplied with, and how tensor parallelism divides it."""

    name: str
    inputs: int
    outputs: int
    split: Split  # column: outputs are divided; row: inputs are
    has_bias: bool = False
    key_outputs: int = 0  # of `outputs`, those of keys and values
    key_heads: int = 1  # that these belong to; more ranks than heads hold copies

    @property
    def parameters(self) -> int:
        """Return the values of the matrix and of its bias."""
        return self.inputs * self.outputs + self.has_bias * self.outputs

    @property
    def flops(self) -> int:
        """Return the operations of one token, forward."""
        return 2 * self.inputs * self.outputs

    def outputs_on_rank(self, tp: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the outputs on one of `tp` ranks of tensor parallelism.

        A rank has at least one whole head of keys and values, so more ranks hold copies of it.
        """
        if self.split != "column":
            return np.full(np.shape(tp), float(self.outputs))
        keys = self.key_outputs / np.minimum(tp, self.key_heads)
        return np.asarray((self.outputs - self.key_outputs) / tp + keys)

    def inputs_on_rank(self, tp: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the inputs on one of `tp` ranks of tensor parallelism."""
        return np.asarray(self.inputs / (tp if self.split == "row" else np.ones(np.shape(tp))))

    def parameters_on_rank(self, tp: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the values on one of `tp` ranks of tensor parallelism.

        Each rank has a matrix that is not divided as a whole, and the bias of a sum over ranks.
        """
        outputs = self.outputs_on_rank(tp)
        return np.asarray((self.inputs_on_rank(tp) + self.has_bias) * outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek): keys and values come from a short vector."""

    kv_rank: int
    query_rank: int | None = None  # None: queries come from the hidden vector itself
    nope_dim: int  # of queries and keys, without rotation
    rope_dim: int  # with rotation; all heads share these of the keys
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A mixture of experts: each token uses `top_k` of them, and the shared one if there is one."""

    experts: int
    top_k: int
    ffn: int  # of one expert
    shared_ffn: int = 0  # of all shared experts together
    has_shared_gate: bool = False
    first_dense: int = 0  # layers at the beginning that have a dense MLP
    every: int = 1  # of the others, each so many-th has experts
    has_router_bias: bool = False


# A hundred times the largest that anybody trains; layers are gone through one by one.
_MOST = {
    "layers": 10_000, "hidden": 10_000_000, "heads": 100_000, "kv_heads": 100_000,
    "head_dim": 100_000, "ffn": 10_000_000, "vocab": 100_000_000, "sequence": 1_000_000_000,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of equal layers, as it is published; `vocab` counts the rows of the embedding.

    - `ffn`: the inner width of a dense MLP. A gated one (SwiGLU) has three matrices, others two.
    - `window`: keys that a query sees, in all layers but each `full_every`-th. None is all.
    - `biases`: which matrices of a layer have one. "qkv" is queries, keys and values.
    - `layer_norms`: norms of the hidden vector in a layer. It is 1 where attention and MLP share
      one (Falcon-7B), and 4 where their results have one too (Gemma 2).
    - `mtp_layers`: layers that predict further tokens, each with a projection of its own.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    sequence: int  # tokens of a sequence, where nothing else is asked for
    is_gated: bool = True
    is_tied: bool = False  # the head uses the embedding's matrix
    biases: Literal["none", "qkv", "attention", "all"] = "none"
    norm: Literal["rms", "layer", "layer-without-bias", "without-parameters"] = "rms"
    layer_norms: int = 2
    has_query_key_norm: bool = False
    is_query_key_norm_joint: bool = False  # over all heads together, as in OLMo 2
    has_embedding_norm: bool = False
    has_head_bias: bool = False
    has_sinks: bool = False  # a learned value for each head in the softmax
    positions: Literal["rotary", "learned", "alibi", "none"] = "rotary"
    learned_positions: int = 0  # rows of a learned table of positions
    window: int | None = None
    full_every: int = 0
    mla: Mla | None = None
    moe: Moe | None = None
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        counts = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "sequence")
        for field in counts:
            if getattr(self, field) < 1:
                raise UsageError(
                    f"model {self.name}: {field}: expected 1 or more, got {getattr(self, field)}"
                )
            if getattr(self, field) > _MOST[field]:
                raise UsageError(
                    f"model {self.name}: {field}: expected at most {_MOST[field]:,}, got "
                    f"{getattr(self, field):,}"
                )
        widths = [self.ffn] if self.moe is None or self.moe_layers < self.layers else []
        if self.moe is not None:
            widths.append(self.moe.ffn)
        for width in widths:
            if not 1 <= width <= _MOST["ffn"]:
                raise UsageError(
                    f"model {self.name}: ffn: expected 1 to {_MOST['ffn']:,}, got {width:,}"
                )
        if self.heads % self.kv_heads:
            raise UsageError(
                f"model {self.name}: kv_heads: expected a divisor of {self.heads} heads, got "
                f"{self.kv_heads}"
            )
        if self.moe is not None and not 1 <= self.moe.top_k <= self.moe.experts:
            raise UsageError(
                f"model {self.name}: top_k: expected 1 to {self.moe.experts} experts of each "
                f"token, got {self.moe.top_k}"
            )

    # The matrices of one layer.

    @property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """Return the projections of attention."""
        if self.mla is not None:
            return self._latent_matrices(self.mla)
        query, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        has_qkv_bias = self.biases != "none"
        has_output_bias = self.biases in ("attention", "all")
        return (
            Matrix(
                "qkv",
                self.hidden,
                query + 2 * shared,
                "column",
                has_qkv_bias,
                key_outputs=2 * shared,
                key_heads=self.kv_heads,
            ),
            Matrix("output", query, self.hidden, "row", has_output_bias),
        )

    def _latent_matrices(self, mla: Mla) -> tuple[Matrix, ...]:
        query = self.heads * (mla.nope_dim + mla.rope_dim)
        # What goes down to a latent vector has a bias, and what comes up from it has none.
        has_down_bias, has_output_bias = self.biases != "none", self.biases in ("attention", "all")
        if mla.query_rank is None:
            queries: tuple[Matrix, ...] = (Matrix("query", self.hidden, query, "column"),)
        else:
            queries = (
                Matrix("query_down", self.hidden, mla.query_rank, "none", has_down_bias),
                Matrix("query_up", mla.query_rank, query, "column"),
            )
        up = self.heads * (mla.nope_dim + mla.value_dim)
        return (
            *queries,
            Matrix("kv_down", self.hidden, mla.kv_rank + mla.rope_dim, "none", has_down_bias),
            Matrix("kv_up", mla.kv_rank, up, "column"),
            Matrix("output", self.heads * mla.value_dim, self.hidden, "row", has_output_bias),
        )

    @property
    def dense_matrices(self) -> tuple[Matrix, ...]:
        """Return the matrices of a dense MLP."""
        return self._mlp(self.ffn, "mlp")

    @property
    def expert_matrices(self) -> tuple[Matrix, ...]:
        """Return the matrices of one expert, or none."""
        return () if self.moe is None else self._mlp(self.moe.ffn, "expert")

    @property
    def shared_matrices(self) -> tuple[Matrix, ...]:
        """Return the matrices that each token of a layer with experts uses besides its experts."""
        moe = self.moe
        if moe is None:
            return ()
        router = Matrix("router", self.hidden, moe.experts, "none", moe.has_router_bias)
        if not moe.shared_ffn:
            return (router,)
        gate = (Matrix("shared_gate", self.hidden, 1, "none"),) if moe.has_shared_gate else ()
        return (router, *gate, *self._mlp(moe.shared_ffn, "shared"))

    def _mlp(self, ffn: int, name: str) -> tuple[Matrix, ...]:
        has_bias = self.biases == "all"
        width = 2 * ffn if self.is_gated else ffn
        return (
            Matrix(f"{name}_up", self.hidden, width, "column", has_bias),
            Matrix(f"{name}_down", ffn, self.hidden, "row", has_bias),
        )

    @property
    def head_matrix(self) -> Matrix:
        """Return the projection onto the vocabulary."""
        return Matrix("head", self.hidden, self.vocab, "column", self.has_head_bias)

    # Parameters.

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts."""
        moe = self.moe
        if moe is None or layer < moe.first_dense:
            return False
        return (layer - moe.first_dense) % moe.every == moe.every - 1

    @property
    def moe_layers(self) -> int:
        """Return the number of layers that have experts."""
        return sum(self.has_experts(layer) for layer in range(self.layers))

    @property
    def attention_parameters(self) -> int:
        """Return the parameters of one layer's attention, with the norms inside it."""
        inside = self.attention_norm_parameters + (self.heads if self.has_sinks else 0)
        return inside + sum(matrix.parameters for matrix in self.attention_matrices)

    @property
    def attention_norm_parameters(self) -> int:
        """Return the parameters of the norms inside one layer's attention."""
        inside = 0
        if self.has_query_key_norm:
            heads = self.heads + self.kv_heads if self.is_query_key_norm_joint else 2
            inside += heads * self.head_dim
        if self.mla is not None:
            inside += self.mla.kv_rank + (self.mla.query_rank or 0)
        return inside

    @property
    def mlp_parameters(self) -> int:
        """Return the parameters of one dense MLP."""
        return sum(matrix.parameters for matrix in self.dense_matrices)

    @property
    def expert_parameters(self) -> int:
        """Return the parameters of one expert."""
        return sum(matrix.parameters for matrix in self.expert_matrices)

    @property
    def shared_parameters(self) -> int:
        """Return the parameters of router and shared experts in one layer."""
        return sum(matrix.parameters for matrix in self.shared_matrices)

    @property
    def norm_parameters(self) -> int:
        """Return the parameters of one norm of the hidden vector."""
        vectors = {"layer": 2, "without-parameters": 0}.get(self.norm, 1)
        return vectors * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Return the parameters before the first layer: tokens, positions, and their norm."""
        rows = self.vocab + (self.learned_positions if self.positions == "learned" else 0)
        return rows * self.hidden + self.has_embedding_norm * self.norm_parameters

    @property
    def head_parameters(self) -> int:
        """Return the parameters behind the last layer that no other part holds."""
        matrix = 0 if self.is_tied else self.head_matrix.parameters
        bias = self.vocab if self.is_tied and self.has_head_bias else 0
        return self.norm_parameters + matrix + bias

    def layer_parameters(self, layer: int) -> int:
        """Return the parameters of a layer, counted from 0."""
        shared = self.attention_parameters + self.layer_norms * self.norm_parameters
        if not self.has_experts(layer):
            return shared + self.mlp_parameters
        assert self.moe is not None
        return shared + self.shared_parameters + self.moe.experts * self.expert_parameters

    @property
    def mtp_parameters(self) -> int:
        """Return the parameters of all layers that predict further tokens."""
        projection = 2 * self.hidden * self.hidden + 3 * self.norm_parameters
        return self.mtp_layers * (projection + self.layer_parameters(self.layers - 1))

    @property
    def parameters(self) -> int:
        """Return all parameters, without those that predict further tokens."""
        layers = sum(self.layer_parameters(layer) for layer in range(self.layers))
        return self.embedding_parameters + layers + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Return the parameters that one token uses, without those that predict further tokens."""
        return self.parameters - self.moe_layers * self.idle_parameters

    @property
    def active_mtp_parameters(self) -> int:
        """Return the parameters that one token uses in all layers that predict further tokens."""
        idle = self.idle_parameters if self.has_experts(self.layers - 1) else 0
        return self.mtp_parameters - self.mtp_layers * idle

    @property
    def idle_parameters(self) -> int:
        """Return the parameters of the experts of a layer that one token does not use."""
        moe = self.moe
        return 0 if moe is None else (moe.experts - moe.top_k) * self.expert_parameters

    # Operations.

    def keys(self, layer: int, sequence: int) -> float:
        """Return the keys that a query of a layer sees on average, with a causal mask."""
        is_full = self.full_every > 0 and layer % self.full_every == self.full_every - 1
        if self.window is None or is_full or self.window >= sequence:
            return (sequence + 1) / 2
        # The first tokens see fewer than a window.
        return self.window - self.window * (self.window - 1) / (2 * sequence)

    @property
    def score_dims(self) -> int:
        """Return the dimensions of all heads' queries and values together."""
        if self.mla is not None:
            return self.heads * (self.mla.nope_dim + self.mla.rope_dim + self.mla.value_dim)
        return 2 * self.heads * self.head_dim

    def attention_flops(self, layer: int, sequence: int) -> float:
        """Return the operations of one token's scores and of their product with the values."""
        return 2 * self.keys(layer, sequence) * self.score_dims

    def layer_flops(self, layer: int, sequence: int) -> float:
        """Return the operations of one token in a layer, forward."""
        used = [*self.attention_matrices]
        flops = self.attention_flops(layer, sequence)
        if self.has_experts(layer):
            assert self.moe is not None
            used += self.shared_matrices
            flops += self.moe.top_k * sum(matrix.flops for matrix in self.expert_matrices)
        else:
            used += self.dense_matrices
        return flops + sum(matrix.flops for matrix in used)

    def flops(self, sequence: int | None = None) -> float:
        """Return the operations of one token, forward, with the head; backward takes twice that.

        Layers that predict further tokens count too, each with a head of its own.
        """
        tokens = sequence or self.sequence
        layers = sum(self.layer_flops(layer, tokens) for layer in range(self.layers))
        further = self.layer_flops(self.layers - 1, tokens) + 4 * self.hidden**2
        return (
            layers + self.head_matrix.flops + self.mtp_layers * (further + self.head_matrix.flops)
        )

    def model_flops(self, sequence: int) -> float:
        """Return the operations of one token in a step, as a published utilization counts them.

        They are 6 of each active parameter, and attention with a causal mask, three times forward.
        The embedding counts too, although a lookup multiplies nothing. Recomputation does not.
        Layers that predict further tokens count as in `flops`: each uses the head once more.
        """
        attention = sum(self.attention_flops(layer, sequence) for layer in range(self.layers))
        further = self.attention_flops(self.layers - 1, sequence)
        heads = self.mtp_layers * self.head_matrix.parameters
        used = self.active_parameters + self.active_mtp_parameters + heads
        return 6 * used + 3 * (attention + self.mtp_layers * further)

    def keys_and_values(
        self, tp: NDArray[np.int64] | int, least_heads: NDArray[np.int64] | int = 1
    ) -> NDArray[np.float64]:
        """Return the keys and values of a token and layer on each rank: CP sends so many.

        They are those of the heads of one tensor-parallel rank. Where Ulysses gives each rank of
        its group a head, these are at least as many heads. Frameworks expand the latent vectors of
        MLA to keys and values before these go around.
        """
        heads, of_head = np.maximum(least_heads, self.kv_heads / tp), 2 * self.head_dim
        if self.mla is not None:
            heads = np.asarray(self.heads / tp)
            of_head = self.mla.nope_dim + self.mla.rope_dim + self.mla.value_dim
        return np.asarray(heads * of_head, np.float64)

    def with_padded_vocab(self, divisor: int) -> Architecture:
        """Return the model with as many rows of the embedding as Megatron makes of them."""
        return replace(self, vocab=-(-self.vocab // divisor) * divisor)
