"""Transformers by name, or as other tools describe them.

`architecture("llama3-70b")` takes a built-in name, spelt as anyone spells it. It also takes a
config.json of Hugging Face or its folder, Megatron's arguments in a file or in one line, and a TOML
file of torchtitan. Nothing is downloaded.

A field that this file does not know is refused by name, unless it is switched off or belongs to a
list of fields that change neither a shape nor a count.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from fullwire.errors import UsageError
from fullwire.files import opened
from fullwire.units import shown
from fullwire.workloads.architecture import Architecture, Mla, Moe
from fullwire.workloads.layout import nearest_divisor

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same, before Python had it

ArchitectureLike: TypeAlias = str | Path | Architecture
MOST_BYTES = 4 * 1024 * 1024
_MOST = 10**9  # of any size in a model: its products are still whole numbers of 64 bits
_FOLDER = Path(__file__).parent / "architectures"
_OF_OTHER_KIND = re.compile(r"(instruct|base|chat|hf|preview|v0\.[1-3]|bf16|fp8|nvfp4|mcore|it)$")


def architecture(given: ArchitectureLike) -> Architecture:
    """Take a transformer by its name, or from a description of another tool.

    - `given`: a built-in name such as `llama3-70b`, a file or folder with a config.json,
      Megatron's arguments as a file or as text, or a TOML file of torchtitan. `fullwire workloads`
      lists the names.
    """
    if isinstance(given, Architecture):
        return given
    text = str(given)
    if isinstance(given, str):
        if (name := _known_name(text)) is not None:
            return _built_in()[name]
        if text.lstrip().startswith("--"):
            return _from_megatron(text, "arguments")
    path = Path(text)
    try:
        if path.is_dir():
            path = path / "config.json"
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file:
        near = get_close_matches(_folded(text), _spellings(), n=1)
        hint = f". The nearest is {_spellings()[near[0]]}" if near else ""
        raise UsageError(
            f"model: expected a built-in name, a config.json, Megatron's arguments or a TOML file "
            f"of torchtitan, got {shown(text)}{hint}"
        )
    with opened(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UsageError(f"{path}: expected a model in at most {MOST_BYTES:,} bytes")
    document = content.decode("utf-8-sig", errors="replace")
    if path.suffix == ".toml":
        return _from_torchtitan(document, str(path))
    if document.lstrip().startswith("{"):
        return _from_hugging_face(document, str(path))
    return _from_megatron(document, str(path))


def names() -> tuple[str, ...]:
    """List the built-in transformers."""
    return tuple(_built_in())


# Built-in names.


@cache
def _built_in() -> Mapping[str, Architecture]:
    known: dict[str, Architecture] = {}
    for name, table in _tables().items():
        held = {key: value for key, value in table.items() if key not in ("aliases", "like")}
        if "like" in table:
            known[name] = replace(known[table["like"]], name=name, **held)
            continue
        heads, hidden = held["heads"], held["hidden"]
        learned = held["sequence"] if held.get("positions") == "learned" else 0
        held = {
            "kv_heads": heads,
            "head_dim": hidden // heads,
            "learned_positions": learned,
            **held,
        }
        if "mla" in held:
            held["mla"] = Mla(**held["mla"])
        if "moe" in held:
            held["moe"] = Moe(**held["moe"])
        known[name] = Architecture(name=name, **held)
    return known


@cache
def _tables() -> Mapping[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for path in sorted(_FOLDER.glob("*.toml")):
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        defaults = document.pop("defaults", {})
        for name, table in document.items():
            tables[name] = table if "like" in table else {**defaults, **table}
    return tables


@cache
def _spellings() -> Mapping[str, str]:
    pairs = (
        (name, spelling)
        for name, table in _tables().items()
        for spelling in (name, *table.get("aliases", ()))
    )
    return {_folded(spelling): name for name, spelling in pairs}


def _folded(name: str) -> str:
    """Reduce a name to the letters, figures and points that all spellings share."""
    last = name.strip().lower().rsplit("/", 1)[-1]
    while (shorter := _OF_OTHER_KIND.sub("", last).rstrip("-_ ")) != last and shorter:
        last = shorter
    return re.sub(r"[^a-z0-9.]", "", last.replace("meta-llama", "llama"))


def _known_name(text: str) -> str | None:
    return _spellings().get(_folded(text))


# Hugging Face.

# They change neither a shape nor a count: numbers of training, tokens, numerics, rotation.
_HARMLESS = re.compile(
    r"^(_.*|architectures|auto_map|torch_dtype|dtype|transformers.*|use_cache|tokenizer.*|.*_token.*"
    r"|.*dropout.*|.*_pdrop|drop_.*|initializer.*|.*_std|init_.*|embedding_initializer.*|.*eps.*|rope_.*|rotary_.*"
    r"|partial_rotary_factor|original_max_position_embeddings|max_position_embeddings|max_seq_len|seq_length|n_ctx"
    r"|seq_len|attn_implementation|pretraining_tp|slow_but_exact|output_.*|router_aux_.*|router_jitter.*"
    r"|aux_loss.*|norm_topk_prob|scoring_func|seq_aux|topk_method|topk_group|n_group"
    r"|routed_scaling_factor|quantization_config|unk_.*|bos_.*|eos_.*|pad_.*|ep_size|max_window_layers"
    r"|use_sliding_window|layer_types|task_specific_params|summary_.*|gradient_checkpointing"
    r"|model_type|name|swiglu_limit|initial_context_length|hidden_act|hidden_activation|activation_function"
    r"|id2label|label2id|num_labels|problem_type|use_return_dict|return_dict|finetuning_task"
    r"|masked_softmax_fusion|bias_dropout_fusion|skip_bias_add.*|offset_alibi|apply_residual_.*"
    r"|attention_softmax_in_fp32|unk|logit_scale|embedding_fraction|emb_pdrop|resid_pdrop|experts_per_token"
    r"|init_device|expansion_ratio|scale_attn_.*|reorder_and_upcast_attn|do_sample|temperature|top_p"
    r"|moe_router_.*|n_positions|attention_bias|mlp_bias|head_dim|sliding_window|tie_word_embeddings)$"
)
_PLAIN = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "nemotron",
    "gpt_oss",
)
_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_KINDS = (*_PLAIN, *_DEEPSEEK, "gpt2", "bloom")


class _Config:
    """The fields of a document; those that were asked for are known."""

    def __init__(self, held: Mapping[str, Any], place: str) -> None:
        self.held = held
        self.place = place
        self.known = set[str]()

    def whole(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """Return a whole number by the first of its names that is there."""
        self.known.update(names)
        for name in names:
            value = self.held.get(name)
            if value is None:
                continue
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not least <= value <= _MOST:
                range_ = " above 0" if least else ""
                range_ = f" up to {_MOST:,}" if is_whole and value > _MOST else range_
                raise UsageError(
                    f"{self.place}: {name}: expected a whole number{range_}, got {shown(value)}"
                )
            return int(value)
        if default is None:
            raise UsageError(f"{self.place}: expected {' or '.join(names)}, which is missing")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        self.known.add(name)
        value = self.held.get(name, default)
        if not isinstance(value, bool):
            raise UsageError(f"{self.place}: {name}: expected true or false, got {value!r}")
        return value

    def check_rest(self, harmless: re.Pattern[str]) -> None:
        """Refuse fields that are switched on and that nobody asked for."""
        rest = sorted(
            name
            for name, value in self.held.items()
            if name not in self.known and value and not harmless.match(name)
        )
        if rest:
            raise UsageError(
                f"{self.place}: expected fields that are known, got {', '.join(rest)}: they may "
                "change shapes or counts"
            )


def _from_hugging_face(text: str, place: str) -> Architecture:
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: expected JSON: {error}") from None
    if not isinstance(held, dict):
        raise UsageError(f"{place}: expected an object, got {type(held).__name__}")
    kind = held.get("model_type")
    if kind not in _KINDS:
        raise UsageError(
            f"{place}: model_type: expected one of {', '.join(_KINDS)}, got {shown(kind)}"
        )
    config = _Config(held, place)
    read: Callable[[_Config, str], Architecture] = _deepseek if kind in _DEEPSEEK else _plain
    if kind in ("gpt2", "bloom"):
        read = _with_old_names
    model = read(config, kind)
    config.check_rest(_HARMLESS)
    return model


def _named(config: _Config) -> str:
    given = config.held.get("_name_or_path")
    return given if isinstance(given, str) and given else Path(config.place).parent.name or "model"


def _plain(config: _Config, kind: str) -> Architecture:
    heads, hidden = config.whole("num_attention_heads", least=1), config.whole("hidden_size")
    if not config.held.get("head_dim") and hidden % heads:
        raise UsageError(
            f"{config.place}: num_attention_heads: expected a divisor of hidden_size {hidden}, got "
            f"{heads}. The nearest is {nearest_divisor(hidden, heads)}"
        )
    has_bias = config.flag("attention_bias", kind == "gpt_oss")
    if kind in ("qwen2", "qwen2_moe"):
        biases = "qkv"
    elif config.flag("mlp_bias", False) or kind == "gpt_oss":
        biases = "all"
    else:
        biases = "attention" if has_bias else "none"
    uses_window = kind in ("mistral", "gpt_oss") or config.flag("use_sliding_window", False)
    window = config.whole("sliding_window", default=0) if uses_window else 0
    moe = None
    experts = config.whole("num_local_experts", "num_experts", default=0)
    ffn = config.whole("intermediate_size")
    if experts:
        if config.held.get("mlp_only_layers"):
            raise UsageError(f"{config.place}: mlp_only_layers: expected none, got some")
        moe = Moe(
            experts=experts,
            top_k=config.whole("num_experts_per_tok"),
            ffn=config.whole("moe_intermediate_size", default=ffn),
            shared_ffn=config.whole("shared_expert_intermediate_size", default=0),
            has_shared_gate=kind == "qwen2_moe",
            every=config.whole("decoder_sparse_step", default=1),
            has_router_bias=kind == "gpt_oss",
        )
    return Architecture(
        name=_named(config),
        layers=config.whole("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.whole("num_key_value_heads", default=heads),
        head_dim=config.whole("head_dim", default=hidden // heads) or hidden // heads,
        ffn=ffn,
        vocab=config.whole("vocab_size"),
        sequence=min(config.whole("max_position_embeddings", default=4096), 8192),
        is_gated=kind != "nemotron",
        is_tied=config.flag("tie_word_embeddings", False),
        biases=biases,  # type: ignore[arg-type]  # one of the four words above
        norm="layer" if kind == "nemotron" else "rms",
        has_query_key_norm=kind.startswith("qwen3"),
        has_sinks=kind == "gpt_oss",
        window=window or None,
        full_every=2 if kind == "gpt_oss" else 0,
        moe=moe,
    )


def _deepseek(config: _Config, kind: str) -> Architecture:
    mla = Mla(
        kv_rank=config.whole("kv_lora_rank"),
        query_rank=config.whole("q_lora_rank", default=0) or None,
        nope_dim=config.whole("qk_nope_head_dim"),
        rope_dim=config.whole("qk_rope_head_dim"),
        value_dim=config.whole("v_head_dim"),
    )
    ffn = config.whole("moe_intermediate_size")
    moe = Moe(
        experts=config.whole("n_routed_experts"),
        top_k=config.whole("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * config.whole("n_shared_experts", default=0),
        first_dense=config.whole("first_k_dense_replace", default=0),
        every=config.whole("moe_layer_freq", default=1),
        has_router_bias=kind != "deepseek_v2",
    )
    heads = config.whole("num_attention_heads", least=1)
    config.whole("num_key_value_heads", default=heads)
    return Architecture(
        name=_named(config),
        layers=config.whole("num_hidden_layers"),
        hidden=config.whole("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=mla.nope_dim,
        ffn=config.whole("intermediate_size"),
        vocab=config.whole("vocab_size"),
        sequence=4096,
        is_tied=config.flag("tie_word_embeddings", False),
        mla=mla,
        moe=moe,
        mtp_layers=config.whole("num_nextn_predict_layers", default=0),
    )


def _with_old_names(config: _Config, kind: str) -> Architecture:
    heads, hidden = (
        config.whole("n_head", "num_attention_heads", least=1),
        config.whole("n_embd", "n_embed", "hidden_size"),
    )
    positions = config.whole("n_positions", default=2048)
    return Architecture(
        name=_named(config),
        layers=config.whole("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=config.whole("n_inner", default=4 * hidden),
        vocab=config.whole("vocab_size"),
        sequence=positions,
        is_gated=False,
        is_tied=config.flag("tie_word_embeddings", True),
        biases="all",
        norm="layer",
        has_embedding_norm=kind == "bloom",
        positions="alibi" if kind == "bloom" else "learned",
        learned_positions=positions if kind == "gpt2" else 0,
    )


# Megatron.

# Flags of training, data, plans and numerics: they leave the model as it is.
_MEGATRON_HARMLESS = re.compile(
    r"^(.*parallel.*|.*overlap.*|.*recompute.*|.*batch.*|.*lr.*|.*adam.*|.*decay.*|.*warmup.*|.*data.*|.*tokenizer.*"
    r"|.*vocab_file|merge_file|split|train_.*|eval_.*|.*log.*|.*checkpoint.*|ckpt.*|save.*|load.*|exit_.*|bf16|fp16|fp8.*|fp4.*"
    r"|.*fusion.*|fused.*|no_.*|use_(?!.*rotary).*|init_.*|seed|clip_grad|distributed_.*|optimizer.*|attention_backend"
    r"|transformer_impl|.*dropout.*|.*loss.*|rotary_.*|rope_.*|position_embedding_type|norm_epsilon|.*epsilon|max_position_embeddings"
    r"|seq_length|moe_(?!ffn|shared|layer_freq|router_topk$).*|manual_gc.*|tensorboard.*|wandb.*|num_workers|profile.*|timing.*"
    r"|cuda_graph.*|enable_.*|te_.*|accumulate_.*|grad_reduce.*|attention_softmax_in_fp32|apply_.*|initial_.*|loss_scale.*|hysteresis|mock.*"
    r"|calculate_per_token_loss|deterministic_mode|async.*|sgd.*|cpu_.*|finetune|reset_.*|eod.*|exp_.*|inprocess.*|nccl.*|delay.*|rampup.*"
    r"|check_.*|account.*|first_last.*|num_layers_at_.*|num_virtual.*|mtp_loss.*|main_.*|recompute.*|high_priority.*|ddp.*|ema.*)$"
)


def _from_megatron(text: str, place: str) -> Architecture:
    config = _Config(dict(_flags(text, place)), place)
    heads, hidden = config.whole("num_attention_heads", least=1), config.whole("hidden_size")
    if not config.held.get("head_dim") and hidden % heads:
        raise UsageError(
            f"{config.place}: num_attention_heads: expected a divisor of hidden_size {hidden}, got "
            f"{heads}. The nearest is {nearest_divisor(hidden, heads)}"
        )
    is_gated = config.flag("swiglu", False)
    # Megatron's own default: 4 times the width, or two thirds of it with a gate.
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden
    ffn = config.whole("ffn_hidden_size", default=usual)
    vocab = config.whole("padded_vocab_size", "vocab_size", default=0)
    divisor = config.whole("make_vocab_size_divisible_by", default=128)
    divisor *= config.whole("tensor_model_parallel_size", default=1)
    if not vocab:
        raise UsageError(
            f"{place}: expected --vocab-size with it, since a tokenizer's file is not opened"
        )
    norm = config.held.get("normalization", "LayerNorm")
    config.known.add("normalization")
    positions = config.held.get("position_embedding_type", "learned_absolute")
    learned = config.whole("max_position_embeddings", "seq_length")
    is_learned = positions == "learned_absolute" and not config.flag(
        "use_rotary_position_embeddings", False
    )
    has_no_bias = config.flag("disable_bias_linear", False)
    has_qkv_bias = config.flag("add_qkv_bias", False)
    config.known.update(("squared_relu", "untie_embeddings_and_output_weights"))
    groups = heads
    if config.flag("group_query_attention", "num_query_groups" in config.held):
        groups = config.whole("num_query_groups", default=1)
    else:
        config.known.add("num_query_groups")
    model = Architecture(
        name=Path(place).stem,
        layers=config.whole("num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=groups,
        head_dim=config.whole("kv_channels", default=hidden // heads),
        ffn=ffn,
        vocab=-(-vocab // divisor) * divisor,
        sequence=config.whole("seq_length", default=learned),
        is_gated=is_gated,
        is_tied="untie_embeddings_and_output_weights" not in config.held,
        biases="all" if not has_no_bias else "qkv" if has_qkv_bias else "none",
        norm="rms" if norm == "RMSNorm" else "layer",
        has_query_key_norm=config.flag("qk_layernorm", False)
        and "multi_latent_attention" not in config.held,
        positions="learned" if is_learned else "rotary",
        learned_positions=learned if is_learned else 0,
        mla=_megatron_mla(config),
        moe=_megatron_moe(config, ffn),
        mtp_layers=config.whole("mtp_num_layers", default=0),
    )
    config.check_rest(_MEGATRON_HARMLESS)
    return model


def _flags(text: str, place: str) -> Iterator[tuple[str, Any]]:
    """Yield flags and values; a comment ends a line, and a flag without a value is true."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError(f"{place}: expected Megatron's arguments: {error}") from None
    if not any(word.startswith("--") for word in words):
        raise UsageError(f"{place}: expected Megatron's arguments such as --num-layers 32")
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name:
            text_value = " ".join(values)
            is_whole = text_value.isascii() and text_value.isdigit()
            yield name, int(text_value) if is_whole else text_value or True
        flag, _, value = word[2:].partition("=")
        name, values = flag.replace("-", "_"), [value] if value else []


def _megatron_mla(config: _Config) -> Mla | None:
    if not config.flag("multi_latent_attention", False):
        return None
    return Mla(
        kv_rank=config.whole("kv_lora_rank", default=32),
        query_rank=config.whole("q_lora_rank", default=0) or None,
        nope_dim=config.whole("qk_head_dim", default=128),
        rope_dim=config.whole("qk_pos_emb_head_dim", default=64),
        value_dim=config.whole("v_head_dim", default=128),
    )


def _megatron_moe(config: _Config, ffn: int) -> Moe | None:
    experts = config.whole("num_experts", default=0)
    every = config.held.get("moe_layer_freq", 1)
    config.known.update(("moe_layer_freq", "moe_router_enable_expert_bias"))
    if not experts:
        return None
    first_dense, every = _moe_pattern(every, config.place)
    return Moe(
        experts=experts,
        top_k=config.whole("moe_router_topk", default=2),
        ffn=config.whole("moe_ffn_hidden_size", default=ffn),
        shared_ffn=config.whole("moe_shared_expert_intermediate_size", default=0),
        has_router_bias=bool(config.held.get("moe_router_enable_expert_bias", False)),
        first_dense=first_dense,
        every=every,
    )


def _moe_pattern(given: object, place: str) -> tuple[int, int]:
    """Return the dense layers at the beginning and the step of layers with experts."""
    if isinstance(given, int):
        # Megatron counts from the first layer, which has experts.
        if given == 1:
            return 0, 1
        raise UsageError(f"{place}: moe_layer_freq: expected 1 or a list, got {given}")
    terms = re.findall(r"\(?\[([01, ]+)\]\)?(?:\s*\*\s*(\d+))?", str(given))
    pattern = [
        int(figure)
        for figures, times in terms
        for _ in range(int(times or 1))
        for figure in re.findall("[01]", figures)
    ]
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    if not pattern or 0 in pattern[dense:]:
        raise UsageError(
            f"{place}: moe_layer_freq: expected dense layers and then layers with experts, such "
            f"as ([0]*3+[1]*58), got {shown(str(given))}"
        )
    return dense, 1


# torchtitan.

_FLAVORS = {
    ("llama3", "8b"): "llama3-8b",
    ("llama3", "70b"): "llama3-70b",
    ("llama3", "405b"): "llama3.1-405b",
    ("deepseekv3", "671b"): "deepseek-v3",
    ("deepseekv3", "236b"): "deepseek-v2",
    ("deepseekv3", "16b"): "deepseek-v2-lite",
    ("gptoss", "120b"): "gpt-oss-120b",
    ("gptoss", "20b"): "gpt-oss-20b",
}


def _from_torchtitan(text: str, place: str) -> Architecture:
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: expected TOML: {error}") from None
    model = document.get("model")
    if not isinstance(model, dict) or not model.get("name") or not model.get("flavor"):
        raise UsageError(f"{place}: expected a table [model] with a name and a flavor")
    family, flavor = _folded(str(model["name"])), str(model["flavor"]).lower()
    name = _FLAVORS.get((family, flavor)) or _known_name(f"{family}-{flavor}")
    if name is None:
        known = ", ".join(" ".join(pair) for pair in _FLAVORS)
        raise UsageError(
            f"{place}: model: expected a name and a flavor such as {known}, got "
            f"{shown(model['name'])} {shown(model['flavor'])}"
        )
    training = document.get("training", {})
    length = training.get("seq_len") if isinstance(training, dict) else None
    found = _built_in()[name]
    if length is None:
        return found
    if isinstance(length, bool) or not isinstance(length, int):
        raise UsageError(f"{place}: training.seq_len: expected a whole number, got {length!r}")
    return replace(found, sequence=length)
