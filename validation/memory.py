"""Peak memory of Megatron-LM's own test jobs against the count of our model.

    .venv/bin/python -m validation.memory ../shared/data/llm/memory_goldens.csv

Each row is a job whose arguments and whose peak are in Megatron-LM's repository. Its last rank
logged the peak, so the last pipeline stage is compared. The model's terms come from Korthikanti et
al. and from Megatron's sources. Its one chosen constant, the workspace of 0.1 GiB, comes from half
of the tests (by the checksum of their name), and the other half judges. How many devices a job had
follows from its name here, and all rows were in view for that. Each test counts once.
"""

from __future__ import annotations

import csv
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fullwire.errors import UsageError
from fullwire.units import shown
from fullwire.workloads.architecture import Architecture, Mla, Moe
from fullwire.workloads.architecture_files import TOKENIZER_VOCABULARIES
from fullwire.workloads.layout import Layout, Precision, Recompute, check_model
from fullwire.workloads.stage_memory import GIB, stages
from validation import arguments, results

TOLERANCE = 0.08
Row = Mapping[str, str]
# Columns that a table must have; a cell of another that is empty or absent has Megatron's default.
_NEEDED = {"test", "gpu", "mem_max_alloc_gib", "num_layers", "hidden_size", "num_attention_heads"}
# Rows of a vocabulary that a test states by its tokenizer only; the files of two kinds are known.
VOCABULARIES = {
    **TOKENIZER_VOCABULARIES,
    "GPTSentencePieceTokenizer": 256000,
    "HuggingFaceTokenizer": 129280,
}
GPT2_VOCABULARY = TOKENIZER_VOCABULARIES["GPT2BPETokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job: its model, its plan, and the peak that it logged."""

    test: str
    device: str
    model: Architecture
    layout: Layout
    has_dropout: bool
    measured_bytes: float

    @property
    def predicted_bytes(self) -> float:
        """Return the predicted peak of the last stage."""
        held = stages(self.model, self.layout, has_dropout=self.has_dropout)
        return float(held.peak_allocated_bytes[-1])

    @property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.predicted_bytes / self.measured_bytes - 1


def cases(path: Path) -> tuple[list[Case], Counter[str]]:
    """Read the jobs that the model can express, and count the others by reason."""
    known, refused = list[Case](), Counter[str]()
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        if absent := _NEEDED - set(table.fieldnames or ()):
            raise UsageError(
                f"{path}: expected the columns {', '.join(sorted(_NEEDED))}, "
                f"got none for {', '.join(sorted(absent))}"
            )
        for cells in table:
            row = defaultdict(str, {key: value or "" for key, value in cells.items() if key})
            reason = _beyond(row)
            if reason:
                refused[reason] += 1
                continue
            try:
                known.append(_case(row))
            except UsageError as error:  # a cell holds what no job can have
                refused[str(error)] += 1
    return known, refused


def _beyond(row: Row) -> str:
    """Return why the model cannot express a row, or ""."""
    if not row["mem_max_alloc_gib"]:
        return "no peak logged"
    kind = row["test"].partition("/")[0]
    if kind in ("t5", "multimodal-llava", "mimo", "hybrid", "nemotron"):
        return "another architecture: encoder and decoder, pictures, or state spaces"
    if "grpo" in row["test"]:
        return "reinforcement learning: the memory of generation"
    if "offloading" in row["test"]:
        return "activations offloaded to the host"
    if row["cuda_graph_impl"]:
        return "pools of CUDA graphs"
    if "defer_embedding" in row["test"]:
        return "weight gradients of the embedding deferred"
    if row["recompute_modules"]:
        return "modules recomputed by name"
    return ""


def _case(row: Row) -> Case:
    tp, pp = _whole(row, "tensor_model_parallel_size", 1), _stages(row)
    cp = _whole(row, "context_parallel_size", 1)
    ep = _whole(row, "expert_model_parallel_size", 1)
    model = _model(row, tp)
    etp = _whole(row, "expert_tensor_parallel_size", tp) if model.moe else 1
    world = max(_devices(row), tp * pp * cp, ep * etp * pp)
    microbatch = _whole(row, "micro_batch_size", 1)
    batch = _whole(row, "global_batch_size", 32)
    dp = world // (tp * pp * cp)
    while dp > 1 and batch % (dp * microbatch):
        dp -= 1
    layers_of_chunk = _whole(row, "num_layers_per_virtual_pipeline_stage", 0, least=0)
    vpp = _whole(row, "num_virtual_stages_per_pipeline_rank", 1)
    if layers_of_chunk and pp > 1:
        vpp = max(1, model.layers // pp // layers_of_chunk)
    is_sharded = row["use_megatron_fsdp"] == "true" or "fsdp2" in row["test"]
    is_sharded = is_sharded or bool(row["data_parallel_sharding_strategy"])
    zero = 3 if is_sharded else 1 if row["use_distributed_optimizer"] == "true" else 0
    precision: Precision = "fp8" if row["fp8_format"] else "fp16" if row["fp16"] else "bf16"
    plain = row["attention_backend"] in ("unfused", "local") or row["transformer_impl"] == "local"
    layout = Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        dp=dp,
        cp=cp,
        ep=ep,
        etp=etp,
        zero=zero,
        # Two instances of the optimizer: each is sharded among half of the ranks.
        shard=dp * cp // 2 if "multi_dist_optimizer_instances" in row["test"] else None,
        recompute=_recompute(row),
        microbatch=microbatch,
        global_batch=max(batch, dp * microbatch),
        sequence=_whole(row, "seq_length", 1024),
        sequence_parallel=row["sequence_parallel"] == "true",
        precision=precision,
        schedule="interleaved" if vpp > 1 else "1f1b",
        flash_attention=not plain,
    )
    if not row["pipeline_model_parallel_layout"]:  # which divides unlike stages by hand
        ends = 2 if "account_for_embedding" in row["test"] else 0  # they count as a layer each
        check_model(layout, model, layers=model.layers + ends)
    return Case(
        test=row["test"],
        device=row["gpu"],
        model=model,
        layout=layout,
        has_dropout=row["hidden_dropout"] != "0.0",
        measured_bytes=_peak_bytes(row),
    )


def _model(row: Row, tp: int) -> Architecture:
    hidden, heads = _whole(row, "hidden_size", 0), _whole(row, "num_attention_heads", 0)
    is_gated = row["swiglu"] == "true"
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden
    ffn = _whole(row, "ffn_hidden_size", usual)
    rows = _whole(row, "vocab_size", VOCABULARIES.get(row["tokenizer_type"], GPT2_VOCABULARY))
    divisor = tp * _whole(row, "make_vocab_size_divisible_by", 128)
    moe = mla = None
    if experts := _whole(row, "num_experts", 0, least=0):
        dense = re.match(r"\(\[0\]\*(\d+)", row["moe_layer_freq"])
        moe = Moe(
            experts=experts,
            top_k=_whole(row, "moe_router_topk", 2),
            ffn=_whole(row, "moe_ffn_hidden_size", ffn),
            shared_ffn=_whole(row, "moe_shared_expert_intermediate_size", 0, least=0),
            first_dense=int(dense[1]) if dense else 0,
        )
    if row["multi_latent_attention"] == "true":
        mla = Mla(
            kv_rank=_whole(row, "kv_lora_rank", 512),
            query_rank=_whole(row, "q_lora_rank", 0, least=0) or None,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
        )
    return Architecture(
        name=row["test"],
        layers=_whole(row, "num_layers", 0),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(row, "num_query_groups", heads),
        head_dim=_whole(row, "kv_channels", hidden // heads),
        ffn=ffn,
        vocab=-(-rows // divisor) * divisor,
        sequence=_whole(row, "seq_length", 1024),
        is_gated=is_gated,
        is_tied=row["untie_embeddings_and_output_weights"] != "true",
        biases="none" if row["disable_bias_linear"] == "true" else "all",
        norm="layer",
        mla=mla,
        moe=moe,
        mtp_layers=_whole(row, "mtp_num_layers", 0, least=0),
    )


def _devices(row: Row) -> int:
    """Return the devices of a job: 8, the 4 of one GB200 node, or 64 of a release test."""
    if row["gpu"] == "GB200" and "_1node" in row["test"]:
        return 4
    return 64 if "_release" in row["test"] and "bert" not in row["test"] else 8


def _stages(row: Row) -> int:
    return _whole(row, "pipeline_model_parallel_size", 1)


def _recompute(row: Row) -> Recompute:
    given = row["recompute_granularity"]
    return "full" if given == "full" else "selective" if given == "selective" else "none"


def _whole(row: Row, name: str, default: int, *, least: int = 1) -> int:
    value = _number(row, name) if row[name] else default
    if value < least or value % 1:
        raise UsageError(f"{name}: expected a whole number from {least} on, got {_cell(row, name)}")
    return int(value)


def _number(row: Row, name: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{name}: expected a number, got {_cell(row, name)}")
    return value


def _cell(row: Row, name: str) -> str:
    return shown(row[name]) if row[name] else "an empty cell"


def _peak_bytes(row: Row) -> float:
    """Return the logged peak; a job that ran held something."""
    name = "mem_max_alloc_gib"
    peak_gib = _number(row, name)
    if peak_gib <= 0:
        raise UsageError(f"{name}: expected GiB above 0, got {_cell(row, name)}")
    return peak_gib * GIB


def by_test(known: list[Case], *, judged: bool) -> dict[str, float]:
    """Return the median error of each test of one half."""
    errors = defaultdict[str, list[float]](list)
    for case in known:
        if bool(zlib.crc32(case.test.encode()) % 2) == judged:
            errors[case.test].append(case.error)
    return {test: median(found) for test, found in errors.items()}


def main() -> None:
    """Print and write the errors of both halves."""
    taken = arguments.parser(__doc__)
    taken.add_argument("goldens", type=Path)
    goldens = taken.parse_args().goldens
    try:
        known, refused = cases(goldens)
    except UsageError as refusal:
        taken.error(str(refusal))
    halves = {
        "looked at": by_test(known, judged=False),
        "judged": by_test(known, judged=True),
    }
    rows: list[list[results.Cell]] = []
    for half, errors in halves.items():
        found = results.spread(list(errors.values()))
        within = sum(abs(error) <= 0.1 for error in errors.values()) / len(errors)
        print(f"{half}: {len(errors)} tests, {found}, {within:.0%} within 10 %")
        rows.append(
            [
                half,
                len(errors),
                *(f"{found[key]:.1%}" for key in ("median", "p90")),
                f"{within:.0%}",
            ]
        )
        for test, error in sorted(errors.items(), key=lambda item: -abs(item[1]))[:8]:
            print(f"  {error:+.0%}  {test}")
    for reason, count in refused.items():
        print(f"{count} rows left out: {reason}")
    judged = list(halves["judged"].values())
    found = results.spread(judged)
    results.write(
        "memory",
        goldens,
        "llm/memory_goldens.csv",
        claim="The peak memory of a plan is counted from the model and the plan.",
        anchor="Megatron-LM's logged peaks (A100, H100, GB200), tests not looked at before",
        summary=f"median error {found['median']:.1%}, nine of ten below {found['p90']:.0%}",
        measure="relative error of the peak",
        cases=len(judged),
        **found,
        tables=[
            results.Table(
                title="Tests by half",
                columns=["half", "tests", "median", "p90", "within 10 %"],
                rows=rows,
            ),
            results.Table(
                title="Rows left out",
                columns=["reason", "rows"],
                rows=[[reason, count] for reason, count in refused.items()],
            ),
        ],
    )


if __name__ == "__main__":
    main()
