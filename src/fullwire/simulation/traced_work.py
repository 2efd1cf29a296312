"""What a traced step's messages serve, and where its time goes.

A description of their group tells the parallelism of messages. Messages of a group without one are
told apart by operation and size: a layer's sums under tensor parallelism have the values of all
tokens of a microbatch, and messages of context parallelism have those of keys.

Operations tell the class of the time that they took. Of work that no operation shows, the names of
kernels tell it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.clusters.cluster import Floats
from fullwire.errors import UsageError
from fullwire.run.gaps import has_lost_its_end, of_several_runs
from fullwire.run.intervals import union, within
from fullwire.run.run import SIZE_UNKNOWN, Collectives, Operations, Run, Whole
from fullwire.run.usual import marks_of_steps, usual_steps
from fullwire.simulation.described_groups import kind_of_messages
from fullwire.units import shown
from fullwire.workloads.layout import Precision

TRANSFERS = ("send", "recv", "sendrecv")
_MOST_IDLE = 0.1  # of a whole step, at its end
_SMALL_BYTES = 1024  # sums of a loss or of norms
_SUMS = ("allreduce", "reducescatter", "allgather")  # of activations; gathers where they are split
_VALUE_BYTES = (1, 2, 4)

PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")
BATCHED = ("aten::bmm", "aten::baddbmm")
_SHARD_COPIES = ("aten::_foreach_copy_", "aten::split_with_sizes_copy", "aten::_chunk_cat")
ATTENTION = re.compile(r"_scaled_dot_product_|_flash_attention_|_efficient_attention_|flash_attn")
# Kernels by name, for work that no operation shows.
_ATTENTION_KERNEL = re.compile(r"fmha|flash|attn|attention|sdpa", re.IGNORECASE)
_PRODUCT_KERNEL = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|cijk_", re.IGNORECASE)
_SIZE = re.compile(r"[0-9]{1,18}")
_PRECISIONS: Mapping[str, Precision] = {
    "float": "fp32",
    "c10::half": "fp16",
    "c10::bfloat16": "bf16",
    "c10::float8_e4m3fn": "fp8",
}
WORK = {"matmul": "matrix products", "attention": "attention"}


def sizes_of(shapes: str) -> list[list[int]]:
    """Return the sizes of an operation's tensors; none where the text of a trace is no sizes."""
    sizes = [shape.split("x") for shape in shapes.split()]
    flat = [size for shape in sizes for size in shape]
    if not all(_SIZE.fullmatch(size) for size in flat):
        return []
    return [[int(size) for size in shape] for shape in sizes]


def precision_of(operations: Operations) -> Precision:
    """Return the precision of most operations."""
    types = Counter(map(str.lower, operations.dtype.tolist()))
    known = Counter({kind: n for kind, n in types.items() if kind in _PRECISIONS})
    return _PRECISIONS[known.most_common(1)[0][0]] if known else "bf16"


def refuse_several_runs(run: Run, heads: Mapping[int, AbstractSet[tuple[int, int]]]) -> None:
    """Refuse ranks that no plan has together: each has as many heads, of one width.

    - `heads`: the heads of each rank's calls of attention, and their width.
    """
    if reason := of_several_runs(run.gaps):
        raise UsageError(f"from: expected the traces of one run: {reason}")
    known = {rank: own for rank, own in heads.items() if own}
    for rank, own in known.items():
        first = min(known)
        if not own & known[first]:
            told = [
                f"{count} heads of {width} on rank {of}"
                for of in (first, rank)
                for count, width in sorted(known[of])[:1]
            ]
            raise UsageError(
                "from: expected the traces of one run, whose ranks have layers alike, got "
                f"attention of {' and of '.join(told)}"
            )


def steps_of_all(run: Run, steps: Whole) -> list[int]:
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


def whole_steps(run: Run, steps: Sequence[int]) -> list[int]:
    """Return the steps that are whole on each rank, where the end of a trace may be lost.

    In a step that was cut, nothing is told of its end: no operator, kernel or message.
    """
    if not has_lost_its_end(run.gaps):
        return list(steps)
    spans, marks = run.spans, marks_of_steps(run)
    marks = marks.rows(np.isin(marks.step, steps))
    is_work = ~((spans.lane == "host") & (spans.name == "step"))
    cut = set()
    for rank, step, start_ns, end_ns in zip(
        *(column.tolist() for column in (marks.rank, marks.step, marks.start_ns, marks.end_ns)),
        strict=True,
    ):
        ends_ns = spans.end_ns[is_work & (spans.rank == rank) & (spans.step == step)]
        if end_ns - int(ends_ns.max(initial=start_ns)) > _MOST_IDLE * (end_ns - start_ns):
            cut.add(step)
    return [step for step in steps if step not in cut]


def values_of_keys(own: Iterable[int], cp: int) -> frozenset[int]:
    """Return the values of messages of keys, alone or with the values, of one rank or of all."""
    if cp == 1:
        return frozenset()
    return frozenset(each * ways * parts for each in own for ways in (1, cp) for parts in (1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedMessages:
    """The messages of some steps, with what tells their kinds."""

    table: Collectives
    steps: tuple[int, ...]
    descriptions: Mapping[str, str]  # of groups, by name
    activation: int = 0  # values of all tokens of a rank's microbatch; 0 before it is known
    tp: int = 1
    pp: int = 1
    keys: frozenset[int] = frozenset()  # values of messages of keys, under context parallelism

    def by_kind(self) -> dict[str, tuple[tuple[str, float, float], ...]]:
        """Return the messages of all steps by kind, with the time of the rank that waited least."""
        table = self.table
        least: dict[tuple[str, str, str, int, int], tuple[str, float, float]] = {}
        is_chosen = np.isin(table.step, self.steps) & (table.bytes >= _SMALL_BYTES)
        for row in np.flatnonzero(is_chosen).tolist():
            kind = self.kind(row)
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

    def zero(self, micro: int, own_values: float) -> int:
        """Return the stage of ZeRO that messages of data parallelism show.

        Gloo sums all gradients where NCCL leaves each rank its part. Then the gathers must have
        the size of the parameters, in 16 bits or more: a job may also gather its metrics.
        """
        own = self.of_a_rank("dp")
        gathers, gathered_bytes = own.get("allgather", (0.0, 0.0))
        if "reducescatter" not in own and gathered_bytes < own_values:
            return 0
        return 3 if gathers > micro else 1

    def of_a_rank(self, kind: str) -> dict[str, tuple[float, float]]:
        """Return how many messages of a kind a rank has in a step, and their bytes, by operation.

        A mean over ranks: those of other groups have messages of their own.
        """
        table = self.table
        ranks = set(table.rank.tolist())
        is_chosen = np.isin(table.step, self.steps) & (table.bytes >= _SMALL_BYTES)
        found: dict[tuple[int, str, int, str, int], float] = {}
        for row in np.flatnonzero(is_chosen).tolist():
            if self.kind(row) == kind:
                where = int(table.rank[row]), str(table.group[row]), int(table.step[row])
                what = str(table.op[row]), int(table.sequence[row])
                found[(*where, *what)] = float(table.bytes[row])
        share = 1 / max(len(ranks) * len(self.steps), 1)
        own: dict[str, tuple[float, float]] = {}
        for (*_, op, _), size in found.items():
            count, total = own.get(op, (0.0, 0.0))
            own[op] = count + share, total + share * size
        return own

    def summed_bytes(self) -> float:
        """Return the bytes of gradients that a rank adds up in a step."""
        own = self.of_a_rank("dp")
        return sum(own.get(op, (0.0, 0.0))[1] for op in ("allreduce", "reducescatter"))

    def described(self, group: str) -> str:
        """Return the parallelism that a group's description names; empty if it is open.

        NCCL's collectives bear the name of their group, which may be a number, with members or
        ranks behind it: `7`, `7 [0, 1]`, `7 0>1`.
        """
        return kind_of_messages(self.descriptions.get(group.partition(" ")[0], group))

    def kind(self, row: int) -> str:
        """Return the parallelism that a message serves."""
        if kind := self.described(str(self.table.group[row])):
            return kind
        size_bytes = int(self.table.bytes[row])
        if self.table.op[row] in TRANSFERS:  # Gloo names no group of these
            if self.pp == 1:
                return "cp" if self.keys else "pp"
            of_keys = _sizes_bytes(self.keys) - _sizes_bytes([self.activation])
            return "cp" if size_bytes in of_keys else "pp"
        if self.tp > 1 and size_bytes in _sizes_bytes([self.activation]):
            return "tp"
        if size_bytes in _sizes_bytes(self.keys):
            return "cp"
        # Gradients are summed, and never exchanged: that is the work of experts or heads.
        return "" if self.table.op[row] == "alltoall" else "dp"

    @property
    def are_whole(self) -> bool:
        """Return whether there are messages, and the size of each is told."""
        mine = np.isin(self.table.step, self.steps)
        return bool(mine.any()) and SIZE_UNKNOWN not in set(self.table.dtype[mine].tolist())

    def activations_of_step(self) -> float:
        """Return how many collectives of a step have the values of all tokens of a microbatch."""
        sizes_bytes = _sizes_bytes([self.activation]) - _sizes_bytes(self.keys)
        is_wanted = self._is_open("tp", _SUMS) & np.isin(self.table.bytes, sorted(sizes_bytes))
        return self._most_in_a_step(is_wanted, np.ones(len(self.table)))

    def ranks_of_activations(self, world: int) -> int:
        """Return how many ranks the groups have that sum activations; 0 if the trace does not tell.

        All ranks' traces together show who takes part in a group.
        """
        if len(set(self.table.rank.tolist())) < world:
            return 0
        sizes_bytes = _sizes_bytes([self.activation]) - _sizes_bytes(self.keys)
        is_wanted = self._is_open("tp", _SUMS) & np.isin(self.table.bytes, sorted(sizes_bytes))
        members: dict[str, set[int]] = defaultdict(set)
        groups = self.table.group[is_wanted].tolist()
        for group, rank in zip(groups, self.table.rank[is_wanted].tolist(), strict=True):
            members[group].add(rank)
        found = {len(ranks) for ranks in members.values()}
        return found.pop() if len(found) == 1 else 0

    def gradient_bytes_of_step(self) -> float:
        """Return the bytes of a step's sums that are of no activations and of no keys."""
        others_bytes = _sizes_bytes([self.activation, *self.keys])
        is_wanted = self._is_open("dp", ("allreduce", "reducescatter"))
        is_wanted &= ~np.isin(self.table.bytes, sorted(others_bytes))
        return self._most_in_a_step(is_wanted, self.table.bytes.astype(np.float64))

    def exchanges_of_step(self) -> float:
        """Return how many all-to-alls of a step belong to groups that nobody describes."""
        return self._most_in_a_step(self._is_open("", ("alltoall",)), np.ones(len(self.table)))

    def refuse_rings(
        self, passes: Mapping[int, float], microbatches: int, *, has_stages: bool
    ) -> None:
        """Refuse transfers in each layer, which no group describes, as of keys around a ring.

        A pipeline's first stage sends in a microbatch once, or some tensors of different sizes.
        Around a ring each rank sends in most calls of attention, forward and backward.

        - `passes`: forward calls of attention in a step, of each rank that embeds.
        - `has_stages`: whether other ranks do not embed.
        """
        is_sent = self._is_open("", ("send", "sendrecv"))
        for rank, calls in passes.items():
            sizes_bytes = self.table.bytes[is_sent & (self.table.rank == rank)]
            counts = np.unique(sizes_bytes, return_counts=True)[1] / len(self.steps)
            if has_stages:
                counts = counts[counts > 2 * microbatches]
            sent = float(counts.sum())
            if sent > 2 * microbatches and sent >= calls > 0:
                raise UsageError(
                    "from: expected groups that tell what ranks send to each other in each layer, "
                    f"got {sent:.3g} sends of rank {rank} in a step and no description of their "
                    "group (a ring of context parallelism, or interleaved stages). "
                    'new_group(..., group_desc="cp") describes one'
                )

    def _is_open(self, kind: str, ops: Sequence[str]) -> NDArray[np.bool_]:
        """Say which messages may be of a kind: these operations of its groups, or of unnamed."""
        table = self.table
        names = [name for name in set(table.group.tolist()) if self.described(name) in ("", kind)]
        is_chosen = np.isin(table.step, self.steps) & (table.bytes >= _SMALL_BYTES)
        return np.asarray(is_chosen & np.isin(table.group, names) & np.isin(table.op, ops))

    def _most_in_a_step(self, is_wanted: NDArray[np.bool_], amount: Floats) -> float:
        """Return the mean amount of a step, of the rank with most."""
        _, place = np.unique(self.table.rank[is_wanted], return_inverse=True)
        return float(np.bincount(place, amount[is_wanted]).max(initial=0)) / len(self.steps)


def _sizes_bytes(values: Iterable[int]) -> set[int]:
    return {value * size for value in values for size in _VALUE_BYTES}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTimes:
    """The operations, kernels and messages of some steps."""

    run: Run
    steps: Sequence[int]
    spent_ns: Mapping[int, Counter[tuple[str, str]]]  # of operations with shapes, by rank
    only_kernels: Sequence[str]  # classes of work that no operation shows
    messages: TracedMessages

    def step_s(self) -> float:
        """Return the mean length of a step."""
        spans = self.run.spans
        is_step = (spans.lane == "host") & (spans.name == "step") & np.isin(spans.step, self.steps)
        lengths = (spans.end_ns - spans.start_ns)[is_step]
        if not len(lengths):
            raise UsageError("from: expected marks of steps (profiler.step()), got none")
        return float(np.mean(lengths)) * 1e-9

    def busy(self, tp: int, ways: int) -> tuple[float, dict[str, float]]:
        """Take the slowest rank's step apart; also say how much of sums lies beside computing."""
        answers = []
        pipeline = bool(self.messages.by_kind()["pp"])
        for rank in sorted(self.spent_ns):
            spent_ns = self.spent_ns[rank]
            by = {
                "matmul": sum(ns for (name, _), ns in spent_ns.items() if name in PRODUCTS),
                "attention": sum(
                    ns
                    for (name, _), ns in spent_ns.items()
                    if ATTENTION.search(name) or name in BATCHED
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
            handover_ns = by.pop("handover")
            by["dispatch" if tp > 1 else "shards"] += handover_ns
            named = sum(by.values())
            table = self.run.collectives
            shown_ns: dict[str, int] = dict.fromkeys(("tp", "dp", "pp", "cp"), 0)
            sums_ns = beside_ns = 0
            is_own = (table.rank == rank) & np.isin(table.step, self.steps)
            for kind in shown_ns:
                own = np.flatnonzero(is_own).tolist()
                rows = [row for row in own if self.messages.kind(row) == kind]
                sent = union(table.issue_ns[rows], table.end_ns[rows])
                length = int((sent[1] - sent[0]).sum())
                beside = int(within(*sent, work).sum())
                shown_ns[kind] = length - beside
                if kind == "dp":
                    sums_ns, beside_ns = length, beside
                if kind == "tp" and not by["waiting"]:  # an operation waits for it, unmarked
                    shown_ns[kind] = max(0, length - by["dispatch"])  # which hands it over
                    total_ns -= max(0, beside - by["dispatch"])
                # On processors attention waits for the keys of others, within an operation too.
                if kind == "cp" and not is_device and not by["waiting"]:
                    awaited = [row for row in rows if table.op[row] not in TRANSFERS]
                    sent = union(table.issue_ns[awaited], table.end_ns[awaited])
                    within_ns = int(within(*sent, work).sum())
                    within_ns = max(0, within_ns - (0 if tp > 1 else handover_ns))
                    shown_ns[kind] += within_ns
                    total_ns -= within_ns
            shown_ns["tp" if tp > 1 else "dp"] += by.pop("waiting")
            by["rest"] = max(0, total_ns - named)
            steps_ns = round(self.step_s() * 1e9 * len(self.steps))
            if pipeline:
                shown_ns["pp"] += self._drained_ns(rank)
                if ways == 1:  # a barrier at the end of a step, where a stage is drained
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
                    f"from: expected the time of the layers' {WORK[name]}, in operations of "
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
        batched_ns = sum(ns for (name, _), ns in spent_ns.items() if name in BATCHED)
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
