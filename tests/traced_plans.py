"""Traces of a small transformer under parallel plans, as the PyTorch profiler writes them on Gloo.

`traced` plays a step in which each operation takes what `Speeds` says, so the right answer to "how
long would another plan take" is known: play that plan.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullwire.workloads.layout import passes

BATCH, SEQUENCE, HIDDEN, FFN, VOCAB, HEADS, LAYERS = 8, 128, 512, 1536, 2048, 8, 4
_MM, _BACKWARD_ATTENTION = "aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What operations take, and sizes that may differ from the usual ones."""

    flops_per_s: float = 5e10
    bytes_per_s: float = 1e9
    message_s: float = 2e-4
    is_plain: bool = False
    light_s: float = 4e-4  # of one layer's norms and activations in one pass
    splitting_s: float = 9e-3  # of a layer and microbatch, by the mesh that names the groups
    heads: int = HEADS  # all as wide as HEADS of them would be
    cp: int = 1  # ranks that share a sequence, and gather its keys and values
    is_exchanging: bool = False  # tokens go to their experts, and back

    @property
    def tokens(self) -> int:
        """Return the tokens that a rank has of a sequence."""
        return SEQUENCE // self.cp


class _Rank:
    """The events of one rank, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now_us = 0.0

    def work(self, name: str, sizes: list[list[int]], flops: float, speeds: Speeds) -> None:
        """Add one operation with the shapes of its tensors."""
        self.add(name, flops / speeds.flops_per_s * 1e6, sizes)

    def add(
        self, name: str, long_us: float, sizes: list[list[int]] | None = None, **more: Any
    ) -> None:
        """Add an event; an operation unless more is told."""
        args = {"Input Dims": sizes or [], "Input type": ["float"] * len(sizes or [])}
        event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": self.now_us}
        self.events.append({**event, "dur": long_us, "args": args, **more})
        if more.get("tid", 1) == 1 and "ts" not in more:
            self.now_us += long_us

    def products(self, tp: int, head: bool, times: int, speeds: Speeds) -> None:
        """Add the products of a layer, or of the head, forward or for both gradients."""
        if head:
            matrices = [(HIDDEN, VOCAB // tp)]
        else:
            own = speeds.heads * HIDDEN // HEADS // tp
            matrices = [(HIDDEN, own)] * 3 + [(own, HIDDEN)]
            matrices += [(HIDDEN, FFN // tp)] * 2 + [(FFN // tp, HIDDEN)]
        for inner, outer in matrices:
            flops = 2.0 * speeds.tokens * inner * outer
            if times == 1:
                self.work(_MM, [[speeds.tokens, inner], [inner, outer]], flops, speeds)
            else:
                self.work(_MM, [[speeds.tokens, outer], [outer, inner]], flops, speeds)
                self.work(_MM, [[outer, speeds.tokens], [speeds.tokens, inner]], flops, speeds)

    def exchange_keys(
        self, own: list[int], every: list[int], speeds: Speeds, *, forward: bool
    ) -> None:
        """Gather the keys and values of a sequence, or add up their gradients.

        An operation waits within for each message. Gloo marks a gathering with a rank's part.
        """
        for _ in range(2):
            size = 4.0 * speeds.cp * own[0] * own[1] * own[2] * own[3]
            long_us = 1e6 * (speeds.message_s + size / speeds.bytes_per_s)
            mark: dict[str, Any] = {"cat": "user_annotation", "tid": 9, "ts": self.now_us}
            if forward:
                self.add("gloo:all_gather", long_us, [own], **mark)
                whole = [speeds.cp * own[0], *own[1:]]
                told = {"cat": "cpu_op", "tid": 1, "ts": self.now_us}
                self.add("c10d::_allgather_base_", 1.0, [whole, own], **told)
            else:
                self.add("gloo:all_reduce", long_us, [every], **mark)
            self.add("GatherKeys", long_us)

    def sum(self, values: list[int], ranks: int, speeds: Speeds, name: str) -> None:
        """Wait for a sum of so many float32 values."""
        size = 4.0
        for value in values:
            size *= value
        long_us = 1e6 * (speeds.message_s + 2 * (ranks - 1) / ranks * size / speeds.bytes_per_s)
        mark: dict[str, Any] = {"cat": "user_annotation", "tid": 9, "ts": self.now_us}
        self.add("gloo:all_reduce", long_us, [values], **mark)
        if name:
            self.add(name, long_us, [values])
        else:
            self.now_us += long_us


def traced(
    place: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    is_plain: bool = False,
    heads: int = HEADS,
    is_exchanging: bool = False,
) -> float:
    """Write a trace for each rank; return the time of a step. The mesh is pp, dp, cp, tp.

    - `is_plain`: attention is made of products, positions are embedded, and groups bear no names.
    - `heads`: of the model, each as wide as if `HEADS` of them had the hidden vector's width.
    - `is_exchanging`: each layer exchanges its tokens twice in each pass, as experts do.
    """
    speeds = Speeds(is_plain=is_plain, heads=heads, cp=cp, is_exchanging=is_exchanging)
    place.mkdir()
    micro = BATCH // dp
    stages = [_Rank() for _ in range(pp)]
    ends_us: list[float] = []
    for step in range(2):
        began_us = max([0.0, *ends_us[-1:]])
        for stage in stages:
            stage.now_us = began_us
        _pipeline(stages, micro, tp, speeds)
        for place_, stage in enumerate(stages):
            if dp * cp > 1:
                values = 4 * HIDDEN**2 * heads // HEADS // tp + 3 * HIDDEN * FFN // tp
                for _ in range(LAYERS // pp):
                    stage.sum([values], dp * cp, speeds, "")
                if place_ in (0, pp - 1):
                    stage.sum([VOCAB * HIDDEN // tp], dp * cp, speeds, "")
                    if pp == 1:
                        stage.sum([VOCAB * HIDDEN // tp], dp * cp, speeds, "")
            stage.add("Optimizer.step#AdamW.step", 2000.0 / tp / pp, cat="user_annotation")
            stage.add("aten::add", 0.001)
        ends_us.append(max(stage.now_us for stage in stages))
        for stage in stages:
            mark: dict[str, Any] = {"cat": "user_annotation", "ts": began_us}
            stage.add(f"ProfilerStep#{step}", ends_us[-1] - began_us, **mark)
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    world = pp * dp * cp * tp
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": world}]
    groups += [
        {
            "pg_name": name,
            "pg_desc": "undefined" if is_plain else f"mesh_{name}",
            "pg_size": size,
            "ranks": [],
        }
        for name, size in sizes.items()
        if size < world  # torch gives a mesh over all ranks the default group
    ]
    for rank in range(world):
        info = {"backend": "gloo", "rank": rank, "world_size": world, "pg_config": groups}
        trace = {
            "schemaVersion": 1,
            "distributedInfo": info,
            "traceEvents": sorted(
                stages[rank // (dp * cp * tp)].events, key=lambda each: each["ts"]
            ),
        }
        (place / f"rank{rank}.json").write_text(json.dumps(trace))
    return (ends_us[-1] - ends_us[-2]) * 1e-6


def _pipeline(stages: list[_Rank], micro: int, tp: int, speeds: Speeds) -> None:
    """Play the passes of all stages, 1F1B, with transfers between them."""
    pp = len(stages)
    waiting = [passes(pp, 1, micro, stage)[::-1] for stage in range(pp)]
    ready_us = {(True, 0, number): stages[0].now_us for number in range(micro)}
    hop_us = 1e6 * (speeds.message_s + 4.0 * SEQUENCE * HIDDEN / speeds.bytes_per_s)
    while any(waiting):
        for place, order in enumerate(waiting):
            while order and (order[-1][0], place, order[-1][2]) in ready_us:
                forward, _, number = order.pop()
                stage = stages[place]
                if place != (0 if forward else pp - 1):
                    until_us = max(stage.now_us, ready_us[forward, place, number] + hop_us)
                    long_us = until_us - stage.now_us
                    stage.add("gloo:recv", long_us, [[1, SEQUENCE, HIDDEN]], cat="user_annotation")
                _pass(stage, place, pp, tp, forward=forward, speeds=speeds)
                following = place + (1 if forward else -1)
                if forward and following == pp:
                    ready_us[False, place, number] = stage.now_us
                elif following >= 0:
                    ready_us[forward, following, number] = stage.now_us


def _pass(stage: _Rank, place: int, pp: int, tp: int, *, forward: bool, speeds: Speeds) -> None:
    times = 1 if forward else 2
    if place == 0 and forward:
        stage.add("aten::embedding", 5.0, [[VOCAB, HIDDEN], [1, speeds.tokens]])
        if speeds.is_plain:
            stage.add("aten::embedding", 5.0, [[2 * SEQUENCE, HIDDEN], [1, speeds.tokens]])
    if place == pp - 1 and not forward:
        stage.products(tp, True, 1, speeds)
        stage.add("aten::nll_loss_forward", 5.0, [[speeds.tokens, VOCAB], [speeds.tokens]])
        stage.products(tp, True, 2, speeds)
    heads = [1, speeds.heads // tp, speeds.tokens, HIDDEN // HEADS]
    keys = [1, speeds.heads // tp, SEQUENCE, HIDDEN // HEADS]
    flops = 2.0 * SEQUENCE * speeds.tokens * speeds.heads * HIDDEN / HEADS / tp
    for _ in range(LAYERS // pp):
        stage.products(tp, False, times, speeds)
        if speeds.is_plain:
            wide = HIDDEN // HEADS
            both = [[heads[1], speeds.tokens, wide], [heads[1], wide, SEQUENCE]]
            for _ in range(2 * times):
                stage.work("aten::bmm", both, flops / 2, speeds)
        elif forward:
            stage.work(_ATTENTION, [heads, keys, keys], flops, speeds)
        else:
            stage.work(_BACKWARD_ATTENTION, [heads, heads, keys, keys, heads], 2 * flops, speeds)
        if speeds.cp > 1:
            stage.exchange_keys(heads, keys, speeds, forward=forward)
        if speeds.is_exchanging:
            for _ in range(2):
                values = [speeds.tokens, HIDDEN]
                stage.add("gloo:all_to_all", 500.0, [values], cat="user_annotation", tid=9)
                stage.now_us += 500.0
        stage.add("aten::mul", times * speeds.light_s * 1e6, [heads])
        if tp > 1:
            if not speeds.is_plain:
                stage.add("PythonSubclass", times * speeds.splitting_s / 3 * 1e6)
            for _ in range(2):
                values = [1, speeds.tokens, HIDDEN]
                name = "AR" if speeds.is_plain else "_c10d_functional::wait_tensor"
                stage.sum(values, tp, speeds, name)
