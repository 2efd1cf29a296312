"""Rows of a table of measured training runs, as the plans that they describe.

The columns are those of data/llm/train_runs.csv. Sources leave cells empty, or write "?". Each such
gap is filled by a rule, named in `assumed`, and widens the interval of the prediction. One degree
that the devices and the other degrees determine is no gap, and nor are empty cp and ep, which mean
1. A row with both times needs only two of batch, sequence and devices. Degrees that contradict the
devices are a gap, as is a number with an unknown unit. Dimensions that a row leaves out are those
of the built-in model of its name, if there is one. A row is refused for three reasons only: nothing
says how long a step took, the device cannot be so fast, or the device or the model is of an unknown
family or of an impossible size.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fullwire.answers.plan_measured import table_of
from fullwire.clusters.cluster import MOST_DEVICES, Cluster, Inside, LeafSpine, Nics
from fullwire.errors import UsageError
from fullwire.simulation.habits import MEASURED_FAMILIES, Framework
from fullwire.workloads.accelerators import Accelerator, accelerator
from fullwire.workloads.architecture import Architecture, Mla, Moe
from fullwire.workloads.architecture_files import built_in
from fullwire.workloads.layout import (
    Layout,
    Precision,
    Recompute,
    Schedule,
    divisors,
    even_layers,
    nearest_divisor,
    nearest_multiple,
    sequence_step,
    tensor_ways,
    undivided,
)
from fullwire.workloads.stage_memory import BESIDE_BYTES, stages
from validation.plan_cells import devices_in, number_in, sequences_in, whole

# Usual machines of a family: devices of a node, and GB/s of each device within it and to others.
MACHINES: Mapping[str, tuple[int, float, float]] = {
    "v100": (8, 150, 12.5), "a100": (8, 300, 25), "a800": (8, 200, 25), "h100": (8, 450, 50),
    "h800": (8, 200, 50), "h20": (8, 450, 50), "h200": (8, 450, 50), "gh200": (4, 450, 25),
    "b200": (8, 900, 50), "gb200": (64, 900, 50), "b300": (8, 900, 100), "gb300": (64, 900, 100),
    "l40s": (8, 32, 25), "mi250x": (8, 100, 25), "mi300x": (8, 448, 50), "mi325x": (8, 448, 50),
    "mi350x": (8, 538, 50), "mi355x": (8, 538, 50), "gaudi2": (8, 262, 37), "gaudi3": (8, 525, 75),
    "tpu-v4": (64, 135, 25), "tpu-v5e": (256, 200, 12), "tpu-v5p": (64, 540, 25),
    "tpu-v6e": (256, 360, 25), "tpu7x": (64, 540, 50), "mi250": (8, 100, 12.5),
    "mi300a": (4, 192, 25), "t4": (4, 16, 1.5), "a10g": (8, 32, 1.5),
}  # fmt: skip
_IMPOSSIBLE = 0.5  # of the time at the device's peak: what is assumed may make a row look quicker
_EVEN_TOKENS = 128  # of which sequences are multiples
_ROUNDED = 0.05  # of a time with two digits
_CARDS = 8, 32.0, 12.5  # of other families: cards in PCIe slots, and 100 Gbit/s for each


def machine_of(family: str) -> tuple[int, float, float]:
    """Return the usual machine of a family."""
    return MACHINES.get(family, _CARDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row: a plan, where it ran, and how long a step took."""

    uid: str
    source: str
    group: str
    split: str
    quality: str
    architecture: Architecture
    layout: Layout
    device: Accelerator
    cluster: Cluster
    step_s: float
    batch_share: float  # of the plan's global batch that the row's has
    assumed: tuple[str, ...]
    framework: Framework
    memory_gib: float | None
    out_of_memory: bool

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts."""
        return self.architecture.moe is not None


class Refused(ValueError):
    """A row that cannot be judged; its text is the reason."""


def read(path: Path) -> tuple[list[Measured], dict[str, int]]:
    """Return the rows that can be judged, and how many were refused for each reason."""
    rows: list[Measured] = []
    refused: dict[str, int] = {}
    try:
        table = table_of(path.read_text(encoding="utf-8-sig", errors="replace"))
    except csv.Error as error:
        raise UsageError(f"{path}: expected a table of runs: {error}") from None
    for needed in ({"gpu"}, {"model", "layers"}, {"step_time_s", "tokens_s_gpu"}):
        if not needed & set(table.names):
            raise UsageError(f"{path}: expected a column {' or '.join(sorted(needed))}")
    for number, (_, cells) in enumerate(table.rows):
        try:
            rows.append(measured(dict(zip(table.names, cells, strict=False)), number))
        except (Refused, UsageError) as error:
            refused[str(error)] = refused.get(str(error), 0) + 1
    return rows, refused


def _plain(cells: Mapping[str, str | None]) -> dict[str, str]:
    """Return cells without "?", which leaves open what is known to be there."""
    row = {key: (value or "").strip() for key, value in cells.items() if key}
    row["cp"] = row.get("cp") or "1"  # an empty one is told, unlike "?"
    row = {key: "" if value == "?" else value for key, value in row.items()}
    # The tokens of a step are those of its sequences, and those that all devices do in its time.
    tokens = (number_in(row, "step_time_s") or 0) * (number_in(row, "tokens_s_gpu") or 0)
    tokens *= devices_in(row) or 0
    batch = sequences_in(row, 1)
    if tokens and batch and not whole(row, "seq") and "tok" not in row["gbs"].lower():
        row["seq"] = str(nearest_multiple(round(tokens / batch), _EVEN_TOKENS))
    return row


def measured(cells: Mapping[str, str | None], number: int) -> Measured:
    """Read one row."""
    row, assumed = _plain(cells), list[str]()
    device = device_named(row.get("gpu", ""), assumed)
    architecture = architecture_of(row, assumed)
    gpus = min(devices_in(row) or _devices_uncounted(row, assumed), MOST_DEVICES // 64)
    step_s = number_in(row, "step_time_s")
    tokens_s = number_in(row, "tokens_s_gpu")
    told = whole(row, "seq"), sequences_in(row, whole(row, "seq") or architecture.sequence)
    is_told = bool(step_s and tokens_s) and "devices" not in assumed
    if step_s and tokens_s and is_told and not told[1]:
        row["gbs"] = str(max(1, round(step_s * tokens_s * gpus / architecture.sequence)))
    layout, share = layout_of(row, architecture, device, gpus, assumed)
    cluster = cluster_of(row.get("network", ""), device, gpus, assumed)
    length, batch = layout.sequence, layout.global_batch * share
    if not step_s and tokens_s:
        step_s = layout.tokens * share / (tokens_s * gpus)
    elif (
        not is_told
        and {"global batch", "sequence"} & set(assumed)
        and "tok" not in row.get("gbs", "").lower()
    ):
        assumed.append("tokens of a step")
        length, batch = told[0] or _EVEN_TOKENS, told[1] or 1  # the least that they may have been
    least_s = length * batch * architecture.flops(length) * 3 / gpus
    if not step_s:
        raise Refused("no measured time")
    if step_s < _IMPOSSIBLE * least_s / device.peak_flops_per_s(layout.precision):
        raise Refused("faster than the device's peak")
    return Measured(
        uid=row.get("uid") or str(number),
        source=row.get("source_id") or row.get("source") or "?",
        group=row.get("config_group") or f"row {number}",
        split=row.get("split", ""),
        quality=row.get("quality", ""),
        architecture=architecture,
        layout=layout,
        device=device,
        cluster=cluster,
        step_s=step_s,
        batch_share=share,
        assumed=tuple(assumed),
        framework=framework_of(row),
        memory_gib=number_in(row, "mem_gib"),
        out_of_memory=row.get("oom") == "1",
    )


def _devices_uncounted(row: Mapping[str, str], assumed: list[str]) -> int:
    """Return the devices of a row that counts none: the product of its degrees.

    Where DP is open, both times may tell it. They are rounded, so it is the nearest that divides
    the batch.
    """
    together = math.prod(whole(row, name) or 1 for name in ("tp", "pp", "cp", "dp"))
    if whole(row, "dp"):
        return together
    length = whole(row, "seq")
    device_tokens = (number_in(row, "step_time_s") or 0) * (number_in(row, "tokens_s_gpu") or 0)
    batch = sequences_in(row, length or 1)
    if not (device_tokens and length and batch):
        assumed.append("devices")
        return max(8, together)
    likely = batch * length / device_tokens
    devices = together * nearest_divisor(batch, max(1, round(likely / together)))
    if abs(devices / likely - 1) < _ROUNDED:
        return devices
    assumed.append("devices")
    of_node = 8 if likely > 8 else 1
    return nearest_multiple(max(1, round(likely)), math.lcm(together, of_node))


def device_named(text: str, assumed: list[str]) -> Accelerator:
    """Recognise family, memory and power limit of a device, as a source wrote it."""
    try:
        device = accelerator(text)
    except UsageError:
        raise Refused(f"unknown device {text or '(empty)'}") from None
    if not device.is_memory_stated:
        assumed.append("device memory")
    if device.family not in MEASURED_FAMILIES:
        assumed.append("device")
    return device


def architecture_of(row: Mapping[str, str], assumed: list[str]) -> Architecture:
    """Return the model from its dimensions; its name tells what the dimensions leave out."""
    layers, hidden = whole(row, "layers"), whole(row, "hidden")
    name, notes = row.get("model", "").lower().replace("_", "-"), row.get("notes", "").lower()
    known = built_in(name)
    if not whole(row, "seq"):
        assumed.append("sequence")
    if known is not None and not (layers and hidden):
        length = whole(row, "seq") or known.sequence
        return replace(known, layers=layers or known.layers, sequence=length)
    if not layers or not hidden:
        return _by_size(row, name, assumed)
    if known is not None and (known.layers, known.hidden) != (layers, hidden):
        known = None  # a smaller copy of it may have other sizes

    def told(column: str, usual: int, gap: str = "", field: str = "") -> int:
        """Return a cell, else the known model's field, else the usual value as an assumption."""
        stated = whole(row, column)
        if known is not None and not row.get(column):
            stated = getattr(known, field or column)
        if not stated and gap:
            assumed.append(gap)
        return stated or usual

    heads = told("heads", max(1, hidden // 128), "heads")
    kv_heads = told("kv_heads", heads)
    is_gated = row.get("glu") == "1"
    if not row.get("glu") and known is not None:
        is_gated = known.is_gated
    moe = _experts(row, name, known, assumed)
    is_dense = moe is None or moe.first_dense > 0
    usual_ffn = int(8 * hidden / 3) if is_gated else 4 * hidden
    mla = known.mla if known is not None and not row.get("head_dim") else None
    if row.get("head_dim") == "mla":
        mla = Mla(kv_rank=512, query_rank=1536, nope_dim=128, rope_dim=64, value_dim=128)
    return Architecture(
        name=name or "unnamed",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=told("head_dim", max(1, hidden // heads)),
        ffn=told("ffn", usual_ffn, "feed-forward" * is_dense),
        vocab=told("vocab", 50304, "vocabulary"),
        sequence=told("seq", 2048, field="sequence"),
        is_gated=is_gated,
        positions="alibi" if name.startswith("mpt") or "alibi" in notes else "rotary",
        biases="all" if "gpt-oss" in name else "none",
        window=128 if "gpt-oss" in name else None,
        full_every=2 if "gpt-oss" in name else 0,
        mla=mla,
        moe=moe,
        mtp_layers=1 if "deepseek-v3" in name and moe else 0,
    )


def _experts(
    row: Mapping[str, str], name: str, known: Architecture | None, assumed: list[str]
) -> Moe | None:
    """Return the experts of a row with dimensions, if its model has any."""
    usual = None if known is None else known.moe
    experts = whole(row, "experts")
    if row.get("experts") in (None, "") and usual is not None:
        experts = usual.experts
    if not experts or experts == 1:
        return None
    top_k = whole(row, "topk") or (usual and usual.top_k)
    ffn = whole(row, "moe_ffn") or (usual and usual.ffn) or whole(row, "ffn")
    shared = whole(row, "shared_experts")
    if not top_k:
        assumed.append("experts of a token")
    if not ffn:
        assumed.append("feed-forward")
        ffn = 4 * (whole(row, "hidden") or 1)
    is_told = bool(row.get("shared_experts")) or usual is None
    first = 3 if "deepseek-v3" in name else 1 if ("kimi" in name or "deepseek-v2" in name) else 0
    return Moe(
        experts=experts,
        top_k=min(top_k or 2, experts),
        ffn=ffn,
        shared_ffn=(shared or 0) * ffn if is_told or usual is None else usual.shared_ffn,
        first_dense=first,
    )


def _by_size(row: Mapping[str, str], name: str, assumed: list[str]) -> Architecture:
    """Return a plain transformer of the stated size, where no dimension is known."""
    sizes = re.findall(r"(\d+(?:\.\d+)?)b", name)
    size = number_in(row, "params_b") or (float(sizes[0]) if sizes else 0.0)
    size = size or next((value for key, value in _SIZES.items() if key in name), 0.0)
    active = number_in(row, "active_params_b") or (float(sizes[1]) if len(sizes) > 1 else 0.0)
    active = active or next((value for key, value in _ACTIVE.items() if key in name), size)
    if not size:
        raise Refused(f"unknown model {name or '(empty)'}")
    assumed += ["dimensions", "heads"]
    # A model of this size with a hidden vector of 128 times its layers (12 L h^2 values).
    layers = max(4, 4 * round((active * 1e9 / (12 * 128**2)) ** (1 / 3) / 4))
    hidden = 256 * max(2, round(math.sqrt(active * 1e9 / (12 * layers)) / 256))
    moe = None
    if active < 0.6 * size:
        ffn = max(128, 4 * hidden // 24 // 64 * 64)
        each = 3 * hidden * ffn * layers
        moe = Moe(experts=64 * max(1, round(size * 1e9 / each / 64)), top_k=8, ffn=ffn)
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=max(1, hidden // 128),
        kv_heads=max(1, hidden // 128),
        head_dim=128,
        ffn=4 * hidden,
        moe=moe,
        vocab=whole(row, "vocab") or 131072,
        sequence=whole(row, "seq") or 4096,
        is_gated=False,
    )


_SIZES = {"nano": 31.6, "super": 120.0, "ultra": 550.0, "v4-flash": 285.0, "lightning": 31.6}
_ACTIVE = {"nano": 3.2, "super": 12.0, "ultra": 55.0, "v4-flash": 13.0, "lightning": 3.2}


# Chunks of a stage, where a row does not tell them, and tells an interleaved schedule or none:
# published recipes for Hopper and later interleave 4 to 12. Older frameworks rarely did.
_USUAL_CHUNKS = 6


def _degrees(
    row: Mapping[str, str], model: Architecture, family: str, gpus: int, assumed: list[str]
) -> dict[str, int]:
    """Return the degrees of a row: one that it leaves open follows from the devices and the others.

    Of several open degrees, DP takes all that is left; where it is told, TP stays in a node and PP
    takes the rest. Where the devices contradict degrees that are all told, DP fills the devices.
    """
    names = ("tp", "pp", "vpp", "dp", "cp", "ep", "etp")
    degrees = {name: whole(row, name) or 1 for name in names}
    is_open = [name for name in ("tp", "pp", "dp") if not whole(row, name)] or ["cp"]
    is_open = [name for name in is_open if not whole(row, name)]
    known = math.prod(degrees[name] for name in ("tp", "pp", "dp", "cp"))
    left = max(1, gpus // known)
    is_sure = is_open in ([], ["cp"])
    if "dp" in is_open:
        degrees["dp"] = left
        is_sure = len(is_open) == 1
    elif len(is_open) == 1 and devices_in(row) and known * left == gpus:
        is_sure = is_sure or _divides(is_open[0], left, model)
        degrees[is_open[0]] = left if is_sure else 1
    elif is_open == ["tp", "pp"]:
        inside = [ways for ways in tensor_ways(model) if left % ways == 0]
        tp = max(ways for ways in inside if ways <= machine_of(family)[0])
        pp = left // tp
        degrees |= {"tp": tp, "pp": pp if _divides("pp", pp, model) else 1}
    together = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if degrees["dp"] * together != gpus:  # devices are counted more often than degrees
        is_sure = False
        if not is_open or degrees["dp"] * together > gpus:
            degrees["dp"] = max(1, gpus // together)
    if not is_sure:
        assumed.append("parallel plan")
    return degrees


def _divides(name: str, ways: int, model: Architecture) -> bool:
    """Return whether so many ways of TP or PP divide a model."""
    if name == "tp":
        return not undivided(model, ways)
    return even_layers(model.layers, model.mtp_layers, ways) is not None


def layout_of(
    row: Mapping[str, str], model: Architecture, device: Accelerator, gpus: int, assumed: list[str]
) -> tuple[Layout, float]:
    """Return the plan of a row, and its batch as a share of the plan's."""
    family = device.family
    degrees = _degrees(row, model, family, gpus, assumed)
    dp = degrees["dp"]
    mode = row.get("dp_mode", "").lower().replace("hsdp", "fsdp hybrid")
    schedule = row.get("schedule", "").lower()
    is_interleaved = "interleav" in schedule and "not stated" not in schedule
    if not schedule:
        is_interleaved = family not in ("a100", "v100")
    if degrees["pp"] == 1:
        degrees["vpp"] = 1
    elif not whole(row, "vpp") and is_interleaved:
        several = divisors(max(1, model.layers // degrees["pp"]))[1:]
        degrees["vpp"] = min(several, key=lambda part: abs(part - _USUAL_CHUNKS), default=1)
        assumed.append("interleaving")
    ranks = degrees["tp"] * degrees["cp"] * dp
    if model.moe is not None and not whole(row, "tp") and not whole(row, "ep"):
        degrees["ep"] = nearest_divisor(math.gcd(ranks, model.moe.experts), machine_of(family)[0])
    degrees["etp"] = nearest_divisor(ranks, degrees["etp"])
    degrees["ep"] = nearest_divisor(ranks // degrees["etp"], degrees["ep"])
    microbatch = whole(row, "mbs")
    batch = sequences_in(row, whole(row, "seq") or model.sequence)
    if not microbatch:
        microbatch = nearest_divisor(max(1, (batch or dp) // dp), 1)
        assumed.append("microbatch")
    if not batch:
        batch = dp * microbatch * 8 * degrees["pp"]
        assumed.append("global batch")
    planned = max(dp * microbatch, nearest_multiple(batch, dp * microbatch))
    stated_zero = re.search(r"zero[\W_]*(?:stage)?[\W_]*([0-3])", mode)
    is_fsdp = "fsdp" in mode and "grad_op" not in mode
    zero = (
        3 if is_fsdp else 2 if "grad_op" in mode else 0 if mode.startswith(("ddp", "none")) else 1
    )
    if stated_zero:
        zero = int(stated_zero[1])
    if not mode:
        assumed.append("sharding")
    sharded = re.search(r"\((\d+)\)", mode)
    here = machine_of(family)[0] if "hybrid" in mode else 0
    ranks_of_group = int(sharded[1]) if sharded else here
    group = nearest_divisor(dp * degrees["cp"], ranks_of_group) if ranks_of_group else None
    text = " ".join((row.get("notes", ""), row.get("source", ""), row.get("schedule", ""))).lower()
    precision = device.runs_as(precision_of(row.get("precision", ""), device, assumed))
    is_low = precision in ("fp8", "mxfp8", "nvfp4") and framework_of(row) == "megatron"
    overlaps = row.get("tp_overlap") == "1"
    if not row.get("tp_overlap") and precision != "fp16" and framework_of(row) == "megatron":
        overlaps = device.family not in ("a100", "v100") and model.moe is None
        if degrees["tp"] > 1:
            assumed.append("overlap")
    is_old = device.family in ("a100", "v100") and (degrees["tp"] > 1 or degrees["pp"] > 1)
    stated = recompute_of(row.get("recompute", ""))
    is_parallel = row.get("sp") == "1" or (row.get("sp", "") == "" and not is_old)
    step = sequence_step(tp=degrees["tp"], cp=degrees["cp"], sequence_parallel=is_parallel)
    layout = Layout(
        tp=degrees["tp"],
        pp=degrees["pp"],
        vpp=degrees["vpp"],
        cp=degrees["cp"],
        ep=degrees["ep"],
        etp=degrees["etp"],
        dp=dp,
        zero=zero,
        shard=group if is_fsdp or zero == 3 else None,
        recompute=stated or "none",
        microbatch=microbatch,
        global_batch=planned,
        sequence=nearest_multiple(whole(row, "seq") or model.sequence, step),
        sequence_parallel=is_parallel,
        precision=precision,
        schedule=schedule_of(row.get("schedule", ""), degrees["vpp"]),
        context_kind="ring",
        gradient_bytes=2 if is_low or "pure" in row.get("precision", "").lower() else 4,
        flash_attention=not is_old or "flash" in text,
        tp_overlap=overlaps,
        # DeepSpeed gathers parameters ahead (ZeRO-3), and sums gradients at the end without it.
        dp_overlap=zero == 3 or not ("deepspeed" in mode or mode.startswith(("ddp", "none"))),
    )
    if stated is None:
        assumed.append("recomputation")
        layout = replace(layout, recompute=assumed_recompute(layout, model, device))
    if not whole(row, "mbs") and layout.pp == 1:
        # Parameters that are gathered for each microbatch make people avoid accumulation.
        sizes = divisors(planned // dp)[::-1] if is_fsdp or zero == 3 else (4, 2)
        layout = _largest_microbatch(layout, model, device, sizes, is_free=stated is None)
    return layout, batch / planned


def _largest_microbatch(
    layout: Layout, model: Architecture, device: Accelerator, sizes: Sequence[int], *, is_free: bool
) -> Layout:
    """Return the plan with the largest of some microbatches that fits.

    - `is_free`: whether recomputation may be chosen for it.
    """
    kinds: tuple[Recompute, ...] = (layout.recompute,)
    if is_free and layout.zero == 3:
        kinds = (layout.recompute, "selective", "full")
    for microbatch in sizes:
        if layout.global_batch % (layout.dp * microbatch):
            continue
        for kind in kinds:
            larger = replace(layout, microbatch=microbatch, recompute=kind)
            if stages(model, larger).fits(device.memory_bytes).all():
                return larger
    return layout


def framework_of(row: Mapping[str, str]) -> Framework:
    """Return the family of the framework, as the way of data parallelism tells it."""
    mode = row.get("dp_mode", "").lower()
    if "deepspeed" in mode:
        return "deepspeed"
    if ("fsdp" in mode or "hsdp" in mode) and "megatron" not in mode:
        return "fsdp"
    return "megatron"


def precision_of(text: str, device: Accelerator, assumed: list[str]) -> Precision:
    """Return the type that matrices are multiplied in."""
    plain = text.lower()
    for word, kind in (("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("float8", "fp8"), ("fp8", "fp8")):
        if word in plain and "?" not in plain:
            return kind  # type: ignore[return-value]
    if "fp16" in plain:
        return "fp16"
    if plain.startswith(("fp32", "tf32", "float32")):
        return "fp32"
    if "bf16" not in plain or "?" in plain or "not logged" in plain:
        assumed.append("precision")
        # Steps in fewer bits are quicker. A type that the text names is the narrowest.
        named = [kind for word, kind in _NAMED.items() if word in plain]
        narrowest = device.runs_as(named[0] if named else "nvfp4")
        if narrowest not in ("bf16", "fp16", "fp32"):
            assumed.append("four bits" if narrowest == "nvfp4" else "eight bits")
    return "bf16"


_NAMED: Mapping[str, Precision] = {
    "fp4": "nvfp4",
    "fp8": "fp8",
    "float8": "fp8",
    "bf16": "bf16",
}


def recompute_of(text: str) -> Recompute | None:
    """Return the recomputation that a row states, or None."""
    plain = text.lower()
    for words, kind in _RECOMPUTED:
        if re.search(rf"(?:^|[^a-z])(?:{words})(?:[^a-z]|$)", plain):
            return kind
    return None


_RECOMPUTED: tuple[tuple[str, Recompute], ...] = (
    ("selective|sac|op", "selective"),
    ("full|uniform|block", "full"),
    ("none|no|off|disabled", "none"),
)


def assumed_recompute(layout: Layout, model: Architecture, device: Accelerator) -> Recompute:
    """Return none where that probably fits; else full before fused attention, selective since.

    Newer recipes recompute some modules only, and move others to the host.
    """
    peak = float(stages(model, layout).peak_reserved_bytes.max())
    if peak + BESIDE_BYTES <= device.memory_bytes:
        return "none"
    return "selective" if layout.flash_attention else "full"


def schedule_of(text: str, vpp: int) -> Schedule:
    """Return the schedule of the pipeline."""
    plain = text.lower()
    if "dualpipe" in plain:
        return "dualpipe"
    if plain.startswith(("zb", "zero", "v-")):
        return "zero-bubble"
    return "interleaved" if vpp > 1 else "1f1b"


def cluster_of(text: str, device: Accelerator, gpus: int, assumed: list[str]) -> Cluster:
    """Return the cluster of a row: usual machines of the family where the text says nothing."""
    devices, inside, nic = machine_of(device.family)
    nic_bps = 8e9 * nic
    plain = text.lower()
    domain = re.search(r"nvl(\d+)", plain)
    if domain:
        devices = 64 if int(domain[1]) == 72 else int(domain[1])
    several = re.search(r"(\d+)\s*x\s*(\d+)\s*gb", plain)
    whole_node = re.search(r"(\d+)\s*gb/?p?s?\s*per node", plain)
    alone = re.search(r"(\d+)\s*gb/?p?s?", plain)
    if several:
        nic_bps = int(several[1]) * int(several[2]) * 1e9 / min(devices, 8)
    elif whole_node:
        nic_bps = int(whole_node[1]) * 1e9 / devices
    elif alone:
        nic_bps = int(alone[1]) * 1e9
    elif "selene" not in plain and gpus > devices:
        assumed.append("network")
    here = max(part for part in divisors(gpus) if part <= devices)
    if here * 2 <= devices and gpus > devices:  # an odd count fills its last node in part
        here = devices
    return Cluster(
        name=f"{device.family} {text}".strip(),
        nodes=min(max(1, -(-gpus // here)), MOST_DEVICES // here),
        devices_per_node=here,
        inside=Inside(kind="switch", rate_bps=8e9 * inside, latency_s=1e-6),
        nics=Nics(per_node=here, rate_bps=nic_bps, latency_s=5e-6),
        network=LeafSpine(nodes_per_leaf=32, by_rail=False, latency_s=1e-6),
    )
