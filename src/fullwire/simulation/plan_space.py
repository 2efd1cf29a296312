"""All parallel plans of a model on so many devices, as columns.

Tensor parallelism stays within a node, and a microbatch is a power of two. Degrees are those that
divide heads, MLPs, experts, the batch and the sequence. Stages have equal layers, but the ends may
lack up to three (`even_layers`). Parameters are sharded (ZeRO-3) without a pipeline only: each
microbatch of a pipeline would gather them anew. For the same reason ZeRO-2 shards gradients without
a pipeline only.

A degree that the user fixes need not keep to these habits: it is priced if it divides the job.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from fullwire.errors import UsageError
from fullwire.simulation.plan_columns import Plans
from fullwire.units import nearest_name
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.layout import (
    CONTEXT_KINDS,
    MOST_FEWER,
    RECOMPUTE,
    SCHEDULES,
    Precision,
    divisors,
    even_layers,
    nearest_divisor,
    nearest_multiple,
    nearest_of,
    sequence_step,
    tensor_ways,
    undivided,
)
from fullwire.workloads.stage_memory import stage_layers

MOST_STAGES, MOST_MICROBATCH, LEAST_RANK_TOKENS = 64, 16, 1024
FIXABLE = (
    *("tp", "pp", "vpp", "dp", "cp", "ep", "zero", "recompute", "microbatch", "schedule"),
    *("context", "shard", "etp", "recompute_layers", "tp_overlap", "ep_overlap"),
)
MAY_BE_NONE = ("zero", "tp_overlap", "ep_overlap")  # degrees and switches whose least is 0
_COLUMNS = (
    *("tp", "pp", "vpp", "dp", "cp", "ep", "zero", "recompute", "half", "microbatch"),
    *("schedule", "context", "shard"),
)
_WORDS: Mapping[str, tuple[str, ...]] = {
    "recompute": RECOMPUTE,
    "schedule": SCHEDULES,
    "context": CONTEXT_KINDS,
}
_NARROW = ("fp8", "mxfp8", "nvfp4")


class BatchDoesNotDivide(UsageError):
    """No data parallelism divides the global batch."""

    def __init__(self, problem: str, nearest: int = 0) -> None:
        super().__init__(problem)
        self.nearest = nearest  # batch that one divides


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The question: a model, its batch, and devices in nodes."""

    model: Architecture
    devices: int
    devices_per_node: int
    idle_of_node: int = 0  # devices of each node that no plan uses
    global_batch: int
    sequence: int
    precision: Precision
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        for name in ("devices", "global_batch", "sequence"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected 1 or more, got {getattr(self, name)}")

    @property
    def in_words(self) -> str:
        """Name the devices, and how many of each node they are where some are idle."""
        used = self.devices_per_node
        of_node = f" ({used} of the {used + self.idle_of_node} of each node)"
        return f"{self.devices} devices{of_node if self.idle_of_node else ''}"


def every_plan(space: Space, fixed: Mapping[str, int | str]) -> Plans:
    """Return every plan that the fixed degrees allow; refuse what allows none.

    The refusal names the first degree of which another value allows a plan, so `fixed` has first
    what the user gave.
    """
    _check(space, fixed)
    rows = list(_rows(space, fixed))
    if not rows:
        _refuse_dualpipe(space, fixed)
        for name in (name for name in fixed if name in _COLUMNS and isinstance(fixed[name], int)):
            nearest = _nearest(space, fixed, name)
            if nearest is not None:
                beside = "".join(
                    f", {other}={value}" for other, value in fixed.items() if other != name
                )
                raise UsageError(
                    f"{name}: expected a degree of a plan on {space.in_words} with a global "
                    f"batch of {space.global_batch}{beside}, got {fixed[name]}. The nearest is "
                    f"{nearest}"
                )
        given = ", ".join(f"{name}={value}" for name, value in fixed.items()) or "no degree fixed"
        raise UsageError(
            f"plan: expected a plan on {space.in_words} with {given} and a global batch of "
            f"{space.global_batch}, got none that divides layers, heads and batch"
        )
    columns = np.array(rows, np.int64).T
    tp, pp, vpp, dp, cp, ep, zero, recompute, half, microbatch, schedule, context, shard = columns
    same, layers = np.ones_like(tp), stage_layers(space.model, pp)[1]
    is_dual = schedule == SCHEDULES.index("dualpipe")  # it is made to hide what experts send
    return Plans(
        tp=tp,
        pp=pp,
        vpp=vpp,
        dp=dp,
        cp=cp,
        ep=ep,
        etp=same * int(fixed.get("etp", 1)),
        zero=zero,
        shard=shard,
        recompute=recompute,
        recomputed=(
            int(fixed["recompute_layers"]) / layers
            if "recompute_layers" in fixed
            else np.where(half > 0, layers // 2, layers) / layers
        ),
        microbatch=microbatch,
        global_batch=same * space.global_batch,
        sequence=same * space.sequence,
        sequence_parallel=same * space.sequence_parallel,
        schedule=schedule,
        context_kind=context,
        gradient_bytes=same * (2 if space.precision in _NARROW else 4),
        flash_attention=same,
        tp_overlap=same * int(fixed.get("tp_overlap", space.model.moe is None)),
        dp_overlap=same,
        ep_overlap=same * int(fixed["ep_overlap"]) if "ep_overlap" in fixed else 1 * is_dual,
    )


def _refuse_dualpipe(space: Space, fixed: Mapping[str, int | str]) -> None:
    """Refuse plans that only their schedule makes impossible, with the nearest that it can run."""
    if fixed.get("schedule") != "dualpipe":
        return
    plain = {**fixed, "schedule": "1f1b"}
    rows = list(_rows(space, plain))
    if not rows:
        return
    columns = np.array(rows, np.int64).T
    pp, dp, microbatch = (columns[_COLUMNS.index(name)] for name in ("pp", "dp", "microbatch"))
    is_even = pp % 2 == 0
    if not is_even.any():
        nearest = _nearest(space, fixed, "pp") if "pp" in fixed else None
        rest = "".join(
            f", {name}={value}" for name, value in fixed.items() if name not in ("pp", "schedule")
        )
        hint = f"The nearest is {nearest}"
        if nearest is None:
            hint = (
                f"No even number makes a plan on {space.in_words} with a global batch of "
                f"{space.global_batch}{rest}"
            )
        raise UsageError(
            f"pp: expected an even number of stages with schedule=dualpipe, got "
            f"{fixed.get('pp', 'none')}. {hint}"
        )
    needs = "an even number of microbatches, at least 2 x pp, with schedule=dualpipe"
    if "microbatch" in fixed:
        smaller = _nearest(space, fixed, "microbatch")
        if smaller is not None:
            raise UsageError(
                f"microbatch: expected one that makes {needs}, got {fixed['microbatch']}. The "
                f"nearest is {smaller}"
            )
    together = (dp * microbatch)[is_even]
    count = np.maximum(2 * pp[is_even], space.global_batch // together // 2 * 2)
    batch = min((together * count).tolist(), key=lambda one: (abs(one - space.global_batch), one))
    raise UsageError(
        f"global batch: expected {needs}, got {space.global_batch}. The nearest is {batch}"
    )


def _nearest(space: Space, fixed: Mapping[str, int | str], name: str) -> int | None:
    """Return the value of a degree that is nearest to its own, among plans with the other ones."""
    rest = {other: value for other, value in fixed.items() if other != name}
    at, asked = _COLUMNS.index(name), int(fixed[name])
    values = {row[at] for row in _rows(space, rest)}
    return min(values, key=lambda value: (abs(value - asked), value), default=None)


def _rows(space: Space, fixed: Mapping[str, int | str]) -> Iterator[tuple[int, ...]]:
    model, experts = space.model, space.model.moe.experts if space.model.moe else 1

    def allowed(name: str, value: int | str) -> bool:
        return fixed.get(name, value) == value

    expert_ways = [ways for ways in divisors(experts) if allowed("ep", ways)]
    each_ways = int(fixed.get("etp", 1))
    memory = [(zero, kind, half) for zero, kind, half in _MEMORY if allowed("zero", zero)]
    memory = [choice for choice in memory if allowed("recompute", RECOMPUTE[choice[1]])]
    most_layers = int(fixed.get("recompute_layers", 0))
    if most_layers:
        memory = [choice for choice in memory if choice[1:] == (RECOMPUTE.index("full"), 0)]
    is_asked = {"zero", "pp"} <= fixed.keys()  # FSDP in a pipeline, which the search leaves out
    for tp, pp, cp in _splits(space, fixed):
        layers = _most_layers(model, pp)
        if most_layers > layers:
            continue
        dp = space.devices // (tp * pp * cp)
        if space.global_batch % dp or not allowed("dp", dp):
            continue
        kinds = [
            CONTEXT_KINDS.index(kind)
            for kind in (CONTEXT_KINDS if cp > 1 else CONTEXT_KINDS[:1])
            if allowed("context", kind) and (kind != "ulysses" or model.heads % (tp * cp) == 0)
        ]
        # ZeRO-3 shards among all copies, or among those of a node, with a sum over nodes.
        groups = {dp * cp, int(fixed.get("shard", dp * cp))}
        if "shard" not in fixed:
            groups.add(max(1, space.devices_per_node // tp))
        groups = {ways for ways in groups if (dp * cp) % ways == 0 and allowed("shard", ways)}
        share = space.global_batch // dp
        for microbatch in _with_fixed(_powers(share), fixed, "microbatch", share):
            if not allowed("microbatch", microbatch):
                continue
            count = share // microbatch
            ways = [way for way in _chunks(model, pp, count) if allowed("vpp", way[0])]
            named = str(fixed.get("schedule", ""))
            if named in ("zero-bubble", "dualpipe"):
                ways = [(1, SCHEDULES.index(named)) for vpp, _ in ways if vpp == 1 and pp > 1]
            ways = [(vpp, kind) for vpp, kind in ways if named in ("", SCHEDULES[kind])]
            # Both ends feed DualPipe, and fill it before they drain it. DeepSeek's published code
            # asserts the same.
            if named == "dualpipe" and (pp % 2 or count % 2 or count < 2 * pp):
                continue
            for (vpp, kind), ep in product(ways, expert_ways):
                if (tp * cp * dp) % (ep * each_ways):
                    continue
                for zero, recompute, half in memory:
                    if (zero > 1 and pp > 1 and not is_asked) or (zero > 0 and dp * cp == 1):
                        continue
                    if half and layers < 2:
                        continue
                    row = tp, pp, vpp, dp, cp, ep, zero, recompute, half, microbatch, kind
                    whole = {ways for ways in groups if ways == dp * cp}
                    for context, shard in product(kinds, groups if zero == 3 else whole):
                        if zero < 3 or shard > 1:
                            yield *row, context, shard


# ZeRO, recomputation, and whether only half of the layers recompute; of an odd number, the lesser.
_MEMORY = tuple(
    (zero, kind, half) for zero in (0, 1, 2, 3) for kind, half in ((0, 0), (1, 0), (2, 1), (2, 0))
)


def _with_fixed(
    usual: list[int], fixed: Mapping[str, int | str], name: str, number: int
) -> list[int]:
    """Add the fixed value of a degree to those that are searched, if it divides a number."""
    value = fixed.get(name)
    is_divisor = isinstance(value, int) and value > 0 and number % value == 0
    return sorted({*usual, int(value)}) if is_divisor and value is not None else usual


def _splits(space: Space, fixed: Mapping[str, int | str]) -> Iterator[tuple[int, int, int]]:
    """Yield TP, PP and CP that divide the devices and the sequence."""
    counts = range(1, min(MOST_STAGES, space.model.layers) + 1)
    stages = [ways for ways in counts if _most_layers(space.model, ways)]
    choices = product(_tensor(space, fixed), stages, _context(space, fixed))
    is_parallel = space.sequence_parallel
    for tp, pp, cp in choices:
        named = {"tp": tp, "pp": pp, "cp": cp}
        if any(fixed.get(name, ways) != ways for name, ways in named.items()):
            continue
        step = sequence_step(tp=tp, cp=cp, sequence_parallel=is_parallel)
        if space.devices % (tp * pp * cp) == 0 and space.sequence % step == 0:
            yield tp, pp, cp


def _tensor(space: Space, fixed: Mapping[str, int | str]) -> list[int]:
    """List the degrees that divide the model: those that stay within a node, and a fixed one."""
    ways = tensor_ways(space.model)
    # No group of neighbours may reach from one node into the next.
    is_one_node = space.devices <= space.devices_per_node
    usual = [
        way for way in ways if way <= 64 and (is_one_node or space.devices_per_node % way == 0)
    ]
    return [way for way in ways if way in usual or way == fixed.get("tp")]


def _most_layers(model: Architecture, pp: int) -> int:
    """Return the layers of a stage between the ends; 0 where stages cannot be made so."""
    return (even_layers(model.layers, model.mtp_layers, pp) or 0) // pp


def _context(space: Space, fixed: Mapping[str, int | str]) -> list[int]:
    most, number = max(1, space.sequence // LEAST_RANK_TOKENS), space.sequence // 2 or 1
    usual = [ways for ways in _powers(number) if ways <= min(most, 64)]
    return _with_fixed(usual, fixed, "cp", number)


def _powers(number: int) -> list[int]:
    """List the powers of two that divide a number, up to the largest microbatch."""
    return [2**power for power in range(7) if number % 2**power == 0 and 2**power <= 64]


def _chunks(model: Architecture, pp: int, microbatches: int) -> list[tuple[int, int]]:
    """List the chunks of a stage with their schedule."""
    plain = [(1, SCHEDULES.index("1f1b"))]
    if pp == 1 or microbatches % pp:
        return plain
    several = [ways for ways in divisors(_most_layers(model, pp)) if 1 < ways <= 16]
    return plain + [(ways, SCHEDULES.index("interleaved")) for ways in several]


def _check(space: Space, fixed: Mapping[str, int | str]) -> None:
    """Refuse a fixed degree that no plan can have, with the nearest that one can."""
    model = space.model
    known = {
        "ep": (model.moe.experts if model.moe else 1, "experts"),
        "etp": (model.moe.ffn if model.moe else 1, "columns of an expert"),
        "dp": (space.global_batch, "sequences of the global batch"),
    }
    for name, value in fixed.items():
        if name in _WORDS and value not in _WORDS[name]:
            raise UsageError(
                f"{name}: expected one of {', '.join(_WORDS[name])}, got {value!r}"
                f"{nearest_name(value, _WORDS[name])}"
            )
        if name.endswith("_overlap") and value not in (0, 1):
            raise UsageError(f"{name}: expected 0 or 1, got {value}")
        if name == "recompute_layers":
            _check_recomputed(model, fixed)
        if name == "tp" and isinstance(value, int):
            _check_tensor(space, fixed, value)
        if name in known and isinstance(value, int):
            number, what = known[name]
            if value < 1 or number % value:
                nearest = None if name == "etp" else _nearest(space, fixed, name)
                if name != "dp" or nearest is not None or value < 1:
                    raise UsageError(
                        f"{name}: expected a divisor of {number} {what}, got {value}. The nearest "
                        f"is {nearest or nearest_divisor(number, value)}"
                    )
        if name == "pp" and isinstance(value, int):
            _check_stages(space, fixed, value)
        if name in ("tp", "pp", "dp") and isinstance(value, int) and space.devices % value:
            nearest = _nearest(space, fixed, name) or nearest_divisor(space.devices, value)
            raise UsageError(
                f"{name}: expected a divisor of {space.in_words}, got {value}. The "
                f"nearest is {nearest}"
            )
    _check_tokens(space, fixed)
    _check_batch(space, fixed)


def _check_tensor(space: Space, fixed: Mapping[str, int | str], tp: int) -> None:
    """Refuse tensor parallelism that does not divide the model."""
    if what := undivided(space.model, tp):
        ways = [way for way in tensor_ways(space.model) if space.devices % way == 0]
        nearest = _nearest(space, fixed, "tp") or nearest_of(ways, tp)
        raise UsageError(f"tp: expected a divisor of {what}, got {tp}. The nearest is {nearest}")


def _check_tokens(space: Space, fixed: Mapping[str, int | str]) -> None:
    """Refuse fixed degrees that do not divide the sequence, with the nearest that have a plan."""
    tp, cp = (int(fixed.get(name, 1)) for name in ("tp", "cp"))
    sequence = space.sequence
    step = sequence_step(tp=tp, cp=cp, sequence_parallel=space.sequence_parallel)
    if sequence % step == 0:
        return
    is_cp = sequence % sequence_step(tp=1, cp=cp, sequence_parallel=False) > 0
    name, value = ("cp", cp) if is_cp else ("tp", tp)
    parts = "twice cp" if is_cp else f"tp x cp {cp}" if cp > 1 else "tp"
    where = "" if is_cp else " with sequence parallelism"
    raise UsageError(
        f"{name}: expected {parts} to divide the sequence {sequence}{where} (the nearest such "
        f"sequence is {nearest_multiple(sequence, step)}), got {value}. The nearest is "
        f"{_nearest(space, fixed, name) or 1}"
    )


def _check_batch(space: Space, fixed: Mapping[str, int | str]) -> None:
    """Refuse a batch that no data parallelism beside the fixed degrees divides."""
    degrees = {space.devices // math.prod(split) for split in _splits(space, fixed)}
    microbatch = int(fixed.get("microbatch", 1))
    if degrees and "dp" in fixed:
        dp = int(fixed["dp"])
        if dp not in degrees:
            nearest = _nearest(space, fixed, "dp")
            hint = str(nearest)
            if nearest is None:  # none divides the batch
                other = nearest_of(sorted(degrees), dp)
                batch = nearest_multiple(space.global_batch, other * microbatch)
                hint = f"{other}, with a global batch of {batch}"
            raise UsageError(
                f"dp: expected what tp x pp x cp leave of {space.in_words}, got {dp}. The nearest "
                f"is {hint}"
            )
        degrees = {dp}
    if degrees and all(space.global_batch % dp for dp in degrees):
        what = f"dp={fixed['dp']}" if "dp" in fixed else "dp"
        batch = min(
            (nearest_multiple(space.global_batch, dp * microbatch) for dp in degrees),
            key=lambda batch: (abs(batch - space.global_batch), batch),
        )
        is_open = not {"dp", "shard"} & fixed.keys() and space.global_batch % microbatch == 0
        nodes = [  # a part of the cluster, on which the batch has a plan
            space.devices // dp * share // space.devices_per_node
            for dp in degrees
            for share in divisors(space.global_batch // microbatch if is_open else 1)
            if is_open and share < dp
            if space.devices // dp * share % space.devices_per_node == 0
        ]
        is_one = f" (it is one on {max(nodes)} node{'s' * (max(nodes) > 1)})" if nodes else ""
        problem = (
            f"global batch: expected a multiple of {what}, got {space.global_batch} on "
            f"{space.in_words}{is_one}. The nearest is {batch}"
        )
        raise BatchDoesNotDivide(problem, batch)


def _check_stages(space: Space, fixed: Mapping[str, int | str], pp: int) -> None:
    """Refuse stages that would be empty, or whose ends would lack too many layers."""
    model = space.model
    if pp > 0 and _most_layers(model, pp):
        return
    ways = [ways for ways in range(1, model.layers + 1) if _most_layers(model, ways)]
    nearest = _nearest(space, fixed, "pp") or min(
        ways, key=lambda stages: (abs(stages - pp), stages)
    )
    raise UsageError(
        f"pp: expected a divisor of {model.layers} layers, got {pp}. The nearest is {nearest}: "
        f"stages at the ends may lack up to {MOST_FEWER} layers"
    )


def _check_recomputed(model: Architecture, fixed: Mapping[str, int | str]) -> None:
    """Refuse more recomputed layers than a stage has, or another kind of recomputation."""
    if fixed.get("recompute", "full") != "full":
        raise UsageError(
            f"recompute_layers: expected recompute=full beside it, got {fixed['recompute']}"
        )
    layers, asked = _most_layers(model, int(fixed.get("pp", 1))), int(fixed["recompute_layers"])
    if asked > layers:
        raise UsageError(
            f"recompute_layers: expected at most {layers} layers of a stage, got {asked}"
        )
