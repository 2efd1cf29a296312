"""Configs of Hugging Face: their parameters are the published ones, their windows Transformers'.

Transformers 5.24 counts the same parameters for those configs that it was asked about, 23 of 29.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fullwire import UsageError
from fullwire.workloads import workload
from fullwire.workloads.architecture import Architecture
from fullwire.workloads.architecture_files import architecture
from fullwire.workloads.layout import Layout
from fullwire.workloads.stage_memory import stages

Config = dict[str, Any]


def read(folder: Path, config: Config) -> Architecture:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return architecture(folder)


def sizes(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> Config:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
    }  # fmt: skip


PHI3 = {
    "model_type": "phi3", **sizes(32, 3072, 8192, 32, 32, 32064), "sliding_window": 2047,
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096,
    "tie_word_embeddings": False, "auto_map": {"AutoConfig": "x"},
}  # fmt: skip
PHI4 = {"model_type": "phi3", **sizes(40, 5120, 17920, 40, 10, 100352), "sliding_window": None}
SMOLLM3 = {
    "model_type": "smollm3", **sizes(36, 2048, 11008, 16, 4, 128256), "max_window_layers": 28,
    "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4, "use_sliding_window": False,
    "layer_types": ["full_attention"] * 36, "mlp_bias": False, "attention_bias": False,
}  # fmt: skip
OLMO2 = {"model_type": "olmo2", **sizes(32, 4096, 11008, 32, 32, 100352), "rope_theta": 500000}
OLMO3 = {
    "model_type": "olmo3", **sizes(32, 4096, 11008, 32, 32, 100278), "sliding_window": 4096,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
}  # fmt: skip
GEMMA = {"model_type": "gemma", **sizes(28, 3072, 24576, 16, 16, 256000), "head_dim": 256}
GEMMA2 = {
    "model_type": "gemma2", **sizes(26, 2304, 9216, 8, 4, 256000), "head_dim": 256,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "cache_implementation": "hybrid", "sliding_window_size": 4096,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", **sizes(26, 1152, 6912, 4, 1, 262144), "head_dim": 256,
    "sliding_window": 512, "sliding_window_pattern": 6, "rope_local_base_freq": 10000,
    "query_pre_attn_scalar": 256,
}  # fmt: skip
GLM = {
    "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "n_group": 1,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
    "norm_topk_prob": True, "partial_rotary_factor": 0.5, "topk_group": 1,
}  # fmt: skip
GLM_AIR = {
    **GLM, **sizes(46, 4096, 10944, 96, 8, 151552), "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "first_k_dense_replace": 1, "use_qk_norm": False,
}  # fmt: skip
GLM_45 = {
    **GLM, **sizes(92, 5120, 12288, 96, 8, 151552), "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True,
}  # fmt: skip
NEOX = {
    "model_type": "gpt_neox", **sizes(44, 6144, 24576, 64, 64, 50432), "rotary_pct": 0.25,
    "use_parallel_residual": True, "tie_word_embeddings": False, "hidden_act": "gelu_fast",
}  # fmt: skip
PYTHIA = NEOX | sizes(32, 4096, 16384, 32, 32, 50432)
OPT = {
    "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "vocab_size": 50272, "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768, "do_layer_norm_before": True, "layerdrop": 0.0, "prefix": "</s>",
    "_remove_final_layer_norm": False, "activation_function": "relu",
}  # fmt: skip
OPT_1B3 = OPT | {
    "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
    "word_embed_proj_dim": 2048,
}  # fmt: skip
FALCON_180B = {
    "model_type": "falcon", "hidden_size": 14848, "num_hidden_layers": 80, "vocab_size": 65024,
    "num_attention_heads": 232, "num_kv_heads": 8, "new_decoder_architecture": True,
    "parallel_attn": True, "multi_query": True, "bias": False, "alibi": False,
    "tie_word_embeddings": False,  # the checkpoints hold the head
}  # fmt: skip
FALCON_7B = FALCON_180B | {
    "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "num_kv_heads": 71,
    "new_decoder_architecture": False,
}  # fmt: skip
FALCON_RW = FALCON_7B | {
    "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "num_kv_heads": 32,
    "vocab_size": 50304, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
    "tie_word_embeddings": True,
}  # fmt: skip
STARCODER2 = {
    "model_type": "starcoder2", **sizes(30, 3072, 12288, 24, 2, 49152), "use_bias": True,
    "sliding_window": 4096, "mlp_type": "default", "norm_type": "layer_norm",
}  # fmt: skip
COMMAND_R = {
    "model_type": "cohere", **sizes(40, 8192, 22528, 64, 64, 256000), "logit_scale": 0.0625,
    "use_qk_norm": False,
}  # fmt: skip
COMMAND_R_PLUS = COMMAND_R | sizes(64, 12288, 33792, 96, 8, 256000) | {"use_qk_norm": True}
GRANITE = {
    "model_type": "granite", **sizes(40, 2048, 8192, 32, 8, 49159), "tie_word_embeddings": True,
    "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
}  # fmt: skip

PHI2 = {
    "model_type": "phi", **sizes(32, 2560, 10240, 32, 32, 51200), "partial_rotary_factor": 0.4,
    "qk_layernorm": False, "embd_pdrop": 0.0, "resid_pdrop": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
PHI_MOE = {
    "model_type": "phimoe", **sizes(32, 4096, 6400, 32, 8, 32064), "attention_bias": True,
    "lm_head_bias": True, "num_local_experts": 16, "num_experts_per_tok": 2,
    "input_jitter_noise": 0.01, "router_jitter_noise": 0.01, "sliding_window": 131072,
}  # fmt: skip
OLMO = {
    "model_type": "olmo", **sizes(32, 4096, 11008, 32, 32, 50304), "attention_bias": False,
    "clip_qkv": 8.0, "tie_word_embeddings": None,
}  # fmt: skip
OLMOE = {
    "model_type": "olmoe", **sizes(16, 2048, 1024, 16, 16, 50304), "num_experts": 64,
    "num_experts_per_tok": 8, "norm_topk_prob": False,
}  # fmt: skip
GLM4 = {"model_type": "glm4", **sizes(40, 4096, 13696, 32, 2, 151552), "attention_bias": True}
GLM_47_FLASH = {
    "model_type": "glm4_moe_lite", **sizes(47, 2048, 10240, 20, 20, 154880), "v_head_dim": 256,
    "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "mlp_layer_types": ["dense", *["sparse"] * 46],
}  # fmt: skip
GRANITE_MOE = {
    "model_type": "granitemoe", **sizes(24, 1024, 512, 16, 8, 49155), "num_local_experts": 32,
    "num_experts_per_tok": 8, "tie_word_embeddings": True, "logits_scaling": 6.0,
}  # fmt: skip
AFM = {"model_type": "arcee", **sizes(36, 2560, 18432, 20, 4, 128004), "mlp_bias": False}
SEED = {
    "model_type": "seed_oss", **sizes(64, 5120, 27648, 80, 8, 155136), "attention_bias": True,
    "attention_out_bias": False, "residual_dropout": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published"),
    [
        pytest.param(PHI2, 2_779_683_840, id="phi-2"),
        pytest.param(PHI_MOE, 41_873_153_344, id="Phi-3.5-MoE"),
        pytest.param(OLMO, 6_888_095_744, id="OLMo-7B"),
        pytest.param(OLMOE, 6_919_161_856, id="OLMoE-1B-7B"),
        pytest.param(GLM4, 9_400_279_040, id="GLM-4-9B-0414"),
        pytest.param(GLM4 | {"model_type": "glm"}, 9_399_951_360, id="glm-4-9b"),
        pytest.param(GLM_47_FLASH, 29_943_390_976 + 46 * 64, id="GLM-4.7-Flash"),
        pytest.param(GRANITE_MOE, 1_334_628_352, id="granite-3.0-1b-a400m"),
        pytest.param(AFM, 4_619_184_640, id="AFM-4.5B"),
        pytest.param(SEED, 36_151_104_512, id="Seed-OSS-36B"),
        pytest.param(PHI3, 3_821_079_552, id="Phi-3-mini-4k-instruct"),
        pytest.param(PHI4, 14_659_507_200, id="phi-4"),
        pytest.param(SMOLLM3, 3_075_098_624, id="SmolLM3-3B"),
        pytest.param(OLMO2, 7_298_617_344, id="OLMo-2-1124-7B"),
        pytest.param(OLMO3, 7_298_011_136, id="Olmo-3-7B"),
        pytest.param(GEMMA, 8_537_680_896, id="gemma-7b"),
        pytest.param(GEMMA2, 2_614_341_888, id="gemma-2-2b"),
        pytest.param(GEMMA3, 999_885_952, id="gemma-3-1b"),
        pytest.param(NEOX, 20_554_567_680, id="gpt-neox-20b"),
        pytest.param(PYTHIA, 6_857_302_016, id="pythia-6.9b"),
        pytest.param(OPT, 125_239_296, id="opt-125m"),
        pytest.param(OPT_1B3, 1_315_758_080, id="opt-1.3b"),
        pytest.param(FALCON_180B, 179_522_565_120, id="falcon-180B"),
        pytest.param(FALCON_7B, 7_217_189_760, id="falcon-7b"),
        pytest.param(GRANITE, 2_533_539_840, id="granite-3.3-2b"),
        pytest.param(FALCON_RW, 1_311_625_216, id="falcon-rw-1b"),
        pytest.param(STARCODER2, 3_030_371_328, id="starcoder2-3b"),
        pytest.param(COMMAND_R, 34_980_831_232, id="c4ai-command-r-v01"),
        pytest.param(COMMAND_R_PLUS, 103_810_674_688, id="c4ai-command-r-plus"),
    ],
)  # fmt: skip
def test_a_family_has_as_many_parameters_as_published(
    tmp_path: Path, config: Config, published: int
) -> None:
    assert read(tmp_path, config).parameters == published


@pytest.mark.parametrize(
    ("config", "published"), [(GLM_AIR, 110_468_824_832), (GLM_45, 358_337_791_296)]
)
def test_glm_has_as_many_parameters_as_published_with_its_further_layer(
    tmp_path: Path, config: Config, published: int
) -> None:
    """The checkpoint repeats embedding and head for the layer that predicts a further token."""
    model = read(tmp_path, config)
    repeated = 2 * model.vocab * model.hidden
    assert model.parameters + model.mtp_parameters + repeated == published
    assert model.biases == "qkv"


def test_a_parallel_block_has_one_norm_and_a_sandwich_four(tmp_path: Path) -> None:
    falcon = read(tmp_path, FALCON_7B)
    assert (falcon.layer_norms, falcon.kv_heads) == (1, 1)
    assert read(tmp_path, FALCON_180B).layer_norms == 2
    assert read(tmp_path, GEMMA2).layer_norms == 4


def test_the_text_of_a_model_with_pictures_is_a_file_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"text alone, got 'gemma3'\. Save its text_config as"):
        read(tmp_path, {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {}})
    unknown = {"model_type": "qwen3_vl", "text_config": GEMMA3 | {"model_type": "qwen3_vl_text"}}
    with pytest.raises(UsageError, match=r"text alone, got 'qwen3_vl'$"):
        read(tmp_path, unknown)


@pytest.mark.parametrize("kind", ["glm", "glm4", "seed_oss"])
def test_biases_that_a_family_usually_has_may_be_switched_off(tmp_path: Path, kind: str) -> None:
    """GLM-4-32B-0414 has none. Without the field, Transformers makes them."""
    config = GLM4 | {"model_type": kind}
    del config["attention_bias"]
    usual = read(tmp_path, config)
    assert usual == read(tmp_path, config | {"attention_bias": True})
    without = read(tmp_path, config | {"attention_bias": False})
    assert (usual.biases, without.biases) == ("qkv", "none")
    assert usual.parameters - without.parameters == 40 * (32 + 2 * 2) * 128


def test_a_head_that_shares_the_embeddings_matrix_keeps_its_bias(tmp_path: Path) -> None:
    apart, tied = (read(tmp_path, PHI2 | {"tie_word_embeddings": tied}) for tied in (False, True))
    assert apart.parameters - tied.parameters == 51200 * 2560
    assert workload(f"{tmp_path}@h100").model.parameter_count == tied.parameters


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (PHI2, "qk_layernorm"),
        (SEED, "attention_out_bias"),
        (SEED, "mlp_bias"),
        (OPT, "_remove_final_layer_norm"),
    ],
)
def test_a_field_that_is_null_is_off(tmp_path: Path, config: Config, name: str) -> None:
    assert read(tmp_path, config | {name: None}) == read(tmp_path, config)
    with pytest.raises(UsageError, match=f"{name}: expected False, got True"):
        read(tmp_path, config | {name: True})


@pytest.mark.parametrize("kinds", [[], ["dense"] * 50, ["dense", *["sparse"] * 45]])
def test_each_layer_is_dense_or_sparse(tmp_path: Path, kinds: list[str]) -> None:
    with pytest.raises(UsageError, match=f"expected one for each of 47 layers, got {len(kinds)}$"):
        read(tmp_path, GLM_47_FLASH | {"mlp_layer_types": kinds})


def test_experts_in_some_layers_between_dense_ones_are_refused(tmp_path: Path) -> None:
    for kinds in (["dense", "sparse", "dense", *["sparse"] * 44], "sparse", 46):
        with pytest.raises(UsageError, match="mlp_layer_types: expected dense layers and then"):
            read(tmp_path, GLM_47_FLASH | {"mlp_layer_types": kinds})


@pytest.mark.parametrize("config", [GEMMA2, OPT, FALCON_7B, OLMO, OLMO2, PHI2])
def test_a_workload_of_a_config_has_its_parameters(tmp_path: Path, config: Config) -> None:
    model = read(tmp_path, config)
    assert workload(f"{tmp_path}@h100").model.parameter_count == model.parameters


def test_norms_after_attention_and_mlp_keep_memory(tmp_path: Path) -> None:
    layout = Layout(tp=1, pp=1, dp=1, microbatch=1, global_batch=1, sequence=4096)
    plain = read(tmp_path, GEMMA2 | {"model_type": "gemma"})
    wrapped = read(tmp_path, GEMMA2)
    more = stages(wrapped, layout).activations_bytes - stages(plain, layout).activations_bytes
    assert more[0] == pytest.approx(26 * 2 * 2 * 4096 * 2304)


# Windows.

LLAMA = {"model_type": "llama", **sizes(8, 512, 1024, 8, 8, 1000)}
QWEN = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32}
FULL, WINDOW = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("config", "window", "full_every"),
    [
        (LLAMA | {"layer_types": [FULL] * 8}, None, 0),
        (LLAMA | {"model_type": "mixtral", "sliding_window": 64}, 64, 0),
        (LLAMA | {"model_type": "mixtral", "sliding_window": None}, None, 0),
        (LLAMA | {"model_type": "mistral"}, 4096, 0),  # Transformers' own
        (LLAMA | {"model_type": "mistral", "sliding_window": None}, None, 0),
        (LLAMA | {"model_type": "gpt_oss"}, 128, 2),
        (LLAMA | {"model_type": "gpt_oss", "layer_types": [FULL] * 8}, None, 0),
        (LLAMA | {"model_type": "gpt_oss", "layer_types": [WINDOW] * 8}, 128, 0),
        (
            LLAMA | {"model_type": "gpt_oss", "layer_types": [*[WINDOW] * 3, FULL] * 2},
            128,
            4,
        ),
        (QWEN | {"max_window_layers": 8}, None, 0),
        (QWEN | {"max_window_layers": 0}, 32, 0),
        (QWEN | {"max_window_layers": 0, "use_sliding_window": False}, None, 0),
        (QWEN | {"model_type": "qwen3_moe", "max_window_layers": 8}, 32, 0),
        (GEMMA2, 4096, 2),
        (GEMMA3, 512, 6),
        (GEMMA3 | {"layer_types": [*[WINDOW] * 5, FULL] * 4 + [WINDOW] * 2}, 512, 6),
        (OLMO3, 4096, 4),
        (SMOLLM3, None, 0),
        (PHI3, 2047, 0),
    ],
)
def test_windows_are_those_of_transformers(
    tmp_path: Path, config: Config, window: int | None, full_every: int
) -> None:
    model = read(tmp_path, config)
    assert (model.window, model.full_every) == (window, full_every)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"layer_types": [WINDOW] * 8}, "layer_types: expected full_attention in all"),
        (LLAMA | {"layer_types": [FULL] * 7}, "layer_types: expected one for each of 8 layers"),
        (LLAMA | {"layer_types": ["linear_attention"] * 8}, "layer_types: expected a list of"),
        (LLAMA | {"layer_types": 3}, "layer_types: expected a list of"),
        (
            LLAMA | {"model_type": "gpt_oss", "layer_types": [FULL, *[WINDOW] * 7]},
            "layer_types: expected full attention in all layers, in none or in each n-th, got it "
            r"in layers \[1\] of 8",
        ),
        (QWEN | {"max_window_layers": 4}, "max_window_layers: expected full attention in all"),
        (SMOLLM3 | {"layer_types": None, "use_sliding_window": True, "sliding_window": 8},
         "expected layer_types with use_sliding_window"),
    ],
)  # fmt: skip
def test_windows_without_one_step_are_refused_by_name(
    tmp_path: Path, config: Config, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, config)


# Fields.


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OPT | {"word_embed_proj_dim": 512}, "word_embed_proj_dim: expected hidden_size 768"),
        (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before: expected True, got False"),
        (NEOX | {"attention_bias": False}, "attention_bias: expected True, got False"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias: expected false without attention_bias"),
        (LLAMA | {"model_type": "gemma3"}, "model_type: expected one of llama, .* got 'gemma3'"),
        (GEMMA2 | {"sliding_window_size": 512}, "sliding_window_size: expected 4096 as in sliding"),
        (LLAMA | {"intermediate_size": 0}, "ffn: expected 1 to 10,000,000, got 0"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "got use_bidirectional_attention"),
        (QWEN | {"num_hidden_layers": 10**9, "max_window_layers": 0}, "layers: expected at most"),
    ],
)
def test_a_field_that_changes_the_model_is_refused_by_name(
    tmp_path: Path, config: Config, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, config)


DEEPSEEK = {
    "model_type": "deepseek_v3", **sizes(61, 7168, 18432, 128, 128, 129280),
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def test_a_deepseek_that_transformers_saved_is_read(tmp_path: Path) -> None:
    saved = {"qk_head_dim": 192, "head_dim": 64, "rope_interleave": True, "num_mtp_layers": 1}
    model = read(tmp_path, DEEPSEEK | saved)
    assert (model.parameters, model.mtp_layers) == (671_026_419_200, 1)
    # The matrices to both latent vectors have a bias then, and the output, but none from these.
    biased = read(tmp_path, DEEPSEEK | {"attention_bias": True})
    assert biased.parameters - model.parameters == 61 * (1536 + 512 + 64 + 7168)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_max_length": 131072, "max_sequence_length": 2048},
        {"unsloth_version": "2024.9", "unsloth_fixed": True},
        {"max_length": 20, "min_length": 1, "top_k": 50, "num_beams": 1, "num_beam_groups": 1},
        {"repetition_penalty": 1.0, "length_penalty": 1.0, "num_return_sequences": 1},
        {"typical_p": 1.0, "encoder_no_repeat_ngram_size": 2, "remove_invalid_values": True},
    ],
)
def test_fields_that_say_nothing_about_shapes_are_passed_over(
    tmp_path: Path, fields: Config
) -> None:
    assert read(tmp_path, LLAMA | fields) == read(tmp_path, LLAMA)


def test_a_falcon_may_tell_the_width_of_its_mlp_twice(tmp_path: Path) -> None:
    twice = FALCON_RW | {"ffn_hidden_size": 6144, "ff_factor": 3}
    assert read(tmp_path, twice).ffn == 6144
    with pytest.raises(UsageError, match="ff_factor: expected 3, got 4"):
        read(tmp_path, twice | {"ff_factor": 4})


def test_an_existing_folder_comes_before_a_built_in_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models" / "llama3-8b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"expected a config\.json in the folder"):
        architecture("./models/llama3-8b")
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert architecture("./models/llama3-8b").layers == 8
    assert architecture("models/llama3-8b").layers == 8
    assert architecture("llama3-8b").layers == 32
    # A folder of a name, such as one of checkpoints, holds no model: the name is meant.
    (tmp_path / "llama3-70b").mkdir()
    assert architecture("llama3-70b").layers == 80
    (tmp_path / "llama3-70b" / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert architecture("llama3-70b").layers == 8
