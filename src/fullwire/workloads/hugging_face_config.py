"""A transformer from the config.json of Hugging Face.

Most families differ from Llama in a few points. `_FAMILIES` holds these points as the classes of
Transformers build them, which a config.json does not say. A field that is switched on and unknown
here is refused by name: it may change shapes or counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fullwire.errors import UsageError
from fullwire.units import shown
from fullwire.workloads.architecture import Architecture, Mla, Moe
from fullwire.workloads.architecture_fields import Fields

# Numbers of training, tokens, numerics and rotation: they leave shapes and counts as they are.
_HARMLESS = re.compile(
    r"^(_.*|architectures|auto_map|torch_dtype|dtype|transformers.*|use_cache|tokenizer.*"
    r"|.*_token.*|.*dropout.*|.*_pdrop|drop_.*|layerdrop|initializer.*|.*_std|init_.*"
    r"|embedding_initializer.*|.*eps.*|rope_.*|rotary_.*|no_rope_layer.*|partial_rotary_factor"
    r"|original_max_position_embeddings|max_position_embeddings|max_seq_len|seq_length|n_ctx"
    r"|seq_len|attn_implementation|pretraining_tp|slow_but_exact|output_.*|router_aux_.*"
    r"|(router|input)_jitter.*|clip_qkv|aux_loss.*|norm_topk_prob|scoring_func|seq_aux|topk_method|topk_group"
    r"|n_group|routed_scaling_factor|quantization_config|unk_.*|bos_.*|eos_.*|pad_.*|ep_size"
    r"|task_specific_params|summary_.*|gradient_checkpointing|model_type|name|prefix|is_decoder"
    r"|swiglu_.*|initial_context_length|hidden_act|hidden_activation|activation|full_attn_mod"
    r"|activation_function|interpolate_factor|id2label|label2id|num_labels|problem_type"
    r"|use_return_dict|return_dict|finetuning_task|masked_softmax_fusion|bias_dropout_fusion"
    r"|skip_bias_add.*|offset_alibi|apply_residual_.*|attention_softmax_in_fp32|unk|logit_scale"
    r"|logits_scaling|.*_multiplier|.*_softcapping|query_pre_attn_scalar|cache_implementation"
    r"|use_parallel_residual|embedding_fraction|experts_per_token|init_device|expansion_ratio"
    r"|scale_attn_.*|scale_attention_.*|reorder_and_upcast_attn|do_sample|temperature|top_p"
    r"|moe_router_.*|n_positions|model_max_length|max_sequence_length|unsloth_.*"
    # How a model generates text, which Transformers saved beside its shape.
    r"|(max|min)_length|top_k|typical_p|num_beams|num_beam_groups|num_return_sequences"
    r"|early_stopping|(diversity|repetition|length|exponential_decay_length)_penalty"
    r"|(encoder_)?no_repeat_ngram_size|bad_words_ids|return_dict_in_generate"
    r"|remove_invalid_values)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How Transformers builds a family, where it is not as Llama.

    - `window`: "all" if `sliding_window` holds for all layers, "steps" for all but each
      `full_every`-th, "switch" if it needs `use_sliding_window`.
    - `usual_window`: the window of a config.json that has no `sliding_window`.
    - `bias_of_attention`: the biases that `attention_bias` adds. If they are `biases`, it is on
      where a config.json does not say.
    - `fixed`: fields of which only this value is read, as the others change the parameters.
    """

    is_gated: bool = True
    is_tied: bool = False
    biases: Literal["none", "qkv", "attention", "all"] = "none"
    bias_of_attention: Literal["attention", "qkv"] = "attention"
    norm: Literal["rms", "layer", "layer-without-bias", "without-parameters"] = "rms"
    layer_norms: int = 2
    query_key_norm: Literal["none", "heads", "joint"] = "none"
    head_dim: int = 0  # where a config.json has none; 0: the width divided by the heads
    window: Literal["none", "all", "steps", "switch"] = "none"
    full_every: int = 0
    usual_window: int = 0
    has_router_bias: bool = False
    has_head_bias: bool = False
    has_shared_gate: bool = False
    has_sinks: bool = False
    fixed: tuple[tuple[str, object], ...] = ()


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(window="all", usual_window=4096),
    "mixtral": _Family(window="all"),
    "qwen2": _Family(biases="qkv", window="switch", usual_window=4096),
    "qwen2_moe": _Family(
        biases="qkv",
        window="switch",
        usual_window=4096,
        has_shared_gate=True,
        fixed=(("qkv_bias", True),),
    ),
    "qwen3": _Family(query_key_norm="heads", head_dim=128, window="switch", usual_window=4096),
    "qwen3_moe": _Family(query_key_norm="heads", window="switch", usual_window=4096),
    "nemotron": _Family(is_gated=False, norm="layer"),
    "gpt_oss": _Family(
        biases="all",
        window="steps",
        full_every=2,
        usual_window=128,
        has_router_bias=True,
        has_sinks=True,
        fixed=(("attention_bias", True),),
    ),
    "phi3": _Family(window="all"),
    "smollm3": _Family(is_tied=True, window="switch"),
    "phimoe": _Family(norm="layer", window="all"),
    # One norm for attention and MLP, which run beside each other.
    "phi": _Family(
        is_gated=False,
        biases="all",
        norm="layer",
        layer_norms=1,
        has_head_bias=True,
        fixed=(("qk_layernorm", False),),
    ),
    "granite": _Family(),
    "granitemoe": _Family(),
    "arcee": _Family(is_gated=False),
    "seed_oss": _Family(
        biases="qkv",
        bias_of_attention="qkv",
        head_dim=128,
        fixed=(("attention_out_bias", False), ("mlp_bias", False)),
    ),
    "olmo": _Family(norm="without-parameters"),
    "olmoe": _Family(query_key_norm="joint"),
    "olmo2": _Family(query_key_norm="joint"),
    "olmo3": _Family(query_key_norm="joint", window="steps", full_every=4, usual_window=4096),
    "gemma": _Family(is_tied=True, head_dim=256),
    "gemma2": _Family(
        is_tied=True,
        head_dim=256,
        layer_norms=4,
        window="steps",
        full_every=2,
        usual_window=4096,
    ),
    "gemma3_text": _Family(
        is_tied=True,
        head_dim=256,
        layer_norms=4,
        query_key_norm="heads",
        window="steps",
        full_every=6,
        usual_window=4096,
    ),
    "glm": _Family(biases="qkv", bias_of_attention="qkv", head_dim=128),
    "glm4": _Family(biases="qkv", bias_of_attention="qkv", head_dim=128, layer_norms=4),
    "glm4_moe": _Family(bias_of_attention="qkv", has_router_bias=True),
    "cohere": _Family(is_tied=True, norm="layer-without-bias", layer_norms=1),
    "gpt_neox": _Family(
        is_gated=False, biases="all", norm="layer", fixed=(("attention_bias", True),)
    ),
    "starcoder2": _Family(
        is_gated=False,
        is_tied=True,
        biases="all",
        norm="layer",
        window="all",
        fixed=(("use_bias", True), ("mlp_type", "default"), ("norm_type", "layer_norm")),
    ),
}
_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")
_OLDER = ("gpt2", "bloom", "opt")
_OLDER_FIXED = {
    "opt": (
        ("do_layer_norm_before", True),
        ("enable_bias", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
    )
}
_KINDS = (*_FAMILIES, *_DEEPSEEK, *_OLDER, "falcon")


def from_hugging_face(text: str, place: str) -> Architecture:
    """Read a config.json; `place` names it in messages."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: expected JSON: {error}") from None
    if not isinstance(held, dict):
        raise UsageError(f"{place}: expected an object, got {type(held).__name__}")
    kind = held.get("model_type")
    if kind not in _KINDS and isinstance(text_config := held.get("text_config"), dict):
        is_known = text_config.get("model_type") in _KINDS
        hint = ". Save its text_config as a config.json of its own" if is_known else ""
        raise UsageError(
            f"{place}: model_type: expected a model of text alone, got {shown(kind)}{hint}"
        )
    if kind not in _KINDS:
        raise UsageError(
            f"{place}: model_type: expected one of {', '.join(_KINDS)}, got {shown(kind)}"
        )
    config = Fields(held, place)
    read: Callable[[Fields, str], Architecture] = _plain
    if kind in _DEEPSEEK:
        read = _deepseek
    elif kind in _OLDER:
        read = _with_old_names
    elif kind == "falcon":
        read = _falcon
    model = read(config, kind)
    config.check_rest(_HARMLESS)
    return model


def _named(config: Fields) -> str:
    given = config.held.get("_name_or_path")
    return given if isinstance(given, str) and given else Path(config.place).parent.name or "model"


def _check_fixed(config: Fields, fixed: Sequence[tuple[str, object]]) -> None:
    for name, usual in fixed:
        config.known.add(name)
        is_off = config.held.get(name, usual) is None and usual is not True
        if not is_off and config.held.get(name, usual) != usual:
            raise UsageError(
                f"{config.place}: {name}: expected {usual!r}, got {shown(config.held[name])}"
            )


def _plain(config: Fields, kind: str) -> Architecture:
    family = _FAMILIES[kind]
    _check_fixed(config, family.fixed)
    heads, hidden = config.heads_and_hidden()
    layers = config.whole("num_hidden_layers")
    window, full_every = _window(config, family, kind, layers)
    usual_head_dim = family.head_dim or hidden // heads
    norm_of_queries = family.query_key_norm
    if kind in ("glm4_moe", "cohere") and config.flag("use_qk_norm", False):
        norm_of_queries = "heads" if kind == "glm4_moe" else "joint"
    return Architecture(
        name=_named(config),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.heads_of_keys(heads, "num_key_value_heads", default=heads),
        head_dim=config.whole("head_dim", default=usual_head_dim) or usual_head_dim,
        ffn=config.whole("intermediate_size"),
        vocab=config.whole("vocab_size"),
        sequence=min(config.whole("max_position_embeddings", default=4096), 8192),
        is_gated=family.is_gated,
        is_tied=config.flag("tie_word_embeddings", family.is_tied),
        biases=_biases(config, family),
        norm=family.norm,
        layer_norms=family.layer_norms,
        has_query_key_norm=norm_of_queries != "none",
        is_query_key_norm_joint=norm_of_queries == "joint",
        has_head_bias=config.flag("lm_head_bias", family.has_head_bias),
        has_sinks=family.has_sinks,
        window=window,
        full_every=full_every,
        moe=_routed(config, kind) if kind == "glm4_moe" else _experts(config, family),
        mtp_layers=_mtp_layers(config) if kind == "glm4_moe" else 0,
    )


def _biases(config: Fields, family: _Family) -> Literal["none", "qkv", "attention", "all"]:
    has_own = family.biases == family.bias_of_attention
    has_attention = config.flag("attention_bias", has_own)
    has_mlp = config.flag("mlp_bias", False)
    if family.biases != "none" and not has_own:
        return family.biases
    if has_mlp and not has_attention:
        raise UsageError(f"{config.place}: mlp_bias: expected false without attention_bias")
    if has_mlp:
        return "all"
    return family.bias_of_attention if has_attention else "none"


def _window(config: Fields, family: _Family, kind: str, layers: int) -> tuple[int | None, int]:
    """Return the keys that a layer sees, and the step of the layers that see all of them."""
    is_on = config.flag("use_sliding_window", False) or family.window not in ("none", "switch")
    first = config.whole("max_window_layers", default=28)
    full_every = config.whole("sliding_window_pattern", default=family.full_every)
    # A window that is null is none; a window that is absent is that of the family.
    usual = 0 if "sliding_window" in config.held else family.usual_window
    window = config.whole("sliding_window", default=usual)
    # Gemma 2 was published with both names of it.
    if (again := config.whole("sliding_window_size", default=window)) != window:
        raise UsageError(
            f"{config.place}: sliding_window_size: expected {window} as in sliding_window, got "
            f"{again}"
        )
    if family.window == "none" or not is_on:
        window = 0
    config.known.add("layer_types")
    given = config.held.get("layer_types")
    if given is not None:
        known = ("full_attention", "sliding_attention")
        others = [one for one in given if one not in known] if isinstance(given, list) else given
        if not isinstance(given, list) or others:
            raise UsageError(
                f"{config.place}: layer_types: expected a list of {' and '.join(known)}, got "
                f"{shown(others)}"
            )
        if len(given) != layers:
            raise UsageError(
                f"{config.place}: layer_types: expected one for each of {layers} layers, got "
                f"{len(given)}"
            )
        has_window = [one == "sliding_attention" for one in given]
        if any(has_window) and not window:
            raise UsageError(
                f"{config.place}: layer_types: expected full_attention in all layers, since "
                f"{kind} has no window here, got sliding_attention"
            )
        return _stepped(config, has_window, window, "layer_types")
    if not window:
        return None, 0
    if family.window == "steps":
        return (None, 0) if full_every == 1 else (window, full_every)
    if family.window == "all" or kind == "qwen3_moe":
        return window, 0
    if kind == "smollm3":
        raise UsageError(f"{config.place}: expected layer_types with use_sliding_window")
    layers = min(layers, 10_000)  # more are refused later
    if kind == "qwen2_moe":
        has_window = [layer % 2 == 0 and layer < first for layer in range(layers)]
    else:
        has_window = [layer >= first for layer in range(layers)]
    return _stepped(config, has_window, window, "max_window_layers")


def _stepped(
    config: Fields, has_window: Sequence[bool], window: int, field: str
) -> tuple[int | None, int]:
    """Return a window and its step, or refuse layers that do not follow one step."""
    full = [layer for layer, has in enumerate(has_window) if not has]
    if len(full) == len(has_window):
        return None, 0
    step = full[0] + 1 if full else 0
    if full and full != list(range(step - 1, len(has_window), step)):
        raise UsageError(
            f"{config.place}: {field}: expected full attention in all layers, in none or in each "
            f"n-th, got it in layers {shown([layer + 1 for layer in full])} of {len(has_window)}"
        )
    return window, step


def _experts(config: Fields, family: _Family) -> Moe | None:
    experts = config.whole("num_local_experts", "num_experts", default=0)
    if not experts:
        return None
    if config.held.get("mlp_only_layers"):
        raise UsageError(f"{config.place}: mlp_only_layers: expected none, got some")
    return Moe(
        experts=experts,
        top_k=config.whole("num_experts_per_tok"),
        ffn=config.whole("moe_intermediate_size", default=config.whole("intermediate_size")),
        shared_ffn=config.whole("shared_expert_intermediate_size", default=0),
        has_shared_gate=family.has_shared_gate,
        every=config.whole("decoder_sparse_step", default=1),
        has_router_bias=family.has_router_bias,
    )


def _routed(config: Fields, kind: str) -> Moe:
    """Return experts in the words of DeepSeek."""
    ffn = config.whole("moe_intermediate_size")
    first_dense = config.whole("first_k_dense_replace", default=0)
    config.known.add("mlp_layer_types")
    if (kinds := config.held.get("mlp_layer_types")) is not None:  # as Transformers 5 writes it
        listed = kinds if isinstance(kinds, list) else []
        first_dense = listed.count("dense")
        if kinds != ["dense"] * first_dense + ["sparse"] * (len(listed) - first_dense):
            raise UsageError(
                f"{config.place}: mlp_layer_types: expected dense layers and then sparse ones, got "
                f"{shown(kinds)}"
            )
        if len(listed) != (layers := config.whole("num_hidden_layers")):
            raise UsageError(
                f"{config.place}: mlp_layer_types: expected one for each of {layers} layers, got "
                f"{len(listed)}"
            )
    return Moe(
        experts=config.whole("n_routed_experts", "num_local_experts"),
        top_k=config.whole("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * config.whole("n_shared_experts", default=0),
        first_dense=first_dense,
        every=config.whole("moe_layer_freq", default=1),
        has_router_bias=kind != "deepseek_v2",
    )


def _mtp_layers(config: Fields) -> int:
    return config.whole("num_nextn_predict_layers", "num_mtp_layers", default=0)


def _deepseek(config: Fields, kind: str) -> Architecture:
    mla = Mla(
        kv_rank=config.whole("kv_lora_rank"),
        query_rank=config.whole("q_lora_rank", default=0) or None,
        nope_dim=config.whole("qk_nope_head_dim"),
        rope_dim=config.whole("qk_rope_head_dim"),
        value_dim=config.whole("v_head_dim"),
    )
    heads = config.whole("num_attention_heads", least=1)
    # Transformers writes sums and parts of the sizes above.
    config.known.update(("num_key_value_heads", "qk_head_dim", "head_dim"))
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
        biases="attention" if config.flag("attention_bias", False) else "none",
        mla=mla,
        moe=_routed(config, kind),
        mtp_layers=_mtp_layers(config),
    )


def _with_old_names(config: Fields, kind: str) -> Architecture:
    _check_fixed(config, _OLDER_FIXED.get(kind, ()))
    heads, hidden = config.heads_and_hidden("n_embd", "n_embed", "hidden_size")
    positions = config.whole("n_positions", "max_position_embeddings", default=2048)
    if (inner := config.whole("word_embed_proj_dim", default=hidden)) != hidden:
        raise UsageError(
            f"{config.place}: word_embed_proj_dim: expected hidden_size {hidden}, got {inner}"
        )
    return Architecture(
        name=_named(config),
        layers=config.whole("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=config.whole("n_inner", "ffn_dim", default=4 * hidden),
        vocab=config.whole("vocab_size"),
        sequence=positions,
        is_gated=False,
        is_tied=config.flag("tie_word_embeddings", True),
        biases="all",
        norm="layer",
        has_embedding_norm=kind == "bloom",
        positions="alibi" if kind == "bloom" else "learned",
        # OPT counts its positions from 2.
        learned_positions={"gpt2": positions, "opt": positions + 2}.get(kind, 0),
    )


def _falcon(config: Fields, kind: str) -> Architecture:
    heads, hidden = config.heads_and_hidden("hidden_size", "n_embed")
    is_new = config.flag("new_decoder_architecture", False)
    is_parallel = config.flag("parallel_attn", True)
    has_one_key = config.flag("multi_query", True) and not is_new
    kv_heads = config.heads_of_keys(heads, "num_kv_heads", "n_head_kv", default=heads)
    norms = config.whole("num_ln_in_parallel_attn", default=2 if is_new else 1)
    ffn = config.whole("ffn_hidden_size", default=4 * hidden)
    # Falcon-11B has both.
    _check_fixed(config, [("ff_factor", ffn / hidden if ffn % hidden else ffn // hidden)])
    return Architecture(
        name=_named(config),
        layers=config.whole("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=1 if has_one_key else kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=config.whole("vocab_size"),
        sequence=min(config.whole("max_position_embeddings", default=2048), 8192),
        is_gated=False,
        is_tied=config.flag("tie_word_embeddings", True),
        biases="all" if config.flag("bias", False) else "none",
        norm="layer",
        layer_norms=2 if not is_parallel or norms == 2 else 1,
        positions="alibi" if config.flag("alibi", False) else "rotary",
    )
