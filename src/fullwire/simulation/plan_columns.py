"""Parallel plans as columns: what prices a step and counts its memory takes many plans at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np

from fullwire.clusters.cluster import Floats, Ints
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.layout import CONTEXT_KINDS, RECOMPUTE, SCHEDULES, Layout, Precision
from fullwire.workloads.stage_memory import Columns, expert_shards


@dataclass(frozen=True, eq=False, slots=True)
class Plans:
    """Many parallel plans: a column for each degree, a row for each plan."""

    tp: Ints
    pp: Ints
    vpp: Ints
    dp: Ints
    cp: Ints
    ep: Ints
    etp: Ints
    zero: Ints
    shard: Ints
    recompute: Ints  # index into RECOMPUTE
    recomputed: Floats  # share of a stage's layers, with full recomputation
    microbatch: Ints
    global_batch: Ints
    sequence: Ints
    sequence_parallel: Ints
    schedule: Ints  # index into SCHEDULES
    context_kind: Ints  # index into CONTEXT_KINDS
    gradient_bytes: Ints
    flash_attention: Ints
    tp_overlap: Ints
    dp_overlap: Ints
    ep_overlap: Ints

    def __len__(self) -> int:
        return len(self.tp)

    def rows(self, which: Ints) -> Plans:
        """Return some of the plans."""
        return Plans(*(getattr(self, field.name)[which] for field in fields(self)))

    def layout(self, row: int, precision: Precision, model: Architecture) -> Layout:
        """Return one of the plans by itself."""
        one: dict[str, Any] = {field.name: getattr(self, field.name)[row] for field in fields(self)}
        share, layers = float(one.pop("recomputed")), model.layers / int(one["pp"])
        one = {name: int(value) for name, value in one.items()}
        flags = ("sequence_parallel", "flash_attention", "tp_overlap", "dp_overlap", "ep_overlap")
        one |= {name: bool(one[name]) for name in flags}
        one["recompute"] = RECOMPUTE[one["recompute"]]
        one["schedule"] = SCHEDULES[one["schedule"]]
        one["context_kind"] = CONTEXT_KINDS[one["context_kind"]]
        if one["recompute"] == "full" and share < 1:
            one["recompute_layers"] = max(1, round(share * layers))
        return Layout(**one, precision=precision)

    @property
    def microbatches(self) -> Ints:
        """The microbatches that a data-parallel rank works through in one step."""
        return self.global_batch // (self.dp * self.microbatch)

    @property
    def rank_tokens(self) -> Floats:
        """The tokens of one microbatch on one context-parallel rank."""
        return self.microbatch * self.sequence / self.cp

    @property
    def devices(self) -> Ints:
        """The ranks of the whole job."""
        return self.tp * self.pp * self.dp * self.cp


@dataclass(frozen=True, eq=False, slots=True)
class Spread:
    """Parameters of one rank, and the ranks that have the same ones: all, and a shard group."""

    parameters: Floats
    stride: Ints  # between these ranks
    among: Ints  # ranks of a shard group; without ZeRO, those that add gradients up
    groups: Ints  # shard groups that hold the same values


def spread(plans: Plans, dense: Floats, experts: Floats | None) -> list[Spread]:
    """Return the ranks that share what all tokens use, and those that share experts."""
    is_full, copies = plans.zero == 3, plans.dp * plans.cp
    among = np.where(is_full, plans.shard, copies)
    kinds = [Spread(dense, plans.tp, among, copies // among)]
    if experts is not None:
        stride = plans.ep * plans.etp
        copies = plans.tp * copies // stride
        among = np.where(is_full, expert_shards(cast(Columns, plans)), copies)
        kinds.append(Spread(experts, stride, among, copies // among))
    return kinds


_COLUMNS = (
    *("tp", "pp", "vpp", "dp", "cp", "ep", "etp", "zero", "microbatch", "global_batch"),
    *("sequence", "sequence_parallel", "gradient_bytes", "flash_attention"),
    *("tp_overlap", "dp_overlap", "ep_overlap"),
)


def plans_of(layouts: Sequence[Layout], layers: int) -> Plans:
    """Return plans as columns, for a model with so many layers."""
    columns = {
        name: np.array([getattr(layout, name) for layout in layouts], np.int64) for name in _COLUMNS
    }
    recomputed = [
        min(1.0, (layout.recompute_layers or layers) * layout.pp / layers) for layout in layouts
    ]
    return Plans(
        **columns,
        shard=np.array([layout.shard_group for layout in layouts], np.int64),
        recompute=np.array([RECOMPUTE.index(layout.recompute) for layout in layouts], np.int64),
        recomputed=np.array(recomputed),
        schedule=np.array([SCHEDULES.index(layout.schedule) for layout in layouts], np.int64),
        context_kind=np.array(
            [CONTEXT_KINDS.index(layout.context_kind) for layout in layouts], np.int64
        ),
    )
