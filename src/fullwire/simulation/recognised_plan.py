"""The parallel plan and the model of a job, recognised from a trace with the shapes of operations.

The trace holds matrix products, attention and the embedding. Their sizes give the model: the width
that all products share, heads, layers of a stage, and microbatches. Groups of processes give the
degrees where the job describes them (`mesh_tp 2`). Heads, embeddings and transfers between stages
give the others. The answer names the parts that remain open.

Of Transformer Engine's products, and of some fused attention, a trace shows kernels alone. Their
names tell them, and the user's model gives the sizes that operations would show.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fullwire.errors import DamagedInput, FullwireError, UsageError
from fullwire.run.gaps import has_lost_its_end
from fullwire.run.process_groups import descriptions_of
from fullwire.run.run import Run
from fullwire.run.usual import marks_of_steps
from fullwire.simulation.described_groups import degrees_of
from fullwire.simulation.traced_work import (
    ATTENTION,
    BATCHED,
    PRODUCTS,
    TRANSFERS,
    WORK,
    TracedMessages,
    TracedTimes,
    precision_of,
    refuse_several_runs,
    sizes_of,
    steps_of_all,
    values_of_keys,
    whole_steps,
)
from fullwire.units import shown
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognised:
    """The plan of a recorded job, and the seconds of its slowest rank by class of work."""

    model: Architecture
    layout: Layout
    device: str  # empty where the trace names none
    steps: int
    step_s: float
    busy_s: Mapping[str, float]
    messages: Mapping[str, tuple[tuple[str, float, float], ...]]  # by kind: op, bytes, seconds
    summed_bytes: float  # of gradients, by a rank in a step
    unlike_group: int | None  # the ranks of a data-parallel group that does not fit the degrees
    has_usual_mlp: bool  # no product shows its width: four times the hidden vector is taken
    other_groups: Mapping[str, int]  # ranks of expert or sequence parallelism: ep, sp
    has_mesh: bool  # groups of PyTorch's DeviceMesh
    open_vocabulary: int | None  # the embedding's rows, if a rank may hold a part of them
    other_tp: tuple[int, ...]  # degrees of tensor parallelism that the trace leaves as possible
    only_kernels: tuple[str, ...]  # classes of work that no operation shows
    missing: tuple[str, ...]  # data of the run
    source: str


def recognised(run: Run, model: Architecture | None = None) -> Recognised:
    """Recognise the model and the plan of a run that was traced with shapes.

    - `model`: gives the sizes that no operation of the trace shows.
    """
    return _Recognising(run, model).answer()


class _Recognising:
    """The operations of a run by rank; each method recognises one part of the plan."""

    def __init__(self, run: Run, model: Architecture | None) -> None:
        self.run = run
        self.model = model
        self.told = degrees_of(run.facts.groups or "")
        self.attended: set[tuple[int, int]] = set()  # tokens of queries and of keys of a call
        self.unlike_group: int | None = None
        self.has_usual_mlp = False
        self.open_vocabulary: int | None = None
        self.other_tp: tuple[int, ...] = ()
        self.only_kernels: list[str] = []  # classes of work that kernels show, and no operation
        table = run.operations
        self.steps = steps_of_all(run, table.step)
        whole = whole_steps(run, self.steps)
        self.has_whole_step, self.steps = bool(whole), whole or self.steps
        if not len(table) or not self.steps:
            expected = "a trace of whole steps with the shapes of operations"
            if not len(marks_of_steps(run)):
                raise self._lacks(expected, "no step")
            is_ours = run.provenance.origin == "measured"
            given = "a recording of `fullwire record`" if is_ours else shown(run.provenance.source)
            raise UsageError(
                f"from: expected {expected} (record_shapes=True), got {given} without shapes"
            )
        self.calls: dict[int, Counter[tuple[str, str]]] = defaultdict(Counter)
        self.spent_ns: dict[int, Counter[tuple[str, str]]] = defaultdict(Counter)
        columns = (table.rank, table.step, table.name, table.shapes, table.calls, table.busy_ns)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        chosen = set(self.steps)
        for rank, step, name, shapes, calls, busy_ns in rows:
            if step in chosen:
                self.calls[rank][name, shapes] += calls
                self.spent_ns[rank][name, shapes] += busy_ns
        self.ranks = sorted(self.calls)
        self.world = run.facts.workers or len(self.ranks)
        self.messages = TracedMessages(
            table=run.collectives,
            steps=tuple(self.steps),
            descriptions=descriptions_of(run.facts.group_names or ""),
        )

    def _lacks(self, expected: str, given: str) -> FullwireError:
        """Return why a part of the plan is unknown: of a damaged trace, that part may be lost."""
        if self.run.missing:
            needed = ""
            if has_lost_its_end(self.run.gaps):
                needed = ". A trace needs a whole step of each rank, forward and backward"
            problem = f"expected {expected}: {'; '.join(self.run.missing)}{needed}"
            return DamagedInput(self.run.provenance.source, problem)
        return UsageError(f"from: expected {expected}, got {given}")

    def answer(self) -> Recognised:
        """Recognise one part after the other."""
        batch, sequence, local_heads, local_kv, head_dim = self._attention()
        tokens = batch * sequence
        micro = self._microbatches()
        self._refuse_exchanges(tokens, micro)
        [rows, hidden], _ = self._embedding(tokens)
        self.attended = self._queries_and_keys(sequence, head_dim)
        cp = self.told.of.get("cp") or self._keys_of_a_query()
        kv_heads = self._kv_heads(tokens, hidden, local_heads, local_kv, head_dim)
        messages = replace(
            self.messages,
            activation=tokens * hidden,
            keys=values_of_keys({tokens * heads * head_dim for heads in (kv_heads, local_kv)}, cp),
        )
        tp, pp, dp = self._degrees(messages, hidden, local_heads, head_dim, cp)
        messages = replace(messages, tp=tp, pp=pp)
        layers, again = self._layers(pp, micro)
        self._compare(hidden, local_heads * tp, head_dim)
        if self.model is not None and self.only_kernels:
            model = self.model
        else:
            vocab = self._vocabulary(rows, tokens, hidden, tp)
            model = Architecture(
                name=self.run.facts.model or "recorded",
                layers=layers,
                hidden=hidden,
                heads=local_heads * tp,
                kv_heads=kv_heads * tp,
                head_dim=head_dim,
                vocab=vocab,
                sequence=sequence * cp,
                **self._mlp(tokens, hidden, local_heads * head_dim, vocab, tp),
            )
        kinds = messages.by_kind()
        zero = messages.zero(micro, model.parameters / (tp * pp)) if dp > 1 else 0
        is_ring = not kinds["cp"] or any(op in TRANSFERS for op, *_ in kinds["cp"])
        times = TracedTimes(
            run=self.run,
            steps=self.steps,
            spent_ns=self.spent_ns,
            only_kernels=self.only_kernels,
            messages=messages,
        )
        beside, busy_s = times.busy(tp, dp * cp)
        return Recognised(
            model=model,
            layout=Layout(
                tp=tp,
                pp=pp,
                dp=dp,
                cp=cp,
                zero=zero,
                recompute="full" if again > 1.5 else "none",
                microbatch=batch,
                global_batch=batch * micro * dp,
                sequence=sequence * cp,
                sequence_parallel=tp > 1 and any(op == "allgather" for op, *_ in kinds["tp"]),
                precision=precision_of(self.run.operations),
                context_kind="ring" if is_ring else "all-gather",
                tp_overlap=False,
                dp_overlap=beside > 0.3 or dp * cp == 1,
            ),
            device=self.run.facts.device or "",
            steps=len(self.steps),
            step_s=times.step_s(),
            busy_s=busy_s,
            messages=kinds,
            summed_bytes=messages.summed_bytes(),
            unlike_group=self.unlike_group,
            has_usual_mlp=self.has_usual_mlp,
            other_groups={kind: n for kind in ("ep", "sp") if (n := self.told.of.get(kind, 1)) > 1},
            has_mesh="mesh_" in (self.run.facts.groups or ""),
            open_vocabulary=self.open_vocabulary,
            other_tp=self.other_tp,
            only_kernels=tuple(WORK[work] for work in self.only_kernels),
            missing=self.run.missing,
            source=self.run.provenance.source,
        )

    def _refuse_exchanges(self, tokens: int, micro: int) -> None:
        """Refuse a model with experts, rings that nobody describes, and Ulysses."""
        if self.told.of.get("cp", 1) == 1:
            first = [rank for rank in self.ranks if any(self._shapes(rank, "aten::embedding"))]
            forward = {rank: self._passes(rank, backward=False) for rank in first}
            has_stages = len(first) < len(self.ranks)
            self.messages.refuse_rings(forward, micro, has_stages=has_stages)
        has_experts = any(
            "_grouped_mm" in name for rank in self.ranks for name, _ in self.calls[rank]
        )
        exchanges = self.messages.exchanges_of_step()
        if exchanges and math.prod(self._embedding(1)[1]) < tokens:
            raise UsageError(
                "from: expected attention over the tokens that a rank embeds, got all-to-all "
                "messages and attention over more of them (Ulysses)"
            )
        if not any(self.told.of.get(kind, 1) > 1 for kind in ("cp", "ep", "sp")):
            # Experts exchange tokens in each layer or in every other one, forward and backward.
            passes = max(self._passes(rank, backward=True) for rank in self.ranks)
            has_experts |= exchanges > passes / 2
        if has_experts:
            raise UsageError("from: expected a model of dense layers, got one with experts")

    def _compare(self, hidden: int, heads: int, head_dim: int) -> None:
        """Refuse a given model that should tell what the trace does not, but is another one.

        One of other sizes only replaces the trace's. One of the same sizes has as many heads.
        """
        model = self.model
        if model is None or not (self.only_kernels or self._is_given(hidden, head_dim)):
            return
        if model.moe is not None and self.only_kernels:
            raise UsageError("from: expected a model of dense layers, got one with experts")
        if (model.hidden, model.heads) != (hidden, heads):
            raise UsageError(
                f"model: expected the trace's, with {heads} heads and a hidden vector of {hidden}, "
                f"got {model.name} with {model.heads} and {model.hidden}"
            )

    def _layers(self, pp: int, micro: int) -> tuple[int, float]:
        """Return the model's layers, and attention's forward passes for each backward pass.

        A layer has four products or more, each forward and twice backward. If the trace has fewer,
        they are no operations.
        """
        if "attention" in self.only_kernels:
            assert self.model is not None
            of_stage = self.model.layers / pp
            layers, again = self.model.layers, 1.0
        else:
            passes = [self._passes(rank, backward=True) for rank in self.ranks]
            if min(passes) <= 0:
                raise self._lacks("each rank's backward pass of attention", "none")
            of_stage = float(np.mean([self._layer_passes(rank) for rank in self.ranks])) / micro
            layers = max(1, round(of_stage * pp))
            # Recomputation runs a layer's attention twice for each backward pass of it.
            again = self._passes(self.ranks[0], backward=False) / passes[0]
        if not self.has_whole_step:
            raise self._lacks("a whole step of each rank", "a part of one")
        products = sum(calls for rank in self.ranks for _, calls in self._shapes(rank, *PRODUCTS))
        if products < 3 * of_stage * micro * len(self.steps) * len(self.ranks):
            self.only_kernels.append("matmul")
        return layers, again

    def _shapes(self, rank: int, *names: str) -> Iterator[tuple[list[list[int]], int]]:
        """Yield the sizes of operations with these names, and their calls."""
        for (name, shapes), calls in self.calls[rank].items():
            if name in names and (sizes := sizes_of(shapes)):
                yield sizes, calls

    def _attended(self, *ranks: int) -> Iterator[tuple[list[int], int, int]]:
        """Yield calls of attention: batch, tokens, heads, their width; heads and tokens of keys.

        - `ranks`: all, unless some are named.
        """
        for name, shapes in (call for rank in ranks or self.ranks for call in self.calls[rank]):
            sizes = sizes_of(shapes) if ATTENTION.search(name) else []
            if "backward" in name:  # its first tensor is the gradient, of the same sizes
                sizes = sizes[1:]
            if [len(size) for size in sizes[:2]] != [4, 4] or not all(sizes[0] + sizes[1]):
                continue
            is_heads_first = "_scaled_dot_product_" in name or "_efficient" not in name
            is_heads_first = is_heads_first and "flash_attn" not in name
            tokens, heads = (2, 1) if is_heads_first else (1, 2)
            query, key = sizes[:2]
            yield [query[0], query[tokens], query[heads], query[3]], key[heads], key[tokens]

    def _attention(self) -> tuple[int, int, int, int, int]:
        """Return sequences of a microbatch, their tokens, heads of a rank, and their width."""
        of_ranks = {
            rank: {(heads, width) for [_, _, heads, width], *_ in self._attended(rank)}
            for rank in self.ranks
        }
        refuse_several_runs(self.run, of_ranks)
        # Around a ring, calls may have the late half of a rank's queries.
        calls = sorted(self._attended(), key=lambda call: -call[0][1])
        for [batch, tokens, heads, width], kv_heads, _ in calls:
            return batch, tokens, heads, kv_heads, width
        return self._plain_attention()

    def _queries_and_keys(self, tokens: int, width: int) -> set[tuple[int, int]]:
        """Return the tokens of queries and of keys of each call of attention."""
        pairs = {(query[1], keys) for query, _, keys in self._attended()}
        if not pairs:  # scores: queries by the width, times the width by keys
            for sizes, _ in (call for rank in self.ranks for call in self._shapes(rank, *BATCHED)):
                matrices = [size[1:] for size in sizes if len(size) == 3]
                if len(matrices) < 2:
                    continue
                left, right = matrices[-2:]
                if left == [tokens, width] and right[0] == width and right[1]:
                    pairs.add((tokens, right[1]))
        return pairs

    def _keys_of_a_query(self) -> int:
        """Return how many times as many keys as queries all attention of a rank has.

        Ranks of context parallelism may gather the keys of all. Around a ring each call has those
        of one rank, or half of them, which tells nothing.
        """
        [queries, keys], *others = self.attended or {(1, 1)}
        is_told = not others and self.world > 1 and keys % queries == 0
        return keys // queries if is_told else 1

    def _plain_attention(self) -> tuple[int, int, int, int, int]:
        """Return the same of attention by products of its own, or of the model that was given."""
        *batch, tokens = self._embedding(1)[1]
        sequences = math.prod(batch)
        for rank in self.ranks:
            for sizes, _ in self._shapes(rank, *BATCHED):
                for count, *sides in sizes:
                    if count and len(sides) == 2 and tokens in sides and count % sequences == 0:
                        sides.remove(tokens)
                        if sides[0] not in (tokens, 0):
                            heads = count // sequences
                            return sequences, tokens, heads, heads, sides[0]
        # Only kernels show attention: the user's model gives its sizes.
        if self.model is None:
            raise self._lacks(
                "attention, as one operation or as products of scores and values",
                "neither with the sequence's length: give the model too (llama3-8b, "
                "config.json), whose sizes the trace does not show",
            )
        self.only_kernels.append("attention")
        tp = self.told.of.get("tp", 1)
        values = tokens * sequences * self.model.hidden
        is_open = "tp" not in self.told.of and self.world > 1
        if is_open and np.isin(self.run.collectives.bytes, [values, 2 * values, 4 * values]).any():
            raise UsageError(
                "from: expected a description of the group of tensor parallelism (mesh_tp) where "
                "no operation shows attention, got none"
            )
        if self.model.heads % tp:
            raise UsageError(
                f"from: expected a divisor of {self.model.heads} heads as degree of tensor "
                f"parallelism, got a group of {tp} ranks"
            )
        kv_heads = max(1, self.model.kv_heads // tp)
        return sequences, tokens, self.model.heads // tp, kv_heads, self.model.head_dim

    def _embedding(self, tokens: int) -> list[list[int]]:
        """Return the sizes of the embedding and of its input; one of positions has fewer rows."""
        found = [
            sizes[:2]
            for rank in self.ranks
            for sizes, _ in self._shapes(rank, "aten::embedding")
            if len(sizes) > 1 and len(sizes[0]) == 2 and all(sizes[0])
            if math.prod(sizes[1]) >= tokens
        ]
        if not found:
            expected = "an embedding of the microbatch's tokens, as ranks of the first stage have"
            raise self._lacks(expected, "none")
        return max(found, key=lambda sizes: (math.prod(sizes[1]), sizes[0][0]))

    def _is_given(self, hidden: int, head_dim: int) -> bool:
        """Return whether the user's model has the sizes of the traced one, as far as both tell."""
        model = self.model
        return model is not None and (model.hidden, model.head_dim) == (hidden, head_dim)

    def _tensor_parallel(
        self, messages: TracedMessages, hidden: int, heads: int, head_dim: int, ways: int
    ) -> int:
        """Return TP where no group tells it, of ranks that share a stage and its tokens' keys.

        Each layer then sums activations, forward and backward. All heads together are mostly, but
        not always, as wide as the hidden vector: that tells the degree only among possible ones.
        """
        if "attention" in self.only_kernels or (ways == 1 and self.run.facts.workers):
            return 1
        own_width = heads * head_dim
        by_shape = hidden // own_width if hidden % own_width == 0 else 1
        passes = max(self._passes(rank, backward=True) for rank in self.ranks)
        if ways == 1 or not passes or not messages.are_whole:
            return by_shape
        tokens = messages.activation // hidden
        # Gradients of such matrices have the values of an activation, or the bytes of one.
        matrices = self._others(tokens, hidden)
        alike = matrices[tokens] + (matrices[tokens // 2] if tokens % 2 == 0 else 0)
        sums = messages.activations_of_step() / passes
        if sums < 1.5:
            return 1
        gradients_bytes = 2 * 2 * hidden * own_width * passes / self._microbatches()
        has_dp = messages.gradient_bytes_of_step() > gradients_bytes / 2
        least = 1 if has_dp and sums < alike + 1.5 else 2
        possible = [tp for tp in range(least, ways + 1) if ways % tp == 0 and (tp < ways) == has_dp]
        told = [self._ways_of_vocabulary(tokens, hidden), messages.ranks_of_activations(self.world)]
        is_given = self._is_given(hidden, head_dim)
        if self.model is not None and is_given:
            told = [self.model.heads // heads]
        told += possible if len(possible) == 1 else []
        if found := [tp for tp in told if tp in possible]:
            return found[0]
        if by_shape in possible and not is_given:
            self.other_tp = tuple(tp for tp in possible if tp != by_shape)
            return by_shape
        raise UsageError(
            "from: expected a description of the group of tensor parallelism (mesh_tp), or the "
            f"model: layers sum activations, and {heads} heads of {head_dim} on a rank do not tell "
            f"among how many of {ways} ranks"
        )

    def _ways_of_vocabulary(self, tokens: int, hidden: int) -> int:
        """Return among how many ranks the words of the loss are; 0 if the trace does not tell.

        A rank that holds a part of them has fewer rows in its embedding, or in its head: the one
        matrix that a microbatch has three products of, forward and backward.
        """
        passes = 3 * self._microbatches() * len(self.steps)
        parts = {self._embedding(tokens)[0][0]}
        for rank in self.ranks:
            sides = self._sides(rank, tokens, hidden).items()
            parts |= {side for side, calls in sides if calls == passes}
        words = max(self._words_of_losses(), default=0)
        ways = {words // part for part in parts if 0 < part < words and words % part == 0}
        return ways.pop() if len(ways) == 1 else 0

    def _words_of_losses(self) -> list[int]:
        return [
            sizes[0][-1]
            for rank in self.ranks
            for sizes, _ in self._shapes(rank, "aten::nll_loss_forward")
        ]

    def _degrees(
        self, messages: TracedMessages, hidden: int, heads: int, head_dim: int, cp: int
    ) -> tuple[int, int, int]:
        """Return TP, PP and DP: by descriptions of groups, else by messages and shapes."""
        told, found = self.told.of, {"cp": cp}
        table = self.run.collectives
        senders = set(table.group[np.isin(table.op, TRANSFERS)].tolist())
        sends = any(messages.described(name) in ("", "pp") for name in senders)
        ways = self.told.dp_and_cp or told.get("dp", 0) * cp
        found["pp"] = told.get("pp") or (self._stages(ways) if sends else 1)
        split = max(1, self.world // max(1, found["pp"] * cp))
        found["tp"] = told.get("tp") or self._tensor_parallel(
            messages, hidden, heads, head_dim, split
        )
        together = found["tp"] * found["pp"] * found["cp"]
        if together == 0 or self.world % together:
            raise UsageError(
                f"from: expected degrees that divide {self.world} ranks, got tp {found['tp']}, pp "
                f"{found['pp']}, cp {found['cp']} from groups and shapes"
            )
        dp = self.world // together
        both = dp * cp
        if told.get("dp", dp) not in (dp, both):
            self.unlike_group = told["dp"]
        elif self.told.dp_and_cp not in (None, both):
            self.unlike_group = self.told.dp_and_cp
        return found["tp"], found["pp"], dp

    def _stages(self, ways: int) -> int:
        """Return PP where no group tells it: by the other degrees, or by the ranks that embed.

        A part of the ranks may lack whole stages, which nothing in their traces shows.

        - `ways`: data and context parallelism together, or 0 where no group tells them.
        """
        if (tp := self.told.of.get("tp", 0)) and ways:
            return self.world // (tp * ways)
        if len(self.ranks) < self.world:
            expected = "the traces of all ranks, or a description of the pipeline's group (mesh_pp)"
            raise self._lacks(expected, f"those of {len(self.ranks)} of {self.world} ranks")
        first = sum(any(self._shapes(rank, "aten::embedding")) for rank in self.ranks)
        return self.world // first

    def _microbatches(self) -> int:
        """Return how often a step passes the embedding."""
        wanted = self._embedding(1)
        most = max(
            sum(
                calls
                for sizes, calls in self._shapes(rank, "aten::embedding")
                if sizes[:2] == wanted
            )
            for rank in self.ranks
        )
        return max(1, round(most / len(self.steps)))

    def _passes(self, rank: int, *, backward: bool) -> float:
        """Return the calls of attention in a step; of single products, two forward, four back."""
        fused = sum(
            calls
            for (name, _), calls in self.calls[rank].items()
            if ATTENTION.search(name) and ("backward" in name) == backward
        )
        plain = sum(calls for _, calls in self._shapes(rank, *BATCHED))
        return (fused or plain / 6) / len(self.steps)

    def _layer_passes(self, rank: int) -> float:
        """Return how often a step passes a layer of a rank backward.

        Around a ring, a call of attention has the keys of one rank of context parallelism, so a
        layer takes a call for each. A causal mask may leave early queries fewer of them: the latest
        of the ranks with the same products tells.
        """
        cp = self.told.of.get("cp", 1)
        pairs = self.attended
        if cp == 1 or not pairs or max(keys for _, keys in pairs) > max(pairs)[0]:
            return self._passes(rank, backward=True)
        products = {each: sorted(self._shapes(each, *PRODUCTS)) for each in self.ranks}
        alike = [each for each in self.ranks if products[each] == products[rank]]
        return max(self._passes(each, backward=True) for each in alike) / cp

    def _sides(self, rank: int, tokens: int, hidden: int) -> Counter[int]:
        """Count a rank's products by their side that is neither tokens nor hidden vector."""
        calls_of: Counter[int] = Counter()
        for sizes, calls in self._shapes(rank, *PRODUCTS):
            two = [size for size in sizes if len(size) == 2][-2:]
            if len(two) < 2:
                continue
            sides = [two[0][0], two[0][1], two[1][1]]
            for known in (tokens, hidden):
                if known in sides:
                    sides.remove(known)
            if len(sides) == 1:
                calls_of[sides[0]] += calls
        return calls_of

    def _others(self, tokens: int, hidden: int) -> Counter[int]:
        """Count the products of a layer by their side that is neither tokens nor hidden vector.

        Each matrix has three products: forward, and the gradients of its input and its weight.
        """
        rank = self.ranks[0]
        per_layer = 3 * self._layer_passes(rank) * len(self.steps)
        if not per_layer:
            return Counter()
        sides = self._sides(rank, tokens, hidden)
        return Counter({side: round(calls / per_layer) for side, calls in sides.items()})

    def _vocabulary(self, rows: int, tokens: int, hidden: int, tp: int) -> int:
        """Return the words of the model; with TP a rank may hold a part of the embedding's rows.

        The loss shows all words, or the head's product shows those of a rank.
        """
        losses = self._words_of_losses()
        heads = {side for rank in self.ranks for side in self._sides(rank, tokens, hidden)}
        if tp == 1 or rows in losses:
            return rows
        if rows * tp in losses or rows in heads:
            return rows * tp
        if rows % tp or rows // tp not in heads:
            self.open_vocabulary = rows
        return rows

    def _kv_heads(self, tokens: int, hidden: int, heads: int, kv_heads: int, width: int) -> int:
        """Return the heads of keys; a job may have repeated them before attention."""
        others = self._others(tokens, hidden)
        if others[heads * width] == 2:
            fewer = [side for side, count in others.items() if count == 2 and side < heads * width]
            if len(fewer) == 1 and fewer[0] % width == 0:
                return fewer[0] // width
        return kv_heads

    def _mlp(self, tokens: int, hidden: int, own_width: int, vocab: int, tp: int) -> dict[str, Any]:
        """Return the inner width of the MLP, and whether it is gated."""
        others = self._others(tokens, hidden)
        wide = {
            side: count
            for side, count in sorted(others.items())
            if count and side not in (own_width, vocab, vocab // tp)
        }
        for side, count in wide.items():
            if count == 1 and wide.get(2 * side) == 1:  # gate and up in one matrix
                return {"ffn": side * tp, "is_gated": True}
            if count == 3 or (count == 2 and side > own_width):  # fewer heads of keys are narrower
                return {"ffn": side * tp, "is_gated": count == 3}
        self.has_usual_mlp = True
        return {"ffn": 4 * hidden, "is_gated": False}
