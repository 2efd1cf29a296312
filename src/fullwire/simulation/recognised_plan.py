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
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fullwire.errors import DamagedInput, FullwireError, UsageError
from fullwire.run.intervals import union, within
from fullwire.run.run import Collectives, Run, Whole
from fullwire.run.usual import marks_of_steps, usual_steps
from fullwire.simulation.described_groups import degrees_of, descriptions_of, kind_of_messages
from fullwire.units import shown
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.layout import Layout, Precision

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")
_BATCHED = ("aten::bmm", "aten::baddbmm")
_SHARD_COPIES = ("aten::_foreach_copy_", "aten::split_with_sizes_copy", "aten::_chunk_cat")
_ATTENTION = re.compile(r"_scaled_dot_product_|_flash_attention_|_efficient_attention_|flash_attn")
_PRECISIONS: Mapping[str, Precision] = {
    "float": "fp32",
    "c10::half": "fp16",
    "c10::bfloat16": "bf16",
    "c10::float8_e4m3fn": "fp8",
}
# Kernels by name, for work that no operation shows.
_ATTENTION_KERNEL = re.compile(r"fmha|flash|attn|attention|sdpa", re.IGNORECASE)
_PRODUCT_KERNEL = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|cijk_", re.IGNORECASE)
_WORK = {"matmul": "matrix products", "attention": "attention"}
_TRANSFERS = ("send", "recv", "sendrecv")
_SIZE = re.compile(r"[0-9]{1,18}")
_SMALL_BYTES = 1024  # sums of a loss or of norms


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
    unlike_group: int | None  # the ranks of a data-parallel group that does not fit the degrees
    has_usual_mlp: bool  # no product shows its width: four times the hidden vector is taken
    other_groups: Mapping[str, int]  # ranks of expert or sequence parallelism: ep, sp
    has_mesh: bool  # groups of PyTorch's DeviceMesh
    open_vocabulary: int | None  # the embedding's rows, if a rank may hold a part of them
    only_kernels: tuple[str, ...]  # classes of work that no operation shows
    missing: tuple[str, ...]  # data of the run
    source: str


def recognised(run: Run, model: Architecture | None = None) -> Recognised:
    """Recognise the model and the plan of a run that was traced with shapes.

    - `model`: gives the sizes that no operation of the trace shows.
    """
    return _Recognising(run, model).answer()


def _sizes(shapes: str) -> list[list[int]]:
    """Return the sizes of an operation's tensors; none where the text of a trace is no sizes."""
    sizes = [shape.split("x") for shape in shapes.split()]
    flat = [size for shape in sizes for size in shape]
    if not all(_SIZE.fullmatch(size) for size in flat):
        return []
    return [[int(size) for size in shape] for shape in sizes]


def _usual(run: Run, steps: Whole) -> list[int]:
    """Return the numbers of the usual steps that all ranks have: the profiler disturbs some."""
    marks = marks_of_steps(run)
    steps = steps[steps >= 0]
    marks = marks.rows(np.isin(marks.step, steps))
    if not len(marks):
        return sorted(set(steps.tolist()))
    numbers, place, count = np.unique(marks.step, return_inverse=True, return_counts=True)
    total_ns = np.bincount(place, (marks.end_ns - marks.start_ns).astype(np.float64))
    is_shared = count == count.max()
    length_ns = np.asarray(total_ns / count)[is_shared]
    return [int(number) for number in numbers[is_shared][usual_steps(length_ns)]]


class _Recognising:
    """The operations of a run by rank; each method recognises one part of the plan."""

    def __init__(self, run: Run, model: Architecture | None) -> None:
        self.run = run
        self.model = model
        self.told = degrees_of(run.facts.groups or "")
        self.descriptions = descriptions_of(run.facts.group_names or "")
        self.unlike_group: int | None = None
        self.has_usual_mlp = False
        self.open_vocabulary: int | None = None
        self.only_kernels: list[str] = []  # classes of work that kernels show, and no operation
        table = run.operations
        self.steps = _usual(run, table.step)
        if not len(table) or not self.steps:
            expected = "a trace of whole steps with the shapes of operations"
            if not len(marks_of_steps(run)):
                raise self._lacks(expected, "no step")
            raise UsageError(
                f"from: expected {expected} (profile(record_shapes=True)), got "
                f"{shown(run.provenance.source)} without them"
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

    def _lacks(self, expected: str, given: str) -> FullwireError:
        """Return why a part of the plan is unknown: of a damaged trace, that part may be lost."""
        if self.run.missing:
            lost = "; ".join(self.run.missing)
            return DamagedInput(self.run.provenance.source, f"expected {expected}: {lost}")
        return UsageError(f"from: expected {expected}, got {given}")

    def answer(self) -> Recognised:
        """Recognise one part after the other."""
        named = {name for rank in self.ranks for name, _ in self.calls[rank]}
        if any("_grouped_mm" in name for name in named):
            raise UsageError("from: expected a model of dense layers, got one with experts")
        batch, sequence, local_heads, local_kv, head_dim = self._attention()
        tokens = batch * sequence
        [rows, hidden], _ = self._embedding(tokens)
        tp, pp, dp, cp = self._degrees(hidden, local_heads * head_dim)
        micro = self._microbatches()
        layers, again = self._layers(pp, micro)
        if self.model is not None and self.only_kernels:
            model = self.model
            if model.moe is not None:
                raise UsageError("from: expected a model of dense layers, got one with experts")
            if (model.hidden, model.heads) != (hidden, local_heads * tp):
                raise UsageError(
                    f"model: expected the trace's, with {local_heads * tp} heads and a hidden "
                    f"vector of {hidden}, got {model.name} with {model.heads} and {model.hidden}"
                )
        else:
            vocab = self._vocabulary(rows, tokens, hidden, tp)
            model = Architecture(
                name=self.run.facts.model or "recorded",
                layers=layers,
                hidden=hidden,
                heads=local_heads * tp,
                kv_heads=self._kv_heads(tokens, hidden, local_heads, local_kv, head_dim) * tp,
                head_dim=head_dim,
                vocab=vocab,
                sequence=sequence * cp,
                **self._mlp(tokens, hidden, local_heads * head_dim, vocab, tp),
            )
        kinds = self._kinds(tokens, hidden, tp)
        zero = self._zero(kinds["dp"], micro, model.parameters / (tp * pp)) if dp > 1 else 0
        beside, busy_s = self._busy(kinds, tokens, hidden, tp, dp)
        types = Counter(self.run.operations.dtype.tolist())
        types = Counter({kind: n for kind, n in types.items() if kind.lower() in _PRECISIONS})
        kind = types.most_common(1)[0][0] if types else "c10::BFloat16"
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
                precision=_PRECISIONS[kind.lower()],
                tp_overlap=False,
                dp_overlap=beside > 0.3 or dp == 1,
            ),
            device=self.run.facts.device or "",
            steps=len(self.steps),
            step_s=self._step_s(),
            busy_s=busy_s,
            messages=kinds,
            unlike_group=self.unlike_group,
            has_usual_mlp=self.has_usual_mlp,
            other_groups={
                kind: ranks
                for kind, ranks in self.told.of.items()
                if kind in ("ep", "sp") and ranks > 1
            },
            has_mesh="mesh_" in (self.run.facts.groups or ""),
            open_vocabulary=self.open_vocabulary,
            only_kernels=tuple(_WORK[work] for work in self.only_kernels),
            missing=self.run.missing,
            source=self.run.provenance.source,
        )

    def _zero(
        self, messages: Sequence[tuple[str, float, float]], micro: int, own_values: float
    ) -> int:
        """Return the stage of ZeRO that messages of data parallelism show.

        Gloo sums all gradients where NCCL leaves each rank its part. Then the gathers must have
        the size of the parameters, in 16 bits or more: a job may also gather its metrics.
        """
        gathers = [size for op, size, _ in messages if op == "allgather"]
        is_scattered = any(op == "reducescatter" for op, *_ in messages)
        if not is_scattered and sum(gathers) < len(self.steps) * own_values:
            return 0
        return 3 if len(gathers) > micro * len(self.steps) else 1

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
            passes = [self._passes(rank, backward=True) / micro for rank in self.ranks]
            if min(passes) <= 0:
                raise self._lacks("each rank's backward pass of attention", "none")
            of_stage = float(np.mean(passes))
            layers = max(1, round(of_stage * pp))
            # Recomputation runs a layer's attention twice for each backward pass of it.
            again = self._passes(self.ranks[0], backward=False) / (passes[0] * micro)
        products = sum(calls for rank in self.ranks for _, calls in self._shapes(rank, *_PRODUCTS))
        if products < 3 * of_stage * micro * len(self.steps) * len(self.ranks):
            self.only_kernels.append("matmul")
        return layers, again

    def _shapes(self, rank: int, *names: str) -> Iterator[tuple[list[list[int]], int]]:
        """Yield the sizes of operations with these names, and their calls."""
        for (name, shapes), calls in self.calls[rank].items():
            if name in names and (sizes := _sizes(shapes)):
                yield sizes, calls

    def _attention(self) -> tuple[int, int, int, int, int]:
        """Return sequences of a microbatch, their tokens, heads of a rank, and their width."""
        for rank in self.ranks:
            for name, shapes in self.calls[rank]:
                sizes = _sizes(shapes) if _ATTENTION.search(name) else []
                if "backward" in name:  # its first tensor is the gradient, of the same sizes
                    sizes = sizes[1:]
                if [len(size) for size in sizes[:2]] != [4, 4] or not all(sizes[0] + sizes[1]):
                    continue
                batch, second, third, width = sizes[0]
                is_heads_first = "_scaled_dot_product_" in name or "_efficient" not in name
                is_heads_first = is_heads_first and "flash_attn" not in name
                heads, tokens = (second, third) if is_heads_first else (third, second)
                kv_heads = sizes[1][1] if is_heads_first else sizes[1][2]
                return batch, tokens, heads, kv_heads, width
        return self._plain_attention()

    def _plain_attention(self) -> tuple[int, int, int, int, int]:
        """Return the same of attention by products of its own, or of the model that was given."""
        *batch, tokens = self._embedding(1)[1]
        sequences = math.prod(batch)
        for rank in self.ranks:
            for sizes, _ in self._shapes(rank, *_BATCHED):
                for count, *sides in sizes:
                    if len(sides) == 2 and tokens in sides and count % sequences == 0:
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
            if len(sizes) > 1 and len(sizes[0]) == 2 and math.prod(sizes[1]) >= tokens
        ]
        if not found:
            raise self._lacks(
                "an embedding of the microbatch's tokens",
                "none: give the trace of a rank of the first stage too",
            )
        return max(found, key=lambda sizes: (math.prod(sizes[1]), sizes[0][0]))

    def _degrees(self, hidden: int, own_width: int) -> tuple[int, int, int, int]:
        """Return TP, PP, DP and CP: by descriptions of groups, else by shapes and transfers."""
        told = self.told.of
        is_shown = "attention" not in self.only_kernels and hidden % own_width == 0
        by_shape = hidden // own_width if is_shown else 1
        found = {"cp": told.get("cp", 1), "tp": told.get("tp", by_shape)}
        table = self.run.collectives
        senders = set(table.group[np.isin(table.op, _TRANSFERS)].tolist())
        sends = any(self.described_kind(name) in ("", "pp") for name in senders)
        first = sum(any(self._shapes(rank, "aten::embedding")) for rank in self.ranks)
        holders = max(1, first * self.world // len(self.ranks))
        found["pp"] = told.get("pp", self.world // holders if sends else 1)
        ways = self.told.dp_and_cp or told.get("dp", 0) * found["cp"]
        if "tp" in told and ways and "pp" not in told and sends:
            found["pp"] = self.world // (found["tp"] * ways)
        together = found["tp"] * found["pp"] * found["cp"]
        if together == 0 or self.world % together:
            raise UsageError(
                f"from: expected degrees that divide {self.world} ranks, got tp {found['tp']}, pp "
                f"{found['pp']}, cp {found['cp']} from groups and shapes"
            )
        dp = self.world // together
        both = dp * found["cp"]
        if told.get("dp", dp) not in (dp, both):
            self.unlike_group = told["dp"]
        elif self.told.dp_and_cp not in (None, both):
            self.unlike_group = self.told.dp_and_cp
        return found["tp"], found["pp"], dp, found["cp"]

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
            if _ATTENTION.search(name) and ("backward" in name) == backward
        )
        plain = sum(calls for _, calls in self._shapes(rank, *_BATCHED))
        return (fused or plain / 6) / len(self.steps)

    def _sides(self, rank: int, tokens: int, hidden: int) -> Counter[int]:
        """Count a rank's products by their side that is neither tokens nor hidden vector."""
        calls_of: Counter[int] = Counter()
        for sizes, calls in self._shapes(rank, *_PRODUCTS):
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
        per_layer = 3 * self._passes(rank, backward=True) * len(self.steps)
        sides = self._sides(rank, tokens, hidden)
        return Counter({side: round(calls / per_layer) for side, calls in sides.items()})

    def _vocabulary(self, rows: int, tokens: int, hidden: int, tp: int) -> int:
        """Return the words of the model; with TP a rank may hold a part of the embedding's rows.

        The loss shows all words, or the head's product shows those of a rank.
        """
        losses = [
            sizes[0][-1]
            for rank in self.ranks
            for sizes, _ in self._shapes(rank, "aten::nll_loss_forward")
        ]
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

    def _kinds(
        self, tokens: int, hidden: int, tp: int
    ) -> dict[str, tuple[tuple[str, float, float], ...]]:
        """Return the messages of all steps by kind, with the time of the rank that waited least."""
        table = self.run.collectives
        least: dict[tuple[str, str, str, int, int], tuple[str, float, float]] = {}
        is_chosen = np.isin(table.step, self.steps) & (table.bytes >= _SMALL_BYTES)
        for row in np.flatnonzero(is_chosen).tolist():
            kind = self.kind_of(table, row, tokens, hidden, tp)
            spent_s = float(table.end_ns[row] - table.issue_ns[row]) * 1e-9
            step, sequence, op = int(table.step[row]), int(table.sequence[row]), str(table.op[row])
            key = (kind, str(table.group[row]), op, step, sequence)
            message = (op, float(table.bytes[row]), spent_s)
            if key not in least or spent_s < least[key][2]:
                least[key] = message
        kinds: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
        for (kind, *_), message in least.items():
            kinds[kind].append(message)
        return {kind: tuple(kinds.get(kind, ())) for kind in ("tp", "dp", "pp", "cp")}

    def described_kind(self, group: str) -> str:
        """Return the parallelism that a group's description names; empty if it is open.

        NCCL's collectives bear the name of their group, which may be a number, with members or
        ranks behind it: `7`, `7 [0, 1]`, `7 0>1`.
        """
        return kind_of_messages(self.descriptions.get(group.partition(" ")[0], group))

    def kind_of(self, table: Collectives, row: int, tokens: int, hidden: int, tp: int) -> str:
        """Return the parallelism that a collective serves."""
        if kind := self.described_kind(str(table.group[row])):
            return kind
        if table.op[row] in _TRANSFERS:
            return "pp"
        values = tokens * hidden
        is_activation = any(table.bytes[row] == values * size for size in (1, 2, 4))
        return "tp" if tp > 1 and is_activation else "dp"

    def _step_s(self) -> float:
        spans = self.run.spans
        is_step = (spans.lane == "host") & (spans.name == "step") & np.isin(spans.step, self.steps)
        lengths = (spans.end_ns - spans.start_ns)[is_step]
        if not len(lengths):
            raise self._lacks("marks of steps (profiler.step())", "none")
        return float(np.mean(lengths)) * 1e-9

    def _busy(
        self, kinds: Mapping[str, object], tokens: int, hidden: int, tp: int, dp: int
    ) -> tuple[float, dict[str, float]]:
        """Take the slowest rank's step apart; also say how much of sums lies beside computing."""
        answers = []
        pipeline = bool(kinds["pp"])
        for rank in self.ranks:
            spent_ns = self.spent_ns[rank]
            by = {
                "matmul": sum(ns for (name, _), ns in spent_ns.items() if name in _PRODUCTS),
                "attention": sum(
                    ns
                    for (name, _), ns in spent_ns.items()
                    if _ATTENTION.search(name) or name in _BATCHED
                ),
                "dispatch": spent_ns["dispatch", ""],
                "handover": spent_ns["handover", ""],
                # FSDP copies parameters before and after a gather, and gradients before a sum.
                "shards": sum(ns for (name, _), ns in spent_ns.items() if name in _SHARD_COPIES),
                "waiting": sum(ns for (name, _), ns in spent_ns.items() if "wait_tensor" in name),
                "optimizer": sum(ns for (name, _), ns in spent_ns.items() if "Optimizer" in name),
            }
            if self.only_kernels:
                by |= self._in_kernels(rank)
            spans = self.run.spans
            is_chosen = np.isin(spans.step, self.steps)
            mine = (spans.rank == rank) & (spans.lane == "compute") & is_chosen
            work = union(spans.start_ns[mine], spans.end_ns[mine])
            total_ns = int((work[1] - work[0]).sum())
            is_device = any(name != "operators" for name in set(spans.name[mine].tolist()))
            if is_device:  # marks of the processor say nothing of a device's time
                by |= {"dispatch": 0, "handover": 0, "waiting": 0, "optimizer": 0}
            by["dispatch" if tp > 1 else "shards"] += by.pop("handover")
            named = sum(by.values())
            table = self.run.collectives
            shown_ns: dict[str, int] = dict.fromkeys(("tp", "dp", "pp", "cp"), 0)
            sums_ns = beside_ns = 0
            is_own = (table.rank == rank) & np.isin(table.step, self.steps)
            for kind in shown_ns:
                rows = [
                    row
                    for row in np.flatnonzero(is_own).tolist()
                    if self.kind_of(table, row, tokens, hidden, tp) == kind
                ]
                sent = union(table.issue_ns[rows], table.end_ns[rows])
                length = int((sent[1] - sent[0]).sum())
                beside = int(within(*sent, work).sum())
                shown_ns[kind] = length - beside
                if kind == "dp":
                    sums_ns, beside_ns = length, beside
                if kind == "tp" and not by["waiting"]:  # an operation waits for it, unmarked
                    shown_ns[kind] = max(0, length - by["dispatch"])  # which hands it over
                    total_ns -= max(0, beside - by["dispatch"])
            shown_ns["tp" if tp > 1 else "dp"] += by.pop("waiting")
            by["rest"] = max(0, total_ns - named)
            steps_ns = round(self._step_s() * 1e9 * len(self.steps))
            if pipeline:
                shown_ns["pp"] += self._drained_ns(rank)
                if dp == 1:  # a barrier at the end of a step, where a stage is drained
                    shown_ns["dp"] = 0
            by |= shown_ns
            by["host"] = max(0, steps_ns - sum(by.values()))
            seconds = {name: ns * 1e-9 / len(self.steps) for name, ns in by.items()}
            own_s = seconds["matmul"] + seconds["attention"] + seconds["rest"]
            answers.append((own_s, beside_ns / max(sums_ns, 1), seconds))
        _, share, seconds = max(answers, key=lambda answer: answer[0])
        for name, kernels in (("matmul", "gemm, nvjet"), ("attention", "flash, fmha")):
            if seconds[name] <= 0:
                raise UsageError(
                    f"from: expected the time of the layers' {_WORK[name]}, in operations of "
                    f"PyTorch or in kernels with their names ({kernels}), got none in "
                    f"{shown(self.run.provenance.source)}"
                )
        return share, seconds

    def _in_kernels(self, rank: int) -> dict[str, int]:
        """Return the time of work that no operation shows, by the names of kernels."""
        spans, spent_ns = self.run.spans, self.spent_ns[rank]
        is_chosen = np.isin(spans.step, self.steps)
        mine = (spans.rank == rank) & (spans.lane == "compute") & is_chosen
        lengths_ns = (spans.end_ns[mine] - spans.start_ns[mine]).tolist()
        by_name: Counter[str] = Counter()
        for name, length_ns in zip(spans.name[mine].tolist(), lengths_ns, strict=True):
            by_name[name] += length_ns
        # Scores and values are products, too: as operations they count as attention already.
        batched_ns = sum(ns for (name, _), ns in spent_ns.items() if name in _BATCHED)
        by = Counter(matmul=-batched_ns)
        for name, length_ns in by_name.items():
            if _ATTENTION_KERNEL.search(name):
                by["attention"] += length_ns
            elif _PRODUCT_KERNEL.search(name):
                by["matmul"] += length_ns
        return {work: max(0, by[work]) for work in self.only_kernels}

    def _drained_ns(self, rank: int) -> int:
        """Return how long a rank had nothing to do at the ends of steps: others still had."""
        spans, idle_ns = self.run.spans, 0
        for step in self.steps:
            mine = (spans.rank == rank) & (spans.step == step)
            is_mark = (spans.lane == "host") & (spans.name == "step")
            work = spans.end_ns[mine & (spans.lane == "compute")]
            idle_ns += int(spans.end_ns[mine & is_mark].max(initial=0) - work.max(initial=0))
        return max(0, idle_ns)
