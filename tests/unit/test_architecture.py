"""Transformers by name and from files: their counts are the published ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fullwire as fw
from fullwire import UsageError
from fullwire.cli.workloads import workloads as workloads_command
from fullwire.workloads import architecture_files
from fullwire.workloads.architecture_files import architecture, names
from tests.builders import a_run
from tests.conftest import Cli

SMALL = "layers = 2\nhidden = 64\nheads = 4\nffn = 128\nvocab = 1000\nsequence = 128\n"

# Counted by Hugging Face from the tensors of each model.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "bloom-176b": 176_247_271_424,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_published(name: str) -> None:
    assert architecture(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("1.7b", 1.7), ("18b", 18.4), ("39b", 39.1), ("76b", 76.1), ("145b", 145.6), ("310b", 310.1),
     ("530b", 529.6), ("1t", 1008.0)],
)  # fmt: skip
def test_megatrons_models_have_the_sizes_of_its_paper(name: str, billions: float) -> None:
    parameters = architecture(f"megatron-{name}").parameters
    assert round(parameters / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek-v3", 37.6), ("deepseek-v2", 21.4), ("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.2),
     ("qwen3-30b-a3b", 3.4), ("qwen3-235b-a22b", 22.2), ("gpt-oss-120b", 5.7), ("kimi-k2", 32.9)],
)  # fmt: skip
def test_a_token_uses_as_many_parameters_as_published(name: str, billions: float) -> None:
    """The sums hold embedding and head, as the publications with 37B and 12.9B do."""
    assert round(architecture(name).active_parameters / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("spelt", "name"),
    [("Llama-3.1-70B", "llama3.1-70b"), ("Llama 2 70B", "llama2-70b"), ("GPT3-175B", "gpt3-175b"),
     ("DeepSeek-V3", "deepseek-v3"), ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b"),
     ("gpt-174.6B", "gpt3-175b"), ("qwen3_30b_a3b", "qwen3-30b-a3b")],
)  # fmt: skip
def test_a_name_is_known_as_others_spell_it(spelt: str, name: str) -> None:
    assert architecture(spelt).name == name


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="The nearest is llama3-70b"):
        architecture("llama3-71b")


def test_a_run_in_place_of_a_model_is_told_the_option_that_takes_runs(tmp_path: Path) -> None:
    place = fw.write(a_run(), tmp_path / "job.run")
    with pytest.raises(UsageError, match=r"got the run .*: --from takes a run"):
        architecture(place)


def test_operations_of_a_token_are_twice_its_matrices_and_attention() -> None:
    model = architecture("llama3-8b")
    matrices = model.active_parameters - model.vocab * model.hidden  # a lookup costs none
    attention = model.layers * 4 * model.hidden * (8192 + 1) / 2
    assert model.flops(8192) == pytest.approx(2 * matrices + attention, rel=1e-4)


def test_published_operations_are_six_of_each_active_parameter_and_attention() -> None:
    model = architecture("llama3-8b")
    attention = model.layers * 12 * model.hidden * (8192 + 1) / 2
    assert model.active_parameters == 8_030_261_248
    assert model.model_flops(8192) == pytest.approx(6 * 8_030_261_248 + attention)
    tied = architecture("llama3.2-1b")  # the head is the embedding, and counts once
    assert tied.model_flops(8192) == pytest.approx(3 * tied.flops(8192), rel=1e-3)


def test_a_window_limits_the_keys_that_a_query_sees() -> None:
    model = architecture("gpt-oss-20b")
    assert model.keys(0, 8192) == pytest.approx(128 - 128 * 127 / 2 / 8192)
    assert model.keys(1, 8192) == 8193 / 2


def test_further_predictions_cost_operations_and_are_no_parameters_of_the_model() -> None:
    model = architecture("deepseek-v3")
    assert 11e9 < model.mtp_parameters < 12e9  # published as 14B with embedding and head
    assert model.active_parameters == replace(model, mtp_layers=0).active_parameters


@pytest.mark.parametrize("mtp_layers", [0, 1, 2])
def test_published_operations_are_three_times_forward_with_further_predictions(
    mtp_layers: int,
) -> None:
    model = replace(architecture("deepseek-v3"), mtp_layers=mtp_layers)
    lookup = 6 * model.vocab * model.hidden  # a utilization counts the embedding
    assert model.model_flops(4096) == pytest.approx(3 * model.flops(4096) + lookup, rel=1e-4)


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "mlp_bias": False,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0}, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "pretraining_tp": 1, "vocab_size": 128256, "transformers_version": "4.43.0",
}  # fmt: skip


def test_a_config_of_hugging_face_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert architecture(tmp_path).parameters == PUBLISHED["llama3-8b"]
    assert architecture(tmp_path / "config.json").kv_heads == 8


def test_an_unknown_field_of_a_config_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "extra_experts": 4, "no_such_thing": None}))
    with pytest.raises(UsageError, match=r"config.json: .* got extra_experts: they may change"):
        architecture(path)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_hidden_layers", 10**30, "expected a whole number up to 1,000,000,000, got 1000000"),
        ("num_hidden_layers", 10**6, "layers: expected at most 10,000, got 1,000,000"),
        ("vocab_size", 2**63, "expected a whole number up to 1,000,000,000, got 9223372"),
        ("hidden_size", 1e308, "expected a whole number, got 1e"),
        ("num_attention_heads", -1, "expected a whole number above 0, got -1"),
    ],
)
def test_a_model_of_impossible_size_is_refused_at_once(
    tmp_path: Path, field: str, value: float, expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, field: value}))
    with pytest.raises(UsageError, match=expected):
        architecture(tmp_path)


def test_deepseeks_config_has_latent_attention_and_experts(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
             "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
             "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
             "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
             "num_nextn_predict_layers": 1, "kv_lora_rank": 512, "q_lora_rank": 1536,
             "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
             "vocab_size": 129280, "topk_group": 4, "n_group": 8, "routed_scaling_factor": 2.5,
             "scoring_func": "sigmoid", "norm_topk_prob": True, "topk_method": "noaux_tc",
             "rope_theta": 10000, "hidden_act": "silu", "ep_size": 1}
        )
    )  # fmt: skip
    assert architecture(path).parameters == PUBLISHED["deepseek-v3"]


def test_megatrons_arguments_are_read_from_one_line_and_from_a_file(tmp_path: Path) -> None:
    line = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm "
        "--disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256 "
        "--position-embedding-type rope --seq-length 8192 --max-position-embeddings 8192 "
        "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --lr 3e-4 --micro-batch-size 1"
    )
    assert architecture(line).parameters == PUBLISHED["llama3-8b"]
    path = tmp_path / "llama3.txt"
    path.write_text("# Llama 3\n" + line.replace(" --", " \\\n  --"))
    assert architecture(path).parameters == PUBLISHED["llama3-8b"]


_SCRIPT = """#!/bin/bash
GPUS_PER_NODE=8
SCRIPT_PATH="pretrain_gpt.py"
NUM_LAYERS=${NUM_LAYERS:-32}
SEQ_LENGTH=8192
DISTRIBUTED_ARGS=( --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES )
GPT_MODEL_ARGS=(
    --num-layers $NUM_LAYERS  # (as published)
    --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --moe-layer-freq "([0]*3+[1]*29)"
    --seq-length ${SEQ_LENGTH} --max-position-embeddings 8192
    --position-embedding-type rope --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights
)
MORE_ARGS="
    --micro-batch-size 1 \\
    --bf16
"
MORE_ARGS+=" --lr 3e-4"
DATA_ARGS=(
    "--data-path $DATA_PATH"
    "--vocab-size 128256"
)
torchrun ${DISTRIBUTED_ARGS[@]} "$SCRIPT_PATH" \\
    ${GPT_MODEL_ARGS[@]} \\
    $MORE_ARGS "${DATA_ARGS[@]}" "$@" 2>&1 | tee log.txt
set +x
"""


def test_variables_of_a_shell_script_are_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "llama3.sh"
    path.write_text(_SCRIPT)
    assert architecture(path).parameters == PUBLISHED["llama3-8b"]
    assert architecture(path).sequence == 8192
    path.write_text(_SCRIPT[: _SCRIPT.index("torchrun")])  # only the variables
    assert architecture(path).parameters == PUBLISHED["llama3-8b"]


@pytest.mark.parametrize(
    ("whole", "part", "said"),
    [
        ("$MORE_ARGS", "$OTHER_ARGS", r"expected the flags of \$OTHER_ARGS, which nothing"),
        ('"$SCRIPT_PATH"', "pretrain.py $MORE", r"expected the flags of \$MORE, which nothing"),
        ("NUM_LAYERS=${NUM_LAYERS:-32}", "", r"num_layers: expected a whole number, got .\$NUM_LA"),
        ('128256"\n)', '128256"\n', r"DATA_ARGS: expected \) behind its words"),
        ("GPUS_PER_NODE=8", "A=aaaaaaaa\n" + 30 * "A=$A$A\n", "bytes in all variables"),
    ],
)
def test_a_variable_that_stays_open_is_named(
    tmp_path: Path, whole: str, part: str, said: str
) -> None:
    path = tmp_path / "llama3.sh"
    path.write_text(_SCRIPT.replace(whole, part))
    with pytest.raises(UsageError, match=said):
        architecture(path)


def test_the_command_takes_megatrons_arguments_as_one_word(cli: Cli) -> None:
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
        "--max-position-embeddings 128 --vocab-size 1000"
    )
    done = cli("workloads", words)
    assert "arguments" in done.stdout


@pytest.mark.parametrize(
    "flags",
    [
        "--deepspeed --deepspeed_config ds.json --zero-stage 1 --ds-pipeline-enabled",
        "--num-distributed-optimizer-instances 2 --sharp-enabled-group dp --nccl-ub",
        "--fine-grained-activation-offloading --offload-modules core_attn --cpu-offloading",
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit 50 --delay-wgrad-compute",
        "--record-memory-history --memory-snapshot-path x.pickle --disable-straggler-on-startup",
        "--activation-offload-fraction 0.5 --offload-optimizer-states --deepspeed_mpi",
        "--sft --iterations-to-skip 10 --phase-transition-iterations 10 --no-mmap-bin-files",
        "--openai-gelu --embedding-init-method-std 1.0 --qk-clip --disable-jit-fuser",
    ],
)
def test_arguments_of_the_training_leave_the_model_as_it_is(flags: str) -> None:
    sizes = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128"
    plain = f"{sizes} --max-position-embeddings 128 --vocab-size 1024"
    assert architecture(f"{plain} {flags}") == architecture(plain)


@pytest.mark.parametrize(
    "flag",
    [
        *("hidden-doubling", "ds-hidden-layers", "deepspeed-layers", "offload-layers"),
        *("layers-to-offload", "phase-transition-layers", "zero-stages"),
    ],
)
def test_an_unknown_argument_of_megatron_is_refused_by_name(flag: str) -> None:
    line = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
        f"--max-position-embeddings 128 --vocab-size 1000 --{flag} 2"
    )
    with pytest.raises(UsageError, match=f"got {flag.replace('-', '_')}"):
        architecture(line)


def test_a_toml_file_of_torchtitan_names_its_model(tmp_path: Path) -> None:
    path = tmp_path / "llama3_70b.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "70B"\n[training]\nseq_len = 4096\n')
    assert architecture(path).parameters == PUBLISHED["llama3-70b"]
    assert architecture(path).sequence == 4096


def test_each_built_in_model_reads_well() -> None:
    assert len(names()) > 50
    assert all(architecture(name).flops() > 0 for name in names())


def test_the_command_lists_large_models_and_opens_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    workloads_command(name=str(path), json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["models"][0]["parameters"] == PUBLISHED["llama3-8b"]
    workloads_command(name="deepseek-v3")
    assert "671.03   37.55" in capsys.readouterr().out


def test_older_configs_with_their_own_names_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    gpt2 = {"model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1,
            "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
            "n_positions": 1024, "summary_type": "cls_index", "vocab_size": 50257}  # fmt: skip
    path.write_text(json.dumps(gpt2))
    assert architecture(path).parameters == 124_439_808
    bloom = {"model_type": "bloom", "apply_residual_connection_post_layernorm": False,
             "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "n_embed": 14336,
             "masked_softmax_fusion": True, "n_layer": 70, "num_attention_heads": 112,
             "pretraining_tp": 4, "slow_but_exact": False, "vocab_size": 250880,
             "offset_alibi": 100, "seq_length": 2048, "skip_bias_add": True}  # fmt: skip
    path.write_text(json.dumps(bloom))
    assert architecture(path).parameters == PUBLISHED["bloom-176b"]


def test_configs_of_experts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    qwen = {"model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
            "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
            "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False,
            "tie_word_embeddings": False, "vocab_size": 151936}  # fmt: skip
    path.write_text(json.dumps(qwen))
    assert architecture(path).parameters == PUBLISHED["qwen3-30b-a3b"]
    oss = {"model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
           "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
           "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64,
           "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
           "num_local_experts": 32, "sliding_window": 128, "swiglu_limit": 7.0,
           "tie_word_embeddings": False, "vocab_size": 201088}  # fmt: skip
    path.write_text(json.dumps(oss))
    assert architecture(path).parameters == PUBLISHED["gpt-oss-20b"]


def test_absurd_dimensions_are_refused_at_once(tmp_path: Path) -> None:
    plain = {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 32000,
        "num_attention_heads": 64, "num_hidden_layers": 80,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(plain | {"num_hidden_layers": 10**9}), encoding="utf-8")
    with pytest.raises(UsageError, match="layers: expected at most 10,000, got 1,000,000,000"):
        architecture(file)
    file.write_text(json.dumps(plain | {"num_attention_heads": 63}), encoding="utf-8")
    with pytest.raises(UsageError, match=r"hidden_size 8192, got 63\. The nearest is 64"):
        architecture(file)
    file.write_text(json.dumps(plain | {"num_key_value_heads": 7}), encoding="utf-8")
    named = (
        r"config\.json: num_key_value_heads: expected a divisor of 64 heads, got 7\. The nearest"
    )
    with pytest.raises(UsageError, match=named):
        architecture(file)


def test_gpt3_comes_in_the_sizes_of_its_paper() -> None:
    sizes = {"125m": 125e6, "350m": 356e6, "760m": 760e6, "1.3b": 1.3e9, "2.7b": 2.65e9}
    for name, parameters in sizes.items():
        assert architecture(f"gpt3-{name}").parameters == pytest.approx(parameters, rel=0.03)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (f"{SMALL}kv_heds = 2\n", "expected fields among .*, got 'kv_heds'. The nearest is kv_h"),
        (SMALL.replace("heads = 4\n", ""), "expected heads, which it lacks"),
        (f"{SMALL}moe = {{ experts = 4 }}\n", "moe: expected top_k, ffn, which it lacks"),
        ('like = "none"\n', "like: expected a model above, got 'none'"),
    ],
)
def test_a_mistake_in_a_built_in_model_names_its_file_and_its_table(
    table: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text(f'["mine-1b"]\n{table}')
    monkeypatch.setattr(architecture_files, "_FOLDER", tmp_path)
    architecture_files._tables.cache_clear()
    architecture_files._built_in.cache_clear()
    try:
        with pytest.raises(UsageError, match=rf"mine.toml: \[mine-1b\]: {problem}"):
            names()
    finally:
        monkeypatch.undo()
        architecture_files._tables.cache_clear()
        architecture_files._built_in.cache_clear()
